"""The output of ``memo-sim schema NAME`` describes what the codec reads and writes."""

import json
from pathlib import Path
from typing import Any

import jsonschema
import msgspec
import pytest

from memo_sim.contract import codec
from memo_sim.contract.catalog import DATA, list_models
from memo_sim.contract.errors import UsageError
from memo_sim.contract.schemas import DOCUMENTS, json_schema
from tests.refusals import refused

VERSIONS = {"longest": 2, "memory": 2, "plan": 3, "result": 2, "validation": 2}
"""Of the schemas that have changed; ``contract/migration.py`` reads the versions before."""


def validator(name: str) -> Any:
    schema = json_schema(name)
    jsonschema.Draft202012Validator.check_schema(schema)
    return jsonschema.Draft202012Validator(schema)


def test_every_document_has_a_sample_and_a_tag_of_its_name(samples: dict[str, msgspec.Struct]) -> None:
    assert set(samples) == set(DOCUMENTS)
    assert {name: kind.__struct_config__.tag for name, kind in DOCUMENTS.items()} == {
        name: f"memo.{name}/{VERSIONS.get(name, 1)}" for name in DOCUMENTS
    }


@pytest.mark.parametrize("name", sorted(DOCUMENTS))
def test_written_documents_satisfy_their_schema(samples: dict[str, msgspec.Struct], name: str) -> None:
    validator(name).validate(json.loads(codec.encode(samples[name])))


@pytest.mark.parametrize("name", sorted(DOCUMENTS))
def test_the_schema_refuses_other_documents_and_unknown_fields(samples: dict[str, msgspec.Struct], name: str) -> None:
    tree = json.loads(codec.encode(samples[name]))
    assert not validator(name).is_valid({**tree, "colour": 1})
    assert not validator(name).is_valid({**tree, "schema": "memo.other/1"})
    assert not validator(name).is_valid({key: value for key, value in tree.items() if key != "schema"})


@pytest.mark.parametrize("preset", list_models())
def test_shipped_models_satisfy_their_schema(preset: str) -> None:
    validator("model").validate(json.loads(Path(DATA, "models", f"{preset}.json").read_text()))


def test_unknown_names_are_refused() -> None:
    documents = ("model", "hardware", "cluster", "plan")
    with refused(UsageError, got="'hardwear'", wanted=documents, hint="'hardware'"):
        json_schema("hardwear")
