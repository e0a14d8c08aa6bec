"""When the search plays attention in chunks, how many chunks it takes, and what the answer says about them."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import msgspec
import pytest

from memo_sim.answers.what_if import what_if
from memo_sim.contract.catalog import load_cluster, load_model
from memo_sim.contract.errors import Infeasible, UsageError
from memo_sim.planning.lower_bounds import LowerBounds
from memo_sim.planning.presets import INPUTS_SWAPPED_MLP_IN_BLOCKS, LEAST_MEMORY, ROWWISE_IN_CHUNKS, Policy
from memo_sim.planning.question import Pins, Question
from memo_sim.planning.search import play, search
from memo_sim.planning.space import candidates, last_resorts, policies
from memo_sim.program.layout.attention_chunks import MOST_CHUNKS
from tests.refusals import refused

K = 1024
LONGEST = 1024 * K
"""Tokens that fit in the finest chunks and blocks alone."""
CHUNKED = Policy("full", 1.0, attention_chunks=True)


def ask(seq_tokens: int, *, system: str = "any", devices: int = 1, **pins) -> Question:
    """Return a question about three layers of Llama 3."""
    cluster, hardware = load_cluster("h100-1x8")
    some = msgspec.structs.replace(cluster, name=f"h100-1x{devices}", devices_per_node=devices)
    model = msgspec.structs.replace(load_model("llama3-8b"), layers=3, vocab=32768)
    return Question(model, some, hardware, seq_tokens, system=system, pins=Pins(**{"recompute": "full", **pins}))


@pytest.mark.parametrize(
    ("tokens", "chunk"), [(64 * K, 0), (100 * K, 64 * K), (600 * K, 64 * K), (4096 * K, 64 * K), (8192 * K, 128 * K)]
)
def test_fpdt_has_chunks_of_64k_for_longer_sequences(tokens: int, chunk: int) -> None:
    """FPDT has at most ``MOST_CHUNKS`` chunks; longer sequences get longer chunks."""
    found, _ = candidates(ask(tokens, system="deepspeed-fpdt", devices=8, ulysses=8, recompute=None))
    assert {c.base.attention_chunk_tokens for c in found} == {chunk}
    assert {c.policy.attention_chunks for c in found} == {chunk > 0}
    assert tokens <= MOST_CHUNKS * max(chunk, 64 * K)
    # A rank has an eighth of a chunk: an MLP block holds half of that, a loss chunk a 32nd.
    mine = max(chunk, 64 * K) // 8
    assert {(c.base.mlp_chunk_tokens, c.base.loss_chunk_tokens) for c in found} == {(mine // 2, mine // 32)}


def test_fpdt_has_no_chunks_when_one_block_holds_all() -> None:
    """2K tokens are 256 per rank: one attention chunk, one MLP block and one loss chunk each hold them all."""
    (found,), _ = candidates(ask(2 * K, system="deepspeed-fpdt", devices=8, ulysses=8, recompute=None))
    assert found.policy == Policy("full", 1.0)
    assert found.base.loss_chunk_tokens == found.base.mlp_chunk_tokens == found.base.attention_chunk_tokens == 0


@pytest.mark.parametrize(("tokens", "rings"), [(1024 * K, {1}), (2048 * K, {1, 2, 4, 8})])
def test_others_have_eight_chunks_of_long_sequences(tokens: int, rings: set[int]) -> None:
    """At 1M tokens attention of a rank's rows of eight needs 6 % of a device, too little for chunks beside a ring."""
    found, reasons = candidates(ask(tokens, devices=8))
    chunked = [c.base for c in found if c.policy.attention_chunks]
    assert {base.attention_chunk_tokens for base in chunked} == {tokens // 8}
    assert {base.layout.cp for base in chunked} == rings
    assert {c.base.layout.cp for c in found} == {1, 2, 4, 8}
    assert not any("chunk" in reason for reason in reasons)
    assert not any(c.policy.attention_chunks for c in candidates(ask(128 * K))[0])


def test_a_pinned_chunk() -> None:
    swapped = (CHUNKED, LEAST_MEMORY)
    kept = tuple(replace(policy, alpha=0.0) for policy in swapped)
    assert policies(ask(512 * K, attention_chunk_tokens=64 * K, alpha=1.0)) == swapped
    assert set(policies(ask(512 * K, attention_chunk_tokens=64 * K))) == {*swapped, *kept}
    whole = policies(ask(512 * K, attention_chunk_tokens=0, system="deepspeed-fpdt", recompute=None))
    assert whole == (INPUTS_SWAPPED_MLP_IN_BLOCKS,)
    assert not any(p.attention_chunks for p in policies(ask(512 * K, attention_chunk_tokens=0, recompute=None)))
    found, _ = candidates(ask(512 * K, attention_chunk_tokens=96 * K))
    assert {c.base.attention_chunk_tokens for c in found} == {96 * K}
    with refused(UsageError, got="65536", hint=("--recompute full", "--attention-chunk")):
        policies(ask(512 * K, attention_chunk_tokens=64 * K, recompute="none"))


def test_a_pinned_chunk_of_the_whole_sequence_is_whole_attention() -> None:
    pinned, whole = (ask(512 * K, devices=8, attention_chunk_tokens=n) for n in (512 * K, 0))
    assert {c.base for c in candidates(pinned)[0]} == {c.base for c in candidates(whole)[0]}
    assert not any(c.policy.attention_chunks for c in candidates(pinned)[0])


def test_fpdts_mlp_and_loss_follow_a_pinned_chunk() -> None:
    asked = ask(1024 * K, system="deepspeed-fpdt", devices=8, ulysses=8, recompute=None, attention_chunk_tokens=256 * K)
    (found,), _ = candidates(asked)
    assert (found.base.mlp_chunk_tokens, found.base.loss_chunk_tokens) == (16 * K, 1 * K)


def test_chunks_need_no_more_groups_of_heads_than_their_calls() -> None:
    """At 20M tokens, a call over all tokens exceeds flash-attn's integers, even with a single head."""
    cluster, hardware = load_cluster("a800-4x8")
    question = Question(load_model("gpt-7b"), cluster, hardware, 20480 * K, "deepspeed-fpdt", Pins(ulysses=32))
    (found,), _ = candidates(question)
    assert found.base.attention_chunk_tokens == 320 * K
    whole = replace(question, pins=Pins(ulysses=32, attention_chunk_tokens=0))
    with refused(Infeasible, got="at most 2147483648"):
        candidates(whole)


def test_a_pinned_chunk_that_cannot_be_is_said_to_be_the_reason() -> None:
    chunk = "decisions.attention_chunk_tokens"
    with refused(Infeasible, where=chunk, got=("1000", "131072"), wanted=("128", "2048"), hint="--attention-chunk"):
        candidates(ask(128 * K, attention_chunk_tokens=1000))
    with refused(Infeasible, where=chunk, wanted="a multiple of 1024", hint="--attention-chunk"):
        candidates(ask(512 * K, devices=8, attention_chunk_tokens=1000))
    found, reasons = candidates(ask(512 * K, devices=8, attention_chunk_tokens=16 * K, rowwise="triton"))
    assert {c.base.layout.cp for c in found} == {1, 2}
    assert any("22 of them at most beside a ring of 8 ranks" in reason for reason in reasons)


def test_the_finest_chunks_and_blocks_are_the_last_resort() -> None:
    """In chunks of an eighth no plan fits. The finest need less memory by every policy, and more time."""
    shorter = search(ask(896 * K, recompute=None))
    assert shorter.best is not None
    assert {e.policy.finest for e in shorter.ranked} == {False}
    question = ask(LONGEST, recompute=None)
    found, every = search(question), search(question, prune=False)
    assert found.best is not None
    assert every.best is not None
    assert every.best.decisions == found.best.decisions
    assert found.best.policy.finest
    assert (found.best.decisions.attention_chunk_tokens, found.best.decisions.mlp_chunk_tokens) == (32 * K, 16 * K)
    assert {e.prediction.status for e in found.ranked if not e.policy.finest} == {"gpu_oom"}


def test_last_resorts_go_with_what_is_pinned() -> None:
    """Blocks or chunks that are pinned keep their size, and what is not pinned is the finest."""

    def finest(**pins: Any) -> set[tuple[str, int, int]]:
        question = ask(LONGEST, **{"recompute": None, **pins})
        found, _ = candidates(question, last_resorts(question))
        return {(c.base.recompute, c.base.mlp_chunk_tokens, c.base.attention_chunk_tokens) for c in found}

    assert finest() == {("rowwise", 16 * K, 32 * K), ("full", 16 * K, 32 * K)}
    assert finest(recompute="full") == {("full", 16 * K, 32 * K)}
    assert finest(attention_chunk_tokens=64 * K) == {("rowwise", 16 * K, 64 * K), ("full", 16 * K, 64 * K)}
    assert finest(mlp_chunk_tokens=8 * K, recompute="full") == {("full", 8 * K, 32 * K)}
    for pins in ({"alpha": 0.5}, {"offload_inputs": True}, {"recompute": "none"}, {"attention_chunk_tokens": 0}):
        assert last_resorts(ask(LONGEST, **{"recompute": None, **pins})) == ()


@pytest.mark.slow
def test_two_ranks_of_a_ring_go_further_than_with_attention_whole() -> None:
    best = {e.policy: e.prediction.status for e in search(ask(1536 * K, devices=2, cp=2), prune=False).ranked}
    assert best[LEAST_MEMORY] == "ok"
    assert {status for policy, status in best.items() if policy != LEAST_MEMORY} == {"gpu_oom"}


def test_one_device_goes_further_than_with_attention_whole() -> None:
    """With the MLP in blocks, queries, keys, values and their gradients are most of a layer's memory."""
    best = {e.policy: e.prediction.status for e in search(ask(768 * K), prune=False).ranked}
    assert best[LEAST_MEMORY] == "ok"
    assert {status for policy, status in best.items() if policy != LEAST_MEMORY} == {"gpu_oom"}


def test_the_answer_names_the_gain() -> None:
    answer = what_if(ask(768 * K, mlp_chunk_tokens=96 * K))
    assert answer.result.best is not None
    assert answer.result.best.attention_chunk_tokens == 96 * K
    (line,) = [line for line in answer.result.why if line.startswith("Attention")]
    assert "8 chunks of 96k tokens" in line
    assert "undivided it does not fit (short by 7.59 GiB of device memory)" in line
    (line,) = [line for line in answer.result.why if line.startswith("Layer inputs")]
    # One of three layers: 768 Ki tokens of 4096 features in bf16; bytes that attention moves are not counted.
    assert "6.00 GiB per step" in line


def test_row_wise_recompute_has_chunks_where_it_needs_much_of_a_device() -> None:
    """At 256K tokens it needs 18 of 80 GiB. A chunk has two row blocks, or one where ranks exchange its rows."""

    def cut(tokens: int, **pins: Any) -> set[tuple[int, int]]:
        found, _ = candidates(ask(tokens, devices=pins.get("ulysses", 1), recompute="rowwise", **pins))
        return {(c.base.attention_chunk_tokens, c.base.mlp_chunk_tokens) for c in found if c.policy.attention_chunks}

    assert cut(256 * K) == set()
    assert cut(1024 * K) == {(128 * K, 64 * K)}
    assert cut(1024 * K, attention_chunk_tokens=96 * K) == {(96 * K, 96 * K)}
    assert cut(1024 * K, ulysses=2) == {(128 * K, 64 * K)}
    assert cut(256 * K, attention_chunk_tokens=64 * K, ulysses=2) == {(64 * K, 32 * K)}


def test_row_wise_recompute_goes_further_in_chunks() -> None:
    question = ask(896 * K, recompute="rowwise")
    pruned, every = search(question), search(question, prune=False)
    best = {e.policy: e.prediction.status for e in every.ranked}
    assert best[ROWWISE_IN_CHUNKS] == "ok"
    assert {status for policy, status in best.items() if policy != ROWWISE_IN_CHUNKS} == {"gpu_oom"}
    assert pruned.best is not None
    assert every.best is not None
    assert pruned.best.decisions == every.best.decisions
    assert "attention swapped, in chunks" in pruned.best.policy.label


@pytest.mark.parametrize(
    ("tokens", "ring", "ranks"), [(192 * K, "cp", 1), (256 * K, "cp", 1), (256 * K, "cp", 2), (512 * K, "metp", 4)]
)
def test_the_lower_bound_is_below_the_played_step(tokens: int, ring: str, ranks: int) -> None:
    """Calls without a mask may be faster than the causal call, whose time is known."""
    layout = {"devices": ranks, ring: ranks}
    question = ask(tokens, **layout, attention_chunk_tokens=tokens // 4)
    bounds = LowerBounds(question.hardware, question.cluster)
    keep = next(c.base for c in candidates(ask(tokens, **layout, recompute="none", alpha=0.0))[0])
    for candidate in candidates(question)[0]:
        played = play(question, candidate.base).prediction
        rough = bounds.rough(candidate.base, keep=msgspec.structs.replace(keep, kernels=candidate.base.kernels))
        exact = bounds.of(candidate.base)
        assert played.step_s is not None
        assert 0 < rough.step_s <= played.step_s
        assert exact.step_s <= played.step_s
        assert rough.device_bytes <= exact.device_bytes <= played.peak_device_bytes
        assert max(rough.host_bytes_per_node, exact.host_bytes_per_node) <= played.peak_host_bytes_per_node


@pytest.mark.parametrize("cp", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_pruning_loses_nothing(cp: int) -> None:
    question = ask(cp * 320 * K, devices=cp, cp=cp, recompute=None)
    pruned, every = search(question), search(question, prune=False)
    assert pruned.best is not None
    assert every.best is not None
    assert any(e.policy.attention_chunks for e in every.ranked)
    assert pruned.best.decisions == every.best.decisions
