"""Explains a what-if answer in sentences: what limits the step, what fills memory, why the runner-up is slower.

Each private function returns the sentences about one topic; it returns none where there is nothing to say.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import msgspec

from memo_sim.contract.cluster import DEFAULT_EFFICIENCY
from memo_sim.contract.hardware import BOARD, DISTURBED, POWER, SAFETY
from memo_sim.contract.knobs import FrameworkLibrary, MlpRebuild
from memo_sim.contract.plan import Decisions, Prediction
from memo_sim.contract.units import counted, format_bytes, format_percent, format_seconds, format_tokens
from memo_sim.engine.simulate import ALLOCATOR, Simulation
from memo_sim.memory.huggingface import absent_states
from memo_sim.planning.arena import Arena
from memo_sim.planning.outcome import Evaluated, SearchResult
from memo_sim.planning.presets import KEEP, PARTIAL_SWAP, TOKENWISE, Policy
from memo_sim.planning.question import Question
from memo_sim.planning.search import play
from memo_sim.planning.subsequences import swap_each
from memo_sim.program.arena.library_workspaces import RESULTS
from memo_sim.program.ir.instruction import Lane
from memo_sim.program.ir.kinds import BlockKind, FamilyKind, TemplateKind
from memo_sim.program.ir.work import Rowwise
from memo_sim.program.layout.attention_chunks import attention_chunks, in_chunks
from memo_sim.program.layout.rank_order import ENDS, degree
from memo_sim.program.layout.recomputed_layers import ALL
from memo_sim.program.operators.framework_kernels import library_of
from memo_sim.reasons.adapters import adapters
from memo_sim.reasons.attention import attention
from memo_sim.reasons.documents import documents
from memo_sim.reasons.experts import experts
from memo_sim.reasons.fp8 import fp8
from memo_sim.reasons.latent import latent_attention
from memo_sim.reasons.metp import metp
from memo_sim.reasons.policy import policy
from memo_sim.reasons.runner_up import Closeness, allocator_decides, closer_than_the_interval, label, runner_up, ties
from memo_sim.reasons.subsequences import balance, heuristic, subsequences
from memo_sim.reasons.windows import windows
from memo_sim.views.plan_table import layout_label, short_of

EXACT = 1e-6
LAYER_PASSES = (TemplateKind.FORWARD, TemplateKind.BACKWARD, TemplateKind.BACKWARD_RESIDENT)
LIBRARIES: dict[FrameworkLibrary, str] = {
    "eager": "eager torch kernels (a kernel for each operator and cast)",
    "compiled": "kernels of torch.compile",
    "fused": "fused kernels of Megatron-LM and Transformer Engine",
    "jit": "kernels of Megatron-LM before Transformer Engine (TorchScript, apex)",
    "flash-attn": "kernels of flash-attention's training code",
    "internevo": "kernels of InternEvo (apex's norms, flash-attn's rotary, torch's operators)",
}
"""What the kernels of each library are called."""
RUN_AGAIN = {
    "selective": "attention runs forward again; with a flash kernel this saves only its log-sum-exp",
    "norms": "norms run forward again",
    "mlp": "the MLP runs forward again",
    "operators": "every second product, norms and activations run forward again",
}
"""What modes repeat that keep some tensors of all tokens."""
CHECKPOINTED_LOSS = " (checkpointed-fp32 before TRL 1.13)"
"""What to name where TRL is older."""
REBUILT_MLP: dict[MlpRebuild, str] = {
    "block": "each block is recomputed right before its backward, without its second matrix product",
    "layer": "the layer's recompute repeats all blocks and keeps them for backward (--mlp-rebuild layer)",
    "twice": "the layer's recompute repeats all blocks, and each one is repeated again right before its backward"
    " (--mlp-rebuild twice)",
}
"""What full recompute repeats of an MLP in row blocks."""
MODULES = " Autograd keeps what Hugging Face's modules save of a layer (--modules huggingface)."
"""What an eager framework holds with them."""
CPU_OFFLOAD = (
    " Parameters and gradients are in host memory with the optimizer states, as accelerate's CPUOffloadPolicy has them;"
    " the time of their copies is not predicted."
)
"""What accelerate moves besides, with states host."""
FSDP = {"fsdp1": " as torch's FSDP1 has it (--sharding fsdp1)", "fsdp2": " as torch's FSDP2 has it (--sharding fsdp2)"}
"""Whose ZeRO it is, if it is not memo-exec's."""
FREED = {"recorded": "when the device has passed their work", "events": "when a tensor dies"}
"""When that is, by ``Decisions.streams``; auto leaves it to the libraries."""
STAGE = "stage"
SLACK = 0.01
"""Compute is the bottleneck when it is idle for less than this fraction of the step."""

