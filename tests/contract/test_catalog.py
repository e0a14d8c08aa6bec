"""Models, profiles and clusters are found by name and by file."""

import json
import subprocess
import sys
from pathlib import Path

import msgspec
import pytest

from memo_sim.contract import codec
from memo_sim.contract.catalog import (
    DATA,
    list_clusters,
    list_hardware,
    list_models,
    load_cluster,
    load_hardware,
    load_model,
)
from memo_sim.contract.cluster import Cluster
from memo_sim.contract.errors import BadInput, UsageError
from tests.refusals import refused


@pytest.fixture
def profile(samples: dict[str, msgspec.Struct], tmp_path: Path) -> Path:
    path = tmp_path / "profile.json"
    codec.write(path, samples["hardware"])
    return path


@pytest.mark.parametrize(
    ("name", "nodes", "devices", "cards"),
    [
        ("a800-1x8", 1, 8, 8),
        ("a800-8x8", 8, 8, 8),
        ("a100-1x4", 1, 4, 8),
        ("a100-16x8-hdr4", 16, 8, 4),
        ("a100-64x8-hdr1", 64, 8, 1),
    ],
)
def test_clusters_by_name(name: str, nodes: int, devices: int, cards: int) -> None:
    cluster, hardware = load_cluster(name)
    assert (cluster.name, cluster.nodes, cluster.devices_per_node, cluster.devices) == (
        name,
        nodes,
        devices,
        nodes * devices,
    )
    assert cluster.network is not None
    assert cluster.network.nics_per_node == cards
    assert cluster.network.nic_bytes_per_s.value == 23.5e9
    assert hardware.name == cluster.hardware == name.partition("-")[0] + "-sxm4-80gb"
    assert cluster.host_memory_bytes is None
    assert codec.decode(codec.encode(cluster), Cluster, where="here") == cluster


def test_clusters_of_h100_have_the_cards_of_their_generation() -> None:
    for name, cards in (("h100-2x8", 8), ("h100-2x8-ndr4", 4)):
        cluster, hardware = load_cluster(name)
        assert hardware.name == cluster.hardware == "h100-sxm5-80gb"
        assert cluster.network is not None
        assert (cluster.network.nics_per_node, cluster.network.nic_bytes_per_s.value) == (cards, 47e9)
    assert load_cluster("h100-2x8") == load_cluster(str(DATA / "clusters" / "h100.toml"))


@pytest.mark.parametrize(
    ("name", "profile", "cards", "card_bytes_per_s"),
    [
        ("h200-4x8", "h200-sxm5-141gb", 8, 47e9),
        ("h200-4x8-ndr4", "h200-sxm5-141gb", 4, 47e9),
        ("b200-1x8", "b200-sxm6-180gb", 8, 47e9),
        ("b200-4x8-ndr8", "b200-sxm6-180gb", 8, 47e9),
        ("b200-4x8-xdr8", "b200-sxm6-180gb", 8, 94e9),
    ],
)
def test_clusters_of_later_gpus(name: str, profile: str, cards: int, card_bytes_per_s: float) -> None:
    cluster, hardware = load_cluster(name)
    assert hardware.name == cluster.hardware == profile
    assert cluster.network is not None
    assert (cluster.network.nics_per_node, cluster.network.nic_bytes_per_s.value) == (cards, card_bytes_per_s)


def test_older_nodes_may_have_cards_of_100_gbit() -> None:
    cluster, _ = load_cluster("a100-16x8-edr4")
    assert cluster.network is not None
    assert (cluster.network.nics_per_node, cluster.network.nic_bytes_per_s.value) == (4, 11.75e9)
    assert load_cluster("a100-2x8-edr8") == load_cluster(str(DATA / "clusters" / "edr.toml"))


def test_the_cluster_file_of_the_fastest_cards_equals_its_named_cluster() -> None:
    assert load_cluster("b200-2x8-xdr8") == load_cluster(str(DATA / "clusters" / "b200.toml"))


def test_a_gpus_nodes_have_no_cards_of_another_generation() -> None:
    for name in ("h100-2x8-xdr8", "h200-2x8-hdr8", "b200-2x8-hdr8", "a800-2x8-ndr8"):
        with refused(UsageError, got=name, wanted="<gpu>-<nodes>x<gpus per node>"):
            load_cluster(name)


