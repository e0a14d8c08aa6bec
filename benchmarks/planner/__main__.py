"""Plays a few plans in SimPy's loop and in numba's, and times lowering and analysis beside them.

    python -m benchmarks.planner [--rounds 3]
    python -m benchmarks.planner --fresh 5         one evaluation of the 530B plan in each of five new processes

Seconds are CPU seconds of this process, the best of several rounds; the ratio is of the two loops in the same round's
plan. All loops must give the same numbers, or the run ends with an error. It needs the extra ``fast``.

``--fresh`` prints the median seconds of whole processes, from their start to their end, and their peak memory: with
numba and as if it were not installed, played with SimPy's events as answers are, and without them as a search does.
"""

from __future__ import annotations

import argparse
import statistics
import subprocess
import sys
import time
from collections import defaultdict
from collections.abc import Callable
from typing import Any, TypeVar

import msgspec
import numpy as np

from benchmarks.environment import with_bytecode
from benchmarks.peak import peak_mib
from memo_sim.contract.catalog import load_cluster, load_model
from memo_sim.contract.cycles import look_seldom
from memo_sim.contract.model import Model
from memo_sim.contract.plan import Decisions, Layout
from memo_sim.engine import event_loop
from memo_sim.engine.compiled_loop import CompiledLoop
from memo_sim.engine.event_loop import Clock
from memo_sim.engine.fast_loop import run_fast
from memo_sim.engine.simulate import Simulation, simulate
from memo_sim.planning.question import with_memory
from memo_sim.program.analysis.columns import fold
from memo_sim.program.analysis.edges import derive_edges
from memo_sim.program.lower import lower

Result = TypeVar("Result")

HUGE = "gpt-530b, 2K, tp8 pp35 v3 dp8, 2,240"
"""The plan that ``--fresh`` evaluates: 280 micro-batches."""


def plans() -> dict[str, Decisions]:
    """Return the plans that are played: one stage, 1F1B of 16 stages, interleaved 35 stages."""
    llama, large = load_model("llama3-70b"), load_model("gpt-175b")
    one_stage = decisions(load_model("gpt-65b"), Layout(tp=8, sequence_parallel=True, cp=8, zero=1), 1 << 20, 1)
    split = msgspec.structs.replace(one_stage, recompute="tokenwise", swapped_tokens=65536, loss_chunk_tokens=16384)
    huge = msgspec.structs.replace(large, name="gpt-530b", layers=105, hidden=20480, heads=128, kv_heads=128)
    huge = msgspec.structs.replace(huge, head_dim=160, ffn_hidden=81920)
    pipeline = Layout(tp=2, sequence_parallel=True, pp=16, dp=2, zero=1)
    interleaved = Layout(tp=8, sequence_parallel=True, pp=35, dp=8, zero=1, schedule="interleaved", virtual_stages=3)
    return {
        "gpt-65b, 1M, tp8 cp8, alpha 0.5": split,
        "llama3-70b, 8K, tp2 pp16 dp2, 1,024": decisions(llama, pipeline, 8192, 1024),
        HUGE: decisions(huge, interleaved, 2048, 2240),
    }


def decisions(model: Model, layout: Layout, seq_tokens: int, global_batch: int) -> Decisions:
    """Return a plan with full recompute."""
    return Decisions(
        model=model,
        layout=layout,
        seq_tokens=seq_tokens,
        recompute="full",
        global_batch=global_batch,
        loss_chunk_tokens=2048,
    )


