"""The kernels of experts give the results and gradients of transformers' own modules."""

from typing import Any

import pytest
import torch
from torch import Tensor
from transformers.models.mixtral.configuration_mixtral import MixtralConfig
from transformers.models.mixtral.modeling_mixtral import MixtralSparseMoeBlock, load_balancing_loss_func
from transformers.models.qwen3_moe.configuration_qwen3_moe import Qwen3MoeConfig
from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeSparseMoeBlock

from memo_exec.kernels import experts
from memo_sim.contract.experts import Experts
from memo_sim.program.operators import workspaces as table
from tests.exec_cpu.kernels.hand_call import play
from tests.exec_cpu.small import decide, llama

HIDDEN, WIDTH, COUNT, PER_TOKEN, TOKENS = 24, 20, 6, 2, 33


def mixtral() -> torch.nn.Module:
    config = MixtralConfig(
        hidden_size=HIDDEN, intermediate_size=WIDTH, num_local_experts=COUNT, num_experts_per_tok=PER_TOKEN
    )
    return MixtralSparseMoeBlock(config)


def qwen(*, renormalize: bool) -> torch.nn.Module:
    sizes = {"hidden_size": HIDDEN, "moe_intermediate_size": WIDTH, "num_experts": COUNT}
    config = Qwen3MoeConfig(**sizes, num_experts_per_tok=PER_TOKEN, norm_topk_prob=renormalize)
    return Qwen3MoeSparseMoeBlock(config)


AT_ONCE = [("mixtral", 0, True), ("qwen3", 17, True), ("mixtral", 0, False)]
BLOCKS = {"mixtral": mixtral, "qwen3": lambda: qwen(renormalize=True), "qwen3 raw": lambda: qwen(renormalize=False)}


def close(found: Tensor, wanted: Tensor) -> None:
    torch.testing.assert_close(found, wanted, rtol=1e-5, atol=1e-5 * float(wanted.abs().max()))


