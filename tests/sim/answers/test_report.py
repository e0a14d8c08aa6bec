"""The page of an answer: buffers of eager frameworks, the largest tensors, the clusters that were compared."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import msgspec
import numpy as np
import pytest

from memo_sim.answers.report import steps_of
from memo_sim.answers.what_if import Answer, Outputs, what_if, write_files
from memo_sim.planning.question import Pins, Question
from memo_sim.reasons.peak import tensors_at
from tests.sim.planning.test_search import question


@pytest.fixture(scope="module")
def asked() -> Question:
    large = question(16 * 1024, system="megatron-lm", memory_policy="eager")
    model = msgspec.structs.replace(large.model, layers=2)
    return replace(large, model=model, pins=Pins(tp=8, cp=1, recompute="none"))


@pytest.fixture(scope="module")
def answer(asked: Question) -> Answer:
    return what_if(asked)


def test_buffers_of_an_eager_framework_add_up_to_its_memory(answer: Answer) -> None:
    (step,) = steps_of(answer.best_simulation, None)
    buffers, memory = step.buffers, answer.best_simulation.memory
    assert buffers is not None
    at = memory.device.instruction
    live = (np.array(buffers.lower) <= at) & (at < np.array(buffers.upper))
    assert np.array(buffers.size_bytes)[live].sum() == memory.device.bytes
    assert memory.buffer_names is not None
    tensors = tensors_at(memory.program, memory.device_lives, at, device=True, names=memory.buffer_names)
    assert sum(tensor.bytes for tensor in tensors) == memory.device.bytes
    assert any(tensor.name.startswith("softmax.fp32") for tensor in tensors)


def test_the_page_lists_the_largest_tensors(asked: Question, answer: Answer, tmp_path: Path) -> None:
    write_files(answer, asked, Outputs(report=tmp_path / "r.html"), created="", command="")
    page = (tmp_path / "r.html").read_text()
    assert "Largest tensors" in page
    assert "skeletal.up" in page
