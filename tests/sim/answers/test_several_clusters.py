"""Several clusters: the same answers as one by one, ranked by price or by tokens per second."""

from __future__ import annotations

from dataclasses import replace

import msgspec
import pytest

from memo_sim.answers.several_clusters import several_clusters
from memo_sim.answers.what_if import what_if
from memo_sim.contract import codec
from memo_sim.contract.catalog import load_cluster, load_model
from memo_sim.contract.result import Result
from memo_sim.contract.results import Results
from memo_sim.contract.units import GIB, KIB
from memo_sim.planning.question import Pins, Question, with_memory
from memo_sim.views.results_table import results_table

SHALLOW = msgspec.structs.replace(load_model("gpt-7b"), layers=2)
NAMES = ("a800-1x4", "h100-1x4", "h100-1x2")


def question(name: str, device_gib: float | None = None) -> Question:
    device_bytes = None if device_gib is None else int(device_gib * GIB)
    cluster, hardware = with_memory(*load_cluster(name), device_bytes=device_bytes, host_bytes=None)
    pins = Pins(recompute="none", alpha=0.0)
    return Question(model=SHALLOW, cluster=cluster, hardware=hardware, seq_tokens=16 * KIB, system="any", pins=pins)


def ask(asked: Question, price: float | None = None) -> Result:
    return what_if(asked, top=1, price_per_device_hour=price).result


def compare(*prices: float | None) -> Results:
    results = [ask(question(name), price) for name, price in zip(NAMES, prices, strict=True)]
    return several_clusters(results, prices=prices)


@pytest.fixture(scope="module")
def unpriced() -> Results:
    return compare(None, None, None)


def test_each_cluster_has_the_answer_that_it_has_alone(unpriced: Results) -> None:
    by_name = {result.cluster: result for result in unpriced.results}
    assert by_name == {name: ask(question(name)) for name in NAMES}
    assert codec.decode(codec.encode(unpriced), Results, where="here") == unpriced


def test_without_prices_the_most_tokens_per_second_come_first(unpriced: Results) -> None:
    rates = [r.summary.tokens_per_step / r.summary.step_s for r in unpriced.results]
    assert rates == sorted(rates, reverse=True)
    assert unpriced.ranked_by == "tokens per second"
    first = results_table(unpriced).splitlines()[0]
    assert first.startswith("gpt-7b, 16k tokens: h100-1x4 is the fastest of 3 clusters, ")


def test_with_prices_the_cheapest_token_comes_first_unless_one_has_none() -> None:
    found = compare(0.01, 5.0, 5.0)
    prices = [r.summary.price_per_billion_tokens for r in found.results]
    assert prices == sorted(prices)
    assert found.results[0].cluster == "a800-1x4"
    assert "cheapest of 3 clusters; a token costs" in results_table(found)
    assert " times as much on " in results_table(found), "a token costs many times as much, not percents more"
    partly = compare(0.01, None, 5.0)
    assert partly.ranked_by == "tokens per second"
    assert partly.notes[0].startswith(f"No price of {NAMES[1]}, so prices are not compared")


def test_what_does_not_fit_comes_last_and_has_no_speed() -> None:
    small = ask(question("a800-1x4", 1))
    found = several_clusters([small, ask(question("h100-1x4"))], prices=[None, None])
    assert [result.cluster for result in found.results] == ["h100-1x4", "a800-1x4"]
    assert "does not fit: short by" in results_table(found).splitlines()[-1]
    none = several_clusters([small], prices=[None])
    assert "no plan fits on any of 1 cluster" in results_table(none)


def test_kernels_and_batches_that_differ_are_named(unpriced: Results) -> None:
    text = results_table(unpriced)
    assert "kernels" in text.splitlines()[2]
    (kernels,) = unpriced.notes
    assert kernels.startswith("Kernels differ")
    assert "h100-1x4: flash3 and triton" in kernels
    assert "--rowwise torch" in kernels
    alone = [ask(replace(question(name), global_batch=count)) for name, count in (("a800-1x4", 4), ("a800-1x8", 8))]
    (batches,) = several_clusters(alone, prices=[None, None]).notes
    assert batches == "Sequences of a step differ: a800-1x4: 4, a800-1x8: 8. --global-batch 8 makes them equal."
