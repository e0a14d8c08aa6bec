"""The MLP that every token goes to beside its experts (DeepSeek-V3), in the templates of ``experts.py``.

    norm2 -> shared_up -> shared_act -> shared_down, added to the sum of the experts

Its tensors are rows of tokens: with alpha of the tokens swapped, the first rows of ``shared_up`` and ``shared_act`` are
swapped and the others are recomputed. Tensor parallelism divides its features, as those of every expert.

A gate (Qwen2-MoE) multiplies the output by one number of each token, sigmoid(norm2 . w). As with the probabilities of
experts, it is multiplied in before the second product, so backward finds its gradient from the activation. It is kept
whole. A tensor-parallel rank has the gradient of its features, which the sums of ``d_norm2`` and of the layer's
gradients over these ranks complete.

Where tensor-parallel ranks have whole experts, the experts' sum is of each rank's token shard. So the shared expert has
a sum of its own, in forward and in backward, which is reduce-scattered and added to that (``experts.py``). It also has
one where its products overlap with the exchanges of the experts' rows, which have not arrived yet.
"""

from __future__ import annotations

from memo_sim.contract.hardware import GemmPass
from memo_sim.contract.units import DTYPE_BYTES
from memo_sim.program.ir.builder import Access, Rows, accumulates, reads, writes
from memo_sim.program.ir.instruction import BufferClass, Lane
from memo_sim.program.ir.work import Gemm, Rowwise, WidenedGemm, Work
from memo_sim.program.layout.parameters import gradient_dtype
from memo_sim.program.operators import workspaces as table
from memo_sim.program.operators.operators import OperatorWriter, RowBlock

NUMBER = DTYPE_BYTES["fp32"]


def in_fp32(writer: OperatorWriter, m: int, n: int, k: int, gemm_pass: GemmPass) -> Gemm:
    """Return a product in fp32 of operands in the plan's dtype: a router's, or a gate's."""
    dtype = writer.dtype
    return Gemm(m, n, k, gemm_pass, dtype) if dtype == "fp32" else WidenedGemm(m, n, k, gemm_pass, "fp32", dtype)


