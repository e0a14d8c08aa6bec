"""Replays memory requests through the model of PyTorch's caching allocator, iteration by iteration.

The first iteration warms the cache; the last one shows the steady state. Buffers that live over all instants
(parameters, gradients, optimizer states) are allocated once, before the first iteration. At each instant, frees come
before allocations, in the listed order. All requests belong to one stream.

A program's edges order its lanes, so none of its buffers waits for an event. A framework that marks tensors with
``record_stream`` gets their memory back only when the device has passed the work, and its host is ahead of the device:
``RunAhead`` describes that. A ``Beginning`` describes how a framework allocates its states before the second step.

    a: 6 GiB at instants 0 to 1;  b: 2 GiB and c: 6 GiB from 1 on.  a is freed, b is cut from the front of its segment:

        | b  |   free    |  6 GiB        c does not fit behind b, and the segment stays while b lives. With a capacity
        | c              |  6 GiB        of 12 GiB, 12 are reserved for 8; with 10 GiB c fails, though 4 are free
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np

from memo_sim.contract.hardware import Hardware
from memo_sim.contract.units import GIB
from memo_sim.memory.device_allocator import DEFAULT, Block, DeviceAllocator, DeviceCall, OutOfDeviceMemory
from memo_sim.memory.device_config import AllocatorConfig
from memo_sim.memory.initial_states import Beginning
from memo_sim.memory.problem import Clock, Ints


class Names(Protocol):
    """Names of buffers by number."""

    def __getitem__(self, number: int, /) -> str:
        """Return the name of a buffer."""

    def __len__(self) -> int:
        """Return the number of buffers."""


class Requested(Protocol):
    """What is requested, by buffer: a ``Requests`` document, or the columns of a program in arrays."""

    @property
    def ids(self) -> Names:
        """Names."""

    @property
    def lower(self) -> Sequence[int] | Ints:
        """First instants of the lives."""

    @property
    def upper(self) -> Sequence[int] | Ints:
        """First instants after the lives."""

    @property
    def size_bytes(self) -> Sequence[int] | Ints:
        """Sizes."""


@dataclass(frozen=True)
class AllocationCosts:
    """Seconds that a device call costs: a constant per call plus a rate per GiB."""

    malloc_s: float = 0.0
    free_s: float = 0.0
    malloc_s_per_gib: float = 0.0
    free_s_per_gib: float = 0.0

    def seconds(self, calls: list[DeviceCall]) -> float:
        """Return the seconds of ``calls``. Waits for streams cost nothing here: their work takes that time anyway."""
        total = 0.0
        for kind, size in calls:
            if kind in ("malloc", "map"):
                total += self.malloc_s + self.malloc_s_per_gib * size / GIB
            elif kind in ("free", "unmap"):
                total += self.free_s + self.free_s_per_gib * size / GIB
        return total


LOOK = 128
"""Allocations of a step between two looks at the clock."""

NO_COSTS = AllocationCosts()


def allocation_costs(hardware: Hardware) -> AllocationCosts:
    """Return the profile's costs of cudaMalloc and cudaFree."""
    return AllocationCosts(
        malloc_s=hardware.device_malloc_s.value,
        free_s=hardware.device_free_s.value,
        malloc_s_per_gib=hardware.device_malloc_s_per_gib.value if hardware.device_malloc_s_per_gib else 0.0,
        free_s_per_gib=hardware.device_free_s_per_gib.value if hardware.device_free_s_per_gib else 0.0,
    )


@dataclass(frozen=True)
class RunAhead:
    """How far the device is behind the host, and which buffers have to wait for it.

    A freed buffer can be reused when the device has done all work that its streams had been given by the free. The
    device catches up at the end of a step, and at each allocation retry.
    """

    marked: Mapping[int, Ints]
    """By stream: the numbers of the buffers that ``record_stream`` marked with it, ascending, each once.

    A stream without marked buffers need not be there.
    """
    work: Mapping[int, Ints]
    """By stream of ``marked``: the instants of its work, ascending."""
    done: Ints
    """By the host's instant: the last instant whose work the device has done (-1: none)."""


@dataclass(frozen=True)
class DeviceStop:
    """One request that made the allocator call the device, with the calls and their seconds."""

    instant: int
    buffer: str
    calls: tuple[DeviceCall, ...]
    seconds: float
    retried_allocation: bool
    """Whether this was an allocation retry (MEMO's reorganisation), and not only a new segment."""


@dataclass(frozen=True)
class ReplayOutOfMemory:
    """The request that failed, and the allocator's state then (bytes)."""

    iteration: int
    """From 0; -1: before the first iteration, for buffers that live over all instants."""
    instant: int
    buffer: str
    requested_bytes: int
    segment_bytes: int
    """The size of a segment for the request."""
    allocated_bytes: int
    reserved_bytes: int


def _none() -> Ints:
    return np.empty(0, dtype=np.int64)


