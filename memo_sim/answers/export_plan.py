"""Hands a plan to another framework: the files that run it, what is lost, and what that costs by memo's prediction."""

from __future__ import annotations

import shlex
from dataclasses import dataclass

import msgspec

import memo_sim
from memo_sim.answers.what_if import price, row
from memo_sim.contract.cluster import Cluster
from memo_sim.contract.codec import encode
from memo_sim.contract.errors import Infeasible, MemoError, UsageError
from memo_sim.contract.hardware import Hardware
from memo_sim.contract.interchange import Export, LostDecision, OwnDecision
from memo_sim.contract.knobs import KNOBS
from memo_sim.contract.plain_text import one_line
from memo_sim.contract.plan import Decisions, Plan, Prediction
from memo_sim.contract.units import format_tokens
from memo_sim.interchange.framework import Framework
from memo_sim.interchange.job import Job, part_of
from memo_sim.interchange.launch import Launcher, launch_of
from memo_sim.interchange.plan_paths import differences, plan_paths, value_at
from memo_sim.planning.presets import known_system
from memo_sim.planning.question import Question
from memo_sim.planning.search import play
from memo_sim.views.export_page import lost_page

LOST_PAGE = "lost.md"
PLAN_FILE = "plan.json"


@dataclass(frozen=True)
class Exported:
    """The document, and the files by their names in the folder."""

    document: Export
    files: dict[str, bytes]
    search_command: str
    """What finds a plan that the framework can run whole."""

    @property
    def fits(self) -> bool:
        """Whether the plan fits as the framework would run it."""
        return self.document.there.status == "ok"


@dataclass(frozen=True)
class _There:
    """A job as the framework would run it, predicted."""

    job: Job
    decisions: Decisions
    prediction: Prediction

    @property
    def order(self) -> tuple[bool, float]:
        """Plans that fit first, by their step; of the others the one that is nearest to fitting."""
        fits = self.prediction.status == "ok"
        return not fits, self.prediction.step_s or 0.0 if fits else float(self.prediction.shortfall_bytes)


def export_plan(
    plan: Plan, framework: Framework, cluster: Cluster, hardware: Hardware, launcher: Launcher = "torchrun"
) -> Exported:
    """Return the files by which ``framework`` runs ``plan``, or what comes nearest to it, on a cluster.

    Raises:
        Infeasible: when the framework can run nothing near to it.
        UsageError: when the plan does not fit on the cluster's devices.
    """
    decisions = plan.decisions
    part_of(cluster, decisions.layout.devices)
    there = _nearest(decisions, framework, cluster, hardware)
    layout = there.decisions.layout
    launch = launch_of(layout.devices, cluster.devices_per_node, launcher)
    where = f"{layout.devices} devices of {one_line(cluster.name)}"
    header = (
        f"Written by memo {memo_sim.__version__} for {framework.version}.",
        f"Plan: {one_line(decisions.model.name)}, {decisions.seq_tokens} tokens, {where}.",
        f"Its program: {plan.program_sha256[:16]}. What is lost: {LOST_PAGE}.",
    )
    written = framework.files(there.job, launch, header)
    question = Question(
        model=decisions.model,
        cluster=cluster,
        hardware=hardware,
        seq_tokens=decisions.seq_tokens,
        system=known_system(plan.provenance.system),
    )
    document = Export(
        framework=framework.title,
        version=framework.version,
        system=framework.system,
        cluster=cluster.name,
        files=[*written, LOST_PAGE, PLAN_FILE],
        lost=_lost(decisions, there.decisions, framework),
        own=_own(decisions, there.decisions, framework),
        plan=price(plan, question).result.plans[0],
        there=row(there.decisions, there.prediction, system=framework.system),
    )
    files = {name: text.encode() for name, text in written.items()}
    files[LOST_PAGE] = lost_page(document).encode()
    files[PLAN_FILE] = encode(plan)
    return Exported(document, files, search_command(decisions, framework, cluster))


def search_command(decisions: Decisions, framework: Framework, cluster: Cluster) -> str:
    """Return the command line that searches a plan of the framework for the same question.

    A search would find a limit of PyTorch's allocator again, which no framework has an option for.
    """
    asked = f"--cluster {shlex.quote(cluster.name)} --seq-len {format_tokens(decisions.seq_tokens)}"
    asked += f" --global-batch {decisions.global_batch} --micro-batch {decisions.micro_batch}"
    whole = " --allocator-limit-gib 0" if decisions.allocator_limit_gib else ""
    model = shlex.quote(decisions.model.name)
    return f"memo-sim what-if {model} {asked} --system {framework.system}{whole} -o plan.json"


def _nearest(decisions: Decisions, framework: Framework, cluster: Cluster, hardware: Hardware) -> _There:
    """Return the fastest of the nearest jobs that fits, or the one that is nearest to fitting; equal ones first."""
    found, refused = list[_There](), list[MemoError]()
    if decisions.model.mixture:
        raise UsageError(
            "memo writes no framework's options of experts",
            where="model.experts",
            got=decisions.model.name,
            wanted="a model without experts",
            hint="memo-exec runs the plan itself",
        )
    for job in framework.jobs(decisions):
        question = job.question(cluster, hardware, framework.system)
        try:
            own = job.decisions(cluster, hardware, framework.system)
        except (Infeasible, UsageError) as error:
            refused.append(error)
            continue
        one = _There(job, own, play(question, own).prediction)
        if own == decisions:
            return one
        found.append(one)
    if not found:
        first = refused[0]
        raise Infeasible(
            f"{framework.title} can run nothing that comes near to this plan",
            where=first.where,
            got=f"{first.what}: {first.got}" if first.got else first.what,
            wanted=first.wanted,
            hint=f"search a plan that it can run: {search_command(decisions, framework, cluster)}",
        )
    return min(found, key=lambda there: there.order)


def _lost(decisions: Decisions, there: Decisions, framework: Framework) -> list[LostDecision]:
    return [
        LostDecision(
            path=path,
            wanted=in_words(value_at(decisions, path)),
            instead=in_words(value_at(there, path)),
            why=framework.sayings[path].lost,
        )
        for path in differences(decisions, there)
        if not (_has_no_effect(decisions, path) and _has_no_effect(there, path))
    ]


def _own(decisions: Decisions, there: Decisions, framework: Framework) -> list[OwnDecision]:
    """Return the decisions that are alike in the prediction, but that no option of the framework pins."""
    same = [path for path in plan_paths() if path not in differences(decisions, there)]
    return [
        OwnDecision(path=path, value=in_words(value_at(decisions, path)), why=framework.sayings[path].lost)
        for path in same
        if not _has_no_effect(decisions, path)
        if framework.sayings[path].how in ("near", "none", "own")
        and framework.sayings[path].lost
        and not _is_default(decisions, path)
    ]


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


def in_words(value: object) -> str:
    """Return a decision's value as a plan file has it."""
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, msgspec.Struct):
        return msgspec.json.encode(value).decode()
    if isinstance(value, tuple):
        return ", ".join(map(str, value)) or "equal"
    return "none" if value is None else str(value)
