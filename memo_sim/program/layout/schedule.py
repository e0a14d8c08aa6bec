"""The order in which a pipeline stage plays its passes: one pure function a schedule.

A pass is the forward or the backward of one micro-batch through one chunk of layers; with p stages, m micro-batches,
forward F and backward B of a stage a step lasts

    gpipe        all forwards, then all backwards                        (m + p - 1)(F + B)
    1f1b         p - 1 - stage forwards ahead, then one of each in turn   (m + p - 1)(F + B)
    interleaved  1f1b over v chunks a stage (Megatron-LM)                 m(F + B) + (p - 1)(F + B)/v
    zero-bubble  weight gradients W apart, as late as ZB-H1 has them      m(F + B) + (p - 1)(F + B - 2W)

      1f1b, p 2, m 3    stage 0  F0 F1 .. B0 F2 B1 .. B2        zero-bubble   F0 F1 .  B0 W0 F2 B1 W1 B2 W2
                        stage 1  .. F0 B0 F1 B1 F2 B2 ..                      .  F0 B0 F1 B1 W0 F2 B2 W1 W2

Interleaved micro-batches go in groups of p, each group through a chunk before the next (so p divides their number).

A micro-batch cut into N subsequences has N forwards and N backwards, and they take the place of micro-batches in every
order above: forwards of a micro-batch go from its first subsequence to its last, backwards back. So the first backward
is that of the last subsequence, and N - 1 more forwards go ahead of it. GPipe's order is then TeraPipe's, 1F1B's is
Seq1F1B's; with one micro-batch all of them fill and drain:

      1f1b, p 2, N 3, m 1    stage 0  F0 F1 F2 .  .  B2 .. B1 .. B0
                             stage 1  .  F0 F1 F2 B2 .. B1 .. B0
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from memo_sim.contract.plan import Layout


class Kind(StrEnum):
    """What a pass computes; ``weights`` are gradients that ``backward`` left out."""

    FORWARD = "forward"
    BACKWARD = "backward"
    WEIGHTS = "weights"


@dataclass(frozen=True, slots=True)
class Pass:
    """One micro-batch, or one subsequence of it, through one of the stage's chunks of layers."""

    kind: Kind
    micro_batch: int
    chunk: int = 0
    subsequence: int = 0


Unit = tuple[int, int]
"""What a pass takes through a chunk: micro-batch and subsequence."""


@dataclass(frozen=True, slots=True)
class Units:
    """The units of a step, in the order of forwards and in that of backwards."""

    micro_batches: int
    subsequences: int = 1

    @property
    def forward(self) -> list[Unit]:
        """Micro-batch by micro-batch, from the first subsequence on."""
        return [(m, s) for m in range(self.micro_batches) for s in range(self.subsequences)]

    @property
    def backward(self) -> list[Unit]:
        """Micro-batch by micro-batch, from the last subsequence back: later keys' gradients are sums over it."""
        return [(m, s) for m in range(self.micro_batches) for s in reversed(range(self.subsequences))]


def passes_of(layout: Layout, stage: int, micro_batches: int) -> list[Pass]:
    """Return the passes of one stage in the order of the layout's schedule; one stage alone alternates."""
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
    """Return each micro-batch's forwards, then its backwards."""
    order = []
    for m in range(units.micro_batches):
        one = range(units.subsequences)
        order += [Pass(Kind.FORWARD, m, 0, s) for s in one] + [Pass(Kind.BACKWARD, m, 0, s) for s in reversed(one)]
    return order


def gpipe(units: Units) -> list[Pass]:
    """Return all forwards, then all backwards, both in the order of the micro-batches."""
    return _whole_model(Kind.FORWARD, units.forward) + _whole_model(Kind.BACKWARD, units.backward)


def one_forward_one_backward(stage: int, stages: int, units: Units) -> list[Pass]:
    """Return as many forwards as there are stages behind this one, then a forward and a backward in turn.

    Subsequences put as many more ahead as the first of them waits for the last.
    """
    forwards, backwards = _whole_model(Kind.FORWARD, units.forward), _whole_model(Kind.BACKWARD, units.backward)
    return _in_turn(forwards, backwards, stages - 1 - stage + units.subsequences - 1)


def interleaved(stage: int, stages: int, units: Units, chunks: int) -> list[Pass]:
    """Return 1F1B over ``chunks`` chunks of layers, with as many more forwards ahead as all chunks but one take."""

    def through(kind: Kind, order: list[Unit], among: list[int]) -> list[Pass]:
        """Return the passes of ``order`` in groups, each through all chunks in the order ``among``."""
        groups = [order[first : first + stages] for first in range(0, len(order), stages)]
        return [Pass(kind, m, c, s) for group in groups for c in among for m, s in group]

    forwards = through(Kind.FORWARD, units.forward, list(range(chunks)))
    backwards = through(Kind.BACKWARD, units.backward, list(reversed(range(chunks))))
    made = {(f.micro_batch, f.subsequence, f.chunk): n for n, f in enumerate(forwards)}
    # No backward may come before its own forward on the last stage, which has none ahead for other stages' sake.
    own = max(made[b.micro_batch, b.subsequence, b.chunk] - n for n, b in enumerate(backwards))
    return _in_turn(forwards, backwards, 2 * (stages - 1 - stage) + own)


def zero_bubble(stage: int, stages: int, units: Units) -> list[Pass]:
    """Return 1F1B whose weight gradients come ``stage`` backwards late: so many as wait fill the stage's end."""
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
    """Return the passes of a stage that has one chunk."""
    return [Pass(kind, m, 0, s) for m, s in units]


def _in_turn(forwards: list[Pass], backwards: list[Pass], ahead: int) -> list[Pass]:
    """Return ``ahead`` forwards, then a forward and a backward in turn, then the backwards that are left."""
    ahead = min(ahead, len(forwards))
    order = forwards[:ahead]
    for forward, backward in zip(forwards[ahead:], backwards, strict=False):
        order += [forward, backward]
    return order + backwards[len(forwards) - ahead :]
