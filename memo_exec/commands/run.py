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
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec
import torch

from memo_exec.commands import compare
from memo_exec.distributed.connections import connect
from memo_exec.distributed.groups import Groups, make_groups
from memo_exec.distributed.mesh import MeshCoordinates
from memo_exec.distributed.world import World, answered, device_of, joined, launched, patience_of, side_by_side
from memo_exec.interpreter.interpreter import Interpreter
from memo_exec.interpreter.record import lane_busy_s, measured_trace
from memo_exec.interpreter.rendezvous import without_waiting
from memo_exec.machine import preflight
from memo_exec.machine.first_calls import play_first_calls
from memo_exec.machine.fp8_products import refuse_fp8
from memo_exec.machine.machine import Machine, this_machine
from memo_exec.machine.memory_budget import Needs, check_memory
from memo_exec.machine.placement_file import checked_placement, refuse_eager
from memo_exec.machine.program_checks import check_programs
from memo_exec.memory.replaying import check_device, use_for_torch
from memo_exec.observe.observed import Observed
from memo_exec.training import checkpoint, peft_folder, run_folder, weights
from memo_exec.training.conversations import Conversations, load_conversations
from memo_exec.training.dataset import Dataset, holds_documents, load_dataset
from memo_exec.training.hyperparameters import Hyperparameters
from memo_exec.training.loop import StepFigure, Training
from memo_exec.training.rollouts import MadeUp, load_rollouts
from memo_sim.contract import codec
from memo_sim.contract.comparison import Comparison, StepFigures
from memo_sim.contract.documents import attended_share, packed
from memo_sim.contract.errors import CannotRun, UsageError
from memo_sim.contract.expert_load import LayerLoad, MeasuredLoad
from memo_sim.contract.files import check_regular
from memo_sim.contract.plan import Decisions, Plan
from memo_sim.contract.trace import Trace
from memo_sim.contract.units import counted, format_percent
from memo_sim.program.ir.program import Program
from memo_sim.program.layout.expert_load import nearest_load, shown_load
from memo_sim.program.layout.token_order import rows_of_a_cut
from memo_sim.program.lower import lower
from memo_sim.views.busy import busy_by

WARM_UPS = 2
"""How many first steps are not measured: they touch memory for the first time, and libraries choose algorithms."""

HYPERPARAMETERS = {
    "lr": "learning_rate",
    "beta1": "beta1",
    "beta2": "beta2",
    "eps": "epsilon",
    "weight_decay": "weight_decay",
    "clip": "clip",
    "warmup_steps": "warmup_steps",
    "decay_steps": "decay_steps",
    "final_fraction": "final_fraction",
    "clip_ratio": "clip_ratio",
    "clip_ratio_high": "clip_ratio_high",
    "kl_weight": "kl_weight",
}
"""Options, and the fields of ``Hyperparameters`` that they set."""

OF_A_POLICY = ("clip_ratio", "clip_ratio_high", "kl_weight")
"""Hyperparameters of a policy's objective."""

LEAST = {"steps": 1, "save_every": 1, "seed": 0}
"""Least values of options that are whole numbers."""

WEIGHTS = "weights"
"""The folder in ``--save`` for the trained weights as Hugging Face files."""
ADAPTERS = "adapters"
"""The folder in ``--save`` for trained adapters, as PEFT reads them."""
SOURCE = "source_config.json"
"""The file in ``--save`` with the config.json of the weights that the run began from."""


@dataclass(frozen=True, kw_only=True)
class RunOptions:
    """The options of a run. ``hyperparameters`` has only those that the user gave, by name."""

    steps: int = 10
    data: Path | None = None
    tokenizer: Path | None = None
    """The folder of the tokenizer that makes tokens of conversations."""
    weights: Path | None = None
    adapters: Path | None = None
    seed: int | None = None
    save: Path | None = None
    save_every: int = 10
    resume: bool = False
    debug: bool = False
    replay_allocator: bool = False
    """Serve libraries from the arena's slots, or replay the addresses of a recorded step without one. CUDA only."""
    hyperparameters: dict[str, Any] = field(default_factory=dict)


