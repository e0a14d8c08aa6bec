"""Computes what failures and checkpoints leave of a plan's speed, and what would help most.

Every device fails at random with the same mean time, and each failure stops the whole job: the job's mean time between
failures is a device's, divided by the devices that the plan occupies. The plan itself does not change.
"""

from __future__ import annotations

from collections.abc import Iterator
from math import ceil, floor

import msgspec

from memo_sim.contract.boards import OPTION_SOURCE
from memo_sim.contract.goodput import Failures, Goodput, GoodputChange
from memo_sim.contract.plan import Decisions
from memo_sim.contract.summary import Assumption
from memo_sim.contract.units import DTYPE_BYTES, GB, counted, format_bytes, format_duration, format_percent
from memo_sim.costs.failures import Shares, daly_interval, shares
from memo_sim.costs.pace import pace, slowest_device
from memo_sim.planning.question import Question
from memo_sim.program.layout.parameters import autocast, moment_dtype, without_masters

HOUR_S, HOURS_A_DAY = 3600.0, 24.0
BILLION, TRILLION = 1e9, 1e12
NO_PROGRESS = 1e-6
"""A goodput below this fraction is no progress: a day's work would take millennia."""
HALF = 0.5
MOMENTS = 2
"""AdamW's moments of a parameter."""


def checkpoint_bytes(decisions: Decisions) -> int:
    """Return what a checkpoint of the whole model holds: parameters, master weights and moments, no gradients.

    Of adapters alone where all else is frozen. Parameters that are cast from master weights are not stored beside them.
    """
    lora, parameters = decisions.lora, DTYPE_BYTES[decisions.dtype]
    trained = decisions.model.total_params if lora is None else lora.params(decisions.model)
    masters = 0 if without_masters(decisions) else DTYPE_BYTES["fp32"]
    if decisions.dtype == "fp32" and decisions.states != "host":
        masters = 0
    elif masters and (decisions.zero_params == "cast" or autocast(decisions)):
        parameters = 0
    return trained * (parameters + masters + MOMENTS * DTYPE_BYTES[moment_dtype(decisions)])


def goodput_of(
    failures: Failures | None,
    decisions: Decisions,
    *,
    step_s: float | None,
    tokens_per_device_s: float | None,
    price_per_device_hour: float | None = None,
) -> Goodput | None:
    """Return what failures leave of a plan's speed; None where nothing is said of them, or the plan does not fit."""
    if failures is None or step_s is None or tokens_per_device_s is None:
        return None
    devices = decisions.layout.devices
    mtbf_s = failures.device_mtbf_hours * HOUR_S / devices
    stored = checkpoint_bytes(decisions)
    rate, waited_s = failures.checkpoint_bytes_per_s, failures.checkpoint_s
    checkpoint_s = stored / rate if rate else waited_s or 0.0
    steps, found = _interval(failures, step_s, checkpoint_s, mtbf_s)
    tokens_s = tokens_per_device_s * found.useful
    hours = BILLION / tokens_s / HOUR_S if found.useful > NO_PROGRESS else None
    return Goodput(
        failures=failures,
        job_mtbf_s=mtbf_s,
        checkpoint_bytes=stored,
        checkpoint_s=checkpoint_s,
        interval_steps=steps,
        interval_s=steps * step_s,
        interval_from="daly" if failures.interval_s is None else "given",
        goodput=found.useful,
        checkpoints=found.checkpoints,
        lost=found.lost,
        restarts=found.restarts,
        tokens_per_device_s=tokens_s,
        days_per_trillion_tokens=None if hours is None else TRILLION / BILLION * hours / devices / HOURS_A_DAY,
        device_hours_per_billion_tokens=hours,
        price_per_billion_tokens=hours * price_per_device_hour if hours and price_per_device_hour else None,
    )


def _interval(failures: Failures, step_s: float, checkpoint_s: float, mtbf_s: float) -> tuple[int, Shares]:
    """Return the steps between two checkpoints, at least one, and where the time goes.

    A checkpoint is saved at the end of a step: an interval that is given is rounded to whole steps, and of Daly's the
    better one of the two nearest is taken.
    """

    def of(steps: int) -> tuple[int, Shares]:
        return steps, shares(steps * step_s, checkpoint_s, failures.restart_s, mtbf_s)

    if failures.interval_s is not None:
        return of(max(1, round(failures.interval_s / step_s)))
    best = daly_interval(checkpoint_s, mtbf_s) / step_s
    return max((of(max(1, steps)) for steps in (floor(best), ceil(best))), key=lambda each: each[1].useful)


