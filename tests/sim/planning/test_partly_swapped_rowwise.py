"""Alpha of row-wise recompute: searched where neither the device nor the host can hold all that attention needs."""

from __future__ import annotations

from dataclasses import replace

import msgspec
import pytest

from memo_sim.answers.longest import longest
from memo_sim.answers.what_if import what_if
from memo_sim.contract.catalog import load_cluster, load_model
from memo_sim.planning.alpha_search import Grid
from memo_sim.planning.presets import (
    ROWWISE_KEPT,
    ROWWISE_PARTLY_SWAPPED,
    ROWWISE_SWAPPED,
    SYSTEMS,
)
from memo_sim.planning.question import Pins, Question, with_memory
from memo_sim.planning.search import play, search

ENDS = (ROWWISE_KEPT, ROWWISE_SWAPPED)


def ask(device_gib: int, host_gib: int, *, seq_tokens: int = 1 << 17, **pins: str) -> Question:
    """Return a question about eight layers of Llama 3 on one device."""
    sizes = {"device_bytes": device_gib << 30, "host_bytes": host_gib << 30}
    cluster, hardware = with_memory(*load_cluster("h100-1x8"), **sizes)
    one = msgspec.structs.replace(cluster, name="h100-1x1", devices_per_node=1)
    model = msgspec.structs.replace(load_model("llama3-8b"), layers=8, vocab=32768)
    return Question(model, one, hardware, seq_tokens, system="any", pins=Pins(**pins))  # type: ignore[arg-type]


@pytest.mark.parametrize("prune", [True, pytest.param(False, marks=pytest.mark.slow)])
def test_a_partial_alpha_wins_where_neither_end_fits(prune: bool) -> None:
    """No other alpha of the grid is faster: the next ones are played, and every fourth."""
    question = ask(50, 8)
    found = search(question, prune=prune)
    best = found.best
    assert best is not None
    assert best.policy == ROWWISE_PARTLY_SWAPPED
    assert best.policy.label == "row-wise recompute, attention partly swapped"
    statuses = {e.policy: e.prediction.status for e in found.ranked if e.policy in ENDS}
    assert prune or statuses == {ROWWISE_KEPT: "gpu_oom", ROWWISE_SWAPPED: "host_oom"}
    grid = Grid.of(best.decisions)
    at = grid.step_of(best.decisions)
    played = [play(question, grid.at(step)).prediction for step in {*range(0, grid.steps + 1, 4), at - 1, at, at + 1}]
    steps_s = [p.step_s for p in played if p.step_s is not None]
    assert 1 < len(steps_s) < len(played)
    assert best.prediction.step_s == min(steps_s)
    assert best.above is None or best.above.status == "host_oom"


def test_no_rows_are_swapped_where_all_can_be_kept() -> None:
    found = search(ask(60, 8, recompute="rowwise"), prune=False)
    assert found.best is not None
    assert {e.policy for e in found.ranked} == {ROWWISE_KEPT}


def test_the_answer_says_how_much_is_swapped_and_why() -> None:
    text = "\n".join(what_if(ask(50, 8)).result.why)
    assert "the log-sum-exp stay on the device but for alpha 0.656 of their rows, which wait in host memory" in text
    assert "the next higher alpha does not fit" in text


@pytest.mark.slow
def test_the_longest_sequence_is_longer_than_with_either_end(monkeypatch: pytest.MonkeyPatch) -> None:
    question, step_tokens = ask(50, 8, recompute="rowwise"), 1 << 14

    def longest_tokens() -> int:
        return longest(question, step_tokens=step_tokens).document.seq_tokens

    with_any_alpha, system = longest_tokens(), SYSTEMS["any"]
    others = tuple(p for p in system.policies if p != ROWWISE_PARTLY_SWAPPED and not p.attention_chunks)
    monkeypatch.setitem(SYSTEMS, "any", replace(system, policies=others))
    assert with_any_alpha > longest_tokens()
