"""The options of a run, and their check."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec

from memo_exec.training.hyperparameters import Hyperparameters
from memo_sim.contract.errors import UsageError

HYPERPARAMETERS = {
    "lr": "learning_rate",
    "beta1": "beta1",
    "beta2": "beta2",
    "eps": "epsilon",
    "weight_decay": "weight_decay",
    "clip": "clip",
    "warmup_steps": "warmup_steps",
    "decay_steps": "decay_steps",
    "final_fraction": "final_fraction",
    "clip_ratio": "clip_ratio",
    "clip_ratio_high": "clip_ratio_high",
    "kl_weight": "kl_weight",
}
"""Options, and the fields of ``Hyperparameters`` that they set."""
LEAST = {"steps": 1, "save_every": 1, "seed": 0}
"""Least values of options that are whole numbers."""


@dataclass(frozen=True, kw_only=True)
class RunOptions:
    """The options of a run. ``hyperparameters`` has only those that the user gave, by name."""

    steps: int = 10
    data: Path | None = None
    tokenizer: Path | None = None
    """The folder of the tokenizer that makes tokens of conversations."""
    weights: Path | None = None
    adapters: Path | None = None
    seed: int | None = None
    save: Path | None = None
    save_every: int = 10
    resume: bool = False
    debug: bool = False
    replay_allocator: bool = False
    """Serve libraries from the arena's slots, or replay the addresses of a recorded step without one. CUDA only."""
    hyperparameters: dict[str, Any] = field(default_factory=dict)


def run_options(named: Mapping[str, Any]) -> RunOptions:
    """Return the options of a run by the names of the command line's options, with underscores; None: not given.

    Raises:
        UsageError: when a value is out of range, or ``save_every`` has no folder.
    """
    given = {name: value for name, value in named.items() if value is not None}
    for name, least in LEAST.items():
        value = given.get(name, least)
        if not isinstance(value, int) or isinstance(value, bool) or value < least:
            raise UsageError(f"not a value of {name}", got=repr(value), wanted=f"a whole number from {least}")
    if "save_every" in given and "save" not in given:
        raise UsageError(
            "--save-every needs a folder for the checkpoints",
            got=f"--save-every {given['save_every']}",
            hint="add --save DIR",
        )
    hyperparameters = {HYPERPARAMETERS[name]: value for name, value in given.items() if name in HYPERPARAMETERS}
    try:
        msgspec.convert(hyperparameters, Hyperparameters)
    except msgspec.ValidationError as error:
        raise UsageError("not a value of a hyperparameter", got=str(error)) from None
    chosen = {name: value for name, value in given.items() if name in RunOptions.__dataclass_fields__}
    paths = ("data", "tokenizer", "weights", "adapters", "save")
    chosen |= {name: Path(chosen[name]) for name in paths if name in chosen}
    return RunOptions(hyperparameters=hyperparameters, **chosen)
