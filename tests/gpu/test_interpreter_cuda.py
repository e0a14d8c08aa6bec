"""The interpreter on a CUDA device: it runs the same programs, with streams and events instead of threads."""

from typing import Any

import pytest
import torch

from memo_exec.interpreter.interpreter import Interpreter
from memo_exec.interpreter.record import StepRecord
from memo_exec.training import weights
from memo_sim.contract.plan import Decisions, Kernels
from memo_sim.program.lower import lower
from tests.exec_cpu.small import batch, decide, gpt, gradients, llama, scalars

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
POLICIES: list[dict[str, Any]] = [
    {},
    {"recompute": "full"},
    {"recompute": "full", "swapped_tokens": 256},
    {"swapped_tokens": 256},
    {"recompute": "tokenwise"},
    {"recompute": "tokenwise", "swapped_tokens": 128},
]
MLP_IN_BLOCKS: dict[str, Any] = {"recompute": "full", "swapped_tokens": 256, "mlp_chunk_tokens": 128}
"""A policy that differs from keep by roundings: it sums gradients of the MLP's weights block by block, and products of
fewer rows may round differently."""

ATTENTION_IN_CHUNKS: dict[str, Any] = {
    "recompute": "full",
    "seq_tokens": 640,
    "micro_batch": 1,
    "swapped_tokens": 640,
    "attention_chunk_tokens": 256,
}
"""A policy that differs from keep by roundings: attention has other calls, and gradients are summed in fp32."""


def on_cuda(kernel: str, **changes: Any) -> Decisions:
    model = llama(layers=4) if kernel != "flash2" else gpt(layers=4)
    # torch's cuDNN attention has no deterministic backward.
    fields = {"deterministic": kernel != "torch-cudnn"} | changes
    return decide(model, dtype="bf16", kernels=Kernels(attention=kernel), **fields)


def steps(decisions: Decisions, *, count: int = 2, **options: Any) -> tuple[StepRecord, dict[str, torch.Tensor]]:
    with Interpreter(decisions, lower(decisions)[0], device="cuda", **options) as interpreter:
        weights.initialize(interpreter, seed=1)
        batches = batch(decisions)
        for step in range(1, count + 1):
            record = interpreter.run_step(batches, scalars(batches, step=step, clip=1.0))
        return record, gradients(interpreter)


@pytest.mark.parametrize("policy", POLICIES[1:])
def test_policies_give_the_bits_of_keep(policy: dict[str, Any]) -> None:
    kept, wanted = steps(on_cuda("torch-flash"))
    record, found = steps(on_cuda("torch-flash", **policy))
    assert record.loss == kept.loss
    assert all(torch.equal(found[name], wanted[name]) for name in wanted)


@pytest.mark.parametrize("policy", POLICIES[1:])
def test_without_determinism_policies_are_within_the_noise_of_keep(policy: dict[str, Any]) -> None:
    """The difference between two runs of keep is the tolerance; it must itself be within bf16's rounding."""
    (_, wanted), (_, again) = (steps(on_cuda("torch-cudnn")) for _ in range(2))
    _, found = steps(on_cuda("torch-cudnn", **policy))
    for name, value in wanted.items():
        most = 2 * float((again[name] - value).norm()) + 2.0**-8 * float(value.norm())
        assert float((found[name] - value).norm()) <= most, name


@pytest.mark.parametrize("policy", [*POLICIES, MLP_IN_BLOCKS])
def test_gradients_are_those_of_the_cpu(policy: dict[str, Any]) -> None:
    _, found = steps(on_cuda("torch-flash", **policy))
    reference = decide(llama(layers=4), dtype="bf16")
    with Interpreter(reference, lower(reference)[0]) as interpreter:
        weights.initialize(interpreter, seed=1)
        batches = batch(reference)
        for step in (1, 2):
            interpreter.run_step(batches, scalars(batches, step=step, clip=1.0))
        wanted = gradients(interpreter)
    for name, value in wanted.items():
        assert float((found[name].cpu() - value).norm() / value.norm()) < 0.1, name


