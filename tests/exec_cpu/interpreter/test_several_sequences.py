"""Gradients of micro-batches of several sequences that are divided into subsequences, or whose attention is in chunks.

A rank's rows are then part by part, each part with its tokens of every sequence.
"""

from __future__ import annotations

from typing import Any

import msgspec
import pytest
import torch

from memo_sim.contract.plan import Decisions, Layout
from memo_sim.program.layout.partition import partition
from tests.exec_cpu.interpreter.replayed import assert_gradients_equal_autograds
from tests.exec_cpu.small import MODELS, WINDOWED_MODELS, decide, one_step

SUBSEQUENCES: dict[str, dict[str, Any]] = {
    "keep": {"recompute": "none"},
    "full": {"recompute": "full"},
    "swap": {"recompute": "none", "swapped_tokens": 640},
    "swap in a window": {"recompute": "none", "swapped_tokens": 640, "offload_window": 1},
    "tokenwise": {"recompute": "tokenwise", "swapped_tokens": 256, "subsequence_swapped_tokens": (256, 0)},
}
QUICK = {("gpt2", "keep"), ("qwen3", "tokenwise"), ("llama", "swap in a window")}


def divided(name: str, policy: str, **changes: Any) -> Decisions:
    """Return a plan of two sequences a micro-batch, in two subsequences, of which the last is shorter."""
    fields = {"seq_tokens": 320, "micro_batch": 2, "global_batch": 4, "layout": Layout(subsequences=2)}
    return decide(MODELS[name], **(fields | SUBSEQUENCES[policy] | changes))


def in_chunks(name: str, **changes: Any) -> Decisions:
    """Return a plan of two sequences a micro-batch in three chunks, of which the last is shorter."""
    fields: dict[str, Any] = {"seq_tokens": 320, "micro_batch": 2, "global_batch": 4, "recompute": "full"}
    return decide(MODELS[name], **(fields | {"attention_chunk_tokens": 128} | changes))


@pytest.mark.parametrize(
    ("name", "policy"),
    [
        pytest.param(name, policy, marks=() if (name, policy) in QUICK else pytest.mark.slow)
        for name in MODELS
        for policy in SUBSEQUENCES
    ],
)
def test_subsequences_have_autograds_gradients(name: str, policy: str) -> None:
    assert_gradients_equal_autograds(divided(name, policy))


@pytest.mark.parametrize("sequences", [2, pytest.param(3, marks=pytest.mark.slow)])
@pytest.mark.parametrize(
    "name", [each if each == "qwen3" else pytest.param(each, marks=pytest.mark.slow) for each in MODELS]
)
def test_chunks_have_autograds_gradients(name: str, sequences: int) -> None:
    more = {"swapped_tokens": 320 * sequences, "mlp_chunk_tokens": 128}
    assert_gradients_equal_autograds(in_chunks(name, micro_batch=sequences, global_batch=2 * sequences, **more))


def test_more_subsequences_than_runs_of_sums_have_autograds_gradients() -> None:
    """The last of eight subsequences reads the earlier ones in seven calls, and their sums lie in several runs."""
    layout = Layout(subsequences=8, partition="length")
    chosen = divided("llama", "keep", layout=layout, seq_tokens=1024, global_batch=2)
    assert partition(chosen) == (256,) * 8
    assert_gradients_equal_autograds(chosen)


def test_swapping_changes_no_bit() -> None:
    _, wanted = one_step(divided("llama", "keep"))
    _, found = one_step(divided("llama", "swap"))
    assert [key for key in wanted if not torch.equal(found[key], wanted[key])] == []


@pytest.mark.parametrize("window", [20, 200])
def test_windows_in_subsequences_have_autograds_gradients(window: int) -> None:
    """Of a window that is longer than a subsequence, keys of several earlier ones are copied together."""
    model = msgspec.structs.replace(WINDOWED_MODELS["window-sinks"], window=window)
    fields: dict[str, Any] = {"seq_tokens": 448, "micro_batch": 2, "layout": Layout(subsequences=4)}
    assert_gradients_equal_autograds(decide(model, **fields))
