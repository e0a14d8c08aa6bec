"""Options of layouts and recompute on the command line: answers, refusals with their exit codes, and plans written."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from memo_exec.commands.run import run
from memo_exec.commands.run_options import RunOptions
from memo_sim.contract.errors import CannotRun
from tests.cli.commands import Named, check_refused, memo_sim

SHORT = ("--seq-len", "8k", "--global-batch", "4", "--recompute", "none", "--alpha", "0")
STAGES = "--schedule interleaved with --virtual-stages 2"
WITHOUT_LENGTH = ("what-if", "gpt-7b", "--cluster", "a800-1x8")
QUESTION = (*WITHOUT_LENGTH, "--seq-len", "64k")


@pytest.mark.parametrize(
    ("options", "layout", "recompute"),
    [
        (("--system", "fsdp", "--global-batch", "8", "--seq-len", "16k"), {"dp": 8, "zero": 3}, "full"),
        (("--ulysses", "8", "--zero", "3", "--recompute", "full"), {"ulysses": 8, "zero": 3}, "full"),
        (
            (
                "--tp",
                "2",
                "--dp",
                "4",
                "--global-batch",
                "4",
                "--zero",
                "3",
                "--zero-ranks",
                "2",
                "--recompute",
                "full",
            ),
            {"dp": 4, "zero": 3, "zero_ranks": 2},
            "full",
        ),
        (
            ("--tp", "4", "--dp", "2", "--global-batch", "2", "--recompute", "full", "--overlap", "both"),
            {"dp": 2},
            "full",
        ),
        (
            ("--metp", "8", "--no-overlap-exchanges", "--recompute", "tokenwise", "--alpha", "0.5"),
            {"metp": 8, "tp": 1, "cp": 1, "overlap_exchanges": False},
            "tokenwise",
        ),
        (
            ("--tp", "8", "--tp-overlap", "chunked", "--recompute", "tokenwise", "--alpha", "0.5"),
            {"tp": 8, "tp_overlap": "chunked"},
            "tokenwise",
        ),
        (("--tp", "2", "--cp", "4", "--zero", "2", "--recompute", "full"), {"tp": 2, "cp": 4, "zero": 2}, "full"),
        (
            (*SHORT, "--pp", "4", "--schedule", "zero-bubble"),
            {"pp": 4, "schedule": "zero-bubble"},
            "none",
        ),
        (
            (*SHORT, "--tp", "4", "--pp", "2", "--schedule", "interleaved", "--virtual-stages", "4"),
            {"tp": 4, "pp": 2, "schedule": "interleaved", "virtual_stages": 4},
            "none",
        ),
        (
            ("--tp", "4", "--cp", "2", "--cp-exchange", "all_gather", "--recompute", "selective", "--states", "bf16"),
            {"tp": 4, "cp": 2, "cp_exchange": "all_gather"},
            "selective",
        ),
    ],
)
def test_a_layout_is_planned_as_asked_for(
    options: tuple[str, ...], layout: dict[str, object], recompute: str, tmp_path: Path
) -> None:
    question = WITHOUT_LENGTH if "--seq-len" in options else QUESTION
    done = memo_sim(*question, *options, "--json", "-o", "plan.json", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    best = json.loads(done.stdout)["best"]
    assert best["recompute"] == recompute
    assert layout.items() <= best["layout"].items()
    written = json.loads((tmp_path / "plan.json").read_text())
    assert written["decisions"]["layout"] == best["layout"]
    again = memo_sim("what-if", "--plan", "plan.json", "--cluster", "a800-1x8", "--json", cwd=tmp_path)
    assert again.returncode == 0, again.stderr
    assert json.loads(again.stdout)["best"]["step_s"] == best["step_s"]
    with pytest.raises(CannotRun):
        run(tmp_path / "plan.json", RunOptions(steps=1))


@pytest.mark.parametrize(
    ("options", "code", "named"),
    [
        (("--zero", "4"), 2, "--zero"),
        (("--cp-exchange", "tree"), 2, "--cp-exchange"),
        (("--overlap", "all"), 2, "--overlap"),
        (("--system", "fsdp", "--ulysses", "2"), 2, {"what": "fsdp", "got": "ulysses 2", "wanted": "dp"}),
        (("--pp", "3"), 2, {"got": "pp 3", "wanted": "8 devices"}),
        (("--pp", "2", "--schedule", "dualpipe"), 2, "--schedule"),
        (("--pp", "2", "--virtual-stages", "2"), 2, {"got": "2 with the schedule 1f1b", "hint": STAGES}),
        (("--pp", "2", "--schedule", "interleaved"), 2, {"got": "1 with the schedule interleaved", "hint": STAGES}),
        (("--system", "any", "--schedule", "gpipe"), 2, {"got": ("gpipe", "pp not given"), "hint": "--pp 2"}),
        (
            ("--pp", "2", "--tp", "2", "--schedule", "zero-bubble", "--zero", "3"),
            *(4, {"where": "layout.zero", "got": "3 with the schedule zero-bubble", "wanted": "0 or 1"}),
        ),
        (("--zero", "0", "--zero-ranks", "4"), 2, {"got": ("zero_ranks 4", "zero 0"), "hint": "--zero 1"}),
        (("--tp", "1", "--cp", "8", "--zero-ranks", "3"), 4, {"where": "layout.zero_ranks", "got": "3 of 8 ranks"}),
        (("--ulysses", "3"), 2, {"got": "ulysses 3", "wanted": "8 devices"}),
        (("--system", "any", "--no-overlap-exchanges"), 2, {"got": "overlap_exchanges", "hint": "--metp 2"}),
        (("--tp", "1", "--tp-overlap", "chunked"), 2, {"got": "tp_overlap chunked, tp 1", "hint": "--tp 2"}),
        (("--metp", "8", "--tp-overlap", "chunked"), 4, {"where": "layout.metp", "got": "8", "wanted": "1"}),
        (("--tp-overlap", "all"), 2, "--tp-overlap"),
        (("--system", "any", "--keep-norms"), 2, {"got": "keep_norms", "hint": "--metp 2"}),
        (
            ("--metp", "8", "--recompute", "full", "--keep-norms"),
            *(4, {"where": "decisions.keep_norms", "got": "true with recompute full", "hint": "--keep-norms"}),
        ),
        (("--recompute", "selective", "--alpha", "0.5"), 2, {"what": "selective", "got": "alpha 0.5"}),
        (("--plan", "p.json", "--ulysses", "2"), 2, {"what": "--plan", "got": "--ulysses"}),
        (("--plan", "p.json", "--pareto"), 2, {"what": "--plan", "got": "--pareto"}),
        (
            ("--dp", "2", "--global-batch", "1"),
            *(4, {"got": "dp 2 needs a global batch of at least 2", "hint": "--global-batch 2,"}),
        ),
        (
            ("--dp", "2", "--micro-batch", "3", "--global-batch", "9"),
            *(4, {"got": "dp 2 with micro-batches of 3 needs a global batch that is a multiple of 6"}),
        ),
    ],
)
def test_what_cannot_be_asked_is_refused(options: tuple[str, ...], code: int, named: Named, tmp_path: Path) -> None:
    question = QUESTION
    if "--plan" in options:
        question = ("what-if", "--cluster", "a800-1x8")
        plan = memo_sim(*QUESTION, "--tp", "4", "--cp", "2", "--alpha", "0", "-o", "p.json", cwd=tmp_path)
        assert plan.returncode == 0, plan.stderr
    check_refused(memo_sim(*question, *options, cwd=tmp_path), code, named)


def test_degrees_that_divide_no_heads_are_told_with_the_reason() -> None:
    done = memo_sim("what-if", "gpt-13b", "--cluster", "a800-2x8", "--seq-len", "64k", "--ulysses", "16")
    check_refused(done, 4, {"what": "tp x ulysses = 16", "where": "heads", "got": "40", "hint": "10 or 8 or 5"})


def test_help_names_every_way_to_divide_work() -> None:
    text = memo_sim("what-if", "--help").stdout
    assert all(option in text for option in ("--tp", "--cp", "--cp-exchange", "--ulysses", "--dp", "--zero"))
    systems = memo_sim("list", "systems").stdout
    names = ("megatron-lm", "deepspeed-ulysses", "fsdp", "ring-attention", "every-layout")
    assert all(name in systems for name in names)


def test_a_figure_that_cannot_be_written_is_refused_before_it_is_computed(tmp_path: Path) -> None:
    for name in ("none/f.png", "f.txt"):
        done = memo_sim("figure", "11a", "-o", name, cwd=tmp_path)
        check_refused(done, 2, {"where": name})
        assert done.stderr == f"memo-sim: {done.error}\n"  # no progress was shown


def test_a_plan_on_a_larger_cluster_says_what_stays_idle(tmp_path: Path) -> None:
    """``--top`` may be given: it is no knob of the plan."""
    plan = memo_sim(*QUESTION, "--tp", "4", "--cp", "2", "--alpha", "0", "-o", "p.json", cwd=tmp_path)
    assert plan.returncode == 0, plan.stderr
    done = memo_sim("what-if", "--plan", "p.json", "--cluster", "a800-2x8", "--top", "3", "--why", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert "The plan uses 8 of the 16 devices of a800-2x8: 8 stay idle" in done.stdout
    assert "idle" not in memo_sim("what-if", "--plan", "p.json", "--cluster", "a800-1x8", "--why", cwd=tmp_path).stdout


def test_the_range_of_memory_can_be_read() -> None:
    text = memo_sim("what-if", "--help").stdout
    assert "[0.001<=x<=100000]" in text
    assert "e-0" not in text


def test_the_option_that_is_wrong_is_named() -> None:
    done = memo_sim("longest", "gpt-7b", "--cluster", "a800-1x8", "--step", "2000m")
    check_refused(done, 2, {"got": "'2000m'", "wanted": "1024m", "hint": "--step 64k"})
