"""Measures collectives and send-receive inside a node, by kind, number of ranks and size, for the profile's tables.

    seconds(bytes) = alpha + factor(ranks) * bytes / bus rate(bytes)

    factor   all-reduce 2(n-1)/n    all-gather, reduce-scatter, all-to-all (n-1)/n    send-receive 1

``bytes`` is the size of the whole tensor. For all-to-all it is what one rank holds; for send-receive it is the message
that each rank passes to the next one in the ring. On GPUs, calls run back to back, and the slowest rank counts.

On CPUs, calls back to back take half as long as in a step: their thread is awake, and their code and operands are in
its core's cache. So each call is made as a step makes it: compute reads other bytes, hands the call to the thread of
its lane, and waits for it. The time is from the arrival of the last rank, which is the shortest of all ranks' times:

    rank 0   read |.wait.............|        times: 19, 14, of which 14 counts
    rank 1   read read |.wait........|

``alpha`` is the shortest time of any size. A size whose time is barely above ``alpha`` says nothing about the bus rate,
so the curve omits it. If a message took longer than a larger one, the larger one's time is used for both.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from memo_exec.interpreter.lanes import lane_threads
from memo_exec.probes.memory import core_cache_bytes
from memo_exec.probes.ranks import Ranks
from memo_exec.probes.timing import Sample, sample_of
from memo_sim.contract.hardware import CollectiveKind, CollectiveTable, Curve
from memo_sim.program.ir.instruction import Lane

KINDS: tuple[CollectiveKind, ...] = ("all_reduce", "all_gather", "reduce_scatter", "all_to_all", "send_recv")

REPEATS = 5
FEWEST_CALLS, MOST_CALLS = 10, 200
ABOVE_START = 1.2
"""The curve contains only sizes whose time is at least this multiple of ``alpha``."""

Group = dist.ProcessGroup


def group_sizes(world: int) -> list[int]:
    """Return the numbers of ranks to measure: the powers of two up to ``world``, and ``world``."""
    sizes = {2**k for k in range(1, world.bit_length()) if 2**k <= world}
    return sorted(sizes | ({world} if world > 1 else set()))


def volume_factor(kind: CollectiveKind, ranks: int) -> float:
    """Return how many times the tensor's bytes cross each rank's link."""
    if kind == "all_reduce":
        return 2.0 * (ranks - 1) / ranks
    return 1.0 if kind == "send_recv" else (ranks - 1) / ranks


def measure(
    ranks: Ranks,
    sizes: Sequence[int],
    seconds: float,
    source: str,
    *,
    outside: Callable[[], int],
    told: Callable[[str], None],
    over: Callable[[], bool] = lambda: False,
) -> tuple[list[CollectiveTable], dict[int, int]]:
    """Return one table per kind and group size, and the bytes of this rank's communicator by group size.

    Every rank calls this, and all get the same tables. A communicator's bytes are read after it has run every kind,
    because libraries allocate buffers for a kind at its first call.

    Args:
        ranks: the processes of this calibration.
        sizes: tensor sizes in bytes.
        seconds: approximate time to repeat each size.
        source: the name of the source in the profile.
        outside: returns the device bytes in use that torch does not hold.
        told: receives a progress line before each measurement.
        over: returns whether time is short; then only the smallest and the largest size are measured.

    Raises:
        CannotRun: if another rank stops.
    """
    tables, taken = [], {}
    for count in group_sizes(ranks.world):
        ranks.wait()  # its first call creates the world group, whose memory must not count here
        before = outside()
        group = ranks.group(count)
        make = time_calls if ranks.device.type != "cpu" else time_handed_calls
        for kind in KINDS:
            told(f"measuring {kind} among {count} ranks")
            samples = []
            chosen = sorted({min(sizes), max(sizes)}) if ranks.any(over()) else sizes
            if ranks.rank < count:
                with ranks.answered():
                    samples = [make(ranks, call_of(kind, ranks, count, size, group), group, seconds) for size in chosen]
            ranks.wait()
            found = [ranks.slowest(samples[i] if samples else Sample(0.0, 0.0)) for i in range(len(chosen))]
            tables.append(table_of(kind, count, dict(zip(chosen, found, strict=True)), source))
        taken[count] = max(0, outside() - before)
    return tables, taken


def table_of(kind: CollectiveKind, ranks: int, found: dict[int, Sample], source: str) -> CollectiveTable:
    """Convert measured times by size in bytes to alpha and a curve of bus rates."""
    sizes = sorted(found)
    # A message that took longer than a larger one was disturbed by other load.
    times = {size: min(found[other].seconds for other in sizes if other >= size) for size in sizes}
    alpha_s, largest = times[sizes[0]], sizes[-1]
    factor = volume_factor(kind, ranks)
    points = {
        size: factor * size / (seconds - alpha_s) for size, seconds in times.items() if seconds >= ABOVE_START * alpha_s
    } or {largest: factor * largest / times[largest]}
    spread = sum(found[size].spread for size in points) / len(points)
    curve = Curve(x=[float(size) for size in points], y=list(points.values()), source=source, spread=spread)
    return CollectiveTable(kind=kind, ranks=ranks, alpha_s=alpha_s, bus_bytes_per_s=curve, source=source)


def time_calls(ranks: Ranks, call: Callable[[], None], group: Group, seconds: float) -> Sample:
    """Return the time per call, in many calls back to back, on the group's slowest rank."""
    call()
    one = ranks.slowest(sample_of([_elapsed(call, 1, ranks.device)]), group).seconds
    calls = max(1, min(MOST_CALLS, int(seconds / REPEATS / max(one, 1e-7))))
    durations = [_elapsed(call, calls, ranks.device) / calls for _ in range(REPEATS)]
    return ranks.slowest(sample_of(durations), group)


