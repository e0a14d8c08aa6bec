"""Tests that debug mode finds every planted race, and reports none where there is none."""

import random
import threading
import time
from typing import Any

import numpy as np
import pytest
import torch

from memo_exec.interpreter.dead_rows import dead_rows
from memo_exec.interpreter.race_checks import Probe, RaceFound, checksum
from memo_exec.kernels import KERNELS, Call
from memo_exec.memory import poison
from memo_exec.memory.binding import Bound, schedule
from memo_sim.contract.plan import Decisions, Layout
from memo_sim.program.analysis.edges import Edges
from memo_sim.program.lower import lower
from tests.exec_cpu.small import batch, decide, gpt, gradients, llama, one_step, play, scalars, wrapped
from tests.planted_faults import log_sum_exp_of_another_layer

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
@pytest.mark.slow
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


SKIPPABLE = decide(llama(layers=3, qkv_bias=True), recompute="tokenwise", swapped_tokens=128)
OPS = sorted({i.op for t in lower(SKIPPABLE)[0].templates for i in t.instructions} - {"grad_norm"})
"""All ops but the sum of squares, whose result may be any number."""


FAST_OPS = ("linear", "linear.wgrad", "rotary", "h2d")


@pytest.mark.parametrize("op", [pytest.param(op, marks=() if op in FAST_OPS else pytest.mark.slow) for op in OPS])
def test_a_kernel_that_does_nothing_is_found(op: str) -> None:
    """The instruction at fault is named, or the copy that brings poison."""
    with pytest.raises(RaceFound, match=r"has not written|has changed nothing|copied|prefetched"):
        one_step(SKIPPABLE, debug=True, kernels={**KERNELS, op: lambda call: None})


def test_a_wrong_value_is_named_with_its_rows() -> None:
    program = log_sum_exp_of_another_layer(lower(SKIPPABLE)[0])
    batches = batch(SKIPPABLE)
    with play(SKIPPABLE, program=program, debug=True) as interpreter, pytest.raises(RaceFound) as caught:
        interpreter.run_step(batches, scalars(batches))
    assert "/bwd/attn.bwd: lse " in str(caught.value)
    assert "rows 0 to 256 of skeletal.lse" in str(caught.value)


def test_rows_that_a_kernel_leaves_out_are_found_by_their_reader() -> None:
    def short(call: Call) -> None:
        """Leave out the last row."""
        rows = call["out"][-1:].clone()
        KERNELS["swiglu"](call)
        call["out"][-1:] = rows

    with pytest.raises(RaceFound, match="ffn_down reads NaN in x"):
        one_step(SKIPPABLE, debug=True, kernels={**KERNELS, "swiglu": short})


def test_rows_are_dead_between_their_last_use_and_the_next_write() -> None:
    """Layers 0 and 2 share a rounding buffer: it is dead from layer 0's offload to layer 2's forward."""
    plan = schedule(lower(decide(gpt(layers=5), swapped_tokens=256))[0])
    ids = plan.program.ids()
    first = plan.program.family_bases["skeletal.act"]
    rows = [each for each in dead_rows(plan) if each.buffer == first]
    found = [([ids[user] for user in each.users], ids[each.next] if each.next >= 0 else "") for each in rows]
    assert found[0] == (["m0/s0/l0/fwd/ffn_down", "m0/s0/l0/off/act"], "m0/s0/l2/fwd/act")
    assert all((each.first, each.end) == (0, 256) for each in rows)


def test_poison_is_nan_and_minus_one() -> None:
    for dtype in (torch.float32, torch.bfloat16, torch.float64):
        tensor = torch.zeros(3, 5, dtype=dtype)
        assert not poison.is_whole(tensor)
        before = poison.fingerprint(tensor)
        poison.fill(tensor)
        assert bool(tensor.isnan().all())
        assert poison.is_whole(tensor)
        assert poison.fingerprint(tensor) != before
        tensor[1, 2] = float("nan")  # the processor's own NaN has other bits
        assert not poison.is_whole(tensor)
    numbers = torch.zeros(7, dtype=torch.int64)
    poison.fill(numbers)
    assert numbers.tolist() == [-1] * 7
    assert not poison.is_whole(numbers[:0])


def test_checksum_sees_every_byte() -> None:
    tensor = torch.arange(27, dtype=torch.uint8)
    for i in range(len(tensor)):
        changed = tensor.clone()
        changed[i] += 100
        assert checksum(changed) != checksum(tensor)
    assert checksum(tensor.roll(8)) != checksum(tensor)
    assert checksum(tensor.clone()) == checksum(tensor)
