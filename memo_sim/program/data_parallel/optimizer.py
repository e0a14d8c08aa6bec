"""The end of a step: gradients summed over the ranks that share parameters, their norm, AdamW, parameters back.

Each block (embed, every layer, head) is played by itself. ``zero`` 1 divides the optimizer's states over the ranks
that hold the same parameters (cp x ulysses x dp): gradients are reduce-scattered, parameters gathered; ``zero`` 0
all-reduces, 2 keeps this rank's share of the gradients alone, 3 of the parameters too (``sharding.py``).
``overlap`` moves both beside compute, on a lane of their own (``sharding.py`` says where they are played).
An eager framework goes over the gradients more often (Megatron-LM, ``core/distributed/param_and_grad_buffer.py`` and
``core/optimizer``): it looks for a NaN in them and divides them by the replicas before they are reduced, scales what is
clipped in a pass of its own, and copies the fp32 parameters to the layers' in another.
States ``bf16`` keeps both moments in bf16; ``host`` keeps master and moments in host memory, updates them on the
host's cores, and copies gradients down and parameters up. Where clipping applies the update scales gradients in place.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from memo_sim.contract.hardware import DtypeName
from memo_sim.contract.plan import Decisions
from memo_sim.contract.units import DTYPE_BYTES
from memo_sim.program.ir.builder import Rows, TemplateBuilder, accumulates, reads, writes
from memo_sim.program.ir.instruction import BufferClass, Families, Family, Lane, Template
from memo_sim.program.ir.work import Collective, Copy, Group, HostUpdate, Rowwise
from memo_sim.program.layout.parameters import Block, half_gradients
from memo_sim.program.layout.rank_order import degree
from memo_sim.program.operators.workspaces import adamw_workspace_bytes


@dataclass(frozen=True)
class Optimizer:
    """Writes one block's zeroing, reduction and update."""

    decisions: Decisions
    block: Block
    kind: str
    """``embed``, ``layer`` or ``head``: the suffix of the block's families."""
    count: int

    @property
    def group(self) -> Group:
        """The group of the ranks that hold the same parameters: METP divides a layer's alone."""
        return "ends" if self.decisions.layout.metp > 1 and self.kind != "layer" else "grads"

    @property
    def replicas(self) -> int:
        """Ranks that hold the same parameters."""
        return degree(self.group, self.decisions.layout)

    @property
    def shards(self) -> int:
        """Ranks that the optimizer's states are divided over."""
        return self.replicas if self.decisions.layout.zero >= 1 else 1

    @property
    def master(self) -> bool:
        """Whether there is an fp32 copy beside the parameters."""
        return self.decisions.dtype != "fp32" or self.on_host

    @property
    def grad_dtype(self) -> DtypeName:
        """What gradients are summed in."""
        return "fp16" if half_gradients(self.decisions) else "fp32"

    @property
    def _grad_bytes(self) -> int:
        return DTYPE_BYTES[self.grad_dtype]

    @property
    def on_host(self) -> bool:
        """Whether master and moments live in host memory."""
        return self.decisions.states == "host"

    def shared(self, name: Literal["params", "grads"]) -> bool:
        """Whether a rank holds its share of the block's parameters or gradients alone."""
        return self.shards > 1 and self.decisions.layout.zero >= {"grads": 2, "params": 3}[name]

    @property
    def reduced_early(self) -> bool:
        """Whether whole gradients are summed over replicas behind the block's last backward."""
        return self.decisions.overlap != "none" and self.replicas > 1 and not self.shared("grads")

    @property
    def gathered_late(self) -> bool:
        """Whether whole parameters are gathered at the start of the following step."""
        return self.decisions.overlap == "both" and self.shards > 1 and not self.shared("params")

    @property
    def eager(self) -> bool:
        """Whether an eager framework goes over whole gradients before they are reduced."""
        return self.decisions.memory_policy == "eager" and not self.shared("grads")

    def runs(self) -> list[tuple[str, int, int]]:
        """Return (name, first element of the block, elements of this rank's share) for decayed and other parameters."""
        decayed, total = self.block.decayed_elements, self.block.elements
        parts = [("decay", 0, decayed), ("no_decay", decayed, total - decayed)]
        return [(name, first, -(-length // self.shards)) for name, first, length in parts if length]

    def state_elements(self) -> int:
        """Return how many elements of the block this rank updates."""
        return sum(length for _, _, length in self.runs())

    def families(self) -> list[Family]:
        """Return parameters, gradients, master and moments of the block."""
        space: Literal["device", "host"] = "host" if self.on_host else "device"
        moment = "bf16" if self.decisions.states == "bf16" else "fp32"
        share = self.state_elements()

        def state(name: str, dtype: str, elements: int, where: Literal["device", "host"]) -> Family:
            return Family(f"{name}.{self.kind}", BufferClass.STATE, dtype, elements, 1, self.count, where, "step")

        held = {name: share if self.shared(name) else self.block.elements for name in ("params", "grads")}
        found = [state("params", self.decisions.dtype, held["params"], "device")]
        found.append(state("grads", self.grad_dtype, held["grads"], "device"))
        if self.master:
            found.append(state("master", "fp32", share, space))
        found += [state("moment1", moment, share, space), state("moment2", moment, share, space)]
        if self.on_host:
            found.append(state("host_grads", "fp32", share, "host"))
            found.append(state("host_params", self.decisions.dtype, share, "host"))
        return found

    def zero(self, families: Families) -> Template:
        """Return the zeroing of the gradients this rank holds at the start of a step."""
        builder = TemplateBuilder(f"{self.kind}.zero", "zero")
        builder.bind(families[f"grads.{self.kind}"], slot="grads")
        held = builder.all("grads")
        work = Rowwise("zero", held.tokens, 0, self._grad_bytes * held.tokens)
        builder.emit("grads", "zero", Lane.COMPUTE, work, target=writes(held))
        return builder.build()

    def prepare(self, families: Families) -> Template | None:
        """Return what an eager framework does to whole gradients before any of them is reduced; None for none."""
        if not self.eager or self.reduced_early:
            return None
        builder = TemplateBuilder(f"{self.kind}.prepare", "reduce")
        builder.bind(families[f"grads.{self.kind}"], slot="grads")
        self._prepare(builder)
        return builder.build()

    def _prepare(self, builder: TemplateBuilder) -> None:
        whole, size = builder.all("grads"), self._grad_bytes * self.block.elements
        looked, norm = Rowwise("grad_norm", self.block.elements, size, 4), builder.scratch("check.norm", 4)
        builder.emit("check", "grads.check", Lane.COMPUTE, looked, grads=reads(whole), workspace=norm)
        if self.replicas > 1:
            scaled = Rowwise("scale", self.block.elements, size, size)
            builder.emit("scale", "grads.scale", Lane.COMPUTE, scaled, grads=accumulates(whole))

    def reduce(self, families: Families) -> Template | None:
        """Return the whole gradients' sums over ranks: of vectors computed in part over tp, of all over the replicas.

        None when every rank has the whole gradients already.
        """
        builder = TemplateBuilder(f"{self.kind}.reduce", "reduce")
        builder.bind(families[f"grads.{self.kind}"], slot="grads")
        layout = self.decisions.layout
        if self.eager and self.reduced_early:
            self._prepare(builder)
        partial = self.block.partial_elements(sequence_parallel=layout.sequence_parallel) if layout.tp > 1 else 0
        over: Group = "tp"
        if layout.metp > 1 and self.kind == "layer":
            partial, over = self.block.partial_elements(sequence_parallel=True), "metp"
        if partial:
            rows = Rows("grads", self.block.elements - partial, partial)
            work = Collective("all_reduce", self._grad_bytes * partial, degree(over, layout), over)
            builder.emit("vectors", "all_reduce", Lane.COLLECTIVE, work, tensor=accumulates(rows))
        if self.replicas > 1:
            kind: Literal["reduce_scatter", "all_reduce"] = "reduce_scatter" if self.shards > 1 else "all_reduce"
            work = Collective(kind, self._grad_bytes * self.block.elements, self.replicas, self.group)
            whole = accumulates(builder.all("grads"))
            lane = Lane.REPLICA if self.reduced_early else Lane.COLLECTIVE
            builder.emit("grads", f"grads.{kind}", lane, work, tensor=whole)
        return builder.build() if partial or self.replicas > 1 else None

    def norm(self, families: Families) -> Template:
        """Return the block's share of the squared gradient norm; a vector that tp ranks share is counted by one."""
        builder = TemplateBuilder(f"{self.kind}.norm", "reduce")
        builder.bind(families[f"grads.{self.kind}"], slot="grads")
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

    def update(self, families: Families) -> Template:
        """Return AdamW over the block's two runs, and the gathering of the parameters when the states are divided."""
        builder = TemplateBuilder(f"{self.kind}.update", "opt")
        for name in ("params", "grads", "master", "moment1", "moment2", "host_grads", "host_params"):
            if f"{name}.{self.kind}" in families:
                builder.bind(families[f"{name}.{self.kind}"], slot=name)
        builder.bind(families["grad_norm"])
        offset = 0
        for name, first, length in self.runs():
            if self.on_host:
                self._host_update(builder, name, first, offset, length)
            else:
                self._device_update(builder, name, first, offset, length)
            offset += length
        if self.shards > 1 and not self.shared("params") and not self.gathered_late:
            self._gather(builder, Lane.COLLECTIVE)
        return builder.build()

    def gather(self, families: Families) -> Template | None:
        """Return the gathering of what the step before has updated; None where that step did it."""
        if not self.gathered_late:
            return None
        builder = TemplateBuilder(f"{self.kind}.gather", "gather")
        builder.bind(families[f"params.{self.kind}"], slot="params")
        self._gather(builder, Lane.REPLICA)
        return builder.build()

    def _gather(self, builder: TemplateBuilder, lane: Lane) -> None:
        size = self.block.elements * DTYPE_BYTES[self.decisions.dtype]
        work = Collective("all_gather", size, self.replicas, self.group)
        builder.emit("gather", "params.all_gather", lane, work, tensor=accumulates(builder.all("params")))

    def _held(self, name: Literal["params", "grads"], first: int, offset: int, length: int) -> Rows:
        """Return a run's share: at ``first`` of the whole block, at ``offset`` where a rank holds shares alone."""
        return Rows(name, offset if self.shared(name) else first, length)

    def _device_update(self, builder: TemplateBuilder, name: str, first: int, offset: int, length: int) -> None:
        size = DTYPE_BYTES[self.decisions.dtype]
        moment = 2 if self.decisions.states == "bf16" else 4
        read = 4 + 2 * moment + 4
        written = 2 * moment + 4 + (size if self.master else 0)
        if self.decisions.memory_policy == "eager":
            read, written = read + 8, written + 4
        params = self._held("params", first, offset, length)
        builder.emit(
            f"adamw.{name}",
            f"adamw.{name}",
            Lane.COMPUTE,
            Rowwise("adamw", length, read * length, written * length),
            grads=accumulates(self._held("grads", first, offset, length)),
            norm=reads(builder.all("grad_norm")),
            master=accumulates(Rows("master", offset, length)) if self.master else None,
            moment1=accumulates(Rows("moment1", offset, length)),
            moment2=accumulates(Rows("moment2", offset, length)),
            params=writes(params) if self.master else accumulates(params),
            workspace=builder.scratch(f"adamw.{name}.scratch", adamw_workspace_bytes(length, self.decisions.states)),
        )

    def _host_update(self, builder: TemplateBuilder, name: str, first: int, offset: int, length: int) -> None:
        size = DTYPE_BYTES[self.decisions.dtype]
        share = Rows("host_grads", offset, length)
        updated = Rows("host_params", offset, length)
        grads, params = (self._held(held, first, offset, length) for held in ("grads", "params"))
        builder.emit(
            f"grads.{name}", "d2h", Lane.D2H, Copy(4 * length, "d2h"), source=reads(grads), target=writes(share)
        )
        builder.emit(
            f"adamw.{name}",
            f"adamw.{name}",
            Lane.HOST,
            HostUpdate(length, (4 * 4 + 3 * 4 + size) * length),
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


def tied(block: Block, families: Families) -> Template:
    """Return the sum of the token embedding's gradient over the two stages that hold it: lookup's and classifier's."""
    builder = TemplateBuilder("embed.tied", "reduce")
    builder.bind(families["grads.embed"], slot="grads")
    tokens = block.find("tokens.weight")
    assert tokens is not None  # every embedding has it
    rows = Rows("grads", tokens.first, tokens.elements)
    size = DTYPE_BYTES[families["grads.embed"].dtype] * tokens.elements
    work = Collective("all_reduce", size, 2, "tied")
    builder.emit("tied", "all_reduce", Lane.COLLECTIVE, work, tensor=accumulates(rows))
    return builder.build()


def totals(decisions: Decisions, families: Families) -> Template | None:
    """Return the sums of gradient norm and loss over the ranks that hold parts of them; None for one process."""
    layout = decisions.layout
    replicas = layout.replicas
    builder = TemplateBuilder("totals", "reduce")
    for name in ("grad_norm", "loss"):
        builder.bind(families[name])
    wanted: list[tuple[str, Group, int, bool]] = [
        ("grad_norm", "tp", layout.tp, True),
        ("grad_norm", "metp", layout.metp, True),
        ("grad_norm", "grads", replicas, layout.zero >= 1),
        ("grad_norm", "pp", layout.pp, True),
        ("loss", "metp", layout.metp, True),
        ("loss", "grads", replicas, True),
        ("loss", "pp", layout.pp, True),
    ]
    chosen = [(name, group, ranks) for name, group, ranks, needed in wanted if needed and ranks > 1]
    for name, group, ranks in chosen:
        work = Collective("all_reduce", 4, ranks, group)
        tensor = accumulates(builder.all(name))
        builder.emit(f"{name}.{group}", "all_reduce", Lane.COLLECTIVE, work, tensor=tensor)
    return builder.build() if chosen else None
