"""A plan that a file or a document gives, simulated again as it was made: on its cluster, under its system.

A plan file and a result name their cluster, and the system under which they were made, because some systems slow
attention. What cannot be known from them is an error that says so.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TypeVar

import msgspec

from memo_sim.contract import codec
from memo_sim.contract.catalog import load_cluster
from memo_sim.contract.cluster import Cluster
from memo_sim.contract.diagnosis import explain_schema
from memo_sim.contract.errors import BadInput, MemoError, UsageError
from memo_sim.contract.goodput import Failures
from memo_sim.contract.hardware import Hardware
from memo_sim.contract.plan import Decisions, Plan
from memo_sim.contract.result import Result
from memo_sim.contract.units import format_seconds
from memo_sim.engine.simulate import Simulation, simulate
from memo_sim.planning.kernels_elsewhere import kernels_elsewhere
from memo_sim.planning.plan_question import question_of_plan
from memo_sim.planning.question import under_system, with_libraries

T = TypeVar("T", bound=msgspec.Struct)
MOVED = 0.001
"""A new simulation that differs by more than this fraction from the file's own step is reported."""


@dataclass(frozen=True)
class GivenPlan:
    """Decisions with the cluster and the profile that they are simulated on; ``note`` says what differs from the file.

    ``hardware`` has the kernels of the plan's year, as slow as its system has them.
    """

    name: str
    decisions: Decisions
    cluster: Cluster
    hardware: Hardware
    simulation: Simulation
    note: str = ""


def failures_in(result: Result) -> Failures | None:
    """Return what the question of a result says of failures; None where it says nothing."""
    goodput = result.summary.goodput if result.summary else None
    return goodput.failures if goodput else None


def read_any(path: Path, kinds: Sequence[type[T]]) -> T:
    """Return the document in a file, of one of ``kinds``, by its schema.

    Raises:
        BadInput: when the file cannot be read, or holds something else.
    """
    raw = codec.read_raw(path)
    schema = codec.schema_of(raw, where=str(path))
    for kind in kinds:
        if schema and schema.partition("/")[0] == str(kind.__struct_config__.tag).partition("/")[0]:
            return codec.decode(raw, kind, where=str(path))
    raise explain_schema(schema, list(kinds), str(path))


def of_plan(plan: Plan, name: str, *, cluster: str | None) -> GivenPlan:
    """Return a plan on ``cluster``, or else on the cluster that it was made for.

    Raises:
        UsageError: when that is not the name of a cluster.
        BadInput: when the plan cannot be simulated there.
    """
    own_s, made = plan.prediction.step_s if plan.prediction else None, plan.provenance
    found = _simulated(
        plan.decisions, cluster or made.cluster, name, system=made.system, made=made.cluster, own_s=own_s
    )
    if cluster or found.note or made.hardware_sha256 in ("", codec.sha256_of(found.hardware)):
        return found
    text = f"{name}: the profile of {found.cluster.name} is not the one that the plan was made with"
    return replace(found, note=f"{text} (another version, or options such as --device-memory-gib and --power-w).")


def of_result(result: Result, name: str, *, cluster: str | None) -> GivenPlan:
    """Return the best plan of a result on ``cluster``, or else on the cluster of the question.

    Raises:
        UsageError: when no plan of it fits, or when its cluster is not the name of one.
        BadInput: when an earlier version has written it, without the plan's decisions.
    """
    best = result.best
    if best is None:
        raise UsageError("no plan of this result fits", where=name, hint="memo-sim oom says why, with the same options")
    if result.decisions is None:
        raise BadInput(
            "this result does not hold the decisions of its plan",
            where=f"{name}: $.decisions",
            got="null: an earlier version of memo has written it",
            hint="ask again with memo-sim what-if --json, or write the plan with -o plan.json",
        )
    named = cluster or result.cluster
    return _simulated(result.decisions, named, name, system=result.system, made=result.cluster, own_s=best.step_s)


def _simulated(
    decisions: Decisions, named: str, name: str, *, system: str, made: str, own_s: float | None
) -> GivenPlan:
    """Return a plan as simulated on a named cluster; a note says where its step is not what its file says.

    A question that names its attention kernel is not slowed by its system, so where the slowed step is not the file's,
    the other one may be.
    """
    cluster, hardware = cluster_of_plan(named, name)
    hardware = with_libraries(hardware, decisions.libraries)
    asked = question_of_plan(decisions, cluster, hardware, system=system)
    asked = replace(asked, pins=replace(asked.pins, rowwise=None))
    decisions, changes = kernels_elsewhere(asked, decisions)
    if changes:
        simulation = simulate(decisions, hardware, cluster)
        text = f"{name} on {cluster.name}: {'; '.join(changes)}."
        return GivenPlan(name, decisions, cluster, hardware, simulation, text)
    profiles = {id(each): each for each in (under_system(hardware, system), hardware)}
    for profile in profiles.values():
        simulation = simulate(decisions, profile, cluster)
        found = GivenPlan(name, decisions, cluster, profile, simulation)
        step_s = simulation.prediction.step_s
        if step_s is None or own_s is None or abs(step_s / own_s - 1) <= MOVED:
            return found
    text = f"{name}: its file says {format_seconds(own_s or 0.0)} a step (for {made or 'a cluster without a name'});"
    note = f"{text} simulated anew on {cluster.name} it is {format_seconds(step_s or 0.0)}."
    return GivenPlan(name, decisions, cluster, profile, simulation, note)


def cluster_of_plan(named: str, name: str) -> tuple[Cluster, Hardware]:
    """Return the cluster that a document names as its own; ``name`` is the document's in messages.

    Raises:
        UsageError: when there is none of that name.
    """
    try:
        if not named:
            raise UsageError("no cluster is named")
        return load_cluster(named)
    except MemoError as error:
        raise UsageError(
            "the cluster to simulate on is not known",
            where=name,
            got=f"{named!r}: {error.what}" if named else "no cluster's name in the file",
            hint="add --cluster NAME, or the path of a cluster's or profile's file, such as memo-exec calibrate wrote",
        ) from None
