"""A sequence in subsequences on one CUDA device.

Every policy gives the bits of keep, gradients match those of the unsplit sequence, and the peak falls as predicted. Not
yet run on a GPU.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch

from memo_exec.interpreter.interpreter import Interpreter
from memo_exec.interpreter.record import StepRecord
from memo_exec.training import weights
from memo_sim.contract.plan import Decisions, Kernels, Layout
from memo_sim.program.lower import lower
from tests.exec_cpu.small import batch, decide, gradients, llama, scalars

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
TOKENS, PARTS = 700, 3
"""The subsequences have 384, 256 and 60 tokens."""

MIXED: dict[str, Any] = {"swapped_tokens": 572, "subsequence_swapped_tokens": (384, 128, 60)}
POLICIES: list[dict[str, Any]] = [
    {"recompute": "full"},
    {"swapped_tokens": TOKENS},
    MIXED,
    {"recompute": "tokenwise"},
    {"recompute": "tokenwise", **MIXED},
    {"offload_window": 1, **MIXED},
    {"recompute": "tokenwise", "offload_window": 1, **MIXED},
]


def on_cuda(parts: int, tokens: int = TOKENS, **changes: Any) -> Decisions:
    fields: dict[str, Any] = {"dtype": "bf16", "kernels": Kernels(attention="torch-flash"), "deterministic": True}
    fields |= {"layout": Layout(subsequences=parts), "seq_tokens": tokens, "micro_batch": 1, "global_batch": 2}
    return decide(llama(layers=5, heads=2, kv_heads=1, head_dim=64, hidden=128), **(fields | changes))


def step(decisions: Decisions, **options: Any) -> tuple[StepRecord, dict[str, torch.Tensor], int]:
    """Return the record and the gradients of a second step, and the peak of bytes allocated by torch in it."""
    with Interpreter(decisions, lower(decisions)[0], device="cuda", **options) as interpreter:
        weights.initialize(interpreter, seed=1)
        batches = batch(decisions)
        for number in (1, 2):
            torch.cuda.reset_peak_memory_stats()
            record = interpreter.run_step(batches, scalars(batches, step=number, lr=0.0))
        return record, gradients(interpreter), torch.cuda.max_memory_allocated()


@pytest.mark.parametrize("policy", POLICIES, ids=str)
def test_policies_give_the_bits_of_keep(policy: dict[str, Any]) -> None:
    kept, wanted, _ = step(on_cuda(PARTS))
    record, found, _ = step(on_cuda(PARTS, **policy), debug=True)
    assert record.loss == kept.loss
    assert [name for name in wanted if not torch.equal(found[name], wanted[name])] == []


def test_gradients_are_those_of_the_unsplit_sequence() -> None:
    """The difference is at most twice bf16's error (which is 1 % against fp32 on a CPU)."""
    _, wanted, _ = step(on_cuda(1))
    _, found, _ = step(on_cuda(PARTS))
    for name, value in wanted.items():
        assert float((found[name] - value).norm() / value.norm()) < 0.02, name


def test_more_subsequences_cut_the_peak_as_predicted() -> None:
    """With all tokens swapped, the two rounding buffers have the size of a subsequence, not of the sequence."""
    peaks = []
    for parts in (1, 2, 8):
        decisions = on_cuda(parts, 2**15, swapped_tokens=2**15, loss_chunk_tokens=4096)
        record, _, handed_out = step(decisions)
        assert record.peak_device_bytes <= handed_out <= record.peak_device_bytes * 1.05 + 2**24
        peaks.append(record.peak_device_bytes)
    assert peaks[0] > 1.3 * peaks[1] > 1.3 * peaks[2]
