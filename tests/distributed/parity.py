"""Compares a layout with one process: the same weights and batches have to give the same gradients and losses.

Every rank plays its own program and returns its shards of the gradients. The test assembles them.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import msgspec
import torch
from torch import Tensor

from memo_exec.distributed.groups import make_groups
from memo_exec.distributed.mesh import MeshCoordinates
from memo_exec.distributed.own_program import rank_program
from memo_exec.interpreter.interpreter import Interpreter
from memo_exec.kernels import StepScalars
from memo_exec.training import weights
from memo_sim.contract.plan import Decisions, Layout, MovedBytes
from memo_sim.program.layout.rank_order import coordinate
from memo_sim.program.layout.token_order import token_runs
from memo_sim.program.lower import lower
from tests.distributed.team import PATIENCE_S, Member, Team

TOLERANCE = 1e-5
"""Largest error relative to a tensor's largest entry; the same as for one process against autograd."""

SEED = 3

LEARNING_RATE = 1e-3
"""AdamW's first update moves every weight by this, against its gradient's sign. Rounding decides the sign of gradients
near zero. With ten times this rate, that alone changes the norm of the second step by the tolerance on some CPUs."""

Batch = list[tuple[Tensor, Tensor]]


@dataclass(frozen=True)
class Played:
    """What a rank returns: losses and norms of the steps, and shards of gradients (name, offsets, whole, values)."""

    losses: list[float]
    norms: list[float]
    gradients: list[tuple[str, tuple[int, ...], tuple[int, ...], Tensor]]
    names: list[str]
    moved: MovedBytes
    """Bytes copied to the host and back in the last step."""


def one_process(decisions: Decisions) -> Decisions:
    """Return the decisions of the same training with one process."""
    policy: dict[str, Any] = {"recompute": "none", "recompute_layers": "all", "swapped_tokens": 0}
    policy |= {"mlp_chunk_tokens": 0, "overlap": "none", "early_stop": False}
    policy |= {"subsequence_swapped_tokens": (), "offload_window": 0}
    policy |= {"expert_capacity": 0.0, "expert_overflow": "drop", "expert_overlap": False}
    return msgspec.structs.replace(decisions, layout=Layout(), **policy)


def global_batch(decisions: Decisions, step: int) -> tuple[Tensor, ...]:
    """Return ids and labels of a step, each (sequences, tokens); a fifth of the labels is not counted.

    With a policy's objective, (sequences, tokens, 3) numbers of its rollout besides.
    """
    generator = torch.Generator().manual_seed(step)
    shape = (decisions.global_batch, decisions.seq_tokens)
    ids = torch.randint(0, decisions.model.vocab, shape, generator=generator)
    labels = torch.randint(0, decisions.model.vocab, shape, generator=generator)
    labels[torch.rand(shape, generator=generator) < 0.2] = -100
    if decisions.objective == "next-token":
        return ids, labels
    rollout = torch.randn(*shape, 3, generator=generator)
    rollout[..., 1:].mul_(0.3).sub_(math.log(decisions.model.vocab))
    return ids, labels, rollout


def own_batch(decisions: Decisions, rank: int, step: int) -> Batch:
    """Return the micro-batches of a rank."""
    chosen = torch.cat([torch.arange(r.token, r.token + r.tokens) for r in token_runs(decisions, rank)])
    share = coordinate("dp", decisions.layout, rank)
    split = []
    for whole in global_batch(decisions, step):
        sequences = torch.chunk(whole, decisions.layout.dp)[share]
        split.append([part.flatten(0, 1)[chosen] for part in torch.split(sequences, decisions.micro_batch)])
    return list(zip(*split, strict=True))


def play(member: Member, decisions: Decisions, steps: int, options: dict[str, Any]) -> Played:
    """Play ``steps`` steps on a rank; the returned gradients are those of the first step."""
    place = MeshCoordinates(decisions.layout, member.rank)
    program = rank_program(decisions, place)
    groups = make_groups(lower(decisions), place, patience_s=PATIENCE_S) if member.world > 1 else {}
    with Interpreter(decisions, program, rank=member.rank, groups=groups, **options) as interpreter:
        randomise(interpreter)
        found: list[tuple[str, tuple[int, ...], tuple[int, ...], Tensor]] = []
        losses, norms, moved = [], [], MovedBytes()
        for step in range(1, steps + 1):
            targets = int((global_batch(decisions, step)[1] != -100).sum())
            scalars = StepScalars(lr=LEARNING_RATE, step=step, loss_scale=1 / targets, clip_ratio=0.1, kl_weight=0.05)
            record = interpreter.run_step(own_batch(decisions, member.rank, step), scalars)
            losses.append(record.loss)
            norms.append(record.grad_norm)
            moved = record.moved
            if step == 1:
                held = weights.held_by(interpreter, "grads")
                found = [(each.name, each.offsets, each.whole, each.view.clone()) for each in held]
        return Played(losses, norms, found, interpreter.schedule.program.ids(), moved)


def randomise(interpreter: Interpreter) -> None:
    """Add noise to every parameter, so that no gradient is negligible."""
    weights.initialize(interpreter, seed=SEED)
    for name, found in weights.by_name(interpreter).items():
        generator = torch.Generator().manual_seed(sum(name.encode()))
        noise = torch.normal(0.0, 0.08, found[0].whole, generator=generator)
        for held in found:
            held.view.add_(held.of(noise))


def whole_gradients(ranks: list[Played]) -> dict[str, Tensor]:
    """Return the whole gradients, assembled from all ranks. Ranks that hold the same entry have to agree."""
    found: dict[str, Tensor] = {}
    for rank in ranks:
        for name, offsets, whole, shard_values in rank.gradients:
            values = shard_values.float()  # gradients of pure bf16 states are bf16
            target = found.setdefault(name, torch.full(whole, torch.nan))
            shard = target[tuple(slice(o, o + n) for o, n in zip(offsets, values.shape, strict=True))]
            known = ~shard.isnan()
            assert torch.allclose(shard[known], values[known], rtol=1e-6, atol=1e-9), f"ranks disagree on {name}"
            shard.copy_(values)
    return found


def check(team: Team, decisions: Decisions, reference: Played, *, steps: int, **options: Any) -> list[Played]:
    """Play a layout and compare it with one process: gradients of the first step, losses and norms of all steps."""
    ranks = team.play(play, decisions.layout.devices, decisions, steps, options)
    compare(ranks, reference, steps=steps)
    return ranks


def compare(ranks: list[Played], reference: Played, *, steps: int) -> None:
    """Compare the results of the ranks with those of one process."""
    wanted, found = whole_gradients([reference]), whole_gradients(ranks)
    assert set(found) == set(wanted)
    for name, gradient in wanted.items():
        assert not found[name].isnan().any(), f"no rank holds all of {name}"
        error = (found[name] - gradient).abs().max() / gradient.abs().max()
        assert error <= TOLERANCE, f"{name}: {error}"
    for rank in ranks:
        for step in range(steps):
            assert abs(rank.losses[step] / reference.losses[step] - 1) <= TOLERANCE, (rank.losses, reference.losses)
            assert abs(rank.norms[step] / reference.norms[step] - 1) <= TOLERANCE, (rank.norms, reference.norms)
