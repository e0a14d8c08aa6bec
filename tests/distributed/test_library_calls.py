"""Compares the calls that the executor makes for a collective with those that its program says, and prices have."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch.distributed as dist

from memo_exec.distributed.groups import make_groups
from memo_exec.distributed.mesh import MeshCoordinates
from memo_exec.distributed.own_program import rank_program
from memo_exec.interpreter.interpreter import Interpreter
from memo_exec.kernels import KERNELS, Call, Kernel, StepScalars
from memo_sim.contract.plan import Decisions, Layout
from memo_sim.program.ir.work import Collective, LibraryCall
from memo_sim.program.lower import lower
from tests.distributed.parity import own_batch, randomise
from tests.distributed.team import PATIENCE_S, Member, Team
from tests.exec_cpu.small import decide, gpt

FUNCTIONS = {
    "all_reduce": ("all_reduce", 0),
    "all_gather_single": ("all_gather", 0),
    "all_gather_into_tensor": ("all_gather", 0),
    "reduce_scatter_single": ("reduce_scatter", 1),
    "reduce_scatter_tensor": ("reduce_scatter", 1),
    "all_to_all_single": ("all_to_all", 0),
    "broadcast": ("broadcast", 0),
    "reduce": ("reduce", 0),
}
"""By function of torch.distributed: the kind of collective, and which argument is the whole tensor."""

ROWS = {"seq_tokens": 1024, "micro_batch": 1}
CUT = {**ROWS, "recompute": "tokenwise", "swapped_tokens": 256}
CP = Layout(cp=2, cp_exchange="all_gather")
TP = Layout(tp=2, sequence_parallel=True)
CASES: dict[str, tuple[Layout, dict[str, Any], str, int]] = {
    "ring chunks": (CP, {}, "all_gather", 2),
    "row blocks gathered": (TP, CUT, "reduce_scatter", 2),
    "row blocks exchanged": (Layout(ulysses=2), CUT, "all_to_all", 2),
    "scales": (TP, {"fp8": "tensor", "dtype": "bf16"}, "all_gather", 2),
    "runs": (Layout(dp=2, zero=3), {}, "params.all_gather", 2),
    "sequences": (
        Layout(cp=2, cp_exchange="all_gather", subsequences=2),
        {"seq_tokens": 1024, "micro_batch": 3, "swapped_tokens": 0},
        "all_gather.sequences",
        3,
    ),
    "row-wise": (TP, {**ROWS, "recompute": "rowwise", "mlp_chunk_tokens": 256}, "all_gather", 4),
    "chunks of attention": (
        Layout(ulysses=2),
        {**ROWS, "recompute": "full", "attention_chunk_tokens": 512},
        "all_to_all",
        0,
    ),
}
"""Layout, changes of the plan, an op that makes several calls, and how many at most; 0 if each op makes one."""
LARGE: dict[str, tuple[Layout, dict[str, Any], str, int]] = {
    "both": (Layout(tp=2, sequence_parallel=True, ulysses=2), CUT, "all_gather", 2),
    "stages": (Layout(pp=2, tp=2), ROWS, "loss.all_reduce", 2),
    "multiplexed": (
        Layout(pp=2, ulysses=2, subsequences=3, multiplexed=True),
        {
            "seq_tokens": 3072,
            "micro_batch": 1,
            "recompute": "tokenwise",
            "swapped_tokens": 768,
            "subsequence_swapped_tokens": (256, 256, 256),
        },
        "all_to_all",
        3,
    ),
    "multiplexed rows gathered": (
        Layout(pp=2, tp=2, sequence_parallel=True, subsequences=3, multiplexed=True),
        {
            "seq_tokens": 3072,
            "micro_batch": 1,
            "recompute": "none",
            "swapped_tokens": 768,
            "subsequence_swapped_tokens": (256, 256, 256),
        },
        "all_gather",
        2,
    ),
}


def made(member: Member, decisions: Decisions) -> tuple[list[tuple[str, object, object]], dict[str, int]]:
    """Play a step; return the collectives whose calls differ from the program's, and the most calls of each op."""
    place = MeshCoordinates(decisions.layout, member.rank)
    groups = make_groups(lower(decisions), place, patience_s=PATIENCE_S)
    now = threading.local()

    def watched(function: Callable[..., Any], kind: str, whole: int) -> Callable[..., Any]:
        def call(*tensors: Any, **named: Any) -> Any:
            if (seen := getattr(now, "seen", None)) is not None:
                seen.append((kind, tensors[whole].nbytes))
            return function(*tensors, **named)

        return call

    wrong: list[tuple[str, object, object]] = []
    most: dict[str, int] = {}

    def compared(kernel: Kernel) -> Kernel:
        def play(call: Call) -> None:
            work, op = call.instruction.work, call.instruction.op
            seen: list[LibraryCall] = []
            now.seen = seen if isinstance(work, Collective) else None
            kernel(call)
            now.seen = None
            if isinstance(work, Collective):
                wanted = list(work.calls or ((work.kind, work.bytes),))
                most[op] = max(most.get(op, 0), len(seen))
                if seen != wanted:
                    wrong.append((call.instruction.name, seen, wanted))

        return play

    before = {name: getattr(dist, name) for name in FUNCTIONS if hasattr(dist, name)}
    kernels = {op: compared(kernel) for op, kernel in KERNELS.items()}
    program = rank_program(decisions, place)
    with Interpreter(decisions, program, rank=member.rank, groups=groups, kernels=kernels) as interpreter:
        randomise(interpreter)
        for name, function in before.items():
            setattr(dist, name, watched(function, *FUNCTIONS[name]))
        try:
            interpreter.run_step(own_batch(decisions, member.rank, 1), StepScalars(lr=1e-2))
        finally:
            for name, function in before.items():
                setattr(dist, name, function)
    return wrong, most


def check(team: Team, layout: Layout, changes: dict[str, Any], op: str, calls: int) -> None:
    fields = {"layout": layout, "global_batch": changes.get("micro_batch", 2) * layout.dp, **changes}
    model = gpt(layers=2, max_positions=fields.get("seq_tokens", 128))
    ranks = team.play(made, layout.devices, decide(model, **fields))
    assert [wrong[:3] for wrong, _ in ranks] == [[]] * layout.devices
    assert max(most.get(op, 0) for _, most in ranks) == (calls or 1)


@pytest.mark.parametrize("name", CASES)
def test_the_executor_makes_the_calls_of_the_program(team: Team, name: str) -> None:
    check(team, *CASES[name])


@pytest.mark.slow
@pytest.mark.parametrize("name", LARGE)
def test_four_ranks_make_the_calls_of_the_program(team: Team, name: str) -> None:
    check(team, *LARGE[name])
