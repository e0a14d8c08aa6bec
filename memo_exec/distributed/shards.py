"""What a rank holds of each whole tensor: rectangles, and where they lie in its flat buffers.

Tensor parallelism divides rows (Q, K, V, first FFN product, vocabulary) or columns (projection, second FFN product),
METP those of layers; packed tensors are divided part by part, so that a rank has its heads of Q, K and V. ZeRO divides
a rank's flat blocks: a share may begin and end inside a row.

    [q0 q1 | k0 k1 | v0 v1], tp 2:   rank 0 [q0 | k0 | v0]   rank 1 [q1 | k1 | v1]

The vocabulary is rounded up to equal parts: rows beyond it belong to no tensor.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from memo_exec.distributed.mesh import MeshCoordinates, Share
from memo_sim.contract.model import Model
from memo_sim.contract.plan import Decisions, Layout
from memo_sim.program.data_parallel.optimizer import Optimizer
from memo_sim.program.layout.parameters import Block, Parameter, embed_block, head_block, layer_block
from memo_sim.program.layout.stage import stages_of

KINDS = ("embed", "layer", "head")


@dataclass(frozen=True, slots=True)
class Shard:
    """A rectangle of the whole tensor ``name``, contiguous in a buffer from element ``first`` on."""

    name: str
    whole: tuple[int, ...]
    offsets: tuple[int, ...]
    sizes: tuple[int, ...]
    first: int


@dataclass(frozen=True, slots=True)
class Stretch:
    """Elements [first, first + count) of a block, which lie in a buffer from element ``held`` on."""

    first: int
    count: int
    held: int


@dataclass(frozen=True, slots=True)
class Strip:
    """``rows`` of a rank's tensor from row ``first`` on, which are rows of the whole one from ``whole_first`` on."""

    first: int
    rows: int
    whole_first: int


def dividing(layout: Layout) -> str:
    """Return the group that divides a layer's products: METP's, or the tensor-parallel one."""
    return "metp" if layout.metp > 1 else "tp"


def block_of(model: Model, degree: int, kind: str, mesh: MeshCoordinates) -> Block:
    """Return a block's parameters, divided by ``degree``; a later pipeline stage's embedding has no positions."""
    if kind == "embed":
        return embed_block(model, degree, positions=mesh.at("pp") == 0)
    return {"layer": layer_block, "head": head_block}[kind](model, degree)


def _own_block(decisions: Decisions, kind: str, mesh: MeshCoordinates) -> Block:
    """Return the parameters of one rank's block; METP divides a layer's alone."""
    layout = decisions.layout
    return block_of(decisions.model, layout.divided if kind == "layer" else layout.tp, kind, mesh)


def whole_block(model: Model, kind: str) -> Block:
    """Return a block as one process has it."""
    return {"embed": embed_block, "layer": layer_block, "head": head_block}[kind](model, 1)


def layers_of(decisions: Decisions, mesh: MeshCoordinates) -> tuple[int, ...]:
    """Return the model's layers that this rank's stage holds, in the order of its buffers."""
    return stages_of(decisions)[mesh.at("pp")].layers


def optimizer_of(decisions: Decisions, kind: str, mesh: MeshCoordinates) -> Optimizer:
    """Return how a block's states are divided."""
    count = len(layers_of(decisions, mesh)) if kind == "layer" else 1
    return Optimizer(decisions, _own_block(decisions, kind, mesh), kind, count)


def divided_elements(decisions: Decisions, kind: str, mesh: MeshCoordinates) -> int:
    """Return how many leading elements of a block belong to parameters that tensor parallelism or METP divides.

    Raises:
        ValueError: when a divided parameter follows one that every rank has whole.
    """
    count = 0
    for own, whole in _paired(decisions, kind, mesh):
        if own.shape != whole.shape:
            if own.first != count:
                raise ValueError(f"{own.name} lies behind parameters that every rank has whole")
            count = own.first + own.elements
    return count


