"""Loads models, hardware profiles and clusters by preset name or by file path.

A cluster name has the form ``<gpu>-<nodes>x<gpus per node>[-<card><K>]``: ``a800-1x8``, ``a100-16x8-hdr4``,
``h100-2x8-ndr8``.

- ``gpu`` is the first word of a shipped profile's name. It may be followed by one of the profile's ``boards``:
  ``h100hbm2e-1x8``.
- ``K`` is the number of network cards of a node; the default is 8, for PCIe boards fewer (``_CARDS_PER_NODE``).
- ``card`` is the card generation. H100 and H200 nodes have ndr (400 Gb/s), B200 nodes have ndr or xdr (800 Gb/s), all
  other nodes have hdr (200 Gb/s) or edr (100 Gb/s). The first is the default.
"""

from __future__ import annotations

import os
import re
from collections.abc import Collection
from pathlib import Path
from typing import NoReturn, TypeVar

import msgspec

from memo_sim.contract import codec
from memo_sim.contract.boards import with_board
from memo_sim.contract.cluster import DEFAULT_EFFICIENCY, Cluster, Network
from memo_sim.contract.datasheet import DATASHEET, REFERENCES, is_datasheet, parse_datasheet, rough_profile
from memo_sim.contract.diagnosis import explain_schema
from memo_sim.contract.errors import BadInput, UsageError, did_you_mean
from memo_sim.contract.hardware import Curve, Hardware, Quantity, Source
from memo_sim.contract.huggingface import model_from_config, not_read
from memo_sim.contract.model import Model
from memo_sim.contract.plain_text import encodable
from memo_sim.contract.units import MOST_DEVICES

CurveKind = TypeVar("CurveKind", bound=Curve)

PACKAGE = Path(__file__).parents[1]
DATA = PACKAGE / "data"
CLUSTER_FORM = "<gpu>-<nodes>x<gpus per node>[-<edr, hdr, ndr or xdr><cards per node>]"

HARDWARE_PROFILES = next(
    (folder for folder in (PACKAGE / "hardware_profiles", PACKAGE.parent / "hardware_profiles") if folder.is_dir()),
    PACKAGE / "hardware_profiles",
)
"""Folder with one ``memo.hardware/1`` file per GPU: inside an installed package, in a checkout beside the packages."""

_CLUSTER_NAME = re.compile(r"([a-z0-9]+)-([1-9]\d{0,5})x([1-9]\d{0,5})(?:-(edr|hdr|ndr|xdr)([1-9]\d{0,2}))?", re.ASCII)
_NETWORKS = {"edr": "edr.toml", "hdr": "example.toml", "ndr": "h100.toml", "xdr": "b200.toml"}
"""The shipped cluster file whose network describes each kind of card."""

_CARDS = {"h100": ("ndr",), "h200": ("ndr",), "b200": ("ndr", "xdr")}
"""Kinds of card that the nodes of a GPU may have; the first is the default. GPUs not listed have ``_OLDER_CARDS``."""
_OLDER_CARDS = ("hdr", "edr")

_CARDS_PER_NODE = {"rtx4090": 1, "rtxa6000": 1, "l40s": 2}
"""Network cards of a node where they are not eight: boards that take the PCIe slots themselves."""

_MODEL_TAG, _CLUSTER_TAG, _HARDWARE_TAG = (kind.__struct_config__.tag for kind in (Model, Cluster, Hardware))


def list_models() -> list[str]:
    """Return the names of the model presets."""
    return _names_in(DATA / "models")


def list_hardware() -> list[str]:
    """Return the names of the shipped hardware profiles."""
    return _names_in(HARDWARE_PROFILES)


def list_clusters() -> list[str]:
    """Return the name of one full node for every shipped profile; any other name must follow ``CLUSTER_FORM``."""
    names = []
    for gpu, profile in _gpus().items():
        hardware = load_hardware(profile)
        names += [f"{gpu}{board}-1x{hardware.devices}" for board in ("", *hardware.boards)]
    return names


