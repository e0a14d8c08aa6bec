"""Pipeline schedules: the order in which a pipeline stage runs its passes, one pure function for each schedule.

A pass is the forward or the backward of one micro-batch through one chunk of layers. With p stages, m micro-batches,
and forward time F, backward time B and weight-gradient time W of a stage, a step lasts

    gpipe        all forwards, then all backwards                         (m + p - 1)(F + B)
    1f1b         p - 1 - stage warmup forwards, then alternating          (m + p - 1)(F + B)
    interleaved  1f1b over v chunks a stage (Megatron-LM)                 m(F + B) + (p - 1)(F + B)/v
    zero-bubble  W passes (deferred weight gradients), late as in ZB-H1   m(F + B) + (p - 1)(F + B - 2W)

      1f1b, p 2, m 3    stage 0  F0 F1 .. B0 F2 B1 .. B2        zero-bubble   F0 F1 .  B0 W0 F2 B1 W1 B2 W2
                        stage 1  .. F0 B0 F1 B1 F2 B2 ..                      .  F0 B0 F1 B1 W0 F2 B2 W1 W2

The interleaved schedule takes micro-batches in groups of p, and each group passes one chunk before the next chunk.
Therefore p must divide the number of micro-batches.

A micro-batch cut into N subsequences has N forwards and N backwards. In every schedule above, subsequences then take
the place of micro-batches. Forwards go from the first subsequence to the last, and backwards from the last to the
first. The first backward therefore needs N - 1 more warmup forwards. GPipe becomes the schedule of TeraPipe, and 1F1B
becomes that of Seq1F1B. With one micro-batch all of them only fill and drain:

      1f1b, p 2, N 3, m 1    stage 0  F0 F1 F2 .  .  B2 .. B1 .. B0
                             stage 1  .  F0 F1 F2 B2 .. B1 .. B0
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from functools import lru_cache

from memo_sim.contract.plan import Layout


class Kind(StrEnum):
    """What a pass computes; ``weights`` is a W pass: the weight gradients that ``backward`` deferred."""

    FORWARD = "forward"
    BACKWARD = "backward"
    WEIGHTS = "weights"


@dataclass(frozen=True, slots=True)
class Pass:
    """One pass: a micro-batch, or one subsequence of it, through one of the stage's chunks of layers."""

    kind: Kind
    micro_batch: int
    chunk: int = 0
    subsequence: int = 0


Unit = tuple[int, int]
"""Micro-batch and subsequence of a pass."""


@dataclass(frozen=True, slots=True)
class Units:
    """The units of a step, in the order of forwards and in the order of backwards."""

    micro_batches: int
    subsequences: int = 1

    @property
    def forward(self) -> list[Unit]:
        """Micro-batch by micro-batch, from the first subsequence to the last."""
        return [(m, s) for m in range(self.micro_batches) for s in range(self.subsequences)]

    @property
    def backward(self) -> list[Unit]:
        """Micro-batch by micro-batch, from the last subsequence to the first.

        Later subsequences add to the gradients of earlier keys, so they go first.
        """
        return [(m, s) for m in range(self.micro_batches) for s in reversed(range(self.subsequences))]


def passes_of(layout: Layout, stage: int, micro_batches: int) -> list[Pass]:
    """Return the passes of one stage in the order of the layout's schedule.

    Without pipeline parallelism forwards and backwards alternate by micro-batch.
    """
    units = Units(micro_batches, layout.subsequences)
    if layout.pp == 1:
        return one_stage(units)
    match layout.schedule:
        case "gpipe":
            return gpipe(units)
        case "1f1b":
            return one_forward_one_backward(stage, layout.pp, units)
        case "interleaved":
            return interleaved(stage, layout.pp, units, layout.virtual_stages)
        case "zero-bubble":
            return zero_bubble(stage, layout.pp, units)


