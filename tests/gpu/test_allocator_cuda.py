"""PyTorch's allocator and our model of it count the same for the same calls and cap. Not yet run on a GPU."""

import random
from collections.abc import Iterator

import pytest
import torch

from memo_sim.contract.plan import Decisions
from memo_sim.contract.units import GIB, MIB
from memo_sim.memory.device_allocator import Block, DeviceAllocator, OutOfDeviceMemory
from memo_sim.program.arena.requests import requests_of
from memo_sim.program.lower import lower
from tests.exec_cpu.small import decide, llama

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
Calls = list[tuple[str, int, int]]
"""(malloc or free, number of the buffer, its bytes)."""


def of_a_program(decisions: Decisions) -> Calls:
    """Return the calls of two steps in the model's order: at one instant, frees come before mallocs."""
    requests = requests_of(lower(decisions)[0])
    events = []
    for number, (lower_, upper, size) in enumerate(
        zip(requests.lower, requests.upper, requests.size_bytes, strict=True)
    ):
        events += [(upper, 0, number, size), (lower_, 1, number, size)]
    step = [("malloc" if birth else "free", number, size) for _, birth, number, size in sorted(events)]
    return step + step


def at_random(seed: int) -> Calls:
    """Return random calls that fragment memory: sizes from both pools and of split blocks, most of them freed."""
    chance, held, calls = random.Random(seed), [], Calls()
    for number in range(600):
        size = chance.choice(
            [chance.randint(1, MIB), chance.randint(MIB, 10 * MIB), chance.randint(10 * MIB, 200 * MIB)]
        )
        calls.append(("malloc", number, size))
        held.append((number, size))
        while held and sum(size for _, size in held) > GIB:
            calls.append(("free", *held.pop(chance.randrange(len(held)))))
    return calls + [("free", *block) for block in held]


@pytest.fixture
def uncapped() -> Iterator[None]:
    torch.cuda.empty_cache()
    yield
    torch.cuda.memory.set_per_process_memory_fraction(1.0)
    torch.cuda.empty_cache()


def by_torch(calls: Calls, room: int) -> dict[str, int]:
    """Make the calls on the device with ``room`` bytes beyond the reserved ones; return the counters' increases."""
    total = torch.cuda.get_device_properties(0).total_memory
    before = torch.cuda.memory_stats()
    torch.cuda.memory.set_per_process_memory_fraction((torch.cuda.memory_reserved() + room) / total)
    held: dict[int, int] = {}
    failed = 0
    for kind, number, size in calls:
        if kind == "malloc":
            try:
                held[number] = torch.cuda.caching_allocator_alloc(size)
            except torch.OutOfMemoryError:
                failed += 1
        elif number in held:
            torch.cuda.caching_allocator_delete(held.pop(number))
    after = torch.cuda.memory_stats()
    names = {"malloc": "segment.all.allocated", "free": "segment.all.freed", "retries": "num_alloc_retries"}
    return {short: after[name] - before[name] for short, name in names.items()} | {"failed": failed}


def by_model(calls: Calls, room: int) -> dict[str, int]:
    device = DeviceAllocator(capacity_bytes=room)
    held: dict[int, Block] = {}
    for kind, number, size in calls:
        if kind == "malloc":
            try:
                held[number] = device.malloc(size)
            except OutOfDeviceMemory:
                pass
        elif number in held:
            device.free(held.pop(number))
    kinds = [call.kind for call in device.calls]
    return {
        "malloc": kinds.count("malloc"),
        "free": kinds.count("free"),
        "retries": device.num_alloc_retries,
        "failed": device.num_ooms,
    }


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("room", [4 * GIB, GIB + GIB // 4, GIB])
@pytest.mark.usefixtures("uncapped")
def test_random_calls_count_the_same(seed: int, room: int) -> None:
    calls = at_random(seed)
    wanted = by_model(calls, room)
    assert wanted["malloc"] > 0
    assert by_torch(calls, room) == wanted


@pytest.mark.parametrize("recompute", ["none", "full", "tokenwise"])
@pytest.mark.parametrize("share", [2.0, 1.1, 1.02])
@pytest.mark.usefixtures("uncapped")
def test_a_programs_requests_count_the_same(recompute: str, share: float) -> None:
    """The cap is ``share`` times the largest live sum."""
    model = llama(hidden=1024, heads=8, kv_heads=8, ffn_hidden=4096, layers=4)
    calls = of_a_program(decide(model, seq_tokens=8192, dtype="bf16", recompute=recompute))
    live = peak = 0
    for kind, _, size in calls:
        live += size if kind == "malloc" else -size
        peak = max(peak, live)
    room = int(peak * share)
    assert by_torch(calls, room) == by_model(calls, room)
