"""Turns an error of the JSON decoder into a ``BadInput`` message that a user can act on.

The decoder names a broken rule and a path: ``Expected `int` >= 1 - at `$.reserve[...].value` ``. This module looks into
the text and the wanted type for the rest: the value found, the allowed names, the key that ``[...]`` stands for, and
the nearest known name.
"""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from types import NoneType, UnionType
from typing import Annotated, Any, NamedTuple, Union, get_args, get_origin, get_type_hints

import msgspec

from memo_sim.contract.errors import BadInput, did_you_mean

_COMPLAINT = re.compile(r"(?P<what>.*?)(?: - at (?P<key>`key` in )?`(?P<path>\$[^`]*)`)?", re.DOTALL)
_UNKNOWN = re.compile(r"Object contains unknown field `(.*)`", re.DOTALL)
_MISSING = re.compile(r"Object missing required field `(.*)`", re.DOTALL)
_EXPECTED = re.compile(r"Expected (?P<wanted>.*?)(?:, got (?P<got>.*))?", re.DOTALL)
_STEP = re.compile(r"\.(?P<field>\w+)|\[(?P<index>\d+)\]|\[\.\.\.\]")
_AT_BYTE = re.compile(r"(?:JSON is malformed: )?(?P<what>.*) \(byte (?P<at>\d+)\)")
_WORD = re.compile(rb"[-+.\w]+")

_LONGEST_SHOWN = 60

USES = {
    "memo.hardware": "this is a profile: memo-sim what-if MODEL --cluster FILE --seq-len 64k -o plan.json plans for it",
    "memo.cluster": "this is a cluster: memo-sim what-if MODEL --cluster FILE --seq-len 64k -o plan.json plans for it",
    "memo.model": "this is a model: memo-sim what-if FILE --cluster a800-1x8 --seq-len 64k -o plan.json plans for it",
    "memo.plan": "this is a plan: memo-exec run FILE plays it, memo-sim what-if --plan FILE --cluster ... prices it",
    "memo.placement": "this is a placement: give the plan beside it instead",
    "memo.trace": "this is a timeline: memo-exec compare PLAN FILE compares it with a plan",
    "memo.requests": "these are memory requests: memo-sim plan-memory FILE places them",
}
"""What a user can do with a document of another kind than the one expected."""


class _Place(NamedTuple):
    """The place that a path leads to: the path with its keys filled in, the wanted type, and the value if known."""

    path: str
    wanted: Any
    value: Any


def explain_schema(schema: object, kinds: Sequence[type[msgspec.Struct]], where: str, path: str = "$") -> BadInput:
    """Return the error for a document at ``path`` with the wrong ``schema``; None means that it has no schema."""
    tags = [str(kind.__struct_config__.tag) for kind in kinds]
    what = "the document has no schema" if schema is None else "the document is of another kind"
    got = "no schema" if schema is None else _shown(schema)
    hint: str | None = f'give it "schema": "{tags[0]}"'
    if isinstance(schema, str):
        hint = _use_of(schema, tags) or did_you_mean(schema, tags)
    return BadInput(what, where=f"{where}: {path}.schema", got=got, wanted=" or ".join(tags), hint=hint)


def _use_of(schema: str, tags: Sequence[str]) -> str | None:
    """Return the command that takes a document of this schema; None for unknown schemas and for other versions."""
    name, separator, _ = schema.partition("/")
    if not separator or name in {tag.partition("/")[0] for tag in tags}:
        return None
    return USES.get(name)


def explain_malformed(error: Exception, raw: bytes, where: str) -> BadInput:
    """Return the error for text that is not JSON: empty, cut off, not UTF-8, or nested too deep."""
    if not raw.strip():
        return BadInput("the file is empty", where=where, wanted="a JSON document")
    got = str(error)
    if isinstance(error, RecursionError):
        got = "brackets nested too deep"
    elif isinstance(error, UnicodeDecodeError):
        got = "text that is not UTF-8"
    elif "truncated" in got:
        got = "a document that ends too early"
    elif match := _AT_BYTE.fullmatch(got):
        at = int(match["at"])
        line, column = raw.count(b"\n", 0, at) + 1, at - raw.rfind(b"\n", 0, at)
        where = f"{where}: line {line}, column {column}"
        word = _WORD.match(raw, at)
        got = match["what"] + (f" at {_shown(word[0].decode())}" if word else "")
    return BadInput("not a JSON document", where=where, got=got, hint="check that the file is complete")


def explain_invalid(complaint: str, raw: bytes, kind: type, where: str) -> BadInput:
    """Return the error for JSON that breaks a rule of ``kind``; ``complaint`` is the decoder's message."""
    parts = _COMPLAINT.fullmatch(complaint)
    assert parts is not None
    place = _find(parts["path"] or "$", kind, raw)
    here = f"{where}: {place.path}"
    if unknown := _UNKNOWN.fullmatch(parts["what"]):
        names = getattr(_bare(place.wanted), "__struct_fields__", ())
        known = "one of " + ", ".join(names)
        hint = did_you_mean(unknown[1], names)
        at = f"{here}.{_key(unknown[1])}"
        return BadInput("unknown field", where=at, got=_shown(unknown[1]), wanted=known, hint=hint)
    if missing := _MISSING.fullmatch(parts["what"]):
        return BadInput("a field is missing", where=f"{here}.{missing[1]}", wanted="a value")
    if parts["what"].startswith("Invalid enum value"):
        return _not_allowed(place, here, is_key=parts["key"] is not None)
    if parts["what"].startswith("Invalid value"):  # the schema of a document inside this one is wrong
        path = place.path.removesuffix(".schema")
        return explain_schema(place.value, [_bare(_find(path, kind, raw).wanted)], where, path)
    if expected := _EXPECTED.fullmatch(parts["what"]):
        got = (expected["got"] or "").strip("`") if place.value is msgspec.UNSET else _shown(place.value)
        return BadInput("a wrong value", where=here, got=got or None, wanted=expected["wanted"].replace("`", ""))
    return _other(parts["what"], place, raw, where)


