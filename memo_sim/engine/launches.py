"""How long kernels wait for the host of an eager framework, which launches every kernel.

Python and autograd take ``host_launch_s`` per kernel. How many kernels an instruction is follows from the plan's
row-wise library (``operators/framework_kernels.py``): eager modules launch the most, compiled ones few. For fused
kernels, and for memo-exec's own, it is ``KERNELS`` for every instruction: Megatron-LM's autograd functions launch fewer
kernels than eager modules but run more Python for each, and the A100's time was fitted to them with that number. The
chunks of one product (``tp_overlap``) are launched in one call, so each after the first is one kernel. Each
pass of a micro-batch takes another ``host_pass_s`` before its first kernel: for the batch, the loop over micro-batches
and the p2p transfers. While the device is slower, the host runs ahead and costs nothing. Where kernels are shorter than
their launches, the device waits before each kernel:

    host     |l0|l1|l2|l3|l4|            |l0|l1|l2|l3|
    device      |k0|..|k1|..|k2|            |k0------|k1----|k2...

The host waits for the device, and is then no longer ahead, where it reads a result:

- before a micro-batch's forward (Megatron-LM's ``broadcast_data`` reads the batch's sizes from the device);
- at p2p transfers between pipeline stages (``p2p_communication`` synchronises after them);
- where the step's gradient norm is read.

Between two such points, the waits follow from program order alone: kernel i starts after all launches up to its own.

    wait before i = M(i) - M(i - 1),    M(i) = max over j <= i of (launched(j) - busy before j), at least 0

The device's time counts its kernels and collectives, one after another, but not the collectives of replicas that
``overlap`` moves beside compute. Where other collectives overlap with compute, the host is in fact a little further
behind than this model says.
"""

from __future__ import annotations

from itertools import pairwise

import numpy as np

from memo_sim.contract.hardware import Hardware
from memo_sim.contract.knobs import FrameworkLibrary
from memo_sim.contract.plan import Decisions
from memo_sim.engine.playback import Floats
from memo_sim.memory.eager_framework import KERNELS
from memo_sim.program.analysis.columns import InstructionColumns, Ints, distinct
from memo_sim.program.ir.instruction import COLLECTIVE_LANES, Instance, Instruction, Lane
from memo_sim.program.ir.program import Program
from memo_sim.program.ir.work import FRESH, Rowwise
from memo_sim.program.operators.framework_kernels import launches, library_of

_REPLICAS = frozenset(
    (
        *(Lane.REPLICA, Lane.ENDS, Lane.SHARD, Lane.REPLICATE),
        *(Lane.EXPERT_REPLICA, Lane.EXPERT_SHARD, Lane.EXPERT_REPLICATE),
    )
)
"""Lanes of the collectives that ``overlap`` moves beside compute."""


def launch_waits(
    program: Program, columns: InstructionColumns, seconds: Floats, decisions: Decisions, hardware: Hardware
) -> Floats:
    """Return the seconds that each instruction of one stage waits for its launch; ``seconds`` are durations alone.

    All zero when the framework is not eager or replays CUDA graphs, or when the profile does not know its host's times.
    """
    launched = decisions.memory_policy == "eager" and not decisions.cuda_graphs
    if not launched or hardware.host_launch_s is None or not len(seconds):
        return np.broadcast_to(0.0, len(seconds))  # one number, however many there are
    waits = np.zeros(len(seconds))
    beside = _REPLICAS if decisions.overlap != "none" else frozenset[Lane]()
    lanes = [Lane.COMPUTE, *(lane for lane in COLLECTIVE_LANES.values() if lane not in beside)]
    serial = np.flatnonzero(np.isin(columns.lane, lanes))
    launch_s = _kernels(program, columns, decisions)[serial] * hardware.host_launch_s.value
    if hardware.host_pass_s is not None:
        starts = np.searchsorted(serial, columns.starts[[instance for _, instance in program.passes]])
        launch_s[starts] += hardware.host_pass_s.value
    window = _windows(program, columns)[serial]
    busy_before = np.cumsum(seconds[serial]) - seconds[serial]
    behind = np.cumsum(launch_s) - busy_before
    first = np.flatnonzero(np.append(True, window[1:] != window[:-1]))
    lengths = np.diff(first, append=len(serial))
    for length in distinct(lengths).tolist():  # windows of one length at once
        begins = first[lengths == length]
        inside = begins[:, np.newaxis] + np.arange(length)
        # Launches and busy time count from the window's start: there, the host has just waited for the device.
        ahead = (behind[begins] - launch_s[begins])[:, np.newaxis]
        highest = np.maximum(np.maximum.accumulate(behind[inside] - ahead, axis=1), 0.0)
        waits[serial[inside]] = np.diff(highest, axis=1, prepend=0.0)
    return waits


def _kernels(program: Program, columns: InstructionColumns, decisions: Decisions) -> Ints:
    """Return the number of kernels that the host launches for each instruction; one for a collective."""
    library = library_of(decisions.kernels.rowwise)
    return columns.by_template(
        [np.array([_kernels_of(i, library) for i in t.instructions], dtype=np.int64) for t in program.templates]
    )


def _kernels_of(instruction: Instruction, library: FrameworkLibrary | None) -> int:
    """Return the number of kernels that the host launches for one instruction."""
    if instruction.lane is not Lane.COMPUTE or instruction.further:
        return 1
    if isinstance(instruction.work, Rowwise) and instruction.work.kind == FRESH:
        return 0
    return KERNELS if library in (None, "fused", "jit") else launches(instruction.work, library)


def _windows(program: Program, columns: InstructionColumns) -> Ints:
    """Return the window of every instruction; a new window begins wherever the host has waited for the device."""
    keys = [_key(program, instance) for instance in program.instances]
    changed = np.array([a != b for a, b in pairwise(keys)], dtype=np.int64)
    of_instance = np.concatenate([np.zeros(1, dtype=np.int64), np.cumsum(changed)])
    transferred = np.cumsum(np.isin(columns.lane, (Lane.SEND, Lane.RECV)))
    windows: Ints = of_instance[columns.instance] + transferred
    return windows


def _key(program: Program, instance: Instance) -> tuple[str, int]:
    """Return the key of an instance's window: its micro-batch, or a phase at the step's beginning or end."""
    template = program.templates[instance.template]
    if not template.kind.of_step:
        return "", instance.micro_batch
    return template.instructions[0].phase, 0
