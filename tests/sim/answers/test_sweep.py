"""A sweep: one question a unit, resumable, with workers that die, files that are torn, and any executor."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from concurrent.futures import Executor, Future, ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import msgspec
import pytest

import memo_sim as memo
from memo_sim.answers import sweep as sweeping
from memo_sim.answers.sweep import Asked, answer_to, asked_by, sweep
from memo_sim.answers.sweep_file import encoded, opened, read_lines
from memo_sim.contract.errors import BadInput, CannotRun, UsageError
from memo_sim.contract.sweep import SweepLine
from memo_sim.views.sweep_chart import front, series
from memo_sim.views.sweep_table import sweep_csv, sweep_rows
from tests.refusals import refused

ROOT = Path(__file__).parents[3]
TINY: dict[str, Any] = {"model": "gpt-tiny", "cluster": "a800-1x2", "system": "full-recompute", "tp": 2}
LENGTHS = ["1k", "2k", "4k"]
QUESTIONS = memo.grid(**TINY, seq_len=LENGTHS)
SIX = memo.grid(**TINY, seq_len=LENGTHS, recompute_layers=["all", "every-2"])


class Here(Executor):
    """Answers at once, in this process, and remembers what it was asked."""

    def __init__(self) -> None:
        self.asked: list[Asked] = []

    def submit(self, fn: Any, /, *args: Any, **kwargs: Any) -> Future[Any]:
        self.asked.append(args[0])
        future: Future[Any] = Future()
        try:
            future.set_result(fn(*args, **kwargs))
        except Exception as error:
            future.set_exception(error)
        return future


@pytest.fixture(scope="module")
def lines() -> list[SweepLine]:
    return sweep(QUESTIONS, executor=Here())


def test_no_question_is_a_sweep_too() -> None:
    assert str(memo.sweep([])).startswith("0 questions\n")


def kills_its_process_first(asked: Asked, notes: Path) -> SweepLine:
    """Answer, but for the first time that the second question is asked: then the process dies."""
    note = notes / asked.key
    note.write_text(note.read_text() + "asked " if note.exists() else "asked ")
    if asked.question.seq_tokens == 2048 and note.read_text() == "asked ":
        os.kill(os.getpid(), signal.SIGKILL)
    return answer_to(asked)


def kills_its_process(asked: Asked) -> SweepLine:
    if asked.question.seq_tokens == 2048:
        os.kill(os.getpid(), signal.SIGKILL)
    return answer_to(asked)


def without_time(lines: list[SweepLine]) -> list[SweepLine]:
    return [msgspec.structs.replace(line, elapsed_s=0.0) for line in lines]


def test_answers_are_those_of_what_if_in_the_order_of_the_questions(lines: list[SweepLine]) -> None:
    assert [line.seq_tokens for line in lines] == [1024, 2048, 4096]
    for line, asked in zip(lines, QUESTIONS, strict=True):
        answer = memo.what_if(**asked, top=1)
        assert (line.best, line.summary) == (answer.best, answer.summary)
        assert (line.status, line.question, line.failure, line.why) == ("fits", asked, None, [])


def test_what_the_file_has_is_not_asked_again(tmp_path: Path, lines: list[SweepLine]) -> None:
    path, first, second = tmp_path / "s.jsonl", Here(), Here()
    sweep(QUESTIONS[:2], path, executor=first)
    found = sweep([*QUESTIONS, QUESTIONS[2]], path, executor=second)  # the last one stands there twice
    assert (len(first.asked), [each.question.seq_tokens for each in second.asked]) == (2, [4096])
    assert without_time(found) == without_time([*lines, lines[2]])
    assert without_time(read_lines(path)) == without_time(lines)
    assert [without_time(memo.load_sweep(path, path).lines)] == [without_time(lines)]


def test_the_key_holds_all_that_an_answer_depends_on(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = {**TINY, "seq_len": "1k"}
    key = asked_by(asked).key
    same = [{**asked, "seq_len": 1024}, {**asked, "states": "fp32"}, {**asked, "alpha": None}]
    others: list[dict[str, Any]] = [{"tp": 1}, {"seq_len": 2048}, {"system": "any"}, {"states": "bf16"}]
    others += [
        {"device_memory_gib": 40},
        {"cluster": "a100-1x2"},
        {"model": "llama-tiny"},
        {"alpha": 0.0},
        {"global_batch": 1},
    ]
    assert {asked_by(each).key for each in same} == {key}
    keys = [asked_by({**asked, **each}).key for each in others]
    monkeypatch.setattr(memo, "__version__", "9.9")
    assert len({key, *keys, asked_by(asked).key}) == len(others) + 2


def test_what_fits_nowhere_is_an_answer_and_a_contradiction_a_failure(tmp_path: Path) -> None:
    path = tmp_path / "s.jsonl"
    asked = [{**TINY, "seq_len": "64k"}, {**TINY, "seq_len": "1k", "device_memory_gib": 0.5}, {**TINY, "seq_len": "1k"}]
    asked[2]["tp"] = 3
    found = sweep(asked, path, executor=Here())
    assert [line.status for line in found] == ["does not fit", "does not fit", "failed"]
    assert "position table" in found[0].why[0]
    assert found[2].failure is not None
    assert (found[2].failure.exit_code, "fill the cluster" in found[2].failure.message) == (2, True)
    again = Here()
    sweep(asked, path, executor=again)  # failures are asked again
    assert [each.named["tp"] for each in again.asked] == [3]


def test_a_bug_is_a_failure_of_its_question(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(question: object, **_: object) -> None:
        raise ZeroDivisionError

    monkeypatch.setattr(sweeping, "what_if", broken)
    (found,) = sweep(QUESTIONS[:1], executor=Here())
    assert found.failure is not None
    assert (found.failure.exit_code, "this is a bug: ZeroDivisionError()" in found.failure.message) == (1, True)


def test_wrong_questions_are_refused_before_any_is_asked(tmp_path: Path) -> None:
    here = Here()
    with refused(UsageError, where="question 2", got="'tpp'", hint="did you mean 'tp'?"):
        sweep([QUESTIONS[0], {**QUESTIONS[0], "tpp": 1}], tmp_path / "s.jsonl", executor=here)
    with refused(UsageError, where="question 1", got="no seq_len"):
        sweep([TINY], executor=here)
    with refused(UsageError, what="number of processes"):
        sweep(QUESTIONS, jobs=0)
    assert here.asked == []
    assert not (tmp_path / "s.jsonl").exists()


def test_a_torn_line_is_removed_and_asked_again(tmp_path: Path, lines: list[SweepLine]) -> None:
    path = tmp_path / "s.jsonl"
    whole = b"".join(map(encoded, lines))
    for cut in (1, 20, 500):
        path.write_bytes(whole[: len(encoded(lines[0])) + cut])
        assert read_lines(path) == lines[:1]
        here = Here()
        assert without_time(sweep(QUESTIONS, path, executor=here)) == without_time(lines)
        assert (len(here.asked), path.read_bytes().count(b"\n")) == (2, 3)
        assert without_time(read_lines(path)) == without_time(lines)


@pytest.mark.parametrize(
    "content", [b'{"a": 1}', b"1,2\n3,4\n", b'{"schema":"memo.sweep/1","key":3}\n', b"\n", b"\xff"]
)
def test_a_file_of_something_else_is_left_as_it_is(content: bytes, tmp_path: Path) -> None:
    path = tmp_path / "s.jsonl"
    path.write_bytes(content)
    with refused(BadInput, where=str(path)):
        sweep(QUESTIONS, path, executor=Here())
    assert path.read_bytes() == content


def test_one_sweep_at_a_time_writes_a_file(tmp_path: Path) -> None:
    path = tmp_path / "s.jsonl"
    with opened(path), refused(UsageError, what="another sweep writes this file", where=str(path)):
        sweep(QUESTIONS, path, executor=Here())
    for wrong in (tmp_path, tmp_path / "none" / "s.jsonl"):
        with pytest.raises(UsageError):
            sweep(QUESTIONS, wrong, executor=Here())
    os.mkfifo(tmp_path / "fifo")
    with refused(UsageError, what="no ordinary file"):
        sweep(QUESTIONS, tmp_path / "fifo", executor=Here())


def test_a_worker_that_dies_costs_its_question_a_second_try(tmp_path: Path) -> None:
    notes = tmp_path / "notes"
    notes.mkdir()
    asked = [asked_by(each) for each in QUESTIONS]
    seen: list[tuple[int, int]] = []
    found = sweep(
        QUESTIONS,
        tmp_path / "s.jsonl",
        jobs=2,
        unit=partial(kills_its_process_first, notes=notes),
        progress=lambda done, total: seen.append((done, total)),
    )
    assert [line.status for line in found] == ["fits"] * 3
    assert [(notes / each.key).read_text().split() for each in asked] == [["asked"], ["asked"] * 2, ["asked"]]
    assert seen == [(1, 3), (2, 3), (3, 3)]
    assert len(read_lines(tmp_path / "s.jsonl")) == 3


@pytest.mark.slow
def test_a_question_that_kills_two_workers_has_failed(tmp_path: Path) -> None:
    found = sweep(QUESTIONS, jobs=1, unit=kills_its_process)
    assert [line.status for line in found] == ["fits", "failed", "fits"]
    failure = found[1].failure
    assert failure is not None
    assert (failure.exit_code, "the worker died twice" in failure.message) == (CannotRun.exit_code, True)


def test_any_executor_takes_the_questions() -> None:
    with ThreadPoolExecutor(2) as threads:
        assert [line.seq_tokens for line in sweep(QUESTIONS, executor=threads)] == [1024, 2048, 4096]
    with refused(CannotRun, what="takes no more questions"):
        sweep(QUESTIONS, executor=threads)  # it is shut down


def test_lines_of_a_picture_differ_in_length_alone(lines: list[SweepLine], tmp_path: Path) -> None:
    six = sweep(SIX, executor=Here())
    assert {name: len(mine) for name, mine in series(six).items()} == {
        "recompute_layers all": 3,
        "recompute_layers every-2": 3,
    }
    assert list(series(lines)) == ["gpt-tiny"]
    on_front = front(six)
    assert {line.seq_tokens for line in on_front} == {1024, 2048, 4096}
    for line in six:
        assert line.best is not None
        rivals = [each.best for each in on_front if each.seq_tokens == line.seq_tokens and each.best]
        assert any(
            (rival.tgs or 0) >= (line.best.tgs or 0) and rival.peak_device_bytes <= line.best.peak_device_bytes
            for rival in rivals
        )
    result = memo.SweepResult(six)
    result.plot(tmp_path / "s.svg")
    text = (tmp_path / "s.svg").read_text()
    assert "recompute_layers every-2" in text
    assert "no other question is faster" in text
    assert ">4k<" in text


def test_tables_hold_every_question_and_quote_formulas(lines: list[SweepLine], tmp_path: Path) -> None:
    hostile = replace_name(lines[0], "=cmd()<b>\x1b[2J")
    rows = sweep_rows([hostile, *lines[1:]])
    assert len({tuple(row) for row in rows}) == 1
    assert (rows[1]["seq_tokens"], rows[1]["asked_tp"], rows[1]["status"]) == (2048, 2, "fits")
    assert sweep_csv([hostile]).splitlines()[1].startswith("'=cmd()")
    shown = memo.SweepResult([hostile])
    assert "&lt;b&gt;" in shown._repr_html_()
    assert "\x1b" not in str(shown) + shown._repr_html_()
    result = memo.SweepResult(lines)
    result.save(tmp_path / "s.jsonl")
    result.save(tmp_path / "s.csv")
    assert memo.load_sweep(tmp_path / "s.jsonl").lines == lines
    assert len((tmp_path / "s.csv").read_text().splitlines()) == 4
    with pytest.raises(UsageError, match="not a kind of file"):
        result.save(tmp_path / "s.txt")


def replace_name(line: SweepLine, name: str) -> SweepLine:
    return msgspec.structs.replace(line, model=name)


def test_a_question_needs_no_file_where_it_is_answered(tmp_path: Path) -> None:
    model = tmp_path / "own.json"
    model.write_bytes((ROOT / "memo_sim/data/models/gpt-tiny.json").read_bytes())
    asked = asked_by({**TINY, "model": model, "seq_len": "1k"})
    model.unlink()
    assert answer_to(asked).status == "fits"
    assert asked.named["model"] == str(model)
    assert replace(asked, key="other").named == asked.named


@pytest.mark.slow
def test_a_script_needs_no_guard_around_a_sweep(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(f"import memo_sim as memo\nprint(memo.sweep({QUESTIONS!r}, 's.jsonl', jobs=2))\n")
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    begun = {"cwd": tmp_path, "env": environment}
    done = subprocess.run([sys.executable, script], **begun, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.startswith("3 questions: 3 fits")


@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc").is_dir(), reason="reads the processes of the system")
def test_an_interruption_leaves_whole_lines_and_no_process(tmp_path: Path) -> None:
    path = tmp_path / "s.jsonl"
    lengths = ",".join(str(1024 * n) for n in range(1, 17))
    command = [sys.executable, "-m", "memo_sim", "sweep", "gpt-tiny,llama-tiny", "--cluster", "a800-1x2,h100-1x2"]
    command += ["--seq-len", lengths, "--jobs", "2", "-o", str(path)]
    running = subprocess.Popen(command, env={**os.environ, "PYTHONPATH": str(ROOT)}, stderr=subprocess.PIPE, text=True)
    until = time.monotonic() + 60
    while not (path.exists() and path.stat().st_size) and time.monotonic() < until:
        time.sleep(0.02)
    children = children_of(running.pid)
    running.send_signal(signal.SIGINT)
    _, said = running.communicate(timeout=60)
    *progress, last = filter(None, said.splitlines())
    assert (running.returncode, last) == (130, "interrupted")
    assert all(each.startswith("sweep: ") for each in progress)  # printed after ten seconds, which a busy machine needs
    assert path.read_bytes().endswith(b"\n")
    assert 0 < len(read_lines(path)) < 64
    assert children
    while any(Path(f"/proc/{child}").exists() for child in children) and time.monotonic() < until:
        time.sleep(0.02)
    assert not [child for child in children if Path(f"/proc/{child}").exists()]


def children_of(process: int) -> list[int]:
    """Return the processes that a process has started, and theirs."""
    found = [int(n) for f in Path(f"/proc/{process}/task").glob("*/children") for n in f.read_text().split()]
    return [*found, *(grandchild for child in found for grandchild in children_of(child))]
