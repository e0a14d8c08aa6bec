"""The order of a multiplexed stage's instances: wave by wave; in waves without an own task, the stage is a helper.

P2p transfers have the same order on all stages (wave, layer, task), so that no stages deadlock:

    outputs of the wave before | helpers' input rows | for each layer: what the next layer needs, this layer's keys and
    values | helpers' output rows

Memory is allocated in program order. So a receive is placed where its buffer may be allocated, and a send where its
buffer may be freed: after the last kernel that reads that buffer. Positions do not delay transfers: each one starts as
soon as its lane is free and its operands are ready.

      wave 0    stage 0   receive             kv l0                    kv l1  out
                          compute       F l0.....................  F l1..............
                          send          x params l0 params l1
                stage 1   receive       x params l0 params l1
                          compute       l0, half 1 | half 2 | l1, half 1 | half 2
                          send                     kv l0                  kv l1     out
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Protocol

from memo_sim.program.layout.schedule import Kind, Pass
from memo_sim.program.layout.stage import Stage
from memo_sim.program.layout.swap_schedule import LayerPass, layer_passes_of
from memo_sim.program.pipeline.helper_p2p import Message
from memo_sim.program.pipeline.helper_stage import HALVES, HelperStage
from memo_sim.program.pipeline.owner_stage import OwnerStage
from memo_sim.program.pipeline.stage_p2p import StageTransfer

_BEFORE_BACKWARD = {False: ("again", "kept"), True: ("again",)}
"""Messages to helpers one layer before its backward; the key tells whether the task has the first subsequence.

