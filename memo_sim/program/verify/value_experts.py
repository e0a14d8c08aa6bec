"""What the ops of experts read, make and add (``value_rules.py``).

With expert parallelism ranks send rows to each other. The checker follows a tensor from the order in which it is sent
(``x.sent``) to that in which it arrives (``x.arrived``); ranks run the same program, so what arrives is what is sent.

    norm2 - dispatched.sent - dispatched.arrived - dispatched - up - act - expert_out - expert_out.sent - .arrived
    route_experts, route_order, route_places - route_seats, route_sent, route_ends.sent - .arrived - route_arrived,
    route_own_ends      route_probs - gates.sent - gates.arrived - gates      d_gates - .sent - .arrived - d_probs

Rows of these values are dispatched rows, ``per_token`` for each token, and a dispatched row of one tensor is that of
every other. Which token a row is of is decided while the step runs. So the checker asks that a copy to experts may read
every token, and that a sum over experts may read every dispatched row. Row-wise recompute routes each row block by
itself, and so is each subsequence. There these are all tokens and rows of one of them, with its own ``route_ends``.

    norm2 - router_logits - route_scores, route_probs, route_experts - by_expert, route_order - route_places, route_ends
    norm2 - dispatched - up - act - expert_out - down           norm2 - shared_up - shared_act - down
    d_x (next) - d_expert_out - d_act - d_up, d_probs      d_probs - d_logits      d_up - d_dispatched - d_norm2

``down``, ``d_norm2`` and ``d_probs`` are sums: of experts, then of biases and of the shared expert if there are any,
and the gradient of the norm last of the router's part. The names of partial sums end in what was added last.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Mapping
from itertools import accumulate
from typing import TYPE_CHECKING

from memo_sim.program.ir.kinds import BlockKind
from memo_sim.program.layout.parameters import SELECTION_BIAS
from memo_sim.program.layout.rowwise_blocks import is_rowwise
from memo_sim.program.verify.value_call import Call
from memo_sim.program.verify.value_operands import Found, Wanted, add_gradient, agree, rowwise, weight
from memo_sim.program.verify.value_rows import Value
from memo_sim.program.verify.value_terms import whole

if TYPE_CHECKING:
    from memo_sim.program.verify.values import Values

Rule = Callable[[Call], None]
RowsOf = Callable[["Values", int], int]
"""How many rows a tensor has of so many tokens that are routed at once."""

PRODUCTS = {"dispatched": ("experts_up", "up"), "act": ("experts_down", "expert_out")}
"""By input: the weight's name and the result."""
GRADIENTS = {"d_up": ("experts_up", "d_dispatched", "dispatched"), "d_expert_out": ("experts_down", "d_act", "act")}
"""By gradient of the result: the weight's name, the gradient of the input, and the input."""
COPIED = {"norm2": ("dispatched", 0), "d_x": ("d_expert_out", 1)}
"""By what is gathered and copied to experts: the dispatched rows, and by how many layers it comes later."""
SUMMED = {"expert_out": "down", "d_dispatched": "d_norm2"}
"""By dispatched rows: what their sum over each token's experts is a part of."""
SHARED_NORM = "d_norm2.shared"
"""The gradient of the norm with the shared expert's part."""
ROUTED = ("router.weight", "router.bias", "experts_down.bias", SELECTION_BIAS)
"""Parameters whose gradients sum over the tokens that a rank routes."""


def partial_sums(v: Values, name: str) -> list[str]:
    """Return the names that the sum ``name`` has, one after the other; the last one is its own."""
    of, whole_experts = v.model.mixture, v.layout.whole_experts
    biased, shared = of is not None and of.bias, of is not None and of.shared > 0
    gated = of is not None and of.shared_gate and not separate(v)
    parts = {
        "up": ["product"] + ["bias"] * biased,
        "down": ["experts"] + ["bias"] * biased + ["shared"] * shared,
        "d_probs": ["act"] + ["bias"] * biased,
        "d_norm2": ["experts"] + ["shared"] * shared + ["gate"] * gated + ["router"],
    }[name]
    whole_name = f"{name}~" if v.tp > 1 and name != "up" and not whole_experts else name
    return [*(f"{name}.{part}" for part in parts[:-1]), whole_name]


