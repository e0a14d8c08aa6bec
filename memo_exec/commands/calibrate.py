"""Measures this machine and returns its hardware profile. It measures single operators and copies, never a model.

    together (probes/collectives.py, overlap.py, copy_rates.py)   only under torchrun: collectives by size and group,
                                      the slowdown of compute beside them, copies of all devices at once
    updates (probes/host_update.py)   AdamW on the host's cores, by all ranks at once
    operators (probes/operators.py)   tables of GEMM, attention and row-wise operators, with the kernels of runs
    copies (probes/copy_rates.py)     alone by size, in both directions, beside compute, and the slowdown of compute
    workspaces (probes/workspaces.py) the scratch that kernels allocate on a GPU, against what programs declare
    in a step (probes/in_step.py)     on a CPU: the time that a step adds to a kernel that runs alone
    memory (probes/memory.py)         allocation, host memory; the shortest kernel of a GPU

On a CPU a lane issues and computes in one thread, so every rate includes the time between two kernels.
On CUDA instructions are issued ahead, and the shortest time of a kernel is the launch floor. Every number is the median
of repeats and keeps its spread. Operators are timed in several passes, in the order of what they decide
(probes/order.py), and none starts that would end too late (probes/passes.py). When the budget ends (probes/budget.py),
the points that are left are not measured, and the profile's provenance says which.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from functools import partial

import msgspec
import torch

from memo_exec.kernels import ROUNDING
from memo_exec.machine.machine import Machine, library_versions, this_machine, versions
from memo_exec.memory.heap import return_freed
from memo_exec.probes import clocks, collectives, copy_rates, host_update, in_step, memory, overlap, workspaces
from memo_exec.probes import grid as grids
from memo_exec.probes.budget import COPIES_END, QUICK_FROM, TOGETHER_END, Budget
from memo_exec.probes.copies import Lanes
from memo_exec.probes.copy_rates import AllDevices
from memo_exec.probes.grid import Grid
from memo_exec.probes.load import Load, disturbances, middle_spread
from memo_exec.probes.operators import Bench, Operator, operators_of
from memo_exec.probes.order import by_decision, left_out
from memo_exec.probes.passes import PASSES, time_all
from memo_exec.probes.profile import COLLECTIVES, COPIES, HOST, Found, Shared, profile_of
from memo_exec.probes.ranks import Ranks, joined
from memo_exec.probes.tables import Timed, point_of
from memo_exec.probes.timing import Effort, Sample, of_passes
from memo_exec.probes.usable import Usable, usable
from memo_exec.probes.workspaces import Workspace
from memo_sim.contract.hardware import DISTURBED, Hardware
from memo_sim.contract.knobs import DtypeName, Loss, RowwiseKernel
from memo_sim.contract.plan import Decisions
from memo_sim.contract.progress import Progress
from memo_sim.contract.units import format_percent
from memo_sim.program.arena.library_workspaces import IN_USE
from memo_sim.program.ir.instruction import Lane
from memo_sim.program.ir.work import Gemm, LinearLoss, Rowwise

SHARING_A_POINT = 2
"""How many operators at most are timed for one point of a row-wise curve."""

HURRIED = Effort(repeats=1, seconds=0.0, most=1, patience_s=0.0)
"""How the ends of tables are timed when time is short: one call to warm up, and one that counts."""

PROCESS = "the process and its libraries"
"""The item of a CPU's reserve."""

LARGE_BYTES = 2**22
"""Operators with more bytes of operands leave holes in the heap that matter."""


