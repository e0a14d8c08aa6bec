"""States ``pure-bf16``: bytes per parameter, of collectives and of the update, counted by hand."""

from __future__ import annotations

import pytest

from memo_sim.contract.knobs import States
from memo_sim.contract.plan import Layout
from memo_sim.memory.initial_states import beginning_of
from memo_sim.program.ir.instruction import BufferClass
from memo_sim.program.ir.program import Program
from memo_sim.program.ir.work import Collective, Rowwise
from memo_sim.program.layout.parameters import embed_block, head_block, layer_block
from memo_sim.program.lower import lower
from memo_sim.program.operators.framework_kernels import framework_kernels
from tests.sim.small_programs import GPT, LLAMA, decide, faults_of

PARAMETERS = LLAMA.layers * layer_block(LLAMA, 1, LLAMA.layer(0)).elements + sum(
    block(LLAMA, 1).elements for block in (embed_block, head_block)
)
RANKS = 4


def states_of(program: Program, space: str = "device") -> float:
    """Return the bytes of parameters, gradients and optimizer states per parameter of the model."""
    held = [f for f in program.all_families if f.buffer_class is BufferClass.STATE and f.tokens > 1]
    return sum(f.bytes * f.count for f in held if f.space == space) / PARAMETERS


@pytest.mark.parametrize(
    ("states", "bytes_each"),
    [("fp32", 2 + 4 + 4 + 8), ("bf16", 2 + 4 + 4 + 4), ("host", 2 + 4), ("pure-bf16", 2 + 2 + 4)],
)
def test_bytes_per_parameter(states: States, bytes_each: int) -> None:
    assert states_of(lower(decide(LLAMA, states=states))[0]) == bytes_each


@pytest.mark.parametrize(
    ("zero", "bytes_each"),
    [(0, 2 + 2 + 4), (1, 2 + 2 + 4 / RANKS), (2, 2 + (2 + 4) / RANKS), (3, (2 + 2 + 4) / RANKS)],
)
def test_bytes_per_parameter_with_zero(zero: int, bytes_each: float) -> None:
    program = lower(decide(LLAMA, Layout(dp=RANKS, zero=zero), states="pure-bf16"))[0]
    assert states_of(program) == pytest.approx(bytes_each, rel=1e-3)  # shards are rounded up


@pytest.mark.parametrize("zero", [1, 2, 3])
def test_gradients_are_reduced_in_bf16(zero: int) -> None:
    def reduced(states: States) -> int:
        walked = lower(decide(LLAMA, Layout(dp=RANKS, zero=zero), states=states))[0].walk()
        works = [i.work for _, i in walked if i.op == "grads.reduce_scatter"]
        return sum(work.bytes for work in works if isinstance(work, Collective))

    assert 2 * reduced("pure-bf16") == reduced("fp32")


@pytest.mark.parametrize(("policy", "read", "written"), [("planned", 8, 6), ("eager", 10, 8)])
def test_the_update_reads_four_numbers_and_writes_three(policy: str, read: int, written: int) -> None:
    """An eager framework scales clipped gradients in a pass of its own."""
    walked = lower(decide(LLAMA, states="pure-bf16", memory_policy=policy))[0].walk()
    works = [i.work for _, i in walked if i.op.startswith("adamw")]
    assert works
    assert {
        (work.read_bytes / work.rows, work.write_bytes / work.rows) for work in works if isinstance(work, Rowwise)
    } == {(read, written)}


def test_eager_kernels_of_the_update_go_over_bf16_numbers() -> None:
    """Half of the bytes of the same kernels over fp32 numbers, without the cast of the parameters (6 bytes)."""
    plain, pure = (Rowwise(kind, 10, 0, 0, elements=10, element_bytes=2) for kind in ("adamw", "adamw.pure"))
    moved = [sum(kernel.moved_bytes(work) for kernel in framework_kernels(work, "eager")) for work in (plain, pure)]
    assert 2 * moved[1] == moved[0] - 10 * 6


def test_an_eager_framework_allocates_no_master_weights() -> None:
    decisions = decide(GPT, states="pure-bf16", memory_policy="eager")
    beginning = beginning_of(lower(decisions)[0], decisions)
    assert beginning is not None
    whole = sum(beginning.temporary)
    assert (beginning.before, beginning.behind, sum(beginning.later)) == ((whole, whole), (), 2 * whole)


@pytest.mark.parametrize("model", [GPT, LLAMA], ids=["gpt", "llama"])
@pytest.mark.parametrize(
    ("layout", "more"),
    [
        (Layout(), {"memory_policy": "eager"}),
        (Layout(dp=RANKS, zero=3), {}),
        (Layout(tp=2, sequence_parallel=True, dp=2, zero=2), {}),
        (Layout(ulysses=2, zero=1), {"overlap": "both"}),
        (Layout(pp=2, schedule="zero-bubble"), {"global_batch": 4}),
        (Layout(pp=2, subsequences=4, multiplexed=True), {"global_batch": 1}),
    ],
    ids=["eager", "zero3", "tp-zero2", "ulysses-overlap", "zero-bubble", "multiplexed"],
)
def test_checkers_pass(model: object, layout: Layout, more: dict[str, object]) -> None:
    if model is GPT and layout.pp == 2:
        pytest.skip("five layers")
    assert faults_of(decide(model, layout, states="pure-bf16", **more)) == []
