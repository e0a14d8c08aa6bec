"""Multiplexed sequence partitioning: SPPO's maps, shares of a wave, matching programs, and the paper's step time.

``phases.py`` has the paper's Definition 6.1, with the exclusive bounds of Table 3.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from dataclasses import replace
from itertools import accumulate

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from memo_sim.contract.errors import Infeasible
from memo_sim.contract.model import Model
from memo_sim.contract.plan import Decisions, Layout
from memo_sim.engine.simulate import Simulation, simulate
from memo_sim.program.analysis.columns import expand
from memo_sim.program.ir.instruction import Lane
from memo_sim.program.ir.work import Attention, Gemm, PointToPoint, Work
from memo_sim.program.layout.multiplex import Portion, cut_tasks
from memo_sim.program.layout.partition import earlier_tokens, partition
from memo_sim.program.lower import lower
from memo_sim.program.verify.stages import check_stages
from memo_sim.program.verify.values import check_values
from tests.sim import toy_machine
from tests.sim.program.pipeline.phases import Phase, identifiers, scope
from tests.sim.small_programs import GPT, LLAMA, decide, faults_of

POLICIES = [
    *[("none", 0.0), ("none", 1.0), ("full", 0.0), ("full", 1.0), ("tokenwise", 0.0)],
]


def multiplexed(stages: int, count: int, policy: tuple[str, float] = ("none", 0.0), **more: object) -> Decisions:
    """Return decisions with two layers on each stage; ``more`` has fields of the layout or of the decisions."""
    named = {name: more.pop(name) for name in list(more) if name in Layout.__struct_fields__}
    layout = Layout(**({"pp": stages, "subsequences": count, "multiplexed": True} | named))
    model = msgspec.structs.replace(more.pop("model", LLAMA), layers=2 * stages)
    return decide(model, layout, policy, **({"seq_tokens": 512 * count, "global_batch": layout.dp} | more))


TABLE_3 = {
    Phase.LEFT: [{0, 1, 2}, {0, 1}, {0}, set()],
    Phase.STEADY: [{3, 4, 5, 6, 7}, {2, 3, 4, 5, 6}, {1, 2, 3, 4, 5}, {0, 1, 2, 3, 4}],
    Phase.RIGHT: [set(), {7}, {6, 7}, {5, 6, 7}],
}
TABLE_3_RANGES = {
    Phase.LEFT: [{0, 1, 2, 3}, {1, 2, 3}, {2, 3}, set()],
    Phase.RIGHT: [set(), {0, 1}, {0, 1, 2}, {0, 1, 2, 3}],
}


def test_table_3() -> None:
    for phase, rows in TABLE_3.items():
        assert [set(identifiers(4, 8, stage)[phase]) for stage in range(4)] == rows
    for phase, rows in TABLE_3_RANGES.items():
        assert [set(scope(4, stage, phase)) for stage in range(4)] == rows


@pytest.mark.parametrize(("stages", "count"), [(2, 2), (2, 4), (3, 7), (4, 8), (8, 8)])
def test_left_and_right_are_the_waves_with_idle_stages(stages: int, count: int) -> None:
    for stage in range(stages):
        phases = identifiers(stages, count, stage)
        assert [x for phase in Phase for x in phases[phase]] == list(range(count))
        for phase, found in phases.items():
            for x in found:
                idle = [other for other in range(stages) if not 0 <= x + stage - other < count]
                assert bool(idle) == (phase is not Phase.STEADY)
                assert set(idle) <= set(scope(stages, stage, phase))


def test_figure_8_divides_its_first_and_last_subsequence_into_halves_of_equal_work() -> None:
    decisions = multiplexed(2, 4, seq_tokens=64 * 1024)
    tasks = cut_tasks(decisions)
    assert sorted(tasks) == [(0, 0), (3, 1)]
    for task in tasks.values():
        assert [portion.stage for portion in task.portions] == [1 - task.stage, task.stage]
        first, second = (work(decisions, task.subsequence, portion) for portion in task.portions)
        assert first == pytest.approx(second, rel=0.05)  # equal up to a granule of 128 tokens


def work(decisions: Decisions, subsequence: int, portion: Portion) -> float:
    """Return the forward work of a portion; unit: the products of one token."""
    k = earlier_tokens(decisions.model)
    first = sum(partition(decisions)[:subsequence]) + portion.first
    return sum(1 + token / k for token in range(first, first + portion.tokens))


def several(stages: int, count: int, policy: tuple[str, float] = ("none", 0.0), **more: object) -> Decisions:
    """Return multiplexed decisions with several sequences in the one micro-batch (``micro_batch``, by default two)."""
    sequences = more.pop("micro_batch", 2)
    chosen = multiplexed(stages, count, (policy[0], 0.0), micro_batch=sequences, global_batch=sequences, **more)
    return msgspec.structs.replace(chosen, swapped_tokens=int(policy[1]) * chosen.local_tokens)


few = st.tuples(st.integers(2, 4), st.integers(0, 2)).map(lambda drawn: (drawn[0], sum(drawn)))
waves = st.tuples(st.integers(2, 6), st.integers(0, 5)).map(lambda drawn: (drawn[0], sum(drawn)))


@settings(max_examples=25, deadline=None)
@given(waves, st.sampled_from(["length", "flops"]), st.integers(2, 40))
def test_every_row_is_computed_once_by_its_owner_or_an_idle_stage(
    sizes: tuple[int, int], partitioned: str, granules: int
) -> None:
    stages, count = sizes
    decisions = multiplexed(stages, count, seq_tokens=128 * granules * count, partition=partitioned)
    parts = partition(decisions)
    for (x, stage), task in cut_tasks(decisions).items():
        ends = [0, *(portion.first + portion.tokens for portion in task.portions)]
        assert [portion.first for portion in task.portions] == ends[:-1]
        assert ends[-1] == parts[x]
        assert task.own.stage == stage
        assert all(portion.tokens > 0 for portion in task.portions)
        assert all(portion.tokens % 128 == 0 for portion in task.helpers)
        phase = next(phase for phase, found in identifiers(stages, count, stage).items() if x in found)
        for helper in task.helpers:
            assert helper.stage in scope(stages, stage, phase)
            assert not 0 <= x + stage - helper.stage < count


@pytest.mark.parametrize("ulysses", [1, 4])
@pytest.mark.parametrize("partitioned", ["length", "flops"])
def test_stages_that_share_a_wave_have_equal_work_up_to_a_granule(partitioned: str, ulysses: int) -> None:
    """Of Ulysses a row of a rank stands for as many tokens as there are ranks."""
    decisions = multiplexed(4, 8, seq_tokens=512 * 1024, partition=partitioned, ulysses=ulysses)
    k, starts = earlier_tokens(decisions.model) / ulysses, [0, *accumulate(partition(decisions))]
    done: dict[int, Counter[int]] = defaultdict(Counter)
    for (x, stage), task in cut_tasks(decisions).items():
        for portion in task.portions:
            first = starts[x] + portion.first
            done[x + stage][portion.stage] += portion.tokens + portion.tokens * (2 * first + portion.tokens) / (2 * k)
    assert sorted(done) == [0, 1, 2, 8, 9, 10]
    for wave, shares in done.items():
        assert max(shares.values()) - min(shares.values()) < 2 * 128 * (1 + decisions.seq_tokens / k)
        for stage in set(range(4)) - set(shares):  # with equal lengths some tasks have less work than the level
            first, end = starts[wave - stage], starts[wave - stage + 1]
            assert end - first + (end**2 - first**2) / (2 * k) <= max(shares.values())


@pytest.mark.parametrize("ahead", [True, False])
@pytest.mark.parametrize("policy", POLICIES, ids=str)
def test_every_policy_passes_the_independent_checkers(policy: tuple[str, float], ahead: bool) -> None:
    chosen = multiplexed(3, 4, policy, overlap_p2p=ahead)
    assert len(cut_tasks(chosen)) == 6
    assert faults_of(chosen) == []


@pytest.mark.parametrize(
    "more",
    [
        {"tp": 2, "sequence_parallel": True, "seq_tokens": 4096},
        {"dp": 2, "zero": 1, "overlap": "both"},
        {"ulysses": 2, "seq_tokens": 4096},
        {"ulysses": 4, "tp": 2, "seq_tokens": 8192},
        {"model": GPT, "states": "host", "schedule": "gpipe"},
        {"partition": "length", "seq_tokens": 2000},
    ],
    ids=str,
)
def test_compatible_options_pass_the_independent_checkers(more: dict) -> None:
    for policy in POLICIES[::2]:
        assert faults_of(multiplexed(2, 3, policy, **more)) == []


@settings(max_examples=5, deadline=None)
@given(few, st.sampled_from(POLICIES), st.booleans(), st.integers(1, 9), st.sampled_from(["length", "flops"]))
def test_no_combination_of_stages_and_sizes_deadlocks(
    sizes: tuple[int, int], policy: tuple[str, float], ahead: bool, granules: int, partitioned: str
) -> None:
    stages, count = sizes
    tokens = 128 * granules * count
    assert (
        faults_of(multiplexed(stages, count, policy, overlap_p2p=ahead, seq_tokens=tokens, partition=partitioned)) == []
    )


@pytest.mark.parametrize("sequences", [2, 3])
@pytest.mark.parametrize("policy", POLICIES, ids=str)
def test_several_sequences_pass_the_independent_checkers(policy: tuple[str, float], sequences: int) -> None:
    chosen = several(3, 4, policy, micro_batch=sequences)
    assert len(cut_tasks(chosen)) == 6
    assert faults_of(chosen) == []


@settings(max_examples=5, deadline=None)
@given(few, st.sampled_from(POLICIES), st.integers(2, 4), st.integers(1, 5), st.sampled_from(["length", "flops"]))
def test_no_number_of_sequences_makes_a_fault(
    sizes: tuple[int, int], policy: tuple[str, float], sequences: int, granules: int, partitioned: str
) -> None:
    tokens = (128 * granules + 4) * sizes[1]
    assert faults_of(several(*sizes, policy, micro_batch=sequences, seq_tokens=tokens, partition=partitioned)) == []


def test_a_helper_has_the_rows_and_the_heads_of_its_rank_of_ulysses() -> None:
    """Each rank gets half of the heads of all keys before its portion's rows, and exchanges its own rows by itself."""
    chosen = multiplexed(2, 2, ulysses=2, partition="length", seq_tokens=4096)
    helper = cut_tasks(chosen)[1, 1].helpers[0]
    exchanged, received = set[str](), dict[str, int]()
    for name, each in lower(chosen)[helper.stage].walk():
        if name.startswith("m0/s1/l2/") and "recv.before" in name:
            received[name] = each.work.bytes
        if name.startswith("m0/s1/l2/") and each.lane is Lane.ULYSSES:
            exchanged.add(name.rpartition("/")[2])
    row = 2 * 2 * chosen.model.kv_width // 2
    assert list(received.values()) == [2048 * row]
    assert len(exchanged) >= 4  # Q, K and V, and attention's output, in both directions


