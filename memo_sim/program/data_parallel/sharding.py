"""ZeRO 2 and 3 (FSDP): ranks hold shards of gradients and parameters, and whole blocks exist for one use only.

A use is one pass of the embedding, a layer or the head that needs a block of parameters or adds to its gradients.

    zero 2   Whole gradients are zeroed before a use and reduce-scattered after it. This rank's shard is then added to
             its sum over earlier micro-batches. The shards are divided over the ranks with the same parameters:
             cp x ulysses x dp, or over ``zero_ranks`` of them. METP ranks all hold embedding and head, so for these the
             ranks are metp x dp.
    zero 3   A rank also holds only a shard of the parameters. The whole block is gathered before every use, again for
             backward, and freed after it. With ``zero_params`` cast (torch FSDP's mixed precision) there is only the
             fp32 shard of the optimizer, which is cast before every gather.

A gather is placed before the previous use and overlaps with it, so two whole blocks exist at a time. A shard is added
after the next use, so that no kernel waits for the reduce-scatter. Gathers do not cross the end of a micro-batch: the
first layer waits for its parameters.

      replica     [gather l2][gather l1]   [scatter l2][gather l0]     [scatter l1]
      compute                [backward l2 .....       ][backward l1 .........     ][add l2][backward l0 ...

That is memo-exec's way (``Sharding`` memo), and DeepSpeed is priced with it. torch's FSDP copies whole units besides,
with memory policy eager (torch/distributed/fsdp, ``_fully_shard`` and ``_flat_param.py``):

    fsdp2    What a gather wrote, shard by shard, is copied out to the parameters before their use. Autograd allocates
             the gradients in the parameters' dtype, so nothing is zeroed; they are copied in, with a cast, and that
             copy is reduced. Both copies are on the compute stream. A unit is gathered one use ahead, as by FSDP's
             prefetch: the host runs ahead in forward, and backward asks for the unit before.
    fsdp1    Parameters are views of what was gathered. Autograd joins the gradients of the views in one more copy.

      replica     [gather l2][gather l1]              [scatter l2][gather l0]
      compute     [copy out l2][backward l2 .....][copy in l2][copy out l1][backward l1 .....][copy in l1][add l2] ...

Left out: what FSDP does beside compute in streams of its own on whole units (fsdp1's cast and division before a
reduction in fp32), and the embedding's second gather, which FSDP2 makes for a backward that does not read it.

With ``zero_ranks``, gathers and reduce-scatters stay inside a group. After a block's last add of the step, its shard is
all-reduced between the groups, beside backward. torchtitan does that once a step too (set_requires_all_reduce).

With ZeRO 0 and 1 a rank always holds whole gradients. ``overlap`` then reduces the gradients of each block over the
replicas after its last backward of the step.

      replica                                 [reduce l2 .......][reduce l1 .......]
      compute  m1 [backward l2 .....][backward l1 .....][backward l0 .....]

All of these run in the communicator of the ranks with the same parameters, one after another. A layer's own collectives
(tensor parallelism, Ulysses) are on other lanes. They do not wait for a gather, but share links with it
(``costs/contention.py``).
"""

from __future__ import annotations

from dataclasses import replace
from typing import Literal

from msgspec import Struct

from memo_sim.contract.knobs import DtypeName
from memo_sim.contract.plan import Decisions
from memo_sim.contract.units import DTYPE_BYTES
from memo_sim.program.data_parallel.optimizer import Optimizer
from memo_sim.program.ir.builder import Rows, TemplateBuilder, accumulates, reads, writes
from memo_sim.program.ir.instruction import COLLECTIVE_LANES, BufferClass, Families, Family, Lane, Template
from memo_sim.program.ir.kinds import BlockKind, FamilyKind, Phase, TemplateKind
from memo_sim.program.ir.work import Collective, Rowwise
from memo_sim.program.layout.fp8 import ACTIVATIONS, NARROW, copied_elements
from memo_sim.program.layout.parameters import FROZEN
from memo_sim.program.layout.stage import Stage
from memo_sim.program.layout.stage_layers import layers_by_kind
from memo_sim.program.layout.swap_schedule import LayerPass


