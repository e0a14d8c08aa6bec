"""Pipeline stages: the layers that a stage holds in chunks, and its neighbours before and after each chunk.

Equal chunks of layers are dealt out to the stages in turn: chunk c of stage s of p is the (c*p + s)-th run of layers.
Without pipeline parallelism there is one chunk of all layers.

      8 layers, p 2, 2 chunks a stage      stage 0: [l0 l1] [l4 l5]      stage 1: [l2 l3] [l6 l7]
"""

from __future__ import annotations

from dataclasses import dataclass

from memo_sim.contract.errors import Infeasible
from memo_sim.contract.plan import Decisions


@dataclass(frozen=True, slots=True)
class Stage:
    """The layers of one pipeline stage.

    ``layers`` are numbers in the model; the local number of a layer is its index in ``layers``. Boundaries are the
    points before, between and after the layers of each chunk. The first boundary of chunk c is the local number of the
    chunk's first layer plus c.
    """

    index: int
    stages: int
    chunks: int
    layers: tuple[int, ...]

    @property
    def name(self) -> str:
        """The name of the stage's program."""
        return "rank" if self.stages == 1 else f"stage{self.index}"

    @property
    def first(self) -> bool:
        """Whether this stage holds the embedding."""
        return self.index == 0

    @property
    def last(self) -> bool:
        """Whether this stage holds the head."""
        return self.index == self.stages - 1

    @property
    def chunk_layers(self) -> int:
        """Number of layers in one chunk."""
        return len(self.layers) // self.chunks

    @property
    def boundaries(self) -> int:
        """Number of points before, between and after the layers of all chunks."""
        return len(self.layers) + self.chunks

    def chunk(self, number: int) -> range:
        """Return the local numbers of a chunk's layers."""
        return range(number * self.chunk_layers, (number + 1) * self.chunk_layers)

    def chunk_of(self, layer: int) -> int:
        """Return the chunk that holds a layer (local number)."""
        return layer // self.chunk_layers

    def boundary(self, layer: int, *, after: bool) -> int:
        """Return the number of the boundary before or after a layer (local number)."""
        return layer + self.chunk_of(layer) + after

    def ends_chunk(self, layer: int) -> bool:
        """Return whether a layer (local number) is the last of its chunk."""
        return (layer + 1) % self.chunk_layers == 0

    def begins_model(self, layer: int) -> bool:
        """Return whether the embedding comes directly before a layer (local number)."""
        return self.layers[layer] == 0

    def ends_model(self, layer: int) -> bool:
        """Return whether the head comes directly after a layer (local number)."""
        return self.last and layer == len(self.layers) - 1

    def source(self, chunk: int) -> int | None:
        """Return the stage that sends a chunk its input; None when the input is the embedding's output."""
        if self.first and chunk == 0:
            return None
        return (self.index - 1) % self.stages

    def target(self, chunk: int) -> int | None:
        """Return the stage that receives a chunk's output; None when the head on this stage reads it."""
        if self.last and chunk == self.chunks - 1:
            return None
        return (self.index + 1) % self.stages


def stages_of(decisions: Decisions) -> tuple[Stage, ...]:
    """Return the stages of a layout, from first to last; one stage without pipeline parallelism.

    Raises:
        Infeasible: when the schedule cannot divide the layers or the micro-batches evenly.
    """
    layout, layers = decisions.layout, decisions.model.layers
    _check(decisions)
    run = layers // (layout.pp * layout.virtual_stages)
    return tuple(
        Stage(
            index,
            layout.pp,
            layout.virtual_stages,
            tuple(
                layer
                for chunk in range(layout.virtual_stages)
                for layer in range((chunk * layout.pp + index) * run, (chunk * layout.pp + index + 1) * run)
            ),
        )
        for index in range(layout.pp)
    )


def _check(decisions: Decisions) -> None:
    layout, layers = decisions.layout, decisions.model.layers
    runs = layout.pp * layout.virtual_stages
    if layers % runs:
        raise Infeasible(
            f"pp x virtual stages = {runs} does not divide the layers",
            where="layout.pp",
            got=f"{layers} layers",
            wanted=f"a multiple of {runs}",
            hint="stages hold equal numbers of layers: another --pp, or fewer --virtual-stages",
        )
    if layout.schedule == "interleaved" and layout.pp > 1:
        _check_groups(decisions)


def _check_groups(decisions: Decisions) -> None:
    layout, count = decisions.layout, decisions.layout.subsequences
    if decisions.micro_batches * count % layout.pp:
        each = f" of {count} subsequences" if count > 1 else ""
        raise Infeasible(
            "interleaved micro-batches go in groups of as many as there are stages",
            where="global_batch",
            got=f"{decisions.micro_batches} micro-batches{each}",
            wanted=f"a multiple of {layout.pp}",
            hint="a larger --global-batch, or --schedule 1f1b",
        )
