"""Tests that all pairs of ranks that send to each other are connected before step 1."""

from __future__ import annotations

import os
from datetime import timedelta
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist

from memo_exec.distributed.connections import connect
from memo_exec.distributed.groups import make_groups, most_ctas
from memo_exec.distributed.mesh import MeshCoordinates
from memo_exec.distributed.world import CONNECTIONS, PATIENCE_S, answered, patience_of, side_by_side
from memo_sim.contract.errors import RankLost
from memo_sim.contract.plan import Layout
from memo_sim.program.analysis.communicators import Key
from memo_sim.program.ir.instruction import Lane
from memo_sim.program.lower import lower
from tests.distributed.team import PATIENCE_S as PATIENCE_OF_TESTS_S
from tests.distributed.team import Member, Team
from tests.exec_cpu.small import decide, gpt
from tests.refusals import refused

ROUND = Layout(pp=2, cp=2, schedule="interleaved", virtual_stages=2)


def connected(member: Member, layout: Layout) -> list[Key]:
    """Connect a rank and return the keys of the groups that it has connected."""
    model = gpt(layers=4)
    programs = lower(decide(model, layout=layout, seq_tokens=512, micro_batch=1, global_batch=4 * layout.dp))
    mesh = MeshCoordinates(layout, member.rank)
    device = torch.device("cpu")
    return connect(programs, mesh, make_groups(programs, mesh, patience_s=PATIENCE_OF_TESTS_S, device=device), device)


@pytest.mark.parametrize(
    ("layout", "wanted"),
    [
        (ROUND, [(Lane.P2P, "cp"), (Lane.SEND, "0>1"), (Lane.SEND, "1>0")]),
        (Layout(ulysses=2, dp=2, zero=1), [(Lane.ULYSSES, "ulysses")]),
        (Layout(tp=2, sequence_parallel=True, dp=2), []),
        (Layout(tp=4, sequence_parallel=True, tp_overlap="chunked"), [(Lane.P2P, "tp")]),
    ],
    ids=["cp2-pp2", "ulysses2-dp2", "tp2-dp2", "tp4-chunked"],
)
def test_ranks_connect_where_they_send_to_each_other(team: Team, layout: Layout, wanted: list[Key]) -> None:
    assert team.play(connected, 4, layout) == [wanted] * 4


def test_stages_in_the_middle_connect_with_both_neighbours(team: Team) -> None:
    forth, back = ["0>1", "1>2", "2>3"], ["1>0", "2>1", "3>2"]
    for stage, found in enumerate(team.play(connected, 4, Layout(pp=4))):
        assert [name for _, name in found] == sorted(n for n in forth + back if str(stage) in n)


class Nccl:
    """A fake of torch.distributed's NCCL groups; it notes which splits of the world a rank makes."""

    def __init__(
        self, monkeypatch: pytest.MonkeyPatch, rank: int, multiprocessors: int = 132, *, chooses: bool = True
    ) -> None:
        self.rank = rank
        self.splits: list[tuple[list[list[int]], int, float]] = []
        self.worlds: list[str] = []
        device = SimpleNamespace(multi_processor_count=multiprocessors)
        monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: device)
        monkeypatch.setattr(dist, "split_group", self.split if chooses else self.split_of_parent)
        monkeypatch.setattr(dist, "new_group", self.new)
        options = SimpleNamespace(Options=lambda: SimpleNamespace(config=SimpleNamespace(max_ctas=None)))
        monkeypatch.setattr(dist, "ProcessGroupNCCL", options, raising=False)

    def new(self, *, backend: str, timeout: timedelta) -> str:
        del timeout
        self.worlds.append(backend)
        return f"world {len(self.worlds)}"

    def split_of_parent(self, *, parent_pg: str, **given: Any) -> str | None:
        assert parent_pg == "world 1"
        return self.split(backend="nccl", **given)

    def split(self, *, split_ranks: list[list[int]], timeout: timedelta, pg_options: Any, backend: str) -> str | None:
        assert backend == "nccl"  # gloo would refuse the options
        self.splits.append((split_ranks, pg_options.config.max_ctas, timeout.total_seconds()))
        return next((str(ranks) for ranks in split_ranks if self.rank in ranks), None)


