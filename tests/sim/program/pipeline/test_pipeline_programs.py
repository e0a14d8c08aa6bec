"""Stage programs: the independent checkers accept every schedule and policy, and find planted faults."""

from __future__ import annotations

import itertools
from collections import Counter
from dataclasses import replace

import msgspec
import pytest

from memo_sim.contract.errors import Infeasible
from memo_sim.contract.model import Model
from memo_sim.contract.plan import Decisions, Layout
from memo_sim.program.analysis.columns import expand
from memo_sim.program.analysis.edges import derive_edges
from memo_sim.program.analysis.liveness import liveness
from memo_sim.program.ir.instruction import Instance, Lane
from memo_sim.program.ir.program import Program
from memo_sim.program.ir.work import Collective, PointToPoint
from memo_sim.program.layout.schedule import Kind
from memo_sim.program.layout.shape import shape_of
from memo_sim.program.layout.stage import layers_of_runs, stages_of
from memo_sim.program.lower import lower, program_sha256
from memo_sim.program.pipeline.stage_p2p import StageP2P
from memo_sim.program.verify.program import check_edges, check_program
from memo_sim.program.verify.stages import check_deadlock, check_stages
from tests.pairs import covering
from tests.refusals import refused
from tests.sim.small_programs import GPT, LLAMA, POLICIES, decide

EIGHT = {"gpt": msgspec.structs.replace(GPT, layers=8), "llama": msgspec.structs.replace(LLAMA, layers=8)}
LAYOUTS = [
    Layout(pp=2),
    Layout(pp=4),
    Layout(pp=4, overlap_p2p=False),
    Layout(pp=4, schedule="gpipe"),
    Layout(pp=4, schedule="zero-bubble"),
    Layout(pp=2, tp=2, sequence_parallel=True, schedule="zero-bubble"),
    Layout(pp=2, ulysses=2, schedule="zero-bubble"),
    Layout(pp=2, schedule="interleaved", virtual_stages=4),
    Layout(pp=4, schedule="interleaved", virtual_stages=2),
    Layout(pp=2, tp=2, sequence_parallel=True, dp=2, zero=1),
    Layout(pp=2, cp=2, zero=1),
    Layout(pp=2, ulysses=2),
    Layout(pp=3),
    Layout(pp=3, pp_layers=(1, 5, 2), schedule="zero-bubble"),
    Layout(pp=2, pp_layers=(1, 2, 4, 1), schedule="interleaved", virtual_stages=2),
]
EVERY = [*POLICIES, ("selective", 0.0), ("operators", 0.0)]


def stages(
    model: str, layout: Layout, policy: tuple[str, float] = ("none", 0.0), *, each: int = 4, **more
) -> Decisions:
    """Return decisions with ``each`` micro-batches on each data-parallel rank."""
    return decide(EIGHT[model], layout, policy, global_batch=each * layout.dp, **more)


def deadlocks(programs: tuple[Program, ...]) -> list[str]:
    columns = [expand(p) for p in programs]
    return check_deadlock(programs, columns, [derive_edges(c) for c in columns])


@pytest.mark.parametrize(("layout", "policy"), covering(LAYOUTS, EVERY, every=3), ids=str)
def test_every_stage_passes_the_independent_checkers(layout: Layout, policy: tuple[str, float]) -> None:
    for model in EIGHT:
        programs = lower(stages(model, layout, policy))
        assert [p.stage for p in programs] == [f"stage{n}" for n in range(layout.pp)]
        assert check_stages(programs) == []
        assert deadlocks(programs) == []
        for program in programs:
            columns = expand(program)
            assert check_program(program, columns) == []
            assert check_edges(columns, derive_edges(columns)) == []


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_stages_hold_all_layers_once_and_send_one_layers_output_and_gradient(layout: Layout) -> None:
    decisions = stages("gpt", layout)
    found = stages_of(decisions)
    assert sorted(layer for stage in found for layer in stage.layers) == list(range(8))
    sent = [
        i.work.bytes
        for p in lower(decisions)
        for _, i in p.walk()
        if isinstance(i.work, PointToPoint) and i.lane is Lane.SEND
    ]
    # Two neighbouring chunks exchange, for every micro-batch, the activation forward and its gradient backward.
    borders = layout.pp * layout.virtual_stages - 1
    one = shape_of(decisions).shard_tokens * GPT.hidden * 2
    assert sent == [one] * (2 * 4 * borders)


