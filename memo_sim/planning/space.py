"""The candidates of a question: layouts that divide the devices and the model, times the system's policies.

Alpha is not enumerated here; ``alpha_search.py`` searches it for the candidates whose policy leaves it open.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import msgspec

from memo_sim.contract.errors import Infeasible, UsageError
from memo_sim.contract.knobs import Overlap
from memo_sim.contract.plan import Decisions, Kernels, Layout
from memo_sim.planning import blocks
from memo_sim.planning.attention_kernels import attention_kernel, head_groups
from memo_sim.planning.contradictions import check_pins, check_rounding_buffers
from memo_sim.planning.layouts import in_words, layouts
from memo_sim.planning.loss_choice import LossChoice
from memo_sim.planning.presets import (
    EVERY_ROWWISE,
    FULL_RECOMPUTE,
    KEEP,
    LAGGING,
    MODULES_RECOMPUTE,
    OPERATOR_RECOMPUTE,
    SELECTIVE_RECOMPUTE,
    TOKENWISE,
    Policy,
)
from memo_sim.planning.question import Question
from memo_sim.planning.refusals import OF_THE_SEQUENCE, refusal
from memo_sim.planning.rowwise_kernels import RowwiseChoice
from memo_sim.planning.subsequences import PartPrices, hide, part_prices, swap_each, swap_fraction
from memo_sim.program.layout.compatibility import check_compatible
from memo_sim.program.layout.partition import partition
from memo_sim.program.layout.rank_order import ENDS, degree
from memo_sim.program.layout.recomputed_layers import ALL
from memo_sim.program.layout.rowwise_blocks import ROWWISE
from memo_sim.program.layout.rules.metp import NORMS_KEPT_UNDER_FULL_RECOMPUTE
from memo_sim.program.layout.rules.modules import MODULES_ARE_RECOMPUTED
from memo_sim.program.layout.shape import shape_of
from memo_sim.program.layout.stage import stages_of


@dataclass(frozen=True, slots=True)
class Candidate:
    """One layout with one policy; ``base`` swaps nothing yet when the policy leaves alpha open.

    With an offload window, ``base`` swaps one row block of every subsequence, because a window needs swapped tokens.
    """

    base: Decisions
    policy: Policy
    narrow: Decisions | None = None
    """The same plan in the first window that is tried; set when this candidate's window lets copies lag longer."""


def policies(question: Question) -> tuple[Policy, ...]:
    """Return the policies to try: the system's, narrowed by a pinned alpha or recompute, which turn fallbacks off.

    With offloaded inputs, or recompute of some layers, only full recompute is left; with pinned MLP blocks or attention
    chunks, full and row-wise recompute.

    Raises:
        UsageError: when pins contradict each other or the system.
    """
    check_pins(question)
    found = _by_inputs(_by_recompute(question), question.pins.offload_inputs)
    found = blocks.pinned(_by_layers(found, question.pins.recompute_layers), question)
    check_rounding_buffers(question, {policy.recompute for policy in found})
    return found


def _by_inputs(found: tuple[Policy, ...], offloaded: bool | None) -> tuple[Policy, ...]:
    """Return the policies whose full recompute offloads its inputs or not, as pinned.

    A system without full recompute offloads the inputs of full recompute too.
    """
    if offloaded is None:
        return found
    if offloaded:
        found = tuple(p for p in found if p.recompute == "full") or (FULL_RECOMPUTE,)
    changed = (replace(p, alpha=float(offloaded)) if p.recompute == "full" else p for p in found)
    return tuple(dict.fromkeys(changed))


def _by_layers(found: tuple[Policy, ...], layers: str | None) -> tuple[Policy, ...]:
    """Return the only policy that goes with pinned layers, under every system; with all layers, those found."""
    if layers is None or layers == ALL:
        return found
    return (replace(FULL_RECOMPUTE, layers=layers),)


