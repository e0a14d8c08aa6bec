"""``memo-sim`` as scripts use it: documents, exit codes, messages, and nothing half written."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from memo_sim.contract import codec
from memo_sim.contract.catalog import DATA
from memo_sim.contract.plan import Plan
from memo_sim.contract.result import Result
from memo_sim.contract.trace import Trace
from memo_sim.contract.validation import Validation
from memo_sim.program.lower import lower, program_sha256
from tests.cli.commands import Done, Named, check_refused, memo_sim, shell
from tests.refusals import Expected

SMALL = ["gpt-7b", "--cluster", "a800-1x8", "--seq-len", "64k", "--tp", "8", "--recompute", "full"]


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with everything what-if can write."""
    folder = tmp_path_factory.mktemp("plan")
    done = shell(
        *("memo_sim", "what-if"),
        *("gpt-7b", "--cluster", "a800-1x8", "--seq-len", "128k", "--system", "memo", "--tp", "4"),
        *("-o", "plan.json", "--plot", "timeline.png", "--trace", "trace.json", "--json"),
        cwd=folder,
    )
    assert done.returncode == 0, done.stderr
    (folder / "result.json").write_text(done.stdout)
    return folder


def test_the_result_is_one_document(written: Path) -> None:
    result = codec.read(written / "result.json", Result)
    assert result.best == result.plans[0]
    assert result.best is not None
    assert result.best.status == "ok"
    assert 0.2 < (result.best.mfu or 0) < 0.7
    assert result.evaluated + result.pruned >= len(result.plans)


def test_the_plan_pins_the_program_and_its_trace_lies_beside_it(written: Path) -> None:
    plan = codec.read(written / "plan.json", Plan)
    programs = lower(plan.decisions)
    assert plan.program_sha256 == program_sha256(programs)
    trace = codec.read(written / "plan.trace.json", Trace)
    assert trace.spans.ids == programs[0].ids()
    assert plan.prediction is not None
    assert trace.step_s == pytest.approx(plan.prediction.step_s)
    assert (written / "timeline.png").read_bytes().startswith(b"\x89PNG")
    events = json.loads((written / "trace.json").read_text())["traceEvents"]
    assert any(e["ph"] == "X" for e in events)


def test_a_plan_is_priced_elsewhere(written: Path) -> None:
    plan = str(written / "plan.json")
    here, there = (
        Result_of(memo_sim("what-if", "--plan", plan, "--cluster", cluster, "--json"))
        for cluster in ("a800-1x8", "a100-1x8")
    )
    assert here.plans[0].layout == there.plans[0].layout
    assert here.plans[0].step_s != there.plans[0].step_s


def Result_of(done: Done) -> Result:  # noqa: N802 - reads as a constructor
    return codec.decode(done.stdout.encode(), Result, where="standard output")


def test_an_alpha_that_is_no_row_block_says_what_it_becomes() -> None:
    done = memo_sim("what-if", *SMALL[:5], "--tp", "8", "--alpha", "0.3", "--why")
    assert done.returncode == 0
    assert "Alpha 0.3 is rounded to 0.297" in done.stdout


def test_a_plan_for_the_caching_allocator_says_what_that_reserves(written: Path, tmp_path: Path) -> None:
    document = json.loads((written / "plan.json").read_text())
    document["decisions"]["memory_policy"] = "caching"
    (tmp_path / "plan.json").write_text(json.dumps(document))
    again = str(tmp_path / "again.json")
    done = memo_sim("what-if", "--plan", str(tmp_path / "plan.json"), "--cluster", "a800-1x8", "-o", again)
    assert done.returncode == 0, done.stderr
    prediction = json.loads(Path(again).read_text())["prediction"]
    assert prediction["reserved_bytes"] > prediction["peak_device_bytes"] > 0
    assert document["prediction"]["reserved_bytes"] is None


