"""The batch of a question that names none: the smallest that keeps every device busy, as far as memory allows."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from memo_sim.contract.catalog import load_cluster, load_model
from memo_sim.planning.default_batch import with_filling_batch, with_one_sequence
from memo_sim.planning.few_layers import Passes
from memo_sim.planning.question import Pins, Question


def asked(model: str, cluster: str, seq_tokens: int, *, system: str = "any", **pins: Any) -> Question:
    machine, hardware = load_cluster(cluster)
    return Question(
        model=load_model(model),
        cluster=machine,
        hardware=hardware,
        seq_tokens=seq_tokens,
        system=system,
        pins=Pins(**pins),
    )


@pytest.mark.parametrize(
    ("question", "sequences"),
    [
        (asked("llama3-8b", "h100-1x8", 8 << 10), 8),
        (asked("gpt-7b", "a800-1x8", 1 << 20), 1),
        (asked("llama3-8b", "h100-1x8", 8 << 10, tp=4), 2),
        (asked("llama3-8b", "h100-1x8", 8 << 10, tp=8), 1),
        (asked("llama3-8b", "h100-1x8", 8 << 10, system="fsdp"), 8),
        (asked("llama3-8b", "h100-1x8", 8 << 10, tp=2, pp=4), 4),  # one micro-batch for each stage
        (asked("llama3-8b", "h100-1x8", 8 << 10, tp=2, pp=4, subsequences=8), 1),  # subsequences fill the stages
        (asked("gpt-7b", "a800-1x8", 128 << 10, system="sppo"), 1),
        (replace(asked("gpt-7b", "a800-1x8", 4 << 10), micro_batch=2), 16),
        (asked("gpt-7b", "a800-1x8", 16 << 10, cp_exchange="rsa"), 8),  # which goes with no swapped tokens
        (asked("llama3-8b", "h100-64x8-ndr8", 8 << 10), 512),
        (asked("llama3-70b", "h100-1x8", 8 << 10), 1),
    ],
)
def test_the_batch_gives_every_device_work(question: Question, sequences: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Passes, "of", None)  # nothing is lowered
    filled = with_filling_batch(question)
    assert filled.global_batch == sequences
    assert filled.batch_rule.startswith("not given: ")
    assert replace(filled, global_batch=1, batch_rule="") == replace(question, global_batch=1)


@pytest.mark.parametrize(
    ("model", "cluster", "seq_tokens"),
    [("gpt-7b", "a100-1x8", 2 << 20), ("gpt-7b", "a800-1x8", 1 << 20), ("llama3-8b", "h100-1x8", 32 << 10)],
)
def test_metp_beside_other_layouts_brings_no_more_sequences(model: str, cluster: str, seq_tokens: int) -> None:
    """At 2M tokens two replicas of METP 4 may fit; of other layouts one."""
    found = with_filling_batch(asked(model, cluster, seq_tokens, system="every-layout"))
    without = with_filling_batch(asked(model, cluster, seq_tokens, system="every-layout", metp=1))
    assert (found.global_batch, found.batch_rule) == (without.global_batch, without.batch_rule)
    if seq_tokens == 2 << 20:
        pinned = asked(model, cluster, seq_tokens, system="every-layout", metp=4, pp=1)
        assert (found.global_batch, with_filling_batch(pinned).global_batch) == (1, 2)


@pytest.mark.parametrize("tokens", [256 << 10, 512 << 10])
def test_metp_counts_where_no_other_layout_can_fit(tokens: int) -> None:
    """Of plans that keep everything in one stage."""

    def rule(system: str, metp: int | None = None) -> str:
        kept = asked("gpt-7b", "a100-1x8", tokens, system=system, recompute="none", alpha=0.0, pp=1, metp=metp)
        return with_filling_batch(kept).batch_rule

    assert rule("every-layout", metp=1) == "not given: enough for dp 1, the smallest, as none may fit"
    assert rule("every-layout") == rule("metp") != rule("every-layout", metp=1)


@pytest.mark.parametrize(
    ("model", "cluster", "seq_tokens"),
    [("gpt-7b", "a800-1x8", 1 << 20), ("llama3-8b", "h100-1x8", 32 << 10), ("llama3-70b", "b200-2x8", 1 << 20)],
)
def test_every_layout_is_asked_for_as_many_sequences_as_any(model: str, cluster: str, seq_tokens: int) -> None:
    narrow, wide = (with_filling_batch(asked(model, cluster, seq_tokens, system=s)) for s in ("any", "every-layout"))
    assert (wide.global_batch, wide.batch_rule) == (narrow.global_batch, narrow.batch_rule)


def test_more_sequences_are_asked_for_where_zero_3_is_named() -> None:
    wide = asked("gpt-7b", "a800-1x8", 1 << 20, system="every-layout")
    pinned = replace(wide, pins=Pins(zero=3))
    assert [with_filling_batch(each).global_batch for each in (wide, pinned)] == [1, 2]


def test_the_longest_sequence_is_asked_for_one() -> None:
    question = asked("gpt-7b", "a800-1x8", 64 << 10)
    assert with_one_sequence(question).global_batch == 1
    assert with_one_sequence(replace(question, pins=Pins(dp=2), micro_batch=3)).global_batch == 6
