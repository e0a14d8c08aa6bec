"""Experts that several ranks divide, over gloo: gradients and losses are those of one process.

Small routers send most rows to few experts, so the load is skewed. The capacity is the most that a rank can send, but
in the tests of overflow.
"""

from __future__ import annotations

import re
from math import isfinite, isinf
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from torch import Tensor

from memo_exec.commands.run import run
from memo_exec.commands.run_options import RunOptions
from memo_exec.distributed.groups import make_groups
from memo_exec.distributed.mesh import MeshCoordinates
from memo_exec.distributed.own_program import rank_program
from memo_exec.interpreter.interpreter import Interpreter
from memo_exec.kernels import StepScalars
from memo_exec.training.weights import held_by, named_parameters
from memo_exec.verification.autograd_model import AutogradModel
from memo_sim.contract.expert_load import MeasuredLoad
from memo_sim.contract.experts import Experts
from memo_sim.contract.plan import Decisions, Layout
from memo_sim.program.ir.instruction import Lane
from memo_sim.program.ir.work import Copy
from memo_sim.program.layout.expert_load import capacity_rows
from memo_sim.program.layout.rowwise_blocks import routed_at_once
from memo_sim.program.lower import lower
from tests.distributed import parity
from tests.distributed.team import PATIENCE_S, Failed, Member, Team
from tests.distributed.timing import held, in_program_order
from tests.exec_cpu.plans import BYTES, byte_decisions, write_plan
from tests.exec_cpu.small import EXPERT_MODELS, decide

