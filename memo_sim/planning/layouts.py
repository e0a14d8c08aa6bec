"""The layouts of a question: degrees that make up its devices, and how pipeline stages play their passes."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from math import gcd, isqrt

from msgspec.structs import replace

from memo_sim.contract.errors import Infeasible, UsageError
from memo_sim.contract.knobs import DEGREES, MOST_ZERO, PINNED, Part, Schedule
from memo_sim.contract.plan import Kernels, Layout
from memo_sim.planning.contradictions import check_pins
from memo_sim.planning.question import Question
from memo_sim.planning.sppo import allowed
from memo_sim.planning.stage_splits import splits
from memo_sim.planning.subsequences import counts
from memo_sim.program.attention.plain import PLAIN
from memo_sim.program.layout.compatibility import goes_together
from memo_sim.program.layout.partition import partition
from memo_sim.program.layout.recomputed_layers import ALL
from memo_sim.program.layout.rules.metp import METP_SCHEDULE
from memo_sim.program.layout.rules.multiplexing import MULTIPLEXING
from memo_sim.program.layout.rules.pipeline_stages import MOST_WHOLE_ZERO
from memo_sim.program.layout.shape import shape_of
from memo_sim.program.layout.stage import stages_of

CHUNKS = (2, 4)
"""Chunks of layers a stage that the interleaved schedule is tried with."""

WITHIN_A_STAGE = tuple(name for name in DEGREES if name != "pp")
"""The degrees that divide the devices of a stage."""


def layouts(question: Question) -> list[Layout]:
    """Return every layout of the question's devices with its pins, tensor parallelism changing slowest.

    Raises:
        UsageError: when the pinned degrees do not make up the cluster, or the system does not divide work that way.
    """
    pins, system = question.pins, question.preset
    check_pins(question)
    found: list[Layout] = []
    solved = _solved(question)
    for pp in _degrees(pins.pp, question.cluster.devices, "pp" in system.degrees):
        devices = question.cluster.devices // pp
        for tp, cp, ulysses, metp, dp in _divided(question, devices):
            degrees = {"tp": tp, "cp": cp, "ulysses": ulysses, "metp": metp, "pp": pp, "dp": dp}
            found += [
                replace(layout, multiplexed=shared)
                for zero in _zeros(question, devices // tp, dp, most=MOST_WHOLE_ZERO if pp > 1 else MOST_ZERO)
                for parts in dict.fromkeys((*_subsequences(question), *solved.get((tp, pp), ())))
                for schedule, chunks in _schedules(question, pp, metp)
                for split in _splits(question, pp * chunks, parts)
                for experts in _expert_degrees(question, tp, cp * ulysses * dp)
                for layout in (
                    _layout(question, zero, parts, schedule, chunks, split=split, experts=experts, **degrees),
                )
                for shared in _multiplexed(question, layout)
            ]
    if searches_metp_beside_others(question):
        found = [layout for layout in found if layout.metp == 1 or takes_metp(question, layout)]
    if not found:
        named = {name: getattr(pins, name) for name in (*WITHIN_A_STAGE, "pp")}
        asked = ", ".join(f"{name} {degree}" for name, degree in named.items() if degree is not None)
        raise UsageError(
            "the pinned layout does not fill the cluster",
            got=asked,
            wanted=f"degrees whose product is {question.cluster.devices} devices",
            hint="leave one degree out, or name a cluster of another size",
        )
    return found


def _divided(question: Question, devices: int) -> Iterator[tuple[int, int, int, int, int]]:
    """Yield tp, cp, ulysses, metp and dp whose product is ``devices``.

    METP divides weights as tp does and tokens as cp does: beside it neither is tried, nor Ulysses, unless pinned
    (``program/layout/rules/metp.py``).
    """
    pins, searched = question.pins, question.preset.degrees
    for metp in _degrees(pins.metp, devices, "metp" in searched):
        alone = metp == 1
        for tp in _degrees(pins.tp, devices // metp, alone and "tp" in searched):
            if alone and not _least_tp(question) <= tp <= _most_tp(question):
                continue
            for cp in _degrees(pins.cp, devices // (metp * tp), alone and "cp" in searched):
                for ulysses in _degrees(pins.ulysses, devices // (metp * tp * cp), alone and "ulysses" in searched):
                    dp = devices // (metp * tp * cp * ulysses)
                    if pins.dp in (None, dp):
                        yield tp, cp, ulysses, metp, dp


def searches_metp_beside_others(question: Question) -> bool:
    """Return whether METP's degree is searched beside other ways to divide a layer or a sequence."""
    return question.pins.metp is None and {"metp", "cp"} <= set(question.preset.degrees)


