"""Work of each lane, unavoidable waits and bytes of one micro-batch on one rank, for any number of layers.

Middle layers are identical. A few layers are lowered, and two in the middle stand for all that are left out. There are
two of them, because layers alternate between two rounding buffers. Where layers differ, a window of their longest
repeated stretch stands for the others (``program/layout/repeated_layers.py``). Where layers are recomputed differently,
or no stretch repeats, all are lowered.

      lowered   l0 l1 l2 l3 l4 l5        eighty layers   l0 l1 (l2 l3) x 38 l78 l79
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property
from itertools import islice, pairwise
from typing import TypeVar

import msgspec
import numpy as np
from numpy.typing import NDArray

from memo_sim.contract.cluster import Cluster
from memo_sim.contract.errors import Infeasible
from memo_sim.contract.hardware import Hardware
from memo_sim.contract.knobs import MOST_ZERO
from memo_sim.contract.layer_shape import LayerShape
from memo_sim.contract.plan import Decisions
from memo_sim.costs.pricing import NodeRates, Pricer
from memo_sim.planning.experts_apart import experts_apart
from memo_sim.planning.pricers import Pricers
from memo_sim.planning.recent import Recent
from memo_sim.planning.short_rings import (
    SHORT,
    SHORT_PARTS,
    of_many_parts,
    parts_repeat,
    steps_repeat,
    with_parts,
    with_ring,
)
from memo_sim.program.analysis.columns import Flags, FoldedColumns, Ints, distinct, fold
from memo_sim.program.analysis.edges import Edges, derive_edges
from memo_sim.program.analysis.liveness import liveness, living
from memo_sim.program.arena.library_workspaces import lives_in_arena
from memo_sim.program.ir.instruction import COLLECTIVE_LANES, BufferClass, Instance, Instruction, Lane, Template
from memo_sim.program.ir.kinds import BlockKind, Phase, TemplateKind
from memo_sim.program.ir.program import Program
from memo_sim.program.ir.work import Attention
from memo_sim.program.layout.parameters import without_masters
from memo_sim.program.layout.rank_order import least_dp
from memo_sim.program.layout.recomputed_layers import ALL
from memo_sim.program.layout.repeated_layers import RepeatedLayers, repeated_layers
from memo_sim.program.layout.swap_schedule import ROUNDING_BUFFERS
from memo_sim.program.lower import lower_passes

ENDS = 2
"""Layers at each end of the model that no window stands for: two that are swapped, and the last two, which are not."""
LOWERED = 2 * ENDS + ROUNDING_BUFFERS
"""Number of lowered layers of a model whose layers are all alike."""

ACTIVATIONS = frozenset({"gelu", "swiglu", "geglu", "experts.swiglu", "experts.clamped", "shared_gate.swiglu"})
"""Operators of an MLP's activation."""
REPEATED = ACTIVATIONS | {"linear", "experts.linear", "layer_norm", "rms_norm", "qk_norm", "rotary", "residual_add"}
"""Operators of a layer's first half whose results neither full nor row-wise recompute keeps."""

WITHOUT_EXPERTS = {
    "expert_load": "balanced",
    "expert_capacity": 0.0,
    "expert_overflow": "drop",
    "expert_overlap": False,
    "fp8_experts": False,
}
"""What a plan decides about experts when its layers have none."""

MOST_LOWERED = 200_000
"""Largest size of the lowered layers that are kept, in instructions of their steps and templates; about 80 MB.

What follows from them is small, and all of it is kept.
"""

KERNELS = (
    "compute_s",
    "rebuild_s",
    "forward_s",
    "attention_s",
    "repeated_s",
    "first_forward_s",
    "first_compute_s",
    "first_rebuild_s",
    "head_s",
)
"""The fields of ``Pass`` that are parts of the compute lane, in the order in which they are summed up."""

WAITS = ("idle_s", "forward_idle_s", "backward_idle_s", "uncut_idle_s", "exchanged_s")
"""The fields of ``Pass`` that are waits of compute."""

EXCHANGED = {("experts.dispatch", "experts.arrange"), ("experts.arrange.back", "experts.combine")}
"""Kernels one after the other, where ranks exchange the first one's rows and the second reads what arrives."""

NOT_RESIDENT = frozenset({Phase.RECOMPUTE, Phase.OFFLOAD, Phase.PREFETCH})
"""Phases of the kernels that a layer does not have whose activations stay on the device (``Pass.rebuild_s``)."""

HALVES = (Lane.D2H, Lane.H2D)
"""The copy lane that has most to do in forward, and in backward."""

OF_HALVES = ("rebuild_s", "idle_s", "around_s")
"""The fields of ``Half`` that are no lane's."""

