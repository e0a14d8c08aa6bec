"""Low-rank adapters beside the products of a layer, forward and backward."""

from __future__ import annotations

from typing import TYPE_CHECKING

from memo_sim.contract.adapters import Adapters
from memo_sim.contract.hardware import GemmPass
from memo_sim.contract.layer_shape import LayerShape
from memo_sim.program.ir.builder import Access, Rows, accumulates, reads, writes
from memo_sim.program.ir.instruction import Lane
from memo_sim.program.ir.work import AdapterGemm
from memo_sim.program.layout.parameters import adapted_columns, gradient_dtype
from memo_sim.program.operators import workspaces as table

if TYPE_CHECKING:
    from memo_sim.program.operators.operators import OperatorWriter


class AdapterWriter:
    """Emits low-rank adapters beside the products of a layer (``contract/adapters.py``).

    Forward adds to the result of the product, and backward to the gradient of its input:

        low = scale x A^T           out += low B^T
        d_low = scale d_out B       d_x += d_low A       dB += d_out^T low       dA += d_low^T x

    ``low`` is not kept: backward, which reads ``x`` for dA anyway, multiplies it again. So a product without an adapter
    keeps no input, and one with an adapter keeps no more than its input.

    Tensor-parallel ranks add parts of sums: a rank's ``d_low`` of qkv and ffn_up, and its ``low`` of proj and ffn_down.
    What they are multiplied into is summed over the ranks anyway, as are the gradients of the whole sides (``Part``).
    """

    def __init__(self, writer: OperatorWriter, adapters: Adapters) -> None:
        self.writer, self.adapters = writer, adapters
        self._gradients: dict[str, Rows] = {}
        """By product: where the gradient of its low-rank rows lies."""

    def forward(self, name: str, x: Rows, out: Rows, k: int) -> None:
        """Emit the adapter of a product of ``k`` input features, after the product itself."""
        if columns := self._columns(name):
            self._add(name, self._low(name, x, out, k, columns), out, columns)

    def dgrad(self, name: str, grad: Rows, out: Rows, n: int) -> None:
        """Emit the adapter's part of the gradient of the input, of ``n`` features."""
        columns = self._columns(name)
        if not columns:
            return
        low = self._own(f"d_{name}_low", out.slot, out.tokens, columns)
        self._gradients[name] = low
        width = sum(width for _, width in columns)
        operands = {"grad": reads(grad), "weight": self.writer.param(f"{name}.lora_b"), "out": writes(low)}
        self._emit(f"{name}.lora_b.dgrad", "lora.b.dgrad", (out.tokens, self._rank, width), "dgrad", columns, operands)
        operands = {"grad": reads(low), "weight": self.writer.param(f"{name}.lora_a"), "out": accumulates(out)}
        size = (out.tokens, n, self._rank * len(columns))
        self._emit(f"{name}.lora_a.dgrad", "linear.dgrad.add", size, "dgrad", (), operands, adds=True)

    def wgrad(self, name: str, grad: Rows, x: Rows, n: int, *, shard: Rows | None) -> None:
        """Emit the gradients of both sides; ``n``: features of ``x``, ``shard``: as in ``OperatorWriter.wgrad``."""
        columns, writer = self._columns(name), self.writer
        if not columns:
            return
        low, gradient = self._low(name, x, grad, n, columns), self._gradients[name]
        width, rank, into = sum(width for _, width in columns), self._rank, gradient_dtype(writer.decisions)
        kernel, every = writer.decisions.kernels.attention, writer.builder.features(grad.slot)

        def scratch(side: str, m: int, n: int) -> Access | None:
            size = table.wgrad_workspace_bytes(m, n, grad.tokens, writer.dtype, kernel, into=into)
            return writer.builder.scratch(f"{name}.{side}.wgrad.scratch{writer.suffix}", size)

        operands = {"grad": reads(grad), "x": reads(low), "out": writer.grad(f"{name}.lora_b")}
        operands["workspace"] = scratch("lora_b", every, rank * len(columns))
        size = (width, rank, grad.tokens)
        self._emit(f"{name}.lora_b.wgrad", "lora.b.wgrad", size, "wgrad", columns, operands, adds=True)
        operands = {"grad": reads(gradient), "x": reads(x), "shard": reads(shard) if shard else None}
        operands |= {"out": writer.grad(f"{name}.lora_a"), "workspace": scratch("lora_a", rank * len(columns), n)}
        size = (rank * len(columns), n, grad.tokens)
        self._emit(f"{name}.lora_a.wgrad", "linear.wgrad", size, "wgrad", (), operands, adds=True)

    @property
    def _rank(self) -> int:
        return self.adapters.rank

    def _columns(self, name: str) -> tuple[tuple[int, int], ...]:
        """Return the features of a product's result that have adapters: (first, features) of each target."""
        writer = self.writer
        if writer.block.find(f"{name}.lora_a") is None:
            return ()
        shape = writer.shape
        layer = LayerShape(ffn_hidden=shape.ffn * shape.divided)
        return adapted_columns(writer.model, layer, shape.divided, self.adapters, name)

    def _low(self, name: str, x: Rows, like: Rows, k: int, columns: tuple[tuple[int, int], ...]) -> Rows:
        """Emit the low-rank rows of ``x``, which lie where the rows of ``like`` do, and return them."""
        low = self._own(f"{self.writer.builder.phase}.{name}_low", like.slot, like.tokens, columns)
        operands = {"x": reads(x), "weight": self.writer.param(f"{name}.lora_a"), "out": writes(low)}
        size = (like.tokens, self._rank * len(columns), k)
        self._emit(f"{name}.lora_a", "lora.a", size, "fprop", (), operands)
        return low

    def _add(self, name: str, low: Rows, out: Rows, columns: tuple[tuple[int, int], ...]) -> None:
        operands = {"x": reads(low), "weight": self.writer.param(f"{name}.lora_b"), "out": accumulates(out)}
        size = (out.tokens, sum(width for _, width in columns), self._rank)
        self._emit(f"{name}.lora_b", "lora.b", size, "fprop", columns, operands, adds=True)

    def _own(self, name: str, like: str, tokens: int, columns: tuple[tuple[int, int], ...]) -> Rows:
        """Return the first ``tokens`` rows of a buffer for low-rank rows, as long as the buffer ``like``."""
        writer = self.writer
        writer.own(name, writer.builder.all(like).tokens, self._rank * len(columns))
        return Rows(name, 0, tokens)

    def _emit(  # noqa: PLR0917 - a product's parts
        self,
        name: str,
        op: str,
        size: tuple[int, int, int],
        gemm_pass: GemmPass,
        columns: tuple[tuple[int, int], ...],
        operands: dict[str, Access | None],
        *,
        adds: bool = False,
    ) -> None:
        writer = self.writer
        work = AdapterGemm(*size, gemm_pass, writer.dtype, columns, adds)
        writer.builder.emit(f"{name}{writer.suffix}", op, Lane.COMPUTE, work, **operands)
