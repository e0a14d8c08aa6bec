"""Export of plans with packed documents: TRL packs them, other frameworks refuse them by name."""

from __future__ import annotations

import pytest

from memo_sim.answers.export_plan import export_plan
from memo_sim.contract.catalog import load_cluster, load_model
from memo_sim.contract.documents import parse_documents
from memo_sim.contract.errors import UsageError
from memo_sim.contract.plan import Decisions, Kernels, Layout, Plan
from memo_sim.interchange.frameworks import FRAMEWORKS
from memo_sim.program.lower import lower, program_sha256


def plan(layout: Layout) -> Plan:
    decisions = Decisions(
        model=load_model("qwen3-0.6b"),
        layout=layout,
        seq_tokens=4096,
        global_batch=8,
        kernels=Kernels(attention="flash3"),
        documents=parse_documents("mean=500,max=4k", option="--documents"),
    )
    return Plan(decisions=decisions, program_sha256=program_sha256(lower(decisions)))


def test_trl_packs_documents_with_flash_attention() -> None:
    cluster, hardware = load_cluster("h100-1x8")
    exported = export_plan(plan(Layout(dp=8, zero=3)), FRAMEWORKS["trl"], cluster, hardware)
    text = exported.files["sft.yaml"].decode()
    assert "packing: true\npacking_strategy: bfd_split\n" in text
    assert "attn_implementation: flash_attention_3\n" in text


@pytest.mark.parametrize("name", [name for name in FRAMEWORKS if name != "trl"])
def test_other_frameworks_refuse_documents_by_name(name: str) -> None:
    cluster, hardware = load_cluster("h100-1x8")
    with pytest.raises(UsageError, match="memo writes no options of packed documents for"):
        export_plan(plan(Layout(dp=8, zero=1)), FRAMEWORKS[name], cluster, hardware)


def test_trl_refuses_documents_beside_context_parallelism() -> None:
    cluster, hardware = load_cluster("h100-1x8")
    with pytest.raises(UsageError, match="TRL packs no documents beside context parallelism"):
        export_plan(plan(Layout(cp=2, dp=4, zero=1)), FRAMEWORKS["trl"], cluster, hardware)
