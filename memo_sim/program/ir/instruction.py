"""Lanes, buffers and instructions: the data types that both interpreters read.

An operand is a token range of a buffer, with an access mode. Programs do not store edges between instructions; these
are derived from program order and ranges (``analysis/edges.py``). All types are immutable and hash by value.

A search makes millions of operands, instructions and instances. msgspec makes them several times faster than
``dataclass`` does, and without ``gc`` Python does not look for cycles in them, of which they are never part.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import IntEnum, StrEnum
from functools import cached_property
from typing import Literal

import msgspec
import numpy as np
from numpy.typing import NDArray

from memo_sim.contract.units import DTYPE_BYTES
from memo_sim.program.ir.kinds import BlockKind, FamilyKind, Phase, TemplateKind
from memo_sim.program.ir.work import Group, Work


class Lane(IntEnum):
    """A serial resource: both interpreters run the instructions of a lane one at a time, in program order.

    The collectives of each group of ranks have a lane of their own, because they have a communicator of their own:
    within a communicator order is first in, first out, and communicators run beside each other.
    """

    COMPUTE = 0
    D2H = 1
    H2D = 2
    TP = 3
    P2P = 4
    """Exchanges between two ranks of a group: along the ring of context parallelism or METP, or of chunks of tensor
    parallelism (``tp_overlap``)."""
    HOST = 5
    REPLICA = 6
    """Collectives over the ranks with the same parameters of a layer (group ``grads``)."""
    SEND = 7
    RECV = 8
    """P2p transfers between pipeline stages (``pipeline/stage_p2p.py``); ``SEND`` and ``RECV`` are two lanes."""
    ULYSSES = 9
    CP = 10
    METP = 11
    ENDS = 12
    """Collectives over the ranks with the same embedding and head, with METP."""
    PP = 13
    TIED = 14
    SHARD = 15
    """Collectives over the replicas that ZeRO divides over, where these are not all."""
    REPLICATE = 16
    """All-reduces between those groups."""
    EP = 17
    """All-to-alls between ranks that divide experts."""
    EXPERT_REPLICA = 18
    """Collectives over the ranks with the same experts (group ``expert_grads``)."""
    EXPERT_SHARD = 19
    """Collectives over those of them that ZeRO divides over, where these are not all."""
    EXPERT_REPLICATE = 20
    """All-reduces between those groups."""

    @property
    def label(self) -> str:
        """The lane's name in files and pictures."""
        return self.name.lower()


COLLECTIVE_LANES: dict[Group, Lane] = {
    "tp": Lane.TP,
    "ulysses": Lane.ULYSSES,
    "cp": Lane.CP,
    "metp": Lane.METP,
    "grads": Lane.REPLICA,
    "ends": Lane.ENDS,
    "shard": Lane.SHARD,
    "replicate": Lane.REPLICATE,
    "pp": Lane.PP,
    "tied": Lane.TIED,
    "ep": Lane.EP,
    "expert_grads": Lane.EXPERT_REPLICA,
    "expert_shard": Lane.EXPERT_SHARD,
    "expert_replicate": Lane.EXPERT_REPLICATE,
}
"""The lane of each group's collectives. METP's are on the compute lane where they do not run beside compute."""


class Mode(IntEnum):
    """How an instruction touches a range; accumulate reads and writes."""

    READ = 1
    WRITE = 2
    ACCUMULATE = 3


class BufferClass(StrEnum):
    """Why a buffer exists; reports give memory by these classes."""

    STATE = "state"
    SKELETAL = "skeletal"
    TRANSIENT = "transient"
    WORKSPACE = "workspace"
    EXCHANGE = "exchange"
    GATHERED = "gathered"
    KV_CACHE = "kv_cache"
    """Keys and values of earlier subsequences, and the sums of their gradients."""
    PIPELINE = "pipeline"
    """Inputs and outputs of pipeline stages, which neighbouring stages send to each other."""
    INPUT = "input"


