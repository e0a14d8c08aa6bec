"""Two or more plans, answers or measured runs side by side: decisions, time, memory (``memo.difference/1``).

Lists have one entry for each of ``sides``, in their order. Differences are taken from the first side.
"""

from __future__ import annotations

from typing import Literal

import msgspec

from memo_sim.contract.goodput import Goodput
from memo_sim.contract.plan import Decisions, MovedBytes
from memo_sim.contract.units import Bytes, Seconds

SideKind = Literal["plan", "result", "comparison", "trace"]
Detail = Literal["kinds", "operators", "lanes"]
"""How finely a step is divided.

- kinds: operators, apart by what they are for: forward, recompute, backward.
- operators: without that, because a comparison does not tell.
- lanes: the compute lane's work as a whole, and its waits as a whole."""


class Side(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What is compared: a file, and the step that stands for it."""

    name: str
    kind: SideKind
    origin: Literal["predicted", "measured"]
    source: str
    """Where the figures come from: the file's own prediction, a new simulation on a cluster, a measurement."""
    cluster: str = ""
    """Name of the cluster that the prediction is for; empty where it is not known."""
    decisions: Decisions | None = None
    """Of a measured run: those of another side with the same program; null where no side holds them."""
    program_sha256: str = ""
    step_s: Seconds
    mfu: float | None = None
    tgs: float | None = None
    """Tokens per GPU and second; null where the decisions are not known."""
    goodput: Goodput | None = None
    """Of a result whose question speaks of failures: what they leave of the plan's speed."""
    lanes: dict[str, Seconds]
    """Busy seconds by lane, of the pipeline stage with most compute (of a measurement: of the rank that it is from)."""
    peak_device_bytes: Bytes
    reserved_bytes: Bytes | None = None
    """What PyTorch's allocator reserves at its peak; null where it is not predicted, or memory is planned."""
    peak_by_class: dict[str, Bytes] = {}
    """Empty where it is not known."""
    peak_host_bytes_per_node: Bytes | None = None
    moved_bytes: MovedBytes | None = None


class Choice(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A decision that differs: the option that sets it, and its values; null where a side does not say."""

    option: str
    values: list[str | None]


class Share(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Seconds of every step for one purpose. All shares of a side sum to its step.

    ``group`` is the part of the step (forward, recompute, backward, optimizer, ...) or ``waits``, which are those of
    the compute lane; ``name`` is the operator, or what is waited for.
    """

    group: str
    name: str
    seconds: list[float]
    difference_s: list[float]
    """Against the first side; all of them sum to the difference of the steps."""
    of_difference: list[float | None]
    """The same as a fraction of the steps' difference; null where the steps are equal."""


class Difference(
    msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, tag_field="schema", tag="memo.difference/1"
):
    """The verdict, what differs in decisions, and where the time and the memory go."""

    verdict: list[str]
    """One sentence for each side but the first."""
    sides: list[Side]
    decisions: list[Choice]
    """Only those that differ."""
    detail: Detail
    groups: list[Share]
    """The step by parts; ``name`` is empty. The largest difference first."""
    shares: list[Share]
    """The step by operators and causes of waits. The largest difference first."""
    notes: list[str] = []
    """How the sides were made, and why they compare only in part."""
