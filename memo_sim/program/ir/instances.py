"""The instances of a program in order; those that come again for each micro-batch are kept once.

A pipeline of 35 stages that plays 210 micro-batches has 130,000 instances, of 200 bytes each. All but a few come from
``Repeated`` ones. Most readers need only the template of every instance, or the indices of its buffers, which are
arrays. The instances themselves are made when they are first asked for.

      runs    [step/l0 gather, step/l0 zero ...]   (forward, m0)   (forward, m1)   (backward, m0)   (forward, m2) ...
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import cached_property
from itertools import chain
from operator import itemgetter
from typing import Any, Protocol, overload

import numpy as np
from numpy.typing import NDArray

from memo_sim.program.ir.instruction import Instance

Numbers = NDArray[np.signedinteger[Any]]


class Group(Protocol):
    """Instances that follow each other."""

    @property
    def templates(self) -> Numbers:
        """The template of every instance."""

    @property
    def indices(self) -> tuple[Numbers, Numbers]:
        """The indices of the buffers of all instances, for micro-batch 0, and by how much a micro-batch raises each."""

    def of(self, micro_batch: int) -> Sequence[Instance]:
        """Return the instances for a micro-batch."""


class Once:
    """Instances that come once, for whatever micro-batches they have."""

    def __init__(self, instances: list[Instance]) -> None:
        self._instances = instances
        self.templates: Numbers = np.array([each.template for each in instances], dtype=np.int32)
        """The template of every instance."""

    @property
    def indices(self) -> tuple[Numbers, Numbers]:
        """The indices of the buffers of all instances, and zeros."""
        found = np.array(list(chain.from_iterable(each.indices for each in self._instances)), dtype=np.int64)
        return found, np.zeros_like(found)

    def of(self, micro_batch: int) -> Sequence[Instance]:
        """Return the instances."""
        return self._instances


class Repeated:
    """Instances of a micro-batch that come again for others.

    An instance of another micro-batch has another place, and each index of its buffers is a linear function of the
    micro-batch (``bindings.py``). Two micro-batches show that function.
    """

    def __init__(self, one: Sequence[Instance], other: Sequence[Instance]) -> None:
        """``one`` and ``other``: the same instances of two micro-batches."""
        self._lines = [_line(a, b) for a, b in zip(one, other, strict=True)]
        self.templates: Numbers = np.array([each.template for each in one], dtype=np.int32)
        """The template of every instance."""
        lines = [pair for _, _, line, of_slots, _ in self._lines for pair in of_slots(line)]
        table = np.array(lines, dtype=np.int64).reshape(-1, 2)
        self.indices: tuple[Numbers, Numbers] = table[:, 0].copy(), table[:, 1].copy()
        """The indices of all instances for micro-batch 0, and by how much a micro-batch raises each."""

    def of(self, micro_batch: int) -> Sequence[Instance]:
        """Return the instances for a micro-batch."""
        at = f"m{micro_batch}"
        return [
            Instance(number, at + rest, of_slots([a + micro_batch * b for a, b in line]), micro_batch, *place)
            for number, rest, line, of_slots, place in self._lines
        ]


_Line = tuple[int, str, list[tuple[int, int]], Callable[[list[Any]], tuple[Any, ...]], tuple[int, int, int]]
"""An instance for any micro-batch: its template, its place without the micro-batch, the different indices with their
steps, what gives each slot its index, and its layer, subsequence and first row."""


def _line(one: Instance, other: Instance) -> _Line:
    """Return what two instances of different micro-batches have in common."""
    apart = other.micro_batch - one.micro_batch
    steps = [(b - a) // apart for a, b in zip(one.indices, other.indices, strict=True)]
    line = [(index - step * one.micro_batch, step) for index, step in zip(one.indices, steps, strict=True)]
    different = list(dict.fromkeys(line))
    numbers = [different.index(each) for each in line]
    of_slots: Callable[[list[Any]], tuple[Any, ...]] = itemgetter(*numbers) if len(numbers) > 1 else tuple
    rest = one.place[len(f"m{one.micro_batch}") :]
    return one.template, rest, different, of_slots, (one.layer, one.subsequence, one.first)


class Instances(Sequence[Instance]):
    """Instances in program order, as runs: groups, each for a micro-batch."""

    def __init__(self, runs: Sequence[tuple[Group, int]]) -> None:
        self._groups = list(dict.fromkeys(group for group, _ in runs))
        number = {group: n for n, group in enumerate(self._groups)}
        self._group_of: Numbers = np.array([number[group] for group, _ in runs], dtype=np.int32)
        self._micro_batch_of: Numbers = np.array([micro_batch for _, micro_batch in runs], dtype=np.int32)
        self._count = int(self._sizes([group.templates for group in self._groups])[self._group_of].sum())

    @classmethod
    def listed(cls, instances: Sequence[Instance]) -> Instances:
        """Return given instances, each of which comes once; those of this class as they are."""
        return instances if isinstance(instances, Instances) else cls([(Once(list(instances)), 0)])

    @cached_property
    def templates(self) -> Numbers:
        """The template of every instance."""
        row, _ = self._rows([group.templates for group in self._groups])
        return _joined([group.templates for group in self._groups])[row]

    @property
    def indices(self) -> Numbers:
        """The index of the buffer of every bound slot of every instance."""
        tables = [group.indices for group in self._groups]
        row, run = self._rows([first for first, _ in tables])
        step = _joined([step for _, step in tables])[row]
        step *= self._micro_batch_of[run]
        step += _joined([first for first, _ in tables])[row]
        return step

    def __len__(self) -> int:
        """Return the number of instances."""
        return self._count

    def __iter__(self) -> Iterator[Instance]:
        """Yield the instances in program order."""
        return iter(self._every)

    @overload
    def __getitem__(self, number: int) -> Instance: ...

    @overload
    def __getitem__(self, number: slice) -> tuple[Instance, ...]: ...

    def __getitem__(self, number: int | slice) -> Instance | tuple[Instance, ...]:
        """Return an instance by its number, or a range of them."""
        return self._every[number]

    def __eq__(self, other: object) -> bool:
        """Return whether ``other`` has equal instances in the same order."""
        return isinstance(other, Instances | tuple) and self._every == tuple(other)

    def __hash__(self) -> int:
        """Return the hash of the instances."""
        return hash(self._every)

    @cached_property
    def _every(self) -> tuple[Instance, ...]:
        runs = zip(self._group_of.tolist(), self._micro_batch_of.tolist(), strict=True)
        return tuple(chain.from_iterable(self._groups[group].of(micro_batch) for group, micro_batch in runs))

    def _sizes(self, tables: list[Numbers]) -> Numbers:
        """Return the number of rows of each group's table."""
        return np.array([len(table) for table in tables], dtype=np.int64)

    def _rows(self, tables: list[Numbers]) -> tuple[Numbers, Numbers]:
        """Return for every row of every run its row in all tables joined, and its run."""
        size = self._sizes(tables)
        taken = size[self._group_of]
        run = np.repeat(np.arange(len(taken), dtype=np.int32), taken)
        shift = (np.cumsum(size) - size)[self._group_of] - (np.cumsum(taken) - taken)
        return np.arange(len(run), dtype=np.int64) + shift[run], run


def _joined(tables: list[Numbers]) -> Numbers:
    return np.concatenate([np.zeros(0, dtype=np.int32), *tables])