def load_model(name_or_path: str) -> Model:
    """Return a model from a preset name, a ``memo.model/1`` file, a Hugging Face ``config.json`` or its folder.

    Raises:
            UsageError: when the text is neither a preset nor a file.
            BadInput: when the file cannot be read or does not describe a supported model.
    """
    if name_or_path in list_models():
        return codec.read(DATA / "models" / f"{name_or_path}.json", Model)
    if not _is_file_name(name_or_path):
        _unknown("model", name_or_path, list_models(), "a memo.model/1 file or a Hugging Face config.json")
    name_or_path = model_file(name_or_path)
    raw = codec.read_raw(name_or_path)
    if codec.schema_of(raw, where=name_or_path) is not None:
        return codec.decode(raw, Model, where=name_or_path)
    fields = codec.decode_object(raw, where=name_or_path)
    if "model_type" not in fields:
        hint = f'start it with "schema": "{_MODEL_TAG}", or give a config.json with its model_type'
        raise BadInput("neither a model nor a Hugging Face config", where=name_or_path, got="no schema", hint=hint)
    path = Path(name_or_path).resolve()
    name = path.parent.name if path.name == "config.json" else path.stem
    return model_from_config(fields, where=name_or_path, name=encodable(name, "utf-8"))


def model_file(name_or_path: str) -> str:
    """Return the file that describes a model: of a checkpoint's folder its ``config.json``, else the text itself.

    Raises:
            BadInput: when the folder has none.
    """
    if name_or_path in list_models() or not os.path.isdir(name_or_path):
        return name_or_path
    inside = os.path.join(name_or_path, "config.json")
    if not os.path.isfile(inside):
        raise BadInput(
            "no config.json in this folder", where=name_or_path, wanted="a checkpoint's folder, or the file of a model"
        )
    return inside


def fields_not_read(name_or_path: str) -> tuple[str, ...]:
    """Return the fields of a Hugging Face ``config.json`` that memo ignores and that are about training or arithmetic.

    None for presets and ``memo.model/1`` files, whose fields are all read.

    Raises:
            BadInput: as ``load_model``.
    """
    if name_or_path in list_models() or not _is_file_name(name_or_path):
        return ()
    name_or_path = model_file(name_or_path)
    raw = codec.read_raw(name_or_path)
    if codec.schema_of(raw, where=name_or_path) is not None:
        return ()
    return not_read(codec.decode_object(raw, where=name_or_path), where=name_or_path)


def load_hardware(name_or_path: str) -> Hardware:
    """Return a shipped profile by name, or the profile in a ``memo.hardware/1`` file.

    Raises:
            UsageError: when the text is neither a shipped profile nor a file.
            BadInput: when the file cannot be read or does not hold a profile.
    """
    if name_or_path in list_hardware():
        return codec.read(HARDWARE_PROFILES / f"{name_or_path}.json", Hardware)
    if not _is_file_name(name_or_path):
        _unknown("hardware profile", name_or_path, list_hardware(), "a memo.hardware/1 file")
    return codec.read(name_or_path, Hardware)


