"""Tests that debug mode finds every planted race, and reports none where there is none."""

import random
import threading
import time
from typing import Any

import numpy as np
import pytest
import torch

from memo_exec.interpreter.race_checks import Probe, RaceFound, checksum
from memo_exec.kernels import KERNELS, Call
from memo_exec.memory.binding import Bound, schedule
from memo_sim.contract.plan import Decisions, Layout
from memo_sim.program.analysis.edges import Edges
from memo_sim.program.lower import lower
from tests.exec_cpu.small import batch, decide, gpt, gradients, llama, one_step, play, scalars, wrapped

SWAP = decide(gpt(), swapped_tokens=256)
PARTS: dict[str, Any] = {"recompute": "tokenwise", "swapped_tokens": 256, "subsequence_swapped_tokens": (128, 128)}
SUBSEQUENCES = decide(gpt(layers=2), layout=Layout(subsequences=2), seq_tokens=384, micro_batch=1, **PARTS)
"""Subsequences of 256 and 128 tokens; half of the first one is recomputed."""


class Edged:
    """A program and the edges that no other edges imply."""

    def __init__(self, decisions: Decisions, *implied: str) -> None:
        self.decisions = decisions
        self.schedule = schedule(lower(decisions)[0])
        edges, ids = self.schedule.edges, self.schedule.program.ids()
        self.pairs = list(zip(edges.producer.tolist(), edges.consumer.tolist(), strict=True))
        names = {f"{ids[producer]}->{ids[consumer]}": i for i, (producer, consumer) in enumerate(self.pairs)}
        self.needed = {name: i for name, i in names.items() if not name.endswith(implied)}


EDGED = {
    "swap": Edged(SWAP, "/off/act->m0/s0/l0/pre/act"),
    "subsequences": Edged(SUBSEQUENCES, *(f"/off/{name}->m0/s0/l1/pre/{name}" for name in ("x", "attn", "act"))),
}
"""Without the edges that other edges imply: compute overwrites the buffer between the offload and the prefetch."""

DROPPED = [pytest.param(each, i, id=name) for each in EDGED.values() for name, i in each.needed.items()]


class LayerPass:
    """Recognises one instruction among equal ones (layers share templates)."""

    def __init__(self, edged: Edged, number: int) -> None:
        walked = [instruction for _, instruction in edged.schedule.program.walk()]
        self.instruction = walked[number]
        self.earlier = walked[:number].count(self.instruction)

    def __call__(self, call: Call) -> bool:
        if call.instruction != self.instruction:
            return False
        self.earlier -= 1
        return self.earlier == -1


@pytest.mark.parametrize(("edged", "dropped"), DROPPED)
def test_every_dropped_edge_is_found(edged: Edged, dropped: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """The test holds the producer until the consumer, which no longer waits for it, has started or was refused."""
    producer, consumer = (LayerPass(edged, number) for number in edged.pairs[dropped])
    begun, watch = threading.Event(), Probe.before

    def watching(probe: Probe, bound: Bound, call: Call) -> None:
        try:
            watch(probe, bound, call)
        except RaceFound:
            begun.set()
            raise

    def before(call: Call) -> None:
        if consumer(call):
            begun.set()
        if producer(call):
            assert begun.wait(timeout=20)

    monkeypatch.setattr(Probe, "before", watching)
    edges = edged.schedule.edges
    fewer = Edges(np.delete(edges.producer, dropped), np.delete(edges.consumer, dropped))
    with pytest.raises(RaceFound):
        one_step(
            edged.decisions, debug=True, edges=fewer, kernels={op: wrapped(k, before) for op, k in KERNELS.items()}
        )


@pytest.mark.parametrize(
    "policy",
    [
        {},
        {"recompute": "full"},
        {"recompute": "full", "rounding_buffers": True},
        {"recompute": "full", "rounding_buffers": True, "swapped_tokens": 256, "mlp_chunk_tokens": 128},
        {"recompute": "full", "swapped_tokens": 256, "mlp_chunk_tokens": 128},
        {"recompute": "full", "seq_tokens": 320, "micro_batch": 1, "attention_chunk_tokens": 128},
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


ROUNDING: dict[str, Any] = {"recompute": "tokenwise", "swapped_tokens": 128}
WINDOW: dict[str, Any] = {"offload_window": 1, "swapped_tokens": 188, "subsequence_swapped_tokens": (128, 0, 60)}
PARTED: dict[str, Any] = {"layout": Layout(subsequences=3), "seq_tokens": 700, "micro_batch": 1, "global_batch": 2}
SPEEDS = {
    "three micro-batches take turns in the slab": ({"global_batch": 6}, ROUNDING),
    "buffers leave and others come back": (PARTED, WINDOW),
}


@pytest.mark.parametrize("case", SPEEDS)
def test_any_speed_of_lanes_gives_the_same_bits(case: str) -> None:
    """Random delays before every kernel do not change the gradients."""
    shared, policy = SPEEDS[case]
    model = gpt(layers=5, hidden=32, ffn_hidden=64, heads=2, kv_heads=2, max_positions=1024)
    decisions = decide(model, **(shared | policy))
    _, wanted = one_step(decide(model, **shared))
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

    with pytest.raises(RaceFound, match="l0/pre/up"):
        one_step(SWAP, debug=True, kernels={**KERNELS, "h2d": corrupt})


def test_a_copy_that_copies_nothing_is_found() -> None:
    def lazy(call: Call) -> None:
        """Copy nothing: the device still holds the rows."""

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
