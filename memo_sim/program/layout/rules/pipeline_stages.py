"""What pipeline stages, and stages of several chunks, do not go with."""

from __future__ import annotations

from memo_sim.contract.plan import Decisions
from memo_sim.program.layout.rules.rule import Rule

MOST_WHOLE_ZERO = 1
"""The last stage of ZeRO whose ranks keep whole parameters and gradients."""


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
        breaks=lambda d: staged(d) and d.layout.zero > MOST_WHOLE_ZERO and d.layout.schedule == "zero-bubble",
        what="deferred weight gradients are added to whole gradients, of which ZeRO 2 and 3 have one layer's at a time",
        where="layout.zero",
        got=lambda d: f"{d.layout.zero} with the schedule {d.layout.schedule}",
        wanted="0 or 1",
        hint="--zero 1, or --schedule 1f1b: gpipe, 1f1b and interleaved go with ZeRO 2 and 3",
    ),
    Rule(
        name="pipeline stages: zero of a framework",
        breaks=lambda d: staged(d) and d.layout.zero > MOST_WHOLE_ZERO and d.memory_policy == "eager",
        what="frameworks keep whole gradients of a stage until its last micro-batch, or have no ZeRO 2 and 3 there",
        where="layout.zero",
        got=lambda d: f"{d.layout.zero} with pp {d.layout.pp} in an eager framework",
        wanted="0 or 1",
        hint="--zero 1, or --memory-policy planned",
    ),
)