def one_stage(units: Units) -> list[Pass]:
    """Return, for each micro-batch, its forwards and then its backwards."""
    order = []
    for m in range(units.micro_batches):
        one = range(units.subsequences)
        order += [Pass(Kind.FORWARD, m, 0, s) for s in one] + [Pass(Kind.BACKWARD, m, 0, s) for s in reversed(one)]
    return order


def gpipe(units: Units) -> list[Pass]:
    """Return all forwards, then all backwards, both in the order of the micro-batches."""
    return _whole_model(Kind.FORWARD, units.forward) + _whole_model(Kind.BACKWARD, units.backward)


def one_forward_one_backward(stage: int, stages: int, units: Units) -> list[Pass]:
    """Return the warmup forwards, one for each later stage, then alternate one forward and one backward.

    With N subsequences there are N - 1 more warmup forwards, because backward begins with the last subsequence.
    """
    forwards, backwards = _whole_model(Kind.FORWARD, units.forward), _whole_model(Kind.BACKWARD, units.backward)
    return _in_turn(forwards, backwards, stages - 1 - stage + units.subsequences - 1)


def interleaved(stage: int, stages: int, units: Units, chunks: int) -> list[Pass]:
    """Return 1F1B over ``chunks`` chunks of layers, with more warmup forwards: those of all chunks but the last."""
    forwards, backwards, own = _chunks_in_turn(stages, units, chunks)
    return _in_turn(forwards, backwards, 2 * (stages - 1 - stage) + own)


@lru_cache(maxsize=4)
def _chunks_in_turn(stages: int, units: Units, chunks: int) -> tuple[list[Pass], list[Pass], int]:
    """Return what stages of an interleaved pipeline share: its forwards, its backwards, and the shortest warmup."""

    def through(kind: Kind, order: list[Unit], among: list[int]) -> list[Pass]:
        """Return the passes of ``order``, one group of ``stages`` units after the other.

        Each group goes through all chunks in the order ``among``.
        """
        groups = [order[first : first + stages] for first in range(0, len(order), stages)]
        return [Pass(kind, m, c, s) for group in groups for c in among for m, s in group]

    forwards = through(Kind.FORWARD, units.forward, list(range(chunks)))
    backwards = through(Kind.BACKWARD, units.backward, list(reversed(range(chunks))))
    made = {(f.micro_batch, f.subsequence, f.chunk): n for n, f in enumerate(forwards)}
    # On the last stage, which waits for no later stage, warmup is just long enough that each forward precedes its
    # backward.
    own = max(made[b.micro_batch, b.subsequence, b.chunk] - n for n, b in enumerate(backwards))
    return forwards, backwards, own


def zero_bubble(stage: int, stages: int, units: Units) -> list[Pass]:
    """Return 1F1B with each W pass deferred by ``stage`` backwards; the W passes left fill the stage's drain."""
    order: list[Pass] = []
    waiting: list[Unit] = []
    for each in one_forward_one_backward(stage, stages, units):
        order.append(each)
        if each.kind is Kind.BACKWARD:
            waiting.append((each.micro_batch, each.subsequence))
            if len(waiting) > stage:
                order += _whole_model(Kind.WEIGHTS, [waiting.pop(0)])
    return order + _whole_model(Kind.WEIGHTS, waiting)


def _whole_model(kind: Kind, units: list[Unit]) -> list[Pass]:
    """Return one pass for each of ``units``, on a stage that has one chunk."""
    return [Pass(kind, m, 0, s) for m, s in units]


def _in_turn(forwards: list[Pass], backwards: list[Pass], ahead: int) -> list[Pass]:
    """Return ``ahead`` warmup forwards, then alternate forward and backward, then the remaining backwards."""
    ahead = min(ahead, len(forwards))
    order = forwards[:ahead]
    for forward, backward in zip(forwards[ahead:], backwards, strict=False):
        order += [forward, backward]
    return order + backwards[len(forwards) - ahead :]
