"""What torch's flash attention copies in backward is what the program counts."""

from types import SimpleNamespace

import pytest
import torch

from memo_exec.kernels import attention
from memo_exec.kernels.attention_backend import AttentionBackward, heads_first
from memo_sim.contract.plan import Kernels
from memo_sim.program.ir.work import Attention
from memo_sim.program.operators.workspaces import attention_workspace_bytes
from tests.exec_cpu.kernels.hand_call import play
from tests.exec_cpu.small import decide, llama

TOKENS, HEADS, KV_HEADS, SIZE = 128, 4, 2, 16


@pytest.mark.parametrize("batch", [1, 2])
@pytest.mark.parametrize("groups", [1, 2])
def test_copies_of_output_and_gradient(batch: int, groups: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """aten exchanges tokens and heads back, then makes both tensors contiguous, group by group."""
    copied: list[int] = []

    def backward(call: AttentionBackward) -> None:
        given = [tensor.transpose(1, 2) for tensor in heads_first(call.grad, call.out)]
        copied.append(sum(tensor.nbytes for tensor in given if not tensor.is_contiguous()))

    monkeypatch.setattr(attention, "import_module", lambda name: SimpleNamespace(backward=backward))
    rows, width = batch * TOKENS, (HEADS + 2 * KV_HEADS) * SIZE
    work = Attention(batch, TOKENS, TOKENS, "causal", HEADS, KV_HEADS, SIZE, True, "torch-flash", "bf16")
    kernels = Kernels(attention="torch-flash", head_groups=groups)

    def zeros(features: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
        return torch.zeros(rows, features, dtype=dtype)

    tensors: dict[str, torch.Tensor | None] = {
        "qkv": zeros(width),
        "grad": zeros(HEADS * SIZE),
        "out": zeros(HEADS * SIZE),
        "lse": zeros(HEADS, torch.float32),
        "grad_qkv": zeros(width),
    }
    play("attention.bwd", decide(llama(), dtype="bf16", kernels=kernels), tensors, work=work)
    own = Attention(batch, TOKENS, TOKENS, "causal", HEADS, KV_HEADS, SIZE, True, "flash2", "bf16")
    returned = rows * width // groups * 2
    counted = attention_workspace_bytes(work, groups) - attention_workspace_bytes(own, groups) - returned
    assert copied == [counted] * groups
