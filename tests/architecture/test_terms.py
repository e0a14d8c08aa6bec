"""Every meaning has one word: code, messages and docs do not use the words that ``docs/glossary.md`` gives up."""

import re
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]

OLD_TERMS = {
    r"hand-?overs?|handed over|hands? over|handing over|handovers?|Handover|overlap_handovers": "p2p send and recv",
    r"guests?|guest's|Guest": "helper stage",
    r"reorganis\w+": "allocation retries",
    r"heads' side|heads side": "head-sharded",
    r"weights? (?:gradients? )?apart|forwards ahead": "deferred weight gradients (W pass), warmup",
    r"carried (?:keys|values|gradients|KV|buffers?)|carried_\w+|CARRIED": "KV cache of the prefix",
    r"layers? visits?|visits? of a layer|Visit": "layer pass",
    r"rank roles?|role's|roles'|RoleLowering|play_roles|check_roles": "pipeline stage",
    r"Passing|passings": "subsequence templates",
    r"floors\.py|rough floors?|floors? of (?:time|memory|a candidate)|pipeline_floor": "lower bound",
    r"in a circle": "cycle",
}
"""Words that are no longer used (regular expressions for whole words), and what to write instead."""

EXEMPT = {
    "CHANGELOG.md": "says what was renamed",
    "docs/decisions.md": "says what was renamed",
    "docs/glossary.md": "lists the words that are given up",
    "memo_sim/contract/migration.py": "reads documents of earlier versions",
    "reports/memo_tables_a800_2026-11-22.md": "holds what an earlier version printed",
    "tests/architecture/test_terms.py": "this file",
    "tests/contract/golden_plan_1.json": "a document of an earlier version",
    "tests/contract/test_migration.py": "reads documents of earlier versions",
}
EXEMPT_FOLDERS = ("tests/replay/",)

QUOTATION = re.compile(r"MEMO|MEMO's")
"""Lines that quote MEMO, which calls allocation retries reorganisations, may say so."""


def own_lines() -> list[tuple[str, int, str]]:
    if not (ROOT / ".git").exists():
        pytest.skip("not a git checkout")
    listed = subprocess.run(
        ["git", "ls-files", "-z", "*.py", "*.md", "*.toml", "*.cpp"], cwd=ROOT, capture_output=True, check=True
    )
    names = [name for name in listed.stdout.decode().split("\0") if name]
    wanted = [n for n in names if n not in EXEMPT and not n.startswith(EXEMPT_FOLDERS) and (ROOT / n).is_file()]
    return [
        (name, number, line)
        for name in wanted
        for number, line in enumerate((ROOT / name).read_text().splitlines(), start=1)
    ]


def test_old_terms_are_gone() -> None:
    terms = {re.compile(rf"(?<![\w-])(?:{old})(?![\w-])"): new for old, new in OLD_TERMS.items()}
    found = [
        f"{name}:{number}: {match[0]!r}, write {new!r}"
        for name, number, line in own_lines()
        for term, new in terms.items()
        if (match := term.search(line)) and not QUOTATION.search(line)
    ]
    assert found == []


@pytest.mark.parametrize("name", EXEMPT)
def test_exempt_files_exist(name: str) -> None:
    assert (ROOT / name).is_file()
