"""Memory alone and a few layers replace plays in the search over alpha, and change nothing of what it finds."""

from __future__ import annotations

import msgspec
import pytest

from memo_sim.contract.catalog import load_cluster, load_model
from memo_sim.contract.plan import Decisions, Layout, Prediction
from memo_sim.engine.simulate import memory_alone, simulate
from memo_sim.planning.alpha_search import best_alpha, best_partial_swap
from memo_sim.planning.lower_bounds import LowerBounds
from memo_sim.planning.plays import Plays
from memo_sim.planning.question import Question, with_memory
from memo_sim.planning.space import with_alpha
from memo_sim.views.plan_table import layout_label

MODEL = msgspec.structs.replace(load_model("gpt-7b"), layers=16)
CLUSTER, HARDWARE = load_cluster("a800-1x8")
RANKS = [
    Layout(tp=2, sequence_parallel=True, ulysses=2, dp=2, zero=3),
    Layout(cp=4, dp=2, zero=3, zero_ranks=4),
    Layout(cp=2, pp=2, dp=2, zero=1),
]


def asked(layout: Layout, *, fits_from: float) -> tuple[Decisions, Question]:
    """Return a plan that keeps everything, and a question on devices with the memory of its alpha ``fits_from``."""
    base = Decisions(model=MODEL, layout=layout, seq_tokens=1 << 15, global_batch=4 * layout.dp, loss_chunk_tokens=4096)
    plan = with_alpha(base, "none", fits_from)
    played = simulate(plan, *reversed(with_memory(CLUSTER, HARDWARE, device_bytes=2**50, host_bytes=2**50)))
    device_bytes = played.memory.device_total_bytes
    cluster, hardware = with_memory(CLUSTER, HARDWARE, device_bytes=device_bytes, host_bytes=2**50)
    return base, Question(MODEL, cluster, hardware, base.seq_tokens, global_batch=base.global_batch)


@pytest.mark.parametrize("layout", RANKS, ids=layout_label)
def test_a_partial_swap_is_found_with_fewer_plays(layout: Layout) -> None:
    base, question = asked(layout, fits_from=0.4)
    every, some = Plays(question), Plays(question)
    bounds = LowerBounds(question.hardware, question.cluster)
    played = best_partial_swap(base, every.predict)
    found = best_partial_swap(base, some.predict, refused=some.refused, bounds=bounds)
    assert played is not None
    assert found is not None
    assert played.prediction.status == "ok"
    assert (found.decisions, found.prediction) == (played.decisions, played.prediction)
    assert found.evaluated < played.evaluated
    assert set(some.used) < set(every.used)


@pytest.mark.parametrize("layout", RANKS[:2], ids=layout_label)
def test_the_fastest_alpha_is_found_with_fewer_plays(layout: Layout) -> None:
    base, question = asked(layout, fits_from=1.0)
    base = with_alpha(base, "tokenwise", 0.0)
    every, some = Plays(question), Plays(question)
    bounds = LowerBounds(question.hardware, question.cluster)
    for start in (0.0, 0.5):
        played = best_alpha(base, every.predict, start=start)
        found = best_alpha(base, some.predict, start=start, refused=some.refused, bounds=bounds)
        assert (found.decisions, found.prediction) == (played.decisions, played.prediction)
        assert found.evaluated < played.evaluated


@pytest.mark.parametrize("layout", RANKS, ids=layout_label)
def test_memory_alone_is_that_of_a_play(layout: Layout) -> None:
    base, question = asked(layout, fits_from=0.4)
    for alpha in (0.25, 0.5):
        plan = with_alpha(base, "none", alpha)
        begun = memory_alone(plan, question.hardware, question.cluster)
        whole = simulate(plan, question.hardware, question.cluster)
        assert begun.memory.device.bytes == whole.memory.device.bytes
        assert (begun.memory.fault is None) == (alpha == 0.5)
        if begun.memory.fault is not None:
            assert begun.prediction == whole.prediction
        assert simulate(plan, question.hardware, question.cluster, begun=begun).prediction == whole.prediction


def test_a_plan_whose_memory_was_asked_for_is_lowered_once(monkeypatch: pytest.MonkeyPatch) -> None:
    base, question = asked(RANKS[0], fits_from=0.4)
    plays, plan = Plays(question), with_alpha(base, "none", 0.5)
    assert plays.refused(plan) is None
    assert plays.refused(with_alpha(base, "none", 0.25)) is not None
    monkeypatch.setattr("memo_sim.engine.simulate.lower", lambda *_, **__: pytest.fail("lowered again"))
    assert plays.refused(plan) is None
    predicted: Prediction = plays.predict(plan)
    assert predicted.status == "ok"
    assert plays.refused(plan) is None
