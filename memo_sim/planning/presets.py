"""Systems of the literature as presets: which knobs they fix, and what they leave to the search.

A system is no code path: it narrows the policies and the layouts that ``space.py`` enumerates, and says who serves its
memory. The rivals run on PyTorch's caching allocator under an eager framework (``memory/eager_framework.py``).

    every-layout       all that memo plans itself; a question that names no system is of this one
    any                the same policies on tp, a zigzag ring and dp alone, with ZeRO 1, and expert parallelism. For a
                       quick answer, or for plans without stages, ZeRO 3, Ulysses and METP; the last two may be pinned.
                       Where a node's devices exchange through the host, ZeRO 3 is searched too
    memo               Megatron-LM's model and parallelisms (MEMO 4.3.4): its whole logits, its distributed optimizer
                       with gradients reduced and parameters gathered beside compute (NVIDIA/Megatron-LM#391). Layouts
                       were tuned by hand (5.2); every one that the paper names has tensor parallelism of 4, 8 or 16.
                       Full recompute, where a question asks for it, is played in the two rounding buffers, which are
                       allocated before the first step and hold every layer's skeletal tensors (4.1, 4.3.4). Without a
                       memory plan it is Megatron-LM's (5.3.1), whose tensors PyTorch's allocator serves
    metp               memory-efficient tensor parallelism (Liang et al. 2025) with dp and ZeRO 1 or 3 (its 6.2: FSDP is
                       orthogonal), on planned memory and with MEMO's swap, which the paper has not. ``every-layout``
                       searches its degree too, beside others. No other system does, so that their figures stay; those
                       whose memory and ZeRO allow it have it where a question pins it
    deepspeed-ulysses  all-to-all around attention, degrees that divide the heads, ZeRO 3 over all ranks (MEMO 5.1, 5.2)
                       and full recompute, as in Megatron-DeepSpeed's examples of sequence parallelism, and as MEMO 5.2
                       says of its baselines
    megatron-lm        tensor parallelism with sequence parallelism, a zigzag ring, pipeline stages (MEMO 5.1), and the
                       distributed optimizer where there are replicas: MEMO 2.3 has ZeRO divide states among
                       data-parallel workers. Inferred, not read: with states divided over the ring too, as
                       Megatron-LM could, 30B would run up to 896K in Table 3, where it ends at 384K. ``zero`` 1 may be
                       pinned. Its recompute methods block and uniform are ``--recompute-layers`` first-K and groups-N;
                       pairs of layers are tried where nothing else fits
    fsdp               data parallelism alone, every parameter gathered for one use (ZeRO 3), around torch modules that
                       run eagerly. Mixed precision: only fp32 shards are stored, and cast for every gather (torch,
                       ``distributed/fsdp``: ``MixedPrecision(param_dtype)``). Full recompute is ``checkpoint_wrapper``
                       with ``NO_REENTRANT``, which ends early since PyTorch 2.1.
    ring-attention     a ring over sequence blocks, parameters sharded over all ranks (Liu et al. 2023, section 4)
    rsa                ring self-attention over sequence blocks, parameters and states whole on every rank: scores are
                       written, no flash kernel can play it (Li et al. 2021; METP's Tables 1 and 2). Its hops run beside
                       compute, as those of a ring
    deepspeed-fpdt     deepspeed-ulysses that offloads layer inputs, and plays MLP, loss and attention in chunks, whose
                       keys and values wait on the host (FPDT, Yao et al. 2024, as Megatron-DeepSpeed has it)
    terapipe           subsequences through pipeline stages, all forwards before all backwards (Li et al. 2021)
    seq1f1b            subsequences through pipeline stages, 1F1B over them (Sun et al. 2024)
    sppo               seq1f1b whose subsequences are offloaded by as much as hides, no recompute; tensor parallelism
                       with sequence parallelism inside a node, stages across nodes (SPPO 5.2, 6.1, Table 4)

Frameworks of 2025 and 2026, from their sources (commits as read), and what memo cannot express of them:

    torchtitan         FSDP2 (ZeRO 3 over dp x cp; HSDP: ``--zero-ranks``), tp with sequence parallelism, cp that
                       gathers keys and values (``context_parallel_rotate_method``), stages. Recompute by operator, its
                       default, or none, or full. Eager modules (its ``compile`` is off unless asked for: ``--rowwise
                       compiled``), torch's flash attention first of its backends, cross_entropy of an fp32 copy of all
                       logits, sharded over tp where there is tp (pytorch/torchtitan@b5bcd76: config/configs.py,
                       distributed/fsdp.py, models/common/attention.py, components/loss.py). Its selective option N
                       (every N-th layer) is ``--recompute-layers every-N``. Stages have ZeRO 1 here, torchtitan's
                       ZeRO 2. AdamW is fused (components/optimizer.py; foreach until 2025: ``--adamw foreach``).
                       Asynchronous tp, which needs compiled modules: ``--tp-overlap chunked --rowwise compiled``
                       (distributed/compile.py). Stored shards are fp32. Its full recompute repeats whole layers
                       (``early_stop=False`` in distributed/activation_checkpoint.py), and ended early in 2025
    trl-fsdp2          TRL on accelerate: ZeRO 3 over dp x cp, keys and values gathered, full recompute (inputs on the
                       device unless ``--offload-inputs``, which is transformers' ``{"offload": True}``),
                       ``chunked_nll`` in chunks of 256 tokens under checkpoint with accuracy and entropy (before TRL
                       1.13 of fp32 products: ``--loss checkpointed-fp32``),
                       Hugging Face's eager modules, torch's attention, cuDNN's where it has that
                       (huggingface/trl@f2cd577: trl/trainer/sft_trainer.py, sft_config.py;
                       huggingface/accelerate@16cb6eb: utils/fsdp_utils.py, utils/dataclasses.py;
                       huggingface/trl#6846, #6863). A model in bf16 without mixed precision:
                       ``--states pure-bf16``. An MLP in tiles (``--mlp-chunk``) is a loop over ``split``, whose tiles
                       autograd keeps: ``--mlp-rebuild layer``
    trl-tokenwise      trl-fsdp2 without gradient checkpointing, whose decoder layers ``memo_exec.tokenwise`` wraps:
                       what Hugging Face's modules save is swapped or recomputed by token, and the last two layers keep
                       it (``program/layers/huggingface.py``). Where everything kept fits and is faster, nothing is
                       wrapped. The copies that join the rows of q, k, v and of the output are left out
    verl-fsdp          The actor of verl under FSDP: Ulysses, ZeRO 3, full recompute, transformers' eager modules around
                       FlashAttention-2, torch's AdamW with its default kernels. The logits of all tokens exist at once,
                       and flash-attn's cross entropy writes their gradient over them (volcengine/verl@b178a3c:
                       workers/actor/dp_actor.py, utils/torch_functional.py). ``use_fused_kernels``: ``--loss
                       checkpointed --loss-chunk 512``. FSDP1 (``--sharding fsdp1``) is verl's default. TiledMLP is that
                       of DeepSpeed. Meant for ``--objective grpo``
    deepspeed-alst     Arctic long sequence training: Ulysses, ZeRO 3, full recompute whose inputs wait on the host, the
                       MLP in ceil(tokens / hidden) tiles, loss tiles of 1 GiB of logits, Hugging Face's eager modules
                       around FlashAttention-2 (deepspeedai/DeepSpeed@edaa722: TiledMLP and TiledFusedLogitsLoss in
                       runtime/sequence_parallel/ulysses_sp.py). Optimizer states on the host: ``--states host``. An MLP
                       runs forward three times: a tile is rebuilt inside a layer that is recomputed (``--mlp-rebuild
                       twice``)
    megatron-core      Megatron-Core of today: as ``megatron-lm``, but optimizer states are divided over the ring too,
                       stages may be interleaved, any tp is tried, and the loss is its own over the vocabulary, unfused
                       (NVIDIA/Megatron-LM@d98e8a6: training/arguments.py, core/transformer/transformer_config.py,
                       core/model_parallel_config.py). Distributed optimizer and both overlaps are on, which are options
                       there. Its recompute methods block and uniform are ``--recompute-layers first-K`` and
                       ``groups-N``; of its recompute modules core_attn, layernorm and mlp are ``--recompute``
                       selective, norms and mlp, each alone. ``tp_comm_overlap``, off unless asked for: ``--tp-overlap
                       chunked`` (NVIDIA/TransformerEngine: pytorch/module/base.py, ``initialize_ub``; its buffers live
                       as long as the job, and behind projection and second MLP product it cuts sums into four pieces by
                       default). No CUDA graphs
    trl-layouts        TRL's layouts, recompute and tiles of the loss, for jobs of which memo knows neither the kernels
                       in transformers nor the kept tensors: adapters, latent attention, sinks, Gemma's layers, layers
                       that differ, and experts other than ``trl-fsdp2``'s. They are played by memo's own operators, in
                       PyTorch's caching allocator
    megatron-layouts   Megatron-Core's layouts, recompute and loss as above, and expert parallelism, for models of which
                       memo knows neither what Megatron's modules save nor how long its kernels take: experts, latent
                       attention. They are played by memo's own operators, in PyTorch's caching allocator
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from memo_sim.contract.accuracy import Framework
from memo_sim.contract.attention_kernels import AttentionName
from memo_sim.contract.errors import UsageError, did_you_mean
from memo_sim.contract.knobs import (
    AdamwKernels,
    CpExchange,
    Loss,
    MemoryPolicy,
    MlpRebuild,
    Modules,
    Overlap,
    RowwiseKernel,
    Schedule,
    Sharding,
    Streams,
    ZeroParams,
)
from memo_sim.contract.plan import Decisions, HostAllocator
from memo_sim.contract.systems import DEFAULT_SYSTEM
from memo_sim.contract.units import KIB
from memo_sim.program.layout.attention_chunks import in_chunks
from memo_sim.program.layout.recomputed_layers import ALL
from memo_sim.program.layout.rowwise_blocks import ROWWISE

OF_PARTS = {
    "selective": "selective recompute",
    "norms": "recompute of norms",
    "mlp": "recompute of the MLP",
    "operators": "recompute by operator",
}
"""How policies are called that recompute parts of every layer and swap nothing."""


@dataclass(frozen=True, slots=True)
class Policy:
    """What a system may do with activations: a recompute mode, and a fixed alpha or None for a searched one.

    ``mlp_blocks``: the MLP in row blocks (with row-wise recompute, all but attention); ``attention_chunks``: attention
    in chunks of the sequence. Full recompute can have either; row-wise recompute has chunks with blocks.
    """

    recompute: str
    alpha: float | None
    mlp_blocks: bool = False
    attention_chunks: bool = False
    hides: bool = False
    """Whether alpha is as much as hides under the next subsequence (SPPO 5.2), where it is not searched."""
    layers: str = ALL
    """The layers that full recompute is about (``Decisions.recompute_layers``)."""
    finest: bool = False
    """Whether its blocks and chunks are as small as any that are tried (``blocks.py``), for the least memory."""

    @classmethod
    def of(cls, decisions: Decisions) -> Policy:
        """Return what ``decisions`` do, as a policy that fixes it."""
        chunked, layers = in_chunks(decisions), decisions.recompute_layers
        return cls(decisions.recompute, decisions.alpha, decisions.mlp_chunk_tokens > 0, chunked, layers=layers)

    @property
    def label(self) -> str:
        """How the policy is called in tables and sentences."""
        if self.recompute == "full":
            inputs = f", inputs {'swapped' if self.alpha == 1 else 'partly swapped'}" if self.alpha else ""
            blocks = ", MLP in blocks" if self.mlp_blocks else ""
            layers = "" if self.layers == ALL else f", layers {self.layers}"
            return f"full recompute{layers}{inputs}{blocks}{', attention in chunks' if self.attention_chunks else ''}"
        if self.recompute == ROWWISE:
            chunks = ", in chunks" if self.attention_chunks else ""
            return f"row-wise recompute, attention {self._fate_of_shared}{chunks}"
        if self.recompute in OF_PARTS:
            return OF_PARTS[self.recompute]
        if self.hides:
            return "sequence-aware offload"
        if self.recompute == "none":
            return {0.0: "keep", 1.0: "full swap"}.get(-1.0 if self.alpha is None else self.alpha, "partial swap")
        return "token-wise"

    @property
    def swaps_some(self) -> bool:
        """Whether alpha is searched between its ends: some rows are swapped, and the others are kept on the device."""
        return self.alpha is None and not self.hides and self.recompute in ("none", ROWWISE)

    @property
    def _fate_of_shared(self) -> str:
        """How tables call what happens to the tensors that row-wise recompute starts from."""
        return {0.0: "kept", 1.0: "swapped"}.get(-1.0 if self.alpha is None else self.alpha, "partly swapped")


KEEP = Policy("none", 0.0)
FULL_RECOMPUTE = Policy("full", 0.0)
INPUTS_SWAPPED = Policy("full", 1.0)
"""Full recompute whose layer inputs, all that it keeps, lie in host memory."""
MLP_IN_BLOCKS = Policy("full", 0.0, mlp_blocks=True)
INPUTS_SWAPPED_MLP_IN_BLOCKS = Policy("full", 1.0, mlp_blocks=True)
LEAST_MEMORY = Policy("full", 1.0, mlp_blocks=True, attention_chunks=True)
"""Nothing of a layer but its input is kept, and that on the host, where attention's chunks wait as well (FPDT)."""
ROWWISE_KEPT = Policy(ROWWISE, 0.0, mlp_blocks=True)
ROWWISE_SWAPPED = Policy(ROWWISE, 1.0, mlp_blocks=True)
"""Of a layer its input, attention's output and the log-sum-exp outlive its forward: on the device, or on the host."""
ROWWISE_PARTLY_SWAPPED = Policy(ROWWISE, None, mlp_blocks=True)
"""Some of their rows are on the host, the others on the device."""
ROWWISE_IN_CHUNKS = Policy(ROWWISE, 1.0, mlp_blocks=True, attention_chunks=True)
"""The same on the host, and queries, keys and values of chunks alone (``attention/kept_chunks.py``)."""
FINEST = (replace(ROWWISE_IN_CHUNKS, finest=True), replace(LEAST_MEMORY, finest=True))
"""The two that need the least memory, in more and smaller blocks and chunks: they take longer."""
EVERY_ROWWISE = (ROWWISE_KEPT, ROWWISE_SWAPPED, ROWWISE_PARTLY_SWAPPED, ROWWISE_IN_CHUNKS)
PAIRS_OF_LAYERS = Policy("full", 0.0, layers="groups-2")
"""Full recompute with one input for two layers, which are live at once in backward.

Of a GPT layer, 16 times its input is live (MEMO 3.2). So pairs halve the inputs of a stage for 15 inputs more, and
larger groups save less and hold more."""
SELECTIVE_RECOMPUTE = Policy("selective", 0.0)
MODULES_RECOMPUTE = (Policy("norms", 0.0), Policy("mlp", 0.0))
OPERATOR_RECOMPUTE = Policy("operators", 0.0)
FULL_SWAP = Policy("none", 1.0)
PARTIAL_SWAP = Policy("none", None)
SEQUENCE_AWARE = Policy("none", None, hides=True)
"""Of each subsequence as much is offloaded as hides under the next one's forward, and the rest kept."""
TOKENWISE = Policy("tokenwise", None)
LAGGING = 4
"""Passes that copies may lag behind (SPPO, Figure 8's top): where one is too short for them."""
TORCH_FLASH: tuple[AttentionName, ...] = ("torch-flash", "torch-flash-cpu")
"""FlashAttention-2 inside PyTorch, on a GPU or on a CPU."""
EVERY_FULL = (FULL_RECOMPUTE, INPUTS_SWAPPED, MLP_IN_BLOCKS, INPUTS_SWAPPED_MLP_IN_BLOCKS)


