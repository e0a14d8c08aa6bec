"""What every framework's module has: a table of how it says each decision, the files it takes, how they are read."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Literal

from memo_sim.contract.interchange import IgnoredOption, ReadOption
from memo_sim.contract.plan import Decisions
from memo_sim.interchange.job import Job
from memo_sim.interchange.launch import Launch

How = Literal["exact", "near", "none", "own"]
"""How a framework says a decision.

- exact: it says the same, and read again it gives the same decision.
- near: it says something similar; ``Saying.lost`` says what is lost.
- none: it has no words for it.
- own: the framework decides it itself, or what is installed does."""


FALLBACK = " devices"
"""Key of the values given to ``Framework.read`` under which the cluster's devices stand, for files that name none.

It begins with a blank, so that no user can give it."""


@dataclass(frozen=True, slots=True)
class Saying:
    """How a framework says one decision of a plan.

    ``keys`` are the names of its options, as its own parser takes them; ``lost`` says what a near or missing word
    costs, in one sentence.
    """

    how: How
    keys: tuple[str, ...] = ()
    lost: str = ""


LIMITED = Saying("exact", (), "what replaces the plan has a limit of its own, or none")
"""How all of them say a limit of PyTorch's allocator: in the environment (``memory_fraction.py``)."""


@dataclass(frozen=True, slots=True)
class Source:
    """One file to read: its name, and its text."""

    name: str
    text: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Read:
    """What was read of a framework's files.

    ``framework``: the name of the one that runs the job, which may not be the one whose files were read. ``devices``:
    how many devices the files start, 0 where they do not say. ``assumed``: what the files leave open, with the
    framework's default. ``memory_fraction``: the part of a device's memory that PyTorch's allocator may reserve, None
    where the files set none.
    """

    framework: str
    job: Job
    devices: int = 0
    memory_fraction: float | None = None
    read: tuple[ReadOption, ...] = ()
    ignored: tuple[IgnoredOption, ...] = ()
    assumed: tuple[str, ...] = ()


def _nothing(decisions: Decisions, job: Job, launch: Launch, header: tuple[str, ...]) -> dict[str, str]:
    """Return no files."""
    del decisions, job, launch, header
    return {}


def _known(job: Job) -> str:
    """Return that nothing of a job is unknown."""
    del job
    return ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Framework:
    """One framework.

    - version: the repository or package, with the version that its options were read from.
    - system: the preset that predicts it (``planning/presets.py``).
    - sayings: one for every path of ``plan_paths``.
    - jobs: the jobs that come nearest to a plan. With several, the fastest that fits is exported.
    - unknown: what of a job memo knows no kernels and no kept tensors of in this framework; "" where it is nothing.
    - layouts: the preset that predicts such a job by memo's own operators; "" where the framework has none.
    - files: the names and texts of the files that run a job. ``header`` is to stand in each as a comment.
    - beside: more files, for decisions that only memo's own code inside the framework can follow.
    - reads: whether a file is one of this framework's.
    - read: what its files say; the mapping has values for variables that the files leave open.
    """

    name: str
    title: str
    version: str
    system: str
    sayings: Mapping[str, Saying]
    jobs: Callable[[Decisions], tuple[Job, ...]]
    files: Callable[[Job, Launch, tuple[str, ...]], dict[str, str]]
    reads: Callable[[Source], bool]
    beside: Callable[[Decisions, Job, Launch, tuple[str, ...]], dict[str, str]] = _nothing
    read: Callable[[tuple[Source, ...], Mapping[str, str]], Read]
    unknown: Callable[[Job], str] = _known
    layouts: str = ""

    def predicted_by(self, job: Job) -> str:
        """Return the preset that predicts a job: the framework's, or the one with memo's own operators in its place."""
        return self.layouts if self.layouts and self.unknown(job) else self.system

    def priced(self, job: Job) -> Job:
        """Return a job as its preset prices it: without the framework's kernels where memo's own stand in for them."""
        if self.predicted_by(job) == self.system:
            return job
        return replace(
            job,
            grad_sums="auto" if job.grad_sums == "autocast" else job.grad_sums,
            loss="auto" if job.loss == "checkpointed" else job.loss,
            pins=replace(job.pins, rowwise=None, adamw=None, sharding=None),
        )

    def own_operators(self, job: Job) -> tuple[str, ...]:
        """Return the sentence about a prediction by memo's own operators; none where the framework's are known."""
        what = self.unknown(job) if self.layouts else ""
        if not what:
            return ()
        told = f"{self.title}'s kernels of {what}, and what its modules keep of them, are not known"
        return (f"{told}: priced with memo's own operators (system {self.layouts})",)
