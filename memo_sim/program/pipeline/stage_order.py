"""The order of one pipeline stage's instances.

    step/*/gather, step/*/zero | passes: [embed] layers forward (+ offload) [head] | layers backward (+ prefetch)
    [embed backward] | step/*/reduce | step/*/norm | step/*/update

P2p transfers between stages are placed around the passes (``stage_p2p.py``). In a multiplexed pipeline the passes are
placed in waves (``wave_order.py``).
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Iterator
from itertools import accumulate

from memo_sim.program.data_parallel.sharding import NOTHING, Placed
from memo_sim.program.ir.instances import Group, Instances, Once, Repeated
from memo_sim.program.ir.instruction import Instance
from memo_sim.program.ir.kinds import BlockKind
from memo_sim.program.layout.schedule import Kind, Pass
from memo_sim.program.layout.swap_schedule import (
    Key,
    LayerPass,
    SwapSchedule,
    layer_passes_of,
    swap_schedule,
    window_schedule,
)
from memo_sim.program.pipeline.helper_stage import HelperStage
from memo_sim.program.pipeline.stage_p2p import StageTransfer
from memo_sim.program.pipeline.stage_parts import StageParts
from memo_sim.program.pipeline.stage_templates import StageTemplates
from memo_sim.program.pipeline.wave_order import WaveOrder

LayerPasses = list[list[LayerPass]]
"""The layer passes of each pass."""


class PlacedInstances:
    """Instances of a stage as they are placed, and those of a micro-batch that were placed before, for other ones."""

    def __init__(self, unlike: set[int], *, repeats: bool) -> None:
        """``unlike``: micro-batches that differ; without ``repeats``, all of them may."""
        self._unlike, self._repeats = unlike, repeats
        self._first: dict[Hashable, tuple[int, list[Instance]]] = {}
        self._known: dict[Hashable, Repeated] = {}
        self._runs: list[tuple[Group, int]] = []
        self._single: list[Instance] = []
        """The instances since the last run."""
        self._count = 0
        """The number of instances before these."""

    def __len__(self) -> int:
        """Return the number of instances."""
        return self._count + len(self._single)

    def append(self, instance: Instance) -> None:
        """Add an instance."""
        self._single.append(instance)

    def repeat(self, of: Hashable, micro_batch: int) -> bool:
        """Add the instances that two micro-batches had under the name ``of``; return False where that is not known."""
        known = self._known.get(of)
        if known is None or micro_batch in self._unlike:
            return False
        if count := len(known.templates):
            if self._single:
                self._close()
            self._runs.append((known, micro_batch))
            self._count += count
        return True

    def record(self, of: Hashable, micro_batch: int, begin: int) -> None:
        """Note the instances from number ``begin`` on, which were placed for a micro-batch."""
        if not self._repeats or of in self._known or micro_batch in self._unlike:
            return
        mine = self._single[begin - self._count :]
        before, theirs = self._first.setdefault(of, (micro_batch, mine))
        if before != micro_batch:
            self._known[of] = Repeated(theirs, mine)

    @property
    def instances(self) -> Instances:
        """The instances in program order."""
        self._close()
        return Instances(self._runs)

    def _close(self) -> None:
        """End the run of single instances."""
        self._runs.append((Once(self._single), 0))
        self._count += len(self._single)
        self._single = []


class StageOrder:
    """Places the instances of a stage; ``place`` is called once."""

    def __init__(self, parts: StageParts, templates: StageTemplates, buffer_slots: dict[Key, int]) -> None:
        self.first_instances: list[int] = []
        """By pass: the number of its first instance."""
        self._parts, self._templates, self._stage = parts, templates, parts.stage
        self._layer_passes = layer_passes(parts)
        order = [each for passed in self._layer_passes for each in passed]
        self._swaps = self._swap_schedule(order, buffer_slots)
        self._rounding = bool(buffer_slots)
        self._suffixes = {layer: kind.suffix for kind in parts.kinds for layer in kind.layers}
        self._around = parts.sharding.around(order)
        around = [place for (place, _), (before, after) in self._around.items() if before or after]
        unlike = {int(place[1 : place.index("/")]) for place in around}
        swapping = self._rounding or self._swaps.swapped or self._swaps.leave_after or self._swaps.prefetch_after
        # Where activations are swapped, micro-batches differ in more than the buffers that they bind and ``_around``.
        self._placed = PlacedInstances(unlike, repeats=not swapping)
        self._played = 0
        """Number of layer passes placed so far."""

    @property
    def instances(self) -> Instances:
        """The instances that are placed."""
        return self._placed.instances

    def place(self) -> None:
        """Place the whole step, or the step up to its last pass."""
        blocks, templates = self._step_blocks(), self._templates
        for kind, place, layer in blocks:
            if f"{kind}.gather" in templates and kind not in self._parts.sharding.params:
                self._place(f"{kind}.gather", place, 0, layer)
        trained = [each for each in blocks if not self._parts.optimizers[each[0]].frozen]
        for kind, place, layer in trained:
            self._place(f"{kind}.zero", place, 0, layer)
        self._place_passes()
        if not self._parts.with_end:
            return
        self._place_reductions(trained)
        for kind, place, layer in trained:
            if kind != BlockKind.EMBED or self._stage.first:  # a tied embedding is on two stages, and counts once
                self._place(f"{kind}.norm", place, 0, layer)
        if "totals" in templates:
            self._place("totals", "step/totals", 0)
        for kind, place, layer in trained:
            self._place(f"{kind}.update", place, 0, layer)

    def place_apart(self, slices: Iterable[range]) -> list[int]:
        """Place some of the passes in place of the whole step, without transfers and what ``Sharding.around`` adds.

        Return the number of each slice's first instance.
        """
        self._around = {}
        starts, first_instances = [0, *accumulate(map(len, self._layer_passes))], list[int]()
        for numbers in slices:
            first_instances.append(len(self._placed))
            for number in numbers:
                self._played = starts[number]
                self._place_pass(self._parts.passes[number], self._layer_passes[number])
        return first_instances

    def copies_of(self, number: int) -> Iterator[tuple[bool, tuple[LayerPass, ...]]]:
        """Yield for each layer pass of a pass whether its activations are swapped, and what is prefetched behind it."""
        first = sum(map(len, self._layer_passes[:number]))
        for at, each in enumerate(self._layer_passes[number], first):
            yield each.key in self._swaps.swapped, tuple(self._swaps.prefetch_after.get(at, ()))

    def begin(self, each: Pass) -> None:
        """Begin a pass with the gathers and copies of its received input."""
        self.first_instances.append(len(self._placed))
        self._enter(each)

    def _enter(self, each: Pass) -> None:
        for transfer in self._parts.subsequences[each.subsequence].p2p.entered(each):
            self.place_transfer(transfer)

    def play_layer_pass(self, each: LayerPass, then: Callable[[], None] | None = None) -> None:
        """Place one layer's forward or backward, with embedding or head and the copies around it.

        ``then`` is called between the layer and the head (forward) or the embedding (backward) that follows it.
        """
        swapped = each.key in self._swaps.swapped
        (self._backward if each.backward else self._forward)(each, swapped, then)
        for left in self._swaps.leave_after.get(self._played, []):
            self._place_layer(self._named("layer.offload", left.layer), left.micro_batch, left.layer, left.subsequence)
        for wanted in self._swaps.prefetch_after.get(self._played, []):
            self._place_layer(
                self._named("layer.prefetch", wanted.layer), wanted.micro_batch, wanted.layer, wanted.subsequence
            )
        self._played += 1

    def place_transfer(self, transfer: StageTransfer) -> None:
        """Place a transfer between neighbouring stages."""
        self._place_layer(transfer.template, transfer.micro_batch, transfer.layer, transfer.subsequence)

    def at_owner(self, template: str, layer: int, subsequence: int) -> None:
        """Place a template of ``OwnerStage`` at a layer (local number)."""
        place = f"m0/s{subsequence}/l{self._stage.layers[layer]}"
        self._place(self._parts.owners[subsequence].name(template), place, 0, layer, subsequence)

    def as_helper(self, helper: HelperStage, template: str, layer: int) -> None:
        """Place a template of ``HelperStage`` at a layer, numbered on the owner stage."""
        number = self._templates.number(helper.name(template))
        self._placed.append(helper.instance(template, number, layer))

    def _swap_schedule(self, order: list[LayerPass], buffer_slots: dict[Key, int]) -> SwapSchedule:
        """Return which activations are copied to the host and back, and where in the order."""
        parts = self._parts
        if parts.subsequences[0].activations.windowed:
            swapping = {n for n, each in enumerate(parts.subsequences) if each.activations.swaps_rows}
            return window_schedule(self._layer_passes, parts.decisions.offload_window, swapping)
        return swap_schedule(order, buffer_slots) if buffer_slots else SwapSchedule(frozenset(), {})

    def _step_blocks(self) -> list[tuple[str, str, int]]:
        """Return (name, place, layer) of every parameter block, in the model's order."""
        sharding, blocks = self._parts.sharding, self._parts.blocks
        layers = [
            (name, sharding.place_of(name, f"step/l{number}"), i)
            for i, number in enumerate(self._stage.layers)
            for name in sharding.blocks[i]
        ]
        before, after = ([(end, f"step/{end}", 0)] * (end in blocks) for end in ("embed", "head"))
        return [*before, *layers, *after]

    def _place_passes(self) -> None:
        parts = self._parts
        if parts.decisions.layout.multiplexed:
            overlap, count = parts.decisions.layout.overlap_p2p, len(parts.subsequences)
            WaveOrder(self, self._stage, count, owners=parts.owners, helpers=parts.helpers, overlap=overlap).place()
            return
        self._place_transfers(-1)
        for number, (each, layers) in enumerate(zip(parts.passes, self._layer_passes, strict=True)):
            self.first_instances.append(len(self._placed))
            of = (each.kind, each.chunk, each.subsequence)
            if not self._placed.repeat(of, each.micro_batch):
                self._place_pass(each, layers)
                self._placed.record(of, each.micro_batch, self.first_instances[-1])
            self._place_transfers(number)

    def _place_pass(self, each: Pass, layers: list[LayerPass]) -> None:
        self._enter(each)
        for layer_pass in layers:
            self.play_layer_pass(layer_pass)
        if each.kind is Kind.WEIGHTS:
            keeps = self._parts.subsequences[each.subsequence].keeps
            for layer in reversed(self._stage.chunk(each.chunk)):
                template = "layer.wgrad.kept" if keeps(layer) else "layer.wgrad"
                self._place_layer(self._named(template, layer), each.micro_batch, layer, each.subsequence)

    def _place_transfers(self, number: int) -> None:
        p2p = self._parts.subsequences[0].p2p
        for side, each in p2p.behind(self._parts.passes, number):
            of = (side, each.kind, each.chunk, each.subsequence)
            if not self._placed.repeat(of, each.micro_batch):
                begin = len(self._placed)
                for transfer in p2p.transfers(side, each):
                    self.place_transfer(transfer)
                self._placed.record(of, each.micro_batch, begin)

    def _place_reductions(self, blocks: list[tuple[str, str, int]]) -> None:
        templates, tied = self._templates, self._parts.tied_with_another
        if tied:
            self._place("embed.tied", "step/embed", 0)
        for kind, place, layer in reversed(blocks):
            if f"{kind}.prepare" in templates:
                self._place(f"{kind}.prepare", place, 0, layer)
        # The gradients of the first block are complete last. In this order no reduction starts before the last backward
        # has ended.
        for kind, place, layer in blocks:
            late = kind not in self._parts.sharding.reduced_early or (kind == BlockKind.EMBED and tied)
            if f"{kind}.reduce" in templates and late:
                self._place(f"{kind}.reduce", place, 0, layer)

    def _forward(self, each: LayerPass, swapped: bool, then: Callable[[], None] | None) -> None:
        m, layer, s, stage = each.micro_batch, each.layer, each.subsequence, self._stage
        at = f"m{m}/s{s}"
        if stage.begins_model(layer):
            self._use("embed.fwd", f"{at}/embed", each, -1)
            if self._parts.subsequences[s].own:
                self._place_layer("stage.enter", m, layer, s)
        last, template = stage.ends_model(layer), self._parts.subsequences[s].forward(layer).name
        template = self._named(template, layer)
        self._use(template, f"{at}/l{stage.layers[layer]}", each, layer, first=self._first_row(s))
        if swapped and self._rounding:
            self._place_layer(self._named("layer.offload", layer), m, layer, s)
        if then:
            then()
        if last:
            self._use("head", f"{at}/head", each, len(stage.layers), backward=True)

    def _backward(self, each: LayerPass, swapped: bool, then: Callable[[], None] | None) -> None:
        layer, at = each.layer, f"m{each.micro_batch}/s{each.subsequence}"
        parts = self._parts.subsequences[each.subsequence]
        for again in parts.layers_again.before(layer):
            self._place_layer(self._named("layer.rebuild", again), each.micro_batch, again, each.subsequence)
        resident = parts.activations.resident_differs and not swapped
        template = "layer.bwd.kept" if parts.keeps(layer) else "layer.bwd.resident" if resident else "layer.bwd"
        place = f"{at}/l{self._stage.layers[layer]}"
        self._use(
            self._named(template, layer), place, each, layer, backward=True, first=self._first_row(each.subsequence)
        )
        if then:
            then()
        if self._stage.begins_model(layer):
            if self._parts.decisions.lora is None:
                self._use("embed.bwd", f"{at}/embed", each, -1, backward=True)
            if "metrics" in self._templates:
                self._place("metrics", f"{at}/metrics", each.micro_batch, len(self._stage.layers))

    def _named(self, template: str, layer: int) -> str:
        """Return the name of a template of the kind of a layer (local number), without its subsequence."""
        return template + self._suffixes[layer]

    def _first_row(self, subsequence: int) -> int:
        """Return the first row of the subsequence that this stage computes; helper stages compute the rows before."""
        own = self._parts.subsequences[subsequence].own
        return own.first if own else 0

    def _use(
        self, template: str, place: str, each: LayerPass, layer: int, *, backward: bool = False, first: int = 0
    ) -> None:
        """Place a template that uses parameters or makes gradients, with ZeRO's gathers and scatters around it."""
        before, after = self._around.get((place, backward), NOTHING)
        self._place_all(before)
        suffix = self._parts.subsequences[each.subsequence].suffix
        self._place(template + suffix, place, each.micro_batch, layer, each.subsequence, first=first)
        self._place_all(after)

    def _place_all(self, placed: list[Placed]) -> None:
        for each in placed:
            self._place(each.template, each.place, each.micro_batch, each.layer, each.subsequence)

    def _place_layer(self, template: str, micro_batch: int, layer: int, subsequence: int) -> None:
        place = f"m{micro_batch}/s{subsequence}/l{self._stage.layers[layer]}"
        suffix = self._parts.subsequences[subsequence].suffix
        self._place(template + suffix, place, micro_batch, layer, subsequence)

    def _place(
        self, template: str, place: str, micro_batch: int, layer: int = -1, subsequence: int = 0, *, first: int = 0
    ) -> None:
        """Add an instance; ``layer`` is local: -1 for the embedding, the number of the stage's layers for the head.

        ``first``: the row of the subsequence that its buffers begin with.
        """
        number, layers = self._templates.number(template), self._stage.layers
        indices = self._templates.indices(number, micro_batch, subsequence, layer)
        of_model = layers[layer] if 0 <= layer < len(layers) else min(layer, self._parts.decisions.model.layers)
        self._placed.append(Instance(number, place, indices, micro_batch, of_model, subsequence, first))


def layer_passes(parts: StageParts) -> LayerPasses:
    """Return the layer passes of every pass of a stage."""
    return [layer_passes_of(each, parts.stage.chunk(each.chunk)) for each in parts.passes]
