"""Answers ``memo-sim doctor``: what a recorded step of the user's own job did, and a profile that knows it.

With the job's own files too: what it costs with the measured rates, what would be better, and that plan for export.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from math import inf
from pathlib import Path

import msgspec

import memo_sim
from memo_sim.answers.export_plan import Exported, export_plan
from memo_sim.answers.import_job import decisions_of, import_job, read_files
from memo_sim.contract.catalog import list_hardware, load_cluster
from memo_sim.contract.cluster import Cluster
from memo_sim.contract.codec import read_raw
from memo_sim.contract.errors import BadInput, Infeasible, UsageError
from memo_sim.contract.hardware import Hardware, Quantity, Source
from memo_sim.contract.interchange import ImportedJob
from memo_sim.contract.plain_pickle import is_pickle
from memo_sim.contract.plan import Plan, Provenance
from memo_sim.contract.progress import Progress
from memo_sim.contract.recorded_step import RecordedStep
from memo_sim.contract.result import Result
from memo_sim.contract.units import counted, format_seconds
from memo_sim.costs.contention import COPY as COPIES
from memo_sim.costs.contention import NodeRates
from memo_sim.interchange.framework import Framework
from memo_sim.interchange.frameworks import framework_titled
from memo_sim.memory.read_requests import read_requests
from memo_sim.memory.source import Source as Snapshot
from memo_sim.observed.correction import (
    COLLECTIVE,
    COPY,
    corrected,
    group_of,
    with_collectives,
    with_copies,
    with_network,
)
from memo_sim.observed.kineto import Recording, read_recording
from memo_sim.observed.link_benchmarks import read_nccl_tests, read_nvbandwidth
from memo_sim.planning.search import play
from memo_sim.program.lower import lower, program_sha256
from memo_sim.reasons.recorded_memory import memory_of, predicted_classes
from memo_sim.reasons.recorded_step import Priced, price_recording, rank_of, step_of

LEAST_CALLS, LEAST_SHARE = 8, 0.005
"""Work corrects a rate when it has at least as many calls and takes at least this part of the recorded time."""
MOST_HOST_BYTES_PER_S = 1e18
MOST_RANKS = 1024
NO_NAME = "a GPU that it does not name"
ACROSS_NODES = (
    "Collectives over several nodes are compared, but correct nothing: nccl-tests measures a network"
    " (--nccl-tests, --cluster-output)."
)
PER_NODE = 8
"""Devices of a node of the clusters that are found by a device's name."""


@dataclass(frozen=True)
class OwnJob:
    """The files of the user's job, as ``import_job`` takes them."""

    files: Sequence[str]
    given: Mapping[str, str] = field(default_factory=dict)
    framework: str | None = None
    search: bool = True


@dataclass(frozen=True)
class Diagnosis:
    """The recorded step beside the prediction (None without a trace), the corrected profile, and what changed in it."""

    job: RecordedStep | None
    cluster: Cluster
    hardware: Hardware
    changes: list[str]
    imported: ImportedJob | None = None
    """The user's job with the corrected rates, and what would be better; None where its files were not given."""

    def cluster_file(self, profile: str) -> Cluster:
        """Return the cluster with the corrected profile, whose file is ``profile``."""
        return msgspec.structs.replace(self.cluster, hardware=profile)

    def export(self) -> Exported:
        """Return the files of the plan that is fastest as the job's own framework would run it.

        Raises:
            Infeasible: when no plan is faster than the job, which then needs no other files.
            UsageError: when no better plan was searched.
        """
        imported = self.imported
        if imported is None or imported.job is None or not imported.better:
            raise UsageError("the best plan is that of a job", wanted="--config FILE, without --no-search")
        framework = framework_titled(imported.framework)
        found = [self._exported(each, framework) for each in imported.better if each.decisions is not None]
        fitting = [each for each in found if each is not None and each.fits]
        if not fitting:
            raise Infeasible(
                f"no plan that {framework.title} can run fits",
                where=", ".join(imported.files),
                hint="memo-sim import says what the job needs",
            )
        best, own = min(fitting, key=_step_there), imported.job
        if own.status == "ok" and own.step_s and _step_there(best) >= own.step_s:
            raise Infeasible(
                f"no plan of {framework.title} is faster than the job, so nothing is written",
                got=f"{format_seconds(_step_there(best))} a step, the job {format_seconds(own.step_s)}",
                hint="the job's own files are the best",
            )
        return best

    def _exported(self, result: Result, framework: Framework) -> Exported | None:
        """Return the best plan of an answer as the framework's files; None where it can run nothing near to it."""
        assert result.decisions is not None
        provenance = Provenance(memo_version=memo_sim.__version__, cluster=self.cluster.name, system=result.system)
        program = program_sha256(lower(result.decisions))
        plan = Plan(decisions=result.decisions, program_sha256=program, provenance=provenance)
        try:
            return export_plan(plan, framework, self.cluster, self.hardware)
        except Infeasible:
            return None


