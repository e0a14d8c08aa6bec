"""Experts as Hugging Face's modules run them under full recompute, with grouped products.

transformers 5.23 (integrations/moe.py, ``grouped_mm_experts_forward``, the default where torch has ``grouped_mm``;
models/qwen3_moe and mixtral). C dispatched rows of h features (the model's hidden size), w features inside an expert:

    sort experts -> hidden[order] (C, h) -> up (C, 2w) -> silu(gate) (C, w) -> x up (C, w) -> down (C, h)
      -> x probability (C, h) -> [places] (C, h) -> sum over each token's rows (T, h)

Other than memo's own experts (``experts.py``):

- The probability is multiplied after the second product, so autograd saves that product's result, and the recompute of
  a checkpointed layer makes it. It also saves the dispatched rows, so backward copies none again.
- Backward of ``[places]`` adds C rows to zeros (``index_put_`` with ``accumulate``), from a contiguous copy of the
  sum's expanded gradient. Backward of ``x probability`` has two results of C rows.
- Results of products are tensors of their own: nothing is copied.
- The router's product has the dtype of the module, and its softmax fp32.

The program keeps memo's order of operators, so it multiplies the probability in before the second product; bytes,
passes and products are those above. ``memory/huggingface.py`` adds what SiLU's result takes.

Not priced: the recompute's product with the probability, one pass over C rows.
"""

from __future__ import annotations

from memo_sim.contract.hardware import GemmPass
from memo_sim.program.ir.builder import Access, Rows, reads
from memo_sim.program.ir.kinds import Phase
from memo_sim.program.ir.work import Gemm
from memo_sim.program.layers.experts import ExpertMlp
from memo_sim.program.operators.operators import RowBlock

KINDS = {"dispatch.grad": "experts.combine.bwd", "dispatch.bwd": "experts.dispatch.bwd"}
"""Row-wise work by the operator's name, where it is not that of its op (``operators/framework_kernels.py``)."""

WEIGHED = {"combine": 3, "dispatch.grad": 2}
"""Tensors of C rows that exist beside an operator's operands, by its name.

combine: the dispatched rows, which a local variable holds, the weighed rows, and these in the tokens' order.
dispatch.grad: the gradient of the weighed rows, and its zeros while it is copied, or its product with the rows."""


class ModuleExperts(ExpertMlp):
    """Writes experts of Hugging Face's modules into a layer's templates."""

    copies_results = False

    def inner(self, blocks: list[RowBlock], *, routed: bool) -> None:
        """Write what lies between the norm and the second product; the recompute writes that product too."""
        super().inner(blocks, routed=routed)
        if self.builder.phase is Phase.RECOMPUTE and self.writer.decisions.early_stop:
            self._product("experts_down", Rows("act", *self._all), self._rebuilt)

    @property
    def _rebuilt(self) -> Rows:
        """The recompute's result of the second product."""
        return Rows(self.writer.own("expert_out", self.rows, self.shape.hidden), *self._all)

    def _dispatched_again(self, source: Rows) -> Rows:
        """Return the recompute's dispatched rows, which autograd has saved."""
        del source
        return Rows(self.writer.own(f"{Phase.RECOMPUTE}.dispatched", self.rows, self.shape.hidden), *self._all)

    def _read_besides(self, name: str) -> dict[str, Access]:
        return {"saved": reads(self._rebuilt)} if name == "dispatch.grad" else {}

    def _kind(self, name: str, op: str) -> str:
        return KINDS.get(name, op)

    def _dispatch_scratch(self, name: str, out: Rows) -> int:
        return WEIGHED.get(name, 0) * self.writer.size * out.tokens * self.shape.hidden

    def _combine_scratch(self, name: str, out: Rows) -> int:
        del out
        return WEIGHED.get(name, 0) * self.writer.size * self.rows * self.shape.hidden

    def _result_bytes(self, elements: int) -> int:
        del elements
        return 0

    def _in_fp32(self, m: int, n: int, k: int, gemm_pass: GemmPass) -> Gemm:
        """Return a product of the router, which has the module's dtype."""
        return Gemm(m, n, k, gemm_pass, self.writer.dtype)
