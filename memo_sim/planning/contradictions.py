"""Refuses pins that contradict each other or the system, and pins without effect, before anything is searched.

These are wrong options (``UsageError``). Pins that only some layouts do not go with are refused layout by layout in
``space.py`` (``Infeasible``). Both read the rules of ``program/layout/compatibility.py``.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from math import ceil
from typing import Any

import msgspec

from memo_sim.contract.errors import UsageError
from memo_sim.contract.knobs import DEGREES, KNOBS, PINNED, Knob
from memo_sim.contract.plan import Decisions, Layout
from memo_sim.planning.question import Question
from memo_sim.program.layout.compatibility import (
    GRAPHS_OF_EAGER,
    PLANNED_LIBRARIES,
    SELECTIVE_SWAPS_NOTHING,
    VIRTUAL_STAGES_INTERLEAVE,
    Rule,
)

OF_OPTIONS = (VIRTUAL_STAGES_INTERLEAVE, SELECTIVE_SWAPS_NOTHING, PLANNED_LIBRARIES, GRAPHS_OF_EAGER)
"""Rules that options break whatever the layout is."""
_UNLESS_PINNED = {f.name: f.default for f in (*msgspec.structs.fields(Layout), *msgspec.structs.fields(Decisions))}


def check_pins(question: Question) -> None:
    """Refuse pins that no plan of the question can have.

    Raises:
        UsageError: naming the option, and what to do about it.
    """
    _check_degrees(question)
    for knob in PINNED:
        if knob.needs:
            _check_need(question, knob, KNOBS[knob.needs])
    check_rules(OF_OPTIONS, _pinned(question))


def repinned(question: Question, **changes: Any) -> Question:
    """Return the question with other pins, and without those that have no effect beside them."""
    other = replace(question, pins=replace(question.pins, **changes))
    without_effect: dict[str, Any] = {
        knob.name: knob.default for knob in PINNED if knob.needs and not _above_one(other, KNOBS[knob.needs])
    }
    return replace(other, pins=replace(other.pins, **without_effect))


def check_rules(rules: Sequence[Rule], decisions: Decisions) -> None:
    """Refuse options that make up ``decisions``.

    Raises:
        UsageError: with the message of the first rule that they break.
    """
    for rule in rules:
        if rule.breaks(decisions):
            error = rule.refusal(decisions)
            raise UsageError(error.what, got=error.got, wanted=error.wanted, hint=error.hint)


def _check_degrees(question: Question) -> None:
    """Refuse a pinned degree that the system does not have; every system has pipeline stages where they are pinned."""
    system = question.preset
    for name in DEGREES:
        degree = getattr(question.pins, name)
        if name != "pp" and degree is not None and degree > 1 and name not in (*system.degrees, *system.pinnable):
            raise UsageError(
                f"{system.name} does not divide work that way",
                got=f"{name} {degree}",
                wanted=" and ".join(system.degrees),
                hint="leave it out, or --system any",
            )


def _check_need(question: Question, knob: Knob, need: Knob) -> None:
    """Refuse a pinned knob whose ``need`` is 1 in every layout: it would have no effect."""
    value, other = getattr(question.pins, knob.name), getattr(question.pins, need.name)
    if value not in (knob.default, _UNLESS_PINNED[knob.name]) and not _above_one(question, need):
        raise UsageError(
            f"{knob.option} has no effect without {need.option}",
            got=f"{knob.name} {str(value).lower()}, {need.name} {other or 'not given'}",
            wanted=f"{need.option} 2 or more",
            hint=f"{need.option} 2, or leave {knob.option} out",
        )


def _above_one(question: Question, knob: Knob) -> bool:
    """Return whether a knob is above 1 in some layout of the question."""
    pinned = getattr(question.pins, knob.name)
    return knob.name in question.preset.searched if pinned is None else pinned == "auto" or pinned > 1


def _pinned(question: Question) -> Decisions:
    """Return the pins that ``OF_OPTIONS`` are about as a plan of two stages, which go with every schedule."""
    pins = question.pins
    layout = Layout(pp=2, schedule=pins.schedule or "1f1b", virtual_stages=pins.virtual_stages or 1)
    base = question.decisions(layout)
    granules = ceil((pins.alpha or 0.0) * base.local_tokens / base.swap_granule)
    swapped = min(granules * base.swap_granule, base.local_tokens)
    return msgspec.structs.replace(base, recompute=pins.recompute or "none", swapped_tokens=swapped)
