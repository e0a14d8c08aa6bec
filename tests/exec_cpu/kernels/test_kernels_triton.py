"""Triton's row-wise kernels give the results of the plain ones and of autograd, in Triton's interpreter on a CPU.

Set ``TRITON_INTERPRET=1`` and install Triton to run these tests; they are skipped otherwise. On a GPU,
tests/gpu/test_kernels_cuda.py makes the same comparison with compiled kernels.
"""

from __future__ import annotations

import importlib
import importlib.util
import os
from typing import Any

import msgspec
import pytest
import torch

from memo_exec.kernels import KERNELS
from memo_sim.contract.documents import Documents
from memo_sim.contract.knobs import RowwiseKernel
from memo_sim.contract.layer_shape import LayerRun, LayerShape
from memo_sim.contract.model import Model
from memo_sim.contract.plan import Kernels, Layout
from memo_sim.contract.rope_scaling import RopeScaling
from memo_sim.program.ir.work import Rotary
from memo_sim.program.layout.swap_format import packed_features
from memo_sim.program.operators import workspaces as table
from tests.exec_cpu.kernels import rowwise_comparison as comparison
from tests.exec_cpu.kernels.hand_call import play
from tests.exec_cpu.kernels.linear_loss_comparison import Trial
from tests.exec_cpu.small import decide, gpt, llama, one_step

pytestmark = [
    pytest.mark.triton,
    pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="needs Triton"),
    pytest.mark.skipif(os.environ.get("TRITON_INTERPRET") != "1", reason="needs TRITON_INTERPRET=1"),
]
CUT_TWICE = 2.0**-6
"""Error of a bf16 gradient: its logits' are cut by Triton's interpreter, and their products rounded on a CPU."""


