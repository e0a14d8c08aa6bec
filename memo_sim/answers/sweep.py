"""Answers many questions, each by a process of its own, and keeps every answer as soon as it is there.

The unit is one question: ``answer_to`` is a function that another process can load, and its argument holds everything
that the answer depends on, so that a worker on another machine needs no file of ours. Each process is an executor of
its own: when one dies, only the question that it had is asked once more.

    sweep(questions, path)                    processes of this machine
    sweep(questions, path, executor=...)      any ``concurrent.futures.Executor``: dask's, MPI's
"""

from __future__ import annotations

import hashlib
import itertools
import os
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, Executor, Future, ProcessPoolExecutor, wait
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, fields
from numbers import Integral, Real
from pathlib import Path
from typing import Any

import msgspec

import memo_sim
from memo_sim.answers.named_values import Values, check_names, question_without_batch
from memo_sim.answers.sweep_file import opened
from memo_sim.answers.what_if import what_if
from memo_sim.contract import codec
from memo_sim.contract.errors import BadInput, CannotRun, Infeasible, MemoError, UsageError, missing_package, shortage
from memo_sim.contract.files import read_regular
from memo_sim.contract.model import Model
from memo_sim.contract.progress import Progress
from memo_sim.contract.sweep import Failure, Named, SweepLine
from memo_sim.planning.default_batch import with_filling_batch
from memo_sim.planning.processes import ended_by_errors, process_executor, usable_cpus, without_main
from memo_sim.planning.question import Question

MOST_TRIES = 2
"""A question whose worker dies twice has failed."""
IN_FLIGHT = 256
"""Questions that an executor which is not ours holds at once; each takes 100 kB."""


@dataclass(frozen=True)
class Asked:
    """One question of a sweep, with the values that made it."""

    key: str
    named: dict[str, Named]
    question: Question
    fill: bool
    """Whether its batch is to be chosen where it is answered (``planning/default_batch.py``)."""


Unit = Callable[[Asked], SweepLine]


def grid(**values: Any) -> list[dict[str, Any]]:
    """Return a question for every combination of the values that are lists; the last name varies fastest.

    >>> grid(model="gpt-7b", cluster=["a800-1x8", "h100-1x8"], seq_len=["64k", "1m"])[1]
    {'model': 'gpt-7b', 'cluster': 'a800-1x8', 'seq_len': '1m'}
    """
    each = [value if isinstance(value, list) else [value] for value in values.values()]
    return [dict(zip(values, row, strict=True)) for row in itertools.product(*each)]


def read_questions(path: Path) -> list[dict[str, Any]]:
    """Return the questions of a JSON-lines file, one object a line; empty lines are left out.

    Raises:
        BadInput: when the file cannot be read, or a line is no object or has a name that no question knows.
    """
    found = []
    for number, text in enumerate(read_regular(path).splitlines(), start=1):
        if text.strip():
            where = f"{path}, line {number}"
            values = codec.decode_object(text, where=where)
            try:
                check_names(values)
            except UsageError as error:
                raise BadInput(error.what, where=where, got=error.got, hint=error.hint) from None
            found.append(values)
    if not found:
        raise BadInput(
            "the file has no questions", where=str(path), wanted="an object a line, with model, cluster, ..."
        )
    return found


def asked_by(values: Values) -> Asked:
    """Return a question of a sweep.

    Raises:
        UsageError: when a name or a value is wrong.
        BadInput: when a file cannot be read.
    """
    question, fill = question_without_batch(values)
    named = {name: _named(value) for name, value in values.items() if value is not None}
    return Asked(key_of(question, fill=fill), named, question, fill)


def _named(value: Any) -> Named:
    if isinstance(value, Model):
        return value.name
    return list(value) if isinstance(value, Sequence) and not isinstance(value, str) else _plain(value)


def _plain(value: Any) -> Named:
    match value:
        case bool() | str():
            return value
        case Integral():
            return int(value)
        case Real():
            return float(value)
    return str(os.fspath(value))


