"""Models with latent attention on several ranks, over gloo: gradients and losses are those of one process.

With experts one step is compared (``test_experts.py``).
"""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from memo_sim.contract.plan import Layout
from tests.distributed import parity
from tests.distributed.team import Member, Team
from tests.exec_cpu.small import DEEPSEEK_MODEL, LATENT_MODELS, decide

SP = {"sequence_parallel": True}
ROWWISE = {"recompute": "rowwise", "mlp_chunk_tokens": 256}
CASES: dict[str, tuple[str, Layout, dict[str, Any]]] = {
    "tensor parallel and ring": ("latent", Layout(tp=2, cp=2, **SP), {"rebuild_qkv": True}),
    "tensor parallel": ("latent-yarn", Layout(tp=2, **SP), {}),
    "tensor parallel, whole tokens": ("latent", Layout(tp=2), {}),
    "ring": ("latent", Layout(cp=2), {}),
    "all-gather": ("latent-yarn", Layout(cp=2, cp_exchange="all_gather"), {"rebuild_qkv": True}),
    "ulysses": ("latent", Layout(ulysses=2), {"rebuild_qkv": True}),
    "queries without a latent": ("latent-lite-yarn", Layout(tp=2, dp=2, zero=3, **SP), {}),
    "queries without a latent, whole tokens": ("latent-lite", Layout(tp=2, pp=2), {}),
    "tensor parallel, zero 2": ("latent", Layout(tp=2, dp=2, zero=2, **SP), {}),
    "stages and zero 1": ("latent", Layout(pp=2, dp=2, zero=1), {}),
    "experts": ("deepseek", Layout(tp=2, pp=2, **SP), {"rebuild_qkv": True}),
    "experts, whole tokens": ("deepseek", Layout(tp=2, dp=2, zero=1), {}),
    "row-wise recompute": ("latent", Layout(tp=2, cp=2, **SP), ROWWISE),
    "row-wise recompute, ulysses": ("latent-yarn", Layout(ulysses=2), ROWWISE),
    "row-wise recompute, queries without a latent": ("latent-lite-yarn", Layout(tp=2, dp=2, zero=3, **SP), ROWWISE),
    "row-wise recompute, experts": ("deepseek", Layout(tp=2, cp=2, **SP), ROWWISE),
    "row-wise recompute, experts, whole tokens": ("deepseek", Layout(tp=2, dp=2, zero=1), ROWWISE),
    "full recompute": ("latent", Layout(tp=2, ulysses=2, **SP), {"recompute": "full", "swapped_tokens": 0}),
}
QUICK = {"tensor parallel and ring"}


@pytest.mark.parametrize("case", [pytest.param(n, marks=() if n in QUICK else pytest.mark.slow) for n in CASES])
def test_layouts_have_the_gradients_of_one_process(team: Team, case: str) -> None:
    name, layout, fields = CASES[case]
    swapped = layout.tp * 128 if layout.sequence_parallel else 128
    sizes = {"seq_tokens": 1024, "micro_batch": 1, "global_batch": 2 * layout.dp}
    policy = {"recompute": "tokenwise", "swapped_tokens": swapped}
    model, steps = (DEEPSEEK_MODEL, 1) if name == "deepseek" else (LATENT_MODELS[name], 2)
    chosen = decide(model, layout=layout, **(sizes | policy | fields))
    alone = parity.play(Member(0, 1), parity.one_process(chosen), steps, {})
    parity.check(team, chosen, alone, steps=steps)


SUBSEQUENCES: dict[str, tuple[str, Layout, dict[str, Any]]] = {
    "tensor parallel": ("latent", Layout(tp=2, subsequences=3, **SP), {"recompute": "tokenwise"}),
    "queries without a latent": ("latent-lite-yarn", Layout(tp=2, subsequences=3), {"swapped_tokens": 1024}),
    "ring": ("latent-yarn", Layout(cp=2, subsequences=2), {"recompute": "full"}),
    "all-gather": ("latent", Layout(cp=2, cp_exchange="all_gather", subsequences=2), ROWWISE),
    "ulysses, two sequences": ("latent-yarn", Layout(ulysses=2, subsequences=2), {"micro_batch": 2}),
    "row-wise recompute": ("latent-lite", Layout(tp=2, subsequences=2, **SP), ROWWISE),
    "multiplexed": ("latent", Layout(pp=2, subsequences=3, multiplexed=True), {"global_batch": 1}),
    "multiplexed, two sequences": (
        "latent-yarn",
        Layout(pp=2, subsequences=3, multiplexed=True),
        {"micro_batch": 2, "recompute": "full"},
    ),
}


@pytest.mark.parametrize(
    "case",
    [
        pytest.param(n, marks=() if n in ("ring", "multiplexed, two sequences") else pytest.mark.slow)
        for n in SUBSEQUENCES
    ],
)
def test_subsequences_have_the_gradients_of_one_process(team: Team, case: str) -> None:
    """The KV cache of the prefix holds keys and values expanded from the latents, values narrower than keys."""
    name, layout, fields = SUBSEQUENCES[case]
    sizes = {"seq_tokens": 1024, "micro_batch": 1, "global_batch": 2, "swapped_tokens": 0}
    model = msgspec.structs.replace(LATENT_MODELS[name], layers=4)
    chosen = decide(model, layout=layout, **(sizes | fields))
    alone = parity.play(Member(0, 1), parity.one_process(chosen), 2, {})
    parity.check(team, chosen, alone, steps=2, debug=True)
