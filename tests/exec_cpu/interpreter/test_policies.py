"""Tests that the activation policy (keep, swap, recompute) does not change the results of training.

Gradients are bitwise those of keep, loss curves are the same, and memory and moved bytes are the program's.
"""

from typing import Any

import msgspec
import numpy as np
import pytest
import torch

from memo_exec.kernels import KERNELS, Call
from memo_sim.contract.plan import Decisions
from memo_sim.program.analysis.columns import expand
from memo_sim.program.analysis.liveness import live_bytes, liveness, peak
from memo_sim.program.ir.instruction import Lane
from memo_sim.program.ir.work import Copy
from memo_sim.program.lower import lower
from tests.exec_cpu.interpreter.replayed import assert_gradients_equal_autograds
from tests.exec_cpu.small import MODELS, batch, decide, gpt, gradients, llama, losses, one_step, play, scalars, states
from tests.pairs import covering

POLICIES: dict[str, dict[str, Any]] = {
    "full recompute": {"recompute": "full"},
    "full recompute, inputs swapped": {"recompute": "full", "swapped_tokens": 256},
    "full recompute, inputs partly swapped": {"recompute": "full", "swapped_tokens": 128},
    "every second layer's recompute": {"recompute": "full", "recompute_layers": "every-2"},
    "the first layer's recompute": {"recompute": "full", "recompute_layers": "first-1"},
    "grouped recompute": {"recompute": "full", "recompute_layers": "groups-2"},
    "one group's recompute": {"recompute": "full", "recompute_layers": "groups-8"},
    "rounding buffers, full recompute": {"recompute": "full", "rounding_buffers": True},
    "rounding buffers, inputs swapped": {"recompute": "full", "rounding_buffers": True, "swapped_tokens": 256},
    "selective recompute": {"recompute": "selective"},
    "norms' recompute": {"recompute": "norms"},
    "the MLP's recompute": {"recompute": "mlp"},
    "operator recompute": {"recompute": "operators"},
    "full swap": {"swapped_tokens": 256},
    "half swapped, half kept": {"swapped_tokens": 128},
    "alpha 0": {"recompute": "tokenwise"},
    "alpha 0.5": {"recompute": "tokenwise", "swapped_tokens": 128},
    "alpha 1": {"recompute": "tokenwise", "swapped_tokens": 256},
}


@pytest.mark.parametrize(("policy", "name"), covering(POLICIES, ["gpt2", "gpt-bare", "llama", "qwen3"], every=2))
def test_gradients_are_bitwise_those_of_keep(policy: str, name: str) -> None:
    keep = decide(MODELS[name], global_batch=4)
    kept, wanted = one_step(keep)
    record, found = one_step(decide(MODELS[name], global_batch=4, **POLICIES[policy]))

    assert record.loss == kept.loss
    assert record.grad_norm == kept.grad_norm
    assert [name for name in wanted if not torch.equal(found[name], wanted[name])] == []


@pytest.mark.parametrize("memory_policy", ["planned", "caching"])
@pytest.mark.parametrize("name", ["gpt2", "qwen3"])
def test_offloaded_inputs_leave_the_gradients_to_autograd(name: str, memory_policy: str) -> None:
    fields = {"recompute": "full", "swapped_tokens": 128, "memory_policy": memory_policy}
    decisions = decide(MODELS[name], micro_batch=1, global_batch=2, **fields)
    assert decisions.offload_inputs
    assert_gradients_equal_autograds(decisions)


@pytest.mark.parametrize(
    ("layers", "name"), covering(["every-2", "first-2", "groups-2", "groups-3"], ["gpt2", "qwen3"])
)
def test_layers_that_differ_leave_the_gradients_to_autograd(layers: str, name: str) -> None:
    fields = {"recompute": "full", "recompute_layers": layers, "micro_batch": 1, "global_batch": 2}
    deeper = msgspec.structs.replace(MODELS[name], layers=5)
    assert_gradients_equal_autograds(decide(deeper, **fields))
    assert_gradients_equal_autograds(decide(deeper, memory_policy="caching", **fields))


@pytest.mark.parametrize("module", ["norms", "mlp"])
@pytest.mark.parametrize("name", ["gpt2", "qwen3"])
def test_modules_that_run_again_leave_the_gradients_to_autograd(name: str, module: str) -> None:
    assert_gradients_equal_autograds(decide(MODELS[name], recompute=module, micro_batch=1, global_batch=2))


@pytest.mark.parametrize(("policy", "states"), covering(["keep", *POLICIES], ["fp32", "host"]))
def test_memory_and_bytes_moved_are_the_programs(policy: str, states: str) -> None:
    decisions = decide(llama(layers=4), global_batch=6, states=states, **POLICIES.get(policy, {}))
    record, _ = one_step(decisions)

    lives = liveness(lower(decisions)[0], expand(lower(decisions)[0]))
    assert record.peak_device_bytes == peak(live_bytes(lives, device=True)).bytes
    assert record.peak_host_bytes == peak(live_bytes(lives, device=False)).bytes
    assert (record.moved.d2h, record.moved.h2d) == (moved(decisions, Lane.D2H), moved(decisions, Lane.H2D))
    curves = (record.device_memory, record.host_memory)
    peaks = [max((sum(at) for at in zip(*curve.bytes_by_class.values(), strict=True)), default=0) for curve in curves]
    assert peaks == [record.peak_device_bytes, record.peak_host_bytes]


