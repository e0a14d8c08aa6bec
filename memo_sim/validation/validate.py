"""Predicts published cases and sets the predictions beside what was measured.

A prediction sees ``Case.question`` alone. Knobs that a row leaves blank are searched under the system's rules, as its
authors tuned them; a row that plans no memory is played as an eager framework would. What this version cannot evaluate
is reported as invalid with the reason, never dropped.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor

import msgspec

from memo_sim.contract.catalog import list_models, load_cluster, load_model
from memo_sim.contract.codec import decode
from memo_sim.contract.errors import BadInput, Infeasible, OutOfTolerance, UsageError
from memo_sim.contract.hardware import Hardware
from memo_sim.contract.model import Model
from memo_sim.contract.plan import Layout, MemoryPolicy, Overlap, Prediction
from memo_sim.contract.progress import Progress
from memo_sim.contract.units import GIB, counted
from memo_sim.contract.validation import CaseError, CasePrediction, CaseReport, Expectation, Validation
from memo_sim.planning.presets import SYSTEMS
from memo_sim.planning.question import Pins, Question
from memo_sim.planning.search import Evaluated, search
from memo_sim.program.attention.plain import PLAIN
from memo_sim.validation.cases import SIZES, Case, CaseQuestion
from memo_sim.validation.intervals import with_intervals
from memo_sim.views.accuracy import QUANTITIES, summarise
from memo_sim.views.plan_table import layout_label

LONGEST_WAITS = 4
"""Of compute, to be told."""


def validate(
    cases: list[Case],
    *,
    progress: Progress | None = None,
    change: Callable[[Hardware], Hardware] | None = None,
    jobs: int = 1,
) -> Validation:
    """Return one report a case, in order.

    ``change`` alters each hardware profile first (what a fit does); ``jobs`` processes share the cases.
    """
    questions = [case.question for case in cases]
    found = []
    for predicted in _predictions(questions, change, jobs):
        found.append(predicted)
        if progress:
            progress(len(found), len(cases))
    return with_intervals(
        Validation(cases=[_report(case, *predicted) for case, predicted in zip(cases, found, strict=True)])
    )


Predicted = tuple[CasePrediction, frozenset[str]]


def _predictions(
    questions: list[CaseQuestion], change: Callable[[Hardware], Hardware] | None, jobs: int
) -> Iterator[Predicted]:
    if jobs == 1 or change is not None:
        yield from (predict(asked, change=change) for asked in questions)
        return
    with ProcessPoolExecutor(jobs) as pool:
        yield from pool.map(predict, questions)


def _report(case: Case, predicted: CasePrediction, fitted: frozenset[str]) -> CaseReport:
    asked = case.question
    sizes = asked.integers
    return CaseReport(
        case=case.case,
        source=case.source,
        system=asked.system,
        predicted=predicted,
        expected=case.expected,
        error=_errors(predicted, case.expected),
        fitted=case.case in fitted,
        model=f"{asked.model} {sizes.get('layers', 0)}x{sizes['hidden']}"
        if {"layers", "hidden"} <= set(sizes)
        else asked.model,
        seq_tokens=asked.seq_tokens,
    )


def predict(asked: CaseQuestion, *, change: Callable[[Hardware], Hardware] | None = None) -> Predicted:
    """Return the prediction for one question, and the cases that the hardware profile's constants were fitted on."""
    reason = _not_built(asked)
    if reason:
        return CasePrediction(status="invalid", reason=reason), frozenset()
    try:
        question = _question(asked, change)
        outcome = search(question).ranked[0]
    except (Infeasible, UsageError, BadInput) as error:
        return CasePrediction(status="invalid", reason=str(error).replace("\n ", ";")), frozenset()
    fitted = frozenset(name for s in question.hardware.sources.values() for name in s.cases)
    prediction = outcome.prediction
    if reason := _overlap_refused(asked, outcome.decisions.layout):
        return CasePrediction(status="invalid", reason=reason), frozenset()
    return (
        CasePrediction(
            status=prediction.status,
            reason=prediction.reason,
            mfu=prediction.mfu,
            tgs=prediction.tgs,
            step_ms=prediction.step_s * 1e3 if prediction.step_s is not None else None,
            allocated_gib=prediction.peak_device_bytes / GIB if prediction.status == "ok" else None,
            reserved_gib=_reserved_gib(prediction),
            allocation_retries=_allocation_retries(outcome),
            alpha=outcome.decisions.alpha,
            layout=outcome.decisions.layout,
            outside_calibration=prediction.outside_calibration,
            lanes={lane: seconds / prediction.step_s for lane, seconds in prediction.lanes.items()}
            if prediction.step_s
            else {},
            waits=_waits(prediction),
        ),
        fitted,
    )


