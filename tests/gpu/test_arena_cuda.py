"""The planned arena and the recording of requests on a CUDA device. Not yet run on a GPU."""

import ast
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch

from memo_exec.interpreter.interpreter import Interpreter
from memo_exec.observe.memory_history import observe_cuda
from memo_exec.training import weights
from memo_sim.memory.place import place
from memo_sim.program.arena.library_workspaces import results_bytes
from memo_sim.program.arena.requests import arena_requests
from memo_sim.program.lower import lower
from tests.exec_cpu.plans import placed, write_plan
from tests.exec_cpu.small import batch, gradients, llama, scalars
from tests.gpu.test_interpreter_cuda import POLICIES, on_cuda, steps

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]


@pytest.mark.parametrize("policy", POLICIES)
def test_an_arena_gives_the_bits_of_the_caching_store(policy: dict[str, Any]) -> None:
    decisions = on_cuda("torch-flash", **policy)
    plain, wanted = steps(decisions)
    record, found = steps(decisions, placement=placed(decisions))
    assert record.loss == plain.loss
    assert all(torch.equal(found[name], wanted[name]) for name in wanted)
    assert record.peak_device_bytes == placed(decisions).arena_bytes


@pytest.mark.parametrize("policy", POLICIES)
def test_after_the_first_step_no_segment_comes_or_goes(policy: dict[str, Any]) -> None:
    decisions = on_cuda("torch-flash", **policy)
    with Interpreter(decisions, lower(decisions)[0], device="cuda", placement=placed(decisions)) as interpreter:
        batches = batch(decisions)
        found = []
        for step in (1, 2, 3):
            interpreter.run_step(batches, scalars(batches, step=step))
            stats = torch.cuda.memory_stats()
            found.append([stats[f"segment.all.{key}"] for key in ("current", "allocated", "freed")])
            found[-1].append(torch.cuda.memory_reserved())
    assert found[0] == found[1] == found[2]


def test_library_results_outside_the_arena_are_as_planned() -> None:
    """An arena without slots for them gives the same bits; torch allocates the arena and those bytes, and no more."""
    decisions = on_cuda("torch-flash", recompute="full", seq_tokens=16_384, micro_batch=1, global_batch=1)
    (program,) = lower(decisions)
    lean = place(arena_requests(program, decisions), solver="greedy")
    _, wanted = steps(decisions, placement=placed(decisions))
    with Interpreter(decisions, program, device="cuda", placement=lean) as interpreter:
        weights.initialize(interpreter, seed=1)
        batches = batch(decisions)
        interpreter.run_step(batches, scalars(batches, step=1, clip=1.0))
        before = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        interpreter.run_step(batches, scalars(batches, step=2, clip=1.0))
        asked = torch.cuda.max_memory_allocated() - before
        found = gradients(interpreter)
    assert before >= lean.arena_bytes
    assert 0 < asked <= results_bytes(program) * 1.02 + 2**20
    assert all(torch.equal(found[name], wanted[name]) for name in wanted)


def test_the_slab_is_pinned_at_its_exact_size() -> None:
    decisions = on_cuda("torch-flash", swapped_tokens=256)
    with Interpreter(decisions, lower(decisions)[0], device="cuda", placement=placed(decisions)) as interpreter:
        assert interpreter.slab.memory.numel() == interpreter.slab.bytes
        assert all(view.is_pinned() for view in interpreter.slab.views.values())


REPLAYED = """
import sys
from pathlib import Path
from memo_exec.commands.run_options import RunOptions
from memo_exec.commands.run import run
outcome = run(Path(sys.argv[1]), RunOptions(steps=5, replay_allocator=sys.argv[2] == "yes"))
print(outcome.comparison.losses, outcome.comparison.allocator)
"""


CHUNKS = {"seq_tokens": 512, "micro_batch": 1, "global_batch": 1, "attention_chunk_tokens": 128}
"""Attention in chunks, whose buffers move between lanes."""


@pytest.mark.parametrize(("memory_policy", "changes"), [("planned", {}), ("caching", {}), ("caching", CHUNKS)])
def test_the_allocator_below_torch_serves_every_request(
    tmp_path: Path, memory_policy: str, changes: dict[str, Any]
) -> None:
    """Each run is in its own process, because torch cannot change its allocator later."""
    decisions = on_cuda("torch-flash", recompute="full", memory_policy=memory_policy, **changes)
    of_bytes = msgspec.structs.replace(decisions, model=llama(layers=4, vocab=256))
    plan = write_plan(tmp_path / "plan.json", of_bytes)
    env = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])}
    found = []
    for answer in ("no", "yes"):
        command = [sys.executable, "-c", REPLAYED, str(plan), answer]
        done = subprocess.run(command, capture_output=True, text=True, env=env, check=False)
        assert done.returncode == 0, done.stderr
        found.append(done.stdout)
    losses, counts = found[1].split("] ")
    assert found[0].startswith(losses)
    served = ast.literal_eval(counts)
    kind = "lent" if memory_policy == "planned" else "replayed"
    assert served.pop(kind) > 0
    if changes:  # buffers that a copy lane asks for first are those of another stream
        served = {name: served[name] for name in ("other_size", "beyond_plan", "slot_taken", "unknown_frees")}
    assert set(served.values()) == {0}


def test_recorded_requests_equal_the_programs() -> None:
    decisions = on_cuda("torch-flash", recompute="full", seq_tokens=65_536, micro_batch=1, global_batch=1)
    found = observe_cuda(decisions, lower(decisions)[0])
    assert found.ratio == pytest.approx(1, abs=0.02)
    assert found.unexplained == ()
