"""METP's MLP in row blocks: independent checkers, the same products and hops, buffers of one block."""

from __future__ import annotations

from collections import Counter
from typing import Any

import msgspec
import pytest

from memo_sim.contract.errors import Infeasible
from memo_sim.contract.model import Model
from memo_sim.contract.plan import Decisions, Layout
from memo_sim.program.analysis.columns import expand
from memo_sim.program.analysis.liveness import liveness, peak_of
from memo_sim.program.ir.work import Exchange, Gemm
from memo_sim.program.lower import lower
from tests.refusals import refused
from tests.sim.small_programs import GPT, LLAMA, decide, faults_of

CASES = pytest.mark.parametrize(("model", "ranks"), [(GPT, 2), (GPT, 4), (LLAMA, 4)])


def blocks(model: Model, ranks: int, rows: int, **more: Any) -> Decisions:
    layout = Layout(metp=ranks, **more.pop("layout", {}))
    return decide(model, layout, ("full", 0.0), mlp_chunk_tokens=rows, **more)


@CASES
@pytest.mark.parametrize("chunk", [0, 1024])
def test_the_checkers_find_nothing(model: Model, ranks: int, chunk: int) -> None:
    """The last block is shorter; ``chunk``: attention in chunks as well."""
    decisions = blocks(model, ranks, 384, attention_chunk_tokens=chunk)
    assert decisions.local_tokens % 384
    assert faults_of(decisions) == []


@pytest.mark.parametrize("layout", [{"overlap_exchanges": False}, {"dp": 2, "zero": 3}, {"pp": 2}], ids=str)
def test_the_checkers_find_nothing_beside_other_options(layout: dict[str, Any]) -> None:
    assert faults_of(blocks(LLAMA, 2, 256, layout=layout, micro_batch=2, global_batch=4)) == []


def work(decisions: Decisions) -> tuple[Counter[str], Counter[str]]:
    """Return FLOPs of products and bytes of hops, by name without block."""
    flops, sent = Counter[str](), Counter[str]()
    for name, i in lower(decisions)[0].walk():
        of = name.split(".b")[0] if name.split(".b")[-1].isdigit() else name
        if isinstance(i.work, Gemm):
            flops[of] += i.work.flops
        elif isinstance(i.work, Exchange):
            sent[of] += i.work.bytes
    return flops, sent


@CASES
def test_products_and_hops_are_those_of_the_whole_mlp(model: Model, ranks: int) -> None:
    (whole, sent), (cut, sent_in_blocks) = (work(blocks(model, ranks, rows)) for rows in (0, 256))
    assert cut == pytest.approx(whole)
    assert sent_in_blocks == sent


@CASES
def test_wide_tensors_have_the_rows_of_one_block(model: Model, ranks: int) -> None:
    program = lower(blocks(model, ranks, 256))[0]
    wide = [f for t in program.templates for f in t.own if f.name in ("up", "act", "d_up", "d_act")]
    assert len(wide) >= 6
    assert {f.tokens for f in wide} == {256}


def test_the_peak_falls() -> None:
    def peak_bytes(rows: int) -> int:
        program = lower(blocks(GPT, 2, rows, seq_tokens=8192, states="host"))[0]
        return peak_of(liveness(program, expand(program)), device=True).bytes

    wide = 4 * GPT.ffn_hidden // 2 * 2 * 4096  # up, act and their gradients of a rank's tokens
    assert peak_bytes(0) - peak_bytes(512) > wide // 2


def test_what_frameworks_rebuild_is_refused() -> None:
    decisions = msgspec.structs.replace(blocks(LLAMA, 2, 256), mlp_rebuild="layer")
    with refused(Infeasible, where="decisions.mlp_rebuild", got="layer", wanted="block"):
        lower(decisions)