def run_options(named: Mapping[str, Any]) -> RunOptions:
    """Return the options of a run by the names of the command line's options, with underscores; None: not given.

    Raises:
        UsageError: when a value is out of range, or ``save_every`` has no folder.
    """
    given = {name: value for name, value in named.items() if value is not None}
    for name, least in LEAST.items():
        value = given.get(name, least)
        if not isinstance(value, int) or isinstance(value, bool) or value < least:
            raise UsageError(f"not a value of {name}", got=repr(value), wanted=f"a whole number from {least}")
    if "save_every" in given and "save" not in given:
        raise UsageError(
            "--save-every needs a folder for the checkpoints",
            got=f"--save-every {given['save_every']}",
            hint="add --save DIR",
        )
    hyperparameters = {HYPERPARAMETERS[name]: value for name, value in given.items() if name in HYPERPARAMETERS}
    try:
        msgspec.convert(hyperparameters, Hyperparameters)
    except msgspec.ValidationError as error:
        raise UsageError("not a value of a hyperparameter", got=str(error)) from None
    chosen = {name: value for name, value in given.items() if name in RunOptions.__dataclass_fields__}
    paths = ("data", "tokenizer", "weights", "adapters", "save")
    chosen |= {name: Path(chosen[name]) for name in paths if name in chosen}
    return RunOptions(hyperparameters=hyperparameters, **chosen)


@dataclass(frozen=True)
class Outcome:
    """The results of a run: the comparison, both timelines, and how the run ended."""

    comparison: Comparison
    measured: Trace
    predicted: Trace | None
    stopped_by: int
    """The number of the signal that ended the run early; 0 when it played all its steps."""
    steps: int
    """How many steps have ended, including those before a resume."""
    expert_load: MeasuredLoad | None
    """The rows of every expert on all ranks, since this run began or was resumed; None for a model without experts."""
    rank: int = 0
    """The rank whose timeline ``measured`` is."""


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
    saved, state = _checkpoint(options, note)
    base = state.hyperparameters if state is not None else Hyperparameters()
    hyperparameters = msgspec.structs.replace(base, **options.hyperparameters)
    dataset = _data(options, plan.decisions, hyperparameters)
    if short := dataset.short_of(plan.decisions.seq_tokens):
        note(short)
    frozen = checkpoint.base_of(options.weights) if plan.decisions.lora is not None else ""
    if saved is not None and state is not None:
        checkpoint.check(state, plan.decisions, dataset.sha256, where=saved)
        _refuse_other_base(frozen, state)
        _refuse_other_seed(options, state)
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
        _refuse_other_checkpoints(world, state)
        if options.save is not None:
            _use_folder(options.save, training, saved, state, open_until_end)
            _keep_source(options, training, resumed=state is not None)
        _begin(training, options, saved, state)
        if options.save is not None and training.step == options.steps:
            _save_weights(training, options, note)
            folder = options.save / _result(plan.decisions)
            note(f"all {options.steps} steps had been played already; the weights are in {folder}")
            return None
        with _signals(training, note):
            training.run(options.steps, save=options.save, save_every=options.save_every, tell=tell)
        if not training.records:
            raise KeyboardInterrupt
        if options.save is not None and not training.stopped_by:
            _save_weights(training, options, note)
        for text in _remarks(training, debug=options.debug):
            note(text)
        return _outcome(training, machine, plan_path, predicted)


def _data(
    options: RunOptions, decisions: Decisions, hyperparameters: Hyperparameters
) -> Dataset | Conversations | MadeUp:
    """Return the data of a run: rollouts of a policy, conversations of a .jsonl file, or windows of a file of tokens.

    Raises:
        BadInput: when it cannot be used.
        UsageError: when options are not for this data or objective.
    """
    if decisions.objective == "grpo":
        return _rollouts(options, decisions, kl=hyperparameters.kl_weight > 0)
    if given := [name for name in OF_A_POLICY if name in options.hyperparameters]:
        raise UsageError(
            f"--{given[0].replace('_', '-')} is for plans with the objective grpo",
            got=f"a plan with the objective {decisions.objective}",
            hint="leave it out, or memo-sim what-if ... --objective grpo",
        )
    pretraining = decisions.documents is not None and options.data is not None and holds_documents(options.data)
    if options.data is not None and options.data.suffix.lower() == ".jsonl" and not pretraining:
        vocab, room = decisions.model.vocab, _room(decisions)
        loaded = load_conversations(options.data, vocab, decisions.seq_tokens, options.tokenizer, room)
        return dataclasses.replace(loaded, multiple=rows_of_a_cut(decisions))
    if options.tokenizer is not None:
        raise UsageError(
            "a tokenizer is for conversations",
            got=f"--tokenizer {options.tokenizer} with {options.data or 'no --data'}",
            wanted="--data FILE.jsonl",
            hint="leave --tokenizer out: other data are tokens already, or bytes",
        )
    return _windows(options.data, decisions)


