"""Compares tensor parallelism and data parallelism with ZeRO with one process, over gloo: gradients and losses."""

from __future__ import annotations

from functools import cache
from itertools import product
from typing import Any

import pytest

from memo_sim.contract.model import Model
from memo_sim.contract.plan import Decisions, Layout
from tests.distributed import parity
from tests.distributed.team import Member, Team
from tests.exec_cpu.small import MODELS as KINDS
from tests.exec_cpu.small import decide, gpt, llama

STEPS = 5
TOKENS = 512
"""Tokens of a micro-batch, which has one sequence: four row blocks of 128 tokens, one per tensor-parallel rank."""

MODELS = {"gpt": gpt(layers=2, hidden=32, ffn_hidden=64, head_dim=8), "llama": llama(layers=2, kv_heads=4)}
LAYOUTS = {
    "tp2": Layout(tp=2),
    "tp2-sp": Layout(tp=2, sequence_parallel=True),
    "tp4-sp": Layout(tp=4, sequence_parallel=True),
    "dp2": Layout(dp=2),
    "dp2-zero1": Layout(dp=2, zero=1),
    "dp2-zero2": Layout(dp=2, zero=2),
    "dp2-zero3": Layout(dp=2, zero=3),
    "tp2-dp2": Layout(tp=2, dp=2),
    "dp4-zero1-over2": Layout(dp=4, zero=1, zero_ranks=2),
    "dp4-zero2-over2": Layout(dp=4, zero=2, zero_ranks=2),
    "dp4-zero3-over2": Layout(dp=4, zero=3, zero_ranks=2),
    "tp2-sp-dp2-zero3": Layout(tp=2, sequence_parallel=True, dp=2, zero=3),
}
ALPHAS = {"0": 0.0, "half": 0.5, "1": 1.0}
QUICK = {("llama", "tp4-sp", "1"), ("llama", "tp2", "0"), ("gpt", "dp2-zero1", "half"), ("llama", "dp2-zero2", "1")}
QUICK |= {("gpt", "tp2-sp-dp2-zero3", "half"), ("gpt", "dp4-zero2-over2", "half"), ("gpt", "dp4-zero3-over2", "0")}
"""Cases of the default run: every kind of collective, each alpha and both models. The other cases are slow."""

CASES = [
    pytest.param(*case, marks=() if case in QUICK else pytest.mark.slow) for case in product(MODELS, LAYOUTS, ALPHAS)
]


def decisions(model: Model, layout: Layout, alpha: float = 0.0, **changes: Any) -> Decisions:
    """Return decisions with four sequences a step; a rank swaps ``alpha`` of its tokens and recomputes the rest."""
    fields: dict[str, Any] = {"seq_tokens": TOKENS, "micro_batch": 1, "global_batch": 4, "recompute": "tokenwise"}
    fields |= changes
    granule = 128 * (layout.tp if layout.sequence_parallel else 1)
    swapped = int(alpha * fields["seq_tokens"]) // granule * granule
    return decide(model, layout=layout, **({"swapped_tokens": swapped} | fields))


@cache
def alone(chosen: Decisions, steps: int) -> parity.Played:
    """Return the results of one process in the same training."""
    return parity.play(Member(0, 1), chosen, steps, {})


def check(team: Team, chosen: Decisions, steps: int = 2, **options: Any) -> None:
    parity.check(team, chosen, alone(parity.one_process(chosen), steps), steps=steps, **options)


@pytest.mark.parametrize(("model", "layout", "alpha"), CASES)
def test_a_layout_has_the_gradients_and_losses_of_one_process(team: Team, model: str, layout: str, alpha: str) -> None:
    check(team, decisions(MODELS[model], LAYOUTS[layout], ALPHAS[alpha]), STEPS)


@pytest.mark.parametrize("chunk", [0, 128])
@pytest.mark.parametrize("loss", ["fused", "vocab-parallel", "linear"])
def test_forms_of_the_loss_go_with_a_divided_vocabulary(team: Team, loss: str, chunk: int) -> None:
    """The vocabulary does not divide evenly, so the last rank has a column beyond it."""
    layout = Layout(tp=2, sequence_parallel=True)
    fields = {"loss": loss, "loss_chunk_tokens": chunk, "seq_tokens": 256, "global_batch": 1}
    check(team, decisions(MODELS["llama"], layout, **fields), 2)


@pytest.mark.parametrize("zero", [1, pytest.param(2, marks=pytest.mark.slow), pytest.param(3, marks=pytest.mark.slow)])
def test_shares_may_be_uneven(team: Team, zero: int) -> None:
    """The number of elements of no parameter block here is a multiple of three."""
    check(team, decisions(MODELS["gpt"], Layout(dp=3, zero=zero), 0.5, global_batch=3))


@pytest.mark.parametrize("overlap", [pytest.param("gradients", marks=pytest.mark.slow), "both"])
def test_replicas_talk_beside_compute(team: Team, overlap: str) -> None:
    layout = Layout(tp=2, dp=2, zero=1)
    check(team, decisions(MODELS["llama"], layout, overlap=overlap, seq_tokens=256), 3)


@pytest.mark.parametrize("overlap", ["gradients", "both"])
@pytest.mark.slow
def test_groups_of_replicas_talk_beside_compute(team: Team, overlap: str) -> None:
    check(team, decisions(MODELS["gpt"], LAYOUTS["dp4-zero1-over2"], 0.5, overlap=overlap), 3)


