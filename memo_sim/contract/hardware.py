"""A calibrated GPU or CPU: rates by size, each with its source (``memo.hardware/1``).

Rates are in FLOP/s or bytes/s; sizes are in bytes or tokens. A number without a source is refused: every ``Quantity``,
``Curve`` and table names an entry of ``sources``.
"""

from __future__ import annotations

from typing import Annotated, Literal

import msgspec

from memo_sim.contract.attention_kernels import ATTENTION_KERNELS, Libraries
from memo_sim.contract.knobs import DtypeName, FrameworkLibrary, ProductDtype
from memo_sim.contract.units import Degree, NonNegative, PerNode, Rate, Width

LEAST_DIVISOR = 1e-30
"""The least number that anything is divided by, as of ``Rate``; quotients stay finite."""
SourceKind = Literal["measured", "datasheet", "derived", "fitted", "assumed"]
GemmPass = Literal["fprop", "dgrad", "wgrad"]
AttentionPass = Literal["forward", "backward"]
LinearLossPart = Literal["statistics", "gradient"]
LinearLossKernel = Literal["torch", "triton"]
"""Whose kernels play the loss with the classifier's product inside (``knobs.Loss``: linear, linear-triton)."""
CollectiveKind = Literal["all_reduce", "all_gather", "reduce_scatter", "all_to_all", "send_recv", "broadcast", "reduce"]
FusedKernel = Literal["triton"]
"""Fused implementations of row-wise operators that can replace torch's own."""
AccessPattern = Literal[
    "elementwise",
    "bias_gelu",
    "bias_gelu_backward",
    "widen",
    "broadcast",
    "strided",
    "row_sum",
    "column_sum",
    "norm",
    "norm_backward",
    "softmax",
    "multi_tensor",
    "shard_copy",
    "shard_widen",
]
"""How a row-wise kernel of a framework goes through memory; kernels of one pattern reach about the same rate.

- elementwise: whole contiguous tensors, in vectors of elements.
- bias_gelu, bias_gelu_backward: a bias with tanh-approximated GeLU, whose arithmetic may take longer than its bytes.
- widen: a cast to fp32.
- broadcast: fp32 rows and one number for each of them.
- strided: narrow operands that are broadcast, parts of rows or transposed, so read element by element (a norm's weight,
  a rotary embedding's tables and halves, the two halves of a gated product).
- row_sum, column_sum: one number a row; one number a feature, summed over all rows.
- norm, norm_backward: one kernel for a norm, or for a gradient of one.
- softmax: one kernel over the vocabulary.
- multi_tensor: one operator over the tensors of many parameters (foreach).
- shard_copy, shard_widen: FSDP's copies of a unit's tensors to or from one flat tensor, shard by shard, and with a cast
  to fp32."""

SAFETY = "safety margin"
"""Key in ``reserve_bytes`` of the bytes that a question keeps free on each device."""
DISTURBED = "disturbed"
"""Key in a profile's ``provenance``: what else the machine did during the measurement."""
ROUGH, ASSUMED = "rough", "assumed"
"""Keys in the ``provenance`` of a profile that was made from a data sheet alone, and what it assumes besides."""
POWER, BOARD = "power", "board"
"""Keys in a profile's ``provenance``: the power limit and the board that it was changed to (``contract/boards.py``)."""


