"""Activation policies: whether skeletal tensors are kept, recomputed or swapped between forward and backward.

Each policy chooses the families of the skeletal slots in the forward and backward templates, and adds copies:

    keep        one buffer for each micro-batch and layer, from forward to backward
    full        Only the layer input is kept. Backward recomputes the rest into buffers of its own. Swapped inputs use
                the two rounding buffers: one is read while the next layer's input is prefetched into the other. With
                ``rounding_buffers`` all skeletal tensors lie in those two, and inputs are copied out of them.
    selective   keeps everything except tensors that only attention makes (``selective.py``)
    norms, mlp  keeps everything except what single modules make (``module_recompute.py``)
    operators   keeps the outputs of every second product and of attention (``operator_recompute.py``)
    rowwise     Keeps the layer input, attention's output and the log-sum-exp; backward rebuilds the rest block by block
                (``rowwise.py``). Swapped as the inputs of full are.
    rounding    Layers alternate between two buffers (MEMO 4.1). A layer whose buffer is overwritten is offloaded to
                host buffers after its forward, and prefetched before its backward. Rows that are not swapped are
                recomputed in backward (tokenwise), or copied to other device buffers (none and full).
    window      SPPO 5.2: every layer has its own buffers, as in keep. They are freed once they are offloaded, and
                prefetch fills other ones. Activations of subsequence i are A_i, of which alpha_i is swapped. While
                subsequence i is computed, i - 1 is offloaded: M_i = M_(i-1) + A_i - alpha_(i-1) A_(i-1)

The buffers of a subsequence (``layout/subsequence.py``) have its length, and each subsequence swaps its own number of
tokens. All subsequences use the same two rounding buffers, which have room for the longest one.

Where layers differ, so do the sizes of their tensors. Layers of all kinds then share one region in each of the two
rounding buffers, as large as the tensors of the largest kind. A kind's tensors lie in it one after the other. The
layer's input is apart, because the layer before writes it, of whatever kind that is.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import cached_property

from msgspec.structs import replace

from memo_sim.contract.plan import Decisions
from memo_sim.contract.requests import ARENA_ALIGNMENT_BYTES
from memo_sim.program.attention import attention
from memo_sim.program.attention import chunked as chunked_attention
from memo_sim.program.ir.builder import Rows, TemplateBuilder, reads, writes
from memo_sim.program.ir.instruction import BufferClass, Families, Family, Lane, Mode, Template
from memo_sim.program.ir.kinds import BlockKind, FamilyKind, Phase, TemplateKind
from memo_sim.program.ir.work import Copy, Rowwise
from memo_sim.program.layers import frozen_products, mlp, module_recompute, operator_recompute, rowwise, selective
from memo_sim.program.layers.kinds import skeletal_of
from memo_sim.program.layout.rowwise_blocks import ROWWISE, is_rowwise
from memo_sim.program.layout.shape import Shape
from memo_sim.program.layout.skeletal import Fate, Skeletal
from memo_sim.program.layout.stage import Stage
from memo_sim.program.layout.stage_layers import LayersOfKind
from memo_sim.program.layout.subsequence import Subsequence
from memo_sim.program.layout.swap_format import PACKED, blocks, is_rounded, packed_features
from memo_sim.program.layout.swap_schedule import ROUNDING_BUFFERS
from memo_sim.program.operators.swap_rounding import Rounding

REGION = "skeletal.region"
"""The rounding buffers of layers that differ, without the layers' inputs."""
REBUILT_FROM_SHARED = ("full", ROWWISE)
"""Recompute modes whose backward rebuilds every layer from few tensors, those that can be swapped."""


