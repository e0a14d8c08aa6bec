"""Attention over subsequences with carried keys and values, call by call, against a masked softmax and autograd."""

import pytest
import torch
from torch import Tensor

from memo_exec.kernels import KERNELS
from tests.exec_cpu.attention_subsequences import Subsequences
from tests.exec_cpu.hand_call import allocations, play

PARTS = [(48,), (24, 24), (40, 24, 13), (1, 30, 17), (20, 12, 9, 7)]


def close(found: Tensor, wanted: Tensor, tolerance: float = 1e-5) -> None:
    torch.testing.assert_close(found.double(), wanted, rtol=0, atol=tolerance * float(wanted.abs().max()))


@pytest.mark.parametrize("head_groups", [1, 2])
@pytest.mark.parametrize("parts", PARTS, ids=str)
def test_subsequences_are_attention_over_the_whole_sequence(parts: tuple[int, ...], head_groups: int) -> None:
    case = Subsequences(parts, head_groups=head_groups)
    wanted, found = case.reference(), case.played()
    close(found.out, wanted.out)
    close(found.lse, wanted.lse)
    close(found.grad_qkv, wanted.grad_qkv)


def test_bf16_is_as_near_as_its_roundings() -> None:
    case = Subsequences((40, 24, 13), dtype="bf16")
    wanted, found = case.reference(), case.played()
    close(found.out, wanted.out, 2.0**-6)
    close(found.lse, wanted.lse, 1e-3)
    close(found.grad_qkv, wanted.grad_qkv, 2.0**-6)


def test_packed_rows_split_and_joined_are_the_same_rows() -> None:
    case = Subsequences((16, 8))
    width = case.model.q_width
    q, kv, joined = (torch.full((24, n), torch.nan) for n in (width, 2 * case.model.kv_width, case.qkv.shape[1]))
    play("qkv.split", case.decisions, {"qkv": case.qkv, "q": q, "kv": kv})
    assert torch.equal(q, case.qkv[:, :width])
    assert torch.equal(kv, case.qkv[:, width:])
    play("qkv.join", case.decisions, {"grad_q": q, "grad_kv": kv, "grad_qkv": joined})
    assert torch.equal(joined, case.qkv)


def test_queries_alone_can_be_split_off() -> None:
    case = Subsequences((16, 8))
    q = torch.full((24, case.model.q_width), torch.nan)
    play("qkv.split", case.decisions, {"qkv": case.qkv, "q": q})
    assert torch.equal(q, case.qkv[:, : case.model.q_width])


@pytest.mark.parametrize("op", ["qkv.split", "qkv.join"])
def test_no_hidden_allocations(op: str) -> None:
    case = Subsequences((16, 8), dtype="bf16")
    q, kv = (torch.zeros(24, n, dtype=torch.bfloat16) for n in (case.model.q_width, 2 * case.model.kv_width))
    names = ("qkv", "q", "kv") if op == "qkv.split" else ("grad_qkv", "grad_q", "grad_kv")
    found: list[int] = []
    counted = {**KERNELS, op: lambda call: found.extend(allocations(lambda: KERNELS[op](call)))}
    play(op, case.decisions, dict(zip(names, (case.qkv, q, kv), strict=True)), kernels=counted)
    assert [size for size in found if size > 16] == []
