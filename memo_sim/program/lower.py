"""From decisions to a program: the one pure function both interpreters start from.

step/*/zero | per micro-batch: embed, layers forward (+ offload), head, layers backward (+ prefetch), embed backward
| step/*/reduce | step/*/opt

With ZeRO 2 and 3 every pass has its gathering and scattering around it (``sharding.py``), and no reduce at the end.
"""

from __future__ import annotations

import hashlib

from memo_sim.contract.plan import Decisions
from memo_sim.program.activations import Activations
from memo_sim.program.builder import TemplateBuilder
from memo_sim.program.ends import embed_backward, embed_forward, head
from memo_sim.program.instruction import BufferClass, Family, Instance, Template
from memo_sim.program.layer import LayerWriter
from memo_sim.program.optimizer import Optimizer, totals
from memo_sim.program.parameters import embed_block, head_block, layer_block
from memo_sim.program.program import Program
from memo_sim.program.shape import Shape, shape_of
from memo_sim.program.sharding import Sharding
from memo_sim.program.visits import Visit, step_visits, swap_schedule


def lower(decisions: Decisions, *, micro_batches: int | None = None, cp_rank: int | None = None) -> tuple[Program, ...]:
    """Return the program of each rank role; without pipeline stages there is one.

    ``micro_batches`` plays fewer than the decisions name (the engine repeats identical ones). ``cp_rank``: the program
    of this context-parallel rank, in place of the representative's (cp - 1), which plans pin and the engine plays.

    Raises:
        Infeasible: when the layout does not divide the model or the sequence, or asks for what no lowering plays yet.
    """
    shape = shape_of(decisions, cp_rank=cp_rank)
    return (_Lowering(decisions, shape, micro_batches or decisions.micro_batches).program(),)


