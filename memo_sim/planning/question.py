"""What is asked: a model, a sequence, a cluster, a system, and the knobs that are pinned."""

from __future__ import annotations

from dataclasses import dataclass, field

import msgspec

from memo_sim.contract.attention_kernels import ATTENTION_KERNELS, FLASH, Libraries
from memo_sim.contract.boards import OPTION_SOURCE
from memo_sim.contract.cluster import Cluster
from memo_sim.contract.goodput import Failures
from memo_sim.contract.hardware import SAFETY, Hardware, Quantity, Source
from memo_sim.contract.knobs import (
    MOST_ZERO,
    AdamwKernels,
    Chosen,
    DtypeName,
    Loss,
    MemoryPolicy,
    Modules,
    Overlap,
    Partition,
    Pins,
    RowwiseKernel,
    Sharding,
    Streams,
    ZeroParams,
)
from memo_sim.contract.model import Model
from memo_sim.contract.plan import Decisions, Layout
from memo_sim.contract.systems import DEFAULT_SYSTEM
from memo_sim.planning.fp8 import fp8_layouts
from memo_sim.planning.presets import System, find_system
from memo_sim.program.layout.recomputed_layers import ALL

EARLY_STOP: Libraries = "2023"
"""First year whose PyTorch ends recompute early (2.1, October 2023: ``torch.utils.checkpoint``)."""

FSDP2_SINCE: Libraries = "2024"
"""Year of the first PyTorch with FSDP2: 2.4, of July 2024."""

CHOOSES_ADAMW: tuple[RowwiseKernel, ...] = ("eager", "compiled")
"""Row-wise kernels of frameworks that update parameters by torch's AdamW; the others have kernels of their own."""

__all__ = ["Pins", "Question", "under_system", "with_libraries", "with_memory"]


