"""What failures and checkpoints cost a training job: what a question says of them, and what follows for a plan.

A part of ``memo.result/2`` and ``memo.longest/2``. ``costs/failures.py`` has the formulas, ``answers/goodput.py``
applies them to a plan.
"""

from __future__ import annotations

from typing import Literal

import msgspec

from memo_sim.contract.units import Bytes, NonNegative, Positive, Seconds

ShareOfTime = float
"""A fraction of the wall time of a long job, failures included."""


class Failures(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """How often devices fail, and how long a checkpoint and a restart last, as given with the question."""

    device_mtbf_hours: float
    """Mean time between failures of one device, with its part of the host and the network."""
    checkpoint_s: Seconds | None = None
    """Seconds that training waits for one checkpoint; null where they follow from the rate."""
    checkpoint_bytes_per_s: NonNegative | None = None
    """Rate at which all devices of the job together write a checkpoint; null where the seconds are given."""
    interval_s: Seconds | None = None
    """Seconds of training between checkpoints; null: Daly's optimum."""
    restart_s: Seconds
    """Seconds from a failure to the first new step: detection, new machines, start, loading the checkpoint."""


class Goodput(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What failures leave of a plan's speed, in the long run. The four shares sum to 1."""

    failures: Failures
    job_mtbf_s: float
    """Mean time between failures of any of the plan's devices."""
    checkpoint_bytes: Bytes
    """What is in a checkpoint: parameters and optimizer states of the whole model, no gradients."""
    checkpoint_s: Seconds
    interval_steps: Positive
    """Steps between two checkpoints: the interval in whole steps."""
    interval_s: Seconds
    interval_from: Literal["given", "daly"]
    goodput: ShareOfTime
    """Share of the time that goes to steps which no failure undoes."""
    checkpoints: ShareOfTime
    """Checkpoints after such steps."""
    lost: ShareOfTime
    """Steps and checkpoints that a failure undoes."""
    restarts: ShareOfTime
    tokens_per_device_s: float
    """Tokens per GPU and second, failures included."""
    days_per_trillion_tokens: float | None = None
    """Null where failures leave the job no progress to speak of; so are the two below."""
    device_hours_per_billion_tokens: float | None = None
    price_per_billion_tokens: float | None = None


class GoodputChange(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The goodput with one of its inputs changed; an interval that was not given is chosen anew."""

    change: str
    goodput: ShareOfTime
