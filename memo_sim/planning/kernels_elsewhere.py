"""Chooses the kernels of a given plan on a machine whose profile may lack those that it was made with.

Everything else of the plan stays. A sentence names each change, so that nothing is replaced in silence.

    plan of an H100, played on an H200     triton -> torch: the H200's profile has no rates of Triton's kernels
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import msgspec

from memo_sim.contract.errors import Infeasible
from memo_sim.contract.knobs import RowwiseKernel
from memo_sim.contract.plan import Decisions
from memo_sim.planning.attention_kernels import attention_kernel, head_groups
from memo_sim.planning.fp8 import check_fp8, fp8_layouts
from memo_sim.planning.loss_choice import FASTER, has_loss
from memo_sim.planning.question import CHOOSES_ADAMW, Question
from memo_sim.planning.rowwise_kernels import RowwiseChoice
from memo_sim.program.layout.compatibility import check_compatible
from memo_sim.program.layout.shape import shape_of


def kernels_elsewhere(question: Question, decisions: Decisions) -> tuple[Decisions, tuple[str, ...]]:
    """Return a plan with the kernels to play on the question's machine, and what differs from the plan as it was made.

    An attention kernel or row-wise kernels that the question pins take the place of the plan's. Without such a pin,
    kernels whose rates the profile lacks become those that a search would choose there.

    Raises:
        Infeasible: when a pinned kernel or the plan's products in FP8 have no rates, or the profile has no attention
            kernel of the plan's dtype.
    """
    changed = list[str]()
    check_fp8(question.hardware, decisions.fp8)
    if decisions.fp8 != "none" and decisions.fp8_layouts != fp8_layouts(question.hardware):
        decisions = msgspec.structs.replace(decisions, fp8_layouts=fp8_layouts(question.hardware))
        changed.append(f"copies of FP8 operands as {question.hardware.name} needs them, not as in the plan")
    attention = _attention(question, decisions)
    if attention != decisions.kernels.attention:
        changed.append(_said("attention kernel", attention, decisions.kernels.attention, question, "attention"))
        decisions = _with_attention(decisions, attention)
    rowwise = _rowwise(question, decisions)
    if rowwise != decisions.kernels.rowwise:
        changed.append(_said("other kernels", rowwise, decisions.kernels.rowwise, question, "rowwise"))
        adamw = decisions.kernels.adamw if rowwise in CHOOSES_ADAMW else "foreach"
        kernels = msgspec.structs.replace(decisions.kernels, rowwise=rowwise, adamw=adamw)
        decisions = msgspec.structs.replace(decisions, kernels=kernels)
    if decisions.loss == FASTER and not has_loss(question.hardware, decisions):
        changed.append(f"loss linear, as the profile {question.hardware.name} has no rates of the plan's {FASTER}")
        decisions = msgspec.structs.replace(decisions, loss="linear")
    if changed:
        check_compatible(decisions)
    return decisions, tuple(changed)


def _said(what: str, now: str, before: str, question: Question, knob: str) -> str:
    if getattr(question.pins, knob) not in (None, before):
        return f"{what} {now} as asked, {before} in the plan"
    return f"{what} {now}, as the profile {question.hardware.name} has no rates of the plan's {before}"


def _attention(question: Question, decisions: Decisions) -> str:
    own: Any = decisions.kernels.attention
    pinned = question.pins.attention
    if pinned not in (None, own):
        return attention_kernel(question)
    try:
        found = attention_kernel(replace(question, pins=replace(question.pins, attention=own, dtype=decisions.dtype)))
    except Infeasible:
        found = ""
    if found == own:
        return found
    return attention_kernel(replace(question, pins=replace(question.pins, attention=None, dtype=decisions.dtype)))


def _with_attention(decisions: Decisions, kernel: str) -> Decisions:
    groups = head_groups(shape_of(decisions), decisions, kernel)
    kernels = msgspec.structs.replace(decisions.kernels, attention=kernel, head_groups=groups)
    return msgspec.structs.replace(decisions, kernels=kernels)


def _rowwise(question: Question, decisions: Decisions) -> RowwiseKernel:
    own, pinned = decisions.kernels.rowwise, question.pins.rowwise
    if pinned is not None:
        return pinned
    choice = RowwiseChoice(question.hardware)
    return own if choice.has_rates(decisions) else choice.fastest(decisions)
