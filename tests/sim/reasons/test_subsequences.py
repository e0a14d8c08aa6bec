"""Sentences about subsequences: their lengths, what each offloads, and what another number would change."""

from __future__ import annotations

import re
from dataclasses import replace
from math import inf

import msgspec
import pytest

from memo_sim.answers.what_if import what_if
from memo_sim.contract.catalog import load_cluster, load_model
from memo_sim.contract.plan import Decisions, Layout, Prediction
from memo_sim.contract.units import format_seconds
from memo_sim.planning.outcome import Evaluated
from memo_sim.planning.presets import FULL_SWAP
from memo_sim.planning.question import Pins, Question
from memo_sim.planning.search import SearchResult, play, search
from memo_sim.planning.space import candidates
from memo_sim.planning.sppo import solve
from memo_sim.program.layout.partition import partition, swapped_parts
from memo_sim.reasons.remedies import ways_out
from memo_sim.reasons.subsequences import balance, heuristic, subsequences
from memo_sim.views.plan_table import layout_label

OK = Prediction(status="ok", step_s=1.0)


def asked(system: str, **pins: object) -> Question:
    cluster, hardware = load_cluster("a100-2x2-hdr4")
    model = msgspec.structs.replace(load_model("gpt-7b"), layers=4)
    return Question(model, cluster, hardware, 32 * 1024, system=system, pins=Pins(**pins))  # type: ignore[arg-type]


def found_for(system: str, **pins: object) -> tuple[SearchResult, list[str]]:
    question = asked(system, **pins)
    found = search(question, prune=False)
    assert found.best is not None
    return found, subsequences(found, play(question, found.best.decisions))


def test_lengths_and_neighbouring_numbers_are_reported() -> None:
    found, lines = found_for("sppo", tp=2, pp=2)
    best = found.best
    assert best is not None
    number, parts = best.decisions.layout.subsequences, partition(best.decisions)
    assert lines[0].startswith(f"{number} subsequences of ")
    alphas = [some / part for some, part in zip(swapped_parts(best.decisions), parts, strict=True)]
    assert f"alpha {alphas[0]:.2f} to {alphas[-1]:.2f}" in lines[0]
    assert "the KV cache of the prefix stays" in lines[0]
    held = re.fullmatch(r"A stage holds at most ([\d.]+) GiB of skeletal .* \(5.2\), and ([\d.]+) GiB in .*", lines[1])
    assert held
    # One layer is computed while another is copied out: at most one layer's activations above the recurrence.
    assert float(held[1]) <= float(held[2]) <= 1.5 * float(held[1])
    told = [int(n) for n in re.findall(r"[Ww]ith (\d+) subsequences, the bubble", lines[2])]
    assert all(n != number for n in told)
    assert told == sorted(told)
    # Fewer make the bubble longer; more make kernels slower. Either way the step is longer: this one is best.
    for text in lines[2].split("; "):
        assert "longer" in text.split("bubble is")[1].split(",")[0] or "longer" in text.split("kernels take")[1]
        assert re.search(r"the step is .* longer", text)


def test_sppos_balance_is_reported_exactly_and_rounded() -> None:
    question = asked("sppo", tp=2, pp=2, subsequences=8, recompute="none")
    aware = [c for c in candidates(question)[0] if c.policy.hides]
    found = SearchResult([Evaluated(c.policy, c.base, play(question, c.base).prediction) for c in aware], 1, 0)
    found.ranked.sort(key=lambda e: e.rank_key)
    (line,) = balance(question, found)
    told = re.fullmatch(
        r"SPPO's balance \(5.2\): (\d+) tokens leave while one subsequence is computed, alpha ([.\d]+); rounded to "
        r"blocks of 256 this is (\d+)(?: or (\d+)); (\d+) is faster.",
        line,
    )
    assert told
    exact, alpha, low, high, taken = (float(n) for n in told.groups())
    assert low < exact < high == low + 256
    assert taken in {low, high}
    below, above = (c.base.alpha for c in aware)
    assert below <= alpha <= above
    # With alpha pinned there is no balance to report.
    pinned = replace(question, pins=replace(question.pins, alpha=1.0))
    assert balance(pinned, SearchResult([Evaluated(FULL_SWAP, aware[0].base, OK)], 1, 0)) == []


def test_the_solvers_choice_is_compared_with_the_best_plan() -> None:
    question = asked("sppo", tp=2)
    choice = solve(question, sps=[2])[0]
    four, chosen = (candidates(asked("sppo", tp=2, pp=2, subsequences=n))[0] for n in (4, choice.subsequences))
    rounded = [play(question, c.base).prediction.step_s or inf for c in chosen if c.policy.hides]
    assert len(set(rounded)) == 2  # down and up
    best, step_s = four[0], min(rounded)
    best_played = play(question, best.base).prediction
    assert best_played.step_s
    ratio = step_s / best_played.step_s - 1
    ask = "" if ratio >= 0 else f" (--tp 2 --pp 2 --subsequences {choice.subsequences})"
    (line,) = heuristic(question, SearchResult([Evaluated(best.policy, best.base, best_played)], 1, 0))
    assert line == (
        f"SPPO's own solver (6.1) chooses SP 2, PP 2, N {choice.subsequences}: {format_seconds(choice.step_s)} by its "
        f"formula, {format_seconds(step_s)} simulated, {100 * abs(ratio):.1f} % {'slower' if ratio >= 0 else 'faster'} "
        f"than the best plan of the search{ask}."
    )


