"""Saves and loads checkpoints, so that a run killed at any step can be resumed and has the same losses.

    DIR/step-00000120/state/      parameters, fp32 masters, moments: whole tensors by name, stored as the ranks' shards
    DIR/step-00000120/run.json    step, data position, hyperparameters, losses so far (``memo.checkpoint/2``)

- A checkpoint is written under a temporary name, flushed and then renamed, so a final name means a complete checkpoint.
  Only then are the previous ones of the same run removed (``run_folder``).
- ``run.json`` has the SHA-256 of every stored file and of itself. All are compared before a checkpoint is used.
- A state with a NaN or an infinity is never saved, so it cannot replace a good checkpoint.
- Gradients are not saved, because a step starts by zeroing them. Nor are weights in FP8 alone: they are made again of
  the fp32 masters.
- Of a plan with delayed scaling in FP8, the scales and the largest values of earlier steps are saved too, by layer.
- Of a run that trains adapters, only they are saved. A resumed run reads or draws the frozen weights again, and
  ``base`` tells whether they are the same.
- The stored tensors do not depend on the layout, so a run can resume with another layout (``checkpoint_shards``).
- Ranks on several nodes need a directory that all of them see.
- Checkpoints of older versions can be read. They have no sums (``memo.checkpoint/1``); the oldest, which one process
  wrote, have flat blocks in ``state.safetensors``.
"""

from __future__ import annotations

import hashlib
import os
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated

import msgspec
import torch
from torch import Tensor

from memo_exec.distributed.mesh import MeshCoordinates
from memo_exec.distributed.shards import whole_block, whole_parameters
from memo_exec.distributed.world import World
from memo_exec.interpreter.interpreter import Interpreter
from memo_exec.memory.dtypes import TORCH_DTYPES
from memo_exec.training import run_folder, weights
from memo_exec.training.hyperparameters import Hyperparameters
from memo_exec.training.weights import Held
from memo_sim.contract import codec
from memo_sim.contract.adapters import AdaptersText
from memo_sim.contract.errors import BadInput, UsageError
from memo_sim.contract.knobs import DtypeName, States
from memo_sim.contract.model import Model
from memo_sim.contract.plan import Decisions
from memo_sim.contract.units import Tokens
from memo_sim.program.ir.kinds import BlockKind
from memo_sim.program.layout.fp8 import delayed
from memo_sim.program.layout.stage import stages_of
from memo_sim.program.operators.fp8_operands import HISTORY, SCALES

STATE_DIRECTORY, RUN_FILE = "state", "run.json"
FLAT_FILE = "state.safetensors"
"""The file of checkpoints that one process wrote in versions before layouts."""

STATES = ("params", "master", "moment1", "moment2")
"""The states of buffers that a checkpoint holds."""

FINITE_AT_ONCE = 2**22
"""How many elements are tested at once, because a GPU's memory may be planned to its last GiB."""


ENDS_BYTES = 2**20
"""Bytes at each end of a file of frozen weights that its fingerprint reads."""


class NotFinite(UsageError):
    """The error for a state with a NaN or an infinity, which was not saved."""


