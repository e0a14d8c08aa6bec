import json

import pytest

from memo_sim.contract.catalog import load_hardware
from memo_sim.contract.errors import BadInput
from memo_sim.contract.hardware import Source
from memo_sim.observed.correction import with_collectives, with_copies
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


def report(**cases: list[list[str]]) -> bytes:
    listed = [{"name": name, "status": "Passed", "bandwidth_matrix": matrix} for name, matrix in cases.items()]
    return json.dumps({"nvbandwidth": {"version": "v0.9", "testcases": listed}}).encode()


def test_nccl_tests_become_a_collective() -> None:
    table = read_nccl_tests(OUTPUT.encode(), "out.txt", source="nccl")
    assert (table.kind, table.ranks, table.alpha_s) == ("all_reduce", 2, 0.0)
    assert table.bus_bytes_per_s.x == [1048576.0, 4194304.0]
    assert table.bus_bytes_per_s.y == pytest.approx([34.95e9, 69.91e9])


def test_a_collective_takes_the_place_of_its_kind_and_ranks() -> None:
    hardware = load_hardware("h100-sxm5-80gb")
    table = read_nccl_tests(OUTPUT.encode(), "out.txt", source="nccl")
    changed = with_collectives(hardware, [table], Source(kind="measured", text="here"), "nccl")
    mine = [found for found in changed.collectives if (found.kind, found.ranks) == ("all_reduce", 2)]
    assert mine == [table]
    others = [found for found in hardware.collectives if (found.kind, found.ranks) != ("all_reduce", 2)]
    assert changed.collectives[: len(others)] == others


def test_nvbandwidth_gives_the_slowest_device() -> None:
    raw = report(
        device_to_host_memcpy_ce=[["55.2", "54.1"]], all_to_host_memcpy_ce=[["40", "N/A"]], device_local_copy=[["1500"]]
    )
    rates = read_nvbandwidth(raw, "nv.json")
    assert rates == {"d2h.alone": 54.1e9, "d2h.all_devices": 40e9}
    hardware = load_hardware("h100-sxm5-80gb")
    changed = with_copies(hardware, rates, Source(kind="measured", text="here"), "nv")
    assert max(changed.d2h.alone.y) == pytest.approx(54.1e9)
    assert changed.d2h.all_devices.value == 40e9
    assert changed.d2h.duplex == hardware.d2h.duplex
    assert changed.h2d == hardware.h2d


@pytest.mark.parametrize(
    ("text", "what"),
    [
        ("", "which collective"),
        (OUTPUT.replace("all_reduce_perf", "mystery_perf"), "which collective"),
        (OUTPUT.replace(RANKS, ""), "lists no ranks"),
        (OUTPUT[: OUTPUT.index("     1048576")], "no line with a size"),
    ],
)
def test_half_an_output_is_refused(text: str, what: str) -> None:
    with pytest.raises(BadInput, match=what):
        read_nccl_tests(text.encode(), "out.txt", source="nccl")


@pytest.mark.parametrize(
    ("raw", "what"),
    [
        (b"{", "not the JSON of nvbandwidth"),
        (b"{}", "not the JSON"),
        (report(device_local_copy=[["1"]]), "no copy between"),
    ],
)
def test_another_json_is_refused(raw: bytes, what: str) -> None:
    with pytest.raises(BadInput, match=what):
        read_nvbandwidth(raw, "nv.json")