@pytest.mark.parametrize("sequences", [2, 3])
def test_several_sequences_have_the_work_that_they_have_without_multiplexing(sequences: int) -> None:
    chosen = several(4, 6, micro_batch=sequences)
    assert flops(chosen) == flops(decide_without(chosen))


FIRST_TASK = {
    3: {"attn.q0": (1, 256, 256), "attn.before.q0.k0": (1, 256, 256), "attn.q1": (1, 512, 512)},
    4: {"attn.q0": (2, 512, 512)},
}
"""Calls of the owner of a wave's only task, by the number of sequences, of 512 rows each: (batch, queries, keys). Of
three it has the second half of the second, which attends to the first half, and the third; of four the last two."""


@pytest.mark.parametrize("sequences", FIRST_TASK)
def test_whole_sequences_are_one_batch_and_a_part_of_one_is_a_call_of_its_own(sequences: int) -> None:
    chosen = several(2, 4, micro_batch=sequences, partition="length")
    calls = {
        name.removeprefix("m0/s0/l0/fwd/"): (work.batch, work.q_tokens, work.k_tokens)
        for name, each in lower(chosen)[0].walk()
        if isinstance(work := each.work, Attention) and name.startswith("m0/s0/l0/fwd/")
    }
    assert calls == FIRST_TASK[sequences]


