"""METP's rivals: their rows of Tables 1 and 2 of METP's paper, and equations 10 and 11, for random sizes.

The figures are read from programs. "Memory" in a table is a layer's states and the inputs of products that forward
keeps; "peak" adds the other tensors alive at once. The paper leaves out the norms' vectors and statistics, the result
of f, the residual, and the buffers that receive hops.
"""

from __future__ import annotations

import pytest
from hypothesis import given, settings

from memo_sim.program.analysis.columns import expand
from memo_sim.program.analysis.liveness import liveness
from memo_sim.program.ir.instruction import BufferClass, Lane
from memo_sim.program.ir.program import Program
from tests.sim.program.layers.paper_layer import FP32, Sizes, elements, of_layer, sent, sizes, template

MHA = ("x", "qkv", "attn")
"""Tensors of attention that the tables count as kept: the products' input, Q, K, V, and the output."""
FFN = ("norm2", "up")

few = settings(max_examples=10, deadline=None)


def states(program: Program) -> int:
    """Return the elements of a layer's parameters, gradients and two moments on a rank, with four norm vectors of h."""
    found = [f for f in program.families if f.name.endswith(".layer") and f.buffer_class is BufferClass.STATE]
    return sum(f.tokens for f in found)


def kept(program: Program, names: tuple[str, ...]) -> int:
    """Return the elements of a layer's skeletal tensors with these names."""
    found = [f for f in program.families if f.name in {f"skeletal.{name}" for name in names}]
    assert len(found) == len(names)
    return sum(f.tokens * f.features for f in found)


@given(size=sizes())
@few
def test_memory_of_rsa_is_that_of_the_tables(size: Sizes) -> None:
    p, h, bsh = size.p, size.h, size.bsh
    program = size.program(cp=p, cp_exchange="rsa", recompute="selective")
    assert states(program) == (32 + 16) * h * h + 4 * 4 * h  # whole weights
    assert kept(program, FFN) * p == kept(program, MHA) * p == 5 * bsh
    # Scores live only inside a layer pass; no other layer keeps them.
    heads = h // 16
    assert elements(template(program, "layer.fwd"), "probs") * p == size.b * heads * size.s**2
    assert not any("probs" in f.name for f in program.families)


@given(size=sizes())
@few
def test_communication_of_rsa_is_that_of_the_tables(size: Sizes) -> None:
    """The MLP sends nothing. Attention has hops of K and V in forward and backward, and all-reduces their gradients."""
    p, bsh = size.p, size.bsh
    program = size.program(cp=p, cp_exchange="rsa")
    share = (p - 1) / p
    hops, reduced = sent(program, "send_recv"), 2 * share * sent(program, "all_reduce", ("dk.", "dv."))
    assert (hops, reduced) == (pytest.approx(4 * share * bsh), pytest.approx(4 * share * bsh))
    assert hops + reduced == pytest.approx(8 * share * bsh)
    names = {i.name.partition("/")[2] for i in of_layer(program) if i.lane is not Lane.COMPUTE} - {"grads"}
    assert {name.partition(".")[0] for name in names} == {"keys", "values", "dk", "dv"}
    # The tables leave out that every rank has whole weights, so a step sums whole gradients over the ranks.
    (summed,) = (i.work.bytes for i in of_layer(program) if i.op == "grads.all_reduce")
    assert summed == FP32 * (12 * size.h**2 + 4 * size.h)


