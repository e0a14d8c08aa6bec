"""Scratch memory of each kernel, in bytes: what a library allocates behind a call, so that a plan can count it.

Kernels belong to the plan because they change buffers (design.md, point 4). Sources: executor_facts.md items 0.4 and
2, the libraries' own code as quoted there; CPU figures from torch 2.13's operators, which return their results.
"""

from __future__ import annotations

from memo_sim.contract.errors import Infeasible
from memo_sim.contract.units import DTYPE_BYTES
from memo_sim.program.work import Attention

ATTENTION_KERNELS = ("flash2", "torch-flash", "torch-cudnn", "torch-flash-cpu")
"""flash2: flash-attn 2, results into given tensors. torch-*: aten operators, which return their results."""

LOSS_ROWS = 1024
"""Rows whose fp32 logits the loss kernel holds at once."""

NORM_ROWS = 4096
"""Rows that a norm's backward works on at once; its results are returned, then stored."""


def attention_workspace_bytes(work: Attention, head_groups: int) -> int:
    """Return the scratch of one attention call, played in ``head_groups`` groups of heads one after the other.

    flash-attn 2 backward: dq in fp32 (4 bytes x tokens x heads x head_dim), softmax_d in fp32, and with grouped
    queries dk and dv expanded to all heads. Operators that return their result add it.

    Raises:
        Infeasible: for a kernel this table does not know, or groups that do not divide the key/value heads.
    """
    if work.kernel not in ATTENTION_KERNELS:
        raise Infeasible("unknown attention kernel", got=work.kernel, wanted=", ".join(ATTENTION_KERNELS))
    if work.kv_heads % head_groups:
        raise Infeasible(
            "head_groups does not divide the key/value heads", got=head_groups, wanted=f"a divisor of {work.kv_heads}"
        )
    heads, kv_heads = work.heads // head_groups, work.kv_heads // head_groups
    size = DTYPE_BYTES[work.dtype]
    q_bytes = work.batch * work.q_tokens * heads * work.head_dim
    kv_bytes = work.batch * work.k_tokens * kv_heads * work.head_dim
    row = work.batch * work.q_tokens * heads
    returned = work.kernel != "flash2"
    if not work.backward:
        return (q_bytes * size + 4 * row) if returned else 0
    total = (q_bytes + 2 * kv_bytes) * size if returned else 0
    if work.kernel in ("flash2", "torch-flash"):
        total += 4 * q_bytes + 4 * row
        if heads != kv_heads:
            total += 2 * work.batch * work.k_tokens * heads * work.head_dim * size
    elif work.kernel == "torch-cudnn":
        total += 4 * q_bytes + 4 * row
    return total


def loss_workspace_bytes(rows: int, vocab: int) -> int:
    """Return the scratch of the loss over ``rows`` tokens: fp32 logits and gradient of a block of rows."""
    return 2 * 4 * min(rows, LOSS_ROWS) * vocab


def norm_backward_workspace_bytes(rows: int, features: int, dtype: str) -> int:
    """Return the scratch of a norm's backward: the input gradient of a block of rows and the fp32 weight gradients."""
    return min(rows, NORM_ROWS) * features * DTYPE_BYTES[dtype] + 2 * 4 * features
