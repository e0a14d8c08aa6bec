"""Plays row-wise recompute and checks its gradients, its recompute, its memory and its copies.

Attention runs forward once and backward once, over all rows. So the loss is keep's bit for bit, and gradients differ by
the order in which row blocks are summed.
"""

from collections.abc import Iterable
from typing import Any

import msgspec
import pytest
import torch

from memo_exec.kernels import KERNELS
from memo_exec.verification.autograd_model import AutogradModel
from memo_sim.contract.experts import Experts
from memo_sim.contract.model import Model
from memo_sim.contract.plan import Decisions, Layout
from tests.exec_cpu.interpreter.programs_bytes import assert_copies_are_the_programs, assert_peak_is_the_programs
from tests.exec_cpu.interpreter.replayed import assert_gradients_equal_autograds, replayed
from tests.exec_cpu.small import DEEPSEEK_MODEL, EXPERT_MODELS, LATENT_MODELS, MODELS, decide, llama, one_step

ROUTED = {**EXPERT_MODELS, "latents and experts": DEEPSEEK_MODEL}
EVERY = {**MODELS, **LATENT_MODELS, **ROUTED}
QUICK = (*MODELS, "latent", "latent-lite-yarn", "mixtral", "qwen2-moe", "latents and experts")
"""The default run plays these; the slow run plays all."""


def named(models: Iterable[str]) -> list[Any]:
    """Return names of models as parameters of a test; those that are not quick have the mark slow."""
    return [name if name in QUICK else pytest.param(name, marks=pytest.mark.slow) for name in models]


def rowwise(name: str, **changes: Any) -> Decisions:
    """Return a plan with three row blocks, of which the last is shorter."""
    fields: dict[str, Any] = {"seq_tokens": 320, "micro_batch": 1, "global_batch": 2}
    return decide(EVERY[name], **(fields | {"recompute": "rowwise", "mlp_chunk_tokens": 128} | changes))


@pytest.mark.parametrize("name", named(EVERY))
def test_gradients_equal_autograd(name: str) -> None:
    assert_gradients_equal_autograds(rowwise(name))


@pytest.mark.parametrize("window", [0, 100])
@pytest.mark.parametrize("swapped", [0, 512])
def test_subsequences_rebuild_their_queries_and_read_the_kv_cache(window: int, swapped: int) -> None:
    """Two subsequences of different lengths, with two row blocks each."""
    model = llama(window=window) if window else MODELS["qwen3"]
    cut = {"layout": Layout(subsequences=2), "seq_tokens": 512, "mlp_chunk_tokens": 128, "swapped_tokens": swapped}
    decisions = decide(model, micro_batch=1, global_batch=2, recompute="rowwise", **cut)
    assert_gradients_equal_autograds(decisions)


@pytest.mark.parametrize("name", ["gpt2", "llama-biased", "qwen3"])
def test_only_the_order_of_sums_differs_from_keep(name: str) -> None:
    kept, wanted = one_step(rowwise(name, recompute="none", mlp_chunk_tokens=0))
    record, found = one_step(rowwise(name))
    assert record.loss == kept.loss
    for key in wanted:
        torch.testing.assert_close(found[key], wanted[key], rtol=1e-5, atol=1e-6 * float(wanted[key].abs().max()))


@pytest.mark.parametrize("name", ["gpt2", "llama"])
def test_one_block_of_all_rows_is_keep_bit_for_bit(name: str) -> None:
    _, wanted = one_step(rowwise(name, recompute="none", mlp_chunk_tokens=0))
    _, found = one_step(rowwise(name, mlp_chunk_tokens=0))
    assert [key for key in wanted if not torch.equal(found[key], wanted[key])] == []


@pytest.mark.parametrize("swapped", [128, 320])
def test_swapping_changes_no_bit_and_moves_the_programs_bytes(swapped: int) -> None:
    _, wanted = one_step(rowwise("llama"))
    decisions = rowwise("llama", swapped_tokens=swapped)
    record, found = one_step(decisions)
    assert [key for key in wanted if not torch.equal(found[key], wanted[key])] == []
    assert_copies_are_the_programs(record, decisions)


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_a_block_is_rebuilt_bit_for_bit(dtype: str) -> None:
    decisions = rowwise("qwen3", dtype=dtype, global_batch=1, swapped_tokens=320)
    again = replayed(decisions, ".b", KERNELS, ("out", "qkv", "stats"))
    wanted = ("norm1", "qkv", "qk_norm", "rotary", "proj", "resid_add", "norm2", "ffn_up", "act")
    assert {f"rec/{op}.b{i}" for op in wanted for i in range(3)} <= again


@pytest.mark.parametrize("swapped", [0, 1024])
def test_memory_is_the_programs_and_falls(swapped: int) -> None:
    peaks = []
    for policy in ({"recompute": "none"}, {"recompute": "rowwise", "mlp_chunk_tokens": 128}):
        decisions = decide(llama(), seq_tokens=1024, micro_batch=1, swapped_tokens=swapped, **policy)
        record, _ = one_step(decisions)
        assert_peak_is_the_programs(record, decisions)
        peaks.append(record.peak_device_bytes)
    assert peaks[1] < peaks[0]


@pytest.mark.parametrize("name", named([*LATENT_MODELS, *ROUTED]))
def test_one_block_with_latents_or_experts_is_keep_bit_for_bit(name: str) -> None:
    kept, wanted = one_step(rowwise(name, recompute="none", mlp_chunk_tokens=0))
    record, found = one_step(rowwise(name, mlp_chunk_tokens=0, swapped_tokens=128), debug=True)
    assert record.loss == kept.loss
    assert [key for key in wanted if not torch.equal(found[key], wanted[key])] == []


