"""A recorded step held against a profile, and the profile that it corrects."""

import gzip
from pathlib import Path

import pytest

from memo_sim.answers.doctor import ACROSS_NODES, diagnose
from memo_sim.contract.catalog import load_cluster, load_hardware
from memo_sim.contract.codec import encode, read, write
from memo_sim.contract.errors import BadInput, UsageError
from memo_sim.contract.hardware import Hardware
from memo_sim.contract.plan import Layout
from memo_sim.contract.recorded_step import RecordedStep
from memo_sim.contract.requests import Requests
from memo_sim.engine.simulate import simulate
from memo_sim.memory.allocation_class import ACTIVATIONS, GRADIENTS, OPTIMIZER, WEIGHTS
from memo_sim.memory.source import Source
from memo_sim.program.ir.instruction import Lane
from memo_sim.reasons.disturbance import Disturbance
from memo_sim.reasons.recorded_memory import memory_of, predicted_classes
from memo_sim.reasons.recorded_step import length, union
from memo_sim.views.recorded_table import recorded_table
from tests.sim.observed.recorded import Trace, one_step
from tests.sim.small_programs import decide


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


def test_a_folder_of_ranks_names_the_slowest_and_the_exposed_communication(tmp_path: Path) -> None:
    for rank, waits in ((0, 0.0), (1, 400.0)):
        trace = Trace()
        trace.distributed = {"rank": rank, "world_size": 2}
        trace.add("user_annotation", "ProfilerStep#1", 0.0, 2000.0)
        trace.launch("aten::mm", "gemm", 10, (0, 900 - waits), shapes=[[4096, 4096], [4096, 4096]])
        trace.launch("c10d::x", "ncclDevKernel_AllReduce", 60, (900 - waits, 1100), stream=20)
        (tmp_path / f"rank{rank}.pt.trace.json.gz").write_bytes(gzip.compress(trace.raw()))
    (tmp_path / "notes.txt").write_text("not a trace")
    job = diagnose(trace=str(tmp_path)).job
    assert job is not None
    assert (job.trace, job.rank) == ("rank0.pt.trace.json.gz", 0)
    assert [rank.compute_s for rank in job.ranks] == pytest.approx([900e-6, 500e-6])
    assert [rank.exposed_collective_s for rank in job.ranks] == pytest.approx([200e-6, 600e-6])
    text = recorded_table(job)
    assert "Rank 0 computes longest, by 80.0 % more than rank 1" in text
    assert "On every rank 200 us of communication are exposed" in text
    (tmp_path / "empty").mkdir()
    with pytest.raises(BadInput, match="one of each rank"):
        diagnose(trace=str(tmp_path / "empty"))


def test_ranks_without_numbers_are_counted_in_order_of_their_files(tmp_path: Path) -> None:
    for name, length_us in (("a", 300.0), ("b", 900.0), ("c", 500.0)):
        trace = Trace()
        trace.add("user_annotation", "ProfilerStep#1", 0.0, 2000.0)
        trace.launch("aten::mm", "gemm", 10, (100, 100 + length_us), shapes=[[4096, 4096], [4096, 4096]])
        (tmp_path / f"{name}.json").write_bytes(trace.raw())
    job = diagnose(trace=str(tmp_path)).job
    assert job is not None
    assert (job.trace, job.rank) == ("b.json", 1)
    assert [(rank.rank, rank.trace) for rank in job.ranks] == [(0, "a.json"), (1, "b.json"), (2, "c.json")]
    assert any("ranks are counted in order" in note for note in job.notes)


def test_more_traces_than_a_node_has_devices_are_of_several_nodes(tmp_path: Path) -> None:
    for number in range(9):
        (tmp_path / f"{number}.json").write_bytes(one_step().raw())
    assert diagnose(trace=str(tmp_path)).cluster.name == "a100-2x8"


def test_what_is_not_recognised_has_a_share_of_the_work(tmp_path: Path) -> None:
    trace = one_step()
    trace.launch("liger::x", "_fused_linear_kernel", 800, (5400, 7600))
    trace.launch("aten::mm", "triton_poi_fused_add_0", 850, (7600, 7700))
    job = job_in(trace, tmp_path)
    assert job.work_s == pytest.approx(7.8e-3)
    assert job.unknown_s == pytest.approx(2.2e-3)
    assert [unknown.name for unknown in job.unknown] == ["_fused_linear_kernel"]
    assert "not recognised: 28.2 %" in recorded_table(job)


