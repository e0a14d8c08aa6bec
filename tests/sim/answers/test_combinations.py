"""The table of what goes together follows from the rules: every yes is lowered and checked, every no is refused."""

from __future__ import annotations

from itertools import combinations
from random import Random
from typing import get_args

import pytest

from memo_sim.answers.combinations import (
    FEATURES,
    Feature,
    all_combinations,
    candidates,
    combinations_of,
    decisions_of,
    pair,
    refusal,
    same_knob,
)
from memo_sim.contract.errors import Infeasible, UsageError
from memo_sim.contract.knobs import MemoryPolicy, Recompute, Schedule
from memo_sim.program.layout.compatibility import ARENA_RULES
from memo_sim.program.lower import lower
from memo_sim.views.combinations_table import combinations_text
from tests.sim.small_programs import faults_of

PAIRS = list(combinations(FEATURES.values(), 2))
CHECKED, SAMPLED = 8, 120
"""Pairs of the default run: those whose programs are checked too, and all that are lowered or refused."""


def hold(first: Feature, second: Feature, *, checked: bool) -> None:
    """Check one cell of the table against ``lower``; ``checked``: the independent checkers find no fault either."""
    found = pair(first, second)
    if found.one_knob:
        assert same_knob(first, second) in found.reason
        return
    ways = candidates(first, second)
    if found.together:
        changes = next(changes for changes in ways if refusal(changes) is None)
        assert lower(decisions_of(changes))
        assert not checked or faults_of(decisions_of(changes)) == []
        return
    for changes in ways:
        rule, error = refusal(changes)
        if rule in {each.name for each in ARENA_RULES}:
            continue  # a program can be written; the search refuses it
        with pytest.raises(Infeasible) as refused:
            lower(decisions_of(changes))
        assert (refused.value.what, refused.value.hint) == (error.what, error.hint)
    assert found.reason == refusal(ways[0])[1].what


def test_a_sample_of_the_table_is_lowered_or_refused_as_it_says() -> None:
    for number, (first, second) in enumerate(Random(22).sample(PAIRS, SAMPLED)):
        hold(first, second, checked=number < CHECKED)


@pytest.mark.slow
@pytest.mark.parametrize("first", FEATURES)
def test_every_pair_is_lowered_and_checked_or_refused_as_the_table_says(first: str) -> None:
    for one, other in PAIRS:
        if one.name == first:
            hold(one, other, checked=True)


def test_every_feature_exists_alone_and_is_not_what_is_there_anyway() -> None:
    plain = decisions_of({})
    for feature in FEATURES.values():
        ways = [{**needs, **feature.own} for needs in feature.needs]
        assert any(refusal(changes) is None for changes in ways), feature.name
        assert feature.name == "planned" or all(decisions_of(changes) != plain for changes in ways), feature.name


def test_the_table_knows_every_word_of_the_knobs() -> None:
    own = [value for feature in FEATURES.values() for value in feature.own.values() if isinstance(value, str)]
    for words in (Schedule, Recompute, MemoryPolicy):
        assert {*get_args(words), "none"} <= {*own, "none"}


@pytest.mark.parametrize(
    ("names", "together", "words"),
    [
        (("metp", "tp"), False, "tp 2 has no lowering beside METP"),
        (
            ("attention-chunks", "cp-all-gather"),
            False,
            "cp_exchange all_gather has no lowering with attention in chunks",
        ),
        (("attention-chunks", "recompute-tokenwise"), False, "attention in chunks needs full or row-wise"),
        (("attention-chunks", "recompute-rowwise"), True, "attention-chunks goes with: recompute-rowwise."),
        (("ep", "recompute-rowwise"), True, "ep goes with: recompute-rowwise."),
        (("latents", "windows"), False, "latent attention has no windows"),
        (("zero-1", "zero-3"), False, "both are values of --zero"),
        (("multiplexed", "rounding-buffers"), False, "a helper stage plays rows of a layer in buffers of its own"),
        (("eager", "experts"), True, "eager goes with: experts."),
        (("subsequences", "swap"), True, "subsequences goes with: swap."),
    ],
)
def test_a_pair_has_its_reason(names: tuple[str, str], together: bool, words: str) -> None:
    found = combinations_of(names)
    (one,) = found.pairs
    assert one.together == together
    assert words in combinations_text(found, of=names[0])


def test_the_table_shows_every_pair_twice_and_a_feature_all_of_its_pairs() -> None:
    found = all_combinations()
    rows = [line.split() for line in combinations_text(found).splitlines()]
    marks = [row[2] for row in rows if len(row) == 3 and row[1] in FEATURES]
    assert len(marks) == len(FEATURES)
    assert all(marks[i][j] == marks[j][i] for i, j in combinations(range(len(marks)), 2))
    assert {mark for row in marks for mark in row} == set("+-=.")
    assert sum(row.count("+") for row in marks) == 2 * sum(each.together for each in found.pairs)
    assert len(combinations_of(["metp"]).pairs) == len(FEATURES) - 1


@pytest.mark.parametrize(
    ("names", "words"),
    [(["metq"], "no such feature"), (["tp", "tp"], "in pairs"), (["tp", "cp-ring", "dp"], "in pairs")],
)
def test_other_names_are_refused(names: list[str], words: str) -> None:
    with pytest.raises(UsageError, match=words):
        combinations_of(names)
