"""What each op reads, makes and adds, by the mathematics of a transformer; by op, for ``values.py``.

A layer, forward, with the names of its values. ``*`` follows a tensor whose token shards were gathered (sequence
parallelism), ``~`` a partial sum over tensor-parallel ranks, ``^`` the head-sharded form of Ulysses, ``|`` rows that
are packed for its exchange, or have just arrived:

    x - norm1 - qkv (.0, .1: before norm of heads and rotary) - attn, lse - proj - resid = x + proj
      - norm2 - up - act - down - x of the next layer = resid + down          x of the last layer - final - logits

With experts (``value_experts.py``) the MLP is norm2 - dispatched - up - act - expert_out - down, where the middle ones
have dispatched rows.

Norms behind attention and MLP, where a model has them, make post_attn of proj and post_mlp of down; these are then the
terms of the sums. Sinks make attn and lse of attn.raw and lse.raw.

Backward, where ``d_`` is the gradient of a value. A sum passes its gradient on to both of its terms, so the gradient of
``down`` is that of the next ``x``, and that of ``proj`` is that of ``resid``:

    d_act = d_x (next) W_down      d_up = act'(up) d_act        d_norm2 = d_up W_up      d_resid = norm2' + d_x (next)
    d_attn = d_resid W_proj        d_qkv = attention'           d_norm1 = d_qkv W_qkv    d_x = norm1' + d_resid

A new op needs a rule here, in ``RULES``.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from memo_sim.program.ir.kinds import STATE_KINDS, BlockKind, FamilyKind, TemplateKind
from memo_sim.program.ir.work import Collective, Exchange
from memo_sim.program.verify import value_attention as attention
from memo_sim.program.verify import value_experts as experts
from memo_sim.program.verify import value_latent as latent
from memo_sim.program.verify.value_call import Call
from memo_sim.program.verify.value_operands import Found, Wanted, add_gradient, agree, rowwise, weight
from memo_sim.program.verify.value_rows import ParameterKey, Sum, Value, add_range
from memo_sim.program.verify.value_terms import (
    WITHOUT_ADAPTER,
    chain,
    gradient_before_heads,
    gradient_name,
    joined,
    product_name,
    whole,
)

if TYPE_CHECKING:
    from memo_sim.program.verify.values import Values

Rule = Callable[[Call], None]
LAYER, EMBED, HEAD = BlockKind.LAYER, BlockKind.EMBED, BlockKind.HEAD


# Forward


def embed(call: Call) -> None:
    """Check the lookup of token rows, and of positions where one rank has the whole vocabulary."""
    v = call.values
    weight(call, "weight", "tokens.weight", None, EMBED)
    if v.tp == 1:
        weight(call, "positions", "positions.weight", None, EMBED)
    rowwise(call, {"ids": "input.ids"}, {"out": ("x~" if v.tp > 1 else "x", 1)})


def positions_add(call: Call) -> None:
    """Check the positions that are added to the sum of a divided lookup."""
    weight(call, "positions", "positions.weight", None, EMBED)
    rowwise(call, {"source": "x.sum"}, {"target": "x"})


NORMS = {
    "x": ("norm1", LAYER),
    "resid": ("norm2", LAYER),
    "proj": ("post_attn", LAYER),
    "down": ("post_mlp", LAYER),
}


def _norm_of(call: Call, role: str, value: Value | None) -> tuple[str, BlockKind, str] | None:
    """Return the name of the norm that reads ``value``: of its parameters, their block, and of its output."""
    if value is not None and value.name == "x" and value.layer == call.values.model.layers:
        return "norm", HEAD, "final"
    behind = value is not None and value.name in ("proj", "down")
    if value is None or value.name not in NORMS or (behind and not call.values.model.post_norms):
        if value is not None:
            call.wrong(role, value, 0, "x or resid")
        return None
    name, kind = NORMS[value.name]
    return name, kind, name


def norm(call: Call) -> None:
    """Check a norm: which one it is follows from what it reads."""
    for first, tokens, [(value, row)] in call.pieces("x"):
        found = _norm_of(call, "x", value)
        if found is None or value is None:
            for role in ("out", "stats", "saved"):
                call.put(role, first, tokens, None)
            continue
        name, kind, out = found
        weight(call, "weight", f"{name}.weight", value.layer, kind)
        weight(call, "bias", f"{name}.bias", value.layer, kind)
        call.put("out", first, tokens, value._replace(name=out), row)
        call.put("stats", first, tokens, value._replace(name=f"{out}_stats"), row)
        call.put("saved", first, tokens, value._replace(name=f"{out}_saved"), row)


LATENT_PRODUCTS = {"norm1": ("latent", LAYER, "latent"), "kv_latent": ("kv_up", LAYER, "kv_up")}
"""Products of latent attention by what they read: the latents of a token shard, and the heads of gathered latents."""


def _product_of(call: Call, value: Value) -> tuple[str, BlockKind, str] | None:
    """Return the product that reads a value: its weight's name and block, and its result's name.

    In a layer with experts the plain products are those of the shared expert.
    """
    v, name = call.values, value.name
    partial = "~" if v.tp > 1 else ""
    base = name.removesuffix("*")
    if v.model.latent and base in LATENT_PRODUCTS:
        return LATENT_PRODUCTS[base] if name == (base if base == "norm1" else f"{base}{v.full}") else None
    if base in ("norm1", "norm2", "final") and v.full and not name.endswith("*"):
        return None
    if base == "norm2" and v.has_experts(value.layer):
        return "shared_up", LAYER, "shared_up"
    products = {
        "norm1": ("qkv", LAYER, product_name(v)),
        "attn": ("proj", LAYER, f"proj{partial}"),
        "norm2": ("ffn_up", LAYER, "up"),
        "act": ("ffn_down", LAYER, f"down{partial}"),
        "shared_act": ("shared_down", LAYER, experts.partial_sums(v, "down")[-1]),
        "final": ("tokens", EMBED, "logits") if v.model.tied_embeddings else ("classifier", HEAD, "logits"),
    }
    return products.get(base)


def linear(call: Call) -> None:
    """A product adds its terms to a sum over parts where weights pass round (METP)."""
    added = call.instruction.op == "linear.add"
    for first, tokens, [(given, row)] in call.pieces("x"):
        value = None if given is None else whole(call, "x", given, row, tokens)
        found = None if value is None else _product_of(call, value)
        if value is None or found is None:
            if value is not None:
                call.wrong("x", value, row, "the input of a product")
            for role in ("out", "gate"):
                call.put(role, first, tokens, None)
            continue
        name, kind, out = found
        held = weight(call, "weight", f"{name}.weight", value.layer, kind)
        if f"{name}.bias" in ("qkv.bias", "ffn_up.bias"):
            weight(call, "bias", f"{name}.bias", value.layer, kind)
        summed = name in ("proj", "ffn_down")
        if summed and held != value.part:
            call.fault(f"the weight is that of {held}, but x is that of {value.part}")
        result = value._replace(name=out, part=held)
        if summed and call.values.layout.metp > 1:
            result = result._replace(part=None, terms=frozenset({held}))
        if kind is LAYER and _adapted(call, name):
            result = result._replace(terms=WITHOUT_ADAPTER)
        add = experts.add_shared if name == "shared_down" else add_terms
        if added:
            add(call, "out", first, tokens, result, row)
        else:
            call.put("out", first, tokens, result, row)
        if call.instruction.op == "linear.to_gate":
            call.put("gate", first, tokens, result._replace(name="gate"), row)
    if call.instruction.op == "linear.from_gate":
        rowwise(call, {"x": "norm2*/norm2", "gate": "gate"}, {})


def add_terms(call: Call, role: str, first: int, tokens: int, new: Value, row: int) -> None:  # noqa: PLR0917
    """Add a term to rows that hold a sum with other terms of the same value."""
    for low, high, old, at in call.rows(role, first, tokens):
        here = row + low - first
        if old is None:
            continue
        same = old._replace(terms=None) == new._replace(terms=None) and at == here
        terms = joined(old.terms, new.terms) if same else None
        if terms is None:
            call.fault(
                f"{role} holds {old} (row {at}) with {old.terms}; {new} (row {here}) with {new.terms} is not one more"
            )
        call.put(role, low, high - low, None if terms is None else new._replace(terms=terms), here)


def residual_add(call: Call) -> None:
    """Check one of the two residual sums of a layer."""
    for first, tokens, values in call.pieces("x", "y"):
        y = values[1][0]
        attended, fed = ("post_attn", "post_mlp") if call.values.model.post_norms else ("proj", "down")
        if y is not None and y.name.startswith(fed):
            found, made, bias = agree(call, {"x": "resid", "y": fed}, values, tokens), ("x", 1), "ffn_down.bias"
        else:
            found, made, bias = agree(call, {"x": "x", "y": attended}, values, tokens), ("resid", 0), "proj.bias"
        value = None
        if found is not None:
            weight(call, "bias", bias, found[0])
            value = Value(made[0], found[0] + made[1], found[1])
        call.put("out", first, tokens, value, found[3] if found else 0)


def activation(call: Call) -> None:
    """Check the activation between the products of the MLP, or of the shared expert."""
    if _is_shared(call):
        rowwise(call, {"x": "shared_up"}, {"out": "shared_act"})
        return
    rowwise(call, {"x": "up"}, {"out": "act", "silu": "silu"})


def _is_shared(call: Call) -> bool:
    """Return whether an activation reads the first product of a shared expert."""
    value = call.rows("x")[0].value if call.has("x") else None
    return value is not None and value.name == "shared_up"


# Backward


def activation_backward(call: Call) -> None:
    """Check the backward of ``activation``."""
    if _is_shared(call):
        rowwise(call, {"grad": "d_shared_act", "x": "shared_up"}, {"grad_x": "d_shared_up"})
        return
    silu: dict[str, Wanted] = {"silu": "silu"} if call.has("silu") else {}
    rowwise(call, {"grad": "d_act", "x": "up", **silu}, {"grad_x": "d_up"})


def _gradient_of(call: Call, value: Value) -> tuple[str, BlockKind, str, int, str] | None:
    """Return the product whose result's gradient a value is: weight, block, input, layers before, name of the input."""
    v = call.values
    base, partial = value.name.removesuffix("*"), "~" if v.tp > 1 else ""
    behind = v.model.post_norms
    if base == "d_x" and v.has_experts(value.layer - 1):
        return "shared_down", LAYER, "d_shared_act", 1, "shared_act"
    if base == ("d_down" if behind else "d_x"):
        return "ffn_down", LAYER, "d_act", 0 if behind else 1, "act"
    if v.model.latent and base == "d_kv_up":
        return "kv_up", LAYER, f"d_kv_latent{partial}", 0, "kv_latent"
    if v.model.latent and base == "d_latent":
        return "latent", LAYER, "d_norm1", 0, "norm1"
    if base == gradient_name(v):
        return "qkv", LAYER, f"d_norm1{partial}", 0, "norm1"
    products = {
        "d_proj" if behind else "d_resid": ("proj", LAYER, "d_attn", 0, "attn"),
        "d_up": ("ffn_up", LAYER, f"d_norm2{partial}", 0, "norm2"),
        "d_shared_up": ("shared_up", LAYER, experts.SHARED_NORM, 0, "norm2"),
        "d_logits": (
            "tokens" if v.model.tied_embeddings else "classifier",
            EMBED if v.model.tied_embeddings else HEAD,
            f"d_final{partial}",
            0,
            "final",
        ),
    }
    return products.get(base)


