"""Fixtures with one small sample of every document, with every field filled in."""

from collections.abc import Callable

import msgspec
import pytest

from memo_sim.contract.accuracy import Accuracies, ErrorGroup, GroupAccuracy, PublishedErrors
from memo_sim.contract.cluster import Cluster, Network
from memo_sim.contract.combinations import Combinations, NamedFeature, Pair
from memo_sim.contract.comparison import Comparison, Ratio, StepFigures
from memo_sim.contract.difference import Choice, Difference, Share, Side
from memo_sim.contract.expert_load import LayerLoad, MeasuredLoad
from memo_sim.contract.explanation import Explanation, Rival, Room, Sensitivity, Use
from memo_sim.contract.figure import Figure, Line, Point
from memo_sim.contract.goodput import Failures, Goodput, GoodputChange
from memo_sim.contract.gpus import Gpus, Sized, TriedCount
from memo_sim.contract.hardware import (
    AttentionTable,
    CollectiveTable,
    CopyRates,
    Curve,
    GemmTable,
    Hardware,
    Quantity,
    Source,
)
from memo_sim.contract.interchange import Export, IgnoredOption, ImportedJob, LostDecision, OwnDecision, ReadOption
from memo_sim.contract.layer_shape import LayerShape
from memo_sim.contract.longest import Longest, Tried
from memo_sim.contract.memory_report import MemoryReport, OtherPlacement
from memo_sim.contract.model import Model
from memo_sim.contract.placement import Placement
from memo_sim.contract.plan import (
    Decisions,
    Layout,
    MovedBytes,
    Plan,
    PlanRow,
    Prediction,
    Provenance,
    Stall,
    StepInterval,
)
from memo_sim.contract.recorded_step import KindTime, LiveBytes, RecordedMemory, RecordedStep, ShapeTime
from memo_sim.contract.requests import Phase, Requests
from memo_sim.contract.result import MoreMemory, Result
from memo_sim.contract.results import Results
from memo_sim.contract.rope_scaling import RopeScaling
from memo_sim.contract.shortage import LiveTensor, Shortage, WayOut
from memo_sim.contract.summary import Assumption, DeviceMemory, HostMemory, Summary
from memo_sim.contract.sweep import Failure, SweepLine
from memo_sim.contract.trace import MemoryCurve, Spans, Trace, Wait
from memo_sim.contract.validation import CaseError, CasePrediction, CaseReport, Expectation, Validation
from memo_sim.contract.verdict import Against, CheckResult, Compared, Reduction, Verdict

SHA = "0123456789abcdef" * 4


def model() -> Model:
    return Model(
        name="sample",
        family="llama",
        layers=4,
        hidden=128,
        heads=4,
        kv_heads=2,
        head_dim=32,
        ffn_hidden=384,
        vocab=256,
        tied_embeddings=False,
        activation="silu",
        rope_scaling=RopeScaling(kind="llama3", factor=8.0),
        source="a test",
    )


def uneven_model() -> Model:
    shapes = [LayerShape(ffn_hidden=width) for width in (384, 384, 384, 128)]
    return model().of_layers(shapes)


def quantity(value: float) -> Quantity:
    return Quantity(value=value, source="sheet")


def curve(*y: float) -> Curve:
    return Curve(x=[float(2**i) for i in range(len(y))], y=list(y), source="bench", spread=0.01)


