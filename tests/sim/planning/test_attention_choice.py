"""Which attention kernel a question gets: by its word, its GPU's profile and the year of its libraries."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import msgspec
import pytest

from memo_sim.contract.attention_kernels import ATTENTION_KERNELS, FLASH_GENERATIONS
from memo_sim.contract.catalog import load_cluster, load_model
from memo_sim.contract.documents import parse_documents
from memo_sim.contract.errors import Infeasible, UsageError
from memo_sim.contract.hardware import Hardware
from memo_sim.contract.knobs import Pins
from memo_sim.contract.plan import Kernels, Layout
from memo_sim.costs.attention import AttentionRates, of_year
from memo_sim.planning.attention_kernels import attention_kernel
from memo_sim.planning.contradictions import check_pins
from memo_sim.planning.question import Question
from memo_sim.program.ir.work import Attention
from memo_sim.reasons.attention import attention
from tests.refusals import check_fields, refused


def ask(cluster: str = "h100-1x8", system: str = "megatron-lm", **pins: Any) -> Question:
    return asked_of(load_cluster(cluster)[1], cluster, system, **pins)


def asked_of(hardware: Hardware, cluster: str = "h100-1x8", system: str = "megatron-lm", **pins: Any) -> Question:
    found, _ = load_cluster(cluster)
    return Question(load_model("llama3-8b"), found, hardware, 32768, system, Pins(memory_policy="eager", **pins))


@pytest.mark.parametrize(
    ("cluster", "pins", "kernel"),
    [
        ("a100-1x8", {}, "flash2"),
        ("h100-1x8", {}, "flash3"),
        ("b200-1x8", {}, "flash4"),
        ("h100-1x8", {"libraries": "2026"}, "flash3"),  # cuDNN was measured, and is a tenth slower than published
        ("h100-1x8", {"libraries": "2023"}, "flash2"),
        ("h100-1x8", {"libraries": "2022"}, "flash1"),
        ("b200-1x8", {"libraries": "2025"}, "torch-cudnn"),
        ("a100-1x8", {"attention": "flash"}, "flash2"),
        ("h100-1x8", {"attention": "flash"}, "flash3"),
        ("h100-1x8", {"attention": "flash", "libraries": "2026"}, "flash3"),
        ("h100-1x8", {"attention": "flash", "libraries": "2022"}, "flash1"),
        ("b200-1x8", {"attention": "flash"}, "flash4"),
        ("b200-1x8", {"attention": "flash", "libraries": "2025"}, "flash2"),
        ("h100-1x8", {"attention": "flash1"}, "flash1"),
        ("h100-1x8", {"attention": "triton-flash"}, "triton-flash"),
        ("h100-1x8", {"attention": "cudnn"}, "torch-cudnn"),
        ("h100-1x8", {"attention": "torch-flash"}, "torch-flash"),
        ("b200-1x8", {"attention": "te-fused"}, "te-fused"),
        ("h100-1x8", {"attention": "plain"}, "plain"),
    ],
)
def test_the_kernel_of_a_question(cluster: str, pins: dict[str, Any], kernel: str) -> None:
    assert attention_kernel(ask(cluster, **pins)) == kernel


def test_a_generation_is_any_of_its_kernels_that_the_profile_has() -> None:
    """A calibrated machine often has torch's FlashAttention-2 only."""
    _, hardware = load_cluster("h100-1x8")
    torch_only = [table for table in hardware.attention if table.kernel == "torch-flash"]
    found = asked_of(msgspec.structs.replace(hardware, attention=torch_only), attention="flash2")
    assert attention_kernel(found) == "torch-flash"
    assert {kernel.generation for kernel in ATTENTION_KERNELS.values()} >= set(FLASH_GENERATIONS)


def test_a_kernel_that_the_profile_lacks_is_refused() -> None:
    with refused(Infeasible, where="h100-sxm5-80gb", got="flash4", wanted=("flash1", "flash3", "cudnn", "plain")):
        attention_kernel(ask(attention="flash4"))


@pytest.mark.parametrize(("asked", "year", "since"), [("flash3", "2023", "2024"), ("cudnn", "2022", "2023")])
def test_a_kernel_newer_than_the_libraries_is_wrong_usage(asked: str, year: str, since: str) -> None:
    with pytest.raises(UsageError) as caught:
        check_pins(ask(attention=asked, libraries=year))
    check_fields(caught.value, UsageError, got=(asked, year), wanted=since)


def test_the_year_decides_which_version_of_a_kernel_is_priced() -> None:
    work = Attention(1, 16384, 16384, "causal", 64, 64, 128, False, "torch-cudnn", "bf16")
    _, hardware = load_cluster("h200-1x8")
    rates = {
        year: work.flops / AttentionRates(of_year(hardware.attention, year)).seconds(work, set()) / 1e12
        for year in ("2024", "2025", "2026")
    }
    assert rates == pytest.approx({"2024": 539, "2025": 539, "2026": 570}, rel=1e-3)


def test_a_systems_own_attention_is_not_that_of_a_named_kernel() -> None:
    """The factor of a system whose kernel is not known does not slow a kernel that is."""
    _, hardware = load_cluster("a800-1x8")

    def rates(**pins: Any) -> list[Any]:
        return [table.rows for table in asked_of(hardware, "a800-1x8", "deepspeed-ulysses", **pins).hardware.attention]

    named = rates(attention="flash2")
    assert named == [table.rows for table in hardware.attention]
    assert rates() == rates(attention="flash") != named


def test_the_answer_says_which_kernel_it_assumes_and_that_an_old_one_is_not_run() -> None:
    def said(**pins: Any) -> list[str]:
        question = ask(**pins)
        kernels = Kernels(attention=attention_kernel(question))
        return attention(question, msgspec.structs.replace(question.decisions(Layout()), kernels=kernels))

    (line,) = said()
    assert all(text in line for text in ("flash3", "flash_attn_interface", "--attention", "2024", "--libraries"))
    (line,) = said(attention="cudnn", libraries="2026")
    assert all(text in line for text in ("torch-cudnn", "2026"))
    assert "--attention" not in line
    _, not_run = said(attention="flash1")
    assert "memo-exec cannot run flash1" in not_run


@pytest.mark.parametrize(("window", "kernel"), [(1024, ""), (32768, "torch-cudnn"), (0, "torch-cudnn")])
def test_a_model_with_windows_gets_a_kernel_that_takes_them(window: int, kernel: str) -> None:
    """aten's cuDNN operator has no window; a window that no sequence exceeds needs none."""
    question = ask("b200-1x8", libraries="2025")
    windowed = msgspec.structs.replace(question.model, window=window)
    chosen = attention_kernel(replace(question, model=windowed))
    assert chosen == kernel or (not kernel and ATTENTION_KERNELS[chosen].windows)


def test_packed_documents_get_a_kernel_that_takes_them() -> None:
    """aten's cuDNN operator, the fastest of these libraries, takes no documents."""
    question = ask("b200-1x8", libraries="2025")
    assert attention_kernel(question) == "torch-cudnn"
    packing = replace(question, documents=parse_documents("mean=2k,max=16k", option="--documents"))
    assert ATTENTION_KERNELS[attention_kernel(packing)].documents
    assert ATTENTION_KERNELS[attention_kernel(replace(packing, model=load_model("mla-tiny")))].documents
