"""The lower bound of a pipeline's step time is below plans of every policy, and close to keeping everything."""

from __future__ import annotations

from dataclasses import replace

import msgspec
import pytest

from memo_sim.contract.catalog import load_cluster, load_model
from memo_sim.contract.plan import Decisions, Layout
from memo_sim.costs.pricing import Pricer
from memo_sim.engine.simulate import simulate
from memo_sim.planning.lower_bounds import LowerBounds
from memo_sim.planning.pipeline_lower_bound import is_known, kept, least_step_s
from memo_sim.planning.presets import FULL_RECOMPUTE, FULL_SWAP, KEEP, SYSTEMS
from memo_sim.planning.question import Pins, Question, with_memory
from memo_sim.planning.search import search
from memo_sim.planning.space import candidates, with_alpha
from memo_sim.program.ir.instruction import Lane
from memo_sim.program.ir.work import Collective, Copy, PointToPoint, Work
from tests.pairs import covering

K = 1024
ROOM = 2**50
ROOMY = with_memory(*load_cluster("a800-1x8"), device_bytes=ROOM, host_bytes=ROOM)
SHALLOW = msgspec.structs.replace(load_model("gpt-7b"), layers=8)
POLICIES = [
    *((recompute, alpha, 0) for recompute in ("none", "tokenwise") for alpha in (0.5, 1.0)),
    *(("none", alpha, window) for alpha in (0.5, 1.0) for window in (1, 2)),
    ("tokenwise", 0.0, 0),
    ("full", 0.0, 0),
    ("full", 1.0, 0),
]
LAYOUTS = {
    "1f1b": Layout(pp=4, subsequences=6),
    "gpipe": Layout(tp=2, sequence_parallel=True, pp=4, schedule="gpipe", subsequences=4),
    "zero-bubble": Layout(pp=4, schedule="zero-bubble", subsequences=4),
    "interleaved": Layout(tp=2, sequence_parallel=True, pp=2, schedule="interleaved", virtual_stages=2, subsequences=4),
    "helpers": Layout(pp=4, subsequences=6, multiplexed=True),
    "helpers with tp": Layout(tp=2, sequence_parallel=True, pp=2, schedule="gpipe", subsequences=3, multiplexed=True),
}


def keeping(layout: Layout) -> Decisions:
    return Decisions(model=SHALLOW, layout=layout, seq_tokens=32 * K, loss_chunk_tokens=4096)


class KernelsAlone:
    """Prices of a machine on which only kernels take time; the lower bound is exact there."""

    def __init__(self, decisions: Decisions) -> None:
        cluster, hardware = ROOMY
        self._pricer = Pricer(hardware, cluster, decisions.layout, rowwise=decisions.kernels.rowwise)
        self.outside_of = self._pricer.outside_of

    def seconds(self, work: Work) -> float:
        return 0.0 if isinstance(work, Collective | Copy | PointToPoint) else self._pricer.seconds(work)


def played_s(decisions: Decisions, *, kernels_alone: bool) -> float:
    cluster, hardware = ROOMY
    if not kernels_alone:
        return simulate(decisions, hardware, cluster).prediction.step_s or 0.0
    pricer, rates = KernelsAlone(decisions), (1.0,) * len(Lane)
    return simulate(decisions, hardware, cluster, pricer=pricer, rates=lambda _: rates).prediction.step_s or 0.0


@pytest.mark.parametrize(("name", "half"), covering(LAYOUTS, [0, 1]))
def test_no_policy_computes_less_than_keeping_everything(name: str, half: int) -> None:
    """Every second policy; the slow run has the other half of each layout's."""
    base = keeping(LAYOUTS[name])
    assert is_known(base)
    least_s = least_step_s(base, *reversed(ROOMY))
    for recompute, alpha, window in POLICIES[half::2]:
        swapped = with_alpha(base, recompute, alpha)
        decisions = msgspec.structs.replace(swapped, offload_window=window)
        assert kept(decisions) == base
        assert least_s <= played_s(decisions, kernels_alone=True)
    if LAYOUTS[name].schedule != "zero-bubble":
        for recompute in ("full", "rowwise")[: 1 if LAYOUTS[name].multiplexed else 2]:
            cut = msgspec.structs.replace(base, recompute=recompute, mlp_chunk_tokens=1024)
            assert least_s <= played_s(cut, kernels_alone=True)


