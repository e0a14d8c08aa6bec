"""Packed documents on several ranks: gradients as keep-everything's and autograd's of separate sequences."""

from __future__ import annotations

from typing import Any

import pytest

from memo_exec.verification.verify import verify
from memo_sim.contract.documents import Documents
from memo_sim.contract.plan import Layout
from tests.exec_cpu.small import EXPERT_MODELS, decide, gpt, llama

LLAMA = llama(layers=4, hidden=64, heads=4, kv_heads=2, head_dim=16, ffn_hidden=160, vocab=97)
GPT = gpt(layers=4, hidden=64, heads=4, kv_heads=4, head_dim=16, ffn_hidden=256, vocab=97, max_positions=0)
DOCUMENTS = Documents(lengths=((16, 4), (128, 4), (400, 2), (3000, 1)))
"""Documents of 2,048 tokens: many inside one chunk of a ring, some across several, one as long as the sequence."""
HALF = {"recompute": "tokenwise", "swapped_tokens": 512}
LAYOUTS: dict[str, dict[str, Any]] = {
    "tp": {"layout": Layout(tp=2, sequence_parallel=True), **HALF},
    "tp without sequence parallelism": {"layout": Layout(tp=2), "recompute": "full"},
    "ulysses": {"layout": Layout(ulysses=2), **HALF},
    "ring of 2": {"layout": Layout(cp=2), **HALF},
    "ring of 4": {"layout": Layout(cp=4), "recompute": "selective"},
    "ring, two sequences": {"layout": Layout(cp=2), "micro_batch": 2, "global_batch": 4, "recompute": "full"},
    "all-gather of 4": {"layout": Layout(cp=4, cp_exchange="all_gather"), "recompute": "full"},
    "cp and ulysses": {"layout": Layout(cp=2, ulysses=2), "model": GPT, **HALF},
    "dp, zero 3": {"layout": Layout(dp=2, zero=3), "global_batch": 4, **HALF},
    "stages": {"layout": Layout(pp=2, cp=2), "global_batch": 4, "recompute": "full"},
    "ring of 2, cut documents": {"layout": Layout(cp=2), "document_cuts": "documents", **HALF},
    "ring of 4, cut documents": {"layout": Layout(cp=4), "document_cuts": "documents", "recompute": "full"},
    "all-gather of 4, cut documents": {
        "layout": Layout(cp=4, cp_exchange="all_gather"),
        "document_cuts": "documents",
        "recompute": "selective",
    },
    "cp and ulysses, cut documents": {"layout": Layout(cp=2, ulysses=2), "document_cuts": "documents", **HALF},
    "cp and tp, cut documents": {
        "layout": Layout(cp=2, tp=2, sequence_parallel=True),
        "document_cuts": "documents",
        "micro_batch": 2,
        "global_batch": 4,
        "recompute": "full",
    },
    "experts over ranks": {
        "model": EXPERT_MODELS["mixtral"],
        "layout": Layout(cp=2, ep=2),
        "document_cuts": "documents",
        "recompute": "full",
    },
    "adapters": {"layout": Layout(cp=2), "adapters": "r=4,alpha=8,targets=q+v,rslora", **HALF},
    "a policy's loss": {"layout": Layout(), "objective": "grpo", "recompute": "full"},
    "zero-bubble": {"layout": Layout(pp=2, schedule="zero-bubble"), "global_batch": 4},
}


def check(name: str) -> None:
    fields = {"model": LLAMA, "seq_tokens": 2048, "micro_batch": 1, "documents": DOCUMENTS} | LAYOUTS[name]
    verdict = verify(decide(fields.pop("model"), **fields), steps=2)
    assert verdict.verified, [each for against in verdict.against for each in against.compared if not each.fine]
    assert [against.skipped for against in verdict.against] == ["", ""]


def test_a_ring_plays_documents() -> None:
    check("ring of 2")


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("name", [name for name in LAYOUTS if name != "ring of 2"])
def test_every_layout_plays_documents(name: str) -> None:
    check(name)
