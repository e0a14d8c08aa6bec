"""Plays an order of pipeline passes without a program: dependencies, total time, micro-batches in flight."""

from __future__ import annotations

from dataclasses import replace

from memo_sim.program.layout.schedule import Kind, Pass

F, B, W = 1.0, 2.25, 0.875
"""Seconds of a stage's forward, of its whole backward, and of the weight gradients within it."""


def before(stage: int, stages: int, chunks: int, each: Pass) -> tuple[int, Pass] | None:
    """Return the (stage, pass) that a pass depends on: on another stage, or its own stage's forward."""
    step, stop = (-1, 0) if each.kind is Kind.FORWARD else (1, stages * chunks - 1)
    place = each.chunk * stages + stage
    if each.kind is Kind.WEIGHTS:
        return stage, replace(each, kind=Kind.BACKWARD)
    if place == stop:
        return None if each.kind is Kind.FORWARD else (stage, replace(each, kind=Kind.FORWARD))
    chunk, neighbour = divmod(place + step, stages)
    return neighbour, replace(each, chunk=chunk)


def makespan(order: list[list[Pass]], chunks: int, seconds: dict[Kind, float]) -> float:
    """Return the seconds of all passes, each played as early as its stage's order allows; fails on a deadlock."""
    ends: dict[tuple[int, Pass], float] = {}
    clocks, at = [0.0] * len(order), [0] * len(order)
    moved = True
    while moved:
        moved = False
        for stage, mine in enumerate(order):
            while at[stage] < len(mine):
                needed = before(stage, len(order), chunks, mine[at[stage]])
                if needed is not None and needed not in ends:
                    break
                start = max(clocks[stage], ends[needed] if needed else 0.0)
                clocks[stage] = ends[stage, mine[at[stage]]] = start + seconds[mine[at[stage]].kind]
                at[stage] += 1
                moved = True
    assert at == [len(mine) for mine in order]
    return max(clocks)


def in_flight(order: list[Pass], end: Kind) -> int:
    """Return the largest number of micro-batches (over all chunks) between their forward and their ``end``."""
    count = most = 0
    for each in order:
        count += (each.kind is Kind.FORWARD) - (each.kind is end)
        most = max(most, count)
    return most
