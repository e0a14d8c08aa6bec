"""The search replaces the default's loss by Triton's with the classifier inside where a profile says it is faster."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from memo_sim.contract.catalog import load_cluster, load_model
from memo_sim.contract.hardware import Hardware, LinearLossTable, Source
from memo_sim.contract.knobs import Loss
from memo_sim.contract.plan import Decisions, Layout
from memo_sim.planning.kernels_elsewhere import kernels_elsewhere
from memo_sim.planning.question import Question
from memo_sim.planning.space import Space

CLUSTER, H100 = load_cluster("h100-1x8")


def profile(flops_per_s: float | None) -> Hardware:
    """Return the H100's profile, with made-up rates of Triton's kernels."""
    if flops_per_s is None:
        return H100
    tables = [
        LinearLossTable(
            kernel="triton",
            dtype="bf16",
            part=part,  # type: ignore[arg-type]
            rows=[[1024.0, 8192.0, 4096.0, flops_per_s], [65536.0, 131072.0, 8192.0, flops_per_s]],
            source="bench",
        )
        for part in ("statistics", "gradient")
    ]
    sources = {**H100.sources, "bench": Source(kind="measured", text="made up")}
    return msgspec.structs.replace(H100, linear_loss=tables, sources=sources)


def question(flops_per_s: float | None, seq_tokens: int = 32768, **fields: Any) -> Question:
    model, hardware = load_model("llama3-8b"), profile(flops_per_s)
    return Question(model=model, cluster=CLUSTER, hardware=hardware, seq_tokens=seq_tokens, **fields)


def chosen(asked: Question, layout: Layout | None = None) -> Decisions:
    return Space(asked).keeping(layout or Layout(tp=8, sequence_parallel=True))[0]


@pytest.mark.parametrize("layout", [Layout(tp=8, sequence_parallel=True), Layout(ulysses=8), Layout(tp=4, pp=2)])
def test_it_is_chosen_where_it_is_faster(layout: Layout) -> None:
    assert chosen(question(1e17), layout).loss == "linear-triton"
    assert chosen(question(1e14), layout).loss == "auto"
    assert chosen(question(None), layout).loss == "auto"


def test_its_chunks_are_longer() -> None:
    """Llama 3 8B has 128,256 columns and 4,096 features: 501 and 32 KiB a token in bf16, of 1 GiB."""
    layout = Layout(cp=2, ulysses=4)
    chunks = [chosen(question(rate, seq_tokens=2**20), layout).loss_chunk_tokens for rate in (1e14, 1e17)]
    assert chunks == [2048, 32768]


@pytest.mark.parametrize("loss", ["blocks", "fused", "linear"])
def test_a_named_loss_is_kept(loss: Loss) -> None:
    assert chosen(question(1e17, loss=loss)).loss == loss


def test_a_systems_own_loss_and_frameworks_are_kept() -> None:
    for system in ("megatron-lm", "fsdp"):
        asked = question(1e17, system=system)
        assert chosen(asked).loss != "linear-triton"


def test_elsewhere_it_becomes_torchs() -> None:
    plan = chosen(question(1e17))
    same, changes = kernels_elsewhere(question(1e17), plan)
    assert (same.loss, [c for c in changes if "loss" in c]) == ("linear-triton", [])
    other, changes = kernels_elsewhere(question(None), plan)
    assert other.loss == "linear"
    assert [c for c in changes if c.startswith("loss linear, as the profile")]