@dataclass(frozen=True)
class Activations:
    """The activation policy of one program, for the layers of one kind and one subsequence of its micro-batches."""

    decisions: Decisions
    shape: Shape
    """Sizes in the layers of the kind."""
    micro_batches: int
    stage: Stage
    layers: LayersOfKind
    subsequence: Subsequence | None = None
    """The subsequence; None for the whole micro-batch."""

    @property
    def swapped(self) -> int:
        """Number of tokens whose skeletal tensors are swapped."""
        return self.subsequence.swapped if self.subsequence else self.decisions.swapped_tokens

    @cached_property
    def tensors(self) -> tuple[Skeletal, ...]:
        """The layer's skeletal tensors."""
        return self._tensors(self.shape)

    def _tensors(self, shape: Shape) -> tuple[Skeletal, ...]:
        scores = attention.kept_scores(self.decisions, shape.attention)
        whole = skeletal_of(self.decisions, shape, self.layers.shape, scores=scores)
        return (*whole, *operator_recompute.gate(self.decisions, shape))

    @property
    def moved(self) -> bool:
        """Whether skeletal tensors are copied out of the buffers that forward writes."""
        decisions = self.decisions
        return decisions.recompute == "tokenwise" or decisions.swapped_tokens > 0 or decisions.rounding_buffers

    @property
    def rounding(self) -> bool:
        """Whether skeletal tensors live in rounding buffers."""
        return self.moved and not self.decisions.offload_window

    @property
    def windowed(self) -> bool:
        """Whether each layer has its own buffers, which are offloaded within a window of passes (SPPO 5.2)."""
        return self.moved and self.decisions.offload_window > 0

    @cached_property
    def swaps_rows(self) -> bool:
        """Whether any row of this subsequence is swapped to the host."""
        return self.moved and any(self.swapped_rows(t) for t in self.shared)

    @property
    def copied_out(self) -> bool:
        """Whether the tensors that forward writes are copied to other buffers, on the host or on the device."""
        return self.rounding or (self.windowed and self.swaps_rows)

    @property
    def kept_per_layer(self) -> int:
        """Number of buffers of a family that every layer of the kind has."""
        return self.micro_batches * len(self.layers.layers)

    def _kind_of(self, tensor: Skeletal) -> int | None:
        """Return the kind whose layers a tensor's buffers belong to; layers of every kind have inputs alike."""
        return None if tensor.name == "x" else self.layers.number

    def _count(self, tensor: Skeletal) -> int:
        """Return the number of a tensor's buffers, one for each micro-batch and layer that has it."""
        return self.micro_batches * len(self.stage.layers) if tensor.name == "x" else self.kept_per_layer

    @property
    def recomputed(self) -> tuple[int, int] | None:
        """Row block (first row, rows) that backward of a swapped layer recomputes, or None."""
        first, total = self.swapped, self.shape.tokens
        return (first, total - first) if self.decisions.recompute == "tokenwise" and first < total else None

    @property
    def row_blocks(self) -> list[tuple[int, int]]:
        """Row blocks of the forward, cut at the first recomputed row (``layout/token_order.py``)."""
        first = self.swapped if self.recomputed else 0
        return [rows for rows in ((0, first), (first, self.shape.tokens - first)) if rows[1]]

    @property
    def kept_rows(self) -> bool:
        """Whether rows that are not swapped are copied to other device buffers."""
        partly = self.swapped < self.shape.tokens
        return self.copied_out and self.decisions.recompute in ("none", *REBUILT_FROM_SHARED) and partly

    @property
    def resident_differs(self) -> bool:
        """Whether layers that are not swapped have a backward of their own, which recomputes no rows."""
        return self.windowed or (self.rounding and self.decisions.recompute not in REBUILT_FROM_SHARED)

    def swapped_rows(self, tensor: Skeletal) -> int:
        """Return how many rows of ``tensor`` are swapped to the host."""
        if tensor.for_recompute and self.recomputed is None:
            return 0
        if tensor.fate is Fate.WHOLE and self.decisions.recompute == "tokenwise":
            return tensor.tokens
        return tensor.tokens * self.swapped // self.shape.tokens

    def rounded(self) -> list[tuple[int, int]]:
        """Return (rows, features) of what is swapped in FP8."""
        if not self.moved:
            return []
        found = [(self.swapped_rows(t), t.features) for t in self.shared if is_rounded(self.decisions, t)]
        return [(rows, features) for rows, features in found if rows]

    def kept(self, tensor: Skeletal) -> int:
        """Return how many rows of ``tensor`` are copied to another device buffer."""
        return tensor.tokens - self.swapped_rows(tensor) if self.kept_rows else 0

    def shared_families(self) -> list[Family]:
        """Return the rounding buffers, which all subsequences share."""
        room, kind = self.subsequence.room if self.subsequence else self.shape, BufferClass.SKELETAL
        room = room.of_layer(self.layers.shape)
        if not self.rounding:
            return []
        found = [
            Family(
                f"skeletal.{t.name}",
                kind,
                t.dtype,
                rows,
                t.features,
                ROUNDING_BUFFERS,
                "device",
                "step",
                kind=FamilyKind.SKELETAL,
                layer_kind=self._kind_of(t),
            )
            for t in self._tensors(room)
            if self._bound(t) and (rows := self._rows_at_once(t, room, backward=True))
        ]
        return found if self.layers.number is None else list(_in_region(found))

    def families(self) -> list[Family]:
        """Return the buffers that every layer has: its skeletal tensors, or the copies of them."""
        kind, found = BufferClass.SKELETAL, []
        each_layer = FamilyKind.PER_LAYER
        for t in self.shared:
            count, of = self._count(t), self._kind_of(t)
            if not self.rounding:
                times = 1 + self.windowed  # prefetch fills other buffers than those that were offloaded
                name, rows = f"skeletal.{t.name}", t.tokens
                found.append(
                    Family(
                        *(name, kind, t.dtype, rows, t.features, times * count),
                        kind=FamilyKind.SKELETAL,
                        layer_kind=of,
                    )
                )
            if not self.copied_out:
                continue
            if rows := self.swapped_rows(t):
                size = (t.dtype, rows, t.features, count)
                if is_rounded(self.decisions, t):
                    size = (PACKED, rows, packed_features(t.features), count)
                host = Family(f"host.{t.name}", kind, *size, space="host", kind=each_layer, layer_kind=of)
                found.append(host)
            if rows := self.kept(t):
                size = (t.dtype, rows, t.features, count)
                found.append(Family(f"aside.{t.name}", kind, *size, kind=each_layer, layer_kind=of))
        return found

    @cached_property
    def shared(self) -> tuple[Skeletal, ...]:
        """The tensors that outlive a forward or a backward: those that can be swapped."""
        return tuple(t for t in self.tensors if self._shared(t))

    def _shared(self, tensor: Skeletal) -> bool:
        """Return whether a tensor outlives a forward or backward; recomputed tensors do not.

        Full recompute shares only the layer input.
        """
        if self._unread(tensor):
            return False
        if self.decisions.recompute == "selective":
            return tensor.name not in selective.rebuilt(self.shape)
        if self.decisions.recompute == "operators":
            return tensor.name not in operator_recompute.rebuilt(self.decisions.model, self.shape)
        if tensor.name in module_recompute.rebuilt(self.decisions):
            return False
        if is_rowwise(self.decisions):
            return tensor.name in rowwise.KEPT
        return self.decisions.recompute != "full" or tensor.name == "x"

    def _bound(self, tensor: Skeletal) -> bool:
        """Return whether a tensor has a buffer of the step; other tensors belong to each instance."""
        return self._shared(tensor) or self.decisions.rounding_buffers

    def _rows_at_once(self, tensor: Skeletal, shape: Shape, *, backward: bool) -> int:
        """Return the rows of a tensor that exist at once; 0 when chunks of it have other slots.

        ``backward``: in the template of a layer's backward.
        """
        if self._shared(tensor):
            return tensor.tokens
        block = tensor.tokens
        if not is_rowwise(self.decisions):
            block = mlp.rows_at_once(tensor, self.decisions, shape, backward=backward)
        elif not rowwise.is_whole(tensor, self.decisions, backward=backward):
            block = self._rows_of_a_block[tensor.name]
        block = min(block, chunked_attention.rows_at_once(tensor, self.decisions, shape))
        return block * rowwise.blocks_at_once(tensor, self.decisions, shape, backward=backward)

    @cached_property
    def _rows_of_a_block(self) -> dict[str, int]:
        """The rows of each skeletal tensor in a row block of row-wise recompute, by name."""
        return {t.name: t.tokens for t in self._tensors(rowwise.of_a_block(self.decisions, self.shape))}

    def bind(self, builder: TemplateBuilder, families: Families, enters: str = "skeletal.x") -> None:
        """Add a slot for every skeletal tensor to a forward or backward template that does not have it yet.

        ``enters``: the family of the layer's input.
        """
        for t in self.tensors:
            rows = self._rows_at_once(t, self.shape, backward=builder.kind is not TemplateKind.FORWARD)
            if self._shared(t) or (self._bound(t) and rows and not builder.has(t.name)):
                family = enters if t.name == "x" else f"skeletal.{t.name}"
                builder.bind(families[family], slot=t.name, tokens=rows)
            elif rows and not builder.has(t.name) and self._made(t, builder.kind):
                builder.own(t.name, BufferClass.SKELETAL, t.dtype, rows, t.features)

    def _unread(self, tensor: Skeletal) -> bool:
        """Return whether backward does not read a tensor."""
        return tensor.name in frozen_products.unread(self.decisions, experts=self.shape.experts is not None)

    def _made(self, tensor: Skeletal, kind: TemplateKind) -> bool:
        """Return whether a template writes a tensor that it does not share: backward, only what it recomputes."""
        again = self.decisions.recompute in REBUILT_FROM_SHARED or tensor.name in module_recompute.rebuilt(
            self.decisions
        )
        if kind in (TemplateKind.FORWARD, TemplateKind.REBUILD) or again or not self._unread(tensor):
            return True
        return kind is TemplateKind.BACKWARD and self.recomputed is not None

    def offload(self, families: Families) -> TemplateBuilder:
        """Return the template that offloads one layer, in the order in which forward wrote the tensors."""
        builder = TemplateBuilder(
            "layer.offload", Phase.OFFLOAD, TemplateKind.OFFLOAD, BlockKind.LAYER, self.layers.number
        )
        for t in self.shared:
            self._transfer(builder, families, t, Lane.D2H)
        return builder

    def prefetch(self, families: Families, backward: Template) -> TemplateBuilder:
        """Return the template that prefetches one layer, in the order in which ``backward`` reads the tensors."""
        first_use: dict[str, int] = {}
        rows = {families[f"skeletal.{t.name}"].name: self.swapped_rows(t) for t in self.shared}
        for i, instruction in enumerate(backward.instructions):
            for operand in instruction.operands:
                family = backward.slots[operand.slot]
                # Rows that recompute writes and reads are not prefetched, so only reads of swapped rows count.
                if operand.mode & Mode.READ and operand.first < rows.get(family, 0):
                    first_use.setdefault(family, i)
        builder = TemplateBuilder(
            "layer.prefetch", Phase.PREFETCH, TemplateKind.PREFETCH, BlockKind.LAYER, self.layers.number
        )
        never = len(backward.instructions)
        for t in sorted(self.shared, key=lambda t: first_use.get(families[f"skeletal.{t.name}"].name, never)):
            self._transfer(builder, families, t, Lane.H2D)
        return builder

    def _transfer(self, builder: TemplateBuilder, families: Families, t: Skeletal, lane: Lane) -> None:
        slot = builder.bind(families[f"skeletal.{t.name}"], slot=t.name, tokens=t.tokens)
        moves = [self._copy_swapped, self._copy_kept]
        # In a window, the device buffer dies after its offload. The last access must be the copy to the host, because
        # a kernel may end while that copy still reads. At prefetch the buffer is born with the kernel, which then does
        # not wait for the copy of the other rows.
        for move in reversed(moves) if self.windowed else moves:
            move(builder, families, t, slot, out=lane is Lane.D2H)

    def _copy_swapped(self, builder: TemplateBuilder, families: Families, t: Skeletal, slot: str, *, out: bool) -> None:
        """Write the copy of the swapped rows to the host, or back."""
        if not (rows := self.swapped_rows(t)):
            return
        host = builder.bind(families[f"host.{t.name}"], slot=f"host.{t.name}")
        if is_rounded(self.decisions, t):
            rounding = Rounding(builder, families, t)
            for first, count in blocks(rows, t.features):
                label = t.name if count == rows else f"{t.name}.{first}"
                if out:
                    rounding.narrow(label, Rows(slot, first, count))
                self._copy(builder, label, rounding.packed(count), Rows(host, first, count), out=out)
                if not out:
                    rounding.widen(label, Rows(slot, first, count))
            return
        self._copy(builder, t.name, Rows(slot, 0, rows), Rows(host, 0, rows), out=out)

    def _copy(self, builder: TemplateBuilder, name: str, device: Rows, host: Rows, *, out: bool) -> None:
        """Write one copy to the host, or back."""
        builder.emit(
            name,
            "d2h" if out else "h2d",
            Lane.D2H if out else Lane.H2D,
            Copy(host.tokens * builder.row_bytes(host.slot), "d2h" if out else "h2d"),
            source=reads(device if out else host),
            target=writes(host if out else device),
        )

    def _copy_kept(self, builder: TemplateBuilder, families: Families, t: Skeletal, slot: str, *, out: bool) -> None:
        """Write the copy of the rows that stay on the device to another buffer, or back."""
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


def _in_region(families: list[Family]) -> Iterator[Family]:
    """Yield the rounding buffers of one kind of several: the layer's input, and the others one after the other."""
    offset = 0
    for family in families:
        if family.layer_kind is None:
            yield family
            continue
        yield replace(family, count=0, region=REGION, offset=offset)
        offset += -(-family.bytes // ARENA_ALIGNMENT_BYTES) * ARENA_ALIGNMENT_BYTES


def region(families: Iterable[Family]) -> list[Family]:
    """Return the region of rounding buffers that ``families`` lie in; empty where they have buffers of their own."""
    end = max((f.offset + f.bytes for f in families if f.region), default=0)
    kind, holds = BufferClass.SKELETAL, FamilyKind.SKELETAL
    return [Family(REGION, kind, "uint8", end, 1, ROUNDING_BUFFERS, "device", "step", kind=holds)] if end else []