class _Part(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Base of the profile's parts: keyword-only and immutable; unknown keys are refused."""


class Source(_Part, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The source of a number: measured (by whom, how), datasheet, derived (formula), fitted (command) or assumed."""

    kind: SourceKind
    text: str
    cases: list[str] = []
    """Published cases that the number, or one it is derived from, was fitted on.

    Predictions of these cases are no evidence for the number."""


class Quantity(_Part, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One number with its source; ``spread`` is half the relative range of repeated measurements."""

    value: NonNegative
    source: str
    spread: NonNegative = 0.0


class Curve(_Part, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """``y`` against increasing ``x``, interpolated in log x.

    Beyond its ends the curve is constant, and the prediction lists the curve under ``outside_calibration``.
    """

    x: list[Rate]
    y: list[Rate]
    source: str
    spread: NonNegative = 0.0

    def __post_init__(self) -> None:
        """Refuse a curve that cannot be interpolated."""
        if not self.x or len(self.x) != len(self.y):
            raise ValueError(f"a curve needs as many x ({len(self.x)}) as y ({len(self.y)}), and at least one")
        if any(b <= a for a, b in zip(self.x, self.x[1:], strict=False)):
            raise ValueError("a curve's x must increase")


class GemmTable(_Part, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Measured matrix products ``(m x k) @ (k x n)`` of one pass and dtype; each row is [m, n, k, FLOP/s].

    For fprop and dgrad, m is the number of tokens. For wgrad, m x n is the weight's shape and k is the number of
    tokens. A product in FP8 has both operands contiguous along k, whatever its pass.
    """

    dtype: ProductDtype
    gemm_pass: GemmPass
    rows: Annotated[list[Annotated[list[Rate], msgspec.Meta(min_length=4, max_length=4)]], msgspec.Meta(min_length=1)]
    source: str
    spread: NonNegative = 0.0


class GroupedGemmTable(_Part, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Measured products of several experts' rows in one call; each row is [experts, rows, n, k, FLOP/s].

    Every expert has ``rows / experts`` rows; n and k are those of ``program/ir/work.py`` (GroupedGemm). The time
    includes the copy of the result where a kernel returns a new tensor, as memo-exec plays it.
    """

    dtype: DtypeName
    gemm_pass: GemmPass
    rows: Annotated[list[Annotated[list[Rate], msgspec.Meta(min_length=5, max_length=5)]], msgspec.Meta(min_length=1)]
    source: str
    spread: NonNegative = 0.0


class LinearLossTable(_Part, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Measured parts of a loss with the classifier's product inside; each row is [tokens, columns, features, FLOP/s].

    FLOPs are those of the product: 2 x tokens x columns x features (``program/ir/work.py``, LinearLoss).
    """

    kernel: LinearLossKernel
    dtype: DtypeName
    part: LinearLossPart
    rows: Annotated[list[Annotated[list[Rate], msgspec.Meta(min_length=4, max_length=4)]], msgspec.Meta(min_length=1)]
    source: str
    spread: NonNegative = 0.0


class AttentionTable(_Part, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Measured rates of causal attention by length, for one kernel, pass and head size.

    Each row is [tokens, heads, FLOP/s]. FLOPs count the unmasked half: forward has 2*s^2*heads*head_dim, backward has
    2.5 times as many.
    """

    kernel: str
    dtype: DtypeName
    attention_pass: AttentionPass
    head_dim: Width
    rows: Annotated[list[Annotated[list[Rate], msgspec.Meta(min_length=3, max_length=3)]], msgspec.Meta(min_length=1)]
    source: str
    libraries: Libraries | None = None
    """Year from which libraries have this version of the kernel; null: its first version.

    A question gets the latest version that its own year has."""
    full_mask_gain: Rate = 1.0
    """Rate without a mask divided by the rate with the causal mask, at the same length."""
    full_mask_gains: list[Annotated[list[Rate], msgspec.Meta(min_length=2, max_length=2)]] = []
    """[tokens, gain] for a gain that was measured at several lengths; replaces ``full_mask_gain``."""
    spread: NonNegative = 0.0

    @property
    def most_gain(self) -> float:
        """The largest gain without a mask, at most 2, because a causal call computes at most the whole square."""
        return 2.0 if self.full_mask_gains else self.full_mask_gain


class CollectiveTable(_Part, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Time of one collective inside a node: ``alpha_s`` + volume factor x bytes / bus bandwidth(message bytes)."""

    kind: CollectiveKind
    ranks: Degree
    alpha_s: NonNegative
    bus_bytes_per_s: Curve
    source: str


class CopyRates(_Part, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Rates of pinned copies in one direction: alone, beside the other direction, and with every device copying."""

    alone: Curve
    duplex: Quantity
    """Rate of a large copy while the other direction is busy, in bytes/s."""
    all_devices: Quantity
    """Rate of one device when every device of the node copies in this direction at once, in bytes/s."""


class Board(_Part, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Another board with the same chip; null: as on the profile's own board."""

    text: str
    """What it is, for people."""
    device_memory_bytes: Quantity | None = None
    memory_bytes_per_s: Quantity | None = None
    power_w: Quantity | None = None


class Hardware(
    msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, tag_field="schema", tag="memo.hardware/1"
):
    """One device type with its curves, and the node it was measured on."""

    name: str
    device: Literal["cuda", "cpu"]
    generation: str = ""
    """The vendor's name of the architecture (Ampere, Hopper, Blackwell); empty where errors were never published."""
    peak_flops: dict[DtypeName, Quantity]
    """Dense peak FLOP/s by dtype; MFU is a fraction of it."""
    device_memory_bytes: Quantity
    memory_bytes_per_s: Quantity | None = None
    """Rate of the device memory's bus, from its data sheet; only ``boards`` need it."""
    power_w: Quantity | None = None
    """Power limit of the board, in watts, under which products and attention were measured."""
    power_rates: Curve | None = None
    """Rate of products and attention by power limit in watts, relative to each other; null: not known."""
    boards: dict[str, Board] = {}
    """Other boards with this chip, by the end of their clusters' names: ``hbm2e`` of ``h100hbm2e-1x8``."""
    reserve_bytes: dict[str, Quantity]
    """Device bytes outside every plan, itemised (context, libraries).

    They include the communicators when ``communicator_bytes`` is not given."""
    communicator_bytes: Curve | None = None
    """Device bytes of one communicator by its number of ranks; the layout decides which communicators a plan has."""
    gemm: list[GemmTable]
    attention: list[AttentionTable]
    grouped_gemm: list[GroupedGemmTable] = []
    """Products of several experts; empty: their price is derived from ``gemm`` (``costs/grouped.py``)."""
    linear_loss: list[LinearLossTable] = []
    """Losses with the classifier's product inside; torch's without a table are priced as products and passes."""
    sustained_gemm: Quantity | None = None
    """Rate of products inside a training step over that of ``gemm``'s rows, which were measured alone; null: 1.

    A step runs at the clocks that its power limit sustains, and its products read operands that earlier kernels left in
    device memory."""
    device_deviation: Quantity | None = None
    """Relative standard deviation of the rates of products and attention, between devices of one kind under load."""
    rated_devices: Degree | None = None
    """The rates of products and attention are those of the slowest of this many devices; the default is one node's."""
    system_attention: dict[str, Quantity] = {}
    """Factor on attention's time by system, for a system whose own attention kernel has no measured table.

    It does not apply to a kernel that a question names."""
    memory_bound_bytes_per_s: Curve
    """Rate of elementwise and norm kernels by bytes moved (reads + writes)."""
    rowwise_bytes_per_s: dict[str, Curve] = {}
    """Rate by bytes moved for each operator that was measured alone (cross_entropy, adamw, gelu ...)."""
    fused_rowwise_bytes_per_s: dict[FusedKernel, dict[str, Curve]] = {}
    """The same rates for fused implementations, by implementation; empty when the profile has not measured any."""
    framework_rowwise_bytes_per_s: dict[FrameworkLibrary, dict[AccessPattern, Curve]] = {}
    """Rate by bytes moved of the kernels that frameworks launch for row-wise operators, by library and pattern.

    A pattern without a curve runs at the operator's own curve, or at that of memory-bound kernels."""
    launch_floor_s: Quantity
    """Shortest time of one kernel when the host launches kernels ahead of the stream."""
    host_launch_s: Quantity | None = None
    """Host seconds (Python, autograd) per kernel launch of an eager framework; null: not known, no time is charged.

    Charged per kernel (``engine/launches.py``): a plan with eager or compiled row-wise operators launches the kernels
    of ``operators/framework_kernels.py`` and one for every other operator; any other plan launches ``KERNELS`` per
    instruction (``memory/eager_framework.py``)."""
    host_pass_s: Quantity | None = None
    """Additional host seconds before each forward or backward of a micro-batch through a pipeline stage."""
    d2h: CopyRates
    h2d: CopyRates
    devices_per_uplink: Quantity
    collectives: list[CollectiveTable]
    peers_over_host_link: bool = False
    """Whether devices of a node reach each other over their links to the host (PCIe), which copies use, too."""
    eager_libraries: Libraries = "2024"
    """Year of the libraries that a question on this device gets unless it names another.

    It decides which kernels and which of their versions there are, and how much memory eager frameworks hold."""
    compute_slowdown: dict[Literal["copy", "collective", "p2p"], Quantity]
    """Factor (>= 1) on compute's time while a copy, a collective or a p2p exchange runs beside it."""
    device_malloc_s: Quantity
    """Seconds that one cudaMalloc blocks the device, independent of size."""
    device_free_s: Quantity
    device_malloc_s_per_gib: Quantity | None = None
    """Additional seconds per GiB; null means not known, and no time is charged."""
    device_free_s_per_gib: Quantity | None = None
    host_register_bytes_per_s: Quantity
    host_alloc_bytes_per_s: Quantity | None = None
    """Rate at which torch's pinned allocator gets new blocks; null means not known, and no time is charged."""
    host_memory_bytes: Quantity
    host_copy_bytes_per_s: Quantity
    """Rate that the copies of all local devices together can draw from host memory."""
    host_update_bytes_per_s: Quantity | None = None
    """Rate of AdamW on the host's cores, for all local ranks together, by the bytes of its operands.

    Those are 28 bytes a parameter, and the updated parameter. Null: derived from ``host_copy_bytes_per_s``
    (``costs/host_update.py``)."""
    devices: PerNode
    """Devices of the node that this profile was measured on or is sold in."""
    sources: dict[str, Source]
    provenance: dict[str, str] = {}
    """How the profile was made. The key ``DISTURBED`` says what else the machine did during the measurement."""

    def __post_init__(self) -> None:
        """Refuse a number without a source, and zero for a number that the pricing divides by."""
        require_sources(self, self.sources)
        if "bf16" not in self.peak_flops and "fp32" not in self.peak_flops:
            raise ValueError("peak_flops needs bf16 or fp32")
        if unknown := [table.kernel for table in self.attention if table.kernel not in ATTENTION_KERNELS]:
            raise ValueError(f"{unknown[0]!r} in attention is no kernel: one of {', '.join(ATTENTION_KERNELS)}")
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
            **({"host_update_bytes_per_s": self.host_update_bytes_per_s} if self.host_update_bytes_per_s else {}),
        }
        for name, quantity in divisors.items():
            if quantity.value < LEAST_DIVISOR:
                raise ValueError(f"{name} must be more than 0")
        if self.sustained_gemm is not None and not 0 < self.sustained_gemm.value <= 1:
            raise ValueError("sustained_gemm must be more than 0 and at most 1")
        if self.power_rates is not None and sorted(self.power_rates.y) != self.power_rates.y:
            raise ValueError("power_rates must not fall with the power limit")
        for name, factor in self.compute_slowdown.items():
            if factor.value < 1:
                raise ValueError(f"compute_slowdown.{name} must be at least 1")

    @property
    def rough(self) -> bool:
        """Whether the profile was made from a data sheet alone, so that nothing of it was measured."""
        return ROUGH in self.provenance


def require_sources(document: msgspec.Struct, sources: dict[str, Source]) -> None:
    """Check that every ``source`` named inside ``document`` is a key of ``sources``.

    Raises:
            ValueError: listing the missing names.
    """
    missing = sorted(set(_source_names(document)) - set(sources))
    if missing:
        raise ValueError(f"no entry in sources for {', '.join(missing)}")


def _source_names(part: object) -> list[str]:
    """Return the name of every source used inside ``part``."""
    if isinstance(part, msgspec.Struct):
        names = [part.source] if hasattr(part, "source") else []
        return names + [n for f in part.__struct_fields__ if f != "sources" for n in _source_names(getattr(part, f))]
    if isinstance(part, dict):
        return [n for value in part.values() for n in _source_names(value)]
    if isinstance(part, list) and part and isinstance(part[0], msgspec.Struct):
        return [n for value in part for n in _source_names(value)]
    return []
