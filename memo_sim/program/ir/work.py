"""The work of an instruction: the sizes that determine its price, and the kernel that plays it.

Work is a value: on one machine, two instructions with equal work cost the same.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from memo_sim.contract.attended_pairs import pairs_in_window
from memo_sim.contract.attention_kernels import computes_values_wide, pads_values
from memo_sim.contract.hardware import CollectiveKind, GemmPass, LinearLossKernel, LinearLossPart
from memo_sim.contract.knobs import DtypeName, ProductDtype

Mask = Literal["none", "causal"]
Group = Literal[
    "tp",
    "ulysses",
    "cp",
    "metp",
    "grads",
    "ends",
    "shard",
    "replicate",
    "pp",
    "tied",
    "ep",
    "expert_grads",
    "expert_shard",
    "expert_replicate",
]
"""The ranks that take part. The collectives of a group have a lane of their own (``ir/instruction.py``).

- ``grads``: all ranks with the same parameters of a layer (ulysses x cp x dp).
- ``ends``: all ranks with the same embedding and head (metp x ulysses x cp x dp); used only with METP.
- ``shard``: the ranks of ``grads`` that ZeRO divides over, where these are not all (``Layout.zero_ranks``).
- ``replicate``: the ranks of ``grads`` that hold the same shard, one of every ``shard`` group.
- ``ep``: consecutive ranks of ``grads`` that divide the experts of a layer.
- ``expert_grads``: the ranks of ``grads`` with the same experts, one of every ``ep`` group.
- ``expert_shard``, ``expert_replicate``: as ``shard`` and ``replicate``, of the ranks of ``expert_grads``.
- ``pp``: one rank of every pipeline stage.
- ``tied``: one rank of the first stage and one of the last.
- The others are the groups of one parallelism.
"""


@dataclass(frozen=True, slots=True)
class Gemm:
    """A product ``(m x k) @ (k x n)`` of 2*m*n*k FLOPs. Tokens are m in fprop and dgrad, k in wgrad (weight m x n)."""

    m: int
    n: int
    k: int
    gemm_pass: GemmPass
    dtype: DtypeName

    @property
    def flops(self) -> float:
        """Floating-point operations."""
        return 2.0 * self.m * self.n * self.k


@dataclass(frozen=True, slots=True)
class WidenedGemm(Gemm):
    """A product whose tokens' operand is widened to ``dtype`` before it (a router's, in fp32)."""

    narrow: DtypeName
    """Dtype of that operand in the plan's buffers."""


@dataclass(frozen=True, slots=True)
class TileGemm(Gemm):
    """A product with a tile of a weight's rows, or of its gradient's."""

    column: int = field(default=0, repr=False)
    """The tile's first row of the weight; the instruction's name contains the tile, so the hash leaves it out."""


@dataclass(frozen=True, slots=True)
class LinearLoss:
    """A part of the loss with the product of the classifier inside: ``m`` tokens, ``n`` columns, ``k`` features.

    - statistics: the product, and each token's log-sum-exp over the columns, and its target's logit.
    - gradient: the product again, and the gradient of these logits, which is written.
    """

    part: LinearLossPart
    kernel: LinearLossKernel
    m: int
    n: int
    k: int
    dtype: DtypeName
    tile: int
    """Columns whose logits exist at once."""
    column: int = field(default=0, repr=False)
    """The first of the columns; the instruction's name contains the tile, so the hash leaves it out."""

    @property
    def flops(self) -> float:
        """Floating-point operations of the product."""
        return 2.0 * self.m * self.n * self.k


@dataclass(frozen=True, slots=True)
class Fp8Gemm(Gemm):
    """A product with operands in FP8; ``dtype`` is that of its result."""

    operands: ProductDtype
    """Kind of its operands in a profile, by the granularity of their scales."""


@dataclass(frozen=True, slots=True)
class AdapterGemm(Gemm):
    """A product with one side of a low-rank adapter: one kernel for each of its targets.

    FLOPs are those of all targets: the columns of all of them together are one dimension.
    """

    columns: tuple[tuple[int, int], ...] = ()
    """(First feature, features) of each target in the result of the product that is adapted; empty: all at once."""
    adds: bool = False
    """Whether the result is added to what its buffer holds."""

    @property
    def elements(self) -> int:
        """Elements read and written."""
        return self.m * self.k + self.k * self.n + (1 + self.adds) * self.m * self.n


