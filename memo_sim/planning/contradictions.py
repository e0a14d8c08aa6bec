"""Refuses pins that contradict each other or the system, and pins without effect, before anything is searched.

These are wrong options (``UsageError``). Pins that only some layouts do not go with are refused layout by layout in
``space.py`` (``Infeasible``). Both read the rules of ``program/layout/rules``.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import replace
from math import ceil
from typing import Any

import msgspec

from memo_sim.contract.attention_kernels import ATTENTION_KERNELS
from memo_sim.contract.errors import UsageError
from memo_sim.contract.knobs import DEGREES, KNOBS, PINNED, Knob
from memo_sim.contract.plan import Decisions, Layout
from memo_sim.contract.systems import DEFAULT_SYSTEM
from memo_sim.planning.question import CHOOSES_ADAMW, Question
from memo_sim.program.layout.recomputed_layers import ALL
from memo_sim.program.layout.rules.documents import CUTS_OF_DOCUMENTS
from memo_sim.program.layout.rules.fp8 import FP8_EXPERTS_OF_EXPERTS, FP8_EXPERTS_OF_FP8, FP8_PARAMS_OF_FP8
from memo_sim.program.layout.rules.memory_policy import (
    AUTOCAST_OF_FP32_STATES,
    FSDP_OF_A_FRAMEWORK,
    GRAPHS_OF_EAGER,
    LIMITED_ALLOCATOR,
    PLANNED_LIBRARIES,
    REDUCED_BY_FSDP,
    STREAMS_OF_A_FRAMEWORK,
    SUMS_OF_A_FRAMEWORK,
)
from memo_sim.program.layout.rules.modules import MODULES_OF_A_FRAMEWORK
from memo_sim.program.layout.rules.pipeline_stages import VIRTUAL_STAGES_INTERLEAVE
from memo_sim.program.layout.rules.recompute import SELECTIVE_SWAPS_NOTHING, SOME_LAYERS
from memo_sim.program.layout.rules.rule import Rule

OF_OPTIONS = (
    VIRTUAL_STAGES_INTERLEAVE,
    SELECTIVE_SWAPS_NOTHING,
    *SOME_LAYERS,
    PLANNED_LIBRARIES,
    LIMITED_ALLOCATOR,
    GRAPHS_OF_EAGER,
    STREAMS_OF_A_FRAMEWORK,
    FSDP_OF_A_FRAMEWORK,
    REDUCED_BY_FSDP,
    MODULES_OF_A_FRAMEWORK,
    SUMS_OF_A_FRAMEWORK,
    AUTOCAST_OF_FP32_STATES,
    CUTS_OF_DOCUMENTS,
    FP8_PARAMS_OF_FP8,
    FP8_EXPERTS_OF_FP8,
    FP8_EXPERTS_OF_EXPERTS,
)
"""Rules that options break whatever the layout is."""
_UNLESS_PINNED = {f.name: f.default for f in (*msgspec.structs.fields(Layout), *msgspec.structs.fields(Decisions))}


def check_pins(question: Question) -> None:
    """Refuse pins that no plan of the question can have.

    Raises:
        UsageError: naming the option, and what to do about it.
    """
    _check_degrees(question)
    _check_year(question)
    for knob in PINNED:
        if knob.needs:
            _check_need(question, knob, KNOBS[knob.needs])
    _check_inputs(question)
    _check_early_stop(question)
    _check_adamw(question)
    _check_capacity(question)
    check_rules(OF_OPTIONS, _pinned(question))


def repinned(question: Question, **changes: Any) -> Question:
    """Return the question with other pins, and without those that have no effect beside them."""
    other = replace(question, pins=replace(question.pins, **changes))
    without_effect: dict[str, Any] = {
        knob.name: knob.default for knob in PINNED if knob.needs and not _above_default(other, KNOBS[knob.needs])
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


def _check_capacity(question: Question) -> None:
    """Refuse a capacity of experts, or what happens beyond it, where no plan divides experts."""
    given = [
        n for n in ("expert_capacity", "expert_overflow", "expert_overlap") if getattr(question, n) != KNOBS[n].default
    ]
    shared = question.pins.ep is None and question.preset.searches_ep
    if given and not shared and question.pins.ep in (None, 1):
        raise UsageError(
            f"{KNOBS[given[0]].option} has no effect without expert parallelism",
            got=f"{KNOBS[given[0]].option} {getattr(question, given[0])} with ep {question.pins.ep or 1}",
            wanted="--ep 2 or more",
            hint="add --ep, or leave it out: a rank with all experts has a place for every row",
        )


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
                hint=f"leave it out, or --system {DEFAULT_SYSTEM}",
            )


def _check_year(question: Question) -> None:
    """Refuse an attention kernel that is newer than the libraries that are pinned."""
    asked, year = question.pins.attention, question.pins.libraries
    if asked is None or year is None:
        return
    years = [kernel.since for name, kernel in ATTENTION_KERNELS.items() if asked in (name, kernel.generation)]
    if years and min(years) > year:
        raise UsageError(
            "these libraries do not have this attention kernel",
            got=f"--attention {asked} --libraries {year}",
            wanted=f"--libraries {min(years)} or later",
            hint="--attention flash is the newest that they have",
        )


def _check_inputs(question: Question) -> None:
    """Refuse offloaded inputs beside another recompute than full, and beside an alpha that says something else."""
    pins = question.pins
    if pins.offload_inputs is None:
        return
    option = "--offload-inputs" if pins.offload_inputs else "--no-offload-inputs"
    if pins.offload_inputs and pins.recompute not in (None, "full"):
        raise UsageError(
            "offloaded inputs belong to full recompute, which keeps nothing else of a layer",
            got=f"{option} with --recompute {pins.recompute}",
            wanted="--recompute full",
            hint=f"leave {option} or --recompute out",
        )
    if pins.alpha is not None and pins.alpha != pins.offload_inputs:
        raise UsageError(
            "both options say how much of the layer inputs is swapped",
            got=f"{option} with --alpha {pins.alpha}",
            wanted="one of them",
            hint=f"leave {option} out",
        )


def check_rounding_buffers(question: Question, recompute: Collection[str]) -> None:
    """Refuse a choice of rounding buffers when no policy that is tried recomputes in full: it has no effect.

    Raises:
        UsageError: naming the option.
    """
    pinned = question.pins.rounding_buffers
    if pinned is None or "full" in recompute:
        return
    option = "--rounding-buffers" if pinned else "--no-rounding-buffers"
    raise UsageError(
        "the choice of rounding buffers belongs to full recompute; plans that swap always have them",
        got=f"{option} with recompute {', '.join(sorted(recompute))}",
        wanted="--recompute full",
        hint=f"--recompute full, or leave {option} out",
    )


def _check_early_stop(question: Question) -> None:
    """Refuse an early end of a recompute that is pinned and not full, and beside an MLP in row blocks."""
    pins = question.pins
    if pins.early_stop and pins.recompute not in (None, "full"):
        raise UsageError(
            "only full recompute repeats what backward does not need",
            got=f"--early-stop with --recompute {pins.recompute}",
            wanted="--recompute full",
            hint="leave --early-stop or --recompute out",
        )
    if pins.early_stop is not None and pins.mlp_chunk_tokens:
        option = "--early-stop" if pins.early_stop else "--no-early-stop"
        raise UsageError(
            "an MLP in row blocks is rebuilt as --mlp-rebuild says, wherever recompute ends",
            got=f"{option} with --mlp-chunk {pins.mlp_chunk_tokens}",
            wanted="one of them",
            hint=f"leave {option} out, or --mlp-chunk 0",
        )


def _check_adamw(question: Question) -> None:
    """Refuse a choice of AdamW's kernels that the row-wise kernels leave none of."""
    if question.pins.adamw is None or question.rowwise in CHOOSES_ADAMW:
        return
    raise UsageError(
        "memo-exec and Megatron-LM update parameters by kernels of their own",
        got=f"--adamw {question.pins.adamw} with row-wise kernels {question.rowwise or 'torch or triton'}",
        wanted="row-wise kernels eager or compiled",
        hint="--rowwise eager, or leave --adamw out",
    )