SMALLEST_SHARE = 0.0005
"""Recompute below this fraction of compute time is not reported."""


def explain(
    question: Question,
    found: SearchResult,
    simulation: Simulation | None,
    arena: Arena | None = None,
    *,
    close: Closeness | None = None,
    ways: Sequence[str] = (),
) -> list[str]:
    """Return the reasons, most important first. When no plan fits, return what is missing and what would help.

    ``close`` are the plans that cannot be told from the best, ``ways`` the ways out where nothing fits.
    """
    if simulation is None:
        return _nothing_fits(question, found, ways)
    alike = _of_one_micro_batch(found)
    lines = [*_rounded(question, simulation), _binding(simulation), *attention(question, simulation.decisions)]
    lines += _own_loss(question, simulation.decisions)
    lines += [*_recompute(alike, simulation), _peak(simulation)]
    lines += [*_rowwise(simulation), *adapters(simulation)]
    lines += _arena(simulation, arena) if arena else []
    lines += [*_allocator(simulation), *_limited(alike)]
    lines += [
        *_pipeline(simulation),
        *subsequences(alike, simulation),
        *metp(question, alike, simulation),
        *balance(question, alike),
        *heuristic(question, alike),
        *_sharding(question, simulation),
        *_overlap(question, simulation),
        *_ulysses(simulation),
        *_tp_chunks(simulation),
        *experts(question, simulation),
        *latent_attention(simulation),
        *policy(simulation),
        *fp8(question, simulation),
        *documents(question, simulation),
        *windows(simulation),
        *_alpha(alike),
        *_partial_swap(alike),
        *_full_recompute(alike, simulation),
        *_fallback(question, alike),
        *runner_up(found),
        *allocator_decides(found, lambda decisions: play(question, decisions).prediction),
        *ties(found),
        *closer_than_the_interval(close),
    ]
    if outside := extrapolations(simulation):
        lines.append(f"Outside the calibrated range: {outside}. Treat the figures as extrapolations.")
    lines += _profile(question)
    if found.refused:
        skipped = f"{counted(len(found.refused), 'layout')} cannot be played with this model, sequence and batch"
        lines.append(f"{skipped}; the first is {found.refused[0]}.")
    return lines


def _of_one_micro_batch(found: SearchResult) -> SearchResult:
    """Return the plans with the best plan's micro-batch: others say nothing about its alpha or policy."""
    best = found.best
    if best is None:
        return found
    return replace(found, ranked=[e for e in found.ranked if e.decisions.micro_batch == best.decisions.micro_batch])


def extrapolations(simulation: Simulation) -> str:
    """Return the curves that are read beyond their sizes, with their shares of the step; empty where there are none."""
    return ", ".join(
        f"{name} ({format_percent(share, 0)} of the step)" for name, share in simulation.outside_shares.items()
    )


def _rounded(question: Question, simulation: Simulation) -> list[str]:
    """Say that a pinned alpha was rounded to whole blocks of tokens."""
    asked, alpha = question.pins.alpha, simulation.decisions.alpha
    if asked is None or abs(alpha - asked) < EXACT:
        return []
    granule = simulation.decisions.swap_granule
    each = ", the same number in every subsequence" if simulation.decisions.layout.subsequences > 1 else ""
    return [f"Alpha {asked:.3g} is rounded to {alpha:.3g}: tokens are swapped in blocks of {granule}{each}."]


