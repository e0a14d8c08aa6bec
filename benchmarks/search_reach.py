"""Measures large questions: seconds, candidates, plays and peak memory of each, one after the other.

    python -m benchmarks.search_reach 70b-on-64 --limit 300
    python -m benchmarks.search_reach 70b-on-64 --jobs 1,2                   by one and by two processes
    python -m benchmarks.search_reach 70b-on-64 --jobs 1,2 --runs 5          the whole command, with its imports
    python -m benchmarks.search_reach 70b-on-64 --without-numba              where numba is not installed
    python -m benchmarks.search_reach 13b-on-8 --enumerate 60 --calculon DIR   beside enumerations

A question that does not end within the limit prints what it has done by then. Each runs in a process of its own.
``--runs N`` runs ``memo-sim what-if`` N times instead, and prints the median seconds. One run before these is not
measured: Python then has memo's bytecode in files, and numba the compiled loop, as after any user's first command.

``--enumerate N`` also evaluates the candidates of evenly spaced layouts, about N, without pruning. ``--calculon`` names
a checkout of github.com/calculon-ai/calculon, a public tool that evaluates closed formulas. It enumerates its own
candidates of the questions that have its model and system files, in a mixed order, for ten CPU seconds.
The time of a sample is scaled to the whole space. All ratios are of CPU seconds of the same run. Ratios of wall seconds
say something only where nothing else runs, so the machine's load is printed.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import resource
import signal
import statistics
import subprocess
import sys
import time
from dataclasses import dataclass
from multiprocessing.connection import Connection

from benchmarks.environment import with_bytecode
from benchmarks.peak import peak_mib
from memo_sim.answers.what_if import exact_ranks
from memo_sim.contract.catalog import load_cluster, load_model
from memo_sim.contract.cycles import look_seldom
from memo_sim.contract.errors import Infeasible
from memo_sim.planning.outcome import SearchResult
from memo_sim.planning.processes import command_processes
from memo_sim.planning.question import Question
from memo_sim.planning.search import search
from memo_sim.planning.space import Space


@dataclass(frozen=True)
class Asked:
    """A model, its cluster, tokens of a sequence, sequences of a step, and the system.

    ``calculon`` are that tool's files of the model and the system, and its number of devices.
    """

    model: str
    cluster: str
    seq_tokens: int
    global_batch: int
    system: str = "every-layout"
    calculon: tuple[str, str, int] | None = None


QUESTIONS = {
    "70b-on-64": Asked("llama3-70b", "h100-8x8", 8192, 1024),
    "70b-on-64-a800": Asked("llama3-70b", "a800-8x8", 8192, 1024),
    "70b-on-512": Asked("llama3-70b", "h100-64x8", 8192, 1024),
    "deepseek-on-256": Asked("deepseek-v3", "h100-32x8", 32768, 256),
    "deepseek-on-256-any": Asked("deepseek-v3", "h100-32x8", 32768, 256, "any"),
    "qwen3-235b-on-256": Asked("qwen3-235b-a22b", "h100-32x8", 32768, 256),
    "65b-1m-on-64": Asked("gpt-65b", "a800-8x8", 1 << 20, 1),
    "sppo-on-32": Asked("llama3-70b", "h100-4x8", 1 << 19, 1, "sppo"),
    "sppo-1m-on-32": Asked("llama3-70b", "h100-4x8", 1 << 20, 1, "sppo"),
    "metp-on-64": Asked("gpt-65b", "a800-8x8", 1 << 20, 1, "metp"),
    "405b-on-4096": Asked("llama3-405b", "h100-512x8", 8192, 4096),
    "405b-128k-on-16384": Asked("llama3-405b", "h100-2048x8", 131072, 2048),
    "405b-1m-on-16384": Asked("llama3-405b", "h100-2048x8", 1 << 20, 256),
    "13b-on-8": Asked("gpt-13b", "a100-1x8", 2048, 16, calculon=("models/gpt3-13B.json", "systems/a100_80g.json", 8)),
    "175b-on-64": Asked(
        "gpt-175b", "a100-8x8", 2048, 64, calculon=("models/gpt3-175B.json", "systems/a100_80g.json", 64)
    ),
}


class _TimeIsUp(KeyboardInterrupt):
    """Raised out of whatever is computed; the compiled loop lets only interrupts through."""


def question_of(name: str) -> Question:
    """Return a question by its name."""
    asked = QUESTIONS[name]
    cluster, hardware = load_cluster(asked.cluster)
    return Question(
        load_model(asked.model),
        cluster,
        hardware,
        asked.seq_tokens,
        system=asked.system,
        global_batch=asked.global_batch,
        open_micro_batch=True,
    )


@dataclass(frozen=True)
class Took:
    """Seconds of a search: of the clock, of its CPU in all processes; and its candidates, where they were counted."""

    wall_s: float
    cpu_s: float
    candidates: int = 0


def _ask(name: str, limit_s: int, jobs: int, without_numba: bool, told: Connection) -> None:
    if without_numba:
        sys.modules["numba"] = None  # type: ignore[assignment]
    look_seldom()
    question = question_of(name)
    seen = [0, 0]

    def progress(done: int, every: int) -> None:
        seen[:] = done, every

    def stop(*_: object) -> None:
        raise _TimeIsUp

    signal.signal(signal.SIGALRM, stop)
    signal.alarm(limit_s)
    wall, cpu = time.perf_counter(), _cpu_s()
    found: SearchResult | None = None
    others: list[int] = []
    with command_processes(jobs):
        try:
            found = search(question, keep=exact_ranks(question, 1), siblings=True, progress=progress)
        except KeyboardInterrupt:  # the compiled loop raises one of its own
            pass
        signal.alarm(0)
        others = [peak_mib(each.pid or 0) for each in multiprocessing.active_children()]
    wall_s, cpu_s = time.perf_counter() - wall, _cpu_s() - cpu
    memory = f"{' and '.join(map(str, [peak_mib(), *others]))} MiB"
    took = f"{jobs} process{'es' if jobs > 1 else ''}, {wall_s:.1f} s ({cpu_s:.1f} s CPU)"
    if found is None:
        sys.stdout.write(f"{name}: not done after {took}, {seen[0]} of {seen[1]} candidates, {memory}\n")
        told.send(None)
        return
    step_s = found.best.prediction.step_s if found.best else None
    count = found.evaluated + found.pruned
    sys.stdout.write(
        f"{name}: {took}, {count} candidates, {found.evaluated} evaluated, {len(found.played)} played, {memory},"
        f" best step {step_s} s\n"
    )
    told.send(Took(wall_s, cpu_s, count))


WHOLE_COMMAND = "from memo_sim.cli import main; main()"
WITHOUT_NUMBA = "import sys; sys.modules['numba'] = None; from memo_sim.cli import main; main()"


def _whole_command(name: str, jobs: int, runs: int, *, without_numba: bool) -> Took:
    """Return the median seconds of ``memo-sim what-if`` in fresh processes, with imports and what it prints."""
    asked = QUESTIONS[name]
    words = ["what-if", asked.model, "--cluster", asked.cluster, "--seq-len", asked.seq_tokens]
    words += ["--global-batch", asked.global_batch, "--system", asked.system, "--top", 1, "--jobs", jobs]
    code = WITHOUT_NUMBA if without_numba else WHOLE_COMMAND
    wall_s, cpu_s = list[float](), list[float]()
    command = [sys.executable, "-c", code, *map(str, words)]
    for run in range(runs + 1):
        wall, cpu = time.perf_counter(), _cpu_s()
        done = subprocess.run(
            command, env=with_bytecode(), stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True, check=False
        )
        if done.returncode not in {0, Infeasible.exit_code}:  # where no plan fits, that is the answer
            raise subprocess.CalledProcessError(done.returncode, command, stderr=done.stderr)
        if run:
            wall_s.append(time.perf_counter() - wall)
            cpu_s.append(_cpu_s() - cpu)
    took = Took(statistics.median(wall_s), statistics.median(cpu_s))
    sys.stdout.write(
        f"{name}: the whole command, {jobs} process{'es' if jobs > 1 else ''}, median of {runs}: {took.wall_s:.2f} s"
        f" ({took.cpu_s:.2f} s CPU), from {min(wall_s):.2f} to {max(wall_s):.2f} s"
        f" ({min(cpu_s):.2f} to {max(cpu_s):.2f} s CPU)\n"
    )
    return took


def _cpu_s() -> float:
    """Return the CPU seconds of this process and of its children that have ended."""
    used = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return sum(each.ru_utime + each.ru_stime for each in used)


def _enumerate(name: str, count: int, told: Connection) -> None:
    """Evaluate about ``count`` candidates without pruning; those of evenly spaced layouts."""
    question = question_of(name)
    space = Space(question)
    every = [len(space.of(layout)) for layout in space.layouts]
    stride = max(1, sum(every) // count)
    layouts, whole = set(space.layouts[::stride]), sum(every)
    of_all = Space.of
    Space.of = lambda self, layout: of_all(self, layout) if layout in layouts else []  # type: ignore[method-assign]
    cpu = _cpu_s()
    found = search(question, prune=False)
    cpu_s, seen = _cpu_s() - cpu, found.evaluated + found.pruned
    told.send(Took(0.0, cpu_s * whole / seen, whole))
    sys.stdout.write(
        f"{name}: without pruning {seen} of {whole} candidates took {cpu_s:.1f} s CPU, so all"
        f" {cpu_s * whole / seen:.0f} s CPU; best of these {found.ranked[0].prediction.step_s} s\n"
    )


ITS_SEARCH = """
import json, logging, sys, time, types
for absent in ("psutil", "pandas"):  # for its tables and its number of CPUs
    sys.modules.setdefault(absent, types.ModuleType(absent))
