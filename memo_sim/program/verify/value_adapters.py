"""Low-rank adapters beside products, for ``value_rules.py``.

``low.qkv`` are the low-rank rows of a product's input, and ``d_low.qkv`` their gradient. Their products in backward
have the ops of other products, whose rules (``value_linear.py``) pass them on to here.
"""

from __future__ import annotations

from collections.abc import Callable

from memo_sim.program.ir.kinds import BlockKind
from memo_sim.program.verify.value_call import Call
from memo_sim.program.verify.value_operands import Wanted, add_gradient, agree, weight
from memo_sim.program.verify.value_products import made_by_product, read_by_product
from memo_sim.program.verify.value_rows import Value
from memo_sim.program.verify.value_terms import WITHOUT_ADAPTER, product_name

LAYER = BlockKind.LAYER

Rule = Callable[[Call], None]


def adapted(call: Call, product: str) -> bool:
    """Return whether a product has a low-rank adapter."""
    return call.values.parameter(LAYER, f"{product}.lora_a", None) is not None


def low_rank(call: Call, role: str) -> bool:
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
        if (found := read_by_product(call, given, row, tokens)) is None:
            call.put("out", first, tokens, None)
            continue
        value, (product, _, _) = found
        weight(call, "weight", f"{product}.lora_a", value.layer)
        call.put("out", first, tokens, value._replace(name=f"low.{product}"), row)


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
        if (found := made_by_product(call, given, row, tokens)) is None:
            call.put("out", first, tokens, None)
            continue
        value, (product, _, _, before, _) = found
        layer = value.layer - before
        weight(call, "weight", f"{product}.lora_b", layer)
        call.put("out", first, tokens, Value(f"d_low.{product}", layer, value.micro_batch), row)


def adapter_dgrad(call: Call) -> None:
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
        if (made := made_by_product(call, grad, row, tokens)) is None:
            continue
        value, (product, _, _, before, _) = made
        wanted: dict[str, Wanted] = {"grad": (value.name, before), "x": f"low.{product}"}
        found = agree(call, wanted, [(value, row), values[1]], tokens)
        if found is not None:
            add_gradient(call, "out", f"{product}.lora_b", found, tokens)


def adapter_wgrad(call: Call) -> None:
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


RULES: dict[str, Rule] = {
    "lora.a": adapter_low,
    "lora.b": adapter_add,
    "lora.b.dgrad": adapter_low_gradient,
    "lora.b.wgrad": adapter_outer_gradient,
}
