"""The order of a multiplexed stage's instances: wave by wave, with its guests' pieces in the waves that it has no task.

Hand-overs between stages come in one order on all of them (wave, layer, task), whichever stages they join, so that no
two wait for each other in a circle:

    outputs of the wave before | guests' rows | layer by layer: what the next layer needs, keys and values of this one |
    rows that come home

A receive stands where its buffer may be born, a send where its buffer may die: behind the last kernel that reads the
same buffer, since memory is handed out in program order. When each starts follows from its operands alone.

      wave 0    stage 0   receive             kv l0                    kv l1  out
                          compute       F l0.....................  F l1..............
                          send          x params l0 params l1
                stage 1   receive       x params l0 params l1
                          compute       first l0 | second l0 | first l1 | second l1
                          send                     kv l0                  kv l1     out
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Protocol

from memo_sim.program.layout.schedule import Kind, Pass
from memo_sim.program.layout.stage import Stage
from memo_sim.program.layout.swap_schedule import Visit, pass_visits
from memo_sim.program.pipeline.guest import HALVES, Guest
from memo_sim.program.pipeline.guest_home import Home
from memo_sim.program.pipeline.guest_message import Message
from memo_sim.program.pipeline.stage_p2p import Handed

_AHEAD = {False: ("again", "kept"), True: ("again",)}
"""What goes to guests ahead of a layer's backward; whether keys end there.