def _step_there(exported: Exported) -> float:
    """Return the seconds of a step as the framework would run the plan."""
    return exported.document.there.step_s or inf


def diagnose(
    *,
    trace: str | None = None,
    memory: str | None = None,
    cluster: str | None = None,
    nccl_tests: Sequence[str] = (),
    nvbandwidth: str | None = None,
    job: OwnJob | None = None,
    progress: Progress | None = None,
) -> Diagnosis:
    """Compare a recorded step with a profile, and correct the profile by everything that was measured.

    ``trace`` is a PyTorch profiler trace, or a folder with one for each rank; ``memory`` a snapshot of PyTorch's
    allocator, ``nccl_tests`` outputs of nccl-tests, ``nvbandwidth`` its JSON. ``cluster`` is a cluster or profile;
    without it, the profile is the one whose GPU the trace names.

    Raises:
        UsageError: when nothing is given, or no profile is known for the trace's device.
        BadInput: when a file is not what it should be.
    """
    if not (trace or nccl_tests or nvbandwidth):
        raise UsageError("doctor needs something that was measured", wanted="--trace, --nccl-tests or --nvbandwidth")
    if memory and not trace:
        raise UsageError("a snapshot is read beside the trace of the same job", wanted="--trace FILE --memory FILE")
    if not (trace or cluster):
        raise UsageError("without a trace, the profile that takes the rates has to be named", wanted="--cluster NAME")
    snapshot = _snapshot(memory) if memory else None
    traces = _traces(trace) if trace else []
    first = read_recording(read_raw(traces[0]), traces[0]) if traces else None
    machine, hardware = load_cluster(cluster or _cluster_for(first, len(traces)))
    recorded, changes = None, list[str]()
    if first is not None:
        recorded, hardware, changes = _recorded(traces, first, machine, hardware, named=cluster is not None)
    for path in nccl_tests:
        machine, hardware, said = _with_links(path, machine, hardware)
        changes += said
    if nvbandwidth:
        hardware, said = _with_copies(nvbandwidth, hardware)
        changes += said
    if changes:
        before = hardware.provenance.get("corrected", "")
        told = "; ".join(filter(None, (before, *changes)))
        hardware = msgspec.structs.replace(hardware, provenance={**hardware.provenance, "corrected": told})
    predicted = None
    imported = None
    if job is not None:
        if memory:
            predicted = _predicted_memory(job, machine, hardware)
        imported = import_job(
            job.files,
            job.given,
            framework=job.framework,
            machine=(machine, hardware),
            search=job.search,
            progress=progress,
        )
    if snapshot is not None and recorded is not None:
        recorded = msgspec.structs.replace(recorded, memory=memory_of(snapshot, predicted))
    return Diagnosis(recorded, machine, hardware, changes, imported)


def _snapshot(path: str) -> Snapshot:
    """Return the requests of a memory snapshot; other files with requests are refused."""
    if not is_pickle(read_raw(path)):
        raise BadInput(
            "not a memory snapshot",
            where=path,
            got="no pickle",
            wanted="the pickle that torch.cuda.memory._dump_snapshot writes",
        )
    return read_requests(path)


def _traces(path: str) -> list[str]:
    """Return the traces of a folder in order of their names, or the one trace."""
    folder = Path(path)
    if not folder.is_dir():
        return [path]
    found = sorted(str(each) for each in folder.iterdir() if each.name.endswith((".json", ".json.gz")))
    if not found or len(found) > MOST_RANKS:
        raise BadInput(
            "a folder of traces has one of each rank",
            where=path,
            got=counted(len(found), "file"),
            wanted=f"1 to {MOST_RANKS} files .json or .json.gz",
        )
    return found


