import json
import re
from collections.abc import Callable
from dataclasses import replace

import msgspec
import pytest

from memo_sim.contract.catalog import load_cluster, load_hardware
from memo_sim.contract.errors import BadInput, UsageError
from memo_sim.contract.hardware import Source
from memo_sim.observed.correction import with_collectives, with_copies, with_network
from memo_sim.observed.link_benchmarks import read_nccl_tests, read_nvbandwidth

RANKS = "\n".join(f"#  Rank {i:2d} Group  0 Pid   1{i} on       host device {i:2d} [0000:07:00] H100" for i in (0, 1))
OUTPUT = f"""\
# nccl-tests version 2.17.6 nccl-headers=22703 nccl-library=22703
# Collective test starting: all_reduce_perf
# nThread 1 nGpus 2 minBytes 1048576 maxBytes 4194304 step: 2(factor) warmup iters: 1 iters: 20 agg iters: 1
#
# Using devices
{RANKS}
#
#                                                              out-of-place                       in-place
#       size         count      type   redop    root     time   algbw   busbw  #wrong     time   algbw   busbw  #wrong
#        (B)    (elements)                               (us)  (GB/s)  (GB/s)             (us)  (GB/s)  (GB/s)
     1048576        262144     float     sum      -1    30.00   34.95   34.95       0    29.10   36.03   36.03       0
     4194304       1048576     float     sum      -1    60.00   69.91   69.91       0    59.80   70.14   70.14       0
# Out of bounds values : 0 OK
"""


GATHER = (
    OUTPUT.replace("all_reduce_perf", "all_gather_perf")
    .replace("34.95   34.95", "34.95   17.47")
    .replace("36.03   36.03", "36.03   18.01")
    .replace("69.91   69.91", "69.91   34.95")
    .replace("70.14   70.14", "70.14   35.07")
)


def ranks_on(hosts: int, per_host: int = 8) -> str:
    numbers = [(host, device) for host in range(hosts) for device in range(per_host)]
    return "\n".join(
        f"#  Rank {rank:2d} Group  0 Pid   1{rank} on   node{host} device {device:2d} [0000:07:00] H100"
        for rank, (host, device) in enumerate(numbers)
    )


def json_of(
    *, wrong: float | None = 0.0, place: str = "out_of_place", ranks: int = 2, program: str = "all_reduce"
) -> bytes:
    """Return what nccl-tests writes with -J: every process lists its first device only."""
    result = {"time": 60.0, "alg_bw": 69.91, "bus_bw": 69.91, "nwrong": wrong}
    rows = [{"size": 4194304, "count": 1048576, "type": "float", "redop": "sum", "root": "    -1", place: result}]
    device = {
        "rank": 0,
        "group": 0,
        "pid": 1,
        "hostname": "node0",
        "device": 0,
        "device_hex": "07",
        "device_info": "H100",
    }
    config = {"nthreads": 1, "ngpus": ranks, "validation": 1, "devices": [device]}
    found = {"version": 2, "args": [f"./build/{program}_perf", "-J", "out"], "env": [], "nccl_version": 22703}
    return json.dumps(
        {**found, "config": config, "results": rows, "out_of_bounds": {"count": 0, "okay": "true"}}
    ).encode()


def report(status: str = "Passed", **cases: list[list[str]]) -> bytes:
    listed = [{"name": name, "status": status, "bandwidth_matrix": matrix} for name, matrix in cases.items()]
    return json.dumps({"nvbandwidth": {"version": "v0.9", "testcases": listed}}).encode()


def test_nccl_tests_become_a_collective() -> None:
    (test,) = read_nccl_tests(OUTPUT.encode(), "out.txt")
    table = test.table("nccl")
    assert (table.kind, table.ranks, table.alpha_s, test.nodes) == ("all_reduce", 2, 0.0, 1)
    assert table.bus_bytes_per_s.x == [1048576.0, 4194304.0]
    assert table.bus_bytes_per_s.y == pytest.approx([34.95e9, 69.91e9])


