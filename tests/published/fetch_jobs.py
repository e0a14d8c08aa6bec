"""Fetches the published files that jobs.toml and traces.toml name, and checks their sha256.

    python tests/published/fetch_jobs.py DIR
    MEMO_PUBLISHED_JOBS=DIR pytest tests/published

A file lies in DIR under repository, commit and path. One that is there with the right sha256 is not fetched again.
"""

from __future__ import annotations

import hashlib
import sys
import tomllib
import urllib.request
from dataclasses import dataclass
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
SOURCE = "https://raw.githubusercontent.com"


@dataclass(frozen=True)
class Published:
    """One file of a repository at a commit."""

    repository: str
    commit: str
    path: str
    sha256: str

    @property
    def at(self) -> Path:
        """Where it lies in the folder of published files."""
        return Path(self.repository, self.commit, self.path)

    def is_in(self, folder: Path) -> bool:
        """Return whether the folder has the file unmodified."""
        path = folder / self.at
        return path.is_file() and hashlib.sha256(path.read_bytes()).hexdigest() == self.sha256


def read_manifest(name: str) -> dict[str, dict[str, Any]]:
    """Return the entries of a manifest of this folder."""
    return tomllib.loads((HERE / name).read_text())


def files_of(entry: dict[str, Any]) -> list[Published]:
    """Return the files of one entry: those under ``files``, or the one that it is."""
    return [
        Published(entry["repository"], entry["commit"], file["path"], file["sha256"])
        for file in entry.get("files", [entry])
    ]


def main(folder: Path) -> None:
    """Fetch what is missing; stop at a file that is not the one named."""
    entries = [*read_manifest("jobs.toml").values(), *read_manifest("traces.toml").values()]
    for published in (file for entry in entries for file in files_of(entry)):
        if published.is_in(folder):
            continue
        print(published.at)
        with urllib.request.urlopen(f"{SOURCE}/{published.at.as_posix()}", timeout=60) as answer:
            content = answer.read()
        if hashlib.sha256(content).hexdigest() != published.sha256:
            sys.exit(f"{published.at} is not the file that the manifest names")
        path = folder / published.at
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content)


if __name__ == "__main__":
    if len(sys.argv) != 2:
        sys.exit(__doc__)
    main(Path(sys.argv[1]))
