"""Answers about models with experts say what MFU counts, how long products take, and what an uneven load costs."""

from __future__ import annotations

import re
from dataclasses import replace
from functools import lru_cache

import msgspec
import pytest

from memo_sim.answers.left_out import left_out
from memo_sim.answers.what_if import what_if
from memo_sim.contract.catalog import load_cluster, load_model
from memo_sim.contract.errors import Infeasible, UsageError
from memo_sim.contract.experts import Experts
from memo_sim.contract.hardware import GroupedGemmTable, Source
from memo_sim.contract.result import Result
from memo_sim.planning.layouts import layouts
from memo_sim.planning.presets import ROWWISE_KEPT, ROWWISE_PARTLY_SWAPPED, ROWWISE_SWAPPED
from memo_sim.planning.question import Pins, Question
from memo_sim.planning.space import candidates


@lru_cache(maxsize=1)
def balanced() -> Result:
    return what_if(asked()).result


def asked(load: str = "balanced", **pins: object) -> Question:
    model = msgspec.structs.replace(load_model("mixtral-8x7b"), layers=4)
    given = Pins(**({"tp": 1, "cp": 1, "dp": 8, "zero": 3, "recompute": "full"} | pins))
    return Question(
        model, *load_cluster("h100-1x8"), 1 << 14, system="memo", global_batch=8, expert_load=load, pins=given
    )


def test_a_balanced_load_is_assumed_and_named() -> None:
    result = balanced()
    (line,) = [each for each in result.why if each.startswith("Experts:")]
    assert "a token goes to 2 of 8, and uses 1.84 of 6.07 billion parameters, which MFU counts" in line
    assert line.endswith("Every expert is assumed to get 4,096 rows; --expert-load says otherwise.")
    (assumption,) = [each for each in result.summary.assumptions if each.name == "experts"]
    assert assumption.option == "--expert-load"
    assert assumption.value.startswith("load balanced, no row dropped;")
    (products,) = [each for each in result.summary.assumptions if each.name == "experts' products"]
    assert products.value == "derived from single bf16 products; the profile has none of several experts"


@pytest.mark.parametrize(("fp8", "derived"), [(False, []), (True, ["derived from single FP8 (block) products"])])
def test_products_in_fp8_are_derived_even_where_those_in_bf16_were_measured(fp8: bool, derived: list[str]) -> None:
    question = asked()
    hardware = question.hardware
    table = GroupedGemmTable(dtype="bf16", gemm_pass="fprop", rows=[[8, 8192, 8192, 4096, 2e14]], source="bench")
    sources = {**hardware.sources, "bench": Source(kind="measured", text="a test")}
    known = msgspec.structs.replace(hardware, grouped_gemm=[table], sources=sources)
    result = what_if(replace(question, hardware=known, fp8="block" if fp8 else "none", fp8_experts=fp8)).result
    assert result.summary is not None
    found = [each.value for each in result.summary.assumptions if each.name == "experts' products"]
    assert [text.partition(";")[0] for text in found] == derived


def test_an_uneven_load_costs_time_and_no_memory() -> None:
    even, uneven = balanced(), what_if(asked("zipf-2")).result
    (line,) = [each for each in uneven.why if each.startswith("Experts:")]
    assert re.search(r"the fullest expert gets 16,384 of 32,768 rows \(4\.0 times the mean\)", line)
    assert re.search(r"the products take \S+ \S+ longer than with balanced experts, and memory is the same", line)
    assert uneven.plans[0].step_s > even.plans[0].step_s
    assert uneven.plans[0].peak_device_bytes == even.plans[0].peak_device_bytes


def test_a_measured_load_is_priced_and_named() -> None:
    shares = (4000, 1500, 900, 600, 400, 300, 200, 100)
    measured = what_if(asked("-".join(("measured", *map(str, shares))))).result
    (line,) = [each for each in measured.why if each.startswith("Experts:")]
    assert "With a load as measured (the fullest of 8 experts: 4.00 times the mean) the fullest expert gets" in line
    assert measured.plans[0].step_s > balanced().plans[0].step_s
    (assumption,) = [each for each in measured.summary.assumptions if each.name == "experts"]
    assert assumption.value.startswith(
        "load as measured (the fullest of 8 experts: 4.00 times the mean), no row dropped;"
    )


def test_expert_parallelism_says_its_capacity_and_what_the_fullest_rank_costs() -> None:
    """32,768 rows of a rank, zipf-1 over 8 experts: the fullest has 0.368 of them, so 2.94 times the mean of ep 8."""
    even, uneven = (what_if(asked(load, zero=1, ep=8)).result for load in ("balanced", "zipf-1"))
    (assumption,) = [each for each in uneven.summary.assumptions if each.name == "experts"]
    assert "load zipf-1, dealt to 8 ranks with 1 of 8 experts each; a rank can send 15,072 rows" in assumption.value
    assert "3.68 times the mean (1.25 times what the fullest rank is expected to get)" in assumption.value
    assert "rows beyond it count as zero, and memo-exec run reports them" in assumption.value
    (line,) = [each for each in uneven.why if each.startswith("Experts:")]
    assert re.search(r"8 ranks divide them: a rank sends \S+ GiB a step in all-to-alls of the capacity", line)
    assert re.search(r"the fullest rank gets [\d,]+ rows of a layer, 2\.94 times the mean of 32,768", line)
    assert re.search(r"its products take \S+ \S+ longer than balanced ones\. Buffers have places for", line)
    assert uneven.plans[0].step_s > even.plans[0].step_s
    assert uneven.plans[0].peak_device_bytes > even.plans[0].peak_device_bytes
    (states,) = [each for each in even.summary.assumptions if each.name == "states"]
    assert "over 8 ranks, those of experts over 1" in states.value


