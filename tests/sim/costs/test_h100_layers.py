"""Whole layers that were measured on an H100, against the sum of the prices of the same layer's instructions.

Only two things in the profile are from these layers: ``sustained_gemm``, the median of their products' rates, and seven
rows of attention at their batch and heads.
"""

import json
from pathlib import Path
from statistics import fmean
from typing import Any

import pytest

from memo_sim.contract.catalog import load_cluster
from memo_sim.contract.knobs import RowwiseKernel
from memo_sim.contract.model import Model
from memo_sim.contract.plan import Decisions, Kernels, Layout
from memo_sim.costs.pricing import Pricer
from memo_sim.program.ir.instruction import Lane
from memo_sim.program.ir.work import Rowwise
from memo_sim.program.lower import lower

MEASURED = Path(__file__).parents[3] / "reports" / "h100_2026-11-22" / "frameworks.json"
OUTSIDE_A_LAYER = ("adamw", "zero", "grad_norm")
LARGEST = 10
"""Layers 0 to 9; the last one is so small that the host sets its time."""


@pytest.fixture(scope="module")
def layers() -> list[dict[str, Any]]:
    found = json.loads(MEASURED.read_text())
    return [found[f"layer {i}"] for i in range(LARGEST)]


def predicted(layer: dict[str, Any]) -> float:
    """Return the seconds of the middle one of three layers, forward, recompute and backward."""
    gpt = layer["family"] == "gpt"
    model = Model(
        name="layer",
        family=layer["family"],
        layers=3,
        hidden=layer["hidden"],
        heads=layer["heads"],
        kv_heads=layer["kv_heads"],
        head_dim=layer["hidden"] // layer["heads"],
        ffn_hidden=layer["ffn"],
        vocab=1024,
        tied_embeddings=gpt,
        max_positions=layer["seq"] if gpt else 0,
        qkv_bias=gpt,
        linear_bias=gpt,
        activation="gelu" if gpt else "silu",
    )
    rowwise: RowwiseKernel = "compiled" if layer["compiled"] else "eager"
    decisions = Decisions(
        model=model,
        seq_tokens=layer["seq"],
        micro_batch=layer["sequences"],
        global_batch=layer["sequences"],
        recompute="full" if layer["checkpointed"] else "none",
        kernels=Kernels(attention=f"torch-{layer['attention']}", rowwise=rowwise),
        dtype="bf16",
    )
    (program,) = lower(decisions)
    cluster, hardware = load_cluster("h100-1x8")
    prices = Pricer(hardware, cluster, Layout(), rowwise=rowwise)
    return sum(
        prices.seconds(instruction.work)
        for name, instruction in program.walk()
        if instruction.lane is Lane.COMPUTE and "l1" in name.split("/") and not _outside(instruction.work)
    )


def _outside(work: object) -> bool:
    return isinstance(work, Rowwise) and work.kind in OUTSIDE_A_LAYER


def test_layers_take_as_long_as_measured(layers: list[dict[str, Any]]) -> None:
    errors = [predicted(layer) / layer["layer_s"] - 1 for layer in layers]
    assert max(map(abs, errors)) < 0.07
    assert fmean(map(abs, errors)) < 0.035
    assert abs(fmean(errors)) < 0.03


def test_compiling_gains_as_much_as_measured(layers: list[dict[str, Any]]) -> None:
    """The Llama layer: eager 56.8 ms, compiled 46.9 ms."""
    eager, compiled = layers[0], layers[8]
    gain = predicted(eager) / predicted(compiled)
    assert gain == pytest.approx(eager["layer_s"] / compiled["layer_s"], rel=0.03)
