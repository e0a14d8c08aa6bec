"""The documentation names only files that exist, and the README stays one that people read to its end."""

import re
from pathlib import Path

ROOT = Path(__file__).parents[2]
PAGES = sorted([*ROOT.glob("*.md"), *ROOT.glob("docs/*.md"), *ROOT.glob("reports/*.md")])

LINK = re.compile(r"\]\((?!https?:)([^)#\s]+)")
CODE_PATH = re.compile(
    r"(?<![\w./-])((?:memo_sim|memo_exec|tests|benchmarks|hardware_profiles)/[\w./-]*\w\.(?:py|json|toml|csv))\b"
)
README_LINES = 150


def missing(pattern: re.Pattern[str], *, beside_the_page: bool) -> list[str]:
    return [
        f"{page.relative_to(ROOT)}: {target}"
        for page in PAGES
        for target in pattern.findall(page.read_text())
        if not ((page.parent if beside_the_page else ROOT) / target).exists()
    ]


def test_links_of_pages_lead_to_files() -> None:
    assert len(PAGES) > 10
    assert missing(LINK, beside_the_page=True) == []


def test_files_that_pages_name_exist() -> None:
    assert missing(CODE_PATH, beside_the_page=False) == []


def test_every_page_is_reached_from_the_index() -> None:
    index = (ROOT / "docs/index.md").read_text()
    assert [page.name for page in ROOT.glob("docs/*.md") if page.name != "index.md" and page.name not in index] == []


def test_readme_is_short() -> None:
    assert len((ROOT / "README.md").read_text().splitlines()) <= README_LINES
