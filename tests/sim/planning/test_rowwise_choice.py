"""Row-wise kernels: priced by the plan's implementation, chosen by their sum, and only when they were measured."""

from __future__ import annotations

from collections import Counter

import msgspec
import pytest

from memo_sim.contract.catalog import load_cluster, load_model
from memo_sim.contract.cluster import Cluster
from memo_sim.contract.errors import Infeasible
from memo_sim.contract.hardware import Curve, Hardware
from memo_sim.contract.knobs import Recompute, RowwiseKernel, Schedule
from memo_sim.contract.plan import Decisions, Kernels, Layout
from memo_sim.costs.pricing import Pricer
from memo_sim.planning import rowwise_kernels
from memo_sim.planning.question import Pins, Question
from memo_sim.planning.search import play, search
from memo_sim.planning.space import candidates
from memo_sim.program.ir.program import Program
from memo_sim.program.ir.work import Rowwise
from memo_sim.program.layout.shape import shape_of
from memo_sim.program.lower import lower, lower_passes
from memo_sim.program.operators.workspaces import FUSED_KINDS
from tests.refusals import refused

TORCH_BYTES_PER_S = 1e12
SLOW, FAST = 0.1, 10.0
"""Factors on torch's rate."""

PARTS = 8
"""Number of subsequences."""

FORWARD_KINDS = frozenset(kind for kind in FUSED_KINDS if not kind.endswith(".bwd"))


def machine(fused: dict[str, float] | None, cluster: str = "a800-1x1") -> tuple[Cluster, Hardware]:
    """Return a cluster on which all row-wise operators run at one rate, and fused ones at a multiple of it."""
    found, hardware = load_cluster(cluster)
    source = next(iter(hardware.sources))

    def curve(rate: float) -> Curve:
        return Curve(x=[1.0, 1e12], y=[rate, rate], source=source)

    return found, msgspec.structs.replace(
        hardware,
        memory_bound_bytes_per_s=curve(TORCH_BYTES_PER_S),
        rowwise_bytes_per_s={},
        fused_rowwise_bytes_per_s={}
        if fused is None
        else {"triton": {kind: curve(times * TORCH_BYTES_PER_S) for kind, times in fused.items()}},
    )


def question(fused: dict[str, float] | None, model: str = "llama-tiny", **pins: object) -> Question:
    cluster, hardware = machine(fused)
    return Question(
        model=load_model(model),
        cluster=cluster,
        hardware=hardware,
        seq_tokens=16_384,
        system="any",
        pins=Pins(**pins),  # type: ignore[arg-type]
    )


def chosen(asked: Question) -> set[RowwiseKernel]:
    return {candidate.base.kernels.rowwise for candidate in candidates(asked)[0]}


def every(times: float, **others: float) -> dict[str, float]:
    return dict.fromkeys(FUSED_KINDS, times) | {name.replace("_bwd", ".bwd"): rate for name, rate in others.items()}


@pytest.fixture
def lowered(monkeypatch: pytest.MonkeyPatch) -> list[Decisions]:
    """The plans that were lowered to choose kernels."""
    found: list[Decisions] = []

    def counted(decisions: Decisions, **options: int) -> tuple[Program, ...]:
        found.append(decisions)
        return lower(decisions, **options)

    def counted_passes(decisions: Decisions) -> Program:
        found.append(decisions)
        return lower_passes(decisions)

    monkeypatch.setattr(rowwise_kernels, "lower", counted)
    monkeypatch.setattr(rowwise_kernels, "lower_passes", counted_passes)
    return found


def test_plans_with_other_places_of_experts_are_lowered_once(lowered: list[Decisions]) -> None:
    """Fused kernels play rows of tokens; where rows of experts go changes none of them."""
    cluster, hardware = machine(every(FAST, swiglu=0.9))
    asked = Question(
        model=load_model("mixtral-tiny"),
        cluster=cluster,
        hardware=hardware,
        seq_tokens=16_384,
        system="any",
        pins=Pins(),
    )
    choice = rowwise_kernels.RowwiseChoice(hardware)
    for dp, ep in ((1, 1), (2, 2), (4, 2), (4, 4)):
        fields = {"expert_capacity": 2.0, "expert_overflow": "refuse"} if ep > 1 else {}
        decisions = msgspec.structs.replace(asked.decisions(Layout(dp=dp, ep=ep)), global_batch=dp, **fields)
        found = choice.faster(decisions)
        assert found == msgspec.structs.replace(decisions, kernels=found.kernels)
        assert found.kernels.rowwise == "triton"
    assert len(lowered) == 1


