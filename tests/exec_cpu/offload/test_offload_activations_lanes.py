"""The order of copies on the lanes, tested without a GPU: fake streams and events carry vector clocks.

Every access of copies and compute is recorded with its bytes and its stream's clock. If two accesses touch the same
bytes and one of them writes, events must order them. Further tests remove each edge in turn, and a race must appear.
"""

import gc
import random
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef

from memo_exec import offload_activations
from memo_exec.interpreter.race_checks import RaceFound
from memo_exec.offload import lanes as lanes_module
from memo_exec.offload import swap as swap_module
from memo_exec.offload.host import HostMemory
from memo_exec.offload.lanes import PASSED, HostLanes, StreamLanes
from memo_sim.program.arena.first_fit import ALIGNMENT_BYTES, FirstFit
from tests.exec_cpu.offload.test_offload_activations import equal, gradients, make

Clock = dict[int, int]


@pytest.fixture(autouse=True)
def _copies_by_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    """Small tensors go through the lanes' threads too; their order is what is tested here."""
    monkeypatch.setattr(lanes_module, "INLINE_BYTES", 0)


class FakeStream:
    """A stream that runs work at once and records, as a vector clock, what the work is ordered after."""

    count = 0

    def __init__(self, device: Any = None) -> None:
        del device
        self.number = FakeStream.count = FakeStream.count + 1
        self.clock: Clock = {self.number: 0}

    def tick(self) -> Clock:
        self.clock[self.number] += 1
        return dict(self.clock)

    def wait_event(self, event: "FakeEvent") -> None:
        for number, at in event.clock.items():
            self.clock[number] = max(at, self.clock.get(number, 0))


class FakeEvent:
    """An event with a clock; the device is either always behind, so that no query finds it passed, or never."""

    behind = True

    def record(self, stream: FakeStream) -> None:
        self.clock = dict(stream.clock)

    def query(self) -> bool:
        return not FakeEvent.behind

    def synchronize(self) -> None:
        current.wait_event(self)


current = FakeStream()


class Accesses:
    """Records all accesses to bytes with their vector clocks, and the races among them."""

    def __init__(self) -> None:
        self.found: list[tuple[int, int, bool, int, Clock, str]] = []
        self.device: list[tuple[StorageWeakRef, int, int]] = []
        self.races: list[str] = []
        self.copies = 0

    def note(self, name: str, tensor: Tensor, *, write: bool, stream: FakeStream) -> None:
        first = tensor.data_ptr()
        self.add(name, first, first + tensor.nbytes, write, stream)
        storage = tensor.untyped_storage()
        self.device.append((StorageWeakRef(storage), storage.data_ptr(), storage.nbytes()))

    def add(self, name: str, first: int, end: int, write: bool, stream: FakeStream) -> None:
        clock = stream.tick()
        for low, high, wrote, number, then, earlier in self.found:
            if low < end and first < high and (write or wrote) and clock.get(number, 0) < then[number]:
                self.races.append(f"{name} is not ordered after {earlier}")
        self.found.append((first, end, write, stream.number, clock, name))

    def reuse_freed(self) -> None:
        """Record a compute write to all freed device memory, as the next tensor there would make."""
        gone = [each for each in self.device if each[0].expired()]
        self.device = [each for each in self.device if not each[0].expired()]
        for _, first, size in gone:
            # If another tensor uses these bytes already, its own writes are recorded.
            if not any(first < low + length and low < first + size for _, low, length in self.device):
                self.add("reuse of freed memory", first, first + size, True, current)


@pytest.fixture
def accesses(monkeypatch: pytest.MonkeyPatch) -> Accesses:
    """Make the CPU appear as a CUDA device, and record every access."""
    found = Accesses()
    playing = [current]

    @contextmanager
    def stream(each: FakeStream) -> Iterator[None]:
        playing.append(each)
        yield
        playing.pop()

    class Recorded(StreamLanes):
        def _copy(self, lane: Any, into: Tensor, source: Tensor, after: Any) -> Any:
            on = lane or current
            for mark in after:
                lanes_module._order(on, mark)
            name = "restore" if lane is self._h2d and lane is not None else "offload"
            found.copies += 1
            found.note(f"{name} read", source, write=False, stream=on)
            found.note(f"{name} write", into, write=True, stream=on)
            return super()._copy(lane, into, source, [])

    monkeypatch.setattr(torch.cuda, "Stream", FakeStream)
    monkeypatch.setattr(torch.cuda, "Event", FakeEvent)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device=None: current)
    monkeypatch.setattr(torch.cuda, "stream", stream)
    monkeypatch.setattr(swap_module, "HostLanes", lambda lanes: Recorded(torch.device("cpu"), lanes=lanes))
    monkeypatch.setattr(FakeEvent, "behind", True)
    return found


