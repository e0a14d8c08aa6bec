"""The program of one rank role: its families, its templates, and their instances in the order of its schedule.

    step/*/zero | passes: [embed] layers forward (+ offload) [head] | layers backward (+ prefetch) [embed backward]
                | step/*/reduce | step/*/opt

A pipeline stage has the embedding or the head only at the model's ends, and hand-overs around its passes
(``handover.py``). With tied embeddings both ends hold the token embedding, and sum its gradient between them.
"""

from __future__ import annotations

from memo_sim.contract.plan import Decisions
from memo_sim.program.activations import Activations
from memo_sim.program.bindings import Bindings, Rules
from memo_sim.program.builder import TemplateBuilder
from memo_sim.program.ends import embed_backward, embed_forward, head
from memo_sim.program.handover import Handovers
from memo_sim.program.instruction import BufferClass, Family, Instance, Template
from memo_sim.program.layer import LayerWriter
from memo_sim.program.optimizer import Optimizer, tied, totals
from memo_sim.program.parameters import Block, embed_block, head_block, layer_block
from memo_sim.program.program import Program
from memo_sim.program.schedule import Kind, passes_of
from memo_sim.program.shape import Shape
from memo_sim.program.sharding import Sharding
from memo_sim.program.stage import Stage
from memo_sim.program.visits import Visit, pass_visits, swap_schedule
from memo_sim.program.weights import PendingWeights


