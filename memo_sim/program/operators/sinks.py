"""Sinks of attention: one more logit of every head's softmax."""

from __future__ import annotations

from typing import TYPE_CHECKING

from memo_sim.program.ir.builder import accumulates, reads
from memo_sim.program.operators import workspaces as table

if TYPE_CHECKING:
    from memo_sim.program.operators.operators import OperatorWriter


def sink(writer: OperatorWriter) -> None:
    """Write the sinks into attention's whole output and log-sum-exp, in place, if the model has them.

    A sink is one more logit of a head's softmax, whose value is zero. With the log-sum-exp of the keys alone, the
    output shrinks by ``exp(lse) / (exp(lse) + exp(sink)) = sigmoid(lse - sink)``; so attention's kernel, and the
    merges of its parts, need not know of it. Its backward takes the output and the log-sum-exp with the sink, and
    needs no change: ``ds = p (do v^T - rowsum(do out))`` holds with one more logit whose value is zero.
    """
    if not writer.model.sinks:
        return
    inside = writer.shape.attention
    writer.memory_bound(
        "attn.sink",
        "attention.sink",
        inside.tokens,
        inside.q_width + 2 * inside.heads,
        inside.q_width + 2 * inside.heads,
        scratch=table.sink_workspace_bytes(inside.tokens, inside.heads, writer.model.head_dim, writer.dtype),
        sinks=writer.param("sinks"),
        out=accumulates(writer.builder.all("attn")),
        lse=accumulates(writer.builder.all("lse")),
    )


def sink_backward(writer: OperatorWriter) -> None:
    """Write the gradient of the sinks: ``-sum over rows of exp(sink - lse) (do out)``, head by head."""
    if (grad_sinks := writer.grad("sinks")) is None:
        return
    inside, heads = writer.shape.attention, writer.shape.attention.heads
    writer.memory_bound(
        "attn.sink.bwd",
        "attention.sink.bwd",
        inside.tokens,
        2 * inside.q_width + 2 * heads,
        0,
        scratch=table.sink_backward_workspace_bytes(inside.tokens, heads, writer.model.head_dim, writer.dtype),
        grad=reads(writer.builder.all("d_attn")),
        out=reads(writer.builder.all("attn")),
        lse=reads(writer.builder.all("lse")),
        sinks=writer.param("sinks"),
        grad_sinks=grad_sinks,
    )
