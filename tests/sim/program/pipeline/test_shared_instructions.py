"""Shared instructions: a program that takes another plan's instructions equals one that is written anew."""

from __future__ import annotations

from collections.abc import Callable

import msgspec
import pytest

from memo_sim.contract.catalog import load_model
from memo_sim.contract.plan import Decisions, Layout
from memo_sim.planning.space import with_alpha
from memo_sim.program.ir.instruction import Template
from memo_sim.program.ir.work import Collective, LibraryCall
from memo_sim.program.lower import lower, program_sha256
from memo_sim.program.pipeline import order_cache, shared_instructions
from memo_sim.program.pipeline.shared_instructions import shared

LAYOUTS = [
    Layout(tp=2, sequence_parallel=True, dp=2),
    Layout(tp=2, sequence_parallel=True, dp=2, tp_overlap="chunked"),
    Layout(tp=2, dp=2, pp=2),
    Layout(tp=2, dp=2, pp=2, schedule="zero-bubble"),
    Layout(cp=2, dp=2),
    Layout(ulysses=2, dp=2),
]
"""Context parallelism and Ulysses leave the same rows to a rank's embedding and head. W passes of zero-bubble read what
backward leaves, which depends on what is swapped."""


def plan(layout: Layout, recompute: str, alpha: float, **changes: object) -> Decisions:
    """Return a plan of one layout at one alpha."""
    model = msgspec.structs.replace(load_model("gpt-tiny"), layers=4)
    base = Decisions(
        model=model,
        layout=layout,
        seq_tokens=8192,
        global_batch=2 * layout.dp,
        loss_chunk_tokens=1024,
        rounding_buffers=False,
    )
    return msgspec.structs.replace(with_alpha(base, recompute, alpha), **changes)


def zeros(layout: Layout, recompute: str, alpha: float) -> list[Decisions]:
    """Return plans that differ in ZeRO and in the number of replicas."""
    some = [{"zero": 0}, {"zero": 0, "dp": 1}, {"zero": 1}, {"zero": 2}, {"zero": 3}]
    layouts = [msgspec.structs.replace(layout, **changes) for changes in some]
    return [plan(each, recompute, alpha) for each in layouts if each.schedule != "zero-bubble" or each.zero < 2]


def every() -> list[Decisions]:
    """Return the plans of all layouts, policies and alphas."""
    policies = [
        ("none", 0.0),
        ("none", 0.5),
        ("none", 1.0),
        ("tokenwise", 0.0),
        ("tokenwise", 0.5),
        ("tokenwise", 0.75),
        ("full", 0.0),
    ]
    return [each for layout in LAYOUTS for policy in policies for each in zeros(layout, *policy)]


def forget() -> None:
    """Empty the caches of the lowering."""
    order_cache.forget()
    shared.forget()


def written(decisions: Decisions) -> tuple[str, list[tuple[LibraryCall, ...]]]:
    """Return the hash of a plan's programs, and the calls of their collectives, which the hash leaves out."""
    programs = lower(decisions)
    works = [each.work for program in programs for template in program.templates for each in template.instructions]
    return program_sha256(programs), [work.calls for work in works if isinstance(work, Collective)]


def test_programs_are_those_written_anew() -> None:
    asked, anew = every(), []
    for decisions in asked:
        forget()
        anew.append(written(decisions))
    assert len({sha256 for sha256, _ in anew}) == len(asked)
    forget()
    for one_way in (1, -1):
        assert [written(decisions) for decisions in asked[::one_way]] == anew[::one_way]


def named(decisions: Decisions, name: str) -> Template:
    """Return a template of a plan's last stage."""
    return next(template for template in lower(decisions)[-1].templates if template.name == name)


@pytest.mark.parametrize(
    ("name", "change", "same"),
    [
        ("layer.fwd", lambda each: each, True),
        ("layer.bwd", lambda each: each, True),
        ("head", lambda each: msgspec.structs.replace(each, layout=Layout(cp=4, zero=3)), True),
        ("layer.bwd", lambda each: msgspec.structs.replace(each, layout=Layout(cp=4, zero=3)), False),
        ("layer.bwd", lambda each: with_alpha(each, "none", 0.5), True),
        ("layer.bwd", lambda each: with_alpha(each, "tokenwise", 0.5), False),
        ("head", lambda each: with_alpha(each, "tokenwise", 0.5), True),
        ("head", lambda each: msgspec.structs.replace(each, loss_chunk_tokens=512), False),
    ],
)
def test_plans_share_what_does_not_differ(name: str, change: Callable[[Decisions], Decisions], same: bool) -> None:
    forget()
    base = plan(Layout(cp=2, ulysses=2), "none", 0.0)
    sharded = msgspec.structs.replace(base, layout=Layout(cp=2, ulysses=2, zero=3))
    first, other = named(base, name), named(change(sharded), name)
    assert first.slots != other.slots
    assert (first.instructions is other.instructions) is same


def test_both_forwards_of_a_model_share_their_instructions() -> None:
    forget()
    base = plan(Layout(), "none", 0.0)
    assert named(base, "layer.fwd").instructions is named(base, "layer.fwd.last").instructions
    assert named(base, "layer.fwd").slots != named(base, "layer.fwd.last").slots


def test_the_oldest_are_dropped(monkeypatch: pytest.MonkeyPatch) -> None:
    forget()
    monkeypatch.setattr(shared_instructions, "MOST_INSTRUCTIONS", 1)
    base = plan(Layout(), "none", 0.0)
    assert named(base, "layer.bwd").instructions is not named(base, "layer.bwd").instructions
