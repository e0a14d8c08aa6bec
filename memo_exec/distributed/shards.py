"""Computes a rank's shards of each whole tensor: rectangles, and their positions in the rank's flat buffers.

- Tensor parallelism divides rows (Q, K, V, first FFN matrix, vocabulary) or columns (projection, second FFN matrix).
  METP divides the same rows and columns, but only in layers.
- Packed tensors are divided part by part, so that a rank has its heads of Q, K and V.
- ZeRO divides a rank's flat blocks. A share may begin and end inside a row.

    [q0 q1 | k0 k1 | v0 v1], tp 2:   rank 0 [q0 | k0 | v0]   rank 1 [q1 | k1 | v1]

The vocabulary is rounded up to equal parts. The rows beyond it belong to no tensor.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from memo_exec.distributed.mesh import MeshCoordinates, Share
from memo_sim.contract.adapters import Adapters
from memo_sim.contract.model import Model
from memo_sim.contract.plan import Decisions
from memo_sim.program.data_parallel.optimizer import Optimizer
from memo_sim.program.ir.kinds import BlockKind
from memo_sim.program.layout.fp8 import NARROW, runs
from memo_sim.program.layout.parameters import (
    FROZEN,
    SELECTION_BIAS,
    Block,
    Parameter,
    embed_block,
    head_block,
    layer_block,
    rank_experts_block,
)
from memo_sim.program.layout.stage import stages_of
from memo_sim.program.layout.stage_layers import layers_by_kind


@dataclass(frozen=True, slots=True)
class Shard:
    """A shard: a rectangle of the whole tensor ``name``, stored contiguously in a buffer from element ``first`` on."""

    name: str
    whole: tuple[int, ...]
    offsets: tuple[int, ...]
    sizes: tuple[int, ...]
    first: int


@dataclass(frozen=True, slots=True)
class Stretch:
    """Elements [first, first + count) of a block, stored in a buffer from element ``held`` on."""

    first: int
    count: int
    held: int


@dataclass(frozen=True, slots=True)
class Strip:
    """Rows [first, first + rows) of a rank's tensor, which are the whole tensor's rows from ``whole_first`` on."""

    first: int
    rows: int
    whole_first: int


@dataclass(frozen=True, slots=True)
class Place:
    """Which part of a parameter a rank has: its coordinate among the ranks that divide features, and its experts."""

    part: int
    experts: range


@dataclass(frozen=True, slots=True)
class Part:
    """A part of the model whose parameters lie in one block: embedding, head, a layer of one kind, or its experts."""

    kind: BlockKind
    layers: int = 0
    """The number of the layers' kind (``Model.layer_kinds``)."""


def parts_of(decisions: Decisions, mesh: MeshCoordinates) -> list[tuple[Part, str, tuple[str, ...]]]:
    """Return the parts on this rank's stage, with the end of their families' names, and the names of their blocks.

    The blocks stand in the order of the families' buffers: ``layer.0``, ``layer.2`` ...
    """
    stage = stages_of(decisions)[mesh.at("pp")]
    embed, head = ((Part(kind), str(kind), (str(kind),)) for kind in (BlockKind.EMBED, BlockKind.HEAD))
    layers = []
    for each in layers_by_kind(decisions.model, stage):
        names = tuple(f"layer.{stage.layers[layer]}" for layer in each.layers)
        layers.append((Part(BlockKind.LAYER, each.number or 0), each.block, names))
        if decisions.layout.ep > 1 and each.shape.experts is not None:
            layers.append((Part(BlockKind.EXPERTS, each.number or 0), each.experts_block, names))
    return [embed, *layers, head]


def block_of(decisions: Decisions, degree: int, part: Part, mesh: MeshCoordinates, *, own: bool) -> Block:
    """Return a block's parameters, divided by ``degree``; ``own``: only the rank's own experts.

    The embedding of a later pipeline stage (a copy of a tied one) has no learned positions.
    """
    model, adapters = decisions.model, decisions.lora
    if part.kind is BlockKind.EMBED:
        return embed_block(model, degree, positions=mesh.at("pp") == 0, adapters=adapters)
    if part.kind is BlockKind.HEAD:
        return head_block(model, degree, adapters=adapters)
    shape, ep = model.layer_shapes[part.layers], mesh.layout.ep
    if part.kind is BlockKind.EXPERTS:
        assert shape.experts is not None  # other layers have no such part
        return rank_experts_block(model, degree, ep if own else 1, shape.experts, adapters)
    return layer_block(model, degree, shape, ep=ep, whole_experts=mesh.layout.whole_experts, adapters=adapters)


def _own_block(decisions: Decisions, part: Part, mesh: MeshCoordinates) -> Block:
    """Return the parameters of one rank's block. METP divides only those of layers."""
    layout = decisions.layout
    divided = {BlockKind.LAYER: layout.divided, BlockKind.EXPERTS: layout.expert_divided}.get(part.kind, layout.tp)
    return block_of(decisions, divided, part, mesh, own=True)


