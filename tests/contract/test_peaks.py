"""A profile that says more than its chip can do is told, and no shipped one does."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import msgspec
import pytest

from memo_sim.contract import codec
from memo_sim.contract.catalog import list_clusters, load_cluster, load_hardware
from memo_sim.contract.hardware import Curve, Hardware
from memo_sim.contract.peaks import above_peak, flops_peak, memory_peak, warnings_about

H100 = "h100-sxm5-80gb"


def changed(change: dict[str, Any], name: str = H100) -> Hardware:
    """Return a shipped profile with numbers at paths such as ``gemm.0.rows.0.3`` multiplied."""
    tree = json.loads(codec.encode(load_hardware(name)))
    for path, factor in change.items():
        *parents, last = [int(part) if part.isdigit() else part for part in path.split(".")]
        place = tree
        for part in parents:
            place = place[part]
        place[last] *= factor
    return codec.decode(json.dumps(tree).encode(), Hardware, where="changed")


@pytest.mark.parametrize("name", list_clusters())
def test_no_shipped_profile_is_above_its_chip(name: str) -> None:
    assert above_peak(load_cluster(name)[1]) == []


@pytest.mark.parametrize(
    ("path", "factor", "named"),
    [
        ("gemm.0.rows.0.3", 20.0, "gemm[0]"),
        ("attention.0.rows.0.2", 300.0, "attention[0]"),
        ("attention.0.full_mask_gain", 20.0, "attention[0]"),
        ("peak_flops.bf16.value", 1.5, "peak_flops.bf16"),
        ("memory_bytes_per_s.value", 2.0, "memory_bytes_per_s"),
        ("memory_bound_bytes_per_s.y.-1", 2.0, "memory_bound_bytes_per_s"),
        ("rowwise_bytes_per_s.adamw.y.-1", 3.0, "rowwise_bytes_per_s.adamw"),
        ("d2h.all_devices.value", 100.0, "d2h"),
        ("h2d.alone.y.0", 1000.0, "h2d"),
    ],
)
def test_a_rate_above_the_peak_is_named(path: str, factor: float, named: str) -> None:
    path = path.replace("-1", str(len(load_hardware(H100).memory_bound_bytes_per_s.x) - 1)) if "bound" in path else path
    path = path.replace("-1", str(len(load_hardware(H100).rowwise_bytes_per_s["adamw"].x) - 1))
    (text,) = above_peak(changed({path: factor}))
    assert text.startswith(named)
    assert "is the most that a Hopper chip with these peaks can have" in text


def test_a_cpu_is_not_called_a_gpu() -> None:
    fast = changed({"gemm.0.rows.0.3": 20.0})
    (text,) = above_peak(msgspec.structs.replace(fast, device="cpu", generation=""))
    assert "that a CPU with these peaks" in text


def test_collectives_are_held_to_the_links_unless_switches_reduce() -> None:
    profile = load_hardware(H100)
    tables = {table.kind: number for number, table in enumerate(profile.collectives)}
    over = {f"collectives.{tables[kind]}.bus_bytes_per_s.y.0": 1e6 for kind in ("all_gather", "all_reduce")}
    (text,) = above_peak(changed(over))
    assert "all_gather" in text


def test_a_cache_may_be_faster_than_the_memory() -> None:
    profile = load_hardware(H100)
    fast = Curve(x=[1e6, 1e8, 4e9], y=[9e12, 9e12, 3e12], source=profile.memory_bound_bytes_per_s.source)
    assert above_peak(msgspec.structs.replace(profile, memory_bound_bytes_per_s=fast)) == []


def test_peaks_are_the_lower_of_the_profiles_and_its_generations() -> None:
    profile = load_hardware(H100)
    assert flops_peak(profile, "bf16") == profile.peak_flops["bf16"].value
    assert flops_peak(changed({"peak_flops.bf16.value": 3.0}), "bf16") == 989.5e12
    assert memory_peak(profile) == 3.35e12
    assert memory_peak(load_hardware("a100-sxm4-80gb")) == 2.039e12
    unknown = msgspec.structs.replace(load_hardware("a100-sxm4-80gb"), generation="Volta")
    assert memory_peak(unknown) is None
    assert above_peak(unknown) == []


def test_warnings_name_few_parts_and_what_to_do(tmp_path: Path) -> None:
    assert warnings_about(load_hardware(H100), {"FLOPs in bf16": 0.6, "bytes of memory": 1.005}) == []
    (step,) = warnings_about(load_hardware(H100), {"FLOPs in bf16": 1.2, "bytes of memory": 0.3})
    assert "120 % of the FLOPs in bf16" in step
    five = changed(
        {f"gemm.{number}.rows.0.3": 50.0 for number in range(3)} | {"d2h.duplex.value": 1e3, "h2d.duplex.value": 1e3}
    )
    told = warnings_about(five, {})
    assert len(told) == 5
    assert "2 more" in told[3]
    assert "Measure it again" in told[4]
