"""Checks all files of the repository: no machine paths, no unfinished work, no module without a noun as its name."""

import re
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
NAMELESS = {"helpers.py", "util.py", "utils.py"}

# Written so that this file does not match itself.
MACHINE_PATH = re.compile(r"(?<![\w.<])/(?:hom[e]|roo[t]|User[s]|wor[k]|tm[p]|op[t])/\w")
UNFINISHED = re.compile(r"\b(?:TOD[O]|FIXM[E]|XX[X])\b")


def tracked_files() -> list[Path]:
    if not (ROOT / ".git").exists():
        pytest.skip("not a git checkout")
    listed = subprocess.run(
        ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"],
        cwd=ROOT,
        capture_output=True,
        check=True,
    )
    paths = (ROOT / name for name in listed.stdout.decode().split("\0") if name)
    return sorted(path for path in paths if path.is_file())


def own_text_files() -> list[tuple[Path, str]]:
    """Return every text file that the project wrote, so not the included training text and the licence."""
    found = []
    for path in tracked_files():
        if path.name == "LICENSE" or path.is_relative_to(ROOT / "memo_exec/data"):
            continue
        content = path.read_bytes()
        if b"\0" not in content:
            found.append((path, content.decode()))
    return found


def matches(pattern: re.Pattern[str]) -> list[str]:
    return [
        f"{path.relative_to(ROOT)}:{number}: {line.strip()}"
        for path, text in own_text_files()
        for number, line in enumerate(text.splitlines(), start=1)
        if pattern.search(line)
    ]


def test_every_module_is_named_for_a_noun() -> None:
    assert [str(path) for path in tracked_files() if path.name in NAMELESS] == []


def test_no_path_of_one_machine() -> None:
    assert matches(MACHINE_PATH) == []


def test_nothing_is_left_unfinished() -> None:
    assert matches(UNFINISHED) == []


def test_readme_commands_are_one_line_each() -> None:
    readme = (ROOT / "README.md").read_text()
    for marker in ("run", "test"):
        command = re.search(rf"^<!-- {marker} -->\n```sh\n(.+)\n```$", readme, re.MULTILINE)
        assert command is not None, marker
        assert "-c constraints.txt" in command[1]
