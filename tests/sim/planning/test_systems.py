"""Systems from the literature: their layouts, their policies, and the memory that they run in."""

from __future__ import annotations

import itertools
import re

import pytest

from memo_sim.answers.what_if import what_if
from memo_sim.contract.catalog import load_cluster, load_model
from memo_sim.contract.errors import UsageError
from memo_sim.planning.layouts import layouts
from memo_sim.planning.presets import FULL_RECOMPUTE, KEEP, SELECTIVE_RECOMPUTE
from memo_sim.planning.question import Pins, Question
from memo_sim.planning.search import search
from memo_sim.planning.space import candidates
from tests.refusals import refused


def ask(system: str, *, seq_tokens: int = 16384, global_batch: int = 16, **pins: object) -> Question:
    cluster, hardware = load_cluster("a800-1x8")
    return Question(
        load_model("gpt-7b"),
        cluster,
        hardware,
        seq_tokens,
        system=system,
        pins=Pins(**pins),
        global_batch=global_batch,
    )


@pytest.mark.parametrize(
    ("system", "degrees", "zero"),
    [("fsdp", {"dp"}, 3), ("ring-attention", {"cp", "dp"}, 3), ("megatron-lm", {"tp", "cp", "dp"}, 1)],
)
def test_a_system_divides_work_its_own_way(system: str, degrees: set[str], zero: int) -> None:
    found = layouts(ask(system))
    used = {name for layout in found for name in ("tp", "cp", "dp") if getattr(layout, name) > 1}
    assert used == degrees
    ring = 0 if system == "megatron-lm" else 1
    assert {layout.zero for layout in found if layout.cp**ring * layout.dp > 1} == {zero}
    assert all(layout.sequence_parallel == (layout.tp > 1) for layout in found)
    own = {SELECTIVE_RECOMPUTE} if system == "megatron-lm" else set()
    assert {c.policy for c in candidates(ask(system))[0]} == {KEEP, FULL_RECOMPUTE} | own


def test_megatron_shards_optimizer_states_over_replicas_and_on_request_over_the_ring() -> None:
    found = layouts(ask("megatron-lm"))
    assert any(layout.cp > 1 == layout.dp for layout in found)
    assert all(layout.zero == (layout.dp > 1) for layout in found)
    assert {layout.zero for layout in layouts(ask("megatron-lm", tp=4, cp=2, zero=1))} == {1}
    assert {layout.zero for layout in layouts(ask("memo", tp=4, cp=2))} == {1}


def test_megatrons_stages_are_searched_in_its_own_order() -> None:
    found = layouts(ask("megatron-lm"))
    orders = {(layout.pp, layout.schedule, layout.virtual_stages) for layout in found}
    assert orders == {(1, "1f1b", 1), (2, "1f1b", 1)}  # tp is at least 4, which leaves at most two stages
    assert not any(layout.overlap_p2p for layout in found if layout.pp > 1)
    assert all(layout.zero <= 1 for layout in found)
    assert {layout.pp for layout in layouts(ask("memo"))} == {1}


def test_who_pins_stages_or_their_order_has_no_other() -> None:
    assert {layout.schedule for layout in layouts(ask("megatron-lm", pp=2))} == {"1f1b"}
    pinned = layouts(ask("megatron-lm", schedule="interleaved", virtual_stages=4))
    assert {(layout.schedule, layout.virtual_stages) for layout in pinned if layout.pp > 1} == {("interleaved", 4)}


def test_chunks_divide_the_layers_of_a_stage() -> None:
    cluster, hardware = load_cluster("a800-4x8")
    question = Question(load_model("gpt-30b"), cluster, hardware, 16384, system="every-layout", global_batch=16)
    by_stages: dict[int, set[int]] = {}
    for layout in layouts(question):
        by_stages.setdefault(layout.pp, set()).add(layout.virtual_stages)
    assert {pp: by_stages[pp] for pp in (1, 2, 4, 8)} == {1: {1}, 2: {1, 2, 4}, 4: {1, 2, 4}, 8: {1, 2}}  # 48 layers


def test_a_degree_that_a_system_lacks_is_refused() -> None:
    with refused(UsageError, what="fsdp", got="tp 2", wanted="dp", hint="--system"):
        layouts(ask("fsdp", tp=2))
    assert [layout.tp for layout in layouts(ask("fsdp", tp=1))] == [1]


