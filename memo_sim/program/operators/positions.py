"""What happens to heads of Q and K before attention: their norm, and the rotary embedding."""

from __future__ import annotations

from typing import TYPE_CHECKING

from memo_sim.program.ir.builder import Access, Rows, accumulates, reads, writes
from memo_sim.program.operators import workspaces as table

if TYPE_CHECKING:
    from memo_sim.program.operators.operators import OperatorWriter


def positions(writer: OperatorWriter, packed: Rows, raw: Rows, *, first: int = 0) -> None:
    """Write the norm and the rotary embedding of Q and K, in place in the packed Q, K, V, if the model has them.

    The input of the norm is saved to ``raw``. ``first``: the rank's row at which the buffer begins.
    """
    tokens, width = packed.tokens, writer.shape.q_width + writer.shape.kv_width
    if writer.model.qk_norm:
        writer.memory_bound(
            "qk_norm",
            "qk_norm",
            tokens,
            width,
            2 * width,
            features=width,
            scratch=table.qk_norm_workspace_bytes(tokens, *_rotated(writer), writer.dtype),
            qkv=accumulates(packed),
            q_weight=writer.param("q_norm.weight"),
            k_weight=writer.param("k_norm.weight"),
            raw=writes(raw),
        )
    if not writer.model.learned_positions:
        _rotate(writer, "rotary", tokens, first, qkv=accumulates(packed))


def _rotate(writer: OperatorWriter, op: str, tokens: int, first: int, **rows: Access) -> None:
    """Write the rotary embedding of packed rows, or its backward, in place."""
    width = writer.shape.q_width + writer.shape.kv_width
    writer.memory_bound(
        op,
        op,
        tokens,
        width,
        width,
        features=width,
        scratch=table.rotary_workspace_bytes(tokens, *_rotated(writer), writer.dtype, writer.rowwise),
        first=first,
        theta=writer.shape.rope_theta,
        **rows,
    )


def positions_backward(writer: OperatorWriter, d_qkv: Rows, *, first: int = 0, raw: Rows | None = None) -> None:
    """Write the backward of ``positions``, in place in the gradient.

    ``raw``: the rows of ``qk_raw`` that it reads, unless they are those of the gradient.
    """
    tokens, width, grad = d_qkv.tokens, writer.shape.q_width + writer.shape.kv_width, accumulates(d_qkv)
    if not writer.model.learned_positions:
        _rotate(writer, "rotary.bwd", tokens, first, grad=grad)
    if writer.model.qk_norm:
        writer.memory_bound(
            "qk_norm.bwd",
            "qk_norm.bwd",
            tokens,
            2 * width,
            width,
            features=width,
            scratch=table.qk_norm_backward_workspace_bytes(tokens, *_rotated(writer), writer.dtype),
            grad=grad,
            raw=reads(raw or Rows("qk_raw", d_qkv.first, d_qkv.tokens)),
            q_weight=writer.param("q_norm.weight"),
            k_weight=writer.param("k_norm.weight"),
            grad_q_weight=writer.grad("q_norm.weight"),
            grad_k_weight=writer.grad("k_norm.weight"),
        )


def _rotated(writer: OperatorWriter) -> tuple[int, int]:
    """Number of heads of Q and K together, and features of one head."""
    return writer.shape.heads + writer.shape.kv_heads, writer.model.head_dim