def moved(decisions: Decisions, lane: Lane) -> int:
    """Return the bytes that the program's copies on ``lane`` declare."""
    works = [i.work for _, i in lower(decisions)[0].walk() if i.lane is lane]
    return sum(work.bytes for work in works if isinstance(work, Copy))


@pytest.mark.parametrize("policy", [name for name in POLICIES if not name.endswith(" recompute")])
def test_swapping_really_moves_bytes(policy: str) -> None:
    record, _ = one_step(decide(gpt(), **POLICIES[policy]))
    assert record.moved.d2h > 0
    assert record.moved.h2d == record.moved.d2h


@pytest.mark.slow
def test_loss_curves_of_every_alpha_coincide() -> None:
    """MEMO 5.5: 50 steps of training for alpha 0, 0.125, 0.25, 0.5 and 1."""
    model = llama(hidden=32, heads=2, kv_heads=1, ffn_hidden=64)
    shape: dict[str, Any] = {"seq_tokens": 64, "micro_batch": 16}
    curves = [losses(decide(model, **shape), steps=50)]
    for eighths in (0, 1, 2, 4, 8):
        decisions = decide(model, **shape, recompute="tokenwise", swapped_tokens=128 * eighths)
        assert decisions.alpha == eighths / 8
        curves.append(losses(decisions, steps=50))

    assert curves[0][-1] < curves[0][0] - 0.3
    assert all(curve == curves[0] for curve in curves[1:])


def test_parameters_after_steps_are_bitwise_those_of_keep() -> None:
    found = []
    for policy in ({}, POLICIES["alpha 0.5"]):
        decisions = decide(gpt(layers=4), **policy)
        with play(decisions) as interpreter:
            for step in (1, 2):
                batches = batch(decisions, seed=step)
                interpreter.run_step(batches, scalars(batches, step=step, clip=0.5))
            found.append({name: value.clone() for name, value in states(interpreter).items()})
    assert all(torch.equal(found[0][name], found[1][name]) for name in found[0])


def test_host_slab_is_the_peak_and_not_the_sum() -> None:
    decisions = decide(gpt(layers=5), global_batch=6, swapped_tokens=256)
    record, _ = one_step(decisions)
    lives = liveness(lower(decisions)[0], expand(lower(decisions)[0]))
    used = ~lives.on_device & (lives.death >= lives.birth)
    assert record.peak_host_bytes * 3 == int(np.sum(lives.bytes[used]))


def test_gradients_of_a_second_step_do_not_remember_the_first() -> None:
    decisions = decide(gpt(), swapped_tokens=256)
    batches = batch(decisions)
    with play(decisions) as interpreter:
        interpreter.run_step(batch(decisions, seed=9), scalars(batches, lr=0.0))
        interpreter.run_step(batches, scalars(batches, lr=0.0))
        again = gradients(interpreter)
    _, fresh = one_step(decisions, batches)
    assert all(torch.equal(again[name], fresh[name]) for name in fresh)


@pytest.mark.parametrize("rest", [1, 3, 72])
@pytest.mark.parametrize("name", ["gpt2", "qwen3"])
def test_recompute_repeats_the_forward_of_its_rows(name: str, rest: int) -> None:
    """For any number of rows: a library may round a GEMM of very few rows differently from one of many."""
    decisions = decide(MODELS[name], seq_tokens=128 + rest, micro_batch=1, recompute="tokenwise", swapped_tokens=128)
    found: dict[str, list[torch.Tensor]] = {}

    def watching(op: str) -> Any:
        def kernel(call: Call) -> None:
            KERNELS[op](call)
            phase, _, rest_of_name = call.instruction.name.partition("/")
            if phase in ("fwd", "rec") and rest_of_name.endswith(".r1"):
                written = [
                    call.tensors[role].clone() for role in ("out", "qkv", "stats", "raw") if role in call.tensors
                ]
                found.setdefault(call.instruction.name, []).extend(written)

        return kernel

    one_step(decisions, kernels={op: watching(op) for op in KERNELS})

    recomputed = {key.removeprefix("rec/"): values for key, values in found.items() if key.startswith("rec/")}
    assert {"norm1.r1", "qkv.r1", "proj.r1", "ffn_up.r1", "act.r1"} < set(recomputed)
    for key, values in recomputed.items():
        forward = found[f"fwd/{key}"][: len(values)]  # the swapped layer is the first one
        assert all(torch.equal(a, b) for a, b in zip(values, forward, strict=True)), key