def load_cluster(name_or_path: str) -> tuple[Cluster, Hardware]:
    """Return a cluster and the profile of its devices.

    The text is a cluster name, a cluster file, a profile file (which stands for one node), or the figures of a data
    sheet.

    Raises:
        UsageError: when the text is none of these.
        BadInput: when the file, or the profile that it names, cannot be read or is wrong.
    """
    if is_datasheet(name_or_path) and not os.path.exists(name_or_path):
        return cluster_from_datasheet(name_or_path)
    match = _CLUSTER_NAME.fullmatch(name_or_path)
    gpu = _gpu_of(match[1]) if match else None
    if match and gpu and match[4] in (None, *_CARDS.get(gpu, _OLDER_CARDS)):
        return _named_cluster(name_or_path, match, gpu)
    if not _is_file_name(name_or_path):
        _unknown(
            "cluster",
            name_or_path,
            list_clusters(),
            f"a name {CLUSTER_FORM}, a cluster file, a profile file, or --from-datasheet",
        )
    raw = codec.read_raw(name_or_path)
    schema = codec.schema_of(raw, where=name_or_path)
    if schema == _HARDWARE_TAG:
        hardware = codec.decode(raw, Hardware, where=name_or_path)
        cluster = Cluster(name=hardware.name, hardware=name_or_path, nodes=1, devices_per_node=hardware.devices)
        return cluster, hardware
    if schema != _CLUSTER_TAG:
        raise explain_schema(schema, [Cluster, Hardware], name_or_path)
    cluster = with_default_efficiency(codec.decode(raw, Cluster, where=name_or_path))
    if cluster.hardware in list_hardware():
        return cluster, load_hardware(cluster.hardware)
    beside = Path(name_or_path).parent / cluster.hardware
    if not os.path.isfile(beside):
        raise BadInput(
            "no such hardware profile",
            where=f"{name_or_path}: $.hardware",
            got=repr(cluster.hardware),
            wanted="a file beside the cluster's, or one of " + ", ".join(list_hardware()),
            hint=did_you_mean(cluster.hardware, list_hardware()),
        )
    return cluster, codec.read(beside, Hardware)


def cluster_from_datasheet(text: str) -> tuple[Cluster, Hardware]:
    """Return the cluster and the rough profile that the figures of a data sheet give (``contract/datasheet.py``).

    Raises:
        UsageError: when ``text`` is no data sheet.
    """
    sheet = parse_datasheet(text)
    hardware = rough_profile(sheet, load_hardware(REFERENCES[sheet.like].profile))
    network, sources = None, dict[str, Source]()
    if sheet.network_gbps is not None:
        example = _example("hdr")
        assert example.network is not None
        said = f"94 % of a card's {sheet.network_gbps:g} Gb/s, which NCCL gets out of HDR and NDR cards (example.toml)"
        sources = {**example.sources, DATASHEET: Source(kind="derived", text=said)}
        network = msgspec.structs.replace(
            example.network,
            nics_per_node=sheet.cards,
            nic_bytes_per_s=Quantity(value=0.94 * sheet.network_gbps * 1e9 / 8, source=DATASHEET),
            size_efficiency=None,
            efficiency_by_nodes=[],
        )
    cluster = Cluster(
        name=f"{sheet.name}-{sheet.nodes}x{sheet.devices}",
        hardware=sheet.name,
        nodes=sheet.nodes,
        devices_per_node=sheet.devices,
        network=network,
        sources=sources,
    )
    return with_default_efficiency(cluster), hardware


def with_default_efficiency(cluster: Cluster) -> Cluster:
    """Return the cluster with a default for its network's efficiency by size; the same one where it names its own.

    The default is that of the clusters given by name. A ring's overhead is a time, so cards of other rates reach the
    same fraction with as many more bytes.
    """
    network, example = cluster.network, _example("hdr")
    known = example.network
    if network is None or network.size_efficiency is not None:
        return cluster
    assert known is not None
    assert known.size_efficiency is not None
    times = network.node_bytes_per_s / known.node_bytes_per_s
    there = example.sources[known.size_efficiency.source]
    text = f"At {times:.4g} times the sizes of hdr8 nodes, which the network takes as long for: {there.text}"

    def scaled(curve: CurveKind) -> CurveKind:
        return msgspec.structs.replace(curve, x=[size * times for size in curve.x], source=DEFAULT_EFFICIENCY)

    changed = msgspec.structs.replace(
        network,
        size_efficiency=scaled(known.size_efficiency),
        efficiency_by_nodes=[scaled(curve) for curve in known.efficiency_by_nodes],
    )
    sources = {**cluster.sources, DEFAULT_EFFICIENCY: Source(kind="derived", text=text)}
    return msgspec.structs.replace(cluster, network=changed, sources=sources)


