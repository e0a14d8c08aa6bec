"""A cluster and its profile with one resource faster or larger, to ask what that resource is worth.

Rates change and sizes of curves stay; latencies, overheads and the reserve stay too.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

import msgspec

from memo_sim.contract.cluster import Cluster
from memo_sim.contract.explanation import Resource
from memo_sim.contract.hardware import CopyRates, Curve, Hardware, Quantity
from memo_sim.planning.question import with_memory

Scaled = TypeVar("Scaled", bound=Curve)
Machine = tuple[Cluster, Hardware]


def with_more(cluster: Cluster, hardware: Hardware, resource: Resource, factor: float) -> Machine | None:
    """Return the machine with ``factor`` times as much of a resource of ``RATES`` or ``MEMORIES``; None if it has none.

    Raises:
        KeyError: for a resource that is not the machine's.
    """
    return _MORE[resource](cluster, hardware, factor)


def _more(quantity: Quantity, factor: float) -> Quantity:
    return msgspec.structs.replace(quantity, value=quantity.value * factor)


def _higher(curve: Scaled, factor: float) -> Scaled:
    return msgspec.structs.replace(curve, y=[rate * factor for rate in curve.y])


def _faster_compute(cluster: Cluster, hardware: Hardware, factor: float) -> Machine:
    """Return the profile with faster products and attention; MFU stays a fraction of the faster peak."""
    return cluster, msgspec.structs.replace(
        hardware,
        peak_flops={dtype: _more(peak, factor) for dtype, peak in hardware.peak_flops.items()},
        gemm=[
            msgspec.structs.replace(table, rows=[[*row[:-1], row[-1] * factor] for row in table.rows])
            for table in hardware.gemm
        ],
        attention=[
            msgspec.structs.replace(table, rows=[[*row[:-1], row[-1] * factor] for row in table.rows])
            for table in hardware.attention
        ],
        grouped_gemm=[
            msgspec.structs.replace(table, rows=[[*row[:-1], row[-1] * factor] for row in table.rows])
            for table in hardware.grouped_gemm
        ],
    )


def _faster_memory(cluster: Cluster, hardware: Hardware, factor: float) -> Machine:
    return cluster, msgspec.structs.replace(
        hardware,
        memory_bytes_per_s=hardware.memory_bytes_per_s and _more(hardware.memory_bytes_per_s, factor),
        memory_bound_bytes_per_s=_higher(hardware.memory_bound_bytes_per_s, factor),
        rowwise_bytes_per_s={op: _higher(curve, factor) for op, curve in hardware.rowwise_bytes_per_s.items()},
        fused_rowwise_bytes_per_s={
            kernel: {op: _higher(curve, factor) for op, curve in curves.items()}
            for kernel, curves in hardware.fused_rowwise_bytes_per_s.items()
        },
        framework_rowwise_bytes_per_s={
            library: {pattern: _higher(curve, factor) for pattern, curve in curves.items()}
            for library, curves in hardware.framework_rowwise_bytes_per_s.items()
        },
    )


def _faster_copies(cluster: Cluster, hardware: Hardware, factor: float) -> Machine:
    copies = {"d2h": _copies(hardware.d2h, factor), "h2d": _copies(hardware.h2d, factor)}
    return cluster, msgspec.structs.replace(hardware, **copies)


def _copies(rates: CopyRates, factor: float) -> CopyRates:
    return CopyRates(
        alone=_higher(rates.alone, factor),
        duplex=_more(rates.duplex, factor),
        all_devices=_more(rates.all_devices, factor),
    )


def _faster_links(cluster: Cluster, hardware: Hardware, factor: float) -> Machine | None:
    if cluster.devices_per_node == 1 or not hardware.collectives:
        return None
    tables = [
        msgspec.structs.replace(table, bus_bytes_per_s=_higher(table.bus_bytes_per_s, factor))
        for table in hardware.collectives
    ]
    return cluster, msgspec.structs.replace(hardware, collectives=tables)


def _faster_network(cluster: Cluster, hardware: Hardware, factor: float) -> Machine | None:
    if cluster.nodes == 1 or cluster.network is None:
        return None
    network = msgspec.structs.replace(cluster.network, nic_bytes_per_s=_more(cluster.network.nic_bytes_per_s, factor))
    return msgspec.structs.replace(cluster, network=network), hardware


def _faster_launches(cluster: Cluster, hardware: Hardware, factor: float) -> Machine:
    """Return the profile of a host that launches kernels faster."""
    times = {
        "launch_floor_s": _more(hardware.launch_floor_s, 1 / factor),
        "host_launch_s": hardware.host_launch_s and _more(hardware.host_launch_s, 1 / factor),
        "host_pass_s": hardware.host_pass_s and _more(hardware.host_pass_s, 1 / factor),
    }
    return cluster, msgspec.structs.replace(hardware, **times)


def _faster_host(cluster: Cluster, hardware: Hardware, factor: float) -> Machine:
    return cluster, msgspec.structs.replace(
        hardware,
        host_copy_bytes_per_s=_more(hardware.host_copy_bytes_per_s, factor),
        host_update_bytes_per_s=hardware.host_update_bytes_per_s and _more(hardware.host_update_bytes_per_s, factor),
    )


def _larger_device(cluster: Cluster, hardware: Hardware, factor: float) -> Machine:
    size = int(hardware.device_memory_bytes.value * factor)
    return with_memory(cluster, hardware, device_bytes=size, host_bytes=None)


def _larger_host(cluster: Cluster, hardware: Hardware, factor: float) -> Machine:
    host = cluster.host_memory_bytes or hardware.host_memory_bytes
    return with_memory(cluster, hardware, device_bytes=None, host_bytes=int(host.value * factor))


_FASTER: dict[Resource, Callable[[Cluster, Hardware, float], Machine | None]] = {
    "compute": _faster_compute,
    "device memory rate": _faster_memory,
    "copies": _faster_copies,
    "links inside a node": _faster_links,
    "network": _faster_network,
    "host memory rate": _faster_host,
    "kernel launches": _faster_launches,
}
_LARGER: dict[Resource, Callable[[Cluster, Hardware, float], Machine | None]] = {
    "device memory": _larger_device,
    "host memory": _larger_host,
}
_MORE = _FASTER | _LARGER
RATES: tuple[Resource, ...] = tuple(_FASTER)
"""Resources that a machine can have more of per second."""
MEMORIES: tuple[Resource, ...] = tuple(_LARGER)
