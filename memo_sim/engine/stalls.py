"""What a lane stood still for, by kind of instruction.

A wait ends with the instruction that came last, yet need not be that one's doing: a gathering may have stood behind a
receive, and that behind a stage that was not done. So the chain of what bound is followed back to the wait's start, and
what hand-overs took, and other stages, is put down to them; the rest of the wait to the instruction that ended it.

      compute     | pass 1 |         waits          | pass 2 |
      collective                           | gather |
      receive                      | recv  |                     gather: the last third, receive: the middle one,
      stage 1       ... still computes     |                     pipeline bubble (stage 1): the first

What began late itself, because its launch was awaited, ends no wait by its own doing until then: that is the launch's.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass

import msgspec
import numpy as np

from memo_sim.contract.plan import Stall
from memo_sim.engine.playback import Floats, Playback
from memo_sim.program.analysis.columns import Ints
from memo_sim.program.analysis.rendezvous import Rendezvous
from memo_sim.program.ir.instruction import Lane

ROUNDING = 1e-12
"""Of the step: two instants that lie nearer are one."""

P2P_LANES = (Lane.SEND, Lane.RECV)
BUBBLE = "pipeline bubble"


def bubble(stage: int) -> str:
    """Return what a wait for a stage is called."""
    return f"{BUBBLE} (stage {stage})"


@dataclass(frozen=True)
class Kinds:
    """The kind of every instruction: ``names[of[i]]``."""

    names: list[str]
    of: Ints


@dataclass(frozen=True)
class Late:
    """What instructions wait for at the beginning of their span, and for how many seconds each."""

    waits_for: str
    seconds: Floats


@dataclass(frozen=True)
class Peers:
    """The instructions of one role that are played with other stages: when each could have, and who came last."""

    own_ready_s: dict[int, float]
    latest: dict[int, int]


def peers(playbacks: Sequence[Playback], all_rendezvous: Sequence[Rendezvous]) -> list[Peers]:
    """Return of each role what it plays with others."""
    ready = [_ready_s(playback) for playback in playbacks]
    found = [Peers({}, {}) for _ in playbacks]
    for rendezvous in all_rendezvous:
        came = [float(ready[stage][i]) for stage, i in rendezvous]
        latest = rendezvous[came.index(max(came))][0]
        for (stage, i), at in zip(rendezvous, came, strict=True):
            found[stage].own_ready_s[i] = at
            found[stage].latest[i] = latest
    return found


def _ready_s(playback: Playback) -> Floats:
    """Return when all that each instruction waits for in its own role has ended."""
    ready: Floats = np.where(playback.binds >= 0, playback.end_s[playback.binds], 0.0)
    return ready


def stalls_of(
    playback: Playback, met: Peers, kinds: Kinds, wait_s: Floats, weights: Ints, *, late: Late
) -> list[Stall]:
    """Return the waits of a step summed by lane and what was waited for; ``wait_s`` and ``weights`` are of each wait.

    What a wait of the whole step lasts longer than it was played is put down to the instruction that ended it.
    """
    waits, columns = playback.waits, playback.columns
    seconds: dict[tuple[int, str], float] = defaultdict(float)
    count: dict[tuple[int, str], int] = defaultdict(int)
    rest = wait_s.copy()
    own = np.ones(len(rest), dtype=bool)

    def put_down(n: int, name: str, part: float) -> None:
        key = int(columns.lane[waits.instruction[n]]), name
        seconds[key] += part * int(weights[n])
        count[key] += int(weights[n])
        rest[n] -= part
        own[n] = rest[n] > ROUNDING * playback.span_s

    rows = zip(waits.waits_for.tolist(), waits.start_s.tolist(), strict=True)
    chain = _Chain.of(playback, kinds)
    for n, wait in enumerate(rows if met.latest else ()):
        for name, part in chain.put_down(met, wait).items():
            put_down(n, name, part)
    begun = playback.start_s[waits.waits_for]
    held = np.minimum(begun + late.seconds[waits.waits_for] - np.maximum(waits.start_s, begun), rest)
    for n in np.flatnonzero(held > ROUNDING * playback.span_s).tolist():
        put_down(n, late.waits_for, float(held[n]))
    keys = (columns.lane[waits.instruction] * len(kinds.names) + kinds.of[waits.waits_for])[own]
    sums = np.bincount(keys, weights=(rest * weights)[own])
    times = np.bincount(keys, weights=weights[own])
    for k in np.flatnonzero(times).tolist():
        key = k // len(kinds.names), kinds.names[k % len(kinds.names)]
        seconds[key] += float(sums[k])
        count[key] += int(times[k])
    return [
        Stall(lane=Lane(lane).label, waits_for=name, seconds=whole, count=count[lane, name])
        for (lane, name), whole in seconds.items()
    ]


def summed(stalls: Iterable[Stall]) -> list[Stall]:
    """Return the stalls, those of one lane for one kind added up, the longest first."""
    found: dict[tuple[str, str], Stall] = {}
    for stall in stalls:
        key = stall.lane, stall.waits_for
        before = found.get(key)
        found[key] = stall
        if before is not None:
            seconds, count = before.seconds + stall.seconds, before.count + stall.count
            found[key] = msgspec.structs.replace(stall, seconds=seconds, count=count)
    return sorted(found.values(), key=lambda stall: -stall.seconds)


def after_compute(playback: Playback, met: Peers, kinds: Kinds) -> dict[str, float]:
    """Return what a role still plays when its last kernel has ended, and the seconds of each kind."""
    compute = playback.end_s[playback.columns.lane == Lane.COMPUTE]
    wait = int(np.argmax(playback.end_s)), float(compute.max(initial=0.0))
    return _Chain.of(playback, kinds).put_down(met, wait, tuple(Lane))


@dataclass(frozen=True)
class _Chain:
    """What binds each instruction, as plain lists: chains are followed step by step."""

    binds: list[int]
    start_s: list[float]
    end_s: list[float]
    lane: list[int]
    kind: list[str]
    least_s: float
    """Two instants that lie nearer are one."""

    @classmethod
    def of(cls, playback: Playback, kinds: Kinds) -> _Chain:
        """Return the chains of a playback."""
        return cls(
            binds=playback.binds.tolist(),
            start_s=playback.start_s.tolist(),
            end_s=playback.end_s.tolist(),
            lane=playback.columns.lane.tolist(),
            kind=[kinds.names[k] for k in kinds.of.tolist()],
            least_s=ROUNDING * playback.span_s,
        )

    def put_down(self, met: Peers, wait: tuple[int, float], lanes: Collection[Lane] = P2P_LANES) -> dict[str, float]:
        """Return what other stages, and what is on ``lanes``, took of a ``wait``: (what ends it, its start)."""
        at, since = wait
        found: dict[str, float] = defaultdict(float)
        start_s, end_s, binds, latest = self.start_s, self.end_s, self.binds, met.latest
        while at >= 0 and end_s[at] > since:
            begun = start_s[at]
            played = end_s[at] - max(begun, since)
            if self.lane[at] in lanes and played > self.least_s:
                found[self.kind[at]] += played
            if at in latest and (held := begun - max(met.own_ready_s[at], since)) > self.least_s:
                found[bubble(latest[at])] += held
            at = binds[at]
        return found
