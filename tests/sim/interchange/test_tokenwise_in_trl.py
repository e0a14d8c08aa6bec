"""A plan that swaps tokens is exported to TRL with a program beside, in which memo swaps them."""

from __future__ import annotations

import ast

import msgspec
import pytest

from memo_sim.contract.catalog import load_model
from memo_sim.contract.plan import Decisions
from memo_sim.interchange.framework import Source
from memo_sim.interchange.frameworks import FRAMEWORKS
from memo_sim.interchange.launch import Launch
from memo_sim.interchange.shell_script import read_script
from memo_sim.interchange.trl import TOKENWISE, TOKENWISE_LAUNCH
from tests.sim.interchange.eager_jobs import JOBS

TRL = FRAMEWORKS["trl"]
JOB, LAUNCH, HEADER = JOBS["trl"]["context"], Launch(1, 8), ("Written by a test.",)
PLAN = Decisions(model=load_model("llama3-8b"), seq_tokens=1024, recompute="tokenwise", swapped_tokens=384)


def test_the_program_has_the_plans_alpha() -> None:
    files = TRL.beside(PLAN, JOB, LAUNCH, HEADER)
    assert list(files) == [TOKENWISE, TOKENWISE_LAUNCH]
    ast.parse(files[TOKENWISE])
    assert '"ALPHA", "0.375"' in files[TOKENWISE]
    assert "Written by a test." in files[TOKENWISE]
    words = next(words for words in read_script(files[TOKENWISE_LAUNCH], {}, where="").commands if TOKENWISE in words)
    assert words[0] == "accelerate"


def test_a_plan_that_swaps_all_tokens_has_alpha_1() -> None:
    plan = msgspec.structs.replace(PLAN, recompute="none", swapped_tokens=1024)
    assert '"ALPHA", "1"' in TRL.beside(plan, JOB, LAUNCH, HEADER)[TOKENWISE]


@pytest.mark.parametrize("recompute", ["full", "none"])
def test_other_plans_have_no_such_program(recompute: str) -> None:
    plan = msgspec.structs.replace(PLAN, recompute=recompute, swapped_tokens=0)
    assert TRL.beside(plan, JOB, LAUNCH, HEADER) == {}


@pytest.mark.parametrize("name", [name for name in FRAMEWORKS if name != "trl"])
def test_other_frameworks_have_no_such_program(name: str) -> None:
    job = JOB if name not in JOBS else next(iter(JOBS[name].values()))
    assert FRAMEWORKS[name].beside(PLAN, job, LAUNCH, HEADER) == {}


def test_the_job_read_again_is_that_of_the_files_without_it() -> None:
    files = TRL.files(JOB, LAUNCH, HEADER)
    alone = [Source(name, text) for name, text in files.items()]
    beside = [Source(name, text) for name, text in TRL.beside(PLAN, JOB, LAUNCH, HEADER).items()]
    assert TRL.read((*alone, *beside), {}).job == TRL.read(tuple(alone), {}).job