@dataclass(frozen=True, slots=True)
class BatchedGemm:
    """``batch`` products ``(m x k) @ (k x n)`` in one kernel: 2*batch*m*n*k FLOPs."""

    batch: int
    m: int
    n: int
    k: int
    gemm_pass: GemmPass
    dtype: DtypeName

    @property
    def flops(self) -> float:
        """Floating-point operations."""
        return 2.0 * self.batch * self.m * self.n * self.k

    @property
    def elements(self) -> int:
        """Elements read and written."""
        return self.batch * (self.m * self.k + self.k * self.n + self.m * self.n)


@dataclass(frozen=True, slots=True)
class GroupedGemm:
    """Products of several experts' rows, each with a weight of its own, in one kernel: 2*rows*n*k FLOPs.

    fprop and dgrad: (rows x k) @ (k x n) for each expert. wgrad: (n x rows) @ (rows x k), where n x k is the weight.
    """

    sizes: tuple[tuple[int, int], ...]
    """(Rows, number of experts that have as many), as the plan's load expects them."""
    n: int
    k: int
    gemm_pass: GemmPass
    dtype: DtypeName
    copied_bytes: int = 0
    """Bytes that are read and written after the kernel, where it returns a new tensor (``torch._grouped_mm``)."""

    @property
    def rows(self) -> int:
        """Rows of all experts."""
        return sum(rows * count for rows, count in self.sizes)

    @property
    def experts(self) -> int:
        """Experts that have rows."""
        return sum(count for _, count in self.sizes)

    @property
    def flops(self) -> float:
        """Floating-point operations."""
        return 2.0 * self.rows * self.n * self.k


@dataclass(frozen=True, slots=True)
class Fp8GroupedGemm(GroupedGemm):
    """Products of several experts' rows with operands in FP8; ``dtype`` is that of their result."""

    operands: ProductDtype = field(kw_only=True)
    """Kind of their operands in a profile, by the granularity of their scales."""


@dataclass(frozen=True, slots=True)
class Attention:
    """Attention of queries to keys, for ``batch`` sequences; tokens are those of one sequence.

    A causal mask needs q_tokens == k_tokens, and only the lower triangle of the square is counted. Backward has the
    FLOPs of 2.5 forwards: five products instead of two.
    """

    batch: int
    q_tokens: int
    k_tokens: int
    mask: Mask
    heads: int
    kv_heads: int
    head_dim: int
    backward: bool
    kernel: str
    dtype: DtypeName
    narrow_values: int = field(default=0, repr=False)
    """Features of a head of V and of the output, where these are not ``head_dim``; else 0.

    The widths of the operands' buffers tell it, so the hash leaves it out."""
    segments: tuple[tuple[int, int, int], ...] = field(default=(), repr=False)
    """Pairs of packed documents (``layout/documents.py``): (queries, keys, pairs) by classes of like documents.

    Empty: one document. The boundaries are data of a step, so prices alone depend on them, and the hash leaves them
    out."""
    chunks: tuple[int, ...] = field(default=(), repr=False)
    """With packed documents: the chunks of a sequence, of 2 x cp, whose keys these are; empty: the rank's own.

    They follow from the layout and the instruction's name, so the hash leaves them out."""

    @property
    def value_dim(self) -> int:
        """Features of a head of V and of the output."""
        return self.narrow_values or self.head_dim

    @property
    def pairs(self) -> float:
        """Pairs of a query and a key in one head, without those that a mask removes."""
        return float(sum(each for _, _, each in self.segments)) if self.segments else self._pairs

    @property
    def flops(self) -> float:
        """Floating-point operations without those that a mask removes.

        Forward has a product of queries and keys, and one with values. Backward has three and two.
        """
        return self._flops(self.value_dim)

    @property
    def padded(self) -> bool:
        """Whether the kernel computes with values that zeros pad to ``head_dim``, because it takes no narrower ones."""
        return self.value_dim != self.head_dim and pads_values(self.kernel)

    @property
    def computed_flops(self) -> float:
        """FLOPs that the kernel computes: those of zeros as well, where it computes with wider values."""
        wide = computes_values_wide(self.kernel, backward=self.backward) and self.value_dim < self.head_dim
        return self._flops(self.head_dim if wide else self.value_dim)

    def _flops(self, value_dim: int) -> float:
        if value_dim == self.head_dim:
            return 4.0 * self.pairs * self.heads * self.head_dim * (2.5 if self.backward else 1.0)
        features = 3 * self.head_dim + 2 * value_dim if self.backward else self.head_dim + value_dim
        return 2.0 * self.pairs * self.heads * features

    @property
    def _pairs(self) -> float:
        """Pairs of a query and a key, where a sequence is one document."""
        return self.batch * float(self.q_tokens) * self.k_tokens * (0.5 if self.mask == "causal" else 1.0)


