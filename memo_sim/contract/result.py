"""The answer to a what-if question (``memo.result/1``)."""

from __future__ import annotations

import msgspec

from memo_sim.contract.plan import PlanRow


class Result(
    msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, tag_field="schema", tag="memo.result/1"
):
    """``best`` is the first of ``plans`` that fits, null when none does; the space is ``evaluated`` + ``pruned``."""

    model: str
    cluster: str
    seq_tokens: int
    best: PlanRow | None
    plans: list[PlanRow]
    evaluated: int
    pruned: int
    why: list[str] = []
    """Why the best is best: what binds, the runner-up, what was tried and lost; one sentence each."""
