"""P2p transfers between neighbouring pipeline stages: outputs to the next, input gradients to the previous.

A transfer is one instruction on each stage, with equal work: a send on the sender's lane of sends, and a receive on the
receiver's lane of receives. It starts when both lanes have reached it. Each lane runs in program order, so the position
of a transfer decides what it overlaps with:

    overlapped      a receive is placed one pass earlier than its pass, and a send one pass later than its pass
    not overlapped  a receive is placed right before its pass, and a send right after it: the stage waits for both

      overlapped, stage 0 of 1F1B      receive   [grad 0 .....]           [grad 1 ....]
                                       compute   F1      F2   B0          F3  B1
                                       send        [out 1]  [out 2]           [out 3]

Tensor-parallel ranks of an eager framework without sequence parallelism hold equal whole tensors. Each of them sends
only its part, and the receivers gather the whole (Megatron-LM's scatter and gather, Narayanan et al. 2021, 4.1).

A stage's input is received into the first layer's input buffer. Where that is a rounding buffer, other layers still use
it, so the input is received into a buffer of its own and copied. The same holds for a task whose first rows helpers
compute (``helper_stage.py``).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

from memo_sim.contract.plan import Decisions
from memo_sim.contract.units import DTYPE_BYTES
from memo_sim.program.ir.builder import Rows, TemplateBuilder, reads, writes
from memo_sim.program.ir.instruction import BufferClass, Families, Family, Lane
from memo_sim.program.ir.kinds import FamilyKind, Phase, TemplateKind
from memo_sim.program.ir.work import Collective, PointToPoint, Rowwise
from memo_sim.program.layout.schedule import Kind, Pass
from memo_sim.program.layout.shape import Shape
from memo_sim.program.layout.stage import Stage


@dataclass(frozen=True, slots=True)
class StageTransfer:
    """A template of this module, with the micro-batch, subsequence and layer (local number) to place it for."""

    template: str
    micro_batch: int
    layer: int
    subsequence: int


def transfer_bytes(decisions: Decisions, shape: Shape) -> int:
    """Return the bytes of one transfer between two stages."""
    return shape.shard_tokens * shape.hidden * DTYPE_BYTES[decisions.dtype] // _parts_of(decisions, shape)


def _parts_of(decisions: Decisions, shape: Shape) -> int:
    """Return the number of parts of a transferred tensor; each tensor-parallel rank sends one."""
    whole = decisions.memory_policy == "eager" and not shape.gathered
    return shape.tp if whole and shape.tokens % shape.tp == 0 else 1


@dataclass(frozen=True)
class StageP2P:
    """The p2p transfers of one stage: buffers and templates of one subsequence, and the order of all transfers."""

    decisions: Decisions
    shape: Shape
    stage: Stage
    micro_batches: int
    enters: bool
    """Whether received inputs are copied: a layer's input lies in a rounding buffer, or has only the owner's rows."""
    first: int = 0
    """Number of rows of an input that helpers compute; only the rows after them are copied."""

    @property
    def ahead(self) -> int:
        """Number of passes between a receive and its pass, and between a pass and its send."""
        return int(self.decisions.layout.overlap_p2p)

    def families(self) -> list[Family]:
        """Return the buffers of inputs and outputs, one for each micro-batch and chunk."""
        if self.stage.stages == 1:
            return []
        shape, count = self.shape, self.micro_batches * self.stage.chunks
        names = ["stage.x", "stage.out"] if self.enters else ["stage.out"]
        return [
            Family(
                name,
                BufferClass.PIPELINE,
                self.decisions.dtype,
                shape.shard_tokens,
                shape.hidden,
                count,
                kind=FamilyKind.STAGE_BOUNDARY,
            )
            for name in names
        ]

    def templates(self, families: Families) -> list[TemplateBuilder]:
        """Return one template for each kind of transfer, and the copy of an input into the first layer's buffer."""
        if self.stage.stages == 1:
            return []
        before, after = (self.stage.index - 1) % self.stage.stages, (self.stage.index + 1) % self.stage.stages
        incoming = ("stage.x", "stage.x") if self.enters else ("skeletal.x", "x")
        found = [
            self._transfer("recv.x", families[incoming[0]], incoming[1], before),
            self._transfer("send.x", families["stage.out"], "stage.out", after),
            self._transfer("recv.grad", families["grad.x"], "grad_out", after),
            self._transfer("send.grad", families["grad.x"], "grad_in", before),
        ]
        if self._parts > 1:
            found.append(self._gather("gather.x", families[incoming[0]], incoming[1]))
            found.append(self._gather("gather.grad", families["grad.x"], "grad_out"))
        return [*found, self._enter(families)] if self.enters else found

    def _transfer(self, name: str, family: Family, slot: str, peer: int) -> TemplateBuilder:
        builder = TemplateBuilder(f"stage.{name}", Phase.P2P, TemplateKind.TRANSFER)
        builder.bind(family, slot=slot)
        me, parts = self.stage.index, self._parts
        part = Rows(slot, 0, family.tokens // parts)
        size = family.bytes // parts
        if name.startswith("send"):
            builder.emit(name, "send", Lane.SEND, PointToPoint(size, me, peer), send=reads(part))
            return builder
        builder.emit(name, "recv", Lane.RECV, PointToPoint(size, peer, me), recv=writes(part))
        return builder

    def _gather(self, name: str, family: Family, slot: str) -> TemplateBuilder:
        builder = TemplateBuilder(f"stage.{name}", Phase.P2P, TemplateKind.TRANSFER)
        builder.bind(family, slot=slot)
        part = Rows(slot, 0, family.tokens // self._parts)
        others = Rows(slot, part.tokens, family.tokens - part.tokens)
        work = Collective("all_gather", family.bytes, self._parts, "tp")
        builder.emit(name, "all_gather", Lane.TP, work, shard=reads(part), others=writes(others))
        return builder

    @property
    def _parts(self) -> int:
        return _parts_of(self.decisions, self.shape)

    def _enter(self, families: Families) -> TemplateBuilder:
        builder = TemplateBuilder("stage.enter", Phase.P2P, TemplateKind.TRANSFER)
        rows = self.shape.shard_tokens - self.first
        source = builder.bind(families["stage.x"], slot="stage.x", first=self.first)
        target = builder.bind(families["skeletal.x"], slot="x", tokens=rows)
        size = rows * self.shape.hidden * DTYPE_BYTES[self.decisions.dtype]
        builder.emit(
            "enter",
            "copy",
            Lane.COMPUTE,
            Rowwise("copy", rows, size, size),
            source=reads(builder.all(source)),
            target=writes(builder.all(target)),
        )
        return builder

    def behind(self, passes: list[Pass], number: int) -> list[tuple[Literal["received", "sent"], Pass]]:
        """Return whose transfers come after a pass (-1: before the first).

        What other passes receive comes first, and never waits for what passes send.
        """
        ahead, count = self.ahead, len(passes)
        wanted = passes[0 if number < 0 else number + 1 + ahead : number + 2 + ahead]
        made = passes[max(0, number - ahead) : count if number == count - 1 else max(0, number - ahead + 1)]
        return [("received", each) for each in wanted] + [("sent", each) for each in made]

    def transfers(self, side: Literal["received", "sent"], each: Pass) -> Iterator[StageTransfer]:
        """Yield what a pass receives or sends; what depends on no micro-batch is the same for all of them."""
        return self._received(each) if side == "received" else self._sent(each)

    def entered(self, each: Pass) -> Iterator[StageTransfer]:
        """Yield what a pass begins with: the gather of a received tensor, and its copy into the first layer's buffer.

        They are not placed right after the receive, which may be a pass earlier: the collective lane would wait there.
        """
        layers = self.stage.chunk(each.chunk)
        forward = each.kind is Kind.FORWARD and self.stage.source(each.chunk) is not None
        if self._parts > 1 and forward:
            yield StageTransfer("stage.gather.x", each.micro_batch, layers[0], each.subsequence)
        if self._parts > 1 and each.kind is Kind.BACKWARD and self.stage.target(each.chunk) is not None:
            yield StageTransfer("stage.gather.grad", each.micro_batch, layers[-1], each.subsequence)
        if self.enters and forward:
            yield StageTransfer("stage.enter", each.micro_batch, layers[0], each.subsequence)

    def _received(self, each: Pass) -> Iterator[StageTransfer]:
        layers = self.stage.chunk(each.chunk)
        if each.kind is Kind.FORWARD and self.stage.source(each.chunk) is not None:
            yield StageTransfer("stage.recv.x", each.micro_batch, layers[0], each.subsequence)
        if each.kind is Kind.BACKWARD and self.stage.target(each.chunk) is not None:
            yield StageTransfer("stage.recv.grad", each.micro_batch, layers[-1], each.subsequence)

    def _sent(self, each: Pass) -> Iterator[StageTransfer]:
        layers = self.stage.chunk(each.chunk)
        if each.kind is Kind.FORWARD and self.stage.target(each.chunk) is not None:
            yield StageTransfer("stage.send.x", each.micro_batch, layers[-1], each.subsequence)
        if each.kind is Kind.BACKWARD and self.stage.source(each.chunk) is not None:
            yield StageTransfer("stage.send.grad", each.micro_batch, layers[0], each.subsequence)
