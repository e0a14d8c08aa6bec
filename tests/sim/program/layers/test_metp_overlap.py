"""Overlap of METP's exchanges with compute: the paper's conditions, in the engine, on the paper's idealised machine.

    312 TFLOP/s and 300 GB/s give 1040 FLOP per byte. MLP: a step has 2 x 8 m h2/p2 FLOP, and a hop has 2 x 8 h2/p
    bytes. The hop hides when m/p > 1040 (equation 5), so s > 8320 on eight ranks.

Equation 12 compares the work of all ranks with the bytes of one rank. A rank multiplies only its own m/p rows.
Therefore the broadcasts of W_qkv and W_proj hide behind the products when s > 3120 p, not when s > 3120. Attention's
work, which grows with s, hides more.
"""

from __future__ import annotations

from math import log2

import pytest

from memo_sim.contract.model import Model
from memo_sim.contract.plan import Decisions, Layout
from memo_sim.engine.simulate import Simulation, simulate
from memo_sim.program.ir.instruction import Lane
from memo_sim.program.ir.work import Attention, Collective, Exchange, Gemm, Work
from tests.sim.toy_machine import TOY_CLUSTER, alone, toy_hardware

RANKS = 8
PEAK, LINK = 312e12, 300e9
MEASURED_ALPHA_S = 1e6 / 37e9 - 1e6 / LINK
"""Latency from the paper's discussion: messages of 1 MB reach 37 GB/s on a link whose largest messages reach 300."""
WEIGHT_HOP, BROADCAST = "weights that pass round", "weights that are broadcast"
ROUND, TO_ALL = "everything that passes round", "everything that is broadcast or reduced"


