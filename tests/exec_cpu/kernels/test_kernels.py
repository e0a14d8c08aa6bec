"""Every kernel gives the results of plain autograd, with row blocks smaller than the operands."""

from importlib import import_module

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F  # noqa: N812

from memo_exec.kernels import StepScalars
from memo_exec.verification.autograd_model import AutogradModel
from memo_sim.contract.plan import Kernels
from memo_sim.program.ir.work import Attention
from memo_sim.program.operators import workspaces as table
from tests.exec_cpu.kernels.hand_call import play
from tests.exec_cpu.small import CPU_KERNELS, LLAMA3, decide, gpt, llama

ROWS = 50
BLOCK_ROWS = 16
GPT, LLAMA = decide(gpt()), decide(llama())


@pytest.fixture(autouse=True)
def small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in ("norm", "qk_norm", "rotary", "linear", "embedding"):
        monkeypatch.setattr(import_module(f"memo_exec.kernels.{module}"), "NORM_ROWS", BLOCK_ROWS)
    monkeypatch.setattr(import_module("memo_exec.kernels.loss"), "LOSS_ROWS", BLOCK_ROWS)


def leaf(*shape: int, seed: int = 0, shift: float = 0.0) -> Tensor:
    generator = torch.Generator().manual_seed(seed + sum(shape))
    return (torch.randn(shape, generator=generator) + shift).requires_grad_()


def plain(tensor: Tensor | None) -> Tensor | None:
    """Return the values as an operand, flat or two-dimensional, without autograd."""
    return None if tensor is None else tensor.detach().clone()


def flat(tensor: Tensor) -> Tensor:
    return tensor.detach().clone().view(-1)


def close(found: Tensor, wanted: Tensor | None) -> None:
    assert wanted is not None
    wanted = wanted.detach()
    torch.testing.assert_close(found.view(wanted.shape), wanted, rtol=1e-5, atol=1e-5 * float(wanted.abs().max()))


@pytest.mark.parametrize("bias", [True, False])
def test_linear_and_its_gradients(bias: bool) -> None:
    x, weight, b, grad = leaf(ROWS, 24), leaf(40, 24), leaf(40), leaf(ROWS, 40, seed=1)
    out = F.linear(x, weight, b if bias else None)
    out.backward(grad)
    operands = {"x": plain(x), "weight": flat(weight), "bias": plain(b) if bias else None}
    close(play("linear", GPT, {**operands, "out": torch.empty(ROWS, 40)})["out"], out)
    call = play("linear.dgrad", GPT, {"grad": plain(grad), "weight": flat(weight), "out": torch.empty(ROWS, 24)})
    close(call["out"], x.grad)
    total = torch.ones(40 * 24)
    play("linear.wgrad", GPT, {"grad": plain(grad), "x": plain(x), "out": total})
    close(total - 1, weight.grad)
    if bias:
        sums = torch.ones(40)
        size = table.bias_backward_workspace_bytes(ROWS, 40, "fp32")
        play("bias.bwd", GPT, {"grad": plain(grad), "out": sums}, workspace_bytes=size)
        close(sums - 1, b.grad)


@pytest.mark.parametrize("family", ["layer_norm", "rms_norm"])
@pytest.mark.parametrize("residual", [True, False])
def test_norms(family: str, residual: bool) -> None:
    centred, width = family == "layer_norm", 48
    decisions = GPT if centred else LLAMA
    x, weight, grad = leaf(ROWS, width, shift=0.7), leaf(width), leaf(ROWS, width, seed=1)
    bias, branch = (leaf(width, seed=3) if centred else None), leaf(ROWS, width, seed=4)
    if centred:
        out = F.layer_norm(x, (width,), weight, bias, decisions.model.norm_eps)
    else:
        out = F.rms_norm(x, (width,), weight, decisions.model.norm_eps)
    out.backward(grad)
    stats = torch.empty(ROWS, 2) if centred else torch.empty(ROWS)
    operands = {"x": plain(x), "weight": plain(weight), "bias": plain(bias), "stats": stats}
    close(play(family, decisions, {**operands, "out": torch.empty(ROWS, width)})["out"], out)
    call = play(
        f"{family}.bwd",
        decisions,
        {
            "grad": plain(grad),
            "x": plain(x),
            "stats": stats,
            "weight": plain(weight),
            "residual_grad": plain(branch) if residual else None,
            "out": torch.empty(ROWS, width),
            "grad_weight": torch.ones(width),
            "grad_bias": torch.ones(width) if centred else None,
        },
        workspace_bytes=table.norm_backward_workspace_bytes(ROWS, width, "fp32"),
    )
    assert x.grad is not None
    close(call["out"], x.grad + branch if residual else x.grad)
    close(call["grad_weight"] - 1, weight.grad)
    if bias is not None:
        close(call["grad_bias"] - 1, bias.grad)


