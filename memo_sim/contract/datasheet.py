"""A rough hardware profile from the figures of a data sheet, for a GPU that has no profile of its own.

    tflops=165.2,memory=24,pcie=4x16,bandwidth=1008

A data sheet has peaks; a step runs at fractions of them. The fractions are those of a shipped profile (``like``):

    products, attention    rate' = rate x tflops' / tflops, at each shape; a product is no faster than the bytes of its
                           operands through the device's memory
    row-wise operators     the same fraction of the bus, at sizes that take as long: x' = x b, y' = y b, b = bus' / bus
    copies to the host     the same fraction of the link, likewise
    collectives            over NVLink the same fraction of the link; without it, over PCIe (``PCIE_SHARES``)
    all else               as on the node of ``like``: context, launches, the host's memory and processors

The rule ``like=a100`` fits chips whose tensor cores are fed as Ampere's are (``mma.sync``: Ampere, Ada, GeForce
Blackwell), ``like=h100`` Hopper's, ``like=b200`` data-center Blackwell's. A profile made so says that it is rough, and
what it assumes, under ``provenance``; predictions with it have no interval.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass, field
from math import isfinite
from typing import TypeVar

import msgspec

from memo_sim.contract.errors import UsageError, did_you_mean
from memo_sim.contract.hardware import (
    ASSUMED,
    ROUGH,
    CollectiveTable,
    CopyRates,
    Curve,
    GemmTable,
    Hardware,
    Quantity,
    Source,
)
from memo_sim.contract.knobs import DtypeName
from memo_sim.contract.units import DTYPE_BYTES, GIB, format_percent

OPTION = "--from-datasheet"
EXAMPLE = "tflops=165,memory=24,pcie=4x16"
DATASHEET = "datasheet"
"""The source of the figures that a data sheet gives."""


@dataclass(frozen=True, slots=True)
class Reference:
    """A shipped profile that lends its fractions, and the peaks that these are fractions of, in FLOP/s and bytes/s."""

    profile: str
    fp32: float
    bus: float
    link: float
    """Of one device to the others of its node, in one direction."""
    pcie: float
    """Of one device to its host, in one direction."""
    memory_gib: int
    """As the data sheet states the device's memory; a process can use a little less."""


LANE_BYTES_PER_S = {3: 0.985e9, 4: 1.969e9, 5: 3.938e9, 6: 7.563e9}
"""Rate of one PCIe lane in one direction, by generation: 8, 16, 32 and 64 GT/s less the line code."""

REFERENCES = {
    "a100": Reference("a100-sxm4-80gb", 19.5e12, 2.039e12, 300e9, 16 * LANE_BYTES_PER_S[4], 80),
    "h100": Reference("h100-sxm5-80gb", 66.9e12, 3.35e12, 450e9, 16 * LANE_BYTES_PER_S[5], 80),
    "b200": Reference("b200-sxm6-180gb", 80e12, 8e12, 900e9, 16 * LANE_BYTES_PER_S[5], 180),
}
"""By the word after ``like=``; peaks of NVIDIA's data sheets."""

PCIE_SHARES = {True: ((2, 0.63),), False: ((4, 0.56), (8, 0.44))}
"""Whether devices reach each other's memory: (ranks up to, bus rate of a collective over PCIe's rate one way)."""

PCIE_SHARES_TEXT = {
    True: "A100s that have no NVLink between them reach an all-reduce bus rate of 20 GB/s over PCIe Gen4 x16 "
    "(NVIDIA/nccl-tests#178), .63 of 31.5 in one direction",
    False: "RTX 5090s over PCIe Gen5 x16, whose driver has no P2P, reach all-reduce bus rates of 35 GB/s with four and "
    "28 with eight (NVIDIA/nccl#1639), .56 and .44 of 63 in one direction: everything crosses the host's memory",
}

PCIE_HOP = 5.7 / 3.4
"""Latency of a PCIe hop over that of an NVLink hop, with NCCL's Simple protocol (its ``tuning.cc``, hwLat)."""

ENDS = {
    "the peak of tensor cores": "tensor",
    "the peak of fp32": "fp32",
    "the memory's bus": "bus",
    "the PCIe link": "pcie",
    "the NVLink rate": "nvlink",
}
"""What rates are fractions of, and the end of their sources' names."""

MOST_DEVICES = 16
"""In a node; collectives of more ranks than these are far from any that was measured."""

