"""What a search found: one outcome a candidate, their order, and the Pareto front."""

from __future__ import annotations

from dataclasses import dataclass, field

from memo_sim.contract.plan import Decisions, Prediction
from memo_sim.planning.alpha import LinearProgram
from memo_sim.planning.passes import Passes
from memo_sim.planning.presets import Policy


def ranked_s(step_s: float) -> float:
    """Return a step time by which plans are ranked: twelve digits, since sums in another order differ in the last."""
    return float(f"{step_s:.11e}")


@dataclass(frozen=True, slots=True)
class Evaluated:
    """One candidate's outcome.

    Where alpha was searched, ``above`` and ``below`` are what memory said of the next alphas where it refused them;
    ``linear_program`` is there for token-wise plans alone.
    """

    policy: Policy
    decisions: Decisions
    prediction: Prediction
    linear_program: LinearProgram | None = None
    above: Prediction | None = None
    below: Prediction | None = None

    @property
    def rank_key(self) -> tuple[bool, bool, float, int, int, str]:
        """Plans that fit first, the fastest first; then by what is short; what cannot be evaluated comes last.

        Of equals the one with less host memory, then less device memory; the last word is the plan's own text, so that
        the order never depends on the order of evaluation.
        """
        prediction = self.prediction
        step_s = prediction.step_s
        order = ranked_s(step_s) if step_s is not None else float(prediction.shortfall_bytes)
        host, device = prediction.peak_host_bytes_per_node, prediction.peak_device_bytes
        return (step_s is None, prediction.status == "invalid", order, host, device, repr(self.decisions))

    @property
    def costs(self) -> tuple[float, int, int]:
        """Step time (seconds), device memory and host memory of a node (bytes): what a Pareto front weighs."""
        prediction = self.prediction
        step_s = float("inf") if prediction.step_s is None else prediction.step_s
        return (step_s, prediction.peak_device_bytes, prediction.peak_host_bytes_per_node)


@dataclass
class SearchResult:
    """Ranked outcomes of a question; ``evaluated`` + ``pruned`` counts every candidate."""

    ranked: list[Evaluated]
    evaluated: int
    pruned: int
    refused: list[str] = field(default_factory=list)
    """Layouts that cannot be lowered, and why."""
    passes: Passes | None = None
    """What was lowered for floors, for a search of the same question with more memory."""

    @property
    def best(self) -> Evaluated | None:
        """The fastest plan that fits."""
        return next((e for e in self.ranked if e.prediction.status == "ok"), None)

    @property
    def front(self) -> list[Evaluated]:
        """The plans that no other evaluated one beats or equals in all of step time, device and host memory."""
        found: list[Evaluated] = []
        for one in self.ranked:
            if one.prediction.status == "ok" and not any(as_good(e.costs, one.costs) for e in found):
                found.append(one)
        return found


def as_good(costs: tuple[float, int, int], other: tuple[float, int, int]) -> bool:
    """Return whether nothing of ``costs`` is more than the other's."""
    return all(mine <= theirs for mine, theirs in zip(costs, other, strict=True))