def shared_norm(v: Values) -> str:
    """Return the name of the gradient of the shared expert's input, as its first product makes it."""
    if not separate(v):
        return SHARED_NORM
    of = v.model.mixture
    return "d_shared_norm.product" if of is not None and of.shared_gate else _part("d_shared_norm", v)


def shared_output(v: Values) -> str:
    """Return the name of the result of the shared expert's second product."""
    return _part("shared_out", v) if separate(v) else partial_sums(v, "down")[-1]


def separate(v: Values) -> bool:
    """Return whether the shared expert has sums of its own, which are added to those of the experts."""
    return v.layout.whole_experts or v.decisions.expert_overlap


def _part(name: str, v: Values) -> str:
    """Return the name of a tensor-parallel rank's part of a sum of the shared expert."""
    return f"{name}~" if v.tp > 1 else name


def add_to_experts(call: Call) -> bool:
    """Check the sum of experts and shared expert on a token shard; return whether the instruction is such a sum."""
    rows = call.rows("y")
    name = rows[0].value.name if rows and rows[0].value is not None else ""
    made = {"shared_out": "down", "d_shared_norm": "d_norm2"}.get(name.removesuffix("~"))
    if made is None:
        return False
    wanted = _partial(call, name.removesuffix("~"))
    parts = partial_sums(call.values, made)
    before, after = parts[-2:] if made == "down" else parts[-3:-1]
    rowwise(call, {"x": before, "y": wanted}, {"out": after})
    return True


def add_shared(call: Call, role: str, first: int, tokens: int, result: Value, row: int) -> None:  # noqa: PLR0917
    """Check a product of the shared expert that is added to the sum of the experts."""
    before = "d_norm2.experts" if result.name == SHARED_NORM else partial_sums(call.values, "down")[-2]
    for low, high, old, at in call.rows(role, first, tokens):
        here = row + low - first
        sound = old is not None and old == result._replace(name=before) and at == here
        if old is not None and not sound:
            call.wrong(role, old, at, f"{before} of layer {result.layer}, row {here}")
        call.put(role, low, high - low, result if sound else None, here)


def _token_rows(v: Values, tokens: int) -> int:
    """Return the rows, one of each token, of what is routed at once with ``tokens``."""
    del v
    return tokens


def _slot_rows(v: Values, tokens: int) -> int:
    """Return its rows, one of each token and each of its experts."""
    assert v.model.mixture is not None
    return tokens * v.model.mixture.per_token


def _expert_rows(v: Values, tokens: int) -> int:
    """Return its rows in the experts' tensors."""
    return v.expert_rows(tokens)


def _ends_of_all(v: Values, tokens: int) -> int:
    """Return its ends of rows, one of each expert."""
    del tokens
    assert v.model.mixture is not None
    return v.model.mixture.count


def _parts(v: Values, rows: RowsOf) -> list[tuple[int, int]]:
    """Return (first row, rows) of each part of the tokens that is routed at once."""
    every = [rows(v, tokens) for tokens in v.routed_at_once]
    return list(zip(accumulate(every, initial=0), every, strict=False))


def _rows_of(v: Values, rows: RowsOf, number: int) -> tuple[int, int]:
    """Return the first row and the rows of part ``number``."""
    return _parts(v, rows)[number]


def _at_once(call: Call, role: str, count: RowsOf) -> tuple[Value | None, int]:
    """Return the value of which an operand is all rows that are routed at once, and which part of the tokens it is.

    No value after a fault, or where it is unknown.
    """
    rows, v = call.rows(role), call.values
    if any(each.value is None for each in rows):
        return None, 0
    value, row = rows[0].value, rows[0].row
    assert value is not None
    parts = _parts(v, count)
    number = next((n for n, (first, _) in enumerate(parts) if first == row), 0)
    first, wanted = parts[number]
    if len(rows) != 1 or row != first or call.tokens(role) != wanted:
        call.fault(f"{role} is not all {wanted} rows of one tensor: {value}, rows [{row}, ...)")
        return None, 0
    return whole(call, role, value, row, wanted), number


