"""Models with experts: gradients are autograd's and those of transformers, whatever is kept, swapped or recomputed."""

from typing import Any

import msgspec
import pytest
import torch
from transformers import AutoModelForCausalLM

from memo_exec.commands.run import load_of_experts
from memo_exec.kernels import KERNELS, Call
from memo_exec.kernels.experts import check_device
from memo_exec.training import weights
from memo_sim.contract.errors import CannotRun
from memo_sim.program.layout.expert_load import nearest_load
from tests.exec_cpu.interpreter.replayed import TOLERANCE, assert_gradients_equal_autograds
from tests.exec_cpu.small import EXPERT_MODELS, batch, decide, gradients, one_step, play, scalars
from tests.pairs import covering

POLICIES: dict[str, dict[str, Any]] = {
    "full recompute": {"recompute": "full"},
    "early stop": {"recompute": "full", "early_stop": True},
    "inputs swapped": {"recompute": "full", "swapped_tokens": 256},
    "selective recompute": {"recompute": "selective"},
    "norms' recompute": {"recompute": "norms"},
    "the experts' recompute": {"recompute": "mlp"},
    "full swap": {"swapped_tokens": 256},
    "half swapped, half kept": {"swapped_tokens": 128},
    "alpha 1": {"recompute": "tokenwise", "swapped_tokens": 256},
    "alpha 0": {"recompute": "tokenwise"},
}
"""Policies that cut no expert's rows, so that every product has the rows of keep."""


SLOW = ["qwen3-moe", "first layer dense"]


@pytest.mark.parametrize(("policy", "name"), covering(POLICIES, EXPERT_MODELS))
def test_gradients_are_bitwise_those_of_keep(policy: str, name: str) -> None:
    kept, wanted = one_step(decide(EXPERT_MODELS[name]))
    record, found = one_step(decide(EXPERT_MODELS[name], **POLICIES[policy]))
    assert record.loss == kept.loss
    assert [key for key in wanted if not torch.equal(found[key], wanted[key])] == []


@pytest.mark.parametrize(("memory_policy", "name"), covering(["planned", "caching"], EXPERT_MODELS))
def test_alpha_of_a_half_leaves_the_gradients_to_autograd(memory_policy: str, name: str) -> None:
    fields: dict[str, Any] = {"recompute": "tokenwise", "swapped_tokens": 128, "memory_policy": memory_policy}
    sizes = {"seq_tokens": 256, "micro_batch": 1, "global_batch": 2}
    assert_gradients_equal_autograds(decide(EXPERT_MODELS[name], **fields, **sizes))


@pytest.mark.parametrize("name", ["mixtral", pytest.param("qwen3-moe", marks=pytest.mark.slow)])
def test_recompute_finds_the_bits_of_forward(name: str) -> None:
    """The rows of one expert may be cut: its first ones come from the host, the others from a product again."""
    found: dict[str, list[torch.Tensor]] = {}

    def watching(op: str) -> Any:
        def kernel(call: Call) -> None:
            KERNELS[op](call)
            found.setdefault(call.instruction.name, []).append(call["out"].clone())

        return kernel

    decisions = decide(EXPERT_MODELS[name], recompute="tokenwise", swapped_tokens=128)
    ops = ("experts.linear", "experts.swiglu", "experts.dispatch")
    one_step(decisions, kernels={**KERNELS, **{op: watching(op) for op in ops}})
    assert {each for each in found if each.startswith("rec/")} == {"rec/dispatch.r1", "rec/experts_up.r1", "rec/act.r1"}
    for each in ("dispatch", "experts_up", "act"):
        (again,) = found[f"rec/{each}.r1"]  # of the first of three layers; the others never leave the device
        assert torch.equal(again, found[f"fwd/{each}.r1"][0]), each


