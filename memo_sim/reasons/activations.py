"""Says why activations are swapped or recomputed: how much, why no more, and what recompute repeats."""

from __future__ import annotations

import msgspec

from memo_sim.contract.knobs import MlpRebuild
from memo_sim.contract.plan import Decisions
from memo_sim.contract.units import format_bytes, format_percent, format_seconds, format_tokens
from memo_sim.engine.simulate import Simulation
from memo_sim.planning.outcome import Evaluated, SearchResult
from memo_sim.planning.presets import PARTIAL_SWAP, TOKENWISE
from memo_sim.planning.subsequences import swap_each
from memo_sim.program.ir.kinds import BlockKind, FamilyKind, TemplateKind
from memo_sim.program.layers.kinds import skeletal_of
from memo_sim.program.layout.attention_chunks import attention_chunks, in_chunks
from memo_sim.program.layout.recomputed_layers import ALL
from memo_sim.program.layout.rowwise_blocks import ROWWISE
from memo_sim.program.layout.rules.recompute import swaps
from memo_sim.program.layout.shape import shape_of
from memo_sim.program.layout.swap_format import is_rounded, swapped_bytes
from memo_sim.views.plan_table import layout_label, short_by, short_of

RUN_AGAIN = {
    "selective": "attention runs forward again; with a flash kernel this saves only its log-sum-exp",
    "norms": "norms run forward again",
    "mlp": "the MLP runs forward again",
    "operators": "every second product, norms and activations run forward again",
    ROWWISE: "all of a layer but attention and the MLP's second product runs forward again",
}
"""What modes repeat that recompute no whole layer."""
REBUILT_MLP: dict[MlpRebuild, str] = {
    "block": "each block is recomputed right before its backward, without its second matrix product",
    "layer": "the layer's recompute repeats all blocks and keeps them for backward (--mlp-rebuild layer)",
    "twice": "the layer's recompute repeats all blocks, and each one is repeated again right before its backward"
    " (--mlp-rebuild twice)",
}
"""What full recompute repeats of an MLP in row blocks."""
LAYER_PASSES = (TemplateKind.FORWARD, TemplateKind.BACKWARD, TemplateKind.BACKWARD_RESIDENT)
SMALLEST_SHARE = 0.0005
"""Recompute below this fraction of compute time is not reported."""


def recompute(found: SearchResult, simulation: Simulation) -> list[str]:
    """Say what fraction of compute time is recompute, and why those tokens are not swapped instead."""
    share, own = simulation.recompute_share, simulation.own_rebuild_share
    if share < SMALLEST_SHARE:
        return []
    why = _why_no_more_is_swapped(found) if share - own >= SMALLEST_SHARE else ""
    metp = (
        f", of which METP's recompute of Q, K, V and the MLP's activations is {format_percent(own)}"
        if own >= SMALLEST_SHARE
        else ""
    )
    join = "" if not why else "; " if metp else ": "
    return [f"Recompute is {format_percent(share)} of compute time{metp}{join}{why}."]


def _why_no_more_is_swapped(found: SearchResult) -> str:
    """Return why the best plan's alpha is not higher; an empty text when the search did not choose it."""
    best = found.best
    if best is None:
        return ""
    if best.policy.recompute in RUN_AGAIN:
        return RUN_AGAIN[best.policy.recompute]
    if best.policy.recompute == "full":
        swapping = [e for e in found.ranked if e.policy == TOKENWISE and e.prediction.status != "ok"]
        same = next((e for e in swapping if e.decisions.layout == best.decisions.layout), None)
        return f"swapping instead does not fit on this layout ({short_by(same.prediction)})" if same else ""
    if best.policy.alpha is not None:
        return ""
    if best.above is not None:
        limit = short_of(best.above.status)
        return f"{limit} limits alpha; the next higher alpha does not fit ({short_by(best.above)})"
    return "with a higher alpha, compute would wait longer for copies than it recomputes now"


def alpha(found: SearchResult) -> list[str]:
    """Compare alpha of the best token-wise plan with what MEMO's linear program gives (MEMO 4.1)."""
    # MEMO's linear program knows no subsequences.
    whole = [e for e in found.ranked if e.decisions.layout.subsequences == 1]
    tried = [e for e in whole if e.linear_program and e.prediction.status == "ok"]
    layout = found.best.decisions.layout if found.best else None
    best = next((e for e in tried if e.decisions.layout == layout), tried[0] if tried else None)
    if best is None or best.linear_program is None:
        return []
    program = best.linear_program
    where = layout_label(best.decisions.layout)
    bound = f"limited by {program.binds}; a layer's forward takes {format_seconds(program.layer_forward_s)}"
    rates = f"offload runs at {program.bandwidth_bytes_per_s / 1e9:.1f} GB/s"
    full = f"hiding a full swap would need {program.full_overlap_bandwidth / 1e9:.1f} GB/s"
    chosen = f"the search finds {best.decisions.alpha:.3g}, MEMO's linear program gives {program.alpha:.3g}"
    refused = f"; the next higher alpha does not fit ({short_by(best.above)})" if best.above else ""
    whose = "" if best is found.best else " of the best token-wise plan, which is not the best plan,"
    return [f"Alpha{whose} on {where}: {chosen} ({bound}; {rates}; {full}){refused}."]