def _waits(prediction: Prediction) -> dict[str, float]:
    """Return what compute waits for longest, as fractions of the step."""
    found: dict[str, float] = {}
    for stall in prediction.stalls:
        if stall.lane == "compute" and prediction.step_s:
            found[stall.waits_for] = found.get(stall.waits_for, 0.0) + stall.seconds / prediction.step_s
    return dict(sorted(found.items(), key=lambda item: -item[1])[:LONGEST_WAITS])


def _reserved_gib(prediction: Prediction) -> float | None:
    """Return what the caching allocator reserves of a plan that fits; None where memory is planned."""
    if prediction.status != "ok" or prediction.reserved_bytes is None:
        return None
    return prediction.reserved_bytes / GIB


def _allocation_retries(outcome: Evaluated) -> float | None:
    """Return how often a micro-batch finds the allocator's memory reorganised; None where memory is planned."""
    if outcome.prediction.status != "ok" or outcome.decisions.memory_policy == "planned":
        return None
    return outcome.prediction.allocation_retries / outcome.decisions.micro_batches


_MEMORY: dict[str, MemoryPolicy | None] = {"no": "eager", "yes": "planned", "": None}
"""Who serves the memory of a row that says whether it plans it; a blank leaves that to the system."""


def _not_built(asked: CaseQuestion) -> str:
    """Return why this version cannot evaluate a row, or nothing."""
    if asked.system not in SYSTEMS:
        return f"system {asked.system} is not built yet (built: {', '.join(SYSTEMS)})"
    sizes = sorted(SIZES & set(asked.integers))
    if sizes and "layers" not in asked.integers:
        return f"{', '.join(sizes)} of a model that {asked.model} names already; layers would give a whole model"
    return ""


def _overlap_refused(asked: CaseQuestion, layout: Layout) -> str:
    """Return why a row's word on overlap cannot be honoured by the layout that was played, or nothing.

    What runs beside compute here: a context-parallel ring and what ZeRO 2 and 3 gather and scatter, always; what
    replicas sum and stages hand over, as the row says. Of what tensor parallelism exchanges in backward a part does,
    unless the row asks for none; what Ulysses exchanges never does.
    """
    word = asked.words.get("overlap")
    if word == "no" and layout.cp > 1:
        return f"the exchange of cp {layout.cp} always overlaps attention here; the row asks for none"
    if word == "no" and layout.zero > 1:
        return f"the collectives of zero {layout.zero} always overlap compute here; the row asks for none"
    if word == "yes" and layout.tp * layout.ulysses > 1 and layout.replicas * layout.pp == 1:
        return f"collectives of {layout_label(layout)} do not overlap compute here"
    return ""


_OVERLAP: dict[str, Overlap | None] = {"no": "none", "yes": "both", "": None}
"""What replicas exchange beside compute; a blank leaves that to the system."""


STANDS_STILL = 1e6
"""How many times as long compute takes beside a collective where the two take turns."""


def _taking_turns(hardware: Hardware) -> Hardware:
    """Return the machine as a row sees it that asks for no overlap: while a collective runs compute stands still."""
    slowdown = dict(hardware.compute_slowdown)
    if "collective" in slowdown:
        slowdown["collective"] = msgspec.structs.replace(slowdown["collective"], value=STANDS_STILL)
    return msgspec.structs.replace(hardware, compute_slowdown=slowdown)


