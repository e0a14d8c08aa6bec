"""Reads what nccl-tests and nvbandwidth print, as a profile's collectives and copy rates.

nccl-tests (its text output; NVIDIA/nccl-tests a0b82b2) names the program and the ranks in comments, and then has a line
for each size: size, count, type, reduction, root, and for out-of-place and in-place time in us, algbw, busbw, errors.
nvbandwidth (``-j``; NVIDIA/nvbandwidth 66746a3) lists test cases, each with a matrix of GB/s as text.
"""

from __future__ import annotations

import re

import msgspec

from memo_sim.contract.errors import BadInput
from memo_sim.contract.hardware import CollectiveKind, CollectiveTable, Curve

PROGRAMS: dict[str, CollectiveKind] = {
    "all_reduce_perf": "all_reduce",
    "all_gather_perf": "all_gather",
    "reduce_scatter_perf": "reduce_scatter",
    "alltoall_perf": "all_to_all",
    "broadcast_perf": "broadcast",
    "reduce_perf": "reduce",
    "sendrecv_perf": "send_recv",
}
COPIES = {
    "device_to_host_memcpy_ce": "d2h.alone",
    "host_to_device_memcpy_ce": "h2d.alone",
    "device_to_host_bidirectional_memcpy_ce": "d2h.duplex",
    "host_to_device_bidirectional_memcpy_ce": "h2d.duplex",
    "all_to_host_memcpy_ce": "d2h.all_devices",
    "host_to_all_memcpy_ce": "h2d.all_devices",
}
"""nvbandwidth's test cases with copy engines, and the rate of a profile that each measures."""
GIGA = 1e9
_ROW = re.compile(r"\s*(\d+)\s+\d+\s+\S+\s+\S+\s+-?\d+\s+([\d.]+)\s+([\d.]+)\s+([\d.]+)\s")
_RANK = re.compile(r"#\s+Rank\s+(\d+)\s")
_PROGRAM = re.compile(r"\b(\w+_perf)")


class _TestCase(msgspec.Struct):
    name: str = ""
    status: str = ""
    bandwidth_matrix: list[list[str]] | None = None


class _Cases(msgspec.Struct):
    testcases: list[_TestCase] = []


class _Report(msgspec.Struct):
    nvbandwidth: _Cases


def read_nccl_tests(raw: bytes, where: str, *, source: str) -> CollectiveTable:
    """Return the collective that a run of nccl-tests measured, out of place.

    The table's bus rate at a size is the one that nccl-tests prints, which contains the start of the call; its alpha is
    therefore 0.

    Raises:
        BadInput: when the output names no program or no ranks, or has no line with a size.
    """
    text = raw.decode("utf-8", "replace")
    names = [name for name in _PROGRAM.findall(text) if name in PROGRAMS]
    ranks = {int(number) for number in _RANK.findall(text)}
    if not names:
        raise BadInput(
            "the output does not say which collective it measured",
            where=where,
            wanted=f"a line '# Collective test starting: ...' or the command: one of {', '.join(PROGRAMS)}",
        )
    if len(ranks) < 2:
        raise BadInput("the output lists no ranks", where=where, wanted="two or more lines '#  Rank  0 ...'")
    rates = {int(row[1]): float(row[4]) * GIGA for line in text.splitlines() if (row := _ROW.match(line))}
    rates = {size: rate for size, rate in sorted(rates.items()) if size > 0 and rate > 0}
    if not rates:
        raise BadInput("the output has no line with a size and a rate", where=where, wanted="the table of a whole run")
    curve = Curve(x=[float(size) for size in rates], y=list(rates.values()), source=source)
    return CollectiveTable(kind=PROGRAMS[names[0]], ranks=len(ranks), alpha_s=0.0, bus_bytes_per_s=curve, source=source)


def read_nvbandwidth(raw: bytes, where: str) -> dict[str, float]:
    """Return copy rates in bytes/s by the name of the profile's rate: those of the slowest device.

    Raises:
        BadInput: when it is not the JSON of nvbandwidth, or has no copy between host and device.
    """
    try:
        report = msgspec.json.decode(raw, type=_Report)
    except msgspec.MsgspecError as error:
        raise BadInput(
            "not the JSON of nvbandwidth", where=where, got=str(error), hint="nvbandwidth -j > FILE"
        ) from None
    found = {}
    for case in report.nvbandwidth.testcases:
        rates = [rate for row in case.bandwidth_matrix or [] for rate in map(_rate, row) if rate > 0]
        if case.name in COPIES and rates:
            found[COPIES[case.name]] = min(rates) * GIGA
    if not found:
        raise BadInput(
            "no copy between host and device was measured", where=where, wanted=f"one of {', '.join(COPIES)}"
        )
    return found


def _rate(text: str) -> float:
    """Return a cell's number; 0 for a pair that was not measured."""
    try:
        return float(text)
    except ValueError:
        return 0.0