def partial_swap(found: SearchResult) -> list[str]:
    """Say why a plan that swaps some tokens and keeps the others has this alpha."""
    best = found.best
    if best is None or best.policy != PARTIAL_SWAP:
        return []
    text = f"Alpha is {best.decisions.alpha:.3g}: so much is swapped, the rest is kept, and nothing is recomputed"
    return [f"{text}{_next_alphas(best)}."]


def _next_alphas(best: Evaluated) -> str:
    """Return which of the next alphas do not fit; an empty text where both do."""
    less = f"; the next lower alpha does not fit ({short_by(best.below)})" if best.below else ""
    more = f"; the next higher alpha does not fit ({short_by(best.above)})" if best.above else ""
    return f"{less}{more}"


def rounded_swaps(simulation: Simulation) -> list[str]:
    """Say how many bytes FP8 saves where activations are swapped in it."""
    decisions = simulation.decisions
    if decisions.swap_dtype == "same" or not swaps(decisions):
        return []
    shape, layer = shape_of(decisions), decisions.model.layer(0)
    tensors = [t for t in skeletal_of(decisions, shape, layer) if is_rounded(decisions, t)]
    share = sum(swapped_bytes(decisions, t) for t in tensors) / sum(t.bytes for t in tensors)
    moved = format_bytes(simulation.pace.moved_by(lambda t: t.kind is TemplateKind.OFFLOAD).d2h)
    text = f"Rows in {decisions.dtype} are swapped in FP8 with a scale for each, {format_percent(share)} of their bytes"
    bound = "1/16 of a value, or 2e-6 of its row's largest, at most"
    return [f"{text}; {moved} leave per step. Backward reads them rounded: off by {bound}."]


def full_recompute(found: SearchResult, simulation: Simulation) -> list[str]:
    """Say what some layers, rounding buffers, swapped inputs, MLP row blocks and attention chunks mean."""
    best = found.best
    if best is None or best.policy.recompute != "full":
        return []
    return [
        *_some_layers(best),
        *_rounding_buffers(simulation),
        *_swapped_inputs(found, best, simulation),
        *_mlp_chunks(found, best),
        *_attention_chunks(found, best, simulation),
    ]


def rowwise_recompute(found: SearchResult, simulation: Simulation) -> list[str]:
    """Say what row-wise recompute keeps of a layer, where that is, and why nothing else is kept."""
    best = found.best
    if best is None or best.policy.recompute != ROWWISE:
        return []
    decisions = best.decisions
    rows, tokens = decisions.mlp_chunk_tokens, decisions.local_tokens
    blocks = f" in {-(-tokens // rows)} row blocks of {format_tokens(rows)} tokens" if 0 < rows < tokens else ""
    text = "Attention runs forward once. Of a layer, its input, attention's output and the log-sum-exp"
    moved = format_bytes(simulation.pace.moved_by(lambda t: t.kind is TemplateKind.OFFLOAD).d2h)
    some = f"{_swapped_share(decisions)}wait in host memory for backward, {moved} per step{_next_alphas(best)}"
    where = some if decisions.swapped_tokens else "stay on the device"
    kept = next((e for e in found.ranked if e.decisions == swap_each(decisions, 0)), None)
    if decisions.swapped_tokens and not best.below and kept is not None and kept.prediction.status != "ok":
        where += f"; kept on the device they would not fit ({short_by(kept.prediction)})"
    again = f"Norms, products and the MLP are rebuilt{blocks}, each right before its backward"
    chunks = _attention_chunks(found, best, simulation)
    return [f"{text} {where}.", f"{again}{_token_by_token(found, best)}.", *chunks]


def _swapped_share(decisions: Decisions) -> str:
    """Return how much of the rows is swapped, where others stay on the device; an empty text where none does."""
    if decisions.alpha == 1:
        return ""
    return f"stay on the device but for alpha {decisions.alpha:.3g} of their rows, which "