DIGITS = 6
"""Significant digits of a rate that was scaled; the figures behind it have fewer."""

T = TypeVar("T")
_NAME = re.compile(r"[a-z0-9]{1,32}(-[a-z0-9]{1,32}){0,4}")
_GENERATION = re.compile(r"[A-Za-z0-9 ]{1,32}")
_PAIRS = re.compile(r"[,\s]+")
_PAIR = re.compile(r"[a-z0-9-]+=[^=/]*")
_PCIE = re.compile(r"([3-6])x(1|2|4|8|16)")


@dataclass(frozen=True, slots=True)
class DataSheet:
    """What a data sheet says about one board, and the node and network around it, in the units of data sheets."""

    tflops: float
    """Dense bf16 with fp32 accumulation, without sparsity."""
    memory: float
    """GiB of the board (data sheets write GB)."""
    pcie: tuple[int, int]
    """Generation and lanes."""
    bandwidth: float | None = None
    """GB/s of the device's memory."""
    fp32: float | None = None
    """TFLOP/s without tensor cores."""
    nvlink: float | None = None
    """GB/s of all links of a device, both directions together, to all devices of its node."""
    p2p: bool = False
    """Whether devices reach each other's memory over PCIe; only without NVLink."""
    uplink: int = 1
    """Devices that share one PCIe link to the host."""
    devices: int = 8
    nodes: int = 1
    network_gbps: float | None = None
    """Gb/s of one network card."""
    cards: int = 1
    """Network cards of a node."""
    host: float | None = None
    """GiB of a node's host memory."""
    like: str = "a100"
    generation: str = ""
    name: str = "datasheet"


def _number(least: float, most: float) -> Callable[[str], float]:
    def parse(text: str) -> float:
        value = float(text)
        if not (isfinite(value) and least <= value <= most):
            raise ValueError
        return value

    return parse


def _count(most: int) -> Callable[[str], int]:
    def parse(text: str) -> int:
        if not (text.isascii() and text.isdigit() and 1 <= int(text) <= most):
            raise ValueError
        return int(text)

    return parse


def _word(pattern: re.Pattern[str]) -> Callable[[str], str]:
    def parse(text: str) -> str:
        if not pattern.fullmatch(text):
            raise ValueError
        return text

    return parse


def _pcie(text: str) -> tuple[int, int]:
    match = _PCIE.fullmatch(text)
    if not match:
        raise ValueError
    return int(match[1]), int(match[2])


def _yes_or_no(text: str) -> bool:
    return {"yes": True, "no": False}[text]


def _reference(text: str) -> str:
    if text not in REFERENCES:
        raise ValueError
    return text


@dataclass(frozen=True, slots=True)
class _Key:
    parse: Callable[[str], object]
    wanted: str


KEYS: dict[str, _Key] = {
    "tflops": _Key(_number(0.1, 100_000), "dense bf16 TFLOP/s with fp32 accumulation, 0.1 to 100000"),
    "memory": _Key(_number(1, 10_000), "GiB of one board, 1 to 10000"),
    "pcie": _Key(_pcie, "generation x lanes: 4x16; generations 3 to 6, lanes 1 to 16"),
    "bandwidth": _Key(_number(1, 1e6), "GB/s of the device's memory, 1 to 1000000"),
    "fp32": _Key(_number(0.01, 10_000), "TFLOP/s without tensor cores, 0.01 to 10000"),
    "nvlink": _Key(_number(1, 1e5), "GB/s of all links of a device, both directions together, 1 to 100000"),
    "p2p": _Key(_yes_or_no, "yes or no: whether boards reach each other's memory over PCIe"),
    "uplink": _Key(_count(MOST_DEVICES), f"boards that share one PCIe link to the host, 1 to {MOST_DEVICES}"),
    "devices": _Key(_count(MOST_DEVICES), f"boards of a node, 1 to {MOST_DEVICES}"),
    "nodes": _Key(_count(16_384), "nodes, 1 to 16384"),
    "network-gbps": _Key(_number(1, 10_000), "Gb/s of one network card, 1 to 10000"),
    "cards": _Key(_count(64), "network cards of a node, 1 to 64"),
    "host": _Key(_number(1, 100_000), "GiB of a node's host memory, 1 to 100000"),
    "like": _Key(_reference, f"the shipped GPU whose fractions of peak are taken: {', '.join(REFERENCES)}"),
    "generation": _Key(_word(_GENERATION), "the architecture's name: Ada"),
    "name": _Key(_word(_NAME), "small letters, digits and hyphens"),
}
"""Every key of a data sheet, in the order in which help lists them."""
REQUIRED = ("tflops", "memory", "pcie")


