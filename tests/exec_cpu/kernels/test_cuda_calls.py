"""The CUDA backends' calls match the operators' schemas; they run on meta tensors, so values are not checked."""

from typing import Any

import pytest
import torch

from memo_exec.kernels import attention_torch_cudnn, attention_torch_flash
from memo_exec.kernels.attention_backend import CAUSAL, AttentionBackward, Mask


@pytest.mark.parametrize(
    ("backend", "mask"),
    [
        (attention_torch_flash, CAUSAL),
        (attention_torch_cudnn, CAUSAL),
        (attention_torch_flash, Mask(causal=True, window=64)),
    ],
)
@pytest.mark.parametrize("kv_heads", [2, 4])
def test_attention(backend: Any, mask: Mask, kv_heads: int) -> None:
    def empty(heads: int) -> torch.Tensor:
        return torch.empty(2, 256, heads, 64, dtype=torch.bfloat16, device="meta")

    q, k, v, out, lse = empty(4), empty(kv_heads), empty(kv_heads), empty(4), torch.empty(2, 256, 4, device="meta")
    backend.forward(q, k, v, out, lse, mask=mask)
    grads = empty(4), empty(kv_heads), empty(kv_heads)
    backend.backward(AttentionBackward(empty(4), (q, k, v), out, lse, grads, mask, deterministic=False))


def test_weight_gradients_accumulate_in_fp32() -> None:
    total = torch.empty(8, 16, device="meta")
    grad, x = (torch.empty(32, width, dtype=torch.bfloat16, device="meta") for width in (8, 16))
    result = torch.ops.aten.addmm.dtype_out(total, grad.t(), x, torch.float32, out=total)
    assert result.dtype == torch.float32
