"""Multiplexed sequence partitioning (SPPO 6.2): divides tasks of the pipeline's fill and drain among idle stages.

Stage i computes subsequence x in wave x + i. Later stages are idle in the first waves, and earlier stages in the last
waves. In these waves idle stages become helper stages: they compute rows of the other stages' tasks, so that all stages
of a wave end together. The rows are divided as follows:

- The level is the forward work of the wave divided by its number of stages. The owner stage of a task keeps at most
  that much work; a task with less work stays whole.
- The work above the level fills the idle stages, one after the other.
- A helper stage computes the first rows of a subsequence, because all of their keys are known. The owner computes the
  last rows.
- Of a micro-batch of several sequences, a subsequence has its rows of every sequence, one sequence after the other. So
  the first rows are those of the first sequences, and need keys of these alone (``sequence_rows.py``).

      p 4, wave 2     stage 0  s2 ...... ++      three tasks, 3/4 of one for each stage; stage 3 computes ++,
                      stage 1  s1 ...... ++      which are rows before those that stay with the owner
                      stage 2  s0 ...... ++

In one wave a stage is a helper or has a task of its own, never both. Table 3 of the paper maps helpers to owners.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate
from math import sqrt

from msgspec.structs import replace

from memo_sim.contract.plan import Decisions
from memo_sim.program.layout.partition import earlier_tokens, partition
from memo_sim.program.layout.shape import Shape


@dataclass(frozen=True, slots=True)
class Portion:
    """Rows [first, first + tokens) of a subsequence, which ``stage`` computes."""

    stage: int
    first: int
    tokens: int

    def shape(self, shape: Shape) -> Shape:
        """Return the sizes of these rows, given those of the whole subsequence."""
        return replace(shape, tokens=self.tokens, shard_tokens=shape.shard(self.tokens), start=shape.start + self.first)


@dataclass(frozen=True, slots=True)
class Task:
    """One subsequence through the layers of one stage; ``portions`` are in the order of rows, the owner's last."""

    subsequence: int
    stage: int
    portions: tuple[Portion, ...]

    @property
    def own(self) -> Portion:
        """The rows that the owner stage computes."""
        return self.portions[-1]

    @property
    def helpers(self) -> tuple[Portion, ...]:
        """The rows that helper stages compute."""
        return self.portions[:-1]


def cut_tasks(decisions: Decisions) -> dict[tuple[int, int], Task]:
    """Return the tasks that have helpers, by (subsequence, stage), in the order of waves; none without multiplexing.

    A helper's rows are whole granules. At least the last granule stays with the owner.
    """
    layout = decisions.layout
    if not layout.multiplexed:
        return {}
    parts, stages = partition(decisions), layout.pp
    count = len(parts)
    found = {}
    for wave in (*range(stages - 1), *range(count, count + stages - 1)):
        owners = [stage for stage in range(stages) if 0 <= wave - stage < count]
        idle = [stage for stage in range(stages) if stage not in owners]
        for task in _shared(decisions, parts, [(wave - stage, stage) for stage in owners], idle):
            if task.helpers:
                found[task.subsequence, task.stage] = task
    return found


def _shared(
    decisions: Decisions, parts: Sequence[int], tasks: Sequence[tuple[int, int]], idle: Sequence[int]
) -> Iterator[Task]:
    """Yield the tasks (subsequence, stage) of a wave, with the portions that ``idle`` stages compute."""
    k, granule = earlier_tokens(decisions.model) / decisions.layout.ulysses, decisions.swap_granule
    starts = (0, *accumulate(parts))
    sequences = decisions.micro_batch
    each = [_work(starts[x + 1] // sequences, k) - _work(starts[x] // sequences, k) for x, _ in tasks]
    works = [sequences * work for work in each]
    level = _level(works, len(idle))
    filled = 0.0
    for (x, stage), work, of_one in zip(tasks, works, each, strict=True):
        begin, length, portions, first = starts[x] // sequences, parts[x] // sequences, [], 0
        given, excess = 0.0, max(0.0, work - level)
        most = (parts[x] - 1) // granule * granule
        while excess - given > level * 1e-9:
            helper = min(int(filled / level + 1e-9), len(idle) - 1)
            room = (helper + 1) * level - filled if helper < len(idle) - 1 else excess
            taken = min(excess - given, room)
            given, filled = given + taken, filled + taken
            whole = min(int(given / of_one + 1e-9), sequences - 1)
            end = whole * length + _tokens(_work(begin, k) + given - whole * of_one, k) - begin
            last = min(most, round(end / granule) * granule)
            if last > first:
                portions.append(Portion(idle[helper], first, last - first))
                first = last
        yield Task(x, stage, (*portions, Portion(stage, first, parts[x] - first)))


def _level(works: Sequence[float], idle: int) -> float:
    """Return the level: the work of each stage after stages with more work have given the rest to the idle ones."""
    above = sorted(works, reverse=True)
    while above[-1] < (level := sum(above) / (len(above) + idle)):
        above.pop()
    return level


def _work(tokens: float, k: float) -> float:
    """Return the forward work of the first ``tokens`` tokens of a sequence; unit: the products of one token.

    ``partition.py`` has the formula.
    """
    return tokens + tokens * tokens / (2 * k)


def _tokens(work: float, k: float) -> float:
    """Return how many tokens from the start of a sequence have ``work`` forward work; the inverse of ``_work``."""
    return sqrt(k * k + 2 * k * work) - k


def swapped_by_owner(swapped: int, tokens: int, own: Portion, granule: int) -> int:
    """Return the swapped tokens among the owner's rows: the same share as of the whole task, in whole granules."""
    return own.tokens if swapped == tokens else min(own.tokens, swapped * own.tokens // tokens // granule * granule)


def boundaries(decisions: Decisions, subsequence: int, swapped: int) -> set[int]:
    """Return the rows before which any stage cuts a subsequence that has ``swapped`` swapped tokens.

    Tokenwise recompute cuts the owner's rows once more, at the row where recompute begins.
    """
    granule, found = decisions.swap_granule, set()
    for task in cut_tasks(decisions).values():
        if task.subsequence == subsequence:
            found |= {portion.first for portion in task.portions}
            if decisions.recompute == "tokenwise":
                tokens = task.own.first + task.own.tokens
                found.add(task.own.first + swapped_by_owner(swapped, tokens, task.own, granule))
    return found
