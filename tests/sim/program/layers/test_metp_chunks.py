"""METP's attention in chunks: independent checkers, products, copies, hops, buffers of a chunk, refused options."""

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
from memo_sim.program.ir.work import Attention, Collective, Copy, Exchange, Gemm
from memo_sim.program.layout.attention_chunks import attention_chunks
from memo_sim.program.lower import lower
from tests.refusals import refused
from tests.sim.small_programs import GPT, LLAMA, decide, faults_of

CASES = pytest.mark.parametrize(("model", "ranks"), [(GPT, 2), (GPT, 4), (LLAMA, 4)])


def chunks(model: Model = GPT, ranks: int = 2, chunk: int = 512, *, alpha: float = 0.0, **more: Any) -> Decisions:
    """Return a plan in chunks of ``chunk`` tokens; those that hold all tokens are whole attention."""
    layout = Layout(**{"metp": ranks, **more.pop("layout", {})})
    found = decide(model, layout, ("full", 0.0), attention_chunk_tokens=chunk, **more)
    return msgspec.structs.replace(found, swapped_tokens=int(alpha) * found.local_tokens)


@CASES
@pytest.mark.parametrize(("alpha", "overlap"), [(0.0, False), (1.0, True)])
def test_the_checkers_find_nothing(model: Model, ranks: int, alpha: float, overlap: bool) -> None:
    """The last of three chunks is shorter."""
    layout = {"overlap_exchanges": overlap}
    decisions = chunks(model, ranks, 1024, alpha=alpha, layout=layout, seq_tokens=2560)
    assert attention_chunks(decisions)[-1][1] == 512 // ranks
    assert faults_of(decisions) == []


@pytest.mark.parametrize(
    ("model", "more"),
    [
        (LLAMA, {"micro_batch": 2, "global_batch": 4}),
        (GPT, {"layout": {"dp": 2, "zero": 3}}),
        (LLAMA, {"layout": {"pp": 2, "zero": 1}}),
    ],
    ids=["sequences", "zero3", "pp"],
)
def test_the_checkers_find_nothing_beside_other_options(model: Model, more: dict[str, Any]) -> None:
    assert faults_of(chunks(model, **more)) == []


def products(decisions: Decisions) -> dict[str, float]:
    """Return FLOPs by phase and product; of attention, over pairs that are not masked."""
    total: Counter[str] = Counter()
    for name, i in lower(decisions)[0].walk():
        phase, last = name.split("/")[-2:]
        if isinstance(i.work, Gemm):
            total[f"{phase}/{last.split('.')[0]}/{i.work.gemm_pass}"] += i.work.flops
        elif isinstance(i.work, Attention):
            total[f"{phase}/attention"] += i.work.flops
    return dict(total)


@CASES
def test_the_work_is_that_of_whole_attention_without_one_product(model: Model, ranks: int) -> None:
    """Backward fetches Q, K and V from the host, so it does not multiply the norm's output by their weights again."""
    whole, cut = (products(chunks(model, ranks, chunk)) for chunk in (2048, 1024))
    assert "bwd/qkv/fprop" in whole
    del whole["bwd/qkv/fprop"]
    assert cut == pytest.approx(whole)


def moved(decisions: Decisions, kind: type) -> Counter[tuple[str, str]]:
    """Return the bytes of copies, hops or collectives of the layers, by phase and name without chunk and part."""
    found: Counter[tuple[str, str]] = Counter()
    for name, i in lower(decisions)[0].walk():
        phase, last = name.split("/")[-2:]
        if isinstance(i.work, kind) and phase in ("fwd", "rec", "bwd") and "/l" in name:
            found[phase, last.split(".c")[0].split(".hop")[0].split(".g")[0]] += i.work.bytes
    return found


@CASES
def test_weights_travel_as_often_as_without_chunks(model: Model, ranks: int) -> None:
    assert moved(chunks(model, ranks, 1024), Collective) == moved(chunks(model, ranks, 2048), Collective)


@CASES
def test_keys_of_each_pair_of_chunks_go_round_the_ring(model: Model, ranks: int) -> None:
    """Two chunks have three pairs, whose keys are half as long: 1.5 times the bytes."""
    whole, cut = (moved(chunks(model, ranks, chunk), Exchange) for chunk in (2048, 1024))
    keys = {key for key in whole if key[1] in ("kv", "d_kv")}
    assert keys == {("fwd", "kv"), ("rec", "kv"), ("bwd", "kv"), ("bwd", "d_kv")}
    assert {key: size * (1.5 if key in keys else 1) for key, size in whole.items()} == cut


