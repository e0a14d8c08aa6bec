"""Compares memo with rivals on the same layers, weights, batches, dtype and update, each in its own process.

``memo, ideal`` runs the same kernels but swaps and recomputes nothing, so it can run only few layers. Its MFU is the
upper limit with which memo's MFU is compared.
"""

from __future__ import annotations

import msgspec

from benchmarks.gpu.agreement import reference_of, with_agreement
from benchmarks.gpu.case import Case, Kind
from benchmarks.gpu.plans import model_of
from benchmarks.gpu.rivals import HUGGING_FACE, RIVALS
from benchmarks.gpu.row import Row
from benchmarks.gpu.session import Session

MEMO = {
    "memo, planned alpha": "planned",
    "memo, full recompute": "full recompute",
    "memo, full swap": "full swap",
}
IDEAL = "memo, ideal"
REFERENCES = ("autograd keep-all", "checkpoint", "checkpoint, input offloaded", "memo, full recompute")
FIRST = (
    "memo, planned alpha",
    "checkpoint, input offloaded, compiled",
    "checkpoint, compiled",
    "checkpoint, input offloaded",
    "autograd keep-all",
)
"""Systems that run first at every length, the strongest rivals before the others; the rest follow as listed."""
STRONGEST = 3
"""How many of ``FIRST`` come before ``IDEAL``: memo's plan and the strongest rivals, with which it is compared."""
SHORT_STEP_S = 2.0


def systems() -> dict[str, Kind]:
    """Return the kind of every system by name, in the order in which they are measured."""
    names: dict[str, Kind] = dict.fromkeys(MEMO, "memo")
    names |= {name: "plain" for name, rival in RIVALS.items() if not rival.compiled}
    names[HUGGING_FACE] = "hugging face"
    names |= {name: "plain" for name, rival in RIVALS.items() if rival.compiled}
    return {name: names[name] for name in (*FIRST, *(n for n in names if n not in FIRST))}


def run(session: Session) -> None:
    """Measure every system at every length within the time budget; record the others as not run."""
    for tokens in session.scale.rival_lengths:
        _length(session, tokens)


def _length(session: Session, tokens: int) -> None:
    preset, scale = session.scale.rival_model, session.scale
    wanted = scale.layers(preset, tokens)
    layers = session.most_layers(preset, tokens, ("planned",), wanted) or wanted
    cases = []
    for name, kind in systems().items():
        case = _case(session, name, kind, layers, tokens)
        if kind == "plain" and RIVALS[name].compiled and scale.quick:
            session.note(case, "not run", "a quick run skips compiled systems, because compiling takes too long")
            continue
        if shorter := _ran_out(session, case):
            session.note(case, "oom", f"not run because memory ran out at {shorter} tokens already")
            continue
        planned = session.planned(case) if kind == "memo" else case
        if planned is not None:
            cases.append(planned)
    ideal = session.most_layers(preset, tokens, ("keep",), layers)
    case = _case(session, IDEAL, "memo", ideal or 1, tokens)
    if planned := session.planned(case):
        cases.insert(STRONGEST, planned)
    # A quick run cannot run out of memory, so it uses one process; starting one takes longer than a tiny step.
    groups = [cases] if scale.quick else [[case] for case in cases]
    rows = [row for group in groups for row in session.measure(group)]
    _compare(session, rows, cases[0])


def _case(session: Session, name: str, kind: Kind, layers: int, tokens: int) -> Case:
    case = session.case(
        model_of(session.scale.rival_model, layers),
        tokens,
        rival=name,
        kind=kind,
        part="rivals",
        policy="keep" if name == IDEAL else MEMO.get(name, ""),
        steps=session.scale.rival_steps,
    )
    warm_ups = 2 if session.scale.step_s(case) <= SHORT_STEP_S else 1
    return msgspec.structs.replace(case, warm_ups=warm_ups)


def _ran_out(session: Session, case: Case) -> int | None:
    """Return a shorter length at which the rival ran out of memory with at most as many layers, or None."""
    if case.kind == "memo" or case.model is None:
        return None
    found = (
        row.sequence
        for row in session.results.of("rivals")
        if (row.rival, row.status) == (case.rival, "oom")
        and row.sequence < case.seq_tokens
        and row.layers <= case.model.layers
    )
    return next(found, None)


def _compare(session: Session, rows: list[Row], case: Case) -> None:
    """Compare the losses of every row with the reference, and print the rows that differ."""
    reference = reference_of(rows, REFERENCES)
    for row in rows:
        compared = with_agreement(row, reference, case.dtype)
        session.results.replace(row, compared)
        if compared.agrees is False:
            session.tell(f"{row.rival} at {row.sequence}: {compared.message}")
