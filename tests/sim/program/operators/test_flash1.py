"""FlashAttention 1: its workspace, keys and values repeated for every query head, programs that pass the checkers."""

from __future__ import annotations

import msgspec
import pytest

from memo_sim.contract.catalog import load_cluster
from memo_sim.contract.plan import Kernels, Layout
from memo_sim.costs.pricing import Pricer
from memo_sim.program.ir.work import Attention
from memo_sim.program.operators.workspaces import attention_workspace_bytes, repeated_kv_bytes
from tests.sim.small_programs import GPT, LLAMA, decide, faults_of

TOKENS, HEADS, DIM = 4096, 32, 128


def call(kernel: str = "flash1", *, kv_heads: int = HEADS, backward: bool = False) -> Attention:
    return Attention(1, TOKENS, TOKENS, "causal", HEADS, kv_heads, DIM, backward, kernel, "bf16")


@pytest.mark.parametrize("backward", [False, True])
def test_an_fp32_sum_and_one_number_a_row(backward: bool) -> None:
    """o_tmp and the log-sum-exp forward, dq_tmp and softmax_d backward (csrc/flash_attn/fmha_api.cpp, v1.0.9)."""
    rows = TOKENS * HEADS
    assert attention_workspace_bytes(call(backward=backward), 1) == 4 * rows * DIM + 4 * rows
    assert attention_workspace_bytes(call(backward=backward), 4) == rows * DIM + rows


def test_the_triton_version_sums_its_output_in_registers() -> None:
    rows = TOKENS * HEADS
    assert attention_workspace_bytes(call("triton-flash"), 1) == 2 * 4 * rows
    assert attention_workspace_bytes(call("triton-flash", backward=True), 1) == 4 * rows * DIM + 4 * rows


def test_grouped_keys_and_values_exist_for_every_query_head() -> None:
    repeated = 2 * 2 * TOKENS * HEADS * DIM
    whole, grouped = call(), call(kv_heads=8)
    assert (repeated_kv_bytes(whole), repeated_kv_bytes(grouped)) == (0, repeated)
    assert repeated_kv_bytes(call("flash2", kv_heads=8)) == 0
    for backward, times in ((False, 1), (True, 2)):
        more = attention_workspace_bytes(call(kv_heads=8, backward=backward), 1)
        assert more - attention_workspace_bytes(call(backward=backward), 1) == times * repeated


def test_repeating_takes_the_time_of_its_bytes() -> None:
    cluster, hardware = load_cluster("a100-1x8")
    pricer = Pricer(hardware, cluster, Layout())
    bytes_per_s = hardware.memory_bound_bytes_per_s.y[-1]
    repeated = repeated_kv_bytes(call(kv_heads=8))
    for backward, times in ((False, 1), (True, 2)):
        more = pricer.seconds(call(kv_heads=8, backward=backward)) - pricer.seconds(call(backward=backward))
        assert more == pytest.approx(times * 1.25 * repeated / bytes_per_s, rel=0.05)
    assert pricer.seconds(call("flash2", kv_heads=8)) == pricer.seconds(call("flash2"))


@pytest.mark.parametrize("model", [GPT, LLAMA], ids=lambda model: model.name)
@pytest.mark.parametrize("layout", [Layout(), Layout(cp=2), Layout(tp=2, sequence_parallel=True)], ids=str)
def test_every_program_passes_the_checkers(model, layout: Layout) -> None:
    decisions = decide(model, layout, ("full", 0.0))
    assert faults_of(msgspec.structs.replace(decisions, kernels=Kernels(attention="flash1"))) == []