def calibrate(
    *,
    name: str | None = None,
    progress: Progress = lambda done, total: None,
    note: Callable[[str], None] = lambda text: None,
    command: str = "",
    grid: Grid | None = None,
    budget_s: float | None = None,
    dtypes: Sequence[DtypeName] = (),
    spent_s: float = 0.0,
) -> Hardware | None:
    """Return the profile of this machine's device.

    Under torchrun all ranks first measure together. Then rank 0 measures its device alone; the others return None.
    Operators get as many threads as in a run of so many ranks.

    Args:
        name: name of the profile; made from the device's name when None.
        progress: receives (done, total) measurements.
        note: receives messages on rank 0: what starts, and a warning when the machine was busy.
        command: the command line, for the profile's provenance.
        grid: the shapes to measure instead of the default ones; tests give a few.
        budget_s: seconds to take; the grid's when None. The ends of the copies' curves and one point of every other
            curve and table are measured in any case.
        dtypes: in which products and attention are measured besides the grid's: plans in bf16 on a CPU.
        spent_s: how much of ``budget_s`` has passed before this call: the start of the process.

    Raises:
        CannotRun: when no attention kernel works here, or another rank stops.
        UsageError: when a variable that torchrun sets is missing or is not a number.
    """
    begun, called = datetime.now(UTC), time.perf_counter()
    load = Load.now()
    with joined() as ranks:
        machine = this_machine(sharing=ranks.world)
        grid = grid or (grids.CPU if machine.device == "cpu" else grids.CUDA)
        budget = Budget(grid.budget_s if budget_s is None else budget_s, spent_s + time.perf_counter() - called)
        note = note if ranks.first else _silent
        note(f"measuring {machine.name}; the load is {load.text()}")
        kernels = usable(machine, grid)
        middle = grids.middle(grid, kernels.attention[0])
        together = _together(ranks, middle, grid, budget, note) if ranks.world > 1 else None
        updates = host_update.measure(ranks, middle, grid, HOST, over=partial(budget.over, TOGETHER_END))
    if not ranks.first:
        return None
    beside = _in_other_dtypes(machine, grid, dtypes)
    measured = _measure(machine, grid, kernels, budget, progress, beside=beside)
    found, shared = replace(measured.found, host_update=updates), None
    if together is not None:
        shared, everywhere = together
        found = replace(found, copies=found.copies.beside_all(everywhere, COPIES))
    if measured.left_out:
        note(f"not measured: {measured.left_out}")
    for scratch in measured.undeclared:
        note(f"{scratch.name} takes more scratch than plans count: {scratch.text()}")
    disturbed = "; ".join(disturbances(load, machine, measured.samples))
    if disturbed:
        note(
            f"the machine was busy during the calibration: {disturbed}\n  next: calibrate again when nothing else runs"
        )
    seconds = spent_s + (datetime.now(UTC) - begun).total_seconds()
    provenance = {
        **versions(),
        **library_versions(),
        **measured.notes,
        **{f"not measured: {name}": fault for name, fault in kernels.left_out.items()},
        **({"not measured: operators": measured.left_out} if measured.left_out else {}),
        "device": machine.name,
        "compute_threads": str(machine.compute_threads),
        "ranks": str(ranks.world),
        "load_before": load.text(),
        "middle_spread": format_percent(middle_spread(measured.samples)),
        **({DISTURBED: disturbed} if disturbed else {}),
        "created": begun.isoformat(timespec="seconds"),
        "seconds": f"{seconds:.0f}",
        "command": command,
    }
    return msgspec.structs.replace(profile_of(found, shared, name), provenance=provenance)


def _silent(text: str) -> None:
    """Print nothing: only the first rank prints."""
    del text


def _together(
    ranks: Ranks, middle: Decisions, grid: Grid, budget: Budget, note: Callable[[str], None]
) -> tuple[Shared, AllDevices]:
    """Measure collectives, and copies and compute beside them. Every rank has to call this."""
    outside, over = partial(_outside_torch, ranks.device), partial(budget.over, TOGETHER_END)
    tables, communicators = collectives.measure(
        ranks, grid.message_bytes, grid.message_s, COLLECTIVES, outside=outside, told=note, over=over
    )
    note(f"measuring copies of {ranks.world} ranks at once")
    with Lanes(ranks.device, middle, memory.cache_bytes(ranks.device), sharing=ranks.world) as lanes:
        everywhere = copy_rates.all_devices(ranks, lanes, grid, over=over)
        layer = Bench(ranks.device, lanes.cache_bytes).chain(operators_of([middle]))
        note("measuring compute beside collectives")
        slowdowns = overlap.slowdowns(ranks, lanes, grid, layer, COLLECTIVES, over=over)
    return Shared(ranks.world, tables, slowdowns, communicators), everywhere


