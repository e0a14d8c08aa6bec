"""Shows what a data sheet was made into: the main rates of the rough profile, and what they are fractions of."""

from __future__ import annotations

from memo_sim.contract.cluster import Cluster
from memo_sim.contract.hardware import Hardware
from memo_sim.contract.units import format_bytes
from memo_sim.views.text_table import text_table

HEAD_DIM = 128
"""Head size of the attention kernels that are shown."""


def datasheet_table(cluster: Cluster, hardware: Hardware) -> str:
    """Return the rates at large sizes of a rough profile, one per row, with the source of each."""
    peak = hardware.peak_flops["bf16"].value
    rows = [["peak in bf16", _tflops(peak), hardware.peak_flops["bf16"].source]]
    for products in (table for table in hardware.gemm if table.dtype == "bf16"):
        rate = max(row[3] for row in products.rows)
        rows.append([f"products, {products.gemm_pass}", _tflops(rate), products.source])
    for calls in (table for table in hardware.attention if table.head_dim == HEAD_DIM):
        rate = max(row[2] for row in calls.rows)
        rows.append([f"attention, {calls.kernel} {calls.attention_pass}", _tflops(rate), calls.source])
    memory = hardware.memory_bound_bytes_per_s
    usable, host = hardware.device_memory_bytes, cluster.host_memory_bytes or hardware.host_memory_bytes
    rows += [
        ["device memory", format_bytes(usable.value), usable.source],
        ["row-wise operators", _rate(max(memory.y)), memory.source],
        ["copies to the host", _rate(max(hardware.d2h.alone.y)), hardware.d2h.alone.source],
        ["copies from the host", _rate(max(hardware.h2d.alone.y)), hardware.h2d.alone.source],
    ]
    for table in (t for t in hardware.collectives if t.kind == "all_gather"):
        curve = table.bus_bytes_per_s
        rows.append([f"all-gather of {table.ranks} in a node", _rate(max(curve.y)), curve.source])
    if cluster.network is not None:
        cards = f"{cluster.network.nics_per_node} x {_rate(cluster.network.nic_bytes_per_s.value)}"
        rows.append(["network of a node", cards, cluster.network.nic_bytes_per_s.source])
    rows.append(["host memory of a node", format_bytes(host.value), host.source])
    return text_table(["figure", "at most", "source"], rows, "lrl")


def _tflops(flops: float) -> str:
    return f"{flops / 1e12:.4g} TFLOP/s"


def _rate(bytes_per_s: float) -> str:
    return f"{bytes_per_s / 1e9:.4g} GB/s"