def test_heads_are_expanded_again_bit_for_bit() -> None:
    """The product of queries writes some features of the packed rows; the assembly then has all of them."""
    decisions = rowwise("latent", dtype="bf16", global_batch=1, swapped_tokens=320)
    ops = [op for op in KERNELS if op != "latent.q_up"]
    again = replayed(decisions, ".b", ops, ("out", "qkv", "stats", "q", "kv", "rope"))
    wanted = ("norm1", "latent", "latent.norm", "kv_up", "latent.assemble", "proj", "ffn_up", "act")
    assert {f"rec/{op}.b{i}" for op in wanted for i in range(3)} <= again


def test_memory_and_copies_with_latents_are_the_programs() -> None:
    three = msgspec.structs.replace(LATENT_MODELS["latent"], layers=3)
    sizes: dict[str, Any] = {"seq_tokens": 320, "micro_batch": 1, "mlp_chunk_tokens": 128, "swapped_tokens": 128}
    decisions = decide(three, recompute="rowwise", **sizes)
    record, _ = one_step(decisions)
    assert_peak_is_the_programs(record, decisions)
    assert_copies_are_the_programs(record, decisions)


@pytest.mark.parametrize("name", named(ROUTED))
def test_blocks_that_are_routed_by_themselves_differ_in_the_order_of_sums_alone(name: str) -> None:
    kept, wanted = one_step(rowwise(name, recompute="none", mlp_chunk_tokens=0))
    record, found = one_step(rowwise(name), debug=True)
    assert record.loss == pytest.approx(kept.loss, rel=1e-6)
    for key in wanted:
        torch.testing.assert_close(found[key], wanted[key], rtol=1e-5, atol=1e-6 * float(wanted[key].abs().max()))


def test_blocks_of_experts_are_rebuilt_bit_for_bit() -> None:
    decisions = rowwise("mixtral", dtype="bf16", global_batch=1, swapped_tokens=320)
    roles = ("out", "qkv", "stats", "scores", "probs", "experts", "order", "places", "ends")
    again = replayed(decisions, ".b", KERNELS, roles)
    wanted = ("norm2", "router", "route", "sort", "places", "dispatch", "experts_up", "act")
    assert {f"rec/{op}.b{i}" for op in wanted for i in range(3)} <= again


def test_memory_and_copies_with_experts_are_the_programs() -> None:
    decisions = rowwise("mixtral", swapped_tokens=128)
    record, _ = one_step(decisions)
    assert_peak_is_the_programs(record, decisions)
    assert_copies_are_the_programs(record, decisions)


def with_losses(name: str) -> Model:
    """Return a model whose router has both losses."""
    model = EXPERT_MODELS[name]
    lossy = {
        shape: msgspec.structs.replace(
            shape, experts=shape.experts and msgspec.structs.replace(shape.experts, balance=0.3, z_loss=0.1)
        )
        for shape in model.layer_shapes
    }
    return model.of_layers([lossy[model.layer(number)] for number in range(model.layers)])


class WithLosses(AutogradModel):
    """Plain autograd with the losses of every router: of balance, and of the log-sum-exp (``contract/experts.py``)."""

    def __init__(self, decisions: Decisions, parameters: dict[str, torch.Tensor]) -> None:
        super().__init__(decisions.model, parameters)
        self.tokens_of_step = decisions.global_batch * decisions.seq_tokens
        self.losses: list[torch.Tensor] = []

    def _routed(self, x: torch.Tensor, experts: Experts, at: str) -> tuple[torch.Tensor, torch.Tensor]:
        probs, chosen = super()._routed(x, experts, at)
        logits = self._linear(x, f"{at}router")
        rows = torch.bincount(chosen.flatten(), minlength=experts.count)
        share = experts.count / (experts.per_token * len(x) * self.tokens_of_step)
        self.losses.append(experts.balance * share * (rows * logits.softmax(-1).sum(0)).sum())
        self.losses.append(experts.z_loss / self.tokens_of_step * logits.logsumexp(-1).square().sum())
        return probs, chosen

    def loss(self, *given: Any) -> torch.Tensor:
        self.losses.clear()
        return super().loss(*given) + torch.stack(self.losses).sum()


@pytest.mark.parametrize("fields", [{}, {"swapped_tokens": 256}, {"recompute": "none", "mlp_chunk_tokens": 0}], ids=str)
@pytest.mark.parametrize("name", ["mixtral", pytest.param("first layer dense", marks=pytest.mark.slow)])
def test_losses_of_the_router_are_about_all_tokens(name: str, fields: dict[str, Any]) -> None:
    """Of a block, the loss of balance needs the rows that experts get of all blocks."""
    decisions = msgspec.structs.replace(rowwise(name, **fields), model=with_losses(name))
    assert_gradients_equal_autograds(decisions, WithLosses)


def test_one_block_with_losses_of_the_router_is_keep_bit_for_bit() -> None:
    decisions = msgspec.structs.replace(rowwise("mixtral", mlp_chunk_tokens=0), model=with_losses("mixtral"))
    _, wanted = one_step(msgspec.structs.replace(decisions, recompute="none"))
    _, found = one_step(msgspec.structs.replace(decisions, swapped_tokens=128), debug=True)
    assert [key for key in wanted if not torch.equal(found[key], wanted[key])] == []


def test_memory_and_copies_with_losses_of_the_router_are_the_programs() -> None:
    for swapped in (128, 320):
        decisions = msgspec.structs.replace(rowwise("mixtral", swapped_tokens=swapped), model=with_losses("mixtral"))
        record, _ = one_step(decisions)
        assert_peak_is_the_programs(record, decisions)
        assert_copies_are_the_programs(record, decisions)