@pytest.mark.parametrize("pins", [{"tp": 2, "pp": 1}, {"tp": 2, "alpha": 1.0, "recompute": "none"}])
def test_no_sentence_where_the_solver_has_no_choice(pins: dict[str, object]) -> None:
    """The solver needs SP x PP to be all devices, and SPPO 5.2 to decide alpha."""
    found = SearchResult([Evaluated(FULL_SWAP, Decisions(model=load_model("gpt-7b"), seq_tokens=1024), OK)], 1, 0)
    assert heuristic(asked("sppo", **pins), found) == []
    assert heuristic(asked("any", tp=2), found) == []


@pytest.mark.parametrize(
    ("swapped", "told"),
    [
        ((8192,) * 4, "offload 8k tokens each, or all of a shorter one: alpha 0.32 to 0.74"),
        ((16384, 16256, 12928, 11136), "offload 16k tokens each, or all of a shorter one: alpha 0.65 to 1.00"),
        ((0, 4096, 2048, 11136), "offload 0 to 11136 tokens each: alpha 0.00 to 1.00"),
    ],
)
def test_offloading_of_a_plan_written_by_hand_is_reported(swapped: tuple[int, ...], told: str) -> None:
    cluster, hardware = load_cluster("a100-1x1")
    model = msgspec.structs.replace(load_model("gpt-7b"), layers=2)
    decisions = Decisions(model=model, layout=Layout(subsequences=4), seq_tokens=65536)
    assert partition(decisions) == (25216, 16256, 12928, 11136)
    asked = msgspec.structs.replace(decisions, swapped_tokens=sum(swapped), subsequence_swapped_tokens=swapped)
    question = Question(model, cluster, hardware, 65536, system="any")
    assert told in subsequences(SearchResult([], 0, 0), play(question, asked))[0]


def test_an_alpha_that_is_rounded_is_reported() -> None:
    cluster, hardware = load_cluster("a100-1x1")
    model = msgspec.structs.replace(load_model("gpt-7b"), layers=2)
    question = Question(model, cluster, hardware, 2048, system="any", pins=Pins(subsequences=4, alpha=0.4))
    lines = what_if(question).result.why
    assert (
        "Alpha 0.4 is rounded to 0.25: tokens are swapped in blocks of 128, the same number in every subsequence."
        in lines
    )


def test_a_plan_without_subsequences_says_what_they_would_cost() -> None:
    _, lines = found_for("any", tp=4, pp=1, subsequences="auto", recompute="none", alpha=0)
    assert len(lines) == 1
    assert re.match(
        r"One subsequence is best: with \d+ subsequences, kernels take ", lines[0]
    )  # one stage has no bubble


def test_no_sentence_without_subsequences() -> None:
    assert found_for("any", tp=4, pp=1, recompute="none", alpha=0)[1] == []


@pytest.mark.parametrize(
    ("layout", "label"),
    [
        (Layout(pp=2, subsequences=8), "tp1 cp1 pp2 dp1 n8"),
        (Layout(subsequences=8, partition="length"), "tp1 cp1 dp1 n8+length"),
        (Layout(partition="length"), "tp1 cp1 dp1"),
    ],
)
def test_labels_name_the_number_and_the_partition(layout: Layout, label: str) -> None:
    assert layout_label(layout) == label


@pytest.mark.slow  # six seconds
def test_fewer_subsequences_are_suggested_where_they_fit() -> None:
    """The KV cache and the fp32 sums of its gradients need more memory here than shorter tensors save."""
    cluster, hardware = load_cluster("h100-8x8")

    def asked(number: int, **pins: object) -> tuple[Question, SearchResult]:
        pinned = Pins(tp=8, cp=8, subsequences=number, **pins)  # type: ignore[arg-type]
        question = Question(
            load_model("llama3-70b"), cluster, hardware, 1 << 20, system="any", global_batch=1, pins=pinned
        )
        return question, search(question)

    def suggested(question: Question, found: SearchResult) -> list[str]:
        assert found.best is None
        return [way for way in ways_out(question, found.ranked[0]) if way.startswith("--subsequences")]

    assert suggested(*asked(4)) == ["--subsequences 2", "--subsequences 1"]
    assert all(asked(number)[1].best for number in (1, 2))
    # A policy that the user pinned stays: without swapped tokens nothing fits, and fewer subsequences do not help.
    assert suggested(*asked(4, recompute="none", alpha=0.0)) == []
