"""Compares METP with one process, over gloo: gradients, losses, and the bytes that each rank holds.

Entries are compared in fp32, relative to the largest entry of their tensor (``parity.TOLERANCE`` is 1e-5). These tests
run on CPUs, so they do not cover NCCL.
"""

import msgspec
import pytest

from memo_exec.kernels import KERNELS
from memo_sim.contract.plan import Decisions, Layout
from tests.distributed.encoder import check_encoder
from tests.distributed.parity import TOLERANCE, Played, check, one_process, play, whole_gradients
from tests.distributed.team import Member, Team
from tests.distributed.timing import held, in_program_order
from tests.distributed.training import MODELS, parity, reference, training

KEEP = {"recompute": "none", "swapped_tokens": 0}


@pytest.mark.parametrize("name", ["gpt", "llama"])
def test_two_ranks(team: Team, name: str) -> None:
    parity(team, name, Layout(metp=2), **KEEP)


@pytest.mark.parametrize("name", [pytest.param("gpt", marks=pytest.mark.slow), "llama-mha"])
@pytest.mark.slow
def test_four_ranks_and_no_race_on_any(team: Team, name: str) -> None:
    parity(team, name, Layout(metp=4), debug=True, **KEEP)


@pytest.mark.parametrize(
    "policy", [pytest.param(("none", 128), marks=pytest.mark.slow), ("full", 0), ("tokenwise", 128)]
)
def test_other_policies(team: Team, policy: tuple[str, int]) -> None:
    parity(team, "gpt", Layout(metp=2), recompute=policy[0], swapped_tokens=policy[1])


@pytest.mark.parametrize(
    "policy", [pytest.param(("none", 0), marks=pytest.mark.slow), ("none", 128), ("tokenwise", 128)]
)
def test_kept_norms_and_no_race(team: Team, policy: tuple[str, int]) -> None:
    parity(team, "llama", Layout(metp=2), debug=True, recompute=policy[0], swapped_tokens=policy[1], keep_norms=True)


@pytest.mark.parametrize(
    ("name", "layout"),
    [
        ("gpt", Layout(metp=2, dp=2)),
        pytest.param("llama", Layout(metp=2, dp=2, zero=1), marks=pytest.mark.slow),
        ("gpt4", Layout(metp=2, pp=2)),
        ("gpt", Layout(metp=2, zero=1)),
        ("llama", Layout(metp=2, overlap_exchanges=False)),
        pytest.param("llama", Layout(metp=2, dp=2, zero=2), marks=pytest.mark.slow),
        ("gpt", Layout(metp=2, dp=2, zero=3)),
        ("llama", Layout(metp=2, zero=3)),
    ],
    ids=["dp", "zero1", "pp", "ends-shared", "turns", "zero2", "zero3", "ends-gathered"],
)
def test_beside_other_layouts(team: Team, name: str, layout: Layout) -> None:
    parity(team, name, layout, **KEEP)


@pytest.mark.parametrize(("overlap", "dp"), [("gradients", 1), ("both", 2)])
def test_replicas_talk_beside_compute_and_no_race(team: Team, overlap: str, dp: int) -> None:
    parity(team, "gpt", Layout(metp=2, dp=dp, zero=1), overlap=overlap, debug=True, **KEEP)


CHUNKS = {"recompute": "full", "swapped_tokens": 0, "attention_chunk_tokens": 256, "seq_tokens": 640}
"""Three chunks, of which the last is shorter."""


@pytest.mark.parametrize("name", ["gpt", pytest.param("llama", marks=pytest.mark.slow)])
def test_attention_in_chunks(team: Team, name: str) -> None:
    played = parity(team, name, Layout(metp=2), **CHUNKS)
    assert all(rank.moved.d2h > 0 for rank in played)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["gpt", "llama-mha"])
def test_attention_in_chunks_on_four_ranks_and_no_race(team: Team, name: str) -> None:
    parity(team, name, Layout(metp=4), debug=True, **CHUNKS | {"attention_chunk_tokens": 512, "seq_tokens": 1024})


