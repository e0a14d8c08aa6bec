"""Models with experts in subsequences, over gloo: gradients and losses are those of one process with whole sequences.

Each subsequence is routed and exchanged by itself. Small routers send most rows to few experts, so the capacity is the
most that a rank can send, except in the test of overflow. Bytes that ranks copy are those of their programs.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec
import pytest

from memo_sim.contract import codec
from memo_sim.contract.experts import Experts
from memo_sim.contract.model import Model
from memo_sim.contract.plan import Decisions, Layout
from memo_sim.memory.place import place
from memo_sim.program.arena.requests import requests_of
from memo_sim.program.layout.partition import partition
from memo_sim.program.lower import lower
from tests.distributed import parity
from tests.distributed.team import Member, Team
from tests.distributed.test_sppo_gradients import planned, train
from tests.exec_cpu.plans import BYTES, byte_decisions, plan_of, predicted
from tests.exec_cpu.small import EXPERT_MODELS, WHOLE_MODELS, decide

WHOLE: dict[str, Any] = {"sequence_parallel": True, "expert_tp": 1}
KEEP: dict[str, Any] = {"recompute": "none"}
FULL: dict[str, Any] = {"recompute": "full"}
TOKENWISE: dict[str, Any] = {"recompute": "tokenwise"}
ROWWISE: dict[str, Any] = {"recompute": "rowwise", "mlp_chunk_tokens": 256}
WINDOW: dict[str, Any] = {"offload_window": 1}
OVERLAP: dict[str, Any] = {"expert_overlap": True}

CASES: dict[str, tuple[str, Layout, dict[str, Any]]] = {
    "keep": ("qwen3-moe", Layout(pp=2, subsequences=3), KEEP),
    "selective": ("mixtral", Layout(subsequences=2), {"recompute": "selective"}),
    "norms": ("gpt-oss", Layout(subsequences=3), {"recompute": "norms"}),
    "mlp": ("deepseek", Layout(pp=2, subsequences=3), {"recompute": "mlp"}),
    "full": ("deepseek", Layout(pp=2, subsequences=4, schedule="gpipe"), FULL),
    "full, some swapped": ("qwen2-moe", Layout(pp=2, subsequences=3), FULL | {"swaps": True}),
    "tokenwise": ("gpt-oss", Layout(pp=2, subsequences=3), TOKENWISE | {"swaps": True}),
    "tokenwise in a window": ("qwen3-moe", Layout(pp=2, subsequences=3), TOKENWISE | WINDOW | {"swaps": True}),
    "swapped in a window": ("deepseek", Layout(pp=2, subsequences=4), KEEP | WINDOW | {"swaps": True}),
    "row blocks": ("qwen2-moe", Layout(pp=2, subsequences=2), ROWWISE),
    "tp": ("mixtral", Layout(tp=2, sequence_parallel=True, pp=2, subsequences=3), TOKENWISE | {"swaps": True}),
    "tp, whole tokens": ("gpt-oss", Layout(tp=2, pp=2, subsequences=2), FULL),
    "ring": ("mixtral", Layout(cp=2, pp=2, subsequences=2), TOKENWISE | {"swaps": True}),
    "ulysses": ("mixtral", Layout(ulysses=2, pp=2, subsequences=2), FULL),
    "interleaved": (
        "qwen3-moe",
        Layout(pp=2, schedule="interleaved", virtual_stages=2, subsequences=2),
        FULL | {"layers": 4},
    ),
    "zero 3": ("deepseek", Layout(dp=2, zero=3, subsequences=3), TOKENWISE | {"swaps": True}),
    "several sequences": ("qwen3-moe", Layout(pp=2, subsequences=2), FULL | {"micro_batch": 2, "global_batch": 4}),
    "latents": ("whole deepseek", Layout(pp=2, subsequences=3), TOKENWISE | {"swaps": True}),
    "windows and sinks": ("whole gpt-oss", Layout(pp=2, subsequences=3), FULL),
    "ep": ("mixtral", Layout(dp=2, ep=2, subsequences=3), TOKENWISE | {"swaps": True}),
    "ep and stages": ("deepseek", Layout(pp=2, dp=2, ep=2, subsequences=3), FULL),
    "ep, kept, in stages": ("gpt-oss", Layout(pp=2, dp=2, ep=2, zero=1, subsequences=2), KEEP),
    "ep, mlp": ("qwen2-moe", Layout(pp=2, dp=2, ep=2, subsequences=2), {"recompute": "mlp"}),
    "ep, row blocks": ("qwen2-moe", Layout(dp=2, ep=2, subsequences=2), ROWWISE),
    "ep of a ring": ("mixtral", Layout(cp=2, pp=2, ep=2, subsequences=2), TOKENWISE | {"swaps": True}),
    "ep of ulysses": ("qwen3-moe", Layout(ulysses=2, pp=2, ep=2, subsequences=2), FULL),
    "ep, features divided": (
        "qwen2-moe",
        Layout(tp=2, sequence_parallel=True, dp=2, ep=2, subsequences=2),
        TOKENWISE | OVERLAP | {"swaps": True},
    ),
    "ep, whole experts": ("deepseek", Layout(tp=2, pp=2, ep=2, subsequences=3, **WHOLE), TOKENWISE | {"swaps": True}),
    "ep, whole experts, swapped in a window": (
        "gpt-oss",
        Layout(tp=2, pp=2, ep=2, subsequences=2, **WHOLE),
        KEEP | WINDOW | OVERLAP | {"swaps": True},
    ),
    "ep, whole experts, zero 3": ("mixtral", Layout(tp=2, dp=2, ep=4, zero=3, subsequences=2, **WHOLE), FULL | OVERLAP),
}
CASES |= {
    "adapters": (
        "mixtral",
        Layout(dp=2, ep=2, subsequences=2),
        TOKENWISE | {"adapters": "r=4,alpha=8,targets=q+k+v+proj", "swaps": True},
    ),
    "caching": ("qwen3-moe", Layout(pp=2, subsequences=3), FULL | {"memory_policy": "caching"}),
    "several sequences, ep": (
        "deepseek",
        Layout(pp=2, dp=2, ep=2, subsequences=2),
        TOKENWISE | {"micro_batch": 2, "global_batch": 8, "swaps": True},
    ),
}
QUICK = {"tokenwise", "full", "ep and stages", "ep, whole experts"}


def chosen(name: str, layout: Layout, fields: dict[str, Any]) -> Decisions:
    """Return decisions with about three granules of tokens for each subsequence, and two micro-batches a rank."""
    fields = dict(fields)
    swaps, layers = fields.pop("swaps", False), fields.pop("layers", None)
    model = WHOLE_MODELS[name.removeprefix("whole ")] if name.startswith("whole") else EXPERT_MODELS[name]
    if layers:
        model = msgspec.structs.replace(model, layers=layers)
    if len(model.layer_shapes) > 1:
        layout = msgspec.structs.replace(layout, partition="length")
    granules = 4 * layout.cp * layout.ulysses * (layout.tp if layout.sequence_parallel else 1)
    sizes: dict[str, Any] = {"seq_tokens": 128 * granules, "micro_batch": 1, "global_batch": 2 * layout.dp}
    if layout.ep > 1:
        sizes["expert_capacity"] = float(layout.ep)
    made = decide(model, layout=layout, **(sizes | fields))
    return some_swapped(made) if swaps else made


def some_swapped(decisions: Decisions) -> Decisions:
    """Return decisions that swap half of the first subsequence, nothing of the second, and all of the third."""
    granule = decisions.swap_granule
    each = tuple((max(granule, n // 2 // granule * granule), 0, n)[i % 3] for i, n in enumerate(partition(decisions)))
    return msgspec.structs.replace(decisions, swapped_tokens=sum(each), subsequence_swapped_tokens=each)


def check(team: Team, decisions: Decisions) -> None:
    """Compare ranks, which also look for races and unwritten rows, with one process that plays whole sequences."""
    alone = parity.play(Member(0, 1), parity.one_process(decisions), 1, {})
    if decisions.layout.devices > 1:
        ranks = parity.check(team, decisions, alone, steps=1, debug=True)
    else:
        ranks = [parity.play(Member(0, 1), decisions, 1, {"debug": True})]
        parity.compare(ranks, alone, steps=1)
    assert [rank.moved for rank in ranks] == [planned(decisions, rank) for rank in range(len(ranks))]


@pytest.mark.parametrize("case", [pytest.param(n, marks=() if n in QUICK else pytest.mark.slow) for n in CASES])
def test_gradients_are_those_of_whole_sequences(team: Team, case: str) -> None:
    check(team, chosen(*CASES[case]))


def with_losses(name: str, **changes: float) -> Model:
    """Return a small model whose router has losses."""
    model = EXPERT_MODELS[name]
    of = msgspec.structs.replace(model.mixture or Experts(count=1, per_token=1, hidden=1), **changes)
    shapes = [model.layer(number) for number in range(model.layers)]
    return model.of_layers([msgspec.structs.replace(each, experts=of if each.experts else None) for each in shapes])


LOSSES: dict[str, tuple[str, Layout, dict[str, Any]]] = {
    "one process": ("mixtral", Layout(subsequences=3), TOKENWISE | {"swaps": True}),
    "stages": ("qwen3-moe", Layout(pp=2, subsequences=4), FULL),
    "stages, in a window": ("gpt-oss", Layout(pp=2, subsequences=3), KEEP | WINDOW | {"swaps": True}),
    "row blocks": ("mixtral", Layout(pp=2, subsequences=2), ROWWISE),
    "tp": ("mixtral", Layout(tp=2, sequence_parallel=True, pp=2, subsequences=3), FULL),
    "ep": ("first layer dense", Layout(pp=2, dp=2, ep=2, subsequences=3), TOKENWISE | {"swaps": True}),
}


@pytest.mark.parametrize("case", [pytest.param(n, marks=pytest.mark.slow if n != "stages" else ()) for n in LOSSES])
def test_losses_of_the_router_are_of_whole_sequences(team: Team, monkeypatch: pytest.MonkeyPatch, case: str) -> None:
    """Rows that experts got of earlier and later subsequences count in the loss of balance of each token."""
    name, layout, fields = LOSSES[case]
    monkeypatch.setitem(EXPERT_MODELS, name, with_losses(name, balance=0.3, z_loss=0.02))
    check(team, chosen(name, layout, fields))


RUNS: dict[str, tuple[Layout, dict[str, Any]]] = {
    "stages": (Layout(pp=2, subsequences=2, partition="length"), {"swapped_tokens": 512}),
    "stages and ep": (
        Layout(pp=2, dp=2, ep=2, subsequences=2, partition="length"),
        {"recompute": "full", "swapped_tokens": 0, "expert_capacity": 2.0},
    ),
}


@pytest.fixture
def plans(tmp_path: Path) -> dict[str, Path]:
    """Plans of the same training, each with the arena of its largest stage and its predicted copies."""
    model = msgspec.structs.replace(EXPERT_MODELS["first layer dense"], layers=4, vocab=BYTES)
    model = model.of_layers([model.layer(0), *[model.layer(1)] * 3])
    written = {}
    for name, (layout, fields) in {"whole": (Layout(), {"swapped_tokens": 512}), **RUNS}.items():
        decided = byte_decisions(model=model, seq_tokens=512, layout=layout, global_batch=2, **fields)
        arenas = [place(requests_of(each), solver="greedy") for each in lower(decided)]
        arena = max(arenas, key=lambda each: each.arena_bytes)
        prediction = predicted(peak_device_bytes=arena.arena_bytes, moved_bytes=planned(decided, 0))
        written[name] = tmp_path / f"{name}.json"
        codec.write(written[name], plan_of(decided, prediction, placement=arena))
        codec.write(tmp_path / f"{name}.placement.json", arena)
    return written


@pytest.mark.parametrize("name", ["stages", pytest.param("stages and ep", marks=pytest.mark.slow)])
def test_memo_exec_runs_plans_as_predicted(team: Team, plans: dict[str, Path], name: str) -> None:
    whole = train(Member(0, 1), plans["whole"]).comparison
    for outcome in (found := team.play(train, RUNS[name][0].devices, plans[name], meets=False)):
        assert outcome.comparison.losses[0] == pytest.approx(whole.losses[0], rel=parity.TOLERANCE)
    comparison = found[0].comparison
    assert comparison.predicted is not None
    assert comparison.predicted.peak_device_bytes in comparison.peak_device_bytes_by_rank  # of the largest stage
    assert comparison.measured.moved_bytes == comparison.predicted.moved_bytes
