"""Recompute by operator: what is kept, what runs again, and what it does not go with (gradients: tests/exec_cpu)."""

from __future__ import annotations

from collections import Counter

import pytest

from memo_sim.contract.catalog import load_cluster, load_model
from memo_sim.contract.model import Model
from memo_sim.contract.plan import Decisions, Layout
from memo_sim.planning.presets import FULL_RECOMPUTE, KEEP, OPERATOR_RECOMPUTE
from memo_sim.planning.question import Pins, Question
from memo_sim.planning.search import search
from memo_sim.planning.space import policies
from memo_sim.program.analysis.columns import expand
from memo_sim.program.analysis.edges import derive_edges
from memo_sim.program.ir.instruction import BufferClass, Lane
from memo_sim.program.ir.work import Gemm
from memo_sim.program.lower import lower
from memo_sim.program.verify.program import check_edges, check_program
from tests.sim.small_programs import GPT, LLAMA, decide

LAYOUTS = [
    Layout(),
    Layout(tp=2),
    Layout(tp=2, sequence_parallel=True),
    Layout(cp=4, zero=3, cp_exchange="all_gather"),
    Layout(ulysses=2, dp=2, zero=3),
]
STAGED = [Layout(pp=2), Layout(pp=2, schedule="zero-bubble"), Layout(pp=2, tp=2, sequence_parallel=True)]
POLICY = ("operators", 0.0)


def again(decisions: Decisions) -> Counter[str]:
    """Return how often each operator of compute is recomputed, over all layers and micro-batches of a stage."""
    return Counter(
        instruction.op
        for name, instruction in lower(decisions)[0].walk()
        if name.split("/")[-2] == "rec" and instruction.lane is Lane.COMPUTE
    )


def kept_features(model: Model, layout: Layout, policy: tuple[str, float]) -> int:
    """Return the features a token of a rank's layer that live from forward to backward, in the plan's dtype."""
    program = lower(decide(model, layout, policy))[0]
    families = [f for f in program.families if f.buffer_class is BufferClass.SKELETAL and f.name != "head.x"]
    return sum(f.tokens * f.features for f in families if f.dtype == "bf16") // max(f.tokens for f in families)


@pytest.mark.parametrize(
    ("model", "layout"),
    [(model, layout) for model in (GPT, LLAMA) for layout in LAYOUTS] + [(LLAMA, layout) for layout in STAGED],
    ids=str,
)
def test_every_program_passes_the_independent_checkers(model: Model, layout: Layout) -> None:
    for program in lower(decide(model, layout, POLICY)):
        columns = expand(program)
        assert check_program(program, columns) == []
        assert check_edges(columns, derive_edges(columns)) == []


def test_every_second_product_runs_again() -> None:
    found = again(decide(GPT, Layout(), POLICY))
    # The projection; up is kept, and nothing reads what down gives.
    assert found["linear"] == GPT.layers * decide(GPT, Layout(), POLICY).micro_batches
    gated = again(decide(LLAMA, Layout(), POLICY))
    passes = LLAMA.layers * decide(LLAMA, Layout(), POLICY).micro_batches
    assert (gated["linear"], gated["linear.from_gate"]) == (passes, passes)
    for counts in (found, gated):
        assert not [op for op in counts if op.startswith("attention")]


def test_the_half_that_runs_again_is_half_a_product() -> None:
    (program,) = lower(decide(LLAMA, Layout(), POLICY))
    works = {i.op: i.work for t in program.templates for i in t.instructions if i.op.startswith("linear.")}
    forward, half = works["linear.to_gate"], works["linear.from_gate"]
    assert isinstance(forward, Gemm)
    assert isinstance(half, Gemm)
    assert half.flops == forward.flops / 2


def test_sums_over_tensor_parallel_ranks_are_kept() -> None:
    assert "linear" not in again(decide(GPT, Layout(tp=2, sequence_parallel=True), POLICY))
    ids = [name for name, _ in lower(decide(GPT, Layout(tp=2, sequence_parallel=True), POLICY))[0].walk()]
    assert not [name for name in ids if "/rec/" in name and "scatter" in name]


@pytest.mark.parametrize("model", [GPT, LLAMA], ids=["gpt", "llama"])
def test_it_keeps_the_input_attention_and_every_second_product(model: Model) -> None:
    hidden, ffn = model.hidden, model.ffn_hidden
    q, kv = model.heads * model.head_dim, model.kv_heads * model.head_dim
    raw = q + kv if model.qk_norm else 0  # the inputs of the norms of queries and keys
    wanted = hidden + raw + (q + 2 * kv) + q + ffn  # x, qkv, attention's output, gate or up
    assert kept_features(model, Layout(), POLICY) == wanted
    # With two ranks: x and the residual whole (no sequence parallelism), half of the rest.
    assert kept_features(model, Layout(tp=2), POLICY) == 2 * hidden + (wanted - hidden) // 2


def test_time_and_memory_lie_between_keep_and_full_recompute() -> None:
    cluster, hardware = load_cluster("h100-1x8")
    found = {}
    for policy in (KEEP, OPERATOR_RECOMPUTE, FULL_RECOMPUTE):
        asked = Question(
            model=load_model("llama-7b"),
            cluster=cluster,
            hardware=hardware,
            seq_tokens=4096,
            system="fsdp",
            pins=Pins(recompute=policy.recompute, dp=8),
            global_batch=8,
        )
        assert policies(asked) == (policy,)
        best = search(asked).best
        assert best is not None
        assert best.policy == policy
        found[policy.recompute] = (best.prediction.step_s or 0.0, best.prediction.peak_device_bytes)
    (keep_s, keep_bytes), (own_s, own_bytes), (full_s, full_bytes) = found.values()
    assert keep_s < own_s < full_s
    assert full_bytes < own_bytes < keep_bytes
