"""Seats of dispatched rows and their order on arrival, against lists written row by row."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from memo_exec.kernels import KERNELS, Call, Context
from memo_sim.contract.experts import Experts
from memo_sim.contract.plan import Layout
from memo_sim.program.ir.instruction import Instruction, Lane
from memo_sim.program.ir.kinds import Phase
from memo_sim.program.ir.work import Rowwise
from memo_sim.program.operators import workspaces
from tests.exec_cpu.small import decide, llama

TOKENS, RANKS, COUNT, CHOSEN = 50, 4, 8, 2
OWN, SLOTS = COUNT // RANKS, TOKENS * CHOSEN
MODEL = llama(experts=Experts(count=COUNT, per_token=CHOSEN, hidden=16))


def play(op: str, scratch: int, *, phase: Phase = Phase.FORWARD, **tensors: Tensor) -> Context:
    """Play an op of one rank of four; return the context, which counts overflow."""
    chosen = decide(MODEL, layout=Layout(dp=RANKS, ep=RANKS), seq_tokens=TOKENS, micro_batch=1, global_batch=RANKS)
    context = Context(chosen, torch.device("cpu"))
    instruction = Instruction(op, op, Lane.COMPUTE, Rowwise(op, 1, 0, 0), (), phase)
    given: dict[str, Any] = dict(tensors)
    given["workspace"] = torch.empty(scratch, dtype=torch.uint8)
    KERNELS[op](Call(instruction, context, given))
    return context


def routed(seed: int) -> dict[str, Tensor]:
    """Return what a skewed router decided for the tokens of a rank: experts, order, places and ends."""
    generator = torch.Generator().manual_seed(seed)
    scores = torch.rand(TOKENS, COUNT, generator=generator) + 1.0 / torch.arange(1, COUNT + 1)
    experts = scores.topk(CHOSEN).indices
    by_expert, order = torch.sort(experts.view(-1), stable=True)
    places = torch.empty(SLOTS, dtype=torch.int64).scatter_(0, order, torch.arange(SLOTS)).view(TOKENS, CHOSEN)
    ends = torch.searchsorted(by_expert, torch.arange(COUNT), right=True).int()
    return {"experts": experts, "order": order, "places": places, "ends": ends}


def seated(seed: int, capacity: int) -> tuple[dict[str, Tensor], dict[str, Tensor], Context]:
    rows, decided = RANKS * capacity, routed(seed)
    made = {"seats": torch.empty(TOKENS, CHOSEN, dtype=torch.int64), "sent": torch.empty(rows, dtype=torch.int64)}
    made["sent_ends"] = torch.empty(COUNT, dtype=torch.int32)
    scratch = workspaces.send_order_workspace_bytes(rows, SLOTS, RANKS)
    return decided, made, play("experts.seats", scratch, phase=Phase.FORWARD, **decided, **made)


@pytest.mark.parametrize("capacity", [1, 20, 60])
def test_seats_are_in_the_order_of_experts_and_rows_beyond_the_capacity_have_none(capacity: int) -> None:
    decided, made, context = seated(0, capacity)
    waiting: list[list[int]] = [[] for _ in range(RANKS)]
    for slot in decided["order"].tolist():
        waiting[int(decided["experts"].view(-1)[slot]) // OWN].append(slot)
    seats = made["seats"].view(-1).tolist()
    for rank, slots in enumerate(waiting):
        kept = slots[:capacity]
        assert [seats[slot] for slot in kept] == [rank * capacity + i for i in range(len(kept))]
        assert made["sent"].tolist()[rank * capacity :][: len(kept)] == kept
        assert all(seats[slot] == RANKS * capacity for slot in slots[capacity:])
        owners = [int(decided["experts"].view(-1)[slot]) for slot in kept]
        counts = [sum(owner <= rank * OWN + own for owner in owners) for own in range(OWN)]
        assert made["sent_ends"].tolist()[rank * OWN :][:OWN] == counts
    dropped = sum(max(0, len(slots) - capacity) for slots in waiting)
    assert context.overflow.tolist() == [dropped, SLOTS, max(map(len, waiting))]


def test_recompute_counts_no_row_again() -> None:
    decided, made, _ = seated(0, 20)
    scratch = workspaces.send_order_workspace_bytes(80, SLOTS, RANKS)
    context = play("experts.seats", scratch, phase=Phase.RECOMPUTE, **decided, **made)
    assert context.overflow.tolist() == [0, 0, 0]


@pytest.mark.parametrize("capacity", [1, 20, 60])
def test_arrived_rows_are_ordered_by_expert_and_rank_with_empty_seats_last(capacity: int) -> None:
    """Rank 1 gets from each rank what that one sends to it."""
    rows = RANKS * capacity
    sent = [seated(seed, capacity)[1]["sent_ends"][OWN : 2 * OWN] for seed in range(RANKS)]
    order, ends = torch.full((rows,), -1), torch.empty(OWN, dtype=torch.int32)
    scratch = workspaces.receive_order_workspace_bytes(rows, RANKS, OWN)
    play("experts.arrivals", scratch, arrived_ends=torch.cat(sent), order=order, ends=ends)
    wanted, empty = [list[int]() for _ in range(OWN)], list[int]()
    for rank, each in enumerate(sent):
        for seat in range(capacity):
            expert = sum(end <= seat for end in each.tolist())
            (wanted[expert] if expert < OWN else empty).append(rank * capacity + seat)
    assert order.tolist() == [row for expert in wanted for row in expert] + empty
    assert ends.tolist() == [len(wanted[0]), len(wanted[0]) + len(wanted[1])]


def test_rows_come_back_to_their_seats() -> None:
    order = torch.tensor([2, 0, 3, 1])
    x, there, back = torch.randn(4, 3), torch.empty(4, 3), torch.empty(4, 3)
    play("experts.arrange", 0, x=x, order=order, out=there)
    assert torch.equal(there, x[order])
    play("experts.arrange.back", 0, x=there, order=order, out=back)
    assert torch.equal(back, x)


def test_a_slot_without_a_seat_gets_no_gradient() -> None:
    x, seats, out = torch.randn(4), torch.tensor([[3, 4], [0, 4]]), torch.empty(2, 2)
    play("experts.gates.bwd", workspaces.gates_backward_workspace_bytes(4), x=x, seats=seats, out=out)
    assert torch.equal(out, torch.stack([torch.stack([x[3], x[0] * 0]), torch.stack([x[0], x[0] * 0])]))