def test_helpers_get_the_keys_of_their_own_sequences_alone() -> None:
    """A helper of one of four sequences gets a quarter of the earlier keys, one message an earlier subsequence."""
    chosen = several(4, 4, micro_batch=4, partition="length")
    (first, *_) = cut_tasks(chosen)[3, 3].helpers
    assert (first.first, first.tokens) == (0, 512)
    received = {
        name: each.work.bytes
        for name, each in lower(chosen)[first.stage].walk()
        if name.startswith("m0/s3/l6/") and "recv.before" in name
    }
    row = 2 * 2 * chosen.model.kv_width
    assert [name.rpartition(".before")[2] for name in received] == [".0.3-0", ".1.3-0", ".2.3-0"]
    assert set(received.values()) == {512 * row}


def test_the_checkers_find_keys_of_another_sequence() -> None:
    """The owner of the last subsequence's second sequence reads the first one's earlier keys."""
    chosen = several(2, 2, partition="length")
    (_, stage) = lower(chosen)
    number, template = next((n, each) for n, each in enumerate(stage.templates) if each.name == "layer.fwd.s1")
    at, call = next((n, each) for n, each in enumerate(template.instructions) if ".before" in each.name)
    assert [each.first for each in call.operands if each.role == "kv"] == [512]
    operands = tuple(msgspec.structs.replace(each, first=0) if each.role == "kv" else each for each in call.operands)
    instructions = list(template.instructions)
    instructions[at] = msgspec.structs.replace(call, operands=operands)
    templates = list(stage.templates)
    templates[number] = replace(template, instructions=tuple(instructions))
    wrong = replace(stage, templates=tuple(templates))
    found = check_values(wrong, expand(wrong), chosen)
    assert any("are not of one sequence" in fault for fault in found)