def takes_metp(question: Question, layout: Layout) -> bool:
    """Return whether a METP layout goes with the question's model, knobs and pins.

    Where others are searched as well, METP's layouts that do not are none that a user asked for: to name each among
    the refused would hide the reasons that matter.
    """
    pins, layers = question.pins, question.pins.recompute_layers or ALL
    asked = replace(
        question.decisions(layout),
        recompute=pins.recompute or ("none" if layers == ALL else "full"),
        recompute_layers=layers,
        kernels=Kernels(attention=PLAIN) if pins.attention == PLAIN else Kernels(),
    )
    return goes_together(asked)


def _least_tp(question: Question) -> int:
    """Return the least tensor parallelism of the system, or what the model's heads and a node's devices allow of it.

    Who pins a degree is not held to it.
    """
    model, cluster = question.model, question.cluster
    if any(getattr(question.pins, name) is not None for name in WITHIN_A_STAGE):
        return 1
    wanted = min(question.preset.least_tp, cluster.devices_per_node)
    widths = [shape.ffn_hidden for shape in model.layer_shapes]
    divided = (model.heads, model.kv_heads, *widths, cluster.devices)
    return max(d for d in range(1, wanted + 1) if all(n % d == 0 for n in divided))


def _most_tp(question: Question) -> int:
    """Return the most tensor parallelism of the system: a node's devices, where it is to stay inside."""
    cluster = question.cluster
    inside = question.preset.tp_inside_node and question.pins.tp is None
    return cluster.devices_per_node if inside else cluster.devices


def _subsequences(question: Question) -> tuple[int, ...]:
    """Return the numbers of subsequences to try; one, unless they are asked for or the system's own."""
    pinned, system = question.pins.subsequences, question.preset
    if isinstance(pinned, int):
        return (pinned,)
    if pinned == "auto" or system.subsequences:
        return tuple(dict.fromkeys((*(() if system.subsequences else (1,)), *counts(question.seq_tokens, 1))))
    return (1,)


def _solved(question: Question) -> dict[tuple[int, int], tuple[int, ...]]:
    """Return the number of subsequences of SPPO's own choice (6.1), by its tp and pp, where numbers are searched."""
    if not question.preset.solver or isinstance(question.pins.subsequences, int):
        return {}
    return {(choice.sp, choice.pp): (choice.subsequences,) for choice in allowed(question)[:1]}


def put_off(question: Question, found: list[Layout]) -> list[Layout]:
    """Return the layouts that are searched only where no other plan fits: cp beside subsequences, in Ulysses' place.

    Each has another layout in ``found`` with Ulysses of the same degree. This is a choice, and no bound: cp has as much
    to compute, in more and smaller calls, and sends the keys of earlier subsequences again for each later one, so its
    plans are mostly slower, and their programs are long to write and play. Where Ulysses copies key/value heads, cp
    needs less memory, and so may be all that fits. ``docs/subsequences.md`` has what was measured, on both sides. None
    is put off where a degree of cp or of Ulysses is pinned.
    """
    if not puts_off_cp(question):
        return []
    known = {_without_cp(layout) for layout in found if layout.cp == 1}
    return [
        layout
        for layout in found
        if layout.cp > 1 and layout.subsequences > 1 and _goes_without_cp(question, _without_cp(layout), known)
    ]


