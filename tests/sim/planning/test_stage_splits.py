"""Splits of layers over stages: none is tried where equal numbers are best, and a better one is found."""

from __future__ import annotations

from itertools import accumulate, combinations, pairwise
from typing import Any

import msgspec
import pytest

from memo_sim.contract.catalog import load_cluster, load_model
from memo_sim.contract.layer_shape import LayerShape
from memo_sim.contract.model import Model
from memo_sim.contract.plan import Layout
from memo_sim.planning.layouts import layouts
from memo_sim.planning.question import Pins, Question, with_memory
from memo_sim.planning.search import search
from memo_sim.planning.stage_splits import splits
from memo_sim.program.layout.stage import nearly_equal

TINY = msgspec.structs.replace(load_model("llama-tiny"), layers=8, vocab=128)
CLUSTER, HARDWARE = with_memory(*load_cluster("a800-1x4"), device_bytes=2**40, host_bytes=2**40)


def of_widths(model: Model, *widths: int) -> Model:
    return model.of_layers([LayerShape(ffn_hidden=width) for width in widths])


def question(model: Model, **pins: Any) -> Question:
    batch = pins.pop("global_batch", 1)
    return Question(model, CLUSTER, HARDWARE, 4096, system="any", pins=Pins(**pins), global_batch=batch)


@pytest.mark.parametrize("runs", [1, 2, 4, 8])
def test_equal_layers_with_a_light_head_are_divided_equally(runs: int) -> None:
    assert splits(TINY, runs, 4096) == ((),)


def test_published_models_of_long_sequences_are_divided_equally() -> None:
    for name in ("gpt-7b", "gpt-13b", "gpt-30b", "gpt-65b"):
        for runs in (2, 4, 8):
            assert splits(load_model(name), runs, 2**18) == ((),)


def test_a_heavy_head_takes_layers_from_the_last_stage() -> None:
    assert splits(load_model("llama3-8b"), 4, 4096) == ((), (8, 9, 9, 6))


def test_megatrons_account_of_the_ends_is_tried_where_it_divides() -> None:
    model = msgspec.structs.replace(load_model("llama3-8b"), layers=30)
    assert (7, 8, 8, 7) not in splits(model, 4, 4096)  # this is what nearly equal numbers are
    model = msgspec.structs.replace(model, layers=14)
    assert splits(model, 2, 4096) == ((), (8, 6))


@pytest.mark.parametrize("widths", [(512,) * 2 + (64,) * 6, (64, 512) * 4, (64,) * 7 + (2048,)])
def test_the_balanced_split_is_the_best_of_all(widths: tuple[int, ...]) -> None:
    model, runs, tokens = of_widths(TINY, *widths), 3, 512
    work = [2.0 * model.matrix_params_of(model.layer(n)) + 2.0 * tokens * model.q_width for n in range(8)]
    head, sums = 2.0 * model.vocab * model.hidden, [0.0, *accumulate(work)]

    def most(ends: tuple[int, ...]) -> float:
        each = [sums[after] - sums[before] for before, after in pairwise(ends)]
        return max(*each[:-1], each[-1] + head)

    best = min(most((0, *inner, 8)) for inner in combinations(range(1, 8), runs - 1))
    tried = splits(model, runs, tokens)
    given = [most((0, *accumulate(split or nearly_equal(8, runs)))) for split in tried]
    assert min(given) <= best * 1.01


def tried(model: Model, **pins: Any) -> set[tuple[int, ...]]:
    return {layout.pp_layers for layout in layouts(question(model, **pins)) if layout.pp == 4}


def test_pinned_stages_are_equal_unless_layers_differ() -> None:
    heavy = load_model("llama3-8b")
    assert tried(heavy, pp=4) == {()}
    assert tried(heavy, pp=4, pp_layers=(9, 8, 8, 7)) == {(9, 8, 8, 7)}
    mixed = of_widths(heavy, *(14336,) * 8, *(2048,) * 24)
    assert len(tried(mixed, pp=4)) == 2


def test_a_better_split_is_found_and_named() -> None:
    mixed = of_widths(load_model("llama3-8b"), *(14336,) * 4, *(2048,) * 12)
    found = search(question(mixed, pp=4, recompute="none", alpha=0.0, global_batch=8), prune=False)
    best = found.ranked[0].decisions
    equal = next(e for e in found.ranked if not e.decisions.layout.pp_layers)
    assert best.layout == Layout(pp=4, pp_layers=best.layout.pp_layers)
    assert best.layout.pp_layers
    assert best.layout.pp_layers[0] < 4
    assert (found.ranked[0].prediction.step_s or 0.0) < 0.95 * (equal.prediction.step_s or 0.0)


@pytest.mark.parametrize("widths", [(512,) * 2 + (64,) * 6, pytest.param((64, 512) * 4, marks=pytest.mark.slow)])
def test_pruning_changes_no_answer_about_layers_that_differ(widths: tuple[int, ...]) -> None:
    model = of_widths(TINY, *widths)
    asked = question(model, tp=1, pp=2, global_batch=8)
    pruned, whole = search(asked), search(asked, prune=False)
    assert pruned.evaluated < whole.evaluated
    assert pruned.ranked[0].decisions == whole.ranked[0].decisions
    assert pruned.ranked[0].prediction == whole.ranked[0].prediction
