"""Values: programs of every kind are accepted, and a fault planted in one copy, kernel or row is found."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache

import msgspec
import pytest

from memo_sim.contract.knobs import CpExchange
from memo_sim.contract.plan import Decisions, Layout
from memo_sim.program.analysis.columns import expand
from memo_sim.program.ir.instruction import Instruction
from memo_sim.program.ir.kinds import FamilyKind, Phase, TemplateKind
from memo_sim.program.ir.program import Program
from memo_sim.program.lower import lower
from memo_sim.program.verify.values import check_values
from tests.sim.program.verify import planted
from tests.sim.program.verify.planted import Chosen
from tests.sim.small_programs import GPT, LLAMA, decide

HALF = ("tokenwise", 0.5)
EXCHANGES: tuple[CpExchange, ...] = ("ring", "all_gather")
DIVIDED = tuple(f"subsequences, {exchange}" for exchange in EXCHANGES)
"""Plans of subsequences that context-parallel ranks divide."""
SEVERAL = tuple(f"{plan}, several" for plan in DIVIDED)
"""The same of several sequences a micro-batch."""
PLANS: dict[str, Decisions] = {
    "keep": decide(LLAMA),
    "gpt": decide(GPT, policy=HALF),
    "full": decide(LLAMA, policy=("full", 0.0)),
    "full swapped": decide(LLAMA, policy=("full", 1.0)),
    "tokenwise": decide(LLAMA, policy=HALF),
    "tp": decide(LLAMA, Layout(tp=2, sequence_parallel=True), HALF),
    "tp whole": decide(GPT, Layout(tp=2)),
    "tp chunked": decide(LLAMA, Layout(tp=4, sequence_parallel=True, tp_overlap="chunked"), HALF),
    "tp shared heads": decide(LLAMA, Layout(tp=8, sequence_parallel=True)),
    "ring": decide(LLAMA, Layout(cp=4), HALF),
    "all-gather": decide(LLAMA, Layout(cp=4, cp_exchange="all_gather"), HALF),
    "all-gather of several": decide(LLAMA, Layout(cp=4, cp_exchange="all_gather"), HALF, micro_batch=2),
    "rsa": decide(GPT, Layout(cp=4, cp_exchange="rsa")),
    "ulysses": decide(LLAMA, Layout(ulysses=4), HALF),
    "metp": decide(GPT, Layout(metp=4)),
    "1F1B": decide(LLAMA, Layout(pp=2), HALF, global_batch=4),
    "zero-bubble": decide(LLAMA, Layout(pp=2, schedule="zero-bubble"), global_batch=4),
    "interleaved": decide(LLAMA, Layout(pp=2, virtual_stages=2, schedule="interleaved"), global_batch=4),
    "subsequences": decide(LLAMA, Layout(pp=2, subsequences=4)),
    "zero 3": decide(LLAMA, Layout(dp=2, zero=3), HALF),
    "zero 2": decide(GPT, Layout(dp=4, zero=2, zero_ranks=2)),
    "mlp chunks": decide(LLAMA, policy=("full", 0.0), mlp_chunk_tokens=512),
    "selective": decide(LLAMA, policy=("selective", 0.0)),
    "operators": decide(LLAMA, policy=("operators", 0.0)),
    "attention chunks": decide(LLAMA, Layout(ulysses=2), ("full", 0.0), attention_chunk_tokens=256),
    "chunks in a ring": decide(
        LLAMA.of_layers([LLAMA.layer(0)]), Layout(cp=4), ("full", 0.0), attention_chunk_tokens=1024, global_batch=1
    ),
    "chunks of several in a ring": decide(
        LLAMA.of_layers([LLAMA.layer(0)]), Layout(cp=4), ("full", 0.0), attention_chunk_tokens=1024, micro_batch=2
    ),
    **{
        f"subsequences, {exchange}": decide(
            LLAMA.of_layers([LLAMA.layer(0)]),
            Layout(cp=4, cp_exchange=exchange, subsequences=3),
            seq_tokens=2560,
            global_batch=1,
        )
        for exchange in EXCHANGES
    },
}
PLANS |= {f"{plan}, several": msgspec.structs.replace(PLANS[plan], micro_batch=2, global_batch=2) for plan in DIVIDED}


def faults(program: Program, decisions: Decisions) -> list[str]:
    """Return what the checker finds in one program."""
    return check_values(program, expand(program), decisions)


LONG = ("attention chunks", "metp", "interleaved", "zero-bubble", "subsequences", "1F1B")
"""Plans whose programs have more instructions: all of their tests are slow, but for a few faults."""


def each(*plans: str) -> list[object]:
    """Return plans as parameters, the long ones marked slow."""
    return [pytest.param(plan, marks=[pytest.mark.slow] if plan in LONG else []) for plan in plans]


@pytest.mark.parametrize("plan", each(*PLANS))
def test_programs_are_accepted(plan: str) -> None:
    for program in lower(PLANS[plan]):
        assert faults(program, PLANS[plan]) == []


def op(*names: str, phase: Phase | None = None) -> Chosen:
    """Return a choice of instructions by op, and by phase."""
    return lambda each: each.op in names and phase in (None, each.phase)


COPY_BACK = op("h2d")


@cache
def rank(plan: str, stage: int = 0) -> Program:
    """Return the program of one stage of a plan."""
    return lower(PLANS[plan])[stage]


def expect(plan: str, program: Program, words: str) -> None:
    """Expect a fault that contains ``words`` in a faulty program of a plan."""
    found = faults(program, PLANS[plan])
    assert any(words in fault for fault in found), found[:5]


@pytest.mark.parametrize(
    ("plan", "chosen"),
    [
        ("tokenwise", COPY_BACK),
        ("full swapped", op("h2d")),
        pytest.param("attention chunks", op("h2d"), marks=pytest.mark.slow),
        ("ulysses", op("h2d")),
        ("tokenwise", op("rms_norm", phase=Phase.RECOMPUTE)),
        ("tokenwise", op("rotary", phase=Phase.RECOMPUTE)),
        ("gpt", op("linear", phase=Phase.RECOMPUTE)),
        ("full", op("swiglu", phase=Phase.RECOMPUTE)),
        ("ring", op("linear", phase=Phase.RECOMPUTE)),
        ("tp", op("all_gather", phase=Phase.RECOMPUTE)),
        ("selective", op("attention", phase=Phase.RECOMPUTE)),
        ("operators", op("linear.from_gate", phase=Phase.RECOMPUTE)),
        ("mlp chunks", op("linear", phase=Phase.RECOMPUTE)),
    ],
)
def test_a_copy_back_or_a_kernel_of_a_rebuild_that_is_left_out(plan: str, chosen: Chosen) -> None:
    program = rank(plan)
    number = planted.places(program, chosen)[-2]
    for which in range(4 if chosen is COPY_BACK else 1):
        assert faults(planted.without(program, number, chosen, which), PLANS[plan]), which


@pytest.mark.parametrize("copy", ["d2h", "h2d"])
@pytest.mark.parametrize("role", ["source", "target"])
@pytest.mark.parametrize("plan", ["tokenwise", "ulysses"])
def test_an_offload_or_a_prefetch_one_row_late(plan: str, role: str, copy: str) -> None:
    program = rank(plan)
    number = planted.places(program, op(copy))[-1]
    late = planted.replaced(program, number, op(copy), lambda each: planted.one_row_late(each, role))
    assert faults(late, PLANS[plan])


def test_a_prefetch_from_another_tensors_rows() -> None:
    program = rank("tokenwise")
    number = planted.places(program, op("h2d"))[-1]
    template = program.templates[program.instances[number].template]
    slots = {name: slot for slot, name in enumerate(template.slots)}

    def other(each: Instruction) -> Instruction:
        source = msgspec.structs.replace(each.operands[0], slot=slots["host.resid"])
        return msgspec.structs.replace(each, operands=(source, each.operands[1]))

    norm1 = slots["host.norm1"]
    wrong = planted.replaced(program, number, lambda i: i.op == "h2d" and i.operands[0].slot == norm1, other)
    expect("tokenwise", wrong, "holds resid")


@pytest.mark.parametrize("plan", each("tokenwise", "ulysses", "ring", "1F1B"))
def test_a_prefetch_from_another_layers_rows(plan: str) -> None:
    program = rank(plan)
    first, second = planted.places(program, op("h2d"))[-2:]
    others = program.instances[second].indices
    template = program.templates[program.instances[first].template]
    hosts = [name for name in template.slots if name.startswith("host.")]
    wrong = planted.bound(program, first, hosts[0], others[list(template.slots).index(hosts[0])])
    assert faults(wrong, PLANS[plan])


@pytest.mark.parametrize("plan", ["tokenwise", "gpt", "tp", "ring", "ulysses", "zero 3"])
def test_a_rounding_buffer_that_is_used_again_one_layer_early(plan: str) -> None:
    assert faults(planted.with_one_rounding_buffer(rank(plan)), PLANS[plan])


@pytest.mark.parametrize(("plan", "moved"), [("keep", "layer"), ("keep", "micro-batch"), ("subsequences", "layer")])
def test_a_log_sum_exp_of_another_layer_or_micro_batch(plan: str, moved: str) -> None:
    program = rank(plan)
    backward = op("attention.bwd")
    number = planted.places(program, backward)[0]
    names = [f.name for f in program.families if f.kind is FamilyKind.SKELETAL and ".lse" in f.name]
    template = program.templates[program.instances[number].template]
    name = next(n for n in names if n in template.slots)
    own = {f.name for f in template.own}
    index = program.instances[number].indices[[n for n in template.slots if n not in own].index(name)]
    other = index - 1 if moved == "layer" else (index + PLANS[plan].model.layers) % (2 * PLANS[plan].model.layers)
    expect(plan, planted.bound(program, number, name, other), "lse")


@pytest.mark.parametrize("plan", each("keep", "tp", "ring", "metp", "zero 3", "zero-bubble", "1F1B"))
def test_a_weight_gradient_that_is_left_out_or_added_twice(plan: str) -> None:
    program = rank(plan)
    chosen = op("linear.wgrad")
    number = planted.places(program, chosen)[-1]
    expect(plan, planted.without(program, number, chosen), "gradient of")
    expect(plan, planted.twice(program, number, chosen), "twice")


@pytest.mark.parametrize(
    "plan",
    each(
        "subsequences",
        "ring",
        "all-gather",
        "all-gather of several",
        "attention chunks",
        "chunks in a ring",
        "chunks of several in a ring",
        *DIVIDED,
        *SEVERAL,
    ),
)
def test_a_term_of_a_sum_of_gradients_that_is_missing(plan: str) -> None:
    program = rank(plan)
    chosen: Chosen = lambda each: each.op == "grad.accumulate" and each.phase is Phase.BACKWARD  # noqa: E731
    number = planted.places(program, chosen)[-1]
    assert faults(planted.without(program, number, chosen), PLANS[plan])


def test_the_gradient_of_the_residual_branch_that_is_missing() -> None:
    program, chosen = rank("keep"), op("rms_norm.bwd")
    number = planted.places(program, chosen)[-1]
    wrong = planted.replaced(program, number, chosen, lambda each: planted.without_operand(each, "residual_grad"))
    expect("keep", wrong, "residual_grad is not given")


@pytest.mark.parametrize(
    ("plan", "chosen", "words"),
    [
        ("tp whole", op("all_reduce", phase=Phase.FORWARD), "~ of layer"),
        ("tp", op("reduce_scatter", phase=Phase.BACKWARD), "d_norm"),
        ("tp chunked", op("send_recv"), "hold nothing"),
        ("ring", op("attention.merge"), "not the whole sum"),
        ("ring", op("send_recv"), ""),
        ("chunks in a ring", op("send_recv"), ""),
        ("chunks in a ring", op("send_recv", phase=Phase.BACKWARD), ""),
        ("chunks in a ring", op("attention.merge"), "not the whole sum"),
        ("chunks in a ring", op("zero", phase=Phase.BACKWARD), "not d_kv of layer 0"),
        ("chunks of several in a ring", op("kv.pack"), ""),
        ("chunks of several in a ring", op("grad.accumulate.halves"), "the whole sum"),
        *[(plan, op("attention.merge"), "not the whole sum") for plan in (*DIVIDED, *SEVERAL)],
        *[(plan, op("zero", phase=Phase.BACKWARD), "") for plan in (*DIVIDED, *SEVERAL)],
        *[(plan, op("kv.pack"), "") for plan in SEVERAL],
        *[(plan, op("grad.accumulate.halves"), "the whole sum") for plan in SEVERAL],
        (SEVERAL[1], op("all_gather.sequences"), ""),
        (SEVERAL[1], op("reduce_scatter.sequences"), ""),
        (DIVIDED[0], op("send_recv"), ""),
        (DIVIDED[0], op("send_recv", phase=Phase.BACKWARD), ""),
        (DIVIDED[1], op("all_gather"), ""),
        (DIVIDED[1], op("reduce_scatter"), ""),
        ("ulysses", op("all_to_all"), "d_attn^ of layer 0"),
        ("subsequences", op("attention.merge"), "not the whole sum"),
        ("1F1B", op("recv"), "hold nothing"),
        ("zero 3", op("params.all_gather"), "hold nothing"),
        ("zero 3", op("grads.reduce_scatter"), "before it was summed"),
        ("tp", op("loss.all_reduce"), "loss.stats~"),
        ("keep", op("cross_entropy"), "the loss"),
        ("keep", op("zero"), "not zeroed"),
        ("zero 3", op("zero"), "not zeroed"),
        ("zero 2", op("shards.all_reduce"), "over the groups"),
        ("zero 2", op("params.all_gather"), "not gathered"),
        ("keep", op("adamw.decay"), "were updated"),
        ("keep", op("grad_norm"), "the gradient norm"),
        ("metp", op("broadcast"), ""),
        ("metp", op("reduce"), "has rows []"),
    ],
)
def test_a_collective_a_merge_or_a_kernel_that_is_left_out(plan: str, chosen: Chosen, words: str) -> None:
    program = rank(plan)
    number = planted.places(program, chosen)[-1]
    expect(plan, planted.without(program, number, chosen), words)


@pytest.mark.parametrize("op_name", ["all_gather.sequences", "reduce_scatter.sequences", "grad.accumulate.halves"])
def test_rows_of_several_sequences_in_another_order(op_name: str) -> None:
    """Gathers and sums by the order of one sequence mix the rows of several."""
    program, chosen = rank(SEVERAL[1]), op(op_name)
    number = planted.places(program, chosen)[-1]
    plain = op_name.rpartition(".")[0]
    wrong = planted.replaced(program, number, chosen, lambda each: msgspec.structs.replace(each, op=plain))
    assert faults(wrong, PLANS[SEVERAL[1]])


@pytest.mark.parametrize("cp", [1, 2])
def test_a_call_over_two_subsequences_of_several_sequences(cp: int) -> None:
    """A call reads runs of two subsequences; of two sequences in place of one, their keys are no range there."""
    layout = Layout(cp=cp, subsequences=16, partition="length")
    one = decide(GPT.of_layers([GPT.layer(0)]), layout, seq_tokens=cp * 4096, global_batch=1)
    two = msgspec.structs.replace(one, seq_tokens=cp * 2048, micro_batch=2, global_batch=2)
    (program,) = lower(one)
    assert faults(program, one) == []
    assert faults(lower(two)[0], two) == []
    wanted = "of several parts" if cp > 1 else "are not of one sequence"
    assert any(wanted in fault for fault in faults(program, two))


def test_an_op_without_a_rule_is_a_fault() -> None:
    program = rank("keep")
    unknown: Callable[[Instruction], Instruction] = lambda each: msgspec.structs.replace(each, op="new")  # noqa: E731
    expect("keep", planted.replaced(program, 9, lambda _: True, unknown), "no rule for op 'new'")


def test_rows_of_an_earlier_layer_do_not_count_as_written() -> None:
    """What today's rounding buffers hide from a check of writes: the rows were written, for another layer."""
    program = rank("tokenwise")
    backward = [
        n for n, i in enumerate(program.instances) if program.templates[i.template].kind is TemplateKind.BACKWARD
    ]
    chosen = op("rms_norm", phase=Phase.RECOMPUTE)
    number = next(
        n for n in backward if any(map(chosen, program.templates[program.instances[n].template].instructions))
    )
    expect("tokenwise", planted.without(program, number, chosen), "not that of layer")
