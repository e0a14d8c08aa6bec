"""Tests the trial of kernels on a few tokens: a kernel that fails here, or gives a wrong result, is not used."""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor

from memo_exec.commands import doctor
from memo_exec.kernels import attention_flash3, attention_torch_cpu
from memo_exec.kernels.attention_backend import WHOLE, AttentionBackward, Mask
from memo_exec.machine import attention_kernels as kernels
from memo_exec.machine import preflight, rowwise_kernels
from memo_exec.machine.kernel_trial import FORMS, MOST_TEXT, Form, Heads, attention_fails, forms_of, triton_fails
from memo_exec.probes import grid as grids
from memo_exec.probes import usable as usables
from memo_sim.contract.errors import CannotRun
from memo_sim.contract.plan import Kernels, Layout
from memo_sim.program.lower import lower
from tests.exec_cpu.kernels import fake_libraries as fakes
from tests.exec_cpu.machine.test_preflight import CPU, GPU
from tests.exec_cpu.small import decide, llama
from tests.refusals import check_fields, refused

HERE = torch.device("cpu")
HEADS = Heads(4, 2, 64)
LIBRARIES: dict[str, Callable[[], AbstractContextManager[Any]]] = {
    "flash3": fakes.flash3,
    "flash4": partial(fakes.flash4, new=True),
    "te-fused": partial(fakes.transformer_engine, new=True),
}


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
@pytest.mark.parametrize("heads", [HEADS, Heads(3, 3, 32), Heads(4, 1, 128)])
def test_torchs_own_kernel_works(dtype: Any, heads: Heads, form: Form) -> None:
    assert attention_fails("torch-flash-cpu", heads, dtype, HERE, form) == ""


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("name", LIBRARIES)
def test_a_library_that_computes_attention_works(name: str, form: Form) -> None:
    with LIBRARIES[name]():
        assert attention_fails(name, HEADS, "bf16", HERE, form) == ""


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("name", LIBRARIES)
def test_a_library_that_takes_narrower_values_works(name: str, form: Form) -> None:
    with LIBRARIES[name]():
        assert attention_fails(name, Heads(4, 4, 48, 32), "bf16", HERE, form) == ""


def test_a_kernel_that_needs_equal_widths_gets_padded_values() -> None:
    assert attention_fails("torch-flash-cpu", Heads(4, 4, 48, 32), "fp32", HERE) == ""


@pytest.mark.parametrize(
    ("layout", "bidirectional", "forms"),
    [
        (Layout(), False, ("causal",)),
        (Layout(cp=2), False, ("causal", "parts")),
        (Layout(cp=2, cp_exchange="rsa"), False, ()),
        (Layout(metp=2), True, ("whole", "parts")),
        (Layout(tp=2, pp=2, subsequences=4), False, ("parts",)),
    ],
)
def test_kernels_are_tried_as_the_plan_calls_them(layout: Layout, bidirectional: bool, forms: tuple[Form, ...]) -> None:
    assert forms_of(decide(llama(bidirectional=bidirectional), layout=layout)) == forms


def test_a_library_that_raises_says_so() -> None:
    assert "flash_attn_interface" in attention_fails("flash3", HEADS, "bf16", HERE)  # not installed
    assert attention_fails("torch-cudnn", HEADS, "bf16", HERE)  # torch has it only for CUDA


def test_the_first_line_of_what_is_raised_is_passed_on(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*arguments: Any, **named: Any) -> None:
        raise OSError(f"no such architecture {'x' * MOST_TEXT}\na page of what the compiler said")

    monkeypatch.setattr(attention_torch_cpu, "forward", broken)
    found = attention_fails("torch-flash-cpu", HEADS, "fp32", HERE)
    assert "OSError: no such architecture xxx" in found
    assert "compiler" not in found
    assert len(found) < 2 * MOST_TEXT


PLAIN_FORWARD, PLAIN_BACKWARD = attention_torch_cpu.forward, attention_torch_cpu.backward


