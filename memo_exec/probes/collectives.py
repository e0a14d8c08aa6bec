"""Collectives and exchanges inside a node, by kind, number of ranks and size, as the profile's tables hold them.

    seconds(bytes) = alpha + factor(ranks) * bytes / bus rate(bytes)

    factor   all-reduce 2(n-1)/n    all-gather, reduce-scatter, all-to-all (n-1)/n    send and receive 1

``bytes`` is the whole tensor; for all-to-all what one rank holds, for an exchange the message that each rank passes to
the next in its ring. Calls run back to back, as a step issues them, and the slowest rank counts. ``alpha`` is the
shortest time of any size; where a call takes hardly longer than that, its bytes cannot be told from its start, and the
size is left out of the curve. A message that took longer than a larger one counts as that one's time.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from memo_exec.probes.ranks import Ranks
from memo_exec.probes.timing import Sample, sample_of
from memo_sim.contract.hardware import CollectiveKind, CollectiveTable, Curve

KINDS: tuple[CollectiveKind, ...] = ("all_reduce", "all_gather", "reduce_scatter", "all_to_all", "send_recv")

REPEATS = 5
MOST_CALLS = 200
ABOVE_START = 1.2
"""A time counts for the curve from this multiple of ``alpha`` on."""

Group = dist.ProcessGroup


def group_sizes(world: int) -> list[int]:
    """Return the numbers of ranks to measure: the powers of two up to ``world``, and ``world``."""
    sizes = {2**k for k in range(1, world.bit_length()) if 2**k <= world}
    return sorted(sizes | ({world} if world > 1 else set()))


def volume_factor(kind: CollectiveKind, ranks: int) -> float:
    """Return how many times the bytes cross each rank's link."""
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
) -> tuple[list[CollectiveTable], dict[int, int]]:
    """Return one table a kind and group, and by the number of ranks the bytes that this rank's communicator took.

    ``seconds`` is about how long each size (in bytes) is repeated; ``outside`` returns the device bytes in use that
    torch does not hold; ``told`` hears what begins. Every rank calls this; all get the same tables. A communicator has
    played every kind when its bytes are read: libraries take buffers for a kind when it is first asked for.

    Raises:
        CannotRun: when another rank stops.
    """
    tables, taken = [], {}
    for count in group_sizes(ranks.world):
        ranks.wait()  # the group of all exists before another's memory is read
        before = outside()
        group = ranks.group(count)
        for kind in KINDS:
            told(f"measuring {kind} among {count} ranks")
            samples = []
            if ranks.rank < count:
                with ranks.answered():
                    samples = [
                        time_calls(ranks, call_of(kind, ranks, count, size, group), group, seconds) for size in sizes
                    ]
            ranks.wait()
            found = [ranks.slowest(samples[i] if samples else Sample(0.0, 0.0)) for i in range(len(sizes))]
            tables.append(table_of(kind, count, dict(zip(sizes, found, strict=True)), source))
        taken[count] = max(0, outside() - before)
    return tables, taken


def table_of(kind: CollectiveKind, ranks: int, found: dict[int, Sample], source: str) -> CollectiveTable:
    """Return measured times by bytes as alpha and a curve of bus rates."""
    sizes = sorted(found)
    # Whatever took longer than a larger message was disturbed.
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
    """Return how long one of many calls back to back takes on the group's slowest rank."""
    call()
    one = ranks.slowest(sample_of([_elapsed(call, 1, ranks.device)]), group).seconds
    calls = max(1, min(MOST_CALLS, int(seconds / REPEATS / max(one, 1e-7))))
    durations = [_elapsed(call, calls, ranks.device) / calls for _ in range(REPEATS)]
    return ranks.slowest(sample_of(durations), group)


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
    """Return one call of a kind over ``size`` bytes; a size that the ranks do not divide loses the rest."""
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
    """Return a collective by its newer name where torch has it: since 2.13 the older one warns."""
    found: Callable[..., object] = getattr(dist, new, None) or getattr(dist, old)
    return found


def _exchange(message: Tensor, rank: int, count: int, group: Group) -> Callable[[], None]:
    """Return one hop of a ring: send to the next rank what the one before sends here."""
    came = torch.zeros_like(message)
    after, before = (rank + 1) % count, (rank - 1) % count

    def call() -> None:
        ways = [dist.P2POp(dist.isend, message, after, group), dist.P2POp(dist.irecv, came, before, group)]
        for work in dist.batch_isend_irecv(ways):
            work.wait()

    return call


def _done(work: object) -> None:
    """Take what a synchronous collective returns, which is nothing."""
    del work
