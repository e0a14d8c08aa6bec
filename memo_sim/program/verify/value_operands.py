"""Checks that rules share: operands that agree, parameters, gradients of parameters (``value_rules.py``)."""

from __future__ import annotations

from collections.abc import Sequence

from memo_sim.program.ir.instruction import Mode
from memo_sim.program.ir.kinds import BlockKind, FamilyKind
from memo_sim.program.verify.value_call import Call
from memo_sim.program.verify.value_rows import ParameterKey, Sum, Value
from memo_sim.program.verify.value_terms import whole

Found = tuple[int, int, object, int]
"""Layer, micro-batch, part and row on which the operands of an instruction agree."""
Wanted = str | tuple[str, int]
"""The name of a value; with 1 it is of the next layer."""

LAYER = BlockKind.LAYER


def agree(
    call: Call, wanted: dict[str, Wanted], values: Sequence[tuple[Value | None, int]], tokens: int
) -> Found | None:
    """Check that every operand holds the value that it should, all of one layer, micro-batch, part and row.

    Returns None after a fault, and where no value is known.
    """
    found: Found | None = None
    sound = True
    for (role, want), (given, row) in zip(wanted.items(), values, strict=True):
        if given is None:
            continue
        name, after = want if isinstance(want, tuple) else (want, 0)
        value = whole(call, role, given, row, tokens)
        if value is None:
            sound = False
            continue
        if value.name not in name.split("/"):
            call.wrong(role, value, row, name)
            sound = False
            continue
        mine = (value.layer - after, value.micro_batch, value.part, row)
        if found is None:
            found = mine
        elif mine != found:
            layer, micro_batch, part, at = found
            of = "" if part is None else f", {part}"
            call.wrong(role, value, row, f"that of layer {layer + after}, micro-batch {micro_batch}{of}, row {at}")
            sound = False
    return found if sound else None


def rowwise(call: Call, wanted: dict[str, Wanted], made: dict[str, Wanted]) -> list[Found]:
    """Play a kernel that works on every row by itself; return what its operands agree on, run of rows by run."""
    every = []
    for first, tokens, values in call.pieces(*wanted):
        found = agree(call, wanted, values, tokens)
        if found is not None:
            every.append(found)
        for role, want in made.items():
            name, after = want if isinstance(want, tuple) else (want, 0)
            value = None
            if found is not None:
                value = Value(name, found[0] + after, found[1], found[2])
            call.put(role, first, tokens, value, found[3] if found else 0)
    return every


def weight(call: Call, role: str, name: str, layer: int | None, kind: BlockKind = LAYER) -> object:
    """Check that an operand is the whole parameter ``name`` of a layer, if the model has it; return its part."""
    parameter = call.values.parameter(kind, name, layer)
    if not call.has(role) or parameter is None:
        if call.has(role) != (parameter is not None):
            call.fault(f"{role} {'is not given' if parameter else 'should not be given'}: {name}")
        return None
    rows = call.rows(role)
    if any(each.value is None for each in rows):
        return None
    value, row = rows[0].value, rows[0].row
    assert value is not None
    if kind.of_layer and 0 <= value.layer < call.values.model.layers:
        parameter = call.values.parameter(kind, name, value.layer)
        assert parameter is not None  # layers of all kinds have the same parameters
    complete = len(rows) == 1 and row == parameter.first and call.tokens(role) == parameter.elements
    mine = value.name == "params" and value.terms is kind and (not kind.of_layer or layer in (None, value.layer))
    if not (complete and mine):
        call.fault(f"{role} holds {value} from element {row}, not {name} of layer {layer}")
        return None
    return value.part


def add_gradient(  # noqa: PLR0917 - a sum and one more term of it
    call: Call, role: str, name: str, found: Found, tokens: int, source: object = 0, kind: BlockKind = LAYER
) -> None:
    """Add the terms of ``tokens`` rows to the gradient of a parameter, which ``role`` holds."""
    parameter = call.values.parameter(kind, name, found[0])
    if parameter is not None and parameter.frozen:
        parameter = None
    if not call.has(role):
        if parameter is not None:
            call.fault(f"{role} is not given: the gradient of {name}")
        return
    if parameter is None:
        call.fault(f"{role}: the model trains no parameter {name}")
        return
    layer, micro_batch, _, row = found
    buffer, operand = call.buffers[role], call.operands[role]
    if operand.mode is Mode.ACCUMULATE and buffer not in call.values.sums:
        call.fault(f"adds to {call.family(role).name}, which was not zeroed")
    sums = call.values.sums.setdefault(buffer, {})
    key = (kind, layer if kind.of_layer else -1, name)
    if not _holds(call, role, key, operand.first, operand.tokens):
        return
    if operand.mode is Mode.WRITE:
        sums.clear()
    into = sums.setdefault(key, Sum(operand.first))
    if into.first != operand.first:
        call.fault(f"{role} begins with element {operand.first}; the sum of {name} begins with {into.first}")
    hop = source[1] if isinstance(source, tuple) and source[0] == "hop" else 0
    if call.family(role).kind is FamilyKind.OWN and isinstance(hop, int):
        into.hop = into.hop or hop
        if into.hop != hop:
            call.fault(f"{role} sums the gradient of weights {into.hop} ranks away, not {hop}")
    if not into.add((micro_batch, source), row, row + tokens):
        call.fault(
            f"gradient of {name} of layer {layer}, micro-batch {micro_batch}: rows [{row}, {row + tokens}) twice"
        )


def _holds(call: Call, role: str, key: ParameterKey, first: int, elements: int) -> bool:
    """Check that elements of a buffer of gradients are those of a parameter."""
    family, parameter = call.family(role), call.values.parameter(key[0], key[2], key[1])
    assert parameter is not None  # ``add_gradient`` refuses others
    if family.kind not in (FamilyKind.GRADS, FamilyKind.WHOLE_GRADS):
        return True
    buffer = call.buffers[role]
    if family.block is not None and family.block is not key[0]:
        call.fault(f"{role} is the gradient of {family.block}, not of {key[0]}")
        return False
    if (first, elements) != (parameter.first, parameter.elements):
        call.fault(f"{role} is elements [{first}, {first + elements}) of the gradients, not {key[2]}")
        return False
    if family.kind is FamilyKind.GRADS and key[0].of_layer and call.values.layer_of(buffer) != key[1]:
        call.fault(f"{role} is the gradient of layer {call.values.layer_of(buffer)}, not of layer {key[1]}")
        return False
    others = {layer for _, layer, _ in call.values.sums.get(buffer, {})}
    if others - {key[1]}:
        call.fault(f"{role} has gradients of layer {min(others)}, not of layer {key[1]}")
        return False
    return True
