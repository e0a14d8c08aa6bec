"""What a step really asked of the allocator, beside what its program says: ``memo-exec profile --requests``.

Instants are events: each allocation and each release is one. ``fake_player`` records without a GPU, ``memory_history``
on one.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field

from memo_exec.memory.binding import Schedule
from memo_sim.contract.requests import ARENA_ALIGNMENT_BYTES, Requests
from memo_sim.contract.units import format_bytes
from memo_sim.program.analysis.liveness import live_bytes, peak

LARGE_BYTES = 64 * 2**20
"""An undeclared tensor above this is listed."""

NOT_OBSERVED = "not observed"
"""Class of kernel scratch that was declared and not seen."""


@dataclass(frozen=True)
class Unexplained:
    """A tensor that nothing in the program declares; ``excess_bytes``: its part beyond what is declared."""

    instruction: str
    operator: str
    bytes: int
    excess_bytes: int


@dataclass(frozen=True)
class Observed:
    """What was recorded; ``source`` says how."""

    source: str
    requests: Requests
    program_peak_bytes: int
    observed_peak_bytes: int
    """Of everything that was seen."""
    with_scratch_peak_bytes: int
    """With the declared kernel scratch that was not seen."""
    unexplained: tuple[Unexplained, ...]
    workspaces: dict[str, tuple[int, int]] = field(default_factory=dict)
    """By operator with a library's workspace: the most bytes that are declared, and that were seen."""

    @property
    def ratio(self) -> float:
        """Observed peak by the program's."""
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
                "(kernel scratch is not observed without a GPU: the program's sizes)"
            )
        found += [
            f"{op:<15} {format_bytes(declared)} of workspace declared, {format_bytes(seen)} of results seen"
            for op, (declared, seen) in self.workspaces.items()
        ]
        found.append(f"unexplained     {len(self.unexplained) or 'no'} tensors over {format_bytes(LARGE_BYTES)}")
        for each in self.unexplained:
            excess = f"{format_bytes(each.excess_bytes)} beyond what is declared"
            found.append(f"  {each.instruction}: {each.operator} {format_bytes(each.bytes)}, {excess}")
        return found


@dataclass
class RequestLog:
    """Requests as they come, one instant an event."""

    instant: int = 0
    ids: list[str] = field(default_factory=list)
    lower: list[int] = field(default_factory=list)
    upper: list[int] = field(default_factory=list)
    sizes: list[int] = field(default_factory=list)
    classes: list[str] = field(default_factory=list)

    def open(self, name: str, size: int, kind: str) -> int:
        """Note an allocation; return its row."""
        self.ids.append(name)
        self.lower.append(self.instant)
        self.upper.append(-1)
        self.sizes.append(size)
        self.classes.append(kind)
        self.instant += 1
        return len(self.ids) - 1

    def close(self, row: int) -> None:
        """Note a release."""
        self.upper[row] = self.instant
        self.instant += 1

    def requests(self, name: str) -> Requests:
        """Return what was noted; what is still there lasts to the end."""
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
    """Return what was recorded beside the program's peak."""
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
