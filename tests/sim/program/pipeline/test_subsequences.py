"""Programs of subsequences: independent checkers, the work of the whole sequence, and keys that stay on the device."""

from __future__ import annotations

from collections import Counter, defaultdict
from itertools import pairwise

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from memo_sim.contract.errors import Infeasible
from memo_sim.contract.plan import Decisions, Kernels, Layout
from memo_sim.engine.simulate import simulate
from memo_sim.planning.lower_bounds import LowerBounds
from memo_sim.planning.window_bytes import WindowBytes
from memo_sim.program.analysis.columns import expand
from memo_sim.program.analysis.liveness import live_bytes, liveness
from memo_sim.program.ir.instruction import Lane, Mode
from memo_sim.program.ir.program import Program
from memo_sim.program.ir.work import Attention, BatchedGemm, Copy, Gemm
from memo_sim.program.layout.partition import partition
from memo_sim.program.layout.schedule import Kind
from memo_sim.program.layout.shape import shape_of
from memo_sim.program.layout.skeletal import skeletal_tensors
from memo_sim.program.layout.stage import stages_of
from memo_sim.program.lower import lower
from tests.sim.small_programs import GPT, LLAMA, decide, faults_of
from tests.sim.toy_machine import TOY_CLUSTER, ToyPrices, alone, toy_hardware

MODELS = {"gpt": msgspec.structs.replace(GPT, layers=3), "llama": LLAMA}
LAYOUTS = [
    Layout(subsequences=3),
    Layout(subsequences=4, partition="length", dp=2, zero=3),
    Layout(subsequences=3, tp=2, sequence_parallel=True, dp=2, zero=1),
    Layout(subsequences=2, tp=2, dp=2, zero=2),
]
STAGES = [
    Layout(subsequences=3, pp=2),
    Layout(subsequences=4, pp=4, schedule="gpipe", partition="length"),
    Layout(subsequences=3, pp=2, overlap_p2p=False, tp=2, sequence_parallel=True),
    Layout(subsequences=4, pp=2, schedule="interleaved", virtual_stages=2),
    Layout(subsequences=3, pp=4, schedule="zero-bubble"),
]
SHARES = [
    *[("none", 0.0), ("none", 0.5), ("none", 1.0)],
    *[("full", 0.0), ("full", 0.5), ("full", 1.0)],
    *[("tokenwise", 0.0), ("tokenwise", 0.5)],
]


def cut(model: str, layout: Layout, policy: tuple[str, float] = ("none", 0.0), **more) -> Decisions:
    """Return decisions with 1024 tokens on each tensor-parallel rank.

    A policy with 0.5 swaps a different share of each subsequence.
    """
    more = {"seq_tokens": 1024 * layout.tp, "loss_chunk_tokens": 128, **more}
    decisions = decide(MODELS[model], layout, (policy[0], 0.0), **more)
    if policy[1] != 0.5:
        return msgspec.structs.replace(decisions, swapped_tokens=int(policy[1] * decisions.local_tokens))
    # The first subsequence swaps nothing and each other one all but one granule, so that shares differ.
    granule = decisions.swap_granule
    each = tuple(0 if i == 0 else max(granule, n - granule) for i, n in enumerate(partition(decisions)))
    return msgspec.structs.replace(decisions, swapped_tokens=sum(each), subsequence_swapped_tokens=each)


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
@pytest.mark.parametrize("model", MODELS)
def test_every_policy_passes_the_independent_checkers(model: str, layout: Layout) -> None:
    for policy in SHARES if layout is LAYOUTS[0] else SHARES[1::3]:
        assert faults_of(cut(model, layout, policy)) == []


@pytest.mark.parametrize("recompute", ["selective", "norms", "mlp", "operators"])
@pytest.mark.parametrize("layout", [LAYOUTS[2], STAGES[0], STAGES[3], STAGES[4]], ids=str)
def test_what_keeps_all_tokens_passes_the_independent_checkers(layout: Layout, recompute: str) -> None:
    """Selective recompute repeats attention over the KV cache, which holds the prefix until the layer's backward."""
    deep = msgspec.structs.replace(cut("gpt", layout).model, layers=4 * layout.virtual_stages)
    chosen = msgspec.structs.replace(cut("gpt", layout, (recompute, 0.0)), model=deep)
    assert faults_of(chosen) == []
    if recompute == "selective":
        again = [n for p in lower(chosen) for n, i in p.walk() if i.op == "attention" and "/rec/" in n]
        assert any(".before" in name for name in again)


