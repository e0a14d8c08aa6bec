"""Plays identical micro-batches once and repeats them.

Once the step is steady, every micro-batch starts with the same state of the lanes. So a window of the played step, from
a pass to the same pass of a later micro-batch, stands for all micro-batches that are not played:

      played     | m0 | m1 | m2 | end           the step of five:  | m0 | m1 | m1 | m1 | m2 | end
                      |<-->| window

Each pipeline stage has its own window, from a backward to the same backward of one or a few micro-batches later; the
state of the lanes may repeat only after a few. Whether a pipeline is steady is checked, not assumed: every instruction
of all windows comes the same time after its counterpart one period earlier (``steady``). Then the repetition is exact.
If not, more micro-batches are played (``played_again``). Stages that drift apart slowly may still not be steady; then
the slowest stage's window gives an estimate.

The period of an interleaved pipeline is long: p micro-batches pass v chunks. Where no two whole periods were played,
only the last p backwards of a window are compared, and a few more (``RECEIVED_AHEAD``). They are enough: counted in
each stage's backwards, no pass waits for one of another stage that is more than p earlier. (The last stage's backward
of a chunk waits for the first stage's backward of the next chunk, p earlier.) So what follows the window waits for what
was compared, or for what follows, too. Only a swap-in waits for what is older, its swap-out. That ended long ago, or
copies fall behind compute, and then the compared ones do not come equally long after their counterparts.

      stage      | warmup |   |<-->|             |<-->| drain |      the backwards that are compared
                                   |<-- window ------>|
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import gcd

import numpy as np

from memo_sim.contract.plan import Layout
from memo_sim.engine.playback import Floats, Playback
from memo_sim.program.analysis.columns import NUMBER, InstructionColumns, Ints
from memo_sim.program.ir.program import Program
from memo_sim.program.layout.schedule import Kind, Pass

PLAYED = 3
"""Micro-batches that show a whole period: the first starts with empty lanes, the last runs into the step's end."""

RECEIVED_AHEAD = 2
"""Passes after a window whose inputs are received inside it (``program/pipeline/stage_p2p.py``)."""

SETTLED = 15
"""Extra micro-batches at most that a replayed pipeline plays at first; with p stages, p - 1.

The blocks of PyTorch's allocator begin to repeat later than the lanes. Llama 3 405B on 1,024 H100 with Megatron-LM
needs 4 to 12 extra ones on 16 and 32 stages (2026-11-29)."""

LENGTHS = (1, 2, 4)
"""Lengths of a window, in periods of the schedule."""

STEADY = 1e-11
"""Relative tolerance for equal time shifts within a period: it allows rounding, but no transient."""


@dataclass(frozen=True)
class Window:
    """A range of passes of one stage, from ``first`` to before ``end``.

    Those from ``again`` on are the counterparts of those from ``before`` to ``first``, one window earlier.
    """

    before: int
    first: int
    again: int
    end: int
    micro_batches: int
    """Micro-batches that one repetition stands for."""

    @property
    def whole(self) -> bool:
        """Whether all of it has a counterpart one window earlier."""
        return self.again == self.first


def played_at_first(layout: Layout, micro_batches: int, *, replayed: bool = False) -> int:
    """Return the number of micro-batches that are likely to show the period of a schedule.

    A pipeline must be full, and then run for two periods, or for one and the few passes that are compared. GPipe holds
    all micro-batches at once, so all are played. Where PyTorch's allocator is ``replayed``, its blocks may settle later
    than the lanes.
    """
    if layout.pp == 1:
        return min(micro_batches, PLAYED)
    if layout.schedule == "gpipe":
        return micro_batches
    if layout.schedule == "interleaved":
        # The period is long: windows of several are left to the second try. Stage 0 warms up for (v + 1) p - 2 passes
        # of v p in each period, and a window and the p + 2 backwards before it follow.
        periods, longest = (6, 2) if replayed else (3 if layout.virtual_stages > 2 else 4, 1)
        return _whole_windows(layout, micro_batches, periods * layout.pp, longest)
    full = 2 * layout.pp if layout.schedule == "zero-bubble" else layout.pp
    settled = min(layout.pp - 1, SETTLED) if replayed else 0
    return _whole_windows(layout, micro_batches, full + PLAYED + RECEIVED_AHEAD + settled, max(LENGTHS))


def played_again(layout: Layout, micro_batches: int) -> int:
    """Return how many micro-batches are played where those played at first did not become steady."""
    if layout.schedule == "interleaved":
        return _whole_windows(layout, micro_batches, 12 * layout.pp, 2)
    return _whole_windows(layout, micro_batches, 2 * played_at_first(layout, micro_batches), max(LENGTHS))