def _other(what: str, place: _Place, raw: bytes, where: str) -> BadInput:
    """Return the error for a rule without a name; the decoder does not know the place of some numbers."""
    number = _first_out_of_range(raw) if what in OUT_OF_RANGE and "[...]" in place.path else None
    if number is None:
        return BadInput(what, where=f"{where}: {place.path}")
    line, column, text = number
    return BadInput("a number is too large", where=f"{where}: line {line}, column {column}", got=_shown(text))


OUT_OF_RANGE = ("Number out of range", "Integer value out of range")
"""What the decoder says of numbers beyond 64 bits, without their place when it does not know the field."""

_TOKEN = re.compile(rb'"(?:[^"\\]|\\.)*"|(?P<number>-?\d[-+.\deE]*)', re.DOTALL)


def _first_out_of_range(raw: bytes) -> tuple[int, int, str] | None:
    """Return line, column and text of the first number in JSON text that no float or 64-bit integer can hold."""
    for token in _TOKEN.finditer(raw):
        text = (token["number"] or b"").decode()
        if not text:
            continue
        try:
            beyond = abs(int(text)) >= 2**63 if text.lstrip("-").isdigit() else math.isinf(float(text))
        except ValueError:  # too many digits for an int, or no number after all
            beyond = text.lstrip("-").isdigit()
        if beyond:
            at = token.start()
            return raw.count(b"\n", 0, at) + 1, at - raw.rfind(b"\n", 0, at), text
    return None


def _not_allowed(place: _Place, here: str, *, is_key: bool) -> BadInput:
    """Return the error for a value, or an object's key, that is not one of the allowed names."""
    wanted = _bare(place.wanted)
    allowed = [str(choice) for choice in get_args(_bare(get_args(wanted)[0]) if is_key else wanted)]
    got = place.value
    if is_key and isinstance(got, dict):
        got = next((key for key in got if key not in allowed), msgspec.UNSET)
    return BadInput(
        "not an allowed name" if is_key else "not an allowed value",
        where=here,
        got=None if got is msgspec.UNSET else _shown(got),
        wanted="one of " + ", ".join(allowed),
        hint=did_you_mean(str(got), allowed),
    )


def _find(path: str, kind: type, raw: bytes) -> _Place:
    """Return the place that ``path`` leads to in a document of type ``kind``."""
    try:
        value = msgspec.json.decode(raw)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):  # the text has a second error elsewhere
        value = msgspec.UNSET
    place = _Place("$", kind, value)
    for step in _STEP.finditer(path):
        wanted = _bare(place.wanted)
        if step["field"]:
            place = _field(place, wanted, step["field"])
        elif step["index"]:
            place = _item(place, wanted, int(step["index"]))
        else:
            place = _bad_entry(place, wanted)
    return place


def _field(place: _Place, wanted: Any, name: str) -> _Place:
    """Return the place of a struct's field."""
    hints = get_type_hints(wanted, include_extras=True) if isinstance(wanted, type) else {}
    value = place.value.get(name, msgspec.UNSET) if isinstance(place.value, dict) else msgspec.UNSET
    return _Place(f"{place.path}.{name}", hints.get(name, Any), value)


def _item(place: _Place, wanted: Any, index: int) -> _Place:
    """Return the place of a list's item."""
    known = isinstance(place.value, list) and index < len(place.value)
    hint = next(iter(get_args(wanted)), Any)
    return _Place(f"{place.path}[{index}]", hint, place.value[index] if known else msgspec.UNSET)


def _bad_entry(place: _Place, wanted: Any) -> _Place:
    """Return the place of the first entry of an object that does not have the type of its entries."""
    hint = get_args(wanted)[1] if len(get_args(wanted)) == 2 else Any
    for key, value in place.value.items() if isinstance(place.value, dict) else ():
        try:
            msgspec.convert(value, hint)
        except msgspec.ValidationError:
            return _Place(f"{place.path}.{_key(key)}", hint, value)
    return _Place(f"{place.path}[...]", hint, msgspec.UNSET)


def _bare(hint: Any) -> Any:
    """Return a type without its constraints and without ``| None``."""
    if get_origin(hint) is Annotated:
        return _bare(get_args(hint)[0])
    if get_origin(hint) in (Union, UnionType):
        return _bare(next(option for option in get_args(hint) if option is not NoneType))
    return hint


def _key(name: str) -> str:
    """Return an object's key in the form that a path shows."""
    return _shown(name).strip('"')


def _shown(value: Any) -> str:
    """Return a value in JSON form, shortened to ``_LONGEST_SHOWN`` characters."""
    if isinstance(value, dict):
        return "an object"
    if isinstance(value, list):
        return f"an array of {len(value)}"
    text = msgspec.json.encode(value).decode()
    return text if len(text) <= _LONGEST_SHOWN else text[:_LONGEST_SHOWN] + "..."
