"""Tensor parallelism and data parallelism with ZeRO over gloo: gradients and losses of one process."""

from __future__ import annotations

from itertools import product
from typing import Any

import pytest

from memo_sim.contract.model import Model
from memo_sim.contract.plan import Decisions, Layout
from tests.distributed import parity
from tests.distributed.team import Team
from tests.exec_cpu.small import decide, gpt, llama

STEPS = 5
TOKENS = 512
"""Of a micro-batch's one sequence: four row blocks of 128 tokens, one a tensor-parallel rank."""

MODELS = {"gpt": gpt(layers=2, hidden=32, ffn_hidden=64, head_dim=8), "llama": llama(layers=2, kv_heads=4)}
LAYOUTS = {
    "tp2": Layout(tp=2),
    "tp2-sp": Layout(tp=2, sequence_parallel=True),
    "tp4-sp": Layout(tp=4, sequence_parallel=True),
    "dp2": Layout(dp=2),
    "dp2-zero1": Layout(dp=2, zero=1),
    "dp2-zero2": Layout(dp=2, zero=2),
    "dp2-zero3": Layout(dp=2, zero=3),
    "tp2-dp2": Layout(tp=2, dp=2),
    "tp2-sp-dp2-zero3": Layout(tp=2, sequence_parallel=True, dp=2, zero=3),
}
ALPHAS = {"0": 0.0, "half": 0.5, "1": 1.0}
QUICK = {("gpt", "tp2-sp", "half"), ("llama", "tp4-sp", "1"), ("llama", "tp2", "0"), ("gpt", "dp2-zero1", "half")}
QUICK |= {("llama", "dp2-zero2", "1"), ("gpt", "dp2-zero3", "0"), ("gpt", "tp2-sp-dp2-zero3", "half")}
"""Cases of the default run: every kind of collective, each alpha and both models; the others are slow."""

CASES = [
    pytest.param(*case, marks=() if case in QUICK else pytest.mark.slow) for case in product(MODELS, LAYOUTS, ALPHAS)
]


def decisions(model: Model, layout: Layout, alpha: float, **changes: Any) -> Decisions:
    """Return four sequences a step; a rank swaps so much of its tokens and rebuilds the rest."""
    granule = 128 * (layout.tp if layout.sequence_parallel else 1)
    swapped = int(alpha * TOKENS) // granule * granule
    fields: dict[str, Any] = {"seq_tokens": TOKENS, "micro_batch": 1, "global_batch": 4, "recompute": "tokenwise"}
    return decide(model, layout=layout, swapped_tokens=swapped, **(fields | changes))


@pytest.fixture(scope="session")
def alone(team: Team) -> dict[str, parity.Played]:
    """What one process does with each model."""
    found = {name: parity.one_process(decisions(model, Layout(), 0.0)) for name, model in MODELS.items()}
    return {name: team.play(parity.play, 1, each, STEPS, {})[0] for name, each in found.items()}


@pytest.mark.parametrize(("model", "layout", "alpha"), CASES)
def test_a_layout_has_the_gradients_and_losses_of_one_process(
    team: Team, alone: dict[str, parity.Played], model: str, layout: str, alpha: str
) -> None:
    chosen = decisions(MODELS[model], LAYOUTS[layout], ALPHAS[alpha])
    parity.check(team, chosen, alone[model], steps=STEPS)
