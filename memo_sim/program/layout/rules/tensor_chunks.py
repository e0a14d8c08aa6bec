"""What tensor parallelism in chunks does not go with."""

from __future__ import annotations

from memo_sim.program.layout.rules.feature import Feature
from memo_sim.program.layout.rules.rule import Rule

_TP_CHUNKS = Feature(
    name="tensor parallelism in chunks",
    chosen=lambda d: d.layout.tp_overlap == "chunked",
    beside="with --tp-overlap chunked",
    setting="tp_overlap chunked",
    hint="leave --tp-overlap out; cp, Ulysses, pp, dp and ZeRO go with it",
)

TENSOR_CHUNKS = (
    _TP_CHUNKS.allows(
        "layout.metp", 1, because="METP gathers no tokens: its weights pass round a ring, which overlaps already"
    ),
    Rule(
        name="tensor parallelism in chunks: tp",
        breaks=lambda d: d.layout.tp_overlap == "chunked" and d.layout.divided == 1,
        what="without tensor parallelism there are no collectives to cut into chunks",
        where="layout.tp",
        got="1 with tp_overlap chunked",
        wanted="2 or more",
        hint="--tp 2 or more, or leave --tp-overlap out",
    ),
    _TP_CHUNKS.allows(
        "layout.sequence_parallel",
        True,
        because="without sequence parallelism sums stay whole on every rank, and nothing is gathered",
        when=lambda d: d.layout.tp_overlap == "chunked" and d.layout.tp > 1,
    ),
    _TP_CHUNKS.allows(
        "layout.subsequences", 1, because="subsequences have templates that all tensor-parallel ranks share"
    ),
    _TP_CHUNKS.allows(
        "decisions.attention_chunk_tokens",
        0,
        because="attention in chunks gathers a part of the rows at a time already",
    ),
)
