"""The public Python functions: what ``memo-sim`` answers, with typed results. ``import memo_sim`` offers them all.

    import memo_sim as memo

    answer = memo.what_if("llama3-8b", cluster="h100-1x8", seq_len="1m", tp=8)
    answer.best.step_s, answer.why, answer.table(), answer.save("plan.json")

The arguments are the options of ``memo-sim`` with underscores. Every failure is a ``MemoError``. A question that has no
plan that fits is a result whose ``best`` is None. ``docs/python.md`` says what stays as it is between versions.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import Executor
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal, Unpack, overload

from memo_sim.answers import difference as difference_answer
from memo_sim.answers import explanation as explanation_answer
from memo_sim.answers import gpus as gpus_answer
from memo_sim.answers import longest as longest_answer
from memo_sim.answers import more_memory, named_values, sweep_file
from memo_sim.answers import plan_memory as memory_answer
from memo_sim.answers import shortage as shortage_answer
from memo_sim.answers import sweep as sweep_answer
from memo_sim.answers.several_clusters import several_clusters
from memo_sim.contract import codec
from memo_sim.contract.catalog import load_cluster
from memo_sim.contract.comparison import Comparison
from memo_sim.contract.datasheet import is_datasheet
from memo_sim.contract.errors import UsageError
from memo_sim.contract.gpu_kind import GpuKind, load_gpu_kinds
from memo_sim.contract.interchange import FrameworkName, Launcher, ReadFrameworkName
from memo_sim.contract.knobs import ARGUMENTS, OF_A_LONG_RUN
from memo_sim.contract.long_run import KnobsInALongRun, LongRun
from memo_sim.contract.model import Model
from memo_sim.contract.named_arguments import with_names_checked
from memo_sim.contract.named_knobs import Knobs
from memo_sim.contract.plain_text import one_line
from memo_sim.contract.plan import Plan
from memo_sim.contract.progress import Progress
from memo_sim.contract.result import Result
from memo_sim.contract.systems import DEFAULT_SYSTEM
from memo_sim.contract.trace import Trace
from memo_sim.contract.units import parse_duration, parse_tokens
from memo_sim.planning.kernels_elsewhere import kernels_elsewhere
from memo_sim.planning.plan_question import question_of_plan
from memo_sim.planning.processes import processes
from memo_sim.planning.question import Question
from memo_sim.results.answered import answered, priced
from memo_sim.results.interchange import DoctorResult, ExportResult, ImportResult
from memo_sim.results.memory import MemoryResult, OomResult
from memo_sim.results.planned import ClustersResult, GpusResult, LongestResult, WhatIfResult
from memo_sim.results.sweep import SweepResult
from memo_sim.results.understanding import CompareResult, ExplainResult
from memo_sim.results.validated import ValidationResult
from memo_sim.views.pictures import Picture
from memo_sim.views.typed_result import PathLike

__all__ = [
    "ClustersResult",
    "CompareResult",
    "DoctorResult",
    "ExplainResult",
    "ExportResult",
    "GpusResult",
    "ImportResult",
    "Knobs",
    "LongestResult",
    "MemoryResult",
    "OomResult",
    "Picture",
    "SweepResult",
    "ValidationResult",
    "WhatIfResult",
    "compare",
    "doctor",
    "explain",
    "export",
    "gpus",
    "grid",
    "import_job",
    "load_plan",
    "load_sweep",
    "longest",
    "oom",
    "plan_memory",
    "simulate",
    "sweep",
    "validate",
    "what_if",
]

OF_A_RUN = (*ARGUMENTS, *OF_A_LONG_RUN)
"""What questions take as further arguments: the knobs, and what is said of a long run."""
SECONDS = (1e-9, 1e9)
"""Least and most seconds of a limit."""
Solver = Literal["portfolio", "bilevel-mip", "mip", "greedy", "cp-sat"]
Prices = float | Mapping[str, float]
"""Of a GPU for an hour: one for all, or one for each kind (``h100``) or cluster (``h100-1x8``)."""


@overload
def what_if(
    model: PathLike | Model,
    *,
    seq_len: int | str,
    cluster: PathLike | None = None,
    from_datasheet: str | None = None,
    system: str = DEFAULT_SYSTEM,
    device_memory_gib: float | None = None,
    host_memory_gib: float | None = None,
    safety_gib: float | None = None,
    power_w: float | None = None,
    top: int = 10,
    pareto: bool = False,
    one_more_gib: bool = False,
    price_per_gpu_hour: float | None = None,
    jobs: int = 1,
    progress: Progress | None = None,
    **knobs: Unpack[KnobsInALongRun],
) -> WhatIfResult: ...
@overload
def what_if(
    model: PathLike | Model,
    *,
    seq_len: int | str,
    cluster: list[str] | list[PathLike] | tuple[PathLike, ...],
    system: str = DEFAULT_SYSTEM,
    device_memory_gib: float | None = None,
    host_memory_gib: float | None = None,
    safety_gib: float | None = None,
    power_w: float | None = None,
    price_per_gpu_hour: Prices | None = None,
    jobs: int = 1,
    progress: Progress | None = None,
    **knobs: Unpack[KnobsInALongRun],
) -> ClustersResult: ...
@overload
def what_if(
    *,
    from_: PathLike | Sequence[PathLike],
    set: Mapping[str, str | float] | None = None,
    cluster: PathLike | None = None,
    from_datasheet: str | None = None,
    device_memory_gib: float | None = None,
    host_memory_gib: float | None = None,
    safety_gib: float | None = None,
    power_w: float | None = None,
    price_per_gpu_hour: float | None = None,
    **long_run: Unpack[LongRun],
) -> WhatIfResult: ...
@with_names_checked(others=OF_A_RUN)
def what_if(
    model: PathLike | Model | None = None,
    *,
    seq_len: int | str | None = None,
    cluster: PathLike | Sequence[PathLike] | None = None,
    from_datasheet: str | None = None,
    from_: PathLike | Sequence[PathLike] | None = None,
    set: Mapping[str, str | float] | None = None,
    system: str = DEFAULT_SYSTEM,
    device_memory_gib: float | None = None,
    host_memory_gib: float | None = None,
    safety_gib: float | None = None,
    power_w: float | None = None,
    top: int = 10,
    pareto: bool = False,
    one_more_gib: bool = False,
    price_per_gpu_hour: Prices | None = None,
    jobs: int = 1,
    progress: Progress | None = None,
    **knobs: Unpack[KnobsInALongRun],
) -> WhatIfResult | ClustersResult:
    """Search every knob that is not pinned, and rank the plans, as ``memo-sim what-if`` does.

    ``model`` is a preset's name, a file or a ``Model``; ``seq_len`` a number of tokens or text such as ``"64k"``;
    ``cluster`` a name or a file, and ``from_datasheet`` a GPU in its place, as the option describes it. A list of
    clusters is asked about each of them, and ranked. ``price_per_gpu_hour`` is in any currency, and adds prices to
    ``summary``; of several clusters it may be a mapping from a GPU or a cluster to its price. ``mtbf_hours`` and its
    neighbours (``LongRun``) add what failures leave of the speed. ``jobs`` processes share the search; the answer does
    not depend on their number. ``progress`` receives (plans done, plans in all).

    With ``from_`` in place of ``model`` and ``seq_len``, the job of another framework is priced as it is: its script or
    configuration, several of them, or its command as text. ``set`` gives values that the files leave open.

    Raises:
        UsageError: when a name or a value is wrong, or knobs contradict each other or the cluster.
        BadInput: when a file cannot be read.
    """
    values: dict[str, Any] = {"model": model, "cluster": cluster, "seq_len": seq_len, "system": system, **knobs}
    machine: dict[str, Any] = {"device_memory_gib": device_memory_gib, "host_memory_gib": host_memory_gib}
    machine |= {"safety_gib": safety_gib, "from_datasheet": from_datasheet, "power_w": power_w}
    machine |= {name: values.pop(name) for name in OF_A_LONG_RUN if name in values}
    command = _call("what_if", {"from_": from_, "set": set, **values, **machine})
    wanted: dict[str, Any] = {"top": top, "pareto": pareto, "one_more_gib": one_more_gib}
    told: dict[str, Any] = {"jobs": jobs, "progress": progress, "command": command}
    searched = [name for name, value in wanted.items() if value != _SEARCHED[name]]

    def ask(one: object, price: object) -> WhatIfResult:
        asked = {**values, **machine, "cluster": one}
        if from_ is not None:
            return _priced_job(from_, set, asked, price, command)
        question = named_values.question_of(asked)
        (per_hour,) = named_values.prices_of(price, [question.cluster.name])
        return answered(question, **wanted, price_per_gpu_hour=per_hour, **told)

    if from_ is None and set is not None:
        raise UsageError("set is about the files of from_", got=repr(set), hint='what_if(from_="train.sh", set={...})')
    if from_ is not None:
        given = [name for name, value in values.items() if name != "cluster" and value not in (None, DEFAULT_SYSTEM)]
        searched += ["jobs"] if jobs != 1 else []
        if given or searched:
            hint = "leave these out: the files say them"
            raise UsageError("from_ is priced as it is", got=", ".join([*given, *searched]), hint=hint)
    if isinstance(cluster, str) and "," in cluster and not (is_datasheet(cluster) or os.path.exists(cluster)):
        hint = f"cluster={cluster.split(',')}"
        raise UsageError("several clusters are a list", got=repr(cluster), hint=hint)
    if not isinstance(cluster, list | tuple):
        return ask(cluster, price_per_gpu_hour)
    if searched:
        raise UsageError("not for several clusters at once", got=", ".join(searched), hint="name one cluster")
    names = list(map(os.fspath, cluster))
    check_clusters(names)
    known = [load_cluster(name)[0].name for name in names]
    prices = named_values.prices_of(price_per_gpu_hour, known)
    return ranked([ask(name, price) for name, price in zip(names, prices, strict=True)], prices=prices)


_SEARCHED = {"top": 10, "pareto": False, "one_more_gib": False}
"""What only a search of one cluster can answer, with its defaults."""


def _priced_job(
    files: object, given: Mapping[str, str | float] | None, values: Mapping[str, Any], price: object, command: str
) -> WhatIfResult:
    from memo_sim.answers.import_job import checked_given, question_of_files

    paths = _paths(files)
    plan, question = question_of_files(paths, checked_given(given or {}), values)
    (per_hour,) = named_values.prices_of(price, [question.cluster.name])
    return priced(plan, question, where=paths[0], price_per_gpu_hour=per_hour, command=command)


def check_clusters(names: Sequence[str]) -> None:
    """Refuse an empty list of clusters, and one that names a cluster twice.

    Raises:
        UsageError: naming them.
    """
    if not names:
        raise UsageError("a list of clusters is empty", wanted='cluster="h100-1x8", or several in a list')
    if len(dict.fromkeys(names)) < len(names):
        raise UsageError("a cluster is named twice", got=",".join(names), hint="name each once")


def ranked(found: Sequence[WhatIfResult], *, prices: Sequence[float | None]) -> ClustersResult:
    """Return the answers about several clusters in one, the best cluster first; ``prices``: as ``several_clusters``."""
    document = several_clusters([each.document for each in found], prices=prices)
    by_document = {id(each.document): each for each in found}
    return ClustersResult(document, [by_document[id(result)] for result in document.results])


@with_names_checked(others=OF_A_RUN)
def longest(
    model: PathLike | Model,
    *,
    cluster: PathLike | None = None,
    from_datasheet: str | None = None,
    step: int | str = "64k",
    max_step_s: float | None = None,
    system: str = DEFAULT_SYSTEM,
    device_memory_gib: float | None = None,
    host_memory_gib: float | None = None,
    safety_gib: float | None = None,
    power_w: float | None = None,
    one_more_gib: bool = False,
    price_per_gpu_hour: float | None = None,
    jobs: int = 1,
    progress: Progress | None = None,
    **knobs: Unpack[KnobsInALongRun],
) -> LongestResult:
    """Find the longest sequence that fits, to a multiple of ``step`` tokens, as ``memo-sim longest`` does.

    ``jobs`` processes share every search; the answer does not depend on their number.

    Raises:
        UsageError: as in ``what_if``.
        BadInput: when a file cannot be read.
    """
    parse_tokens(str(step), option="--step")
    values = {"model": model, "cluster": cluster, "seq_len": step, "system": system, **knobs}
    values |= {"device_memory_gib": device_memory_gib, "host_memory_gib": host_memory_gib, "safety_gib": safety_gib}
    values |= {"from_datasheet": from_datasheet, "power_w": power_w}
    question = named_values.question_of(values, fill=False)
    named = {("step" if name == "seq_len" else name): value for name, value in values.items()}
    return longest_of(
        question,
        step=step,
        max_step_s=max_step_s,
        one_more_gib=one_more_gib,
        price_per_gpu_hour=price_per_gpu_hour,
        jobs=jobs,
        progress=progress,
        command=_call("longest", named | {"max_step_s": max_step_s}),
    )


@with_names_checked(others=OF_A_RUN)
def gpus(
    model: PathLike | Model,
    *,
    seq_len: int | str,
    cluster: PathLike | Sequence[PathLike] | None = None,
    from_datasheet: str | None = None,
    within: float | str | None = None,
    most_gpus: int = gpus_answer.MOST_DEVICES,
    system: str = DEFAULT_SYSTEM,
    device_memory_gib: float | None = None,
    host_memory_gib: float | None = None,
    safety_gib: float | None = None,
    power_w: float | None = None,
    price_per_gpu_hour: Prices | None = None,
    jobs: int = 1,
    progress: Progress | None = None,
    **knobs: Unpack[KnobsInALongRun],
) -> GpusResult:
    """Find how many GPUs are needed, of which kind, and what they cost, as ``memo-sim gpus`` does.

    ``cluster`` has one or several kinds of GPU: ``"h100"``, ``"h100-ndr4"``, a cluster's name or file, a profile file;
    without one, a800, h100, h200 and b200 are compared. ``within`` is the time that a step may take, in seconds or as
    text such as ``"10m"``. ``jobs`` processes share every search; the answer does not depend on their number.
    ``progress`` receives (numbers of GPUs tried, most to try).

    Raises:
        UsageError: as in ``what_if``.
        BadInput: when a file cannot be read.
    """
    values = {"model": model, "seq_len": seq_len, "system": system, **knobs}
    values |= {"device_memory_gib": device_memory_gib, "host_memory_gib": host_memory_gib, "safety_gib": safety_gib}
    values |= {"power_w": power_w}
    kinds = load_gpu_kinds(None if cluster is None else _paths(cluster), from_datasheet)
    named = {"cluster": cluster, "from_datasheet": from_datasheet, "within": within}
    return gpus_of(
        [(kind, named_values.question_on(values, kind.cluster, kind.hardware, fill=False)) for kind in kinds],
        within=within,
        most_gpus=most_gpus,
        prices=named_values.prices_of(price_per_gpu_hour, [kind.name for kind in kinds]),
        jobs=jobs,
        progress=progress,
        command=_call("gpus", {**values, **named}),
    )


@overload
def oom(
    model: PathLike | Model,
    *,
    seq_len: int | str,
    cluster: PathLike | None = None,
    from_datasheet: str | None = None,
    system: str = DEFAULT_SYSTEM,
    device_memory_gib: float | None = None,
    host_memory_gib: float | None = None,
    safety_gib: float | None = None,
    power_w: float | None = None,
    progress: Progress | None = None,
    **knobs: Unpack[Knobs],
) -> OomResult: ...
@overload
def oom(model: WhatIfResult, *, progress: Progress | None = None) -> OomResult: ...
@overload
def oom(
    *,
    plan: Plan | PathLike,
    cluster: PathLike | None = None,
    from_datasheet: str | None = None,
    device_memory_gib: float | None = None,
    host_memory_gib: float | None = None,
    safety_gib: float | None = None,
    power_w: float | None = None,
    progress: Progress | None = None,
) -> OomResult: ...
@with_names_checked(others=ARGUMENTS)
def oom(
    model: PathLike | Model | WhatIfResult | None = None,
    *,
    seq_len: int | str | None = None,
    plan: Plan | PathLike | None = None,
    cluster: PathLike | None = None,
    from_datasheet: str | None = None,
    system: str = DEFAULT_SYSTEM,
    device_memory_gib: float | None = None,
    host_memory_gib: float | None = None,
    safety_gib: float | None = None,
    power_w: float | None = None,
    progress: Progress | None = None,
    **knobs: Unpack[Knobs],
) -> OomResult:
    """Say why a run is out of memory, and which single changes make it fit, as ``memo-sim oom`` does.

    The run is a question, as of ``what_if``, a plan, or an answer of ``what_if`` or ``simulate``. A plan is on the
    cluster that it names, unless another one is given. ``progress`` receives (changes evaluated, all).

    Raises:
        UsageError: as in ``what_if``.
        BadInput: when a file cannot be read.
        Infeasible: when no plan can be evaluated at all.
    """
    values = {"model": model, "seq_len": seq_len, "cluster": cluster, "from_datasheet": from_datasheet, **knobs}
    machine = {"device_memory_gib": device_memory_gib, "host_memory_gib": host_memory_gib, "safety_gib": safety_gib}
    machine |= {"power_w": power_w}
    if isinstance(model, WhatIfResult) or plan is not None:
        decided = {"system": None if system == DEFAULT_SYSTEM else system, **values, **machine}
        of_plan = plan is not None and not isinstance(model, WhatIfResult)
        allowed = ("cluster", "from_datasheet", *machine) if of_plan else ("model",)
        if given := [name for name, value in decided.items() if value is not None and name not in allowed]:
            hint = "leave these out, or ask about a model in its place"
            raise UsageError("the run is decided already", got=", ".join(given), hint=hint)
    command = _call("oom", {"model": model, "plan": plan, **values, **machine})
    if isinstance(model, WhatIfResult):
        return oom_of(model.question, model.given, progress=progress, command=model.command)
    if plan is None:
        question = named_values.question_of({**values, "system": system, **machine})
        return oom_of(question, None, progress=progress, command=command)
    document = plan if isinstance(plan, Plan) else load_plan(plan)
    there = {"cluster": cluster, "from_datasheet": from_datasheet, **machine}
    return oom_of(named_values.question_about(document, there), document, progress=progress, command=command)


def oom_of(question: Question, plan: Plan | None, *, progress: Progress | None = None, command: str = "") -> OomResult:
    """Return why a question, or a plan on its machine, is short of memory.

    Raises:
        UsageError, Infeasible: as ``oom``.
    """
    if plan is not None:
        decisions, changes = kernels_elsewhere(question, plan.decisions)
        asked = question_of_plan(decisions, question.cluster, question.hardware, system=plan.provenance.system)
        question = replace(asked, changes=changes)
    return OomResult(shortage_answer.shortage(question, of_plan=plan is not None, progress=progress), command)


@with_names_checked()
def explain(
    explained: PathLike | Plan | Result | WhatIfResult,
    *,
    cluster: PathLike | None = None,
    progress: Progress | None = None,
) -> ExplainResult:
    """Say what binds a plan, what would help most and by how much, and why rivals lose, as ``memo-sim explain`` does.

    ``explained`` is a plan, a result or an answer of ``what_if``, or a file. ``progress`` receives (simulations done,
    all).

    Raises:
        UsageError: when the cluster is not known, or no plan of the result fits.
        BadInput: when a file cannot be read, or the plan does not fit the cluster.
        Infeasible: when no plan of an answer fits.
    """
    named = None if cluster is None else os.fspath(cluster)
    if isinstance(explained, WhatIfResult) and named is None:
        given, system = explained.as_given("the plan"), explained.question.system
        rows = explained.plans if explained.given is None else None
        return ExplainResult(explanation_answer.explain_given(given, system, rows, progress=progress))
    asked = explained.plan if isinstance(explained, WhatIfResult) else explained
    asked = Path(asked) if isinstance(asked, os.PathLike) else asked
    return ExplainResult(explanation_answer.explain(asked, cluster=named, progress=progress))


@with_names_checked()
def export(
    plan: PathLike | Plan | WhatIfResult,
    *,
    to: FrameworkName,
    directory: PathLike | None = None,
    cluster: PathLike | None = None,
    launcher: Launcher = "torchrun",
) -> ExportResult:
    """Make the files by which another framework runs a plan, and say what is lost, as ``memo-sim export`` does.

    With ``directory``, a new or empty folder, they are written there. Where the plan does not fit as the framework
    would run it, the result's ``fits`` is False.

    Raises:
        UsageError: when a name is wrong, the plan's cluster is not known, or the folder cannot be written.
        BadInput: when a file cannot be read.
        Infeasible: when the framework can run nothing near to the plan, or no plan of an answer fits.
    """
    from memo_sim.answers.export_plan import export_plan
    from memo_sim.answers.given_plan import cluster_of_plan
    from memo_sim.interchange.frameworks import find_framework

    folder = None if directory is None else Path(directory)
    if folder is not None:
        codec.check_new_folder(folder)
    asked = "" if cluster is None else os.fspath(cluster)
    if isinstance(plan, WhatIfResult):
        document, machine = plan.plan, (plan.question.cluster, plan.question.hardware)
    else:
        document = plan if isinstance(plan, Plan) else load_plan(plan)
        named = "the plan" if isinstance(plan, Plan) else os.fspath(plan)
        if not asked:
            machine = cluster_of_plan(document.provenance.cluster, named)
    if asked:
        machine = load_cluster(asked)
    made = export_plan(document, find_framework(to), *machine, launcher, asked=asked)
    if folder is not None:
        codec.write_folder(folder, made.files)
    return ExportResult(made, folder)


@with_names_checked()
def import_job(
    files: PathLike | Sequence[PathLike],
    *,
    cluster: PathLike | None = None,
    framework: ReadFrameworkName | None = None,
    set: Mapping[str, str | float] | None = None,
    search: bool = True,
    progress: Progress | None = None,
) -> ImportResult:
    """Read a job of another framework: what it says, costs, and what would be better, as ``memo-sim import`` does.

    ``files`` is its script or configuration, several of them, or its command as text. ``set`` gives values that the
    files leave open. Costs, and with ``search`` better plans, need ``cluster``. ``what_if(from_=files)`` prices the job
    as a plan.

    Raises:
        UsageError: when a name or a value is wrong, or the job needs more devices than there are.
        BadInput: when a file cannot be read, is no framework's, or does not say what memo needs.
        Infeasible: when no plan can have the job's decisions.
    """
    from memo_sim.answers.import_job import checked_given
    from memo_sim.answers.import_job import import_job as imported

    machine = None if cluster is None else load_cluster(os.fspath(cluster))
    given = checked_given(set or {})
    asked: dict[str, Any] = {"framework": framework, "machine": machine, "search": search, "progress": progress}
    return ImportResult(imported(_paths(files), given, **asked))


@with_names_checked()
def doctor(
    *,
    trace: PathLike | None = None,
    memory: PathLike | None = None,
    cluster: PathLike | None = None,
    config: PathLike | Sequence[PathLike] | None = None,
    framework: ReadFrameworkName | None = None,
    set: Mapping[str, str | float] | None = None,
    search: bool = True,
    nccl_tests: PathLike | Sequence[PathLike] = (),
    nvbandwidth: PathLike | None = None,
    progress: Progress | None = None,
) -> DoctorResult:
    """Hold a recorded step of your own job against a profile, as ``memo-sim doctor`` does.

    ``trace`` is a PyTorch profiler trace with shapes, or a folder with one of each rank; ``memory`` a memory snapshot
    of the same job; ``nccl_tests`` and ``nvbandwidth`` outputs of these programs. ``config`` is the job's script or
    configuration, which is priced with the measured rates; ``framework``, ``set`` and ``search`` as in ``import_job``.
    ``progress`` receives (plans done, all) of that.

    Raises:
        UsageError: when nothing is given, or no profile is known for the trace's device.
        BadInput: when a file is not what it should be.
    """
    from memo_sim.answers.doctor import OwnJob, diagnose
    from memo_sim.answers.import_job import checked_given

    job = None
    if config is not None:
        job = OwnJob(_paths(config), checked_given(set or {}), framework=framework, search=search)
    elif framework is not None or set is not None or not search:
        raise UsageError("these are about the files of a job", got="framework, set or search", wanted="config=FILE")
    files = {"trace": trace, "memory": memory, "cluster": cluster, "nvbandwidth": nvbandwidth}
    named = {name: None if path is None else os.fspath(path) for name, path in files.items()}
    return DoctorResult(diagnose(**named, nccl_tests=_paths(nccl_tests), job=job, progress=progress))


def _paths(given: Any) -> list[str]:
    """Return one path, or the paths of a list, as text."""
    return list(map(os.fspath, given)) if isinstance(given, list | tuple) else [os.fspath(given)]


@with_names_checked(others=OF_A_LONG_RUN)
def simulate(
    plan: Plan | PathLike,
    *,
    cluster: PathLike | None = None,
    device_memory_gib: float | None = None,
    host_memory_gib: float | None = None,
    safety_gib: float | None = None,
    power_w: float | None = None,
    price_per_gpu_hour: float | None = None,
    attention: str | None = None,
    rowwise: str | None = None,
    **long_run: Unpack[LongRun],
) -> WhatIfResult:
    """Play a plan that you already have, as ``memo-sim what-if --plan`` does.

    Without ``cluster`` it is the one that the plan names as its own. ``attention`` and ``rowwise`` are kernels in place
    of the plan's; kernels that the machine's profile has no rates of are replaced, and the summary says so.

    Raises:
        UsageError: when a value is wrong, or the plan names no cluster that can be found.
        BadInput: when a file cannot be read, or the plan cannot be played.
    """
    document = plan if isinstance(plan, Plan) else load_plan(plan)
    values: dict[str, Any] = {"cluster": cluster, "power_w": power_w, "attention": attention, "rowwise": rowwise}
    values |= long_run
    values |= {"device_memory_gib": device_memory_gib, "host_memory_gib": host_memory_gib, "safety_gib": safety_gib}
    question = named_values.question_about(document, values)
    call = _call("simulate", {"plan": plan, **values})
    return priced(document, question, where=plan, price_per_gpu_hour=price_per_gpu_hour, command=call)


@with_names_checked()
def load_plan(path: PathLike) -> Plan:
    """Return the plan in a file; plans of earlier versions are read too.

    Raises:
        BadInput: when the file cannot be read or does not hold a plan.
    """
    return codec.read(path if isinstance(path, str) else Path(path), Plan)


@with_names_checked()
def plan_memory(
    path: PathLike,
    *,
    solver: Solver = "portfolio",
    time_limit: float = 60.0,
    device: int | None = None,
    device_memory_gib: float | None = None,
) -> MemoryResult:
    """Place every buffer of a file in one arena, as ``memo-sim plan-memory`` does.

    The file is a plan, memo.requests/1, a CSV, a log of malloc and free lines, or a PyTorch memory snapshot.
    ``time_limit`` is in seconds; ``device_memory_gib`` is what PyTorch's caching allocator may reserve.

    Raises:
        UsageError: for an unknown solver, or a device that is not there.
        BadInput: when the file holds no requests that can be read.
    """
    named_values.number("time_limit", time_limit, *SECONDS)
    capacity_bytes = named_values.bytes_of("device_memory_gib", device_memory_gib)
    made = memory_answer.plan_memory(
        os.fspath(path), solver=solver, time_limit_s=time_limit, device=device, capacity_bytes=capacity_bytes
    )
    return MemoryResult(made)


@with_names_checked()
def compare(
    *compared: PathLike | WhatIfResult | Plan | Result | Comparison | Trace,
    cluster: PathLike | None = None,
    progress: Progress | None = None,
) -> CompareResult:
    """Say what differs between plans, answers and measured runs, as ``memo-sim compare`` does.

    Each is a file, a document, or an answer of ``what_if`` or ``simulate`` (its best plan, as it was simulated). A plan
    without its trace beside it is simulated on ``cluster``, or on the cluster that it names.

    Raises:
        UsageError: with fewer than two of them, or when a plan's cluster is not known.
        BadInput: when a file cannot be read, or a plan does not fit.
        Infeasible: when no plan of an answer fits.
    """
    sides: list[str | Path | difference_answer.Compared] = []
    for number, one in enumerate(compared, start=1):
        match one:
            case WhatIfResult():
                sides.append(one.as_given(f"number {number}") if cluster is None else one.plan)
            case os.PathLike():
                sides.append(Path(one))
            case _:
                sides.append(one)
    named = None if cluster is None else os.fspath(cluster)
    called = ", ".join(repr(os.fspath(one)) if isinstance(one, str | os.PathLike) else "..." for one in compared)
    made = difference_answer.compare(sides, cluster=named, progress=progress)
    return CompareResult(made, one_line(f"memo_sim.compare({called})"))


@with_names_checked()
def sweep(
    questions: Iterable[Mapping[str, Any]],
    path: PathLike | None = None,
    *,
    executor: Executor | None = None,
    jobs: int | None = None,
    progress: Progress | None = None,
) -> SweepResult:
    """Answer many questions, each a mapping of the arguments of ``what_if``; ``grid`` makes them.

    Answers go to ``path`` (JSON lines) as they come; a question that the file has an answer to is not asked again.
    ``jobs`` processes share the questions, by default one for each CPU; ``executor`` takes them instead: any
    ``concurrent.futures.Executor``, such as dask's. ``progress`` receives (questions done, all).

    Raises:
        UsageError: when a value of a question is wrong, before anything is asked; or another sweep writes the file.
        BadInput: when a file cannot be read, or ``path`` holds something else than answers.
        CannotRun: when the executor takes no more questions.
    """
    file = None if path is None else Path(path)
    return SweepResult(sweep_answer.sweep(questions, file, executor=executor, jobs=jobs, progress=progress))


def grid(**values: Any) -> list[dict[str, Any]]:
    """Return a question for every combination of the values that are lists.

    The names are those of ``what_if``, for example ``grid(model="llama3-8b", cluster=["h100-1x8", "a800-1x8"],
    seq_len=["64k", "128k"], tp=[4, 8])``.

    Raises:
        UsageError: when a name is wrong.
    """
    named_values.check_names(values)
    return sweep_answer.grid(**values)


@with_names_checked()
def load_sweep(*paths: PathLike) -> SweepResult:
    """Return the answers in files of sweeps; of several answers to one question the last one counts.

    Raises:
        BadInput: when a file cannot be read or holds something else.
    """
    lines = [line for path in paths for line in sweep_file.read_lines(Path(path))]
    return SweepResult(list({line.key: line for line in lines}.values()))


@with_names_checked()
def validate(
    cases: PathLike,
    *,
    source: str | None = None,
    system: str | None = None,
    jobs: int = 1,
    progress: Progress | None = None,
) -> ValidationResult:
    """Predict published cases and compare them with what was measured, as ``memo-sim validate`` does.

    ``cases`` is a bundled file's name (``memo-table5``) or a CSV file; ``source`` and ``system`` choose rows of it.
    ``jobs`` processes share the cases. ``progress`` receives (cases done, all).

    Raises:
        BadInput: when the file cannot be read, or a row is wrong.
        UsageError: when no row is left, or ``jobs`` is none.
        Infeasible: when no row can be evaluated.
    """
    from memo_sim.validation.cases import load_cases
    from memo_sim.validation.validate import check_evaluated
    from memo_sim.validation.validate import validate as predicted

    if jobs < 1:
        raise UsageError("not a number of processes", got=jobs, wanted="from 1")
    known = load_cases(os.fspath(cases))
    rows = [c for c in known if source in (None, c.source) and system in (None, c.question.system)]
    if not rows:
        raise UsageError("no such rows", got=f"source {source}, system {system}", hint=f"see the columns of {cases}")
    found = predicted(rows, progress=progress, jobs=jobs)
    check_evaluated(found)
    return ValidationResult(found, _call("validate", {"cases": cases, "source": source, "system": system}))


def longest_of(
    question: Question,
    *,
    step: int | str,
    max_step_s: float | None = None,
    one_more_gib: bool = False,
    price_per_gpu_hour: float | None = None,
    jobs: int = 1,
    progress: Progress | None = None,
    command: str = "",
) -> LongestResult:
    """Return the longest sequence of a question, whose own length does not matter.

    Raises:
        UsageError: when the step is wrong, or pinned knobs contradict each other or the cluster.
    """
    tokens = parse_tokens(str(step), option="--step")
    named_values.number("max_step_s", max_step_s, *SECONDS)
    named_values.number("price_per_gpu_hour", price_per_gpu_hour, *named_values.PRICES)
    limits = {"most_step_s": max_step_s, "price_per_device_hour": price_per_gpu_hour}
    with processes(jobs):
        found = longest_answer.longest(question, step_tokens=tokens, **limits, progress=progress)
        if one_more_gib:
            found = more_memory.with_what_more_holds(question, found, step_tokens=tokens, most_step_s=max_step_s)
    if found.answer is None:
        return LongestResult(found.document, None, command)
    answer = WhatIfResult(found.question, found.answer.result, found.answer, command)
    return LongestResult(found.document, answer, command)


def gpus_of(
    questions: Sequence[tuple[GpuKind, Question]],
    *,
    within: float | str | None = None,
    most_gpus: int = gpus_answer.MOST_DEVICES,
    prices: Sequence[float | None] = (),
    jobs: int = 1,
    progress: Progress | None = None,
    command: str = "",
) -> GpusResult:
    """Return how many GPUs of each kind a question needs; ``within`` and ``prices`` as in ``gpus``, one for each kind.

    Raises:
        UsageError: when a value is wrong, or pinned knobs contradict each other on every number.
    """
    if most_gpus < 1:
        raise UsageError("not a number of GPUs", got=most_gpus, wanted="from 1")
    text = parse_duration(within, option="--within") if isinstance(within, str) else within
    limits: dict[str, Any] = {"within_s": named_values.number("within", text, *SECONDS), "most_devices": most_gpus}
    with processes(jobs):
        found = gpus_answer.gpus(questions, **limits, prices=prices, progress=progress)
    if found.answer is None or found.question is None:
        return GpusResult(found.document, None, command)
    answer = WhatIfResult(found.question, found.answer.result, found.answer, command)
    return GpusResult(found.document, answer, command)


def _call(function: str, values: Mapping[str, object]) -> str:
    """Return the call as a plan's file names what made it, without the values that were not given."""
    shown = {name: _named(value) for name, value in values.items()}
    plain = {n: str(v) if isinstance(v, os.PathLike) else v for n, v in shown.items() if v is not None}
    given = {n: v for n, v in plain.items() if v is not False and (n, v) != ("system", DEFAULT_SYSTEM)}
    return one_line(f"memo_sim.{function}({', '.join(f'{name}={value!r}' for name, value in given.items())})")


def _named(value: object) -> object:
    """Return a name for a document."""
    if isinstance(value, Plan):
        return f"plan {value.program_sha256[:12]}"
    return value.name if isinstance(value, Model) else value