def _by_recompute(question: Question) -> tuple[Policy, ...]:
    system, pins = question.preset, question.pins
    if pins.recompute is None and pins.alpha is None:
        return system.short_sequences + system.policies
    if pins.alpha is not None and all(p.alpha is not None for p in system.policies):
        raise UsageError(
            f"{system.name} decides alpha itself", got=f"alpha {pins.alpha}", hint="leave --alpha or --system out"
        )
    # A pin replaces an alpha that the system leaves open, so it applies to the recompute mode of that policy.
    mode: str = pins.recompute or next((p.recompute for p in system.policies if p.alpha is None), TOKENWISE.recompute)
    if pins.alpha is not None:
        cut = [replace(p, alpha=pins.alpha) for p in system.policies if p.recompute == mode == "full"]
        return tuple(dict.fromkeys((Policy(mode, pins.alpha, mlp_blocks=mode == ROWWISE), *cut)))
    own = tuple(p for p in system.short_sequences + system.policies if p.recompute == mode)
    known = (KEEP, FULL_RECOMPUTE, SELECTIVE_RECOMPUTE, *MODULES_RECOMPUTE, OPERATOR_RECOMPUTE, TOKENWISE)
    return own or tuple(p for p in (*known, *EVERY_ROWWISE) if p.recompute == mode)


def last_resorts(question: Question) -> tuple[Policy, ...]:
    """Return the policies to try where the others do not fit: none where the question pins what they decide.

    The finest blocks and chunks go with a pinned recompute, and with blocks or chunks of which one is pinned.
    """
    pins = question.pins
    if {pins.recompute_layers, pins.alpha, pins.offload_inputs} != {None}:
        return ()
    cut = (pins.mlp_chunk_tokens, pins.attention_chunk_tokens)
    if {pins.recompute, *cut} == {None}:
        return question.preset.last_resorts
    found = tuple(p for p in question.preset.last_resorts if p.finest and pins.recompute in (None, p.recompute))
    return blocks.pinned(found, question) if found and None in cut and 0 not in cut else ()


