"""Follows ``Playback.binds`` from a step's end to its start: the critical path."""

from __future__ import annotations

from memo_sim.engine.playback import Playback
from memo_sim.engine.simulate import Simulation
from memo_sim.program.analysis.rendezvous import all_rendezvous


def chain(playback: Playback) -> list[int]:
    """Return the instructions of one stage on the critical path, from the step's start to its end."""
    path = [int(playback.end_s.argmax())]
    while (before := int(playback.binds[path[-1]])) >= 0:
        path.append(before)
    return path[::-1]


def critical_path(simulation: Simulation) -> list[tuple[int, int]]:
    """Return the (stage, instruction) pairs on the critical path, from the step's start to its end.

    At matched instructions of several stages, the path continues on the stage that was ready last.
    """
    plays = [stage.playback for stage in simulation.stages]
    met = {
        each: rendezvous
        for rendezvous in all_rendezvous([stage.program for stage in simulation.stages])
        for each in rendezvous
    }
    stage = max(range(len(plays)), key=lambda number: plays[number].span_s)
    at, path = int(plays[stage].end_s.argmax()), list[tuple[int, int]]()
    while at >= 0:
        path.append((stage, at))
        came = [(int(plays[r].binds[i]), r) for r, i in met.get((stage, at), ((stage, at),))]
        at, stage = max(came, key=lambda each: plays[each[1]].end_s[each[0]] if each[0] >= 0 else -1.0)
    return path[::-1]