@dataclass(frozen=True, slots=True)
class Question(Chosen):
    """One what-if question. ``global_batch`` and ``micro_batch`` (of ``Chosen``) are in sequences."""

    model: Model
    cluster: Cluster
    hardware: Hardware
    seq_tokens: int
    system: str = DEFAULT_SYSTEM
    pins: Pins = field(default_factory=Pins)
    batch_rule: str = ""
    """Why the batch is what it is, where the question did not name it (``default_batch.py``)."""
    open_micro_batch: bool = False
    """Whether larger micro-batches than ``micro_batch`` may be searched (``micro_batches.py``)."""
    not_read: tuple[str, ...] = ()
    """Fields of the model's file that memo does not read and that may change a step's time or memory."""
    changes: tuple[str, ...] = ()
    """What differs from the plan that was given, where one was (``kernels_elsewhere.py``)."""
    failures: Failures | None = None
    """Failures and checkpoints of the job; they change no plan (``answers/goodput.py``)."""
    of_job: tuple[str, ...] = ()
    """Assumptions made when the question was read from another framework's job."""
    preset: System = field(init=False, repr=False)
    """The system that is called ``system``, looked up here and nowhere else."""

    def __post_init__(self) -> None:
        """Look the system up, and take the profile as its kernels run on it: of the year, and the system's own.

        Raises:
            UsageError: when there is no such system.
        """
        object.__setattr__(self, "preset", find_system(self.system))
        hardware = with_libraries(self.hardware, self.pins.libraries)
        if self.pins.attention in (None, FLASH):
            hardware = under_system(hardware, self.system)
        object.__setattr__(self, "hardware", hardware)

    def decisions(self, layout: Layout) -> Decisions:
        """Return a plan of the question on a layout: what the question says itself, and defaults of all else."""
        return Decisions(
            model=self.model,
            layout=layout,
            seq_tokens=self.seq_tokens,
            micro_batch=self.micro_batch,
            global_batch=self.global_batch,
            host_allocator=self.preset.host_allocator,
            memory_policy=self.memory_policy,
            allocator_limit_gib=self.pins.allocator_limit_gib or 0,
            states=self.states,
            loss=self._loss(layout),
            streams=self._streams,
            zero_params=self._zero_params(layout),
            grad_sums=self.grad_sums,
            expert_load=self.expert_load,
            expert_capacity=self.expert_capacity if layout.ep > 1 else 0.0,
            expert_overflow=self.expert_overflow if layout.ep > 1 else "drop",
            expert_overlap=self.expert_overlap and layout.ep > 1,
            documents=self.documents,
            document_cuts=self.document_cuts if layout.ring > 1 or self.documents is None else "sequence",
            adapters=self.adapters,
            loss_metrics=self.loss_metrics,
            objective=self.objective,
            sharding=self.sharding,
            reduce_dtype=self.pins.reduce_dtype,
            modules=self.modules,
            dtype=self.dtype,
            swap_dtype=self.swap_dtype,
            fp8=self.fp8,
            fp8_layouts=fp8_layouts(self.hardware),
            fp8_params=self.fp8_params,
            fp8_experts=self.fp8_experts,
            libraries=self.pins.libraries,
            replay_allocator=self.pins.replay_allocator,
            cuda_graphs=self.pins.cuda_graphs,
        )

    @property
    def overlap(self) -> Overlap:
        """What is pinned, or else the system's own."""
        return self.pins.overlap or self.preset.overlap

    @property
    def zeros(self) -> tuple[int, ...]:
        """The system's levels of ZeRO on this machine, where several ranks hold the same parameters."""
        over_pcie = self.hardware.peers_over_host_link and self.preset.zeros_over_pcie
        return over_pcie or self.preset.zeros

    @property
    def memory_policy(self) -> MemoryPolicy:
        """What is pinned, or else the system's own."""
        return self.pins.memory_policy or self.preset.memory_policy

    @property
    def rowwise(self) -> RowwiseKernel | None:
        """What is pinned, or else the system's own; None: memo-exec's that are faster."""
        return self.pins.rowwise or self.preset.rowwise

    def rounding_buffers(self, recompute: str, layers: str) -> bool:
        """Return whether full recompute is played in the rounding buffers: what is pinned, or else the system's own.

        A system's own are part of its planned memory; an offload window, or layers that keep everything, leave none.
        """
        if recompute != "full":
            return False
        if self.pins.rounding_buffers is not None:
            return self.pins.rounding_buffers
        if layers != ALL:
            return False
        return self.preset.rounding_buffers and self.memory_policy == "planned" and not self.pins.offload_window

    def partition(self, subsequences: int) -> Partition:
        """How a sequence is cut into ``subsequences``: into equal work, or equal lengths where layers differ."""
        unlike = subsequences > 1 and len(self.model.layer_shapes) > 1
        return self.pins.partition or ("length" if unlike else "flops")

    def _loss(self, layout: Layout) -> Loss:
        """Return the form that is given, or else the system's own on that layout."""
        own = self.preset.loss if self.loss == "auto" else self.loss
        return "vocab-parallel" if own == "eager-fp32" != self.loss and layout.tp > 1 else own

    @property
    def sharding(self) -> Sharding:
        """What is pinned, or else the system's own under an eager framework; FSDP's second version is of 2024."""
        if self.pins.sharding is not None or self.memory_policy != "eager":
            return self.pins.sharding or "memo"
        if self.preset.sharding == "fsdp2" and self.hardware.eager_libraries < FSDP2_SINCE:
            return "fsdp1"
        return self.preset.sharding

    @property
    def adamw(self) -> AdamwKernels:
        """What is pinned, or else the system's own where its row-wise kernels leave the choice."""
        return self.pins.adamw or (self.preset.adamw if self.rowwise in CHOOSES_ADAMW else "foreach")

    @property
    def _streams(self) -> Streams:
        """What is given, or else the system's own under an eager framework."""
        own = self.preset.streams if self.memory_policy == "eager" else "auto"
        return own if self.streams == "auto" else self.streams

    def _zero_params(self, layout: Layout) -> ZeroParams:
        """Return what is given, or else the system's own where an eager framework divides fp32 parameters.

        Hugging Face's modules are given together with accelerate's FSDP2, which casts.
        """
        if self.zero_params != "auto":
            return self.zero_params
        own = "cast" if self.modules == "huggingface" else self.preset.zero_params
        divided = layout.zero == MOST_ZERO and layout.shards > 1 and self.states in ("fp32", "bf16")
        return own if divided and self.memory_policy == "eager" and self.dtype != "fp32" else "auto"

    def early_stop(self, recompute: str, layers: str) -> bool:
        """Return whether full recompute ends early: what is pinned, or else the system's own, since PyTorch 2.1.

        Groups of layers, whose inner layers need every output, have no early end of their own.
        """
        if recompute != "full":
            return False
        if self.pins.early_stop is not None:
            return self.pins.early_stop
        if layers.startswith("groups-"):
            return False
        return self.preset.early_stop and self.hardware.eager_libraries >= EARLY_STOP

    def modules_of(self, recompute: str) -> Modules:
        """Return what is given, or else the system's own under an eager framework, where memo knows what they save.

        That is under full recompute, and of Llama's family on whole tensors where layers keep or swap. A system that
        keeps or swaps them by itself has its modules always, so that it is refused where memo has no list.
        """
        if self.modules != "auto" or self.memory_policy != "eager":
            return self.modules
        listed = self.model.family == "llama" and self.pins.tp in (None, 1)
        known = recompute == "full" or (recompute in ("none", "tokenwise") and listed)
        return self.preset.modules if known or self.preset.recomputes != {"full"} else "auto"

    @property
    def dtype(self) -> DtypeName:
        """Dtype of parameters and activations: what is pinned, else bf16 where a GPU has it, or fp32.

        A CPU's profile may have bf16 too, whose products are often many times slower there.
        """
        if self.pins.dtype:
            return self.pins.dtype
        rates = self.hardware.peak_flops
        return "bf16" if "bf16" in rates and (self.hardware.device != "cpu" or "fp32" not in rates) else "fp32"


