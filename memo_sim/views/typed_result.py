"""What the results of the Python functions have in common: a document, its text, its file, equality and copies.

Results of one class are equal when their documents are. They can be pickled and copied, so that processes and notebooks
may keep them.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from memo_sim.contract import codec
from memo_sim.contract.named_arguments import with_names_checked

PathLike = str | os.PathLike[str]


class TypedResult:
    """A result that shows one document."""

    if TYPE_CHECKING:  # a class below has a field or a property

        @property
        def document(self) -> msgspec.Struct:
            """The document that ``--json`` prints."""

    @with_names_checked()
    def save(self, path: PathLike) -> None:
        """Write the document.

        Raises:
            UsageError: when the file cannot be written.
        """
        codec.write(Path(path), self.document)

    def to_json(self) -> str:
        """Return the document as text."""
        return codec.encode(self.document).decode()

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, TypedResult) or type(self) is not type(other):
            return NotImplemented
        return self._compared() == other._compared()

    def __hash__(self) -> int:
        return hash(repr(self))

    def _compared(self) -> object:
        """Return what makes two results equal."""
        return self.document
