"""When the search cuts the MLP into row blocks, how many blocks it takes, and what the answer says about them."""

from __future__ import annotations

import re

import msgspec
import pytest

from memo_sim.answers.what_if import what_if
from memo_sim.contract.catalog import load_cluster, load_model
from memo_sim.contract.errors import UsageError
from memo_sim.planning.presets import (
    FULL_RECOMPUTE,
    INPUTS_SWAPPED_MLP_IN_BLOCKS,
    MLP_IN_BLOCKS,
    ROWWISE_KEPT,
    ROWWISE_PARTLY_SWAPPED,
    ROWWISE_SWAPPED,
    Policy,
)
from memo_sim.planning.question import Pins, Question
from memo_sim.planning.search import play, search
from memo_sim.planning.space import candidates, policies
from tests.refusals import refused


def ask(seq_tokens: int, *, system: str = "any", **pins) -> Question:
    """Return a question about three layers of Llama 3 on one device, without attention chunks."""
    cluster, hardware = load_cluster("h100-1x8")
    one = msgspec.structs.replace(cluster, name="h100-1x1", devices_per_node=1)
    model = msgspec.structs.replace(load_model("llama3-8b"), layers=3, vocab=32768)
    pins = {"recompute": "full", "attention_chunk_tokens": 0, **pins}
    return Question(model, one, hardware, seq_tokens, system=system, pins=Pins(**pins))


def test_row_blocks_cost_no_time_and_save_memory() -> None:
    found = {e.policy: e for e in search(ask(1 << 17), prune=False).ranked}
    assert set(found) == {FULL_RECOMPUTE, MLP_IN_BLOCKS}
    whole, cut = found[FULL_RECOMPUTE].prediction, found[MLP_IN_BLOCKS].prediction
    assert cut.step_s < whole.step_s
    assert cut.peak_device_bytes < 0.75 * whole.peak_device_bytes


def test_one_device_goes_further_than_with_the_mlp_whole() -> None:
    """The MLP's wide tensors alone exceed the device at this length; swapping two of three inputs is not enough."""
    found = search(ask(1 << 19), prune=False)
    assert found.best is not None
    assert found.best.policy == MLP_IN_BLOCKS
    assert {e.prediction.status for e in found.ranked if not e.policy.mlp_blocks} == {"gpu_oom"}


@pytest.mark.parametrize("tokens", [16, 48, 256])
def test_more_mlp_blocks_do_not_lower_the_peak(tokens: int) -> None:
    """Twice as many blocks do not lower the peak and are not faster; half as many need more memory.

    This holds when attention's workspace lies in the arena. Outside it, twice as many blocks would still save a little.
    """
    question = ask(tokens * 1024, alpha=0.0, replay_allocator=True)
    base = next(c.base for c in candidates(question)[0] if c.policy == MLP_IN_BLOCKS)

    def played(rows: int) -> tuple[int, float]:
        prediction = play(question, msgspec.structs.replace(base, mlp_chunk_tokens=rows)).prediction
        return prediction.peak_device_bytes, prediction.step_s or 0.0

    chunk = base.mlp_chunk_tokens
    assert chunk == max(4096, tokens * 128)
    (peak, step_s), (finer, finer_s), (coarser, _) = played(chunk), played(chunk // 2), played(2 * chunk)
    assert finer <= peak < coarser
    assert finer_s >= 0.998 * step_s
    if tokens >= 32:
        assert finer == peak


def test_short_sequences_and_published_systems_have_no_row_blocks() -> None:
    assert {c.policy for c in candidates(ask(4096))[0]} == {FULL_RECOMPUTE, Policy("full", 1.0)}
    for system in ("full-recompute", "megatron-lm", "fsdp", "memo"):
        assert policies(ask(1 << 20, system=system)) == (FULL_RECOMPUTE,)


def test_a_pinned_chunk() -> None:
    both = (MLP_IN_BLOCKS, INPUTS_SWAPPED_MLP_IN_BLOCKS)
    assert policies(ask(1 << 19, mlp_chunk_tokens=8192)) == both
    assert policies(ask(1 << 19, mlp_chunk_tokens=8192, recompute=None)) == (
        *(ROWWISE_KEPT, ROWWISE_SWAPPED, ROWWISE_PARTLY_SWAPPED),
        *both,
    )
    assert policies(ask(1 << 19, mlp_chunk_tokens=8192, alpha=1.0)) == both[1:]
    assert policies(ask(1 << 19, mlp_chunk_tokens=8192, system="full-recompute")) == both[:1]
    assert {c.base.mlp_chunk_tokens for c in candidates(ask(1 << 19, mlp_chunk_tokens=8192))[0]} == {8192}
    assert not any(p.mlp_blocks for p in policies(ask(1 << 19, mlp_chunk_tokens=0, recompute=None)))
    with refused(UsageError, got="8192", hint=("--recompute full", "--mlp-chunk")):
        policies(ask(1 << 19, mlp_chunk_tokens=8192, recompute="none"))


def test_an_impossible_pinned_chunk_is_named_as_the_reason() -> None:
    why = what_if(ask(1 << 17, mlp_chunk_tokens=1000)).result.why
    assert re.search(r"MLP.* 128 tokens", why[0])


def test_the_answer_names_the_gain() -> None:
    (line,) = [line for line in what_if(ask(1 << 17)).result.why if line.startswith("The MLP")]
    assert "8 row blocks of 16k tokens" in line
    assert "undivided, the device would need" in line
    answer = what_if(ask(1 << 19))
    (line,) = [line for line in answer.result.why if line.startswith("The MLP")]
    assert "undivided it does not fit (short by " in line
    assert answer.result.best is not None
    assert answer.result.best.mlp_chunk_tokens == 65536
