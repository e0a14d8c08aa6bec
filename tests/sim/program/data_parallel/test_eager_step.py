"""Extra passes of an eager framework's step: it checks and scales gradients before their reduction. Bytes of each."""

from __future__ import annotations

import msgspec
import pytest

from memo_sim.contract.knobs import MemoryPolicy
from memo_sim.contract.plan import Decisions, Layout
from memo_sim.program.analysis.columns import expand
from memo_sim.program.analysis.edges import derive_edges
from memo_sim.program.ir.instruction import Instruction
from memo_sim.program.ir.program import Program
from memo_sim.program.ir.work import Rowwise
from memo_sim.program.layout.parameters import embed_block, head_block, layer_block
from memo_sim.program.lower import lower
from memo_sim.program.verify.program import check_edges, check_program
from tests.sim.small_programs import LLAMA

MODEL = msgspec.structs.replace(LLAMA, layers=2)
TOKENS = 512


def program(memory_policy: MemoryPolicy = "eager", *, dp: int = 2, **knobs: object) -> Program:
    layout = Layout(tp=2, sequence_parallel=True, dp=dp, zero=1 if dp > 1 else 0)
    decisions = Decisions(
        model=MODEL, layout=layout, seq_tokens=TOKENS, global_batch=dp, memory_policy=memory_policy, **knobs
    )
    return lower(decisions)[0]


def step(found: Program, op: str) -> list[Instruction]:
    return [i for _, i in found.walk() if i.op.startswith(op)]


def moved(instructions: list[Instruction]) -> int:
    return sum(i.work.moved_bytes for i in instructions if isinstance(i.work, Rowwise))


def elements() -> int:
    return (
        embed_block(MODEL, 2).elements
        + 2 * layer_block(MODEL, 2, MODEL.layer(0)).elements
        + head_block(MODEL, 2).elements
    )


def test_gradients_are_read_once_and_scaled_once_before_they_are_reduced() -> None:
    found = program()
    assert moved(step(found, "grads.check")) == 4 * elements() + 4 * 4  # four blocks, one fp32 number each
    assert moved(step(found, "grads.scale")) == 8 * elements()


def test_one_replica_does_not_scale_its_gradients() -> None:
    found = program(dp=1)
    assert len(step(found, "grads.check")) == 4
    assert not step(found, "grads.scale")


def test_nothing_is_reduced_before_all_gradients_are_checked() -> None:
    """An edge leads from the last pass over gradients to the first collective, so no pass runs beside a reduction."""
    found = program()
    names = [i.op for _, i in found.walk()]
    last = max(n for n, name in enumerate(names) if name == "grads.scale")
    first = min(n for n, name in enumerate(names) if name == "grads.reduce_scatter")
    edges = derive_edges(expand(found))
    producers = edges.producer[edges.consumer == first]
    assert last < first
    assert producers.max() == last


def test_the_update_scales_clipped_gradients_and_copies_parameters_in_separate_passes() -> None:
    share = elements() // 2
    plain, eager = (moved(step(program(policy), "adamw")) for policy in ("planned", "eager"))
    assert plain == pytest.approx(30 * share, rel=1e-3)
    assert eager - plain == pytest.approx(12 * share, rel=1e-3)


def test_the_embeddings_gradient_is_a_separate_table() -> None:
    rows, table = TOKENS * MODEL.hidden, MODEL.vocab // 2 * MODEL.hidden
    assert moved(step(program("planned"), "embed.bwd")) == 10 * rows
    assert moved(step(program(), "embed.bwd")) == 10 * rows + 12 * table


@pytest.mark.parametrize("policy", ["planned", "caching"])
def test_other_memory_policies_have_no_extra_passes(policy: MemoryPolicy) -> None:
    found = program(policy)
    assert not step(found, "grads.check")
    assert not step(found, "grads.scale")


@pytest.mark.parametrize("overlap", ["none", "grads", "both"])
def test_the_program_is_sound(overlap: str) -> None:
    found = program(overlap=overlap)
    columns = expand(found)
    assert check_program(found, columns) == []
    assert check_edges(columns, derive_edges(columns)) == []