@pytest.mark.parametrize("name", LAYOUTS)
def test_the_bound_is_the_time_of_kernels_alone(name: str) -> None:
    base = keeping(LAYOUTS[name])
    least_s = least_step_s(base, *reversed(ROOMY))
    alone_s = played_s(base, kernels_alone=True)
    assert 0.98 * alone_s < least_s <= alone_s <= played_s(base, kernels_alone=False)


def test_the_bound_contains_waits_for_other_stages() -> None:
    """Twice the stages with half the layers have the same work but a longer bubble; no stage's own work shows that."""
    cluster, hardware = ROOMY
    few, many = (least_step_s(keeping(Layout(pp=pp, subsequences=8)), hardware, cluster) for pp in (2, 4))
    one = least_step_s(keeping(Layout(pp=4, subsequences=8, schedule="gpipe")), hardware, cluster)
    assert few / 2 < many < few
    assert one == pytest.approx(many, rel=0.01)
    assert many > 1.2 * few / 2


def test_the_bound_applies_to_one_micro_batch_through_stages() -> None:
    staged = keeping(Layout(pp=2, subsequences=4))
    assert is_known(staged)
    assert not is_known(msgspec.structs.replace(staged, global_batch=2))
    assert not is_known(keeping(Layout(pp=2)))
    assert not is_known(keeping(Layout(subsequences=4)))


@pytest.mark.parametrize("policy", POLICIES)
def test_the_rough_bound_is_not_above_the_bound_from_layers(policy: tuple[str, float, int]) -> None:
    """Both bounds contain the head and the collectives that kernels wait for; the bound with a lowering has more."""
    cluster, hardware = ROOMY
    bounds, (recompute, alpha, window) = LowerBounds(hardware, cluster), policy
    layout = Layout(tp=4, sequence_parallel=True, pp=2, subsequences=4)
    decisions = msgspec.structs.replace(with_alpha(keeping(layout), recompute, alpha), offload_window=window)
    rough, bound = bounds.rough(decisions, keep=None), bounds.of(decisions)
    played = simulate(decisions, hardware, cluster).prediction
    assert played.step_s is not None
    assert 0.6 * bound.step_s < rough.step_s <= bound.step_s <= played.step_s


@pytest.mark.parametrize("device_gib", [80, pytest.param(14, marks=pytest.mark.slow)])
def test_pruning_by_the_bound_keeps_the_best_plans_and_their_order(
    monkeypatch: pytest.MonkeyPatch, device_gib: int
) -> None:
    """With little memory, only plans that swap or recompute fit, and their alpha is searched."""
    chosen = (KEEP, FULL_RECOMPUTE, FULL_SWAP) if device_gib == 80 else SYSTEMS["any"].policies
    monkeypatch.setitem(SYSTEMS, "any", replace(SYSTEMS["any"], degrees=("tp", "pp", "dp"), policies=chosen))
    cluster, hardware = with_memory(*load_cluster("a800-1x8"), device_bytes=device_gib * 2**30, host_bytes=None)
    inside = msgspec.structs.replace(cluster, devices_per_node=4)
    model = msgspec.structs.replace(SHALLOW, layers=4)
    asked = Question(model, inside, hardware, 8 * K, system="any", pins=Pins(tp=1, subsequences="auto"))
    assert any(is_known(c.base) and c.base.layout.multiplexed for c in candidates(asked)[0])
    everything, found = search(asked, prune=False), search(asked, keep=3)
    assert found.evaluated + found.pruned == everything.evaluated + everything.pruned
    assert [e.rank_key for e in found.ranked[:3]] == [e.rank_key for e in everything.ranked[:3]]
    assert found.pruned > everything.pruned
    if device_gib == 80:
        assert found.pruned > found.evaluated
