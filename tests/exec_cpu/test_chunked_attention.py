"""Attention in chunks as played: autograd's gradients, the program's memory and moves, and forward's bits again."""

from typing import Any

import pytest
import torch

from memo_exec import weights
from memo_exec.kernels import KERNELS, Call
from memo_sim.contract.plan import Decisions
from memo_sim.program.columns import expand
from memo_sim.program.instruction import Lane
from memo_sim.program.liveness import live_bytes, liveness, peak
from memo_sim.program.lower import lower
from memo_sim.program.work import Copy
from tests.exec_cpu.autograd_model import AutogradModel
from tests.exec_cpu.small import MODELS, batch, decide, gradients, one_step, play, scalars

TOLERANCE = 1e-5


def in_chunks(name: str, **changes: Any) -> Decisions:
    """Return a plan of three chunks, the last of them shorter."""
    fields: dict[str, Any] = {"seq_tokens": 320, "micro_batch": 1, "global_batch": 2}
    return decide(MODELS[name], **(fields | {"recompute": "full", "attention_chunk_tokens": 128} | changes))


@pytest.mark.parametrize("changes", [{}, {"swapped_tokens": 320, "mlp_chunk_tokens": 128}], ids=["kept", "swapped"])
@pytest.mark.parametrize("name", MODELS)
def test_gradients_equal_autograd(name: str, changes: dict[str, Any]) -> None:
    decisions = in_chunks(name, **changes)
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


@pytest.mark.parametrize("states", ["fp32", "host"])
def test_swapped_inputs_change_no_bit(states: str) -> None:
    _, wanted = one_step(in_chunks("llama", states=states))
    _, found = one_step(in_chunks("llama", states=states, swapped_tokens=320))
    assert [key for key in wanted if not torch.equal(found[key], wanted[key])] == []


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_forward_is_played_again_bit_for_bit(dtype: str) -> None:
    found: dict[str, list[torch.Tensor]] = {}

    def watching(op: str) -> Any:
        def kernel(call: Call) -> None:
            KERNELS[op](call)
            if ".c" in call.instruction.name:
                written = [call.tensors[role].clone() for role in ("out", "lse") if role in call.tensors]
                found.setdefault(call.instruction.name, []).extend(written)

        return kernel

    decisions = in_chunks("qwen3", dtype=dtype, global_batch=1)
    watched = {op: watching(op) for op in ("attention", "attention.merge", "linear")}
    one_step(decisions, kernels={**KERNELS, **watched})
    rebuilt = [name for name in found if name.startswith("rec/")]
    assert {f"rec/{name}" for name in ("qkv.c2", "attn.c1", "attn.earlier.c2.k1", "attn.merge.c2.k0")} <= set(rebuilt)
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
        fields: dict[str, Any] = {"seq_tokens": 1024, "swapped_tokens": 1024, "mlp_chunk_tokens": 128}
        decisions = in_chunks("llama", attention_chunk_tokens=chunk, states="host", **fields)
        record, _ = one_step(decisions)
        program = lower(decisions)[0]
        lives = liveness(program, expand(program))
        assert record.peak_device_bytes == peak(live_bytes(lives, device=True)).bytes
        moved = sum(i.work.bytes for _, i in program.walk() if i.lane is Lane.H2D and isinstance(i.work, Copy))
        assert record.moved.h2d == moved
        peaks.append(record.peak_device_bytes)
    assert peaks[1] < peaks[0]
