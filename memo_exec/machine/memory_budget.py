"""Computes the memory that a program needs on a machine, item by item, and checks that it is free.

    free device memory - reserve >= arena        reserve: bytes outside the arena, by what uses them

The container's limit counts as the host's memory, not the machine's.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np

from memo_exec.kernels.fp8_scales import SCRATCH_BYTES
from memo_exec.machine.machine import Machine
from memo_sim.contract.errors import CannotRun
from memo_sim.contract.placement import Placement
from memo_sim.contract.units import format_bytes
from memo_sim.program.analysis.columns import expand
from memo_sim.program.analysis.liveness import Liveness, live_bytes, liveness, peak
from memo_sim.program.arena.library_workspaces import (
    LATER,
    LATER_BYTES,
    LIBRARY_OPS,
    MERGES,
    RESULTS,
    merging_bytes,
    results_bytes,
)
from memo_sim.program.ir.program import Program
from memo_sim.program.ir.work import Attention, Fp8Gemm

TILE_BYTES = {"fp32": 2 * 256 * 512 * 4 + 4096, "bf16": 2 * 256 * 512 * 6 + 4096}
"""Scratch of one thread in the backward pass of torch's CPU attention: two blocks of 256 queries x 512 keys in fp32, in
bf16 also their rounded copies, and a few numbers. Measured with torch 2.13 for heads of 64 to 256 features."""

TILES = "attention tiles (one per thread)"
LIBRARIES = "scratch of matrix libraries"
QUANTISING = "scratch of products in FP8"


@dataclass(frozen=True)
class Needs:
    """Bytes that a program needs: buffers on the device, buffers on the host, and the device's reserve."""

    device_bytes: int
    """The arena, or without one the most bytes that the buffer store holds."""
    host_bytes: int
    reserve: dict[str, int] = field(default_factory=dict)
    """Device bytes outside the buffers, by what uses them."""

    @property
    def reserve_bytes(self) -> int:
        """Sum of the reserve's items."""
        return sum(self.reserve.values())

    def line(self) -> str:
        """Return the device's bytes as one line of text."""
        items = ", ".join(f"{format_bytes(size)} {name}" for name, size in self.reserve.items())
        return f"device: {format_bytes(self.device_bytes)} of buffers; reserve: {items}"


def needs_of(
    program: Program,
    machine: Machine,
    placement: Placement | None = None,
    *,
    lent: bool = False,
    library_scratch: Mapping[str, int] | None = None,
) -> Needs:
    """Return the bytes that the program needs on this machine.

    With a placement the device bytes are the arena's. The workspaces that libraries allocate themselves come on top,
    unless the arena serves them (``lent``). ``library_scratch`` is what a CPU's matrix libraries allocate inside one
    instruction, by operator, as ``library_scratch.py`` measures it.
    """
    lives = liveness(program, expand(program))
    device = peak(live_bytes(lives, device=True)).bytes
    host = peak(live_bytes(lives, device=False)).bytes
    reserve = {}
    if placement is not None:
        device = placement.arena_bytes
        if not lent:
            reserve[RESULTS] = results_bytes(program)
    elif machine.device == "cpu":
        device = max(device, _kept_by_size(lives))
    if merges := merging_bytes(program):
        reserve[MERGES] = merges
    if _in_fp8(program):
        reserve[QUANTISING] = SCRATCH_BYTES
    if machine.device == "cpu":
        tiles = [TILE_BYTES[dtype] for dtype in _attention_dtypes(program)]
        scratch = {TILES: machine.compute_threads * max(tiles, default=0)}
        if library_scratch is not None:
            # Results of attention are dead when a product is played, which may take their bytes.
            spare = reserve.get(RESULTS, 0)
            sizes = [size if op in LIBRARY_OPS else size - spare for op, size in library_scratch.items()]
            scratch[LIBRARIES] = max(sizes, default=0)
        larger = max(scratch, key=scratch.__getitem__)  # tiles are part of what is measured
        reserve[larger] = scratch[larger]
    else:
        reserve[LATER] = LATER_BYTES
    return Needs(device, host, reserve)


def _in_fp8(program: Program) -> bool:
    return any(isinstance(i.work, Fp8Gemm) for template in program.templates for i in template.instructions)


def _attention_dtypes(program: Program) -> set[str]:
    works = (i.work for template in program.templates for i in template.instructions)
    return {work.dtype for work in works if isinstance(work, Attention)}


def _kept_by_size(lives: Liveness) -> int:
    """Return the bytes that the CPU's store holds in the end: it reuses blocks of the same size and frees none."""
    used = lives.on_device & (lives.death >= lives.birth)
    lasting = used & (lives.birth < 0)
    total = int(lives.bytes[lasting].sum())
    dynamic = used & ~lasting
    for size in np.unique(lives.bytes[dynamic]).tolist():
        chosen = dynamic & (lives.bytes == size)
        change = np.zeros(lives.instructions + 2, dtype=np.int64)
        np.add.at(change, lives.birth[chosen], 1)
        np.add.at(change, lives.death[chosen] + 1, -1)
        total += size * int(np.cumsum(change).max())
    return total


def check_memory(needs: Needs, machine: Machine) -> None:
    """Refuse needs that do not fit into the free memory.

    The reserve is subtracted first. Ranks that share a host get an equal share of its free memory.

    Raises:
        CannotRun: when device or host memory is too small; the message says which.
    """
    outside = ", ".join(f"{format_bytes(size)} for {name}" for name, size in needs.reserve.items())
    device = format_bytes(needs.device_bytes)
    host_bytes = machine.host_available_bytes // machine.sharing
    host = f"{format_bytes(machine.host_available_bytes)} free of {format_bytes(machine.host_memory_bytes)}"
    if machine.sharing > 1:
        host += f", shared by {machine.sharing} ranks"
    if machine.device == "cpu":
        if needs.device_bytes + needs.host_bytes > host_bytes - needs.reserve_bytes:
            raise CannotRun(
                "the plan needs more memory than this host has free (on a CPU, host memory is also device memory)",
                got=host,
                wanted=f"{device} device + {format_bytes(needs.host_bytes)} host, and {outside}",
                hint="plan a shorter sequence, or recompute instead of swap",
            )
        return
    if needs.device_bytes > machine.device_free_bytes - needs.reserve_bytes:
        raise CannotRun(
            "the plan needs more device memory than is free",
            got=f"{format_bytes(machine.device_free_bytes)} free of {format_bytes(machine.device_memory_bytes)}",
            wanted=f"{device}, and {outside}",
            hint="plan with --device-memory-gib, or stop other processes that use the device",
        )
    if needs.host_bytes > host_bytes:
        raise CannotRun(
            "the plan swaps more bytes than this host has free (the container's limit counts)",
            got=host,
            wanted=format_bytes(needs.host_bytes),
            hint="plan with --host-memory-gib, or a smaller --alpha",
        )
