"""Work of each lane, unavoidable waits and bytes of one micro-batch on one rank, for any number of layers.

Middle layers are identical. A few layers are lowered, and two in the middle stand for all that are left out. There are
two of them, because layers alternate between two rounding buffers. Where layers differ, a window of their longest
repeated stretch stands for the others (``program/layout/repeated_layers.py``). Where layers are recomputed differently,
or no stretch repeats, all are lowered.

      lowered   l0 l1 l2 l3 l4 l5        eighty layers   l0 l1 (l2 l3) x 38 l78 l79
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from functools import cached_property

import msgspec
import numpy as np
from numpy.typing import NDArray

from memo_sim.contract.cluster import Cluster
from memo_sim.contract.hardware import Hardware
from memo_sim.contract.knobs import MOST_ZERO
from memo_sim.contract.layer_shape import LayerShape
from memo_sim.contract.plan import Decisions
from memo_sim.costs.pricing import Pricer
from memo_sim.planning.pricers import Pricers
from memo_sim.planning.recent import Recent
from memo_sim.planning.short_rings import SHORT, steps_repeat, with_ring
from memo_sim.program.analysis.columns import Flags, FoldedColumns, Ints, fold
from memo_sim.program.analysis.edges import derive_edges
from memo_sim.program.analysis.liveness import Liveness, live_bytes, liveness
from memo_sim.program.arena.library_workspaces import lives_in_arena
from memo_sim.program.ir.instruction import COLLECTIVE_LANES, BufferClass, Instance, Instruction, Lane, Template
from memo_sim.program.ir.kinds import BlockKind, Phase, TemplateKind
from memo_sim.program.ir.program import Program
from memo_sim.program.ir.work import Attention
from memo_sim.program.layout.parameters import without_masters
from memo_sim.program.layout.rank_order import least_dp
from memo_sim.program.layout.recomputed_layers import ALL
from memo_sim.program.layout.repeated_layers import RepeatedLayers, repeated_layers
from memo_sim.program.lower import lower

ENDS = 2
"""Layers at each end of the model that no window stands for: two that are swapped, and the last two, which are not."""

ACTIVATIONS = frozenset({"gelu", "swiglu", "geglu", "experts.swiglu", "experts.clamped", "shared_gate.swiglu"})
"""Operators of an MLP's activation."""
REPEATED = ACTIVATIONS | {"linear", "experts.linear", "layer_norm", "rms_norm", "qk_norm", "rotary", "residual_add"}
"""Operators of a layer's first half whose results neither full nor row-wise recompute keeps."""

MOST_LOWERED = 500_000
"""Largest size of the lowered layers that are kept, in instructions of their steps and templates; about 200 MB."""

Floats = NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class Pass:
    """Seconds of each lane alone, and peak bytes without parameters, gradients and states."""

    compute_s: float
    rebuild_s: float
    """Part of ``compute_s`` that recomputes activations."""
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
    idle_s: float
    """Waits of compute between two kernels, because the second needs what another lane makes of the first's result."""
    forward_idle_s: float
    backward_idle_s: float
    """Parts of ``idle_s`` in the layers' forward and backward, without waits before a layer's first kernel."""
    uncut_idle_s: float
    """Part of ``idle_s`` in which no other kernel of the pass runs, even if row blocks divide the forward.

    It excludes Ulysses' exchanges in forward, which can run beside another row block. It also excludes what precedes
    the first kernel of a layer's backward: recompute stands there, and may include kernels that this pass has later."""
    out_s: float
    in_s: float
    """Seconds of the copies to the host, and of those from there."""
    collective_s: float
    p2p_s: float
    device_bytes: float
    host_bytes: float

    @property
    def copy_s(self) -> float:
        """Seconds of the copy lane that has more work."""
        return max(self.out_s, self.in_s)

    @property
    def backward_s(self) -> float:
        """Part of ``compute_s`` in the layers' backward, with embedding and recompute."""
        return self.compute_s - self.forward_s - self.head_s


