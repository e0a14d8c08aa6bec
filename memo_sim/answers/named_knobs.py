"""The module ``contract/named_knobs.py``: the knobs as typed keyword arguments, written from their declarations."""

from __future__ import annotations

from dataclasses import fields
from inspect import getsource

from memo_sim.contract import attention_kernels, knobs
from memo_sim.contract.knobs import (
    KNOBS,
    Chosen,
    CountOrAuto,
    Degree,
    DocumentLengths,
    Factor,
    Flag,
    Fraction,
    Knob,
    LayerChoice,
    Length,
    Load,
    LowRank,
    Numbers,
    OneOf,
    Pins,
    Switch,
    Whole,
)

_HEAD = '''\
"""The knobs as keyword arguments of ``memo_sim.what_if`` and its neighbours, with their types.

Written by memo_sim/answers/named_knobs.py. Change the declarations, then write this module again.
"""

from __future__ import annotations

'''
_CLASS = '''

class Knobs(TypedDict, total=False):
    """A value pins its knob; None, and a knob that is left out, are searched or left to the system."""

'''
WORDS = (knobs, attention_kernels)
"""Modules that declare words of knobs."""


def named_knobs() -> str:
    """Return the module as text."""
    annotations = {f.name: str(f.type) for kind in (Pins, Chosen) for f in fields(kind)}
    typed = {knob.argument: _type(knob, annotations[knob.name]) for knob in KNOBS.values() if knob.on_command_line}
    used = {text.removesuffix(" | None") for text in typed.values()}
    named: dict[str, list[str]] = {}
    for name in sorted(text for text in used if text.isidentifier() and text not in ("int", "float", "bool", "str")):
        declaring = next(module for module in WORDS if f"\n{name} = " in getsource(module))
        named.setdefault(declaring.__name__, []).append(name)
    lines = [_HEAD, "from collections.abc import Sequence\n", "from typing import Literal, TypedDict\n\n"]
    lines += [_import(module, names) for module, names in sorted(named.items())]
    lines.append(_CLASS)
    lines += [f"    {name}: {text}\n" for name, text in typed.items()]
    return "".join(lines)


def _import(module: str, names: list[str]) -> str:
    one = f"from {module} import {', '.join(names)}\n"
    return one if len(one) <= 121 else f"from {module} import (\n" + "".join(f"    {n},\n" for n in names) + ")\n"


def _type(knob: Knob, annotation: str) -> str:
    """Return the type of a knob's argument; words are those of its declaration."""
    match knob.kind:
        case Degree() | Whole():
            own = "int"
        case Fraction() | Factor():
            own = "float"
        case Switch() | Flag():
            own = "bool"
        case Length():
            own = "int | str"
        case CountOrAuto():
            own = 'int | Literal["auto"]'
        case Numbers():
            own = "Sequence[int] | str"
        case LayerChoice() | Load() | DocumentLengths() | LowRank():
            own = "str"
        case OneOf():
            own = annotation.removesuffix(" | None")
    return f"{own} | None"