def _rowwise(simulation: Simulation) -> list[str]:
    """Say that row-wise operators run as a framework's kernels, and what they take."""
    library = library_of(simulation.decisions.kernels.rowwise)
    if library is None:
        return []
    stage = simulation.pace
    rowwise = stage.per_instruction(lambda i: isinstance(i.work, Rowwise) and i.lane is Lane.COMPUTE) * stage.weights
    share = float((rowwise * stage.seconds).sum()) / stage.compute_s
    text = f"Row-wise operators run as {LIBRARIES[library]} and take {format_percent(share)} of compute time"
    return [f"{text}; memo-exec cannot play such a plan (--rowwise torch or triton)."]


def _profile(question: Question) -> list[str]:
    """Say which board and power limit the profile was changed to, and whether other work ran during measurement."""
    hardware = question.hardware
    lines = [
        "The cluster names no efficiency of its network by size (size_efficiency), so that of clusters given by name is"
        f" used. {source.text}."
        for source in [question.cluster.sources.get(DEFAULT_EFFICIENCY)]
        if source and question.cluster.nodes > 1
    ]
    lines += [f"The board is {text}." for text in [hardware.provenance.get(BOARD)] if text]
    lines += [f"The power limit is {text}." for text in [hardware.provenance.get(POWER)] if text]
    if disturbed := hardware.provenance.get(DISTURBED):
        lines.append(f"The profile {hardware.name} was measured on a busy machine ({disturbed}). Calibrate again.")
    return lines


def _nothing_fits(question: Question, found: SearchResult, ways: Sequence[str]) -> list[str]:
    nearest = found.ranked[0]
    if nearest.prediction.status == "invalid":
        return [f"No plan can be evaluated. The first is {label(nearest)}: {nearest.prediction.reason}."]
    need = format_bytes(nearest.prediction.shortfall_bytes)
    return [
        f"No plan fits. The nearest is {label(nearest)}, short by {need}: {nearest.prediction.reason}.",
        *attention(question, nearest.decisions),
        f"What would help: {'; '.join(ways)}.",
    ]


def _binding(simulation: Simulation) -> str:
    prediction = simulation.prediction
    step_s = prediction.step_s or 0.0
    compute_s = prediction.lanes.get("compute", 0.0)
    idle_s = step_s - compute_s
    head = (
        f"Compute is busy {format_percent(compute_s / step_s)} of the step" if step_s else "No instruction was played"
    )
    if idle_s < SLACK * step_s:
        return f"{head} and is the bottleneck; it hides copies and communication."
    waits = [(s.seconds, s.waits_for) for s in prediction.stalls if s.lane == "compute"]
    listed = ", ".join(f"{name} {format_seconds(seconds)}" for seconds, name in sorted(waits, reverse=True)[:3])
    return f"{head}; it waits {format_seconds(idle_s)} in total, mostly for {listed}."


def _recompute(found: SearchResult, simulation: Simulation) -> list[str]:
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
        return f"swapping instead does not fit on this layout ({_short(same.prediction)})" if same else ""
    if best.policy.alpha is not None:
        return ""
    if best.above is not None:
        return f"{short_of(best.above.status)} limits alpha; the next higher alpha does not fit ({_short(best.above)})"
    return "with a higher alpha, compute would wait longer for copies than it recomputes now"


def _short(refused: Prediction) -> str:
    return f"short by {format_bytes(refused.shortfall_bytes)} of {short_of(refused.status)}"


