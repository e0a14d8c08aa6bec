"""Reads what nccl-tests and nvbandwidth print, as rates of collectives and copies.

nccl-tests prints text, and since 2.17 JSON too (``-J FILE``); both were read in its sources (NVIDIA/nccl-tests,
src/util.cu at 0fdb00a3). The text names the program, its ranks with their hosts, and has a header and a line for each
size. Of the columns, ``algbw`` is bytes / time and ``busbw`` is algbw x the kind's factor (PERFORMANCE.md), so that it
compares with a link's rate:

    all-reduce 2(n-1)/n    all-gather, reduce-scatter, all-to-all (n-1)/n    broadcast, reduce, send and receive 1

``bytes`` is the whole tensor, for an all-to-all what one rank holds, as in a profile. nvbandwidth (``-j``;
NVIDIA/nvbandwidth, json_output.cpp at 4a346807) lists test cases, each with a matrix of GB/s as text.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from statistics import median

import msgspec

from memo_sim.contract.codec import decode_foreign
from memo_sim.contract.errors import BadInput
from memo_sim.contract.hardware import CollectiveKind, CollectiveTable, Curve
from memo_sim.costs.collective import volume_factor

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
LEAST_GB_PER_S = 1.0
"""Below it two decimals are too few to see the factor of a bus rate."""
MEASURABLE_GB_PER_S, MOST_GB_PER_S = 1e-4, 1e6
"""No link is slower or faster; a rate beyond these counts as not measured."""
FACTOR_TOLERANCE = 0.03
MOST_TENSOR_BYTES, MOST_RANKS = 2**60, 2**20

_STARTING = re.compile(r"^#\s*Collective test starting:\s*(\S+)", re.MULTILINE)
_RANK = re.compile(r"^#\s+Rank\s+(\d{1,9})(?:\s+Group\s+(\d{1,9}))?\s+Pid\s+\d+\s+on\s+(\S+)\s", re.MULTILINE)
_PROGRAM = re.compile(r"\b(\w+_perf)(?:_mpi)?\b")
_BAD = re.compile(r"^#\s*Out of bounds values\s*:\s*(\d+)\s+FAILED", re.MULTILINE)


@dataclass(frozen=True)
class Row:
    """One size: bytes, and GB/s out of place."""

    size: int
    algbw: float
    busbw: float


@dataclass(frozen=True)
class LinkTest:
    """What one run of nccl-tests measured, out of place: bus rates in bytes/s by the bytes of the tensor."""

    kind: CollectiveKind
    ranks: int
    nodes: int
    bus_bytes_per_s: dict[int, float]

    def table(self, source: str) -> CollectiveTable:
        """Return the table of a profile. The rate contains the start of a call, so alpha is 0."""
        curve = self.curve(source)
        return CollectiveTable(kind=self.kind, ranks=self.ranks, alpha_s=0.0, bus_bytes_per_s=curve, source=source)

    def curve(self, source: str, over: float = 1.0) -> Curve:
        """Return the bus rate by bytes, divided by ``over``."""
        sizes = sorted(self.bus_bytes_per_s)
        rates = [self.bus_bytes_per_s[size] / over for size in sizes]
        return Curve(x=[float(size) for size in sizes], y=rates, source=source)


class _Result(msgspec.Struct):
    alg_bw: float | str = 0.0
    bus_bw: float | str = 0.0
    nwrong: float | str | None = None


class _Size(msgspec.Struct):
    size: int
    out_of_place: _Result | None = None
    in_place: _Result | None = None


class _Place(msgspec.Struct):
    group: int = 0
    hostname: str = ""


class _Config(msgspec.Struct):
    nthreads: int = 1
    ngpus: int = 1
    devices: list[_Place] = []


class _Bounds(msgspec.Struct):
    count: int = 0


class _NcclReport(msgspec.Struct):
    """The parts of nccl-tests' JSON that are read; each process lists its first device only."""

    args: list[str | None]
    config: _Config
    results: list[_Size]
    out_of_bounds: _Bounds | None = None


class _TestCase(msgspec.Struct):
    name: str = ""
    status: str = ""
    bandwidth_matrix: list[list[str | float] | None] | None = None
    """GB/s as text, ``N/A`` for a pair that was not measured."""


