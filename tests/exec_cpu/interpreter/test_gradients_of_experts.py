"""Models with experts: gradients are autograd's and those of transformers, whatever is kept, swapped or recomputed."""

from typing import Any

import msgspec
import pytest
import torch
from transformers import AutoModelForCausalLM
from transformers.models.deepseek_v3.configuration_deepseek_v3 import DeepseekV3Config
from transformers.models.deepseek_v3.modeling_deepseek_v3 import DeepseekV3MoE
from transformers.models.gpt_oss.configuration_gpt_oss import GptOssConfig
from transformers.models.gpt_oss.modeling_gpt_oss import GptOssMLP

from memo_exec.commands.run_outcome import load_of_experts
from memo_exec.kernels import KERNELS, Call
from memo_exec.kernels.experts import check_device
from memo_exec.training import huggingface, weights
from memo_sim.contract.errors import CannotRun
from memo_sim.contract.experts import Experts
from memo_sim.program.layout.expert_load import nearest_load
from tests.exec_cpu.interpreter.replayed import TOLERANCE, assert_gradients_equal_autograds
from tests.exec_cpu.small import (
    DEEPSEEK,
    EXPERT_MODELS,
    WHOLE_MODELS,
    batch,
    decide,
    gradients,
    llama,
    one_step,
    play,
    scalars,
)
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
        context = interpreter.context
        loads, rows = context.loads.sum(0).tolist(), context.rows
        text = load_of_experts(interpreter)
    assert torch.equal(rows.sum(1), torch.full((3,), 2 * 256 * 2))
    assert torch.equal(rows.sum(1), context.loads.sum(1))
    assert (context.loads.amax(1) >= rows.amax(1)).all()
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


def deepseek_module(weights: dict[str, torch.Tensor], of: Experts) -> tuple[torch.nn.Module, dict[str, Any]]:
    """Return transformers' module with a layer's weights, and by our names where its gradients are."""
    config = DeepseekV3Config(
        hidden_size=64,
        moe_intermediate_size=of.hidden,
        n_shared_experts=of.shared // of.hidden,
        n_routed_experts=of.count,
        num_experts_per_tok=of.per_token,
        n_group=of.groups,
        topk_group=of.groups_per_token,
        routed_scaling_factor=of.scale,
    )
    module = DeepseekV3MoE(config)
    gate, shared = module.gate, module.shared_experts
    with torch.no_grad():
        gate.weight.copy_(weights["router.weight"])
        gate.e_score_correction_bias.copy_(weights["selection.bias"])
        module.experts.gate_up_proj.copy_(weights["experts_up.weight"].view_as(module.experts.gate_up_proj))
        module.experts.down_proj.copy_(weights["experts_down.weight"].view_as(module.experts.down_proj))
        for each, half in zip((shared.gate_proj, shared.up_proj), weights["shared_up.weight"].chunk(2), strict=True):
            each.weight.copy_(half)
        shared.down_proj.weight.copy_(weights["shared_down.weight"])
    return module, {
        "router.weight": lambda: gate.weight.grad,
        "experts_up.weight": lambda: module.experts.gate_up_proj.grad.flatten(0, 1),
        "experts_down.weight": lambda: module.experts.down_proj.grad.flatten(0, 1),
        "shared_up.weight": lambda: torch.cat((shared.gate_proj.weight.grad, shared.up_proj.weight.grad)),
        "shared_down.weight": lambda: shared.down_proj.weight.grad,
    }


def gpt_oss_module(weights: dict[str, torch.Tensor], of: Experts) -> tuple[torch.nn.Module, dict[str, Any]]:
    """Do the same for GPT-OSS, which has gates and ups in turn, and (in, out) matrices."""
    config = GptOssConfig(
        hidden_size=64, intermediate_size=of.hidden, num_local_experts=of.count, num_experts_per_tok=of.per_token
    )
    module = GptOssMLP(config)
    experts, router = module.experts, module.router

    def ours(whole: torch.Tensor) -> torch.Tensor:
        return torch.cat((whole[..., ::2], whole[..., 1::2]), dim=-1)

    with torch.no_grad():
        for mine, theirs in (("weight", router.weight), ("bias", router.bias)):
            theirs.copy_(weights[f"router.{mine}"])
        up = weights["experts_up.weight"].view(of.count, 2, of.hidden, 64)
        experts.gate_up_proj.copy_(up.permute(0, 3, 2, 1).flatten(2))
        experts.gate_up_proj_bias.copy_(weights["experts_up.bias"].view(of.count, 2, of.hidden).mT.flatten(1))
        experts.down_proj.copy_(weights["experts_down.weight"].view(of.count, 64, of.hidden).mT)
        experts.down_proj_bias.copy_(weights["experts_down.bias"].view(of.count, 64))
    return module, {
        "router.weight": lambda: router.weight.grad,
        "router.bias": lambda: router.bias.grad,
        "experts_up.weight": lambda: ours(experts.gate_up_proj.grad).mT.flatten(0, 1),
        "experts_up.bias": lambda: ours(experts.gate_up_proj_bias.grad).flatten(),
        "experts_down.weight": lambda: experts.down_proj.grad.mT.flatten(0, 1),
        "experts_down.bias": lambda: experts.down_proj_bias.grad.view(-1),
    }


