"""Delayed scaling over steps: scales survive a checkpoint, and begin anew after a run of another recipe."""

from pathlib import Path
from typing import Any

import torch

from memo_exec.distributed.world import World
from memo_exec.interpreter.interpreter import Interpreter
from memo_exec.training import checkpoint, checkpoint_shards
from memo_sim.contract.plan import Decisions
from memo_sim.program.lower import lower
from memo_sim.program.operators.fp8_operands import HISTORY, SCALES
from tests.exec_cpu.small import batch, decide, llama, play, scalars

FIELDS: dict[str, Any] = {"dtype": "bf16", "fp8_layouts": "tn", "recompute": "none", "seq_tokens": 64}


def step(interpreter: Interpreter, decisions: Decisions, number: int) -> float:
    batches = batch(decisions, seed=number)
    return interpreter.run_step(batches, scalars(batches, step=number)).loss


def test_a_run_that_was_resumed_goes_on_with_its_scales(tmp_path: Path) -> None:
    decisions = decide(llama(layers=1), fp8="delayed", **FIELDS)
    with play(decisions) as whole:
        step(whole, decisions, 1)
        checkpoint_shards.write(tmp_path / "state", checkpoint.state_of(whole), World())
        wanted = step(whole, decisions, 2)
        with Interpreter(decisions, lower(decisions)[0]) as resumed:
            checkpoint.load_state(tmp_path, resumed, World())
            assert step(resumed, decisions, 2) == wanted
            for name in (SCALES, HISTORY):
                assert torch.equal(resumed.buffer(name), whole.buffer(name))
        history = whole.buffer(HISTORY)
        assert history[:, :2].all()
        assert not history[:, 2:].any()


def test_scales_begin_anew_after_a_run_of_another_recipe(tmp_path: Path) -> None:
    before, after = (decide(llama(layers=1), fp8=recipe, **FIELDS) for recipe in ("tensor", "delayed"))
    with play(before) as other:
        checkpoint_shards.write(tmp_path / "state", checkpoint.state_of(other), World())
    with Interpreter(after, lower(after)[0]) as resumed:
        checkpoint.load_state(tmp_path, resumed, World())
        assert bool((resumed.buffer(SCALES) == 1).all())
        assert not resumed.buffer(HISTORY).any()
