"""A measured load becomes the text that plans have; files that contradict themselves are refused."""

from typing import Any

import msgspec
import pytest

from memo_sim.contract import codec
from memo_sim.contract.errors import BadInput
from memo_sim.contract.expert_load import LayerLoad, MeasuredLoad
from memo_sim.contract.plan import Decisions
from tests.contract.conftest import expert_load


def test_a_plan_gets_the_mean_of_layers_in_thousandths() -> None:
    """The fullest gets 44 and 36 of 100 rows, so 1.76 and 1.44 times the mean of 25."""
    load = expert_load().load
    assert load == "measured-1600-1200-840-360"
    (kind,) = [field.type for field in msgspec.structs.fields(Decisions) if field.name == "expert_load"]
    assert msgspec.convert(load, kind) == load


@pytest.mark.parametrize(
    ("change", "text"),
    [
        ({"experts": 3}, "does not have 3 experts"),
        ({"layers": []}, "length"),
        ({"layers": [*expert_load().layers, expert_load().layers[0]]}, "listed twice"),
    ],
)
def test_files_that_contradict_themselves_are_refused(change: dict[str, Any], text: str) -> None:
    fields = msgspec.to_builtins(expert_load()) | msgspec.to_builtins(change)
    with pytest.raises(BadInput) as error:
        codec.decode(msgspec.json.encode(fields), MeasuredLoad, where="load.json")
    assert text in str(error.value)


@pytest.mark.parametrize("rows", [[1, 2, 3], [1, 2, 3, 5], [0, 0, 0, 0]])
def test_columns_of_other_rows_are_refused(rows: list[int]) -> None:
    with pytest.raises(ValueError, match=r"same rows|no expert"):
        LayerLoad(layer=0, rows=rows, by_fullness=[0] * 4 if not sum(rows) else [4, 3, 2, 1])
