"""Attention over subsequences with a KV cache gives the results of a masked softmax and autograd."""

from itertools import accumulate
from typing import Any

import pytest
import torch
from torch import Tensor

from memo_exec.kernels import KERNELS
from memo_exec.verification.autograd_model import AutogradModel
from memo_sim.contract.plan import Decisions, Layout
from memo_sim.program.layout.partition import partition
from memo_sim.program.layout.token_order import row_blocks
from memo_sim.program.operators import workspaces as table
from tests.exec_cpu.kernels.attention_subsequences import Subsequences
from tests.exec_cpu.kernels.hand_call import allocations, play
from tests.exec_cpu.small import decide, gpt, llama

CASES = [(200, 1), (256, 2), (385, 3), (500, 2), (640, 4)]
"""(tokens, subsequences): equal ones, a last one with a single row, and ends that are no multiple of the tile."""

TP2 = Layout(tp=2, sequence_parallel=True, subsequences=3)


def close(found: Tensor, wanted: Tensor, tolerance: float = 1e-5) -> None:
    torch.testing.assert_close(found.double(), wanted, rtol=0, atol=tolerance * float(wanted.abs().max()))


@pytest.mark.parametrize("head_groups", [1, 2])
@pytest.mark.parametrize(("tokens", "parts"), CASES)
def test_subsequences_equal_attention_over_the_whole_sequence(tokens: int, parts: int, head_groups: int) -> None:
    case = Subsequences(tokens, parts, head_groups=head_groups)
    wanted, found = case.reference(), case.played()
    close(found.out, wanted.out)
    close(found.lse, wanted.lse)
    close(found.grad_qkv, wanted.grad_qkv)


def test_bf16_errors_are_within_its_rounding() -> None:
    case = Subsequences(385, 3, dtype="bf16")
    wanted, found = case.reference(), case.played()
    close(found.out, wanted.out, 2.0**-6)
    close(found.lse, wanted.lse, 1e-3)
    close(found.grad_qkv, wanted.grad_qkv, 2.0**-6)


def test_many_gradient_terms_keep_their_precision_in_bf16() -> None:
    """Every subsequence attends to the first key (an attention sink), so its value's gradient has a term from each.

    If the sixteen terms were added in bf16, the error would be 1.5 times that of the unsplit sequence, whose kernel
    sums in fp32.
    """
    errors = []
    for parts in (1, 16):
        case = Subsequences(2048, parts, model=llama(heads=1, kv_heads=1), dtype="bf16")
        query, key, value = (slice(16 * i, 16 * (i + 1)) for i in range(3))
        case.qkv[:, query].add_(1.0)
        case.qkv[0, key] = 4.0
        wanted, found = case.reference().grad_qkv[0, value], case.played().grad_qkv[0, value]
        errors.append(float((found - wanted).norm() / wanted.norm()))
    whole, split = errors
    assert whole < 2.0**-7
    assert split < whole


def test_splitting_and_joining_packed_rows_restores_them() -> None:
    case = Subsequences(256, 2)
    width = case.model.q_width
    q, kv, joined = (torch.full((256, n), torch.nan) for n in (width, 2 * case.model.kv_width, case.qkv.shape[1]))
    play("qkv.split", case.decisions, {"qkv": case.qkv, "q": q, "kv": kv})
    assert torch.equal(q, case.qkv[:, :width])
    assert torch.equal(kv, case.qkv[:, width:])
    play("qkv.join", case.decisions, {"grad_q": q, "grad_kv": kv, "grad_qkv": joined})
    assert torch.equal(joined, case.qkv)


def test_queries_alone_can_be_split_off() -> None:
    case = Subsequences(256, 2)
    q = torch.full((256, case.model.q_width), torch.nan)
    play("qkv.split", case.decisions, {"qkv": case.qkv, "q": q})
    assert torch.equal(q, case.qkv[:, : case.model.q_width])


@pytest.mark.parametrize("op", ["qkv.split", "qkv.join"])
def test_no_hidden_allocations(op: str) -> None:
    case = Subsequences(256, 2, dtype="bf16")
    q, kv = (torch.zeros(256, n, dtype=torch.bfloat16) for n in (case.model.q_width, 2 * case.model.kv_width))
    names = ("qkv", "q", "kv") if op == "qkv.split" else ("grad_qkv", "grad_q", "grad_kv")
    kv = kv if op == "qkv.split" else kv.float()
    found: list[int] = []
    counted = {**KERNELS, op: lambda call: found.extend(allocations(lambda: KERNELS[op](call)))}
    play(op, case.decisions, dict(zip(names, (case.qkv, q, kv), strict=True)), kernels=counted)
    assert [size for size in found if size > 16] == []


