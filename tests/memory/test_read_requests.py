"""Requests are read from every kind of file, by content; errors name the place in the file."""

from __future__ import annotations

import json
from pathlib import Path

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from memo_sim.contract import codec
from memo_sim.contract.catalog import load_model
from memo_sim.contract.errors import BadInput, UsageError
from memo_sim.contract.plan import Decisions, Layout, Plan
from memo_sim.contract.requests import Requests
from memo_sim.memory.allocation_log import read_allocation_log
from memo_sim.memory.read_requests import read_requests
from memo_sim.program.arena.requests import arena_requests, requests_of
from memo_sim.program.lower import lower, program_sha256
from tests.refusals import Expected, refused

LOG = "malloc a 100\nmalloc b 20\nfree a 100\n\n# again\nmalloc a 7\nfree b 20\nmalloc c 1\n"
TABLE = "name,size,id,lower,upper\nfirst,100,a,0,2\n,20,b,1,4\n"


def written(folder: Path, content: str | bytes, name: str = "input") -> str:
    path = folder / name
    path.write_bytes(content.encode() if isinstance(content, str) else content)
    return str(path)


def with_phase(*, lower: int, upper: int, **more: int) -> str:
    phase = {"name": "fwd", "kind": "fwd", "lower": lower, "upper": upper}
    columns = {"ids": ["a"], "lower": [0], "upper": [1], "size_bytes": [1]}
    return json.dumps({"schema": "memo.requests/1", "phases": [phase], **columns, **more})


def test_a_header_in_another_case_is_read(tmp_path: Path) -> None:
    source = read_requests(written(tmp_path, "ID,Lower,UPPER,Size,Name\na,0,1,5,x\n"))
    assert source.requests == Requests(ids=["a"], lower=[0], upper=[1], size_bytes=[5])
    assert source.header == ["ID", "Lower", "UPPER", "Size", "Name"]


def test_a_header_in_quotes_is_read(tmp_path: Path) -> None:
    source = read_requests(written(tmp_path, '"id","lower","upper","size"\n"a","0","1","5"\n'))
    assert source.requests == Requests(ids=["a"], lower=[0], upper=[1], size_bytes=[5])


def test_a_table_keeps_its_rows_and_own_columns(tmp_path: Path) -> None:
    source = read_requests(written(tmp_path, TABLE))
    assert source.kind == "csv"
    assert source.requests == Requests(ids=["a", "b"], lower=[0, 1], upper=[2, 4], size_bytes=[100, 20])
    assert source.header == ["name", "size", "id", "lower", "upper"]
    assert source.rows == [["first", "100", "a", "0", "2"], ["", "20", "b", "1", "4"]]


def test_alignments_of_a_table_are_used_and_fixed_offsets_are_ignored(tmp_path: Path) -> None:
    source = read_requests(
        written(tmp_path, "id,lower,upper,size,alignment,offset\na,0,1,5,4,0\nb,0,1,5,6,9\nc,0,1,5,,\n")
    )
    assert source.requests.alignment_bytes == 12
    assert any("'offset' is kept in the output" in note for note in source.notes)


def test_a_log_counts_lines_and_names_second_lives(tmp_path: Path) -> None:
    source = read_requests(written(tmp_path, LOG))
    requests = source.requests
    assert source.kind == "log"
    assert requests.ids == ["a", "b", "a#2", "c"]
    assert requests.lower == [0, 1, 3, 5]
    assert requests.upper == [2, 4, 6, 6]  # two are never freed: they live to the end
    assert requests.size_bytes == [100, 20, 7, 1]
    assert source.notes == ["2 of 4 buffers are never freed: they live to the end"]


def test_a_second_life_gets_a_unique_name() -> None:
    log = "malloc a#2 1\nmalloc a 1\nfree a 1\nmalloc a 1\n"
    assert read_allocation_log(log, "log").requests.ids == ["a#2", "a", "a#2'"]


