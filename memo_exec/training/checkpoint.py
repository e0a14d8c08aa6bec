"""Saves and loads checkpoints, so that a run killed at any step can be resumed and has the same losses.

    DIR/step-00000120/state/      parameters, fp32 masters, moments: whole tensors by name, stored as the ranks' shards
    DIR/step-00000120/run.json    step, data position, hyperparameters, losses so far (``memo.checkpoint/1``)

- A checkpoint is written under a temporary name, flushed and then renamed, so a final name means a complete checkpoint.
  Only then is the previous one removed.
- Gradients are not saved, because a step starts by zeroing them.
- The stored tensors do not depend on the layout, so a run can resume with another layout (``checkpoint_shards``).
- Ranks on several nodes need a directory that all of them see.
- Checkpoints of older versions, written by one process, have flat blocks in ``state.safetensors``. They can be read.
"""

from __future__ import annotations

import os
import re
import secrets
import shutil
from collections.abc import Mapping
from pathlib import Path

import msgspec
import torch
from torch import Tensor

from memo_exec.distributed.mesh import MeshCoordinates
from memo_exec.distributed.shards import whole_block
from memo_exec.distributed.world import World
from memo_exec.interpreter.interpreter import Interpreter
from memo_exec.memory.dtypes import TORCH_DTYPES
from memo_exec.training import weights
from memo_exec.training.hyperparameters import Hyperparameters
from memo_exec.training.weights import Held
from memo_sim.contract import codec
from memo_sim.contract.errors import BadInput, UsageError
from memo_sim.contract.hardware import DtypeName
from memo_sim.contract.knobs import States
from memo_sim.contract.model import Model
from memo_sim.contract.plan import Decisions
from memo_sim.contract.units import Tokens
from memo_sim.program.ir.kinds import BlockKind

STATE_DIRECTORY, RUN_FILE = "state", "run.json"
FLAT_FILE = "state.safetensors"
"""The file of checkpoints that one process wrote in versions before layouts."""

STATES = ("params", "master", "moment1", "moment2")
"""The states of buffers that a checkpoint holds."""

_NAME = re.compile(r"step-(\d{8,})")
_UNFINISHED = ".unfinished-"


