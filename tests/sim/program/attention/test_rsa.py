"""Ring self-attention: independent checkers, its products and buffers, refused options, and its memory."""

from __future__ import annotations

import msgspec
import pytest

from memo_sim.contract.catalog import load_cluster, load_model
from memo_sim.contract.errors import Infeasible
from memo_sim.contract.model import Model
from memo_sim.contract.plan import Decisions, Kernels, Layout
from memo_sim.planning.layouts import layouts
from memo_sim.planning.presets import FULL_RECOMPUTE, KEEP
from memo_sim.planning.question import Pins, Question
from memo_sim.planning.search import search
from memo_sim.planning.space import candidates
from memo_sim.program.ir.program import Program
from memo_sim.program.ir.work import Attention, BatchedGemm
from memo_sim.program.lower import lower
from memo_sim.views.plan_table import layout_label
from tests.sim.small_programs import GPT, LLAMA, decide, faults_of

BERT = msgspec.structs.replace(GPT, bidirectional=True)
SEQ = 512


def rsa(ranks: int, **more: object) -> Layout:
    return Layout(cp=ranks, cp_exchange="rsa", **more)  # type: ignore[arg-type]


def chosen(model: Model, layout: Layout, recompute: str = "none", **more: object) -> Decisions:
    return decide(model, layout, (recompute, 0.0), **{"seq_tokens": SEQ, "loss_chunk_tokens": 0, **more})


@pytest.mark.parametrize("recompute", ["none", "selective", "full"])
@pytest.mark.parametrize(
    ("model", "layout"),
    [
        (GPT, rsa(1)),
        (BERT, rsa(4)),
        (LLAMA, rsa(2, zero=3)),
        (LLAMA, rsa(2, tp=2, sequence_parallel=True)),
        (LLAMA, rsa(2, pp=2, dp=2, zero=1)),
    ],
    ids=["alone", "bert", "zero3", "tp", "pp"],
)
def test_the_checkers_find_nothing(model: Model, layout: Layout, recompute: str) -> None:
    assert faults_of(chosen(model, layout, recompute, micro_batch=2, global_batch=4 * layout.dp)) == []


@pytest.mark.parametrize("ranks", [1, 2, 4])
@pytest.mark.parametrize("model", [BERT, LLAMA], ids=["bert", "llama"])
def test_every_pair_of_query_and_key_is_multiplied_six_times(model: Model, ranks: int) -> None:
    """Forward has two products over all pairs and backward four, with or without a mask; no attention kernel runs."""
    decisions = chosen(model, rsa(ranks))
    programs = [lower(decisions, cp_rank=rank)[0] for rank in range(ranks)]
    works = [i.work for program in programs for _, i in program.walk()]
    flops = sum(work.flops for work in works if isinstance(work, BatchedGemm))
    assert flops == 6 * 2.0 * SEQ**2 * model.q_width * model.layers * decisions.micro_batches
    assert not any(isinstance(work, Attention) for work in works)


def written_blocks(program: Program, template: str, op: str) -> list[int]:
    found = next(t for t in program.templates if t.name == template)
    return [o.first for i in found.instructions if i.op == op for o in i.operands if o.role == "out"]


def test_a_rank_writes_its_own_block_first_and_then_those_of_the_ranks_before() -> None:
    decisions = chosen(BERT, rsa(4))
    for rank in range(4):
        (program,) = lower(decisions, cp_rank=rank)
        blocks = [(rank - step) % 4 * (SEQ // 4) for step in range(4)]
        assert written_blocks(program, "layer.fwd", "rsa.scores") == blocks
        assert written_blocks(program, "layer.bwd", "rsa.dprobs") == blocks


def test_plans_of_other_exchanges_keep_their_programs() -> None:
    """On one rank ring and all-gather have the same program; only RSA still writes scores."""
    plain, gathered, written = (
        lower(chosen(GPT, Layout(cp_exchange=exchange)))[0].sha256 for exchange in ("ring", "all_gather", "rsa")
    )
    assert plain == gathered != written


@pytest.mark.parametrize(
    ("layout", "changes", "where"),
    [
        (rsa(1, metp=2), {}, "layout.metp"),
        (rsa(2, ulysses=2), {}, "layout.ulysses"),
        (rsa(1, subsequences=2), {}, "layout.subsequences"),
        (rsa(2), {"recompute": "tokenwise"}, "decisions.recompute"),
        (rsa(2), {"swapped_tokens": 128}, "decisions.swapped_tokens"),
        (rsa(2), {"kernels": Kernels(attention="plain")}, "decisions.kernels.attention"),
    ],
)
def test_incompatible_options_are_refused(layout: Layout, changes: dict, where: str) -> None:
    with pytest.raises(Infeasible) as refused:
        lower(msgspec.structs.replace(chosen(GPT, layout), **changes))
    assert (refused.value.where, refused.value.exit_code) == (where, 4)


def ask(seq_tokens: int, system: str = "rsa", **pins: object) -> Question:
    cluster, hardware = load_cluster("a100-1x8")
    return Question(load_model("bert-large"), cluster, hardware, seq_tokens, system=system, pins=Pins(**pins))  # type: ignore[arg-type]


def test_the_system_has_whole_parameters_and_written_scores() -> None:
    question = ask(8192)
    assert {(found.cp_exchange, found.zero, found.tp) for found in layouts(question)} == {("rsa", 0, 1)}
    assert {c.policy for c in candidates(question)[0]} == {KEEP, FULL_RECOMPUTE}
    assert {layout_label(found) for found in layouts(question)} == {
        f"tp1 cp{cp}+rsa dp{8 // cp}" for cp in (1, 2, 4, 8)
    }
    # A question that pins the exchange keeps all compatible policies.
    pinned, reasons = candidates(ask(8192, "any", cp_exchange="rsa", cp=8))
    assert {c.policy for c in pinned} >= {KEEP, FULL_RECOMPUTE}
    assert any("ring self-attention" in reason for reason in reasons)


def test_scores_exceed_device_memory_at_a_length_that_fits_with_ring_attention() -> None:
    """METP 5.1: RSA "quickly exceeded the memory limit as the sequence length grew"."""

    def fits(system: str, seq_tokens: int) -> bool:
        return search(ask(seq_tokens, system, recompute="none")).ranked[0].prediction.status == "ok"

    assert [fits("rsa", tokens) for tokens in (16384, 65536)] == [True, False]
    assert fits("ring-attention", 65536)