def hardware() -> Hardware:
    copies = CopyRates(alone=curve(1e9, 25e9), duplex=quantity(11e9), all_devices=quantity(10.3e9))
    return Hardware(
        name="sample",
        device="cuda",
        peak_flops={"bf16": quantity(312e12)},
        device_memory_bytes=quantity(80e9),
        reserve_bytes={"context": quantity(5e8), "nccl": quantity(0.0)},
        gemm=[GemmTable(dtype="bf16", gemm_pass="fprop", rows=[[4096.0, 4096.0, 4096.0, 2.2e14]], source="bench")],
        attention=[
            AttentionTable(
                kernel="flash2",
                dtype="bf16",
                attention_pass="backward",
                head_dim=128,
                rows=[[512.0, 16.0, 9e13], [16384.0, 16.0, 1.86e14]],
                source="bench",
            )
        ],
        memory_bound_bytes_per_s=curve(1.65e12),
        rowwise_bytes_per_s={"adamw": curve(1.6e12)},
        launch_floor_s=quantity(5e-6),
        d2h=copies,
        h2d=copies,
        devices_per_uplink=quantity(2),
        collectives=[
            CollectiveTable(
                kind="all_gather", ranks=8, alpha_s=4.5e-5, bus_bytes_per_s=curve(1e9, 157e9), source="bench"
            )
        ],
        compute_slowdown={"copy": quantity(1.02)},
        device_malloc_s=quantity(1e-3),
        device_free_s=quantity(1e-3),
        host_register_bytes_per_s=quantity(1e9),
        host_memory_bytes=quantity(2e12),
        host_copy_bytes_per_s=quantity(2e11),
        devices=8,
        sources={
            "sheet": Source(kind="datasheet", text="a data sheet"),
            "bench": Source(kind="measured", text="a benchmark"),
        },
        provenance={"tool": "a test"},
    )


def cluster() -> Cluster:
    network = Network(
        nics_per_node=8, nic_bytes_per_s=quantity(23.5e9), latency_s=quantity(2e-5), size_efficiency=curve(0.3, 0.9)
    )
    return Cluster(
        name="sample",
        hardware="profile.json",
        nodes=2,
        devices_per_node=8,
        host_memory_bytes=quantity(1e12),
        network=network,
        sources=hardware().sources,
    )


def plan() -> Plan:
    decisions = Decisions(
        model=model(),
        layout=Layout(tp=2, sequence_parallel=True),
        seq_tokens=4096,
        recompute="tokenwise",
        swapped_tokens=512,
    )
    prediction = Prediction(
        status="ok",
        hardware="sample",
        step_s=1.25,
        mfu=0.5,
        tgs=3276.8,
        peak_device_bytes=7_000_000_000,
        peak_by_class={"skeletal": 4_000_000_000, "state": 3_000_000_000},
        peak_host_bytes_per_node=1_000_000,
        moved_bytes=MovedBytes(d2h=10, h2d=10),
        lanes={"compute": 1.0, "d2h": 0.25},
        stalls=[Stall(lane="compute", waits_for="h2d", seconds=0.125, count=3)],
        outside_calibration=["attention flash2 forward"],
        interval=StepInterval(
            low_s=1.125,
            high_s=1.5,
            level=0.8,
            rows=30,
            sources=3,
            generation="Ampere",
            framework="planned",
            beyond=["16 devices (the largest row has 8)"],
        ),
    )
    provenance = Provenance(created="2026-01-02T03:04:05Z", memo_version="0.1.0", command="memo-sim what-if sample")
    return Plan(decisions=decisions, program_sha256=SHA, prediction=prediction, provenance=provenance)


def requests() -> Requests:
    return Requests(
        program_sha256=SHA,
        ids=["qkv[0]", "qkv[1]"],
        lower=[0, 2],
        upper=[3, 4],
        size_bytes=[1000, 512],
        classes=["skeletal", "transient"],
        phases=[Phase(name="m0/l0/layer.fwd", kind="layer.fwd", lower=0, upper=4)],
        alignment_bytes=512,
    )


def placement() -> Placement:
    return Placement(
        program_sha256=SHA,
        arena_bytes=1536,
        lower_bound_bytes=1536,
        alignment_bytes=512,
        solver="greedy",
        elapsed_s=0.25,
        ids=["qkv[0]", "qkv[1]"],
        lower=[0, 2],
        upper=[3, 4],
        size_bytes=[1000, 512],
        offset_bytes=[0, 1024],
        classes=["skeletal", "transient"],
    )


