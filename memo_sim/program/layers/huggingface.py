"""Layers of Hugging Face's modules: what autograd saves of them is kept, not what memo's operators read again.

Under full recompute the saved tensors live inside one layer's backward, and ``memory/huggingface.py`` adds them there.
Where layers keep or swap them, they are skeletal tensors. For ``n`` elements of an operator (transformers,
models/llama/modeling_llama.py and models/qwen3/modeling_qwen3.py; torch, derivatives.yaml), in bf16:

    RMS norm     6n: its input in fp32, which ``pow`` and the product with ``rsqrt`` save, and the normalised rows,
                 which the product with the weight saves; 4 bytes a row for ``rsqrt``. The input itself is not saved
    Q, K norm    the same, with ``rsqrt`` of every head
    SwiGLU       2n beside its input and output: the result of SiLU, which the product with the other half saves

In fp32 the cast is no copy: a norm saves its input and the normalised rows. So only recompute of rows reads the layer's
input in bf16. For Llama 3 8B that is 196 KiB a token and layer, and 8 KiB for the input.

The list is that of Llama's, Qwen2's and Qwen3's modules. Phi-3's, of the same family here, save views of packed
products and so keep whole ones.

Recompute and swap are those of ``memo_exec.tokenwise``, whose layers have memory of torch's allocator. Here they have
the two rounding buffers, in which the last two layers hold their inputs too, and which are as large at every alpha.
"""

from __future__ import annotations

from msgspec.structs import replace

from memo_sim.contract.model import Model
from memo_sim.program.ir.builder import Access, Rows, reads, writes
from memo_sim.program.layers.layer import LayerWriter
from memo_sim.program.layout.shape import Shape
from memo_sim.program.layout.skeletal import Fate, Skeletal, skeletal_tensors
from memo_sim.program.operators.operators import RowBlock

SILU = "silu"
QK_SAVED, QK_STATS = "qk_saved", "qk_stats"


def saved_name(norm: str) -> str:
    """Return the name of the tensor that autograd saves of a norm beside its output and its statistics."""
    return f"{norm}_saved"


def module_tensors(
    model: Model, shape: Shape, dtype: str, *, scores: tuple[Skeletal, ...] = ()
) -> tuple[Skeletal, ...]:
    """Return the skeletal tensors of one layer, in the order in which forward writes them."""
    copied = _copies(dtype)
    heads = shape.heads + shape.kv_heads
    found: list[Skeletal] = []
    for tensor in skeletal_tensors(model, shape, dtype, scores=scores):
        match tensor.name:
            case "x":
                found.append(replace(tensor, for_recompute=copied))
            case "resid" | "qk_raw" if copied:
                pass
            case "norm1" | "norm2":
                features = _saved_features(tensor.features, dtype)
                found += [tensor, replace(tensor, name=saved_name(tensor.name), features=features)]
            case "act":
                found += [replace(tensor, name=SILU), tensor]
            case _:
                found.append(tensor)
        if tensor.name == "qk_raw":
            features = _saved_features(tensor.features, dtype)
            found.append(replace(tensor, name=QK_SAVED, features=features))
            found.append(Skeletal(QK_STATS, tensor.tokens, heads, "fp32", Fate.BY_TOKEN, statistics=True))
    return tuple(found)


def _copies(dtype: str) -> bool:
    """Return whether a norm casts its input to fp32, which makes a copy."""
    return dtype != "fp32"


def _saved_features(features: int, dtype: str) -> int:
    """Return the features of an fp32 copy and of normalised rows together, in elements of ``dtype`` (bf16, fp32)."""
    return 3 * features if _copies(dtype) else features


class HuggingFaceLayer(LayerWriter):
    """Writes a layer whose operators save what Hugging Face's modules do."""

    def memory_bound(
        self,
        name: str,
        op: str,
        rows: int,
        read: int,
        written: int,
        *,
        features: int = 0,
        scratch: int = 0,
        first: int = 0,
        theta: float = 0.0,
        **operands: Access | None,
    ) -> None:
        """Emit a memory-bound operator, with the tensors that its module saves among its operands."""
        super().memory_bound(
            name,
            op,
            rows,
            read,
            written,
            features=features,
            scratch=scratch,
            first=first,
            theta=theta,
            **self._with_saved(op, operands),
        )

    def residual(
        self, name: str, x: str, y: Rows, *, out: str, rows: RowBlock, bias: str, at: RowBlock | None = None
    ) -> None:
        """Emit a residual sum; the first one is the template's own where no module saves it."""
        if out == "resid":
            self.own("resid", self.shape.shard_tokens, self.shape.hidden)
        super().residual(name, x, y, out=out, rows=rows, bias=bias, at=at)

    def _with_saved(self, op: str, operands: dict[str, Access | None]) -> dict[str, Access | None]:
        name, backward = op.removesuffix(".bwd"), op.endswith(".bwd")
        access = reads if backward else writes
        copied = _copies(self.dtype)

        def beside(role: str, slot: str) -> Access:
            """Return the rows of ``role`` in another slot."""
            given = operands[role]
            assert given is not None
            return access(Rows(slot, given[0].first, given[0].tokens))

        match name:
            case "rms_norm":
                stats = operands["stats"]
                assert stats is not None
                norm = stats[0].slot.removesuffix("_stats")
                unread = {"x": None} if backward and copied else {}
                return operands | unread | {"saved": beside("stats", saved_name(norm))}
            case "qk_norm":
                saved = {"saved": beside("raw", QK_SAVED), "stats": beside("raw", QK_STATS)}
                return operands | saved | ({"raw": None} if copied else {})
            case "swiglu":
                return operands | {"silu": beside("x" if backward else "out", SILU)}
            case _:
                return operands
