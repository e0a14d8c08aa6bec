"""A better machine never makes the best plan slower: more device memory, or more bandwidth of any kind."""

from __future__ import annotations

from dataclasses import replace

import msgspec
import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from memo_sim.contract.catalog import load_cluster, load_model
from memo_sim.contract.cluster import Cluster
from memo_sim.contract.hardware import CopyRates, Curve, Hardware, Quantity
from memo_sim.contract.units import GIB, KIB
from memo_sim.planning.allocator_limits import limits_gib
from memo_sim.planning.question import Pins, Question, with_memory
from memo_sim.planning.search import search

EXACT = 1 + 1e-9
SIZES = limits_gib(16 * GIB, 81 * GIB)
SHALLOW = msgspec.structs.replace(load_model("llama3-8b"), layers=2)
SYSTEMS = [
    ("megatron-lm", 128, 2),
    ("megatron-lm", 64, 2),
    ("megatron-lm", 32, 8),
    ("fsdp", 16, 8),
    ("deepspeed-ulysses", 128, 2),
    ("full-recompute", 256, 2),
    ("memo", 64, 8),
]
"""A system, thousands of tokens and sequences in a step."""


def ask(case: tuple[str, int, int], machine: tuple[Cluster, Hardware], **pins: object) -> Question:
    system, kilotokens, sequences = case
    cluster, hardware = machine
    return Question(
        model=SHALLOW,
        cluster=cluster,
        hardware=hardware,
        seq_tokens=kilotokens * KIB,
        system=system,
        global_batch=sequences,
        pins=Pins(**pins),  # type: ignore[arg-type]
    )


def best_s(question: Question) -> float:
    """Return the step time of the best plan; infinity where none fits."""
    found = search(question).best
    return float("inf") if found is None or found.prediction.step_s is None else found.prediction.step_s


def sized(gib: int) -> tuple[Cluster, Hardware]:
    return with_memory(*load_cluster("h100-1x8"), device_bytes=gib * GIB, host_bytes=None)


class TestMemory:
    @given(case=st.sampled_from(SYSTEMS), sizes=st.lists(st.sampled_from(SIZES), min_size=2, max_size=2, unique=True))
    @example(case=("megatron-lm", 128, 2), sizes=[40, 48])  # with all of 48 GiB, fragmentation leaves too little
    @settings(max_examples=8, deadline=None, suppress_health_check=[HealthCheck.too_slow])
    def test_more_device_memory_never_makes_the_best_plan_slower(
        self, case: tuple[str, int, int], sizes: list[int]
    ) -> None:
        less, more = (best_s(ask(case, sized(gib))) for gib in sorted(sizes))
        assert more <= less * EXACT

    def test_without_limits_of_the_allocator_it_can(self) -> None:
        case = ("megatron-lm", 128, 2)
        pins = {"allocator_limit_gib": 0, "recompute": "full"}
        less, more = (best_s(ask(case, sized(gib), **pins)) for gib in (40, 48))
        assert less < more == float("inf")

    def test_a_pinned_limit_is_kept(self) -> None:
        found = search(ask(("megatron-lm", 128, 2), sized(72), allocator_limit_gib=40))
        assert {e.decisions.allocator_limit_gib for e in found.ranked} == {40}
        assert found.best is not None
        assert found.best.prediction.reserved_bytes is not None
        assert found.best.prediction.reserved_bytes <= 40 * GIB

    def test_what_a_limit_gains_is_known(self) -> None:
        best = search(ask(("megatron-lm", 128, 2), sized(48))).best
        assert best is not None
        assert best.decisions.allocator_limit_gib == 40
        assert best.unlimited is not None
        assert best.unlimited.status == "gpu_oom"

    @pytest.mark.slow
    def test_a_whole_sweep_of_a_deep_model(self) -> None:
        model = load_model("llama3-8b")
        steps = [best_s(replace(ask(("megatron-lm", 32, 8), sized(gib)), model=model)) for gib in (44, 52, 60, 72)]
        assert steps == sorted(steps, reverse=True)

    def test_limits_of_a_small_device_are_limits_of_a_larger_one(self) -> None:
        small, large = limits_gib(10 * GIB, 60 * GIB), limits_gib(10 * GIB, 81 * GIB)
        assert large[-len(small) :] == small
        assert large[:4] == [80, 72, 64, 60]
        assert limits_gib(90 * GIB, 80 * GIB) == []


def _curve(curve: Curve, factor: float) -> Curve:
    return msgspec.structs.replace(curve, y=[factor * y for y in curve.y])


def _quantity(quantity: Quantity, factor: float) -> Quantity:
    return msgspec.structs.replace(quantity, value=factor * quantity.value)


def _copies(rates: CopyRates, factor: float) -> CopyRates:
    return msgspec.structs.replace(
        rates,
        alone=_curve(rates.alone, factor),
        duplex=_quantity(rates.duplex, factor),
        all_devices=_quantity(rates.all_devices, factor),
    )


def faster(machine: tuple[Cluster, Hardware], what: str, factor: float) -> tuple[Cluster, Hardware]:
    """Return the machine with ``factor`` times the bandwidth of one kind."""
    cluster, hardware = machine
    change = msgspec.structs.replace
    if what == "network":
        assert cluster.network is not None
        network = change(cluster.network, nic_bytes_per_s=_quantity(cluster.network.nic_bytes_per_s, factor))
        return change(cluster, network=network), hardware
    if what in ("d2h", "h2d"):
        return cluster, change(hardware, **{what: _copies(getattr(hardware, what), factor)})
    if what == "links":
        tables = [change(t, bus_bytes_per_s=_curve(t.bus_bytes_per_s, factor)) for t in hardware.collectives]
        return cluster, change(hardware, collectives=tables)
    if what == "device memory":
        curves = {name: _curve(curve, factor) for name, curve in hardware.rowwise_bytes_per_s.items()}
        common = _curve(hardware.memory_bound_bytes_per_s, factor)
        return cluster, change(hardware, rowwise_bytes_per_s=curves, memory_bound_bytes_per_s=common)
    assert what == "host memory"
    return cluster, change(hardware, host_copy_bytes_per_s=_quantity(hardware.host_copy_bytes_per_s, factor))


KINDS = ["network", "d2h", "h2d", "links", "device memory", "host memory"]


@given(
    what=st.sampled_from(KINDS),
    case=st.sampled_from(
        [("megatron-lm", 32, 8), ("memo", 64, 8), ("deepspeed-ulysses", 64, 16), ("full-swap", 64, 4)]
    ),
    factors=st.lists(st.sampled_from([0.25, 0.5, 0.8, 1.0, 1.25, 2.0, 4.0]), min_size=2, max_size=2, unique=True),
)
@settings(max_examples=12, deadline=None, suppress_health_check=[HealthCheck.too_slow])
def test_more_bandwidth_never_makes_the_best_plan_slower(
    what: str, case: tuple[str, int, int], factors: list[float]
) -> None:
    cluster = "a100-2x8-hdr8" if what == "network" else "a100-1x8"
    slow, fast = (best_s(ask(case, faster(load_cluster(cluster), what, factor))) for factor in sorted(factors))
    assert fast <= slow * EXACT
