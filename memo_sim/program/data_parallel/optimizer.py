"""The optimizer's step: gradients summed over replicas, their norm, AdamW, and updated parameters gathered.

Each parameter block (embed, every layer, head) is reduced and updated by itself. Replicas are the ranks that hold the
same parameters (cp x ulysses x dp).

    zero 0    gradients are all-reduced
    zero 1    optimizer states are divided over the replicas: gradients are reduce-scattered, parameters all-gathered
    zero 2    a rank also keeps only its shard of the gradients (``sharding.py``)
    zero 3    a rank also keeps only its shard of the parameters (``sharding.py``)

The experts of a layer that ranks divide (``ep``) are a block with fewer replicas: cp x ulysses x dp / ep, or tp times
as many where ranks of tp have whole experts. Their states are divided over those, or with ``zero_ranks`` over as many
of them as a group has.

With ``zero_ranks``, the states are divided over groups of that many replicas. Gradients are reduce-scattered inside a
group, and each shard is all-reduced between the groups. Parameters are gathered inside a group. So do torch's HSDP
(``_fsdp_collectives.py``, foreach_reduce) and Megatron-LM with several distributed optimizer instances
(``param_and_grad_buffer.py``).

    8 replicas, zero_ranks 4     reduce-scatter, all-gather: 0 1 2 3 | 4 5 6 7     all-reduce: 0 4 | 1 5 | 2 6 | 3 7

``overlap`` moves both collectives beside compute; ``sharding.py`` places them in the step.

States ``bf16`` keeps both moments in bf16. States ``pure-bf16`` also has bf16 gradients, which are summed over
micro-batches and ranks in bf16, and no master copy: AdamW rounds each parameter to the nearest bf16 number after every
step, not stochastically. ``pure-bf16-fp32-moments`` has moments in fp32. ``grad_sums`` sets the gradients' dtype by
itself: bf16 beside master weights (params), fp32 without them (fp32). AdamW computes in fp32 unless all that it reads
is bf16. States ``host`` keeps master copy and moments in host memory and updates them on the host's cores; gradients
are copied to the host and parameters back to the device. When gradients are clipped, the update scales them in place.

With ``fp8_params`` the weights of FP8 products are a run of their own, in families of their own: AdamW updates the
master weights, which are then quantised and gathered in FP8. Where ranks share them, the largest values that current
scales follow from are found first and reduced over these ranks, once for each layer (Transformer Engine packs those of
all layers into one reduction). They are kept, because ranks that gather the copies need their scales:

    [AdamW of a share][largest values] -> max all-reduce -> [quantise the share] -> all-gather in FP8

An eager framework makes more passes over the gradients (Megatron-LM, ``core/distributed/param_and_grad_buffer.py`` and
``core/optimizer``). Before the reduction one pass looks for NaN, and one divides by the number of replicas. Later one
pass scales clipped gradients, and one copies the fp32 parameters to the parameters of the layers.
"""

from __future__ import annotations

from collections.abc import Container
from dataclasses import dataclass
from typing import Literal

from memo_sim.contract.hardware import CollectiveKind
from memo_sim.contract.knobs import DtypeName
from memo_sim.contract.plan import Decisions
from memo_sim.contract.units import DTYPE_BYTES
from memo_sim.program.ir.builder import Access, Rows, TemplateBuilder, accumulates, reads, writes
from memo_sim.program.ir.instruction import COLLECTIVE_LANES, BufferClass, Families, Family, Lane, Template
from memo_sim.program.ir.kinds import BlockKind, FamilyKind, Phase, TemplateKind
from memo_sim.program.ir.work import FRESH, Collective, Copy, Group, HostUpdate, LibraryCall, Rowwise
from memo_sim.program.layout import fp8
from memo_sim.program.layout.fp8 import ACTIVATIONS, copied_elements, largest_values, weight_copies, weights
from memo_sim.program.layout.parameters import (
    FROZEN,
    Block,
    Parameter,
    autocast,
    gradient_dtype,
    moment_dtype,
    without_masters,
)
from memo_sim.program.layout.rank_order import (
    EXPERT_GRADS,
    EXPERT_REPLICATE,
    EXPERT_SHARD,
    GRADS,
    REPLICATE,
    SHARD,
    degree,
)
from memo_sim.program.operators.fp8_operands import (
    AMAXES,
    HISTORY,
    SCALES,
    quantisation,
    requantisation,
    search_of_largest,
    transposition,
)
from memo_sim.program.operators.framework_kernels import library_of
from memo_sim.program.operators.workspaces import adamw_workspace_bytes

SHARE_BY_SHARE: dict[Literal["reduce_scatter", "all_gather"], CollectiveKind] = {
    "reduce_scatter": "reduce",
    "all_gather": "broadcast",
}
"""What moves a single rank's share, of each collective that moves all of them in one call if they are equal."""


