"""What every form of attention is written from: kernel calls with their scratch, parts of keys, merges and sums."""

from __future__ import annotations

from memo_sim.contract.plan import Decisions
from memo_sim.contract.units import DTYPE_BYTES
from memo_sim.program.builder import Access, Rows, TemplateBuilder, accumulates, reads, writes
from memo_sim.program.instruction import BufferClass, Lane
from memo_sim.program.kernel_table import attention_workspace_bytes
from memo_sim.program.shape import Shape
from memo_sim.program.work import Attention, Mask, Rowwise


def attention_work(decisions: Decisions, shape: Shape, q: int, k: int, mask: Mask, *, backward: bool) -> Attention:
    """Return a call of ``q`` queries against ``k`` keys, tokens of all sequences of the micro-batch."""
    batch = decisions.micro_batch
    return Attention(
        batch=batch,
        q_tokens=q // batch,
        k_tokens=k // batch,
        mask=mask,
        heads=shape.heads,
        kv_heads=shape.kv_heads,
        head_dim=decisions.model.head_dim,
        backward=backward,
        kernel=decisions.kernels.attention,
        dtype=decisions.dtype,
    )


def workspace(builder: TemplateBuilder, decisions: Decisions, work: Attention, name: str) -> Access | None:
    """Add the kernel's scratch as a buffer of one instruction."""
    return builder.scratch(name, attention_workspace_bytes(work, decisions.kernels.head_groups))


def pack(builder: TemplateBuilder, decisions: Decisions, shape: Shape, target: str, suffix: str = "") -> None:
    """Copy this rank's keys and values out of the packed Q, K, V into ``target``."""
    size = shape.tokens * 2 * shape.kv_width * DTYPE_BYTES[decisions.dtype]
    builder.emit(
        f"kv.pack{suffix}",
        "kv.pack",
        Lane.COMPUTE,
        Rowwise("kv.pack", shape.tokens, size, size),
        qkv=reads(builder.all("qkv")),
        out=writes(builder.all(target)),
    )


def add(builder: TemplateBuilder, decisions: Decisions, name: str, part: Rows, into: Rows) -> None:
    """Add gradients that were written aside to their sum; ``into`` may be wider (packed Q, K, V)."""
    moved = part.tokens * builder.features(part.slot) * DTYPE_BYTES[decisions.dtype]
    builder.emit(
        name,
        "grad.accumulate",
        Lane.COMPUTE,
        Rowwise("grad.accumulate", part.tokens, 2 * moved, moved),
        x=reads(part),
        out=accumulates(into),
    )


def part_forward(
    builder: TemplateBuilder, decisions: Decisions, shape: Shape, keys: Rows, name: str, *, merge: str
) -> None:
    """Write all queries against ``keys``, none masked, and the merge into ``attn`` and ``lse`` by log-sum-exp."""
    tokens = shape.tokens
    if not builder.has("attn.part"):
        builder.own("attn.part", BufferClass.TRANSIENT, decisions.dtype, tokens, shape.q_width)
        builder.own("lse.part", BufferClass.TRANSIENT, "fp32", tokens, shape.heads)
    work = attention_work(decisions, shape, tokens, keys.tokens, "none", backward=False)
    builder.emit(
        name,
        "attention",
        Lane.COMPUTE,
        work,
        qkv=reads(builder.all("qkv")),
        kv=reads(keys),
        out=writes(builder.all("attn.part")),
        lse=writes(builder.all("lse.part")),
        workspace=workspace(builder, decisions, work, f"{name}.scratch"),
    )
    row = shape.q_width * DTYPE_BYTES[decisions.dtype] + 4 * shape.heads
    builder.emit(
        merge,
        "attention.merge",
        Lane.COMPUTE,
        Rowwise("attention.merge", tokens, 2 * tokens * row, tokens * row),
        part=reads(builder.all("attn.part")),
        part_lse=reads(builder.all("lse.part")),
        out=accumulates(builder.all("attn")),
        lse=accumulates(builder.all("lse")),
    )


def part_backward(
    builder: TemplateBuilder, decisions: Decisions, shape: Shape, keys: Rows, name: str, *, into: Rows
) -> None:
    """Write the backward of a part into slot ``d_q.part`` and, for its keys and values, ``into``."""
    work = attention_work(decisions, shape, shape.tokens, keys.tokens, "none", backward=True)
    builder.emit(
        name,
        "attention.bwd",
        Lane.COMPUTE,
        work,
        grad=reads(builder.all("d_attn")),
        qkv=reads(builder.all("qkv")),
        kv=reads(keys),
        out=reads(builder.all("attn")),
        lse=reads(builder.all("lse")),
        grad_q=writes(builder.all("d_q.part")),
        grad_kv=writes(into),
        workspace=workspace(builder, decisions, work, f"{name}.scratch"),
    )


def own_d_q(builder: TemplateBuilder, decisions: Decisions, shape: Shape) -> None:
    """Add the buffer that ``part_backward`` writes the queries' gradients to."""
    if not builder.has("d_q.part"):
        builder.own("d_q.part", BufferClass.TRANSIENT, decisions.dtype, shape.tokens, shape.q_width)