Floats = NDArray[np.float64]
Known = TypeVar("Known")
Counts = tuple[int, int, int, int]
"""Numbers of results: of kernels, lanes, halves and peaks."""


class Pass(msgspec.Struct, frozen=True):
    """Seconds of each lane alone."""

    compute_s: float
    rebuild_s: float
    """Part of ``compute_s`` that layers do not have whose activations stay on the device: recompute, and copies of rows
    that are kept beside the swapped ones."""
    forward_s: float
    """Part of ``compute_s`` in the layers' forward."""
    attention_s: float
    """Part of ``forward_s`` in attention's kernels."""
    repeated_s: float
    """Part of ``forward_s`` that full and row-wise recompute repeat: ``REPEATED`` up to the MLP's last activation."""
    first_forward_s: float
    first_compute_s: float
    first_rebuild_s: float
    """Parts of ``forward_s``, ``compute_s`` and ``rebuild_s`` in the first subsequence; all without subsequences."""
    head_s: float
    """Part of ``compute_s`` in the head and the loss, forward and backward."""
    idle_s: float = 0.0
    """Waits of compute between two kernels, because the second needs what another lane makes of the first's result."""
    forward_idle_s: float = 0.0
    backward_idle_s: float = 0.0
    """Parts of ``idle_s`` in the layers' forward and backward, without waits before a layer's first kernel."""
    uncut_idle_s: float = 0.0
    """Part of ``idle_s`` in which no other kernel of the pass runs, even if row blocks divide the forward.

    It excludes Ulysses' exchanges in forward, which can run beside another row block. It also excludes what precedes
    the first kernel of a layer's backward: recompute stands there, and may include kernels that this pass has later."""
    exchanged_s: float = 0.0
    """Part of ``idle_s`` between the copy of experts' rows that are sent and the kernel that arranges or sums what
    arrives, where no kernel lies between the two: row blocks wait as long for their parts."""
    out_s: float = 0.0
    in_s: float = 0.0
    """Seconds of the copies to the host, and of those from there."""
    collective_s: float = 0.0
    p2p_s: float = 0.0

    @property
    def copy_s(self) -> float:
        """Seconds of the copy lane that has more work."""
        return max(self.out_s, self.in_s)

    @property
    def backward_s(self) -> float:
        """Part of ``compute_s`` in the layers' backward, with embedding and recompute."""
        return self.compute_s - self.forward_s - self.head_s


class Half(msgspec.Struct, frozen=True):
    """Seconds of the forward or of the backward of all layers, of which nothing else of the pass is played in between.

    A lane's seconds are those of instructions that need a kernel of the half and that another kernel of it needs. So
    they are played between the kernel before the half and its last one:

        compute     [L0        ][L1        ][L2        ][L3        ]        layer 2 overwrites what is copied of layer 0
        to host         [copies of L0 ][copies of L1 ]
    """

    kept_s: float
    """Seconds of all other kernels than those of ``rebuild_s``."""
    rebuild_s: float
    """Seconds of kernels, as in ``Pass``."""
    idle_s: float
    """Waits of compute, as in ``Pass``."""
    copy_s: float
    """Seconds of the copy lane that has more work."""
    around_s: float
    """Seconds of the kernels that certainly come before that lane's copies, or after them."""
    collective_s: float
    p2p_s: float


class Halves(msgspec.Struct, frozen=True):
    """A pass of one stage that plays all layers forward and then all backward."""

    forward: Half
    backward: Half
    outside_s: float
    """Seconds of the other kernels."""


class Held(msgspec.Struct, frozen=True):
    """Peak bytes of a pass, without parameters, gradients and states."""

    device_bytes: int
    host_bytes: int


@dataclass(frozen=True, slots=True)
class _Line:
    """Seconds that grow with the repeated layers: those of the lowered layers, and those of one more window."""

    once: Floats
    more: Floats

    def at(self, times: int) -> Floats:
        """Return the seconds with ``times`` more windows."""
        found: Floats = self.once + times * self.more
        return found


@dataclass(frozen=True, slots=True)
class _Peak:
    """A peak that grows with the repeated layers."""

    once: int
    """Bytes at the fullest instant of the lowered layers."""
    kept: dict[int, int]
    """At instants when every repetition holds what it keeps: most bytes, by those that one more repetition adds."""

    def at(self, times: int) -> int:
        """Return the peak with ``times`` more repetitions."""
        return max(self.once, *(most + times * added for added, most in self.kept.items()))


