"""Says what a search leaves out, with the options that include it: layouts, kernels, other systems' plans, knobs."""

from __future__ import annotations

from math import prod

from memo_sim.contract.adapters import NONE
from memo_sim.contract.knobs import DEGREES, KNOBS, MOST_ZERO
from memo_sim.contract.plan import Layout
from memo_sim.contract.summary import LeftOut
from memo_sim.contract.systems import DEFAULT_SYSTEM, OPEN
from memo_sim.contract.units import format_tokens
from memo_sim.planning.layouts import puts_off_cp, takes_metp
from memo_sim.planning.micro_batches import LAYOUTS, MOST_TOKENS, SIZES, are_searched
from memo_sim.planning.presets import SYSTEMS
from memo_sim.planning.question import Question
from memo_sim.program.layout.fp8 import PRODUCTS

NOT_SEARCHED = ("overlap", "tp_overlap", "cp_exchange", "states", "loss", "micro_batch")
"""Knobs that no search tries, and that ``explain`` and ``oom`` change one at a time."""

_ZERO_IN_NO_SEARCH = [level for level in range(MOST_ZERO + 1) if level not in SYSTEMS[DEFAULT_SYSTEM].zeros]


def left_out(question: Question) -> list[LeftOut]:
    """Return what the search leaves out, with the options that include it: layouts, other systems' plans, knobs."""
    found = _open_layouts(question) if question.system in OPEN else _of_other_systems(question)
    open_knobs = NOT_SEARCHED if question.memory_policy == "planned" else (*NOT_SEARCHED, "memory_policy")
    knobs = [
        KNOBS[name].option
        for name in open_knobs
        if (name != "micro_batch" or not question.open_micro_batch)
        and (name != "tp_overlap" or _takes_tp_overlap(question))
        and getattr(question.pins if hasattr(question.pins, name) else question, name) == KNOBS[name].default
    ]
    found += [*_micro_batches_left_out(question), *_kernels_left_out(question), *_fp8_left_out(question)]
    if knobs:
        found.append(LeftOut(what=f"other values of {', '.join(knobs)}", option="memo-sim explain PLAN changes each"))
    return found


def _takes_tp_overlap(question: Question) -> bool:
    """Return whether ``--tp-overlap`` has a lowering for the model and its adapters (``RULES``)."""
    model = question.model
    return model.mixture is None and model.latent is None and question.adapters == NONE


def _open_layouts(question: Question) -> list[LeftOut]:
    """Return the layouts that an open search leaves out; where degrees fill the cluster, only ZeRO and subsequences."""
    pins, system, found = question.pins, question.preset, list[LeftOut]()
    every = SYSTEMS[DEFAULT_SYSTEM]
    if _has_open_degrees(question):
        more = [
            f"{name} above 1"
            for name in every.degrees
            if name not in system.degrees and getattr(pins, name) is None and (name != "metp" or _takes_metp(question))
        ]
        if pins.ep is None and question.model.mixture and every.searches_ep > system.searches_ep:
            more.append("ep above 1")
        if pins.zero is None:
            more += [f"zero {level}" for level in every.zeros if level not in question.zeros]
        found += [LeftOut(what=", ".join(more), option=f"--system {DEFAULT_SYSTEM}")] if more else []
    if pins.zero is None and (pins.tp or 1) * (pins.pp or 1) < question.cluster.devices:
        found.append(LeftOut(what=" and ".join(f"zero {level}" for level in _ZERO_IN_NO_SEARCH), option="--zero"))
    if puts_off_cp(question):
        found.append(LeftOut(what="cp beside subsequences, unless no plan with Ulysses fits", option="--cp"))
    if pins.subsequences is None and question.documents is None:
        found.append(LeftOut(what="subsequences", option="--subsequences auto"))
    return found


def _kernels_left_out(question: Question) -> list[LeftOut]:
    """Return that compiled kernels were not tried, where the profile has measured them: memo-exec cannot play them."""
    measured = "compiled" in question.hardware.framework_rowwise_bytes_per_s
    if question.system not in OPEN or question.rowwise is not None or not measured or question.adapters != NONE:
        return []
    return [LeftOut(what="kernels of torch.compile, which memo-exec does not run", option="--compile")]


def _fp8_left_out(question: Question) -> list[LeftOut]:
    """Return that products in FP8 were not tried, where the profile has rates of them: they change what is learned."""
    recipes = [recipe for recipe, products in PRODUCTS.items() if products in {t.dtype for t in question.hardware.gemm}]
    if question.fp8 != "none" or question.dtype != "bf16" or not recipes:
        return []
    option = f"--fp8 {' or '.join(recipes)}"
    return [LeftOut(what="products in FP8, which change what is learned", option=option)]


def _micro_batches_left_out(question: Question) -> list[LeftOut]:
    """Return the micro-batches that were not tried, where a step has several sequences."""
    if not question.open_micro_batch or question.global_batch <= question.micro_batch:
        return []
    what = f"micro-batches above {question.micro_batch}"
    if are_searched(question):
        most = SIZES[-1] * question.micro_batch
        tokens = f"{format_tokens(MOST_TOKENS)} tokens a rank{' and subsequence' if question.pins.subsequences else ''}"
        what += f" except, with the fastest policy on each of the {LAYOUTS} fastest layouts, up to {most} or {tokens}"
    return [LeftOut(what=what, option="--micro-batch")]


def _of_other_systems(question: Question) -> list[LeftOut]:
    """Return the degrees that a system has where they are named, and that it lacks what other systems have."""
    pinnable = [
        name
        for name in question.preset.pinnable
        if getattr(question.pins, name) is None and (name != "metp" or _takes_metp(question))
    ]
    found = []
    if pinnable and _has_open_degrees(question):
        options = ", ".join(f"{KNOBS[name].option} N" for name in pinnable)
        found.append(LeftOut(what=", ".join(f"{name} above 1" for name in pinnable), option=options))
    return [*found, LeftOut(what=f"plans that {question.system} does not have", option=f"--system {DEFAULT_SYSTEM}")]


def _takes_metp(question: Question) -> bool:
    """Return whether METP may be asked for beside what the question pins."""
    pins = question.pins
    parts = pins.subsequences if isinstance(pins.subsequences, int) else 1
    pinned = Layout(metp=2, tp=pins.tp or 1, cp=pins.cp or 1, ulysses=pins.ulysses or 1, subsequences=parts)
    return takes_metp(question, pinned)


def _has_open_degrees(question: Question) -> bool:
    pinned: int = prod(getattr(question.pins, name) or 1 for name in DEGREES)
    return pinned < question.cluster.devices