def with_libraries(hardware: Hardware, year: Libraries | None) -> Hardware:
    """Return the profile without the attention kernels that the libraries of ``year`` do not have.

    The same profile when no year is given: what a profile has measured exists, whatever its own year.
    """
    if year is None:
        return hardware
    newer = {name for name, kernel in ATTENTION_KERNELS.items() if kernel.since > year}
    kept = [table for table in hardware.attention if table.kernel not in newer]
    return msgspec.structs.replace(hardware, attention=kept, eager_libraries=year)


def under_system(hardware: Hardware, system: str) -> Hardware:
    """Return the profile with attention as slow as it is under ``system``; the same profile where nothing is known.

    What comes back has no factor for the system any more, so that asking twice slows once.
    """
    factor = hardware.system_attention.get(system)
    if factor is None:
        return hardware
    slowed = [
        msgspec.structs.replace(
            table, rows=[[tokens, heads, rate / factor.value] for tokens, heads, rate in table.rows]
        )
        for table in hardware.attention
    ]
    others = {name: known for name, known in hardware.system_attention.items() if name != system}
    return msgspec.structs.replace(hardware, attention=slowed, system_attention=others)


def with_memory(
    cluster: Cluster,
    hardware: Hardware,
    *,
    device_bytes: int | None,
    host_bytes: int | None,
    safety_bytes: int | None = None,
) -> tuple[Cluster, Hardware]:
    """Return the cluster and profile with other memory sizes (of one device, of one node's host).

    ``safety_bytes`` stay free on each device, beside the reserve.
    """
    if device_bytes is None and host_bytes is None and not safety_bytes:
        return cluster, hardware
    source = Source(kind="assumed", text="given on the command line")
    changes: dict[str, object] = {"sources": {**hardware.sources, OPTION_SOURCE: source}}
    if device_bytes is not None:
        changes["device_memory_bytes"] = Quantity(value=float(device_bytes), source=OPTION_SOURCE)
    if safety_bytes:
        kept = Quantity(value=float(safety_bytes), source=OPTION_SOURCE)
        changes["reserve_bytes"] = {**hardware.reserve_bytes, SAFETY: kept}
    hardware = msgspec.structs.replace(hardware, **changes)
    if host_bytes is not None:
        quantity = Quantity(value=float(host_bytes), source=OPTION_SOURCE)
        sources = {**cluster.sources, OPTION_SOURCE: source}
        cluster = msgspec.structs.replace(cluster, host_memory_bytes=quantity, sources=sources)
    return cluster, hardware
