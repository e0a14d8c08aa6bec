"""From decisions to a prediction: lower, check memory, price, play.

Memory comes first: a plan that does not fit is never priced or played, and has no time. MFU is
``model FLOPs (MEMO 5.1) / (step time x GPUs x peak of the dtype)``; TGS is tokens per GPU per second.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cached_property
from typing import Protocol

import numpy as np

from memo_sim.contract.cluster import Cluster
from memo_sim.contract.errors import Infeasible
from memo_sim.contract.hardware import Hardware
from memo_sim.contract.plan import Decisions, MovedBytes, Prediction, Stall
from memo_sim.contract.trace import Spans, Trace, Wait
from memo_sim.costs.pricing import NodeRates, Pricer
from memo_sim.engine.launches import launch_waits
from memo_sim.engine.memory import Memory, memory_of
from memo_sim.engine.playback import Floats, Playback
from memo_sim.engine.player import Rates, play
from memo_sim.engine.repetition import PLAYED, Repetition
from memo_sim.program.columns import expand
from memo_sim.program.edges import derive_edges
from memo_sim.program.instruction import Instruction, Lane
from memo_sim.program.lower import lower
from memo_sim.program.program import Program
from memo_sim.program.work import Collective, Copy, Work

RECOMPUTE_PHASE = "rec/"

ALLOCATOR = "allocator"
"""What a kernel waits for when PyTorch's caching allocator calls the device."""

HOST = "launch"
"""What a kernel waits for when an eager framework's host has not launched it yet."""

MOST_SPANS = 200_000
"""Spans that a trace of a whole step may have; some 40 MB."""


class Prices(Protocol):
    """What the engine needs of a pricer: seconds alone on the lane, and which curves were asked beyond their range."""

    outside: set[str]

    def seconds(self, work: Work) -> float:
        """Return how long ``work`` takes when nothing else runs."""


def simulate(
    decisions: Decisions,
    hardware: Hardware,
    cluster: Cluster,
    *,
    pricer: Prices | None = None,
    rates: Rates | None = None,
    micro_batches_played: int | None = None,
) -> Simulation:
    """Return ``decisions`` played on ``cluster``.

    Of more than three micro-batches three are played and the second repeated, unless ``micro_batches_played`` says
    otherwise (at least three, or all).

    Raises:
        Infeasible: when the layout divides neither model nor sequence, or is larger than the cluster.
    """
    layout = decisions.layout
    if layout.devices > cluster.devices:
        raise Infeasible(
            "the layout is larger than the cluster",
            where="layout",
            got=f"{layout.devices} devices",
            wanted=f"at most the {cluster.devices} of {cluster.name}",
        )
    played = min(decisions.micro_batches, micro_batches_played or PLAYED)
    (program,) = lower(decisions, micro_batches=played)
    local_devices = min(cluster.devices_per_node, layout.devices)
    prices = Pricer(hardware, cluster, layout, rowwise=decisions.kernels.rowwise)
    shared = 0.0 if decisions.overlap == "none" else prices.replica_link_share
    return Simulation(
        decisions=decisions,
        hardware=hardware,
        cluster=cluster,
        program=program,
        pricer=pricer or prices,
        rates=rates or NodeRates(hardware, cluster, local_devices, replica_link_share=shared).rates,
    )


