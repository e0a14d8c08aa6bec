"""The simulator gives a layer of Hugging Face's modules the bytes that ``memo_exec.tokenwise`` counts."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import memo_exec
from memo_exec.decoder_layers import LayerBytes
from memo_sim.contract.catalog import load_model
from memo_sim.contract.huggingface import model_from_config
from memo_sim.contract.knobs import DtypeName
from memo_sim.contract.plan import Decisions, Layout
from memo_sim.contract.units import DTYPE_BYTES
from memo_sim.program.ir.instruction import Lane
from memo_sim.program.ir.work import Copy
from memo_sim.program.layers.kinds import skeletal_of
from memo_sim.program.layout.shape import shape_of
from memo_sim.program.layout.skeletal import Fate
from memo_sim.program.lower import lower
from tests.exec_cpu.decoder_layers.small_models import gradients, small_model

TOKENS = 1024
"""With fewer rows, statistics of one number a row are too small to be swapped."""
DTYPES: dict[DtypeName, torch.dtype] = {"bf16": torch.bfloat16, "fp32": torch.float32}


def decided(model: Any, alpha: float, dtype: DtypeName) -> Decisions:
    """Return the plan of a model that swaps what its modules save."""
    return Decisions(
        model=model_from_config(model.config.to_dict(), where="the test", name="small"),
        layout=Layout(),
        seq_tokens=TOKENS,
        recompute="tokenwise" if alpha < 1 else "none",
        swapped_tokens=int(alpha * TOKENS),
        memory_policy="eager",
        modules="huggingface",
        loss="checkpointed",
        loss_chunk_tokens=256,
        dtype=dtype,
    )


def simulated(decisions: Decisions) -> list[LayerBytes]:
    """Return the bytes of each layer: copies of the program, and rows of skeletal tensors that are not copied."""
    (program,) = lower(decisions)
    found = [LayerBytes(layer=n) for n in range(decisions.model.layers)]
    for name, instruction in program.walk():
        if isinstance(instruction.work, Copy):
            layer = found[int(name.split("/l")[1].split("/")[0])]
            layer.swapped_bytes += instruction.work.bytes if instruction.lane is Lane.D2H else 0
            layer.restored_bytes += instruction.work.bytes if instruction.lane is Lane.H2D else 0
    shape = shape_of(decisions)
    for layer in found:
        for tensor in skeletal_of(decisions, shape, decisions.model.layer(layer.layer)):
            if not layer.swapped_bytes:
                layer.kept_bytes += 0 if tensor.for_recompute else tensor.bytes
            elif tensor.fate is Fate.BY_TOKEN:
                left = tensor.tokens - decisions.swapped_tokens
                layer.recomputed_bytes += left * tensor.features * DTYPE_BYTES[tensor.dtype]
    return found


@pytest.mark.parametrize(
    ("family", "alpha", "dtype"),
    [
        ("llama", 0.0, "bf16"),
        ("llama", 0.5, "bf16"),
        ("llama", 0.5, "fp32"),
        ("qwen2", 0.5, "bf16"),
        ("qwen3", 0.25, "bf16"),
        ("qwen3", 0.5, "fp32"),
        ("qwen3", 1.0, "bf16"),
        ("qwen3", 1.0, "fp32"),
    ],
)
def test_a_plan_moves_keeps_and_rebuilds_what_tokenwise_predicts(family: str, alpha: float, dtype: DtypeName) -> None:
    model = small_model(family, DTYPES[dtype])
    own = memo_exec.tokenwise(model, alpha=alpha).memo_tokenwise
    assert simulated(decided(model, alpha, dtype)) == list(own.predict(TOKENS).layers)


def test_a_plan_moves_keeps_and_rebuilds_what_a_step_reports() -> None:
    model = small_model("qwen3", torch.bfloat16)
    own = memo_exec.tokenwise(model, alpha=0.5).memo_tokenwise
    gradients(model, torch.arange(TOKENS)[None] % 128)
    assert simulated(decided(model, 0.5, "bf16")) == list(own.report().layers)


def test_llama3_8b_saves_196_kib_a_token_and_layer() -> None:
    plan = Decisions(
        model=load_model("llama3-8b"),
        layout=Layout(),
        seq_tokens=TOKENS,
        memory_policy="eager",
        modules="huggingface",
    )
    sizes = {tensor.name: tensor for tensor in skeletal_of(plan, shape_of(plan), plan.model.layer(0))}
    rows = [t for t in sizes.values() if not t.statistics and not t.for_recompute]
    assert sum(t.bytes for t in rows) == TOKENS * 196 * 1024