@dataclass(frozen=True, slots=True)
class System:
    """One preset. ``short_sequences`` are policies it falls back to where memory allows (MEMO 5.2).

    ``degrees`` are the ways to divide work that are searched, ``pinnable`` those that it has besides, where a question
    names them; ``zeros`` the levels of ZeRO, where several ranks hold the same parameters; ``cp_exchange`` how cp ranks
    come by keys and values, and ``overlap`` what the replicas exchange beside compute, unless pinned. ``least_tp`` is
    the least tensor parallelism that its authors name, where a node has as many devices.
    """

    name: str
    about: str
    policies: tuple[Policy, ...]
    short_sequences: tuple[Policy, ...] = ()
    last_resorts: tuple[Policy, ...] = ()
    """Policies that are tried where no plan of the others fits (``space.last_resorts``)."""
    host_allocator: HostAllocator = "exact"
    memory_policy: MemoryPolicy = "planned"
    framework: Framework = "torch"
    """The code base that the system is built on. It decides, where memory is not planned, which published rows have
    errors of the same kind."""
    degrees: tuple[str, ...] = ("tp", "cp", "dp")
    pinnable: tuple[str, ...] = ()
    zeros: tuple[int, ...] = (1,)
    searches_ep: bool = False
    """Whether degrees of expert parallelism are searched for models with experts; elsewhere 1 unless pinned."""
    searches_micro_batches: bool = False
    """Whether larger micro-batches are searched where a question leaves them open (``micro_batches.py``)."""
    zeros_over_pcie: tuple[int, ...] = ()
    """The levels of ZeRO in place of ``zeros`` where the GPUs of a node reach each other over PCIe alone.

    Tensor parallelism, which is how the others make room for states, then waits for its collectives in every layer:
    ZeRO 3 is 1.1 to 2 times as fast on RTX 4090, L40S and RTX A6000 nodes."""
    zero_needs_dp: bool = False
    """Whether ZeRO is on only where there is data parallelism; else wherever ranks hold the same parameters."""
    cp_exchange: CpExchange = "ring"
    overlap: Overlap = "none"
    least_tp: int = 1
    chunk_tokens: int = 0
    """Tokens of attention's chunks, where its authors name them (the default of Megatron-DeepSpeed's
    ``--ds-sequence-parallel-fpdt-chunk-size``), who cut a rank's part of a chunk into two row blocks of the MLP
    (its transformer.py) and 32 of the loss (its gpt_model.py); 0: as ``blocks.py`` chooses."""
    waits_for_p2p: bool = False
    """Whether pipeline stages compute nothing while they send and receive."""
    rowwise: RowwiseKernel | None = None
    """Whose row-wise kernels, unless pinned: the framework's, or None for those of memo-exec that are faster.

    Megatron-LM and its fork for DeepSpeed have fused ones, and FSDP wraps modules that run eagerly."""
    streams: Streams = "auto"
    """When memory that other streams use comes back, unless given (``contract/knobs.py``)."""
    zero_params: ZeroParams = "auto"
    """What ZeRO 3 gathers parameters from, unless given."""
    early_stop: bool = False
    """Whether full recompute ends where backward has its tensors, unless pinned (``checkpoint_wrapper`` with
    ``NO_REENTRANT``)."""
    sharding: Sharding = "memo"
    """Whose ZeRO 2 and 3 under an eager framework, unless pinned; fsdp2 is fsdp1 with libraries from before it."""
    adamw: AdamwKernels = "foreach"
    """Kernels of AdamW, unless pinned."""
    modules: Modules = "auto"
    """Whose modules an eager framework trains, unless given."""
    attention: tuple[AttentionName, ...] = ()
    """Attention kernels in the order in which its authors prefer them, unless pinned: the first that the profile has.

    Without one of them, and for systems that name none, the fastest."""
    loss: Loss = "auto"
    """How the loss is computed, unless given. eager-fp32 is sharded over the vocabulary where there is tp (torch's loss
    parallel), which the form of Megatron-LM stands for; blocks is cut into chunks under every memory policy."""
    loss_chunk_tokens: int = 0
    """Tokens of a chunk of the loss, where its authors name them; 0: as ``blocks.py`` chooses."""
    mlp_tiles: bool = False
    """Whether the MLP's row blocks are ceil(tokens / hidden) equal ones (DeepSpeed's TiledMLP)."""
    rounding_buffers: bool = False
    """Whether full recompute is played in the two rounding buffers, unless given, where memory is planned."""
    mlp_rebuild: MlpRebuild = "block"
    """What is repeated of an MLP in row blocks, unless pinned."""
    whole_loss: bool = False
    """Whether the logits of all tokens exist at once."""
    subsequences: bool = False
    """Whether the number of subsequences is searched; others have it where a question names it."""
    offload_windows: tuple[int, ...] = (0,)
    """Passes during which a subsequence's swapped rows leave (``Decisions.offload_window``), 0: as MEMO's layers do.
    What hides under one pass has the first alone, everything else is tried with each."""
    solver: bool = False
    """Whether SPPO's solver (6.1) adds a number of subsequences to those that are searched."""
    multiplexed: bool = False
    """Whether the search tries idle stages as helpers of the others (SPPO 6.2), inside a node."""
    tp_inside_node: bool = False
    """Whether tensor parallelism that is not pinned stays within a node."""
    schedules: tuple[Schedule, ...] = ("1f1b",)
    """In which orders stages play their passes, where that is not pinned; the first alone where stages are."""

    @property
    def recomputes(self) -> frozenset[str]:
        """The recompute modes of its own policies."""
        return frozenset(policy.recompute for policy in self.short_sequences + self.policies)

    @property
    def searched(self) -> frozenset[str]:
        """Names of the knobs (``contract/knobs.py``) that are searched under this system unless they are pinned."""
        policies = self.short_sequences + self.policies
        several = {
            "zero": len(self.zeros) > 1,
            "ep": self.searches_ep,
            "allocator_limit_gib": self.memory_policy != "planned",
            "subsequences": self.subsequences,
            "schedule": len(self.schedules) > 1,
            "virtual_stages": "interleaved" in self.schedules,
            "multiplexed": self.multiplexed,
            "offload_window": len(self.offload_windows) > 1,
            "recompute": len(self.recomputes) > 1,
            "recompute_layers": any(policy.layers != ALL for policy in self.last_resorts),
            "alpha": len({policy.alpha for policy in policies}) > 1 or policies[0].alpha is None,
            "mlp_chunk_tokens": len({policy.mlp_blocks for policy in policies}) > 1,
            "attention_chunk_tokens": len({policy.attention_chunks for policy in policies}) > 1,
        }
        return frozenset((*self.degrees, *(name for name, searched in several.items() if searched)))


