"""Buffers and templates of one subsequence on one pipeline stage.

Families are written under plain names (``grad.x``), and ``stage_families.py`` adds the subsequence's suffix. Templates
get the suffix here (``layer.fwd.s1``). Without subsequences, the only one holds the whole micro-batch. Layers of one
kind are the same on every stage, and so are their templates: they are written once (``Made``). Where layers differ,
each kind has its own families and templates (``layer.fwd.k1``).
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cached_property, partial

import msgspec

from memo_sim.contract.plan import Decisions
from memo_sim.program.attention import subsequence as prefix_attention
from memo_sim.program.attention.partial import DOCUMENTS
from memo_sim.program.ir.builder import TemplateBuilder
from memo_sim.program.ir.instruction import BufferClass, Families, Family, Template
from memo_sim.program.ir.kinds import BlockKind, FamilyKind, Phase, TemplateKind
from memo_sim.program.layers import expert_ends
from memo_sim.program.layers.activations import Activations
from memo_sim.program.layers.embedding_and_head import embed_backward, embed_forward, head
from memo_sim.program.layers.expert_exchange import GRADS, PARAMS
from memo_sim.program.layers.kinds import Layer, layer_kind
from memo_sim.program.layers.layer import LayerWriter
from memo_sim.program.layers.weight_gradients import DeferredWeightGradients
from memo_sim.program.layout.multiplex import Portion, swapped_by_owner
from memo_sim.program.layout.parameters import Block
from memo_sim.program.layout.recomputed_layers import ALL, recomputed_layers
from memo_sim.program.layout.shape import Shape
from memo_sim.program.layout.stage import Stage
from memo_sim.program.layout.stage_layers import LayersOfKind, layers_by_kind
from memo_sim.program.layout.subsequence import Subsequence
from memo_sim.program.operators.fp8_operands import AMAXES, COLUMNS, EXPERT_COLUMNS, EXPERT_WEIGHTS, SCALES, WEIGHTS
from memo_sim.program.operators.library_calls import RowBlocks, exchanged_blocks
from memo_sim.program.operators.operators import OperatorWriter
from memo_sim.program.pipeline.shared_instructions import Bound, Made, shared
from memo_sim.program.pipeline.stage_p2p import StageP2P
from memo_sim.program.pipeline.template_cache import (
    seen_by_ends,
    seen_by_instructions,
    seen_without_recompute,
)

KEPT, PASSED, LAST, OUT = "skeletal.x", "passed.x", "head.x", "stage.out"
"""Families of a layer's input and output: an input that backward reads, or that is freed after forward (of layers
inside a group), the head's input, and what a stage sends."""
_ENDS = {KEPT: "", PASSED: ".passed", LAST: ".last", OUT: ".out"}


@dataclass(frozen=True)
class Forward:
    """One form of a layer's forward: where its input and output lie, and whether it keeps everything."""

    out: str
    enters: str = KEPT
    keeps: bool = False

    @property
    def name(self) -> str:
        """The name of its template."""
        inner = ".inner" if self.enters == PASSED else ""
        return f"layer.fwd{'.kept' if self.keeps else ''}{inner}{_ENDS[self.out]}"


@dataclass(frozen=True)
class KindParts:
    """What the layers of one kind have in a subsequence: their parameters' block and their activations."""

    layers: LayersOfKind
    block: Block
    rows: Shape
    """Sizes of the rows that these layers compute."""
    activations: Activations
    keeping: Activations
    """The activations of layers that keep everything, where others do not."""

    @property
    def deferred(self) -> DeferredWeightGradients:
        """The weight gradients that backward leaves to the W pass."""
        return DeferredWeightGradients(self.activations.decisions, self.rows, self.activations)

    @property
    def deferred_of_kept(self) -> DeferredWeightGradients:
        """The same of layers that keep everything."""
        return DeferredWeightGradients(self.activations.decisions, self.rows, self.keeping)


