"""Turns decisions into a prediction: lowers the plan, checks memory, prices and plays the program.

Memory is checked first. A plan that does not fit is never priced or played, and has no time. MFU is
``model FLOPs (MEMO 5.1) / (step time x GPUs x peak of the dtype)``; TGS is tokens per GPU per second.

Pipeline stages are played together. The step ends with the last of them. The stage that needs most memory decides
whether the plan fits. A node's host memory serves all stages that have ranks on the node.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import cached_property
from typing import Any
from weakref import ref

import numpy as np

from memo_sim.contract.cluster import Cluster
from memo_sim.contract.errors import Infeasible
from memo_sim.contract.hardware import Hardware
from memo_sim.contract.peaks import flops_peak, memory_peak
from memo_sim.contract.plan import Decisions, Prediction, Stall
from memo_sim.contract.trace import Trace
from memo_sim.contract.units import format_bytes
from memo_sim.costs.pricing import NodeRates, Pricer
from memo_sim.engine.event_loop import Rates
from memo_sim.engine.fast_loop import run_fast
from memo_sim.engine.memory import Memory
from memo_sim.engine.playback import Floats, Playback
from memo_sim.engine.player import Loop, play_stages
from memo_sim.engine.repetition import played_again, played_at_first, windows
from memo_sim.engine.stage_run import ALLOCATOR, HOST, Prices, StageRun
from memo_sim.engine.stalls import ROUNDING, bubble, peers, summed
from memo_sim.program.analysis.columns import InstructionColumns
from memo_sim.program.analysis.rendezvous import AllRendezvous, all_rendezvous
from memo_sim.program.ir.instruction import Lane
from memo_sim.program.ir.program import Program
from memo_sim.program.lower import lower, program_sha256

__all__ = ["ALLOCATOR", "HOST", "Prices", "Simulation", "simulate"]

LEAST_OUTSIDE = 0.05
"""A prediction names a curve that was read outside its range only if work of more than this share of the step did so.
Almost every plan has some small work outside; a mark on all of them would tell the reader nothing."""

MOST_SPANS = 200_000
"""Largest number of spans in a trace of a whole step; about 40 MB."""


KEPT_BYTES = 4 << 20
"""Size of a block that is freed so that glibc keeps freed arrays of that size for later ones."""


def simulate(
    decisions: Decisions,
    hardware: Hardware,
    cluster: Cluster,
    *,
    pricer: Prices | None = None,
    rates: Rates | None = None,
    micro_batches_played: int | None = None,
    predict: bool = True,
    loop: Loop = run_fast.with_simpy,
    begun: Simulation | None = None,
) -> Simulation:
    """Return ``decisions`` simulated on ``cluster``; without ``predict``, the prediction is computed on first use.

    By default, enough micro-batches are played to show the schedule's period, and the period is repeated
    (``repetition.py``). ``micro_batches_played`` sets their number (at least that many, or all). When a pipeline has
    not become steady, it is simulated again with more of them. If it still is not steady, its step time is an estimate
    (``Simulation.steady``). ``loop``: what plays the program; a search may use ``fast_loop.run_fast``, whose result is
    the same to the last bit. ``begun``: the same plan from ``memory_alone``, which is played now.

    Raises:
        Infeasible: when the layout does not divide the model or the sequence, or is larger than the cluster.
    """
    simulation = begun or _begin(
        decisions,
        hardware,
        cluster,
        pricer=pricer,
        rates=rates,
        micro_batches_played=micro_batches_played,
        loop=loop,
        plays=True,
    )
    if not (micro_batches_played or simulation.steady):
        more = played_again(decisions.layout, decisions.micro_batches)
        parts = {**simulation.parts, "loop": loop}
        del begun, simulation  # two of them would need twice the memory
        simulation = _again(more, parts)
    return simulation.predicted() if predict else simulation


def memory_alone(
    decisions: Decisions, hardware: Hardware, cluster: Cluster, *, loop: Loop = run_fast.with_simpy
) -> Simulation:
    """Return ``decisions`` simulated as far as its memory shows; nothing is priced or played.

    Of a plan that fits, only the memory is known until ``simulate`` goes on with it; ``loop`` then plays it.

    Raises:
        Infeasible: see ``simulate``.
    """
    return _begin(decisions, hardware, cluster, loop=loop, plays=False)


def _begin(
    decisions: Decisions,
    hardware: Hardware,
    cluster: Cluster,
    *,
    loop: Loop,
    plays: bool,
    pricer: Prices | None = None,
    rates: Rates | None = None,
    micro_batches_played: int | None = None,
) -> Simulation:
    layout = decisions.layout
    if layout.devices > cluster.devices:
        raise Infeasible(
            "the layout is larger than the cluster",
            where="layout",
            got=f"{layout.devices} devices",
            wanted=f"at most the {cluster.devices} of {cluster.name}",
            hint="another --cluster, or smaller degrees of parallelism",
        )
    enough = played_at_first(layout, decisions.micro_batches, replayed=decisions.memory_policy != "planned")
    played = min(decisions.micro_batches, micro_batches_played or enough)
    local_devices = min(cluster.devices_per_node, layout.devices)
    prices = Pricer(hardware, cluster, layout, rowwise=decisions.kernels.rowwise)
    return Simulation(
        decisions=decisions,
        hardware=hardware,
        cluster=cluster,
        programs=lower(decisions, micro_batches=played),
        pricer=pricer or prices,
        rates=rates or NodeRates(hardware, cluster, local_devices, demands=prices.demands).rates,
        loop=loop,
        plays=plays,
    )


def _playbacks_of(simulation: ref[Simulation]) -> Callable[[], list[Playback]]:
    """Return the function by which a simulation's stages get their playbacks.

    It does not hold the simulation. If stages and simulation held each other, the arrays of a plan that a search is
    done with, hundreds of MB, would stay until Python's collector runs.
    """

    def playbacks() -> list[Playback]:
        found = simulation()
        if found is None:
            raise ReferenceError("a stage is played by its simulation, which is gone: keep the simulation")
        return found.playbacks

    return playbacks


def _again(played: int, parts: dict[str, Any]) -> Simulation:
    """Return a simulation with ``played`` micro-batches from its ``parts``."""
    return Simulation(programs=lower(parts["decisions"], micro_batches=played), **parts)


class Simulation:
    """One plan on one cluster; everything beyond the prediction is computed on first use.

    ``stages`` are the pipeline stages as played: the whole step, or a few of its micro-batches. ``full_programs`` are
    those of the whole step. Memory figures are those of the ``fullest`` stage, times those of the stage that sets the
    ``pace``.
    """

    def __init__(
        self,
        *,
        decisions: Decisions,
        hardware: Hardware,
        cluster: Cluster,
        programs: tuple[Program, ...],
        pricer: Prices,
        rates: Rates,
        loop: Loop = run_fast.with_simpy,
        plays: bool = True,
    ) -> None:
        """``plays``: whether the plan is played at once, if it fits."""
        self.decisions = decisions
        self.hardware = hardware
        self.cluster = cluster
        self._pricer = pricer
        self._rates = rates
        self._loop = loop
        playbacks = _playbacks_of(ref(self))
        stages = list[StageRun]()
        # The stages' arrays come and go, of a few 100 KB each. Until a larger block has been freed (mallopt(3),
        # M_MMAP_THRESHOLD), glibc returns them to the system and faults their pages in again: a tenth of the CPU time.
        np.empty(KEPT_BYTES, dtype=np.uint8)
        for number, program in enumerate(programs):
            stages.append(
                StageRun(
                    program,
                    decisions,
                    hardware,
                    cluster,
                    pricer=pricer,
                    playbacks=playbacks,
                    number=number,
                    plays=plays and (not stages or stages[-1].memory.fault is None),
                )
            )
        self.stages = tuple(stages)
        self._share_host()
        if plays or self.memory.fault is not None:
            _ = self.steady

    def __reduce__(self) -> tuple[Callable[..., Simulation], tuple[object, ...]]:
        """Pickle what the programs are lowered from: they have up to a hundred MB, and are lowered in a second."""
        return _again, (self.stages[0].program.micro_batches, self.parts)

    @property
    def parts(self) -> dict[str, Any]:
        """What a simulation is made of beside its programs, which are lowered from it; SimPy's loop plays it."""
        parts: dict[str, Any] = {"decisions": self.decisions, "hardware": self.hardware, "cluster": self.cluster}
        return parts | {"pricer": self._pricer, "rates": self._rates}

    @cached_property
    def prediction(self) -> Prediction:
        """The predicted step, or the reason why the plan does not fit."""
        return self._fits() if self.memory.fault is None else self._does_not_fit()

    def predicted(self) -> Simulation:
        """Return this simulation after computing its prediction, so that errors are raised now."""
        _ = self.prediction
        return self

    @cached_property
    def steady(self) -> bool:
        """Whether the plan was seen to be steady, after a window of every stage stands for what is not played.

        Without pipeline parallelism, three micro-batches show a period. A plan that does not fit is not played; its
        bytes can be counted with any window.
        """
        played = self.stages[0].program.micro_batches
        beyond = self.decisions.micro_batches - played
        if not beyond:
            return True
        passes = [[each for each, _ in stage.program.passes] for stage in self.stages]
        found = windows(self.decisions.layout, passes, beyond)
        if not found:
            raise ValueError(f"cannot repeat {beyond} times: {played} micro-batches are played")
        for mine in found:
            for stage, window in zip(self.stages, mine, strict=True):
                stage.repeat(window)
            if len(self.stages) == 1 or self.memory.fault or all(r.repetition.steady(r.playback) for r in self.stages):
                return True
        return False

    def _share_host(self) -> None:
        """Tell every stage how much host memory the other stages on its node need."""
        layout, per_node = self.decisions.layout, self.cluster.devices_per_node
        ranks = layout.devices // layout.pp
        if layout.pp == 1 or ranks >= per_node:
            return
        needed = [stage.memory.host.bytes for stage in self.stages]
        for number, stage in enumerate(self.stages):
            node = number * ranks // per_node
            here = range(node * per_node, min(layout.devices, (node + 1) * per_node))
            beside = sum(needed[rank // ranks] for rank in here if rank // ranks != number)
            stage.memory = replace(stage.memory, host_beside_bytes=beside)

    @cached_property
    def fullest(self) -> StageRun:
        """The stage that needs most device memory, or the one with the largest shortage if memory runs out.

        A shortage of a device comes before one of a host, as in each stage. With PyTorch's allocator, the stage that
        needs most is the one where it reserves most.
        """

        def order(stage: StageRun) -> tuple[bool, int, int]:
            fault = stage.memory.fault
            on_device, missing = (fault.status == "gpu_oom", fault.shortfall_bytes) if fault else (False, 0)
            return on_device, missing, stage.reserved_bytes or stage.memory.device.bytes

        return max(self.stages, key=order)

    @cached_property
    def most_live(self) -> StageRun:
        """The stage with most live bytes on the device at one instant; if memory runs out, the ``fullest``.

        Where an allocator reserves more than is alive, another stage may be the fullest.
        """
        if self.memory.fault is not None:
            return self.fullest
        return max(self.stages, key=lambda stage: stage.memory.device.bytes)

    @cached_property
    def pace(self) -> StageRun:
        """The stage with most compute seconds."""
        return max(self.stages, key=lambda stage: stage.compute_s)

    @property
    def program(self) -> Program:
        """The program of the stage that sets the pace."""
        return self.pace.program

    @property
    def columns(self) -> InstructionColumns:
        """The instructions of that program as columns."""
        return self.pace.columns

    @property
    def memory(self) -> Memory:
        """The memory of the fullest stage."""
        return self.fullest.memory

    @cached_property
    def full_programs(self) -> tuple[Program, ...]:
        """The programs of the whole step, one per stage."""
        programs = tuple(stage.program for stage in self.stages)
        return programs if programs[0].micro_batches == self.decisions.micro_batches else lower(self.decisions)

    @property
    def instruction_count(self) -> int:
        """Instructions of all stages in the whole step."""
        return sum(int(stage.weights.sum()) for stage in self.stages)

    @property
    def instructions_played(self) -> int:
        """Instructions of all stages as played, the repeated ones once."""
        return sum(len(stage.columns.lane) for stage in self.stages)

    @property
    def full_program(self) -> Program:
        """The program of the whole step, of the fullest stage."""
        return self.full_programs[self.stages.index(self.fullest)]

    @cached_property
    def playbacks(self) -> list[Playback]:
        """The spans of every stage, played together."""
        return self._played(self._loop)

    def shown(self) -> Simulation:
        """Return this simulation after SimPy's loop has played it, which is what answers show.

        Where another loop has, SimPy's is played too, and nothing else is done again. Should the numbers differ, all of
        them come from SimPy.
        """
        played = self.__dict__.get("playbacks", [])
        if not all(playback.by_simpy for playback in played):
            pairs = zip(played, self._played(run_fast.with_simpy), strict=True)
            if not all(np.array_equal(a.start_s, b.start_s) and np.array_equal(a.end_s, b.end_s) for a, b in pairs):
                return simulate(self.decisions, self.hardware, self.cluster, pricer=self._pricer, rates=self._rates)
        self._loop = run_fast.with_simpy
        return self

    def _played(self, loop: Loop) -> list[Playback]:
        return play_stages([stage.part for stage in self.stages], self._rates, self._matched, loop=loop)

    @cached_property
    def _matched(self) -> AllRendezvous:
        """The matched instructions of all stages, as they are played."""
        return all_rendezvous([stage.program for stage in self.stages])

    @property
    def playback(self) -> Playback:
        """The spans of the stage that sets the pace."""
        return self.pace.playback

    @property
    def seconds(self) -> Floats:
        """Seconds of every instruction of the stage that sets the pace, alone on the machine."""
        return self.pace.seconds

    @property
    def peak_id(self) -> str:
        """The instruction at which most bytes of a device are alive."""
        return self._of(self.most_live, self.most_live.peak_id)

    @property
    def compute_s_without_recompute(self) -> float:
        """Seconds of a stage's compute without recompute; a lower bound for every number of swapped tokens."""
        return max(stage.compute_s_without_recompute for stage in self.stages)

    @property
    def recompute_share(self) -> float:
        """Fraction of the step's compute seconds, each kernel alone, that recompute activations."""
        return 1.0 - self.pace.compute_s_without_recompute / self.pace.compute_s

    @property
    def own_rebuild_share(self) -> float:
        """Fraction of compute seconds in which METP recomputes what it never keeps (``StageRun.own_rebuild_s``)."""
        return self.pace.own_rebuild_s / self.pace.compute_s

    @property
    def layer_forward_s(self) -> float:
        """Seconds of a middle layer's forward on the compute lane (``StageRun.layer_forward_s``)."""
        return self.pace.layer_forward_s

    def _stalls(self, step_s: float) -> list[Stall]:
        """Return the waits of the pace-setting stage until the step's end, the longest first."""
        stage, number = self.pace, self.stages.index(self.pace)
        met = peers(self.playbacks, self._matched, number)
        found = [*stage.stalls(met), *stage.after_compute(met)]
        if (left_s := step_s - stage.ended_s) > ROUNDING * step_s:
            others = [each for each in range(len(self.stages)) if each != number]
            latest = max(others, key=lambda each: self.stages[each].ended_s)
            found.append(Stall(lane=Lane.COMPUTE.label, waits_for=bubble(latest), seconds=left_s, count=1))
        return summed(found)

    @cached_property
    def outside_shares(self) -> dict[str, float]:
        """Shares of the step by curve that was read outside its range, the largest first (``LEAST_OUTSIDE``)."""
        return self._outside_shares(self.prediction.step_s or 0.0)

    def _outside_shares(self, step_s: float) -> dict[str, float]:
        found: dict[str, float] = {}
        for stage in self.stages:
            for name, seconds in stage.outside_s.items():
                found[name] = max(found.get(name, 0.0), seconds / step_s if step_s else 0.0)
        carried = {name: share for name, share in found.items() if share > LEAST_OUTSIDE}
        return dict(sorted(carried.items(), key=lambda item: (-item[1], item[0])))

    @property
    def peak_shares(self) -> dict[str, float]:
        """What the step computes and moves, over what the chip can in its time (``contract/peaks.py``)."""
        step_s, dtype = self.prediction.step_s, self.decisions.dtype
        if not step_s:
            return {}
        done = {
            f"FLOPs in {dtype}": (max(stage.flops for stage in self.stages), flops_peak(self.hardware, dtype)),
            "bytes of memory": (max(stage.memory_bytes for stage in self.stages), memory_peak(self.hardware)),
        }
        return {name: amount / (step_s * peak) for name, (amount, peak) in done.items() if peak}

    @property
    def collective_bytes(self) -> dict[str, int]:
        """Bytes of the whole tensors of the pace-setting stage's collectives, by operator."""
        return self.pace.collective_bytes

    def trace(self, stage: StageRun | None = None, *, most_spans: int | None = None) -> Trace:
        """Return the trace of a stage's whole step (by default the first stage's): spans, memory and waits.

        Repeated micro-batches are played now, unless that gives more than ``most_spans`` (``MOST_SPANS``) spans. Then
        the trace holds only the micro-batches that were played, and says so; its ``step_s`` is still the whole step's.

        Raises:
            Infeasible: when the plan does not fit.
        """
        number = self.stages.index(stage) if stage else 0
        traced = self.traced_stages(most_spans)
        played = traced[number].program.micro_batches
        whole_s = max(each.playback.span_s for each in traced)
        return traced[number].trace(
            program_sha256=program_sha256(self.full_programs),
            rank=number * (self.decisions.layout.devices // len(self.stages)),
            step_s=whole_s if played == self.decisions.micro_batches else self.prediction.step_s or 0.0,
        )

    def traces(self, *, most_spans: int | None = None) -> list[Trace]:
        """Return the trace of every stage in order; ``most_spans`` in all, in place of ``MOST_SPANS`` (``trace``)."""
        return [self.trace(stage, most_spans=most_spans) for stage in self.stages]

    def traced_stages(self, most_spans: int | None = None) -> tuple[StageRun, ...]:
        """Return the stages whose spans the traces hold: of the whole step, or of what was played (see ``trace``).

        Raises:
            Infeasible: when the plan does not fit.
        """
        if self.memory.fault is not None:
            raise Infeasible(f"no trace: {self.memory.fault.reason}")
        repeated = self.stages[0].program is not self.full_programs[0]
        most = MOST_SPANS if most_spans is None else most_spans
        small = sum(program.instruction_count for program in self.full_programs) <= most
        return self._whole.stages if repeated and small else self.stages

    @cached_property
    def _whole(self) -> Simulation:
        """The same simulation with every micro-batch played."""
        return Simulation(
            decisions=self.decisions,
            hardware=self.hardware,
            cluster=self.cluster,
            programs=self.full_programs,
            pricer=self._pricer,
            rates=self._rates,
        )

    def _of(self, stage: StageRun, text: str) -> str:
        """Return a text about a stage, with the stage's name in front when there are several."""
        return text if len(self.stages) == 1 else f"{stage.program.stage}: {text}"

    def _fits(self) -> Prediction:
        decisions, layout = self.decisions, self.decisions.layout
        peak = self.hardware.peak_flops.get(decisions.dtype)
        if peak is None:
            raise Infeasible(
                f"{self.hardware.name} has no peak FLOP/s for {decisions.dtype}",
                where="decisions.dtype",
                wanted=" or ".join(self.hardware.peak_flops),
                hint="another --dtype, or memo-exec calibrate on a machine that has it",
            )
        # Stages drift apart by at most the micro-batches they hold, so in the long run all go at the slowest one's
        # pace.
        step_s = max(stage.playback.span_s for stage in self.stages)
        step_s += max(stage.repetition.added_s(stage.playback) for stage in self.stages)
        flops = decisions.step_flops
        return Prediction(
            status="ok",
            hardware=self.hardware.name,
            step_s=step_s,
            mfu=flops / (step_s * layout.devices * peak.value),
            tgs=decisions.global_batch * decisions.seq_tokens / (step_s * layout.devices),
            peak_device_bytes=self.most_live.memory.device.bytes,
            peak_by_class=self.most_live.memory.device.by_class,
            reserved_bytes=self.fullest.reserved_bytes,
            allocation_retries=max(stage.allocation_retries for stage in self.stages),
            peak_host_bytes_per_node=max(stage.memory.host_per_node_bytes for stage in self.stages),
            moved_bytes=self.pace.moved_bytes,
            lanes=self.pace.lanes_s,
            stalls=self._stalls(step_s),
            outside_calibration=list(self._outside_shares(step_s)),
        )

    def _does_not_fit(self) -> Prediction:
        fault = self.memory.fault
        assert fault is not None
        reason = self._of(self.fullest, fault.reason)
        on_host = max(stage.memory.host_shortfall_bytes for stage in self.stages)
        if on_host and fault.status == "gpu_oom":
            reason = f"{reason}; a node's host lacks {format_bytes(on_host)} as well"
        return Prediction(
            status=fault.status,
            hardware=self.hardware.name,
            peak_device_bytes=self.memory.device.bytes,
            peak_by_class=self.memory.device.by_class,
            reserved_bytes=self.fullest.reserved_bytes,
            peak_host_bytes_per_node=max(stage.memory.host_per_node_bytes for stage in self.stages),
            moved_bytes=self.fullest.moved_bytes,
            shortfall_bytes=fault.shortfall_bytes,
            host_shortfall_bytes=on_host,
            reason=reason,
        )
