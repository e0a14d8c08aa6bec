"""Predicts published cases and compares the predictions with the measurements.

A prediction sees only ``Case.question``, and whether the row ran. A row that ran and does not fit here keeps its status
(``gpu_oom``), and is priced all the same, with enough memory for the plan that came closest. Knobs that a row leaves
blank are searched under the system's rules, because its authors tuned them too. A row without planned memory is
simulated with an eager framework's allocations. A row that this version cannot evaluate is reported as invalid with the
reason, never dropped.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import msgspec

from memo_sim.contract.boards import with_power
from memo_sim.contract.catalog import list_models, load_cluster, load_model
from memo_sim.contract.codec import decode
from memo_sim.contract.errors import BadInput, Infeasible, OutOfTolerance, UsageError
from memo_sim.contract.hardware import Hardware
from memo_sim.contract.knobs import MemoryPolicy, Overlap
from memo_sim.contract.model import Model
from memo_sim.contract.peaks import warnings_about
from memo_sim.contract.plan import Layout, Prediction
from memo_sim.contract.progress import Progress
from memo_sim.contract.units import GIB, counted
from memo_sim.contract.validation import CaseError, CasePrediction, CaseReport, Expectation, Validation
from memo_sim.engine.fast_loop import run_fast
from memo_sim.engine.simulate import simulate
from memo_sim.planning.presets import SYSTEMS
from memo_sim.planning.processes import ended_by_errors, process_executor, without_main
from memo_sim.planning.question import Pins, Question, with_memory
from memo_sim.planning.search import Evaluated, search
from memo_sim.validation.cases import SIZES, Case, CaseQuestion
from memo_sim.validation.intervals import setting_of, shipped_errors, with_intervals
from memo_sim.views.accuracy import QUANTITIES, summarise
from memo_sim.views.plan_table import layout_label

LONGEST_WAITS = 4
"""How many of compute's longest waits a report lists."""


def validate(
    cases: list[Case],
    *,
    progress: Progress | None = None,
    change: Callable[[Hardware], Hardware] | None = None,
    jobs: int = 1,
) -> Validation:
    """Return one report per case, in order.

    ``change`` alters each hardware profile first (a fit uses it); ``jobs`` processes share the cases.
    """
    found = []
    for predicted in _predictions(cases, change, jobs):
        found.append(predicted)
        if progress:
            progress(len(found), len(cases))
    return with_intervals(
        Validation(cases=[_report(case, *predicted) for case, predicted in zip(cases, found, strict=True)]),
        shipped_errors(),
    )


Predicted = tuple[CasePrediction, frozenset[str]]


def _predictions(cases: list[Case], change: Callable[[Hardware], Hardware] | None, jobs: int) -> Iterator[Predicted]:
    questions = [case.question for case in cases]
    ran = [case.expected.status == "ok" for case in cases]
    if jobs == 1 or change is not None:
        yield from (predict(asked, ran=ok, change=change) for asked, ok in zip(questions, ran, strict=True))
        return
    with process_executor(jobs, __name__) as pool, ended_by_errors():
        with without_main():
            found = [pool.submit(predict, asked, ran=ok) for asked, ok in zip(questions, ran, strict=True)]
        yield from (each.result() for each in found)


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
        question=asked.subject,
    )


ENOUGH = 64
"""Times the device's memory with which a row is priced that ran and does not fit here."""


def predict(
    asked: CaseQuestion, *, ran: bool = False, change: Callable[[Hardware], Hardware] | None = None
) -> Predicted:
    """Return the prediction for one question, and the cases on which the hardware profile's constants were fitted.

    ``ran``: whether to price a plan that does not fit into device memory.
    """
    reason = _not_built(asked)
    if reason:
        return CasePrediction(status="invalid", reason=reason), frozenset()
    try:
        question = question_of(asked, change)
        outcome = search(question).ranked[0]
    except (Infeasible, UsageError, BadInput) as error:
        return CasePrediction(status="invalid", reason=str(error).replace("\n ", ";")), frozenset()
    fitted = frozenset(name for s in question.hardware.sources.values() for name in s.cases)
    prediction = outcome.prediction
    if reason := _overlap_refused(asked, outcome.decisions.layout):
        return CasePrediction(status="invalid", reason=reason), frozenset()
    status, reason = prediction.status, prediction.reason
    beyond = ran and status == "gpu_oom"
    if beyond:
        prediction = _with_enough_memory(question, outcome)
    return (
        CasePrediction(
            status=status,
            reason=reason,
            beyond_memory=beyond,
            mfu=prediction.mfu,
            tgs=prediction.tgs,
            step_ms=prediction.step_s * 1e3 if prediction.step_s is not None else None,
            allocated_gib=prediction.peak_device_bytes / GIB if status == "ok" else None,
            reserved_gib=_reserved_gib(outcome.prediction),
            allocation_retries=_allocation_retries(outcome),
            alpha=outcome.decisions.alpha,
            layout=outcome.decisions.layout,
            outside_calibration=prediction.outside_calibration,
            lanes={lane: seconds / prediction.step_s for lane, seconds in prediction.lanes.items()}
            if prediction.step_s
            else {},
            waits=_waits(prediction),
            warnings=warnings_about(question.hardware, {"model's FLOPs": prediction.mfu or 0.0}),
            setting=setting_of(asked.system, outcome.decisions, question.hardware, prediction),
        ),
        fitted,
    )