WHOLE: dict[str, Any] = {"sequence_parallel": True, "expert_tp": 1}
OVERLAP: dict[str, Any] = {"expert_overlap": True}
LORA: dict[str, Any] = {"adapters": "r=4,alpha=8,targets=q+k+v+proj"}
CASES: dict[str, tuple[str, Layout, dict[str, Any]]] = {
    "dp": ("mixtral", Layout(dp=2, ep=2), {}),
    "tp": ("mixtral", Layout(tp=2, sequence_parallel=True, cp=2, ep=2), {}),
    "tp, whole tokens": ("mixtral", Layout(tp=2, dp=2, ep=2, zero=1), {"overlap": "both"}),
    "dp 4": ("qwen3-moe", Layout(dp=4, ep=2), {"recompute": "none", "swapped_tokens": 0}),
    "zero 1": ("mixtral", Layout(dp=4, ep=2, zero=1), {}),
    "zero 2": ("mixtral", Layout(dp=4, ep=2, zero=2), {}),
    "zero 3": ("mixtral", Layout(dp=4, ep=2, zero=3), {}),
    "no two ranks with the same experts": ("mixtral", Layout(dp=4, ep=4, zero=3), {}),
    "ulysses": ("mixtral", Layout(ulysses=2, cp=2, ep=4), {}),
    "full recompute": ("first layer dense", Layout(dp=2, ep=2), {"recompute": "full", "swapped_tokens": 0}),
    "shared expert and selection bias": ("deepseek", Layout(tp=2, sequence_parallel=True, dp=2, ep=2), {}),
    "biases": ("gpt-oss", Layout(dp=4, ep=2, zero=1), {}),
    "biases, tp": ("gpt-oss", Layout(tp=2, sequence_parallel=True, dp=2, ep=2), {}),
    "biases, tp, whole tokens": (
        "gpt-oss",
        Layout(tp=2, dp=2, ep=2, zero=3),
        {"recompute": "none", "swapped_tokens": 0},
    ),
    "gate of the shared expert": ("qwen2-moe", Layout(tp=2, sequence_parallel=True, dp=2, ep=2, zero=3), {}),
    "mlp recompute": ("mixtral", Layout(dp=2, ep=2), {"recompute": "mlp", "swapped_tokens": 0}),
    "whole experts": ("mixtral", Layout(tp=2, dp=2, ep=2, **WHOLE), {}),
    "whole experts, all ranks, zero 3": ("mixtral", Layout(tp=2, dp=2, ep=4, zero=3, **WHOLE), {}),
    "whole experts, copies in tp": ("gpt-oss", Layout(tp=4, ep=2, zero=1, **WHOLE), {}),
    "whole experts, biases": ("gpt-oss", Layout(tp=2, cp=2, ep=4, **WHOLE), {"recompute": "full", "swapped_tokens": 0}),
    "whole experts, shared expert and selection bias": ("deepseek", Layout(tp=2, dp=2, ep=4, zero=1, **WHOLE), {}),
    "whole experts, gate of the shared expert": ("qwen2-moe", Layout(tp=2, dp=2, ep=2, zero=2, **WHOLE), {}),
    "overlap": ("deepseek", Layout(dp=4, ep=2), OVERLAP),
    "overlap, features divided": ("qwen2-moe", Layout(tp=2, sequence_parallel=True, dp=2, ep=2, zero=1), OVERLAP),
    "overlap, whole experts": ("qwen2-moe", Layout(tp=2, dp=2, ep=4, zero=3, **WHOLE), OVERLAP),
    "overlap, full recompute": (
        "deepseek",
        Layout(tp=2, dp=2, ep=4, **WHOLE),
        OVERLAP | {"recompute": "full", "swapped_tokens": 0},
    ),
    "overlap, nothing recomputed": (
        "gpt-oss",
        Layout(dp=4, ep=4),
        OVERLAP | {"recompute": "none", "swapped_tokens": 0},
    ),
    "adapters": ("mixtral", Layout(dp=4, ep=2, zero=3), LORA),
    "adapters, features divided": ("gpt-oss", Layout(tp=2, sequence_parallel=True, dp=2, ep=2, zero=1), LORA),
    "adapters, whole experts": ("qwen2-moe", Layout(tp=2, dp=2, ep=4, **WHOLE), LORA | OVERLAP),
    "groups of replicas": ("mixtral", Layout(dp=4, ep=2, zero=1, zero_ranks=2), {"overlap": "both"}),
    "groups of replicas, zero 3": ("gpt-oss", Layout(dp=4, ep=2, zero=3, zero_ranks=2), {}),
    "groups of replicas, whole experts": ("mixtral", Layout(tp=2, dp=2, ep=2, zero=2, zero_ranks=1, **WHOLE), {}),
    "whole experts, mlp recompute": (
        "qwen2-moe",
        Layout(tp=2, dp=2, ep=4, **WHOLE),
        {"recompute": "mlp", "swapped_tokens": 0},
    ),
}
ROWWISE: dict[str, Any] = {"recompute": "rowwise", "mlp_chunk_tokens": 384}
"""Two row blocks of a rank with 512 tokens, the second a third of the first; each has a capacity of its own."""
CASES |= {
    "row blocks": ("mixtral", Layout(dp=2, ep=2), ROWWISE),
    "row blocks, ring": ("mixtral", Layout(cp=2, dp=2, ep=4), ROWWISE | {"seq_tokens": 1024}),
    "row blocks, ulysses": ("qwen3-moe", Layout(ulysses=2, ep=2), ROWWISE | {"seq_tokens": 1024}),
    "row blocks, tp": (
        "gpt-oss",
        Layout(tp=2, sequence_parallel=True, dp=2, ep=2, zero=1),
        ROWWISE | {"seq_tokens": 1024, "mlp_chunk_tokens": 768},
    ),
    "row blocks, tp, whole tokens": ("qwen2-moe", Layout(tp=2, dp=2, ep=2), ROWWISE | {"overlap": "both"}),
    "row blocks, stages": ("first layer dense", Layout(pp=2, dp=2, ep=2), ROWWISE),
    "row blocks, zero 3": ("mixtral", Layout(dp=4, ep=2, zero=3), ROWWISE),
    "row blocks, shared expert and selection bias": ("deepseek", Layout(dp=2, ep=2), ROWWISE),
    "row blocks, whole experts": (
        "qwen2-moe",
        Layout(tp=2, dp=2, ep=4, zero=3, **WHOLE),
        ROWWISE | {"seq_tokens": 1024, "mlp_chunk_tokens": 768},
    ),
    "row blocks, overlap": ("deepseek", Layout(dp=4, ep=4), ROWWISE | OVERLAP),
    "row blocks, adapters": ("gpt-oss", Layout(dp=4, ep=2, zero=3), ROWWISE | LORA),
}
QUICK = {"tp", "biases, tp", "whole experts", "row blocks"}
Gradients = list[tuple[str, tuple[int, ...], tuple[int, ...], Tensor]]
SIZES: dict[str, Any] = {"seq_tokens": 512, "micro_batch": 1, "global_batch": 4, "recompute": "tokenwise"}