@dataclass(frozen=True)
class Optimizer:
    """Writes the templates that zero, reduce and update one parameter block."""

    decisions: Decisions
    block: Block
    kind: BlockKind
    count: int
    layer_kind: int | None = None
    """The kind of layers that the block belongs to, where layers differ."""

    @property
    def name(self) -> str:
        """The block's name, which ends the names of its families."""
        return self.block.name

    @property
    def group(self) -> Group:
        """The group of ranks that hold the same parameters.

        METP divides only the parameters of layers, so its ranks share the embedding and the head (``ends``). Fewer
        ranks hold the same experts than hold the rest of a layer, where ranks divide these (``expert_grads``).
        """
        if self.kind is BlockKind.EXPERTS:
            return EXPERT_GRADS
        return "ends" if self.decisions.layout.whole_ends and self.kind is not BlockKind.LAYER else "grads"

    @property
    def replicas(self) -> int:
        """Number of ranks that hold the same parameters."""
        return degree(self.group, self.decisions.layout)

    @property
    def shards(self) -> int:
        """Number of ranks over which the optimizer's states are divided."""
        layout = self.decisions.layout
        if self.kind is BlockKind.EXPERTS:
            return layout.expert_shards
        return (layout.zero_ranks or self.replicas) if layout.zero >= 1 else 1

    @property
    def copies(self) -> int:
        """Number of ranks that hold the same shard."""
        return self.replicas // self.shards

    @property
    def shard_group(self) -> Group:
        """The group of ranks over which the optimizer's states are divided."""
        if self.shards == self.replicas:
            return self.group
        return EXPERT_SHARD if self.kind is BlockKind.EXPERTS else SHARD

    @property
    def master(self) -> bool:
        """Whether there is an fp32 master copy beside the parameters."""
        return (self.decisions.dtype != "fp32" and not self.pure) or self.on_host

    @property
    def cast(self) -> bool:
        """Whether a rank stores no shard of parameters in their dtype, and casts the master copy for every gather."""
        return self.decisions.zero_params == "cast" and self.master and self.shared("params")

    @property
    def frozen(self) -> bool:
        """Whether nothing of the block is trained: its parameters have no gradients and no optimizer states."""
        return self.block.trained_elements == 0

    @property
    def pure(self) -> bool:
        """Whether parameters are bf16 and there is no master copy."""
        return without_masters(self.decisions)

    @property
    def grad_dtype(self) -> DtypeName:
        """Dtype of the sums of gradients."""
        return gradient_dtype(self.decisions)

    @property
    def _grad_bytes(self) -> int:
        return DTYPE_BYTES[self.grad_dtype]

    @property
    def summed_bytes(self) -> int:
        """Bytes of a gradient's sum as AdamW and the sums of shards are priced."""
        return DTYPE_BYTES[self._dtypes[1]]

    @property
    def on_host(self) -> bool:
        """Whether the master copy and the moments are in host memory."""
        return self.decisions.states == "host"

    @property
    def quantised(self) -> bool:
        """Whether products read FP8 copies of the block's matrices.

        They are made before the block's first use in a step, and again before every use of gathered parameters."""
        in_fp8 = self.decisions.fp8 != "none" and self.kind is BlockKind.LAYER
        return in_fp8 or (self.decisions.fp8_experts and self.kind is BlockKind.EXPERTS)

    @property
    def narrow(self) -> int:
        """Elements at the block's beginning that are kept in FP8 alone; ``params`` holds the others."""
        return fp8.narrow_elements(self.decisions, self.block)

    @property
    def narrow_columns(self) -> bool:
        """Whether what is kept in FP8 alone has a transposed copy."""
        return self.narrow > 0 and weight_copies(self.decisions) > 1

    @property
    def reduces_largest(self) -> bool:
        """Whether the scales of what is kept in FP8 alone follow from the largest values of several ranks' shares.

        Delayed scaling has scales from earlier steps.
        """
        return self.narrow > 0 and self.shards > 1 and not fp8.delayed(self.decisions)

    def shared(self, name: Literal["params", "grads"]) -> bool:
        """Whether a rank holds only its shard of the block's parameters or gradients.

        A tied embedding of several pipeline stages is whole, as with ZeRO 1: the first stage has it with the learned
        positions, the last without, so that shards of their gradients would not be of the same rows.
        """
        if (name == "grads" and self.frozen) or self._spans_stages:
            return False
        return self.shards > 1 and self.decisions.layout.zero >= {"grads": 2, "params": 3}[name]

    @property
    def _spans_stages(self) -> bool:
        """Whether two pipeline stages hold the block: a tied embedding."""
        return self.decisions.layout.pp > 1 and self.decisions.model.tied_embeddings and self.kind is BlockKind.EMBED

    @property
    def reduced_early(self) -> bool:
        """Whether whole gradients are summed over replicas right after the block's last backward."""
        several = self.replicas > 1 and not self.frozen
        return self.decisions.overlap != "none" and several and not self.shared("grads")

    @property
    def gathered_late(self) -> bool:
        """Whether whole parameters are gathered at the start of the following step."""
        return self.decisions.overlap == "both" and self._gathers_updated

    @property
    def _gathers_updated(self) -> bool:
        """Whether ranks gather the parameters that each of them has updated a share of."""
        return self.shards > 1 and not self.shared("params") and not self.frozen

    @property
    def eager(self) -> bool:
        """Whether an eager framework makes passes over whole gradients before their reduction."""
        return self.decisions.memory_policy == "eager" and not self.shared("grads")

    @property
    def flattened(self) -> bool:
        """Whether FSDP copies whole gradients into the tensor that is reduced."""
        return self.decisions.sharding != "memo" and self.shared("grads")

    @property
    def copied_out(self) -> bool:
        """Whether FSDP2 copies gathered parameters out."""
        return self.decisions.sharding == "fsdp2" and self.shared("params")

    @property
    def reduce_dtype(self) -> DtypeName:
        """Dtype in which gradients are summed over ranks."""
        chosen = self.decisions.reduce_dtype
        return self.grad_dtype if chosen == "auto" else chosen

    def runs(self) -> list[tuple[str, int, int]]:
        """Return (name, first element, elements of this rank's shard) of the block's runs that are trained."""
        runs = fp8.runs(self.decisions, self.block)
        return [(name, at, -(-length // self.shards)) for name, at, length in runs if name != FROZEN]

    @property
    def trained_runs(self) -> list[str]:
        """The names of the block's runs that are trained."""
        return [name for name, _, _ in self.runs()]

    def calls_by_run(
        self, kind: Literal["reduce_scatter", "all_gather"], element_bytes: int, names: Container[str]
    ) -> tuple[LibraryCall, ...]:
        """Return the calls of a collective over the ``shard_group`` that is made run by run.

        A run that does not divide into equal shares takes one call for each rank's share
        (``memo_exec/kernels/collective.py``).
        """
        calls: list[LibraryCall] = []
        for name, _, length in fp8.runs(self.decisions, self.block):
            if name not in names:
                continue
            if length % self.shards == 0:
                calls.append((kind, element_bytes * length))
                continue
            share, each = -(-length // self.shards), SHARE_BY_SHARE[kind]
            calls += [(each, element_bytes * min(share, length - first)) for first in range(0, length, share)]
        return self._one_or_several(kind, calls)

    def _one_or_several(self, kind: CollectiveKind, calls: list[LibraryCall]) -> tuple[LibraryCall, ...]:
        """Return the calls; none where one moves all bytes: of one run, or of a framework's flat buffer."""
        one = self.decisions.memory_policy == "eager" or [each for each, _ in calls] == [kind]
        return () if one else tuple(calls)

    def state_elements(self) -> int:
        """Return the number of elements of the block that this rank updates."""
        return sum(length for _, _, length in self.runs())

    def families(self) -> list[Family]:
        """Return the buffer families of the block: parameters, gradients, master copy and moments."""
        space: Literal["device", "host"] = "host" if self.on_host else "device"
        moment = moment_dtype(self.decisions)
        share = self.state_elements()

        def state(kind: FamilyKind, dtype: str, elements: int, where: Literal["device", "host"]) -> Family:
            return Family(
                f"{kind}.{self.name}",
                BufferClass.STATE,
                dtype,
                elements,
                1,
                self.count,
                where,
                "step",
                kind=kind,
                block=self.kind,
                layer_kind=self.layer_kind,
            )

        trained = self.block.trained_elements
        whole = self.block.elements
        shared = self.shared("params")
        params = (
            sum(-(-length // self.shards) for *_, length in fp8.runs(self.decisions, self.block)) if shared else whole
        )
        in_fp8 = self._narrow_held
        stored = params > in_fp8 and not self.cast
        found = [state(FamilyKind.PARAMS, self.decisions.dtype, params - in_fp8, "device")] if stored else []
        if self.frozen:
            return found
        found.append(state(FamilyKind.GRADS, self.grad_dtype, share if self.shared("grads") else trained, "device"))
        if self.master:
            found.append(state(FamilyKind.MASTER, "fp32", whole if autocast(self.decisions) else share, space))
        found += [state(FamilyKind.MOMENT1, moment, share, space), state(FamilyKind.MOMENT2, moment, share, space)]
        if in_fp8:
            found.append(state(FamilyKind.PARAMS_FP8, ACTIVATIONS, in_fp8, "device"))
            if self.narrow_columns and not shared:
                found.append(state(FamilyKind.PARAMS_FP8_COLUMNS, ACTIVATIONS, in_fp8, "device"))
            if self.reduces_largest:
                found.append(state(FamilyKind.LARGEST, "fp32", largest_values(self.decisions, self.block), "device"))
        elif self.quantised and not shared:
            copies = copied_elements(self.decisions, self.block)
            found.append(state(FamilyKind.PARAMS_FP8, ACTIVATIONS, copies, "device"))
        if self.on_host:
            found.append(state(FamilyKind.HOST_GRADS, "fp32", share, "host"))
            found.append(state(FamilyKind.HOST_PARAMS, self.decisions.dtype, share, "host"))
        return found

    @property
    def _narrow_held(self) -> int:
        """Elements in FP8 alone that this rank stores."""
        return -(-self.narrow // self.shards) if self.shared("params") else self.narrow

    def zero(self, families: Families, *, fresh: bool = False) -> Template | None:
        """Return the template that zeroes gradients: this rank's at the start of a step, or those of a use.

        None for a frozen block.

        ``fresh``: nothing is zeroed, because autograd allocates these gradients and a product writes them.
        """
        if self.frozen:
            return None
        builder = TemplateBuilder(f"{self.name}.zero", Phase.ZERO, TemplateKind.ZERO, self.kind, self.layer_kind)
        builder.bind(families[f"grads.{self.name}"], slot="grads")
        held = builder.all("grads")
        work = Rowwise("zero", held.tokens, 0, self._grad_bytes * held.tokens)
        if fresh:
            work = Rowwise(FRESH, held.tokens, 0, 0)
        builder.emit("grads", "zero", Lane.COMPUTE, work, target=writes(held))
        return builder.build()

    def quantise(self, families: Families, *, again: bool = False) -> Template:
        """Return the template that makes the FP8 copies of the block's matrices; ``again``: for one backward.

        ``families``: those that a use of the parameters sees (``Sharding.whole``).
        """
        kind = TemplateKind.QUANTIZE_AGAIN if again else TemplateKind.QUANTIZE
        name = f"{self.name}.{'quantize_again' if again else 'quantize'}"
        builder = TemplateBuilder(name, Phase.REQUANTIZE if again else Phase.QUANTIZE, kind, self.kind, self.layer_kind)
        if self.narrow:
            self._transpose(builder, families)
            return builder.build()
        source = builder.bind(families[f"params.{self.name}"])
        copies = builder.bind(families[f"params_fp8.{self.name}"])
        matrices = weights(self.decisions, self.block)
        elements = sum(weight.elements for weight in matrices)
        written = copied_elements(self.decisions, self.block)
        several = weight_copies(self.decisions) > 1
        builder.emit(
            f"params.{self.name}",
            "params.quantize",
            Lane.COMPUTE,
            quantisation(self.decisions, elements, elements, written),
            x=reads(Rows(source, 0, elements)),
            out=writes(Rows(copies, 0, elements)),
            columns=writes(Rows(copies, elements, written - elements)) if several else None,
            **self._scaled(builder, families, matrices),
        )
        return builder.build()

    def _scaled(
        self, builder: TemplateBuilder, families: Families, matrices: tuple[Parameter, ...]
    ) -> dict[str, Access]:
        """Return the scale of each matrix and its largest value, ``scale.qkv`` and ``amax.qkv``, of delayed scaling."""
        found: dict[str, Access] = {}
        if fp8.delayed(self.decisions):
            for name in (AMAXES, SCALES):
                builder.bind(families[name])
            for product in (matrix.name.removesuffix(".weight") for matrix in matrices):
                row = fp8.scaled_row(self.decisions, product, "weight")
                found[f"scale.{product}"] = reads(Rows(SCALES, row, 1))
                found[f"amax.{product}"] = accumulates(Rows(AMAXES, row, 1))
        return found

    def _transpose(self, builder: TemplateBuilder, families: Families) -> None:
        """Emit the transposition of the matrices that are kept in FP8 alone."""
        rows, columns = (builder.bind(families[f"{kind}.{self.name}"]) for kind in _IN_FP8)
        x, out = reads(builder.all(rows)), writes(builder.all(columns))
        work = transposition(self.narrow)
        builder.emit(f"params.{self.name}", "params.transpose", Lane.COMPUTE, work, x=x, out=out)

    def prepare(self, families: Families) -> Template | None:
        """Return an eager framework's passes over whole gradients before any reduction; None when there are none."""
        if not self.eager or self.reduced_early or self.frozen:
            return None
        builder = TemplateBuilder(
            f"{self.name}.prepare", Phase.REDUCE, TemplateKind.PREPARE, self.kind, self.layer_kind
        )
        builder.bind(families[f"grads.{self.name}"], slot="grads")
        self._prepare(builder)
        return builder.build()

    def _prepare(self, builder: TemplateBuilder) -> None:
        elements = self.block.trained_elements
        whole, size = builder.all("grads"), self._grad_bytes * elements
        looked, norm = Rowwise("grad_norm", elements, size, 4), builder.scratch("check.norm", 4)
        builder.emit("check", "grads.check", Lane.COMPUTE, looked, grads=reads(whole), workspace=norm)
        if self.replicas > 1:
            scaled = Rowwise("scale", elements, size, size)
            builder.emit("scale", "grads.scale", Lane.COMPUTE, scaled, grads=accumulates(whole))

    def reduce(self, families: Families) -> Template | None:
        """Return the template that sums the whole gradients over ranks; None when no sum is needed.

        Vectors whose gradient a rank computes in part are summed over tp (over metp for METP's layers). All gradients
        are then summed over the replicas: those that are divided inside the ``shard_group`` first. Sums of shards that
        a rank keeps alone are not part of it (``reduce_shards``). A frozen block has none.
        """
        if self.frozen:
            return None
        builder = TemplateBuilder(f"{self.name}.reduce", Phase.REDUCE, TemplateKind.REDUCE, self.kind, self.layer_kind)
        builder.bind(families[f"grads.{self.name}"], slot="grads")
        layout = self.decisions.layout
        if self.eager and self.reduced_early:
            self._prepare(builder)
        partial = self.block.partial_runs(sequence_parallel=layout.sequence_parallel) if layout.tp > 1 else []
        over: Group = "tp"
        if layout.whole_ends and self.kind is BlockKind.LAYER:
            partial, over = self.block.partial_runs(sequence_parallel=True), layout.weights_group
        for first, elements in partial:
            rows = Rows("grads", first, elements)
            size = DTYPE_BYTES[builder.dtype("grads")]
            work = Collective("all_reduce", size * elements, degree(over, layout), over)
            name = "vectors" if first + elements == self.block.trained_elements else "matrices"
            builder.emit(name, "all_reduce", COLLECTIVE_LANES[over], work, tensor=accumulates(rows))
        if self.replicas > 1:
            kind: Literal["reduce_scatter", "all_reduce"] = "reduce_scatter" if self.shards > 1 else "all_reduce"
            ranks, group = (self.shards, self.shard_group) if self.shards > 1 else (self.replicas, self.group)
            if self.flattened:
                self._flatten(builder, families)
            slot, size = ("flat", DTYPE_BYTES[self.reduce_dtype]) if self.flattened else ("grads", self._grad_bytes)
            calls = self.calls_by_run(kind, size, self.trained_runs) if kind == "reduce_scatter" else ()
            work = Collective(kind, size * self.block.trained_elements, ranks, group, calls=calls)
            whole = accumulates(builder.all(slot))
            builder.emit("grads", f"grads.{kind}", COLLECTIVE_LANES[group], work, tensor=whole)
            if self.shards > 1 and self.copies > 1 and not self.shared("grads"):
                self._reduce_shards(builder)
        return builder.build() if partial or self.replicas > 1 else None

    def _flatten(self, builder: TemplateBuilder, families: Families) -> None:
        """Emit the copy of a block's gradients into the tensor that is reduced.

        FSDP2's ``chunk_cat`` also casts them (``_fsdp_collectives.py``, foreach_reduce_scatter_copy_in). FSDP1's flat
        parameter is split into views, whose gradients autograd joins (``_flat_param.py``, _get_unflat_views_unaligned);
        it casts and divides the result in a stream beside compute (``_runtime_utils.py``, _post_backward_hook), which
        is not priced.
        """
        flat = families[f"flat_grads.{self.name}"]
        builder.bind(flat, slot="flat")
        elements, size = self.block.trained_elements, DTYPE_BYTES[self.decisions.dtype]
        written = DTYPE_BYTES[self.reduce_dtype] if self.decisions.sharding == "fsdp2" else size
        work = Rowwise(
            "flatten.widen" if written > size else "flatten",
            elements,
            size * elements,
            written * elements,
            elements=elements,
            element_bytes=size,
        )
        source, target = reads(builder.all("grads")), writes(builder.all("flat"))
        builder.emit("flatten", "grads.flatten", Lane.COMPUTE, work, source=source, target=target)

    def reduce_shards(self, families: Families) -> Template | None:
        """Return the template that sums this rank's shard of gradients between groups; None without several groups."""
        if self.copies == 1 or not self.shared("grads"):  # a frozen block shares none
            return None
        builder = TemplateBuilder(f"{self.name}.reduce", Phase.REDUCE, TemplateKind.REDUCE, self.kind, self.layer_kind)
        builder.bind(families[f"grads.{self.name}"], slot="grads")
        self._reduce_shards(builder)
        return builder.build()

    def _reduce_shards(self, builder: TemplateBuilder) -> None:
        group: Group = EXPERT_REPLICATE if self.kind is BlockKind.EXPERTS else REPLICATE
        size = self._grad_bytes
        calls = self._one_or_several("all_reduce", [("all_reduce", size * length) for _, _, length in self.runs()])
        work = Collective("all_reduce", size * self.state_elements(), self.copies, group, calls=calls)
        tensors, offset = {}, 0
        for name, first, length in self.runs():
            tensors[f"tensor.{name}"] = accumulates(self._held("grads", first, offset, length))
            offset += length
        builder.emit("shard", "shards.all_reduce", COLLECTIVE_LANES[group], work, **tensors)

    def norm(self, families: Families) -> Template | None:
        """Return the template that adds the block's squared gradient norm; None for a frozen block.

        A vector that all tensor-parallel ranks hold is counted once across them.
        """
        if self.frozen:
            return None
        builder = TemplateBuilder(f"{self.name}.norm", Phase.REDUCE, TemplateKind.NORM, self.kind, self.layer_kind)
        builder.bind(families[f"grads.{self.name}"], slot="grads")
        builder.bind(families["grad_norm"])
        share = self.state_elements()
        builder.emit(
            "norm",
            "grad_norm",
            Lane.COMPUTE,
            Rowwise("grad_norm", share, self._grad_bytes * share, 4),
            grads=reads(builder.all("grads")),
            out=accumulates(builder.all("grad_norm")),
        )
        return builder.build()

    def update(self, families: Families) -> Template | None:
        """Return the template of AdamW over the block's two runs; None for a frozen block.

        With divided states it ends with the all-gather of the parameters, unless the next step gathers them.
        """
        if self.frozen:
            return None
        builder = TemplateBuilder(
            f"{self.name}.update", Phase.OPTIMIZER, TemplateKind.UPDATE, self.kind, self.layer_kind
        )
        for name in ("params", "grads", "master", "moment1", "moment2", "host_grads", "host_params"):
            if f"{name}.{self.name}" in families:
                builder.bind(families[f"{name}.{self.name}"], slot=name)
        self._bind_narrow(builder, families)
        builder.bind(families["grad_norm"])
        offset = 0
        for name, first, length in self.runs():
            builder.run = name
            if name == fp8.NARROW:
                self._narrow_update(builder, length)
            elif self.on_host:
                self._host_update(builder, name, first, offset, length)
            else:
                self._device_update(builder, name, first, offset, length)
            offset += length
        builder.run = ""
        if self._gathers_updated and not self.gathered_late:
            self._gather(builder)
        return builder.build()

    def gather(self, families: Families) -> Template | None:
        """Return the all-gather of the parameters that the step before updated; None when that step gathered them."""
        if not self.gathered_late:
            return None
        builder = TemplateBuilder(
            f"{self.name}.gather", Phase.GATHER, TemplateKind.GATHER_UPDATED, self.kind, self.layer_kind
        )
        if self.block.elements > self.narrow:
            builder.bind(families[f"{self._gathered}.{self.name}"], slot=self._gathered)
        self._bind_narrow(builder, families)
        self._gather(builder)
        return builder.build()

    def _bind_narrow(self, builder: TemplateBuilder, families: Families) -> None:
        """Bind what is kept in FP8 alone, with the largest values of all ranks' shares."""
        wanted = {FamilyKind.PARAMS_FP8: self.narrow > 0, FamilyKind.LARGEST: self.reduces_largest}
        for kind in (kind for kind, needed in wanted.items() if needed):
            builder.bind(families[f"{kind}.{self.name}"], slot=str(kind))

    def scales_of_gathered(self, builder: TemplateBuilder) -> dict[str, Access]:
        """Return the largest values that the scales of what ranks gather in FP8 follow from, as an operand."""
        return {"largest": reads(builder.all(str(FamilyKind.LARGEST)))} if self.reduces_largest else {}

    @property
    def _gathered(self) -> Literal["params", "master"]:
        """The whole parameters of which the ranks update shards; autocast's are fp32."""
        return "master" if autocast(self.decisions) else "params"

    def _gather(self, builder: TemplateBuilder) -> None:
        in_fp8 = f"gather.fp8.params.{self.name}"
        wholes = {
            "gather": Rows(self._gathered, 0, self.block.trained_elements - self.narrow),
            in_fp8: Rows("params_fp8", 0, self.narrow),
        }
        for name, whole in ((name, whole) for name, whole in wholes.items() if whole.tokens):
            scales = self.scales_of_gathered(builder) if name == in_fp8 else {}
            size = DTYPE_BYTES[builder.dtype(whole.slot)]
            narrow = name == in_fp8
            names = [each for each in self.trained_runs if (each == fp8.NARROW) == narrow]
            calls = self.calls_by_run("all_gather", size, names)
            work = Collective("all_gather", whole.tokens * size, self.shards, self.shard_group, calls=calls)
            lane = COLLECTIVE_LANES[self.shard_group]
            builder.emit(name, "params.all_gather", lane, work, tensor=accumulates(whole), **scales)

    def _held(self, name: Literal["params", "grads"], first: int, offset: int, length: int) -> Rows:
        """Return the rows of this rank's shard of a run.

        They begin at ``first`` in a whole block, and at ``offset`` in a buffer that holds only the rank's shard. Those
        of parameters are without what is kept in FP8 alone.
        """
        if name == "params":
            first, offset = first - self.narrow, offset - self._narrow_held
        return Rows(name, offset if self.shared(name) else first, length)

    def _narrow_update(self, builder: TemplateBuilder, length: int) -> None:
        """Emit AdamW of the master weights of what is kept in FP8 alone, and their quantisation."""
        read, written = self._update_bytes(narrow=True)
        size, kernels = DTYPE_BYTES[self.decisions.dtype], self._kernels_of(narrow=True)
        work = Rowwise(kernels, length, read * length, written * length, elements=length, element_bytes=size)
        share = {name: accumulates(Rows(name, 0, length)) for name in ("grads", "master", "moment1", "moment2")}
        norm = reads(builder.all("grad_norm"))
        scratch = builder.scratch(f"adamw.{fp8.NARROW}.scratch", adamw_workspace_bytes(length, *self._dtypes))
        name = f"adamw.{fp8.NARROW}"
        builder.emit(name, "adamw.decay", Lane.COMPUTE, work, **share, norm=norm, workspace=scratch)
        if self.reduces_largest:
            self._reduce_largest(builder, length)
        builder.emit(
            f"params.{self.name}",
            "params.quantize",
            Lane.COMPUTE,
            requantisation(self.decisions, length, shard=self.shards > 1),
            x=reads(Rows("master", 0, length)),
            out=writes(Rows("params_fp8", 0, length)),
            **self.scales_of_gathered(builder),
        )

    def _reduce_largest(self, builder: TemplateBuilder, length: int) -> None:
        """Emit the search for the largest values of a share of the master weights, and their reduction."""
        largest = builder.all(str(FamilyKind.LARGEST))
        search = search_of_largest(length, largest.tokens)
        master, found = reads(Rows("master", 0, length)), writes(largest)
        builder.emit(f"largest.params.{self.name}", "params.largest", Lane.COMPUTE, search, x=master, out=found)
        reduction = Collective("all_reduce", DTYPE_BYTES["fp32"] * largest.tokens, self.shards, self.shard_group)
        lane = COLLECTIVE_LANES[self.shard_group]
        builder.emit("largest", "fp8.max_reduce", lane, reduction, tensor=accumulates(largest))

    def _device_update(self, builder: TemplateBuilder, name: str, first: int, offset: int, length: int) -> None:
        read, written = self._update_bytes()
        size = DTYPE_BYTES[self.decisions.dtype]
        params = self._held("params", first, offset, length)
        op = _update_of(name)
        work = Rowwise(self._kernels_of(), length, read * length, written * length, elements=length, element_bytes=size)
        if name == "selection":  # reads a sum and a bias in fp32, writes the bias, its rounded copy and the sign
            work = Rowwise(op, length, 2 * 4 * length, (4 + 4 + size * self.master) * length)
        builder.emit(
            op,
            op,
            Lane.COMPUTE,
            work,
            grads=accumulates(self._held("grads", first, offset, length)),
            norm=reads(builder.all("grad_norm")),
            master=accumulates(Rows("master", offset, length)) if self.master else None,
            moment1=accumulates(Rows("moment1", offset, length)),
            moment2=accumulates(Rows("moment2", offset, length)),
            params=None if self.cast else writes(params) if self.master else accumulates(params),
            workspace=builder.scratch(f"adamw.{name}.scratch", adamw_workspace_bytes(length, *self._dtypes)),
        )

    def _kernels_of(self, *, narrow: bool = False) -> str:
        """Return the kind of AdamW's kernels (``operators/framework_kernels.py``); ``narrow``: of ``NARROW``."""
        fused = self.decisions.kernels.adamw == "fused" and library_of(self.decisions.kernels.rowwise) is not None
        masters_alone = self.cast or autocast(self.decisions) or narrow
        return "adamw" + ".pure" * self.pure + ".cast" * masters_alone + ".fused" * fused

    @property
    def _dtypes(self) -> tuple[DtypeName, DtypeName, DtypeName]:
        """The dtypes of what AdamW updates (parameters or their master copy), of gradients, and of moments."""
        # An eager framework's kernels and scratch are those of sums in fp32.
        sums = self.grad_dtype if self.pure or self.decisions.memory_policy != "eager" else "fp32"
        return ("bf16" if self.pure else "fp32"), sums, moment_dtype(self.decisions)

    def _update_bytes(self, *, narrow: bool = False) -> tuple[int, int]:
        """Return the bytes that AdamW reads and writes for each parameter; ``narrow``: of ``NARROW``."""
        size = DTYPE_BYTES[self.decisions.dtype]
        eager = self.decisions.memory_policy == "eager"
        updated, sums, moment = (DTYPE_BYTES[dtype] for dtype in self._dtypes)
        if self.pure:  # gradient, moments and parameter, of which all but the gradient are written; clipping is a pass
            read, written = sums + 2 * moment + updated, 2 * moment + updated
            return read + sums * eager, written + sums * eager
        read = sums + 2 * moment + 4
        copied = self.master and not self.cast and not autocast(self.decisions) and not narrow
        written = 2 * moment + 4 + (size if copied else 0)
        if narrow and eager:  # the gradient is scaled in a pass of its own; the copy is its own instruction
            return read + 4, written + 4
        return (read + 8, written + 4) if eager else (read, written)

    def _host_update(self, builder: TemplateBuilder, name: str, first: int, offset: int, length: int) -> None:
        size = DTYPE_BYTES[self.decisions.dtype]
        share = Rows("host_grads", offset, length)
        updated = Rows("host_params", offset, length)
        grads, params = (self._held(held, first, offset, length) for held in ("grads", "params"))
        builder.emit(
            f"grads.{name}", "d2h", Lane.D2H, Copy(4 * length, "d2h"), source=reads(grads), target=writes(share)
        )
        builder.emit(
            _update_of(name),
            _update_of(name),
            Lane.HOST,
            host_update(length, self.decisions.dtype),
            grads=accumulates(share),
            norm=reads(builder.all("grad_norm")),
            master=accumulates(Rows("master", offset, length)),
            moment1=accumulates(Rows("moment1", offset, length)),
            moment2=accumulates(Rows("moment2", offset, length)),
            params=writes(updated),
        )
        builder.emit(
            f"params.{name}", "h2d", Lane.H2D, Copy(size * length, "h2d"), source=reads(updated), target=writes(params)
        )


_IN_FP8 = ("params_fp8", "params_fp8_columns")
"""The families of what is kept in FP8 alone: by rows, and transposed."""


def _update_of(run: str) -> str:
    """Return the op that updates a run. The selection bias has AdamW's operands."""
    return "router.balance" if run == "selection" else f"adamw.{run}"


def host_update(elements: int, dtype: DtypeName) -> HostUpdate:
    """Return AdamW of ``elements`` parameters of ``dtype`` on the host.

    It reads the fp32 gradient, reads and writes the fp32 master copy and moments, and writes the parameter.
    """
    return HostUpdate(elements, (4 * 4 + 3 * 4 + DTYPE_BYTES[dtype]) * elements)


def tied(block: Block, families: Families) -> Template:
    """Return the template that sums a tied embedding's gradient over the first stage (lookup) and last (classifier)."""
    builder = TemplateBuilder("embed.tied", Phase.REDUCE, TemplateKind.TIED, BlockKind.EMBED)
    builder.bind(families["grads.embed"], slot="grads")
    tokens = block.find("tokens.weight")
    assert tokens is not None  # every embedding has it
    rows = Rows("grads", tokens.first, tokens.elements)
    size = DTYPE_BYTES[families["grads.embed"].dtype] * tokens.elements
    work = Collective("all_reduce", size, 2, "tied")
    builder.emit("tied", "all_reduce", Lane.TIED, work, tensor=accumulates(rows))
    return builder.build()


def totals(decisions: Decisions, families: Families) -> Template | None:
    """Return the template that sums the gradient norm and the loss over ranks; None when no rank holds only a part."""
    layout = decisions.layout
    replicas = layout.replicas
    builder = TemplateBuilder("totals", Phase.REDUCE, TemplateKind.TOTALS)
    for name in ("grad_norm", "loss"):
        builder.bind(families[name])
    weights = layout.weights_group
    shared: tuple[Group, int] = (GRADS if layout.shards == replicas else SHARD, layout.shards)
    # Ranks that divide experts add up the norms of their own (``memo_exec/distributed/own_program.py`` says who counts
    # the rest). Groups of ``zero_ranks`` replicas have all experts each, so each sums the whole norm.
    shared = (GRADS, replicas) if layout.ep > 1 and not layout.sharded_in_groups else shared
    wanted: list[tuple[str, Group, int, bool]] = [
        ("grad_norm", "tp", layout.tp, True),
        ("grad_norm", weights, degree(weights, layout), layout.whole_ends),
        ("grad_norm", *shared, True),
        ("grad_norm", "pp", layout.pp, True),
        ("loss", weights, degree(weights, layout), layout.whole_ends),
        ("loss", "grads", replicas, True),
        ("loss", "pp", layout.pp, True),
    ]
    chosen = [(name, group, ranks) for name, group, ranks, needed in wanted if needed and ranks > 1]
    for name, group, ranks in chosen:
        work = Collective("all_reduce", 4, ranks, group)
        tensor = accumulates(builder.all(name))
        builder.emit(f"{name}.{group}", "all_reduce", COLLECTIVE_LANES[group], work, tensor=tensor)
    if fp8.delayed(decisions):
        _enter_history(builder, decisions, families)
        return builder.build()
    return builder.build() if chosen else None


def _enter_history(builder: TemplateBuilder, decisions: Decisions, families: Families) -> None:
    """Emit what delayed scaling does with a step's largest values: their reduction, and the next step's scales.

    They are reduced over all ranks with the same layers, as Megatron-LM has it (the ranks of tp, cp and dp).
    """
    layout = decisions.layout
    for name in (AMAXES, SCALES, HISTORY):
        builder.bind(families[name])
    amaxes, size = builder.all(AMAXES), families[AMAXES].bytes
    over: list[tuple[Group, int]] = [("tp", layout.tp), (GRADS, layout.replicas)]
    for group, ranks in over:
        if ranks > 1:
            work, tensor = Collective("all_reduce", size, ranks, group), accumulates(amaxes)
            builder.emit(f"amaxes.{group}", "fp8.max_reduce", COLLECTIVE_LANES[group], work, tensor=tensor)
    entered = {"amax": accumulates(amaxes), "scale": accumulates(builder.all(SCALES))}
    work_of_history = Rowwise("fp8.history", amaxes.tokens, families[HISTORY].bytes + 2 * size, 3 * size)
    history = accumulates(builder.all(HISTORY))
    builder.emit("amaxes.history", "fp8.history", Lane.COMPUTE, work_of_history, **entered, history=history)
