"""The result of a search: one outcome per candidate, their ranking, and the Pareto front."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from memo_sim.contract.plan import Decisions, Prediction
from memo_sim.engine.simulate import Simulation
from memo_sim.planning.alpha_linear_program import LinearProgram
from memo_sim.planning.few_layers import Passes
from memo_sim.planning.presets import Policy

Key = tuple[bool, bool, float]
"""What outcomes are ranked by first (``Evaluated.rank_key``)."""


def ranked_s(step_s: float) -> float:
    """Return a step time rounded to twelve digits for ranking; sums in another order differ in the last digits."""
    return float(f"{step_s:.11e}")


@dataclass(frozen=True, slots=True)
class Evaluated:
    """One candidate's outcome.

    ``above`` and ``below`` are the predictions at the next alphas that do not fit, when alpha was searched.
    ``linear_program`` is set only for token-wise plans.
    """

    policy: Policy
    decisions: Decisions
    prediction: Prediction
    linear_program: LinearProgram | None = None
    above: Prediction | None = None
    below: Prediction | None = None
    unlimited: Prediction | None = None
    """The same plan without the limit of PyTorch's allocator that the search found for it."""

    @property
    def rank_key(self) -> tuple[bool, bool, float, int, int, str]:
        """Sort key. Plans that fit come first, the fastest first; then plans by missing bytes; invalid plans come last.

        Missing are the bytes that a device lacks and those that a node's host lacks, added up.
        Among equals, the plan with less host memory, then less device memory comes first. The last criterion is the
        plan's text, so the order never depends on the order of evaluation.
        """
        prediction = self.prediction
        step_s = prediction.step_s
        order = ranked_s(step_s) if step_s is not None else float(prediction.missing_bytes)
        host, device = prediction.peak_host_bytes_per_node, prediction.peak_device_bytes
        return (step_s is None, prediction.status == "invalid", order, host, device, repr(self.decisions))

    @property
    def costs(self) -> tuple[float, int, int]:
        """Step time (seconds), device memory, and a node's host memory (bytes): the axes of the Pareto front."""
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
    """Layouts that cannot be lowered, and the reasons."""
    passes: Passes | None = None
    """Passes lowered for lower bounds; a search of the same question with more memory reuses them."""
    played: Mapping[Decisions, Prediction] = field(default_factory=dict)
    """Every plan that the search played on the way, those of other alphas included, with its prediction."""
    fastest: Simulation | None = None
    """The simulation of the fastest plan that was played, if it was kept."""

    def __getstate__(self) -> dict[str, object]:
        """Leave out large fields, which are computed again where they are missing."""
        return {**self.__dict__, "passes": None, "played": {}, "fastest": None}

    @property
    def best(self) -> Evaluated | None:
        """The fastest plan that fits."""
        return next((e for e in self.ranked if e.prediction.status == "ok"), None)

    @property
    def front(self) -> list[Evaluated]:
        """The plans that no other evaluated plan beats or equals in step time, device memory and host memory."""
        found: list[Evaluated] = []
        for one in self.ranked:
            if one.prediction.status == "ok" and not any(as_good(e.costs, one.costs) for e in found):
                found.append(one)
        return found


def as_good(costs: tuple[float, int, int], other: tuple[float, int, int]) -> bool:
    """Return whether no entry of ``costs`` is larger than the other's."""
    return all(mine <= theirs for mine, theirs in zip(costs, other, strict=True))