@dataclass(frozen=True)
class _Measured:
    """The measurements of one device, and notes for the profile's provenance."""

    found: Found
    notes: dict[str, str]
    samples: list[Sample]
    """One sample per operator: its median over all passes."""
    undeclared: list[Workspace]
    """Kernels that take more scratch than programs declare."""
    left_out: str
    """Which points the budget left unmeasured; empty if none."""


def _measure(
    machine: Machine, grid: Grid, kernels: Usable, budget: Budget, progress: Progress, *, beside: Sequence[Operator]
) -> _Measured:
    """Measure one device alone; ``beside``: more operators to time."""
    device = torch.device(machine.device)
    reserve = _reserve(machine)
    base = next(grids.decisions(grid, kernels.attention[0]))
    cache_bytes = memory.cache_bytes(device)
    with Lanes(device, base, cache_bytes, sharing=machine.sharing) as lanes:
        own = _operators(grid, kernels.attention, kernels.rowwise, kernels.losses)
        operators = by_decision([*own, *beside])
        first = copy_rates.measurements(grid)
        total = first + PASSES * len(operators) + 1  # the last one measures memory
        bench = Bench(device, cache_bytes)
        time_one = partial(_inside, lanes, bench)
        added = None
        if machine.device == "cpu":
            added = in_step.measure(base, partial(time_one, effort=Effort()), sharing=machine.sharing)
        # The copies and memory come first: no profile does without them, and the operators use the time they leave.
        layer = bench.chain(operators_of([grids.middle(grid, kernels.attention[0])]))
        copies_end = partial(budget.over, COPIES_END)
        copies = copy_rates.one_device(lanes, grid, layer, COPIES, lambda n: progress(n, total), over=copies_end)
        del layer
        return_freed()
        allocation, ready = memory.allocation(device), memory.host_ready(device)
        allocated = memory.host_allocated(device)
        return_freed()
        with clocks.watched(device) as clock_notes:
            _compile(lanes, bench, operators)

            def in_time(operator: Operator, *, climbing: bool) -> Sample:
                hurried = climbing and budget.over(QUICK_FROM)
                return time_one(operator, HURRIED if hurried else Effort())

            until = budget.operators_until()
            samples = time_all(in_time, operators, until, lambda n: progress(first + n, total))
        missing, operators = left_out(operators, samples), [operators[i] for i in samples]
        middles = [of_passes(found) for found in samples.values()]
        added_s = added.seconds if added else 0.0
        timed = [
            Timed.of(operator.instruction.work, sample, added_s, operator.rowwise)
            for operator, sample in zip(operators, middles, strict=True)
        ]
        scratch = lanes.inside(Lane.COMPUTE, partial(workspaces.measure, bench, grid, kernels.attention, operators))
        floor = added.between if added else lanes.inside(Lane.COMPUTE, partial(memory.launch_floor, device))
    if device.type == "cuda":
        reserve["kernels and libraries"] = max(0, _outside_torch(device) - reserve[IN_USE])
    found = Found(
        machine=machine,
        timed=timed,
        copies=copies,
        floor=floor,
        allocation=allocation,
        host_ready=ready,
        host_allocated=allocated,
        reserve_bytes=reserve,
    )
    progress(total, total)
    passes = {"passes": str(min(map(len, samples.values())))}
    if added:
        passes |= {
            "dispatch_us": f"{added.between.seconds * 1e6:.1f}",
            "longer_in_a_step_us": f"{added.longer_s * 1e6:.1f}",
        }
    sizes = {f"workspace of {each.name}": each.text() for each in scratch}
    return _Measured(
        found, {**passes, **clock_notes, **sizes}, middles, [each for each in scratch if each.exceeds], missing
    )


def _outside_torch(device: torch.device) -> int:
    """Return the device bytes in use that torch's allocator does not hold; 0 on a CPU."""
    if device.type == "cpu":
        return 0
    torch.cuda.synchronize(device)
    free, whole = torch.cuda.mem_get_info(device)
    return int(whole - free - torch.cuda.memory_reserved(device))


