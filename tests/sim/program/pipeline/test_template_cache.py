"""The template cache: a program built from cached templates equals one built without the cache."""

from __future__ import annotations

import msgspec
import pytest

from memo_sim.contract.catalog import load_model
from memo_sim.contract.plan import Decisions, Layout
from memo_sim.planning.space import with_alpha
from memo_sim.program.layout.shape import shape_of
from memo_sim.program.lower import lower, program_sha256
from memo_sim.program.pipeline import template_cache as alike
from tests.pairs import covering

K = 1024
POLICIES = [("none", 0.0, 0), ("none", 0.5, 0), ("none", 0.5, 1), ("tokenwise", 0.5, 0), ("full", 1.0, 0)]
STAGED = [
    {},
    {"pp": 2},
    {"pp": 4, "schedule": "gpipe", "overlap_p2p": False},
    {"pp": 2, "schedule": "interleaved", "virtual_stages": 2},
    {"pp": 2, "schedule": "zero-bubble"},
    {"pp": 4, "multiplexed": True},
]


def plans(recompute: str, alpha: float, window: int, model: str) -> list[Decisions]:
    """Return plans of one activation policy under every schedule and several offload windows, with 4 and 8 layers."""
    found = []
    for number, changes in enumerate(STAGED):
        layout = msgspec.structs.replace(Layout(tp=2, sequence_parallel=True, subsequences=4), **changes)
        base = Decisions(
            model=msgspec.structs.replace(load_model(model), layers=8 if number % 2 else 4),
            layout=layout,
            seq_tokens=8 * K,
            global_batch=1 if layout.multiplexed else 1 + number % 3,
            loss_chunk_tokens=1024,
        )
        found.append(msgspec.structs.replace(with_alpha(base, recompute, alpha), offload_window=window * number))
    return found


@pytest.mark.parametrize(("policy", "model"), covering(POLICIES, ["gpt-tiny", "llama3-8b"]))
def test_programs_are_those_built_without_the_cache(policy: tuple[str, float, int], model: str) -> None:
    asked = plans(*policy, model)
    anew = []
    for decisions in asked:
        alike.forget()
        anew.append(program_sha256(lower(decisions)))
    alike.forget()
    for one_way in (1, -1):
        assert [program_sha256(lower(decisions)) for decisions in asked[::one_way]] == anew[::one_way]


def test_layers_are_written_once_for_all_stages_and_windows() -> None:
    base = with_alpha(
        Decisions(model=load_model("gpt-tiny"), layout=Layout(subsequences=4), seq_tokens=8 * K), "none", 1.0
    )
    one, four = (msgspec.structs.replace(base, offload_window=window) for window in (1, 4))
    staged = msgspec.structs.replace(four, layout=msgspec.structs.replace(base.layout, pp=2))
    first, *others = (lower(each)[0].templates for each in (one, four, staged))
    backward = next(t for t in first if t.name == "layer.bwd.s1")
    assert all(any(t is backward for t in templates) for templates in others)
    kept = lower(with_alpha(base, "none", 0.5))[0].templates
    assert not any(t is backward for t in kept)


@pytest.mark.parametrize(("recompute", "alpha"), [("none", 0.0), ("tokenwise", 0.5), ("full", 1.0)])
def test_layers_under_metp_are_written_once_with_and_without_sharded_states(recompute: str, alpha: float) -> None:
    layout = Layout(metp=2, dp=2)
    base = Decisions(model=load_model("gpt-tiny"), layout=layout, seq_tokens=8 * K, global_batch=2)
    base = with_alpha(base, recompute, alpha)
    asked = [msgspec.structs.replace(base, layout=msgspec.structs.replace(layout, zero=zero)) for zero in (0, 1, 2, 3)]
    anew = []
    for decisions in asked:
        alike.forget()
        anew.append(program_sha256(lower(decisions)))
    assert len(set(anew)) == len(asked)
    alike.forget()
    found = [lower(decisions) for decisions in asked]
    assert [program_sha256(programs) for programs in found] == anew
    backward = [next(t for t in programs[0].templates if t.name == "layer.bwd") for programs in found]
    assert backward[1] is backward[0]
    assert backward[2] is not backward[1]


def test_the_cache_keeps_at_most_the_allowed_instructions(monkeypatch: pytest.MonkeyPatch) -> None:
    alike.forget()
    monkeypatch.setattr(alike, "MOST_INSTRUCTIONS", 10)
    base = Decisions(model=load_model("gpt-tiny"), layout=Layout(subsequences=4), seq_tokens=8 * K)
    first = alike.cached_templates(base, shape_of(base))
    lower(base)
    assert len(first) > 0
    assert alike.cached_templates(base, shape_of(base)) is first
    lower(with_alpha(base, "none", 0.5))
    lower(with_alpha(base, "none", 1.0))
    assert alike.cached_templates(base, shape_of(base)) is not first


def test_ranks_with_other_heads_have_templates_of_their_own() -> None:
    base = Decisions(
        model=msgspec.structs.replace(load_model("gpt-tiny"), heads=3, kv_heads=3, head_dim=16),
        layout=Layout(subsequences=4, ulysses=2, uneven_heads=True),
        seq_tokens=8 * K,
    )
    anew = []
    for rank in (0, 1):
        alike.forget()
        anew.append(program_sha256(lower(base, ulysses_rank=rank)))
    alike.forget()
    assert [program_sha256(lower(base, ulysses_rank=rank)) for rank in (0, 1, 0)] == [*anew, anew[0]]
    assert anew[0] != anew[1]
