"""Workspace of each kernel, in bytes: the scratch memory that it or its library needs beside the operands.

Kernels belong to the plan because they change buffers (CONTRIBUTING.md, "Lowering or engine?"). Sources: the libraries'
own code (flash-attention: csrc/flash_attn/flash_api.cpp, hopper/flash_api.cpp, flash_attn/cute/interface.py), and for
the CPU the operators of torch 2.13, which return their results in new tensors.
"""

from __future__ import annotations

from memo_sim.contract import attention_kernels
from memo_sim.contract.errors import Infeasible
from memo_sim.contract.experts import Experts
from memo_sim.contract.knobs import RowwiseKernel
from memo_sim.contract.units import DTYPE_BYTES
from memo_sim.program.ir.work import Attention, WindowedAttention
from memo_sim.program.operators.head_groups import check_head_groups, flash3_head_dim, round_up

ATTENTION_KERNELS = tuple(name for name in attention_kernels.ATTENTION_KERNELS if name != "plain")
"""flash*: flash-attn, which writes results into given tensors. torch-*: aten operators, which return their results in
new tensors. te-fused: cuDNN through transformer-engine, which needs contiguous tensors and returns new ones. Plain
attention is no kernel of one call, but products and passes over scores (``program/attention/plain.py``)."""

FIRST_GENERATION = ("flash1", "triton-flash")
"""Kernels without grouped queries: keys and values are repeated for every query head."""

IN_PLACE = (*FIRST_GENERATION, "flash2", "flash3", "flash4")
"""Kernels that write results into given tensors."""

PADS_DOCUMENTS = ("flash1", "flash2", "flash3", "flash4", "torch-flash")
"""Kernels whose backward over packed documents sums in fp32 rows that are rounded up to tiles for each document
(flash-attention: csrc/flash_attn/flash_api.cpp and hopper/flash_api.cpp, ``total_q + 128 * batch``)."""

FUSED_KINDS = frozenset(
    f"{kind}{backward}" for kind in ("layer_norm", "rms_norm", "gelu", "swiglu", "rotary") for backward in ("", ".bwd")
) | {"cross_entropy"}
"""Row-wise works that run as fused kernels when the plan asks for them, as do ``LATER_KINDS``; others run in torch."""

ROUNDED_KINDS = frozenset({"swap.round", "swap.widen"})
"""Row-wise works on copy lanes that run as fused kernels in the same plans; their workspace and bytes are torch's."""

HEAD_KINDS = frozenset({"qk_norm", "qk_norm.bwd", "attention.merge"})
"""Works on each head of a row, of which the same is true: norms of Q and K, and merges of partial attention."""

LATER_KINDS = HEAD_KINDS | ROUNDED_KINDS
"""Works whose fused kernels came after profiles: they have torch's price until they are measured."""

FLASH_TILE_TOKENS, FLASH_LEAST_TILE_TOKENS = 128, 64
"""The largest and the smallest tile of tokens in the backward of flash-attn 3 and 4, which round up to whole tiles."""

MULTIPROCESSORS = 148
"""Multiprocessors of the largest GPU that has a profile (B200: 148; an H100 has 132, an A100 108)."""

LOSS_ROWS = 1024
"""Rows in one block of the loss kernel."""

LOSS_COLUMNS = 8192
"""Largest tile of the vocabulary in a loss with the classifier's product inside: a product with so many columns reaches
its full rate."""

LOSS_COLUMNS_GRANULE = 64
"""Tiles of the vocabulary are multiples of this many columns, apart from the last."""

LOSS_SPLIT_COLUMNS = 2048
"""Columns of one Triton program of such a loss, which leaves three numbers a row; they are combined in their order."""

NORM_ROWS = 4096
"""Rows in one block of norms, rotary embeddings and casts."""

MERGE_ROWS = 2048
"""Rows of attention outputs in one block of a merge: few enough for a small scratch, and enough that a GPU kernel takes
longer than its launch."""

SCORE_ELEMENTS = 2**22
"""Scores in one block of a softmax, in fp32; a block has at least one row."""

