"""Answers ``memo-sim doctor``: what a recorded step of the user's own job did, and a profile that knows it."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

import msgspec

from memo_sim.contract.catalog import list_hardware, load_cluster
from memo_sim.contract.cluster import Cluster
from memo_sim.contract.codec import read_raw
from memo_sim.contract.errors import UsageError
from memo_sim.contract.hardware import Hardware, Source
from memo_sim.contract.recorded_step import RecordedStep
from memo_sim.memory.read_requests import read_requests
from memo_sim.observed.correction import PRODUCTS, ROWWISE, corrected, with_collectives, with_copies
from memo_sim.observed.kineto import read_recording
from memo_sim.observed.link_benchmarks import read_nccl_tests, read_nvbandwidth
from memo_sim.reasons.recorded_step import Priced, memory_of, price_recording, step_of

LEAST_CALLS, LEAST_SHARE = 8, 0.005
"""A kind of work corrects a profile when it has at least as many calls and takes at least this part of the step."""


@dataclass(frozen=True)
class Diagnosis:
    """The recorded step beside the prediction (None without a trace), the corrected profile, and what changed in it."""

    job: RecordedStep | None
    cluster: Cluster
    hardware: Hardware
    changes: list[str]


def diagnose(
    *,
    trace: str | None = None,
    memory: str | None = None,
    cluster: str | None = None,
    nccl_tests: Sequence[str] = (),
    nvbandwidth: str | None = None,
) -> Diagnosis:
    """Compare a recorded step with a profile, and correct the profile by everything that was measured.

    ``trace`` is a PyTorch profiler trace, ``memory`` a snapshot of PyTorch's allocator, ``nccl_tests`` outputs of
    nccl-tests, ``nvbandwidth`` its JSON. ``cluster`` is a cluster or profile; without it, the profile is the one whose
    GPU the trace names.

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
    recording = read_recording(read_raw(trace), trace) if trace else None
    machine, hardware = load_cluster(cluster or _cluster_for(recording.device if recording else ""))
    if recording is not None and recording.on_gpu != (hardware.device == "cuda"):
        raise UsageError(
            "the trace and the profile are of different kinds of device",
            got=f"{recording.device or 'a CPU'}, {hardware.name}",
            wanted="a profile of the device that the trace was recorded on",
            hint="--cluster here.json, as memo-exec calibrate -o here.json writes it",
        )
    job, changes = None, list[str]()
    if recording is not None and trace is not None:
        priced, outside = price_recording(recording, machine, hardware)
        job = step_of(recording, priced, outside, trace=Path(trace).name, hardware=hardware)
        if memory:
            found = read_requests(memory)
            job = msgspec.structs.replace(job, memory=memory_of(found.requests, found.notes))
        factors = factors_of(priced, sum(one.operation.recorded.seconds for one in priced))
        text = f"PyTorch profiler trace {Path(trace).name} ({recording.device or 'CPU'})"
        hardware = corrected(hardware, factors, text=text) if factors else hardware
        changes += [f"{_corrected(kind, hardware)}: times {factor:.3f}" for kind, factor in factors.items()]
    for path in nccl_tests:
        name = f"nccl-tests-{Path(path).name}"
        table = read_nccl_tests(read_raw(path), path, source=name)
        source = Source(kind="measured", text=f"nccl-tests, out of place, {table.ranks} ranks: {Path(path).name}")
        hardware = with_collectives(hardware, [table], source, name)
        changes.append(f"{table.kind} of {table.ranks} ranks: {len(table.bus_bytes_per_s.x)} sizes")
    if nvbandwidth:
        rates = read_nvbandwidth(read_raw(nvbandwidth), nvbandwidth)
        source = Source(kind="measured", text=f"nvbandwidth, copy engines, slowest device: {Path(nvbandwidth).name}")
        hardware = with_copies(hardware, rates, source, "nvbandwidth")
        changes += [f"{rate}: {value / 1e9:.1f} GB/s" for rate, value in rates.items()]
    if changes:
        before = hardware.provenance.get("corrected", "")
        told = "; ".join(filter(None, (before, *changes)))
        hardware = msgspec.structs.replace(hardware, provenance={**hardware.provenance, "corrected": told})
    return Diagnosis(job, machine, hardware, changes)


def _corrected(kind: str, hardware: Hardware) -> str:
    """Return a kind of work with what of it is corrected: operators with rates of their own keep these."""
    own = hardware.rowwise_bytes_per_s or hardware.fused_rowwise_bytes_per_s or hardware.framework_rowwise_bytes_per_s
    return (
        f"{kind}, where the profile has no rates for the operator or its kernels" if kind == ROWWISE and own else kind
    )


def factors_of(priced: Sequence[Priced], total_s: float) -> dict[str, float]:
    """Return measured / predicted seconds of each kind that is large enough to correct a profile.

    A collective's kernel also waits for the slowest rank. So of equal collectives the fastest one counts for all.
    """
    fastest: dict[str, float] = {}
    for one in priced:
        call, seconds = one.operation.kind + one.operation.shape, one.operation.recorded.seconds
        fastest[call] = min(seconds, fastest.get(call, seconds))
    measured: dict[str, float] = defaultdict(float)
    predicted: dict[str, float] = defaultdict(float)
    calls: dict[str, int] = defaultdict(int)
    for one in priced:
        if one.predicted_s:
            kind, seconds = one.operation.kind, one.operation.recorded.seconds
            if kind.startswith("collective"):
                seconds = fastest[kind + one.operation.shape]
            kind = PRODUCTS if kind.startswith(PRODUCTS) else kind
            measured[kind] += seconds
            predicted[kind] += one.predicted_s
            calls[kind] += 1
    return {
        kind: measured[kind] / predicted[kind]
        for kind in sorted(measured)
        if calls[kind] >= LEAST_CALLS and measured[kind] >= LEAST_SHARE * total_s
    }


def _cluster_for(device: str) -> str:
    """Return the cluster of one node for the device that a trace names.

    Raises:
        UsageError: when no shipped profile has its name.
    """
    words = device.lower().replace("-", " ").split()
    joined = {f"{first}{second}" for first, second in pairwise(words)}  # RTX 4090 is rtx4090
    found = [name for name in list_hardware() if name.partition("-")[0] in {*words, *joined}]
    if len(found) != 1:
        raise UsageError(
            "no profile is known for the device of the trace",
            got=device or "a CPU, which has no profile of its own",
            wanted="--cluster NAME, or a profile of this machine",
            hint="memo-exec calibrate -o here.json, then --cluster here.json; memo-sim list hardware",
        )
    return f"{found[0].partition('-')[0]}-1x8"
