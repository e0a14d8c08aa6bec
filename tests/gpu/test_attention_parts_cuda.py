"""The ring's attention in parts, by every backend that is installed here: late queries, other keys, and their merge.

Not yet run: no GPU was at hand.
"""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from memo_exec.attention_kernels import attention_kernels
from memo_exec.kernels.attention import BACKENDS
from memo_exec.machine import this_machine
from tests.exec_cpu.attention_parts import Parted

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
ERROR = 2.0**-6
"""In the mean square: four roundings of bf16."""


def off(found: Tensor, wanted: Tensor) -> float:
    return float((found.float() - wanted).norm() / wanted.norm())


@pytest.mark.parametrize("name", [name for name in BACKENDS if name != "torch-flash-cpu"])
@pytest.mark.parametrize("batch", [1, 2])
def test_parts_merge_and_their_gradients_add_up(name: str, batch: int) -> None:
    if why_not := attention_kernels(this_machine())[name]:
        pytest.skip(f"{name}: {why_not}")
    parted = Parted(batch, rows=256, keys=(384, 192), head_dim=64, kernel=name, dtype="bf16", device="cuda")
    wanted, found = parted.reference(), parted.forward()
    assert off(found.out, wanted.out) < ERROR
    assert (found.lse - wanted.lse).abs().max() < 1e-3
    d_qkv, d_kv = parted.backward(wanted.out, wanted.lse)
    assert off(d_qkv[:, : parted.model.q_width], wanted.d_q) < ERROR
    assert all(off(mine, true) < ERROR for mine, true in zip(d_kv, wanted.d_kv, strict=True))