def without_mask(q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, *, mask: Mask) -> None:
    del mask
    PLAIN_FORWARD(q, k, v, out, lse, mask=WHOLE)


def wrong_statistics(q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, *, mask: Mask) -> None:
    PLAIN_FORWARD(q, k, v, out, lse, mask=mask)
    lse.mul_(1.4427)  # log-sum-exp in base 2 instead of e


def not_a_number(call: AttentionBackward) -> None:
    PLAIN_BACKWARD(call)
    call.grads[0][0, 0, 0, 0] = torch.nan


def keys_and_values_swapped(call: AttentionBackward) -> None:
    dq, dk, dv = call.grads
    PLAIN_BACKWARD(replace(call, grads=(dq, dv, dk)))


def square_alone(q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, *, mask: Mask) -> None:
    PLAIN_FORWARD(q, k[:, : q.shape[1]], v[:, : q.shape[1]], out, lse, mask=mask)


def own_statistics(call: AttentionBackward) -> None:
    """Compute output and log-sum-exp again from the given keys, which is right only if these are all keys."""
    out, lse = torch.empty_like(call.out), torch.empty_like(call.lse)
    PLAIN_FORWARD(*call.qkv, out, lse, mask=call.mask)
    PLAIN_BACKWARD(replace(call, out=out, lse=lse))


