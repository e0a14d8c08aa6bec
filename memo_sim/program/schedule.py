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
Subsequences would be one more field of a pass: an order here says nothing of what a pass holds.
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
    """One micro-batch through one of the stage's chunks of layers."""

    kind: Kind
    micro_batch: int
    chunk: int = 0


def passes_of(layout: Layout, stage: int, micro_batches: int) -> list[Pass]:
    """Return the passes of one stage in the order of the layout's schedule; one stage alone alternates."""
    if layout.pp == 1:
        return one_forward_one_backward(0, 1, micro_batches)
    match layout.schedule:
        case "gpipe":
            return gpipe(micro_batches)
        case "1f1b":
            return one_forward_one_backward(stage, layout.pp, micro_batches)
        case "interleaved":
            return interleaved(stage, layout.pp, micro_batches, layout.virtual_stages)
        case "zero-bubble":
            return zero_bubble(stage, layout.pp, micro_batches)


def gpipe(micro_batches: int) -> list[Pass]:
    """Return all forwards, then all backwards, both in the order of the micro-batches."""
    forwards = [Pass(Kind.FORWARD, m) for m in range(micro_batches)]
    return forwards + [Pass(Kind.BACKWARD, m) for m in range(micro_batches)]


def one_forward_one_backward(stage: int, stages: int, micro_batches: int) -> list[Pass]:
    """Return as many forwards as there are stages behind this one, then a forward and a backward in turn."""
    forwards = [Pass(Kind.FORWARD, m) for m in range(micro_batches)]
    backwards = [Pass(Kind.BACKWARD, m) for m in range(micro_batches)]
    return _in_turn(forwards, backwards, min(micro_batches, stages - 1 - stage))


def interleaved(stage: int, stages: int, micro_batches: int, chunks: int) -> list[Pass]:
    """Return 1F1B over ``chunks`` chunks of layers, with as many more forwards ahead as all chunks but one take."""
    visits = range(micro_batches * chunks)

    def at(k: int) -> tuple[int, int]:
        """Return (micro-batch, how many chunks its group has been through) of the k-th forward or backward."""
        group, within = divmod(k, stages * chunks)
        return group * stages + within % stages, within // stages

    forwards = [Pass(Kind.FORWARD, m, c) for m, c in map(at, visits)]
    backwards = [Pass(Kind.BACKWARD, m, chunks - 1 - c) for m, c in map(at, visits)]
    ahead = 2 * (stages - 1 - stage) + (chunks - 1) * stages
    return _in_turn(forwards, backwards, min(len(forwards), ahead))


def zero_bubble(stage: int, stages: int, micro_batches: int) -> list[Pass]:
    """Return 1F1B whose weight gradients come ``stage`` micro-batches late: so many as wait fill the stage's end."""
    order: list[Pass] = []
    for each in one_forward_one_backward(stage, stages, micro_batches):
        order.append(each)
        if each.kind is Kind.BACKWARD and each.micro_batch >= stage:
            order.append(Pass(Kind.WEIGHTS, each.micro_batch - stage))
    return order + [Pass(Kind.WEIGHTS, m) for m in range(max(0, micro_batches - stage), micro_batches)]


def _in_turn(forwards: list[Pass], backwards: list[Pass], ahead: int) -> list[Pass]:
    """Return ``ahead`` forwards, then a forward and a backward in turn, then the backwards that are left."""
    order = forwards[:ahead]
    for forward, backward in zip(forwards[ahead:], backwards, strict=False):
        order += [forward, backward]
    return order + backwards[len(forwards) - ahead :]
