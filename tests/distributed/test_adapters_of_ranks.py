"""Low-rank adapters on several ranks, over gloo: gradients, losses and norms are those of one process."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from memo_sim.contract.plan import Layout
from tests.distributed import parity
from tests.distributed.team import Member, Team
from tests.exec_cpu.small import MODELS, decide

EVERY, FEW = "r=4,alpha=8,targets=qkv+proj+ffn", "r=3,alpha=8,targets=q+v+up"
CASES: dict[str, tuple[str, Layout, str, dict[str, Any]]] = {
    "tensor parallel": ("llama", Layout(tp=2, sequence_parallel=True), EVERY, {}),
    "tensor parallel, whole tokens": ("llama", Layout(tp=2), FEW, {"recompute": "full", "swapped_tokens": 256}),
    "copies of heads": ("llama", Layout(tp=4, sequence_parallel=True), EVERY, {"swapped_tokens": 0}),
    "zero 1": ("llama", Layout(dp=2, zero=1), EVERY, {"overlap": "both"}),
    "zero 1 in groups": ("llama", Layout(dp=4, zero=1, zero_ranks=2), FEW, {}),
    "zero 2": ("gpt2", Layout(dp=2, zero=2), FEW, {}),
    "zero 3": ("qwen3", Layout(dp=2, zero=3), EVERY, {}),
    "zero 3, tensor parallel": ("llama", Layout(tp=2, sequence_parallel=True, dp=2, zero=3), EVERY, {}),
    "stages": ("qwen2", Layout(pp=2, dp=2, zero=1), EVERY, {}),
    "ring and ulysses": ("llama", Layout(cp=2, ulysses=2), FEW, {"swapped_tokens": 0}),
    "chunks of attention": (
        "llama",
        Layout(tp=2, sequence_parallel=True),
        EVERY,
        {
            "seq_tokens": 512,
            "recompute": "full",
            "swapped_tokens": 512,
            "attention_chunk_tokens": 256,
            "mlp_chunk_tokens": 256,
        },
    ),
    "subsequences": ("llama", Layout(subsequences=2, pp=2), EVERY, {"recompute": "none", "swapped_tokens": 256}),
}
QUICK = {"tensor parallel", "zero 3"}


@pytest.mark.parametrize("case", [pytest.param(n, marks=() if n in QUICK else pytest.mark.slow) for n in CASES])
def test_layouts_have_the_gradients_of_one_process(team: Team, case: str) -> None:
    name, layout, text, fields = CASES[case]
    swapped = layout.tp * 128 if layout.sequence_parallel else 128
    sizes = {"seq_tokens": 256, "micro_batch": 1, "global_batch": 4}
    policy = {"recompute": "tokenwise", "swapped_tokens": swapped}
    chosen = decide(MODELS[name], layout=layout, adapters=text, **(sizes | policy | fields))
    alone = msgspec.structs.replace(parity.one_process(chosen), attention_chunk_tokens=0)
    parity.check(team, chosen, parity.play(Member(0, 1), alone, 2, {}), steps=2)
