"""Changes to legal files: of their structure, of their bytes, and of what kind of file they are.

Each change says what is expected of a reader: to refuse the file, to give the same answer, or either.
"""

from __future__ import annotations

import copy
import io
import json
import math
import os
import pickle
import struct
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from random import Random
from typing import Any, Literal

Expected = Literal["refused", "same", "either"]
JSON_SPACE = " \t\r\n"
LONG = 200_000
"""Characters of a huge string; a CSV field may have 131,072."""
DEEP = 20_000
"""Levels of nesting, far beyond what any recursive reader survives."""

NUMBERS = (
    *("-1", "0", "-0", "1", "2", "127", "128", "2147483647", "2147483648", "4294967296", "9223372036854775807"),
    *("9223372036854775808", "18446744073709551616", "1" + "0" * 40, "1.0", "0.5", "1e-310", "5e-324", "1e-30"),
    *("1e30", "1e308", "1e400", "-1e400", "NaN", "Infinity", "-Infinity", "1e", "01", "0x10", "1_0", "٣"),
)
TEXTS = (
    *(
        "",
        " ",
        "a",
        "\x00",
        "a\x00b",
        "\x1b[31mred\x1b[0m",
        "\x1b]0;title\x07",
        "\r\nnext: rm -rf",
        "$\\frac{1}$",
        "$$",
    ),
    *("$\\notacommand$", "<script>alert(1)</script>", "a|b", "=1+1", "@SUM(A1)", "../../etc/passwd", "/dev/zero"),
    *(
        "\u202egnp.exe",
        "\udcff",
        "é" * 300,
        "ß\u0301\u200b",
        "%s%n",
        "{0}",
        "`$(id)`",
        "None",
        "nan",
        "auto",
        "\x7f\x9b",
    ),
)
PLANTED = "planted"
"""The file that a planted command would make, in the current folder."""


@dataclass(frozen=True)
class Change:
    """One changed file: what was done to it, and what a reader may do."""

    name: str
    content: bytes | None = None
    expected: Expected = "either"
    make: Callable[[Path], None] | None = None
    """Makes something else than a regular file with ``content``."""

    def apply(self, path: Path) -> None:
        """Put the changed file in place of the one at ``path``."""
        path.unlink(missing_ok=True)
        if self.make is not None:
            self.make(path)
        else:
            path.write_bytes(self.content or b"")


class Planted:
    """An object whose pickle makes a file when Python's own reader loads it."""

    def __reduce__(self) -> tuple[Callable[[str], int], tuple[str]]:
        return os.system, (f"touch {PLANTED}",)


@dataclass(frozen=True)
class Literally:
    """Text that stands in a document as it is, such as ``1e400``."""

    text: str


@dataclass(frozen=True)
class Pairs:
    """An object whose keys may be equal."""

    items: tuple[tuple[Any, Any], ...]


def places(tree: Any) -> list[tuple[Any, ...]]:
    """Return the path of every value inside a tree of dictionaries and lists."""
    found, waiting = [], [((), tree)]
    while waiting:
        path, value = waiting.pop()
        children = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
        for key, child in children:
            found.append((*path, key))
            waiting.append(((*path, key), child))
    return found


def a_place(rng: Random, tree: Any) -> tuple[Any, ...]:
    """Return a path into a tree. Fields near its top, and single numbers of a list, are as likely as deep ones."""
    path: list[Any] = []
    while isinstance(tree, dict | list) and tree and (not path or rng.random() < 0.75):
        key = rng.choice(sorted(tree, key=repr)) if isinstance(tree, dict) else rng.randrange(len(tree))
        path.append(key)
        tree = tree[key]
    return tuple(path)


def at(tree: Any, path: tuple[Any, ...]) -> Any:
    """Return the value at a path."""
    for key in path:
        tree = tree[key]
    return tree


def written(value: Any) -> str:
    """Return a tree as JSON, with what no JSON writer would write."""
    match value:
        case Literally(text):
            return text
        case Pairs(items):
            return "{" + ",".join(f"{written(key)}:{written(each)}" for key, each in items) + "}"
        case dict():
            return "{" + ",".join(f"{written(str(key))}:{written(each)}" for key, each in value.items()) + "}"
        case list() | tuple():
            return "[" + ",".join(map(written, value)) + "]"
        case _:
            return json.dumps(value)


