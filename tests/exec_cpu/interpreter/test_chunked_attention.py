"""Plays chunked attention and checks gradients (autograd's), memory and copies (the program's), and recompute.

Recompute has to give forward's bits.
"""

from typing import Any

import pytest
import torch

from memo_sim.contract.plan import Decisions
from memo_sim.program.analysis.columns import expand
from memo_sim.program.analysis.liveness import live_bytes, liveness, peak
from memo_sim.program.ir.instruction import Lane
from memo_sim.program.ir.work import Copy
from memo_sim.program.lower import lower
from tests.exec_cpu.interpreter.replayed import assert_gradients_equal_autograds, replayed
from tests.exec_cpu.small import MODELS, decide, one_step


def in_chunks(name: str, **changes: Any) -> Decisions:
    """Return a plan with three chunks, of which the last is shorter."""
    fields: dict[str, Any] = {"seq_tokens": 320, "micro_batch": 1, "global_batch": 2}
    return decide(MODELS[name], **(fields | {"recompute": "full", "attention_chunk_tokens": 128} | changes))


@pytest.mark.parametrize("changes", [{}, {"swapped_tokens": 320, "mlp_chunk_tokens": 128}], ids=["kept", "swapped"])
@pytest.mark.parametrize("name", MODELS)
def test_gradients_equal_autograd(name: str, changes: dict[str, Any]) -> None:
    assert_gradients_equal_autograds(in_chunks(name, **changes))


@pytest.mark.parametrize("states", ["fp32", "host"])
def test_swapped_inputs_change_no_bit(states: str) -> None:
    _, wanted = one_step(in_chunks("llama", states=states))
    _, found = one_step(in_chunks("llama", states=states, swapped_tokens=320))
    assert [key for key in wanted if not torch.equal(found[key], wanted[key])] == []


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_forward_is_played_again_bit_for_bit(dtype: str) -> None:
    decisions = in_chunks("qwen3", dtype=dtype, global_batch=1)
    again = replayed(decisions, ".c", ("attention", "attention.merge", "linear"), ("out", "lse"))
    assert {f"rec/{name}" for name in ("qkv.c2", "attn.c1", "attn.earlier.c2.k1", "attn.merge.c2.k0")} <= again


def test_memory_is_the_programs_and_falls() -> None:
    peaks = []
    for chunk in (0, 128):
        fields: dict[str, Any] = {"seq_tokens": 1024, "swapped_tokens": 1024, "mlp_chunk_tokens": 128}
        decisions = in_chunks("llama", attention_chunk_tokens=chunk, states="host", **fields)
        record, _ = one_step(decisions)
        program = lower(decisions)[0]
        lives = liveness(program, expand(program))
        assert record.peak_device_bytes == peak(live_bytes(lives, device=True)).bytes
        moved = sum(i.work.bytes for _, i in program.walk() if i.lane is Lane.H2D and isinstance(i.work, Copy))
        assert record.moved.h2d == moved
        peaks.append(record.peak_device_bytes)
    assert peaks[1] < peaks[0]
