"""What pipeline stages, and stages of several chunks, do not go with."""

from __future__ import annotations

from memo_sim.contract.plan import Decisions
from memo_sim.program.layout.rules.rule import Rule

MOST_ZERO_OF_STAGES = 1
"""Pipeline stages keep whole parameters and gradients, which ZeRO 2 and 3 would divide."""


def staged(decisions: Decisions) -> bool:
    """Return whether there are several pipeline stages."""
    return decisions.layout.pp > 1


VIRTUAL_STAGES_INTERLEAVE = Rule(
    name="virtual stages: schedule",
    breaks=lambda d: (d.layout.schedule == "interleaved" and staged(d)) != (d.layout.virtual_stages > 1),
    what="virtual stages belong to the interleaved schedule",
    where="layout.virtual_stages",
    got=lambda d: f"{d.layout.virtual_stages} with the schedule {d.layout.schedule}, pp {d.layout.pp}",
    wanted="more than 1 with the schedule interleaved on several stages, else 1",
    hint="--schedule interleaved with --virtual-stages 2 or more, or neither",
)

PIPELINE_STAGES = (
    VIRTUAL_STAGES_INTERLEAVE,
    Rule(
        name="virtual stages: overlap_p2p",
        breaks=lambda d: d.layout.virtual_stages > 1 and not d.layout.overlap_p2p,
        what="the interleaved schedule needs overlapped p2p: stages that wait for it would wait for each other",
        where="layout.overlap_p2p",
        got="false",
        wanted="true",
        hint="another --schedule",
    ),
    Rule(
        name="pipeline stages: zero",
        breaks=lambda d: staged(d) and d.layout.zero > MOST_ZERO_OF_STAGES,
        what="pipeline stages keep whole parameters and gradients",
        where="layout.zero",
        got=lambda d: f"{d.layout.zero} with pp {d.layout.pp}",
        wanted="0 or 1",
        hint="--zero 1: ZeRO 2 and 3 would gather and scatter for every micro-batch of every stage",
    ),
)
