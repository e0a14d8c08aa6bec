"""Models with experts on several ranks, over gloo: gradients and losses are those of one process.

Only one step is compared: AdamW turns the rounding of tiny gradients into updates, after which a router may choose
another expert.
"""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from memo_sim.contract.plan import Decisions, Layout
from tests.distributed import parity
from tests.distributed.team import Member, Team
from tests.exec_cpu.small import EXPERT_MODELS, decide

CASES: dict[str, tuple[str, Layout, dict[str, Any]]] = {
    "ring and stages": ("mixtral", Layout(cp=2, pp=2), {}),
    "ulysses and zero 3": ("mixtral", Layout(ulysses=2, dp=2, zero=3), {}),
    "all-gather and zero 1": ("qwen3-moe", Layout(cp=2, cp_exchange="all_gather", dp=2, zero=1), {"overlap": "both"}),
    "stages and zero 1": ("qwen3-moe", Layout(pp=2, dp=2, zero=1), {}),
}
CASES |= {
    "tensor parallel": ("mixtral", Layout(tp=2, sequence_parallel=True, pp=2), {}),
    "tensor parallel, whole tokens": ("mixtral", Layout(tp=2, dp=2, zero=1), {}),
    "tensor parallel, full recompute": (
        "first layer dense",
        Layout(tp=2, sequence_parallel=True, cp=2),
        {"recompute": "full", "swapped_tokens": 0},
    ),
}
CASES |= {
    "tensor parallel biases": ("gpt-oss", Layout(tp=2, sequence_parallel=True, dp=2, zero=1), {}),
    "tensor parallel biases, whole tokens": ("gpt-oss", Layout(tp=2, pp=2), {}),
    "shared experts": ("deepseek", Layout(tp=2, sequence_parallel=True, pp=2), {}),
    "gate of the shared expert": ("qwen2-moe", Layout(tp=2, sequence_parallel=True, dp=2, zero=1), {}),
    "gate of the shared expert, whole tokens": ("qwen2-moe", Layout(tp=2, pp=2), {}),
    "selection bias and zero 3": ("deepseek", Layout(cp=2, dp=2, zero=3), {}),
    "selection bias and zero 1": ("deepseek", Layout(dp=4, zero=1), {"overlap": "both"}),
}
QUICK = {"tensor parallel", "tensor parallel biases", "selection bias and zero 3"}


@pytest.mark.parametrize("case", [pytest.param(n, marks=() if n in QUICK else pytest.mark.slow) for n in CASES])
def test_layouts_have_the_gradients_of_one_process(team: Team, case: str) -> None:
    name, layout, fields = CASES[case]
    swapped = layout.tp * 128 if layout.sequence_parallel else 128
    sizes = {
        "seq_tokens": 512,
        "micro_batch": 1,
        "global_batch": 4,
        "recompute": "tokenwise",
        "swapped_tokens": swapped,
    }
    check(team, decide(EXPERT_MODELS[name], layout=layout, **(sizes | fields)))


@pytest.mark.slow
def test_tensor_parallel_ranks_share_the_loss_of_balance(team: Team) -> None:
    """It is of the tokens of a micro-batch, which these ranks have in common."""
    balanced = msgspec.structs.replace(EXPERT_MODELS["mixtral"].mixture, balance=0.3)
    model = msgspec.structs.replace(EXPERT_MODELS["mixtral"], experts=balanced)
    layout = Layout(tp=2, sequence_parallel=True)
    check(team, decide(model, layout=layout, micro_batch=1, global_batch=2))


def check(team: Team, chosen: Decisions) -> None:
    alone = parity.play(Member(0, 1), parity.one_process(chosen), 1, {})
    parity.check(team, chosen, alone, steps=1)
