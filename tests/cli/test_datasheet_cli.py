"""``memo-sim datasheet`` and ``--from-datasheet``: rough answers that say so, and files to keep and edit."""

from __future__ import annotations

import json
from pathlib import Path

from memo_sim.contract.datasheet import KEYS
from memo_sim.contract.errors import UsageError
from memo_sim.question_options import EXAMPLE
from tests.cli.commands import memo_sim
from tests.refusals import check_fields

TINY = ("gpt-tiny", "--seq-len", "4k", "--tp", "2", "--cp", "1", "--recompute", "none", "--alpha", "0")


def test_an_answer_from_a_data_sheet_is_marked_rough_and_has_no_interval() -> None:
    done = memo_sim("what-if", *TINY, "--from-datasheet", f"{EXAMPLE},devices=2")
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("WARNING: The profile datasheet is rough: made from a data sheet (165 TFLOP/s")
    assert "gpt-tiny on datasheet-1x2" in done.stdout
    assert "(no interval: the hardware profile names no GPU generation or is rough" in done.stdout


def test_a_written_profile_gives_the_same_answer(tmp_path: Path) -> None:
    sheet, profile = f"{EXAMPLE},devices=2", tmp_path / "mine.json"
    written = memo_sim("datasheet", sheet, "-o", profile)
    assert written.returncode == 0, written.stderr
    assert "products, fprop" in written.stdout
    ways = (("--from-datasheet", sheet), ("--cluster", profile))
    one, other = (json.loads(memo_sim("what-if", *TINY, *way, "--json").stdout) for way in ways)
    assert one["best"] == other["best"]
    assert not (tmp_path / "mine.cluster.json").exists()


def test_a_network_is_written_beside_the_profile(tmp_path: Path) -> None:
    sheet = f"{EXAMPLE},devices=2,nodes=2,network-gbps=100"
    assert memo_sim("datasheet", sheet, "-o", tmp_path / "mine.json").returncode == 0
    asked = ("what-if", "gpt-tiny", "--seq-len", "4k", "--tp", "2", "--cp", "2", "--recompute", "none", "--alpha", "0")
    done = memo_sim(*asked, "--cluster", tmp_path / "mine.cluster.json")
    assert done.returncode == 0, done.stderr
    assert "gpt-tiny on datasheet-2x2" in done.stdout


def test_a_cluster_file_without_efficiency_says_what_is_used(tmp_path: Path) -> None:
    sheet = f"{EXAMPLE},devices=2,nodes=2,network-gbps=100"
    asked = ("what-if", "gpt-tiny", "--seq-len", "4k", "--tp", "2", "--cp", "2", "--recompute", "none", "--alpha", "0")
    done = memo_sim(*asked, "--from-datasheet", sheet)
    assert "efficiency by size as of the clusters given by name (SimAI's rings)" in done.stdout
    why = memo_sim(*asked, "--from-datasheet", sheet, "--why").stdout
    assert "names no efficiency of its network by size" in why


def test_one_of_cluster_and_data_sheet_is_given() -> None:
    neither = memo_sim("what-if", *TINY)
    check_fields(neither.error, UsageError, got="neither", hint="--cluster a800-1x8, or --from-datasheet")
    both = memo_sim("longest", "gpt-tiny", "--cluster", "a800-1x2", "--from-datasheet", EXAMPLE)
    check_fields(both.error, UsageError, got="both")


def test_help_has_every_key() -> None:
    text = memo_sim("datasheet", "--help").stdout
    assert [key for key in KEYS if f"\n  {key} " not in text] == []


def test_rough_profiles_are_marked_in_lists() -> None:
    for what in ("hardware", "clusters"):
        lines = memo_sim("list", what).stdout.splitlines()
        assert {line.split("-")[0] for line in lines if "rough" in line} == {"l40s", "rtx4090", "rtxa6000"}
