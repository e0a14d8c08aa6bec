"""The H100 profile names a source of every figure, published or measured here, and stays below physical limits."""

import json
import re
from pathlib import Path

import pytest

from benchmarks.frameworks.curves import curves as framework_curves
from memo_sim.contract import codec
from memo_sim.contract.catalog import load_hardware
from memo_sim.contract.hardware import Curve, Hardware
from memo_sim.costs.attention import of_year

ROOT = Path(__file__).parents[2]
FRAMEWORKS = json.loads((ROOT / "reports/h100_2026-11-22/frameworks.json").read_text())
NVLINK_BYTES_PER_S = 450e9
GEN5_BYTES_PER_S = 63e9
HBM_BYTES_PER_S = 3350e9


@pytest.fixture(scope="module")
def h100() -> Hardware:
    return load_hardware("h100-sxm5-80gb")


def curves(hardware: Hardware) -> dict[str, Curve]:
    found = {"memory_bound": hardware.memory_bound_bytes_per_s}
    found |= {"d2h": hardware.d2h.alone, "h2d": hardware.h2d.alone}
    return found | {f"{t.kind}.{t.ranks}": t.bus_bytes_per_s for t in hardware.collectives}


def test_every_curve_has_five_points(h100: Hardware) -> None:
    assert all(len(curve.x) >= 5 for curve in curves(h100).values())
    assert all(len(table.rows) >= 5 for table in h100.gemm if table.dtype == "bf16")
    assert all(len({row[0] for row in table.rows}) >= 5 for table in h100.attention)


def test_every_source_is_used_and_our_own_name_their_report(h100: Hardware) -> None:
    written = codec.encode(h100).decode()
    assert all(f'"source": "{name}"' in written for name in h100.sources)
    for name, source in h100.sources.items():
        reports = re.findall(r"reports/[\w./-]+\.(?:json|md)", source.text)
        assert bool(reports) == name.startswith(("memo-", "sustained-", "host-launch"))
        assert all((ROOT / report).is_file() for report in reports)


def test_measured_tables_are_those_of_the_report(h100: Hardware) -> None:
    measured = json.loads((ROOT / "reports/h100_2026-11-22/calibrate.json").read_text())
    assert [t.rows for t in h100.gemm if t.dtype == "bf16"] == [t["rows"] for t in measured["gemm"]]
    assert h100.memory_bound_bytes_per_s.y == measured["memory_bound_bytes_per_s"]["y"]
    for library in ("eager", "compiled"):
        for pattern, (moved, rates) in framework_curves(FRAMEWORKS, library).items():
            assert h100.framework_rowwise_bytes_per_s[library][pattern].x == moved
            assert h100.framework_rowwise_bytes_per_s[library][pattern].y == rates


def test_nothing_is_faster_than_the_data_sheet(h100: Hardware) -> None:
    peak = h100.peak_flops["bf16"].value
    faster = {"fp8-tensor": 2.0, "fp8-block": 2.0}  # FP8's dense peak over bf16's, on the data sheet
    assert all(0 < row[3] < faster.get(t.dtype, 1.0) * peak for t in h100.gemm for row in t.rows)
    assert all(0 < row[2] < peak for table in h100.attention for row in table.rows)
    assert max(h100.memory_bound_bytes_per_s.y) < HBM_BYTES_PER_S
    assert max(*h100.d2h.alone.y, *h100.h2d.alone.y) < GEN5_BYTES_PER_S
    # The switches do the reduction of an all-reduce, so only its bus rate may exceed the link's rate.
    assert all(max(t.bus_bytes_per_s.y) < NVLINK_BYTES_PER_S for t in h100.collectives if t.kind != "all_reduce")


@pytest.mark.parametrize(
    ("kernel", "published"),
    [
        ("flash2", (191, 260, 298, 319, 333, 335)),
        ("torch-cudnn", (315, 410, 484, 518, 529, 539)),
        ("flash3", (292, 423, 521, 579, 602, 616)),
    ],
)
def test_published_points_of_attention_stand_as_they_are(
    h100: Hardware, kernel: str, published: tuple[int, ...]
) -> None:
    tables = of_year(h100.attention, "2024")
    (table,) = (t for t in tables if (t.kernel, t.attention_pass, t.head_dim) == (kernel, "forward", 128))
    rates = {(tokens, heads): rate for tokens, heads, rate in table.rows}
    lengths = (512, 1024, 2048, 4096, 8192, 16384)
    assert [rates[tokens, 16 * 16384 / tokens] / 1e12 for tokens in lengths] == pytest.approx(published)


def test_fewer_heads_never_gain_in_published_rates(h100: Hardware) -> None:
    for table in (t for t in h100.attention if t.source != "memo-attention"):
        for (tokens, heads, rate), (other, more, faster) in zip(table.rows, table.rows[1:], strict=False):
            assert other != tokens or (more > heads and faster >= rate)


@pytest.mark.parametrize(
    ("name", "kernel", "head_dim", "both"),
    # From flash-attention's published pictures: causal forward and backward, hidden 2048, 16K tokens per batch.
    [
        ("a100-sxm4-80gb", "flash1", 128, (55, 62, 69, 76, 80, 83)),
        ("a100-sxm4-80gb", "triton-flash", 128, (50, 61, 68, 74, 78, 80)),
        ("a100-sxm4-80gb", "triton-flash", 64, (59, 75, 79, 76, 79, 80)),
        ("a100-sxm4-80gb", "flash1", 64, (58, 70, 77, 87, 92, 97)),
        ("h100-sxm5-80gb", "flash1", 128, (98, 109, 108, 126, 135, 137)),
        ("h100-sxm5-80gb", "flash1", 64, (104, 123, 136, 138, 149, 156)),
    ],
)
def test_flash_attention_1_has_the_published_rate_of_both_passes(
    name: str, kernel: str, head_dim: int, both: tuple[int, ...]
) -> None:
    tables = [t for t in load_hardware(name).attention if (t.kernel, t.head_dim) == (kernel, head_dim)]
    for tokens, published in zip((512, 1024, 2048, 4096, 8192, 16384), both, strict=True):
        fastest = {t.attention_pass: max(rate for length, _, rate in t.rows if length == tokens) for t in tables}
        assert 3.5e-12 / (1 / fastest["forward"] + 2.5 / fastest["backward"]) == pytest.approx(published, rel=1e-3)
