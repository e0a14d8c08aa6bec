"""FP8: which products of a layer run in it, which tensors are then kept in it, and the copies that products need.

The linear products of a layer (Q K V, projection, both products of a dense MLP) take operands in FP8 and write bf16, as
Transformer Engine's modules do. So do those of experts and of a shared expert with ``fp8_experts``. Attention, norms,
routers, embedding and classifier stay in the plan's dtype, and so does the product that makes latents (MLA): its weight
lies behind the router's, and its input, the first norm's result, is then kept in that dtype too. Activations and
weights are E4M3; gradients are E5M2 with one scale a tensor (TE's hybrid format), and E4M3 with scales of blocks.

A product sums over the features of its operands, a weight's gradient over their tokens. Scales of blocks lie along the
dimension that is summed, so a tensor has a copy by rows for the first and one by columns for the second. With one scale
a tensor the second copy is the first one transposed, where the device's products need that (layouts tn).

    recipe           layouts   copies of an input or gradient   kept for backward
    delayed, tensor  any       one                              that one
    delayed, tensor  tn        by rows, transposed              the transposed one
    block, mx        either    by rows, by columns              the one by columns

Sequence parallelism gathers copies. One with one scale a tensor is gathered by rows in forward and again in backward,
and is then transposed where it must be, so forward makes and keeps its shard by rows alone. Of copies of blocks,
forward gathers those by rows and backward those by columns; gradients are gathered in bf16 and then quantised.

A copy by columns has the same size as one by rows, and a row block's part of it is contiguous: blocks have 128 or 32
tokens, and row blocks end at multiples of 128. So rows can be swapped or recomputed. A scale of 4 bytes for
128 values, or of one byte for 32, takes 1/32 of the values' bytes; it lies behind its row's values. One scale a tensor
takes four bytes in all, which are not counted. With delayed scaling, scales and the largest values of earlier steps are
states (``operators/fp8_operands.py``).

Forward keeps the FP8 copies of a product's input in place of the input itself: of the norms' results and of the MLP's
activation. The projection's input is kept twice, because attention's backward reads its output in bf16.

Weights have FP8 copies beside those in the plan's dtype. With ``fp8_params`` there are only the FP8 ones: the optimizer
quantises its master weights to the copy by rows, which ranks gather, and the one by columns is that one transposed.
That is right for scales of 128 x 128 values too: the transposed weight has the same scales, transposed. Where ranks
share the masters (ZeRO), a scale follows from several ranks' values: each finds the largest ones of its share, and
these are reduced over the ranks before any of them quantises.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import lru_cache
from typing import Literal

from msgspec.structs import replace

from memo_sim.contract.knobs import Fp8Layouts, Fp8Recipe, ProductDtype
from memo_sim.contract.layer_shape import LayerShape
from memo_sim.contract.model import Model
from memo_sim.contract.plan import Decisions
from memo_sim.program.layout.parameters import Block, Parameter, layer_block
from memo_sim.program.layout.skeletal import Fate, Skeletal

ACTIVATIONS = "e4m3"
"""Dtype of FP8 activations and weights."""
FURTHER: dict[str, tuple[Fp8Recipe, ...]] = {
    "weights alone": ("tensor", "block"),
    "experts": ("tensor", "block"),
    "latent attention": ("tensor", "block", "mx"),
}
"""Recipes that memo-exec has for more than the products of dense layers (``further``)."""
WEIGHT_BLOCK = 128
"""Rows and columns of a weight's values that have one scale, with scales of blocks."""
SCALE_SHARE = 32
"""Values whose scale takes one byte: 128 values with an fp32 scale, or 32 with one of 8 bits."""
PRODUCTS: dict[Fp8Recipe, ProductDtype] = {
    "delayed": "fp8-tensor",
    "tensor": "fp8-tensor",
    "block": "fp8-block",
    "mx": "fp8-mx",
}
"""The products of a recipe as profiles name them."""
NARROW = "fp8"
"""The run of a block's parameters that are kept in FP8 alone."""
OF_DENSE_LAYERS = ("qkv", "q_up", "kv_up", "proj", "ffn_up", "ffn_down")
"""Products of a layer without experts that run in FP8; q_up and kv_up are latent attention's, in place of qkv."""
OF_EXPERTS = ("experts_up", "experts_down", "shared_up", "shared_down")
"""Those of experts, and of the shared one, with ``fp8_experts``."""
LATENTS = ("q_latent", "kv_latent")
"""What latent attention's products in FP8 read."""
GATHERED = ("norm1", "norm2", *LATENTS)
"""The inputs that sequence parallelism gathers."""
ATTENTION_OUTPUT = "attn_fp8"
"""The projection's input in FP8, which is kept beside attention's output in bf16."""
HISTORY = 1024
"""Steps whose largest values delayed scaling keeps, of which it uses the largest (Transformer Engine's default)."""
Scaled = Literal["input", "weight", "gradient"]
"""The operands of a product and its gradients that have a scale each."""
SCALED: tuple[Scaled, ...] = ("input", "weight", "gradient")

