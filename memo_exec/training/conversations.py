"""Draws conversations of a JSONL file for supervised fine-tuning: a sequence is one conversation, padded or cut.

A line is one of these:

    {"messages": [{"role": "user", "content": ...}, {"role": "assistant", "content": ...}, ...]}
    {"prompt": ..., "completion": ...}              two texts, or two lists of messages
    {"prompt_ids": [...], "completion_ids": [...]}  tokens; the only form that needs no tokenizer

Only tokens of the assistant's messages, or of the completion, are targets; the label of every other token is ignored
(TRL's ``assistant_only_loss`` and its prompt-completion data). Texts become tokens by the tokenizer and the chat
template of a model's folder. Where the template marks what the assistant writes (``{% generation %}``), its marks say
which tokens count. Otherwise the tokens of the messages up to each answer are compared with those that include it.

A sequence that is longer than the plan's is cut, so a conversation whose prompt fills it has no target and is left out.
What a shorter one leaves is padding. A plan with documents packs conversations into a sequence, in the order in which
they are drawn, until the next one does not fit; each is a document, so no token sees another conversation.

The file is played in epochs. The order of an epoch depends only on the seed and its number.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from memo_exec.training.dataset import IGNORED_LABEL, Batch
from memo_sim.contract.errors import BadInput, CannotRun
from memo_sim.contract.files import read_regular
from memo_sim.contract.units import counted, format_percent

Ids = NDArray[np.int64]
Bools = NDArray[np.bool_]
Floats = NDArray[np.float32]

NUMBERS = 3
"""Of a rollout's token: advantage, log-probability when drawn, and log-probability by the reference model."""

MARKED = "{% generation"
"""What a chat template has before what the assistant writes; also with ``-`` behind the percent sign."""
FORMS = "messages; prompt and completion; or prompt_ids and completion_ids"


@dataclass(frozen=True)
class Conversation:
    """Tokens of a conversation, and which of them are targets."""

    ids: Ids
    counted: Bools
    rollout: Floats | None = None
    """A policy's numbers of each token, (tokens, 3) (``rollouts.py``)."""

    def targets(self, seq_tokens: int) -> int:
        """Return the number of targets among the first ``seq_tokens`` labels."""
        return int(self.counted[1 : seq_tokens + 1].sum())