def dgrad(call: Call) -> None:
    """Check the gradient of the input of a product; the gradient that it reads says of which."""
    v = call.values
    if _low_rank(call, "grad"):
        _adapter_dgrad(call)
        return
    for first, tokens, [(given, row)] in call.pieces("grad"):
        value = None if given is None else whole(call, "grad", given, row, tokens)
        found = None if value is None else _gradient_of(call, value)
        if value is None or found is None:
            if value is not None:
                call.wrong("grad", value, row, "the gradient of a product")
            call.put("out", first, tokens, None)
            continue
        name, kind, out, before, _ = found
        layer = value.layer - before
        held = weight(call, "weight", f"{name}.weight", layer, kind)
        summed = name in ("qkv", "ffn_up")
        if summed and held != value.part:
            call.fault(f"the weight is that of {held}, but grad is that of {value.part}")
        shard = v.full and name in ("proj", "ffn_down", "shared_down") and not value.name.endswith("*")
        if shard:
            call.wrong("grad", value, row, f"{value.name}*")
        result = Value(out, layer, value.micro_batch, held)
        if summed and v.layout.metp > 1:
            result = result._replace(part=None, terms=frozenset({held}))
        if kind is LAYER and _adapted(call, name):
            result = result._replace(terms=WITHOUT_ADAPTER)
        add = experts.add_shared if name == "shared_up" else add_terms
        if name == "latent":
            latent.input_gradient(call, first, tokens, result, row)
        elif call.instruction.op == "linear.dgrad.add":
            add(call, "out", first, tokens, result, row)
        else:
            call.put("out", first, tokens, result, row)


