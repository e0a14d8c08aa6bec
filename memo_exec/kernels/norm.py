"""LayerNorm and RMSNorm, forward and backward, in row blocks.

Statistics are in fp32: (mean, rstd) for LayerNorm, (rstd) for RMSNorm.

With ``hat = (x - mean) * rstd`` (mean 0 for RMSNorm) and ``g = grad * weight``:

    grad_x = rstd * (g - mean(g) - hat * mean(g * hat)), grad_weight = sum(grad * hat), grad_bias = sum(grad)

RMSNorm drops ``mean(g)``. All results go into operands and the declared workspace. torch's own norms do not fit: they
allocate their results, and in bf16 they round weight gradients to bf16.
"""

from __future__ import annotations

import torch
from torch import Tensor

from memo_exec.kernels.call import Call
from memo_sim.program.operators.workspaces import NORM_ROWS


def layer_norm(call: Call) -> None:
    """``out = (x - mean) * rstd * weight + bias``, ``stats = (mean, rstd)``."""
    _forward(call, centred=True)


def rms_norm(call: Call) -> None:
    """``out = x * rstd * weight``, ``stats = rstd``."""
    _forward(call, centred=False)


def layer_norm_backward(call: Call) -> None:
    """Compute the gradients of LayerNorm; add the residual branch's gradient to the input's gradient."""
    _backward(call, centred=True)


def rms_norm_backward(call: Call) -> None:
    """Compute the gradients of RMSNorm; add the residual branch's gradient to the input's gradient."""
    _backward(call, centred=False)


def reciprocal_deviation(x: Tensor, eps: float, out: Tensor) -> None:
    """Write ``1 / sqrt(mean of x**2 over the last dimension + eps)``.

    Both tensors are fp32; ``out`` has size 1 in the last dimension.
    """
    torch.linalg.vector_norm(x, dim=-1, keepdim=True, out=out)
    out.square_().div_(x.shape[-1]).add_(eps).rsqrt_()


def _forward(call: Call, *, centred: bool) -> None:
    x, out = call.matrix("x"), call.matrix("out")
    rows, features = x.shape
    stats, weight, bias = call["stats"].view(rows, -1), call["weight"], call.get("bias")
    narrow = x.dtype != torch.float32
    scratch = call.scratch()
    wide = scratch.take(min(rows, NORM_ROWS), features) if narrow else out
    vector = scratch.take(features) if narrow and centred else None
    for first in range(0, rows, NORM_ROWS):
        block = slice(first, min(rows, first + NORM_ROWS))
        source, target, rstd = x[block], out[block], stats[block, -1:]
        work = wide[: len(source)] if narrow else target
        if narrow:
            source = work.copy_(source)
        if centred:
            mean = stats[block, :1]
            torch.mean(source, 1, keepdim=True, out=mean)
            source = torch.sub(source, mean, out=work)
        reciprocal_deviation(source, call.context.model.norm_eps, rstd)
        torch.mul(source, rstd, out=work)
        if not centred and narrow:  # Hugging Face rounds to the dtype before it multiplies by the weight
            target.copy_(work).mul_(weight)
            continue
        work.mul_(weight if vector is None else vector.copy_(weight))
        if bias is not None:
            work.add_(bias if vector is None else vector.copy_(bias))
        if narrow:
            target.copy_(work)


def _backward(call: Call, *, centred: bool) -> None:
    grad, x, out = call.matrix("grad"), call.matrix("x"), call.matrix("out")
    rows, features = x.shape
    stats, weight, residual = call["stats"].view(rows, -1), call["weight"], call.get("residual_grad")
    grad_weight, grad_bias = call.get("grad_weight"), call.get("grad_bias")
    narrow = x.dtype != torch.float32
    scratch, count = call.scratch(), min(rows, NORM_ROWS)
    hats = scratch.take(count, features)
    grad_means, hat_means = scratch.take(count, 1), scratch.take(count, 1)
    total, wide_weight = scratch.take(features), scratch.take(features)
    wide = scratch.take(count, features) if narrow else out
    if narrow:
        weight = wide_weight.copy_(weight)
    for first in range(0, rows, NORM_ROWS):
        block = slice(first, min(rows, first + NORM_ROWS))
        incoming, rstd = grad[block], stats[block, -1:]
        hat, grad_mean, hat_mean = hats[: len(incoming)], grad_means[: len(incoming)], hat_means[: len(incoming)]
        work = wide[: len(incoming)] if narrow else out[block]
        _normalised(x[block], stats[block, :1] if centred else None, rstd, hat)
        upstream = work.copy_(incoming) if narrow else incoming
        if grad_bias is not None:
            torch.sum(upstream, 0, out=total)
            grad_bias.add_(total)
        torch.mul(upstream, hat, out=work)
        if grad_weight is not None:
            torch.sum(work, 0, out=total)
            grad_weight.add_(total)
        torch.mean(work.mul_(weight), 1, keepdim=True, out=hat_mean)
        upstream = work.copy_(incoming) if narrow else incoming
        torch.mul(upstream, weight, out=work)
        if centred:
            torch.mean(work, 1, keepdim=True, out=grad_mean)
            work.sub_(grad_mean)
        work.addcmul_(hat, hat_mean, value=-1).mul_(rstd)
        if residual is not None:
            work.add_(hat.copy_(residual[block]) if narrow else residual[block])
        if narrow:
            out[block].copy_(work)


def _normalised(x: Tensor, mean: Tensor | None, rstd: Tensor, hat: Tensor) -> None:
    """Write ``(x - mean) * rstd`` in fp32."""
    source = x if x.dtype == hat.dtype else hat.copy_(x)
    if mean is not None:
        source = torch.sub(source, mean, out=hat)
    torch.mul(source, rstd, out=hat)
