"""What attention sinks do not go with."""

from __future__ import annotations

from memo_sim.program.layout.rules.feature import Feature
from memo_sim.program.layout.rules.rule import Rule

_SINKS = Feature(
    name="sinks",
    chosen=lambda d: d.model.sinks,
    beside="beside attention sinks",
    setting="a model with sinks",
    hint="tp, cp (ring, all-gather), Ulysses, subsequences, dp, pp and ZeRO go with sinks",
)

SINKS = (
    _SINKS.allows("layout.cp_exchange", "ring", "all_gather", because="it keeps no log-sum-exp"),
    _SINKS.allows("layout.metp", 1),
    _SINKS.allows("decisions.attention_chunk_tokens", 0, because="chunks are merged key by key"),
    _SINKS.allows("layout.multiplexed", False, because="helper stages merge what several stages compute"),
    _SINKS.allows(
        "decisions.modules", "auto", "operators", because="what Hugging Face's modules save of sinks is not known"
    ),
    _SINKS.allows(
        "decisions.recompute",
        *("none", "tokenwise", "full", "mlp", "norms", "operators", "rowwise"),
        because="selective recompute repeats attention by itself",
    ),
    Rule(
        name="sinks: attention",
        breaks=lambda d: d.model.sinks and d.kernels.attention == "plain",
        what="attention without a flash kernel has no log-sum-exp, into which sinks are written",
        where="decisions.kernels.attention",
        got="plain with a model with sinks",
        wanted="a flash kernel",
        hint="--attention flash",
    ),
)
