"""The longest sequence that fits: exact to one step, with its limit, and with the assumption checked."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import msgspec
import pytest

from memo_sim.answers.longest import _Scan, longest
from memo_sim.contract.catalog import load_cluster, load_model
from memo_sim.contract.errors import UsageError
from memo_sim.contract.longest import Tried
from memo_sim.contract.model import Model
from memo_sim.contract.plan import Plan
from memo_sim.planning.question import Pins, Question, with_memory
from memo_sim.planning.search import search

GIB = 2**30
STEP = 1 << 15


def ask(
    *,
    device_gib: int = 16,
    host_gib: int = 2000,
    system: str = "any",
    layers: int = 2,
    model: Model | None = None,
) -> Question:
    cluster, hardware = load_cluster("a800-1x8")
    cluster, hardware = with_memory(cluster, hardware, device_bytes=device_gib * GIB, host_bytes=host_gib * GIB)
    cluster = msgspec.structs.replace(cluster, devices_per_node=2)
    model = model or msgspec.structs.replace(load_model("gpt-7b"), layers=layers)
    return Question(model, cluster, hardware, STEP, system=system, pins=Pins(tp=2))


def test_the_longest_fits_and_the_next_multiples_do_not() -> None:
    asked = ask()
    found = longest(asked, step_tokens=STEP)
    document = found.document
    assert document.seq_tokens > 2 * STEP
    assert document.bound == "device memory"
    assert document.best is not None
    brute = [search(replace(asked, seq_tokens=n * STEP), prune=False).best for n in range(1, 10)]
    fitting = [n for n, best in enumerate(brute, start=1) if best is not None]
    assert document.seq_tokens == fitting[-1] * STEP < 9 * STEP
    assert document.best.step_s == pytest.approx(brute[fitting[-1] - 1].prediction.step_s)
    above = [t for t in document.tried if t.seq_tokens > document.seq_tokens]
    assert len(above) >= 3
    assert not any(t.fits for t in above)
    assert "assumes that a length fits if a longer one fits" in document.why[1]


@pytest.mark.parametrize(
    ("change", "bound"),
    [
        ({"system": "full-swap", "device_gib": 24, "host_gib": 12, "layers": 4}, "host memory"),
        ({"device_gib": 8}, "device memory"),
    ],
)
def test_the_limit_is_named(change: dict[str, object], bound: str) -> None:
    document = longest(ask(**change), step_tokens=STEP).document
    assert document.bound == bound
    assert bound in document.why[0]
    if document.seq_tokens == 0:
        assert document.best is None


@pytest.mark.slow
def test_a_time_limit_limits_the_length() -> None:
    asked = ask()
    free = longest(asked, step_tokens=STEP).document
    limit_s = free.best.step_s / 3
    document = longest(asked, step_tokens=STEP, most_step_s=limit_s).document
    assert document.bound == "time limit"
    assert 0 < document.seq_tokens < free.seq_tokens
    assert document.best.step_s <= limit_s
    after = search(replace(asked, seq_tokens=document.seq_tokens + STEP)).best
    assert after.prediction.step_s > limit_s


def test_positions_and_divisibility_limit_the_length() -> None:
    tiny = load_model("gpt-tiny")
    assert longest(ask(model=tiny), step_tokens=tiny.max_positions // 4).document.bound == "positions"
    odd = replace(ask(), pins=Pins(tp=1, dp=2))  # a global batch of one sequence cannot be divided by dp 2
    document = longest(odd, step_tokens=1024).document
    assert document.bound == "divisibility"
    assert document.seq_tokens == 0


def test_a_step_that_no_layout_divides_is_replaced_by_a_multiple() -> None:
    odd = replace(ask(), pins=Pins(tp=1, cp=2))
    document = longest(odd, step_tokens=10_001).document  # cp 2 needs a multiple of 4
    assert document.step_tokens == 4 * 10_001
    assert document.seq_tokens > 0
    assert document.seq_tokens % document.step_tokens == 0
    assert any("No layout divides 10001 tokens" in line for line in document.why)


def test_a_length_that_does_not_fit_below_the_longest_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    fits = {1, 2, 4, 7}  # 8 does not, 6 and 5 do not, 7 does

    def tried(self: _Scan, seq_tokens: int) -> Tried:
        return Tried(seq_tokens=seq_tokens, fits=seq_tokens // STEP in fits, bound="device memory")

    monkeypatch.setattr(_Scan, "_try", tried)
    monkeypatch.setattr(_Scan, "answer", lambda self, multiple: None if multiple not in fits else _Fits)
    document = longest(ask(), step_tokens=STEP).document
    assert document.seq_tokens == 7 * STEP
    assert any("does not hold everywhere: 160k, 192k" in line for line in document.why)


class _Fits:
    """Stands for an answer whose plan fits."""

    class result:  # noqa: N801 - the attribute's name
        best = None
        why = ()
        warnings = ()
        summary = None


def test_a_step_out_of_range_is_refused() -> None:
    with pytest.raises(UsageError):
        longest(ask(), step_tokens=0)


def test_the_command(tmp_path: Path) -> None:
    model = tmp_path / "model.json"
    model.write_bytes(msgspec.json.encode(msgspec.structs.replace(load_model("gpt-7b"), layers=2)))
    command = [sys.executable, "-m", "memo_sim", "longest", str(model), "--cluster", "a800-1x8", "--tp", "8", "--json"]
    knobs = ["--recompute", "full", "--device-memory-gib", "6", "--step", "256k"]
    done = subprocess.run(
        [*command, *knobs, "-o", str(tmp_path / "p.json")], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    document = json.loads(done.stdout)
    plan = msgspec.json.decode((tmp_path / "p.json").read_bytes(), type=Plan)
    assert document["schema"] == "memo.longest/2"
    assert document["seq_tokens"] == plan.decisions.seq_tokens > 0
    assert done.stderr == ""
    nothing = subprocess.run([*command, "--device-memory-gib", "2.5"], capture_output=True, text=True, check=False)
    assert nothing.returncode == 4
    assert json.loads(nothing.stdout)["seq_tokens"] == 0
