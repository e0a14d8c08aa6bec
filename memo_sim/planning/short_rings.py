"""Plans with a shorter ring of context-parallel ranks, or fewer ranks of METP, where each has the same tokens.

The instructions of a ring grow with its ranks, but its kernels repeat: from step 2 on, every step of the representative
rank has the same calls over the same number of keys, the same merges and the same sums (``program/attention/ring.py``).
Everything else that a rank computes depends on its own tokens alone. So the kernels of a pass grow linearly:

    kernels(cp) = kernels(2) + (cp - 2) x kernels of one step

Two short rings therefore give the compute lane of a long one. Transfers and buffers are another matter.

METP on p ranks plays p parts of the heads, each round a ring of p ranks, and p parts of the MLP. With as many heads and
features a part, and as many tokens a rank, its kernels grow with 1, p and p squared. Three short ones give a long one:

    kernels(p) = a + b p + c p^2, through p = 2, 4 and 8
"""

from __future__ import annotations

from collections.abc import Sequence
from math import prod

import msgspec
import numpy as np
from numpy.typing import NDArray

from memo_sim.contract.plan import Decisions

Floats = NDArray[np.float64]

SHORT = (2, 4)
"""Ranks of the two rings that stand for all longer ones."""

SHORT_PARTS = (2, 4, 8)
"""Ranks of METP in the three plans that stand for all with more."""


def steps_repeat(decisions: Decisions) -> bool:
    """Return whether a plan's ring is longer than ``SHORT``, and its steps have equal kernels.

    Windows, packed documents, subsequences and chunks change the keys of a step; METP and RSA have other rings.
    """
    layout, model = decisions.layout, decisions.model
    plain = layout.cp_exchange == "ring" and layout.metp == 1 and layout.subsequences == 1
    whole = decisions.documents is None and not decisions.attention_chunk_tokens and not model.windowed
    lengths = layout.cp % SHORT[-1] == 0 and decisions.seq_tokens % (2 * layout.cp) == 0
    return layout.cp > SHORT[-1] and plain and whole and lengths


def with_ring(decisions: Decisions, cp: int) -> Decisions:
    """Return a plan for which ``steps_repeat``, on a ring of ``cp`` ranks with as many tokens each.

    Its sequence is shorter. The other ranks are data-parallel, so experts and ZeRO divide as before.
    As many devices of a node compute at once, which decides their clocks.
    """
    layout = decisions.layout
    times = layout.cp // cp
    shorter = msgspec.structs.replace(layout, cp=cp, dp=layout.dp * times)
    return msgspec.structs.replace(
        decisions,
        layout=shorter,
        seq_tokens=decisions.seq_tokens // times,
        global_batch=decisions.global_batch * times,
    )


def parts_repeat(decisions: Decisions) -> bool:
    """Return whether METP has more ranks than ``SHORT_PARTS``, and all its parts and steps have equal kernels.

    Exchanges on the compute lane, without ``overlap_exchanges``, depend on the number of ranks.
    """
    layout, model = decisions.layout, decisions.model
    more = layout.metp > SHORT_PARTS[-1] and layout.overlap_exchanges and len(model.layer_shapes) == 1
    whole = decisions.documents is None and not decisions.attention_chunk_tokens and not model.windowed
    lengths = layout.metp % SHORT_PARTS[-1] == 0 and decisions.seq_tokens % (2 * layout.metp) == 0
    return more and whole and lengths


def with_parts(decisions: Decisions, ranks: int) -> Decisions:
    """Return a plan for which ``parts_repeat``, with ``ranks`` parts of as many heads, features and tokens each.

    Its model has fewer heads and features. The other ranks are data-parallel, as in ``with_ring``.
    """
    layout, model = decisions.layout, decisions.model
    times = layout.metp // ranks
    narrower = msgspec.structs.replace(
        model,
        heads=model.heads // times,
        kv_heads=model.kv_heads // times,
        ffn_hidden=model.ffn_hidden // times,
    )
    return msgspec.structs.replace(
        decisions,
        model=narrower,
        layout=msgspec.structs.replace(layout, metp=ranks, dp=layout.dp * times),
        seq_tokens=decisions.seq_tokens // times,
        global_batch=decisions.global_batch * times,
    )


def of_many_parts(few: Sequence[Floats], ranks: int) -> Floats:
    """Return the seconds of METP on ``ranks`` ranks from those on ``SHORT_PARTS``: the quadratic through all three."""
    found = np.zeros_like(few[0])
    for own, seconds in zip(SHORT_PARTS, few, strict=True):
        others = [other for other in SHORT_PARTS if other != own]
        found += prod((ranks - other) / (own - other) for other in others) * seconds
    return found
