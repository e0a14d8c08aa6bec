"""Offsets and shapes of the parameters in their block: ``embed``, one block for each layer, and ``head``.

With expert parallelism a layer has a second block, ``experts``: other ranks hold the same than those of the rest.

A block is a flat range of elements (features 1): first the matrices, which have weight decay, then the vectors. An
optimizer therefore sees two runs (decay, no decay), while a checkpoint sees names. Names inside a layer are memo's own;
``memo_exec`` maps them to those of Hugging Face.

For some vectors each tensor-parallel rank computes only a part of the gradient. They come last, so that one all-reduce
completes them. So it is with the product that makes latents (MLA), the last of the matrices: ranks multiply their token
shards by all of it.

With low-rank adapters (``contract/adapters.py``) a layer's block begins with them: first the sides that tensor
parallelism divides, then those that every rank has whole, whose gradients ranks compute in part. All that follows is
frozen, and so are embedding and head; gradients and states of a block end with its trained elements:

    [ B of qkv, ffn_up | A of proj, ffn_down ][ A of qkv, ffn_up | B of proj, ffn_down ][ matrices | vectors ]
      divided                                   whole on every rank                       frozen

A product whose output features are divided (qkv, ffn_up) has B divided by rows and A whole; one whose input features
are divided (proj, ffn_down) has A divided by columns and B whole. The A's of a product's targets (Q, K and V; gate and
up) lie one below the other, and so do their B's.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from enum import IntEnum
from math import prod

from memo_sim.contract.adapters import Adapters
from memo_sim.contract.experts import Experts
from memo_sim.contract.knobs import DtypeName
from memo_sim.contract.latent_attention import LatentAttention
from memo_sim.contract.layer_shape import LayerShape
from memo_sim.contract.model import Model
from memo_sim.contract.plan import Decisions


class Part(IntEnum):
    """The part of a parameter's gradient that a tensor-parallel rank computes."""

    WHOLE = 0
    """The whole gradient: the parameter is divided over ranks, or every rank computes the gradient in full."""
    TOKENS = 1
    """The gradient over the rank's token shard with sequence parallelism, in full without."""
    HEADS = 2
    """The gradient over the rank's heads."""


@dataclass(frozen=True, slots=True)
class Parameter:
    """One tensor of a block: its shape on one rank, its first element in the block, and whether it has weight decay."""

    name: str
    shape: tuple[int, ...]
    first: int
    decay: bool
    part: Part = Part.WHOLE
    frozen: bool = False
    """Whether it is not trained, and so has neither gradient nor optimizer states."""

    @property
    def elements(self) -> int:
        """Number of elements."""
        return prod(self.shape)


@dataclass(frozen=True, slots=True)
class Block:
    """Parameters that are stored together in one flat buffer."""

    name: str
    parameters: tuple[Parameter, ...]

    @property
    def elements(self) -> int:
        """Number of elements of the block."""
        return sum(p.elements for p in self.parameters)

    @property
    def trained_elements(self) -> int:
        """Number of elements that are trained, which come first."""
        return sum(p.elements for p in self.parameters if not p.frozen)

    @property
    def decayed_elements(self) -> int:
        """Number of trained elements with weight decay, which come first."""
        return sum(p.elements for p in self.parameters if p.decay and not p.frozen)

    def partial_elements(self, *, sequence_parallel: bool) -> int:
        """Return the number of trained elements whose gradients tensor-parallel ranks must sum."""
        return sum(elements for _, elements in self.partial_runs(sequence_parallel=sequence_parallel))

    def partial_runs(self, *, sequence_parallel: bool) -> list[tuple[int, int]]:
        """Return (first element, elements) of the ranges whose gradients tensor-parallel ranks must sum.

        There is one, of the last trained elements, or with latents or a gate one of a matrix before it.
        """
        least = Part.TOKENS if sequence_parallel else Part.HEADS
        found: list[tuple[int, int]] = []
        for parameter in self.parameters:
            if parameter.part < least or parameter.frozen:
                continue
            if found and sum(found[-1]) == parameter.first:
                found[-1] = found[-1][0], found[-1][1] + parameter.elements
            else:
                found.append((parameter.first, parameter.elements))
        return found

    def runs(self) -> list[tuple[str, int, int]]:
        """Return (name, first element, elements) of the ranges that an optimizer updates alike; none is empty.

        decay and no_decay: parameters with and without weight decay. selection: the bias of a router's choice. frozen:
        what is not trained.
        """
        decayed = self.decayed_elements
        bias = self.find(SELECTION_BIAS)
        selection = bias.elements if bias and not bias.frozen else 0
        ends = {"decay": decayed, "selection": decayed + selection, "no_decay": self.trained_elements}
        ends[FROZEN] = self.elements
        firsts = (0, *ends.values())
        return [(name, at, end - at) for (name, end), at in zip(ends.items(), firsts, strict=False) if end > at]

    def find(self, name: str) -> Parameter | None:
        """Return the parameter called ``name``, or None when the model has none (for example a bias)."""
        return next((p for p in self.parameters if p.name == name), None)


