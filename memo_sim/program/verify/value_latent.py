"""Latent attention for ``value_rules.py``: norms of latents, products that make heads, and their assembly.

Values, with the names of ``value_rules.py``:

    norm1 - latent - q_latent, kv_latent, k_rope - qkv.0 (queries alone), kv_up - qkv (assembled)

Without a latent for queries, norm1 takes its place.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from memo_sim.program.verify.value_call import Call
from memo_sim.program.verify.value_operands import Wanted, add_gradient, agree, rowwise, weight
from memo_sim.program.verify.value_rows import Value
from memo_sim.program.verify.value_terms import chain

if TYPE_CHECKING:
    from memo_sim.program.verify.values import Values

WEIGHTS = ("q", "kv")


def _source(v: Values) -> str:
    """Return what the product of queries reads."""
    assert v.model.latent is not None
    return "q_latent" if v.model.latent.q_rank else "norm1"


def _weights(call: Call, layer: int) -> None:
    for part in WEIGHTS:
        weight(call, f"{part}_weight", f"{part}_latent_norm.weight", layer)


def norm(call: Call) -> None:
    """Check the norms of latents, which also copy the rotary key."""
    made: dict[str, Wanted] = {"q": "q_latent", "kv": "kv_latent", "rope": "k_rope", "stats": "latent_stats"}
    for found in rowwise(call, {"x": "latent"}, made):
        _weights(call, found[0])


def norm_backward(call: Call) -> None:
    """Check the backward of the norms of latents."""
    wanted: dict[str, Wanted] = {"q": "d_q_latent", "kv": "d_kv_latent", "rope": "d_k_rope", "x": "latent"}
    wanted["stats"] = "latent_stats"
    wanted = {role: name for role, name in wanted.items() if call.has(role)}
    if call.has("q") != (_source(call.values) == "q_latent"):
        call.fault("the gradient of the queries' latent is missing, or not asked for")
    for first, tokens, values in call.pieces(*wanted):
        found = agree(call, wanted, values, tokens)
        if found is not None:
            _weights(call, found[0])
            for part in WEIGHTS:
                add_gradient(call, f"grad_{part}_weight", f"{part}_latent_norm.weight", found, tokens)
        value = None if found is None else Value("d_latent", *found[:3])
        call.put("out", first, tokens, value, found[3] if found else 0)


def queries(call: Call) -> None:
    """Check the product that makes the queries, which writes their features of the packed rows."""
    v = call.values
    for found in rowwise(call, {"x": f"{_source(v)}{v.full}"}, {"out": chain(v)[0]}):
        weight(call, "weight", "q_up.weight", found[0])


def queries_dgrad(call: Call) -> None:
    """Check the gradient of what the product of queries reads; of norm1 it is one of two terms."""
    v = call.values
    made = "d_q_latent" if _source(v) == "q_latent" else "d_norm1.queries"
    for first, tokens, values in call.pieces("grad"):
        found = agree(call, {"grad": f"d_{chain(v)[0]}"}, values, tokens)
        value = None
        if found is not None:
            weight(call, "weight", "q_up.weight", found[0])
            value = Value(f"{made}{'~' if v.tp > 1 else ''}", *found[:3])
        call.put("out", first, tokens, value, found[3] if found else 0)


def input_gradient(call: Call, first: int, tokens: int, made: Value, row: int) -> None:
    """Write the gradient of norm1, ``made``; without a latent for queries, rows hold that of the queries before."""
    alone = _source(call.values) == "q_latent"
    if alone != (call.instruction.op == "linear.dgrad"):
        call.fault(f"norm1 has {'no' if alone else 'a'} term of the queries' product")
    if alone:
        call.put("out", first, tokens, made, row)
        return
    for low, high, old, at in call.rows("out", first, tokens):
        here, wanted = row + low - first, made._replace(name="d_norm1.queries")
        if old is not None and (old != wanted or at != here):
            call.wrong("out", old, at, f"{wanted} (row {here})")
        call.put("out", low, high - low, made if old == wanted and at == here else None, here)


def queries_wgrad(call: Call) -> None:
    """Check the gradient of the weight that makes the queries."""
    v = call.values
    wanted: dict[str, Wanted] = {"grad": f"d_{chain(v)[0]}", "x": f"{_source(v)}{v.full}"}
    for _, tokens, values in call.pieces(*wanted):
        found = agree(call, wanted, values, tokens)
        if found is not None:
            add_gradient(call, "out", "q_up.weight", found, tokens)


def assemble(call: Call) -> None:
    """Check that Q, K and V are assembled of queries, keys and values and the rotary key of the same tokens."""
    v = call.values
    rowwise(call, {"kv": "kv_up", "rope": f"k_rope{v.full}", "qkv": chain(v)[0]}, {"qkv": "qkv"})


def assemble_backward(call: Call) -> None:
    """Check the backward of ``assemble``, which leaves the gradients of queries in place."""
    v = call.values
    rope = "d_k_rope~" if v.tp > 1 else "d_k_rope"
    rowwise(call, {"grad": "d_qkv"}, {"grad": f"d_{chain(v)[0]}", "kv": "d_kv_up", "rope": rope})


RULES: dict[str, Callable[[Call], None]] = {
    "latent.norm": norm,
    "latent.norm.bwd": norm_backward,
    "latent.q_up": queries,
    "latent.q_up.dgrad": queries_dgrad,
    "latent.q_up.wgrad": queries_wgrad,
    "latent.assemble": assemble,
    "latent.assemble.bwd": assemble_backward,
}
"""The rule of every op of latents."""
