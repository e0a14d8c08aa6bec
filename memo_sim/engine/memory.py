"""Device and host memory of a program: how much it needs, whether that fits, and its curves by buffer class.

The need follows from program order alone, so it is known before the program is played.

- The device needs the program's peak and the profile's reserve. With the caching policy, it needs what PyTorch's
  allocator reserves for the program.
- A node's host memory serves all its local ranks, either in exact bytes (one registered slab), or in pinned blocks
  rounded up to powers of two, as PyTorch's pinned allocator makes them. There is one block for a layer's activations,
  and one for each of its small statistics tensors (log-sum-exp, the norms' statistics).

      320k tokens, 7B, TP4 CP2, alpha .75: 30 layers x 3.91 GiB x 8 ranks = 937 GiB exact, 30 x 4 x 8 = 960 GiB rounded
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Literal

import numpy as np

from memo_sim.contract.cluster import Cluster
from memo_sim.contract.hardware import Hardware
from memo_sim.contract.plan import Decisions
from memo_sim.contract.trace import MemoryCurve
from memo_sim.contract.units import GIB, format_bytes
from memo_sim.costs.curves import LogCurve
from memo_sim.engine.caching_allocator import CachingMemory, caching_memory
from memo_sim.engine.playback import Playback
from memo_sim.memory.eager_framework import (
    WORKSPACES,
    eager_buffers,
    libraries_of,
    one_work_queue,
    records_streams,
    run_ahead,
)
from memo_sim.memory.huggingface import module_buffers
from memo_sim.memory.initial_states import Beginning, beginning_of
from memo_sim.memory.pinned_allocator import pinned_bytes
from memo_sim.memory.replay import RunAhead
from memo_sim.program.analysis.columns import Columns, FoldedColumns, Ints, expand, fold
from memo_sim.program.analysis.communicators import communicators
from memo_sim.program.analysis.liveness import Liveness, Peak, live_bytes, liveness, peak_of
from memo_sim.program.arena.library_workspaces import COMMUNICATORS, lives_in_arena, reserve_of
from memo_sim.program.arena.requests import BufferNames
from memo_sim.program.ir.instruction import BufferClass, Lane
from memo_sim.program.ir.program import Program
from memo_sim.program.layers.kinds import skeletal_of
from memo_sim.program.layout.shape import shape_of
from memo_sim.program.layout.stage import stages_of
from memo_sim.program.layout.stage_layers import LayersOfKind, layers_by_kind
from memo_sim.program.layout.subsequence import subsequences_of


@dataclass(frozen=True)
class OutOfMemory:
    """The instruction with the largest shortage of the step, and what is alive there.

    Where the caching allocator fails, the step ends, so it is the instruction that fails.
    """

    status: Literal["gpu_oom", "host_oom"]
    instruction: int
    id: str
    live: dict[str, int]
    """Bytes by class alive at that instruction: on one device with its reserve, or in one node's host memory.

    When the caching allocator fails, its own figures instead: allocated, requested, and reserved but unallocated.
    """
    capacity_bytes: int
    shortfall_bytes: int

    @property
    def reason(self) -> str:
        """One line: where most memory is missing, how much is needed there and available, and what is alive."""
        largest = sorted(self.live.items(), key=lambda item: -item[1])
        parts = ", ".join(f"{name} {format_bytes(size)}" for name, size in largest if size)
        where = "device" if self.status == "gpu_oom" else "a node's host"
        need, have = format_bytes(sum(self.live.values())), format_bytes(self.capacity_bytes)
        missing = format_bytes(self.shortfall_bytes)
        at = " at" if "requested" in self.live else ", worst at"
        return f"{where} memory runs out{at} {self.id}: {need} ({parts}) of {have}, so {missing} are missing"


@dataclass(frozen=True)
class Lives:
    """Lives of a program's buffers."""

    known: Liveness
    """Of the program's own buffers, as played."""
    requested: Liveness
    """With what an eager framework adds, and inputs of all micro-batches."""
    device: Liveness
    """Those in the arena: what is never used is in no arena, but on the device."""
    host: Liveness
    """Of one rank's host blocks, rounded as its allocator rounds them."""
    names: BufferNames | None
    """Names of ``requested`` by number under an eager framework, which adds buffers; None: those of the program."""
    every: Columns | None
    """A row for every operand, where an eager framework adds buffers."""