@given(st.lists(st.tuples(st.booleans(), st.integers(0, 3), st.integers(0, 9)), max_size=40))
def test_a_logs_live_bytes_are_its_own_at_every_line(wishes: list[tuple[bool, int, int]]) -> None:
    """Compared with a plain walk of the log: after each line the same sizes are live."""
    live: dict[str, int] = {}
    lines, after = [], []
    for wants_malloc, name, size in wishes:
        key = f"t{name}"
        if wants_malloc and key not in live:
            live[key] = size
            lines.append(f"malloc {key} {size}")
        elif not wants_malloc and key in live:
            lines.append(f"free {key} {live.pop(key)}")
        else:
            continue
        after.append(sorted(live.values()))
    requests = read_allocation_log("\n".join(lines), "log").requests
    rows = list(zip(requests.lower, requests.upper, requests.size_bytes, strict=True))
    assert [sorted(s for low, up, s in rows if low <= t < up) for t in range(len(after))] == after


CALLS = ("malloc ID SIZE", "free ID SIZE")
DOCUMENTS = ("memo.plan/3", "memo.requests/1")
KINDS = (*DOCUMENTS, "id,lower,upper,size", *CALLS)


@pytest.mark.parametrize(
    ("content", "fields", "where"),
    [
        ("", {"got": None, "wanted": KINDS}, ""),
        ("\n \n", {"got": None, "wanted": KINDS}, ""),
        ("what is this", {"got": "'what is this'", "wanted": KINDS}, ""),
        (b"\xff\xfe\x00", {"got": "byte 0", "wanted": KINDS}, ""),
        ("malloc a 1\nfree b 1\n", {"got": "b", "hint": "never"}, "line 2"),
        ("malloc a 1\nfree a 1\nfree a 1\n", {"got": "a", "hint": "before"}, "line 3"),
        ("malloc a 1\n\nfree a 2\n", {"got": "2", "wanted": "1"}, "line 3"),
        ("malloc a 1\nmalloc a 1\n", {"got": "a", "wanted": "free"}, "line 2"),
        ("malloc a 1\nrealloc a 2\n", {"got": "'realloc a 2'", "wanted": CALLS}, "line 2"),
        ("malloc a -1\n", {"got": "'malloc a -1'", "wanted": CALLS}, "line 1"),
        ("malloc a 1e3\n", {"got": "'malloc a 1e3'", "wanted": CALLS}, "line 1"),
        ("id,lower,upper\na,0,1\n", {"got": "id, lower, upper", "wanted": "size", "hint": "'size'"}, "line 1"),
        ("id,lower,uper,size\na,0,1,1\n", {"got": "uper", "wanted": "upper", "hint": "'uper'"}, "line 1"),
        ("id,lower,upper,size,size\na,0,1,1,1\n", {"got": "size", "wanted": None}, "line 1"),
        ("id,lower,upper,size\na,0,1\n", {"got": "3 cells", "wanted": "4"}, "line 2"),
        ("id,lower,upper,size\na,0,1,1\n\na,1,2,1\n", {"got": "a", "hint": "line 2"}, "line 4"),
        ("id,lower,upper,size\na,2,2,1\n", {"got": "[2, 2)", "wanted": "lower < upper"}, "line 2"),
        ("id,lower,upper,size\na,0,1,many\n", {"got": "'many'", "wanted": "18 digits"}, "line 2, column size"),
        ("id,lower,upper,size\na,-1,1,1\n", {"got": "'-1'", "wanted": "18 digits"}, "line 2, column lower"),
        ("id,lower,upper,size\na,0,1.5,1\n", {"got": "'1.5'", "wanted": "18 digits"}, "line 2, column upper"),
        ('id,lower,upper,size\n"a,0,1,1\n', {"what": "CSV", "got": "end of data"}, "line 2"),
        ("id,lower,upper,size\n", {"got": None, "wanted": "at least one"}, ""),
        (f"id,lower,upper,size\n{'9' * 19},0,1,{'9' * 19}\n", {"got": "9" * 19, "wanted": "18 digits"}, "line 2"),
        (
            "\n".join(["id,lower,upper,size", *(f"{i},0,1,{10**18 - 1}" for i in range(5))]),
            {"what": "size", "wanted": f"less than {2**62}"},
            "",
        ),
        ("id,lower,upper,size\n ,0,1,1\n", {"what": "id", "got": None, "wanted": None}, "line 2"),
        # Alignments without a common factor multiply: 10^18 - 1 and 10^18 - 11.
        (
            "id,lower,upper,size,alignment\n" + "".join(f"{i},0,1,0,{10**18 - i}\n" for i in (1, 11)),
            {"what": "alignment", "got": str(10**18 - 11), "wanted": "powers of two"},
            "line 3, column alignment",
        ),
        (with_phase(lower=5, upper=2), {"what": "phase", "got": "[5, 2)"}, "$.phases"),
        (with_phase(lower=0, upper=2**62), {"got": str(2**62), "wanted": f"less than {2**62}"}, ""),
        (
            with_phase(lower=0, upper=1, alignment_bytes=2**70),
            {"got": str(2**70), "wanted": str(2**62)},
            "$.alignment_bytes",
        ),
        ("{", {"what": "JSON", "got": "early"}, ""),
        ("{}", {"wanted": DOCUMENTS}, "$.schema"),
        ('{"schema": "memo.trace/1"}', {"got": "memo.trace/1", "wanted": DOCUMENTS}, "$.schema"),
        (
            '{"schema": "memo.requests/1", "ids": ["a"], "lower": [1], "upper": [1], "size_bytes": [1]}',
            {"what": "a"},
            "$",
        ),
        (
            '{"schema": "memo.requests/1", "ids": ["a"], "lower": [0], "upper": [1], "size_bytes": [-1]}',
            {"got": "-1", "wanted": "0"},
            "$.size_bytes[0]",
        ),
        (
            '{"schema": "memo.requests/1", "ids": [], "lower": [], "upper": [], "size_bytes": []}',
            {"got": None, "wanted": "at least one"},
            "",
        ),
    ],
)
def test_malformed_input_is_named_with_its_place(
    tmp_path: Path, content: str | bytes, fields: dict[str, Expected], where: str
) -> None:
    path = written(tmp_path, content)
    with refused(BadInput, where=(path, where), **fields):
        read_requests(path)