@dataclass(eq=False)
class Iteration:
    """One iteration: its device calls, and the highest allocated and reserved bytes at each instant.

    Iterations are not compared: whether arrays are equal is no single truth value.
    """

    instants: Ints = field(default_factory=_none)
    allocated_bytes: Ints = field(default_factory=_none)
    reserved_bytes: Ints = field(default_factory=_none)
    stops: list[DeviceStop] = field(default_factory=list)

    @property
    def allocation_retries(self) -> int:
        """The number of allocation retries."""
        return sum(stop.retried_allocation for stop in self.stops)

    @property
    def seconds(self) -> float:
        """The seconds of all device calls."""
        return sum(stop.seconds for stop in self.stops)


@dataclass(frozen=True)
class Replay:
    """The result of a replay; sizes in bytes, peaks over all iterations."""

    iterations: list[Iteration]
    live_peak_bytes: int
    """Most requested bytes live at once, not rounded."""
    allocated_peak_bytes: int
    reserved_peak_bytes: int
    segments_allocated: int
    segments_freed: int
    allocation_retries: int
    out_of_memory: ReplayOutOfMemory | None
    out_of_time: bool = False
    """Whether the replay was cut short, so that its figures say nothing."""

    @property
    def steady(self) -> Iteration:
        """The last iteration."""
        return self.iterations[-1]


def replay(
    requests: Requested,
    config: AllocatorConfig = DEFAULT,
    *,
    iterations: int = 3,
    capacity_bytes: int | None = None,
    reserve_bytes: int = 0,
    costs: AllocationCosts = NO_COSTS,
    ahead: RunAhead | None = None,
    beginning: Beginning | None = None,
    most_s: float = math.inf,
) -> Replay:
    """Return how PyTorch's caching allocator serves ``requests``.

    The device has ``capacity_bytes`` (None: no limit), of which ``reserve_bytes`` are not for the allocator. A request
    that fails ends the replay and is reported in ``out_of_memory``; it is a result, not an error. Without ``ahead`` no
    block waits for a stream. A replay that takes more than ``most_s`` seconds ends, and says so.
    """
    limit = None if capacity_bytes is None else max(0, capacity_bytes - reserve_bytes)
    device = DeviceAllocator(config, limit)
    player = _Player(requests, device, costs, _Streams(device, ahead) if ahead else None, Clock(most_s))
    failed = (player.begin(beginning) if beginning else None) or player.play_lasting()
    for number in range(iterations):
        failed = failed or player.play(number)
        if player.late:
            break
        if beginning and number == 0:
            failed = failed or player.hold(beginning.later, number)
    return Replay(
        iterations=player.iterations,
        live_peak_bytes=player.live_peak,
        allocated_peak_bytes=device.peak_allocated_bytes,
        reserved_peak_bytes=device.peak_reserved_bytes,
        segments_allocated=device.num_device_alloc,
        segments_freed=device.num_device_free,
        allocation_retries=device.num_alloc_retries,
        out_of_memory=failed,
        out_of_time=player.late,
    )


class _Streams:
    """The streams that freed blocks wait for, and how far the device has come."""

    def __init__(self, device: DeviceAllocator, ahead: RunAhead) -> None:
        self._device = device
        self._work = {stream: instants.tolist() for stream, instants in ahead.work.items()}
        self._done: list[int] = ahead.done.tolist()
        self._streams: dict[int, list[int]] = {}
        """By buffer number: the streams that it is marked with."""
        for stream, numbers in ahead.marked.items():
            for number in numbers.tolist():
                self._streams.setdefault(number, []).append(stream)
        self._caught_up = -1
        self._waiting: dict[int, deque[int]] = {}
        """By stream: for each block that waits for it, the instant whose work it waits for."""

    def free(self, number: int, block: Block, instant: int) -> None:
        """Free the block of a buffer; a block that other streams used waits for their work given so far."""
        for stream in self._streams.get(number, ()):
            work = self._work[stream]
            given = bisect_left(work, instant)
            self._device.record_stream(block, stream)
            self._waiting.setdefault(stream, deque()).append(work[given - 1] if given else -1)
        self._device.free(block)

    def reach(self, instant: int) -> None:
        """Note that the host is at ``instant``: blocks no longer wait for work that the device has done by then."""
        done = max(self._done[instant], self._caught_up)
        for stream, waiting in self._waiting.items():
            passed = 0
            while waiting and waiting[0] <= done:
                waiting.popleft()
                passed += 1
            if passed:
                self._device.pass_events(stream, passed)

    def catch_up(self, instant: int) -> None:
        """Note that the host has waited for the device at ``instant``, and the allocator has taken all blocks back."""
        self._caught_up = instant - 1
        self._waiting.clear()

    def end_step(self) -> None:
        """Note that the device has done the whole step."""
        for stream in self._waiting:
            self._device.pass_events(stream)
        self.catch_up(0)


