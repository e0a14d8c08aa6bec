"""What ZeRO over groups of replicas does not go with."""

from __future__ import annotations

from memo_sim.program.layout.rules.rule import Rule

RANKS_OF_ZERO = (
    Rule(
        name="ranks of ZeRO: zero",
        breaks=lambda d: d.layout.zero_ranks > 0 and d.layout.zero == 0,
        what="ranks of ZeRO without ZeRO have no effect",
        where="layout.zero_ranks",
        got=lambda d: f"{d.layout.zero_ranks} with zero 0",
        wanted="0",
        hint="--zero 1 or more, or leave --zero-ranks out",
    ),
    Rule(
        name="ranks of ZeRO: replicas",
        breaks=lambda d: d.layout.zero_ranks > 0 and d.layout.replicas % d.layout.zero_ranks > 0,
        what="the ranks with the same parameters do not make up whole groups of ZeRO",
        where="layout.zero_ranks",
        got=lambda d: f"{d.layout.zero_ranks} of {d.layout.replicas} ranks",
        wanted="a divisor of cp x ulysses x dp",
        hint="another --zero-ranks, or leave it out: ZeRO then divides over all of them",
    ),
)