class Passes:
    """Passes of plans on one cluster; plans that differ only in what a pass does not contain share a lowering.

    dp, ZeRO below 3, pipeline stages and the dtypes of masters and moments change nothing in a pass.
    """

    def __init__(self, hardware: Hardware, cluster: Cluster) -> None:
        self._pricers = Pricers(hardware, cluster)
        self._lowered: Recent[_Question, _FewLayers] = Recent(MOST_LOWERED, _FewLayers.size)
        self._numbers: dict[_Question, int] = {}
        self._known: dict[tuple[int, int], Pass] = {}
        self._waited: dict[tuple[int, int], Pass] = {}
        self._computed: dict[tuple[int, int], Pass] = {}

    def of(self, decisions: Decisions, layers: Sequence[LayerShape]) -> Pass:
        """Return the pass of one micro-batch through ``layers``.

        Raises:
            Infeasible: when the plan cannot be lowered, or the profile has not measured its work.
        """
        times, question = self._few(decisions, layers)
        key = self._numbers.setdefault(question, len(self._numbers)), times
        if key not in self._known:
            self._known[key] = self._lower(question).repeated(times)
        return self._known[key]

    def waited(self, decisions: Decisions, layers: Sequence[LayerShape]) -> Pass:
        """Return that pass without bytes, which are 0. Of a long ring, only the compute lane's part is known.

        Raises:
            Infeasible: see ``of``.
        """
        times, question = self._few(decisions, layers)
        key = self._numbers.setdefault(question, len(self._numbers)), times
        if steps_repeat(question[0]) and key not in self._known:
            return self.computed(decisions, layers)
        if key not in self._waited:
            self._waited[key] = self._known.get(key) or self._lower(question).waited(times)
        return self._waited[key]

    def computed(self, decisions: Decisions, layers: Sequence[LayerShape]) -> Pass:
        """Return only the compute lane's part of that pass, which is faster to compute; the other fields are 0.

        A long ring is not lowered where two short ones tell its kernels (``short_rings.py``). Parameters that are
        gathered change no kernel.

        Raises:
            Infeasible: see ``of``.
        """
        times, question = self._few(decisions, layers, gathered=False)
        key = self._numbers.setdefault(question, len(self._numbers)), times
        if key not in self._computed:
            self._computed[key] = self._compute(question, times)
        return self._computed[key]

    def _compute(self, question: _Question, times: int) -> Pass:
        alone, middle = question
        if not steps_repeat(alone):
            return self._lower(question).computed(times)
        few, many = (self._lower((with_ring(alone, cp), middle)).computed(times) for cp in SHORT)
        steps = (alone.layout.cp - SHORT[0]) / (SHORT[1] - SHORT[0])
        pairs = {f.name: (getattr(few, f.name), getattr(many, f.name)) for f in fields(Pass)}
        return Pass(**{name: first + steps * (second - first) for name, (first, second) in pairs.items()})

    def _few(
        self, decisions: Decisions, layers: Sequence[LayerShape], *, gathered: bool = True
    ) -> tuple[int, _Question]:
        """Return how often the window of the lowered layers is left out, and what is lowered.

        ``gathered``: whether with what ZeRO 3 gathers, where that is known (``gathers``).
        """
        few = repeated_layers(layers, windows=1, beside=2 * ENDS)
        if decisions.recompute_layers != ALL or not few.times:
            few = RepeatedLayers(tuple(layers), 0, len(layers), few.window, 0)
        least = least_dp(decisions.layout)
        if gathered and gathers(decisions):
            return few.times, self._of_gathered(decisions, few)
        alone = msgspec.structs.replace(
            decisions,
            model=decisions.model.of_layers(few.shapes),
            layout=msgspec.structs.replace(
                decisions.layout,
                dp=least,
                pp=1,
                pp_layers=(),
                zero=0,
                zero_ranks=0,
                schedule="1f1b",
                virtual_stages=1,
                multiplexed=False,
            ),
            global_batch=least * decisions.micro_batch,
            # Pure bf16 states are the ones whose gradients are bf16, which the products of a pass write.
            states="pure-bf16" if without_masters(decisions) else "fp32",
            zero_params="auto",
            loss_metrics=0,
            overlap="none",
            memory_policy="eager" if decisions.memory_policy == "eager" else "planned",
            host_allocator="exact",
        )
        return few.times, _question(alone, few)

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
        return _question(alone, few)

    def _lower(self, question: _Question) -> _FewLayers:
        def lowered() -> _FewLayers:
            alone, middle = question
            return _FewLayers(alone, self._pricers.of(alone), middle)

        return self._lowered.of(question, lowered)


_Question = tuple[Decisions, range]
"""The plan of a few layers, and those of them that can be repeated."""


def _question(alone: Decisions, few: RepeatedLayers) -> _Question:
    first = max(ENDS, few.first)
    return alone, range(first, first + few.window)


def gathers(decisions: Decisions) -> bool:
    """Return whether bounds know what ZeRO 3 gathers for every micro-batch: in one stage, on planned memory."""
    layout = decisions.layout
    divided = layout.zero >= MOST_ZERO and layout.shards > 1 and layout.pp == 1 and layout.subsequences == 1
    return divided and decisions.memory_policy == "planned" and decisions.recompute_layers == ALL


