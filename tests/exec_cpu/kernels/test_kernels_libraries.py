"""flash-attn 3 and 4 and transformer-engine are called as their sources document; fakes have their signatures."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import replace
from functools import partial
from types import ModuleType

import pytest
import torch

from memo_exec.kernels import attention_flash3, attention_flash4, attention_te
from memo_exec.kernels.attention import BACKENDS
from memo_exec.machine.attention_kernels import attention_kernels, check_kernels
from memo_exec.machine.machine import Machine
from memo_exec.observe.fake_player import observe_fake
from memo_sim.contract.errors import CannotRun
from memo_sim.contract.plan import Kernels
from memo_sim.program.lower import lower
from tests.exec_cpu.kernels import fake_libraries as fakes
from tests.exec_cpu.kernels.attention_conformance import CASES, WINDOWS, Case, faults
from tests.exec_cpu.small import decide, llama
from tests.refusals import refused

GPU = Machine("cuda", "a GPU", 1, 1, 2**33, 2**33, 2**33, 2**33)
Library = Callable[[], AbstractContextManager[None]]
LIBRARIES: list[tuple[ModuleType, Library]] = [
    (attention_flash3, fakes.flash3),
    (attention_flash4, partial(fakes.flash4, new=False)),
    (attention_flash4, partial(fakes.flash4, new=True)),
    (attention_te, partial(fakes.transformer_engine, new=False)),
    (attention_te, partial(fakes.transformer_engine, new=True)),
]
NAMES = ["flash3", "flash4-b17", "flash4", "te-2.9", "te-2.20"]


@pytest.mark.parametrize(("backend", "library"), LIBRARIES, ids=NAMES)
@pytest.mark.parametrize(
    "case", [CASES[0], CASES[1], CASES[4], CASES[6], CASES[8], CASES[9], WINDOWS[0], WINDOWS[3]], ids=str
)
def test_calls_match_the_signatures(backend: ModuleType, library: Library, case: Case) -> None:
    with library():
        assert backend.missing() == ""
        assert faults(backend, case, dtype=torch.bfloat16, deterministic=True) == []


@pytest.mark.parametrize(
    ("name", "library"), [("flash3", LIBRARIES[0]), ("flash4", LIBRARIES[2]), ("te-fused", LIBRARIES[4])]
)
def test_a_plan_with_a_library_that_is_not_installed_is_refused(name: str, library: tuple[ModuleType, Library]) -> None:
    decisions = decide(llama(), dtype="bf16", kernels=Kernels(attention=name))
    (program,) = lower(decisions)
    with refused(CannotRun, where="$.decisions.kernels.attention", got=(f"{name}:", "not installed")):
        check_kernels(decisions, program, GPU)
    with library[1]():
        check_kernels(decisions, program, GPU)


@pytest.mark.parametrize(
    ("head_dim", "deterministic", "most"),
    [(256, False, ""), (256, True, "192"), (192, True, ""), (12, False, "multiples of 8")],
)
def test_heads_without_a_kernel_are_refused(head_dim: int, deterministic: bool, most: str) -> None:
    model, kernels = llama(head_dim=head_dim), Kernels(attention="flash3")
    decisions = decide(model, dtype="bf16", deterministic=deterministic, kernels=kernels)
    (program,) = lower(decisions)
    with fakes.flash3():
        if not most:
            check_kernels(decisions, program, GPU)
            return
        with refused(CannotRun, got=("flash3", str(head_dim), most)):
            check_kernels(decisions, program, GPU)


def test_cudnn_is_refused_for_deterministic_plans(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch.backends.cudnn.is_available", lambda: True)
    decisions = decide(llama(), dtype="bf16", deterministic=True, kernels=Kernels(attention="torch-cudnn"))
    (program,) = lower(decisions)
    with refused(CannotRun, got=("torch-cudnn:", "deterministic")):
        check_kernels(decisions, program, GPU)


@pytest.mark.parametrize("name", ["flash3", "flash4", "te-fused"])
def test_without_its_library_a_kernel_is_missing(name: str) -> None:
    backend = {"flash3": attention_flash3, "flash4": attention_flash4, "te-fused": attention_te}[name]
    assert BACKENDS[name] == backend.__name__
    assert "not installed" in backend.missing()


def test_another_implementation_behind_torchs_operators_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    assert attention_kernels(GPU)["torch-flash"] == ""
    monkeypatch.setattr(torch.nn.attention, "current_flash_attention_impl", lambda: "FA3")
    assert attention_kernels(GPU)["torch-flash"] == "FA3 has replaced torch's flash operators in this process"


def test_flash_attn_2_does_not_count_as_flash_attn_4() -> None:
    with fakes.installed({"flash_attn": {}}):
        assert "flash-attn-4 is not installed" in attention_flash4.missing()


def test_an_unknown_version_is_refused_before_it_is_called() -> None:
    with fakes.flash3(forward=fakes.FLASH3_FORWARD.replace("num_splits", "splits")):
        assert attention_flash3.missing() == "flash-attn 3's fwd has no argument num_splits"
    modules = {"flash_attn": {}, "flash_attn.cute": {}, "flash_attn.cute.interface": {"_flash_attn_fwd": lambda q: q}}
    with fakes.installed(modules):
        assert "has no argument causal, k, lse" in attention_flash4.missing()
    package = "transformer_engine.pytorch"
    names = ["transformer_engine", package, f"{package}.cpp_extensions", f"{package}.cpp_extensions.fused_attn"]
    with fakes.installed({name: {} for name in names}):
        assert "cannot be imported" in attention_te.missing()


def test_triton_is_refused_where_it_cannot_run() -> None:
    decisions = decide(llama(), dtype="bf16", kernels=Kernels(attention="torch-flash", rowwise="triton"))
    (program,) = lower(decisions)
    with refused(CannotRun, where="$.decisions.kernels.rowwise", got=("triton", "cuda", "cpu"), wanted="torch"):
        check_kernels(decisions, program, replace(GPU, device="cpu"))
    if importlib.util.find_spec("triton") is None:
        with refused(CannotRun, got=("triton", "not installed")):
            check_kernels(decisions, program, GPU)
    with fakes.installed({"triton": {}}):
        check_kernels(decisions, program, GPU)


@pytest.mark.parametrize("name", ["flash3", "flash4", "te-fused"])
def test_requests_are_recorded_without_the_library(name: str) -> None:
    """The record has the declared workspace of each library call, and all requests of the rest of the step."""
    decisions = decide(llama(), dtype="bf16", kernels=Kernels(attention=name, rowwise="triton"))
    (program,) = lower(decisions)
    found = observe_fake(decisions, program)
    assert found.unexplained == ()
    assert found.with_scratch_peak_bytes == pytest.approx(found.program_peak_bytes, rel=0.02)


@pytest.mark.parametrize("name", ["flash1", "triton-flash", "plain"])
def test_a_kernel_that_is_only_priced_is_refused_by_its_name(name: str) -> None:
    decisions = decide(llama(), dtype="bf16", memory_policy="caching", kernels=Kernels(attention=name))
    (program,) = lower(decisions)
    with refused(CannotRun, where="$.decisions.kernels.attention", got=(name, "priced, not run"), wanted="torch-flash"):
        check_kernels(decisions, program, GPU)
