"""Every program that the tests and ``validate --all`` lowered before names changed is lowered today, and is the same.

Recorded at commit 1890785: the decisions of 8,937 calls of ``lower`` and the hash of each result. The default run
lowers every fortieth of them, ``-m slow`` all.
"""

from __future__ import annotations

import json
import lzma
from pathlib import Path
from typing import Any

import msgspec
import pytest

from memo_sim.contract import codec
from memo_sim.contract.plan import Plan
from memo_sim.program.lower import lower
from tests.replay.first_format import sha256_of

RECORDED = Path(__file__).parent / "programs.jsonl.xz"


def recorded(every: int) -> list[dict[str, Any]]:
    lines = lzma.decompress(RECORDED.read_bytes()).decode().splitlines()
    return [json.loads(line) for line in lines[::every]]


@pytest.mark.parametrize("every", [40, pytest.param(1, marks=[pytest.mark.slow, pytest.mark.timeout(1200)])])
def test_programs_are_what_they_were(every: int) -> None:
    entries = recorded(every)
    changed = []
    for entry in entries:
        document = {"schema": "memo.plan/1", "decisions": entry["decisions"]}
        decisions = codec.decode(msgspec.json.encode(document), Plan, where="recorded").decisions
        programs = lower(decisions, micro_batches=entry.get("micro_batches"), cp_rank=entry.get("cp_rank"))
        if sha256_of(programs, decisions) != entry["sha256"]:
            changed.append(entry["decisions"])
    assert len(entries) > 200
    assert changed == []
