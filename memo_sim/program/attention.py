"""Causal attention over a rank's tokens: local, or a zigzag ring over context-parallel ranks (Megatron-LM CP, Ring
Attention).

With cp ranks the sequence is cut into 2 x cp chunks and rank r holds chunks r and 2*cp - 1 - r, so that every rank
has the same work. Step 0 is the local causal square. Step j meets the keys and values of rank r - j: when they come
from an earlier rank all queries attend to their early half, when from a later rank only the late half of the queries
attends (to all of them); both cost half a square. Partial outputs merge by log-sum-exp.

Keys and values travel one hop a step beside the attention of the step before. In backward a kernel writes its
gradients aside while the sums made so far arrive from the previous rank, adds them, and sends them on; they end at home
after cp - 1 hops. Only the last hop has nothing to hide behind.

Representative: rank cp - 1, for which every other rank is an earlier one. It merges all of its rows at every step,
more than any other rank, and a ring goes at its slowest rank's pace.
"""

from __future__ import annotations

from memo_sim.contract.plan import Decisions
from memo_sim.contract.units import DTYPE_BYTES
from memo_sim.program.builder import Access, Rows, TemplateBuilder, accumulates, reads, writes
from memo_sim.program.instruction import BufferClass, Lane
from memo_sim.program.kernel_table import attention_workspace_bytes
from memo_sim.program.shape import Shape
from memo_sim.program.work import Attention, Exchange, Mask, Rowwise


def _work(decisions: Decisions, shape: Shape, q: int, k: int, mask: Mask, *, backward: bool) -> Attention:
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


def _workspace(builder: TemplateBuilder, decisions: Decisions, work: Attention, name: str) -> Access | None:
    """Add the kernel's scratch as a buffer of one instruction."""
    return builder.scratch(name, attention_workspace_bytes(work, decisions.kernels.head_groups))


def forward(builder: TemplateBuilder, decisions: Decisions, shape: Shape) -> None:
    """Write attention forward: reads slot ``qkv``, writes ``attn`` and ``lse``."""
    tokens = shape.tokens
    work = _work(decisions, shape, tokens, tokens, "causal", backward=False)
    scratch = _workspace(builder, decisions, work, "attn.scratch")
    if shape.cp > 1:
        _pack(builder, decisions, shape)
        _hop(builder, decisions, shape, 1, "kv")
    builder.emit(
        "attn",
        "attention",
        Lane.COMPUTE,
        work,
        qkv=reads(builder.all("qkv")),
        out=writes(builder.all("attn")),
        lse=writes(builder.all("lse")),
        workspace=scratch,
    )
    for step in range(1, shape.cp):
        _ring_forward(builder, decisions, shape, step)


def backward(builder: TemplateBuilder, decisions: Decisions, shape: Shape) -> None:
    """Write attention backward: reads ``qkv``, ``attn``, ``lse``, ``d_attn``; writes ``d_qkv``."""
    tokens = shape.tokens
    work = _work(decisions, shape, tokens, tokens, "causal", backward=True)
    scratch = _workspace(builder, decisions, work, "attn.bwd.scratch")
    if shape.cp > 1:
        _pack(builder, decisions, shape, suffix=".bwd")
        _hop(builder, decisions, shape, 1, "kv", suffix=".bwd")
    builder.emit(
        "attn.bwd",
        "attention.bwd",
        Lane.COMPUTE,
        work,
        grad=reads(builder.all("d_attn")),
        qkv=reads(builder.all("qkv")),
        out=reads(builder.all("attn")),
        lse=reads(builder.all("lse")),
        grad_qkv=writes(builder.all("d_qkv")),
        workspace=scratch,
    )
    for step in range(1, shape.cp):
        _ring_backward(builder, decisions, shape, step)
    if shape.cp > 1:
        _add(builder, decisions, "d_kv.home", builder.all(_buffer("d_kv", shape.cp)), builder.all("d_qkv"))


def _add(builder: TemplateBuilder, decisions: Decisions, name: str, part: Rows, into: Rows) -> None:
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


def _buffer(kind: str, step: int) -> str:
    """Name of the exchange buffer that holds the keys and values (or gradients) of ``step``: two take turns."""
    return f"{kind}.ring{step % 2}"


def _ring_buffers(builder: TemplateBuilder, decisions: Decisions, shape: Shape, kind: str) -> None:
    for turn in range(2):
        if not builder.has(_buffer(kind, turn)):
            builder.own(_buffer(kind, turn), BufferClass.EXCHANGE, decisions.dtype, shape.tokens, 2 * shape.kv_width)


def _pack(builder: TemplateBuilder, decisions: Decisions, shape: Shape, suffix: str = "") -> None:
    """Copy this rank's keys and values out of the packed Q, K, V into the first exchange buffer."""
    _ring_buffers(builder, decisions, shape, "kv")
    size = shape.tokens * 2 * shape.kv_width * DTYPE_BYTES[decisions.dtype]
    builder.emit(
        f"kv.pack{suffix}",
        "kv.pack",
        Lane.COMPUTE,
        Rowwise("kv.pack", shape.tokens, size, size),
        qkv=reads(builder.all("qkv")),
        out=writes(builder.all(_buffer("kv", 0))),
    )


