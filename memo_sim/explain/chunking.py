"""What full recompute's ways to need less memory are worth: inputs on the host, MLP in blocks, attention in chunks."""

from __future__ import annotations

import msgspec

from memo_sim.contract.units import format_bytes, format_seconds, format_tokens
from memo_sim.engine.simulate import Simulation
from memo_sim.planning.outcome import Evaluated, SearchResult
from memo_sim.planning.subsequences import swap_each
from memo_sim.program.ir.kinds import BlockKind, TemplateKind
from memo_sim.program.layout.attention_chunks import attention_chunks, in_chunks

_LAYER_PASSES = (TemplateKind.FORWARD, TemplateKind.BACKWARD, TemplateKind.BACKWARD_RESIDENT)


def blocks(found: SearchResult, simulation: Simulation) -> list[str]:
    """Return a sentence for each of them that the best plan has."""
    best = found.best
    if best is None or best.policy.recompute != "full":
        return []
    return [*_inputs(found, best, simulation), *_mlp(found, best), *_attention(found, best, simulation)]


def _inputs(found: SearchResult, best: Evaluated, simulation: Simulation) -> list[str]:
    """Say what swapped inputs move, and by how much keeping them does not fit."""
    if not best.decisions.swapped_tokens:
        return []
    kept = next((e for e in found.ranked if e.decisions == swap_each(best.decisions, 0)), None)
    moved = format_bytes(simulation.pace.moved_by(lambda t: t.kind is TemplateKind.OFFLOAD).d2h)
    less = f"; kept on the device they do not fit, {_short(kept)}" if kept and not _fits(kept) else ""
    return [f"Layer inputs wait for backward in host memory, {moved} a step{less}."]


def _mlp(found: SearchResult, best: Evaluated) -> list[str]:
    rows, tokens = best.decisions.mlp_chunk_tokens, best.decisions.local_tokens
    if not rows:
        return []
    text = f"The MLP runs in {-(-tokens // rows)} row blocks of {format_tokens(rows)} tokens, each rebuilt right before"
    text += " its backward, without its second product"
    return [f"{text}{_against(best, _same_but(found, best, mlp_chunk_tokens=0))}."]


def _attention(found: SearchResult, best: Evaluated, simulation: Simulation) -> list[str]:
    if not in_chunks(best.decisions):
        return []
    down, up = (
        getattr(simulation.pace.moved_by(lambda t: t.kind in _LAYER_PASSES and t.block is BlockKind.LAYER), lane)
        for lane in ("d2h", "h2d")
    )
    chunk, count = best.decisions.attention_chunk_tokens, len(attention_chunks(best.decisions))
    text = f"Attention runs in {count} chunks of {format_tokens(chunk)} tokens, whose keys and values wait on the host:"
    text += f" {format_bytes(down)} leave a step and {format_bytes(up)} come back"
    return [f"{text}{_against(best, _same_but(found, best, attention_chunk_tokens=0))}."]


def _against(best: Evaluated, whole: Evaluated | None) -> str:
    """Return what the plan would be with that part whole; nothing where it was not evaluated."""
    if whole is None:
        return ""
    if not _fits(whole):
        return f"; whole it does not fit, {_short(whole)}"
    peak = format_bytes(whole.prediction.peak_device_bytes)
    slower_s = (whole.prediction.step_s or 0.0) - (best.prediction.step_s or 0.0)
    how = "longer" if slower_s >= 0 else "shorter"
    return f"; whole, device memory would be {peak} and the step {format_seconds(abs(slower_s))} {how}"


def _same_but(found: SearchResult, best: Evaluated, **changes: int) -> Evaluated | None:
    """Return the evaluated plan that differs from the best in ``changes`` alone, its kernels aside."""
    wanted = msgspec.structs.replace(best.decisions, **changes)

    def alike(other: Evaluated) -> bool:
        return msgspec.structs.replace(other.decisions, kernels=wanted.kernels) == wanted

    return next((e for e in found.ranked if alike(e)), None)


def _fits(evaluated: Evaluated) -> bool:
    return evaluated.prediction.status == "ok"


def _short(refused: Evaluated) -> str:
    return f"{refused.prediction.status}, short of {format_bytes(refused.prediction.shortfall_bytes)}"