Nothing reads the first subsequence's keys behind its own backward, so their last send stands there.
"""


class Places(Protocol):
    """What places instances of a role, in the order in which it is asked to."""

    def begin(self, each: Pass) -> None:
        """Begin a pass: with what was received, gathered or copied."""

    def visit(self, visit: Visit, then: Callable[[], None] | None = None) -> None:
        """Place one layer's forward or backward, with the model's ends and the copies around it.

        ``then`` is called between the layer and the end of the model that follows it.
        """

    def hand_over(self, handed: Handed) -> None:
        """Place a hand-over between neighbours."""

    def at_home(self, template: str, layer: int, subsequence: int) -> None:
        """Place a template of ``Home`` at a layer (local number)."""

    def as_guest(self, guest: Guest, template: str, layer: int) -> None:
        """Place a template of ``Guest`` at a layer (local number)."""


class WaveOrder:
    """Places the passes of one stage."""

    def __init__(
        self,
        places: Places,
        stage: Stage,
        subsequences: int,
        *,
        homes: dict[int, Home],
        guests: list[Guest],
        ahead: bool,
    ) -> None:
        """``homes``: its tasks that others play rows of, by subsequence; ``guests``: what it plays of others' tasks.

        ``ahead``: whether receives stand a pass ahead, and sends behind the following pass (``handover.py``).
        """
        self.places, self.stage, self.count, self.homes, self.ahead = places, stage, subsequences, homes, ahead
        self.guests: dict[int, list[Guest]] = {}
        """By wave, in the order of their stages."""
        for guest in sorted(guests, key=lambda each: each.home.index):
            self.guests.setdefault(guest.task.subsequence + guest.home.index, []).append(guest)
        self._unsent: list[Handed] = []
        self._received: set[Pass] = set()
        self._layers = list(stage.chunk(0))

    def place(self) -> None:
        """Place all forwards, then all backwards in reverse."""
        waves = list(range(self.count + self.stage.stages - 1))
        steps = [(Kind.FORWARD, wave) for wave in waves] + [(Kind.BACKWARD, wave) for wave in reversed(waves)]
        for (kind, wave), (next_kind, next_wave) in zip(steps, [*steps[1:], (Kind.BACKWARD, -1)], strict=True):
            following = self._own(next_kind, next_wave)
            own = self._own(kind, wave)
            if own is None:
                self._send()
                self._guest_wave(kind, self.guests.get(wave, []), following)
            elif home := self.homes.get(own.subsequence):
                self._receive(own)
                (self._home_forward if kind is Kind.FORWARD else self._home_backward)(home, own, following)
                self._leave(own)
            else:
                self._whole(own, following)
        self._send()

    def _own(self, kind: Kind, wave: int) -> Pass | None:
        """Return the stage's own pass in a wave."""
        x = wave - self.stage.index
        return Pass(kind, 0, 0, x) if 0 <= x < self.count else None

    def _whole(self, own: Pass, following: Pass | None) -> None:
        self._receive(own)
        if self.ahead:
            self._receive(following)
        self.places.begin(own)
        for visit in pass_visits(own, self._layers):
            self.places.visit(visit)
        self._send()
        self._leave(own)

    def _receive(self, each: Pass | None) -> None:
        """Place the receive of a pass's input where that was not done ahead."""
        if each is None or each in self._received:
            return
        self._received.add(each)
        forward = each.kind is Kind.FORWARD
        if (self.stage.source(0) if forward else self.stage.target(0)) is not None:
            what, layer = ("x", self._layers[0]) if forward else ("grad", self._layers[-1])
            self.places.hand_over(Handed(f"stage.receive.{what}", 0, layer, each.subsequence))

    def _leave(self, each: Pass) -> None:
        """Note that a pass's output is to be sent; at once where nothing stands behind the following pass."""
        forward = each.kind is Kind.FORWARD
        if (self.stage.target(0) if forward else self.stage.source(0)) is not None:
            what, layer = ("x", self._layers[-1]) if forward else ("grad", self._layers[0])
            self._unsent.append(Handed(f"stage.send.{what}", 0, layer, each.subsequence))
        if not self.ahead:
            self._send()

    def _send(self) -> None:
        for handed in self._unsent:
            self.places.hand_over(handed)
        self._unsent.clear()

    def _home_forward(self, home: Home, own: Pass, following: Pass | None) -> None:
        first, last = self._layers[0], self._layers[-1]
        self.places.begin(own)
        for layer in self._layers:
            self._exchange(home, layer, "kv")
            visit = Visit(0, layer, False, own.subsequence)
            self.places.visit(visit, partial(self._complete, home, layer, "out", following) if layer == last else None)
            if layer == first:
                self._send()
                self._exchange(home, layer, "x")
                self._exchange(home, layer, "params", "before")
            if layer != last:
                self._exchange(home, layer + 1, "params", "before")

    def _home_backward(self, home: Home, own: Pass, following: Pass | None) -> None:
        first, last = self._layers[0], self._layers[-1]
        ends = own.subsequence == 0
        self.places.begin(own)
        for layer in reversed(self._layers):
            visit = Visit(0, layer, True, own.subsequence)
            then = partial(self._complete, home, layer, "grad_in", following) if layer == first else None
            self.places.visit(visit, then)
            if layer == last:
                self._send()
                self._exchange(home, layer, "grad")
                self._exchange(home, layer, *_AHEAD[ends])
            else:
                self._add(home, layer + 1)
            if ends:
                self._exchange(home, layer, "kept")
            if layer != first:
                self._exchange(home, layer - 1, *_AHEAD[ends])
            self._exchange(home, layer, "d_kv")
            self._exchange(home, layer, "d_kv.before", "grads")
        self._add(home, first)

    def _complete(self, home: Home, layer: int, what: str, following: Pass | None) -> None:
        """Take guests' rows of what a task hands on, behind the kernel that writes the stage's own; then look ahead."""
        self._exchange(home, layer, what)
        if self.ahead:
            self._receive(following)

    def _exchange(self, home: Home, layer: int, *whats: str) -> None:
        """Place a home's side of messages with all of its guests."""
        for link in home.links:
            for what in whats:
                if link.exists(what):
                    template = link.message(what).name(self.stage.index)
                    self.places.at_home(template, layer, home.task.subsequence)

    def _add(self, home: Home, layer: int) -> None:
        for link in home.links:
            self.places.at_home(f"bwd.add.{link.piece.stage}", layer, home.task.subsequence)

    def _guest_wave(self, kind: Kind, guests: list[Guest], following: Pass | None) -> None:
        if guests:
            (self._guest_forward if kind is Kind.FORWARD else self._guest_backward)(guests, following)

    def _guest_forward(self, guests: list[Guest], following: Pass | None) -> None:
        layers = range(guests[0].layers)
        self._each(guests, 0, "x")
        self._each(guests, 0, "params", "before")
        for layer in layers:
            last = layer == layers[-1]
            if not last:
                self._each(guests, layer + 1, "params", "before")
            for guest in guests:
                for earlier in guest.ahead:
                    self._message(guest, layer, earlier.keys_to(guest.piece))
            if last and self.ahead:
                self._receive(following)
            self._play(guests, layer, *(f"layer.fwd{'.out' if last else ''}.{half}" for half in HALVES))
            for guest in guests:
                for later in guest.behind:
                    self._message(guest, layer, guest.link.keys_to(later))
                self._each([guest], layer, "kv")
        self._each(guests, layers[-1], "out")

    def _guest_backward(self, guests: list[Guest], following: Pass | None) -> None:
        layers = range(guests[0].layers)
        late = [guest for guest in guests if guest.task.subsequence == 0]
        self._each(guests, layers[-1], "grad")
        self._needed(guests, layers[-1])
        for layer in reversed(layers):
            self._each(late, layer, "kept")
            if layer:
                self._needed(guests, layer - 1)
            for guest in guests:
                self._each([guest], layer, "d_kv")
                for later in reversed(guest.behind):
                    self._message(guest, layer, guest.link.gradients_from(later))
            if not layer and self.ahead:
                self._receive(following)
            self._play(guests, layer, "layer.bwd.zero", *(f"layer.bwd.{half}" for half in HALVES))
            for guest in guests:
                for earlier in guest.ahead:
                    self._message(guest, layer, earlier.gradients_from(guest.piece))
            if not layer:
                self._each(guests, layer, "grad_in")
            self._each(guests, layer, "d_kv.before", "grads")

    def _needed(self, guests: list[Guest], layer: int) -> None:
        """Place what guests take ahead of a layer's backward."""
        for guest in guests:
            self._each([guest], layer, *_AHEAD[guest.task.subsequence == 0])

    def _play(self, guests: list[Guest], layer: int, *templates: str) -> None:
        for template in templates:
            for guest in guests:
                self.places.as_guest(guest, template, layer)

    def _each(self, guests: list[Guest], layer: int, *whats: str) -> None:
        """Place the guests' sides of messages with their tasks' homes."""
        for guest in guests:
            for what in whats:
                if guest.link.exists(what):
                    self._message(guest, layer, guest.link.message(what))

    def _message(self, guest: Guest, layer: int, message: Message) -> None:
        self.places.as_guest(guest, message.name(self.stage.index), layer)