def _recorded(
    traces: Sequence[str], first: Recording, machine: Cluster, hardware: Hardware, *, named: bool
) -> tuple[RecordedStep, Hardware, list[str]]:
    """Return the step of the rank that computes longest, the profile corrected by it, and what changed.

    Of equal collectives the fastest one of any rank counts: the last rank to come waits for none.
    """
    jobs: list[RecordedStep] = []
    slowest: list[Priced] = []
    fastest: dict[str, float] = {}
    for path in traces:
        recording = first if path == traces[0] else read_recording(read_raw(path), path)
        _check_device(recording, path, hardware)
        priced, outside = price_recording(recording, machine, hardware, devices=len(traces))
        _note_fastest(priced, fastest)
        job = step_of(recording, priced, outside, trace=Path(path).name, hardware=hardware)
        if not jobs or job.compute_s > max(each.compute_s for each in jobs):
            slowest = priced
        jobs.append(job)
    job = max(jobs, key=lambda each: each.compute_s)
    ranks = [rank_of(each) for each in jobs]
    if len(ranks) > 1 and len({each.rank for each in ranks}) < len(ranks):
        ranks = [msgspec.structs.replace(each, rank=number) for number, each in enumerate(ranks)]
        note = "Several traces name the same rank, or none; ranks are counted in order of the files' names."
        job = msgspec.structs.replace(job, rank=jobs.index(job), notes=[*job.notes, note])
    if len(ranks) > 1:
        job = msgspec.structs.replace(job, ranks=sorted(ranks, key=lambda each: each.rank))
    if named and first.on_gpu and (other := _other_device(first.device, hardware)):
        job = msgspec.structs.replace(job, notes=[*job.notes, other])
    if any(one.operation.kind.startswith(COLLECTIVE) and one.predicted_s and not one.rates for one in slowest):
        job = msgspec.structs.replace(job, notes=[*job.notes, ACROSS_NODES])
    factors = factors_of(slowest, sum(one.operation.recorded.seconds for one in slowest), fastest)
    if factors:
        ranks_told = f", the slowest of {len(traces)} ranks" if len(traces) > 1 else ""
        text = f"PyTorch profiler trace {job.trace} ({job.device or 'CPU'}{ranks_told})"
        host = host_factor_of(factors, hardware, machine)
        hardware = corrected(hardware, factors, text=text, host_factor=host)
    return job, hardware, _changes(factors)


def _check_device(recording: Recording, path: str, hardware: Hardware) -> None:
    if recording.on_gpu != (hardware.device == "cuda"):
        raise UsageError(
            "the trace and the profile are of different kinds of device",
            where=path,
            got=f"{recording.device or ('a GPU' if recording.on_gpu else 'a CPU')}, {hardware.name}",
            wanted="a profile of the device that the trace was recorded on",
            hint="--cluster here.json, as memo-exec calibrate -o here.json writes it",
        )


def _with_links(path: str, machine: Cluster, hardware: Hardware) -> tuple[Cluster, Hardware, list[str]]:
    """Return cluster and profile with what an output of nccl-tests measured, and what changed."""
    said = []
    for test in read_nccl_tests(read_raw(path), path):
        name = f"nccl-tests-{test.kind}-{test.ranks}"
        where = f"{test.ranks} ranks" + (f" on {test.nodes} nodes" if test.nodes > 1 else "")
        source = Source(kind="measured", text=f"nccl-tests, out of place, {where}: {Path(path).name}")
        if test.nodes > 1:
            machine = with_network(machine, test, source, name)
        else:
            hardware = with_collectives(hardware, [test.table(name)], source, name)
        said.append(f"{test.kind} of {where}: {counted(len(test.bus_bytes_per_s), 'size')}")
    return machine, hardware, said


def _with_copies(path: str, hardware: Hardware) -> tuple[Hardware, list[str]]:
    found = read_nvbandwidth(read_raw(path), path)
    rates = dict(found.rates)
    text = f"nvbandwidth, copy engines, slowest device: {Path(path).name}"
    if found.devices != hardware.devices:
        # A profile's rate is that of one device when all of its node copy; a node with fewer has the same sum.
        for rate in ("d2h.all_devices", "h2d.all_devices"):
            if rate in rates:
                rates[rate] *= found.devices / hardware.devices
        text += f"; rates of all devices were measured with {found.devices}, of a profile with {hardware.devices}"
    hardware = with_copies(hardware, rates, Source(kind="measured", text=text), "nvbandwidth")
    said = [f"{rate}: {value / 1e9:.1f} GB/s" for rate, value in rates.items()]
    return hardware, [*said, *(f"not taken: {each}" for each in found.skipped)]


def _predicted_memory(job: OwnJob, machine: Cluster, hardware: Hardware) -> dict[str, int]:
    """Return the live bytes of the job's predicted peak by class."""
    of, read = read_files(job.files, job.given, framework=job.framework, devices=machine.devices)
    system = of.predicted_by(read.job)
    priced = of.priced(read.job)
    decisions, _ = decisions_of(priced, machine, hardware, system)
    return predicted_classes(play(priced.question(machine, hardware, system), decisions))


