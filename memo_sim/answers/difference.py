"""Answers what differs between plans, answers and measured runs: decisions, where the time goes, what fills memory.

A step is divided by what the compute lane does: its operators, and what it waits for. So the shares of a side sum to
its step, and the differences of all shares to the difference of the steps.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

import msgspec

from memo_sim.answers.given_plan import GivenPlan, failures_in, of_plan, of_result, read_any
from memo_sim.answers.goodput import goodput_of
from memo_sim.answers.what_if import beside
from memo_sim.contract import codec
from memo_sim.contract.comparison import Comparison
from memo_sim.contract.difference import Choice, Detail, Difference, Share, Side, SideKind
from memo_sim.contract.errors import BadInput, UsageError
from memo_sim.contract.knobs import KNOBS, Length
from memo_sim.contract.plan import Decisions, Plan, PlanRow, Prediction, Stall
from memo_sim.contract.progress import Progress
from memo_sim.contract.result import Result
from memo_sim.contract.trace import Trace
from memo_sim.contract.units import format_tokens
from memo_sim.engine.simulate import ALLOCATOR, HOST
from memo_sim.views.busy import COMPUTE, busy_by, compute_by_part, compute_waits
from memo_sim.views.difference_table import verdict_line

Document = Plan | Result | Comparison | Trace
Compared = Document | GivenPlan
KINDS: tuple[type[Document], ...] = (Plan, Result, Comparison, Trace)
WAITS = "waits"
IDLE = "not recorded"
"""Cause of a measured wait that the trace does not name."""
OTHER = "other"
"""Group of what the shares of a side lack of its step: rounding, and micro-batches that differ from the played ones."""
KERNELS = "compute"
INSIDE = (ALLOCATOR, HOST)
"""Waits that lie inside the spans of kernels."""
SAME = 1e-9
"""Shares that lack less than this fraction of the step are whole."""


@dataclass(frozen=True)
class _Made:
    """A side, with its compute lane's work and waits in seconds; ``kernels`` by part of the step and operator.

    None where the document does not tell.
    """

    side: Side
    kernels: dict[tuple[str, str], float] | None
    waits: dict[str, float] | None
    operators: dict[str, float] = field(default_factory=dict)
    """Of a comparison: busy seconds of all lanes by operator."""
    notes: tuple[str, ...] = ()


def compare(
    compared: Sequence[str | Path | Compared], *, cluster: str | None = None, progress: Progress | None = None
) -> Difference:
    """Return what differs between two or more plans, results (their best plans), comparisons and traces.

    Paths are read. A plan that was read has its own prediction where its predicted trace lies beside it, and a
    ``GivenPlan`` its simulation. Other plans, and results, are simulated on ``cluster``, or else on the cluster that
    they name.

    Raises:
        UsageError: with fewer than two of them; when a plan has no trace, and its cluster is not a known name.
        BadInput: when a file cannot be read or is no such document.
        Infeasible: when a plan does not fit the cluster.
    """
    if len(compared) < 2:
        raise UsageError("nothing to compare", got=f"{len(compared)} of them", wanted="two or more plans or runs")
    found = []
    for number, one in enumerate(compared, start=1):
        found.append(_made(one, number, cluster))
        if progress:
            progress(number, len(compared))
    detail, seconds = _shares(found)
    sides = _with_decisions([one.side for one in found])
    difference = Difference(
        verdict=[],
        sides=sides,
        decisions=_choices(sides),
        detail=detail,
        groups=_listed({(group, ""): value for group, value in _by_group(seconds).items()}, sides),
        shares=_listed(seconds, sides),
        notes=[*(note for one in found for note in one.notes), *_caveats(sides, detail)],
    )
    return msgspec.structs.replace(
        difference, verdict=[verdict_line(difference, number) for number in range(1, len(sides))]
    )


def _made(one: str | Path | Compared, number: int, cluster: str | None) -> _Made:
    if isinstance(one, GivenPlan):
        return _simulated(one, "result", f"as simulated on {one.cluster.name}")
    path, name = None, f"number {number}"
    document: Document
    if isinstance(one, str | Path):
        path, name = Path(one), str(one)
        document = read_any(path, KINDS)
    else:
        document = one
    with codec.of_file(name):
        match document:
            case Plan():
                return _of_plan(document, name, path, cluster)
            case Result():
                return _of_result(document, name, cluster)
            case Comparison():
                return _of_comparison(document, name)
            case Trace():
                return _of_trace(document, name)


def _of_plan(plan: Plan, name: str, path: Path | None, cluster: str | None) -> _Made:
    """Return a plan with its own prediction and trace, or simulated anew."""
    own = plan.prediction
    if path is not None and cluster is None and own is not None and own.step_s is not None:
        traces = [codec.read(each, Trace) for each in _traces_beside(path, plan)]
        if traces and all(trace.program_sha256 == plan.program_sha256 for trace in traces):
            source = f"its own prediction, for {plan.provenance.cluster or own.hardware}"
            pace = max(traces, key=lambda trace: busy_by(trace)[0].get(COMPUTE, 0.0))
            return _predicted(
                plan.decisions, own, pace, name=name, kind="plan", source=source, cluster=plan.provenance.cluster
            )
    return _simulated(of_plan(plan, name, cluster=cluster), "plan")


def _traces_beside(path: Path, plan: Plan) -> list[Path]:
    """Return the predicted traces of a plan's stages; none when one of them is missing."""
    stages = range(plan.decisions.layout.pp)
    found = [beside(path, f"trace.stage{stage}" if stage else "trace") for stage in stages]
    return found if all(each.is_file() for each in found) else []


