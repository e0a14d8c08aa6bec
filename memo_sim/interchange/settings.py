"""The settings of a framework's files by their names, read one by one, so that every other one can be listed."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from memo_sim.contract.errors import BadInput
from memo_sim.contract.interchange import IgnoredOption, ReadOption
from memo_sim.interchange.framework import FALLBACK

DEVICES, LENGTH, MODEL, RECIPE = "devices", "seq_len", "model", "recipe"
"""Names under which ``--set`` gives what files leave open."""
_GIVEN = (DEVICES, LENGTH, MODEL, RECIPE, FALLBACK)
NOT_READ = "memo does not read it, and prices nothing of it"
_YES, _NO = ("true", "yes", "y", "t", "1", "on"), ("false", "no", "n", "f", "0", "off")
_NONE = ("none", "null", "")
_LONGEST = 80


class Settings:
    """Names and values. A value that was read is one of ``read``; the others are ``ignored``.

    Values of files with types are of Python's types; those of command lines are text, and mean the same.
    """

    def __init__(self, values: Mapping[str, Any], where: str) -> None:
        self.values = dict(values)
        self.where = where
        self.read: list[ReadOption] = []
        self.unused: dict[str, str] = {}
        self._taken: set[str] = set()

    def has(self, key: str) -> bool:
        """Return whether there is a value, and not a null."""
        return not _is_none(self.values.get(key))

    def raw(self, key: str) -> Any:
        """Return the value as it stands, and count it as read; None without one."""
        self._taken.add(key)
        value = self.values.get(key)
        return None if _is_none(value) else value

    def text(self, key: str) -> str | None:
        """Return the value as text; None without one."""
        value = self.raw(key)
        return None if value is None else str(value)

    def whole(self, key: str, *, least: int = 1) -> int | None:
        """Return a whole number of at least ``least``; None without one.

        Raises:
            BadInput: for anything else.
        """
        value = self.raw(key)
        if value is None:
            return None
        try:
            number = int(str(value)) if not isinstance(value, float) else int(value)
        except (OverflowError, ValueError):
            number = least - 1
        if isinstance(value, bool) or number < least or (isinstance(value, float) and number != value):
            raise BadInput(
                "a wrong value",
                where=f"{self.where}: {key}",
                got=repr(value),
                wanted=f"a whole number from {least}",
                hint=f"--set {key}=NUMBER" if "$" in str(value) else None,
            )
        return number

    def flag(self, key: str, default: bool = False) -> bool:
        """Return true or false, ``default`` without a value.

        Raises:
            BadInput: for anything else.
        """
        value = self.raw(key)
        if value is None:
            return default
        word = str(value).strip().lower()
        if word in _YES or word in _NO:
            return word in _YES
        raise BadInput("a wrong value", where=f"{self.where}: {key}", got=repr(value), wanted="true or false")

    def says(self, key: str, text: str) -> None:
        """Note what a value means in memo's words."""
        if self.has(key):
            self._taken.add(key)
            self.read.append(ReadOption(key=key, value=_shown(self.values[key]), says=text))

    def ignore(self, keys: str | Iterable[str], why: str) -> None:
        """Note why values are not used; those that the files do not have are left out."""
        for key in (keys,) if isinstance(keys, str) else keys:
            if key in self.values:
                self._taken.discard(key)
                self.unused[key] = why

    @property
    def ignored(self) -> tuple[IgnoredOption, ...]:
        """Every value that was not read, in the order of the file."""
        return tuple(
            IgnoredOption(key=key, value=_shown(value), why=self.unused.get(key, NOT_READ))
            for key, value in self.values.items()
            if key not in self._taken
        )


def devices_of(given: Mapping[str, str], said: int | None) -> int | None:
    """Return the devices of a job: those that ``--set`` gives, those that the files say, or all of the cluster's."""
    return Settings(given, "--set").whole(DEVICES) or said or Settings(given, "--cluster").whole(FALLBACK)


def overrides(given: Mapping[str, str]) -> dict[str, str]:
    """Return the options of a job that ``--set`` gives; names in capitals, and numbers, are a script's variables."""
    return {key: value for key, value in given.items() if key not in _GIVEN and any(c.islower() for c in key)}


def _is_none(value: Any) -> bool:
    return value is None or (isinstance(value, str) and value.strip().lower() in _NONE)


def _shown(value: Any) -> str:
    text = str(value).lower() if isinstance(value, bool) else str(value)
    return text if len(text) <= _LONGEST else text[: _LONGEST - 3] + "..."


def flat(values: Mapping[str, Any], *, below: str = "") -> dict[str, Any]:
    """Return nested mappings as one, with names joined by dots; empty mappings stay values."""
    found = dict[str, Any]()
    for key, value in values.items():
        name = f"{below}.{key}" if below else str(key)
        if isinstance(value, Mapping) and value:
            found |= flat(value, below=name)
        else:
            found[name] = value
    return found
