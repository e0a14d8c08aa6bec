"""Evaluates candidates: plays their plans, and searches alpha where a policy leaves it open.

Some candidates are left out because a simpler plan is at least as good (``rivals.py``):

- a partial swap, when everything can be kept: keeping copies less;
- full recompute with swapped inputs, when the inputs can be kept: it computes the same; row-wise recompute likewise;
- a wide offload window, when everything can be kept, or when, in the narrow window, a full swap is as fast as swapping
  only what hides.

A search for the Pareto front leaves none of these out; the first two need less device memory.
"""

from __future__ import annotations

from dataclasses import replace

from memo_sim.contract.errors import Infeasible
from memo_sim.contract.plan import Decisions, Prediction
from memo_sim.engine.simulate import Simulation
from memo_sim.planning.aims import Aims
from memo_sim.planning.alpha_linear_program import LinearProgram, linear_program
from memo_sim.planning.alpha_search import Grid, best_alpha, best_partial_swap, most_that_host_holds
from memo_sim.planning.bandwidth import offload_bandwidth
from memo_sim.planning.lower_bounds import LowerBounds
from memo_sim.planning.outcome import Evaluated, ranked_s
from memo_sim.planning.plays import Plays
from memo_sim.planning.presets import (
    FULL_SWAP,
    INPUTS_SWAPPED,
    INPUTS_SWAPPED_MLP_IN_BLOCKS,
    PARTIAL_SWAP,
    ROWWISE_PARTLY_SWAPPED,
    ROWWISE_SWAPPED,
)
from memo_sim.planning.question import Question
from memo_sim.planning.rivals import Rivals
from memo_sim.planning.space import Candidate, policies
from memo_sim.planning.subsequences import swap_each

STAND_BACK = (PARTIAL_SWAP, INPUTS_SWAPPED, INPUTS_SWAPPED_MLP_IN_BLOCKS, ROWWISE_SWAPPED, ROWWISE_PARTLY_SWAPPED)
"""Policies that are not worth their copies when the same tensors can be kept on the device."""


