"""Reads the placement file beside a plan, compares it with the hash in the plan, and checks it against the program."""

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
from memo_sim.program.arena.folded import unfolded
from memo_sim.program.arena.library_workspaces import library_workspaces, without_library
from memo_sim.program.arena.requests import buffer_names, requests_of
from memo_sim.program.ir.program import Program
from memo_sim.program.lower import lower

SHOWN_FAULTS = 3
"""How many faults of a wrong placement the message shows."""


def placement_path(plan_path: Path) -> Path:
    """Return the path of a plan's placement: ``plan.placement.json`` beside ``plan.json``."""
    return plan_path.with_name(f"{plan_path.stem}.placement.json")


def refuse_eager(plan: Plan, plan_path: Path) -> None:
    """Refuse a plan of an eager framework.

    Raises:
        CannotRun: with the option that makes a plan for memo-exec.
    """
    if plan.decisions.memory_policy == "eager":
        raise CannotRun(
            "the plan is for another framework (an eager one), whose memory requests memo-exec does not reproduce",
            where=f"{plan_path}: $.decisions.memory_policy",
            got="eager",
            wanted="planned or caching",
            hint=f"memo-sim what-if ... --memory-policy caching --rowwise torch -o {plan_path}",
        )


def checked_placement(plan: Plan, program: Program, plan_path: Path) -> Placement | None:
    """Return the placement of one rank of a plan; None when the plan uses the caching allocator.

    ``program`` is the rank's program. When the plan's placement was made for another rank's program, the rank's
    placement is derived from it (``rank_placement``).

    Raises:
        CannotRun: when the plan pins no placement, or is of an eager framework.
        BadInput: when the file is missing, has another hash than the plan pins, or is wrong for the program.
    """
    refuse_eager(plan, plan_path)
    if plan.decisions.memory_policy == "caching":
        return None
    path = placement_path(plan_path)
    if not plan.placement_sha256:
        raise CannotRun(
            "the plan uses planned memory but pins no placement",
            where=f"{plan_path}: $.placement_sha256",
            wanted="the hash of the placement beside it",
            hint=f"make the plan with memo-sim what-if -o {plan_path}, or use --memory-policy caching",
        )
    if not path.is_file():
        raise BadInput(
            "the plan uses planned memory, but the file with its placement is missing",
            where=str(path),
            wanted=f"a placement with the hash {plan.placement_sha256[:16]}",
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
    placement = unfolded(placement)
    placed_program = _placed_program(plan, program, placement)
    slots = plan.decisions.replay_allocator or has_library_slots(placed_program, placement)
    if faults := check_placement(placement, _requests(placed_program, slots=slots)):
        more = f" (and {len(faults) - SHOWN_FAULTS} more)" if len(faults) > SHOWN_FAULTS else ""
        raise BadInput(
            "the placement is wrong for the plan's program",
            where=str(path),
            got="; ".join(faults[:SHOWN_FAULTS]) + more,
            wanted="no address shared by two buffers that live at the same time",
            hint="make plan and placement again with memo-sim what-if -o",
        )
    if placed_program is program:
        return placement
    return rank_placement(placement, _requests(program, slots=slots))


def _placed_program(plan: Plan, program: Program, placement: Placement) -> Program:
    """Return the program of the plan's stages that the placement was made for; ``program`` when there is none."""
    stages = lower(plan.decisions) if placement.program_sha256 != program.sha256 else ()
    return next((stage for stage in stages if stage.sha256 == placement.program_sha256), program)


def has_library_slots(program: Program, placement: Placement) -> bool:
    """Return whether the arena has slots for the workspaces of libraries, or the program has no such workspace."""
    names = buffer_names(program)
    library = {names[buffer] for buffer in library_workspaces(program)}
    return not library or not library.isdisjoint(placement.ids)


def _requests(program: Program, *, slots: bool) -> Requests:
    """Return the memory requests that an arena has to serve; with ``slots`` also the workspaces of libraries."""
    columns = expand(program)
    lives = liveness(program, columns)
    if not slots:
        lives = without_library(program, lives)
    return requests_of(program, columns, lives=lives)