def key_of(question: Question, *, fill: bool) -> str:
    """Return the SHA-256 of everything that the answer to a question depends on, the version of memo included."""
    parts = {field.name: getattr(question, field.name) for field in fields(question) if field.init}
    text = msgspec.json.encode({**parts, "fill": fill, "memo_version": memo_sim.__version__}, order="sorted")
    return hashlib.sha256(text).hexdigest()


def answer_to(asked: Asked) -> SweepLine:
    """Return the answer to one question, as a line; whatever goes wrong is in the line."""
    begun = time.monotonic()
    try:
        question = with_filling_batch(asked.question) if asked.fill else asked.question
        result = what_if(question, top=1).result
    except Infeasible as error:
        return _line(asked, "does not fit", begun, why=[line.strip() for line in error.message().splitlines()])
    except Exception as error:
        return failed(asked, error, begun)
    return _line(
        asked,
        "fits" if result.best else "does not fit",
        begun,
        best=result.best,
        summary=result.summary,
        evaluated=result.evaluated,
        pruned=result.pruned,
        warnings=result.warnings,
        why=[] if result.best else result.why,
    )


def failed(asked: Asked, error: Exception, begun: float | None = None) -> SweepLine:
    """Return the line of a question that has no answer."""
    known = error if isinstance(error, MemoError) else shortage(error)
    message = known.message() if known else f"this is a bug: {error!r}"
    failure = Failure(exit_code=known.exit_code if known else MemoError.exit_code, message=message)
    return _line(asked, "failed", begun, failure=failure)


def _line(asked: Asked, status: str, begun: float | None, **parts: Any) -> SweepLine:
    question = asked.question
    return SweepLine(
        key=asked.key,
        question=asked.named,
        memo_version=memo_sim.__version__,
        model=question.model.name,
        cluster=question.cluster.name,
        system=question.system,
        seq_tokens=question.seq_tokens,
        status=status,  # type: ignore[arg-type]
        elapsed_s=0.0 if begun is None else time.monotonic() - begun,
        **parts,
    )


def sweep(
    questions: Iterable[Values],
    path: Path | None = None,
    *,
    executor: Executor | None = None,
    jobs: int | None = None,
    unit: Unit = answer_to,
    progress: Progress | None = None,
) -> list[SweepLine]:
    """Return a line for every question, in their order; those that ``path`` holds already are not asked again.

    A question that failed is asked again. ``jobs`` processes share the questions, by default one for each CPU that this
    process may use; with ``executor`` they are its workers instead.

    Raises:
        UsageError: when a value of a question is wrong (before anything is asked), or another sweep writes the file.
        BadInput: when a file cannot be read, or ``path`` holds something else than answers.
        CannotRun: when the executor takes no more questions.
        KeyboardInterrupt: when the user ends it; the file then holds every answer that was there.
    """
    if jobs is not None and jobs < 1:
        raise UsageError("not a number of processes", got=jobs, wanted="from 1")
    if not isinstance(questions, Iterable):
        raise UsageError("not questions", got=repr(questions), wanted="mappings: grid makes them")
    asked = list(_asked(questions))
    with nullcontext() if path is None else opened(path) as file:
        known = {line.key: line for line in file.lines} if file else {}
        found = {key: line for key, line in known.items() if line.status != "failed"}
        missing = list({each.key: each for each in asked if each.key not in found}.values())
        every = len({each.key for each in asked})
        done = every - len(missing)
        with _workers(executor, min(jobs or usable_cpus(), len(missing))) as workers:
            for line in _answers(missing, workers, unit):
                if file:
                    file.append(line)
                found[line.key] = line
                done += 1
                if progress:
                    progress(done, every)
    return [found[each.key] for each in asked]


def _asked(questions: Iterable[Values]) -> Iterator[Asked]:
    for number, values in enumerate(questions, start=1):
        if not isinstance(values, Mapping):
            raise UsageError(
                "not a question", where=f"question {number}", got=repr(values), wanted="a mapping: grid makes them"
            )
        try:
            yield asked_by(values)
        except MemoError as error:
            where = f"question {number}" + (f", {error.where}" if error.where else "")
            raise type(error)(error.what, where=where, got=error.got, wanted=error.wanted, hint=error.hint) from None