def nccl_groups(rank: int, layout: Layout) -> dict[Key, Any]:
    programs = lower(decide(gpt(layers=4), layout=layout, seq_tokens=512, micro_batch=1, global_batch=4 * layout.dp))
    mesh = MeshCoordinates(layout, rank)
    return dict(make_groups(programs, mesh, patience_s=9.0, device=torch.device("cuda")))


def test_one_split_of_the_world_makes_all_groups_of_a_key(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every rank makes the same splits, and the blocks of all communicators fit on the device."""
    layout, made = Layout(tp=2, sequence_parallel=True, dp=2, pp=2), []
    for rank in range(layout.devices):
        fake = Nccl(monkeypatch, rank)
        groups = nccl_groups(rank, layout)
        assert all(str(rank) in members for members in groups.values())
        made.append(fake.splits)
    splits = made[0]
    assert all(each == splits for each in made)
    assert len(splits) > 3
    for groups_of_key, ctas, timeout_s in splits:
        ranks = [rank for group in groups_of_key for rank in group]
        assert len(ranks) == len(set(ranks))
        assert all(len(group) > 1 and group == sorted(group) for group in groups_of_key)
        assert ctas * (len(splits) + 1) <= 132
        assert timeout_s == 9.0
    assert max(len(groups_of_key) for groups_of_key, _, _ in splits) == layout.devices // 2


def test_older_torch_splits_a_world_of_nccl_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    fake, layout = Nccl(monkeypatch, rank=1, chooses=False), Layout(tp=2, dp=2)
    older = nccl_groups(1, layout)
    splits = fake.splits
    assert fake.worlds == ["nccl"]
    fake = Nccl(monkeypatch, rank=1)
    assert nccl_groups(1, layout) == older
    assert fake.splits == splits
    assert fake.worlds == []


def test_a_rank_outside_a_keys_groups_still_takes_part_in_the_split(monkeypatch: pytest.MonkeyPatch) -> None:
    fake = Nccl(monkeypatch, rank=3)
    groups = nccl_groups(3, Layout(pp=4))
    assert len(fake.splits) > len(groups)
    assert "0>1" not in {name for _, name in groups}


@pytest.mark.parametrize(
    ("communicators", "multiprocessors", "ctas"), [(1, 132, 32), (3, 132, 32), (5, 132, 22), (5, 20, 3), (50, 20, 1)]
)
def test_blocks_of_a_communicator(
    communicators: int, multiprocessors: int, ctas: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    Nccl(monkeypatch, 0, multiprocessors)
    assert most_ctas(communicators, torch.device("cuda")) == ctas


def test_a_long_step_is_waited_for() -> None:
    assert patience_of(None) == patience_of(1.0) == PATIENCE_S
    assert patience_of(1000.0) == pytest.approx(3000.0)


def test_streams_have_queues_of_their_own(monkeypatch: pytest.MonkeyPatch) -> None:
    """Our value replaces the one in the environment; Megatron-LM's users often set it to 1."""
    monkeypatch.setenv("CUDA_DEVICE_MAX_CONNECTIONS", "1")
    monkeypatch.setenv("NCCL_RUNTIME_CONNECT", "1")
    side_by_side()
    assert os.environ["CUDA_DEVICE_MAX_CONNECTIONS"] == str(CONNECTIONS)
    assert os.environ["NCCL_RUNTIME_CONNECT"] == "1"


def test_memory_that_runs_out_is_no_other_ranks_failure() -> None:
    with pytest.raises(torch.OutOfMemoryError), answered(0, 2):
        raise torch.OutOfMemoryError("CUDA out of memory")
    with refused(RankLost, where="rank 0 of 2", got="Connection closed by peer"), answered(0, 2):
        raise RuntimeError("Connection closed by peer")