@dataclass(frozen=True, slots=True)
class Lowered:
    """Results of lowerings, without the programs: for another process."""

    kernels: dict[_Question, _Line]
    lanes: dict[_Question, tuple[_Line, _Line]]
    halves: dict[_Question, _Line | None]
    peaks: dict[_Question, tuple[_Peak, _Peak]]


class Passes:
    """Passes of plans on one cluster; plans that differ only in what a pass does not contain share a lowering.

    dp, ZeRO below 3, pipeline stages and the dtypes of masters and moments change nothing in a pass.
    """

    def __init__(self, hardware: Hardware, cluster: Cluster) -> None:
        self._hardware, self._cluster = hardware, cluster
        self._pricers = Pricers(hardware, cluster)
        self._lowered: Recent[_Question, _FewLayers] = Recent(MOST_LOWERED, _FewLayers.size)
        self._kernels: dict[_Question, _Line] = {}
        self._lanes: dict[_Question, tuple[_Line, _Line]] = {}
        """Of each lane, and of the ``WAITS``."""
        self._halves: dict[_Question, _Line | None] = {}
        """Of forward and backward: of each lane, and of the ``OF_HALVES``; None where they are not told apart."""
        self._peaks: dict[_Question, tuple[_Peak, _Peak]] = {}
        """Of the device, and of the host."""

    @property
    def counts(self) -> Counts:
        """The number of known results of each field of ``Lowered``."""
        return len(self._kernels), len(self._lanes), len(self._halves), len(self._peaks)

    def lowered_since(self, counts: Counts) -> Lowered:
        """Return the results that were added since these were the ``counts``."""
        kernels, lanes, halves, peaks = counts
        return Lowered(
            _after(self._kernels, kernels),
            _after(self._lanes, lanes),
            _after(self._halves, halves),
            _after(self._peaks, peaks),
        )

    def learn(self, lowered: Lowered, sent: Counts) -> Counts:
        """Keep results of another process's lowerings, and return how many results need not be sent to it then.

        ``sent``: how many before. If some of them are still unsent, it also gets its own results back, with those.
        """
        all_sent = sent == self.counts
        self._kernels |= lowered.kernels
        self._lanes |= lowered.lanes
        self._halves |= lowered.halves
        self._peaks |= lowered.peaks
        return self.counts if all_sent else sent

    def of(self, decisions: Decisions, layers: Sequence[LayerShape]) -> Pass:
        """Return the pass of one micro-batch through ``layers``.

        Raises:
            Infeasible: when the plan cannot be lowered, or the profile has not measured its work.
        """
        times, question = self._few(decisions, layers)
        if question not in self._lanes:
            self._know_lanes(question)
        of_lanes, waits = self._lanes[question]
        lanes, idle = of_lanes.at(times), waits.at(times).tolist()
        return msgspec.structs.replace(
            _of_compute(self._of_kernels(question, times)),
            **dict(zip(WAITS, idle, strict=True)),
            out_s=float(lanes[Lane.D2H]),
            in_s=float(lanes[Lane.H2D]),
            collective_s=float(max(lanes[lane] for lane in COLLECTIVE_LANES.values())),
            p2p_s=float(lanes[Lane.P2P]),
        )

    def halves(self, decisions: Decisions, layers: Sequence[LayerShape]) -> Halves | None:
        """Return the forward and the backward of the pass of ``of``; None where other kernels lie among theirs.

        Raises:
            Infeasible: see ``of``.
        """
        times, question = self._few(decisions, layers)
        if question not in self._halves:
            self._know_lanes(question)
        line = self._halves[question]
        if line is None:
            return None
        forward, backward = (_half(seconds, copies) for seconds, copies in zip(line.at(times), HALVES, strict=True))
        inside_s = (half.kept_s + half.rebuild_s for half in (forward, backward))
        return Halves(forward, backward, float(self._of_kernels(question, times)[0]) - sum(inside_s))

    def _know_lanes(self, question: _Question) -> None:
        lowered = self._lower(question)
        self._lanes[question], self._halves[question] = lowered.lanes(), lowered.halves()

    def waited(self, decisions: Decisions, layers: Sequence[LayerShape]) -> Pass:
        """Return the pass of ``of``, but of a long ring and of METP on many ranks only the compute lane's part.

        So it does not depend on what has been lowered before.

        Raises:
            Infeasible: see ``of``.
        """
        _, question = self._few(decisions, layers)
        repeats = steps_repeat(question[0]) or parts_repeat(question[0])
        return self.computed(decisions, layers) if repeats else self.of(decisions, layers)

    def computed(self, decisions: Decisions, layers: Sequence[LayerShape]) -> Pass:
        """Return only the compute lane's part of that pass, which is faster to compute; the other fields are 0.

        A long ring is not lowered where two short ones tell its kernels, nor METP on many ranks where three with fewer
        do (``short_rings.py``). Parameters that are gathered change no kernel.

        Raises:
            Infeasible: see ``of``.
        """
        times, (alone, middle, devices) = self._few(decisions, layers, gathered=False)
        if parts_repeat(alone):
            some = [self._of_kernels((with_parts(alone, each), middle, devices), times) for each in SHORT_PARTS]
            return _of_compute(of_many_parts(some, alone.layout.metp))
        if not steps_repeat(alone):
            return _of_compute(self._with_experts_apart((alone, middle, devices), times))
        few, many = (self._with_experts_apart((with_ring(alone, cp), middle, devices), times) for cp in SHORT)
        steps = (alone.layout.cp - SHORT[0]) / (SHORT[1] - SHORT[0])
        return _of_compute(few + steps * (many - few))

    def held(self, decisions: Decisions, layers: Sequence[LayerShape]) -> Held:
        """Return the bytes that the pass of one micro-batch through ``layers`` holds.

        Equal layers hold equal bytes, so an odd number of them needs no lowering of its own.

        Raises:
            Infeasible: see ``of``.
        """
        alike = decisions.recompute_layers == ALL and len(set(layers)) == 1
        odd = int(alike and len(layers) > LOWERED and len(layers) % ROUNDING_BUFFERS > 0)
        times, question = self._few(decisions, layers[odd:])
        if question not in self._peaks:
            self._peaks[question] = self._lower(question).peaks()
        repeated = len(question[1]) // len(_repeated(question)) * times + odd
        device, host = (peak.at(repeated) for peak in self._peaks[question])
        return Held(device, host)

    def _with_experts_apart(self, question: _Question, times: int) -> Floats:
        """Return the seconds of ``KERNELS``, where possible from plans that others share (``experts_apart.py``)."""
        alone, middle, devices = question
        apart = experts_apart(alone)
        if apart is not None:
            with suppress(Infeasible):  # for example, tp does not divide the features of whole experts
                whole, divided, neither = (
                    self._of_kernels((one, middle, devices), times)
                    for one in (apart.whole, apart.divided, apart.neither)
                )
                return whole + (divided - neither)
        return self._of_kernels(question, times)

    def _of_kernels(self, question: _Question, times: int) -> Floats:
        """Return the seconds of ``KERNELS``."""
        if question not in self._kernels:
            self._kernels[question] = self._lower(question).kernels()
        return self._kernels[question].at(times)

    def _few(
        self, decisions: Decisions, layers: Sequence[LayerShape], *, gathered: bool = True
    ) -> tuple[int, _Question]:
        """Return how often the window of the lowered layers is left out, and what is lowered.

        ``gathered``: whether with what ZeRO 3 gathers, where that is known (``gathers``).
        """
        few = repeated_layers(layers, windows=1, beside=2 * ENDS)
        if decisions.recompute_layers != ALL or not few.times:
            few = RepeatedLayers(tuple(layers), 0, len(layers), few.window, 0)
        if gathered and gathers(decisions):
            return few.times, self._of_gathered(decisions, few)
        if not any(shape.experts for shape in few.shapes):
            decisions = _without_experts(decisions)
        model = decisions.model.of_layers(few.shapes)
        return few.times, _question(msgspec.structs.replace(of_one_pass(decisions), model=model), few, decisions)

    def _of_gathered(self, decisions: Decisions, few: RepeatedLayers) -> _Question:
        """Return the lowered layers of a plan whose every micro-batch gathers parameters and scatters gradients."""
        dp = decisions.layout.dp
        alone = msgspec.structs.replace(
            decisions,
            model=decisions.model.of_layers(few.shapes),
            global_batch=dp * decisions.micro_batch,
            loss_metrics=0,
            memory_policy="planned",
            host_allocator="exact",
        )
        return _question(alone, few, decisions)

    def _lower(self, question: _Question) -> _FewLayers:
        def lowered() -> _FewLayers:
            alone, middle, devices = question
            pricer = self._pricers.of(alone, devices=devices)
            rates = NodeRates(self._hardware, self._cluster, min(self._cluster.devices_per_node, devices))
            # No lane is faster than while no other lane is busy.
            fastest = np.array([rates.rates(1 << lane)[lane] for lane in Lane])
            return _FewLayers(alone, pricer, fastest, middle, _repeated(question))

        return self._lowered.of(question, lowered)