def is_datasheet(text: str) -> bool:
    """Whether ``text`` is written as a data sheet: ``key=value`` pairs and nothing else."""
    return all(_PAIR.fullmatch(pair) for pair in _PAIRS.split(text.strip()))


def parse_datasheet(text: str) -> DataSheet:
    """Return the data sheet that ``text`` writes as ``key=value`` pairs, joined by commas or spaces.

    Raises:
        UsageError: when a key is unknown, missing or given twice, or a value is none of its key's.
    """
    given: dict[str, object] = {}
    for pair in _PAIRS.split(text.strip()):
        key, equals, value = pair.partition("=")
        if not equals or key not in KEYS:
            raise UsageError(
                "no figure of a data sheet",
                where=OPTION,
                got=repr(pair),
                wanted=f"key=value with one of {', '.join(KEYS)}",
                hint=did_you_mean(key, KEYS) or f"{OPTION} {EXAMPLE}",
            )
        if key in given:
            raise UsageError("a figure is given twice", where=OPTION, got=key, hint="leave one out")
        try:
            given[key] = KEYS[key].parse(value)
        except (ValueError, KeyError):
            raise UsageError(
                f"no value of {key}", where=OPTION, got=repr(value), wanted=KEYS[key].wanted, hint=f"{OPTION} {EXAMPLE}"
            ) from None
    if missing := [key for key in REQUIRED if key not in given]:
        wanted = "; ".join(f"{key}: {KEYS[key].wanted}" for key in missing)
        raise UsageError(
            f"a data sheet needs {', '.join(missing)}",
            where=OPTION,
            got=text,
            wanted=wanted,
            hint=f"{OPTION} {EXAMPLE}",
        )
    sheet = DataSheet(**{key.replace("-", "_"): value for key, value in given.items()})  # type: ignore[arg-type]
    if sheet.nodes > 1 and sheet.network_gbps is None:
        raise UsageError(
            "several nodes need a network",
            where=OPTION,
            got=f"nodes={sheet.nodes}",
            wanted=KEYS["network-gbps"].wanted,
            hint=f"{OPTION} {EXAMPLE},nodes={sheet.nodes},network-gbps=200",
        )
    if "cards" in given and sheet.network_gbps is None:
        raise UsageError("cards without their rate", where=OPTION, got=f"cards={sheet.cards}", wanted="network-gbps")
    if sheet.nvlink is not None and "p2p" in given:
        raise UsageError(
            "p2p says what PCIe does without NVLink", where=OPTION, got="nvlink and p2p", wanted="one of them"
        )
    return sheet


def text_of(sheet: DataSheet) -> str:
    """Return a data sheet as ``parse_datasheet`` reads it; figures that are their defaults are left out."""
    parts = []
    for key in KEYS:
        value = getattr(sheet, key.replace("-", "_"))
        default = None if key in REQUIRED else DataSheet.__dataclass_fields__[key.replace("-", "_")].default
        if key in REQUIRED or value != default:
            parts.append(f"{key}={_shown(value)}")
    return ",".join(parts)


def _shown(value: object) -> str:
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, tuple):
        return "x".join(map(str, value))
    return f"{value:.10g}" if isinstance(value, float) else str(value)


@dataclass
class _Sources:
    """Sources of the profile that is made: each names the source of ``like`` that it comes from, and the factor."""

    like: Hardware
    made: dict[str, Source] = field(default_factory=dict)

    def scaled(self, source: str, factor: float, of: str) -> str:
        """Return the name of a source of rates that are ``factor`` times those of ``like``."""
        there = self.like.sources[source]
        text = f"The same fraction of {of} as on {self.like.name}: its rates x {factor:.4g}; rough. There: {there.text}"
        return self._add(f"{source}-{ENDS[of]}", Source(kind="derived", text=text, cases=there.cases))

    def kept(self, source: str) -> str:
        """Return the name of a source of what is taken over as it is."""
        there = self.like.sources[source]
        text = f"As on {self.like.name}; rough. There: {there.text}"
        return self._add(source, Source(kind="assumed", text=text, cases=there.cases))

    def own(self, name: str, source: Source) -> str:
        """Return the name of a source that has none in ``like``."""
        return self._add(name, source)

    def _add(self, name: str, source: Source) -> str:
        self.made[name] = source
        return name