@dataclass(frozen=True)
class Conversations:
    """The conversations of a file; stands where a ``Dataset`` does."""

    path: Path
    items: tuple[Conversation, ...]
    seq_tokens: int
    room: int = 0
    """The most documents of a sequence of a plan that packs them; 0: a sequence is one conversation."""
    noun: str = "conversation"
    multiple: int = 1
    """What the rows of a document are a multiple of, where ranks cut every document; the others are padding."""

    @cached_property
    def sha256(self) -> str:
        """Hash of all tokens, targets and numbers, and so of file, tokenizer and template; a checkpoint pins it."""
        found = hashlib.sha256()
        for item in self.items:
            found.update(len(item.ids).to_bytes(8, "little") + item.ids.tobytes() + item.counted.tobytes())
            if item.rollout is not None:
                found.update(item.rollout.tobytes())
        return found.hexdigest()

    @cached_property
    def used(self) -> tuple[Conversation, ...]:
        """The conversations that have a target within a sequence."""
        return tuple(item for item in self.items if item.targets(self.seq_tokens))

    def short_of(self, seq_tokens: int) -> str:
        """Return what the sequences of an epoch hold: targets, padding, and what was cut or left out."""
        held = [min(len(item.ids), seq_tokens) for item in self.used]
        cut = sum(len(item.ids) > seq_tokens + 1 for item in self.used)
        targets, sequences = sum(item.targets(seq_tokens) for item in self.used), len(self._epoch(0, 0))
        room, mean = seq_tokens * sequences, sum(held) / len(held)
        text = (
            f"{self.path}: {counted(len(self.used), self.noun)} of {mean:,.0f} tokens on average in "
            f"{counted(sequences, 'sequence')}, {format_percent(targets / room)} of the tokens are targets, "
            f"{format_percent(1 - sum(held) / room)} are padding"
        )
        if cut:
            text += f"; {cut} cut at {seq_tokens} tokens"
        if left := len(self.items) - len(self.used):
            text += f"; {left} left out, which have no target within {seq_tokens} tokens"
        return text

    def batch(self, seed: int, step: int, sequences: int, seq_tokens: int) -> Batch:
        """Return the global batch of one step. It depends only on the arguments and the conversations."""
        ids = np.zeros((sequences, seq_tokens), dtype=np.int64)
        labels = np.full((sequences, seq_tokens), IGNORED_LABEL, dtype=np.int64)
        rollout = np.zeros((sequences, seq_tokens, NUMBERS), dtype=np.float32)
        documents = list[tuple[int, ...]]()
        for row, held in enumerate(self._drawn(seed, (step - 1) * sequences, sequences)):
            ends = [0]
            for item in held:
                place = slice(ends[-1], seq_tokens)
                _place(item, ids[row, place], labels[row, place], rollout[row, place])
                ends.append(min(ends[-1] + self._rows(item), seq_tokens))
            documents.append((*ends[1:], *([seq_tokens] if ends[-1] < seq_tokens else [])))
        numbers = rollout if self.items[0].rollout is not None else None
        return Batch(ids, labels, tuple(documents) if self.room else (), numbers)

    def _drawn(self, seed: int, first: int, count: int) -> Iterator[list[Conversation]]:
        """Yield the conversations of ``count`` sequences from the ``first`` on, epoch after epoch."""
        epoch, begun = 0, 0
        for at in range(first, first + count):
            while at - begun >= len(self._epoch(seed, epoch)):
                begun += len(self._epoch(seed, epoch))
                epoch += 1
            yield self._epoch(seed, epoch)[at - begun]

    def _epoch(self, seed: int, epoch: int) -> list[list[Conversation]]:
        """Return the conversations of each sequence of an epoch; padding is a document of a plan that packs them."""
        if (seed, epoch) in self._epochs:
            return self._epochs[seed, epoch]
        order = np.random.default_rng([seed, epoch]).permutation(len(self.used))
        found, free = list[list[Conversation]](), 0
        for item in (self.used[number] for number in order.tolist()):
            if not found or self._rows(item) > free or len(found[-1]) + 1 >= self.room:
                found.append([])
                free = self.seq_tokens
            found[-1].append(item)
            free -= min(self._rows(item), free)
        self._epochs[seed, epoch] = found
        return found

    def _rows(self, item: Conversation) -> int:
        """Return the rows that a conversation takes."""
        return -(-len(item.ids) // self.multiple) * self.multiple

    @cached_property
    def _epochs(self) -> dict[tuple[int, int], list[list[Conversation]]]:
        return {}


def _place(item: Conversation, ids: Ids, labels: Ids, rollout: Floats) -> None:
    """Write a conversation at the start of a sequence's free part; labels and numbers are those of the next tokens."""
    tokens, targets = item.ids, item.counted
    ids[: len(tokens)] = tokens[: len(ids)]
    following = np.where(targets[1:], tokens[1:], IGNORED_LABEL)[: len(labels)]
    labels[: len(following)] = following
    if item.rollout is not None:
        rollout[: len(following)] = item.rollout[1 : len(following) + 1]


def load_conversations(
    file: Path, vocab: int, seq_tokens: int, tokenizer_folder: Path | None, room: int = 0
) -> Conversations:
    """Return the conversations of a JSONL file; ``room``: the most documents of a sequence of a plan that packs them.

    Raises:
        BadInput: when the file, a line, the tokenizer or its chat template cannot be used, or there is no target.
        CannotRun: when lines need a tokenizer, and transformers is not installed.
    """
    tokenizer = _Tokenizer(tokenizer_folder, file) if tokenizer_folder is not None else None
    items = tuple(_conversation(line, tokenizer, vocab, where) for line, where in lines_of(file))
    found = Conversations(file, items, seq_tokens, room)
    check_used(found, "no conversation has a target")
    return found


def check_used(found: Conversations, unused: str) -> None:
    """Refuse data of which nothing counts; ``unused``: the message's first words.

    Raises:
        BadInput: when no item has a target within a sequence.
    """
    if not found.used:
        raise BadInput(
            f"{unused} within {counted(found.seq_tokens, 'token')}",
            where=str(found.path),
            got=counted(len(found.items), found.noun),
            hint="longer sequences (--seq-len of the plan), or other data",
        )


def lines_of(file: Path) -> Iterator[tuple[dict[str, Any], str]]:
    """Yield every line's object, and where it stands.

    Raises:
        BadInput: naming the line that is no JSON object.
    """
    for number, text in enumerate(read_regular(file).splitlines(), start=1):
        if not text.strip():
            continue
        where = f"{file}, line {number}"
        try:
            line = json.loads(text)
        except (ValueError, RecursionError) as error:
            raise BadInput("the line is no JSON", where=where, got=str(error)) from None
        if not isinstance(line, dict):
            raise BadInput("the line is no JSON object", where=where, got=type(line).__name__, wanted=FORMS)
        yield line, where


def tokens_of(line: dict[str, Any], key: str, vocab: int, where: str) -> Ids:
    """Return the token ids of a line's ``key``.

    Raises:
        BadInput: when they are no list of ids of the vocabulary.
    """
    values = line.get(key)
    wanted = f"a list of token ids from 0 to {vocab - 1}"
    if not isinstance(values, list) or not all(type(value) is int for value in values):
        raise BadInput(f"{key} is no list of whole numbers", where=where, wanted=wanted)
    if (outside := next((value for value in values if not 0 <= value < vocab), None)) is not None:
        raise BadInput(f"{key} has a token id outside the model's vocabulary", where=where, got=outside, wanted=wanted)
    return np.array(values, dtype=np.int64)


def joined(prompt: Ids, completion: Ids) -> Conversation:
    """Return a conversation of which the completion alone counts."""
    counts = np.zeros(len(prompt) + len(completion), dtype=np.bool_)
    counts[len(prompt) :] = True
    return Conversation(np.concatenate([prompt, completion]), counts)


def _conversation(line: dict[str, Any], tokenizer: _Tokenizer | None, vocab: int, where: str) -> Conversation:
    if "advantage" in line and "old_logprobs" in line:
        raise BadInput(
            "the line is a rollout, and this plan trains on conversations: every completion would be a target, whatever"
            " its advantage is",
            where=where,
            got="advantage and old_logprobs",
            wanted=FORMS,
            hint="make the plan with --objective grpo, or leave these two out",
        )
    if "prompt_ids" in line or "completion_ids" in line:
        return joined(tokens_of(line, "prompt_ids", vocab, where), tokens_of(line, "completion_ids", vocab, where))
    if tokenizer is None:
        raise BadInput(
            "text of conversations needs a tokenizer",
            where=where,
            hint="--tokenizer FOLDER with the model's tokenizer.json and chat template, or prompt_ids and "
            "completion_ids in every line",
        )
    found = _of_text(line, tokenizer, where)
    if len(found.ids) and int(found.ids.max()) >= vocab:
        raise BadInput(
            "the tokenizer has a token id outside the model's vocabulary",
            where=where,
            got=int(found.ids.max()),
            wanted=f"0 to {vocab - 1}",
            hint="give the tokenizer of the plan's model",
        )
    return found


def _of_text(line: dict[str, Any], tokenizer: _Tokenizer, where: str) -> Conversation:
    if "messages" in line:
        return tokenizer.chat(_messages(line["messages"], where), where)
    prompt, completion = line.get("prompt"), line.get("completion")
    if isinstance(prompt, str) and isinstance(completion, str):
        return tokenizer.text(prompt, completion)
    if isinstance(prompt, list) and isinstance(completion, list):
        before = _messages(prompt, where)
        return tokenizer.answer(before, [*before, *_messages(completion, where)], where)
    raise BadInput("the line has no conversation", where=where, got=", ".join(map(str, line)) or "{}", wanted=FORMS)


def _messages(value: object, where: str) -> list[dict[str, Any]]:
    fits = isinstance(value, list) and all(
        isinstance(each, dict) and isinstance(each.get("role"), str) and "content" in each for each in value
    )
    if not (fits and value):
        raise BadInput("messages have to be a list of objects with role and content", where=where)
    assert isinstance(value, list)
    return value


class _Tokenizer:
    """The tokenizer and the chat template of a model's folder."""

    def __init__(self, folder: Path, data: Path) -> None:
        try:
            from transformers import AutoTokenizer
        except ImportError:
            raise CannotRun(
                "conversations need the package transformers",
                where=str(data),
                hint="pip install transformers, or give prompt_ids and completion_ids in every line",
            ) from None
        if not (folder / "tokenizer_config.json").is_file() and not (folder / "tokenizer.json").is_file():
            raise BadInput("the folder has no tokenizer", where=str(folder), wanted="tokenizer.json")
        try:
            self._tokenizer: Any = AutoTokenizer.from_pretrained(
                str(folder), local_files_only=True, trust_remote_code=False
            )
        except Exception as error:  # transformers raises any exception for a file that it cannot read
            raise BadInput("the tokenizer cannot be read", where=str(folder), got=_short(error)) from None
        self._folder = folder

    def text(self, prompt: str, completion: str) -> Conversation:
        """Return prompt and completion, each in tokens of its own, and the end of the text."""
        end = [] if self._tokenizer.eos_token_id is None else [self._tokenizer.eos_token_id]
        before = self._tokenizer(prompt)["input_ids"]
        answer = self._tokenizer(completion, add_special_tokens=False)["input_ids"]
        return joined(np.array(before, dtype=np.int64), np.array([*answer, *end], dtype=np.int64))

    def chat(self, messages: Sequence[dict[str, Any]], where: str) -> Conversation:
        """Return a conversation of which the assistant's messages count."""
        template = self._template(where)
        if MARKED in template.replace("{%-", "{%"):
            found = self._applied(messages, where, return_assistant_tokens_mask=True)
            return Conversation(_ids(found["input_ids"]), np.array(found["assistant_masks"], dtype=np.bool_))
        ids = _ids(self._applied(messages, where)["input_ids"])
        counts = np.zeros(len(ids), dtype=np.bool_)
        for number, message in enumerate(messages):
            if message["role"] == "assistant":
                answer = self.answer(messages[:number], messages[: number + 1], where)
                _check_prefix(answer.ids, ids, where)
                counts[: len(answer.ids)] |= answer.counted
        return Conversation(ids, counts)

    def answer(self, before: Sequence[dict[str, Any]], whole: Sequence[dict[str, Any]], where: str) -> Conversation:
        """Return the conversation ``whole``, of which what follows ``before`` and the prompt of an answer counts."""
        self._template(where)
        prompt = _ids(self._applied(before, where, add_generation_prompt=True)["input_ids"])
        ids = _ids(self._applied(whole, where)["input_ids"])
        _check_prefix(prompt, ids, where)
        return joined(prompt, ids[len(prompt) :])

    def _template(self, where: str) -> str:
        template = self._tokenizer.chat_template
        if not isinstance(template, str):
            raise BadInput(
                "the tokenizer has no chat template",
                where=str(self._folder),
                got=f"messages in {where}",
                hint="a folder with chat_template.jinja, or lines with prompt and completion as texts",
            )
        return template

    def _applied(self, messages: Sequence[dict[str, Any]], where: str, **options: bool) -> Any:
        try:
            return self._tokenizer.apply_chat_template(list(messages), tokenize=True, return_dict=True, **options)
        except Exception as error:  # a template is code of the folder: it may raise any exception
            raise BadInput("the chat template refuses the messages", where=where, got=_short(error)) from None


def _ids(values: object) -> Ids:
    return np.array(values, dtype=np.int64)


def _check_prefix(prompt: Ids, whole: Ids, where: str) -> None:
    if not np.array_equal(prompt, whole[: len(prompt)]):
        raise BadInput(
            "the chat template writes the messages before an answer in another way when the answer follows",
            where=where,
            hint="mark the assistant's text with {% generation %} in the template, or give prompt_ids and "
            "completion_ids in every line",
        )


def _short(error: Exception) -> str:
    return f"{type(error).__name__}: {error}".splitlines()[0][:200]