def time_handed_calls(ranks: Ranks, call: Callable[[], None], group: Group, seconds: float) -> Sample:
    """Return the time per call on CPUs as a step makes it, from the arrival of the last rank of the group."""
    return sample_of(handed_calls(ranks, call, group, seconds))


def handed_calls(ranks: Ranks, call: Callable[[], None], group: Group, seconds: float) -> list[float]:
    """Return the time of each call; they are made for about ``seconds``."""
    lanes = lane_threads((Lane.COMPUTE, Lane.P2P), ranks.device, sharing=ranks.world)
    other = torch.zeros(core_cache_bytes() // 4)

    def one() -> float:
        other.sum()
        begin = time.perf_counter()
        lanes[Lane.P2P].submit(call).result()
        return time.perf_counter() - begin

    def several(calls: int) -> list[float]:
        return [one() for _ in range(calls)]

    try:
        guess = lanes[Lane.COMPUTE].submit(several, 2).result()[-1]
        calls = int(seconds / max(ranks.slowest(Sample(guess, 0.0), group).seconds, 1e-7))
        durations = lanes[Lane.COMPUTE].submit(several, max(FEWEST_CALLS, min(MOST_CALLS, calls))).result()
    finally:
        for thread in lanes.values():
            thread.shutdown()
    return ranks.shortest(durations, group)


def _elapsed(call: Callable[[], None], calls: int, device: torch.device) -> float:
    if device.type == "cuda":
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
        start.record()
        for _ in range(calls):
            call()
        end.record()
        end.synchronize()
        return float(start.elapsed_time(end)) / 1e3
    begin = time.perf_counter()
    for _ in range(calls):
        call()
    return time.perf_counter() - begin


def call_of(kind: CollectiveKind, ranks: Ranks, count: int, size: int, group: Group) -> Callable[[], None]:
    """Return a function that makes one call over ``size`` bytes, rounded down to a multiple of the ranks."""
    dtype: torch.dtype = torch.float32 if ranks.device.type == "cpu" else torch.bfloat16
    elements = max(1, size // dtype.itemsize // count) * count
    whole = torch.zeros(elements, dtype=dtype, device=ranks.device)
    if kind == "all_reduce":
        return lambda: _done(dist.all_reduce(whole, group=group))
    if kind == "send_recv":
        return _exchange(whole, ranks.rank, count, group)
    other = torch.zeros_like(whole)
    part = whole[: elements // count].clone()
    if kind == "all_gather":
        gather = _named("all_gather_single", "all_gather_into_tensor")
        return lambda: _done(gather(other, part, group=group))
    if kind == "reduce_scatter":
        scatter = _named("reduce_scatter_single", "reduce_scatter_tensor")
        return lambda: _done(scatter(part, whole, group=group))
    return lambda: _done(dist.all_to_all_single(other, whole, group=group))


def _named(new: str, old: str) -> Callable[..., object]:
    """Return a collective by its new name if torch has it; the old name warns since torch 2.13."""
    found: Callable[..., object] = getattr(dist, new, None) or getattr(dist, old)
    return found


def _exchange(message: Tensor, rank: int, count: int, group: Group) -> Callable[[], None]:
    """Return a function that makes one hop of a ring: it sends to the next rank and receives from the previous one."""
    received = torch.zeros_like(message)
    after, before = (rank + 1) % count, (rank - 1) % count

    def call() -> None:
        transfers = [dist.P2POp(dist.isend, message, after, group), dist.P2POp(dist.irecv, received, before, group)]
        for work in dist.batch_isend_irecv(transfers):
            work.wait()

    return call


def _done(work: object) -> None:
    """Discard the result of a synchronous collective, which is None."""
    del work
