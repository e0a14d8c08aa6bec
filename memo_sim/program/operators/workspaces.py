"""Scratch memory of each kernel, in bytes: what it or its library needs beside the operands, so that a plan counts it.

Kernels belong to the plan because they change buffers (CONTRIBUTING.md, "Lowering or engine?"). Sources: the libraries'
own code (flash-attention: csrc/flash_attn/flash_api.cpp, hopper/flash_api.cpp, cute/interface.py); CPU figures from
torch 2.13's operators, which return their results.
"""

from __future__ import annotations

from memo_sim.contract.errors import Infeasible
from memo_sim.contract.plan import RowwiseKernel
from memo_sim.contract.units import DTYPE_BYTES
from memo_sim.program.ir.work import Attention
from memo_sim.program.operators.head_groups import check_head_groups, flash3_head_dim, round_up

ATTENTION_KERNELS = ("flash2", "flash3", "flash4", "torch-flash", "torch-cudnn", "te-fused", "torch-flash-cpu")
"""flash*: flash-attn, results into given tensors. torch-*: aten operators, which return their results. te-fused: cuDNN
through transformer-engine, which takes contiguous tensors and returns its results."""

FUSED_KINDS = frozenset(
    f"{kind}{backward}" for kind in ("layer_norm", "rms_norm", "gelu", "swiglu", "rotary") for backward in ("", ".bwd")
) | {"cross_entropy"}
"""Row-wise works that a plan with fused kernels plays fused; torch plays the others in every plan."""

FLASH_TILE_TOKENS, FLASH_LEAST_TILE_TOKENS = 128, 64
"""The most and the least tokens that flash-attn 3's and 4's backward round up to at once."""

MULTIPROCESSORS = 148
"""Of the largest GPU there are profiles of (a B200; an H100 has 132, an A100 108)."""

LOSS_ROWS = 1024
"""Rows that the loss kernel works on at once."""

NORM_ROWS = 4096
"""Rows that norms, rotary and casts work on at once."""

MERGE_ROWS = 2048
"""Rows of attention's parts that are merged at once: few enough for a small scratch, so many that a GPU's kernels last
longer than their launches."""

SCORE_ELEMENTS = 2**22
"""Scores whose softmax is taken at once, in fp32: of one row at least."""

ADAMW_ELEMENTS = 2**20
"""Elements whose bf16 moments are widened at once."""

NORM_PROGRAMS = 256
"""Programs of a Triton norm's backward, each with a sum of its own: more than a GPU has multiprocessors."""

SCRATCH_ALIGNMENT_BYTES = 64
"""A workspace is cut into pieces that start on this boundary."""