class Simulation:
    """One plan on one cluster; everything beyond the prediction is computed when it is asked for.

    ``program`` is what is played: the whole step, or a few of its micro-batches (``full_program`` is the step).
    """

    def __init__(
        self,
        *,
        decisions: Decisions,
        hardware: Hardware,
        cluster: Cluster,
        program: Program,
        pricer: Prices,
        rates: Rates,
    ) -> None:
        self.decisions = decisions
        self.hardware = hardware
        self.cluster = cluster
        self.program = program
        self.columns = expand(program)
        self.memory: Memory = memory_of(program, self.columns, decisions, hardware, cluster)
        self._pricer = pricer
        self._rates = rates
        self._repetition = Repetition(program, self.columns, decisions.micro_batches - program.micro_batches)
        self._weights = self._repetition.weights()
        self.prediction = self._fits() if self.memory.fault is None else self._does_not_fit()

    @cached_property
    def full_program(self) -> Program:
        """The program of the whole step."""
        if self.program.micro_batches == self.decisions.micro_batches:
            return self.program
        return lower(self.decisions)[0]

    @cached_property
    def seconds(self) -> Floats:
        """Seconds of every played instruction alone on the machine, the allocator's work not counted."""
        return self._per_instruction(lambda i: self._pricer.seconds(i.work))

    @cached_property
    def waits_outside(self) -> dict[str, Floats]:
        """Seconds that every played instruction waits for what is no lane: the allocator, the host that launches it."""
        caching = self.memory.caching
        none = np.zeros(len(self.seconds))
        launches = launch_waits(self.program, self.columns, self.seconds, self.decisions, self.hardware)
        return {ALLOCATOR: none if caching is None else caching.stall_s, HOST: launches}

    @cached_property
    def playback(self) -> Playback:
        """The spans as played (of a plan that does not fit: as if it did)."""
        edges = derive_edges(self.columns)
        seconds = self.seconds + self.waits_outside[ALLOCATOR] + self.waits_outside[HOST]
        return play(self.columns, edges, seconds, self._rates, name=self.memory.program_id)

    @property
    def fault_s(self) -> float | None:
        """When memory runs out, seconds from the step's start; None when the plan fits."""
        fault = self.memory.fault
        return None if fault is None else float(self.playback.start_s[fault.instruction])

    @property
    def peak_id(self) -> str:
        """The instruction at which device memory is fullest."""
        return self.memory.program_id(self.memory.device.instruction)

    @property
    def compute_s_without_recompute(self) -> float:
        """Seconds of the step's compute, were nothing rebuilt: a bound that no share of swapped tokens can beat."""
        kept = self._per_instruction(lambda i: float(i.lane == Lane.COMPUTE and not i.name.startswith(RECOMPUTE_PHASE)))
        return float(np.sum(self.seconds * self._weights * kept))

    @property
    def recompute_share(self) -> float:
        """Fraction of the step's compute seconds, each kernel alone, that rebuild activations."""
        compute = self._per_instruction(lambda i: float(i.lane == Lane.COMPUTE))
        return 1.0 - self.compute_s_without_recompute / float(np.sum(self.seconds * self._weights * compute))

    @property
    def layer_forward_s(self) -> float:
        """Seconds a middle layer's forward holds the compute lane, waits for exchanges and collectives included.

        Waits for copies are left out: this is the time that copies can hide under (the paper's linear program).
        """
        wanted = self.decisions.model.layers // 2
        instance = next(
            n
            for n, i in enumerate(self.program.instances)
            if i.layer == wanted and self.program.templates[i.template].name.startswith("layer.fwd")
        )
        mine = (self.columns.instance == instance) & (self.columns.lane == Lane.COMPUTE)
        chosen = np.flatnonzero(mine)
        waits = self.playback.waits
        copies = np.isin(self.columns.lane[waits.waits_for], (Lane.D2H, Lane.H2D))
        stalled = mine[waits.instruction] & copies & (waits.instruction != chosen[0])
        held = self.playback.end_s[chosen[-1]] - self.playback.start_s[chosen[0]]
        return float(held - waits.seconds[stalled].sum())

    @property
    def after_compute(self) -> tuple[str, float]:
        """The lane that ends the step, and how long it goes on after the compute lane's last kernel (seconds)."""
        ends, lane = self.playback.end_s, self.columns.lane
        last = int(np.argmax(ends))
        return Lane(int(lane[last])).label, float(ends[last] - ends[lane == Lane.COMPUTE].max(initial=0.0))

    def critical_path(self) -> list[str]:
        """Return the ids of the played instructions that bind the step, from its start to its end."""
        ids = self.program.ids()
        return [ids[i] for i in self.playback.critical_path()]

    def trace(self) -> Trace:
        """Return every span of the whole step, memory and waits.

        Micro-batches that were repeated are played now, unless that makes more than ``MOST_SPANS``: then the trace
        holds those that were played, says so, and its ``step_s`` is still the whole step's.

        Raises:
            Infeasible: when the plan does not fit.
        """
        if self.memory.fault is not None:
            raise Infeasible(f"no trace: {self.memory.fault.reason}")
        repeated = self.program is not self.full_program
        if repeated and self.full_program.instruction_count <= MOST_SPANS:
            return self._whole().trace()
        playback, ids = self.playback, self.program.ids()
        operations = [i.op for _, i in self.program.walk()]
        waits = playback.waits
        return Trace(
            origin="predicted",
            program_sha256=self.full_program.sha256,
            world_size=self.decisions.layout.devices,
            step_s=(self.prediction.step_s or 0.0) if repeated else playback.span_s,
            spans=Spans(
                ids=ids,
                ops=operations,
                lanes=[Lane(lane).label for lane in self.columns.lane.tolist()],
                start_s=playback.start_s.tolist(),
                end_s=playback.end_s.tolist(),
            ),
            device_memory=self.memory.device_over_time(playback),
            host_memory=self.memory.host_over_time(playback),
            waits=[
                Wait(instruction=ids[i], waits_for=ids[p], start_s=start, seconds=seconds)
                for i, p, start, seconds in zip(
                    waits.instruction.tolist(),
                    waits.waits_for.tolist(),
                    waits.start_s.tolist(),
                    waits.seconds.tolist(),
                    strict=True,
                )
            ],
            micro_batches_played=self.program.micro_batches,
            micro_batches=self.decisions.micro_batches,
        )

    def _whole(self) -> Simulation:
        """Return the same simulation with every micro-batch played."""
        return Simulation(
            decisions=self.decisions,
            hardware=self.hardware,
            cluster=self.cluster,
            program=self.full_program,
            pricer=self._pricer,
            rates=self._rates,
        )

    def _fits(self) -> Prediction:
        decisions, layout = self.decisions, self.decisions.layout
        peak = self.hardware.peak_flops.get(decisions.dtype)
        if peak is None:
            raise Infeasible(
                f"{self.hardware.name} has no peak for {decisions.dtype}",
                where="decisions.dtype",
                wanted=" or ".join(self.hardware.peak_flops),
            )
        step_s = self.playback.span_s + self._repetition.added_s(self.playback)
        flops = decisions.model.step_flops(decisions.seq_tokens, decisions.global_batch)
        span_s = (self.playback.end_s - self.playback.start_s) * self._weights
        lanes = np.bincount(self.columns.lane, weights=span_s, minlength=len(Lane))
        return Prediction(
            status="ok",
            hardware=self.hardware.name,
            step_s=step_s,
            mfu=flops / (step_s * layout.devices * peak.value),
            tgs=decisions.global_batch * decisions.seq_tokens / (step_s * layout.devices),
            peak_device_bytes=self.memory.device.bytes,
            peak_by_class=self.memory.device.by_class,
            reserved_bytes=self._reserved_bytes,
            reorganisations=self._reorganisations(),
            peak_host_bytes_per_node=self.memory.host_per_node_bytes,
            moved_bytes=self._moved_bytes(),
            lanes={Lane(lane).label: float(lanes[lane]) for lane in np.unique(self.columns.lane)},
            stalls=self._stalls(),
            outside_calibration=sorted(self._pricer.outside),
        )

    def _does_not_fit(self) -> Prediction:
        fault = self.memory.fault
        assert fault is not None
        return Prediction(
            status=fault.status,
            hardware=self.hardware.name,
            peak_device_bytes=self.memory.device.bytes,
            peak_by_class=self.memory.device.by_class,
            reserved_bytes=self._reserved_bytes,
            peak_host_bytes_per_node=self.memory.host_per_node_bytes,
            moved_bytes=self._moved_bytes(),
            shortfall_bytes=fault.shortfall_bytes,
            reason=fault.reason,
        )

    @property
    def _reserved_bytes(self) -> int | None:
        caching = self.memory.caching
        return None if caching is None or caching.replay.out_of_memory else caching.replay.reserved_peak_bytes

    def _reorganisations(self) -> int:
        """Return how often the whole step, the allocator's cache warm, reorganises memory."""
        caching = self.memory.caching
        return 0 if caching is None else int(np.sum(caching.reorganised * self._weights))

    def _moved_bytes(self) -> MovedBytes:
        """Return what one rank copies over each lane in the whole step."""
        size = self._per_instruction(lambda i: i.work.bytes if isinstance(i.work, Copy) else 0)
        moved = size.astype(np.int64) * self._weights
        down, up = (int(moved[self.columns.lane == lane].sum()) for lane in (Lane.D2H, Lane.H2D))
        return MovedBytes(d2h=down, h2d=up)

    @property
    def collective_bytes(self) -> dict[str, int]:
        """Bytes of the whole tensors that collectives work on in the step, by operator."""
        found: dict[str, int] = {}
        for (_, instruction), times in zip(self.program.walk(), self._weights.tolist(), strict=True):
            if isinstance(instruction.work, Collective):
                found[instruction.op] = found.get(instruction.op, 0) + instruction.work.bytes * times
        return found

    def _stalls(self) -> list[Stall]:
        """Return the waits of the whole step summed by lane and kind of instruction waited for, longest first."""
        waits, columns = self.playback.waits, self.columns
        names = sorted({i.op for t in self.program.templates for i in t.instructions})
        number = {name: n for n, name in enumerate(names)}
        kind = self._per_instruction(lambda i: number[i.op])[waits.waits_for].astype(np.int64)
        key = columns.lane[waits.instruction] * len(names) + kind
        weights = self._weights[waits.instruction]
        seconds = np.bincount(key, weights=self._repetition.wait_s(self.playback) * weights)
        count = np.bincount(key, weights=weights)
        found = [
            Stall(
                lane=Lane(k // len(names)).label,
                waits_for=names[k % len(names)],
                seconds=float(seconds[k]),
                count=int(count[k]),
            )
            for k in np.flatnonzero(count).tolist()
        ]
        return sorted(found + self._stalls_outside(), key=lambda stall: -stall.seconds)

    def _stalls_outside(self) -> list[Stall]:
        """Return the kernels of the whole step that stand still for the allocator, and for the host's launches."""
        found = []
        for name, waits in self.waits_outside.items():
            if waits.any():
                seconds, count = np.sum(waits * self._weights), np.sum((waits > 0) * self._weights)
                found.append(Stall(lane=Lane.COMPUTE.label, waits_for=name, seconds=float(seconds), count=int(count)))
        return found

    def _per_instruction(self, value: Callable[[Instruction], float]) -> Floats:
        """Return a value of each played instruction, asked once for each instruction of a template."""
        templates = self.program.templates
        table = np.zeros((len(templates), max((len(t.instructions) for t in templates), default=0)))
        for row, template in zip(table, templates, strict=True):
            row[: len(template.instructions)] = [value(i) for i in template.instructions]
        found: Floats = table[self.columns.template, self.columns.position]
        return found
