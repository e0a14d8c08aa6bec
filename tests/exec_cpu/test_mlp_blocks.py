"""The MLP in row blocks as played: autograd's gradients, keep's but for the order of sums, and forward's bits again."""

from typing import Any

import pytest
import torch

from memo_exec import weights
from memo_exec.kernels import KERNELS, Call
from memo_sim.contract.plan import Decisions
from memo_sim.program.columns import expand
from memo_sim.program.liveness import live_bytes, liveness, peak
from memo_sim.program.lower import lower
from tests.exec_cpu.autograd_model import AutogradModel
from tests.exec_cpu.small import MODELS, batch, decide, gradients, llama, one_step, play, scalars

TOLERANCE = 1e-5
IN_BLOCKS = ("ffn_up.", "ffn_down.", "norm2.")
"""Parameters of the MLP: their gradients are sums over row blocks."""


def in_blocks(name: str, **changes: Any) -> Decisions:
    """Return a plan of three row blocks, the last of them shorter."""
    fields: dict[str, Any] = {"seq_tokens": 320, "micro_batch": 1, "global_batch": 2}
    return decide(MODELS[name], **(fields | {"recompute": "full", "mlp_chunk_tokens": 128} | changes))


@pytest.mark.parametrize("name", MODELS)
def test_gradients_equal_autograd(name: str) -> None:
    decisions = in_blocks(name)
    batches = batch(decisions, ignored=0.2)
    with play(decisions) as interpreter:
        reference = AutogradModel(MODELS[name], weights.named_parameters(interpreter))
        interpreter.run_step(batches, scalars(batches, lr=0.0))
        found = gradients(interpreter)
    for ids, labels in batches:
        reference.loss(ids.view(1, -1), labels.view(1, -1), scalars(batches).loss_scale).backward()
    assert set(found) == set(reference.p)
    for key, leaf in reference.p.items():
        assert leaf.grad is not None
        error = (found[key] - leaf.grad).abs().max() / leaf.grad.abs().max()
        assert error <= TOLERANCE, key


@pytest.mark.parametrize("name", ["gpt2", "gpt-bare", "llama", "llama-biased", "qwen3"])
def test_only_the_mlps_sums_are_taken_in_another_order(name: str) -> None:
    """All other gradients and the loss are keep's bit for bit: every row of the MLP is made by a product over rows."""
    kept, wanted = one_step(in_blocks(name, recompute="none", mlp_chunk_tokens=0))
    record, found = one_step(in_blocks(name))
    assert record.loss == kept.loss
    other = {key for key in wanted if not torch.equal(found[key], wanted[key])}
    assert other
    assert all(any(part in key for part in IN_BLOCKS) for key in other), other
    for key in other:
        torch.testing.assert_close(found[key], wanted[key], rtol=1e-5, atol=1e-6 * float(wanted[key].abs().max()))


@pytest.mark.parametrize("name", ["gpt2", "llama"])
def test_one_block_of_all_tokens_is_keep_bit_for_bit(name: str) -> None:
    _, wanted = one_step(in_blocks(name, recompute="none", mlp_chunk_tokens=0))
    _, found = one_step(in_blocks(name, mlp_chunk_tokens=320))
    assert [key for key in wanted if not torch.equal(found[key], wanted[key])] == []


@pytest.mark.parametrize("states", ["fp32", "host"])
def test_swapped_inputs_change_no_bit(states: str) -> None:
    _, wanted = one_step(in_blocks("llama", states=states))
    record, found = one_step(in_blocks("llama", states=states, swapped_tokens=320))
    assert record.moved.d2h > 0
    assert [key for key in wanted if not torch.equal(found[key], wanted[key])] == []


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_a_block_is_rebuilt_bit_for_bit(dtype: str) -> None:
    found: dict[str, list[torch.Tensor]] = {}

    def watching(op: str) -> Any:
        def kernel(call: Call) -> None:
            KERNELS[op](call)
            if ".b" in call.instruction.name and call.instruction.name[:3] in ("fwd", "rec"):
                written = [call.tensors[role].clone() for role in ("out", "stats") if role in call.tensors]
                found.setdefault(call.instruction.name, []).extend(written)

        return kernel

    decisions = in_blocks("qwen3", dtype=dtype, global_batch=1)
    one_step(decisions, kernels={op: watching(op) for op in KERNELS})
    rebuilt = [name for name in found if name.startswith("rec/")]
    assert {f"rec/{op}.b{i}" for op in ("norm2", "ffn_up", "act") for i in range(3)} == set(rebuilt)
    for name in rebuilt:
        again, forward = found[name], found[name.replace("rec/", "fwd/")]
        stride = len(again) // decisions.model.layers
        # Backward visits the layers in reverse.
        pieces = [again[i : i + stride] for i in range(0, len(again), stride)]
        expected = [forward[i : i + stride] for i in range(0, len(forward), stride)]
        for piece, wanted in zip(reversed(pieces), expected, strict=True):
            assert all(torch.equal(a, b) for a, b in zip(piece, wanted, strict=True)), name


def test_memory_is_the_programs_and_falls() -> None:
    peaks = []
    for chunk in (0, 128):
        decisions = decide(llama(), seq_tokens=1024, micro_batch=1, recompute="full", mlp_chunk_tokens=chunk)
        record, _ = one_step(decisions)
        program = lower(decisions)[0]
        curves = live_bytes(liveness(program, expand(program)), device=True)
        assert record.peak_device_bytes == peak(curves).bytes
        peaks.append(record.peak_device_bytes)
    assert peaks[1] < peaks[0]
