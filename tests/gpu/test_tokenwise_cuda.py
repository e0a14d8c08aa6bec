"""``tokenwise`` on a CUDA device, with streams as lanes and a pinned slab. Not yet run on a GPU."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

import memo_exec
from tests.exec_cpu.decoder_layers.small_models import equal, keep_cut, small_model, token_ids

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
TOKENS, LAYERS = 8192, 8
SHAPE = {"hidden_size": 1024, "intermediate_size": 2816, "num_hidden_layers": LAYERS, "num_attention_heads": 16}


@pytest.fixture(autouse=True)
def deterministic(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)


def model() -> Any:
    return small_model("llama", torch.bfloat16, **SHAPE, num_key_value_heads=4, head_dim=64).cuda()


def step(of: Any, ids: Tensor) -> tuple[dict[str, Tensor], int]:
    """Return gradients, and the peak of device memory above what there was before."""
    of.zero_grad()
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    of(input_ids=ids, labels=ids).loss.backward()
    torch.cuda.synchronize()
    found = {name: p.grad.clone() for name, p in of.named_parameters()}
    return found, torch.cuda.max_memory_allocated() - before


@pytest.mark.parametrize("alpha", [0.0, 0.3, 1.0])
def test_gradients_and_memory(alpha: float) -> None:
    of, ids = model(), token_ids(tokens=TOKENS).cuda()
    kept = keep_cut(of, alpha)
    wanted, most = step(of, ids)
    saved_bytes = kept.report().kept_bytes
    kept.undo()
    own = memo_exec.tokenwise(of, alpha=alpha).memo_tokenwise
    for _ in range(3):  # the first copies into pageable memory
        found, peak = step(of, ids)
        assert equal(found, wanted)
    report = own.report()
    assert report.restored_bytes == report.swapped_bytes
    assert own.host_bytes >= report.swapped_bytes
    # Two layers' tensors are resident, and those of at most three more come and go.
    assert peak < most - (LAYERS - 5) / LAYERS * saved_bytes


def test_a_busy_device_changes_nothing() -> None:
    """Copies wait for compute and compute for copies, whichever is late."""
    of, ids = model(), token_ids(tokens=TOKENS).cuda()
    own = memo_exec.tokenwise(of, alpha=0.5, resident_layers=0, debug=True).memo_tokenwise
    wanted, _ = step(of, ids)
    for layer in of.model.layers:
        layer.register_forward_hook(lambda *_: torch.cuda._sleep(20_000_000))
    found, _ = step(of, ids)
    assert equal(found, wanted)
    assert own.report().restored_bytes == own.report().swapped_bytes