import calculon
from calculon.llm import *
from calculon.llm.optimal_execution import OptimalExecution
logging.disable(logging.CRITICAL)
model, system, devices, batch, limit_s = sys.argv[1], sys.argv[2], *map(int, sys.argv[3:])
app = Llm.Application(calculon.io.read_json_file(model))
syst = System(calculon.io.read_json_file(system))
sets = []
for tp in Llm.get_all_tensor_parallelisms(devices, app.hidden, app.attn_heads):
    for pp in Llm.get_all_pipeline_parallelisms(devices, tp, app.num_blocks):
        dp = Llm.get_data_parallelism(devices, tp, pp)
        if dp > batch:
            continue
        for chunks in Llm.get_valid_pipeline_interleavings(app.num_blocks, pp):
            for recompute in ("full", "attn_only", "none"):
                for sharded in ((True, False) if dp > 1 else (False,)):
                    for kind in ("ar", "p2p_rs_ag", "rs_ag"):
                        sets.append((1, False, devices, batch, "float16", app, syst, tp, pp, dp, chunks,
                                     batch // dp * dp, recompute, sharded, kind, [True], False, True, True))
counts = [OptimalExecution.search(True, *each)[1] for each in sets]
begun, done = time.process_time(), 0
order = sorted(range(len(sets)), key=lambda n: (n * 0.6180339887) % 1)
for place, n in enumerate(order):
    done += OptimalExecution.search(False, *sets[n])[1]
    if time.process_time() - begun > limit_s:
        break
print(json.dumps({"count": sum(counts), "done": done, "cpu_s": time.process_time() - begun}))
"""
"""Script for calculon: the executions of its own search, those of some layouts in a mixed order until the limit."""


def _calculon(name: str, folder: str, limit_s: int) -> Took | None:
    asked = QUESTIONS[name]
    if asked.calculon is None:
        return None
    arguments = [*asked.calculon, asked.global_batch, limit_s]
    done = subprocess.run(
        [sys.executable, "-c", ITS_SEARCH, *map(str, arguments)], cwd=folder, capture_output=True, text=True, check=True
    )
    theirs = json.loads(done.stdout)
    whole_s = theirs["cpu_s"] * theirs["count"] / theirs["done"]
    sys.stdout.write(
        f"{name}: calculon evaluates {theirs['done']} of its {theirs['count']} executions in {theirs['cpu_s']:.1f} s"
        f" CPU, so all in {whole_s:.0f} s CPU\n"
    )
    return Took(0.0, whole_s, theirs["count"])


def _in_a_process(work: object, *arguments: object) -> Took | None:
    """Run a measurement in a process of its own, and return what it tells."""
    ours, theirs = multiprocessing.Pipe()
    process = multiprocessing.get_context("spawn").Process(target=work, args=(*arguments, theirs))  # type: ignore[arg-type]
    process.start()
    theirs.close()
    try:
        took: Took | None = ours.recv()
    except EOFError:
        took = None
    process.join()
    return took


def main() -> None:
    """Ask the questions that are named, or all."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", choices=[*QUESTIONS, []], default=[])
    parser.add_argument("--limit", type=int, default=300, help="seconds for each question")
    parser.add_argument("--jobs", default="1", help="numbers of processes, joined by commas")
    parser.add_argument("--runs", type=int, default=0, help="run the whole command so often instead, for its median")
    parser.add_argument("--without-numba", action="store_true", help="as where numba is not installed")
    parser.add_argument("--enumerate", type=int, default=0, help="evaluate so many candidates without pruning, too")
    parser.add_argument("--calculon", help="a checkout of github.com/calculon-ai/calculon")
    options = parser.parse_args()
    if options.runs and (options.enumerate or options.calculon):
        parser.error("--runs measures whole commands: --enumerate and --calculon are beside a search alone")
    jobs = [int(text) for text in options.jobs.split(",")]
    for name in options.names or QUESTIONS:
        sys.stdout.write(f"{name}: load {os.getloadavg()[0]:.1f} on {os.cpu_count()} CPUs\n")
        sys.stdout.flush()
        took: dict[int, Took | None]
        if options.runs:
            took = {
                each: _whole_command(name, each, options.runs, without_numba=options.without_numba) for each in jobs
            }
        else:
            took = {each: _in_a_process(_ask, name, options.limit, each, options.without_numba) for each in jobs}
        first = took[jobs[0]]
        beside = {f"{each} processes": one for each, one in took.items() if each != jobs[0]}
        for kind, one in beside.items():
            if first and one:
                sys.stdout.write(
                    f"{name}: {kind} take {one.wall_s / first.wall_s:.2f} of the wall seconds of {jobs[0]}, and"
                    f" {one.cpu_s / first.cpu_s:.2f} of the CPU seconds\n"
                )
        others: dict[str, Took | None] = {}
        if options.enumerate:
            others["all candidates without pruning"] = _in_a_process(_enumerate, name, options.enumerate)
        if options.calculon:
            others["calculon's enumeration"] = _calculon(name, options.calculon, min(10, options.limit))
        for kind, one in others.items():
            if first and one:
                sys.stdout.write(
                    f"{name}: {kind}: {one.cpu_s / first.cpu_s:.1f} times the CPU seconds of the search, for"
                    f" {one.candidates / first.candidates:.1f} times the candidates\n"
                )


if __name__ == "__main__":
    main()