def _question(asked: CaseQuestion, change: Callable[[Hardware], Hardware] | None) -> Question:
    cluster, hardware = load_cluster(asked.cluster)
    hardware = change(hardware) if change else hardware
    given = asked.integers
    sp, overlap = asked.words.get("sp"), asked.words.get("overlap")
    if overlap == "no":
        hardware = _taking_turns(hardware)
    pins = Pins(
        tp=given.get("tp"),
        sequence_parallel=None if sp is None else sp == "yes",
        cp=given.get("cp"),
        ulysses=given.get("ulysses"),
        pp=given.get("pp"),
        schedule=asked.words.get("schedule"),  # type: ignore[arg-type]
        virtual_stages=given.get("virtual_stages"),
        overlap_p2p=None if overlap is None else overlap == "yes",
        dp=given.get("dp"),
        zero=given.get("zero"),
        alpha=asked.alpha,
        recompute=asked.words.get("recompute"),  # type: ignore[arg-type]
        memory_policy=_MEMORY[asked.words.get("memory_plan", "")],
        overlap=_OVERLAP[overlap or ""],
        attention=PLAIN if asked.words.get("attention") == "plain" else None,
        dtype=asked.words.get("precision"),  # type: ignore[arg-type]
    )
    return Question(
        model=_model(asked),
        cluster=cluster,
        hardware=hardware,
        seq_tokens=asked.seq_tokens,
        system=asked.system,
        pins=pins,
        micro_batch=given.get("micro_batch", 1),
        global_batch=given.get("global_batch", 1),
    )


def _model(asked: CaseQuestion) -> Model:
    """Return the preset a row names, or the shape it gives.

    Raises:
        UsageError: when there is no such preset.
        BadInput: when the sizes are not all there, or no model has them.
    """
    sizes = asked.integers
    if "layers" not in sizes:
        return load_model(asked.model)
    missing = [c for c in ("hidden", "heads", "vocab") if c not in sizes]
    if missing or asked.model not in ("gpt", "llama"):
        raise BadInput(
            "a row with layers must give the whole model",
            got=f"model {asked.model}, missing {', '.join(missing) or 'nothing'}",
            wanted=f"model gpt or llama with hidden, heads and vocab, or one of {', '.join(list_models())} alone",
        )
    hidden, heads = sizes["hidden"], sizes["heads"]
    if hidden % heads:
        raise BadInput("heads do not divide the model", got=f"hidden {hidden}", wanted=f"a multiple of heads ({heads})")
    gpt = asked.model == "gpt"
    shape = {
        "schema": Model.__struct_config__.tag,
        "name": asked.model,
        "family": asked.model,
        "layers": sizes["layers"],
        "hidden": hidden,
        "heads": heads,
        "kv_heads": sizes.get("kv_heads", heads),
        "head_dim": hidden // heads,
        "ffn_hidden": sizes.get("ffn", 4 * hidden),
        "vocab": sizes["vocab"],
        "tied_embeddings": gpt,
        "qkv_bias": gpt,
        "linear_bias": gpt,
        "activation": "gelu" if gpt else "silu",
    }
    # Through the decoder: a constructor does not check what a model's file would be refused for.
    return decode(msgspec.json.encode(shape), Model, where="the row's model")


def _errors(predicted: CasePrediction, expected: Expectation) -> CaseError:
    status = None if expected.status is None else expected.status == predicted.status
    relative = {}
    for name in QUANTITIES:
        mine, theirs = getattr(predicted, name), getattr(expected, name)
        if mine is not None and theirs:
            relative[name] = mine / theirs - 1
    return CaseError(status=status, **relative)


def check_evaluated(report: Validation) -> None:
    """Refuse a validation in which nothing was predicted.

    Raises:
        Infeasible: with the first row's reason.
    """
    if all(case.predicted.status == "invalid" for case in report.cases):
        first = report.cases[0]
        raise Infeasible(
            "no row can be evaluated", where=first.case, got=first.predicted.reason, hint="the table has every reason"
        )


def check_error(report: Validation, most: float) -> None:
    """Hold the mean absolute relative error of every quantity, fitted rows apart, against ``most``.

    Raises:
        OutOfTolerance: when one is larger, a status is wrong, or nothing could be compared.
    """
    groups = summarise(report.cases)
    wrong = sum(g.statuses - g.statuses_right for g in groups)
    if wrong:
        raise OutOfTolerance("predicted statuses are wrong", got=counted(wrong, "row"), wanted="none")
    if not any(g.errors or g.statuses for g in groups):
        raise OutOfTolerance("no row could be compared", hint="the reasons are in the table")
    for g in groups:
        for name, error in g.errors.items():
            if error.mean_abs > most:
                got = f"{name}: mean absolute error {error.mean_abs:.4f} over {counted(error.count, 'row')}"
                raise OutOfTolerance("predictions miss", got=got, wanted=f"at most {most}")