TRL = System(
    "trl-fsdp2",
    "TRL with FSDP2: ZeRO 3 over dp and cp that gathers; full recompute, loss in chunks, eager modules",
    (FULL_RECOMPUTE,),
    memory_policy="eager",
    rowwise="eager",
    streams="events",
    zero_params="cast",
    early_stop=True,
    sharding="fsdp2",
    adamw="fused",
    modules="huggingface",
    attention=("torch-cudnn", *TORCH_FLASH),
    loss="checkpointed",
    loss_chunk_tokens=256,
    mlp_rebuild="layer",
    degrees=("cp", "dp"),
    pinnable=("tp",),  # transformers' own, which TRL's command line does not start
    zeros=(3,),
    cp_exchange="all_gather",
)

SYSTEMS = {
    s.name: s
    for s in (
        System(
            "any",
            "a narrower, quicker search: every policy on tp, ring cp and dp alone, with ZeRO 1, and ep for experts",
            (KEEP, TOKENWISE, *EVERY_ROWWISE, *EVERY_FULL, LEAST_MEMORY, FULL_SWAP, PARTIAL_SWAP),
            last_resorts=FINEST,
            pinnable=("ulysses", "metp"),
            searches_ep=True,
            searches_micro_batches=True,
            zeros_over_pcie=(1, 3),
        ),
        System(
            DEFAULT_SYSTEM,
            "the default: every policy on every layout: tp, ring cp, Ulysses, METP, pp and dp, with ZeRO 1 or 3",
            (KEEP, TOKENWISE, *EVERY_ROWWISE, *EVERY_FULL, LEAST_MEMORY, FULL_SWAP, PARTIAL_SWAP),
            last_resorts=FINEST,
            degrees=("tp", "cp", "ulysses", "metp", "pp", "dp"),
            searches_ep=True,
            searches_micro_batches=True,
            zeros=(1, 3),
            schedules=("1f1b", "interleaved", "zero-bubble"),
        ),
        System(
            "memo",
            "MEMO: token-wise recompute and swap, keep when that fits and is faster; one pinned block a layer",
            (TOKENWISE,),
            framework="megatron",
            short_sequences=(KEEP,),
            host_allocator="power_of_two",
            rounding_buffers=True,
            pinnable=("metp",),
            overlap="both",
            least_tp=4,
            whole_loss=True,
        ),
        System(
            "full-recompute",
            "every layer keeps its input alone and runs forward again in backward",
            (FULL_RECOMPUTE,),
            pinnable=("metp",),
        ),
        System("full-swap", "every skeletal tensor goes to the host and comes back", (FULL_SWAP,), pinnable=("metp",)),
        System(
            "metp",
            "METP: tokens and weights divided alike, weights pass round a ring; dp; ZeRO 1, 3; any recompute or swap",
            (KEEP, TOKENWISE, FULL_SWAP, FULL_RECOMPUTE, INPUTS_SWAPPED, INPUTS_SWAPPED_MLP_IN_BLOCKS, LEAST_MEMORY),
            degrees=("metp", "dp"),
            zeros=(1, 3),
        ),
        System(
            "megatron-lm",
            "Megatron-LM: tp with sequence parallelism, ring cp, pp, dp with ZeRO 1; own recompute, caching allocator",
            (KEEP, SELECTIVE_RECOMPUTE, FULL_RECOMPUTE),
            last_resorts=(PAIRS_OF_LAYERS,),
            framework="megatron",
            memory_policy="eager",
            rowwise="fused",
            degrees=("tp", "cp", "pp", "dp"),
            pinnable=("ulysses",),  # cp_comm_type a2a, later than MEMO's comparison
            zero_needs_dp=True,
            waits_for_p2p=True,
            overlap="both",
            least_tp=4,
            whole_loss=True,
        ),
        System(
            "deepspeed-ulysses",
            "DeepSpeed-Ulysses: all-to-all around attention and ZeRO 3; full recompute, caching allocator",
            (FULL_RECOMPUTE,),
            framework="deepspeed",
            memory_policy="eager",
            rowwise="fused",
            degrees=("ulysses", "dp"),
            zeros=(3,),
        ),
        System(
            "fsdp",
            "FSDP: dp alone with ZeRO 3; keep or full recompute, caching allocator",
            (KEEP, FULL_RECOMPUTE),
            memory_policy="eager",
            rowwise="eager",
            zero_params="cast",
            early_stop=True,
            sharding="fsdp2",
            degrees=("dp",),
            zeros=(3,),
        ),
        System(
            "ring-attention",
            "Ring Attention: a ring over the sequence and ZeRO 3; keep or full recompute, caching allocator",
            (KEEP, FULL_RECOMPUTE),
            memory_policy="eager",
            degrees=("cp", "dp"),
            zeros=(3,),
        ),
        System(
            "rsa",
            "RSA: ring self-attention, whole rows of scores in memory, whole parameters; keep or full recompute",
            (KEEP, FULL_RECOMPUTE),
            memory_policy="eager",
            degrees=("cp", "dp"),
            zeros=(0,),
            cp_exchange="rsa",
        ),
        System(
            "deepspeed-fpdt",
            "DeepSpeed-Ulysses with FPDT: ZeRO 3, full recompute from host inputs; attention, MLP and loss in chunks",
            (LEAST_MEMORY,),
            framework="deepspeed",
            memory_policy="eager",
            rowwise="fused",
            chunk_tokens=64 * KIB,
            degrees=("ulysses", "dp"),
            zeros=(3,),
        ),
        System(
            "terapipe",
            "TeraPipe: subsequences of equal work through pipeline stages, all forwards first; keep or full recompute",
            (KEEP, FULL_RECOMPUTE),
            degrees=("tp", "pp"),
            subsequences=True,
            schedules=("gpipe",),
        ),
        System(
            "seq1f1b",
            "Seq1F1B: subsequences of equal work through pipeline stages in 1F1B's order; keep or full recompute",
            (KEEP, FULL_RECOMPUTE),
            framework="megatron",
            degrees=("tp", "pp"),
            subsequences=True,
        ),
        System(
            "sppo",
            "SPPO: subsequences through pipeline stages, each offloaded by what hides under the next; tp in a node, "
            "multiplexed where all stages are in one",
            (SEQUENCE_AWARE, FULL_SWAP),
            framework="megatron",
            degrees=("tp", "pp"),
            subsequences=True,
            offload_windows=(1, LAGGING),
            solver=True,
            multiplexed=True,
            tp_inside_node=True,
        ),
        System(
            "torchtitan",
            "torchtitan: FSDP2 (ZeRO 3), tp, cp that gathers, pp; recompute by operator, full or none; eager modules",
            (OPERATOR_RECOMPUTE, KEEP, FULL_RECOMPUTE),
            memory_policy="eager",
            rowwise="eager",
            streams="events",
            zero_params="cast",
            sharding="fsdp2",
            adamw="fused",
            attention=TORCH_FLASH,
            loss="eager-fp32",
            degrees=("tp", "cp", "pp", "dp"),
            zeros=(3,),
            cp_exchange="all_gather",
            waits_for_p2p=True,
            overlap="both",
            schedules=("1f1b", "interleaved"),
        ),
        TRL,
        replace(
            TRL,
            name="trl-tokenwise",
            about="TRL with memo_exec.tokenwise: alpha of the tokens swapped, the others recomputed; else as trl-fsdp2",
            policies=(TOKENWISE,),
            short_sequences=(KEEP,),
            pinnable=(),
        ),
        replace(
            TRL,
            name="trl-layouts",
            about="TRL's layouts and recompute, played by memo's kernels: adapters, latents, sinks, any experts, Gemma",
            policies=(KEEP, FULL_RECOMPUTE, INPUTS_SWAPPED),
            memory_policy="caching",
            rowwise=None,
            streams="auto",
            zero_params="auto",
            early_stop=False,
            sharding="memo",
            adamw="foreach",
            modules="auto",
            loss="auto",
            mlp_rebuild="block",
        ),
        replace(
            TRL,
            name="verl-fsdp",
            about="verl's actor with FSDP: ZeRO 3 over Ulysses and dp; full recompute, whole logits, eager modules",
            adamw="foreach",
            attention=("flash2", *TORCH_FLASH),
            loss="fused",
            loss_chunk_tokens=0,
            whole_loss=True,
            mlp_rebuild="twice",
            degrees=("ulysses", "dp"),
            pinnable=(),
            cp_exchange="ring",
        ),
        System(
            "deepspeed-alst",
            "DeepSpeed ALST: Ulysses, ZeRO 3, full recompute from host inputs; MLP and loss in tiles, eager modules",
            (INPUTS_SWAPPED_MLP_IN_BLOCKS,),
            framework="deepspeed",
            memory_policy="eager",
            rowwise="eager",
            attention=("flash2", *TORCH_FLASH),
            loss="blocks",
            mlp_tiles=True,
            mlp_rebuild="twice",
            degrees=("ulysses", "dp"),
            zeros=(3,),
        ),
        System(
            "megatron-core",
            "Megatron-Core of today: tp, ring cp, pp (interleaved too), dp; ZeRO 1 over dp and cp, fused kernels",
            (KEEP, SELECTIVE_RECOMPUTE, FULL_RECOMPUTE),
            last_resorts=(PAIRS_OF_LAYERS,),
            framework="megatron",
            memory_policy="eager",
            rowwise="fused",
            loss="vocab-parallel",
            degrees=("tp", "cp", "pp", "dp"),
            pinnable=("ulysses",),  # cp_comm_type a2a
            waits_for_p2p=True,
            overlap="both",
            schedules=("1f1b", "interleaved"),
        ),
        System(
            "megatron-layouts",
            "Megatron-Core's layouts and recompute with ep, played by memo's kernels: models with experts or latents",
            (KEEP, SELECTIVE_RECOMPUTE, FULL_RECOMPUTE),
            last_resorts=(PAIRS_OF_LAYERS,),
            memory_policy="caching",
            loss="vocab-parallel",
            degrees=("tp", "cp", "pp", "dp"),
            pinnable=("ulysses",),
            searches_ep=True,
            waits_for_p2p=True,
            overlap="both",
            schedules=("1f1b", "interleaved"),
        ),
    )
}


def find_system(name: str) -> System:
    """Return the preset called ``name``.

    Raises:
        UsageError: when there is none.
    """
    if name not in SYSTEMS:
        raise UsageError("unknown system", got=repr(name), wanted=", ".join(SYSTEMS), hint=did_you_mean(name, SYSTEMS))
    return SYSTEMS[name]


def known_system(name: str, other: str = DEFAULT_SYSTEM) -> str:
    """Return the system that a document names, ``other`` where it names none or one of another version."""
    return name if name in SYSTEMS else other