def _peak(simulation: Simulation) -> str:
    prediction = simulation.prediction
    by_class = sorted(prediction.peak_by_class.items(), key=lambda item: -item[1])
    listed = ", ".join(f"{name} {format_bytes(size)}" for name, size in by_class)
    memory = simulation.most_live.memory
    beside = memory.reserve.get(RESULTS, 0)
    parts = [f"{format_bytes(beside)} for {RESULTS}"] if beside else []
    if margin := memory.reserve.get(SAFETY, 0):
        parts.append(f"{format_bytes(margin)} to keep free, --safety-gib")
    libraries = f" (including {' and '.join(parts)})" if parts else ""
    room = (
        f"plus {format_bytes(memory.reserve_bytes)} reserve{libraries}, of {format_bytes(memory.device_capacity_bytes)}"
    )
    peak = f"{format_bytes(prediction.peak_device_bytes)} alive ({listed})"
    return f"Device memory peaks at {simulation.peak_id}: {peak}, {room}."


def _arena(simulation: Simulation, arena: Arena) -> list[str]:
    """Say how large the planned arena is, and how far it is above the lower bound."""
    placement = arena.placement
    largest, gap = arena.prediction.peak_device_bytes, placement.arena_bytes - placement.lower_bound_bytes
    elsewhere = arena.whole and largest > placement.arena_bytes
    size = placement.arena_bytes if elsewhere else largest
    proof = "exactly the lower bound" if not gap else f"{format_bytes(gap)} above the lower bound"
    text = (
        f"Planned arena: {format_bytes(size)} for {counted(len(placement.ids), 'buffer')}, {proof} ({placement.solver})"
    )
    if len(simulation.stages) > 1:
        text += f"; this is the arena of {_stage_number(placement.name)}, whose placement the plan holds"
    if elsewhere:
        text += f"; the executor places the other stages by first fit, in up to {format_bytes(largest)}"
    if not arena.whole:
        text += f"; planned for {simulation.program.micro_batches} micro-batches: a placement of all would be too large"
    return [f"{text}."]


def _stage_number(name: str) -> str:
    """Return the name of a program as people count stages: ``stage 1`` for ``stage0``."""
    number = name.removeprefix(STAGE)
    return f"stage {int(number) + 1}" if number.isdigit() else name


def _pipeline(simulation: Simulation) -> list[str]:
    """Say what pipeline stages send to each other, how unequal they are, and whether the step time is exact."""
    layout, count = simulation.decisions.layout, simulation.decisions.micro_batches
    if layout.pp == 1:
        return []
    compute_s = [stage.compute_s for stage in simulation.stages]
    sent = format_bytes(max(stage.sent_bytes for stage in simulation.stages))
    text = (
        f"{layout.pp} pipeline stages run {counted(count, 'micro-batch', 'es')} with the {layout.schedule} schedule; a "
        f"rank sends at most {sent} per step to other stages, and the slowest stage computes "
        f"{format_percent(max(compute_s) / min(compute_s) - 1)} longer than the fastest"
    )
    if not simulation.steady:
        played = simulation.program.micro_batches
        text += f". {played} micro-batches reach no steady state: the step time assumes the slowest stage's pace"
    return [f"{text}."]


def _sharding(question: Question, simulation: Simulation) -> list[str]:
    """Say how many bytes ZeRO 2 and 3 gather and reduce, and how long compute waits for that."""
    layout, moved = simulation.decisions.layout, simulation.collective_bytes
    if layout.zero < 2:
        asked = FSDP.get(question.pins.sharding or "")
        return [f"ZeRO 2 and 3 are not used here, so nothing is{asked}."] if asked else []
    if degree(ENDS, layout) == 1:
        return [f"ZeRO {layout.zero} has no effect here: no two ranks hold the same parameters."]
    held = "gradients" if layout.zero == 2 else "gradients and parameters"
    if layout.replicas == 1:
        held += " of embedding and head, which METP replicates"
    if simulation.decisions.zero_params == "cast":
        held += ", the latter in fp32, cast for every gather (--zero-params cast)"
    names = {
        "params.all_gather": "gathers {}",
        "grads.reduce_scatter": "reduce-scatters {}",
        "shards.all_reduce": "all-reduces {} between groups",
    }
    over = f" over groups of {layout.shards} ranks" if "shards.all_reduce" in moved else ""
    *others, last = [text.format(format_bytes(moved[op])) for op, text in names.items() if op in moved]
    does = f"{', '.join(others)} and {last}" if others else last
    waited = sum(s.seconds for s in simulation.prediction.stalls if s.lane == "compute" and s.waits_for in names)
    whose = FSDP.get(simulation.decisions.sharding, "")
    text = f"ZeRO {layout.zero}{over}{whose}: a rank holds a shard of {held}; per step it {does}"
    return [f"{text}; compute waits {format_seconds(waited)} for these collectives."]