def puts_off_cp(question: Question) -> bool:
    """Return whether both cp and Ulysses are open beside subsequences, so that ``put_off`` may name layouts."""
    pins, system = question.pins, question.preset
    both_open = pins.cp is None and pins.ulysses is None and {"cp", "ulysses"} <= set(system.degrees)
    return both_open and cuts_sequences(question)


def _without_cp(layout: Layout) -> Layout:
    """Return the layout with Ulysses in place of cp."""
    return replace(layout, cp=1, ulysses=layout.cp * layout.ulysses, cp_exchange="ring", uneven_heads=False)


def _goes_without_cp(question: Question, layout: Layout, known: Collection[Layout]) -> bool:
    """Return whether a layout is among those ``known``, and divides the model and the sequence."""
    if layout not in known:
        return False
    decisions = question.decisions(layout)
    try:
        stages_of(decisions)
        shape_of(decisions)
        partition(decisions)
    except Infeasible:
        return False
    return True


def cuts_sequences(question: Question) -> bool:
    """Return whether some layouts of the question have several subsequences."""
    return any(parts > 1 for parts in _subsequences(question))


def _zeros(question: Question, replicas: int, dp: int, *, most: int) -> tuple[int, ...]:
    """Return the levels of ZeRO to try: none of the system's where every rank holds parameters of its own.

    ``replicas`` hold the same parameters of some block: METP's ranks the same embedding. A level above ``most``, which
    stages do not have, is replaced by it.
    """
    if question.pins.zero is not None:
        return (question.pins.zero,)
    system = question.preset
    shared = dp if system.zero_needs_dp else replicas
    zeros = question.zeros if shared > 1 else (0,)
    return tuple(dict.fromkeys(min(zero, most) for zero in zeros))


def _expert_degrees(question: Question, tp: int, replicas: int) -> tuple[tuple[int, int], ...]:
    """Return the degrees of expert parallelism to try, and of tensor parallelism inside experts (``expert_tp``).

    Those that are pinned, or the system's: no expert parallelism, all ranks of a node that hold the same experts
    otherwise, and all of these ranks, as far as they divide the experts. Degrees between them have more rows on the
    network than the second, and more weights than the third. Beside tensor parallelism, whole experts are tried too.
    """
    pins, mixture, cluster = question.pins, question.model.mixture, question.cluster
    searched = mixture is not None and question.preset.searches_ep
    sharded = tp > 1 and pins.sequence_parallel is not False
    inside_experts = [0, *[1] * (searched and sharded)] if pins.expert_tp is None else [pins.expert_tp]
    found = [(1, 0)] if pins.ep is None else []
    for within in inside_experts if tp > 1 else [0]:
        kept = 0 if within == tp else within
        if pins.ep is not None:
            found.append((pins.ep, kept if pins.ep > 1 else 0))
        elif mixture is not None and searched:
            most = gcd(replicas * (tp if kept == 1 else 1), mixture.count)
            degrees = [d for d in range(2, most + 1) if most % d == 0]
            inside = [d for d in degrees if d * (1 if kept == 1 else tp) <= cluster.devices_per_node]
            found += [(each, kept) for each in (*inside[-1:], *degrees[-1:])]
    return tuple(dict.fromkeys(found))


def _schedules(question: Question, pp: int, metp: int) -> list[tuple[Schedule, int]]:
    """Return the orders of passes to try, each with its chunks a stage; one where stages or their order are pinned."""
    pins = question.pins
    tried = [(s, question.decisions(Layout(metp=metp, pp=pp, schedule=s))) for s in question.preset.schedules]
    known = [schedule for schedule, decisions in tried if not METP_SCHEDULE.breaks(decisions)]
    if pp == 1 or pins.pp is not None or pins.schedule is not None:
        return [(pins.schedule or known[0], pins.virtual_stages or 1)]
    held, found = question.model.layers // pp, list[tuple[Schedule, int]]()
    for schedule in known:
        chunks = [c for c in CHUNKS if held % c == 0] if schedule == "interleaved" else [1]
        found += [(schedule, c) for c in chunks]
    return found


