"""Reads a pickle as plain data: lists, dictionaries, tuples, text, numbers, bytes. It never imports or runs code.

A caller may list names of classes and functions that the pickle may mention. They are not imported either: a call of
one, or an object of one, is returned as a ``Mentioned`` with its arguments and state, which the caller checks.

The standard reader is not safe here: before any of its hooks is called, it crashes or uses all memory at a key of
tuples nested a hundred thousand times, at a memo index of two billion, or at a length of eight GiB. This reader refuses
every opcode that is not listed. A memo index must count up by one, a length must end inside the file, and a key must be
text, a number or a ``Mentioned``. Nothing recurses, so time and memory are proportional to the file.

    80 04  } 94  8c 01 a 94  4b 05  73  2e        {"a": 5}: protocol, {}, memo 0, "a", memo 1, 5, set item, stop
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Collection
from dataclasses import dataclass
from functools import partial
from typing import Any

from memo_sim.contract.errors import BadInput

_PROTO, _STOP, _SHORT_GET, _LONG_GET = 0x80, 0x2E, 0x68, 0x6A
_HIGHEST = 5


@dataclass(eq=False, slots=True)
class Mentioned:
    """A class or function that a pickle names, or (``args`` is a tuple then) the object that calling it would make."""

    name: str
    """Module and name, such as ``torch.Size``."""
    args: tuple[Any, ...] | None = None
    state: Any = None
    """What the pickle passes to the object's ``__setstate__``."""


_KEYS = (str, int, float, bytes, type(None), Mentioned)


class _Refused(Exception):
    """The reason why the bytes are refused."""


def is_pickle(raw: bytes) -> bool:
    """Return whether ``raw`` begins like a binary pickle (protocol 2 to 5)."""
    return len(raw) > 1 and raw[0] == _PROTO and 2 <= raw[1] <= _HIGHEST


def load_plain(
    raw: bytes,
    where: str,
    *,
    names: Collection[str] = (),
    wanted: str = "dictionaries, lists, text and numbers, as torch.cuda.memory._dump_snapshot writes",
) -> Any:
    """Return the object in a pickle that consists of dict, list, tuple, str, int, float, bool, None and bytes only.

    ``names`` may be mentioned as well (module and name, with a dot between); nothing of that name is imported.
    ``wanted`` is what an error says about the file that was expected.

    Raises:
        BadInput: when it holds anything else, is truncated, or is not a pickle.
    """
    try:
        return _Reader(raw, names).read()
    except _Refused as error:
        why = str(error)
    except IndexError:
        why = "it is truncated, or uses more objects than it has made"
    raise BadInput(
        "not a pickle of plain data",
        where=where,
        got=why,
        wanted=wanted,
    )


