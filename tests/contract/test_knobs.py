"""Knobs are declared once: what is declared agrees with plans, options, labels and systems."""

from __future__ import annotations

import re
from operator import attrgetter
from pathlib import Path
from types import NoneType
from typing import Any, get_args, get_type_hints

import msgspec
import pytest
from click.testing import CliRunner

from memo_sim.cli import cli
from memo_sim.contract import codec, knobs
from memo_sim.contract.attention_kernels import ATTENTION_KERNELS
from memo_sim.contract.documents import Documents
from memo_sim.contract.errors import UsageError
from memo_sim.contract.knobs import (
    CHOSEN,
    DEGREES,
    KNOBS,
    PINNED,
    Chosen,
    CountOrAuto,
    Degree,
    DocumentLengths,
    Factor,
    Flag,
    Fraction,
    Knob,
    LayerChoice,
    Length,
    Listed,
    Load,
    LowRank,
    Mark,
    Numbers,
    OneOf,
    Part,
    Pins,
    Switch,
    Whole,
)
from memo_sim.contract.plan import Decisions, Kernels, Layout, Plan, PlanRow
from memo_sim.planning.presets import SYSTEMS

ROOT = Path(__file__).parents[2]
GOLDEN_PLAN = Path(__file__).parent / "golden_plan.json"
ELSEWHERE = {
    *("--ds-sequence-parallel-fpdt-chunk-size", "--accumulate-allreduce-grads-in-fp32"),
    *("--account-for-embedding-in-pipeline-split", "--account-for-loss-in-pipeline-split"),
    *("--decoder-first-pipeline-num-layers", "--decoder-last-pipeline-num-layers"),
}
"""Options of Megatron-LM and Megatron-DeepSpeed that the text mentions."""

NO_KNOBS = {
    *("model", "seq_tokens", "layout", "kernels"),  # what is asked, and what holds knobs
    *("swapped_tokens", "subsequence_swapped_tokens"),  # alpha, in tokens
    *("head_groups", "host_allocator", "deterministic", "fp8_layouts"),  # no question pins them
}
DERIVED = {"alpha", "offload_inputs"}
"""Knobs that follow from ``swapped_tokens`` in a plan."""
VALUES = {
    Degree: int,
    Whole: int,
    Fraction: float,
    Factor: float,
    Switch: bool,
    Flag: bool,
    Length: int,
    CountOrAuto: int,
    Numbers: tuple,
    LayerChoice: str,
    Load: str,
    DocumentLengths: NoneType,  # no plan has documents unless asked
    LowRank: str,
}


def holder_of(knob: Knob) -> type[msgspec.Struct]:
    return {"layout": Layout, "decisions": Decisions, "decisions.kernels": Kernels}[knob.at]


@pytest.mark.parametrize("knob", KNOBS.values(), ids=lambda knob: knob.name)
def test_a_knob_is_a_decision_of_a_plan(knob: Knob) -> None:
    decisions = codec.read(GOLDEN_PLAN, Plan).decisions
    value = attrgetter(knob.path.removeprefix("decisions."))(decisions)
    kind = str if isinstance(knob.kind, OneOf) else VALUES[type(knob.kind)]
    assert isinstance(value, kind) or (knob.name == "libraries" and value is None)  # None: the profile's year
    assert knob.help.endswith((".", ")"))


def test_every_decision_is_a_knob_or_known_not_to_be_one() -> None:
    decided = {name for kind in (Layout, Decisions, Kernels) for name in kind.__struct_fields__}
    assert decided - NO_KNOBS == KNOBS.keys() - DERIVED
    assert decided >= NO_KNOBS
    assert KNOBS["alpha"].name in PlanRow.__struct_fields__


def words_of(hint: object) -> set[object]:
    """Return the words of a ``Literal``, alone or beside None."""
    return {word for part in get_args(hint) for word in (get_args(part) or (part,))} - {NoneType}


@pytest.mark.parametrize("knob", [k for k in KNOBS.values() if isinstance(k.kind, OneOf)], ids=lambda knob: knob.name)
def test_the_words_of_an_option_are_those_of_the_plan_and_of_the_pin(knob: Knob) -> None:
    assert isinstance(knob.kind, OneOf)
    declared = get_type_hints(Pins if knob in PINNED else Chosen, {**vars(knobs), "Documents": Documents})
    decided = get_type_hints(holder_of(knob))
    assert words_of(declared[knob.name]) == set(knob.kind.words)
    # A question may name a generation of attention; the plan names the kernel that was found for it.
    of_plan = words_of(decided[knob.name]) if knob.name != "attention" else {*ATTENTION_KERNELS, "flash", "cudnn"}
    assert of_plan == set(knob.kind.words)


def test_what_a_knob_needs_and_marks_is_a_knob_before_it() -> None:
    before: set[str] = set()
    for knob in PINNED:
        assert not knob.needs or knob.needs in before
        assert all(label.of in before for label in knob.labels if isinstance(label, Mark | Listed))
        if any(isinstance(label, Part) for label in knob.labels):
            assert knob.name not in before
        before.add(knob.name)


def test_systems_name_knobs() -> None:
    for system in SYSTEMS.values():
        assert {*system.degrees, *system.pinnable} <= set(DEGREES)
        assert system.searched <= KNOBS.keys()


@pytest.mark.parametrize("command", ["what-if", "longest", "oom"])
def test_every_knob_is_an_option_of_every_question(command: str) -> None:
    options = {name: parameter.opts for parameter in cli.commands[command].params if (name := parameter.name)}
    for knob in KNOBS.values():
        assert (knob.name in options) == knob.on_command_line
        assert not knob.on_command_line or options[knob.name] == [knob.option]


def test_refusals_name_options_that_exist() -> None:
    """Every ``--option`` in the text of the rooms that refuse and advise is one of ``memo-sim``."""
    params = [each for command in cli.commands.values() for each in command.params]
    known = {name for each in params for name in (*each.opts, *each.secondary_opts)}
    named = {
        option: str(file)
        for room in ("planning", "program", "explain", "answers")
        for file in (ROOT / "memo_sim" / room).rglob("*.py")
        for option in re.findall(r"(?<![\w-])--[a-z][a-z0-9-]+", file.read_text())
    }
    assert {option: file for option, file in named.items() if option not in known | ELSEWHERE} == {}


def an_argument(knob: Knob) -> list[str]:
    """Return the knob's option with a value that it can have."""
    match knob.kind:
        case Switch() | Flag():
            return [knob.option]
        case OneOf(words):
            return [knob.option, words[0]]
        case _:
            return [knob.option, "1"]


def test_a_plan_brings_every_knob() -> None:
    given = [knob for knob in KNOBS.values() if knob.on_command_line]
    arguments = [each for knob in given for each in an_argument(knob)]
    question: list[Any] = ["what-if", "--cluster", "a800-1x8", "--plan", str(GOLDEN_PLAN), "--system", "memo"]
    refused = CliRunner().invoke(cli, [*question, *arguments]).exception
    assert isinstance(refused, UsageError)
    kernels = ("--attention", "--rowwise")  # which may be others than the plan's
    assert refused.got == ", ".join(["--system", *(knob.option for knob in given if knob.option not in kernels)])
    assert len(CHOSEN) + len(PINNED) == len(KNOBS)