@pytest.mark.parametrize("layout", STAGES, ids=str)
def test_every_stage_passes_the_independent_checkers(layout: Layout) -> None:
    deep = msgspec.structs.replace(cut("llama", layout).model, layers=layout.pp * layout.virtual_stages)
    for policy in (("none", 0.0), ("full", 0.5), ("tokenwise", 0.5)):
        assert faults_of(msgspec.structs.replace(cut("llama", layout, policy), model=deep)) == []


@pytest.mark.parametrize("policy", [("full", 0.0), ("full", 1.0)])
def test_row_blocks_and_host_states_are_compatible_with_subsequences(policy: tuple[str, float]) -> None:
    assert faults_of(cut("gpt", LAYOUTS[0], policy, mlp_chunk_tokens=256, states="host", overlap="both")) == []


@pytest.mark.parametrize("policy", [("none", 0.0), ("full", 0.0), ("tokenwise", 0.5)])
@pytest.mark.parametrize("count", [2, 3, 8])
@pytest.mark.parametrize("model", MODELS)
def test_the_work_is_that_of_the_whole_sequence(model: str, count: int, policy: tuple[str, float]) -> None:
    """Attention covers the pairs of one causal square, in forward and backward; products are only divided by rows."""
    parts = flops(lower(cut(model, Layout(subsequences=count), policy))[0])
    if policy[0] == "tokenwise":  # recompute depends on the number of swapped tokens
        del parts["rec", "Gemm"]
    whole = cut(model, Layout(), policy if policy[0] == "full" else ("none", 0.0))
    assert parts == flops(lower(whole)[0])


def flops(program: Program) -> dict[tuple[str, str], float]:
    """Return the FLOPs of a step by phase and kind of work."""
    found: dict[tuple[str, str], float] = defaultdict(float)
    for name, instruction in program.walk():
        if isinstance(instruction.work, Gemm | BatchedGemm | Attention):
            phase = "head" if "/head/" in name else name.split("/")[3]
            found[phase, type(instruction.work).__name__] += instruction.work.flops
    return dict(found)