def rough_profile(sheet: DataSheet, like: Hardware) -> Hardware:
    """Return the profile of a data sheet; ``like`` is the profile that ``REFERENCES[sheet.like]`` names."""
    return _Maker(sheet, like, REFERENCES[sheet.like]).profile()


def _rounded(value: float) -> float:
    return float(f"{value:.{DIGITS}g}")


class _Maker:
    """Makes one profile; every rate of ``like`` is scaled by the ratio of two peaks."""

    def __init__(self, sheet: DataSheet, like: Hardware, peaks: Reference) -> None:
        self.sheet, self.like, self.peaks = sheet, like, peaks
        self.sources = _Sources(like)
        self.sources.own(DATASHEET, Source(kind="datasheet", text=f"As given: {text_of(sheet)}"))
        self.tensor = sheet.tflops * 1e12 / like.peak_flops["bf16"].value
        self.bus_bytes_per_s = sheet.bandwidth * 1e9 if sheet.bandwidth else self.tensor * peaks.bus
        self.bus = self.bus_bytes_per_s / peaks.bus
        self.vector = sheet.fp32 * 1e12 / peaks.fp32 if sheet.fp32 else self.tensor
        generation, lanes = sheet.pcie
        self.pcie_bytes_per_s = lanes * LANE_BYTES_PER_S[generation]
        self.pcie = self.pcie_bytes_per_s / peaks.pcie

    def profile(self) -> Hardware:
        sheet, like, kept = self.sheet, self.like, self._kept
        memory = like.memory_bound_bytes_per_s
        return Hardware(
            name=sheet.name,
            device="cuda",
            generation=sheet.generation,
            peak_flops={
                **{
                    dtype: Quantity(value=_rounded(peak.value * self.tensor), source=DATASHEET)
                    for dtype, peak in self._tensor()
                },
                **({"fp32": Quantity(value=sheet.fp32 * 1e12, source=DATASHEET)} if sheet.fp32 else {}),
            },
            device_memory_bytes=self._memory(),
            memory_bytes_per_s=Quantity(value=self.bus_bytes_per_s, source=DATASHEET),
            reserve_bytes={name: kept(item) for name, item in like.reserve_bytes.items()},
            communicator_bytes=kept(like.communicator_bytes),
            gemm=[self._products(table, table.dtype) for table in like.gemm if table.dtype in DTYPE_BYTES],
            grouped_gemm=[
                msgspec.structs.replace(
                    table,
                    rows=[[*shape, _rounded(rate * self.tensor)] for *shape, rate in table.rows],
                    source=self.sources.scaled(table.source, self.tensor, "the peak of tensor cores"),
                )
                for table in like.grouped_gemm
            ],
            attention=[
                msgspec.structs.replace(
                    table,
                    rows=[[tokens, heads, _rounded(rate * self.tensor)] for tokens, heads, rate in table.rows],
                    source=self.sources.scaled(table.source, self.tensor, "the peak of tensor cores"),
                )
                for table in like.attention
            ],
            sustained_gemm=kept(like.sustained_gemm),
            device_deviation=kept(like.device_deviation),
            rated_devices=like.rated_devices,
            memory_bound_bytes_per_s=self._memory_curve(memory),
            rowwise_bytes_per_s={name: self._memory_curve(c) for name, c in like.rowwise_bytes_per_s.items()},
            fused_rowwise_bytes_per_s={
                kernel: {name: self._memory_curve(c) for name, c in curves.items()}
                for kernel, curves in like.fused_rowwise_bytes_per_s.items()
            },
            framework_rowwise_bytes_per_s={
                library: {name: self._memory_curve(c) for name, c in curves.items()}
                for library, curves in like.framework_rowwise_bytes_per_s.items()
            },
            launch_floor_s=kept(like.launch_floor_s),
            host_launch_s=kept(like.host_launch_s),
            host_pass_s=kept(like.host_pass_s),
            d2h=self._copies(like.d2h),
            h2d=self._copies(like.h2d),
            devices_per_uplink=Quantity(value=float(sheet.uplink), source=self._uplink_source()),
            collectives=self._collectives(),
            peers_over_host_link=sheet.nvlink is None,
            eager_libraries=like.eager_libraries,
            compute_slowdown={name: kept(factor) for name, factor in like.compute_slowdown.items()},
            device_malloc_s=kept(like.device_malloc_s),
            device_free_s=kept(like.device_free_s),
            device_malloc_s_per_gib=kept(like.device_malloc_s_per_gib),
            device_free_s_per_gib=kept(like.device_free_s_per_gib),
            host_register_bytes_per_s=kept(like.host_register_bytes_per_s),
            host_alloc_bytes_per_s=kept(like.host_alloc_bytes_per_s),
            host_memory_bytes=self._host_memory(),
            host_copy_bytes_per_s=kept(like.host_copy_bytes_per_s),
            host_update_bytes_per_s=kept(like.host_update_bytes_per_s),
            devices=sheet.devices,
            sources=dict(sorted(self.sources.made.items())),
            provenance={
                DATASHEET: text_of(sheet),
                ROUGH: self._said(),
                ASSUMED: self._assumed(),
                **{key: text for key, text in like.provenance.items() if key == "sections"},
            },
        )

    def _tensor(self) -> list[tuple[DtypeName, Quantity]]:
        return [(dtype, peak) for dtype, peak in self.like.peak_flops.items() if dtype != "fp32"]

    def _kept(self, part: T) -> T:
        """Return a quantity or curve of ``like`` as it is, with a source that says so; None where it has none."""
        if part is None:
            return part
        assert isinstance(part, Quantity | Curve)
        return msgspec.structs.replace(part, source=self.sources.kept(part.source))

    def _memory(self) -> Quantity:
        share = self.like.device_memory_bytes.value / (self.peaks.memory_gib * GIB)
        text = (
            f"{self.sheet.memory:g} GiB of the data sheet x {share:.4g}, what a process can use of the "
            f"{self.peaks.memory_gib} GiB of {self.like.name}; rough"
        )
        source = self.sources.own("usable-memory", Source(kind="derived", text=text))
        return Quantity(value=float(int(self.sheet.memory * GIB * share)), source=source)

    def _products(self, table: GemmTable, dtype: str) -> GemmTable:
        """Return a table of products at the same fraction of the peak, no faster than their operands' bytes.

        A data sheet's peaks are those of bf16 and fp32, so products in FP8 are left out.
        """
        factor = self.vector if table.dtype == "fp32" else self.tensor
        memory = self.like.memory_bound_bytes_per_s.y[-1] * self.bus
        width = DTYPE_BYTES[dtype]
        rows = []
        for m, n, k, rate in table.rows:
            intensity = 2.0 * m * n * k / (width * (m * k + k * n + m * n))
            rows.append([m, n, k, _rounded(min(rate * factor, intensity * memory))])
        of = "the peak of fp32" if table.dtype == "fp32" else "the peak of tensor cores"
        return msgspec.structs.replace(table, rows=rows, source=self.sources.scaled(table.source, factor, of))

    def _memory_curve(self, curve: Curve) -> Curve:
        return self._stretched(curve, self.bus, self.sources.scaled(curve.source, self.bus, "the memory's bus"))

    @staticmethod
    def _stretched(curve: Curve, factor: float, source: str) -> Curve:
        """Return a curve whose every point takes as long as before, with ``factor`` times the bytes."""
        x, y = ([_rounded(value * factor) for value in values] for values in (curve.x, curve.y))
        return msgspec.structs.replace(curve, x=x, y=y, source=source)

    def _copies(self, copies: CopyRates) -> CopyRates:
        def link(source: str) -> str:
            return self.sources.scaled(source, self.pcie, "the PCIe link")

        alone = self._stretched(copies.alone, self.pcie, link(copies.alone.source))
        duplex = msgspec.structs.replace(
            copies.duplex, value=_rounded(copies.duplex.value * self.pcie), source=link(copies.duplex.source)
        )
        shared = Quantity(value=_rounded(alone.y[-1] / self.sheet.uplink), source=self._uplink_source())
        return CopyRates(alone=alone, duplex=duplex, all_devices=shared)

    def _uplink_source(self) -> str:
        many = self.sheet.uplink
        said = (
            "every board has a link of its own to the host" if many == 1 else f"{many} boards share a link to the host"
        )
        return self.sources.own("topology", Source(kind="assumed", text=f"{said}; a data sheet does not say it"))

    def _collectives(self) -> list[CollectiveTable]:
        return [self._collective(table) for table in self.like.collectives if table.ranks <= max(2, self.sheet.devices)]

    def _collective(self, table: CollectiveTable) -> CollectiveTable:
        curve = table.bus_bytes_per_s
        if self.sheet.nvlink is not None:
            factor = self.sheet.nvlink * 1e9 / 2 / self.peaks.link
            source = self.sources.scaled(table.source, factor, "the NVLink rate")
            return msgspec.structs.replace(table, bus_bytes_per_s=self._stretched(curve, factor, source), source=source)
        shares = PCIE_SHARES[self.sheet.p2p]
        share = next((share for ranks, share in shares if table.ranks <= ranks), shares[-1][1])
        text = (
            f"{PCIE_SHARES_TEXT[self.sheet.p2p]}; taken of {self.pcie_bytes_per_s / 1e9:.4g} GB/s. By size as on "
            f"{self.like.name} ({self.like.sources[table.source].text}), whose alpha is multiplied by {PCIE_HOP:.3g}, "
            "PCIe's latency over NVLink's in NCCL's tuning.cc; rough"
        )
        source = self.sources.own(f"{table.source}-pcie", Source(kind="derived", text=text))
        factor = share * self.pcie_bytes_per_s / max(curve.y)
        stretched = self._stretched(curve, factor, source)
        return msgspec.structs.replace(
            table, alpha_s=_rounded(table.alpha_s * PCIE_HOP), bus_bytes_per_s=stretched, source=source
        )

    def _host_memory(self) -> Quantity:
        if self.sheet.host is not None:
            return Quantity(value=self.sheet.host * GIB, source=DATASHEET)
        like = self.like
        share = like.host_memory_bytes.value / like.devices / (self.peaks.memory_gib * GIB)
        text = f"{share:.3g} times the memory of the node's devices, as on the node of {like.name}; rough, give host="
        source = self.sources.own("host-memory", Source(kind="assumed", text=text))
        return Quantity(value=float(int(share * self.sheet.memory * GIB * self.sheet.devices)), source=source)

    def _said(self) -> str:
        sheet = self.sheet
        links = f"NVLink at {sheet.nvlink:g} GB/s both ways" if sheet.nvlink else "no NVLink"
        if sheet.nvlink is None:
            links += f", {'P2P' if sheet.p2p else 'no P2P'} over PCIe"
        return (
            f"made from a data sheet ({sheet.tflops:g} TFLOP/s in bf16, {sheet.memory:g} GiB at "
            f"{self.bus_bytes_per_s / 1e9:.4g} GB/s, PCIe {sheet.pcie[0]}.0 x{sheet.pcie[1]}, {links}); nothing was "
            "measured on it"
        )

    def _assumed(self) -> str:
        """Return what the profile assumes, with the fractions of peak and whose they are."""
        like, peak = self.like, self.like.peak_flops["bf16"].value
        products = max(row[3] for table in like.gemm if table.dtype == "bf16" for row in table.rows) / peak
        kernel = "flash2"
        passes = [
            f"{format_percent(max(row[2] for row in table.rows) / peak, 0)} {table.attention_pass}"
            for table in like.attention
            if (table.kernel, table.head_dim) == (kernel, 128)
        ]
        bus = like.memory_bound_bytes_per_s.y[-1] / self.peaks.bus
        pcie = like.h2d.alone.y[-1] / self.peaks.pcie
        parts = [
            f"products reach at most {format_percent(products, 0)} of the peak",
            f"{kernel} {' and '.join(passes)}",
            f"row-wise operators {format_percent(bus, 0)} of the memory's bus",
            f"copies {format_percent(pcie, 0)} of the PCIe link, all as {like.name}",
        ]
        if self.sheet.nvlink is None and self.sheet.devices > 1:
            shares = " and ".join(format_percent(share, 0) for _, share in PCIE_SHARES[self.sheet.p2p])
            where = "NVIDIA/nccl-tests#178" if self.sheet.p2p else "NVIDIA/nccl#1639"
            parts.append(f"collectives {shares} of it ({where}), shared with copies")
        if self.sheet.bandwidth is None:
            parts.append(f"bandwidth {self.bus_bytes_per_s / 1e9:.4g} GB/s, to the peak as {like.name}'s (bandwidth=)")
        if self.sheet.host is None:
            parts.append(f"{self._host_memory().value / GIB:.0f} GiB of host memory a node (host=)")
        return "; ".join(parts)
