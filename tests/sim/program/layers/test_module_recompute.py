"""Recompute of norms or of the MLP: what is kept, what runs again (gradients: tests/exec_cpu)."""

from __future__ import annotations

import pytest

from memo_sim.contract.catalog import load_cluster, load_model
from memo_sim.contract.model import Model
from memo_sim.contract.plan import Layout
from memo_sim.planning.presets import MODULES_RECOMPUTE, Policy
from memo_sim.planning.question import Pins, Question
from memo_sim.planning.search import search
from memo_sim.planning.space import policies
from memo_sim.program.analysis.columns import expand
from memo_sim.program.analysis.liveness import live_bytes, liveness
from memo_sim.program.ir.instruction import BufferClass, Lane
from memo_sim.program.layers.kinds import skeletal_of
from memo_sim.program.layers.module_recompute import REBUILT
from memo_sim.program.layout.shape import shape_of
from memo_sim.program.lower import lower
from tests.sim.small_programs import GPT, LLAMA, decide, faults_of

LAYOUTS = [
    Layout(),
    Layout(tp=2),
    Layout(tp=2, sequence_parallel=True),
    Layout(cp=4, zero=3, cp_exchange="all_gather"),
    Layout(ulysses=2, dp=2, zero=3),
    Layout(pp=2),
    Layout(pp=2, schedule="zero-bubble"),
    Layout(pp=2, schedule="zero-bubble", tp=2, sequence_parallel=True),
]


@pytest.mark.parametrize("mode", REBUILT)
@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_every_program_passes_the_independent_checkers(layout: Layout, mode: str) -> None:
    for model in (GPT, LLAMA):
        assert faults_of(decide(model, layout, (mode, 0.0))) == []


@pytest.mark.parametrize(
    ("mode", "wanted"),
    [
        ("norms", ["norm2", "norm1"]),  # each where backward reaches its module
        ("mlp", ["ffn_up", "act", "ffn_down"]),
    ],
)
def test_the_module_runs_again_in_backward(mode: str, wanted: list[str]) -> None:
    (program,) = lower(decide(LLAMA, Layout(), (mode, 0.0)))
    layer = [(name.split("/", 3)[3], i.lane) for name, i in program.walk() if name.startswith("m0/s0/l1/")]
    assert [n.removeprefix("rec/") for n, lane in layer if n.startswith("rec/") and lane is Lane.COMPUTE] == wanted
    names = [name for name, _ in layer]
    if mode == "norms":
        assert names.index("rec/norm1") > names.index("bwd/ffn_up.dgrad") > names.index("rec/norm2")


@pytest.mark.parametrize("model", [GPT, LLAMA], ids=["gpt", "llama"])
@pytest.mark.parametrize("layout", [Layout(), Layout(tp=2, sequence_parallel=True)], ids=str)
@pytest.mark.parametrize("mode", REBUILT)
def test_all_but_what_the_module_makes_is_kept(mode: str, layout: Layout, model: Model) -> None:
    decisions = decide(model, layout, (mode, 0.0), global_batch=1)
    (program,) = lower(decisions)
    tensors = skeletal_of(decisions, shape_of(decisions), decisions.model.layer(0))
    wanted = model.layers * sum(t.bytes for t in tensors if t.name not in REBUILT[mode])
    before_backward = next(n for n, name in enumerate(program.ids()) if "/head/fwd" in name)
    live = live_bytes(liveness(program, expand(program)), device=True)[BufferClass.SKELETAL.value]
    assert live[before_backward] == wanted + tensors[0].bytes  # and the head's input


def test_time_and_memory_lie_between_keep_and_full_recompute() -> None:
    cluster, hardware = load_cluster("h100-1x8")
    found = {}
    for policy in (Policy("none", 0.0), *MODULES_RECOMPUTE, Policy("full", 0.0)):
        asked = Question(
            model=load_model("llama-7b"),
            cluster=cluster,
            hardware=hardware,
            seq_tokens=4096,
            system="megatron-core",
            pins=Pins(recompute=policy.recompute, tp=1, cp=1, pp=1, dp=8),
            global_batch=8,
        )
        assert policies(asked) == (policy,)
        best = search(asked).best
        assert best is not None
        found[policy.recompute] = (best.prediction.step_s or 0.0, best.prediction.peak_device_bytes)
    (keep_s, keep_bytes), (norms_s, norms_bytes), (mlp_s, mlp_bytes), (full_s, full_bytes) = found.values()
    assert keep_s < norms_s < mlp_s < full_s
    assert full_bytes < mlp_bytes < norms_bytes < keep_bytes
