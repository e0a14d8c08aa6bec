"""The documentation names only files that exist, and the README stays one that people read to its end."""

import re
from pathlib import Path

from memo_sim.contract.schemas import DOCUMENTS

ROOT = Path(__file__).parents[2]
PAGES = sorted([*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md"), *ROOT.glob("reports/*.md")])

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
    docs = ROOT / "docs"
    index = (docs / "index.md").read_text()
    pages = [page.relative_to(docs).with_suffix("") for page in docs.glob("**/*.md")]
    assert [page for page in pages if page.name != "index" and f"\n{page}\n" not in index] == []


def test_every_document_has_its_fields_explained() -> None:
    page = (ROOT / "docs/reference/documents.md").read_text()
    assert [name for name, kind in DOCUMENTS.items() if f"automodule:: {kind.__module__}\n" not in page] == []


def test_readme_is_short() -> None:
    assert len((ROOT / "README.md").read_text().splitlines()) <= README_LINES
