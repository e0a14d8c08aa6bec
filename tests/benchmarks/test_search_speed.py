"""Measures the search and its growth with the search space; run with ``pytest -m benchmark -s tests/benchmarks``.

The environment variable ``CALCULON`` may name a checkout of github.com/calculon-ai/calculon, a public tool that
evaluates closed formulas; without it, the comparison is skipped. This repository contains no code of that tool. The
output has both wall time and CPU time, because wall time is unreliable beside other work.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import msgspec
import pytest

from memo_sim.answers.what_if import what_if
from memo_sim.contract.catalog import load_cluster, load_model
from memo_sim.planning.outcome import SearchResult
from memo_sim.planning.question import Question
from memo_sim.planning.search import search
from memo_sim.planning.space import Candidate, candidates

pytestmark = [pytest.mark.benchmark, pytest.mark.slow]

PEER = "CALCULON"

MOST_PLAYED = 400
"""Most candidates that brute force simulates, in about half a minute; larger spaces are sampled by layout."""


@dataclass(frozen=True)
class Took:
    """Wall time and CPU time of one call, in seconds."""

    wall_s: float
    cpu_s: float

    def __str__(self) -> str:
        return f"{self.wall_s:.2f} s ({self.cpu_s:.2f} s CPU)"


def timed(work: Callable[[], object], *, times: int = 1) -> Took:
    """Return the shortest of several runs."""
    taken = []
    for _ in range(times):
        wall, cpu = time.perf_counter(), time.process_time()
        work()
        taken.append((time.perf_counter() - wall, time.process_time() - cpu))
    return Took(min(w for w, _ in taken), min(c for _, c in taken))


def ask(nodes: int = 8, *, system: str = "every-layout", seq_tokens: int = 1 << 20, model: str = "gpt-65b") -> Question:
    cluster, hardware = load_cluster("a800-8x8")
    cluster = msgspec.structs.replace(cluster, nodes=nodes)
    return Question(load_model(model), cluster, hardware, seq_tokens, system=system)


@pytest.mark.parametrize("system", ["memo", "any", "every-layout"])
def test_gpt_65b_at_1m_on_64_devices(system: str) -> None:
    found = search(ask(system=system))
    space = found.evaluated + found.pruned
    best, ten = (timed(lambda k=keep: search(ask(system=system), keep=k), times=5) for keep in (1, 10))
    answer = timed(lambda: what_if(ask(system=system)), times=5)
    print(f"\n{system}: {space} candidates, {found.evaluated} evaluated; best {best}, ten best {ten}, what-if {answer}")
    assert found.best is not None


def some_layouts(found: list[Candidate]) -> list[Candidate]:
    """Return all candidates of evenly spaced layouts, about ``MOST_PLAYED`` in total, or all if there are fewer."""
    layouts = list(dict.fromkeys(candidate.base.layout for candidate in found))
    every = -(-len(found) // MOST_PLAYED)
    chosen = set(layouts[::every])
    return [candidate for candidate in found if candidate.base.layout in chosen]


@pytest.mark.parametrize("nodes", [1, 2, 4, 8, 16])
def test_growth_with_the_space(nodes: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """No plan of the sample may be better than the one found; the sample's time is scaled to the whole space."""
    asked = ask(nodes, model="gpt-7b", seq_tokens=1 << 19)
    found, refused = candidates(asked)
    sample = some_layouts(found)
    results: list[SearchResult] = []
    pruned = timed(lambda: results.append(search(asked)))
    monkeypatch.setattr("memo_sim.planning.search.candidates", lambda question: (sample, refused))
    brute = timed(lambda: results.append(search(asked, prune=False)))
    guided, everything = results
    space = guided.evaluated + guided.pruned
    assert space == len(found)
    assert everything.evaluated + everything.pruned == len(sample)
    assert guided.best is not None
    assert everything.best is not None
    assert guided.best.rank_key <= everything.best.rank_key
    if len(sample) == space:
        assert guided.best.rank_key == everything.best.rank_key
    whole = brute.cpu_s * space / len(sample)
    print(
        f"\n{8 * nodes} devices, {space} candidates: {guided.evaluated} evaluated in {pruned}; "
        f"{len(sample)} of them in {brute}, all in {whole:.0f} s CPU"
    )


ITS_SEARCH = """
import json, time
import calculon
from calculon.llm import *
from calculon.llm.optimal_execution import OptimalExecution
app = Llm.Application(calculon.io.read_json_file("models/megatron-22B.json"))
system = System(calculon.io.read_json_file("systems/a100_80g.json"))
wall, cpu, count = time.perf_counter(), time.process_time(), 0
for tp, pp, dp in ((8, 1, 8), (8, 2, 4), (4, 4, 4)):
    found = OptimalExecution.search(
        False, 1, False, 64, 64, "float16", app, system, tp, pp, dp, 1, 64, "full", True, "rs_ag", [True], False, False,
        False)
    count += found[1]
print(json.dumps({"count": count, "wall_s": time.perf_counter() - wall, "cpu_s": time.process_time() - cpu}))
"""
"""Script for calculon: its own search over three layouts of 64 devices, every micro-batch, offload and network."""


@pytest.mark.skipif(PEER not in os.environ, reason=f"{PEER} names no checkout of calculon-ai/calculon")
def test_compared_with_calculon() -> None:
    done = subprocess.run(
        [sys.executable, "-c", ITS_SEARCH], cwd=Path(os.environ[PEER]), capture_output=True, text=True, check=True
    )
    theirs = json.loads(done.stdout)
    found: list[SearchResult] = []
    took = timed(lambda: found.append(search(ask())))
    everything = timed(lambda: found.append(search(ask(system="memo"), prune=False)))
    space, played = found[0].evaluated + found[0].pruned, found[1].evaluated
    print(f"\ncalculon: {theirs['count']} evaluations, {theirs['count'] / theirs['cpu_s']:.0f} per CPU second")
    print(f"memo: {space} candidates decided, {space / took.cpu_s:.0f} per CPU second ({took})")
    print(f"memo, nothing pruned: {played} candidates, {played / everything.cpu_s:.1f} per CPU second ({everything})")
    assert theirs["count"] > 0
