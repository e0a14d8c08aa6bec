"""The search over a question's candidates: what it tries, what it prunes, and that a partial swap can win."""

from __future__ import annotations

from dataclasses import replace
from math import inf

import pytest

from memo_sim.contract.catalog import load_cluster, load_model
from memo_sim.contract.errors import Infeasible
from memo_sim.contract.knobs import MemoryPolicy
from memo_sim.planning.presets import (
    EVERY_FULL,
    FULL_RECOMPUTE,
    FULL_SWAP,
    KEEP,
    MLP_IN_BLOCKS,
    PARTIAL_SWAP,
    ROWWISE_KEPT,
    TOKENWISE,
)
from memo_sim.planning.question import Pins, Question
from memo_sim.planning.search import SearchResult, search
from memo_sim.planning.space import candidates
from tests.refusals import refused


def question(
    seq_tokens: int,
    *,
    system: str = "any",
    tp: int = 4,
    cp: int = 2,
    global_batch: int = 2,
    memory_policy: MemoryPolicy = "planned",
    allocator_limit_gib: int | None = None,
) -> Question:
    cluster, hardware = load_cluster("a800-1x8")
    return Question(
        model=load_model("gpt-7b"),
        cluster=cluster,
        hardware=hardware,
        seq_tokens=seq_tokens,
        system=system,
        pins=Pins(tp=tp, cp=cp, memory_policy=memory_policy, allocator_limit_gib=allocator_limit_gib),
        global_batch=global_batch,
    )


def accounted(asked: Question) -> SearchResult:
    """Return the result of a search after checking that every candidate was evaluated or pruned."""
    found = search(asked, prune=False)
    assert found.evaluated + found.pruned == len(candidates(asked)[0])
    assert found.evaluated == len(found.ranked)
    return found


def test_a_partial_swap_can_win() -> None:
    found = accounted(question(128 * 1024))
    by_policy = {e.policy: e for e in found.ranked}
    assert set(by_policy) == {*(KEEP, TOKENWISE, ROWWISE_KEPT, FULL_RECOMPUTE, MLP_IN_BLOCKS, FULL_SWAP, PARTIAL_SWAP)}
    assert by_policy[KEEP].prediction.status == "gpu_oom"
    best = found.best
    assert best is by_policy[PARTIAL_SWAP]
    assert best.policy.label == "partial swap"
    assert 0 < best.decisions.alpha < 1
    assert best.decisions.recompute == "none"


def test_no_partial_swap_when_everything_can_be_kept() -> None:
    found = accounted(question(32 * 1024))
    by_policy = {e.policy: e for e in found.ranked}
    assert by_policy[KEEP].prediction.status == "ok"
    assert PARTIAL_SWAP not in by_policy
    assert found.pruned >= 1


def test_a_partial_swap_that_does_not_fit_is_reported_with_its_alpha() -> None:
    found = accounted(question(1 << 20, tp=2, cp=4, global_batch=1))
    partial = next(e for e in found.ranked if e.policy == PARTIAL_SWAP)
    assert partial.prediction.status == "host_oom" or partial.decisions.alpha > 0.9
    assert partial.prediction.shortfall_bytes > 0


def test_labels() -> None:
    labels = [p.label for p in (KEEP, PARTIAL_SWAP, FULL_SWAP, TOKENWISE, *EVERY_FULL)]
    names = ["keep", "partial swap", "full swap", "token-wise", "full recompute", "full recompute, inputs swapped"]
    names += ["full recompute, MLP in blocks", "full recompute, inputs swapped, MLP in blocks"]
    assert labels == names


def test_swapping_every_token_is_one_plan_not_two() -> None:
    cluster, hardware = load_cluster("a800-8x8")
    asked = Question(load_model("gpt-65b"), cluster, hardware, 1 << 19, system="any", pins=Pins(tp=8, cp=8))
    found = accounted(asked)
    assert TOKENWISE in {c.policy for c in candidates(asked)[0]}
    swapped = [e.policy for e in found.ranked if e.decisions.alpha == 1 and e.decisions.recompute != "rowwise"]
    assert swapped == [FULL_SWAP]
    assert TOKENWISE not in {e.policy for e in found.ranked}


