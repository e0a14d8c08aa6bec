"""Answers what binds a plan, what would help most, and why each rival loses.

Sensitivities change one resource at a time. The plan stays as it is, except where more of a resource is only of use to
another plan (memory, a larger micro-batch): then what happens to activations is searched again on the plan's layout.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass, replace
from itertools import combinations, product
from pathlib import Path

import msgspec

from memo_sim.answers.given_plan import GivenPlan, failures_in, of_plan, of_result, read_any
from memo_sim.answers.goodput import changed, goodput_of
from memo_sim.contract import codec
from memo_sim.contract.errors import BadInput, Infeasible, UsageError
from memo_sim.contract.explanation import Explanation, Resource, Rival, Room, Sensitivity, Use
from memo_sim.contract.goodput import Failures
from memo_sim.contract.plan import Decisions, Plan, PlanRow, Prediction
from memo_sim.contract.progress import Progress
from memo_sim.contract.result import Result
from memo_sim.contract.units import format_percent
from memo_sim.engine.fast_loop import run_fast
from memo_sim.engine.simulate import Simulation, simulate
from memo_sim.planning.arena import arena_of
from memo_sim.planning.outcome import Evaluated, SearchResult, ranked_s
from memo_sim.planning.plan_question import question_of_plan, with_open_policy
from memo_sim.planning.presets import Policy
from memo_sim.planning.question import Question
from memo_sim.planning.search import best_with_more_memory, search
from memo_sim.program.ir.instruction import Lane
from memo_sim.reasons.other_machine import MEMORIES, RATES, with_more
from memo_sim.reasons.remedies import ANY_STEP_S, Change, Tried, both, changes, evaluated
from memo_sim.reasons.runner_up import label, loss
from memo_sim.views.plan_table import layout_label

MORE = 1.25
"""How much more of a resource is asked about."""
TWICE = 2
MOST_PAIRS, MOST_IN_PAIRS = 12, 4
"""Pairs of changes that are tried, and topics that they are made of on each side."""
FREED, SLOWER = 0.05, 0.1
"""A change that frees memory frees at least this fraction of the peak, and its step is at most so much longer."""
COMPUTE = Lane.COMPUTE.label
Explained = Plan | Result
KINDS: tuple[type[Explained], ...] = (Plan, Result)


def explain(
    explained: str | Path | Explained, *, cluster: str | None = None, progress: Progress | None = None
) -> Explanation:
    """Return the explanation of a plan, or of the best plan of a result, on ``cluster`` or on the one that it names.

    Rivals of a plan differ from it in one decision: a degree doubled and another one halved, another recompute or
    alpha, ZeRO, states, loss, chunks, micro-batch, overlap or schedule. Rivals of a result are its ranked plans; its
    best plan is changed in the same way. Then the most promising changes are tried in pairs.

    Raises:
        UsageError: when the cluster is not known, or no plan of the result fits.
        BadInput: when the file cannot be read or is no such document, or the plan does not fit the cluster.
    """
    name, document = "the plan", explained
    if isinstance(document, str | Path):
        name, document = str(document), read_any(Path(document), KINDS)
    with codec.of_file(name):
        if isinstance(document, Plan):
            given, system = of_plan(document, name, cluster=cluster), document.provenance.system
            rows = None
        else:
            given, system = of_result(document, name, cluster=cluster), document.system
            rows = document.plans if cluster is None else None
        failures = None if isinstance(document, Plan) else failures_in(document)
        return explain_given(given, system, rows, failures=failures, progress=progress)


def explain_given(
    given: GivenPlan,
    system: str,
    rows: list[PlanRow] | None,
    *,
    failures: Failures | None = None,
    progress: Progress | None = None,
) -> Explanation:
    """Return the explanation of a simulated plan; its rivals are ``rows`` but the first, or differ in one decision.

    With ``failures`` it says what they leave of the plan's speed.

    Raises:
        BadInput: when the plan does not fit.
    """
    explanation = _Explaining(given, system, progress).explanation(rows)
    step_s, tgs = explanation.step_s, explanation.tgs
    goodput = goodput_of(failures, given.decisions, step_s=step_s, tokens_per_device_s=tgs)
    if goodput is None:
        return explanation
    return msgspec.structs.replace(explanation, goodput=goodput, goodput_changes=changed(goodput, step_s))


@dataclass
class _Explaining:
    """One plan, and how far its explanation has come."""

    given: GivenPlan
    system: str
    progress: Progress | None
    done: int = 0
    steps: int = 0

    def explanation(self, rows: list[PlanRow] | None) -> Explanation:
        given, prediction = self.given, self.given.simulation.prediction
        if prediction.step_s is None or prediction.tgs is None:
            raise BadInput(
                f"the plan does not fit {given.cluster.name}",
                got=prediction.reason,
                hint="memo-sim oom --plan PLAN names ways out; or give another --cluster",
            )
        question = question_of_plan(given.decisions, given.cluster, given.hardware, system=self.system)
        single = changes(question, given.decisions, near=True)
        self.steps = len(RATES) + len(MEMORIES) + 3 + len(single) + MOST_PAIRS
        found = self._search(with_open_policy(question))
        best = found.best if found else None
        fixed = [self._with_rate(resource) for resource in RATES]
        searched = [self._with_memory(question, found, resource) for resource in MEMORIES]
        listed = [*fixed, *searched, self._twice_the_batch(), self._twice_the_micro_batch(question, best)]
        known = [each for each in listed if each is not None]
        tried = self._tried(single)
        one_changed = [rival for _, rival in tried]
        two_changed, pairs_tried = self._pairs(question, [each for each, _ in tried])
        return Explanation(
            name=given.name,
            model=given.decisions.model.name,
            cluster=given.cluster.name,
            seq_tokens=given.decisions.seq_tokens,
            plan=label(_evaluated(given.decisions, prediction)),
            decisions=given.decisions,
            step_s=prediction.step_s,
            mfu=prediction.mfu,
            tgs=prediction.tgs,
            uses=uses(given.simulation),
            rooms=rooms(given.simulation, prediction=_placed(given.simulation)),
            searched_step_s=best.prediction.step_s if best else None,
            searched_plan=label(best) if best else "",
            sensitivities=sorted(known, key=lambda each: -(each.gain if each.gain is not None else -1.0)),
            rivals=one_changed if rows is None else _ranked(prediction, rows),
            rivals_are="one decision changed" if rows is None else "ranked plans",
            changed=[] if rows is None else one_changed,
            changes_tried=len(tried),
            pairs=two_changed,
            pairs_tried=pairs_tried,
            notes=[given.note] if given.note else [],
        )

    def _tell(self) -> None:
        self.done += 1
        if self.progress:
            self.progress(self.done, self.steps)

    def _search(self, question: Question) -> SearchResult | None:
        """Return the plans on the same layout; None when the layout goes with no other policy."""
        try:
            return search(question)
        except (Infeasible, UsageError):
            return None
        finally:
            self._tell()

    def _with_rate(self, resource: Resource) -> Sensitivity | None:
        self._tell()
        given = self.given
        machine = with_more(given.cluster, given.hardware, resource, MORE)
        if machine is None:
            return None
        cluster, hardware = machine
        prediction = simulate(given.decisions, hardware, cluster, loop=run_fast).prediction
        return self._sensitivity(
            resource, f"+{format_percent(MORE - 1, 0)}", _evaluated(given.decisions, prediction), "fixed"
        )

    def _with_memory(self, question: Question, before: SearchResult | None, resource: Resource) -> Sensitivity | None:
        self._tell()
        machine = with_more(question.cluster, question.hardware, resource, MORE)
        if machine is None or before is None or before.best is None:
            return None
        cluster, hardware = machine
        asked = with_open_policy(replace(question, cluster=cluster, hardware=hardware))
        best = best_with_more_memory(asked, before)
        if best is None:
            return None
        return self._sensitivity(resource, f"+{format_percent(MORE - 1, 0)}", best, "searched", against=before.best)

    def _twice_the_batch(self) -> Sensitivity:
        self._tell()
        given = self.given
        more = msgspec.structs.replace(given.decisions, global_batch=TWICE * given.decisions.global_batch)
        prediction = simulate(more, given.hardware, given.cluster, loop=run_fast).prediction
        return self._sensitivity("batch", f"x{TWICE}", _evaluated(more, prediction), "fixed")

    def _twice_the_micro_batch(self, question: Question, best: Evaluated | None) -> Sensitivity | None:
        given = self.given
        sizes = {name: TWICE * getattr(given.decisions, name) for name in ("micro_batch", "global_batch")}
        found = self._search(with_open_policy(replace(question, **sizes)))
        if found is None or best is None:
            return None
        return self._sensitivity("micro-batch", f"x{TWICE}", found.ranked[0], "searched", against=best)

    def _sensitivity(
        self, resource: Resource, change: str, one: Evaluated, decisions: str, *, against: Evaluated | None = None
    ) -> Sensitivity:
        before = against.prediction.tgs if against else self.given.simulation.prediction.tgs
        tgs = one.prediction.tgs
        return Sensitivity(
            resource=resource,
            change=change,
            decisions="searched" if decisions == "searched" else "fixed",
            status=one.prediction.status,
            plan=label(one),
            step_s=one.prediction.step_s,
            tgs=tgs,
            gain=tgs / before - 1 if tgs is not None and before else None,
            reason=one.prediction.reason,
        )

    def _tried(self, listed: list[Change]) -> list[tuple[Tried, Rival]]:
        """Return the changes that lead to a plan, each plan once, the fastest first."""
        found = dict[Decisions, tuple[Tried, Rival]]()
        mine = self.given.simulation.prediction
        for change in listed:
            one = evaluated(change, self.given.decisions)
            self._tell()
            if one is not None and one.decisions not in found:
                rival = _rival(mine, one.prediction, plan=label(one), options=change.typed(one.decisions))
                found[one.decisions] = ((change, one), rival)
        return sorted(found.values(), key=lambda pair: pair[0][1].rank_key)

    def _pairs(self, question: Question, tried: list[Tried]) -> tuple[list[Rival], int]:
        """Return the pairs that are faster than the plan and every single change, and how many were tried."""
        given = self.given
        together = [
            change
            for one, other in _promising(given.simulation.prediction, tried)
            for change in both(question, one, other)
        ]
        found = self._tried(together[:MOST_PAIRS])
        to_beat = min(_step_s(given.simulation.prediction), *(_step_s(one.prediction) for _, one in tried), ANY_STEP_S)
        faster = [rival for (_, one), rival in found if ranked_s(_step_s(one.prediction)) < ranked_s(to_beat)]
        return faster, len(found)


def _promising(mine: Prediction, tried: list[Tried]) -> list[tuple[Tried, Tried]]:
    """Return pairs of changes: two that are fast alone, or one that frees memory beside one that needs it.

    ``tried`` has the fastest change first, and those that do not fit last.
    """
    fitting = [each for each in tried if each[1].prediction.step_s is not None]
    faster = [each for each in fitting if _step_s(each[1].prediction) < _step_s(mine)]
    freeing = [
        each
        for each in fitting
        if each[1].prediction.peak_device_bytes < (1 - FREED) * mine.peak_device_bytes
        and _step_s(each[1].prediction) < (1 + SLOWER) * _step_s(mine)
    ]
    needing = [each for each in tried if each[1].prediction.status == "gpu_oom"]
    pairs = [*combinations(_topics(faster), 2), *product(_topics(freeing), _topics(needing))]
    return [(one, other) for one, other in pairs if one[0].topic != other[0].topic]


def _topics(tried: list[Tried]) -> list[Tried]:
    """Return the first change of each of the first topics."""
    found = dict[str, Tried]()
    for each in tried:
        found.setdefault(each[0].topic, each)
    return list(found.values())[:MOST_IN_PAIRS]


def _step_s(prediction: Prediction) -> float:
    return ANY_STEP_S if prediction.step_s is None else prediction.step_s


def _evaluated(decisions: Decisions, prediction: Prediction) -> Evaluated:
    return Evaluated(Policy.of(decisions), decisions, prediction)


def _ranked(mine: Prediction, rows: list[PlanRow]) -> list[Rival]:
    """Return the plans of a result but the best."""
    return [_rival(mine, row, plan=_row_label(row)) for row in rows[1:]]


def _row_label(row: PlanRow) -> str:
    alpha = f" at alpha {row.alpha:.3g}" if 0 < row.alpha < 1 else ""
    return f"{row.system}{alpha} on {layout_label(row.layout)}"


def _rival(mine: Prediction, other: Prediction | PlanRow, *, plan: str, options: str = "") -> Rival:
    lost = loss(mine, other)
    return Rival(
        options=options,
        plan=plan,
        status=other.status,
        step_s=other.step_s,
        slower_s=lost.slower_s if lost else None,
        compute_s=lost.compute_s if lost else None,
        waits_s=lost.waits_s if lost else None,
        waits_for=lost.waits_for if lost else "",
        peak_device_bytes=other.peak_device_bytes,
        peak_host_bytes_per_node=other.peak_host_bytes_per_node,
        shortfall_bytes=other.shortfall_bytes,
    )


def uses(simulation: Simulation) -> list[Use]:
    """Return every lane's busy time of the stage that sets the pace, and what the compute lane waits for it."""
    prediction, program = simulation.prediction, simulation.program
    lane_of: dict[str, str] = {}
    for template in program.templates:
        for instruction in template.instructions:
            host = " on the host" if instruction.lane is Lane.HOST else ""
            if instruction.lane is not Lane.COMPUTE:
                lane_of.setdefault(f"{instruction.op}{host}", instruction.lane.label)
    waits: dict[str, float] = defaultdict(float)
    for stall in prediction.stalls:
        if stall.lane == COMPUTE:
            waits[lane_of.get(stall.waits_for, COMPUTE)] += stall.seconds
    step_s = prediction.step_s or 0.0
    found = [
        Use(lane=lane, busy_s=busy_s, of_step=busy_s / step_s if step_s else 0.0, compute_waits_s=waits.get(lane, 0.0))
        for lane, busy_s in prediction.lanes.items()
    ]
    return sorted(found, key=lambda use: (use.lane != COMPUTE, -use.compute_waits_s, -use.busy_s, use.lane))


def _placed(simulation: Simulation) -> Prediction:
    """Return the prediction with the size of the planned arena, where memory is planned and it fits."""
    if simulation.decisions.memory_policy != "planned":
        return simulation.prediction
    placed = arena_of(simulation).prediction
    return placed if placed.status == "ok" else simulation.prediction


def rooms(simulation: Simulation, *, prediction: Prediction | None = None) -> list[Room]:
    """Return how full a device of the fullest stage is, and the fullest node's host memory.

    ``prediction`` is that of the plan with its arena, where memory is planned.
    """
    prediction, memory = prediction or simulation.prediction, simulation.memory
    held, capacity = prediction.reserved_bytes, memory.device_capacity_bytes
    device = (prediction.peak_device_bytes if held is None else held) + memory.reserve_bytes
    host, there = prediction.peak_host_bytes_per_node, memory.host_capacity_bytes
    return [
        Room(memory="device", needed_bytes=device, live_bytes=memory.device_total_bytes, capacity_bytes=capacity),
        Room(memory="host", needed_bytes=host, live_bytes=host, capacity_bytes=there),
    ]
