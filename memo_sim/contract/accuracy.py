"""Accepted accuracy by case set and system (``memo.accuracy/1``): a later version must not predict worse.

``memo.errors/1`` holds the errors on published rows one by one; the interval of a prediction comes from them.
"""

from __future__ import annotations

from typing import Annotated, Literal

import msgspec

from memo_sim.contract.units import NonNegative, Positive

Framework = Literal["megatron", "deepspeed", "torch", "planned"]
"""Classes of frameworks whose predictions have errors of the same kind: three code bases on PyTorch's caching
allocator, and whatever runs in planned memory."""


class GroupAccuracy(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Accuracy over one system's rows of one source; no row that a constant was fitted on."""

    cases: int
    not_evaluated: int = 0
    wrong_statuses: int = 0
    mean_abs_error: dict[str, NonNegative] = {}
    """Mean of ``|predicted / measured - 1|``, by quantity."""
    low: float | None = None
    high: float | None = None
    """``low`` and ``high`` bound the share ``level`` of the values ``measured / predicted - 1``.

    Null when there are too few cases."""
    level: float | None = None
    quantity: str = ""
    """The quantity of ``low`` and ``high``: step time or MFU."""
    errors: dict[str, float] = {}
    """``predicted / measured - 1`` by case: of step time, or of MFU when only MFU was measured."""


class Accuracies(
    msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, tag_field="schema", tag="memo.accuracy/1"
):
    """Accepted accuracies; the keys of ``groups`` are ``<source>/<system>``."""

    groups: dict[str, GroupAccuracy]


class Setting(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What a prediction is about, as far as its error depends on it."""

    generation: str
    """GPU generation; empty where the profile does not name one, or was made from a data sheet alone."""
    framework: Framework
    allocation_retries: bool = False
    """Whether PyTorch's allocator retries allocations in a step: its cost then decides the step, and the error."""
    seq_tokens: Positive
    devices: Positive
    kernels: dict[str, str]
    """Dtype and the implementation of each operator that has several, by the name of the plan's field."""


class ErrorGroup(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Errors on the rows of one source that share generation, framework, allocation retries and kernels."""

    source: str
    generation: str
    framework: Framework
    allocation_retries: bool = False
    kernels: dict[str, str]
    rows: dict[str, Annotated[list[float], msgspec.Meta(min_length=3, max_length=3)]]
    """[tokens of a sequence, devices, log(measured step time / predicted step time)] by case."""
    questions: dict[str, str] = {}
    """What rows share that differ in their plan alone, by case; empty in files of earlier versions."""


class PublishedErrors(
    msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, tag_field="schema", tag="memo.errors/1"
):
    """Errors of step time on the published rows that ship with memo; no row that a constant was fitted on."""

    groups: list[ErrorGroup]
