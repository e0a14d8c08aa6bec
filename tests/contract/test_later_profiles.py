"""The B200 and H200 profiles use published measurements only, with a source per curve, below physical limits."""

import pytest

from memo_sim.contract import codec
from memo_sim.contract.catalog import load_hardware
from memo_sim.contract.hardware import Curve, Hardware
from memo_sim.costs.attention import of_year

GEN5_BYTES_PER_S = 63e9
NVLINK_BYTES_PER_S = {"b200-sxm6-180gb": 900e9, "h200-sxm5-141gb": 450e9}
HBM_BYTES_PER_S = {"b200-sxm6-180gb": 7.68e12, "h200-sxm5-141gb": 4.8e12}


@pytest.fixture(scope="module", params=sorted(NVLINK_BYTES_PER_S))
def hardware(request: pytest.FixtureRequest) -> Hardware:
    return load_hardware(request.param)


@pytest.fixture(scope="module")
def b200() -> Hardware:
    return load_hardware("b200-sxm6-180gb")


FP8 = 2.0
"""FP8's dense peak over bf16's, on H100, H200 and B200 (their data sheets)."""


def curves(hardware: Hardware) -> dict[str, Curve]:
    found = {"memory_bound": hardware.memory_bound_bytes_per_s, **hardware.rowwise_bytes_per_s}
    found |= {"d2h": hardware.d2h.alone, "h2d": hardware.h2d.alone}
    return found | {f"{t.kind}.{t.ranks}": t.bus_bytes_per_s for t in hardware.collectives}


def bf16_products(hardware: Hardware) -> list[list[list[float]]]:
    return [table.rows for table in hardware.gemm if not table.dtype.startswith("fp8")]


def test_every_curve_has_five_points_or_says_that_fewer_were_published(hardware: Hardware) -> None:
    assert all(len(curve.x) >= 5 for curve in curves(hardware).values())
    assert all(len(table.rows) >= 5 for table in hardware.gemm if table.dtype == "bf16")
    assert all(len({row[0] for row in table.rows}) >= 5 for table in hardware.attention)
    few = {name for name, source in hardware.sources.items() if "Fewer than five published points" in source.text}
    told = {name for name, curve in curves(hardware).items() if curve.source in few}
    assert told == {"d2h", "h2d", *hardware.rowwise_bytes_per_s}


def test_every_source_is_used_and_none_is_a_fit(hardware: Hardware) -> None:
    written = codec.encode(hardware).decode()
    assert all(f'"source": "{name}"' in written for name in hardware.sources)
    assert not any(source.kind == "fitted" for source in hardware.sources.values())


def test_the_h200_computes_as_fast_as_the_h100() -> None:
    """They have one die, one power limit and the same clocks."""
    h100, h200 = load_hardware("h100-sxm5-80gb"), load_hardware("h200-sxm5-141gb")
    assert bf16_products(h200) == bf16_products(h100)
    ours = [
        [(t.kernel, t.head_dim, t.rows) for t in each.attention if t.kernel == "torch-flash"] for each in (h100, h200)
    ]
    assert ours[0] == ours[1]


def test_host_times_were_fitted_on_cases_of_another_machine(b200: Hardware) -> None:
    assert b200.host_launch_s is not None
    assert b200.host_pass_s is not None
    told = {name for name, source in b200.sources.items() if source.cases}
    assert told == {b200.host_launch_s.source, b200.host_pass_s.source}
    assert all(case.startswith("vtrain-single") for name in told for case in b200.sources[name].cases)


def test_nothing_is_faster_than_the_data_sheet(hardware: Hardware) -> None:
    peak = hardware.peak_flops["bf16"].value
    assert all(0 < row[3] < peak for rows in bf16_products(hardware) for row in rows)
    in_fp8 = [row[3] for table in hardware.gemm if table.dtype.startswith("fp8") for row in table.rows]
    assert all(0 < rate < FP8 * peak for rate in in_fp8)
    assert all(0 < row[2] < peak for table in hardware.attention for row in table.rows)
    for curve in (hardware.memory_bound_bytes_per_s, *hardware.rowwise_bytes_per_s.values()):
        assert max(curve.y) < HBM_BYTES_PER_S[hardware.name]
    assert max(*hardware.d2h.alone.y, *hardware.h2d.alone.y) < GEN5_BYTES_PER_S
    nvlink = NVLINK_BYTES_PER_S[hardware.name]
    # The switches do the reduction of an all-reduce, so only its bus rate may exceed the link's rate. For up to 4 MiB,
    # a single alpha for all sizes subtracts too much from the shortest messages.
    for table in (t for t in hardware.collectives if t.kind != "all_reduce"):
        points = zip(table.bus_bytes_per_s.x, table.bus_bytes_per_s.y, strict=True)
        assert max(rate for size, rate in points if size > 2**22) < nvlink


