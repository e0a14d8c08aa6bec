"""Prices of products, attention and memory-bound kernels: exact at table points, marked outside the tables."""

from math import log, sqrt

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from memo_sim.contract.catalog import load_hardware
from memo_sim.contract.cluster import Cluster
from memo_sim.contract.errors import Infeasible
from memo_sim.contract.hardware import AttentionPass, AttentionTable, Curve, GemmPass, GemmTable
from memo_sim.contract.plan import Layout
from memo_sim.costs.attention import WAVE_TOKENS, AttentionRates
from memo_sim.costs.curves import LogCurve, between
from memo_sim.costs.gemm import GemmModel, GemmRates
from memo_sim.costs.pricing import Pricer
from memo_sim.program.ir.work import Attention, Gemm, Mask, WindowedAttention
from tests.refusals import refused

PROFILES = ("a800-sxm4-80gb", "a100-sxm4-80gb")
TABLES = [(name, i) for name in PROFILES for i in range(3)]

# A profile like a laptop's: 20 GFLOP/s kernels that lose half of their rate when k is small.
CPU_ROWS = [
    [m, n, k, 20e9 * m / (m + 100) * k / (k + 60)]
    for m in (256.0, 1024.0, 4096.0)
    for n, k in ((768.0, 256.0), (256.0, 256.0), (1024.0, 256.0), (256.0, 1024.0))
]

# Output features, input features and TFLOP/s: EleutherAI/cookbook@e6b8f2bf sizing/results/transformer_data/h_sweep.out.
WIDE_LAYER_PRODUCTS = [
    (36864, 12288, 252.2),
    (12288, 12288, 247.4),
    (49152, 12288, 253.4),
    (12288, 49152, 253.3),
    (18432, 12288, 247.5),
    (12288, 6144, 251.2),
    (24576, 12288, 257.3),
    (12288, 24576, 244.4),
    (9216, 12288, 250.8),
    (12288, 3072, 222.8),
    (4608, 12288, 251.0),
    (12288, 1536, 201.9),
    (6144, 12288, 243.3),
]


def gemm_table(profile: str, index: int) -> GemmTable:
    return load_hardware(profile).gemm[index]


def seconds(model: GemmModel, m: float, n: float, k: float) -> float:
    return 2 * m * n * k / model.rate(m, n, k)


class TestCurves:
    def test_points_middles_and_ends(self) -> None:
        curve = LogCurve.of(Curve(x=[10.0, 1000.0, 4000.0], y=[1.0, 3.0, 4.0], source=""))
        assert [curve(x) for x in (10.0, 1000.0, 4000.0)] == pytest.approx([1.0, 3.0, 4.0])
        assert curve(100.0) == pytest.approx(2.0)
        assert curve(2000.0) == pytest.approx(3.5)
        assert (curve(0.1), curve(1e9)) == (1.0, 4.0)

    def test_covers_its_range_only(self) -> None:
        curve = LogCurve([10.0, 20.0], [1.0, 1.0])
        assert [curve.covers(x) for x in (9.9, 10.0, 15.0, 20.0, 20.1)] == [False, True, True, True, False]

    def test_one_point_is_a_constant(self) -> None:
        assert LogCurve([5.0], [7.0])(123.0) == 7.0

    @given(st.lists(st.floats(0.1, 10), min_size=2, max_size=6), st.floats(-1, 7))
    def test_stays_between_its_neighbours(self, y: list[float], at: float) -> None:
        x = [float(i) for i in range(len(y))]
        left = y[max(0, min(len(y) - 1, int(at)))]
        right = y[max(0, min(len(y) - 1, int(at) + 1))]
        assert min(left, right) - 1e-9 <= between(x, y, at) <= max(left, right) + 1e-9