@pytest.mark.parametrize("policy", [*POLICIES, MLP_IN_BLOCKS, ATTENTION_IN_CHUNKS])
def test_debug_mode_finds_no_race(policy: dict[str, Any]) -> None:
    _, wanted = steps(on_cuda("torch-flash", **policy))
    _, found = steps(on_cuda("torch-flash", **policy), debug=True)
    assert all(torch.equal(found[name], wanted[name]) for name in wanted)


@pytest.mark.parametrize("states", ["fp32", "bf16", "host"])
def test_memory_matches_the_program(states: str) -> None:
    """The second step is measured, because libraries allocate memory that they keep (cuBLAS) in the first."""
    decisions = on_cuda("torch-flash", swapped_tokens=256, states=states)
    with Interpreter(decisions, lower(decisions)[0], device="cuda") as interpreter:
        weights.initialize(interpreter, seed=1)
        batches = batch(decisions)
        interpreter.run_step(batches, scalars(batches, step=1))
        lasting = sum(interpreter.store.lasting_bytes.values())
        before = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        record = interpreter.run_step(batches, scalars(batches, step=2))
        asked = torch.cuda.max_memory_allocated() - before
    assert before >= lasting
    assert asked <= (record.peak_device_bytes - lasting) * 1.05 + 2**20
    assert record.moved.d2h > 0


def test_loss_curves_of_every_alpha_coincide() -> None:
    """In 100 steps, losses differ from keep only by roundings, because row blocks end at ``swapped_tokens``."""
    curves = []
    for changes in ({}, *({"recompute": "tokenwise", "swapped_tokens": 128 * n} for n in (0, 1, 2))):
        decisions = on_cuda("torch-flash", seq_tokens=256, **changes)
        with Interpreter(decisions, lower(decisions)[0], device="cuda") as interpreter:
            weights.initialize(interpreter, seed=1)
            batches = batch(decisions)
            losses = [interpreter.run_step(batches, scalars(batches, step=step)).loss for step in range(1, 101)]
        curves.append(torch.tensor(losses))
    assert curves[0][-1] < curves[0][0] - 0.3
    for curve in curves[1:]:
        assert torch.allclose(curve, curves[0], rtol=0.01)


def test_an_mlp_in_row_blocks_lies_within_the_rounding_of_keep() -> None:
    """One step's gradients differ by at most twice bf16's error (which is 1 % against fp32 on a CPU)."""
    _, wanted = steps(on_cuda("torch-flash"), count=1)
    _, found = steps(on_cuda("torch-flash", recompute="full", mlp_chunk_tokens=128), count=1)
    for name, value in wanted.items():
        assert float((found[name] - value).norm() / value.norm()) < 0.02, name
    _, swapped = steps(on_cuda("torch-flash", **MLP_IN_BLOCKS), count=1)
    assert all(torch.equal(swapped[name], found[name]) for name in found)


@pytest.mark.parametrize("kernel", ["torch-flash", "torch-cudnn"])
def test_attention_in_chunks_is_near_whole_attention(kernel: str) -> None:
    whole = {**ATTENTION_IN_CHUNKS, "attention_chunk_tokens": 0}
    kept, wanted = steps(on_cuda(kernel, **whole), count=1)
    record, found = steps(on_cuda(kernel, **ATTENTION_IN_CHUNKS), count=1)
    assert record.moved.d2h > kept.moved.d2h
    for name, value in wanted.items():
        assert float((found[name] - value).norm() / value.norm()) < 0.02, name


def test_a_kernel_of_the_cpu_is_refused() -> None:
    decisions = decide(gpt())
    with pytest.raises(Exception, match="does not run on cuda"):
        Interpreter(decisions, lower(decisions)[0], device="cuda")