class _Cases(msgspec.Struct):
    testcases: list[_TestCase] = []
    error: str = ""


class _Report(msgspec.Struct):
    nvbandwidth: _Cases


@dataclass(frozen=True)
class CopyTests:
    """Copy rates in bytes/s by the name of the profile's rate, those of the slowest device; how many devices."""

    rates: dict[str, float]
    devices: int
    skipped: list[str]
    """Test cases of copies that did not pass."""


def read_nccl_tests(raw: bytes, where: str) -> list[LinkTest]:
    """Return what runs of nccl-tests measured: one for each program in the text, or that of its JSON.

    Raises:
        BadInput: when the output names no program or no ranks, has no line with a size, has wrong results, or bus rates
            that do not belong to its ranks.
    """
    if raw.lstrip().startswith(b"{"):
        return [_read_json(raw, where)]
    text = raw.decode("utf-8", "replace")
    starts = [match.start() for match in _STARTING.finditer(text)]
    starts = starts if len(starts) > 1 else [0]
    parts = [text[a:b] for a, b in zip(starts, [*starts[1:], len(text)], strict=True)]
    return [_read_text(part, where) for part in parts]


def _read_text(text: str, where: str) -> LinkTest:
    # The command that is echoed before the next program belongs to this part of the text.
    started = _PROGRAM.findall(" ".join(_STARTING.findall(text)))
    named = {name for name in started or _PROGRAM.findall(text) if name in PROGRAMS}
    if len(named) != 1:
        raise BadInput(
            "the output does not say which collective it measured",
            where=where,
            got=", ".join(sorted(named)) or None,
            wanted=f"a line '# Collective test starting: ...' or the command: one of {', '.join(PROGRAMS)}",
        )
    (name,) = named
    listed = [(int(rank), int(group or 0), host) for rank, group, host in _RANK.findall(text)]
    group = listed[0][1] if listed else 0
    hosts: dict[int, str] = {rank: host for rank, of, host in listed if of == group}
    wrong = [count for count in _BAD.findall(text) if count.strip("0")]
    rows = list(_rows(text, where))
    if wrong:
        raise _wrong(where, " and ".join(wrong))
    return _link_test(PROGRAMS[name], len(hosts), len(set(hosts.values())), rows, where)


def _rows(text: str, where: str) -> Iterator[Row]:
    """Yield the out-of-place figures of each line of a table, by the names in its header."""
    columns: list[str] = []
    for number, line in enumerate(text.splitlines(), 1):
        words = line.split()
        if words[:1] == ["#"] and {"size", "algbw", "busbw"} <= set(words):
            columns = words[1:]
            continue
        if not columns or not words or not words[0].isdigit() or len(words) < columns.index("busbw") + 2:
            continue
        try:
            size, algbw, busbw = (float(words[columns.index(name)]) for name in ("size", "algbw", "busbw"))
            row = Row(int(size), algbw, busbw)
        except (ValueError, OverflowError):
            raise BadInput(
                "a line of the table has no numbers where its header names them",
                where=f"{where}: line {number}",
                got=line.strip(),
                wanted=" ".join(columns),
            ) from None
        wrong = [words[i] for i, name in enumerate(columns) if name == "#wrong" and i < len(words)]
        if any(count not in ("0", "N/A") for count in wrong):
            raise _wrong(f"{where}: line {number}", " and ".join(wrong))
        yield row


def _read_json(raw: bytes, where: str) -> LinkTest:
    report = decode_foreign(raw, _NcclReport, what="not the JSON of nccl-tests", where=where, hint="-J FILE")
    name = (report.args or [""])[0] or ""
    program = name.replace("\\", "/").rpartition("/")[2].removesuffix("_mpi")
    if program not in PROGRAMS:
        raise BadInput(
            "the output does not say which collective it measured",
            where=f"{where}: $.args[0]",
            got=name,
            wanted=f"one of {', '.join(PROGRAMS)}",
        )
    places = report.config.devices
    own = [place for place in places if place.group == places[0].group]
    rows = []
    for index, size in enumerate(report.results):
        results = [result for result in (size.out_of_place, size.in_place) if result is not None]
        if wrong := [f"{result.nwrong}".removesuffix(".0") for result in results if result.nwrong not in (None, 0.0)]:
            raise _wrong(f"{where}: $.results[{index}]", " and ".join(wrong))
        found = size.out_of_place
        if found is not None and isinstance(found.alg_bw, float) and isinstance(found.bus_bw, float):
            rows.append(Row(size.size, found.alg_bw, found.bus_bw))
    if report.out_of_bounds is not None and report.out_of_bounds.count:
        raise _wrong(f"{where}: $.out_of_bounds", str(report.out_of_bounds.count))
    ranks = len(own) * report.config.nthreads * report.config.ngpus
    return _link_test(PROGRAMS[program], ranks, len({place.hostname for place in own}), rows, where)


