"""Activations that are swapped in FP8: what rounding does to gradients, and what a step moves and takes.

Gradients are compared with those of the same plan that swaps rows as they are. A value of E4M3 is off by 2^-4 of itself
at most, and by 0.026 on average (root of the mean square); products sum over many of them.
"""

from typing import Any

import msgspec
import pytest
import torch

from memo_exec.kernels import KERNELS
from memo_exec.kernels.call import Call, Context
from memo_exec.verification.reduction import reduced, reductions
from memo_sim.contract.plan import Decisions
from memo_sim.program.analysis.columns import expand
from memo_sim.program.analysis.liveness import live_bytes, liveness, peak
from memo_sim.program.ir.instruction import Instruction, Lane
from memo_sim.program.ir.work import Rowwise
from memo_sim.program.layout import swap_format
from memo_sim.program.layout.swap_format import packed_features
from memo_sim.program.lower import lower
from tests.exec_cpu.plans import placed
from tests.exec_cpu.small import decide, gpt, llama, one_step
from tests.pairs import covering

MOST_OF_A_VALUE = 2.0**-4
"""Of a value, by which its nearest neighbour in E4M3 differs."""
FOUND = {"gpt": 0.0178, "llama": 0.0310}
"""Relative difference of all gradients together, the largest of the policies: a record, not a promise."""
MODELS = {"gpt": gpt(layers=4), "llama": llama(layers=4)}
POLICIES: dict[str, dict[str, Any]] = {
    "full swap": {"swapped_tokens": 256},
    "partial swap": {"swapped_tokens": 128},
    "token-wise": {"recompute": "tokenwise", "swapped_tokens": 128},
    "inputs alone": {"recompute": "full", "swapped_tokens": 256},
    "row-wise": {"recompute": "rowwise", "swapped_tokens": 256, "mlp_chunk_tokens": 128},
}


def decided(policy: str, model: str, **fields: Any) -> Decisions:
    return decide(MODELS[model], swap_dtype="fp8", **(POLICIES[policy] | fields))


@pytest.mark.parametrize(("policy", "model"), covering(POLICIES, MODELS))
def test_gradients_differ_by_less_than_a_value_of_the_format(policy: str, model: str) -> None:
    decisions = decided(policy, model)
    exact, wanted = one_step(msgspec.structs.replace(decisions, swap_dtype="same"))
    record, found = one_step(decisions, debug=True)
    assert record.loss == exact.loss  # forward reads nothing that was rounded
    errors = {name: float((found[name] - wanted[name]).norm() / wanted[name].norm()) for name in wanted}
    assert max(errors.values()) <= MOST_OF_A_VALUE, max(errors, key=lambda name: errors[name])
    both = [torch.cat([of[name].flatten() for name in wanted]) for of in (found, wanted)]
    error = float((both[0] - both[1]).norm() / both[1].norm())
    assert 0 < error <= 1.05 * FOUND[model]
    lives = liveness(lower(decisions)[0], expand(lower(decisions)[0]))
    assert record.peak_device_bytes == peak(live_bytes(lives, device=True)).bytes
    assert record.peak_host_bytes == peak(live_bytes(lives, device=False)).bytes
    assert record.moved.d2h == record.moved.h2d < 0.3 * exact.moved.d2h  # of fp32


def test_the_arena_and_torchs_allocator_give_the_same_bits() -> None:
    decisions = decided("token-wise", "llama", dtype="bf16")
    record, wanted = one_step(decisions)
    planned = msgspec.structs.replace(decisions, memory_policy="planned")
    again, found = one_step(planned, placement=placed(planned))
    assert again.loss == record.loss
    assert all(torch.equal(found[name], wanted[name]) for name in wanted)


def test_blocks_of_rows_give_the_same_bits(monkeypatch: pytest.MonkeyPatch) -> None:
    decisions = decided("partial swap", "llama")
    record, wanted = one_step(decisions)
    monkeypatch.setattr(swap_format, "STAGING_BYTES", 64 * 50)
    monkeypatch.setattr(swap_format, "SCRATCH_BYTES", 4 * 64 * 7)
    again, found = one_step(decisions, debug=True)
    assert again.moved == record.moved
    assert len(again.start_s) > len(record.start_s)
    assert all(torch.equal(found[name], wanted[name]) for name in wanted)


@pytest.mark.parametrize("features", [64, 50])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_rows_come_back_within_the_rounding_of_the_format(dtype: torch.dtype, features: int) -> None:
    """Rows of very different sizes, one of zeros, and a number of features that is no multiple of four."""
    x = torch.randn(40, features, generator=torch.Generator().manual_seed(1))
    x = (x * torch.logspace(-12, 12, 40).unsqueeze(1)).to(dtype)
    x[3] = 0
    packed = torch.empty(40, packed_features(features), dtype=torch.uint8)
    back, context = torch.full_like(x, torch.nan), Context(decide(llama()), torch.device("cpu"))
    for op, operands in (("swap.round", {"x": x, "out": packed}), ("swap.widen", {"x": packed, "out": back})):
        tensors = {**operands, "workspace": torch.empty(40 * features)}
        KERNELS[op](Call(Instruction(op, op, Lane.D2H, Rowwise(op, 40, 0, 0), ()), context, tensors))
    values, found = x.double(), back.double()
    least = values.abs().amax(dim=1, keepdim=True) * 2.0**-10 / 448
    bound = torch.maximum(values.abs() * MOST_OF_A_VALUE, least) * (1 + 2.0**-6)  # and the rounding to bf16
    assert bool(((found - values).abs() <= bound).all())
    assert not bool(back[3].any())


def test_verify_plays_swaps_unrounded_and_says_so() -> None:
    plan = decided("partial swap", "llama")
    here = reduced(plan, dtype="fp32", attention="torch-flash-cpu")
    assert here.swap_dtype == "same"
    shown = {each.what: (each.plan, each.here) for each in reductions(plan, here)}
    assert shown["dtype of swapped rows"] == ("FP8", "their own")
