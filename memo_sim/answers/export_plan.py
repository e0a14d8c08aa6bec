"""Hands a plan to another framework: the files that run it, what is lost, and what that costs by memo's prediction."""

from __future__ import annotations

import shlex
from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace

import msgspec

import memo_sim
from memo_sim.answers.summary import device_memory
from memo_sim.answers.what_if import price, row
from memo_sim.contract.adapters import NONE
from memo_sim.contract.cluster import Cluster
from memo_sim.contract.codec import encode
from memo_sim.contract.errors import Infeasible, MemoError, UsageError
from memo_sim.contract.hardware import Hardware
from memo_sim.contract.interchange import Export, Launcher, LostDecision, OwnDecision
from memo_sim.contract.knobs import KNOBS
from memo_sim.contract.plain_text import one_line
from memo_sim.contract.plan import Decisions, Plan, Prediction
from memo_sim.contract.summary import DeviceMemory
from memo_sim.contract.units import format_tokens
from memo_sim.interchange.framework import Framework
from memo_sim.interchange.job import Job, part_of
from memo_sim.interchange.launch import launch_of
from memo_sim.interchange.memory_fraction import fraction_of
from memo_sim.interchange.model_names import preset_of_shape
from memo_sim.interchange.plan_paths import differences, plan_paths, value_at
from memo_sim.interchange.reasons import option_of, reason
from memo_sim.planning.allocator_limits import may_gain, with_best_limit
from memo_sim.planning.outcome import Evaluated
from memo_sim.planning.presets import Policy, known_system
from memo_sim.planning.question import Question
from memo_sim.planning.search import play, predict
from memo_sim.views.export_page import lost_page

LOST_PAGE = "lost.md"
PLAN_FILE = "plan.json"
MODEL_CONFIG = "config.json"
MODEL_FILE = "memo_model.json"
"""The plan's model, where it is no preset."""


@dataclass(frozen=True)
class Exported:
    """The document, and the files by their names in the folder."""

    document: Export
    files: dict[str, bytes]
    search: str
    """The command that finds a plan which the framework can run whole; its model may be ``MODEL_FILE``."""

    def search_command(self, folder: str) -> str:
        """Return ``search`` for the files in ``folder``."""
        path = shlex.quote(f"{folder}/{MODEL_FILE}")
        return self.search.replace(f"what-if {MODEL_FILE}", f"what-if {path}", 1)

    @property
    def fits(self) -> bool:
        """Whether the plan fits as the framework would run it."""
        return self.document.there.status == "ok"


@dataclass(frozen=True)
class _There:
    """A job as the framework would run it, predicted, and the memory of its fullest stage."""

    job: Job
    priced: Job
    """The job as it is priced (``Framework.priced``)."""
    system: str
    """The preset that predicts it."""
    decisions: Decisions
    prediction: Prediction
    memory: DeviceMemory

    @property
    def order(self) -> tuple[bool, float]:
        """Plans that fit first, by their step; of the others the one that is nearest to fitting."""
        fits = self.prediction.status == "ok"
        return not fits, self.prediction.step_s or 0.0 if fits else float(self.prediction.missing_bytes)