@dataclass(frozen=True)
class Memory:
    """The memory that a step needs on one rank's device and on one node's host."""

    program: Program
    device: Peak
    """The program's peak on the device, without the reserve."""
    host: Peak
    """One rank's peak on the host."""
    lives: Callable[[], Lives]
    """Returns the lives of all buffers; they are not kept, because a pipeline has a million buffers."""
    reserve: dict[str, int]
    """Device bytes outside the program, itemised."""
    device_capacity_bytes: int
    host_capacity_bytes: int
    local_ranks: int
    """Ranks of this pipeline stage on one node."""
    host_beside_bytes: int = 0
    """Host memory of the same node that ranks of other pipeline stages need."""
    caching: CachingMemory | None = None
    """The caching allocator's replay; None when memory is planned."""

    @cached_property
    def _lives(self) -> Lives:
        """The lives of all buffers, kept once they are asked for."""
        return replace(self.lives(), every=None)

    @property
    def device_lives(self) -> Liveness:
        """Lives of the buffers on the device."""
        return self._lives.device

    @property
    def host_lives(self) -> Liveness:
        """Lives of one rank's host blocks, rounded as its allocator rounds them."""
        return self._lives.host

    @property
    def buffer_names(self) -> BufferNames | None:
        """Names of ``device_lives`` by number under an eager framework, which adds buffers; None: the program's."""
        return self._lives.names

    @property
    def device_curves(self) -> dict[str, Ints]:
        """Live device bytes at every instruction, by class; not kept, because they have an entry per instruction."""
        return live_bytes(self.device_lives, device=True)

    @property
    def host_curves(self) -> dict[str, Ints]:
        """Live host bytes of one rank at every instruction, by class."""
        return live_bytes(self.host_lives, device=False)

    @property
    def reserve_bytes(self) -> int:
        """Sum of the reserve."""
        return sum(self.reserve.values())

    @property
    def device_total_bytes(self) -> int:
        """The program's peak and the reserve."""
        return self.device.bytes + self.reserve_bytes

    @property
    def host_per_node_bytes(self) -> int:
        """Host memory that the local ranks of one node need together."""
        return self.host.bytes * self.local_ranks + self.host_beside_bytes

    @property
    def host_shortfall_bytes(self) -> int:
        """Host memory that a node lacks; 0 where it suffices."""
        return max(0, self.host_per_node_bytes - self.host_capacity_bytes)

    @cached_property
    def fault(self) -> OutOfMemory | None:
        """Why the step does not fit, or None when it does; the device is checked first."""
        if self.device_total_bytes > self.device_capacity_bytes:
            at, live = self.device.instruction, {**self.device.by_class, "reserve": self.reserve_bytes}
            missing = self.device_total_bytes - self.device_capacity_bytes
            return OutOfMemory("gpu_oom", at, self.program_id(at), live, self.device_capacity_bytes, missing)
        if self.caching is not None and (failed := self.caching.replay.out_of_memory):
            live = {
                "allocated": failed.allocated_bytes,
                "requested": failed.segment_bytes,
                "reserved but unallocated": failed.reserved_bytes - failed.allocated_bytes,
                "reserve": self.reserve_bytes,
            }
            missing = sum(live.values()) - self.device_capacity_bytes
            at = failed.instant
            return OutOfMemory("gpu_oom", at, self.program_id(at), live, self.device_capacity_bytes, missing)
        if missing := self.host_shortfall_bytes:
            at = self.host.instruction
            live = {name: size * self.local_ranks for name, size in self.host.by_class.items()}
            if self.host_beside_bytes:
                live["other stages"] = self.host_beside_bytes
            return OutOfMemory("host_oom", at, self.program_id(at), live, self.host_capacity_bytes, missing)
        return None

    def program_id(self, instruction: int) -> str:
        """Return the id of an instruction by its number, without building the ids of all instructions."""
        for instance in self.program.instances:
            instructions = self.program.templates[instance.template].instructions
            if instruction < len(instructions):
                return f"{instance.place}/{instructions[instruction].name}"
            instruction -= len(instructions)
        raise IndexError(instruction)

    def device_over_time(self, playback: Playback) -> MemoryCurve:
        """Return the device's live bytes by class as the compute lane proceeds.

        Memory is allocated in program order, however far other lanes run ahead or behind. From one kernel's start to
        the next one's, the curve shows the fullest moment among the second kernel and the other lanes' instructions
        before it. So the curve's peak is the program's peak.
        """
        lane = playback.columns.lane
        kernels = np.flatnonzero(lane == Lane.COMPUTE)
        live = self.device_curves
        total = np.sum(list(live.values()), axis=0)
        group = np.minimum(np.searchsorted(kernels, np.arange(len(lane))), len(kernels) - 1)
        fullest = np.lexsort((-total, group))[np.searchsorted(group, np.arange(len(kernels)))]
        times = playback.start_s[kernels].copy()
        times[0] = 0.0
        curves = {name: curve[fullest].tolist() for name, curve in live.items()}
        return MemoryCurve(time_s=times.tolist(), bytes_by_class=curves)

    def host_over_time(self, playback: Playback) -> MemoryCurve:
        """Return one rank's live host bytes by class over time."""
        return _host_over_time(self.host_lives, playback)