def _check_need(question: Question, knob: Knob, need: Knob) -> None:
    """Refuse a pinned knob whose ``need`` has its default in every layout: it would have no effect."""
    value, other = getattr(question.pins, knob.name), getattr(question.pins, need.name)
    if value not in (knob.default, _UNLESS_PINNED[knob.name]) and not _above_default(question, need):
        least = _UNLESS_PINNED[need.name] + 1
        enough = least if knob.name != "pp_layers" else max(least, len(value) // (question.pins.virtual_stages or 1))
        raise UsageError(
            f"{knob.option} has no effect without {need.option}",
            got=f"{knob.name} {str(value).lower()}, {need.name} {'not given' if other is None else other}",
            wanted=f"{need.option} {least} or more",
            hint=f"{need.option} {enough}, or leave {knob.option} out",
        )


def _above_default(question: Question, knob: Knob) -> bool:
    """Return whether a knob is above its default (1 of a degree, ZeRO 0) in some layout of the question."""
    pinned, system = getattr(question.pins, knob.name), question.preset
    if pinned is not None:
        return bool(pinned == "auto" or pinned > _UNLESS_PINNED[knob.name])
    if knob.name == "ep" and question.model.mixture is None:
        return False
    return knob.name in system.searched or (knob.name == "zero" and max(system.zeros) > 0)


def _pinned(question: Question) -> Decisions:
    """Return the pins that ``OF_OPTIONS`` are about as a plan of two stages, which go with every schedule."""
    pins = question.pins
    layout = Layout(pp=2, schedule=pins.schedule or "1f1b", virtual_stages=pins.virtual_stages or 1)
    base = question.decisions(layout)
    alpha = float(pins.offload_inputs) if pins.offload_inputs else pins.alpha or 0.0
    granules = ceil(alpha * base.local_tokens / base.swap_granule)
    swapped, layers = min(granules * base.swap_granule, base.local_tokens), pins.recompute_layers or ALL
    return msgspec.structs.replace(
        base,
        recompute=pins.recompute or ("none" if layers == ALL else "full"),
        recompute_layers=layers,
        swapped_tokens=swapped,
        mlp_chunk_tokens=pins.mlp_chunk_tokens or 0,
        attention_chunk_tokens=pins.attention_chunk_tokens or 0,
    )