def _with_enough_memory(question: Question, outcome: Evaluated) -> Prediction:
    """Return the prediction of a refused plan on devices that have enough memory for it."""
    device_bytes = int(ENOUGH * question.hardware.device_memory_bytes.value)
    cluster, hardware = with_memory(question.cluster, question.hardware, device_bytes=device_bytes, host_bytes=None)
    return simulate(outcome.decisions, hardware, cluster, loop=run_fast).prediction


def _waits(prediction: Prediction) -> dict[str, float]:
    """Return compute's longest waits, as fractions of the step."""
    found: dict[str, float] = {}
    for stall in prediction.stalls:
        if stall.lane == "compute" and prediction.step_s:
            found[stall.waits_for] = found.get(stall.waits_for, 0.0) + stall.seconds / prediction.step_s
    return dict(sorted(found.items(), key=lambda item: -item[1])[:LONGEST_WAITS])


def _reserved_gib(prediction: Prediction) -> float | None:
    """Return the GiB that the caching allocator reserves for a plan that fits; None where memory is planned."""
    if prediction.status != "ok" or prediction.reserved_bytes is None:
        return None
    return prediction.reserved_bytes / GIB


def _allocation_retries(outcome: Evaluated) -> float | None:
    """Return the allocation retries per micro-batch; None where memory is planned."""
    if outcome.prediction.status != "ok" or outcome.decisions.memory_policy == "planned":
        return None
    return outcome.prediction.allocation_retries / outcome.decisions.micro_batches


_MEMORY: dict[str, MemoryPolicy | None] = {"no": "eager", "yes": "planned", "": None}
"""Memory policy by the row's word in ``memory_plan``; a blank leaves the choice to the system."""


def _not_built(asked: CaseQuestion) -> str:
    """Return why this version cannot evaluate a row; an empty text if it can."""
    if asked.system not in SYSTEMS:
        return f"system {asked.system} is not known (known: {', '.join(SYSTEMS)})"
    sizes = sorted(SIZES & set(asked.integers))
    if sizes and "layers" not in asked.integers:
        return f"{', '.join(sizes)} given for the preset {asked.model}; a row that gives layers describes a whole model"
    return ""


def _overlap_refused(asked: CaseQuestion, layout: Layout) -> str:
    """Return why the simulated layout cannot follow the row's word on overlap; an empty text if it can.

    A context-parallel ring and the collectives of ZeRO 2 and 3 always overlap compute here. Gradient reductions of
    replicas and p2p sends between stages overlap if the row says so. Some of tensor parallelism's exchanges in backward
    overlap, unless the row asks for no overlap. Ulysses' all-to-alls never overlap.
    """
    word = asked.words.get("overlap")
    if word == "no" and layout.cp > 1:
        return f"the exchange of cp {layout.cp} always overlaps attention here; the row asks for none"
    if word == "no" and layout.zero > 1:
        return f"the collectives of zero {layout.zero} always overlap compute here; the row asks for none"
    if word == "yes" and layout.tp * layout.ulysses > 1 and layout.replicas * layout.pp == 1:
        return f"collectives of {layout_label(layout)} do not overlap compute here"
    return ""


_OVERLAP: dict[str, Overlap | None] = {"no": "none", "gradients": "gradients", "yes": "both", "": None}
"""Overlap of the replicas' collectives by the row's word; a blank leaves the choice to the system."""


STANDS_STILL = 1e6
"""Slowdown of compute beside a collective that makes compute stand still."""


def _taking_turns(hardware: Hardware) -> Hardware:
    """Return the profile for a row that asks for no overlap: compute stands still while a collective runs."""
    slowdown = dict(hardware.compute_slowdown)
    if "collective" in slowdown:
        slowdown["collective"] = msgspec.structs.replace(slowdown["collective"], value=STANDS_STILL)
    return msgspec.structs.replace(hardware, compute_slowdown=slowdown)