@pytest.mark.parametrize(
    ("fused", "wanted"),
    [
        (every(FAST), [rowwise_kernels.FEW]),
        (every(FAST, swiglu=1.0), [rowwise_kernels.FEW, PARTS]),
        (every(FAST, swiglu=0.9), [rowwise_kernels.FEW, PARTS]),
        (every(SLOW), [rowwise_kernels.FEW, PARTS]),
        (every(1.0), [rowwise_kernels.FEW, PARTS]),
    ],
    ids=["faster", "one as fast", "one slower", "slower", "as fast"],
)
@pytest.mark.parametrize("tokens", [1024, 65_536], ids=["launches alone", "longer"])
@pytest.mark.parametrize("recompute", ["none", "tokenwise"])
def test_kernels_that_win_at_every_size_are_chosen_without_all_subsequences(
    fused: dict[str, float], wanted: list[int], tokens: int, recompute: Recompute, lowered: list[Decisions]
) -> None:
    """The choice is that of the plan with all subsequences; work that is as short as a launch decides nothing."""
    _, hardware = machine(fused)
    model = load_model("llama-tiny")
    decisions = Decisions(model=model, layout=Layout(subsequences=PARTS), seq_tokens=tokens, recompute=recompute)
    exact = rowwise_kernels.RowwiseChoice(hardware).fastest(decisions)
    lowered.clear()
    found = rowwise_kernels.RowwiseChoice(hardware).faster(decisions)
    assert found.kernels.rowwise == exact
    parts = dict.fromkeys(each.layout.subsequences for each in lowered)
    assert list(parts) == (wanted if tokens > 1024 else [rowwise_kernels.FEW, PARTS])


@pytest.mark.parametrize("fused", [every(FAST), every(FAST, swiglu=0.9)], ids=["faster", "one slower"])
@pytest.mark.parametrize("tokens", [512, 16_384], ids=["launches alone", "longer"])
@pytest.mark.parametrize("model", ["llama-tiny", "gpt-tiny", "qwen3-0.6b"])
@pytest.mark.parametrize("recompute", ["none", "tokenwise", "full"])
def test_kernels_that_win_at_every_size_are_chosen_without_a_lowering(
    fused: dict[str, float], tokens: int, model: str, recompute: Recompute, lowered: list[Decisions]
) -> None:
    _, hardware = machine(fused)
    decisions = Decisions(model=load_model(model), layout=Layout(), seq_tokens=tokens, recompute=recompute)
    exact = rowwise_kernels.RowwiseChoice(hardware).fastest(decisions)
    lowered.clear()
    assert rowwise_kernels.RowwiseChoice(hardware).faster(decisions).kernels.rowwise == exact
    assert bool(lowered) == (tokens == 512 or fused != every(FAST))


@pytest.mark.parametrize("model", ["llama-tiny", "gpt-tiny", "gemma3-tiny", "mixtral-tiny", "gpt-oss-tiny"])
@pytest.mark.parametrize("recompute", ["none", "tokenwise", "full", "rowwise"])
@pytest.mark.parametrize(
    "degrees",
    [{"tp": 2}, {"tp": 2, "sequence_parallel": True}, {"cp": 4}, {"ulysses": 2}, {"pp": 2}],
    ids=str,
)
def test_every_layer_has_a_norm_of_all_rows(model: str, recompute: Recompute, degrees: dict[str, int]) -> None:
    """``RowwiseChoice`` takes its bytes for known, so that no plan is lowered for them; and its kinds of work."""
    layout = Layout(**degrees)  # type: ignore[arg-type]
    decisions = Decisions(model=load_model(model), layout=layout, seq_tokens=4096, recompute=recompute)
    try:
        programs = lower(decisions)
    except Infeasible:
        pytest.skip("the model does not go with this")
    asked, norm = decisions.model, "layer_norm" if decisions.model.family == "gpt" else "rms_norm"
    moved_bytes = 2 * shape_of(decisions).shard_tokens * asked.hidden * 2
    for program in programs:
        works = [i.work for t in program.templates for i in t.instructions if isinstance(i.work, Rowwise)]
        assert max(work.moved_bytes for work in works if work.kind == norm) >= moved_bytes
        assert not asked.gated or not any(work.kind.startswith("gelu") for work in works)


@pytest.mark.parametrize("parts", [3, 16])
@pytest.mark.parametrize("model", ["llama-tiny", "gpt-tiny", "qwen3-0.6b"])
@pytest.mark.parametrize("recompute", ["none", "tokenwise", "full"])
@pytest.mark.parametrize("degrees", [{}, {"tp": 2, "sequence_parallel": True}, {"cp": 2}, {"ulysses": 2}])
def test_few_subsequences_have_all_kinds_of_rowwise_work(
    parts: int, model: str, recompute: Recompute, degrees: dict[str, int]
) -> None:
    def kinds(subsequences: int) -> set[str]:
        layout = Layout(subsequences=subsequences, **degrees)  # type: ignore[arg-type]
        decisions = Decisions(model=load_model(model), layout=layout, seq_tokens=12_288, recompute=recompute)
        templates = (template for program in lower(decisions) for template in program.templates)
        works = (instruction.work for template in templates for instruction in template.instructions)
        return {work.kind for work in works if isinstance(work, Rowwise)}

    assert kinds(rowwise_kernels.FEW) == kinds(parts)