@pytest.mark.parametrize("activation", ["gelu", "gelu_tanh"])
def test_gelu(activation: str) -> None:
    decisions = decide(gpt(activation=activation))
    x, grad = leaf(ROWS, 32), leaf(ROWS, 32, seed=1)
    out = F.gelu(x, approximate="tanh" if activation == "gelu_tanh" else "none")
    out.backward(grad)
    close(play("gelu", decisions, {"x": plain(x), "out": torch.empty(ROWS, 32)})["out"], out)
    call = play("gelu.bwd", decisions, {"grad": plain(grad), "x": plain(x), "grad_x": torch.empty(ROWS, 32)})
    close(call["grad_x"], x.grad)


def test_swiglu() -> None:
    x, grad = leaf(ROWS, 64), leaf(ROWS, 32, seed=1)
    gate, up = x.chunk(2, dim=1)
    out = F.silu(gate) * up
    out.backward(grad)
    close(play("swiglu", LLAMA, {"x": plain(x), "out": torch.empty(ROWS, 32)})["out"], out)
    call = play("swiglu.bwd", LLAMA, {"grad": plain(grad), "x": plain(x), "grad_x": torch.empty(ROWS, 64)})
    close(call["grad_x"], x.grad)


@pytest.mark.parametrize("first", [0, 128 - 20])
@pytest.mark.parametrize("scaling", [None, LLAMA3])
def test_rotary_positions_restart_with_every_sequence(first: int, scaling: object) -> None:
    model = llama(rope_scaling=scaling)
    decisions, width = decide(model), model.q_width + model.kv_width
    packed = leaf(2 * 128, width + model.kv_width).double()
    heads = packed[:, :width].unflatten(-1, (-1, model.head_dim)).unflatten(0, (2, 128)).transpose(1, 2)
    turned = AutogradModel(model, {})._rotated(heads, 0.0).transpose(1, 2).flatten(2).flatten(0, 1)
    size = table.rotary_workspace_bytes(ROWS, model.heads + model.kv_heads, model.head_dim, "fp32")
    rows = slice(first, first + ROWS)

    qkv = packed[rows].detach().float()
    play("rotary", decisions, {"qkv": qkv}, first=first, workspace_bytes=size)
    close(qkv[:, :width], turned[rows].float())
    assert torch.equal(qkv[:, width:], packed[rows, width:].float())
    play("rotary.bwd", decisions, {"grad": qkv}, first=first, workspace_bytes=size)
    close(qkv, packed[rows].float())


def test_qk_norm() -> None:
    model = llama(qk_norm=True)
    decisions, width, d = decide(model), model.q_width + model.kv_width, model.head_dim
    packed, q_weight, k_weight = leaf(ROWS, width + model.kv_width), leaf(d), leaf(d, seed=1)
    grad = leaf(ROWS, width + model.kv_width, seed=2)
    heads = packed[:, :width].unflatten(-1, (-1, d))
    q, k = heads[:, : model.heads], heads[:, model.heads :]
    eps = model.norm_eps
    parts = [F.rms_norm(q, (d,), q_weight, eps).flatten(1), F.rms_norm(k, (d,), k_weight, eps).flatten(1)]
    out = torch.cat([*parts, packed[:, width:]], dim=1)
    out.backward(grad)

    qkv, raw = packed.detach().clone(), torch.empty(ROWS, width)
    weights = {"q_weight": plain(q_weight), "k_weight": plain(k_weight)}
    heads_of_both = model.heads + model.kv_heads
    size = table.qk_norm_workspace_bytes(ROWS, heads_of_both, d, "fp32")
    play("qk_norm", decisions, {"qkv": qkv, **weights, "raw": raw}, workspace_bytes=size)
    close(qkv, out)
    assert torch.equal(raw, packed[:, :width])
    incoming, sums = grad.detach().clone(), {f"grad_{name}": torch.ones(d) for name in weights}
    size = table.qk_norm_backward_workspace_bytes(ROWS, heads_of_both, d, "fp32")
    play("qk_norm.bwd", decisions, {"grad": incoming, "raw": raw, **weights, **sums}, workspace_bytes=size)
    close(incoming, packed.grad)
    close(sums["grad_q_weight"] - 1, q_weight.grad)
    close(sums["grad_k_weight"] - 1, k_weight.grad)


