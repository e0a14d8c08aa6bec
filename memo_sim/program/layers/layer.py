"""One transformer layer, operator by operator: forward, recompute of a row block, backward.

Forward of a row block [first, first + tokens) of the rank's tokens (products are row-wise, so blocks are independent):

    x -> norm1 -> [all-gather] -> qkv -> (qk norm, rotary) | attention over all rows | -> proj -> [reduce-scatter]
      -> resid = x + proj -> norm2 -> [all-gather] -> up -> act | -> down -> [reduce-scatter] -> next x = resid + down

Models with norms behind attention and MLP (Gemma 3) normalise ``proj`` and ``down`` before these sums.

Recompute repeats everything left of the last bar except attention: QKV, projection and the first FFN product, but not
the second one (MEMO 4.1), unless a norm follows it. Collectives in brackets exist with tensor parallelism. With
Megatron's sequence parallelism they gather and scatter token shards. Without it they are all-reduces of whole tensors:
after proj and down in forward, and of the input gradients of up and qkv in backward.
"""

from __future__ import annotations

from memo_sim.contract.plan import Decisions
from memo_sim.program.attention.chunked import ChunkedAttention
from memo_sim.program.attention.ulysses import Ulysses
from memo_sim.program.ir.builder import TemplateBuilder
from memo_sim.program.ir.kinds import Phase
from memo_sim.program.layers.attention_half import AttentionHalf, WholeAttention
from memo_sim.program.layers.expert_exchange import ExchangedExperts
from memo_sim.program.layers.experts import ExpertMlp
from memo_sim.program.layers.huggingface_experts import ModuleExperts
from memo_sim.program.layers.latent_attention import LatentAttentionHalf
from memo_sim.program.layers.mlp import Mlp
from memo_sim.program.layout.attention_chunks import attention_chunks, in_chunks
from memo_sim.program.layout.parameters import Block
from memo_sim.program.layout.shape import Shape
from memo_sim.program.operators import norms
from memo_sim.program.operators.operators import OperatorWriter, RowBlock


def _attention_half(writer: OperatorWriter, ulysses: Ulysses, *, chunked: bool) -> AttentionHalf:
    """Return what writes the attention half of a plan's layers."""
    if chunked:
        return ChunkedAttention(writer, ulysses)
    return LatentAttentionHalf(writer, ulysses) if writer.shape.latent else WholeAttention(writer, ulysses)


class LayerWriter(OperatorWriter):
    """Writes one layer's instructions into a template whose slots are named after the skeletal tensors.

    Slots ``params`` and ``grads`` are the layer's parameters and gradients; ``next_x`` receives the layer's output.
    """

    def __init__(self, builder: TemplateBuilder, decisions: Decisions, shape: Shape, block: Block) -> None:
        super().__init__(builder, decisions, shape, block)
        room = attention_chunks(decisions)[0][1] if in_chunks(decisions) else 0
        ulysses = Ulysses(builder, shape, decisions.dtype, room=room)
        self.attention: AttentionHalf = _attention_half(self, ulysses, chunked=room > 0)
        self.mlp: Mlp | ExpertMlp = Mlp(self)
        if shape.experts is not None:
            of_modules = ModuleExperts if decisions.modules == "huggingface" else ExpertMlp
            self.mlp = (ExchangedExperts if shape.ep > 1 else of_modules)(self, shape.experts)

    def forward(self, blocks: list[RowBlock], out: str) -> None:
        """Write the whole forward; row-wise operators run once per row block."""
        self.cast_weights()
        self.attention.forward(blocks)
        for i, rows in enumerate(blocks):
            self.suffix = f".r{i}" if len(blocks) > 1 else ""
            self.attention.project(rows)
            if not self.mlp.blocked:
                self.mlp.first_product(rows)
        self.suffix = ""
        self.mlp.inner(blocks, routed=False)
        self.mlp.forward(out)

    def recompute(self, rows: RowBlock, index: int, *, whole: bool) -> None:
        """Write the recompute of one row block; ``whole``: of the layer's whole forward, whose output is not used.

        The whole forward is what activation checkpointing repeats: one block, with attention and the second product.
        ``early_stop`` leaves that product out (torch.utils.checkpoint, ``set_checkpoint_early_stop``). When the MLP
        runs in row blocks, backward recomputes it block by block, without the second product, unless ``mlp_rebuild``
        says that the layer's recompute has it: then each block's stands before the next block, and none is left out.
        """
        if isinstance(self.mlp, ExpertMlp) and not whole:
            self.mlp.before_recompute()
        self.suffix = "" if whole else f".r{index}"
        self.attention.recompute(rows, whole=whole)
        self.attention.project(rows)
        if not self.mlp.blocked:
            self.mlp.first_product(rows)
        self.mlp.inner([rows], routed=not whole)
        again = whole and (self.mlp.apart or not (self.mlp.blocked or self.decisions.early_stop))
        if not again:
            self.mlp.rebuild_output(rows)
        self.suffix = ""
        if again:
            self.mlp.forward(self.own("rebuilt_out", self.shape.shard_tokens, self.shape.hidden))

    def rebuild_operators(self) -> None:
        """Write what recompute by operator repeats of the whole layer (``operator_recompute.py``)."""
        rows = (0, self.shape.tokens)
        norms.norm(self, "norm1", "x", rows, rows)
        if self.shape.tp == 1:
            self.attention.project(rows)
        self.mlp.rebuild_operators()

    def backward(self, grad_out: str, grad_in: str) -> None:
        """Write the backward: reads ``grad_out`` (of the layer's output), writes ``grad_in`` (of its input)."""
        self._again("norm2", "resid")
        if self.decisions.recompute == "mlp":
            self.mlp.again()
        self.mlp.backward(grad_out)
        self._again("norm1", "x")
        self.attention.backward(grad_in)

    def _again(self, norm: str, source: str) -> None:
        """Write a norm once more, where backward computes it again as a module (``module_recompute.py``)."""
        if self.decisions.recompute != "norms":
            return
        phase, self.builder.phase = self.builder.phase, Phase.RECOMPUTE
        rows = (0, self.shape.tokens)
        norms.norm(self, norm, source, rows, rows)
        self.builder.phase = phase
