"""Tests that a step's recorded memory requests are those of its program, and that undeclared requests are found."""

from collections.abc import Callable
from typing import Any

import pytest
import torch

from memo_exec.kernels import KERNELS, LIBRARY_SCRATCH, Call
from memo_exec.memory.binding import schedule
from memo_exec.observe.fake_player import observe_fake
from memo_exec.observe.memory_history import read_history
from memo_exec.observe.observed import LARGE_BYTES, NOT_OBSERVED, Observed
from memo_sim.contract.catalog import load_model
from memo_sim.contract.errors import CannotRun
from memo_sim.contract.knobs import RowwiseKernel
from memo_sim.contract.plan import Decisions, Kernels
from memo_sim.memory.place import place
from memo_sim.program.analysis.liveness import live_bytes, peak
from memo_sim.program.arena.requests import requests_of
from memo_sim.program.lower import lower
from tests.exec_cpu.kernels.hand_call import allocations
from tests.exec_cpu.small import EXPERT_MODELS, MODELS, decide, gpt, llama, one_step

LONG = 16_384
NUMBER_BYTES = 16
"""Allocations up to this size are ignored, because torch turns Python numbers into tensors of one element."""
THREAD_BYTES = 2**20
"""Attention on a CPU also allocates a tile for its thread, which fake tensors cannot see; the reserve counts it."""


def observed(decisions: Decisions, **options: Any) -> Observed:
    return observe_fake(decisions, lower(decisions)[0], **options)


def long(model: str, kernel: str, tokens: int = LONG, **policy: Any) -> Decisions:
    return Decisions(model=load_model(model), seq_tokens=tokens, kernels=Kernels(attention=kernel), **policy)


@pytest.mark.parametrize(
    ("model", "kernel", "policy"),
    [
        pytest.param("gpt-7b", "torch-flash", {}, marks=pytest.mark.slow),
        ("gpt-7b", "torch-flash", {"recompute": "tokenwise", "swapped_tokens": 2048}),
        pytest.param(
            *("gpt-7b", "torch-flash", {"recompute": "tokenwise", "swapped_tokens": 4096, "loss_chunk_tokens": 4096}),
            marks=pytest.mark.slow,
        ),
        ("llama3-8b", "torch-cudnn", {"recompute": "full", "loss_chunk_tokens": 4096}),
        ("gpt-7b", "flash2", {"recompute": "full", "loss_chunk_tokens": 4096}),
    ],
)
def test_a_step_that_fits_no_machine_here_is_recorded(model: str, kernel: str, policy: dict[str, Any]) -> None:
    """The observed peak is within 2 % of the program's, equal with unseen scratch; no large tensor is undeclared."""
    found = observed(long(model, kernel, **policy))
    assert found.program_peak_bytes > 50 * 2**30
    assert found.ratio == pytest.approx(1, abs=0.02)
    assert found.with_scratch_peak_bytes == pytest.approx(found.program_peak_bytes, rel=1e-3)
    assert found.unexplained == ()
    assert NOT_OBSERVED in found.requests.classes


@pytest.mark.parametrize("name", ["gpt2", "llama", "qwen3"])
def test_fake_tensors_ask_for_what_real_ones_do(name: str) -> None:
    """Compares each operator with torch's profiler on a real step."""
    decisions = decide(MODELS[name], recompute="full")
    real: dict[str, int] = {}

    def counting(op: str) -> Callable[[Call], None]:
        def call(arguments: Call) -> None:
            sizes = allocations(lambda: KERNELS[op](arguments))
            real[op] = max(real.get(op, 0), sum(size for size in sizes if size > NUMBER_BYTES))

        return call

    one_step(decisions, kernels={op: counting(op) for op in KERNELS})
    found = observed(decisions)
    played = {instruction.op for template in lower(decisions)[0].templates for instruction in template.instructions}
    assert found.workspaces.keys() == LIBRARY_SCRATCH & played
    for op, (_, seen) in found.workspaces.items():
        assert seen <= real.pop(op) <= seen + THREAD_BYTES
    assert not any(real.values())
    seen_elsewhere = [
        size
        for name, size, kind in zip(found.requests.ids, found.requests.size_bytes, found.requests.classes, strict=True)
        if kind == "workspace" and ": aten." in name and "/attn" not in name
    ]
    assert all(size <= NUMBER_BYTES for size in seen_elsewhere)


