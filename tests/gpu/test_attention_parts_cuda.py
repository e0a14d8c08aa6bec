"""Attention in parts with every backend that is installed here: rings, and subsequences with a KV cache.

Not yet run on a GPU.
"""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from memo_exec.kernels.attention import BACKENDS
from memo_exec.machine.attention_kernels import attention_kernels
from memo_exec.machine.machine import this_machine
from tests.exec_cpu.kernels.attention_parts import Parted
from tests.exec_cpu.kernels.attention_subsequences import Subsequences
from tests.exec_cpu.small import llama

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
ON_CUDA = [name for name in BACKENDS if name != "torch-flash-cpu"]
ERROR = 2.0**-6
"""Allowed root mean square error: four roundings of bf16."""


def off(found: Tensor, wanted: Tensor) -> float:
    return float((found.float() - wanted).norm() / wanted.norm())


def installed(name: str) -> None:
    if why_not := attention_kernels(this_machine())[name]:
        pytest.skip(f"{name}: {why_not}")


@pytest.mark.parametrize("name", ON_CUDA)
@pytest.mark.parametrize("batch", [1, 2])
def test_parts_merge_and_their_gradients_add_up(name: str, batch: int) -> None:
    installed(name)
    parted = Parted(batch, rows=256, keys=(384, 192), head_dim=64, kernel=name, dtype="bf16", device="cuda")
    wanted, found = parted.reference(), parted.forward()
    assert off(found.out, wanted.out) < ERROR
    assert (found.lse - wanted.lse).abs().max() < 1e-3
    d_qkv, d_kv = parted.backward(wanted.out, wanted.lse)
    assert off(d_qkv[:, : parted.model.q_width], wanted.d_q) < ERROR
    assert all(off(mine, true) < ERROR for mine, true in zip(d_kv, wanted.d_kv, strict=True))


@pytest.mark.parametrize("name", ON_CUDA)
@pytest.mark.parametrize("head_groups", [1, 2])
def test_subsequences_equal_attention_over_the_whole_sequence(name: str, head_groups: int) -> None:
    installed(name)
    model = llama(head_dim=64)
    case = Subsequences(840, 3, model=model, head_groups=head_groups, kernel=name, dtype="bf16", device="cuda")
    wanted, found = case.reference(), case.played()
    assert off(found.out, wanted.out) < ERROR
    assert (found.lse - wanted.lse).abs().max() < 1e-3
    assert off(found.grad_qkv, wanted.grad_qkv) < ERROR