def written_toml(value: Any, *, top: bool = True) -> str:
    """Return a tree as TOML: one line for each field of the top, tables inside in braces."""
    match value:
        case Literally(text):
            return {"NaN": "nan", "Infinity": "inf", "-Infinity": "-inf", "null": '""'}.get(text, text)
        case dict() | Pairs():
            items = value.items if isinstance(value, Pairs) else value.items()
            lines = [f"{json.dumps(str(k))} = {written_toml(v, top=False)}" for k, v in items if v is not None]
            return "\n".join(lines) + "\n" if top else "{" + ", ".join(lines) + "}"
        case list() | tuple():
            return "[" + ", ".join(written_toml(each, top=False) for each in value) + "]"
        case None:
            return '""'
        case _:
            return json.dumps(value)


def replacement(rng: Random, old: Any) -> Any:
    """Return a value in place of ``old``: a boundary of its type, or one of another type."""
    number = isinstance(old, int | float) and not isinstance(old, bool)
    kind = rng.choice(
        ["number"] * 5 * number + ["text"] * 4 * isinstance(old, str) + ["number", "text", "other", "scaled"]
    )
    if kind == "number":
        return Literally(rng.choice(NUMBERS))
    if kind == "text":
        return "x" * LONG if rng.random() < 0.02 else rng.choice(TEXTS)
    if kind == "scaled" and number:
        scaled = old * rng.choice([-1, 2, 3, 10, 1e3, 1e9, 0.5, 1e-3, 1e-9])
        return int(scaled) if isinstance(old, int) and math.isfinite(scaled) else scaled
    if rng.random() < 0.03:
        return Literally("[" * DEEP + "]" * DEEP)
    other = (None, True, False, [], {}, [None], {"": None}, [old, old], {"value": old}, Literally(str(old)), str(old))
    return rng.choice(other)


def changed_tree(rng: Random, tree: Any) -> tuple[str, Any]:
    """Return a name and a copy of ``tree`` with one change of its structure."""
    tree = copy.deepcopy(tree)
    path = a_place(rng, tree)
    if not path:
        return "whole", replacement(rng, tree)
    holder, key = at(tree, path[:-1]), path[-1]
    where = ".".join(map(str, path))
    action = rng.choice(["replace"] * 5 + ["drop", "double", "rename", "swap", "schema"])
    if action == "drop":
        holder.pop(key)
    elif action == "double" and isinstance(holder, list):
        holder[key:key] = [holder[key]] * rng.choice([1, 2, 100])
    elif action == "double":
        twice = (*holder.items(), (key, rng.choice([holder[key], replacement(rng, holder[key])])))
        return f"double {where}", _with(tree, path[:-1], Pairs(twice))
    elif action == "rename" and isinstance(holder, dict):
        new = rng.choice([key.upper(), key + "s", key[:-1], rng.choice(TEXTS), "schema"])
        holder[new] = holder.pop(key)
    elif action == "swap" and isinstance(holder, dict):
        other = rng.choice(sorted(holder))
        holder[key], holder[other] = holder[other], holder[key]
    elif action == "schema" and isinstance(tree, dict) and "schema" in tree:
        tree["schema"] = rng.choice(["memo.plan/3", "memo.plan/1", "memo.model/99", "memo.trace/1", "", "x", 3, None])
    else:
        action = "replace"
        holder[key] = replacement(rng, holder[key])
    return f"{action} {where}", tree


def _with(tree: Any, path: tuple[Any, ...], value: Any) -> Any:
    if not path:
        return value
    at(tree, path[:-1])[path[-1]] = value
    return tree


def neutral_json(rng: Random, raw: bytes) -> Change:
    """Return the same document in other bytes: another order, spaces, escapes, a byte-order mark, line ends."""
    tree = json.loads(raw)
    kind = rng.choice(["order", "spaces", "escapes", "mark", "crlf"])
    if kind == "order":
        text = json.dumps(shuffled(rng, tree))
    elif kind == "spaces":
        text = json.dumps(tree, indent=rng.choice([None, 0, 1, 7]), separators=(rng.choice([",", " , "]), "\t:\r\n"))
    elif kind == "escapes":
        text = _escaped(rng, tree)
    else:
        text = raw.decode()
    if kind == "crlf":
        text = text.replace("\n", "\r\n")
    return Change(f"same: {kind}", (b"\xef\xbb\xbf" if kind == "mark" else b"") + text.encode(), "same")


