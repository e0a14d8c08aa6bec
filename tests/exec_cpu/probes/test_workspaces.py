"""Calibration measures the scratch of kernels on a GPU; here a fake allocator's counters stand for one."""

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from memo_exec.probes import grid as grids
from memo_exec.probes import workspaces
from memo_exec.probes.operators import Operator, operators_of
from memo_exec.probes.workspaces import ROUNDING_BYTES, Workspace, measure
from memo_sim.program.ir.work import Attention
from memo_sim.program.operators.workspaces import attention_workspace_bytes
from tests.exec_cpu.small import decide, llama

GRID = replace(grids.CUDA, attention_lengths=(128, 131_072), head_dims=(16,))


class Bench:
    """A fake bench whose kernels allocate what a library would, and ``extra`` bytes in backward."""

    device = SimpleNamespace(type="cuda")

    def __init__(self, extra: int = 0) -> None:
        self.extra = extra
        self.live = self.peak = 2**20
        self.played: list[Operator] = []

    def playing(self, operator: Operator) -> Any:
        def play() -> None:
            self.played.append(operator)
            work, groups = operator.instruction.work, operator.decisions.kernels.head_groups
            taken = 0
            if isinstance(work, Attention):
                taken = attention_workspace_bytes(work, groups) + (self.extra if work.backward else 0)
            self.peak = max(self.peak, self.live + taken)

        return play


def measured(monkeypatch: pytest.MonkeyPatch, bench: Bench, kernels: list[str]) -> list[Workspace]:
    def reset(device: object) -> None:
        bench.peak = bench.live

    monkeypatch.setattr(torch.cuda, "synchronize", lambda device: None)
    monkeypatch.setattr(torch.cuda, "reset_peak_memory_stats", reset)
    monkeypatch.setattr(torch.cuda, "memory_allocated", lambda device: bench.live)
    monkeypatch.setattr(torch.cuda, "max_memory_allocated", lambda device: bench.peak)
    operators = operators_of([decide(llama(), seq_tokens=256), decide(llama(), seq_tokens=512)])
    given: Any = bench
    return measure(given, GRID, kernels, operators)


def test_every_kernel_is_measured_with_grouped_queries_and_head_groups(monkeypatch: pytest.MonkeyPatch) -> None:
    bench = Bench()
    found = measured(monkeypatch, bench, ["torch-flash", "torch-cudnn"])
    attention = [each for each in found if "tokens" in each.name]
    assert len(attention) == 2 * 2 * 2 * 2  # kernels, passes, heads of keys, head groups
    assert all(each.measured == each.declared > 0 for each in attention)
    assert not any(each.exceeds for each in found)
    others = {each.name: each for each in found if each not in attention}
    assert {"linear (torch)", "rms_norm (torch)", "swiglu (torch)"} <= others.keys()
    assert all((each.measured, each.declared) == (0, 0) for each in others.values())
    assert len(bench.played) == 2 * len(found)  # one call warms up
    played = {o.instruction.op: o.decisions.seq_tokens for o in bench.played if o.instruction.op == "rms_norm"}
    assert played == {"rms_norm": 512}  # the largest


def test_scratch_beyond_the_declared_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    for extra, wanted in ((ROUNDING_BYTES, 0), (ROUNDING_BYTES + 1, 4)):
        exceeding = [each for each in measured(monkeypatch, Bench(extra), ["torch-flash"]) if each.exceeds]
        assert len(exceeding) == wanted
        assert all("backward" in each.name and "torch-flash" in each.name for each in exceeding)
    assert workspaces.Workspace("x", 5, 7).text() == "7 bytes, 5 declared"


def test_a_cpu_has_none() -> None:
    bench: Any = SimpleNamespace(device=torch.device("cpu"))
    assert measure(bench, GRID, ["torch-flash-cpu"], []) == []
