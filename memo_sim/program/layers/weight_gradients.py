"""Deferred weight gradients: the W pass of zero-bubble schedules.

Backward of a layer computes only gradients of inputs. For each of the four products it leaves the input and the
gradient of the output in memory, and another template multiplies them later:

    product    input                      gradient of the output
    qkv        norm1                      d_qkv
    proj       attention's output         d_resid
    ffn_up     norm2                      d_up
    ffn_down   activation                 grad_out, the next layer's input gradient

Tensors that otherwise live only in backward (gradients and recomputed tensors) wait in ``deferred`` buffers, one for
each micro-batch and layer. Tensors in rounding buffers are copied there, because other layers overwrite those before
the W pass. With sequence parallelism token shards are gathered in the W pass, once more than without deferral.
"""

from __future__ import annotations

from dataclasses import dataclass

from memo_sim.contract.plan import Decisions
from memo_sim.contract.units import DTYPE_BYTES
from memo_sim.program.ir.builder import TemplateBuilder, reads, writes
from memo_sim.program.ir.instruction import BufferClass, Families, Family, Lane
from memo_sim.program.ir.kinds import FamilyKind
from memo_sim.program.ir.work import Rowwise
from memo_sim.program.layers.activations import Activations
from memo_sim.program.layout.shape import Shape
from memo_sim.program.layout.skeletal import Skeletal
from memo_sim.program.operators.operators import OperatorWriter


@dataclass(frozen=True)
class DeferredWeightGradients:
    """Buffers and instructions of the deferred weight gradients of one stage."""

    decisions: Decisions
    shape: Shape
    activations: Activations

    @property
    def applies(self) -> bool:
        """Whether the schedule has W passes."""
        layout = self.decisions.layout
        return layout.pp > 1 and layout.schedule == "zero-bubble"

    @property
    def _sequence_sharded(self) -> str:
        return "" if self.shape.ulysses == 1 else "_seq"

    @property
    def _d_qkv(self) -> str:
        """The gradient of the QKV product's result."""
        return "d_qkv_part" if self.shape.shared_by > 1 else f"d_qkv{self._sequence_sharded}"

    @property
    def _inputs(self) -> list[Skeletal]:
        """The skeletal tensors that are inputs of products."""
        wanted = {"norm1", f"attn{self._sequence_sharded}", "norm2", "act"}
        return [t for t in self.activations.tensors if t.name in wanted]

    @property
    def _waiting(self) -> list[Skeletal]:
        """Inputs that no other buffer keeps until the W pass."""
        kept = () if self.activations.moved else tuple(t.name for t in self.activations.shared)
        return [t for t in self._inputs if t.name not in kept]

    @property
    def _copied(self) -> list[Skeletal]:
        """Waiting inputs that lie in rounding buffers or are offloaded, so they are copied."""
        shared = {t.name for t in self.activations.shared}
        return [t for t in self._waiting if t.name in shared]

    @property
    def _gradients(self) -> list[tuple[str, int, int]]:
        """Name, tokens and features of the gradients that wait for the W pass."""
        shape, model = self.shape, self.decisions.model
        up = 2 * shape.ffn if model.gated else shape.ffn
        return [
            (self._d_qkv, shape.tokens, shape.product_width),
            ("d_resid", shape.shard_tokens, shape.hidden),
            ("d_up", shape.tokens, up),
        ]

    @property
    def layer_bytes(self) -> int:
        """Bytes that the W pass of a layer reads, without the gradient of its output."""
        size = DTYPE_BYTES[self.decisions.dtype]
        gradients = sum(rows * width * size for _, rows, width in self._gradients)
        return gradients + sum(tensor.bytes for tensor in self._inputs)

    def families(self) -> list[Family]:
        """Return the buffers in which inputs and gradients wait."""
        if not self.applies:
            return []
        dtype, count = self.decisions.dtype, self.activations.kept_per_layer
        waiting = [(t.name, t.tokens, t.features) for t in self._waiting] + self._gradients
        kind, of = FamilyKind.DEFERRED, self.activations.layers.number
        return [
            Family(f"deferred.{n}", BufferClass.SKELETAL, dtype, rows, width, count, kind=kind, layer_kind=of)
            for n, rows, width in waiting
        ]

    def bind(self, builder: TemplateBuilder, families: Families) -> None:
        """Bind waiting buffers in a backward template, in place of buffers of its own."""
        for name, _, _ in self._gradients:
            builder.bind(families[f"deferred.{name}"], slot=name)
        for t in self._waiting:
            builder.bind(families[f"deferred.{t.name}"], slot=f"deferred.{t.name}" if t in self._copied else t.name)

    def keep(self, builder: TemplateBuilder) -> None:
        """Write the copies out of rounding buffers, at the end of a backward template."""
        for t in self._copied:
            builder.emit(
                f"{t.name}.keep",
                "copy",
                Lane.COMPUTE,
                Rowwise("copy", t.tokens, t.bytes, t.bytes),
                source=reads(builder.all(t.name)),
                target=writes(builder.all(f"deferred.{t.name}")),
            )

    def bind_inputs(self, builder: TemplateBuilder, families: Families) -> None:
        """Bind the tensors that the W pass reads in its template."""
        waiting = {t.name for t in self._waiting}
        for t in self._inputs:
            builder.bind(families[f"{'deferred' if t.name in waiting else 'skeletal'}.{t.name}"], slot=t.name)
        for name, _, _ in self._gradients:
            builder.bind(families[f"deferred.{name}"], slot=name)
        builder.bind(families["grad.x"], slot="grad_out")

    def write(self, writer: OperatorWriter) -> None:
        """Write the weight and bias gradients of a layer, last product first."""
        builder, shape = writer.builder, self.shape
        up = builder.features("d_up")

        d_out, d_resid = builder.all("grad_out"), builder.all("d_resid")
        d_up, d_qkv = builder.all("d_up"), builder.all(self._d_qkv)
        dy = writer.gather("ffn_down.grad", d_out, "d_ffn_down_full", 0)
        writer.wgrad("ffn_down", dy, builder.all("act"), shape.hidden, shape.ffn)
        writer.bgrad("ffn_down", d_out, shape.hidden)
        norm2 = writer.gather("norm2", builder.all("norm2"), "norm2_full", 0)
        writer.wgrad("ffn_up", d_up, norm2, up, shape.hidden)
        writer.bgrad("ffn_up", d_up, up)
        d_proj = writer.gather("proj.grad", d_resid, "d_proj_full", 0)
        writer.wgrad("proj", d_proj, builder.all(f"attn{self._sequence_sharded}"), shape.hidden, shape.q_width)
        writer.bgrad("proj", d_resid, shape.hidden)
        norm1 = writer.gather("norm1", builder.all("norm1"), "norm1_full", 0)
        writer.wgrad("qkv", d_qkv, norm1, shape.product_width, shape.hidden)
        writer.bgrad("qkv", d_qkv, shape.product_width)
