"""Compares the recorded memory requests of a step with those of its program, for ``memo-exec profile --requests``.

Times are counted in events: each allocation and each release is one event. ``fake_player`` records without a GPU,
``memory_history`` on one.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field

from memo_exec.memory.binding import Schedule
from memo_sim.contract.requests import ARENA_ALIGNMENT_BYTES, Requests
from memo_sim.contract.units import format_bytes
from memo_sim.program.analysis.liveness import live_bytes, peak

LARGE_BYTES = 64 * 2**20
"""Undeclared tensors of more bytes than this are listed."""

NOT_OBSERVED = "not observed"
"""Class of kernel scratch that the program declares and the recorder did not see."""


@dataclass(frozen=True)
class Unexplained:
    """A tensor that the program does not declare; ``excess_bytes`` is the part of it beyond declared workspaces."""

    instruction: str
    operator: str
    bytes: int
    excess_bytes: int


@dataclass(frozen=True)
class Observed:
    """The recorded requests of a step, and the peaks of recorded and declared memory."""

    source: str
    """How the requests were recorded, in words."""
    requests: Requests
    program_peak_bytes: int
    observed_peak_bytes: int
    """Peak of all recorded requests."""
    with_scratch_peak_bytes: int
    """The same peak plus the declared kernel scratch that was not observed."""
    unexplained: tuple[Unexplained, ...]
    workspaces: dict[str, tuple[int, int]] = field(default_factory=dict)
    """For each operator with a library's workspace: the most bytes that were declared and the most that were seen."""

    @property
    def ratio(self) -> float:
        """Observed peak divided by the program's peak."""
        return self.observed_peak_bytes / self.program_peak_bytes

    def lines(self) -> list[str]:
        """Return the comparison as text."""
        found = [
            f"recorded with   {self.source}",
            f"program peak    {format_bytes(self.program_peak_bytes)}",
            f"observed peak   {format_bytes(self.observed_peak_bytes)}, {self.ratio:.4f} of the program's",
        ]
        if NOT_OBSERVED in self.requests.classes:
            found.append(
                f"with scratch    {format_bytes(self.with_scratch_peak_bytes)}, "
                f"{self.with_scratch_peak_bytes / self.program_peak_bytes:.4f} "
                "(without a GPU kernel scratch is not observed, so this adds the sizes that the program declares)"
            )
        found += [
            f"{op:<15} {format_bytes(declared)} of workspace declared, {format_bytes(seen)} of results observed"
            for op, (declared, seen) in self.workspaces.items()
        ]
        found.append(f"unexplained     {len(self.unexplained) or 'no'} tensors over {format_bytes(LARGE_BYTES)}")
        for each in self.unexplained:
            excess = f"{format_bytes(each.excess_bytes)} more than declared"
            found.append(f"  {each.instruction}: {each.operator} {format_bytes(each.bytes)}, {excess}")
        return found


@dataclass
class RequestLog:
    """A log of requests in the order of their events."""

    instant: int = 0
    ids: list[str] = field(default_factory=list)
    lower: list[int] = field(default_factory=list)
    upper: list[int] = field(default_factory=list)
    sizes: list[int] = field(default_factory=list)
    classes: list[str] = field(default_factory=list)

    def open(self, name: str, size: int, kind: str) -> int:
        """Record an allocation and return its row."""
        self.ids.append(name)
        self.lower.append(self.instant)
        self.upper.append(-1)
        self.sizes.append(size)
        self.classes.append(kind)
        self.instant += 1
        return len(self.ids) - 1

    def close(self, row: int) -> None:
        """Record the release of the allocation in ``row``."""
        self.upper[row] = self.instant
        self.instant += 1

    def requests(self, name: str) -> Requests:
        """Return the recorded requests; an allocation without a release lasts to the end."""
        return Requests(
            name=name,
            ids=self.ids,
            lower=self.lower,
            upper=[self.instant if upper < 0 else upper for upper in self.upper],
            size_bytes=self.sizes,
            classes=self.classes,
            alignment_bytes=ARENA_ALIGNMENT_BYTES,
        )


def compared(
    source: str,
    log: RequestLog,
    plan: Schedule,
    unexplained: list[Unexplained],
    workspaces: dict[str, tuple[int, int]] | None = None,
) -> Observed:
    """Return the recorded requests with their peaks and the program's peak."""
    requests = log.requests("observed")
    seen = [kind != NOT_OBSERVED for kind in requests.classes]
    return Observed(
        source=source,
        requests=requests,
        program_peak_bytes=peak(live_bytes(plan.lives, device=True)).bytes,
        observed_peak_bytes=_peak(requests, seen),
        with_scratch_peak_bytes=_peak(requests, [True] * len(seen)),
        unexplained=tuple(unexplained),
        workspaces=workspaces or {},
    )


def _peak(requests: Requests, counted: list[bool]) -> int:
    changes: Counter[int] = Counter()
    rows = zip(requests.lower, requests.upper, requests.size_bytes, counted, strict=True)
    for lower, upper, size, counts in rows:
        if counts:
            changes[lower] += size
            changes[upper] -= size
    live = most = 0
    for instant in sorted(changes):
        live += changes[instant]
        most = max(most, live)
    return most
