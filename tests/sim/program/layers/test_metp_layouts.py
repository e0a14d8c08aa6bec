"""METP with other parallelism: shards under ZeRO, groups that gather and reduce, pipeline stages, and equal work."""

from __future__ import annotations

import re
from collections import Counter

import msgspec
import pytest

from memo_sim.contract.errors import Infeasible
from memo_sim.contract.knobs import Overlap, Schedule
from memo_sim.contract.model import Model
from memo_sim.contract.plan import Decisions, Layout
from memo_sim.program.ir.instruction import BufferClass
from memo_sim.program.ir.work import Attention, Gemm
from memo_sim.program.layout.parameters import Block, embed_block, head_block, layer_block
from memo_sim.program.lower import lower
from tests.refusals import refused
from tests.sim.program.layers.test_metp import chosen, metp
from tests.sim.small_programs import GPT, LLAMA, faults_of


@pytest.mark.parametrize("overlap", ["none", "both"])
@pytest.mark.parametrize("zero", [0, 1, 2, 3])
@pytest.mark.parametrize(("model", "layout"), [(GPT, metp(2, dp=2)), (LLAMA, metp(4))], ids=["dp", "ends"])
def test_the_checkers_find_nothing_with_replicas(model: Model, layout: Layout, zero: int, overlap: Overlap) -> None:
    decisions = chosen(model, msgspec.structs.replace(layout, zero=zero), ("tokenwise", 0.5))
    assert faults_of(msgspec.structs.replace(decisions, overlap=overlap)) == []


@pytest.mark.parametrize("overlap", ["none", "both"])
@pytest.mark.parametrize(("schedule", "chunks"), [("1f1b", 1), ("interleaved", 2)])
def test_the_checkers_find_nothing_with_pipeline_stages(schedule: Schedule, chunks: int, overlap: Overlap) -> None:
    layout = metp(2, pp=2, dp=2, zero=1, schedule=schedule, virtual_stages=chunks)
    assert faults_of(msgspec.structs.replace(chosen(LLAMA, layout, ("tokenwise", 0.5)), overlap=overlap)) == []


@pytest.mark.parametrize("zero", [1, 2, 3])
@pytest.mark.parametrize("dp", [1, 2])
def test_zero_divides_layers_over_dp_and_embedding_and_head_over_all(zero: int, dp: int) -> None:
    """Check the shards of parameters, gradients, master copy and moments on one rank."""
    (program,) = lower(chosen(LLAMA, metp(4, dp=dp, zero=zero)))
    held = {f.name: f.tokens * f.features for f in program.families if f.buffer_class is BufferClass.STATE}
    part, ends = layer_block(LLAMA, 4, LLAMA.layer(0)), (embed_block(LLAMA, 1), head_block(LLAMA, 1))
    for least, states in ((1, ("master", "moment1", "moment2")), (2, ("grads",)), (3, ("params",))):
        for name in states:
            divided = zero >= least
            assert held[f"{name}.layer"] == sum(-(-n // (dp if divided else 1)) for n in runs(part))
            for block in ends:
                share = sum(-(-n // (4 * dp if divided else 1)) for n in runs(block))
                assert held[f"{name}.{block.name}"] == share


def runs(block: Block) -> list[int]:
    """Return the numbers of elements with and without weight decay; zeros are left out."""
    return [n for n in (block.decayed_elements, block.elements - block.decayed_elements) if n]


def test_zero_3_gathers_one_metp_ranks_shard_of_a_layer() -> None:
    """Layers are gathered over dp only, twice in each micro-batch; embedding and head over all ranks."""
    (program,) = lower(chosen(LLAMA, metp(4, dp=2, zero=3)))
    found = [(i.name, i.work) for _, i in program.walk() if i.op in ("params.all_gather", "grads.reduce_scatter")]
    of_layer = [work for name, work in found if name.endswith(".layer")]
    assert len(of_layer) == 2 * LLAMA.layers * program.micro_batches
    assert {(w.ranks, w.group, w.bytes) for w in of_layer} == {
        (2, "grads", 2 * layer_block(LLAMA, 4, LLAMA.layer(0)).elements)
    }
    ends = {(work.ranks, work.group) for name, work in found if name.endswith((".embed", ".head"))}
    assert ends == {(8, "ends")}
    assert {(w.ranks, w.group) for n, w in found if n.startswith("reduce/")} == {(2, "grads"), (8, "ends")}


def work_by_step(decisions: Decisions, rank: int) -> Counter[str]:
    """Return a rank's FLOPs by instruction: the local square, each step of the ring, each step of the weights."""
    found: Counter[str] = Counter()
    for _, instruction in lower(decisions, cp_rank=rank)[0].walk():
        if isinstance(instruction.work, Gemm | Attention):
            found[re.sub(r"\.(early|late)", "", instruction.name)] += int(instruction.work.flops)
    return found


@pytest.mark.parametrize(("model", "ranks"), [(GPT, 2), (GPT, 4), (LLAMA, 4)])
def test_ranks_have_equal_work_in_every_step(model: Model, ranks: int) -> None:
    """Zigzag chunks: early keys of an earlier rank cost half a square, and so do late queries against a later rank."""
    every = [work_by_step(chosen(model, metp(ranks)), rank) for rank in range(ranks)]
    assert all(mine == every[0] for mine in every)
    assert sum("/attn.ring" in name for name in every[0]) == 2 * (ranks - 1) * ranks


def test_eight_ranks_with_one_key_value_head_each() -> None:
    """Grouped-query attention with as many ranks as key/value heads."""
    model = msgspec.structs.replace(LLAMA, heads=16, kv_heads=8, layers=1, ffn_hidden=1280)
    decisions = chosen(model, metp(8, dp=2, zero=3))
    assert faults_of(decisions) == []
    works = [i.work for _, i in lower(decisions)[0].walk() if isinstance(i.work, Attention)]
    assert {(work.heads, work.kv_heads) for work in works} == {(2, 1)}


@pytest.mark.parametrize(
    ("changes", "where"), [({"kv_heads": 2}, "kv_heads"), ({"heads": 6, "kv_heads": 6}, "heads")], ids=["few", "uneven"]
)
def test_heads_that_ranks_cannot_share_are_refused(changes: dict[str, int], where: str) -> None:
    """Keys and values of one head on two ranks would be made, sent and summed twice."""
    with refused(Infeasible, what="metp = 4", where=where, got=str(changes[where]), wanted="4") as error:
        lower(chosen(msgspec.structs.replace(LLAMA, **changes), metp(4)))
    assert error.value.where == where
