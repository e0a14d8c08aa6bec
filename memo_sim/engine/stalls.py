"""Attributes each wait of a lane to what caused it, by kind of instruction.

The instruction that ends a wait need not be its cause: a gather may have waited for a receive, and that for a stage
that was not done. So the chain of binding instructions is followed back to the wait's start. The time of p2p transfers
and of other stages in that chain is attributed to them. The rest is attributed to the instruction that ended the wait.

      compute     | pass 1 |         waits          | pass 2 |
      collective                           | gather |
      receive                      | recv  |                     gather: the last third, receive: the middle one,
      stage 1       ... still computes     |                     pipeline bubble (stage 1): the first

When that instruction itself started late, because its launch was late, that part of the wait is attributed to the
launch.
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
from memo_sim.program.analysis.rendezvous import AllRendezvous
from memo_sim.program.ir.instruction import Lane

ROUNDING = 1e-12
"""Relative to the step: instants closer than this are the same instant."""

P2P_LANES = (Lane.SEND, Lane.RECV)
BUBBLE = "pipeline bubble"


def bubble(stage: int) -> str:
    """Return the name of a wait for another stage."""
    return f"{BUBBLE} (stage {stage})"


@dataclass(frozen=True)
class Kinds:
    """The kind of every instruction: ``names[of[i]]``."""

    names: list[str]
    of: Ints


@dataclass(frozen=True)
class Late:
    """Seconds that each instruction waits at the beginning of its span, and the name of what it waits for."""

    waits_for: str
    seconds: Floats


@dataclass(frozen=True)
class Peers:
    """Matched instructions of one stage: when each was ready on its own stage, and which stage was ready last."""

    own_ready_s: dict[int, float]
    latest: dict[int, int]


def peers(playbacks: Sequence[Playback], matched: AllRendezvous, number: int) -> Peers:
    """Return the matched instructions of stage ``number``."""
    if not len(matched):
        return Peers({}, {})
    came = np.empty(len(matched.stage))
    for stage, playback in enumerate(playbacks):
        mine = matched.stage == stage
        came[mine] = _ready_s(playback, matched.instruction[mine])
    firsts, sizes = matched.bounds[:-1], np.diff(matched.bounds)
    last = came == np.repeat(np.maximum.reduceat(came, firsts), sizes)
    # The first of several stages that were ready last; stages of a rendezvous come in order.
    latest = np.minimum.reduceat(np.where(last, matched.stage, len(playbacks)), firsts)
    mine = matched.stage == number
    numbers = matched.instruction[mine].tolist()
    return Peers(
        own_ready_s=dict(zip(numbers, came[mine].tolist(), strict=True)),
        latest=dict(zip(numbers, np.repeat(latest, sizes)[mine].tolist(), strict=True)),
    )


def _ready_s(playback: Playback, instructions: Ints) -> Floats:
    """Return when everything that ``instructions`` wait for on their own stage has ended."""
    binds = playback.binds[instructions]
    ready: Floats = np.where(binds >= 0, playback.end_s[binds], 0.0)
    return ready


def stalls_of(
    playback: Playback, met: Peers, kinds: Kinds, wait_s: Floats, weights: Ints, *, late: Late
) -> list[Stall]:
    """Return the waits of a step, summed by lane and cause; ``wait_s`` and ``weights`` have one entry per wait.

    Where a wait of the whole step is longer than the played one, the difference is attributed to the instruction that
    ended it.
    """
    waits, columns = playback.waits, playback.columns
    seconds: dict[tuple[int, str], float] = defaultdict(float)
    count: dict[tuple[int, str], int] = defaultdict(int)
    rest = wait_s.copy()
    own = np.ones(len(rest), dtype=bool)

    def attribute(n: int, name: str, part: float) -> None:
        key = int(columns.lane[waits.instruction[n]]), name
        seconds[key] += part * int(weights[n])
        count[key] += int(weights[n])
        rest[n] -= part
        own[n] = rest[n] > ROUNDING * playback.span_s

    if met.latest:
        chain = _Chain.listed(playback, kinds)
        for n, wait in enumerate(zip(waits.waits_for.tolist(), waits.start_s.tolist(), strict=True)):
            for name, part in chain.attribute(met, wait).items():
                attribute(n, name, part)
    begun = playback.start_s[waits.waits_for]
    held = np.minimum(begun + late.seconds[waits.waits_for] - np.maximum(waits.start_s, begun), rest)
    for n in np.flatnonzero(held > ROUNDING * playback.span_s).tolist():
        attribute(n, late.waits_for, float(held[n]))
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
    """Return the stalls with those of one lane and one kind added up, the longest first."""
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
    """Return the seconds that a stage still plays after its last kernel has ended, by kind."""
    compute = playback.end_s[playback.columns.lane == Lane.COMPUTE]
    wait = int(np.argmax(playback.end_s)), float(compute.max(initial=0.0))
    return _Chain.of(playback, kinds).attribute(met, wait, tuple(Lane))


@dataclass(frozen=True)
class _Chain:
    """The instruction that binds each instruction, as arrays, or as plain lists where many chains are followed."""

    binds: Sequence[int] | Ints
    start_s: Sequence[float] | Floats
    end_s: Sequence[float] | Floats
    lane: Sequence[int] | Ints
    kind: Sequence[int] | Ints
    names: list[str]
    least_s: float
    """Instants closer than this are the same instant."""

    @classmethod
    def of(cls, playback: Playback, kinds: Kinds) -> _Chain:
        """Return the chains of a playback, of which few are followed."""
        return cls(
            binds=playback.binds,
            start_s=playback.start_s,
            end_s=playback.end_s,
            lane=playback.columns.lane,
            kind=kinds.of,
            names=kinds.names,
            least_s=ROUNDING * playback.span_s,
        )

    @classmethod
    def listed(cls, playback: Playback, kinds: Kinds) -> _Chain:
        """Return the chains of a playback, of which many are followed, step by step."""
        return cls(
            binds=playback.binds.tolist(),
            start_s=playback.start_s.tolist(),
            end_s=playback.end_s.tolist(),
            lane=playback.columns.lane.tolist(),
            kind=kinds.of.tolist(),
            names=kinds.names,
            least_s=ROUNDING * playback.span_s,
        )

    def attribute(self, met: Peers, wait: tuple[int, float], lanes: Collection[Lane] = P2P_LANES) -> dict[str, float]:
        """Return the part of a ``wait`` that other stages and instructions on ``lanes`` took.

        ``wait`` is (instruction that ends it, start in seconds)."""
        at, since = wait
        found: dict[str, float] = defaultdict(float)
        start_s, end_s, binds, latest = self.start_s, self.end_s, self.binds, met.latest
        while at >= 0 and end_s[at] > since:
            begun = start_s[at]
            played = end_s[at] - max(begun, since)
            if self.lane[at] in lanes and played > self.least_s:
                found[self.names[self.kind[at]]] += float(played)
            if at in latest and (held := begun - max(met.own_ready_s[at], since)) > self.least_s:
                found[bubble(latest[at])] += float(held)
            at = int(binds[at])
        return found
