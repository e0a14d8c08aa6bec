"""Products in FP8 on a GPU: the step that a CPU plays with the same kernels."""

from typing import Any

import pytest
import torch

from memo_sim.contract.plan import Kernels
from tests.exec_cpu.small import batch, decide, llama, one_step

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(
        not torch.cuda.is_available() or torch.cuda.get_device_capability()[0] != 9, reason="needs an H100 or H200"
    ),
]
IN_FP8: dict[str, Any] = {"dtype": "bf16", "fp8": "tensor", "fp8_layouts": "tn", "recompute": "none"}


PARTS = {"recompute": "tokenwise", "swapped_tokens": 128}


@pytest.mark.parametrize("policy", [{}, PARTS], ids=["kept", "rows with two scales"])
def test_a_step_in_fp8_is_that_of_the_cpu(policy: dict[str, Any]) -> None:
    on_cpu = decide(llama(layers=2), **(IN_FP8 | policy))
    on_gpu = decide(llama(layers=2), kernels=Kernels(attention="torch-flash"), **(IN_FP8 | policy))
    batches = batch(on_cpu)
    wanted, true = one_step(on_cpu, batches)
    record, found = one_step(on_gpu, batches, device="cuda")
    assert record.loss == pytest.approx(wanted.loss, rel=1e-2)
    for name, value in true.items():
        assert float((found[name].cpu() - value).norm() / value.norm()) <= 0.25, name
