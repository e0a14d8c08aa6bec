"""Runs a plan, from its file to the comparison with the prediction, for ``memo-exec run`` and ``memo-exec profile``.

read plan -> lower, compare hashes -> with --debug, check programs -> placement -> preflight -> join the other ranks ->
buffers -> weights or checkpoint -> steps -> comparison, traces

Every rank does all of this. Only the first rank prints. The comparison uses the step of the slowest rank.
"""

from __future__ import annotations

import ctypes
import dataclasses
import os
import signal
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import msgspec
import torch

from memo_exec.commands import compare
from memo_exec.commands.run_data import data_of
from memo_exec.commands.run_options import RunOptions
from memo_exec.commands.run_outcome import Outcome, outcome_of, remarks
from memo_exec.commands.saved_run import (
    checkpoint_of,
    keep_source,
    refuse_other_base,
    refuse_other_checkpoints,
    refuse_other_seed,
    result_of,
    save_weights,
    use_folder,
)
from memo_exec.distributed.connections import connect
from memo_exec.distributed.groups import Groups, make_groups
from memo_exec.distributed.mesh import MeshCoordinates
from memo_exec.distributed.world import World, answered, device_of, joined, launched, patience_of, side_by_side
from memo_exec.interpreter.interpreter import Interpreter
from memo_exec.machine import preflight
from memo_exec.machine.first_calls import play_first_calls
from memo_exec.machine.machine import this_machine
from memo_exec.machine.memory_budget import Needs, check_memory
from memo_exec.machine.placement_file import checked_placement, refuse_eager
from memo_exec.machine.program_checks import check_programs
from memo_exec.memory.replaying import check_device, use_for_torch
from memo_exec.observe.observed import Observed
from memo_exec.training import checkpoint, peft_folder, weights
from memo_exec.training.hyperparameters import Hyperparameters
from memo_exec.training.loop import StepFigure, Training
from memo_sim.contract import codec
from memo_sim.contract.errors import CannotRun, UsageError
from memo_sim.contract.files import check_regular
from memo_sim.contract.plan import Decisions, Plan
from memo_sim.program.ir.program import Program
from memo_sim.program.lower import lower


