"""Plays row-wise recompute with attention in chunks: gradients, what is rebuilt, memory and copies."""

from typing import Any

import pytest
import torch

from memo_exec.kernels import KERNELS
from memo_sim.contract.plan import Decisions
from tests.exec_cpu.interpreter.programs_bytes import assert_copies_are_the_programs, assert_peak_is_the_programs
from tests.exec_cpu.interpreter.replayed import assert_gradients_equal_autograds, replayed
from tests.exec_cpu.small import MODELS, decide, one_step


def chunked(name: str, **changes: Any) -> Decisions:
    """Return a plan with three chunks, of which the last is shorter; a chunk is a row block."""
    fields: dict[str, Any] = {"seq_tokens": 320, "micro_batch": 1, "global_batch": 2}
    cut = {"recompute": "rowwise", "attention_chunk_tokens": 128, "mlp_chunk_tokens": 128}
    return decide(MODELS[name], **(fields | cut | changes))


@pytest.mark.parametrize(
    "name", [name if name in ("gpt2", "qwen3") else pytest.param(name, marks=pytest.mark.slow) for name in MODELS]
)
def test_gradients_equal_autograd(name: str) -> None:
    assert_gradients_equal_autograds(chunked(name))


def test_chunks_of_several_row_blocks_and_sequences() -> None:
    assert_gradients_equal_autograds(chunked("qwen3", seq_tokens=384, micro_batch=2, attention_chunk_tokens=256))


@pytest.mark.parametrize("swapped", [128, pytest.param(320, marks=pytest.mark.slow)])
def test_swapping_changes_no_bit_and_moves_the_programs_bytes(swapped: int) -> None:
    _, wanted = one_step(chunked("llama"))
    decisions = chunked("llama", swapped_tokens=swapped)
    record, found = one_step(decisions)
    assert [key for key in wanted if not torch.equal(found[key], wanted[key])] == []
    assert_copies_are_the_programs(record, decisions)


def test_queries_and_keys_are_rebuilt_bit_for_bit() -> None:
    decisions = chunked("qwen3", dtype="bf16", global_batch=1, swapped_tokens=320)
    ops = [op for op in KERNELS if op not in ("d2h", "h2d")]
    again = replayed(decisions, ".c", ops, ("out", "qkv", "stats"))
    assert {f"rec/{op}.c{i}" for op in ("norm1", "qkv", "qk_norm", "rotary") for i in range(3)} <= again
    assert not any("attn" in name for name in again)


def test_memory_is_the_programs_and_falls() -> None:
    peaks = []
    for chunk in (0, 128):
        sizes: dict[str, Any] = {"seq_tokens": 512, "swapped_tokens": 512, "global_batch": 1}
        decisions = chunked("llama", attention_chunk_tokens=chunk, **sizes)
        record, _ = one_step(decisions)
        assert_peak_is_the_programs(record, decisions)
        peaks.append(record.peak_device_bytes)
    assert peaks[1] < peaks[0]
