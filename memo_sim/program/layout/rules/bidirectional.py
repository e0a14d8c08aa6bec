"""What models without a causal mask do not go with."""

from __future__ import annotations

from memo_sim.program.layout.rules.feature import Feature

_BIDIRECTIONAL = Feature(
    name="bidirectional model",
    chosen=lambda d: d.model.bidirectional,
    beside="without a causal mask",
    setting="a bidirectional model",
    hint="a model with causal attention, or tp, cp (ring), Ulysses, METP, dp and pp of whole sequences",
)

_WHOLE_SEQUENCES = "a ring of whole sequences, or one rank, and a flash kernel"

BIDIRECTIONAL = (
    _BIDIRECTIONAL.allows(
        "layout.cp_exchange",
        *("ring", "rsa"),
        wanted=_WHOLE_SEQUENCES,
        when=lambda d: d.model.bidirectional and d.layout.cp > 1,
    ),
    _BIDIRECTIONAL.allows("layout.subsequences", 1, wanted=_WHOLE_SEQUENCES),
    _BIDIRECTIONAL.allows(
        "decisions.kernels.attention",
        wanted=_WHOLE_SEQUENCES,
        when=lambda d: d.model.bidirectional and d.kernels.attention == "plain",
    ),
)
