"""Every attention backend that is installed here passes the conformance test, also around 2**31 elements.

The conformance test itself is tested on the CPU (tests/exec_cpu/kernels/test_kernels_conformance.py), where fakes take
the backends' calls. ``-k flash3`` runs one backend. Not yet run on a GPU.
"""

from __future__ import annotations

from importlib import import_module
from typing import Any

import pytest
import torch
from torch import Tensor

from memo_exec.kernels.attention import BACKENDS
from memo_exec.kernels.attention_backend import CAUSAL, AttentionBackward
from memo_exec.machine.attention_kernels import attention_kernels
from memo_exec.machine.kernel_trial import FORMS, Form, Heads, attention_fails, triton_fails
from memo_exec.machine.machine import this_machine
from memo_exec.machine.rowwise_kernels import rowwise_kernels
from memo_sim.contract.attention_kernels import ATTENTION_KERNELS
from memo_sim.program.ir.work import Attention
from memo_sim.program.operators.head_groups import INT32_ELEMENTS, fewest_head_groups
from tests.exec_cpu.kernels import attention_reference as reference
from tests.exec_cpu.kernels.attention_conformance import CASES, WINDOWS, Case, faults

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
ON_CUDA = [name for name in BACKENDS if name != "torch-flash-cpu"]


def installed(name: str) -> Any:
    if why_not := attention_kernels(this_machine())[name]:
        pytest.skip(f"{name}: {why_not}")
    return import_module(BACKENDS[name])


@pytest.mark.parametrize("name", ON_CUDA)
@pytest.mark.parametrize("case", [*CASES, *WINDOWS], ids=str)
@pytest.mark.parametrize("deterministic", [False, True])
def test_a_backend_conforms(name: str, case: Case, deterministic: bool) -> None:
    backend = installed(name)
    if name == "flash3" and deterministic and case.head_dim == 256:
        pytest.skip("flash-attn 3 has no deterministic backward for heads of 256")
    if case.window and not ATTENTION_KERNELS[name].windows:
        pytest.skip("plans with windows are refused for this kernel")
    assert faults(backend, case, device="cuda", dtype=torch.bfloat16, deterministic=deterministic) == []


@pytest.mark.parametrize("name", ON_CUDA)
@pytest.mark.parametrize("head_dim", [64, 128])
@pytest.mark.parametrize("form", FORMS)
def test_a_backend_that_conforms_passes_its_trial(name: str, head_dim: int, form: Form) -> None:
    installed(name)
    assert attention_fails(name, Heads(4, 1, head_dim), "bf16", torch.device("cuda"), form) == ""


def test_triton_passes_its_trial() -> None:
    if why_not := rowwise_kernels(this_machine())["triton"]:
        pytest.skip(why_not)
    assert triton_fails(torch.device("cuda")) == ""


@pytest.mark.parametrize("name", ON_CUDA)
def test_rows_may_lie_beyond_32_bits(name: str) -> None:
    """The last rows of a head group in wide packed rows are more than 2**31 elements from the first."""
    case = Case(65_664, 2, 1, 128, groups=86)
    assert case.tokens * case.groups * (case.heads + 2 * case.kv_heads) * case.head_dim > INT32_ELEMENTS
    assert faults(installed(name), case, device="cuda", dtype=torch.bfloat16) == []


@pytest.mark.parametrize("name", ON_CUDA)
def test_as_many_elements_as_the_plan_allows(name: str) -> None:
    """Compares first and last heads of the largest head group that a plan allows (flash3: over 2**31 elements)."""
    backend = installed(name)
    heads, shared, tokens, head_dim = (4160 if name == "flash3" else 4096), 8, 4096, 128
    work = Attention(1, tokens, tokens, "causal", heads, heads // shared, head_dim, True, name, "bf16")
    assert fewest_head_groups(work) == 1
    assert heads * tokens * head_dim >= INT32_ELEMENTS

    def made(heads: int) -> Tensor:
        return torch.randn(1, tokens, heads, head_dim, dtype=torch.bfloat16, device="cuda")

    torch.manual_seed(0)
    with torch.inference_mode():
        q, k, v, grad = made(heads), made(heads // shared), made(heads // shared), made(heads)
        out, grads = torch.empty_like(q), tuple(torch.empty_like(x) for x in (q, k, v))
        lse = torch.empty(1, tokens, heads, device="cuda")
        backend.forward(q, k, v, out, lse, mask=CAUSAL)
        backend.backward(AttentionBackward(grad, (q, k, v), out, lse, grads, CAUSAL, deterministic=False))
        for group in (0, heads // shared // 2, heads // shared - 1):
            mine, its = slice(group * shared, (group + 1) * shared), slice(group, group + 1)
            qkv = q[:, :, mine].float(), k[:, :, its].float(), v[:, :, its].float()
            wanted_out, wanted_lse = reference.forward(*qkv, causal=True)
            wanted = reference.backward(grad[:, :, mine].float(), qkv, wanted_out, wanted_lse, mask=CAUSAL)
            found = out[:, :, mine], grads[0][:, :, mine], grads[1][:, :, its], grads[2][:, :, its]
            assert (lse[:, :, mine] - wanted_lse).abs().max() < 1e-3
            for result, true in zip(found, (wanted_out, *wanted), strict=True):
                assert (result - true).norm() / true.norm() < 0.02


@pytest.mark.parametrize("kernel", ["torch-cudnn", "torch-flash"])
def test_the_named_kernel_is_the_one_that_runs(kernel: str) -> None:
    """The profiler sees cuDNN's kernels for cuDNN and flash's for flash, and none of the other library."""
    backend, operands = installed(kernel), [torch.randn(1, 512, 4, 64, device="cuda").bfloat16() for _ in range(4)]
    lse = torch.empty(1, 512, 4, device="cuda")
    with torch.inference_mode(), torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        backend.forward(*operands, lse, mask=CAUSAL)
        torch.cuda.synchronize()
    names = " ".join(event.key.lower() for event in profile.key_averages())
    assert ("cudnn" in names) == (kernel == "torch-cudnn"), names
    assert ("flash_fwd" in names) == (kernel == "torch-flash"), names