@pytest.mark.parametrize("rowwise", ["torch", "triton"])
@pytest.mark.parametrize(
    "changes",
    [
        pytest.param({"loss": "linear"}, id="linear"),
        pytest.param({"loss": "linear-triton"}, id="linear-triton"),
        pytest.param({"loss": "fused"}, id="fused"),
        pytest.param({"swap_dtype": "fp8", "swapped_tokens": 256}, id="rounded"),
        pytest.param({"loss": "linear-triton", "objective": "grpo"}, id="policy"),
    ],
)
def test_what_triton_plays_is_recorded_without_triton(changes: dict[str, Any], rowwise: RowwiseKernel) -> None:
    """As the attention of libraries, its kernels are not played; what they need is declared."""
    kernels = Kernels(attention="torch-flash", rowwise=rowwise)
    found = observed(decide(llama(layers=3), dtype="bf16", kernels=kernels, **changes))
    assert found.with_scratch_peak_bytes == pytest.approx(found.program_peak_bytes, rel=0.03)
    assert found.unexplained == ()


def test_experts_on_a_cpu_are_refused() -> None:
    with pytest.raises(CannotRun, match="depend on the router"):
        observed(decide(EXPERT_MODELS["mixtral"]))


def test_the_programs_buffers_are_requested_as_it_says() -> None:
    decisions = decide(gpt(), recompute="tokenwise", swapped_tokens=128, global_batch=4)
    (program,) = lower(decisions)
    found, said = observed(decisions).requests, requests_of(program)
    library = schedule(program).library
    sizes = dict(zip(found.ids, found.size_bytes, strict=True))
    missing = [name for name in said.ids if name not in sizes]
    assert len(missing) == len(library)
    assert all(sizes[name] == size for name, size in zip(said.ids, said.size_bytes, strict=True) if name in sizes)
    order = [name for name in found.ids if name in set(said.ids)]
    assert [name for name in order if name in said.ids] == [name for name in said.ids if name in sizes]
    assert place(found, solver="greedy").lower_bound_bytes > 0


def test_a_hidden_tensor_is_found_wherever_it_is_made() -> None:
    """One kernel allocates a hidden tensor: the report lists all its instructions, and the observed peak rises."""
    decisions = decide(llama())

    def greedy(call: Call) -> None:
        torch.empty(LARGE_BYTES + 512, dtype=torch.uint8, device=call["x"].device)
        KERNELS["swiglu"](call)

    plain, found = observed(decisions), observed(decisions, kernels={**KERNELS, "swiglu": greedy})
    assert plain.unexplained == ()
    assert {each.instruction for each in found.unexplained} == {f"m0/s0/l{i}/fwd/act" for i in range(3)}
    assert {each.bytes for each in found.unexplained} == {LARGE_BYTES + 512}
    assert found.observed_peak_bytes > plain.observed_peak_bytes
    assert any("empty" in line and "fwd/act" in line for line in found.lines())


def test_a_hidden_tensor_beside_a_declared_workspace_is_found() -> None:
    decisions = decide(gpt())

    def copying(call: Call) -> None:
        held = torch.empty(2 * LARGE_BYTES, dtype=torch.uint8)
        KERNELS["attention"](call)
        del held

    found = observed(decisions, kernels={**KERNELS, "attention": copying})
    assert {each.instruction for each in found.unexplained} == {f"m0/s0/l{i}/fwd/attn" for i in range(3)}


def history(decisions: Decisions) -> list[dict[str, Any]]:
    """Return the memory history of a step with the requests of its program, including the results of libraries."""
    found = observed(decisions).requests
    rows = zip(found.lower, found.upper, found.size_bytes, found.classes, strict=True)
    events: list[tuple[int, dict[str, Any]]] = []
    for address, (lower_, upper, size, kind) in enumerate(rows):
        if kind == NOT_OBSERVED or lower_ < lasting(decisions):
            continue
        events.append((lower_, {"action": "alloc", "addr": address, "size": size}))
        events.append((upper, {"action": "free_requested", "addr": address, "size": size}))
        events.append((upper, {"action": "free_completed", "addr": address, "size": size}))
    return [entry for _, entry in sorted(events, key=lambda event: event[0])]


def lasting(decisions: Decisions) -> int:
    lives = schedule(lower(decisions)[0]).lives
    return int((lives.on_device & (lives.birth < 0)).sum())


def test_a_memory_history_is_compared_with_the_program() -> None:
    decisions = decide(gpt(), recompute="full")
    plan = schedule(lower(decisions)[0])
    entries = history(decisions)
    found = read_history(entries, plan)
    assert found.ratio == pytest.approx(1, abs=0.02)
    assert found.unexplained == ()
    assert found.program_peak_bytes == peak(live_bytes(plan.lives, device=True)).bytes

    extra = {"addr": -1, "size": 3 * LARGE_BYTES}
    planted = read_history([{**extra, "action": "alloc"}, *entries, {**extra, "action": "free_completed"}], plan)
    assert planted.unexplained[0].bytes == 3 * LARGE_BYTES
    assert planted.observed_peak_bytes >= found.observed_peak_bytes + 3 * LARGE_BYTES
