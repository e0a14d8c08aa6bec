"""Options of ``memo-sim`` that contradict each other or are dropped, and what refusals name."""

from __future__ import annotations

import pytest
from click.testing import CliRunner, Result

from memo_sim.cli import cli
from memo_sim.contract.errors import UsageError

SMALL = ("what-if", "gpt-tiny", "--cluster", "a800-1x2", "--seq-len", "4k")


def memo_sim(*arguments: str) -> Result:
    return CliRunner().invoke(cli, arguments)


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ((*SMALL, "--replay-allocator", "--memory-policy", "caching"), "--replay-allocator with memory policy caching"),
        ((*SMALL, "--replay-allocator", "--memory-policy", "eager"), "memory is not planned here"),
        ((*SMALL, "--replay-allocator", "--system", "megatron-lm"), "--memory-policy planned"),
        ((*SMALL, "--loss-chunk", "-1"), "a whole number from 0 to 1024m"),
        ((*SMALL[:-1], "0"), "a whole number from 1 to 1024m"),
        (("figure", "tabel3"), "did you mean 'table3'?"),
        (("figure", "nosuch"), "metp-7, table3, table4, table5"),
        (("schema", "nosuch"), "figure, cases"),
    ],
)
def test_what_cannot_be_asked_is_said(arguments: tuple[str, ...], said: str) -> None:
    refused = memo_sim(*arguments).exception
    assert isinstance(refused, UsageError)
    assert said in str(refused)


@pytest.mark.parametrize("command", ["what-if", "longest", "plan-memory"])
def test_help_names_every_kind_of_picture(command: str) -> None:
    assert ".png, .svg, .pdf" in " ".join(memo_sim(command, "--help").output.split())


def test_an_overlap_that_nothing_has_is_said() -> None:
    alone = memo_sim(*SMALL, "--tp", "2", "--overlap", "both", "--alpha", "0", "--recompute", "none")
    assert "Overlap both is replaced by none: no two ranks hold the same parameters" in alone.output
    shared = memo_sim(*SMALL, "--cp", "2", "--overlap", "both", "--alpha", "0", "--recompute", "none")
    assert shared.exit_code == 0
    assert "Overlap both" not in shared.output


def test_the_line_on_alpha_says_of_which_plan_it_is() -> None:
    """On a short sequence, keep is fastest; the linear program is about the best token-wise plan."""
    kept = memo_sim(*SMALL, "--tp", "2", "--system", "memo")
    assert "1*  memo: keep" in kept.output
    assert "\nAlpha of the best token-wise plan, which is not the best plan, on tp2+sp cp1 dp1" in kept.output
    own = memo_sim(*SMALL, "--tp", "2", "--system", "memo", "--recompute", "tokenwise")
    assert "\nAlpha on tp2+sp cp1 dp1" in own.output
