"""The decisions of one training step, what they are predicted to cost, and where they came from (``memo.plan/2``).

Decisions alone determine the program; prediction and provenance can be dropped or computed anew on another machine.
"""

from __future__ import annotations

from typing import Annotated, Literal

import msgspec

from memo_sim.contract.hardware import DtypeName
from memo_sim.contract.model import Model
from memo_sim.contract.units import (
    Bytes,
    Degree,
    Fraction,
    Positive,
    Seconds,
    SequenceTokens,
    Tokens,
    Width,
    ZeroLevel,
)

Recompute = Literal["none", "full", "selective", "tokenwise"]
"""none: nothing is rebuilt. full: each layer's whole forward. selective: attention alone, from kept Q, K, V (as
Megatron-LM does). tokenwise: the rows that are not swapped, attention never (MEMO)."""
MemoryPolicy = Literal["planned", "caching", "eager"]
"""planned: one arena with planned addresses. caching: the same requests, served by PyTorch's caching allocator. eager:
that allocator under an eager framework, which asks for more (an fp32 loss) and gets it late (``record_stream``)."""
States = Literal["fp32", "bf16", "host"]
CpExchange = Literal["ring", "all_gather", "rsa"]
"""How context-parallel ranks come by each other's keys and values. ring: passed on hop by hop, parts of attention
merged. all_gather: gathered at once. rsa: passed on, keys first, while whole rows of scores are written to memory by
torch's products instead of the attention kernel (ring self-attention); with one rank they are written, too."""
Overlap = Literal["none", "gradients", "both"]
"""What of ZeRO 0 and 1 runs beside compute. none: gradients are summed over replicas and parameters gathered when the
step's last gradient is there. gradients: each block's are summed behind its last backward. both: and the parameters of
ZeRO 1 are gathered at the start of the following step, block by block, ahead of its forward."""
Schedule = Literal["gpipe", "1f1b", "interleaved", "zero-bubble"]
"""In which order a pipeline stage plays micro-batches (``program/layout/schedule.py``)."""
Partition = Literal["length", "flops"]
"""How a sequence is cut into subsequences: as many tokens each, or as much forward work each (SPPO 4)."""
RowwiseKernel = Literal["torch", "triton"]
HostAllocator = Literal["exact", "power_of_two"]
Status = Literal["ok", "gpu_oom", "host_oom", "invalid"]

SWAP_GRANULE_TOKENS = 128


