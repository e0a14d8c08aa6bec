"""How many GPUs: held against asking for every number by itself."""

from __future__ import annotations

from dataclasses import replace

import msgspec
import pytest

from memo_sim.answers.gpus import gpus
from memo_sim.answers.what_if import what_if
from memo_sim.contract import codec
from memo_sim.contract.catalog import load_model
from memo_sim.contract.errors import UsageError
from memo_sim.contract.gpu_kind import DEFAULT_KINDS, GpuKind, load_gpu_kind
from memo_sim.contract.gpus import Gpus, Sized
from memo_sim.contract.units import GIB, KIB
from memo_sim.planning.question import Pins, Question, with_memory
from memo_sim.views.gpus_table import gpus_table, gpus_verdict
from tests.refusals import refused

SHALLOW = msgspec.structs.replace(load_model("gpt-7b"), layers=2)
PINS = Pins(recompute="none", alpha=0.0)


def ask(name: str, *, device_gib: float = 6, pins: Pins = PINS) -> tuple[GpuKind, Question]:
    kind = load_gpu_kind(name)
    cluster, hardware = with_memory(kind.cluster, kind.hardware, device_bytes=int(device_gib * GIB), host_bytes=None)
    return kind, Question(
        model=SHALLOW, cluster=cluster, hardware=hardware, seq_tokens=16 * KIB, system="any", pins=pins
    )


@pytest.fixture(scope="module")
def alone() -> dict[tuple[str, int], float | None]:
    """The best step by kind and number, each asked for by itself; None where nothing fits."""
    found = {}
    for name in ("a800", "h100"):
        kind, question = ask(name)
        for count in (1, 2, 4, 8):
            best = what_if(replace(question, cluster=kind.of(count))).result.best
            found[name, count] = best.step_s if best else None
    return found


def sizes(document: Gpus, kind: str) -> dict[str, Sized]:
    return {role: size for size in document.sizes if size.kind == kind for role in size.roles}