def attention_workspace_bytes(work: Attention, head_groups: int, *, deterministic: bool = False) -> int:
    """Return the scratch of one attention call, played in ``head_groups`` groups of heads one after the other.

    flash-attn 2 backward: dq in fp32 (4 bytes x tokens x heads x head_dim), softmax_d in fp32, and with grouped
    queries dk and dv expanded to all heads. ``deterministic``: a dq for each of the parts that so few heads are split
    into, multiprocessors / (batch x heads) rounded up (csrc/flash_attn/flash_api.cpp). flash-attn 3 and 4:
    ``_wide_accumulators``. Operators that return their result add it, transformer-engine the contiguous copies of its
    operands.

    Raises:
        Infeasible: for a kernel this table does not know, groups that do not divide the key/value heads, or groups so
        few that the kernel's integers overflow.
    """
    if work.kernel not in ATTENTION_KERNELS:
        raise Infeasible("unknown attention kernel", got=work.kernel, wanted=", ".join(ATTENTION_KERNELS))
    check_head_groups(work, head_groups)
    heads, kv_heads = work.heads // head_groups, work.kv_heads // head_groups
    size = DTYPE_BYTES[work.dtype]
    q_bytes = work.batch * work.q_tokens * heads * work.head_dim
    kv_bytes = work.batch * work.k_tokens * kv_heads * work.head_dim
    row = work.batch * work.q_tokens * heads
    returned = work.kernel not in ("flash2", "flash3", "flash4")
    copied = (q_bytes + 2 * kv_bytes) * size if work.kernel == "te-fused" else 0
    if not work.backward:
        return copied + (q_bytes * size if returned else 0) + 4 * row
    if copied:
        copied += 2 * q_bytes * size + 4 * row
    total = copied + ((q_bytes + 2 * kv_bytes) * size if returned else 0)
    if work.kernel in ("flash2", "torch-flash"):
        parts = -(-MULTIPROCESSORS // (work.batch * heads)) if deterministic else 1
        total += 4 * q_bytes * parts + 2 * 4 * row
        if heads != kv_heads:
            total += 2 * work.batch * work.k_tokens * heads * work.head_dim * size
    elif work.kernel in ("torch-cudnn", "te-fused"):
        total += 4 * q_bytes + 2 * 4 * row
    elif work.kernel in ("flash3", "flash4"):
        total += _wide_accumulators(work, heads, kv_heads)
    return total


def _wide_accumulators(work: Attention, heads: int, kv_heads: int) -> int:
    """Return the scratch of flash-attn 3's and 4's backward on ``heads`` heads.

    fp32 dq with tokens and head_dim rounded up to tiles (of at most 128 tokens), three fp32 numbers a row (log-sum-exp
    with rows together, the same for base 2, and grad x out), with grouped queries fp32 dk and dv, and counters of
    tiles that order the sums (hopper/flash_api.cpp, flash_attn/cute/interface.py).
    """
    size = flash3_head_dim(work.head_dim) if work.kernel == "flash3" else round_up(work.head_dim, 32)
    rows = work.batch * heads * (work.q_tokens + FLASH_TILE_TOKENS)
    kv_rows = work.batch * kv_heads * (work.k_tokens + FLASH_TILE_TOKENS)
    counters = 4 * (rows + 4 * kv_rows) // FLASH_LEAST_TILE_TOKENS
    return 4 * rows * (size + 3) + (2 * 4 * kv_rows * size if heads != kv_heads else 0) + counters


def _pieces(*sizes: int) -> int:
    """Return the bytes of a workspace that is cut into pieces of these sizes."""
    return sum(-(-size // SCRATCH_ALIGNMENT_BYTES) * SCRATCH_ALIGNMENT_BYTES for size in sizes)


def _wide(elements: int, dtype: str) -> tuple[int, ...]:
    """Return the fp32 copy of a block that is not fp32 itself."""
    return () if dtype == "fp32" else (4 * elements,)


def loss_workspace_bytes(rows: int, vocab: int, dtype: str, rowwise: RowwiseKernel = "torch") -> int:
    """Return the scratch of the loss over ``rows`` tokens: five numbers a row, and the fp32 logits of a block.

    Triton: each row's loss, and their sum.
    """
    if rowwise == "triton":
        return _pieces(4 * rows, 4)
    block = min(rows, LOSS_ROWS)
    return _pieces(8 * block, block, *[4 * block] * 4, 4, *_wide(block * vocab, dtype))


def norm_workspace_bytes(rows: int, features: int, dtype: str, rowwise: RowwiseKernel = "torch") -> int:
    """Return the scratch of a norm: a block and a vector in fp32, none where they are fp32, or with Triton."""
    if rowwise == "triton":
        return 0
    return _pieces(*_wide(min(rows, NORM_ROWS) * features, dtype), *_wide(features, dtype))


def norm_backward_workspace_bytes(rows: int, features: int, dtype: str, rowwise: RowwiseKernel = "torch") -> int:
    """Return the scratch of a norm's backward: the normalised block, two numbers a row, two vectors of features.

    Triton: two sums over rows (of weight and bias) by program, and one more.
    """
    if rowwise == "triton":
        return _pieces(2 * 4 * norm_programs(rows) * features, 4 * features)
    block = min(rows, NORM_ROWS)
    return _pieces(4 * block * features, *[4 * block] * 2, *[4 * features] * 2, *_wide(block * features, dtype))


def norm_programs(rows: int) -> int:
    """Return how many programs play a Triton norm's backward."""
    return min(rows, NORM_PROGRAMS)


def qk_norm_workspace_bytes(rows: int, heads: int, head_dim: int, dtype: str) -> int:
    """Return the scratch of the norm over each of ``heads`` heads (of Q and K): a number a head and row."""
    block = min(rows, NORM_ROWS) * heads
    return _pieces(4 * block, *_wide(block * head_dim, dtype))


def qk_norm_backward_workspace_bytes(rows: int, heads: int, head_dim: int, dtype: str) -> int:
    """Return the scratch of that norm's backward: two blocks, two numbers a head and row, two vectors of a head."""
    block = min(rows, NORM_ROWS) * heads
    wide = _wide(block * head_dim, dtype)
    return _pieces(*[4 * block * head_dim] * 2, *[4 * block] * 2, *[4 * head_dim] * 2, *wide)


def rotary_workspace_bytes(rows: int, heads: int, head_dim: int, dtype: str, rowwise: RowwiseKernel = "torch") -> int:
    """Return the scratch of rotating ``heads`` heads: a block's positions, cosines and sines, and half of its heads.

    Triton needs no copy of the heads.
    """
    block, half, size = min(rows, NORM_ROWS), head_dim // 2, DTYPE_BYTES[dtype]
    tables = [4 * block * half] * 2
    narrow = [] if dtype == "fp32" else [size * block * half] * 2
    kept = [] if rowwise == "triton" else [size * block * heads * half]
    return _pieces(4 * block, *tables, *narrow, *kept)


def divided_ids_bytes(rows: int) -> int:
    """Return the scratch of looking tokens up in a part of the vocabulary: a block's ids there, and which are not."""
    block = min(rows, NORM_ROWS)
    return _pieces(8 * block, block)


def merge_scratch_bytes(heads: int, head_dim: int, dtype: str) -> int:
    """Return what merging parts of attention takes: a weight a row and head, and both outputs in fp32.

    No program declares it: the executor makes it once, for all merges, and counts it in its reserve.
    """
    block = MERGE_ROWS * heads
    return _pieces(4 * block, *_wide(block * head_dim, dtype) * 2)


def score_softmax_workspace_bytes(rows: int, keys: int, dtype: str, *, masked: bool) -> int:
    """Return the scratch of a softmax over written scores: a number a row, a block of scores in fp32.

    ``masked``: the positions of a block's queries and of all keys, and which keys come later.
    """
    block = score_rows(rows, keys)
    mask = (8 * block, 8 * keys, block * keys) if masked else ()
    return _pieces(4 * block, *_wide(block * keys, dtype), *mask)


def score_softmax_backward_workspace_bytes(rows: int, keys: int, dtype: str) -> int:
    """Return the scratch of its backward: a number a row, a block of products and one of gradients in fp32."""
    block = score_rows(rows, keys)
    return _pieces(4 * block, 4 * block * keys, *_wide(block * keys, dtype))


def score_rows(rows: int, keys: int) -> int:
    """Return how many rows of scores a softmax takes at once."""
    return min(rows, max(1, SCORE_ELEMENTS // keys))


def embed_backward_workspace_bytes(rows: int, features: int, dtype: str, *, divided: bool = False) -> int:
    """Return the scratch of adding gradient rows to an fp32 table: a block of them in fp32.

    ``divided``: the table is a part of the vocabulary, and rows of other tokens are cleared.
    """
    block = min(rows, NORM_ROWS)
    if divided:
        return _pieces(8 * block, block, 4 * block * features)
    return _pieces(*_wide(block * features, dtype))


def bias_backward_workspace_bytes(rows: int, features: int, dtype: str) -> int:
    """Return the scratch of a sum over rows: the sum, and a block of rows in fp32."""
    return _pieces(4 * features, *_wide(min(rows, NORM_ROWS) * features, dtype))


def wgrad_workspace_bytes(m: int, n: int, tokens: int, dtype: str, attention_kernel: str) -> int:
    """Return the scratch of an (m x n) weight gradient that accumulates in fp32.

    CUDA multiplies bf16 into fp32; the CPU's products return their operands' dtype, so blocks of rows are widened.
    """
    if dtype == "fp32" or not on_cpu(attention_kernel):
        return 0
    block = min(tokens, NORM_ROWS)
    return _pieces(4 * block * m, 4 * block * n)


def sum_workspace_bytes(rows: int, features: int, dtype: str, into: str, attention_kernel: str) -> int:
    """Return the scratch of adding rows of one dtype to sums of another.

    CUDA widens as it adds; the CPU's sums first widen their operands, here a block of rows at a time.
    """
    if dtype == into or not on_cpu(attention_kernel):
        return 0
    return _pieces(DTYPE_BYTES[into] * min(rows, NORM_ROWS) * features)


def adamw_workspace_bytes(elements: int, states: str) -> int:
    """Return the scratch of the update: both moments of a block of elements in fp32 when they are stored in bf16."""
    block = min(elements, ADAMW_ELEMENTS)
    return _pieces(4 * block, 4 * block) if states == "bf16" else 0


def on_cpu(attention_kernel: str) -> bool:
    """Return whether a plan with this attention kernel plays on a CPU."""
    return attention_kernel == "torch-flash-cpu"
