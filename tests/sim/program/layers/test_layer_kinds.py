"""A layer kind that only this test registers is lowered and simulated, without an edit elsewhere."""

import msgspec
import pytest

from memo_sim.contract.plan import Layout
from memo_sim.engine.simulate import simulate
from memo_sim.program.ir.work import Gemm
from memo_sim.program.layers.kinds import LAYER_KINDS, layer_kind, registered
from memo_sim.program.lower import lower
from tests.sim.program.layers.attention_only import ATTENTION_ONLY, NAME
from tests.sim.small_programs import GPT, POLICIES, decide, faults_of
from tests.sim.toy_machine import TOY_CLUSTER, ToyPrices, alone, toy_hardware

MODEL = msgspec.structs.replace(GPT, name=NAME, layers=4)
LAYOUTS = [Layout(), Layout(tp=2, sequence_parallel=True), Layout(ulysses=2), Layout(pp=2), Layout(subsequences=2)]


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_the_independent_checkers_accept_it(layout: Layout, policy: tuple[str, float]) -> None:
    half = layout.subsequences > 1 and policy[1] == 0.5
    more = {"subsequence_swapped_tokens": (512, 512)} if half else {}
    decisions = decide(MODEL, layout, policy, **more)
    with registered(ATTENTION_ONLY):
        assert faults_of(decisions, values=False) == []  # no transformer layer: values have no rules for it


def test_it_has_the_products_of_attention_alone() -> None:
    with registered(ATTENTION_ONLY):
        (program,) = lower(decide(MODEL))
    layers = [t for t in program.templates if t.name == "layer.fwd"]
    assert [i.name for t in layers for i in t.instructions if isinstance(i.work, Gemm)] == ["fwd/qkv", "fwd/proj"]


def test_the_engine_plays_it_and_it_is_faster_than_with_an_mlp() -> None:
    whole = simulate(decide(MODEL), toy_hardware(), TOY_CLUSTER, pricer=ToyPrices(), rates=alone).prediction
    with registered(ATTENTION_ONLY):
        small = simulate(decide(MODEL), toy_hardware(), TOY_CLUSTER, pricer=ToyPrices(), rates=alone).prediction
    assert whole.step_s is not None
    assert small.step_s is not None
    assert 0 < small.step_s < whole.step_s
    assert small.peak_by_class["skeletal"] < whole.peak_by_class["skeletal"]


def test_a_kind_is_gone_with_its_context() -> None:
    before = list(LAYER_KINDS)
    with registered(ATTENTION_ONLY):
        assert layer_kind(decide(MODEL), MODEL.layer(0)) is ATTENTION_ONLY
        assert layer_kind(decide(GPT), GPT.layer(0)) is before[0]
    assert before == LAYER_KINDS
