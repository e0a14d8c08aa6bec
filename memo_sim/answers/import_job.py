"""Reads a job of another framework, says what it costs on a cluster, and what would be better."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec

from memo_sim.answers import named_values
from memo_sim.answers.export_plan import LOST_PAGE, MODEL_FILE, PLAN_FILE
from memo_sim.answers.summary import device_memory
from memo_sim.answers.what_if import row, what_if, without_answer
from memo_sim.contract.cluster import Cluster
from memo_sim.contract.errors import BadInput, Infeasible, UsageError
from memo_sim.contract.files import read_regular
from memo_sim.contract.hardware import Hardware
from memo_sim.contract.interchange import ImportedJob, is_command
from memo_sim.contract.knobs import Pins
from memo_sim.contract.plan import Decisions, Plan, Provenance
from memo_sim.contract.progress import Progress
from memo_sim.contract.result import Result
from memo_sim.contract.systems import DEFAULT_SYSTEM
from memo_sim.interchange.framework import FALLBACK, Framework, Read, Source
from memo_sim.interchange.frameworks import find_framework, framework_of
from memo_sim.interchange.job import Job
from memo_sim.interchange.memory_fraction import limit_gib, settings_of
from memo_sim.interchange.unsaid import unsaid
from memo_sim.planning.question import Question
from memo_sim.planning.search import play

MOST_BYTES = 4_000_000
"""A script or configuration has some thousand bytes."""
COMMAND = "the command"
"""What a command is called in messages, in place of a file."""
ALTERNATIVES = 3
"""Plans that are listed of each search for something better."""


def job_files(paths: Sequence[str]) -> list[str]:
    """Return the files of a job, without the pages that ``export`` writes beside them; a single file is always one."""
    beside = {LOST_PAGE, MODEL_FILE, PLAN_FILE}
    return [path for path in paths if is_command(path) or Path(path).name not in beside] or list(paths)


def read_files(
    paths: Sequence[str], given: Mapping[str, str], *, framework: str | None = None, devices: int = 0
) -> tuple[Framework, Read]:
    """Return the framework whose files these are, and what they say; ``devices`` are the cluster's, 0: none is named.

    Raises:
        BadInput: when a file is no framework's, or does not say what memo needs.
        UsageError: when there is no such framework.
    """
    sources = tuple(Source(COMMAND, one) if is_command(one) else Source(one, _text(one)) for one in job_files(paths))
    of = find_framework(framework) if framework else framework_of(sources)
    read = of.read(sources, {**given, FALLBACK: str(devices or "")})
    fraction, options, unused = settings_of([(source.name, source.text) for source in sources])
    told = {option.key for option in read.ignored if "ALLOC_CONF" in option.key}
    ignored = [option for option in read.ignored if option.key not in told]
    read = replace(read, memory_fraction=fraction, read=(*read.read, *options), ignored=(*ignored, *unused))
    return find_framework(read.framework), read  # accelerate and TRL may start a job of DeepSpeed


def _check_bounds(document: ImportedJob) -> None:
    """Refuse a job with a number that no document may hold, such as a sequence of 2^40 tokens.

    Raises:
        BadInput: naming the files.
    """
    try:
        msgspec.json.decode(msgspec.json.encode(document), type=ImportedJob)
    except msgspec.ValidationError as error:
        raise BadInput("the job is beyond all bounds", where=", ".join(document.files), got=str(error)) from None


def _text(path: str) -> str:
    try:
        return read_regular(path, MOST_BYTES).decode()
    except UnicodeDecodeError as error:
        raise BadInput("not a text file", where=path, got=str(error)) from None


def parse_given(pairs: Sequence[str]) -> dict[str, str]:
    """Return the values of ``--set NAME=value``.

    Raises:
        UsageError: when one of them has no name, or no value.
    """
    found = dict[str, str]()
    for pair in pairs:
        name, sign, value = pair.partition("=")
        if not sign or not _NAME.fullmatch(name):
            raise UsageError("not a value for a name", got=repr(pair), wanted="--set NAME=value")
        found[name] = value
    return found


def checked_given(given: Mapping[str, str | float]) -> dict[str, str]:
    """Return the values of ``set={"NAME": value}`` as text.

    Raises:
        UsageError: when a name is none, or a value is neither text nor a number.
    """
    for name, value in given.items():
        if not (isinstance(name, str) and _NAME.fullmatch(name)) or not isinstance(value, str | int | float):
            raise UsageError("not a value for a name", got=repr({name: value}), wanted='set={"NAME": "text", "N": 8}')
    return {name: str(value) for name, value in given.items()}


_NAME = re.compile(r"\w[\w.-]*", re.ASCII)


def decisions_of(
    job: Job, cluster: Cluster, hardware: Hardware, system: str, memory_fraction: float | None = None
) -> tuple[Decisions, list[str]]:
    """Return the plan of a job on a cluster, and what was assumed to make it.

    ``memory_fraction``: the part of a device's memory that PyTorch's allocator may reserve.

    Raises:
        Infeasible: when no plan can have the job's decisions.
        UsageError: when they contradict each other, or need more devices than there are.
    """
    found, assumed = _whole_device(job, cluster, hardware, system)
    if memory_fraction is None or found.memory_policy == "planned":
        return found, assumed
    memory = play(job.question(cluster, hardware, system), found).memory
    limit = limit_gib(memory_fraction, memory.reserve_bytes, hardware.device_memory_bytes.value)
    return msgspec.structs.replace(found, allocator_limit_gib=limit), assumed


def _whole_device(job: Job, cluster: Cluster, hardware: Hardware, system: str) -> tuple[Decisions, list[str]]:
    try:
        return job.decisions(cluster, hardware, system), []
    except Infeasible as error:
        first = error
    tried: tuple[dict[str, Any], ...] = ({"attention": None}, {"dtype": None}, {"attention": None, "dtype": None})
    for changes in tried:
        try:
            found = replace(job, pins=replace(job.pins, **changes)).decisions(cluster, hardware, system)
        except Infeasible:
            continue
        asked = [f"{name} {getattr(job.pins, name)}" for name in changes]
        priced = {"attention": found.kernels.attention, "dtype": found.dtype}
        told = " and ".join(f"{name} {priced[name]}" for name in changes)
        return found, [f"priced with {told}: {hardware.name} has no rates of {', '.join(asked)}"]
    raise first


def import_job(
    paths: Sequence[str],
    given: Mapping[str, str],
    *,
    framework: str | None = None,
    machine: tuple[Cluster, Hardware] | None = None,
    search: bool = True,
    progress: Progress | None = None,
) -> ImportedJob:
    """Return what the files of a job say; with a cluster what it costs there, and with ``search`` what would be better.

    Raises:
        BadInput: as ``read_files``.
        Infeasible: when no plan can have the job's decisions.
        UsageError: as ``read_files``, and when the job does not fit on the cluster's devices.
    """
    of, read = read_files(paths, given, framework=framework, devices=machine[0].devices if machine else 0)
    job = read.job
    document = ImportedJob(
        framework=of.title,
        version=of.version,
        files=[COMMAND if is_command(path) else path for path in job_files(paths)],
        model=job.model,
        seq_tokens=job.seq_tokens,
        micro_batch=job.micro_batch,
        global_batch=job.global_batch,
        devices=read.devices,
        read=list(read.read),
        ignored=list(read.ignored),
        assumed=list(read.assumed),
    )
    _check_bounds(document)
    if machine is None:
        return msgspec.structs.replace(document, assumed=[*read.assumed, *unsaid(read, of.sayings)])
    cluster, hardware = machine
    system, priced = of.predicted_by(job), of.priced(job)
    decisions, assumed = decisions_of(priced, cluster, hardware, system, read.memory_fraction)
    question = priced.question(cluster, hardware, system)
    used = decisions.layout.devices
    if used < cluster.devices:
        assumed.append(f"the job uses {used} of the {cluster.devices} devices of {cluster.name}")
    played = play(question, decisions)
    own = row(decisions, played.prediction, system=system)
    memory = device_memory(played, played.prediction, planned_arena=False)
    better = _better(job, Pins(dtype=decisions.dtype), system, machine, progress) if search else []
    return msgspec.structs.replace(
        document,
        job=own,
        memory=memory,
        better=better,
        assumed=[*document.assumed, *of.own_operators(job), *unsaid(read, of.sayings, decisions), *assumed],
    )


def question_of_files(
    paths: Sequence[str], given: Mapping[str, str], values: Mapping[str, Any]
) -> tuple[Plan, Question]:
    """Return the plan of a job, not lowered yet, and the question about it on the machine of the values.

    Raises:
        BadInput, Infeasible, UsageError: as ``import_job``.
    """
    cluster, hardware = named_values.machine_of(values)
    of, read = read_files(paths, given, devices=cluster.devices)
    system = of.predicted_by(read.job)
    decisions, assumed = decisions_of(of.priced(read.job), cluster, hardware, system, read.memory_fraction)
    plan = Plan(decisions=decisions, program_sha256="", provenance=Provenance(system=system))
    told = (*read.assumed, *of.own_operators(read.job), *unsaid(read, of.sayings, decisions), *assumed)
    return plan, replace(named_values.question_about(plan, values), of_job=told)


def _better(
    job: Job, kept: Pins, system: str, machine: tuple[Cluster, Hardware], progress: Progress | None
) -> list[Result]:
    """Return the answers to the job's question with all but ``kept`` open: in the same framework, then in memo."""
    found = list[Result]()
    for named in (system, DEFAULT_SYSTEM):
        question = Question(
            model=job.model,
            cluster=machine[0],
            hardware=machine[1],
            seq_tokens=job.seq_tokens,
            system=named,
            micro_batch=job.micro_batch,
            global_batch=job.global_batch,
            objective=job.objective,
            pins=kept,
        )
        try:
            found.append(what_if(question, top=ALTERNATIVES, progress=progress).result)
        except (Infeasible, UsageError) as error:
            found.append(without_answer(question, error))
    return found
