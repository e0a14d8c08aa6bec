"""``memo_exec.tokenwise`` refuses by name what row blocks cannot play, and leaves the model as it was."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from torch import Tensor, nn

import memo_exec
from memo_sim.contract.errors import CannotRun, MemoError, UsageError
from memo_sim.contract.huggingface import model_from_config
from memo_sim.contract.model import Model
from memo_sim.contract.plan import Decisions, Layout, Plan
from tests.exec_cpu.decoder_layers.small_models import TOKENS, gradients, small_model, token_ids
from tests.exec_cpu.plans import plan_of, write_plan
from tests.refusals import refused

ARGUMENTS: list[tuple[dict[str, Any], str]] = [
    ({"alpha": 1.5}, "a number between 0 and 1"),
    ({"alpha": "half"}, "a number between 0 and 1"),
    ({"alpha": True}, "a number between 0 and 1"),
    ({"whole": "drop"}, "'swap' or 'keep'"),
    ({"resident_layers": -1}, "a whole number from 0"),
]


@pytest.fixture(scope="module")
def one_llama() -> Any:
    return small_model("llama")


@pytest.fixture
def llama(one_llama: Any) -> Iterator[Any]:
    yield one_llama
    if hasattr(one_llama, "memo_tokenwise"):
        one_llama.memo_tokenwise.undo()


def memo_model(model: Any) -> Model:
    return model_from_config(model.config.to_dict(), where="config", name="small")


def decisions(model: Model, **changes: Any) -> Decisions:
    fields: dict[str, Any] = {"recompute": "tokenwise", "swapped_tokens": 128, "seq_tokens": 512}
    return Decisions(model=model, **(fields | changes))


def untouched(model: Any) -> bool:
    layers = model.model.layers
    return not hasattr(model, "memo_tokenwise") and all("forward" not in vars(layer) for layer in layers)


@pytest.mark.parametrize(("arguments", "wanted"), ARGUMENTS, ids=str)
def test_wrong_arguments(llama: Any, arguments: dict[str, Any], wanted: str) -> None:
    with refused(UsageError, what=f"not a value of {next(iter(arguments))}", wanted=wanted):
        memo_exec.tokenwise(llama, **arguments)
    assert untouched(llama)


def test_a_model_is_wrapped_once(llama: Any) -> None:
    memo_exec.tokenwise(llama)
    with refused(UsageError, what="wrapped already", hint="undo()"):
        memo_exec.tokenwise(llama)
    llama.memo_tokenwise.undo()
    assert untouched(llama)


def test_other_modules_have_no_decoder_layers() -> None:
    with refused(CannotRun, what="no decoder layers", got="Linear"):
        memo_exec.tokenwise(nn.Linear(2, 2))


class Mixing(nn.Module):
    """An MLP that also reads the token before."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(x + 0.1 * x.roll(1, dims=1))


