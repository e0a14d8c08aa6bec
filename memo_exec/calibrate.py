"""Measures this machine and writes it down as a hardware profile: operators and copies by themselves, never a model.

    operators (probes/operators.py)   GEMM, attention and row-wise tables, through the kernels that runs use
    copies (probes/copies.py)         alone by size, duplex, beside compute; what compute loses beside them
    memory (probes/memory.py)         dispatch of one instruction, allocation, host memory

On a CPU a lane issues and computes in one thread, so every rate includes the dispatch of one instruction; on CUDA
issuing runs ahead, and dispatch is the launch floor alone. Every number is the median of repeats and keeps its spread.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import partial

import msgspec
import torch

from memo_exec.attention_kernels import attention_kernels
from memo_exec.machine import Machine, this_machine, versions
from memo_exec.probes import grid as grids
from memo_exec.probes import memory
from memo_exec.probes.copies import Lanes
from memo_exec.probes.grid import Grid
from memo_exec.probes.operators import Bench, Operator, operators_of
from memo_exec.probes.tables import Timed, attention_tables, gemm_tables, point_of, rowwise_curves
from memo_exec.probes.timing import Effort, Sample, of_passes
from memo_sim.contract.errors import CannotRun
from memo_sim.contract.hardware import CopyRates, Curve, Hardware, Quantity, Source
from memo_sim.program.instruction import Lane
from memo_sim.program.work import Rowwise

Progress = Callable[[int, int], None]

OPERATORS, COPIES, MEMORY, SYSTEM, ONE_DEVICE = "operators", "copies", "memory", "system", "one-device"
COPY_BYTES = 2**24
SHARING_A_POINT = 2
PASSES = 3
"""How often everything is timed, one pass after the other: load that comes and goes spoils one of them at most."""


@dataclass(frozen=True)
class _Copies:
    """What the copy lanes measured."""

    rates: dict[Lane, CopyRates]
    slowdown: Quantity
    together_bytes_per_s: float


def calibrate(
    *,
    name: str | None = None,
    progress: Progress = lambda done, total: None,
    command: str = "",
    grid: Grid | None = None,
) -> Hardware:
    """Return the profile of this machine's device; ``grid`` chooses other shapes (a test's few).

    Raises:
        CannotRun: when no attention kernel works here.
    """
    machine = this_machine()
    device = torch.device(machine.device)
    grid = grid or (grids.CPU if machine.device == "cpu" else grids.CUDA)
    kernels = [kernel for kernel, why_not in attention_kernels(machine).items() if not why_not]
    if not kernels:
        raise CannotRun("no attention kernel works on this device", got=machine.name)
    begun = datetime.now(UTC)
    base = next(grids.decisions(grid, kernels[0]))
    dispatch = memory.dispatch(base, device)
    added_s = dispatch.seconds if machine.device == "cpu" else 0.0
    cache_bytes = memory.cache_bytes(device)
    with Lanes(device, base, cache_bytes) as lanes:
        operators = _operators(grid, kernels)
        timings = PASSES * len(operators)
        total = timings + 2 * len(grid.copy_bytes) + 6
        bench = Bench(device, cache_bytes)
        timed = _time_all(lanes, bench, operators, added_s, lambda n: progress(n, total))
        layer = bench.chain(operators_of([grids.middle(grid, kernels[0])]))
        copies = _copies(lanes, grid, layer, lambda n: progress(timings + n, total))
    profile = _profile(machine, timed, copies, dispatch, name)
    progress(total, total)
    seconds = (datetime.now(UTC) - begun).total_seconds()
    provenance = {
        **versions(),
        "device": machine.name,
        "compute_threads": str(machine.compute_threads),
        "created": begun.isoformat(timespec="seconds"),
        "seconds": f"{seconds:.0f}",
        "command": command,
    }
    return msgspec.structs.replace(profile, provenance=provenance)


def _operators(grid: Grid, kernels: list[str]) -> list[Operator]:
    """Return everything to time: products and row-wise operators once, attention for every kernel."""
    found = _thinned([o for o in operators_of(grids.decisions(grid, kernels[0])) if grid.wanted(o)])
    for kernel in kernels:
        for head_dim in grid.head_dims:
            found += grids.attention_operators(grid, kernel, head_dim)
    return found


def _thinned(operators: list[Operator]) -> list[Operator]:
    """Return the operators with at most two that would share a point of a row-wise curve."""
    taken: Counter[tuple[str, int]] = Counter()
    kept = []
    for operator in operators:
        work = operator.instruction.work
        if isinstance(work, Rowwise) and work.moved_bytes > 0:
            point = work.kind, point_of(work)
            taken[point] += 1
            if taken[point] > SHARING_A_POINT:
                continue
        kept.append(operator)
    return kept


def _time_all(
    lanes: Lanes, bench: Bench, operators: list[Operator], added_s: float, tell: Callable[[int], None]
) -> list[Timed]:
    """Time every operator in the compute lane's thread, in several passes over all; ``added_s`` is its dispatch."""
    samples: list[list[Sample]] = [[] for _ in operators]
    for turn in range(PASSES):
        for i, operator in enumerate(operators):
            samples[i].append(lanes.inside(Lane.COMPUTE, partial(bench.seconds, operator, Effort())))
            tell(turn * len(operators) + i + 1)
    return [
        Timed.of(operator.instruction.work, of_passes(found), added_s)
        for operator, found in zip(operators, samples, strict=True)
    ]


