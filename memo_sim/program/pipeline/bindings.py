"""Binds the slots of instances: computes which buffer of its family each slot uses.

A rule gives the buffer's index from micro-batch, subsequence and layer. Slots with the same numbering share a rule.
Nearly every rule is linear in the micro-batch: it is evaluated for the first two micro-batches of a layer, and the
others are computed from these. The rules of rounding buffers are not linear (``layout/swap_schedule.py``) and are
evaluated each time. A family that belongs to one subsequence has no index for subsequences.

      slot       family       layer 3 of 8, keep       layer 3 of 8, rounding buffers
      q, k, v    skeletal.*   8 m + 3                  1
      grad_in    grad.x       9 m + 3                  9 m + 3
      params     params.*     3                        3
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from operator import itemgetter

from memo_sim.program.data_parallel.sharding import Sharding
from memo_sim.program.ir.instruction import Family, Template
from memo_sim.program.ir.kinds import STATE_KINDS, FamilyKind, TemplateKind
from memo_sim.program.layout.stage import Stage
from memo_sim.program.layout.stage_layers import LayersOfKind
from memo_sim.program.layout.swap_schedule import Key

Rule = Callable[[int, int, int], int]
"""Maps a micro-batch, a subsequence and a layer to the index of a buffer in its family.

Layers are local: -1 stands for the embedding, the number of the stage's layers for the head.
"""

_USE_PREFETCHED = (TemplateKind.BACKWARD, TemplateKind.PREFETCH)
"""Templates that use the buffer into which activations are prefetched from the host."""


class LayerCount:
    """Numbers the buffers of families that some layers of a stage have: those of one kind, or all."""

    def __init__(self, count: int, place: Mapping[int, int]) -> None:
        """``count``: how many layers have them. ``place``: by layer, how many of these come before it."""
        self._count, self._place = count, place

    def block(self, _: int, __: int, layer: int) -> int:
        """Return the layer's state."""
        return self._place[max(layer, 0)]

    def each(self, micro_batch: int, _: int, layer: int) -> int:
        """Return the micro-batch's buffer of the layer."""
        return micro_batch * self._count + self._place[max(layer, 0)]

    def first(self, micro_batch: int, subsequence: int, layer: int) -> int:
        """Return the buffer that forward writes, where prefetch fills another one."""
        return 2 * self.each(micro_batch, subsequence, layer)

    def back(self, micro_batch: int, subsequence: int, layer: int) -> int:
        """Return the buffer that prefetch fills there."""
        return self.first(micro_batch, subsequence, layer) + 1