def _hop(
    builder: TemplateBuilder, decisions: Decisions, shape: Shape, step: int, kind: str, *, suffix: str = ""
) -> None:
    """Send this step's buffer to the next rank while the following step's arrives from the previous one."""
    size = shape.tokens * 2 * shape.kv_width * DTYPE_BYTES[decisions.dtype]
    builder.emit(
        f"{kind}.hop{step}{suffix}",
        "send_recv",
        Lane.P2P,
        Exchange(size, shape.cp, "cp"),
        send=reads(builder.all(_buffer(kind, step - 1))),
        recv=writes(builder.all(_buffer(kind, step))),
    )


def _early(slot: str, shape: Shape) -> Rows:
    """Return the early half of a rank's tokens of ``slot``."""
    return Rows(slot, 0, shape.tokens // 2)


def _ring_forward(builder: TemplateBuilder, decisions: Decisions, shape: Shape, step: int) -> None:
    if step + 1 < shape.cp:
        _hop(builder, decisions, shape, step + 1, "kv")
    tokens = shape.tokens
    if not builder.has("attn.part"):
        builder.own("attn.part", BufferClass.TRANSIENT, decisions.dtype, tokens, shape.q_width)
        builder.own("lse.part", BufferClass.TRANSIENT, "fp32", tokens, shape.heads)
    work = _work(decisions, shape, tokens, tokens // 2, "none", backward=False)
    builder.emit(
        f"attn.ring{step}",
        "attention",
        Lane.COMPUTE,
        work,
        qkv=reads(builder.all("qkv")),
        kv=reads(_early(_buffer("kv", step), shape)),
        out=writes(builder.all("attn.part")),
        lse=writes(builder.all("lse.part")),
        workspace=_workspace(builder, decisions, work, f"attn.ring{step}.scratch"),
    )
    row = shape.q_width * DTYPE_BYTES[decisions.dtype] + 4 * shape.heads
    builder.emit(
        f"attn.merge{step}",
        "attention.merge",
        Lane.COMPUTE,
        Rowwise("attention.merge", tokens, 2 * tokens * row, tokens * row),
        part=reads(builder.all("attn.part")),
        part_lse=reads(builder.all("lse.part")),
        out=accumulates(builder.all("attn")),
        lse=accumulates(builder.all("lse")),
    )


def _ring_backward(builder: TemplateBuilder, decisions: Decisions, shape: Shape, step: int) -> None:
    if step + 1 < shape.cp:
        _hop(builder, decisions, shape, step + 1, "kv", suffix=".bwd")
    _ring_buffers(builder, decisions, shape, "d_kv")
    tokens, width = shape.tokens, 2 * shape.kv_width
    if not builder.has("d_q.part"):
        builder.own("d_q.part", BufferClass.TRANSIENT, decisions.dtype, tokens, shape.q_width)
    sums = _buffer("d_kv", step)
    if step == 1:
        into = _early(sums, shape)
        _clear_late(builder, decisions, shape, sums)
    else:
        if not builder.has("d_kv.part"):
            builder.own("d_kv.part", BufferClass.TRANSIENT, decisions.dtype, tokens // 2, width)
        into = builder.all("d_kv.part")
    work = _work(decisions, shape, tokens, tokens // 2, "none", backward=True)
    builder.emit(
        f"attn.ring{step}.bwd",
        "attention.bwd",
        Lane.COMPUTE,
        work,
        grad=reads(builder.all("d_attn")),
        qkv=reads(builder.all("qkv")),
        kv=reads(_early(_buffer("kv", step), shape)),
        out=reads(builder.all("attn")),
        lse=reads(builder.all("lse")),
        grad_q=writes(builder.all("d_q.part")),
        grad_kv=writes(into),
        workspace=_workspace(builder, decisions, work, f"attn.ring{step}.bwd.scratch"),
    )
    _add(builder, decisions, f"d_q.add{step}", builder.all("d_q.part"), builder.all("d_qkv"))
    if step > 1:
        _add(builder, decisions, f"d_kv.add{step}", into, _early(sums, shape))
    _hop(builder, decisions, shape, step + 1, "d_kv")


def _clear_late(builder: TemplateBuilder, decisions: Decisions, shape: Shape, slot: str) -> None:
    """Zero the sums of the late half, to which the first rank on their way adds nothing."""
    rows = Rows(slot, shape.tokens // 2, shape.tokens - shape.tokens // 2)
    size = rows.tokens * 2 * shape.kv_width * DTYPE_BYTES[decisions.dtype]
    builder.emit("d_kv.clear", "zero", Lane.COMPUTE, Rowwise("zero", rows.tokens, 0, size), target=writes(rows))
