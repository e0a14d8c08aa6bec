"""Whole logits under sequence parallelism: the classifier's input is gathered twice and dead during the loss."""

from __future__ import annotations

import msgspec
import pytest

from memo_sim.contract.plan import Decisions, Layout
from memo_sim.program.analysis.columns import expand
from memo_sim.program.analysis.edges import derive_edges
from memo_sim.program.analysis.liveness import liveness
from memo_sim.program.arena.requests import buffer_names
from memo_sim.program.ir.program import Program
from memo_sim.program.lower import lower
from memo_sim.program.verify.program import check_edges, check_program
from tests.sim.small_programs import GPT

TOKENS = 1024
MODEL = msgspec.structs.replace(GPT, layers=1, vocab=999)


def program(*, chunk: int, sequence_parallel: bool = True, tp: int = 2) -> Program:
    layout = Layout(tp=tp, sequence_parallel=sequence_parallel)
    return lower(Decisions(model=MODEL, layout=layout, seq_tokens=TOKENS, loss_chunk_tokens=chunk))[0]


def gathers(found: Program) -> list[str]:
    return [name for name, i in found.walk() if i.op == "all_gather" and "/head/" in name]


def lives_of(found: Program, buffer: str) -> tuple[str, str]:
    """Return the first and the last instruction that touch a buffer."""
    lives = liveness(found, expand(found))
    number, ids = buffer_names(found).index(buffer), found.ids()
    return ids[lives.birth[number]].rpartition("/")[2], ids[lives.death[number]].rpartition("/")[2]


def test_whole_logits_gather_their_input_again_for_the_weights_gradient() -> None:
    found = program(chunk=0)
    assert len(gathers(found)) == 2
    assert lives_of(found, "head/fwd.final_full") == ("norm.gather", "classifier.c0")
    assert lives_of(found, "head/fwd.final_again") == ("norm.again.gather", "classifier.wgrad.c0")
    columns = expand(found)
    assert check_program(found, columns) == []
    assert check_edges(columns, derive_edges(columns)) == []


def test_chunks_share_one_gathered_input() -> None:
    found = program(chunk=256)
    assert len(gathers(found)) == 1
    assert lives_of(found, "head/fwd.final_full") == ("norm.gather", "classifier.wgrad.c3")


@pytest.mark.parametrize(("sequence_parallel", "tp"), [(False, 2), (False, 1)])
def test_ranks_that_hold_all_tokens_gather_nothing(sequence_parallel: bool, tp: int) -> None:
    assert not gathers(program(chunk=0, sequence_parallel=sequence_parallel, tp=tp))
