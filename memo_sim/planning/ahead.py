"""Bounds and outcomes that other processes compute for a search before the search needs them.

A search looks at its candidates in the order of their lower bounds, one after the other. At the same time other
processes work on the next ones: they compute tighter bounds, and evaluate candidates that then still are among the
next.

    search     candidate 1    candidate 2   candidate 3     4: known    5: known
    process    candidate 5    candidate 4   candidate 6 ...

The search decides as it does alone: it needs the same bounds and outcomes in the same order, and computes only those
that are not known. So its answer is the same to the last byte for every number of processes. Outcomes of candidates
that turn out to be pruned are left out of it.

Candidates whose bounds lose to the best plans so far are not given to processes, and are taken back from them. A plan
that was played counts here before it is ranked. Before a process gets tasks, it gets the results of the search's own
lowerings, and it sends back those of its own, so that few are repeated.

Where a search begins with work on many layouts, other processes do parts of that, too: ``divided``.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Collection, Hashable, Iterator, Sequence
from dataclasses import dataclass, field
from heapq import heappop, heappush
from itertools import chain, islice, takewhile
from typing import Any, Protocol, TypeVar

from memo_sim.contract.plan import Decisions
from memo_sim.planning.bounded_candidates import LEAST
from memo_sim.planning.outcome import Key
from memo_sim.planning.processes import Helper, Kind, Message, Task, Team

QUEUE = 10
"""Tasks that a process has at once. Some take 3 ms, others 100 ms. What has not begun can be taken back."""
LONG_QUEUE = 40
"""The same when the search is about to play a plan, and gives nothing for some 100 ms."""
NEXT = 16
"""Candidates for each process that count as the next ones, while it is not known which of them matter."""
MOST_NEXT = 64
"""The same once a limit is known: all that is below it has to be looked at."""
FEW = 3
"""A process that has fewer tasks is given candidates beyond the next ones, too."""
FARTHEST = 512
"""Largest number of candidates that are considered for such a process."""

PARTS = 2
"""Parts of divided work that a process has at once."""

OUTCOME, PLAYED, LOWERED = "outcome", "played plans", "lowered layers"
"""Names of what a task yields beside bounds: last a candidate's outcome, and before it plans that it has played for its
bounds, and results of lowerings that other candidates may need, too."""

Number = tuple[int, int]
Entry = tuple[Key, Number, Any]
"""What a search has to look at: its least key, its number, and a candidate or layout with its bounds."""
Part = TypeVar("Part")
Result = TypeVar("Result")


class Bounded(Protocol):
    """A candidate or layout with lower bounds."""

    @property
    def least_key(self) -> Key:
        """No outcome of it ranks before this key."""


class Searching(Protocol):
    """The search that processes work for."""

    first: list[Any]
    """What is looked at before all that waits: a heap of ``Entry``."""
    waiting: list[Any]
    """What is still to be looked at: another one."""
    at: Collection[Decisions]
    """Plans that the search itself plays, which others do not play at the same time."""

    def limit_key(self) -> Key:
        """Return the largest key of a candidate that may matter."""

    def expected_key(self) -> Key:
        """Return the limit that is likely to come next, where plans are played that are not ranked yet."""

    def takes_long(self, one: Any) -> bool:
        """Return whether the next bounds of a candidate or layout take long."""

    def plays_next(self, one: Any) -> bool:
        """Return whether plans are played next for a candidate or layout."""

    def next_name(self, one: Any, most: Key) -> Hashable:
        """Return the name of the next bounds, with what they depend on; empty where there are none.

        ``most``: the limit.
        """

    def offered(self, one: Any, last: Key, soon: Key, most: Key) -> Offer | None:
        """Return what is next as a task that ends where its bounds pass ``last``; None where the search does it.

        Nothing is played where they pass ``soon``: by then the best plans may be better. ``most`` is the limit.
        """

    def beside_itself(self, *arguments: Any) -> Iterator[tuple[Hashable, Any]]:
        """Do a task in this process, without a change to the search."""

    def unsent(self, helper: Helper) -> tuple[Task, object] | None:
        """Return a task that gives a process the search's own new results, and them; None where there are none."""

    def hear(self, found: Any, helper: Helper | None) -> None:
        """Use an outcome, plans that were played, or results of lowerings, from a process or from this one (None)."""