def _windows(data: Path | None, decisions: Decisions) -> Dataset:
    """Return windows of a file of tokens, or of the included text."""
    multiple = rows_of_a_cut(decisions)
    return load_dataset(data, decisions.model.vocab, decisions.documents, multiple=multiple)


def _room(decisions: Decisions) -> int:
    """Return the most documents of a sequence; 0 where a sequence is one."""
    return decisions.documents.most_pieces(decisions.seq_tokens) if decisions.documents else 0


def _rollouts(options: RunOptions, decisions: Decisions, *, kl: bool) -> Conversations | MadeUp:
    vocab = decisions.model.vocab
    if options.tokenizer is not None:
        raise UsageError(
            "rollouts are tokens already", got=f"--tokenizer {options.tokenizer}", hint="leave --tokenizer out"
        )
    if options.data is None:
        return MadeUp(_windows(None, decisions), vocab)
    if options.data.suffix.lower() != ".jsonl":
        raise UsageError(
            "the objective grpo needs rollouts",
            got=str(options.data),
            wanted="a .jsonl file with prompt_ids, completion_ids, advantage, old_logprobs and ref_logprobs",
            hint="leave --data out for made-up rollouts",
        )
    loaded = load_rollouts(options.data, vocab, decisions.seq_tokens, kl=kl, room=_room(decisions))
    return dataclasses.replace(loaded, multiple=rows_of_a_cut(decisions))


def _check_inputs(options: RunOptions, decisions: Decisions) -> None:
    """Refuse data and weights that are not there, or that the run would replace, before anything is computed.

    Raises:
        BadInput: naming the file.
        UsageError: when the weights stand where the trained ones go, or adapters are given to a plan without.
    """
    save = options.save
    for folder in (options.weights, options.adapters):
        if save and folder and os.path.realpath(folder) == os.path.realpath(save / _result(decisions)):
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


def _use_folder(
    folder: Path, training: Training, saved: Path | None, state: checkpoint.RunState | None, until_end: ExitStack
) -> None:
    """Lock the folder of the checkpoints for this run. Every rank has to call this; the first one holds the lock.

    Raises:
        UsageError: when another run uses it or has just used it, or something there has the name of a checkpoint.
        CannotRun: when another rank has stopped.
    """
    run = state.run if state is not None and state.run else training.run_id

    def lock() -> None:
        until_end.enter_context(run_folder.locked(folder, run))
        if checkpoint.latest(folder) != saved:
            raise UsageError(
                "another run has just written to the --save directory", where=str(folder), hint="start this run again"
            )
        run_folder.check_free(folder, after=state.step if state is not None else 0)

    training.world.by_first(lock)


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
    refuse_fp8(plan.decisions, str(plan_path), "the requests of kernels in FP8 were never observed")
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


def _keep_source(options: RunOptions, training: Training, *, resumed: bool) -> None:
    """Keep the config.json of the weights that a run begins from, for its own weights, also after a resume.

    Raises:
        BadInput: when it cannot be read.
    """
    assert options.save is not None
    kept = options.save / SOURCE

    def keep() -> None:
        if options.weights is not None and not resumed:
            codec.write_bytes(kept, codec.read_raw(options.weights / "config.json"))
        elif not resumed:
            kept.unlink(missing_ok=True)

    training.world.by_first(keep)


def _result(decisions: Decisions) -> str:
    """Return the folder in ``--save`` for what was trained: adapters alone, or all weights."""
    return ADAPTERS if decisions.lora is not None else WEIGHTS


