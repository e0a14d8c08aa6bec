"""Verifies a plan for ``memo-exec verify``: its programs at full size, its gradients at a size that this machine plays.

Without torchrun a plan of several ranks is played by processes that this one starts on the CPU. Under torchrun every
rank plays its part, over NCCL on GPUs. A CPU computes in fp32, a GPU in the plan's dtype with the plan's kernels.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
import torch

from memo_exec.commands.run import connected_groups
from memo_exec.commands.run_outcome import machine_text
from memo_exec.commands.verify_bounds import BOUNDS
from memo_exec.distributed.mesh import MeshCoordinates
from memo_exec.distributed.own_program import rank_program
from memo_exec.distributed.world import PATIENCE_S, Launch, World, device_of, joined, launched, side_by_side
from memo_exec.machine import preflight
from memo_exec.machine.machine import this_machine
from memo_exec.machine.program_checks import program_checks
from memo_exec.verification.play import Play, Played
from memo_exec.verification.reduction import MOST_RANKS, reduced
from memo_exec.verification.verify import CPU_ATTENTION, judge, play_here, plays_of
from memo_sim.contract import codec
from memo_sim.contract.errors import CannotRun, Infeasible, UsageError
from memo_sim.contract.plan import Decisions, Plan
from memo_sim.contract.units import counted
from memo_sim.contract.verdict import CheckResult, Verdict
from memo_sim.program.layout.heads import have_unequal_shares
from memo_sim.program.lower import lower

MOST_INSTRUCTIONS = 500_000
"""Instructions that the checkers read, over all ranks with programs of their own: some twenty seconds."""

DIFFERS, FAULTY = 5, 1
"""Exit codes: of ``OutOfTolerance`` for a difference, as ``doctor`` for a faulty program (a bug)."""

CHECKED_LAYERS = 4
"""Layers of a run in the largest program that is checked when the whole plan has too many instructions."""


@dataclass(frozen=True, kw_only=True)
class VerifyOptions:
    """The options of ``memo-exec verify``."""

    device: str | None = None
    """``cpu`` or ``cuda``; None: the GPU for a plan of one rank and under torchrun, if the plan is for GPUs."""
    seed: int = 0
    steps: int = 1
    layers: int = 0


def verify_options(named: Mapping[str, Any]) -> VerifyOptions:
    """Return the options by the names of the command line's; None: not given.

    Raises:
        UsageError: when a value is out of range.
    """
    given = {name: value for name, value in named.items() if value is not None}
    for name, (least, most) in BOUNDS.items():
        if not least <= given.get(name, least) <= most:
            raise UsageError(f"not a value of {name}", got=given[name], wanted=f"a whole number from {least} to {most}")
    return VerifyOptions(**given)


def verify_plan(
    path: Path, options: VerifyOptions, *, note: Callable[[str], None] = lambda text: None
) -> Verdict | None:
    """Return the verdict on a plan; None on every rank but the first.

    ``note`` gets a line before each part of the work.

    Raises:
        BadInput: when the plan cannot be read, or is not what it pins.
        CannotRun: when it cannot be reduced, or this machine cannot play it.
    """
    began = time.perf_counter()
    launch, plan = launched(), codec.read(path, Plan)
    preflight.checked_program(plan, where=str(path))
    kind = _device(plan.decisions, options, launch)
    if launch.world > 1:
        side_by_side()  # before CUDA starts
    device = device_of(launch, kind)
    here = _reduced(plan.decisions, options, kind, launch)
    plays = plays_of(here, seed=options.seed, steps=options.steps)
    machine = machine_text(this_machine(sharing=launch.local_world)) if kind == "cuda" else _cpu_text()
    if launch.rank == 0:
        ranks = counted(here.layout.devices, "rank")
        note(f"playing the plan at a reduced size, then keep-everything, on {ranks} ({kind})")
    if launch.world == 1:
        played = play_here(plays) if kind == "cpu" else _play_on_gpu(plays)
    else:
        with joined(launch, device) as world:
            found = _play_as_rank(plays, world, device, launch)
        if found is None:
            return None
        played = found
    note(f"{time.perf_counter() - began:.0f} s: checking the programs at full size")
    checks = full_size_checks(plan.decisions)
    note(f"{time.perf_counter() - began:.0f} s: comparing with keep-everything and plain autograd")
    verdict = judge(plan.decisions, plays, played, checks=checks, machine=machine)
    return msgspec.structs.replace(verdict, seconds=time.perf_counter() - began)


def exit_code(verdict: Verdict) -> int:
    """Return 0 for a verified plan, 5 for a difference, and 1 where only a check of its programs found a fault."""
    if verdict.verified:
        return 0
    differs = not all(each.fine for against in verdict.against for each in against.compared)
    return DIFFERS if differs else FAULTY


def full_size_checks(decisions: Decisions) -> list[CheckResult]:
    """Run the checkers of programs over a plan at full size, and return what they say.

    A plan with very many instructions is checked with fewer micro-batches, then also with fewer layers; its ranks,
    tokens and widths stay. The first result says so.
    """
    layout = decisions.layout
    runs = layout.pp * layout.virtual_stages
    group = decisions.micro_batch * layout.dp
    few = min(decisions.micro_batches, 2 * layout.pp)
    fewer = msgspec.structs.replace(decisions, global_batch=few * group)
    short = min(decisions.model.layers, CHECKED_LAYERS * runs)
    smaller = msgspec.structs.replace(
        fewer,
        model=decisions.model.of_layers([decisions.model.layer(number) for number in range(short)]),
        layout=msgspec.structs.replace(layout, pp_layers=()),
    )
    batches = f"{few} of {counted(decisions.micro_batches, 'micro-batch', 'es')}"
    for chosen, note in (
        (decisions, ""),
        (fewer, f"{batches}; the plan has too many instructions for the checkers"),
        (smaller, f"{batches} and {short} of {decisions.model.layers} layers; the plan has too many instructions"),
    ):
        try:
            instructions = _instructions(chosen)
        except Infeasible:  # the smaller form need not divide as the plan does
            continue
        if instructions <= MOST_INSTRUCTIONS:
            said = [CheckResult(name="checked with", fine=True, text=note)] if note else []
            return said + [
                CheckResult(name=check.name, fine=not check.faults, text=check.text) for check in program_checks(chosen)
            ]
    text = "too many instructions for the checkers; memo-exec doctor PLAN checks them, which takes minutes and memory"
    return [CheckResult(name="not checked", fine=True, text=text)]


def _instructions(decisions: Decisions) -> int:
    """Return the number of instructions of all ranks whose programs differ."""
    layout = decisions.layout
    others = layout.tp if layout.tp_overlap == "chunked" else 1
    uneven = 2 if have_unequal_shares(decisions.model, layout) else 1
    return sum(program.instruction_count for program in lower(decisions)) * layout.ring * others * uneven


def _device(decisions: Decisions, options: VerifyOptions, launch: Launch) -> str:
    if options.device == "cuda" and not torch.cuda.is_available():
        raise CannotRun("this machine has no GPU that torch can use", where="--device", got="cuda", hint="--device cpu")
    if options.device is not None:
        return options.device
    fits = launch.world > 1 or decisions.layout.devices == 1
    for_gpus = decisions.kernels.attention != CPU_ATTENTION
    return "cuda" if fits and for_gpus and torch.cuda.is_available() else "cpu"


def _reduced(decisions: Decisions, options: VerifyOptions, kind: str, launch: Launch) -> Decisions:
    """Return the reduced plan, and refuse another number of processes than it has ranks.

    Raises:
        CannotRun: when it cannot be reduced, its ranks are not those of torchrun, or the GPU lacks its kernels.
    """
    most = max(MOST_RANKS, launch.world)
    if kind == "cpu":
        here = reduced(decisions, layers=options.layers, attention=CPU_ATTENTION, most_ranks=most)
    else:
        here = reduced(decisions, layers=options.layers, dtype=decisions.dtype, most_ranks=most)
    ranks = here.layout.devices
    if ranks != launch.world and (launch.world > 1 or kind == "cuda"):
        raise CannotRun(
            f"the reduced plan has {counted(ranks, 'rank')}",
            where="$.decisions.layout",
            got=counted(launch.world, "process", "es"),
            wanted=ranks,
            hint=f"torchrun --nproc_per_node {ranks} -m memo_exec verify PLAN, or --device cpu without torchrun",
        )
    if kind == "cuda":
        program = rank_program(here, MeshCoordinates(here.layout, launch.rank))
        try:
            preflight.check(here, program, this_machine(sharing=launch.local_world))
        except CannotRun as error:
            hint = "--device cpu plays the plan in fp32 with torch's own kernels"
            raise CannotRun(error.what, where=error.where, got=error.got, wanted=error.wanted, hint=hint) from None
    return here


def _play_on_gpu(plays: Sequence[Play]) -> list[list[Played]]:
    return [[play.on(0, {}, "cuda")] for play in plays]


def _play_as_rank(
    plays: Sequence[Play], world: World, device: torch.device, launch: Launch
) -> list[list[Played]] | None:
    """Play this rank's part of every play; return the results of all ranks on the first one, None on the others."""
    own = []
    for play in plays:
        program = rank_program(play.decisions, MeshCoordinates(play.decisions.layout, world.rank))
        groups = connected_groups(play.decisions, program, world, device, patience_s=PATIENCE_S)
        own.append(play.on(world.rank, groups, device, sharing=launch.local_world))
    by_rank = world.gathered(own)
    return [list(each) for each in zip(*by_rank, strict=True)] if world.first else None


def _cpu_text() -> str:
    from memo_exec.machine.machine import cpu_name

    return f"{cpu_name()} (cpu), torch {torch.__version__}"