def _without_experts(decisions: Decisions) -> Decisions:
    """Return a plan for layers without experts, which are the same however the experts of other layers are divided.

    A model of such layers alone has no experts to divide, so the plan would be refused.
    """
    whole = msgspec.structs.replace(decisions.layout, ep=1, expert_tp=0)
    return msgspec.structs.replace(decisions, layout=whole, **WITHOUT_EXPERTS)


_Question = tuple[Decisions, range, int]
"""The plan of a few layers, those of them that can be repeated, and the devices that wait for each other."""


def _question(alone: Decisions, few: RepeatedLayers, decisions: Decisions) -> _Question:
    """Return what is lowered of ``decisions``, whose devices all wait for the slowest of them."""
    first = max(ENDS, few.first)
    return alone, range(first, first + few.window), decisions.layout.devices


def _repeated(question: _Question) -> range:
    """Return the layers that are repeated where bytes are counted: of layers that are all alike, one of a window.

    Which of two rounding buffers a layer takes changes no bytes.
    """
    alone, middle, _ = question
    return middle[:1] if len(alone.model.layer_shapes) == 1 else middle


def of_one_pass(decisions: Decisions) -> Decisions:
    """Return the plan that stands for all with the same kernels in a pass: in one stage, of the fewest replicas."""
    least = least_dp(decisions.layout)
    one_stage = {"pp": 1, "pp_layers": (), "schedule": "1f1b", "virtual_stages": 1, "multiplexed": False}
    return msgspec.structs.replace(
        decisions,
        layout=msgspec.structs.replace(decisions.layout, dp=least, zero=0, zero_ranks=0, **one_stage),
        global_batch=least * decisions.micro_batch,
        # Pure bf16 states are the ones whose gradients are bf16, which the products of a pass write.
        states="pure-bf16" if without_masters(decisions) else "fp32",
        zero_params="auto",
        loss_metrics=0,
        overlap="none",
        memory_policy="eager" if decisions.memory_policy == "eager" else "planned",
        host_allocator="exact",
    )


