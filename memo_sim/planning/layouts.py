"""The layouts of a question: degrees that make up its devices, and how pipeline stages play their passes."""

from __future__ import annotations

from collections.abc import Iterator

from msgspec.structs import replace

from memo_sim.contract.errors import UsageError
from memo_sim.contract.plan import Layout, Schedule
from memo_sim.planning.presets import find_system
from memo_sim.planning.question import Question
from memo_sim.planning.sppo import allowed
from memo_sim.planning.subsequences import counts
from memo_sim.program.layout.metp_limits import METP_SCHEDULES
from memo_sim.program.layout.multiplex import MULTIPLEXED_SCHEDULES

CHUNKS = (2, 4)
"""Chunks of layers a stage that the interleaved schedule is tried with."""

DEGREES = ("tp", "cp", "ulysses", "metp", "dp")
"""The degrees of a layout that can be pinned or searched."""


def layouts(question: Question) -> list[Layout]:
    """Return every layout of the question's devices with its pins, tensor parallelism changing slowest.

    Raises:
        UsageError: when the pinned degrees do not make up the cluster, or the system does not divide work that way.
    """
    pins, system = question.pins, find_system(question.system)
    _check_degrees(question)
    _check_schedule(question)
    found: list[Layout] = []
    solved = _solved(question)
    for pp in _degrees(pins.pp, question.cluster.devices, "pp" in system.degrees):
        devices = question.cluster.devices // pp
        for tp, cp, ulysses, metp, dp in _divided(question, devices):
            degrees = {"tp": tp, "cp": cp, "ulysses": ulysses, "metp": metp, "pp": pp, "dp": dp}
            found += [
                replace(layout, multiplexed=shared)
                for zero in _zeros(question, devices // tp, dp, most=1 if pp > 1 else 3)
                for parts in dict.fromkeys((*_subsequences(question), *solved.get((tp, pp), ())))
                for schedule, chunks in _schedules(question, pp, metp)
                for layout in (_layout(question, zero, parts, schedule, chunks, **degrees),)
                for shared in _multiplexed(question, layout)
            ]
    if not found:
        named = {name: getattr(pins, name) for name in (*DEGREES, "pp")}
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
    (``program/layout/metp_limits.py``).
    """
    pins, searched = question.pins, find_system(question.system).degrees
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


def _least_tp(question: Question) -> int:
    """Return the least tensor parallelism of the system, or what the model's heads and a node's devices allow of it.

    Who pins a degree is not held to it.
    """
    model, cluster = question.model, question.cluster
    if any(getattr(question.pins, name) is not None for name in DEGREES):
        return 1
    wanted = min(find_system(question.system).least_tp, cluster.devices_per_node)
    divided = (model.heads, model.kv_heads, model.ffn_hidden, cluster.devices)
    return max(d for d in range(1, wanted + 1) if all(n % d == 0 for n in divided))


def _most_tp(question: Question) -> int:
    """Return the most tensor parallelism of the system: a node's devices, where it is to stay inside."""
    cluster = question.cluster
    inside = find_system(question.system).tp_inside_node and question.pins.tp is None
    return cluster.devices_per_node if inside else cluster.devices


def _subsequences(question: Question) -> tuple[int, ...]:
    """Return the numbers of subsequences to try; one, unless they are asked for or the system's own."""
    pinned, system = question.pins.subsequences, find_system(question.system)
    if isinstance(pinned, int):
        return (pinned,)
    if pinned == "auto" or system.subsequences:
        return tuple(dict.fromkeys((*(() if system.subsequences else (1,)), *counts(question.seq_tokens, 1))))
    if question.pins.partition != "flops":
        raise UsageError(
            "a partition is of subsequences, and there is one here",
            got=f"partition {question.pins.partition}",
            hint="--subsequences auto, or a number",
        )
    return (1,)


def _solved(question: Question) -> dict[tuple[int, int], tuple[int, ...]]:
    """Return the number of subsequences of SPPO's own choice (6.1), by its tp and pp, where numbers are searched."""
    if not find_system(question.system).solver or isinstance(question.pins.subsequences, int):
        return {}
    return {(choice.sp, choice.pp): (choice.subsequences,) for choice in allowed(question)[:1]}


def cuts_sequences(question: Question) -> bool:
    """Return whether some layouts of the question have several subsequences."""
    return any(parts > 1 for parts in _subsequences(question))


def _check_degrees(question: Question) -> None:
    """Refuse a pinned degree that the system does not have, and a way of METP's where METP is not."""
    system = find_system(question.system)
    for name in DEGREES:
        degree = getattr(question.pins, name)
        has = name in system.degrees or name in system.pinnable
        if degree is not None and degree > 1 and not has and system.name != "any":
            raise UsageError(
                f"{system.name} does not divide work that way",
                got=f"{name} {degree}",
                wanted=" and ".join(system.degrees),
                hint="leave it out, or --system any",
            )
    given = {"overlap_exchanges": question.pins.overlap_exchanges is not None, "keep_norms": question.pins.keep_norms}
    if "metp" not in system.degrees and (question.pins.metp or 1) == 1:
        for name in (name for name, asked in given.items() if asked):
            raise UsageError(
                "overlapped exchanges and kept norms are METP's, and there is none here",
                got=f"{name} without metp",
                hint="--metp 2, or more ranks",
            )


def _check_schedule(question: Question) -> None:
    """Refuse what only pipeline stages have where there are none, and interleaving without chunks to interleave."""
    pins = question.pins
    staged = pins.schedule not in (None, "1f1b") or (pins.virtual_stages or 1) > 1
    if staged and pins.pp is None and "pp" not in find_system(question.system).degrees:
        raise UsageError(
            "schedules and virtual stages are of pipelines, and stages are not searched here",
            got=f"schedule {pins.schedule or '1f1b'}, {pins.virtual_stages or 1} virtual stages, no --pp",
            hint="--pp 2, or more stages",
        )
    if (pins.schedule == "interleaved") != ((pins.virtual_stages or 1) > 1):
        raise UsageError(
            "the interleaved schedule and virtual stages belong together",
            got=f"schedule {pins.schedule or '1f1b'}, {pins.virtual_stages or 1} virtual stages",
            wanted="--schedule interleaved with --virtual-stages 2 or more, or neither",
        )


def _zeros(question: Question, replicas: int, dp: int, *, most: int) -> tuple[int, ...]:
    """Return the levels of ZeRO to try: none of the system's where every rank holds parameters of its own.

    ``replicas`` hold the same parameters of some block: METP's ranks the same embedding. Stages
    (``program/layout/stage.py``) have ZeRO 1 at ``most``; the others' place is taken by that.
    """
    if question.pins.zero is not None:
        return (question.pins.zero,)
    system = find_system(question.system)
    shared = dp if system.zero_needs_dp else replicas
    zeros = system.zeros if shared > 1 else (0,)
    return tuple(dict.fromkeys(min(zero, most) for zero in zeros))


def _schedules(question: Question, pp: int, metp: int) -> list[tuple[Schedule, int]]:
    """Return the orders of passes to try, each with its chunks a stage; one where stages or their order are pinned."""
    pins, known = question.pins, find_system(question.system).schedules
    if metp > 1:
        known = tuple(schedule for schedule in known if schedule in METP_SCHEDULES)
    if pp == 1 or pins.pp is not None or pins.schedule is not None:
        return [(pins.schedule or known[0], pins.virtual_stages or 1)]
    held, found = question.model.layers // pp, list[tuple[Schedule, int]]()
    for schedule in known:
        chunks = [c for c in CHUNKS if held % c == 0] if schedule == "interleaved" else [1]
        found += [(schedule, c) for c in chunks]
    return found


def _multiplexed(question: Question, layout: Layout) -> tuple[bool, ...]:
    """Return whether to let idle stages play rows of others: both, where it is tried and can pay.

    Tried it is where it is the system's own, and wherever numbers are searched that are no system's own.
    """
    pinned, cluster, system = question.pins.multiplexed, question.cluster, find_system(question.system)
    if pinned is not None:
        return (pinned,)
    asked = question.pins.subsequences == "auto" and not system.subsequences
    inside = cluster.devices <= cluster.devices_per_node and 1 < layout.pp <= layout.subsequences
    one = question.global_batch in (None, question.micro_batch * layout.dp)
    plays = layout.schedule in MULTIPLEXED_SCHEDULES and question.memory_policy != "eager"
    return (False, True) if (system.multiplexed or asked) and inside and one and plays else (False,)


def _layout(
    question: Question,
    zero: int,
    subsequences: int,
    schedule: Schedule,
    chunks: int,
    *,
    tp: int,
    cp: int,
    ulysses: int,
    metp: int,
    pp: int,
    dp: int,
) -> Layout:
    pins = question.pins
    exchange = pins.cp_exchange or find_system(question.system).cp_exchange
    # Interleaved stages that waited would wait in a circle; Megatron-LM overlaps theirs alone.
    overlapped = schedule == "interleaved" or not find_system(question.system).waits_for_p2p
    return Layout(
        tp=tp,
        sequence_parallel=tp > 1 if pins.sequence_parallel is None else pins.sequence_parallel and tp > 1,
        cp=cp,
        cp_exchange=exchange if cp > 1 or exchange == "rsa" else "ring",
        ulysses=ulysses,
        metp=metp,
        overlap_exchanges=metp == 1 or pins.overlap_exchanges is not False,
        pp=pp,
        schedule=schedule,
        virtual_stages=chunks,
        overlap_p2p=overlapped if pins.overlap_p2p is None else pins.overlap_p2p,
        dp=dp,
        zero=zero,
        subsequences=subsequences,
        partition=pins.partition,
    )


def _degrees(pinned: int | None, devices: int, searched: bool) -> list[int]:
    if pinned is not None or not searched:
        wanted = pinned or 1
        return [wanted] if wanted <= devices and devices % wanted == 0 else []
    return [d for d in range(1, devices + 1) if devices % d == 0]


def in_words(layout: Layout) -> str:
    """Return a layout's degrees in words; those that few layouts have, only where they divide."""
    rare = ("ulysses", "metp", "pp", "subsequences")
    names = (*DEGREES, "pp", "subsequences")
    return " ".join(f"{n} {getattr(layout, n)}" for n in names if n not in rare or getattr(layout, n) > 1)
