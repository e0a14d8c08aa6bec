"""Searches exactly for a placement within a fixed capacity, by stacking buffers section by section with backtracking.

A section is the time between two births. Its ``lowest`` is the lowest address at which its next buffer may begin. Its
slack is how many units of the capacity it can still waste. Neighbouring sections with the same ``lowest``, between
higher ones, are a valley:

    lowest ^ ####              ####
           | ####     ##       ####      The next buffer over section q lies inside the valley, at its lowest address,
           | ####_____##___q___####      or q is raised to the next height at which a buffer could begin there.
           +-----------------------> sections

A node first raises every section that has no candidate for its next buffer, until all sections have one. Then it
chooses a section, tries each of its candidates, and at last tries to raise it.

The search follows google/minimalloc (Moffitt, ASPLOS 2023) in three points: it considers only canonical placements
(every buffer rests on another one or on the ground), it rejects sections that no longer fit, and it splits the problem
where no remaining buffer crosses. Branching on one section, walls, jumps and weights are our own:

- wall: at a step in the skyline that a buffer still has to cross, the buffers that end there and those that begin there
  must be able to level the step, up to both slacks (subset sums);
- jump: a failure names the sections that cause it; the search does not vary decisions that affect none of them;
- weight: a section at which a branch failed gets more weight in the rules that use weights, also in later searches.

A set of buffers is one integer with a bit per buffer, in the order of preference.
"""

from __future__ import annotations

import sys
from bisect import bisect_left
from collections.abc import Callable
from itertools import pairwise
from typing import NamedTuple

from memo_sim.memory.problem import Clock, Ints, Problem

Why = tuple[int, int]
"""The sections [first, end) that cause a failure."""

Rule = Callable[[int, int, int, int, float], tuple[float, ...]]
"""Ranks a section by its number of candidates, best candidate's bit, lowest, slack and weight; lowest is chosen."""

RULES: dict[str, Rule] = {
    "low_first": lambda number, first, lowest, slack, weight: (lowest, first, number),
    "troubled": lambda number, first, lowest, slack, weight: (-weight, number),
    "low_troubled": lambda number, first, lowest, slack, weight: (lowest / weight, number / weight),
    "low_few": lambda number, first, lowest, slack, weight: (lowest, number, slack),
    "few": lambda number, first, lowest, slack, weight: (number, lowest, slack),
}
"""Rules for choosing the section. A section with a single choice always goes first. No rule is best everywhere."""

LOOK = 8
"""Nodes between two looks at the clock; a node of several thousand buffers takes a millisecond."""

MOST_SUMMANDS = 6
"""Walls with more buffers on one side are not checked: nearly every sum is possible then."""

HIGHEST = 1 << 62

MOST_REMEMBERED = 20_000_000
"""Addresses stored with failures (160 MB). Later failures are not stored: the search is slower but still exact."""

MOST_FRAMES = 300_000
"""Recursion limit of the search: a node needs four calls, whose frames Python 3.11 keeps on the heap."""

State = tuple[int, int, tuple[int, ...]]
"""The state that a failure depends on: the first section, the remaining buffers and their lowest addresses."""


Raise = tuple[int, int, int, int]
"""A section raised because no buffer fits at its lowest address, that address, and the sections that cause it."""


class Choice(NamedTuple):
    """Section ``q`` of the valley [first, end), its candidates, and the height to raise it to (0: none)."""

    first: int
    end: int
    q: int
    could: int
    raised: int


class OutOfNodes(Exception):
    """The search reached its node limit or its time limit."""


