"""What is asked: a model, a sequence, a cluster, a system, and the knobs that are pinned."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

import msgspec

from memo_sim.contract.cluster import Cluster
from memo_sim.contract.hardware import DtypeName, Hardware, Quantity, Source
from memo_sim.contract.model import Model
from memo_sim.contract.plan import CpExchange, MemoryPolicy, Overlap, Partition, Recompute, Schedule, States
from memo_sim.planning.presets import find_system

OPTION_SOURCE = "option"


@dataclass(frozen=True, slots=True)
class Pins:
    """Knobs with a fixed value; None is left to the search.

    ``cp_exchange`` is not searched: ring and all_gather differ little, and rsa never wins; None: the system's own.
    ``memory_policy`` is not searched: who plans memory wants a plan, who does not wants to know what that costs. None:
    the system's own.
    """

    tp: int | None = None
    sequence_parallel: bool | None = None
    cp: int | None = None
    cp_exchange: CpExchange | None = None
    ulysses: int | None = None
    metp: int | None = None
    overlap_exchanges: bool | None = None
    """Whether METP's ranks compute beside what they exchange; None: they do. Not searched: it never loses."""
    keep_norms: bool = False
    """Whether METP keeps what its norms make. Not searched: it buys 1 % of a short step with two thirds more memory."""
    pp: int | None = None
    schedule: Schedule | None = None
    virtual_stages: int | None = None
    overlap_p2p: bool | None = None
    """Pipeline stages and how they are played; None: what the system searches, else one stage, and 1F1B where stages
    are pinned. ``overlap_p2p`` is not searched."""
    subsequences: int | Literal["auto"] | None = None
    """Parts of a sequence; ``auto``: searched, as a system does whose own knob it is."""
    partition: Partition = "flops"
    offload_window: int | None = None
    """Passes during which a subsequence's swapped rows leave; None: the system's own are tried, and
    1 and 4 where numbers of subsequences are searched."""
    multiplexed: bool | None = None
    """Whether idle stages play rows of the fill and the drain (SPPO 6.2); None: tried where it is the system's own, or
    numbers are searched that are no system's own, and all stages lie in one node. What guests take travels every step:
    over a network more subsequences do better."""
    dp: int | None = None
    zero: int | None = None
    alpha: float | None = None
    recompute: Recompute | None = None
    loss_chunk_tokens: int | None = None
    mlp_chunk_tokens: int | None = None
    attention_chunk_tokens: int | None = None
    memory_policy: MemoryPolicy | None = None
    overlap: Overlap | None = None
    """What of ZeRO 0 and 1 runs beside compute; None: what the system does. Not searched."""
    attention: str | None = None
    """A kernel by name; None: the fastest that the profile measured."""
    dtype: DtypeName | None = None
    replay_allocator: bool = False


@dataclass(frozen=True, slots=True)
class Question:
    """One what-if question. ``global_batch`` and ``micro_batch`` are in sequences."""

    model: Model
    cluster: Cluster
    hardware: Hardware
    seq_tokens: int
    system: str = "any"
    pins: Pins = field(default_factory=Pins)
    states: States = "fp32"
    micro_batch: int = 1
    global_batch: int = 1

    def __post_init__(self) -> None:
        """Take the profile as the system's own kernels run on it."""
        object.__setattr__(self, "hardware", under_system(self.hardware, self.system))

    @property
    def overlap(self) -> Overlap:
        """What is pinned, or else the system's own."""
        return self.pins.overlap or find_system(self.system).overlap

    @property
    def memory_policy(self) -> MemoryPolicy:
        """What is pinned, or else the system's own."""
        return self.pins.memory_policy or find_system(self.system).memory_policy

    @property
    def dtype(self) -> DtypeName:
        """Dtype of parameters and activations: what is pinned, else bf16 where the device has it, or fp32 (CPUs)."""
        if self.pins.dtype:
            return self.pins.dtype
        return "bf16" if "bf16" in self.hardware.peak_flops else "fp32"


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
    cluster: Cluster, hardware: Hardware, *, device_bytes: int | None, host_bytes: int | None
) -> tuple[Cluster, Hardware]:
    """Return the cluster and profile with other memory sizes (of one device, of one node's host)."""
    if device_bytes is None and host_bytes is None:
        return cluster, hardware
    source = Source(kind="assumed", text="given on the command line")
    changes: dict[str, object] = {"sources": {**hardware.sources, OPTION_SOURCE: source}}
    if device_bytes is not None:
        changes["device_memory_bytes"] = Quantity(value=float(device_bytes), source=OPTION_SOURCE)
    hardware = msgspec.structs.replace(hardware, **changes)
    if host_bytes is not None:
        quantity = Quantity(value=float(host_bytes), source=OPTION_SOURCE)
        sources = {**cluster.sources, OPTION_SOURCE: source}
        cluster = msgspec.structs.replace(cluster, host_memory_bytes=quantity, sources=sources)
    return cluster, hardware
