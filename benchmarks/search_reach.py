"""Measures large questions: seconds, candidates, plays and peak memory of each, one after the other.

    python -m benchmarks.search_reach 70b-on-64 --limit 300

A question that does not end within the limit prints what it has done by then. Each runs in a process of its own.
"""

from __future__ import annotations

import argparse
import multiprocessing
import signal
import sys
import time
from dataclasses import dataclass
from pathlib import Path

from memo_sim.contract.catalog import load_cluster, load_model
from memo_sim.planning.outcome import SearchResult
from memo_sim.planning.question import Question
from memo_sim.planning.search import search


@dataclass(frozen=True)
class Asked:
    """A model, its cluster, tokens of a sequence, sequences of a step, and the system."""

    model: str
    cluster: str
    seq_tokens: int
    global_batch: int
    system: str = "every-layout"


QUESTIONS = {
    "70b-on-64": Asked("llama3-70b", "h100-8x8", 8192, 1024),
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
}


class _TimeIsUp(BaseException):
    pass


def _peak_mib() -> int:
    """Return the peak of this process alone: a child's ``ru_maxrss`` starts at the peak of its parent."""
    (line,) = (line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith("VmHWM:"))
    return int(line.split()[1]) >> 10


def _ask(name: str, limit_s: int) -> None:
    asked = QUESTIONS[name]
    cluster, hardware = load_cluster(asked.cluster)
    question = Question(
        load_model(asked.model),
        cluster,
        hardware,
        asked.seq_tokens,
        system=asked.system,
        global_batch=asked.global_batch,
        open_micro_batch=True,
    )
    seen = [0, 0]

    def progress(done: int, every: int) -> None:
        seen[:] = done, every

    def stop(*_: object) -> None:
        raise _TimeIsUp

    signal.signal(signal.SIGALRM, stop)
    signal.alarm(limit_s)
    wall, cpu = time.perf_counter(), time.process_time()
    found: SearchResult | None = None
    try:
        found = search(question, keep=3, siblings=True, progress=progress)
    except _TimeIsUp:
        pass
    took = f"{time.perf_counter() - wall:.1f} s ({time.process_time() - cpu:.1f} s CPU)"
    peak_mib = _peak_mib()
    if found is None:
        sys.stdout.write(f"{name}: not done after {took}, {seen[0]} of {seen[1]} candidates, {peak_mib} MiB\n")
        return
    step_s = found.best.prediction.step_s if found.best else None
    sys.stdout.write(
        f"{name}: {took}, {found.evaluated + found.pruned} candidates, {found.evaluated} evaluated,"
        f" {len(found.played)} played, {peak_mib} MiB, best step {step_s} s\n"
    )


def main() -> None:
    """Ask the questions that are named, or all."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("names", nargs="*", choices=[*QUESTIONS, []], default=[])
    parser.add_argument("--limit", type=int, default=300, help="seconds for each question")
    options = parser.parse_args()
    for name in options.names or QUESTIONS:
        process = multiprocessing.get_context("spawn").Process(target=_ask, args=(name, options.limit))
        process.start()
        process.join()


if __name__ == "__main__":
    main()
