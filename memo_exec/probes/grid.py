"""The shapes that calibration times: small models over widths and lengths, attention over heads, head_dims and lengths.

The shapes cover models in general: matrix products and row-wise operators of each family, spaced by octaves. Operators
that would take long are omitted, because rates hardly change at those sizes.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import msgspec

from memo_exec.probes.operators import Operator
from memo_sim.contract.experts import Experts
from memo_sim.contract.knobs import DtypeName, Loss, RowwiseKernel
from memo_sim.contract.model import Family, Model
from memo_sim.contract.plan import Decisions, Kernels, Layout
from memo_sim.program.ir.instruction import Instruction, Lane
from memo_sim.program.ir.work import Attention, Gemm, GroupedGemm, LinearLoss, Mask, Rowwise


@dataclass(frozen=True, kw_only=True)
class Grid:
    """The shapes for one kind of device."""

    dtype: DtypeName
    vocab: int
    loss_chunk_tokens: int
    """Rows of logits per loss chunk, as in a plan; 0 means all tokens of a sequence."""
    widths: tuple[int, ...]
    lengths: tuple[int, ...]
    experts: tuple[tuple[int, int], ...]
    """(Experts of a layer, features inside each), measured at ``expert_widths`` and ``expert_lengths``."""
    expert_widths: tuple[int, ...]
    expert_lengths: tuple[int, ...]
    head_dims: tuple[int, ...]
    heads: tuple[int, ...]
    attention_lengths: tuple[int, ...]
    most_flops: float
    """Largest matrix product to time, in FLOPs."""
    most_attention_flops: float
    """Largest attention forward to time, in FLOPs; backward has 2.5 times as many."""
    most_bytes: float
    """Largest row-wise operator to time, in bytes moved."""
    copy_bytes: tuple[int, ...]
    message_bytes: tuple[int, ...]
    """Sizes of collectives and of send-receive messages."""
    message_s: float
    """Seconds for which each of them is repeated."""
    beside_s: float = 0.4
    """Seconds for which lanes run at the same time."""
    copied_bytes: int = 2**24
    """Size of one copy while lanes run at the same time."""
    updated_elements: int = 2**24
    """Parameters of one optimizer update on the host; its 0.3 GiB of operands outgrow most caches."""
    budget_s: float = 240.0
    """Seconds that a calibration may take; points that are left then are not measured."""

    def wanted(self, operator: Operator) -> bool:
        """Return whether an operator is small enough to be timed."""
        work = operator.instruction.work
        if isinstance(work, Gemm | GroupedGemm | LinearLoss):
            return work.flops <= self.most_flops
        return isinstance(work, Rowwise) and work.moved_bytes <= self.most_bytes


CPU = Grid(
    dtype="fp32",
    vocab=256,
    loss_chunk_tokens=0,
    widths=(64, 128, 256, 512, 1024),
    lengths=(128, 512, 2048, 8192),
    experts=((4, 96), (16, 64)),
    expert_widths=(128, 512),
    expert_lengths=(512, 4096),
    head_dims=(16, 32, 64, 128),
    heads=(1, 8),
    attention_lengths=(128, 256, 512, 1024, 2048, 4096, 8192, 16384),
    most_flops=2e9,
    most_attention_flops=5e9,
    most_bytes=1e8,
    copy_bytes=tuple(2**k for k in range(14, 28, 2)),
    message_bytes=tuple(2**k for k in range(10, 25, 2)),
    message_s=0.05,
)

CUDA = Grid(
    dtype="bf16",
    vocab=131_072,
    loss_chunk_tokens=4096,
    widths=(512, 1024, 2048, 4096, 8192),
    lengths=(1024, 4096, 16384, 65536),
    experts=((8, 4096), (32, 2880), (128, 768)),
    expert_widths=(2048, 4096),
    expert_lengths=(4096, 32768),
    head_dims=(64, 128),
    heads=(4, 32, 256),
    attention_lengths=(1024, 4096, 16384, 65536, 131072, 262144),
    most_flops=1e13,
    most_attention_flops=7.5e13,
    most_bytes=8e9,
    copy_bytes=tuple(2**k for k in range(16, 31, 2)),
    copied_bytes=2**26,
    message_bytes=tuple(2**k for k in range(10, 31, 2)),
    message_s=0.05,
)


OF_EXPERTS = "experts."
"""How the names of the operators of experts begin; the router's products are plain ones in fp32."""
OF_PARTS = frozenset({"qkv.split", "qkv.join", "attention.merge", "grad.accumulate"})
"""Row-wise operators that occur only if attention runs in parts (subsequences, rings)."""