def _overlap(question: Question, simulation: Simulation) -> list[str]:
    """Say that the pinned overlap has nothing to overlap in this layout."""
    asked, has = question.pins.overlap, simulation.decisions.overlap
    if asked in (None, has):
        return []
    return [
        f"Overlap {asked} is replaced by {has}: no two ranks hold the same parameters, so there is nothing to overlap."
    ]


def _ulysses(simulation: Simulation) -> list[str]:
    """Say how many bytes Ulysses exchanges, and how long compute waits for that."""
    degree, moved = simulation.decisions.layout.ulysses, simulation.collective_bytes.get("all_to_all", 0)
    if degree == 1:
        return []
    waited = sum(s.seconds for s in simulation.prediction.stalls if (s.lane, s.waits_for) == ("compute", "all_to_all"))
    text = f"Ulysses {degree}: a rank exchanges {format_bytes(moved)} per step between sequence-sharded and"
    return [f"{text} head-sharded tensors; compute waits {format_seconds(waited)} for these all-to-alls."]


def _tp_chunks(simulation: Simulation) -> list[str]:
    """Say what tensor parallelism in chunks exchanges beside which products."""
    layout = simulation.decisions.layout
    if layout.tp_overlap == "none":
        return []
    waited = sum(s.seconds for s in simulation.prediction.stalls if (s.lane, s.waits_for) == ("compute", "send_recv"))
    text = f"Exchanges of tp are cut into {layout.tp} chunks, which ranks send to each other beside products"
    also = " and for those of cp" if layout.cp > 1 and layout.cp_exchange == "ring" else ""
    return [f"{text} (--tp-overlap chunked); compute waits {format_seconds(waited)} for them{also}."]


def _own_loss(question: Question, decisions: Decisions) -> list[str]:
    """Say which form of the loss a system assumes, where the question leaves it open."""
    if question.loss != "auto" or decisions.loss == "auto":
        return []
    tokens = decisions.loss_chunk_tokens
    chunks = f", in chunks of {format_tokens(tokens)} tokens" if tokens else ""
    what = CHECKPOINTED_LOSS if decisions.loss == "checkpointed" else ""
    return [f"The loss is {decisions.loss}{chunks}: {question.system}'s own; --loss names another{what}."]


def _allocator(simulation: Simulation) -> list[str]:
    """Say how much the caching allocator reserves for a plan without planned memory, and what its calls cost."""
    prediction = simulation.prediction
    if prediction.reserved_bytes is None:
        return []
    who = "an eager framework" if simulation.decisions.memory_policy == "eager" else "the caching allocator"
    above = prediction.reserved_bytes / prediction.peak_device_bytes - 1
    often = prediction.allocation_retries / simulation.decisions.micro_batches
    reserved = format_bytes(prediction.reserved_bytes)
    text = f"Memory is not planned: {who} reserves {reserved}, {format_percent(above)} above the peak"
    retries = f"{often:.3g} {_retries(often)} per micro-batch" if often else "no allocation retries"
    stalled = sum(s.seconds for s in prediction.stalls if s.waits_for == ALLOCATOR)
    share = (
        f"; compute waits for its calls for {format_percent(stalled / prediction.step_s)} of the step"
        if prediction.step_s
        else ""
    )
    freed = FREED.get(simulation.decisions.streams)
    waits = f" Memory that other streams use comes back {freed} (--streams {simulation.decisions.streams})."
    own = MODULES if simulation.decisions.modules == "huggingface" else ""
    offloaded = CPU_OFFLOAD if absent_states(simulation.decisions) else ""
    return [f"{text}; {retries}{share if stalled else ''}.{waits if freed else ''}{own}{offloaded}"]


