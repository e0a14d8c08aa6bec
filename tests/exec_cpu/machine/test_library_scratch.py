"""What a CPU's matrix library allocates inside one instruction is measured, and counted in the reserve."""

import os
from dataclasses import replace

import pytest
import torch

from memo_exec.kernels import KERNELS, Call
from memo_exec.machine import preflight
from memo_exec.machine.library_scratch import library_scratch
from memo_exec.machine.memory_budget import LIBRARIES, RESULTS, TILES, needs_of
from memo_sim.contract.errors import CannotRun
from memo_sim.program.arena.library_workspaces import results_bytes
from memo_sim.program.lower import lower
from tests.exec_cpu.machine.test_preflight import CPU
from tests.exec_cpu.plans import byte_decisions, placed
from tests.exec_cpu.small import decide, llama

PLANTED = 2**28
DECISIONS = decide(llama(), dtype="bf16", states="bf16")


@pytest.mark.parametrize("op", ["linear", "linear.dgrad", "linear.wgrad"])
def test_the_largest_allocation_of_any_product_is_found(op: str) -> None:
    (program,) = lower(DECISIONS)

    def hungry(call: Call) -> None:
        torch.empty(PLANTED, dtype=torch.uint8)
        torch.empty(PLANTED // 2, dtype=torch.uint8)
        KERNELS[op](call)

    found = library_scratch(DECISIONS, program, 1, kernels={**KERNELS, op: hungry})
    assert found[op] == PLANTED
    assert all(size < PLANTED for other, size in found.items() if other != op)


def test_measuring_leaves_the_process_as_it_was(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("KINETO_LOG_LEVEL", raising=False)
    threads = torch.get_num_threads()
    library_scratch(DECISIONS, lower(DECISIONS)[0], threads + 1)
    assert torch.get_num_threads() == threads
    assert "KINETO_LOG_LEVEL" not in os.environ


def test_the_reserve_counts_what_libraries_take_beyond_tiles_and_results() -> None:
    (program,) = lower(DECISIONS)
    tiles = needs_of(program, CPU).reserve[TILES]
    assert needs_of(program, CPU, library_scratch={"linear": tiles}).reserve == {TILES: tiles}
    assert needs_of(program, CPU, library_scratch={"linear": tiles + 1}).reserve == {LIBRARIES: tiles + 1}
    results = results_bytes(program)
    for op, size in (("attention.bwd", PLANTED), ("linear", PLANTED - results)):  # a product needs no results
        found = needs_of(program, CPU, placed(DECISIONS), library_scratch={op: PLANTED})
        assert found.reserve == {RESULTS: results, LIBRARIES: size}


def test_a_plan_that_libraries_leave_no_memory_for_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    decisions = byte_decisions(dtype="bf16")
    (program,) = lower(decisions)
    scratch = {"linear": PLANTED}
    monkeypatch.setattr(preflight, "library_scratch", lambda *arguments: scratch)
    fits = needs_of(program, CPU, library_scratch=scratch)
    free = fits.device_bytes + fits.host_bytes + fits.reserve_bytes
    assert preflight.check(decisions, program, replace(CPU, host_available_bytes=free)) == fits
    with pytest.raises(CannotRun, match=LIBRARIES):
        preflight.check(decisions, program, replace(CPU, host_available_bytes=free - 1))
