"""The cache of stage orders: a program with a cached order equals one whose order was placed anew."""

from __future__ import annotations

import msgspec
import pytest

from memo_sim.contract.catalog import load_model
from memo_sim.contract.plan import Decisions, Layout
from memo_sim.planning.space import with_alpha
from memo_sim.program.lower import lower, program_sha256
from memo_sim.program.pipeline import order_cache

STAGED = [
    {"pp": 4},
    {"pp": 4, "schedule": "gpipe", "overlap_p2p": False},
    {"pp": 2, "schedule": "interleaved", "virtual_stages": 2},
    {"pp": 2, "schedule": "zero-bubble"},
    {"pp": 2, "dp": 2, "zero": 1},
]
ALPHAS = (0.0, 0.25, 0.5, 0.75, 1.0)


def plan(recompute: str, alpha: float, changes: dict[str, object]) -> Decisions:
    """Return a plan of 8 layers in stages, at one alpha."""
    base = Decisions(
        model=msgspec.structs.replace(load_model("gpt-tiny"), layers=8),
        layout=msgspec.structs.replace(Layout(tp=2, sequence_parallel=True), **changes),
        seq_tokens=8192,
        global_batch=12,
    )
    return with_alpha(base, recompute, alpha)


@pytest.mark.parametrize("changes", STAGED)
@pytest.mark.parametrize("recompute", ["none", "tokenwise", "full"])
def test_programs_are_those_placed_without_the_cache(recompute: str, changes: dict[str, object]) -> None:
    asked = [plan(recompute, alpha, changes) for alpha in ALPHAS]
    anew = []
    for decisions in asked:
        order_cache.forget()
        anew.append(program_sha256(lower(decisions)))
    order_cache.forget()
    for one_way in (1, -1):
        assert [program_sha256(lower(decisions)) for decisions in asked[::one_way]] == anew[::one_way]


def test_orders_are_placed_once_for_alphas_with_the_same_templates() -> None:
    order_cache.forget()
    first, second, none = (lower(plan("tokenwise", alpha, {"pp": 4})) for alpha in (0.25, 0.5, 0.0))
    assert all(one.instances is other.instances for one, other in zip(first, second, strict=True))
    assert not any(one.instances is other.instances for one, other in zip(first, none, strict=True))
    fewer = lower(plan("tokenwise", 0.5, {"pp": 4}), micro_batches=6)
    assert not any(one.instances is other.instances for one, other in zip(second, fewer, strict=True))


def test_the_least_recently_used_plan_is_dropped(monkeypatch: pytest.MonkeyPatch) -> None:
    order_cache.forget()
    monkeypatch.setattr(order_cache, "MOST_INSTANCES", 10)
    first = lower(plan("tokenwise", 0.25, {"pp": 4}))
    lower(plan("none", 0.5, {"pp": 4}))
    again = lower(plan("tokenwise", 0.5, {"pp": 4}))
    assert not any(one.instances is other.instances for one, other in zip(first, again, strict=True))