class Space:
    """The layouts of a question, and the candidates of each layout, which are made when they are asked for."""

    def __init__(self, question: Question, tried: tuple[Policy, ...] | None = None) -> None:
        """``tried``: the policies, unless given those of the question.

        Raises:
            UsageError: when pinned knobs contradict each other or the cluster.
        """
        self.question = question
        self.policies = policies(question) if tried is None else tried
        self.layouts = layouts(question)
        self._kernel = attention_kernel(question)
        self._kernels = Kernels(attention=self._kernel, rowwise=question.rowwise or "torch", adamw=question.adamw)
        self._rowwise = RowwiseChoice(question.hardware)
        self._loss = LossChoice(question)
        self._prices = part_prices(question.hardware, question.cluster)
        self._refused: list[tuple[Infeasible, str]] = []
        self._unswapped: list[tuple[Infeasible, str]] = []
        """Plans that are incompatible with a pinned window; they are the reason when no others are left."""
        self._checked: dict[Layout, Decisions | Infeasible] = {}
        """Plans of layouts without a policy, or why there is none; asked for by ``keeping`` and by ``of``."""
        self._keeping: dict[Layout, tuple[Decisions, bool]] = {}

    def keeping(self, layout: Layout) -> tuple[Decisions, bool]:
        """Return the plan of a layout that keeps everything, and whether others may cut attention into chunks.

        Whether the layout goes with everything else is not checked.

        Raises:
            Infeasible: when it does not divide the model or the sequence.
        """
        if layout not in self._keeping:
            complete = self._complete(layout)
            groups = head_groups(shape_of(complete), complete, self._kernel)
            keep = msgspec.structs.replace(
                complete, kernels=msgspec.structs.replace(complete.kernels, head_groups=groups)
            )
            keep = self._rowwise.faster(keep) if self.question.rowwise is None else keep
            finest = {policy.finest for policy in self.policies if policy.attention_chunks}
            chunks = (blocks.attention_chunk(self.question, complete, finest=each) for each in finest)
            self._keeping[layout] = keep, any(chunks)
        return self._keeping[layout]

    def _complete(self, layout: Layout) -> Decisions:
        """Return a layout's plan without a policy, with the form and the chunks of its loss.

        Raises:
            Infeasible: when the layout cannot be lowered.
        """
        if layout not in self._checked:
            try:
                self._checked[layout] = self._check(layout)
            except Infeasible as error:
                self._checked[layout] = error.with_traceback(None)
        found = self._checked[layout]
        if isinstance(found, Infeasible):
            raise found.with_traceback(None)
        return found

    def _check(self, layout: Layout) -> Decisions:
        base = _base(self.question, layout)
        check_compatible(base)
        stages_of(base)
        base = self._loss.faster(msgspec.structs.replace(base, kernels=self._kernels))
        shape = shape_of(base)
        partition(base)
        return msgspec.structs.replace(base, loss_chunk_tokens=blocks.loss_chunk(self.question, base, shape))

    def of(self, layout: Layout) -> list[Candidate]:
        """Return the candidates of a layout: none where it cannot be lowered, which ``refused`` then explains."""
        try:
            complete = self._complete(layout)
        except Infeasible as error:
            self._refuse(error, layout)
            return []
        found: list[Candidate] = []
        for policy in self.policies:
            try:
                found += self._of_policy(complete, policy, found)
            except Infeasible as error:
                self._refuse(error, layout)
        return found

    def _of_policy(self, complete: Decisions, policy: Policy, before: list[Candidate]) -> list[Candidate]:
        """Return the candidates of a policy; ``before``: those of the layout's other policies so far.

        Raises:
            Infeasible: when the policy does not go with the layout.
        """
        question = self.question
        rebuilt = msgspec.structs.replace(complete, recompute=policy.recompute)
        if NORMS_KEPT_UNDER_FULL_RECOMPUTE.breaks(rebuilt) and question.pins.recompute is None:
            return []
        cut = blocks.cut(question, _with_policy(question, complete, policy), policy, self.policies)
        if cut is None:
            return []
        cut = self._rowwise.faster(cut) if question.rowwise is None else cut
        offered, without = _offloaded(question, cut, policy, self._prices)
        self._unswapped += [(error, f"{in_words(complete.layout)}: {error.what}") for error in without]
        # When everything hides, the policy that hides already gives the full swap, in any window.
        if cut.alpha == 1 and any(other.policy.hides and _same(other.base, cut) for other in before):
            return []
        return [
            Candidate(one, _policy_of(policy, one), offered[0] if not policy.hides and one != offered[0] else None)
            for one in offered
        ]

    def _refuse(self, error: Infeasible, layout: Layout) -> None:
        self._refused.append((error, f"{in_words(layout)}: {error.what}"))

    def refused(self, *, none_found: bool = False) -> list[str]:
        """Return the reasons why layouts cannot be lowered, of those whose candidates were asked for.

        Raises:
            Infeasible: when there are no candidates (``none_found``).
        """
        refused = [*self._refused, *(self._unswapped if none_found else ())]
        # Reasons about the sequence come first, because other degrees may solve everything else.
        refused.sort(key=lambda reason: reason[0].where not in OF_THE_SEQUENCE)
        if none_found:
            raise refusal(self.question, refused)
        return list(dict.fromkeys(text for _, text in refused))  # layouts that differ only in ZeRO read the same


def candidates(question: Question, tried: tuple[Policy, ...] | None = None) -> tuple[list[Candidate], list[str]]:
    """Return the candidates that can be lowered, and the reasons why other layouts cannot.

    ``tried``: the policies, unless given those of the question.

    Raises:
        Infeasible: when no layout divides the model and the sequence.
        UsageError: when pinned knobs contradict each other or the cluster.
    """
    space = Space(question, tried)
    found = [candidate for layout in space.layouts for candidate in space.of(layout)]
    return found, space.refused(none_found=not found)


def _base(question: Question, layout: Layout) -> Decisions:
    norms, overlap = question.pins.keep_norms and layout.metp > 1, _overlap(question, layout)
    given = question.decisions(layout)
    if question.model.mixture is not None and question.modules_of("full") == "huggingface":
        # Of an eager framework's experts, memo knows those of these modules under full recompute alone.
        return msgspec.structs.replace(given, overlap=overlap, modules="huggingface", recompute="full")
    # A base keeps everything, and whose modules do that is the policy's to say.
    rebuilt = question.pins.rebuild_qkv
    return msgspec.structs.replace(given, keep_norms=norms, rebuild_qkv=rebuilt, overlap=overlap, modules="auto")