@pytest.mark.parametrize("ranks", [2, 4])
def test_bytes_that_are_copied_to_the_host_and_back(ranks: int) -> None:
    """Two chunks. All parts together copy what one rank without METP copies of its tokens, and the outputs as well.

    The output's gradient of the first pair's queries is not fetched: it is written where the pair reads it.
    """
    found = moved(chunks(GPT, ranks, 1024), Copy)
    batches, pairs = 2, 3
    rows = 1024 // ranks * batches * GPT.layers
    unit, lse = 2 * GPT.q_width * rows, 4 * GPT.heads * rows
    assert found == {
        ("fwd", "kv.store"): 2 * unit,
        ("fwd", "kv.fetch"): 2 * unit,
        ("rec", "kv.store"): 2 * 2 * unit,
        ("rec", "kv.fetch"): 2 * unit,
        ("rec", "q.store"): 2 * unit,
        ("rec", "attn.store"): 2 * unit,
        ("rec", "lse.store"): 2 * lse,
        ("bwd", "kv.fetch"): 2 * 2 * unit,
        ("bwd", "q.fetch"): pairs * unit,
        ("bwd", "attn.fetch"): pairs * unit,
        ("bwd", "lse.fetch"): pairs * lse,
        ("bwd", "d_attn.store"): 2 * unit,
        ("bwd", "d_attn.fetch"): (pairs - 1) * unit,
        ("bwd", "d_q.store"): 2 * unit,  # in fp32
        ("bwd", "d_q.fetch"): 2 * unit,
    }


@CASES
def test_on_the_device_queries_keys_and_values_are_those_of_one_chunk(model: Model, ranks: int) -> None:
    decisions = chunks(model, ranks, 1024)
    (backward,) = (t for t in lower(decisions)[0].templates if t.name == "layer.bwd")
    whole = {f.name for f in backward.own if f.tokens == decisions.local_tokens and f.space == "device"}
    of_the_mlp = {"up", "act", "d_up", "d_act", "norm2", "norm2_stats", "d_norm2"}
    assert whole - of_the_mlp == {"resid", "proj_out", "d_resid", "d_norm1"}


def peak_bytes(decisions: Decisions) -> int:
    program = lower(decisions)[0]
    return peak_of(liveness(program, expand(program)), device=True).bytes


@CASES
def test_the_peak_falls_with_the_chunk(model: Model, ranks: int) -> None:
    more: dict[str, Any] = {"seq_tokens": 16384, "global_batch": 1, "states": "host", "alpha": 1.0}
    whole, half, quarter = (peak_bytes(chunks(model, ranks, chunk, **more)) for chunk in (16384, 8192, 4096))
    row = 2 * (model.hidden + model.q_width)  # the output of the norm, and that of attention
    assert whole - half > 16384 // ranks * row / 2
    assert half > quarter


def test_a_chunk_that_holds_all_is_whole_attention() -> None:
    whole = decide(GPT, Layout(metp=2), ("full", 0.0))
    assert lower(chunks(chunk=2048))[0].sha256 == lower(whole)[0].sha256
    assert lower(chunks(chunk=1024))[0].sha256 != lower(whole)[0].sha256


CHUNK = "decisions.attention_chunk_tokens"


@pytest.mark.parametrize(
    ("change", "where", "got", "wanted"),
    [
        ({"recompute": "none"}, "decisions.recompute", "none", "full"),
        ({"recompute": "tokenwise"}, "decisions.recompute", "tokenwise", "full"),
        (
            {"layout": Layout(metp=4), "seq_tokens": 16384},
            *(CHUNK, "512 of 16384 tokens", ("a multiple of 512", "at least 1093")),
        ),
        ({"attention_chunk_tokens": 384}, CHUNK, "384 of 2048 tokens", "a multiple of 256"),
    ],
)
def test_what_cannot_be_cut_is_refused(
    change: dict[str, Any], where: str, got: str, wanted: str | tuple[str, ...]
) -> None:
    with refused(Infeasible, where=where, got=got, wanted=wanted):
        lower(msgspec.structs.replace(chunks(), **change))