def question_of(asked: CaseQuestion, change: Callable[[Hardware], Hardware] | None = None) -> Question:
    """Return the question that a row asks; ``change`` alters its hardware profile.

    Raises:
        UsageError: when the row names a system, a cluster or a model that there is not.
        BadInput: when a file cannot be read, or no model can have the sizes of the row.
    """
    cluster, hardware = load_cluster(asked.cluster)
    hardware = change(hardware) if change else hardware
    given = asked.integers
    if "power_w" in given:
        hardware = with_power(hardware, given["power_w"])
    overlap = asked.words.get("overlap")
    if overlap == "no":
        hardware = _taking_turns(hardware)
    pins = Pins(
        **asked.pins,
        sequence_parallel=_switch(asked, "sp"),
        uneven_heads=asked.words.get("uneven_heads") == "yes",
        overlap_p2p={"no": False, "yes": True}.get(overlap or ""),
        memory_policy=_MEMORY[asked.words.get("memory_plan", "")],
        allocator_limit_gib=0,  # no source says that it limited the allocator
        overlap=_OVERLAP[overlap or ""],
        cuda_graphs=asked.words.get("cuda_graphs") == "yes",
        offload_inputs=_switch(asked, "offload_inputs"),
        early_stop=_switch(asked, "early_stop"),
        rounding_buffers=_switch(asked, "rounding_buffers"),
        loss_chunk_tokens=given.get("loss_chunk"),
        mlp_chunk_tokens=given.get("mlp_chunk"),
        mlp_rebuild=asked.words.get("mlp_rebuild"),  # type: ignore[arg-type]
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
        loss=asked.words.get("loss", "auto"),  # type: ignore[arg-type]
        states=asked.words.get("states", "fp32"),  # type: ignore[arg-type]
        loss_metrics=given.get("loss_metrics", 0),
        zero_params=asked.words.get("zero_params", "auto"),  # type: ignore[arg-type]
        grad_sums=asked.words.get("grad_sums", "auto"),  # type: ignore[arg-type]
        modules=asked.words.get("modules", "auto"),  # type: ignore[arg-type]
        fp8=asked.words.get("fp8", "none"),  # type: ignore[arg-type]
        fp8_params=asked.words.get("fp8_params") == "yes",
    )


def _switch(asked: CaseQuestion, column: str) -> bool | None:
    """Return what a column of yes and no says; None where it leaves the knob to the system."""
    word = asked.words.get(column)
    return None if word is None else word == "yes"


def _model(asked: CaseQuestion) -> Model:
    """Return the model that a row names or describes by its sizes.

    Raises:
        UsageError: when there is no such preset.
        BadInput: when a size is missing, or no model can have these sizes.
    """
    sizes = asked.integers
    if "layers" not in sizes:
        return load_model(asked.model)
    missing = [c for c in ("hidden", "heads", "vocab") if c not in sizes]
    if missing or asked.model not in ("gpt", "llama"):
        raise BadInput(
            "a row with layers must describe the whole model",
            got=f"model {asked.model}, missing {', '.join(missing) or 'nothing'}",
            wanted=f"model gpt or llama with hidden, heads and vocab, or one of {', '.join(list_models())} alone",
        )
    hidden, heads = sizes["hidden"], sizes["heads"]
    if hidden % heads:
        raise BadInput("heads do not divide hidden", got=f"hidden {hidden}", wanted=f"a multiple of heads ({heads})")
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
        "max_positions": sizes.get("max_positions", 0),
    }
    # Decoded, because only the decoder checks the limits that a model file has; a constructor does not.
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
    """Refuse a validation in which no row was predicted.

    Raises:
        Infeasible: with the first row's reason.
    """
    if all(case.predicted.status == "invalid" for case in report.cases):
        first = report.cases[0]
        raise Infeasible(
            "no row can be evaluated", where=first.case, got=first.predicted.reason, hint="the table lists all reasons"
        )


def check_error(report: Validation, most: float) -> None:
    """Check that the mean absolute relative error of every quantity is at most ``most``; fitted rows count apart.

    Raises:
        OutOfTolerance: when one is larger, a status is wrong, or nothing could be compared.
    """
    groups = summarise(report.cases)
    wrong = sum(g.statuses - g.statuses_right for g in groups)
    if wrong:
        raise OutOfTolerance("predicted statuses are wrong", got=counted(wrong, "row"), wanted="none")
    if not any(g.errors or g.statuses for g in groups):
        raise OutOfTolerance("no row could be compared", hint="the table lists all reasons")
    for g in groups:
        for name, error in g.errors.items():
            if error.mean_abs > most:
                got = f"{name}: mean absolute error {error.mean_abs:.4f} over {counted(error.count, 'row')}"
                raise OutOfTolerance("predictions are out of tolerance", got=got, wanted=f"at most {most}")
