"""A run on disk, so that one killed at any step goes on with the same losses.

    DIR/step-00000120/state.safetensors    parameters, master copies, moments: every buffer of class state, by name
    DIR/step-00000120/run.json             step, data position, hyperparameters, losses so far (``memo.checkpoint/1``)

A checkpoint is written under another name, flushed and then renamed, so what has the final name is whole; the one
before is removed only after that. Gradients are not kept: a step begins by zeroing them.
"""

from __future__ import annotations

import os
import re
import secrets
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from memo_exec.hyperparameters import Hyperparameters
from memo_sim.contract import codec
from memo_sim.contract.errors import BadInput, UsageError
from memo_sim.contract.hardware import DtypeName
from memo_sim.contract.model import Model
from memo_sim.contract.plan import Decisions, States
from memo_sim.contract.units import Tokens

if TYPE_CHECKING:
    from torch import Tensor

STATE_FILE, RUN_FILE = "state.safetensors", "run.json"
_NAME = re.compile(r"step-(\d{8,})")
_UNFINISHED = ".unfinished-"


class DataPosition(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What the next batch is drawn from: the file, and the seed; the step is the run's."""

    file: str
    sha256: str
    seed: int


class RunState(
    msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, tag_field="schema", tag="memo.checkpoint/1"
):
    """Everything of a run but its tensors."""

    step: Tokens
    """Steps that have ended."""
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
    """Make the directory of a run's checkpoints now, rather than find out after the first steps that it cannot be.

    Raises:
        UsageError: when it cannot be made or written to.
    """
    try:
        directory.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UsageError("checkpoints cannot be written there", where=str(directory), got=error.strerror) from None
    if not os.access(directory, os.W_OK | os.X_OK):
        raise UsageError("checkpoints cannot be written there", where=str(directory), got="no permission")


def save(directory: Path, run: RunState, tensors: Mapping[str, Tensor]) -> Path:
    """Write a checkpoint atomically, then remove the older ones; return its directory.

    Raises:
        UsageError: when it cannot be written there.
    """
    from safetensors.torch import save_file

    final = directory / f"step-{run.step:08d}"
    if final.exists():
        return final
    fresh = directory / f"{_UNFINISHED}{secrets.token_hex(8)}"
    try:
        fresh.mkdir(parents=True)
        try:
            save_file(dict(tensors), fresh / STATE_FILE)
            codec.write(fresh / RUN_FILE, run)
            _flush(fresh / STATE_FILE)
            _flush(fresh)
            fresh.rename(final)
            _flush(directory)
        finally:
            shutil.rmtree(fresh, ignore_errors=True)
    except OSError as error:
        raise UsageError("the checkpoint cannot be written", where=str(directory), got=error.strerror) from None
    _remove_all_but(directory, final)
    return final


def _flush(path: Path) -> None:
    """Put a file or a directory's entries on the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _remove_all_but(directory: Path, kept: Path) -> None:
    """Remove the checkpoints before ``kept``, and what killed runs left unfinished."""
    for path in directory.iterdir():
        if path == kept or not path.is_dir():
            continue
        if path.name.startswith(_UNFINISHED) or _NAME.fullmatch(path.name):
            shutil.rmtree(path, ignore_errors=True)


def latest(directory: Path) -> Path | None:
    """Return the newest checkpoint in ``directory``, None when there is none yet."""
    if not directory.is_dir():
        return None
    found = [path for path in directory.iterdir() if _NAME.fullmatch(path.name) and (path / RUN_FILE).is_file()]
    return max(found, key=lambda path: int(path.name.removeprefix("step-")), default=None)


def check(run: RunState, decisions: Decisions, data_sha256: str, *, where: Path) -> None:
    """Compare a saved run with what is to go on; how tensors are swapped may differ, what is trained may not.

    Raises:
        BadInput: naming what differs.
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
                hint="resume with the plan and data it was made with, or choose another --save directory",
            )


def load_run(checkpoint: Path) -> RunState:
    """Return what a checkpoint says of its run.

    Raises:
        BadInput: when the file cannot be read.
    """
    return codec.read(checkpoint / RUN_FILE, RunState)


def load_tensors(checkpoint: Path, into: Mapping[str, Tensor]) -> None:
    """Copy the saved tensors into a run's buffers.

    Raises:
        BadInput: when the file is broken, or holds other tensors than the run has.
    """
    import torch
    from safetensors import SafetensorError, safe_open

    path = checkpoint / STATE_FILE
    try:
        with safe_open(path, framework="pt") as file, torch.inference_mode():
            saved = set(file.keys())
            if saved != set(into):
                odd = sorted(saved ^ set(into))
                raise BadInput("the checkpoint holds other tensors than the plan has", where=str(path), got=odd[0])
            for name, target in into.items():
                source = file.get_tensor(name)
                if source.shape != target.shape or source.dtype != target.dtype:
                    raise BadInput(
                        f"{name} has another shape or type than the plan's",
                        where=str(path),
                        got=f"{tuple(source.shape)} {source.dtype}",
                        wanted=f"{tuple(target.shape)} {target.dtype}",
                    )
                target.copy_(source)
    except (OSError, SafetensorError) as error:
        raise BadInput("the checkpoint cannot be read", where=str(path), got=str(error)) from None