def test_plans_of_the_caching_policy_are_searched_and_written_without_an_arena(tmp_path: Path) -> None:
    done = memo_sim("what-if", *SMALL, "--memory-policy", "caching", "--json", "-o", "plan.json", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    found = Result_of(done)
    assert {p.memory_policy for p in found.plans} == {"caching"}
    assert found.best is not None
    assert (found.best.reserved_bytes or 0) > found.best.peak_device_bytes
    plan = json.loads((tmp_path / "plan.json").read_text())
    assert plan["decisions"]["memory_policy"] == "caching"
    assert plan["placement_sha256"] == ""
    assert not (tmp_path / "plan.placement.json").exists()


def test_a_plan_that_does_not_fit_says_why(written: Path) -> None:
    small = ("--cluster", "a800-1x8", "--device-memory-gib", "8")
    picture = written / "none.png"
    done = memo_sim("what-if", "--plan", str(written / "plan.json"), *small, "--plot", str(picture))
    assert done.returncode == 4
    assert "device memory runs out" in done.stdout
    assert f"no plan for {picture}: not written" in done.stderr
    assert not picture.exists()


def test_a_plan_leaves_nothing_to_search(written: Path) -> None:
    done = memo_sim("what-if", "--plan", str(written / "plan.json"), "--cluster", "a800-1x8", "--tp", "8")
    check_refused(done, 2, {"what": "--plan", "got": "--tp"})


def test_a_question_without_any_layout_has_a_document_too() -> None:
    done = memo_sim("what-if", "gpt-7b", "--cluster", "a800-1x8", "--seq-len", "1000001", "--tp", "8", "--json")
    assert done.returncode == 4
    result = Result_of(done)
    assert result.best is None
    assert "no layout divides" in result.why[0]


def test_the_answer_is_short_unless_details_are_asked_for() -> None:
    done = memo_sim("what-if", *SMALL)
    assert done.returncode == 0, done.stderr
    head, fits, step, plan, *rest = done.stdout.splitlines()
    assert head == "gpt-7b on a800-1x8, 64k tokens"
    assert fits.startswith("FITS with ")
    assert step.startswith("Step ")
    assert plan.startswith("Plan: tp8+sp cp1 dp1 on 8 GPUs; full recompute, MLP in blocks; ")
    assert rest[0] == "Assumed:"
    assert "More: --why" in rest[-1]
    assert len(rest) < 14
    assert done.stderr == ""
    more = memo_sim("what-if", *SMALL, "--why", "--top", "1", "--price-per-gpu-hour", "3").stdout
    assert "price " in more
    assert "plans evaluated" in more or "plan evaluated" in more
    assert "Device memory peaks at" in more


def test_a_batch_that_is_not_given_fills_the_cluster() -> None:
    question = ("what-if", "llama3-8b", "--cluster", "h100-1x8", "--seq-len", "8k", "--recompute", "full", "--json")
    filled, pinned = (Result_of(memo_sim(*question, *more)) for more in ((), ("--global-batch", "2")))
    assert filled.summary is not None
    assert pinned.summary is not None
    assert filled.summary.tokens_per_step == 8 * 8192
    assert pinned.summary.tokens_per_step == 2 * 8192
    batch, given = (
        next(each.value for each in found.summary.assumptions if each.name == "batch") for found in (filled, pinned)
    )
    assert "; not given: enough for dp 8" in batch
    assert "not given" not in given


def test_fields_that_are_not_read_are_listed(tmp_path: Path) -> None:
    config = {"model_type": "llama", "hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 2}
    config |= {"num_attention_heads": 4, "vocab_size": 512, "quantization_config": {"bits": 4}, "bos_token_id": 1}
    (tmp_path / "config.json").write_text(json.dumps(config))
    done = memo_sim("what-if", "config.json", "--cluster", "a800-1x1", "--seq-len", "2k", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert "not read          of the model's file: quantization_config\n" in done.stdout


def test_nothing_fits_exits_4_and_prints_no_speed(tmp_path: Path) -> None:
    question = [*SMALL, "--device-memory-gib", "4"]
    done = memo_sim("what-if", *question, "--json", "-o", str(tmp_path / "plan.json"))
    assert done.returncode == 4
    result = Result_of(done)
    assert result.best is None
    assert result.plans[0].status == "gpu_oom"
    assert result.plans[0].step_s is result.plans[0].mfu is result.plans[0].tgs is None
    assert result.plans[0].shortfall_bytes > 0
    assert list(tmp_path.iterdir()) == []
    shown = memo_sim("what-if", *question)
    assert shown.returncode == 4
    assert "DOES NOT FIT: " in shown.stdout
    assert "\nWays out:\n  leave --recompute, --tp to the search\n" in shown.stdout
    assert "MFU" not in shown.stdout + shown.stderr


@pytest.mark.parametrize(
    ("arguments", "code", "named"),
    [
        (["what-if", *SMALL, "--alpha", "1.5"], 2, "--alpha"),
        (
            ["what-if", "gpt-7b", "--cluster", "a800-1x8", "--seq-len", "many"],
            *(2, {"got": "'many'", "wanted": "1024m", "hint": "--seq-len 64k"}),
        ),
        (
            ["what-if", "gpt-7c", "--cluster", "a800-1x8", "--seq-len", "64k"],
            *(2, {"got": "'gpt-7c'", "wanted": "gpt-65b", "hint": "'gpt-7b'"}),
        ),
        (
            ["what-if", "gpt-7b", "--cluster", "a801-1x8", "--seq-len", "64k"],
            *(2, {"got": "'a801-1x8'", "wanted": "h100-1x8", "hint": "'a800-1x8'"}),
        ),
        (["what-if", *SMALL, "--system", "memmo"], 2, {"got": "memmo", "wanted": "fsdp", "hint": "'memo'"}),
        (["what-if", *SMALL, "--cp", "8"], 2, {"got": "tp 8, cp 8", "wanted": "8 devices"}),
        (["what-if", *SMALL[:-1], "selective", "--alpha", "0.5"], 2, {"what": "selective", "got": "alpha 0.5"}),
        (["what-if", *SMALL[:-1], "none", "--mlp-chunk", "4k"], 2, {"got": "4096", "hint": "--recompute full"}),
        (
            ["what-if", "gpt-7b", "--cluster", "a800-1x8", "--seq-len", "65537", "--cp", "8"],
            *(4, {"where": "65537 tokens", "got": "seq_tokens", "hint": "--seq-len 65536"}),
        ),
        (["what-if", "--cluster", "a800-1x8"], 2, {"what": ("MODEL", "--seq-len", "--plan"), "hint": "--help"}),
        (["what-if", *SMALL, "-o", "/no/such/folder/plan.json"], 2, {"where": "/no/such/folder/plan.json"}),
        (["validate", "no-such-cases"], 2, {"got": "'no-such-cases'", "wanted": "memo-table5"}),
        (["schema", "plam"], 2, {"got": "'plam'", "wanted": "hardware", "hint": "'plan'"}),
        (["what-if", *SMALL, "--metp", "2"], 2, {"got": "tp 8, metp 2", "wanted": "8 devices"}),
        (["what-if", *SMALL, "--alpha", "nan"], 2, "--alpha"),
        (["what-if", *SMALL, "--tp", "4"], 2, "--tp"),
        (["what-if", *SMALL, "--compile", "--eager"], 2, "--compile"),
        (["plan-memory", "x.json", "--solver", "mip", "--solver", "greedy"], 2, "--solver"),
        (["what-if", *SMALL, "--eager", "--rowwise", "torch"], 2, {"got": "--eager, --rowwise torch"}),
        (["what-if", *SMALL, "--dtype", "fp16"], 4, {"got": "fp16", "wanted": "bf16", "hint": "--dtype"}),
        (
            ["what-if", *SMALL[:7], "--system", "full-swap", "--alpha", "0.5"],
            *(2, {"what": "full-swap", "got": "alpha 0.5", "hint": ("--alpha", "--system")}),
        ),
        (["what-if", *SMALL, "--device-memory-gib", "inf"], 2, "--device-memory-gib"),
        (["what-if", *SMALL, "-o", "x.json", "--trace", "x.trace.json"], 2, {"what": "-o x", "got": "x.trace.json"}),
        (["what-if", *SMALL, "-o", "x.json", "--plot", "x.doc"], 2, {"got": "x.doc", "wanted": ".png, .svg, .pdf"}),
        (["what-if", *SMALL, "--report", "x.pdf"], 2, {"got": "x.pdf", "wanted": ".html"}),
        (["what-if", *SMALL, "--report", "x.html", "--plot", "x.html"], 2, {}),
        (["what-if", *SMALL, "--full-trace"], 2, {"what": "--full-trace", "hint": "--trace FILE"}),
        (["what-if", *SMALL, "-o", "."], 2, {"what": "folder", "where": "."}),
        (["what-if", *SMALL, "-o", "plan.txt"], 2, {"got": "plan.txt", "wanted": ".json"}),
    ],
)
def test_wrong_usage_is_one_clear_message(arguments: list[str], code: int, named: Named) -> None:
    check_refused(memo_sim(*arguments), code, named)


def test_a_shell_gets_the_message_and_the_exit_code() -> None:
    done = shell("memo_sim", "what-if", *SMALL, "--cp", "8")
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr == memo_sim("what-if", *SMALL, "--cp", "8").stderr
    assert "got: tp 8, cp 8" in done.stderr


@pytest.mark.parametrize(
    ("content", "fields"),
    [
        ("", {"got": None, "wanted": "JSON"}),
        ('{"schema": "memo.model/1", "name"', {"what": "JSON", "got": "early"}),
        ('{"model_type": "mamba"}', {"where": "$.model_type", "got": "'mamba'", "wanted": "qwen3"}),
        ('{"schema": "memo.plan/3"}', {"where": "$.schema", "got": "memo.plan/3", "wanted": "memo.model/1"}),
    ],
)
def test_a_bad_model_file_exits_3(tmp_path: Path, content: str, fields: dict[str, Expected]) -> None:
    path = tmp_path / "model.json"
    path.write_text(content)
    done = memo_sim("what-if", str(path), "--cluster", "a800-1x8", "--seq-len", "64k")
    check_refused(done, 3, {"where": str(path)})
    check_refused(done, 3, fields)


def test_alpha_of_one_and_a_half_in_a_file_exits_3(written: Path, tmp_path: Path) -> None:
    document = json.loads((written / "plan.json").read_text())
    document["decisions"]["swapped_tokens"] = document["decisions"]["seq_tokens"] * 3
    path = tmp_path / "plan.json"
    path.write_text(json.dumps(document))
    done = memo_sim("what-if", "--plan", str(path), "--cluster", "a800-1x8")
    check_refused(done, 3, {"where": "plan.json: $.decisions", "what": "swapped_tokens"})


def test_lists_and_schemas() -> None:
    for what, expected in (
        ("models", "gpt-65b"),
        ("clusters", "a800-1x8"),
        ("systems", "memo"),
        ("cases", "memo-table5"),
        ("hardware", "a100-sxm4-80gb"),
    ):
        done = memo_sim("list", what)
        assert done.returncode == 0
        assert expected in done.stdout
    schema = json.loads(memo_sim("schema", "plan").stdout)
    assert "memo.plan/3" in json.dumps(schema)


def some_cases(folder: Path, source: str, *names: str) -> str:
    """Write a case file of some rows of a published one: how accurate they all are is another test's question."""
    header, *rows = (DATA / "cases" / f"{source}.csv").read_text().splitlines()
    chosen = [row for row in rows if row.split(",")[0] in names]
    assert len(chosen) == len(names)
    (folder / "some.csv").write_text("\n".join([header, *chosen]) + "\n")
    return "some.csv"


def test_validate_prints_a_document_and_honours_max_error(tmp_path: Path) -> None:
    names = ("memo-t3-7b-deepspeed-ulysses-4k", "memo-t3-7b-memo-4k")
    cases = some_cases(tmp_path, "memo-table3", *names)
    done = memo_sim("validate", cases, "--system", "memo", "--json", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    report = codec.decode(done.stdout.encode(), Validation, where="standard output")
    assert [case.case for case in report.cases] == list(names[1:])
    assert memo_sim("validate", cases, "--system", "memo", "--max-error", "0", cwd=tmp_path).returncode == 5
    table = memo_sim("validate", cases, cwd=tmp_path)
    assert all(name in table.stdout for name in names)


def test_validate_writes_a_page_and_fails_where_nothing_can_be_evaluated(tmp_path: Path) -> None:
    cases = some_cases(tmp_path, "memo-table5", "memo-t5-320k-a1000", "memo-t5-192k-a0500")
    done = memo_sim("validate", cases, "--report", "page.md", "--jobs", "2", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    page = (tmp_path / "page.md").read_text()
    assert page.startswith("# Validation")
    assert page.count("memo-t5-320k-a1000") == 1
    header, *rows = (DATA / "cases" / "memo-table5.csv").read_text().splitlines()
    (tmp_path / "none.csv").write_text("\n".join([header, rows[0].replace("a800-1x8", "z9-1x8")]) + "\n")
    none = memo_sim("validate", "none.csv", cwd=tmp_path)
    assert none.returncode == 4
    assert "z9-1x8" in none.stdout
    (tmp_path / "wrong.csv").write_text(header.replace("alpha", "alhpa").replace("note", "alhpa") + "\n")
    wrong = memo_sim("validate", "wrong.csv", cwd=tmp_path)
    assert wrong.stderr.count("alhpa") == 2  # as unknown, and as written twice
    check_refused(wrong, 3, {"where": "wrong.csv", "got": "alhpa", "hint": "'alpha'"})


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        ([], {"what": "--all", "hint": "memo-sim list cases"}),
        (["memo-table5", "--all"], {"what": "--all", "hint": "memo-sim list cases"}),
        (["memo-table5", "--accept"], {"wanted": "--all --accept"}),
        (["--all", "--accept", "--system", "memo"], {"wanted": ("--all --accept", "--source", "--system")}),
    ],
)
def test_what_validate_cannot_do_is_said(arguments: list[str], named: Named) -> None:
    check_refused(memo_sim("validate", *arguments), 2, named)


def test_the_columns_of_a_case_file_are_described() -> None:
    schema = json.loads(memo_sim("schema", "cases").stdout)
    assert set(schema["required"]) <= set(schema["properties"])
    assert {"flash", "plain", "flash1", "cudnn", ""} <= set(schema["properties"]["attention"]["enum"])
    assert schema["properties"]["libraries"]["enum"][-2:] == ["2026", ""]
    assert all(column["description"] for column in schema["properties"].values())


def test_equal_questions_give_equal_plans(tmp_path: Path) -> None:
    """In another process, too, where sets and hashes have another order."""
    names = ("first.json", "second.json")
    assert memo_sim("what-if", *SMALL, "-o", names[0], cwd=tmp_path).returncode == 0
    assert shell("memo_sim", "what-if", *SMALL, "-o", names[1], cwd=tmp_path).returncode == 0
    first, second = (json.loads((tmp_path / n).read_text()) for n in names)
    first.pop("provenance")
    second.pop("provenance")
    assert first == second
    assert sorted(p.name for p in tmp_path.iterdir()) == [
        "first.json",
        "first.placement.json",
        "first.trace.json",
        "second.json",
        "second.placement.json",
        "second.trace.json",
    ]


@pytest.mark.parametrize("kind", ["model", "cluster", "plan"])
def test_what_is_read_is_not_written_over(tmp_path: Path, kind: str) -> None:
    """Under another name, too: a link to the file is the file."""
    given, link = tmp_path / "given.json", tmp_path / "link.json"
    given.write_text("{}")
    link.symlink_to(given)
    arguments = {
        "model": [str(given), "--cluster", "a800-1x8", "--seq-len", "64k"],
        "cluster": ["gpt-7b", "--cluster", str(given), "--seq-len", "64k"],
        "plan": ["--plan", str(given), "--cluster", "a800-1x8"],
    }
    for option in ("-o", "--trace"):
        done = memo_sim("what-if", *arguments[kind], option, str(link))
        check_refused(done, 2, {"where": str(link), "hint": "another file"})
    assert given.read_text() == "{}"