def test_its_json_says_the_same() -> None:
    (test,) = read_nccl_tests(json_of(), "out.json")
    assert (test.kind, test.ranks, test.nodes, test.bus_bytes_per_s) == ("all_reduce", 2, 1, {4194304: 69.91e9})


def test_the_next_command_in_a_log_is_no_second_program() -> None:
    log = f"$ ./all_reduce_perf -g 2\n{OUTPUT}$ ./all_gather_perf -g 2\n{GATHER}"
    assert [test.kind for test in read_nccl_tests(log.encode(), "log.txt")] == ["all_reduce", "all_gather"]


def test_programs_in_one_output_are_told_apart_and_repeated_sizes_count_once() -> None:
    found = read_nccl_tests((OUTPUT + GATHER + GATHER).encode(), "out.txt")
    assert [test.kind for test in found] == ["all_reduce", "all_gather", "all_gather"]
    again = OUTPUT + OUTPUT[OUTPUT.index("     1048576") :].replace("34.95", "35.05")
    (test,) = read_nccl_tests(again.encode(), "out.txt")
    assert test.bus_bytes_per_s[1048576] == pytest.approx(35.0e9)


@pytest.mark.parametrize(
    ("raw", "where"),
    [
        (OUTPUT.replace("69.91       0", "69.91       3").encode(), "line 13"),
        (OUTPUT.replace("values : 0 OK", "values : 1 FAILED").encode(), "out.txt"),
        (json_of(wrong=7.0), r"\$.results\[0\]"),
        (json_of(wrong=7.0, place="in_place"), r"\$.results\[0\]"),
    ],
)
def test_wrong_results_are_refused(raw: bytes, where: str) -> None:
    with pytest.raises(BadInput, match="wrong results") as error:
        read_nccl_tests(raw, "out.txt")
    assert re.search(where, str(error.value.where))


def test_rates_of_other_ranks_are_refused() -> None:
    """An output whose list of ranks is cut has the wrong factor between algbw and busbw."""
    with pytest.raises(BadInput, match="not those of 2 ranks"):
        read_nccl_tests(OUTPUT.replace("69.91   69.91", "69.91  122.34").encode(), "out.txt")


def test_a_run_over_nodes_becomes_the_networks_efficiency() -> None:
    text = (
        GATHER.replace(RANKS, ranks_on(2))
        .replace("34.95   17.47", "34.95   32.77")
        .replace("69.91   34.95", "69.91   65.54")
    )
    (test,) = read_nccl_tests(text.encode(), "out.txt")
    assert (test.ranks, test.nodes) == (16, 2)
    cluster, _ = load_cluster("a100-2x8")
    source = Source(kind="measured", text="here")
    changed = with_network(cluster, test, source, "nccl")
    assert changed.network is not None
    assert cluster.network is not None
    curve = changed.network.size_efficiency
    assert curve is not None
    assert curve.y == pytest.approx(
        [32.77e9 / cluster.network.node_bytes_per_s, 65.54e9 / cluster.network.node_bytes_per_s]
    )
    more = with_network(cluster, replace(test, nodes=4, ranks=32), source, "nccl").network
    assert more is not None
    assert [each.source for each in more.efficiency_by_nodes if each.nodes == 4] == ["nccl"]
    with pytest.raises(UsageError, match="has none"):
        with_network(msgspec.structs.replace(cluster, network=None, nodes=1), test, source, "nccl")
    with pytest.raises(UsageError, match="are rings"):
        with_network(cluster, replace(test, kind="all_reduce"), source, "nccl")
    with pytest.raises(UsageError, match="whole nodes"):
        with_network(cluster, replace(test, ranks=4), source, "nccl")
    with pytest.raises(UsageError, match="faster than the cards"):
        with_network(cluster, replace(test, bus_bytes_per_s={2**20: 1e12}), source, "nccl")


