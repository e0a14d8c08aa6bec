"""Pipeline stages: the layers that a stage holds in chunks, and its neighbours before and after each chunk.

Runs of layers are dealt out to the stages in turn: chunk c of stage s of p is the (c*p + s)-th run. Without pipeline
parallelism there is one run of all layers. ``pp_layers`` says how many layers each run has. Otherwise runs are equal,
or as equal as possible: some have one layer more.

      8 layers, p 2, 2 chunks a stage      stage 0: [l0 l1] [l4 l5]      stage 1: [l2 l3] [l6 l7]
      14 layers, p 4                       3 4 4 3 layers

The runs beside the embedding and beside the head get their extra layer last, because these stages have that work too.
This is the split of Megatron-LM with ``--account-for-embedding-in-pipeline-split`` and
``--account-for-loss-in-pipeline-split`` (126 layers on 16 stages: 7, 14 times 8, 7), which Megatron-LM has only where
layers + 2 divide by the stages (``megatron/core/transformer/transformer_block.py``). What its
``--decoder-first-pipeline-num-layers`` and ``--decoder-last-pipeline-num-layers`` choose is given by ``pp_layers``.
"""

from __future__ import annotations

from bisect import bisect_right
from dataclasses import dataclass
from functools import cached_property, lru_cache
from itertools import accumulate, pairwise

from memo_sim.contract.errors import Infeasible
from memo_sim.contract.plan import Decisions


@dataclass(frozen=True)
class Stage:
    """The layers of one pipeline stage.

    The local number of a layer is its index in ``layers``. Boundaries are the points before, between and after the
    layers of each chunk. The first boundary of chunk c is the local number of the chunk's first layer plus c.
    """

    index: int
    stages: int
    runs: tuple[range, ...]
    """The numbers of each chunk's layers in the model."""

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

    @cached_property
    def layers(self) -> tuple[int, ...]:
        """The numbers of the stage's layers in the model."""
        return tuple(layer for run in self.runs for layer in run)

    @property
    def chunks(self) -> int:
        """Number of chunks."""
        return len(self.runs)

    @property
    def boundaries(self) -> int:
        """Number of points before, between and after the layers of all chunks."""
        return len(self.layers) + self.chunks

    @cached_property
    def _ends(self) -> tuple[int, ...]:
        """The local number after the last layer of each chunk."""
        return tuple(accumulate(len(run) for run in self.runs))

    def chunk(self, number: int) -> range:
        """Return the local numbers of a chunk's layers."""
        end = self._ends[number]
        return range(end - len(self.runs[number]), end)

    def chunk_of(self, layer: int) -> int:
        """Return the chunk that holds a layer (local number)."""
        return bisect_right(self._ends, layer)

    def boundary(self, layer: int, *, after: bool) -> int:
        """Return the number of the boundary before or after a layer (local number)."""
        return layer + self.chunk_of(layer) + after

    def ends_chunk(self, layer: int) -> bool:
        """Return whether a layer (local number) is the last of its chunk."""
        return layer + 1 in self._ends

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
        Infeasible: when there are fewer layers than runs, ``pp_layers`` are of another number of runs or layers, or the
            schedule cannot divide the micro-batches evenly.
    """
    _check(decisions)
    return _dealt_out(layers_of_runs(decisions), decisions.layout.pp)


@lru_cache(maxsize=256)
def _dealt_out(layers: tuple[int, ...], stages: int) -> tuple[Stage, ...]:
    """Return the stages that get runs with these numbers of layers in turn."""
    runs = [range(first, end) for first, end in pairwise((0, *accumulate(layers)))]
    return tuple(Stage(index, stages, tuple(runs[index::stages])) for index in range(stages))


def layers_of_runs(decisions: Decisions) -> tuple[int, ...]:
    """Return the number of layers of each run, in the order of the model: those given, or nearly equal ones."""
    layout, layers = decisions.layout, decisions.model.layers
    if layout.pp_layers:
        return layout.pp_layers
    return nearly_equal(layers, layout.pp * layout.virtual_stages)


@lru_cache(maxsize=256)
def nearly_equal(layers: int, runs: int) -> tuple[int, ...]:
    """Return the number of layers of each run where none are given; some runs have one layer more."""
    least, extra = divmod(layers, runs)
    longer = [*range(1, runs - 1), 0][:extra]
    return tuple(least + (run in longer) for run in range(runs))


def _check(decisions: Decisions) -> None:
    layout, layers = decisions.layout, decisions.model.layers
    runs, given = layout.pp * layout.virtual_stages, layout.pp_layers
    if layers < runs:
        raise Infeasible(
            f"pp x virtual stages = {runs} is more than the layers",
            where="layout.pp",
            got=f"{layers} layers",
            wanted=f"at least {runs}",
            hint="every stage holds layers: another --pp, or fewer --virtual-stages",
        )
    if given and (len(given) != runs or sum(given) != layers):
        raise Infeasible(
            "pp_layers does not give every stage its layers",
            where="layout.pp_layers",
            got=f"{len(given)} numbers that sum to {sum(given)}",
            wanted=f"{runs} numbers that sum to {layers}: one for each stage, or each chunk in the model's order",
            hint="other --pp-layers; without it stages hold nearly equal numbers of layers",
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