class Evaluation:
    """How one question's candidates are evaluated."""

    def __init__(self, question: Question, bounds: LowerBounds, plays: Plays, aims: Aims) -> None:
        self._question = question
        self._bounds = bounds
        self._plays = plays
        self._aims = aims

    def outcome(self, candidate: Candidate, rivals: Rivals) -> Evaluated | None:
        """Return the outcome of one candidate, or None when another candidate gives the same plan or one as good."""
        try:
            return self._outcome(candidate, rivals)
        except Infeasible as error:  # for example, the profile has not measured its work; other candidates may work
            reason = f"{error.what}: {error.got}"
            return Evaluated(candidate.policy, candidate.base, Prediction(status="invalid", reason=reason))

    def shared_plans(self, candidate: Candidate, rivals: Rivals) -> set[Decisions]:
        """Return plans that the candidate's evaluation may play, and that of another candidate as well."""
        policy, base = candidate.policy, candidate.base
        found = {base} if policy.alpha is not None else set()
        if self._aims.front:
            return found
        if policy in STAND_BACK or candidate.narrow is not None:
            found.add(swap_each(base, 0))
        if candidate.narrow is not None:
            found |= {candidate.narrow, rivals.hiding or base}
        return found

    def enough(self, prediction: Prediction) -> bool:
        """Return whether the search ends with this plan."""
        enough_s = self._aims.enough_s
        return enough_s is not None and prediction.step_s is not None and prediction.step_s <= enough_s

    def wider_gains_nothing(self, narrow: Decisions, rivals: Rivals) -> bool:
        """Return whether a wider window gains nothing: no copies are needed, or none are late in the narrow window."""
        predict = self._plays.predict
        if rivals.kept is not None and self._fits(rivals.kept):
            return True
        if rivals.hiding is None or self._lacks_memory(narrow) or self._lacks_memory(rivals.hiding):
            return False
        narrow_s, hides_s = predict(narrow).step_s, predict(rivals.hiding).step_s
        return narrow_s is not None and hides_s is not None and ranked_s(narrow_s) <= ranked_s(hides_s)

    def _fits(self, decisions: Decisions) -> bool:
        """Return whether a plan fits; it is not played where lower bounds of its memory tell."""
        return not self._lacks_memory(decisions) and self._plays.predict(decisions).status == "ok"

    def _lacks_memory(self, decisions: Decisions) -> bool:
        """Return whether lower bounds show that a plan needs more memory than there is, so that it has no step time."""
        if not self._aims.prune:
            return False
        return self._bounds.shortfall_bytes(self._bounds.memory(decisions)) > 0

    def with_refusals(self, one: Evaluated) -> Evaluated:
        """Return the plan with the predictions at the next alphas that do not fit, when alpha was searched."""
        if one.policy.alpha is not None or one.prediction.status != "ok":
            return one
        grid = Grid.of(one.decisions)
        step = grid.step_of(one.decisions)
        above, below = (grid.refusal(s, self._plays.refused) for s in (step + 1, step - 1))
        return replace(one, above=above, below=below)

    def _outcome(self, candidate: Candidate, rivals: Rivals) -> Evaluated | None:
        policy, base = candidate.policy, candidate.base
        predict, refused = self._plays.predict, self._plays.refused
        if not self._aims.front:
            stands_back = policy in STAND_BACK and (policy.alpha is None or rivals.kept is not None)
            if stands_back and self._fits(swap_each(base, 0)):
                return None
            if candidate.narrow is not None and self.wider_gains_nothing(candidate.narrow, rivals):
                return None
        if policy.alpha is not None:
            return Evaluated(policy, base, predict(base))
        bounds = self._bounds if self._aims.prune else None
        if policy.swaps_some:
            partial = best_partial_swap(base, predict, refused=refused, bounds=bounds)
            return Evaluated(policy, partial.decisions, partial.prediction) if partial else None
        grid = Grid.of(base)
        most = most_that_host_holds(grid, self._bounds, 0, grid.steps)
        for decisions in self._plans_to_start_with(base, grid.at(most)):
            simulation = self._plays.play(decisions)
            if simulation.prediction.status == "ok":
                break
        if simulation.prediction.status != "ok" or self.enough(simulation.prediction):
            return Evaluated(policy, decisions, simulation.prediction)
        states_bytes = self._bounds.host_states_bytes(base)
        program = _linear_program(self._question, base, simulation, states_bytes=states_bytes)
        del simulation  # hundreds of MB beside the next plan's
        most_alpha = most / grid.steps
        best = best_alpha(base, predict, start=program.alpha, most=most_alpha, refused=refused, bounds=bounds)
        # Swapping every token recomputes nothing. That is the full swap, which is a candidate of its own.
        full_swap = best.decisions.alpha == 1 and FULL_SWAP in policies(self._question)
        return None if full_swap else Evaluated(policy, best.decisions, best.prediction, program)

    def _plans_to_start_with(self, base: Decisions, most: Decisions) -> tuple[Decisions, ...]:
        """Return the plans to play first: the one that swaps the most, and one to play if it does not fit.

        The first is left out when its copies certainly make it slower.
        """
        if most == base or self._bounds.of(most).step_s > self._bounds.of(base).step_s:
            return (base,)
        return (most, base)


def _linear_program(question: Question, base: Decisions, simulation: Simulation, *, states_bytes: int) -> LinearProgram:
    """Return the paper's problem for a plan; ``states_bytes`` of a rank's host memory hold optimizer states."""
    host = question.cluster.host_memory_bytes or question.hardware.host_memory_bytes
    local = min(question.cluster.devices_per_node, base.layout.devices)
    program = linear_program(
        base,
        layer_forward_s=simulation.layer_forward_s,
        bandwidth_bytes_per_s=1.0,
        host_bytes=max(0.0, host.value / local - states_bytes),
    )
    size = program.input_bytes + program.attention_bytes + program.others_bytes
    return replace(program, bandwidth_bytes_per_s=offload_bandwidth(question, base, size))
