"""METP in the search: which systems try it, which knobs it combines with, and what its refusals say."""

from __future__ import annotations

import re
from dataclasses import replace

import msgspec
import pytest

from memo_sim.answers.longest import longest
from memo_sim.answers.what_if import what_if
from memo_sim.contract.catalog import load_cluster, load_model
from memo_sim.contract.errors import Infeasible, UsageError
from memo_sim.contract.units import GIB
from memo_sim.planning.layouts import layouts
from memo_sim.planning.presets import LEAST_MEMORY, SYSTEMS
from memo_sim.planning.question import Pins, Question, with_memory
from memo_sim.planning.search import search
from memo_sim.planning.space import candidates
from tests.refusals import check_fields, refused

ROOM = 55 * GIB
PINNABLE = {"any", "every-layout", "memo", "full-recompute", "full-swap", "metp"}


def ask(system: str = "any", *, seq_tokens: int = 65536, global_batch: int = 8, **pins: object) -> Question:
    cluster, hardware = load_cluster("a800-1x8")
    model = load_model("gpt-7b")
    return Question(model, cluster, hardware, seq_tokens, system=system, pins=Pins(**pins), global_batch=global_batch)


def small(seq_tokens: int, *, system: str = "every-layout", device_gib: float = 9.5, **pins: object) -> Question:
    """Two layers of gpt-7b on four small A100."""
    cluster, hardware = with_memory(*load_cluster("a100-1x4"), device_bytes=int(device_gib * GIB), host_bytes=None)
    model = msgspec.structs.replace(load_model("gpt-7b"), layers=2)
    return Question(model, cluster, hardware, seq_tokens, system=system, pins=Pins(**pins), global_batch=1)


def test_two_systems_search_its_degree_and_the_others_have_one() -> None:
    for name in SYSTEMS:
        searched = name in ("metp", "every-layout")
        assert {layout.metp for layout in layouts(ask(name))} == ({1, 2, 4, 8} if searched else {1})


def test_metp_beside_other_layouts_takes_the_devices_that_dp_and_stages_leave() -> None:
    found = [layout for layout in layouts(ask("every-layout")) if layout.metp > 1]
    assert {(layout.tp, layout.cp, layout.ulysses) for layout in found} == {(1, 1, 1)}
    assert {layout.metp * layout.dp * layout.pp for layout in found} == {8}
    assert {layout.zero for layout in found if layout.pp == 1} == {1, 3}
    assert {layout.zero for layout in found if layout.pp > 1} == {1}
    assert {layout.schedule for layout in found} == {"1f1b", "interleaved"}


@pytest.mark.parametrize(
    "pins",
    [
        {"tp": 2},
        {"cp": 2},
        {"ulysses": 2},
        {"subsequences": 4},
        {"recompute": "selective"},
        {"recompute": "rowwise"},
        {"recompute_layers": "first-2"},
        {"memory_policy": "eager"},
        {"schedule": "zero-bubble", "pp": 2},
        {"tp_overlap": "chunked", "tp": 2},
    ],
    ids=str,
)
def test_beside_pins_that_it_does_not_go_with_metp_is_not_searched(pins: dict[str, object]) -> None:
    asked = ask("every-layout", **pins)
    assert layouts(asked) == layouts(ask("every-layout", metp=1, **pins))
    _, reasons = candidates(asked)
    assert "METP" not in "".join(reasons)


def test_with_a_model_that_it_does_not_go_with_metp_is_not_searched() -> None:
    asked = replace(ask("every-layout"), model=load_model("mixtral-tiny"))
    assert {layout.metp for layout in layouts(asked)} == {1}


def test_pins_that_only_some_policies_go_with_stop_no_search() -> None:
    found, _ = candidates(small(65536, early_stop=True))
    assert {c.policy.recompute for c in found if c.base.layout.metp > 1} == {"none", "tokenwise"}
    assert search(small(65536, keep_norms=True)).best is not None


@pytest.mark.slow
def test_the_search_finds_what_all_plans_have_where_metp_is_open() -> None:
    """METP has the best plan, and plans of METP and of others are pruned."""
    asked = replace(small(1 << 17, device_gib=12, pp=1), global_batch=2)
    everything, found = search(asked, prune=False), search(asked)
    assert found.best is not None
    assert found.best == everything.best
    assert found.best.decisions.layout.metp == 4
    fitting = [e for e in everything.ranked if e.prediction.status == "ok"]
    assert {e.decisions.layout.metp for e in fitting} == {1, 4}
    assert found.evaluated < everything.evaluated
    without = search(replace(asked, pins=replace(asked.pins, metp=1))).best
    assert without is not None
    assert without.prediction.step_s > found.best.prediction.step_s


def test_the_longest_sequence_is_as_long_as_metps() -> None:
    kept = {"recompute": "none", "alpha": 0.0, "pp": 1}
    reached = {
        name: longest(small(1 << 16, **change, **kept), step_tokens=1 << 14).document.seq_tokens
        for name, change in {"open": {}, "metp": {"system": "metp"}, "without": {"metp": 1}}.items()
    }
    assert reached == {"open": 96 << 10, "metp": 96 << 10, "without": 48 << 10}