def _save_weights(training: Training, options: RunOptions, note: Callable[[str], None]) -> None:
    """Write the trained weights as Hugging Face files. A model that Hugging Face lacks is only in the checkpoint.

    With several ranks, the first one reads the whole tensors from the last checkpoint.
    """

    def write() -> None:
        interpreter, directory = training.interpreter, options.save
        assert directory is not None
        saved = checkpoint.latest(directory) if training.world.size > 1 else None
        named = checkpoint.parameters(saved, interpreter) if saved is not None else None
        kept = directory / SOURCE
        source = codec.decode_object(codec.read_raw(kept), where=str(kept)) if kept.exists() else None
        folder = directory / _result(interpreter.decisions)
        weights.save(interpreter, folder, named=named, source=source, base=options.weights)

    try:
        training.world.by_first(write)
    except UsageError as error:
        note(f"the weights were not written as Hugging Face files: {error.what}")


def _checkpoint(
    options: RunOptions, note: Callable[[str], None]
) -> tuple[Path, checkpoint.RunState] | tuple[None, None]:
    """Return the checkpoint to resume from and its state, or (None, None) for a new run."""
    if options.save is None:
        if options.resume:
            raise UsageError("--resume needs the folder of the checkpoints", hint="add --save DIR")
        return None, None
    run_folder.check_directory(options.save)
    found = checkpoint.latest(options.save)
    if found is not None and not options.resume:
        raise UsageError(
            "the --save directory has a checkpoint, which a new run would replace",
            where=str(found),
            hint="add --resume to continue from it, or choose another --save directory",
        )
    if found is None:
        if options.resume:
            note(f"there is no checkpoint in {options.save} yet: starting with step 1")
        return None, None
    state = checkpoint.load_run(found)
    note(f"resuming after step {state.step} from {found}")
    return found, state


def _refuse_other_seed(options: RunOptions, state: checkpoint.RunState) -> None:
    if options.seed is not None and options.seed != state.data.seed:
        raise UsageError(
            "a resumed run cannot change its seed",
            got=f"--seed {options.seed}",
            wanted=f"--seed {state.data.seed}",
            hint="leave --seed out",
        )


def _refuse_other_base(frozen: str, state: checkpoint.RunState) -> None:
    """Refuse adapters that were trained on other frozen weights; the seed draws the weights of a run without any."""
    if frozen != state.base:
        given, wanted = (f"a folder of fingerprint {each[:16]}" if each else "none" for each in (frozen, state.base))
        raise UsageError(
            "the checkpoint's adapters were trained on other frozen weights",
            where="--weights",
            got=given,
            wanted=wanted,
            hint="--weights with the folder that the run began from, as it was then",
        )


def _refuse_other_checkpoints(world: World, state: checkpoint.RunState | None) -> None:
    steps = world.gathered(state.step if state is not None else 0)
    if len(set(steps)) > 1:
        raise UsageError(
            "the ranks do not see the same checkpoint",
            got=f"steps {', '.join(map(str, steps))} on ranks 0 to {len(steps) - 1}",
            hint="choose a --save directory on storage that all nodes share",
        )


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


def _remarks(training: Training, *, debug: bool) -> Iterator[str]:
    """Yield what a run says when its last step has been played."""
    interpreter = training.interpreter
    if interpreter.below is not None:
        yield interpreter.below.report().line()
    if interpreter.decisions.model.mixture is not None:
        yield load_of_experts(interpreter)
    if training.overflow is not None:
        yield training.overflow.line()
    if interpreter.decisions.documents is not None and training.records:
        yield documents_of(training)
    if debug:
        steps = counted(len(training.records), "step")
        yield f"debug: {steps} without a fault; the times include the checks, so do not compare them"


def documents_of(training: Training) -> str:
    """Return how many documents sequences had, and which share of a whole sequence's pairs they attended."""
    decisions = training.plan.decisions
    assert decisions.documents is not None
    length, expected = decisions.seq_tokens, packed(decisions.documents, decisions.seq_tokens)
    planned = sum(map(len, expected)) / len(expected)
    share = format_percent(training.attended / (training.sequences * length**2))
    pieces = training.pieces / training.sequences
    wanted = format_percent(attended_share(decisions.documents, length))
    data = training.dataset
    drawn = isinstance(data, MadeUp) or (isinstance(data, Dataset) and data.ends is None)
    source = "lengths drawn from the plan's" if drawn else "the file's"
    return (
        f"documents: {pieces:,.1f} a sequence, {share} of its pairs attended (planned for {planned:,.1f} and {wanted});"
        f" {source}"
    )