PLAYED_LAYOUTS: Mapping[Fp8Recipe, Fp8Layouts] = {"tensor": "tn", "delayed": "tn", "block": "tn", "mx": "any"}
"""The layouts of operands that memo-exec has kernels for, by recipe."""


def by_blocks(recipe: Fp8Recipe) -> bool:
    """Return whether scales are those of blocks, so that tensors have copies by rows and by columns."""
    return recipe in ("block", "mx")


def played(decisions: Decisions) -> bool:
    """Return whether memo-exec has kernels for the products of a plan: those of Hopper, and MXFP8 of Blackwell."""
    if decisions.fp8 == "none":
        return True
    return decisions.fp8_layouts == PLAYED_LAYOUTS[decisions.fp8] and not not_played(decisions)


def further(decisions: Decisions) -> list[str]:
    """Return what a plan has in FP8 beside the products of dense layers, in words."""
    every = {
        "weights alone": decisions.fp8_params,
        "experts": decisions.fp8_experts,
        "latent attention": decisions.fp8 != "none" and decisions.model.latent is not None,
    }
    return [name for name, chosen in every.items() if chosen]


def not_played(decisions: Decisions) -> list[str]:
    """Return what memo-exec has no kernels for in a plan's recipe, of what it has ``further``, in words."""
    return [name for name in further(decisions) if decisions.fp8 not in FURTHER[name]]


def delayed(decisions: Decisions) -> bool:
    """Return whether scales follow from the largest values of earlier steps, which are then states."""
    return decisions.fp8 == "delayed"


def scaled_operands(decisions: Decisions) -> tuple[tuple[str, Scaled], ...]:
    """Return (product, operand) of all scales that a layer of any kind has with delayed scaling, in order."""
    return tuple((product, operand) for product in _products(decisions) for operand in SCALED)


def scaled_row(decisions: Decisions, product: str, operand: Scaled) -> int:
    """Return the number of an operand among ``scaled_operands``."""
    return _products(decisions).index(product) * len(SCALED) + SCALED.index(operand)


def products(decisions: Decisions) -> tuple[str, ...]:
    """Return the names of the products that run in FP8; no layer has all of them."""
    return (*OF_DENSE_LAYERS, *(OF_EXPERTS if decisions.fp8_experts else ()))


def _products(decisions: Decisions) -> tuple[str, ...]:
    return _products_of(decisions.model, products(decisions))


@lru_cache(maxsize=64)
def _products_of(model: Model, names: tuple[str, ...]) -> tuple[str, ...]:
    blocks = [layer_block(model, 1, shape) for shape in model.layer_shapes]
    return tuple(name for name in names if any(block.find(f"{name}.weight") for block in blocks))


def gradients(recipe: Fp8Recipe) -> Literal["e4m3", "e5m2"]:
    """Return the dtype of FP8 gradients."""
    return "e4m3" if by_blocks(recipe) else "e5m2"