class TestGemm:
    @pytest.mark.parametrize(("profile", "index"), TABLES)
    def test_table_points_are_exact(self, profile: str, index: int) -> None:
        rows = gemm_table(profile, index).rows
        model = GemmModel(rows)
        assert [model.rate(m, n, k) for m, n, k, _ in rows] == pytest.approx([rate for *_, rate in rows])

    @pytest.mark.parametrize(("profile", "index"), TABLES[:3])
    def test_more_work_never_takes_less_time(self, profile: str, index: int) -> None:
        model = GemmModel(gemm_table(profile, index).rows)
        sizes = [2.0**i for i in range(7, 21)]
        for m in sizes:
            for n in sizes:
                for k in sizes:
                    base = seconds(model, m, n, k)
                    assert base <= seconds(model, m * 1.3, n, k)
                    assert base <= seconds(model, m, n * 1.3, k)
                    assert base <= seconds(model, m, n, k * 1.3)

    @given(st.tuples(*[st.floats(1, 1e7)] * 3))
    def test_never_above_the_largest_measured_rate(self, shape: tuple[float, float, float]) -> None:
        table = gemm_table("a800-sxm4-80gb", 0)
        assert 0 < GemmModel(table.rows).rate(*shape) <= max(row[3] for row in table.rows)

    def test_small_k_and_a_small_grid_fall_off(self) -> None:
        tables = [t for t in load_hardware("a800-sxm4-80gb").gemm if t.dtype == "bf16"]
        fprop, _, wgrad = (GemmModel(table.rows) for table in tables)
        assert fprop.rate(65536, 4096, 1024) < 0.95 * fprop.rate(65536, 4096, 8192)
        assert wgrad.rate(4096, 1024, 65536) < 0.9 * wgrad.rate(4096, 16384, 65536)

    def test_products_of_wide_layers_run_at_published_rates(self) -> None:
        # The source of sustained_gemm: fp16 on A100-SXM4, 8192 tokens, hidden 12,288, tensor parallelism 1 to 8.
        hardware = load_hardware("a100-sxm4-80gb")
        assert hardware.sustained_gemm is not None
        (model,) = (GemmModel(t.rows) for t in hardware.gemm if (t.dtype, t.gemm_pass) == ("fp16", "fprop"))
        ratios = [
            hardware.sustained_gemm.value * model.rate(8192, n, k) / (rate * 1e12) for n, k, rate in WIDE_LAYER_PRODUCTS
        ]
        assert max(abs(ratio - 1) for ratio in ratios) < 0.12
        assert sorted(ratios)[len(ratios) // 2] == pytest.approx(1.0, abs=0.02)

    def test_a_cpu_table_interpolates_between_its_rows(self) -> None:
        model = GemmModel(CPU_ROWS)
        assert [model.rate(*row[:3]) for row in CPU_ROWS] == pytest.approx([row[3] for row in CPU_ROWS])
        for m, n, k in ((512.0, 768.0, 256.0), (2048.0, 512.0, 512.0), (2048.0, 1024.0, 256.0)):
            truth = 20e9 * m / (m + 100) * k / (k + 60)
            assert model.rate(m, n, k) == pytest.approx(truth, rel=0.05)

    def test_one_row_is_a_constant_rate(self) -> None:
        model = GemmModel([[256.0, 256.0, 256.0, 1e10]])
        assert model.rate(1024, 512, 64) == pytest.approx(1e10)

    def test_a_missing_pass_takes_another_and_is_marked(self) -> None:
        rates = GemmRates([GemmTable(dtype="fp32", gemm_pass="fprop", rows=CPU_ROWS, source="")])
        outside: set[str] = set()
        model = rates.model(Gemm(256, 256, 256, "wgrad", "fp32"), outside)
        assert model.rate(256, 768, 256) == pytest.approx(CPU_ROWS[0][3])
        assert outside == {"gemm.fp32.wgrad"}

    @pytest.mark.parametrize("gemm_pass", ["fprop", "dgrad", "wgrad"])
    def test_a_missing_dtype_is_refused(self, gemm_pass: GemmPass) -> None:
        rates = GemmRates([GemmTable(dtype="fp32", gemm_pass="fprop", rows=CPU_ROWS, source="")])
        with refused(Infeasible, got="bf16", wanted="fp32"):
            rates.model(Gemm(256, 256, 256, gemm_pass, "bf16"), set())


def call(
    tokens: int,
    heads: int,
    *,
    head_dim: int = 128,
    batch: int = 1,
    backward: bool = False,
    mask: Mask = "causal",
    k_tokens: int | None = None,
    kernel: str = "flash2",
) -> Attention:
    return Attention(
        batch=batch,
        q_tokens=tokens,
        k_tokens=k_tokens or tokens,
        mask=mask,
        heads=heads,
        kv_heads=heads,
        head_dim=head_dim,
        backward=backward,
        kernel=kernel,
        dtype="bf16",
    )


class TestAttention:
    rates = AttentionRates(load_hardware("a800-sxm4-80gb").attention)

    def rate(self, work: Attention) -> float:
        return work.flops / self.rates.seconds(work, set())

    @pytest.mark.parametrize("backward", [False, True])
    def test_a_window_is_priced_by_the_tiles_that_it_touches(self, backward: bool) -> None:
        """1,024 keys are nine tiles of 128 in each row but the first eight: 9 x 512 - 36 tiles of 512 rows."""

        def windowed(window: int, tokens: int = 65_536, k_tokens: int = 0) -> WindowedAttention:
            keys = k_tokens or tokens
            return WindowedAttention(1, tokens, keys, "causal", 32, 8, 128, backward, "flash2", "bf16", window=window)

        work = windowed(1024)
        keys = -(-(9 * 512 - 36) * 128 // 512)
        sides = (keys, 65_536) if backward else (65_536, keys)
        alike = Attention(1, *sides, "none", 32, 8, 128, backward, "flash2", "bf16")
        assert self.rates.seconds(work, set()) == self.rates.seconds(alike, set())
        times = [self.rates.seconds(windowed(window), set()) for window in (128, 1024, 8192, 65_535)]
        assert times == sorted(times)
        full = self.rates.seconds(call(65_536, 32, backward=backward), set())
        assert times[-1] == pytest.approx(full, rel=0.15)
        ends_of_halves = 2 * self.rates.seconds(windowed(1024, 32_768, 32_768 + 1023), set())
        assert ends_of_halves == pytest.approx(times[1], rel=0.1)

    @pytest.mark.parametrize("profile", PROFILES)
    def test_table_points_are_exact(self, profile: str) -> None:
        tables = load_hardware(profile).attention
        rates = AttentionRates(tables)
        for table in tables:
            for tokens, heads, rate in table.rows:
                work = call(
                    int(tokens),
                    int(heads),
                    head_dim=table.head_dim,
                    backward=table.attention_pass == "backward",
                    kernel=table.kernel,
                )
                outside: set[str] = set()
                assert work.flops / rates.seconds(work, outside) == pytest.approx(rate)
                assert not outside

    @pytest.mark.parametrize(
        ("tokens", "head_dim", "both"),
        # From flash-attention's published figure: causal forward and backward, hidden 2048, 16K tokens per batch.
        [
            (512, 128, 99),
            (1024, 128, 133),
            (2048, 128, 155),
            (4096, 128, 173),
            (8192, 128, 182),
            (16384, 128, 189),
            (512, 64, 88),
            (2048, 64, 140),
            (16384, 64, 171),
        ],
    )
    def test_forward_and_backward_add_up_to_the_published_figure(self, tokens: int, head_dim: int, both: float) -> None:
        heads, batch = 2048 // head_dim, 16384 // tokens
        works = [call(tokens, heads, batch=batch, head_dim=head_dim, backward=b) for b in (False, True)]
        total = sum(w.flops for w in works) / sum(self.rates.seconds(w, set()) for w in works)
        assert total == pytest.approx(both * 1e12, rel=0.005)

    @pytest.mark.parametrize(("backward", "low", "high"), [(False, 210e12, 215e12), (True, 185e12, 190e12)])
    def test_long_sequences_reach_the_sourced_range(self, backward: bool, low: float, high: float) -> None:
        assert low * 0.999 <= self.rate(call(2**20, 4, backward=backward)) <= high

    def test_few_heads_matter_when_short_only(self) -> None:
        assert self.rate(call(4096, 8)) == pytest.approx(self.rate(call(4096, 64)) * 121 / 185, rel=1e-3)
        assert self.rate(call(65536, 8)) == pytest.approx(self.rate(call(65536, 64)))

    @pytest.mark.parametrize("backward", [False, True])
    def test_rates_grow_with_length_and_heads(self, backward: bool) -> None:
        for tokens in (512, 700, 1024, 3000, 8192, 20000, 65536, 300000):
            for heads in (1, 2, 3, 8, 20, 64):
                here = self.rate(call(tokens, heads, backward=backward))
                assert here <= self.rate(call(tokens * 2, heads, backward=backward)) * (1 + 1e-9)
                assert here <= self.rate(call(tokens, heads * 2, backward=backward)) * (1 + 1e-9)

    def test_between_two_lengths_at_the_same_grid(self) -> None:
        length = int(sqrt(8192 * 16384))
        low, high = self.rate(call(8192, 64)), self.rate(call(16384, 32))
        share = log(length / 8192) / log(2)
        assert self.rate(call(length, 128)) == pytest.approx(low + share * (high - low), rel=1e-3)

    def test_without_a_mask_by_the_gain(self) -> None:
        square, full = call(65536, 8), call(65536, 8, mask="none")
        assert self.rate(full) == pytest.approx(1.041 * self.rate(square))

    def test_a_block_counts_its_loop_and_its_grid(self) -> None:
        # A ring's half block has half the queries and all keys. Forward loops over keys, backward over queries.
        forward = self.rate(call(1024, 8, k_tokens=8192, mask="none"))
        assert forward == pytest.approx(1.041 * self.rate(call(8192, 1)), rel=1e-3)
        backward = self.rate(call(1024, 8, k_tokens=8192, mask="none", backward=True))
        assert backward == pytest.approx(1.041 * self.rate(call(1024, 64, backward=True)), rel=1e-3)

    def test_head_sizes_between_tables(self) -> None:
        small, mid, large = (self.rate(call(16384, 32, head_dim=d)) for d in (64, 96, 128))
        assert small < mid < large

    @pytest.mark.parametrize(
        ("work", "marked"),
        [
            (call(8192, 8), False),
            (call(256, 8), True),
            (call(2**22, 8), True),
            (call(8192, 8, head_dim=256), True),
        ],
    )
    def test_beyond_the_table_is_marked(self, work: Attention, marked: bool) -> None:
        outside: set[str] = set()
        self.rates.seconds(work, outside)
        assert outside == ({"attention.flash2.bf16.forward"} if marked else set())

    def test_an_unknown_kernel_names_the_known_ones(self) -> None:
        with refused(Infeasible, got="torch-flash-cpu (bf16)", wanted="flash2 (bf16)"):
            self.rates.seconds(call(8192, 8, kernel="torch-flash-cpu"), set())

    @pytest.mark.parametrize("attention_pass", ["forward", "backward"])
    def test_a_cpu_table_of_one_head_count(self, attention_pass: AttentionPass) -> None:
        table = AttentionTable(
            kernel="flash2",
            dtype="bf16",
            attention_pass=attention_pass,
            head_dim=32,
            rows=[[256.0, 8.0, 10e9], [1024.0, 8.0, 14e9]],
            source="",
        )
        work = call(512, 8, head_dim=32, backward=attention_pass == "backward")
        assert work.flops / AttentionRates([table]).seconds(work, set()) == pytest.approx(12e9)

    def test_longer_rows_waste_a_smaller_fraction_along_the_diagonal(self) -> None:
        """Each row wastes 500 tokens: a square of s rows computes s x (s + 500) / 2 pairs, at a constant rate."""
        lengths = (128.0, 512.0, 1024.0, 2048.0, 8192.0)
        table = AttentionTable(
            kernel="flash2",
            dtype="bf16",
            attention_pass="backward",
            head_dim=32,
            rows=[[s, 8.0, 40e9 / min(2.0, 1 + 500 / s)] for s in lengths],
            source="",
            full_mask_gains=[[1024.0, 1 + 500 / 1024]],
        )
        rates = AttentionRates([table])
        for queries, keys in ((128, 128), (512, 512), (1024, 2048), (512, 4096), (8192, 8192)):
            work = Attention(1, queries, keys, "none", 8, 8, 32, True, "flash2", "bf16")
            assert work.flops / rates.seconds(work, set()) == pytest.approx(40e9, rel=0.02)

    def test_a_gain_that_was_measured_below_one_makes_nothing_slower(self) -> None:
        table = AttentionTable(
            kernel="flash2", dtype="bf16", attention_pass="forward", head_dim=32,
            rows=[[s, 8.0, 40e9] for s in (128.0, 4096.0)], source="", full_mask_gains=[[4096.0, 0.9]],
        )  # fmt: skip
        work = Attention(1, 128, 128, "none", 8, 8, 32, False, "flash2", "bf16")
        assert work.flops / AttentionRates([table]).seconds(work, set()) == pytest.approx(40e9)


GPUS = ("a100-sxm4-80gb", "h100-sxm5-80gb", "b200-sxm6-180gb")


def kernels_of(name: str) -> list[tuple[str, bool]]:
    """Return every kernel and pass of a profile."""
    return sorted({(t.kernel, t.attention_pass == "backward") for t in load_hardware(name).attention})


def blocks_of(work: Attention) -> float:
    return work.heads * (work.k_tokens if work.backward else work.q_tokens) / 128


@pytest.mark.parametrize("name", GPUS)
class TestFewBlocks:
    """Without a mask and below one wave, a call takes no longer than its longest block."""

    def test_no_longer_than_the_causal_call_of_its_flops(self, name: str) -> None:
        """Compare with the causal call of equal FLOPs: half the blocks, with loops of the same length, within a wave.

        On the A100, also as many blocks with loops of half the length. Other profiles' rates were measured length by
        length, and not all of them grow with length.
        """
        rates = AttentionRates(load_hardware(name).attention, wave_tokens=WAVE_TOKENS)
        compared = 0
        for kernel, backward in kernels_of(name):
            for tokens in (512, 1024, 2048, 4096, 8192):
                for heads in (1, 2, 3, 4, 6, 8, 16, 32):
                    causal = call(tokens, heads, backward=backward, kernel=kernel)
                    for queries, keys in ((tokens, tokens // 2), (tokens // 2, tokens)):
                        work = call(queries, heads, k_tokens=keys, mask="none", backward=backward, kernel=kernel)
                        outside: set[str] = set()
                        taken, limit = rates.seconds(work, outside), rates.seconds(causal, outside)
                        as_many = blocks_of(work) == blocks_of(causal)
                        if outside or blocks_of(work) > 64 or (as_many and name != "a100-sxm4-80gb"):
                            continue
                        compared += 1
                        assert work.flops == causal.flops
                        assert taken <= limit * (1 + 1e-9)
        assert compared >= 20

    def test_nothing_changes_from_a_wave_on(self, name: str) -> None:
        tables = load_hardware(name).attention
        rates, without = AttentionRates(tables, wave_tokens=WAVE_TOKENS), AttentionRates(tables)
        for kernel, backward in kernels_of(name):
            for queries, keys, heads in ((128, 128, 128), (4096, 4096, 4), (2048, 2048, 9), (16384, 512, 32)):
                work = call(queries, heads, k_tokens=keys, mask="none", backward=backward, kernel=kernel)
                assert blocks_of(work) >= 128
                assert rates.seconds(work, set()) == without.seconds(work, set())

    def test_nothing_jumps_at_a_wave_or_half_of_one(self, name: str) -> None:
        rates = AttentionRates(load_hardware(name).attention, wave_tokens=WAVE_TOKENS)
        for kernel, backward in kernels_of(name):
            for loop in (1024, 4096):
                before = 0.0
                for grid in range(4096, 20480, 64):
                    queries, keys = (loop, grid) if backward else (grid, loop)
                    work = call(queries, 1, k_tokens=keys, mask="none", backward=backward, kernel=kernel)
                    seconds = rates.seconds(work, set())
                    assert before == 0.0 or seconds < before * (1 + 2 * 64 / grid)
                    before = seconds

    def test_masked_calls_are_left_alone(self, name: str) -> None:
        tables = load_hardware(name).attention
        rates, without = AttentionRates(tables, wave_tokens=WAVE_TOKENS), AttentionRates(tables)
        kernel, backward = kernels_of(name)[0]
        work = call(1024, 4, backward=backward, kernel=kernel)
        assert rates.seconds(work, set()) == without.seconds(work, set())


def test_the_pricer_knows_that_a_gpu_has_waves_and_a_cpu_has_not() -> None:
    hardware = load_hardware("a100-sxm4-80gb")
    cluster = Cluster(name="one", hardware=hardware.name, nodes=1, devices_per_node=1)
    times = [
        Pricer(profile, cluster, Layout()).seconds(call(1024, 4, k_tokens=512, mask="none"))
        for profile in (hardware, replace(hardware, device="cpu"))
    ]
    assert times[1] / times[0] == pytest.approx(2 / 1.041, rel=0.01)
