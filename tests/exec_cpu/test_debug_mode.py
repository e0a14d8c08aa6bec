"""Debug mode finds every planted race, and nothing where there is none."""

import random
import threading
import time

import numpy as np
import pytest
import torch

from memo_exec.kernels import KERNELS, Call
from memo_exec.probe import RaceFound, checksum
from memo_exec.schedule import schedule
from memo_sim.program.edges import Edges
from memo_sim.program.lower import lower
from tests.exec_cpu.small import batch, decide, gpt, gradients, llama, one_step, play, scalars, wrapped

SWAP = decide(gpt(), swapped_tokens=256)
SCHEDULE = schedule(lower(SWAP)[0])
IDS = SCHEDULE.program.ids()
PAIRS = list(zip(SCHEDULE.edges.producer.tolist(), SCHEDULE.edges.consumer.tolist(), strict=True))
IMPLIED = "/off/act->m0/s0/l0/pre/act"
"""The one edge that others imply: between the two, compute overwrites the buffer after the one and before the other."""
NEEDED = [
    pytest.param(i, id=f"{IDS[producer]}->{IDS[consumer]}")
    for i, (producer, consumer) in enumerate(PAIRS)
    if not f"{IDS[producer]}->{IDS[consumer]}".endswith(IMPLIED)
]


class Visit:
    """Recognises one instruction among the calls of its equals (layers share templates)."""

    def __init__(self, number: int) -> None:
        walked = [instruction for _, instruction in SCHEDULE.program.walk()]
        self.instruction = walked[number]
        self.earlier = walked[:number].count(self.instruction)

    def __call__(self, call: Call) -> bool:
        if call.instruction != self.instruction:
            return False
        self.earlier -= 1
        return self.earlier == -1


@pytest.mark.parametrize("dropped", NEEDED)
def test_every_dropped_edge_is_found(dropped: int) -> None:
    """The producer is held until the consumer, which no longer waits for it, has begun."""
    producer, consumer = (Visit(number) for number in PAIRS[dropped])
    begun = threading.Event()

    def before(call: Call) -> None:
        if consumer(call):
            begun.set()
        if producer(call):
            assert begun.wait(timeout=20)

    edges = SCHEDULE.edges
    fewer = Edges(np.delete(edges.producer, dropped), np.delete(edges.consumer, dropped))
    with pytest.raises(RaceFound):
        one_step(SWAP, debug=True, edges=fewer, kernels={op: wrapped(k, before) for op, k in KERNELS.items()})


@pytest.mark.parametrize(
    "policy",
    [
        {},
        {"recompute": "full"},
        {"recompute": "full", "swapped_tokens": 256, "mlp_chunk_tokens": 128},
        {"swapped_tokens": 256},
        {"swapped_tokens": 128},
        {"recompute": "tokenwise"},
        {"recompute": "tokenwise", "swapped_tokens": 128},
        {"recompute": "tokenwise", "swapped_tokens": 128, "states": "host"},
        {"recompute": "tokenwise", "swapped_tokens": 128, "dtype": "bf16"},
    ],
)
def test_no_race_without_a_plant(policy: dict[str, object]) -> None:
    decisions = decide(llama(layers=4), global_batch=4, **policy)
    plain, wanted = one_step(decisions)
    watched, found = one_step(decisions, debug=True)
    assert watched.loss == plain.loss
    assert all(torch.equal(found[name], wanted[name]) for name in wanted)


def test_any_speed_of_lanes_gives_the_same_bits() -> None:
    """Three micro-batches take turns in the slab while every kernel is delayed at random."""
    policy: dict[str, object] = {"recompute": "tokenwise", "swapped_tokens": 128}
    decisions = decide(gpt(layers=5, hidden=32, ffn_hidden=64, heads=2, kv_heads=2), global_batch=6, **policy)
    _, wanted = one_step(decide(decisions.model, global_batch=6))
    delays = random.Random(0)

    def before(call: Call) -> None:
        time.sleep(delays.choice((0.0, 0.0, 0.0002, 0.002)))

    with play(decisions, debug=True, kernels={op: wrapped(k, before) for op, k in KERNELS.items()}) as interpreter:
        batches = batch(decisions)
        for _ in range(3):
            interpreter.run_step(batches, scalars(batches, lr=0.0))
            found = gradients(interpreter)
            assert all(torch.equal(found[name], wanted[name]) for name in wanted)


def test_a_copy_that_changes_bytes_is_found() -> None:
    def corrupt(call: Call) -> None:
        KERNELS["h2d"](call)
        if call.instruction.name == "pre/up":
            call["target"].view(-1)[7] += 1.0

    with pytest.raises(RaceFound, match="l0/pre/up brought back other bytes"):
        one_step(SWAP, debug=True, kernels={**KERNELS, "h2d": corrupt})


def test_a_copy_that_copies_nothing_is_found() -> None:
    def lazy(call: Call) -> None:
        """Leave the rows that are on the device anyway where they are."""

    with pytest.raises(RaceFound):
        one_step(SWAP, debug=True, kernels={**KERNELS, "h2d": lazy})


def test_checksum_sees_every_byte() -> None:
    tensor = torch.arange(27, dtype=torch.uint8)
    for i in range(len(tensor)):
        changed = tensor.clone()
        changed[i] += 100
        assert checksum(changed) != checksum(tensor)
    assert checksum(tensor.roll(8)) != checksum(tensor)
    assert checksum(tensor.clone()) == checksum(tensor)
