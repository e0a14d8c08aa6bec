"""Prices every kind of work on one cluster; the entry point of this package.

A ``Pricer`` prices work as if its lane alone were busy. ``NodeRates`` then says how lanes slow each other when they are
busy at the same time. Work objects compare by value, so equal work is priced once.
"""

from __future__ import annotations

from memo_sim.contract.cluster import Cluster
from memo_sim.contract.errors import Infeasible
from memo_sim.contract.hardware import GroupedGemmTable, Hardware
from memo_sim.contract.knobs import RowwiseKernel
from memo_sim.contract.plan import Layout
from memo_sim.contract.units import DTYPE_BYTES
from memo_sim.costs.attention import WAVE_TOKENS, AttentionRates, of_year
from memo_sim.costs.collective import CollectiveTimes
from memo_sim.costs.contention import Demands, NodeRates
from memo_sim.costs.gemm import GemmRates
from memo_sim.costs.grouped import GroupedRates
from memo_sim.costs.host_update import HostUpdateTimes
from memo_sim.costs.linear_loss import LinearLossRates
from memo_sim.costs.pace import pace
from memo_sim.costs.rowwise import RowwiseRates
from memo_sim.costs.transfer import CopyTimes
from memo_sim.program.ir.work import (
    AdapterGemm,
    Attention,
    BatchedGemm,
    Collective,
    Copy,
    Exchange,
    Fp8Gemm,
    Fp8GroupedGemm,
    Gemm,
    GroupedGemm,
    HostUpdate,
    LinearLoss,
    PointToPoint,
    Rowwise,
    TileGemm,
    WidenedGemm,
    Work,
)
from memo_sim.program.operators.workspaces import repeated_kv_bytes

__all__ = ["NodeRates", "Pricer"]

TILE_ROWS = 128
"""Rows of a tile of a grouped product (CUTLASS's grouped kernels and torch._grouped_mm on H100: 64 to 256)."""

_PREPARED = 8
"""Number of profiles whose kernel models are cached; a search makes hundreds of pricers for one profile."""


class _Kernels:
    """Models that depend only on the profile: compute kernels and copies."""

    def __init__(self, hardware: Hardware) -> None:
        self.hardware = hardware
        self.gemm = GemmRates(hardware.gemm)
        self.grouped: dict[tuple[str, str], list[GroupedGemmTable]] = {}
        for table in hardware.grouped_gemm:
            self.grouped.setdefault((table.dtype, table.gemm_pass), []).append(table)
        self.sustained = 1.0 if hardware.sustained_gemm is None else hardware.sustained_gemm.value
        wave_tokens = WAVE_TOKENS if hardware.device == "cuda" else None
        tables = of_year(hardware.attention, hardware.eager_libraries)
        self.attention = AttentionRates(tables, wave_tokens=wave_tokens)
        self.rowwise = RowwiseRates(hardware)
        self.linear_loss = LinearLossRates(hardware)
        directions = {"d2h": hardware.d2h, "h2d": hardware.h2d}
        self.copies = {
            name: CopyTimes(name, rates, hardware.launch_floor_s.value) for name, rates in directions.items()
        }


_prepared: list[_Kernels] = []


def _kernels(hardware: Hardware) -> _Kernels:
    """Return the profile's kernel models, cached per profile object."""
    for found in _prepared:
        if found.hardware is hardware:
            return found
    made = _Kernels(hardware)
    _prepared.append(made)
    del _prepared[:-_PREPARED]
    return made


