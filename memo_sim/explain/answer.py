"""Why the best plan is best, in sentences: what binds, what lives at the worst instant, what the runner-up loses."""

from __future__ import annotations

from memo_sim.contract.hardware import DISTURBED
from memo_sim.contract.plan import Decisions, Prediction
from memo_sim.contract.units import counted, format_bytes, format_seconds
from memo_sim.engine.simulate import ALLOCATOR, Simulation
from memo_sim.explain.chunking import blocks
from memo_sim.explain.metp import metp
from memo_sim.explain.remedies import ways_out
from memo_sim.explain.runner_up import label, runner_up, ties
from memo_sim.explain.subsequences import balance, heuristic, subsequences
from memo_sim.planning.arena import Arena
from memo_sim.planning.outcome import SearchResult
from memo_sim.planning.presets import KEEP, PARTIAL_SWAP, TOKENWISE, Policy, find_system
from memo_sim.planning.question import Question
from memo_sim.program.arena.library_workspaces import RESULTS
from memo_sim.program.layout.rank_order import ENDS, degree
from memo_sim.views.plan_table import layout_label

EXACT = 1e-6
SLACK = 0.01
"""A lane that leaves less than this fraction of the step idle is what binds."""

SMALLEST_SHARE = 0.0005
"""Recompute below this part of compute is shown as nothing."""


def explain(
    question: Question, found: SearchResult, simulation: Simulation | None, arena: Arena | None = None
) -> list[str]:
    """Return the reasons, most important first; for a question without an answer, what is missing."""
    if simulation is None:
        return _nothing_fits(question, found)
    lines = [*_rounded(question, simulation), _binding(simulation), *_recompute(found, simulation), _peak(simulation)]
    lines += _arena(simulation, arena) if arena else []
    lines += _allocator(simulation)
    lines += [
        *_pipeline(simulation),
        *subsequences(found, simulation),
        *metp(question, found, simulation),
        *balance(question, found),
        *heuristic(question, found),
        *_sharding(simulation),
        *_overlap(question, simulation),
        *_ulysses(simulation),
        *_alpha(found),
        *_partial_swap(found),
        *blocks(found, simulation),
        *_fallback(question, found),
        *runner_up(found),
        *ties(found),
    ]
    outside = simulation.prediction.outside_calibration
    if outside:
        lines.append(
            f"Outside the range that was calibrated: {', '.join(outside)}; treat the figures as extrapolation."
        )
    lines += _profile(question)
    if found.refused:
        those = f"{counted(len(found.refused), 'layout')} {'does' if len(found.refused) == 1 else 'do'}"
        lines.append(f"{those} not divide the model or the sequence, e.g. {found.refused[0]}.")
    return lines


def _rounded(question: Question, simulation: Simulation) -> list[str]:
    """Say when a pinned alpha does not fall on whole row blocks."""
    asked, alpha = question.pins.alpha, simulation.decisions.alpha
    if asked is None or abs(alpha - asked) < EXACT:
        return []
    granule = simulation.decisions.swap_granule
    each = ", as many of every subsequence" if simulation.decisions.layout.subsequences > 1 else ""
    return [f"Alpha {asked:.3g} becomes {alpha:.3g}: tokens are swapped in blocks of {granule}{each}."]


def _profile(question: Question) -> list[str]:
    """Say when the profile was measured while the machine had other things to do."""
    disturbed = question.hardware.provenance.get(DISTURBED)
    if not disturbed:
        return []
    return [f"The profile {question.hardware.name} was measured on a busy machine ({disturbed}): calibrate again."]


def _nothing_fits(question: Question, found: SearchResult) -> list[str]:
    nearest = found.ranked[0]
    if nearest.prediction.status == "invalid":
        return [f"Nothing can be evaluated, e.g. {label(nearest)}: {nearest.prediction.reason}."]
    need = format_bytes(nearest.prediction.shortfall_bytes)
    return [
        f"Nothing fits. Nearest: {label(nearest)}, short of {need}: {nearest.prediction.reason}.",
        f"Ways out: {'; '.join(ways_out(question, nearest))}.",
    ]


def _binding(simulation: Simulation) -> str:
    prediction = simulation.prediction
    step_s = prediction.step_s or 0.0
    compute_s = prediction.lanes.get("compute", 0.0)
    idle_s = step_s - compute_s
    head = f"Compute is busy {compute_s / step_s:.1%} of the step" if step_s else "Nothing is played"
    if idle_s < SLACK * step_s:
        return f"{head}: it binds; copies and communication hide behind it."
    waits = [(s.seconds, s.waits_for) for s in prediction.stalls if s.lane == "compute"]
    listed = ", ".join(f"{name} {format_seconds(seconds)}" for seconds, name in sorted(waits, reverse=True)[:3])
    return f"{head}; it waits {format_seconds(idle_s)} in all, most for {listed}."


