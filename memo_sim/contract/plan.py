"""A plan: the decisions of one training step, their predicted cost, and their provenance (``memo.plan/3``).

The decisions alone determine the program. Prediction and provenance can be dropped, or computed again for another
machine.
"""

from __future__ import annotations

from functools import partial
from typing import Annotated, Literal

import msgspec

from memo_sim.contract.adapters import Adapters, AdaptersText, adapters_of
from memo_sim.contract.attention_kernels import ATTENTION_KERNELS, Libraries
from memo_sim.contract.documents import Documents
from memo_sim.contract.errors import did_you_mean
from memo_sim.contract.knobs import (
    MOST_CAPACITY,
    MOST_LIMIT_GIB,
    MOST_METRICS,
    MOST_WINDOW,
    AdamwKernels,
    CpExchange,
    DocumentCuts,
    DtypeName,
    ExpertOverflow,
    Fp8Layouts,
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
from memo_sim.contract.model import Model
from memo_sim.contract.units import (
    Bytes,
    Degree,
    ExpertLoad,
    ExpertTp,
    Fraction,
    LayerChoice,
    Layers,
    Positive,
    Seconds,
    SequenceTokens,
    Tokens,
    Width,
    ZeroLevel,
    ZeroRanks,
)

HostAllocator = Literal["exact", "power_of_two"]
"""How pinned host memory is allocated. exact: one registered slab. power_of_two: PyTorch's pinned blocks."""
Status = Literal["ok", "gpu_oom", "host_oom", "invalid"]

SWAP_GRANULE_TOKENS = 128


class Layout(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """How the work is divided over devices; the product of the degrees is the number of devices.

    - tp: tensor-parallel degree; with ``sequence_parallel``, its ranks share the tokens outside the products.
    - cp: context-parallel degree; its ranks share each sequence and exchange keys and values (``cp_exchange``).
    - ulysses: degree of Ulysses; its ranks change from token shards to head shards around attention, by all-to-all.
    - ep: degree of expert parallelism; its ranks, which are consecutive ones of cp x ulysses x dp, divide the experts.
    - expert_tp: ranks of tp that divide the features of each expert; with 1, ``ep`` spans the ranks of tp as well.
    - metp: degree of METP; its ranks share the tokens and weights of each layer, and exchange weights meanwhile.
    - pp: number of pipeline stages.
    - dp: data-parallel degree: replicas that play different sequences.
    - zero: ZeRO level. 1 shards optimizer states over replicas, 2 also gradients, 3 also parameters.
    - zero_ranks: ranks that ZeRO shards over; groups of this many replicas hold copies of the same shards (HSDP).
    """

    tp: Degree = 1
    sequence_parallel: bool = False
    tp_overlap: TpOverlap = "none"
    """Whether a layer's products overlap with the tensor-parallel all-gathers and reduce-scatters beside them."""
    cp: Degree = 1
    cp_exchange: CpExchange = "ring"
    ulysses: Degree = 1
    uneven_heads: bool = False
    """Whether some ranks of Ulysses may have one key/value head more than others, with its query heads."""
    metp: Degree = 1
    overlap_exchanges: bool = True
    """Whether METP's ranks compute during their exchanges; otherwise compute waits for them."""
    pp: Degree = 1
    """Pipeline stages. The first also holds the embedding, the last the head."""
    pp_layers: tuple[Layers, ...] = ()
    """Layers of each stage. Empty: equal numbers, or nearly equal ones (``program/layout/stage.py``).

    With virtual stages: of each chunk, in the order of the model."""
    schedule: Schedule = "1f1b"
    virtual_stages: Degree = 1
    """Chunks of layers per stage; more than 1 only for the interleaved schedule."""
    overlap_p2p: bool = True
    """Whether p2p transfers between stages overlap with compute.

    With overlap, a stage receives one pass ahead and sends during its next pass. Without, it sends right after each
    pass (Megatron-LM's 1F1B)."""
    dp: Degree = 1
    ep: Degree = 1
    """Consecutive ranks of cp x ulysses x dp that divide the experts of a layer; it needs no devices of its own."""
    expert_tp: ExpertTp = 0
    """Ranks of tp that divide the features of each expert: 0 for all of them, or 1.

    With 1, ``ep`` divides the experts over consecutive ranks of tp x cp x ulysses x dp, and each rank dispatches the
    rows of its own token shard (sequence parallelism)."""
    zero: ZeroLevel = 0
    zero_ranks: ZeroRanks = 0
    """Consecutive replicas that one ZeRO group has; 0 means all replicas."""
    subsequences: Degree = 1
    """Number of subsequences that a sequence is divided into; a stage plays them one after the other (SPPO's N)."""
    partition: Partition = "flops"
    multiplexed: bool = False
    """Whether idle stages compute rows of other stages while the subsequence pipeline fills and drains (SPPO 6.2)."""

    @property
    def devices(self) -> int:
        """Number of devices that the layout occupies."""
        return self.tp * self.cp * self.ulysses * self.metp * self.pp * self.dp

    @property
    def replicas(self) -> int:
        """Number of ranks that hold the same parameters of a layer; ZeRO shards over these ranks."""
        return self.cp * self.ulysses * self.dp

    @property
    def expert_replicas(self) -> int:
        """Number of ranks that hold the same experts of a layer."""
        return self.expert_ranks // self.ep

    @property
    def whole_experts(self) -> bool:
        """Whether each rank of tp has whole experts, and dispatches the rows of its own token shard."""
        return self.expert_tp == 1 and self.tp > 1 and self.ep > 1

    @property
    def expert_divided(self) -> int:
        """Number of ranks that divide the features of each expert, and dispatch the same rows."""
        return 1 if self.whole_experts else self.divided

    @property
    def expert_shards(self) -> int:
        """Number of ranks that ZeRO shards a layer's experts over, where ``ep`` divides them."""
        return self.expert_replicas // self.shard_copies if self.zero else 1

    @property
    def expert_ranks(self) -> int:
        """Number of ranks that ``ep`` and the copies of the same experts make up, inside a pipeline stage."""
        return self.replicas * (self.tp if self.whole_experts else 1)

    @property
    def shards(self) -> int:
        """Number of ranks that ZeRO shards a layer over; 1 without ZeRO."""
        return (self.zero_ranks or self.replicas) if self.zero else 1

    @property
    def shard_copies(self) -> int:
        """Number of ranks that hold the same shard of a layer's optimizer states."""
        return self.replicas // self.shards

    @property
    def sharded_in_groups(self) -> bool:
        """Whether ZeRO shards over groups of several replicas, which hold copies of each other's shards (HSDP)."""
        return 1 < self.shard_copies < self.replicas

    @property
    def divided(self) -> int:
        """Number of ranks that share a layer's products and heads."""
        return self.tp * self.metp

    @property
    def ring(self) -> int:
        """Number of ranks that share a sequence in zigzag chunks, for context parallelism or METP."""
        return self.cp * self.metp

    @property
    def ring_group(self) -> Literal["cp", "metp"]:
        """The group of those ranks."""
        return "metp" if self.metp > 1 else "cp"

    @property
    def weights_group(self) -> Literal["tp", "metp"]:
        """The group of ranks that a layer's weights are divided over."""
        return "metp" if self.metp > 1 else "tp"

    @property
    def whole_ends(self) -> bool:
        """Whether ranks that divide a layer's weights hold embedding and head whole."""
        return self.metp > 1


class Kernels(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The implementation of each operator. It decides the workspaces, so it belongs to the plan."""

    attention: str = "flash2"
    head_groups: Width = 1
    """Attention runs in this many groups of heads, one after the other, which limits its workspace."""
    rowwise: RowwiseKernel = "torch"
    """Whose kernels play norms, activations, rotary embeddings, residuals, loss and optimizer."""
    adamw: AdamwKernels = "foreach"
    """AdamW of a framework's row-wise kernels (eager, compiled); memo-exec's own is one kernel."""

    def __post_init__(self) -> None:
        """Refuse an attention kernel that memo does not know."""
        if self.attention not in ATTENTION_KERNELS:
            hint = did_you_mean(self.attention, ATTENTION_KERNELS) or f"one of {', '.join(ATTENTION_KERNELS)}"
            raise ValueError(f"{self.attention!r} is no attention kernel: {hint}")


class Decisions(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """All inputs of ``lower``, and nothing else.

    ``swapped_tokens`` counts tokens of one rank's micro-batch shard, which has micro_batch x seq_tokens / (cp x metp x
    ulysses) tokens. The skeletal tensors of these tokens are swapped to the host. 0 swaps nothing, the shard's size
    swaps everything, and any other value must be a multiple of 128. What happens to the other tokens depends on
    ``recompute``:

    - none: they are kept on the device.
    - selective, norms, mlp, operators: nothing may be swapped; all tokens are kept.
    - tokenwise: they are recomputed. Layer input and attention output are swapped whole.
    - full: only the layer input can be swapped; its other rows are kept.
    - rowwise: the layer input, attention's output and the log-sum-exp are swapped; their other rows are kept.

    ``subsequence_swapped_tokens`` has one entry per subsequence. It is given when there are several subsequences and
    ``swapped_tokens`` is neither zero nor everything. The entries sum to ``swapped_tokens``. Each entry is a multiple
    of 128, or the subsequence's whole length (``program/layout/partition.py``).
    """

    model: Model
    layout: Layout = Layout()
    seq_tokens: SequenceTokens
    """Tokens of one sequence."""
    micro_batch: Degree = 1
    """Sequences of one micro-batch."""
    global_batch: Degree = 1
    """Sequences of one step, over all replicas."""
    recompute: Recompute = "none"
    recompute_layers: LayerChoice = "all"
    """Which layers of a stage full recompute is about; the others keep everything (``layout/recomputed_layers.py``).

    - all: every layer keeps its input.
    - every-N: the N-th, 2N-th, ... layer of a stage.
    - first-K: the first K layers of each chunk of a stage.
    - groups-N: all layers; each chunk is divided into groups of N layers, and only a group's first input is kept."""
    keep_norms: bool = False
    """Whether METP's layers keep the outputs of their norms, as METP's authors count (Table 1) and autograd does.

    Otherwise backward recomputes them."""
    rebuild_qkv: bool = False
    """Whether backward of latent attention computes Q, K and V again from the latents, in place of keeping them
    (``layers/latent_attention.py``)."""
    early_stop: bool = False
    """Whether full recompute leaves out the MLP's second product, whose output backward does not read."""
    swapped_tokens: Tokens = 0
    subsequence_swapped_tokens: tuple[Tokens, ...] = ()
    offload_window: Annotated[int, msgspec.Meta(ge=0, le=MOST_WINDOW)] = 0
    """Where swapped tensors lie on the device.

    0: in two rounding buffers that layers use alternately (MEMO 4.1). Otherwise each subsequence has its own buffers.
    They are copied to the host during this many following passes of the stage (SPPO 5.2: 1), and copied back during the
    pass before their backward."""
    swap_dtype: SwapDtype = "same"
    """Dtype of swapped skeletal tensors on the host (``program/layout/swap_format.py``); same: the tensors' own."""
    rounding_buffers: bool = False
    """Whether full recompute plays every layer in the two rounding buffers, which exist all step (MEMO 4.1, 4.3.4).

    Otherwise each layer's forward and backward has skeletal buffers of its own. Plans that swap, or recompute token by
    token, have the rounding buffers anyway."""
    memory_policy: MemoryPolicy = "planned"
    allocator_limit_gib: Annotated[int, msgspec.Meta(ge=0, le=MOST_LIMIT_GIB)] = 0
    """GiB of the device that PyTorch's allocator and the reserve may take together; 0: all of it.

    ``torch.cuda.set_per_process_memory_fraction`` sets it. With less memory the allocator retries more often, but each
    retry releases less, so a step can be shorter."""
    host_allocator: HostAllocator = "exact"
    states: States = "fp32"
    zero_params: ZeroParams = "auto"
    """What ZeRO 3 gathers parameters from (``data_parallel/sharding.py``); auto: stored."""
    grad_sums: GradSums = "auto"
    """Dtype in which gradients are summed, over micro-batches and over ranks (``layout/parameters.py``)."""
    overlap: Overlap = "none"
    objective: Objective = "next-token"
    """What the loss is of the targets' log-probabilities."""
    loss: Loss = "auto"
    """How the loss and the gradient of the logits are computed (``program/layers/loss.py``)."""
    loss_metrics: Annotated[int, msgspec.Meta(ge=0, le=MOST_METRICS)] = 0
    """Times that cross entropy is computed again from a micro-batch's logits when its backward has ended."""
    streams: Streams = "auto"
    """When an eager framework gets memory back that streams beside compute have used; auto: as its libraries do."""
    sharding: Sharding = "memo"
    """Whose implementation of ZeRO 2 and 3, with its passes over parameters and gradients."""
    reduce_dtype: ReduceDtype = "auto"
    """Dtype in which FSDP sums gradients over ranks; auto: that of their sums over micro-batches."""
    modules: Modules = "auto"
    """Whose modules an eager framework trains; auto: operators, as in memo-exec."""
    loss_chunk_tokens: Tokens = 0
    """Tokens whose logits exist at the same time; 0 means all tokens."""
    mlp_chunk_tokens: Tokens = 0
    """Tokens of a rank's micro-batch whose MLP activations exist at the same time; 0 means all tokens.

    Only with full and row-wise recompute. Backward recomputes the MLP in row blocks, without its second product, right
    before each block's backward. With row-wise recompute all of a layer but attention is in these blocks
    (``layers/rowwise.py``)."""
    mlp_rebuild: MlpRebuild = "block"
    """What is repeated of an MLP in row blocks, and when; block unless there are row blocks."""
    expert_load: ExpertLoad = "balanced"
    """How the tokens of a model with experts are expected to spread over them (``layout/expert_load.py``).

    It changes prices. Sizes are the same for all loads, but with ``ep`` above 1 the capacity follows from it."""
    expert_capacity: Annotated[float, msgspec.Meta(ge=0.0, le=MOST_CAPACITY)] = 0.0
    """Rows that a rank of ``ep`` can send to each rank, over the mean; 0: from the load (``layout/expert_load.py``)."""
    expert_overflow: ExpertOverflow = "drop"
    """What happens to rows beyond the capacity: dropped and counted, or the step is refused."""
    expert_overlap: bool = False
    """Whether all-to-alls of rows overlap with products of the shared expert, of recompute and of other weights."""
    documents: Documents | None = None
    """The lengths of the documents that sequences are packed from; None: a sequence is one document."""
    document_cuts: DocumentCuts = "sequence"
    """Where context-parallel ranks cut sequences of several documents (``layout/documents.py``)."""
    attention_chunk_tokens: Tokens = 0
    """Tokens of the sequence in one attention chunk; 0 means no chunks. Only with full and row-wise recompute.

    One chunk of queries is on the device at a time, with one chunk of keys and values. The other chunks wait in host
    memory (FPDT, Yao et al. 2024)."""
    adapters: AdaptersText = "none"
    """Low-rank adapters (LoRA), which are trained in place of the model's weights (``contract/adapters.py``)."""
    kernels: Kernels = Kernels()
    dtype: DtypeName = "bf16"
    fp8: Fp8Recipe = "none"
    """Scales of the layers' linear products in FP8 (``program/layout/fp8.py``); none: products in ``dtype``."""
    fp8_layouts: Fp8Layouts = "tn"
    """Layouts that the device's FP8 products take: they decide which copies of tensors there are."""
    fp8_params: bool = False
    """Whether the weights of FP8 products are kept in FP8 alone, without a copy in ``dtype``."""
    fp8_experts: bool = False
    """Whether products of experts, and of a shared one, are in FP8 too."""
    libraries: Libraries | None = None
    """Year of the libraries that the prediction assumes; null: the hardware profile's (``eager_libraries``)."""
    deterministic: bool = False
    replay_allocator: bool = False
    """Whether memo-exec's allocator below torch serves library requests from the arena (CUDA only).

    Otherwise torch's allocator serves them, outside the arena."""

    cuda_graphs: bool = False
    """Whether an eager framework replays its kernels from CUDA graphs, which costs its host no launches."""

    def __post_init__(self) -> None:
        """Refuse numbers of swapped tokens that row blocks cannot represent."""
        swapped, tokens = self.swapped_tokens, self.local_tokens
        if swapped > tokens:
            raise ValueError(f"swapped_tokens ({swapped}) is more than the {tokens} tokens of a rank's micro-batch")
        if self.layout.subsequences > 1 and 0 < swapped < tokens:
            self._check_subsequences()
        elif self.subsequence_swapped_tokens:
            raise ValueError(
                "subsequence_swapped_tokens need several subsequences with some but not all tokens swapped"
            )
        elif swapped % SWAP_GRANULE_TOKENS and swapped != tokens:
            raise ValueError(
                f"swapped_tokens ({swapped}) must be a multiple of {SWAP_GRANULE_TOKENS}, or all {tokens} tokens"
            )

    def _check_subsequences(self) -> None:
        each, count = self.subsequence_swapped_tokens, self.layout.subsequences
        if len(each) != count:
            raise ValueError(f"subsequence_swapped_tokens has {len(each)} entries, wanted {count}: one per subsequence")
        if sum(each) != self.swapped_tokens:
            raise ValueError(
                f"subsequence_swapped_tokens sum to {sum(each)}, but swapped_tokens is {self.swapped_tokens}"
            )

    @property
    def lora(self) -> Adapters | None:
        """The adapters; None where all weights are trained."""
        return adapters_of(self.adapters)

    @property
    def step_flops(self) -> float:
        """Model FLOPs of one step, which MFU counts (``Model.step_flops``); of packed documents, only their own pairs.

        With adapters: 4 for each frozen weight and token (forward, gradient of the input), 6 for each of an adapter.
        """
        attended = None if self.documents is None else partial(self.documents.pairs, self.seq_tokens)
        whole, lora = self.model.step_flops(self.seq_tokens, self.global_batch, attended=attended), self.lora
        if lora is None:
            return whole
        more = 6.0 * lora.params(self.model) - 2.0 * self.model.mfu_params
        return whole + self.global_batch * self.seq_tokens * more

    @property
    def local_tokens(self) -> int:
        """Tokens of one micro-batch on one rank, outside the sequence-parallel regions."""
        return self.micro_batch * self.seq_tokens // (self.layout.ring * self.layout.ulysses)

    @property
    def routed_tokens(self) -> int:
        """Tokens of one micro-batch whose rows a rank dispatches to experts: its token shard, if it has whole ones."""
        return self.local_tokens // (self.layout.tp if self.layout.whole_experts else 1)

    @property
    def swap_granule(self) -> int:
        """Granularity of ``swapped_tokens``: 128 rows on every rank that holds a shard of the tokens."""
        return SWAP_GRANULE_TOKENS * (self.layout.tp if self.layout.sequence_parallel else 1)

    @property
    def alpha(self) -> float:
        """Fraction of tokens swapped (MEMO 4.1)."""
        return self.swapped_tokens / self.local_tokens

    @property
    def offload_inputs(self) -> bool:
        """Whether full recompute keeps every layer's input in host memory between forward and backward."""
        return self.recompute == "full" and self.swapped_tokens == self.local_tokens

    @property
    def micro_batches(self) -> int:
        """Micro-batches that each data-parallel rank plays in a step."""
        return self.global_batch // (self.micro_batch * self.layout.dp)


class Stall(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Idle time of a lane, by the kind of instruction it waited for on another lane or stage; summed over the step.

    For the compute lane, busy seconds and stalls add up to the whole step.
    """

    lane: str
    waits_for: str
    seconds: Seconds
    count: int


class MovedBytes(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Bytes that one rank copies in a step."""

    d2h: Bytes = 0
    h2d: Bytes = 0


class StepInterval(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The range in which a measured step is expected, from the errors on published rows of the same class.

    ``docs/validation.md`` says how it is made and how it is tested.
    """

    low_s: Seconds
    high_s: Seconds
    level: Fraction
    """Share of new rows that the range holds, if their errors are like those of the rows it comes from."""
    rows: Positive
    sources: Positive
    """Publications that the rows come from."""
    generation: str
    framework: str
    allocation_retries: bool = False
    """Whether the rows, like the plan, have allocation retries."""
    beyond: list[str] = []
    """What no such row has: a longer sequence, more devices, another kernel. Each makes the range wider."""


class Prediction(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The engine's prediction for a plan on one cluster; it has no times when the plan does not fit."""

    status: Status
    hardware: str = ""
    step_s: Seconds | None = None
    mfu: float | None = None
    tgs: float | None = None
    peak_device_bytes: Bytes = 0
    peak_by_class: dict[str, Bytes] = {}
    reserved_bytes: Bytes | None = None
    """Peak bytes that PyTorch's caching allocator reserves; null when it runs out of memory or memory is planned."""
    allocation_retries: int = 0
    """Allocation retries in a step: the allocator frees its whole cache and asks the device again."""
    peak_host_bytes_per_node: Bytes = 0
    moved_bytes: MovedBytes = MovedBytes()
    lanes: dict[str, Seconds] = {}
    """Busy seconds by lane."""
    stalls: list[Stall] = []
    shortfall_bytes: Bytes = 0
    """Bytes that the memory lacks which ``status`` names: that of the fullest device, or of a node's host."""
    host_shortfall_bytes: Bytes = 0
    """Bytes that a node's host memory lacks, also where a device lacks memory."""
    reason: str = ""
    outside_calibration: list[str] = []
    """Curves that were read outside the range of their measurements, by work of more than 5 % of the step."""
    interval: StepInterval | None = None
    """Null when the plan does not fit, or when fewer than five rows of its class are published."""

    @property
    def missing_bytes(self) -> int:
        """Bytes that the fullest device and the host memory of a node lack together; 0 for a plan that fits."""
        return self.shortfall_bytes + (self.host_shortfall_bytes if self.status == "gpu_oom" else 0)


class Provenance(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Who made the file, when, and from what; ``lower`` never reads it."""

    created: str = ""
    memo_version: str = ""
    command: str = ""
    cluster: str = ""
    hardware_sha256: str = ""
    system: str = ""
    """The system of the question; some of them slow attention."""


class Plan(
    msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, tag_field="schema", tag="memo.plan/3"
):
    """A plan file: decisions, prediction and provenance; ``program_sha256`` is the hash of the lowered program."""

    decisions: Decisions
    program_sha256: str
    placement_sha256: str = ""
    """Hash of the placement that a planned program runs in; its file (``plan.placement.json``) lies beside the plan."""
    prediction: Prediction | None = None
    provenance: Provenance = Provenance()


class PlanRow(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One evaluated plan as scripts read it (in ``memo.result/2``)."""

    status: Status
    system: str = ""
    mfu: float | None
    tgs: float | None
    step_s: Seconds | None
    alpha: Fraction
    layout: Layout
    offload_window: int = 0
    """Passes during which a subsequence's swapped rows are copied out; 0 when layers share two rounding buffers."""
    recompute: Recompute
    recompute_layers: str = "all"
    """The layers that full recompute is about (``Decisions.recompute_layers``)."""
    attention: str = ""
    """Attention kernel."""
    executable: bool = True
    """Whether memo-exec has this attention kernel and these products; the others are priced only."""
    fp8: Fp8Recipe = "none"
    """Scales of the layers' products in FP8; memo-exec runs ``tensor`` and ``block``, on Hopper."""
    mlp_chunk_tokens: Tokens = 0
    mlp_rebuild: MlpRebuild = "block"
    attention_chunk_tokens: Tokens = 0
    memory_policy: MemoryPolicy
    rowwise: RowwiseKernel = "torch"
    allocator_limit_gib: int = 0
    """GiB of the device that PyTorch's allocator is limited to; 0: all of it."""
    states: States
    loss: Loss = "auto"
    micro_batch: Positive
    peak_device_bytes: Bytes
    peak_by_class: dict[str, Bytes] = {}
    """Live bytes by buffer class at the peak; an arena or an allocator has more around them."""
    reserved_bytes: Bytes | None = None
    """Peak bytes that PyTorch's caching allocator reserves; null when it runs out of memory or memory is planned."""
    allocation_retries: int = 0
    """Allocation retries in a step."""
    peak_host_bytes_per_node: Bytes
    lanes: dict[str, Seconds] = {}
    """Busy seconds by lane; empty when the plan does not fit."""
    stalls: list[Stall]
    shortfall_bytes: Bytes = 0
    reason: str = ""
    outside_calibration: list[str] = []
    interval: StepInterval | None = None
    """Null when the plan does not fit, or when fewer than five rows of its class are published."""