ADAMW_ELEMENTS = 2**20
"""Elements in one block of bf16 moments that AdamW widens to fp32."""

NORM_PROGRAMS = 256
"""Programs of a Triton norm's backward, each with its own partial sum; more than a GPU has multiprocessors."""

SCRATCH_ALIGNMENT_BYTES = 64
"""Alignment of the pieces of a workspace."""


def _padded_values_bytes(work: Attention, heads: int, kv_heads: int) -> int:
    """Return the bytes of tensors with padded values: the values, the output, in backward their gradients too."""
    if not work.padded:
        return 0
    q_bytes, kv_bytes = work.q_tokens * heads, work.k_tokens * kv_heads
    elements = work.batch * work.head_dim * (q_bytes + kv_bytes) * (2 if work.backward else 1)
    return elements * DTYPE_BYTES[work.dtype]


def attention_workspace_bytes(work: Attention, head_groups: int, *, deterministic: bool = False) -> int:
    """Return the scratch of one attention call, which runs in ``head_groups`` groups of heads one after the other.

    - flash-attn 1 forward sums its output in fp32 (o_tmp), backward dq in fp32 (dq_tmp) with one fp32 number a row
      (csrc/flash_attn/fmha_api.cpp at v1.0.9). Its Triton version sums the output in registers and stores one more
      number a row (flash_attn/flash_attn_triton.py). Neither knows grouped queries: keys, values and their gradients
      exist for every query head.
    - flash-attn 2 backward needs dq in fp32 (4 bytes x tokens x heads x head_dim) and softmax_d in fp32. With grouped
      queries it also needs dk and dv expanded to all heads. With ``deterministic`` it splits the sum of dq and needs
      one dq for each split: multiprocessors / (batch x heads), rounded up (csrc/flash_attn/flash_api.cpp).
    - flash-attn 3 and 4 backward: see ``_wide_accumulators``.
    - flash-attn 2 to 4 copy no operand whose last dimension is contiguous, such as views of some of the heads
      (flash_attn/flash_attn_interface.py, hopper/flash_api.cpp, flash_attn/cute/cute_dsl_utils.py: maybe_contiguous).
    - Operators that return their result in new tensors need those too.
    - torch's flash attention copies the output and its gradient in backward unless they are contiguous, and views of
      some of the heads are not (aten/src/ATen/native/transformers/cuda/attention_backward.cu of torch 2.11 and 2.13).
    - cuDNN backward sums dq in fp32 (cudnn-frontend: node/scaled_dot_product_flash_attention.h, dQ_accum). With grouped
      queries dk and dv of all heads are virtual tensors there: only packed sequences give them memory. Peaks published
      for grouped queries on H100s (trl#6845) leave no room for them either. torch copies neither the output nor its
      gradient for cuDNN (aten/src/ATen/native/cudnn/MHA.cpp).
    - transformer-engine needs contiguous copies of its operands.
    - Kernels that take no values narrower than queries and keys get padded copies of the values, and write a padded
      output (memo-exec pads as transformers does for flash-attn 2).

    Raises:
        Infeasible: for an unknown kernel, for a number of groups that does not divide the key/value heads, or when the
            kernel's integers overflow.
    """
    if work.kernel not in ATTENTION_KERNELS:
        raise Infeasible("unknown attention kernel", got=work.kernel, wanted=", ".join(ATTENTION_KERNELS))
    check_head_groups(work, head_groups)
    heads, kv_heads = work.heads // head_groups, work.kv_heads // head_groups
    size = DTYPE_BYTES[work.dtype]
    q_bytes = work.batch * work.q_tokens * heads * work.head_dim
    width = work.head_dim if work.padded else work.value_dim
    out_bytes = work.batch * work.q_tokens * heads * width
    kv_bytes = work.batch * work.k_tokens * kv_heads * (work.head_dim + width)
    padded = _padded_values_bytes(work, heads, kv_heads)
    row = work.batch * work.q_tokens * heads
    returned = work.kernel not in IN_PLACE
    if work.kernel in FIRST_GENERATION:
        sums = 2 * 4 * row if work.kernel == "triton-flash" and not work.backward else 4 * q_bytes + 4 * row
        return sums + repeated_kv_bytes(work) // head_groups * (2 if work.backward else 1)
    copied = (q_bytes + kv_bytes) * size if work.kernel == "te-fused" else 0
    if not work.backward:
        return copied + (out_bytes * size if returned else 0) + 4 * row + padded
    if copied:
        copied += 2 * out_bytes * size + 4 * row
    total = copied + ((q_bytes + kv_bytes) * size if returned else 0) + padded
    if isinstance(work, WindowedAttention) and work.kernel == "torch-flash-cpu":
        total += 4 * kv_bytes  # the keys of neighbouring blocks of queries overlap; sums in fp32
    if work.kernel in ("flash2", "torch-flash"):
        parts = -(-MULTIPROCESSORS // (work.batch * heads)) if deterministic else 1
        total += 4 * q_bytes * parts + 2 * 4 * row
        if heads != kv_heads:
            total += 2 * work.batch * work.k_tokens * heads * work.head_dim * size
        if work.kernel == "torch-flash" and head_groups > 1:
            total += 2 * q_bytes * size
    elif work.kernel in ("torch-cudnn", "te-fused"):
        total += 4 * q_bytes + 2 * 4 * row
    elif work.kernel in ("flash3", "flash4"):
        total += _wide_accumulators(work, heads, kv_heads)
    return total


def repeated_kv_bytes(work: Attention) -> int:
    """Return the bytes of keys and values repeated for every query head; 0 for kernels that know grouped queries."""
    if work.kernel not in FIRST_GENERATION or work.heads == work.kv_heads:
        return 0
    return 2 * work.batch * work.k_tokens * work.heads * work.head_dim * DTYPE_BYTES[work.dtype]


def _wide_accumulators(work: Attention, heads: int, kv_heads: int) -> int:
    """Return the scratch of the backward of flash-attn 3 and 4 on ``heads`` heads.

    - dq in fp32, with tokens and head_dim rounded up to tiles (of at most 128 tokens);
    - three fp32 numbers a row: the log-sum-exp with rows together, the same to base 2, and grad x out;
    - with grouped queries dk and dv in fp32;
    - counters of tiles, which order the sums.

    Sources: hopper/flash_api.cpp, flash_attn/cute/interface.py.
    """
    size = flash3_head_dim(work.head_dim) if work.kernel == "flash3" else round_up(work.head_dim, 32)
    rows = work.batch * heads * (work.q_tokens + FLASH_TILE_TOKENS)
    kv_rows = work.batch * kv_heads * (work.k_tokens + FLASH_TILE_TOKENS)
    counters = 4 * (rows + 4 * kv_rows) // FLASH_LEAST_TILE_TOKENS
    return 4 * rows * (size + 3) + (2 * 4 * kv_rows * size if heads != kv_heads else 0) + counters


def _pieces(*sizes: int) -> int:
    """Return the bytes of a workspace that consists of aligned pieces of these sizes."""
    return sum(-(-size // SCRATCH_ALIGNMENT_BYTES) * SCRATCH_ALIGNMENT_BYTES for size in sizes)


def sink_workspace_bytes(rows: int, heads: int, head_dim: int, dtype: str) -> int:
    """Return the scratch of writing sinks into attention's output: factors, the sinks, and a block of wide rows."""
    block = min(rows, NORM_ROWS)
    return _pieces(4 * block * heads, 4 * heads, *_wide(block * heads * head_dim, dtype))


def sink_backward_workspace_bytes(rows: int, heads: int, head_dim: int, dtype: str) -> int:
    """Return the scratch of the sinks' gradients: products and their sums by head, and a block of wide rows."""
    block, elements = min(rows, NORM_ROWS), min(rows, NORM_ROWS) * heads * head_dim
    return _pieces(4 * elements, 4 * block * heads, 4 * block * heads, 4 * heads, 4 * heads, *_wide(elements, dtype))


def _wide(elements: int, dtype: str) -> tuple[int, ...]:
    """Return the size of a block's fp32 copy, as a tuple; empty when the block is fp32 itself."""
    return () if dtype == "fp32" else (4 * elements,)


def loss_workspace_bytes(
    rows: int,
    vocab: int,
    dtype: str,
    rowwise: RowwiseKernel = "torch",
    *,
    in_place: bool = False,
    policy: bool = False,
) -> int:
    """Return the scratch of the loss over ``rows`` tokens.

    torch: for a block of rows, six columns (indices, a mask and four in fp32) and the logits in fp32, and one sum.
    Triton: the loss of each row, and their sum.
    ``in_place``: no buffer has room for the exponentials of fp32 logits, so they need the block as well.
    ``policy``: torch's, with the columns of a policy's objective (``policy_columns``).
    """
    if rowwise == "triton":
        return _pieces(4 * rows, 4)
    block = min(rows, LOSS_ROWS)
    wide = (4 * block * vocab,) if in_place else _wide(block * vocab, dtype)
    return _pieces(8 * block, block, *[4 * block] * 4, 4, *wide, *policy_columns(block, policy=policy))


def loss_tiles(vocab: int) -> list[tuple[int, int]]:
    """Return (first column, columns) of each tile of a rank's vocabulary; tiles are equal, but for the last."""
    granule = LOSS_COLUMNS_GRANULE
    width = min(vocab, -(-vocab // -(-vocab // LOSS_COLUMNS) // granule) * granule)
    return [(first, min(width, vocab - first)) for first in range(0, vocab, width)]


def linear_loss_workspace_bytes(
    rows: int, vocab: int, dtype: str, hidden: int, *, triton: bool, policy: bool = False, on_cpu: bool = False
) -> int:
    """Return the scratch of a loss with the classifier's product inside, which its instructions share.

    torch: for a block of rows, four columns (indices, a mask and two in fp32) and the tile's logits in fp32.
    Triton: three numbers of each row for every split of the vocabulary.
    Of both, for the sum of losses: two columns and one number, with the columns of a policy's objective. CUDA
    multiplies bf16 into fp32 sums; a CPU first widens a block of the tile's gradient and the tile of the weight.
    """
    block, tile = min(rows, LOSS_ROWS), loss_tiles(vocab)[0][1]
    if triton:
        parts = _pieces(*[4 * rows * loss_splits(vocab)] * 3)
    else:
        parts = _pieces(8 * block, block, *[4 * block] * 2, *_wide(block * tile, dtype))
    summed = _pieces(4 * rows, rows, 4, *policy_columns(rows, policy=policy))
    products = _pieces(4 * min(rows, NORM_ROWS) * tile, 4 * tile * hidden) if on_cpu and dtype != "fp32" else 0
    return max(parts, summed, products)


def loss_splits(vocab: int) -> int:
    """Return the number of Triton programs that share the vocabulary of a row."""
    return -(-vocab // LOSS_SPLIT_COLUMNS)


POLICY_COLUMNS = 4
"""fp32 numbers of a row that a policy's objective computes with."""


def policy_columns(rows: int, *, policy: bool) -> list[int]:
    """Return the bytes of each column that a policy's objective takes; none for next-token."""
    return [4 * rows] * (POLICY_COLUMNS if policy else 0)


def picked_targets_bytes(rows: int, *, policy: bool = False) -> int:
    """Return the scratch of picking one logit of each row: its column, a mask, a number of each row, and one sum.

    ``policy``: with the columns of a policy's objective."""
    return _pieces(8 * rows, rows, 4 * rows, 4, *policy_columns(rows, policy=policy))


def norm_workspace_bytes(rows: int, features: int, dtype: str, rowwise: RowwiseKernel = "torch") -> int:
    """Return the scratch of a norm: a block of rows and a vector in fp32; 0 when they are fp32 or with Triton."""
    if rowwise == "triton":
        return 0
    return _pieces(*_wide(min(rows, NORM_ROWS) * features, dtype), *_wide(features, dtype))


def norm_backward_workspace_bytes(rows: int, features: int, dtype: str, rowwise: RowwiseKernel = "torch") -> int:
    """Return the scratch of a norm's backward.

    torch: for a block of rows, the normalised rows, two numbers a row, and fp32 copies; two vectors of features.
    Triton: two sums over rows (of weight and bias) for each program, and one vector of features.
    """
    if rowwise == "triton":
        return _pieces(2 * 4 * norm_programs(rows) * features, 4 * features)
    block = min(rows, NORM_ROWS)
    return _pieces(4 * block * features, *[4 * block] * 2, *[4 * features] * 2, *_wide(block * features, dtype))


def norm_programs(rows: int) -> int:
    """Return the number of programs of a Triton norm's backward."""
    return min(rows, NORM_PROGRAMS)


def qk_norm_workspace_bytes(rows: int, heads: int, head_dim: int, dtype: str) -> int:
    """Return the scratch of the norm over each of ``heads`` heads (of Q and K): one number for each head and row."""
    block = min(rows, NORM_ROWS) * heads
    return _pieces(4 * block, *_wide(block * head_dim, dtype))


def qk_norm_backward_workspace_bytes(rows: int, heads: int, head_dim: int, dtype: str) -> int:
    """Return the scratch of the backward of the norm of Q and K.

    Two blocks, two numbers for each head and row, and two vectors of one head.
    """
    block = min(rows, NORM_ROWS) * heads
    wide = _wide(block * head_dim, dtype)
    return _pieces(*[4 * block * head_dim] * 2, *[4 * block] * 2, *[4 * head_dim] * 2, *wide)


def rotary_workspace_bytes(rows: int, heads: int, head_dim: int, dtype: str, rowwise: RowwiseKernel = "torch") -> int:
    """Return the scratch of the rotary embedding of ``heads`` heads.

    For a block of rows: positions, cosines and sines, and half the features of its heads. Triton needs no copy of the
    heads. It needs no tables either since it computes them itself, but plans pin their program, and with it this size.
    """
    block, half, size = min(rows, NORM_ROWS), head_dim // 2, DTYPE_BYTES[dtype]
    tables = [4 * block * half] * 2
    narrow = [] if dtype == "fp32" else [size * block * half] * 2
    kept = [] if rowwise == "triton" else [size * block * heads * half]
    return _pieces(4 * block, *tables, *narrow, *kept)


def latent_norm_workspace_bytes(rows: int, features: int, dtype: str) -> int:
    """Return the scratch of the norms of latents with ``features`` features together: a block of rows in fp32."""
    return _pieces(*_wide(min(rows, NORM_ROWS) * features, dtype))


def latent_norm_backward_workspace_bytes(rows: int, features: int) -> int:
    """Return the scratch of the backward of the norms of latents, which have ``features`` features together.

    For a block of rows: the normalised rows, their gradients and a mean; and two vectors of features.
    """
    block = min(rows, NORM_ROWS)
    return _pieces(*[4 * block * features] * 2, 4 * block, *[4 * features] * 2)


def latent_rotary_workspace_bytes(rows: int, heads: int, rope_dim: int, dtype: str) -> int:
    """Return the scratch of assembling Q, K and V from the products of latents.

    Rotary tables of a block, half of the rotary features of each head of Q and of the shared key, and the rotated key.
    """
    size = DTYPE_BYTES[dtype]
    return rotary_workspace_bytes(rows, heads + 1, rope_dim, dtype) + _pieces(size * min(rows, NORM_ROWS) * rope_dim)


def divided_ids_bytes(rows: int) -> int:
    """Return the scratch of a lookup in one rank's part of the vocabulary: local ids of a block, and a mask."""
    block = min(rows, NORM_ROWS)
    return _pieces(8 * block, block)


def merge_scratch_bytes(heads: int, head_dim: int, dtype: str) -> int:
    """Return the scratch of merging two attention outputs: a weight for each row and head, and both outputs in fp32.

    No program declares this buffer: the executor allocates it once for all merges and counts it in its reserve.
    """
    block = MERGE_ROWS * heads
    return _pieces(4 * block, *_wide(block * head_dim, dtype) * 2)


def score_softmax_workspace_bytes(rows: int, keys: int, dtype: str, *, masked: bool) -> int:
    """Return the scratch of a softmax over scores in memory: one number a row, and a block of scores in fp32.

    ``masked`` adds the positions of a block's queries and of all keys, and the mask of later keys.
    """
    block = score_rows(rows, keys)
    mask = (8 * block, 8 * keys, block * keys) if masked else ()
    return _pieces(4 * block, *_wide(block * keys, dtype), *mask)


def score_softmax_backward_workspace_bytes(rows: int, keys: int, dtype: str) -> int:
    """Return the scratch of the softmax's backward: one number a row, and blocks of products and gradients in fp32."""
    block = score_rows(rows, keys)
    return _pieces(4 * block, 4 * block * keys, *_wide(block * keys, dtype))


def score_rows(rows: int, keys: int) -> int:
    """Return the number of rows in one block of a softmax over scores."""
    return min(rows, max(1, SCORE_ELEMENTS // keys))


def embed_backward_workspace_bytes(rows: int, features: int, dtype: str, *, divided: bool = False) -> int:
    """Return the scratch of adding gradient rows to an fp32 embedding table: a block of these rows in fp32.

    ``divided``: the table is one rank's part of the vocabulary. Rows of other tokens are then zeroed, which also takes
    local ids and a mask.
    """
    block = min(rows, NORM_ROWS)
    if divided:
        return _pieces(8 * block, block, 4 * block * features)
    return _pieces(*_wide(block * features, dtype))


def bias_backward_workspace_bytes(rows: int, features: int, dtype: str) -> int:
    """Return the scratch of a sum over rows: the sum, and a block of rows in fp32."""
    return _pieces(4 * features, *_wide(min(rows, NORM_ROWS) * features, dtype))


def wgrad_workspace_bytes(m: int, n: int, tokens: int, dtype: str, attention_kernel: str, *, into: str = "fp32") -> int:
    """Return the scratch of an (m x n) weight gradient that is summed in ``into``.

    CUDA multiplies bf16 into fp32. Products on the CPU return the dtype of their operands, so blocks of rows are
    widened to fp32 first.
    """
    if dtype == into or not on_cpu(attention_kernel):
        return 0
    block = min(tokens, NORM_ROWS)
    return _pieces(4 * block * m, 4 * block * n)


def sum_workspace_bytes(rows: int, features: int, dtype: str, into: str, attention_kernel: str) -> int:
    """Return the scratch of adding rows of one dtype to sums of another.

    CUDA widens while it adds. On the CPU a sum first widens its operands, here one block of rows at a time.
    """
    if dtype == into or not on_cpu(attention_kernel):
        return 0
    return _pieces(DTYPE_BYTES[into] * min(rows, NORM_ROWS) * features)


def router_workspace_bytes(rows: int, features: int, experts: int, dtype: str, *, bias: bool = False) -> int:
    """Return the scratch of the router's product, or of its input's gradient: a block of rows and its weight in fp32.

    0 when they are fp32. ``bias``: with the router's bias in fp32.
    """
    own = _wide(experts, dtype) if bias else ()
    return _pieces(*_wide(min(rows, NORM_ROWS) * features, dtype), *_wide(experts * features, dtype), *own)


def router_wgrad_workspace_bytes(
    rows: int, features: int, experts: int, dtype: str, *, into: str = "fp32", bias: bool = False
) -> int:
    """Return the scratch of the gradient of the router's weight: a block of rows in fp32.

    Where it is summed in another dtype than fp32, the product and a copy of it in that dtype too. ``bias``: with the
    sums of the bias's gradient.
    """
    size = DTYPE_BYTES[into]
    product = () if into == "fp32" else (4 * experts * features, size * experts * features)
    own = (4 * experts, size * experts) if bias else ()
    return _pieces(*_wide(min(rows, NORM_ROWS) * features, dtype), *product, *own)


def route_workspace_bytes(rows: int, experts: Experts | None = None) -> int:
    """Return the scratch of choosing experts: one fp32 number of each row.

    Where a bias or groups change the choice, also the bias in fp32 and, for a block of rows, a number of every expert
    and of every chosen one; with groups the two best of each, their sums, and the chosen groups.
    """
    if experts is None or not (experts.selection_bias or experts.groups > 1):
        return _pieces(4 * rows)
    block, of = min(rows, NORM_ROWS), experts
    bias = [4 * of.count] if of.selection_bias else []
    best = [4 * block * 2 * of.groups, 8 * block * 2 * of.groups, 4 * block * of.groups]
    best += [4 * block * of.groups_per_token, 8 * block * of.groups_per_token]
    groups = best if of.groups > 1 else []
    return _pieces(4 * rows, *bias, 4 * block * of.count, 4 * block * of.per_token, *groups)


def route_backward_workspace_bytes(
    rows: int, experts: int, per_token: int, *, balance: bool, loads: bool = False
) -> int:
    """Return the scratch of the gradient of the logits, for a block of rows.

    A number of every expert, two of every chosen expert, and one of each row. With ``balance``, or where ``loads`` are
    summed for the selection bias, two of each expert.
    """
    block = min(rows, NORM_ROWS)
    each = [4 * experts] * 2 if balance or loads else []
    return _pieces(4 * block * experts, *[4 * block * per_token] * 2, 4 * block, *each)


def sort_workspace_bytes(rows: int, attention_kernel: str) -> int:
    """Return what torch's stable sort of 64-bit numbers allocates: on a CPU a copy; on CUDA two of keys and values.

    Sources: aten/src/ATen/native/cpu/SortingKernel.cpp, cuda/SortStable.cu of torch 2.13.
    """
    return _pieces((8 if on_cpu(attention_kernel) else 32) * rows)


def places_workspace_bytes(rows: int, experts: int) -> int:
    """Return the scratch of the places of dispatched rows: the numbers of rows and of experts, and their loads."""
    return _pieces(8 * rows, 8 * experts, *[4 * experts] * 2)


def dispatch_workspace_bytes(rows: int) -> int:
    """Return the scratch of copying rows to experts: the token of each row."""
    return _pieces(8 * rows)


def send_order_workspace_bytes(rows: int, slots: int, ranks: int) -> int:
    """Return the scratch of seating dispatched rows: for each row sent and each slot a few numbers, and some a rank."""
    return _pieces(*[8 * rows] * 3, *[8 * slots] * 2, *[8 * ranks] * 3, slots)


def receive_order_workspace_bytes(rows: int, ranks: int, experts: int) -> int:
    """Return the scratch of ordering received rows by expert: numbers of each row, and of each rank and expert."""
    return _pieces(*[8 * rows] * 4, *[8 * ranks * (experts + 1)] * 4)


def gates_backward_workspace_bytes(slots: int) -> int:
    """Return the scratch of bringing gradients of probabilities back: each slot's row, and whether it has one."""
    return _pieces(8 * slots, slots)


def combine_workspace_bytes(rows: int, features: int, dtype: str, *, seats: bool = False) -> int:
    """Return the scratch of summing each token's rows: for a block of tokens, row numbers, a row, and two in fp32.

    ``seats``: also whether each slot has a row.
    """
    block = min(rows, NORM_ROWS)
    missing = (block,) if seats else ()
    return _pieces(8 * block, DTYPE_BYTES[dtype] * block * features, *_wide(block * features, dtype) * 2, *missing)


def expert_bias_workspace_bytes(rows: int, features: int, dtype: str) -> int:
    """Return the scratch of adding the experts' biases to a block of dispatched rows: row numbers, experts, biases."""
    block = min(rows, NORM_ROWS)
    return _pieces(4 * block, 8 * block, DTYPE_BYTES[dtype] * block * features)


def expert_bias_backward_workspace_bytes(
    rows: int,
    features: int,
    experts: int,
    dtype: str,
    attention_kernel: str,
    *,
    into: str = "fp32",
    seats: bool = False,
) -> int:
    """Return the scratch of the gradient of the first product's biases, for a block of dispatched rows.

    Row numbers, experts, and a one for every row at its expert; on a CPU, and where the sum is in another dtype, the
    rows and those ones in the dtype of the sum. ``seats``: a copy of the rows in any case, and whether each is empty.
    """
    block, widened = min(rows, NORM_ROWS), dtype != into and on_cpu(attention_kernel)
    size = DTYPE_BYTES[into if widened else dtype]
    copied = (size * block * features,) if widened or seats else ()
    return _pieces(4 * block, 8 * block, size * block * experts, *copied, *((block,) if seats else ()))


def missing_seats_workspace_bytes(rows: int, per_token: int) -> int:
    """Return the scratch of leaving slots without a seat out: for a block of tokens, which, and probabilities."""
    slots = min(rows, NORM_ROWS) * per_token
    return _pieces(slots, 4 * slots)


def expert_out_bias_workspace_bytes(rows: int, features: int, experts: int, dtype: str) -> int:
    """Return the scratch of adding the second product's biases: a block's probabilities of all experts.

    Also the biases and the block in fp32, where they are not.
    """
    block = min(rows, NORM_ROWS)
    return _pieces(4 * block * experts, *_wide(experts * features, dtype), *_wide(block * features, dtype))


def expert_out_bias_dgrad_workspace_bytes(rows: int, features: int, experts: int, per_token: int, dtype: str) -> int:
    """Return the scratch of what these biases add to the probabilities' gradients: as forward, and chosen ones."""
    whole = expert_out_bias_workspace_bytes(rows, features, experts, dtype)
    return whole + _pieces(4 * min(rows, NORM_ROWS) * per_token)


def expert_out_bias_wgrad_workspace_bytes(
    rows: int, features: int, experts: int, dtype: str, *, into: str = "fp32"
) -> int:
    """Return the scratch of the gradient of these biases: a block's probabilities of all experts, and it in fp32."""
    block = min(rows, NORM_ROWS)
    product = () if into == "fp32" else (4 * experts * features, DTYPE_BYTES[into] * experts * features)
    return _pieces(4 * block * experts, *_wide(block * features, dtype), *product)


def expert_activation_workspace_bytes(rows: int, features: int, dtype: str, *, clamped: bool = False) -> int:
    """Return the scratch of the experts' activation: every row's probability, and a block of rows in fp32.

    ``clamped`` needs two blocks in any dtype.
    """
    if clamped:
        return _pieces(4 * rows, *[4 * min(rows, NORM_ROWS) * features] * 2)
    return _pieces(4 * rows, *_wide(min(rows, NORM_ROWS) * features, dtype))


def expert_activation_backward_workspace_bytes(rows: int, features: int, *, clamped: bool = False) -> int:
    """Return the scratch of its backward: two numbers of every row, and blocks of rows in fp32: two, clamped five."""
    return _pieces(4 * rows, 4 * rows, *[4 * min(rows, NORM_ROWS) * features] * (5 if clamped else 2))


def grouped_workspace_bytes(elements: int, dtype: str, experts: int, attention_kernel: str) -> int:
    """Return what a product over all experts allocates on CUDA: its result and the ends of the experts; 0 on a CPU."""
    return 0 if on_cpu(attention_kernel) else _pieces(DTYPE_BYTES[dtype] * elements, 4 * experts)


def adamw_workspace_bytes(elements: int, updated: str, gradients: str, moments: str) -> int:
    """Return the scratch of AdamW's update of parameters (or their master copy), from the dtypes of its operands.

    Where they differ, a block of each bf16 one in fp32: of what is updated, of the gradient, of both moments. Else 0.
    """
    each = (updated, gradients, moments, moments)
    block = min(elements, ADAMW_ELEMENTS)
    return _pieces(*(4 * block for dtype in each if dtype == "bf16")) if len(set(each)) > 1 else 0


def on_cpu(attention_kernel: str) -> bool:
    """Return whether a plan with this attention kernel runs on a CPU."""
    return attention_kernel == "torch-flash-cpu"
