"""The ``config.json`` of a Hugging Face model: each key is checked when it is read."""

from __future__ import annotations

from typing import Any, TypeVar

from memo_sim.contract.errors import BadInput
from memo_sim.contract.units import MOST_WIDTH

T = TypeVar("T")

_BEYOND_FLOATS = 10**300


class Config:
    """The keys of one JSON object of the file; each key is checked when it is read."""

    def __init__(self, fields: dict[str, Any], where: str, path: str = "$") -> None:
        self.fields = fields
        self.where = where
        self.path = path
        self.read: set[str] = set()
        """The keys that were read or checked."""

    def refusal(self, key: str, what: str, *, wanted: str | None = None, hint: str | None = None) -> BadInput:
        """Return the error about one key."""
        got = repr(self.fields[key]) if key in self.fields else "nothing"
        return BadInput(what, where=f"{self.where}: {self.path}.{key}", got=got[:80], wanted=wanted, hint=hint)

    def whole(self, key: str, default: int | None = None, *, most: int = MOST_WIDTH) -> int:
        """Return a whole number from 1 to ``most``; a null or missing key gives ``default``, or else an error."""
        value = self._get(key, default)
        if isinstance(value, bool) or not isinstance(value, int) or not 1 <= value <= most:
            raise self.refusal(key, "a wrong value", wanted=f"a whole number from 1 to {most:,}")
        return value

    def number(self, key: str, default: float | None = None, *, least: float | None = None) -> float:
        """Return a number above zero, or a number of at least ``least``."""
        value = self._get(key, default)
        if isinstance(value, int | float) and not isinstance(value, bool):
            enough = value > 0 if least is None else value >= least
            if enough and value < _BEYOND_FLOATS:
                return float(value)
        wanted = "a positive number" if least is None else f"a number of at least {least:g}"
        raise self.refusal(key, "a wrong value", wanted=wanted)

    def numbers(self, key: str) -> tuple[float, ...]:
        """Return a list of numbers above zero."""
        found = self._typed(key, [], list, "a list of positive numbers")
        if not all(isinstance(x, int | float) and not isinstance(x, bool) and 0 < x < _BEYOND_FLOATS for x in found):
            raise self.refusal(key, "a wrong value", wanted="a list of positive numbers")
        return tuple(float(x) for x in found)

    def flag(self, key: str, default: bool) -> bool:
        """Return true or false."""
        return self._typed(key, default, bool, "true or false")

    def text(self, key: str, default: str) -> str:
        """Return a string."""
        return self._typed(key, default, str, "a string")

    def part(self, key: str) -> Config:
        """Return the object under ``key``; a null or missing key gives an empty object."""
        return Config(self._typed(key, {}, dict, "an object"), self.where, f"{self.path}.{key}")

    def _typed(self, key: str, default: T, kind: type[T], wanted: str) -> T:
        value = self._get(key, default)
        if not isinstance(value, kind):
            raise self.refusal(key, "a wrong value", wanted=wanted)
        return value

    def given(self, key: str) -> Any:
        """Return the value of a key, of any type; None where it is missing."""
        self.read.add(key)
        return self.fields.get(key)

    def _get(self, key: str, default: object) -> object:
        value = self.given(key)
        if value is None and default is None:
            raise self.refusal(key, "a field that the model's shape needs is missing")
        return default if value is None else value


def even_split(config: Config, key: str, hidden: int, heads: int) -> int:
    """Return the head size: the width divided by the number of heads."""
    if hidden % heads:
        raise config.refusal(key, "the width does not divide into heads", wanted=f"a multiple of {heads} heads")
    return hidden // heads