class Use(Struct, frozen=True):
    """One pass of one subsequence that needs blocks of parameters (``params``) or adds to gradients (``grads``).

    ``params`` and ``grads`` are names of blocks: ``embed``, ``head``, and ``layer`` or one name for each layer kind.
    ``layer`` is -1 for the embedding, and the number of layers for the head.
    """

    place: str
    micro_batch: int
    layer: int
    backward: bool
    params: tuple[str, ...]
    grads: tuple[str, ...]
    subsequence: int = 0


class Placed(Struct, frozen=True):
    """A template, with the place, micro-batch, subsequence and layer (as in ``Use``) of its instance."""

    template: str
    place: str
    micro_batch: int
    layer: int
    subsequence: int = 0


FOR_BACKWARD = (
    TemplateKind.BACKWARD,
    TemplateKind.BACKWARD_RESIDENT,
    TemplateKind.REGATHER,
    TemplateKind.COPY_OUT_AGAIN,
    TemplateKind.QUANTIZE_AGAIN,
)
"""The templates that use the parameters gathered for a layer's backward."""

Around = tuple[list[Placed], list[Placed]]
"""The templates before a use, and after it."""
NOTHING: Around = ([], [])


class Sharding:
    """Families and templates of ZeRO 2 and 3, and early reductions; none for blocks without replicas.

    Each kind of block is checked separately: METP without dp has replicas only of embedding and head.
    """

    def __init__(
        self, decisions: Decisions, optimizers: dict[str, Optimizer], micro_batches: int, stage: Stage
    ) -> None:
        """``optimizers``: by the names of their blocks."""
        self.stage = stage
        self.kinds = layers_by_kind(decisions.model, stage)
        self._of_number = {kind.number: kind for kind in self.kinds}
        self.blocks = {
            layer: tuple(name for name in (kind.block, kind.experts_block) if name in optimizers)
            for kind in self.kinds
            for layer in kind.layers
        }
        """By layer: the names of its blocks."""
        self.decisions = decisions
        self.optimizers = optimizers
        self.micro_batches = micro_batches
        self.subsequences = decisions.layout.subsequences
        self.layers = len(stage.layers)
        self.grads = frozenset(kind for kind, optimizer in optimizers.items() if optimizer.shared("grads"))
        """The names of blocks whose gradients are sharded."""
        self.params = frozenset(kind for kind, optimizer in optimizers.items() if optimizer.shared("params"))
        """The names of blocks whose parameters are sharded."""
        self.copied_out = frozenset(kind for kind, optimizer in optimizers.items() if optimizer.copied_out)
        """The names of blocks whose gathered parameters are copied out (FSDP2)."""
        self.quantised = frozenset(
            kind for kind, o in optimizers.items() if o.quantised and (not o.narrow or o.narrow_columns)
        )
        """The names of blocks whose matrices are quantised before products read them, or transposed."""
        # Deferred weight gradients come after the last backward. Those of helper stages come after the owner's backward
        # (``pipeline/owner_stage.py``).
        late = (decisions.layout.schedule == "zero-bubble" and stage.stages > 1) or decisions.layout.multiplexed
        early = [] if late else [kind for kind, optimizer in optimizers.items() if optimizer.reduced_early]
        early += [kind for kind in self.grads if optimizers[kind].copies > 1]
        self.reduced_early = frozenset(early)
        """The names of blocks whose gradients, whole or as a shard, are reduced right after their last backward."""
        self.embed_uses = 2 if decisions.model.tied_embeddings else 1

    def families(self) -> list[Family]:
        """Return the buffers of whole gradients and parameters, one for each use."""
        m, found = self.micro_batches * self.subsequences, []
        uses = {"embed": m * self.embed_uses, "head": m}
        uses |= {name: m * len(k.layers) for k in self.kinds for name in (k.block, k.experts_block)}
        for kind, optimizer in self.optimizers.items():
            elements, block, of = optimizer.block.elements, optimizer.kind, optimizer.layer_kind
            if kind in self.grads:
                trained = optimizer.block.trained_elements
                name = f"whole_grads.{kind}"
                summed, flat = optimizer.grad_dtype, f"flat_grads.{kind}"
                dtypes = {name: self.decisions.dtype, flat: optimizer.reduce_dtype}
                for each, dtype in dtypes.items() if optimizer.flattened else [(name, summed)]:
                    holds, size = FamilyKind.WHOLE_GRADS, (dtype, trained, 1, uses[kind])
                    found.append(Family(each, BufferClass.TRANSIENT, *size, kind=holds, block=block, layer_kind=of))
            if kind in self.params:
                count = 2 * uses[kind] if block.of_layer else uses[kind]
                dtype, holds = self.decisions.dtype, FamilyKind.GATHERED
                names = ("gathered", "copied_out") if optimizer.copied_out else ("gathered",)
                for name in names if elements > optimizer.narrow else ():
                    size = (dtype, elements - optimizer.narrow, 1, count)
                    full = f"{name}.{kind}"
                    found.append(Family(full, BufferClass.GATHERED, *size, kind=holds, block=block, layer_kind=of))
                if optimizer.cast:
                    found.append(_cast_shard(optimizer, dtype))
                in_fp8: dict[str, int] = {}
                if optimizer.narrow:
                    in_fp8[f"gathered_fp8.{kind}"] = optimizer.narrow
                    if optimizer.narrow_columns:
                        in_fp8[f"params_fp8_columns.{kind}"] = optimizer.narrow
                elif kind in self.quantised:
                    in_fp8[f"params_fp8.{kind}"] = copied_elements(self.decisions, optimizer.block)
                for full, held in in_fp8.items():
                    copied = (ACTIVATIONS, held, 1, count)
                    found.append(Family(full, BufferClass.GATHERED, *copied, kind=holds, block=block, layer_kind=of))
        return found

    def whole(self, families: Families) -> Families:
        """Return ``families`` for passes: the shards' names refer to whole parameters and gradients."""
        seen = dict(families)
        seen |= {f"grads.{kind}": families[f"whole_grads.{kind}"] for kind in self.grads}
        used = {kind: "copied_out" if self.optimizers[kind].copied_out else "gathered" for kind in self.params}
        wide = {kind: name for kind, name in used.items() if f"{name}.{kind}" in families}
        seen |= {f"params.{kind}": families[f"{name}.{kind}"] for kind, name in wide.items()}
        narrow = [kind for kind in self.params if self.optimizers[kind].narrow]
        return seen | {f"params_fp8.{kind}": families[f"gathered_fp8.{kind}"] for kind in narrow}

    def templates(self, families: Families) -> list[Template]:
        """Return for each kind of block the templates that gather parameters, and clear, scatter and add gradients."""
        found = []
        for kind, optimizer in self.optimizers.items():
            if kind in self.grads:
                cleared = optimizer.zero(self.whole(families), fresh=optimizer.flattened)
                scattered = optimizer.reduce(self.whole(families))
                assert cleared is not None  # blocks in self.grads are trained
                assert scattered is not None  # and have replicas
                found.append(replace(cleared, name=f"{kind}.clear", kind=TemplateKind.CLEAR))
                found.append(replace(scattered, name=f"{kind}.scatter", kind=TemplateKind.SCATTER))
                found.append(self._add(kind, families))
            if kind in self.quantised:
                seen = self.whole(families)
                again = (False, True) if kind in self.params else (False,)
                # Gathered in FP8 by rows, a layer's forward reads them so.
                made = again[1:] if optimizer.narrow and kind in self.params else again
                found += [optimizer.quantise(seen, again=each) for each in made]
            if kind in self.params:
                found.append(self._gather(kind, families, Phase.GATHER))
                if optimizer.kind.of_layer:
                    found.append(self._gather(kind, families, Phase.REGATHER))
                if optimizer.copied_out:
                    found.append(self._copy_out(kind, families, Phase.GATHER))
                    if optimizer.kind.of_layer:
                        found.append(self._copy_out(kind, families, Phase.REGATHER))
        return found

    def _gather(self, kind: str, families: Families, phase: Literal[Phase.GATHER, Phase.REGATHER]) -> Template:
        does = TemplateKind.REGATHER if phase is Phase.REGATHER else TemplateKind.GATHER
        optimizer = self.optimizers[kind]
        builder = TemplateBuilder(f"{kind}.{phase}", phase, does, optimizer.kind, optimizer.layer_kind)
        shard, gathered = f"params.{kind}", dict[str, tuple[str, str]]()
        if optimizer.cast:
            self._cast(builder, families, optimizer)
            shard = f"cast.{kind}"
        elif shard in families:
            builder.bind(families[shard])
        if (whole := f"gathered.{kind}") in families:
            gathered[f"params.{kind}"] = shard, builder.bind(families[whole])
        if optimizer.narrow:
            held, whole = (builder.bind(families[f"{name}.{kind}"]) for name in ("params_fp8", "gathered_fp8"))
            gathered[f"fp8.params.{kind}"] = held, whole
            if optimizer.reduces_largest:
                builder.bind(families[f"{FamilyKind.LARGEST}.{kind}"], slot=str(FamilyKind.LARGEST))
        for name, (held, whole) in gathered.items():
            rows = builder.all(whole)
            narrow, size = name.startswith("fp8."), builder.row_bytes(whole)
            scales = optimizer.scales_of_gathered(builder) if narrow else {}
            names = [each for each in (*optimizer.trained_runs, FROZEN) if (each == NARROW) == narrow]
            calls = optimizer.calls_by_run("all_gather", size, names)
            builder.emit(
                name,
                "params.all_gather",
                COLLECTIVE_LANES[optimizer.shard_group],
                Collective("all_gather", rows.tokens * size, optimizer.shards, optimizer.shard_group, calls=calls),
                shard=reads(builder.all(held)),
                full=writes(rows),
                **scales,
            )
        return builder.build()

    def _cast(self, builder: TemplateBuilder, families: Families, optimizer: Optimizer) -> None:
        """Write the cast of this rank's fp32 shard of parameters, into the buffer that the gather reads.

        torch casts on a stream of its own (``_flat_param.py``, ``pre_unshard``); here it is one more kernel of compute,
        before the use that the gather overlaps with.
        """
        master, out = (builder.bind(families[f"{name}.{optimizer.name}"]) for name in ("master", "cast"))
        elements, size = optimizer.state_elements(), DTYPE_BYTES[self.decisions.dtype]
        builder.emit(
            f"cast.{optimizer.name}",
            "params.cast",
            Lane.COMPUTE,
            Rowwise("params.cast", elements, DTYPE_BYTES["fp32"] * elements, size * elements),
            x=reads(builder.all(master)),
            out=writes(builder.all(out)),
        )

    def _copy_out(self, kind: str, families: Families, phase: Literal[Phase.GATHER, Phase.REGATHER]) -> Template:
        """Return FSDP2's copy of gathered parameters, which lie shard by shard, to the parameters of the block."""
        again = phase is Phase.REGATHER
        does, name = TemplateKind.COPY_OUT_AGAIN if again else TemplateKind.COPY_OUT, "copy_out" + "_again" * again
        optimizer = self.optimizers[kind]
        builder = TemplateBuilder(f"{kind}.{name}", phase, does, optimizer.kind, optimizer.layer_kind)
        gathered, used = (builder.bind(families[f"{each}.{kind}"]) for each in ("gathered", "copied_out"))
        elements, size = optimizer.block.elements, DTYPE_BYTES[self.decisions.dtype]
        moved = size * elements
        work = Rowwise("copy_out", elements, moved, moved, elements=elements, element_bytes=size)
        source, target = reads(builder.all(gathered)), writes(builder.all(used))
        builder.emit(f"copy_out.{kind}", "params.copy_out", Lane.COMPUTE, work, source=source, target=target)
        return builder.build()

    def _add(self, kind: str, families: Families) -> Template:
        """Return the template that adds this rank's shard; the in-place scatter leaves it at the start of each run."""
        of, layers = self.optimizers[kind].kind, self.optimizers[kind].layer_kind
        builder = TemplateBuilder(f"{kind}.add", Phase.REDUCE, TemplateKind.ADD, of, layers)
        reduced = families[f"{'flat' if self.optimizers[kind].flattened else 'whole'}_grads.{kind}"]
        whole = builder.bind(reduced)
        shard = builder.bind(families[f"grads.{kind}"])
        offset, size = 0, self.optimizers[kind].summed_bytes
        added = size + (DTYPE_BYTES[reduced.dtype] if self.optimizers[kind].flattened else size)
        for name, first, length in self.optimizers[kind].runs():
            builder.run = name
            builder.emit(
                f"add.{name}",
                "grad.accumulate",
                Lane.COMPUTE,
                Rowwise("grad.accumulate", length, added * length, size * length),
                x=reads(Rows(whole, first, length)),
                out=accumulates(Rows(shard, offset, length)),
            )
            offset += length
        return builder.build()

    def index(self, family: Family, template: Template, micro_batch: int, subsequence: int, layer: int) -> int:
        """Return the index of the whole buffer of ``family`` that a pass, or a template around it, uses."""
        passed = micro_batch * self.subsequences + subsequence
        if family.block is BlockKind.EMBED:
            return passed * self.embed_uses + (self.embed_uses - 1 if layer == self.layers else 0)
        if family.block is BlockKind.HEAD:
            return passed
        mine = self._of_number[family.layer_kind]
        use = passed * len(mine.layers) + mine.place[layer]
        return 2 * use + (template.kind in FOR_BACKWARD) if family.kind is FamilyKind.GATHERED else use

    def uses(self, layer_passes: list[LayerPass]) -> list[Use]:
        """Return the uses of a step in program order, given the order of layer passes."""
        head = ("head", "embed") if self.embed_uses > 1 else ("head",)
        found = []
        for v in layer_passes:
            m, s, at = v.micro_batch, v.subsequence, f"m{v.micro_batch}/s{v.subsequence}"
            if self.stage.begins_model(v.layer) and not v.backward:
                found.append(Use(f"{at}/embed", m, -1, False, ("embed",), (), s))
            block = self.blocks[v.layer]
            grads = block if v.backward else ()
            found.append(Use(f"{at}/l{self.stage.layers[v.layer]}", m, v.layer, v.backward, block, grads, s))
            if self.stage.ends_model(v.layer) and not v.backward:
                found.append(Use(f"{at}/head", m, self.layers, True, head, head, s))
            if self.stage.begins_model(v.layer) and v.backward and not self.optimizers["embed"].frozen:
                found.append(Use(f"{at}/embed", m, -1, True, (), ("embed",), s))
        return found

    def around(self, layer_passes: list[LayerPass]) -> dict[tuple[str, bool], Around]:
        """Return the templates before and after each use; the key is its place, and whether it is a backward.

        Uses without such templates may be missing.
        """
        found: dict[tuple[str, bool], Around] = {}
        needed = self.params or self.grads or self.reduced_early or self.quantised
        uses = self.uses(layer_passes) if needed else []
        waiting: list[Placed] = []
        cached = set[tuple[int, str]]()
        """Layers and blocks whose FP8 copies were made in this step, where every use reads the same."""
        for i, use in enumerate(uses):
            starts = i == 0 or uses[i - 1].micro_batch != use.micro_batch
            following = [u for u in uses[i + 1 : i + 2] if u.micro_batch == use.micro_batch]
            gathered = [self._gathered(u) for u in [use] * starts + following]
            if starts:
                gathered.insert(1, self._copied_out(use))
            else:
                gathered.insert(0, self._copied_out(use))
            before, after = [p for placed in gathered for p in placed], list[Placed]()
            before += self._quantised(use, cached)
            reduced = self._reduced(use)
            if use.grads:
                kinds = tuple(kind for kind in use.grads if kind in self.grads)
                before += self._placed(use, kinds, "clear")
                after = self._placed(use, kinds, "scatter") + waiting
                waiting = self._placed(use, kinds, "add")
                if kinds:  # a shard is reduced after its last add, whole gradients at once
                    waiting, reduced = waiting + reduced, []
            if not following:
                after, waiting = after + waiting, []
            found[use.place, use.backward] = (before, after + reduced)
        return found

    def _gathered(self, use: Use) -> list[Placed]:
        """Return the gathers of the sharded parameters of ``use``."""
        again = use.backward and self._of_layer(use)
        kinds = tuple(kind for kind in use.params if kind in self.params)
        return self._placed(use, kinds, "regather" if again else "gather")

    def _copied_out(self, use: Use) -> list[Placed]:
        """Return the copies of the gathered parameters of ``use``, for blocks whose parameters FSDP2 copies out."""
        again = use.backward and self._of_layer(use)
        kinds = tuple(kind for kind in use.params if kind in self.copied_out)
        return self._placed(use, kinds, "copy_out_again" if again else "copy_out")

    def _placed(self, use: Use, kinds: tuple[str, ...], what: str) -> list[Placed]:
        """Return one template for each block; the tied embedding's use at the head has its own place."""
        tied = f"{use.place}.embed"
        places = [
            tied if kind == "embed" and "head" in (*use.params, *use.grads) else self.place_of(kind, use.place)
            for kind in kinds
        ]
        m, layer, s = use.micro_batch, use.layer, use.subsequence
        return [Placed(f"{kind}.{what}", at, m, layer, s) for kind, at in zip(kinds, places, strict=True)]

    def _quantised(self, use: Use, cached: set[tuple[int, str]]) -> list[Placed]:
        """Return what makes the FP8 copies of the parameters of ``use``; note those that later uses read in ``cached``.

        A layer's experts may have other replicas than its own block, so one may be sharded without the other.
        """
        found: list[Placed] = []
        for kind in (kind for kind in use.params if kind in self.quantised):
            if kind in self.params:
                # A forward reads what was gathered in FP8 as it is.
                made = use.backward or not self.optimizers[kind].narrow
            else:
                made = (use.layer, kind) not in cached
                cached.add((use.layer, kind))
            again = use.backward and kind in self.params
            found += self._placed(use, (kind,), "quantize_again" if again else "quantize") if made else []
        return found

    def _of_layer(self, use: Use) -> bool:
        return 0 <= use.layer < self.layers

    def _reduced(self, use: Use) -> list[Placed]:
        """Return the reductions of the gradients that are complete after ``use``."""
        # Backward ends with the first subsequence. The head's backward is part of forward and ends with the last one.
        last = self.subsequences - 1 if use.layer == self.layers else 0
        if use.micro_batch < self.micro_batches - 1 or use.subsequence != last:
            return []
        # The gradient of a tied embedding on two stages is first summed between them, at the end of the step.
        spanning = self.stage.stages > 1 and self.decisions.model.tied_embeddings
        early = [kind for kind in use.grads if kind in self.reduced_early]
        complete = [kind for kind in early if kind != "embed" or (use.layer < 0 and not spanning)]
        place = f"step/{use.place.rpartition('/')[2]}"
        return [Placed(f"{kind}.reduce", self.place_of(kind, place), 0, use.layer) for kind in complete]

    def place_of(self, kind: str, place: str) -> str:
        """Return the place of a block's own templates; a layer's experts, where ranks divide them, have another."""
        return f"{place}.experts" if self.optimizers[kind].kind is BlockKind.EXPERTS else place


def _cast_shard(optimizer: Optimizer, dtype: DtypeName) -> Family:
    """Return the buffer for this rank's cast shard of a block; the next block's cast waits for this one's gather."""
    name, elements = f"cast.{optimizer.name}", optimizer.state_elements()
    return Family(
        *(name, BufferClass.EXCHANGE, dtype, elements, 1, 1, "device", "step"),
        kind=FamilyKind.CAST,
        block=optimizer.kind,
        layer_kind=optimizer.layer_kind,
    )
