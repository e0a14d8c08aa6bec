"""Writes drawings to picture files, and checks their format.

Text stays text in an SVG, and the same drawing always gives the same bytes. Names come from files: nothing in them is
drawn as mathematics (``$x$`` would end the command), and a character that an SVG cannot hold is escaped.
"""

from __future__ import annotations

import io
import warnings
from collections.abc import Callable
from functools import cached_property
from os import PathLike
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING

from memo_sim.contract import codec
from memo_sim.contract.errors import UsageError, missing_package
from memo_sim.contract.plain_text import one_line, printable

if TYPE_CHECKING:
    from matplotlib.figure import Figure

STAMPS = {".png": "Software", ".svg": "Date", ".pdf": "CreationDate"}
"""The metadata key of each format that would hold a program's name or a date; it is left empty."""
FORMATS = tuple(STAMPS)
DPI = 150
LONGEST_NAME = 400
"""Characters of a name that a picture shows."""


def check_kind(path: str | Path) -> None:
    """Refuse a file name whose suffix is none of ``FORMATS``.

    Raises:
        UsageError: naming the file.
    """
    suffix = Path(path).suffix.lower()
    if suffix not in FORMATS:
        raise UsageError("unknown picture format", where=str(path), got=repr(suffix), wanted=", ".join(FORMATS))


def write_picture(draw: Callable[[], Figure], path: str | Path, hatch_linewidth: float = 1.0) -> None:
    """Write the drawing that ``draw`` returns atomically; the file's suffix decides the format.

    ``hatch_linewidth`` is in points; matplotlib has one value for a whole picture.

    Raises:
        UsageError: when the file's format is unknown or the file cannot be written.
        ModuleNotFoundError: when matplotlib is not installed.
    """
    check_kind(path)
    import matplotlib as mpl
    from matplotlib.text import Text

    suffix, raw = Path(path).suffix.lower(), io.BytesIO()
    plain = mpl.rc_context({"text.parse_math": False, "text.usetex": False})
    stable = mpl.rc_context({"svg.fonttype": "none", "svg.hashsalt": "memo", "hatch.linewidth": hatch_linewidth})
    with plain, stable, warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Glyph .* missing")  # a character that no font has is drawn as a box
        figure = draw()
        for text in figure.findobj(Text):
            text.set_text(printable(text.get_text()))
        figure.savefig(raw, format=suffix[1:], dpi=DPI, metadata={STAMPS[suffix]: None})
    codec.write_bytes(path, raw.getvalue())


def drawn(name: str) -> str:
    """Return a name from a file for a title, a label or a legend, which leaves out names that begin with ``_``."""
    shown = one_line(name)
    shown = shown if len(shown) <= LONGEST_NAME else f"{shown[:LONGEST_NAME]}..."
    return f" {shown}" if shown.startswith("_") else shown


class Picture:
    """A drawing that a notebook shows by itself; it is drawn when it is needed."""

    def __init__(self, draw: Callable[[Path], None]) -> None:
        self._draw = draw

    @cached_property
    def svg(self) -> str:
        """The drawing as text of an SVG file."""
        with TemporaryDirectory() as folder:
            path = Path(folder) / "picture.svg"
            self._drawn(path)
            return path.read_text(encoding="utf-8")

    def save(self, path: str | PathLike[str]) -> None:
        """Write the drawing; the suffix decides the format (.png, .svg, .pdf).

        Raises:
            UsageError: when the format is unknown or the file cannot be written.
            CannotRun: when matplotlib is not installed.
        """
        check_kind(Path(path))
        codec.check_writable(Path(path))
        self._drawn(Path(path))

    def _drawn(self, path: Path) -> None:
        try:
            self._draw(path)
        except ModuleNotFoundError as error:
            raise missing_package(error) or error from None

    def _repr_svg_(self) -> str:
        return self.svg


def picture_in(draw: Callable[[Path], None], path: str | PathLike[str] | None) -> Picture:
    """Return a drawing, already written to ``path`` where there is one."""
    picture = Picture(draw)
    if path is not None:
        picture.save(path)
    return picture
