"""Tests groups, mesh coordinates, shards, and the operands of a rank's own program. No process is started."""

from __future__ import annotations

from itertools import product
from math import prod

import pytest
import torch

from memo_exec.distributed.groups import missing_groups
from memo_exec.distributed.mesh import MeshCoordinates, Share
from memo_exec.distributed.own_program import own_program
from memo_exec.distributed.shards import Part, shards_of
from memo_sim.contract.plan import Decisions, Layout
from memo_sim.program.analysis.communicators import group_keys
from memo_sim.program.ir.instruction import Lane
from memo_sim.program.ir.kinds import BlockKind
from memo_sim.program.layout.rank_order import AXES, degree, members
from memo_sim.program.lower import lower
from tests.exec_cpu.small import MODELS, decide

LAYOUTS = {
    "one": Layout(),
    "tp2": Layout(tp=2, sequence_parallel=True),
    "dp4-zero1": Layout(dp=4, zero=1),
    "dp3-zero3": Layout(dp=3, zero=3),
    "dp6-zero1-over3": Layout(dp=6, zero=1, zero_ranks=3),
    "dp6-zero3-over3": Layout(dp=6, zero=3, zero_ranks=3),
    "tp2-dp2-zero2": Layout(tp=2, dp=2, zero=2),
    "tp2-cp2-zero1": Layout(tp=2, cp=2, zero=1),
    "metp2-dp2-zero1": Layout(metp=2, dp=2, zero=1),
}


def training(model: str, layout: str) -> Decisions:
    return decide(MODELS[model], layout=LAYOUTS[layout], seq_tokens=512, global_batch=12, micro_batch=1)


@pytest.mark.parametrize(("length", "ranks"), [(10, 4), (8, 4), (3, 8), (0, 2)])
def test_shares_cover_a_stretch_once(length: int, ranks: int) -> None:
    share = Share(length, ranks)
    covered = [first + i for index in range(ranks) for first, count in [share.of(index)] for i in range(count)]
    assert covered == list(range(length))
    assert share.even == (len({share.of(index)[1] for index in range(ranks)}) == 1)


@pytest.mark.parametrize(
    "layout",
    [
        Layout(tp=2, ulysses=2, cp=2, dp=2, pp=2),
        Layout(metp=4, dp=3, pp=2),
        Layout(tp=2, cp=2, dp=6, pp=2, zero=1, zero_ranks=4),
    ],
)
def test_groups_partition_the_ranks(layout: Layout) -> None:
    for group in (*AXES, "grads", "ends", "shard", "replicate"):
        found = {tuple(members(group, layout, rank)) for rank in range(layout.devices)}
        assert sorted(rank for each in found for rank in each) == list(range(layout.devices))
        assert {len(each) for each in found} == {degree(group, layout)}


def test_neighbours_are_tensor_parallel_ranks() -> None:
    """The network's prices assume that the group with the most communication lies closest."""
    layout = Layout(tp=4, cp=2, dp=2)
    assert members("tp", layout, 5) == [4, 5, 6, 7]
    assert members("cp", layout, 5) == [1, 5]
    assert members("grads", layout, 5) == [1, 5, 9, 13]


def test_zero_divides_over_consecutive_replicas() -> None:
    layout = Layout(tp=2, cp=2, dp=4, zero=1, zero_ranks=4)
    assert members("grads", layout, 9) == [1, 3, 5, 7, 9, 11, 13, 15]
    assert members("shard", layout, 9) == [9, 11, 13, 15]
    assert members("replicate", layout, 9) == [1, 9]


@pytest.mark.parametrize(
    ("model", "layout"),
    [(name, at) for name, at in product(MODELS, LAYOUTS) if MODELS[name].kv_heads % LAYOUTS[at].tp == 0],
)
@pytest.mark.parametrize("state", ["params", "grads", "master"])
def test_ranks_hold_every_entry(model: str, layout: str, state: str) -> None:
    """No rank holds an entry twice, and a rank's shards do not overlap in its buffer."""
    chosen = training(model, layout)
    kinds = [kind for kind in BlockKind if kind is not BlockKind.EXPERTS or chosen.layout.ep > 1]
    for part in map(Part, kinds):
        held: dict[str, torch.Tensor] = {}
        for rank in range(chosen.layout.devices):
            own: dict[str, torch.Tensor] = {}
            buffer: set[int] = set()
            for shard in shards_of(chosen, MeshCoordinates(chosen.layout, rank), state, part):
                counts = own.setdefault(shard.name, torch.zeros(shard.whole))
                counts[tuple(slice(o, o + n) for o, n in zip(shard.offsets, shard.sizes, strict=True))] += 1
                elements = set(range(shard.first, shard.first + prod(shard.sizes)))
                assert not buffer & elements
                buffer |= elements
            for name, counts in own.items():
                assert counts.max() == 1
                held[name] = held.get(name, torch.zeros_like(counts)) + counts
        assert all((counts >= 1).all() for counts in held.values())


@pytest.mark.parametrize(("layout", "model"), list(product(LAYOUTS, ["gpt2", "llama"])))
def test_a_ranks_program_has_the_plans_instructions_and_lives(layout: str, model: str) -> None:
    chosen = training(model, layout)
    program = lower(chosen)[0]
    for rank in range(chosen.layout.devices):
        own = own_program(program, chosen, MeshCoordinates(chosen.layout, rank))
        assert own.ids() == program.ids()
        assert own.instances == program.instances
        for ours, theirs in zip(own.templates, program.templates, strict=True):
            for a, b in zip(ours.instructions, theirs.instructions, strict=True):
                assert {o.slot for o in a.operands} == {o.slot for o in b.operands}
                sizes = {f.name: f.tokens for f in (*own.families, *ours.own)}
                for operand in a.operands:
                    assert 0 <= operand.first <= operand.first + operand.tokens <= sizes[ours.slots[operand.slot]]


def test_one_tensor_parallel_rank_counts_what_all_have() -> None:
    """In the squared gradient norm every rank counts its divided parameters; the first one also counts norm weights."""
    chosen = training("llama", "tp2")
    program = lower(chosen)[0]
    counted = []
    for rank in range(2):
        own = own_program(program, chosen, MeshCoordinates(chosen.layout, rank))
        (template,) = [t for t in own.templates if t.name == "layer.norm"]
        counted.append(sum(o.tokens for o in template.instructions[0].operands if o.role.startswith("grads")))
    assert counted[0] - counted[1] == 2 * chosen.model.hidden


def test_lanes_have_groups_of_their_own() -> None:
    chosen = training("llama", "tp2-cp2-zero1")
    keys = group_keys(lower(chosen)[0])
    assert keys == sorted(set(keys))
    assert {(Lane.TP, "tp"), (Lane.P2P, "cp"), (Lane.REPLICA, "grads")} <= set(keys)
    assert missing_groups(lower(chosen)[0], chosen.layout, {}) == keys