class Rules:
    """The rules of the slots of one stage's templates."""

    def __init__(
        self,
        stage: Stage,
        sharding: Sharding,
        buffer_slots: Mapping[Key, int],
        kinds: Sequence[LayersOfKind],
        *,
        windowed: bool,
    ) -> None:
        """``buffer_slots``: each layer's rounding buffer; empty where every layer has its own buffers.

        ``kinds``: the stage's layers by kind.

        ``windowed``: each layer has two buffers, one to offload from and one to prefetch into (SPPO 5.2).
        """
        self._stage = stage
        self._sharding = sharding
        self._buffer_slots = buffer_slots
        self._windowed = windowed
        every = range(len(stage.layers))
        self._counted: dict[int | None, LayerCount] = {None: LayerCount(len(every), {layer: layer for layer in every})}
        """By kind: which layers its families count; None stands for those of all layers."""
        self._counted |= {each.number: LayerCount(len(each.layers), each.place) for each in kinds if each.suffix}

    @property
    def double_buffered(self) -> frozenset[Rule]:
        """The rules that are not linear."""
        return frozenset({self._buffer_slot, self._next_buffer_slot})

    def of(self, template: Template, slot: str, family: Family) -> Rule:  # noqa: PLR0911 - one return a kind of buffer
        """Return the rule of a template's slot; equal rules compare equal."""
        if slot == "next_x":
            return self._next_buffer_slot if self._buffer_slots else self._next_x
        match family.kind:
            case FamilyKind.GATHERED | FamilyKind.WHOLE_GRADS:
                return partial(self._sharding.index, family, template)
            case FamilyKind.DEFERRED:
                return self._counted[family.layer_kind].each
            case kind if kind in STATE_KINDS:
                of_layer = family.block is not None and family.block.of_layer
                return self._counted[family.layer_kind].block if of_layer else _only
            case FamilyKind.SCALAR | FamilyKind.CAST:
                return _only
            case FamilyKind.STAGING:
                return _other if template.kind is TemplateKind.PREFETCH else _only
            case FamilyKind.INPUT_GRADIENT:
                return self._after if slot == "grad_out" else self._before
            case FamilyKind.HEAD_INPUT | FamilyKind.INPUT:
                return _micro_batch
            case FamilyKind.STAGE_BOUNDARY:
                return self._chunk
            case FamilyKind.SKELETAL:
                return self._skeletal(template, self._counted[family.layer_kind])
            case _:
                return self._counted[family.layer_kind].each

    def _skeletal(self, template: Template, counted: LayerCount) -> Rule:
        if self._windowed:
            return counted.back if template.kind in _USE_PREFETCHED else counted.first
        return self._buffer_slot if self._buffer_slots else counted.each

    def _before(self, micro_batch: int, _: int, layer: int) -> int:
        return micro_batch * self._stage.boundaries + self._boundary(layer, after=False)

    def _after(self, micro_batch: int, _: int, layer: int) -> int:
        return micro_batch * self._stage.boundaries + self._boundary(layer, after=True)

    def _boundary(self, layer: int, *, after: bool) -> int:
        """Return the index of a slot's gradient in its micro-batch: 0 for the embedding, the last one for the head."""
        if layer < 0:
            return 0
        if layer == len(self._stage.layers):
            return self._stage.boundaries - 1
        return self._stage.boundary(layer, after=after)

    def _chunk(self, micro_batch: int, _: int, layer: int) -> int:
        return micro_batch * self._stage.chunks + self._stage.chunk_of(max(layer, 0))

    def _next_x(self, micro_batch: int, subsequence: int, layer: int) -> int:
        """Return where a layer's output goes: to the head, to the next stage, or to the next layer."""
        if self._stage.ends_model(layer):
            return micro_batch
        if self._stage.ends_chunk(layer):
            return self._chunk(micro_batch, subsequence, layer)
        every = self._counted[None]
        return (every.first if self._windowed else every.each)(micro_batch, subsequence, layer + 1)

    def _buffer_slot(self, micro_batch: int, subsequence: int, layer: int) -> int:
        return self._buffer_slots[micro_batch, subsequence, max(layer, 0)]

    def _next_buffer_slot(self, micro_batch: int, subsequence: int, layer: int) -> int:
        """Return where a layer's output goes: as ``_next_x``, but to the next layer's rounding buffer."""
        if self._stage.ends_chunk(layer):
            return self._next_x(micro_batch, subsequence, layer)
        return self._buffer_slots[micro_batch, subsequence, layer + 1]


class Bindings:
    """Evaluates the rules of one template's bound slots, and caches what is linear."""

    def __init__(self, rules: Sequence[Rule], double_buffered: frozenset[Rule], micro_batches: int) -> None:
        """``double_buffered``: the rules that are not linear in the micro-batch."""
        number = {rule: n for n, rule in enumerate(dict.fromkeys(rules))}
        self._rules = list(number)
        self._not_linear = double_buffered
        self._several = micro_batches > 1
        self._double_buffered = [(n, rule) for n, rule in enumerate(self._rules) if rule in double_buffered]
        numbers = [number[rule] for rule in rules]
        self._of_slots: Callable[[list[int]], tuple[int, ...]] = itemgetter(*numbers) if len(numbers) > 1 else tuple
        self._lines: dict[tuple[int, int], list[tuple[int, int]]] = {}
        """By subsequence and layer, for each rule: the first micro-batch's index, and the step to the next one's."""

    def indices(self, micro_batch: int, subsequence: int, layer: int) -> tuple[int, ...]:
        """Return which buffer of its family each bound slot takes."""
        lines = self._lines.get((subsequence, layer))
        if lines is None:
            lines = self._lines[subsequence, layer] = [self._line(rule, subsequence, layer) for rule in self._rules]
        taken = [first + micro_batch * step for first, step in lines]
        for number, rule in self._double_buffered:
            taken[number] = rule(micro_batch, subsequence, layer)
        return self._of_slots(taken)

    def _line(self, rule: Rule, subsequence: int, layer: int) -> tuple[int, int]:
        if rule in self._not_linear:
            return 0, 0
        first = rule(0, subsequence, layer)
        return first, rule(1, subsequence, layer) - first if self._several else 0


def _only(_: int, __: int, ___: int) -> int:
    return 0


def _other(_: int, __: int, ___: int) -> int:
    return 1


def _micro_batch(micro_batch: int, _: int, __: int) -> int:
    return micro_batch