def _call(one: Priced) -> str:
    return one.operation.kind + one.operation.shape


def _note_fastest(priced: Sequence[Priced], fastest: dict[str, float]) -> None:
    """Add the shortest time of each collective's size."""
    for one in priced:
        if one.operation.kind.startswith(COLLECTIVE):
            seconds = one.operation.recorded.seconds
            fastest[_call(one)] = min(seconds, fastest.get(_call(one), seconds))


def factors_of(priced: Sequence[Priced], total_s: float, fastest: Mapping[str, float]) -> dict[str, float]:
    """Return measured / predicted seconds of each rate whose work is enough to correct a profile, by the rate's name.

    A collective's kernel also waits for the slowest rank, so ``fastest`` has the time that counts by kind and size.
    """
    measured: dict[str, float] = defaultdict(float)
    predicted: dict[str, float] = defaultdict(float)
    calls: dict[str, int] = defaultdict(int)
    for one in priced:
        seconds = fastest.get(_call(one), one.operation.recorded.seconds)
        groups = {group_of(rate): value for rate, value in one.rates.items() if group_of(rate) not in one.rates}
        for rate, value in (groups | dict(one.rates)).items():
            measured[rate] += seconds
            predicted[rate] += value
            calls[rate] += 1
    enough = {
        rate: measured[rate] / predicted[rate]
        for rate in sorted(measured)
        if calls[rate] >= LEAST_CALLS and measured[rate] >= LEAST_SHARE * total_s
    }
    return {rate: factor for rate, factor in enough.items() if group_of(rate) in enough}


def host_factor_of(factors: Mapping[str, float], hardware: Hardware, cluster: Cluster) -> float:
    """Return by how much copies correct the rate of host memory: not at all, unless it is what limits them."""
    of_copies = [factor for rate, factor in factors.items() if rate.startswith(f"{COPY}.")]
    unlimited = Quantity(value=MOST_HOST_BYTES_PER_S, source=hardware.host_copy_bytes_per_s.source)
    free = msgspec.structs.replace(hardware, host_copy_bytes_per_s=unlimited)
    limited = NodeRates(hardware, cluster).rates(COPIES) != NodeRates(free, cluster).rates(COPIES)
    return sum(of_copies) / len(of_copies) if of_copies and limited else 1.0


def _changes(factors: Mapping[str, float]) -> list[str]:
    """Return a line for each correction; rates that follow their group's factor stand behind it."""
    found = []
    for rate, factor in factors.items():
        if group_of(rate) != rate:
            continue
        own = [name for name in factors if group_of(name) == rate != name]
        parts = ", ".join(f"{name.removeprefix(rate + '.')} {factors[name]:.3f}" for name in own)
        found.append(f"{rate}: times {factor:.3f}" + (f" (of these {parts})" if parts else ""))
    return found


def _profiles_of(device: str) -> list[str]:
    """Return the GPUs with a shipped profile that a device's name contains."""
    words = device.lower().replace("-", " ").split()
    joined = {f"{first}{second}" for first, second in pairwise(words)}  # RTX 4090 is rtx4090
    names = [name.partition("-")[0] for name in list_hardware()]
    return [name for name in names if name in {*words, *joined}]


def _other_device(device: str, hardware: Hardware) -> str:
    """Return a note where a shipped profile is held against a trace of another device."""
    if hardware.name not in list_hardware() or hardware.name.partition("-")[0] in _profiles_of(device):
        return ""
    return f"The trace is of {device or NO_NAME}; the profile is that of another, {hardware.name}."


def _cluster_for(recording: Recording | None, traces: int) -> str:
    """Return the cluster for the device that a trace names, with nodes of eight devices for all ranks of the job.

    The job has as many ranks as the trace says, and at least as many as there are ``traces``.

    Raises:
        UsageError: when no shipped profile has its name.
    """
    device = recording.device if recording else ""
    found = _profiles_of(device)
    if recording is None or len(found) != 1:
        no_name = NO_NAME if recording and recording.on_gpu else "a CPU, which has no profile of its own"
        raise UsageError(
            "no profile is known for the device of the trace",
            got=device or no_name,
            wanted="--cluster NAME, or a profile of this machine",
            hint="memo-exec calibrate -o here.json, then --cluster here.json; memo-sim list hardware",
        )
    return f"{found[0]}-{-(-max(recording.world_size, traces) // PER_NODE)}x{PER_NODE}"
