"""The rivals of the GPU benchmark compute the right results.

The plain model matches the autograd reference, each rival matches plain autograd, and memo and the rivals have the same
losses from the same weights.
"""

import sys
from contextlib import nullcontext
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.nn.attention import SDPBackend
from torch.utils._python_dispatch import TorchDispatchMode

from benchmarks.gpu import huggingface, loss, memo_run, plain_run, rivals
from benchmarks.gpu.agreement import with_agreement
from benchmarks.gpu.backend import best_backend, candidates
from benchmarks.gpu.case import Case
from benchmarks.gpu.model import Layer, PlainModel, build
from benchmarks.gpu.optimizer import MasterAdamW
from benchmarks.gpu.rivals import RIVALS, keep_all
from benchmarks.gpu.tiled import tiled_layer
from memo_exec.training.hyperparameters import Hyperparameters
from memo_exec.training.weights import initial
from memo_exec.verification.autograd_model import AutogradModel
from memo_sim.contract.model import Model
from tests.exec_cpu.plans import write_plan
from tests.exec_cpu.small import MODELS, VOCAB, decide, gpt, llama

TOKENS = 96
CPU = torch.device("cpu")
SUMS_IN_TILES = {"sequence tiling"}
"""Rivals whose weight gradients are sums over tiles; they are close to plain autograd's, but not equal bit for bit."""
INSTALLED = [name for name, rival in RIVALS.items() if not rival.compiled and not rival.why_not()]


def plain(model: Model, tokens: int = TOKENS) -> PlainModel:
    """Return a model whose random weights make no gradient negligible."""
    built = build(model, tokens, CPU, torch.float32)
    generator = torch.Generator().manual_seed(3)
    for name, parameter in built.by_memo_name():
        noise = torch.normal(0.0, 0.08, parameter.shape, generator=generator)
        parameter.data.copy_(initial(name, parameter.shape, layers=model.layers, seed=1) + noise)
    return built


def batch(tokens: int = TOKENS) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(4)
    ids, labels = (torch.randint(0, VOCAB, (2, tokens), generator=generator) for _ in range(2))
    labels[:, ::7] = -100
    return ids, labels


def gradients(model: PlainModel, run_layers: rivals.RunLayers = keep_all) -> dict[str, Tensor]:
    model.zero_grad(set_to_none=True)
    model.loss(*batch(), 1 / 100, run_layers).backward()
    return {name: p.grad.clone() for name, p in model.by_memo_name() if p.grad is not None}


@pytest.mark.parametrize("name", MODELS)
def test_the_plain_model_matches_the_reference(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loss, "WIDE_LOGIT_BYTES", 4 * VOCAB * 40)  # five chunks, the last one shorter
    model = plain(MODELS[name])
    reference = AutogradModel(MODELS[name], dict(model.by_memo_name()))
    ids, labels = batch()
    wanted = reference.loss(ids, labels, 1 / 100)
    wanted.backward()
    assert model.loss(ids, labels, 1 / 100, keep_all).item() == pytest.approx(wanted.item(), rel=1e-5)
    found = gradients(model)
    assert found.keys() == reference.p.keys()
    for key, value in reference.p.items():
        assert value.grad is not None
        assert float((found[key] - value.grad).norm() / value.grad.norm()) < 1e-4, key


