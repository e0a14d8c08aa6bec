"""One pipeline stage of a plan as it was played: its cost, its memory, its waits.

Without pipeline parallelism there is one stage. Seconds, bytes and waits are those of the whole step: a window that
stands for several repetitions counts as often as it is repeated (``repetition.py``).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import cached_property
from typing import Protocol, TypeVar

import numpy as np
from numpy.typing import NDArray

from memo_sim.contract.cluster import Cluster
from memo_sim.contract.hardware import Hardware
from memo_sim.contract.peaks import BEYOND_CACHES_BYTES
from memo_sim.contract.plan import Decisions, MovedBytes, Stall
from memo_sim.contract.trace import Spans, Trace, Wait
from memo_sim.engine.launches import launch_waits
from memo_sim.engine.memory import Memory, memory_of
from memo_sim.engine.playback import Floats, Playback
from memo_sim.engine.player import Part
from memo_sim.engine.repetition import Repetition, Window
from memo_sim.engine.stalls import Kinds, Late, Peers, after_compute, stalls_of
from memo_sim.program.analysis.columns import NUMBER, Ints, distinct, fold
from memo_sim.program.analysis.edges import Edges, derive_edges
from memo_sim.program.ir.instruction import Instruction, Lane, Template
from memo_sim.program.ir.kinds import BlockKind, Phase, TemplateKind
from memo_sim.program.ir.program import Program
from memo_sim.program.ir.work import (
    Attention,
    BatchedGemm,
    Collective,
    Copy,
    Gemm,
    GroupedGemm,
    LinearLoss,
    PointToPoint,
    Rowwise,
    Work,
)

Amount = TypeVar("Amount", np.float64, np.int64)

OF_A_FORWARD = frozenset({"linear", "qk_norm", "rotary", "gelu", "swiglu", "geglu"})
"""Forward operators that a backward pass contains only when METP recomputes what it never keeps."""

ALLOCATOR = "allocator"
"""Name of a kernel's wait while PyTorch's caching allocator calls the device."""

HOST = "launch"
"""Name of a kernel's wait for its launch by an eager framework's host."""


class Prices(Protocol):
    """The part of a pricer that the engine needs."""

    @property
    def outside_of(self) -> Mapping[Work, frozenset[str]]:
        """The curves that were read outside their measured range, by work; work without any may be missing."""

    def seconds(self, work: Work) -> float:
        """Return how long ``work`` takes when nothing else runs."""


class StageRun:
    """One stage's program on one cluster; ``playbacks`` plays all stages when a playback is first needed."""

    def __init__(
        self,
        program: Program,
        decisions: Decisions,
        hardware: Hardware,
        cluster: Cluster,
        *,
        pricer: Prices,
        playbacks: Callable[[], list[Playback]],
        number: int = 0,
        plays: bool = True,
    ) -> None:
        """``plays``: whether the stage is likely to be played; its edges are then derived while its operands are there.

        Operands are most of a program's bytes, so they are not kept.
        """
        self.program = program
        self.decisions = decisions
        self.hardware = hardware
        columns = fold(program)
        self.columns = columns.of_instructions
        self.memory: Memory = memory_of(program, columns, decisions, hardware, cluster)
        self._edges = derive_edges(columns) if plays and self.memory.fault is None else None
        self.repeat(None)
        self._pricer = pricer
        self._playbacks = playbacks
        self._number = number

    def repeat(self, window: Window | None) -> None:
        """Let ``window`` stand for the micro-batches that are not played."""
        beyond = self.decisions.micro_batches - self.program.micro_batches
        self.repetition = Repetition(self.program, self.columns, window, beyond)

    @property
    def weights(self) -> Ints:
        """How many times the step contains each instruction of the played program; a new array."""
        return self.repetition.weights()

    @property
    def seconds(self) -> Floats:
        """Seconds of every played instruction alone on the machine, without the allocator's time; a new array."""
        return self.columns.by_template(self._seconds)

    @cached_property
    def _seconds(self) -> list[Floats]:
        """Seconds of the instructions of every template."""
        price = self._pricer.seconds
        return [np.array([price(i.work) for i in t.instructions], dtype=np.float64) for t in self.program.templates]

    @cached_property
    def waits_outside(self) -> dict[str, Floats]:
        """Seconds that every played instruction waits for the allocator, and for the host's launch."""
        caching = self.memory.caching
        none = np.broadcast_to(0.0, len(self.columns.lane))  # one number, however many there are
        launches = launch_waits(self.program, self.columns, self.seconds, self.decisions, self.hardware)
        return {ALLOCATOR: none if caching is None else caching.stall_s, HOST: launches}

    @property
    def edges(self) -> Edges:
        """The edges between the stage's lanes."""
        if self._edges is None:
            self._edges = derive_edges(fold(self.program))
        return self._edges

    @property
    def part(self) -> Part:
        """The stage as the player's input."""
        return Part(self.columns, self.edges, self._durations, self.memory.program_id)

    def _durations(self) -> Floats:
        """Return the seconds of every played instruction, with what it waits for outside its lanes."""
        seconds = self.seconds
        for waits in self.waits_outside.values():
            seconds = seconds + waits if waits.any() else seconds
        return seconds

    @property
    def playback(self) -> Playback:
        """The spans as played; for a plan that does not fit, as if it did."""
        return self._playbacks()[self._number]

    @property
    def peak_id(self) -> str:
        """The instruction at which device memory peaks."""
        return self.memory.program_id(self.memory.device.instruction)

    @property
    def compute_s(self) -> float:
        """Seconds of the step's compute, each kernel alone."""
        return self._seconds_of(lambda i: i.lane == Lane.COMPUTE)

    @property
    def flops(self) -> float:
        """FLOPs that the whole step computes, recompute included."""
        products = Gemm | BatchedGemm | GroupedGemm | LinearLoss | Attention
        each = self.per_instruction(lambda i: i.work.flops if isinstance(i.work, products) else 0)
        return float(np.sum(self._counted(each)))

    @property
    def memory_bytes(self) -> float:
        """Bytes that the step's row-wise kernels move, of those whose data no cache holds."""
        size = self.per_instruction(lambda i: i.work.moved_bytes if isinstance(i.work, Rowwise) else 0)
        return float(np.sum(self._counted(np.where(size >= BEYOND_CACHES_BYTES, size, 0.0))))

    @property
    def outside_s(self) -> dict[str, float]:
        """Seconds of the step's instructions whose curve was read outside its range, each alone, by curve."""
        outside_of, none = self._pricer.outside_of, frozenset[str]()
        names = none.union(*outside_of.values())
        curves = [[outside_of.get(i.work, none) for i in t.instructions] for t in self.program.templates]
        return {name: self._sum([[name in each for each in of] for of in curves]) for name in sorted(names)}

    @property
    def compute_s_without_recompute(self) -> float:
        """Seconds of the step's compute without recompute; a lower bound for every number of swapped tokens."""
        kept_s = self._seconds_of(lambda i: i.lane == Lane.COMPUTE and i.phase is not Phase.RECOMPUTE)
        return kept_s - self.own_rebuild_s

    @property
    def own_rebuild_s(self) -> float:
        """Seconds of the step's compute in which METP's backward recomputes Q, K, V and the MLP's activations."""
        return self._seconds_of(lambda i: i.phase is Phase.BACKWARD and i.op in OF_A_FORWARD)

    def _seconds_of(self, chosen: Callable[[Instruction], bool]) -> float:
        """Return the seconds of the step's chosen instructions, each alone."""
        return self._sum([[chosen(i) for i in template.instructions] for template in self.program.templates])

    def _sum(self, chosen: list[list[bool]]) -> float:
        """Return the seconds of the step's instructions that are ``chosen`` by template, each alone."""
        rows = [s * np.array(each, dtype=np.float64) for s, each in zip(self._seconds, chosen, strict=True)]
        return float(np.sum(self._counted(self.columns.by_template(rows))))

    def _counted(self, values: NDArray[Amount]) -> NDArray[Amount]:
        """Multiply, in place, a value of every played instruction by how often the step has it; return the array."""
        if self.repetition.times:
            values *= self.weights
        return values

    @property
    def layer_forward_s(self) -> float:
        """Seconds of a middle layer's forward on the compute lane, with waits for exchanges and collectives.

        Where layers differ, the mean of the middle layers of all kinds, each as often as the stage has it.
        Waits for copies are left out, because copies can hide under this time (the paper's linear program).
        """
        forwards = [
            n
            for n, i in enumerate(self.program.instances)
            if i.micro_batch == 0 and _is_layer_forward(self.program.templates[i.template])
        ]
        by_kind: dict[int | None, list[int]] = {}
        for n in forwards:
            by_kind.setdefault(self.program.templates[self.program.instances[n].template].layer_kind, []).append(n)
        each = [(len(numbers), self._forward_s(numbers[len(numbers) // 2])) for numbers in by_kind.values()]
        return each[0][1] if len(each) == 1 else sum(count * seconds for count, seconds in each) / len(forwards)

    def _forward_s(self, instance: int) -> float:
        """Return the seconds of one forward, as ``layer_forward_s`` counts them."""
        mine = (self.columns.instance == instance) & (self.columns.lane == Lane.COMPUTE)
        chosen = np.flatnonzero(mine)
        waits = self.playback.waits
        copies = np.isin(self.columns.lane[waits.waits_for], (Lane.D2H, Lane.H2D))
        stalled = mine[waits.instruction] & copies & (waits.instruction != chosen[0])
        held = self.playback.end_s[chosen[-1]] - self.playback.start_s[chosen[0]]
        return float(held - waits.seconds[stalled].sum())

    @property
    def reserved_bytes(self) -> int | None:
        """Peak bytes that the caching allocator reserves; None when it runs out of memory or memory is planned."""
        caching = self.memory.caching
        return None if caching is None or caching.replay.out_of_memory else caching.replay.reserved_peak_bytes

    @property
    def allocation_retries(self) -> int:
        """Number of allocation retries in the whole step, with a warm cache."""
        caching = self.memory.caching
        return 0 if caching is None else int(np.sum(caching.retried_allocation * self.weights))

    @property
    def moved_bytes(self) -> MovedBytes:
        """Bytes that one rank copies in each direction in the whole step."""
        return self.moved_by(lambda _: True)

    def moved_by(self, chosen: Callable[[Template], bool]) -> MovedBytes:
        """Return the bytes that the chosen templates copy."""
        rows = [
            np.array([_copied_bytes(i) if chosen(t) else 0 for i in t.instructions], dtype=np.int64)
            for t in self.program.templates
        ]
        moved = self._counted(self.columns.by_template(rows))
        down, up = (int(moved[self.columns.lane == lane].sum()) for lane in (Lane.D2H, Lane.H2D))
        return MovedBytes(d2h=down, h2d=up)

    @property
    def sent_bytes(self) -> int:
        """Bytes that one rank sends to other stages in the whole step."""
        size = self.per_instruction(lambda i: i.work.bytes if isinstance(i.work, PointToPoint) else 0)
        return int((size.astype(np.int64) * self.weights)[self.columns.lane == Lane.SEND].sum())

    @property
    def collective_bytes(self) -> dict[str, int]:
        """Bytes of the whole tensors of the step's collectives, by operator."""
        found: dict[str, int] = {}
        for (_, instruction), times in zip(self.program.walk(), self.weights.tolist(), strict=True):
            if isinstance(instruction.work, Collective):
                found[instruction.op] = found.get(instruction.op, 0) + instruction.work.bytes * times
        return found

    @property
    def lanes_s(self) -> dict[str, float]:
        """Busy seconds of the whole step by lane; waits inside an instruction's span count as stalls instead."""
        lanes = np.bincount(self.columns.lane, weights=self._busy_s, minlength=len(Lane))
        return {Lane(lane).label: float(lanes[lane]) for lane in self._lanes}

    @property
    def kinds_s(self) -> dict[str, dict[str, float]]:
        """Busy seconds of the whole step by lane and kind of instruction; those of a lane add up to ``lanes_s``."""
        kinds, found = self._kinds, dict[str, dict[str, float]]()
        busy_s = self._busy_s
        for lane in self._lanes:
            mine = self.columns.lane == lane
            seconds = np.bincount(kinds.of[mine], weights=busy_s[mine], minlength=len(kinds.names))
            found[Lane(lane).label] = {kinds.names[n]: float(seconds[n]) for n in distinct(kinds.of[mine])}
        return found

    @property
    def _busy_s(self) -> Floats:
        """Seconds of every instruction's span in the whole step, without waits inside of it."""
        busy_s = self.playback.end_s - self.playback.start_s
        busy_s -= sum(waits for waits in self.waits_outside.values() if waits.any())
        return self._counted(np.maximum(busy_s, 0.0, out=busy_s))

    @property
    def _lanes(self) -> list[int]:
        """The lanes that the program uses."""
        return np.flatnonzero(np.bincount(self.columns.lane)).tolist()

    @property
    def ended_s(self) -> float:
        """End of the stage's last instruction in the whole step, in seconds."""
        return self.playback.span_s + self.repetition.added_s(self.playback)

    def stalls(self, met: Peers) -> list[Stall]:
        """Return the waits of the whole step, summed by lane and by what was waited for."""
        waits = self.playback.waits
        wait_s, weights = self.repetition.wait_s(self.playback), self.weights[waits.instruction]
        late = Late(HOST, self.waits_outside[HOST])
        return stalls_of(self.playback, met, self._kinds, wait_s, weights, late=late) + self._stalls_outside()

    def after_compute(self, met: Peers) -> list[Stall]:
        """Return what the stage still plays after its last kernel has ended, as waits of compute."""
        parts = after_compute(self.playback, met, self._kinds)
        return [Stall(lane=Lane.COMPUTE.label, waits_for=name, seconds=s, count=1) for name, s in parts.items()]

    @property
    def _kinds(self) -> Kinds:
        names = sorted({_kind(i) for t in self.program.templates for i in t.instructions})
        number = {name: n for n, name in enumerate(names)}
        rows = [np.array([number[_kind(i)] for i in t.instructions], dtype=NUMBER) for t in self.program.templates]
        return Kinds(names, self.columns.by_template(rows))

    def _stalls_outside(self) -> list[Stall]:
        """Return the whole step's waits for the allocator and for the host's launches, by lane."""
        found = []
        for name, waits in self.waits_outside.items():
            for lane in distinct(self.columns.lane[waits > 0]):
                times = self.weights * (self.columns.lane == lane)
                seconds, count = float(np.sum(waits * times)), int(np.sum((waits > 0) * times))
                found.append(Stall(lane=Lane(lane).label, waits_for=name, seconds=seconds, count=count))
        return found

    def trace(self, *, program_sha256: str, rank: int, step_s: float) -> Trace:
        """Return the trace of everything that was played; ``rank`` is the first rank of the stage."""
        playback, ids = self.playback, self.program.ids()
        waits = playback.waits
        columns = (waits.instruction, waits.waits_for, waits.start_s, waits.seconds)
        return Trace(
            origin="predicted",
            program_sha256=program_sha256,
            rank=rank,
            world_size=self.decisions.layout.devices,
            step_s=step_s,
            spans=Spans(
                ids=ids,
                ops=[i.op for _, i in self.program.walk()],
                lanes=[Lane(lane).label for lane in self.columns.lane.tolist()],
                start_s=playback.start_s.tolist(),
                end_s=playback.end_s.tolist(),
            ),
            device_memory=self.memory.device_over_time(playback),
            host_memory=self.memory.host_over_time(playback),
            waits=[
                Wait(instruction=ids[i], waits_for=ids[p], start_s=start, seconds=seconds)
                for i, p, start, seconds in zip(*(column.tolist() for column in columns), strict=True)
            ],
            micro_batches_played=self.program.micro_batches,
            micro_batches=self.decisions.micro_batches,
        )

    def per_instruction(self, value: Callable[[Instruction], float]) -> Floats:
        """Return a value for each played instruction; ``value`` is called once per instruction of a template."""
        rows = [np.array([value(i) for i in t.instructions], dtype=np.float64) for t in self.program.templates]
        return self.columns.by_template(rows)


def _kind(instruction: Instruction) -> str:
    """Return the name of a wait for an instruction; operators on the host have the same names as kernels."""
    return f"{instruction.op} on the host" if instruction.lane is Lane.HOST else instruction.op


def _copied_bytes(instruction: Instruction) -> int:
    return instruction.work.bytes if isinstance(instruction.work, Copy) else 0


def _is_layer_forward(template: Template) -> bool:
    return template.block is BlockKind.LAYER and template.kind is TemplateKind.FORWARD
