"""What happens to skeletal tensors between forward and backward: keep, full recompute, swap, token-wise.

Each policy is a choice of families for the skeletal slots of the forward and backward templates, plus copies:

    keep        one buffer per micro-batch and layer, from forward to backward
    full        only the layer input is kept; backward rebuilds the rest in buffers of its own. Swapped inputs lie in
                the two rounding buffers, one of them read while the other comes back for the next layer's backward
    selective   all but what attention alone makes (``selective.py``)
    rounding    two buffers that layers take in turn; a layer whose buffer is overwritten is offloaded to host
                buffers after its forward and prefetched before its backward. Of the tokens that are not swapped,
                tokenwise rebuilds the rows in backward, none and full keep a copy of them on the device.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from memo_sim.contract.plan import Decisions
from memo_sim.program import selective
from memo_sim.program.builder import Rows, TemplateBuilder, reads, writes
from memo_sim.program.instruction import BufferClass, Family, Lane, Mode, Template
from memo_sim.program.mlp import rows_at_once
from memo_sim.program.plain_attention import score_keys
from memo_sim.program.shape import Shape
from memo_sim.program.stage import Stage
from memo_sim.program.tensors import Fate, Skeletal, skeletal_tensors
from memo_sim.program.token_order import row_blocks
from memo_sim.program.visits import ROUNDING_BUFFERS
from memo_sim.program.work import Copy, Rowwise


@dataclass(frozen=True)
class Activations:
    """The activation policy of one program."""

    decisions: Decisions
    shape: Shape
    micro_batches: int
    stage: Stage

    @property
    def tensors(self) -> tuple[Skeletal, ...]:
        """The layer's skeletal tensors."""
        keys = score_keys(self.decisions, self.shape)
        return skeletal_tensors(self.decisions.model, self.shape, self.decisions.dtype, score_keys=keys)

    @property
    def rounding(self) -> bool:
        """Whether skeletal tensors live in rounding buffers."""
        return self.decisions.recompute == "tokenwise" or self.decisions.swapped_tokens > 0

    @property
    def kept_per_layer(self) -> int:
        """Buffers that a per-layer family has."""
        return self.micro_batches * len(self.stage.layers)

    @property
    def recomputed(self) -> tuple[int, int] | None:
        """Row block that backward of a swapped layer rebuilds, or None."""
        first, total = self.decisions.swapped_tokens, self.shape.tokens
        return (first, total - first) if self.decisions.recompute == "tokenwise" and first < total else None

    @property
    def row_blocks(self) -> list[tuple[int, int]]:
        """Row blocks of the forward (``token_order.py``)."""
        return row_blocks(self.decisions)

    @property
    def kept_rows(self) -> bool:
        """Whether rows that are not swapped are copied aside on the device."""
        partly = self.decisions.swapped_tokens < self.shape.tokens
        return self.rounding and self.decisions.recompute in ("none", "full") and partly

    @property
    def resident_differs(self) -> bool:
        """Whether the backward of a layer that was not swapped is another: its rows need no rebuilding."""
        return self.rounding and self.decisions.recompute != "full"

    def swapped_rows(self, tensor: Skeletal) -> int:
        """Return how many rows of ``tensor`` travel to the host."""
        if tensor.fate is Fate.WHOLE and self.decisions.recompute == "tokenwise":
            return tensor.tokens
        return tensor.tokens * self.decisions.swapped_tokens // self.shape.tokens

    def kept(self, tensor: Skeletal) -> int:
        """Return how many rows of ``tensor`` are copied aside on the device."""
        return tensor.tokens - self.swapped_rows(tensor) if self.kept_rows else 0

    def families(self) -> list[Family]:
        """Return the shared families that hold skeletal tensors, and the host's copies of them."""
        count = ROUNDING_BUFFERS if self.rounding else self.kept_per_layer
        lifetime: Literal["step", "dynamic"] = "step" if self.rounding else "dynamic"
        found = [
            Family(f"skeletal.{t.name}", BufferClass.SKELETAL, t.dtype, t.tokens, t.features, count, "device", lifetime)
            for t in self.shared
        ]
        if self.rounding:
            for t in self.shared:
                shape = (t.dtype, self.swapped_rows(t), t.features, self.kept_per_layer)
                if shape[1]:
                    found.append(Family(f"host.{t.name}", BufferClass.SKELETAL, *shape, "host"))
                if self.kept(t):
                    name = f"aside.{t.name}"
                    found.append(
                        Family(name, BufferClass.SKELETAL, t.dtype, self.kept(t), t.features, self.kept_per_layer)
                    )
        return found

    @property
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
                builder.bind(families[f"skeletal.{t.name}"], slot=t.name)
            elif not builder.has(t.name):
                rows = rows_at_once(t, self.decisions, self.shape)
                builder.own(t.name, BufferClass.SKELETAL, t.dtype, rows, t.features)

    def index(self, slot: str, micro_batch: int, layer: int) -> int:
        """Return which buffer of its family a skeletal, host or aside slot takes for one layer."""
        per_layer = micro_batch * len(self.stage.layers) + layer
        if slot.startswith(("host.", "aside.")) or not self.rounding:
            return per_layer
        return layer % ROUNDING_BUFFERS

    def offload(self, families: dict[str, Family]) -> Template:
        """Return the copies of one layer to the host, in the order forward wrote the tensors."""
        builder = TemplateBuilder("layer.offload", "off")
        for t in self.shared:
            self._transfer(builder, families, t, Lane.D2H)
        return builder.build()

    def prefetch(self, families: dict[str, Family], backward: Template) -> Template:
        """Return the copies of one layer back to the device, in the order ``backward`` reads the tensors."""
        first_use: dict[str, int] = {}
        rows = {f"skeletal.{t.name}": self.swapped_rows(t) for t in self.shared}
        for i, instruction in enumerate(backward.instructions):
            for operand in instruction.operands:
                family = backward.slots[operand.slot]
                # What recompute writes and reads again are other rows than those that come from the host.
                if operand.mode & Mode.READ and operand.first < rows.get(family, 0):
                    first_use.setdefault(family, i)
        builder = TemplateBuilder("layer.prefetch", "pre")
        for t in sorted(self.shared, key=lambda t: first_use.get(f"skeletal.{t.name}", len(backward.instructions))):
            self._transfer(builder, families, t, Lane.H2D)
        return builder.build()

    def _transfer(self, builder: TemplateBuilder, families: dict[str, Family], t: Skeletal, lane: Lane) -> None:
        slot = builder.bind(families[f"skeletal.{t.name}"], slot=t.name)
        out = lane is Lane.D2H
        rows = self.swapped_rows(t)
        if rows:
            host = builder.bind(families[f"host.{t.name}"])
            device_rows, host_rows = Rows(slot, 0, rows), Rows(host, 0, rows)
            builder.emit(
                t.name,
                "d2h" if out else "h2d",
                lane,
                Copy(families[f"host.{t.name}"].bytes, "d2h" if out else "h2d"),
                source=reads(device_rows if out else host_rows),
                target=writes(host_rows if out else device_rows),
            )
        if self.kept(t):
            aside = builder.bind(families[f"aside.{t.name}"])
            size = families[f"aside.{t.name}"].bytes
            device_rows, aside_rows = Rows(slot, rows, t.tokens - rows), builder.all(aside)
            builder.emit(
                f"{t.name}.aside",
                "copy",
                Lane.COMPUTE,
                Rowwise("copy", t.tokens - rows, size, size),
                source=reads(device_rows if out else aside_rows),
                target=writes(aside_rows if out else device_rows),
            )
