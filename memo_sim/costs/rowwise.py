"""Prices memory-bound kernels: ``max(launch floor, bytes / rate(bytes))``.

- An operator that was measured alone has its own curve.
- Its variants (``gelu.bwd``, ``cross_entropy.stats``) use that curve when they have none.
- Every other operator uses the common curve of memory-bound kernels.
- A fused kernel needs a curve of its own implementation; torch's curves say nothing about it.
- The loss that is fused in every plan (``knobs.Loss``) has Triton's curve, or the operator's where there is none.
"""

from __future__ import annotations

from memo_sim.contract.errors import Infeasible
from memo_sim.contract.hardware import Hardware
from memo_sim.contract.plan import RowwiseKernel
from memo_sim.costs.curves import LogCurve
from memo_sim.program.ir.work import Rowwise
from memo_sim.program.operators.workspaces import FUSED_KINDS

FUSED_LOSS, LOSS = "cross_entropy.fused", "cross_entropy"


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
        self._floor_s = hardware.launch_floor_s.value

    def seconds(self, work: Rowwise, outside: set[str], kernel: RowwiseKernel = "torch") -> float:
        """Return the seconds of an operator when ``kernel`` is the plan's implementation of row-wise operators.

        Raises:
                Infeasible: when the profile has not measured this implementation of the operator.
        """
        if kernel != "torch" and work.kind in FUSED_KINDS:
            curve = self._fused.get((kernel, work.kind))
            if curve is None:
                raise Infeasible(
                    f"the profile has not measured {kernel}'s {work.kind}",
                    where=self._hardware,
                    hint="calibrate on a machine where it is installed, or plan with kernels.rowwise torch",
                )
            return self._time(f"rowwise.{kernel}.{work.kind}", curve, work.moved_bytes, outside)
        if work.kind == FUSED_LOSS and (found := self._fused.get(("triton", LOSS))):
            return self._time(f"rowwise.triton.{LOSS}", found, work.moved_bytes, outside)
        for name in (work.kind, work.kind.split(".")[0]):
            if name in self._by_kind:
                return self._time(f"rowwise.{name}", self._by_kind[name], work.moved_bytes, outside)
        return self._time("memory_bound", self._common, work.moved_bytes, outside)

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
