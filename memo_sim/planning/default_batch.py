"""Chooses the sequences of a step for a question that does not name them.

The batch is the smallest that gives every device work: one micro-batch for each replica, and for each pipeline stage of
a replica. Replicas count as far as memory can hold them: the layout with most of them is taken whose states and
activations are not known to be too large (``lower_bounds.py``, nothing is lowered). Plans that run every layer forward
twice, whole or but for attention, do not count where others can fit: replicas that cost a second forward win nothing.
Nor do METP's layouts where others can fit, if both are searched: METP is chosen for length, not for more replicas. The
memory that it saves is paid for by smaller products and messages, and by what backward builds again.

A search of every layout takes the batch of ``any`` where that may have a plan: ZeRO 3, which makes room for more
replicas, and pipeline stages do not count. So both answer the same question, and the step they find can be compared.

    llama3-8b, 8k tokens, eight H100      dp 8 fits                          8 sequences
    gpt-7b, 1m tokens, eight A800         two replicas do not fit            1 sequence
"""

from __future__ import annotations

from dataclasses import replace

import msgspec

from memo_sim.contract.errors import Infeasible, UsageError
from memo_sim.contract.knobs import MOST_SEQUENCES
from memo_sim.contract.plan import Decisions, Layout
from memo_sim.contract.systems import DEFAULT_SYSTEM, NARROWER
from memo_sim.planning.blocks import loss_chunk
from memo_sim.planning.layouts import layouts, searches_metp_beside_others
from memo_sim.planning.lower_bounds import LowerBounds
from memo_sim.planning.presets import Policy
from memo_sim.planning.question import Question
from memo_sim.planning.space import policies, with_alpha
from memo_sim.program.layout.compatibility import check_compatible, goes_together
from memo_sim.program.layout.partition import partition
from memo_sim.program.layout.rowwise_blocks import ROWWISE
from memo_sim.program.layout.shape import shape_of
from memo_sim.program.layout.stage import stages_of


def with_filling_batch(question: Question) -> Question:
    """Return the question with the smallest batch that gives every device work, and why it is that batch.

    A question whose pins contradict each other or the cluster comes back as it is: the search says why.
    """
    try:
        return _filled(question)
    except UsageError:
        return question


def _filled(question: Question) -> Question:
    if question.preset.solver and question.pins.dp is None:
        rule = "not given: one micro-batch, as in SPPO's solver"
        return replace(question, global_batch=question.micro_batch, batch_rule=rule)
    chosen = _largest_of_narrower(question) or _largest(question)
    if chosen is not None:
        return _with(question, chosen, "the largest that may fit")
    least = min(layouts(question), key=lambda layout: _sequences(question, layout))
    return _with(question, least, "the smallest, as none may fit")


def _largest_of_narrower(question: Question) -> Layout | None:
    """Return the layout of ``any`` with most sequences that may fit; None without one, or under another system."""
    if question.system != DEFAULT_SYSTEM:
        return None
    try:
        return _largest(replace(question, system=NARROWER))
    except UsageError:
        return None


def _largest(question: Question) -> Layout | None:
    """Return the layout with most sequences that may fit; None where there is none."""
    found = sorted(layouts(question), key=lambda layout: _sequences(question, layout), reverse=True)
    bounds = LowerBounds(question.hardware, question.cluster)
    tried = policies(question)
    waits = searches_metp_beside_others(question)
    first = [layout for layout in found if layout.metp == 1 or not waits]
    for counted in (first, [layout for layout in found if layout.metp > 1] if waits else []):
        for chosen in (tuple(p for p in tried if p.recompute not in ("full", ROWWISE)), tried):
            for layout in counted:
                if _can_fit(question, bounds, layout, chosen):
                    return layout
    return None


def with_one_sequence(question: Question) -> Question:
    """Return the question with one micro-batch for each pinned replica: the batch with the longest sequences."""
    batch = question.micro_batch * (question.pins.dp or 1)
    return replace(question, global_batch=batch, batch_rule="not given: the fewest, so that sequences can be longest")


def _with(question: Question, layout: Layout, which: str) -> Question:
    sequences = _sequences(question, layout)
    degrees = f"dp {layout.dp}" + (f" x pp {layout.pp}" if sequences > question.micro_batch * layout.dp else "")
    return replace(question, global_batch=sequences, batch_rule=f"not given: enough for {degrees}, {which}")


def _sequences(question: Question, layout: Layout) -> int:
    """Return the sequences of one micro-batch for each replica and stage; subsequences fill stages themselves."""
    stages = layout.pp if layout.subsequences == 1 else 1
    return min(MOST_SEQUENCES, question.micro_batch * layout.dp * stages)


def _can_fit(question: Question, bounds: LowerBounds, layout: Layout, tried: tuple[Policy, ...]) -> bool:
    """Return whether some policy is not known to need more memory than there is on a layout that divides the model."""
    base = replace(question, global_batch=_sequences(question, layout)).decisions(layout)
    try:
        check_compatible(base)
        stages_of(base)
        partition(base)
        base = msgspec.structs.replace(base, loss_chunk_tokens=loss_chunk(question, base, shape_of(base)))
    except Infeasible:
        return False
    return any(_may_hold(bounds, base, policy) for policy in tried)


def _may_hold(bounds: LowerBounds, base: Decisions, policy: Policy) -> bool:
    """Return whether a policy may fit: with an open alpha, the device at full swap, and the host without swap."""
    low = with_alpha(base, policy.recompute, policy.alpha or 0.0)
    high = with_alpha(base, policy.recompute, 1.0) if policy.swaps_some else low
    if not (goes_together(low) and goes_together(high)):
        return False
    device = bounds.memory(high, eager_too=True).device_bytes  # communicators do not count: more replicas have more
    host = bounds.memory(low).host_bytes_per_node
    return device <= bounds.device_room_bytes and host <= bounds.host_room_bytes
