"""Makes text from files harmless where it is read: one function for each place that it goes to.

Names of models, clusters, buffers and cases come from files that others have written. On a terminal, control characters
move the cursor and bidirectional marks reorder a line; a Markdown page shows HTML, a spreadsheet computes ``=1+1``.
Documents keep every name as it is; only what a person sees is changed.

    terminal, messages     ``one_line`` for a name, ``printable`` for whole output, ``json_text`` for a document
    Markdown               ``in_markdown``
    CSV                    ``in_csv``
    pictures               ``views/pictures.py``
"""

from __future__ import annotations

import re

_SPECIAL = re.compile(r"[\\`|<>&\[\]*~$]|(?<!\w)_|_(?!\w)")
"""What has a meaning in a cell of a Markdown table or in a heading; an underscore inside a word has none."""

_FORMULA = ("=", "+", "-", "@", "\t", "\r", "\n")
"""Beginnings of a cell that a spreadsheet computes (OWASP, CSV Injection)."""

MOST_SHOWN = 1_000
"""A name or value in a file may be as long as the file."""

_NUMBER = re.compile(r"[-+]?\d+(\.\d+)?([eE][-+]?\d+)?", re.ASCII)


def one_line(text: str) -> str:
    r"""Return ``text`` with every character that is not printed as itself escaped: ``\n``, ``\x1b``, ``\u202e``."""
    return text if text.isprintable() else "".join(map(_escaped, text))


def shortened(text: str) -> str:
    """Return ``text``, cut after ``MOST_SHOWN`` characters."""
    return text if len(text) <= MOST_SHOWN else f"{text[:MOST_SHOWN]}... ({len(text):,} characters)"


def printable(text: str) -> str:
    """Return ``text`` as ``one_line`` does, with its line breaks and tabs kept."""
    if text.isprintable():
        return text
    return "".join(character if character in "\n\t" else _escaped(character) for character in text)


def json_text(raw: bytes) -> str:
    r"""Return an equal JSON text without characters that a terminal obeys: they can stand in strings alone.

    >>> json_text('{"name": "a\u202eb"}'.encode())
    '{"name": "a\\u202eb"}'
    """
    text = raw.decode()
    if text.isascii() and "\x7f" not in text:
        return text
    return "".join(c if c == "\n" or c.isprintable() else _json_escaped(c) for c in text)


def in_markdown(text: str) -> str:
    r"""Return ``text`` so that a Markdown table's cell or a heading shows it as it is: ``a|b`` becomes ``a\|b``."""
    return _SPECIAL.sub(_markdown_escaped, one_line(text))


def in_csv(cell: str) -> str:
    """Return a cell that no spreadsheet takes for a formula: ``=1+1`` becomes ``'=1+1``; numbers stay."""
    return f"'{cell}" if cell.startswith(_FORMULA) and not _NUMBER.fullmatch(cell) else cell


def encodable(text: str, encoding: str | None) -> str:
    """Return ``text`` with what ``encoding`` does not have escaped, so that it can be written in it."""
    return text.encode(encoding or "utf-8", "backslashreplace").decode(encoding or "utf-8")


def _escaped(character: str) -> str:
    return character if character.isprintable() else character.encode("unicode_escape").decode("ascii")


def _json_escaped(character: str) -> str:
    units = character.encode("utf-16-be")
    return "".join(f"\\u{units[at : at + 2].hex()}" for at in range(0, len(units), 2))


_ENTITIES = {"<": "&lt;", ">": "&gt;", "&": "&amp;"}


def _markdown_escaped(match: re.Match[str]) -> str:
    return _ENTITIES.get(match[0], f"\\{match[0]}")
