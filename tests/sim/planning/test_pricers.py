"""Plans that share a pricer have the prices of their own."""

from __future__ import annotations

import pytest

from memo_sim.costs.pricing import Pricer
from memo_sim.planning.pricers import Pricers
from memo_sim.program.lower import lower
from tests.sim.planning.test_stage_alone import PIPELINES, machine, pipeline

PLANS = {**PIPELINES, "subsequences": pipeline("1f1b", tp=2, sequence_parallel=True, layers=4, batch=1, subsequences=4)}


@pytest.mark.parametrize("name", sorted(PLANS))
def test_schedules_and_splits_price_nothing(name: str) -> None:
    cluster, hardware = machine()
    decisions = PLANS[name]
    own = Pricer(hardware, cluster, decisions.layout, rowwise=decisions.kernels.rowwise)
    pricers = Pricers(hardware, cluster)
    assert pricers.of(decisions) is pricers.of(decisions)
    works = {i.work for program in lower(decisions) for t in program.templates for i in t.instructions}
    assert works
    for work in works:
        assert pricers.of(decisions).seconds(work) == own.seconds(work)
    assert pricers.of(decisions).demands == own.demands