def test_a_profile_without_fused_curves_means_torch() -> None:
    assert chosen(question(None)) == {"torch"}


def test_the_faster_implementation_is_chosen() -> None:
    assert chosen(question(every(FAST))) == {"triton"}
    assert chosen(question(every(SLOW))) == {"torch"}
    assert chosen(question(every(1.0))) == {"torch"}


@pytest.mark.parametrize("model", ["llama-tiny", "gpt-tiny"])
@pytest.mark.parametrize("policy", [{"recompute": "none", "alpha": 0.0}, {"recompute": "full", "alpha": 0.0}])
@pytest.mark.parametrize(
    "fused",
    [
        every(FAST, cross_entropy=SLOW),
        every(FAST, cross_entropy=0.01),
        every(SLOW, cross_entropy=FAST),
        every(1.2, swiglu=0.5, gelu=0.5),
        every(1.2, swiglu_bwd=0.5, gelu_bwd=0.5),
    ],
    ids=["slow loss", "much slower loss", "fast loss", "slow activation", "slow backward of the activation"],
)
def test_with_mixed_kernel_speeds_the_plan_has_the_faster_step(
    fused: dict[str, float], policy: dict[str, object], model: str
) -> None:
    asked = question(fused, model, **policy)
    best = search(asked).best
    assert best is not None
    steps = {}
    for rowwise in ("torch", "triton"):
        kernels = msgspec.structs.replace(best.decisions.kernels, rowwise=rowwise)
        steps[rowwise] = play(asked, msgspec.structs.replace(best.decisions, kernels=kernels)).prediction.step_s
    assert steps["torch"] != steps["triton"]
    assert best.decisions.kernels.rowwise == min(steps, key=lambda name: steps[name] or 0.0)
    assert best.prediction.step_s == min(steps.values(), key=lambda step_s: step_s or 0.0)


def test_recompute_counts_forward_twice() -> None:
    """The fused forward is slower and the fused backward faster: fused wins when all is kept, torch with recompute."""
    fused = {kind: 0.8 if kind in FORWARD_KINDS else 1.25 for kind in FUSED_KINDS} | {"cross_entropy": 1.0}
    assert chosen(question(fused, recompute="none", alpha=0.0)) == {"triton"}
    assert chosen(question(fused, recompute="full", alpha=0.0)) == {"torch"}


def test_an_implementation_that_lacks_an_operator_is_not_chosen() -> None:
    fused = every(FAST)
    del fused["rotary.bwd"]
    assert chosen(question(fused)) == {"torch"}
    assert chosen(question(fused, "gpt-tiny")) == {"triton"}  # this model has learned positions


def test_norms_of_heads_count_where_they_are_measured() -> None:
    """They have torch's price until then, and keep no plan from the fused kernels that are measured."""
    slower = every(0.99)
    assert chosen(question(every(FAST), "qwen3-0.6b")) == {"triton"}
    assert chosen(question(slower, "qwen3-0.6b")) == {"torch"}
    assert chosen(question(slower | {"qk_norm": FAST, "qk_norm.bwd": FAST}, "qwen3-0.6b")) == {"triton"}


def test_a_divided_vocabulary_has_no_fused_loss() -> None:
    """With a divided vocabulary, torch plays the loss in every plan, so its price is torch's."""
    cluster, hardware = machine(every(0.99, cross_entropy=1000.0), "a800-1x8")
    for tp, found in ((1, {"triton"}), (2, {"torch"})):
        asked = Question(
            model=load_model("llama-tiny"),
            cluster=cluster,
            hardware=hardware,
            seq_tokens=2**20,
            system="any",
            pins=Pins(tp=tp),
        )
        assert chosen(asked) == found


def test_unmeasured_fused_kernels_have_no_price() -> None:
    asked = question(None)
    (first, *_), _ = candidates(asked)
    fused = msgspec.structs.replace(first.base, kernels=Kernels(attention="flash2", rowwise="triton"))
    with refused(Infeasible, what="triton", where="a800-sxm4-80gb", hint="--rowwise torch"):
        play(asked, fused)