def decisions(grid: Grid, kernel: str, rowwise: RowwiseKernel = "torch") -> Iterator[Decisions]:
    """Yield decisions whose operators are to be timed, for both families and every width and length.

    They swap only 128 tokens and recompute the rest, so the recompute operators cover most rows.
    """
    for family in ("gpt", "llama"):
        for width in grid.widths:
            for tokens in grid.lengths:
                yield Decisions(
                    model=_model(family, width, grid.head_dims[len(grid.head_dims) // 2], grid.vocab),
                    seq_tokens=tokens,
                    loss_chunk_tokens=min(tokens, grid.loss_chunk_tokens),
                    swapped_tokens=128,
                    kernels=Kernels(attention=kernel, rowwise=rowwise),
                    dtype=grid.dtype,
                )


def subsequences(grid: Grid, kernel: str, rowwise: RowwiseKernel = "torch") -> Iterator[Decisions]:
    """Yield decisions with two subsequences, for every width and length; they add the operators of ``OF_PARTS``."""
    for width in grid.widths:
        for tokens in grid.lengths:
            yield Decisions(
                model=_model("llama", width, grid.head_dims[len(grid.head_dims) // 2], grid.vocab),
                layout=Layout(subsequences=2, partition="length"),
                seq_tokens=2 * tokens,
                loss_chunk_tokens=min(tokens, grid.loss_chunk_tokens),
                kernels=Kernels(attention=kernel, rowwise=rowwise),
                dtype=grid.dtype,
            )


def with_experts(grid: Grid, kernel: str) -> Iterator[Decisions]:
    """Yield decisions with experts, whose operators (``OF_EXPERTS``) are to be timed; two of them for each token."""
    for count, inside in grid.experts:
        for width in grid.expert_widths:
            for tokens in grid.expert_lengths:
                model = _model("llama", width, grid.head_dims[len(grid.head_dims) // 2], grid.vocab)
                yield Decisions(
                    model=msgspec.structs.replace(model, experts=Experts(count=count, per_token=2, hidden=inside)),
                    seq_tokens=tokens,
                    loss_chunk_tokens=min(tokens, grid.loss_chunk_tokens),
                    kernels=Kernels(attention=kernel),
                    dtype=grid.dtype,
                )


def rounded_swaps(grid: Grid, kernel: str, rowwise: RowwiseKernel) -> Iterator[Decisions]:
    """Yield decisions that swap all rows in FP8, for every length; they add the rounding of rows.

    A layer has rows of several widths, so one width of the grid is enough.
    """
    for each in decisions(grid, kernel, rowwise):
        if each.model.family == "llama" and each.model.hidden == grid.widths[len(grid.widths) // 2]:
            yield msgspec.structs.replace(each, swapped_tokens=each.seq_tokens, swap_dtype="fp8")


def linear_losses(grid: Grid, kernel: str, loss: Loss) -> Iterator[Decisions]:
    """Yield decisions with a loss that has the classifier's product inside, for every width and length."""
    for width in grid.widths:
        for tokens in grid.lengths:
            yield Decisions(
                model=_model("llama", width, grid.head_dims[len(grid.head_dims) // 2], grid.vocab),
                seq_tokens=tokens,
                loss=loss,
                kernels=Kernels(attention=kernel),
                dtype=grid.dtype,
            )


def middle(grid: Grid, kernel: str) -> Decisions:
    """Return decisions of medium width and length, for probes that need a single layer."""
    found = list(decisions(grid, kernel))[: len(grid.widths) * len(grid.lengths)]
    return found[len(found) // 2]


def _model(family: Family, width: int, head_dim: int, vocab: int = 256) -> Model:
    gpt = family == "gpt"
    heads = max(1, width // head_dim)
    return Model(
        name=f"{family}-{width}",
        family=family,
        layers=1,
        hidden=width,
        heads=heads,
        kv_heads=heads if gpt else max(1, heads // 2),
        head_dim=head_dim,
        ffn_hidden=4 * width if gpt else 3 * width,
        vocab=vocab,
        tied_embeddings=gpt,
        qkv_bias=gpt,
        linear_bias=gpt,
        qk_norm=not gpt,
        activation="gelu" if gpt else "silu",
    )


FULL_GRID = 2**19
"""Heads x tokens that fill any device: 32 waves of 128 blocks of 128 tokens. More heads have the same rate."""


def attention_operators(grid: Grid, kernel: str, head_dim: int) -> Iterator[Operator]:
    """Yield attention forward and backward over lengths and heads, with a causal mask.

    More heads are left out where fewer already fill the device. For the largest number of heads, also yield calls
    without a mask, up to half the FLOPs. The gain of calls without a mask on longer sequences is extrapolated from
    these (``memo_sim/costs/attention.py``).
    """
    for tokens in grid.attention_lengths:
        counts = [n for fewer, n in zip((0, *grid.heads), grid.heads, strict=False) if fewer * tokens < FULL_GRID]
        for heads in counts:
            masks: dict[Mask, float] = {"causal": grid.most_attention_flops}
            if heads == counts[-1]:
                masks["none"] = grid.most_attention_flops / 2
            for mask, most in masks.items():
                for backward in (False, True):
                    operator = attention_operator(
                        grid.dtype, kernel, (tokens, heads, head_dim), mask, backward=backward
                    )
                    work = operator.instruction.work
                    if isinstance(work, Attention) and work.flops <= most * (2.5 if backward else 1.0):
                        yield operator


def attention_operator(
    dtype: DtypeName,
    kernel: str,
    shape: tuple[int, int, int],
    mask: Mask,
    *,
    backward: bool,
    kv_heads: int | None = None,
    groups: int = 1,
) -> Operator:
    """Return one attention call of shape (tokens, heads, head_dim), in ``groups`` head groups.

    ``kv_heads`` is the number of heads of keys and values; as many as queries have when None.
    """
    tokens, heads, head_dim = shape
    width, kv_heads = heads * head_dim, heads if kv_heads is None else kv_heads
    packed = width + 2 * kv_heads * head_dim
    work = Attention(1, tokens, tokens, mask, heads, kv_heads, head_dim, backward, kernel, dtype)
    op = "attention.bwd" if backward else "attention"
    operands = [("qkv", (tokens, packed), dtype), ("out", (tokens, width), dtype), ("lse", (tokens, heads), "fp32")]
    if backward:
        operands = [("grad", (tokens, width), dtype), *operands, ("grad_qkv", (tokens, packed), dtype)]
    model = _model("gpt", width, head_dim)
    kernels = Kernels(attention=kernel, head_groups=groups)
    steps = Decisions(model=model, seq_tokens=tokens, kernels=kernels, dtype=dtype)
    return Operator(Instruction(op, op, Lane.COMPUTE, work, ()), steps, tuple(operands))