def test_the_network_by_message_size() -> None:
    network = load_cluster("a800-2x8")[0].network
    assert network is not None
    points = dict(zip(network.size_efficiency.x, network.size_efficiency.y, strict=True))
    # Cards of half the rate reach with half of the bytes what SimAI's 400 Gb/s cards reach.
    assert (points[8 * 2**20], points[128 * 2**20], points[2**29], points[2**33]) == (0.32, 0.85, 0.92, 0.96)
    faster = load_cluster("h100-2x8")[0].network
    assert faster is not None
    for slow, fast in zip(
        [network.size_efficiency, *network.efficiency_by_nodes],
        [faster.size_efficiency, *faster.efficiency_by_nodes],
        strict=True,
    ):
        assert slow.y == fast.y
        assert slow.x == [size / 2 for size in fast.x]
    fewer = load_cluster("a800-2x8-hdr4")[0].network
    assert fewer is not None
    assert fewer.size_efficiency.y == network.size_efficiency.y
    assert fewer.size_efficiency.x == [size / 2 for size in network.size_efficiency.x]  # same bytes on each card
    assert fewer.efficiency_by_nodes[3].x == [size / 2 for size in network.efficiency_by_nodes[3].x]


def test_two_curves_for_the_same_number_of_nodes_are_refused() -> None:
    network = load_cluster("a800-2x8")[0].network
    assert network is not None
    with pytest.raises(ValueError, match="same number of nodes"):
        msgspec.structs.replace(network, efficiency_by_nodes=network.efficiency_by_nodes[:1] * 2)


@pytest.mark.parametrize(
    "name",
    [
        *["a800", "a800-1", "a800-0x8", "a800-1x0", "a800-1x8-hdr0", "a800-1x8-ndr4", "a801-1x8", "A800-1x8", ""],
        *["a800-1x8 ", "a800-01x8", "-1x8", "a800-1x8-hdr", "h100-2x8-hdr4", "x" * 5000, "a\0b"],
    ],
)
def test_other_cluster_names_are_usage_errors(name: str) -> None:
    with refused(UsageError, wanted=("a800-1x8", "<gpu>-<nodes>x<gpus per node>")) as error:
        load_cluster(name)
    assert str(error.value.got).strip("'")[:9] == name.replace("\0", r"\x00")[:9]


def test_near_cluster_names_are_suggested() -> None:
    with refused(UsageError, got="'a80-1x8'", hint="'a800-1x8'"):
        load_cluster("a80-1x8")


def test_more_devices_than_a_node_has() -> None:
    with refused(UsageError, got="'a800-1x16'", wanted=("8 devices", "a800-sxm4-80gb")):
        load_cluster("a800-1x16")


def test_listed_names_load() -> None:
    assert list_hardware() == [
        "a100-sxm4-80gb",
        "a800-sxm4-80gb",
        "b200-sxm6-180gb",
        "h100-sxm5-80gb",
        "h200-sxm5-141gb",
        "l40s-pcie-48gb",
        "rtx4090-pcie-24gb",
        "rtxa6000-pcie-48gb",
    ]
    measured = ["a100-1x8", "a800-1x8", "b200-1x8", "h100-1x8", "h100hbm2e-1x8", "h200-1x8"]
    assert list_clusters() == [*measured, "l40s-1x8", "rtx4090-1x8", "rtxa6000-1x8"]
    for name in list_hardware():
        assert load_hardware(name).name == name
    for name in list_clusters():
        cluster, hardware = load_cluster(name)
        assert cluster.devices == hardware.devices


def test_no_two_profiles_share_their_first_word() -> None:
    """The first word of a profile's name is the GPU in a cluster's name."""
    words = [name.split("-")[0] for name in list_hardware()]
    assert len(set(words)) == len(words)


def test_the_commented_example_is_the_named_cluster() -> None:
    example, hardware = load_cluster(str(DATA / "clusters" / "example.toml"))
    assert (example, hardware) == load_cluster("a800-2x8")
    assert sum(line.startswith("#") for line in (DATA / "clusters" / "example.toml").read_text().splitlines()) > 10


