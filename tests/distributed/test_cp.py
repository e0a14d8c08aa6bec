"""Compares context parallelism (ring and all-gather) with one process: gradients and losses for several alphas."""

import pytest

from memo_exec.kernels import KERNELS
from memo_exec.machine.preflight import checked_program
from memo_sim.contract.errors import BadInput
from memo_sim.contract.knobs import CpExchange, Loss, MlpRebuild
from memo_sim.contract.plan import Decisions, Layout, Plan
from tests.distributed.parity import TOLERANCE, Played, play, whole_gradients
from tests.distributed.team import Member, Team
from tests.distributed.training import MODELS, label, parity, reference, training
from tests.exec_cpu.small import gpt
from tests.refusals import refused

RING, GATHERED = Layout(cp=2), Layout(cp=2, cp_exchange="all_gather")


@pytest.mark.parametrize("alpha", [0.0, 0.5, 1.0])
@pytest.mark.parametrize("name", ["gpt", "llama"])
@pytest.mark.parametrize("layout", [RING, GATHERED], ids=label)
def test_two_ranks(team: Team, name: str, layout: Layout, alpha: float) -> None:
    parity(team, name, layout, alpha)


@pytest.mark.parametrize("alpha", [0.0, 0.5, 1.0])
@pytest.mark.parametrize("name", ["gpt", "llama"])
@pytest.mark.parametrize("layout", [RING, GATHERED, Layout(ulysses=2)], ids=label)
@pytest.mark.slow
def test_loss_curves(team: Team, name: str, layout: Layout, alpha: float) -> None:
    parity(team, name, layout, alpha, steps=5)


@pytest.mark.parametrize("policy", [("none", 0), ("none", 256), ("full", 0), ("selective", 0)])
@pytest.mark.parametrize("layout", [RING, GATHERED], ids=label)
@pytest.mark.slow
def test_other_policies(team: Team, layout: Layout, policy: tuple[str, int]) -> None:
    parity(team, "llama", layout, recompute=policy[0], swapped_tokens=policy[1])


@pytest.mark.parametrize("layout", [RING, Layout(tp=2, sequence_parallel=True, ulysses=2)], ids=label)
@pytest.mark.slow
def test_the_mlp_in_row_blocks(team: Team, layout: Layout) -> None:
    parity(team, "gpt", layout, recompute="full", swapped_tokens=0, mlp_chunk_tokens=256, seq_tokens=1024)


@pytest.mark.parametrize(("rebuild", "loss"), [("layer", "checkpointed"), ("twice", "checkpointed-fp32")])
def test_recompute_and_loss_as_hugging_faces_frameworks_have_them(team: Team, rebuild: MlpRebuild, loss: Loss) -> None:
    layout = Layout(cp=2, zero=3, cp_exchange="all_gather")
    blocks = {"mlp_chunk_tokens": 256, "mlp_rebuild": rebuild, "loss": loss, "loss_chunk_tokens": 256}
    parity(team, "llama", layout, recompute="full", swapped_tokens=0, seq_tokens=1024, **blocks)


@pytest.mark.parametrize("layout", [RING, GATHERED, Layout(cp=4, cp_exchange="all_gather")], ids=label)
def test_sequences_of_a_micro_batch_travel_together(team: Team, layout: Layout) -> None:
    parity(team, "llama", layout, 0.5, micro_batch=2, global_batch=2, seq_tokens=256 * layout.cp, debug=True)


def test_no_race_on_any_rank(team: Team) -> None:
    parity(team, "gpt", Layout(cp=4), 0.5, seq_tokens=1024, debug=True)


@pytest.mark.parametrize("alpha", [0.0, 0.5, 1.0])
@pytest.mark.parametrize("name", ["gpt", "llama"])
@pytest.mark.parametrize("exchange", ["ring", "all_gather"])
@pytest.mark.slow
def test_four_ranks(team: Team, name: str, exchange: CpExchange, alpha: float) -> None:
    parity(team, name, Layout(cp=4, cp_exchange=exchange), alpha, seq_tokens=1024, steps=5)


@pytest.mark.parametrize("layout", [RING, GATHERED], ids=label)
@pytest.mark.slow
def test_bf16_errs_as_one_process_does(team: Team, layout: Layout) -> None:
    """Errors against fp32. Parts are rounded before they are merged, so three times one process's error is allowed."""
    exact, *found = (
        whole_gradients(team.play(play, each.layout.devices, each, 1, {}))
        for each in (
            training(MODELS["llama"], Layout()),
            training(MODELS["llama"], Layout(), dtype="bf16"),
            training(MODELS["llama"], layout, 0.5, dtype="bf16"),
        )
    )
    for name, value in exact.items():
        one, parted = (float((each[name] - value).norm() / value.norm()) for each in found)
        assert parted < 3 * one, name


def play_without(member: Member, decisions: Decisions, op: str) -> Played:
    """Play a step in which the operator ``op`` does nothing."""
    return play(member, decisions, 1, {"kernels": {**KERNELS, op: lambda call: None}})


@pytest.mark.parametrize("op", ["attention.merge", "grad.accumulate"])
def test_the_comparison_finds_an_operator_that_is_left_out(team: Team, op: str) -> None:
    chosen = training(MODELS["llama"], RING)
    found = whole_gradients(team.play(play_without, 2, chosen, op))
    wanted = whole_gradients([reference("llama", chosen.seq_tokens, chosen.global_batch, 2)])
    errors = {name: float((found[name] - value).abs().max() / value.abs().max()) for name, value in wanted.items()}
    assert max(errors.values()) > 1000 * TOLERANCE


@pytest.mark.parametrize(
    ("layout", "tokens"), [(Layout(cp=4), 508), (Layout(ulysses=2, cp=2), 508), (Layout(ulysses=4), 510)]
)
def test_a_sequence_that_the_layout_does_not_divide_is_refused(layout: Layout, tokens: int) -> None:
    chosen = training(gpt(), layout, seq_tokens=tokens, recompute="none")
    with refused(BadInput, where="plan.json: seq_tokens", got=str(tokens), wanted="multiple"):
        checked_program(Plan(decisions=chosen, program_sha256="0" * 64), where="plan.json", rank=1)