def _of_result(result: Result, name: str, cluster: str | None) -> _Made:
    if result.best is not None and result.decisions is None:
        return _of_row(result, result.best, name)
    found = _simulated(of_result(result, name, cluster=cluster), "result")
    side, decisions = found.side, result.decisions
    if decisions is None:
        return found
    goodput = goodput_of(failures_in(result), decisions, step_s=side.step_s, tokens_per_device_s=side.tgs)
    return replace(found, side=msgspec.structs.replace(side, goodput=goodput))


def _of_row(result: Result, best: PlanRow, name: str) -> _Made:
    """Return the best plan of a result that does not hold its decisions: only what its row says."""
    step_s = best.step_s or 0.0
    waits = _by_cause(best.stalls)
    side = Side(
        name=name,
        kind="result",
        origin="predicted",
        source="the row of its best plan (written by an earlier version, without the plan's decisions)",
        cluster=result.cluster,
        step_s=step_s,
        mfu=best.mfu,
        tgs=best.tgs,
        lanes={COMPUTE: step_s - sum(waits.values())},
        peak_device_bytes=best.peak_device_bytes,
        reserved_bytes=best.reserved_bytes,
        peak_host_bytes_per_node=best.peak_host_bytes_per_node,
    )
    return _Made(side, None, waits)


def _simulated(given: GivenPlan, kind: SideKind, source: str = "") -> _Made:
    """Return a plan simulated anew, unless ``source`` says how it was.

    Raises:
        BadInput: when it does not fit.
    """
    simulation = given.simulation
    if simulation.prediction.step_s is None:
        raise BadInput(
            f"the plan does not fit {given.cluster.name}",
            got=simulation.prediction.reason,
            hint="memo-sim oom --plan PLAN names ways out; or give another --cluster",
        )
    found = _predicted(
        given.decisions,
        simulation.prediction,
        simulation.trace(simulation.pace),
        name=given.name,
        kind=kind,
        source=source or f"simulated anew on {given.cluster.name}",
        cluster=given.cluster.name,
    )
    return replace(found, notes=(given.note,) if given.note else ())


def _predicted(
    decisions: Decisions,
    prediction: Prediction,
    trace: Trace,
    *,
    name: str,
    kind: SideKind,
    source: str,
    cluster: str,
) -> _Made:
    waits = {cause: s for cause, s in _by_cause(prediction.stalls).items() if cause not in INSIDE}
    side = Side(
        name=name,
        kind=kind,
        origin="predicted",
        source=source,
        cluster=cluster,
        decisions=decisions,
        program_sha256=trace.program_sha256,
        step_s=prediction.step_s or 0.0,
        mfu=prediction.mfu,
        tgs=prediction.tgs,
        lanes=busy_by(trace)[0],
        peak_device_bytes=prediction.peak_device_bytes,
        reserved_bytes=prediction.reserved_bytes,
        peak_by_class=prediction.peak_by_class,
        peak_host_bytes_per_node=prediction.peak_host_bytes_per_node,
        moved_bytes=prediction.moved_bytes,
    )
    return _Made(side, compute_by_part(trace), waits)


