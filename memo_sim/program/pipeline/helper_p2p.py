"""What a task's stages hand to each other while guests play its first rows: one message each, written on both sides.

By layer, unless said otherwise (rows of the subsequence; ``helper_stage.py``, ``owner_stage.py``):

    forward    x (once)      home -> guest       its rows of the stage's input
               params        home -> guest       the layer's parameters
               before        home -> guest       keys and values of the subsequences before
               kv            guest -> behind     its own keys and values: to later guests, and home
               out (once)    guest -> home       its rows of the stage's output
    backward   grad (once)   home -> guest       its rows of the output's gradient
               again, kept   home -> guest       parameters, and all keys and values up to its last row
               d_kv          behind -> guest     gradients of its keys and values from all who attend to them
               d_kv.before   guest -> home       gradients of the keys and values of the subsequences before
               grads         guest -> home       gradients of the layer's parameters
               grad_in (once) guest -> home      its rows of the input's gradient
"""

from __future__ import annotations

from dataclasses import dataclass

from memo_sim.program.ir.builder import Rows, TemplateBuilder, reads, writes
from memo_sim.program.ir.instruction import Family, Lane
from memo_sim.program.ir.kinds import BlockKind, Phase, TemplateKind
from memo_sim.program.ir.work import PointToPoint
from memo_sim.program.layout.multiplex import Portion, Task
from memo_sim.program.layout.shape import Shape

FORWARD, BACKWARD = Phase.FORWARD, Phase.BACKWARD
TO_HELPER = {"x": FORWARD, "params": FORWARD, "before": FORWARD, "grad": BACKWARD, "again": BACKWARD, "kept": BACKWARD}
TO_HELPER |= {"d_kv": BACKWARD}
TO_OWNER = {"kv": FORWARD, "out": FORWARD, "d_kv.before": BACKWARD, "grads": BACKWARD, "grad_in": BACKWARD}

Range = tuple[int, int]
"""First row and how many."""


@dataclass(frozen=True, slots=True)
class Message:
    """One kind of hand-over between two stages."""

    what: str
    way: Phase
    source: int
    target: int

    def name(self, stage: int) -> str:
        """Return the name of the template that plays the side of ``stage``."""
        return f"{self.way}.{'send' if stage == self.source else 'recv'}.{self.what}.{self.source}-{self.target}"

    def side(self, stage: int, family: Family, slot: str, rows: Range | None = None) -> TemplateBuilder:
        """Return the side of ``stage``, which hands over or takes ``rows`` of a buffer, all of them if not said."""
        name = self.name(stage)
        kind = TemplateKind.HELPER_BACKWARD if self.way is BACKWARD else TemplateKind.HELPER_FORWARD
        builder = TemplateBuilder(name, Phase.HELPER, kind, BlockKind.LAYER)
        builder.bind(family, slot=slot)
        chosen = Rows(slot, *rows) if rows else builder.all(slot)
        work = PointToPoint(chosen.tokens * family.row_bytes, self.source, self.target)
        if stage == self.source:
            builder.emit(name, "send", Lane.SEND, work, send=reads(chosen))
        else:
            builder.emit(name, "recv", Lane.RECV, work, recv=writes(chosen))
        return builder


@dataclass(frozen=True, slots=True)
class Link:
    """What goes between one piece's guest and the others of its task; ``shape`` is the whole subsequence's."""

    shape: Shape
    task: Task
    portion: Portion

    @property
    def before(self) -> Range:
        """Rows of the carried keys that earlier subsequences have."""
        return 0, self.shape.start

    @property
    def own(self) -> Range:
        """Its own rows of them."""
        return self.shape.start + self.portion.first, self.portion.tokens

    @property
    def known(self) -> Range:
        """All rows up to its last."""
        return 0, sum(self.own)

    @property
    def shard(self) -> Range:
        """Its rows of what lies between layers."""
        return self.shape.shard(self.portion.first), self.shape.shard(self.portion.tokens)

    def message(self, what: str) -> Message:
        """Return what goes between the guest and the task's home."""
        helper, owner = self.portion.stage, self.task.stage
        if what in TO_HELPER:
            return Message(what, TO_HELPER[what], owner, helper)
        return Message(what, TO_OWNER[what], helper, owner)

    def exists(self, what: str) -> bool:
        """Whether there is anything to hand over: the first subsequence has none before it."""
        return self.shape.start > 0 or what not in ("before", "d_kv.before")

    def keys_to(self, later: Portion) -> Message:
        """Return the message of its keys and values to a guest of later rows."""
        return Message("kv", FORWARD, self.portion.stage, later.stage)

    def gradients_from(self, later: Portion) -> Message:
        """Return the message of their gradients back from there."""
        return Message("d_kv", BACKWARD, later.stage, self.portion.stage)