class _Player:
    """Plays requests on an allocator; holds the blocks in use and the iterations so far."""

    def __init__(
        self,
        requests: Requested,
        device: DeviceAllocator,
        costs: AllocationCosts,
        streams: _Streams | None,
        clock: Clock,
    ) -> None:
        self.names = requests.ids
        self.sizes: list[int] = np.asarray(requests.size_bytes).tolist()
        self.device = device
        self.costs = costs
        self.streams = streams
        self.clock = clock
        self.late = False
        self.iterations: list[Iteration] = []
        self.live = self.live_peak = 0
        self._held: dict[int, Block] = {}
        first, last = (np.asarray(each).tolist() for each in (requests.lower, requests.upper))
        end = max(last, default=0)
        self._lasting: list[int] = []
        born: dict[int, list[int]] = {}
        dead: dict[int, list[int]] = {}
        for number, (lower, upper) in enumerate(zip(first, last, strict=True)):
            if not self.sizes[number]:
                continue
            if lower == 0 and upper == end:
                self._lasting.append(number)
            else:
                born.setdefault(lower, []).append(number)
                dead.setdefault(upper, []).append(number)
        self._instants = [(at, dead.get(at, ()), born.get(at, ())) for at in sorted(born.keys() | dead.keys())]
        """Each instant with the numbers of the buffers that are freed there, and of those that are allocated."""

    def begin(self, beginning: Beginning) -> ReplayOutOfMemory | None:
        """Allocate the states before the first step, free temporary ones, and return the failed request, or None."""
        temporary: list[Block] = []
        failed = self.hold(beginning.temporary, -1, temporary) or self.hold(beginning.before, -1)
        for block in temporary:
            self.device.free(block)
            self.live -= block.requested
        return failed or self.hold(beginning.behind, -1)

    def hold(self, sizes: Sequence[int], iteration: int, blocks: list[Block] | None = None) -> ReplayOutOfMemory | None:
        """Allocate states, which ``blocks`` collects if given; return the failed request, or None."""
        for size in sizes:
            found = self._request(size)
            if found is None:
                return self._failed(size, "states", iteration, 0)
            if blocks is not None:
                blocks.append(found)
        return None

    def play_lasting(self) -> ReplayOutOfMemory | None:
        """Allocate the buffers that live over all instants; return the failed request, or None."""
        for number in self._lasting:
            if failed := self._malloc(number, -1, 0, []):
                return failed
        return None

    def play(self, number: int) -> ReplayOutOfMemory | None:
        """Play one iteration; return the failed request, or None."""
        stops = list[DeviceStop]()
        columns = list[int](), list[int](), list[int]()
        failed = self._play(number, columns, stops)
        instants, allocated, reserved = (np.array(each, dtype=np.int64) for each in columns)
        self.iterations.append(Iteration(instants, allocated, reserved, stops))
        return failed

    def _play(
        self, number: int, columns: tuple[list[int], list[int], list[int]], stops: list[DeviceStop]
    ) -> ReplayOutOfMemory | None:
        device, streams = self.device, self.streams
        instants, allocated_bytes, reserved_bytes = columns
        count = 0
        for instant, dead, born in self._instants:
            for buffer in dead:
                self._free(buffer, instant)
            allocated, reserved = device.allocated_bytes, device.reserved_bytes
            if streams and born:
                streams.reach(instant)
            for buffer in born:
                if count % LOOK == 0 and self._is_late():
                    return None
                count += 1
                if failed := self._malloc(buffer, number, instant, stops):
                    return failed
                allocated = max(allocated, device.allocated_bytes)
                reserved = max(reserved, device.reserved_bytes)
            instants.append(instant)
            allocated_bytes.append(allocated)
            reserved_bytes.append(reserved)
        if self.streams:
            self.streams.end_step()
        return None

    def _is_late(self) -> bool:
        self.late = self.late or self.clock.left_s == 0
        return self.late

    def _free(self, buffer: int, instant: int) -> None:
        block = self._held.pop(buffer)
        if self.streams:
            self.streams.free(buffer, block, instant)
        else:
            self.device.free(block)
        self.live -= self.sizes[buffer]

    def _malloc(self, buffer: int, iteration: int, instant: int, stops: list[DeviceStop]) -> ReplayOutOfMemory | None:
        device, size = self.device, self.sizes[buffer]
        called, retried = len(device.calls), device.num_alloc_retries
        found = self._request(size)
        if found is None:
            return self._failed(size, self.names[buffer], iteration, instant)
        self._held[buffer] = found
        retried_allocation = device.num_alloc_retries > retried
        if self.streams and retried_allocation:
            self.streams.catch_up(instant)
        if len(device.calls) > called:
            calls = device.calls[called:]
            seconds = self.costs.seconds(calls)
            stops.append(DeviceStop(instant, self.names[buffer], tuple(calls), seconds, retried_allocation))
        return None

    def _request(self, size: int) -> Block | None:
        """Return a block for ``size`` bytes; None where the device has no room for it."""
        try:
            block = self.device.malloc(size)
        except OutOfDeviceMemory:
            return None
        self.live += size
        self.live_peak = max(self.live_peak, self.live)
        return block

    def _failed(self, size: int, name: str, iteration: int, instant: int) -> ReplayOutOfMemory:
        device = self.device
        return ReplayOutOfMemory(
            iteration=iteration,
            instant=instant,
            buffer=name,
            requested_bytes=size,
            segment_bytes=device.config.segment_bytes(device.config.block_bytes(size)),
            allocated_bytes=device.allocated_bytes,
            reserved_bytes=device.reserved_bytes,
        )
