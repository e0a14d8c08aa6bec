"""``memo-sim gpus``, and several clusters of ``what-if``: verdict, table, document, and the plan that is written."""

from __future__ import annotations

import json
from pathlib import Path

from memo_sim.contract.errors import UsageError
from tests.cli.commands import memo_sim
from tests.refusals import check_fields

TINY = ("gpus", "gpt-tiny", "--seq-len", "4k", "--cp", "1", "--dp", "1", "--recompute", "none", "--alpha", "0")


def test_the_answer_begins_with_how_many(tmp_path: Path) -> None:
    plan = tmp_path / "plan.json"
    done = memo_sim(
        *TINY, "--cluster", "a800,h100", "--within", "10m", "--price-per-gpu-hour", "a800=1,h100=9", "-o", plan
    )
    assert done.returncode == 0, done.stderr
    first, _, headers, *rows = done.stdout.splitlines()
    assert first.startswith("gpt-tiny, 4k tokens, 4 sequences a step within 600 s: 1 x a800 (1 node), step ")
    assert "price" in first
    assert headers.split()[:3] == ["kind", "GPUs", "nodes"]
    assert rows[0].startswith("a800     1      1  smallest that fits, smallest within the time, fewest GPU-hours")
    priced = memo_sim("what-if", "--cluster", "a800-1x1", "--plan", plan, "--json")
    document = json.loads(memo_sim(*TINY, "--cluster", "a800", "--json").stdout)
    assert document["schema"] == "memo.gpus/1"
    assert json.loads(priced.stdout)["best"]["step_s"] == document["chosen"]["best"]["step_s"]


def test_a_data_sheet_is_a_kind() -> None:
    sheet = "tflops=165,memory=24,pcie=4x16,devices=2,name=mine"
    done = memo_sim(*TINY, "--from-datasheet", sheet)
    assert done.stdout.startswith("WARNING: The profile mine is rough")
    assert "1 x mine (1 node)" in done.stdout


def test_nothing_that_is_enough_exits_with_4() -> None:
    arguments = (*TINY, "--cluster", "a800", "--device-memory-gib", "0.5", "--most-gpus", "2")
    done = memo_sim(*arguments)
    assert done.returncode == 4
    assert "no number up to 2 of a800 is enough for any plan" in done.stdout
    assert json.loads(memo_sim(*arguments, "--json").stdout)["chosen"] is None


def test_wrong_kinds_prices_and_durations_are_refused(tmp_path: Path) -> None:
    check_fields(memo_sim(*TINY, "--cluster", "a800,,h100").error, UsageError, got="'a800,,h100'")
    check_fields(memo_sim(*TINY, "--cluster", "a800,a800").error, UsageError, got="a800, a800")
    check_fields(memo_sim(*TINY, "--cluster", "a800x").error, UsageError, got="'a800x'", wanted="a800")
    check_fields(memo_sim(*TINY, "--within", "soon").error, UsageError, got="'soon'", hint="--within 10m")
    priced = memo_sim(*TINY, "--cluster", "a800", "--price-per-gpu-hour", "h100=2")
    check_fields(priced.error, UsageError, got="h100", wanted="a800")
    profile = tmp_path / "mine.json"
    assert memo_sim("datasheet", "tflops=165,memory=24,pcie=4x16", "-o", profile).returncode == 0
    same = memo_sim(*TINY, "--cluster", profile, "-o", profile)
    assert same.returncode == 2


SEVERAL = ("what-if", *TINY[1:], "--cluster", "a800-1x2,h100-1x2")


def test_several_clusters_are_ranked(tmp_path: Path) -> None:
    plan = tmp_path / "plan.json"
    done = memo_sim(*SEVERAL, "--price-per-gpu-hour", "a800=1,h100=90", "-o", plan)
    assert done.returncode == 0, done.stderr
    first, _, headers, best, other, _, kernels = done.stdout.splitlines()
    assert kernels.startswith("Kernels differ, ")
    assert first.startswith("gpt-tiny, 4k tokens: a800-1x2 is the cheapest of 2 clusters; a token costs ")
    assert "price/B tokens" in headers
    assert (best.split()[:2], other.split()[:2]) == (["1", "a800-1x2"], ["2", "h100-1x2"])
    assert json.loads(plan.read_text())["provenance"]["cluster"] == "a800-1x2"
    document = json.loads(memo_sim(*SEVERAL, "--json").stdout)
    assert (document["schema"], document["ranked_by"]) == ("memo.results/1", "tokens per second")
    alone = json.loads(memo_sim(*SEVERAL[:-1], "h100-1x2", "--json").stdout)
    assert alone in document["results"]


def test_a_data_sheet_stands_in_a_list_of_clusters() -> None:
    done = memo_sim(*SEVERAL[:-1], "a800-1x2,tflops=165 memory=24 pcie=4x16 devices=2")
    assert done.returncode == 0, done.stderr
    assert {line.split()[1] for line in done.stdout.splitlines()[-2:]} == {"a800-1x2", "datasheet-1x2"}


def test_what_several_clusters_cannot_have_is_refused() -> None:
    check_fields(memo_sim(*SEVERAL, "--pareto").error, UsageError, got="--pareto")
    twice = (*SEVERAL[:-1], "a800-1x2,a800-1x2")
    check_fields(memo_sim(*twice).error, UsageError, got="a800-1x2,a800-1x2")
    priced = memo_sim(*SEVERAL, "--price-per-gpu-hour", "h200=2")
    check_fields(priced.error, UsageError, got="h200", wanted="a800-1x2, h100-1x2")
    assert memo_sim(*SEVERAL, "--device-memory-gib", "0.4").returncode == 4
