"""The placement beside a plan: read, compared with the hash that the plan pins, and checked against its program."""

from __future__ import annotations

from pathlib import Path

from memo_exec.machine.rank_placement import rank_placement
from memo_sim.contract import codec
from memo_sim.contract.errors import BadInput, CannotRun
from memo_sim.contract.placement import Placement
from memo_sim.contract.plan import Plan
from memo_sim.contract.requests import Requests
from memo_sim.program.analysis.columns import expand
from memo_sim.program.analysis.liveness import liveness
from memo_sim.program.arena.check_placement import check_placement
from memo_sim.program.arena.library_workspaces import library_workspaces, without_library
from memo_sim.program.arena.requests import buffer_names, requests_of
from memo_sim.program.ir.program import Program
from memo_sim.program.lower import lower

SHOWN_FAULTS = 3
"""Of a wrong placement, in the message."""


def placement_path(plan_path: Path) -> Path:
    """Return where the placement of a plan lies: ``plan.placement.json`` beside ``plan.json``."""
    return plan_path.with_name(f"{plan_path.stem}.placement.json")


def checked_placement(plan: Plan, program: Program, plan_path: Path) -> Placement | None:
    """Return the placement that a rank of a plan runs in; None when the plan is for the caching allocator.

    ``program`` is the rank's; where the plan's placement was made for another's, it follows from that one.

    Raises:
        CannotRun: when the plan pins none.
        BadInput: when none lies beside it, it is another than the plan pins, or wrong for ``program``.
    """
    if plan.decisions.memory_policy == "eager":
        raise CannotRun(
            "the plan is of another framework: an eager one, whose requests and stalls memo-exec does not have",
            where=f"{plan_path}: $.decisions.memory_policy",
            got="eager",
            wanted="planned or caching",
            hint=f"memo-sim what-if ... --memory-policy caching -o {plan_path}",
        )
    if plan.decisions.memory_policy == "caching":
        return None
    path = placement_path(plan_path)
    if not plan.placement_sha256:
        raise CannotRun(
            "the plan wants planned memory and pins no placement",
            where=f"{plan_path}: $.placement_sha256",
            wanted="the hash of the placement beside it",
            hint=f"make the plan with memo-sim what-if -o {plan_path}, or memory_policy caching",
        )
    if not path.is_file():
        raise BadInput(
            "the plan wants planned memory and its placement is not there",
            where=str(path),
            wanted=f"the placement {plan.placement_sha256[:16]}",
            hint=f"memo-sim plan-memory {plan_path} -o {path}",
        )
    placement = codec.read(path, Placement)
    found = codec.sha256_of(placement)
    if found != plan.placement_sha256:
        raise BadInput(
            "the placement beside the plan is not the one the plan pins",
            where=str(path),
            got=found[:16],
            wanted=plan.placement_sha256[:16],
            hint="make plan and placement again with memo-sim what-if -o",
        )
    made_for = _made_for(plan, program, placement)
    slots = plan.decisions.replay_allocator or has_library_slots(made_for, placement)
    if faults := check_placement(placement, _requests(made_for, slots=slots)):
        more = f" (and {len(faults) - SHOWN_FAULTS} more)" if len(faults) > SHOWN_FAULTS else ""
        raise BadInput(
            "the placement is wrong for the plan's program",
            where=str(path),
            got="; ".join(faults[:SHOWN_FAULTS]) + more,
            wanted="every buffer at an address of its own while it lives",
            hint="make plan and placement again with memo-sim what-if -o",
        )
    if made_for is program:
        return placement
    return rank_placement(placement, _requests(program, slots=slots))


def _made_for(plan: Plan, program: Program, placement: Placement) -> Program:
    """Return the role's program that the placement names; the rank's own where it names none of the plan's."""
    stages = lower(plan.decisions) if placement.program_sha256 != program.sha256 else ()
    return next((stage for stage in stages if stage.sha256 == placement.program_sha256), program)


def has_library_slots(program: Program, placement: Placement) -> bool:
    """Return whether the arena has a slot for what libraries allocate, or they allocate nothing."""
    names = buffer_names(program)
    library = {names[buffer] for buffer in library_workspaces(program)}
    return not library or not library.isdisjoint(placement.ids)


def _requests(program: Program, *, slots: bool) -> Requests:
    """Return what an arena has to hold; libraries' workspaces too where it has ``slots`` for them."""
    columns = expand(program)
    lives = liveness(program, columns)
    if not slots:
        lives = without_library(program, columns, lives)
    return requests_of(program, columns, lives=lives)
