"""Multiplexing is faster inside a node with few subsequences; over a network, its transfers are too slow.

``tests/sim/program/pipeline/test_multiplex.py`` checks the bytes; here they have prices.
"""

from __future__ import annotations

import msgspec
import pytest

from memo_sim.contract.catalog import load_cluster, load_model
from memo_sim.contract.plan import Decisions, Layout, Prediction
from memo_sim.engine.simulate import simulate
from memo_sim.engine.stalls import BUBBLE
from memo_sim.planning.layouts import layouts
from memo_sim.planning.question import Pins, Question
from memo_sim.planning.search import play, search
from memo_sim.reasons.subsequences import subsequences

K = 1024
MODEL = msgspec.structs.replace(load_model("gpt-7b"), layers=8)


def played(cluster: str, tp: int, count: int, seq_tokens: int, *, multiplexed: bool) -> Prediction:
    machines, hardware = load_cluster(cluster)
    layout = Layout(tp=tp, sequence_parallel=True, pp=4, subsequences=count, multiplexed=multiplexed)
    return simulate(Decisions(model=MODEL, layout=layout, seq_tokens=seq_tokens), hardware, machines).prediction


@pytest.mark.parametrize(
    ("cluster", "tp", "count", "pays"), [("a100-1x8", 2, 8, True), ("a100-4x8-hdr4", 8, 16, False)]
)
def test_multiplexing_is_faster_inside_a_node(cluster: str, tp: int, count: int, pays: bool) -> None:
    plain, shared = (played(cluster, tp, count, 64 * K, multiplexed=on) for on in (False, True))
    assert plain.step_s is not None
    assert shared.step_s is not None
    assert (shared.step_s < 0.95 * plain.step_s) == pays
    if pays:
        assert bubble_s(shared) < 0.5 * bubble_s(plain)


def bubble_s(prediction: Prediction) -> float:
    return sum(s.seconds for s in prediction.stalls if s.lane == "compute" and s.waits_for.startswith(BUBBLE))


def test_more_subsequences_leave_less_to_gain() -> None:
    gains = []
    for count in (4, 12):
        plain, shared = (played("a100-1x8", 2, count, 64 * K, multiplexed=on).step_s for on in (False, True))
        gains.append(1 - (shared or 0) / (plain or 1))
    assert gains[0] > gains[1] > 0


def question(cluster: str, system: str = "sppo", **pins: object) -> Question:
    machines, hardware = load_cluster(cluster)
    return Question(MODEL, machines, hardware, 32 * K, system=system, pins=Pins(pp=4, subsequences=4, **pins))  # type: ignore[arg-type]


def test_sppo_tries_multiplexing_only_inside_a_node_unless_pinned() -> None:
    def tried(asked: Question) -> set[bool]:
        return {layout.multiplexed for layout in layouts(asked)}

    assert tried(question("a100-1x8")) == {False, True}
    assert tried(question("a100-4x8-hdr4")) == {False}
    assert tried(question("a100-1x8", "seq1f1b")) == {False}
    for on in (False, True):
        assert tried(question("a100-1x8", multiplexed=on)) == {on}
        assert tried(question("a100-4x8-hdr4", multiplexed=on)) == {on}


def test_the_answer_names_the_step_time_without_multiplexing() -> None:
    asked = question("a100-1x8", tp=2)
    found = search(asked, prune=False)
    assert found.best is not None
    assert found.best.decisions.layout.multiplexed
    lines = subsequences(found, play(asked, found.best.decisions))
    assert lines[-1].startswith(
        "Idle stages compute rows of other stages. Without that, at best with 4 subsequences, the bubble is"
    )
    assert lines[-1].endswith(" longer.")
