"""Scratch of attention's backward, by what each library copies and sums."""

import pytest

from memo_sim.contract.units import GIB
from memo_sim.program.ir.work import Attention
from memo_sim.program.operators.workspaces import attention_workspace_bytes

TOKENS = 131_072


def backward(kernel: str, kv_heads: int = 8) -> Attention:
    """Return one layer's backward of an 8B Llama."""
    return Attention(1, TOKENS, TOKENS, "causal", 32, kv_heads, 128, True, kernel, "bf16")


def query_bytes(groups: int) -> int:
    return TOKENS * 32 // groups * 128 * 2


def test_torchs_flash_copies_output_and_gradient_of_some_heads() -> None:
    """flash-attn's own call takes views of some heads as they are, torch's copies them; both return or take dq, dk, dv.

    At 131,072 tokens in four groups the copies take half a GiB.
    """
    for groups in (2, 4, 8):
        returned = query_bytes(groups) + 2 * TOKENS * 8 // groups * 128 * 2
        torchs, own = (attention_workspace_bytes(backward(kernel), groups) for kernel in ("torch-flash", "flash2"))
        assert torchs - own == returned + 2 * query_bytes(groups)
    assert 2 * query_bytes(4) == GIB // 2


def test_torchs_flash_copies_nothing_of_all_heads() -> None:
    returned = query_bytes(1) + 2 * TOKENS * 8 * 128 * 2
    torchs, own = (attention_workspace_bytes(backward(kernel), 1) for kernel in ("torch-flash", "flash2"))
    assert torchs - own == returned


@pytest.mark.parametrize("kernel", ["torch-cudnn", "te-fused"])
@pytest.mark.parametrize("groups", [1, 4])
def test_cudnn_takes_no_gradients_of_all_heads_for_grouped_keys(kernel: str, groups: int) -> None:
    """Fewer key/value heads only make the returned gradients smaller, and transformer-engine's copies."""
    grouped, every = (attention_workspace_bytes(backward(kernel, heads), groups) for heads in (8, 32))
    smaller = 2 * TOKENS * (32 - 8) // groups * 128 * 2
    assert every - grouped == (2 if kernel == "te-fused" else 1) * smaller
