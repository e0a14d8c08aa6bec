"""A report is one file that loads nothing, whatever the names in it, and its timeline holds the whole step."""

from __future__ import annotations

import base64
import gzip
import hashlib
import re
from html.parser import HTMLParser
from itertools import pairwise

import msgspec
import numpy as np
import pytest

from memo_sim.contract.catalog import load_cluster
from memo_sim.contract.comparison import Comparison, Ratio, StepFigures
from memo_sim.contract.difference import Choice, Difference, Share, Side
from memo_sim.contract.errors import UsageError
from memo_sim.contract.plan import Decisions, Layout, Plan, PlanRow
from memo_sim.contract.requests import Requests
from memo_sim.contract.result import Result
from memo_sim.contract.trace import Trace
from memo_sim.contract.validation import CaseError, CasePrediction, CaseReport, Expectation, Validation
from memo_sim.program.arena.requests import requests_of
from memo_sim.program.lower import lower
from memo_sim.views.report.curves import _ticks
from memo_sim.views.report.difference import difference_page
from memo_sim.views.report.packed import packed
from memo_sim.views.report.page import Page, Paragraph, Section, Table, check_page, html
from memo_sim.views.report.run import run_page
from memo_sim.views.report.shares import shares_of
from memo_sim.views.report.validation import validation_page
from memo_sim.views.report.what_if import Best, run_commands, what_if_page
from memo_sim.views.step import Step
from tests.refusals import refused
from tests.views.conftest import decide

HOSTILE = '</script><script>alert(1)</script><img src=x onerror="alert(2)">\u202e&{{ 7 * 7 }}'
KINDS = {"f4": np.float32, "f8": np.float64, "u1": np.uint8, "u4": np.uint32}