def memory() -> MemoryReport:
    return MemoryReport(
        input="plan.json",
        input_kind="plan",
        notes=["the first of 2 roles, stage0"],
        buffers=2,
        alignment_bytes=512,
        live_bytes=1512,
        worst_instant=2,
        worst_phase="m0/l0/layer.fwd",
        live_by_class={"skeletal": 1000, "transient": 512},
        peak_bytes=1536,
        lower_bound_bytes=1536,
        gap=0.0,
        optimal=True,
        solver="greedy",
        elapsed_s=0.25,
        bilevel_peak_bytes=1536,
        bilevel_proven=True,
        others=[OtherPlacement(solver="bilevel-mip", peak_bytes=1536, elapsed_s=0.5, proven=True)],
        capacity_bytes=2**30,
        reserved_caching_bytes=2**21,
        allocation_retries=0,
    )


def trace() -> Trace:
    spans = Spans(
        ids=["m0/l0/fwd/qkv", "m0/l0/fwd/attn"],
        ops=["gemm", "attention"],
        lanes=["compute", "compute"],
        start_s=[0.0, 0.5],
        end_s=[0.5, 1.0],
    )
    memory = MemoryCurve(time_s=[0.0, 0.5], bytes_by_class={"skeletal": [0, 1024]})
    wait = Wait(instruction="m0/l0/fwd/attn", waits_for="m0/l0/fwd/qkv", start_s=0.5, seconds=0.0)
    return Trace(
        origin="predicted",
        program_sha256=SHA,
        step_s=1.0,
        spans=spans,
        device_memory=memory,
        host_memory=memory,
        waits=[wait],
    )


def result() -> Result:
    row = PlanRow(
        status="gpu_oom",
        system="memo",
        mfu=None,
        tgs=None,
        step_s=None,
        alpha=0.125,
        layout=Layout(),
        recompute="tokenwise",
        memory_policy="planned",
        states="fp32",
        micro_batch=1,
        peak_device_bytes=90_000_000_000,
        peak_host_bytes_per_node=0,
        stalls=[],
        shortfall_bytes=10_000_000_000,
        reason="device memory",
    )
    more = MoreMemory(space="device", added_bytes=1 << 30, best=row, saved_s=0.5)
    return Result(
        model="sample",
        cluster="a800-1x8",
        seq_tokens=4096,
        best=None,
        plans=[row],
        evaluated=1,
        pruned=0,
        front=[row],
        more_memory=[more],
    )


def results() -> Results:
    return Results(model="sample", seq_tokens=4096, ranked_by="tokens per second", results=[result()])


def longest() -> Longest:
    return Longest(
        model="sample",
        cluster="a800-1x8",
        system="memo",
        step_tokens=65536,
        seq_tokens=65536,
        best=result().plans[0],
        bound="host memory",
        tried=[
            Tried(seq_tokens=65536, fits=True, step_s=1.0),
            Tried(seq_tokens=131072, fits=False, bound="host memory"),
        ],
        why=["one"],
        more_memory=result().more_memory,
    )


def sweep() -> SweepLine:
    return SweepLine(
        key="ab" * 32,
        question={"model": "sample", "seq_len": "64k", "tp": 8, "alpha": 0.5, "pp_layers": [1, 2], "keep_norms": True},
        memo_version="0.1.0",
        model="sample",
        cluster="a800-1x8",
        system="memo",
        seq_tokens=65536,
        status="failed",
        best=result().plans[0],
        warnings=["one"],
        why=["one"],
        failure=Failure(exit_code=6, message="the worker died"),
        elapsed_s=1.5,
    )