def _with_policy(question: Question, decisions: Decisions, policy: Policy) -> Decisions:
    """Return the plan with the policy's alpha, and with the ways of full recompute that are pinned or the system's.

    Raises:
        Infeasible: when Hugging Face's modules do not go with the policy or the layout.
    """
    found = msgspec.structs.replace(
        with_alpha(decisions, policy.recompute, policy.alpha or 0.0),
        recompute_layers=policy.layers,
        modules=question.modules_of(policy.recompute),
        early_stop=question.early_stop(policy.recompute, policy.layers),
        rounding_buffers=question.rounding_buffers(policy.recompute, policy.layers),
    )
    if found.modules == "huggingface":
        if MODULES_ARE_RECOMPUTED.breaks(found):
            raise MODULES_ARE_RECOMPUTED.refusal(found)
        check_compatible(found)
    return found


def _offloaded(
    question: Question, decisions: Decisions, policy: Policy, prices: PartPrices
) -> tuple[list[Decisions], list[Infeasible]]:
    """Return the ways to swap for a policy: as much as hides (SPPO 5.2), or the policy's amount in every window to try.

    The second list has the reasons why a pinned window is incompatible with some of them.

    Raises:
        Infeasible: as ``subsequences.hide``.
    """
    pinned, own = question.pins.offload_window, question.preset.offload_windows
    swapped = [decisions]
    if policy.hides:
        swapped, own = list(hide(question, decisions, prices)), own[:1]
    elif question.pins.subsequences == "auto" and policy.recompute == "none":
        own = tuple(dict.fromkeys((*own, 1, LAGGING)))
    made = list[Decisions]()
    for one in swapped:
        parts = one.layout.subsequences
        # When alpha is open, one row block of every subsequence stands for what it will swap.
        least = swap_each(one, one.swap_granule) if policy.swaps_some and parts > 1 else one
        swaps = parts > 1 and (least.swapped_tokens > 0 or least.recompute == "tokenwise")
        windows = [window for window in own if window < parts] if swaps else [0]
        made += [
            msgspec.structs.replace(least if window else one, offload_window=window)
            for window in (windows if pinned is None else [pinned])
        ]
    return (made, []) if pinned is None else _with_pinned_window(made)


def _with_pinned_window(offered: list[Decisions]) -> tuple[list[Decisions], list[Infeasible]]:
    """Return the plans that a pinned window fits, and the reasons for the others: they swap nothing, or are not cut."""
    found, refused = list[Decisions](), list[Infeasible]()
    for one in offered:
        try:
            shape_of(one)
        except Infeasible as error:
            refused.append(error)
        else:
            found.append(one)
    return found, refused


def _same(first: Decisions, second: Decisions) -> bool:
    """Return whether two plans differ at most in their windows."""
    return first == msgspec.structs.replace(second, offload_window=first.offload_window)


def _policy_of(policy: Policy, decisions: Decisions) -> Policy:
    """Return the policy of a plan: with the alpha that hides, and without cuts that leave one block or chunk."""
    return replace(
        policy,
        alpha=decisions.alpha if policy.hides else policy.alpha,
        mlp_blocks=decisions.mlp_chunk_tokens > 0,
        attention_chunks=decisions.attention_chunk_tokens > 0,
    )


def _overlap(question: Question, layout: Layout) -> Overlap:
    """Return which communication of ZeRO overlaps with compute: none when no block of parameters has replicas."""
    return question.overlap if degree(ENDS, layout) > 1 else "none"


def with_alpha(base: Decisions, recompute: str, alpha: float) -> Decisions:
    """Return ``base`` with the fraction ``alpha`` swapped, rounded down to whole row blocks."""
    if base.layout.subsequences > 1:
        return swap_fraction(msgspec.structs.replace(base, recompute=recompute), alpha)
    tokens = base.local_tokens
    granule = base.swap_granule
    swapped = tokens if alpha >= 1 else int(alpha * tokens + 1e-6) // granule * granule
    return msgspec.structs.replace(base, recompute=recompute, swapped_tokens=swapped)