class _Lowering:
    """Collects families, templates and instances of one role."""

    def __init__(self, decisions: Decisions, shape: Shape, micro_batches: int) -> None:
        model, tp = decisions.model, decisions.layout.tp
        self.decisions = decisions
        self.shape = shape
        self.micro_batches = micro_batches
        self.activations = Activations(decisions, shape, micro_batches)
        self.embed = embed_block(model, tp)
        self.layer = layer_block(model, tp)
        self.head = head_block(model, tp)
        self.optimizers = {
            "embed": Optimizer(decisions, self.embed, "embed", 1),
            "layer": Optimizer(decisions, self.layer, "layer", model.layers),
            "head": Optimizer(decisions, self.head, "head", 1),
        }
        self.sharding = Sharding(decisions, self.optimizers, micro_batches)
        self.families = {f.name: f for f in self._families()}
        self.seen = self.sharding.whole(self.families)
        """The families as a pass sees them: whole parameters and gradients under the names of what a rank holds."""
        self.templates: list[Template] = []
        self.slots: list[list[tuple[str, str]]] = []
        """Of each template, the slots that an instance binds: name and family."""
        self.instances: list[Instance] = []
        self.numbers: dict[str, int] = {}

    def _families(self) -> list[Family]:
        shape, layers, m = self.shape, self.decisions.model.layers, self.micro_batches
        dtype, state = self.decisions.dtype, BufferClass.STATE
        found = [
            Family("input.ids", BufferClass.INPUT, "int64", shape.tokens, 1, m, "device", "step"),
            Family("input.labels", BufferClass.INPUT, "int64", shape.tokens, 1, m, "device", "step"),
            Family("loss", state, "fp32", 1, 1, 1, "device", "step"),
            Family("grad_norm", state, "fp32", 1, 1, 1, "device", "step"),
            Family("head.x", BufferClass.SKELETAL, dtype, shape.shard_tokens, shape.hidden, m),
            Family("grad.x", BufferClass.TRANSIENT, dtype, shape.shard_tokens, shape.hidden, m * (layers + 1)),
        ]
        for optimizer in self.optimizers.values():
            found += optimizer.families()
        return found + self.sharding.families() + self.activations.families()

    def program(self) -> Program:
        self._layer_templates()
        for optimizer in self.optimizers.values():
            for template in (optimizer.zero, optimizer.gather, optimizer.reduce, optimizer.norm, optimizer.update):
                if template != optimizer.reduce or not self.sharding.grads:
                    self._add(template(self.families))
        for made in self.sharding.templates(self.families):
            self._add(made)
        self._add(totals(self.decisions, self.families))
        self._add(embed_forward(self.decisions, self.shape, self.embed, self.seen))
        self._add(embed_backward(self.decisions, self.shape, self.embed, self.seen))
        self._add(head(self.decisions, self.shape, self.head, self.embed, self.seen))
        self._step()
        return Program(
            role="rank",
            families=tuple(self.families.values()),
            templates=tuple(self.templates),
            instances=tuple(self.instances),
            micro_batches=self.micro_batches,
        )

    def _add(self, template: Template | None, slots: list[str] | None = None) -> None:
        if template is None:
            return
        own = {f.name for f in template.own}
        self.numbers[template.name] = len(self.templates)
        self.templates.append(template)
        families = [f for f in template.slots if f not in own]
        self.slots.append(list(zip(slots or families, families, strict=True)))

    def _layer_builder(self, name: str, phase: str, *, gradients: bool) -> tuple[TemplateBuilder, LayerWriter]:
        builder = TemplateBuilder(name, phase)
        builder.bind(self.seen["params.layer"], slot="params")
        if gradients:
            builder.bind(self.seen["grads.layer"], slot="grads")
        self.activations.bind(builder, self.families)
        return builder, LayerWriter(builder, self.decisions, self.shape, self.layer)

    def _layer_templates(self) -> None:
        for name, out in (("layer.fwd", "skeletal.x"), ("layer.fwd.last", "head.x")):
            builder, writer = self._layer_builder(name, "fwd", gradients=False)
            builder.bind(self.families[out], slot="next_x")
            writer.forward(self.activations.row_blocks, "next_x")
            self._add(builder.build(), builder.bound_slots)
        self._add_backward("layer.bwd", rebuild=True)
        if self.activations.resident_differs:
            self._add_backward("layer.bwd.resident", rebuild=False)
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
        writer.backward("grad_out", "grad_in")
        self._add(builder.build(), builder.bound_slots)

    def _place(self, template: str, place: str, micro_batch: int, layer: int = -1) -> None:
        number = self.numbers[template]
        indices = []
        for slot, family in self.slots[number]:
            whole = self.sharding.index(family, template, micro_batch, layer)
            indices.append(self._index(slot, micro_batch, layer) if whole is None else whole)
        self.instances.append(Instance(number, place, tuple(indices), micro_batch, layer))

    def _pass(self, template: str, place: str, micro_batch: int, layer: int = -1, *, backward: bool = False) -> None:
        """Place what needs parameters or makes gradients, with what gathers and scatters them around it."""
        before, after = self.around[place, backward]
        for p in before:
            self._place(p.template, p.place, p.micro_batch, p.layer)
        self._place(template, place, micro_batch, layer)
        for p in after:
            self._place(p.template, p.place, p.micro_batch, p.layer)

    def _index(self, slot: str, micro_batch: int, layer: int) -> int:
        layers = self.decisions.model.layers
        state, _, kind = slot.partition(".")
        if state in ("params", "grads", "master", "moment1", "moment2", "host_grads", "host_params"):
            return max(layer, 0) if kind in ("", "layer") else 0
        if slot in ("grad_in", "grad_out", "grad.x"):
            boundary = {"grad_in": layer, "grad_out": layer + 1, "grad.x": layers if layer == layers else 0}[slot]
            return micro_batch * (layers + 1) + boundary
        if slot == "next_x":
            return micro_batch if layer == layers - 1 else self.activations.index("x", micro_batch, layer + 1)
        if slot in ("head.x", "input.ids", "input.labels"):
            return micro_batch
        if slot in ("loss", "grad_norm"):
            return 0
        return self.activations.index(slot, micro_batch, max(layer, 0))

    def _blocks(self) -> list[tuple[str, str, int]]:
        """Return (kind, place, layer) of every parameter block."""
        layers = [("layer", f"step/l{i}", i) for i in range(self.decisions.model.layers)]
        return [("embed", "step/embed", 0), *layers, ("head", "step/head", 0)]

    def _step(self) -> None:
        for kind, place, layer in self._blocks():
            if f"{kind}.gather" in self.numbers and not self.sharding.params:
                self._place(f"{kind}.gather", place, 0, layer)
        for kind, place, layer in self._blocks():
            self._place(f"{kind}.zero", place, 0, layer)
        visits = step_visits(self.decisions.model.layers, self.micro_batches)
        self.around = self.sharding.around(visits)
        schedule = swap_schedule(visits) if self.activations.rounding else None
        for i, visit in enumerate(visits):
            if visit.backward:
                self._backward(visit, schedule is not None and (visit.micro_batch, visit.layer) in schedule.swapped)
            else:
                self._forward(visit, schedule is not None and (visit.micro_batch, visit.layer) in schedule.swapped)
            for wanted in schedule.prefetch_after.get(i, []) if schedule else []:
                self._place(
                    "layer.prefetch", f"m{wanted.micro_batch}/s0/l{wanted.layer}", wanted.micro_batch, wanted.layer
                )
        for kind, place, layer in reversed(self._blocks()):  # in the order in which gradients are complete
            if f"{kind}.reduce" in self.numbers and not self.sharding.reduced_early:
                self._place(f"{kind}.reduce", place, 0, layer)
        for kind, place, layer in self._blocks():
            self._place(f"{kind}.norm", place, 0, layer)
        if "totals" in self.numbers:
            self._place("totals", "step/totals", 0)
        for kind, place, layer in self._blocks():
            self._place(f"{kind}.update", place, 0, layer)

    def _forward(self, visit: Visit, swapped: bool) -> None:
        m, layer, layers = visit.micro_batch, visit.layer, self.decisions.model.layers
        if layer == 0:
            self._pass("embed.fwd", f"m{m}/s0/embed", m)
        last = layer == layers - 1
        self._pass("layer.fwd.last" if last else "layer.fwd", f"m{m}/s0/l{layer}", m, layer)
        if swapped:
            self._place("layer.offload", f"m{m}/s0/l{layer}", m, layer)
        if last:
            self._pass("head", f"m{m}/s0/head", m, layers, backward=True)

    def _backward(self, visit: Visit, swapped: bool) -> None:
        m, layer = visit.micro_batch, visit.layer
        resident = self.activations.resident_differs and not swapped
        self._pass("layer.bwd.resident" if resident else "layer.bwd", f"m{m}/s0/l{layer}", m, layer, backward=True)
        if layer == 0:
            self._pass("embed.bwd", f"m{m}/s0/embed", m, backward=True)


def program_sha256(programs: tuple[Program, ...]) -> str:
    """Return the hash a plan pins: of one program, or of all roles' hashes in order."""
    if len(programs) == 1:
        return programs[0].sha256
    return hashlib.sha256("".join(p.sha256 for p in programs).encode()).hexdigest()
