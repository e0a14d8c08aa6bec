"""Attention without a flash kernel, like Megatron-LM's core attention: writes every score to memory.

    scores = Q K^T        batched product, tokens x keys a head        probs   = softmax(scale and mask (scores))
    dropped = dropout     probs and one byte a score                   attn    = dropped V, copied out of head order

Backward needs three tensors of forward: the results of softmax and dropout, and the dropout mask. In two-byte dtypes
they take 5 bytes a score: the term ``5 a s / h`` of Korthikanti et al. 2022 (arXiv:2205.05198, equation 1).

The causal mask saves no FLOPs: the products cover all pairs, and the fused kernel of scale, mask and softmax then drops
the masked half. Dropout is included because runs without flash kernels trained with it. Megatron-LM's default rate is
0.1, and vTrain's model has dropout as well (src/model/gpt_model.py).

Plain attention has no log-sum-exp by which outputs could merge, so context parallelism is refused. Swapping is refused
as well, because the scores would have to travel to the host; full recompute makes them again, so its inputs may be
swapped (``layout/compatibility.py``).
"""

from __future__ import annotations

from memo_sim.contract.plan import Decisions
from memo_sim.contract.units import DTYPE_BYTES
from memo_sim.program.ir.builder import TemplateBuilder, accumulates, reads, writes
from memo_sim.program.ir.instruction import BufferClass, Lane
from memo_sim.program.ir.work import BatchedGemm, Rowwise
from memo_sim.program.layout.shape import Shape
from memo_sim.program.layout.skeletal import Fate, Skeletal

PLAIN = "plain"
"""Name of this kernel in a plan."""

MASK_BYTES = 1
"""Bytes of one score in the dropout mask."""