class _FewLayers:
    """One micro-batch of a few layers; the layers ``middle`` can be repeated."""

    def __init__(self, decisions: Decisions, pricer: Pricer, middle: range) -> None:
        (program,) = lower(decisions)
        self._decisions, self._program = decisions, program
        lengths = [len(program.templates[i.template].instructions) for i in program.instances]
        self._instance = np.repeat(np.arange(len(lengths)), lengths)
        rows = [_row(template, each, pricer) for template in program.templates for each in template.instructions]
        lane, seconds, forward, head, attention, rebuilt, backward, begins = np.array(rows, dtype=np.float64).T
        repeated = np.array([flag for template in program.templates for flag in _are_repeated(template)])
        starts = np.cumsum([0, *(len(template.instructions) for template in program.templates)])
        at = np.concatenate([np.arange(starts[i.template], starts[i.template + 1]) for i in program.instances])
        self._lane = lane.astype(np.int64)[at]
        self._inside = self._of_instances([_in_every_micro_batch(_template(program, i)) for i in program.instances])
        self._middle = self._inside & self._of_instances([i.layer in middle for i in program.instances])
        self._middle_buffers = _of_layers(program, middle, decisions.model.layer_kinds)
        self._seconds = seconds[at] * self._inside
        self._forward, self._head = forward[at], head[at]
        self._first = self._of_instances([i.subsequence == 0 for i in program.instances])
        self._attention, self._rebuilt, self._repeated = attention[at], rebuilt[at], repeated[at]
        self._inside_forward, self._inside_backward = (
            (forward - forward * begins)[at],
            (backward - backward * begins)[at],
        )

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
    def _lives(self) -> Liveness:
        lives = liveness(self._program, self._columns)
        return lives_in_arena(self._program, lives, self._decisions)

    @cached_property
    def _idle_s(self) -> tuple[Floats, Floats]:
        """The waits before each kernel: all, and those that ``Pass.uncut_idle_s`` counts."""
        ulysses = (self._lane == Lane.ULYSSES) & (self._forward > 0)
        idle, uncut = _idle_s(self._columns, self._seconds, hidden=ulysses)
        kernels = np.flatnonzero(self._lane == Lane.COMPUTE)
        instances, firsts = np.unique(self._instance[kernels], return_index=True)
        of_layers = [_is_layer_backward(_template(self._program, i)) for i in self._program.instances]
        uncut[kernels[firsts[np.array(of_layers)[instances]]]] = 0.0
        return idle, uncut

    @cached_property
    def _all_kept(self) -> Flags:
        """The instants around the head, when every repetition of a middle layer holds what it keeps."""
        at, program = np.arange(len(self._lane)), self._program
        templates = [_template(program, i) for i in program.instances]
        heads = [n for n, t in enumerate(templates) if t.block is BlockKind.HEAD and t.kind is TemplateKind.FORWARD]
        turn = int(at[self._instance == heads[-1]][0])  # the last subsequence's head, after which backward begins
        middle = at[self._middle]
        before, after = middle[middle < turn], middle[middle > turn]
        found: Flags = (at > before.max(initial=-1)) & (at < after.min(initial=len(at))) & self._inside
        return found

    def computed(self, times: int) -> Pass:
        """Return the compute lane's pass with the middle layers repeated ``times`` more times; zero for other lanes."""
        compute_s = self._seconds * (1.0 + times * self._middle) * (self._lane == Lane.COMPUTE)
        return Pass(
            compute_s=float(compute_s.sum()),
            rebuild_s=float(compute_s @ self._rebuilt),
            forward_s=float(compute_s @ self._forward),
            attention_s=float(compute_s @ self._attention),
            repeated_s=float(compute_s @ self._repeated),
            first_forward_s=float(compute_s @ (self._forward * self._first)),
            first_compute_s=float(compute_s @ self._first),
            first_rebuild_s=float(compute_s @ (self._rebuilt * self._first)),
            head_s=float(compute_s @ self._head),
            idle_s=0.0,
            forward_idle_s=0.0,
            backward_idle_s=0.0,
            uncut_idle_s=0.0,
            out_s=0.0,
            in_s=0.0,
            collective_s=0.0,
            p2p_s=0.0,
            device_bytes=0,
            host_bytes=0,
        )

    def waited(self, times: int) -> Pass:
        """Return the pass with the middle layers repeated ``times`` more times; its bytes are 0."""
        weights = 1.0 + times * self._middle
        lanes = np.bincount(self._lane, weights=self._seconds * weights, minlength=len(Lane))
        idle_s, uncut_idle_s = (each * weights for each in self._idle_s)
        return replace(
            self.computed(times),
            idle_s=float(idle_s.sum()),
            uncut_idle_s=float(uncut_idle_s.sum()),
            forward_idle_s=float(idle_s @ self._inside_forward),
            backward_idle_s=float(idle_s @ self._inside_backward),
            out_s=float(lanes[Lane.D2H]),
            in_s=float(lanes[Lane.H2D]),
            collective_s=float(max(lanes[lane] for lane in COLLECTIVE_LANES.values())),
            p2p_s=float(lanes[Lane.P2P]),
        )

    def repeated(self, times: int) -> Pass:
        """Return the pass with the middle layers repeated ``times`` more times, and its bytes."""
        sizes = self._lives.bytes * (1 + times * self._middle_buffers)
        return replace(
            self.waited(times),
            device_bytes=self._fullest(sizes, device=True),
            host_bytes=self._fullest(sizes, device=False),
        )

    def _fullest(self, sizes: Ints, *, device: bool) -> int:
        """Return the peak bytes without states; ``sizes`` includes the repeated buffers."""
        once = _live(self._lives, self._lives.bytes, device=device)[self._inside].max(initial=0)
        return int(max(once, _live(self._lives, sizes, device=device)[self._all_kept].max(initial=0)))


