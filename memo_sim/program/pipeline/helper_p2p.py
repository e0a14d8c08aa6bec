"""Messages between the stages that share a task: the owner stage, and the helper stages that compute its first rows.

Each message is one p2p transfer, and both of its stages have a template for it (``helper_stage.py``,
``owner_stage.py``). There is one message for each layer; "once" marks those that are sent once for all layers:

    forward    x (once)       owner -> helper    the helper's rows of the stage's input
               params         owner -> helper    the layer's parameters
               before         owner -> helper    keys and values of the earlier subsequences
               kv             helper -> later    the helper's keys and values: to the owner, and to later helpers
               out (once)     helper -> owner    the helper's rows of the stage's output
    backward   grad (once)    owner -> helper    the helper's rows of the output's gradient
               again, kept    owner -> helper    parameters, and all keys and values up to the helper's last row
               d_kv           later -> helper    gradients of the helper's keys and values, from all later rows
               d_kv.before    helper -> owner    gradients of the keys and values of the earlier subsequences
               grads          helper -> owner    gradients of the layer's parameters
               grad_in (once) helper -> owner    the helper's rows of the input's gradient

Of a micro-batch of several sequences, a helper has rows of some of them, and keys and values of these sequences alone
are sent to it. They lie apart in the KV cache, one range for each earlier subsequence, and each range is a message of
its own (``before.0``, ``before.1``). Later rows of another sequence attend to none of the helper's.
"""

from __future__ import annotations

from dataclasses import dataclass

from memo_sim.contract.plan import Decisions
from memo_sim.program.ir.builder import Rows, TemplateBuilder, reads, writes
from memo_sim.program.ir.instruction import Family, Lane
from memo_sim.program.ir.kinds import BlockKind, Phase, TemplateKind
from memo_sim.program.ir.work import PointToPoint
from memo_sim.program.layout.multiplex import Portion, Task
from memo_sim.program.layout.sequence_rows import Range, earlier_ranges, first_seen, side_by_side
from memo_sim.program.layout.shape import Shape

FORWARD, BACKWARD = Phase.FORWARD, Phase.BACKWARD
TO_HELPER = {"x": FORWARD, "params": FORWARD, "before": FORWARD, "grad": BACKWARD, "again": BACKWARD, "kept": BACKWARD}
TO_HELPER |= {"d_kv": BACKWARD}
TO_OWNER = {"kv": FORWARD, "out": FORWARD, "d_kv.before": BACKWARD, "grads": BACKWARD, "grad_in": BACKWARD}


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

    decisions: Decisions
    shape: Shape
    task: Task
    portion: Portion

    @property
    def before(self) -> tuple[Range, ...]:
        """Rows of the KV cache that the portion attends to, of earlier subsequences."""
        return earlier_ranges(self.decisions, *self.own)

    @property
    def own(self) -> Range:
        """Rows of the KV cache that belong to the portion."""
        return self.rows_of(self.portion)

    @property
    def known(self) -> tuple[Range, ...]:
        """Rows of the KV cache that the portion attends to, its own included."""
        first = first_seen(self.decisions, self.own[0])
        return side_by_side([*self.before, (first, sum(self.own) - first)])

    @property
    def summed(self) -> Range:
        """The portion's rows of which the owner has sums of gradients: all that later subsequences attend to.

        Of the last subsequence they are those that the owner's own rows attend to.
        """
        last = self.shape.start + self.shape.tokens == self.shape.kv_cache_tokens
        return self.seen_by(self.task.own) if last else self.own

    def seen_by(self, later: Portion) -> Range:
        """Return the portion's rows that later rows of the subsequence attend to: those of the same sequence."""
        first = max(self.own[0], first_seen(self.decisions, self.rows_of(later)[0]))
        return first, max(0, sum(self.own) - first)

    def rows_of(self, portion: Portion) -> Range:
        """Return a portion's rows of the KV cache."""
        degree = self.shape.ulysses
        return degree * (self.shape.start + portion.first), degree * portion.tokens

    @property
    def shard(self) -> Range:
        """The portion's rows of tensors between layers, which sequence parallelism divides."""
        return self.shape.shard(self.portion.first), self.shape.shard(self.portion.tokens)

    def messages(self, what: str) -> list[tuple[Message, Range | None]]:
        """Return the messages of one kind between the helper and the task's owner, with their rows of the KV cache.

        None for the rows of other tensors. The first subsequence has no earlier keys and values.
        """
        helper, owner = self.portion.stage, self.task.stage
        to_helper = what in TO_HELPER
        phase, ends = (TO_HELPER if to_helper else TO_OWNER)[what], (owner, helper) if to_helper else (helper, owner)
        ranges = self._rows_of(what)
        if ranges is None:
            return [(Message(what, phase, *ends), None)]
        if len(ranges) == 1:
            return [(Message(what, phase, *ends), ranges[0])]
        return [(Message(f"{what}.{n}", phase, *ends), rows) for n, rows in enumerate(ranges)]

    def _rows_of(self, what: str) -> tuple[Range, ...] | None:
        match what:
            case "before" | "d_kv.before":
                return self.before
            case "kept":
                return self.known
            case "kv":
                return (self.own,)
            case "d_kv":
                return (self.summed,) if self.summed[1] else ()
            case _:
                return None

    def keys_to(self, later: Portion) -> Message:
        """Return the message with the portion's keys and values to the helper of later rows."""
        return Message("kv", FORWARD, self.portion.stage, later.stage)

    def gradients_from(self, later: Portion) -> Message:
        """Return the message with the gradients of these keys and values, from the helper of later rows."""
        return Message("d_kv", BACKWARD, later.stage, self.portion.stage)
