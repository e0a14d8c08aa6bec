"""Every compute kernel is played once, alone, before ranks communicate."""

from collections import Counter
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from memo_exec.commands import run
from memo_exec.distributed.groups import communicates
from memo_exec.distributed.mesh import MeshCoordinates
from memo_exec.distributed.own_program import rank_program
from memo_exec.kernels import KERNELS, Call
from memo_exec.machine.first_calls import play_first_calls
from memo_exec.machine.memory_budget import Needs
from memo_sim.contract.experts import Experts
from memo_sim.contract.plan import Decisions, Layout, Plan
from memo_sim.program.ir.instruction import Lane
from memo_sim.program.ir.program import Program
from tests.exec_cpu.small import decide, gpt, llama

CPU = torch.device("cpu")


def of_rank(rank: int, layout: Layout, **changes: Any) -> tuple[Decisions, Program, MeshCoordinates]:
    fields: dict[str, Any] = {"seq_tokens": 512, "micro_batch": 1, "global_batch": 4 * layout.dp} | changes
    decisions = decide(fields.pop("model", llama(layers=4)), layout=layout, **fields)
    mesh = MeshCoordinates(layout, rank)
    return decisions, rank_program(decisions, mesh), mesh


@pytest.mark.parametrize(
    ("layout", "changes"),
    [
        (Layout(tp=2, sequence_parallel=True, dp=2, zero=1), {"recompute": "tokenwise", "swapped_tokens": 256}),
        (Layout(cp=2, pp=2), {"recompute": "full"}),
        (Layout(ulysses=2, dp=2, zero=3), {"model": gpt(layers=4)}),
    ],
    ids=["tp", "cp-pp", "ulysses"],
)
def test_every_compute_kernel_is_played_in_the_shapes_of_the_step(layout: Layout, changes: dict[str, Any]) -> None:
    decisions, program, mesh = of_rank(layout.devices - 1, layout, **changes)
    played: list[tuple[str, Any]] = []

    def noting(op: str) -> Any:
        def kernel(call: Call) -> None:
            played.append((op, call.instruction.work))
            assert all(tensor.device == CPU for tensor in call.tensors.values())
            KERNELS[op](call)

        return kernel

    count = play_first_calls(decisions, program, mesh, CPU, kernels={op: noting(op) for op in KERNELS})
    wanted = {(i.op, i.work) for t in program.templates for i in t.instructions if i.lane is Lane.COMPUTE}
    assert set(played) == wanted
    assert count == len(played)
    assert not any(communicates(work) for _, work in played)
    assert len(played) < sum(1 for _, i in program.walk() if i.lane is Lane.COMPUTE)  # a layer's kernels once
    assert max(Counter(op for op, _ in played).values()) < 20


@pytest.mark.parametrize(("recipe", "layouts"), [("tensor", "tn"), ("delayed", "tn"), ("block", "tn"), ("mx", "any")])
def test_products_in_fp8_are_played_without_what_quantises_their_operands(recipe: str, layouts: str) -> None:
    layout = Layout(tp=2, sequence_parallel=True, pp=2)
    in_blocks = {"hidden": 256, "head_dim": 64, "ffn_hidden": 256} if recipe in ("block", "mx") else {}
    model = llama(layers=2, **in_blocks)
    fields = {"dtype": "bf16", "fp8": recipe, "fp8_layouts": layouts, "seq_tokens": 256, "recompute": "none"}
    decisions, program, mesh = of_rank(3, layout, model=model, **fields)
    assert play_first_calls(decisions, program, mesh, CPU)


@pytest.mark.parametrize("recipe", ["tensor", "block"])
def test_experts_and_weights_in_fp8_alone_are_played_too(recipe: str) -> None:
    experts = Experts(count=4, per_token=2, hidden=128, shared=128)
    sizes = {"hidden": 128, "heads": 4, "kv_heads": 4, "head_dim": 32, "ffn_hidden": 256, "experts": experts}
    fields = {"dtype": "bf16", "fp8": recipe, "fp8_layouts": "tn", "fp8_experts": True, "fp8_params": True}
    layout = Layout(dp=2, ep=2)
    decisions, program, mesh = of_rank(1, layout, model=llama(layers=2, **sizes), **fields, recompute="none")
    assert play_first_calls(decisions, program, mesh, CPU)


def test_ranks_play_them_before_they_make_groups(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a GPU only: a CPU loads no kernels."""
    decisions, program, _ = of_rank(0, Layout(tp=2))
    order: list[str] = []

    def noting(name: str) -> Any:
        return lambda *given, **named: order.append(name)

    for name in ("play_first_calls", "make_groups", "connect", "check_memory", "this_machine"):
        monkeypatch.setattr(run, name, noting(name))
    plan, needs = Plan(decisions=decisions, program_sha256=""), Needs(0, 0)
    world: Any = SimpleNamespace(rank=0, size=2)
    run._groups(plan, program, world, torch.device("cuda"), needs)
    assert order[:3] == ["play_first_calls", "make_groups", "connect"]
    order.clear()
    run._groups(plan, program, world, CPU, needs)
    assert order == ["make_groups", "connect"]