@pytest.mark.parametrize("case", [pytest.param(n, marks=() if n in QUICK else pytest.mark.slow) for n in CASES])
def test_layouts_have_the_gradients_of_one_process(team: Team, case: str) -> None:
    name, layout, fields = CASES[case]
    swapped = layout.tp * 128 if layout.sequence_parallel else 128
    sizes = SIZES | {"swapped_tokens": swapped, "expert_capacity": float(layout.ep)}
    check(team, decide(EXPERT_MODELS[name], layout=layout, **(sizes | fields)))


LOSSES: dict[str, Layout] = {
    "ring": Layout(cp=2, dp=2, ep=4),
    "features divided": Layout(tp=2, sequence_parallel=True, dp=2, ep=2, zero=1),
    "whole experts": Layout(tp=2, dp=2, ep=4, **WHOLE),
}


@pytest.mark.parametrize("case", ["ring", *(pytest.param(n, marks=pytest.mark.slow) for n in LOSSES if n != "ring")])
def test_losses_of_the_router_are_those_of_a_layer_that_is_routed_at_once(team: Team, case: str) -> None:
    """They are about the tokens that a rank routes, so the layout and the row blocks decide them.

    Token-wise recompute with this alpha has the same row blocks, and routes all of them at once.
    """
    lossy = msgspec.structs.replace(EXPERT_MODELS["mixtral"].mixture, balance=0.3, z_loss=0.1)
    model, layout = msgspec.structs.replace(EXPERT_MODELS["mixtral"], experts=lossy), LOSSES[case]
    granule = 128 * (layout.tp if layout.sequence_parallel else 1)
    sizes: dict[str, Any] = {"seq_tokens": 4 * granule * layout.cp, "micro_batch": 1, "global_batch": 2 * layout.dp}
    sizes |= {"layout": layout, "expert_capacity": float(layout.ep), "swapped_tokens": 3 * granule}
    at_once, blocks = ({"recompute": "tokenwise"}, {"recompute": "rowwise", "mlp_chunk_tokens": 3 * granule})
    wanted, found = (team.play(parity.play, 4, decide(model, **sizes, **each), 1, {}) for each in (at_once, blocks))
    for rank in range(4):
        assert found[rank].losses == pytest.approx(wanted[rank].losses, rel=1e-6)
        for (name, _, _, mine), (_, _, _, theirs) in zip(found[rank].gradients, wanted[rank].gradients, strict=True):
            if theirs.numel():
                assert (mine - theirs).abs().max() <= parity.TOLERANCE * theirs.abs().max(), name


