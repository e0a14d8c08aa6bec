"""What row-wise recompute does not go with; norms behind attention and MLP, and RSA have rules of their own."""

from __future__ import annotations

from memo_sim.program.layout.rowwise_blocks import is_rowwise
from memo_sim.program.layout.rules.feature import Feature
from memo_sim.program.layout.rules.pipeline_stages import staged
from memo_sim.program.layout.rules.rule import Rule

_ROWWISE = Feature(
    name="row-wise recompute",
    chosen=is_rowwise,
    beside="beside row-wise recompute",
    setting="recompute rowwise",
    hint="--recompute full or tokenwise; tp, cp, Ulysses, pp, dp, ZeRO and subsequences go with row-wise recompute",
)


ROWWISE_RECOMPUTE = (
    Rule(
        name="row-wise recompute: metp",
        breaks=lambda d: is_rowwise(d) and d.layout.metp > 1,
        what="row-wise recompute has no lowering beside METP",
        where="decisions.recompute",
        got="rowwise with METP",
        wanted="none, full or tokenwise",
        hint="METP cuts the MLP by features, not by rows; --recompute full or tokenwise",
    ),
    _ROWWISE.allows("layout.multiplexed", False, because="helper stages would divide its row blocks once more"),
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
