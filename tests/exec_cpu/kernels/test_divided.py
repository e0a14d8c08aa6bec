"""With the vocabulary split over tensor-parallel ranks, their losses, gradients and lookups add up to the whole."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from memo_exec.kernels import KERNELS, Call, Context, StepScalars
from memo_sim.contract.plan import Layout
from memo_sim.program.ir.instruction import Instruction, Lane
from memo_sim.program.ir.work import Rowwise
from memo_sim.program.operators.workspaces import (
    divided_ids_bytes,
    embed_backward_workspace_bytes,
    loss_workspace_bytes,
)
from tests.exec_cpu.small import decide, gpt

TOKENS = 48
SCALE = 0.125


def call(op: str, rank: int, tp: int, vocab: int, workspace: int = 0, **tensors: Tensor) -> None:
    """Run one kernel as rank ``rank``."""
    model = gpt(vocab=vocab, heads=8, kv_heads=8, head_dim=8)
    decisions = decide(model, layout=Layout(tp=tp), seq_tokens=TOKENS, micro_batch=1)
    context = Context(decisions, torch.device("cpu"), rank=rank, scalars=StepScalars(loss_scale=SCALE))
    if workspace:
        tensors["workspace"] = torch.full((workspace // 4 + 1,), torch.nan)
    KERNELS[op](Call(Instruction(op, op, Lane.COMPUTE, Rowwise(op, 1, 0, 0), ()), context, tensors))


def labels_of(vocab: int) -> Tensor:
    labels = torch.randint(0, vocab, (TOKENS,), generator=torch.Generator().manual_seed(1))
    labels[::5] = -100
    return labels


def divided_loss(logits: Tensor, tp: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Return the loss and the gradient that ``tp`` ranks compute from (tokens, vocab) logits."""
    vocab = logits.shape[1]
    width = -(-vocab // tp)
    padded = torch.full((TOKENS, width * tp), 1e4)  # columns beyond the vocabulary must not count
    padded[:, :vocab] = logits
    labels, name = labels_of(vocab), {torch.float32: "fp32", torch.bfloat16: "bf16"}[dtype]
    scratch = loss_workspace_bytes(TOKENS, width, name)
    parts = [part.contiguous().to(dtype) for part in padded.split(width, dim=1)]
    grads = [torch.full_like(part, torch.nan) for part in parts]
    stats = [torch.full((TOKENS, 3), torch.nan) for _ in parts]
    for rank, (part, grad, numbers) in enumerate(zip(parts, grads, stats, strict=True)):
        operands = {"logits": part, "labels": labels, "exponentials": grad, "out": numbers}
        call("cross_entropy.stats", rank, tp, vocab, scratch, **operands)
    rows = torch.stack([numbers.view(3, TOKENS) for numbers in stats])
    largest = rows[:, 0].amax(0)
    whole = torch.stack([largest, (rows[:, 1] - largest).exp().sum(0), rows[:, 2].sum(0)])
    losses = []
    for rank, (part, grad) in enumerate(zip(parts, grads, strict=True)):
        loss = torch.zeros(1)
        operands = {"logits": part, "labels": labels, "stats": whole.view(TOKENS, 3), "grad": grad, "loss": loss}
        call("cross_entropy", rank, tp, vocab, scratch, **operands)
        losses.append(loss)
    assert all(torch.equal(loss, losses[0]) for loss in losses)
    return losses[0], torch.cat(grads, dim=1)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize(("vocab", "tp"), [(64, 2), (97, 4), (5, 4), (3, 8)])
@pytest.mark.parametrize("scale", [1.0, 100.0])
def test_loss_and_gradient(vocab: int, tp: int, dtype: torch.dtype, scale: float) -> None:
    """Some logits are in the hundreds, so that their exponentials overflow."""
    generator = torch.Generator().manual_seed(0)
    logits = (scale * torch.randn(TOKENS, vocab, generator=generator)).to(dtype).float()
    loss, grad = divided_loss(logits, tp, dtype)
    leaf = logits.double().requires_grad_()
    wanted = SCALE * torch.nn.functional.cross_entropy(leaf, labels_of(vocab), ignore_index=-100, reduction="sum")
    wanted.backward()
    assert leaf.grad is not None
    assert float(loss) == pytest.approx(float(wanted.detach()), rel=1e-5)
    assert not grad[:, vocab:].any()
    # The log-sum-exp is exchanged in fp32, and the gradient is rounded to the logits' dtype.
    tolerance = SCALE * (2**-22 * max(1.0, float(logits.abs().max())) + torch.finfo(dtype).eps)
    assert (grad[:, :vocab] - leaf.grad).abs().max() <= tolerance


def halves(vocab: int, tp: int) -> dict[str, Any]:
    generator = torch.Generator().manual_seed(3)
    ids = torch.randint(0, vocab, (TOKENS,), generator=generator)
    return {"ids": ids, "rows": torch.randn(-(-vocab // tp) * tp, 64, generator=generator)}


@pytest.mark.parametrize(("vocab", "tp"), [(64, 2), (97, 4), (3, 8)])
def test_lookups_add_up(vocab: int, tp: int) -> None:
    made = halves(vocab, tp)
    total = torch.zeros(TOKENS, 64)
    for rank, part in enumerate(made["rows"].chunk(tp)):
        out = torch.full((TOKENS, 64), torch.nan)
        call("embed", rank, tp, vocab, divided_ids_bytes(TOKENS), ids=made["ids"], weight=part.reshape(-1), out=out)
        total += out
    assert torch.equal(total, made["rows"][made["ids"]])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_gradients_of_lookups_go_where_the_token_is(dtype: torch.dtype) -> None:
    vocab, tp = 97, 4
    ids = halves(vocab, tp)["ids"]
    grad = torch.randn(TOKENS, 64, generator=torch.Generator().manual_seed(4)).to(dtype)
    name = {torch.float32: "fp32", torch.bfloat16: "bf16"}[dtype]
    scratch = embed_backward_workspace_bytes(TOKENS, 64, name, divided=True)
    parts = []
    for rank in range(tp):
        parts.append(torch.zeros(-(-vocab // tp) * 64))
        call("embed.bwd", rank, tp, vocab, scratch, ids=ids, grad=grad.clone(), grad_weight=parts[-1])
    wanted = torch.zeros(vocab, 64).index_add_(0, ids, grad.float())
    found = torch.cat(parts).view(-1, 64)
    assert torch.allclose(found[:vocab], wanted, atol=1e-6)
    assert not found[vocab:].any()
