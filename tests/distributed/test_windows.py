"""Windows, sinks and Gemma 3's layers on several ranks: gradients and losses are those of one process."""

from __future__ import annotations

import pytest

from memo_sim.contract.plan import Layout
from tests.distributed.team import Team
from tests.distributed.training import label, parity


@pytest.mark.parametrize(
    ("name", "layout"),
    [("sinks", Layout(cp=2)), ("gemma3", Layout(tp=2, sequence_parallel=True))],
    ids=["sinks-cp2", "gemma3-tp2"],
)
def test_two_ranks(team: Team, name: str, layout: Layout) -> None:
    parity(team, name, layout, 0.5, steps=1)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["window", "sinks", "gemma3"])
@pytest.mark.parametrize(
    "layout",
    [
        Layout(cp=2),
        Layout(cp=2, cp_exchange="all_gather"),
        Layout(tp=2),
        Layout(tp=2, sequence_parallel=True),
        Layout(ulysses=2),
        Layout(dp=2, zero=3),
        Layout(cp=4),
        Layout(cp=2, tp=2, sequence_parallel=True),
        Layout(cp=2, ulysses=2),
    ],
    ids=label,
)
def test_other_layouts(team: Team, name: str, layout: Layout) -> None:
    parity(team, name, layout, 0.5, seq_tokens=max(512, 256 * layout.tp * layout.ring * layout.ulysses))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "layout"),
    [("sinks", Layout(cp=2)), ("gemma3", Layout(cp=4)), ("window", Layout(cp=2, ulysses=2))],
    ids=["sinks", "gemma3", "window"],
)
def test_several_sequences_with_context_parallelism(team: Team, name: str, layout: Layout) -> None:
    batch = {"micro_batch": 2, "global_batch": 4, "debug": True}
    parity(team, name, layout, 0.5, seq_tokens=256 * layout.cp * layout.ulysses, **batch)


@pytest.mark.slow
@pytest.mark.parametrize("policy", [("none", 0.0), ("none", 1.0), ("full", 0.0), ("full", 1.0)])
def test_other_policies(team: Team, policy: tuple[str, float]) -> None:
    parity(team, "sinks", Layout(cp=2), policy[1], recompute=policy[0])


@pytest.mark.slow
@pytest.mark.parametrize("schedule", ["1f1b", "gpipe"])
def test_stages_with_layers_of_two_kinds(team: Team, schedule: str) -> None:
    layout = Layout(pp=2, schedule=schedule, pp_layers=(2, 2))
    parity(team, "gemma3-4", layout, 0.5, global_batch=4)


@pytest.mark.slow
@pytest.mark.parametrize("layout", [Layout(subsequences=4), Layout(pp=1, tp=2, subsequences=2)], ids=label)
def test_subsequences(team: Team, layout: Layout) -> None:
    parity(team, "window", layout, recompute="none", swapped_tokens=0)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["sinks", "gemma3"])
def test_debug_mode_finds_no_fault(team: Team, name: str) -> None:
    parity(team, name, Layout(cp=2), 0.5, steps=1, debug=True)
