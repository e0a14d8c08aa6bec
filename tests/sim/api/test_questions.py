"""Every command of ``memo-sim`` that answers a question has a function with a typed result, of the same document."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any, get_args

import pytest
from click.testing import CliRunner

import memo_sim as memo
from memo_sim.cli import cli
from memo_sim.commands.interchange import FROM, TO
from memo_sim.contract import codec
from memo_sim.contract.catalog import DATA, load_cluster
from memo_sim.contract.hardware import Hardware
from memo_sim.contract.interchange import FrameworkName, ReadFrameworkName
from memo_sim.contract.plan import Plan
from tests.cli.test_doctor_cli import NCCL_TESTS
from tests.refusals import check_fields
from tests.sim.observed.recorded import one_step

TINY: dict[str, Any] = {"cluster": "a800-1x2", "seq_len": "1k", "system": "full-recompute", "tp": 2}
SHORT: dict[str, Any] = {**TINY, "device_memory_gib": 1}
ASKED = ("gpt-tiny", "--cluster", "a800-1x2", "--seq-len", "1k", "--system", "full-recompute", "--tp", "2")
COMMAND = (
    "torchrun --nproc-per-node 2 pretrain_gpt.py --num-layers 2 --hidden-size 256 --num-attention-heads 4"
    " --seq-length 1024 --max-position-embeddings 1024 --micro-batch-size 1 --global-batch-size $BATCH --bf16"
    " --tensor-model-parallel-size 2 --vocab-size 1000 --save-interval 10"
)
ROOMS = {path.stem for path in Path(memo.__file__).parent.iterdir()}


def printed(*arguments: object) -> str:
    return CliRunner().invoke(cli, [str(argument) for argument in arguments]).stdout


@pytest.fixture(scope="module")
def answer() -> memo.WhatIfResult:
    return memo.what_if("gpt-tiny", **TINY)


@pytest.fixture(scope="module")
def plan(answer: memo.WhatIfResult, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("plan") / "tiny.json"
    answer.save(path)
    return path


def test_no_public_name_is_a_rooms() -> None:
    """An import of the room would replace the function."""
    assert not set(memo.__all__) & ROOMS


def test_numbers_of_gpus(tmp_path: Path) -> None:
    pinned: dict[str, Any] = {"seq_len": "1k", "most_gpus": 1, "recompute": "full", "tp": 1}
    found = memo.gpus("gpt-tiny", cluster=["a800", "h100"], **pinned)
    asked = ("--seq-len", "1k", "--cluster", "a800,h100", "--most-gpus", "1", "--recompute", "full", "--tp", "1")
    assert str(found) == printed("gpus", "gpt-tiny", *asked).rstrip("\n")
    assert found.chosen is not None
    assert found.at_chosen is not None
    assert found.best == found.at_chosen.best
    rows = {(row["kind"], row["devices"]): row for row in found.table()}
    assert [key for key, row in rows.items() if row["chosen"]] == [(found.chosen.kind, found.chosen.summary.devices)]
    found.save(tmp_path / "plan.json")
    assert codec.read(tmp_path / "plan.json", Plan).provenance.command.startswith("memo_sim.gpus(model='gpt-tiny'")
    found.save_report(tmp_path / "gpus.html", plan=tmp_path / "plan.json")
    page = (tmp_path / "gpus.html").read_text()
    assert "The chosen plan" in page
    assert "memo-exec verify" in page
    cheap = memo.gpus("gpt-tiny", cluster="a800", within=60, price_per_gpu_hour={"a800": 2}, **pinned)
    assert cheap.summary is not None
    assert cheap.summary.price_per_device_hour == 2
    none = memo.gpus("gpt-tiny", cluster="a800", device_memory_gib=0.5, **pinned)
    assert (none.chosen, none.best, none.table()) == (None, None, [])
    with pytest.raises(memo.Infeasible):
        none.plan  # noqa: B018


def test_several_clusters_are_ranked(tmp_path: Path) -> None:
    asked = ("what-if", *ASKED[:2], "a800-1x2,h100-1x2", *ASKED[3:])
    found = memo.what_if("gpt-tiny", **{**TINY, "cluster": ["a800-1x2", "h100-1x2"]})
    assert isinstance(found, memo.ClustersResult)
    assert str(found) == printed(*asked, "--report", tmp_path / "clusters.html").rstrip("\n")
    assert [row["cluster"] for row in found.table()] == [each.document.cluster for each in found.answers]
    assert found.best == found.answers[0].best
    assert "h100-1x2" in (tmp_path / "clusters.html").read_text()
    priced = memo.what_if(
        "gpt-tiny", **{**TINY, "cluster": ("a800-1x2", "h100-1x2"), "price_per_gpu_hour": {"a800": 1, "h100-1x2": 90}}
    )
    assert [each.document.cluster for each in priced.answers] == ["a800-1x2", "h100-1x2"]


def test_why_a_run_is_short(answer: memo.WhatIfResult, plan: Path, tmp_path: Path) -> None:
    found = memo.oom("gpt-tiny", **SHORT)
    shown = printed("oom", *ASKED, "--device-memory-gib", "1", "--report", tmp_path / "oom.html")
    assert str(found) == shown.rstrip("\n")
    assert "are missing on a device" in (tmp_path / "oom.html").read_text()
    assert not found.fits
    assert sum(int(row["bytes"] or 0) for row in found.table("classes")) == found.document.needed_bytes
    assert len(found.table("tensors")) == len(found.document.tensors)
    assert [row["options"] for row in found.table()][: len(found.ways)] == [way.options for way in found.ways]
    assert memo.oom(answer).fits
    assert memo.oom(plan=plan) == memo.oom(memo.simulate(plan))
    with pytest.raises(memo.UsageError) as refused:
        memo.oom(answer, seq_len="2k")  # type: ignore[call-overload]
    check_fields(refused.value, memo.UsageError, got="seq_len")


def test_what_binds(answer: memo.WhatIfResult, plan: Path) -> None:
    found = memo.explain(plan)
    assert found.verdict[0] in str(found)
    assert {row["resource"] for row in found.table()} == {each.resource for each in found.document.sensitivities}
    assert len(found.table("rivals")) == len(found.document.rivals)
    assert {row["memory"] for row in found.table("memories")} == {"device", "host"}
    ranked = memo.explain(answer)
    assert ranked.document.rivals_are == "ranked plans"
    assert ranked.document.uses == found.document.uses
    assert str(ranked).partition("\n")[0] == str(found).partition("\n")[0]
    with pytest.raises(memo.Infeasible):
        memo.explain(memo.what_if("gpt-tiny", **SHORT))


def test_a_plan_is_exported(answer: memo.WhatIfResult, plan: Path, tmp_path: Path) -> None:
    found = memo.export(answer, to="megatron-lm", directory=tmp_path / "made", launcher="slurm")
    assert printed("export", plan, "--to", "megatron-lm", "--launcher", "slurm", "-o", tmp_path / "same")
    assert found.directory == tmp_path / "made"
    for name, content in found.files.items():
        assert (tmp_path / "made" / name).read_bytes() == content
    script = "train.sh" if "train.sh" in found.files else next(name for name in found.files if name.endswith(".sh"))
    assert (tmp_path / "same" / script).read_text() == (tmp_path / "made" / script).read_text()
    assert found.fits
    assert [row["path"] for row in found.table()] == [lost.path for lost in found.lost]
    with pytest.raises(memo.UsageError, match="not empty"):
        memo.export(plan, to="megatron-lm", directory=tmp_path / "made")
    kept = memo.export(plan, to="megatron-lm", cluster="h100-1x2")
    assert (kept.directory, kept.document.cluster) == (None, "h100-1x2")
    assert get_args(FrameworkName) == TO
    assert get_args(ReadFrameworkName) == FROM


def test_a_job_is_read_and_priced(tmp_path: Path) -> None:
    script = tmp_path / "train.sh"
    script.write_text(COMMAND)
    asked: dict[str, Any] = {"set": {"BATCH": 4}, "cluster": "a800-1x2"}
    found = memo.import_job(script, **asked, search=False)
    shown = printed("import", script, "--set", "BATCH=4", "--cluster", "a800-1x2", "--no-search")
    assert str(found) == shown.rstrip("\n")
    as_text = memo.import_job(COMMAND, **asked)
    assert as_text.document.files == ["the command"]
    assert as_text.job == found.job
    rows = as_text.table()
    assert rows[0]["plan"] == "job"
    assert {row["plan"] for row in rows[1:]} == {"best of the same framework", "best of memo"}
    assert {row["read"] for row in found.table("options")} == {True, False}
    priced = memo.what_if(from_=script, **asked)
    assert isinstance(priced, memo.WhatIfResult)
    assert priced.best is not None
    assert found.job is not None
    assert priced.best.step_s == pytest.approx(found.job.step_s, rel=0.01)
    assert priced.given is not None
    assert priced.given.provenance.system == priced.question.system == "megatron-core"
    assert str(priced) == printed(
        "what-if", "--from", script, "--set", "BATCH=4", "--cluster", "a800-1x2", "--why"
    ).rstrip("\n")


def test_a_recorded_step_is_held_against_a_profile(tmp_path: Path) -> None:
    (tmp_path / "trace.json").write_bytes(one_step().raw())
    (tmp_path / "nccl.txt").write_text(NCCL_TESTS)
    found = memo.doctor(trace=tmp_path / "trace.json", nccl_tests=[tmp_path / "nccl.txt"])
    asked = ("doctor", "--trace", tmp_path / "trace.json", "--nccl-tests", tmp_path / "nccl.txt")
    assert str(found) == printed(*asked).rstrip("\n")
    assert json.loads(found.to_json()) == json.loads(printed(*asked, "--json"))
    assert [row["kind"] for row in found.table()] == [kind.kind for kind in found.document.kinds]
    found.save(tmp_path / "here.json")
    assert codec.read(tmp_path / "here.json", Hardware) == found.profile
    found.save_cluster(tmp_path / "mine.json", profile=tmp_path / "here.json")
    assert load_cluster(str(tmp_path / "mine.json"))[1] == found.profile
    links = memo.doctor(nccl_tests=tmp_path / "nccl.txt", cluster="a800-1x8")
    assert links.changes == ["all_reduce of 2 ranks: 2 sizes"]
    assert links != found
    assert "all_reduce" in links._repr_html_()
    with pytest.raises(memo.UsageError, match="no recorded step"):
        links.table()


def test_the_longest_sequence_has_a_page(tmp_path: Path) -> None:
    asked = ("longest", "gpt-tiny", "--cluster", "a800-1x2", "--step", "8k", "--tp", "2", "--system", "full-recompute")
    printed(*asked, "--report", tmp_path / "longest.html")
    page = (tmp_path / "longest.html").read_text()
    assert "16k tokens at most" in page
    assert "Lengths that were tried" in page
    memo.longest("gpt-tiny", cluster="a800-1x2", step="4k", max_step_s=1e-9).save_report(tmp_path / "none.html")
    assert "no length fits" in (tmp_path / "none.html").read_text()


def test_the_pareto_front_is_drawn(tmp_path: Path) -> None:
    asked = ("what-if", *ASKED[:-2], "--pareto", "--plot")
    printed(*asked, tmp_path / "front.svg")
    found = memo.what_if("gpt-tiny", **{**TINY, "tp": None}, pareto=True)
    picture = found.plot(of="front")
    assert picture.svg == (tmp_path / "front.svg").read_text()
    assert "Pareto front" in picture.svg
    assert all(f">{name}<" in picture.svg for name in {plan.system for plan in found.front})
    assert picture.svg != found.plot().svg


REFUSED: list[tuple[Callable[..., object], dict[str, Any], dict[str, Any]]] = [
    (memo.what_if, {"model": "gpt-tiny", "seq_len": "1k", "cluster": []}, {"what": "a list of clusters is empty"}),
    (memo.what_if, {"model": "gpt-tiny", **TINY, "cluster": ["a800-1x2", 8]}, {"wanted": "a list of them"}),
    (memo.what_if, {"model": "gpt-tiny", **TINY, "cluster": "a800-1x2,h100-1x2"}, {"hint": "['a800-1x2', 'h100-1x2']"}),
    (memo.what_if, {"model": "gpt-tiny", **TINY, "cluster": ["a800-1x2"] * 2}, {"what": "named twice"}),
    (memo.what_if, {"model": "gpt-tiny", **TINY, "cluster": ["a800-1x2"], "pareto": True}, {"got": "pareto"}),
    (memo.what_if, {"model": "gpt-tiny", **TINY, "price_per_gpu_hour": {"b200": 2}}, {"got": "b200"}),
    (memo.what_if, {"model": "gpt-tiny", **TINY, "set": {"N": 2}}, {"what": "set is about the files of from_"}),
    (memo.what_if, {"from_": COMMAND, "cluster": "a800-1x2", "tp": 2, "top": 3}, {"got": "tp, top"}),
    (memo.gpus, {"model": "gpt-tiny", "seq_len": "1k", "within": "soon"}, {"what": "not a duration"}),
    (memo.gpus, {"model": "gpt-tiny", "seq_len": "1k", "within": -1}, {"what": "not a value of within"}),
    (memo.gpus, {"model": "gpt-tiny", "seq_len": "1k", "most_gpus": 0}, {"wanted": "from 1"}),
    (memo.gpus, {"model": "gpt-tiny", "seq_len": "1k", "cluster": []}, {"what": "no kind of GPU is named"}),
    (memo.gpus, {"model": "gpt-tiny"}, {"what": "'seq_len'"}),
    (memo.oom, {}, {"got": "no model, no seq_len"}),
    (memo.oom, {"model": "gpt-7b", "plan": "plan.json"}, {"got": "model"}),
    (memo.explain, {"explained": 3}, {"wanted": "WhatIfResult"}),
    (memo.export, {"plan": "plan.json", "to": "megatron"}, {"hint": "did you mean 'megatron-lm'?"}),
    (memo.export, {"plan": "plan.json", "to": "trl", "directory": "no/such"}, {"what": "no such folder"}),
    (memo.import_job, {"files": COMMAND, "set": {"BATCH": [4]}}, {"wanted": 'set={"NAME"'}),
    (memo.import_job, {"files": COMMAND, "set": ["BATCH=4"]}, {"wanted": "a mapping"}),
    (memo.doctor, {}, {"what": "doctor needs something that was measured"}),
    (memo.doctor, {"trace": "trace.json", "set": {"N": 2}}, {"wanted": "config=FILE"}),
    (memo.doctor, {"trace": "trace.json", "search": False}, {"got": "framework, set or search"}),
]


@pytest.mark.parametrize(("function", "named", "fields"), REFUSED)
def test_what_is_wrong_is_refused(
    function: Callable[..., object], named: dict[str, Any], fields: dict[str, Any]
) -> None:
    with pytest.raises(memo.UsageError) as refused:
        function(**named)
    check_fields(refused.value, memo.UsageError, **fields)


def test_published_cases_are_predicted(tmp_path: Path) -> None:
    header, *rows = (DATA / "cases" / "memo-table3.csv").read_text().splitlines()
    cases = tmp_path / "some.csv"
    cases.write_text("\n".join([header, *(row for row in rows if row.startswith("memo-t3-7b-memo-4k,"))]) + "\n")
    found = memo.validate(cases, system="memo")
    (row,) = found.table()
    assert (row["case"], row["status"], row["measured_status"]) == ("memo-t3-7b-memo-4k", "ok", "ok")
    assert isinstance(row["mfu"], float)
    assert isinstance(row["measured_mfu"], float)
    assert row["error_mfu"] == pytest.approx(row["mfu"] / row["measured_mfu"] - 1, abs=1e-3)
    assert str(found) == printed("validate", cases).rstrip("\n")
    assert "memo-t3-7b-memo-4k" in found._repr_html_()
    found.save_report(tmp_path / "page.html")
    assert "Validation" in (tmp_path / "page.html").read_text()
    with pytest.raises(memo.UsageError, match="no such rows"):
        memo.validate(cases, system="fsdp")