def _recompute(found: SearchResult, simulation: Simulation) -> list[str]:
    """Say what part of a busy compute lane is work done twice, and what keeps it from being swapped instead."""
    share, own = simulation.recompute_share, simulation.own_rebuild_share
    if share < SMALLEST_SHARE:
        return []
    why = _why_no_more_is_swapped(found) if share - own >= SMALLEST_SHARE else ""
    metp = f", {own:.1%} METP's own: Q, K, V and the MLP's activations in backward" if own >= SMALLEST_SHARE else ""
    return [
        f"Recompute is {share:.1%} of compute seconds{metp}{': ' if why and not metp else '; ' if why else ''}{why}."
    ]


def _why_no_more_is_swapped(found: SearchResult) -> str:
    """Return why the best plan's alpha is not higher; nothing when it was not the search's choice."""
    best = found.best
    if best is None:
        return ""
    if best.policy.recompute == "selective":
        return "attention runs forward again, which with a flash kernel spares its log-sum-exp alone"
    if best.policy.recompute == "full":
        swapping = [e for e in found.ranked if e.policy == TOKENWISE and e.prediction.status != "ok"]
        same = next((e for e in swapping if e.decisions.layout == best.decisions.layout), None)
        return f"swapping instead does not fit on this layout, {_short(same.prediction)}" if same else ""
    if best.policy.alpha is not None:
        return ""
    if best.above is not None:
        return f"{_memory(best.above)} keeps alpha from being higher, {_short(best.above)} at the next one up"
    return "with a higher alpha copies would hold compute up for longer than recompute does"


def _memory(refused: Prediction) -> str:
    return "host memory" if refused.status == "host_oom" else "device memory"


def _short(refused: Prediction) -> str:
    return f"{refused.status}, short of {format_bytes(refused.shortfall_bytes)}"


def _peak(simulation: Simulation) -> str:
    prediction = simulation.prediction
    by_class = sorted(prediction.peak_by_class.items(), key=lambda item: -item[1])
    listed = ", ".join(f"{name} {format_bytes(size)}" for name, size in by_class)
    memory = simulation.memory
    beside = memory.reserve.get(RESULTS, 0)
    libraries = f" (of which {format_bytes(beside)} {RESULTS})" if beside else ""
    room = (
        f"plus {format_bytes(memory.reserve_bytes)} reserve{libraries}, of {format_bytes(memory.device_capacity_bytes)}"
    )
    peak = f"{format_bytes(prediction.peak_device_bytes)} ({listed})"
    return f"Device memory is fullest at {simulation.peak_id}: {peak}, {room}."


def _arena(simulation: Simulation, arena: Arena) -> list[str]:
    """Say how large the planned arena is, and whether a smaller one can exist."""
    placement = arena.placement
    largest, gap = arena.prediction.peak_device_bytes, placement.arena_bytes - placement.lower_bound_bytes
    elsewhere = arena.whole and largest > placement.arena_bytes
    size = placement.arena_bytes if elsewhere else largest
    proof = "the least there can be" if not gap else f"at most {format_bytes(gap)} above the least there can be"
    text = (
        f"Planned arena: {format_bytes(size)} for {counted(len(placement.ids), 'buffer')}, {proof} ({placement.solver})"
    )
    if len(simulation.stages) > 1:
        text += f"; of {placement.name}, the one that the plan places"
    if elsewhere:
        text += f"; the executor puts the other stages' by first fit, which takes up to {format_bytes(largest)}"
    if not arena.whole:
        text += f"; planned for {simulation.program.micro_batches} micro-batches, too many to write a placement of all"
    return [f"{text}."]


def _pipeline(simulation: Simulation) -> list[str]:
    """Say what stages hand over, and whether their step is exact."""
    layout, count = simulation.decisions.layout, simulation.decisions.micro_batches
    if layout.pp == 1:
        return []
    compute_s = [stage.compute_s for stage in simulation.stages]
    sent = format_bytes(max(stage.sent_bytes for stage in simulation.stages))
    text = (
        f"{layout.pp} stages play {counted(count, 'micro-batch', 'es')} by {layout.schedule}; a rank hands on {sent} "
        f"a step at most, and the slowest stage computes {max(compute_s) / min(compute_s) - 1:.1%} longer than the "
        "fastest"
    )
    if not simulation.steady:
        played = simulation.program.micro_batches
        text += f". They had not come to a period after {played} of them: the step is an estimate at the slowest's pace"
    return [f"{text}."]


def _sharding(simulation: Simulation) -> list[str]:
    """Say what ZeRO 2 and 3 move of parameters and gradients, and what of it compute waits for."""
    layout, moved = simulation.decisions.layout, simulation.collective_bytes
    if layout.zero < 2:
        return []
    if degree(ENDS, layout) == 1:
        return [f"ZeRO {layout.zero} has nothing to divide here: no two ranks hold the same parameters."]
    held = "gradients" if layout.zero == 2 else "gradients and parameters"
    if layout.replicas == 1:
        held += " of embedding and head, which METP has on every rank"
    names = {"params.all_gather": "gathers", "grads.reduce_scatter": "scatters"}
    parts = [f"{verb} {format_bytes(moved[op])}" for op, verb in names.items() if op in moved]
    waited = sum(s.seconds for s in simulation.prediction.stalls if s.lane == "compute" and s.waits_for in names)
    text = f"ZeRO {layout.zero}: a rank holds its share of {held}, {' and '.join(parts)} a step"
    return [f"{text}; compute waits {format_seconds(waited)} for that."]