def test_row_blocks_have_a_capacity_each() -> None:
    """A block of 4,096 tokens has 8,192 rows, a quarter of a rank's: as do the capacity and the fullest rank's rows."""
    blocks = {"recompute": "rowwise", "mlp_chunk_tokens": 4096}
    even, uneven = (what_if(asked(load, zero=1, ep=8, **blocks)).result for load in ("balanced", "zipf-1"))
    (assumption,) = [each for each in uneven.summary.assumptions if each.name == "experts"]
    assert "a rank can send 3,768 rows of a layer's row block of 4,096 tokens to each" in assumption.value
    (line,) = [each for each in uneven.why if each.startswith("Experts:")]
    assert re.search(r"the fullest rank gets [\d,]+ rows of a row block, 2\.94 times the mean of 8,192", line)
    assert re.search(r"its products take \S+ m?s longer than balanced ones", line)
    assert line.endswith("more of a block's tensors (--expert-capacity).")
    (line,) = [each for each in even.why if each.startswith("Experts:")]
    assert "its products take 0 us longer than balanced ones" in line
    (line,) = [each for each in what_if(asked(**blocks)).result.why if each.startswith("Experts:")]
    assert "Every expert is assumed to get 1,024 rows of a row block" in line
    (line,) = [each for each in what_if(asked("zipf-1", **blocks)).result.why if each.startswith("Experts:")]
    assert re.search(r"the products take \S+ m?s longer than with balanced experts", line)


def test_a_capacity_without_expert_parallelism_is_refused() -> None:
    with pytest.raises(UsageError, match="--expert-capacity has no effect without expert parallelism"):
        what_if(replace(asked(), expert_capacity=2.0))


def test_the_largest_degrees_of_expert_parallelism_are_searched() -> None:
    model, (cluster, hardware) = load_model("mixtral-tiny"), load_cluster("h100-1x8")
    question = Question(model, cluster, hardware, 1 << 14, system="every-layout", global_batch=8, pins=Pins(tp=1, pp=1))
    assert {layout.ep for layout in layouts(question)} == {1, 4}
    assert {layout.ep for layout in layouts(replace(question, pins=Pins(tp=1, pp=1, ep=2)))} == {2}
    beside = {(each.ep, each.expert_tp) for each in layouts(replace(question, pins=Pins(tp=4, pp=1)))}
    assert beside == {(1, 0), (2, 0), (4, 1)}
    kept = {(each.ep, each.expert_tp) for each in layouts(replace(question, pins=Pins(tp=4, pp=1, expert_tp=1)))}
    assert kept == {(1, 0), (4, 1)}
    assert {layout.ep for layout in layouts(replace(question, system="any"))} == {1, 4}, (
        "the default search tries it too"
    )
    assert {layout.ep for layout in layouts(replace(question, system="memo"))} == {1}


def test_row_wise_recompute_is_searched_with_expert_parallelism_and_a_loss_of_balance() -> None:
    question = asked(dp=None, cp=8, zero=None, recompute=None, ep=8)
    lossy = msgspec.structs.replace(question.model, experts=Experts(count=8, per_token=2, hidden=14336, balance=0.01))
    tried = replace(question, model=lossy, system="any", seq_tokens=1 << 18, global_batch=1)
    found = {each.policy for each in candidates(tried)[0] if each.base.layout.ep == 8}
    assert {ROWWISE_KEPT, ROWWISE_SWAPPED, ROWWISE_PARTLY_SWAPPED} <= found


def test_what_does_not_go_with_experts_is_refused_by_name() -> None:
    with pytest.raises(Infeasible, match="memory_policy eager has no lowering beside experts"):
        what_if(asked(memory_policy="eager"))


def test_what_is_refused_beside_experts_is_not_offered() -> None:
    model, (cluster, hardware) = load_model("mixtral-tiny"), load_cluster("h100-1x8")
    for system in ("any", "memo"):
        question = Question(model, cluster, hardware, 1 << 14, system=system, global_batch=8)
        offered = str(left_out(question))
        assert offered
        assert "metp" not in offered
        assert ("subsequences" in offered) == (system == "any")
        assert "--tp-overlap" not in offered
        dense = Question(load_model("llama-tiny"), cluster, hardware, 1 << 14, system=system, global_batch=8)
        assert "metp" in str(left_out(dense))