def export_plan(
    plan: Plan,
    framework: Framework,
    cluster: Cluster,
    hardware: Hardware,
    launcher: Launcher = "torchrun",
    *,
    asked: str = "",
) -> Exported:
    """Return the files by which ``framework`` runs ``plan``, or what comes nearest to it, on a cluster.

    ``asked``: how the cluster was named, for commands that name it again.

    Raises:
        Infeasible: when the framework can run nothing near to it.
        UsageError: when the plan does not fit on the cluster's devices, or trains adapters that the framework
            has no options of.
    """
    decisions = plan.decisions
    if decisions.lora is not None and framework.sayings["decisions.adapters"].how == "none":
        raise UsageError(
            f"memo writes no job of {framework.title} that trains adapters",
            where="$.decisions.adapters",
            got=decisions.adapters,
            wanted=NONE,
            hint="--to trl, or memo-exec run, which trains them and writes a folder that PEFT reads",
        )
    part_of(cluster, decisions.layout.devices)
    named, preset = asked or cluster.name, preset_of_shape(decisions.model)
    there = _nearest(decisions, framework, cluster, hardware, named)
    layout = there.decisions.layout
    fraction = fraction_of(there.decisions, there.memory.reserve_bytes, hardware.device_memory_bytes.value)
    launch = launch_of(layout.devices, cluster.devices_per_node, launcher, fraction)
    where = f"{layout.devices} devices of {one_line(cluster.name)}"
    header = (
        f"Written by memo {memo_sim.__version__} for {framework.version}.",
        f"Plan: {one_line(decisions.model.name)}, {decisions.seq_tokens} tokens, {where}.",
        f"Its program: {plan.program_sha256[:16]}. What is lost: {LOST_PAGE}.",
    )
    written = framework.files(there.job, launch, header) | framework.beside(decisions, there.job, launch, header)
    question = Question(
        model=decisions.model,
        cluster=cluster,
        hardware=hardware,
        seq_tokens=decisions.seq_tokens,
        system=known_system(plan.provenance.system),
    )
    priced = price(plan, question).result
    document = Export(
        framework=framework.title,
        version=framework.version,
        system=there.system,
        cluster=cluster.name,
        files=[*written, *([] if preset else [MODEL_FILE]), LOST_PAGE, PLAN_FILE],
        lost=_lost(decisions, there.decisions, framework),
        own=_own(decisions, there.decisions, framework),
        notes=[*_positions(decisions, written), *_sentences(framework.own_operators(there.job))],
        plan=priced.plans[0],
        there=row(there.decisions, there.prediction, system=there.system),
        plan_memory=priced.summary.device_memory if priced.summary else None,
        there_memory=there.memory,
    )
    files = {name: text.encode() for name, text in written.items()}
    files[LOST_PAGE] = lost_page(document).encode()
    files[PLAN_FILE] = encode(plan)
    if not preset:
        files[MODEL_FILE] = encode(decisions.model)
    return Exported(document, files, search_line(decisions, there.system, named, preset or MODEL_FILE))


def search_line(decisions: Decisions, system: str, cluster: str, model: str) -> str:
    """Return the command line that searches a plan of a system for a plan's question."""
    asked = f"--cluster {shlex.quote(cluster)} --seq-len {format_tokens(decisions.seq_tokens)}"
    asked += f" --global-batch {decisions.global_batch} --micro-batch {decisions.micro_batch}"
    asked += "".join(f" {option} {shlex.quote(value)}" for option, value in _trained(decisions).items())
    return f"memo-sim what-if {model} {asked} --system {system} -o plan.json"


def _trained(decisions: Decisions) -> dict[str, str]:
    """Return the options, with their values, without which the same question would train something else."""
    given = {"adapters": decisions.adapters, "objective": decisions.objective, "fp8": decisions.fp8}
    options = {KNOBS[name].option: value for name, value in given.items() if value != KNOBS[name].default}
    if decisions.documents is not None:
        options[KNOBS["documents"].option] = str(decisions.documents)
    return options


def _sentences(texts: Sequence[str]) -> list[str]:
    return [f"{text[:1].upper()}{text[1:]}." for text in texts]


def _check_written(decisions: Decisions, framework: Framework) -> None:
    """Refuse a plan with something that no file of the framework can say.

    Raises:
        UsageError: naming it.
    """
    own = "memo-exec runs the plan itself"
    if decisions.documents and framework.sayings["decisions.documents"].how == "none":
        raise UsageError(
            f"memo writes no options of packed documents for {framework.title}",
            where="decisions.documents",
            got=decisions.documents.source or "documents",
            wanted="a plan without documents, or a framework that packs them",
            hint=f"--to trl, or {own}",
        )
    if decisions.objective != "next-token":
        raise UsageError(
            "memo writes jobs with the objective next-token alone",
            where="decisions.objective",
            got=decisions.objective,
            wanted="next-token",
            hint=f"{own}, on given rollouts",
        )


def _nearest(decisions: Decisions, framework: Framework, cluster: Cluster, hardware: Hardware, named: str) -> _There:
    """Return the fastest of the nearest jobs that fits, or the one that is nearest to fitting; equal ones first."""
    _check_written(decisions, framework)
    found, refused = list[_There](), list[MemoError]()
    for job in _limited(framework.jobs(decisions), decisions.allocator_limit_gib):
        system, priced = framework.predicted_by(job), framework.priced(job)
        question = priced.question(cluster, hardware, system)
        try:
            own = priced.decisions(cluster, hardware, system)
        except (Infeasible, UsageError) as error:
            refused.append(error)
            continue
        played = play(question, own)
        one = _There(
            job, priced, system, own, played.prediction, device_memory(played, played.prediction, planned_arena=False)
        )
        if own == decisions:
            return one
        found.append(one)
    if not found:
        first, preset = refused[0], preset_of_shape(decisions.model)
        searched = search_line(decisions, system, named, preset) if preset else f"--system {system}"
        raise Infeasible(
            f"{framework.title} can run nothing that comes near to this plan",
            where=first.where,
            got=f"{first.what}: {first.got}" if first.got else first.what,
            wanted=first.wanted,
            hint=f"search a plan that it can run: {searched}",
        )
    return _with_best_limit(min(found, key=lambda there: there.order), cluster, hardware)