@pytest.mark.parametrize("zero", [0, 1, 2, 3])
def test_zero_can_be_pinned(zero: int) -> None:
    for system in ("any", "fsdp"):
        assert {layout.zero for layout in layouts(ask(system, zero=zero))} == {zero}


def test_ranks_of_zero_are_said_only_where_they_are_not_all_replicas() -> None:
    found = {(each.replicas, each.zero): each.zero_ranks for each in layouts(ask("any", zero_ranks=2))}
    assert found[1, 0] == found[2, 1] == 0
    assert found[4, 1] == found[8, 1] == 2


def test_rivals_use_an_eager_frameworks_memory_unless_pinned() -> None:
    def policy(system: str, **pins: object) -> set[str]:
        return {c.base.memory_policy for c in candidates(ask(system, **pins))[0]}

    assert policy("megatron-lm") == policy("fsdp") == policy("ring-attention") == {"eager"}
    assert policy("memo") == policy("any") == {"planned"}
    assert policy("fsdp", memory_policy="planned") == {"planned"}


def test_the_answer_names_bytes_and_waits_of_zero_3() -> None:
    result = what_if(ask("fsdp")).result
    assert result.best is not None
    assert result.best.layout.zero == 3
    (line,) = [line for line in result.why if line.startswith("ZeRO 3")]
    gathered, scattered, unit = re.search(r"gathers ([\d.]+) GiB and reduce-scatters ([\d.]+) (GiB)", line).groups()
    # Two micro-batches: layers twice in bf16, the tied embedding for lookup and classifier; gradients in fp32.
    model = load_model("gpt-7b")
    layers = model.layers * (12 * model.hidden**2 + 13 * model.hidden) / 2**30
    embedding = model.vocab * model.hidden / 2**30
    assert float(gathered) == pytest.approx(2 * 2 * (2 * layers + 2 * embedding), rel=0.01)
    assert float(scattered) == pytest.approx(2 * 4 * (layers + 2 * embedding), rel=0.01)
    assert unit == "GiB"
    assert "compute waits" in line


def test_the_answer_names_where_zero_3_has_no_effect() -> None:
    result = what_if(ask("any", global_batch=1, tp=8, zero=3, recompute="full")).result
    assert any("ZeRO 3 has no effect here" in line for line in result.why)


def test_every_layout_holds_those_of_any_and_its_search_accounts_for_all() -> None:
    asked = ask("every-layout", seq_tokens=65536, global_batch=4, tp=2, recompute="full")
    found = layouts(asked)
    assert len(set(found)) == len(found)
    assert set(layouts(ask("any", seq_tokens=65536, tp=2, recompute="full"))) < set(found)
    assert {(layout.cp, layout.ulysses, layout.dp, layout.zero) for layout in found if layout.pp == 1} == {
        (cp, ulysses, 4 // cp // ulysses, zero)
        for cp, ulysses, zero in itertools.product((1, 2, 4), (1, 2, 4), (1, 3))
        if cp * ulysses <= 4
    }
    staged = [layout for layout in found if layout.pp > 1]
    assert {(layout.pp, layout.zero) for layout in staged} == {(2, 1), (4, 0)}  # one device per stage: nothing to shard
    assert {layout.schedule for layout in staged} == {"1f1b", "interleaved", "zero-bubble"}
    result = search(asked)
    assert result.evaluated + result.pruned == len(candidates(asked)[0])
    alone = search(ask("any", seq_tokens=65536, global_batch=4, tp=2, recompute="full")).best
    assert result.best is not None
    assert alone is not None
    assert result.best.prediction.step_s <= alone.prediction.step_s


def test_where_no_rank_shares_parameters_there_is_one_level_of_zero() -> None:
    assert [layout.zero for layout in layouts(ask("every-layout", tp=8))] == [0]


def test_megatron_exchanges_heads_only_when_pinned() -> None:
    assert {(found.tp, found.ulysses) for found in layouts(ask("megatron-lm", tp=4, ulysses=2))} == {(4, 2)}
    assert not any(found.ulysses > 1 for found in layouts(ask("megatron-lm")))
