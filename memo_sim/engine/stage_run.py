"""One role of a plan as it was played: what its program costs, what it needs, what it waits for.

Without pipeline stages there is one role. A step's seconds, bytes and waits are those of the whole step: a window that
was played for many counts as often as it is repeated (``repetition.py``).
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cached_property
from typing import Protocol

import numpy as np

from memo_sim.contract.cluster import Cluster
from memo_sim.contract.hardware import Hardware
from memo_sim.contract.plan import Decisions, MovedBytes, Stall
from memo_sim.contract.trace import Spans, Trace, Wait
from memo_sim.engine.launches import launch_waits
from memo_sim.engine.memory import Memory, memory_of
from memo_sim.engine.playback import Floats, Playback
from memo_sim.engine.player import Part
from memo_sim.engine.repetition import Repetition, Window
from memo_sim.engine.stalls import Kinds, Late, Peers, after_compute, stalls_of
from memo_sim.program.analysis.columns import expand
from memo_sim.program.analysis.edges import Edges, derive_edges
from memo_sim.program.ir.instruction import Instruction, Lane
from memo_sim.program.ir.program import Program
from memo_sim.program.ir.work import Collective, Copy, PointToPoint, Work

RECOMPUTE_PHASE = "rec/"

BACKWARD_PHASE = "bwd/"
OF_A_FORWARD = frozenset({"linear", "qk_norm", "rotary", "gelu", "swiglu"})
"""Operators that a backward pass has only where its layout builds again what it never keeps: METP."""

ALLOCATOR = "allocator"
"""What a kernel waits for when PyTorch's caching allocator calls the device."""

HOST = "launch"
"""What a kernel waits for when an eager framework's host has not launched it yet."""


class Prices(Protocol):
    """What the engine needs of a pricer: seconds alone on the lane, and which curves were asked beyond their range."""

    outside: set[str]

    def seconds(self, work: Work) -> float:
        """Return how long ``work`` takes when nothing else runs."""


