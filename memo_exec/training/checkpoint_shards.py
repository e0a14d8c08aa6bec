"""Tensors in a checkpoint by torch.distributed.checkpoint: whole ones by name, of which each rank has rectangles.

A rank writes what it holds; where several hold the same rectangle one writes it. A rank reads what it holds, out of
whatever rectangles it was written in, so a checkpoint loads into any layout. Both planners only say which rectangles
there are; files, their metadata and the distribution of work are the library's.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
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

from memo_exec.training.weights import Held
from memo_sim.contract.errors import BadInput, UsageError

State = Mapping[str, Sequence[Held]]
"""Rectangles by name of the whole tensor."""


def write(directory: Path, state: State, talk: dist.ProcessGroup | None) -> None:
    """Write what all ranks hold into ``directory``, flushed; ``talk`` None: of one process.

    Raises:
        UsageError: when it cannot be written there.
    """
    try:
        with _quiet():
            save(_named(state), planner=_Writes(state), **_where(directory, talk))
    except CheckpointException as error:
        raise UsageError("the checkpoint cannot be written", where=str(directory), got=_reason(error)) from None


def read(directory: Path, state: State, talk: dist.ProcessGroup | None) -> None:
    """Fill the rectangles of ``state`` from the checkpoint in ``directory``.

    Raises:
        BadInput: when it is broken, or holds other tensors than ``state`` names.
    """
    try:
        with _quiet():
            load(_named(state), planner=_Reads(state), **_where(directory, talk))
    except CheckpointException as error:
        raise BadInput("the checkpoint cannot be read", where=str(directory), got=_reason(error)) from None


def _where(directory: Path, talk: dist.ProcessGroup | None) -> dict[str, Any]:
    """Return the arguments that name a checkpoint and who takes part."""
    return {"checkpoint_id": directory, "process_group": talk, "no_dist": talk is None}


class _Writes(DefaultSavePlanner):
    """Plans the writing of this rank's rectangles."""

    def __init__(self, state: State) -> None:
        super().__init__(flatten_state_dict=False)
        self._held = _by_index(state)

    def create_local_plan(self) -> SavePlan:
        """Return an item a rectangle."""
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
        """Return what to read for each rectangle, from every stored one that overlaps it.

        Raises:
            ValueError: when a tensor is not there, or is of another shape or type.
        """
        assert self.metadata is not None
        stored, items = self.metadata.state_dict_metadata, []
        for name, found in self._state.items():
            there = stored.get(name)
            if not isinstance(there, TensorStorageMetadata):
                raise ValueError(f"it holds no {name}")  # noqa: TRY004 - of a file, not of an argument
            if (tuple(there.size), there.properties.dtype) != (found[0].whole, found[0].view.dtype):
                got = f"{tuple(there.size)} {there.properties.dtype}"
                raise ValueError(f"{name} is {got}, wanted {found[0].whole} {found[0].view.dtype}")
            items += create_read_items_for_chunk_list(name, there, [_chunk(held) for held in found])
        return LoadPlan(items)

    def lookup_tensor(self, index: MetadataIndex) -> Tensor:
        """Return where a rectangle's values go."""
        return self._held[index].view


def _named(state: State) -> dict[str, Tensor]:
    """Return the names that the library asks for; the planners know what is behind them."""
    return {name: found[0].view for name, found in state.items()}


def _by_index(state: State) -> dict[MetadataIndex, Held]:
    return {MetadataIndex(name, torch.Size(held.offsets)): held for name, found in state.items() for held in found}


def _chunk(held: Held) -> ChunkStorageMetadata:
    return ChunkStorageMetadata(torch.Size(held.offsets), held.view.shape)


def _item(index: MetadataIndex, held: Held) -> WriteItem:
    properties = TensorProperties.create_from_tensor(held.view)
    data = TensorWriteData(_chunk(held), properties, torch.Size(held.whole))
    return WriteItem(index, WriteItemType.SHARD, tensor_data=data)


@contextmanager
def _quiet() -> Iterator[None]:
    """Keep the library from warning that one process is alone, which it was told."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="torch.distributed is disabled", category=UserWarning)
        yield


def _reason(error: CheckpointException) -> str:
    """Return the first failure of any rank in one line."""
    rank, (cause, _) = sorted(error.failures.items())[0]
    text = str(cause).splitlines() or [type(cause).__name__]
    return f"rank {rank}: {text[0]}"
