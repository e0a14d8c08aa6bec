"""Forward and backward of each operator as explicit kernels, one backend a file.

``KERNELS[instruction.op](call)`` plays an instruction. Kernels write into their operands and cut scratch out of the
declared workspace; those in ``LIBRARY_SCRATCH`` call operators that allocate their results themselves, so their
workspace is counted and left to the library.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

from memo_exec.kernels import (
    activation,
    attention,
    embedding,
    linear,
    loss,
    move,
    norm,
    optimizer,
    qk_norm,
    rotary,
)
from memo_exec.kernels.call import Call, Context, Scratch, StepScalars

Kernel = Callable[[Call], None]

KERNELS: Mapping[str, Kernel] = {
    "embed": embedding.embed,
    "embed.bwd": embedding.embed_backward,
    "layer_norm": norm.layer_norm,
    "layer_norm.bwd": norm.layer_norm_backward,
    "rms_norm": norm.rms_norm,
    "rms_norm.bwd": norm.rms_norm_backward,
    "linear": linear.linear,
    "linear.dgrad": linear.linear_dgrad,
    "linear.wgrad": linear.linear_wgrad,
    "bias.bwd": linear.bias_backward,
    "gelu": activation.gelu,
    "gelu.bwd": activation.gelu_backward,
    "swiglu": activation.swiglu,
    "swiglu.bwd": activation.swiglu_backward,
    "rotary": rotary.rotary,
    "rotary.bwd": rotary.rotary_backward,
    "qk_norm": qk_norm.qk_norm,
    "qk_norm.bwd": qk_norm.qk_norm_backward,
    "attention": attention.attention,
    "attention.bwd": attention.attention_backward,
    "residual_add": move.residual_add,
    "cross_entropy": loss.cross_entropy,
    "copy": move.copy,
    "d2h": move.transfer,
    "h2d": move.transfer,
    "zero": move.zero,
    "grad_norm": optimizer.grad_norm,
    "adamw.decay": optimizer.adamw_decay,
    "adamw.no_decay": optimizer.adamw_no_decay,
}
"""The kernel of every op that a program without collectives has."""

LIBRARY_SCRATCH = frozenset({"attention", "attention.bwd"})
"""Ops whose library allocates the workspace that the program declares."""

__all__ = ["KERNELS", "LIBRARY_SCRATCH", "Call", "Context", "Kernel", "Scratch", "StepScalars"]