def _token_by_token(found: SearchResult, best: Evaluated) -> str:
    """Return why a token-wise plan of the same layout is not chosen; an empty text where none was evaluated."""
    layout = best.decisions.layout
    other = next((e for e in found.ranked if e.policy == TOKENWISE and e.decisions.layout == layout), None)
    if other is None or other.prediction.status == "ok":
        return ""
    return f"; recompute by token does not fit ({short_by(other.prediction)})"


def _some_layers(best: Evaluated) -> list[str]:
    """Say which layers are recomputed, and what the others keep."""
    kind, _, number = best.decisions.recompute_layers.partition("-")
    if kind == ALL:
        return []
    if kind == "groups":
        text = f"One layer input is kept for {number} layers, which run forward again together before their backward"
        return [f"{text}."]
    every = f"the last of every {number} layers of a stage runs"
    first = "the first layer of each chunk of a stage runs"
    some = first if number == "1" else f"the first {number} layers of each chunk of a stage run"
    which = every if kind == "every" else some
    return [f"Only {which} forward again; the others keep everything."]


def _rounding_buffers(simulation: Simulation) -> list[str]:
    """Say that full recompute is played in the rounding buffers, and how large they are."""
    if not simulation.decisions.rounding_buffers:
        return []
    families = simulation.program.families
    size = sum(f.bytes * f.count for f in families if f.kind is FamilyKind.SKELETAL and f.space == "device")
    text = f"Both rounding buffers exist all step under full recompute too, {format_bytes(size)}, as in MEMO's executor"
    return [f"{text}; with --no-rounding-buffers each layer has buffers of its own, which take less."]


def _swapped_inputs(found: SearchResult, best: Evaluated, simulation: Simulation) -> list[str]:
    """Say how many bytes of layer inputs are swapped, and whether they would fit on the device."""
    if not best.decisions.swapped_tokens:
        return []
    kept = next((e for e in found.ranked if e.decisions == swap_each(best.decisions, 0)), None)
    moved = format_bytes(simulation.pace.moved_by(lambda t: t.kind is TemplateKind.OFFLOAD).d2h)
    less = (
        f"; kept on the device they would not fit ({short_by(kept.prediction)})"
        if kept and kept.prediction.status != "ok"
        else ""
    )
    return [f"Layer inputs are swapped to host memory until backward, {moved} per step{less}."]


def _mlp_chunks(found: SearchResult, best: Evaluated) -> list[str]:
    rows, tokens = best.decisions.mlp_chunk_tokens, best.decisions.local_tokens
    if not rows:
        return []
    rebuilt = REBUILT_MLP[best.decisions.mlp_rebuild]
    text = f"The MLP runs in {-(-tokens // rows)} row blocks of {format_tokens(rows)} tokens; {rebuilt}"
    if best.decisions.early_stop:
        text += ", whatever --early-stop says"
    return [f"{text}{_against(best, _same_but(found, best, mlp_chunk_tokens=0, mlp_rebuild='block'))}."]


def _attention_chunks(found: SearchResult, best: Evaluated, simulation: Simulation) -> list[str]:
    if not in_chunks(best.decisions):
        return []
    down, up = (
        getattr(simulation.pace.moved_by(lambda t: t.kind in LAYER_PASSES and t.block is BlockKind.LAYER), lane)
        for lane in ("d2h", "h2d")
    )
    chunk, count = best.decisions.attention_chunk_tokens, len(attention_chunks(best.decisions))
    text = f"Attention runs in {count} chunks of {format_tokens(chunk)} tokens; their keys and values wait in host"
    text += f" memory: per step, {format_bytes(down)} are copied there and {format_bytes(up)} back"
    return [f"{text}{_against(best, _same_but(found, best, attention_chunk_tokens=0))}."]


def _against(best: Evaluated, whole: Evaluated | None) -> str:
    """Return how the same plan without row blocks or chunks does; an empty text where it was not evaluated."""
    if whole is None:
        return ""
    if whole.prediction.status != "ok":
        return f"; undivided it does not fit ({short_by(whole.prediction)})"
    peak = format_bytes(whole.prediction.peak_device_bytes)
    slower_s = (whole.prediction.step_s or 0.0) - (best.prediction.step_s or 0.0)
    how = "longer" if slower_s >= 0 else "shorter"
    return f"; undivided, the device would need {peak} and the step would be {format_seconds(abs(slower_s))} {how}"


def _same_but(found: SearchResult, best: Evaluated, **changes: int | str) -> Evaluated | None:
    """Return the evaluated plan that differs from the best plan only in ``changes``, and perhaps in kernels."""
    wanted = msgspec.structs.replace(best.decisions, **changes)

    def alike(other: Evaluated) -> bool:
        return msgspec.structs.replace(other.decisions, kernels=wanted.kernels) == wanted

    return next((e for e in found.ranked if alike(e)), None)
