"""Compares each row-wise kernel, plain and fused, with the plain one in fp32 on the same numbers.

A fused result may differ from fp32 as much as the plain one in its dtype does, plus one rounding. Matrices are views of
wider rows, so a kernel that ignores strides reads NaN.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from memo_exec.kernels import StepScalars
from memo_sim.contract.knobs import RowwiseKernel
from memo_sim.contract.plan import Decisions, Kernels
from memo_sim.program.operators import workspaces as table
from tests.exec_cpu.kernels.hand_call import play
from tests.exec_cpu.small import CPU_KERNELS, decide, gpt, llama

ROWS, VOCAB = 50, 97
ROUNDING = {torch.float32: 1e-5, torch.bfloat16: 2.0**-8}
"""Rounding error of one result, relative to the largest."""
CUT = 2.0**-6
"""Error of a result that Triton's interpreter casts to bf16 twice; it truncates, whereas a GPU rounds."""


@dataclass
class Trial:
    """An op's operands, and the roles of those that it writes."""

    op: str
    decisions: Decisions
    tensors: dict[str, Tensor | None]
    written: tuple[str, ...]
    workspace_bytes: Callable[[str, RowwiseKernel], int] = lambda dtype, rowwise: 0

    def played(self, rowwise: RowwiseKernel, dtype: torch.dtype, device: str) -> dict[str, Tensor]:
        """Run the op and return the operands that it writes, in fp32."""
        given = {role: _placed(tensor, dtype, device) for role, tensor in self.tensors.items()}
        kernels = Kernels(attention=CPU_KERNELS.attention, rowwise=rowwise)
        name = {torch.float32: "fp32", torch.bfloat16: "bf16"}[dtype]
        fields: dict[str, Any] = {"dtype": name, "kernels": kernels, "model": self.decisions.model}
        play(
            self.op,
            decide(**fields),
            given,
            first=3,
            workspace_bytes=self.workspace_bytes(name, rowwise),
            scalars=StepScalars(loss_scale=0.02),
            device=device,
        )
        return {role: given[role].float() for role in self.written}  # type: ignore[union-attr]


def _placed(tensor: Tensor | None, dtype: torch.dtype, device: str) -> Tensor | None:
    """Return a copy in ``dtype``, with matrices as views of wider rows; statistics, sums and labels keep theirs."""
    if tensor is None:
        return None
    kept = tensor.dtype != torch.float64
    copy = tensor.to(device, tensor.dtype if kept else dtype).clone()
    if kept or tensor.dim() != 2:
        return copy
    wide = torch.full((len(copy), copy.shape[1] + 8), torch.nan, dtype=copy.dtype, device=device)
    wide[:, : copy.shape[1]] = copy
    return wide[:, : copy.shape[1]]


def _random(*shape: int, seed: int = 0, scale: float = 1.0, shift: float = 0.0) -> Tensor:
    """Return random numbers that bf16 represents exactly, in fp64; a trial replaces fp64 by the op's dtype."""
    generator = torch.Generator().manual_seed(seed + sum(shape))
    return (torch.randn(shape, generator=generator) * scale + shift).bfloat16().double()


def _norm(family: str, *, backward: bool, width: int = 80) -> Trial:
    decisions = decide(gpt() if family == "layer_norm" else llama())
    centred = family == "layer_norm"
    x, weight, bias = _random(ROWS, width, shift=0.7), _random(width), _random(width, seed=3) if centred else None
    mean = x.mean(1, keepdim=True) if centred else torch.zeros(ROWS, 1)
    rstd = ((x - mean).square().mean(1, keepdim=True) + decisions.model.norm_eps).rsqrt()
    stats = (torch.cat([mean, rstd], 1) if centred else rstd.view(-1)).float()
    if not backward:
        tensors = {"x": x, "weight": weight, "bias": bias, "stats": torch.zeros_like(stats), "out": torch.zeros_like(x)}
        return Trial(
            family,
            decisions,
            tensors,
            ("out", "stats"),
            lambda dtype, rowwise: table.norm_workspace_bytes(ROWS, width, dtype, rowwise),
        )
    tensors = {
        "grad": _random(ROWS, width, seed=1),
        "x": x,
        "stats": stats,
        "weight": weight,
        "residual_grad": _random(ROWS, width, seed=4) if centred else None,
        "out": torch.zeros_like(x),
        "grad_weight": torch.ones(width),
        "grad_bias": torch.ones(width) if centred else None,
    }
    return Trial(
        f"{family}.bwd",
        decisions,
        tensors,
        ("out", "grad_weight", "grad_bias") if centred else ("out", "grad_weight"),
        lambda dtype, rowwise: table.norm_backward_workspace_bytes(ROWS, width, dtype, rowwise),
    )


