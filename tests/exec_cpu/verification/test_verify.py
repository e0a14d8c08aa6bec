"""The verdict on a plan: right plans pass, and planted faults that no checker of programs sees do not."""

from collections.abc import Callable
from dataclasses import replace
from functools import partial

import msgspec
import pytest

from memo_exec.kernels import KERNELS, Call
from memo_exec.verification.verify import AUTOGRAD, KEEP_EVERYTHING, verify
from memo_sim.contract import codec
from memo_sim.contract.layer_shape import LayerShape
from memo_sim.contract.model import Model
from memo_sim.contract.plan import Decisions
from memo_sim.contract.rope_scaling import RopeScaling
from memo_sim.contract.verdict import Against, Compared, Verdict
from memo_sim.program.ir.instruction import Instance
from memo_sim.program.ir.program import Program
from memo_sim.views.verdict_table import verdict_table
from tests.exec_cpu.small import EXPERT_MODELS, LLAMA3, decide, gpt, llama

LARGE = llama(layers=32, hidden=4096, heads=32, kv_heads=8, head_dim=128, ffn_hidden=14336, vocab=128256)


def tokenwise() -> Decisions:
    """Return the decisions of an 8B model at 128K tokens, some of them swapped and the others recomputed."""
    chosen = {"recompute": "tokenwise", "swapped_tokens": 300 * 128, "dtype": "bf16"}
    return decide(LARGE, seq_tokens=2**17, micro_batch=1, **chosen)


def against(verdict: Verdict, reference: str) -> Against:
    return next(each for each in verdict.against if each.reference == reference)


def largest(verdict: Verdict, reference: str) -> Compared:
    return max(against(verdict, reference).compared, key=lambda each: each.difference or 0.0)


def test_a_right_plan_is_verified() -> None:
    verdict = verify(tokenwise(), steps=2)
    assert verdict.verified
    assert verdict.losses[0] != verdict.losses[1]
    for reference in (KEEP_EVERYTHING, AUTOGRAD):
        assert largest(verdict, reference).difference is not None
        kinds = {each.what for each in against(verdict, reference).compared}
        assert {"loss", "gradient norm", "gradient of layer/qkv.weight", "gradient of embed/tokens.weight"} <= kinds
    assert 0.0 < (largest(verdict, AUTOGRAD).difference or 0.0) < 1e-5


def test_selection_biases_have_no_part_in_the_norm_and_move_by_their_own_rule() -> None:
    experts = EXPERT_MODELS["deepseek"].layer(1).experts
    assert experts is not None
    of = msgspec.structs.replace(experts, selection_rate=0.05)
    model = EXPERT_MODELS["deepseek"].of_layers([LayerShape(ffn_hidden=160, experts=of)] * 2)
    verdict = verify(decide(model, micro_batch=1), steps=2, layers=2)
    assert verdict.verified
    assert (largest(verdict, AUTOGRAD).difference or 0.0) < 1e-5


def wrong_lse(call: Call) -> None:
    KERNELS["attention"](call)
    call["lse"].add_(0.01)


def from_another_layer(program: Program) -> Program:
    """Return the program with one prefetch that reads the host rows of the layer before."""
    (number,) = (i for i, t in enumerate(program.templates) if t.name == "layer.prefetch")
    sources = {slot for slot, name in enumerate(program.templates[number].slots) if name.startswith("host")}
    assert sources

    def changed(instance: Instance) -> Instance:
        if instance.template != number or instance.layer != 1:
            return instance
        indices = tuple(i - 1 if slot in sources else i for slot, i in enumerate(instance.indices))
        return msgspec.structs.replace(instance, indices=indices)

    found = tuple(map(changed, program.instances))
    assert found != program.instances
    return replace(program, instances=found)


def skipped(name: str, call: Call) -> None:
    if call.instruction.name != name:
        KERNELS[call.instruction.op](call)


@pytest.mark.parametrize(
    ("kernels", "change"),
    [
        ({"attention": wrong_lse}, lambda program: program),
        ({"linear": partial(skipped, "rec/ffn_up.r1")}, lambda program: program),
        ({}, from_another_layer),
    ],
    ids=["a wrong log-sum-exp", "a skipped rebuild", "a prefetch from another layer"],
)
def test_a_planted_fault_is_found(
    kernels: dict[str, Callable[[Call], None]], change: Callable[[Program], Program]
) -> None:
    verdict = verify(tokenwise(), kernels={**KERNELS, **kernels}, change=change)
    assert not verdict.verified
    assert not all(each.fine for each in against(verdict, KEEP_EVERYTHING).compared)
    assert not all(each.fine for each in against(verdict, AUTOGRAD).compared)


LINEAR = RopeScaling(kind="linear", factor=4.0)
YARN = RopeScaling(kind="yarn", factor=4.0, original_max_positions=64, attention_factor=1.2, beta_fast=8.0)
DYNAMIC = RopeScaling(kind="dynamic", factor=2.0, original_max_positions=32)
LONG = RopeScaling(
    kind="longrope",
    original_max_positions=32,
    attention_factor=1.1,
    short_factors=(1.0,) * 8,
    long_factors=(1.0, 1.5, 2.0, 2.5, 3.0, 3.5, 4.0, 4.5),
)


@pytest.mark.parametrize(
    "model",
    [
        gpt(bidirectional=True),
        llama(rope_scaling=LINEAR),
        llama(rope_scaling=LLAMA3, qk_norm=True, head_dim=32),
        llama(rope_scaling=YARN),
        llama(rope_scaling=DYNAMIC),
        llama(rope_scaling=LONG),
    ],
    ids=["bidirectional", "linear scaling", "llama 3's scaling, normed heads", "yarn", "dynamic", "longrope"],
)
def test_autograd_knows_the_model(model: Model) -> None:
    verdict = verify(decide(model, recompute="full"), layers=1)
    assert verdict.verified
    assert verdict.references_agree
    assert not against(verdict, AUTOGRAD).skipped


def test_autograd_holds_one_head_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    whole = verify(decide(llama(), recompute="full"), layers=1)
    monkeypatch.setattr("memo_exec.verification.autograd_model.HELD_SCORES", 0)
    by_head = verify(decide(llama(), recompute="full"), layers=1)
    assert by_head.verified
    found = zip(against(whole, AUTOGRAD).compared, against(by_head, AUTOGRAD).compared, strict=True)
    assert all(a.difference == pytest.approx(b.difference, abs=1e-9) for a, b in found)


def test_what_autograd_cannot_hold_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("memo_exec.verification.verify.MOST_SCORES", 100)
    verdict = verify(decide(llama(), recompute="full"), layers=1)
    assert verdict.verified
    assert verdict.references_agree is None
    assert "at most 100" in against(verdict, AUTOGRAD).skipped
    assert "Not compared with plain autograd: one process cannot hold" in verdict_table(verdict)


def test_gradients_that_are_no_numbers_differ() -> None:
    def spoils(call: Call) -> None:
        KERNELS["swiglu"](call)
        call["out"][0, 0] = float("nan")

    verdict = verify(decide(llama(), recompute="full"), layers=1, kernels={**KERNELS, "swiglu": spoils})
    assert not verdict.verified
    assert verdict.losses == [None]
    assert verdict_table(verdict).startswith("DIFFERS")
    assert codec.decode(codec.encode(verdict), Verdict, where="here") == verdict
