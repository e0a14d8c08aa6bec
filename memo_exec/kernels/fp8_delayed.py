"""Delayed scaling in FP8: scales from the largest values of earlier steps, as Transformer Engine's ``DelayedScaling``.

    scale = largest |x| of the last 1024 steps / largest value of the format,  copy = round(x / scale), clipped

Before there is a largest value the scale is 1, and a largest value that is zero, infinite or NaN leaves it as it was.
The first steps are clipped where values exceed the format's largest one, as in Transformer Engine.

All states have a row for each operand of a product and a column for each layer of the stage
(``program/layout/fp8.py``):

    fp8_amaxes    largest |x| of this step so far, of this rank; reduced over ranks at the step's end, then zero
    fp8_scales    what the next step divides by
    fp8_history   for each row and layer the largest values of 1024 steps; step n writes number (n - 1) mod 1024

A step has the same scales from its first micro-batch to its last, and in recompute, so results do not depend on the
layout or the schedule. Transformer Engine updates them after every micro-batch instead.
"""

from __future__ import annotations

import torch
from torch import Tensor

from memo_exec.kernels.call import Call
from memo_exec.kernels.fp8_scales import LEAST_LARGEST
from memo_exec.memory.dtypes import TORCH_DTYPES
from memo_sim.program.layout.fp8 import ACTIVATIONS, HISTORY, SCALED, gradients


def scale_of(call: Call, x: Tensor, of: str = "") -> Tensor:
    """Return the scale for ``x``, shape (1,), and note its largest value; ``of``: which matrix of a layer's weights."""
    layer = call.context.stage_layer(call.layer)
    scale, amax = (call.matrix(f"{role}.{of}" if of else role)[0, layer : layer + 1] for role in ("scale", "amax"))
    cell = call.context.cell(call.instruction.lane, 0)
    torch.linalg.vector_norm(x, torch.inf, dtype=torch.float32, out=cell[0])
    torch.maximum(amax, cell, out=amax)
    return scale


def enter_history(call: Call) -> None:
    """Enter the step's largest values, reduced over ranks, in the history; write the scales of the next step."""
    amaxes, scales, fp8 = call.matrix("amax"), call.matrix("scale"), call.context.fp8
    assert fp8 is not None  # a program has this operator with FP8 alone
    history = call["history"].view(*amaxes.shape, HISTORY)
    history[:, :, (call.context.scalars.step - 1) % HISTORY].copy_(amaxes)
    torch.amax(history, 2, out=amaxes)
    size = amaxes.numel()
    usable, positive = (
        part.view(torch.bool)[:size].view(amaxes.shape) for part in torch.split(fp8.wide[: 2 * size], size)
    )
    torch.lt(amaxes, torch.inf, out=usable)
    usable.logical_and_(torch.gt(amaxes, 0, out=positive))
    amaxes.clamp_(min=LEAST_LARGEST)
    for number, operand in enumerate(SCALED):
        dtype = gradients("delayed") if operand == "gradient" else ACTIVATIONS
        amaxes[number :: len(SCALED)].div_(torch.finfo(TORCH_DTYPES[dtype]).max)
    torch.where(usable, amaxes, scales, out=scales)
    amaxes.zero_()