def load_of_experts(interpreter: Interpreter) -> str:
    """Return how uneven the load of this rank's experts was, and the option that prices it."""
    experts, loads = interpreter.decisions.model.mixture, interpreter.context.loads.sum(0).tolist()
    assert experts is not None
    fullest = loads[0] * experts.count / sum(loads)
    near, planned = nearest_load(experts, loads), interpreter.decisions.expert_load
    asked = "as planned" if near == planned else f"planned as {shown_load(planned)}; --expert-load {near} prices it"
    whose = " of the first rank" if interpreter.decisions.layout.replicas > 1 else ""
    text = f"experts: a layer's fullest got {fullest:.2f} times the mean of its rows{whose}, nearest to {near}"
    return f"{text} ({asked})"


def measured_load(training: Training) -> MeasuredLoad | None:
    """Return the rows of every expert on all ranks; None for a model without experts. Every rank calls it.

    Tensor-parallel ranks route the same tokens, so the first of them counts.
    """
    interpreter, model = training.interpreter, training.plan.decisions.model
    if model.mixture is None:
        return None
    context, leads = interpreter.context, interpreter.mesh.at("tp") == 0
    own = [each.tolist() if leads else [] for each in (context.rows, context.loads)]
    gathered = [each for each in training.world.gathered(own) if each[0]]
    rows, loads = (torch.tensor([each[which] for each in gathered]).sum(0).tolist() for which in (0, 1))
    return MeasuredLoad(
        model=model.name,
        experts=model.mixture.count,
        per_token=model.mixture.per_token,
        steps=max(1, len(training.records)),
        layers=[
            LayerLoad(layer=number, rows=rows[number], by_fullness=loads[number])
            for number in range(model.layers)
            if sum(rows[number])
        ],
    )


def _outcome(training: Training, machine: Machine, plan_path: Path, predicted: Trace | None) -> Outcome:
    plan, program, world = training.plan, training.interpreter.program, training.world
    record, times_s, steps_measured = training.median_record(WARM_UPS)
    programs = lower(plan.decisions)
    record = without_waiting(record, programs, training.interpreter.mesh, world)
    measured = measured_trace(
        program, record, program_sha256=plan.program_sha256, rank=world.rank, world_size=world.size
    )
    every = world.gathered(
        StepFigures(
            step_s=record.step_s,
            peak_device_bytes=record.peak_device_bytes,
            moved_bytes=record.moved,
            lanes=lane_busy_s(program, record),
            ops=busy_by(measured)[1],
        )
    )
    slowest = times_s.index(max(times_s))
    stage = programs[MeshCoordinates(plan.decisions.layout, slowest).at("pp")] if len(programs) > 1 else None
    trace = compare.predicted_trace(plan_path, plan, slowest)
    peaks = [figures.peak_device_bytes for figures in every]
    comparison = compare.compare(
        compare.figures_of_prediction(plan.prediction, trace, stage),
        msgspec.structs.replace(every[slowest], peak_device_bytes=max(peaks)),
        program_sha256=plan.program_sha256,
        machine=machine_text(machine),
        losses=training.losses,
        grad_norms=training.grad_norms,
        steps_measured=steps_measured,
    )
    if world.size > 1:
        comparison = msgspec.structs.replace(comparison, step_s_by_rank=times_s, peak_device_bytes_by_rank=peaks)
    if (below := training.interpreter.below) is not None:
        comparison = msgspec.structs.replace(comparison, allocator=dataclasses.asdict(below.report()))
    load = measured_load(training)
    return Outcome(comparison, measured, predicted, training.stopped_by, training.step, load, world.rank)


def machine_text(machine: Machine) -> str:
    """Return a short description of the machine and the version of torch."""
    threads = f", {counted(machine.compute_threads, 'compute thread')}" if machine.device == "cpu" else ""
    threads += f", {machine.sharing} ranks" if machine.sharing > 1 else ""
    return f"{machine.name} ({machine.device}{threads}), torch {torch.__version__}"
