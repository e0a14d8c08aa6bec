"""Attention that writes its scores, for ``value_rules.py``: on one rank, and over a ring of ranks (RSA)."""

from __future__ import annotations

from collections.abc import Callable

from memo_sim.program.verify.value_call import Call
from memo_sim.program.verify.value_operands import agree
from memo_sim.program.verify.value_rows import Value
from memo_sim.program.verify.value_terms import (
    Packed,
    inside,
    joined,
    shown,
)


def step(given: dict[str, str], made: dict[str, str]) -> Callable[[Call], None]:
    """Return the rule of a kernel over whole rows of scores: what it reads, and what it makes, by role."""

    def rule(call: Call) -> None:
        v = call.values
        wanted = {role: inside(v, n) if n in ("qkv", "d_attn") else n for role, n in given.items() if call.has(role)}
        for first, tokens, values in call.pieces(*wanted):
            found = agree(call, dict(wanted), values, tokens)
            for role, name in made.items():
                named = inside(v, name) if name in ("attn", "d_qkv") else name
                value = None if found is None else Value(named, *found[:3])
                call.put(role, first, tokens, value, found[3] if found else 0)

    return rule


def _hop(value: Value) -> int:
    return value.terms[1] if isinstance(value.terms, tuple) else 0


def rsa_pack(call: Call) -> None:
    """Copy keys or values out of the packed Q, K, V."""
    role = "keys" if call.has("keys") else "values"
    for first, end, value, row in call.rows("qkv"):
        good = value is not None and value.name == inside(call.values, "qkv")
        if value is not None and not good:
            call.wrong("qkv", value, row, "qkv")
        made = value._replace(name=role, terms=("shift", 0)) if good and value is not None else None
        call.put(role, first, end - first, made, row)


def _rsa(given: dict[str, str], passed: str, out: str) -> Callable[[Call], None]:
    """Return the rule of a product with one rank's keys or values: own ones in ``qkv``, others' in ``passed``.

    ``out``: what it makes; a block of scores of these keys, or one term of a sum over all.
    """

    def rule(call: Call) -> None:
        v = call.values
        roles = [role for role in (*given, passed, "qkv") if call.has(role)]
        names = {**given, passed: passed, "qkv": "qkv"}
        for first, tokens, values in call.pieces(*roles):
            hops, found, sound = [], None, True
            for role, (value, row) in zip(roles, values, strict=True):
                wanted = inside(v, names[role]) if names[role] in ("qkv", "d_attn") else names[role]
                if value is None:
                    sound = False
                    continue
                if value.name != wanted:
                    call.wrong(role, value, row, wanted)
                    sound = False
                    continue
                if role == passed or wanted in ("probs", "d_scores"):
                    hops.append(_hop(value))
                plain = (value.layer, value.micro_batch, row)
                if found is not None and plain != found:
                    call.wrong(role, value, row, f"that of layer {found[0]}, micro-batch {found[1]}, row {found[2]}")
                    sound = False
                found = plain
            if not call.has(passed) and "qkv" in roles:
                hops.append(0)
            if len(set(hops)) > 1:
                call.fault(f"operands are of ranks {hops} places before")
                sound = False
            value = None
            if found is not None and sound:
                value = Value(out, found[0], found[1], None, ("shift", hops[0]))
            _put_rsa(call, out, value, first, tokens, found[2] if found else 0)

    return rule


def _put_rsa(call: Call, out: str, value: Value | None, first: int, tokens: int, row: int) -> None:  # noqa: PLR0917
    v = call.values
    if out in ("scores", "d_probs"):
        call.put("out", first, tokens, value, row)
        return
    if value is None:
        call.put("out", first, tokens, None)
        return
    name = inside(v, "attn" if out == "attn" else "d_qkv")
    term: frozenset[object] = frozenset({_hop(value)})
    if call.operands["out"].mode == 2:
        call.put("out", first, tokens, value._replace(name=name, terms=term), row)
        return
    for low, high, old, at in call.rows("out", first, tokens):
        made = None
        if old is not None:
            had = old.terms.queries if isinstance(old.terms, Packed) else old.terms
            terms = joined(had, term)
            same = old._replace(terms=None) == value._replace(name=name, terms=None) and at == row + low - first
            if terms is None or not same:
                call.fault(f"out holds {old} (row {at}, {shown(had)}); {value} is not one more term")
            else:
                made = old._replace(terms=Packed(terms, old.terms.keys) if isinstance(old.terms, Packed) else terms)
        call.put("out", low, high - low, made, at)


