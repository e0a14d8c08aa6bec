"""Where a step goes: seconds of its compute lane by kind of instruction and phase, its waits, and the rest."""

from __future__ import annotations

from collections.abc import Sequence

from memo_sim.contract.trace import Trace
from memo_sim.contract.units import format_percent
from memo_sim.views.bars import place_of, played_s, stalls_of
from memo_sim.views.palette import BUBBLE, OTHER, PHASES, phase_colour, phase_label, wait_colour
from memo_sim.views.report.page import Share, Shares

MOST_KINDS = 12
"""Kinds of instructions with a bar of their own."""
LEAST_SHARE = 0.0005
"""A bar below this fraction of the step would read as 0.0 %."""
BACKWARD = ("bwd", "dgrad", "wgrad")
"""Last parts of operators' names in backward; the colour of a bar says so too."""
IDLE = "idle, without a recorded wait"


def shares_of(trace: Trace) -> Shares:
    """Return how the compute lane's time divides over the step, or over what was played of it."""
    total_s = trace.step_s if trace.micro_batches_played == trace.micro_batches else played_s(trace)
    kinds: dict[str, dict[str, float]] = {}
    spans = trace.spans
    for name, op, lane, start, end in zip(spans.ids, spans.ops, spans.lanes, spans.start_s, spans.end_s, strict=True):
        if lane == "compute" and end > start:
            phases = kinds.setdefault(_kind(op), {})
            phase = place_of(name).phase
            phases[phase] = phases.get(phase, 0.0) + end - start
    busy_s = sum(sum(phases.values()) for phases in kinds.values())
    waits: dict[str, float] = {}
    for stall in stalls_of(trace):
        if stall.lane == "compute":
            waits[stall.waits_for] = waits.get(stall.waits_for, 0.0) + stall.end_s - stall.start_s
    ordered = sorted(kinds, key=lambda kind: -sum(kinds[kind].values()))
    shares = [_share(kind, kinds[kind]) for kind in ordered[:MOST_KINDS]]
    if rest := ordered[MOST_KINDS:]:
        phases = {phase: sum(kinds[kind].get(phase, 0.0) for kind in rest) for phase in PHASES}
        phases["other"] = sum(sum(kinds[kind].values()) for kind in rest) - sum(phases.values())
        shares.append(_share(f"{len(rest)} other kinds", phases))
    shares += [
        Share(_wait_name(lane), [(wait_colour(lane), waits[lane])])
        for lane in sorted(waits, key=lambda lane: -waits[lane])
    ]
    shares.append(Share(IDLE, [(OTHER, max(0.0, total_s - busy_s - sum(waits.values())))]))
    used = {phase for phases in kinds.values() for phase, seconds in phases.items() if seconds}
    legend = {phase_label(phase): phase_colour(phase) for phase in PHASES if phase in used}
    if used.difference(PHASES):
        legend["other"] = OTHER
    kept = [share for share in shares if share.seconds >= LEAST_SHARE * total_s]
    return Shares("compute lane", kept, total_s, list(legend.items()))


def shares_note(trace: Trace, shares: Shares, of: str = "") -> str:
    """Return what the bars are of: the whole step, or the part of it that was played; ``of`` names the stage."""
    part = f"{trace.micro_batches_played} of {trace.micro_batches} micro-batches, which the others repeat"
    played = "The whole step" if trace.micro_batches_played == trace.micro_batches else part
    left = 1 - sum(share.seconds for share in shares.shares) / shares.total_s if shares.total_s else 0.0
    small = (
        f" Kinds below {100 * LEAST_SHARE:g} % are left out, {format_percent(left, 2)} together." if left > 1e-4 else ""
    )
    return f"{played}{f' of {of}' if of else ''}.{small}"


def _share(name: str, phases: dict[str, float]) -> Share:
    """Return a bar of a kind, its phases in the order of the legend."""
    order: Sequence[str] = [*PHASES, *sorted(set(phases).difference(PHASES))]
    return Share(name, [(phase_colour(phase), phases[phase]) for phase in order if phases.get(phase)])


def _kind(op: str) -> str:
    """Return the kind that an operator belongs to: ``attention.bwd`` is attention, ``linear.dgrad`` linear."""
    kind, _, part = op.rpartition(".")
    return (kind if part in BACKWARD else op).replace(".", " ").replace("_", " ")


def _wait_name(lane: str) -> str:
    return lane if lane == BUBBLE else f"waits for {lane}"