@pytest.mark.parametrize("model", MODELS)
def test_the_kv_cache_has_two_widths_for_every_token_and_layer(model: str) -> None:
    """The KV cache has 2 B S H of SPPO 5.1 for each layer, and its fp32 gradients twice that for incomplete rows."""
    decisions = cut(model, Layout(subsequences=4), global_batch=1)
    program = lower(decisions)[0]
    shape, layers = shape_of(decisions), decisions.model.layers
    one = 2 * shape.kv_width * 2 * shape.tokens  # bf16
    curve = live_bytes(liveness(program, expand(program)), device=True)["kv_cache"]
    lengths = partition(decisions)
    known = [sum(lengths[:n]) * one // shape.tokens for n in range(5)]  # KV bytes before each subsequence
    assert curve.max() == 3 * layers * known[3] + layers * (known[4] - known[3]) + 2 * (known[4] - known[3])
    ids = program.ids()
    assert curve[ids.index("m0/s0/l0/bwd/attn.bwd")] == one + 2 * known[1]
    begins = ids.index("m0/s1/l0/bwd/attn.bwd")
    assert curve[begins] == layers * one + 2 * (layers * known[1] + known[2] - known[1])
    assert curve[ids.index("m0/s3/head/fwd/norm")] == layers * one
    assert curve[ids.index("m0/s0/l0/bwd/norm1.bwd")] == 0


@pytest.mark.parametrize("policy", [("none", 1.0), ("tokenwise", 0.5)])
def test_all_later_subsequences_read_keys_and_values_but_no_other_tensor(policy: tuple[str, float]) -> None:
    """SPPO's access types, from the program: type 0 stays on the device, type 1 may be swapped (Figure 6)."""
    count = 4
    program = lower(cut("llama", Layout(subsequences=count), policy, global_batch=1))[0]
    keys, others, moved = Counter(), defaultdict(set), set()
    starts = [0, *[sum(partition(cut("llama", Layout(subsequences=count)))[: s + 1]) for s in range(count)]]
    for instance in program.instances:
        template = program.templates[instance.template]
        for instruction in template.instructions:
            for operand in instruction.operands:
                family = template.slots[operand.slot]
                if isinstance(instruction.work, Copy):
                    moved.add(family.split(".")[0])
                if family == "prefix.kv" and operand.mode is Mode.READ and instance.layer == 1:
                    rows = range(operand.first, operand.first + operand.tokens)
                    phase = instruction.name.split("/")[0]
                    keys.update((phase, s) for s in range(count) if starts[s] in rows)
                if family.startswith("host.") and operand.mode is Mode.READ:
                    others[family].add(instance.subsequence)
    assert keys == Counter({(phase, s): count - s for phase in ("fwd", "bwd") for s in range(count)})
    assert moved <= {"skeletal", "host"}
    assert others
    assert all(len(readers) == 1 for readers in others.values())


def test_subsequences_go_forward_in_order_and_back_from_the_last() -> None:
    program = lower(cut("gpt", Layout(subsequences=3), global_batch=2))[0]
    passes = [(each.kind, each.micro_batch, each.subsequence) for each, _ in program.passes]
    there, back = Kind.FORWARD, Kind.BACKWARD
    one = [(there, s) for s in range(3)] + [(back, s) for s in (2, 1, 0)]
    assert passes == [(kind, m, s) for m in range(2) for kind, s in one]
    for instance in program.instances:
        if instance.place.startswith("m"):
            assert instance.place.split("/")[:2] == [f"m{instance.micro_batch}", f"s{instance.subsequence}"]


@pytest.mark.parametrize("layers", [3, 4])
def test_consecutive_layer_passes_alternate_rounding_buffers_over_subsequences(layers: int) -> None:
    decisions = cut("gpt", Layout(subsequences=3), ("none", 1.0), global_batch=1)
    decisions = msgspec.structs.replace(decisions, model=msgspec.structs.replace(GPT, layers=layers))
    program = lower(decisions)[0]
    found: dict[str, list[int]] = {"layer.fwd": [], "layer.bwd": []}
    for instance in program.instances:
        template = program.templates[instance.template]
        if template.name.startswith(tuple(found)):
            bound = [s for s in template.slots if s not in {f.name for f in template.own}]
            found[template.name[:9]].append(instance.indices[bound.index("skeletal.norm1")])
    for taken in found.values():
        assert len(taken) == 3 * layers
        assert all(a != b for a, b in pairwise(taken))
    offloaded = {i.place for i in program.instances if program.templates[i.template].name.startswith("layer.offload")}
    assert len(offloaded) == 3 * layers - 2  # all but the last two layer forwards


@pytest.mark.parametrize("model", MODELS)
def test_swapped_bytes_are_each_subsequences_share_without_keys_and_values(model: str) -> None:
    decisions = cut(model, Layout(subsequences=4), ("none", 0.5), global_batch=1)
    program = lower(decisions)[0]
    moved: dict[int, int] = defaultdict(int)
    layers: dict[int, set[int]] = defaultdict(set)
    for instance in program.instances:
        for instruction in program.templates[instance.template].instructions:
            if instruction.lane is Lane.D2H and isinstance(instruction.work, Copy):
                moved[instance.subsequence] += instruction.work.bytes
                layers[instance.subsequence].add(instance.layer)
    tensors = skeletal_tensors(decisions.model, shape_of(decisions), "bf16")
    row = sum(t.bytes // t.tokens for t in tensors) - 2 * 2 * shape_of(decisions).kv_width
    each = decisions.subsequence_swapped_tokens
    assert {s: size // len(layers[s]) for s, size in moved.items()} == {s: row * n for s, n in enumerate(each) if n}
    up = sum(i.work.bytes for _, i in program.walk() if i.lane is Lane.H2D and isinstance(i.work, Copy))
    assert up == sum(moved.values())


def test_one_subsequence_is_the_program_without_subsequences() -> None:
    plain = lower(decide())[0]
    for partitioned in ("length", "flops"):
        program = lower(decide(layout=Layout(subsequences=1, partition=partitioned)))[0]
        assert program.sha256 == plain.sha256
    assert not any(f.name.startswith("prefix") or ".s0" in f.name for f in plain.families)


@pytest.mark.parametrize(
    ("layout", "more", "where"),
    [
        (Layout(subsequences=2, cp=2, cp_exchange="rsa"), {}, "layout.subsequences"),
        (Layout(subsequences=2, cp=2, pp=2, multiplexed=True), {"global_batch": 1}, "layout.multiplexed"),
        (Layout(subsequences=2), {"kernels": Kernels(attention="plain")}, "decisions.kernels.attention"),
        (Layout(subsequences=9), {}, "layout.subsequences"),
        (Layout(subsequences=3, pp=2, schedule="interleaved", virtual_stages=2), {"global_batch": 1}, "global_batch"),
    ],
)
def test_incompatible_options_are_refused(layout: Layout, more: dict, where: str) -> None:
    with pytest.raises(Infeasible) as error:
        lower(cut("llama", layout, **more))
    assert error.value.where == where
    assert error.value.wanted is not None


@pytest.mark.parametrize("window", [0, 1])
@pytest.mark.parametrize("allocator", ["exact", "power_of_two"])
@pytest.mark.parametrize("policy", [("none", 0.5), ("none", 1.0), ("tokenwise", 0.5)])
def test_the_lower_bound_of_host_bytes_is_at_most_the_swapped_bytes(
    policy: tuple[str, float], allocator: str, window: int
) -> None:
    """The bound leaves out keys and values; in an offload window, what the first stage swaps is known exactly."""
    for layout in (Layout(subsequences=4), Layout(subsequences=2, pp=2)):
        model = msgspec.structs.replace(LLAMA, layers=8)
        decisions = cut("llama", layout, policy, global_batch=1, host_allocator=allocator, offload_window=window)
        decisions = msgspec.structs.replace(decisions, model=model)
        bounds = LowerBounds(toy_hardware(), TOY_CLUSTER)
        simulation = simulate(decisions, toy_hardware(), TOY_CLUSTER, pricer=ToyPrices(), rates=alone)
        rank = simulation.stages[0].memory.host.bytes
        if window:
            assert WindowBytes(decisions).host_bytes(0) == rank
        else:
            assert rank // 2 < bounds._swapped_on(decisions, stages_of(decisions)[0]) <= rank


@st.composite
def random_steps(draw: st.DrawFn) -> Decisions:
    """Draw stages, a schedule, a policy with different swapped shares of subsequences, and an offload window."""
    pp = draw(st.sampled_from([1, 2, 4]))
    schedule = draw(st.sampled_from(["gpipe", "1f1b", "interleaved", "zero-bubble"])) if pp > 1 else "1f1b"
    count, tp, dp = draw(st.integers(2, 6)), draw(st.sampled_from([1, 2])), draw(st.sampled_from([1, 2]))
    layout = Layout(
        tp=tp,
        sequence_parallel=tp > 1 and draw(st.booleans()),
        pp=pp,
        schedule=schedule,
        virtual_stages=2 if schedule == "interleaved" else 1,
        overlap_p2p=schedule == "interleaved" or draw(st.booleans()),
        dp=dp,
        zero=draw(st.integers(0, 1 if pp > 1 else 3)),
        subsequences=count * pp if schedule == "interleaved" else count,
        partition=draw(st.sampled_from(["length", "flops"])),
    )
    decisions = decide(
        msgspec.structs.replace(draw(st.sampled_from([GPT, LLAMA])), layers=pp * layout.virtual_stages),
        layout,
        (draw(st.sampled_from(["none", "full", "tokenwise"])), 0.0),
        seq_tokens=24 * 128 * tp,
        global_batch=dp * draw(st.integers(1, 3)),
        states=draw(st.sampled_from(["fp32", "host"])),
        overlap=draw(st.sampled_from(["none", "both"])),
    )
    granule = decisions.swap_granule
    each = tuple(granule * draw(st.integers(0, tokens // granule)) for tokens in partition(decisions))
    some = 0 < sum(each) < decisions.local_tokens
    swaps = sum(each) > 0 or decisions.recompute == "tokenwise"
    return msgspec.structs.replace(
        decisions,
        swapped_tokens=sum(each),
        subsequence_swapped_tokens=each if some else (),
        offload_window=draw(st.integers(0, 3)) if swaps else 0,
    )


@settings(max_examples=6, deadline=None)
@given(random_steps())
def test_no_random_step_deadlocks(decisions: Decisions) -> None:
    assert faults_of(decisions) == []


@pytest.mark.slow
@settings(max_examples=150, deadline=None)
@given(random_steps())
def test_none_of_many_random_steps_deadlocks(decisions: Decisions) -> None:
    assert faults_of(decisions) == []