def _escaped(rng: Random, value: Any) -> str:
    """Return JSON in which some letters of texts and keys are escapes."""
    if isinstance(value, dict):
        return "{" + ",".join(f"{_escaped(rng, k)}:{_escaped(rng, v)}" for k, v in value.items()) + "}"
    if isinstance(value, list):
        return "[" + ",".join(_escaped(rng, each) for each in value) + "]"
    if isinstance(value, str):
        plain = (json.dumps(c)[1:-1] for c in value)
        return (
            '"'
            + "".join(
                f"\\u{ord(c):04x}" if ord(c) < 2**16 and rng.random() < 0.3 else p
                for c, p in zip(value, plain, strict=True)
            )
            + '"'
        )
    return json.dumps(value)


def shuffled(rng: Random, tree: Any) -> Any:
    """Return a tree whose dictionaries have another order."""
    if isinstance(tree, dict):
        keys = list(tree)
        rng.shuffle(keys)
        return {key: shuffled(rng, tree[key]) for key in keys}
    return [shuffled(rng, each) for each in tree] if isinstance(tree, list) else tree


def change_json(rng: Random, raw: bytes) -> Change:
    """Return a JSON document with one to three changes of its structure."""
    if rng.random() < 0.08:
        return neutral_json(rng, raw)
    name, tree = _changes(rng, json.loads(raw))
    return Change(name, written(tree).encode(errors="surrogatepass"))


def change_toml(rng: Random, raw: bytes) -> Change:
    """Return a TOML document with one to three changes; ``raw`` is its JSON."""
    tree = json.loads(raw)
    if rng.random() < 0.08:
        return Change("same: order", written_toml(shuffled(rng, tree)).encode(), "same")
    name, tree = _changes(rng, tree)
    return Change(name, written_toml(tree).encode(errors="surrogatepass"))


def _changes(rng: Random, tree: Any) -> tuple[str, Any]:
    names = []
    for _ in range(rng.choice([1, 1, 1, 2, 3])):
        name, tree = changed_tree(rng, tree)
        names.append(name)
        if _is_odd(tree):  # a copy with equal keys or literal text has no paths any more
            break
    return ", ".join(names), tree


def _is_odd(value: Any) -> bool:
    if isinstance(value, Pairs | Literally):
        return True
    children = value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
    return any(_is_odd(child) for child in children)


def change_table(rng: Random, raw: bytes) -> Change:
    """Return a CSV table with one change."""
    import csv

    rows = list(csv.reader(io.StringIO(raw.decode())))
    action = rng.choice(
        ["cell"] * 8 + ["drop column", "double column", "rename column", "drop row", "double row", "ragged"]
    )
    action = rng.choice([action] * 9 + ["same: columns", "same: crlf", "same: mark", "same: quotes", "quote", "huge"])
    row, column = rng.randrange(len(rows)), rng.randrange(len(rows[0]))
    expected: Expected = "same" if action.startswith("same") else "either"
    if action in ("cell", "huge"):
        row = rng.randrange(1, len(rows)) if len(rows) > 1 and rng.random() < 0.9 else row
        value = "x" * LONG if action == "huge" else rng.choice([*NUMBERS, *TEXTS, "yes", "1;2", "1,1", "full", "ok"])
        rows[row][column] = value
    elif action == "drop column":
        rows = [each[:column] + each[column + 1 :] for each in rows]
    elif action == "double column":
        rows = [[*each, each[column]] for each in rows]
    elif action == "rename column":
        rows[0][column] = rng.choice([*TEXTS, rows[0][column].upper(), rows[0][0]])
    elif action == "drop row":
        rows.pop(row)
    elif action == "double row":
        rows.insert(row, rows[row])
    elif action == "ragged":
        rows[row] = rng.choice([rows[row][:column], rows[row] * 2, []])
    elif action == "same: columns":
        order = list(range(len(rows[0])))
        rng.shuffle(order)
        rows = [[each[i] for i in order] for each in rows]
    text = io.StringIO()
    quoting = csv.QUOTE_ALL if action == "same: quotes" else csv.QUOTE_MINIMAL
    end = "\r\n" if action == "same: crlf" else "\n"
    writer = csv.writer(text, lineterminator=end, quoting=quoting, escapechar=None)
    writer.writerows(rows)
    made = text.getvalue()
    if action == "quote":
        made = made.replace(",", ',"', 1 + rng.randrange(3))
    mark = b"\xef\xbb\xbf" if action == "same: mark" else b""
    return Change(f"{action} {row},{column}", mark + made.encode(errors="surrogatepass"), expected)