def whole_block(model: Model, kind: BlockKind, layer: int = 0, adapters: Adapters | None = None) -> Block:
    """Return a block with whole parameters, as a single process has it; ``layer``: the layer whose block it is.

    Experts that ranks divide are among the parameters of their layer.
    """
    if kind is BlockKind.LAYER:
        return layer_block(model, 1, model.layer(layer), adapters=adapters)
    return {BlockKind.EMBED: embed_block, BlockKind.HEAD: head_block}[kind](model, 1, adapters=adapters)


def whole_parameters(model: Model, adapters: Adapters | None = None) -> dict[str, Parameter]:
    """Return every parameter of the model, whole, by the name that shards have: ``layer.3/qkv.weight``."""
    blocks = {str(kind): whole_block(model, kind, 0, adapters) for kind in (BlockKind.EMBED, BlockKind.HEAD)}
    for layer in range(model.layers):
        blocks[f"layer.{layer}"] = whole_block(model, BlockKind.LAYER, layer, adapters)
    return {f"{name}/{each.name}": each for name, block in blocks.items() for each in block.parameters}


def layers_of(decisions: Decisions, mesh: MeshCoordinates) -> tuple[int, ...]:
    """Return the numbers of the layers in this rank's pipeline stage, in the order of its buffers."""
    return stages_of(decisions)[mesh.at("pp")].layers


def optimizer_of(decisions: Decisions, part: Part, mesh: MeshCoordinates) -> Optimizer:
    """Return the ``Optimizer`` of a block, which says how its states are divided."""
    count = len(layers_of(decisions, mesh)) if part.kind.of_layer else 1
    return Optimizer(decisions, _own_block(decisions, part, mesh), part.kind, count)


def trained_ranges(
    decisions: Decisions, part: Part, mesh: MeshCoordinates, *, divided: bool = False
) -> list[tuple[int, int]]:
    """Return (first element, end) of the ranges of a block whose parameters gradients train.

    ``divided``: only of the parameters that tensor parallelism or METP divides.
    """
    found: list[tuple[int, int]] = []
    for own, whole in _paired(decisions, part, mesh):
        if own.name == SELECTION_BIAS or own.frozen or (divided and own.shape == whole.shape):
            continue
        if found and found[-1][1] == own.first:
            found[-1] = (found[-1][0], own.first + own.elements)
        else:
            found.append((own.first, own.first + own.elements))
    return found


def stretches(decisions: Decisions, mesh: MeshCoordinates, state: str, part: Part) -> list[Stretch]:
    """Return the elements of a block that the buffer of ``state`` holds on this rank.

    ``state`` is params, grads, master, moment1, ... Two kinds of buffers have the size of the whole block, but only
    this rank's share of them is valid: gradients that are reduced into shares, and parameters that the next step
    gathers. Weights that are kept in FP8 alone are in no buffer of params, which begins behind them.
    """
    optimizer = optimizer_of(decisions, part, mesh)
    in_place = state in ("params", "grads") and not optimizer.shared("params" if state == "params" else "grads")
    whole = state == "params" and in_place and not optimizer.gathered_late
    block = optimizer.block
    if optimizer.shards == 1 or whole:
        if state != "params":
            return [Stretch(0, block.trained_elements, 0)]
        return [Stretch(optimizer.narrow, block.elements - optimizer.narrow, 0)]
    own, ahead = own_runs(optimizer, mesh), 0
    if state != "params" or in_place:
        own.pop(FROZEN, None)
    if state == "params":
        ahead = narrow_ahead(optimizer, whole=in_place)
        own.pop(NARROW, None)
    found = [Stretch(run.first, run.count, (run.first if in_place else run.held) - ahead) for run in own.values()]
    if state == "params" and in_place:  # what is frozen is whole on every rank
        found.append(Stretch(block.trained_elements, block.elements - block.trained_elements, block.trained_elements))
    return found


