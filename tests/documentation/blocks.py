"""The commands that the pages show, and what they show as printed.

A page has two kinds of blocks with commands (and ``python`` blocks, which run as one script each)::

    ```sh                                  ```console
    memo-sim what-if ... -o plan.json      $ memo-sim list models
    memo-exec run plan.json                gpt-tiny  ...
    ```                                    ...
                                           ```

``sh`` has commands alone; ``console`` has each command behind ``$`` and its standard output below. A line ``...`` in an
output stands for any number of lines. A comment on the line before a block says what is special about it:

- ``<!-- not run: REASON -->``: it needs what a test does not have, for example a GPU;
- ``<!-- measured: WHERE AND WHEN -->``: the commands run, but another machine prints other figures;
- ``<!-- times differ -->``: the output is compared without seconds, which say how long the command took.
"""

from __future__ import annotations

import re
import shlex
from dataclasses import dataclass
from difflib import SequenceMatcher
from itertools import pairwise
from pathlib import Path

ROOT = Path(__file__).parents[2]
PAGES = sorted(
    page for pattern in ("README.md", "llms.txt", "docs/**/*.md") for page in ROOT.glob(pattern) if page.is_file()
)
PROGRAMS = ("memo-sim", "memo-exec")
ANY_LINES = "..."
SECONDS = re.compile(r"\s+[\d.]+ (?:us|ms|s)\b")
BLOCK = re.compile(
    r"^(?:<!-- (?P<note>[^\n]+?) -->\n)?```(?P<language>sh|console|python)\n(?P<text>.*?)^```$",
    re.MULTILINE | re.DOTALL,
)


@dataclass(frozen=True)
class Command:
    """One command line, and the lines that its page shows as its output (None in an ``sh`` block)."""

    line: str
    output: list[str] | None = None

    @property
    def of_memo(self) -> list[list[str]]:
        """Return the words of each call of memo-sim or memo-exec in the line, the program first."""
        if self.line.startswith("python -c") or "\n" in self.line:
            return []
        calls = []
        for part in re.split(r"&&|\|\||[|;]", self.line):
            words = shlex.split(part, comments=True)
            if words and Path(words[0]).name in PROGRAMS:
                calls.append([Path(words[0]).name, *_without_redirections(words[1:])])
        return calls


@dataclass(frozen=True)
class Block:
    """One block of a page. ``start`` and ``end`` are where its text lies in the page."""

    page: Path
    line_number: int
    note: str
    commands: list[Command]
    start: int
    end: int

    @property
    def not_run(self) -> str:
        """Return why a test does not run it; an empty text when it does."""
        # README's two commands install memo first: .ci/run runs the second, and a try in a fresh clone the first.
        return self.note.removeprefix("not run: ") if self.note.startswith(("not run: ", "run", "test")) else ""

    @property
    def compared(self) -> bool:
        """Return whether today's output has to be the one that is shown."""
        return not self.not_run and not self.note.startswith("measured: ")

    @property
    def times_count(self) -> bool:
        """Return whether seconds of the output are compared."""
        return self.note != "times differ"

    @property
    def name(self) -> str:
        """Return where the block stands."""
        return f"{self.page.relative_to(ROOT)}:{self.line_number}"


def blocks_of(page: Path) -> list[Block]:
    """Return the blocks of ``page`` that have commands, in order."""
    text = page.read_text()
    return [
        Block(
            page=page,
            line_number=text.count("\n", 0, match.start("text")) + 1,
            note=match["note"] or "",
            commands=_commands(match["language"], match["text"]),
            start=match.start("text"),
            end=match.end("text"),
        )
        for match in BLOCK.finditer(text)
    ]


def matches(shown: list[str], printed: list[str], *, times: bool = True) -> bool:
    """Return whether ``printed`` is what a page shows, with any lines for ``...``.

    Spaces at line ends do not count; without ``times``, neither do seconds and the spaces before them.
    """
    if not times:
        shown, printed = ([SECONDS.sub("", line) for line in lines] for lines in (shown, printed))
    pattern = "".join(
        r"(?:.*\n)*?" if line.strip() == ANY_LINES else re.escape(line.rstrip()) + r"\n" for line in shown
    )
    return re.fullmatch(pattern, "".join(f"{line.rstrip()}\n" for line in printed)) is not None


def shortened(shown: list[str], printed: list[str]) -> list[str]:
    """Return today's lines with ``...`` where ``shown`` leaves lines out.

    As many lines stay before the first ``...`` and after the last as there; between two of them stay the lines that are
    most like those that are shown there.
    """
    if ANY_LINES not in map(str.strip, shown):
        return printed
    cut = [i for i, line in enumerate(shown) if line.strip() == ANY_LINES]
    head, tail = shown[: cut[0]], shown[cut[-1] + 1 :]
    found, begin = printed[: len(head)], len(head)
    for first, last in pairwise(cut):
        between = shown[first + 1 : last]
        starts = range(begin, max(begin, len(printed) - len(tail) - len(between)) + 1)
        start = max(starts, key=lambda at: _likeness(between, printed[at:]))
        found += [ANY_LINES, *printed[start : start + len(between)]]
        begin = start + len(between)
    return [*found, ANY_LINES, *(printed[-len(tail) :] if tail else [])]


def _likeness(shown: list[str], printed: list[str]) -> float:
    """Return how much two lists of lines are alike, line by line."""
    return sum(SequenceMatcher(None, a, b).ratio() for a, b in zip(shown, printed, strict=False))


def _commands(language: str, text: str) -> list[Command]:
    if language == "python":
        return [Command(f"python -c {shlex.quote(text)}")]
    if language == "sh" and "<<" in text:  # a here-document: one script
        return [Command(text)]
    lines = text.replace("\\\n", " ").splitlines()
    if language == "sh":
        return [Command(line) for line in lines if line.strip() and not line.lstrip().startswith("#")]
    found: list[Command] = []
    for line in lines:
        if line.startswith("$ "):
            found.append(Command(line[2:], []))
        elif found and found[-1].output is not None:
            found[-1].output.append(line)
    return found


def _without_redirections(words: list[str]) -> list[str]:
    kept, skip = [], False
    for word in words:
        if skip:
            skip = False
        elif re.fullmatch(r"\d?>>?|<|2>&1", word):
            skip = word != "2>&1"
        else:
            kept.append(word)
    return kept
