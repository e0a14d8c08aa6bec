"""Decisions that the files of a job do not name, so that memo or the framework's default decides them.

A file of one kind often cannot say them: a DeepSpeed JSON holds no gradient checkpointing, which the program turns on.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from memo_sim.contract.plan import Decisions
from memo_sim.interchange.framework import Read, Saying
from memo_sim.interchange.plan_paths import value_at

_NAMES = {
    "decisions.recompute": ("recompute",),
    "decisions.micro_batch": ("micro-batch", "micro_batch", "per_device_train_batch_size"),
    "decisions.kernels.attention": ("attention",),
    "decisions.kernels.rowwise": ("rowwise",),
    "decisions.dtype": ("dtype", "precision"),
    "decisions.states": ("states",),
    "decisions.loss": ("loss",),
}
"""Paths of decisions that change time or memory most, and words by which something read or assumed is about them."""
_TITLES = {"decisions.kernels.attention": "attention kernel", "decisions.kernels.rowwise": "row-wise kernels"}


def unsaid(read: Read, sayings: Mapping[str, Saying], decisions: Decisions | None = None) -> list[str]:
    """Return a sentence for each decision that was not read, with the ``--set`` that fixes it where there is one.

    Without ``decisions``, which need a machine, only those that the job itself holds.
    """
    told = [*(option.says for option in read.read), *read.assumed]
    keys = {_plain(option.key) for option in read.read}
    found = list[str]()
    for path, words in _NAMES.items():
        saying, name = sayings[path], path.rpartition(".")[2]
        names = [_plain(key) for key in saying.keys]
        if keys.intersection(names) or _named(words, told):
            continue
        value = _of_the_job(read, name) if decisions is None else value_at(decisions, path)
        if value in (None, "auto"):
            continue
        title = _TITLES.get(path, name.replace("_", "-"))
        settable = [key for key in names if saying.how != "own" and "." not in key]
        option = f" (--set {settable[0]}=VALUE)" if settable else ""
        found.append(f"{title} {value}: the files do not say{option}")
    return found


def _plain(key: str) -> str:
    """Return an option's name as ``--set`` takes it."""
    return key.lstrip("-").replace("-", "_")


def _named(words: Iterable[str], texts: Iterable[str]) -> bool:
    return any(word in text for text in texts for word in words)


def _of_the_job(read: Read, name: str) -> object:
    pinned = getattr(read.job.pins, name, None)
    return getattr(read.job, name, None) if pinned is None else pinned
