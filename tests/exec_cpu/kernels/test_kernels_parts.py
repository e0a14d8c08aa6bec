"""Attention in parts, its merge, and packing around an exchange: each kernel gives the results of plain torch."""

import pytest
import torch
from torch import Tensor

from memo_exec.kernels import KERNELS
from memo_exec.machine.machine import Machine
from memo_exec.machine.memory_budget import MERGES, needs_of
from memo_sim.contract.plan import Decisions, Layout
from memo_sim.program.layout.token_order import token_runs
from memo_sim.program.lower import lower
from memo_sim.program.operators import workspaces as table
from tests.exec_cpu.kernels.attention_parts import Parted
from tests.exec_cpu.kernels.hand_call import allocations, play
from tests.exec_cpu.small import decide, llama

CP2 = Layout(cp=2)
MODEL = llama()
Q, KV, HEADS, DIM = MODEL.q_width, MODEL.kv_width, MODEL.heads, MODEL.head_dim


def cp_decisions(batch: int = 1, **changes: object) -> Decisions:
    return decide(MODEL, layout=CP2, micro_batch=batch, **changes)


def random(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def close(found: Tensor, wanted: Tensor) -> None:
    torch.testing.assert_close(found, wanted, rtol=1e-5, atol=1e-5 * float(wanted.abs().max()))


@pytest.mark.parametrize("batch", [1, 2])
def test_merged_parts_equal_attention_over_all_keys(batch: int) -> None:
    parted = Parted(batch)
    wanted, found = parted.reference(), parted.forward()
    close(found.out, wanted.out)
    close(found.lse, wanted.lse)


@pytest.mark.parametrize("batch", [1, 2])
def test_gradients_of_parts_add_up(batch: int) -> None:
    parted = Parted(batch)
    wanted = parted.reference()
    d_qkv, d_kv = parted.backward(wanted.out, wanted.lse)
    for mine, true in zip(d_kv, wanted.d_kv, strict=True):
        close(mine, true)
    close(d_qkv[:, :Q], wanted.d_q)
    assert not d_qkv[:, Q:].any()


@pytest.mark.parametrize("distance", [-200.0, -3.0, 0.0, 3.0, 200.0])
def test_merging_far_apart_parts(distance: float) -> None:
    """One part may outweigh the other so much that an exponential overflows."""
    rows = 2 * table.MERGE_ROWS + 3
    out, part = random(rows, Q), random(rows, Q, seed=1)
    lse, part_lse = random(rows, HEADS), random(rows, HEADS, seed=1) + distance
    weight = torch.sigmoid(part_lse.double() - lse).repeat_interleave(DIM, dim=1)
    wanted = (out * (1 - weight) + part * weight).float()
    rounded = out.bfloat16() * (1 - weight) + part.bfloat16() * weight
    wanted_lse = torch.logaddexp(lse.double(), part_lse.double()).float()
    narrow = {"out": out.bfloat16(), "part": part.bfloat16(), "lse": lse.clone(), "part_lse": part_lse}
    play("attention.merge", cp_decisions(), {"part": part, "part_lse": part_lse, "out": out, "lse": lse})
    close(out, wanted)
    close(lse, wanted_lse)
    play("attention.merge", cp_decisions(dtype="bf16"), narrow)
    torch.testing.assert_close(narrow["out"].double(), rounded, rtol=2**-8, atol=1e-6)
    close(narrow["lse"], wanted_lse)


@pytest.mark.parametrize("batch", [1, 3])
def test_keys_and_values_are_packed_with_early_chunks_first(batch: int) -> None:
    decisions = cp_decisions(batch)
    rows, chunk = decisions.local_tokens, decisions.seq_tokens // 4
    qkv, packed = random(rows, Q + 2 * KV), torch.empty(rows, 2 * KV)
    order = [s * 2 * chunk + half * chunk + i for half in range(2) for s in range(batch) for i in range(chunk)]
    play("kv.pack", decisions, {"qkv": qkv, "out": packed})
    assert torch.equal(packed, qkv[order, Q:])

    home = torch.zeros_like(qkv)
    play("grad.accumulate", decisions, {"x": packed, "out": home}, name="bwd/d_kv.return")
    assert torch.equal(home[:, Q:], qkv[:, Q:])
    assert not home[:, :Q].any()


def test_gradients_of_equal_width_are_added() -> None:
    total, more = random(6, 2 * KV), random(6, 2 * KV, seed=1)
    wanted = total + more
    play("grad.accumulate", cp_decisions(), {"x": more, "out": total}, name="bwd/d_kv.add2")
    assert torch.equal(total, wanted)


@pytest.mark.parametrize("alpha", [0.0, 0.5])
@pytest.mark.parametrize("packed", [True, False], ids=["qkv", "q"])
def test_heads_go_to_their_ranks_and_back(alpha: float, packed: bool) -> None:
    """Exchanging all ranks' packed rows yields the whole sequence's rows for each rank's heads."""
    degree, seq = 2, 512
    fields = {"recompute": "tokenwise", "swapped_tokens": int(alpha * seq) // degree}
    decisions = decide(MODEL, layout=Layout(ulysses=degree), seq_tokens=seq, micro_batch=1, **fields)
    parts = [Q, KV, KV] if packed else [Q]
    whole = random(seq, sum(parts))
    tokens = [[r.token + i for r in token_runs(decisions, rank) for i in range(r.tokens)] for rank in range(degree)]
    sent = []
    for mine in tokens:
        target = torch.empty(seq // degree, sum(parts))
        play("heads.transpose", decisions, {"source": whole[mine], "target": target}, name="fwd/qkv.pack")
        sent.append(target)
        back = torch.empty_like(target)
        play("heads.transpose", decisions, {"source": target, "target": back}, name="bwd/d_qkv.unpack")
        assert torch.equal(back, whole[mine])
    blocks = [(0, 128), (128, 128)] if alpha else [(0, 256)]
    for rank in range(degree):
        heads = torch.cat([x.view(seq, degree, -1)[:, rank] for x in whole.split(parts, dim=1)], dim=1)
        pieces = [s[first : first + n].view(degree, n, -1)[rank] for first, n in blocks for s in sent]
        assert torch.equal(torch.cat(pieces), heads)


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_no_hidden_allocations(dtype: str) -> None:
    decisions = cp_decisions(2, dtype=dtype)
    rows, kind = decisions.local_tokens, {"fp32": torch.float32, "bf16": torch.bfloat16}[dtype]
    qkv, packed, out = (random(rows, n).to(kind) for n in (Q + 2 * KV, 2 * KV, Q))
    lse = random(rows, HEADS)

    def sizes(op: str, name: str = "fwd/x", **operands: Tensor) -> list[int]:
        found: list[int] = []
        kernel = KERNELS[op]
        counted = {**KERNELS, op: lambda call: found.extend(allocations(lambda: kernel(call)))}
        play(op, decisions, dict(operands), name=name, kernels=counted)
        return [size for size in found if size > 16]

    assert sizes("kv.pack", qkv=qkv, out=packed) == []
    assert sizes("grad.accumulate", "bwd/d_kv.return", x=packed, out=qkv) == []
    assert sizes("grad.accumulate", x=out, out=qkv) == []
    assert sizes("attention.merge", part=out.clone(), part_lse=lse.clone(), out=out, lse=lse) == []


def test_the_reserve_counts_the_scratch_of_merging() -> None:
    machine = Machine("cpu", "a CPU", 1, 1, 2**33, 2**33, 2**33, 2**33)
    found = needs_of(lower(cp_decisions())[0], machine)
    assert found.reserve[MERGES] == table.merge_scratch_bytes(HEADS, DIM, "fp32")
    assert MERGES not in needs_of(lower(decide(MODEL))[0], machine).reserve