def kept(decisions: Decisions, shape: Shape) -> tuple[Skeletal, ...]:
    """Return the score tensors that backward needs.

    ``shape`` has the sizes inside attention (``Shape.attention``).
    """
    width = shape.heads * (shape.tokens // decisions.micro_batch)
    scores = (("probs", decisions.dtype), ("dropped", decisions.dtype), ("kept", "uint8"))
    return tuple(Skeletal(name, shape.tokens, width, dtype, Fate.WHOLE) for name, dtype in scores)


class _Scores:
    """Makes the products over all heads of a micro-batch and the element-wise passes over its scores.

    ``shape`` has the sizes inside attention (``Shape.attention``).
    """

    def __init__(self, builder: TemplateBuilder, decisions: Decisions, shape: Shape) -> None:
        self.builder, self.shape = builder, shape
        self.dtype, self.size = decisions.dtype, DTYPE_BYTES[decisions.dtype]
        self.heads = decisions.micro_batch * shape.heads
        self.keys = shape.tokens // decisions.micro_batch
        self.head_dim = decisions.model.head_dim
        self.scores = shape.tokens * shape.heads * self.keys
        """Number of scores in the micro-batch."""

    def own(self, name: str) -> str:
        """Add a buffer for all scores, which lives for this template only; return its name."""
        self.builder.own(name, BufferClass.TRANSIENT, self.dtype, self.shape.tokens, self.shape.heads * self.keys)
        return name

    def product(self, inner: str, *, transposed: bool = False) -> BatchedGemm:
        """Return a product with scores.

        ``inner`` is the dimension that it sums over: "head" for a product that makes scores, "tokens" for one that
        multiplies scores with another tensor. ``transposed``: the product takes the scores transposed.
        """
        tokens, dim = self.keys, self.head_dim
        n, k = (tokens, dim) if inner == "head" else (dim, tokens)
        return BatchedGemm(self.heads, tokens, n, k, "wgrad" if transposed else "fprop", self.dtype)

    def over(self, kind: str, read_bytes: float, written_bytes: float) -> Rowwise:
        """Return a pass over all scores that reads ``read_bytes`` and writes ``written_bytes`` for each score."""
        return Rowwise(kind, self.shape.tokens, int(read_bytes * self.scores), int(written_bytes * self.scores))

    def copied(self, kind: str, features: int) -> Rowwise:
        """Return a copy of ``features`` features a token from head-major to token-major order or back."""
        size = self.shape.tokens * features * self.size
        return Rowwise(kind, self.shape.tokens, size, size)


def forward(builder: TemplateBuilder, decisions: Decisions, shape: Shape) -> None:
    """Write attention forward: reads slot ``qkv``, writes ``probs``, ``dropped``, ``kept`` and ``attn``.

    Raises:
        Infeasible: with context parallelism, or when skeletal tensors are swapped.
    """
    write = _Scores(builder, decisions, shape)
    size, phase = write.size, builder.phase
    scores = builder.all(write.own(f"{phase}.scores"))
    head_order = builder.own(f"{phase}.attn_heads", BufferClass.TRANSIENT, decisions.dtype, shape.tokens, shape.q_width)
    qkv, probs, dropped, kept = (builder.all(name) for name in ("qkv", "probs", "dropped", "kept"))
    builder.emit(
        "attn.scores", "attention.scores", Lane.COMPUTE, write.product("head"), qkv=reads(qkv), out=writes(scores)
    )
    # The fused kernel reads only the unmasked half, but writes all scores: zeros in the masked half.
    builder.emit(
        "attn.softmax",
        "attention.softmax",
        Lane.COMPUTE,
        write.over("softmax", size / 2, size),
        x=reads(scores),
        out=writes(probs),
    )
    builder.emit(
        "attn.dropout",
        "attention.dropout",
        Lane.COMPUTE,
        write.over("dropout", size, size + MASK_BYTES),
        x=reads(probs),
        out=writes(dropped),
        mask=writes(kept),
    )
    builder.emit(
        "attn.values",
        "attention.values",
        Lane.COMPUTE,
        write.product("tokens"),
        probs=reads(dropped),
        qkv=reads(qkv),
        out=writes(builder.all(head_order)),
    )
    builder.emit(
        "attn",
        "attention.order",
        Lane.COMPUTE,
        write.copied("copy", shape.q_width),
        x=reads(builder.all(head_order)),
        out=writes(builder.all("attn")),
    )


def backward(builder: TemplateBuilder, decisions: Decisions, shape: Shape) -> None:
    """Write attention backward: reads ``qkv``, ``probs``, ``dropped``, ``kept``, ``d_attn``; writes ``d_qkv``.

    Raises:
        Infeasible: with context parallelism, or when skeletal tensors are swapped.
    """
    write = _Scores(builder, decisions, shape)
    size = write.size
    d_dropped, d_scores = (builder.all(write.own(name)) for name in ("d_dropped", "d_scores"))
    heads = {
        name: builder.all(builder.own(f"{name}.heads", BufferClass.TRANSIENT, decisions.dtype, shape.tokens, width))
        for name, width in (("dq", shape.q_width), ("dk", shape.kv_width), ("dv", shape.kv_width))
    }
    qkv, grad = reads(builder.all("qkv")), reads(builder.all("d_attn"))
    builder.emit(
        "attn.dv",
        "attention.dv",
        Lane.COMPUTE,
        write.product("tokens", transposed=True),
        probs=reads(builder.all("dropped")),
        grad=grad,
        out=writes(heads["dv"]),
    )
    builder.emit(
        "attn.dprobs",
        "attention.dprobs",
        Lane.COMPUTE,
        write.product("head"),
        grad=grad,
        qkv=qkv,
        out=writes(d_dropped),
    )
    # Dropout's backward reads the gradient and the mask that forward kept. Softmax's backward below works in place.
    builder.emit(
        "attn.dropout.bwd",
        "attention.dropout.bwd",
        Lane.COMPUTE,
        write.over("dropout", size + MASK_BYTES, size),
        grad=reads(d_dropped),
        mask=reads(builder.all("kept")),
        grad_x=writes(d_scores),
    )
    builder.emit(
        "attn.softmax.bwd",
        "attention.softmax.bwd",
        Lane.COMPUTE,
        write.over("softmax", 2 * size, size),
        probs=reads(builder.all("probs")),
        grad=accumulates(d_scores),
    )
    for name, transposed in (("dq", False), ("dk", True)):
        builder.emit(
            f"attn.{name}",
            f"attention.{name}",
            Lane.COMPUTE,
            write.product("tokens", transposed=transposed),
            grad=reads(d_scores),
            qkv=qkv,
            out=writes(heads[name]),
        )
    builder.emit(
        "attn.bwd",
        "attention.order",
        Lane.COMPUTE,
        write.copied("copy", shape.qkv_width),
        q=reads(heads["dq"]),
        k=reads(heads["dk"]),
        v=reads(heads["dv"]),
        grad_qkv=writes(builder.all("d_qkv")),
    )
