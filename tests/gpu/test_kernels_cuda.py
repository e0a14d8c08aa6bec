"""Triton's row-wise kernels on a CUDA device match the plain ones, also beyond 32-bit offsets. Not yet run on a GPU."""

from __future__ import annotations

import importlib.util
from typing import get_args

import pytest
import torch
from torch.nn import functional as F  # noqa: N812

from memo_sim.contract.hardware import LinearLossKernel
from memo_sim.contract.plan import Kernels
from memo_sim.program.operators import workspaces as table
from tests.exec_cpu.kernels import rowwise_comparison as comparison
from tests.exec_cpu.kernels.hand_call import play
from tests.exec_cpu.kernels.linear_loss_comparison import Trial
from tests.exec_cpu.small import decide, gpt, llama

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
    pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="needs Triton"),
]
FUSED = Kernels(attention="torch-flash", rowwise="triton")


@pytest.mark.parametrize("name", comparison.NAMES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_fused_kernels_match_the_plain_ones(name: str, dtype: torch.dtype) -> None:
    assert comparison.faults(name, dtype=dtype, device="cuda", rounding=comparison.ROUNDING[dtype]) == []


@pytest.mark.parametrize(("dtype", "most"), [(torch.float32, 1e-4), (torch.bfloat16, 2.0**-6)])
@pytest.mark.parametrize("kernel", get_args(LinearLossKernel))
@pytest.mark.parametrize(("vocab", "tp"), [(97, 1), (5000, 2), (5, 4)])
def test_a_loss_with_the_classifier_inside_is_autograds(
    vocab: int, tp: int, kernel: LinearLossKernel, dtype: torch.dtype, most: float
) -> None:
    found = Trial(kernel, vocab, tp, dtype, device="cuda").errors()
    assert max(found.values()) < most, found


def test_norms_beyond_32_bits() -> None:
    """Checks the last of 2**31 / 4096 + 64 rows, in forward and backward."""
    rows, width = 2**19 + 64, 4096
    decisions = decide(llama(), dtype="bf16", kernels=FUSED)
    x = torch.ones(rows, width, dtype=torch.bfloat16, device="cuda")
    x[-64:] = torch.randn(64, width, device="cuda")
    weight, stats, out = torch.ones(width, dtype=x.dtype, device="cuda"), torch.empty(rows, device="cuda"), x * 0
    play("rms_norm", decisions, {"x": x, "weight": weight, "stats": stats, "out": out}, device="cuda")
    wanted = F.rms_norm(x[-64:].float(), (width,), eps=decisions.model.norm_eps)
    assert (out[-64:] - wanted).abs().max() < 0.02 * wanted.abs().max()
    # A gradient of its own: a norm ignores its input's scale, so the gradient of x along x is zero but for rounding.
    grad, sums = torch.ones_like(x), torch.zeros(width, device="cuda")
    grad[-64:] = torch.randn(64, width, device="cuda")
    operands = {"grad": grad, "x": x, "stats": stats, "weight": weight, "out": out, "grad_weight": sums}
    size = table.norm_backward_workspace_bytes(rows, width, "bf16", "triton")
    play("rms_norm.bwd", decisions, operands, workspace_bytes=size, device="cuda")
    tail = x[-64:].float().requires_grad_()
    F.rms_norm(tail, (width,), eps=decisions.model.norm_eps).backward(grad[-64:].float())
    assert tail.grad is not None
    assert (out[-64:] - tail.grad).abs().max() < 0.02 * tail.grad.abs().max()


def test_gelu_beyond_32_bits() -> None:
    x = torch.zeros(2**31 + 4096, dtype=torch.bfloat16, device="cuda")
    x[-4096:] = torch.randn(4096, device="cuda")
    out = torch.empty_like(x)
    play("gelu", decide(gpt(), dtype="bf16", kernels=FUSED), {"x": x, "out": out}, device="cuda")
    wanted = F.gelu(x[-4096:].float())
    assert (out[-4096:] - wanted).abs().max() < 0.02


def test_fused_kernels_take_no_more_memory_than_the_plain() -> None:
    for name in ("layer_norm", "layer_norm.bwd", "gelu", "swiglu.bwd", "rotary", "cross_entropy"):
        trial = comparison.TRIALS[name]()
        trial.played("triton", torch.bfloat16, "cuda")
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        plain = trial.played("torch", torch.bfloat16, "cuda")
        most = torch.cuda.max_memory_allocated()
        del plain
        torch.cuda.reset_peak_memory_stats()
        trial.played("triton", torch.bfloat16, "cuda")
        assert torch.cuda.max_memory_allocated() <= most, name
