"""Tests the data, the learning-rate schedule and the training loop, and that training lowers the loss."""

import hashlib
import io
import math
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from memo_exec.commands.run import run
from memo_exec.commands.run_options import RunOptions
from memo_exec.kernels.loss import IGNORED
from memo_exec.training.dataset import IGNORED_LABEL, load_dataset
from memo_exec.training.hyperparameters import Hyperparameters
from memo_exec.training.loop import MOST_RECORDS
from memo_sim.contract.catalog import load_model
from memo_sim.contract.errors import BadInput, UsageError
from memo_sim.contract.plan import Decisions
from tests.exec_cpu.plans import byte_decisions, plan_of, predicted, write_plan
from tests.exec_cpu.small import CPU_KERNELS, gpt, llama
from tests.refusals import refused

TEXT = Path(__file__).parents[3] / "memo_exec/data/shakespeare.txt"


def test_the_shipped_text_is_the_one_its_readme_names() -> None:
    digest = hashlib.sha256(TEXT.read_bytes()).hexdigest()
    readme = TEXT.with_name("README").read_text()
    assert digest in readme
    assert "public domain" in readme
    assert load_dataset(None, 256).sha256 == digest


def test_batches_depend_on_seed_and_step_alone() -> None:
    data = load_dataset(None, 256)
    first, again = data.batch(1, 2, 3, 64), load_dataset(None, 256).batch(1, 2, 3, 64)
    assert np.array_equal(first.ids, again.ids)
    assert not np.array_equal(first.ids, data.batch(1, 3, 3, 64).ids)
    assert not np.array_equal(first.ids, data.batch(2, 2, 3, 64).ids)


def test_labels_are_the_next_tokens() -> None:
    batch = load_dataset(None, 256).batch(0, 1, 4, 64)
    assert np.array_equal(batch.labels[:, :-1], batch.ids[:, 1:])
    window = bytes(batch.ids[0].tolist()) + bytes([batch.labels[0, -1]])
    assert window in TEXT.read_bytes()


def test_padding_of_a_short_file_is_not_counted(tmp_path: Path) -> None:
    (tmp_path / "short.txt").write_text("abc")
    batch = load_dataset(tmp_path / "short.txt", 256).batch(0, 1, 1, 6)
    assert batch.ids.tolist() == [[97, 98, 99, 0, 0, 0]]
    assert batch.labels.tolist() == [[98, 99, -100, -100, -100, -100]]
    assert IGNORED_LABEL == IGNORED


def test_a_file_shorter_than_a_sequence_is_told_of(tmp_path: Path) -> None:
    (tmp_path / "two.txt").write_text("ab")
    text = load_dataset(tmp_path / "two.txt", 256).short_of(4096)
    assert "has 2 tokens, too few for a sequence of 4096" in text
    assert "0.02 % of the targets" in text
    assert load_dataset(tmp_path / "two.txt", 256).short_of(1) == ""


@pytest.mark.parametrize("name", ["t.npy", "t.bin", "t.ids"])
def test_token_files_by_suffix(tmp_path: Path, name: str) -> None:
    path, tokens = tmp_path / name, np.array([5, 300, 7, 40000], dtype=np.uint16)
    if name == "t.npy":
        np.save(path, tokens)
    elif name == "t.bin":
        tokens.tofile(path)
    else:
        path.write_text("5 300\n7\t40000\n")
    assert load_dataset(path, 50000).tokens.tolist() == [5, 300, 7, 40000]


def test_bin_is_wider_for_a_large_vocabulary(tmp_path: Path) -> None:
    np.array([5, 100000], dtype=np.uint32).tofile(tmp_path / "t.bin")
    assert load_dataset(tmp_path / "t.bin", 128256).tokens.tolist() == [5, 100000]


def _saved() -> bytes:
    file = io.BytesIO()
    np.save(file, np.arange(300) % 50)
    return file.getvalue()


def _zipped() -> bytes:
    file = io.BytesIO()
    np.savez(file, tokens=np.arange(5))
    return file.getvalue()


def _bad_files() -> dict[str, tuple[str, bytes]]:
    return {
        "text for a small vocabulary": ("a.txt", b"hello"),
        "an id outside": ("a.ids", b"1 2 97"),
        "a negative id": ("a.ids", b"1 -2"),
        "no number": ("a.ids", b"1 x"),
        "a number beyond 64 bits": ("a.ids", b"1 99999999999999999999999"),
        "one token": ("a.ids", b"1"),
        "empty": ("a.bin", b""),
        "an odd number of bytes": ("a.bin", b"abc"),
        "no array": ("a.npy", b"abc"),
        "an empty array file": ("a.npy", b""),
        "a zip of arrays": ("a.npy", _zipped()),
        "a header that is cut short": ("a.npy", _saved()[:60]),
        "a header of open brackets": ("a.npy", _saved()[:10] + b"{'descr': ((((((((" + _saved()[28:]),
        "a negative length": ("a.npy", _saved().replace(b"(300,)", b"(-30,)")),
        "a pickled object": ("a.npy", _saved().replace(b"<i8", b"|O8")),
    }