def change_words(rng: Random, raw: bytes) -> Change:
    """Return a text of words and lines (a log, a list of numbers) with one change."""
    lines = raw.decode().split("\n")
    line = rng.randrange(len(lines))
    words = lines[line].split(" ")
    word = rng.randrange(len(words))
    action = rng.choice(["word"] * 4 + ["drop", "double", "move", "crlf"])
    if action == "word":
        words[word] = rng.choice([*NUMBERS, *TEXTS])
        lines[line] = " ".join(words)
    elif action == "drop":
        lines.pop(line)
    elif action == "double":
        lines.insert(line, lines[line])
    elif action == "move":
        lines.insert(rng.randrange(len(lines)), lines.pop(line))
    text = ("\r\n" if action == "crlf" else "\n").join(lines)
    return Change(f"{action} {line}", text.encode(errors="surrogatepass"))


def change_pickle(rng: Random, raw: bytes) -> Change:
    """Return a pickle of plain data with one change, or with a planted command."""
    protocol = rng.randrange(6)
    if rng.random() < 0.08:
        tree = pickle.loads(raw)
        place = a_place(rng, tree)
        at(tree, place[:-1])[place[-1]] = Planted()
        return Change(f"planted at {place}", pickle.dumps(tree, protocol), "refused")
    if rng.random() < 0.06:
        return Change("same: protocol", pickle.dumps(pickle.loads(raw), rng.randrange(2, 6)), "same")  # torch writes 2
    name, tree = changed_tree(rng, pickle.loads(raw))
    tree = plain(tree)
    if rng.random() < 0.03 and isinstance(tree, dict):
        tree["self"] = tree
    return Change(name, pickle.dumps(tree, protocol))


def plain(value: Any) -> Any:
    """Return a tree with Python's values in place of literal text."""
    if isinstance(value, Literally):
        for kind in (int, float):
            try:
                return kind(value.text)
            except ValueError:
                continue
        return value.text[:500].encode(errors="surrogatepass")
    if isinstance(value, Pairs):
        return {str(key): plain(each) for key, each in value.items}
    if isinstance(value, dict):
        return {key: plain(each) for key, each in value.items()}
    return [plain(each) for each in value] if isinstance(value, list) else value


def change_npy(rng: Random, raw: bytes) -> Change:
    """Return a .npy file with another header, or other content."""
    length = int.from_bytes(raw[8:10], "little")
    header, data = raw[10 : 10 + length].decode(), raw[10 + length :]
    action = rng.choice(["field", "field", "object", "version", "length", "zip", "same: padding", "header", "ids"])
    expected: Expected = "either"
    version = b"\x01\x00"
    if action == "field":
        old, new = rng.choice(
            [
                ("'descr': '<", "'descr': '>"),
                *[
                    ("'descr': '<i8'", f"'descr': '{d}'")
                    for d in ("|O", "<f8", "<u8", "|S8", "<M8", "|V8", "<i16", "x")
                ],
                ("'descr': '<i8'", "'descr': [('a', '<i8')]"),
                ("False", rng.choice(["True", "None", "2"])),
                *[("(", f"({n}, ") for n in ("2", "-1", "0", "1" + "0" * 30, "True", "1.5")],
                *[("'shape'", name) for name in ("'Shape'", "shape", "__import__('os')")],
            ]
        )
        header = header.replace(old, new, 1)
    elif action == "object":
        data, header, expected = pickle.dumps([Planted()]), header.replace("<i8", "|O"), "refused"
    elif action == "version":
        version = bytes([rng.choice([0, 2, 3, 9, 255]), rng.choice([0, 1])])
    elif action == "length":
        made = b"\x93NUMPY\x01\x00" + rng.choice([0, 1, 9, 65535]).to_bytes(2, "little") + raw[10:]
        return Change(action, made)
    elif action == "zip":
        return Change(action, b"PK\x03\x04" + raw[4:], "refused")
    elif action == "header":
        header = rng.choice(["", "{", "{}", "[" * 9999, "x" * 60000, "0", "{'a': 1}", "\x00" * 9])
    elif action == "ids":
        data = struct.pack("<q", int(rng.choice(["-1", "256", str(2**63 - 1), str(-(2**63))]))) + data[8:]
    else:
        header, expected = header.rstrip() + " " * 400 + "\n", "same"
    made = b"\x93NUMPY" + version + len(header).to_bytes(2, "little") + header.encode() + data
    return Change(action, made, expected)


