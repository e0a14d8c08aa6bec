"""Write today's output into the pages: ``python -m tests.documentation [PAGE ...]``.

Every ``console`` block is run again, but those that are noted as measured or not run. See ``blocks.py``.
"""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path

from tests.documentation.blocks import PAGES, ROOT, Block, blocks_of, matches, shortened
from tests.documentation.session import Session


def main(names: list[str]) -> None:
    """Write the pages that are named, or all.

    Raises:
        SystemExit: with the usage, for --help or a page that does not exist.
    """
    if wrong := [name for name in names if not (ROOT / name).is_file()]:
        print("usage: python -m tests.documentation [PAGE ...]\nWrites today's output of the commands into the pages.")
        sys.exit(0 if wrong == ["--help"] else f"no such page: {', '.join(wrong)}")
    for page in [ROOT / name for name in names] or PAGES:
        with tempfile.TemporaryDirectory() as folder:
            if write(page, Session(Path(folder))):
                print(page.relative_to(ROOT))


def write(page: Path, session: Session) -> bool:
    """Run the page's commands and put what they print into it; return whether that changed the page."""
    text = page.read_text()
    written, at = "", 0
    blocks = blocks_of(page)
    last = max((i for i, block in enumerate(blocks) if _shown(block)), default=-1)
    for block in blocks[: last + 1]:
        if block.not_run:
            continue
        printed = [session.run(block, command) for command in block.commands]
        if not _shown(block):
            continue
        lines = []
        for command, output in zip(block.commands, printed, strict=True):
            shown = command.output or []
            kept = shown if matches(shown, output, times=block.times_count) else shortened(shown, output)
            lines += [f"$ {command.line}", *kept]
        written += text[at : block.start] + "".join(f"{line.rstrip()}\n" for line in lines)
        at = block.end
    written += text[at:]
    if written == text:
        return False
    page.write_text(written)
    return True


def _shown(block: Block) -> bool:
    return block.compared and any(command.output is not None for command in block.commands)


if __name__ == "__main__":
    main(sys.argv[1:])