def profile_path(name_or_path: str, cluster: Cluster) -> Path:
    """Return the path of the profile that ``load_cluster`` reads for a cluster."""
    if cluster.hardware in list_hardware():
        return HARDWARE_PROFILES / f"{cluster.hardware}.json"
    given = Path(name_or_path)
    return given if cluster.hardware == name_or_path else given.parent / cluster.hardware


def _gpu_of(word: str) -> str | None:
    """Return the gpu of a cluster's first word, which may name a board of it too; None when there is none."""
    gpus = _gpus()
    if word in gpus:
        return word
    longest = max((gpu for gpu in gpus if word.startswith(gpu)), key=len, default=None)
    return longest if longest and word.removeprefix(longest) in load_hardware(gpus[longest]).boards else None


def _named_cluster(name: str, match: re.Match[str], gpu: str) -> tuple[Cluster, Hardware]:
    """Return the cluster that a matched name describes: gpu and board, nodes, devices, cards."""
    hardware_name, board = _gpus()[gpu], match[1].removeprefix(gpu)
    hardware = load_hardware(hardware_name)
    hardware = with_board(hardware, board) if board else hardware
    devices = int(match[3])
    if devices > hardware.devices:
        wanted = f"at most the {hardware.devices} devices that a node of {hardware_name} has"
        raise UsageError("more devices than a node has", got=repr(name), wanted=wanted)
    if int(match[2]) * devices > MOST_DEVICES:
        raise UsageError("more devices than a cluster can have", got=repr(name), wanted=f"at most {MOST_DEVICES}")
    kind = match[4] or _CARDS.get(gpu, _OLDER_CARDS)[0]
    example = _example(kind)
    assert example.network is not None
    cards = int(match[5] or _CARDS_PER_NODE.get(gpu, example.network.nics_per_node))
    network = _with_cards(example.network, cards)
    cluster = Cluster(
        name=name,
        hardware=hardware_name,
        nodes=int(match[2]),
        devices_per_node=devices,
        network=network,
        sources=example.sources,
    )
    return cluster, hardware


def _example(kind: str) -> Cluster:
    """Return the shipped cluster whose network describes a kind of card."""
    return codec.read(DATA / "clusters" / _NETWORKS[kind], Cluster)


def _with_cards(network: Network, cards: int) -> Network:
    """Return the network with another number of cards per node.

    Its curves give sizes of whole tensors spread over the cards. With fewer cards, a smaller tensor puts the same bytes
    on each card, so the sizes scale with the number of cards.
    """

    assert network.size_efficiency is not None

    def scaled(curve: CurveKind) -> CurveKind:
        return msgspec.structs.replace(curve, x=[size * cards / network.nics_per_node for size in curve.x])

    return msgspec.structs.replace(
        network,
        nics_per_node=cards,
        size_efficiency=scaled(network.size_efficiency),
        efficiency_by_nodes=[scaled(curve) for curve in network.efficiency_by_nodes],
    )


def _names_in(folder: Path) -> list[str]:
    """Return the names of the JSON documents in a folder of shipped data."""
    return sorted(path.stem for path in folder.glob("*.json"))


def _gpus() -> dict[str, str]:
    """Return the shipped profile's name by gpu: ``{"a800": "a800-sxm4-80gb"}``."""
    return {name.partition("-")[0]: name for name in list_hardware()}


def _is_file_name(text: str) -> bool:
    """Whether the text is a file's path: it exists, contains a slash, or ends in .json or .toml."""
    return "/" in text or Path(text).suffix in (".json", ".toml") or os.path.exists(text)


def _unknown(what: str, name: str, known: Collection[str], other: str) -> NoReturn:
    """Raise ``UsageError`` for an unknown name, with the known names and the nearest one."""
    raise UsageError(
        f"no such {what}",
        got=repr(name),
        wanted=f"one of {', '.join(known)}; or {other}",
        hint=did_you_mean(name, known),
    )