class SharedExpert:
    """Writes the shared expert of a layer; writes nothing where the layer has none."""

    def __init__(self, writer: OperatorWriter) -> None:
        self.writer, self.builder = writer, writer.builder
        self.width, self.hidden = writer.shape.shared_width, writer.shape.hidden
        self.tokens = writer.shape.tokens
        of = writer.shape.experts
        self.gated = of is not None and of.shared_gate

    def gate(self, source: Rows) -> None:
        """Write the gate of all tokens from their norm ``source``; nothing without one."""
        if not self.gated:
            return
        tokens, hidden = self.tokens, self.hidden
        self._emit(
            "shared_gate",
            "shared_gate",
            in_fp32(self.writer, tokens, 1, hidden, "fprop"),
            table.router_workspace_bytes(tokens, hidden, 1, self.writer.dtype),
            x=reads(source),
            weight=self.writer.param("shared_gate.weight"),
            out=writes(self._gate((0, tokens))),
        )

    def first_half(self, source: Rows, rows: RowBlock) -> None:
        """Write first product and activation of a range of rows; ``source``: the norm of all tokens."""
        if not self.width:
            return
        x = self.writer.product_input("shared_up", Rows(source.slot, source.first + rows[0], rows[1]))
        self.writer.linear("shared_up", x, Rows("shared_up", *rows), 2 * self.width, self.hidden)
        activated = Rows("shared_act", *rows)
        made = self.writer.made(activated, self.width)
        if self.gated:
            size = self.writer.size * self.width * rows[1]
            self._emit(
                "shared_act",
                "shared_gate.swiglu",
                Rowwise("experts.swiglu", rows[1], 2 * size + NUMBER * rows[1], size),
                table.expert_activation_workspace_bytes(rows[1], self.width, self.writer.dtype),
                x=reads(Rows("shared_up", *rows)),
                gates=reads(self._gate(rows)),
                out=writes(made),
            )
        else:
            self.writer.memory_bound(
                "shared_act",
                "swiglu",
                rows[1],
                2 * self.width,
                self.width,
                features=self.width,
                x=reads(Rows("shared_up", *rows)),
                out=writes(made),
            )
        self.writer.quantise(made, activated)

    def second_half(self, into: Rows) -> None:
        """Write the second product of all tokens, added to the experts' sum ``into``."""
        if not self.width:
            return
        self.builder.emit(
            f"shared_down{self.writer.suffix}",
            "linear.add",
            Lane.COMPUTE,
            self.writer.product("shared_down", self.tokens, self.hidden, self.width, "fprop"),
            x=reads(self._all(self.writer.read_by_product("shared_act"))),
            weight=self.writer.weight("shared_down"),
            out=accumulates(into),
        )

    def whole_output(self, *, scattered: bool) -> Rows | None:
        """Write the second product of all tokens into a sum of its own, and return it; None without a shared expert.

        ``scattered``: it is summed over tensor-parallel ranks, and the rank's token shard of it returned.
        """
        if not self.width:
            return None
        writer = self.writer
        product = Rows(writer.own("shared_out", self.tokens, self.hidden), 0, self.tokens)
        source = self._all(writer.read_by_product("shared_act"))
        writer.linear("shared_down", source, product, self.hidden, self.width, bias=False)
        return writer.scatter("shared_down", product) if scattered else product

    def backward(self, upstream: Rows) -> None:
        """Write the backward from the gradient of the output of all tokens to that of the first product."""
        if not self.width:
            return
        writer, width = self.writer, self.width
        d_act = Rows(writer.own("d_shared_act", self.tokens, width), 0, self.tokens)
        writer.dgrad("shared_down", upstream, d_act, width, self.hidden)
        writer.wgrad("shared_down", upstream, self._all("shared_act"), self.hidden, width)
        d_up = Rows(writer.own("d_shared_up", self.tokens, 2 * width), 0, self.tokens)
        if self.gated:
            self._gated_backward(d_act, d_up)
            return
        writer.memory_bound(
            "shared_act.bwd",
            "swiglu.bwd",
            self.tokens,
            3 * width,
            2 * width,
            features=width,
            grad=reads(d_act),
            x=reads(self._all("shared_up")),
            grad_x=writes(d_up),
        )

    def _gated_backward(self, d_act: Rows, d_up: Rows) -> None:
        """Write the gradients of the first product and of the gate's product, from that of the weighted activation."""
        tokens, size = self.tokens, self.writer.size * self.width * self.tokens
        if not self.builder.has("d_shared_gate"):
            self.builder.own("d_shared_gate", BufferClass.TRANSIENT, "fp32", tokens, 1)
        self._emit(
            "shared_act.bwd",
            "shared_gate.swiglu.bwd",
            Rowwise("experts.swiglu.bwd", tokens, 3 * size + NUMBER * tokens, 2 * size + NUMBER * tokens),
            table.expert_activation_backward_workspace_bytes(tokens, self.width),
            grad=reads(d_act),
            x=reads(self._all("shared_up")),
            gates=reads(self._gate((0, tokens))),
            grad_x=writes(d_up),
            grad_probs=writes(self._all("d_shared_gate")),
        )
        self._emit(
            "shared_gate.bwd",
            "shared_gate.bwd",
            Rowwise("experts.gates.bwd", tokens, 2 * NUMBER * tokens, NUMBER * tokens),
            0,
            gates=reads(self._gate((0, tokens))),
            grad=accumulates(self._all("d_shared_gate")),
        )

    def input_gradient(self, source: Rows, d_norm: Rows) -> None:
        """Write the first product's weight gradient, and that of its input, added to ``d_norm``."""
        if not self.width:
            return
        d_up = self._all("d_shared_up")
        self.writer.wgrad("shared_up", d_up, source, 2 * self.width, self.hidden)
        self.writer.dgrad("shared_up", d_up, d_norm, self.hidden, 2 * self.width, op="linear.dgrad.add")
        if self.gated:
            self._gate_products(source, d_norm)

    def whole_input_gradient(self, source: Rows | None, *, scattered: bool) -> Rows | None:
        """Write the gradients of the first product's weight and of its input, in a sum of its own that is returned.

        ``source``: the input of all tokens; None where it has yet to be gathered. ``scattered``: as in forward.
        """
        if not self.width:
            return None
        writer, rows = self.writer, (0, self.tokens)
        shard = writer.shard_rows("norm2", rows)
        if source is None:
            frozen = writer.decisions.lora is not None  # no gradient reads the input then
            source = shard if frozen else writer.gather_again("norm2", shard, "norm2_full", 0)
        d_up, d_norm = self._all("d_shared_up"), Rows(writer.own("d_shared_norm", self.tokens, self.hidden), *rows)
        writer.dgrad("shared_up", d_up, d_norm, self.hidden, 2 * self.width)
        writer.wgrad("shared_up", d_up, source, 2 * self.width, self.hidden, shard=shard)
        if self.gated:
            self._gate_products(source, d_norm)
        return writer.scatter("d_shared_norm", d_norm) if scattered else d_norm

    def _gate_products(self, source: Rows, d_norm: Rows) -> None:
        """Write the gradients of the gate's input ``source``, added to ``d_norm``, and of its weight."""
        writer, tokens, hidden, grad = self.writer, self.tokens, self.hidden, reads(self._all("d_shared_gate"))
        self._emit(
            "shared_gate.dgrad",
            "shared_gate.dgrad",
            in_fp32(writer, tokens, hidden, 1, "dgrad"),
            table.router_workspace_bytes(tokens, hidden, 1, writer.dtype),
            grad=grad,
            weight=writer.param("shared_gate.weight"),
            out=accumulates(d_norm),
        )
        if writer.decisions.lora is not None:
            return
        into = gradient_dtype(writer.decisions)
        self._emit(
            "shared_gate.wgrad",
            "shared_gate.wgrad",
            in_fp32(writer, 1, hidden, tokens, "wgrad"),
            table.router_wgrad_workspace_bytes(tokens, hidden, 1, writer.dtype, into=into),
            grad=grad,
            x=reads(source),
            out=writer.grad("shared_gate.weight"),
        )

    def _emit(self, name: str, op: str, work: Work, scratch: int, **operands: Access | None) -> None:
        name = name + self.writer.suffix
        workspace = self.builder.scratch(f"{self.builder.phase}.{name}.scratch", scratch)
        self.builder.emit(name, op, Lane.COMPUTE, work, **operands, workspace=workspace)

    def _gate(self, rows: RowBlock) -> Rows:
        return Rows("route_shared_gate", *rows)

    def _all(self, slot: str) -> Rows:
        return Rows(slot, 0, self.tokens)
