"""What the recompute modes, and full recompute of some layers, do not go with."""

from __future__ import annotations

from memo_sim.contract.plan import Decisions
from memo_sim.program.layout.recomputed_layers import ALL, in_groups
from memo_sim.program.layout.rules.feature import Feature
from memo_sim.program.layout.rules.rule import Rule

MOST_ZERO_OF_GROUPS = 2
"""Layers of a group run forward again with parameters that no gather brings."""

KEEPS_ALL_TOKENS = ("selective", "norms", "mlp", "operators")
"""Recompute modes that keep some tensors of all tokens, and swap none."""


def swaps(decisions: Decisions) -> bool:
    """Return whether any tokens may be swapped."""
    return decisions.swapped_tokens > 0 or decisions.recompute == "tokenwise"


_SOME_LAYERS = Feature(
    name="layers of full recompute",
    chosen=lambda d: d.recompute_layers != ALL,
    beside="where full recompute is not about each layer by itself",
    setting=lambda d: f"recompute_layers {d.recompute_layers}",
    hint="leave --recompute-layers out; tp, cp, Ulysses, pp, dp and ZeRO go with it",
)

LAYERS_OF_FULL_RECOMPUTE = Rule(
    name="layers of full recompute: recompute",
    breaks=lambda d: d.recompute_layers != ALL and d.recompute != "full",
    what="layers are chosen for full recompute alone",
    where="decisions.recompute_layers",
    got=lambda d: f"{d.recompute_layers} with recompute {d.recompute}",
    wanted="all, or recompute full",
    hint="--recompute full, or leave --recompute-layers out",
)

SOME_LAYERS = (
    LAYERS_OF_FULL_RECOMPUTE,
    _SOME_LAYERS.allows("decisions.swapped_tokens", 0, because="no layer's tensors are swapped beside kept ones"),
    _SOME_LAYERS.allows("decisions.mlp_chunk_tokens", 0, because="layers that keep everything keep the whole MLP"),
    _SOME_LAYERS.allows("decisions.attention_chunk_tokens", 0, because="other layers keep the whole attention"),
    _SOME_LAYERS.allows("decisions.rounding_buffers", False, because="two buffers hold layers that are all rebuilt"),
    _SOME_LAYERS.allows(
        "decisions.early_stop",
        False,
        because="the inner layers of a group need every output",
        when=lambda d: in_groups(d) and d.early_stop,
    ),
    _SOME_LAYERS.allows("layout.metp", 1, because="METP recomputes a part of every layer anyway"),
    _SOME_LAYERS.allows(
        "layout.subsequences", 1, because="subsequences are priced with layers that are all recomputed alike"
    ),
    _SOME_LAYERS.allows(
        "layout.zero",
        *(0, 1, 2),
        because="ZeRO 3 would gather the parameters of a whole group once more",
        when=lambda d: in_groups(d) and d.layout.zero > MOST_ZERO_OF_GROUPS,
    ),
)

SELECTIVE_SWAPS_NOTHING = Rule(
    name="selective recompute: swapped_tokens",
    breaks=lambda d: d.recompute in KEEPS_ALL_TOKENS and d.swapped_tokens > 0,
    what=lambda d: f"{d.recompute} recompute swaps nothing",
    where="decisions.swapped_tokens",
    got=lambda d: f"alpha {d.alpha:.3g} ({d.swapped_tokens} tokens) with recompute {d.recompute}",
    wanted="0",
    hint="leave --alpha out, or another --recompute",
)

ROUNDING_BUFFERS_OF_FULL_RECOMPUTE = Rule(
    name="rounding buffers: recompute",
    breaks=lambda d: d.rounding_buffers and d.recompute != "full",
    what="the choice of rounding buffers belongs to full recompute",
    where="decisions.rounding_buffers",
    got=lambda d: f"true with recompute {d.recompute}",
    wanted="false, or recompute full",
    hint="--recompute full, or leave --rounding-buffers out: plans that swap have them anyway",
)

EARLY_STOP_OF_FULL_RECOMPUTE = Rule(
    name="early stop: recompute",
    breaks=lambda d: d.early_stop and d.recompute != "full",
    what="only full recompute repeats what backward does not need",
    where="decisions.early_stop",
    got=lambda d: f"true with recompute {d.recompute}",
    wanted="false, or recompute full",
    hint="--recompute full, or leave --early-stop out",
)
