"""Gradient norm and AdamW (torch's fused kernel) on flat runs of parameters, on the device or on the host."""

from __future__ import annotations

import torch
from torch import Tensor

from memo_exec.kernels.call import Call
from memo_sim.program.operators.workspaces import ADAMW_ELEMENTS

Run = tuple[Tensor, Tensor, Tensor, Tensor]
"""Parameters or their master copy, gradients, first moments, second moments."""

DOT_ELEMENTS = 2**24
"""Elements per dot product; the results are added one by one."""


def grad_norm(call: Call) -> None:
    """``out += sum of grads**2`` over the ranges that this rank counts in the global norm."""
    lane = call.instruction.lane
    cell = call.context.cell(lane, 0)
    for counted in [call["grads"]] if "grads" in call.tensors else call.numbered("grads").values():
        for piece in torch.split(counted, DOT_ELEMENTS):
            if piece.dtype == cell.dtype:
                torch.dot(piece, piece, out=cell[0])
            else:  # a dot product of bf16 would be rounded to bf16
                torch.linalg.vector_norm(piece, dtype=cell.dtype, out=cell[0]).square_()
            call["out"].add_(cell)
    if _refuses_overflow(call):
        # 0 without an overflow, infinite with one: the norm is summed over all ranks, and no rank applies the update.
        cell.copy_(call.context.overflow[:1]).clamp_(max=1.0).neg_().add_(1.0).reciprocal_().sub_(1.0)
        call["out"].add_(cell)


def _refuses_overflow(call: Call) -> bool:
    """Return whether a step in which an expert's rows exceed the capacity is not applied."""
    return call.context.decisions.expert_overflow == "refuse"


def adamw_decay(call: Call) -> None:
    """Update parameters with weight decay (matrices)."""
    _adamw(call, call.context.scalars.weight_decay)


def adamw_no_decay(call: Call) -> None:
    """Update parameters without weight decay (norms and biases)."""
    _adamw(call, 0.0)


def _adamw(call: Call, weight_decay: float) -> None:
    params, master = call.get("params"), call.get("master")
    updated = call["params"] if master is None else master
    run = (updated, call["grads"], call["moment1"], call["moment2"])
    scale = _grad_scale(call)
    if len({tensor.dtype for tensor in run}) == 1:
        _fused(call, run, weight_decay, scale)
    else:
        _in_fp32(call, run, weight_decay, scale)
    if master is not None and params is not None:  # what is kept in FP8 alone is quantised next
        params.copy_(master)


def _in_fp32(call: Call, run: Run, weight_decay: float, scale: Tensor | None) -> None:
    """Update a run of several dtypes block by block, with a copy in fp32 of each tensor that is in bf16.

    Parameters and moments are rounded to the nearest bf16 number when they are copied back."""
    scratch, count = call.scratch(), min(len(run[0]), ADAMW_ELEMENTS)
    wide = [None if tensor.dtype == torch.float32 else scratch.take(count) for tensor in run]
    for first in range(0, len(run[0]), count):
        parts = [tensor[first : first + count] for tensor in run]
        block = [p if w is None else w[: len(p)].copy_(p) for p, w in zip(parts, wide, strict=True)]
        params, grads, moment1, moment2 = block
        _fused(call, (params, grads, moment1, moment2), weight_decay, scale)
        for part, computed in zip(parts, block, strict=True):
            if part is not computed and computed is not grads:
                part.copy_(computed)


def _grad_scale(call: Call) -> Tensor | None:
    """Return the divisor that reduces the gradients' norm to at most ``clip``; None without clipping."""
    clip = call.context.scalars.clip
    if clip is None:
        return None
    cell = call.context.cell(call.instruction.lane, 1)
    cell.copy_(call["norm"]).sqrt_().add_(1e-6).div_(clip).clamp_(min=1.0)
    return cell[0]


def _fused(call: Call, run: Run, weight_decay: float, scale: Tensor | None) -> None:
    """Run torch's fused AdamW on ``run``, whose tensors have one dtype."""
    params, grads, moment1, moment2 = run
    scalars = call.context.scalars
    step = call.context.cell(call.instruction.lane, 2).fill_(float(scalars.step))
    torch._fused_adamw_(
        [params],
        [grads],
        [moment1],
        [moment2],
        [],
        [step[0]],
        lr=scalars.lr,
        beta1=scalars.beta1,
        beta2=scalars.beta2,
        weight_decay=weight_decay,
        eps=scalars.eps,
        amsgrad=False,
        maximize=False,
        grad_scale=scale,
        found_inf=_refused(call) if _refuses_overflow(call) else None,
    )


def _refused(call: Call) -> Tensor:
    """Return 1 where the norm of all gradients is infinite, and the update is not applied; else 0."""
    cell = call.context.cell(call.instruction.lane, 3)
    cell.copy_(call["norm"]).mul_(0.0)
    return torch.ne(cell, cell, out=cell)[0]