def gpus() -> Gpus:
    memory = DeviceMemory(
        peak="arena", peak_bytes=10, live_bytes=9, reserve_bytes=1, needed_bytes=11, capacity_bytes=20
    )
    verdict = Summary(
        fits=True,
        status="ok",
        devices=16,
        tokens_per_step=4096,
        step_s=1.0,
        device_memory=memory,
        host_memory=HostMemory(needed_bytes=0, capacity_bytes=10),
        plan="tp2",
        goodput=goodput(),
        assumptions=[Assumption(name="dtype", value="bf16", option="--dtype")],
    )
    size = Sized(
        kind="a800", cluster="a800-2x8", nodes=2, roles=["fits", "cheapest"], best=result().plans[0], summary=verdict
    )
    return Gpus(
        model="sample",
        seq_tokens=4096,
        global_batch=1,
        within_s=2.0,
        kinds=["a800"],
        most_devices=16,
        chosen=size,
        sizes=[size],
        tried=[TriedCount(kind="a800", cluster="a800-1x8", devices=8, fits=False, reason="device memory")],
        why=["one"],
    )


def combinations() -> Combinations:
    features = [NamedFeature(name=name, about=f"a {name}", options=f"--{name}") for name in ("tp", "metp")]
    pair = Pair(first="tp", second="metp", together=False, rule="METP: tp", reason="no lowering", hint="--tp 1")
    return Combinations(features=features, pairs=[pair])


def goodput() -> Goodput:
    failures = Failures(device_mtbf_hours=100.0, checkpoint_bytes_per_s=1e9, interval_s=60.0, restart_s=10.0)
    return Goodput(
        failures=failures,
        job_mtbf_s=360.0,
        checkpoint_bytes=10**9,
        checkpoint_s=1.0,
        interval_steps=60,
        interval_s=60.0,
        interval_from="given",
        goodput=0.9,
        checkpoints=0.02,
        lost=0.05,
        restarts=0.03,
        tokens_per_device_s=9.0,
        days_per_trillion_tokens=100.0,
        device_hours_per_billion_tokens=2.0,
        price_per_billion_tokens=4.0,
    )


def validation() -> Validation:
    case = CaseReport(
        case="one",
        source="memo-table3",
        system="memo",
        predicted=CasePrediction(status="ok", mfu=0.5, layout=Layout(tp=4, cp=2)),
        expected=Expectation(status="ok", mfu=0.4),
        error=CaseError(status=True, mfu=0.25),
        fitted=False,
    )
    return Validation(cases=[case])


def errors() -> PublishedErrors:
    group = ErrorGroup(
        source="table",
        generation="Ampere",
        framework="megatron",
        kernels={"attention": "flash2", "dtype": "bf16"},
        rows={"row": [4096.0, 8.0, -0.05]},
    )
    return PublishedErrors(groups=[group])


def accuracy() -> Accuracies:
    group = GroupAccuracy(
        cases=9, mean_abs_error={"mfu": 0.02}, low=-0.03, high=0.04, level=0.8, quantity="mfu", wrong_statuses=1
    )
    return Accuracies(groups={"memo-table3/memo": group})


def verdict() -> Verdict:
    compared = [Compared(what="loss", difference=1e-7, where="step 1"), Compared(what="gradient norm", difference=None)]
    return Verdict(
        verified=False,
        model="gpt-7b",
        layout=Layout(tp=2),
        recompute="tokenwise",
        alpha=0.5,
        program_sha256=SHA,
        machine="a CPU",
        dtype="fp32",
        ranks=2,
        steps=1,
        seed=3,
        reductions=[Reduction(what="layers", plan="32", here="4")],
        checks=[CheckResult(name="stages", fine=True, text="ok")],
        against=[Against(reference="autograd", tolerance=1e-5, why="fp32", skipped="", compared=compared)],
        references_agree=True,
        losses=[4.5, None],
        seconds=2.5,
    )


def comparison() -> Comparison:
    figures = StepFigures(
        step_s=1.0,
        peak_device_bytes=1024,
        moved_bytes=MovedBytes(d2h=1, h2d=1),
        lanes={"compute": 0.9},
        ops={"gemm": 0.5},
    )
    ratio = Ratio(step_s=1.0, peak_device_bytes=1.0, moved_bytes={"d2h": 1.0}, lanes={"compute": 1.0})
    return Comparison(
        program_sha256=SHA,
        machine="a test",
        predicted=figures,
        measured=figures,
        ratio=ratio,
        losses=[5.5],
        grad_norms=[1.0],
    )


