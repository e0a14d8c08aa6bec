"""Models, hardware profiles and clusters, by the names that users type: a preset's, or a file's.

A cluster's name is ``<gpu>-<nodes>x<gpus per node>[-<card><K>]``: ``a800-1x8``, ``a100-16x8-hdr4``, ``h100-2x8-ndr8``.
The gpu is the first word of a shipped profile's name, K the number of network cards of a node (8 unless named). A gpu's
nodes have the cards of its generation: hdr (200 Gb/s); H100 and H200 ndr (400 Gb/s); B200 ndr, or xdr (800 Gb/s).
"""

from __future__ import annotations

import os
import re
from collections.abc import Collection
from pathlib import Path
from typing import NoReturn

import msgspec

from memo_sim.contract import codec
from memo_sim.contract.cluster import Cluster, Network
from memo_sim.contract.diagnosis import explain_schema
from memo_sim.contract.errors import BadInput, UsageError, did_you_mean
from memo_sim.contract.hardware import Hardware
from memo_sim.contract.huggingface import model_from_config
from memo_sim.contract.model import Model

PACKAGE = Path(__file__).parents[1]
DATA = PACKAGE / "data"
CLUSTER_FORM = "<gpu>-<nodes>x<gpus per node>[-<hdr, ndr or xdr><cards per node>]"

HARDWARE_PROFILES = next(
    (folder for folder in (PACKAGE / "hardware_profiles", PACKAGE.parent / "hardware_profiles") if folder.is_dir()),
    PACKAGE / "hardware_profiles",
)
"""One ``memo.hardware/1`` file per GPU: inside an installed package, beside the packages in a checkout."""

_CLUSTER_NAME = re.compile(r"([a-z0-9]+)-([1-9]\d{0,5})x([1-9]\d{0,5})(?:-(hdr|ndr|xdr)([1-9]\d{0,2}))?", re.ASCII)
_NETWORKS = {"hdr": "example.toml", "ndr": "h100.toml", "xdr": "b200.toml"}
"""The cluster file whose network stands for each kind of card."""

_CARDS = {"h100": ("ndr",), "h200": ("ndr",), "b200": ("ndr", "xdr")}
"""The cards that a gpu's nodes may have, those of a name without cards first; hdr where no gpu is named."""
_OLDER_CARDS = ("hdr",)

_MODEL_TAG, _CLUSTER_TAG, _HARDWARE_TAG = (kind.__struct_config__.tag for kind in (Model, Cluster, Hardware))


def list_models() -> list[str]:
    """Return the names of the model presets."""
    return _names_in(DATA / "models")


def list_hardware() -> list[str]:
    """Return the names of the shipped hardware profiles."""
    return _names_in(HARDWARE_PROFILES)


def list_clusters() -> list[str]:
    """Return one cluster's name for every shipped profile, a full node; others follow ``CLUSTER_FORM``."""
    return [f"{gpu}-1x{load_hardware(profile).devices}" for gpu, profile in _gpus().items()]


def load_model(name_or_path: str) -> Model:
    """Return a preset, or the model in a ``memo.model/1`` file or a Hugging Face ``config.json``, whichever it holds.

    Raises:
        UsageError: when it is neither a preset nor a file.
        BadInput: when the file cannot be read, or holds no model that is supported.
    """
    if name_or_path in list_models():
        return codec.read(DATA / "models" / f"{name_or_path}.json", Model)
    if not _is_file_name(name_or_path):
        _unknown("model", name_or_path, list_models(), "a memo.model/1 file or a Hugging Face config.json")
    raw = codec.read_raw(name_or_path)
    if codec.schema_of(raw, where=name_or_path) is not None:
        return codec.decode(raw, Model, where=name_or_path)
    fields = codec.decode_object(raw, where=name_or_path)
    if "model_type" not in fields:
        hint = f'start it with "schema": "{_MODEL_TAG}", or give a config.json with its model_type'
        raise BadInput("neither a model nor a Hugging Face config", where=name_or_path, got="no schema", hint=hint)
    return model_from_config(fields, where=name_or_path, name=Path(name_or_path).resolve().parent.name)