@dataclass(frozen=True, slots=True)
class Offer:
    """A candidate as a task: its arguments, and the plans that it plays and that other candidates play as well."""

    arguments: tuple[object, ...]
    plays: Collection[Decisions]


@dataclass(slots=True)
class _Known:
    """What is known about a candidate: it with tighter bounds, by their names; and its outcome."""

    bounds: dict[Hashable, Any] = field(default_factory=dict)
    highest: Any = None
    """The candidate with those bounds that have the largest key."""
    outcome: Any = None
    lost: bool = False
    """Whether a process did not finish it; it is not given to another one."""

    def passes(self, most: Key) -> bool:
        """Return whether bounds are known that pass ``most``, the key of a plan that fits."""
        return not most[0] and self.highest is not None and self.highest.least_key > most


@dataclass(frozen=True, slots=True)
class _Begun:
    """A task that a process has: the candidate's number and key, and the plans that it plays."""

    number: Number
    key: Key
    helper: Helper
    plays: Collection[Decisions]


class Ahead:
    """What other processes find out for one search.

    A task yields names of tighter bounds with the candidate that has them, and then ``OUTCOME`` with its outcome.
    """

    def __init__(
        self,
        team: Team,
        search: Searching,
        *,
        begin: tuple[Task, tuple[object, ...]],
        kept: dict[str, Any],
        task: Task,
    ) -> None:
        """``begin``: the first task of a process, with its arguments. It makes ``kept``, which a forked one has."""
        self._team = team
        self._search = search
        self._begin = begin
        self._kept = kept
        self._task = task
        self._told: set[Helper] = set()
        self._known: dict[Number, _Known] = {}
        self._begun: dict[int, _Begun] = {}
        self._dropped: dict[int, Helper] = {}
        """The processes of tasks that were taken back."""

    def give(self, queue: int = QUEUE) -> None:
        """Give the next candidates to all processes, up to ``queue`` tasks, where one has at most half as many."""
        self._receive(block=False)
        most = self._search.expected_key()
        for name, begun in list(self._begun.items()):
            if begun.key > most and self._waits(name, begun):
                self._take_back(name)
        helpers = self._helpers()
        if not any(len(helper.tasks) <= queue // 2 for helper in helpers):
            return
        for helper in sorted(helpers, key=lambda each: len(each.tasks)):
            for number, one, made in self._offers(most, helper):
                if len(helper.tasks) >= queue:
                    break
                if helper.ready and (unsent := self._search.unsent(helper)):
                    self._given(helper, *unsent)
                given = self._given(helper, self._task, *made.arguments)
                if given is not None:
                    self._begun[given] = _Begun(number, one.least_key, helper, made.plays)

    def divided(self, task: Task, here: Callable[[Part], Result], parts: Sequence[Part]) -> list[Result]:
        """Return the result of each part of some work, of which other processes do what they can: the last ones.

        ``task`` yields the result that ``here`` returns.
        """
        found: dict[int, Result] = {}
        left, begun = deque(range(len(parts))), dict[int, tuple[int, Helper]]()
        self._team.hurry()
        while left or begun:
            if found:  # the first part fills caches that forked processes then have
                self._give_parts(task, parts, left, begun)
            if not left:
                self._take_parts_back(left, begun)
            if left:
                place = left.popleft()
                found[place] = here(parts[place])
            for message in self._team.messages(block=not left and bool(begun)):
                if message.name not in begun:
                    self._note(message)
                elif message.kind is Kind.PART:
                    found[begun[message.name][0]] = message.part
                else:
                    place, _ = begun.pop(message.name)
                    left.extend([] if place in found else [place])  # the process has failed
        return [found[place] for place in range(len(parts))]

    def _give_parts(
        self, task: Task, parts: Sequence[object], left: deque[int], begun: dict[int, tuple[int, Helper]]
    ) -> None:
        """Give parts of divided work to processes that have room for tasks; one is left for this process."""
        for helper in self._helpers():
            while len(left) > 1 and len(helper.tasks) < PARTS:
                name = self._given(helper, task, parts[left[-1]])
                if name is None:
                    break
                begun[name] = left.pop(), helper

    @staticmethod
    def _take_parts_back(left: deque[int], begun: dict[int, tuple[int, Helper]]) -> None:
        """Take back the parts of divided work that no process has begun."""
        for name, (place, helper) in list(begun.items()):
            if helper.tasks and helper.tasks[0] != name:
                helper.drop(name)
                left.append(place)
                del begun[name]

    def _helpers(self) -> list[Helper]:
        return self._team.helpers(self._task.__module__, self._kept)

    def _given(self, helper: Helper, task: Task, *arguments: object) -> int | None:
        """Give a task to a process, after this search's first one; return its name, or None where it has died."""
        if helper not in self._told:
            self._told.add(helper)
            if helper.kept is not self._kept:
                helper.give(self._team.next_name(), self._begin[0], *self._begin[1])
        name = self._team.next_name()
        return name if helper.give(name, task, *arguments) else None

    def _offers(
        self, most: Key, helper: Helper | None, *, far: bool = False
    ) -> Iterator[tuple[Number, Bounded, Offer]]:
        """Yield the next candidates that no process is at; none plays what another one plays.

        Another process (``helper``) begins with plans that are played: while this one plays, it gives nothing. Then
        come the last of the next ones, because the search is soon at the others itself, and would wait for the process
        that is at the same candidate. This process (None) begins with the first, and plays last: other tasks end where
        plans would be played. It plays what comes after the next ones only if ``far``. Candidates beyond the next ones
        follow, but not for a process that has ``FEW`` tasks.
        """
        begun = {plan for begun in self._begun.values() for plan in begun.plays}.union(self._search.at)
        busy = {begun.number for begun in self._begun.values()}
        for found, last, soon in self._next(most):
            plays = [each for each in found if self._search.plays_next(each[1])]
            rest = [each for each in found if not self._search.plays_next(each[1])]
            if helper:
                turns = [(plays, soon), (rest[::-1], soon), (plays, most)]
            else:
                turns = [(rest, LEAST), (plays, most if far else soon)]
            for number, one, until in ((*each, until) for turn, until in turns for each in turn):
                if number in busy:
                    continue
                made = self._search.offered(one, last, until, most)
                if made is not None and begun.isdisjoint(made.plays):
                    begun.update(made.plays)
                    busy.add(number)
                    yield number, one, made
            if helper and len(helper.tasks) >= FEW:
                return

    def _next(self, most: Key) -> Iterator[tuple[list[tuple[Number, Any]], Key, Key]]:
        """Yield the next candidates that are not known, and the keys of the last of them and of the ``NEXT`` ones.

        Then yield twice as many, and so on up to ``FARTHEST``, for a process that has too little to do.
        """
        processes = self._team.others + 1
        heaps = (self._search.first, self._search.waiting)
        order = chain.from_iterable(takewhile(lambda entry: entry[0] <= most, _in_order(heap)) for heap in heaps)
        seen, soon, last, found = 0, most, LEAST, list[tuple[Number, Any]]()
        enough = (NEXT if most[0] else MOST_NEXT) * processes
        farthest = max(enough, FARTHEST)
        while enough <= farthest:
            for key, number, one in islice(order, enough - seen):
                seen += 1
                if seen == NEXT * processes:
                    soon = key
                last = max(last, key)
                known = self._known.get(number)
                if known is None:
                    found.append((number, one))
                elif known.outcome is None and not (known.lost or known.passes(most)):
                    found.append((number, self._tightest(known, one, most)))
            if seen < enough:
                last = most
            yield [(number, one) for number, one in found if one.least_key <= last], last, soon
            if seen < enough:
                return
            enough *= 2

    def _tightest(self, known: _Known, one: Any, most: Key) -> Any:
        while (name := self._search.next_name(one, most)) in known.bounds:
            one = known.bounds[name]
        return one

    def bounded(self, number: Number, one: Bounded) -> Any:
        """Return a candidate with its next bounds; None where no process has computed them or is about to.

        Where bounds are known that pass the limit, it is these, even if they were computed against another time: the
        search alone would prune the candidate as well.
        """
        most = self._search.limit_key()
        name = self._search.next_name(one, most)

        def enough(known: _Known) -> bool:
            return name in known.bounds or known.passes(most)

        self._await(number, enough, working=self._search.takes_long(one))
        known = self._known.get(number)
        if known is None:
            return None
        return known.highest if known.passes(most) else known.bounds.get(name)

    def outcome(self, number: Number) -> Any:
        """Return a candidate's outcome; None where no process has evaluated it or is about to."""
        self._await(number, lambda known: known.outcome is not None, working=True)
        known = self._known.get(number)
        return known.outcome if known else None

    def end(self) -> None:
        """Take back all tasks that have not begun."""
        for name, begun in list(self._begun.items()):
            if self._waits(name, begun):
                self._take_back(name)

    def _await(self, number: Number, enough: Callable[[_Known], bool], *, working: bool = False) -> None:
        """Wait while a process is at a candidate and it is not known enough; take back what no process has begun.

        With ``working``, do other tasks meanwhile: an outcome takes long, and so do some bounds.
        """
        self._receive(block=False)
        while not ((known := self._known.get(number)) and enough(known)):
            at = next((name for name, begun in self._begun.items() if begun.number == number), None)
            if at is None:
                return
            if self._waits(at, self._begun[at]):
                self._take_back(at)
                return
            self._receive(block=not (working and self._work()))

    def _work(self) -> bool:
        """Do the next task in this process, which waits for another one; return whether there was one."""
        most = self._search.expected_key()
        offer = next(self._offers(most, None), None)
        if offer is None:  # take what another process has not begun
            late = [name for name, begun in self._begun.items() if self._waits(name, begun)]
            if late:
                self._take_back(min(late, key=lambda name: self._begun[name].key))
            offer = next(self._offers(most, None), None) or next(self._offers(most, None, far=True), None)
        if offer is None:
            return False
        self._do(offer)
        return True

    def _do(self, offer: tuple[Number, Bounded, Offer]) -> None:
        """Do in this process what another one could do."""
        number, _, made = offer
        try:
            for name, part in self._search.beside_itself(*made.arguments):
                self._keep(number, name, part, None)
        except Exception:  # it is raised again if the search comes to this candidate
            self._known.setdefault(number, _Known()).lost = True

    @staticmethod
    def _waits(name: int, begun: _Begun) -> bool:
        """Return whether a task waits for another one of its process."""
        return bool(begun.helper.tasks) and begun.helper.tasks[0] != name

    def _take_back(self, name: int) -> None:
        begun = self._begun.pop(name)
        begun.helper.drop(name)
        self._dropped[name] = begun.helper

    def _receive(self, *, block: bool) -> None:
        for message in self._team.messages(block=block):
            self._note(message)

    def _note(self, message: Message) -> None:
        begun = self._begun.get(message.name)
        if begun is None:  # a task of an earlier search, or one that was taken back, perhaps too late
            helper = self._dropped.get(message.name)
            if helper is not None and message.kind is Kind.PART and message.part[0] in (PLAYED, LOWERED):
                self._search.hear(message.part[1], helper)
            return
        if message.kind is not Kind.PART:
            del self._begun[message.name]
        if message.kind is Kind.LOST:
            self._known.setdefault(begun.number, _Known()).lost = True
        if message.kind is Kind.PART:
            name, part = message.part
            self._keep(begun.number, name, part, begun.helper)

    def _keep(self, number: Number, name: Hashable, part: Any, helper: Helper | None) -> None:
        """Keep what is found out about a candidate, by a process or by this one (None)."""
        if name in (PLAYED, LOWERED):
            self._search.hear(part, helper)
            return
        known = self._known.setdefault(number, _Known())
        if name == OUTCOME:
            known.outcome = part
            self._search.hear(part, helper)
        else:
            known.bounds[name] = part
            if known.highest is None or known.highest.least_key < part.least_key:
                known.highest = part


def _in_order(heap: Sequence[Entry]) -> Iterator[Entry]:
    """Yield the entries of a heap in their order, without changing it."""
    at = [(heap[0][:2], 0)] if heap else []
    while at:
        _, place = heappop(at)
        yield heap[place]
        for child in (2 * place + 1, 2 * place + 2):
            if child < len(heap):
                heappush(at, (heap[child][:2], child))
