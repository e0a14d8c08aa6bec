"""A recorded step held against a profile, and the profile that it corrects."""

from pathlib import Path

import pytest

from memo_sim.answers.doctor import diagnose
from memo_sim.contract.catalog import load_hardware
from memo_sim.contract.codec import encode, read, write
from memo_sim.contract.errors import BadInput, UsageError
from memo_sim.contract.hardware import Hardware
from memo_sim.contract.recorded_step import RecordedStep
from memo_sim.contract.requests import Requests
from memo_sim.memory.source import Source
from memo_sim.reasons.recorded_memory import memory_of
from memo_sim.reasons.recorded_step import length, union
from memo_sim.views.recorded_table import recorded_table
from tests.sim.observed.recorded import Trace, one_step


def saved(trace: Trace, folder: Path) -> str:
    path = folder / "trace.json"
    path.write_bytes(trace.raw())
    return str(path)


def job_in(trace: Trace, folder: Path) -> RecordedStep:
    job = diagnose(trace=saved(trace, folder)).job
    assert job is not None
    return job


def test_what_runs_beside_what(tmp_path: Path) -> None:
    job = job_in(one_step(), tmp_path)
    assert job.hardware == "a100-sxm4-80gb"
    assert job.step_s == pytest.approx(10e-3)
    assert job.compute_s == pytest.approx(3.5e-3)  # 200 to 1700 and 2000 to 4000
    assert job.collective_s == pytest.approx(1e-3)
    assert job.exposed_collective_s == pytest.approx(0.5e-3)  # 4000 to 4500
    assert job.exposed_copy_s == pytest.approx(0.9e-3)  # 4500 to 5400
    assert job.idle_s == pytest.approx(10e-3 - 4.9e-3)
    parts = job.compute_s + job.exposed_collective_s + job.exposed_copy_s + job.idle_s
    assert parts == pytest.approx(job.step_s)


def test_kinds_add_up_to_the_recorded_work(tmp_path: Path) -> None:
    job = job_in(one_step(), tmp_path)
    assert {kind.kind for kind in job.kinds} == {
        "product.fprop",
        "product.wgrad",
        "product.dgrad",
        "attention",
        "collective.all_reduce",
        "copy.d2h",
    }
    assert sum(kind.measured_s for kind in job.kinds) == pytest.approx(5.5e-3)
    assert all(kind.predicted_s > 0 and kind.compared_s == kind.measured_s for kind in job.kinds)
    assert "product.wgrad" in recorded_table(job)


def test_the_document_reads_back(tmp_path: Path) -> None:
    job = job_in(one_step(), tmp_path)
    path = tmp_path / "job.json"
    path.write_bytes(encode(job))
    assert read(path, RecordedStep) == job


def repeated(slower: float) -> Trace:
    """Return a step whose products take ``slower`` times 100 us each."""
    trace = Trace()
    trace.add("user_annotation", "ProfilerStep#1", 0.0, 100_000.0)
    for number in range(20):
        at = 1000.0 * number
        trace.launch("aten::mm", "gemm", at, (at, at + 100 * slower), shapes=[[8192, 4096], [4096, 4096]])
    return trace


@pytest.mark.parametrize("slower", [20.0, 1.0])
def test_a_corrected_profile_predicts_what_was_recorded(slower: float, tmp_path: Path) -> None:
    found = diagnose(trace=saved(repeated(slower), tmp_path))
    write(tmp_path / "profile.json", found.hardware)
    read(tmp_path / "profile.json", Hardware)
    again = diagnose(trace=saved(repeated(slower), tmp_path), cluster=str(tmp_path / "profile.json")).job
    assert again is not None
    (kind,) = again.kinds
    assert kind.predicted_s == pytest.approx(kind.measured_s, rel=1e-6)
    assert "product.bf16.fprop: times" in found.hardware.provenance["corrected"]


def test_few_calls_correct_nothing(tmp_path: Path) -> None:
    assert diagnose(trace=saved(one_step(), tmp_path)).changes == []


def test_an_unknown_device_asks_for_a_profile(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="no profile is known"):
        diagnose(trace=saved(_on("Tesla V100-SXM2-32GB"), tmp_path))


@pytest.mark.parametrize(
    ("device", "profile"),
    [
        ("NVIDIA GeForce RTX 4090", "rtx4090-pcie-24gb"),
        ("NVIDIA RTX A6000", "rtxa6000-pcie-48gb"),
        ("NVIDIA L40S", "l40s-pcie-48gb"),
        ("NVIDIA H100 80GB HBM3", "h100-sxm5-80gb"),
    ],
)
def test_a_device_finds_its_shipped_profile(device: str, profile: str, tmp_path: Path) -> None:
    assert job_in(_on(device), tmp_path).hardware == profile


def test_steps_without_duration_are_refused(tmp_path: Path) -> None:
    trace = Trace()
    trace.add("kernel", "gemm", 1.0, 0.0)
    with pytest.raises(BadInput, match="no duration"):
        diagnose(trace=saved(trace, tmp_path))


def test_row_wise_factors_say_which_curves_they_are_about(tmp_path: Path) -> None:
    """An H100 has curves of frameworks' kernels: the trace corrects that of its own pattern, and with it all others."""
    trace = Trace("NVIDIA H100 80GB HBM3")
    trace.add("user_annotation", "ProfilerStep#1", 0.0, 100_000.0)
    for number in range(20):
        at = 1000.0 * number
        trace.launch("aten::mul", "elementwise", at, (at, at + 200), shapes=[[4096, 4096], [4096, 4096]])
    found = diagnose(trace=saved(trace, tmp_path))
    (change,) = found.changes
    assert change.startswith("row-wise: times ")
    assert "eager.elementwise" in change
    assert "memory-bound" in change
    before = load_hardware("h100-sxm5-80gb")
    assert found.hardware.rowwise_bytes_per_s["gelu"].y[0] != before.rowwise_bytes_per_s["gelu"].y[0]
    sources = found.hardware.sources
    assert sources["recorded-row-wise-eager-elementwise"].text.endswith("rates divided by it")


def _on(device: str) -> Trace:
    trace = one_step()
    trace.device = device
    return trace


def test_nothing_measured_is_an_error() -> None:
    with pytest.raises(UsageError, match="needs something"):
        diagnose()
    with pytest.raises(UsageError, match="beside the trace"):
        diagnose(memory="snapshot.pickle", nvbandwidth="nv.json")
    with pytest.raises(UsageError, match="without a trace"):
        diagnose(nvbandwidth="nv.json")


def test_memory_names_what_is_alive_at_the_peak() -> None:
    requests = Requests(
        ids=["b0 model.py:3:forward", "b1 model.py:3:forward", "b2 loss.py:9:loss", "b3"],
        lower=[0, 1, 2, 5],
        upper=[4, 4, 3, 6],
        size_bytes=[100, 200, 50, 310],
    )
    memory = memory_of(Source(requests, "snapshot"))
    assert (memory.peak_bytes, memory.buffers) == (350, 3)
    assert [(live.name, live.count, live.bytes) for live in memory.live] == [
        ("model.py:3:forward", 2, 300),
        ("loss.py:9:loss", 1, 50),
    ]


def test_union_and_length() -> None:
    assert union([(5, 6), (0, 2), (1, 3)]) == [(0, 3), (5, 6)]
    assert length([(0, 3), (5, 6)]) == 4