class Family(msgspec.Struct, frozen=True, gc=False):
    """``count`` buffers of one shape: tokens x features, token-major and contiguous.

    Lifetime ``step``: the buffers exist before the first instruction and after the last one. Lifetime ``dynamic``: a
    buffer lives from its first access to its last.
    """

    name: str
    buffer_class: BufferClass
    dtype: str
    tokens: int
    features: int
    count: int = 1
    space: Literal["device", "host"] = "device"
    lifetime: Literal["step", "dynamic"] = "dynamic"
    kind: FamilyKind = FamilyKind.OTHER
    block: BlockKind | None = None
    layer_kind: int | None = None
    """The kind of layers that the buffers belong to; None where layers of every kind have them.

    The name contains it, so the hash leaves it out."""
    region: str = ""
    """The family in whose buffers this one lies, from byte ``offset`` on; it has no buffers of its own (count 0).

    Both follow from the sizes of the families of the region, so the hash leaves them out."""
    offset: int = 0

    def __repr__(self) -> str:
        """Return the text that is hashed."""
        return (
            f"Family(name={self.name!r}, buffer_class={self.buffer_class!r}, dtype={self.dtype!r}, "
            f"tokens={self.tokens!r}, features={self.features!r}, count={self.count!r}, space={self.space!r}, "
            f"lifetime={self.lifetime!r}, kind={self.kind!r}, block={self.block!r})"
        )

    @property
    def bytes(self) -> int:
        """Size of one buffer of the family."""
        return self.tokens * self.features * DTYPE_BYTES[self.dtype]

    @property
    def row_bytes(self) -> int:
        """Size of one token's features."""
        return self.features * DTYPE_BYTES[self.dtype]


Families = dict[str, Family]
"""Families by name."""


class Operand(msgspec.Struct, frozen=True, gc=False):
    """Tokens [first, first + tokens) of the buffer bound to ``slot``; ``role`` names the kernel's argument."""

    role: str
    slot: int
    first: int
    tokens: int
    mode: Mode


class Instruction(msgspec.Struct, frozen=True, gc=False):
    """One kernel call, copy or collective. ``name`` is unique in its template; ``op`` is the instruction's kind."""

    name: str
    op: str
    lane: Lane
    work: Work
    operands: tuple[Operand, ...]
    phase: Phase = Phase.FORWARD
    run: str = ""
    """The run of a parameter block that it updates or adds to; the name contains it, so the hash leaves it out."""
    further: bool = False
    """Whether it belongs to the call of an earlier instruction, as the chunks of a product after the first do.

    A framework launches it in the same call. The name contains it, so the hash leaves it out."""

    def __repr__(self) -> str:
        """Return the text that is hashed."""
        return (
            f"Instruction(name={self.name!r}, op={self.op!r}, lane={self.lane!r}, work={self.work!r}, "
            f"operands={self.operands!r}, phase={self.phase!r})"
        )


@dataclass(frozen=True)
class Template:
    """A sequence of instructions that many instances repeat; slot i is bound to a buffer of family ``slots[i]``.

    ``own`` are the families that live inside the template: each instance gets fresh buffers of them. Stages and plans
    share templates, so what follows from one alone is computed once.
    """

    name: str
    slots: tuple[str, ...]
    own: tuple[Family, ...]
    instructions: tuple[Instruction, ...]
    kind: TemplateKind = TemplateKind.OTHER
    block: BlockKind | None = None
    layer_kind: int | None = field(default=None, repr=False)
    """The kind of layers that a layer's template is for; None where all are alike. The name contains it."""
    cut: int = field(default=0, repr=False)
    """Number of the instruction with which the second half of a helper stage's layer begins; 0 without halves."""

    @cached_property
    def own_slots(self) -> tuple[bool, ...]:
        """For each slot, whether it has a buffer of the template's own families."""
        own = {family.name for family in self.own}
        return tuple(name in own for name in self.slots)

    @cached_property
    def operand_rows(self) -> NDArray[np.int64]:
        """A row for each operand, in order: its instruction, slot, first token, the token after it, and its mode."""
        rows = [
            (number, o.slot, o.first, o.first + o.tokens, int(o.mode))
            for number, instruction in enumerate(self.instructions)
            for o in instruction.operands
        ]
        return np.array(rows, dtype=np.int64).reshape(-1, 5)


class Instance(msgspec.Struct, frozen=True, gc=False):
    """A template at a place (``m0/s0/l12``), with the index of the buffer that each bound slot takes in its family."""

    template: int
    place: str
    indices: tuple[int, ...]
    micro_batch: int
    layer: int = -1
    subsequence: int = 0
    """The subsequence of its rows; the place contains it, so the hash leaves it out."""
    first: int = 0
    """The row of the subsequence that its buffers begin with; helper stages compute those before."""

    def __repr__(self) -> str:
        """Return the text that is hashed."""
        return (
            f"Instance(template={self.template!r}, place={self.place!r}, indices={self.indices!r}, "
            f"micro_batch={self.micro_batch!r}, layer={self.layer!r})"
        )