Keys of the first subsequence are not read after its own backward, so they are sent last there, to free their buffer.
"""


class Placer(Protocol):
    """Places the instances of a stage, in the order of the calls."""

    def begin(self, each: Pass) -> None:
        """Begin a pass with the gathers and copies of its received input."""

    def play_layer_pass(self, layer_pass: LayerPass, then: Callable[[], None] | None = None) -> None:
        """Place one layer's forward or backward, with embedding or head and the copies around it.

        ``then`` is called between the layer and the head (forward) or the embedding (backward) that follows it.
        """

    def place_transfer(self, transfer: StageTransfer) -> None:
        """Place a p2p transfer between neighbouring stages."""

    def at_owner(self, template: str, layer: int, subsequence: int) -> None:
        """Place a template of ``OwnerStage`` at a layer (local number)."""

    def as_helper(self, helper: HelperStage, template: str, layer: int) -> None:
        """Place a template of ``HelperStage`` at a layer, numbered on the owner stage."""


class WaveOrder:
    """Places the passes of one stage."""

    def __init__(
        self,
        placer: Placer,
        stage: Stage,
        subsequences: int,
        *,
        owners: dict[int, OwnerStage],
        helpers: list[HelperStage],
        overlap: bool,
    ) -> None:
        """``owners``: by subsequence, the stage's tasks that have helpers. ``helpers``: its portions of others' tasks.

        ``overlap``: whether receives are placed a pass earlier, and sends a pass later (``stage_p2p.py``).
        """
        self.placer, self.stage, self.count, self.owners, self.overlap = placer, stage, subsequences, owners, overlap
        self.helpers: dict[int, list[HelperStage]] = {}
        """By wave, in the order of owner stages."""
        for helper in sorted(helpers, key=lambda each: each.owner.index):
            self.helpers.setdefault(helper.task.subsequence + helper.owner.index, []).append(helper)
        self._unsent: list[StageTransfer] = []
        self._received: set[Pass] = set()
        self._layers = list(stage.chunk(0))

    def place(self) -> None:
        """Place all forwards, then all backwards in reverse."""
        waves = list(range(self.count + self.stage.stages - 1))
        steps = [(Kind.FORWARD, wave) for wave in waves] + [(Kind.BACKWARD, wave) for wave in reversed(waves)]
        for (kind, wave), (next_kind, next_wave) in zip(steps, [*steps[1:], (Kind.BACKWARD, -1)], strict=True):
            following = self._own_pass(next_kind, next_wave)
            own = self._own_pass(kind, wave)
            if own is None:
                self._send()
                self._helper_wave(kind, self.helpers.get(wave, []), following)
            elif owner := self.owners.get(own.subsequence):
                self._receive(own)
                (self._owner_forward if kind is Kind.FORWARD else self._owner_backward)(owner, own, following)
                self._queue_send(own)
            else:
                self._play_whole(own, following)
        self._send()

    def _own_pass(self, kind: Kind, wave: int) -> Pass | None:
        """Return the stage's own pass in a wave."""
        x = wave - self.stage.index
        return Pass(kind, 0, 0, x) if 0 <= x < self.count else None

    def _play_whole(self, own: Pass, following: Pass | None) -> None:
        self._receive(own)
        if self.overlap:
            self._receive(following)
        self.placer.begin(own)
        for layer_pass in layer_passes_of(own, self._layers):
            self.placer.play_layer_pass(layer_pass)
        self._send()
        self._queue_send(own)

    def _receive(self, each: Pass | None) -> None:
        """Place the receive of a pass's input, if it is not placed yet."""
        if each is None or each in self._received:
            return
        self._received.add(each)
        forward = each.kind is Kind.FORWARD
        if (self.stage.source(0) if forward else self.stage.target(0)) is not None:
            what, layer = ("x", self._layers[0]) if forward else ("grad", self._layers[-1])
            self.placer.place_transfer(StageTransfer(f"stage.recv.{what}", 0, layer, each.subsequence))

    def _queue_send(self, each: Pass) -> None:
        """Queue the send of a pass's output; it is placed at once when transfers do not overlap."""
        forward = each.kind is Kind.FORWARD
        if (self.stage.target(0) if forward else self.stage.source(0)) is not None:
            what, layer = ("x", self._layers[-1]) if forward else ("grad", self._layers[0])
            self._unsent.append(StageTransfer(f"stage.send.{what}", 0, layer, each.subsequence))
        if not self.overlap:
            self._send()

    def _send(self) -> None:
        for transfer in self._unsent:
            self.placer.place_transfer(transfer)
        self._unsent.clear()

    def _owner_forward(self, owner: OwnerStage, own: Pass, following: Pass | None) -> None:
        first, last = self._layers[0], self._layers[-1]
        self.placer.begin(own)
        for layer in self._layers:
            self._exchange(owner, layer, "kv")
            layer_pass = LayerPass(0, layer, False, own.subsequence)
            self.placer.play_layer_pass(
                layer_pass, partial(self._receive_outputs, owner, layer, "out", following) if layer == last else None
            )
            if layer == first:
                self._send()
                self._exchange(owner, layer, "x")
                self._exchange(owner, layer, "params", "before")
            if layer != last:
                self._exchange(owner, layer + 1, "params", "before")

    def _owner_backward(self, owner: OwnerStage, own: Pass, following: Pass | None) -> None:
        first, last = self._layers[0], self._layers[-1]
        ends = own.subsequence == 0
        self.placer.begin(own)
        for layer in reversed(self._layers):
            layer_pass = LayerPass(0, layer, True, own.subsequence)
            then = partial(self._receive_outputs, owner, layer, "grad_in", following) if layer == first else None
            self.placer.play_layer_pass(layer_pass, then)
            if layer == last:
                self._send()
                self._exchange(owner, layer, "grad")
                self._exchange(owner, layer, *_BEFORE_BACKWARD[ends])
            else:
                self._add(owner, layer + 1)
            if ends:
                self._exchange(owner, layer, "kept")
            if layer != first:
                self._exchange(owner, layer - 1, *_BEFORE_BACKWARD[ends])
            self._exchange(owner, layer, "d_kv")
            self._exchange(owner, layer, "d_kv.before", "grads")
        self._add(owner, first)

    def _receive_outputs(self, owner: OwnerStage, layer: int, what: str, following: Pass | None) -> None:
        """Place the receives of the helpers' output rows, after the owner's kernel, and of the next pass's input."""
        self._exchange(owner, layer, what)
        if self.overlap:
            self._receive(following)

    def _exchange(self, owner: OwnerStage, layer: int, *messages: str) -> None:
        """Place the owner's sends or receives of messages with all its helpers."""
        for link in owner.links:
            for what in messages:
                for message, _ in link.messages(what):
                    self.placer.at_owner(message.name(self.stage.index), layer, owner.task.subsequence)

    def _add(self, owner: OwnerStage, layer: int) -> None:
        for link in owner.links:
            self.placer.at_owner(f"bwd.add.{link.portion.stage}", layer, owner.task.subsequence)

    def _helper_wave(self, kind: Kind, helpers: list[HelperStage], following: Pass | None) -> None:
        if helpers:
            (self._helper_forward if kind is Kind.FORWARD else self._helper_backward)(helpers, following)

    def _helper_forward(self, helpers: list[HelperStage], following: Pass | None) -> None:
        layers = range(helpers[0].layers)
        self._each(helpers, 0, "x")
        self._each(helpers, 0, "params", "before")
        for layer in layers:
            last = layer == layers[-1]
            if not last:
                self._each(helpers, layer + 1, "params", "before")
            for helper in helpers:
                for earlier in helper.earlier:
                    self._message(helper, layer, earlier.keys_to(helper.portion))
            if last and self.overlap:
                self._receive(following)
            self._play(helpers, layer, *(f"layer.fwd{'.out' if last else ''}.{half}" for half in HALVES))
            for helper in helpers:
                for later in helper.later:
                    self._message(helper, layer, helper.link.keys_to(later))
                self._each([helper], layer, "kv")
        self._each(helpers, layers[-1], "out")

    def _helper_backward(self, helpers: list[HelperStage], following: Pass | None) -> None:
        layers = range(helpers[0].layers)
        late = [helper for helper in helpers if helper.task.subsequence == 0]
        self._each(helpers, layers[-1], "grad")
        self._receive_early(helpers, layers[-1])
        for layer in reversed(layers):
            self._each(late, layer, "kept")
            if layer:
                self._receive_early(helpers, layer - 1)
            for helper in helpers:
                self._each([helper], layer, "d_kv")
                for later in reversed(helper.later):
                    self._message(helper, layer, helper.link.gradients_from(later))
            if not layer and self.overlap:
                self._receive(following)
            self._play(helpers, layer, "layer.bwd.zero", *(f"layer.bwd.{half}" for half in HALVES))
            for helper in helpers:
                for earlier in helper.earlier:
                    self._message(helper, layer, earlier.gradients_from(helper.portion))
            if not layer:
                self._each(helpers, layer, "grad_in")
            self._each(helpers, layer, "d_kv.before", "grads")

    def _receive_early(self, helpers: list[HelperStage], layer: int) -> None:
        """Place the helpers' receives for a layer's backward that come one layer early."""
        for helper in helpers:
            self._each([helper], layer, *_BEFORE_BACKWARD[helper.task.subsequence == 0])

    def _play(self, helpers: list[HelperStage], layer: int, *templates: str) -> None:
        for template in templates:
            for helper in helpers:
                self.placer.as_helper(helper, template, layer)

    def _each(self, helpers: list[HelperStage], layer: int, *messages: str) -> None:
        """Place the helpers' sends or receives of messages with their owners."""
        for helper in helpers:
            for what in messages:
                for message, _ in helper.link.messages(what):
                    self._message(helper, layer, message)

    def _message(self, helper: HelperStage, layer: int, message: Message) -> None:
        self.placer.as_helper(helper, message.name(self.stage.index), layer)