def _gelu(activation: str, *, backward: bool) -> Trial:
    decisions, x = decide(gpt(activation=activation)), _random(2048 + 5, scale=3)
    if not backward:
        return Trial("gelu", decisions, {"x": x, "out": torch.zeros_like(x)}, ("out",))
    tensors = {"grad": _random(len(x), seed=1), "x": x, "grad_x": torch.zeros_like(x)}
    return Trial("gelu.bwd", decisions, tensors, ("grad_x",))


def _swiglu(*, backward: bool, width: int = 1100) -> Trial:
    decisions, x = decide(llama()), _random(5, 2 * width, scale=3)
    if not backward:
        return Trial("swiglu", decisions, {"x": x, "out": torch.zeros(5, width).double()}, ("out",))
    tensors = {"grad": _random(5, width, seed=1), "x": x, "grad_x": torch.zeros_like(x)}
    return Trial("swiglu.bwd", decisions, tensors, ("grad_x",))


def _rotary(*, backward: bool) -> Trial:
    model = llama()
    role, heads = "grad" if backward else "qkv", model.heads + model.kv_heads
    packed = _random(ROWS, model.q_width + 2 * model.kv_width)
    return Trial(
        "rotary.bwd" if backward else "rotary",
        decide(model),
        {role: packed},
        (role,),
        lambda dtype, rowwise: table.rotary_workspace_bytes(ROWS, heads, model.head_dim, dtype, rowwise),
    )


def _qk_norm(*, backward: bool) -> Trial:
    model = llama(qk_norm=True, heads=6, kv_heads=3, head_dim=24)
    heads, size = model.heads + model.kv_heads, model.head_dim
    width, packed = heads * size, _random(ROWS, heads * size + model.kv_width, shift=0.4)
    weights = {"q_weight": _random(size), "k_weight": _random(size, seed=1)}
    if not backward:
        return Trial(
            "qk_norm",
            decide(model),
            {"qkv": packed, "raw": torch.zeros(ROWS, width).double(), **weights},
            ("qkv", "raw"),
            lambda dtype, rowwise: table.qk_norm_workspace_bytes(ROWS, heads, size, dtype),
        )
    grads = {f"grad_{name}": torch.ones(size) for name in weights}
    return Trial(
        "qk_norm.bwd",
        decide(model),
        {"grad": packed, "raw": _random(ROWS, width, seed=2), **weights, **grads},
        ("grad", *grads),
        lambda dtype, rowwise: table.qk_norm_backward_workspace_bytes(ROWS, heads, size, dtype),
    )


def _cross_entropy(uncounted: int) -> Trial:
    labels = torch.randint(0, VOCAB, (ROWS,), generator=torch.Generator().manual_seed(0))
    labels[:uncounted] = -100
    logits = _random(ROWS, VOCAB, scale=30, shift=100)  # exp of these logits overflows
    return Trial(
        "cross_entropy",
        decide(gpt()),
        {"logits": logits, "labels": labels, "grad": torch.zeros_like(logits), "loss": torch.ones(1)},
        ("grad", "loss"),
        lambda dtype, rowwise: table.loss_workspace_bytes(ROWS, VOCAB, dtype, rowwise),
    )


TRIALS: dict[str, Callable[[], Trial]] = {
    "layer_norm": lambda: _norm("layer_norm", backward=False),
    "layer_norm.bwd": lambda: _norm("layer_norm", backward=True),
    "rms_norm": lambda: _norm("rms_norm", backward=False),
    "rms_norm.bwd": lambda: _norm("rms_norm", backward=True),
    "gelu": lambda: _gelu("gelu", backward=False),
    "gelu.bwd": lambda: _gelu("gelu", backward=True),
    "gelu_tanh": lambda: _gelu("gelu_tanh", backward=False),
    "gelu_tanh.bwd": lambda: _gelu("gelu_tanh", backward=True),
    "swiglu": lambda: _swiglu(backward=False),
    "swiglu.bwd": lambda: _swiglu(backward=True),
    "rotary": lambda: _rotary(backward=False),
    "rotary.bwd": lambda: _rotary(backward=True),
    "qk_norm": lambda: _qk_norm(backward=False),
    "qk_norm.bwd": lambda: _qk_norm(backward=True),
    "cross_entropy": lambda: _cross_entropy(0),
    "cross_entropy, some": lambda: _cross_entropy(20),
    "cross_entropy, none": lambda: _cross_entropy(ROWS),
}
NAMES = list(TRIALS)


def faults(name: str, *, dtype: torch.dtype, device: str, rounding: float) -> list[str]:
    """Return the results of the fused kernel that differ from fp32 by more than the plain ones and ``rounding``."""
    trial = TRIALS[name]()
    wanted = trial.played("torch", torch.float32, device)
    plain, found = trial.played("torch", dtype, device), trial.played("triton", dtype, device)
    shown = []
    for role, true in wanted.items():
        error, rough = (found[role] - true).abs().max(), (plain[role] - true).abs().max()
        allowed = rough + rounding * true.abs().max()
        if not error <= allowed:
            shown.append(f"{role}: off by {error:.3g}, allowed {allowed:.3g}")
    return shown
