"""Builds the hardware profile (``memo.hardware/1``) from the measurements, with source and spread of every number."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import get_args

import torch

from memo_exec.machine.machine import Machine, library_versions
from memo_exec.probes import memory
from memo_exec.probes.copy_rates import Copies, rate_of
from memo_exec.probes.overlap import Slowed
from memo_exec.probes.tables import (
    Timed,
    attention_tables,
    gemm_tables,
    grouped_tables,
    linear_loss_tables,
    rowwise_curves,
)
from memo_exec.probes.timing import Sample
from memo_sim.contract.hardware import CollectiveTable, Curve, Hardware, Quantity, Source
from memo_sim.contract.knobs import DtypeName
from memo_sim.program.ir.instruction import Lane

OPERATORS, COPIES, MEMORY, HOST, SYSTEM = "operators", "copies", "memory", "host", "system"
COLLECTIVES, LINK, DATASHEET = "collectives", "link", "datasheet"

PEAK_BF16_FLOPS = {
    "NVIDIA A100-SXM4-80GB": 312e12,
    "NVIDIA A800-SXM4-80GB": 312e12,
    "NVIDIA H100 80GB HBM3": 989e12,
    "NVIDIA H200": 989e12,
    "NVIDIA B200": 2250e12,
}
"""Dense peaks from NVIDIA's data sheets, by the device name that CUDA reports; published MFUs are relative to these."""

DTYPES: tuple[DtypeName, ...] = get_args(DtypeName)


@dataclass(frozen=True)
class Shared:
    """Results that several ranks measured together."""

    world: int
    tables: list[CollectiveTable]
    slowdowns: dict[Slowed, Quantity]
    communicator_bytes: dict[int, int]
    """Device bytes of one communicator on one rank, by its number of ranks; 0 on a CPU."""


@dataclass(frozen=True)
class Found:
    """All results that were measured on one device."""

    machine: Machine
    timed: list[Timed]
    copies: Copies
    floor: Sample
    allocation: memory.Allocation
    host_ready: Sample
    host_allocated: Sample | None
    reserve_bytes: dict[str, int]
    host_update: Quantity | None = None
    """Rate of AdamW on the host's cores, for all ranks together."""


def profile_of(found: Found, shared: Shared | None, name: str | None) -> Hardware:
    """Return the profile of one device; it includes the node's collectives if several ranks measured them."""
    machine, copies, allocation = found.machine, found.copies, found.allocation
    curves = rowwise_curves(found.timed, OPERATORS)
    fused = rowwise_curves(found.timed, OPERATORS, "triton")
    gemm = gemm_tables(found.timed, OPERATORS)
    fastest = {name: [row[3] for t in gemm if t.dtype == name for row in t.rows] for name in DTYPES}
    peaks = {name: Quantity(value=max(rates), source=OPERATORS) for name, rates in fastest.items() if rates}
    if machine.name in PEAK_BF16_FLOPS:
        peaks["bf16"] = Quantity(value=PEAK_BF16_FLOPS[machine.name], source=DATASHEET)
    pinned = found.host_allocated
    return Hardware(
        name=name or re.sub(r"[^a-z0-9]+", "-", machine.name.lower()).strip("-"),
        device=machine.device,
        generation=machine.generation,
        peak_flops=peaks,
        device_memory_bytes=Quantity(value=float(machine.device_memory_bytes), source=SYSTEM),
        reserve_bytes={item: Quantity(value=float(size), source=SYSTEM) for item, size in found.reserve_bytes.items()},
        communicator_bytes=_communicators(shared) if shared else None,
        gemm=gemm,
        grouped_gemm=grouped_tables(found.timed, OPERATORS),
        linear_loss=linear_loss_tables(found.timed, OPERATORS),
        attention=attention_tables(found.timed, OPERATORS),
        memory_bound_bytes_per_s=curves["copy"],
        rowwise_bytes_per_s=curves,
        fused_rowwise_bytes_per_s={"triton": fused} if fused else {},
        launch_floor_s=_seconds(found.floor),
        d2h=copies.rates[Lane.D2H],
        h2d=copies.rates[Lane.H2D],
        devices_per_uplink=Quantity(value=1.0, source=LINK),
        collectives=shared.tables if shared else [],
        compute_slowdown={"copy": copies.slowdown, **(shared.slowdowns if shared else {})},
        device_malloc_s=_seconds(allocation.asked),
        device_free_s=_seconds(allocation.given_back),
        device_malloc_s_per_gib=_seconds(allocation.asked_per_gib),
        device_free_s_per_gib=_seconds(allocation.given_back_per_gib),
        host_register_bytes_per_s=rate_of(
            memory.host_block_bytes(torch.device(machine.device)), found.host_ready, MEMORY
        ),
        host_alloc_bytes_per_s=rate_of(memory.PINNED_BYTES, pinned, MEMORY) if pinned else None,
        host_memory_bytes=Quantity(value=float(machine.host_memory_bytes), source=SYSTEM),
        host_copy_bytes_per_s=Quantity(value=copies.together_bytes_per_s, source=COPIES),
        host_update_bytes_per_s=found.host_update,
        devices=shared.world if shared else 1,
        sources=_sources(machine, shared),
    )


