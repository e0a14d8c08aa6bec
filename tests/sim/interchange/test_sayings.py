"""Every framework's table says something about every decision of a plan."""

from __future__ import annotations

from typing import get_args

import pytest

from memo_sim.commands.interchange import TO
from memo_sim.contract.catalog import load_model
from memo_sim.contract.errors import UsageError
from memo_sim.contract.knobs import KNOBS
from memo_sim.contract.layer_shape import LayerShape
from memo_sim.contract.plan import Decisions
from memo_sim.interchange.framework import Framework, How
from memo_sim.interchange.frameworks import FRAMEWORKS
from memo_sim.interchange.plan_paths import plan_paths
from memo_sim.planning.presets import SYSTEMS

DERIVED = {"alpha": "decisions.swapped_tokens", "offload_inputs": "decisions.swapped_tokens"}
"""Knobs that a plan holds under another name."""

each = pytest.mark.parametrize("framework", FRAMEWORKS.values(), ids=list(FRAMEWORKS))


def test_the_command_knows_every_framework() -> None:
    assert set(TO) == set(FRAMEWORKS)


@each
def test_a_new_decision_needs_a_saying(framework: Framework) -> None:
    assert set(framework.sayings) == set(plan_paths())


def test_a_new_knob_is_a_decision() -> None:
    assert {DERIVED.get(knob.name, knob.path) for knob in KNOBS.values()} <= set(plan_paths())


@each
def test_what_is_not_exact_says_what_is_lost(framework: Framework) -> None:
    for path, saying in framework.sayings.items():
        assert saying.how in get_args(How), path
        assert saying.lost or saying.how == "exact", path
        assert saying.keys or saying.how != "near", path


@each
def test_a_framework_is_predicted_by_a_system(framework: Framework) -> None:
    assert framework.system in SYSTEMS


@each
def test_models_whose_layers_differ_are_refused_by_name(framework: Framework) -> None:
    llama = load_model("llama-tiny")
    shapes = [LayerShape(ffn_hidden=width) for width in (llama.ffn_hidden, llama.ffn_hidden // 2)]
    with pytest.raises(UsageError) as refused:
        framework.jobs(Decisions(model=llama.of_layers(shapes), seq_tokens=1024))
    assert any(words in str(refused.value.wanted) for words in ("layers of one kind", "layers are alike"))