def gathers(decisions: Decisions) -> bool:
    """Return whether bounds know what ZeRO 3 gathers for every micro-batch: in one stage, on planned memory."""
    layout = decisions.layout
    divided = layout.zero >= MOST_ZERO and layout.shards > 1 and layout.pp == 1 and layout.subsequences == 1
    return divided and decisions.memory_policy == "planned" and decisions.recompute_layers == ALL


class _FewLayers:
    """One micro-batch of a few layers; the layers ``middle`` can be repeated."""

    def __init__(self, decisions: Decisions, pricer: Pricer, fastest: Floats, middle: range, repeated: range) -> None:
        """``fastest``: the largest rate of each lane. ``repeated``: the layers of ``middle`` of which bytes repeat."""
        program = lower_passes(decisions)
        self._decisions, self._program, self._repeated = decisions, program, repeated
        self._first_repeated = middle.start
        templates, instances = program.templates, program.instances
        lengths = np.array([len(template.instructions) for template in templates])
        of_instance = program.template_of
        played = lengths[of_instance]
        self._instance = np.repeat(np.arange(len(of_instance)), played)
        shift = (np.cumsum(lengths) - lengths)[of_instance] - (np.cumsum(played) - played)
        at = np.arange(len(self._instance)) + shift[self._instance]
        rows = np.array(_rows(templates, pricer))[:, at]
        seconds, attention, rebuilt, again, begins, exchanged = rows[1:]
        self._lane = rows[0].astype(np.int64)
        seconds = seconds / fastest[self._lane]
        of_template = of_instance[self._instance]
        self._inside = np.array([_in_every_micro_batch(t) for t in templates])[of_template]
        self._middle = self._inside & self._of_instances([i.layer in middle for i in instances])
        head = np.array([float(t.block is BlockKind.HEAD) for t in templates])[of_template]
        forward, backward = (
            np.array([float(t.block is BlockKind.LAYER and t.kind is kind) for t in templates])[of_template]
            for kind in (TemplateKind.FORWARD, TemplateKind.BACKWARD)
        )
        self._seconds, self._forward = seconds * self._inside, forward
        self._exchanged = exchanged
        self._inside_forward, self._inside_backward = forward * (1 - begins), backward * (1 - begins)
        first = self._of_instances([i.subsequence == 0 for i in instances])
        every = np.ones(len(seconds))
        self._parts = np.array(
            [every, rebuilt, forward, attention, again, forward * first, first, rebuilt * first, head], dtype=np.float64
        )
        """1 where an instruction is of a part of compute, by part (``KERNELS``)."""

    def size(self) -> int:
        """Return its size in memory, in instructions of a step; one of a template counts as ten."""
        return len(self._lane) + 10 * sum(len(t.instructions) for t in self._program.templates)

    def _of_instances(self, flags: list[bool]) -> Flags:
        found: Flags = np.array(flags, dtype=np.bool_)[self._instance]
        return found

    @cached_property
    def _columns(self) -> FoldedColumns:
        return fold(self._program)

    @cached_property
    def _edges(self) -> Edges:
        return derive_edges(self._columns)

    def kernels(self) -> _Line:
        """Return the seconds of ``KERNELS``."""
        compute_s = self._seconds * (self._lane == Lane.COMPUTE)
        return _Line(self._parts @ compute_s, self._parts @ (compute_s * self._middle))

    def lanes(self) -> tuple[_Line, _Line]:
        """Return the seconds of every lane, and compute's waits: of each of ``WAITS``."""
        once: Floats = np.bincount(self._lane, self._seconds, len(Lane)).astype(np.float64)
        more: Floats = np.bincount(self._lane, self._seconds * self._middle, len(Lane)).astype(np.float64)
        idle, uncut = self._idle
        inside = (idle * self._inside_forward, idle * self._inside_backward)
        waits = np.array([idle, *inside, uncut, idle * self._exchanged])
        return _Line(once, more), _Line(waits.sum(axis=1), waits[:, self._middle].sum(axis=1))

    def halves(self) -> _Line | None:
        """Return for forward and backward the seconds of every lane and of ``OF_HALVES``; None if others lie inside.

        Of a model whose layers are all lowered, one of them counts as the first that may be repeated.
        """
        of_templates = np.array([_half_of(template) for template in self._program.templates])
        half = of_templates[self._program.template_of][self._instance]
        compute = self._lane == Lane.COMPUTE
        (first, turned), (turns, last) = (
            (at[0], at[-1]) for at in (np.flatnonzero(compute & (half == n)) for n in (0, 1))
        )
        if turned > turns or self._decisions.layout.subsequences > 1:
            return None
        half = np.full(len(half), -1)
        half[first : turned + 1], half[turns : last + 1] = 0, 1
        half[~self._inside] = -1
        before, after = _kernels_around(self._lane, self._edges)
        known = self._inside & (before >= 0) & (after < len(half))
        idle, rebuilt = self._idle[0], self._parts[1]
        found = np.zeros((2, 2, len(Lane) + len(OF_HALVES)))
        for number, copies in enumerate(HALVES):
            mine = half == number
            inside = known & mine[np.where(known, before, 0)] & mine[np.where(known, after, 0)]
            inside = np.where(compute, mine, inside)
            for chosen, row in ((inside, found[0]), (inside & self._middle, found[1])):
                seconds = self._seconds * chosen
                row[number, : len(Lane)] = np.bincount(self._lane, seconds, len(Lane))
                row[number, len(Lane) : -1] = (seconds * rebuilt * compute).sum(), (idle * chosen).sum()
            found[0, number, -1] = self._around_s(inside, copies, before, after)
        return _Line(found[0], found[1])

    def _around_s(self, inside: Flags, copies: Lane, before: Ints, after: Ints) -> float:
        """Return the seconds of a half's kernels that certainly come before or after its copies.

        ``inside``: the half's kernels and what lies among them. ``before``, ``after``: see ``_kernels_around``. Layers
        that are left out come between those before the first that repeats, and the others.
        """
        kernels = inside & (self._lane == Lane.COMPUTE)
        ended = np.cumsum(self._seconds * kernels)
        copied = np.flatnonzero(inside & (self._lane == copies))
        done = np.cumsum(self._seconds[copied])
        layer = np.array([-1 if i.layer is None else i.layer for i in self._program.instances])[self._instance]
        early = layer[copied] < self._first_repeated
        if copies is Lane.H2D:  # a backward begins with the last layer
            early = ~early
        parted = int(early.sum())
        if not early[:parted].all() or not 0 < parted < len(copied):
            return 0.0
        head = ended[before[copied]] - (done - self._seconds[copied])
        tail = ended[-1] - (ended - self._seconds * kernels)[after[copied]] - (done[-1] - done)
        return max(0.0, float(head[:parted].max())) + max(0.0, float(tail[parted:].max()))

    @cached_property
    def _idle(self) -> tuple[Floats, Floats]:
        """The waits before each kernel: all, and those that ``Pass.uncut_idle_s`` counts."""
        ulysses = (self._lane == Lane.ULYSSES) & (self._forward > 0)
        idle, uncut = _idle_s(self._columns.lane, self._edges, self._seconds, hidden=ulysses)
        kernels = np.flatnonzero(self._lane == Lane.COMPUTE)
        instances, firsts = np.unique(self._instance[kernels], return_index=True)
        of_layers = [_is_layer_backward(_template(self._program, i)) for i in self._program.instances]
        uncut[kernels[firsts[np.array(of_layers)[instances]]]] = 0.0
        return idle, uncut

    def peaks(self) -> tuple[_Peak, _Peak]:
        """Return the peaks of device and host memory without states."""
        lives = lives_in_arena(self._program, liveness(self._program, self._columns), self._decisions)
        counted = np.array([name != BufferClass.STATE.value for name in lives.class_names])[lives.class_of]
        lowered = lives.bytes * counted
        added = lowered * _of_layers(self._program, self._repeated, self._decisions.model.layer_kinds)
        kept = self._all_kept
        found = []
        for device in (True, False):
            once, more = (living(lives, device=device, sizes=sizes) for sizes in (lowered, added))
            values = distinct(more[kept]).tolist()
            most = {value: int(once[kept & (more == value)].max()) for value in values}
            found.append(_Peak(int(once[self._inside].max(initial=0)), most))
        return found[0], found[1]

    @property
    def _all_kept(self) -> Flags:
        """The instants around the head, when every repetition of a repeated layer holds what it keeps."""
        at, program = np.arange(len(self._lane)), self._program
        templates = [_template(program, i) for i in program.instances]
        heads = [n for n, t in enumerate(templates) if t.block is BlockKind.HEAD and t.kind is TemplateKind.FORWARD]
        turn = int(at[self._instance == heads[-1]][0])  # the last subsequence's head, after which backward begins
        repeated = at[self._inside & self._of_instances([i.layer in self._repeated for i in program.instances])]
        before, after = repeated[repeated < turn], repeated[repeated > turn]
        found: Flags = (at > before.max(initial=-1)) & (at < after.min(initial=len(at))) & self._inside
        return found