def changed(goodput: Goodput, step_s: float) -> list[GoodputChange]:
    """Return the goodput with one input changed at a time: half the checkpoint, half the restart, twice the time."""
    given = goodput.failures
    checkpoint = HALF * goodput.checkpoint_s
    variants = {
        "half the checkpoint": (given, checkpoint, goodput.job_mtbf_s),
        "half the restart": (
            msgspec.structs.replace(given, restart_s=HALF * given.restart_s),
            goodput.checkpoint_s,
            goodput.job_mtbf_s,
        ),
        "half the failures": (given, goodput.checkpoint_s, goodput.job_mtbf_s / HALF),
    }
    if given.interval_s is not None:
        variants["Daly's interval"] = (
            msgspec.structs.replace(given, interval_s=None),
            goodput.checkpoint_s,
            goodput.job_mtbf_s,
        )
    found = [
        GoodputChange(change=name, goodput=_interval(failures, step_s, checkpoint_s, mtbf_s)[1].useful)
        for name, (failures, checkpoint_s, mtbf_s) in variants.items()
    ]
    return sorted(found, key=lambda each: -each.goodput)


def goodput_reasons(goodput: Goodput | None, step_s: float | None) -> list[str]:
    """Return where the time goes and what would help most, as one line; none without a goodput."""
    if goodput is None or step_s is None:
        return []
    parts = {
        "checkpoints": goodput.checkpoints,
        "steps that are done again": goodput.lost,
        "restarts": goodput.restarts,
    }
    largest = max(parts, key=lambda name: parts[name])
    gains = ", ".join(f"{each.change} {format_percent(each.goodput)}" for each in changed(goodput, step_s))
    useful, most = format_percent(goodput.goodput), format_percent(parts[largest])
    text = f"Of the time, {useful} goes to steps that last. Most of the rest goes to {largest} ({most})."
    return [f"{text} The goodput with one thing changed: {gains}."]


def goodput_assumptions(question: Question, goodput: Goodput | None, devices: int) -> list[Assumption]:
    """Return what a goodput rests on, and the spread of devices where one was given."""
    return [*(_of_failures(goodput, devices) if goodput else ()), *_stragglers(question, devices)]


def _of_failures(goodput: Goodput, devices: int) -> Iterator[Assumption]:
    given = goodput.failures
    each, all_of = format_duration(given.device_mtbf_hours * HOUR_S), format_duration(goodput.job_mtbf_s)
    value = f"a GPU after {each} on average, at random, so one of the job's {counted(devices, 'GPU')} every {all_of}"
    yield Assumption(name="failures", value=value, option="--mtbf-hours")
    of_states = f"{format_bytes(goodput.checkpoint_bytes)} of parameters and optimizer states"
    if given.checkpoint_bytes_per_s is None:
        how, option = "", "--checkpoint-s"
    else:
        how, option = f" at {given.checkpoint_bytes_per_s / GB:g} GB/s of the whole job", "--checkpoint-gb-s"
    value = f"training waits {format_duration(goodput.checkpoint_s)} for one ({of_states}{how})"
    chosen = "Daly's optimum" if goodput.interval_from == "daly" else "as given"
    steps = counted(goodput.interval_steps, "step")
    value += f"; one every {steps} or {format_duration(goodput.interval_s)}, {chosen}"
    yield Assumption(name="checkpoints", value=value, option=f"{option}, --checkpoint-interval-s")
    value = f"{format_duration(given.restart_s)} from a failure to the first new step"
    yield Assumption(name="restart", value=value, option="--restart-s")


def _stragglers(question: Question, devices: int) -> Iterator[Assumption]:
    """Return how slow the slowest device is assumed to be, where the spread was given."""
    hardware, deviation = question.hardware, question.hardware.device_deviation
    if deviation is None or deviation.source != OPTION_SOURCE:
        return
    rated = hardware.rated_devices or hardware.devices
    among = f"those of the slowest of {rated}" if rated > 1 else "those of one GPU"
    value = (
        f"GPUs differ by {format_percent(deviation.value)} (standard deviation); the slowest of {devices} is expected"
        f" {slowest_device(devices):.2f} deviations above the mean, so products and attention take"
        f" {format_percent(pace(hardware, devices) - 1)} longer than the profile's, which are {among}"
    )
    yield Assumption(name="stragglers", value=value, option="--straggler-spread")