@pytest.mark.parametrize(
    ("name", "layout", "more"),
    [
        ("llama-normed", Layout(metp=2), {"micro_batch": 2, "global_batch": 2, "swapped_tokens": 640}),
        pytest.param("llama", Layout(metp=2, overlap_exchanges=False), {}, marks=pytest.mark.slow),
        pytest.param("gpt", Layout(metp=2, dp=2, zero=3), {}, marks=pytest.mark.slow),
        pytest.param("gpt4", Layout(metp=2, pp=2), {}, marks=pytest.mark.slow),
    ],
    ids=["sequences", "turns", "zero3", "pp"],
)
def test_attention_in_chunks_beside_other_options(team: Team, name: str, layout: Layout, more: dict) -> None:
    parity(team, name, layout, **CHUNKS | more)


def test_sequences_of_a_micro_batch_and_norms_of_heads(team: Team) -> None:
    parity(team, "llama-normed", Layout(metp=2), micro_batch=2, global_batch=2, **KEEP)


@pytest.mark.parametrize(("ranks", "bidirectional"), [(2, False), pytest.param(4, True, marks=pytest.mark.slow)])
def test_torchs_encoder_layer_has_the_same_gradients(team: Team, ranks: int, bidirectional: bool) -> None:
    model = msgspec.structs.replace(MODELS["gpt"], bidirectional=bidirectional)
    check_encoder(team, training(model, Layout(metp=ranks), **KEEP))


@pytest.mark.parametrize("layout", [Layout(metp=2), Layout(cp=2)], ids=["metp", "cp"])
def test_sequences_without_a_mask_go_round_together(team: Team, layout: Layout) -> None:
    model = msgspec.structs.replace(MODELS["llama"], bidirectional=True)
    chosen = training(model, layout, micro_batch=2, global_batch=2, **KEEP)
    check(team, chosen, play(Member(0, 1), one_process(chosen), 2, {}), steps=2)


@pytest.mark.parametrize(("ranks", "norms"), [(2, False), pytest.param(4, False, marks=pytest.mark.slow), (2, True)])
def test_each_rank_holds_what_its_program_says(team: Team, ranks: int, norms: bool) -> None:
    chosen = training(MODELS["gpt"], Layout(metp=ranks), keep_norms=norms, **KEEP)
    found = team.play(held, ranks, chosen, frozenset(), in_program_order)
    assert [measured for measured, _ in found] == [wanted for _, wanted in found]
    assert len({wanted for _, wanted in found}) == 1


@pytest.mark.parametrize("name", ["gpt", pytest.param("llama", marks=pytest.mark.slow)])
def test_the_mlp_in_row_blocks(team: Team, name: str) -> None:
    """Of 320 rows of a rank, the last of three blocks has 64; attention is in chunks as well."""
    parity(team, name, Layout(metp=2), debug=True, mlp_chunk_tokens=128, **CHUNKS)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["gpt", "llama-mha"])
def test_the_mlp_in_row_blocks_on_four_ranks(team: Team, name: str) -> None:
    parity(team, name, Layout(metp=4), recompute="full", swapped_tokens=0, mlp_chunk_tokens=128, seq_tokens=1024)


def test_in_chunks_each_rank_holds_what_its_program_says(team: Team) -> None:
    chosen = training(MODELS["gpt"], Layout(metp=2), mlp_chunk_tokens=128, **CHUNKS)
    found = team.play(held, 2, chosen, frozenset(), in_program_order)
    assert [measured for measured, _ in found] == [wanted for _, wanted in found]


def play_without(member: Member, decisions: Decisions, op: str) -> Played:
    """Play a step in which the operator ``op`` does nothing."""
    return play(member, decisions, 1, {"kernels": {**KERNELS, op: lambda call: None}})


@pytest.mark.parametrize("op", ["reduce", "linear.add", "linear.dgrad.add"])
def test_the_comparison_finds_an_operator_that_is_left_out(team: Team, op: str) -> None:
    chosen = training(MODELS["llama"], Layout(metp=2), **KEEP)
    found = whole_gradients(team.play(play_without, 2, chosen, op))
    wanted = whole_gradients([reference("llama", chosen.seq_tokens, chosen.global_batch, 2)])
    errors = {name: float((found[name] - value).abs().max() / value.abs().max()) for name, value in wanted.items()}
    assert max(errors.values()) > 1000 * TOLERANCE