class Played:
    """The kernels of one layer's experts, called by hand on all rows, or in two ranges of dispatched rows."""

    def __init__(self, block: Any, x: Tensor, *, dtype: str = "fp32", balance: float = 0.0, cut: int = 0) -> None:
        renormalize = getattr(block.gate, "norm_topk_prob", True)
        sizes = Experts(count=COUNT, per_token=PER_TOKEN, hidden=WIDTH, renormalize=renormalize, balance=balance)
        self.decisions = decide(
            llama(hidden=HIDDEN, experts=sizes), dtype=dtype, seq_tokens=TOKENS, micro_batch=1, global_batch=1
        )
        self.x, self.dtype, self.rows = x, dtype, TOKENS * PER_TOKEN
        kind = x.dtype
        self.gate = block.gate.weight.detach().to(kind).flatten()
        self.up = block.experts.gate_up_proj.detach().to(kind).flatten()
        self.down = block.experts.down_proj.detach().to(kind).flatten()
        self.ranges = [(0, cut), (cut, self.rows)] if cut else [(0, self.rows)]

    def call(self, op: str, scratch: int, *, first: int = 0, **tensors: Tensor) -> None:
        play(op, self.decisions, dict(tensors), workspace_bytes=scratch, first=first)

    def forward(self) -> Tensor:
        x, kind = self.x, self.x.dtype
        self.scores = torch.empty(TOKENS, COUNT)
        self.call(
            "router",
            table.router_workspace_bytes(TOKENS, HIDDEN, COUNT, self.dtype),
            x=x,
            weight=self.gate,
            out=self.scores,
        )
        self.probs = torch.empty(TOKENS, PER_TOKEN)
        self.experts = torch.empty(TOKENS, PER_TOKEN, dtype=torch.int64)
        self.call(
            "experts.route",
            table.route_workspace_bytes(TOKENS),
            scores=self.scores,
            probs=self.probs,
            experts=self.experts,
        )
        self.order, by_expert = (torch.empty(self.rows, dtype=torch.int64) for _ in range(2))
        self.call("experts.sort", 0, experts=self.experts, sorted=by_expert, order=self.order)
        self.places, self.ends = torch.empty_like(self.experts), torch.empty(COUNT, dtype=torch.int32)
        self.call(
            "experts.places",
            table.places_workspace_bytes(self.rows, COUNT),
            order=self.order,
            sorted=by_expert,
            places=self.places,
            ends=self.ends,
        )
        self.wide, self.act = torch.empty(self.rows, 2 * WIDTH, dtype=kind), torch.empty(self.rows, WIDTH, dtype=kind)
        for low, high in self.ranges:
            order, sent = self.order[low:high], torch.empty(high - low, HIDDEN, dtype=kind)
            self.call("experts.dispatch", table.dispatch_workspace_bytes(high - low), x=x, order=order, out=sent)
            wide, act = self.wide[low:high], self.act[low:high]
            self.call("experts.linear", 0, first=low, x=sent, weight=self.up, ends=self.ends, out=wide)
            scratch = table.expert_activation_workspace_bytes(high - low, WIDTH, self.dtype)
            self.call("experts.swiglu", scratch, x=wide, probs=self.probs, order=order, out=act)
        down = torch.empty(self.rows, HIDDEN, dtype=kind)
        self.call("experts.linear", 0, x=self.act, weight=self.down, ends=self.ends, out=down)
        return self.combined(down)

    def combined(self, rows: Tensor) -> Tensor:
        out = torch.empty_like(self.x)
        scratch = table.combine_workspace_bytes(TOKENS, HIDDEN, self.dtype)
        self.call("experts.combine", scratch, x=rows, places=self.places, out=out)
        return out

    def sent(self, x: Tensor) -> Tensor:
        out = torch.empty(self.rows, HIDDEN, dtype=x.dtype)
        self.call("experts.dispatch", table.dispatch_workspace_bytes(self.rows), x=x, order=self.order, out=out)
        return out

    def backward(self, grad: Tensor) -> dict[str, Tensor]:
        kind = grad.dtype
        given, d_act = self.sent(grad), torch.empty_like(self.act)
        self.call("experts.linear.dgrad", 0, grad=given, weight=self.down, ends=self.ends, out=d_act)
        d_down, d_up = torch.zeros(self.down.shape), torch.zeros(self.up.shape)
        self.wgrad(given, self.act, d_down)
        d_wide, d_probs = torch.empty_like(self.wide), torch.empty(TOKENS, PER_TOKEN)
        self.call(
            "experts.swiglu.bwd",
            table.expert_activation_backward_workspace_bytes(self.rows, WIDTH),
            grad=d_act,
            x=self.wide,
            probs=self.probs,
            order=self.order,
            grad_x=d_wide,
            grad_probs=d_probs,
        )
        balance = self.decisions.model.experts.balance > 0
        d_logits = torch.empty_like(self.scores)
        self.call(
            "experts.route.bwd",
            table.route_backward_workspace_bytes(TOKENS, COUNT, PER_TOKEN, balance=balance),
            grad=d_probs,
            probs=self.probs,
            scores=self.scores,
            experts=self.experts,
            ends=self.ends,
            out=d_logits,
        )
        d_sent = torch.empty(self.rows, HIDDEN, dtype=kind)
        self.call("experts.linear.dgrad", 0, grad=d_wide, weight=self.up, ends=self.ends, out=d_sent)
        self.wgrad(d_wide, self.sent(self.x), d_up)
        d_x, d_gate = self.combined(d_sent), torch.zeros(self.gate.shape)
        scratch = table.router_workspace_bytes(TOKENS, HIDDEN, COUNT, self.dtype)
        self.call("router.dgrad", scratch, grad=d_logits, weight=self.gate, out=d_x)
        scratch = table.router_wgrad_workspace_bytes(TOKENS, HIDDEN, COUNT, self.dtype)
        self.call("router.wgrad", scratch, grad=d_logits, x=self.x, out=d_gate)
        return {"x": d_x, "gate": d_gate, "up": d_up, "down": d_down, "logits": d_logits}

    def wgrad(self, grad: Tensor, x: Tensor, out: Tensor) -> None:
        tensors = {"grad": grad, "x": x, "ends": self.ends, "out": out}
        size = table.wgrad_workspace_bytes(grad.shape[1], x.shape[1], self.rows, self.dtype, "torch-flash-cpu")
        if size:
            tensors["wide"] = torch.full((size // 4,), float("nan"))
        self.call("experts.linear.wgrad", 0, **tensors)


def prepared(name: str) -> tuple[Any, Tensor, Tensor]:
    torch.manual_seed(5)
    block = BLOCKS[name]()
    for parameter in block.parameters():
        torch.nn.init.normal_(parameter, std=0.3)
    x = torch.randn(1, TOKENS, HIDDEN)
    return block, x.requires_grad_(), torch.randn(1, TOKENS, HIDDEN)


@pytest.mark.parametrize(("name", "cut", "one_call"), [*[(name, 17, False) for name in BLOCKS], *AT_ONCE])
def test_results_and_gradients_are_those_of_transformers(
    monkeypatch: pytest.MonkeyPatch, name: str, cut: int, one_call: bool
) -> None:
    """``one_call``: torch's product of several experts, as on a GPU; the CPU has it too."""
    monkeypatch.setattr(experts, "in_one_call", lambda _: one_call)
    block, x, grad = prepared(name)
    wanted = block(x)
    wanted.backward(grad)
    played = Played(block, x.detach()[0], cut=cut)
    close(played.forward(), wanted.detach()[0])
    found = played.backward(grad[0])
    close(found["x"], x.grad[0])
    close(found["gate"], block.gate.weight.grad.flatten())
    close(found["up"], block.experts.gate_up_proj.grad.flatten())
    close(found["down"], block.experts.down_proj.grad.flatten())


def test_a_cut_changes_no_bit() -> None:
    """Recompute computes a part of the dispatched rows again, and has to find the bits of forward."""
    block, x, _ = prepared("mixtral")
    whole, parts = Played(block, x.detach()[0]), Played(block, x.detach()[0], cut=17)
    whole.forward()
    parts.forward()
    again = Played(block, x.detach()[0], cut=17)
    again.forward()
    assert torch.equal(again.wide, parts.wide)
    close(parts.wide, whole.wide)


def test_the_balance_loss_has_the_gradient_of_transformers() -> None:
    """The loss is that of the Switch Transformer, averaged over a token's experts."""
    block, x, grad = prepared("mixtral")
    played = Played(block, x.detach()[0], balance=0.7)
    played.forward()
    logits = (x.detach()[0] @ block.gate.weight.detach().t()).requires_grad_()
    (0.7 * load_balancing_loss_func((logits,), COUNT, PER_TOKEN) / PER_TOKEN).backward()
    close(played.backward(torch.zeros_like(grad[0]))["logits"], logits.grad)


@pytest.mark.parametrize("name", BLOCKS)
def test_half_precision_is_near(name: str) -> None:
    block, x, grad = prepared(name)
    narrow = x.detach()[0].bfloat16()
    wide = Played(block, narrow.float())
    wide.gate, wide.up, wide.down = (w.bfloat16().float() for w in (wide.gate, wide.up, wide.down))
    played = Played(block, narrow, dtype="bf16")
    wanted, found = wide.forward(), played.forward()
    assert torch.equal(played.experts, wide.experts)
    assert (found.float() - wanted).abs().max() < 0.02 * wanted.abs().max()
    ours, theirs = played.backward(grad[0].bfloat16()), wide.backward(grad[0].bfloat16().float())
    for what, value in theirs.items():
        assert (ours[what].float() - value).abs().max() < 0.03 * value.abs().max(), what


ROUTERS = {
    "log-sum-exp": Experts(count=6, per_token=2, hidden=WIDTH, z_loss=0.7),
    "log-sum-exp and balance, scaled": Experts(count=6, per_token=2, hidden=WIDTH, z_loss=0.3, balance=0.2, scale=1.5),
    "softmax of groups, as it is": Experts(
        count=6, per_token=2, hidden=WIDTH, renormalize=False, groups=3, groups_per_token=2, scale=2.0
    ),
    "sigmoid, as it is": Experts(count=6, per_token=2, hidden=WIDTH, renormalize=False, scores="sigmoid", scale=2.0),
    "sigmoid of groups": Experts(
        count=6, per_token=2, hidden=WIDTH, scores="sigmoid", groups=3, groups_per_token=1, selection_bias=True
    ),
}


@pytest.mark.parametrize("name", ROUTERS)
def test_routers_have_the_gradients_of_autograd(name: str) -> None:
    """Of the probabilities, and of both losses: the mean over tokens of squared log-sum-exps, and that of balance."""
    of = ROUTERS[name]
    decisions = decide(llama(hidden=HIDDEN, experts=of), seq_tokens=TOKENS, micro_batch=1, global_batch=1)
    torch.manual_seed(3)
    logits, grad = torch.randn(TOKENS, 6).requires_grad_(), torch.randn(TOKENS, 2)
    bias = torch.randn(6) if of.selection_bias else None
    scores, lse = logits.detach().clone(), torch.empty(TOKENS, 1) if of.z_loss else None
    probs, chosen = torch.empty(TOKENS, 2), torch.empty(TOKENS, 2, dtype=torch.int64)
    given = {"scores": scores, "probs": probs, "experts": chosen, "bias": bias, "lse": lse}
    play("experts.route", decisions, given, workspace_bytes=table.route_workspace_bytes(TOKENS, of))
    every = logits.sigmoid() if of.scores == "sigmoid" else logits.softmax(-1)
    rated = every.detach() + (0 if bias is None else bias)
    if of.groups > 1:
        members = rated.view(TOKENS, of.groups, -1)
        best = members.topk(2, 2).values.sum(2).topk(of.groups_per_token, 1).indices
        rated = rated.masked_fill(
            ~torch.zeros(TOKENS, of.groups).scatter(1, best, 1.0).repeat_interleave(2, 1).bool(), -9
        )
    assert torch.equal(chosen.sort().values, rated.topk(2).indices.sort().values)
    picked = every.gather(1, chosen)
    wanted = of.scale * (picked / picked.sum(1, keepdim=True) if of.renormalize else picked)
    close(probs, wanted.detach())
    loss = (wanted * grad).sum() + of.z_loss * logits.logsumexp(1).square().mean()
    if of.balance:
        loss = loss + of.balance * load_balancing_loss_func((logits,), 6, 2) / 2
    loss.backward()
    out, loads = torch.empty(TOKENS, 6), torch.ones(6) if bias is not None else None
    counts = torch.bincount(chosen.flatten(), minlength=6)
    given = {"grad": grad, "probs": probs, "scores": scores, "experts": chosen, "lse": lse, "out": out, "loads": loads}
    balance = of.balance > 0
    scratch = table.route_backward_workspace_bytes(TOKENS, 6, 2, balance=balance, loads=of.selection_bias)
    given["ends"] = counts.cumsum(0).int()
    play("experts.route.bwd", decisions, given, workspace_bytes=scratch)
    close(out, logits.grad)
    assert loads is None or torch.equal(loads, 1 + counts.float())