@dataclass(frozen=True)
class _Round:
    """Lanes beside each other, once: copies both ways, copies beside compute, and what compute lost."""

    duplex: dict[Lane, Sample]
    beside: dict[Lane, Sample]
    slowdown: float


def _round(
    lanes: Lanes, grid: Grid, layer: Callable[[int], None], copiers: dict[Lane, Callable[[int], None]]
) -> _Round:
    """Run copy lanes beside each other, and each beside a layer's operators."""
    duplex = lanes.together(grid.beside_s, copiers)
    alone = lanes.together(grid.beside_s, {Lane.COMPUTE: layer})[Lane.COMPUTE]
    both = {
        lane: lanes.together(grid.beside_s, {Lane.COMPUTE: layer, lane: copier}) for lane, copier in copiers.items()
    }
    slowed = [found[Lane.COMPUTE].seconds / alone.seconds for found in both.values()]
    return _Round(duplex, {lane: found[lane] for lane, found in both.items()}, sum(slowed) / len(slowed))


def _copies(lanes: Lanes, grid: Grid, layer: Callable[[int], None], tell: Callable[[int], None]) -> _Copies:
    both = (Lane.D2H, Lane.H2D)
    curves: dict[Lane, Curve] = {}
    for lane in both:
        samples = []
        for i, size in enumerate(grid.copy_bytes):
            samples.append(lanes.alone(lane, size, Effort(seconds=0.2)))
            tell(i + 1 + (len(grid.copy_bytes) if lane is Lane.H2D else 0))
        rates = [size / sample.seconds for size, sample in zip(grid.copy_bytes, samples, strict=True)]
        spread = sum(sample.spread for sample in samples) / len(samples)
        curves[lane] = Curve(x=[float(size) for size in grid.copy_bytes], y=rates, source=COPIES, spread=spread)
    copiers = {lane: lanes.copier(lane, COPY_BYTES) for lane in both}
    rounds = [_round(lanes, grid, layer, copiers) for _ in range(PASSES)]
    duplex = {lane: of_passes([each.duplex[lane] for each in rounds]) for lane in both}
    beside = {lane: of_passes([each.beside[lane] for each in rounds]) for lane in both}
    slowed = sorted(each.slowdown for each in rounds)
    slowdown = Quantity(
        value=max(1.0, slowed[len(slowed) // 2]), source=COPIES, spread=(slowed[-1] - slowed[0]) / 2 / slowed[0]
    )
    rates_by_lane = {
        lane: CopyRates(
            alone=curves[lane],
            duplex=_rate(COPY_BYTES, duplex[lane], COPIES),
            all_devices=_rate(COPY_BYTES, beside[lane], COPIES),
        )
        for lane in both
    }
    summed = sum(rates_by_lane[lane].duplex.value for lane in both)
    return _Copies(rates_by_lane, slowdown, max(summed, *(max(curve.y) for curve in curves.values())))


def _rate(size_bytes: int, sample: Sample, source: str) -> Quantity:
    return Quantity(value=size_bytes / sample.seconds, source=source, spread=sample.spread)


def _seconds(sample: Sample, source: str) -> Quantity:
    return Quantity(value=sample.seconds, source=source, spread=sample.spread)


def _profile(machine: Machine, timed: list[Timed], copies: _Copies, dispatch: Sample, name: str | None) -> Hardware:
    device = torch.device(machine.device)
    asked, given_back = memory.allocation(device)
    ready = memory.host_ready(device)
    curves = rowwise_curves(timed, OPERATORS)
    gemm = gemm_tables(timed, OPERATORS)
    peaks = {
        dtype: Quantity(value=max(row[3] for t in gemm if t.dtype == dtype for row in t.rows), source=OPERATORS)
        for dtype in {t.dtype for t in gemm}
    }
    taken = machine.device_memory_bytes - machine.device_free_bytes
    return Hardware(
        name=name or re.sub(r"[^a-z0-9]+", "-", machine.name.lower()).strip("-"),
        device=machine.device,
        peak_flops=peaks,
        device_memory_bytes=Quantity(value=float(machine.device_memory_bytes), source=SYSTEM),
        reserve_bytes={"in use when calibrated": Quantity(value=float(taken), source=SYSTEM)},
        gemm=gemm,
        attention=attention_tables(timed, OPERATORS),
        memory_bound_bytes_per_s=curves["copy"],
        rowwise_bytes_per_s=curves,
        launch_floor_s=_seconds(dispatch, MEMORY),
        d2h=copies.rates[Lane.D2H],
        h2d=copies.rates[Lane.H2D],
        devices_per_uplink=Quantity(value=1.0, source=ONE_DEVICE),
        collectives=[],
        compute_slowdown={"copy": copies.slowdown},
        device_malloc_s=_seconds(asked, MEMORY),
        device_free_s=_seconds(given_back, MEMORY),
        host_register_bytes_per_s=_rate(memory.BLOCK_BYTES, ready, MEMORY),
        host_memory_bytes=Quantity(value=float(machine.host_memory_bytes), source=SYSTEM),
        host_copy_bytes_per_s=Quantity(value=copies.together_bytes_per_s, source=COPIES),
        devices=1,
        sources=_sources(machine),
    )


def _sources(machine: Machine) -> dict[str, Source]:
    where = f"memo-exec calibrate on {machine.name}, torch {torch.__version__}"
    dispatched = " and the dispatch of one instruction" if machine.device == "cpu" else ""
    texts = {
        OPERATORS: f"{where}: single operators through the executor's kernels, newest input in cache, others not; "
        f"median{dispatched}",
        COPIES: f"{where}: copies in the executor's lanes, median; all_devices is the rate beside compute; "
        "host_copy is both directions at once; compute_slowdown is a layer's operators beside one copy lane",
        MEMORY: f"{where}: an instruction without a kernel in the interpreter; blocks of {memory.BLOCK_BYTES} bytes",
        SYSTEM: f"{where}: what the system reports; the container's limit counts as the host's memory",
    }
    sources = {name: Source(kind="measured", text=text) for name, text in texts.items()}
    return {
        **sources,
        ONE_DEVICE: Source(kind="assumed", text="one device was measured: it shares its link with no other"),
    }
