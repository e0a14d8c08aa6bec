"""The data of a run: windows of a file of tokens, conversations, or rollouts of a policy."""

from __future__ import annotations

import dataclasses
from pathlib import Path

from memo_exec.commands.run_options import RunOptions
from memo_exec.training.conversations import Conversations, load_conversations
from memo_exec.training.dataset import Dataset, holds_documents, load_dataset
from memo_exec.training.hyperparameters import Hyperparameters
from memo_exec.training.rollouts import MadeUp, load_rollouts
from memo_sim.contract.errors import UsageError
from memo_sim.contract.plan import Decisions
from memo_sim.program.layout.token_order import rows_of_a_cut

OF_A_POLICY = ("clip_ratio", "clip_ratio_high", "kl_weight")
"""Hyperparameters of a policy's objective."""


def data_of(
    options: RunOptions, decisions: Decisions, hyperparameters: Hyperparameters
) -> Dataset | Conversations | MadeUp:
    """Return the data of a run: rollouts of a policy, conversations of a .jsonl file, or windows of a file of tokens.

    Raises:
        BadInput: when it cannot be used.
        UsageError: when options are not for this data or objective.
    """
    if decisions.objective == "grpo":
        return _rollouts(options, decisions, kl=hyperparameters.kl_weight > 0)
    if given := [name for name in OF_A_POLICY if name in options.hyperparameters]:
        raise UsageError(
            f"--{given[0].replace('_', '-')} is for plans with the objective grpo",
            got=f"a plan with the objective {decisions.objective}",
            hint="leave it out, or memo-sim what-if ... --objective grpo",
        )
    pretraining = decisions.documents is not None and options.data is not None and holds_documents(options.data)
    if options.data is not None and options.data.suffix.lower() == ".jsonl" and not pretraining:
        vocab, room = decisions.model.vocab, _room(decisions)
        loaded = load_conversations(options.data, vocab, decisions.seq_tokens, options.tokenizer, room)
        return dataclasses.replace(loaded, multiple=rows_of_a_cut(decisions))
    if options.tokenizer is not None:
        raise UsageError(
            "a tokenizer is for conversations",
            got=f"--tokenizer {options.tokenizer} with {options.data or 'no --data'}",
            wanted="--data FILE.jsonl",
            hint="leave --tokenizer out: other data are tokens already, or bytes",
        )
    return _windows(options.data, decisions)


def _windows(data: Path | None, decisions: Decisions) -> Dataset:
    """Return windows of a file of tokens, or of the included text."""
    multiple = rows_of_a_cut(decisions)
    return load_dataset(data, decisions.model.vocab, decisions.documents, multiple=multiple)


def _room(decisions: Decisions) -> int:
    """Return the most documents of a sequence; 0 where a sequence is one."""
    return decisions.documents.most_pieces(decisions.seq_tokens) if decisions.documents else 0


def _rollouts(options: RunOptions, decisions: Decisions, *, kl: bool) -> Conversations | MadeUp:
    vocab = decisions.model.vocab
    if options.tokenizer is not None:
        raise UsageError(
            "rollouts are tokens already", got=f"--tokenizer {options.tokenizer}", hint="leave --tokenizer out"
        )
    if options.data is None:
        return MadeUp(_windows(None, decisions), vocab)
    if options.data.suffix.lower() != ".jsonl":
        raise UsageError(
            "the objective grpo needs rollouts",
            got=str(options.data),
            wanted="a .jsonl file with prompt_ids, completion_ids, advantage, old_logprobs and ref_logprobs",
            hint="leave --data out for made-up rollouts",
        )
    loaded = load_rollouts(options.data, vocab, decisions.seq_tokens, kl=kl, room=_room(decisions))
    return dataclasses.replace(loaded, multiple=rows_of_a_cut(decisions))
