"""Kernels of plans whose experts are divided, from plans that divide the sequence or the experts alone.

How many rows a rank sends to its experts depends on its own tokens. So experts' kernels are the same however cp and
Ulysses make these tokens of a sequence, and attention's kernels are the same however experts are divided:

    kernels(tp, cp, ulysses, ep) = kernels(tp, cp, ulysses, 1)  +  kernels(tp, 1, 1, ep) - kernels(tp, 1, 1, 1)

where the last two have a shorter sequence, with as many tokens a rank. A search has hundreds of combinations of degrees
on the left side, and tens on the right one. Collectives and buffers are another matter.
"""

from __future__ import annotations

from dataclasses import dataclass

import msgspec

from memo_sim.contract.plan import Decisions
from memo_sim.program.layout.attention_chunks import in_chunks
from memo_sim.program.layout.rank_order import least_dp

UNDIVIDED = {"expert_capacity": 0.0, "expert_overflow": "drop", "expert_overlap": False}
"""What a plan decides about experts when each rank has all of them."""


@dataclass(frozen=True, slots=True)
class ExpertsApart:
    """Three plans that tell the kernels of a fourth."""

    whole: Decisions
    """The plan with all experts on each rank."""
    divided: Decisions
    """The experts divided as in the plan, with whole sequences of a rank's tokens."""
    neither: Decisions


def experts_apart(decisions: Decisions) -> ExpertsApart | None:
    """Return the plans that tell the kernels of a plan which keeps everything, or None where it is as soon lowered.

    Documents and chunks depend on where a sequence is cut.
    """
    layout, of = decisions.layout, decisions.model.mixture
    keeps = decisions.recompute == "none" and not decisions.swapped_tokens and not in_chunks(decisions)
    plain = layout.metp == layout.subsequences == 1 and layout.zero == 0 and decisions.documents is None
    if of is None or layout.ep == 1 or layout.cp * layout.ulysses == 1 or not (keeps and plain):
        return None
    times = layout.cp * layout.ulysses
    one = {"cp": 1, "cp_exchange": "ring", "ulysses": 1, "uneven_heads": False}
    divided = _with_least_dp(msgspec.structs.replace(decisions, seq_tokens=decisions.seq_tokens // times), one)
    return ExpertsApart(_whole(decisions), divided, _whole(divided))


def _whole(decisions: Decisions) -> Decisions:
    """Return the plan with all experts on each rank."""
    return _with_least_dp(msgspec.structs.replace(decisions, **UNDIVIDED), {"ep": 1, "expert_tp": 0})


def _with_least_dp(decisions: Decisions, degrees: dict[str, object]) -> Decisions:
    """Return the plan with other degrees, and the least data parallelism, for one micro-batch."""
    layout = msgspec.structs.replace(decisions.layout, **degrees)
    least = least_dp(layout)
    layout = msgspec.structs.replace(layout, dp=least)
    return msgspec.structs.replace(decisions, layout=layout, global_batch=least * decisions.micro_batch)
