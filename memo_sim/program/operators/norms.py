"""Norms of a layer: before its products, and behind attention and MLP; forward and backward."""

from __future__ import annotations

from typing import TYPE_CHECKING

from memo_sim.program.ir.builder import Rows, reads, writes
from memo_sim.program.layout.skeletal import normed_slot
from memo_sim.program.operators import workspaces as table

if TYPE_CHECKING:
    from memo_sim.program.operators.operators import OperatorWriter, RowBlock


def norm(
    writer: OperatorWriter, which: str, source: str, rows: RowBlock, at: RowBlock, *, for_wgrad: bool = False
) -> None:
    """Emit a norm of a row block; its output and statistics go to rows ``at`` of their buffers.

    ``for_wgrad``: no product reads the output, only the gradient of its weight.
    """
    op = "layer_norm" if writer.model.family == "gpt" else "rms_norm"
    shard = writer.shard_rows(which, at)
    made = writer.made(shard, writer.shape.hidden)
    writer.memory_bound(
        which,
        op,
        shard.tokens,
        writer.shape.hidden,
        writer.shape.hidden,
        features=writer.shape.hidden,
        scratch=table.norm_workspace_bytes(shard.tokens, writer.shape.hidden, writer.dtype, writer.rowwise),
        x=reads(writer.shard_rows(source, rows)),
        weight=writer.param(f"{which}.weight"),
        bias=writer.param(f"{which}.bias"),
        out=writes(made),
        stats=writes(writer.shard_rows(f"{which}_stats", at)),
    )
    writer.quantise(made, shard, for_wgrad=for_wgrad)


def post_norm(writer: OperatorWriter, which: str, source: Rows, rows: RowBlock) -> Rows:
    """Emit the norm behind attention or the MLP; return its rows. Without one, return ``source``.

    ``source`` is a skeletal tensor (``layout/skeletal.py``), as are the norm's statistics.
    """
    if not writer.model.post_norms:
        return source
    shard, hidden = writer.shard_rows(f"{which}.out", rows), writer.shape.hidden
    writer.own(shard.slot, writer.shape.shard_tokens, hidden)
    writer.memory_bound(
        which,
        "rms_norm",
        shard.tokens,
        hidden,
        hidden,
        features=hidden,
        scratch=table.norm_workspace_bytes(shard.tokens, hidden, writer.dtype, writer.rowwise),
        x=reads(source),
        weight=writer.param(f"{which}.weight"),
        out=writes(shard),
        stats=writes(writer.shard_rows(f"{which}_stats", rows)),
    )
    return shard


def post_norm_backward(writer: OperatorWriter, which: str, grad: Rows) -> Rows:
    """Emit the backward of the norm behind attention or the MLP, of all rows; return its input's gradient.

    Without such a norm, return ``grad``.
    """
    if not writer.model.post_norms:
        return grad
    hidden, out = writer.shape.hidden, writer.builder.all(writer.own(f"d_{which}", grad.tokens, writer.shape.hidden))
    writer.memory_bound(
        f"{which}.bwd",
        "rms_norm.bwd",
        grad.tokens,
        3 * hidden,
        2 * hidden,
        features=hidden,
        scratch=table.norm_backward_workspace_bytes(grad.tokens, hidden, writer.dtype, writer.rowwise),
        grad=reads(grad),
        x=reads(writer.builder.all(normed_slot(which, writer.shape))),
        stats=reads(writer.builder.all(f"{which}_stats")),
        weight=writer.param(f"{which}.weight"),
        out=writes(out),
        grad_weight=writer.grad(f"{which}.weight"),
    )
    return out


def norm_backward(
    writer: OperatorWriter,
    norm: str,
    *,
    grad: Rows,
    norm_input: str,
    residual_grad: str,
    out: str,
    rows: RowBlock,
    at: RowBlock,
    input_at: RowBlock | None = None,
) -> None:
    """Write the backward of a norm from the gradient of its output, and add that of the residual branch.

    ``rows``, ``at`` and ``input_at`` as in ``product_and_norm_backward``.
    """
    hidden = writer.shape.hidden
    op = "layer_norm.bwd" if writer.model.family == "gpt" else "rms_norm.bwd"
    written = writer.shard_rows(out, rows)
    writer.memory_bound(
        f"{norm}.bwd",
        op,
        written.tokens,
        4 * hidden,
        2 * hidden,
        features=hidden,
        scratch=table.norm_backward_workspace_bytes(written.tokens, hidden, writer.dtype, writer.rowwise),
        grad=reads(grad),
        x=reads(writer.shard_rows(norm_input, input_at or rows)),
        stats=reads(writer.shard_rows(f"{norm}_stats", at)),
        weight=writer.param(f"{norm}.weight"),
        residual_grad=reads(writer.shard_rows(residual_grad, rows)),
        out=writes(written),
        grad_weight=writer.grad(f"{norm}.weight"),
        grad_bias=writer.grad(f"{norm}.bias"),
    )