class DataPosition(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The file and the seed from which the next batch is drawn. The step is in ``RunState``."""

    file: str
    sha256: str
    seed: int


class RunState(
    msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, tag_field="schema", tag="memo.checkpoint/1"
):
    """The state of a run without its tensors."""

    step: Tokens
    """How many steps have ended."""
    model: Model
    dtype: DtypeName
    states: States
    seq_tokens: Tokens
    global_batch: Tokens
    hyperparameters: Hyperparameters
    data: DataPosition
    losses: list[float]
    grad_norms: list[float]
    program_sha256: str


def check_directory(directory: Path) -> None:
    """Make the directory of a run's checkpoints before the first step, so that a wrong path fails early.

    Raises:
        UsageError: when it cannot be made or written to.
    """
    try:
        directory.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UsageError("checkpoints cannot be written here", where=str(directory), got=error.strerror) from None
    if not os.access(directory, os.W_OK | os.X_OK):
        raise UsageError("checkpoints cannot be written here", where=str(directory), got="no permission to write")


def state_of(interpreter: Interpreter) -> dict[str, list[Held]]:
    """Return this rank's shards of the states in a checkpoint, by name, such as ``master/layer.3/qkv.weight``."""
    found: dict[str, list[Held]] = {}
    for kind in STATES:
        for held in weights.held_by(interpreter, kind):
            found.setdefault(f"{kind}/{held.name}", []).append(held)
    return found


def save(directory: Path, run: RunState, interpreter: Interpreter, world: World) -> Path:
    """Write a checkpoint atomically, remove the older ones, and return its directory. Every rank has to call this.

    Raises:
        UsageError: when it cannot be written to ``directory``.
        CannotRun: when another rank has stopped.
    """
    from memo_exec.training import checkpoint_shards as stored

    final = directory / f"step-{run.step:08d}"
    if world.by_first(final.exists):
        return final
    fresh = world.by_first(lambda: _made(directory))
    try:
        check_shared(fresh, world)
        stored.write(fresh / STATE_DIRECTORY, _written(state_of(interpreter), interpreter.mesh), world.talk)
        world.by_first(lambda: _finish(fresh, final, run))
    finally:
        if world.first:
            shutil.rmtree(fresh, ignore_errors=True)
    return final


def check_shared(made: Path, world: World) -> None:
    """Refuse a directory that the first rank has made and another rank does not see. Every rank has to call this.

    Without this check each node would keep a part of the checkpoint.

    Raises:
        UsageError: when the nodes do not share the directory.
        CannotRun: when another rank has stopped.
    """
    blind = [rank for rank, seen in enumerate(world.gathered(made.is_dir())) if not seen]
    if blind:
        raise UsageError(
            "the ranks do not share the directory of the checkpoints",
            where=str(made.parent),
            got=f"not seen by rank {', '.join(map(str, blind))}",
            hint="choose a --save directory on storage that all nodes share",
        )


def _written(state: dict[str, list[Held]], place: MeshCoordinates) -> dict[str, list[Held]]:
    """Return the shards that a rank writes. Only the first pipeline stage writes a tied embedding.

    The last stage holds a copy of it, whose ZeRO shares end at other elements.
    """
    if place.at("pp") == 0:
        return state
    return {name: held for name, held in state.items() if "/embed/" not in name}


def _made(directory: Path) -> Path:
    fresh = directory / f"{_UNFINISHED}{secrets.token_hex(8)}"
    try:
        fresh.mkdir(parents=True)
    except OSError as error:
        raise _unwritable(directory, error) from None
    return fresh


def _finish(fresh: Path, final: Path, run: RunState) -> None:
    """Flush a written checkpoint to the disk and give it its final name."""
    try:
        codec.write(fresh / RUN_FILE, run)
        for path in (fresh / STATE_DIRECTORY, fresh):
            _flush(path)
        fresh.rename(final)
        _flush(final.parent)
    except OSError as error:
        raise _unwritable(final.parent, error) from None
    _remove_all_but(final.parent, final)


def _unwritable(directory: Path, error: OSError) -> UsageError:
    return UsageError("the checkpoint cannot be written", where=str(directory), got=error.strerror)


def _flush(path: Path) -> None:
    """Flush a file, or the entries of a directory, to the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _remove_all_but(directory: Path, kept: Path) -> None:
    """Remove the checkpoints before ``kept`` and the unfinished ones of killed runs."""
    for path in directory.iterdir():
        if path == kept or not path.is_dir():
            continue
        if path.name.startswith(_UNFINISHED) or _NAME.fullmatch(path.name):
            shutil.rmtree(path, ignore_errors=True)


def latest(directory: Path) -> Path | None:
    """Return the newest complete checkpoint in ``directory``, None when there is none yet."""
    if not directory.is_dir():
        return None
    found = [path for path in directory.iterdir() if _NAME.fullmatch(path.name) and (path / RUN_FILE).is_file()]
    return max(found, key=lambda path: int(path.name.removeprefix("step-")), default=None)


def check(run: RunState, decisions: Decisions, data_sha256: str, *, where: Path) -> None:
    """Compare a saved run with the run that is to resume from it.

    The model, the dtype, the data and the batch have to be the same. The activation policy and the layout may differ.

    Raises:
        BadInput: for the first field that differs.
    """
    pairs = (
        ("model", run.model, decisions.model),
        ("dtype", run.dtype, decisions.dtype),
        ("states", run.states, decisions.states),
        ("seq_tokens", run.seq_tokens, decisions.seq_tokens),
        ("global_batch", run.global_batch, decisions.global_batch),
        ("data.sha256", run.data.sha256, data_sha256),
    )
    for name, saved, wanted in pairs:
        if saved != wanted:
            shown = (
                (saved.name, wanted.name) if isinstance(saved, Model) and isinstance(wanted, Model) else (saved, wanted)
            )
            raise BadInput(
                "the checkpoint is of another run",
                where=f"{where / RUN_FILE}: $.{name}",
                got=shown[0],
                wanted=shown[1],
                hint="resume with the plan and the data of the saved run, or choose another --save directory",
            )


def load_run(checkpoint: Path) -> RunState:
    """Return the state of the run that wrote a checkpoint.

    Raises:
        BadInput: when the file cannot be read.
    """
    return codec.read(checkpoint / RUN_FILE, RunState)


def load_state(checkpoint: Path, interpreter: Interpreter, world: World) -> None:
    """Fill this rank's buffers from a checkpoint of any layout. Every rank has to call this.

    Raises:
        BadInput: when the checkpoint is broken, or its tensors are not those of the run.
        CannotRun: when another rank has stopped.
    """
    state = state_of(interpreter)
    if (old := checkpoint / FLAT_FILE).is_file():
        _load_flat(old, state, interpreter.decisions.model)
        return
    from memo_exec.training import checkpoint_shards as stored

    stored.read(checkpoint / STATE_DIRECTORY, state, world.talk)


def parameters(checkpoint: Path, interpreter: Interpreter) -> dict[str, Tensor]:
    """Return the whole parameters of a checkpoint by name. Only one process has to call this.

    Raises:
        BadInput: when the checkpoint is broken.
    """
    from memo_exec.training import checkpoint_shards as stored

    dtype, model = TORCH_DTYPES[interpreter.decisions.dtype], interpreter.decisions.model
    found = {}
    for kind in BlockKind:
        for block in [f"layer.{i}" for i in range(model.layers)] if kind is BlockKind.LAYER else [kind]:
            for each in whole_block(model, kind).parameters:
                found[f"{block}/{each.name}"] = torch.empty(each.shape, dtype=dtype)
    held = {f"params/{name}": [Held(name, value.shape, (0,) * value.dim(), value)] for name, value in found.items()}
    stored.read(checkpoint / STATE_DIRECTORY, held, None)
    return found


def _load_flat(path: Path, state: Mapping[str, list[Held]], model: Model) -> None:
    """Fill shards from the flat blocks of a checkpoint that one process wrote (``master.layer/3``)."""
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(path, framework="pt") as file:
            if missing := sorted({_flat_name(name)[0] for name in state} - set(file.keys())):
                raise BadInput("the checkpoint lacks a tensor", where=str(path), wanted=missing[0])
            for name, found in state.items():
                block, kind, parameter = _flat_name(name)
                whole = whole_block(model, kind).find(parameter)
                assert whole is not None, "a rank holds parameters of the model"
                flat = file.get_slice(block)[whole.first : whole.first + whole.elements]
                if (len(flat), flat.dtype) != (whole.elements, found[0].view.dtype):
                    raise BadInput(
                        f"the checkpoint's block {block} has another length or type than the plan's",
                        where=str(path),
                        got=f"{len(flat)} elements of {parameter}, {flat.dtype}",
                        wanted=f"{whole.elements} elements, {found[0].view.dtype}",
                    )
                for held in found:
                    held.view.copy_(held.of(flat.view(whole.shape)))
    except (OSError, SafetensorError) as error:
        raise BadInput("the checkpoint cannot be read", where=str(path), got=str(error)) from None


def _flat_name(name: str) -> tuple[str, BlockKind, str]:
    """Return (flat block, kind of block, parameter) for a name.

    ``master/layer.3/qkv.weight`` gives (``master.layer/3``, ``layer``, ``qkv.weight``).
    """
    state, block, parameter = name.split("/")
    kind, _, number = block.partition(".")
    return f"{state}.{kind}/{number or 0}", BlockKind(kind), parameter