def test_a_run_counts_the_rows_of_each_expert() -> None:
    """Two micro-batches of 256 tokens, each routed to 2 of 4 experts in three layers."""
    decisions = decide(EXPERT_MODELS["mixtral"], global_batch=4)
    batches = batch(decisions)
    with play(decisions) as interpreter:
        interpreter.run_step(batches, scalars(batches, lr=0.0))
        loads = interpreter.context.loads.tolist()
        text = load_of_experts(interpreter)
    assert sum(loads) == 2 * 256 * 2 * 3
    assert loads == sorted(loads, reverse=True)
    near = nearest_load(EXPERT_MODELS["mixtral"].mixture, loads)
    assert text == (
        f"experts: a layer's fullest got {loads[0] * 4 / sum(loads):.2f} times the mean of its rows, nearest to {near}"
        f" (planned as balanced; --expert-load {near} prices it)"
    )


def test_alpha_swaps_as_large_a_part_of_dispatched_rows() -> None:
    """Per token: half of the wide tensors (2 x 48 + 48 features of 2 experts), and all that the router decided."""
    model = EXPERT_MODELS["mixtral"]
    half = decide(model, recompute="tokenwise", swapped_tokens=128)
    full = decide(model, recompute="tokenwise", swapped_tokens=256)
    moved = [one_step(each)[0].moved.d2h for each in (half, full)]
    dense = 4 * (4 * model.hidden + model.q_width + 2 * model.kv_width + 2)  # norms, residual, Q, K, V, statistics
    wide = 4 * 2 * (2 * 48 + 48)
    assert moved[1] - moved[0] == 128 * (dense - 4 * model.hidden + wide)


@pytest.mark.parametrize("name", ["mixtral", *[pytest.param(n, marks=pytest.mark.slow) for n in SLOW]])
def test_a_whole_model_has_the_gradients_of_transformers(name: str, tmp_path: Any) -> None:
    decisions = decide(EXPERT_MODELS[name], recompute="tokenwise", swapped_tokens=128)
    batches = batch(decisions, ignored=0.2)
    with play(decisions) as interpreter:
        weights.save(interpreter, tmp_path)
        theirs = AutoModelForCausalLM.from_pretrained(
            tmp_path, attn_implementation="eager", experts_implementation="eager"
        ).double()
        record = interpreter.run_step(batches, scalars(batches, lr=0.0))
        found = gradients(interpreter)
    ids, labels = (each.view(2, -1) for each in batches[0])
    logits = theirs(input_ids=ids).logits
    loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="sum")
    (loss * scalars(batches).loss_scale).backward()
    assert record.loss == pytest.approx(float(loss.detach() * scalars(batches).loss_scale), rel=1e-6)
    for layer in range(decisions.model.layers):
        if decisions.model.layer(layer).experts is None:
            continue
        at, ours = theirs.model.layers[layer], f"layer.{layer}/"
        pairs = {
            "router.weight": at.mlp.gate.weight.grad,
            "experts_up.weight": at.mlp.experts.gate_up_proj.grad.flatten(0, 1),
            "experts_down.weight": at.mlp.experts.down_proj.grad.flatten(0, 1),
            "norm2.weight": at.post_attention_layernorm.weight.grad,
        }
        for key, wanted in pairs.items():
            error = (found[ours + key] - wanted).abs().max() / wanted.abs().max()
            assert error <= TOLERANCE, ours + key


def test_a_gpu_is_refused_what_its_products_do_not_take() -> None:
    model = EXPERT_MODELS["mixtral"]
    cuda = torch.device("cuda")
    with pytest.raises(CannotRun, match="the products of experts are in bf16 on a GPU"):
        check_device(decide(model), cuda)
    odd = msgspec.structs.replace(model, experts=msgspec.structs.replace(model.mixture, hidden=20))
    with pytest.raises(CannotRun, match="takes rows of whole units alone"):
        check_device(decide(odd, dtype="bf16"), cuda)
    check_device(decide(model, dtype="bf16"), cuda)
    check_device(decide(odd), torch.device("cpu"))
