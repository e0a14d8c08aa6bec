"""Documents of earlier schema versions are read as today's; each version before has a golden file."""

from pathlib import Path

import msgspec
import pytest

from memo_sim.contract import codec
from memo_sim.contract.errors import BadInput
from memo_sim.contract.longest import Longest
from memo_sim.contract.memory_report import MemoryReport
from memo_sim.contract.plan import Plan
from memo_sim.contract.result import Result
from memo_sim.contract.validation import Validation

GOLDEN_PLAN_1 = Path(__file__).parent / "golden_plan_1.json"
EARLIER_PLANS = [GOLDEN_PLAN_1, GOLDEN_PLAN_1.with_name("golden_plan_2.json")]
NAMES_OF_1 = {"overlap_p2p": "overlap_handovers", "allocation_retries": "reorganisations"}


@pytest.mark.parametrize("golden", EARLIER_PLANS, ids=lambda path: path.stem)
def test_an_earlier_plan_keeps_its_decisions(samples: dict[str, msgspec.Struct], golden: Path) -> None:
    today, read = samples["plan"], codec.read(golden, Plan)
    assert isinstance(today, Plan)
    assert read.decisions == today.decisions
    assert read.provenance == today.provenance


@pytest.mark.parametrize("golden", EARLIER_PLANS, ids=lambda path: path.stem)
def test_an_earlier_plan_pins_no_program_and_predicts_nothing(golden: Path) -> None:
    """Names or lanes in its program, and so its hash and its prediction, are not today's."""
    read = codec.read(golden, Plan)
    assert (read.program_sha256, read.placement_sha256, read.prediction) == ("", "", None)


@pytest.mark.parametrize(
    ("name", "kind"), [("result", Result), ("longest", Longest), ("memory", MemoryReport), ("validation", Validation)]
)
def test_other_documents_of_version_1_only_have_other_keys(
    samples: dict[str, msgspec.Struct], name: str, kind: type[msgspec.Struct]
) -> None:
    text = codec.encode(samples[name]).decode().replace(f"memo.{name}/2", f"memo.{name}/1")
    for today, before in NAMES_OF_1.items():
        text = text.replace(f'"{today}"', f'"{before}"')
    assert codec.decode(text.encode(), kind, where="here") == samples[name]


def test_an_earlier_version_of_another_document_is_refused() -> None:
    with pytest.raises(BadInput) as refused:
        codec.read(GOLDEN_PLAN_1, Result)
    assert (refused.value.got, refused.value.wanted) == ('"memo.plan/1"', "memo.result/2")