def load_hardware(name_or_path: str) -> Hardware:
    """Return a shipped profile, or the one in a ``memo.hardware/1`` file.

    Raises:
        UsageError: when it is neither a shipped profile nor a file.
        BadInput: when the file cannot be read or holds no profile.
    """
    if name_or_path in list_hardware():
        return codec.read(HARDWARE_PROFILES / f"{name_or_path}.json", Hardware)
    if not _is_file_name(name_or_path):
        _unknown("hardware profile", name_or_path, list_hardware(), "a memo.hardware/1 file")
    return codec.read(name_or_path, Hardware)


def load_cluster(name_or_path: str) -> tuple[Cluster, Hardware]:
    """Return a cluster and its devices' profile: by name, from a cluster file, or one node from a profile file.

    Raises:
        UsageError: when it is neither a cluster's name nor a file.
        BadInput: when the file (or the profile that it names) cannot be read or is wrong.
    """
    match = _CLUSTER_NAME.fullmatch(name_or_path)
    if match and match[1] in _gpus() and match[4] in (None, *_CARDS.get(match[1], _OLDER_CARDS)):
        return _named_cluster(name_or_path, match)
    if not _is_file_name(name_or_path):
        _unknown("cluster", name_or_path, list_clusters(), f"a name {CLUSTER_FORM}, a cluster file or a profile file")
    raw = codec.read_raw(name_or_path)
    schema = codec.schema_of(raw, where=name_or_path)
    if schema == _HARDWARE_TAG:
        hardware = codec.decode(raw, Hardware, where=name_or_path)
        cluster = Cluster(name=hardware.name, hardware=name_or_path, nodes=1, devices_per_node=hardware.devices)
        return cluster, hardware
    if schema != _CLUSTER_TAG:
        raise explain_schema(schema, [Cluster, Hardware], name_or_path)
    cluster = codec.decode(raw, Cluster, where=name_or_path)
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


def profile_path(name_or_path: str, cluster: Cluster) -> Path:
    """Return the file that ``load_cluster`` has read the devices' profile of a cluster from."""
    if cluster.hardware in list_hardware():
        return HARDWARE_PROFILES / f"{cluster.hardware}.json"
    given = Path(name_or_path)
    return given if cluster.hardware == name_or_path else given.parent / cluster.hardware


def _named_cluster(name: str, match: re.Match[str]) -> tuple[Cluster, Hardware]:
    """Return the cluster that a name's parts (gpu, nodes, devices, cards) stand for."""
    hardware_name = _gpus()[match[1]]
    hardware = load_hardware(hardware_name)
    devices = int(match[3])
    if devices > hardware.devices:
        wanted = f"at most the {hardware.devices} devices that a node of {hardware_name} has"
        raise UsageError("more devices than a node has", got=repr(name), wanted=wanted)
    kind = match[4] or _CARDS.get(match[1], _OLDER_CARDS)[0]
    example = codec.read(DATA / "clusters" / _NETWORKS[kind], Cluster)
    assert example.network is not None
    cards = int(match[5] or example.network.nics_per_node)
    curve = example.network.size_efficiency
    # The curve's sizes are of tensors spread over the example's cards: the same bytes on each of fewer make less.
    sizes = [size * cards / example.network.nics_per_node for size in curve.x]
    network: Network = msgspec.structs.replace(
        example.network, nics_per_node=cards, size_efficiency=msgspec.structs.replace(curve, x=sizes)
    )
    cluster = Cluster(
        name=name,
        hardware=hardware_name,
        nodes=int(match[2]),
        devices_per_node=devices,
        network=network,
        sources=example.sources,
    )
    return cluster, hardware


def _names_in(folder: Path) -> list[str]:
    """Return the names of the JSON documents in a folder of shipped data."""
    return sorted(path.stem for path in folder.glob("*.json"))


def _gpus() -> dict[str, str]:
    """Return the shipped profiles' names by gpu: a800 -> a800-sxm4-80gb."""
    return {name.partition("-")[0]: name for name in list_hardware()}


def _is_file_name(text: str) -> bool:
    """Whether the user means a file: it exists, or is written like one."""
    return "/" in text or Path(text).suffix in (".json", ".toml") or os.path.exists(text)


def _unknown(what: str, name: str, known: Collection[str], other: str) -> NoReturn:
    """Refuse a name that nothing has."""
    raise UsageError(
        f"no such {what}",
        got=repr(name),
        wanted=f"one of {', '.join(known)}; or {other}",
        hint=did_you_mean(name, known),
    )