class Compute(torch.autograd.Function):
    """A kernel that writes the saved tensor in forward and reads it in backward."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, accesses: Accesses, value: float) -> Tensor:
        accesses.reuse_freed()
        saved = torch.full((32, 32), value)
        accesses.note("compute's write", saved, write=True, stream=current)
        ctx.save_for_backward(saved)
        ctx.accesses, ctx.value = accesses, value
        return x * 1

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        (saved,) = ctx.saved_tensors
        ctx.accesses.note("compute's read", saved, write=False, stream=current)
        assert bool((saved == ctx.value).all())
        ctx.accesses.reuse_freed()
        return grad, None, None


def train(accesses: Accesses, **options: Any) -> Any:
    """Run three steps with twelve tensors; in between, some graphs die unused or after half of backward."""
    context = offload_activations(device="cpu", max_fwd_stash_size=2, max_bwd_stash_size=2, **options)
    leaf = torch.ones((), requires_grad=True)

    def forward(first: float) -> tuple[Tensor, Tensor, list[Tensor]]:
        x = middle = leaf * 1
        aside = []
        with context:
            for i in range(12):
                x = Compute.apply(x, accesses, first + i)
                middle = x if i == 6 else middle
                if i % 5 == 2:
                    aside.append(Compute.apply(x, accesses, first + i + 0.5))
        return x, middle, aside

    for step in range(3):
        loss, middle, aside = forward(100.0 * step)
        loss.backward()
        del loss, middle, aside
        loss, middle, aside = forward(100.0 * step + 20)
        torch.autograd.grad(loss, middle)  # the tensors prefetched beyond it are never used
        del loss, middle, aside
        gc.collect()
        forward(100.0 * step + 40)
    accesses.reuse_freed()
    return context.statistics


@pytest.mark.parametrize("host_bytes", [None, 200_000, 30_000])
@pytest.mark.parametrize("use_streams", [True, False])
@pytest.mark.parametrize("behind", [True, False])
def test_every_hazard_is_ordered(
    accesses: Accesses, monkeypatch: pytest.MonkeyPatch, behind: bool, use_streams: bool, host_bytes: int | None
) -> None:
    """If the device is far behind the host, only events order the streams."""
    monkeypatch.setattr(FakeEvent, "behind", behind)
    moved = train(accesses, use_streams=use_streams, host_bytes=host_bytes)
    assert (moved.dropped_prefetches > 0) == use_streams
    if behind:  # a query that finds an event passed also orders, but the clocks do not see that
        assert accesses.races == []
    assert accesses.copies == moved.offloaded_tensors + moved.restored_tensors > 40


def nothing(*_: Any, **__: Any) -> None:
    return


def never(real: Any) -> Any:
    del real
    return nothing


def not_after(which: int) -> Callable[[Any], Any]:
    """Remove one of the marks for which a copy waits."""

    def change(real: Any) -> Any:
        return lambda self, into, source, after: real(
            self, into, source, [m for i, m in enumerate(after) if i != which]
        )

    return change


LEFT_OUT: dict[str, tuple[dict[str, Callable[[Any], Any]], str]] = {
    "offload after compute": ({"offload": not_after(0)}, "offload read is not ordered after compute's write"),
    "restore after compute": ({"restore": not_after(1)}, "restore write is not ordered after"),
    "compute after restore": ({"wait": never}, "compute's read is not ordered after restore write"),
    "reuse of the source": ({"wait": never}, "reuse of freed memory is not ordered after offload read"),
    "reuse of what came unused": ({"release": never}, "reuse of freed memory is not ordered after restore write"),
    # On one device, compute's own waits imply these two edges, so these cases remove the waits too.
    "restore after offload": (
        {"wait": never, "restore": not_after(0)},
        "restore read is not ordered after offload write",
    ),
    "reuse of host bytes": (
        {"wait": never, "release": never, "hold": never},
        "offload write is not ordered after restore read",
    ),
}


@pytest.mark.parametrize("edge", LEFT_OUT)
def test_every_edge_is_needed(accesses: Accesses, monkeypatch: pytest.MonkeyPatch, edge: str) -> None:
    changes, race = LEFT_OUT[edge]
    for method, change in changes.items():
        monkeypatch.setattr(StreamLanes, method, change(getattr(StreamLanes, method)))
    train(accesses, host_bytes=200_000)
    assert any(race in found for found in accesses.races), set(accesses.races)


@pytest.mark.parametrize("edge", ["restore after offload", "reuse of host bytes"])
def test_an_edge_orders_what_compute_does_not(accesses: Accesses, monkeypatch: pytest.MonkeyPatch, edge: str) -> None:
    """Without compute's waits but with the edge, there is no race; it complements the last two cases above."""
    changes, race = LEFT_OUT[edge]
    for method in changes.keys() - {"restore", "hold"}:
        monkeypatch.setattr(StreamLanes, method, nothing)
    train(accesses, host_bytes=200_000)
    assert not any(race in found for found in accesses.races)


