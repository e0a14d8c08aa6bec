"""What attention windows and sinks change: which layers have them, how long their calls take, what cp exchanges."""

from __future__ import annotations

from collections import Counter

import numpy as np

from memo_sim.contract.attended_pairs import pairs_in_window
from memo_sim.contract.model import Model
from memo_sim.contract.units import DTYPE_BYTES, counted, format_bytes, format_percent, format_seconds
from memo_sim.engine.simulate import Simulation
from memo_sim.program.ir.instruction import Instruction
from memo_sim.program.ir.work import Attention, WindowedAttention


def attended(model: Model, seq_tokens: int) -> str:
    """Return how many layers have which window, and sinks; empty where every token sees all keys before it."""
    counts = Counter(model.layer(number).window for number in range(model.layers))
    parts = [
        f"{window:,} tokens in {counted(times, 'layer')}" + (" (no sequence is longer)" if window >= seq_tokens else "")
        for window, times in sorted(counts.items())
        if window
    ]
    if parts and counts[0]:
        parts.append(f"none in {counted(counts[0], 'layer')}")
    if model.sinks:
        parts.append("a sink for each head")
    return "; ".join(parts)


def windows(simulation: Simulation) -> list[str]:
    """Say how long windowed and full attention take, and what context-parallel ranks exchange for windows."""
    decisions = simulation.decisions
    model, seq = decisions.model, decisions.seq_tokens
    chosen = [shape.window for number in range(model.layers) if 0 < (shape := model.layer(number)).window < seq]
    if not chosen:
        return []
    share = sum(pairs_in_window(seq, seq, window) for window in chosen) / (len(chosen) * seq * seq / 2)
    text = (
        f"Windows: {attended(model, seq)}. A layer with a window computes {format_percent(share)} of full attention's"
    )
    own, others = (format_seconds(_seconds(simulation, windowed=windowed)) for windowed in (True, False))
    text += f" pairs; attention takes {own} of a rank's step in these layers and {others} in the others."
    if decisions.layout.cp > 1:
        kv = 2 * model.kv_width // decisions.layout.tp * DTYPE_BYTES[decisions.dtype]
        sent = max(chosen) - 1
        text += f" With cp such a layer's forward sends the keys and values of {2 * sent:,} tokens to its neighbours"
        text += f" ({format_bytes(2 * sent * kv)}), not those of all ranks."
    return [text]


def _seconds(simulation: Simulation, *, windowed: bool) -> float:
    """Return how long the attention calls with a window, or those without, take on the rank where they take longest."""

    def counts(instruction: Instruction) -> float:
        work = instruction.work
        return float(isinstance(work, Attention) and isinstance(work, WindowedAttention) == windowed)

    return max(
        float(np.sum(stage.seconds * stage.per_instruction(counts) * stage.weights)) for stage in simulation.stages
    )