def row_features(recipe: Fp8Recipe, features: int) -> int:
    """Return the features of a row of a quantised tensor, in bytes: its values, and behind them their scales."""
    return features + (-(-features // SCALE_SHARE) if by_blocks(recipe) else 0)


def weights(decisions: Decisions, block: Block) -> tuple[Parameter, ...]:
    """Return the weights of a block's FP8 products, which lie at its beginning, one after the other."""
    found = (block.find(f"{name}.weight") for name in products(decisions))
    return tuple(weight for weight in found if weight is not None)


def quantised_inputs(decisions: Decisions, *, dense: bool) -> frozenset[str]:
    """Return the tensors that only FP8 products read; a router reads its norm's result in bf16."""
    inside = ("norm2", "act") if dense else ("act", "shared_act") if decisions.fp8_experts else ()
    return frozenset((*(LATENTS if decisions.model.latent else ("norm1",)), *inside))


def two_copies(decisions: Decisions) -> bool:
    """Return whether the two products of an input or a gradient read different copies of it."""
    return by_blocks(decisions.fp8) or decisions.fp8_layouts == "tn"


def weight_copies(decisions: Decisions) -> int:
    """Return how many FP8 copies of a weight its products read: one, or one more for the gradient of the input.

    Scales of 128 x 128 values are those of the transposed weight as well; MXFP8's have a direction.
    """
    return 2 if decisions.fp8_layouts == "tn" or decisions.fp8 == "mx" else 1


def copied_elements(decisions: Decisions, block: Block) -> int:
    """Return the bytes of all FP8 copies of a layer's weights, with their scales."""
    elements = sum(weight.elements for weight in weights(decisions, block))
    scales = -(-elements // SCALE_SHARE) if decisions.fp8 == "mx" else 0
    return weight_copies(decisions) * (elements + scales)


def narrow_elements(decisions: Decisions, block: Block) -> int:
    """Return the elements at a block's beginning that are kept in FP8 alone."""
    return sum(weight.elements for weight in weights(decisions, block)) if decisions.fp8_params else 0


def runs(decisions: Decisions, block: Block) -> list[tuple[str, int, int]]:
    """Return the ranges that an optimizer updates alike (``Block.runs``), with what is kept in FP8 alone apart."""
    narrow, found = narrow_elements(decisions, block), block.runs()
    if not narrow:
        return found
    (name, _, elements), *others = found
    rest = [(name, narrow, elements - narrow)] if elements > narrow else []
    return [(NARROW, 0, narrow), *rest, *others]


def weight_scales(recipe: Fp8Recipe, shape: tuple[int, ...]) -> tuple[int, int]:
    """Return the rows and columns of a weight's scales: one of each, or one for 128 x 128 values."""
    if not by_blocks(recipe):
        return 1, 1
    rows, columns = shape
    return -(-rows // WEIGHT_BLOCK), -(-columns // WEIGHT_BLOCK)


def largest_values(decisions: Decisions, block: Block) -> int:
    """Return how many largest values the scales of a block's FP8 weights follow from (``weight_scales``)."""
    return sum(
        rows * columns for rows, columns in (weight_scales(decisions.fp8, w.shape) for w in weights(decisions, block))
    )


def kept(decisions: Decisions, layer: LayerShape, tensors: tuple[Skeletal, ...]) -> tuple[Skeletal, ...]:
    """Return a layer's skeletal tensors as FP8 products keep them."""
    if decisions.fp8 == "none":
        return tensors
    inputs, found = quantised_inputs(decisions, dense=layer.experts is None), list[Skeletal]()
    sequence_sharded = any(t.name == "attn_seq" for t in tensors)
    for tensor in tensors:
        if tensor.name in inputs:
            found.append(_quantised(decisions, tensor, tensor.name))
            continue
        if tensor.name == "resid":
            attended = next(t for t in tensors if t.name == ("attn_seq" if sequence_sharded else "attn"))
            found.append(_quantised(decisions, attended, ATTENTION_OUTPUT))
        if tensor.name != "attn_seq":  # with Ulysses the projection keeps only its FP8 input, as without
            found.append(tensor)
    return tuple(found)


def _quantised(decisions: Decisions, tensor: Skeletal, name: str) -> Skeletal:
    features = row_features(decisions.fp8, tensor.features)
    return replace(tensor, name=name, features=features, dtype=ACTIVATIONS, fate=Fate.BY_TOKEN)