def shortage() -> Shortage:
    way = WayOut(
        knob="recompute",
        options="--recompute full",
        leave_out=["--alpha"],
        plan="full recompute on tp1 cp1 dp1",
        fits=True,
        status="ok",
        step_s=2.5,
        needed_bytes=512,
        note="a note",
    )
    return Shortage(
        model="sample",
        cluster="sample-1x1",
        seq_tokens=1024,
        fits=False,
        status="gpu_oom",
        plan="keep on tp1 cp1 dp1",
        decisions=plan().decisions,
        candidates=1,
        memory="device",
        at="m0/s0/l3/bwd/attn",
        needed_bytes=2048,
        capacity_bytes=1024,
        shortfall_bytes=1024,
        by_class={"state": 1024},
        allocator={"allocated": 1},
        reserve={"cuda_context": 1024},
        tensors=[LiveTensor(name="params.layer", buffer_class="state", count=4, bytes=1024)],
        reason="no room",
        ways=[way],
        open=way,
        too_little=[msgspec.structs.replace(way, fits=False, status="gpu_oom", step_s=None, shortfall_bytes=1)],
        tried=2,
    )


def difference() -> Difference:
    side = Side(
        name="plan.json",
        kind="plan",
        origin="predicted",
        source="its own prediction",
        cluster="sample-1x1",
        decisions=plan().decisions,
        program_sha256=SHA,
        step_s=1.0,
        mfu=0.5,
        tgs=10.0,
        goodput=goodput(),
        lanes={"compute": 0.5},
        peak_device_bytes=1024,
        peak_by_class={"state": 1024},
        peak_host_bytes_per_node=1,
        moved_bytes=MovedBytes(d2h=1, h2d=1),
    )
    share = Share(
        group="forward", name="attention", seconds=[1.0, 2.0], difference_s=[0.0, 1.0], of_difference=[None, 1.0]
    )
    return Difference(
        verdict=["B is slower."],
        sides=[side, msgspec.structs.replace(side, step_s=2.0)],
        decisions=[Choice(option="--tp", values=["1", None])],
        detail="kinds",
        groups=[share],
        shares=[share],
        notes=["a note"],
    )


def explanation() -> Explanation:
    sensitivity = Sensitivity(
        resource="copies",
        change="+25%",
        decisions="fixed",
        status="ok",
        plan="keep on tp1 cp1 dp1",
        step_s=1.0,
        tgs=10.0,
        gain=0.1,
        reason="none",
    )
    rival = Rival(
        options="--tp 2",
        plan="keep on tp2 cp1 dp1",
        status="ok",
        step_s=2.0,
        slower_s=1.0,
        compute_s=0.5,
        waits_s=0.5,
        waits_for="all_gather",
        peak_device_bytes=1,
        peak_host_bytes_per_node=1,
        shortfall_bytes=0,
    )
    return Explanation(
        name="plan.json",
        model="sample",
        cluster="sample-1x1",
        seq_tokens=1024,
        plan="keep on tp1 cp1 dp1",
        decisions=plan().decisions,
        step_s=1.0,
        mfu=0.5,
        tgs=9.0,
        uses=[Use(lane="compute", busy_s=0.5, of_step=0.5, compute_waits_s=0.5)],
        rooms=[Room(memory="device", needed_bytes=1, live_bytes=1, capacity_bytes=2)],
        searched_step_s=1.0,
        searched_plan="keep on tp1 cp1 dp1",
        sensitivities=[sensitivity],
        rivals=[rival],
        rivals_are="one decision changed",
        goodput=goodput(),
        goodput_changes=[GoodputChange(change="half the restart", goodput=0.95)],
        notes=["a note"],
    )


