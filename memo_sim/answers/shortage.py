"""Answers why a run is out of memory: what fills the memory at the peak, and what each single change would cost."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import msgspec

from memo_sim.contract.errors import Infeasible, UsageError
from memo_sim.contract.knobs import KNOBS, PINNED
from memo_sim.contract.plan import Prediction
from memo_sim.contract.progress import Progress
from memo_sim.contract.shortage import Shortage, WayOut
from memo_sim.engine.simulate import Simulation
from memo_sim.planning.arena import arena_of
from memo_sim.planning.contradictions import repinned
from memo_sim.planning.outcome import Evaluated
from memo_sim.planning.question import Question
from memo_sim.planning.search import play, search
from memo_sim.reasons.peak import tensors_at
from memo_sim.reasons.remedies import Change, Tried, changes, evaluated, pairs
from memo_sim.reasons.runner_up import label

MOVED = {"gpu_oom": "host_oom", "host_oom": "gpu_oom"}
"""The status of a plan that is short of the other memory, by the status of the asked run."""
LARGEST = 12
"""How many tensors the document names."""
NOTES = {
    "--states bf16": "the optimizer's moments are rounded to bf16",
    "--states host": "the optimizer runs on the host's cores",
    "--memory-policy planned": "needs an executor with a planned arena, such as memo-exec",
}
"""What changes mean besides time and memory, by their options."""


def shortage(question: Question, *, of_plan: bool = False, progress: Progress | None = None) -> Shortage:
    """Return why ``question`` is short of memory, and the changes that make it fit; or by how much it fits.

    Where no single change is enough, pairs of the most promising ones are tried.

    A change is evaluated with all other knobs as in the asked run (an alpha that the question leaves open is searched
    again). Plans on planned memory count as fitting when their arena does.

    ``of_plan``: the question is that of a plan's file, so that no options were typed that could be left out.

    Raises:
        Infeasible: when no layout divides the model and the sequence, or no plan can be evaluated.
        UsageError: when pinned knobs contradict each other or the cluster.
    """
    asked = search(question)
    chosen = _asked_run(question, asked.ranked)
    if chosen.prediction.status == "invalid":
        raise Infeasible("no plan can be evaluated", where=label(chosen), got=chosen.prediction.reason)
    simulation = play(question, chosen.decisions)
    peak = _peak(question, chosen, simulation, candidates=asked.evaluated + asked.pruned)
    if peak.fits:
        return peak
    found = _ways(question, chosen, progress)
    if of_plan:
        for name in ("ways", "too_little", "pairs"):
            found[name] = [msgspec.structs.replace(way, leave_out=[]) for way in found[name]]
    opened = _with_nothing_pinned(question, found["ways"] or found["pairs"])
    if of_plan and opened is not None:
        opened = msgspec.structs.replace(opened, leave_out=[])
    return msgspec.structs.replace(peak, **found, open=opened)


def _asked_run(question: Question, ranked: list[Evaluated]) -> Evaluated:
    """Return the fastest plan that fits, its arena included; else the nearest to fitting."""
    unplaced = []
    for one in ranked:
        placed = _placed(question, one)
        if placed.prediction.status == "ok":
            return placed
        unplaced.append(placed)
    return min(unplaced, key=lambda one: one.rank_key)


def _placed(question: Question, one: Evaluated) -> Evaluated:
    """Return a plan with the prediction of its arena, where memory is planned and the live bytes fit."""
    if one.prediction.status != "ok" or one.decisions.memory_policy != "planned":
        return one
    return replace(one, prediction=arena_of(play(question, one.decisions)).prediction)


def _peak(question: Question, chosen: Evaluated, simulation: Simulation, *, candidates: int) -> Shortage:
    """Return what fills the memory that is short; the device's where the plan fits."""
    prediction, memory, stage = chosen.prediction, simulation.memory, simulation.fullest
    on_host = prediction.status == "host_oom"
    lives, peak = (memory.host_lives, memory.host) if on_host else (memory.device_lives, memory.device)
    by_class = {name: size * (memory.local_ranks if on_host else 1) for name, size in peak.by_class.items()}
    if on_host and memory.host_beside_bytes:
        by_class["other stages"] = memory.host_beside_bytes
    at = memory.program_id(peak.instruction)
    needed, capacity = _need(prediction, simulation), _capacity(simulation, on_host=on_host)
    fault = memory.fault
    by_allocator = fault is not None and not on_host and memory.device_total_bytes <= memory.device_capacity_bytes
    return Shortage(
        model=question.model.name,
        cluster=question.cluster.name,
        seq_tokens=question.seq_tokens,
        changes=list(question.changes),
        fits=prediction.status == "ok",
        status=prediction.status,
        plan=label(chosen),
        decisions=chosen.decisions,
        candidates=candidates,
        memory="host" if on_host else "device",
        at=at if len(simulation.stages) == 1 else f"{stage.program.stage}: {at}",
        needed_bytes=needed,
        capacity_bytes=capacity,
        shortfall_bytes=prediction.shortfall_bytes,
        free_bytes=max(0, capacity - needed) if prediction.status == "ok" else 0,
        by_class=by_class,
        allocator={n: size for n, size in fault.live.items() if n != "reserve"} if fault and by_allocator else {},
        reserve={} if on_host else memory.reserve,
        tensors=tensors_at(
            memory.program,
            lives,
            peak.instruction,
            device=not on_host,
            names=None if on_host else memory.buffer_names,
        )[:LARGEST],
        step_s=prediction.step_s,
        reason=prediction.reason,
        not_read=list(question.not_read),
    )


