"""Buffers and templates of a helper stage: rows of another stage's task that it computes, in two halves of each layer.

A helper computes the first rows of the owner stage's task (``layout/multiplex.py``), while the owner computes the
others.

- What a layer needs is received before its use and freed after it: the layer's parameters, and keys and values of all
  rows before the helper's.
- What the helper computes is kept until backward, whatever the plan recomputes or swaps. SPPO 6.2 offloads in the
  Steady phase and does not mention helpers. Copies of these rows would have no compute to hide under.
- Gradients of the layer's parameters are sent to the owner layer by layer.

A stage may help several owners in one wave. So it computes each layer in two halves, and no owner waits for another:

      forward    norm1, qkv of all portions | send keys and values to owners | attention ... of all portions
      backward   MLP, attention of all portions | receive gradients of keys from owners | qkv, norm1 of all portions

Buffers that both halves use live from one to the other, one for each layer (``between``).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import msgspec

from memo_sim.contract.plan import Decisions
from memo_sim.program.attention.subsequence import BEHIND, D_KV, KV, SUM_DTYPE
from memo_sim.program.data_parallel.optimizer import Optimizer
from memo_sim.program.ir.builder import TemplateBuilder, writes
from memo_sim.program.ir.instruction import BufferClass, Families, Family, Instance, Instruction, Lane, Template
from memo_sim.program.ir.kinds import BlockKind, FamilyKind, Phase, TemplateKind
from memo_sim.program.ir.work import Rowwise
from memo_sim.program.layout.multiplex import Portion, Task
from memo_sim.program.layout.parameters import Block
from memo_sim.program.layout.shape import Shape
from memo_sim.program.layout.stage import Stage
from memo_sim.program.layout.subsequence import Subsequence
from memo_sim.program.operators.library_calls import exchanged_blocks
from memo_sim.program.pipeline.helper_p2p import BACKWARD, FORWARD, TO_HELPER, TO_OWNER, Link
from memo_sim.program.pipeline.shared_instructions import Bound
from memo_sim.program.pipeline.subsequence_templates import SubsequenceTemplates

PARAMS, GRADS, BETWEEN = "params", "grads", "between"
HALVES = ("first", "second")
_FOR_BACKWARD = (TemplateKind.BACKWARD, TemplateKind.HELPER_BACKWARD)


class HelperStage:
    """One portion of another stage's task, on the stage that helps with it."""

    def __init__(
        self, decisions: Decisions, shape: Shape, task: Task, portion: Portion, *, owner: Stage, block: Block
    ) -> None:
        """``shape``: sizes of the whole subsequence; ``owner``: the owner stage; ``block``: parameters of one layer."""
        self.task, self.portion, self.owner, self.block = task, portion, owner, block
        self.decisions = msgspec.structs.replace(
            decisions,
            recompute="none",
            swapped_tokens=0,
            subsequence_swapped_tokens=(),
            offload_window=0,
            mlp_chunk_tokens=0,
            mlp_rebuild="block",
        )
        rows = portion.shape(shape)
        # The KV cache of a helper ends with its own rows. Nothing adds gradients to these rows before it does.
        self.shape = msgspec.structs.replace(rows, kv_cache_tokens=rows.start + rows.tokens, sums=())
        played = Subsequence(task.subsequence, decisions.layout.subsequences, self.shape, self.shape, 0)
        self.whole = SubsequenceTemplates(
            self.decisions,
            played,
            owner,
            1,
            blocks={BlockKind.LAYER: block},
            made={},
            row_blocks=exchanged_blocks(decisions, task.subsequence, portion.first, rows.tokens),
        )
        """Buffers and templates of these rows' whole layers, from which the halves are made."""
        self.layers = len(owner.layers)
        self.suffix = f".s{task.subsequence}.of{owner.index}"
        self.link = Link(decisions, shape, task, portion)
        at = task.portions.index(portion)
        before = [Link(decisions, shape, task, each) for each in task.portions[:at]]
        self.earlier = [each for each in before if each.seen_by(portion)[1]]
        """Links of the helpers of the task's earlier rows that these rows attend to."""
        self.later = [each for each in task.helpers[at + 1 :] if self.link.seen_by(each)[1]]
        """Portions of the helpers of later rows that attend to these; the owner has the last rows."""
        self._between: list[Family] = []
        self._held = self._hold()
        self._slots: dict[str, list[tuple[str, str]]] = {}
        """By a template's plain name: the slots that an instance binds, each with its family's plain name."""
        self._kinds: dict[str, TemplateKind] = {}
        """By a template's plain name."""
        self.templates = [self._named(*made) for made in self._made()]

    def families(self) -> list[Family]:
        """Return the buffers, under the names that they have in the program."""
        return [
            msgspec.structs.replace(each, name=self.name(each.name)) for each in (*self._held.values(), *self._between)
        ]

    def instance(self, template: str, number: int, layer: int) -> Instance:
        """Return an instance of a template (plain name ``template``) at a layer, counted from the owner stage's first.

        ``number``: the template's number in the program.
        """
        at = self.owner.layers[layer]
        indices = tuple(self._index(template, slot, family, layer) for slot, family in self._slots[template])
        x = self.task.subsequence
        return Instance(number, f"m0/s{x}/l{at}", indices, 0, at, x, self.portion.first)

    def name(self, plain: str) -> str:
        """Return the name of a template or of a family in the program."""
        return f"helper.{plain}{self.suffix}"

    def _index(self, template: str, slot: str, family: str, layer: int) -> int:
        if family in (PARAMS, KV):
            return layer + self.layers * (self._kinds[template] in _FOR_BACKWARD)
        return 0 if family == "stage.out" else layer + (slot in ("next_x", "grad_out"))

    def _hold(self) -> Families:
        """Return the buffers that templates bind, by plain name."""
        shape, layers, dtype = self.shape, self.layers, self.decisions.dtype
        inside = shape.attention
        kv, exchange, cache = inside.cache_width, BufferClass.EXCHANGE, BufferClass.KV_CACHE
        summed = Optimizer(self.decisions, self.block, BlockKind.LAYER, layers).grad_dtype
        rows = (shape.shard_tokens, shape.hidden)
        found = [
            *self.whole.activations.families(),
            Family(PARAMS, BufferClass.GATHERED, dtype, self.block.elements, 1, 2 * layers, kind=FamilyKind.GATHERED),
            Family(GRADS, exchange, summed, self.block.elements, 1, layers, kind=FamilyKind.WHOLE_GRADS),
            Family("stage.out", BufferClass.PIPELINE, dtype, *rows, kind=FamilyKind.STAGE_BOUNDARY),
            Family("grad.x", BufferClass.TRANSIENT, dtype, *rows, layers + 1, kind=FamilyKind.INPUT_GRADIENT),
            Family(KV, cache, dtype, inside.kv_cache_tokens, kv, 2 * layers, kind=FamilyKind.PER_LAYER),
            Family(D_KV, cache, dtype, inside.kv_cache_tokens, kv, layers, kind=FamilyKind.PER_LAYER),
        ]
        senders = [(self.owner.index, self.link.summed[1])] * bool(self.link.summed[1])
        senders += [(portion.stage, self.link.seen_by(portion)[1]) for portion in self.later]
        for stage, tokens in senders:  # the owner sends sums, helpers send what one kernel has written
            terms = SUM_DTYPE if stage == self.owner.index else dtype
            name, later_gradients = f"{BEHIND}.{stage}", FamilyKind.LATER_GRADIENTS
            found.append(Family(name, exchange, terms, tokens, kv, layers, kind=later_gradients))
        return {family.name: family for family in found}

    def _made(self) -> Iterator[Bound]:
        """Yield the templates, under plain names."""
        found = self._held
        seen = {**found, "params.layer": found[PARAMS], "grads.layer": found[GRADS]}
        for template, slots in self.whole.layers(self.whole.of_kinds[0], seen):
            plain = template.name.removesuffix(self.whole.suffix)
            yield from self._halves(replace(template, name=plain), slots)
        builder = TemplateBuilder("layer.bwd.zero", Phase.BACKWARD, TemplateKind.CLEAR, BlockKind.LAYER)
        builder.bind(found[GRADS], slot="grads")
        work = Rowwise("zero", self.block.elements, 0, found[GRADS].bytes)
        builder.emit("grads.zero", "zero", Lane.COMPUTE, work, target=writes(builder.all("grads")))
        for each in (builder, *self._messages()):
            yield each.build(), each.bound_slots

    def _messages(self) -> Iterator[TemplateBuilder]:
        """Yield the templates that send or receive messages."""
        mine, link, found = self.portion.stage, self.link, self._held
        sides = {
            "x": ("skeletal.x", "x"),
            "params": (PARAMS, "params"),
            "before": (KV, KV),
            "kv": (KV, KV),
            "out": ("stage.out", "stage.out"),
            "grad": ("grad.x", "grad_out"),
            "again": (PARAMS, "params"),
            "kept": (KV, KV),
            "d_kv": (f"{BEHIND}.{self.owner.index}", "d_kv"),
            "d_kv.before": (D_KV, D_KV),
            "grads": (GRADS, "grads"),
            "grad_in": ("grad.x", "grad_in"),
        }
        for what in (*TO_HELPER, *TO_OWNER):
            for message, rows in link.messages(what):
                family, slot = sides[what]
                yield message.side(mine, found[family], slot, rows if slot in (KV, D_KV) else None)
        for earlier in self.earlier:
            seen = earlier.seen_by(self.portion)
            yield earlier.keys_to(self.portion).side(mine, found[KV], KV, seen)
            yield earlier.gradients_from(self.portion).side(mine, found[D_KV], D_KV, seen)
        for later in self.later:
            yield link.keys_to(later).side(mine, found[KV], KV, link.seen_by(later))
            yield link.gradients_from(later).side(mine, found[f"{BEHIND}.{later.stage}"], "d_kv")

    def _halves(self, template: Template, slots: list[str]) -> Iterator[Bound]:
        """Yield a layer's two halves; buffers of the layer that both halves use are shared between them."""
        phase, at = (BACKWARD if template.kind is TemplateKind.BACKWARD else FORWARD), template.cut
        parts = template.instructions[:at], template.instructions[at:]
        first, second = ({operand.slot for each in part for operand in each.operands} for part in parts)
        own = {family.name: family for family in template.own}
        bound = dict(zip([n for n, name in enumerate(template.slots) if name not in own], slots, strict=True))
        shared = {}
        for number in sorted((first & second) - set(bound)):
            family = own[template.slots[number]]
            shared[number] = msgspec.structs.replace(family, name=f"{BETWEEN}.{phase}.{family.name}", count=self.layers)
        if template.name != "layer.fwd.out":  # it shares the buffers of layer.fwd
            self._between += shared.values()
        for which, part, touched in zip(HALVES, parts, (first, second), strict=True):
            kept = sorted(touched)
            numbers = {slot: number for number, slot in enumerate(kept)}
            yield (
                Template(
                    f"{template.name}.{which}",
                    tuple(shared[n].name if n in shared else template.slots[n] for n in kept),
                    tuple(own[template.slots[n]] for n in kept if n not in bound and n not in shared),
                    tuple(_renumbered(each, numbers) for each in part),
                    template.kind,
                    template.block,
                ),
                [bound.get(n) or shared[n].name for n in kept if n in bound or n in shared],
            )

    def _named(self, template: Template, slots: list[str]) -> Template:
        """Return a template with the names that it has in the program."""
        own = {family.name for family in template.own}
        plain = [name for name in template.slots if name not in own]
        self._kinds[template.name] = template.kind
        self._slots[template.name] = list(zip(slots, plain, strict=True))
        named = tuple(name if name in own else self.name(name) for name in template.slots)
        return replace(template, name=self.name(template.name), slots=named)


def _renumbered(instruction: Instruction, numbers: dict[int, int]) -> Instruction:
    operands = tuple(msgspec.structs.replace(each, slot=numbers[each.slot]) for each in instruction.operands)
    return msgspec.structs.replace(instruction, operands=operands)
