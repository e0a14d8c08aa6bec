"""Compares gloo's collectives as calibration times them with the same ones inside a step of two ranks, on a CPU.

    torchrun --nproc_per_node 2 -m benchmarks.executor.two_ranks [--layout tp|ulysses|zero1]

A collective of a step takes from the end of the compute before it to the start of the compute that waits for it, on the
rank that arrives last. With ZeRO 1, blocks are reduced and gathered one behind the other without compute between them,
so an instruction counts from its own start to its end. Calls back to back are what calibration timed before. Where an
instruction makes several calls, "as one call" is the time of a single one of all bytes. Because other programs may use
the machine, the lowest fifth of the times counts everywhere.

Kernels of the compute lane are timed by the clock and by the thread's CPU time; the difference is the wait for a core.
With ZeRO 1, rank 0 also plays the step of one replica alone, while the other rank sleeps: what its kernels take less
is what ranks take from each other.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections import defaultdict
from collections.abc import Callable
from datetime import timedelta

import numpy as np
import torch
import torch.distributed as dist
from msgspec.structs import replace

from benchmarks.executor.small_steps import decisions_of
from memo_exec.distributed.groups import make_groups
from memo_exec.distributed.mesh import MeshCoordinates
from memo_exec.interpreter.interpreter import Interpreter
from memo_exec.kernels import KERNELS, Call, Kernel, StepScalars
from memo_exec.probes import collectives
from memo_exec.probes.ranks import Ranks
from memo_sim.contract.hardware import CollectiveKind
from memo_sim.contract.plan import Decisions, Layout
from memo_sim.program.ir.instruction import Lane
from memo_sim.program.ir.work import Collective, LibraryCall
from memo_sim.program.lower import lower

RANKS = 2
STEPS, ROUNDS, SECONDS = 100, 12, 0.05
LOW = 0.2
PATIENCE_S = 60
CPU = torch.device("cpu")
ByWork = dict[tuple[CollectiveKind, int, tuple[LibraryCall, ...]], list[float]]
"""Seconds in a step, by kind, bytes and calls of a collective."""
LAYOUTS = {"tp": Layout(tp=2, sequence_parallel=True), "ulysses": Layout(ulysses=2), "zero1": Layout(dp=2, zero=1)}


def main() -> None:
    """Print the seconds of each kind and size of collective in a step, back to back, and as calibration times it."""
    parser = argparse.ArgumentParser(prog="torchrun -m benchmarks.executor.two_ranks", description=__doc__)
    parser.add_argument("--layout", choices=sorted(LAYOUTS), default="tp")
    for name, default in (("layers", 4), ("width", 96), ("tokens", 512)):
        parser.add_argument(f"--{name}", type=int, default=default)
    options = parser.parse_args()
    dist.init_process_group("gloo", timeout=timedelta(seconds=PATIENCE_S))
    ranks = Ranks(dist.get_rank(), dist.get_world_size(), CPU)
    layout = LAYOUTS[options.layout]
    decisions = replace(decisions_of(options.layers, options.width, options.tokens, layout), global_batch=layout.dp)
    programs = lower(decisions)
    (program,) = programs
    walked = [instruction for _, instruction in program.walk()]
    compute = [i for i, each in enumerate(walked) if each.lane is Lane.COMPUTE]
    found = [i for i, each in enumerate(walked) if isinstance(each.work, Collective) and compute[0] < i]
    own = layout.zero > 0
    found = found if own else [i for i in found if i < compute[-1]]
    before = [max(j for j in compute if j < i) for i in found]
    behind = [min(j for j in compute if j > i) for i in ([] if own else found)]
    groups = make_groups(programs, MeshCoordinates(decisions.layout, ranks.rank), patience_s=PATIENCE_S)
    ids = torch.zeros(1, decisions.local_tokens, dtype=torch.int64)
    times, left = [], []
    clocks = Clocks()
    with Interpreter(
        decisions, program, rank=ranks.rank, groups=groups, sharing=ranks.world, kernels=clocks.kernels
    ) as interpreter:
        for _ in range(STEPS):
            ranks.wait()
            record = interpreter.run_step([(ids, ids)], StepScalars(lr=1e-4))
            clocks.end_step(record.step_s)
            if own:
                times.append(ranks.shortest((record.end_s[found] - record.start_s[found]).tolist()))
                continue
            times.append(ranks.shortest((record.start_s[behind] - record.end_s[before]).tolist()))
            left.append(ranks.shortest((record.start_s[behind] - record.end_s[found]).tolist()))
    together = clocks.text()
    if ranks.first:
        sys.stdout.write(f"two ranks: {together}\n")
    ranks.wait()
    if own and ranks.first:
        sys.stdout.write(f"one rank alone: {_alone(replace(decisions, layout=Layout(), global_batch=1), ids)}\n")
    ranks.wait()
    in_step = np.quantile(np.array(times[2:]), LOW, axis=0).tolist()
    awaited = [True] * len(found) if own else (np.array(left).min(axis=0) > 0).tolist()
    by_work: ByWork = defaultdict(list)
    for i, first, seconds, waits in zip(found, before, in_step, awaited, strict=True):
        work = walked[i].work
        if (
            waits
            and (own or before.count(first) == 1)
            and isinstance(work, Collective)
            and work.kind in collectives.KINDS
        ):
            by_work[work.kind, work.bytes, work.calls].append(seconds)
    _print_collectives(ranks, by_work)
    dist.destroy_process_group()


def _print_collectives(ranks: Ranks, by_work: ByWork) -> None:
    """Time the collectives that a step has, and print them beside their seconds in the step."""
    group = ranks.group(ranks.world)
    for (kind, size, calls), seconds_of in sorted(by_work.items()):
        low: dict[str, float] = defaultdict(float)
        for each, bytes_ in calls or ((kind, size),):
            call = collectives.call_of(each, ranks, ranks.world, bytes_, group)
            together = [collectives.time_calls(ranks, call, group, SECONDS).seconds for _ in range(ROUNDS)]
            low["back to back"] += float(np.quantile(together, LOW))
            low["as calibrated"] += _handed_s(ranks, call, group)
        if calls:
            whole = collectives.call_of(kind, ranks, ranks.world, size, group)
            low["as one call"] = _handed_s(ranks, whole, group)
        step_s = float(np.mean(seconds_of))
        text = "  ".join(f"{way} {each * 1e6:5.0f} us ({each / step_s:.2f})" for way, each in low.items())
        if ranks.first:
            name = f"{kind:15} {size:8,} B in {len(calls) or 1} calls x {len(seconds_of):2}"
            sys.stdout.write(f"{name}: {step_s * 1e6:5.0f} us in a step  {text}\n")


class Clocks:
    """Seconds of the compute lane's kernels in each step, by the clock and by the thread's CPU time."""

    def __init__(self) -> None:
        self._now = [0.0, 0.0]
        self._steps: list[tuple[float, float, float]] = []
        self.kernels = {op: self._timed(kernel) for op, kernel in KERNELS.items()}

    def _timed(self, kernel: Kernel) -> Kernel:
        def play(call: Call) -> None:
            if call.instruction.lane is not Lane.COMPUTE:
                kernel(call)
                return
            begin = time.perf_counter(), time.thread_time()
            kernel(call)
            self._now[1] += time.thread_time() - begin[1]
            self._now[0] += time.perf_counter() - begin[0]

        return play

    def end_step(self, step_s: float) -> None:
        """Keep the seconds of a step."""
        self._steps.append((step_s, self._now[0], self._now[1]))
        self._now = [0.0, 0.0]

    def text(self) -> str:
        """Return the medians of the steps after the first two, and the steps' lowest fifth."""
        steps = np.array(self._steps[2:])
        (step, clock, cpu), low = np.median(steps, axis=0) * 1e3, np.quantile(steps, LOW, axis=0) * 1e3
        kernels = f"kernels {clock:.1f} ms by the clock, {cpu:.1f} ms CPU ({1 - cpu / clock:.0%} wait for a core)"
        return f"median step {step:.1f} ms, {kernels}; lowest fifth {low[0]:.1f}, {low[1]:.1f}, {low[2]:.1f} ms"


def _alone(decisions: Decisions, ids: torch.Tensor) -> str:
    """Return the times of a replica's steps without other ranks, with as many threads as beside one."""
    clocks = Clocks()
    with Interpreter(decisions, lower(decisions)[0], sharing=RANKS, kernels=clocks.kernels) as interpreter:
        for _ in range(STEPS):
            clocks.end_step(interpreter.run_step([(ids, ids)], StepScalars(lr=1e-4)).step_s)
    return clocks.text()


def _handed_s(ranks: Ranks, call: Callable[[], None], group: dist.ProcessGroup) -> float:
    """Return the seconds of a call as calibration times it."""
    handed = [each for _ in range(ROUNDS) for each in collectives.handed_calls(ranks, call, group, SECONDS)]
    return float(np.quantile(handed, LOW))


if __name__ == "__main__":
    main()