@dataclass(frozen=True, slots=True)
class WindowedAttention(Attention):
    """Attention in which a query sees ``window`` keys at most: its own and those right before it.

    The queries belong to the last keys, of which there may be more than queries; the mask is causal.
    """

    window: int = 0

    @property
    def _pairs(self) -> float:
        """Pairs of a query and a key that the window leaves."""
        return float(self.batch * pairs_in_window(self.q_tokens, self.k_tokens, self.window))


@dataclass(frozen=True, slots=True)
class Rowwise:
    """A memory-bound kernel over ``rows`` rows: norms, activations, residuals, loss, optimizer."""

    kind: str
    rows: int
    read_bytes: int
    write_bytes: int
    first: int = field(default=0, repr=False)
    """The rank's row at which the buffer begins, for kernels that need positions and get one chunk of rows.

    The instruction's name contains the chunk, so the hash leaves it out.
    """
    elements: int = field(default=0, repr=False)
    """Elements of the tensor whose passes ``operators/framework_kernels.py`` counts; 0 where that table has no entry.

    The kind and the bytes follow from it, so the hash leaves it out."""
    element_bytes: int = field(default=2, repr=False)
    """Bytes of one of them, in the plan's dtype."""

    @property
    def moved_bytes(self) -> int:
        """Bytes read and written."""
        return self.read_bytes + self.write_bytes


@dataclass(frozen=True, slots=True)
class Rotary(Rowwise):
    """The rotary embedding of a layer whose tables have a base of their own (``LayerShape.rope_theta``)."""

    theta: float = 0.0


FRESH = "fresh"
"""Kind of row-wise work that no kernel does: autograd has just allocated a gradient, and its first product writes it.

It stands where other plans zero the gradient."""


@dataclass(frozen=True, slots=True)
class Copy:
    """A copy from device to host memory, or back."""

    bytes: int
    direction: Literal["d2h", "h2d"]


LibraryCall = tuple[CollectiveKind, int]
"""What a library does in one call, and the bytes of the whole tensor."""


@dataclass(frozen=True, slots=True)
class Collective:
    """A collective over ``ranks`` ranks; ``bytes`` is the size of the whole tensor: gathered, or before reduction."""

    kind: CollectiveKind
    bytes: int
    ranks: int
    group: Group
    root: int = field(default=0, repr=False)
    """Coordinate of the rank that broadcasts or gets the sum; the instruction's name contains it too."""
    calls: tuple[LibraryCall, ...] = field(default=(), repr=False)
    """The calls of the library that move the bytes, one after the other; empty: one call moves all of them.

    The op and the block's parameters tell them, so the hash leaves them out."""


@dataclass(frozen=True, slots=True)
class Exchange:
    """One hop of a ring: a rank sends ``bytes`` to the next rank and receives as many from the previous one.

    With ``distance`` above 1 they are that many ranks away.
    """

    bytes: int
    ranks: int
    group: Group
    distance: int = field(default=1, repr=False)
    """The instruction's name contains it, so the hash leaves it out."""


@dataclass(frozen=True, slots=True)
class PointToPoint:
    """A p2p transfer of ``bytes`` between equal ranks of two pipeline stages; send and receive have equal work."""

    bytes: int
    source: int
    target: int


@dataclass(frozen=True, slots=True)
class HostUpdate:
    """The optimizer's update of ``elements`` parameters on the host's cores."""

    elements: int
    moved_bytes: int


Work = (
    Gemm
    | BatchedGemm
    | GroupedGemm
    | LinearLoss
    | Attention
    | Rowwise
    | Copy
    | Collective
    | Exchange
    | PointToPoint
    | HostUpdate
)