class RoleLowering:
    """Collects families, templates and instances of one role."""

    def __init__(self, decisions: Decisions, shape: Shape, stage: Stage, micro_batches: int) -> None:
        self.decisions = decisions
        self.shape = shape
        self.stage = stage
        self.micro_batches = micro_batches
        self.passes = passes_of(decisions.layout, stage.index, micro_batches)
        self.activations = Activations(decisions, shape, micro_batches, stage)
        self.handovers = Handovers(decisions, shape, stage, micro_batches, self.activations.rounding)
        self.pending = PendingWeights(decisions, shape, self.activations)
        self.blocks = self._parameter_blocks()
        counts = {"embed": 1, "layer": len(stage.layers), "head": 1}
        self.optimizers = {kind: Optimizer(decisions, block, kind, counts[kind]) for kind, block in self.blocks.items()}
        self.sharding = Sharding(decisions, self.optimizers, micro_batches, stage)
        self.families = {f.name: f for f in self._families()}
        self.seen = self.sharding.whole(self.families)
        """The families as a pass sees them: whole parameters and gradients under the names of what a rank holds."""
        self.templates: list[Template] = []
        self.rules = Rules(stage, self.activations, self.sharding)
        self.bindings: list[Bindings] = []
        """Of each template, which buffers its instances' slots take."""
        self.instances: list[Instance] = []
        self.numbers: dict[str, int] = {}
        self.marks: list[int] = []
        """First instance of every pass."""

    def _parameter_blocks(self) -> dict[str, Block]:
        """Return the blocks of parameters that the stage holds, by kind."""
        model, tp, stage = self.decisions.model, self.decisions.layout.tp, self.stage
        found = {}
        if stage.first or (stage.last and model.tied_embeddings):
            found["embed"] = embed_block(model, tp, positions=stage.first)
        found["layer"] = layer_block(model, tp)
        if stage.last:
            found["head"] = head_block(model, tp)
        return found

    @property
    def _tied(self) -> bool:
        """Whether another stage holds the token embedding too."""
        return self.stage.stages > 1 and self.decisions.model.tied_embeddings and "embed" in self.blocks

    def _families(self) -> list[Family]:
        shape, m = self.shape, self.micro_batches
        dtype, state = self.decisions.dtype, BufferClass.STATE
        found = []
        if self.stage.first:
            found.append(Family("input.ids", BufferClass.INPUT, "int64", shape.tokens, 1, m, "device", "step"))
        if self.stage.last:
            found.append(Family("input.labels", BufferClass.INPUT, "int64", shape.tokens, 1, m, "device", "step"))
        found += [
            Family("loss", state, "fp32", 1, 1, 1, "device", "step"),
            Family("grad_norm", state, "fp32", 1, 1, 1, "device", "step"),
        ]
        if self.stage.last:
            found.append(Family("head.x", BufferClass.SKELETAL, dtype, shape.shard_tokens, shape.hidden, m))
        count = m * self.stage.boundaries
        found.append(Family("grad.x", BufferClass.TRANSIENT, dtype, shape.shard_tokens, shape.hidden, count))
        for optimizer in self.optimizers.values():
            found += optimizer.families()
        parts = (self.sharding, self.activations, self.handovers, self.pending)
        return found + [family for part in parts for family in part.families()]

    def program(self) -> Program:
        """Return the role's program."""
        self._layer_templates()
        for optimizer in self.optimizers.values():
            before, after = (optimizer.zero, optimizer.gather, optimizer.prepare), (optimizer.norm, optimizer.update)
            for template in (*before, optimizer.reduce, *after):
                if template != optimizer.reduce or not self.sharding.grads:
                    self._add(template(self.families))
        for made in self.sharding.templates(self.families):
            self._add(made)
        self._add(totals(self.decisions, self.families))
        if self.stage.first:
            self._add(embed_forward(self.decisions, self.shape, self.blocks["embed"], self.seen))
            self._add(embed_backward(self.decisions, self.shape, self.blocks["embed"], self.seen))
        if self.stage.last:
            self._add(head(self.decisions, self.shape, self.blocks["head"], self.blocks.get("embed"), self.seen))
        if self._tied:
            self._add(tied(self.blocks["embed"], self.families))
        for builder in self.handovers.templates(self.families):
            self._add(builder.build(), builder.bound_slots)
        self._step()
        return Program(
            role=self.stage.role,
            families=tuple(self.families.values()),
            templates=tuple(self.templates),
            instances=tuple(self.instances),
            micro_batches=self.micro_batches,
            passes=tuple(zip(self.passes, self.marks, strict=True)),
        )

    def _add(self, template: Template | None, slots: list[str] | None = None) -> None:
        if template is None:
            return
        own = {f.name for f in template.own}
        self.numbers[template.name] = len(self.templates)
        self.templates.append(template)
        families = [f for f in template.slots if f not in own]
        rules = [self.rules.of(template.name, slot, f) for slot, f in zip(slots or families, families, strict=True)]
        self.bindings.append(Bindings(rules))

    def _layer_builder(self, name: str, phase: str, *, gradients: bool) -> tuple[TemplateBuilder, LayerWriter]:
        builder = TemplateBuilder(name, phase)
        builder.bind(self.seen["params.layer"], slot="params")
        if gradients:
            builder.bind(self.seen["grads.layer"], slot="grads")
            if self.pending.apart:
                self.pending.bind(builder, self.families)
        self.activations.bind(builder, self.families)
        return builder, LayerWriter(builder, self.decisions, self.shape, self.blocks["layer"])

    def _layer_templates(self) -> None:
        for name, out in (("layer.fwd", "skeletal.x"), ("layer.fwd.last", "head.x"), ("layer.fwd.out", "stage.out")):
            if out not in self.families:
                continue
            builder, writer = self._layer_builder(name, "fwd", gradients=False)
            builder.bind(self.families[out], slot="next_x")
            writer.forward(self.activations.row_blocks, "next_x")
            self._add(builder.build(), builder.bound_slots)
        self._add_backward("layer.bwd", rebuild=True)
        if self.activations.resident_differs:
            self._add_backward("layer.bwd.resident", rebuild=False)
        if self.pending.apart:
            self._add_weights()
        if self.activations.rounding:
            backward = self.templates[self.numbers["layer.bwd"]]
            self._add_copies(self.activations.offload(self.families))
            self._add_copies(self.activations.prefetch(self.families, backward))

    def _add_copies(self, template: Template) -> None:
        self._add(template, [s.removeprefix("skeletal.") for s in template.slots])

    def _add_backward(self, name: str, *, rebuild: bool) -> None:
        builder, writer = self._layer_builder(name, "bwd", gradients=True)
        builder.bind(self.families["grad.x"], slot="grad_out")
        builder.bind(self.families["grad.x"], slot="grad_in")
        builder.phase = "rec"
        if self.decisions.recompute == "full":
            writer.recompute((0, self.shape.tokens), 0, whole=True)
        elif rebuild and self.activations.recomputed is not None:
            blocks = self.activations.row_blocks
            writer.recompute(self.activations.recomputed, len(blocks) - 1, whole=False)
        builder.phase = "bwd"
        writer.weights_apart = self.pending.apart
        writer.backward("grad_out", "grad_in")
        if self.pending.apart:
            self.pending.keep(builder)
        self._add(builder.build(), builder.bound_slots)

    def _add_weights(self) -> None:
        builder = TemplateBuilder("layer.weights", "wgt")
        builder.bind(self.seen["grads.layer"], slot="grads")
        self.pending.bind_inputs(builder, self.families)
        self.pending.write(LayerWriter(builder, self.decisions, self.shape, self.blocks["layer"]))
        self._add(builder.build(), builder.bound_slots)

    def _place(self, template: str, place: str, micro_batch: int, layer: int = -1) -> None:
        """Add an instance; ``layer`` is local: -1 for the embedding, the number of the stage's layers for the head."""
        number, layers = self.numbers[template], self.stage.layers
        indices = self.bindings[number].indices(micro_batch, layer)
        of_model = layers[layer] if 0 <= layer < len(layers) else min(layer, self.decisions.model.layers)
        self.instances.append(Instance(number, place, indices, micro_batch, of_model))

    def _place_layer(self, template: str, micro_batch: int, layer: int) -> None:
        self._place(template, f"m{micro_batch}/s0/l{self.stage.layers[layer]}", micro_batch, layer)

    def _pass(self, template: str, place: str, micro_batch: int, layer: int = -1, *, backward: bool = False) -> None:
        """Place what needs parameters or makes gradients, with what gathers and scatters them around it."""
        before, after = self.around[place, backward]
        for p in before:
            self._place(p.template, p.place, p.micro_batch, p.layer)
        self._place(template, place, micro_batch, layer)
        for p in after:
            self._place(p.template, p.place, p.micro_batch, p.layer)

    def _step_blocks(self) -> list[tuple[str, str, int]]:
        """Return (kind, place, layer) of every parameter block."""
        layers = [("layer", f"step/l{number}", i) for i, number in enumerate(self.stage.layers)]
        ends = {"embed": [("embed", "step/embed", 0)], "layer": layers, "head": [("head", "step/head", 0)]}
        return [block for kind in self.blocks for block in ends[kind]]

    def _step(self) -> None:
        blocks = self._step_blocks()
        for kind, place, layer in blocks:
            if f"{kind}.gather" in self.numbers and not self.sharding.params:
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
            late = not self.sharding.reduced_early or (kind == "embed" and self._tied)
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
        visits = [pass_visits(each, self.stage.chunk(each.chunk)) for each in self.passes]
        order = [visit for mine in visits for visit in mine]
        self.around = self.sharding.around(order)
        schedule = swap_schedule(order) if self.activations.rounding else None
        self._hand_over(-1)
        done = 0
        for number, (each, mine) in enumerate(zip(self.passes, visits, strict=True)):
            self.marks.append(len(self.instances))
            for handed in self.handovers.entered(each):
                self._place_layer(handed.template, handed.micro_batch, handed.layer)
            for visit in mine:
                swapped = schedule is not None and (visit.micro_batch, visit.layer) in schedule.swapped
                (self._backward if visit.backward else self._forward)(visit, swapped)
                for wanted in schedule.prefetch_after.get(done, []) if schedule else []:
                    self._place_layer("layer.prefetch", wanted.micro_batch, wanted.layer)
                done += 1
            if each.kind is Kind.WEIGHTS:
                for layer in reversed(self.stage.chunk(each.chunk)):
                    self._place_layer("layer.weights", each.micro_batch, layer)
            self._hand_over(number)

    def _hand_over(self, number: int) -> None:
        for handed in self.handovers.behind(self.passes, number):
            self._place_layer(handed.template, handed.micro_batch, handed.layer)

    def _forward(self, visit: Visit, swapped: bool) -> None:
        m, layer, stage = visit.micro_batch, visit.layer, self.stage
        at = f"m{m}/s0"
        if stage.begins_model(layer):
            self._pass("embed.fwd", f"{at}/embed", m)
        last = stage.ends_model(layer)
        template = "layer.fwd.last" if last else "layer.fwd.out" if stage.ends_chunk(layer) else "layer.fwd"
        self._pass(template, f"{at}/l{stage.layers[layer]}", m, layer)
        if swapped:
            self._place_layer("layer.offload", m, layer)
        if last:
            self._pass("head", f"{at}/head", m, len(stage.layers), backward=True)

    def _backward(self, visit: Visit, swapped: bool) -> None:
        m, layer = visit.micro_batch, visit.layer
        resident = self.activations.resident_differs and not swapped
        place = f"m{m}/s0/l{self.stage.layers[layer]}"
        self._pass("layer.bwd.resident" if resident else "layer.bwd", place, m, layer, backward=True)
        if self.stage.begins_model(layer):
            self._pass("embed.bwd", f"m{m}/s0/embed", m, backward=True)
