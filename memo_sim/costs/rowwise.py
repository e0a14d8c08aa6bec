"""Prices memory-bound kernels: ``max(launch floor, bytes / rate(bytes))``.

- An operator that was measured alone has its own curve.
- Its variants (``gelu.bwd``, ``cross_entropy.stats``) use that curve when they have none.
- Every other operator uses the common curve of memory-bound kernels.
- A fused kernel needs a curve of its own implementation; torch's curves say nothing about it. Only the rounding of
  swapped rows on copy lanes, norms of heads and merges have torch's price until they are measured (``LATER_KINDS``):
  Triton's kernels go over memory fewer times.
- With a framework's library, an operator takes the sum of its kernels (``operators/framework_kernels.py``). A kernel
  has the curve of its library and pattern, or else that of the operator.
- The loss that is fused in every plan (``knobs.Loss``) has Triton's curve, or the operator's where there is none.
"""

from __future__ import annotations

from collections.abc import Set as AbstractSet

from memo_sim.contract.errors import Infeasible
from memo_sim.contract.hardware import Hardware
from memo_sim.contract.knobs import FrameworkLibrary, RowwiseKernel
from memo_sim.costs.curves import LogCurve
from memo_sim.program.ir.work import FRESH, Rowwise
from memo_sim.program.operators.framework_kernels import SHARED_KERNELS, Kernel, framework_kernels, library_of
from memo_sim.program.operators.workspaces import FUSED_KINDS, LATER_KINDS

FUSED_LOSS, LOSS = "cross_entropy.fused", "cross_entropy"

HIGHER = 1.01
"""How many times as high a rate is at every size, at least, where a kernel always wins: rounding then never decides."""


class RowwiseRates:
    """Rates of the memory-bound kernels of one profile."""

    def __init__(self, hardware: Hardware) -> None:
        self._hardware = hardware.name
        self._common = LogCurve.of(hardware.memory_bound_bytes_per_s)
        self._by_kind = {kind: LogCurve.of(curve) for kind, curve in hardware.rowwise_bytes_per_s.items()}
        self._fused = {
            (kernel, kind): LogCurve.of(curve)
            for kernel, curves in hardware.fused_rowwise_bytes_per_s.items()
            for kind, curve in curves.items()
        }
        self._framework = {
            (library, pattern): LogCurve.of(curve)
            for library, curves in hardware.framework_rowwise_bytes_per_s.items()
            for pattern, curve in curves.items()
        }
        self._floor_s = hardware.launch_floor_s.value

    def seconds(self, work: Rowwise, outside: set[str], kernel: RowwiseKernel = "torch") -> float:
        """Return the seconds of an operator when ``kernel`` is the plan's implementation of row-wise operators.

        Raises:
                Infeasible: when the profile has not measured this implementation of the operator.
        """
        if work.kind == FRESH:
            return 0.0
        library = library_of(kernel)
        if library is not None and (kernels := framework_kernels(work, library)):
            return sum(self._kernel_seconds(one, work, library, outside) for one in kernels)
        return self._time(*self._kernel_curve(work.kind, kernel), work.moved_bytes, outside)

    def wins(self, kinds: AbstractSet[str], one: RowwiseKernel, other: RowwiseKernel) -> set[str] | None:
        """Return the ``kinds`` of work that ``one`` plays at a higher rate than ``other`` at every size.

        None when it may be slower at some size of some kind; other kinds have the same curve. Neither implementation
        is a framework's.

        Raises:
            Infeasible: when the profile has not measured an implementation of one of the kinds.
        """
        found = set[str]()
        for kind in kinds:
            (_, mine), (_, others) = (self._kernel_curve(kind, kernel) for kernel in (one, other))
            if mine.is_above(others, HIGHER):
                found.add(kind)
            elif mine is not others:
                return None
        return found

    def is_beyond_floor(self, kind: str, kernel: RowwiseKernel, moved_bytes: float) -> bool:
        """Return whether work that moves at least these bytes is certainly longer than the launch floor."""
        return moved_bytes > self._floor_s * self._kernel_curve(kind, kernel)[1].highest()

    def _kernel_curve(self, kind: str, kernel: RowwiseKernel) -> tuple[str, LogCurve]:
        """Return the name and the curve of an implementation's kernel for a kind of work; not a framework's.

        Raises:
            Infeasible: when the profile has not measured it.
        """
        if kernel == "triton" and kind in FUSED_KINDS:
            curve = self._fused.get((kernel, kind))
            if curve is None:
                raise Infeasible(
                    f"the profile has not measured {kernel}'s {kind}",
                    where=self._hardware,
                    hint="calibrate on a machine where it is installed, or --rowwise torch",
                )
            return f"rowwise.{kernel}.{kind}", curve
        if kernel == "triton" and kind in LATER_KINDS and (found := self._fused.get((kernel, kind))):
            return f"rowwise.{kernel}.{kind}", found
        if kind == FUSED_LOSS and (found := self._fused.get(("triton", LOSS))):
            return f"rowwise.triton.{LOSS}", found
        return self._curve_of(kind)

    def _kernel_seconds(self, kernel: Kernel, work: Rowwise, library: FrameworkLibrary, outside: set[str]) -> float:
        """Return the seconds of one kernel of a framework, over all its launches."""
        name, curve = self._framework_curve(kernel, work, library)
        each = kernel.moved_bytes(work) // kernel.launches
        return kernel.launches * self._time(name, curve, each, outside)

    def _framework_curve(self, kernel: Kernel, work: Rowwise, library: FrameworkLibrary) -> tuple[str, LogCurve]:
        """Return the name and curve of a kernel's pattern, its library's own or that of ``SHARED_KERNELS``.

        A pattern without a curve has that of memory-bound kernels where the profile has others of the library, because
        the operator's own curve then is that of memo-exec's kernels.
        """
        libraries = [one for one in (library, SHARED_KERNELS.get(library)) if one]
        for one in libraries:
            if (own := self._framework.get((one, kernel.pattern))) is not None:
                return f"rowwise.{one}.{kernel.pattern}", own
        measured = any(name in libraries for name, _ in self._framework)
        return ("memory_bound", self._common) if measured else self._curve_of(work.kind)

    def _curve_of(self, kind: str) -> tuple[str, LogCurve]:
        """Return the name and the curve of an operator that is one kernel of torch."""
        kind = kind.replace("geglu", "swiglu")  # as many passes; no profile has a curve of its own for it
        for name in (kind, kind.split(".")[0]):
            if name in self._by_kind:
                return f"rowwise.{name}", self._by_kind[name]
        return "memory_bound", self._common

    def stream_seconds(self, moved_bytes: float) -> float:
        """Return the shortest time in which any kernel can read and write ``moved_bytes`` bytes."""
        return moved_bytes / self._common(moved_bytes) if moved_bytes > 0 else 0.0

    def _time(self, name: str, curve: LogCurve, moved_bytes: int, outside: set[str]) -> float:
        streaming = moved_bytes / curve(moved_bytes) if moved_bytes > 0 else 0.0
        if streaming <= self._floor_s:
            return self._floor_s
        if not curve.covers(moved_bytes):
            outside.add(name)
        return streaming