def _after(known: dict[_Question, Known], count: int) -> dict[_Question, Known]:
    """Return the entries of a dictionary after its first ``count``."""
    return dict(islice(known.items(), count, None))


def _of_compute(seconds: Floats) -> Pass:
    """Return a pass with only the compute lane's part; ``seconds``: of ``KERNELS``."""
    return Pass(**dict(zip(KERNELS, seconds.tolist(), strict=True)))


def _template(program: Program, instance: Instance) -> Template:
    return program.templates[instance.template]


def _in_every_micro_batch(template: Template) -> bool:
    """Return whether instances belong to a micro-batch's pass; FP8 copies of weights may serve all micro-batches."""
    return not template.kind.of_step and template.kind is not TemplateKind.QUANTIZE


def _rows(templates: Sequence[Template], pricer: Pricer) -> list[list[float]]:
    """Return for the instructions of all templates: lane, seconds, and 1 where one is of a part of the pass, else 0.

    The parts: attention in the forward of layers, recompute, what ``Pass.repeated_s`` counts, the first kernels of
    templates, and what waits for experts' rows (``Pass.exchanged_s``). Templates may share their instructions.
    """
    found: list[list[float]] = [[], [], [], [], [], [], []]
    known = dict[tuple[int, bool, bool], list[list[float]]]()
    for template in templates:
        forward = template.block is BlockKind.LAYER and template.kind is TemplateKind.FORWARD
        counted = _in_every_micro_batch(template)
        key = id(template.instructions), forward, counted
        if key not in known:
            known[key] = _rows_of(template.instructions, pricer, forward=forward, counted=counted)
        for column, more in zip(found, known[key], strict=True):
            column.extend(more)
    return found


