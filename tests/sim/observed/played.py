"""A simulated step written as PyTorch's profiler would have recorded it."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from dataclasses import replace

from memo_sim.contract.hardware import Hardware
from memo_sim.costs.collective import CollectiveTimes
from memo_sim.engine.simulate import Simulation
from memo_sim.observed.rowwise_operators import OWN_KINDS
from memo_sim.program.ir.instruction import Instruction
from memo_sim.program.ir.work import Attention, BatchedGemm, Collective, Copy, Gemm, Rowwise, Work
from memo_sim.program.operators.framework_kernels import framework_kernels, library_of
from tests.sim.observed.recorded import Trace

Spans = list[tuple[Instruction, float, float]]
OPERATORS = {kind: name for name, kind in OWN_KINDS.items()}


def spans_of(simulation: Simulation) -> Spans:
    """Return the first stage's instructions with start and end in seconds."""
    stage = simulation.stages[0]
    columns, playback = stage.columns, stage.playback
    rows = zip(columns.template, columns.position, playback.start_s, playback.end_s, strict=True)
    return [(stage.program.templates[t].instructions[i], float(a), float(b)) for t, i, a, b in rows]


def kind_of(work: Work) -> str:
    match work:
        case Gemm() | BatchedGemm():
            return f"product.{work.gemm_pass}"
        case Attention():
            return "attention.bwd" if work.backward else "attention"
        case Copy():
            return f"copy.{work.direction}"
        case Collective():
            return f"collective.{work.kind}"
        case _:
            return "row-wise"


def seconds_by_kind(simulation: Simulation) -> dict[str, float]:
    found: dict[str, float] = defaultdict(float)
    for instruction, start, end in spans_of(simulation):
        found[kind_of(instruction.work)] += end - start
    return dict(found)


def recorded(simulation: Simulation, hardware: Hardware) -> Trace:
    """Return the step as a trace: one kernel for each instruction, or for each kernel of a framework's operator."""
    spans = spans_of(simulation)
    ranks = simulation.decisions.layout.devices
    trace = Trace()
    trace.distributed = {"backend": "nccl", "rank": 0, "world_size": ranks}
    step_us = max(end for *_, end in spans) * 1e6
    trace.add("user_annotation", "ProfilerStep#2", 0.0, step_us + 100)
    for instruction, start, end in spans:
        if end > start:
            _record(trace, simulation, hardware, instruction, (start * 1e6, end * 1e6))
    assert trace.now < step_us, "a kernel would be launched after the step"
    return trace


def _record(
    trace: Trace, simulation: Simulation, hardware: Hardware, instruction: Instruction, runs: tuple[float, float]
) -> None:
    work = instruction.work
    match work:
        case Gemm():
            if work.gemm_pass != "fprop":
                trace.add("cpu_op", "autograd::engine::evaluate_function: MmBackward0", trace.now, 35)
            trace.next("aten::mm", "gemm", runs, shapes=[[work.m, work.k], [work.k, work.n]])
        case Attention():
            query = [work.batch, work.q_tokens, work.heads, work.head_dim]
            key = [work.batch, work.k_tokens, work.kv_heads, work.head_dim]
            first: list[list[int]] = [query] if work.backward else []
            flag = [""] * (11 if work.backward else 5) + [str(work.mask == "causal")]
            name = f"flash_attn::_flash_attn_{'backward' if work.backward else 'forward'}"
            trace.next(name, "flash", runs, shapes=[*first, query, key, key], values=flag)
        case Copy():
            name = "Memcpy DtoH (Device -> Pinned)" if work.direction == "d2h" else "Memcpy HtoD (Pinned -> Device)"
            stream = 20 if work.direction == "d2h" else 21
            trace.next("aten::copy_", name, runs, cat="gpu_memcpy", stream=stream, bytes=work.bytes)
        case Collective():
            _collective(trace, simulation, hardware, work, runs)
        case Rowwise():
            pieces = list(_kernels(work, simulation, hardware))
            total = sum(share for *_, share in pieces)
            now, end = runs
            for name, shapes, kinds, values, share in pieces:
                after = now + (end - runs[0]) * share / total
                trace.next(name, "elementwise", (now, after), shapes=shapes, kinds=kinds, values=values)
                now = after
        case _:
            trace.next("custom::other", "other", runs)