@pytest.mark.parametrize("schedule", [("1f1b", 1), ("gpipe", 1), ("zero-bubble", 1), ("interleaved", 2)])
def test_gathers_of_received_shards_delay_no_other_collective(schedule: tuple[str, int]) -> None:
    """Ranks of an eager framework send their shards; the collective lane must not wait for a later pass."""
    for overlapped in (True, False) if schedule[1] == 1 else (True,):
        layout = Layout(pp=4, tp=2, schedule=schedule[0], virtual_stages=schedule[1], overlap_p2p=overlapped)
        for policy in (("none", 0.0), ("none", 1.0), ("full", 0.0)):
            programs = lower(stages("gpt", layout, policy, memory_policy="eager"))
            assert check_stages(programs) + deadlocks(programs) == []
            for program in programs:
                columns = expand(program)
                assert check_program(program, columns) + check_edges(columns, derive_edges(columns)) == []


def test_the_first_and_last_stage_hold_embedding_and_head() -> None:
    first, middle, *_, last = lower(stages("gpt", Layout(pp=4)))
    names = [{f.name for f in p.families} for p in (first, middle, last)]
    assert [("input.ids" in n, "input.labels" in n, "params.head" in n) for n in names] == [
        (True, False, False),
        (False, False, False),
        (False, True, True),
    ]
    # GPT ties its classifier to the token embedding. The first and the last stage hold it and sum its gradient, and the
    # gradient norm counts it once.
    assert ["params.embed" in n for n in names] == [True, False, True]
    tied = [[i.work.bytes for _, i in p.walk() if _group(i.work) == "tied"] for p in (first, middle, last)]
    assert tied == [[4 * GPT.vocab * GPT.hidden], [], [4 * GPT.vocab * GPT.hidden]]
    assert ["step/embed/reduce/norm" in p.ids() for p in (first, middle, last)] == [True, False, False]
    untied = lower(stages("llama", Layout(pp=4)))
    assert "params.embed" not in {f.name for f in untied[-1].families}
    assert not any(_group(i.work) == "tied" for p in untied for _, i in p.walk())


def _group(work: object) -> str:
    return work.group if isinstance(work, Collective) else ""


def test_parameters_of_all_stages_are_the_models() -> None:
    whole = lower(stages("llama", Layout()))[0]
    parts = lower(stages("llama", Layout(pp=4)))
    size = [sum(f.bytes * f.count for f in p.families if f.name.startswith("params.")) for p in (whole, *parts)]
    assert size[0] == sum(size[1:])


def kept(program: Program) -> int:
    """Return the most inputs of the stage's first layer that are alive at once."""
    columns = expand(program)
    lives = liveness(program, columns)
    family = next(n for n, f in enumerate(program.all_families) if f.name == "skeletal.x")
    first = program.family_bases["skeletal.x"]
    layers = program.all_families[family].count // program.micro_batches
    mine = [first + m * layers for m in range(program.micro_batches)]
    change = [(lives.birth[n], 1) for n in mine] + [(lives.death[n] + 1, -1) for n in mine]
    return max(itertools.accumulate(step for _, step in sorted(change)))