def _splits(question: Question, runs: int, parts: int) -> tuple[tuple[int, ...], ...]:
    """Return the splits of layers over runs to try; empty for nearly equal ones.

    Stages that are pinned have nearly equal numbers of layers, unless layers differ. So have stages that play parts of
    a sequence, whose lengths are chosen for equal work in every stage.
    """
    pins, model = question.pins, question.model
    if pins.pp_layers is not None:
        return (pins.pp_layers,)
    if parts > 1 or (pins.pp is not None and len(model.layer_shapes) == 1):
        return ((),)
    return splits(model, runs, question.seq_tokens)


def _multiplexed(question: Question, layout: Layout) -> tuple[bool, ...]:
    """Return whether to let idle stages play rows of others: both, where it is tried and can pay.

    Tried it is where it is the system's own, and wherever numbers are searched that are no system's own.
    """
    pinned, cluster, system = question.pins.multiplexed, question.cluster, question.preset
    if pinned is not None:
        return (pinned,)
    asked = question.pins.subsequences == "auto" and not system.subsequences
    if not (system.multiplexed or asked) or cluster.devices > cluster.devices_per_node:
        return (False,)
    shared = question.decisions(replace(layout, multiplexed=True))
    return (False,) if any(rule.breaks(shared) for rule in MULTIPLEXING) else (False, True)


def _layout(
    question: Question,
    zero: int,
    subsequences: int,
    schedule: Schedule,
    chunks: int,
    *,
    split: tuple[int, ...],
    experts: tuple[int, int],
    tp: int,
    cp: int,
    ulysses: int,
    metp: int,
    pp: int,
    dp: int,
) -> Layout:
    pins = question.pins
    exchange = pins.cp_exchange or question.preset.cp_exchange
    replicas = cp * ulysses * dp
    zero_ranks = pins.zero_ranks if zero and pins.zero_ranks not in (None, replicas) else 0
    ep, expert_tp = experts
    # Interleaved stages that waited would wait in a cycle; Megatron-LM overlaps theirs alone.
    overlapped = schedule == "interleaved" or not question.preset.waits_for_p2p
    return Layout(
        tp=tp,
        sequence_parallel=tp > 1 if pins.sequence_parallel is None else pins.sequence_parallel and tp > 1,
        tp_overlap=pins.tp_overlap if tp > 1 or metp > 1 else "none",  # METP is refused by its rule
        cp=cp,
        cp_exchange=exchange if cp > 1 or exchange == "rsa" else "ring",
        ulysses=ulysses,
        uneven_heads=pins.uneven_heads and ulysses > 1,
        metp=metp,
        overlap_exchanges=metp == 1 or pins.overlap_exchanges is not False,
        pp=pp,
        pp_layers=split,
        schedule=schedule,
        virtual_stages=chunks,
        overlap_p2p=overlapped if pins.overlap_p2p is None else pins.overlap_p2p,
        dp=dp,
        ep=ep,
        expert_tp=expert_tp,
        zero=zero,
        zero_ranks=zero_ranks,
        subsequences=subsequences,
        partition=question.partition(subsequences),
    )


def _degrees(pinned: int | None, devices: int, searched: bool) -> list[int]:
    if pinned is not None or not searched:
        wanted = pinned or 1
        return [wanted] if wanted <= devices and devices % wanted == 0 else []
    low = [d for d in range(1, isqrt(devices) + 1) if devices % d == 0]
    return low + [devices // d for d in reversed(low) if d * d < devices]


def in_words(layout: Layout) -> str:
    """Return a layout's degrees in words; those that few layouts have, only where they divide."""
    shown_above = {knob.name: part.above for knob in PINNED for part in knob.labels if isinstance(part, Part)}
    values = {name: getattr(layout, name) for name in (*WITHIN_A_STAGE, "pp", "subsequences")}
    return " ".join(f"{name} {value}" for name, value in values.items() if value > shown_above[name])
