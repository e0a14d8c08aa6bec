"""``--safety-gib``: bytes that stay free on each device, beside the reserve, under every memory policy."""

from __future__ import annotations

from dataclasses import replace

import msgspec
import pytest

from memo_sim.contract.catalog import load_cluster, load_model
from memo_sim.contract.hardware import SAFETY
from memo_sim.contract.knobs import MemoryPolicy
from memo_sim.contract.units import GIB, KIB
from memo_sim.planning.question import Pins, Question, with_memory
from memo_sim.planning.search import play, search
from memo_sim.reasons.remedies import ways_out

POLICIES: tuple[MemoryPolicy, ...] = ("planned", "caching", "eager")
SHALLOW = msgspec.structs.replace(load_model("gpt-7b"), layers=2)


def ask(policy: MemoryPolicy = "planned", safety_bytes: int = 0) -> Question:
    machine = with_memory(*load_cluster("a800-1x4"), device_bytes=None, host_bytes=None, safety_bytes=safety_bytes)
    pins = Pins(tp=4, cp=1, recompute="none", alpha=0.0, memory_policy=policy)
    cluster, hardware = machine
    return Question(model=SHALLOW, cluster=cluster, hardware=hardware, seq_tokens=16 * KIB, system="any", pins=pins)


@pytest.mark.parametrize("policy", POLICIES)
def test_it_is_added_to_the_reserve_and_to_nothing_else(policy: MemoryPolicy) -> None:
    best = search(ask(policy)).best
    assert best is not None
    without, kept = (play(ask(policy, margin), best.decisions) for margin in (0, 2 * GIB))
    assert kept.memory.reserve == {**without.memory.reserve, SAFETY: 2 * GIB}
    assert kept.prediction.step_s == without.prediction.step_s


@pytest.mark.parametrize("policy", ["planned", "caching"])
def test_a_plan_fits_up_to_the_margin_that_is_free_and_no_further(policy: MemoryPolicy) -> None:
    best = search(ask(policy)).best
    assert best is not None

    def fits(margin: int) -> bool:
        return play(ask(policy, margin), best.decisions).prediction.status == "ok"

    low, high = 0, 80 * GIB
    assert fits(low)
    assert not fits(high)
    while high - low > GIB // 64:
        middle = (low + high) // 2
        low, high = (middle, high) if fits(middle) else (low, middle)
    assert [fits(share * low // 4) for share in range(5)] == [True] * 5
    assert not any(fits(margin) for margin in (high, high + GIB, high + 8 * GIB))


def test_an_answer_that_does_not_fit_for_it_says_so() -> None:
    asked = ask(safety_bytes=60 * GIB)
    model = msgspec.structs.replace(SHALLOW, layers=8)
    asked = replace(asked, model=model, seq_tokens=64 * KIB)
    nearest = search(asked).ranked[0]
    assert nearest.prediction.status == "gpu_oom"
    assert any(way.startswith("--safety-gib") for way in ways_out(asked, nearest))