def test_only_fused_operators_have_the_fused_price() -> None:
    cluster, hardware = machine(every(FAST))
    prices = {
        rowwise: Pricer(hardware, cluster, candidates(question(None))[0][0].base.layout, rowwise=rowwise)
        for rowwise in ("torch", "triton")
    }
    size = 10**10
    for kind in sorted(FUSED_KINDS | {"residual_add", "qk_norm", "adamw", "cross_entropy.stats"}):
        torch_s, triton_s = (price.seconds(Rowwise(kind, 1, size, 0)) for price in prices.values())
        assert torch_s == pytest.approx(size / TORCH_BYTES_PER_S)
        assert triton_s == pytest.approx(torch_s / (FAST if kind in FUSED_KINDS else 1.0))


@pytest.mark.parametrize(("rate", "expected"), [(FAST, "triton"), (SLOW, "torch")])
def test_interleaved_stages_choose_too(rate: float, expected: str) -> None:
    """They cannot be lowered with one micro-batch."""
    asked = stages(dict.fromkeys(FUSED_KINDS, rate), schedule="interleaved", virtual_stages=2)
    assert chosen(asked) == {expected}


@pytest.mark.parametrize("pins", [{}, {"schedule": "interleaved", "virtual_stages": 2}])
def test_stages_choose_by_their_sum_where_no_implementation_is_always_faster(pins: dict[str, object]) -> None:
    asked = stages({kind: SLOW if kind == "cross_entropy" else FAST for kind in FUSED_KINDS}, **pins)
    assert chosen(asked) == {"triton"}


def stages(fused: dict[str, float], **pins: object) -> Question:
    cluster, hardware = machine(fused, "a800-1x4")
    given = Pins(tp=1, cp=1, dp=2, pp=2, recompute="none", **pins)  # type: ignore[arg-type]
    return Question(load_model("llama-tiny"), cluster, hardware, 16_384, system="any", global_batch=8, pins=given)


@pytest.mark.parametrize("recompute", ["none", "full", "tokenwise"])
@pytest.mark.parametrize("subsequences", [1, 4])
def test_one_layer_has_the_works_of_all_stages(
    subsequences: int, recompute: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each backward of a layer and subsequence recomputes, or finds its activations in a rounding buffer."""
    asked = question(every(FAST), "llama-tiny")
    seen = list[rowwise_kernels._LayerWorks]()
    written = rowwise_kernels._LayerWorks
    monkeypatch.setattr(rowwise_kernels, "_LayerWorks", lambda of: seen.append(written(of)) or seen[-1])
    layers = asked.model.layers
    for pp in (1, 2):
        layout = Layout(pp=pp, subsequences=subsequences)
        decisions = msgspec.structs.replace(asked.decisions(layout), recompute=recompute, swapped_tokens=0)
        chosen_of_one = rowwise_kernels.RowwiseChoice(asked.hardware)._of_any_stages(decisions)
        assert chosen_of_one == rowwise_kernels.RowwiseChoice(asked.hardware).fastest(decisions) == "triton"
        works = seen[-1]
        assert len(works.forward) == len(works.backward) == len(works.resident) == subsequences
        whole = Counter(works.ends)
        for part, forward in works.forward.items():
            for work, times in (forward + works.backward[part]).items():
                whole[work] += layers * times
        spared = whole - rowwise_kernels._works(decisions)
        assert whole - spared == rowwise_kernels._works(decisions)
        assert bool(spared) == any(works.resident[part] != works.backward[part] for part in works.forward)
        recomputed = Counter[Rowwise]()
        for part in works.forward:
            recomputed |= works.backward[part] - works.resident[part]
        assert spared.keys() <= recomputed.keys()
        assert all(times % recomputed[work] == 0 for work, times in spared.items())


@pytest.mark.parametrize("recompute", ["none", "full", "rowwise"])
@pytest.mark.parametrize(
    "fused", [every(1.2, swiglu=0.5), every(1.2, cross_entropy=0.01)], ids=["slow activation", "slow loss"]
)
def test_subsequences_have_the_choice_of_all_stages_lowered(fused: dict[str, float], recompute: Recompute) -> None:
    """One layer of each kind stands for the layers of every stage."""
    cluster, hardware = machine(fused, "a800-1x8")
    asked = Question(
        model=load_model("llama-tiny"), cluster=cluster, hardware=hardware, seq_tokens=16_384, system="any", pins=Pins()
    )
    plans: list[tuple[int, Schedule]] = [(1, "1f1b"), (2, "1f1b"), (2, "gpipe")]
    for pp, schedule in plans:
        layout = Layout(pp=pp, schedule=schedule, subsequences=3)
        plan = msgspec.structs.replace(
            asked.decisions(layout), recompute=recompute, mlp_chunk_tokens=1024 * (recompute == "rowwise")
        )
        choice = rowwise_kernels.RowwiseChoice(hardware)
        assert choice.faster(plan).kernels.rowwise == choice.fastest(plan)
