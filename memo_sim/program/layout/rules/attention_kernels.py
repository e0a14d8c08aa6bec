"""What attention kernels do not go with, plain attention above all."""

from __future__ import annotations

from memo_sim.program.layout.rules.recompute import swaps
from memo_sim.program.layout.rules.rule import Rule

FLASH1_HEAD_DIM = 128
"""Largest head size of flash-attn 1 (csrc/flash_attn/fmha_api.cpp and flash_attn_triton.py at v1.0.9)."""

HEADS_OF_FLASH1 = Rule(
    name="FlashAttention 1: head_dim",
    breaks=lambda d: d.kernels.attention in ("flash1", "triton-flash") and d.model.head_dim > FLASH1_HEAD_DIM,
    what="FlashAttention 1 has no kernel for heads of this size",
    where="decisions.kernels.attention",
    got=lambda d: f"{d.kernels.attention} with heads of {d.model.head_dim}",
    wanted=f"heads of at most {FLASH1_HEAD_DIM}",
    hint="another --attention",
)

PLAIN_ATTENTION = (
    Rule(
        name="plain attention: cp",
        breaks=lambda d: d.kernels.attention == "plain" and d.layout.cp > 1,
        what="plain attention cannot be divided by context parallelism: it has no log-sum-exp to merge parts by",
        where="layout.cp",
        got=lambda d: f"{d.layout.cp} with plain attention",
        wanted="1",
        hint="leave --cp out, or a flash kernel",
    ),
    Rule(
        name="plain attention: swapped_tokens",
        breaks=lambda d: d.kernels.attention == "plain" and swaps(d) and d.recompute != "full",
        what="plain attention's scores are not swapped",
        where="decisions.swapped_tokens",
        got=lambda d: f"{d.swapped_tokens} with recompute {d.recompute}",
        wanted="recompute none or selective without swapping, or full",
        hint="--recompute full, or a flash kernel",
    ),
    Rule(
        name="plain attention: recompute",
        breaks=lambda d: d.kernels.attention == "plain" and d.recompute == "operators",
        what="recompute by operator keeps the output of one attention kernel, and plain attention is several",
        where="decisions.recompute",
        got="operators with plain attention",
        wanted="none, selective or full",
        hint="--recompute selective, or a flash kernel",
    ),
)

PLANNED_PLAIN_ATTENTION = Rule(
    name="plain attention: memory_policy",
    breaks=lambda d: d.kernels.attention == "plain" and d.memory_policy == "planned",
    what="plain attention has no planned arena: it is torch's operators, which allocate their results themselves",
    where="decisions.memory_policy",
    got="planned with plain attention",
    wanted="caching or eager (in a case file: memory_plan no)",
    hint="--memory-policy eager",
)