def _by_cause(stalls: Iterable[Stall]) -> dict[str, float]:
    """Return the seconds that the compute lane waits, by what it waits for."""
    found: dict[str, float] = defaultdict(float)
    for stall in stalls:
        if stall.lane == COMPUTE:
            found[stall.waits_for] += stall.seconds
    return dict(found)


def _of_trace(trace: Trace, name: str) -> _Made:
    lanes, _ = busy_by(trace)
    waits = compute_waits(trace)
    idle = trace.step_s - lanes.get(COMPUTE, 0.0) - sum(waits.values())
    if idle > SAME * trace.step_s:
        waits[IDLE] = idle
    peaks = [dict(zip(trace.device_memory.bytes_by_class, column, strict=True)) for column in _columns(trace)]
    peak = max(peaks, key=lambda classes: sum(classes.values()), default={})
    world = f" of {trace.world_size}" if trace.world_size > 1 else ""
    side = Side(
        name=name,
        kind="trace",
        origin=trace.origin,
        source=f"a {trace.origin} trace" + (f" of rank {trace.rank}{world}" if world else ""),
        program_sha256=trace.program_sha256,
        step_s=trace.step_s,
        lanes=lanes,
        peak_device_bytes=sum(peak.values()),
        peak_by_class={key: size for key, size in peak.items() if size},
    )
    return _Made(side, compute_by_part(trace), waits)


def _columns(trace: Trace) -> Iterable[tuple[int, ...]]:
    return zip(*trace.device_memory.bytes_by_class.values(), strict=True)


def _of_comparison(comparison: Comparison, name: str) -> _Made:
    figures = comparison.measured
    steps = "1 step" if comparison.steps_measured == 1 else f"the median of {comparison.steps_measured} steps"
    side = Side(
        name=name,
        kind="comparison",
        origin="measured",
        source=f"measured on {comparison.machine}, {steps}",
        program_sha256=comparison.program_sha256,
        step_s=figures.step_s,
        lanes=figures.lanes,
        peak_device_bytes=figures.peak_device_bytes,
        moved_bytes=figures.moved_bytes,
    )
    return _Made(side, None, None, operators=figures.ops)


Parts = dict[tuple[str, str], list[float]]
"""Seconds of every side, by group and name."""


def _shares(found: Sequence[_Made]) -> tuple[Detail, Parts]:
    """Return the finest division that all sides have, and every side's seconds in it, which sum to its step."""
    known = {op: part for one in found if one.kernels is not None for part, op in one.kernels}
    detail: Detail = "kinds"
    if any(one.kernels is None for one in found):
        named = all(one.kernels is not None or any(op in known for op in one.operators) for one in found)
        detail = "operators" if named else "lanes"
    causes = all(one.waits is not None for one in found)
    parts: Parts = defaultdict(lambda: [0.0] * len(found))
    for number, one in enumerate(found):
        mine = _kernels(one, detail, known)
        mine |= _waits(one, causes=causes)
        rest = one.side.step_s - sum(mine.values())
        if abs(rest) > SAME * one.side.step_s:
            mine[OTHER, ""] = rest
        for key, value in mine.items():
            parts[key][number] = value
    return detail, dict(parts)


def _kernels(one: _Made, detail: Detail, known: Mapping[str, str]) -> dict[tuple[str, str], float]:
    """Return the work of the compute lane; ``known`` has the operators that some side has on that lane."""
    if detail == "lanes":
        return {(KERNELS, ""): one.side.lanes.get(COMPUTE, 0.0)}
    if detail == "kinds":
        return dict(one.kernels or {})
    if one.kernels is None:
        return {(KERNELS, op): seconds for op, seconds in one.operators.items() if op in known}
    found: dict[tuple[str, str], float] = defaultdict(float)
    for (_, op), seconds in one.kernels.items():
        found[KERNELS, op] += seconds
    return dict(found)


def _waits(one: _Made, *, causes: bool) -> dict[tuple[str, str], float]:
    if causes:
        return {(WAITS, cause): seconds for cause, seconds in (one.waits or {}).items()}
    return {(WAITS, ""): one.side.step_s - one.side.lanes.get(COMPUTE, 0.0)}


def _by_group(parts: Parts) -> dict[str, list[float]]:
    found: dict[str, list[float]] = {}
    for (group, _), seconds in parts.items():
        before = found.setdefault(group, [0.0] * len(seconds))
        found[group] = [a + b for a, b in zip(before, seconds, strict=True)]
    return found