class Skyline:
    """The search for a placement of ``problem`` within ``capacity`` units; its lives are counted in sections.

    ``order`` ranks the buffers: among several candidates the first is tried first. ``nodes`` counts the visited states.
    ``weight`` has one entry per section, and the search adds to it. ``walls``, ``jumps`` and ``memory`` switch off
    optional techniques, for comparison.
    """

    def __init__(
        self,
        problem: Problem,
        capacity: int,
        order: Ints,
        rule: Rule,
        *,
        weight: list[float] | None = None,
        walls: bool = True,
        jumps: bool = True,
        memory: bool = True,
    ) -> None:
        self.lower = problem.lower[order].tolist()
        self.upper = problem.upper[order].tolist()
        self.size = problem.size[order].tolist()
        self.rule = rule
        self.walls, self.jumps = walls, jumps
        self._room = MOST_REMEMBERED if memory else 0
        self.nodes = 0
        self.offset = [0] * problem.count
        self.left = (1 << problem.count) - 1
        """The buffers that are not yet placed, as bits."""
        sections = max(self.upper)
        self.sections = sections
        self.weight = [1.0] * sections if weight is None else weight
        self.lowest = [0] * sections
        self.begin = [0] * (sections + 1)
        self.end = [0] * (sections + 1)
        change = [0] * (sections + 1)
        for i, (a, b) in enumerate(zip(self.lower, self.upper, strict=True)):
            self.begin[a] |= 1 << i
            self.end[b] |= 1 << i
            change[a] += self.size[i]
            change[b] -= self.size[i]
        self.active, self.slack = [], []
        active = live = 0
        for s in range(sections):
            active = active & ~self.end[s] | self.begin[s]
            live += change[s]
            self.active.append(active)
            self.slack.append(capacity - live)
        # By edge e, before section e: buffers that cross it, begin at it or later, end at it or earlier.
        self.cross = [a & ~b for a, b in zip(self.active, self.begin, strict=False)]
        self.later = _gathered(self.begin[::-1])[::-1]
        self.sooner = _gathered(self.end)
        self._failed: dict[State, Why] = {}
        self._sums: dict[int, list[int]] = {}

    def search(self, nodes: int, clock: Clock) -> bool | None:
        """Return whether a placement exists (``offset`` holds it, by rank), or None when that is not decided.

        It is not decided when nodes or time run out, or when the recursion would exceed ``MOST_FRAMES``. False is a
        proof: every placement within the capacity can be pushed down to a canonical one, and there is none.
        """
        if min(self.slack) < 0:
            return False
        self._most, self._clock = nodes, clock
        deepest = sys.getrecursionlimit()
        sys.setrecursionlimit(deepest + min(4 * nodes + 4, MOST_FRAMES))
        try:
            return self._parts(0, self.sections) is None
        except (OutOfNodes, RecursionError):
            return None
        finally:
            sys.setrecursionlimit(deepest)

    def _parts(self, x: int, y: int) -> Why | None:
        """Fill sections [x, y), split where no remaining buffer crosses; return the cause of a failure, or None."""
        left, cross = self.left, self.cross
        edges = [x, *[e for e in range(x + 1, y) if not cross[e] & left], y]
        if len(edges) == 2:
            return self._node(x, y)
        counts = [((left & self.later[a] & self.sooner[b]).bit_count(), a, b) for a, b in pairwise(edges)]
        lowest, slack = self.lowest[x:y], self.slack[x:y]
        for _, a, b in sorted(counts):
            why = self._node(a, b)
            if why is not None:
                self.left, self.lowest[x:y], self.slack[x:y] = left, lowest, slack
                return why
        return None

    def _node(self, x: int, y: int) -> Why | None:
        """Fill the connected sections [x, y); on failure restore the state and return the cause, else None."""
        mine = self.left & self.later[x] & self.sooner[y]
        if not mine:
            return None
        self.nodes += 1
        if self.nodes > self._most or (self.nodes % LOOK == 0 and not self._clock.left_s):
            raise OutOfNodes
        raises: list[Raise] = []
        found = self._settle(x, y, raises)
        why = self._open(x, y, mine, found) if isinstance(found, Choice) else found
        if why is None:
            return None
        for q, level, first, end in reversed(raises):
            self.slack[q] += self.lowest[q] - level
            self.lowest[q] = level
            if why[0] <= q < why[1]:
                why = min(first, why[0]), max(end, why[1])
        return why

    def _open(self, x: int, y: int, mine: int, choice: Choice) -> Why | None:
        """Fill sections [x, y), which all have candidates, with the buffers ``mine``; return the cause of a failure."""
        state = (x, mine, tuple(self.lowest[x:y]))
        why = self._failed.get(state)
        if why is None:
            why = self._covered(x, y) or self._branch(x, y, choice)
            if why is not None and self._room >= y - x:
                self._room -= y - x
                self._failed[state] = why
        return why

    def _covered(self, x: int, y: int) -> Why | None:
        """Return the cause if a section outside the valleys has no candidate before its slack is used up."""
        steps: list[tuple[int, int, int, int, int]] = []
        higher: list[tuple[int, int]] = []
        lowest, s = self.lowest, x
        while s < y:
            level, first = lowest[s], s
            while s < y and lowest[s] == level:
                s += 1
            while higher and higher[-1][0] <= level:
                higher.pop()
            steps.append((level, first, s, higher[-1][1] if higher else x, higher[-1][0] if higher else HIGHEST))
            higher.append((level, s))
        higher.clear()
        for level, first, end, a, left_wall in reversed(steps):
            while higher and higher[-1][0] <= level:
                higher.pop()
            b, wall = (higher[-1][1], min(left_wall, higher[-1][0])) if higher else (y, left_wall)
            higher.append((level, first))
            if (a, b) == (first, end):
                continue  # a valley: already checked when sections were raised
            fits = self.left & self.later[a] & self.sooner[b]
            missing = wall - level
            for q in range(first, end):
                if self.slack[q] < missing and not self.active[q] & fits:
                    self.weight[q] += 1
                    return a - 1, b + 1
        return None

    def _settle(self, x: int, y: int, raises: list[Raise]) -> Why | Choice:
        """Raise sections until all have candidates; return where to branch, or the cause of a failure."""
        lowest, slack, active, left = self.lowest, self.slack, self.active, self.left
        while True:
            done = len(raises)
            best: tuple[int, int, int, int, int] | None = None  # valley, section, candidates, lower wall
            least: tuple[float, ...] = ()
            before, s = HIGHEST, x
            while s < y:
                level, a = lowest[s], s
                while s < y and lowest[s] == level:
                    s += 1
                after = lowest[s] if s < y else HIGHEST
                if before > level < after:
                    wall = min(before, after)
                    fits = left & self.later[a] & self.sooner[s]
                    for q in range(a, s):
                        could = active[q] & fits
                        if could:
                            number = could.bit_count() + (slack[q] > 0)
                            rank = (number > 1, *self.rule(number, could & -could, level, slack[q], self.weight[q]))
                            if best is None or rank < least:
                                best, least = (a, s, q, could, wall), rank
                        elif wall - level > slack[q]:
                            self.weight[q] += 1
                            return a - 1, s + 1
                        else:
                            raises.append((q, level, a - 1, s + 1))
                            lowest[q] = wall
                            slack[q] -= wall - level
                before = level
            if best is not None and len(raises) == done:
                return Choice(best[0], best[1], best[2], best[3], self._raised(best))
            for q, *_ in raises[done:]:
                why = self._broken(q, q + 1, x, y)
                if why is not None:
                    return why

    def _raised(self, choice: tuple[int, int, int, int, int]) -> int:
        """Return the lowest height for section ``q`` if no buffer begins at its lowest address; 0 if too high."""
        a, b, q, _, wall = choice
        height, lowest = wall, self.lowest[q]
        # Candidates may come later, on top of a buffer in the valley that does not cover q.
        beside = self.left & self.later[a] & self.sooner[b] & ~self.active[q]
        while beside:
            low = beside & -beside
            beside ^= low
            height = min(height, lowest + self.size[low.bit_length() - 1])
        return height if height - lowest <= self.slack[q] else 0

    def _branch(self, x: int, y: int, choice: Choice) -> Why | None:
        """Try each candidate of the section, then raise it; return the cause if all fail."""
        q, could, raised = choice.q, choice.could, choice.raised
        lowest, left, level = self.lowest, self.left, self.lowest[q]
        first, end = choice.first - 1, choice.end + 1
        tried = set()
        while could:
            low = could & -could
            could ^= low
            i = low.bit_length() - 1
            lower, upper, size = self.lower[i], self.upper[i], self.size[i]
            if (lower, upper, size) in tried:
                continue  # the same as one that failed
            tried.add((lower, upper, size))
            self.left = left & ~low
            lowest[lower:upper] = [level + size] * (upper - lower)
            self.offset[i] = level
            why = self._broken(lower, upper, x, y) or self._parts(x, y)
            if why is None:
                return None
            lowest[lower:upper] = [level] * (upper - lower)
            self.left = left
            if self.jumps and (why[1] <= lower or why[0] >= upper):
                return why
            first, end = min(first, why[0]), max(end, why[1])
        if raised:
            lowest[q] = raised
            self.slack[q] -= raised - level
            why = self._broken(q, q + 1, x, y) or self._node(x, y)
            if why is None:
                return None
            lowest[q] = level
            self.slack[q] += raised - level
            if self.jumps and not why[0] <= q < why[1]:
                return why
            first, end = min(first, why[0]), max(end, why[1])
        return first, end

    def _broken(self, first: int, end: int, x: int, y: int) -> Why | None:
        """Return the cause if the change at sections [first, end) of [x, y) left a step that cannot be levelled."""
        for edge in (first, end):
            if self.walls and x < edge < y and not self._level(edge):
                self.weight[edge - 1] += 1
                self.weight[edge] += 1
                return edge - 1, edge + 1
        return None

    def _level(self, edge: int) -> bool:
        """Return whether the step at ``edge`` can still be levelled for the buffers that have to cross it."""
        if not self.cross[edge] & self.left:
            return True
        step = self.lowest[edge - 1] - self.lowest[edge]
        least, most = step - self.slack[edge], step + self.slack[edge - 1]
        if least <= 0 <= most:
            return True
        begin, end = self.begin[edge] & self.left, self.end[edge] & self.left
        if max(begin.bit_count(), end.bit_count()) > MOST_SUMMANDS:
            return True
        above = self._sums_of(begin)
        for other in self._sums_of(end):
            at = bisect_left(above, least + other)
            if at < len(above) and above[at] <= most + other:
                return True
        return False

    def _sums_of(self, buffers: int) -> list[int]:
        known = self._sums.get(buffers)
        if known is None:
            sums, rest = {0}, buffers
            while rest:
                low = rest & -rest
                rest ^= low
                size = self.size[low.bit_length() - 1]
                sums |= {s + size for s in sums}
            known = self._sums[buffers] = sorted(sums)
        return known


def _gathered(bits: list[int]) -> list[int]:
    """Return for each entry the union of it and all entries before it."""
    union, unions = 0, []
    for entry in bits:
        union |= entry
        unions.append(union)
    return unions