def test_the_preset_fills_the_devices_with_metp_and_dp() -> None:
    found = layouts(ask("metp"))
    assert {(layout.metp, layout.dp) for layout in found} == {(1, 8), (2, 4), (4, 2), (8, 1)}
    # The embedding lies on every METP rank, so ZeRO shards its states even when dp is 1.
    assert {layout.zero for layout in found} == {1, 3}
    policies = {"keep", "token-wise", "full swap", "full recompute", "full recompute, inputs swapped"}
    policies |= {"full recompute, inputs swapped, MLP in blocks"}
    assert {c.policy.label for c in candidates(ask("metp"))[0]} == policies
    longest, _ = candidates(ask("metp", seq_tokens=4 << 20))
    policies |= {"full recompute, inputs swapped, MLP in blocks, attention in chunks"}
    assert {c.policy.label for c in longest} == policies
    cut = {(c.base.layout.metp, c.base.attention_chunk_tokens) for c in longest if c.policy.attention_chunks}
    assert cut == {(metp, 1 << 20) for metp in (2, 4, 8)} | {(1, 1 << 19)}


def test_chunks_go_further_than_the_whole_attention() -> None:
    """At 6M tokens, with attention whole, even the MLP in blocks leaves four layers too large for a device."""
    question = ask("metp", seq_tokens=6 << 20, metp=8, zero=1, global_batch=1)
    cluster, hardware = with_memory(question.cluster, question.hardware, device_bytes=ROOM, host_bytes=None)
    model = msgspec.structs.replace(question.model, layers=4)
    found = search(replace(question, model=model, cluster=cluster, hardware=hardware), prune=False).ranked
    assert {e.policy for e in found if e.prediction.status == "ok"} == {LEAST_MEMORY}


@pytest.mark.parametrize("system", sorted(SYSTEMS))
def test_metp_can_be_pinned_where_it_can_be_lowered(system: str) -> None:
    if system not in PINNABLE:
        with refused(UsageError, what=system, got="metp 4"):
            layouts(ask(system, metp=4))
        return
    found, reasons = candidates(ask(system, metp=4))
    assert {c.base.layout.metp for c in found} == {4}
    assert reasons == []  # nothing is tried that has no lowering beside it
    assert {c.base.overlap for c in found} == {SYSTEMS[system].overlap}
    assert {(c.base.layout.tp, c.base.layout.cp, c.base.layout.ulysses) for c in found} == {(1, 1, 1)}
    assert {c.base.layout.zero for c in found} == set(SYSTEMS[system].zeros)


def test_reductions_of_embedding_and_head_can_run_beside_compute_without_dp() -> None:
    found, reasons = candidates(ask("metp", metp=8, overlap="both"))
    assert reasons == []
    assert {(c.base.layout.dp, c.base.overlap) for c in found} == {(1, "both")}
    alone, _ = candidates(ask("any", tp=8, overlap="both"))
    assert {c.base.overlap for c in alone} == {"none"}


def test_the_answer_names_what_zero_3_shards_without_dp() -> None:
    asked = ask(metp=8, zero=3, recompute="full", alpha=0.0, global_batch=1)
    result = what_if(replace(asked, model=msgspec.structs.replace(asked.model, layers=1))).result
    (line,) = [line for line in result.why if line.startswith("ZeRO 3")]
    assert "a shard of gradients and parameters of embedding and head, which METP replicates" in line
    # The tied embedding, for the lookup and for the classifier, in bf16; its gradient twice in fp32.
    embedding = asked.model.vocab * asked.model.hidden / 2**30
    gathered, scattered = map(float, re.findall(r"([\d.]+) GiB", line))
    assert gathered == pytest.approx(2 * 2 * embedding, rel=0.01)
    assert scattered == pytest.approx(2 * 4 * embedding, rel=0.01)


def test_stages_beside_it_are_played_in_orders_that_it_has() -> None:
    found, reasons = candidates(ask("every-layout", metp=2))
    assert {c.base.layout.schedule for c in found if c.base.layout.pp > 1} == {"1f1b", "interleaved"}
    assert reasons == []


def test_zero_and_overlap_can_be_asked_of_its_replicas() -> None:
    for zero in (2, 3):
        found, reasons = candidates(ask("metp", metp=4, zero=zero, overlap="both"))
        assert reasons == []
        assert {(c.base.layout.dp, c.base.layout.zero, c.base.overlap) for c in found} == {(2, zero, "both")}


@pytest.mark.parametrize(
    ("pins", "where", "value", "wanted"),
    [
        ({"metp": 2, "tp": 4}, "layout.tp", "4", "1"),
        ({"metp": 2, "cp": 4}, "layout.cp", "4", "1"),
        ({"metp": 4, "ulysses": 2}, "layout.ulysses", "2", "1"),
        ({"metp": 4, "recompute": "selective"}, "decisions.recompute", "selective", "tokenwise"),
        (
            {"metp": 4, "recompute": "full", "mlp_chunk_tokens": 4096, "mlp_rebuild": "layer"},
            *("decisions.mlp_rebuild", "layer", "block"),
        ),
        ({"metp": 4, "memory_policy": "eager"}, "decisions.memory_policy", "eager", "planned"),
    ],
)
def test_what_it_has_no_lowering_beside_is_named(pins: dict[str, object], where: str, value: str, wanted: str) -> None:
    with refused(Infeasible, where=where, got=(value, f"metp {pins['metp']}"), wanted=wanted):
        candidates(ask(**pins))


def test_heads_and_tokens_that_metp_does_not_divide_are_named() -> None:
    with pytest.raises(Infeasible) as error:
        candidates(ask("metp", seq_tokens=65544, metp=8))
    check_fields(error.value, Infeasible, where="65544 tokens", got=("2 x metp = 16", "seq_tokens"))
    cluster, hardware = load_cluster("a800-2x8")
    wide = Question(load_model("llama3-8b"), cluster, hardware, 65536, system="metp", pins=Pins(metp=16))
    with pytest.raises(Infeasible) as error:  # the model has 8 key/value heads
        candidates(wide)
    check_fields(error.value, Infeasible, where="kv_heads", got="8", wanted="16", hint="metp = 8 or 4 or 2")