# Adapters: ``low.qkv`` are the low-rank rows of a product's input, ``d_low.qkv`` their gradient


def _adapted(call: Call, product: str) -> bool:
    """Return whether a product has a low-rank adapter."""
    return call.values.parameter(LAYER, f"{product}.lora_a", None) is not None


def _low_rank(call: Call, role: str) -> bool:
    """Return whether rows are the gradient of an adapter's low-rank rows."""
    return any(value is not None and value.name.startswith("d_low.") for _, _, value, _ in call.rows(role))


def _complete(call: Call, first: int, tokens: int, wanted: Value, row: int) -> None:
    """Let rows of ``out``, which hold ``wanted`` without its adapter, hold all of it."""
    for low, high, old, at in call.rows("out", first, tokens):
        here = row + low - first
        fits = old is not None and old == wanted._replace(terms=WITHOUT_ADAPTER) and at == here
        if old is not None and not fits:
            call.fault(f"out holds {old} (row {at}), not {wanted} (row {here}) without its adapter")
        call.put("out", low, high - low, wanted if fits else None, here)


def adapter_low(call: Call) -> None:
    """Check the low-rank rows of a product's input."""
    for first, tokens, [(given, row)] in call.pieces("x"):
        value = None if given is None else whole(call, "x", given, row, tokens)
        found = None if value is None else _product_of(call, value)
        if value is None or found is None:
            if value is not None:
                call.wrong("x", value, row, "the input of a product")
            call.put("out", first, tokens, None)
            continue
        weight(call, "weight", f"{found[0]}.lora_a", value.layer)
        call.put("out", first, tokens, value._replace(name=f"low.{found[0]}"), row)


def adapter_add(call: Call) -> None:
    """Check what an adapter adds to its product."""
    partial = "~" if call.values.tp > 1 else ""
    made = {"qkv": product_name(call.values), "proj": f"proj{partial}", "ffn_up": "up", "ffn_down": f"down{partial}"}
    for first, tokens, [(value, row)] in call.pieces("x"):
        product = "" if value is None else value.name.removeprefix("low.")
        if value is None or product not in made or product == value.name:
            if value is not None:
                call.wrong("x", value, row, "the low-rank rows of a product")
            continue
        weight(call, "weight", f"{product}.lora_b", value.layer)
        _complete(call, first, tokens, value._replace(name=made[product]), row)


def adapter_low_gradient(call: Call) -> None:
    """Check the gradient of the low-rank rows, from that of the product's result."""
    for first, tokens, [(given, row)] in call.pieces("grad"):
        value = None if given is None else whole(call, "grad", given, row, tokens)
        found = None if value is None else _gradient_of(call, value)
        if value is None or found is None:
            if value is not None:
                call.wrong("grad", value, row, "the gradient of a product")
            call.put("out", first, tokens, None)
            continue
        layer = value.layer - found[3]
        weight(call, "weight", f"{found[0]}.lora_b", layer)
        call.put("out", first, tokens, Value(f"d_low.{found[0]}", layer, value.micro_batch), row)


def _adapter_dgrad(call: Call) -> None:
    """Check what an adapter adds to the gradient of its product's input."""
    partial = "~" if call.values.tp > 1 else ""
    made = {"qkv": f"d_norm1{partial}", "proj": "d_attn", "ffn_up": f"d_norm2{partial}", "ffn_down": "d_act"}
    for first, tokens, [(value, row)] in call.pieces("grad"):
        if value is None:
            continue
        product = value.name.removeprefix("d_low.")
        held = weight(call, "weight", f"{product}.lora_a", value.layer)
        _complete(call, first, tokens, Value(made[product], value.layer, value.micro_batch, held), row)


def adapter_outer_gradient(call: Call) -> None:
    """Check the gradient of B, from that of the product's result and the low-rank rows."""
    for _, tokens, values in call.pieces("grad", "x"):
        grad, row = values[0]
        value = None if grad is None else whole(call, "grad", grad, row, tokens)
        product = None if value is None else _gradient_of(call, value)
        if value is None or product is None:
            if value is not None:
                call.wrong("grad", value, row, "the gradient of a product")
            continue
        wanted: dict[str, Wanted] = {"grad": (value.name, product[3]), "x": f"low.{product[0]}"}
        found = agree(call, wanted, [(value, row), values[1]], tokens)
        if found is not None:
            add_gradient(call, "out", f"{product[0]}.lora_b", found, tokens)


def _adapter_wgrad(call: Call) -> None:
    """Check the gradient of A, from that of the low-rank rows and the product's input."""
    full = call.values.full
    inputs = {"qkv": f"norm1{full}", "proj": "attn", "ffn_up": f"norm2{full}", "ffn_down": "act"}
    for _, tokens, values in call.pieces("grad", "x"):
        grad, _ = values[0]
        if grad is None or values[1][0] is None:
            continue
        product = grad.name.removeprefix("d_low.")
        found = agree(call, {"grad": grad.name, "x": inputs[product]}, values, tokens)
        if found is not None:
            add_gradient(call, "out", f"{product}.lora_a", found, tokens)


def _source(part: object) -> object:
    """Return the source of a weight gradient's terms: 0 for this rank's own weights."""
    if isinstance(part, tuple) and part[0] in ("hop", "root"):
        return part
    return 0


def wgrad(call: Call) -> None:
    """Check the gradient of a weight, and add its rows to the sum."""
    v = call.values
    if _low_rank(call, "grad"):
        _adapter_wgrad(call)
        return
    for _, tokens, values in call.pieces("grad", "x"):
        grad, row = values[0]
        if grad is None or values[1][0] is None:
            continue
        value = whole(call, "grad", grad, row, tokens)
        product = None if value is None else _gradient_of(call, value)
        if value is None or product is None:
            if value is not None:
                call.wrong("grad", value, row, "the gradient of a product")
            continue
        name, kind, _, before, x = product
        x = f"{x}{v.full}" if x.startswith(("norm", "final", "kv_latent")) and name != "latent" else x
        wanted: dict[str, Wanted] = {"grad": (value.name, before), "x": x}
        other, at = values[1]
        assert other is not None
        # Of the two, a sum over parts and the input of all parts belong to every part; the other one says which it is.
        if name in ("proj", "ffn_down"):
            value = value._replace(part=other.part)
        else:
            other = other._replace(part=value.part)
        given = [(value, row), (other, at)]
        found = agree(call, wanted, given, tokens)
        if found is not None:
            source = "classifier" if kind is EMBED else _source(found[2])
            add_gradient(call, "out", f"{name}.weight", found, tokens, source, kind)


