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
def test_cudnn_expands_gradients_of_grouped_keys(kernel: str, groups: int) -> None:
    """Beside what 32 key/value heads need, 8 of them need dk and dv for 32 heads, and fewer returned gradients."""
    grouped, every = (attention_workspace_bytes(backward(kernel, heads), groups) for heads in (8, 32))
    smaller = 2 * TOKENS * (32 - 8) // groups * 128 * 2
    copies = 2 if kernel == "te-fused" else 1  # transformer-engine also copies keys and values
    assert grouped - every == 2 * query_bytes(groups) - copies * smaller
