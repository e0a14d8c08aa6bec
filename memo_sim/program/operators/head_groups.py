"""Head groups: runs attention in several groups of heads, so that no kernel's 32-bit element count overflows.

Limits of the kernels ("next 128" = rounded up to a multiple of 128):

    torch-flash, flash2   batch x heads x tokens (next 128) x max(head_dim, 32) <= 2**31. The limit is exact: above it
                          backward reads memory out of bounds (TabPFN#1184, flash-attention#1500).
    flash1, triton-flash  the same limit, assumed: the tensors have the same shapes
    flash4, cuDNN         batch x heads x tokens x head_dim (next 32) <= 2**31. No fault above it is known, but the
                          libraries do not test there (nearest reports: flash-attention#2611, cudnn-frontend#965).
    flash3                tokens (next 128) x head_dim (next size it is built for) < 2**31 for one head. The
                          accumulator of its gradient has this 32-bit shape; offsets have 64 bits
                          (hopper/flash_api.cpp).
    torch-flash-cpu       no limit: 64-bit offsets

A group contains whole key/value heads, each with all of its query heads. The number of groups therefore divides the
key/value heads. Example: 32 heads of 128 at 1,048,576 tokens are 2**32 elements, so two groups.
"""

from __future__ import annotations

from memo_sim.contract.errors import Infeasible
from memo_sim.program.ir.work import Attention

INT32_ELEMENTS = 2**31

FLASH3_HEAD_DIMS = (64, 96, 128, 192, 256)
"""Head sizes that flash-attn 3 is built for; it rounds other sizes up to the next one."""


def round_up(number: int, multiple: int) -> int:
    """Return ``number`` rounded up to a multiple of ``multiple``."""
    return -(-number // multiple) * multiple


def flash3_head_dim(head_dim: int) -> int:
    """Return the head size that flash-attn 3 computes with."""
    return next((size for size in FLASH3_HEAD_DIMS if head_dim <= size), FLASH3_HEAD_DIMS[-1])


def indexed_elements(work: Attention, groups: int) -> int:
    """Return the largest element count that ``work``'s kernel holds in 32 bits; 0 for a kernel without a limit."""
    tokens, heads = max(work.q_tokens, work.k_tokens), work.heads // groups
    if work.kernel in ("torch-flash", "flash2", "flash1", "triton-flash"):
        return work.batch * heads * round_up(tokens, 128) * max(work.head_dim, 32)
    if work.kernel in ("flash4", "torch-cudnn", "te-fused"):
        return work.batch * heads * tokens * round_up(work.head_dim, 32)
    if work.kernel == "flash3":  # plus 1: a shape equals the element count, the largest index is one less
        return round_up(tokens, 128) * flash3_head_dim(work.head_dim) + 1
    return 0


def fewest_head_groups(work: Attention) -> int:
    """Return the smallest number of head groups in which ``work`` does not overflow.

    Raises:
        Infeasible: when even one group for each key/value head overflows.
    """
    for groups in range(1, work.kv_heads + 1):
        if work.kv_heads % groups == 0 and indexed_elements(work, groups) <= INT32_ELEMENTS:
            return groups
    raise _overflow(work, work.kv_heads, "a shorter sequence, a smaller micro-batch or more devices")


def check_head_groups(work: Attention, groups: int) -> None:
    """Reject a number of head groups that does not divide the key/value heads or makes the kernel overflow.

    Raises:
        Infeasible: names the bound and the smallest number of groups that keeps it.
    """
    if work.kv_heads % groups:
        raise Infeasible(
            "head_groups does not divide the key/value heads", got=groups, wanted=f"a divisor of {work.kv_heads}"
        )
    if indexed_elements(work, groups) > INT32_ELEMENTS:
        raise _overflow(work, groups, f"head_groups {fewest_head_groups(work)}")


def _overflow(work: Attention, groups: int, wanted: str) -> Infeasible:
    found = indexed_elements(work, groups)
    return Infeasible(
        f"{work.kernel} attention counts more elements than 32 bits hold",
        where="decisions.kernels.head_groups",
        got=f"head_groups {groups}: {found} elements, at most {INT32_ELEMENTS}",
        wanted=wanted,
    )
