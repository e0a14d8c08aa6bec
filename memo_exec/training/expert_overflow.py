"""Counts dispatched rows beyond the capacity of experts that ranks divide, over all ranks of a run."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import ceil

from memo_sim.contract.errors import Infeasible
from memo_sim.contract.plan import Decisions
from memo_sim.contract.units import format_percent
from memo_sim.program.layout.expert_load import capacity_rows
from memo_sim.program.layout.rowwise_blocks import routed_at_once, routed_part

HUNDREDTHS = 100


@dataclass(frozen=True, slots=True)
class Overflow:
    """Dispatched rows of all forwards so far, and those of them that no rank had a place for."""

    dropped: int
    rows: int
    most: int
    """The most rows of ``unit`` that a rank had for one rank."""
    capacity: int
    """Rows of ``unit`` that a rank can send to one rank."""
    mean: float
    """Rows of ``unit`` that a rank sends to one rank on the average."""
    unit: str
    """What is routed at once: a layer's tokens, or a subsequence or a row block of them."""

    @classmethod
    def of(cls, counts: Sequence[Sequence[float]], decisions: Decisions) -> Overflow | None:
        """Return the sums of the ranks' counts (``Context.overflow``); None where every rank has all experts.

        Where these have several lengths, the figures are those of the length that needs the largest capacity.
        """
        of, ep, alike = decisions.model.mixture, decisions.layout.ep, decisions.layout.expert_divided
        if ep == 1 or of is None:
            return None
        dropped, every, *each = zip(*counts, strict=True)  # ranks that divide features count the same rows
        parts = routed_at_once(decisions)
        slots = [tokens * of.per_token for tokens in sorted(set(parts), reverse=True)]
        most, rows = max(
            ((int(max(found)), rows) for found, rows in zip(each, slots, strict=True)), key=lambda n: n[0] / n[1]
        )
        capacity = capacity_rows(of, rows, decisions.expert_load, ep, decisions.expert_capacity)
        unit = routed_part(decisions, rows // of.per_token)
        return cls(int(sum(dropped)) // alike, int(sum(every)) // alike, most, capacity, rows / ep, unit)

    @property
    def enough(self) -> float:
        """The capacity over the mean that would have dropped no row, rounded up to hundredths."""
        return ceil(HUNDREDTHS * self.most / self.mean) / HUNDREDTHS

    def line(self) -> str:
        """Return what a run says about it at its end."""
        have = f"of the {self.capacity:,} that have a place ({self.capacity / self.mean:.2f} times the mean)"
        most = f"a rank had at most {self.most:,} rows of {self.unit} for another, {have}"
        if not self.dropped:
            return f"expert parallelism: no row was dropped; {most}"
        share = format_percent(self.dropped / self.rows)
        return (
            f"expert parallelism: {self.dropped:,} of {self.rows:,} rows ({share}) were dropped; {most}; "
            f"--expert-capacity {self.enough:g} has a place for each"
        )

    def refusal(self, step: int, hint: str) -> Infeasible:
        """Return the error of a run that refuses steps with too many rows."""
        return Infeasible(
            "a step has more rows for a rank's experts than the plan has places for; its update was not applied",
            where=f"step {step}",
            got=f"{self.most:,} rows of {self.unit} from one rank to another, of {self.capacity:,} places",
            wanted=f"a plan with --expert-capacity {self.enough:g}",
            hint=hint,
        )