@pytest.mark.parametrize("what", ["recv.kv.", "send.d_kv.", "send.grads.", "recv.again."])
@pytest.mark.parametrize("sequences", [1, 2])
def test_the_checkers_find_missing_transfers_between_helper_and_owner(what: str, sequences: int) -> None:
    programs = lower(several(2, 4, micro_batch=sequences))
    stage, number = next(
        (r, n)
        for r, program in enumerate(programs)
        for n, instance in enumerate(program.instances)
        if what in program.templates[instance.template].name
    )
    left = programs[stage].instances[:number] + programs[stage].instances[number + 1 :]
    changed = tuple(replace(p, instances=left) if r == stage else p for r, p in enumerate(programs))
    assert any("p2p transfer" in fault for fault in check_stages(changed))


def test_the_checkers_find_helper_transfers_in_the_wrong_order() -> None:
    programs = lower(multiplexed(2, 4, schedule="gpipe"))
    names = [programs[1].templates[i.template].name for i in programs[1].instances]
    first = next(n for n, name in enumerate(names) if "send.params" in name and "send.before" in names[n + 1])
    order = list(programs[1].instances)
    order[first], order[first + 1] = order[first + 1], order[first]
    assert any("p2p transfer" in f for f in check_stages((programs[0], replace(programs[1], instances=tuple(order)))))


@pytest.mark.parametrize("model", [GPT, LLAMA], ids=["gpt", "llama"])
@pytest.mark.parametrize("policy", [("none", 0.0), ("none", 1.0)], ids=str)
def test_multiplexing_does_not_change_the_work_of_all_stages(model: Model, policy: tuple[str, float]) -> None:
    chosen = multiplexed(4, 6, policy, model=model)
    layout = msgspec.structs.replace(chosen.layout, multiplexed=False)
    assert flops(chosen) == flops(msgspec.structs.replace(chosen, layout=layout))


def flops(decisions: Decisions) -> dict[tuple[str, str], float]:
    """Return the FLOPs of all stages by phase and kind of work."""
    found: dict[tuple[str, str], float] = defaultdict(float)
    for program in lower(decisions):
        for name, instruction in program.walk():
            if isinstance(instruction.work, Gemm | Attention):
                found[name.split("/")[-2], type(instruction.work).__name__] += instruction.work.flops
    return dict(found)


class ByRows:
    """Prices of SPPO's limit: a product of a layer takes a second for 128 rows; all else is free."""

    def __init__(self) -> None:
        self.outside_of: dict[Work, frozenset[str]] = {}

    def seconds(self, work: Work) -> float:
        if not isinstance(work, Gemm) or toy_machine.small_model().vocab in (work.m, work.n, work.k):
            return 0.0
        return (work.k if work.gemm_pass == "wgrad" else work.m) / 128


