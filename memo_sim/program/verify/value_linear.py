"""Linear products for ``value_rules.py``: their results, the gradients of their inputs, weights and biases."""

from __future__ import annotations

from collections.abc import Callable

from memo_sim.program.ir.kinds import BlockKind
from memo_sim.program.verify.value_adapters import adapted, adapter_dgrad, adapter_wgrad, low_rank
from memo_sim.program.verify.value_call import Call
from memo_sim.program.verify.value_experts import add_shared
from memo_sim.program.verify.value_latent import input_gradient
from memo_sim.program.verify.value_operands import Wanted, add_gradient, agree, rowwise, weight
from memo_sim.program.verify.value_products import gradient_of, made_by_product, read_by_product
from memo_sim.program.verify.value_rows import Value
from memo_sim.program.verify.value_terms import WITHOUT_ADAPTER, joined, whole

EMBED, LAYER = BlockKind.EMBED, BlockKind.LAYER

Rule = Callable[[Call], None]


def linear(call: Call) -> None:
    """A product adds its terms to a sum over parts where weights pass round (METP)."""
    added = call.instruction.op == "linear.add"
    for first, tokens, [(given, row)] in call.pieces("x"):
        if (found := read_by_product(call, given, row, tokens)) is None:
            for role in ("out", "gate"):
                call.put(role, first, tokens, None)
            continue
        value, (name, kind, out) = found
        held = weight(call, "weight", f"{name}.weight", value.layer, kind)
        if f"{name}.bias" in ("qkv.bias", "ffn_up.bias"):
            weight(call, "bias", f"{name}.bias", value.layer, kind)
        summed = name in ("proj", "ffn_down")
        if summed and held != value.part:
            call.fault(f"the weight is that of {held}, but x is that of {value.part}")
        result = value._replace(name=out, part=held)
        if summed and call.values.layout.metp > 1:
            result = result._replace(part=None, terms=frozenset({held}))
        if kind is LAYER and adapted(call, name):
            result = result._replace(terms=WITHOUT_ADAPTER)
        add = add_shared if name == "shared_down" else add_terms
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


def dgrad(call: Call) -> None:
    """Check the gradient of the input of a product; the gradient that it reads says of which."""
    v = call.values
    if low_rank(call, "grad"):
        adapter_dgrad(call)
        return
    for first, tokens, [(given, row)] in call.pieces("grad"):
        if (found := made_by_product(call, given, row, tokens)) is None:
            call.put("out", first, tokens, None)
            continue
        value, (name, kind, out, before, _) = found
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
        if kind is LAYER and adapted(call, name):
            result = result._replace(terms=WITHOUT_ADAPTER)
        add = add_shared if name == "shared_up" else add_terms
        if name == "latent":
            input_gradient(call, first, tokens, result, row)
        elif call.instruction.op == "linear.dgrad.add":
            add(call, "out", first, tokens, result, row)
        else:
            call.put("out", first, tokens, result, row)


def _source(part: object) -> object:
    """Return the source of a weight gradient's terms: 0 for this rank's own weights."""
    if isinstance(part, tuple) and part[0] in ("hop", "root"):
        return part
    return 0


def wgrad(call: Call) -> None:
    """Check the gradient of a weight, and add its rows to the sum."""
    v = call.values
    if low_rank(call, "grad"):
        adapter_wgrad(call)
        return
    for _, tokens, values in call.pieces("grad", "x"):
        grad, row = values[0]
        other, at = values[1]
        if other is None or (made := made_by_product(call, grad, row, tokens)) is None:
            continue
        value, (name, kind, _, before, x) = made
        x = f"{x}{v.full}" if x.startswith(("norm", "final", "kv_latent")) and name != "latent" else x
        wanted: dict[str, Wanted] = {"grad": (value.name, before), "x": x}
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
        product = gradient_of(call, value)
        if product is None or product[1] is not LAYER:
            call.wrong("grad", value, row, "the gradient of a product with bias")
            continue
        found = (value.layer - product[3], value.micro_batch, value.part, row)
        add_gradient(call, "out", f"{product[0]}.bias", found, tokens, _source(value.part))


RULES: dict[str, Rule] = {
    "linear": linear,
    "linear.add": linear,
    "linear.to_gate": linear,
    "linear.from_gate": linear,
    "linear.dgrad": dgrad,
    "linear.dgrad.add": dgrad,
    "linear.wgrad": wgrad,
    "linear.wgrad.product": wgrad,
    "bias.bwd": bias_backward,
}
