"""A whole step with products in FP8: every product against plain torch with the same rounding, gradients near autograd.

Rounding to FP8 turns the last bit of a bf16 number into a step of 2^-3, so gradients of two implementations differ by
more than the tolerance of a product; each product is therefore compared by itself, on the operands of the step.
"""

from collections import Counter
from typing import Any

import msgspec
import pytest
import torch
from torch import Tensor

from memo_exec.interpreter.record import StepRecord
from memo_exec.kernels import KERNELS, Call, fp8_blocks, fp8_experts, fp8_mx
from memo_exec.training import weights
from memo_exec.verification.autograd_model import AutogradModel
from memo_sim.contract.experts import Experts
from memo_sim.contract.latent_attention import LatentAttention
from memo_sim.contract.model import Model
from memo_sim.program.ir.work import Fp8Gemm
from tests.exec_cpu.interpreter.programs_bytes import assert_copies_are_the_programs, assert_peak_is_the_programs
from tests.exec_cpu.small import batch, decide, gpt, gradients, llama, one_step, play, scalars

IN_FP8: dict[str, Any] = {"dtype": "bf16", "fp8": "tensor", "fp8_layouts": "tn", "recompute": "none"}
E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
NEAR = 0.25
"""Relative difference of a gradient from that in fp32 without FP8; it was at most 0.14 in both models."""


BLOCKS = {"hidden": 128, "head_dim": 32, "ffn_hidden": 256}
"""Sizes that are multiples of 128."""
LATENT = LatentAttention(q_rank=32, kv_rank=16, nope_dim=16, rope_dim=8, value_dim=16)
LATENT_BLOCKS = LatentAttention(q_rank=128, kv_rank=128, nope_dim=32, rope_dim=32, value_dim=32)


def latents(of: LatentAttention, **changes: Any) -> Model:
    return llama(kv_heads=4, latent=of, **(changes | {"head_dim": of.head_dim}))


EXPERTS = llama(layers=1, experts=Experts(count=4, per_token=2, hidden=128, shared=128, shared_gate=True), **BLOCKS)
TENSOR_LATENTS = latents(LATENT, layers=1)
BLOCK_LATENTS = latents(LATENT_BLOCKS, layers=1, **BLOCKS)
WITHOUT_QUERY_LATENT = latents(msgspec.structs.replace(LATENT, q_rank=0), layers=1)
BLOCKS_WITHOUT_QUERY_LATENT = latents(msgspec.structs.replace(LATENT_BLOCKS, q_rank=0), layers=1, **BLOCKS)


def rounded(x: Tensor, dtype: torch.dtype, given: float | None = None) -> Tensor:
    """Return ``x`` in fp32, rounded to FP8 with one scale and back; ``given``: a scale that may clip it."""
    most = torch.finfo(dtype).max
    scale = x.float().abs().max() / most if given is None else torch.tensor(given)
    return (x.float() / scale).clamp(-most, most).to(dtype).float() * scale


ONE_SCALE = ("tensor", "delayed")
LAYOUTS = {"mx": "any"}
"""Layouts of operands other than Hopper's, by recipe."""
OF_ONE_SCALE = {"block": 128, "mx": 32}
"""Values of a row with one scale, by recipe."""


def rounded_in_blocks(x: Tensor, size: int) -> Tensor:
    """Return ``x`` in fp32, rounded to E4M3 with a power of two for each ``size`` values of a row, and back."""
    groups = x.float().reshape(len(x), -1, size)
    scale = torch.exp2(torch.ceil(torch.log2(groups.abs().amax(2, keepdim=True).clamp(min=1e-30) / 448)))
    values: Tensor = (groups / scale).to(E4M3).float() * scale
    return values.flatten(1)


def in_fp8(recipe: str) -> dict[str, Any]:
    """Return the fields of a plan with a recipe."""
    return IN_FP8 | {"fp8": recipe, "fp8_layouts": LAYOUTS.get(recipe, "tn")}


