"""Whether a plan's gradients are those of keep-everything and of plain autograd (``memo.verdict/1``)."""

from __future__ import annotations

from typing import Annotated

import msgspec

from memo_sim.contract.knobs import DtypeName, Recompute
from memo_sim.contract.plan import Layout
from memo_sim.contract.units import Positive, Seconds

Difference = Annotated[float, msgspec.Meta(ge=0)] | None
"""Largest difference of any entry relative to the tensor's largest entry; null where a value is NaN or infinite."""


class Reduction(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One size of the plan that is smaller, or otherwise different, in what was played."""

    what: str
    plan: str
    here: str


class CheckResult(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What the checkers of programs say about the plan at full size."""

    name: str
    fine: bool
    text: str


class Compared(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The plan's values of one kind against one reference."""

    what: str
    """``gradient of layer/qkv.weight``, ``loss``, ``gradient norm``."""
    difference: Difference
    where: str = ""
    """The parameter or the step with the largest difference."""
    fine: bool = True
    """Whether the difference is within the tolerance."""


class Against(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A reference, and the plan's differences from it."""

    reference: str
    """``keep-everything`` or ``autograd``."""
    tolerance: Annotated[float, msgspec.Meta(ge=0)]
    why: str
    """Why this tolerance."""
    skipped: str = ""
    """Why the plan was not compared with this reference; empty when it was."""
    compared: list[Compared] = []


class Verdict(
    msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, tag_field="schema", tag="memo.verdict/1"
):
    """The report of ``memo-exec verify``.

    ``verified``: no check of the plan's programs found a fault, and every difference is within its tolerance.
    """

    verified: bool
    model: str = ""
    layout: Layout | None = None
    recompute: Recompute | None = None
    alpha: Annotated[float, msgspec.Meta(ge=0, le=1)] = 0.0
    """Model, layout and activation policy of the plan."""
    program_sha256: str
    machine: str
    dtype: DtypeName
    ranks: Positive
    """Processes that played the reduced plan."""
    steps: Positive
    seed: int
    reductions: list[Reduction] = []
    checks: list[CheckResult] = []
    against: list[Against] = []
    references_agree: bool | None = None
    """Whether keep-everything itself agrees with autograd; null when autograd was skipped."""
    losses: list[float | None] = []
    """The plan's loss of each step; null for NaN or infinity."""
    seconds: Seconds = 0.0
