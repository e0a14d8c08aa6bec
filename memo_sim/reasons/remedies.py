"""Changes one decision of a plan at a time: which options would make a plan fit, and what each of them costs.

Each change is a question with every knob pinned as in the plan, except one. So its answer is what ``what-if`` finds
with the option beside the others.

- ``ways_out``: the options that ``what-if`` names when nothing fits. It tries only knobs that the search did not, and
  it stops at the first plan of each that fits.
- ``evaluated``: a change with its best plan, for ``oom`` and ``explain``, which need the price of every change.
- ``both``: two changes together, where a single one is not enough.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from itertools import combinations
from math import floor
from typing import Any, get_args

import msgspec

from memo_sim.contract.errors import Infeasible, UsageError
from memo_sim.contract.hardware import SAFETY
from memo_sim.contract.knobs import KNOBS, MOST_ZERO, CpExchange, Overlap, Recompute, Schedule, States, TpOverlap
from memo_sim.contract.plan import Decisions, Layout
from memo_sim.contract.units import GIB, format_tokens
from memo_sim.planning import blocks
from memo_sim.planning.alpha_search import Grid
from memo_sim.planning.contradictions import repinned
from memo_sim.planning.layouts import WITHIN_A_STAGE
from memo_sim.planning.outcome import Evaluated
from memo_sim.planning.plan_question import OF_THE_POLICY, pinned_to, with_open_policy
from memo_sim.planning.question import Question
from memo_sim.planning.refusals import tokens_that_divide
from memo_sim.planning.search import search
from memo_sim.program.layout.recomputed_layers import ALL
from memo_sim.program.layout.shape import shape_of

LEFT_TO_THE_SEARCH = ("alpha", "recompute", *WITHIN_A_STAGE, "zero")
"""Knobs that are better left out than pinned to something else, when nothing fits."""
DIVIDED = ("tp", "cp", "ulysses", "metp", "pp", "dp")
SMALLER_STATES: dict[States, tuple[States, ...]] = {"fp32": ("bf16", "host"), "bf16": ("host",)}
"""States that need less device memory, and in which the master weights stay fp32."""
OF_A_FRAMEWORK = (
    *("allocator_limit_gib", "sharding", "reduce_dtype", "cuda_graphs", "rounding_buffers"),
    *("zero_params", "grad_sums", "loss_metrics", "streams", "modules"),
)
"""Knobs that belong to memory that is not planned."""
SWAPPING = ("none", "tokenwise")
"""What is recomputed where any share of the tokens may be swapped."""
ANY_STEP_S = float("inf")
PAIR = 2
MOST_IN_PAIRS = 6
"""Single changes that pairs are made of: 15 pairs at most, each of which costs as much as a single change."""


@dataclass(frozen=True, slots=True)
class Change:
    """One decision changed: the knob, the options to type (``{alpha}`` stands for what is found), and the question."""

    knob: str
    options: str
    question: Question

    def typed(self, found: Decisions) -> str:
        """Return the options to type for the plan that was found."""
        return self.options.format(alpha=f"{found.alpha:.6g}")

    @property
    def topic(self) -> str:
        """What it is about: two changes of one topic replace each other."""
        if self.knob in DIVIDED:
            return "layout"
        return "policy" if self.knob in OF_THE_POLICY else self.knob


Tried = tuple[Change, Evaluated]
"""A change, and the best plan with it."""


def ways_out(question: Question, nearest: Evaluated) -> list[str]:
    """Return the options that would help the plan nearest to fitting, given the memory that is short and the pins."""
    pins = question.pins
    pinned = [KNOBS[name].option for name in LEFT_TO_THE_SEARCH if getattr(pins, name) is not None]
    ways = [f"leave {', '.join(pinned)} to the search"] if pinned else []
    ways += _dividing_length(question)
    if nearest.prediction.status == "host_oom":
        return [*ways, "more host memory per node", "more nodes"]
    ways.append("more devices (memo-sim gpus finds how many)")
    margin = question.hardware.reserve_bytes.get(SAFETY)
    if margin is not None and nearest.prediction.shortfall_bytes <= margin.value:
        ways.append(
            f"--safety-gib {floor(10 * (margin.value - nearest.prediction.shortfall_bytes) / GIB) / 10:g} or less"
        )
    ways += _memory_savers(question, nearest)
    capacity = question.hardware.device_memory_bytes.value
    # Otherwise parameters and optimizer states alone do not fit.
    if nearest.prediction.peak_by_class.get("state", 0) < capacity:
        ways.append("a shorter sequence (memo-sim longest finds how long)")
    return ways


def changes(question: Question, decisions: Decisions, *, near: bool = False) -> list[Change]:
    """Return every plan that differs from ``decisions``, an outcome of ``question``, in one decision.

    A layout differs in two degrees, by the same factor; ``near``: by a factor of 2. Some changes are refused when they
    are evaluated, because they do not go with the other decisions.
    """
    fixed = pinned_to(question, decisions)
    if question.pins.alpha is None:
        fixed = _with_alpha_open(fixed)
    return [
        *_recomputes(fixed, decisions),
        *_alphas(fixed, decisions),
        *_layouts(question, fixed, decisions, twice=near),
        *_zeros(fixed, decisions),
        *_not_searched(question, decisions),
        *_chunks(fixed, decisions),
        *_others(fixed, decisions),
    ]


def _dividing_length(question: Question) -> list[str]:
    """Return the next shorter length that every layout divides, where this one is no such length."""
    tokens, whole = question.seq_tokens, tokens_that_divide(question)
    if tokens % whole == 0 or tokens < whole:
        return []
    return [f"--seq-len {tokens // whole * whole}, which more layouts divide"]


def evaluated(change: Change, before: Decisions, *, enough_s: float | None = None) -> Evaluated | None:
    """Return the best plan of a change (with ``enough_s`` the first that is so fast); None where there is none.

    None as well when the plan is ``before``, or when the knobs contradict each other.
    """
    try:
        found = search(change.question, enough_s=enough_s).ranked
    except (Infeasible, UsageError):
        return None
    if not found or found[0].decisions == before or found[0].prediction.status == "invalid":
        return None
    return found[0]


def pairs(question: Question, tried: Iterable[Tried]) -> Iterator[Change]:
    """Yield every two of the first ``MOST_IN_PAIRS`` topics of ``tried``, changed together.

    ``tried`` has the most promising changes first.
    """
    chosen: dict[str, Tried] = {}
    for each in tried:
        chosen.setdefault(each[0].topic, each)
    for one, other in combinations(list(chosen.values())[:MOST_IN_PAIRS], 2):
        yield from both(question, one, other)


def both(question: Question, one: Tried, other: Tried) -> list[Change]:
    """Return two changes of the plan that ``question`` was asked about as one; empty where the second is gone."""
    # A change of policy leaves the rest of it to the search, so it comes last: another layout has another alpha.
    (first, plan), (second, _) = sorted((one, other), key=lambda each: each[0].topic == "policy")
    if first.topic == second.topic:
        return []
    typed = first.typed(plan.decisions)
    return [
        Change(f"{first.knob}, {second.knob}", f"{typed} {change.options}", change.question)
        for change in changes(question, plan.decisions)
        if (change.knob, change.options) == (second.knob, second.options)
    ][:1]


def _memory_savers(question: Question, nearest: Evaluated) -> list[str]:
    """Return the options that no search tries and that make a plan fit; where no single one does, pairs of them."""
    untried = [*_not_searched(question, nearest.decisions), *_fewer_subsequences(question, nearest.decisions)]
    plans = [(change, evaluated(change, nearest.decisions, enough_s=ANY_STEP_S)) for change in untried]
    tried = [(change, found) for change, found in plans if found is not None]
    ways = [change.typed(found.decisions) for change, found in tried if found.prediction.step_s is not None]
    if ways or len(tried) < PAIR:
        return ways
    fitting = list[str]()
    for change in pairs(question, sorted(tried, key=lambda each: each[1].rank_key)):
        found = evaluated(change, nearest.decisions, enough_s=ANY_STEP_S)
        if found is not None and found.prediction.step_s is not None:
            fitting.append(change.typed(found.decisions))
    return fitting


def _not_searched(question: Question, decisions: Decisions) -> list[Change]:
    """Return the changes of knobs that need less device memory and that no search tries."""
    fixed, found = pinned_to(question, decisions), list[Change]()
    for states in SMALLER_STATES.get(decisions.states, ()):
        found.append(Change("states", f"--states {states}", replace(fixed, states=states)))
    if decisions.recompute_layers != ALL:
        every = repinned(fixed, recompute_layers=ALL)
        found.append(Change("recompute_layers", "--recompute-layers all", every))
    elif decisions.recompute == "full" and not decisions.swapped_tokens:
        found.append(Change("offload_inputs", "--offload-inputs", repinned(fixed, alpha=None, offload_inputs=True)))
    if decisions.model.latent is not None and not decisions.rebuild_qkv and decisions.recompute != "full":
        found.append(Change("rebuild_qkv", "--rebuild-qkv", repinned(fixed, rebuild_qkv=True)))
    if decisions.rounding_buffers:
        found.append(Change("rounding_buffers", "--no-rounding-buffers", repinned(fixed, rounding_buffers=False)))
    if decisions.loss != "fused":
        found.append(Change("loss", "--loss fused", replace(fixed, loss="fused")))
    layout = decisions.layout
    if layout.replicas > 1 and layout.zero < MOST_ZERO:
        found.append(Change("zero", f"--zero {MOST_ZERO}", repinned(fixed, zero=MOST_ZERO)))
    if layout.zero_ranks:
        found.append(
            Change("zero_ranks", f"--zero-ranks {layout.replicas}", repinned(fixed, zero_ranks=layout.replicas))
        )
    if decisions.memory_policy != "planned":
        unset: dict[str, Any] = {name: KNOBS[name].default for name in OF_A_FRAMEWORK}
        chosen = {name: unset.pop(name) for name in OF_A_FRAMEWORK if not hasattr(fixed.pins, name)}
        planned = repinned(replace(fixed, **chosen), **unset, memory_policy="planned")
        found.append(Change("memory_policy", "--memory-policy planned", planned))
    return found


def _fewer_subsequences(question: Question, decisions: Decisions) -> Iterator[Change]:
    """Yield half as many subsequences as are pinned, and a sequence that is not divided.

    Sums of the gradients of keys and values, and row blocks of the whole sequence, may need more device memory than
    the shorter tensors of a subsequence save.
    """
    parts = decisions.layout.subsequences
    if question.pins.subsequences is None or parts == 1:
        return
    own = {name: getattr(question.pins, name) for name in OF_THE_POLICY}
    fixed = repinned(replace(pinned_to(question, decisions), modules=question.modules), **own)
    for fewer in dict.fromkeys((parts // 2, 1)):
        yield Change("subsequences", f"--subsequences {fewer}", repinned(fixed, subsequences=fewer))


def _with_alpha_open(fixed: Question) -> Question:
    """Return a pinned question that searches alpha, where its recompute leaves tokens to be swapped."""
    swaps = fixed.pins.recompute in SWAPPING and fixed.pins.alpha is not None
    return repinned(fixed, alpha=None) if swaps else fixed


def _recomputes(fixed: Question, decisions: Decisions) -> Iterator[Change]:
    """Yield everything else to recompute; what is swapped, and in which chunks layers run, is then searched."""
    free = with_open_policy(fixed)
    for mode in get_args(Recompute):
        if mode != decisions.recompute:
            yield Change("recompute", f"--recompute {mode}", repinned(free, recompute=mode))


def _alphas(fixed: Question, decisions: Decisions) -> Iterator[Change]:
    """Yield the fastest alpha and its neighbours on the grid of the search, where alpha is pinned."""
    if fixed.pins.alpha is None or decisions.recompute not in SWAPPING:
        return
    yield Change("alpha", "--alpha {alpha}", repinned(fixed, alpha=None))
    grid = Grid.of(decisions)
    step = grid.step_of(decisions)
    for other in (step + 1, step - 1):
        if 0 <= other <= grid.steps:
            yield Change("alpha", "--alpha {alpha}", repinned(fixed, alpha=other / grid.steps))


def _layouts(question: Question, fixed: Question, decisions: Decisions, *, twice: bool) -> Iterator[Change]:
    """Yield every layout that has one degree doubled (or quadrupled, ...) and another one divided likewise.

    ``twice``: only doubled. A cp exchange that the plan had no use for is the system's own again.
    """
    layout = decisions.layout
    for up in DIVIDED:
        for down in DIVIDED:
            factor, divisible = 2, getattr(layout, down)
            while up != down and divisible % factor == 0 and (factor == 2 or not twice):
                degrees = {up: factor * getattr(layout, up), down: divisible // factor}
                options = " ".join(f"--{name} {degree}" for name, degree in degrees.items())
                yield Change(up, options, _with_degrees(question, fixed, layout, degrees))
                factor *= 2


def _with_degrees(question: Question, fixed: Question, layout: Layout, degrees: dict[str, int]) -> Question:
    """Return the pinned question with other degrees, and without the pins that only the old degrees had."""
    changed = msgspec.structs.replace(layout, **degrees)
    alone = 1 in (layout.replicas, changed.replicas)
    pins: dict[str, Any] = {**degrees, "zero_ranks": None, "zero": None if alone else layout.zero}
    if layout.cp == 1:
        pins["cp_exchange"] = question.pins.cp_exchange
    if "tp" in degrees:
        pins["sequence_parallel"] = None
    if "pp" in degrees:
        pins |= {"pp_layers": None, "schedule": None, "virtual_stages": None, "overlap_p2p": None}
    return repinned(fixed, **pins)


def _zeros(fixed: Question, decisions: Decisions) -> Iterator[Change]:
    """Yield the other levels of ZeRO below the highest."""
    layout = decisions.layout
    for level in range(MOST_ZERO):
        if layout.replicas > 1 and level != layout.zero:
            yield Change("zero", f"--zero {level}", repinned(fixed, zero=level, zero_ranks=None))


def _chunks(fixed: Question, decisions: Decisions) -> Iterator[Change]:
    """Yield loss, MLP and attention in chunks where they are whole, and whole where they are in chunks."""
    shape = shape_of(decisions)
    loss = 0 if decisions.loss_chunk_tokens else blocks.default_loss_chunk(decisions, shape)
    if decisions.loss_chunk_tokens or loss:
        yield Change("loss_chunk_tokens", _tokens("--loss-chunk", loss), repinned(fixed, loss_chunk_tokens=loss))
    if decisions.recompute != "full":
        return
    free = with_open_policy(fixed)
    rows = 0 if decisions.mlp_chunk_tokens else blocks.mlp_chunk(free, decisions)
    if decisions.mlp_chunk_tokens or rows:
        changed = repinned(fixed, mlp_chunk_tokens=rows, mlp_rebuild=None, early_stop=None)
        yield Change("mlp_chunk_tokens", _tokens("--mlp-chunk", rows), changed)
    chunk = 0 if decisions.attention_chunk_tokens else blocks.attention_chunk(free, decisions)
    if decisions.attention_chunk_tokens or chunk:
        changed = repinned(fixed, attention_chunk_tokens=chunk)
        yield Change("attention_chunk_tokens", _tokens("--attention-chunk", chunk), changed)
    if decisions.offload_inputs:
        changed = repinned(fixed, alpha=None, offload_inputs=False)
        yield Change("offload_inputs", "--no-offload-inputs", changed)


def _others(fixed: Question, decisions: Decisions) -> Iterator[Change]:
    """Yield the micro-batch and subsequences doubled and halved, the other overlaps, and the other schedules."""
    size, parts = decisions.micro_batch, decisions.layout.subsequences
    for other in (2 * size, size // 2):
        if other and decisions.global_batch % (other * decisions.layout.dp) == 0:
            yield Change("micro_batch", f"--micro-batch {other}", replace(fixed, micro_batch=other))
    for other in (2 * parts, parts // 2):
        if parts > 1 and other:
            changed = repinned(fixed, subsequences=other)
            yield Change("subsequences", f"--subsequences {other}", changed)
    layout = decisions.layout
    for overlap in get_args(Overlap):
        if layout.replicas > 1 and overlap != decisions.overlap:
            yield Change("overlap", f"--overlap {overlap}", repinned(fixed, overlap=overlap))
    exchange: CpExchange = "all_gather" if layout.cp_exchange == "ring" else "ring"
    if layout.cp > 1:
        option = f"--cp-exchange {exchange}"
        yield Change("cp_exchange", option, repinned(fixed, cp_exchange=exchange))
    if layout.tp > 1:
        chunks: TpOverlap = "none" if layout.tp_overlap != "none" else "chunked"
        yield Change("tp_overlap", f"--tp-overlap {chunks}", repinned(fixed, tp_overlap=chunks))
    for schedule in get_args(Schedule):
        if layout.pp > 1 and schedule != layout.schedule:
            chunked = schedule == "interleaved"
            virtual, typed = (PAIR, f" --virtual-stages {PAIR}") if chunked else (None, "")
            changed = repinned(fixed, schedule=schedule, virtual_stages=virtual, overlap_p2p=None)
            yield Change("schedule", f"--schedule {schedule}{typed}", changed)


def _tokens(option: str, tokens: int) -> str:
    return f"{option} {format_tokens(tokens) if tokens else 0}"