def _collective(
    trace: Trace, simulation: Simulation, hardware: Hardware, work: Collective, runs: tuple[float, float]
) -> None:
    """Record a kernel for each call of the library, with its share of the time."""
    calls = [replace(work, kind=kind, bytes=size, calls=()) for kind, size in work.calls] or [work]
    times = CollectiveTimes(hardware, simulation.cluster, simulation.decisions.layout)
    seconds = [times.seconds(call, set()) for call in calls]
    now, end = runs
    for call, share in zip(calls, seconds, strict=True):
        after = now + (end - runs[0]) * share / sum(seconds)
        _call(trace, call, (now, after))
        now = after


def _call(trace: Trace, work: Collective, runs: tuple[float, float]) -> None:
    whole = work.bytes // 2
    part = whole // work.ranks
    gathers = work.kind == "all_gather"
    args = {
        "Collective name": work.kind.replace("_", ""),
        "In msg nelems": part if gathers else whole,
        "Out msg nelems": whole if gathers else part,
        "Group size": work.ranks,
        "dtype": "BFloat16",
        "Process Group Ranks": str(list(range(work.ranks))),
    }
    trace.next(f"c10d::{work.kind}_", "ncclDevKernel", runs, stream=30, **args)


Piece = tuple[str, list[list[int]], list[str], list[str], float]


def _kernels(work: Rowwise, simulation: Simulation, hardware: Hardware) -> Iterator[Piece]:
    """Yield the operators whose kernels do a row-wise instruction, each with its share of the time."""
    library = library_of(simulation.decisions.kernels.rowwise)
    curves = hardware.framework_rowwise_bytes_per_s.get(library, {}) if library else {}
    found = framework_kernels(work, library) if library else ()
    for kernel in found:
        size = kernel.moved_bytes(work) // kernel.launches
        streaming = size / curves[kernel.pattern].y[-1] if kernel.pattern in curves and size else 0.0
        for _ in range(kernel.launches):
            share = max(hardware.launch_floor_s.value, streaming)
            yield (*_pattern(kernel.pattern, size), share)
    if not found:
        name = OPERATORS.get(work.kind, "") if work.kind in hardware.rowwise_bytes_per_s else ""
        if name:
            yield (*_own(name, work.moved_bytes), 1.0)
        elif {work.kind, work.kind.partition(".")[0]} & set(hardware.rowwise_bytes_per_s) or curves:
            yield "custom::fused", [], [], [], 1.0
        else:
            yield (*_pattern("elementwise", work.moved_bytes), 1.0)


WIDE, NARROW = "float", "c10::BFloat16"


def _own(name: str, moved_bytes: int) -> tuple[str, list[list[int]], list[str], list[str]]:
    """Return an operator of the program that is one of PyTorch's."""
    tensors = 3 if name in ("add", "gelu_backward") else 1 if name == "zero_" else 2
    inputs = 1 if name in ("gelu", "zero_") else 2
    return f"aten::{name}", [[moved_bytes // tensors // 2, 1]] * inputs, [NARROW] * inputs, []


def _pattern(pattern: str, moved_bytes: int) -> tuple[str, list[list[int]], list[str], list[str]]:
    """Return an operator of a pattern that moves so many bytes."""
    if moved_bytes < 1024:
        return "aten::add", [[2, 2]] * 2, [NARROW] * 2, []
    one = [moved_bytes // 4, 1]
    return {
        "elementwise": ("aten::silu", [one], [NARROW], []),
        "widen": ("aten::copy_", [[moved_bytes // 6, 1]] * 2, [WIDE, NARROW], []),
        "broadcast": ("aten::mul", [[moved_bytes // 8 // 64, 64], [1, 1, 1], [2, 1]], [WIDE] * 3, []),
        "strided": ("aten::mul", [[moved_bytes // 4 // 64, 64], [64]], [NARROW] * 2, []),
        "row_sum": ("aten::sum", [[moved_bytes // 4, 1]], [WIDE], ["", "[-1]"]),
        "column_sum": ("aten::sum", [[moved_bytes // 2, 1]], [NARROW], ["", "[0]"]),
        "norm": ("aten::native_layer_norm", [one], [NARROW], []),
        "norm_backward": ("aten::native_layer_norm_backward", [[moved_bytes // 6, 1]] * 2, [NARROW] * 2, []),
        "softmax": ("aten::_log_softmax", [[moved_bytes // 8, 1]], [WIDE], []),
    }.get(pattern) or ("custom::foreach", [], [], [])