def _every_block(call: Call, role: str, name: str, made: str) -> Value | None:
    """Check that an operand has a block of scores of every rank's keys, in rank order; write them as ``made``."""
    v, ring = call.values, call.values.layout.ring
    rows = call.rows(role)
    size = call.tokens(role) // ring
    known = next((each.value for each in rows if each.value is not None), None)
    if known is None or any(each.value is None for each in rows):
        return None
    hops: dict[int, int] = {}
    for first, end, value, row in rows:
        assert value is not None
        if value.name != name or value._replace(terms=None) != known._replace(terms=None) or end - first != size or row:
            call.wrong(role, value, row, f"one block of {known}")
            return None
        hops[first // size] = _hop(value)
        if made:
            call.put(role, first, end - first, value._replace(name=made), row)
    fits = {rank for rank in v.ring_ranks if all((rank - hop) % ring == block for block, hop in hops.items())}
    if not fits or len(hops) != ring:
        call.fault(f"{role} has the scores of keys {sorted(hops.values())} ranks before, in another order than ranks")
        return None
    v.ring_ranks = fits
    return known


def rsa_softmax(call: Call) -> None:
    """Check the softmax over the scores of all keys."""
    _every_block(call, "x", "scores", "probs")


def rsa_softmax_backward(call: Call) -> None:
    """Check the backward of ``rsa_softmax``."""
    probs = _every_block(call, "probs", "probs", "")
    grads = _every_block(call, "grad", "d_probs", "d_scores")
    if probs is not None and grads is not None and (probs.layer, probs.micro_batch) != (grads.layer, grads.micro_batch):
        call.wrong("probs", probs, 0, f"those of {grads}")


def _rsa_summed(scores: str, name: str, made: str) -> Callable[[Call], None]:
    """Return the rule of a product of all scores: the gradients of every rank's keys or values."""

    def rule(call: Call) -> None:
        known = _every_block(call, scores, name, "")
        other = "qkv" if call.has("qkv") else "grad"
        wanted = inside(call.values, "qkv" if other == "qkv" else "d_attn")
        for _, _, value, row in call.rows(other):
            if value is not None and known is not None:
                same = (value.layer, value.micro_batch) == (known.layer, known.micro_batch)
                if value.name != wanted or not same:
                    call.wrong(other, value, row, f"{wanted} of layer {known.layer}, micro-batch {known.micro_batch}")
        partial = "~" if call.values.layout.ring > 1 else ""
        value = None if known is None else Value(f"{made}{partial}", known.layer, known.micro_batch)
        call.put("out", 0, call.tokens("out"), value, 0)

    return rule


def rsa_return(call: Call) -> None:
    """Copy this rank's gradients of values into the packed gradient, or add those of keys."""
    role, name = ("values", "dv.all") if call.has("values") else ("keys", "dk.all")
    packed = inside(call.values, "d_qkv")
    for first, end, held, row in call.rows(role):
        value = held if held is not None and held.name == name else None
        if held is not None and value is None:
            call.wrong(role, held, row, name)
        if role == "values":
            made = None if value is None else value._replace(name=packed, terms=Packed(frozenset(), frozenset({"dv"})))
            call.put("grad_qkv", first, end - first, made, first)
            continue
        for low, high, old, at in call.rows("grad_qkv", first, end - first):
            made = None
            if old is not None and value is not None and isinstance(old.terms, Packed):
                keys = joined(old.terms.keys, frozenset({"dk"}))
                if keys is None or (old.layer, old.micro_batch) != (value.layer, value.micro_batch):
                    call.fault(f"grad_qkv holds {old}; {value} is not one more term")
                else:
                    made = old._replace(terms=old.terms._replace(keys=keys))
            call.put("grad_qkv", low, high - low, made, at)


RULES: dict[str, Callable[[Call], None]] = {
    "attention.scores": step({"qkv": "qkv"}, {"out": "scores"}),
    "attention.softmax": step({"x": "scores"}, {"out": "probs"}),
    "attention.dropout": step({"x": "probs"}, {"out": "dropped", "mask": "kept"}),
    "attention.values": step({"probs": "dropped", "qkv": "qkv"}, {"out": "attn_heads"}),
    "attention.dv": step({"probs": "dropped", "grad": "d_attn"}, {"out": "dv"}),
    "attention.dprobs": step({"grad": "d_attn", "qkv": "qkv"}, {"out": "d_dropped"}),
    "attention.dropout.bwd": step({"grad": "d_dropped", "mask": "kept"}, {"grad_x": "d_probs"}),
    "attention.softmax.bwd": step({"probs": "probs", "grad": "d_probs"}, {"grad": "d_scores"}),
    "attention.dq": step({"grad": "d_scores", "qkv": "qkv"}, {"out": "dq"}),
    "attention.dk": step({"grad": "d_scores", "qkv": "qkv"}, {"out": "dk"}),
    "attention.order": lambda call: (
        step({"x": "attn_heads"}, {"out": "attn"})(call)
        if call.has("x")
        else step({"q": "dq", "k": "dk", "v": "dv"}, {"grad_qkv": "d_qkv"})(call)
    ),
    "rsa.pack": rsa_pack,
    "rsa.scores": _rsa({"qkv": "qkv"}, "keys", "scores"),
    "rsa.softmax": rsa_softmax,
    "rsa.values": _rsa({"probs": "probs"}, "values", "attn"),
    "rsa.dv": _rsa_summed("probs", "probs", "dv.all"),
    "rsa.dprobs": _rsa({"grad": "d_attn"}, "values", "d_probs"),
    "rsa.softmax.bwd": rsa_softmax_backward,
    "rsa.dk": _rsa_summed("grad", "d_scores", "dk.all"),
    "rsa.dq": _rsa({"grad": "d_scores"}, "keys", "d_qkv"),
    "rsa.return": rsa_return,
}
