"""What the benchmark of framework kernels times, on small tensors, and the curves made from its file."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.nn import functional
from torch.nn.attention import SDPBackend

from benchmarks.frameworks import layers, rowwise
from benchmarks.frameworks.curves import COMPILED, EAGER, curves

MEASURED = Path(__file__).parents[2] / "reports" / "h100_2026-11-22" / "frameworks.json"
HBM_BYTES_PER_S = 3.35e12
"""The H100's data sheet."""
CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def measured() -> dict[str, Any]:
    found: dict[str, Any] = json.loads(MEASURED.read_text())
    return found


def test_norms_written_out_are_the_norms_of_torch() -> None:
    x, weight = torch.randn(64, 256), torch.rand(256)
    close = torch.testing.assert_close
    close(rowwise.rms_norm_written(x, weight), functional.rms_norm(x, (256,), weight, eps=1e-5))
    close(rowwise.layer_norm_fp32(x, weight, weight), functional.layer_norm(x, (256,), weight, weight))


def test_both_rotaries_turn_by_the_same_angle() -> None:
    angle = torch.rand(8, rowwise.HEAD_DIM // 2)
    q = torch.randn(8, rowwise.HEAD_DIM)
    written = rowwise.rotary_written(q, torch.cat((angle, angle), -1).cos(), torch.cat((angle, angle), -1).sin())
    # Hugging Face turns the two halves of a head against each other, torchtitan neighbours.
    neighbours = torch.stack(q.chunk(2, -1), -1).flatten(-2)
    turned = rowwise.rotary_complex(neighbours, torch.polar(torch.ones_like(angle), angle))
    torch.testing.assert_close(torch.cat((turned[:, 0::2], turned[:, 1::2]), -1), written)


def test_every_subject_runs_forward_and_backward() -> None:
    found = list(rowwise.run(CPU, 128, 256, compiled=False))
    assert len({each.subject for each in found}) == 2 * (len(rowwise.SUBJECTS) + 2)
    assert all(each.seconds > 0 and each.host_s > 0 for each in found)


@pytest.mark.parametrize("family", ["gpt", "llama"])
@pytest.mark.parametrize("checkpointed", [False, True])
def test_a_layer_runs(family: str, checkpointed: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(layers, "BACKENDS", {"flash": SDPBackend.MATH})
    shape = layers.Shape(family, 256, 512, 2, 2 if family == "gpt" else 1, 64, 2, checkpointed=checkpointed)
    assert layers.run(shape, CPU, 0.0)["layer_s"]


@pytest.mark.parametrize("library", ["eager", "compiled"])
def test_curves_stay_below_the_data_sheet(measured: dict[str, Any], library: str) -> None:
    found = curves(measured, library)
    assert {"elementwise", "norm", "norm_backward", "strided"} <= found.keys()
    for moved, rates in found.values():
        assert moved == sorted(moved)
        assert all(0.5e12 < rate < HBM_BYTES_PER_S for rate in rates)


def test_the_sum_of_kernels_is_the_time_of_the_subject(measured: dict[str, Any]) -> None:
    """Every kernel of these subjects is read, so bytes / curve is the measured time but for the host's gaps."""
    read = {r.subject for r in EAGER} & {r.subject for r in COMPILED}
    for row in measured["rowwise"]:
        if row["subject"] in read and row["subject"].endswith("forward"):
            assert sum(k["launches"] * k["seconds"] for k in row["kernels"]) == pytest.approx(row["seconds"], rel=0.25)


def test_a_kernel_that_is_not_there_is_an_error(measured: dict[str, Any]) -> None:
    gone = {**measured, "rowwise": [{**row, "kernels": []} for row in measured["rowwise"]]}
    with pytest.raises(ValueError, match="no kernel of"):
        curves(gone, "eager")
