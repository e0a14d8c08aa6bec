"""Computes the verdict of an answer: memory against capacity, speed, hours and prices.

What it assumes is in ``assumptions.py``, what a search leaves out in ``left_out.py``.

GPU-hours and prices count the devices that the plan occupies, and nothing besides the steps: no start, no checkpoints,
no failures. ``goodput.py`` computes what those cost.
"""

from __future__ import annotations

from collections.abc import Collection
from math import inf

from memo_sim.answers.assumptions import assumptions
from memo_sim.answers.goodput import BILLION, HOUR_S, goodput_assumptions, goodput_of
from memo_sim.answers.left_out import left_out
from memo_sim.contract.boards import OPTION_SOURCE
from memo_sim.contract.plan import Decisions, Prediction
from memo_sim.contract.summary import Assumption, DeviceMemory, HostMemory, PeakKind, Summary
from memo_sim.contract.units import GIB, MOST_BYTES, counted, format_bytes, format_seconds, format_tokens
from memo_sim.engine.simulate import ALLOCATOR, Simulation
from memo_sim.planning.presets import Policy
from memo_sim.planning.question import Question
from memo_sim.program.layout.rules.recompute import swaps
from memo_sim.views.busy import COMPUTE
from memo_sim.views.plan_table import layout_label

PART_OF_NODE = "part-of-node"
"""The source of the host memory of a part of a node, where it is that part of the node's (``gpus.py``)."""
MUCH_SLOWER, MUCH_LESS = 0.03, 0.5
"""A plan that is at most so much slower, with at most so much of the host memory, is named."""


def summary_of(
    question: Question,
    simulation: Simulation,
    prediction: Prediction,
    *,
    planned_arena: bool = False,
    searched: bool = True,
    no_interval: str = "",
    price_per_device_hour: float | None = None,
    ways_out: list[str] | None = None,
    rivals: Collection[Prediction] = (),
) -> Summary:
    """Return the verdict about one plan; ``rivals`` are other plans that were played.

    ``prediction`` is the plan's, with the size of its arena where ``planned_arena``; ``searched``: it was chosen among
    others, and not given; ``no_interval``: why a step has none.
    """
    decisions = simulation.decisions
    layout, step_s = decisions.layout, prediction.step_s
    tokens = decisions.global_batch * decisions.seq_tokens
    hours = None if step_s is None else step_s * layout.devices / HOUR_S
    steps_of_a_billion = BILLION / tokens
    price = None if hours is None or price_per_device_hour is None else hours * price_per_device_hour
    goodput = goodput_of(
        question.failures,
        decisions,
        step_s=step_s,
        tokens_per_device_s=prediction.tgs,
        price_per_device_hour=price_per_device_hour,
    )
    return Summary(
        fits=prediction.status == "ok",
        status=prediction.status,
        devices=layout.devices,
        tokens_per_step=tokens,
        step_s=step_s,
        interval=prediction.interval,
        no_interval=no_interval,
        mfu=prediction.mfu,
        tokens_per_device_s=prediction.tgs,
        device_hours_per_billion_tokens=None if hours is None else hours * steps_of_a_billion,
        price_per_device_hour=price_per_device_hour,
        price_per_step=price,
        price_per_billion_tokens=None if price is None else price * steps_of_a_billion,
        goodput=goodput,
        device_memory=device_memory(simulation, prediction, planned_arena=planned_arena),
        host_memory=HostMemory(
            needed_bytes=prediction.peak_host_bytes_per_node,
            capacity_bytes=min(simulation.memory.host_capacity_bytes, MOST_BYTES),
        ),
        shortfall_bytes=prediction.shortfall_bytes,
        reason=prediction.reason,
        ways_out=ways_out or [],
        plan=in_words(decisions),
        assumptions=[
            *assumptions(question, simulation),
            *_host_memory(question, prediction, rivals),
            *(_searched(question) if searched else []),
            *goodput_assumptions(question, goodput, layout.devices),
        ],
        left_out=left_out(question) if searched else [],
    )


def device_memory(simulation: Simulation, prediction: Prediction, *, planned_arena: bool) -> DeviceMemory:
    """Return what a device of the fullest stage needs: the arena or what is reserved, and the reserve."""
    fullest = simulation.fullest
    kind: PeakKind = "arena" if planned_arena else "live"
    peak_bytes = prediction.peak_device_bytes
    if prediction.reserved_bytes is not None:
        kind, peak_bytes = "reserved", prediction.reserved_bytes
    memory = fullest.memory
    needed, capacity = peak_bytes + memory.reserve_bytes, memory.device_capacity_bytes
    if prediction.status == "gpu_oom":
        needed = capacity + prediction.shortfall_bytes
    return DeviceMemory(
        stage=simulation.stages.index(fullest),
        stages=len(simulation.stages),
        peak=kind,
        peak_bytes=peak_bytes,
        live_bytes=simulation.most_live.memory.device.bytes,
        reserve_bytes=memory.reserve_bytes,
        needed_bytes=needed,
        capacity_bytes=capacity,
        free_bytes=max(0, capacity - needed),
        allocation_retries=prediction.allocation_retries,
        allocator_wait_s=sum(
            (s.seconds for s in prediction.stalls if (s.lane, s.waits_for) == (COMPUTE, ALLOCATOR)), 0.0
        ),
    )