def _wrong(where: str, got: str) -> BadInput:
    return BadInput(
        "nccl-tests found wrong results, so its rates are not those of a machine that works",
        where=where,
        got=f"{got} wrong",
        wanted="0",
        hint="find out why first (NCCL_DEBUG=INFO, cables, ECC errors)",
    )


def _link_test(kind: CollectiveKind, ranks: int, nodes: int, rows: Sequence[Row], where: str) -> LinkTest:
    if ranks < 2:
        raise BadInput("the output lists no ranks", where=where, wanted="two or more lines '#  Rank  0 ...'")
    if ranks > MOST_RANKS:
        raise BadInput("the output lists too many ranks", where=where, wanted=f"at most {MOST_RANKS}")
    factor = volume_factor(kind, ranks)
    by_size: dict[int, list[float]] = defaultdict(list)
    for row in rows:
        if row.algbw >= LEAST_GB_PER_S and abs(row.busbw / row.algbw / factor - 1) > FACTOR_TOLERANCE:
            raise BadInput(
                f"the bus rates are not those of {ranks} ranks",
                where=where,
                got=f"busbw {row.busbw:g} of algbw {row.algbw:g} at {row.size} bytes",
                wanted=f"busbw = {factor:.4f} x algbw for {kind} of {ranks} ranks",
                hint="the whole output, with every '#  Rank' line",
            )
        if 0 < row.size <= MOST_TENSOR_BYTES and MEASURABLE_GB_PER_S < row.busbw < MOST_GB_PER_S:
            by_size[row.size].append(row.busbw * GIGA)
    if not by_size:
        raise BadInput(
            "the output has no line with a size and a rate",
            where=where,
            wanted="the table of a whole run with its header",
        )
    return LinkTest(kind, ranks, nodes, {size: median(rates) for size, rates in by_size.items()})


def read_nvbandwidth(raw: bytes, where: str) -> CopyTests:
    """Return copy rates in bytes/s by the name of the profile's rate: those of the slowest device.

    Raises:
        BadInput: when it is not the JSON of nvbandwidth, or no copy between host and device passed.
    """
    start = raw.find(b"{")
    told = {"what": "not the JSON of nvbandwidth", "where": where, "hint": "nvbandwidth -j > FILE"}
    report = decode_foreign(raw[max(start, 0) :], _Report, **told)
    found, skipped, devices = dict[str, float](), list[str](), 1
    for case in report.nvbandwidth.testcases:
        if case.name not in COPIES:
            continue
        rates = [rate for row in case.bandwidth_matrix or [] for rate in map(_rate, row or []) if rate > 0]
        if case.status != "Passed" or not rates:
            skipped.append(f"{case.name}: {'no rate' if case.status == 'Passed' else case.status or 'no status'}")
            continue
        found[COPIES[case.name]] = min(rates) * GIGA
        devices = max(devices, len(rates))
    if not found:
        said = "; ".join(filter(None, [report.nvbandwidth.error, *skipped]))
        raise BadInput(
            "no copy between host and device was measured",
            where=where,
            got=said or None,
            wanted=f"one of {', '.join(COPIES)}",
        )
    return CopyTests(found, devices, skipped)


def _rate(text: str | float) -> float:
    """Return a cell's number; 0 for a pair that was not measured."""
    try:
        rate = float(text)
    except ValueError:
        return 0.0
    return rate if MEASURABLE_GB_PER_S < rate < MOST_GB_PER_S else 0.0
