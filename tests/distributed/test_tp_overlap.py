"""Compares tensor parallelism in chunks (``tp_overlap``) with one process, over gloo: gradients, losses and memory.

Entries are compared in fp32, relative to the largest entry of their tensor (``parity.TOLERANCE`` is 1e-5). These tests
run on CPUs, so they do not cover NCCL.
"""

from typing import Any

import pytest

from memo_exec.interpreter.interpreter import Interpreter
from memo_exec.kernels import KERNELS
from memo_exec.training import weights
from memo_exec.verification.autograd_model import AutogradModel
from memo_sim.contract.plan import Decisions, Layout
from memo_sim.program.lower import lower
from tests.distributed.parity import TOLERANCE, Played, global_batch, one_process, play, randomise, whole_gradients
from tests.distributed.team import Member, Team
from tests.distributed.timing import held, in_program_order
from tests.distributed.training import MODELS, parity, reference, training
from tests.pairs import covering

KEEP = {"recompute": "none", "swapped_tokens": 0}
CHUNKED = {"sequence_parallel": True, "tp_overlap": "chunked"}


@pytest.mark.parametrize(("name", "ranks"), covering(["gpt", "llama"], [4, 2]))
def test_gradients_are_those_of_one_process_and_no_race(team: Team, name: str, ranks: int) -> None:
    parity(team, name, Layout(tp=ranks, **CHUNKED), debug=True, **KEEP)


POLICIES: dict[str, dict[str, Any]] = {
    "swapped": {"recompute": "none", "swapped_tokens": 512},
    "full": {"recompute": "full", "swapped_tokens": 0},
    "inputs swapped": {"recompute": "full", "swapped_tokens": 256},
    "selective": {"recompute": "selective", "swapped_tokens": 0},
    "operators": {"recompute": "operators", "swapped_tokens": 0},
    "tokenwise": {"recompute": "tokenwise", "swapped_tokens": 256},
    "MLP in blocks": {"recompute": "full", "swapped_tokens": 0, "mlp_chunk_tokens": 256},
    "norms": {"recompute": "norms", "swapped_tokens": 0},
    "the MLP": {"recompute": "mlp", "swapped_tokens": 0},
    "every second layer, ended early": {
        "recompute": "full",
        "swapped_tokens": 0,
        "recompute_layers": "every-2",
        "early_stop": True,
    },
    "groups of layers": {"recompute": "full", "swapped_tokens": 0, "recompute_layers": "groups-2"},
    "rounding buffers, MLP in blocks": {
        "recompute": "full",
        "swapped_tokens": 512,
        "mlp_chunk_tokens": 256,
        "rounding_buffers": True,
    },
}


QUICK = ("swapped", "full", "tokenwise", "norms", "every second layer, ended early")
"""Policies of the default run; the slow run has all."""


@pytest.mark.parametrize(
    "policy",
    [pytest.param(p, marks=() if name in QUICK else pytest.mark.slow, id=name) for name, p in POLICIES.items()],
)
def test_rebuilt_and_swapped_activations(team: Team, policy: dict[str, Any]) -> None:
    parity(team, "llama", Layout(tp=2, **CHUNKED), **policy)


@pytest.mark.parametrize(
    ("name", "layout"),
    [
        ("llama", Layout(tp=2, cp=2, **CHUNKED)),
        ("llama-mha", Layout(tp=2, ulysses=2, **CHUNKED)),
        ("llama", Layout(tp=2, dp=2, zero=3, **CHUNKED)),
        ("gpt4", Layout(tp=2, pp=2, **CHUNKED)),
    ],
    ids=["ring", "ulysses", "zero3", "stages"],
)
def test_beside_other_layouts(team: Team, name: str, layout: Layout) -> None:
    parity(team, name, layout, debug=True, **KEEP)


@pytest.mark.parametrize("alpha", [0.0, 0.5])
def test_deferred_weight_gradients(team: Team, alpha: float) -> None:
    parity(team, "llama4", Layout(tp=2, pp=2, schedule="zero-bubble", **CHUNKED), alpha, debug=True)


def test_deferred_weight_gradients_of_layers_that_differ(team: Team) -> None:
    layers = {"recompute": "full", "swapped_tokens": 0, "recompute_layers": "every-2", "early_stop": True}
    parity(team, "llama4", Layout(tp=2, pp=2, schedule="zero-bubble", **CHUNKED), debug=True, **layers)


@pytest.mark.parametrize("name", ["gpt", "llama"])
@pytest.mark.parametrize("ranks", [2, 4])
def test_gradients_are_those_of_plain_autograd(team: Team, name: str, ranks: int) -> None:
    chosen = training(MODELS[name], Layout(tp=ranks, **CHUNKED), **KEEP)
    found = whole_gradients(team.play(play, ranks, chosen, 1, {}))
    alone = one_process(chosen)
    with Interpreter(alone, lower(alone)[0]) as interpreter:
        randomise(interpreter)
        reference = AutogradModel(chosen.model, weights.named_parameters(interpreter))
    ids, labels = global_batch(chosen, 1)
    reference.loss(ids, labels, 1 / int((labels != -100).sum())).backward()
    assert set(found) == set(reference.p)
    for key, leaf in reference.p.items():
        assert leaf.grad is not None
        assert (found[key] - leaf.grad).abs().max() <= TOLERANCE * leaf.grad.abs().max(), key


@pytest.mark.parametrize("ranks", [2, 4])
def test_each_rank_holds_what_its_program_says(team: Team, ranks: int) -> None:
    chosen = training(MODELS["llama"], Layout(tp=ranks, **CHUNKED), **KEEP)
    found = team.play(held, ranks, chosen, frozenset(), in_program_order)
    assert [measured for measured, _ in found] == [wanted for _, wanted in found]
    assert len({wanted for _, wanted in found}) == 1


def play_without(member: Member, decisions: Decisions, op: str) -> Played:
    """Play a step in which the operator ``op`` does nothing."""
    return play(member, decisions, 1, {"kernels": {**KERNELS, op: lambda call: None}})


@pytest.mark.parametrize("op", ["parts.sum", "send_recv"])
def test_the_comparison_finds_an_operator_that_is_left_out(team: Team, op: str) -> None:
    chosen = training(MODELS["llama"], Layout(tp=2, **CHUNKED), **KEEP)
    found = whole_gradients(team.play(play_without, 2, chosen, op))
    wanted = whole_gradients([reference("llama", chosen.seq_tokens, chosen.global_batch, 2)])
    errors = {name: float((found[name] - value).abs().max() / value.abs().max()) for name, value in wanted.items()}
    assert not max(errors.values()) <= 1000 * TOLERANCE