class Watched:
    """Kernels that compare each product with plain torch, on the tensors that were quantised to its operands."""

    def __init__(self) -> None:
        self.sources: dict[int, Tensor] = {}
        self.scales: dict[int, float] = {}
        """Those of earlier steps, by address of the copy."""
        self.compared: Counter[str] = Counter()
        of = {f"{of}{end}": self.product for of in ("linear", "latent.q_up") for end in ("", ".dgrad", ".wgrad")}
        of |= {"fp8.quantize": self.quantise, "linear.add": self.product, "linear.dgrad.add": self.product}
        of |= {f"experts.linear{end}": self.grouped for end in ("", ".dgrad", ".wgrad")}
        self.kernels = {**KERNELS, **of}

    def quantise(self, call: Call) -> None:
        KERNELS["fp8.quantize"](call)
        for copy in {"out", "columns"} & call.tensors.keys():
            width, recipe = call.matrix(copy).shape[1], call.context.decisions.fp8
            narrow = width if recipe in ONE_SCALE else fp8_blocks.features_of(width)
            self.sources[call[copy].data_ptr()] = call.matrix("x")[:, :narrow].clone()
            if recipe == "delayed":
                self.scales[call[copy].data_ptr()] = float(call.matrix("scale")[0, call.layer])

    def product(self, call: Call) -> None:
        op = call.instruction.op.replace("latent.q_up", "linear").removesuffix(".add")
        before, recipe = call["out"].clone(), call.context.decisions.fp8
        KERNELS[call.instruction.op](call)
        if not isinstance(call.instruction.work, Fp8Gemm):
            return
        out, bias = call.matrix("out")[:, : call.instruction.work.n].float(), call.get("bias")
        one, two = (
            self.sources.get(call[role].data_ptr()) for role in ("x" if op == "linear" else "grad", _SECOND[op])
        )
        assert one is not None
        scales = [self.scales.get(call[role].data_ptr()) for role in ("x" if op == "linear" else "grad", _SECOND[op])]
        if recipe in ONE_SCALE:
            one = rounded(one, E4M3 if op == "linear" else E5M2, scales[0])
        else:
            size = OF_ONE_SCALE[recipe]
            one = rounded_in_blocks(one, size) if op != "linear.wgrad" else rounded_in_blocks(one.t(), size).t()
        if op == "linear.wgrad":
            assert two is not None
            two = (
                rounded(two, E4M3, scales[1])
                if recipe in ONE_SCALE
                else rounded_in_blocks(two.t(), OF_ONE_SCALE[recipe]).t()
            )
            wanted = before.view(one.shape[1], -1) + one.t() @ two
            out = call["out"].view(wanted.shape)
        else:
            two = self.weight(call, out.shape[1], one.shape[1])
            wanted = one @ two.t()
        if bias is not None:
            wanted = wanted + bias.float()
        if call.instruction.op.endswith(".add"):
            wanted = wanted + before.float()
        assert float((out - wanted).norm() / wanted.norm()) <= 2.0**-8, call.instruction.name
        self.compared[op] += 1

    def grouped(self, call: Call) -> None:
        """Compare a product of experts, one after the other."""
        op, recipe = call.instruction.op.removeprefix("experts."), call.context.decisions.fp8
        before, begin = call["out"].clone(), 0
        KERNELS[call.instruction.op](call)
        role = "x" if op == "linear" else "grad"
        one, two = (self.sources.get(call[each].data_ptr()) for each in (role, _SECOND[op]))
        assert one is not None
        of, along = (E4M3 if op == "linear" else E5M2), op == "linear.wgrad"
        one = self.rounded(one, recipe, of, along=along)
        for expert, end in enumerate(call["ends"].tolist()):
            rows, begin = slice(begin, end), end
            if op == "linear.wgrad":
                assert two is not None
                right = self.rounded(two, recipe, E4M3, along=True)
                shape = (len(call["ends"]), one.shape[1], right.shape[1])
                wanted = before.view(shape)[expert] + one[rows].t() @ right[rows]
                found = call["out"].view(shape)[expert]
            else:
                weights = fp8_experts.weights_of(call, by_columns=op != "linear")
                scale = weights.scale
                if recipe == "block":
                    scale = scale[expert].repeat_interleave(128, 0).repeat_interleave(128, 1)
                wanted = one[rows] @ (weights.values[expert].float() * scale).t()
                found = call.matrix("out")[rows].float()
            assert float((found - wanted).norm()) <= 2.0**-8 * float(wanted.norm()), call.instruction.name
        self.compared[f"experts.{op}"] += 1

    def rounded(self, x: Tensor, recipe: str, dtype: torch.dtype, *, along: bool) -> Tensor:
        """Return what was quantised, rounded; ``along``: for a sum over tokens."""
        if recipe == "tensor":
            return rounded(x, dtype)
        return rounded_in_blocks(x.t(), 128).t() if along else rounded_in_blocks(x, 128)

    def weight(self, call: Call, rows: int, columns: int) -> Tensor:
        """Return a weight's copy as (out, in), or (in, out) for the gradient of the input, with its scale."""
        assert call.context.fp8 is not None
        values = call["weight"].view(rows, columns).float()
        if call.context.decisions.fp8 in ONE_SCALE:
            return values * call.context.fp8.of(call["weight"])
        if call.context.decisions.fp8 == "mx":
            return fp8_mx.values(fp8_mx.weight_blocks(call.context.fp8, call["weight"], rows, columns))
        scale = fp8_blocks.weight_blocks(call.context.fp8, call["weight"], rows, columns).scale[:, : columns // 128]
        return values * scale.repeat_interleave(128, 0).repeat_interleave(128, 1)


def assert_near_autograd(
    record: StepRecord, found: dict[str, Tensor], reference: AutogradModel, batches: list[tuple[Tensor, Tensor]]
) -> None:
    """Assert that a step's loss and gradients are near those of autograd in fp32, for one batch of two sequences."""
    ((ids, labels),) = batches
    loss = reference.loss(ids.view(2, -1), labels.view(2, -1), scalars(batches).loss_scale)
    torch.autograd.backward([loss])
    assert record.loss == pytest.approx(float(loss.detach()), rel=1e-2)
    for name, leaf in reference.p.items():
        assert leaf.grad is not None
        # Rounding also changes which experts a few tokens choose.
        limit = 2 * NEAR if "router" in name else NEAR
        assert float((found[name] - leaf.grad).norm() / leaf.grad.norm()) <= limit, name


_SECOND = {"linear": "weight", "linear.dgrad": "weight", "linear.wgrad": "x"}


@pytest.mark.parametrize(
    ("model", "recipe"),
    [
        pytest.param(llama(layers=1), "tensor", id="llama"),
        pytest.param(gpt(layers=1), "tensor", id="gpt2"),
        pytest.param(llama(layers=1, **BLOCKS), "block", id="llama in blocks"),
        pytest.param(gpt(layers=1, **BLOCKS), "block", id="gpt2 in blocks"),
        pytest.param(TENSOR_LATENTS, "tensor", id="latents"),
        pytest.param(BLOCK_LATENTS, "block", id="latents in blocks"),
        pytest.param(WITHOUT_QUERY_LATENT, "tensor", id="no latent for queries"),
        pytest.param(BLOCKS_WITHOUT_QUERY_LATENT, "block", id="no latent for queries, in blocks"),
        pytest.param(llama(layers=1, **BLOCKS), "mx", id="llama in mx"),
        pytest.param(BLOCK_LATENTS, "mx", id="latents in mx"),
        pytest.param(BLOCKS_WITHOUT_QUERY_LATENT, "mx", marks=pytest.mark.slow, id="no latent for queries, in mx"),
        pytest.param(llama(layers=1), "delayed", id="llama with scales of the step before"),
    ],
)
def test_products_of_a_step_round_as_plain_torch_and_gradients_are_near(model: Any, recipe: str) -> None:
    decisions, watched = decide(model, **in_fp8(recipe)), Watched()
    batches = batch(decisions)
    with play(decisions, kernels=watched.kernels) as interpreter:
        reference = AutogradModel(model, weights.named_parameters(interpreter), dtype=torch.float32)
        if recipe == "delayed":  # products of the first step have the scale 1
            interpreter.run_step(batches, scalars(batches, lr=0.0))
            watched.compared.clear()
        record = interpreter.run_step(batches, scalars(batches, lr=0.0, step=2))
        found = gradients(interpreter)
    assert set(watched.compared.values()) == {5 if model.latent else 4}
    assert watched.compared.keys() == {"linear", "linear.dgrad", "linear.wgrad"}
    assert_near_autograd(record, found, reference, batches)


@pytest.mark.parametrize(
    ("model", "recipe"),
    [
        pytest.param(EXPERTS, "tensor", id="tensor"),
        pytest.param(EXPERTS, "block", id="block"),
    ],
)
def test_products_of_experts_round_as_plain_torch(model: Model, recipe: str) -> None:
    decisions, watched = decide(model, **(IN_FP8 | {"fp8": recipe, "fp8_experts": True})), Watched()
    batches = batch(decisions)
    with play(decisions, kernels=watched.kernels, debug=True) as interpreter:
        reference = AutogradModel(model, weights.named_parameters(interpreter), dtype=torch.float32)
        record = interpreter.run_step(batches, scalars(batches, lr=0.0))
        found = gradients(interpreter)
    # Q K V, projection and both products of the shared expert; experts' two.
    assert set(watched.compared.values()) == {4, 2}
    assert_near_autograd(record, found, reference, batches)


RECIPES = pytest.mark.parametrize(
    ("model", "recipe"),
    [
        pytest.param(EXPERTS, "tensor", id="experts"),
        pytest.param(EXPERTS, "block", id="experts in blocks"),
        pytest.param(llama(layers=2), "tensor", id="tensor"),
        pytest.param(llama(layers=2, **BLOCKS), "block", id="block"),
        pytest.param(TENSOR_LATENTS, "tensor", id="latents"),
        pytest.param(BLOCK_LATENTS, "block", id="latents in blocks"),
        pytest.param(llama(layers=2, **BLOCKS), "mx", id="mx"),
        pytest.param(BLOCK_LATENTS, "mx", id="latents in mx"),
        pytest.param(llama(layers=2), "delayed", id="delayed"),
    ],
)


@pytest.mark.slow
@RECIPES
@pytest.mark.parametrize("policy", [{"recompute": "full"}, {"swapped_tokens": 256}], ids=str)
def test_what_is_rebuilt_or_swapped_has_the_bits_of_what_is_kept(
    model: Any, recipe: str, policy: dict[str, Any]
) -> None:
    fields = in_fp8(recipe) | {"fp8_experts": model.mixture is not None}
    kept, wanted = one_step(decide(model, **fields))
    record, found = one_step(decide(model, **(fields | policy)), debug=True)
    assert record.loss == kept.loss
    assert all(torch.equal(found[name], wanted[name]) for name in wanted)


@pytest.mark.slow
@RECIPES
def test_rows_that_are_moved_in_part_have_the_bits_of_those_that_are_kept(model: Any, recipe: str) -> None:
    """Swapping half of the rows moves halves of copies by columns, which are matrices only as a whole."""
    fields = in_fp8(recipe) | {"fp8_experts": model.mixture is not None}
    kept, wanted = one_step(decide(model, **fields))
    record, found = one_step(decide(model, **(fields | {"swapped_tokens": 128})))
    assert record.loss == kept.loss
    assert all(torch.equal(found[name], wanted[name]) for name in wanted)


@pytest.mark.slow
def test_rows_that_are_rebuilt_in_part_have_a_scale_of_each_block() -> None:
    kept, wanted = one_step(decide(llama(layers=2), **IN_FP8))
    record, found = one_step(decide(llama(layers=2), **(IN_FP8 | {"recompute": "tokenwise", "swapped_tokens": 128})))
    assert record.loss == pytest.approx(kept.loss, rel=1e-3)
    assert all(float((found[n] - wanted[n]).norm() / wanted[n].norm()) <= NEAR for n in wanted)


@pytest.mark.slow
@pytest.mark.parametrize("recipe", ["block", "mx"])
def test_rows_that_are_rebuilt_in_part_have_the_same_scales_of_blocks(recipe: str) -> None:
    """Row blocks end where blocks of 128 tokens do, so only sums differ: a weight's gradient has a term of each."""
    fields = in_fp8(recipe)
    kept, wanted = one_step(decide(llama(layers=2, **BLOCKS), **fields))
    parts = {"recompute": "tokenwise", "swapped_tokens": 128}
    record, found = one_step(decide(llama(layers=2, **BLOCKS), **(fields | parts)))
    assert record.loss == pytest.approx(kept.loss, rel=1e-5)
    assert all(float((found[n] - wanted[n]).norm() / wanted[n].norm()) <= 1e-5 for n in wanted)


ROWWISE = {"recompute": "rowwise", "mlp_chunk_tokens": 128}
"""Two row blocks of one sequence."""
ROWS_OF_BLOCKS = pytest.mark.parametrize(
    ("model", "recipe"),
    [
        pytest.param(llama(layers=2), "tensor", id="tensor"),
        pytest.param(llama(layers=2), "delayed", id="delayed"),
        pytest.param(llama(layers=2, **BLOCKS), "block", id="block"),
        pytest.param(llama(layers=2, **BLOCKS), "mx", id="mx"),
        pytest.param(TENSOR_LATENTS, "tensor", id="latents"),
        pytest.param(BLOCK_LATENTS, "block", id="latents in blocks"),
        pytest.param(BLOCKS_WITHOUT_QUERY_LATENT, "mx", id="no latent for queries, in mx"),
    ],
)


@ROWS_OF_BLOCKS
def test_row_wise_recompute_in_one_block_has_the_bits_of_what_is_kept(model: Any, recipe: str) -> None:
    kept, wanted = one_step(decide(model, **in_fp8(recipe)))
    record, found = one_step(decide(model, **(in_fp8(recipe) | {"recompute": "rowwise", "swapped_tokens": 128})))
    assert record.loss == kept.loss
    assert all(torch.equal(found[name], wanted[name]) for name in wanted)


@pytest.mark.parametrize("recipe", ["tensor", "block"])
def test_experts_beside_row_wise_recompute_in_one_block_have_the_bits_of_what_is_kept(recipe: str) -> None:
    fields = in_fp8(recipe) | {"fp8_experts": True}
    kept, wanted = one_step(decide(EXPERTS, **fields))
    record, found = one_step(decide(EXPERTS, **(fields | {"recompute": "rowwise", "swapped_tokens": 128})), debug=True)
    assert record.loss == kept.loss
    assert all(torch.equal(found[name], wanted[name]) for name in wanted)


@pytest.mark.parametrize("recipe", ["tensor", "block"])
def test_every_product_of_experts_in_a_row_block_rounds_as_plain_torch_and_gradients_are_near(recipe: str) -> None:
    decisions, watched = decide(EXPERTS, **(in_fp8(recipe) | ROWWISE | {"fp8_experts": True})), Watched()
    batches = batch(decisions)
    with play(decisions, kernels=watched.kernels, debug=True) as interpreter:
        reference = AutogradModel(EXPERTS, weights.named_parameters(interpreter), dtype=torch.float32)
        record = interpreter.run_step(batches, scalars(batches, lr=0.0))
        found = gradients(interpreter)
    blocks = decisions.local_tokens // 128
    assert blocks > 1
    assert watched.compared["experts.linear.dgrad"] == watched.compared["experts.linear.wgrad"] == 2 * blocks
    # Recompute leaves the second product out.
    assert watched.compared["experts.linear"] == 3 * blocks
    assert_near_autograd(record, found, reference, batches)


@ROWS_OF_BLOCKS
def test_every_product_of_a_row_block_rounds_as_plain_torch_and_gradients_are_near(model: Any, recipe: str) -> None:
    decisions, watched = decide(model, **(in_fp8(recipe) | ROWWISE)), Watched()
    batches = batch(decisions)
    with play(decisions, kernels=watched.kernels) as interpreter:
        reference = AutogradModel(model, weights.named_parameters(interpreter), dtype=torch.float32)
        if recipe == "delayed":  # products of the first step have the scale 1
            interpreter.run_step(batches, scalars(batches, lr=0.0))
            watched.compared.clear()
        record = interpreter.run_step(batches, scalars(batches, lr=0.0, step=2))
        found = gradients(interpreter)
    blocks = decisions.local_tokens // 128
    products = (5 if model.latent else 4) * blocks * model.layers
    # Recompute leaves the MLP's second product out.
    assert watched.compared == {
        "linear": 2 * products - blocks * model.layers,
        "linear.dgrad": products,
        "linear.wgrad": products,
    }
    assert_near_autograd(record, found, reference, batches)


@pytest.mark.parametrize("recipe", ["block", "mx"])
def test_row_blocks_of_row_wise_recompute_have_the_same_scales_of_blocks(recipe: str) -> None:
    kept, wanted = one_step(decide(llama(layers=2, **BLOCKS), **in_fp8(recipe)))
    record, found = one_step(decide(llama(layers=2, **BLOCKS), **(in_fp8(recipe) | ROWWISE)))
    assert record.loss == kept.loss
    assert all(float((found[n] - wanted[n]).norm() / wanted[n].norm()) <= 1e-5 for n in wanted)


@pytest.mark.parametrize("recipe", ["tensor", "block"])
def test_memory_and_copies_of_row_wise_recompute_are_the_programs(recipe: str) -> None:
    decisions = decide(llama(layers=3, **BLOCKS), **(in_fp8(recipe) | ROWWISE | {"swapped_tokens": 256}))
    record, _ = one_step(decisions)
    assert_peak_is_the_programs(record, decisions)
    assert_copies_are_the_programs(record, decisions)
