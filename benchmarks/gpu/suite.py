"""Measures memo's plans against their predictions, over models, lengths and policies, with as many layers as fit.

Each point is planned with this machine's profile and run. Its row contains predicted and measured figures: step, copy
lanes, kinds of instruction, memory, stalls. The points of one model and length share a process, because the planner
only makes plans that fit into memory.
"""

from __future__ import annotations

import msgspec

from benchmarks.gpu.case import Case
from benchmarks.gpu.plans import model_of
from benchmarks.gpu.session import Session

POLICIES = ("token-wise", "full recompute", "full swap", "alpha 0", "keep", "alpha 0.5")
"""Policies in order of priority; if the time budget is too small, the last ones are not run."""
LONG_STEP_S = 4.0


def run(session: Session) -> None:
    """Measure every point within the time budget; record the others as not run."""
    points = [(preset, tokens) for tokens in session.scale.suite_lengths for preset in session.scale.models]
    if session.scale.quick:  # one process, because starting one takes longer than a tiny step
        session.measure([case for point in points for case in _planned(session, *point)])
        return
    for point in points:
        session.measure(_planned(session, *point))


def _planned(session: Session, preset: str, tokens: int) -> list[Case]:
    """Return the cases of one model and length for which there are plans, with as many layers as fit."""
    scale = session.scale
    wanted = scale.layers(preset, tokens)
    layers = wanted
    if session.budget.left_s > scale.start_s:
        layers = session.most_layers(preset, tokens, ("token-wise", "full recompute"), wanted) or 1
    cases = [_case(session, preset, layers, tokens, policy) for policy in POLICIES]
    if session.budget.left_s <= scale.start_s:
        return cases
    found = (session.planned(case) for case in cases)
    return [case for case in found if case is not None]


def _case(session: Session, preset: str, layers: int, tokens: int, policy: str) -> Case:
    case = session.case(
        model_of(preset, layers),
        tokens,
        rival=f"memo, {policy}",
        kind="memo",
        part="suite",
        policy=policy,
        steps=session.scale.suite_steps,
        warm_ups=1,
    )
    return msgspec.structs.replace(case, steps=2) if session.scale.step_s(case) > LONG_STEP_S else case
