"""``memo-sim sweep``: lists and files of questions, its files, its exit codes."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from memo_sim.answers.sweep_file import read_lines
from memo_sim.contract.errors import BadInput
from tests.cli.commands import Done, check_refused, memo_sim
from tests.refusals import check_fields

TINY = ("--cluster", "a800-1x2", "--seq-len", "1k", "--system", "full-recompute", "--tp", "2", "--jobs", "1")


def test_every_combination_is_asked_once(tmp_path: Path) -> None:
    out = ("-o", tmp_path / "s.jsonl", "--csv", tmp_path / "s.csv", "--plot", tmp_path / "s.svg")
    lists = ("--cluster", "a800-1x2,h100-1x2", "--seq-len", "1k, 2k", "--system", "full-recompute,memo")
    done = memo_sim("sweep", "gpt-tiny", "--jobs", "1", "--tp", "2", *lists, *out)
    assert (done.returncode, done.stderr) == (0, "")
    lines = read_lines(tmp_path / "s.jsonl")
    asked = [[line.question[name] for name in ("cluster", "system", "seq_len", "tp")] for line in lines]
    systems = ("full-recompute", "memo")
    assert asked == [[c, s, n, 2] for c in ("a800-1x2", "h100-1x2") for s in systems for n in ("1k", "2k")]
    assert done.stdout.startswith("8 questions: 8 fits; all with tp=2\n\nmodel ")
    assert len((tmp_path / "s.csv").read_text().splitlines()) == 9
    assert "<svg" in (tmp_path / "s.svg").read_text()
    printed = memo_sim("sweep", "gpt-tiny", "--tp", "2", *lists, "-o", tmp_path / "s.jsonl", "--json")
    assert printed.stdout.encode() == (tmp_path / "s.jsonl").read_bytes()  # nothing was asked again


def test_every_option_takes_several_values(tmp_path: Path) -> None:
    lists = ("--tp", "1,2", "--loss-chunk", "0,512", "--states", "fp32", "--safety-gib", "0.5", "--no-rounding-buffers")
    common = ("gpt-tiny", "--cluster", "a800-1x2", "--seq-len", "1k", "--system", "full-recompute", "--jobs", "1")
    done = memo_sim("sweep", *common, *lists, "-o", tmp_path / "s.jsonl")
    assert done.returncode == 0
    lines = read_lines(tmp_path / "s.jsonl")
    assert [(line.question["tp"], line.question["loss_chunk"]) for line in lines] == [
        (tp, chunk) for tp in (1, 2) for chunk in ("0", "512")
    ]
    assert {(line.best.layout.tp, line.status) for line in lines if line.best} == {(1, "fits"), (2, "fits")}
    for wrong in ("1,", "1,x", "0,1"):
        assert memo_sim("sweep", *common, "--tp", wrong, "-o", tmp_path / "t.jsonl").returncode == 2
    many = ",".join(map(str, range(1, 400)))
    too_many = memo_sim("sweep", *common, "--tp", many, "--cp", many, "-o", tmp_path / "t.jsonl")
    check_refused(too_many, 2, {"what": "too many combinations", "got": "159201 questions"})


def test_questions_of_a_file_are_asked(tmp_path: Path) -> None:
    asked = [
        {"model": "gpt-tiny", "cluster": "a800-1x2", "seq_len": 1024, "tp": 2, "system": "full-recompute"},
        {"model": "gpt-tiny", "cluster": "a800-1x2", "seq_len": "1m"},
    ]
    (tmp_path / "q.jsonl").write_text("\n\n".join(map(json.dumps, asked)))
    done = memo_sim("sweep", "--questions", tmp_path / "q.jsonl", "-o", tmp_path / "s.jsonl", "--jobs", "1")
    assert (done.returncode, done.stdout.splitlines()[0]) == (0, "2 questions: 1 fits, 1 does not fit")
    assert [line.question for line in read_lines(tmp_path / "s.jsonl")] == asked


def test_questions_that_fail_decide_the_exit_code(tmp_path: Path) -> None:
    done = memo_sim("sweep", "gpt-tiny", *TINY, "--dp", "3", "-o", tmp_path / "s.jsonl")
    assert done.returncode == 2
    assert "1 of 1 questions failed" in done.stderr
    assert "the pinned layout does not fill the cluster" in done.stdout


def refusal(*arguments: str | Path) -> Done:
    return memo_sim("sweep", *arguments)


def test_wrong_usage_is_refused_before_anything_is_asked(tmp_path: Path) -> None:
    out, questions = tmp_path / "s.jsonl", tmp_path / "q.jsonl"
    questions.write_text('{"model": "gpt-tiny", "cluster": "a800-1x2", "seq_len": "1k"}\n')
    cases: list[tuple[tuple[str | Path, ...], dict[str, str]]] = [
        (("gpt-tiny", "-o", out), {"what": "a sweep needs MODEL", "got": "no cluster"}),
        ((*TINY, "-o", out), {"what": "a sweep needs MODEL", "got": "no model"}),
        (("gpt-tiny,gpt-tinny", *TINY, "-o", out), {"got": "'gpt-tinny'", "where": "question 2"}),
        (("--questions", questions, "--tp", "2", "-o", out), {"got": "--tp", "what": "brings its own values"}),
        (("--questions", questions, "-o", questions), {"what": "would be overwritten"}),
        ((f"gpt-tiny,{questions}", *TINY, "-o", out, "--csv", questions), {"what": "would be overwritten"}),
        (("gpt-tiny", *TINY, "-o", out, "--csv", out), {"what": "two outputs have the same path"}),
        (("gpt-tiny", *TINY, "-o", out, "--plot", tmp_path / "s.txt"), {"what": "unknown picture format"}),
        (("gpt-tiny", *TINY, "-o", tmp_path / "none" / "s.jsonl"), {"what": "no such folder"}),
    ]
    for arguments, fields in cases:
        check_refused(refusal(*arguments), 2, dict(fields))
    assert not out.exists()


@pytest.mark.parametrize(
    ("text", "fields"),
    [
        ("", {"what": "no questions"}),
        ("[1]\n", {"where": "line 1"}),
        ('{"model": "gpt-tiny", "tpp": 1}\n', {"where": "line 1", "got": "'tpp'", "hint": "did you mean 'tp'?"}),
    ],
)
def test_a_wrong_file_of_questions_is_refused(text: str, fields: dict[str, str], tmp_path: Path) -> None:
    (tmp_path / "q.jsonl").write_text(text)
    done = refusal("--questions", tmp_path / "q.jsonl", "-o", tmp_path / "s.jsonl")
    assert (done.returncode, done.stdout) == (3, "")
    check_fields(done.error, BadInput, **fields)


def test_an_empty_name_in_a_list_is_refused(tmp_path: Path) -> None:
    asked = ("sweep", "gpt-tiny,", "--cluster", "a800-1x2", "--seq-len", "1k", "-o", tmp_path / "s.jsonl")
    check_refused(memo_sim(*asked), 2, {"where": "MODEL", "what": "an empty name in a list"})