def bias_backward(call: Call) -> None:
    """Check the gradient of a bias, and add its rows to the sum."""
    for _, tokens, [(given, row)] in call.pieces("grad"):
        value = None if given is None else whole(call, "grad", given, row, tokens)
        if value is None:
            continue
        product = _gradient_of(call, value)
        if product is None or product[1] is not LAYER:
            call.wrong("grad", value, row, "the gradient of a product with bias")
            continue
        found = (value.layer - product[3], value.micro_batch, value.part, row)
        add_gradient(call, "out", f"{product[0]}.bias", found, tokens, _source(value.part))


def _input_of(saved: Value | None) -> Value | None:
    """Return the input of the norm that saved these rows."""
    names = {f"{name}_saved": given for given, (name, _) in NORMS.items()}
    return None if saved is None else saved._replace(name=names.get(saved.name, saved.name))


def norm_backward(call: Call) -> None:
    """Check the backward of a norm, which also adds the gradient of the residual branch.

    Where modules save rows of their own (``saved``), these may stand for the norm's input.
    """
    residual = call.has("residual_grad")
    roles = ["grad", *(role for role in ("x", "saved") if call.has(role)), "stats"]
    roles += ["residual_grad"] if residual else []
    for first, tokens, values in call.pieces(*roles):
        x = values[1][0] if call.has("x") else _input_of(values[1][0])
        which = _norm_of(call, roles[1], x)
        if which is None or x is None:
            call.put("out", first, tokens, None)
            continue
        name, kind, out = which
        named = {"grad": f"d_{out}", "x": x.name, "saved": f"{out}_saved", "stats": f"{out}_stats"}
        wanted: dict[str, Wanted] = {role: named[role] for role in roles if role in named}
        behind = name in ("post_attn", "post_mlp")
        if behind:  # a sum passes its gradient on to both of its terms
            wanted["grad"] = "d_resid" if name == "post_attn" else ("d_x", 1)
        if residual:
            wanted["residual_grad"] = ("d_x", 1) if name == "norm2" else "d_resid"
        if residual != (kind is LAYER and not behind):
            call.fault(f"residual_grad is {'' if residual else 'not '}given")
        found = agree(call, wanted, values, tokens)
        if found is not None:
            weight(call, "weight", f"{name}.weight", found[0], kind)
            add_gradient(call, "grad_weight", f"{name}.weight", found, tokens, 0, kind)
            add_gradient(call, "grad_bias", f"{name}.bias", found, tokens, 0, kind)
        value = None if found is None else Value(f"d_{x.name}", found[0], found[1])
        call.put("out", first, tokens, value, found[3] if found else 0)


def embed_backward(call: Call) -> None:
    """Add the rows of the gradient of the first layer's input to that of the embedding."""
    v = call.values
    wanted: dict[str, Wanted] = {"ids": ("input.ids", -1), "grad": f"d_x{v.full}"}
    for _, tokens, values in call.pieces(*wanted):
        found = agree(call, wanted, values, tokens)
        if found is not None:
            add_gradient(call, "grad_weight", "tokens.weight", found, tokens, "lookup", EMBED)
            add_gradient(call, "grad_positions", "positions.weight", found, tokens, 0, EMBED)


# Loss


def _labels(call: Call) -> dict[str, Wanted]:
    """Labels belong to no layer; -1 makes them agree with the logits, which are of the layer after the last."""
    return {"labels": ("input.labels", -1 - call.values.model.layers)}


def _rollout(call: Call) -> dict[str, Wanted]:
    """A policy's numbers of a token belong to no layer either; kernels without them read ``rollout`` of none."""
    return {"rollout": ("input.rollout", -1 - call.values.model.layers)}


def _add_loss(call: Call, found: Found, tokens: int) -> None:
    _, micro_batch, _, row = found
    ranges = call.values.loss.setdefault((micro_batch, 0), [])
    joined = add_range(ranges, row, row + tokens)
    if joined is None:
        call.fault(f"the loss has rows [{row}, {row + tokens}) of micro-batch {micro_batch} twice")
    else:
        call.values.loss[micro_batch, 0] = joined


def loss(
    logits: str,
    made: dict[str, Wanted],
    *,
    given: dict[str, Wanted] | None = None,
    labels: bool = True,
    adds: bool = False,
) -> Rule:
    """Return the rule of a kernel of the loss: it reads ``logits`` in role logits, labels, and ``given``.

    ``adds``: it adds its tokens' losses.
    """

    def rule(call: Call) -> None:
        wanted: dict[str, Wanted] = {"logits": logits} if logits else {}
        wanted |= given or {}
        wanted |= (_labels(call) | _rollout(call)) if labels else {}
        wanted = {role: want for role, want in wanted.items() if call.has(role)}
        for first, tokens, values in call.pieces(*wanted):
            found = agree(call, wanted, values, tokens)
            if found is not None and adds:
                _add_loss(call, found, tokens)
                if call.values.policy and not call.has("rollout"):
                    call.fault("the policy's objective is added without the rollout's numbers")
            for role, name in made.items():
                value = None
                if found is not None and isinstance(name, str):
                    summed = name if call.values.tp > 1 else name.removesuffix("~")
                    value = Value(summed, found[0], found[1])
                call.put(role, first, tokens, value, found[3] if found else 0)
        for role in ("product", "metrics"):
            if call.has(role):
                call.put(role, 0, call.tokens(role), None)

    return rule


def cross_entropy(call: Call) -> None:
    """One kernel; over a divided vocabulary it needs the sums over ranks, and reads none otherwise."""
    if call.has("stats") != (call.values.tp > 1):
        call.fault("stats of a divided vocabulary are missing, or not asked for")
    made: dict[str, Wanted] = {"grad": "d_logits"} if call.has("grad") else {"logits": "d_logits"}
    loss("logits", made, given={"stats": "loss.stats"}, adds=True)(call)


# Moves


