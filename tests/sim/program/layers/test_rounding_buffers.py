"""Full recompute in MEMO's rounding buffers: the same compute, two static buffers more, and whose default it is."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from memo_sim.answers.what_if import what_if
from memo_sim.contract.catalog import load_cluster, load_model
from memo_sim.contract.errors import UsageError
from memo_sim.contract.model import Model
from memo_sim.contract.plan import Decisions, Layout
from memo_sim.planning.question import Pins, Question
from memo_sim.planning.search import search
from memo_sim.planning.space import policies
from memo_sim.program.analysis.columns import expand
from memo_sim.program.analysis.liveness import live_bytes, liveness, peak
from memo_sim.program.ir.instruction import Family
from memo_sim.program.ir.kinds import FamilyKind
from memo_sim.program.layout.swap_schedule import ROUNDING_BUFFERS
from memo_sim.program.lower import lower
from tests.sim.small_programs import GPT, LLAMA, decide, faults_of

LAYOUTS = [
    Layout(),
    Layout(tp=2, sequence_parallel=True, cp=2),
    Layout(cp=4, zero=3, cp_exchange="all_gather"),
    Layout(ulysses=2, dp=2, zero=3),
    Layout(metp=2),
    Layout(pp=4),
    Layout(pp=4, schedule="zero-bubble"),
    Layout(subsequences=2),
]


def rounding(decisions: Decisions) -> Decisions:
    return msgspec.structs.replace(decisions, rounding_buffers=True)


@pytest.mark.parametrize("model", [GPT, LLAMA], ids=["gpt", "llama"])
@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
@pytest.mark.parametrize("alpha", [0.0, 0.5, 1.0])
def test_every_program_passes_the_independent_checkers(model: Model, layout: Layout, alpha: float) -> None:
    parts = layout.subsequences > 1 and alpha == 0.5
    more: dict[str, Any] = {"subsequence_swapped_tokens": (512, 512)} if parts else {}
    decisions = decide(model, layout, ("full", 0.0))
    tokens = int(alpha * decisions.local_tokens)
    assert faults_of(msgspec.structs.replace(rounding(decisions), swapped_tokens=tokens, **more)) == []


@pytest.mark.parametrize(
    "more",
    [{"mlp_chunk_tokens": 512}, {"mlp_chunk_tokens": 512, "attention_chunk_tokens": 512}],
    ids=["MLP in row blocks", "attention in chunks"],
)
def test_blocks_take_turns_in_the_rounding_buffers_too(more: dict[str, Any]) -> None:
    assert faults_of(rounding(decide(GPT, policy=("full", 1.0), **more))) == []


def skeletal(decisions: Decisions) -> list[Family]:
    return [f for f in lower(decisions)[0].families if f.kind is FamilyKind.SKELETAL]


def test_both_buffers_hold_all_skeletal_tensors_and_exist_all_step() -> None:
    """They are those of a token-wise plan (MEMO 4.3.4)."""
    full, tokenwise = rounding(decide(policy=("full", 0.0))), decide(policy=("tokenwise", 0.5))
    assert {f.name for f in skeletal(full)} >= {"skeletal.x", "skeletal.qkv", "skeletal.attn", "skeletal.act"}
    assert skeletal(full) == skeletal(tokenwise)
    assert all((f.count, f.lifetime) == (ROUNDING_BUFFERS, "step") for f in skeletal(full))


def test_compute_is_that_of_full_recompute_but_for_copies_of_inputs() -> None:
    def computed(decisions: Decisions) -> list[tuple[str, object]]:
        return [(name, i.work) for name, i in lower(decisions)[0].walk() if not name.endswith("/x.aside")]

    plain = decide(LLAMA, policy=("full", 0.0))
    assert computed(rounding(plain)) == computed(plain)
    copied = [name for name, _ in lower(rounding(plain))[0].walk() if name.endswith("/x.aside")]
    assert len(copied) == plain.micro_batches * 2 * (LLAMA.layers - ROUNDING_BUFFERS)


def test_the_peak_grows_by_no_more_than_the_second_buffer_and_two_inputs() -> None:
    def peak_bytes(decisions: Decisions) -> int:
        program = lower(decisions)[0]
        return peak(live_bytes(liveness(program, expand(program)), device=True)).bytes

    plain = decide(policy=("full", 0.0), states="host", loss_chunk_tokens=128)
    each = sum(f.bytes for f in skeletal(rounding(plain)))
    more = peak_bytes(rounding(plain)) - peak_bytes(plain)
    assert 0 < more <= 2 * each


def ask(seq_tokens: int, *, system: str = "memo", **pins: Any) -> Question:
    cluster, hardware = load_cluster("a800-1x8")
    pinned = Pins(**{"tp": 4, "cp": 2, "recompute": "full", **pins})
    return Question(load_model("gpt-7b"), cluster, hardware, seq_tokens, system=system, pins=pinned)


@pytest.mark.parametrize(
    ("system", "pins", "expected"),
    [
        ("memo", {}, True),
        ("memo", {"rounding_buffers": False}, False),
        ("memo", {"memory_policy": "eager"}, False),
        ("any", {}, False),
        ("full-recompute", {}, False),
        ("full-recompute", {"rounding_buffers": True}, True),
        ("full-recompute", {"rounding_buffers": True, "offload_inputs": True}, True),
    ],
)
def test_they_are_the_default_of_memo_where_memory_is_planned(
    system: str, pins: dict[str, Any], expected: bool
) -> None:
    found = search(ask(1 << 16, system=system, **pins))
    assert {e.decisions.rounding_buffers for e in found.ranked if e.decisions.recompute == "full"} == {expected}


def test_memo_ends_one_step_earlier_than_with_buffers_of_a_layers_own() -> None:
    """MEMO's Table 4 has full recompute with a memory plan up to 640K."""
    lengths = [1024 * n for n in (640, 768)]
    assert [search(ask(n)).ranked[0].prediction.status for n in lengths] == ["ok", "gpu_oom"]
    own = [search(ask(n, rounding_buffers=False)).ranked[0].prediction for n in lengths]
    assert [each.status for each in own] == ["ok", "ok"]


def test_the_answer_says_so_and_names_the_way_out() -> None:
    (line,) = [line for line in what_if(ask(1 << 18)).result.why if line.startswith("Both rounding buffers")]
    assert "8.01 GiB" in line
    assert "--no-rounding-buffers" in line
    short = what_if(ask(768 * 1024))
    assert any("--no-rounding-buffers" in line for line in short.result.why)


@pytest.mark.parametrize(
    ("pins", "got"),
    [
        ({"rounding_buffers": True, "recompute": "none"}, "--rounding-buffers with recompute none"),
        ({"rounding_buffers": False, "recompute": "tokenwise"}, "--no-rounding-buffers with recompute tokenwise"),
        ({"rounding_buffers": False, "recompute": None}, "--no-rounding-buffers with recompute none, tokenwise"),
    ],
)
def test_a_choice_without_full_recompute_is_refused(pins: dict[str, Any], got: str) -> None:
    with pytest.raises(UsageError) as refused:
        policies(ask(1 << 16, **pins))
    assert refused.value.got == got
