"""The compiled replay of PyTorch's allocator gives what the one in Python gives; without numba, Python replays."""

from __future__ import annotations

import random
import sys
from collections import Counter
from dataclasses import replace

import numpy as np
import pytest

from memo_sim.contract.requests import Requests
from memo_sim.contract.units import MIB
from memo_sim.engine.fast_replay import FastReplay, Replaying
from memo_sim.memory.initial_states import Beginning
from memo_sim.memory.replay import AllocationCosts, Replay, RunAhead, replay
from memo_sim.program.arena.requests import requests_of
from memo_sim.program.lower import lower
from tests.sim.small_programs import GPT, decide

COSTS = AllocationCosts(malloc_s=1e-3, free_s=2e-3, malloc_s_per_gib=0.1, free_s_per_gib=0.2)
SIZES = (0, 100, 5000, MIB // 2, MIB, MIB + 1, 3 * MIB, 9 * MIB, 10 * MIB, 33 * MIB)
"""Bytes around every border between small and large requests, segments that are shared, and segments of their own."""


@pytest.fixture(scope="module")
def compiled() -> Replaying:
    pytest.importorskip("numba")
    from memo_sim.engine.compiled_replay import CompiledReplay

    return CompiledReplay()


def some_requests(seed: random.Random, instants: int) -> Requests:
    lives = [sorted(seed.sample(range(instants + 1), 2)) for _ in range(seed.randint(1, 120))]
    lives = [[0, instants] if seed.random() < 0.1 else life for life in lives]
    sizes = [seed.choice([*SIZES, seed.randrange(1, 60 * MIB)]) for _ in lives]
    return Requests(
        ids=[f"b{number}" for number in range(len(lives))],
        lower=[low for low, _ in lives],
        upper=[high for _, high in lives],
        size_bytes=sizes,
    )


def some_waits(seed: random.Random, buffers: int, instants: int) -> RunAhead | None:
    if seed.random() < 0.4:
        return None
    work = {stream: sorted(seed.sample(range(instants), seed.randint(0, instants))) for stream in (5, 7)}
    done = [max(-1, instant - seed.randint(1, 8)) for instant in range(instants + 1)]
    waiting = {buffer: seed.choice([(5,), (7,), (5, 7)]) for buffer in range(buffers) if seed.random() < 0.4}
    marked = {stream: [buffer for buffer, streams in waiting.items() if stream in streams] for stream in (5, 7)}
    return RunAhead(
        marked={stream: np.array(numbers, dtype=np.int64) for stream, numbers in marked.items()},
        work={stream: np.array(instants, dtype=np.int64) for stream, instants in work.items()},
        done=np.array([max(done[: at + 1]) for at in range(len(done))]),
    )


def some_states(seed: random.Random) -> Beginning | None:
    if seed.random() < 0.5:
        return None
    return Beginning(
        *(tuple(seed.randrange(1, 30 * MIB) for _ in range(seed.randint(0, most))) for most in (6, 2, 4, 5))
    )


def by(
    replaying: Replaying,
    requests: Requests,
    capacity_bytes: int,
    ahead: RunAhead | None = None,
    beginning: Beginning | None = None,
) -> tuple[Replay, list[object]]:
    """Return a replay without its iterations, and these in lists, which can be compared."""
    found = replaying(
        requests, iterations=3, capacity_bytes=capacity_bytes, costs=COSTS, ahead=ahead, beginning=beginning
    )
    steps = [
        (one.instants.tolist(), one.allocated_bytes.tolist(), one.reserved_bytes.tolist(), one.stops)
        for one in found.iterations
    ]
    return replace(found, iterations=[]), [*steps]


def test_both_replays_are_equal(compiled: Replaying) -> None:
    seed, seen = random.Random(1), Counter[str]()
    for _ in range(400):
        instants = seed.randint(2, 60)
        requests, states = some_requests(seed, instants), some_states(seed)
        limit = seed.choice([50, 200, 500, 1000, 2000, 10**6]) * MIB
        ahead = some_waits(seed, len(requests.ids), instants)
        expected = by(replay, requests, limit, ahead, states)
        assert by(compiled, requests, limit, ahead, states) == expected
        failed = expected[0].out_of_memory
        seen["retries"] += expected[0].allocation_retries > 0
        seen["fits"] += failed is None
        seen["fails before the first step"] += failed is not None and failed.iteration < 0
        seen["fails later"] += failed is not None and failed.iteration >= 0
        seen["waits"] += ahead is not None and any(map(len, ahead.marked.values()))
    assert min(seen[each] for each in ("retries", "fits", "fails before the first step", "fails later", "waits")) > 20


def test_nothing_waits_for_other_streams(compiled: Replaying) -> None:
    requests = some_requests(random.Random(3), 20)
    none = RunAhead(marked={}, work={}, done=np.zeros(21, dtype=np.int64))
    assert by(compiled, requests, 10**12, none) == by(replay, requests, 10**12, none) == by(replay, requests, 10**12)


def test_nothing_is_requested(compiled: Replaying) -> None:
    none = Requests(ids=[], lower=[], upper=[], size_bytes=[])
    assert by(compiled, none, MIB) == by(replay, none, MIB)


def test_a_program_is_replayed_alike(compiled: Replaying) -> None:
    (program,) = lower(decide(GPT, global_batch=4))
    requests = requests_of(program)
    for limit in (10 * MIB, 10**12):
        expected = by(replay, requests, limit)
        assert by(compiled, requests, limit) == expected


def replays(replaying: FastReplay, times: int) -> list[bool]:
    """Return whether the compiled replay was loaded after each of several replays of 10 requests in 3 iterations."""
    requests = Requests(ids=[f"b{n}" for n in range(10)], lower=[0] * 10, upper=[1] * 10, size_bytes=[MIB] * 10)
    found = []
    for _ in range(times):
        assert by(replaying.of(requests), requests, 10**9) == by(replay, requests, 10**9)
        found.append(replaying.compiled)
    return found


@pytest.mark.usefixtures("compiled")
def test_the_replay_is_loaded_when_enough_was_replayed() -> None:
    assert replays(FastReplay(soon=60), 3) == [False, True, True]
    assert replays(FastReplay(first=60), 3) == [False, True, True]
    assert replays(FastReplay(first=30), 1) == [True]
    assert replays(FastReplay(), 1) == [False]


def test_without_numba_python_replays(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "numba", None)
    assert replays(FastReplay(first=1), 2) == [False, False]