@pytest.fixture
def slow(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make copies on threads slow, each with a different delay."""
    real, dice = lanes_module._copy, random.Random(1)

    def copy(into: Tensor, source: Tensor, after: Any) -> None:
        for mark in after:
            mark.join()
        time.sleep(dice.random() * 0.004)
        real(into, source, [])

    monkeypatch.setattr(lanes_module, "_copy", copy)


@pytest.mark.usefixtures("slow")
@pytest.mark.parametrize("name", ["mlp", "llama"])
def test_slow_lanes_change_nothing(name: str) -> None:
    forward, parameters = make(name)
    wanted = gradients(forward(), parameters)
    context = offload_activations(device="cpu", max_fwd_stash_size=2, max_bwd_stash_size=3, debug=True)
    for _ in range(2):
        with context:
            loss = forward()
        assert equal(gradients(loss, parameters), wanted)
    assert context.statistics.forward_waits > 0


@pytest.mark.usefixtures("slow")
def test_debug_finds_bytes_that_are_read_too_early(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(HostLanes, "wait", nothing)
    forward, parameters = make("mlp")
    with offload_activations(device="cpu", max_fwd_stash_size=1, debug=True):
        loss = forward()
    with pytest.raises(RaceFound, match="differ from the bytes"):
        gradients(loss, parameters)


def test_debug_finds_host_bytes_that_were_overwritten() -> None:
    context = offload_activations(device="cpu", max_fwd_stash_size=1, host_bytes=2**22, debug=True)
    forward, parameters = make("mlp")
    with context:
        loss = forward()
    context.synchronize()
    context._swap._host._slab[100_000] ^= 1
    with pytest.raises(RaceFound, match="differ from the bytes"):
        gradients(loss, parameters)


def test_a_failed_copy_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    """An error in a lane's thread is raised in the caller."""
    forward, parameters = make("mlp")
    context = offload_activations(device="cpu", max_fwd_stash_size=1)

    def fail(into: Tensor, source: Tensor, after: Any) -> None:
        raise OSError("the copy failed")

    with monkeypatch.context() as patched:
        patched.setattr(lanes_module, "_copy", fail)
        with pytest.raises(OSError, match="the copy failed"), context:
            forward()
    gc.collect()  # the error's traceback holds the graph
    wanted = gradients(forward(), parameters)
    with context:
        loss = forward()
    assert equal(gradients(loss, parameters), wanted)


def test_copies_run_on_their_own_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    import threading

    names = set()
    real = lanes_module._copy

    def copy(into: Tensor, source: Tensor, after: Any) -> None:
        names.add((threading.current_thread().name, torch.get_num_threads()))
        real(into, source, after)

    monkeypatch.setattr(lanes_module, "_copy", copy)
    forward, parameters = make("mlp")
    threads = torch.get_num_threads()
    with offload_activations(device="cpu", max_fwd_stash_size=1):
        loss = forward()
    gradients(loss, parameters)
    assert names == {("offload-d2h_0", 1), ("offload-h2d_0", 1)}
    assert torch.get_num_threads() == threads
    assert PASSED.done()


@given(st.lists(st.tuples(st.booleans(), st.integers(1, 500)), max_size=60), st.sampled_from([None, 1024, 4096]))
def test_ranges_never_overlap(actions: list[tuple[bool, int]], limit: int | None) -> None:
    holes = FirstFit()
    taken: dict[int, int] = {}
    for take, size in actions:
        if take or not taken:
            offset = holes.take(size, limit)
            if offset is None:
                assert limit is not None
                assert (
                    max((length for _, length in _gaps(taken, limit)), default=0) < size
                )  # refused only if no free range is large enough
                continue
            assert offset % ALIGNMENT_BYTES == 0
            assert limit is None or offset + size <= limit
            assert all(offset + size <= o or o + s <= offset for o, s in taken.items())
            taken[offset] = size
        else:
            offset = sorted(taken)[size % len(taken)]
            holes.give(offset, taken.pop(offset))


def _gaps(taken: dict[int, int], limit: int) -> list[tuple[int, int]]:
    """Return the aligned free ranges below ``limit``."""
    found, at = [], 0
    for offset, size in [*sorted(taken.items()), (limit, 0)]:
        if offset > at:
            found.append((at, offset - at))
        at = -(-(offset + size) // ALIGNMENT_BYTES) * ALIGNMENT_BYTES
    return found


def test_the_slab_has_the_size_that_was_needed() -> None:
    host = HostMemory(None, pinned=False)
    first, second = host.take(1000), host.take(300)
    assert first is not None
    assert second is not None
    assert not first.in_slab
    assert host.bytes == 0
    host.give(first)
    host.settle()
    assert host.bytes == 0  # the second range is still in use
    host.give(second)
    host.settle()
    assert host.bytes == host.peak_bytes == 1024 + 320
    again = host.take(1000)
    assert again is not None
    assert again.in_slab


def test_a_small_copy_waits_for_the_lane_of_an_earlier_large_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lanes_module, "INLINE_BYTES", 8)
    lanes, gate = HostLanes(lanes=True), threading.Event()
    monkeypatch.setattr(lanes_module, "_copy", lambda into, source, after: (gate.wait(10), into.copy_(source)))
    large, small, host = torch.ones(8), torch.full((1,), 2.0), torch.zeros(8)
    first = lanes.offload(host, large, [])
    second = lanes.offload(host[:1], small, [])
    assert not second.done()  # the calling thread did not overtake the lane
    gate.set()
    first.join()
    second.join()
    assert host.tolist() == [2.0, *[1.0] * 7]
    assert lanes.offload(host[1:2], small, []) is PASSED
