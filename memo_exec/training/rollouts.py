"""Draws rollouts for reinforcement learning (GRPO, PPO): completions with what the objective needs of their tokens.

A line of a JSONL file, in tokens of the model:

    {"prompt_ids": [...], "completion_ids": [...], "advantage": 0.7,
     "old_logprobs": [...], "ref_logprobs": [...]}

``advantage`` is one number for the completion, or a list with one for each of its tokens. ``old_logprobs`` are those of
the model that drew the completion. ``ref_logprobs`` are those of the reference model, needed where the KL term has a
weight. Sequences are padded, cut or packed, and drawn epoch by epoch, as conversations are (``conversations.py``).

Without a file, rollouts are made up from the shipped text: random advantages, and log-probabilities around those of an
untrained model. Such a run measures a step; it learns nothing.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from memo_exec.training.conversations import (
    NUMBERS,
    Conversation,
    Conversations,
    Floats,
    check_used,
    joined,
    lines_of,
    tokens_of,
)
from memo_exec.training.dataset import IGNORED_LABEL, Batch, Dataset
from memo_sim.contract.errors import BadInput

SPREAD = 0.3
"""Standard deviation of made-up log-probabilities."""


@dataclass(frozen=True)
class MadeUp:
    """Rollouts made up from a text."""

    text: Dataset
    vocab: int

    @property
    def path(self) -> Path:
        """The text's file."""
        return self.text.path

    @property
    def sha256(self) -> str:
        """Hash of the text."""
        return self.text.sha256

    def short_of(self, seq_tokens: int) -> str:
        """Return that the rollouts are made up."""
        del seq_tokens
        return "rollouts are made up from the text: such a run measures a step and learns nothing (--data FILE.jsonl)"

    def batch(self, seed: int, step: int, sequences: int, seq_tokens: int) -> Batch:
        """Return windows of the text, of which the second half counts, with random numbers."""
        drawn = self.text.batch(seed, step, sequences, seq_tokens)
        labels = drawn.labels.copy()
        labels[:, : seq_tokens // 2] = IGNORED_LABEL
        random = np.random.default_rng([seed, step, 1])
        rollout = random.normal(-math.log(self.vocab), SPREAD, (sequences, seq_tokens, NUMBERS)).astype(np.float32)
        rollout[..., 0] = random.normal(size=(sequences, 1))
        return Batch(drawn.ids, labels, drawn.documents, rollout)


def load_rollouts(file: Path, vocab: int, seq_tokens: int, *, kl: bool, room: int = 0) -> Conversations:
    """Return the rollouts of a JSONL file; ``kl``: whether log-probabilities of the reference model are needed.

    ``room``: the most documents of a sequence of a plan that packs them.

    Raises:
        BadInput: when the file or a line cannot be used, or no token counts.
    """
    items = list[Conversation]()
    for line, where in lines_of(file):
        prompt, completion = (tokens_of(line, f"{name}_ids", vocab, where) for name in ("prompt", "completion"))
        numbers = np.zeros((len(prompt) + len(completion), NUMBERS), dtype=np.float32)
        numbers[len(prompt) :] = np.stack(list(_columns(line, len(completion), where, kl=kl)), axis=1)
        items.append(replace(joined(prompt, completion), rollout=numbers))
    found = Conversations(file, tuple(items), seq_tokens, room, "rollout")
    check_used(found, "no completion has a token")
    return found


def _columns(line: dict[str, Any], tokens: int, where: str, *, kl: bool) -> Iterator[Floats]:
    """Yield the three numbers of each token of a completion."""
    advantage = line.get("advantage")
    given = [advantage] * tokens if isinstance(advantage, int | float) else advantage
    yield _numbers("advantage", given, tokens, where)
    yield _numbers("old_logprobs", line.get("old_logprobs"), tokens, where)
    reference = line.get("ref_logprobs")
    if reference is None and not kl:
        yield np.zeros(tokens, dtype=np.float32)
    else:
        yield _numbers("ref_logprobs", reference, tokens, where)


def _numbers(name: str, values: object, tokens: int, where: str) -> Floats:
    listed = values if isinstance(values, list) else []
    if len(listed) != tokens or not all(type(value) in (int, float) for value in listed):
        raise BadInput(
            f"{name} is not a number for each token of the completion",
            where=where,
            got="nothing" if values is None else f"{len(listed)} values",
            wanted=f"{tokens} numbers",
        )
    found = np.array(listed, dtype=np.float32)
    if not np.isfinite(found).all():
        raise BadInput(f"{name} has a number that is not finite", where=where)
    return found
