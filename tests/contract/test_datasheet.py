"""Rough profiles: a data sheet's figures at the fractions of peak of a shipped profile, and nothing in silence."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from memo_sim.contract import codec
from memo_sim.contract.catalog import (
    DATA,
    cluster_from_datasheet,
    list_hardware,
    load_cluster,
    load_hardware,
    with_default_efficiency,
)
from memo_sim.contract.cluster import DEFAULT_EFFICIENCY, Cluster
from memo_sim.contract.datasheet import DATASHEET, KEYS, REFERENCES, DataSheet, parse_datasheet, text_of
from memo_sim.contract.errors import UsageError
from memo_sim.contract.gpu_kind import load_gpu_kind
from memo_sim.contract.hardware import Hardware
from memo_sim.contract.peaks import above_peak, warnings_about
from memo_sim.question_options import EXAMPLE
from tests.refusals import Expected, refused

A100 = "tflops=312,memory=80,pcie=4x16,bandwidth=2039,fp32=19.5,nvlink=600"
RTX4090 = "tflops=165.2,memory=24,pcie=4x16,bandwidth=1008"


def made(text: str) -> Hardware:
    return cluster_from_datasheet(text)[1]


def test_commas_and_spaces_join_the_figures() -> None:
    sheet = parse_datasheet(EXAMPLE)
    assert (sheet.tflops, sheet.memory, sheet.pcie) == (165, 24, (4, 16))
    assert parse_datasheet(EXAMPLE.replace(",", "  ")) == sheet


@given(
    st.builds(
        DataSheet,
        tflops=st.floats(0.1, 1e5),
        memory=st.floats(1, 1e4),
        pcie=st.tuples(st.integers(3, 6), st.sampled_from([1, 4, 8, 16])),
        p2p=st.booleans(),
        devices=st.integers(1, 16),
        like=st.sampled_from(sorted(REFERENCES)),
        name=st.sampled_from(["datasheet", "my-gpu"]),
    )
)
def test_a_data_sheet_is_written_as_it_is_read(sheet: DataSheet) -> None:
    again = parse_datasheet(text_of(sheet))
    assert again.tflops == pytest.approx(sheet.tflops, rel=1e-9)
    assert text_of(again) == text_of(sheet)
    assert (again.pcie, again.p2p, again.devices, again.like, again.name) == (
        sheet.pcie,
        sheet.p2p,
        sheet.devices,
        sheet.like,
        sheet.name,
    )


@pytest.mark.parametrize(
    ("text", "fields"),
    [
        ("", {"got": "''", "wanted": "tflops"}),
        ("tflops=165,memory=24", {"got": "tflops=165", "wanted": "pcie: generation x lanes"}),
        (f"{EXAMPLE},tflop=1", {"got": "'tflop=1'", "hint": "tflops"}),
        (f"{EXAMPLE},memory=48", {"got": "memory"}),
        ("tflops=nan,memory=24,pcie=4x16", {"got": "'nan'", "wanted": "dense bf16"}),
        ("tflops=165,memory=24,pcie=x16", {"got": "'x16'", "wanted": "4x16"}),
        (f"{EXAMPLE},p2p=maybe", {"got": "'maybe'", "wanted": "yes or no"}),
        (f"{EXAMPLE},like=v100", {"got": "'v100'", "wanted": "a100, h100, b200"}),
        (f"{EXAMPLE},name=../x", {"got": "'../x'", "wanted": "small letters"}),
        (f"{EXAMPLE},nodes=2", {"got": "nodes=2", "hint": "network-gbps"}),
        (f"{EXAMPLE},cards=2", {"got": "cards=2", "wanted": "network-gbps"}),
        (f"{EXAMPLE},nvlink=600,p2p=yes", {"got": "nvlink and p2p"}),
        (f"{EXAMPLE},devices=17", {"got": "'17'", "wanted": "1 to 16"}),
    ],
)
def test_what_is_no_data_sheet_is_refused(text: str, fields: dict[str, Expected]) -> None:
    with refused(UsageError, **fields):
        parse_datasheet(text)


def test_the_a100s_own_data_sheet_gives_the_a100s_rates() -> None:
    """The fractions are the A100's, so its own peaks give back what was measured on it."""
    there, here = load_hardware("a100-sxm4-80gb"), made(A100)
    same = pytest.approx
    for theirs, ours in zip(there.gemm, here.gemm, strict=True):
        assert [row[3] for row in ours.rows] == same([row[3] for row in theirs.rows], rel=1e-5)
    for calls, own in zip(there.attention, here.attention, strict=True):
        assert [row[2] for row in own.rows] == same([row[2] for row in calls.rows], rel=1e-5)
    for one, other in zip(there.collectives, here.collectives, strict=True):
        assert other.alpha_s == one.alpha_s
        assert other.bus_bytes_per_s.y == same(one.bus_bytes_per_s.y, rel=1e-5)
    assert here.memory_bound_bytes_per_s.y == same(there.memory_bound_bytes_per_s.y, rel=1e-5)
    assert here.d2h.alone.y == same(there.d2h.alone.y, rel=1e-3)
    assert here.device_memory_bytes.value == same(there.device_memory_bytes.value, abs=1)
    assert here.host_memory_bytes.value == same(there.host_memory_bytes.value, abs=1)