class StageRun:
    """One role's program on one cluster; ``playbacks`` plays all roles when this one's playback is asked for."""

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
    ) -> None:
        self.program = program
        self.decisions = decisions
        self.hardware = hardware
        self.columns = expand(program)
        self.memory: Memory = memory_of(program, self.columns, decisions, hardware, cluster)
        self.repeat(None)
        self._pricer = pricer
        self._playbacks = playbacks
        self._number = number

    def repeat(self, window: Window | None) -> None:
        """Let ``window`` stand for the micro-batches that are not played."""
        beyond = self.decisions.micro_batches - self.program.micro_batches
        self.repetition = Repetition(self.program, self.columns, window, beyond)
        self.weights = self.repetition.weights()

    @cached_property
    def seconds(self) -> Floats:
        """Seconds of every played instruction alone on the machine, the allocator's work not counted."""
        return self.per_instruction(lambda i: self._pricer.seconds(i.work))

    @cached_property
    def waits_outside(self) -> dict[str, Floats]:
        """Seconds that every played instruction waits for what is no lane: the allocator, the host that launches it."""
        caching = self.memory.caching
        none = np.zeros(len(self.seconds))
        launches = launch_waits(self.program, self.columns, self.seconds, self.decisions, self.hardware)
        return {ALLOCATOR: none if caching is None else caching.stall_s, HOST: launches}

    @cached_property
    def edges(self) -> Edges:
        """The orderings between the role's lanes."""
        return derive_edges(self.columns)

    @property
    def part(self) -> Part:
        """What the player needs of the role."""
        seconds = self.seconds + self.waits_outside[ALLOCATOR] + self.waits_outside[HOST]
        return Part(self.columns, self.edges, seconds, self.memory.program_id)

    @property
    def playback(self) -> Playback:
        """The spans as played (of a plan that does not fit: as if it did)."""
        return self._playbacks()[self._number]

    @property
    def peak_id(self) -> str:
        """The instruction at which device memory is fullest."""
        return self.memory.program_id(self.memory.device.instruction)

    @property
    def compute_s(self) -> float:
        """Seconds of the step's compute, each kernel alone."""
        compute = self.per_instruction(lambda i: float(i.lane == Lane.COMPUTE))
        return float(np.sum(self.seconds * self.weights * compute))

    @property
    def compute_s_without_recompute(self) -> float:
        """Seconds of the step's compute, were nothing rebuilt: a bound that no share of swapped tokens can beat."""
        kept = self.per_instruction(lambda i: float(i.lane == Lane.COMPUTE and not i.name.startswith(RECOMPUTE_PHASE)))
        return float(np.sum(self.seconds * self.weights * kept)) - self.own_rebuild_s

    @property
    def own_rebuild_s(self) -> float:
        """Seconds of the step's compute in which METP's backward makes Q, K, V and the MLP's activations again."""
        again = self.per_instruction(lambda i: float(i.name.startswith(BACKWARD_PHASE) and i.op in OF_A_FORWARD))
        return float(np.sum(self.seconds * self.weights * again))

    @property
    def layer_forward_s(self) -> float:
        """Seconds a middle layer's forward holds the compute lane, waits for exchanges and collectives included.

        Waits for copies are left out: this is the time that copies can hide under (the paper's linear program).
        """
        forwards = [
            n
            for n, i in enumerate(self.program.instances)
            if i.micro_batch == 0 and self.program.templates[i.template].name.startswith("layer.fwd")
        ]
        mine = (self.columns.instance == forwards[len(forwards) // 2]) & (self.columns.lane == Lane.COMPUTE)
        chosen = np.flatnonzero(mine)
        waits = self.playback.waits
        copies = np.isin(self.columns.lane[waits.waits_for], (Lane.D2H, Lane.H2D))
        stalled = mine[waits.instruction] & copies & (waits.instruction != chosen[0])
        held = self.playback.end_s[chosen[-1]] - self.playback.start_s[chosen[0]]
        return float(held - waits.seconds[stalled].sum())

    @property
    def reserved_bytes(self) -> int | None:
        """Most that the caching allocator reserves; None where it runs out, or memory is planned."""
        caching = self.memory.caching
        return None if caching is None or caching.replay.out_of_memory else caching.replay.reserved_peak_bytes

    @property
    def allocation_retries(self) -> int:
        """How often the whole step, the allocator's cache warm, reorganises memory."""
        caching = self.memory.caching
        return 0 if caching is None else int(np.sum(caching.retried_allocation * self.weights))

    @property
    def moved_bytes(self) -> MovedBytes:
        """What one rank copies over each lane in the whole step."""
        return self.moved_by("")

    def moved_by(self, templates: str) -> MovedBytes:
        """Return what of that is copied by templates whose names start with ``templates``."""
        size = self.per_instruction(lambda i: i.work.bytes if isinstance(i.work, Copy) else 0)
        chosen = np.array([t.name.startswith(templates) for t in self.program.templates])[self.columns.template]
        moved = size.astype(np.int64) * self.weights * chosen
        down, up = (int(moved[self.columns.lane == lane].sum()) for lane in (Lane.D2H, Lane.H2D))
        return MovedBytes(d2h=down, h2d=up)

    @property
    def sent_bytes(self) -> int:
        """What one rank hands to other stages in the whole step."""
        size = self.per_instruction(lambda i: i.work.bytes if isinstance(i.work, PointToPoint) else 0)
        return int((size.astype(np.int64) * self.weights)[self.columns.lane == Lane.SEND].sum())

    @property
    def collective_bytes(self) -> dict[str, int]:
        """Bytes of the whole tensors that collectives work on in the step, by operator."""
        found: dict[str, int] = {}
        for (_, instruction), times in zip(self.program.walk(), self.weights.tolist(), strict=True):
            if isinstance(instruction.work, Collective):
                found[instruction.op] = found.get(instruction.op, 0) + instruction.work.bytes * times
        return found

    @property
    def lanes_s(self) -> dict[str, float]:
        """Busy seconds of the whole step by lane; what an instruction waits for inside its span is a stall."""
        span_s = self.playback.end_s - self.playback.start_s
        busy_s = np.maximum(span_s - sum(self.waits_outside.values()), 0.0) * self.weights
        lanes = np.bincount(self.columns.lane, weights=busy_s, minlength=len(Lane))
        return {Lane(lane).label: float(lanes[lane]) for lane in np.unique(self.columns.lane)}

    @property
    def ended_s(self) -> float:
        """When the role's last instruction of the whole step ends (seconds)."""
        return self.playback.span_s + self.repetition.added_s(self.playback)

    def stalls(self, met: Peers) -> list[Stall]:
        """Return the waits of the whole step summed by lane and what was waited for."""
        waits = self.playback.waits
        wait_s, weights = self.repetition.wait_s(self.playback), self.weights[waits.instruction]
        late = Late(HOST, self.waits_outside[HOST])
        return stalls_of(self.playback, met, self._kinds, wait_s, weights, late=late) + self._stalls_outside()

    def after_compute(self, met: Peers) -> list[Stall]:
        """Return what the role still plays when its last kernel has ended, as waits of compute."""
        parts = after_compute(self.playback, met, self._kinds)
        return [Stall(lane=Lane.COMPUTE.label, waits_for=name, seconds=s, count=1) for name, s in parts.items()]

    @property
    def _kinds(self) -> Kinds:
        names = sorted({_kind(i) for t in self.program.templates for i in t.instructions})
        number = {name: n for n, name in enumerate(names)}
        return Kinds(names, self.per_instruction(lambda i: number[_kind(i)]).astype(np.int64))

    def _stalls_outside(self) -> list[Stall]:
        """Return what of the whole step stands still for the allocator, and for the host's launches, by lane."""
        found = []
        for name, waits in self.waits_outside.items():
            for lane in np.unique(self.columns.lane[waits > 0]):
                times = self.weights * (self.columns.lane == lane)
                seconds, count = float(np.sum(waits * times)), int(np.sum((waits > 0) * times))
                found.append(Stall(lane=Lane(lane).label, waits_for=name, seconds=seconds, count=count))
        return found

    def trace(self, *, program_sha256: str, rank: int, step_s: float) -> Trace:
        """Return every span that was played, memory and waits; ``rank`` is the first of the role's."""
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
        """Return a value of each played instruction, asked once for each instruction of a template."""
        templates = self.program.templates
        table = np.zeros((len(templates), max((len(t.instructions) for t in templates), default=0)))
        for row, template in zip(table, templates, strict=True):
            row[: len(template.instructions)] = [value(i) for i in template.instructions]
        found: Floats = table[self.columns.template, self.columns.position]
        return found


def _kind(instruction: Instruction) -> str:
    """Return what a wait for an instruction is called: the host's cores play operators that kernels play too."""
    return f"{instruction.op} on the host" if instruction.lane is Lane.HOST else instruction.op
