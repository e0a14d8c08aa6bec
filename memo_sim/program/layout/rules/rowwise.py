"""What row-wise recompute does not go with; experts, MLA, FP8, adapters and METP say so in rules of their own."""

from __future__ import annotations

from memo_sim.program.layout.rowwise_blocks import is_rowwise
from memo_sim.program.layout.rules.feature import Feature
from memo_sim.program.layout.rules.pipeline_stages import staged

_ROWWISE = Feature(
    name="row-wise recompute",
    chosen=is_rowwise,
    beside="beside row-wise recompute",
    setting="recompute rowwise",
    hint="--recompute full or tokenwise; tp, cp, Ulysses, pp, dp and ZeRO go with row-wise recompute",
)

ROWWISE_RECOMPUTE = (
    _ROWWISE.allows("layout.subsequences", 1, because="queries and the KV cache would be rebuilt apart"),
    _ROWWISE.allows(
        "layout.schedule",
        *("gpipe", "1f1b", "interleaved"),
        because="deferred weight gradients need inputs of all rows, of which only a block exists",
        when=lambda d: is_rowwise(d) and staged(d),
    ),
    _ROWWISE.allows(
        "decisions.mlp_rebuild", "block", because="frameworks that rebuild an MLP like this repeat attention"
    ),
    _ROWWISE.allows(
        "decisions.kernels.attention",
        wanted="a flash kernel",
        because="other kernels keep scores instead of the log-sum-exp",
        when=lambda d: is_rowwise(d) and d.kernels.attention == "plain",
    ),
)
