"""The fates that a plan decides, where a wrapped model can follow it."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec

from memo_exec.decoder_layers.policy import Policy
from memo_sim.contract import codec
from memo_sim.contract.errors import BadInput, CannotRun
from memo_sim.contract.huggingface import model_from_config
from memo_sim.contract.model import Model
from memo_sim.contract.plan import Decisions, Plan

_NOT_FOLLOWED: tuple[tuple[str, Callable[[Decisions], object], object, str], ...] = (
    ("layout.tp", lambda d: d.layout.tp, 1, "row blocks of tensor-parallel layers are not played"),
    ("layout.metp", lambda d: d.layout.metp, 1, "transformers' layers have no METP"),
    ("layout.pp", lambda d: d.layout.pp, 1, "a transformers model is one stage"),
    ("layout.subsequences", lambda d: d.layout.subsequences, 1, "a transformers model plays whole sequences"),
    ("offload_window", lambda d: d.offload_window, 0, "layers are swapped one after the other"),
    ("mlp_chunk_tokens", lambda d: d.mlp_chunk_tokens, 0, "the MLP has the row blocks of alpha alone"),
    ("fp8", lambda d: d.fp8, "none", "a transformers model computes its own products"),
    ("attention_chunk_tokens", lambda d: d.attention_chunk_tokens, 0, "attention runs over all tokens at once"),
)
"""Decisions that change what a layer saves and when: field, value, the one value that is followed, and why."""


def policy_of_plan(plan: str | os.PathLike[str] | Plan, config: Any) -> Policy:
    """Return the fates of a plan for a model with transformers' ``config``.

    Raises:
        BadInput: when the file cannot be read.
        CannotRun: when the plan is of another model, or has decisions that a wrapped model cannot follow.
    """
    where = "the plan" if isinstance(plan, Plan) else str(plan)
    decisions = (plan if isinstance(plan, Plan) else codec.read(Path(plan), Plan)).decisions
    _check_model(decisions.model, config, where)
    for name, value, wanted, because in _NOT_FOLLOWED:
        if (got := value(decisions)) != wanted:
            raise CannotRun(
                "the plan decides something that a wrapped model cannot follow",
                where=f"{where}: $.decisions.{name}",
                got=got,
                wanted=f"{wanted}: {because}",
            )
    return _fates(decisions, where)


def _fates(decisions: Decisions, where: str) -> Policy:
    swapped, tokens = decisions.swapped_tokens, decisions.local_tokens
    if decisions.recompute == "tokenwise":
        return Policy(decisions.alpha)
    if decisions.recompute == "none" and swapped == tokens:
        return Policy(1.0)
    hints = {
        "none": "drop tokenwise: the plan keeps every layer's tensors" if not swapped else None,
        "full": "drop tokenwise: transformers' gradient checkpointing recomputes whole layers",
    }
    raise CannotRun(
        "the plan has no token-wise alpha",
        where=f"{where}: $.decisions.recompute",
        got=f"{decisions.recompute}, {swapped} of {tokens} tokens swapped",
        wanted="tokenwise, or none with all tokens swapped",
        hint=hints.get(decisions.recompute),
    )


def _check_model(model: Model, config: Any, where: str) -> None:
    if config is None or not hasattr(config, "to_dict"):
        raise CannotRun("the model has no configuration to compare the plan's model with", where=where)
    try:
        theirs = model_from_config(config.to_dict(), where="the model's configuration", name=model.name)
    except BadInput as error:
        raise CannotRun(
            "memo's plans do not describe this model", where=error.where, got=error.got, hint="give alpha instead"
        ) from error
    unlike = {"name", "source"} | (set() if model.learned_positions else {"max_positions"})
    for field in msgspec.structs.fields(Model):
        got, wanted = getattr(theirs, field.name), getattr(model, field.name)
        if field.name not in unlike and got != wanted:
            raise CannotRun(
                "the plan is of another model", where=f"{where}: $.decisions.model.{field.name}", got=got, wanted=wanted
            )
