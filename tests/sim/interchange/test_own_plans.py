"""Plans that the search finds for a framework's own system are exported as they are, and come back with their hash."""

from __future__ import annotations

from dataclasses import replace
from functools import cache

import msgspec
import pytest

from memo_sim.answers.import_job import decisions_of
from memo_sim.contract.catalog import load_cluster, load_model
from memo_sim.contract.plan import Decisions
from memo_sim.interchange.framework import Framework, Source
from memo_sim.interchange.frameworks import FRAMEWORKS
from memo_sim.interchange.job import Job
from memo_sim.interchange.launch import launch_of
from memo_sim.interchange.plan_paths import differences
from memo_sim.planning.question import Question
from memo_sim.planning.space import candidates
from memo_sim.program.lower import lower, program_sha256

CLUSTER, HARDWARE = load_cluster("a800-1x8")
MODEL = msgspec.structs.replace(
    load_model("qwen3-8b"), layers=8, hidden=1024, heads=16, kv_heads=8, head_dim=128, ffn_hidden=3072
)
EACH = pytest.mark.parametrize("name", FRAMEWORKS)


@cache
def plans_of(system: str, seq_tokens: int = 16384) -> tuple[Decisions, ...]:
    """Return every plan that a search of the system starts from."""
    question = Question(model=MODEL, cluster=CLUSTER, hardware=HARDWARE, seq_tokens=seq_tokens, system=system)
    found, _ = candidates(replace(question, global_batch=8))
    return tuple(dict.fromkeys(one.base for one in found))


def exported(framework: Framework, plan: Decisions) -> Job:
    """Return the job that says the plan exactly."""
    for job in framework.jobs(plan):
        if not differences(job.decisions(CLUSTER, HARDWARE, framework.system), plan):
            return job
    near = framework.jobs(plan)[0].decisions(CLUSTER, HARDWARE, framework.system)
    pytest.fail(f"{framework.name} does not say {differences(near, plan)}")


def check_comes_back(framework: Framework, plan: Decisions) -> None:
    """Export a plan and import it again."""
    files = framework.files(exported(framework, plan), launch_of(plan.layout.devices, 8, "torchrun"), ())
    read = framework.read(tuple(Source(file, text) for file, text in files.items()), {})
    again, assumed = decisions_of(read.job, CLUSTER, HARDWARE, framework.system)
    assert not assumed
    assert not differences(again, msgspec.structs.replace(plan, model=again.model))
    assert program_sha256(lower(again)) == program_sha256(lower(plan))


@EACH
def test_a_plan_of_its_own_system_comes_back_with_its_hash(name: str) -> None:
    plans = plans_of(FRAMEWORKS[name].system)
    for plan in plans[:: max(len(plans) // 3, 1)]:
        check_comes_back(FRAMEWORKS[name], plan)


@pytest.mark.slow
@EACH
@pytest.mark.parametrize("seq_tokens", [4096, 16384, 131072])
def test_every_plan_of_its_own_system_comes_back_with_its_hash(name: str, seq_tokens: int) -> None:
    for plan in plans_of(FRAMEWORKS[name].system, seq_tokens):
        check_comes_back(FRAMEWORKS[name], plan)