def figure() -> Figure:
    points = [Point(x=8, y=1048576, note="tp 4"), Point(x=16, y=None, note="nothing fits")]
    return Figure(
        name="11a",
        title="a test",
        x_label="GPUs",
        y_label="tokens",
        x_kind="number",
        y_kind="tokens",
        lines=[Line(label="memo", points=points)],
        findings=["one"],
        step_tokens=131072,
    )


def export() -> Export:
    row = result().plans[0]
    return Export(
        framework="Megatron-LM",
        version="a commit",
        system="megatron-core",
        cluster="a800-1x8",
        files=["train.sh", "lost.md", "plan.json"],
        lost=[LostDecision(path="decisions.memory_policy", wanted="planned", instead="eager", why="no addresses")],
        own=[OwnDecision(path="decisions.kernels.attention", value="flash2", why="what is installed")],
        plan=row,
        there=row,
    )


def job() -> ImportedJob:
    return ImportedJob(
        framework="Megatron-LM",
        version="a commit",
        files=["train.sh"],
        model=model(),
        seq_tokens=4096,
        micro_batch=1,
        global_batch=8,
        devices=8,
        read=[ReadOption(key="--seq-length", value="4096", says="seq_len 4096")],
        ignored=[IgnoredOption(key="--lr", value="1e-4", why="no part of a plan")],
        assumed=["one replica"],
        job=result().plans[0],
        better=[result()],
    )


def recorded() -> RecordedStep:
    return RecordedStep(
        trace="trace.json",
        device="NVIDIA H100 80GB HBM3",
        hardware="h100-sxm5-80gb",
        steps=2,
        steps_marked=True,
        step_s=1.0,
        compute_s=0.7,
        collective_s=0.2,
        exposed_collective_s=0.1,
        copy_s=0.1,
        exposed_copy_s=0.05,
        idle_s=0.15,
        kinds=[KindTime(kind="product.fprop", calls=10, measured_s=0.3, compared_s=0.3, predicted_s=0.28)],
        shapes=[
            ShapeTime(kind="product.fprop", shape="8 x 8 x 8 bf16 fprop", calls=10, measured_s=0.03, predicted_s=0.028)
        ],
        memory=RecordedMemory(
            peak_bytes=1024, buffers=2, live=[LiveBytes(name="model.py:3:forward", count=2, bytes=1024)]
        ),
    )


def expert_load() -> MeasuredLoad:
    return MeasuredLoad(
        model="mixtral-tiny",
        experts=4,
        per_token=2,
        steps=2,
        layers=[
            LayerLoad(layer=0, rows=[10, 20, 30, 40], by_fullness=[44, 30, 18, 8]),
            LayerLoad(layer=2, rows=[25, 25, 25, 25], by_fullness=[36, 30, 24, 10]),
        ],
    )


_SAMPLES: dict[str, Callable[[], msgspec.Struct]] = {
    "model": uneven_model,
    "hardware": hardware,
    "cluster": cluster,
    "plan": plan,
    "requests": requests,
    "placement": placement,
    "memory": memory,
    "trace": trace,
    "result": result,
    "results": results,
    "longest": longest,
    "sweep": sweep,
    "gpus": gpus,
    "shortage": shortage,
    "validation": validation,
    "comparison": comparison,
    "difference": difference,
    "explanation": explanation,
    "verdict": verdict,
    "accuracy": accuracy,
    "errors": errors,
    "figure": figure,
    "combinations": combinations,
    "recorded": recorded,
    "expert_load": expert_load,
    "export": export,
    "job": job,
}


@pytest.fixture(scope="session")
def samples() -> dict[str, msgspec.Struct]:
    """One document of every kind, by its name in ``schemas.DOCUMENTS``."""
    return {name: make() for name, make in _SAMPLES.items()}


@pytest.fixture(scope="session", params=sorted(_SAMPLES))
def sample(request: pytest.FixtureRequest) -> msgspec.Struct:
    """One of the sample documents; parametrized over all of them."""
    return _SAMPLES[request.param]()
