"""A plan handed to another framework, and a framework's job read as a plan (``memo.export/1``, ``memo.job/1``)."""

from __future__ import annotations

from typing import Literal

import msgspec

from memo_sim.contract.model import Model
from memo_sim.contract.plan import PlanRow
from memo_sim.contract.result import Result
from memo_sim.contract.summary import DeviceMemory
from memo_sim.contract.units import Degree, SequenceTokens

FrameworkName = Literal["megatron-lm", "megatron-bridge", "torchtitan", "deepspeed", "accelerate", "trl"]
"""Frameworks that plans go to and come from; ``interchange/frameworks.py`` has a module for each."""
ReadFrameworkName = Literal["megatron-lm", "megatron-bridge", "torchtitan", "deepspeed", "accelerate", "trl", "verl"]
"""Frameworks whose jobs are read."""


Launcher = Literal["torchrun", "slurm"]
"""What starts the processes of an exported job."""


class LostDecision(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A decision of the plan that the framework does not keep."""

    path: str
    """Where it stands in a plan file: ``layout.tp``."""
    wanted: str
    instead: str
    """What the framework does in its place."""
    why: str = ""
    option: str = ""
    """The option of memo's command line that sets it: ``--tp``; empty where there is none."""


class OwnDecision(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A decision that the files do not say, but that the framework takes alike if what is installed allows it."""

    path: str
    value: str
    why: str = ""
    option: str = ""


class Export(
    msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, tag_field="schema", tag="memo.export/1"
):
    """What was exported, what was lost, and what that costs by memo's own prediction."""

    framework: str
    version: str
    """Where the framework's options were read from."""
    system: str
    """The preset that predicts the framework."""
    cluster: str
    files: list[str]
    lost: list[LostDecision] = []
    own: list[OwnDecision] = []
    notes: list[str] = []
    """What else to check in the files before training."""
    plan: PlanRow
    """The plan as it was given, predicted on the cluster."""
    there: PlanRow
    """The plan as the framework would run it, predicted on the same cluster."""
    plan_memory: DeviceMemory | None = None
    there_memory: DeviceMemory | None = None
    """What a device of the fullest stage needs."""


class ReadOption(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One option that was read, and what it says in memo's words."""

    key: str
    value: str
    says: str


class IgnoredOption(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One option that memo does not use."""

    key: str
    value: str
    why: str


class ImportedJob(
    msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, tag_field="schema", tag="memo.job/1"
):
    """A job as it was read from a framework's files, and, with a cluster, what it costs and what would be better."""

    framework: str
    version: str
    files: list[str]
    model: Model
    seq_tokens: SequenceTokens
    micro_batch: Degree
    global_batch: Degree
    devices: int = 0
    """Devices that the files start; 0 where they do not say."""
    read: list[ReadOption] = []
    ignored: list[IgnoredOption] = []
    assumed: list[str] = []
    job: PlanRow | None = None
    """The job, predicted; null without a cluster."""
    memory: DeviceMemory | None = None
    """What a device of the job's fullest stage needs; null without a cluster."""
    better: list[Result] = []
    """Answers to the same question with everything but model, sequence, batch and (of a large job) stages left open: in
    the same framework, then in memo. Empty without a cluster."""


def is_command(text: str) -> bool:
    """Return whether a name in a list of files is the job's command itself: words with options, or several lines."""
    return " -" in text or "\n" in text