class SubsequenceTemplates:
    """The families and templates of one subsequence on one stage."""

    def __init__(
        self,
        decisions: Decisions,
        subsequence: Subsequence,
        stage: Stage,
        micro_batches: int,
        *,
        blocks: Mapping[str, Block],
        made: Made,
        own: Portion | None = None,
        row_blocks: RowBlocks | None = None,
    ) -> None:
        """``blocks``: by name.

        ``own``: the rows that the stage computes itself, when helpers compute those before (``helper_stage.py``).
        ``row_blocks``: blocks of these rows that no call of a collective crosses; None for the plan's.
        """
        self.decisions = decisions
        self.subsequence = subsequence
        self.shape = subsequence.shape
        self.own = own
        self.rows = own.shape(self.shape) if own else self.shape
        """Sizes of the rows that the layers compute."""
        self.first = self.shape.shard(own.first) if own else 0
        """The first of these rows in buffers between stages, which hold all rows."""
        self.stage = stage
        self.micro_batches = micro_batches
        self.blocks = blocks
        if row_blocks is None:
            begun = own.first if own else 0
            row_blocks = exchanged_blocks(decisions, subsequence.number, begun, self.rows.tokens)
        self.row_blocks = row_blocks
        self.made = {} if own else made
        played = self._played(own) if own else subsequence
        self.layers_again = recomputed_layers(decisions, stage)
        """Which layers of the stage full recompute is about."""
        self.of_kinds = [self._parts_of(each, played) for each in layers_by_kind(decisions.model, stage)]
        self.activations = self.of_kinds[0].activations
        """The activation policy, which is the same for layers of all kinds."""
        enters = self.activations.rounding or own is not None
        self.p2p = StageP2P(decisions, self.shape, stage, micro_batches, enters, self.first)

    def _parts_of(self, layers: LayersOfKind, played: Subsequence) -> KindParts:
        rows = self.rows.of_layer(layers.shape)
        held = Activations(self.decisions, rows, self.micro_batches, self.stage, layers, played)
        keeping = replace(held, decisions=_keeping(self.decisions))
        return KindParts(layers, self.blocks[layers.block], rows, held, keeping)

    def _played(self, own: Portion) -> Subsequence:
        """Return the subsequence with only the rows that the stage computes itself."""
        tokens, granule = self.shape.tokens, self.decisions.swap_granule
        swapped = swapped_by_owner(self.subsequence.swapped, tokens, own, granule)
        return replace(self.subsequence, shape=self.rows, swapped=swapped)

    @property
    def suffix(self) -> str:
        """Suffix of the names of this subsequence's buffers and templates."""
        return self.subsequence.suffix

    def boundaries(self) -> list[Family]:
        """Return the buffers between layers: the head's input, and every layer's input gradient."""
        shape, dtype, m = self.shape, self.decisions.dtype, self.micro_batches
        rows, found = (shape.shard_tokens, shape.hidden), []
        if self.stage.last:
            found.append(Family("head.x", BufferClass.SKELETAL, dtype, *rows, m, kind=FamilyKind.HEAD_INPUT))
        count = m * self.stage.boundaries
        found.append(Family("grad.x", BufferClass.TRANSIENT, dtype, *rows, count, kind=FamilyKind.INPUT_GRADIENT))
        return found

    def families(self) -> list[Family]:
        """Return the buffers of activations, of p2p transfers, and of deferred weight gradients."""
        held = [each.activations if self._alike else each.keeping for each in self.of_kinds]
        deferred = [each.deferred for each in self.of_kinds]
        found = [family for each in held for family in each.families()] + self.p2p.families()
        found += [family for each in deferred for family in each.families()]
        if self.layers_again.passed:
            x = next(f for f in found if f.name == KEPT)
            inner = msgspec.structs.replace(
                x, name=PASSED, buffer_class=BufferClass.TRANSIENT, kind=FamilyKind.PER_LAYER
            )
            found.append(inner)
        return found

    def forward(self, layer: int) -> Forward:
        """Return the form of a layer's forward; ``layer`` is a local number."""
        again, stage = self.layers_again, self.stage
        out = LAST if stage.ends_model(layer) else OUT if stage.ends_chunk(layer) else KEPT
        return Forward(
            out=PASSED if layer + 1 in again.passed else out,
            enters=PASSED if layer in again.passed else KEPT,
            keeps=layer in again.kept,
        )

    def keeps(self, layer: int) -> bool:
        """Return whether backward finds everything of a layer (local number), by then: kept, or rebuilt before."""
        return layer in self.layers_again.kept or layer in self.layers_again.whole

    @property
    def _alike(self) -> bool:
        """Whether all layers are recomputed alike."""
        return self.decisions.recompute_layers == ALL

    def _forwards(self, of: KindParts, seen: Families) -> list[Forward]:
        """Return the forms of forward of a kind's layers; where they are recomputed alike, all that there may be."""
        if self._alike:
            return [Forward(out) for out in (KEPT, LAST, OUT) if out in seen]
        return list(dict.fromkeys(map(self.forward, of.layers.layers)))

    def layers(self, of: KindParts, seen: Families) -> Iterator[Bound]:
        """Yield the templates of the layers of one kind.

        ``seen``: families by plain name, with whole parameters and gradients for shards.
        """

        def forward(form: Forward) -> TemplateBuilder:
            held = of.keeping if form.keeps else of.activations
            builder, writer = self._layer(form.name, TemplateKind.FORWARD, of, seen, held, enters=form.enters)
            self._forward(builder, writer, held, seen[form.out], first=0 if form.out == KEPT else self.first)
            return builder

        once = partial(self._once, of)
        for form in self._forwards(of, seen):
            alike, given = ("layer.fwd", form.enters, form.keeps), {"next_x": seen[form.out]}
            yield self._shared(of, form.name, partial(forward, form), seen, alike=alike, given=given)
        name, kind = "layer.bwd", TemplateKind.BACKWARD
        make = partial(self._backward, name, kind, of, seen)
        whole = self._shared(of, name, make, seen, alike=name)
        yield whole
        if of.activations.resident_differs:
            name, kind = "layer.bwd.resident", TemplateKind.BACKWARD_RESIDENT
            make = partial(self._backward, name, kind, of, seen)
            yield self._shared(of, name, make, seen, alike=name, recomputes=False)
        kept = not self._alike
        if self.layers_again.whole:
            yield once("layer.rebuild", lambda: self._rebuild(of, seen))
        if kept:
            yield once("layer.bwd.kept", lambda: self._backward_of_kept(of, seen))
        for name, deferred in (("layer.wgrad", of.deferred), ("layer.wgrad.kept", of.deferred_of_kept))[: 1 + kept]:
            if deferred.applies:
                yield once(name, partial(self._weight_gradients, name, of, deferred, seen))
        if of.activations.copied_out:
            yield once("layer.offload", lambda: of.activations.offload(seen))
            yield once("layer.prefetch", lambda: of.activations.prefetch(seen, whole[0]))

    @cached_property
    def _seen(self) -> Decisions:
        """What instructions of layers depend on beside their families."""
        return seen_by_instructions(self.decisions)

    @property
    def _ranks(self) -> tuple[int, int, int]:
        return self.shape.cp_rank, self.shape.ulysses_rank, self.shape.tp_rank

    @property
    def _shares(self) -> bool:
        """Whether templates may have the instructions of another plan's: whole micro-batches, without METP.

        Templates of subsequences and METP are long, and all of a plan's are cached (``template_cache.py``). What
        backward leaves to W passes depends on which tensors are swapped, which other instructions do not see.
        """
        layout = self.decisions.layout
        w_passes = any(each.deferred.applies for each in self.of_kinds)
        return layout.subsequences == 1 and layout.metp == 1 and not w_passes

    def _shared(
        self,
        of: KindParts,
        name: str,
        make: Callable[[], TemplateBuilder],
        seen: Families,
        *,
        alike: Hashable,
        recomputes: bool = True,
        given: Mapping[str, Family] | None = None,
    ) -> Bound:
        """Return a layer template as ``_once`` does, with instructions of another plan where they are the same.

        - ``alike``: names the instructions; beside it they depend on the plan, the kind of layers and the families.
        - ``recomputes``: whether rows may be recomputed among them.
        - ``given``: families of slots that differ between templates with the same instructions.
        """
        if not self._shares:
            return self._once(of, name, make)
        suffix = of.layers.suffix
        if name + suffix not in self.made:
            plan = self._seen if recomputes else seen_without_recompute(self.decisions)
            kind = layer_kind(self.decisions, of.layers.shape).name
            key = alike, kind, plan, of.layers.number, self._ranks
            template, slots = shared.of(key, seen, lambda: self._named(make(), suffix), given)
            self.made[name + suffix] = replace(template, name=name + suffix), slots
        return self.made[name + suffix]

    def _once(self, of: KindParts, name: str, make: Callable[[], TemplateBuilder]) -> Bound:
        """Return a layer template; the first stage that asks for it writes it."""
        name += of.layers.suffix + self.suffix
        if name not in self.made:
            self.made[name] = self._named(make(), of.layers.suffix)
        return self.made[name]

    def _named(self, builder: TemplateBuilder, suffix: str = "") -> Bound:
        return replace(builder.build(), name=builder.name + suffix + self.suffix), builder.bound_slots

    def ends(self, seen: Families) -> Iterator[Bound]:
        """Yield the templates of embedding and head, if the stage has them."""
        embed = self.blocks.get(BlockKind.EMBED)
        if self.stage.first:
            assert embed is not None
            entered = {**seen, "skeletal.x": seen["stage.x"]} if self.own else seen
            ends = (embed_forward, embed_backward)[: 1 if self.decisions.lora else 2]  # a frozen one has no backward
            for end in ends:
                write = partial(end, self.decisions, self.shape, embed, entered, row_blocks=self._whole_row_blocks)
                yield self._end(end.__name__, partial(self._by_family, write), entered)
        if self.stage.last:
            own = self.blocks[BlockKind.HEAD]
            write = partial(head, self.decisions, self.shape, own, embed, seen, row_blocks=self._whole_row_blocks)
            yield self._end("head", partial(self._by_family, write), seen)

    @property
    def _whole_row_blocks(self) -> RowBlocks:
        """The row blocks of embedding and head, which the owner of a task computes whole."""
        if self.own is None:
            return self.row_blocks
        return exchanged_blocks(self.decisions, self.subsequence.number, 0, self.shape.tokens)

    def _end(self, name: str, write: Callable[[], Bound], seen: Families) -> Bound:
        """Return the template of an end of the model, with instructions of another plan where they are the same."""
        if not self._shares:
            return write()
        rows = self.shape.tokens, self.shape.shard_tokens, self.shape.tp_rank
        return shared.of((name, seen_by_ends(self.decisions), self.stage.first, rows), seen, write)

    def _by_family(self, write: Callable[[], Template]) -> Bound:
        """Return a template whose slots are named after their families."""
        template = write()
        own = {f.name for f in template.own}
        named = replace(template, name=template.name + self.suffix)
        return named, [name.removesuffix(self.suffix) for name in template.slots if name not in own]

    def transfers(self, families: Families) -> Iterator[Bound]:
        """Yield the templates that send to and receive from neighbouring stages."""
        for builder in self.p2p.templates(families):
            yield self._named(builder)

    def _layer(
        self,
        name: str,
        kind: TemplateKind,
        of: KindParts,
        seen: Families,
        held: Activations,
        *,
        enters: str = KEPT,
    ) -> tuple[TemplateBuilder, Layer]:
        """Return a layer's template without instructions, and what writes them; ``held``: its activations.

        ``enters``: the family of the layer's input.
        """
        gradients = kind in (TemplateKind.BACKWARD, TemplateKind.BACKWARD_RESIDENT)
        phase, number = Phase.BACKWARD if gradients else Phase.FORWARD, of.layers.number
        builder = TemplateBuilder(name, phase, kind, BlockKind.LAYER, number, row_blocks=self.row_blocks)
        builder.bind(seen[f"params.{of.block.name}"], slot="params")
        if self.decisions.fp8 != "none":
            builder.bind(seen[f"params_fp8.{of.block.name}"], slot=WEIGHTS)
            for scales in (AMAXES, SCALES):
                if scales in seen:
                    builder.bind(seen[scales])
            if gradients and (columns := f"params_fp8_columns.{of.block.name}") in seen:
                builder.bind(seen[columns], slot=COLUMNS)
        shared = of.layers.experts_block
        divided = {PARAMS: f"params.{shared}", EXPERT_WEIGHTS: f"params_fp8.{shared}"}
        if gradients:
            divided |= {EXPERT_COLUMNS: f"params_fp8_columns.{shared}", GRADS: f"grads.{shared}"}
        for slot, family in divided.items():
            if family in seen:
                builder.bind(seen[family], slot=slot)
        if gradients:
            builder.bind(seen[f"grads.{of.block.name}"], slot="grads")
            deferred = of.deferred_of_kept if held is of.keeping else of.deferred
            if deferred.applies:
                deferred.bind(builder, seen)
        held.bind(builder, seen, enters)
        prefix_attention.bind(builder, seen, of.rows.attention, gradients=gradients)
        expert_ends.bind(builder, seen)
        if DOCUMENTS in seen:
            builder.bind(seen[DOCUMENTS])
        writer = layer_kind(self.decisions, of.layers.shape).writer
        return builder, writer(builder, held.decisions, of.rows, of.block)

    def _forward(
        self, builder: TemplateBuilder, writer: Layer, held: Activations, out: Family, *, first: int = 0
    ) -> None:
        """Write a whole forward into ``out``; ``first``: the row of it that the layer's rows begin with."""
        builder.bind(out, slot="next_x", tokens=self.rows.shard_tokens, first=first)
        writer.forward(held.row_blocks, "next_x")

    def _rebuild(self, of: KindParts, seen: Families) -> TemplateBuilder:
        """Return the forward of a layer inside a group once more: it fills what backward reads, and the next input."""
        builder, writer = self._layer("layer.rebuild", TemplateKind.REBUILD, of, seen, of.keeping)
        builder.phase = Phase.RECOMPUTE
        self._forward(builder, writer, of.keeping, seen[KEPT])
        return builder

    def _backward_of_kept(self, of: KindParts, seen: Families) -> TemplateBuilder:
        """Return the backward of a layer of which everything is there."""
        builder, writer = self._layer("layer.bwd.kept", TemplateKind.BACKWARD, of, seen, of.keeping)
        for slot in ("grad_out", "grad_in"):
            builder.bind(seen["grad.x"], slot=slot)
        writer.defers_wgrad = of.deferred.applies
        writer.backward("grad_out", "grad_in")
        return builder

    def _backward(self, name: str, kind: TemplateKind, of: KindParts, seen: Families) -> TemplateBuilder:
        """Return a layer's backward; the one for activations that never left the device recomputes no token."""
        builder, writer = self._layer(name, kind, of, seen, of.activations)
        for slot in ("grad_out", "grad_in"):
            builder.bind(seen["grad.x"], slot=slot, first=self.first)
        builder.phase = Phase.RECOMPUTE
        if self.decisions.recompute == "full":
            writer.recompute((0, self.rows.tokens), 0, whole=True)
        elif self.decisions.recompute == "operators":
            assert isinstance(writer, LayerWriter)  # other kinds refuse it (``layout/compatibility.py``)
            writer.rebuild_operators()
        elif kind is TemplateKind.BACKWARD and of.activations.recomputed is not None:
            blocks = of.activations.row_blocks
            writer.recompute(of.activations.recomputed, len(blocks) - 1, whole=False)
        builder.phase = Phase.BACKWARD
        writer.defers_wgrad = of.deferred.applies
        writer.backward("grad_out", "grad_in")
        if of.deferred.applies:
            of.deferred.keep(builder)
        return builder

    def _weight_gradients(
        self, name: str, of: KindParts, deferred: DeferredWeightGradients, seen: Families
    ) -> TemplateBuilder:
        kind, number = TemplateKind.WGRAD, of.layers.number
        builder = TemplateBuilder(name, Phase.WGRAD, kind, BlockKind.LAYER, number, row_blocks=self.row_blocks)
        builder.bind(seen[f"grads.{of.block.name}"], slot="grads")
        deferred.bind_inputs(builder, seen)
        deferred.write(OperatorWriter(builder, self.decisions, of.rows, of.block))
        return builder


def _keeping(decisions: Decisions) -> Decisions:
    """Return the decisions of layers that keep everything where others are recomputed."""
    if decisions.recompute_layers == ALL:
        return decisions
    return msgspec.structs.replace(decisions, recompute="none", recompute_layers=ALL)