def _overlap(question: Question, simulation: Simulation) -> list[str]:
    """Say when nothing is there that could overlap as was asked."""
    asked, has = question.pins.overlap, simulation.decisions.overlap
    if asked in (None, has):
        return []
    return [f"Overlap {asked} becomes {has}: no two ranks hold the same parameters, so nothing is reduced or gathered."]


def _ulysses(simulation: Simulation) -> list[str]:
    """Say what Ulysses exchanges, and what of it compute waits for."""
    degree, moved = simulation.decisions.layout.ulysses, simulation.collective_bytes.get("all_to_all", 0)
    if degree == 1:
        return []
    waited = sum(s.seconds for s in simulation.prediction.stalls if (s.lane, s.waits_for) == ("compute", "all_to_all"))
    text = f"Ulysses {degree}: a rank exchanges {format_bytes(moved)} of tokens for heads and back a step"
    return [f"{text}; compute waits {format_seconds(waited)} for that."]


def _allocator(simulation: Simulation) -> list[str]:
    """Say what the caching allocator makes of a plan whose memory is not planned, and what its calls cost."""
    prediction = simulation.prediction
    if prediction.reserved_bytes is None:
        return []
    who = "an eager framework" if simulation.decisions.memory_policy == "eager" else "the caching allocator"
    above = prediction.reserved_bytes / prediction.peak_device_bytes - 1
    often = prediction.allocation_retries / simulation.decisions.micro_batches
    text = (
        f"Memory is not planned: {who} reserves {format_bytes(prediction.reserved_bytes)}, {above:.1%} above the peak"
    )
    times = f"{often:.3g} reorganisations a micro-batch" if often else "it reorganises nothing"
    stalled = sum(s.seconds for s in prediction.stalls if s.waits_for == ALLOCATOR)
    share = (
        f"; its calls hold compute up for {stalled / prediction.step_s:.1%} of the step" if prediction.step_s else ""
    )
    return [f"{text}; {times}{share if stalled else ''}."]


def _alpha(found: SearchResult) -> list[str]:
    """Compare the paper's linear program with the engine's best, for the best token-wise plan."""
    whole = [e for e in found.ranked if e.decisions.layout.subsequences == 1]  # which is what that program is about
    tried = [e for e in whole if e.linear_program and e.prediction.status == "ok"]
    layout = found.best.decisions.layout if found.best else None
    best = next((e for e in tried if e.decisions.layout == layout), tried[0] if tried else None)
    if best is None or best.linear_program is None:
        return []
    program = best.linear_program
    where = layout_label(best.decisions.layout)
    bound = f"bound by {program.binds}; a layer's forward takes {format_seconds(program.layer_forward_s)}"
    rates = f"offload gets {program.bandwidth_bytes_per_s / 1e9:.1f} GB/s"
    full = f"hiding a full swap would need {program.full_overlap_bandwidth / 1e9:.1f} GB/s"
    chosen = f"the engine's best is {best.decisions.alpha:.3g}, MEMO's linear program says {program.alpha:.3g}"
    refused = f"; the next alpha up is refused: {_short(best.above)}" if best.above else ""
    whose = "" if best is found.best else " of the token-wise plan, not of the best one,"
    return [f"Alpha{whose} on {where}: {chosen} ({bound} and {rates}; {full}){refused}."]


def _partial_swap(found: SearchResult) -> list[str]:
    """Say why a plan that keeps what it does not swap swaps as much as it does."""
    best = found.best
    if best is None or best.policy != PARTIAL_SWAP:
        return []
    text = f"Alpha {best.decisions.alpha:.3g} is swapped and the rest kept, nothing is recomputed"
    less = f"; the next alpha down is refused: {_short(best.below)}" if best.below else ""
    more = f"; the next alpha up is refused: {_short(best.above)}" if best.above else ""
    return [f"{text}{less}{more}."]


def _fallback(question: Question, found: SearchResult) -> list[str]:
    """Say when a system's short-sequence fallback was taken."""
    best = found.best
    system = find_system(question.system)
    if best and best.policy == KEEP and KEEP in system.short_sequences:
        return [f"{system.name} falls back to keeping every activation: it fits, and nothing is faster."]
    return []


def plan_title(decisions: Decisions, prediction_step_s: float | None) -> str:
    """Return the one-line heading of a picture."""
    names = {"none": "keep", "full": "full recompute", "selective": "selective recompute", "tokenwise": "token-wise"}
    policy = names[decisions.recompute]
    if decisions.recompute == "full":
        policy = Policy.of(decisions).label
    elif decisions.swapped_tokens:
        swap = "full swap" if decisions.swapped_tokens == decisions.local_tokens else "partial swap"
        policy = f"{swap if decisions.recompute == 'none' else policy} alpha {decisions.alpha:.3g}"
    step = f", step {format_seconds(prediction_step_s)}" if prediction_step_s is not None else ""
    return f"{decisions.model.name}, {decisions.seq_tokens} tokens, {layout_label(decisions.layout)}, {policy}{step}"
