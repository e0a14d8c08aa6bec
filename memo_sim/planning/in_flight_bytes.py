"""Lower bound of the bytes that a pipeline stage holds for other passes, from sizes of buffers; nothing is lowered.

A forward's activations stay on the device until its backward, and what a deferred weight gradient reads stays from the
backward to the W pass. So the order of a stage's passes shows what is held at the end of each pass. What lives within
one pass is left out.

      zero-bubble, stage 1 of 2   F0  B0  F1  B1  W0  F2  B2  W1  W2
      activations of              0   -   1   -   -   2   -   -   -
      gradients that wait of      -   0   0   0 1 1   1   1 2 2   -
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache

from memo_sim.contract.plan import Decisions, Layout
from memo_sim.program.layers.activations import Activations
from memo_sim.program.layers.weight_gradients import DeferredWeightGradients
from memo_sim.program.layout.recomputed_layers import ALL
from memo_sim.program.layout.schedule import Kind, passes_of
from memo_sim.program.layout.shape import shape_of
from memo_sim.program.layout.stage import stages_of
from memo_sim.program.layout.stage_layers import layers_by_kind
from memo_sim.program.layout.swap_schedule import ROUNDING_BUFFERS

ENOUGH = 3
"""Micro-batches for each stage that show the fullest moment: warmup is over, and most W passes wait."""

SCHEDULES = frozenset({"1f1b", "interleaved", "zero-bubble"})
"""Schedules whose first micro-batches show the fullest moment."""

_Runs = tuple[tuple[int, ...], ...]
"""The kinds of the layers of each chunk."""

Moment = tuple[tuple[int, ...], int]
"""The forwards of each chunk whose backward has not ended, and the backwards whose W pass has not."""


@dataclass(frozen=True, slots=True)
class LayerBytes:
    """Bytes on the device for one micro-batch of a layer."""

    kept: int
    """From forward to backward."""
    deferred: int
    """From backward to the W pass."""
    resident: int
    """At most of ``kept`` that the layers in both rounding buffers do not need."""


def order_tells(decisions: Decisions) -> bool:
    """Return whether the order of a stage's passes tells what is held (``in_flight_bytes``).

    An eager framework keeps what the program's layers keep; Hugging Face's modules keep other tensors
    (``memory/huggingface.py``).
    """
    layout = decisions.layout
    known = layout.pp > 1 and layout.subsequences == 1 and layout.schedule in SCHEDULES
    return known and decisions.recompute_layers == ALL and decisions.modules == "auto"


def in_flight_bytes(decisions: Decisions, layers: Mapping[int, LayerBytes]) -> dict[int, int]:
    """Return lower bounds of the dynamic bytes on a device, by stage; of equal stages, of the first and the last.

    Of a stage with rounding buffers, the layers in them may have no other buffers, so as many layers are left out.

    - ``decisions``: a plan for which ``order_tells``.
    - ``layers``: see ``bytes_of_layers``.
    """
    layout, kinds = decisions.layout, decisions.model.layer_kinds
    micro_batches = min(decisions.micro_batches, ENOUGH * layout.pp)
    alike = Layout(pp=layout.pp, schedule=layout.schedule, virtual_stages=layout.virtual_stages)
    found = dict[int, int]()
    for stage, runs in _ends_of_equal(decisions, kinds):
        chunks = [[layers[kind] for kind in run] for run in runs]
        for held, waiting in _moments(alike, stage, micro_batches):
            resident = max(layer.resident for chunk in chunks for layer in chunk)
            kept = sum(count * layer.kept for count, chunk in zip(held, chunks, strict=True) for layer in chunk)
            deferred = waiting * sum(layer.deferred for chunk in chunks for layer in chunk)
            found[stage] = max(found.get(stage, 0), max(0, kept - resident) + deferred)
    return found


def _ends_of_equal(decisions: Decisions, kinds: Sequence[int]) -> list[tuple[int, _Runs]]:
    """Return stages of which one holds most, with the kinds of their layers; of equal ones, the first and the last."""
    ends: dict[_Runs, list[int]] = {}
    for stage in stages_of(decisions):
        ends.setdefault(tuple(tuple(kinds[layer] for layer in run) for run in stage.runs), []).append(stage.index)
    return [(stage, runs) for runs, alike in ends.items() for stage in dict.fromkeys((alike[0], alike[-1]))]


@lru_cache(maxsize=256)
def _moments(layout: Layout, stage: int, micro_batches: int) -> frozenset[Moment]:
    """Return what is held at the ends of a stage's passes, without what another moment holds as well."""
    held, waiting = Counter[int](), 0
    found = set[Moment]()
    deferred = layout.schedule == "zero-bubble"
    for each in passes_of(layout, stage, micro_batches):
        held[each.chunk] += {Kind.FORWARD: 1, Kind.BACKWARD: -1, Kind.WEIGHTS: 0}[each.kind]
        waiting += deferred * {Kind.FORWARD: 0, Kind.BACKWARD: 1, Kind.WEIGHTS: -1}[each.kind]
        found.add((tuple(held[chunk] for chunk in range(layout.virtual_stages)), waiting))
    return frozenset(one for one in found if not any(_is_less(one, other) for other in found))


def _is_less(one: Moment, other: Moment) -> bool:
    """Return whether a moment holds no more than another one of anything, and less of something."""
    pairs = list(zip((*one[0], one[1]), (*other[0], other[1]), strict=True))
    return all(a <= b for a, b in pairs) and one != other


def bytes_of_layers(decisions: Decisions) -> dict[int, LayerBytes]:
    """Return what a layer of each kind holds, by the kind's number in the model.

    Plans have the same that differ only in stages and replicas, if they defer the same gradients.

    Raises:
        Infeasible: when the layout does not divide the model or the sequence.
    """
    shape, found = shape_of(decisions), dict[int, LayerBytes]()
    for stage in stages_of(decisions):
        if len(found) == len(decisions.model.layer_shapes):
            break
        for kind in layers_by_kind(decisions.model, stage):
            if (kind.number or 0) in found:
                continue
            rows = shape.of_layer(kind.shape)
            activations = Activations(decisions, rows, 1, stage, kind)
            waiting = DeferredWeightGradients(decisions, rows, activations).families() if decisions.lora is None else []
            kept = sum(f.bytes for f in activations.families() if f.space == "device")
            resident = ROUNDING_BUFFERS * kept if activations.rounding else 0
            found[kind.number or 0] = LayerBytes(kept, sum(f.bytes for f in waiting), resident)
    return found
