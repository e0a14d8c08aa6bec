"""The CPU's attention backend passes the conformance test, and the test finds every fault planted in a backend."""

from __future__ import annotations

import math
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from memo_exec.kernels import attention_torch_cpu
from memo_exec.kernels.attention_backend import CAUSAL, WHOLE, AttentionBackward, Mask
from tests.exec_cpu.kernels import attention_reference as reference
from tests.exec_cpu.kernels.attention_conformance import CASES, WINDOWS, Case, faults


@pytest.mark.parametrize("case", [*CASES, *WINDOWS], ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_backend_of_the_cpu_conforms(case: Case, dtype: torch.dtype) -> None:
    assert faults(attention_torch_cpu, case, dtype=dtype) == []


def forward(q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, *, mask: Mask, shift: int = 0) -> None:
    wide = q.double(), k.double(), v.double()
    result, logsumexp = reference.forward(*wide, causal=mask.causal, shift=shift, window=mask.window)
    out.copy_(result)
    lse.copy_(logsumexp)


def backward(call: AttentionBackward, *, shift: int = 0) -> None:
    q, k, v = (x.double() for x in call.qkv)
    grad, out, lse = call.grad.double(), call.out.double(), call.lse.double()
    found = reference.backward(grad, (q, k, v), out, lse, causal=call.mask.causal, shift=shift, window=call.mask.window)
    for target, result in zip(call.grads, found, strict=True):
        target.copy_(result)


def wrong(name: str) -> Any:
    """Return a backend with one fault."""

    def faulty_forward(q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, *, mask: Mask) -> None:
        if name == "forward sees one key too many":
            forward(q, k, v, out, lse, mask=mask, shift=1)
        elif name == "forward sees one key too few":
            forward(q, k, v, out, lse, mask=mask, shift=-1)
            out[:, 0], lse[:, 0] = v[:, 0].repeat_interleave(q.shape[2] // v.shape[2], 1), 0.0
        elif name == "forward is not causal":
            forward(q, k, v, out, lse, mask=WHOLE)
        elif name == "forward ignores the window":
            forward(q, k, v, out, lse, mask=CAUSAL)
        elif name == "a window has one key too many":
            forward(q, k, v, out, lse, mask=Mask(causal=True, window=mask.window + 1))
        elif name == "scale is forgotten":
            forward(q * q.shape[-1] ** 0.5, k, v, out, lse, mask=mask)
        elif name == "strides are ignored":
            forward(*(x.as_strided(x.shape, torch.empty(x.shape).stride()) for x in (q, k, v)), out, lse, mask=mask)
        elif name == "query heads alternate":
            whole = [x.repeat(1, 1, q.shape[2] // x.shape[2], 1) for x in (k, v)]
            forward(q, *whole, out, lse, mask=mask)
        else:
            forward(q, k, v, out, lse, mask=mask)
        if name == "lse has base 2":
            lse.div_(math.log(2))
        elif name == "lse lies by head":
            lse.copy_(lse.transpose(1, 2).reshape(lse.shape))
        elif name == "forward writes every head":
            out._base.nan_to_num_()  # type: ignore[union-attr]

    def faulty_backward(call: AttentionBackward) -> None:
        shift = {"backward sees one key too many": 1, "backward sees one key too few": -1}.get(name, 0)
        backward(call, shift=shift)
        if name == "gradients of keys lack a head":
            call.grads[1][:, :, 0] = 0.0
        elif name == "the last rows have no gradient":
            call.grads[0][:, -1] = 0.0

    return SimpleNamespace(forward=faulty_forward, backward=faulty_backward)


@pytest.mark.parametrize("case", CASES, ids=str)
def test_the_reference_conforms(case: Case) -> None:
    assert faults(wrong(""), case) == []
    assert faults(wrong(""), case, dtype=torch.bfloat16) == []


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    ("fault", "shown"),
    [
        ("forward sees one key too many", "out: off"),
        ("forward sees one key too few", "out: off"),
        ("forward is not causal", "out: off"),
        ("scale is forgotten", "out: off"),
        ("strides are ignored", "out: off"),
        ("query heads alternate", "out: off"),
        ("lse has base 2", "lse: off"),
        ("lse lies by head", "lse: off"),
        ("forward writes every head", "elements written"),
        ("backward sees one key too many", "dq: off"),
        ("backward sees one key too few", "dk: off"),
        ("gradients of keys lack a head", "dk: off"),
        ("the last rows have no gradient", "dq: off"),
    ],
)
def test_faults_are_found(fault: str, shown: str, dtype: torch.dtype) -> None:
    found = faults(wrong(fault), Case(200, 4, 2, 64), dtype=dtype)
    assert any(shown in line for line in found), found


@pytest.mark.parametrize("fault", ["forward ignores the window", "a window has one key too many"])
def test_faults_of_windows_are_found(fault: str) -> None:
    found = faults(wrong(fault), Case(200, 4, 2, 64, window=16))
    assert any("out: off" in line for line in found), found


def test_a_call_has_the_scale_that_it_is_given() -> None:
    """Twice the scale is the same as twice the queries."""
    q, k, v = (torch.randn(1, 64, heads, 16, generator=torch.Generator().manual_seed(3)) for heads in (4, 2, 2))
    for mask in (CAUSAL, Mask(causal=True, window=5)):
        found, wanted = ((torch.empty_like(q), torch.empty(q.shape[:3])) for _ in range(2))
        attention_torch_cpu.forward(q, k, v, *found, mask=mask, scale=0.5)
        attention_torch_cpu.forward(2 * q, k, v, *wanted, mask=mask)
        assert all(torch.allclose(one, other, atol=1e-6) for one, other in zip(found, wanted, strict=True))


def test_a_window_needs_a_causal_mask() -> None:
    with pytest.raises(ValueError, match="causal"):
        Mask(causal=False, window=4)
