"""Traces to draw: real programs of ``lower``, played on FIFO lanes with invented rates."""

from collections.abc import Callable
from itertools import pairwise

import pytest

from memo_sim.contract.knobs import Recompute
from memo_sim.contract.model import Model
from memo_sim.contract.plan import Decisions, Layout
from memo_sim.contract.trace import MemoryCurve, Spans, Trace, Wait
from memo_sim.program.analysis.columns import expand
from memo_sim.program.analysis.edges import derive_edges
from memo_sim.program.analysis.liveness import live_bytes, liveness
from memo_sim.program.ir.instruction import Instruction
from memo_sim.program.lower import lower

RATES = {"flops": 200e12, "bytes": 1.4e12, "d2h": 10e9, "h2d": 11e9, "p2p": 40e9, "host": 50e9}
RATES |= dict.fromkeys(("tp", "replica"), 150e9)


def seconds(instruction: Instruction, rates: dict[str, float]) -> float:
    """Price an instruction with one constant per lane: enough for a picture."""
    work, lane = instruction.work, instruction.lane.label
    if flops := getattr(work, "flops", 0):
        return float(flops) / rates["flops"] + 5e-6
    moved = getattr(work, "moved_bytes", getattr(work, "bytes", 0))
    return float(moved) / rates["bytes" if lane == "compute" else lane] + 5e-6


def play_step(decisions: Decisions, *, slower: float = 1.0, origin: str = "predicted", **rates: float) -> Trace:
    """Play a step; ``slower`` multiplies all durations, ``rates`` replace those of RATES."""
    (program,) = lower(decisions)
    columns = expand(program)
    edges = derive_edges(columns)
    producers: dict[int, list[int]] = {}
    for p, c in zip(edges.producer.tolist(), edges.consumer.tolist(), strict=True):
        producers.setdefault(c, []).append(p)
    ids, ops, lanes, start, end, waits = [], [], [], [], [], []
    free: dict[str, float] = {}
    for i, (name, instruction) in enumerate(program.walk()):
        lane = instruction.lane.label
        begin = free_at = free.get(lane, 0.0)
        last = max(producers.get(i, []), key=lambda p: end[p], default=None)
        if last is not None and end[last] > free_at:
            begin = end[last]
            waits.append(Wait(instruction=name, waits_for=ids[last], start_s=free_at, seconds=begin - free_at))
        free[lane] = begin + slower * seconds(instruction, RATES | rates)
        ids.append(name)
        ops.append(instruction.op)
        lanes.append(lane)
        start.append(begin)
        end.append(free[lane])
    lives = liveness(program, columns)
    compute = [i for i, lane in enumerate(lanes) if lane == "compute"]
    assert all(start[b] >= end[a] for a, b in pairwise(compute))

    def curve(*, device: bool) -> MemoryCurve:
        by_class = live_bytes(lives, device=device)
        return MemoryCurve(
            time_s=[start[i] for i in compute],
            bytes_by_class={name: [int(curve[i]) for i in compute] for name, curve in by_class.items()},
        )

    return Trace(
        origin=origin,  # type: ignore[arg-type]
        program_sha256=program.sha256,
        world_size=decisions.layout.devices,
        step_s=max(end),
        spans=Spans(ids=ids, ops=ops, lanes=lanes, start_s=start, end_s=end),
        device_memory=curve(device=True),
        host_memory=curve(device=False),
        waits=waits,
        micro_batches=decisions.micro_batches,
        micro_batches_played=decisions.micro_batches,
    )


def decide(
    *,
    layers: int = 4,
    hidden: int = 4096,
    seq_tokens: int = 1 << 18,
    alpha: float = 0.5,
    recompute: Recompute = "tokenwise",
    global_batch: int = 1,
    layout: Layout | None = None,
) -> Decisions:
    """Return decisions for a GPT of ``layers`` layers."""
    layout = layout or Layout(tp=4, cp=2, sequence_parallel=True)
    model = Model(
        name="gpt",
        family="gpt",
        layers=layers,
        hidden=hidden,
        heads=hidden // 128,
        kv_heads=hidden // 128,
        head_dim=128,
        ffn_hidden=4 * hidden,
        vocab=50257,
        tied_embeddings=True,
        activation="gelu",
    )
    local = seq_tokens // layout.cp
    return Decisions(
        model=model,
        layout=layout,
        seq_tokens=seq_tokens,
        recompute=recompute,
        swapped_tokens=int(alpha * local) // 1024 * 1024,
        loss_chunk_tokens=local // 4,
        global_batch=global_batch,
    )


@pytest.fixture(scope="session")
def played() -> Callable[..., Trace]:
    """Return ``played(slower=, origin=, <rate>=, **decide's)``: a fresh trace."""

    def play(*, slower: float = 1.0, origin: str = "predicted", rates: dict[str, float] | None = None, **how) -> Trace:
        return play_step(decide(**how), slower=slower, origin=origin, **(rates or {}))

    return play