@pytest.mark.parametrize("groups", [1, 2])
@pytest.mark.parametrize("kv_heads", [2, 4])
def test_attention(groups: int, kv_heads: int) -> None:
    model = llama(kv_heads=kv_heads)
    decisions = decide(model, kernels=Kernels(attention=CPU_KERNELS.attention, head_groups=groups))
    batch, tokens, d = 2, 60, model.head_dim
    packed = leaf(batch * tokens, model.q_width + 2 * model.kv_width)
    grad = leaf(batch * tokens, model.q_width, seed=1)
    heads = packed.view(batch, tokens, -1, d).transpose(1, 2)
    q, k, v = heads.split([model.heads, kv_heads, kv_heads], dim=1)
    k, v = (t.repeat_interleave(model.heads // kv_heads, dim=1) for t in (k, v))
    scores = (q @ k.transpose(2, 3) * d**-0.5).masked_fill(~torch.ones(tokens, tokens).tril().bool(), -torch.inf)
    out = (scores.softmax(-1) @ v).transpose(1, 2).reshape(batch * tokens, -1)
    out.backward(grad)

    def work(backward: bool) -> Attention:
        return Attention(batch, tokens, tokens, "causal", model.heads, kv_heads, d, backward, "torch-flash-cpu", "fp32")

    operands = {"qkv": plain(packed), "out": torch.empty_like(grad).detach(), "lse": torch.empty(len(packed), 4)}
    call = play("attention", decisions, operands, work=work(False))
    close(call["out"], out)
    close(call["lse"], scores.logsumexp(-1).transpose(1, 2).reshape(-1, model.heads))
    operands |= {"grad": plain(grad), "grad_qkv": torch.empty_like(packed).detach()}
    close(play("attention.bwd", decisions, operands, work=work(True))["grad_qkv"], packed.grad)


@pytest.mark.parametrize("learned", [True, False])
def test_embedding(learned: bool) -> None:
    decisions, rows = decide(gpt()), 2 * 128
    ids = torch.randint(0, 30, (rows,))
    weight, positions, grad = leaf(30, 8), leaf(512, 8), leaf(rows, 8, seed=1)
    out = weight[ids] + (positions[torch.arange(rows) % 128] if learned else 0.0)
    out.backward(grad)
    tables = {"weight": flat(weight), "positions": flat(positions) if learned else None}
    close(play("embed", decisions, {"ids": ids, **tables, "out": torch.empty(rows, 8)})["out"], out)
    sums = {"grad_weight": torch.ones(30 * 8), "grad_positions": torch.ones(512 * 8) if learned else None}
    play("embed.bwd", decisions, {"ids": ids, "grad": plain(grad), **sums})
    close(sums["grad_weight"] - 1, weight.grad)
    if learned:
        close(sums["grad_positions"] - 1, positions.grad)


@pytest.mark.parametrize("bias", [True, False])
def test_residual_add(bias: bool) -> None:
    x, y, b = leaf(ROWS, 8), leaf(ROWS, 8, seed=1), leaf(8)
    operands = {"x": plain(x), "y": plain(y), "bias": plain(b) if bias else None, "out": torch.empty(ROWS, 8)}
    close(play("residual_add", GPT, operands)["out"], x + y + (b if bias else 0.0))


@pytest.mark.parametrize("uncounted", [0, 20, ROWS])
def test_cross_entropy_counts_targets(uncounted: int) -> None:
    logits, labels = leaf(ROWS, 33), torch.randint(0, 33, (ROWS,))
    logits.data.mul_(30.0).add_(100.0)  # exp of these logits overflows
    labels[:uncounted] = -100
    loss = F.cross_entropy(logits, labels, ignore_index=-100, reduction="sum") * 0.02
    loss.backward()
    call = play(
        "cross_entropy",
        GPT,
        {"logits": plain(logits), "labels": labels, "grad": torch.empty(ROWS, 33), "loss": torch.ones(1)},
        workspace_bytes=table.loss_workspace_bytes(ROWS, 33, "fp32"),
        scalars=StepScalars(loss_scale=0.02),
    )
    torch.testing.assert_close(call["loss"] - 1, loss.detach().view(1), rtol=1e-5, atol=1e-5)
    close(call["grad"], logits.grad)


def test_moves() -> None:
    source = leaf(ROWS, 8).detach()
    for op in ("copy", "d2h", "h2d"):
        assert torch.equal(play(op, GPT, {"source": source, "target": torch.empty(ROWS, 8)})["target"], source)
    assert not play("zero", GPT, {"target": torch.ones(ROWS)})["target"].any()


def test_grad_norm_adds_squares(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(import_module("memo_exec.kernels.optimizer"), "DOT_ELEMENTS", 64)
    grads, out = leaf(1000).detach(), torch.ones(1)
    play("grad_norm", GPT, {"grads": grads, "out": out})
    assert float(out - 1) == pytest.approx(float(grads.double().square().sum()), rel=1e-6)


@pytest.mark.parametrize("clip", [None, 0.5, 1e6])
@pytest.mark.parametrize("decay", [True, False])
def test_adamw_equals_torch(clip: float | None, decay: bool) -> None:
    parameter = torch.nn.Parameter(leaf(200).detach())
    mine = parameter.detach().clone()
    torch_adamw = torch.optim.AdamW(
        [parameter], lr=0.01, betas=(0.8, 0.9), eps=1e-6, weight_decay=0.3 if decay else 0.0
    )
    moments = {"moment1": torch.zeros(200), "moment2": torch.zeros(200)}
    for step in range(1, 4):
        grads = leaf(200, seed=step).detach()
        parameter.grad = grads.clone()
        if clip is not None:
            torch.nn.utils.clip_grad_norm_([parameter], clip)
        torch_adamw.step()
        given = StepScalars(lr=0.01, step=step, beta1=0.8, beta2=0.9, eps=1e-6, weight_decay=0.3, clip=clip)
        operands = {"grads": grads, "norm": grads.square().sum().view(1), **moments, "params": mine}
        play("adamw.decay" if decay else "adamw.no_decay", GPT, operands, scalars=given)
    torch.testing.assert_close(mine, parameter.detach(), rtol=1e-5, atol=1e-6)


def test_adamw_with_master_and_narrow_moments(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(import_module("memo_exec.kernels.optimizer"), "ADAMW_ELEMENTS", 64)
    master = leaf(200).detach()
    wanted = torch.nn.Parameter(master.clone())
    optimizer = torch.optim.AdamW([wanted], lr=0.01, betas=(0.9, 0.95), weight_decay=0.1)
    operands = {
        "grads": leaf(200, seed=1).detach(),
        "norm": torch.ones(1),
        "master": master,
        "moment1": torch.zeros(200, dtype=torch.bfloat16),
        "moment2": torch.zeros(200, dtype=torch.bfloat16),
        "params": torch.empty(200, dtype=torch.bfloat16),
    }
    wanted.grad = operands["grads"].clone()
    optimizer.step()
    size = table.adamw_workspace_bytes(200, "fp32", "fp32", "bf16")
    play("adamw.decay", GPT, operands, scalars=StepScalars(lr=0.01), workspace_bytes=size)
    torch.testing.assert_close(master, wanted.detach(), rtol=1e-5, atol=1e-6)
    assert torch.equal(operands["params"], master.bfloat16())
    close(operands["moment1"].float(), (0.1 * wanted.grad).bfloat16().float())