def run(layout: Layout, seq_tokens: int, layers: int) -> Simulation:
    """Simulate a step in that limit, with a model whose attention is negligible beside its products."""
    decisions = toy_machine.decide(("none", 0.0), layout=layout, layers=layers)
    wide = msgspec.structs.replace(decisions.model, ffn_hidden=2**22)
    decisions = msgspec.structs.replace(decisions, model=wide, seq_tokens=seq_tokens)
    hardware = toy_machine.toy_hardware(device_bytes=1e15)
    return simulate(decisions, hardware, toy_machine.TOY_CLUSTER, pricer=ByRows(), rates=toy_machine.alone)


LIMITS = [(2, 4, 4, True), (2, 4, 4, False), (3, 4, 12, True), (4, 8, 8, True), (4, 4, 8, False)]


@pytest.mark.parametrize(("stages", "count", "granules", "ahead"), LIMITS)
def test_in_the_papers_limit_no_bubble_is_left(stages: int, count: int, granules: int, ahead: bool) -> None:
    """Figure 8: with p stages, forward and backward each take N F/N instead of (N + p - 1) F/N."""
    layout = Layout(pp=stages, subsequences=count, partition="length", overlap_p2p=ahead)
    tokens, layers = 128 * granules * count, 2 * stages
    unit = 3 * 4.0 * granules * layers / stages
    assert run(layout, tokens, layers).prediction.step_s == pytest.approx((count + stages - 1) * unit, rel=1e-9)
    simulation = run(msgspec.structs.replace(layout, multiplexed=True), tokens, layers)
    assert simulation.prediction.step_s == pytest.approx(count * unit, rel=1e-9)
    for stage in simulation.stages:
        assert stage.compute_s == pytest.approx(count * unit, rel=1e-9)


def test_bytes_between_owner_and_helper() -> None:
    """Figure 8's two tasks: a helper receives parameters twice and sends fp32 gradients once; rows go both ways."""
    chosen = multiplexed(2, 4, partition="length")
    programs, plain = lower(chosen), lower(decide_without(chosen))
    moved = handed(programs) - handed(plain)
    model = chosen.model
    block = next(f for f in programs[0].families if f.name == "params.layer").tokens
    row, kv, helper = 2 * model.hidden, 2 * 2 * 128, 256
    layers = 2
    assert model.kv_width == 128
    by_layer = 2 * layers * (2 * 2 * block + 4 * block)
    rows = 2 * 4 * helper * row
    own_keys = 2 * layers * (1 + 2) * helper * kv  # keys to the owner in forward, fp32 gradients back in backward
    before = layers * 1536 * kv * 3  # keys before the last subsequence: in forward, in backward, and their gradients
    again = 2 * layers * helper * kv
    assert moved == by_layer + rows + own_keys + before + again


def decide_without(decisions: Decisions) -> Decisions:
    return msgspec.structs.replace(decisions, layout=msgspec.structs.replace(decisions.layout, multiplexed=False))


def handed(programs: tuple) -> int:
    """Return the bytes that stages send to each other."""
    works = [i.work for program in programs for _, i in program.walk() if i.lane.label == "send"]
    return sum(each.bytes for each in works if isinstance(each, PointToPoint))


def test_without_multiplexing_the_program_has_no_helper_buffers() -> None:
    chosen = decide_without(multiplexed(2, 4))
    assert not any("helper" in family.name for program in lower(chosen) for family in program.families)
    assert cut_tasks(chosen) == {}


@pytest.mark.parametrize(
    ("changes", "where"),
    [
        ({"pp": 1}, "layout.pp"),
        ({"pp": 4, "subsequences": 3}, "layout.subsequences"),
        ({"global_batch": 2}, "global_batch"),
        ({"schedule": "zero-bubble"}, "layout.schedule"),
        ({"schedule": "interleaved", "virtual_stages": 2}, "layout.schedule"),
        ({"memory_policy": "eager"}, "memory_policy"),
    ],
)
def test_incompatible_options_are_refused(changes: dict, where: str) -> None:
    with pytest.raises(Infeasible) as error:
        lower(multiplexed(2, 4, **changes))
    assert error.value.where == where
