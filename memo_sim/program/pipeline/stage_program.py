"""The program of one rank role: its families, its templates, and their instances in the order of its schedule.

    step/*/zero | passes: [embed] layers forward (+ offload) [head] | layers backward (+ prefetch) [embed backward]
                | step/*/reduce | step/*/opt

A pipeline stage has the embedding or the head only at the model's ends, and p2p transfers around its passes
(``stage_p2p.py``). With tied embeddings both ends hold the token embedding, and sum its gradient between them. Every
subsequence has its own buffers and templates (``subsequence_templates.py``), whose names end in ``.s0``, ``.s1`` ... In
a multiplexed pipeline the passes follow each other in waves (``wave_order.py``).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from memo_sim.contract.plan import Decisions
from memo_sim.program.attention import subsequence as prefix_attention
from memo_sim.program.data_parallel.optimizer import Optimizer, tied, totals
from memo_sim.program.data_parallel.sharding import NOTHING, Sharding
from memo_sim.program.ir.instruction import BufferClass, Families, Family, Instance, Template
from memo_sim.program.ir.program import Program
from memo_sim.program.layout.multiplex import cut_tasks
from memo_sim.program.layout.parameters import Block, embed_block, head_block, layer_block
from memo_sim.program.layout.schedule import Kind, Pass, passes_of
from memo_sim.program.layout.shape import Shape
from memo_sim.program.layout.stage import Stage, stages_of
from memo_sim.program.layout.subsequence import subsequences_of
from memo_sim.program.layout.swap_schedule import (
    LayerPass,
    SwapSchedule,
    buffer_slots,
    layer_passes_of,
    swap_schedule,
    window_schedule,
)
from memo_sim.program.pipeline.bindings import Bindings, Rules
from memo_sim.program.pipeline.helper_stage import HelperStage
from memo_sim.program.pipeline.owner_stage import OwnerStage
from memo_sim.program.pipeline.stage_p2p import StageTransfer
from memo_sim.program.pipeline.subsequence_templates import Made, SubsequenceTemplates
from memo_sim.program.pipeline.wave_order import WaveOrder


class StageLowering:
    """Collects families, templates and instances of one role."""

    def __init__(
        self, decisions: Decisions, shape: Shape, stage: Stage, micro_batches: int, *, made: Made | None = None
    ) -> None:
        """``made``: the templates that stages have alike, as far as others have written them."""
        self.decisions = decisions
        self.shape = shape
        self.stage = stage
        self.micro_batches = micro_batches
        self.passes = passes_of(decisions.layout, stage.index, micro_batches)
        self.blocks = self._parameter_blocks()
        shared = {} if made is None else made
        tasks, parts, stages = cut_tasks(decisions), subsequences_of(decisions, shape), stages_of(decisions)
        mine = {x: task for (x, at), task in tasks.items() if at == stage.index}
        self.subsequences = [
            SubsequenceTemplates(
                decisions,
                each,
                stage,
                micro_batches,
                blocks=self.blocks,
                made=shared,
                own=mine[each.number].own if each.number in mine else None,
            )
            for each in parts
        ]
        self.owners = {x: OwnerStage(decisions, parts[x].shape, task, stage) for x, task in mine.items()}
        """Own tasks that other stages play rows of, by subsequence."""
        self.helpers = [
            HelperStage(
                decisions,
                parts[task.subsequence].shape,
                task,
                portion,
                owner=stages[task.stage],
                block=self.blocks["layer"],
            )
            for task in tasks.values()
            for portion in task.helpers
            if portion.stage == stage.index
        ]
        counts = {"embed": 1, "layer": len(stage.layers), "head": 1}
        self.optimizers = {kind: Optimizer(decisions, block, kind, counts[kind]) for kind, block in self.blocks.items()}
        self.sharding = Sharding(decisions, self.optimizers, micro_batches, stage)
        self.rounding = self.subsequences[0].activations.rounding
        self.families: Families = {}
        self.common: Families = {}
        """Those of no one subsequence."""
        self.own: list[Families] = [{} for _ in self.subsequences]
        """Of each subsequence, its own families under their plain names."""
        self._add_families()
        self.templates: list[Template] = []
        self.layer_passes = [layer_passes_of(each, stage.chunk(each.chunk)) for each in self.passes]
        self.order = [layer_pass for mine in self.layer_passes for layer_pass in mine]
        self.buffer_slots = buffer_slots(self.order, len(self.subsequences)) if self.rounding else {}
        self.rules = Rules(stage, self.sharding, self.buffer_slots, leaving=self.subsequences[0].activations.leaving)
        self.bindings: list[Bindings] = []
        """Of each template, which buffers its instances' slots take."""
        self.instances: list[Instance] = []
        self.numbers: dict[str, int] = {}
        self.marks: list[int] = []
        """First instance of every pass."""

    def _parameter_blocks(self) -> dict[str, Block]:
        """Return the blocks of parameters that the stage holds, by kind."""
        layout, model, stage = self.decisions.layout, self.decisions.model, self.stage
        found = {}
        if stage.first or (stage.last and model.tied_embeddings):
            found["embed"] = embed_block(model, layout.tp, positions=stage.first)
        found["layer"] = layer_block(model, layout.divided)
        if stage.last:
            found["head"] = head_block(model, layout.tp)
        return found

    @property
    def _tied(self) -> bool:
        """Whether another stage holds the token embedding too."""
        return self.stage.stages > 1 and self.decisions.model.tied_embeddings and "embed" in self.blocks

    def _add_families(self) -> None:
        shape, m = self.shape, self.micro_batches
        state = BufferClass.STATE
        if self.stage.first:
            self._hold(Family("input.ids", BufferClass.INPUT, "int64", shape.tokens, 1, m, "device", "step"))
        if self.stage.last:
            self._hold(Family("input.labels", BufferClass.INPUT, "int64", shape.tokens, 1, m, "device", "step"))
        self._hold(
            Family("loss", state, "fp32", 1, 1, 1, "device", "step"),
            Family("grad_norm", state, "fp32", 1, 1, 1, "device", "step"),
        )
        for number, passing in enumerate(self.subsequences):
            self._hold(*passing.boundaries(), subsequence=number)
        for optimizer in self.optimizers.values():
            self._hold(*optimizer.families())
        self._hold(*self.sharding.families(), *self.subsequences[0].activations.shared_families())
        count = self.subsequences[0].activations.kept_per_layer
        self._hold(*prefix_attention.families(self.decisions, self.subsequences[0].shape, count))
        for number, passing in enumerate(self.subsequences):
            self._hold(*passing.families(), subsequence=number)
        for owner in self.owners.values():
            self._hold(*owner.families(self.families["grads.layer"]))
        for helper in self.helpers:
            self._hold(*helper.families())

    def _hold(self, *families: Family, subsequence: int | None = None) -> None:
        """Add families; those of a subsequence under its own names."""
        suffix = "" if subsequence is None else self.subsequences[subsequence].suffix
        held = self.common if subsequence is None else self.own[subsequence]
        for family in families:
            named = replace(family, name=family.name + suffix) if suffix else family
            held[family.name] = self.families[named.name] = named

    def program(self) -> Program:
        """Return the role's program."""
        every = [{**self.common, **mine} for mine in self.own]
        seen = [self.sharding.whole(families) for families in every]
        for passing, families, whole in zip(self.subsequences, every, seen, strict=True):
            for found in passing.layers(families, whole):
                self._add(*found)
        for kind, optimizer in self.optimizers.items():
            before, after = (optimizer.zero, optimizer.gather, optimizer.prepare), (optimizer.norm, optimizer.update)
            for template in (*before, optimizer.reduce, *after):
                if template != optimizer.reduce or kind not in self.sharding.grads:
                    self._add(template(self.families))
        for sharded in self.sharding.templates(self.families):
            self._add(sharded)
        self._add(totals(self.decisions, self.families))
        for passing, whole in zip(self.subsequences, seen, strict=True):
            for found in passing.ends(whole):
                self._add(*found)
        if self._tied:
            self._add(tied(self.blocks["embed"], self.families))
        for passing, families in zip(self.subsequences, every, strict=True):
            for found in passing.handed(families):
                self._add(*found)
        self._add_helpers(every)
        self._step()
        return Program(
            stage=self.stage.name,
            families=tuple(self.families.values()),
            templates=tuple(self.templates),
            instances=tuple(self.instances),
            micro_batches=self.micro_batches,
            passes=tuple(zip(self.passes, self.marks, strict=True)),
        )

    def _add_helpers(self, every: list[Families]) -> None:
        """Add what is handed to guests and taken from them, and what the stage plays as one; the last templates."""
        for x, owner in self.owners.items():
            for made in owner.templates(every[x]):
                self._add(replace(made.build(), name=owner.name(made.name)), made.bound_slots)
        for helper in self.helpers:
            for template in helper.templates:
                self.numbers[template.name] = len(self.templates)
                self.templates.append(template)

    def _add(self, template: Template | None, slots: list[str] | None = None) -> None:
        if template is None:
            return
        own = {f.name for f in template.own}
        self.numbers[template.name] = len(self.templates)
        self.templates.append(template)
        families = [f for f in template.slots if f not in own]
        rules = [self.rules.of(template.name, slot, f) for slot, f in zip(slots or families, families, strict=True)]
        self.bindings.append(Bindings(rules, self.rules.double_buffered, self.micro_batches))

    def _place(
        self, template: str, place: str, micro_batch: int, layer: int = -1, subsequence: int = 0, *, first: int = 0
    ) -> None:
        """Add an instance; ``layer`` is local: -1 for the embedding, the number of the stage's layers for the head.

        ``first``: the subsequence's row that its buffers begin with.
        """
        number, layers = self.numbers[template], self.stage.layers
        indices = self.bindings[number].indices(micro_batch, subsequence, layer)
        of_model = layers[layer] if 0 <= layer < len(layers) else min(layer, self.decisions.model.layers)
        self.instances.append(Instance(number, place, indices, micro_batch, of_model, subsequence, first))

    def _place_layer(self, template: str, micro_batch: int, layer: int, subsequence: int) -> None:
        place = f"m{micro_batch}/s{subsequence}/l{self.stage.layers[layer]}"
        self._place(template + self.subsequences[subsequence].suffix, place, micro_batch, layer, subsequence)

    def _pass(self, template: str, place: str, layer_pass: LayerPass, layer: int, *, backward: bool = False) -> None:
        """Place what needs parameters or makes gradients, with what gathers and scatters them around it."""
        before, after = self.around.get((place, backward), NOTHING)
        for p in before:
            self._place(p.template, p.place, p.micro_batch, p.layer, p.subsequence)
        passing = self.subsequences[layer_pass.subsequence]
        first = passing.own.first if passing.own and template.startswith("layer.") else 0
        self._place(
            template + passing.suffix, place, layer_pass.micro_batch, layer, layer_pass.subsequence, first=first
        )
        for p in after:
            self._place(p.template, p.place, p.micro_batch, p.layer, p.subsequence)

    def _step_blocks(self) -> list[tuple[str, str, int]]:
        """Return (kind, place, layer) of every parameter block."""
        layers = [("layer", f"step/l{number}", i) for i, number in enumerate(self.stage.layers)]
        ends = {"embed": [("embed", "step/embed", 0)], "layer": layers, "head": [("head", "step/head", 0)]}
        return [block for kind in self.blocks for block in ends[kind]]

    def _step(self) -> None:
        blocks = self._step_blocks()
        for kind, place, layer in blocks:
            if f"{kind}.gather" in self.numbers and kind not in self.sharding.params:
                self._place(f"{kind}.gather", place, 0, layer)
        for kind, place, layer in blocks:
            self._place(f"{kind}.zero", place, 0, layer)
        self._passes()
        if self._tied:
            self._place("embed.tied", "step/embed", 0)
        for kind, place, layer in reversed(blocks):
            if f"{kind}.prepare" in self.numbers:
                self._place(f"{kind}.prepare", place, 0, layer)
        # The first block's gradients are complete last: in this order none leaves before the last backward has ended.
        for kind, place, layer in blocks:
            late = kind not in self.sharding.reduced_early or (kind == "embed" and self._tied)
            if f"{kind}.reduce" in self.numbers and late:
                self._place(f"{kind}.reduce", place, 0, layer)
        for kind, place, layer in blocks:
            if kind != "embed" or self.stage.first:  # what two stages hold is counted once
                self._place(f"{kind}.norm", place, 0, layer)
        if "totals" in self.numbers:
            self._place("totals", "step/totals", 0)
        for kind, place, layer in blocks:
            self._place(f"{kind}.update", place, 0, layer)

    def _passes(self) -> None:
        self.around = self.sharding.around(self.order)
        self.copies = self._copies()
        self.visited = 0
        if self.decisions.layout.multiplexed:
            ahead = self.decisions.layout.overlap_p2p
            count = len(self.subsequences)
            WaveOrder(self, self.stage, count, owners=self.owners, helpers=self.helpers, ahead=ahead).place()
            return
        self._place_transfers(-1)
        for number, (each, mine) in enumerate(zip(self.passes, self.layer_passes, strict=True)):
            self.begin(each)
            for layer_pass in mine:
                self.play_layer_pass(layer_pass)
            if each.kind is Kind.WEIGHTS:
                for layer in reversed(self.stage.chunk(each.chunk)):
                    self._place_layer("layer.wgrad", each.micro_batch, layer, each.subsequence)
            self._place_transfers(number)

    def begin(self, each: Pass) -> None:
        """Begin a pass: with what was received, gathered or copied."""
        self.marks.append(len(self.instances))
        for handed in self.subsequences[each.subsequence].p2p.entered(each):
            self.place_transfer(handed)

    def play_layer_pass(self, layer_pass: LayerPass, then: Callable[[], None] | None = None) -> None:
        """Place one layer's forward or backward, with the model's ends and the copies around it.

        ``then`` is called between the layer and the end of the model that follows it.
        """
        schedule = self.copies
        swapped = layer_pass.key in schedule.swapped
        (self._backward if layer_pass.backward else self._forward)(layer_pass, swapped, then)
        for left in schedule.leave_after.get(self.visited, []):
            self._place_layer("layer.offload", left.micro_batch, left.layer, left.subsequence)
        for wanted in schedule.prefetch_after.get(self.visited, []):
            self._place_layer("layer.prefetch", wanted.micro_batch, wanted.layer, wanted.subsequence)
        self.visited += 1

    def place_transfer(self, handed: StageTransfer) -> None:
        """Place a hand-over between neighbours."""
        self._place_layer(handed.template, handed.micro_batch, handed.layer, handed.subsequence)

    def at_owner(self, template: str, layer: int, subsequence: int) -> None:
        """Place a template of ``OwnerStage`` at a layer (local number)."""
        place = f"m0/s{subsequence}/l{self.stage.layers[layer]}"
        self._place(self.owners[subsequence].name(template), place, 0, layer, subsequence)

    def as_helper(self, helper: HelperStage, template: str, layer: int) -> None:
        """Place a template of ``HelperStage`` at a layer, counted on its own stage."""
        self.instances.append(helper.instance(template, self.numbers[helper.name(template)], layer))

    def _copies(self) -> SwapSchedule:
        """Return which activations are copied to the host and back, and where in the order."""
        travelling = {n for n, each in enumerate(self.subsequences) if each.activations.travels}
        if self.subsequences[0].activations.leaving:
            return window_schedule(self.layer_passes, self.decisions.offload_window, travelling)
        return swap_schedule(self.order, self.buffer_slots) if self.rounding else SwapSchedule(frozenset(), {})

    def _place_transfers(self, number: int) -> None:
        for handed in self.subsequences[0].p2p.behind(self.passes, number):
            self.place_transfer(handed)

    def _forward(self, layer_pass: LayerPass, swapped: bool, then: Callable[[], None] | None) -> None:
        m, layer, s, stage = layer_pass.micro_batch, layer_pass.layer, layer_pass.subsequence, self.stage
        at = f"m{m}/s{s}"
        if stage.begins_model(layer):
            self._pass("embed.fwd", f"{at}/embed", layer_pass, -1)
            if self.subsequences[s].own:
                self._place_layer("stage.enter", m, layer, s)
        last = stage.ends_model(layer)
        template = "layer.fwd.last" if last else "layer.fwd.out" if stage.ends_chunk(layer) else "layer.fwd"
        self._pass(template, f"{at}/l{stage.layers[layer]}", layer_pass, layer)
        if swapped and self.rounding:
            self._place_layer("layer.offload", m, layer, s)
        if then:
            then()
        if last:
            self._pass("head", f"{at}/head", layer_pass, len(stage.layers), backward=True)

    def _backward(self, layer_pass: LayerPass, swapped: bool, then: Callable[[], None] | None) -> None:
        layer, at = layer_pass.layer, f"m{layer_pass.micro_batch}/s{layer_pass.subsequence}"
        resident = self.subsequences[0].activations.resident_differs and not swapped
        template = "layer.bwd.resident" if resident else "layer.bwd"
        self._pass(template, f"{at}/l{self.stage.layers[layer]}", layer_pass, layer, backward=True)
        if then:
            then()
        if self.stage.begins_model(layer):
            self._pass("embed.bwd", f"{at}/embed", layer_pass, -1, backward=True)
