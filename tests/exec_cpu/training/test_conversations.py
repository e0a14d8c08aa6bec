"""Conversations of a JSONL file: which tokens are targets, what is cut, and a run whose loss counts answers alone."""

from __future__ import annotations

import json
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from memo_exec.commands.run import run
from memo_exec.commands.run_options import RunOptions
from memo_exec.training import weights
from memo_exec.training.conversations import load_conversations
from memo_exec.verification.autograd_model import AutogradModel
from memo_sim.contract.documents import Documents
from memo_sim.contract.errors import BadInput, UsageError
from tests.exec_cpu.plans import byte_decisions, write_plan
from tests.exec_cpu.small import batch, decide, llama, play, scalars
from tests.refusals import refused

WORDS = {"<eos>": 0, "<unk>": 1, "user:": 2, "bot:": 3, "hello": 4, "how": 5, "fine": 6, "thanks": 7, "bye": 8}
CHAT = [
    {"role": "user", "content": "hello"},
    {"role": "assistant", "content": "how fine"},
    {"role": "user", "content": "thanks"},
    {"role": "assistant", "content": "bye"},
]


def tokenizer_in(folder: Path, template: str | None) -> Path:
    tokenizers = pytest.importorskip("tokenizers")
    transformers = pytest.importorskip("transformers")
    words = tokenizers.Tokenizer(tokenizers.models.WordLevel(WORDS, unk_token="<unk>"))
    words.pre_tokenizer = tokenizers.pre_tokenizers.WhitespaceSplit()
    fast = transformers.PreTrainedTokenizerFast(tokenizer_object=words, eos_token="<eos>", unk_token="<unk>")
    fast.chat_template = template
    fast.save_pretrained(str(folder))
    return folder


def lines_in(folder: Path, *lines: Any) -> Path:
    file = folder / "chat.jsonl"
    file.write_text("\n".join(line if isinstance(line, str) else json.dumps(line) for line in lines))
    return file


ROLE = "{{ 'bot' if m.role == 'assistant' else 'user' }}: "
TEMPLATES = {
    "by prefix": "{% for m in messages %}" + ROLE + "{{ m.content }} {% endfor %}"
    "{% if add_generation_prompt %}bot: {% endif %}",
    "marked": "{% for m in messages %}" + ROLE + "{% if m.role == 'assistant' %}"
    "{%- generation -%}{{ m.content }}{%- endgeneration %} {% else %}{{ m.content }} {% endif %}{% endfor %}",
}


@pytest.mark.parametrize("template", TEMPLATES.values(), ids=TEMPLATES)
def test_only_the_assistants_tokens_are_targets(tmp_path: Path, template: str) -> None:
    folder = tokenizer_in(tmp_path / "model", template)
    found = load_conversations(lines_in(tmp_path, {"messages": CHAT}), 16, 12, folder)
    drawn = found.batch(0, 1, 2, 12)
    assert drawn.ids[0].tolist() == [2, 4, 3, 5, 6, 2, 7, 3, 8, 0, 0, 0]
    none = -100
    assert drawn.labels[0].tolist() == [none, none, 5, 6, none, none, none, 8, none, none, none, none]
    assert np.array_equal(drawn.ids[0], drawn.ids[1])


def test_prompt_and_completion_as_texts_messages_or_tokens(tmp_path: Path) -> None:
    folder = tokenizer_in(tmp_path / "model", TEMPLATES["by prefix"])
    lines = (
        {"prompt": "hello how", "completion": "fine"},
        {"prompt": CHAT[:1], "completion": CHAT[1:2]},
        {"prompt_ids": [4, 5], "completion_ids": [6, 0]},
    )
    texts, messages, ids = load_conversations(lines_in(tmp_path, *lines), 16, 8, folder).items
    assert texts.ids.tolist() == ids.ids.tolist() == [4, 5, 6, 0]
    assert texts.counted.tolist() == ids.counted.tolist() == [False, False, True, True]
    assert (messages.ids.tolist(), messages.counted.tolist()) == ([2, 4, 3, 5, 6], [False] * 3 + [True] * 2)


def test_what_has_no_target_is_left_out_and_longer_ones_are_cut(tmp_path: Path) -> None:
    lines = [{"prompt_ids": [1] * count, "completion_ids": [2] * 4} for count in (1, 3, 8)]
    found = load_conversations(lines_in(tmp_path, *lines), 16, 4, None)
    assert [item.targets(4) for item in found.items] == [4, 2, 0]
    assert (
        "2 conversations of 4 tokens on average in 2 sequences, 75.0 % of the tokens are targets, 0.0 % are padding"
        in found.short_of(4)
    )
    assert "1 cut at 4 tokens" in found.short_of(4)
    assert "1 left out" in found.short_of(4)
    seen = [tuple(row) for step in (1, 2, 3) for row in found.batch(7, step, 2, 4).labels.tolist()]
    assert sorted(seen[:2]) == sorted(seen[2:4]) == sorted(seen[4:])  # every epoch has each once
    assert {row.count(-100) for row in map(list, seen)} == {0, 2}