def _rows_of(instructions: Sequence[Instruction], pricer: Pricer, *, forward: bool, counted: bool) -> list[list[float]]:
    """Return the rows of one template; ``forward``: of a layer; ``counted``: in every micro-batch."""
    count, operators = len(instructions), [each.op for each in instructions]
    attends, again, begins, exchanged = ([0.0] * count for _ in range(4))
    if forward:
        attends = [float(isinstance(each.work, Attention)) for each in instructions]
        last = max((place for place, op in enumerate(operators) if op in ACTIVATIONS), default=-1)
        again = [float(place <= last and op in REPEATED) for place, op in enumerate(operators)]
    kernels = [place for place, each in enumerate(instructions) if each.lane is Lane.COMPUTE]
    if kernels:
        begins[kernels[0]] = 1.0
    for before, place in pairwise(kernels):
        exchanged[place] = float((operators[before], operators[place]) in EXCHANGED)
    return [
        [float(each.lane) for each in instructions],
        [pricer.seconds(each.work) for each in instructions] if counted else [0.0] * count,
        attends,
        [float(each.phase in NOT_RESIDENT) for each in instructions],
        again,
        begins,
        exchanged,
    ]


def _is_layer_backward(template: Template) -> bool:
    backward = (TemplateKind.BACKWARD, TemplateKind.BACKWARD_RESIDENT)
    return template.block is BlockKind.LAYER and template.kind in backward