def run(
    plan_path: Path,
    options: RunOptions,
    *,
    tell: Callable[[StepFigure], None] = lambda figure: None,
    note: Callable[[str], None] = lambda text: None,
) -> Outcome | None:
    """Train as a plan says; return None when the checkpoint to resume from had played all steps already.

    The trained weights are written then too, because a run may be killed after its last checkpoint and before them.

    ``tell`` receives the figures of each step and ``note`` other messages, both only on the first rank.

    Raises:
        BadInput: when the plan, data, weights or checkpoint cannot be used.
        CannotRun: when this machine cannot run the plan.
        MemoError: with ``debug``, when the plan's program is faulty.
        UsageError: when options contradict each other or the checkpoint, or another run uses the ``save`` folder.
        KeyboardInterrupt: when a signal came before the first step had ended.
    """
    launch, plan = launched(), codec.read(plan_path, Plan)
    _check_inputs(options, plan.decisions)
    if launch.world > 1:
        side_by_side()
    program = preflight.checked_program(plan, where=str(plan_path), rank=launch.rank)
    refuse_eager(plan, plan_path)  # before the user starts ranks for it
    preflight.check_ranks(plan.decisions, launch)
    if options.debug:
        check_programs(plan.decisions, where=str(plan_path))
    if launch.rank > 0:
        tell, note = (lambda figure: None), (lambda text: None)
    allocator = _replay_allocator() if options.replay_allocator or plan.decisions.replay_allocator else None
    device = device_of(launch, "cuda" if torch.cuda.is_available() else "cpu")
    predicted = compare.predicted_trace(plan_path, plan, launch.rank)
    machine = this_machine(sharing=launch.local_world)
    placement = checked_placement(plan, program, plan_path)
    needs = preflight.check(plan.decisions, program, machine, placement, lent=allocator is not None)
    note(needs.line())
    saved, state = checkpoint_of(options, note)
    base = state.hyperparameters if state is not None else Hyperparameters()
    hyperparameters = msgspec.structs.replace(base, **options.hyperparameters)
    dataset = data_of(options, plan.decisions, hyperparameters)
    if short := dataset.short_of(plan.decisions.seq_tokens):
        note(short)
    frozen = checkpoint.base_of(options.weights) if plan.decisions.lora is not None else ""
    if saved is not None and state is not None:
        checkpoint.check(state, plan.decisions, dataset.sha256, where=saved)
        refuse_other_base(frozen, state)
        refuse_other_seed(options, state)
    seed = state.data.seed if state is not None else options.seed or 0
    with (
        ExitStack() as open_until_end,
        joined(launch, device, patience_s=_patience_s(plan)) as world,
        Interpreter(
            plan.decisions,
            program,
            device=device,
            placement=placement,
            debug=options.debug,
            allocator=allocator,
            rank=world.rank,
            groups=_groups(plan, program, world, device, needs),
            sharing=machine.sharing,
        ) as interpreter,
    ):
        training = Training(
            plan=plan,
            interpreter=interpreter,
            dataset=dataset,
            hyperparameters=hyperparameters,
            seed=seed,
            world=world,
            base=frozen,
        )
        refuse_other_checkpoints(world, state)
        if options.save is not None:
            use_folder(options.save, training, saved, state, open_until_end)
            keep_source(options, training, resumed=state is not None)
        _begin(training, options, saved, state)
        if options.save is not None and training.step == options.steps:
            save_weights(training, options, note)
            folder = options.save / result_of(plan.decisions)
            note(f"all {options.steps} steps had been played already; the weights are in {folder}")
            return None
        with _signals(training, note):
            training.run(options.steps, save=options.save, save_every=options.save_every, tell=tell)
        if not training.records:
            raise KeyboardInterrupt
        if options.save is not None and not training.stopped_by:
            save_weights(training, options, note)
        for text in remarks(training, debug=options.debug):
            note(text)
        return outcome_of(training, machine, plan_path, predicted)


def _check_inputs(options: RunOptions, decisions: Decisions) -> None:
    """Refuse data and weights that are not there, or that the run would replace, before anything is computed.

    Raises:
        BadInput: naming the file.
        UsageError: when the weights stand where the trained ones go, or adapters are given to a plan without.
    """
    save = options.save
    for folder in (options.weights, options.adapters):
        if save and folder and os.path.realpath(folder) == os.path.realpath(save / result_of(decisions)):
            raise UsageError(
                "the trained weights would replace the weights that the run starts from",
                where=str(folder),
                hint="choose another --save directory",
            )
    if options.adapters is not None and decisions.lora is None:
        raise UsageError(
            "the plan trains no adapters",
            where="--adapters",
            got=str(options.adapters),
            hint="plan with memo-sim what-if --lora r=16, or leave --adapters out",
        )
    if (
        options.weights is not None
        and not (options.weights / "config.json").exists()
        and (options.weights / peft_folder.CONFIG).exists()
    ):
        raise UsageError(
            "--weights names a folder of adapters",
            where=str(options.weights),
            hint="--adapters for it, and --weights for the model's own folder",
        )
    config = options.weights / "config.json" if options.weights else None
    for path in (options.data, config, options.adapters / peft_folder.CONFIG if options.adapters else None):
        if path is not None:
            check_regular(path)


def _begin(training: Training, options: RunOptions, saved: Path | None, state: checkpoint.RunState | None) -> None:
    """Give the run its first states: of a checkpoint, of a file of weights, or random ones.

    Raises:
        BadInput: when the checkpoint or the weights cannot be used.
        UsageError: when the checkpoint has played more steps than the run is to have.
    """
    frozen = training.plan.decisions.lora is not None
    resumed = saved is not None and state is not None
    if not resumed or frozen:
        _begin_anew(training, options, adapters=frozen and not resumed)
    if saved is not None and state is not None:
        training.restore(saved, state)
    if training.step > options.steps:
        raise UsageError(
            "the checkpoint has already played more steps",
            where=str(saved),
            got=f"step {training.step}",
            wanted=f"--steps of {training.step} or more (it counts the steps of the whole run)",
        )