@pytest.mark.parametrize("name", comparison.NAMES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_fused_kernels_match_the_plain_ones(name: str, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(table, "NORM_PROGRAMS", 7)
    rounding = comparison.CUT if dtype == torch.bfloat16 else comparison.ROUNDING[dtype]
    assert comparison.faults(name, dtype=dtype, device="cpu", rounding=rounding) == []


@pytest.mark.parametrize(
    "name", ["layer_norm", "rms_norm.bwd", "gelu.bwd", "swiglu", "rotary", "qk_norm.bwd", "cross_entropy"]
)
def test_the_comparison_finds_a_wrong_kernel(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The planted fault changes one element of the first result by 5 % of the largest."""
    plain = comparison.Trial.played

    def faulty(trial: comparison.Trial, rowwise: str, dtype: torch.dtype, device: str) -> dict[str, torch.Tensor]:
        found = plain(trial, rowwise, dtype, device)  # type: ignore[arg-type]
        if rowwise == "triton":
            first = found[trial.written[0]]
            first.view(-1)[0] = first.view(-1)[0] + 0.05 * first.abs().max()
        return found

    monkeypatch.setattr(comparison.Trial, "played", faulty)
    assert comparison.faults(name, dtype=torch.bfloat16, device="cpu", rounding=comparison.CUT)


@pytest.mark.parametrize(
    "model", [gpt(layers=1), llama(layers=1), llama(layers=1, qk_norm=True)], ids=["gpt", "llama", "qwen3"]
)
def test_a_step_with_fused_kernels_gives_the_gradients_of_one_without(model: Model) -> None:
    decisions = decide(model, recompute="full", micro_batch=1)
    kernels = msgspec.structs.replace(decisions.kernels, rowwise="triton")
    plain, wanted = one_step(decisions)
    fused, found = one_step(msgspec.structs.replace(decisions, kernels=kernels))
    assert fused.loss == pytest.approx(plain.loss, rel=1e-5)
    for name, value in wanted.items():
        assert float((found[name] - value).norm() / value.norm()) < 1e-4, name


@pytest.mark.parametrize("chunk", [0, 48])
@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_the_fused_loss_writes_its_gradient_over_the_logits(dtype: str, chunk: int) -> None:
    """Played as on a GPU; the workspace is that of torch's kernel, which is larger."""
    fields = {"micro_batch": 1, "dtype": dtype, "loss_chunk_tokens": chunk}
    plain, wanted = one_step(decide(llama(layers=1), **fields))
    triton_loss = importlib.import_module("memo_exec.kernels.triton_loss")
    kernels = {**KERNELS, "cross_entropy.fused": triton_loss.cross_entropy}
    fused, found = one_step(decide(llama(layers=1), loss="fused", **fields), kernels=kernels)
    assert fused.loss == pytest.approx(plain.loss, rel=1e-5)
    for name, value in wanted.items():
        assert float((found[name] - value).norm() / value.norm()) < (1e-4 if dtype == "fp32" else 1e-2), name


@pytest.fixture
def small_tiles(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tiles of the vocabulary, splits and blocks that small operands have several of, the last ones cut off."""
    kernels = importlib.import_module("memo_exec.kernels.triton_linear_loss")
    monkeypatch.setattr(table, "LOSS_COLUMNS", 40)
    monkeypatch.setattr(table, "LOSS_COLUMNS_GRANULE", 16)
    for module in (table, kernels):
        monkeypatch.setattr(module, "LOSS_SPLIT_COLUMNS", 32)
    for size in ("ROWS", "COLUMNS", "FEATURES"):
        monkeypatch.setattr(kernels, size, 16)


@pytest.mark.usefixtures("small_tiles")
@pytest.mark.parametrize(("dtype", "most"), [(torch.float32, 1e-5), (torch.bfloat16, CUT_TWICE)])
@pytest.mark.parametrize("size", [1.0, 100.0])
@pytest.mark.parametrize(("vocab", "tp"), [(97, 1), (64, 2), (97, 4), (5, 4), (3, 8)])
def test_a_loss_with_the_classifier_inside_is_autograds(
    vocab: int, tp: int, size: float, dtype: torch.dtype, most: float
) -> None:
    """Over a divided vocabulary, with masked tokens, and with logits whose exponentials overflow."""
    found = Trial("triton", vocab, tp, dtype, size).errors()
    assert max(found.values()) < most, found


@pytest.mark.usefixtures("small_tiles")
@pytest.mark.parametrize("chunk", [0, 48])
@pytest.mark.parametrize("model", [gpt(layers=1), llama(layers=1)], ids=["tied", "untied"])
def test_a_step_whose_loss_has_the_classifier_inside_has_the_gradients_of_one_without(model: Model, chunk: int) -> None:
    fields = {"micro_batch": 1, "loss_chunk_tokens": chunk}
    plain, wanted = one_step(decide(model, **fields))
    inside, found = one_step(decide(model, loss="linear-triton", **fields))
    assert inside.loss == pytest.approx(plain.loss, rel=1e-6)
    for name, value in wanted.items():
        assert float((found[name] - value).norm() / value.norm()) < 1e-5, name


@pytest.mark.parametrize("features", [1, 5, 64, 130])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_rows_rounded_for_the_host_have_torchs_bits(
    features: int, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Numbers over ten decades, subnormal ones, rows of zeros and of tiny numbers; several blocks a row."""
    monkeypatch.setattr(importlib.import_module("memo_exec.kernels.triton_swap_rounding"), "COLUMNS", 64)
    generator = torch.Generator().manual_seed(features)
    x = torch.randn(50, features, generator=generator) * 10 ** (6 * torch.rand(50, features, generator=generator) - 5)
    x[3], x[4], x[5, 0] = 0.0, 1e-30, -1e30
    found: dict[RowwiseKernel, tuple[torch.Tensor, torch.Tensor]] = {}
    for rowwise in ("torch", "triton"):
        decisions = decide(llama(), kernels=Kernels(attention="torch-flash-cpu", rowwise=rowwise))
        packed = torch.zeros(50, packed_features(features), dtype=torch.uint8)
        back, room = torch.zeros(50, features, dtype=dtype), 4 * 50 * features
        play("swap.round", decisions, {"x": x.to(dtype), "out": packed}, workspace_bytes=room)
        play("swap.widen", decisions, {"x": packed, "out": back}, workspace_bytes=room)
        found[rowwise] = packed, back
    assert torch.equal(found["triton"][0], found["torch"][0])
    wanted, back = (found[rowwise][1].float() for rowwise in ("torch", "triton"))
    # Triton's interpreter cuts bf16 numbers, whereas a GPU rounds them.
    assert bool(((back - wanted).abs() <= wanted.abs() * (0 if dtype == torch.float32 else 2.0**-7)).all())


@pytest.mark.parametrize("case", ["documents", "last of a million tokens", "a base of its own", "yarn", "9 heads"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_rotary_needs_no_tables(case: str, dtype: torch.dtype) -> None:
    """The fused kernel plays without a workspace, and turns each row as torch's kernel does, wherever it stands."""
    theta = 0.0
    fields: dict[str, Any] = {"model": llama(layers=1), "seq_tokens": 256, "micro_batch": 1}
    rows, first = 12, 90
    match case:
        case "documents":
            fields["documents"] = Documents(lengths=((3, 1), (5, 1)))
        case "last of a million tokens":
            fields |= {"seq_tokens": 2**20}
            first = 2**20 - rows
        case "a base of its own":
            theta = 1e6
            pattern = (LayerRun(shape=LayerShape(ffn_hidden=160, rope_theta=theta)),)
            fields["model"] = llama(layers=1, layer_pattern=pattern)
        case "yarn":
            scaling = RopeScaling(kind="yarn", factor=4.0, original_max_positions=64, attention_factor=1.2)
            fields["model"] = llama(layers=1, rope_scaling=scaling)
        case "9 heads":
            fields["model"] = llama(layers=1, heads=6, kv_heads=3, head_dim=24)
    model = fields["model"]
    heads, width = model.heads + model.kv_heads, model.q_width + 2 * model.kv_width
    packed = torch.randn(rows, width, generator=torch.Generator().manual_seed(0)).to(dtype)
    name = "fp32" if dtype == torch.float32 else "bf16"
    for op, role in (("rotary", "qkv"), ("rotary.bwd", "grad")):
        found: dict[RowwiseKernel, torch.Tensor] = {}
        for rowwise in ("torch", "triton"):
            decisions = decide(dtype=name, kernels=Kernels(attention="torch-flash-cpu", rowwise=rowwise), **fields)
            room = table.rotary_workspace_bytes(rows, heads, model.head_dim, name) if rowwise == "torch" else 0
            work = Rotary(op, rows, 0, 0, theta=theta)
            call = play(op, decisions, {role: packed.clone()}, work=work, first=first, workspace_bytes=room)
            found[rowwise] = call[role].float()
        error = float((found["triton"] - found["torch"]).abs().max() / found["torch"].abs().max())
        assert error < (2e-6 if dtype == torch.float32 else comparison.CUT), op
        assert not torch.equal(found["triton"], packed.float())


@pytest.mark.parametrize("distance", [-200.0, -3.0, 0.0, 200.0])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_partial_attention_is_merged_in_one_pass(dtype: torch.dtype, distance: float) -> None:
    """Parts that are the late half of each of two sequences, far apart, and one with no key at all."""
    heads, size, rows = 3, 24, 10
    out, part = (torch.randn(n, heads * size, generator=torch.Generator().manual_seed(n)) for n in (2 * rows, rows))
    lse, part_lse = (torch.randn(n, heads, generator=torch.Generator().manual_seed(n)) for n in (2 * rows, rows))
    part_lse += distance
    part_lse[4] = -torch.inf
    lse[17] = -torch.inf
    model, found = llama(layers=1, heads=heads, kv_heads=1, head_dim=size), dict[RowwiseKernel, list[torch.Tensor]]()
    for rowwise in ("torch", "triton"):
        fields: dict[str, Any] = {"micro_batch": 2, "dtype": "fp32" if dtype == torch.float32 else "bf16"}
        kernels = Kernels(attention="torch-flash-cpu", rowwise=rowwise)
        decisions = decide(model, layout=Layout(cp=2), kernels=kernels, **fields)
        whole = [out.to(dtype).clone(), lse.clone()]
        operands = {"part": part.to(dtype), "part_lse": part_lse, "out": whole[0], "lse": whole[1]}
        play("attention.merge", decisions, operands)
        found[rowwise] = [tensor.float() for tensor in whole]
    for mine, torchs in zip(found["triton"], found["torch"], strict=True):
        assert bool(mine.isfinite().all())
        assert float((mine - torchs).abs().max()) < (2e-5 if dtype == torch.float32 else 0.05)
    assert torch.equal(found["triton"][0][:5], out.to(dtype).float()[:5])  # the early half is no part's
