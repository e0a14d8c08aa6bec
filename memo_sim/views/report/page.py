"""Makes a report's page from blocks, and writes it as one HTML file that loads nothing from a network.

Every text is escaped by jinja2, and characters that would reorder a line are written out. The page's content security
policy allows one script and one style, by their hashes: whatever a name from a file holds, it does not run.
"""

from __future__ import annotations

import base64
import hashlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import cache
from os import PathLike
from pathlib import Path
from typing import TYPE_CHECKING, Any

import memo_sim
from memo_sim.contract import codec
from memo_sim.contract.errors import UsageError, missing_package
from memo_sim.contract.plain_text import printable
from memo_sim.contract.units import format_percent, format_seconds
from memo_sim.views.report.curves import Chart
from memo_sim.views.report.packed import packed
from memo_sim.views.stage_numbers import from_one
from memo_sim.views.step import Step

if TYPE_CHECKING:
    from jinja2 import Environment

FOLDER = Path(__file__).parent
SUFFIX = ".html"
BAR_WIDTH = 1000
"""Units of the drawing that a bar of 100 % is wide."""

Cell = str | None


@dataclass(frozen=True)
class Paragraph:
    """A paragraph of text."""

    text: str
    quiet: bool = False


@dataclass(frozen=True)
class Notice:
    """A warning, set apart."""

    text: str


@dataclass(frozen=True)
class Heading:
    """A heading inside a section."""

    text: str


@dataclass(frozen=True)
class Bullets:
    """A list of sentences."""

    items: Sequence[str]


@dataclass(frozen=True)
class Commands:
    """Lines for a shell."""

    lines: Sequence[str]


@dataclass(frozen=True)
class Tiles:
    """Key figures: (name, value, note); an empty note is left out."""

    items: Sequence[tuple[str, str, str]]


@dataclass(frozen=True)
class Pairs:
    """Names and their values."""

    items: Sequence[tuple[str, str]]


@dataclass(frozen=True)
class Table:
    """A table; ``alignment`` has a letter for each column; None is an empty cell.

    ``l``: left; ``r``: right, in one line; ``n``: left, in one line where the screen is wide.
    """

    headers: Sequence[str]
    rows: Sequence[Sequence[Cell]]
    alignment: str
    mark_first: bool = False


@dataclass(frozen=True)
class Share:
    """Seconds of one kind of work (or bytes), divided by colour."""

    name: str
    parts: Sequence[tuple[str, float]]

    @property
    def seconds(self) -> float:
        """All its seconds."""
        return sum(seconds for _, seconds in self.parts)


@dataclass(frozen=True)
class Shares:
    """Bars of how ``total_s`` seconds divide; ``legend`` names the colours, ``of`` what percents are of.

    The same for bytes, with their ``unit`` and how they are ``shown``.
    """

    what: str
    shares: Sequence[Share]
    total_s: float
    legend: Sequence[tuple[str, str]]
    of: str = "share"
    unit: str = "time"
    shown: Callable[[float], str] = format_seconds

    @property
    def rows(self) -> list[dict[str, Any]]:
        """The bars as the template draws them, all on the scale of the longest."""
        longest = max((share.seconds for share in self.shares), default=0.0) or 1.0
        found = []
        for share in self.shares:
            at, parts = 0.0, []
            for colour, seconds in share.parts:
                width = BAR_WIDTH * seconds / longest
                parts.append({"at": f"{at:.2f}", "width": f"{width:.2f}", "colour": colour})
                at += width
            percent = format_percent(share.seconds / self.total_s) if self.total_s else ""
            found.append({"name": share.name, "time": self.shown(share.seconds), "percent": percent, "parts": parts})
        return found


@dataclass(frozen=True)
class Charts:
    """Charts side by side."""

    charts: Sequence[Chart]


@dataclass(frozen=True)
class Timeline:
    """Steps over time, with their memory; drawn in the reader's browser."""

    steps: Sequence[Step]
    label: str = "Timeline of the step"

    @property
    def columns(self) -> str:
        """The steps for ``timeline.js``."""
        return packed(self.steps)


@dataclass(frozen=True)
class Details:
    """Blocks that stay folded until a reader opens them."""

    title: str
    blocks: Sequence[Block]


Block = Details | Paragraph | Notice | Heading | Bullets | Commands | Tiles | Pairs | Table | Shares | Charts | Timeline


@dataclass(frozen=True)
class Section:
    """A part of the page with its own heading."""

    heading: str
    blocks: Sequence[Block]


@dataclass(frozen=True, kw_only=True)
class Page:
    """A whole report. ``verdict`` is its answer in a few lines; ``good`` colours it."""

    title: str
    subtitle: str = ""
    verdict: Sequence[str] = ()
    good: bool = True
    sections: Sequence[Section] = ()
    version: str = memo_sim.__version__


def html(page: Page) -> str:
    """Return the page as HTML.

    Raises:
        ModuleNotFoundError: when jinja2 is not installed.
    """
    script, style = _own_text("timeline.js"), _own_text("page.css")
    template = _environment().get_template("page.html")
    return template.render(
        page=page,
        script=_as_it_is(script),
        style=_as_it_is(style),
        script_sha256=_sha256(script),
        style_sha256=_sha256(style),
    )


def write_page(page: Page, path: str | Path) -> None:
    """Write the page atomically.

    Raises:
        UsageError: when the file cannot be written; what was there stays.
        ModuleNotFoundError: when jinja2 is not installed.
    """
    codec.write_bytes(path, html(page).encode("utf-8", "backslashreplace"))


def save_page(make: Callable[..., Page], path: str | PathLike[str], command: str) -> None:
    """Write the page that ``make`` returns for ``command``, the time and the version of memo.

    Raises:
        UsageError: when the file cannot be written, or its name does not end in ``.html``.
        CannotRun: when jinja2 is not installed.
    """
    try:
        check_page(Path(path))
        created = datetime.now(UTC).isoformat(timespec="seconds")
        write_page(make(command=command, created=created, version=memo_sim.__version__), Path(path))
    except ModuleNotFoundError as error:
        raise missing_package(error) or error from None


def check_page(path: Path) -> None:
    """Refuse a file that a report cannot be written to. Called before any work.

    Raises:
        UsageError: when its name does not end in ``.html``, or it cannot be written.
        ModuleNotFoundError: when jinja2 is not installed.
    """
    if path.suffix.lower() != SUFFIX:
        raise UsageError("a report is an HTML page", got=str(path), wanted=f"a name that ends in {SUFFIX}")
    import jinja2  # noqa: F401

    codec.check_writable(path)


@cache
def _environment() -> Environment:
    from jinja2 import Environment, FileSystemLoader, StrictUndefined

    environment = Environment(
        loader=FileSystemLoader(FOLDER),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        finalize=_shown,
    )

    def draw(block: Block) -> Any:
        """Return a block as HTML: its macro has its class's name."""
        return getattr(environment.get_template("blocks.html").module, type(block).__name__.lower())(block)

    environment.globals["draw"] = draw
    return environment


def _shown(value: Any) -> Any:
    """Return a text with stages from 1, and without characters that a browser would not show; markup stays."""
    from markupsafe import Markup

    return printable(from_one(value)) if isinstance(value, str) and not isinstance(value, Markup) else value


@cache
def _own_text(name: str) -> str:
    """Return the page's own script or style, which must not end the element that it stands in."""
    text = (FOLDER / name).read_text(encoding="utf-8")
    assert "</" not in text, name
    return text


def _as_it_is(text: str) -> Any:
    from markupsafe import Markup

    return Markup(text)


def _sha256(text: str) -> str:
    return base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()