@given(size=sizes())
@few
def test_megatrons_rows(size: Sizes) -> None:
    """Each half of a layer gathers and scatters a whole bsh five times; its peak has a whole bsh instead of a shard."""
    p, h, bsh = size.p, size.h, size.bsh
    program = size.program(tp=p, sequence_parallel=True)
    share = (p - 1) / p
    for half in (("norm2", "d_norm2", "ffn"), ("norm1", "d_norm1", "proj")):
        moved = (sent(program, "all_gather", half) + sent(program, "reduce_scatter", half)) * share
        assert moved == pytest.approx(5 * share * bsh)
    assert states(program) == (32 + 16) * h * h // p + 4 * 4 * h
    assert kept(program, FFN) * p == kept(program, MHA) * p == 5 * bsh
    forward = template(program, "layer.fwd")
    assert elements(forward, "fwd.norm1_full") == elements(forward, "fwd.norm2_full") == bsh
    scores = elements(template(size.program(tp=p, sequence_parallel=True, kernel="plain"), "layer.fwd"), "fwd.scores")
    assert scores * p == size.b * (h // 16) * size.s**2


@given(size=sizes())
@few
def test_ulysses_rows_under_zero_3(size: Sizes) -> None:
    """The tables gather one matrix at a time (4 h2, 3 h2); FSDP and memo gather a whole block (12 h2)."""
    p, h, bsh = size.p, size.h, size.bsh
    program = size.program(ulysses=p, zero=3)
    share, vectors = (p - 1) / p, 4 * h
    moved = (sent(program, "all_gather") + sent(program, "reduce_scatter")) * share
    assert moved == pytest.approx(share * ((24 + 12) * h * h + 3 * vectors))
    assert sent(program, "all_to_all") * share == pytest.approx(8 * (p - 1) / p**2 * bsh)
    assert states(program) == 4 * (12 * h * h + vectors) // p
    assert kept(program, FFN) * p == kept(program, MHA) * p == 5 * bsh
    (gathered,) = (f for f in program.families if f.name == "gathered.layer")
    assert gathered.tokens == 12 * h * h + vectors
    scores = elements(template(size.program(ulysses=p, zero=3, kernel="plain"), "layer.fwd"), "fwd.scores")
    assert scores * p == size.b * (h // 16) * size.s**2


def test_ring_attention_sends_less_than_rsa() -> None:
    """Gradients of K and V travel with them instead of two all-reduces: 6 (p-1)/p bsh instead of 8."""
    size = Sizes(1, 512, 64, 2)
    assert sent(size.program(cp=2), "send_recv") == 6 * (size.p - 1) / size.p * size.bsh


def alive(program: Program, instruction: str) -> dict[tuple[str, int], int]:
    """Return the elements of each buffer alive during an instruction, by family and number in the family."""
    lives, at, families = liveness(program, expand(program)), program.ids().index(instruction), program.all_families
    bases = list(program.family_bases.values())
    found: dict[tuple[str, int], int] = {}
    for i, size in enumerate(lives.bytes):
        if lives.birth[i] <= at <= lives.death[i]:
            family = int(lives.family[i])
            found[families[family].name, i - bases[family]] = int(size) // FP32
    return found


def by_layer(program: Program, instruction: str, slots: tuple[str, ...], passing: str, layers: int) -> list[int]:
    """Return the elements that each layer has alive in skeletal ``slots``.

    The last layer also counts the buffer ``passing`` of its forward.
    """
    found, kept_families = [0] * layers, {f"skeletal.{slot}" for slot in slots}
    for (family, number), size in alive(program, instruction).items():
        if family in kept_families:
            found[number] += size
        elif family in {f"layer.fwd/{passing}", f"layer.fwd.last/{passing}"}:
            found[-1] += size
    return found


@given(size=sizes())
@settings(max_examples=6, deadline=None)
@pytest.mark.parametrize("layers", [1, 3])
def test_equations_10_and_11(layers: int, size: Sizes) -> None:
    """One of L layers is at its peak (ratio r, equation 10); each other layer keeps 2 bsh/p where the rival keeps 5.

    Equation 11 is the mean of the layers' ratios, not the ratio of their sums, which differs a little. Both save at
    least 41.7 %.
    """
    p, last = size.p, f"m0/s0/l{layers - 1}/fwd"
    theirs = by_layer(
        size.program(layers=layers, tp=p, sequence_parallel=True), f"{last}/qkv", MHA, "fwd.norm1_full", layers
    )
    parts = tuple(f"attn.g{part}" for part in range(p))
    ours = by_layer(size.program(layers=layers, metp=p), f"{last}/attn.g{p - 1}", ("x", *parts), "qkv", layers)
    r = ours[-1] / theirs[-1]
    assert r == pytest.approx((3 + 2 * p) / (p * (4 + p)))
    mean = sum(mine / other for mine, other in zip(ours, theirs, strict=True)) / layers
    assert mean == pytest.approx(r / layers + 2 / 5 * (layers - 1) / layers)
    assert max(mean, sum(ours) / sum(theirs)) <= 7 / 12 + 1e-9  # 41.7 % saved
