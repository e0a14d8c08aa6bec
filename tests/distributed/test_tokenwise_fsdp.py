"""Token-wise alpha beside FSDP2 (``fully_shard``) over gloo: gradients of two ranks are those of one process."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.distributed.fsdp import fully_shard

import memo_exec
from memo_sim.contract.errors import CannotRun
from tests.distributed.team import Member, Team
from tests.exec_cpu.decoder_layers.small_models import error, gradients, small_model, token_ids
from tests.refusals import refused

RANKS = 2


def shard(model: Any, *, reshard: bool) -> None:
    for layer in model.model.layers:
        fully_shard(layer, reshard_after_forward=reshard)
    fully_shard(model, reshard_after_forward=reshard)


def one_rank(member: Member, family: str, first: str, reshard: bool) -> tuple[float, bool]:
    """Return the largest error of a rank's gradients, and whether the bytes are those of whole weights."""
    ids = token_ids(RANKS)
    reference = small_model(family)
    wanted = [gradients(reference, ids[rank : rank + 1]) for rank in range(RANKS)]
    mean = {name: sum(each[name] for each in wanted) / RANKS for name in wanted[0] if name != "loss"}
    model = small_model(family)
    if first == "tokenwise":
        memo_exec.tokenwise(model, alpha=0.3, resident_layers=1, debug=True)
    shard(model, reshard=reshard)
    if first == "fully_shard":
        memo_exec.tokenwise(model, alpha=0.3, resident_layers=1, debug=True)
        with refused(CannotRun, what="these are sharded"):
            model.memo_tokenwise.predict(ids.shape[1])
    for _ in range(2):
        gradients(model, ids[member.rank : member.rank + 1])
    found = {name: p.grad.full_tensor() for name, p in model.named_parameters()}
    alone = memo_exec.tokenwise(reference, alpha=0.3, resident_layers=1)
    gradients(alone, ids[member.rank : member.rank + 1])
    return error(found, mean), alone.memo_tokenwise.report() == model.memo_tokenwise.report()


@pytest.mark.slow
@pytest.mark.parametrize("family", ["llama", "mixtral"])
@pytest.mark.parametrize("first", ["tokenwise", "fully_shard"])
@pytest.mark.parametrize("reshard", [True, False])
def test_gradients_are_those_of_one_process(team: Team, family: str, first: str, reshard: bool) -> None:
    for worst, same_bytes in team.play(one_rank, RANKS, family, first, reshard):
        assert worst < 1e-5
        assert same_bytes


def one_unit_too_many(member: Member) -> None:
    model = small_model("llama")
    fully_shard(model.model.layers[1].mlp)
    with refused(CannotRun, what="FSDP unit of its own", where="layers.1 (LlamaDecoderLayer).mlp"):
        memo_exec.tokenwise(model)
    assert torch.is_grad_enabled()


@pytest.mark.slow
def test_a_part_of_a_layer_is_no_unit(team: Team) -> None:
    team.play(one_unit_too_many, RANKS)
