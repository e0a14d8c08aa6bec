"""Turns named values into a question: those of the command line's options, of Python arguments, of a line of a file.

    {"model": "llama3-8b", "cluster": "h100-1x8", "seq_len": "1m", "tp": 8}  ->  Question

The names are those of the options with underscores. None stands for a value that was not given.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from numbers import Integral, Real
from pathlib import Path
from typing import Any

from memo_sim.contract import codec
from memo_sim.contract.adapters import parse_adapters
from memo_sim.contract.boards import with_power
from memo_sim.contract.catalog import cluster_from_datasheet, fields_not_read, load_cluster, load_model
from memo_sim.contract.cluster import Cluster
from memo_sim.contract.documents import Documents, parse_documents
from memo_sim.contract.errors import UsageError, did_you_mean
from memo_sim.contract.expert_load import MeasuredLoad
from memo_sim.contract.goodput import Failures
from memo_sim.contract.hardware import Hardware
from memo_sim.contract.knobs import (
    ARGUMENTS,
    CHOSEN,
    FAILURE_VALUES,
    MEMORY_GIB,
    OF_A_LONG_RUN,
    OF_A_QUESTION,
    PINNED,
    POWER_W,
    STRAGGLER_SPREAD,
    CountOrAuto,
    Degree,
    DocumentLengths,
    Factor,
    Flag,
    Fraction,
    Knob,
    LayerChoice,
    Length,
    Load,
    LowRank,
    Numbers,
    OneOf,
    Pins,
    Switch,
    Whole,
)
from memo_sim.contract.model import Model
from memo_sim.contract.plan import Plan
from memo_sim.contract.systems import DEFAULT_SYSTEM
from memo_sim.contract.units import GB, GIB, parse_expert_load, parse_layer_choice, parse_numbers, parse_tokens
from memo_sim.costs.pace import with_spread
from memo_sim.planning.attention_kernels import attention_kernel
from memo_sim.planning.default_batch import with_filling_batch, with_one_sequence
from memo_sim.planning.presets import known_system
from memo_sim.planning.question import Question, with_memory

Values = Mapping[str, Any]
LEAST_FACTOR = 1e-6

MOST_DIGITS = 18
"""Digits of a number that are read; one with more is out of every range."""
PRICES = (1e-9, 1e12)
"""Least and most that a GPU costs for an hour, in any currency."""
NEEDED = ("model", "seq_len")
"""What a question cannot do without, beside a cluster."""
KERNELS = ("attention", "rowwise")
"""Knobs that may be given beside a plan: which kernels play it."""


def check_names(values: Values, known: Sequence[str] = (*OF_A_QUESTION, *OF_A_LONG_RUN, *ARGUMENTS)) -> None:
    """Refuse names that no question knows.

    Raises:
        UsageError: with the nearest name.
    """
    for name in values:
        if name not in known:
            hint = did_you_mean(str(name), known) or "docs/knobs.md lists the knobs"
            raise UsageError("a question has no value of this name", got=repr(name), hint=hint)


def question_of(values: Values, *, fill: bool = True) -> Question:
    """Return the question that the values make.

    ``model`` is a name, a path or a ``Model``; the knobs are named by ``Knob.argument``. Without ``global_batch`` the
    batch keeps every device busy; where it is not to ``fill`` the cluster, it has one micro-batch for each replica.

    Raises:
        UsageError: when a name or a value is wrong, or one of ``NEEDED`` is missing.
        BadInput: when a file cannot be read.
    """
    _check_needed(values)
    return question_on(values, *named_cluster(values), fill=fill)


def question_about(plan: Plan, values: Values) -> Question:
    """Return the question about a plan on the machine of the values (``knobs.OF_A_MACHINE``), or else on its own.

    What the values say of failures counts too (``knobs.OF_A_LONG_RUN``).
    Of the knobs, ``KERNELS`` of the values count; ``planning/kernels_elsewhere.py`` says what they are without a value.
    The plan is predicted under the system that it was made under.

    Raises:
        UsageError: when a value is wrong, or no machine is named and the plan's own is not known.
        Infeasible: when the profile has no rates of an attention kernel that is given.
        BadInput: when a file cannot be read.
    """
    named = values.get("cluster") is not None or values.get("from_datasheet") is not None
    cluster, hardware = _limited(values, *(named_cluster(values) if named else _own_cluster(plan)))
    knobs = {knob.name: knob.default for knob in ARGUMENTS.values()}
    decided = {"attention": plan.decisions.kernels.attention, "libraries": plan.decisions.libraries}
    decided |= {name: checked(ARGUMENTS[name], values[name]) for name in KERNELS if values.get(name) is not None}
    question = Question(
        model=plan.decisions.model,
        cluster=cluster,
        hardware=hardware,
        seq_tokens=plan.decisions.seq_tokens,
        system=known_system(plan.provenance.system),
        failures=failures_of(values),
        **_held(knobs | decided),
    )
    if values.get("attention") is not None:
        attention_kernel(question)
    return question


def _own_cluster(plan: Plan) -> tuple[Cluster, Hardware]:
    """Return the cluster that a plan was made for.

    Raises:
        UsageError: when the plan names none, or one that only its own file describes.
    """
    own = plan.provenance.cluster
    hint = "--cluster a800-1x8, or the path of a cluster's or profile's file"
    if not own:
        raise UsageError("the plan does not say which cluster it was made for", hint=hint)
    try:
        return load_cluster(own)
    except UsageError:
        raise UsageError("the plan's own cluster is not known by its name", got=repr(own), hint=hint) from None


def question_on(values: Values, cluster: Cluster, hardware: Hardware, *, fill: bool = True) -> Question:
    """Return the question that the values ask about a cluster; ``fill`` as in ``question_of``.

    Raises:
        UsageError: when a value is wrong.
        BadInput: when a file cannot be read.
    """
    question = _without_batch(values, cluster, hardware)
    if values.get("global_batch") is not None:
        return question
    return with_filling_batch(question) if fill else with_one_sequence(question)


def question_without_batch(values: Values) -> tuple[Question, bool]:
    """Return the question as ``question_of`` reads it, and whether its batch is still to be chosen.

    Whether knobs contradict each other is not looked at; choosing the batch does.

    Raises:
        UsageError: when a name or a value is wrong, or one of ``NEEDED`` is missing.
        BadInput: when a file cannot be read.
    """
    _check_needed(values)
    return _without_batch(values, *named_cluster(values)), values.get("global_batch") is None


def _without_batch(values: Values, cluster: Cluster, hardware: Hardware) -> Question:
    cluster, hardware = _limited(values, cluster, hardware)
    knobs = {knob.name: checked(knob, values.get(name)) for name, knob in ARGUMENTS.items()}
    model, system = values["model"], values.get("system")
    known = isinstance(model, Model)
    return Question(
        model=model if known else load_model(_text(model, "model")),
        cluster=cluster,
        hardware=hardware,
        seq_tokens=parse_tokens(str(values["seq_len"])),
        system=DEFAULT_SYSTEM if system is None else _text(system, "system"),
        not_read=() if known else fields_not_read(_text(model, "model")),
        open_micro_batch=values.get("micro_batch") is None,
        failures=failures_of(values),
        **_held(knobs),
    )


def _check_needed(values: Values) -> None:
    check_names(values)
    if missing := [name for name in NEEDED if values.get(name) in (None, "")]:
        raise UsageError("a question lacks values", got=f"no {', no '.join(missing)}", wanted=", ".join(NEEDED))


def machine_of(values: Values) -> tuple[Cluster, Hardware]:
    """Return the cluster that the values name, with their memory and power limit.

    Raises:
        UsageError: when a value is wrong.
        BadInput: when a file cannot be read.
    """
    return _limited(values, *named_cluster(values))


def _held(knobs: dict[str, Any]) -> dict[str, Any]:
    """Return the fields of ``Question`` that hold these knobs."""
    pins = Pins(**{knob.name: knobs[knob.name] for knob in PINNED if knob.name in knobs})
    return {"pins": pins, **{knob.name: knobs[knob.name] for knob in CHOSEN if knob.name in knobs}}


def named_cluster(values: Values) -> tuple[Cluster, Hardware]:
    """Return the cluster and the profile that ``cluster`` or ``from_datasheet`` names.

    Raises:
        UsageError: when neither or both are given, or what is given is none.
        BadInput: when a file cannot be read.
    """
    name, sheet = values.get("cluster"), values.get("from_datasheet")
    if (name is None) == (sheet is None):
        got = "neither" if name is None else "both"
        hint = "--cluster a800-1x8, or --from-datasheet tflops=165,memory=24,pcie=4x16"
        raise UsageError("a question needs one of --cluster and --from-datasheet", got=got, hint=hint)
    if sheet is not None:
        return cluster_from_datasheet(_text(sheet, "from_datasheet"))
    return load_cluster(_text(name, "cluster"))


def _limited(values: Values, cluster: Cluster, hardware: Hardware) -> tuple[Cluster, Hardware]:
    """Return a machine with the memory, the power limit and the spread of its devices that the values name."""
    safety_gib = number("safety_gib", values.get("safety_gib"), 0, MEMORY_GIB[1])
    cluster, hardware = with_memory(
        cluster,
        hardware,
        device_bytes=bytes_of("device_memory_gib", values.get("device_memory_gib")),
        host_bytes=bytes_of("host_memory_gib", values.get("host_memory_gib")),
        safety_bytes=None if safety_gib is None else int(safety_gib * GIB),
    )
    spread = number("straggler_spread", values.get("straggler_spread"), *STRAGGLER_SPREAD)
    if spread is not None:
        hardware = with_spread(hardware, spread)
    power_w = number("power_w", values.get("power_w"), *POWER_W)
    return cluster, hardware if power_w is None else with_power(hardware, power_w)


def failures_of(values: Values) -> Failures | None:
    """Return what the values say of failures and checkpoints; None where they say nothing.

    Raises:
        UsageError: when a value is wrong, or one that the others need is missing.
    """
    given = {name: number(name, values.get(name), *ends) for name, ends in FAILURE_VALUES.items()}
    named = [name for name, value in given.items() if value is not None]
    if not named:
        return None
    if given["checkpoint_s"] is not None and given["checkpoint_gb_s"] is not None:
        raise UsageError("both give the time of a checkpoint", got="--checkpoint-s and --checkpoint-gb-s", wanted="one")
    mtbf_hours, restart_s, gb_s = given["mtbf_hours"], given["restart_s"], given["checkpoint_gb_s"]
    missing = [] if mtbf_hours is not None else ["--mtbf-hours"]
    missing += [] if gb_s is not None or given["checkpoint_s"] is not None else ["--checkpoint-s or --checkpoint-gb-s"]
    missing += [] if restart_s is not None else ["--restart-s"]
    if missing or mtbf_hours is None or restart_s is None:
        raise UsageError(
            "what is said of failures is not enough for a goodput",
            got=", ".join(f"--{name.replace('_', '-')}" for name in named),
            wanted=f"also {' and '.join(missing)}",
            hint="--mtbf-hours 50000 --checkpoint-s 30 --restart-s 600; docs/goodput.md says what each counts",
        )
    return Failures(
        device_mtbf_hours=mtbf_hours,
        checkpoint_s=given["checkpoint_s"],
        checkpoint_bytes_per_s=None if gb_s is None else gb_s * GB,
        interval_s=given["checkpoint_interval_s"],
        restart_s=restart_s,
    )


def checked(knob: Knob, given: Any) -> Any:
    """Return a knob's value, its default for None; lengths and numbers may be text, as on the command line.

    Raises:
        UsageError: when the knob cannot have the value.
    """
    if given is None:
        return knob.default
    value: Any = None
    match knob.kind:
        case Degree():
            value = _whole(given, 1, None)
        case Whole(least, most):
            value = _whole(given, least, most)
        case CountOrAuto(most):
            value = "auto" if given == "auto" else _whole(_digits(given), 1, most)
        case Fraction() | Factor():
            value = _real(given, knob.kind)
        case Switch() | Flag():
            value = given if isinstance(given, bool) else None
        case OneOf(words):
            value = given if given in words else None
        case Length():
            value = parse_tokens(str(given), option=knob.option, least=0) if _is_length(given) else None
        case _:
            value = _parsed(knob, given)
    if value is None:
        raise _refusal(knob, given)
    return value


def _parsed(knob: Knob, given: Any) -> Any:
    """Return the value of a knob that is given as text."""
    match knob.kind:
        case Numbers():
            return parse_numbers(_joined(given), option=knob.option)
        case LayerChoice():
            return parse_layer_choice(str(given), option=knob.option)
        case LowRank():
            return parse_adapters(str(given), option=knob.option)
        case Load():
            return _expert_load(str(given), option=knob.option)
        case DocumentLengths():
            return given if isinstance(given, Documents) else parse_documents(str(given), option=knob.option)


def _expert_load(text: str, *, option: str) -> str:
    """Return a load of experts; of a file, what a plan writes for it."""
    if text.endswith(".json") or Path(text).is_file():
        return codec.read(text, MeasuredLoad).load
    return parse_expert_load(text, option=option)


def _refusal(knob: Knob, given: Any) -> UsageError:
    hint = None
    match knob.kind:
        case CountOrAuto(most):
            wanted, hint = f"a whole number from 1 to {most}, or auto", f"{knob.option} 32"
            return UsageError(f"not a number of {knob.name}", got=repr(given), wanted=wanted, hint=hint)
        case OneOf(words):
            hint = did_you_mean(str(given), words)
        case Switch() | Flag():
            return UsageError(f"not a value of {knob.argument}", got=repr(given), wanted="True or False")
    return UsageError(f"not a value of {knob.argument}", got=repr(given), wanted=str(knob.kind), hint=hint)


def _whole(given: Any, least: int, most: int | None) -> int | None:
    """Return a whole number in a range; None where it is something else."""
    return int(given) if isinstance(given, Integral) and _in_range(given, least, most) else None


def _real(given: Any, kind: Fraction | Factor) -> float | None:
    """Return a number of a kind; None where it is something else. A factor is above 0."""
    most, least = (kind.most, LEAST_FACTOR) if isinstance(kind, Factor) else (1.0, 0.0)
    return float(given) if _in_range(given, least, most) else None


def _in_range(given: Any, least: float, most: float | None) -> bool:
    if not isinstance(given, Real) or isinstance(given, bool):
        return False
    number: Any = given
    return bool(least <= number and (most is None or number <= most))


def _digits(given: Any) -> Any:
    """Return the number that text stands for, and anything else as it is."""
    return int(given[:MOST_DIGITS]) if isinstance(given, str) and given.isascii() and given.isdigit() else given


def _is_length(given: Any) -> bool:
    return isinstance(given, str) or _whole(given, 0, None) is not None


def _joined(given: Any) -> str:
    return ",".join(map(str, given)) if isinstance(given, list | tuple) else str(given)


def bytes_of(name: str, size_gib: float | None) -> int | None:
    """Return GiB as bytes; None stays.

    Raises:
        UsageError: with ``name``, when it is no size of a memory.
    """
    given = number(name, size_gib, *MEMORY_GIB)
    return None if given is None else int(given * GIB)


def number(name: str, given: Any, least: float, most: float) -> float | None:
    """Return a number in a range; None stays.

    Raises:
        UsageError: with ``name``, when it is something else.
    """
    if given is None or _in_range(given, least, most):
        return None if given is None else float(given)
    raise UsageError(f"not a value of {name}", got=repr(given), wanted=f"a number from {least:g} to {most:g}")


def prices_of(given: Any, names: Sequence[str]) -> list[float | None]:
    """Return the price of a device for an hour for each cluster or kind of GPU in ``names``; None where none is given.

    ``given`` is one price for all, or prices by a kind (``h100``), by a cluster's or kind's whole name, or by ``""``.

    Raises:
        UsageError: when a price is no number, or is of none of them.
    """
    if not isinstance(given, Mapping):
        given = {} if given is None else {"": given}
    known = {str(key): number("price_per_gpu_hour", value, *PRICES) for key, value in given.items()}
    keys = [next((key for key in (name, name.partition("-")[0], "") if key in known), None) for name in names]
    if unused := [key for key in known if key and key not in keys]:
        raise UsageError("a price of what is not asked about", got=", ".join(unused), wanted=", ".join(names))
    return [None if key is None else known[key] for key in keys]


def _text(given: Any, name: str) -> str:
    """Return a name or a path as text."""
    if isinstance(given, str | os.PathLike):
        return os.fspath(given)
    raise UsageError(f"not a value of {name}", got=repr(given), wanted="a name or a path")
