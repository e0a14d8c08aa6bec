"""What packed documents change: the pairs that are attended, MFU's two conventions, and what uneven ranks cost."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

import msgspec
import numpy as np

from memo_sim.contract.documents import Documents, attended_share
from memo_sim.contract.knobs import DocumentCuts
from memo_sim.contract.plan import Decisions
from memo_sim.contract.units import format_percent, format_seconds
from memo_sim.costs.pricing import Pricer
from memo_sim.engine.simulate import Simulation
from memo_sim.planning.question import Question
from memo_sim.program.ir.instruction import Instruction
from memo_sim.program.ir.work import Attention
from memo_sim.program.layout.documents import (
    Pace,
    Segments,
    gathered_segments,
    own_segments,
    pace_of,
    shared,
    step_segments,
)

UNEVEN = 0.005
"""Excess of the fullest rank or replica over the mean from which it is named."""


def packed_from(documents: Documents, seq_tokens: int) -> str:
    """Return how long documents are, and how many make up a sequence."""
    given = str(documents)
    shape = "exponential, cut at max" if given.startswith("mean=") else f"up to {documents.lengths[-1][0]:,} tokens"
    share = format_percent(attended_share(documents, seq_tokens))
    return (
        f"{given} ({shape}; mean {documents.mean:,.0f} tokens), packed in order, the last one cut at the sequence's"
        f" end; {share} of a causal mask's pairs are attended, and MFU counts no others"
    )


def documents(question: Question, simulation: Simulation) -> list[str]:
    """Say what packed documents save in attention, and what it costs that ranks and replicas have unequal shares."""
    decisions, given = simulation.decisions, simulation.decisions.documents
    if given is None:
        return []
    pace = pace_of(decisions)
    pricer = Pricer(question.hardware, question.cluster, decisions.layout, rowwise=decisions.kernels.rowwise)
    taken, whole = (
        _attention_s(simulation, pricer, others) for others in ({}, dict.fromkeys(_segments(decisions), ()))
    )
    share = format_percent(attended_share(given, decisions.seq_tokens))
    where = " in layers without a window" if decisions.model.windowed else ""
    text = (
        f"Documents: a sequence has {pace.pieces:,.1f} of them; they attend {share} of the pairs of one document"
        f"{where}. Attention takes {format_seconds(taken)} of a rank's step; of sequences of one document it would take"
        f" {format_seconds(whole)}.{_other_mfu(simulation)}"
    )
    other: DocumentCuts = "documents" if decisions.document_cuts == "sequence" else "sequence"
    cut = _segments(msgspec.structs.replace(decisions, document_cuts=other))
    others_s = _attention_s(simulation, pricer, _replaced(_segments(decisions), cut))
    return [
        text,
        *_uneven(decisions, pace, taken, f"with --document-cuts {other} it would take {format_seconds(others_s)}"),
    ]


def _uneven(decisions: Decisions, pace: Pace, taken: float, other: str) -> list[str]:
    """Say what it costs that ranks of a ring, and replicas, have unequal shares of the pairs."""
    layout, lines = decisions.layout, []
    if layout.ring > 1:
        lost = format_seconds(taken * (1 - 1 / pace.ranks))
        if decisions.document_cuts == "documents":
            text = (
                f"Every document is cut into {2 * layout.ring} chunks, so all cp ranks attend equally much, in shorter"
            )
            text += f" pieces; {format_percent(pace.filled)} of the rows fill documents up to whole chunks. Attention"
            text += f" takes {format_seconds(taken)}; {other}."
        else:
            text = f"Cuts of whole sequences give the fullest of {layout.ring} cp ranks {pace.ranks:.2f} times the mean"
            text += f" pairs, and the others wait for it: {lost} of attention's {format_seconds(taken)}; {other}."
        used = format_percent(pace.crossing)
        text += f" All keys and values travel; documents need those of {used} of the other ranks."
        lines.append(text)
    if pace.replicas > 1 + UNEVEN:
        lost = format_seconds(taken * (1 - 1 / pace.replicas))
        lines.append(
            f"The slowest of {layout.dp} replicas has {pace.replicas:.2f} times the mean pairs of a step: {lost} of it."
            " A larger --global-batch evens replicas out."
        )
    return lines


def _other_mfu(simulation: Simulation) -> str:
    """Return the MFU that counts the pairs of a whole sequence, as frameworks that ignore documents report it."""
    mfu, decisions = simulation.prediction.mfu, simulation.decisions
    if mfu is None:
        return ""
    of_one = msgspec.structs.replace(decisions, documents=None, document_cuts="sequence")
    whole = format_percent(mfu * of_one.step_flops / decisions.step_flops)
    return f" Counted as if each sequence were one document, MFU would read {whole}."


def _segments(decisions: Decisions) -> list[Segments]:
    """Return the segments of every call of attention: own rows, gathered ones, and the steps of a ring."""
    steps = [step_segments(decisions, step) for step in range(1, decisions.layout.ring)]
    return [own_segments(decisions), gathered_segments(decisions), *steps]


def _replaced(calls: Sequence[Segments], others: Sequence[Segments]) -> dict[Segments, Segments]:
    """Return the segments to price in place of each call's; calls with equal ones share those of all their others."""
    found: dict[Segments, list[Segments]] = {}
    for call, other in zip(calls, others, strict=True):
        found.setdefault(call, []).append(other)
    return {call: tuple(each for other in of for each in shared(other, len(of))) for call, of in found.items()}


def _attention_s(simulation: Simulation, pricer: Pricer, others: Mapping[Segments, Segments]) -> float:
    """Return the seconds of attention's calls in a step of the stage that has most, with ``others`` for segments."""

    def seconds(instruction: Instruction) -> float:
        work = instruction.work
        if not isinstance(work, Attention):
            return 0.0
        return pricer.seconds(replace(work, segments=others.get(work.segments, work.segments)))

    return max(float(np.sum(stage.per_instruction(seconds) * stage.weights)) for stage in simulation.stages)
