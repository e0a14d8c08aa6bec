"""What other processes find out for a search before the search asks for it.

A search takes its candidates in the order of their lower bounds, one after the other. Other processes take the next
ones meanwhile: they compute tighter bounds, and evaluate candidates that then still are among the next.

    search     candidate 1          2: known    3: known    4
    process    candidate 2    candidate 3   candidate 5 ...

The search decides as it does alone: it asks for the same bounds and outcomes in the same order, and takes those that
are known. So its answer is the same to the last byte, whatever the number of processes. What was found out about
candidates that turn out to be pruned is left out of it.

Candidates whose bounds lose to the best plans so far are not given to processes, and are taken back from them.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Hashable, Iterator, Sequence
from dataclasses import dataclass, field
from heapq import heappop, heappush
from typing import Any, Protocol

from memo_sim.contract.plan import Decisions
from memo_sim.planning.processes import Helper, Kind, Message, Task, Team

QUEUE = 3
"""Tasks that a process has at once, so that it need not wait for one while the search plays a plan."""
NEXT = 8
"""Candidates for each process that count as the next ones."""

OUTCOME = "outcome"
"""Name of what a task yields last."""

Key = tuple[bool, bool, float]
Number = tuple[int, int]
Entry = tuple[Key, Number, Any]
"""What a search has to look at: its least key, its number, and a candidate with its bounds, or something else."""


class Bounded(Protocol):
    """A candidate with lower bounds."""

    @property
    def least_key(self) -> Key:
        """No outcome of the candidate ranks before this key."""


@dataclass(frozen=True, slots=True)
class Offer:
    """A candidate as a task: its arguments, and the plans that it plays and that other candidates play as well."""

    arguments: tuple[object, ...]
    plays: Collection[Decisions]


@dataclass(slots=True)
class _Known:
    """What is known about a candidate: it with tighter bounds, by their names; and its outcome."""

    bounds: dict[Hashable, Any] = field(default_factory=dict)
    outcome: Any = None
    lost: bool = False
    """Whether a process did not finish it; it is not given to another one."""


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
        *,
        begin: tuple[Task, tuple[object, ...]],
        task: Task,
        taken: type,
        next_name: Callable[[Any], Hashable],
        heard: Callable[[Any], None],
    ) -> None:
        """``begin``: the first task of every process, with its arguments. ``taken``: the type of what tasks are about.

        ``next_name``: of the next bounds of a candidate, with all that they depend on; empty where there are none.
        ``heard`` is called with every outcome that arrives.
        """
        self._team = team
        self._begin = begin
        self._task = task
        self._taken = taken
        self._next_name = next_name
        self._heard = heard
        self._told: set[Helper] = set()
        self._known: dict[Number, _Known] = {}
        self._begun: dict[int, _Begun] = {}

    def give(
        self,
        waiting: Sequence[Entry],
        *,
        limit: Callable[[], Key],
        offer: Callable[[Any, Key], Offer],
        mine: Collection[Decisions],
    ) -> None:
        """Give the next candidates of ``waiting``, a heap, to processes that have room for tasks.

        ``limit``: nothing with a larger key matters. ``offer`` makes a task that ends where its bounds pass a key.
        ``mine``: the plans that the search itself is at, which others do not play at the same time.
        """
        self._receive(block=False)
        helpers = self._team.helpers(self._task.__module__)
        if not any(len(helper.tasks) < QUEUE for helper in helpers):
            return
        most = limit()
        for name, begun in list(self._begun.items()):
            if begun.key > most and self._waits(name, begun):
                self._take_back(name)
        found, last = self._next(waiting, most, NEXT * (len(helpers) + 1))
        played = {plan for begun in self._begun.values() for plan in begun.plays}.union(mine)
        busy = {begun.number for begun in self._begun.values()}
        for number, one in found:
            helper = min(helpers, key=lambda each: len(each.tasks), default=None)
            if helper is None or len(helper.tasks) >= QUEUE:
                return
            made = offer(one, last)
            if number in busy or not played.isdisjoint(made.plays):
                continue
            played.update(made.plays)
            if helper not in self._told:
                self._told.add(helper)
                helper.give(self._team.next_name(), self._begin[0], *self._begin[1])
            name = self._team.next_name()
            if helper.give(name, self._task, *made.arguments):
                self._begun[name] = _Begun(number, one.least_key, helper, made.plays)

    def _next(self, waiting: Sequence[Entry], most: Key, count: int) -> tuple[list[tuple[Number, Any]], Key]:
        """Return the next candidates that are not known, and the key that the last of the next ones has."""
        found, last = list[tuple[Number, Any]](), most
        seen = 0
        for key, number, one in _in_order(waiting):
            if key > most or seen == count:
                last = min(most, key)
                break
            if not isinstance(one, self._taken):
                continue
            seen += 1
            known = self._known.get(number)
            if known is None:
                found.append((number, one))
            elif known.outcome is None and not known.lost:
                found.append((number, self._tightest(known, one)))
        return [(number, one) for number, one in found if one.least_key <= last], last

    def _tightest(self, known: _Known, one: Any) -> Any:
        while (name := self._next_name(one)) in known.bounds:
            one = known.bounds[name]
        return one

    def bounded(self, number: Number, one: Bounded) -> Any:
        """Return a candidate with its next bounds; None where no process has computed them or is about to."""
        name = self._next_name(one)
        self._await(number, lambda known: name in known.bounds)
        known = self._known.get(number)
        return known.bounds.get(name) if known else None

    def outcome(self, number: Number) -> Any:
        """Return a candidate's outcome; None where no process has evaluated it or is about to."""
        self._await(number, lambda known: known.outcome is not None)
        known = self._known.get(number)
        return known.outcome if known else None

    def end(self) -> None:
        """Take back all tasks that have not begun."""
        for name, begun in list(self._begun.items()):
            if self._waits(name, begun):
                self._take_back(name)

    def _await(self, number: Number, enough: Callable[[_Known], bool]) -> None:
        """Wait while a process is at a candidate and it is not known enough; take back what no process has begun."""
        self._receive(block=False)
        while not ((known := self._known.get(number)) and enough(known)):
            at = next((name for name, begun in self._begun.items() if begun.number == number), None)
            if at is None:
                return
            if self._waits(at, self._begun[at]):
                self._take_back(at)
                return
            self._receive(block=True)

    @staticmethod
    def _waits(name: int, begun: _Begun) -> bool:
        """Return whether a task waits for another one of its process."""
        return bool(begun.helper.tasks) and begun.helper.tasks[0] != name

    def _take_back(self, name: int) -> None:
        begun = self._begun.pop(name)
        begun.helper.drop(name)

    def _receive(self, *, block: bool) -> None:
        for message in self._team.messages(block=block):
            self._note(message)

    def _note(self, message: Message) -> None:
        begun = self._begun.get(message.name)
        if begun is None:  # a task of an earlier search, or one that was taken back
            return
        if message.kind is not Kind.PART:
            del self._begun[message.name]
        known = self._known.setdefault(begun.number, _Known())
        if message.kind is Kind.LOST:
            known.lost = True
        if message.kind is Kind.PART:
            name, part = message.part
            if name == OUTCOME:
                known.outcome = part
                self._heard(part)
            else:
                known.bounds[name] = part


def _in_order(heap: Sequence[Entry]) -> Iterator[Entry]:
    """Yield the entries of a heap in their order, without changing it."""
    at = [(heap[0][:2], 0)] if heap else []
    while at:
        _, place = heappop(at)
        yield heap[place]
        for child in (2 * place + 1, 2 * place + 2):
            if child < len(heap):
                heappush(at, (heap[child][:2], child))
