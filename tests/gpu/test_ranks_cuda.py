"""Layouts over NCCL with one GPU per rank give the results of one GPU. Not yet run: needs two or four GPUs."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from memo_sim.contract.plan import Kernels, Layout
from tests.exec_cpu.plans import byte_decisions
from tests.exec_cpu.small import gpt
from tests.exec_cpu.training.torchrun import losses_of

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices"),
]
STEPS = 5
LAYOUTS = {
    "tp2-sp": Layout(tp=2, sequence_parallel=True),
    "dp2-zero3": Layout(dp=2, zero=3),
    "cp2": Layout(cp=2),
    "cp2-gathered": Layout(cp=2, cp_exchange="all_gather"),
    "cp2-rsa": Layout(cp=2, cp_exchange="rsa"),
    "metp2": Layout(metp=2),
    "metp2-dp2-zero3": Layout(metp=2, dp=2, zero=3),
    "ulysses2": Layout(ulysses=2),
    "pp2": Layout(pp=2),
    "pp2-zero-bubble": Layout(pp=2, schedule="zero-bubble"),
    "pp2-subsequences": Layout(pp=2, subsequences=4),
    "pp2-multiplexed": Layout(pp=2, subsequences=2, multiplexed=True),
    "tp2-subsequences": Layout(tp=2, sequence_parallel=True, subsequences=2),
    "tp2-cp2": Layout(tp=2, sequence_parallel=True, cp=2),
    "cp2-pp2": Layout(cp=2, pp=2),
}


@pytest.mark.parametrize("name", LAYOUTS)
def test_ranks_train_as_one_gpu_does(name: str, tmp_path: Path) -> None:
    layout = LAYOUTS[name]
    if layout.devices > torch.cuda.device_count():
        pytest.skip(f"needs {layout.devices} CUDA devices")
    one, several = (
        byte_decisions(
            swapped_tokens=0 if each.subsequences > 1 or each.cp_exchange == "rsa" else 256,
            **({"recompute": "none"} if each.cp_exchange == "rsa" else {}),
            model=gpt(vocab=256, layers=4, heads=4, kv_heads=4, head_dim=64, hidden=256, max_positions=1024),
            seq_tokens=1024,
            global_batch=1 if layout.multiplexed else 4,
            layout=each,
            dtype="bf16",
            kernels=Kernels(attention="torch-flash"),
        )
        for each in (Layout(), layout)
    )
    wanted = losses_of(tmp_path / "one", one, steps=STEPS)
    assert losses_of(tmp_path / "several", several, steps=STEPS) == pytest.approx(wanted, rel=5e-3)
