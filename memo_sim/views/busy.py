"""Sums the busy time of a trace: by lane, by operator, and by part of the step.

If a trace has played only some of many identical micro-batches, the spans of the second one are counted for all that
were not played.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator

from memo_sim.contract.trace import Trace
from memo_sim.views.bars import place_of
from memo_sim.views.palette import phase_label

_ONLY, _STEADY = "m0/", "m1/"
"""Prefixes of the ids of the micro-batch that stands for the ones not played: the only one, or the second."""
OTHER_PARTS = {"wgt": "backward", "helper": "helper stages"}
"""Parts of the step whose phases the pictures' legends do not name."""
COMPUTE = "compute"


def busy_by(trace: Trace) -> tuple[dict[str, float], dict[str, float]]:
    """Return the busy seconds by lane and by kind of instruction."""
    lanes: dict[str, float] = defaultdict(float)
    ops: dict[str, float] = defaultdict(float)
    for number, times in _times(trace):
        seconds = (trace.spans.end_s[number] - trace.spans.start_s[number]) * times
        lanes[trace.spans.lanes[number]] += seconds
        ops[trace.spans.ops[number]] += seconds
    return dict(lanes), dict(ops)


def compute_by_part(trace: Trace) -> dict[tuple[str, str], float]:
    """Return the busy seconds of the compute lane by part of the step (forward, recompute, ...) and operator."""
    spans = trace.spans
    found: dict[tuple[str, str], float] = defaultdict(float)
    for number, times in _times(trace):
        if spans.lanes[number] == COMPUTE:
            phase = place_of(spans.ids[number]).phase
            part = OTHER_PARTS.get(phase, phase_label(phase))
            found[part, spans.ops[number]] += (spans.end_s[number] - spans.start_s[number]) * times
    return dict(found)


def compute_waits(trace: Trace) -> dict[str, float]:
    """Return the seconds that the compute lane waits, by the operator that it waits for."""
    spans = trace.spans
    number_of = {name: number for number, name in enumerate(spans.ids)}
    times_of = dict(_times(trace))
    found: dict[str, float] = defaultdict(float)
    for wait in trace.waits:
        number, other = number_of.get(wait.instruction), number_of.get(wait.waits_for)
        if number is not None and spans.lanes[number] == COMPUTE:
            cause = "another stage" if other is None else spans.ops[other]
            found[cause] += wait.seconds * times_of[number]
    return dict(found)


def _times(trace: Trace) -> Iterator[tuple[int, int]]:
    """Yield every span's number, and how often it happens in the whole step."""
    beyond = trace.micro_batches - trace.micro_batches_played
    again = _STEADY if trace.micro_batches_played > 1 else _ONLY
    for number, name in enumerate(trace.spans.ids):
        yield number, 1 + beyond if name.startswith(again) else 1
