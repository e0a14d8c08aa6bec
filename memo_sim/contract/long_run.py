"""What a question says about many devices over a long time, as keyword arguments beside the knobs."""

from __future__ import annotations

from typing import TypedDict

from memo_sim.contract.named_knobs import Knobs


class LongRun(TypedDict, total=False):
    """Failures, checkpoints and slow devices (docs/goodput.md); None, or a name that is left out: not given."""

    mtbf_hours: float | None
    checkpoint_s: float | None
    checkpoint_gb_s: float | None
    checkpoint_interval_s: float | None
    restart_s: float | None
    straggler_spread: float | None


class KnobsInALongRun(Knobs, LongRun, total=False):
    """The knobs, and what is said of a long run."""
