"""Why a decision becomes another one: every change that an exporter can make has a reason that fits it."""

from __future__ import annotations

import pytest

from memo_sim.contract.catalog import load_cluster, load_model
from memo_sim.contract.errors import Infeasible, UsageError
from memo_sim.contract.plan import Decisions, Kernels, Layout
from memo_sim.interchange.framework import Framework
from memo_sim.interchange.frameworks import FRAMEWORKS
from memo_sim.interchange.plan_paths import differences
from memo_sim.interchange.reasons import option_of, reason

CLUSTER, HARDWARE = load_cluster("h100-1x8")


def plan(layout: Layout, **changes: object) -> Decisions:
    """Return a plan of 64K tokens on eight devices."""
    fixed = {"model": load_model("llama3-8b"), "seq_tokens": 65536, "global_batch": 8}
    return Decisions(**{**fixed, "layout": layout, **changes})


PLANS = {
    "token-wise": plan(Layout(dp=8, zero=1), swapped_tokens=16384, recompute="tokenwise", loss_chunk_tokens=8192),
    "swapped": plan(Layout(dp=8, zero=1), swapped_tokens=65536),
    "subsequences": plan(Layout(tp=4, sequence_parallel=True, pp=2, subsequences=8), recompute="full"),
    "METP": plan(Layout(metp=8), recompute="full"),
    "Ulysses": plan(Layout(ulysses=8, zero=1), recompute="full", swapped_tokens=8192),
    "ring": plan(Layout(cp=4, dp=2, zero=1), recompute="selective"),
    "stages": plan(Layout(pp=4, dp=2, zero=1, schedule="zero-bubble"), recompute="norms"),
    "copied": plan(Layout(dp=8, zero=0), states="bf16", recompute="operators"),
    "host": plan(Layout(tp=8), states="host", recompute="full", recompute_layers="first-4"),
    "pure": plan(Layout(dp=8, zero=2), states="pure-bf16", recompute="full", recompute_layers="every-2"),
    "chunks": plan(Layout(dp=8, zero=3), recompute="full", mlp_chunk_tokens=4096, attention_chunk_tokens=8192),
    "flash3": plan(Layout(dp=8, zero=3), kernels=Kernels(attention="flash3")),
}


@pytest.mark.parametrize("framework", FRAMEWORKS.values(), ids=list(FRAMEWORKS))
@pytest.mark.parametrize("name", PLANS)
def test_every_change_has_a_reason(name: str, framework: Framework) -> None:
    wanted = PLANS[name]
    for job in framework.jobs(wanted):
        try:
            there = job.decisions(CLUSTER, HARDWARE, framework.system)
        except (Infeasible, UsageError):
            continue
        told = {path: reason(framework.sayings[path], path, wanted, there) for path in differences(wanted, there)}
        assert all(told.values()), [path for path, why in told.items() if not why]
        assert not [why for why in told.values() if why.endswith(".") or why[0].isspace()]


def test_ranks_go_to_another_degree() -> None:
    wanted, framework = PLANS["METP"], FRAMEWORKS["deepspeed"]
    there = framework.jobs(wanted)[0].decisions(CLUSTER, HARDWARE, framework.system)
    assert (
        reason(framework.sayings["layout.ulysses"], "layout.ulysses", wanted, there) == "it takes the ranks of --metp"
    )


@pytest.mark.parametrize(("level", "told"), [(1, "divides more"), (3, "divides less")])
def test_another_level_of_zero_divides_more_or_less(level: int, told: str) -> None:
    saying = FRAMEWORKS["deepspeed"].sayings["layout.zero"]
    assert told in reason(saying, "layout.zero", plan(Layout(dp=8, zero=level)), plan(Layout(dp=8, zero=2)))


def test_options_stand_for_paths() -> None:
    named = {"layout.tp": "--tp", "decisions.swapped_tokens": "--alpha", "decisions.loss_chunk_tokens": "--loss-chunk"}
    assert {path: option_of(path) for path in named} == named
    assert option_of("model.hidden") == ""