def _limited(found: SearchResult) -> list[str]:
    """Say what limiting PyTorch's allocator gains, and how a user does it."""
    best = found.best
    if best is None or best.unlimited is None:
        return []
    limit = best.decisions.allocator_limit_gib
    text = f"PyTorch's allocator is limited to {limit} GiB of the device (torch.cuda.set_per_process_memory_fraction)"
    if best.unlimited.step_s is None:
        return [f"{text}: with all of it, fragmentation is worse and the plan does not fit ({_short(best.unlimited)})."]
    slower_s = best.unlimited.step_s - (best.prediction.step_s or 0.0)
    retries, fewer = best.unlimited.allocation_retries, best.prediction.allocation_retries
    often = f"there are {retries} {_retries(retries)} instead of {fewer}"
    more = "each one releases more" if retries == fewer else often
    why = f"each retry releases the whole cache; without the limit {more}"
    return [f"{text}: {why}, and the step is {format_seconds(slower_s)} longer."]


def _retries(number: float) -> str:
    return "allocation retry" if number == 1 else "allocation retries"


def _alpha(found: SearchResult) -> list[str]:
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
    refused = f"; the next higher alpha does not fit ({_short(best.above)})" if best.above else ""
    whose = "" if best is found.best else " of the best token-wise plan, which is not the best plan,"
    return [f"Alpha{whose} on {where}: {chosen} ({bound}; {rates}; {full}){refused}."]


def _partial_swap(found: SearchResult) -> list[str]:
    """Say why a plan that swaps some tokens and keeps the others has this alpha."""
    best = found.best
    if best is None or best.policy != PARTIAL_SWAP:
        return []
    text = f"Alpha is {best.decisions.alpha:.3g}: so much is swapped, the rest is kept, and nothing is recomputed"
    less = f"; the next lower alpha does not fit ({_short(best.below)})" if best.below else ""
    more = f"; the next higher alpha does not fit ({_short(best.above)})" if best.above else ""
    return [f"{text}{less}{more}."]


def _full_recompute(found: SearchResult, simulation: Simulation) -> list[str]:
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
        f"; kept on the device they would not fit ({_short(kept.prediction)})"
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
        return f"; undivided it does not fit ({_short(whole.prediction)})"
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


def _fallback(question: Question, found: SearchResult) -> list[str]:
    """Say that the system used its fallback for short sequences."""
    best = found.best
    system = question.preset
    if best and best.policy == KEEP and KEEP in system.short_sequences:
        return [f"{system.name} falls back to keeping all activations: they fit, and no plan is faster."]
    return []


def plan_title(decisions: Decisions, prediction_step_s: float | None, cluster: str = "") -> str:
    """Return the one-line heading of a picture, with the cluster that the plan is for."""
    names = {"none": "keep", "full": "full recompute", "tokenwise": "token-wise"}
    policy = names.get(decisions.recompute) or Policy.of(decisions).label
    if decisions.recompute == "full":
        policy = Policy.of(decisions).label
    elif decisions.swapped_tokens:
        swap = "full swap" if decisions.swapped_tokens == decisions.local_tokens else "partial swap"
        policy = f"{swap if decisions.recompute == 'none' else policy} alpha {decisions.alpha:.3g}"
    step = f", step {format_seconds(prediction_step_s)}" if prediction_step_s is not None else ""
    tokens = f"{format_tokens(decisions.seq_tokens)} tokens{f' on {cluster}' if cluster else ''}"
    return f"{decisions.model.name}, {tokens}, {layout_label(decisions.layout)}, {policy}{step}"
