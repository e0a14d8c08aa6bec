"""What activations that are swapped in FP8 do not go with."""

from __future__ import annotations

from memo_sim.program.layout.rules.feature import Feature
from memo_sim.program.layout.rules.recompute import swaps

_ROUNDED = Feature(
    name="swaps in FP8",
    chosen=lambda d: d.swap_dtype == "fp8" and swaps(d),
    beside="beside activations that are swapped in FP8",
    setting="swap_dtype fp8",
    hint="tp, cp, Ulysses, pp, dp, ZeRO, subsequences and experts go with it; or leave --swap-dtype out",
)

SWAPS_IN_FP8 = (
    _ROUNDED.allows("layout.metp", 1, because="what rounding does to METP's gradients was not measured"),
    _ROUNDED.allows("layout.multiplexed", False, because="helper stages would rebuild from rows that owners rounded"),
    _ROUNDED.allows("decisions.fp8", "none", because="tensors that products read in FP8 are as small already"),
    _ROUNDED.allows("decisions.attention_chunk_tokens", 0, because="chunks of attention are copied in their own dtype"),
    _ROUNDED.allows("decisions.deterministic", False, because="swapped steps then have the bits of kept ones"),
    _ROUNDED.allows(
        "decisions.memory_policy", "planned", "caching", because="frameworks offload what autograd saves as it is"
    ),
)