class Ideal:
    """Prices: products at the peak rate, exchanges of kind ``priced`` at the link's rate, all else is free."""

    def __init__(self, hidden: int, priced: str, alpha_s: float = 0.0, *, attention: bool = True) -> None:
        self.outside_of: dict[Work, frozenset[str]] = {}
        self._hop = Exchange(2 * 8 * hidden**2 // RANKS, RANKS, "metp")
        self._priced, self._alpha_s, self._attention = priced, alpha_s, attention

    def seconds(self, work: Work) -> float:
        if isinstance(work, Gemm) or (isinstance(work, Attention) and self._attention):
            return work.flops / PEAK
        if self._priced == WEIGHT_HOP and work == self._hop:
            return self._alpha_s + work.bytes / LINK
        if self._priced == BROADCAST and isinstance(work, Collective) and work.kind == "broadcast":
            return self._alpha_s + log2(RANKS) * work.bytes / LINK
        if self._priced == ROUND and isinstance(work, Exchange):
            return work.bytes / LINK
        if self._priced == TO_ALL and isinstance(work, Collective) and work.kind in ("broadcast", "reduce"):
            return log2(RANKS) * work.bytes / LINK
        return 0.0


def played(tokens: int, prices: Ideal, hidden: int = 1024, **layout: object) -> Simulation:
    model = Model(
        name="paper",
        family="gpt",
        layers=1,
        hidden=hidden,
        heads=RANKS,
        kv_heads=RANKS,
        head_dim=hidden // RANKS,
        ffn_hidden=4 * hidden,
        vocab=64,
        tied_embeddings=True,
    )
    shape = Layout(metp=RANKS, **layout)  # type: ignore[arg-type]
    decisions = Decisions(model=model, layout=shape, seq_tokens=tokens)
    return simulate(decisions, toy_hardware(), TOY_CLUSTER, pricer=prices, rates=alone)


def waited_s(found: Simulation, earlier: str, later: str) -> float:
    """Return the seconds that compute waits in forward, from each step's last product to the next step's first."""
    (stage,) = found.stages
    number = {name: i for i, name in enumerate(stage.program.ids())}
    start_s, end_s = stage.playback.start_s, stage.playback.end_s
    gaps = [
        start_s[number[f"m0/s0/l0/fwd/{later}{step}"]] - end_s[number[f"m0/s0/l0/fwd/{earlier}{step - 1}"]]
        for step in range(1, RANKS)
    ]
    return float(sum(gaps))


def mlp_waits_s(tokens: int, hidden: int = 1024, alpha_s: float = 0.0) -> float:
    found = played(tokens, Ideal(hidden, WEIGHT_HOP, alpha_s), hidden)
    return waited_s(found, "ffn_down.t", "ffn_up.t")


def test_the_ring_of_weights_hides_from_8320_tokens() -> None:
    hop_s = 2 * 8 * 1024**2 / RANKS / LINK
    assert mlp_waits_s(8320 + 128) == pytest.approx(0.0, abs=1e-12)
    assert mlp_waits_s(8320 - 128) == pytest.approx((RANKS - 1) * hop_s * 128 / 8320, rel=1e-6)


def test_small_messages_need_longer_sequences() -> None:
    """With the measured latency a hop of 2 MiB takes four times as long, and a hop of 288 MiB 2 % longer."""
    assert mlp_waits_s(8320 + 128, 1024, MEASURED_ALPHA_S) > 0
    assert mlp_waits_s(8320 + 384, 12288, MEASURED_ALPHA_S) == pytest.approx(0.0, abs=1e-12)


def broadcast_waits_s(tokens: int) -> float:
    return waited_s(played(tokens, Ideal(1024, BROADCAST, attention=False)), "proj.g", "qkv.g")


def test_broadcasts_hide_behind_a_ranks_own_products_from_3120_tokens_a_rank() -> None:
    assert broadcast_waits_s((3120 + 16) * RANKS) == pytest.approx(0.0, abs=1e-12)
    assert broadcast_waits_s((3120 - 16) * RANKS) > 0
    assert broadcast_waits_s(3120 + 16) > 0


@pytest.mark.parametrize("priced", [WEIGHT_HOP, BROADCAST])
def test_without_overlap_the_step_is_compute_plus_exchanges(priced: str) -> None:
    """Without overlap the step is the sum of compute and all exchanges; with overlap it is shorter."""
    prices = Ideal(1024, priced)
    slots, beside = (played(16384, prices, overlap_exchanges=o).prediction.step_s or 0.0 for o in (False, True))
    free = played(16384, Ideal(1024, "nothing")).prediction.step_s or 0.0
    size, times, tree = (2, 2 * 7, 1.0) if priced == WEIGHT_HOP else (1, 2 * 8, log2(RANKS))
    exchanged = times * tree * size * 2 * 4 * 1024**2 / RANKS / LINK
    assert slots == pytest.approx(free + exchanged, rel=1e-9)
    assert free <= beside < slots


def test_without_overlap_nothing_is_exchanged_beside_compute() -> None:
    """Hops of keys and values run on compute's lane too, like those of weights."""
    lanes, hops = {}, {}
    for beside in (False, True):
        program = played(16384, Ideal(1024, WEIGHT_HOP), overlap_exchanges=beside).program
        layer = [i for t in program.templates if t.name in ("layer.fwd", "layer.bwd") for i in t.instructions]
        lanes[beside] = {i.lane for i in layer}
        hops[beside] = {i.name for i in layer if i.op == "send_recv"}
    assert lanes == {False: {Lane.COMPUTE}, True: {Lane.COMPUTE, Lane.P2P, Lane.METP}}
    assert hops[False] == hops[True]


def long(priced: str, hidden: int = 4096) -> float:
    return played(131072, Ideal(hidden, priced), hidden).prediction.step_s or 0.0


def test_every_hop_of_a_long_sequence_hides_even_the_last() -> None:
    """The last hop of the MLP's gradient sums runs beside the input's gradient, that of K and V beside W_proj's.

    The latter has 2 m h2/p2 FLOP and 4 m h/p2 bytes, so it hides at any length when h/2 > 1040.
    """
    assert long(ROUND) == pytest.approx(long("nothing"), rel=1e-12)
    assert long(ROUND, 1024) > long("nothing", 1024)


def test_compute_waits_only_for_the_first_broadcast_of_each_pass() -> None:
    """Norms take no time here, as in the paper. The last reduction hides behind the product that follows it."""
    first_s = log2(RANKS) * 2 * 4 * 4096**2 / RANKS / LINK
    assert long(TO_ALL) - long("nothing") == pytest.approx(2 * first_s, rel=1e-9)


def test_products_that_metp_repeats_count_as_recompute() -> None:
    """A layer has 12 h^2 weights.

    W_qkv and W_in are multiplied four times, the other weights and the classifier three times.
    """
    hidden, vocab = 1024, 64
    found = played(16384, Ideal(hidden, "nothing", attention=False), hidden)
    rebuilt = (3 + 4) * hidden**2
    assert found.recompute_share == pytest.approx(rebuilt / (rebuilt + 3 * (12 * hidden**2 + vocab * hidden)), rel=1e-9)
    assert found.own_rebuild_share == pytest.approx(found.recompute_share, rel=1e-9)