@pytest.mark.parametrize("overlap", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_row_blocks_hold_and_copy_what_the_program_says(team: Team, overlap: bool) -> None:
    """So it is with losses of the router, or with exchanges beside products; no late lane makes a rank hold more."""
    model = EXPERT_MODELS["deepseek" if overlap else "mixtral"]
    if not overlap:
        lossy = msgspec.structs.replace(model.mixture, balance=0.3, z_loss=0.1)
        model = msgspec.structs.replace(model, experts=lossy)
    sizes = SIZES | ROWWISE | {"swapped_tokens": 256, "global_batch": 2, "expert_overlap": overlap}
    decisions = decide(model, layout=Layout(dp=2, ep=2, zero=1), **sizes)
    found = team.play(held, 2, decisions, frozenset(), in_program_order)
    assert [measured for measured, _ in found] == [wanted for _, wanted in found]
    for measured, wanted in team.play(held, 2, decisions, frozenset({Lane.COMPUTE})):
        assert measured <= wanted
    copies = [i.work for _, i in lower(decisions)[0].walk() if isinstance(i.work, Copy)]
    for played in team.play(parity.play, 2, decisions, 1, {}):
        for direction in ("d2h", "h2d"):
            assert getattr(played.moved, direction) == sum(c.bytes for c in copies if c.direction == direction) > 0


@pytest.mark.slow
def test_ep_tp_pp_with_half_the_tokens_swapped_on_eight_ranks() -> None:
    layout = Layout(tp=2, sequence_parallel=True, pp=2, dp=2, ep=2)
    sizes = SIZES | {"swapped_tokens": 256, "expert_capacity": 2.0}
    with Team(8) as eight:
        check(eight, decide(EXPERT_MODELS["mixtral"], layout=layout, **sizes))


@pytest.mark.slow
def test_groups_of_replicas_that_divide_states_of_experts_on_eight_ranks() -> None:
    """Each group of four replicas has every expert twice, and two ranks share the states of one."""
    sizes = SIZES | {"swapped_tokens": 128, "expert_capacity": 2.0, "global_batch": 8}
    with Team(8) as eight:
        for zero in (1, 3):
            layout = Layout(dp=8, ep=2, zero=zero, zero_ranks=4)
            check(eight, decide(EXPERT_MODELS["mixtral"], layout=layout, **sizes))
        layout = Layout(tp=2, dp=4, ep=2, zero=2, zero_ranks=2, **WHOLE)
        check(eight, decide(EXPERT_MODELS["deepseek"], layout=layout, **(sizes | {"swapped_tokens": 256})))


def with_capacity(name: str = "mixtral", **fields: Any) -> Decisions:
    """Return decisions whose ranks can send a quarter of their rows to each rank, where some have more for one."""
    model = msgspec.structs.replace(EXPERT_MODELS[name], layers=1)
    sizes: dict[str, Any] = {"seq_tokens": 64, "micro_batch": 1, "global_batch": 2, "expert_capacity": 0.5} | fields
    return decide(model, **({"layout": Layout(dp=2, ep=2)} | sizes))


def overflowing(member: Member, decisions: Decisions) -> tuple[bool, list[int], float, Gradients]:
    """Play one step; return whether parameters changed, the counters of overflow, the norm and the gradients."""
    place = MeshCoordinates(decisions.layout, member.rank)
    groups = make_groups(lower(decisions), place, patience_s=PATIENCE_S)
    with Interpreter(decisions, rank_program(decisions, place), rank=member.rank, groups=groups) as interpreter:
        parity.randomise(interpreter)
        before = {held.name + str(held.offsets): held.view.clone() for held in held_by(interpreter, "params")}
        scalars = StepScalars(lr=1e-2, step=1, loss_scale=1 / 128)
        record = interpreter.run_step(parity.own_batch(decisions, member.rank, 1), scalars)
        found = [(h.name, h.offsets, h.whole, h.view.clone()) for h in held_by(interpreter, "grads")]
        after = {held.name + str(held.offsets): held.view.clone() for held in held_by(interpreter, "params")}
        changed = any(not torch.equal(value, after[name]) for name, value in before.items())
        return changed, interpreter.context.overflow.tolist(), record.grad_norm, found


@pytest.mark.parametrize(
    ("name", "fields"),
    [
        ("mixtral", {}),
        ("gpt-oss", {}),
        ("mixtral", ROWWISE | {"seq_tokens": 512}),
        pytest.param("gpt-oss", ROWWISE | {"seq_tokens": 512}, marks=pytest.mark.slow),
        ("mixtral", {"layout": Layout(dp=2, ep=2, subsequences=2), "seq_tokens": 640}),
    ],
    ids=["mixtral", "gpt-oss", "mixtral in row blocks", "gpt-oss in row blocks", "mixtral in subsequences"],
)
def test_rows_beyond_the_capacity_count_as_zero_and_are_counted(team: Team, name: str, fields: dict[str, Any]) -> None:
    """A token loses all of that expert: of GPT-OSS also the bias of its second product."""
    decisions = with_capacity(name, **fields)
    ranks = team.play(overflowing, 2, decisions)
    model = reference(decisions)
    torch.autograd.backward(torch.stack([model.sum_of_losses(rank) for rank in (0, 1)]).sum() / 128)
    blocks = len(routed_at_once(decisions))
    assert [counts[0] for _, counts, _, _ in ranks] == [sum(model.dropped[:blocks]), sum(model.dropped[blocks:])]
    assert all(changed and counts[0] > 0 for changed, counts, _, _ in ranks)
    rows = decisions.seq_tokens * decisions.model.mixture.per_token
    assert [counts[1:] for _, counts, _, _ in ranks] == [[rows, *model.most[:blocks]], [rows, *model.most[blocks:]]]
    found: dict[str, Tensor] = {}
    for _, _, _, gradients in ranks:
        for key, offsets, whole, values in gradients:
            into = found.setdefault(key, torch.full(whole, torch.nan))
            into[tuple(slice(o, o + n) for o, n in zip(offsets, values.shape, strict=True))] = values
    for key, parameter in model.p.items():
        assert parameter.grad is not None
        error = (found[key] - parameter.grad).abs().max() / parameter.grad.abs().max()
        assert error <= parity.TOLERANCE, f"{key}: {error}"


def test_a_step_with_too_many_rows_is_not_applied_if_the_plan_refuses_it(team: Team) -> None:
    for zero in (0, 1):
        refusing = with_capacity(expert_overflow="refuse")
        layout = msgspec.structs.replace(refusing.layout, zero=zero)
        ranks = team.play(overflowing, 2, msgspec.structs.replace(refusing, layout=layout))
        assert all(not changed and isinf(norm) for changed, _, norm, _ in ranks)
    ranks = team.play(overflowing, 2, with_capacity(expert_overflow="refuse", expert_capacity=2.0))
    assert all(changed and isfinite(norm) and counts[0] == 0 for changed, counts, norm, _ in ranks)


def run_plan(member: Member, plan: Path, options: dict[str, Any]) -> tuple[list[float], list[str]]:
    """Run a plan as one of its ranks; return the losses, and what the run said."""
    said: list[str] = []
    outcome = run(plan, RunOptions(**options), note=said.append)
    assert outcome is not None
    assert outcome.rank == member.rank
    return outcome.comparison.losses, said


def load_of_run(member: Member, plan: Path) -> MeasuredLoad:
    """Run a plan for one step as one of its ranks; return the rows of every expert on all ranks."""
    outcome = run(plan, RunOptions(steps=1))
    assert outcome is not None
    assert outcome.expert_load is not None
    return outcome.expert_load


@pytest.mark.slow
@pytest.mark.parametrize("of", ["mixtral", "gpt-oss"])
def test_a_run_reports_or_refuses_overflow_and_resumes_on_other_ranks(team: Team, tmp_path: Path, of: str) -> None:
    model = msgspec.structs.replace(EXPERT_MODELS[of], vocab=BYTES)

    def plan(name: str, layout: Layout, **fields: Any) -> Path:
        decisions = byte_decisions(model=model, layout=layout, global_batch=4, **fields)
        return write_plan(tmp_path / f"{name}.json", decisions)

    shared = Layout(dp=2, ep=2, zero=1)
    one, whole = plan("one", Layout()), plan("whole", shared, expert_capacity=2.0)
    ((wanted, _),) = team.play(run_plan, 1, one, {"steps": 3}, meets=False)
    for losses, _ in team.play(run_plan, 2, whole, {"steps": 1, "debug": True}, meets=False):
        assert losses == pytest.approx(wanted[:1], rel=1e-4)
    saved: dict[str, Any] = {"save": tmp_path / "saved", "steps": 2}
    for losses, _ in team.play(run_plan, 2, whole, saved, meets=False):
        assert losses == pytest.approx(wanted[:2], rel=1e-4)
    ((losses, _),) = team.play(run_plan, 1, one, saved | {"steps": 3, "resume": True}, meets=False)
    assert losses == pytest.approx(wanted, rel=1e-4)
    few, refusing = (plan(name, shared, expert_capacity=0.6, expert_overflow=name) for name in ("drop", "refuse"))
    (_, said), _ = team.play(run_plan, 2, few, {"steps": 1}, meets=False)
    dropped = r"[\d,]+ of 6,144 rows .* were dropped; .* --expert-capacity 1\.\d+ has a place"
    assert any(re.search(dropped, text) for text in said)
    with pytest.raises(Failed, match=r"(?s)update was not applied.*wanted: a plan with --expert-capacity 1\.\d+"):
        team.play(run_plan, 2, refusing, {"steps": 1}, meets=False)
    blocks = {"recompute": "rowwise", "mlp_chunk_tokens": 128}
    whole, few = (plan(f"blocks-{part}", shared, expert_capacity=part, **blocks) for part in (2.0, 0.6))
    for losses, said in team.play(run_plan, 2, whole, {"steps": 2, "debug": True}, meets=False):
        assert losses == pytest.approx(wanted[:2], rel=1e-4)
        assert not any("were dropped" in text for text in said)
    (_, said), _ = team.play(run_plan, 2, few, {"steps": 1}, meets=False)
    dropped = r"[\d,]+ of 6,144 rows .* were dropped; .* rows of a layer's row block of 128 tokens for another"
    assert any(re.search(dropped, text) for text in said)


@pytest.mark.slow
def test_whole_experts_save_what_one_process_resumes_and_count_every_row_once(team: Team, tmp_path: Path) -> None:
    """Ranks of tp route token shards, so none of them counts another's rows."""
    model = msgspec.structs.replace(EXPERT_MODELS["deepseek"], vocab=BYTES)

    def plan(name: str, layout: Layout, **fields: Any) -> Path:
        decisions = byte_decisions(
            model=model, layout=layout, seq_tokens=512, swapped_tokens=256, global_batch=4, **fields
        )
        return write_plan(tmp_path / f"{name}.json", decisions)

    shared = Layout(tp=2, dp=2, ep=4, zero=1, **WHOLE)
    one, whole = plan("one", Layout()), plan("whole", shared, expert_capacity=4.0)
    ((wanted, _),) = team.play(run_plan, 1, one, {"steps": 3}, meets=False)
    options: dict[str, Any] = {"save": tmp_path / "saved", "steps": 2}
    for losses, _ in team.play(run_plan, 4, whole, options, meets=False):
        assert losses == pytest.approx(wanted[:2], rel=1e-4)
    resumed: dict[str, Any] = {"save": tmp_path / "saved", "steps": 3, "resume": True}
    ((losses, _),) = team.play(run_plan, 1, one, resumed, meets=False)
    assert losses == pytest.approx(wanted, rel=1e-4)
    few, rows = plan("few", shared, expert_capacity=0.6), 2 * 4 * 512 * 3  # of two layers
    (_, said), *_ = team.play(run_plan, 4, few, {"steps": 1}, meets=False)
    assert any(re.search(rf"of {rows:,} rows .* were dropped", text) for text in said)
    for load in team.play(load_of_run, 4, few, meets=False):
        assert [sum(layer.rows) for layer in load.layers] == [4 * 512 * 3] * 2


@pytest.mark.slow
def test_adapters_beside_divided_experts_are_resumed_by_one_process(team: Team, tmp_path: Path) -> None:
    model = msgspec.structs.replace(EXPERT_MODELS["mixtral"], vocab=BYTES)

    def plan(name: str, layout: Layout, **fields: Any) -> Path:
        decisions = byte_decisions(model=model, layout=layout, global_batch=4, **fields, **LORA)
        return write_plan(tmp_path / f"{name}.json", decisions)

    one, shared = plan("one", Layout()), plan("shared", Layout(dp=2, ep=2, zero=3), expert_capacity=2.0)
    ((wanted, _),) = team.play(run_plan, 1, one, {"steps": 3}, meets=False)
    saved: dict[str, Any] = {"save": tmp_path / "saved", "steps": 2}
    for losses, _ in team.play(run_plan, 2, shared, saved, meets=False):
        assert losses == pytest.approx(wanted[:2], rel=1e-4)
    ((losses, _),) = team.play(run_plan, 1, one, saved | {"steps": 3, "resume": True}, meets=False)
    assert losses == pytest.approx(wanted, rel=1e-4)


class Dropping(AutogradModel):
    """Plain autograd in which each rank's rows beyond the capacity count as zero, the last tokens' first.

    ``dropped``, ``most``: of each row block of the first rank, then of the second.
    """

    def __init__(self, decisions: Decisions, parameters: dict[str, Tensor]) -> None:
        super().__init__(decisions.model, parameters)
        of = decisions.model.mixture
        assert of is not None
        self.decisions, self.dropped, self.most = decisions, list[int](), list[int]()

    def sum_of_losses(self, rank: int) -> Tensor:
        """Return the sum of losses of a rank's sequence."""
        ((ids, labels),) = parity.own_batch(self.decisions, rank, 1)
        return self.loss(ids.unsqueeze(0), labels.unsqueeze(0), 1.0)

    def _experts(self, x: Tensor, experts: Experts, at: str) -> Tensor:
        """Return the sum of each token's experts that have a place for its row, block by block."""
        return torch.cat([self._of_block(rows, experts, at) for rows in x.split(routed_at_once(self.decisions))])

    def _of_block(self, x: Tensor, experts: Experts, at: str) -> Tensor:
        given, ep = self.decisions.expert_capacity, self.decisions.layout.ep
        capacity = capacity_rows(experts, len(x) * experts.per_token, "balanced", ep, given)
        probs, chosen = self._routed(x, experts, at)
        taken, out = [0, 0], torch.zeros_like(x)
        for expert in range(experts.count):
            tokens, place = torch.nonzero(chosen == expert, as_tuple=True)
            rank = expert * 2 // experts.count
            free = max(0, capacity - taken[rank])
            taken[rank] += len(tokens)
            tokens, place = tokens[:free], place[:free]
            part = self._expert(x[tokens], experts, expert, at) * probs[tokens, place, None]
            out = out.index_add(0, tokens, part)
        self.dropped.append(sum(max(0, rows - capacity) for rows in taken))
        self.most.append(max(taken))
        return out


def reference(decisions: Decisions) -> Dropping:
    alone = parity.one_process(decisions)
    (program,) = lower(alone)
    with Interpreter(alone, program) as interpreter:
        parity.randomise(interpreter)
        return Dropping(decisions, named_parameters(interpreter))


def check(team: Team, chosen: Decisions) -> None:
    alone = parity.play(Member(0, 1), parity.one_process(chosen), 1, {})
    parity.check(team, chosen, alone, steps=1)