@given(tflops=st.floats(10, 5000), bandwidth=st.floats(50, 20_000), like=st.sampled_from(sorted(REFERENCES)))
def test_nothing_is_faster_than_the_data_sheet(tflops: float, bandwidth: float, like: str) -> None:
    hardware = made(f"tflops={tflops},memory=24,pcie=4x16,bandwidth={bandwidth},like={like}")
    assert above_peak(hardware) == []
    for table in (t for t in hardware.gemm if t.dtype == "bf16"):
        for m, n, k, rate in table.rows:
            seconds = 2 * m * n * k / rate
            assert 2 * (m * k + k * n + m * n) / seconds <= bandwidth * 1e9 * 1.0001
    assert max(hardware.d2h.alone.y) < 31.6e9


def test_without_nvlink_collectives_cross_pcie() -> None:
    apart, direct, linked = made(RTX4090), made(f"{RTX4090},p2p=yes"), made(f"{RTX4090},nvlink=600")
    rates = [max(max(t.bus_bytes_per_s.y) for t in each.collectives) for each in (apart, direct, linked)]
    assert rates[0] < rates[1] < 31.6e9 < rates[2]
    eight = [max(t.bus_bytes_per_s.y) for t in apart.collectives if t.ranks == 8]
    assert max(eight) < rates[0], "eight boards share the host's memory"


def test_it_says_that_it_is_rough_and_what_it_assumes() -> None:
    told = " ".join(warnings_about(made(RTX4090), {}))
    for part in ("rough", "165.2 TFLOP/s", "nothing was measured", "a100-sxm4-80gb", "84 %", "nccl#1639", "(host=)"):
        assert part in told
    assert "(bandwidth=)" not in told
    assert "(bandwidth=)" in " ".join(warnings_about(made(EXAMPLE), {}))
    assert warnings_about(load_hardware("a100-sxm4-80gb"), {}) == []


ROUGH = [name for name in list_hardware() if load_hardware(name).rough]


@pytest.mark.parametrize("name", ROUGH)
def test_a_shipped_rough_profile_is_made_from_the_data_sheet_that_it_names(name: str) -> None:
    shipped = load_hardware(name)
    again = made(shipped.provenance[DATASHEET])
    source = {DATASHEET: shipped.sources[DATASHEET]}
    assert msgspec.structs.replace(again, sources={**again.sources, **source}) == shipped
    assert "data sheet" in source[DATASHEET].text or "whitepaper" in source[DATASHEET].text


def test_a_data_sheet_is_a_cluster_and_a_kind_of_gpu() -> None:
    spaced = RTX4090.replace(",", " ")
    assert load_cluster(spaced) == load_cluster(RTX4090) == cluster_from_datasheet(RTX4090)
    assert load_gpu_kind(f"{spaced} name=mine").of(4).name == "mine-1x4"
    with refused(UsageError, got="'tflop=1'", hint="tflops"):
        load_cluster("tflop=1")


def test_every_key_of_a_data_sheet_has_a_field() -> None:
    assert {key.replace("-", "_") for key in KEYS} == set(DataSheet.__dataclass_fields__)


def test_several_nodes_have_the_network_that_is_given() -> None:
    cluster, _ = cluster_from_datasheet(f"{RTX4090},nodes=4,network-gbps=100,cards=2,name=mine")
    assert (cluster.name, cluster.devices) == ("mine-4x8", 32)
    assert cluster.network is not None
    assert cluster.network.node_bytes_per_s == pytest.approx(2 * 0.94 * 12.5e9)


class TestTheDefaultEfficiency:
    def without(self, tmp_path: Path, *lines: str) -> Path:
        """Return the shipped example without its curves; ``lines`` replace its card."""
        text = (DATA / "clusters" / "example.toml").read_text()
        head, rest = text.split("[network.size_efficiency]")
        _, sources = rest.split("[sources.simai-nic]")
        for line in lines:
            name = line.split(" = ")[0]
            head = "\n".join(line if old.startswith(f"{name} =") else old for old in head.splitlines())
        path = tmp_path / "cluster.toml"
        path.write_text(f"{head}\n[sources.simai-nic]{sources}")
        return path

    def test_equal_cards_have_the_curves_of_the_clusters_given_by_name(self, tmp_path: Path) -> None:
        ours, named = (load_cluster(str(name))[0].network for name in (self.without(tmp_path), "a800-2x8"))
        assert ours is not None
        assert named is not None
        assert ours.size_efficiency is not None
        assert named.size_efficiency is not None
        assert (ours.size_efficiency.x, ours.size_efficiency.y) == (named.size_efficiency.x, named.size_efficiency.y)
        assert [c.y for c in ours.efficiency_by_nodes] == [c.y for c in named.efficiency_by_nodes]

    def test_faster_cards_reach_it_with_more_bytes(self, tmp_path: Path) -> None:
        path = self.without(tmp_path, 'nic_bytes_per_s = { value = 47e9, source = "simai-nic" }')
        ours, example = (load_cluster(str(name))[0] for name in (path, "a800-2x8"))
        assert ours.network is not None
        assert example.network is not None
        assert ours.network.size_efficiency is not None
        assert example.network.size_efficiency is not None
        assert ours.network.size_efficiency.x == pytest.approx([2 * x for x in example.network.size_efficiency.x])
        assert "SimAI" in ours.sources[DEFAULT_EFFICIENCY].text

    def test_a_cluster_with_curves_is_left_alone(self) -> None:
        example = codec.read(DATA / "clusters" / "example.toml", Cluster)
        assert with_default_efficiency(example) is example

    def test_curves_of_more_nodes_need_the_one_of_two(self) -> None:
        network = codec.read(DATA / "clusters" / "example.toml", Cluster).network
        assert network is not None
        with pytest.raises(ValueError, match="efficiency_by_nodes needs size_efficiency"):
            msgspec.structs.replace(network, size_efficiency=None)