def _number_of(call: Call, row: int, rows: RowsOf) -> int:
    """Return in which part of the tokens, of those that are routed at once, a row is."""
    return bisect_right([first + count for first, count in _parts(call.values, rows)], row)


def _decided(call: Call, role: str, wanted: Value, rows: RowsOf, number: int) -> None:
    """Check that an operand is all that the router of a layer decided, at once with part ``number`` of the tokens."""
    value, found = _at_once(call, role, rows)
    if value is not None and (value, found) != (wanted, number):
        call.wrong(role, value, _rows_of(call.values, rows, found)[0], str(wanted))


def _own(call: Call, role: str, wanted: Value, count: int, number: int) -> None:
    """Check that an operand is what the ``count`` experts got of part ``number`` of the tokens."""
    rows = call.rows(role)
    if any(each.value is None for each in rows):
        return
    if len(rows) != 1 or call.tokens(role) != count or (rows[0].value, rows[0].row) != (wanted, number * count):
        call.fault(f"{role} is not {wanted}, rows [{number * count}, ...): {rows[0].value}, rows [{rows[0].row}, ...)")


def _ends(call: Call, value: Value, number: int) -> None:
    experts, ep = call.values.model.mixture, call.values.layout.ep
    assert experts is not None
    name = "route_ends" if ep == 1 else "route_own_ends"
    _own(call, "ends", Value(name, value.layer, value.micro_batch), experts.count // ep, number)


def _all_ends(call: Call, value: Value, number: int) -> None:
    experts = call.values.model.mixture
    assert experts is not None
    _own(call, "ends", Value("route_ends", value.layer, value.micro_batch), experts.count, number)


def _exchanged(call: Call) -> bool:
    """Return whether ranks divide the experts."""
    return call.values.layout.ep > 1


def _block(call: Call) -> BlockKind:
    """Return the block of parameters that has the experts."""
    return BlockKind.EXPERTS if _exchanged(call) else BlockKind.LAYER


def _partial(call: Call, name: str) -> str:
    """Return the name of a value that is this tensor-parallel rank's part of a sum."""
    return f"{name}~" if call.values.tp > 1 and not call.values.layout.whole_experts else name


def router(call: Call) -> None:
    """Check the router's product."""
    for found in rowwise(call, {"x": f"norm2{call.values.routed_full}"}, {"out": "router_logits"}):
        weight(call, "weight", "router.weight", found[0])
        weight(call, "bias", "router.bias", found[0])


def route(call: Call) -> None:
    """Check the choice of experts: scores in place, and the largest, which the selection bias may change."""
    made = {name: f"route_{name}" for name in ("scores", "probs", "experts", "lse")}
    for found in rowwise(call, {"scores": "router_logits"}, {**made}):
        weight(call, "bias", SELECTION_BIAS, found[0])


def sort(call: Call) -> None:
    """Check the order of rows by expert, which needs the experts of all tokens."""
    value, number = _at_once(call, "experts", _token_rows)
    if value is not None and value.name != "route_experts":
        call.wrong("experts", value, 0, "route_experts")
        value = None
    first = _rows_of(call.values, _slot_rows, number)[0]
    for role, name in (("sorted", "by_expert"), ("order", "route_order")):
        call.put(role, 0, call.tokens(role), None if value is None else value._replace(name=name), first)


def places(call: Call) -> None:
    """Check the places of rows, which need the order of all rows."""
    v = call.values
    (order, number), (by_expert, other) = (_at_once(call, role, _slot_rows) for role in ("order", "sorted"))
    if order is not None and by_expert is not None:
        firsts = [_rows_of(v, _slot_rows, each)[0] for each in (number, other)]
        both = list(zip((order, by_expert), firsts, strict=True))
        agree(call, {"order": "route_order", "sorted": "by_expert"}, both, call.tokens("order"))
    for role, rows in (("places", _token_rows), ("ends", _ends_of_all)):
        value = None if order is None else order._replace(name=f"route_{role}")
        call.put(role, 0, call.tokens(role), value, _rows_of(v, rows, number)[0])


def dispatch(call: Call) -> None:
    """Check the copy of tokens' rows to dispatched rows."""
    source, number = _at_once(call, "x", _token_rows)
    gathered = {f"{name}{call.values.routed_full}": made for name, made in COPIED.items()}
    made = gathered.get(source.name) if source is not None else None
    if source is not None and made is None:
        call.wrong("x", source, 0, " or ".join(gathered))
    by, rows = ("route_sent", _expert_rows) if _exchanged(call) else ("route_order", _slot_rows)
    for first, tokens, [(order, row)] in call.pieces("order"):
        value = None
        if source is not None and made is not None and order is not None:
            name, after = made
            value = Value(name, source.layer - after, source.micro_batch)
            wanted = (by, value.layer, value.micro_batch, number)
            if (order.name, order.layer, order.micro_batch, _number_of(call, row, rows)) != wanted:
                call.wrong("order", order, row, f"{by} of layer {value.layer}, micro-batch {value.micro_batch}")
                value = None
            elif _exchanged(call):
                value = value._replace(name=f"{name}.sent")
        call.put("out", first, tokens, value, row)


def combine(call: Call) -> None:
    """Check the sum of each token's dispatched rows."""
    source, number = _at_once(call, "x", _expert_rows)
    end, by = (".arrived", "route_seats") if _exchanged(call) else ("", "route_places")
    known = {f"{name}{end}": made for name, made in SUMMED.items()}
    name = known.get(source.name) if source is not None else None
    if source is not None and name is None:
        call.wrong("x", source, 0, " or ".join(known))
    for first, tokens, [(found, row)] in call.pieces("places"):
        value = None
        if source is not None and name is not None and found is not None:
            if (found, _number_of(call, row, _token_rows)) != (source._replace(name=by), number):
                call.wrong("places", found, row, f"{by} of layer {source.layer}")
            else:
                value = source._replace(name=partial_sums(call.values, name)[0])
        call.put("out", first, tokens, value, row)


def linear(call: Call) -> None:
    """Check a product of dispatched rows."""
    _product(call, "x", PRODUCTS)


def dgrad(call: Call) -> None:
    """Check the gradient of the input of a product of dispatched rows."""
    _product(call, "grad", GRADIENTS)


def _product(call: Call, role: str, products: Mapping[str, tuple[str, ...]]) -> None:
    """Check a product of the rows of ``role`` by a weight; ``products``: its name and its result's, by the rows'."""
    for first, tokens, [(value, row)] in call.pieces(role):
        made = products.get(value.name) if value is not None else None
        if value is None or made is None:
            if value is not None:
                call.wrong(role, value, row, " or ".join(products))
            call.put("out", first, tokens, None)
            continue
        weight(call, "weight", f"{made[0]}.weight", value.layer, _block(call))
        _ends(call, value, _same_rows(call, role, first, row))
        name = partial_sums(call.values, "up")[0] if made[1] == "up" else made[1]
        call.put("out", first, tokens, value._replace(name=name), row)


def _same_rows(call: Call, role: str, first: int, row: int) -> int:
    """Check that an operand lies at its own rows, by which the kernel finds each expert's.

    Returns which part of the tokens, of those that are routed at once, the rows are of.
    """
    at, number = call.operands[role].first + first, _number_of(call, row, _expert_rows)
    if at != row - _rows_of(call.values, _expert_rows, number)[0]:
        call.fault(f"{role} has dispatched row {row} at row {at} of its buffer")
    return number


def wgrad(call: Call) -> None:
    """Check the gradient of the experts' weights, and add its rows to the sum."""
    for first, tokens, values in call.pieces("grad", "x"):
        value, row = values[0]
        made = GRADIENTS.get(value.name) if value is not None else None
        if value is None or made is None:
            if value is not None:
                call.wrong("grad", value, row, " or ".join(GRADIENTS))
            continue
        _ends(call, value, _same_rows(call, "grad", first, row))
        found = agree(call, {"grad": value.name, "x": made[2]}, values, tokens)
        if found is not None:
            add_gradient(call, "out", f"{made[0]}.weight", found, tokens, kind=_block(call))


def activation(call: Call) -> None:
    """Check the activation, which is multiplied by each row's probability."""
    if _exchanged(call):
        rowwise(call, {"x": "up", "gates": "gates"}, {"out": "act"})
        return
    for found in rowwise(call, {"x": "up", "order": "route_order"}, {"out": "act"}):
        number = _number_of(call, found[3], _slot_rows)
        _decided(call, "probs", Value("route_probs", found[0], found[1]), _token_rows, number)


def activation_backward(call: Call) -> None:
    """Check its backward; the gradients of the probabilities are complete when it has every dispatched row."""
    if _exchanged(call):
        rowwise(call, {"grad": "d_act", "x": "up", "gates": "gates"}, {"grad_x": "d_up", "grad_probs": "d_gates"})
        return
    every = rowwise(call, {"grad": "d_act", "x": "up", "order": "route_order"}, {"grad_x": "d_up"})
    value, first, v = None, 0, call.values
    for layer, micro_batch, _, row in every:
        number = _number_of(call, row, _slot_rows)
        _decided(call, "probs", Value("route_probs", layer, micro_batch), _token_rows, number)
        if len(every) == 1 and (row, call.tokens("grad")) == _rows_of(v, _slot_rows, number):
            value = Value(partial_sums(v, "d_probs")[0], layer, micro_batch)
            first = _rows_of(v, _token_rows, number)[0]
    call.put("grad_probs", 0, call.tokens("grad_probs"), value, first)


def route_backward(call: Call) -> None:
    """Check the gradient of the router's logits."""
    names = ("probs", "scores", "experts", *(["lse"] if call.has("lse") else []))
    wanted = {"grad": _partial(call, "d_probs"), **{name: f"route_{name}" for name in names}}
    tokens = call.tokens("grad")
    for found in rowwise(call, {**wanted}, {"out": _partial(call, "d_router")}):
        _all_ends(call, Value("", found[0], found[1]), _number_of(call, found[3], _token_rows))
        _ends_of_every_block(call, found)
        add_gradient(call, "loads", SELECTION_BIAS, found, tokens)


def _ends_of_every_block(call: Call, found: Found) -> None:
    """Check the ends of all tokens' rows, which a loss of balance needs where parts of them are routed by themselves.

    These are row blocks of row-wise recompute, and subsequences, of which each has ends of its own.
    """
    of, parts = call.values.model.mixture, len(call.values.blocks_of_parts)
    needed = of is not None and of.balance > 0 and (parts > 1 or is_rowwise(call.values.decisions))
    if call.has("all_ends") != needed:
        call.fault(f"all_ends {'is not given' if needed else 'should not be given'}")
    elif of is not None and needed:
        _own(call, "all_ends", Value("route_all_ends", found[0], found[1]), parts * of.count, 0)


def sum_ends(call: Call) -> None:
    """Check the sum of the ends of all row blocks of one subsequence, or of the micro-batch."""
    of, v = call.values.model.mixture, call.values
    assert of is not None
    before = [0, *accumulate(v.blocks_of_parts)]
    value, part = None, 0
    for first, tokens, [(ends, row)] in call.pieces("x"):
        part = max(0, bisect_right(before, row // of.count) - 1)
        if ends is not None and (ends.name != "route_ends" or row - first != before[part] * of.count):
            call.wrong("x", ends, row, f"route_ends of row block {before[part] + first // of.count}")
        elif ends is not None and tokens == v.blocks_of_parts[part] * of.count:
            value = ends._replace(name="route_all_ends")
        elif ends is not None:
            call.fault(f"x is not the ends of {v.blocks_of_parts[part]} row blocks of one layer")
    call.put("out", 0, call.tokens("out"), value, part * of.count)


def router_dgrad(call: Call) -> None:
    """Check the router's part of the gradient of its input, which is added to the experts' part."""
    before, after = partial_sums(call.values, "d_norm2")[-2:]
    for found in rowwise(call, {"grad": _partial(call, "d_router"), "out": before}, {"out": after}):
        weight(call, "weight", "router.weight", found[0])


def router_wgrad(call: Call) -> None:
    """Check the gradient of the router's weight, and add its rows to the sum."""
    for _, tokens, values in call.pieces("grad", "x"):
        found = agree(call, {"grad": "d_router", "x": f"norm2{call.values.routed_full}"}, values, tokens)
        if found is not None:
            add_gradient(call, "out", "router.weight", found, tokens)
            add_gradient(call, "grad_bias", "router.bias", found, tokens)


def bias(call: Call) -> None:
    """Check the biases that are added to the first product of dispatched rows."""
    for first, tokens, values in call.pieces("x"):
        found = agree(call, {"x": "up.product"}, values, tokens)
        if found is None:
            call.put("x", first, tokens, None)
            continue
        weight(call, "bias", "experts_up.bias", found[0], _block(call))
        _ends(call, Value("", found[0], found[1]), _same_rows(call, "x", first, found[3]))
        call.put("x", first, tokens, Value("up", found[0], found[1]), found[3])


def bias_backward(call: Call) -> None:
    """Check the gradient of these biases, and add its rows to the sum."""
    for first, tokens, values in call.pieces("grad"):
        found = agree(call, {"grad": "d_up"}, values, tokens)
        if found is not None:
            _ends(call, Value("", found[0], found[1]), _same_rows(call, "grad", first, found[3]))
            add_gradient(call, "out", "experts_up.bias", found, tokens, kind=_block(call))


def out_bias(call: Call) -> None:
    """Check the biases of the second product, which are added to the sum over each token's experts."""
    before, after = partial_sums(call.values, "down")[:2]
    wanted = {"out": before, "probs": "route_probs", "experts": "route_experts", **_seated(call)}
    for found in rowwise(call, {**wanted}, {"out": after}):
        weight(call, "bias", "experts_down.bias", found[0])
        _sent(call, found)


def _seated(call: Call) -> dict[str, Wanted]:
    """Return the operand that says which slots have a seat, where ranks divide the experts."""
    return {"seats": "route_seats"} if _exchanged(call) else {}


def _sent(call: Call, found: Found) -> None:
    """Check the operand whose number of rows is the seat of a slot without one."""
    if _exchanged(call):
        number = _number_of(call, found[3], _token_rows)
        _decided(call, "sent", Value("route_sent", found[0], found[1]), _expert_rows, number)


def out_bias_dgrad(call: Call) -> None:
    """Check what the biases of the second product add to the gradients of the probabilities."""
    before, after = partial_sums(call.values, "d_probs")
    wanted: dict[str, Wanted] = {
        "grad": (f"d_x{call.values.routed_full}", 1),
        "experts": "route_experts",
        "out": before,
    }
    for found in rowwise(call, wanted | _seated(call), {"out": after}):
        weight(call, "bias", "experts_down.bias", found[0])
        _sent(call, found)


def out_bias_wgrad(call: Call) -> None:
    """Check the gradient of these biases, and add its rows to the sum."""
    wanted: dict[str, Wanted] = {"grad": (f"d_x{call.values.routed_full}", 1)}
    wanted |= {"probs": "route_probs", "experts": "route_experts", **_seated(call)}
    for _, tokens, values in call.pieces(*wanted):
        found = agree(call, wanted, values, tokens)
        if found is not None:
            _sent(call, found)
            add_gradient(call, "out", "experts_down.bias", found, tokens)


def seats(call: Call) -> None:
    """Check the seats of slots among the rows that are sent, which need what the router decided for all tokens."""
    value, number = _at_once(call, "experts", _token_rows)
    if value is not None and value.name != "route_experts":
        call.wrong("experts", value, 0, "route_experts")
        value = None
    if value is not None:
        _decided(call, "places", value._replace(name="route_places"), _token_rows, number)
        _decided(call, "order", value._replace(name="route_order"), _slot_rows, number)
        _all_ends(call, value, number)
    made = {"seats": ("route_seats", _token_rows), "sent": ("route_sent", _expert_rows)}
    for role, (name, rows) in {**made, "sent_ends": ("route_ends.sent", _ends_of_all)}.items():
        new = None if value is None else value._replace(name=name)
        call.put(role, 0, call.tokens(role), new, _rows_of(call.values, rows, number)[0])


def gates(call: Call) -> None:
    """Check the copy of probabilities to the rows that are sent."""
    value, number = _at_once(call, "order", _expert_rows)
    if value is not None and value.name != "route_sent":
        call.wrong("order", value, 0, "route_sent")
        value = None
    if value is not None:
        _decided(call, "probs", value._replace(name="route_probs"), _token_rows, number)
    made = None if value is None else value._replace(name="gates.sent")
    call.put("out", 0, call.tokens("out"), made, _rows_of(call.values, _expert_rows, number)[0])


def exchange(call: Call) -> None:
    """Check an exchange of rows between ranks that divide experts: all that are sent to them arrive."""
    held = call.rows("send")[0].value
    rows = _ends_of_all if held is not None and held.name == "route_ends.sent" else _expert_rows
    value, number = _at_once(call, "send", rows)
    if value is not None and not value.name.endswith(".sent"):
        call.wrong("send", value, 0, "rows in the order in which they are sent")
        value = None
    if call.tokens("recv") != call.tokens("send"):
        call.fault(f"sends {call.tokens('send')} rows and receives {call.tokens('recv')}")
    arrived = None if value is None else value._replace(name=value.name.removesuffix(".sent") + ".arrived")
    call.put("recv", 0, call.tokens("recv"), arrived, _rows_of(call.values, rows, number)[0])


def arrivals(call: Call) -> None:
    """Check the order of arrived rows by expert, which needs the numbers of rows that every rank sends."""
    value, number = _at_once(call, "arrived_ends", _ends_of_all)
    if value is not None and value.name != "route_ends.arrived":
        call.wrong("arrived_ends", value, 0, "route_ends.arrived")
        value = None
    first, own = _rows_of(call.values, _expert_rows, number)[0], number * call.tokens("ends")
    for role, name, row in (("order", "route_arrived", first), ("ends", "route_own_ends", own)):
        call.put(role, 0, call.tokens(role), None if value is None else value._replace(name=name), row)


def arrange(call: Call) -> None:
    """Check the copy of arrived rows to the order of experts."""
    source, number = _at_once(call, "x", _expert_rows)
    if source is not None and not source.name.endswith(".arrived"):
        call.wrong("x", source, 0, "rows that arrived")
        source = None
    for first, tokens, [(order, row)] in call.pieces("order"):
        value = None
        if source is not None and order is not None:
            if (order, _number_of(call, row, _expert_rows)) != (source._replace(name="route_arrived"), number):
                call.wrong("order", order, row, f"route_arrived of layer {source.layer}")
            else:
                value = source._replace(name=source.name.removesuffix(".arrived"))
        call.put("out", first, tokens, value, row)


def arrange_back(call: Call) -> None:
    """Check the copy of experts' rows to the order in which they are sent back."""
    source, number = _at_once(call, "x", _expert_rows)
    if source is not None:
        _decided(call, "order", source._replace(name="route_arrived"), _expert_rows, number)
    sent = None if source is None else source._replace(name=f"{source.name}.sent")
    call.put("out", 0, call.tokens("out"), sent, _rows_of(call.values, _expert_rows, number)[0])


def gates_backward(call: Call) -> None:
    """Check the gradients of probabilities, which come back from the experts of every slot."""
    value, number = _at_once(call, "x", _expert_rows)
    if value is not None and value.name != "d_gates.arrived":
        call.wrong("x", value, 0, "d_gates.arrived")
        value = None
    if value is not None:
        _decided(call, "seats", value._replace(name="route_seats"), _token_rows, number)
    made = None if value is None else value._replace(name=partial_sums(call.values, "d_probs")[0])
    call.put("out", 0, call.tokens("out"), made, _rows_of(call.values, _token_rows, number)[0])


def shared_gate(call: Call) -> None:
    """Check the gate of the shared expert."""
    for found in rowwise(call, {"x": f"norm2{call.values.full}"}, {"out": "route_shared_gate"}):
        weight(call, "weight", "shared_gate.weight", found[0])


def shared_activation(call: Call) -> None:
    """Check the activation of the shared expert, which is multiplied by each token's gate."""
    rowwise(call, {"x": "shared_up", "gates": "route_shared_gate"}, {"out": "shared_act"})


def shared_activation_backward(call: Call) -> None:
    """Check its backward."""
    wanted: dict[str, Wanted] = {"grad": "d_shared_act", "x": "shared_up", "gates": "route_shared_gate"}
    rowwise(call, wanted, {"grad_x": "d_shared_up", "grad_probs": "d_shared_gate"})


def shared_gate_backward(call: Call) -> None:
    """Check the gradient of the product under the sigmoid."""
    rowwise(call, {"grad": "d_shared_gate", "gates": "route_shared_gate"}, {"grad": "d_shared_logit"})


def shared_gate_dgrad(call: Call) -> None:
    """Check the gate's part of the gradient of its input, which is added to the shared expert's part."""
    v = call.values
    made = _part("d_shared_norm", v) if separate(v) else "d_norm2.gate"
    for found in rowwise(call, {"grad": "d_shared_logit", "out": shared_norm(v)}, {"out": made}):
        weight(call, "weight", "shared_gate.weight", found[0])


def shared_gate_wgrad(call: Call) -> None:
    """Check the gradient of the gate's weight, and add its rows to the sum."""
    for _, tokens, values in call.pieces("grad", "x"):
        found = agree(call, {"grad": "d_shared_logit", "x": f"norm2{call.values.full}"}, values, tokens)
        if found is not None:
            add_gradient(call, "out", "shared_gate.weight", found, tokens)


RULES: dict[str, Rule] = {
    "shared_gate": shared_gate,
    "shared_gate.swiglu": shared_activation,
    "shared_gate.swiglu.bwd": shared_activation_backward,
    "shared_gate.bwd": shared_gate_backward,
    "shared_gate.dgrad": shared_gate_dgrad,
    "shared_gate.wgrad": shared_gate_wgrad,
    "experts.seats": seats,
    "experts.gates": gates,
    "experts.gates.bwd": gates_backward,
    "experts.all_to_all": exchange,
    "experts.arrivals": arrivals,
    "experts.arrange": arrange,
    "experts.arrange.back": arrange_back,
    "router": router,
    "router.dgrad": router_dgrad,
    "router.wgrad": router_wgrad,
    "experts.route": route,
    "experts.route.bwd": route_backward,
    "experts.sort": sort,
    "experts.places": places,
    "experts.ends.sum": sum_ends,
    "experts.dispatch": dispatch,
    "experts.combine": combine,
    "experts.linear": linear,
    "experts.linear.dgrad": dgrad,
    "experts.linear.wgrad": wgrad,
    "experts.swiglu": activation,
    "experts.swiglu.bwd": activation_backward,
    "experts.clamped": activation,
    "experts.clamped.bwd": activation_backward,
    "experts.bias": bias,
    "experts.bias.bwd": bias_backward,
    "experts.out_bias": out_bias,
    "experts.out_bias.dgrad": out_bias_dgrad,
    "experts.out_bias.wgrad": out_bias_wgrad,
}
"""The rule of every op of experts."""