def _need(prediction: Prediction, simulation: Simulation, *, on_host: bool | None = None) -> int:
    """Return what a plan needs of the memory that is short, or of a device's: with the reserve."""
    memory = simulation.memory
    of_host = prediction.status == "host_oom" if on_host is None else on_host
    if of_host:
        return prediction.peak_host_bytes_per_node
    if prediction.status == "gpu_oom":
        return memory.device_capacity_bytes + prediction.shortfall_bytes
    held = prediction.reserved_bytes
    return (prediction.peak_device_bytes if held is None else held) + memory.reserve_bytes


def _capacity(simulation: Simulation, *, on_host: bool) -> int:
    memory = simulation.memory
    return memory.host_capacity_bytes if on_host else memory.device_capacity_bytes


def _ways(question: Question, chosen: Evaluated, progress: Progress | None) -> dict[str, Any]:
    """Return the fields of ``Shortage`` about ways out: changes that are enough or not, pairs, how many were tried."""
    single = changes(question, chosen.decisions)
    tried = _tried(single, chosen, progress)
    enough = _fitting(tried)
    nearer = [each for each in tried if _is_nearer(each[1], chosen)]
    # What makes the other memory short may fit with a second change, and so may what saves a little of that one.
    moved = [each for each in tried if each[1].prediction.status == MOVED.get(chosen.prediction.status)]
    together = [] if enough else list(pairs(question, [*_by_rank(nearer), *_by_rank(moved), *_by_rank(tried)]))
    tried_together = _tried(together, chosen, progress, before=len(single))

    def ways(listed: list[Tried]) -> list[WayOut]:
        on_host = chosen.prediction.status == "host_oom"
        return [_way(question, change, one, on_host=on_host) for change, one in _by_rank(listed)]

    return {
        "ways": ways(enough),
        "too_little": ways(nearer),
        "tried": len(tried),
        "pairs": ways(_fitting(tried_together)),
        "pairs_tried": len(tried_together),
    }


def _tried(listed: list[Change], chosen: Evaluated, progress: Progress | None, *, before: int = 0) -> list[Tried]:
    """Return the changes that can be evaluated, each with its best plan; ``before`` were evaluated earlier."""
    found = list[Tried]()
    for number, change in enumerate(listed, start=before + 1):
        if (one := evaluated(change, chosen.decisions)) is not None:
            found.append((change, _placed(change.question, one)))
        if progress:
            progress(number, before + len(listed))
    return found


def _fitting(tried: list[Tried]) -> list[Tried]:
    return [each for each in tried if each[1].prediction.status == "ok"]


def _is_nearer(one: Evaluated, chosen: Evaluated) -> bool:
    """Return whether a plan is short of the same memory, and both memories lack less together."""
    mine, theirs = chosen.prediction, one.prediction
    return theirs.status == mine.status and theirs.missing_bytes < mine.missing_bytes


def _by_rank(tried: list[Tried]) -> list[Tried]:
    """Return the fastest first, then the nearest to fitting."""
    return sorted(tried, key=lambda each: each[1].rank_key)


def _way(question: Question, change: Change, one: Evaluated, *, on_host: bool) -> WayOut:
    prediction, changed = one.prediction, change.typed(one.decisions)
    options = _with_batch(question, changed)
    short = on_host if prediction.status == "ok" else None
    return WayOut(
        knob=change.knob,
        options=options,
        leave_out=_left_out(question, change, options),
        plan=label(one),
        fits=prediction.status == "ok",
        status=prediction.status,
        step_s=prediction.step_s,
        needed_bytes=_need(prediction, play(question, one.decisions), on_host=short),
        shortfall_bytes=prediction.shortfall_bytes,
        reason=prediction.reason,
        note="; ".join(note for option, note in NOTES.items() if f"{option} " in f"{changed} "),
    )


def _with_batch(question: Question, options: str) -> str:
    """Return the options with the batch, where the asked run has a default, which its other options decide."""
    return f"{options} --global-batch {question.global_batch}".lstrip() if question.batch_rule else options


def _left_out(question: Question, change: Change, options: str) -> list[str]:
    """Return the options of the asked run that contradict the change."""
    found = []
    for knob in PINNED:
        asked, now = (getattr(one.pins, knob.name) for one in (question, change.question))
        if asked != knob.default and now == knob.default and f"{knob.option} " not in f"{options} ":
            found.append(knob.option)
    return found


def _with_nothing_pinned(question: Question, ways: list[WayOut]) -> WayOut | None:
    """Return the best plan of the question without pins; None where nothing is pinned or a single change is as fast."""
    pinned = [KNOBS[name].option for name in _searched_pins(question)]
    if not pinned:
        return None
    unset: dict[str, Any] = {name: KNOBS[name].default for name in _searched_pins(question)}
    free = repinned(question, **unset)
    try:
        one = _asked_run(free, search(free).ranked)
    except (Infeasible, UsageError):
        return None
    step_s = one.prediction.step_s
    if step_s is None or (ways and step_s >= (ways[0].step_s or 0.0)):
        return None
    way = _way(question, Change("", "", free), one, on_host=False)
    return msgspec.structs.replace(way, leave_out=pinned)


def _searched_pins(question: Question) -> list[str]:
    """Return the pinned knobs that a search would choose."""
    return [
        knob.name
        for knob in PINNED
        if knob.name in (*question.preset.searched, "offload_inputs")
        and getattr(question.pins, knob.name) != knob.default
    ]
