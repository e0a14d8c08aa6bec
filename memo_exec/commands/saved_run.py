"""The folder of a run (``--save``): its lock, the checkpoint to resume from, and the trained weights."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path

from memo_exec.commands.run_options import RunOptions
from memo_exec.distributed.world import World
from memo_exec.training import checkpoint, run_folder, weights
from memo_exec.training.loop import Training
from memo_sim.contract import codec
from memo_sim.contract.errors import UsageError
from memo_sim.contract.plan import Decisions

WEIGHTS = "weights"
"""The folder in ``--save`` for the trained weights as Hugging Face files."""
ADAPTERS = "adapters"
"""The folder in ``--save`` for trained adapters, as PEFT reads them."""
SOURCE = "source_config.json"
"""The file in ``--save`` with the config.json of the weights that the run began from."""


def use_folder(
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


def keep_source(options: RunOptions, training: Training, *, resumed: bool) -> None:
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


def result_of(decisions: Decisions) -> str:
    """Return the folder in ``--save`` for what was trained: adapters alone, or all weights."""
    return ADAPTERS if decisions.lora is not None else WEIGHTS


def save_weights(training: Training, options: RunOptions, note: Callable[[str], None]) -> None:
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
        folder = directory / result_of(interpreter.decisions)
        weights.save(interpreter, folder, named=named, source=source, base=options.weights)

    try:
        training.world.by_first(write)
    except UsageError as error:
        note(f"the weights were not written as Hugging Face files: {error.what}")


def checkpoint_of(
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


def refuse_other_seed(options: RunOptions, state: checkpoint.RunState) -> None:
    """Refuse another seed than that of the run that is resumed."""
    if options.seed is not None and options.seed != state.data.seed:
        raise UsageError(
            "a resumed run cannot change its seed",
            got=f"--seed {options.seed}",
            wanted=f"--seed {state.data.seed}",
            hint="leave --seed out",
        )


def refuse_other_base(frozen: str, state: checkpoint.RunState) -> None:
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


def refuse_other_checkpoints(world: World, state: checkpoint.RunState | None) -> None:
    """Refuse to resume where ranks see different checkpoints. Every rank calls it."""
    steps = world.gathered(state.step if state is not None else 0)
    if len(set(steps)) > 1:
        raise UsageError(
            "the ranks do not see the same checkpoint",
            got=f"steps {', '.join(map(str, steps))} on ranks 0 to {len(steps) - 1}",
            hint="choose a --save directory on storage that all nodes share",
        )
