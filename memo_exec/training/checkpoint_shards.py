"""Writes and reads the tensors of a checkpoint with torch.distributed.checkpoint, so that any layout can load them.

The checkpoint holds whole tensors by name. Each rank has shards of them, which are rectangles.

- A rank writes its own rectangles. When several ranks hold the same rectangle, one of them writes it.
- A rank reads its own rectangles from all stored rectangles that overlap them, whatever layout wrote them.

The two planners below only name the rectangles. The library manages files and the distribution of work. Its metadata
is read by ``checkpoint_metadata``, which runs nothing that the file names.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner, DefaultSavePlanner
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import LoadPlan, SavePlan, TensorWriteData, WriteItem, WriteItemType
from torch.distributed.checkpoint.planner_helpers import create_read_items_for_chunk_list
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save

from memo_exec.distributed.world import World, answered
from memo_exec.training.checkpoint_metadata import FILE, CheckedReader
from memo_exec.training.weights import Held
from memo_sim.contract.errors import BadInput, UsageError

State = Mapping[str, Sequence[Held]]
"""This rank's rectangles, by name of the whole tensor."""


def write(directory: Path, state: State, world: World) -> None:
    """Write the shards of all ranks into ``directory`` and flush them. Every rank has to call this.

    Raises:
        UsageError: when they cannot be written to ``directory``.
        CannotRun: when another rank has stopped.
    """
    try:
        with _quiet(), _others(world):
            save(_named(state), checkpoint_id=directory, planner=_Writes(state), **_participants(world))
    except CheckpointException as error:
        raise UsageError("the checkpoint cannot be written", where=str(directory), got=_reason(error)) from None


def files_of(directory: Path, rank: int) -> list[Path]:
    """Return the files of a checkpoint that ``rank`` has written; the first rank has written the metadata as well."""
    own = sorted(directory.glob(f"__{rank}_*"))
    return [directory / FILE, *own] if rank == 0 else own


def names(directory: Path) -> frozenset[str]:
    """Return the names of the whole tensors in a checkpoint.

    Raises:
        BadInput: when its metadata cannot be read.
    """
    return frozenset(CheckedReader(directory).read_metadata().state_dict_metadata)


def read(directory: Path, state: State, world: World) -> None:
    """Fill the rectangles of ``state`` from the checkpoint in ``directory``.

    Every rank of ``world`` has to call this; a ``World()`` has this process alone.

    Raises:
        BadInput: when the checkpoint is broken, lacks a tensor, or has it in another shape or dtype.
        CannotRun: when another rank has stopped.
    """
    reader = CheckedReader(directory)
    try:
        with _quiet(), _others(world):
            load(_named(state), storage_reader=reader, planner=_Reads(state), **_participants(world))
    except CheckpointException as error:
        raise BadInput("the checkpoint cannot be read", where=str(directory), got=_reason(error)) from None


class _Writes(DefaultSavePlanner):
    """Plans the writing of this rank's rectangles."""

    def __init__(self, state: State) -> None:
        super().__init__(flatten_state_dict=False)
        self._held = _by_index(state)

    def create_local_plan(self) -> SavePlan:
        """Return one item per rectangle."""
        self.plan = SavePlan([_item(index, held) for index, held in self._held.items()])
        return self.plan

    def lookup_object(self, index: MetadataIndex) -> Tensor:
        """Return the rectangle's values."""
        return self._held[index].view


class _Reads(DefaultLoadPlanner):
    """Plans the reading of this rank's rectangles."""

    def __init__(self, state: State) -> None:
        super().__init__(flatten_state_dict=False)
        self._state, self._held = state, _by_index(state)

    def create_local_plan(self) -> LoadPlan:
        """Return the items to read for each rectangle, from every stored rectangle that overlaps it.

        Raises:
            ValueError: when a tensor is missing, or has another shape or dtype.
        """
        assert self.metadata is not None
        stored, items = self.metadata.state_dict_metadata, []
        for name, found in self._state.items():
            there = stored.get(name)
            if not isinstance(there, TensorStorageMetadata):
                why = ": the saved run has it in FP8 alone (--fp8-params)" if _master_of(name) in stored else ""
                raise ValueError(f"{name} is missing{why}")  # noqa: TRY004 - the file is wrong, not an argument's type
            if (tuple(there.size), there.properties.dtype) != (found[0].whole, found[0].view.dtype):
                got = f"{tuple(there.size)} {there.properties.dtype}"
                raise ValueError(f"{name} is {got}, wanted {found[0].whole} {found[0].view.dtype}")
            items += create_read_items_for_chunk_list(name, there, [_chunk(held) for held in found])
        return LoadPlan(items)

    def lookup_tensor(self, index: MetadataIndex) -> Tensor:
        """Return the tensor that receives a rectangle's values."""
        return self._held[index].view


def _master_of(name: str) -> str:
    return f"master/{name.partition('/')[2]}"


def _named(state: State) -> dict[str, Tensor]:
    """Return one tensor per name, because the library asks for them; the planners use all rectangles of a name."""
    return {name: found[0].view for name, found in state.items()}


def _by_index(state: State) -> dict[MetadataIndex, Held]:
    return {MetadataIndex(name, torch.Size(held.offsets)): held for name, found in state.items() for held in found}


def _chunk(held: Held) -> ChunkStorageMetadata:
    return ChunkStorageMetadata(torch.Size(held.offsets), held.view.shape)


def _item(index: MetadataIndex, held: Held) -> WriteItem:
    properties = TensorProperties.create_from_tensor(held.view)
    data = TensorWriteData(_chunk(held), properties, torch.Size(held.whole))
    return WriteItem(index, WriteItemType.SHARD, tensor_data=data)


def _participants(world: World) -> dict[str, Any]:
    """Return the library's arguments for the ranks that take part."""
    return {"process_group": world.talk, "no_dist": world.talk is None}


def _others(world: World) -> AbstractContextManager[None]:
    """Return a context for work in which every rank takes part."""
    return answered(world.rank, world.size) if world.size > 1 else nullcontext()


@contextmanager
def _quiet() -> Iterator[None]:
    """Suppress the library's warning that torch.distributed is disabled: a single process asks for that."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="torch.distributed is disabled", category=UserWarning)
        yield


def _reason(error: CheckpointException) -> str:
    """Return the failure of the first rank that failed, in one line."""
    rank, (cause, _) = sorted(error.failures.items())[0]
    text = str(cause).splitlines() or [type(cause).__name__]
    return f"rank {rank}: {text[0]}"
