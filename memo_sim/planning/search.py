"""Evaluates the candidates of a question in the engine and ranks them.

Order of work: every candidate is checked against memory first (cheap, inside ``simulate``). A token-wise candidate is
played at alpha 0, which gives the paper's linear program its layer time and a bound: no alpha can beat the compute
lane without recompute. Candidates whose bound is worse than the best plan found are pruned; the others have their
alpha searched. A partial swap has the same bound, and is pruned too where everything can be kept: that copies less.
So is full recompute with swapped inputs where they can be kept: it computes the same.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace

import msgspec

from memo_sim.contract.errors import Infeasible
from memo_sim.contract.plan import Decisions, Prediction
from memo_sim.costs.pricing import NodeRates, Pricer
from memo_sim.engine.simulate import Simulation, simulate
from memo_sim.planning.alpha import AlphaSearch, LinearProgram, best_alpha, best_partial_swap, linear_program
from memo_sim.planning.presets import INPUTS_SWAPPED, INPUTS_SWAPPED_MLP_IN_BLOCKS, PARTIAL_SWAP, Policy
from memo_sim.planning.question import Question
from memo_sim.planning.space import Candidate, candidates
from memo_sim.program.instruction import Lane
from memo_sim.program.work import Copy


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
    def rank_key(self) -> tuple[bool, bool, float, int]:
        """Plans that fit first, the fastest first; then by what is short; what cannot be evaluated comes last."""
        prediction = self.prediction
        step_s, peak = prediction.step_s, prediction.peak_device_bytes
        return (step_s is None, prediction.status == "invalid", step_s or float(prediction.shortfall_bytes), peak)


@dataclass
class SearchResult:
    """Ranked outcomes of a question; ``evaluated`` + ``pruned`` counts every candidate."""

    ranked: list[Evaluated]
    evaluated: int
    pruned: int
    refused: list[str] = field(default_factory=list)
    """Layouts that cannot be lowered, and why."""

    @property
    def best(self) -> Evaluated | None:
        """The fastest plan that fits."""
        return next((e for e in self.ranked if e.prediction.status == "ok"), None)


def search(question: Question, *, progress: Callable[[int, int], None] | None = None) -> SearchResult:
    """Return every candidate of ``question`` evaluated or pruned; ``progress`` is told (done, all).

    Raises:
        Infeasible: when no layout divides the model and the sequence.
        UsageError: when pinned knobs contradict each other or the cluster.
    """
    found, refused = candidates(question)
    order = sorted(found, key=lambda c: c.policy.alpha is None)
    result = SearchResult(ranked=[], evaluated=0, pruned=0, refused=refused)
    fastest = float("inf")
    known: dict[Decisions, Prediction] = {}
    for i, candidate in enumerate(order):
        try:
            outcome = _evaluate(question, candidate, fastest, known)
        except Infeasible as error:  # a layout whose work the profile has not measured, say: the others may do
            reason = f"{error.what}: {error.got}"
            outcome = Evaluated(candidate.policy, candidate.base, Prediction(status="invalid", reason=reason))
        if outcome is None:
            result.pruned += 1
        else:
            result.evaluated += 1
            result.ranked.append(outcome)
            if outcome.prediction.step_s is not None:
                fastest = min(fastest, outcome.prediction.step_s)
        if progress:
            progress(i + 1, len(order))
    result.ranked.sort(key=lambda e: e.rank_key)
    return result


def play(question: Question, decisions: Decisions) -> Simulation:
    """Return one plan played on the question's cluster."""
    return simulate(decisions, question.hardware, question.cluster)


def offload_bandwidth(question: Question, decisions: Decisions, size_bytes: int) -> float:
    """Return the rate (bytes/s) one device offloads at while every device of its node does and compute runs beside."""
    alone = size_bytes / Pricer(question.hardware, question.cluster, decisions.layout).seconds(Copy(size_bytes, "d2h"))
    busy = 1 << Lane.COMPUTE | 1 << Lane.D2H
    return alone * NodeRates(question.hardware, question.cluster).rates(busy)[Lane.D2H]


def _evaluate(
    question: Question, candidate: Candidate, fastest: float, known: dict[Decisions, Prediction]
) -> Evaluated | None:
    """Return the outcome of one candidate, or None when it cannot beat ``fastest``; ``known`` is added to."""
    policy, base = candidate.policy, candidate.base

    def predict(decisions: Decisions) -> Prediction:
        if decisions not in known:
            known[decisions] = play(question, decisions).prediction
        return known[decisions]

    kept = known.get(msgspec.structs.replace(base, swapped_tokens=0))
    if (
        policy in (PARTIAL_SWAP, INPUTS_SWAPPED, INPUTS_SWAPPED_MLP_IN_BLOCKS)
        and kept is not None
        and kept.status == "ok"
    ):
        return None
    if policy.alpha is not None:
        return Evaluated(policy, base, predict(base))
    simulation = play(question, base)
    fits = simulation.prediction.status == "ok"
    known[base] = simulation.prediction
    if policy != PARTIAL_SWAP and not fits:
        return Evaluated(policy, base, simulation.prediction)
    if simulation.compute_s_without_recompute >= fastest or (policy == PARTIAL_SWAP and fits):
        return None
    if policy == PARTIAL_SWAP:
        partial = best_partial_swap(base, predict)
        return _searched(policy, partial, None) if partial else None
    program = _linear_program(question, base, simulation)
    best = best_alpha(base, predict, start=program.alpha)
    # Swapping every token recomputes none: that is the full swap, which was evaluated before.
    same = best.decisions.alpha == 1 and msgspec.structs.replace(best.decisions, recompute="none") in known
    return None if same else _searched(policy, best, program)


def _searched(policy: Policy, found: AlphaSearch, program: LinearProgram | None) -> Evaluated:
    return Evaluated(policy, found.decisions, found.prediction, program, found.above, found.below)


def _linear_program(question: Question, base: Decisions, simulation: Simulation) -> LinearProgram:
    host = question.cluster.host_memory_bytes or question.hardware.host_memory_bytes
    local = min(question.cluster.devices_per_node, base.layout.devices)
    program = linear_program(
        base,
        layer_forward_s=simulation.layer_forward_s,
        bandwidth_bytes_per_s=1.0,
        host_bytes=host.value / local,
    )
    size = program.input_bytes + program.attention_bytes + program.others_bytes
    return replace(program, bandwidth_bytes_per_s=offload_bandwidth(question, base, size))