def change_safetensors(rng: Random, raw: bytes) -> Change:
    """Return a safetensors file with another header."""
    length = int.from_bytes(raw[:8], "little")
    if rng.random() < 0.1:
        wrong = rng.choice([0, 1, length - 1, length + 1, 2**31, 2**63, 2**64 - 1])
        return Change(f"length {wrong}", wrong.to_bytes(8, "little") + raw[8:], "either")
    name, tree = _changes(rng, json.loads(raw[8 : 8 + length]))
    header = written(tree).encode(errors="surrogatepass")
    return Change(name, len(header).to_bytes(8, "little") + header + raw[8 + length :])


def change_bytes(rng: Random, raw: bytes) -> Change:
    """Return a file with other bytes: flipped, cut off, inserted, doubled, not UTF-8."""
    action = rng.choice(
        ["flip", "flip", "cut", "insert", "remove", "double", "empty", "latin", "mark", "zeros", "noise"]
    )
    made = bytearray(raw)
    where = rng.randrange(len(raw)) if raw else 0
    if action == "flip":
        for _ in range(rng.choice([1, 1, 2, 8]) if raw else 0):
            made[rng.randrange(len(raw))] ^= 1 << rng.randrange(8)
    elif action == "cut":
        made = made[:where]
    elif action == "insert":
        made[where:where] = rng.randbytes(rng.choice([1, 2, 8, 64]))
    elif action == "remove":
        del made[where : where + rng.choice([1, 2, 8, 64])]
    elif action == "double":
        made = made * 2
    elif action == "empty":
        made.clear()
    elif action == "latin":
        made[where:where] = b"\xe9\xff\xc0\x80"
    elif action == "mark":
        made[:0] = rng.choice([b"\xef\xbb\xbf", b"\xff\xfe", b"\xfe\xff", b"\xef\xbb\xbf\xef\xbb\xbf"])
    elif action == "zeros":
        made[where:where] = bytes(rng.choice([1, 100, 5000]))
    else:
        made = bytearray(rng.randbytes(rng.choice([1, 10, 1000])))
    return Change(f"{action} at {where}", bytes(made))


def _fifo(path: Path) -> None:
    os.mkfifo(path)


def _loop(path: Path) -> None:
    path.symlink_to(path)


def _link_to(target: str) -> Callable[[Path], None]:
    def make(path: Path) -> None:
        path.symlink_to(target)

    return make


def _unreadable(path: Path) -> None:
    path.touch(mode=0)


SPECIAL: dict[str, Callable[[Path], None]] = {
    "FIFO": _fifo,
    "folder": Path.mkdir,
    "loop of links": _loop,
    "link to nothing": _link_to("nothing"),
    "endless device": _link_to("/dev/zero"),
    "terminal": _link_to("/dev/tty"),
    "no file": lambda path: None,
    # Says that it is an empty regular file, and cannot be read from its start: an I/O error, also for root.
    "unreadable": _link_to("/proc/self/mem") if os.geteuid() == 0 else _unreadable,
}


def change_kind(rng: Random) -> Change:
    """Return something else than a regular file."""
    name = rng.choice(sorted(SPECIAL))
    return Change(name, expected="refused", make=SPECIAL[name])


FORMS: dict[str, Callable[[Random, bytes], Change]] = {
    "json": change_json,
    "toml": change_toml,
    "table": change_table,
    "words": change_words,
    "pickle": change_pickle,
    "npy": change_npy,
    "safetensors": change_safetensors,
    "bytes": change_bytes,
}


def change(rng: Random, form: str, raw: bytes, tree: bytes | None = None) -> Change:
    """Return one changed file. ``form`` says how its structure is read; ``tree`` is the JSON of a TOML file."""
    kind = rng.random()
    if kind < 0.04:
        return change_kind(rng)
    if kind < 0.22:
        return change_bytes(rng, raw)
    return FORMS[form](rng, raw if tree is None else tree)