class Unpacked:
    """What ``timeline.js`` makes of a page's columns."""

    def __init__(self, text: str) -> None:
        raw = gzip.decompress(base64.b64decode(text))
        length = int.from_bytes(raw[:4], "little")
        self.header = msgspec.json.decode(raw[4 : 4 + length])
        self.raw = raw[-(-(4 + length) // 8) * 8 :]

    def column(self, where: list) -> np.ndarray:
        kind, at, count = where
        return np.frombuffer(self.raw, KINDS[kind], count, at)


class Elements(HTMLParser):
    """All elements of a page with their attributes."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.found: list[tuple[str, dict[str, str | None]]] = []
        self.feed(page)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.found.append((tag, dict(attrs)))


@pytest.fixture(scope="module")
def trace(played) -> Trace:
    return played()


@pytest.fixture(scope="module")
def buffers() -> Requests:
    (program,) = lower(decide())
    return requests_of(program)


def what_if(
    name: str, trace: Trace, buffers: Requests | None = None, *, written: bool = True, command: str = ""
) -> str:
    """Return the page of an answer whose names are all ``name``, and whose plan is ``written`` to a file."""
    cluster, hardware = load_cluster("a800-1x8")
    decisions = decide()
    row = PlanRow(
        status="ok",
        system=name,
        mfu=0.5,
        tgs=100.0,
        step_s=trace.step_s,
        alpha=0.5,
        layout=decisions.layout,
        recompute="tokenwise",
        memory_policy="planned",
        states="fp32",
        micro_batch=1,
        peak_device_bytes=2**30,
        peak_host_bytes_per_node=0,
        stalls=[],
    )
    result = Result(
        model=name,
        cluster=name,
        seq_tokens=1 << 18,
        best=row,
        plans=[row],
        evaluated=1,
        pruned=0,
        warnings=[name],
        why=[name],
    )
    step = Step(name=name, trace=trace, buffers=buffers, capacity_bytes=80 * 2**30, reserve_bytes=2**30)
    best = Best(plan=Plan(decisions=decisions, program_sha256="0"), file=name if written else None, steps=[step])
    named = {"command": command or name, "created": "2026-01-01"}
    return html(what_if_page(result, cluster=cluster, hardware=hardware, best=best, **named))


def test_the_columns_hold_every_span_to_the_nanosecond(trace) -> None:
    unpacked = Unpacked(packed([Step(name="rank 0", trace=trace)]))
    (step,) = unpacked.header["steps"]
    gap, length, lane, place, work = (unpacked.column(step[n]) for n in ("gap", "length", "lane", "place", "work"))
    ended = dict.fromkeys(range(len(step["lanes"])), 0)
    starts, ids = [], []
    for i in range(len(gap)):
        starts.append(ended[int(lane[i])] + gap[i])
        ended[int(lane[i])] = starts[-1] + length[i]
        where, _, phase, _ = step["places"][place[i]]
        ids.append(f"{where}/{phase}/{step['works'][work[i]][0]}")

    assert ids == trace.spans.ids
    assert np.abs(np.array(starts) - np.array(trace.spans.start_s) * 1e9).max() <= 0.5
    assert [step["lanes"][n] for n in lane] == trace.spans.lanes
    assert [step["works"][n][1] for n in work] == trace.spans.ops


def test_live_buffers_add_up_to_the_memory_curve(trace, buffers) -> None:
    unpacked = Unpacked(packed([Step(name="rank 0", trace=trace, buffers=buffers)]))
    (step,) = unpacked.header["steps"]
    curve = sum(np.cumsum(unpacked.column(column)) for column in step["device"]["bytes"])
    live = step["buffers"]
    lower_, upper, size, instant = (unpacked.column(live[n]) for n in ("lower", "upper", "bytes", "instant"))
    totals = [size[(lower_ <= at) & (at < upper)].sum() for at in instant]

    assert len(instant) == len(curve)
    assert (np.array(totals) >= curve).all()  # the fixture's curve shows a kernel's start, not the fullest before it
    assert max(totals) == max(sum(v) for v in zip(*trace.device_memory.bytes_by_class.values(), strict=True))


def test_the_bars_add_up_to_the_step(trace) -> None:
    shares = shares_of(trace)

    assert shares.total_s == trace.step_s
    assert sum(share.seconds for share in shares.shares) == pytest.approx(trace.step_s, rel=0.01)
    assert {"attention", "linear"} <= {share.name for share in shares.shares}
    assert any(share.name.startswith("waits for ") for share in shares.shares)


def test_a_name_from_a_file_adds_no_element_and_runs_nothing(trace) -> None:
    plain, hostile = (Elements(what_if(name, trace)).found for name in ("gpt", HOSTILE))

    assert [tag for tag, _ in hostile] == [tag for tag, _ in plain]
    assert [sorted(attributes) for _, attributes in hostile] == [sorted(attributes) for _, attributes in plain]
    page = what_if(HOSTILE, trace)
    assert "\u202e" not in page
    assert "alert(1)" in page  # the name is shown, as text
    assert "{{ 7 * 7 }}" in page


def comparison(name: str, trace: Trace) -> Comparison:
    figures = StepFigures(
        step_s=trace.step_s, peak_device_bytes=2**30, moved_bytes=None, lanes={name: 1.0}, ops={name: 2.0}
    )
    ratio = Ratio(step_s=1.0, peak_device_bytes=1.0, moved_bytes={}, lanes={name: 1.0}, ops={name: 1.0})
    return Comparison(
        program_sha256="0",
        machine=name,
        predicted=figures,
        measured=figures,
        ratio=ratio,
        losses=[3.0, 2.5, 2.25],
        grad_norms=[1.0, 0.5, 0.5],
        steps_measured=3,
        step_s_by_rank=[1.0, 2.0],
        peak_device_bytes_by_rank=[1, 2],
    )


def difference(name: str) -> Difference:
    side = Side(
        name=name,
        kind="plan",
        origin="predicted",
        source=name,
        step_s=2.0,
        lanes={"compute": 1.0},
        peak_device_bytes=100,
        peak_by_class={name: 60, "state": 30},
    )
    share = Share(group=name, name=name, seconds=[2.0, 2.0], difference_s=[0.0, 1.0], of_difference=[None, 1.0])
    return Difference(
        verdict=[name],
        sides=[side, side],
        decisions=[Choice(option="--tp", values=[name, None])],
        detail="kinds",
        groups=[share],
        shares=[share] * 20,
        notes=[name],
    )


def validation(name: str) -> Validation:
    case = CaseReport(
        case=name,
        source=name,
        system=name,
        predicted=CasePrediction(status="ok", mfu=0.5),
        expected=Expectation(status="ok", mfu=0.4),
        error=CaseError(status=True, mfu=0.25),
        fitted=False,
        model=name,
    )
    return Validation(cases=[case])


def other_pages(name: str, trace: Trace) -> dict[str, str]:
    told = {"command": name, "created": name, "version": name}
    return {
        "run": html(run_page(comparison(name, trace), [trace, trace], title=name, **told)),
        "difference": html(difference_page(difference(name), **told)),
        "validation": html(validation_page(validation(name), {}, [], [(name, name)], **told)),
    }


def test_no_page_takes_a_name_for_an_element(trace) -> None:
    plain, hostile = other_pages("gpt", trace), other_pages(HOSTILE, trace)
    for kind, page in hostile.items():
        assert [t for t, _ in Elements(page).found] == [t for t, _ in Elements(plain[kind]).found], kind
        assert "\u202e" not in page


def test_pages_say_what_their_documents_say(trace) -> None:
    pages = other_pages("gpt", trace)

    assert "The measured step takes" in pages["run"]
    assert pages["run"].count("<polyline") == 2  # loss and gradient norm
    assert "1 (slowest)" in pages["run"]
    assert "Mean error of speed 25.0 %" in pages["validation"]
    assert "gpt: +25.0 %" in pages["validation"]  # a point's title
    assert "5 others" in pages["difference"]
    assert 'width="600.00"' in pages["difference"]  # 60 of the 100 bytes at the peak
    assert "not by class" in pages["difference"]


@pytest.mark.parametrize(
    ("low", "high", "texts"),
    [
        (0.0, 1.0, ["0.0", "0.2", "0.4", "0.6", "0.8", "1.0"]),
        (51.2, 53.9, ["51.5", "52.0", "52.5", "53.0", "53.5"]),
        (0, 110_000, ["0", "20,000", "40,000", "60,000", "80,000", "100,000"]),
    ],
)
def test_ticks_are_round_numbers(low, high, texts) -> None:
    assert [text for _, text in _ticks(low, high)] == texts


def test_a_page_refers_to_nothing_outside_and_allows_only_its_own_script(trace) -> None:
    page = what_if("gpt", trace)
    elements = Elements(page).found

    assert not [tag for tag, attributes in elements if {"src", "href", "action", "srcset"} & set(attributes)]
    assert not [tag for tag, _ in elements if tag in ("link", "iframe", "object", "embed", "base", "form")]
    assert not [a for _, a in elements if "style" in a or any(name.startswith("on") for name in a)]
    (policy,) = (a["content"] for tag, a in elements if a.get("http-equiv") == "Content-Security-Policy")
    (script,) = re.findall(r"<script>(.*?)</script>", page, re.DOTALL)
    (style,) = re.findall(r"<style>(.*?)</style>", page, re.DOTALL)
    for text in (script, style):
        assert f"'sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}'" in policy
    assert policy.startswith("default-src 'none'")
    assert "unsafe" not in policy


def test_equal_answers_give_equal_pages(trace, buffers) -> None:
    assert what_if("gpt", trace, buffers) == what_if("gpt", trace, buffers)


def test_tables_name_every_cell_for_narrow_screens() -> None:
    table = Table(["plan", "step"], [["a", "1 s"], ["b", None]], "lr", mark_first=True)
    page = html(Page(title="t", sections=[Section("s", [table, Paragraph("p")])]))

    assert page.count('data-label="plan"') == page.count('data-label="step"') == 2
    assert page.count('class="first"') == 1


def test_a_report_is_written_as_html_alone(tmp_path) -> None:
    check_page(tmp_path / "a.html")
    with refused(UsageError, what="a report is an HTML page", got="a.pdf"):
        check_page(tmp_path / "a.pdf")
    with refused(UsageError, where="a.html"):
        check_page(tmp_path / "missing" / "a.html")


@pytest.mark.parametrize(
    ("layout", "cluster", "wanted"),
    [
        (Layout(), "a800-1x1", "memo-exec run p.json"),
        (Layout(tp=4), "a800-1x8", "torchrun --nproc_per_node 4 -m memo_exec run p.json"),
        (Layout(tp=8, dp=2), "a800-2x8", "--nnodes 2 "),
    ],
)
def test_the_command_that_runs_a_plan(layout: Layout, cluster: str, wanted: str) -> None:
    decisions: Decisions = msgspec.structs.replace(decide(alpha=0), layout=layout, global_batch=layout.dp)
    lines = run_commands(Plan(decisions=decisions, program_sha256="0"), "p.json", load_cluster(cluster)[0])
    assert wanted in lines[-1]
    assert (lines[0] == "# on each of the 2 nodes") == (layout.devices > 8)


def test_what_a_page_says_to_type_can_be_typed(trace) -> None:
    assert "memo-exec doctor &#39;my plan.json&#39;\n" in what_if("my plan.json", trace)
    shell = what_if("x", trace, written=False, command="memo-sim what-if x")
    assert "<pre>memo-sim what-if x -o plan.json\n" in shell
    python = what_if("x", trace, written=False, command="memo_sim.what_if(model='x')")
    assert "<pre>memo_sim.what_if(" in python
    assert ").save(&#34;plan.json&#34;)\n" in python
    assert "-o plan.json" not in python


def test_the_longest_bar_is_as_wide_as_its_drawing(trace) -> None:
    rows = shares_of(trace).rows
    ends = [float(row["parts"][-1]["at"]) + float(row["parts"][-1]["width"]) for row in rows]
    assert max(ends) == pytest.approx(1000, abs=0.1)
    for row in rows:
        for a, b in pairwise(row["parts"]):
            assert float(b["at"]) == pytest.approx(float(a["at"]) + float(a["width"]), abs=0.02)