def _listed(parts: Mapping[tuple[str, str], list[float]], sides: Sequence[Side]) -> list[Share]:
    """Return the shares, those with the largest differences first."""
    total = [side.step_s - sides[0].step_s for side in sides]
    found = []
    for (group, name), seconds in parts.items():
        differences = [value - seconds[0] for value in seconds]
        differences = [d if abs(d) > SAME * sides[0].step_s else 0.0 for d in differences]
        of = [d / t if abs(t) > SAME * sides[0].step_s else None for d, t in zip(differences, total, strict=True)]
        found.append(Share(group=group, name=name, seconds=seconds, difference_s=differences, of_difference=of))
    return sorted(found, key=lambda s: (-max(map(abs, s.difference_s)), -max(s.seconds), s.group, s.name))


def _with_decisions(sides: list[Side]) -> list[Side]:
    """Return the sides; measured ones have the decisions of a plan of the same program, and so tokens per second."""
    known = {side.program_sha256: side.decisions for side in sides if side.decisions and side.program_sha256}
    return [_with_those(side, known.get(side.program_sha256)) for side in sides]


def _with_those(side: Side, decisions: Decisions | None) -> Side:
    if decisions is None or side.decisions is not None or not side.step_s:
        return side
    tgs = decisions.seq_tokens * decisions.global_batch / (side.step_s * decisions.layout.devices)
    return msgspec.structs.replace(side, decisions=decisions, tgs=tgs)


def _choices(sides: Sequence[Side]) -> list[Choice]:
    """Return the decisions that differ between sides that hold them."""
    known = [side.decisions for side in sides if side.decisions is not None]
    texts = {id(decisions): _values(decisions) for decisions in known}
    found = []
    for option in next(iter(texts.values()), {}):
        if len({texts[id(decisions)][option] for decisions in known}) > 1:
            values = [texts[id(s.decisions)][option] if s.decisions is not None else None for s in sides]
            found.append(Choice(option=option, values=values))
    return found


def _values(decisions: Decisions) -> dict[str, str]:
    """Return every decision as text, by the option that sets it."""
    found = {"MODEL": decisions.model.name, "--seq-len": format_tokens(decisions.seq_tokens)}
    holders = {"layout": decisions.layout, "decisions": decisions, "decisions.kernels": decisions.kernels}
    for knob in KNOBS.values():
        value: object = getattr(holders[knob.at], knob.name)
        if isinstance(value, bool):
            value = "on" if value else "off"
        elif isinstance(knob.kind, Length) and isinstance(value, int):
            value = format_tokens(value)
        elif isinstance(value, float):
            value = f"{value:.4g}"
        elif isinstance(value, tuple):
            value = ",".join(map(str, value)) or "equal"
        found[knob.option] = str(value)
    return found


def _caveats(sides: Sequence[Side], detail: Detail) -> list[str]:
    """Return why the sides compare only in part."""
    found = []
    if len({side.origin for side in sides}) > 1:
        names = {o: ", ".join(s.name for s in sides if s.origin == o) for o in ("predicted", "measured")}
        found.append(f"Predicted: {names['predicted']}; measured: {names['measured']}.")
    programs = {side.program_sha256 for side in sides if side.program_sha256}
    if len(programs) == 1 and all(side.program_sha256 for side in sides):
        found.append("All sides play the same program, so they have the same decisions.")
    elif silent := [side.name for side in sides if side.decisions is None]:
        found.append(f"The decisions of {', '.join(silent)} are not known: the file does not hold them.")
    clusters = {side.cluster for side in sides if side.cluster}
    if len(clusters) > 1:
        found.append(f"The sides are on different clusters: {', '.join(sorted(clusters))}.")
    tokens = {d.seq_tokens * d.global_batch for d in (side.decisions for side in sides) if d is not None}
    devices = {d.layout.devices for d in (side.decisions for side in sides) if d is not None}
    if len(tokens) > 1 or len(devices) > 1:
        found.append("Steps have different numbers of tokens or GPUs: compare tokens per GPU and second.")
    if detail == "operators":
        found.append("A comparison does not say which part of the step an operator belongs to; give a trace for that.")
    if detail == "lanes":
        found.append("One side holds no operators of the compute lane, so only its busy time and its waits compare.")
    return found