def memory_of(
    program: Program, columns: FoldedColumns, decisions: Decisions, hardware: Hardware, cluster: Cluster
) -> Memory:
    """Return what ``program`` needs and what ``cluster`` has.

    ``program`` may hold fewer micro-batches than ``decisions``, because the others repeat them. Input buffers count for
    all micro-batches of the step.
    """
    reserve = _known_reserve(program, decisions, hardware)
    lives = _lives(program, columns, decisions, hardware)
    ahead: RunAhead | None = None
    beginning: Beginning | None = None
    if lives.every is not None:
        reserve.pop(WORKSPACES, 0)
        recorded = records_streams(decisions, libraries_of(decisions, hardware))
        one_queue = one_work_queue(decisions.layout)
        ahead = run_ahead(program, lives.every, lives.requested, one_queue=one_queue) if recorded else None
        beginning = beginning_of(program, decisions)
    caching = decisions.memory_policy != "planned"
    capacity_bytes = int(hardware.device_memory_bytes.value)
    if decisions.allocator_limit_gib:
        capacity_bytes = min(capacity_bytes, decisions.allocator_limit_gib * GIB)
    host_memory = cluster.host_memory_bytes or hardware.host_memory_bytes
    return Memory(
        program=program,
        device=peak_of(lives.device, device=True),
        host=peak_of(lives.host, device=False),
        lives=lambda: _lives(program, fold(program), decisions, hardware),
        reserve=reserve_of(program, lives.known, decisions, reserve),
        device_capacity_bytes=capacity_bytes,
        host_capacity_bytes=int(host_memory.value),
        local_ranks=min(cluster.devices_per_node, decisions.layout.devices // decisions.layout.pp),
        caching=caching_memory(
            program,
            columns.lane,
            lives.requested,
            hardware,
            capacity_bytes=capacity_bytes,
            reserve_bytes=sum(reserve.values()),
            names=lives.names,
            ahead=ahead,
            beginning=beginning,
        )
        if caching
        else None,
    )


def _lives(program: Program, columns: FoldedColumns, decisions: Decisions, hardware: Hardware) -> Lives:
    """Return the lives of all buffers of ``program``, as ``memory_of`` counts them."""
    known = lives = liveness(program, columns)
    sizes = lives.bytes.copy()
    for family, base in zip(program.all_families, program.family_bases.values(), strict=True):
        if family.buffer_class is BufferClass.INPUT and family.lifetime == "step" and family.count:
            sizes[base] += (decisions.micro_batches - program.micro_batches) * family.bytes
    lives = replace(lives, bytes=sizes)
    names: BufferNames | None = None
    every: Columns | None = None
    if decisions.memory_policy == "eager":
        every = expand(program)
        lives, names = eager_buffers(
            program,
            every,
            lives,
            libraries=libraries_of(decisions, hardware),
            workspace_bytes=_known_reserve(program, decisions, hardware).get(WORKSPACES, 0),
            own_loss=decisions.loss == "auto",
            holds_outputs=decisions.modules != "huggingface",
        )
        if decisions.modules == "huggingface":
            lives, names = module_buffers(program, every, lives, names, decisions)
    in_arena = lives_in_arena(program, lives, decisions)
    pinned = decisions.host_allocator == "power_of_two"
    host = _pinned_blocks(in_arena, program, decisions) if pinned else in_arena
    return Lives(known, lives, in_arena, host, names, every)


def _known_reserve(program: Program, decisions: Decisions, hardware: Hardware) -> dict[str, int]:
    """Return the profile's reserve by item, with the sum of the plan's communicators."""
    return reserve_with(communicators(program, decisions), hardware)


def reserve_with(ranks: list[int], hardware: Hardware) -> dict[str, int]:
    """Return the profile's reserve by item; ``ranks``: of each of the communicators that it counts."""
    known = {name: int(quantity.value) for name, quantity in hardware.reserve_bytes.items()}
    if not ranks:
        known.pop(COMMUNICATORS, None)
    elif hardware.communicator_bytes:
        each = LogCurve.of(hardware.communicator_bytes)
        known[COMMUNICATORS] = sum(int(each(count)) for count in ranks)
    return known


def _pinned_blocks(lives: Liveness, program: Program, decisions: Decisions) -> Liveness:
    """Return host blocks as PyTorch's pinned allocator makes them.

    Each (micro-batch, layer, subsequence) has one block for its swapped activations. Each statistics tensor is fp32, so
    it is an allocation of its own: inside the layer's block, its one percent would double a block that the activations
    fill exactly (7B at 256k, TP4 CP2, alpha 1: 4 GiB per layer). Each state, and each chunk that attention offloads
    while its layer runs, is a block too.

    The host copies of one (micro-batch, layer) have the same index in their families. A block is rounded up to a power
    of two, and lives from the birth of its first tensor to the death of its last.
    """
    numbers, statistics, counted = {}, set(), dict[str, LayersOfKind]()
    (stage,) = (each for each in stages_of(decisions) if each.name == program.stage)
    for kind in layers_by_kind(decisions.model, stage):
        for each in subsequences_of(decisions, shape_of(decisions)):
            for t in skeletal_of(decisions, each.shape, kind.shape):
                numbers[name := f"host.{t.name}{kind.suffix}{each.suffix}"] = each.number
                statistics |= {name} if t.statistics else set()
                counted[name] = kind
    apart = np.array([f.name in statistics for f in program.all_families], dtype=bool)
    number = np.array([numbers.get(f.name, 0) for f in program.all_families], dtype=np.int64)
    bases = np.array(list(program.family_bases.values()), dtype=np.int64)
    chosen = np.flatnonzero(~lives.on_device & (lives.death >= lives.birth))
    if not len(chosen):
        return lives
    of_template = np.arange(len(apart)) >= len(program.families)
    alone = (lives.birth[chosen] < 0) | (apart | of_template)[lives.family[chosen]]
    # Blocks of layers are numbered by index and subsequence; single blocks are numbered after them.
    count, family = decisions.layout.subsequences, lives.family[chosen]
    index = chosen - bases[family]
    for at, each_family in enumerate(program.all_families):
        if each_family.layer_kind is not None and each_family.name in counted:  # it counts only layers of its kind
            layers, mine = np.array(counted[each_family.name].layers), family == at
            micro_batch, place = np.divmod(index[mine], len(layers))
            index[mine] = micro_batch * len(stage.layers) + layers[place]
    key = np.where(alone, count * len(lives.bytes) + chosen, index * count + number[family])
    blocks, block = np.unique(key, return_inverse=True)
    birth = np.full(len(blocks), lives.instructions, dtype=np.int64)
    death = np.full(len(blocks), -1, dtype=np.int64)
    size = np.zeros(len(blocks), dtype=np.int64)
    np.minimum.at(birth, block, lives.birth[chosen])
    np.maximum.at(death, block, lives.death[chosen])
    np.add.at(size, block, lives.bytes[chosen])
    example = np.zeros(len(blocks), dtype=np.int64)
    example[block] = chosen
    return replace(
        lives,
        birth=birth,
        death=death,
        bytes=np.array([pinned_bytes(int(each)) for each in size], dtype=np.int64),
        family=lives.family[example],
        on_device=np.zeros(len(blocks), dtype=bool),
        class_of=lives.class_of[example],
    )


def _host_over_time(lives: Liveness, playback: Playback) -> MemoryCurve:
    """Return host bytes over time; a buffer lives from the start of its first copy to the end of its last."""
    used = ~lives.on_device & (lives.death >= lives.birth)
    lasting = lives.birth < 0
    dynamic = used & ~lasting
    births = playback.start_s[lives.birth[dynamic]]
    deaths = playback.end_s[lives.death[dynamic]]
    times, at = np.unique(np.concatenate(([0.0], births, deaths)), return_inverse=True)
    born, died = at[1 : 1 + len(births)], at[1 + len(births) :]
    curves: dict[str, list[int]] = {}
    for number, name in enumerate(lives.class_names):
        mine = lives.class_of == number
        if not (used & mine).any():
            continue
        change = np.zeros(len(times), dtype=np.int64)
        change[0] = lives.bytes[used & lasting & mine].sum()
        chosen = mine[dynamic]
        np.add.at(change, born[chosen], lives.bytes[dynamic][chosen])
        np.subtract.at(change, died[chosen], lives.bytes[dynamic][chosen])
        curves[name] = np.cumsum(change).tolist()
    return MemoryCurve(time_s=times.tolist(), bytes_by_class=curves)