@pytest.mark.parametrize("policy", [("none", 0.0), ("full", 0.0)])
@pytest.mark.parametrize("micro_batches", [2, 4, 9])
def test_kept_inputs_are_those_of_the_micro_batches_in_flight(policy: tuple[str, float], micro_batches: int) -> None:
    """GPipe keeps all of them; 1F1B keeps one for this stage and each later stage.

    Without ``overlap_p2p`` a stage receives no input early.
    """
    for schedule in ("1f1b", "gpipe"):
        layout = Layout(pp=4, schedule=schedule, overlap_p2p=False)
        found = [kept(p) for p in lower(stages("gpt", layout, policy, each=micro_batches))]
        assert found == [min(micro_batches, 4 - n) if schedule == "1f1b" else micro_batches for n in range(4)]


def test_an_input_received_early_is_kept_one_pass_longer() -> None:
    waits, ahead = ([kept(p) for p in lower(stages("gpt", Layout(pp=4, overlap_p2p=o), each=9))] for o in (0, 1))
    assert [b - a for a, b in zip(waits, ahead, strict=True)] == [0, 1, 1, 1]


@pytest.mark.parametrize("schedule", ["1f1b", "gpipe"])
def test_swapped_layers_follow_from_the_stages_own_order(schedule: str) -> None:
    """A stage has two layers and two rounding buffers; in 1F1B only the last stage goes back right after forward."""
    programs = lower(stages("gpt", Layout(pp=4, schedule=schedule), ("none", 1.0)))
    swapped = [len({i.place for i in p.instances if p.templates[i.template].name == "layer.offload"}) for p in programs]
    assert swapped == ([8, 8, 8, 0] if schedule == "1f1b" else [8, 8, 8, 8])[:4]


@pytest.mark.parametrize("overlap", ["none", "gradients", "both"])
@pytest.mark.parametrize("layout", [Layout(pp=2, dp=2), Layout(pp=2, dp=2, zero=1)], ids=str)
def test_tied_gradients_are_summed_over_two_stages_and_then_once_over_replicas(layout: Layout, overlap: str) -> None:
    for program in lower(stages("gpt", layout, overlap=overlap)):
        assert not [name for name, times in Counter(program.ids()).items() if times > 1]
        sums = [name for name in program.ids() if name in ("step/embed/reduce/tied", "step/embed/reduce/grads")]
        assert sums == ["step/embed/reduce/tied", "step/embed/reduce/grads"]


def test_each_layout_has_its_own_program_and_one_stage_ignores_the_schedule() -> None:
    hashes = [program_sha256(lower(stages("gpt", layout))) for layout in [Layout(), *LAYOUTS]]
    assert len(set(hashes)) == len(hashes)
    for schedule in ("gpipe", "zero-bubble"):
        assert program_sha256(lower(stages("gpt", Layout(schedule=schedule)))) == hashes[0]


@pytest.mark.parametrize("policy", [("none", 0.0), ("none", 0.5), ("full", 0.0), ("tokenwise", 0.5)])
@pytest.mark.parametrize("model", EIGHT)
def test_deferred_weight_gradients_are_the_same_products_later(model: str, policy: tuple[str, float]) -> None:
    whole, apart = (
        lower(stages(model, Layout(pp=4, schedule=schedule), policy)) for schedule in ("1f1b", "zero-bubble")
    )
    for one, other in zip(whole, apart, strict=True):
        assert weight_gradients(one) == weight_gradients(other)
        late = [name for name, i in other.walk() if i.op in ("linear.wgrad", "bias.bwd") and "/head/" not in name]
        assert late
        assert all("/wgt/" in name for name in late)
        passes = [each for each, _ in other.passes if each.kind is Kind.WEIGHTS]
        assert [each.micro_batch for each in passes] == list(range(4))


def weight_gradients(program: Program) -> Counter[tuple[str, str, object]]:
    """Return (micro-batch and layer, operator, work) of all instructions that add to a weight's or bias's gradient."""
    found = [
        (name.split("/bwd/")[0].split("/wgt/")[0], name.rsplit("/", 1)[1], i.work)
        for name, i in program.walk()
        if i.op in ("linear.wgrad", "bias.bwd")
    ]
    return Counter(found)


