"""Products in FP8 on a GPU: the step that a CPU plays with the same kernels."""

from typing import Any

import pytest
import torch

from memo_sim.contract.plan import Kernels
from tests.exec_cpu.small import batch, decide, llama, one_step

pytestmark = pytest.mark.gpu
CAPABILITY = torch.cuda.get_device_capability()[0] if torch.cuda.is_available() else 0
IN_FP8: dict[str, Any] = {"dtype": "bf16", "fp8": "tensor", "fp8_layouts": "tn", "recompute": "none"}


PARTS = {"recompute": "tokenwise", "swapped_tokens": 128}


IN_BLOCKS = {"hidden": 256, "head_dim": 64, "ffn_hidden": 512}
SIZES: dict[str, dict[str, int]] = {"tensor": {}, "delayed": {}, "block": IN_BLOCKS, "mx": IN_BLOCKS}
HOPPER = pytest.mark.skipif(CAPABILITY != 9, reason="needs an H100 or H200")
BLACKWELL = pytest.mark.skipif(CAPABILITY < 10, reason="needs a B200")


@pytest.mark.parametrize("policy", [{}, PARTS], ids=["kept", "rows with two scales"])
@pytest.mark.parametrize(
    "recipe",
    [
        pytest.param("tensor", marks=HOPPER),
        pytest.param("delayed", marks=HOPPER),
        pytest.param("block", marks=HOPPER),
        pytest.param("mx", marks=BLACKWELL),
    ],
)
def test_a_step_in_fp8_is_that_of_the_cpu(recipe: str, policy: dict[str, Any]) -> None:
    model, fields = llama(layers=2, **SIZES[recipe]), IN_FP8 | {"fp8": recipe} | policy
    fields |= {"fp8_layouts": "any"} if recipe == "mx" else {}
    on_cpu = decide(model, **fields)
    on_gpu = decide(model, kernels=Kernels(attention="torch-flash"), **fields)
    batches = batch(on_cpu)
    wanted, true = one_step(on_cpu, batches)
    record, found = one_step(on_gpu, batches, device="cuda")
    assert record.loss == pytest.approx(wanted.loss, rel=1e-2)
    for name, value in true.items():
        assert float((found[name].cpu() - value).norm() / value.norm()) <= 0.25, name