class Noisy(nn.Module):
    """An MLP that draws random numbers."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(x * (1 + 0.1 * torch.rand_like(x)))


@pytest.mark.parametrize(
    ("kind", "what"),
    [(Mixing, "depends on other tokens outside attention"), (Noisy, "draws random numbers")],
)
def test_layers_whose_rows_are_not_independent(kind: type[nn.Module], what: str) -> None:
    model = small_model("llama")
    layer = model.model.layers[2]
    layer.mlp = kind(layer.mlp)
    with refused(CannotRun, what=what, where="layers.2 (LlamaDecoderLayer)"):
        memo_exec.tokenwise(model)
    assert untouched(model)


def test_dropout() -> None:
    model = small_model("llama")
    layer = model.model.layers[1]
    layer.mlp = nn.Sequential(layer.mlp, nn.Dropout(0.1))
    with refused(CannotRun, what="dropout", where="layers.1 (LlamaDecoderLayer).mlp.1", got="p = 0.1"):
        memo_exec.tokenwise(model)
    with refused(CannotRun, what="attention_dropout"):
        memo_exec.tokenwise(small_model("llama", attention_dropout=0.1))


@pytest.mark.slow
def test_layers_without_attention_of_transformers() -> None:
    with refused(CannotRun, what="0 times, wanted once", where="Qwen3NextDecoderLayer"):
        memo_exec.tokenwise(small_model("qwen3_next"))


def test_gradient_checkpointing(llama: Any) -> None:
    memo_exec.tokenwise(llama)
    llama.model.layers[1].gradient_checkpointing = True
    try:
        with refused(UsageError, what="gradient checkpointing is on", where="layers.1"):
            gradients(llama, token_ids())
    finally:
        del llama.model.layers[1].gradient_checkpointing


def test_attention_weights_and_a_batch_of_router_logits(llama: Any) -> None:
    memo_exec.tokenwise(llama)
    with refused(CannotRun, got="output_attentions=True"):
        llama(input_ids=token_ids(), output_attentions=True)
    with refused(CannotRun, got="output_router_logits=True with 2 sequences", wanted="one sequence"):
        llama(input_ids=token_ids(2), output_router_logits=True)


def test_a_plan_decides_alpha(llama: Any, tmp_path: Path) -> None:
    decided = decisions(memo_model(llama))
    for plan in (plan_of(decided), write_plan(tmp_path / "plan.json", decided), str(tmp_path / "plan.json")):
        own = memo_exec.tokenwise(llama, plan=plan).memo_tokenwise
        assert own.policy.alpha == 0.25
        gradients(llama, token_ids())
        from_plan = own.report()
        own.undo()
    own = memo_exec.tokenwise(llama, alpha=0.25).memo_tokenwise
    gradients(llama, token_ids())
    assert own.report() == from_plan


PLANS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "another model": ({"model": {"hidden": 128}}, {"what": "another model", "where": "$.decisions.model.hidden"}),
    "tensor parallelism": ({"layout": Layout(tp=2)}, {"where": "$.decisions.layout.tp", "got": "2"}),
    "subsequences": ({"layout": Layout(subsequences=2)}, {"where": "$.decisions.layout.subsequences"}),
    "full recompute": ({"recompute": "full", "swapped_tokens": 0}, {"what": "no token-wise alpha", "hint": "checkpo"}),
    "nothing": ({"recompute": "none", "swapped_tokens": 0}, {"hint": "keeps every layer's tensors"}),
    "a part kept": ({"recompute": "none"}, {"what": "no token-wise alpha", "got": "128 of 512 tokens swapped"}),
}


@pytest.mark.parametrize("name", PLANS)
def test_plans_that_a_wrapped_model_cannot_follow(llama: Any, name: str) -> None:
    changes, fields = PLANS[name]
    model = msgspec.structs.replace(memo_model(llama), **changes.get("model", {}))
    if changes.get("layout", Layout()).subsequences > 1:
        changes = {**changes, "subsequence_swapped_tokens": (128, 0)}
    plan = Plan(
        decisions=decisions(**({"model": model} | {k: v for k, v in changes.items() if k != "model"})),
        program_sha256="",
    )
    with refused(CannotRun, **fields):
        memo_exec.tokenwise(llama, plan=plan)
    assert untouched(llama)


def test_a_plan_decides_everything(llama: Any) -> None:
    plan = plan_of(decisions(memo_model(llama)))
    for arguments in ({"alpha": 0.5}, {"resident_layers": 1}, {"whole": "keep"}):
        with refused(UsageError, what=f"the plan decides {next(iter(arguments))}"):
            memo_exec.tokenwise(llama, plan=plan, **arguments)


def test_a_model_that_plans_do_not_describe() -> None:
    model = small_model("olmo2")
    with refused(CannotRun, what="do not describe this model", hint="give alpha"):
        memo_exec.tokenwise(model, plan=plan_of(decisions(memo_model(small_model("llama")))))


def test_lengths_that_are_none(llama: Any) -> None:
    memo_exec.tokenwise(llama)
    for arguments in ((0,), (TOKENS, 0), ("64k",)):
        with refused(UsageError, wanted="a whole number from 1"):
            llama.memo_tokenwise.predict(*arguments)


def test_an_error_in_a_layer_leaves_nothing_behind(llama: Any) -> None:
    """The other row blocks end, and hooks and handlers are gone."""
    own = memo_exec.tokenwise(llama, alpha=0.5).memo_tokenwise
    wanted = gradients(llama, token_ids())
    layer = llama.model.layers[1]
    forward, seen = layer.mlp.forward, []

    def fails(x: Tensor) -> Tensor:
        seen.append(x.shape[1])
        raise MemoError("broken")

    layer.mlp.forward = fails
    with pytest.raises(MemoError, match="broken"):
        gradients(llama, token_ids())
    layer.mlp.forward = forward
    assert seen == [TOKENS // 2]
    found = gradients(llama, token_ids())
    assert all(torch.equal(found[name], wanted[name]) for name in wanted)
    own.undo()
