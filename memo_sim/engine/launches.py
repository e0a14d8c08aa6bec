"""What an eager framework's host costs: it launches every kernel, and a device that is faster waits for it.

Python and autograd take ``host_launch_s`` a kernel, and a pass of a micro-batch takes ``host_pass_s`` before its first
(the batch, the loop over micro-batches, what is handed over). As long as the device is slower the host runs ahead, and
costs nothing; where kernels are shorter than their launch the device stands still before each:

    host     |l0|l1|l2|l3|l4|            |l0|l1|l2|l3|
    device      |k0|..|k1|..|k2|            |k0------|k1----|k2...

The host waits for the device, and is no longer ahead, where it looks at a result: before a micro-batch's forward
(Megatron-LM's ``broadcast_data`` reads the batch's sizes from the device), at a hand-over between pipeline stages
(``p2p_communication`` synchronises after it), and where the step's gradient norm is read. Between two such points the
waits follow from program order alone: kernel i cannot start before the launches up to it are done.

    wait before i = M(i) - M(i - 1),    M(i) = max over j <= i of (launched(j) - busy before j), at least 0

The device's time is that of its kernels and of collectives on the same lanes one after the other; what overlaps compute
makes the host a little further behind than it is counted here.
"""

from __future__ import annotations

from itertools import pairwise

import numpy as np

from memo_sim.contract.hardware import Hardware
from memo_sim.contract.plan import Decisions
from memo_sim.engine.playback import Floats
from memo_sim.memory.eager import KERNELS
from memo_sim.program.analysis.columns import Columns, Ints
from memo_sim.program.ir.instruction import Instance, Lane
from memo_sim.program.ir.program import Program

_SERIAL = (Lane.COMPUTE, Lane.COLLECTIVE)
"""Lanes whose work an eager framework without overlap plays one after the other."""


def launch_waits(
    program: Program, columns: Columns, seconds: Floats, decisions: Decisions, hardware: Hardware
) -> Floats:
    """Return how long each instruction of one role waits for its launch (seconds); ``seconds`` are theirs alone.

    Nothing where the framework is not eager, or the profile does not know its host.
    """
    waits = np.zeros(len(seconds))
    if decisions.memory_policy != "eager" or hardware.host_launch_s is None or not len(seconds):
        return waits
    serial = np.flatnonzero(np.isin(columns.lane, _SERIAL))
    launch_s = np.where(columns.lane[serial] == Lane.COMPUTE, KERNELS, 1) * hardware.host_launch_s.value
    if hardware.host_pass_s is not None:
        starts = np.searchsorted(columns.instance[serial], [instance for _, instance in program.passes])
        launch_s[starts] += hardware.host_pass_s.value
    window = _windows(program, columns)[serial]
    busy_before = np.cumsum(seconds[serial]) - seconds[serial]
    behind = np.cumsum(launch_s) - busy_before
    bounds = [*np.flatnonzero(np.append(True, window[1:] != window[:-1])).tolist(), len(serial)]
    for first, end in pairwise(bounds):
        # Launches and busy time count from the window's start, where the host has just seen the device finish.
        ahead = behind[first] - launch_s[first]
        highest = np.maximum(np.maximum.accumulate(behind[first:end] - ahead), 0.0)
        waits[serial[first:end]] = np.diff(highest, prepend=0.0)
    return waits


def _windows(program: Program, columns: Columns) -> Ints:
    """Return the number of the window of every instruction: a new one wherever the host has waited for the device."""
    keys = [_key(program, instance) for instance in program.instances]
    changed = np.array([a != b for a, b in pairwise(keys)], dtype=np.int64)
    of_instance = np.concatenate([np.zeros(1, dtype=np.int64), np.cumsum(changed)])
    transferred = np.cumsum(np.isin(columns.lane, (Lane.SEND, Lane.RECV)))
    windows: Ints = of_instance[columns.instance] + transferred
    return windows


def _key(program: Program, instance: Instance) -> tuple[str, int]:
    """Return what tells an instance's window from its neighbour's: a micro-batch, or a phase of the step's ends."""
    if not instance.place.startswith("step"):
        return "", instance.micro_batch
    phase = program.templates[instance.template].instructions[0].name.partition("/")[0]
    return phase, 0
