"""What an instruction asks of its lane: enough to price it, and to choose the kernel that plays it.

A work is a value: two instructions with equal work cost the same on the same machine.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from memo_sim.contract.hardware import CollectiveKind, DtypeName, GemmPass

Mask = Literal["none", "causal"]
Group = Literal["tp", "ulysses", "cp", "metp", "dp", "grads", "ends", "pp", "tied"]
"""Which ranks take part: ``grads`` = all ranks that hold the same parameters of a layer (ulysses x cp x dp), ``ends`` =
those that hold the same embedding and head (metp x ulysses x cp x dp, with METP alone), ``pp`` = one of every
pipeline stage, ``tied`` = one of the first and one of the last."""


@dataclass(frozen=True, slots=True)
class Gemm:
    """``(m x k) @ (k x n)``, 2*m*n*k FLOPs. fprop, dgrad: m tokens; wgrad: m x n the weight, k tokens."""

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
class Attention:
    """Queries against keys, ``batch`` sequences; mask causal = square (q_tokens == k_tokens), lower triangle counted.

    Tokens are per sequence. Backward is 2.5 forwards (five products instead of two).
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

    @property
    def flops(self) -> float:
        """Floating-point operations, the masked half not counted."""
        pairs = float(self.q_tokens) * self.k_tokens * (0.5 if self.mask == "causal" else 1.0)
        return 4.0 * self.batch * pairs * self.heads * self.head_dim * (2.5 if self.backward else 1.0)


@dataclass(frozen=True, slots=True)
class Rowwise:
    """A memory-bound kernel over ``rows`` rows: norms, activations, residuals, loss, optimizer."""

    kind: str
    rows: int
    read_bytes: int
    write_bytes: int
    first: int = field(default=0, repr=False)
    """The rank's row that its buffer's first one is, where that holds a chunk of them and positions count; the
    instruction's name says which chunk."""

    @property
    def moved_bytes(self) -> int:
        """Bytes read and written."""
        return self.read_bytes + self.write_bytes


@dataclass(frozen=True, slots=True)
class Copy:
    """A copy from device to host memory, or back."""

    bytes: int
    direction: Literal["d2h", "h2d"]


@dataclass(frozen=True, slots=True)
class Collective:
    """A collective over ``ranks`` ranks; ``bytes`` is the whole tensor (gathered, or before reduction)."""

    kind: CollectiveKind
    bytes: int
    ranks: int
    group: Group
    root: int = field(default=0, repr=False)
    """Coordinate of the rank that broadcasts, or that has the sum; the instruction's name says it too."""


@dataclass(frozen=True, slots=True)
class Exchange:
    """A pairwise ring exchange: ``bytes`` sent to the next rank and as many received from the previous, as one."""

    bytes: int
    ranks: int
    group: Group


@dataclass(frozen=True, slots=True)
class PointToPoint:
    """``bytes`` from a rank of pipeline stage ``source`` to its like of stage ``target``; both sides have this work."""

    bytes: int
    source: int
    target: int


@dataclass(frozen=True, slots=True)
class HostUpdate:
    """The optimizer's update of ``elements`` parameters by the host's cores."""

    elements: int
    moved_bytes: int


Work = Gemm | BatchedGemm | Attention | Rowwise | Copy | Collective | Exchange | PointToPoint | HostUpdate