def stretches(decisions: Decisions, mesh: MeshCoordinates, state: str, kind: str) -> list[Stretch]:
    """Return what the buffer of ``state`` (params, grads, master, moment1, ...) holds of a block on this rank.

    Of whole gradients that are reduced into shares, and of whole parameters that the next step gathers, it is this
    rank's share that counts.
    """
    optimizer = optimizer_of(decisions, kind, mesh)
    in_place = state in ("params", "grads") and not optimizer.shared("params" if state == "params" else "grads")
    whole = state == "params" and in_place and not optimizer.gathered_late
    if optimizer.shards == 1 or whole:
        return [Stretch(0, optimizer.block.elements, 0)]
    return [Stretch(run.first, run.count, run.first if in_place else run.held) for run in own_runs(optimizer, mesh)]


def own_runs(optimizer: Optimizer, mesh: MeshCoordinates) -> list[Stretch]:
    """Return this rank's share of the decayed and of the other parameters, and its place in a buffer of shares."""
    block, found = optimizer.block, []
    ends = {"decay": block.decayed_elements, "no_decay": block.elements}
    held = 0
    for name, first, size in optimizer.runs():
        start, count = Share(ends[name] - first, optimizer.shards).of(
            mesh.at(optimizer.group) if optimizer.shards > 1 else 0
        )
        found.append(Stretch(first + start, count, held))
        held += size
    return found


def shards_of(decisions: Decisions, mesh: MeshCoordinates, state: str, kind: str) -> list[Shard]:
    """Return the rectangles that a buffer of ``state`` holds of each parameter of its block."""
    model, part = decisions.model, mesh.at(dividing(decisions.layout))
    found: list[Shard] = []
    for stretch in stretches(decisions, mesh, state, kind):
        for own, whole in _paired(decisions, kind, mesh):
            low, high = max(stretch.first, own.first), min(stretch.first + stretch.count, own.first + own.elements)
            if low < high:
                held = Stretch(low, high - low, stretch.held + low - stretch.first)
                found += _rectangles(own, whole, model, part, held)
    return found


def _paired(decisions: Decisions, kind: str, mesh: MeshCoordinates) -> list[tuple[Parameter, Parameter]]:
    """Return each parameter as a rank has it, and whole."""
    own, whole = _own_block(decisions, kind, mesh), block_of(decisions.model, 1, kind, mesh)
    return list(zip(own.parameters, whole.parameters, strict=True))


def _strips(model: Model, own: Parameter, whole: Parameter, part_rank: int) -> list[Strip]:
    """Return which rows of the whole tensor the rows of a rank's are, part by part; columns do not count here."""
    if own.shape[0] == whole.shape[0]:
        return [Strip(0, own.shape[0], 0)]
    if own.name in ("tokens.weight", "classifier.weight"):
        first = part_rank * own.shape[0]
        return [Strip(0, max(0, min(own.shape[0], whole.shape[0] - first)), first)]
    packed = {"qkv": (model.q_width, model.kv_width, model.kv_width), "ffn_up": (model.ffn_hidden,) * 2}
    parts = packed.get(own.name.partition(".")[0], (whole.shape[0],))
    if not model.gated and own.name.startswith("ffn_up"):
        parts = (model.ffn_hidden,)
    ratio = whole.shape[0] // own.shape[0]
    found, here, there = [], 0, 0
    for part in parts:
        rows = part // ratio
        found.append(Strip(here, rows, there + part_rank * rows))
        here, there = here + rows, there + part
    return found


def _rectangles(own: Parameter, whole: Parameter, model: Model, part_rank: int, held: Stretch) -> Iterator[Shard]:
    """Yield the elements of the block that are ``held``, all of ``own``, as rectangles of ``whole``."""
    width = own.shape[1] if len(own.shape) > 1 else 1
    column = part_rank * width if len(own.shape) > 1 and own.shape[1] != whole.shape[1] else 0
    for strip in _strips(model, own, whole, part_rank):
        start = own.first + strip.first * width
        first, end = max(held.first, start), min(held.first + held.count, start + strip.rows * width)
        while first < end:
            row, inside = divmod(first - start, width)
            rows, columns = (end - first) // width, width
            if inside or not rows:  # a row that a share begins or ends in is a rectangle of its own
                rows, columns = 1, min(width - inside, end - first)
            offsets, sizes = (strip.whole_first + row, column + inside), (rows, columns)
            dims = len(own.shape)
            yield Shard(own.name, whole.shape, offsets[:dims], sizes[:dims], held.held + first - held.first)
            first += rows * columns
