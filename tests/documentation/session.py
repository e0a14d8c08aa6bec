"""Runs the commands of a page as a reader would: one after another, in one empty folder."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from tests.documentation.blocks import Block, Command

LIMIT_S = 600


class Session:
    """The folder in which a page's commands run; files that one writes are there for the next."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        programs = str(Path(sys.executable).parent)
        self._environment = {**os.environ, "PATH": f"{programs}{os.pathsep}{os.environ['PATH']}", "COLUMNS": "100"}

    def run(self, block: Block, command: Command) -> list[str]:
        """Run one command and return the lines of its standard output.

        Raises:
            AssertionError: when it does not end with exit code 0.
        """
        done = subprocess.run(
            ["bash", "-euo", "pipefail", "-c", command.line],
            cwd=self.folder,
            env=self._environment,
            capture_output=True,
            text=True,
            timeout=LIMIT_S,
            check=False,
        )
        if done.returncode != 0:
            raise AssertionError(f"{block.name}: `{command.line}` ended with {done.returncode}:\n{done.stderr[-2000:]}")
        return done.stdout.splitlines()