def _begin_anew(training: Training, options: RunOptions, *, adapters: bool) -> None:
    """Read or draw the weights that training starts from; ``adapters``: those of a folder too, or drawn ones."""
    interpreter = training.interpreter
    if options.weights is not None:
        weights.load(interpreter, options.weights)
        if adapters:
            weights.initialize(interpreter, training.seed, adapters=True)
    else:
        weights.initialize(interpreter, training.seed)
    if adapters and options.adapters is not None:
        weights.load_adapters(interpreter, options.adapters)


def _groups(plan: Plan, program: Program, world: World, device: torch.device, needs: Needs) -> Groups:
    """Return this rank's process groups, already connected; none when there is one process.

    Raises:
        CannotRun: when another rank has stopped, or too little device memory is left after NCCL has allocated its own.
    """
    if world.size == 1:
        return {}
    groups = connected_groups(plan.decisions, program, world, device, patience_s=_patience_s(plan))
    if device.type == "cuda":
        check_memory(dataclasses.replace(needs, host_bytes=0), this_machine())
    return groups


def connected_groups(
    decisions: Decisions, program: Program, world: World, device: torch.device, *, patience_s: float
) -> Groups:
    """Return the process groups of a rank with ``program``, already connected; on a GPU after its first calls.

    Raises:
        CannotRun: when another rank has stopped.
    """
    programs, mesh = lower(decisions), MeshCoordinates(decisions.layout, world.rank)
    if device.type == "cuda":
        play_first_calls(decisions, program, mesh, device)
    with answered(world.rank, world.size):
        groups = make_groups(programs, mesh, patience_s=patience_s, device=device)
        connect(programs, mesh, groups, device)
    return groups


def _patience_s(plan: Plan) -> float:
    return patience_of(plan.prediction.step_s if plan.prediction else None)


def _replay_allocator() -> ctypes.CDLL:
    """Make torch use our native allocator. Call this before the first use of the device.

    Raises:
        CannotRun: without CUDA, or when the allocator cannot be built.
    """
    from memo_exec.memory.native_library import library, library_path  # only this option needs a compiler

    check_device()
    path = library_path()
    use_for_torch(path)
    return library(path)


def observe(plan_path: Path, note: Callable[[str], None]) -> Observed:
    """Return the memory requests of one step of a plan.

    They are recorded on a GPU if it can run the step alone, otherwise with fake tensors. For a plan with several ranks
    this is the first rank's step.

    Raises:
        BadInput: when the plan cannot be used.
        CannotRun: when the step has too many instructions.
    """
    from memo_exec.observe.fake_player import observe_fake  # imports parts of torch that a run does not need
    from memo_exec.observe.memory_history import observe_cuda

    plan = codec.read(plan_path, Plan)
    program = preflight.checked_program(plan, where=str(plan_path))
    machine = this_machine()
    if machine.device == "cuda" and plan.decisions.layout.devices == 1:
        try:
            preflight.check(plan.decisions, program, machine)
        except CannotRun as error:
            note(f"using fake tensors, because this machine cannot run the step: {error.what}")
        else:
            return observe_cuda(plan.decisions, program)
    return observe_fake(plan.decisions, program)


@contextmanager
def _signals(training: Training, note: Callable[[str], None]) -> Iterator[None]:
    """Let the first SIGINT or SIGTERM end the run after the current step, and a second one end it at once."""

    def ask(number: int, frame: object) -> None:
        del frame
        training.asked = number
        note("the run stops after this step; a second signal (Ctrl-C) stops it at once")
        signal.signal(number, signal.SIG_DFL)

    kinds = (signal.SIGINT, signal.SIGTERM)
    try:
        before = {kind: signal.signal(kind, ask) for kind in kinds}
    except ValueError:  # not in the main thread: the caller handles signals
        yield
        return
    try:
        yield
    finally:
        for kind, handler in before.items():
            signal.signal(kind, handler)