@pytest.mark.parametrize("case", _bad_files())
def test_bad_data_is_refused(tmp_path: Path, case: str) -> None:
    name, content = _bad_files()[case]
    (tmp_path / name).write_bytes(content)
    with refused(BadInput, where=str(tmp_path / name)):
        load_dataset(tmp_path / name, 97)


def test_data_that_is_not_there(tmp_path: Path) -> None:
    with refused(BadInput, where=str(tmp_path / "none.txt"), wanted=None):
        load_dataset(tmp_path / "none.txt", 256)


def test_schedule_warms_up_and_decays() -> None:
    chosen = Hyperparameters(learning_rate=1.0, warmup_steps=4, decay_steps=10, final_fraction=0.2)
    rates = [chosen.learning_rate_at(step) for step in range(1, 30)]
    assert rates[:4] == [0.25, 0.5, 0.75, 1.0]
    assert rates[8] == pytest.approx(0.6)
    assert rates[13:] == [pytest.approx(0.2)] * len(rates[13:])
    assert rates[3:] == sorted(rates[3:], reverse=True)
    assert Hyperparameters(learning_rate=0.5).learning_rate_at(1000) == 0.5


def test_a_run_reports_each_step_and_the_median(tmp_path: Path) -> None:
    lines = []
    plan = write_plan(tmp_path / "plan.json", prediction=predicted())
    outcome = run(plan, RunOptions(steps=7), tell=lambda figure: lines.append(figure.line()))
    assert outcome is not None
    comparison = outcome.comparison
    assert len(lines) == len(comparison.losses) == len(comparison.grad_norms) == 7
    assert lines[2].startswith("step     3  loss ")
    assert all(part in lines[2] for part in ("grad norm", "tokens/s", "MFU", "GiB", "stalls"))
    assert "MFU -" not in lines[2]
    assert comparison.steps_measured == 5
    assert comparison.measured.moved_bytes.d2h == comparison.measured.moved_bytes.h2d > 0
    assert comparison.ratio is not None
    assert comparison.ratio.step_s == pytest.approx(0.1 / comparison.measured.step_s)
    assert outcome.measured.spans.ids[0] == "step/embed/zero/grads"


def test_a_plan_without_a_prediction_is_measured_all_the_same(tmp_path: Path) -> None:
    lines = []
    plan = write_plan(tmp_path / "plan.json")
    outcome = run(plan, RunOptions(steps=1), tell=lambda figure: lines.append(figure.line()))
    assert outcome is not None
    assert outcome.comparison.predicted is None
    assert outcome.comparison.ratio is None
    assert "MFU -" in lines[0]


@pytest.mark.parametrize("model", [gpt(vocab=256), llama(vocab=256)], ids=["gpt", "llama"])
def test_micro_batches_do_not_change_the_losses(tmp_path: Path, model: Any) -> None:
    found = []
    for micro_batch in (1, 2, 4):
        decisions = byte_decisions(model=model, micro_batch=micro_batch, global_batch=4, swapped_tokens=128)
        outcome = run(write_plan(tmp_path / "plan.json", decisions), RunOptions(steps=3))
        assert outcome is not None
        found.append(outcome.comparison.losses)
    assert found[1] == pytest.approx(found[0], rel=1e-5)
    assert found[2] == pytest.approx(found[0], rel=1e-5)


def test_a_loss_that_is_no_number_ends_the_run(tmp_path: Path) -> None:
    options = RunOptions(steps=50, hyperparameters={"learning_rate": 1e30, "clip": 0.0})
    with refused(UsageError, where="step ", got="loss nan", hint="--lr"):
        run(write_plan(tmp_path / "plan.json"), options)


def test_records_are_few_however_long_a_run() -> None:
    assert MOST_RECORDS <= 64


@pytest.mark.slow
@pytest.mark.parametrize("name", ["gpt-tiny", "llama-tiny"])
def test_the_loss_falls_below_the_unigram_entropy(tmp_path: Path, name: str) -> None:
    counts = Counter(TEXT.read_bytes())
    total = sum(counts.values())
    entropy = -sum(n / total * math.log(n / total) for n in counts.values())
    decisions = Decisions(
        model=load_model(name),
        seq_tokens=256,
        micro_batch=4,
        global_batch=4,
        recompute="tokenwise",
        swapped_tokens=512,
        kernels=CPU_KERNELS,
        dtype="fp32",
    )
    assert plan_of(decisions).prediction is None
    outcome = run(write_plan(tmp_path / "plan.json", decisions), RunOptions(steps=200))  # default hyperparameters
    assert outcome is not None
    assert np.mean(outcome.comparison.losses[:5]) > entropy
    assert np.mean(outcome.comparison.losses[-20:]) < entropy - 0.2