def test_the_roles_are_those_of_every_number_asked_by_itself(alone: dict[tuple[str, int], float | None]) -> None:
    steps = [step for step in alone.values() if step is not None]
    assert None in alone.values()
    within_s = sorted(steps)[len(steps) // 2]
    found = gpus([ask("a800"), ask("h100")], within_s=within_s, most_devices=8)
    document = found.document
    for name in ("a800", "h100"):
        fitting = {count: step for (kind, count), step in alone.items() if kind == name and step is not None}
        roles = sizes(document, name)
        assert roles["fits"].summary.devices == min(fitting)
        quick = [count for count, step in fitting.items() if step <= within_s]
        assert ("within" in roles) == bool(quick)
        if quick:
            assert roles["within"].summary.devices == min(quick)
        tried = [count for count in fitting if name in {t.kind for t in document.tried if t.devices == count}]
        cheapest = min(tried, key=lambda count: count * (fitting[count] or 0))
        assert roles["cheapest"].summary.devices == cheapest
        assert all(size.best.step_s == fitting[size.summary.devices] for size in roles.values())
    chosen = document.chosen
    assert chosen is not None
    assert chosen.best.step_s is not None
    assert chosen.best.step_s <= within_s
    least = min(count for (_, count), step in alone.items() if step is not None and step <= within_s)
    assert chosen.summary.devices == least
    assert found.answer is not None
    assert found.answer.result.best == chosen.best
    assert codec.decode(codec.encode(document), Gpus, where="here") == document


def test_with_prices_the_cheapest_kind_is_chosen() -> None:
    asked = [ask("a800"), ask("h100")]
    document = gpus(asked, prices=[1.0, 100.0], most_devices=8).document
    assert document.chosen is not None
    assert document.chosen.kind == "a800"
    assert document.chosen.roles[-1] == "cheapest"
    assert document.chosen.summary.price_per_device_hour == 1.0
    assert "price" in gpus_verdict(document)


def test_all_kinds_are_asked_for_the_same_batch() -> None:
    """Without a batch, the largest that a whole node of a kind is filled by."""
    asked = [(kind, replace(question, batch_rule="not given")) for kind, question in map(ask, ("a800", "h100"))]
    asked = [(kind, replace(question, seq_tokens=KIB)) for kind, question in asked]
    document = gpus(asked, most_devices=1).document
    assert document.global_batch == 8
    assert "8 sequences (not given: enough for a whole node of each kind)" in document.why[0]
    given = [(kind, replace(question, global_batch=3, batch_rule="")) for kind, question in asked]
    assert gpus(given, most_devices=1).document.global_batch == 3


def test_pins_that_need_more_devices_are_no_refusal_of_the_question() -> None:
    pins = replace(PINS, tp=4)
    document = gpus([ask("a800", device_gib=80, pins=pins)], most_devices=4).document
    assert sizes(document, "a800")["fits"].summary.devices == 4
    assert [tried.fits for tried in document.tried][:3] == [False, False, True]


def test_pins_that_no_number_can_have_are_refused() -> None:
    with pytest.raises(UsageError):
        gpus([ask("a800", pins=replace(PINS, tp=8, cp=2))], most_devices=8)


def test_what_is_never_enough_says_why() -> None:
    found = gpus([ask("a800", device_gib=1)], most_devices=4)
    assert (found.answer, found.document.chosen, found.document.sizes) == (None, None, [])
    assert "no number up to 4 of a800 is enough for any plan" in gpus_table(found.document)
    assert any("no plan fits on up to 4 GPUs: on a800-1x4" in line for line in found.document.why)
    slow = gpus([ask("a800", device_gib=80)], within_s=1e-6, most_devices=4)
    assert slow.document.chosen is None
    assert any("too slow even at 100 % MFU" in line for line in slow.document.why)
    assert "no number up to 4 of a800 is enough for a step within" in gpus_table(slow.document)


class TestKinds:
    def test_numbers_are_parts_of_a_node_and_then_nodes(self) -> None:
        kind = load_gpu_kind("h100")
        assert kind.counts(64) == (1, 2, 4, 8, 16, 32, 64)
        assert [kind.of(count).name for count in (4, 8, 32)] == ["h100-1x4", "h100-1x8", "h100-4x8"]
        six = replace(kind, cluster=msgspec.structs.replace(kind.cluster, devices_per_node=6))
        assert six.counts(24) == (1, 2, 4, 6, 12, 24)
        alone = replace(kind, cluster=msgspec.structs.replace(kind.cluster, network=None))
        assert alone.counts(1024) == (1, 2, 4, 8)

    @pytest.mark.parametrize(
        ("text", "name", "cluster"),
        [
            ("h100", "h100", "h100-2x8"),
            ("h100-ndr4", "h100-ndr4", "h100-2x8-ndr4"),
            ("h100hbm2e", "h100hbm2e", "h100hbm2e-2x8"),
            ("a800-16x8-hdr4", "a800-hdr4", "a800-2x8-hdr4"),
            ("b200-1x8", "b200", "b200-2x8"),
        ],
    )
    def test_a_kinds_clusters_have_names_that_can_be_asked_about(self, text: str, name: str, cluster: str) -> None:
        from memo_sim.contract.catalog import load_cluster

        kind = load_gpu_kind(text)
        assert (kind.name, kind.of(16).name) == (name, cluster)
        assert (kind.of(16), kind.hardware) == load_cluster(cluster)

    def test_the_default_kinds_were_measured(self) -> None:
        assert not any(load_gpu_kind(name).hardware.rough for name in DEFAULT_KINDS)

    def test_what_is_no_kind_is_refused(self) -> None:
        with refused(UsageError, got="'h101'", wanted="h100"):
            load_gpu_kind("h101")


def swapping() -> tuple[GpuKind, Question]:
    """Layers enough that some are swapped: the last two never are."""
    kind, question = ask("h100", device_gib=80, pins=Pins(recompute="none", alpha=1.0))
    return kind, replace(question, model=msgspec.structs.replace(SHALLOW, layers=4))


def test_a_part_of_a_node_has_that_part_of_its_host_memory() -> None:
    document = gpus([swapping()], most_devices=2).document
    assert any("that part of the node's host memory" in line for line in document.why)
    node = load_gpu_kind("h100").hardware.host_memory_bytes.value
    for size in document.sizes:
        memory = size.summary.host_memory
        assert memory.capacity_bytes == int(node * size.summary.devices / 8)
        told = next(each.value for each in size.summary.assumptions if each.name == "host memory")
        assert f"{size.summary.devices} of 8 parts of a node's" in told


def test_host_memory_that_is_given_counts() -> None:
    kind, question = swapping()
    cluster, hardware = with_memory(question.cluster, question.hardware, device_bytes=None, host_bytes=GIB)
    found = gpus([(kind, replace(question, cluster=cluster, hardware=hardware))], most_devices=1).document
    assert found.chosen is None
    assert "host" in found.tried[0].reason
    assert not any("No price" in line for line in found.why)


def test_a_price_that_is_missing_is_named() -> None:
    document = gpus(
        [ask("a800", device_gib=80), ask("h100", device_gib=80)], prices=[1.0, None], most_devices=1
    ).document
    assert any(line.startswith("No price of h100, ") for line in document.why)
