"""Plans with a shorter ring of context-parallel ranks, on which every rank has the same tokens.

The instructions of a ring grow with its ranks, but its kernels repeat: from step 2 on, every step of the representative
rank has the same calls over the same number of keys, the same merges and the same sums (``program/attention/ring.py``).
Everything else that a rank computes depends on its own tokens alone. So the kernels of a pass grow linearly:

    kernels(cp) = kernels(2) + (cp - 2) x kernels of one step

Two short rings therefore give the compute lane of a long one. Transfers and buffers are another matter.
"""

from __future__ import annotations

import msgspec

from memo_sim.contract.plan import Decisions

SHORT = (2, 4)
"""Ranks of the two rings that stand for all longer ones."""


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