class Layout(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """How the work is divided: each number is a degree."""

    tp: Degree = 1
    sequence_parallel: bool = False
    cp: Degree = 1
    cp_exchange: CpExchange = "ring"
    ulysses: Degree = 1
    metp: Degree = 1
    overlap_exchanges: bool = True
    """Whether METP's ranks compute beside what they exchange; without, compute stands still meanwhile."""
    pp: Degree = 1
    """Pipeline stages: each holds as many layers; the first the embedding as well, the last the head."""
    schedule: Schedule = "1f1b"
    virtual_stages: Degree = 1
    """Chunks of layers a stage holds, for the interleaved schedule alone."""
    overlap_p2p: bool = True
    """Whether stages compute beside what they hand over: received a pass ahead, sent beside the next pass. Without,
    each pass is followed by its sends (Megatron-LM's 1F1B)."""
    dp: Degree = 1
    zero: ZeroLevel = 0
    subsequences: Degree = 1
    """Parts of a sequence that pass a stage one behind the other (SPPO's N)."""
    partition: Partition = "flops"
    multiplexed: bool = False
    """Whether stages that have nothing to do, while the pipeline of subsequences fills and drains, play rows of the
    others' (SPPO 6.2)."""

    @property
    def devices(self) -> int:
        """Devices the layout occupies."""
        return self.tp * self.cp * self.ulysses * self.metp * self.pp * self.dp

    @property
    def replicas(self) -> int:
        """Ranks that hold the same parameters of a layer, over which ZeRO divides."""
        return self.cp * self.ulysses * self.dp

    @property
    def divided(self) -> int:
        """Ranks that a layer's products and heads are divided over."""
        return self.tp * self.metp

    @property
    def ring(self) -> int:
        """Ranks that a sequence is divided over in zigzag chunks: of context parallelism or of METP."""
        return self.cp * self.metp


class Kernels(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Which implementation plays an operator; it decides workspaces, so it belongs to the plan."""

    attention: str = "flash2"
    head_groups: Width = 1
    """Attention runs in this many groups of heads, one after the other (bounds its workspace)."""
    rowwise: RowwiseKernel = "torch"
    """What plays norms, activations, rotary and loss: torch's operators one by one, or fused Triton kernels."""


class Decisions(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Everything that ``lower`` reads, and nothing else.

    ``swapped_tokens`` counts the tokens of one rank's micro-batch shard (micro_batch x seq_tokens / cp / metp /
    ulysses) whose skeletal tensors are swapped: 0 with recompute none = keep, all of them = full swap; a multiple of
    128 or all. With ``tokenwise`` the other tokens are recomputed, and layer input and attention output are swapped
    whole. With ``full`` the layer input is all there is to swap; rows of it that are not swapped are kept.

    ``subsequence_swapped_tokens`` are those of each subsequence, where there are several and they neither swap nothing
    nor everything; they sum to ``swapped_tokens``, and each is a multiple of 128 or its whole part
    (``program/layout/partition.py``).
    """

    model: Model
    layout: Layout = Layout()
    seq_tokens: SequenceTokens
    micro_batch: Degree = 1
    global_batch: Degree = 1
    recompute: Recompute = "none"
    keep_norms: bool = False
    """Whether METP's layers keep what their norms make, the input of either half, as its authors count (Table 1) and
    autograd does; without, backward makes it again."""
    swapped_tokens: Tokens = 0
    subsequence_swapped_tokens: tuple[Tokens, ...] = ()
    offload_window: Annotated[int, msgspec.Meta(ge=0, le=64)] = 0
    """Where what is swapped lies on the device. 0: in two rounding buffers that layers take in turn (MEMO 4.1). Else in
    buffers of each subsequence's own, which leave while so many following passes of the stage are computed (SPPO 5.2:
    1), and come back during the pass before their backward."""
    memory_policy: MemoryPolicy = "planned"
    host_allocator: HostAllocator = "exact"
    states: States = "fp32"
    overlap: Overlap = "none"
    loss_chunk_tokens: Tokens = 0
    """Tokens whose logits exist at once; 0 = all of them."""
    mlp_chunk_tokens: Tokens = 0
    """Tokens of a rank's micro-batch whose MLP exists at once, under full recompute alone; 0 = all of them. In row
    blocks the MLP is rebuilt without its second product, block by block, right before each block's backward."""
    attention_chunk_tokens: Tokens = 0
    """Tokens of the sequence whose queries exist at once in attention, and their keys and values at a time, under full
    recompute alone; 0 = all of them. The other chunks wait in host memory (FPDT, Yao et al. 2024)."""
    kernels: Kernels = Kernels()
    dtype: DtypeName = "bf16"
    deterministic: bool = False
    replay_allocator: bool = False
    """Whether memo-exec's allocator below torch serves libraries out of the arena (CUDA alone); else torch's allocator
    hands out what they ask for, beside it."""

    def __post_init__(self) -> None:
        """Refuse a number of swapped tokens that row blocks cannot have."""
        swapped, tokens = self.swapped_tokens, self.local_tokens
        if swapped > tokens:
            raise ValueError(f"swapped_tokens ({swapped}) are more than the {tokens} tokens of a rank's micro-batch")
        if self.layout.subsequences > 1 and 0 < swapped < tokens:
            self._check_subsequences()
        elif self.subsequence_swapped_tokens:
            raise ValueError("subsequence_swapped_tokens are for several subsequences that swap some of their tokens")
        elif swapped % SWAP_GRANULE_TOKENS and swapped != tokens:
            raise ValueError(
                f"swapped_tokens ({swapped}) must be a multiple of {SWAP_GRANULE_TOKENS}, or all {tokens} tokens"
            )

    def _check_subsequences(self) -> None:
        each, count = self.subsequence_swapped_tokens, self.layout.subsequences
        if len(each) != count:
            raise ValueError(f"subsequence_swapped_tokens has {len(each)} entries, wanted {count}: one a subsequence")
        if sum(each) != self.swapped_tokens:
            raise ValueError(f"subsequence_swapped_tokens sum to {sum(each)}, swapped_tokens are {self.swapped_tokens}")

    @property
    def local_tokens(self) -> int:
        """Tokens of one micro-batch on one rank, outside of sequence-parallel regions."""
        return self.micro_batch * self.seq_tokens // (self.layout.ring * self.layout.ulysses)

    @property
    def swap_granule(self) -> int:
        """Tokens that row blocks come in: 128 rows on every rank that holds a token shard."""
        return SWAP_GRANULE_TOKENS * (self.layout.tp if self.layout.sequence_parallel else 1)

    @property
    def alpha(self) -> float:
        """Fraction of tokens swapped (MEMO 4.1)."""
        return self.swapped_tokens / self.local_tokens

    @property
    def micro_batches(self) -> int:
        """Micro-batches each data-parallel rank plays in a step."""
        return self.global_batch // (self.micro_batch * self.layout.dp)


class Stall(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Time a lane stood still for one kind of instruction of another lane, or another stage; summed over the step.

    Compute's reach to the step's end: busy seconds and stalls are the whole step.
    """

    lane: str
    waits_for: str
    seconds: Seconds
    count: int


class MovedBytes(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Bytes one rank copies in a step."""

    d2h: Bytes = 0
    h2d: Bytes = 0


class Prediction(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What the engine says of a plan on one cluster; no time when it does not fit."""

    status: Status
    hardware: str = ""
    step_s: Seconds | None = None
    mfu: float | None = None
    tgs: float | None = None
    peak_device_bytes: Bytes = 0
    peak_by_class: dict[str, Bytes] = {}
    reserved_bytes: Bytes | None = None
    """Most that PyTorch's caching allocator reserves; null where it runs out, or memory is planned."""
    allocation_retries: int = 0
    """Times in a step that the allocator gives back all it has cached, and asks the device again."""
    peak_host_bytes_per_node: Bytes = 0
    moved_bytes: MovedBytes = MovedBytes()
    lanes: dict[str, Seconds] = {}
    """Busy time by lane."""
    stalls: list[Stall] = []
    shortfall_bytes: Bytes = 0
    reason: str = ""
    outside_calibration: list[str] = []
    """Curves that were asked beyond the range they were measured in."""


class Provenance(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Who made the file, when, from what; never read by ``lower``."""

    created: str = ""
    memo_version: str = ""
    command: str = ""
    cluster: str = ""
    hardware_sha256: str = ""


class Plan(
    msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, tag_field="schema", tag="memo.plan/2"
):
    """A plan file: decisions, prediction and provenance apart; ``program_sha256`` pins the program they lower to."""

    decisions: Decisions
    program_sha256: str
    placement_sha256: str = ""
    """Of the placement beside the plan (``plan.placement.json``) that a planned program runs in."""
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
    """Passes during which a subsequence's swapped rows leave; 0 where layers take turns in two buffers."""
    recompute: Recompute
    mlp_chunk_tokens: Tokens = 0
    attention_chunk_tokens: Tokens = 0
    memory_policy: MemoryPolicy
    states: States
    micro_batch: Positive
    peak_device_bytes: Bytes
    reserved_bytes: Bytes | None = None
    """Most that PyTorch's caching allocator reserves; null where it runs out, or memory is planned."""
    allocation_retries: int = 0
    """Times in a step that it gives back all it has cached."""
    peak_host_bytes_per_node: Bytes
    stalls: list[Stall]
    shortfall_bytes: Bytes = 0
    reason: str = ""
    outside_calibration: list[str] = []