def _communicators(shared: Shared) -> Curve | None:
    """Return a communicator's device bytes by its number of ranks; None if it uses no device memory."""
    found = {float(ranks): float(size) for ranks, size in sorted(shared.communicator_bytes.items()) if size > 0}
    return Curve(x=list(found), y=list(found.values()), source=COLLECTIVES) if found else None


def _seconds(sample: Sample) -> Quantity:
    return Quantity(value=sample.seconds, source=MEMORY, spread=sample.spread)


def _sources(machine: Machine, shared: Shared | None) -> dict[str, Source]:
    libraries = ", ".join(f"{name} {version}" for name, version in library_versions().items())
    where = f"memo-exec calibrate on {machine.name}, torch {torch.__version__}"
    where += f", {libraries}" if libraries else ""
    cpu = machine.device == "cpu"
    added = ", and the time that a step adds to a kernel that runs alone" if cpu else ""
    floor = "the interpreter between two instructions" if cpu else "one of many tiny kernels in a row"
    every = f"measured while {shared.world} ranks copy at once" if shared else "the rate beside compute"
    texts = {
        OPERATORS: f"{where}: single operators with the executor's kernels, only the newest input in cache; "
        f"median{added}",
        COPIES: f"{where}: copies in the executor's lanes, median; all_devices is {every}; host_copy is both "
        "directions at once; compute_slowdown is measured on a layer's operators beside one copy lane",
        MEMORY: f"{where}: the launch floor is {floor}; device blocks of {memory.BLOCK_BYTES} and "
        f"{memory.LARGE_BYTES} bytes and the line through both; host blocks of "
        f"{memory.host_block_bytes(torch.device(machine.device))} bytes, "
        f"pinned ones of {memory.PINNED_BYTES} bytes",
        HOST: f"{where}: torch's fused AdamW on the host's cores and the cast of the parameters, as the executor plays "
        "it, all ranks at once, slowest rank, median",
        SYSTEM: f"{where}: reported by the system; host memory is the container's limit",
    }
    sources = {name: Source(kind="measured", text=text) for name, text in texts.items()}
    if machine.name in PEAK_BF16_FLOPS:
        sources[DATASHEET] = Source(kind="datasheet", text=f"NVIDIA's data sheet for {machine.name}: dense bf16")
    if shared is None:
        text = "one device was measured, so no other device is assumed on its link"
    else:
        text = f"all_devices already includes the cost of a link shared by {shared.world} devices"
        over = "gloo" if cpu else "NCCL"
        calls = "calls from a lane's thread behind compute, last rank" if cpu else "calls back to back, slowest rank"
        sources[COLLECTIVES] = Source(
            kind="measured",
            text=f"{where}: {over} between {shared.world} ranks of one node, {calls}, median; "
            "alpha is the shortest time of any size; compute_slowdown is measured on a layer's operators beside them; "
            "a communicator's bytes are those outside torch's allocator after one call of every kind",
        )
    return {**sources, LINK: Source(kind="assumed", text=text)}
