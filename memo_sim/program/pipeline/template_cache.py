"""The templates of layers that plans have alike, kept from one lowering to the next.

A sequence in a hundred parts has as many forwards and backwards of its own, and writing those is most of a lowering. A
search lowers the same parts again and again: as a few layers and as all of them, on so many stages, in one window and
in another. What a layer's template does not see is left out of the key; everything else that a plan decides is in it,
also what has yet to be invented.

      N 64, pp 4, window 1   written     N 64, pp 8, window 4   taken     N 64, a part of each row kept   written
"""

from __future__ import annotations

from collections import OrderedDict

from msgspec.structs import replace

from memo_sim.contract.plan import Decisions
from memo_sim.program.pipeline.subsequence_templates import Made

MOST_TEMPLATES = 4096
"""Kept in all, some 30 KiB each; the plan that was asked for longest ago goes first."""
_kept: OrderedDict[Decisions, Made] = OrderedDict()


def cached_templates(decisions: Decisions) -> Made:
    """Return the layers' templates that were written for such a plan, to be added to.

    A whole sequence has few, which are not kept.
    """
    if decisions.layout.subsequences == 1:
        return {}
    key = _seen_by_layers(decisions)
    made = _kept.setdefault(key, {})
    _kept.move_to_end(key)
    while len(_kept) > 1 and sum(len(each) for each in _kept.values()) > MOST_TEMPLATES:
        _kept.popitem(last=False)
    return made


def forget() -> None:
    """Write all templates anew from now on."""
    _kept.clear()


def _seen_by_layers(decisions: Decisions) -> Decisions:
    """Return the plan without what layers do not see.

    That is how many there are, of how many stages and micro-batches, in which order they are played, and for how long
    rows leave. Where weight gradients are computed apart, backward is another.
    """
    layout, model = decisions.layout, decisions.model
    apart = layout.pp > 1 and layout.schedule == "zero-bubble"
    return replace(
        decisions,
        model=replace(model, layers=1),
        layout=replace(layout, pp=1, schedule="zero-bubble" if apart else "1f1b", virtual_stages=1, overlap_p2p=True),
        global_batch=decisions.micro_batch * layout.dp,
        offload_window=min(1, decisions.offload_window),
    )