def planted(programs: tuple[Program, ...], stage: int, instances: list[Instance]) -> tuple[Program, ...]:
    changed = replace(programs[stage], instances=tuple(instances))
    return (*programs[:stage], changed, *programs[stage + 1 :])


def places(program: Program, template: str) -> list[int]:
    return [n for n, i in enumerate(program.instances) if program.templates[i.template].name == template]


def test_the_checker_finds_a_missing_p2p_transfer() -> None:
    programs = lower(stages("gpt", Layout(pp=4)))
    for stage, template in (
        (0, "stage.send.x"),
        (1, "stage.recv.x"),
        (1, "stage.send.grad"),
        (2, "stage.recv.grad"),
    ):
        instances = list(programs[stage].instances)
        del instances[places(programs[stage], template)[2]]
        assert any("is sent" in fault for fault in check_stages(planted(programs, stage, instances)))


def test_the_checker_finds_p2p_transfers_in_the_wrong_order() -> None:
    programs = lower(stages("gpt", Layout(pp=2)))
    instances = list(programs[0].instances)
    a, b, *_ = places(programs[0], "stage.send.x")
    instances[a], instances[b] = instances[b], instances[a]
    assert any("is sent" in fault for fault in check_stages(planted(programs, 0, instances)))


def test_the_checker_finds_a_missing_reduction() -> None:
    programs = lower(stages("gpt", Layout(pp=4)))
    for stage, template in ((1, "totals"), (3, "embed.tied")):
        instances = list(programs[stage].instances)
        del instances[places(programs[stage], template)[0]]
        assert any(fault.startswith("group") for fault in check_stages(planted(programs, stage, instances)))


def test_the_checker_finds_stages_that_wait_for_each_other() -> None:
    """Both stages send before they receive, and each send waits for its receive, so both wait for ever."""
    programs = lower(stages("gpt", Layout(pp=2, overlap_p2p=False)))
    assert deadlocks(programs) == []
    instances = list(programs[0].instances)
    send, receive = places(programs[0], "stage.send.x")[1], places(programs[0], "stage.recv.grad")[0]
    assert send == receive + 1
    instances[send], instances[receive] = instances[receive], instances[send]
    other = list(programs[1].instances)
    send, receive = places(programs[1], "stage.send.grad")[0], places(programs[1], "stage.recv.x")[1]
    assert send == receive + 1
    other[send], other[receive] = other[receive], other[send]
    swapped = planted(planted(programs, 0, instances), 1, other)
    assert check_stages(swapped) == []
    assert "stage0: m1/s0/l3/pp/send.x never starts" in deadlocks(swapped)


