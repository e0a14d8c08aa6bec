"""Pins that contradict each other or would have no effect are wrong usage, before anything is searched."""

from __future__ import annotations

from typing import Any

import pytest

from memo_sim.contract.catalog import load_cluster, load_model
from memo_sim.contract.errors import UsageError
from memo_sim.contract.knobs import KNOBS, PINNED, Pins
from memo_sim.planning.contradictions import check_pins, repinned
from memo_sim.planning.question import Question

WITHOUT_EFFECT: dict[str, dict[str, Any]] = {
    "tp_overlap": {"tp_overlap": "chunked"},
    "uneven_heads": {"uneven_heads": True},
    "expert_tp": {"expert_tp": 1},
    "overlap_exchanges": {"overlap_exchanges": False},
    "keep_norms": {"keep_norms": True},
    "pp_layers": {"pp_layers": (15, 17)},
    "schedule": {"schedule": "gpipe"},
    "virtual_stages": {"virtual_stages": 2},
    "zero_ranks": {"zero_ranks": 2},
    "partition": {"partition": "length"},
}
"""A value of each knob that needs another one."""
OFF = {"zero": 0}
"""The value at which a knob divides nothing, if it is not 1."""
SYSTEM_WITHOUT = {"zero": "rsa", "tp": "fsdp"}
"""A system that leaves a knob at that value unless it is pinned, if `any` does not."""


def ask(system: str = "any", **pins: Any) -> Question:
    cluster, hardware = load_cluster("a100-1x4")
    return Question(load_model("gpt-7b"), cluster, hardware, 8192, system, Pins(**pins))


def refused(question: Question) -> UsageError:
    with pytest.raises(UsageError) as caught:
        check_pins(question)
    return caught.value


def test_every_knob_that_needs_another_is_tried() -> None:
    assert [knob.name for knob in PINNED if knob.needs] == list(WITHOUT_EFFECT)


@pytest.mark.parametrize("name", WITHOUT_EFFECT)
def test_a_pin_without_effect_names_the_option_that_it_needs(name: str) -> None:
    knob, need = KNOBS[name], KNOBS[KNOBS[name].needs]
    off = OFF.get(need.name, 1)
    for others in ({}, {need.name: off}):
        error = refused(ask(SYSTEM_WITHOUT.get(need.name, "any"), **WITHOUT_EFFECT[name], **others))
        assert (knob.option in error.what, need.option in error.what) == (True, True)
        assert error.wanted == f"{need.option} {off + 1} or more"
        assert str(error.got).endswith(f"{need.name} {others.get(need.name, 'not given')}")


def test_numbers_of_layers_name_the_stages_that_they_are_of() -> None:
    assert refused(ask(pp_layers=(7, 9, 9, 7))).hint == "--pp 4, or leave --pp-layers out"
    chunks = ask(pp_layers=(7, 9, 9, 7), schedule="interleaved", virtual_stages=2, pp=1)
    assert refused(chunks).hint == "--pp 2, or leave --pp-layers out"


@pytest.mark.parametrize("name", WITHOUT_EFFECT)
def test_a_pin_beside_what_it_needs_is_kept_and_else_dropped(name: str) -> None:
    pins = {**WITHOUT_EFFECT[name], **({"schedule": "interleaved"} if name == "virtual_stages" else {})}
    need = KNOBS[name].needs
    beside = ask(**pins, **{need: 2})
    check_pins(beside)
    without = repinned(beside, **{need: OFF.get(need, 1)})
    check_pins(without)
    assert getattr(without.pins, name) == KNOBS[name].default
    assert repinned(beside, tp=2).pins == Pins(**{**pins, need: 2, "tp": 2})


def test_what_the_system_searches_can_be_needed() -> None:
    check_pins(ask("every-layout", schedule="gpipe"))
    check_pins(ask("metp", keep_norms=True))
    check_pins(ask("sppo", partition="length"))
    check_pins(ask(partition="length", subsequences="auto"))


@pytest.mark.parametrize(
    ("pins", "what", "got"),
    [
        ({"pp": 2, "virtual_stages": 2}, "virtual stages belong to", "2 with the schedule 1f1b, pp 2"),
        ({"pp": 2, "schedule": "interleaved"}, "virtual stages belong to", "1 with the schedule interleaved, pp 2"),
        ({"recompute": "selective", "alpha": 0.5}, "selective recompute swaps nothing", "alpha 0.5 (4096 tokens)"),
        (
            {"replay_allocator": True, "memory_policy": "caching"},
            "served from a planned arena",
            "--replay-allocator with memory policy caching",
        ),
        (
            {"allocator_limit_gib": 40},
            "does not use PyTorch's allocator",
            "40 GiB with memory policy planned",
        ),
    ],
)
def test_pins_that_contradict_each_other_whatever_the_layout(pins: dict[str, Any], what: str, got: str) -> None:
    error = refused(ask(**pins))
    assert what in error.what
    assert str(error.got).startswith(got)
    assert error.hint


@pytest.mark.parametrize(
    ("system", "pins", "got"),
    [
        ("any", {"adamw": "fused"}, "--adamw fused with row-wise kernels torch or triton"),
        ("any", {"adamw": "foreach", "rowwise": "triton"}, "--adamw foreach with row-wise kernels triton"),
        ("fsdp", {"adamw": "fused", "rowwise": "fused"}, "--adamw fused with row-wise kernels fused"),
        ("any", {"early_stop": True, "mlp_chunk_tokens": 1024}, "--early-stop with --mlp-chunk 1024"),
        ("fsdp", {"early_stop": False, "mlp_chunk_tokens": 1024}, "--no-early-stop with --mlp-chunk 1024"),
        ("any", {"early_stop": True, "recompute": "none"}, "--early-stop with --recompute none"),
    ],
)
def test_choices_that_other_kernels_or_blocks_leave_no_room_for(system: str, pins: dict[str, Any], got: str) -> None:
    error = refused(ask(system, **pins))
    assert error.got == got
    assert error.hint


def test_a_systems_own_adamw_is_that_of_its_own_kernels() -> None:
    assert ask("torchtitan").adamw == "fused"
    assert ask("torchtitan", rowwise="torch").adamw == "foreach"
    check_pins(ask("any", adamw="fused", rowwise="eager"))
    check_pins(ask("fsdp", early_stop=True, mlp_chunk_tokens=0))


@pytest.mark.parametrize(
    ("pins", "wanted"),
    [
        ({"sharding": "fsdp2", "memory_policy": "planned"}, "memory policy eager"),
        ({"sharding": "fsdp1"}, "memory policy eager"),
        ({"reduce_dtype": "bf16", "memory_policy": "eager"}, "sharding fsdp1 or fsdp2"),
        ({"reduce_dtype": "fp32"}, "sharding fsdp1 or fsdp2"),
    ],
)
def test_what_only_fsdp_has_is_refused_elsewhere(pins: dict[str, Any], wanted: str) -> None:
    assert refused(ask(**pins)).wanted == wanted
    check_pins(ask("fsdp", **{**pins, "memory_policy": "eager"}))