FROZEN = "frozen"
"""The run of a block's parameters that are not trained, behind those that are."""
POST_NORMS = ("post_attn", "post_mlp")
"""The norms behind attention and MLP, before the residual sums (``Model.post_norms``)."""
SELECTION_BIAS = "selection.bias"
"""The bias of the experts' choice. No gradient trains it: in place of one, the rows of each expert are summed over
micro-batches and ranks, and the optimizer moves the bias by the sign of their difference to the mean."""

Matrices = list[tuple[str, tuple[int, ...]]]
PARTS = {"latent.weight": Part.TOKENS, "shared_gate.weight": Part.HEADS}
"""Matrices whose gradient a tensor-parallel rank computes in part."""
Vectors = list[tuple[str, int, Part]]


def _block(  # noqa: PLR0917 - what a block is made of
    name: str,
    matrices: Matrices,
    vectors: Vectors,
    adapters: Adapters | None,
    sides: Sequence[Parameter] = (),
    parts: Mapping[str, Part] | None = None,
) -> Block:
    """Return a block; with ``adapters`` only ``sides`` of them, which come first, are trained.

    ``parts``: of the matrices whose gradient a tensor-parallel rank computes in part.
    """
    first, frozen = 0, adapters is not None
    parameters = []
    for side in sides:
        parameters.append(replace(side, first=first))
        first += side.elements
    for label, shape in matrices:
        part = (parts or PARTS).get(label, Part.WHOLE)
        parameters.append(Parameter(label, shape, first, decay=True, part=part, frozen=frozen))
        first += prod(shape)
    for label, width, part in sorted(vectors, key=lambda vector: (vector[0] != SELECTION_BIAS, vector[2])):
        parameters.append(Parameter(label, (width,), first, decay=False, part=part, frozen=frozen))
        first += width
    return Block(name, tuple(parameters))


def adapted_columns(
    model: Model, layer: LayerShape, divided: int, adapters: Adapters, product: str
) -> tuple[tuple[int, int], ...]:
    """Return (first feature, features) of each target in a product's result, on one of ``divided`` ranks."""
    q, kv, f = model.q_width // divided, model.kv_width // divided, layer.ffn_hidden // divided
    widths = {"q": q, "k": kv, "v": kv, "gate": f, "up": f, "proj": model.hidden, "down": model.hidden}
    packed = {"qkv": ("q", "k", "v"), "ffn_up": ("gate", "up") if model.gated else ("up",)}
    found, first = [], 0
    wanted = adapters.targets_of(product, model)
    for target in packed.get(product, wanted):
        if target in wanted:
            found.append((first, widths[target]))
        first += widths[target]
    return tuple(found)


def _sides(model: Model, layer: LayerShape, divided: int, adapters: Adapters) -> list[Parameter]:
    """Return both sides of a layer's adapters: those that ranks divide, then those that every rank has whole."""
    h, whole, split = model.hidden, list[Parameter](), list[Parameter]()
    for product, inputs in {
        "qkv": h,
        "proj": model.q_width // divided,
        "ffn_up": h,
        "ffn_down": layer.ffn_hidden // divided,
    }.items():
        columns = adapted_columns(model, layer, divided, adapters, product)
        if not columns:
            continue
        a = Parameter(f"{product}.lora_a", (len(columns) * adapters.rank, inputs), 0, decay=True)
        b = Parameter(f"{product}.lora_b", (sum(width for _, width in columns), adapters.rank), 0, decay=True)
        one, other = (b, a) if product in ("qkv", "ffn_up") else (a, b)
        split.append(one)
        whole.append(replace(other, part=Part.HEADS))
    return split + whole


