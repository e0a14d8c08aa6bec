"""Weights in FP8 alone: copies are made of master weights at the start, by the optimizer, and when a run resumes."""

from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from memo_exec.commands.run import run
from memo_exec.commands.run_options import RunOptions
from memo_exec.interpreter.interpreter import Interpreter
from memo_exec.kernels import fp8_blocks
from memo_exec.training import checkpoint, weights
from memo_sim.contract.errors import BadInput
from memo_sim.contract.experts import Experts
from memo_sim.contract.model import Model
from memo_sim.contract.plan import Decisions
from memo_sim.program.analysis.columns import expand
from memo_sim.program.analysis.liveness import live_bytes, liveness, peak
from memo_sim.program.layout import fp8
from memo_sim.program.layout.parameters import layer_block
from memo_sim.program.lower import lower
from tests.exec_cpu.plans import byte_decisions, write_plan
from tests.exec_cpu.small import batch, decide, gradients, llama, play, scalars
from tests.refusals import refused

SIZES: dict[str, Any] = {"hidden": 128, "heads": 4, "kv_heads": 4, "head_dim": 32, "ffn_hidden": 256}
ALONE: dict[str, Any] = {"dtype": "bf16", "fp8": "block", "fp8_layouts": "tn", "recompute": "none", "fp8_params": True}
DENSE = llama(layers=2, **SIZES)
EXPERTS = llama(layers=1, experts=Experts(count=4, per_token=2, hidden=128, shared=128), **SIZES)


def values(interpreter: Interpreter, columns: bool = False) -> dict[str, Tensor]:
    """Return what the FP8 copies of the first layer's weights stand for, or the transposed copies."""
    decisions, scales = interpreter.decisions, interpreter.context.fp8
    assert scales is not None
    flat, found = interpreter.buffer("params_fp8_columns.layer" if columns else "params_fp8.layer"), {}
    for weight in fp8.weights(decisions, layer_block(decisions.model, 1, decisions.model.layer(0))):
        copy = flat[weight.first : weight.first + weight.elements]
        shape = weight.shape[::-1] if columns else weight.shape
        if decisions.fp8 == "block":
            value = fp8_blocks.values(fp8_blocks.weight_blocks(scales, copy, *shape))
        else:
            value = copy.view(shape).float() * scales.of(copy)
        found[f"layer.0/{weight.name}"] = value.t() if columns else value
    return found


def rounded(master: Tensor, recipe: str) -> Tensor:
    """Return a weight as its FP8 copy has it."""
    if recipe == "tensor":
        scale = master.abs().max() / 448
        return (master / scale).to(torch.float8_e4m3fn).float() * scale
    tiles = master.view(master.shape[0] // 128, 128, -1, 128)
    scale = torch.exp2(torch.ceil(torch.log2(tiles.abs().amax((1, 3), keepdim=True) / 448)))
    return ((tiles / scale).to(torch.float8_e4m3fn).float() * scale).view(master.shape)


@pytest.mark.parametrize(
    ("model", "recipe"),
    [
        pytest.param(DENSE, "block", id="block"),
        pytest.param(EXPERTS, "block", id="experts"),
        pytest.param(llama(layers=1), "tensor", id="tensor", marks=pytest.mark.slow),
    ],
)
def test_a_step_is_that_of_copies_beside_bf16_and_masters_are_quantised_after_it(model: Model, recipe: str) -> None:
    """Masters that are bf16 numbers have the FP8 copies of the bf16 weights, and so the same loss and gradients."""
    alone = decide(model, **(ALONE | {"fp8": recipe, "fp8_experts": model.mixture is not None}))
    beside = msgspec.structs.replace(alone, fp8_params=False)
    batches = batch(alone)
    with play(beside) as interpreter:
        started = {name: value.clone() for name, value in weights.named_parameters(interpreter).items()}
        wanted_loss = interpreter.run_step(batches, scalars(batches, lr=1e-2)).loss
        wanted = gradients(interpreter)
        masters = {held.name: held.view.clone() for held in weights.held_by(interpreter, "master")}
    (program,) = lower(alone)
    with play(alone, program, debug=True) as interpreter:
        for found in weights.by_name(interpreter).values():
            for held in found:
                held.view.copy_(started[held.name])
        record = interpreter.run_step(batches, scalars(batches, lr=1e-2))
        assert record.loss == wanted_loss
        assert all(torch.equal(value, wanted[name]) for name, value in gradients(interpreter).items())
        now = {held.name: held.view for held in weights.held_by(interpreter, "master")}
        assert all(torch.equal(now[name], master) for name, master in masters.items())
        for name, value in values(interpreter).items():
            assert torch.equal(value, rounded(masters[name], recipe)), name
        assert record.peak_device_bytes <= peak(live_bytes(liveness(program, expand(program)), device=True)).bytes
        interpreter.run_step(batches, scalars(batches, lr=0.0, step=2))
        turned = values(interpreter, columns=True)
        assert all(torch.equal(value, turned[name]) for name, value in values(interpreter).items())


@pytest.fixture
def on_a_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let runs in FP8 begin on a CPU, whose kernels tests alone use."""
    monkeypatch.setattr("memo_exec.machine.preflight.check_fp8", lambda *given: None)
    monkeypatch.setattr("memo_exec.machine.preflight.library_scratch", lambda *given: {})


def plan(**changes: Any) -> Decisions:
    return byte_decisions(model=llama(layers=1, vocab=256, **SIZES), swapped_tokens=0, **(ALONE | changes))


def losses(path: Path, **options: Any) -> list[float]:
    outcome = run(path, RunOptions(**options))
    assert outcome is not None
    return outcome.comparison.losses


@pytest.mark.slow
@pytest.mark.usefixtures("on_a_cpu")
def test_a_resumed_run_goes_on_with_copies_of_its_masters(tmp_path: Path) -> None:
    path = write_plan(tmp_path / "plan.json", plan())
    whole = losses(path, steps=4, save=tmp_path / "whole")
    losses(path, steps=2, save=tmp_path / "run")
    assert losses(path, steps=4, save=tmp_path / "run", resume=True) == whole
    # What Hugging Face reads are the masters, rounded to bf16; so is what several ranks read from a checkpoint.
    written = load_file(tmp_path / "run/weights/model.safetensors")
    assert {value.dtype for value in written.values()} == {torch.bfloat16}
    saved = checkpoint.latest(tmp_path / "run")
    assert saved is not None
    with Interpreter(plan(), lower(plan())[0]) as interpreter:
        whole_parameters = checkpoint.parameters(saved, interpreter)
    wanted = whole_parameters["layer.0/proj.weight"]
    assert torch.equal(written["model.layers.0.self_attn.o_proj.weight"], wanted)
    # The other plan lacks what this run has stored as masters alone; the other way round nothing is missing.
    beside = write_plan(tmp_path / "beside.json", plan(fp8_params=False))
    with refused(BadInput, got="--fp8-params"):
        losses(beside, steps=5, save=tmp_path / "run", resume=True)
    losses(beside, steps=2, save=tmp_path / "other")
    assert len(losses(path, steps=3, save=tmp_path / "other", resume=True)) == 3