def test_larger_is_never_slower_where_memory_binds(hardware: Hardware) -> None:
    for curve in (hardware.memory_bound_bytes_per_s, hardware.d2h.alone, hardware.h2d.alone):
        assert curve.y == sorted(curve.y)


def test_large_collectives_gain_with_size(hardware: Hardware) -> None:
    for table in hardware.collectives:
        large = [y for x, y in zip(table.bus_bytes_per_s.x, table.bus_bytes_per_s.y, strict=True) if x >= 2**26]
        assert large == sorted(large), (table.kind, table.ranks)


def test_all_passes_and_kinds_are_there(hardware: Hardware) -> None:
    assert {t.gemm_pass for t in hardware.gemm if t.dtype == "bf16"} == {"fprop", "dgrad", "wgrad"}
    kinds = {"all_reduce", "all_gather", "reduce_scatter", "all_to_all", "send_recv"}
    assert {(t.kind, t.ranks) for t in hardware.collectives} == {(kind, ranks) for kind in kinds for ranks in (2, 4, 8)}
    sides = {(t.kernel, t.head_dim): set() for t in hardware.attention}
    for t in hardware.attention:
        sides[t.kernel, t.head_dim].add(t.attention_pass)
    assert all(passes == {"forward", "backward"} for passes in sides.values())


@pytest.mark.parametrize(
    ("gemm_pass", "shape", "fraction"),
    [
        ("fprop", (4096, 57344, 8192), 0.4866883120666592),
        ("dgrad", (4096, 8192, 10240), 0.49804462256915516),
        ("wgrad", (10240, 8192, 4096), 0.5979461534906494),
        ("wgrad", (16384, 53248, 4096), 0.45356188065293307),
    ],
)
def test_published_products_stand_as_they_are(
    b200: Hardware, gemm_pass: str, shape: tuple[int, int, int], fraction: float
) -> None:
    (table,) = (t for t in b200.gemm if (t.dtype, t.gemm_pass) == ("bf16", gemm_pass))
    rates = {tuple(row[:3]): row[3] for row in table.rows}
    assert rates[shape] == pytest.approx(fraction * 2250e12, rel=1e-3)


@pytest.mark.parametrize(
    ("attention_pass", "tokens", "heads", "fraction"),
    [
        ("forward", 4096, 64, 0.8351022631313875),
        ("forward", 32768, 8, 1.201756785556635),
        ("backward", 4096, 16, 0.7566382097451044),
        ("backward", 131072, 16, 0.8266642928922248),
    ],
)
def test_published_attention_counts_the_unmasked_half(
    b200: Hardware, attention_pass: str, tokens: int, heads: int, fraction: float
) -> None:
    """The publisher counts the whole square of scores, and reports fractions of the peak."""
    tables = of_year(b200.attention, "2025")
    for kernel in ("torch-cudnn", "te-fused"):
        (table,) = (t for t in tables if (t.kernel, t.attention_pass, t.head_dim) == (kernel, attention_pass, 128))
        rates = {(row[0], row[1]): row[2] for row in table.rows}
        assert rates[tokens, heads] == pytest.approx(fraction * 2250e12 / 2, rel=1e-3)


def test_the_price_of_the_loss_is_the_measured_one(b200: Hardware) -> None:
    """Four moves of a bf16 logit at .2795 of 8000 GiB/s equal our three moves at three quarters of that rate."""
    curve = b200.rowwise_bytes_per_s["cross_entropy"]
    logits = 4096 * 64128
    assert 6 * logits / curve.y[0] == pytest.approx(8 * logits / (0.2795145022199592 * 8000 * 2**30), rel=1e-3)


@pytest.mark.parametrize(("attention_pass", "published"), [("forward", 1418.1), ("backward", 1208.6)])
def test_flash_attention_4_has_its_published_rates(b200: Hardware, attention_pass: str, published: float) -> None:
    (table,) = (
        t for t in b200.attention if (t.kernel, t.attention_pass, t.head_dim) == ("flash4", attention_pass, 128)
    )
    assert max(rate for tokens, _, rate in table.rows if tokens == 8192) == pytest.approx(published * 1e12, rel=1e-3)