@pytest.mark.slow
def test_candidates_of_the_caching_policy_are_evaluated_with_its_memory() -> None:
    found = accounted(question(128 * 1024, memory_policy="caching"))
    assert {e.decisions.memory_policy for e in found.ranked} == {"caching"}
    assert found.best is not None
    assert all(e.prediction.reserved_bytes for e in found.ranked if e.prediction.status == "ok")
    # Fragmentation leaves less room than an arena has, so more has to be swapped.
    planned = accounted(question(128 * 1024)).best
    assert planned is not None
    assert found.best.policy == planned.policy == PARTIAL_SWAP
    assert found.best.decisions.alpha >= planned.decisions.alpha


def test_an_eager_framework_has_all_logits_at_once() -> None:
    asked = question(128 * 1024, system="full-recompute", memory_policy="eager")
    (candidate,), _ = candidates(asked)
    assert candidate.base.loss_chunk_tokens == 0
    (planned,), _ = candidates(question(128 * 1024, system="full-recompute"))
    assert planned.base.loss_chunk_tokens > 0
    pins = Pins(tp=4, cp=2, memory_policy="eager", loss_chunk_tokens=4096)
    (pinned,), _ = candidates(replace(asked, pins=pins))
    assert pinned.base.loss_chunk_tokens == 4096


def test_reasons_about_the_sequence_come_first() -> None:
    cluster, hardware = load_cluster("a800-1x8")
    odd = Question(load_model("gpt-7b"), cluster, hardware, 1_000_001, system="any")
    with refused(Infeasible, where="1000001 tokens", got="seq_tokens") as error:
        candidates(odd)
    assert "seq_tokens" in str(error.value.got).split(";", maxsplit=1)[0]
    assert "--seq-len 999424" in (error.value.hint or "")
    assert candidates(replace(odd, seq_tokens=999424))[0]
    tiny = load_model("gpt-tiny")
    with refused(Infeasible, where="gpt-tiny", got="16777216", wanted="16384"):
        candidates(replace(odd, model=tiny, seq_tokens=16 << 20))


def test_a_front_lists_a_plan_once_though_its_alpha_is_an_eighth() -> None:
    """The search's partial swap has an alpha that is an eighth, so the front asks for the same plan."""
    asked = replace(question(108 * 1024, tp=2, cp=4, global_batch=1), pins=Pins(tp=2, cp=4, recompute="none"))
    found, told = search(asked, front=True, prune=False), list[tuple[int, int]]()
    search(asked, front=True, prune=False, progress=lambda done, every: told.append((done, every)))
    plans = [e.decisions for e in found.ranked]
    assert len(set(plans)) == len(plans)
    assert found.evaluated + found.pruned == told[-1][1]
    (searched,) = (e for e in found.ranked if e.policy == PARTIAL_SWAP)
    assert searched.decisions.alpha * 8 == round(searched.decisions.alpha * 8)


def test_the_only_candidate_is_played_as_it_is_shown() -> None:
    """So it is not played again with SimPy's events. Without a pinned degree of tp there are several."""
    asked = question(2048, tp=2, cp=1, global_batch=8)
    pins = replace(asked.pins, pp=4, ulysses=1, schedule="1f1b", zero=1, recompute="full", alpha=0.0)
    for tp, by_simpy in ((2, True), (None, False)):
        found = search(replace(asked, pins=replace(pins, tp=tp)))
        assert found.fastest is not None
        assert {playback.by_simpy for playback in found.fastest.playbacks} == {by_simpy}


@pytest.mark.parametrize(
    ("seq_tokens", "times", "pins"),
    [
        (64 * 1024, 1.03, {"tp": 4, "cp": 2}),
        (128 * 1024, 1.1, {"tp": 4, "cp": 2}),
        (32 * 1024, 1.2, {"tp": 4, "cp": 1, "pp": 2, "dp": 1}),
    ],
)
def test_policies_that_are_nearly_as_fast_are_evaluated(seq_tokens: int, times: float, pins: dict[str, int]) -> None:
    asked = replace(question(seq_tokens, system="every-layout", global_batch=8), pins=Pins(**pins))
    every, near = search(asked, siblings=inf), search(asked, siblings=times)
    assert every.best is not None
    assert near.best is not None
    assert near.best.decisions == every.best.decisions
    most_s = times * (every.best.prediction.step_s or 0.0)
    wanted = {e.decisions for e in every.ranked if e.prediction.step_s and e.prediction.step_s <= most_s}
    assert wanted <= {e.decisions for e in near.ranked}
    assert 1 < len(near.ranked) < len(every.ranked)
    assert near.evaluated + near.pruned == every.evaluated + every.pruned