def copy(call: Call) -> None:
    """Carry values and sums along; a row of the host is offloaded once and comes back once."""
    source, target = call.family("source"), call.family("target")
    if source.kind in STATE_KINDS and target.kind in STATE_KINDS:
        same = call.values.layer_of(call.buffers["source"]) == call.values.layer_of(call.buffers["target"])
        if not same or source.block is not target.block:
            call.fault(f"copies {source.name} to {target.name} of another layer")
        return
    found = call.values.sums.get(call.buffers["source"])
    if found:
        call.values.sums[call.buffers["target"]] = dict(found)
        return
    chunk = call.own_chunk("target")
    for first, end, value, row in call.rows("source"):
        if chunk and value is not None:
            v = call.values
            call.put(
                "target", first, end - first, value._replace(name=f"{value.name}*"), row * v.tp + v.tp_rank * chunk
            )
        else:
            call.put("target", first, end - first, value, row)


def offload(call: Call) -> None:
    """Carry values to the host, where they wait for one prefetch."""
    copy(call)
    if call.family("target").kind is FamilyKind.PER_LAYER:
        waiting = call.values.offloaded
        buffer = call.buffers["target"]
        if waiting.get(buffer):
            call.fault(f"offloads to {call.family('target').name}, whose rows were not prefetched yet")
        waiting[buffer] = waiting.get(buffer, 0) + call.tokens("target")


def prefetch(call: Call) -> None:
    """Carry values back from the host, where an offload has left them."""
    copy(call)
    if call.family("source").kind is FamilyKind.PER_LAYER:
        buffer = call.buffers["source"]
        left = call.values.offloaded.get(buffer, 0) - call.tokens("source")
        if left < 0:
            call.fault(f"prefetches rows of {call.family('source').name} that no offload left there")
        call.values.offloaded[buffer] = max(left, 0)


def zero(call: Call) -> None:
    """Clear sums of gradients of parameters; other rows hold zeros."""
    operand, buffer = call.operands["target"], call.buffers["target"]
    if call.family("target").features == 1:
        _all_of(call, "target")
        call.values.sums[buffer] = {}
        call.values.reduced -= {(buffer, "replicas"), (buffer, "vectors"), (buffer, "matrices")}
        return
    call.put("target", 0, operand.tokens, Value("zero", -1, -1))


