"""Reads documents of earlier schema versions: each one becomes the version that is written today.

A new major version of a schema adds a function here and a golden file of the version before it in ``tests/contract``.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

JsonObject = dict[str, Any]

_RENAMED = {"overlap_handovers": "overlap_p2p", "reorganisations": "allocation_retries"}
"""Keys of version 1 documents, and what they are called since."""


def upgraded(schema: str, document: JsonObject) -> JsonObject | None:
    """Return a document as its schema's present version has it; None when ``schema`` is no earlier version of one."""
    upgrade = _UPGRADES.get(schema)
    return None if upgrade is None else upgrade(document)


def _plan_3(document: JsonObject) -> JsonObject:
    """Keep a plan's decisions and provenance.

    Programs changed with each version: names inside them since version 1, lanes since version 2. So the hashes of
    program and placement that the file pins, and the prediction by those names, are left out: pricing the plan again
    makes them anew.
    """
    kept = {key: value for key, value in document.items() if key not in ("placement_sha256", "prediction")}
    return {**_with_new_keys(kept), "schema": "memo.plan/3", "program_sha256": ""}


def _with_new_keys(value: Any) -> Any:
    """Return a JSON value with every renamed key under its new name."""
    if isinstance(value, dict):
        return {_RENAMED.get(key, key): _with_new_keys(item) for key, item in value.items()}
    return [_with_new_keys(item) for item in value] if isinstance(value, list) else value


def _renamed_to(schema: str) -> Callable[[JsonObject], JsonObject]:
    return lambda document: {**_with_new_keys(document), "schema": schema}


_UPGRADES: dict[str, Callable[[JsonObject], JsonObject]] = {
    "memo.plan/1": _plan_3,
    "memo.plan/2": _plan_3,
    "memo.result/1": _renamed_to("memo.result/2"),
    "memo.longest/1": _renamed_to("memo.longest/2"),
    "memo.memory/1": _renamed_to("memo.memory/2"),
    "memo.checkpoint/1": _renamed_to("memo.checkpoint/2"),
    "memo.validation/1": _renamed_to("memo.validation/2"),
}
