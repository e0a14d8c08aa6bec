"""Compares pipelines of every schedule with one process: gradients and losses for several alphas."""

from typing import Any

import pytest

from memo_sim.contract.plan import Layout
from tests.distributed.team import Team
from tests.distributed.training import label, parity
from tests.pairs import covering

SCHEDULES: dict[str, dict[str, Any]] = {
    "gpipe": {"schedule": "gpipe"},
    "1f1b": {"schedule": "1f1b"},
    "interleaved": {"schedule": "interleaved", "virtual_stages": 2},
    "zero-bubble": {"schedule": "zero-bubble"},
}


@pytest.mark.parametrize(("schedule", "name"), covering(SCHEDULES, ["gpt4", "llama4"]))
def test_two_stages(team: Team, name: str, schedule: str) -> None:
    alpha = 0.5 if name == "gpt4" else 1.0
    parity(team, name, Layout(pp=2, **SCHEDULES[schedule]), alpha, global_batch=4)


@pytest.mark.parametrize("alpha", [0.0, 0.5, 1.0])
@pytest.mark.parametrize("name", ["gpt4", "llama4"])
@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.slow
def test_every_schedule(team: Team, name: str, schedule: str, alpha: float) -> None:
    parity(team, name, Layout(pp=2, **SCHEDULES[schedule]), alpha, global_batch=4, steps=5)


@pytest.mark.parametrize(
    ("layers", "schedule"), covering(["every-2", "first-1", "groups-2"], ["1f1b", "interleaved", "zero-bubble"])
)
def test_stages_whose_layers_are_recomputed_differently(team: Team, layers: str, schedule: str) -> None:
    changes = {"recompute": "full", "recompute_layers": layers, "global_batch": 4, "swapped_tokens": 0}
    parity(team, "llama5", Layout(pp=2, **SCHEDULES[schedule]), **changes)


SHARDED = [
    ("llama4", Layout(dp=2, pp=2, zero=3), {}),
    ("gpt4", Layout(dp=2, pp=2, zero=2, **SCHEDULES["interleaved"]), {"states": "host"}),
    ("gpt4", Layout(cp=2, pp=2, zero=3, **SCHEDULES["gpipe"]), {}),
    ("llama4", Layout(ulysses=2, pp=2, zero=3, **SCHEDULES["interleaved"]), {"overlap": "both"}),
]


@pytest.mark.parametrize(
    ("name", "layout", "changes"),
    [*SHARDED[:2], *(pytest.param(*each, marks=pytest.mark.slow) for each in SHARDED[2:])],
    ids=str,
)
def test_stages_of_shards(team: Team, name: str, layout: Layout, changes: dict[str, Any]) -> None:
    """ZeRO 2 and 3: blocks are gathered and gradients scattered for every micro-batch of every stage."""
    parity(team, name, layout, 0.5, global_batch=4 * layout.dp, debug=True, **changes)


UNEQUAL = [
    Layout(pp=3),
    Layout(pp=2, pp_layers=(1, 4), schedule="zero-bubble"),
    Layout(pp=2, pp_layers=(1, 1, 2, 1), schedule="interleaved", virtual_stages=2),
]


@pytest.mark.parametrize("layout", UNEQUAL, ids=label)
def test_unequal_stages(team: Team, layout: Layout) -> None:
    parity(team, "llama5", layout, 0.5, global_batch=4)


COMBINED = [
    Layout(pp=4),
    Layout(pp=4, schedule="gpipe"),
    Layout(tp=2, sequence_parallel=True, pp=2),
    Layout(cp=2, pp=2),
    Layout(cp=2, cp_exchange="all_gather", pp=2),
    Layout(ulysses=2, pp=2, **SCHEDULES["interleaved"]),
    Layout(dp=2, pp=2),
    Layout(dp=2, pp=2, zero=1),
    Layout(pp=2, overlap_p2p=False),
    Layout(tp=2, pp=2, schedule="zero-bubble"),
    Layout(cp=2, pp=2, schedule="zero-bubble"),
]


@pytest.mark.parametrize("layout", [COMBINED[2], COMBINED[3]], ids=label)
def test_with_tensor_and_context_parallelism(team: Team, layout: Layout) -> None:
    parity(team, "gpt4" if layout.cp > 1 else "llama4", layout, 0.5, seq_tokens=512, global_batch=4)


def test_replicas_sum_a_tied_embedding_once_beside_compute(team: Team) -> None:
    parity(team, "gpt4", Layout(dp=2, pp=2), overlap="gradients", global_batch=4)


@pytest.mark.parametrize("alpha", [0.0, 0.5, 1.0])
@pytest.mark.parametrize("name", ["gpt4", "llama4"])
@pytest.mark.parametrize("layout", COMBINED, ids=label)
@pytest.mark.slow
def test_every_combination(team: Team, layout: Layout, name: str, alpha: float) -> None:
    parity(team, name, layout, alpha, global_batch=4, steps=5)


@pytest.mark.parametrize("policy", [("none", 0), ("none", 256), ("full", 0), ("full", 512), ("selective", 0)])
@pytest.mark.slow
def test_other_policies(team: Team, policy: tuple[str, int]) -> None:
    layout = Layout(pp=2, **SCHEDULES["interleaved"])
    parity(team, "llama4", layout, recompute=policy[0], swapped_tokens=policy[1], global_batch=4)


@pytest.mark.slow
def test_states_on_the_host(team: Team) -> None:
    parity(team, "gpt4", Layout(dp=2, pp=2, zero=1), 0.5, global_batch=4, states="host")


def test_no_race_on_any_stage(team: Team) -> None:
    parity(team, "gpt4", Layout(pp=2), 0.5, global_batch=4, debug=True)