class Pricer:
    """Prices the work of one layout on one cluster; ``outside`` collects the curves that were read outside their range.

    ``outside_of`` has those curves by work, for all work that was priced. ``rowwise`` is the implementation of the
    plan's row-wise operators. ``devices`` wait for each other: those of the layout, unless it is a part of another one.
    """

    def __init__(
        self,
        hardware: Hardware,
        cluster: Cluster,
        layout: Layout,
        *,
        rowwise: RowwiseKernel = "torch",
        devices: int = 0,
    ) -> None:
        self.outside: set[str] = set()
        self.outside_of: dict[Work, frozenset[str]] = {}
        self._rowwise: RowwiseKernel = rowwise
        self._hardware = hardware
        self._kernels = _kernels(hardware)
        self._sustained = self._kernels.sustained
        self._grouped_rates: dict[tuple[str, str], GroupedRates] = {}
        self._collectives = CollectiveTimes(hardware, cluster, layout)
        self._floor_s = hardware.launch_floor_s.value
        self._host_updates = HostUpdateTimes(hardware, min(cluster.devices_per_node, layout.devices))
        self._pace = pace(hardware, devices or layout.devices)
        self._known: dict[Work, float] = {}

    @property
    def demands(self) -> Demands:
        """The fractions of links that each lane's transfers use when they run alone (``NodeRates``)."""
        return self._collectives.demands

    def seconds(self, work: Work) -> float:
        """Return the seconds that ``work`` takes when nothing else runs.

        Raises:
                Infeasible: when the profile has not measured this work (dtype, attention or fused kernel, collective).
        """
        found = self._known.get(work)
        if found is None:
            earlier, self.outside = self.outside, set()
            found = self._known[work] = self._price(work)
            self.outside_of[work] = frozenset(self.outside)
            self.outside |= earlier
        return found

    def _price(self, work: Work) -> float:  # noqa: PLR0911, PLR0912 - one return per kind of work
        kernels = self._kernels
        match work:
            case WidenedGemm():
                return self._pace * self._widened(work)
            case Fp8Gemm():
                return self._pace * self._in_fp8(work)
            case TileGemm():
                return self._pace * self._gemm(work) + self._wide_sum(work)
            case AdapterGemm():
                return self._pace * self._adapter(work)
            case Gemm():
                return self._pace * self._gemm(work)
            case BatchedGemm():
                return self._pace * self._batched(work)
            case Fp8GroupedGemm():
                return self._pace * self._grouped_in_fp8(work)
            case GroupedGemm():
                return self._pace * self._grouped(work)
            case LinearLoss():
                return self._linear_loss(work)
            case Attention():
                seconds = max(self._floor_s, kernels.attention.seconds(work, self.outside))
                return self._pace * seconds + self._repeated(work)
            case Rowwise():
                return kernels.rowwise.seconds(work, self.outside, self._rowwise)
            case Copy():
                return kernels.copies[work.direction].seconds(work.bytes, self.outside)
            case Collective():
                return self._collectives.seconds(work, self.outside)
            case Exchange():
                return self._collectives.exchange_seconds(work, self.outside)
            case PointToPoint():
                return self._collectives.p2p_seconds(work, self.outside)
            case HostUpdate():
                return self._host_updates.seconds(work, self.outside)

    def _repeated(self, work: Attention) -> float:
        """Return the seconds in which grouped keys and values are repeated for every query head (flash1, triton-flash).

        Forward and backward read the grouped tensors and write the repeated ones; backward also reads the repeated
        gradients and writes their sums.
        """
        if (repeated := repeated_kv_bytes(work)) == 0:
            return 0.0
        grouped = repeated * work.kv_heads // work.heads
        return self._kernels.rowwise.stream_seconds((repeated + grouped) * (2 if work.backward else 1))

    def _widened(self, work: WidenedGemm) -> float:
        """Return the seconds of a product and of widening its operand, or, of dgrad, its result, which it adds to.

        A profile without products of the wide dtype prices those of the narrow one, and is said to be left.
        """
        tokens, features = (work.k, work.n) if work.gemm_pass == "wgrad" else (work.m, max(work.n, work.k))
        moved_bytes = tokens * features * (DTYPE_BYTES[work.narrow] + DTYPE_BYTES[work.dtype])
        dtype = work.dtype
        if not self._kernels.gemm.has(dtype):
            self.outside.add(f"gemm.{dtype}.{work.gemm_pass}")
            dtype = work.narrow
        times = 2 if work.gemm_pass == "dgrad" else 1
        product = Gemm(work.m, work.n, work.k, work.gemm_pass, dtype)
        return self._gemm(product) + times * self._kernels.rowwise.stream_seconds(moved_bytes)

    def _in_fp8(self, work: Fp8Gemm) -> float:
        """Return the seconds of a product in FP8.

        Every pass reads both operands along the dimension that is summed, so a profile has rates of one pass.
        """
        model = self._kernels.gemm.of(work.operands, "fprop")
        shape = (work.m, work.n, work.k)
        seconds = max(self._floor_s, work.flops / (model.rate(*shape) * self._kernels.sustained))
        if not model.covers(*shape) and seconds > self._floor_s:
            self.outside.add(f"gemm.{work.operands}")
        if model.thinner(*shape):
            moved_bytes = work.m * work.k + work.k * work.n + DTYPE_BYTES[work.dtype] * work.m * work.n
            seconds = max(seconds, self._kernels.rowwise.stream_seconds(moved_bytes))
        return seconds

    def _adapter(self, work: AdapterGemm) -> float:
        """Return the seconds of a product with one side of an adapter: thin, so at least the time to move its operands.

        Each target is a kernel; all of them together have the rate of one product with the columns of all.
        """
        seconds = self._gemm(Gemm(work.m, work.n, work.k, work.gemm_pass, work.dtype))
        moved_bytes = work.elements * DTYPE_BYTES[work.dtype]
        launches = max(1, len(work.columns)) * self._floor_s
        return max(seconds, launches, self._kernels.rowwise.stream_seconds(moved_bytes))

    def _batched(self, work: BatchedGemm) -> float:
        """Return the seconds of a batched product.

        Its tiles are those of one product with all rows. Each product of the batch has its own operands. Attention
        scores are large and a head's sum is short, so memory may be the limit: the time is at least that of moving the
        operands.
        """
        rows = Gemm(work.batch * work.m, work.n, work.k, work.gemm_pass, work.dtype)
        moved_bytes = work.elements * DTYPE_BYTES[work.dtype]
        return max(self._gemm(rows), self._kernels.rowwise.stream_seconds(moved_bytes))

    def _grouped(self, work: GroupedGemm) -> float:
        """Return the seconds of the products of several experts: the derived ones, as measured products deviate."""
        key = work.dtype, work.gemm_pass
        if key not in self._grouped_rates:
            tables, copies = self._kernels.grouped.get(key, []), self._hardware.device == "cuda"
            self._grouped_rates[key] = GroupedRates(tables, self._as_measured, copies=copies)
        return self._derived_grouped(work) * self._grouped_rates[key].deviation(work, self.outside)

    def _as_measured(self, work: GroupedGemm) -> float:
        """Return the derived seconds of a product alone, not at the clocks that a step sustains."""
        outside, sustained = set(self.outside), self._sustained
        self._sustained = 1.0
        seconds = self._derived_grouped(work)
        self._sustained, self.outside = sustained, outside
        return seconds

    def _derived_grouped(self, work: GroupedGemm) -> float:
        """Return the seconds of the products of several experts in one kernel, derived from those of one product.

        The tiles of all experts fill the device together, so the rate is that of one product with the rows of all
        (wgrad: with the results of all, each summed over the mean expert's rows). But no tile has rows of two experts:
        the rows of each are rounded up to whole tiles. The kernel reads and writes each expert's weight once, which is
        its shortest time when experts have few rows. Copying its result to where the plan has it comes on top.
        """
        if not work.rows:  # a row block of seats that nothing takes (expert parallelism)
            return self._floor_s + self._kernels.rowwise.stream_seconds(work.copied_bytes)
        if work.gemm_pass == "wgrad":
            mean = max(1, round(work.rows / max(1, work.experts)))
            seconds = self._gemm(Gemm(work.experts * work.n, work.k, mean, "wgrad", work.dtype))
            rows = work.rows
        else:
            rows = sum(-(-rows // TILE_ROWS) * TILE_ROWS * count for rows, count in work.sizes)
            seconds = self._gemm(Gemm(rows, work.n, work.k, work.gemm_pass, work.dtype))
        elements = work.experts * work.n * work.k + rows * (work.n + work.k)
        moved_bytes = elements * DTYPE_BYTES[work.dtype]
        seconds = max(seconds, self._kernels.rowwise.stream_seconds(moved_bytes))
        return seconds + (self._kernels.rowwise.stream_seconds(work.copied_bytes) if work.copied_bytes else 0.0)

    def _grouped_in_fp8(self, work: Fp8GroupedGemm) -> float:
        """Return the seconds of the products of several experts in FP8, derived as ``_derived_grouped`` does.

        Frameworks' kernels write and add in place (DeepGEMM, Transformer Engine), so nothing is copied.
        """
        if not work.rows:
            return self._floor_s
        size = DTYPE_BYTES[work.dtype]
        if work.gemm_pass == "wgrad":
            mean = max(1, round(work.rows / max(1, work.experts)))
            product = Fp8Gemm(work.experts * work.n, work.k, mean, "wgrad", work.dtype, work.operands)
            moved_bytes = work.rows * (work.n + work.k) + size * work.experts * work.n * work.k
        else:
            rows = sum(-(-rows // TILE_ROWS) * TILE_ROWS * count for rows, count in work.sizes)
            product = Fp8Gemm(rows, work.n, work.k, work.gemm_pass, work.dtype, work.operands)
            moved_bytes = work.experts * work.n * work.k + rows * (work.k + size * work.n)
        return max(self._in_fp8(product), self._kernels.rowwise.stream_seconds(moved_bytes))

    def _wide_sum(self, work: TileGemm) -> float:
        """Return the seconds in which an input's gradient is summed over tiles in fp32, beyond the product's result.

        The first tile writes the sum, every further one reads and writes it. A weight's gradient is measured as a sum.
        """
        size = DTYPE_BYTES[work.dtype]
        if work.gemm_pass != "dgrad" or size == DTYPE_BYTES["fp32"]:
            return 0.0
        passes = 2 if work.column else 1
        return self._kernels.rowwise.stream_seconds(work.m * work.n * (passes * DTYPE_BYTES["fp32"] - size))

    def _linear_loss(self, work: LinearLoss) -> float:
        """Return the seconds of a part of a loss with the classifier's product inside.

        torch's operators without a table are what they consist of: for each tile the product, and a pass over its
        logits that reads them (statistics), or reads them and writes their gradient.

        Raises:
            Infeasible: when the profile has not measured Triton's kernels.
        """
        if (found := self._kernels.linear_loss.seconds(work, self._sustained, self.outside)) is not None:
            return self._pace * found
        if work.kernel != "torch":
            raise Infeasible(
                f"the profile has not measured {work.kernel}'s loss with the classifier's product inside",
                where=self._hardware.name,
                got=f"linear-{work.kernel} in {work.dtype}",
                hint="memo-exec calibrate on a machine with Triton, or --loss linear or blocks",
            )
        whole, rest = divmod(work.n, work.tile)
        seconds = 0.0
        for columns, times in ((work.tile, whole), (rest, 1 if rest else 0)):
            if times:
                product = self._gemm(Gemm(work.m, columns, work.k, "fprop", work.dtype))
                size = work.m * columns * DTYPE_BYTES[work.dtype]
                kind, written = ("stats", 0) if work.part == "statistics" else ("divided", size)
                logits = Rowwise(f"cross_entropy.{kind}", work.m, size, written)
                seconds += times * (self._pace * product + self._kernels.rowwise.seconds(logits, self.outside))
        return seconds

    def _gemm(self, work: Gemm) -> float:
        """Return a product's seconds; for a shape thinner than any measured one, at least the time to move operands."""
        model = self._kernels.gemm.model(work, self.outside)
        shape = (work.m, work.n, work.k)
        seconds = max(self._floor_s, work.flops / (model.rate(*shape) * self._sustained))
        if model.covers(*shape):
            return seconds
        if seconds > self._floor_s:
            self.outside.add(f"gemm.{work.dtype}.{work.gemm_pass}")
        if model.thinner(*shape):
            elements = work.m * work.k + work.k * work.n + work.m * work.n
            moved_bytes = elements * DTYPE_BYTES[work.dtype]
            seconds = max(seconds, self._kernels.rowwise.stream_seconds(moved_bytes))
        return seconds
