"""What ring self-attention does not go with."""

from __future__ import annotations

from memo_sim.program.layout.rules.feature import Feature
from memo_sim.program.layout.rules.rule import Rule

_RSA = Feature(
    name="ring self-attention",
    chosen=lambda d: d.layout.cp_exchange == "rsa",
    beside="beside ring self-attention",
    setting="cp_exchange rsa",
    hint="tp, pp, dp and ZeRO go with it, and what it keeps is rebuilt; only the inputs of full recompute are swapped",
)

RING_SELF_ATTENTION = (
    _RSA.allows("layout.metp", 1),
    _RSA.allows("layout.ulysses", 1),
    _RSA.allows("layout.subsequences", 1),
    _RSA.allows("decisions.recompute", "none", "selective", "full"),
    _RSA.allows(
        "decisions.swapped_tokens",
        0,
        wanted="0, or recompute full",
        when=lambda d: d.layout.cp_exchange == "rsa" and d.recompute != "full",
    ),
    Rule(
        name="ring self-attention: attention",
        breaks=lambda d: d.layout.cp_exchange == "rsa" and d.kernels.attention == "plain",
        what="plain attention keeps the scores of whole sequences, ring self-attention its own",
        where="decisions.kernels.attention",
        got="plain with cp_exchange rsa",
        wanted="the kernel that the machine has; ring self-attention plays none",
        hint="another attention kernel, or --cp-exchange ring",
    ),
)