def _whole_windows(layout: Layout, micro_batches: int, played: int, longest: int) -> int:
    """Return ``played`` or a few more, so that the other micro-batches fill windows of up to ``longest`` periods."""
    most = period_of(layout) * longest
    return micro_batches - max(0, micro_batches - played) // most * most


def windows(layout: Layout, stages: Sequence[Sequence[Pass]], beyond: int) -> list[list[Window]]:
    """Return the last windows of the played passes, one per stage; short windows come first, and ``whole`` ones.

    ``beyond`` micro-batches are not played; windows whose length does not divide them are left out.
    """
    kind = Kind.FORWARD if layout.pp == 1 else Kind.BACKWARD
    marks = [[n for n, each in enumerate(passes) if each.kind is kind] for passes in stages]
    every = []
    for length in LENGTHS[:1] if layout.pp == 1 else LENGTHS:
        group = period_of(layout) * length
        # A window may end at any backward that begins a chunk's group; the last one that all stages have is best.
        chunk = period_of(layout) * layout.subsequences
        step = chunk * layout.virtual_stages * length
        if beyond % group:
            continue
        for compared in sorted({step, min(step, chunk + RECEIVED_AHEAD)}, reverse=True):
            for last in range(min(len(m) - 1 for m in marks) // chunk * chunk, step + compared - 1, -chunk):
                first, again = last - step, last - compared
                found = [Window(m[first - compared], m[first], m[again], m[last], group) for m in marks]
                if layout.pp == 1 or all(_repeats(p, w) for p, w in zip(stages, found, strict=True)):
                    every.append(found)
                    break
    return every


def period_of(layout: Layout) -> int:
    """Return the number of micro-batches after which a schedule's order repeats."""
    alone = layout.schedule != "interleaved" or layout.pp == 1
    return 1 if alone else layout.pp // gcd(layout.pp, layout.subsequences)


def _repeats(passes: Sequence[Pass], window: Window) -> bool:
    """Return whether the window's passes, and those it receives for, equal their counterparts one window earlier."""
    before = passes[window.before : window.first + RECEIVED_AHEAD]
    later = passes[window.again : window.end + RECEIVED_AHEAD]
    return len(before) == len(later) and all(
        one.kind is other.kind
        and one.micro_batch + window.micro_batches == other.micro_batch
        and one.chunk == other.chunk
        and one.subsequence == other.subsequence
        for one, other in zip(before, later, strict=True)
    )


class Repetition:
    """``times`` repetitions of one stage's window; zero without a window."""

    def __init__(self, program: Program, columns: InstructionColumns, window: Window | None, beyond: int) -> None:
        """``beyond``: number of micro-batches of the step that are not played; a multiple of the window's."""
        self.times = beyond // window.micro_batches if window else 0
        at = (window.before, window.first, window.again, window.end) if window else ()
        marks = [program.passes[each][1] for each in at] or [0, 0, 0, 0]
        self.before, self.first, self.again, self.end = columns.starts[marks].tolist()
        """First instructions of the window's passes of these names; ``end``: the first one after it."""
        self._instructions = len(columns.lane)

    def weights(self) -> Ints:
        """Return how many times the step contains each instruction of the played program."""
        if not self.times:
            return np.broadcast_to(NUMBER(1), self._instructions)  # one number, however many there are
        weights = np.ones(self._instructions, dtype=NUMBER)
        weights[self.first : self.end] += self.times
        return weights

    def steady(self, playback: Playback) -> bool:
        """Return whether every instruction from ``again`` on comes equally long after its counterpart."""
        earlier, later = slice(self.before, self.first), slice(self.again, self.end)
        if self.end - self.again != self.first - self.before:
            return False
        shifts = [each[later] - each[earlier] for each in (playback.start_s, playback.end_s)]
        return bool(np.ptp(np.concatenate(shifts)) <= STEADY * playback.span_s)

    def added_s(self, playback: Playback) -> float:
        """Return the seconds that the repetitions add to the played time."""
        return self.times * float(playback.start_s[self.end] - playback.start_s[self.first]) if self.times else 0.0

    def wait_s(self, playback: Playback) -> Floats:
        """Return the seconds of every wait of ``playback``, extended to the whole step.

        When a lane has no work in the repeated window, its wait across the window also spans the repetitions.
        """
        waits = playback.waits
        if not self.times:
            return waits.seconds
        before, after = playback.previous[waits.instruction], waits.instruction
        across = (before < self.first) & (after >= self.end)
        seconds: Floats = waits.seconds + across * self.added_s(playback)
        return seconds
