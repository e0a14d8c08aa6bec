"""The knobs as keyword arguments of ``memo_sim.what_if`` and its neighbours, with their types.

Written by memo_sim/answers/named_knobs.py. Change the declarations, then write this module again.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, TypedDict

from memo_sim.contract.attention_kernels import AttentionName, Libraries
from memo_sim.contract.knobs import (
    AdamwKernels,
    CpExchange,
    DocumentCuts,
    DtypeName,
    ExpertOverflow,
    Fp8Recipe,
    GradSums,
    Loss,
    MemoryPolicy,
    MlpRebuild,
    Modules,
    Objective,
    Overlap,
    Partition,
    Recompute,
    ReduceDtype,
    RowwiseKernel,
    Schedule,
    Sharding,
    States,
    Streams,
    SwapDtype,
    TpOverlap,
    ZeroParams,
)


class Knobs(TypedDict, total=False):
    """A value pins its knob; None, and a knob that is left out, are searched or left to the system."""

    tp: int | None
    tp_overlap: TpOverlap | None
    cp: int | None
    cp_exchange: CpExchange | None
    ulysses: int | None
    uneven_heads: bool | None
    ep: int | None
    expert_tp: int | None
    metp: int | None
    overlap_exchanges: bool | None
    keep_norms: bool | None
    rebuild_qkv: bool | None
    pp: int | None
    pp_layers: Sequence[int] | str | None
    schedule: Schedule | None
    virtual_stages: int | None
    dp: int | None
    zero: int | None
    zero_ranks: int | None
    subsequences: int | Literal["auto"] | None
    partition: Partition | None
    multiplexed: bool | None
    offload_window: int | None
    alpha: float | None
    recompute: Recompute | None
    recompute_layers: str | None
    offload_inputs: bool | None
    rounding_buffers: bool | None
    early_stop: bool | None
    overlap: Overlap | None
    memory_policy: MemoryPolicy | None
    allocator_limit_gib: int | None
    replay_allocator: bool | None
    cuda_graphs: bool | None
    sharding: Sharding | None
    reduce_dtype: ReduceDtype | None
    loss_chunk: int | str | None
    mlp_chunk: int | str | None
    mlp_rebuild: MlpRebuild | None
    attention_chunk: int | str | None
    attention: AttentionName | None
    libraries: Libraries | None
    rowwise: RowwiseKernel | None
    adamw: AdamwKernels | None
    dtype: DtypeName | None
    states: States | None
    zero_params: ZeroParams | None
    grad_sums: GradSums | None
    objective: Objective | None
    fp8: Fp8Recipe | None
    fp8_params: bool | None
    fp8_experts: bool | None
    swap_dtype: SwapDtype | None
    loss: Loss | None
    loss_metrics: int | None
    streams: Streams | None
    modules: Modules | None
    expert_load: str | None
    expert_capacity: float | None
    expert_overflow: ExpertOverflow | None
    expert_overlap: bool | None
    documents: str | None
    document_cuts: DocumentCuts | None
    lora: str | None
    micro_batch: int | None
    global_batch: int | None
