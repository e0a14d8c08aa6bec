"""Activations that are swapped in FP8: programs pass the checkers, bytes are as by hand, and prices know them."""

from __future__ import annotations

from typing import Any, get_args

import msgspec
import pytest

from memo_sim.contract.catalog import load_cluster, load_model
from memo_sim.contract.knobs import SwapDtype
from memo_sim.contract.model import Model
from memo_sim.contract.plan import Layout
from memo_sim.planning.question import Pins, Question
from memo_sim.planning.search import search
from memo_sim.planning.subsequences import offloaded_bytes
from memo_sim.program.analysis.columns import expand
from memo_sim.program.analysis.liveness import live_bytes, liveness, peak
from memo_sim.program.ir.instruction import Lane
from memo_sim.program.ir.program import Program
from memo_sim.program.ir.work import Copy
from memo_sim.program.layout.shape import shape_of
from memo_sim.program.layout.skeletal import skeletal_tensors
from memo_sim.program.lower import lower
from tests.sim.small_programs import EXPERTS, GPT, LATENT, LLAMA, decide, faults_of

ROUNDED: dict[str, Any] = {"swap_dtype": "fp8"}
CHECKED: dict[str, tuple[Model, Layout, tuple[str, float], dict[str, Any]]] = {
    "full swap": (GPT, Layout(), ("none", 1.0), {}),
    "partial swap, tp": (LLAMA, Layout(tp=2, sequence_parallel=True, cp=2), ("none", 0.5), {}),
    "token-wise, Ulysses": (LLAMA, Layout(ulysses=2, dp=2, zero=3), ("tokenwise", 0.5), {}),
    "inputs alone, stages": (GPT, Layout(pp=2), ("full", 1.0), {}),
    "row-wise": (LLAMA, Layout(), ("rowwise", 1.0), {"mlp_chunk_tokens": 512}),
    "experts": (EXPERTS, Layout(dp=2, ep=2), ("tokenwise", 0.5), {}),
    "latents": (LATENT, Layout(), ("tokenwise", 0.5), {}),
    "window": (GPT, Layout(subsequences=2), ("none", 1.0), {"offload_window": 1}),
}


@pytest.mark.parametrize("name", CHECKED)
def test_programs_pass_the_independent_checkers(name: str) -> None:
    model, layout, policy, fields = CHECKED[name]
    assert faults_of(decide(model, layout, policy, **ROUNDED, **fields)) == []


def lane_bytes(program: Program, lane: Lane) -> int:
    """Return the bytes that one layer's offload or prefetch copies."""
    works = [i.work for t in program.templates for i in t.instructions if i.lane == lane]
    return sum(work.bytes for work in works if isinstance(work, Copy))


def test_bytes_of_copies_and_of_host_memory_are_as_by_hand() -> None:
    decisions = decide(LLAMA, policy=("none", 1.0), **ROUNDED)
    plain = msgspec.structs.replace(decisions, swap_dtype="same")
    (program,), (wide,) = lower(decisions), lower(plain)
    tensors = skeletal_tensors(LLAMA, shape_of(decisions), "bf16")
    by_hand = sum(t.tokens * (4 * t.features if t.dtype == "fp32" else t.features + 4) for t in tensors)
    for lane in (Lane.D2H, Lane.H2D):
        assert lane_bytes(program, lane) == by_hand
        assert lane_bytes(wide, lane) == sum(t.bytes for t in tensors)
    host = [peak(live_bytes(liveness(p, expand(p)), device=False)).bytes for p in (program, wide)]
    assert host[0] * sum(t.bytes for t in tensors) == host[1] * by_hand
    assert offloaded_bytes(decisions) * decisions.local_tokens == by_hand
    assert program.templates != wide.templates


def test_only_rows_in_the_plans_dtype_are_rounded() -> None:
    """Statistics and what a router decided have to come back as they were."""
    (program,) = lower(decide(EXPERTS, policy=("tokenwise", 0.5), **ROUNDED))
    moved = {i.name: i for t in program.templates for i in t.instructions if i.lane in (Lane.D2H, Lane.H2D)}
    rounded = {name.split("/")[1].removesuffix(".round") for name, i in moved.items() if i.op == "swap.round"}
    assert rounded == {"x", "norm1", "qk_raw", "qkv", "attn", "resid", "norm2", "up", "act"}
    assert rounded == {name.split("/")[1].removesuffix(".widen") for name, i in moved.items() if i.op == "swap.widen"}


@pytest.mark.parametrize("policy", [("none", 0.0), ("full", 0.0), ("selective", 0.0)], ids=str)
def test_a_plan_that_swaps_nothing_has_the_same_program(policy: tuple[str, float]) -> None:
    decisions = decide(LLAMA, policy=policy, **ROUNDED)
    assert lower(decisions) == lower(msgspec.structs.replace(decisions, swap_dtype="same"))


def asked(swap_dtype: SwapDtype, **pins: Any) -> Question:
    cluster, hardware = load_cluster("h100-1x1")
    model = msgspec.structs.replace(load_model("gpt-7b"), layers=6)
    fields: dict[str, Any] = {"seq_tokens": 65536, "swap_dtype": swap_dtype, "states": "pure-bf16"}
    return Question(model=model, cluster=cluster, hardware=hardware, pins=Pins(attention="flash2", **pins), **fields)


def test_a_step_that_waits_for_copies_is_shorter_and_takes_half_of_the_host() -> None:
    found = {}
    for dtype in get_args(SwapDtype):
        best = search(asked(dtype, recompute="none", alpha=1.0)).best
        assert best is not None
        assert best.decisions.swap_dtype == dtype
        found[dtype] = best.prediction
    narrow, wide = found["fp8"], found["same"]
    assert narrow.peak_host_bytes_per_node == pytest.approx(0.5 * wide.peak_host_bytes_per_node, rel=0.02)
    assert narrow.step_s is not None
    assert wide.step_s is not None
    assert narrow.step_s < wide.step_s
    assert narrow.moved_bytes.d2h < 0.52 * wide.moved_bytes.d2h
    # The kernels that round take time of the lanes, less than they save.
    for lane in ("d2h", "h2d"):
        assert 0.5 * wide.lanes[lane] < narrow.lanes[lane] < wide.lanes[lane]


def test_lower_bounds_leave_out_no_plan_that_swaps_in_fp8() -> None:
    question = asked("fp8", rowwise="torch")
    pruned, every = search(question), search(question, prune=False)
    assert pruned.best is not None
    assert every.best is not None
    assert pruned.best.decisions == every.best.decisions
    assert pruned.best.prediction == every.best.prediction
