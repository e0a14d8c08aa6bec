"""Plain attention (no flash kernel): bytes of its scores, its products, refused options, and prices."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from memo_sim.contract.catalog import load_cluster
from memo_sim.contract.errors import Infeasible
from memo_sim.contract.plan import Decisions, Kernels, Layout
from memo_sim.costs.pricing import Pricer
from memo_sim.engine.simulate import simulate
from memo_sim.program.analysis.columns import expand
from memo_sim.program.analysis.edges import derive_edges
from memo_sim.program.ir.kinds import FamilyKind
from memo_sim.program.ir.program import Program
from memo_sim.program.ir.work import BatchedGemm, Gemm, Rowwise
from memo_sim.program.lower import lower
from memo_sim.program.verify.program import check_edges, check_program
from memo_sim.program.verify.stages import check_stages
from tests.refusals import refused
from tests.sim.small_programs import GPT, LLAMA, decide

SEQ, BATCH = 1024, 2
SCORES = BATCH * GPT.heads * SEQ * SEQ


def plain(model=GPT, layout: Layout | None = None, policy=("none", 0.0), **more) -> Decisions:
    fields = {"seq_tokens": SEQ, "micro_batch": BATCH, "global_batch": 2 * BATCH, "loss_chunk_tokens": 0, **more}
    return decide(model, layout, policy, kernels=Kernels(attention="plain"), **fields)


def works(program: Program, template: str, *, prefix: str) -> list[object]:
    chosen = next(t for t in program.templates if t.name == template)
    return [i.work for i in chosen.instructions if i.name.startswith(prefix)]


@pytest.mark.parametrize("recompute", ["none", "selective", "full"])
@pytest.mark.parametrize("layout", [Layout(), Layout(tp=2, sequence_parallel=True), Layout(ulysses=2), Layout(dp=2)])
@pytest.mark.parametrize("model", [GPT, LLAMA])
def test_every_program_passes_the_checkers(model, layout: Layout, recompute: str) -> None:
    (program,) = lower(plain(model, layout, (recompute, 0.0), global_batch=2 * BATCH * layout.dp))
    columns = expand(program)
    assert check_program(program, columns) == []
    assert check_edges(columns, derive_edges(columns)) == []


def test_five_bytes_a_score_are_kept_or_rebuilt() -> None:
    peaks = {}
    for kernel in ("plain", "flash2"):
        for recompute in ("none", "selective", "full"):
            decisions = msgspec.structs.replace(
                plain(policy=(recompute, 0.0), dtype="bf16"), kernels=Kernels(attention=kernel)
            )
            (program,) = lower(decisions, micro_batches=1)
            kept = [f for f in program.families if f.name.startswith("skeletal.")]
            peaks[kernel, recompute] = sum(f.bytes * f.count for f in kept)
    log_sum_exp = 4 * BATCH * SEQ * GPT.heads
    assert peaks["plain", "none"] - peaks["flash2", "none"] == GPT.layers * (5 * SCORES - log_sum_exp)
    assert peaks["plain", "selective"] == peaks["flash2", "selective"]
    assert peaks["plain", "full"] == peaks["flash2", "full"]


def test_forward_has_two_products_over_all_pairs_and_backward_four() -> None:
    (program,) = lower(plain())
    products = {
        name: sum(w.flops for w in works(program, name, prefix=prefix) if isinstance(w, BatchedGemm))
        for name, prefix in (("layer.fwd", "fwd/"), ("layer.bwd", "bwd/"))
    }
    pairs = 2.0 * SCORES * GPT.head_dim
    assert products == {"layer.fwd": 2 * pairs, "layer.bwd": 4 * pairs}


def test_bytes_a_score_of_each_pass() -> None:
    (program,) = lower(plain())
    forward, backward = (
        {w.kind: w.moved_bytes / SCORES for w in works(program, name, prefix=f"{phase}/attn") if isinstance(w, Rowwise)}
        for name, phase in (("layer.fwd", "fwd"), ("layer.bwd", "bwd"))
    )
    # Softmax reads half of the scores and writes all probabilities. Dropout reads two bytes and writes three (mask).
    assert (forward["softmax"], forward["dropout"]) == (3, 5)
    assert (backward["softmax"], backward["dropout"]) == (6, 5)


@pytest.mark.parametrize(
    ("layout", "policy", "fields"),
    [
        (Layout(cp=2), ("none", 0.0), {"where": "layout.cp", "got": "2", "wanted": "1"}),
        (Layout(), ("none", 1.0), {"where": "decisions.swapped_tokens", "got": "1024 with recompute none"}),
        (Layout(), ("tokenwise", 0.0), {"where": "decisions.swapped_tokens", "got": "0 with recompute tokenwise"}),
    ],
)
def test_what_has_no_scores_to_itself_is_refused(
    layout: Layout, policy: tuple[str, float], fields: dict[str, str]
) -> None:
    decisions = plain(layout=layout, policy=policy, micro_batch=1)
    with refused(Infeasible, what="lain attention", **fields):
        lower(decisions)


def test_a_batched_product_is_bound_by_flops_or_by_memory_traffic_of_its_scores() -> None:
    cluster, hardware = load_cluster("a100-1x8")
    pricer = Pricer(hardware, cluster, Layout())
    values = BatchedGemm(64, 2048, 64, 2048, "fprop", "fp16")
    assert pricer.seconds(values) == pytest.approx(2 * values.elements / 1650e9, rel=0.01)
    assert pricer.seconds(values) > 3 * values.flops / 312e12
    deep = BatchedGemm(2, 4096, 4096, 4096, "fprop", "fp16")
    assert pricer.seconds(deep) == pytest.approx(pricer.seconds(Gemm(8192, 4096, 4096, "fprop", "fp16")), rel=1e-9)


def test_long_sequences_cost_more_than_with_a_flash_kernel() -> None:
    cluster, hardware = load_cluster("a100-1x1")

    def step(kernel: str, seq: int) -> float:
        decisions = plain(seq_tokens=seq, micro_batch=1, global_batch=1, dtype="bf16", policy=("full", 0.0))
        chosen = msgspec.structs.replace(decisions, kernels=Kernels(attention=kernel))
        found = simulate(chosen, hardware, cluster).prediction.step_s
        assert found is not None
        return found

    assert step("plain", 8192) > 2 * step("flash2", 8192)
    assert step("plain", 8192) > 8 * step("plain", 2048)


@pytest.mark.parametrize(("dtype", "grad_sums"), [("fp16", "auto"), ("bf16", "params")])
def test_gradients_in_the_parameters_dtype_are_added_by_separate_kernels(dtype: Any, grad_sums: Any) -> None:
    asked = {"layout": Layout(dp=2), "memory_policy": "eager", "global_batch": 4 * BATCH}
    half, wide = (
        lower(plain(**asked, dtype=chosen, grad_sums=sums))[0]
        for chosen, sums in ((dtype, grad_sums), ("bf16", "auto"))
    )
    assert {f.dtype for f in half.all_families if f.kind is FamilyKind.GRADS} == {dtype}

    def reduced(program: Program) -> int:
        return sum(i.work.bytes for _, i in program.walk() if i.op == "grads.all_reduce")

    def added(program: Program) -> int:
        return sum(i.op == "grad.accumulate" for _, i in program.walk())

    assert 2 * reduced(half) == reduced(wide)
    # Each layer has four products with a weight gradient in each micro-batch.
    assert added(half) - added(wide) == 4 * GPT.layers * half.micro_batches
    columns = expand(half)
    assert check_program(half, columns) == []
    assert check_edges(columns, derive_edges(columns)) == []


@pytest.mark.parametrize("recompute", ["none", "full"])
def test_eager_ranks_with_whole_tensors_send_their_shards_between_stages(recompute: str) -> None:
    layout = Layout(tp=2, pp=5, overlap_p2p=False)
    eager, planned = (
        lower(plain(layout=layout, policy=(recompute, 0.0), memory_policy=policy)) for policy in ("eager", "planned")
    )

    def sent(programs: tuple[Program, ...]) -> list[int]:
        return sorted(i.work.bytes for p in programs for _, i in p.walk() if i.op == "send")

    assert sent(eager) == [size // 2 for size in sent(planned)]
    for program in eager:
        columns = expand(program)
        assert check_program(program, columns) == []
        assert check_edges(columns, derive_edges(columns)) == []
    assert check_stages(eager) == []