def test_interleaved_stages_without_early_receives_deadlock(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    decisions = stages("gpt", Layout(pp=4, schedule="interleaved", virtual_stages=2), each=8)
    assert deadlocks(lower(decisions)) == []
    monkeypatch.setattr(StageP2P, "ahead", 0)
    monkeypatch.setattr("memo_sim.program.pipeline.stage_program.cached_order", lambda _, __, place: place())
    assert deadlocks(lower(decisions)) != []


@pytest.mark.parametrize(
    ("layout", "more", "where", "got"),
    [
        (Layout(pp=9), {}, "layout.pp", "8 layers"),
        (Layout(pp=4, schedule="interleaved", virtual_stages=4), {}, "layout.pp", "8 layers"),
        (Layout(pp=4, pp_layers=(2, 3, 2)), {}, "layout.pp_layers", "3 numbers that sum to 7"),
        (Layout(pp=2, pp_layers=(4, 5)), {}, "layout.pp_layers", "2 numbers that sum to 9"),
        (Layout(pp=2, schedule="interleaved"), {}, "layout.virtual_stages", ("1", "interleaved", "pp 2")),
        (Layout(pp=2, virtual_stages=2), {}, "layout.virtual_stages", ("2", "1f1b", "pp 2")),
        (Layout(virtual_stages=2), {}, "layout.virtual_stages", ("2", "1f1b", "pp 1")),
        (Layout(pp=4, schedule="interleaved", virtual_stages=2), {"each": 6}, "global_batch", "6 micro-batches"),
        (
            Layout(pp=4, schedule="interleaved", virtual_stages=2, overlap_p2p=False),
            *({}, "layout.overlap_", "false"),
        ),
        (
            Layout(pp=2, schedule="zero-bubble"),
            *({"policy": ("full", 0.0), "mlp_chunk_tokens": 512}, "decisions.mlp_chunk_tokens", ("512", "zero-bubble")),
        ),
        (Layout(pp=2, dp=2, schedule="zero-bubble", zero=2), {}, "layout.zero", ("2", "zero-bubble")),
        (Layout(pp=2, dp=2, schedule="zero-bubble", zero=3), {}, "layout.zero", ("3", "zero-bubble")),
    ],
)
def test_what_stages_cannot_be_is_refused(layout: Layout, more: dict, where: str, got: str | tuple[str, ...]) -> None:
    with refused(Infeasible, where=where, got=got) as error:
        lower(stages("gpt", layout, **more))
    assert error.value.wanted is not None


@pytest.mark.parametrize("model", EIGHT.values())
def test_source_and_target_of_chunks_match(model: Model) -> None:
    decisions = decide(model, Layout(pp=2, schedule="interleaved", virtual_stages=2))
    found = stages_of(decisions)
    assert [stage.layers for stage in found] == [(0, 1, 4, 5), (2, 3, 6, 7)]
    last = {stage.layers[stage.chunk(c)[-1]]: stage.target(c) for stage in found for c in range(2)}
    first = {stage.layers[stage.chunk(c)[0]]: stage.source(c) for stage in found for c in range(2)}
    assert last == {1: 1, 3: 0, 5: 1, 7: None}
    assert first == {0: None, 2: 0, 4: 1, 6: 0}
    assert [stage.boundaries for stage in found] == [6, 6]


@pytest.mark.parametrize(
    ("layers", "layout", "expected"),
    [
        (126, Layout(pp=16), (7, *[8] * 14, 7)),
        (15, Layout(pp=4), (4, 4, 4, 3)),
        (14, Layout(pp=4), (3, 4, 4, 3)),
        (13, Layout(pp=4), (3, 4, 3, 3)),
        (5, Layout(pp=2), (3, 2)),
        (13, Layout(pp=4, virtual_stages=2), (1, 2, 2, 2, 2, 2, 1, 1)),
        (12, Layout(pp=4, pp_layers=(1, 5, 4, 2)), (1, 5, 4, 2)),
    ],
)
def test_stages_beside_embedding_and_head_get_one_layer_more_last(
    layers: int, layout: Layout, expected: tuple[int, ...]
) -> None:
    decisions = decide(msgspec.structs.replace(GPT, layers=layers), layout)
    assert layers_of_runs(decisions) == expected


def test_chunks_of_unequal_stages_are_consecutive_runs_of_the_model() -> None:
    layout = Layout(pp=2, pp_layers=(1, 2, 4, 1), schedule="interleaved", virtual_stages=2)
    first, second = stages_of(decide(EIGHT["gpt"], layout))
    assert (first.layers, second.layers) == ((0, 3, 4, 5, 6), (1, 2, 7))
    assert ([*first.chunk(1)], [*second.chunk(1)]) == ([1, 2, 3, 4], [2])
    assert [first.chunk_of(layer) for layer in range(5)] == [0, 1, 1, 1, 1]
    assert [first.ends_chunk(layer) for layer in range(5)] == [True, False, False, False, True]
    assert (first.boundaries, second.boundaries) == (7, 5)
