"""Which buffer of its family each slot of an instance takes.

Slots that are numbered alike share a rule, and every rule is linear in the micro-batch: at a layer it is asked for two
micro-batches, whatever the number of slots that follow it and of micro-batches that are placed.

      slot       family       layer 3 of 8, keep       layer 3 of 8, rounding buffers
      q, k, v    skeletal.*   8 m + 3                  1
      grad_in    grad.x       9 m + 3                  9 m + 3
      params     params.*     3                        3
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from operator import itemgetter

from memo_sim.program.activations import Activations
from memo_sim.program.sharding import Sharding
from memo_sim.program.stage import Stage

Rule = Callable[[int, int], int]
"""From a micro-batch and a layer to the index of a buffer in its family.

Layers are local: -1 stands for the embedding, the number of the stage's layers for the head.
"""

_OF_A_BLOCK = ("params", "grads", "master", "moment1", "moment2", "host_grads", "host_params")


class Rules:
    """The rules of one role's slots."""

    def __init__(self, stage: Stage, activations: Activations, sharding: Sharding) -> None:
        self._stage = stage
        self._activations = activations
        self._sharding = sharding

    def of(self, template: str, slot: str, family: str) -> Rule:  # noqa: PLR0911 - one return a kind of slot
        """Return the rule of a template's slot; equal rules compare equal."""
        state, _, kind = slot.partition(".")
        if family.startswith(("gathered.", "whole_grads.")):
            return partial(self._sharding.index, family, template)
        if family.startswith("pending."):
            return self._pending
        if state in _OF_A_BLOCK:
            return self._block if kind in ("", "layer") else _only
        if slot in ("loss", "grad_norm"):
            return _only
        if slot in ("grad_in", "grad_out", "grad.x"):
            return self._after if slot == "grad_out" else self._before
        if slot in ("head.x", "input.ids", "input.labels"):
            return _micro_batch
        if slot in ("stage.x", "stage.out"):
            return self._chunk
        if slot == "next_x":
            return self._next_x
        return self._copied if slot.startswith(("host.", "aside.")) else self._skeletal

    def _pending(self, micro_batch: int, layer: int) -> int:
        return micro_batch * len(self._stage.layers) + layer

    def _block(self, _: int, layer: int) -> int:
        return max(layer, 0)

    def _before(self, micro_batch: int, layer: int) -> int:
        return micro_batch * self._stage.boundaries + self._boundary(layer, after=False)

    def _after(self, micro_batch: int, layer: int) -> int:
        return micro_batch * self._stage.boundaries + self._boundary(layer, after=True)

    def _boundary(self, layer: int, *, after: bool) -> int:
        """Return which of a micro-batch's gradients a slot takes; at the model's ends the outermost on this stage."""
        if layer < 0:
            return 0
        if layer == len(self._stage.layers):
            return self._stage.boundaries - 1
        return self._stage.boundary(layer, after=after)

    def _chunk(self, micro_batch: int, layer: int) -> int:
        return micro_batch * self._stage.chunks + self._stage.chunk_of(layer)

    def _next_x(self, micro_batch: int, layer: int) -> int:
        """Return where a layer's output goes: to the head, to the next stage, or to the next layer."""
        if self._stage.ends_model(layer):
            return micro_batch
        if self._stage.ends_chunk(layer):
            return self._chunk(micro_batch, layer)
        return self._activations.index("x", micro_batch, layer + 1)

    def _copied(self, micro_batch: int, layer: int) -> int:
        return self._activations.index("host.x", micro_batch, max(layer, 0))

    def _skeletal(self, micro_batch: int, layer: int) -> int:
        return self._activations.index("x", micro_batch, max(layer, 0))


class Bindings:
    """The rules of one template's bound slots, and what they have given."""

    def __init__(self, rules: Sequence[Rule]) -> None:
        self._rules = list(dict.fromkeys(rules))
        numbers = [self._rules.index(rule) for rule in rules]
        self._of_slots: Callable[[list[int]], tuple[int, ...]] = itemgetter(*numbers) if len(numbers) > 1 else tuple
        self._lines: dict[int, list[tuple[int, int]]] = {}
        """Of each layer and rule, the first micro-batch's buffer and how many further the next one's is."""

    def indices(self, micro_batch: int, layer: int) -> tuple[int, ...]:
        """Return which buffer of its family each bound slot takes."""
        lines = self._lines.get(layer)
        if lines is None:
            firsts = [(rule(0, layer), rule(1, layer)) for rule in self._rules]
            lines = self._lines[layer] = [(first, second - first) for first, second in firsts]
        return self._of_slots([first + micro_batch * further for first, further in lines])


def _only(_: int, __: int) -> int:
    return 0


def _micro_batch(micro_batch: int, _: int) -> int:
    return micro_batch