@pytest.mark.parametrize("rows", [256, 2 * table.NORM_ROWS + 100])
def test_sums_may_have_a_wider_dtype_than_their_terms(rows: int) -> None:
    case = Subsequences(256, 2, dtype="bf16")
    terms, total = torch.randn(rows, 64).bfloat16(), torch.randn(rows, 64)
    wanted = total + terms.float()
    size = table.sum_workspace_bytes(rows, 64, "bf16", "fp32", case.kernel)
    found: list[int] = []
    counted = {
        **KERNELS,
        "grad.accumulate": lambda call: found.extend(allocations(lambda: KERNELS["grad.accumulate"](call))),
    }
    play("grad.accumulate", case.decisions, {"x": terms, "out": total}, workspace_bytes=size, kernels=counted)
    assert torch.equal(total, wanted)
    assert [size for size in found if size > 16] == []


def positions_of(decisions: Decisions, rank: int = 0) -> list[tuple[int, list[int]]]:
    """Return (number of rows, positions) of a rank in every subsequence, for its token shard if it has one."""
    layout, found = decisions.layout, []
    tp = layout.tp if layout.sequence_parallel else 1
    parts = partition(decisions)
    for number, start in enumerate((0, *accumulate(parts))[:-1]):
        blocks = [(start + first, rows // tp) for first, rows in row_blocks(decisions, number)]
        mine = [first + (rank % tp) * rows + i for first, rows in blocks for i in range(rows)]
        found.append((parts[number] // tp, mine))
    return found


@pytest.mark.parametrize("policy", [{}, {"recompute": "tokenwise", "swapped_tokens": 188}], ids=["keep", "tokenwise"])
def test_rotary_uses_the_start_of_a_subsequence(policy: dict[str, Any]) -> None:
    model = llama()
    if policy:
        policy |= {"subsequence_swapped_tokens": (128, 0, 60)}
    decisions = decide(model, layout=Layout(subsequences=3), seq_tokens=700, micro_batch=1, **policy)
    width = model.q_width + model.kv_width
    packed = torch.randn(700, width + model.kv_width, generator=torch.Generator().manual_seed(0)).double()
    heads = packed[None, :, :width].unflatten(-1, (-1, model.head_dim)).transpose(1, 2)
    turned = AutogradModel(model, {})._rotated(heads, 0.0).transpose(1, 2).flatten(2)[0]
    for number, (rows, positions) in enumerate(positions_of(decisions)):
        for first in (0, rows - 50):
            qkv, places = packed[positions][first:].float(), positions[first:]
            size = table.rotary_workspace_bytes(len(qkv), model.heads + model.kv_heads, model.head_dim, "fp32")
            shared: dict[str, Any] = {"first": first, "workspace_bytes": size, "subsequence": number}
            play("rotary", decisions, {"qkv": qkv}, **shared)
            close(qkv[:, :width], turned[places])
            play("rotary.bwd", decisions, {"grad": qkv}, **shared)
            close(qkv, packed[places])


@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize("swapped", [(), (256, 256, 0)], ids=["keep", "tokenwise"])
@pytest.mark.parametrize("parallel", [True, False])
def test_learned_positions_use_it_in_every_token_shard(parallel: bool, swapped: tuple[int, ...], rank: int) -> None:
    model = gpt(max_positions=1600)
    layout = Layout(tp=2, sequence_parallel=parallel, subsequences=3)
    policy = {"recompute": "tokenwise", "swapped_tokens": 512, "subsequence_swapped_tokens": swapped} if swapped else {}
    decisions = decide(model, layout=layout, seq_tokens=1600, micro_batch=1, **policy)
    weight = torch.arange(1600.0).unsqueeze(1).expand(1600, model.hidden).contiguous()
    for number, (rows, positions) in enumerate(positions_of(decisions, rank)):
        source, target = torch.zeros(rows, model.hidden), torch.full((rows, model.hidden), torch.nan)
        operands = {"source": source, "target": target, "positions": weight.view(-1)}
        play("positions.add", decisions, dict(operands), subsequence=number, rank=rank)
        assert target[:, 0].tolist() == positions


def test_token_shards_hold_every_token_once() -> None:
    decisions = decide(gpt(max_positions=1600), layout=TP2, seq_tokens=1600, micro_batch=1)
    held = [token for rank in (0, 1) for _, tokens in positions_of(decisions, rank) for token in tokens]
    assert sorted(held) == list(range(1600))