def in_words(decisions: Decisions) -> str:
    """Return a plan in words: its degrees, what happens to activations, its pipeline schedule and subsequences."""
    layout = decisions.layout
    parts = [f"{layout_label(layout)} on {counted(layout.devices, 'GPU')}", _activations(decisions)]
    if layout.pp > 1:
        parts.append(f"{layout.schedule} schedule of {counted(decisions.micro_batches, 'micro-batch', 'es')}")
    if layout.subsequences > 1:
        parts.append(f"{layout.subsequences} subsequences")
    if decisions.swap_dtype == "fp8" and swaps(decisions):
        parts.append("swapped rows in FP8")
    if decisions.fp8 != "none":
        alone = ", weights in FP8 alone" if decisions.fp8_params else ""
        experts = " and experts" if decisions.fp8_experts else ""
        parts.append(f"linear products{experts} in FP8 ({decisions.fp8}{alone})")
    if decisions.loss_chunk_tokens:
        parts.append(f"loss in chunks of {format_tokens(decisions.loss_chunk_tokens)} tokens")
    if decisions.allocator_limit_gib:
        parts.append(f"PyTorch's allocator limited to {decisions.allocator_limit_gib} GiB of the device")
    return "; ".join(parts)


def _activations(decisions: Decisions) -> str:
    """Return what happens to activations."""
    if decisions.recompute not in ("none", "tokenwise"):
        return Policy.of(decisions).label
    kept = decisions.recompute == "none"
    if decisions.alpha == 1:
        return "all activations are swapped to host memory"
    if not decisions.swapped_tokens:
        recomputed = "activations of all tokens are recomputed, attention's outputs are swapped to host memory"
        return "all activations are kept on the device" if kept else recomputed
    percent = f"{100 * decisions.alpha:.3g} %"
    if kept:
        return f"{percent} of the tokens' activations are swapped to host memory, the rest is kept"
    return f"activations of {percent} of the tokens are swapped to host memory, the rest is recomputed"


def _host_memory(question: Question, prediction: Prediction, rivals: Collection[Prediction]) -> list[Assumption]:
    """Return the host memory that a node is assumed to have, where the plan pins some, and what that buys."""
    if not prediction.peak_host_bytes_per_node:
        return []
    cluster, hardware = question.cluster, question.hardware
    held = cluster.host_memory_bytes or hardware.host_memory_bytes
    match cluster.host_memory_bytes.source if cluster.host_memory_bytes else None:
        case None:
            where = "from the profile"
            if cluster.devices_per_node < hardware.devices:
                where += f"; all of a node of {hardware.devices} GPUs, of which others may use a part"
        case str(source) if source == OPTION_SOURCE:
            where = "as given"
        case str(source):
            where = cluster.sources[source].text if source == PART_OF_NODE else "from the cluster's file"
    value = f"{format_bytes(int(held.value))} a node, {where}{_less_host_memory(prediction, rivals)}"
    return [Assumption(name="host memory", value=value, option="--host-memory-gib")]


def _less_host_memory(prediction: Prediction, rivals: Collection[Prediction]) -> str:
    """Return which plan needs far less host memory and is nearly as fast; empty where none was evaluated."""
    step_s, host = prediction.step_s, prediction.peak_host_bytes_per_node
    if step_s is None:
        return ""
    for other in sorted(rivals, key=lambda one: one.step_s or inf):
        if other.step_s is None or other.step_s > (1 + MUCH_SLOWER) * step_s:
            break
        if other.peak_host_bytes_per_node <= MUCH_LESS * host:
            saved, slower = format_bytes(host - other.peak_host_bytes_per_node), max(0.0, other.step_s / step_s - 1)
            enough_gib = next(2**power for power in range(40) if 2**power * GIB >= other.peak_host_bytes_per_node)
            takes = f"--host-memory-gib {enough_gib} takes {format_seconds(other.step_s)}"
            return f"; {saved} of it buy {100 * slower:.1f} %: {takes}"
    return ""


def _searched(question: Question) -> list[Assumption]:
    """Return which levels of ZeRO were searched where that depends on the machine."""
    if question.pins.zero is not None or question.zeros == question.preset.zeros:
        return []
    value = f"ZeRO {' and '.join(map(str, question.zeros))}, as GPUs of a node reach each other over PCIe alone"
    return [Assumption(name="search", value=value, option="--zero")]
