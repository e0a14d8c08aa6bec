"""Messages between the stages that share a task: the owner stage, and the helper stages that compute its first rows.

Each message is one p2p transfer, and both of its stages have a template for it (``helper_stage.py``,
``owner_stage.py``). There is one message for each layer; "once" marks those that are sent once for all layers:

    forward    x (once)       owner -> helper    the helper's rows of the stage's input
               params         owner -> helper    the layer's parameters
               before         owner -> helper    keys and values of the earlier subsequences
               kv             helper -> later    the helper's keys and values: to later helpers and the owner
               out (once)     helper -> owner    the helper's rows of the stage's output
    backward   grad (once)    owner -> helper    the helper's rows of the output's gradient
               again, kept    owner -> helper    parameters, and all keys and values up to the helper's last row
               d_kv           later -> helper    gradients of the helper's keys and values, from all later rows
               d_kv.before    helper -> owner    gradients of the keys and values of the earlier subsequences
               grads          helper -> owner    gradients of the layer's parameters
               grad_in (once) helper -> owner    the helper's rows of the input's gradient
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
"""First row, and number of rows."""


@dataclass(frozen=True, slots=True)
class Message:
    """One kind of p2p transfer between a helper stage and another stage of its task."""

    what: str
    phase: Phase
    source: int
    target: int

    def name(self, stage: int) -> str:
        """Return the name of the template in which ``stage`` sends or receives the message."""
        return f"{self.phase}.{'send' if stage == self.source else 'recv'}.{self.what}.{self.source}-{self.target}"

    def side(self, stage: int, family: Family, slot: str, rows: Range | None = None) -> TemplateBuilder:
        """Return the template in which ``stage`` sends or receives ``rows`` of a buffer; by default all rows."""
        name = self.name(stage)
        kind = TemplateKind.HELPER_BACKWARD if self.phase is BACKWARD else TemplateKind.HELPER_FORWARD
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
    """Messages between the helper of one portion and the other stages of its task.

    ``shape`` has the sizes of the whole subsequence.
    """

    shape: Shape
    task: Task
    portion: Portion

    @property
    def before(self) -> Range:
        """Rows of the KV cache that belong to earlier subsequences."""
        return 0, self.shape.start

    @property
    def own(self) -> Range:
        """Rows of the KV cache that belong to the portion."""
        return self.shape.start + self.portion.first, self.portion.tokens

    @property
    def known(self) -> Range:
        """Rows of the KV cache up to the portion's last."""
        return 0, sum(self.own)

    @property
    def shard(self) -> Range:
        """The portion's rows of tensors between layers, which sequence parallelism divides."""
        return self.shape.shard(self.portion.first), self.shape.shard(self.portion.tokens)

    def message(self, what: str) -> Message:
        """Return a message between the helper and the task's owner."""
        helper, owner = self.portion.stage, self.task.stage
        if what in TO_HELPER:
            return Message(what, TO_HELPER[what], owner, helper)
        return Message(what, TO_OWNER[what], helper, owner)

    def exists(self, what: str) -> bool:
        """Whether a message exists: the first subsequence has no earlier keys and values."""
        return self.shape.start > 0 or what not in ("before", "d_kv.before")

    def keys_to(self, later: Portion) -> Message:
        """Return the message with the portion's keys and values to the helper of later rows."""
        return Message("kv", FORWARD, self.portion.stage, later.stage)

    def gradients_from(self, later: Portion) -> Message:
        """Return the message with the gradients of these keys and values, from the helper of later rows."""
        return Message("d_kv", BACKWARD, later.stage, self.portion.stage)