def test_a_collective_takes_the_place_of_its_kind_and_ranks() -> None:
    hardware = load_hardware("h100-sxm5-80gb")
    table = read_nccl_tests(OUTPUT.encode(), "out.txt")[0].table("nccl")
    changed = with_collectives(hardware, [table], Source(kind="measured", text="here"), "nccl")
    mine = [found for found in changed.collectives if (found.kind, found.ranks) == ("all_reduce", 2)]
    assert mine == [table]
    others = [found for found in hardware.collectives if (found.kind, found.ranks) != ("all_reduce", 2)]
    assert changed.collectives[: len(others)] == others


def test_nvbandwidth_gives_the_slowest_device() -> None:
    raw = report(
        device_to_host_memcpy_ce=[["55.2", "54.1"]], all_to_host_memcpy_ce=[["40", "N/A"]], device_local_copy=[["1500"]]
    )
    found = read_nvbandwidth(raw, "nv.json")
    assert (found.rates, found.devices) == ({"d2h.alone": 54.1e9, "d2h.all_devices": 40e9}, 2)
    hardware = load_hardware("h100-sxm5-80gb")
    changed = with_copies(hardware, found.rates, Source(kind="measured", text="here"), "nv")
    assert max(changed.d2h.alone.y) == pytest.approx(54.1e9)
    assert changed.d2h.all_devices.value == 40e9
    assert changed.d2h.duplex == hardware.d2h.duplex
    assert changed.h2d == hardware.h2d


def test_copies_that_did_not_pass_are_not_taken() -> None:
    with pytest.raises(BadInput, match="no copy between") as error:
        read_nvbandwidth(report(status="Error", device_to_host_memcpy_ce=[["55.2"]]), "nv.json")
    assert "device_to_host_memcpy_ce: Error" in str(error.value.got)


@pytest.mark.parametrize(
    ("text", "what"),
    [
        ("", "which collective"),
        (OUTPUT.replace("all_reduce_perf", "mystery_perf"), "which collective"),
        (OUTPUT.replace(RANKS, ""), "lists no ranks"),
        (OUTPUT[: OUTPUT.index("     1048576")], "no line with a size"),
        (OUTPUT.replace("34.95   34.95", "inf     inf").replace("69.91   69.91", "nan     nan"), "no line with a size"),
        (OUTPUT.replace("30.00   34.95", "30.00     ???"), "no numbers where its header"),
        ('{"version": 2}', "not the JSON of nccl-tests"),
        (json_of(program="mystery").decode(), "which collective"),
        (OUTPUT.replace("     1048576", "9" * 400), "no numbers where its header"),
        (OUTPUT.replace("Rank  0", "Rank  " + "1" * 5000), "lists no ranks"),
        (OUTPUT.replace("values : 0 OK", f"values : {'1' * 5000} FAILED"), "wrong results"),
        (json_of().decode().replace("4194304", "9" * 400), "no line with a size"),
        (json_of(ranks=10**400).decode(), "too many ranks"),
    ],
)
def test_half_an_output_is_refused(text: str, what: str) -> None:
    with pytest.raises(BadInput, match=what):
        read_nccl_tests(text.encode(), "out.txt")


@pytest.mark.parametrize("read", [read_nccl_tests, read_nvbandwidth])
@pytest.mark.parametrize("raw", [b'{"args": ["\xe7"]}', b'{"nvbandwidth": {"error": "\xe7"}}', b'{"x":' + b"[" * 10**5])
def test_json_that_cannot_be_decoded_is_refused(read: Callable[[bytes, str], object], raw: bytes) -> None:
    with pytest.raises(BadInput, match="not the JSON of"):
        read(raw, "out.json")


@pytest.mark.parametrize(
    ("raw", "what"),
    [
        (b"{", "not the JSON of nvbandwidth"),
        (b"{}", "not the JSON"),
        (report(device_local_copy=[["1"]]), "no copy between"),
        (report(device_to_host_memcpy_ce=[["nan", "inf", "-3", "1e30"]]), "no copy between"),
    ],
)
def test_another_json_is_refused(raw: bytes, what: str) -> None:
    with pytest.raises(BadInput, match=what):
        read_nvbandwidth(raw, "nv.json")