def test_documents_are_recognised_by_their_schema(tmp_path: Path) -> None:
    decisions = Decisions(model=load_model("gpt-tiny"), seq_tokens=1024)
    programs = lower(decisions)
    plan = Plan(decisions=decisions, program_sha256=program_sha256(programs))
    requests = requests_of(programs[0])
    planned = arena_requests(programs[0], decisions)
    assert len(planned.ids) < len(requests.ids)  # without the buffers that libraries allocate outside of the arena
    for document, kind, wanted in ((plan, "plan", planned), (requests, "requests", requests)):
        source = read_requests(written(tmp_path, codec.encode(document), "misnamed.csv"))
        assert (source.kind, source.requests) == (kind, wanted)


def test_of_a_pipeline_the_stage_with_most_live_bytes_is_placed(tmp_path: Path) -> None:
    model = load_model("gpt-tiny")
    large = msgspec.structs.replace(model, vocab=16 * model.vocab)  # the last stage has the logits of all tokens
    decisions = Decisions(model=large, seq_tokens=8192, layout=Layout(pp=2), recompute="full")
    programs = lower(decisions)
    plan = Plan(decisions=decisions, program_sha256=program_sha256(programs))
    source = read_requests(written(tmp_path, codec.encode(plan)))
    assert source.requests == arena_requests(programs[1], decisions)
    (note,) = source.notes
    assert note.startswith("stage 2 of 2 is placed: it has most live bytes (stage 1: ")


def test_a_plan_with_another_programs_hash_is_refused(tmp_path: Path) -> None:
    decisions = Decisions(model=load_model("gpt-tiny"), seq_tokens=1024)
    plan = Plan(decisions=decisions, program_sha256=program_sha256(lower(decisions)))
    edited = msgspec.structs.replace(plan, decisions=msgspec.structs.replace(decisions, recompute="full"))
    given, found = plan.program_sha256, program_sha256(lower(edited.decisions))
    with refused(BadInput, where="$.program_sha256", got=given[:12], wanted=found[:12], hint="memo-sim what-if"):
        read_requests(written(tmp_path, codec.encode(edited)))


def test_only_a_snapshot_has_devices(tmp_path: Path) -> None:
    with refused(UsageError, got=("--device 0", "csv")):
        read_requests(written(tmp_path, TABLE), device=0)
    with refused(BadInput, where=str(tmp_path / "missing")):
        read_requests(str(tmp_path / "missing"))