class Timed:
    """CPU seconds by name: the least of all rounds."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = defaultdict(lambda: float("inf"))

    def __call__(self, name: str, call: Callable[[], Result]) -> Result:
        """Return what ``call`` returns."""
        begin = time.process_time()
        result = call()
        self.seconds[name] = min(self.seconds[name], time.process_time() - begin)
        return result


def measure(plan: Decisions, compiled: CompiledLoop, rounds: int) -> tuple[Timed, int]:
    """Return the seconds of every part of a plan's evaluation, and the number of segments."""
    cluster, hardware = load_cluster("a800-8x8")
    cluster = msgspec.structs.replace(cluster, nodes=4096)
    cluster, hardware = with_memory(cluster, hardware, device_bytes=2**50, host_bytes=2**50)
    timed, segments = Timed(), 0

    def both(*asked: Any) -> Clock:
        nonlocal segments
        segments = len(asked[1])
        slow, fast = timed("simpy", lambda: event_loop.run(*asked)), timed("numba", lambda: compiled(*asked))
        driven = timed("simpy and numba", lambda: compiled.with_simpy(*asked))
        for name in ("start", "end", "heads"):
            if not all(np.array_equal(getattr(slow, name), getattr(each, name)) for each in (fast, driven)):
                sys.exit(f"the loops differ in {name}")
        return fast

    for _ in range(rounds):
        whole = timed("all", lambda: simulate(plan, hardware, cluster, loop=both))
        _parts(whole, timed)
    return timed, segments


def _parts(whole: Simulation, timed: Timed) -> None:
    played = whole.stages[0].program.micro_batches
    programs = timed("lower", lambda: lower(whole.decisions, micro_batches=played))
    columns = timed("fold", lambda: [fold(program) for program in programs])
    timed("edges", lambda: [derive_edges(each) for each in columns])


def evaluate(name: str) -> None:
    """Evaluate one plan in this process, and print its step and the peak memory in MiB."""
    cluster, hardware = load_cluster("a800-280x8")
    look_seldom()
    loop = run_fast.with_simpy if name == "simpy" else run_fast
    found = simulate(plans()[HUGE], hardware, cluster, loop=loop).prediction
    sys.stdout.write(f"{found.step_s} {peak_mib()}\n")


def fresh(runs: int) -> None:
    """Print one row for each way to evaluate the plan."""
    write = sys.stdout.write
    write("| one evaluation | step s | median s | best s | MiB |\n|---|---|---|---|---|\n")
    for numba in ("numba", "no numba"):
        for loop in ("simpy", "search"):
            seconds, said = [], ""
            for _ in range(runs + 1):  # the first one may compile
                began = time.perf_counter()
                said = subprocess.check_output(
                    [sys.executable, "-m", "benchmarks.planner", "--evaluate", loop, "--with", numba],
                    env=with_bytecode(),
                    text=True,
                )
                seconds.append(time.perf_counter() - began)
            step, mib = said.split()
            row = f"{statistics.median(seconds[1:]):.2f} | {min(seconds[1:]):.2f}"
            write(f"| {numba}, {loop} | {step} | {row} | {mib} |\n")
            sys.stdout.flush()


def main() -> None:
    """Print one row a plan."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--fresh", type=int)
    parser.add_argument("--evaluate", choices=("simpy", "search"), help=argparse.SUPPRESS)
    parser.add_argument("--with", dest="numba", choices=("numba", "no numba"), help=argparse.SUPPRESS)
    asked = parser.parse_args()
    if asked.numba == "no numba":
        sys.modules["numba"] = None  # type: ignore[assignment]
    if asked.evaluate:
        evaluate(asked.evaluate)
    elif asked.fresh:
        fresh(asked.fresh)
    else:
        compare(asked.rounds)


def compare(rounds: int) -> None:
    """Print one row a plan."""
    try:
        compiled = CompiledLoop()
    except ImportError:
        sys.exit("numba is not installed: pip install '.[fast]'")
    write = sys.stdout.write
    write(
        "| plan | segments | SimPy s | SimPy, numba s | numba s | ratio | lower s | fold s | edges s | the rest s |\n"
    )
    write("|---|---|---|---|---|---|---|---|---|---|\n")
    for name, plan in plans().items():
        timed, segments = measure(plan, compiled, rounds)
        own = timed.seconds
        loops = own["simpy"], own["simpy and numba"], own["numba"]
        parts = [own[part] for part in ("lower", "fold", "edges")]
        rest = own["all"] - sum(loops) - sum(parts)
        cells = [*(f"{seconds:.3f}" for seconds in loops), f"{loops[0] / loops[2]:.1f}"]
        cells += [f"{seconds:.3f}" for seconds in (*parts, rest)]
        write(f"| {name} | {segments:,} | {' | '.join(cells)} |\n")
        sys.stdout.flush()


if __name__ == "__main__":
    main()
