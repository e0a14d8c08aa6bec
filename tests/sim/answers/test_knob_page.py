"""``docs/knobs.md`` is what the declarations say."""

from __future__ import annotations

from pathlib import Path

from memo_sim.answers.knob_page import knob_page
from memo_sim.contract.knobs import KNOBS
from memo_sim.program.layout.compatibility import RULES

PAGE = Path(__file__).parents[3] / "docs" / "knobs.md"
WRITE = """python -c "from memo_sim.answers.knob_page import knob_page; print(knob_page(), end='')" > docs/knobs.md"""


def test_the_page_is_up_to_date() -> None:
    assert PAGE.read_text() == knob_page(), f"write the page again: {WRITE}"


def test_the_page_has_every_knob_and_every_rule() -> None:
    page = knob_page()
    assert [knob.name for knob in KNOBS.values() if f"| `{knob.path}` |" not in page] == []
    assert [rule.name for rule in RULES if f"| {rule.name} |" not in page] == []
    assert "`--metp` | `layout.metp` | ranks, from 1 |" in page