def _template(program: Program, instance: Instance) -> Template:
    return program.templates[instance.template]


def _in_every_micro_batch(template: Template) -> bool:
    """Return whether instances belong to a micro-batch's pass; FP8 copies of weights may serve all micro-batches."""
    return not template.kind.of_step and template.kind is not TemplateKind.QUANTIZE


def _row(template: Template, instruction: Instruction, pricer: Pricer) -> tuple[float, ...]:
    """Return an instruction's lane and seconds, and 1 where it is of a part of the pass, else 0.

    The parts: the forward of layers, the head, attention in that forward, recompute, the backward of layers, and the
    first kernels of templates.
    """
    of_layers = template.block is BlockKind.LAYER
    forward = of_layers and template.kind is TemplateKind.FORWARD
    first = next((each for each in template.instructions if each.lane is Lane.COMPUTE), None)
    return (
        instruction.lane,
        pricer.seconds(instruction.work),
        forward,
        template.block is BlockKind.HEAD,
        forward and isinstance(instruction.work, Attention),
        instruction.phase is Phase.RECOMPUTE,
        of_layers and template.kind is TemplateKind.BACKWARD,
        instruction is first,
    )


def _is_layer_backward(template: Template) -> bool:
    backward = (TemplateKind.BACKWARD, TemplateKind.BACKWARD_RESIDENT)
    return template.block is BlockKind.LAYER and template.kind in backward


def _are_repeated(template: Template) -> list[bool]:
    """Return for each instruction whether ``Pass.repeated_s`` counts it."""
    operators = [instruction.op for instruction in template.instructions]
    if template.block is not BlockKind.LAYER or template.kind is not TemplateKind.FORWARD:
        return [False] * len(operators)
    last = max((place for place, op in enumerate(operators) if op in ACTIVATIONS), default=-1)
    return [place <= last and op in REPEATED for place, op in enumerate(operators)]


def _of_layers(program: Program, chosen: range, kinds: Sequence[int]) -> Ints:
    """Return 1 for each buffer that belongs to one of the ``chosen`` layers: families with one buffer per layer.

    ``kinds``: the number of the kind of every layer.
    """
    marked = []
    for family in program.families:
        having = [n for n, kind in enumerate(kinds) if family.layer_kind in (None, kind)]
        mine = np.zeros(family.count, dtype=np.bool_)
        if family.count >= len(having):
            mine[[place for place, layer in enumerate(having) if layer in chosen]] = True
        marked.append(mine)
    own = sum(f.count for f in program.all_families) - sum(f.count for f in program.families)
    return np.concatenate([*marked, np.zeros(own, dtype=np.bool_)]).astype(np.int64)


def _live(lives: Liveness, sizes: Ints, *, device: bool) -> Ints:
    """Return the live bytes at every instruction, without states."""
    curves = live_bytes(lives, device=device, sizes=sizes)
    counted = [curve for name, curve in curves.items() if name != BufferClass.STATE.value]
    total: Ints = np.sum([np.zeros(lives.instructions, dtype=np.int64), *counted], axis=0)
    return total


def _idle_s(columns: FoldedColumns, seconds: Floats, *, hidden: Flags) -> tuple[Floats, Floats]:
    """Return for each kernel a lower bound of the time that compute waits before it, however far other lanes run ahead.

    The second bound leaves waits for the ``hidden`` instructions out.

    Between kernel A and the next kernel B lies the work of other lanes that needs A and that B needs:

        compute      [A]      [B]
        collective      [C ]           C reads what A wrote, B reads what C wrote
    """
    edges, lane = derive_edges(columns), columns.lane
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