def embed_block(model: Model, tp: int, *, positions: bool = True, adapters: Adapters | None = None) -> Block:
    """Return the embedding block: this rank's rows of the vocabulary, and learned positions; frozen with ``adapters``.

    ``positions`` is false for the copy on the last pipeline stage, whose tied classifier reads only the token rows.
    """
    matrices: Matrices = [("tokens.weight", (-(-model.vocab // tp), model.hidden))]
    if model.learned_positions and positions:
        matrices.append(("positions.weight", (model.max_positions, model.hidden)))
    return _block("embed", matrices, [], adapters)


def layer_block(
    model: Model,
    tp: int,
    layer: LayerShape,
    *,
    name: str = "layer",
    ep: int = 1,
    whole_experts: bool = False,
    adapters: Adapters | None = None,
) -> Block:
    """Return the block of a layer of the shape ``layer``; matrices are (out, in), and Q, K, V are packed in that order.

    The experts' matrices lie one after the other, each with its gate before its up half. ``name``: the block's name,
    which differs by layer kind. ``ep``: where ranks divide the experts, these are in a block of their own
    (``experts_block``), and the router stays here. ``whole_experts``: each tensor-parallel rank routes its own token
    shard (``Layout.whole_experts``). ``adapters``: they are trained, and come first.
    """
    h, f = model.hidden, layer.ffn_hidden // tp
    q, kv = model.q_width // tp, model.kv_width // tp
    up = 2 * f if model.gated else f
    matrices: Matrices = [("qkv.weight", (q + 2 * kv, h)), ("proj.weight", (h, q))]
    if model.latent is not None:
        matrices = _of_heads(model, model.latent, tp)
    if (experts := layer.experts) is None:
        matrices += [("ffn_up.weight", (up, h)), ("ffn_down.weight", (h, f))]
    else:
        if ep == 1:
            matrices += _experts(experts, h, tp, ep)
        matrices += _shared(experts, h, tp)
        matrices.append(("router.weight", (experts.count, h)))
    matrices += [("latent.weight", (model.latent.width, h))] if model.latent else []  # every rank has all of it
    vectors: Vectors = _of_router(experts, h, tp, ep, Part.TOKENS if whole_experts else Part.WHOLE) if experts else []
    vectors += [("norm1.weight", h, Part.TOKENS), ("norm2.weight", h, Part.TOKENS)]
    if model.family == "gpt":
        vectors += [("norm1.bias", h, Part.TOKENS), ("norm2.bias", h, Part.TOKENS)]
    if model.qkv_bias:
        vectors.append(("qkv.bias", q + 2 * kv, Part.WHOLE))
    if model.linear_bias or model.proj_bias:
        vectors.append(("proj.bias", h, Part.TOKENS))
    if model.linear_bias and experts is None:
        vectors += [("ffn_up.bias", up, Part.WHOLE), ("ffn_down.bias", h, Part.TOKENS)]
    if model.sinks:
        vectors.append(("sinks", model.heads // tp, Part.WHOLE))
    if model.post_norms:
        vectors += [(f"{name}.weight", h, Part.TOKENS) for name in POST_NORMS]
    vectors += _norms_of(model.latent) if model.latent else []
    if model.qk_norm:
        vectors += [("q_norm.weight", model.head_dim, Part.HEADS), ("k_norm.weight", model.head_dim, Part.HEADS)]
    sides = _sides(model, layer, tp, adapters) if adapters else ()
    parts = PARTS | ({"router.weight": Part.TOKENS} if whole_experts else {})
    return _block(name, matrices, vectors, adapters, sides, parts)


def _of_heads(model: Model, latent: LatentAttention, tp: int) -> Matrices:
    """Return the matrices of latent attention that ranks divide by heads."""
    heads = model.heads // tp
    return [
        ("q_up.weight", (heads * latent.head_dim, latent.q_rank or model.hidden)),
        ("kv_up.weight", (heads * (latent.nope_dim + latent.value_dim), latent.kv_rank)),
        ("proj.weight", (model.hidden, heads * latent.value_dim)),
    ]


def _norms_of(latent: LatentAttention) -> Vectors:
    ranks = (("q", latent.q_rank), ("kv", latent.kv_rank))
    return [(f"{name}_latent_norm.weight", rank, Part.TOKENS) for name, rank in ranks if rank]


def experts_block(
    model: Model,
    tp: int,
    ep: int,
    experts: Experts | None,
    adapters: Adapters | None = None,
    *,
    name: str = "experts",
) -> Block | None:
    """Return the block of one rank's experts; None without expert parallelism, or in a layer without experts.

    Rank r of ``ep`` has the experts [r x count / ep, (r + 1) x count / ep), and of each the features of its rank of tp.
    With ``adapters`` it is frozen.
    """
    return None if ep == 1 or experts is None else rank_experts_block(model, tp, ep, experts, adapters, name=name)


def rank_experts_block(
    model: Model, tp: int, ep: int, experts: Experts, adapters: Adapters | None = None, *, name: str = "experts"
) -> Block:
    """Return the block of one rank's experts, or (``ep`` 1) of all of them."""
    return _block(name, _experts(experts, model.hidden, tp, ep), _first_biases(experts, tp, ep), adapters)


def _experts(experts: Experts, hidden: int, tp: int, ep: int) -> Matrices:
    count, inside = experts.count // ep, experts.hidden // tp
    return [("experts_up.weight", (count * 2 * inside, hidden)), ("experts_down.weight", (count * hidden, inside))]


def _shared(experts: Experts, hidden: int, tp: int) -> Matrices:
    """Return the matrices of the shared expert; its gate, if there is one, is whole on every rank."""
    beside = experts.shared // tp
    gate: Matrices = [("shared_gate.weight", (1, hidden))] if experts.shared_gate else []
    if not beside:
        return []
    return [("shared_up.weight", (2 * beside, hidden)), ("shared_down.weight", (hidden, beside)), *gate]


def _first_biases(experts: Experts, tp: int, ep: int) -> Vectors:
    """Return the biases of the experts' first products, which lie where their matrices do."""
    width = experts.count // ep * 2 * (experts.hidden // tp)
    return [("experts_up.bias", width, Part.WHOLE)] if experts.bias else []


def _of_router(experts: Experts, hidden: int, tp: int, ep: int, part: Part) -> Vectors:
    """Return the biases of a layer's own block; the selection bias comes first, as its update differs.

    Those of the experts' second products are here with expert parallelism too: they are added to token rows. ``part``:
    what a tensor-parallel rank computes of the gradients of what is whole on every rank.
    """
    found: Vectors = []
    if experts.selection_bias:
        found.append((SELECTION_BIAS, experts.count, part))
    if ep == 1:
        found += _first_biases(experts, tp, ep)
    if experts.bias:
        found.append(("experts_down.bias", experts.count * hidden, part))
    if experts.router_bias:
        found.append(("router.bias", experts.count, part))
    return found


def head_block(model: Model, tp: int, *, adapters: Adapters | None = None) -> Block:
    """Return the block of the final norm and of the classifier, unless the classifier is tied to the embedding.

    Frozen with ``adapters``.
    """
    matrices: Matrices = []
    if not model.tied_embeddings:
        matrices.append(("classifier.weight", (-(-model.vocab // tp), model.hidden)))
    vectors: Vectors = [("norm.weight", model.hidden, Part.TOKENS)]
    if model.family == "gpt":
        vectors.append(("norm.bias", model.hidden, Part.TOKENS))
    return _block("head", matrices, vectors, adapters)


def without_masters(decisions: Decisions) -> bool:
    """Return whether a bf16 model has no fp32 master weights: AdamW updates and rounds its parameters."""
    return decisions.states in ("pure-bf16", "pure-bf16-fp32-moments")


def moment_dtype(decisions: Decisions) -> DtypeName:
    """Return the dtype of AdamW's moments."""
    return "bf16" if decisions.states in ("bf16", "pure-bf16") else "fp32"


def gradient_dtype(decisions: Decisions) -> DtypeName:
    """Return the dtype in which gradients are summed, over micro-batches and over ranks."""
    if decisions.grad_sums == "fp32":
        return "fp32"
    if without_masters(decisions):
        return "bf16"
    narrow = half_gradients(decisions) or (decisions.grad_sums == "params" and decisions.memory_policy != "eager")
    return decisions.dtype if narrow else "fp32"


def autocast(decisions: Decisions) -> bool:
    """Return whether parameters are fp32 and torch.autocast casts them (``grad_sums``)."""
    return decisions.grad_sums == "autocast" and decisions.dtype != "fp32"


def half_gradients(decisions: Decisions) -> bool:
    """Return whether gradients are summed in the parameters' dtype, both over micro-batches and over ranks.

    A separate kernel then adds the result of each product to the sum. Autograd does so with modules in bf16
    (``grad_sums``; for the first micro-batch of a step it keeps the result as it is, which is not modelled).
    Megatron-LM forces fp32 sums only for bf16. With fp16 its ``--accumulate-allreduce-grads-in-fp32`` is off by default
    (``megatron/training/arguments.py``).
    """
    by_default = decisions.dtype == "fp16" and decisions.grad_sums != "fp32"
    return decisions.memory_policy == "eager" and (by_default or decisions.grad_sums == "params")
