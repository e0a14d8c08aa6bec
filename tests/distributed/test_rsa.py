"""Tests METP's baselines over gloo: ring self-attention, and Ring Attention on a model without a mask.

Gradients and losses are compared with those of one process and of torch's encoder layers, in fp32. No rank holds more
bytes than its program says. These tests run on CPUs, so they do not cover NCCL.
"""

import msgspec
import pytest

from memo_exec.kernels import KERNELS
from memo_sim.contract.plan import Decisions, Layout
from tests.distributed.encoder import check_encoder
from tests.distributed.parity import TOLERANCE, Played, check, one_process, play, whole_gradients
from tests.distributed.team import Member, Team
from tests.distributed.timing import held, in_program_order
from tests.distributed.training import MODELS, label, parity, reference, training

KEEP = {"recompute": "none", "swapped_tokens": 0}
BERT = msgspec.structs.replace(MODELS["gpt"], bidirectional=True)


def rsa(ranks: int, **more: int) -> Layout:
    return Layout(cp=ranks, cp_exchange="rsa", **more)


@pytest.mark.parametrize("layout", [rsa(2), rsa(4), Layout(cp=2), Layout(cp=4)], ids=label)
def test_torchs_encoder_layer_has_the_same_gradients(team: Team, layout: Layout) -> None:
    check_encoder(team, training(BERT, layout, **KEEP))


@pytest.mark.parametrize(
    ("name", "layout", "policy"),
    [
        ("gpt", rsa(1), "selective"),
        pytest.param("llama-normed", rsa(2, zero=3), "full", marks=pytest.mark.slow),
        pytest.param("gpt4", rsa(2, pp=2), "none", marks=pytest.mark.slow),
        ("llama", rsa(2, tp=2), "selective"),
    ],
    ids=["alone", "zero3", "pp", "tp"],
)
def test_a_causal_mask_and_other_layouts(team: Team, name: str, layout: Layout, policy: str) -> None:
    parity(team, name, layout, debug=True, recompute=policy, swapped_tokens=0)


def test_inputs_of_full_recompute_are_offloaded(team: Team) -> None:
    chosen = training(MODELS["gpt"], rsa(2), recompute="full")
    chosen = msgspec.structs.replace(chosen, swapped_tokens=chosen.local_tokens)
    assert chosen.offload_inputs
    check(team, chosen, play(Member(0, 1), one_process(chosen), 2, {}), steps=2, debug=True)


def test_sequences_of_a_micro_batch_go_round_together(team: Team) -> None:
    chosen = training(MODELS["llama"], rsa(2), micro_batch=2, global_batch=2, **KEEP)
    check(team, chosen, play(Member(0, 1), one_process(chosen), 2, {}), steps=2, debug=True)


@pytest.mark.slow
def test_bf16_errs_as_one_process_does(team: Team) -> None:
    """Errors against fp32. Scores and their sums are rounded too, so three times one process's error is allowed."""
    exact, one, parted = (
        whole_gradients(team.play(play, each.layout.devices, each, 1, {}))
        for each in (
            training(MODELS["llama"], Layout(), **KEEP),
            training(MODELS["llama"], Layout(), dtype="bf16", **KEEP),
            training(MODELS["llama"], rsa(2), dtype="bf16", **KEEP),
        )
    )
    for name, value in exact.items():
        errors = [float((each[name] - value).norm() / value.norm()) for each in (one, parted)]
        assert errors[1] < 3 * errors[0], name


@pytest.mark.parametrize("layout", [rsa(2), rsa(4), Layout(cp=2), Layout(cp=4)], ids=label)
def test_each_rank_holds_what_its_program_says(team: Team, layout: Layout) -> None:
    found = team.play(held, layout.devices, training(BERT, layout, **KEEP), frozenset(), in_program_order)
    assert [measured for measured, _ in found] == [wanted for _, wanted in found]
    assert len({wanted for _, wanted in found}) == 1


def play_without(member: Member, decisions: Decisions, op: str) -> Played:
    """Play a step in which the operator ``op`` does nothing."""
    return play(member, decisions, 1, {"kernels": {**KERNELS, op: lambda call: None}})


@pytest.mark.parametrize("op", ["rsa.softmax.bwd", "all_reduce"])
def test_the_comparison_finds_an_operator_that_is_left_out(team: Team, op: str) -> None:
    chosen = training(MODELS["llama"], rsa(2), **KEEP)
    found = whole_gradients(team.play(play_without, 2, chosen, op))
    wanted = whole_gradients([reference("llama", chosen.seq_tokens, chosen.global_batch, 2)])
    errors = {name: float((found[name] - value).abs().max() / value.abs().max()) for name, value in wanted.items()}
    assert max(errors.values()) > 1000 * TOLERANCE
