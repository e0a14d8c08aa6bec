"""A calibrated GPU (or CPU): rates by size, each with where it came from (``memo.hardware/1``).

Rates are FLOP/s, bytes/s; sizes bytes, tokens. A number without a source cannot be written down here: every
``Quantity``, ``Curve`` and table names an entry of ``sources``.
"""

from __future__ import annotations

from typing import Annotated, Literal

import msgspec

from memo_sim.contract.units import NonNegative, Positive, Rate

SourceKind = Literal["measured", "datasheet", "derived", "fitted", "assumed"]
GemmPass = Literal["fprop", "dgrad", "wgrad"]
AttentionPass = Literal["forward", "backward"]
CollectiveKind = Literal["all_reduce", "all_gather", "reduce_scatter", "all_to_all", "send_recv", "broadcast", "reduce"]
DtypeName = Literal["fp32", "bf16", "fp16"]
Libraries = Literal["2024", "2025"]
"""A generation of PyTorch and Transformer Engine: 2025 is PyTorch 2.8 and Transformer Engine 2.8, or later."""
FusedKernel = Literal["triton"]
"""What can play row-wise operators instead of torch's own, fused."""

DISTURBED = "disturbed"
"""Of a profile's provenance."""


class _Part(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Base of the profile's parts: keyword-only, immutable, unknown keys refused."""


class Source(_Part, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Who says so: measured (by whom, how), datasheet, derived (its formula), fitted (which command), assumed."""

    kind: SourceKind
    text: str
    cases: list[str] = []
    """Published cases that a number, or what it derives from, was fitted on; predictions of them are no evidence."""


class Quantity(_Part, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One number and its source; ``spread`` is the relative half range of repeated measurements."""

    value: NonNegative
    source: str
    spread: NonNegative = 0.0


class Curve(_Part, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """``y`` against ``x`` (both increasing in x), interpolated in log x; constant beyond its ends, and marked there."""

    x: list[Rate]
    y: list[Rate]
    source: str
    spread: NonNegative = 0.0

    def __post_init__(self) -> None:
        """Refuse curves that cannot be interpolated."""
        if not self.x or len(self.x) != len(self.y):
            raise ValueError(f"a curve needs as many x ({len(self.x)}) as y ({len(self.y)}), and at least one")
        if any(b <= a for a, b in zip(self.x, self.x[1:], strict=False)):
            raise ValueError("a curve's x must increase")


class GemmTable(_Part, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Measured products ``(m x k) @ (k x n)``: rows of [m, n, k, FLOP/s] for one pass and dtype.

    m is the number of tokens for fprop and dgrad; a wgrad's m x n is the weight and k the tokens.
    """

    dtype: DtypeName
    gemm_pass: GemmPass
    rows: Annotated[list[Annotated[list[Rate], msgspec.Meta(min_length=4, max_length=4)]], msgspec.Meta(min_length=1)]
    source: str
    spread: NonNegative = 0.0


class AttentionTable(_Part, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Causal attention rate (FLOPs of the unmasked half counted) by length, one kernel, pass, head size.

    ``rows`` are [tokens, heads, FLOP/s]; forward counts 2*s^2*heads*head_dim, backward 2.5 times that.
    """

    kernel: str
    dtype: DtypeName
    attention_pass: AttentionPass
    head_dim: Positive
    rows: Annotated[list[Annotated[list[Rate], msgspec.Meta(min_length=3, max_length=3)]], msgspec.Meta(min_length=1)]
    source: str
    full_mask_gain: Rate = 1.0
    """Rate without a mask over the rate with the causal one, same length."""
    full_mask_gains: list[Annotated[list[Rate], msgspec.Meta(min_length=2, max_length=2)]] = []
    """[tokens, gain], where it was measured at several lengths; in place of the one above."""
    spread: NonNegative = 0.0

    @property
    def most_gain(self) -> float:
        """The most that a missing mask gains at any length: a causal call computes no more than the whole square."""
        return 2.0 if self.full_mask_gains else self.full_mask_gain


class CollectiveTable(_Part, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Time of one collective inside a node: ``alpha_s`` + volume factor x bytes / busbw(message bytes)."""

    kind: CollectiveKind
    ranks: Positive
    alpha_s: NonNegative
    bus_bytes_per_s: Curve
    source: str


class CopyRates(_Part, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Pinned copies in one direction: alone, beside the other direction, and with all of the node's devices copying."""

    alone: Curve
    duplex: Quantity
    """Rate of a large copy while the other direction is busy (bytes/s)."""
    all_devices: Quantity
    """Rate a device gets when every device of the node copies this way at once (bytes/s)."""


class Hardware(
    msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, tag_field="schema", tag="memo.hardware/1"
):
    """One device type with its curves, and the node it was measured on."""

    name: str
    device: Literal["cuda", "cpu"]
    peak_flops: dict[DtypeName, Quantity]
    """Dense peak by dtype: what MFU is a fraction of."""
    device_memory_bytes: Quantity
    reserve_bytes: dict[str, Quantity]
    """Device bytes outside every plan (context, libraries), itemised; communicators too, where ``communicator_bytes``
    does not tell what one takes."""
    communicator_bytes: Curve | None = None
    """Device bytes of one communicator by how many ranks it has; which a plan has follows from its layout."""
    gemm: list[GemmTable]
    attention: list[AttentionTable]
    device_deviation: Quantity | None = None
    """Standard deviation of the devices' rates of products and attention, over their mean; of one kind, under load."""
    rated_devices: Positive | None = None
    """Devices whose slowest the rates of products and attention are of; those of the node when not given."""
    system_attention: dict[str, Quantity] = {}
    """By system: how many times as long as these tables say attention takes under it (a kernel nobody measured)."""
    memory_bound_bytes_per_s: Curve
    """Rate of elementwise and norm kernels by bytes moved (reads + writes)."""
    rowwise_bytes_per_s: dict[str, Curve] = {}
    """Where an operator was measured by itself (cross_entropy, adamw, gelu ...), its own curve by bytes moved."""
    fused_rowwise_bytes_per_s: dict[FusedKernel, dict[str, Curve]] = {}
    """The same of operators played by another implementation than torch's, by implementation; none where the profile
    has not measured one."""
    launch_floor_s: Quantity
    """Least time of one kernel when the stream runs ahead."""
    host_launch_s: Quantity | None = None
    """Seconds an eager framework's host (Python, autograd) takes a kernel; nothing when the profile does not know."""
    host_pass_s: Quantity | None = None
    """Seconds it takes besides, before a micro-batch's forward or backward through a stage."""
    d2h: CopyRates
    h2d: CopyRates
    devices_per_uplink: Quantity
    collectives: list[CollectiveTable]
    eager_libraries: Libraries = "2024"
    """What eager frameworks on this device run with; it decides what they hold (``memory/eager.py``)."""
    compute_slowdown: dict[Literal["copy", "collective", "p2p"], Quantity]
    """Factor (>= 1) on the time of compute while a copy / collective / exchange runs beside it."""
    device_malloc_s: Quantity
    """Seconds that one cudaMalloc holds the device, whatever its size."""
    device_free_s: Quantity
    device_malloc_s_per_gib: Quantity | None = None
    """Seconds more for every GiB; nothing when the profile does not know."""
    device_free_s_per_gib: Quantity | None = None
    host_register_bytes_per_s: Quantity
    host_alloc_bytes_per_s: Quantity | None = None
    """Rate at which torch's pinned allocator gets new blocks; nothing when the profile does not know."""
    host_memory_bytes: Quantity
    host_copy_bytes_per_s: Quantity
    """What all local devices' copies together can draw from host memory."""
    devices: Positive
    """Devices of the node this profile was measured on (or is sold in)."""
    sources: dict[str, Source]
    provenance: dict[str, str] = {}
    """How it came about; under ``DISTURBED`` what else the machine did while it was measured, where it did."""

    def __post_init__(self) -> None:
        """Refuse a profile in which a number names no source, or that nothing can be divided by."""
        require_sources(self, self.sources)
        if "bf16" not in self.peak_flops and "fp32" not in self.peak_flops:
            raise ValueError("peak_flops needs bf16 or fp32")
        divisors = {
            **{f"peak_flops.{dtype}": peak for dtype, peak in self.peak_flops.items()},
            "device_memory_bytes": self.device_memory_bytes,
            "d2h.duplex": self.d2h.duplex,
            "d2h.all_devices": self.d2h.all_devices,
            "h2d.duplex": self.h2d.duplex,
            "h2d.all_devices": self.h2d.all_devices,
            "devices_per_uplink": self.devices_per_uplink,
            **{f"system_attention.{system}": factor for system, factor in self.system_attention.items()},
            "host_register_bytes_per_s": self.host_register_bytes_per_s,
            "host_memory_bytes": self.host_memory_bytes,
            "host_copy_bytes_per_s": self.host_copy_bytes_per_s,
        }
        for name, quantity in divisors.items():
            if quantity.value <= 0:
                raise ValueError(f"{name} must be more than 0")
        for name, factor in self.compute_slowdown.items():
            if factor.value < 1:
                raise ValueError(f"compute_slowdown.{name} must be at least 1")


def require_sources(document: msgspec.Struct, sources: dict[str, Source]) -> None:
    """Check that every ``source`` named inside ``document`` is one of ``sources``.

    Raises:
        ValueError: with the names that are missing.
    """
    missing = sorted(set(_source_names(document)) - set(sources))
    if missing:
        raise ValueError(f"no entry in sources for {', '.join(missing)}")


def _source_names(part: object) -> list[str]:
    """Return every source named anywhere inside ``part``."""
    if isinstance(part, msgspec.Struct):
        names = [part.source] if hasattr(part, "source") else []
        return names + [n for f in part.__struct_fields__ if f != "sources" for n in _source_names(getattr(part, f))]
    if isinstance(part, dict):
        return [n for value in part.values() for n in _source_names(value)]
    if isinstance(part, list) and part and isinstance(part[0], msgspec.Struct):
        return [n for value in part for n in _source_names(value)]
    return []