class _Reader:
    """The stack on which opcodes build the object; ``below`` holds the stacks under each mark."""

    def __init__(self, raw: bytes, names: Collection[str]) -> None:
        self.raw = raw
        self.names = names
        self.at = 0
        self.stack: list[Any] = []
        self.below: list[list[Any]] = []
        self.memo: list[Any] = []

    def read(self) -> Any:
        """Return the object."""
        while (code := self.next_code()) != _STOP:
            handler = _HANDLERS.get(code)
            if handler is None:
                raise _Refused(f"opcode {code:#04x} at byte {self.at - 1}, which plain data does not need")
            handler(self)
        if self.below or len(self.stack) != 1:
            raise _Refused("it ends with more or less than one object")
        return self.stack[0]

    def next_code(self) -> int:
        """Return the next opcode other than ``get``; runs ``get`` itself, because it is the most frequent opcode."""
        raw, memo, push, at = self.raw, self.memo, self.stack.append, self.at
        while True:
            code = raw[at]
            if code == _LONG_GET:
                push(memo[int.from_bytes(raw[at + 1 : at + 5], "little")])
                at += 5
            elif code == _SHORT_GET:
                push(memo[raw[at + 1]])
                at += 2
            else:
                self.at = at + 1
                return code

    def take(self, count: int) -> bytes:
        """Return the next ``count`` bytes of the file."""
        taken = self.raw[self.at : self.at + count]
        if len(taken) < count:
            raise _Refused("it is truncated")
        self.at += count
        return taken

    def number(self, width: int) -> int:
        """Return the next ``width`` bytes as a whole number from 0."""
        return int.from_bytes(self.take(width), "little")

    def constant(self, value: Any) -> None:
        """Push a number or None."""
        self.stack.append(value)

    def fresh(self, kind: type) -> None:
        """Push an empty container."""
        self.stack.append(kind())

    def fixed(self, form: struct.Struct) -> None:
        """Push a number of fixed width."""
        self.stack.append(form.unpack(self.take(form.size))[0])

    def long(self) -> None:
        """Push a whole number of up to 255 bytes."""
        self.stack.append(int.from_bytes(self.take(self.number(1)), "little", signed=True))

    def text(self, width: int) -> None:
        """Push text; bytes that are not Unicode are replaced."""
        self.stack.append(self.take(self.number(width)).decode(errors="replace"))

    def data(self, width: int) -> None:
        """Push bytes."""
        self.stack.append(self.take(self.number(width)))

    def skip(self, count: int) -> None:
        """Skip a frame's length or a protocol's number."""
        self.take(count)

    def put(self, width: int) -> None:
        """Store the last object in the memo under the next index."""
        if width and self.number(width) != len(self.memo):
            raise _Refused("its memo indices do not count up")
        self.memo.append(self.stack[-1])

    def mark(self) -> None:
        """Begin a group of objects."""
        self.below.append(self.stack)
        self.stack = []

    def group(self, count: int | None) -> list[Any]:
        """Remove and return the last ``count`` objects, or those since the mark."""
        if count is None:
            taken, self.stack = self.stack, self.below.pop()
            return taken
        if len(self.stack) < count:
            raise _Refused("it uses more objects than it has made")
        taken = self.stack[-count:]
        del self.stack[-count:]
        return taken

    def tuple(self, count: int | None) -> None:
        """Push a tuple of the group."""
        items = self.group(count)
        self.stack.append(tuple(items))

    def extend(self, count: int | None) -> None:
        """Append the group to the list before it."""
        items, target = self.group(count), self.stack[-1]
        if not isinstance(target, list):
            raise _Refused(f"it appends to a {type(target).__name__}")
        target += items

    def set_items(self, count: int | None) -> None:
        """Set the group's keys and values in the dictionary before it."""
        items, target = self.group(count), self.stack[-1]
        if not isinstance(target, dict) or len(items) % 2:
            raise _Refused(f"it sets items of a {type(target).__name__}")
        for key in items[::2]:
            if not isinstance(key, _KEYS):
                raise _Refused(f"a key that is a {type(key).__name__}")
        target.update(zip(items[::2], items[1::2], strict=True))

    def name(self, *, on_stack: bool) -> None:
        """Push a name that may be mentioned; refuse any other import."""
        if on_stack:
            module, name = (str(part)[:80] if isinstance(part, str) else "?" for part in self.group(2))
        else:
            module, name, *_ = [*self.raw[self.at : self.at + 160].decode(errors="replace").split("\n"), ""]
            self.take(len(f"{module}\n{name}\n".encode()))
        if f"{module}.{name}" not in self.names:
            raise _Refused(f"it imports {module}.{name}")
        self.stack.append(Mentioned(f"{module}.{name}"))

    def make(self) -> None:
        """Push the object of a mentioned name and a tuple of arguments."""
        named, args = self.group(2)
        if not isinstance(named, Mentioned) or named.args is not None or not isinstance(args, tuple):
            raise _Refused("it calls what is not a name")
        self.stack.append(Mentioned(named.name, args))

    def build(self) -> None:
        """Give the object before it its state."""
        (state,) = self.group(1)
        made = self.stack[-1]
        if not isinstance(made, Mentioned) or made.args is None or made.state is not None:
            raise _Refused(f"it sets the state of a {type(made).__name__}")
        made.state = state


_Handler = Callable[[_Reader], None]
_HANDLERS: dict[int, _Handler] = {
    _PROTO: partial(_Reader.skip, count=1),
    0x95: partial(_Reader.skip, count=8),
    0x4E: partial(_Reader.constant, value=None),
    0x88: partial(_Reader.constant, value=True),
    0x89: partial(_Reader.constant, value=False),
    0x5D: partial(_Reader.fresh, kind=list),
    0x7D: partial(_Reader.fresh, kind=dict),
    0x29: partial(_Reader.fresh, kind=tuple),
    0x4B: partial(_Reader.fixed, form=struct.Struct("<B")),
    0x4D: partial(_Reader.fixed, form=struct.Struct("<H")),
    0x4A: partial(_Reader.fixed, form=struct.Struct("<i")),
    0x47: partial(_Reader.fixed, form=struct.Struct(">d")),
    0x8A: _Reader.long,
    0x8C: partial(_Reader.text, width=1),
    0x58: partial(_Reader.text, width=4),
    0x8D: partial(_Reader.text, width=8),
    0x43: partial(_Reader.data, width=1),
    0x42: partial(_Reader.data, width=4),
    0x8E: partial(_Reader.data, width=8),
    0x94: partial(_Reader.put, width=0),
    0x71: partial(_Reader.put, width=1),
    0x72: partial(_Reader.put, width=4),
    0x28: _Reader.mark,
    0x85: partial(_Reader.tuple, count=1),
    0x86: partial(_Reader.tuple, count=2),
    0x87: partial(_Reader.tuple, count=3),
    0x74: partial(_Reader.tuple, count=None),
    0x61: partial(_Reader.extend, count=1),
    0x65: partial(_Reader.extend, count=None),
    0x73: partial(_Reader.set_items, count=2),
    0x75: partial(_Reader.set_items, count=None),
    0x63: partial(_Reader.name, on_stack=False),
    0x93: partial(_Reader.name, on_stack=True),
    0x52: _Reader.make,
    0x81: _Reader.make,
    0x62: _Reader.build,
}
"""Opcodes of protocols 2 to 5, in hexadecimal as Python's ``pickletools`` lists them."""
