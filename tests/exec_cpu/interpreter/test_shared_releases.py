"""Tests that a buffer used by several lanes is released by all of them.

On CUDA the allocator has to know every stream that used a buffer.
"""

from collections import defaultdict
from collections.abc import Iterable

import pytest
from torch import Tensor

from memo_exec.distributed.mesh import MeshCoordinates
from memo_exec.distributed.own_program import rank_program
from memo_exec.interpreter.interpreter import Interpreter
from memo_exec.interpreter.lanes import HostTimekeeper
from memo_exec.kernels import KERNELS, Call
from memo_sim.contract.plan import Layout
from memo_sim.program.analysis.communicators import group_keys
from memo_sim.program.ir.instruction import Lane
from tests.exec_cpu.small import batch, decide, gpt, one_step, scalars


class Releases:
    """Records every release: the lanes by shape of the buffer, (tokens, features)."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.found: dict[tuple[int, ...], set[Lane]] = defaultdict(set)
        monkeypatch.setattr(HostTimekeeper, "release", self)

    def __call__(self, tensor: Tensor, lanes: Iterable[Lane]) -> None:
        self.found[tuple(tensor.shape)] |= set(lanes)


def nothing(call: Call) -> None:
    """Compute nothing: the test looks only at the lives of buffers."""


def test_exchange_buffers_are_released_by_compute_and_by_what_sends_them(monkeypatch: pytest.MonkeyPatch) -> None:
    releases = Releases(monkeypatch)
    model, layout = gpt(), Layout(cp=4)
    decisions = decide(model, layout=layout, seq_tokens=512, micro_batch=1)
    program = rank_program(decisions, MeshCoordinates(layout))
    groups = dict.fromkeys(group_keys(program))
    played = dict.fromkeys(KERNELS, nothing)
    with Interpreter(decisions, program, groups=groups, kernels=played) as interpreter:  # type: ignore[arg-type]
        batches = batch(decisions)
        interpreter.run_step(batches, scalars(batches))
    ring = (decisions.local_tokens, 2 * model.kv_width)
    assert releases.found[ring] == {Lane.COMPUTE, Lane.P2P}
    assert all(len(lanes) > 1 for lanes in releases.found.values())


def test_one_device_has_no_such_buffers(monkeypatch: pytest.MonkeyPatch) -> None:
    releases = Releases(monkeypatch)
    one_step(decide(gpt(), swapped_tokens=128, recompute="tokenwise"))
    assert releases.found == {}