@pytest.mark.parametrize("chunk", [1, 30, 191, 192, 10**9])
def test_chunks_do_not_change_the_loss(chunk: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loss, "WIDE_LOGIT_BYTES", 4 * VOCAB * chunk)
    generator = torch.Generator().manual_seed(5)
    hidden, weight = (torch.randn(rows, 16, generator=generator).requires_grad_() for rows in (192, VOCAB))
    labels = batch()[1].flatten()
    (3 * loss.ChunkedLoss.apply(hidden, weight, labels, 0.5)).backward()
    found = hidden.grad, weight.grad
    hidden.grad = weight.grad = None
    wanted = torch.nn.functional.cross_entropy(hidden @ weight.t(), labels, reduction="sum") * 1.5
    wanted.backward()
    for ours, theirs in zip(found, (hidden.grad, weight.grad), strict=True):
        assert torch.allclose(ours, theirs, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("family", ["gpt2", "llama"])
@pytest.mark.parametrize("name", INSTALLED)
def test_every_rival_matches_plain_autograd(name: str, family: str) -> None:
    model = plain(MODELS[family])
    wanted = gradients(model)
    for _ in range(2):  # contexts that are reused must work again
        found = gradients(model, RIVALS[name].run_layers)
        assert found.keys() == wanted.keys()
        for key, value in wanted.items():
            if name in SUMS_IN_TILES:
                assert float((found[key] - value).norm() / value.norm()) < 1e-5, key
            else:
                assert torch.equal(found[key], value), key


@pytest.mark.parametrize(("tokens", "tiles"), [(16, [16]), (17, [9, 8]), (96, [16] * 6), (100, [15] * 6 + [10])])
def test_a_tiled_mlp_never_holds_more_than_a_tile(
    tokens: int, tiles: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    model = plain(llama(layers=1, hidden=16), tokens)
    (layer,) = model.layers
    assert isinstance(layer, Layer)
    seen: list[int] = []
    whole = layer.mlp
    monkeypatch.setattr(layer, "mlp", lambda x: seen.append(x.shape[1]) or whole(x))
    x = torch.randn(2, tokens, 16, requires_grad=True)
    tiled_layer(layer, x).sum().backward()
    assert seen == tiles * 2  # once in forward, and again in backward
    seen.clear()
    rivals.sequence_tiled(model, x).sum().backward()
    assert seen == tiles * 3  # also in the checkpoint's recompute


class Attentions(TorchDispatchMode):
    """Counts forward calls of attention."""

    calls = 0

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.calls += function._opname in rivals.KEPT_OPERATORS
        return function(*args, **(kwargs or {}))


@pytest.mark.parametrize(
    ("name", "passes"), [("autograd keep-all", 1), ("checkpoint", 2), ("checkpoint, attention kept", 1)]
)
def test_only_plain_checkpointing_runs_attention_again(name: str, passes: int) -> None:
    model = plain(MODELS["llama"])
    with Attentions() as seen:
        gradients(model, RIVALS[name].run_layers)
    assert seen.calls == passes * len(model.layers)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")  # the compiler warns about itself
@pytest.mark.parametrize("name", [name for name, rival in RIVALS.items() if rival.compiled])
def test_compiled_rivals_compute_the_same(name: str, tmp_path: Path) -> None:
    rows = [plain_run.measure(case(tmp_path, llama(vocab=256), rival=rival)) for rival in ("autograd keep-all", name)]
    assert with_agreement(rows[1], rows[0], "fp32").agrees


def test_a_missing_library_is_reported() -> None:
    assert "no_such" in rivals.Rival("", keep_all, needs=("no_such_library", "anything")).why_not()
    assert "no_such" in rivals.Rival("", keep_all, needs=("torch", "no_such_name")).why_not()


def planted(monkeypatch: pytest.MonkeyPatch, module: str, **names: Any) -> None:
    """Make a fake module importable under the name of a library that is not installed."""
    for part in (module.partition(".")[0], module):
        monkeypatch.setitem(sys.modules, part, ModuleType(part))
    for name, value in names.items():
        setattr(sys.modules[module], name, value)


def test_transformer_engine_is_called_as_documented(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[Any] = []

    def make(*, enabled: bool, num_layers: int, model_layers: int) -> Any:
        calls.append((enabled, num_layers, model_layers))
        return nullcontext(), lambda x: calls.append("synchronised") or x

    planted(monkeypatch, "transformer_engine.pytorch", get_cpu_offload_context=make)
    model = plain(MODELS["llama"])
    rivals._transformer_engine.cache_clear()
    wanted = gradients(model)
    found = gradients(model, rivals.transformer_engine)
    rivals._transformer_engine.cache_clear()
    assert RIVALS["transformer-engine offload"].why_not() == ""
    assert calls == [(True, 2, 3), *["synchronised"] * 3]
    assert all(torch.equal(found[key], value) for key, value in wanted.items())


def test_torchtune_is_entered_around_the_layers(monkeypatch: pytest.MonkeyPatch) -> None:
    packed: list[Tensor] = []

    def make() -> Any:
        return torch.autograd.graph.saved_tensors_hooks(lambda t: packed.append(t) or t, lambda t: t)

    planted(monkeypatch, "torchtune.training", OffloadActivations=make)
    rivals._torchtune.cache_clear()
    gradients(plain(MODELS["llama"]), rivals.torchtune)
    rivals._torchtune.cache_clear()
    assert RIVALS["torchtune OffloadActivations"].why_not() == ""
    assert packed


def test_the_optimizer_is_plain_adamw_with_clipping() -> None:
    chosen = Hyperparameters(clip=0.5, warmup_steps=2)
    first = {"matrix": torch.randn(8, 4), "vector": torch.randn(4)}
    ours = {name: torch.nn.Parameter(torch.empty_like(value)) for name, value in first.items()}
    theirs = {name: torch.nn.Parameter(value.clone()) for name, value in first.items()}
    optimizer = MasterAdamW([(ours[name], first[name].clone()) for name in first], chosen)
    assert all(torch.equal(ours[name], first[name]) for name in first)
    groups = [{"params": [theirs["matrix"]], "weight_decay": 0.1}, {"params": [theirs["vector"]], "weight_decay": 0.0}]
    reference = torch.optim.AdamW(groups, betas=(0.9, 0.95), eps=1e-8)
    for step in range(1, 5):
        for parameter in (*ours.values(), *theirs.values()):
            parameter.grad = torch.full_like(parameter, 0.1 * step)
        norm = torch.nn.utils.clip_grad_norm_(theirs.values(), 0.5)
        for group in reference.param_groups:
            group["lr"] = chosen.learning_rate_at(step)
        reference.step()
        assert optimizer.update(step) == pytest.approx(float(norm))
    for name in first:
        assert torch.allclose(ours[name], theirs[name], rtol=1e-6, atol=1e-7)


def test_masters_keep_digits_that_bf16_parameters_lose() -> None:
    master = torch.full((4, 4), 1.0)
    parameter = torch.nn.Parameter(torch.empty(4, 4, dtype=torch.bfloat16))
    optimizer = MasterAdamW([(parameter, master)], Hyperparameters(learning_rate=1e-4, weight_decay=0.0))
    for step in range(1, 41):
        parameter.grad = torch.ones_like(parameter)
        optimizer.update(step)
    assert float(master[0, 0].detach()) == pytest.approx(1 - 40e-4, abs=1e-5)
    assert torch.equal(parameter.data, master.bfloat16())
    assert float(parameter.data[0, 0]) < 1


def case(folder: Path, model: Model, **fields: Any) -> Case:
    """Return a case with random bytes as tokens, for the CPU."""
    data = folder / "data.npy"
    np.save(data, np.random.default_rng(0).integers(0, 256, 4096, dtype=np.uint8))
    shared: dict[str, Any] = {"kind": "plain", "part": "rivals", "seq_tokens": 256, "dtype": "fp32", "steps": 3}
    return Case(model=model, data=str(data), **(shared | fields))


@pytest.mark.parametrize("model", [gpt(vocab=256), llama(vocab=256)], ids=lambda model: model.name)
def test_memo_and_rivals_have_the_same_losses(model: Model, tmp_path: Path) -> None:
    decided = decide(model, seq_tokens=256, micro_batch=1, recompute="tokenwise", swapped_tokens=128)
    plan = write_plan(tmp_path / "plan.json", decided)
    ours = memo_run.measure(case(tmp_path, model, rival="memo", kind="memo", plan=str(plan)))
    theirs = plain_run.measure(case(tmp_path, model, rival="checkpoint"))
    assert len(ours.losses) == len(theirs.losses) == 5
    assert len(ours.step_s) == len(theirs.step_s) == 3
    assert ours.losses[-1] < ours.losses[0]
    compared = with_agreement(ours, theirs, "fp32")
    assert compared.agrees
    assert compared.reference == "checkpoint"
    assert ours.host_bytes


@pytest.mark.parametrize("model", [gpt(vocab=256), llama(vocab=256)], ids=lambda model: model.name)
def test_in_bf16_they_agree_within_its_rounding(model: Model, tmp_path: Path) -> None:
    decided = decide(model, seq_tokens=256, micro_batch=1, recompute="full", dtype="bf16")
    plan = write_plan(tmp_path / "plan.json", decided)
    ours = memo_run.measure(case(tmp_path, model, rival="memo", kind="memo", plan=str(plan), dtype="bf16"))
    theirs = plain_run.measure(case(tmp_path, model, rival="checkpoint", dtype="bf16"))
    compared = with_agreement(ours, theirs, "bf16")
    assert compared.agrees
    assert compared.loss_error is not None
    assert compared.loss_error > 0


def test_a_different_update_is_reported_as_a_disagreement(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    one = plain_run.measure(case(tmp_path, llama(vocab=256), rival="checkpoint"))
    monkeypatch.setattr(plain_run, "Hyperparameters", lambda: Hyperparameters(learning_rate=2e-4))
    other = plain_run.measure(case(tmp_path, llama(vocab=256), rival="checkpoint"))
    compared = with_agreement(other, one, "fp32")
    assert compared.agrees is False
    assert compared.grad_norm_error == 0  # the norm of the first step is computed before any update
    assert "differ" in compared.message


def test_transformers_own_model_has_the_same_losses(tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    model = llama(vocab=256, rope_theta=300.0)
    assert huggingface.why_not(model) == ""
    theirs = plain_run.measure(case(tmp_path, model, rival=rivals.HUGGING_FACE, kind="hugging face"))
    ours = plain_run.measure(case(tmp_path, model, rival="checkpoint"))
    assert with_agreement(theirs, ours, "fp32").agrees
    assert theirs.message == huggingface.ON_CPU


def test_transformers_in_bf16_keeps_exact_frequencies() -> None:
    pytest.importorskip("transformers")
    built = huggingface.HuggingFaceModel(llama(vocab=256), 64, CPU, torch.bfloat16)
    assert {p.dtype for p in built.network.parameters()} == {torch.bfloat16}
    assert built.network.model.rotary_emb.inv_freq.dtype == torch.float32
    assert built.network.model.gradient_checkpointing


def test_transformers_is_not_offered_for_another_family() -> None:
    assert "Hugging Face has this shape" in huggingface.why_not(gpt(max_positions=0))


def test_backends_that_overflow_are_not_tried() -> None:
    model = llama(heads=32, kv_heads=8, head_dim=128)
    flash, cudnn = SDPBackend.FLASH_ATTENTION, SDPBackend.CUDNN_ATTENTION
    assert candidates(model, 524_288) == [cudnn, flash]
    assert candidates(model, 524_288 + 128) == [cudnn]
    assert best_backend(model, 1024, CPU, torch.float32) is flash