def _rescaled(call: Call, source: str, target: str, rename: Callable[[str], str | None]) -> None:
    """Carry values to an operand that has more or fewer rows, in proportion, under other names."""
    given, taken = call.tokens(source), call.tokens(target)
    for first, end, held, row in call.rows(source):
        low, high = first * taken // given, end * taken // given
        value = None if held is None else whole(call, source, held, row, end - first)
        name = None if value is None else rename(value.name)
        if value is not None and name is None:
            call.wrong(source, value, row, f"what {call.instruction.op} takes")
        result = None if value is None or name is None else value._replace(name=name)
        call.put(target, low, high - low, result, row * taken // given)


def all_gather(call: Call) -> None:
    """Gather token shards, keys and values, or what each rank received of one tensor."""
    work = call.work
    assert isinstance(work, Collective)
    if call.has("others"):  # what each rank received of a tensor that all of them hold
        rows = call.rows("shard")
        last = rows[-1]
        call.put("others", 0, call.tokens("others"), last.value, last.row + last.end - last.first)
        return
    if work.group == "tp":
        _rescaled(call, "shard", "full", lambda name: None if name.endswith(("*", "~")) else f"{name}*")
        return
    attention.gather_keys(call)


def reduce_scatter(call: Call) -> None:
    """Sum partial sums over ranks, each its own rows."""
    work = call.work
    assert isinstance(work, Collective)
    if work.group == "tp":
        _rescaled(call, "full", "shard", lambda name: _summed(call.values, name))
        return
    attention.scatter_keys(call)


def _summed(v: Values, name: str) -> str | None:
    """Return the name of a partial sum over ranks once it is summed; an embedding may get its positions yet."""
    if not name.endswith("~"):
        return None
    return "x.sum" if name == "x~" and v.model.learned_positions else name.removesuffix("~")


def all_reduce(call: Call) -> None:
    """Sum partial sums over ranks; sums over the ranks of gradients, norm and loss change no value."""
    work, family, buffer = call.work, call.family("tensor"), call.buffers["tensor"]
    assert isinstance(work, Collective)
    if family.kind in (FamilyKind.GRADS, FamilyKind.WHOLE_GRADS):
        _reduced(call, buffer, "stages" if work.group == "tied" else _parts_of(call, buffer))
        return
    if family.kind is FamilyKind.SCALAR or buffer in call.values.sums:
        return
    for first, end, value, row in call.rows("tensor"):
        name = None
        if value is not None:
            name = SUMMED_IN_PLACE.get(value.name) or _summed(call.values, value.name)
            if name is None:
                call.wrong("tensor", value, row, "a partial sum")
        call.put(
            "tensor", first, end - first, None if value is None or name is None else value._replace(name=name), row
        )


SUMMED_IN_PLACE = {
    "loss.stats~": "loss.stats",
    "loss.maxima~": "loss.maxima",
    "loss.sums~": "loss.sums",
    "dk.all~": "dk.all",
    "dv.all~": "dv.all",
}


def all_to_all(call: Call) -> None:
    """Exchange rows between the two forms of Ulysses."""

    def rename(name: str) -> str | None:
        if name.endswith("|"):
            return f"{name[:-1]}^"
        return f"{name[:-1]}|" if name.endswith("^") else None

    _rescaled(call, "send", "recv", rename)


def heads_transpose(call: Call) -> None:
    """Pack rows by rank for an exchange, or unpack those that arrived."""
    for first, end, held, row in call.rows("source"):
        value = None if held is None else whole(call, "source", held, row, end - first)
        if value is not None:
            value = value._replace(name=value.name[:-1] if value.name.endswith("|") else f"{value.name}|")
        call.put("target", first, end - first, value, row)


def heads(source: str, target: str, given: str, made: Callable[[Call], str]) -> Rule:
    """Return the rule of an op that exchanges heads which tensor-parallel ranks share."""

    def rule(call: Call) -> None:
        wanted = gradient_before_heads(call.values) if given == "d_qkv" else given
        _rescaled(call, source, target, lambda name: made(call) if name == wanted else None)

    return rule


def parts_sum(call: Call) -> None:
    """Sum this rank's rows that every tensor-parallel rank has multiplied, in chunks (``tp_overlap``).

    What ranks send each other are the chunks of one row block, each for the rank of its place.
    """
    rows, tp = call.rows("parts"), call.values.tp
    known = [each.value for each in rows if each.value is not None]
    tokens = call.tokens("out")
    if len(known) != len(rows):
        call.put("out", 0, tokens, None)
        return
    first = min(each.row for each in rows)
    same = {value._replace(part=None) for value in known}
    expected = {first + n * tokens for n in range(tp)}
    distances = {value.part for value in known}
    name = _summed(call.values, known[0].name)
    if len(same) != 1 or {each.row for each in rows} != expected or len(distances) != tp or name is None:
        found = ", ".join(f"{each.value} (row {each.row})" for each in rows)
        call.fault(f"parts are not one from every rank of one tensor's rows: {found}")
        call.put("out", 0, tokens, None)
        return
    call.put("out", 0, tokens, known[0]._replace(name=name, part=None), first // tp)


def send_recv(call: Call) -> None:
    """What arrives is what this rank sends, from ``distance`` ranks before."""
    work = call.work
    assert isinstance(work, Exchange)
    source, target = call.buffers["send"], call.buffers["recv"]
    sums = call.values.sums.get(source)
    if sums is not None:
        _send_sums(call, sums, target)
        return
    rows = call.rows("send")
    if any(each.value is not None and each.value.name in ("d_kv", "zero") for each in rows):
        attention.send_gradients(call, rows)
        return
    for first, end, value, row in rows:
        if value is not None and work.group == "tp" and not value.name.endswith("~"):
            at = row + _chunks_before(call, work) * call.tokens("send")
            call.put("recv", first, end - first, value._replace(part=None), at)
            continue
        call.put("recv", first, end - first, None if value is None else _shifted(work, value), row)


def _chunks_before(call: Call, work: Exchange) -> int:
    """Return how many chunks lie between this rank's chunk and the one that arrives, from ``distance`` ranks before."""
    v = call.values
    return (v.tp_rank - work.distance) % v.tp - v.tp_rank


def _shifted(work: Exchange, value: Value) -> Value:
    if work.group == "tp":
        return value._replace(part=("tp", work.distance))
    if value.name == "params":
        hop = value.part[1] if isinstance(value.part, tuple) else 0
        return value._replace(part=("hop", hop + 1))
    terms = value.terms
    return value._replace(terms=("shift", terms[1] + work.distance) if isinstance(terms, tuple) else terms)


def _send_sums(call: Call, sums: dict[ParameterKey, Sum], target: int) -> None:
    """Pass sums of gradients on: each has the terms of as many ranks as it has hops behind it (METP)."""
    first, end = call.operands["send"].first, call.operands["send"].first + call.tokens("send")
    moved = {key: each for key, each in sums.items() if first <= each.first < end}
    into = call.values.sums.setdefault(target, {})
    for key in [key for key, each in into.items() if first <= each.first < end]:
        del into[key]
    for key, each in moved.items():
        if ("hop", each.hop) not in {source for _, source in each.tokens}:
            call.fault(f"the gradient of {key[2]} of layer {key[1]} is sent on without this rank's terms")
        into[key] = Sum(each.first, each.hop + 1, each.anything, {k: list(r) for k, r in each.tokens.items()})


def broadcast(call: Call) -> None:
    """Carry a part of the weights to all ranks (METP)."""
    work = call.work
    assert isinstance(work, Collective)
    for first, end, value, row in call.rows("own"):
        moved = None if value is None else value._replace(part=("root", work.root))
        call.put("tensor", first, end - first, moved, row)


def reduce(call: Call) -> None:
    """Add a part's gradients, summed over ranks, to those of the rank that has its weights (METP)."""
    work = call.work
    assert isinstance(work, Collective)
    _move_sums(call, "tensor", "total")
    for key, each in call.values.sums.get(call.buffers["tensor"], {}).items():
        if any(source != ("root", work.root) for _, source in each.tokens):
            call.fault(f"{key[2]} is reduced to rank {work.root}, but has terms of {[s for _, s in each.tokens]}")


def _move_sums(call: Call, source: str, target: str) -> None:
    """Add the sums of gradients in an operand to those of another."""
    if call.buffers[target] not in call.values.sums and call.family(target).kind is FamilyKind.GRADS:
        call.fault(f"adds to {call.family(target).name}, which was not zeroed")
    operand, into = call.operands[source], call.values.sums.setdefault(call.buffers[target], {})
    given, sharded = call.values.sums.get(call.buffers[source], {}), False
    family = call.family(target)
    block = call.values.block_of(call.buffers[target]) if family.kind is FamilyKind.GRADS else None
    if call.family(source).kind is FamilyKind.WHOLE_GRADS and family.kind is FamilyKind.GRADS and block is not None:
        sharded = True
        if missing := call.values.unreduced(call.buffers[source]):
            call.fault(f"{source} is added before it was summed over the {' and '.join(missing)}")
    for key, each in given.items():
        parameter = call.values.parameter(key[0], key[2], key[1])
        assert parameter is not None  # its gradient was added
        if sharded and block is not None:
            run = call.instruction.run
            if run and run != next(n for n, first, size in block.runs() if first <= parameter.first < first + size):
                continue
        elif not operand.first <= each.first < operand.first + operand.tokens:
            continue
        if family.kind is FamilyKind.GRADS and key[0] is LAYER and call.values.layer_of(call.buffers[target]) != key[1]:
            call.fault(
                f"adds gradients of layer {key[1]} to those of layer {call.values.layer_of(call.buffers[target])}"
            )
            continue
        summed = into.setdefault(key, Sum(parameter.first))
        summed.anything = summed.anything or each.anything
        for (micro_batch, term), ranges in each.tokens.items():
            for low, high in ranges:
                if not summed.add((micro_batch, term), low, high):
                    call.fault(
                        f"gradient of {key[2]} of layer {key[1]}, micro-batch {micro_batch}: rows [{low}, {high}) twice"
                    )


def accumulate(call: Call) -> None:
    """Add gradients: of parameters, or of queries, keys and values."""
    source, target = call.family("x"), call.family("out")
    grads = (FamilyKind.GRADS, FamilyKind.WHOLE_GRADS)
    if source.kind in grads or target.kind in grads or call.buffers["x"] in call.values.sums:
        _move_sums(call, "x", "out")
        return
    attention.accumulate(call)


def flatten(call: Call) -> None:
    """Copy gradients into the tensor that ranks reduce."""
    source, target, reduced = call.buffers["source"], call.buffers["target"], call.values.reduced
    call.values.sums[target] = dict(call.values.sums.get(source, {}))
    reduced -= {(target, "replicas"), (target, "vectors"), (target, "matrices")}
    reduced |= {(target, what) for buffer, what in reduced if buffer == source}


def reduce_gradients(call: Call) -> None:
    """Sum gradients over the ranks that hold the same parameters; each rank then has all of them, or its shard."""
    _all_of(call, "tensor")
    _reduced(call, call.buffers["tensor"], "replicas")


def _all_of(call: Call, role: str, count: int | None = None) -> None:
    """Check that an operand is all of its buffer, or its first ``count`` elements."""
    operand, elements = call.operands[role], call.family(role).tokens if count is None else count
    if (operand.first, operand.tokens) != (0, elements):
        call.fault(f"{role} is [{operand.first}, {operand.first + operand.tokens}), not all of {elements} elements")


def _parts_of(call: Call, buffer: int) -> str:
    """Return what a sum of parts of gradients is about: the vectors at the end of a block, or matrices before them."""
    operand = call.operands["tensor"]
    block = call.values.kind_of_block(buffer)
    return "vectors" if operand.first + operand.tokens == block.trained_elements else "matrices"


def _reduced(call: Call, buffer: int, what: str) -> None:
    if (buffer, what) in call.values.reduced:
        call.fault(f"sums {call.values.family(buffer).name} over the {what} a second time")
    call.values.reduced.add((buffer, what))


def reduce_shards(call: Call) -> None:
    """Sum this rank's shard of gradients over the groups of ranks that divide them."""
    for buffer in set(call.buffers.values()):
        _reduced(call, buffer, "groups")


def grad_norm(call: Call) -> None:
    """Add a block's gradient to the norm, once, when it is complete."""
    v, buffer = call.values, call.buffers["grads"]
    if not _is_shard(call, "grads"):
        _all_of(call, "grads")
    if buffer in v.normed:
        call.fault(f"adds {call.family('grads').name} to the norm a second time")
    v.normed.add(buffer)
    _used(call, buffer)


def _used(call: Call, buffer: int) -> None:
    """Check that gradients were summed over ranks; with ZeRO 2 and 3, each use was before it was added."""
    v, family = call.values, call.family("grads")
    block = v.block_of(buffer) if family.kind is FamilyKind.GRADS else None
    whole_block = block is not None and family.tokens == block.trained_elements
    missing = v.unreduced(buffer) if family.kind is FamilyKind.GRADS and whole_block else []
    tied = v.model.tied_embeddings and v.layout.pp > 1 and family.block is EMBED
    if tied and family.kind is FamilyKind.GRADS and (buffer, "stages") not in v.reduced:
        missing.append("stages")
    if v.copies(family.block) > 1 and family.kind is FamilyKind.GRADS and (buffer, "groups") not in v.reduced:
        missing.append("groups")
    if missing:
        call.fault(f"uses {family.name} before it was summed over the {' and '.join(missing)}")


def update(call: Call) -> None:
    """Update a run of a block's parameters: gradients, states and parameters of one layer."""
    v, family = call.values, call.family("grads")
    places = {call.values.layer_of(b) for role, b in call.buffers.items() if role not in ("norm", "workspace")}
    if len(places) != 1 or family.block is None:
        call.fault(f"updates states of layers {sorted(places)} together")
        return
    key = (family.block, places.pop())
    states = {(call.operands[r].first, call.tokens(r)) for r in ("master", "moment1", "moment2") if call.has(r)}
    first, tokens = min(states)
    joined_ranges = add_range(v.updated.get(key, []), first, first + tokens)
    if len(states) != 1 or joined_ranges is None:
        call.fault(f"updates elements {sorted(states)} of the states of {key[0]}, not one run of them once")
    v.updated[key] = joined_ranges or []
    # Whole parameters and gradients begin with the run itself, shards with what the ranks before them have of it.
    runs = {name: first for name, first, _ in v.block(family.block, key[1]).runs()}
    begun = runs[call.instruction.run]
    for role in ("grads", "params"):
        if call.has(role):
            operand = call.operands[role]
            wanted = first if call.family(role).tokens == call.family("moment1").tokens else begun
            if (operand.first, operand.tokens) != (wanted, tokens):
                call.fault(f"{role} begins with element {operand.first}, not {wanted}")
    _used(call, call.buffers["grads"])


def _is_shard(call: Call, role: str) -> bool:
    """Return whether an operand is this rank's shard at the start of a whole block of gradients."""
    v, family = call.values, call.family(role)
    return family.block is not None and v.layout.zero == 1 and v.replicas(family.block) > 1


def nothing(call: Call) -> None:
    """Play a kernel that changes the value of no row."""


def params_gather(call: Call) -> None:
    """Gather a block of parameters from the ranks' shards; of parameters that ranks updated, the trained ones."""
    if not call.has("full"):
        block = call.values.block_of(call.buffers["tensor"])
        _all_of(call, "tensor", block.trained_elements if block else None)
        call.values.reduced.add((call.buffers["tensor"], "gathered"))
        return
    rows = call.rows("shard")
    value = rows[0].value
    if value is not None and (
        len(rows) != 1 or value.name != "params" or call.tokens("shard") != call.family("shard").tokens
    ):
        call.wrong("shard", value, rows[0].row, "a rank's shard of one block")
        value = None
    call.put("full", 0, call.tokens("full"), value, 0)


def params_move(source: str, target: str) -> Rule:
    """Return the rule of an op that copies or casts parameters."""

    def rule(call: Call) -> None:
        for first, end, value, row in call.rows(source):
            call.put(target, first, end - first, value, row)

    return rule


def quantise(call: Call) -> None:
    """Carry values to their copies in FP8, by rows and by columns."""
    for first, end, value, row in call.rows("x"):
        for copy in ("out", "columns"):
            call.put(copy, first, end - first, value, row)


def recv(call: Call) -> None:
    """What a stage receives follows from the micro-batch and layer of the transfer, and from the kind of the buffer.

    ``verify/stages.py`` checks that the sender sends the same.
    """
    v, at, family, operand = call.values, call.instance, call.family("recv"), call.operands["recv"]
    template = v.program.templates[at.template]
    start = v.starts[at.subsequence] + at.first
    shard = start // v.tp if v.gathered else start
    helped = template.kind in (TemplateKind.HELPER_FORWARD, TemplateKind.HELPER_BACKWARD)
    own = at.layer in v.layers
    value, row = None, shard
    match family.kind:
        case FamilyKind.SKELETAL:
            value = Value("x", at.layer, at.micro_batch)
        case FamilyKind.STAGE_BOUNDARY | FamilyKind.HEAD_INPUT:
            leaves = helped and not family.name.startswith("stage.x")
            value = Value("x", at.layer + leaves, at.micro_batch)
            row = shard + operand.first
        case FamilyKind.INPUT_GRADIENT:
            enters = helped and own
            value = Value("d_x", at.layer + (not enters), at.micro_batch)
            row = shard + operand.first
        case FamilyKind.GATHERED:
            value, row = Value("params", at.layer, -1, None, LAYER), 0
        case FamilyKind.WHOLE_GRADS | FamilyKind.PER_LAYER if family.features == 1:
            sums = v.sums.setdefault(call.buffers["recv"], {})
            for parameter in v.block(LAYER, at.layer).parameters:
                sums[LAYER, at.layer, parameter.name] = Sum(parameter.first, anything=True)
            return
        case FamilyKind.PER_LAYER if family.buffer_class.value == "kv_cache" and "d_kv" not in family.name:
            value, row = Value("kv", at.layer, at.micro_batch), operand.first
        case _:
            value = None
    call.put("recv", 0, operand.tokens, value, row)


def send(call: Call) -> None:
    """A stage sends what the message is for: the input of a layer, its gradient, or for helpers other tensors."""
    v, at = call.values, call.instance
    if (
        v.sums.get(call.buffers["send"]) is not None
        or v.program.templates[at.template].kind is not TemplateKind.TRANSFER
    ):
        return
    gradient = call.family("send").kind is FamilyKind.INPUT_GRADIENT
    wanted = Value("d_x", at.layer, at.micro_batch) if gradient else Value("x", at.layer + 1, at.micro_batch)
    start = v.starts[at.subsequence]
    for first, end, held, row in call.rows("send"):
        value = None if held is None else whole(call, "send", held, row, end - first)
        begin = (start // v.tp if v.gathered else start) + call.operands["send"].first + first
        if value is not None and (value != wanted or row != begin):
            call.wrong("send", value, row, f"{wanted} (row {begin})")


def metric(call: Call) -> None:
    """A trainer's metrics read the logits once more; nothing of the step reads what they make."""
    if call.has("logits"):
        rowwise(call, {"logits": "logits"}, {"out": "metric"})


RULES: dict[str, Rule] = {
    "embed": embed,
    "positions.add": positions_add,
    "layer_norm": norm,
    "rms_norm": norm,
    "linear": linear,
    "linear.add": linear,
    "lora.a": adapter_low,
    "lora.b": adapter_add,
    "lora.b.dgrad": adapter_low_gradient,
    "lora.b.wgrad": adapter_outer_gradient,
    "linear.to_gate": linear,
    "linear.from_gate": linear,
    "residual_add": residual_add,
    "gelu": activation,
    "swiglu": activation,
    "geglu": activation,
    "gelu.bwd": activation_backward,
    "swiglu.bwd": activation_backward,
    "geglu.bwd": activation_backward,
    "linear.dgrad": dgrad,
    "linear.dgrad.add": dgrad,
    "linear.wgrad": wgrad,
    "linear.wgrad.product": wgrad,
    "bias.bwd": bias_backward,
    "layer_norm.bwd": norm_backward,
    "rms_norm.bwd": norm_backward,
    "embed.bwd": embed_backward,
    "cross_entropy": cross_entropy,
    "cross_entropy.fused": cross_entropy,
    "cross_entropy.stats": loss("logits", {"out": "loss.stats~", "exponentials": "loss.exponentials"}),
    "cross_entropy.log_softmax": loss("logits", {"out": "log_probs"}, labels=False),
    "cross_entropy.nll": loss("", {}, given={"log_probs": "log_probs"}, adds=True),
    "cross_entropy.metrics": loss("logits", {}, given={"log_probs": "log_probs"}),
    "cross_entropy.nll.bwd": loss("", {"grad": "d_log_probs"}, given={"log_probs": "log_probs"}),
    "cross_entropy.log_softmax.bwd": loss(
        "", {"out": "d_logits"}, given={"grad": "d_log_probs", "log_probs": "log_probs"}, labels=False
    ),
    "cross_entropy.largest": loss("logits", {"maxima": "loss.maxima~"}, labels=False),
    "cross_entropy.exponentials": loss(
        "logits", {"logits": "loss.exponentials", "sums": "loss.sums~"}, given={"maxima": "loss.maxima"}
    ),
    "cross_entropy.softmax": loss(
        "loss.exponentials", {"logits": "loss.softmax"}, given={"sums": "loss.sums"}, adds=True
    ),
    "cross_entropy.gradient": loss("loss.softmax", {"logits": "d_logits"}, given={"sums": "loss.sums"}),
    "cross_entropy.all_reduce": all_reduce,
    "metric.log_softmax": metric,
    "metric.nll": nothing,
    "copy": copy,
    "d2h": offload,
    "h2d": prefetch,
    "zero": zero,
    "all_gather": all_gather,
    "reduce_scatter": reduce_scatter,
    "all_reduce": all_reduce,
    "loss.all_reduce": all_reduce,
    "loss.max_reduce": all_reduce,
    "all_to_all": all_to_all,
    "heads.transpose": heads_transpose,
    "heads.all_gather": heads("shard", "full", "qkv.part", lambda _: "qkv.ranks"),
    "heads.pick": heads("source", "target", "qkv.ranks", lambda call: chain(call.values)[0]),
    "heads.place": heads("source", "target", "d_qkv", lambda _: "d_qkv.ranks"),
    "heads.reduce_scatter": heads("full", "shard", "d_qkv.ranks", lambda _: "d_qkv.part"),
    "parts.sum": parts_sum,
    "send_recv": send_recv,
    "broadcast": broadcast,
    "reduce": reduce,
    "send": send,
    "recv": recv,
    "grad.accumulate": accumulate,
    "grads.flatten": flatten,
    "grads.reduce_scatter": reduce_gradients,
    "grads.all_reduce": reduce_gradients,
    "shards.all_reduce": reduce_shards,
    "grads.check": nothing,
    "grads.scale": nothing,
    "grad_norm": grad_norm,
    "adamw.decay": update,
    "adamw.no_decay": update,
    "router.balance": update,
    "params.all_gather": params_gather,
    "params.cast": params_move("x", "out"),
    "params.copy_out": params_move("source", "target"),
    "params.quantize": quantise,
    "fp8.quantize": quantise,
    "fp8.transpose": quantise,
    **attention.RULES,
    **experts.RULES,
    **latent.RULES,
}
"""The rule of every op."""