BAD = {
    "no JSON": ("{", "no JSON"),
    "a list": ([1], "no JSON object"),
    "no conversation": ({"text": "hello"}, "needs a tokenizer"),
    "another id": ({"prompt_ids": [1], "completion_ids": [99]}, "outside the model's vocabulary"),
    "no numbers": ({"prompt_ids": [True], "completion_ids": [1]}, "whole numbers"),
    "a rollout": (
        {"prompt_ids": [1], "completion_ids": [2], "advantage": -1.0, "old_logprobs": [-1.0]},
        "make the plan with --objective grpo",
    ),
    "no target": ({"prompt_ids": [1, 2, 3], "completion_ids": []}, "no conversation has a target"),
}


@pytest.mark.parametrize(("line", "what"), BAD.values(), ids=BAD)
def test_lines_that_are_refused(tmp_path: Path, line: Any, what: str) -> None:
    with pytest.raises(BadInput) as error:
        load_conversations(lines_in(tmp_path, line), 16, 4, None)
    assert what in str(error.value)


def test_a_tokenizer_without_a_chat_template_is_refused(tmp_path: Path) -> None:
    folder = tokenizer_in(tmp_path / "model", None)
    with pytest.raises(BadInput, match="no chat template"):
        load_conversations(lines_in(tmp_path, {"messages": CHAT}), 16, 4, folder)


def test_a_run_on_conversations(tmp_path: Path) -> None:
    plan = write_plan(tmp_path / "plan.json", byte_decisions())
    lines = [{"prompt_ids": [65 + n], "completion_ids": [97 + n, 10]} for n in range(8)]
    notes: list[str] = []
    outcome = run(plan, RunOptions(steps=3, data=lines_in(tmp_path, *lines)), note=notes.append)
    assert outcome is not None
    assert any("8 conversations" in note for note in notes)


def test_a_tokenizer_is_for_conversations(tmp_path: Path) -> None:
    plan = write_plan(tmp_path / "plan.json", byte_decisions())
    with refused(UsageError, what="a tokenizer is for conversations"):
        run(plan, RunOptions(tokenizer=tmp_path))


def test_unequal_counts_of_micro_batches_weigh_every_target_alike() -> None:
    """The second micro-batch has a tenth of the targets: the mean is over targets, not over micro-batches."""
    decisions = decide(llama(), global_batch=2, micro_batch=1)
    batches = batch(decisions)
    batches[1][1][: int(0.9 * len(batches[1][1]))] = -100
    with play(decisions) as interpreter:
        reference = AutogradModel(decisions.model, weights.named_parameters(interpreter))
        record = interpreter.run_step(batches, scalars(batches, lr=0.0))
    logits = torch.cat([reference.logits(ids.view(1, -1)).flatten(0, 1) for ids, _ in batches])
    wanted = torch.nn.functional.cross_entropy(logits, torch.cat([labels for _, labels in batches]), ignore_index=-100)
    assert record.loss == pytest.approx(float(wanted.detach()), rel=1e-5)


def test_a_plan_with_documents_packs_conversations_that_see_none_of_each_other(tmp_path: Path) -> None:
    lines = [{"prompt_ids": [count], "completion_ids": [2] * count} for count in (1, 2, 3, 5)]
    found = load_conversations(lines_in(tmp_path, *lines), 16, 8, None, room=3)
    drawn = found.batch(0, 1, 4, 8)
    for ids, labels, ends in zip(drawn.ids, drawn.labels, drawn.documents, strict=True):
        assert ends[-1] == 8
        assert len(ends) <= 3
        for first, end in pairwise((0, *ends)):
            answers = ids[first] if ids[first] else 0  # a document begins with the number of its answer's tokens
            assert (labels[first:end] == 2).sum() == answers
            assert answers in (0, end - first - 1)
    assert "in 3 sequences" in found.short_of(8)  # of four conversations
    plan = write_plan(tmp_path / "plan.json", byte_decisions(documents=Documents(lengths=((64, 1),), most=4)))
    notes: list[str] = []
    assert run(plan, RunOptions(steps=1, data=tmp_path / "chat.jsonl"), note=notes.append) is not None
    assert any("the file's" in note for note in notes)
