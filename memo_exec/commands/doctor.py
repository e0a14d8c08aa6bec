"""Reports what this machine has and can run, and whether a plan is sound.

``report`` lists device, memory, kernels and versions. ``plan_report`` lowers a plan and checks its hash, its programs,
its stages and the placement beside it. Both help a user to find out why a plan does not run.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from memo_exec.distributed.mesh import MeshCoordinates
from memo_exec.distributed.own_program import rank_program
from memo_exec.machine.attention_kernels import attention_kernels, tried_attention_kernels
from memo_exec.machine.machine import Machine, this_machine, versions
from memo_exec.machine.placement_file import checked_placement, placement_path
from memo_exec.machine.preflight import DTYPES, checked_program
from memo_exec.machine.program_checks import Check, program_checks
from memo_exec.machine.rowwise_kernels import tried_rowwise_kernels
from memo_sim.contract import codec
from memo_sim.contract.errors import CannotRun, MemoError
from memo_sim.contract.placement import Placement
from memo_sim.contract.plan import Plan
from memo_sim.contract.units import counted, format_bytes
from memo_sim.views.stage_numbers import from_one

FAULTY = 1
"""Exit code for a program that the checkers refuse: a bug, as of ``MemoError``."""

HEAD_DIMS = (64, 128, 256)
"""Head sizes with which attention kernels are tried."""


def report() -> str:
    """Return the report as text, one fact per line."""
    machine = this_machine()
    lines = [("device", f"{machine.name} ({machine.device}), {machine.devices} visible")]
    if machine.device == "cpu":
        lines.append(("compute threads", f"{machine.compute_threads}, plus one for each copy lane"))
    else:
        free, total = format_bytes(machine.device_free_bytes), format_bytes(machine.device_memory_bytes)
        lines.append(("device memory", f"{free} free of {total}"))
    free, total = format_bytes(machine.host_available_bytes), format_bytes(machine.host_memory_bytes)
    lines.append(("host memory", f"{free} free of {total} (the container's limit counts)"))
    lines.append(("dtypes", ", ".join(DTYPES[machine.device])))
    lines += [(f"attention {name}", text) for name, text in _attention(machine).items()]
    lines += [(f"row-wise {name}", fault or "available") for name, fault in tried_rowwise_kernels(machine).items()]
    lines += list(versions().items())
    return _table(lines)


def plan_report(plan_path: Path) -> tuple[str, int]:
    """Return one line a check of a plan, and the exit code of the first that failed; 0 when all passed.

    Raises:
        BadInput: when the file is no plan.
    """
    plan = codec.read(plan_path, Plan)
    lines: list[tuple[str, str]] = []
    code = 0
    checks: dict[str, Callable[[], list[Check]]] = {
        "hash": lambda: [_hash_check(plan, plan_path)],
        "program": lambda: program_checks(plan.decisions),
        "placement": lambda: _placement_checks(plan, plan_path),
    }
    for name, check in checks.items():
        try:
            found = check()
        except MemoError as error:
            lines.append((name, f"refused: {from_one(_one_line(error))}"))
            code = code or error.exit_code
            if isinstance(error, CannotRun):
                break  # a step that is too long to be lowered
            continue
        lines += [(from_one(each.name), from_one(each.text)) for each in found]
        code = code or (FAULTY if any(each.faults for each in found) else 0)
    return _table(lines), code


def _hash_check(plan: Plan, path: Path) -> Check:
    checked_program(plan, where=str(path))
    return Check("hash", f"the decisions lower to the program {plan.program_sha256[:16]} that the plan pins")


def _placement_checks(plan: Plan, path: Path) -> list[Check]:
    """Check the placement for the first rank of every stage; the file has one stage's, from which the others follow."""
    layout, found = plan.decisions.layout, list[Check]()
    for stage in range(layout.pp):
        rank = next(rank for rank in range(layout.devices) if MeshCoordinates(layout, rank).at("pp") == stage)
        program = rank_program(plan.decisions, MeshCoordinates(layout, rank))
        placement = checked_placement(plan, program, path)
        if placement is None:
            return [Check("placement", "none, torch's caching allocator hands out memory")]
        text = f"{counted(len(placement.ids), 'buffer')} in an arena of {format_bytes(placement.arena_bytes)}"
        whose = ""
        if layout.pp > 1:
            filed = codec.read(placement_path(path), Placement).program_sha256 == placement.program_sha256
            whose = f"stage {stage + 1}{' (in the file)' if filed else ' (made from it)'}: "
        found.append(Check("placement", f"{whose}{text}, none overlap"))
    return found


def _one_line(error: MemoError) -> str:
    details = [f"{label} {value}" for label, value in (("got", error.got), ("wanted", error.wanted)) if value]
    return "; ".join([error.what, *details])


def _table(lines: list[tuple[str, str]]) -> str:
    width = max(len(name) for name, _ in lines)
    return "\n".join(f"{name:<{width}}  {text}" for name, text in lines)


def _attention(machine: Machine) -> dict[str, str]:
    """Return, for each attention kernel, why it is missing, or the head sizes with which it works and fails."""
    missing = attention_kernels(machine)
    found = {}
    for name, faults in tried_attention_kernels(
        machine, "fp32" if machine.device == "cpu" else "bf16", HEAD_DIMS
    ).items():
        works = ", ".join(str(size) for size, fault in faults.items() if not fault)
        wrong = [f"head size {size}: {fault}" for size, fault in faults.items() if fault]
        tried = [f"available with head sizes {works}"] if works else []
        found[name] = missing[name] or "; ".join(tried + wrong)
    return found