@pytest.mark.parametrize("zero", [1, 2, 3])
@pytest.mark.slow
def test_groups_may_be_of_ranks_that_share_a_sequence(team: Team, zero: int) -> None:
    """ZeRO divides over cp here, and over the two dp ranks the shards are the same."""
    layout = Layout(cp=2, dp=2, zero=zero, zero_ranks=2)
    check(team, decisions(MODELS["llama"], layout, recompute="none", global_batch=6), 3)


@pytest.mark.slow
def test_groups_of_one_rank_divide_nothing(team: Team) -> None:
    check(team, decisions(MODELS["gpt"], Layout(dp=2, zero=3, zero_ranks=1), 0.5))


@pytest.mark.parametrize(
    "layout", ["tp2", "tp2-sp", "dp2-zero1", "dp2-zero2", "dp2-zero3", "dp4-zero1-over2", "dp4-zero3-over2"]
)
@pytest.mark.slow
def test_no_race(team: Team, layout: str) -> None:
    check(team, decisions(MODELS["gpt"], LAYOUTS[layout], 0.5), debug=True)


STATE_LAYOUTS = [
    *(Layout(dp=2, zero=1), Layout(tp=2, dp=2, zero=2), Layout(dp=3, zero=3)),
    *(Layout(dp=4, zero=zero, zero_ranks=2) for zero in (1, 3)),
]


@pytest.mark.parametrize("states", ["bf16", "host"])
@pytest.mark.parametrize("layout", STATE_LAYOUTS, ids=str)
@pytest.mark.slow
def test_states(team: Team, layout: Layout, states: str) -> None:
    check(team, decisions(MODELS["gpt"], layout, states=states, global_batch=6 if layout.dp == 3 else 4), 3)


@pytest.mark.parametrize(
    "layout",
    [
        Layout(dp=2, zero=1),
        *(pytest.param(Layout(dp=2, zero=z), marks=pytest.mark.slow) for z in (0, 2)),
        Layout(tp=2, sequence_parallel=True, dp=2, zero=3),
    ],
    ids=str,
)
def test_pure_bf16_gradients_err_as_one_process_does(team: Team, layout: Layout) -> None:
    """Errors against fp32. Sums over ranks are rounded to bf16 too, so twice one process's error is allowed."""
    _check_errors(team, layout, {"dtype": "bf16", "states": "pure-bf16", "seq_tokens": 256})


def _check_errors(team: Team, layout: Layout, narrow: dict[str, Any]) -> None:
    exact, one, parted = (
        parity.whole_gradients(team.play(parity.play, each.layout.devices, each, 1, {}))
        for each in (
            decisions(MODELS["llama"], Layout(), seq_tokens=256),
            decisions(MODELS["llama"], Layout(), **narrow),
            decisions(MODELS["llama"], layout, **narrow),
        )
    )
    for name, value in exact.items():
        errors = [float((each[name] - value).norm() / value.norm()) for each in (one, parted)]
        assert errors[1] < 2 * errors[0], name


@pytest.mark.parametrize(
    "states",
    [
        {"states": "pure-bf16-fp32-moments"},
        {"states": "pure-bf16", "grad_sums": "fp32"},
        {"states": "fp32", "grad_sums": "params"},
    ],
    ids=str,
)
@pytest.mark.slow
def test_states_of_several_dtypes_err_as_one_process_does(team: Team, states: dict[str, Any]) -> None:
    layout = Layout(tp=2, sequence_parallel=True, dp=2, zero=3)
    _check_errors(team, layout, {"dtype": "bf16", "seq_tokens": 256, **states})


@pytest.mark.parametrize(
    "changes",
    [
        {"recompute": "full"},
        {"recompute": "full", "early_stop": True},
        {"recompute": "full", "swapped_tokens": 256},
        {"recompute": "full", "mlp_chunk_tokens": 256},
        {"recompute": "full", "recompute_layers": "every-2"},
        {"recompute": "none", "swapped_tokens": 256},
        {"recompute": "selective"},
        {"recompute": "norms"},
        {"recompute": "mlp"},
        {"recompute": "operators"},
        {"loss_chunk_tokens": 100},
        {"micro_batch": 2, "seq_tokens": 256, "swapped_tokens": 256},
    ],
    ids=str,
)
@pytest.mark.slow
def test_other_policies(team: Team, changes: dict[str, Any]) -> None:
    check(team, decisions(MODELS["llama"], Layout(tp=2, sequence_parallel=True), **changes))


@pytest.mark.parametrize("name", [name for name, model in KINDS.items() if model.kv_heads % 2 == 0])
@pytest.mark.slow
def test_every_kind_of_model(team: Team, name: str) -> None:
    check(team, decisions(KINDS[name], LAYOUTS["tp2-sp-dp2-zero3"], 0.5))


@pytest.mark.slow
def test_norms_of_heads_are_summed_over_tensor_parallel_ranks(team: Team) -> None:
    check(team, decisions(llama(qk_norm=True), Layout(tp=2, dp=2, zero=1), 0.5))


def test_a_rank_may_have_no_token_of_the_vocabulary(team: Team) -> None:
    """A vocabulary of five tokens, two per rank, leaves none for the last of four ranks."""
    check(team, decisions(llama(layers=1, kv_heads=4, vocab=5), Layout(tp=4), seq_tokens=128), 1)