def _of_layers(program: Program, chosen: range, kinds: Sequence[int]) -> Ints:
    """Return 1 for each buffer that belongs to one of the ``chosen`` layers: families with one buffer per layer.

    ``kinds``: the number of the kind of every layer.
    """
    having: dict[int | None, list[int]] = {None: list(range(len(kinds)))}
    having |= {kind: [layer for layer, mine in enumerate(kinds) if mine == kind] for kind in set(kinds)}
    places = {kind: [n for n, layer in enumerate(layers) if layer in chosen] for kind, layers in having.items()}
    marked, begin = list[int](), 0
    for family in program.families:
        if family.count >= len(having[family.layer_kind]):
            marked += [begin + place for place in places[family.layer_kind]]
        begin += family.count
    found = np.zeros(sum(f.count for f in program.all_families), dtype=np.int64)
    found[marked] = 1
    return found


def _half(seconds: Floats, copies: Lane) -> Half:
    """Return one half of a pass; ``seconds``: of every lane, and of ``OF_HALVES``."""
    rebuild_s, idle_s, around_s = seconds[len(Lane) :].tolist()
    return Half(
        kept_s=float(seconds[Lane.COMPUTE]) - rebuild_s,
        rebuild_s=rebuild_s,
        idle_s=idle_s,
        copy_s=float(seconds[copies]),
        around_s=around_s,
        collective_s=float(max(seconds[lane] for lane in COLLECTIVE_LANES.values())),
        p2p_s=float(seconds[Lane.P2P]),
    )


def _half_of(template: Template) -> int:
    """Return 0 for the forward of a layer, 1 for a backward, and -1 for everything else."""
    if _is_layer_backward(template):
        return 1
    return 0 if template.block is BlockKind.LAYER and template.kind is TemplateKind.FORWARD else -1


def _kernels_around(lane: Ints, edges: Edges) -> tuple[Ints, Ints]:
    """Return for each instruction beside compute a kernel that certainly ends before it, and one that begins after it.

    They are the last and the first that are known: -1, or the number of instructions, where none is. A lane's order
    counts as well.
    """
    total, compute = len(lane), lane == Lane.COMPUTE
    before, after = np.full(total, -1, dtype=np.int64), np.full(total, total, dtype=np.int64)
    made, needed = compute[edges.producer], compute[edges.consumer]
    np.maximum.at(before, edges.consumer[made], edges.producer[made])
    np.minimum.at(after, edges.producer[needed], edges.consumer[needed])
    for number in distinct(lane[~compute]).tolist():
        mine = np.flatnonzero(lane == number)
        before[mine] = np.maximum.accumulate(before[mine])
        after[mine] = np.minimum.accumulate(after[mine][::-1])[::-1]
    return before, after


def _idle_s(lane: Ints, edges: Edges, seconds: Floats, *, hidden: Flags) -> tuple[Floats, Floats]:
    """Return for each kernel a lower bound of the time that compute waits before it, however far other lanes run ahead.

    The second bound leaves waits for the ``hidden`` instructions out.

    Between kernel A and the next kernel B lies the work of other lanes that needs A and that B needs:

        compute      [A]      [B]
        collective      [C ]           C reads what A wrote, B reads what C wrote
    """
    kernels = np.flatnonzero(lane == Lane.COMPUTE)
    earlier = np.full(len(lane), -1, dtype=np.int64)
    earlier[kernels[1:]] = kernels[:-1]
    from_compute = lane[edges.producer] == Lane.COMPUTE
    after = np.full(len(lane), -1, dtype=np.int64)
    np.maximum.at(after, edges.consumer[from_compute], edges.producer[from_compute])
    # For each instruction beside compute: the last kernel before it (also through its lane), and the seconds since
    # then.
    since = seconds.copy()
    last: dict[int, int] = {}
    for i in np.flatnonzero(lane != Lane.COMPUTE).tolist():
        before = last.get(int(lane[i]), -1)
        if before >= 0 and after[before] >= after[i]:
            after[i] = after[before]
            since[i] += since[before]
        last[int(lane[i])] = i
    producer, consumer = edges.producer[~from_compute], edges.consumer[~from_compute]
    bound = (lane[consumer] == Lane.COMPUTE) & (after[producer] == earlier[consumer]) & (after[producer] >= 0)
    idle, seen = np.zeros(len(lane)), np.zeros(len(lane))
    np.maximum.at(idle, consumer[bound], since[producer[bound]])
    bound &= ~hidden[producer]
    np.maximum.at(seen, consumer[bound], since[producer[bound]])
    return idle, seen