def test_a_profile_file_is_one_node(profile: Path, samples: dict[str, msgspec.Struct]) -> None:
    cluster, hardware = load_cluster(str(profile))
    assert hardware == samples["hardware"] == load_hardware(str(profile))
    assert (cluster.nodes, cluster.devices_per_node, cluster.network) == (1, 8, None)


def test_a_cluster_file_finds_the_profile_beside_it(
    profile: Path, samples: dict[str, msgspec.Struct], monkeypatch: pytest.MonkeyPatch
) -> None:
    path = profile.parent / "cluster.json"
    codec.write(path, samples["cluster"])
    assert load_cluster(str(path)) == (samples["cluster"], samples["hardware"])
    monkeypatch.chdir(path.parent)
    assert load_cluster("cluster.json") == (samples["cluster"], samples["hardware"])


def test_a_cluster_file_without_its_profile(samples: dict[str, msgspec.Struct], tmp_path: Path) -> None:
    path = tmp_path / "cluster.json"
    codec.write(path, msgspec.structs.replace(samples["cluster"], hardware="a800-sxm4-80bg"))
    with refused(BadInput, got="'a800-sxm4-80bg'", hint="'a800-sxm4-80gb'") as error:
        load_cluster(str(path))
    assert error.value.where == f"{path}: $.hardware"


def test_another_document_is_no_cluster(samples: dict[str, msgspec.Struct], tmp_path: Path) -> None:
    path = tmp_path / "plan.json"
    codec.write(path, samples["plan"])
    with refused(BadInput, where="$.schema", got="memo.plan/3", wanted=("memo.cluster/1", "memo.hardware/1")):
        load_cluster(str(path))


def test_a_model_file(samples: dict[str, msgspec.Struct], tmp_path: Path) -> None:
    path = tmp_path / "mine"
    codec.write(path, samples["model"])
    assert load_model(str(path)) == samples["model"]


def test_a_hugging_face_config_is_recognised_by_its_content(tmp_path: Path) -> None:
    path = tmp_path / "my-gpt2" / "model.json"
    path.parent.mkdir()
    path.write_text(
        '{"model_type": "gpt2", "n_embd": 64, "n_layer": 2, "n_head": 4, "n_positions": 32, "vocab_size": 99}'
    )
    model = load_model(str(path))
    assert (model.name, model.family, model.hidden, model.max_positions) == ("model", "gpt", 64, 32)
    assert load_model(str(path.rename(path.with_name("config.json")))).name == "my-gpt2"
    assert load_model(str(path.parent)) == load_model(str(path.with_name("config.json")))
    (path.parent / "empty").mkdir()
    with refused(BadInput, what="no config.json in this folder", where=str(path.parent / "empty")):
        load_model(str(path.parent / "empty"))


def test_a_file_that_is_neither(tmp_path: Path) -> None:
    path = tmp_path / "config.json"
    path.write_text(json.dumps({"hidden_size": 64}))
    with refused(BadInput, where=str(path), got="schema", hint=("memo.model/1", "model_type")):
        load_model(str(path))


def test_unknown_models_are_usage_errors() -> None:
    with refused(UsageError, got="'gpt-7B'", wanted=tuple(list_models()), hint="'gpt-7b'"):
        load_model("gpt-7B")
    with refused(UsageError, got="'h9000'", wanted=("a800-sxm4-80gb", "memo.hardware/1")):
        load_hardware("h9000")


@pytest.mark.parametrize("load", [load_model, load_hardware, load_cluster])
def test_a_name_with_a_slash_or_suffix_is_a_file(load: object, tmp_path: Path) -> None:
    assert callable(load)
    with refused(BadInput, where="missing.json", wanted=None):
        load("missing.json")
    with refused(BadInput, where=str(tmp_path), wanted="file"):
        load(str(tmp_path))


def test_loading_is_light() -> None:
    """The catalogue loads neither numpy nor simpy, so ``--help`` stays fast."""
    code = (
        "import sys; from memo_sim.contract import catalog; catalog.load_cluster('a800-2x8'); "
        "catalog.load_model('gpt-7b'); print(*sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert not {"numpy", "simpy", "mip", "click", "rich", "matplotlib", "torch"} & set(done.stdout.split())