class DataPosition(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The file and the seed from which the next batch is drawn. The step is in ``RunState``."""

    file: str
    sha256: str
    seed: int


class RunState(
    msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, tag_field="schema", tag="memo.checkpoint/2"
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
    run: Annotated[str, msgspec.Meta(pattern="^([0-9a-f]{16})?$")] = ""
    """The identifier of the run, which resumed runs keep; part of file names. Empty in checkpoints of version 1."""
    files: dict[str, str] = {}
    """The SHA-256 of every file of the state, by its name. Empty in checkpoints of version 1."""
    identity: str = ""
    """The SHA-256 of this document with this field empty. Empty in checkpoints of version 1."""
    adapters: AdaptersText = "none"
    """The plan's adapters, which alone are stored."""
    base: str = ""
    """Fingerprint of the frozen weights' folder (``base_of``); empty where they were drawn, or none are frozen."""


def state_of(interpreter: Interpreter) -> dict[str, list[Held]]:
    """Return this rank's shards of the states in a checkpoint, by name, such as ``master/layer.3/qkv.weight``."""
    found: dict[str, list[Held]] = {}
    frozen = interpreter.decisions.lora is not None
    for kind in STATES:
        for held in weights.held_by(interpreter, kind):
            if not frozen or weights.is_adapter(held.name):
                found.setdefault(f"{kind}/{held.name}", []).append(held)
    return found | scales_of(interpreter)


def scales_of(interpreter: Interpreter) -> dict[str, list[Held]]:
    """Return the states of delayed scaling of this rank's layers, such as ``fp8_history/layer.3``; none without it.

    Every rank with a layer has all of them, because largest values are reduced over these ranks.
    """
    decisions, found = interpreter.decisions, dict[str, list[Held]]()
    if not delayed(decisions):
        return found
    layers = stages_of(decisions)[interpreter.mesh.at("pp")].layers
    for name in (SCALES, HISTORY):
        whole = interpreter.buffer(name)
        by_layer = whole.view(len(whole), len(layers), -1)
        for number, layer in enumerate(layers):
            view = by_layer[:, number]
            found[f"{name}/layer.{layer}"] = [Held(f"layer.{layer}", tuple(view.shape), (0, 0), view)]
    return found


def base_of(folder: Path | None) -> str:
    """Return a fingerprint of a folder of weights: of its config.json, and of each file's name, size and both ends.

    Empty without a folder.

    Raises:
        BadInput: when it cannot be read.
    """
    if folder is None:
        return ""
    digest = hashlib.sha256(codec.read_raw(folder / "config.json"))
    try:
        for path in sorted(folder.glob("*.safetensors")):
            digest.update(f"{path.name} {path.stat().st_size}".encode())
            with path.open("rb") as file:
                digest.update(file.read(ENDS_BYTES))
                file.seek(max(0, path.stat().st_size - ENDS_BYTES))
                digest.update(file.read(ENDS_BYTES))
    except OSError as error:
        raise BadInput("the weights cannot be read", where=str(folder), got=error.strerror) from None
    return digest.hexdigest()


def save(directory: Path, run: RunState, interpreter: Interpreter, world: World) -> Path:
    """Write a checkpoint atomically, remove the run's older ones, and return its directory.

    Every rank has to call this. ``run`` comes without sums, which are added here.

    Raises:
        UsageError: when it cannot be written to ``directory``.
        NotFinite: when the state has a NaN or an infinity.
        CannotRun: when another rank has stopped.
    """
    from memo_exec.training import checkpoint_shards as stored

    final = run_folder.place_of(directory, run.step)
    state = state_of(interpreter)
    _check_finite(state, world, step=run.step)
    fresh = world.by_first(lambda: run_folder.fresh(directory, run.run))
    try:
        check_shared(fresh, world)
        folder = fresh / STATE_DIRECTORY
        stored.write(folder, _written(state, interpreter.mesh), world)
        sums = _together(world.gathered({path.name: sum_of(path) for path in stored.files_of(folder, world.rank)}))
        world.by_first(lambda: _finish(fresh, final, msgspec.structs.replace(run, files=sums)))
    finally:
        if world.first:
            shutil.rmtree(fresh, ignore_errors=True)
    return final


def _check_finite(state: Mapping[str, list[Held]], world: World, *, step: int) -> None:
    """Refuse a state with a NaN or an infinity on any rank.

    Raises:
        NotFinite: naming the first tensor that has one.
    """
    broken = next((name for name, found in state.items() if not all(_finite(held.view) for held in found)), None)
    names = world.gathered(broken)
    rank = next((rank for rank, name in enumerate(names) if name is not None), None)
    if rank is not None:
        raise NotFinite(
            "the state has a number that is not finite, and was not saved",
            where=f"step {step}, rank {rank}",
            got=f"NaN or infinity in {names[rank]}",
        )


def _finite(values: Tensor) -> bool:
    return all(bool(part.isfinite().all()) for part in torch.split(values.reshape(-1), FINITE_AT_ONCE))


def sum_of(path: Path) -> str:
    """Return the SHA-256 of a file in lower-case hexadecimal.

    Raises:
        BadInput: when it cannot be read.
    """
    try:
        with path.open("rb") as file:
            return hashlib.file_digest(file, "sha256").hexdigest()
    except OSError as error:
        raise BadInput("the checkpoint cannot be read", where=str(path), got=error.strerror) from None


def _together(parts: list[dict[str, str]]) -> dict[str, str]:
    return {name: value for part in parts for name, value in part.items()}


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


def _finish(fresh: Path, final: Path, run: RunState) -> None:
    """Flush a written checkpoint to the disk and give it its final name."""
    try:
        codec.write(fresh / RUN_FILE, msgspec.structs.replace(run, identity=codec.sha256_of(run)))
        for path in (fresh / STATE_DIRECTORY, fresh):
            _flush(path)
        if os.path.lexists(final):  # made since the run began; renaming would replace it if it is an empty folder
            raise UsageError("the checkpoint cannot be written", where=str(final), got="something else has its name")
        fresh.rename(final)
        _flush(final.parent)
    except OSError as error:
        raise _unwritable(final.parent, error) from None
    _remove_before(final, run)


def _unwritable(directory: Path, error: OSError) -> UsageError:
    return UsageError("the checkpoint cannot be written", where=str(directory), got=error.strerror)


def _flush(path: Path) -> None:
    """Flush a file, or the entries of a directory, to the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _remove_before(kept: Path, run: RunState) -> None:
    """Remove the run's own checkpoints before ``kept``."""
    for step, path in run_folder.steps_in(kept.parent).items():
        if step < run.step and _is_checkpoint(path) and _run_of(path) == run.run:
            shutil.rmtree(path, ignore_errors=True)


def _run_of(checkpoint: Path) -> str | None:
    try:
        return codec.read(checkpoint / RUN_FILE, RunState).run
    except BadInput:
        return None


def _is_checkpoint(path: Path) -> bool:
    return run_folder.is_folder(path) and (path / RUN_FILE).is_file()


def latest(directory: Path) -> Path | None:
    """Return the newest complete checkpoint in ``directory``, None when there is none yet. Links are left out."""
    found = {step: path for step, path in run_folder.steps_in(directory).items() if _is_checkpoint(path)}
    return found[max(found)] if found else None


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
        ("adapters", run.adapters, decisions.adapters),
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
        BadInput: when the file cannot be read, or has been changed since it was written.
    """
    path = run_folder.check_plain(checkpoint / RUN_FILE)
    raw = codec.read_raw(path)
    run = codec.decode(raw, RunState, where=str(path))
    if codec.schema_of(raw, where=str(path)) == RunState.__struct_config__.tag:
        own = codec.sha256_of(msgspec.structs.replace(run, identity=""))
        if run.identity != own:
            raise _changed(path, got=own, wanted=run.identity)
    return run


def check_files(checkpoint: Path, run: RunState, world: World) -> None:
    """Compare the stored files with the sums in ``run``; every rank reads a part. Every rank has to call this.

    Raises:
        BadInput: when a file is missing or a link, or has other bytes than were written.
        CannotRun: when another rank has stopped.
    """
    folder, wrong = checkpoint / STATE_DIRECTORY, None
    for name in sorted(run.files)[world.rank :: world.size]:
        try:
            if (got := sum_of(run_folder.check_plain(folder / name))) != run.files[name]:
                wrong = _changed(folder / name, got=got, wanted=run.files[name])
        except BadInput as error:
            wrong = error
        if wrong is not None:
            break
    found = next((error for error in world.gathered(wrong) if error is not None), None)
    if found is not None:
        raise found


def _changed(path: Path, *, got: str, wanted: str) -> BadInput:
    return BadInput(
        "this file of the checkpoint is not the one that was written",
        where=str(path),
        got=f"SHA-256 {got[:16]}…",
        wanted=f"{wanted[:16]}…",
        hint="take the checkpoint from a backup; if the disk is not to blame, another run's file was put here",
    )


def load_state(checkpoint: Path, interpreter: Interpreter, world: World) -> None:
    """Fill this rank's buffers from a checkpoint of any layout, whose files ``check_files`` has accepted.

    With delayed scaling, scales begin anew where a run of another recipe wrote the checkpoint.

    Every rank has to call this.

    Raises:
        BadInput: when the checkpoint is broken, or its tensors are not those of the run.
        CannotRun: when another rank has stopped.
    """
    state, scales = state_of(interpreter), scales_of(interpreter)
    interpreter.weights_changed()
    if (old := checkpoint / FLAT_FILE).is_file():
        own = {name: held for name, held in state.items() if name not in scales}
        _load_flat(old, own, interpreter.decisions.model)
        return
    from memo_exec.training import checkpoint_shards as stored

    if not stored.names(checkpoint / STATE_DIRECTORY) & scales.keys():  # a run of another recipe wrote it
        state = {name: held for name, held in state.items() if name not in scales}
    stored.read(checkpoint / STATE_DIRECTORY, state, world)


def parameters(checkpoint: Path, interpreter: Interpreter) -> dict[str, Tensor]:
    """Return the whole trained parameters of a checkpoint by name. Only one process has to call this.

    Raises:
        BadInput: when the checkpoint is broken.
    """
    from memo_exec.training import checkpoint_shards as stored

    dtype, decisions = TORCH_DTYPES[interpreter.decisions.dtype], interpreter.decisions
    every = whole_parameters(decisions.model, decisions.lora)
    narrow = {name for name in every if weights.in_fp8_alone(decisions, name)}
    found = {
        name: torch.empty(each.shape, dtype=torch.float32 if name in narrow else dtype)
        for name, each in every.items()
        if not each.frozen
    }
    held = {
        f"{'master' if name in narrow else 'params'}/{name}": [Held(name, value.shape, (0,) * value.dim(), value)]
        for name, value in found.items()
    }
    stored.read(checkpoint / STATE_DIRECTORY, held, World())
    return {name: value.to(dtype) for name, value in found.items()}


def _load_flat(path: Path, state: Mapping[str, list[Held]], model: Model) -> None:
    """Fill shards from the flat blocks of a checkpoint that one process wrote (``master.layer/3``)."""
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(path, framework="pt") as file:
            if missing := sorted({_flat_name(name)[0] for name in state} - set(file.keys())):
                raise BadInput("the checkpoint lacks a tensor", where=str(path), wanted=missing[0])
            for name, found in state.items():
                block, kind, parameter = _flat_name(name)
                whole = whole_block(model, kind, int(block.rpartition("/")[2])).find(parameter)
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
