"""What FSDP and its trainers do otherwise: shards cast for every gather, recompute that ends early, metrics."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest

from memo_sim.contract.plan import Decisions, Layout
from memo_sim.program.analysis.columns import expand
from memo_sim.program.analysis.edges import derive_edges
from memo_sim.program.data_parallel.optimizer import Optimizer
from memo_sim.program.ir.instruction import BufferClass, Lane
from memo_sim.program.ir.kinds import BlockKind, FamilyKind
from memo_sim.program.ir.program import Program
from memo_sim.program.ir.work import Rowwise
from memo_sim.program.layout.parameters import layer_block
from memo_sim.program.lower import lower
from memo_sim.program.verify.program import check_edges, check_program
from tests.sim.small_programs import GPT

RANKS = 4


def program(*, zero: int = 3, **changes: Any) -> Program:
    (made,) = lower(decisions(zero=zero, **changes))
    return made


def decisions(*, zero: int = 3, **changes: Any) -> Decisions:
    layout = Layout(dp=RANKS, zero=zero)
    asked = {"memory_policy": "eager", "recompute": "full", "global_batch": RANKS} | changes
    return Decisions(model=GPT, layout=layout, seq_tokens=1024, **asked)


def state_bytes(made: Program) -> int:
    return sum(f.bytes * f.count for f in made.all_families if f.buffer_class is BufferClass.STATE)


def ids(made: Program) -> list[str]:
    return [i.name for t in made.templates for i in t.instructions]


def test_cast_parameters_have_no_shard_in_their_dtype() -> None:
    # 18 bytes a parameter with a stored bf16 shard, 16 without.
    stored, cast = state_bytes(program(zero_params="stored")), state_bytes(program(zero_params="cast"))
    assert stored / cast == pytest.approx(18 / 16, rel=1e-3)


def test_every_gather_casts_first() -> None:
    made = program(zero_params="cast")
    found = [(i.op, i.lane) for _, i in made.walk() if i.op in ("params.cast", "params.all_gather")]
    assert found
    assert [op for op, _ in found] == ["params.cast", "params.all_gather"] * (len(found) // 2)
    assert {lane for op, lane in found if op == "params.cast"} == {Lane.COMPUTE}


def test_autocast_casts_whole_fp32_parameters_in_every_forward() -> None:
    kept, cast = (
        program(zero=1, recompute="none", grad_sums=sums, global_batch=2 * RANKS) for sums in ("auto", "autocast")
    )
    found = Counter(i.op for _, i in cast.walk())
    assert found["params.autocast"] == GPT.layers * cast.micro_batches
    added = [i.work for _, i in cast.walk() if i.op == "grad.accumulate"]
    assert len(added) == 4 * GPT.layers * cast.micro_batches
    # Gradients of two bytes are read; an fp32 copy of them is written and read, and so is the sum.
    assert {work.moved_bytes / work.elements for work in added if isinstance(work, Rowwise)} == {2 + 4 + 4 + 4 + 4}
    # An fp32 copy on every rank, where ZeRO 1 divides it otherwise.
    elements = sum(f.bytes * f.count for f in kept.all_families if f.kind is FamilyKind.PARAMS) / 2
    assert state_bytes(cast) - state_bytes(kept) == pytest.approx(4 * (1 - 1 / RANKS) * elements, rel=1e-3)
    columns = expand(cast)
    assert check_program(cast, columns) == []
    assert check_edges(columns, derive_edges(columns)) == []


def test_the_update_of_cast_parameters_writes_none() -> None:
    optimizer = Optimizer(decisions(zero_params="cast"), layer_block(GPT, 1, GPT.layer(0)), BlockKind.LAYER, 1)
    families = {f.name: f for f in optimizer.families()}
    assert not [name for name in families if name.startswith("params.")]
    updates = [i for t in program(zero_params="cast").templates for i in t.instructions if i.op.startswith("adamw")]
    assert updates
    assert not [o.role for i in updates for o in i.operands if o.role == "params"]


def test_the_checker_accepts_them() -> None:
    made = program(zero_params="cast", early_stop=True, loss="blocks", loss_metrics=2, global_batch=2 * RANKS)
    columns = expand(made)
    assert check_program(made, columns) == []
    assert check_edges(columns, derive_edges(columns)) == []


def test_an_early_stop_leaves_out_the_second_product() -> None:
    whole, early = program(), program(early_stop=True)
    dropped = list(ids(whole))
    for name in ids(early):
        dropped.remove(name)
    assert dropped == ["rec/ffn_down", "rec/out_add"]
    assert expand(whole).buffer_bytes.sum() > expand(early).buffer_bytes.sum()


def test_metrics_read_the_logits_when_backward_has_ended() -> None:
    made = program(loss="blocks", loss_metrics=2, global_batch=2 * RANKS)
    names = [each for each in made.ids() if each.startswith("m0/")]
    last = [each for each in names if "/metrics/" in each]
    assert names[-len(last) :] == last
    assert [each.rpartition("/")[2] for each in last] == [
        f"{op}.m{n}" for n in range(2) for op in ("widen", "softmax", "nll")
    ]
    # Each micro-batch has logits of its own, which live until then.
    assert sum(f.count for f in made.families if f.name == "logits") == 2
    assert not [f.name for f in made.all_families if f.name == "head/logits"]


def test_without_metrics_the_program_is_the_same() -> None:
    assert program(loss="blocks").sha256 == program(loss="blocks", loss_metrics=0).sha256
    assert "logits" not in {f.name for f in program(loss="blocks").families}
