"""A kind of GPU to buy or rent: clusters of any number of its devices, from one device to many whole nodes.

h100         nodes of eight H100, eight NDR cards each
h100-ndr4    the same with four cards a node
a cluster name or file, a profile file, a data sheet: nodes and network as there
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

import msgspec

from memo_sim.contract.catalog import list_clusters, load_cluster
from memo_sim.contract.cluster import Cluster
from memo_sim.contract.datasheet import is_datasheet
from memo_sim.contract.errors import UsageError
from memo_sim.contract.hardware import Hardware
from memo_sim.contract.units import MOST_DEVICES

DEFAULT_KINDS = ("a800", "h100", "h200", "b200")
"""What is compared when a question names no kind: the data-center GPUs of the shipped, measured profiles."""

_KIND = re.compile(r"([a-z0-9]+)(-(?:edr|hdr|ndr|xdr)[1-9]\d{0,2})?", re.ASCII)


@dataclass(frozen=True, slots=True)
class GpuKind:
    """Nodes of one kind: ``cluster`` has one node or more, all of its devices."""

    name: str
    cluster: Cluster
    hardware: Hardware
    cards: str = ""
    """The end of the names of its clusters, where the kind names network cards: ``-ndr4``."""

    @property
    def per_node(self) -> int:
        """Devices of a whole node."""
        return self.cluster.devices_per_node

    def counts(self, most: int) -> tuple[int, ...]:
        """Return the numbers of devices to try, at most ``most``: 1, 2, 4 ... a node, two nodes, four nodes ...

        Without a network there is one node.
        """
        inside = [2**power for power in range(self.per_node.bit_length()) if 2**power < self.per_node]
        nodes = [2**power for power in range(18)] if self.cluster.network else [1]
        counts = [*inside, *(self.per_node * count for count in nodes)]
        return tuple(count for count in counts if count <= min(most, MOST_DEVICES))

    def of(self, devices: int) -> Cluster:
        """Return the cluster of one of the ``counts``: a part of a node, or whole nodes."""
        nodes, per_node = (1, devices) if devices < self.per_node else (devices // self.per_node, self.per_node)
        name = f"{self.name.removesuffix(self.cards)}-{nodes}x{per_node}{self.cards}"
        return msgspec.structs.replace(self.cluster, name=name, nodes=nodes, devices_per_node=per_node)


def load_gpu_kind(text: str) -> GpuKind:
    """Return the kind that a GPU's word, a cluster's name or a file names.

    Raises:
        UsageError: when the text is none of these.
        BadInput: when the file cannot be read or is wrong.
    """
    match = _KIND.fullmatch(text)
    nodes = {name.rpartition("-1x")[0]: name for name in list_clusters()}
    if match and match[1] in nodes:
        cards = match[2] or ""
        return GpuKind(text, *load_cluster(f"{nodes[match[1]]}{cards}"), cards=cards)
    if match and not text.endswith((".json", ".toml")):
        _refuse(text, nodes)
    cluster, hardware = load_cluster(text)
    if is_datasheet(text) and cluster.hardware == hardware.name:
        return GpuKind(hardware.name, cluster, hardware)
    word, _, rest = cluster.name.partition("-")
    cards = rest[rest.index("-") :] if cluster.name == text and "-" in rest else ""
    name = f"{word}{cards}" if cluster.name == text else cluster.name
    return GpuKind(name, cluster, hardware, cards=cards)


def load_gpu_kinds(names: Sequence[str] | None, datasheet: str | None = None) -> list[GpuKind]:
    """Return the kinds that are named and the one of a data sheet; ``DEFAULT_KINDS`` where neither is given.

    Raises:
        UsageError: when what is given names no kind, or one twice.
        BadInput: when a file cannot be read.
    """
    if names is None:
        names = [] if datasheet is not None else list(DEFAULT_KINDS)
    kinds = [load_gpu_kind(name) for name in [*names, *([datasheet] if datasheet is not None else [])]]
    if not kinds:
        raise UsageError("no kind of GPU is named", wanted="one or several, or none given: the default ones")
    if len({kind.name for kind in kinds}) < len(kinds):
        raise UsageError("a kind of GPU is named twice", got=", ".join(kind.name for kind in kinds))
    return kinds


def _refuse(text: str, known: dict[str, str]) -> None:
    wanted = f"one of {', '.join(known)}; a cluster's name or file, or a profile file"
    raise UsageError("no such kind of GPU", got=repr(text), wanted=wanted, hint="memo-sim list clusters")