def _limited(jobs: Sequence[Job], limit_gib: int) -> list[Job]:
    """Return the jobs with the plan's limit of PyTorch's allocator, then without it."""
    limited = [replace(job, pins=replace(job.pins, allocator_limit_gib=limit_gib)) for job in jobs] if limit_gib else []
    return [*limited, *jobs]


def _with_best_limit(there: _There, cluster: Cluster, hardware: Hardware) -> _There:
    """Return a job under the limit of PyTorch's allocator that makes it faster, or makes it fit."""
    capacity_bytes = hardware.device_memory_bytes.value
    one = Evaluated(Policy.of(there.decisions), there.decisions, there.prediction)
    if there.decisions.allocator_limit_gib or not may_gain(one, capacity_bytes):
        return there
    question = there.priced.question(cluster, hardware, there.system)
    best = with_best_limit(one, lambda own: predict(question, own), capacity_bytes=capacity_bytes)
    played = play(question, best.decisions)
    memory = device_memory(played, played.prediction, planned_arena=False)
    return replace(there, decisions=best.decisions, prediction=played.prediction, memory=memory)


def _lost(decisions: Decisions, there: Decisions, framework: Framework) -> list[LostDecision]:
    return [
        LostDecision(
            path=path,
            wanted=_shown(decisions, path),
            instead=_shown(there, path),
            why=reason(framework.sayings[path], path, decisions, there),
            option=option_of(path),
        )
        for path in differences(decisions, there)
        if not (_has_no_effect(decisions, path) and _has_no_effect(there, path))
    ]


def _own(decisions: Decisions, there: Decisions, framework: Framework) -> list[OwnDecision]:
    """Return the decisions that are alike in the prediction, but that no option of the framework pins."""
    changed = differences(decisions, there)
    same = [path for path in plan_paths() if path not in changed]
    return [
        OwnDecision(path=path, value=_shown(decisions, path), why=framework.sayings[path].lost, option=option_of(path))
        for path in same
        if not _has_no_effect(decisions, path)
        if framework.sayings[path].how in ("near", "none", "own")
        and framework.sayings[path].lost
        and not _is_default(decisions, path)
    ]


def _positions(decisions: Decisions, files: Collection[str]) -> list[str]:
    """Return that the model's file allows more positions than weights may have been trained on."""
    model = decisions.model
    if MODEL_CONFIG not in files or model.learned_positions or model.rope_scaling is not None:
        return []
    text = f"{MODEL_CONFIG} allows {decisions.seq_tokens} positions, and its rope_scaling is null: weights that were"
    text += " trained on shorter sequences need rope_scaling, a larger rope_theta, or training at this length."
    return [f"{text} The prediction is the same."]


def _has_no_effect(decisions: Decisions, path: str) -> bool:
    """Return whether the decision is about something that the plan does not have: stages, METP, subsequences."""
    knob = KNOBS.get(path.rpartition(".")[2])
    need = KNOBS[knob.needs] if knob is not None and knob.needs else _NEEDS.get(path)
    return need is not None and _is_default(decisions, need.path)


_NEEDS = {"layout.overlap_p2p": KNOBS["pp"]}
"""What decisions need that no option of a question names."""


def _is_default(decisions: Decisions, path: str) -> bool:
    plain = Decisions(model=decisions.model, seq_tokens=decisions.seq_tokens)
    return bool(value_at(decisions, path) == value_at(plain, path))


def _shown(decisions: Decisions, path: str) -> str:
    """Return a decision's value as its option has it."""
    if path == "decisions.swapped_tokens":
        return f"{decisions.alpha:.4g}"
    return in_words(value_at(decisions, path))


def in_words(value: object) -> str:
    """Return a decision's value as a plan file has it."""
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, msgspec.Struct):
        return msgspec.json.encode(value).decode()
    if isinstance(value, tuple):
        return ", ".join(map(str, value)) or "equal"
    return "none" if value is None else str(value)
