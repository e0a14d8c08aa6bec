"""Reads requests from a plan, a requests document, a CSV table, an allocator's log or a PyTorch memory snapshot.

The content decides the kind of file: a binary pickle, a JSON document (by its ``schema``), the header of a table, the
first word of a log. The file's name matters only for ``.toml``, which is read like JSON.
"""

from __future__ import annotations

import codecs
from collections.abc import Sequence

from memo_sim.contract import codec
from memo_sim.contract.diagnosis import explain_schema
from memo_sim.contract.errors import BadInput, UsageError
from memo_sim.contract.plain_pickle import is_pickle
from memo_sim.contract.plan import Plan
from memo_sim.contract.requests import Requests
from memo_sim.contract.units import format_bytes
from memo_sim.memory.allocation_log import is_allocation_log, read_allocation_log
from memo_sim.memory.problem import problem_of
from memo_sim.memory.request_table import is_request_table, read_request_table
from memo_sim.memory.snapshot import read_snapshot
from memo_sim.memory.source import Source, check_countable
from memo_sim.program.arena.requests import arena_requests
from memo_sim.program.ir.program import Program
from memo_sim.program.lower import check_pinned, lower

KINDS = (
    "a memo.plan/3 or memo.requests/1 document, a CSV id,lower,upper,size, "
    "a log of 'malloc ID SIZE' and 'free ID SIZE', or a PyTorch memory snapshot"
)


def read_requests(path: str, *, device: int | None = None) -> Source:
    """Return the requests in a file; ``device`` chooses one device of a snapshot.

    Raises:
        BadInput: with file and line, path or event, when the file cannot be read, has no known format, or contradicts
            itself.
        UsageError: when ``device`` is given and the file is not a snapshot, or does not have that device.
        Infeasible: when a plan's decisions do not divide its model or sequence.
    """
    source = _read(codec.read_raw(path), path, device)
    check_countable(source.requests, path)
    if device is not None and source.kind != "snapshot":
        raise UsageError("only a snapshot has devices", where=path, got=f"--device {device}, a {source.kind}")
    return source


def _read(raw: bytes, where: str, device: int | None) -> Source:
    if is_pickle(raw):
        return read_snapshot(raw, where, device)
    if raw.lstrip()[:1] == b"{":
        return _read_document(raw, where)
    try:
        text = raw.removeprefix(codecs.BOM_UTF8).decode()
    except UnicodeDecodeError as error:
        raise BadInput("neither text nor a pickle", where=where, got=f"byte {error.start}", wanted=KINDS) from None
    if not text.strip():
        raise BadInput("the file is empty", where=where, wanted=KINDS)
    if is_allocation_log(text):
        return read_allocation_log(text, where)
    if is_request_table(text):
        return read_request_table(text, where)
    first = next(line for line in text.splitlines() if line.strip())
    raise BadInput("unknown format of requests", where=where, got=repr(first[:80]), wanted=KINDS)


def _read_document(raw: bytes, where: str) -> Source:
    schema = codec.schema_of(raw, where=where)
    if schema == Requests.__struct_config__.tag:
        return Source(codec.decode(raw, Requests, where=where), "requests")
    if schema is None or not schema.startswith("memo.plan/"):
        raise explain_schema(schema, [Plan, Requests], where)
    plan = codec.decode(raw, Plan, where=where)
    with codec.of_file(where):
        programs = lower(plan.decisions)
    check_pinned(plan, programs, where=where)
    asked, notes = _fullest(programs, plan)
    predicted = plan.prediction.reserved_bytes if plan.prediction else None
    if plan.decisions.memory_policy != "eager":
        predicted = None
    elif predicted is None:
        notes.append(
            "an eager framework asks for more than the program: `memo-sim what-if --plan` says what it reserves"
        )
    return Source(asked, "plan", notes, reserved_eager_bytes=predicted)


def _fullest(programs: Sequence[Program], plan: Plan) -> tuple[Requests, list[str]]:
    """Return the requests of the pipeline stage with most live bytes, and a note that names it among several."""
    asked = [arena_requests(program, plan.decisions) for program in programs]
    if len(asked) == 1:
        return asked[0], []
    live = [problem.lower_bound * problem.unit_bytes for problem in map(problem_of, asked)]
    fullest = max(range(len(live)), key=live.__getitem__)
    listed = ", ".join(f"stage {number}: {format_bytes(size)}" for number, size in enumerate(live, start=1))
    return asked[fullest], [f"stage {fullest + 1} of {len(live)} is placed: it has most live bytes ({listed})"]
