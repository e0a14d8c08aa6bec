"""Options of ``memo-sim`` that contradict each other or are dropped, and what refusals name."""

from __future__ import annotations

from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from memo_sim.cli import cli
from memo_sim.contract.errors import UsageError
from tests.refusals import Expected, check_fields

SMALL = ("what-if", "gpt-tiny", "--cluster", "a800-1x2", "--seq-len", "4k")


def memo_sim(*arguments: str) -> Result:
    return CliRunner().invoke(cli, arguments)


@pytest.mark.parametrize(
    ("arguments", "fields"),
    [
        (
            (*SMALL, "--replay-allocator", "--memory-policy", "caching"),
            {"got": ("--replay-allocator", "caching"), "hint": "--memory-policy planned"},
        ),
        (
            (*SMALL, "--replay-allocator", "--memory-policy", "eager"),
            {"got": ("--replay-allocator", "eager"), "hint": "--memory-policy planned"},
        ),
        (
            (*SMALL, "--replay-allocator", "--system", "megatron-lm"),
            {"got": ("--replay-allocator", "eager"), "hint": "--memory-policy planned"},
        ),
        ((*SMALL, "--loss-chunk", "-1"), {"got": "'-1'", "wanted": "from 0 to 1024m", "hint": "--loss-chunk"}),
        ((*SMALL[:-1], "0"), {"got": "'0'", "wanted": "from 1 to 1024m", "hint": "--seq-len"}),
        (
            (*SMALL, "--mtbf-hours", "50000", "--checkpoint-s", "5"),
            {"got": "--mtbf-hours, --checkpoint-s", "wanted": "also --restart-s", "hint": "docs/goodput.md"},
        ),
        (("figure", "tabel3"), {"got": "'tabel3'", "hint": "'table3'"}),
        (("figure", "nosuch"), {"got": "'nosuch'", "wanted": "metp-7, table3, table4, table5", "hint": None}),
        (("schema", "nosuch"), {"got": "'nosuch'", "wanted": "job, cases", "hint": None}),
    ],
)
def test_what_cannot_be_asked_is_said(arguments: tuple[str, ...], fields: dict[str, Expected]) -> None:
    check_fields(memo_sim(*arguments).exception, UsageError, **fields)


def test_clusters_and_sweeps_have_columns_of_goodput(tmp_path: Path) -> None:
    said = ("--mtbf-hours", "100", "--checkpoint-gb-s", "1", "--restart-s", "60", "--system", "full-recompute")
    clusters = memo_sim("what-if", "gpt-tiny", "--cluster", "a800-1x2,h100-1x2", "--seq-len", "1k", *said)
    gpus = memo_sim("gpus", "gpt-tiny", "--cluster", "a800", "--seq-len", "1k", "--most-gpus", "2", *said)
    grid = memo_sim("sweep", *SMALL[1:], *said, "--jobs", "1", "-o", str(tmp_path / "s.jsonl"))
    for found in (clusters, gpus, grid):
        assert found.exit_code == 0, found.output
        assert "days/1e12 tokens" in found.output
        assert "99." in found.output


@pytest.mark.parametrize("command", ["what-if", "longest", "plan-memory"])
def test_help_names_every_kind_of_picture(command: str) -> None:
    assert ".png, .svg, .pdf" in " ".join(memo_sim(command, "--help").output.split())


def test_an_overlap_that_nothing_has_is_said() -> None:
    alone = memo_sim(*SMALL, "--tp", "2", "--overlap", "both", "--alpha", "0", "--recompute", "none", "--why")
    assert "Overlap both is replaced by none: no two ranks hold the same parameters" in alone.output
    shared = memo_sim(*SMALL, "--cp", "2", "--overlap", "both", "--alpha", "0", "--recompute", "none", "--why")
    assert shared.exit_code == 0
    assert "Overlap both" not in shared.output


def test_the_line_on_alpha_says_of_which_plan_it_is() -> None:
    """On a short sequence, keep is fastest; the linear program is about the best token-wise plan."""
    kept = memo_sim(*SMALL, "--tp", "2", "--system", "memo", "--top", "1", "--why")
    assert "1*  keep " in kept.output
    assert "\nAlpha of the best token-wise plan, which is not the best plan, on tp2+sp cp1 dp1" in kept.output
    own = memo_sim(*SMALL, "--tp", "2", "--system", "memo", "--recompute", "tokenwise", "--why")
    assert "\nAlpha on tp2+sp cp1 dp1" in own.output
