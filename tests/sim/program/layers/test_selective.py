"""Selective recompute: memory saved, work repeated, and refused options (tests/exec_cpu checks the gradients)."""

from __future__ import annotations

from collections import Counter

import pytest

from memo_sim.answers.what_if import what_if
from memo_sim.contract.catalog import load_cluster, load_model
from memo_sim.contract.errors import Infeasible, UsageError
from memo_sim.contract.knobs import CpExchange
from memo_sim.contract.model import Model
from memo_sim.contract.plan import Decisions, Layout
from memo_sim.planning.presets import FULL_RECOMPUTE, KEEP, SELECTIVE_RECOMPUTE
from memo_sim.planning.question import Pins, Question
from memo_sim.planning.search import search
from memo_sim.planning.space import policies
from memo_sim.program.analysis.columns import expand
from memo_sim.program.analysis.edges import derive_edges
from memo_sim.program.ir.instruction import BufferClass
from memo_sim.program.ir.work import Attention, Collective, Gemm
from memo_sim.program.lower import lower
from memo_sim.program.verify.program import check_edges, check_program
from tests.refusals import refused
from tests.sim.small_programs import GPT, LLAMA, decide

LAYOUTS = [
    Layout(),
    Layout(tp=2, sequence_parallel=True),
    Layout(cp=4, zero=1),
    Layout(cp=4, zero=3, cp_exchange="all_gather"),
    Layout(ulysses=2, dp=2, zero=3),
]


@pytest.mark.parametrize("model", [GPT, LLAMA], ids=["gpt", "llama"])
@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_every_program_passes_the_independent_checkers(model: Model, layout: Layout) -> None:
    (program,) = lower(decide(model, layout, ("selective", 0.0)))
    columns = expand(program)
    assert check_program(program, columns) == []
    assert check_edges(columns, derive_edges(columns)) == []


def flops(decisions: Decisions, phase: str) -> Counter[str]:
    total: Counter[str] = Counter()
    for name, instruction in lower(decisions)[0].walk():
        if name.split("/")[-2] == phase and isinstance(instruction.work, Attention | Gemm):
            total[type(instruction.work).__name__] += instruction.work.flops
    return total


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_only_attention_runs_forward_once_more(layout: Layout) -> None:
    decisions = decide(GPT, layout, ("selective", 0.0))
    assert flops(decisions, "rec") == {"Attention": flops(decisions, "fwd")["Attention"]}
    for phase in ("fwd", "bwd"):
        assert flops(decisions, phase) == flops(decide(GPT, layout), phase)


@pytest.mark.parametrize("exchange", ["ring", "all_gather"])
def test_keys_and_values_are_communicated_once_more(exchange: CpExchange) -> None:
    def calls(policy: tuple[str, float]) -> Counter[str]:
        decisions = decide(GPT, Layout(cp=4, cp_exchange=exchange), policy, global_batch=1)
        ids = [name.split("/")[-1] for name, i in lower(decisions)[0].walk() if i.lane.label in ("p2p", "cp")]
        return Counter(name for name in ids if name.startswith("kv."))

    again, once = calls(("selective", 0.0)), calls(("none", 0.0))
    forward = {name for name in once if not name.endswith(".bwd")}
    assert forward
    assert all(again[name] == (2 if name in forward else 1) * once[name] for name in once)


def kept(decisions: Decisions) -> int:
    """Return the bytes of the skeletal tensors that live from forward to backward."""
    families = lower(decisions)[0].families
    return sum(f.bytes * f.count for f in families if f.buffer_class is BufferClass.SKELETAL)


def test_with_a_flash_kernel_it_saves_the_log_sum_exp() -> None:
    for layout in LAYOUTS[:4]:
        keep, selective = (decide(LLAMA, layout, (r, 0.0), global_batch=1) for r in ("none", "selective"))
        tokens, heads = keep.local_tokens, LLAMA.heads // layout.tp
        assert kept(keep) - kept(selective) == LLAMA.layers * 4 * tokens * heads


def test_under_ulysses_it_saves_the_head_sharded_output_too() -> None:
    keep, selective = (decide(GPT, Layout(ulysses=4), (r, 0.0), global_batch=1) for r in ("none", "selective"))
    tokens = keep.local_tokens
    assert kept(keep) - kept(selective) == GPT.layers * tokens * (4 * GPT.heads + 2 * GPT.hidden)
    # Attention's head-sharded input is kept, so no all-to-all is repeated.
    exchanges = [
        sum(isinstance(i.work, Collective) and i.work.kind == "all_to_all" for _, i in lower(d)[0].walk())
        for d in (keep, selective)
    ]
    assert exchanges[0] == exchanges[1]


def test_it_swaps_nothing() -> None:
    with refused(Infeasible, what="selective", where="decisions.swapped_tokens", got="128", wanted="0"):
        lower(Decisions(model=GPT, seq_tokens=2048, recompute="selective", swapped_tokens=128))
    with refused(UsageError, what="selective", got="alpha 0.5"):
        policies(ask(recompute="selective", alpha=0.5))


def ask(*, system: str = "any", seq_tokens: int = 16384, **pins) -> Question:
    cluster, hardware = load_cluster("a800-1x8")
    pinned = Pins(tp=4, cp=2, **pins)
    return Question(load_model("gpt-7b"), cluster, hardware, seq_tokens, system=system, pins=pinned, global_batch=2)


def test_it_can_be_pinned_and_megatron_searches_it() -> None:
    assert policies(ask(recompute="selective")) == (SELECTIVE_RECOMPUTE,)
    assert SELECTIVE_RECOMPUTE not in policies(ask())
    found = {e.policy: e.prediction for e in search(ask(system="megatron-lm"), prune=False).ranked}
    assert set(found) == {KEEP, SELECTIVE_RECOMPUTE, FULL_RECOMPUTE}
    times = [found[p].step_s for p in (KEEP, SELECTIVE_RECOMPUTE, FULL_RECOMPUTE)]
    assert times == sorted(times)


def test_the_answer_says_how_much_it_saves() -> None:
    why = what_if(ask(recompute="selective")).result.why
    assert any("Recompute is" in line and "log-sum-exp" in line for line in why)