@dataclass
class _Worker:
    """An executor, and how many questions it holds at once; ``make`` makes another one in place of a broken one."""

    executor: Executor
    most: int
    make: Callable[[], Executor] | None = None
    held: int = 0

    def renew(self) -> bool:
        """Replace an executor whose process has died; return whether it can be."""
        if self.make is None:
            return False
        self.executor.shutdown(wait=False, cancel_futures=True)
        self.executor = self.make()
        return True


def _answers(missing: list[Asked], workers: list[_Worker], unit: Unit) -> Iterator[SweepLine]:
    """Yield the lines as they come."""
    waiting = deque(missing)
    tries: dict[str, int] = {}
    running: dict[Future[SweepLine], tuple[Asked, _Worker]] = {}
    while waiting or running:
        for worker in workers:
            while waiting and worker.held < worker.most:
                asked = waiting.popleft()
                tries[asked.key] = tries.get(asked.key, 0) + 1
                running[_submitted(worker, unit, asked)] = asked, worker
                worker.held += 1
        done = wait(running, return_when=FIRST_COMPLETED).done
        for future in [each for each in running if each in done]:
            asked, worker = running.pop(future)
            worker.held -= 1
            error = _lost(future)
            if error is None:
                yield future.result()
                continue
            worker.renew()
            if tries[asked.key] < MOST_TRIES:
                waiting.append(asked)
                continue
            hint = "its memory may not suffice: take fewer --jobs"
            yield failed(asked, CannotRun("the worker died twice", got=repr(error), hint=hint))


def _submitted(worker: _Worker, unit: Unit, asked: Asked) -> Future[SweepLine]:
    if worker.make is None:
        return _passed_on(worker, unit, asked)
    with without_main():
        return _passed_on(worker, unit, asked)


def _passed_on(worker: _Worker, unit: Unit, asked: Asked) -> Future[SweepLine]:
    try:
        return worker.executor.submit(unit, asked)
    except RuntimeError as error:  # broken, or shut down
        if not worker.renew():
            hint = "the file holds every answer so far; start again with a new executor"
            raise CannotRun("the executor takes no more questions", got=repr(error), hint=hint) from None
        return worker.executor.submit(unit, asked)


def _lost(future: Future[SweepLine]) -> BaseException | None:
    """Return why a worker gave no line; the unit itself never fails."""
    if future.cancelled():
        return CannotRun("the executor has cancelled the question")
    return future.exception()


@contextmanager
def _workers(executor: Executor | None, jobs: int) -> Iterator[list[_Worker]]:
    """Return the caller's executor, or processes that end with this block, at once when it ends with an error."""
    if executor is not None:
        yield [_Worker(executor, IN_FLIGHT)]
        return
    workers = [_Worker(_process(), 1, _process) for _ in range(jobs)]
    try:
        with ended_by_errors():
            yield workers
    finally:
        for worker in workers:
            worker.executor.shutdown(wait=True, cancel_futures=True)


def _process() -> ProcessPoolExecutor:
    """Return an executor of one process."""
    return process_executor(1, __name__)


@contextmanager
def dask_executor(address: str) -> Iterator[Executor]:
    """Return an executor on the workers of a dask scheduler; they need this version of memo.

    Raises:
        CannotRun: when no scheduler answers there, or dask.distributed is not installed.
    """
    try:
        from distributed import Client
    except ModuleNotFoundError as error:
        raise missing_package(error) or error from None

    try:
        client = Client(address, timeout=10)
    except (OSError, ValueError) as error:
        hint = "start one with: dask scheduler, and workers with: dask worker ADDRESS"
        raise CannotRun("no dask scheduler answers", where=address, got=str(error), hint=hint) from None
    with client:
        executor = client.get_executor()
        try:
            yield executor
        finally:  # what a sweep has not taken, after an interruption, is not waited for
            executor.shutdown(wait=False)