def own_runs(optimizer: Optimizer, mesh: MeshCoordinates) -> dict[str, Stretch]:
    """Return this rank's share of each run of a block (``fp8.runs``), with its offset in a buffer of shares."""
    held, found = 0, {}
    for name, first, length in runs(optimizer.decisions, optimizer.block):
        start, count = Share(length, optimizer.shards).of(mesh.at(optimizer.shard_group) if optimizer.shards > 1 else 0)
        found[name] = Stretch(first + start, count, held)
        held += -(-length // optimizer.shards)
    return found


def narrow_ahead(optimizer: Optimizer, *, whole: bool) -> int:
    """Return how many elements of a block lie in FP8 alone before those of its buffers of params.

    ``whole``: in the whole block; else in this rank's share.
    """
    return optimizer.narrow if whole else -(-optimizer.narrow // optimizer.shards)


def shards_of(decisions: Decisions, mesh: MeshCoordinates, state: str, part: Part) -> list[Shard]:
    """Return the shards (rectangles) of a block's parameters in a rank's buffer of ``state``."""
    count = decisions.model.mixture.count if decisions.model.mixture else 0
    first, count = mesh.at("ep") * count // decisions.layout.ep, count // decisions.layout.ep
    place = Place(mesh.at(decisions.layout.weights_group), range(first, first + count))
    if part.kind is BlockKind.EXPERTS and decisions.layout.whole_experts:
        place = Place(0, place.experts)
    found: list[Shard] = []
    for stretch in stretches(decisions, mesh, state, part):
        for own, whole in _paired(decisions, part, mesh):
            low, high = max(stretch.first, own.first), min(stretch.first + stretch.count, own.first + own.elements)
            if low < high:
                held = Stretch(low, high - low, stretch.held + low - stretch.first)
                found += _rectangles(own, whole, decisions, place, held)
    return found


def _paired(decisions: Decisions, part: Part, mesh: MeshCoordinates) -> list[tuple[Parameter, Parameter]]:
    """Return pairs of each parameter as this rank holds it and the whole parameter."""
    own, whole = _own_block(decisions, part, mesh), block_of(decisions, 1, part, mesh, own=False)
    return list(zip(own.parameters, whole.parameters, strict=True))


def _strips(decisions: Decisions, own: Parameter, whole: Parameter, place: Place) -> list[Strip]:
    """Return, part by part, the rows of the whole tensor that a rank's rows are. Ignores columns."""
    model = decisions.model
    if own.shape[0] == whole.shape[0]:
        return [Strip(0, own.shape[0], 0)]
    part_rank = place.part
    if own.name.startswith("experts_"):
        return _strips_of_experts(own, whole, model, place)
    if own.name in ("tokens.weight", "classifier.weight"):
        first = part_rank * own.shape[0]
        return [Strip(0, max(0, min(own.shape[0], whole.shape[0] - first)), first)]
    halves = (whole.shape[0] // 2,) * 2 if model.gated else (whole.shape[0],)  # gate and up
    packed: dict[str, tuple[int, ...]] = {
        "qkv": (model.q_width, model.kv_width, model.kv_width),
        "ffn_up": halves,
        "shared_up": halves,
    }
    product, _, side = own.name.partition(".")
    parts = packed.get(product, (whole.shape[0],))
    if side == "lora_b" and decisions.lora is not None:
        heads = {"q": model.q_width, "k": model.kv_width, "v": model.kv_width}
        targets = decisions.lora.targets_of(product, model)
        parts = tuple(heads.get(target, whole.shape[0] // len(targets)) for target in targets)
    ratio = whole.shape[0] // own.shape[0]
    found, here, there = [], 0, 0
    for part in parts:
        rows = part // ratio
        found.append(Strip(here, rows, there + part_rank * rows))
        here, there = here + rows, there + part
    return found


def _strips_of_experts(own: Parameter, whole: Parameter, model: Model, place: Place) -> list[Strip]:
    """Return the rows of each of a rank's experts: its features of the gate and of the up half, or all rows."""
    assert model.mixture is not None  # it has experts
    halves = 2 if own.name.startswith("experts_up") else 1
    rows, there = own.shape[0] // (halves * len(place.experts)), whole.shape[0] // (halves * model.mixture.count)
    inside = place.part * rows if rows < there else 0
    return [
        Strip((here * halves + half) * rows, rows, (expert * halves + half) * there + inside)
        for here, expert in enumerate(place.experts)
        for half in range(halves)
    ]


def _rectangles(own: Parameter, whole: Parameter, decisions: Decisions, place: Place, held: Stretch) -> Iterator[Shard]:
    """Yield the elements ``held`` of the block, which all belong to ``own``, as rectangles of ``whole``."""
    width = own.shape[1] if len(own.shape) > 1 else 1
    column = place.part * width if len(own.shape) > 1 and own.shape[1] != whole.shape[1] else 0
    for strip in _strips(decisions, own, whole, place):
        start = own.first + strip.first * width
        first, end = max(held.first, start), min(held.first + held.count, start + strip.rows * width)
        while first < end:
            row, inside = divmod(first - start, width)
            rows, columns = (end - first) // width, width
            if inside or not rows:  # the share begins or ends inside this row, so this part is a separate rectangle
                rows, columns = 1, min(width - inside, end - first)
            offsets, sizes = (strip.whole_first + row, column + inside), (rows, columns)
            dims = len(own.shape)
            yield Shard(own.name, whole.shape, offsets[:dims], sizes[:dims], held.held + first - held.first)
            first += rows * columns