@pytest.mark.parametrize("wrong", [square_alone, own_statistics])
def test_what_is_right_for_whole_sequences_alone_is_found(wrong: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(attention_torch_cpu, "forward" if wrong is square_alone else "backward", wrong)
    assert attention_fails("torch-flash-cpu", HEADS, "fp32", HERE) == ""
    assert "gave a wrong result" in attention_fails("torch-flash-cpu", HEADS, "fp32", HERE, "parts")


@pytest.mark.parametrize("wrong", [without_mask, wrong_statistics, not_a_number, keys_and_values_swapped])
def test_a_kernel_that_computes_something_else_is_found(wrong: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    place = "forward" if wrong in (without_mask, wrong_statistics) else "backward"
    monkeypatch.setattr(attention_torch_cpu, place, wrong)
    assert "gave a wrong result" in attention_fails("torch-flash-cpu", HEADS, "fp32", HERE)


def test_triton_works_where_it_can_be_played() -> None:
    """On a CPU, Triton's kernels run only in its interpreter; compiled ones need a GPU."""
    plays = importlib.util.find_spec("triton") is not None and os.environ.get("TRITON_INTERPRET") == "1"
    assert triton_fails(HERE).startswith("a trial call failed: ") is not plays
    assert bool(triton_fails(HERE)) is not plays


def on_gpu(monkeypatch: pytest.MonkeyPatch, **chosen: Any) -> CannotRun:
    """Return how a plan for a GPU is refused when its kernels are tried on this machine."""
    monkeypatch.setattr("torch.cuda.is_bf16_supported", lambda: True)
    monkeypatch.setattr(torch, "device", lambda name: HERE)
    loss = chosen.pop("loss", "auto")
    decisions = decide(llama(), dtype="bf16", loss=loss, kernels=Kernels(**chosen))
    (program,) = lower(decisions)
    with pytest.raises(CannotRun) as caught:
        preflight.check(decisions, program, GPU)
    assert caught.value.exit_code == 6
    return caught.value


def test_a_plan_whose_attention_fails_here_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    found = on_gpu(monkeypatch, attention="torch-flash")
    check_fields(found, CannotRun, where="$.decisions.kernels.attention", got=("torch-flash", "failed"))
    assert found.wanted != "torch-flash"


def test_a_plan_whose_triton_fails_here_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernels, "attention_fails", lambda *given, **named: "")
    monkeypatch.setattr(kernels, "triton_fails", lambda device: "a trial call failed: no compiler")
    with fakes.installed({"triton": {}}):
        found = on_gpu(monkeypatch, attention="torch-flash", rowwise="triton")
    check_fields(found, CannotRun, where="$.decisions.kernels.rowwise", got=("triton", "no compiler"), wanted="torch")


@pytest.mark.parametrize("installed", [True, False])
def test_a_fused_loss_without_triton_is_refused(monkeypatch: pytest.MonkeyPatch, *, installed: bool) -> None:
    """A CPU plays it with torch; on a GPU no other kernel takes its place."""
    monkeypatch.setattr(kernels, "attention_fails", lambda *given, **named: "")
    monkeypatch.setattr(kernels, "triton_fails", lambda device, loss: "a trial call failed: no compiler")
    missing = "" if installed else "triton is not installed"
    monkeypatch.setattr(kernels, "rowwise_kernels", lambda machine: {"torch": "", "triton": missing})
    why = "no compiler" if installed else "not installed"
    found = on_gpu(monkeypatch, attention="torch-flash", loss="fused")
    check_fields(found, CannotRun, where="$.decisions.loss", got=("fused", why), wanted="blocks")
    found = on_gpu(monkeypatch, attention="torch-flash", loss="linear-triton")
    check_fields(found, CannotRun, where="$.decisions.loss", got=("linear-triton", why), wanted="linear")


def test_a_device_that_is_too_old(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    monkeypatch.setattr("torch.backends.cudnn.is_available", lambda: True)
    monkeypatch.setattr("torch.cuda.get_device_capability", lambda: (7, 5))
    found = kernels.attention_kernels(GPU)
    assert {name for name, why_not in found.items() if "this device has 7.5" in why_not} == {
        "torch-flash",
        "torch-cudnn",
    }
    with fakes.flash3():
        assert attention_flash3.missing() == "flash-attn 3 needs compute capability 9.0"


@pytest.mark.parametrize("head_dim", [20, 264])
def test_heads_that_no_library_has_are_refused(head_dim: int) -> None:
    decisions = decide(llama(head_dim=head_dim), dtype="bf16", kernels=Kernels(attention="torch-flash"))
    (program,) = lower(decisions)
    with refused(CannotRun, where="$.decisions.kernels.attention", got=("torch-flash", str(head_dim))):
        kernels.check_kernels(decisions, program, GPU)


def only_small_heads(kernel: str, heads: Heads, *given: Any, **named: Any) -> str:
    return "a trial call failed: no engine" if heads.head_dim > 128 else ""


def test_the_doctor_says_which_heads_fail(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernels, "attention_fails", only_small_heads)
    (line,) = [text for text in doctor.report().splitlines() if text.startswith("attention torch-flash-cpu")]
    assert line.endswith("available with head sizes 64, 128; head size 256: a trial call failed: no engine")
    assert any(text.startswith("row-wise triton") and "runs on cuda" in text for text in doctor.report().splitlines())


def test_calibration_leaves_out_what_fails_and_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernels, "attention_fails", only_small_heads)
    found = usables.usable(CPU, grids.CPU)
    assert found.attention == ["torch-flash-cpu"]
    assert found.rowwise == ["torch"]
    assert found.left_out == {}  # what is not installed is no news
    monkeypatch.setattr(kernels, "attention_fails", lambda *given, **named: "it was tried and failed")
    with refused(CannotRun, got=("CPU", "torch-flash-cpu", "failed")):
        usables.usable(CPU, grids.CPU)


def test_calibration_measures_triton_where_it_works(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernels, "attention_fails", lambda kernel, *given, **named: "no" * (kernel == "torch-cudnn"))
    monkeypatch.setattr("torch.backends.cudnn.is_available", lambda: True)
    monkeypatch.setattr(rowwise_kernels, "triton_fails", lambda device, loss="auto": "no" * (loss != "auto"))
    with fakes.installed({"triton": {}}):
        found = usables.usable(GPU, grids.CUDA)
    assert found.rowwise == ["torch", "triton"]
    assert found.attention == ["torch-flash"]
    assert found.left_out == {"torch-cudnn": "heads of 64: no", "linear-triton": "no"}
    assert found.losses == []