def _operators(
    grid: Grid, attention: list[str], rowwise: Sequence[RowwiseKernel] = ("torch",), losses: Sequence[Loss] = ()
) -> list[Operator]:
    """Return all operators to time: GEMMs once, row-wise operators, attention and ``losses`` for every kernel."""
    found: list[Operator] = []
    for implementation in rowwise:
        operators = operators_of(grids.decisions(grid, attention[0], implementation))
        mine = [o for o in operators if implementation in (o.rowwise, "torch")]
        found += _thinned([o for o in mine if grid.wanted(o)])
    for implementation in rowwise:
        parts = operators_of(grids.subsequences(grid, attention[0], implementation))
        mine = [o for o in parts if o.instruction.op in grids.OF_PARTS and o.rowwise == implementation]
        found += _thinned([o for o in mine if grid.wanted(o)])
    several = operators_of(grids.with_experts(grid, attention[0]))
    found += _thinned([o for o in several if o.instruction.op.startswith(grids.OF_EXPERTS) and grid.wanted(o)])
    for implementation in rowwise:
        rounding = operators_of(grids.rounded_swaps(grid, attention[0], implementation))
        found += _thinned([o for o in rounding if o.instruction.op in ROUNDING and grid.wanted(o)])
    for loss in losses:
        inside = operators_of(grids.linear_losses(grid, attention[0], loss))
        found += [o for o in inside if _is_linear_loss(o) and grid.wanted(o)]
    for kernel in attention:
        for head_dim in grid.head_dims:
            found += grids.attention_operators(grid, kernel, head_dim)
    return found


def _in_other_dtypes(machine: Machine, grid: Grid, dtypes: Sequence[DtypeName]) -> list[Operator]:
    """Return the products and attention calls in other dtypes than the grid's; row-wise rates are by bytes of any."""
    found: list[Operator] = []
    for dtype in dict.fromkeys(dtypes):
        if dtype == grid.dtype:
            continue
        other = replace(grid, dtype=dtype)
        names = usable(machine, other).attention
        products = [o for o in operators_of(grids.decisions(other, names[0])) if _is_product(o, dtype)]
        found += [o for o in products if grid.wanted(o)]
        for kernel in names:
            for head_dim in grid.head_dims:
                found += grids.attention_operators(other, kernel, head_dim)
    return found


def _is_product(operator: Operator, dtype: DtypeName) -> bool:
    work = operator.instruction.work
    return isinstance(work, Gemm) and work.dtype == dtype


def _is_linear_loss(operator: Operator) -> bool:
    """Return whether an operator is a part of a loss with the classifier inside; of equal tiles, the first one."""
    work = operator.instruction.work
    return isinstance(work, LinearLoss) and work.column == 0


def _thinned(operators: list[Operator]) -> list[Operator]:
    """Return the operators, with at most ``SHARING_A_POINT`` for the same point of a row-wise curve."""
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


def _compile(lanes: Lanes, bench: Bench, operators: list[Operator]) -> None:
    """Play every fused operator once at every width, so that no pass includes the time of its compilation."""
    mine = [o for o in operators if o.rowwise != "torch" or _is_linear_loss(o)]
    fused = {(o.instruction.op, o.decisions.model.hidden, o.key[2]): o for o in mine}
    for operator in fused.values():
        lanes.inside(Lane.COMPUTE, partial(bench.seconds, operator, Effort(repeats=1, seconds=0.0)))


def _reserve(machine: Machine) -> dict[str, int]:
    """Return the device bytes that are in use before anything is measured, by what uses them.

    On a CPU these are this process's own. Other programs' are not: they change from one moment to the next, and a run
    checks what is free before it allocates.
    """
    if machine.device == "cpu":
        return {PROCESS: memory.resident_bytes()}
    return {IN_USE: machine.device_memory_bytes - machine.device_free_bytes}


def _inside(lanes: Lanes, bench: Bench, operator: Operator, effort: Effort) -> Sample:
    """Return the time of one call of an operator in the compute lane's thread."""
    sample = lanes.inside(Lane.COMPUTE, partial(bench.seconds, operator, effort))
    if operator.bytes > LARGE_BYTES:
        return_freed()  # the C library would keep operands of up to 32 MiB
    return sample