@pytest.mark.parametrize(("name", "make"), [("deepseek", deepseek_module), ("gpt-oss", gpt_oss_module)])
def test_a_layer_has_the_results_and_gradients_of_transformers(name: str, make: Any) -> None:
    """The last layer's experts, as a step plays them: weights large enough that GPT-OSS's limits are met."""
    decisions, seen = decide(EXPERT_MODELS[name], recompute="tokenwise", swapped_tokens=128), {}

    def watched(call: Call) -> None:
        KERNELS[call.instruction.op](call)
        at = call.instruction.name
        if at.startswith("fwd/") or at not in seen:  # forward ends with the last layer, backward begins with it
            seen[at] = {role: call[role].clone() for role in ("x", "out") if role in call.tensors}

    ops = ("experts.dispatch", "experts.out_bias", "linear.add", "router.dgrad")
    batches, last = batch(decisions), f"layer.{decisions.model.layers - 1}/"
    with play(decisions, kernels={**KERNELS, **dict.fromkeys(ops, watched)}) as interpreter:
        named = weights.named_parameters(interpreter)
        named[f"{last}experts_up.weight"].mul_(20.0)
        mine = {key.removeprefix(last): value.clone() for key, value in named.items()}
        interpreter.run_step(batches, scalars(batches, lr=0.0))
        found = gradients(interpreter)
    module, theirs = make(mine, decisions.model.mixture)
    x = seen["fwd/dispatch.r0"]["x"].clone().requires_grad_()  # kernels play in inference mode
    out = module(x.view(1, *x.shape))
    out = (out[0] if isinstance(out, tuple) else out).view_as(x)
    summed = "fwd/shared_down" if name == "deepseek" else "fwd/experts_down.add"
    close(seen[summed]["out"], out.detach())
    out.backward(seen["bwd/dispatch.grad"]["x"])
    assert x.grad is not None
    close(seen["bwd/router.dgrad"]["out"], x.grad)
    for key, of in theirs.items():
        close(found[last + key], of())


def close(found: torch.Tensor, wanted: torch.Tensor) -> None:
    assert float((found - wanted).abs().max() / wanted.abs().max()) <= TOLERANCE


@pytest.mark.parametrize("states", ["fp32", "host"])
def test_the_selection_bias_moves_towards_even_loads(states: str) -> None:
    """By the sign of each expert's rows less than their mean; the gradient norm is without these rows."""
    of = DEEPSEEK
    decisions = decide(llama(experts=of), states=states, micro_batch=1, global_batch=2)
    batches = batch(decisions)
    with play(decisions) as interpreter:
        before = {k: v.clone() for k, v in weights.named_parameters(interpreter).items()}
        record = interpreter.run_step(batches, scalars(batches, lr=0.0))
        after, rows = weights.named_parameters(interpreter), gradients(interpreter)
    square = 0.0
    for key, value in rows.items():
        if not key.endswith("selection.bias"):
            square += float(value.square().sum())
            continue
        assert int(value.sum()) == 2 * 128 * of.per_token
        moved = of.selection_rate * torch.sign(2 * 128 * of.per_token / of.count - value)
        assert moved.abs().max() > 0
        torch.testing.assert_close(after[key], before[key] + moved)
    assert record.grad_norm == pytest.approx(square**0.5, rel=1e-5)


def gradient_of(model: Any, stored: str) -> torch.Tensor:
    """Return the gradient of a stored tensor; transformers joins those of a layer's experts as it reads them."""
    named, (block, _, rest) = dict(model.named_parameters()), stored.partition(".experts.")
    if stored in named:
        return named[stored].grad
    expert, which, _ = rest.split(".")
    if which == "down_proj":
        return named[f"{block}.experts.down_proj"].grad[int(expert)]
    return named[f"{block}.experts.gate_up_proj"].grad[int(expert)].chunk(2)[which == "up_proj"]


@pytest.mark.filterwarnings("ignore:The explicitly set RoPE")
@pytest.mark.parametrize("name", WHOLE_MODELS)
def test_whole_models_read_from_and_written_to_transformers(name: str, tmp_path: Any) -> None:
    """All gradients are those of transformers, with alpha of a half, and the weights come back as they were."""
    decisions = decide(WHOLE_MODELS[name], recompute="tokenwise", swapped_tokens=128)
    batches = batch(decisions, ignored=0.2)
    with play(decisions) as interpreter:
        weights.save(interpreter, tmp_path)
        before = {key: value.clone() for key, value in weights.named_parameters(interpreter).items()}
        theirs = AutoModelForCausalLM.from_pretrained(
            tmp_path, attn_implementation="eager", experts_implementation="eager"
        ).double()
        record = interpreter.run_step(batches, scalars(batches, lr=0.0))
        found = gradients(interpreter)
        for value in weights.named_parameters(interpreter).values():
            value.zero_()
        weights.load(interpreter, tmp_path)
        after = weights.named_parameters(interpreter)
        assert [key for key, value in before.items() if not torch.equal(value, after[key])] == []
    ids, labels = (each.view(2, -1) for each in batches[0])
    logits = theirs(input_ids=ids).logits
    loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="sum")
    (loss * scalars(batches).loss_scale).backward()
    assert record.loss == pytest.approx(float(loss.detach() * scalars(batches).loss_scale), rel=1e-6)
    checked = 0
    for entry in huggingface.entries(decisions.model):
        if entry.ours.endswith("selection.bias"):
            continue
        wanted = torch.cat([entry.read(gradient_of(theirs, part)) for part, _ in entry.parts])
        error = (found[entry.ours] - wanted).abs().max() / wanted.abs().max()
        assert error <= TOLERANCE, entry.ours
        checked += 1
    assert checked == len([key for key in found if not key.endswith("selection.bias")])


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
