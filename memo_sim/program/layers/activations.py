"""What happens to skeletal tensors between forward and backward: keep, full recompute, swap, token-wise.

Each policy is a choice of families for the skeletal slots of the forward and backward templates, plus copies:

    keep        one buffer per micro-batch and layer, from forward to backward
    full        only the layer input is kept; backward rebuilds the rest in buffers of its own. Swapped inputs lie in
                the two rounding buffers, one of them read while the other comes back for the next layer's backward
    selective   all but what attention alone makes (``selective.py``)
    rounding    two buffers that layers take in turn; a layer whose buffer is overwritten is offloaded to host
                buffers after its forward and prefetched before its backward. Of the tokens that are not swapped,
                tokenwise rebuilds the rows in backward, none and full keep a copy of them on the device.
    window      SPPO's (5.2): buffers of every layer's own, as in keep, until they have left; others when they are back.
                With A_i the activations of subsequence i, of which alpha_i is swapped, one pass computes i while i - 1
                leaves: M_i = M_(i-1) + A_i - alpha_(i-1) A_(i-1)

Subsequences (``subsequence.py``) have buffers as long as they are, and swap as many tokens as their own share says;
they take the same two rounding buffers in turn, which have room for the longest.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

from memo_sim.contract.plan import Decisions
from memo_sim.program.attention import attention
from memo_sim.program.attention import chunked as chunked_attention
from memo_sim.program.ir.builder import Rows, TemplateBuilder, reads, writes
from memo_sim.program.ir.instruction import BufferClass, Family, Lane, Mode, Template
from memo_sim.program.ir.kinds import BlockKind, FamilyKind, Phase, TemplateKind
from memo_sim.program.ir.work import Copy, Rowwise
from memo_sim.program.layers import mlp, selective
from memo_sim.program.layers.kinds import skeletal_of
from memo_sim.program.layout.shape import Shape
from memo_sim.program.layout.skeletal import Fate, Skeletal
from memo_sim.program.layout.stage import Stage
from memo_sim.program.layout.subsequence import Subsequence
from memo_sim.program.layout.swap_schedule import ROUNDING_BUFFERS


@dataclass(frozen=True)
class Activations:
    """The activation policy of one program, for one subsequence of its micro-batches."""

    decisions: Decisions
    shape: Shape
    micro_batches: int
    stage: Stage
    subsequence: Subsequence | None = None
    """Which one; without, the whole micro-batch."""

    @property
    def swapped(self) -> int:
        """Tokens whose skeletal tensors are swapped."""
        return self.subsequence.swapped if self.subsequence else self.decisions.swapped_tokens

    @cached_property
    def tensors(self) -> tuple[Skeletal, ...]:
        """The layer's skeletal tensors."""
        return self._tensors(self.shape)

    def _tensors(self, shape: Shape) -> tuple[Skeletal, ...]:
        scores = attention.kept_scores(self.decisions, shape.attention)
        return skeletal_of(self.decisions, shape, scores=scores)

    @property
    def moved(self) -> bool:
        """Whether skeletal tensors are copied out of the buffers that forward writes."""
        return self.decisions.recompute == "tokenwise" or self.decisions.swapped_tokens > 0

    @property
    def rounding(self) -> bool:
        """Whether skeletal tensors live in rounding buffers."""
        return self.moved and not self.decisions.offload_window

    @property
    def windowed(self) -> bool:
        """Whether they live in buffers of their own, which leave some passes later."""
        return self.moved and self.decisions.offload_window > 0

    @cached_property
    def swaps_rows(self) -> bool:
        """Whether any row of this subsequence goes to the host."""
        return self.moved and any(self.swapped_rows(t) for t in self.shared)

    @property
    def copied_out(self) -> bool:
        """Whether what forward writes is copied elsewhere, to the host or aside."""
        return self.rounding or (self.windowed and self.swaps_rows)

    @property
    def kept_per_layer(self) -> int:
        """Buffers that a per-layer family has."""
        return self.micro_batches * len(self.stage.layers)

    @property
    def recomputed(self) -> tuple[int, int] | None:
        """Row block that backward of a swapped layer rebuilds, or None."""
        first, total = self.swapped, self.shape.tokens
        return (first, total - first) if self.decisions.recompute == "tokenwise" and first < total else None

    @property
    def row_blocks(self) -> list[tuple[int, int]]:
        """Row blocks of the forward: they end where recompute begins (``token_order.py``)."""
        first = self.swapped if self.recomputed else 0
        return [rows for rows in ((0, first), (first, self.shape.tokens - first)) if rows[1]]

    @property
    def kept_rows(self) -> bool:
        """Whether rows that are not swapped are copied aside on the device."""
        partly = self.swapped < self.shape.tokens
        return self.copied_out and self.decisions.recompute in ("none", "full") and partly

    @property
    def resident_differs(self) -> bool:
        """Whether the backward of a layer that was not swapped is another: its rows need no rebuilding."""
        return self.windowed or (self.rounding and self.decisions.recompute != "full")

    def swapped_rows(self, tensor: Skeletal) -> int:
        """Return how many rows of ``tensor`` travel to the host."""
        if tensor.fate is Fate.WHOLE and self.decisions.recompute == "tokenwise":
            return tensor.tokens
        return tensor.tokens * self.swapped // self.shape.tokens

    def kept(self, tensor: Skeletal) -> int:
        """Return how many rows of ``tensor`` are copied aside on the device."""
        return tensor.tokens - self.swapped_rows(tensor) if self.kept_rows else 0

    def shared_families(self) -> list[Family]:
        """Return the rounding buffers, which all subsequences take in turn."""
        room, kind = self.subsequence.room if self.subsequence else self.shape, BufferClass.SKELETAL
        if not self.rounding:
            return []
        return [
            Family(
                f"skeletal.{t.name}",
                kind,
                t.dtype,
                t.tokens,
                t.features,
                ROUNDING_BUFFERS,
                "device",
                "step",
                kind=FamilyKind.SKELETAL,
            )
            for t in self._tensors(room)
            if self._shared(t)
        ]

    def families(self) -> list[Family]:
        """Return the buffers that every layer has to itself: skeletal tensors, or what is copied out of buffers."""
        kind, count, found = BufferClass.SKELETAL, self.kept_per_layer, []
        each_layer = FamilyKind.PER_LAYER
        for t in self.shared:
            if not self.rounding:
                times = 1 + self.windowed  # those that come back are others than those that have left
                name, rows = f"skeletal.{t.name}", t.tokens
                found.append(Family(name, kind, t.dtype, rows, t.features, times * count, kind=FamilyKind.SKELETAL))
            if not self.copied_out:
                continue
            if rows := self.swapped_rows(t):
                found.append(Family(f"host.{t.name}", kind, t.dtype, rows, t.features, count, "host", kind=each_layer))
            if rows := self.kept(t):
                found.append(Family(f"aside.{t.name}", kind, t.dtype, rows, t.features, count, kind=each_layer))
        return found

    @cached_property
    def shared(self) -> tuple[Skeletal, ...]:
        """The tensors that outlive a forward or a backward: those that can be swapped."""
        return tuple(t for t in self.tensors if self._shared(t))

    def _shared(self, tensor: Skeletal) -> bool:
        """Full recompute shares the layer input only; other tensors that are rebuilt belong to each instance."""
        if self.decisions.recompute == "selective":
            return tensor.name not in selective.rebuilt(self.shape)
        return self.decisions.recompute != "full" or tensor.name == "x"

    def bind(self, builder: TemplateBuilder, families: dict[str, Family]) -> None:
        """Add a slot for every skeletal tensor to a forward or backward template that does not have it yet."""
        for t in self.tensors:
            if self._shared(t):
                builder.bind(families[f"skeletal.{t.name}"], slot=t.name, tokens=t.tokens)
            elif not builder.has(t.name):
                rows = min(of.rows_at_once(t, self.decisions, self.shape) for of in (mlp, chunked_attention))
                if rows:
                    builder.own(t.name, BufferClass.SKELETAL, t.dtype, rows, t.features)

    def offload(self, families: dict[str, Family]) -> TemplateBuilder:
        """Return the copies of one layer to the host, in the order forward wrote the tensors."""
        builder = TemplateBuilder("layer.offload", Phase.OFFLOAD, TemplateKind.OFFLOAD, BlockKind.LAYER)
        for t in self.shared:
            self._transfer(builder, families, t, Lane.D2H)
        return builder

    def prefetch(self, families: dict[str, Family], backward: Template) -> TemplateBuilder:
        """Return the copies of one layer back to the device, in the order ``backward`` reads the tensors."""
        first_use: dict[str, int] = {}
        rows = {families[f"skeletal.{t.name}"].name: self.swapped_rows(t) for t in self.shared}
        for i, instruction in enumerate(backward.instructions):
            for operand in instruction.operands:
                family = backward.slots[operand.slot]
                # What recompute writes and reads again are other rows than those that come from the host.
                if operand.mode & Mode.READ and operand.first < rows.get(family, 0):
                    first_use.setdefault(family, i)
        builder = TemplateBuilder("layer.prefetch", Phase.PREFETCH, TemplateKind.PREFETCH, BlockKind.LAYER)
        never = len(backward.instructions)
        for t in sorted(self.shared, key=lambda t: first_use.get(families[f"skeletal.{t.name}"].name, never)):
            self._transfer(builder, families, t, Lane.H2D)
        return builder

    def _transfer(self, builder: TemplateBuilder, families: dict[str, Family], t: Skeletal, lane: Lane) -> None:
        slot = builder.bind(families[f"skeletal.{t.name}"], slot=t.name, tokens=t.tokens)
        moves = [self._copy_swapped, self._copy_kept]
        # A buffer that dies here must not do so with a kernel beside which the copy to the host still reads it; one
        # that is born here is born with a kernel, which need not wait for the copy that fills the other rows.
        for move in reversed(moves) if self.windowed else moves:
            move(builder, families, t, slot, out=lane is Lane.D2H)

    def _copy_swapped(
        self, builder: TemplateBuilder, families: dict[str, Family], t: Skeletal, slot: str, *, out: bool
    ) -> None:
        """Write the copy of the swapped rows to the host, or back."""
        if not (rows := self.swapped_rows(t)):
            return
        host = builder.bind(families[f"host.{t.name}"], slot=f"host.{t.name}")
        device_rows, host_rows = Rows(slot, 0, rows), Rows(host, 0, rows)
        builder.emit(
            t.name,
            "d2h" if out else "h2d",
            Lane.D2H if out else Lane.H2D,
            Copy(families[f"host.{t.name}"].bytes, "d2h" if out else "h2d"),
            source=reads(device_rows if out else host_rows),
            target=writes(host_rows if out else device_rows),
        )

    def _copy_kept(
        self, builder: TemplateBuilder, families: dict[str, Family], t: Skeletal, slot: str, *, out: bool
    ) -> None:
        """Write the copy of the rows that stay on the device out of the buffer, or back."""
        if not (rows := self.kept(t)):
            return
        aside = builder.bind(families[f"aside.{t.name}"], slot=f"aside.{t.name}")
        size = families[f"aside.{t.name}"].bytes
        device_rows, aside_rows = Rows(slot, t.tokens - rows, rows), builder.all(aside)
        builder.emit(
            f"{t.name}.aside",
            "copy",
            Lane.COMPUTE,
            Rowwise("copy", rows, size, size),
            source=reads(device_rows if out else aside_rows),
            target=writes(aside_rows if out else device_rows),
        )