def test_notes_say_what_a_trace_lacks(tmp_path: Path) -> None:
    trace = Trace()
    for number, step_us in enumerate((100.0, 100.0, 300.0)):
        trace.add("user_annotation", f"ProfilerStep#{number}", 1000.0 * number, step_us)
    trace.add("cuda_runtime", "cudaGraphLaunch", 0.0, 5.0, correlation=900)
    trace.add("kernel", "in_graph", 10.0, 5.0, correlation=900)
    job = diagnose(trace=saved(trace, tmp_path), cluster="h100-1x8").job
    assert job is not None
    shapes, graphs, uneven, other = job.notes
    assert "no shapes" in shapes
    assert "CUDA graphs" in graphs
    assert uneven.startswith("ProfilerStep#2 takes 3.0 times")
    assert other.startswith("The trace is of NVIDIA A100-SXM4-80GB; the profile is that of another")
    text = recorded_table(job)
    assert "mean of 3 steps (ProfilerStep#0 to ProfilerStep#2), 167 us (100 us to 300 us)" in text


def test_a_job_on_several_nodes_is_held_against_several(tmp_path: Path) -> None:
    trace = one_step()
    trace.distributed = {"rank": 0, "world_size": 20}
    found = diagnose(trace=saved(trace, tmp_path))
    assert found.cluster.name == "a100-3x8"
    assert found.job is not None
    assert found.job.notes == []
    trace.distributed["world_size"] = 64
    trace.events[-4]["args"]["Process Group Ranks"] = "[0, 8, 16, 24, 32, 40, 48, 56]"
    across = diagnose(trace=saved(trace, tmp_path)).job
    assert across is not None
    assert across.notes == [ACROSS_NODES]
    (alone,) = (kind for kind in found.job.kinds if kind.kind.startswith("collective"))
    (far,) = (kind for kind in across.kinds if kind.kind.startswith("collective"))
    assert far.predicted_s > alone.predicted_s


def test_copies_beside_each_other_are_predicted_so() -> None:
    """While both directions run, each has the rate ``duplex``; a span half of whose time is so takes longer by it."""
    cluster, hardware = load_cluster("a100-1x8")
    spans = [(Lane.D2H, 0.0, 100.0), (Lane.H2D, 50.0, 200.0), (Lane.COMPUTE, 100.0, 120.0)]
    found = Disturbance(spans, hardware, cluster, 1)
    slow = hardware.d2h.duplex.value / hardware.d2h.alone.y[-1]
    assert slow < 1
    assert found.stretch(Lane.D2H, 0.0, 100.0) == pytest.approx(100 / (50 + 50 * slow))
    assert found.stretch(Lane.D2H, 0.0, 50.0) == 1
    assert found.stretch(Lane.COMPUTE, 100.0, 120.0) == pytest.approx(hardware.compute_slowdown["copy"].value)
    assert found.stretch(Lane.TP, 0.0, 100.0) == 1
    nothing = Disturbance((), hardware, cluster, 1)  # as of a CPU, whose operators overlap in no known way
    assert nothing.stretch(Lane.COMPUTE, 0.0, 100.0) == 1


def test_memory_by_class_stands_beside_the_prediction() -> None:
    cluster, hardware = load_cluster("a100-1x8")
    simulation = simulate(decide(layout=Layout(dp=2, zero=1)), hardware, cluster)
    predicted = predicted_classes(simulation)
    assert sum(predicted.values()) == simulation.memory.device.bytes
    assert {WEIGHTS, OPTIMIZER, GRADIENTS, ACTIVATIONS} <= set(predicted)
    requests = Requests(ids=["b0 m.py:3:forward", "b1"], lower=[0, 1], upper=[4, 4], size_bytes=[100, 200])
    found = memory_of(Source(requests, "snapshot", origins=[ACTIVATIONS, "no stack"]), predicted)
    first, second, *rest = found.by_class
    assert (first.name, first.bytes, first.predicted_bytes) == ("no stack", 200, None)
    assert (second.name, second.bytes, second.predicted_bytes) == (ACTIVATIONS, 100, predicted[ACTIVATIONS])
    assert all(each.bytes == 0 and each.predicted_bytes for each in rest)
    assert found.predicted_peak_bytes == simulation.memory.device.bytes


@pytest.mark.parametrize("raw", [b"PK\x03\x04", b"{}", b"id,lower,upper,size\n"])
def test_only_a_snapshot_is_a_snapshot(raw: bytes, tmp_path: Path) -> None:
    (tmp_path / "memory").write_bytes(raw)
    with pytest.raises(BadInput, match="not a memory snapshot"):
        diagnose(trace=saved(one_step(), tmp_path), memory=str(tmp_path / "memory"))


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
