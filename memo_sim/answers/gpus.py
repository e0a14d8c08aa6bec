"""Answers how many GPUs of which kind a question needs, and what it costs.

Numbers of devices are 1, 2, 4 ... a node, and then nodes, doubling. For each kind they are tried in this order:

- fits: from the smallest number on, until a plan fits. Small numbers that cannot hold the states are refuted by lower
  bounds within a second, so no number is skipped.
- cheapest: from there on as long as twice the devices take fewer GPU-hours a step. Memory that is short costs recompute
  and copies, so the smallest number that fits is often not the cheapest.
- within: numbers that would be too slow at 100 % MFU are skipped; of the others the first is taken whose step is short
  enough. The search ends where twice the devices no longer gain ``LEAST_GAIN``.

All numbers and kinds are asked for the same batch, so their steps and prices compare. A part of a node has that part of
the node's host memory: half of a rented node does not bring all of it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from math import inf

import msgspec

from memo_sim.answers.several_clusters import without_price
from memo_sim.answers.summary import PART_OF_NODE
from memo_sim.answers.what_if import Answer, what_if
from memo_sim.contract.errors import Infeasible, UsageError
from memo_sim.contract.gpu_kind import GpuKind
from memo_sim.contract.gpus import Gpus, Role, Sized, TriedCount
from memo_sim.contract.hardware import Quantity, Source
from memo_sim.contract.progress import Progress
from memo_sim.contract.units import counted, format_bytes, format_percent, format_seconds
from memo_sim.planning.default_batch import with_filling_batch
from memo_sim.planning.question import Question
from memo_sim.planning.search import search

MOST_DEVICES = 1024
"""The most devices that are tried unless a question says otherwise."""

LEAST_GAIN = 0.02
"""Where twice the devices shorten the step by less than this fraction, more are not tried."""


@dataclass(frozen=True)
class GpusAnswer:
    """The document, and the question and what-if answer of its chosen row (None when there is none)."""

    document: Gpus
    question: Question | None = None
    answer: Answer | None = None


def gpus(
    questions: Sequence[tuple[GpuKind, Question]],
    *,
    within_s: float | None = None,
    most_devices: int = MOST_DEVICES,
    prices: Sequence[float | None] = (),
    progress: Progress | None = None,
) -> GpusAnswer:
    """Return how many devices of each kind the question needs.

    ``questions``: the same question for each kind, on any cluster of it. Where they do not name a batch, it is the
    largest that fills a whole node of one of the kinds. ``prices``: of a device of each kind for an hour, in one
    currency. ``progress`` receives (numbers tried, most numbers to try).

    Raises:
        UsageError: when pinned knobs contradict each other on every number.
    """
    questions = _with_one_batch(questions)
    names = [kind.name for kind, _ in questions]
    prices = prices or [None for _ in questions]
    counts = [len(kind.counts(most_devices)) for kind, _ in questions]
    found, begun = list[_Scan](), 0
    for (kind, question), price, many in zip(questions, prices, counts, strict=True):
        scan = _Scan(kind, question, within_s, most_devices, price)
        scan.told = _from(progress, begun, sum(counts))
        scan.run()
        found.append(scan)
        begun += many
    refused = [scan.refused for scan in found if scan.refused is not None and not scan.answers]
    if len(refused) == len(found):
        raise refused[0]
    sizes = [size for scan in found for size in scan.sizes()]
    chosen = _chosen(sizes, within_s)
    first = questions[0][1]
    document = Gpus(
        model=first.model.name,
        seq_tokens=first.seq_tokens,
        global_batch=first.global_batch,
        within_s=within_s,
        kinds=names,
        most_devices=most_devices,
        chosen=chosen,
        sizes=sizes,
        tried=[tried for scan in found for tried in scan.tried],
        warnings=_warnings(found),
        why=[*_not_read(first), *_why(found, within_s), *without_price(names, prices)],
    )
    if chosen is None:
        return GpusAnswer(document)
    scan = found[names.index(chosen.kind)]
    return GpusAnswer(document, scan.asked(chosen.summary.devices), scan.answers[chosen.summary.devices])


def _with_one_batch(questions: Sequence[tuple[GpuKind, Question]]) -> list[tuple[GpuKind, Question]]:
    """Return the questions with the same batch, where they do not name it."""
    if not any(question.batch_rule for _, question in questions):
        return list(questions)
    batches = []
    for kind, question in questions:
        try:
            batches.append(with_filling_batch(_on(question, kind, kind.per_node)).global_batch)
        except (Infeasible, UsageError):  # such pins need more than a node
            batches.append(question.global_batch)
    rule = "not given: enough for a whole node of each kind"
    return [(kind, replace(question, global_batch=max(batches), batch_rule=rule)) for kind, question in questions]


def _on(question: Question, kind: GpuKind, devices: int) -> Question:
    """Return the question on so many devices, with their part of a node's host memory (the question's, where given)."""
    cluster, given = kind.of(devices), question.cluster.host_memory_bytes
    sources = {**question.cluster.sources, **cluster.sources}
    if devices < kind.per_node:
        whole = (given or question.hardware.host_memory_bytes).value
        text = f"{devices} of {kind.per_node} parts of a node's {format_bytes(int(whole))}, as of its GPUs"
        given = Quantity(value=whole * devices / kind.per_node, source=PART_OF_NODE)
        sources[PART_OF_NODE] = Source(kind="derived", text=text)
    return replace(question, cluster=msgspec.structs.replace(cluster, host_memory_bytes=given, sources=sources))


def _from(progress: Progress | None, begun: int, total: int) -> Progress:
    """Return a callback that counts on from ``begun``."""

    def tell(done: int, _: int) -> None:
        if progress:
            progress(begun + done, total)

    return tell


@dataclass
class _Scan:
    """The numbers of devices of one kind: which were tried, and the answers of those that are worth showing."""

    kind: GpuKind
    question: Question
    within_s: float | None
    most_devices: int
    price: float | None
    tried: list[TriedCount] = field(default_factory=list)
    answers: dict[int, Answer] = field(default_factory=dict)
    roles: dict[Role, int] = field(default_factory=dict)
    refused: UsageError | None = None
    """Why the last number was refused before any plan was evaluated."""
    skipped: list[int] = field(default_factory=list)
    ended_at: int | None = None
    """The number of devices whose double gains nothing."""
    told: Progress = lambda done, total: None

    def run(self) -> None:
        """Try numbers of devices until the roles are taken."""
        counts = self.kind.counts(self.most_devices)
        first = next((at for at, count in enumerate(counts) if self._answer(count)), None)
        if first is None:
            return
        self.roles["fits"] = self.roles["cheapest"] = counts[first]
        for count in counts[first + 1 :]:
            if not self._answer(count) or self._hours(count) >= self._hours(self.roles["cheapest"]):
                break
            self.roles["cheapest"] = count
        if self.within_s is not None:
            self._scan_within(counts[first:], self.within_s)

    def _scan_within(self, counts: Sequence[int], within_s: float) -> None:
        """Find the first number whose step is short enough."""
        best = self.answers[counts[0]].result.best
        assert best is not None
        least_work_s = (best.mfu or 0.0) * (best.step_s or 0.0) * counts[0]  # device seconds at 100 % MFU
        before = None
        for count in counts:
            if count not in self.answers and least_work_s / count > within_s:
                self.skipped.append(count)
                continue
            step_s = self._step_s(count) if self._answer(count) else None
            if step_s is not None and step_s <= within_s:
                self.roles["within"] = count
                return
            if before is not None and step_s is not None and step_s > before * (1 - LEAST_GAIN):
                self.ended_at = count
                return
            before = step_s

    def asked(self, devices: int) -> Question:
        """Return the question on so many devices."""
        return _on(self.question, self.kind, devices)

    def _answer(self, devices: int) -> bool:
        """Ask for one number of devices, once; return whether a plan fits."""
        if any(tried.devices == devices for tried in self.tried):
            return devices in self.answers
        cluster, reason, step_s = self.kind.of(devices), "", None
        try:
            if not self.answers:  # a search that ends at the first plan that fits is quicker than an answer
                found = search(self.asked(devices), enough_s=inf)
                reason = "" if found.best else found.ranked[0].prediction.reason
            answer = None if reason else what_if(self.asked(devices), top=1, price_per_device_hour=self.price)
        except UsageError as error:
            self.refused, reason = error, f"{error.what}: {error.got}"
        except Infeasible as error:
            reason = f"{error.what}: {error.got}"
        else:
            best = answer.result.best if answer else None
            if answer is not None and best is not None:
                self.answers[devices], step_s = answer, best.step_s
            elif answer is not None:  # live bytes fit, but no arena does
                reason = answer.result.plans[0].reason
        fits = devices in self.answers
        self.tried.append(
            TriedCount(
                kind=self.kind.name, cluster=cluster.name, devices=devices, fits=fits, step_s=step_s, reason=reason
            )
        )
        self.told(len(self.tried), 0)
        return fits

    def _step_s(self, devices: int) -> float:
        best = self.answers[devices].result.best
        assert best is not None
        assert best.step_s is not None
        return best.step_s

    def _hours(self, devices: int) -> float:
        """Return what is proportional to GPU-hours per token: the batch is the same everywhere."""
        return devices * self._step_s(devices)

    def sizes(self) -> list[Sized]:
        """Return the numbers of devices that have a role, the smallest first."""
        made = []
        for devices in sorted(set(self.roles.values())):
            cluster, result = self.kind.of(devices), self.answers[devices].result
            assert result.best is not None
            assert result.summary is not None
            made.append(
                Sized(
                    kind=self.kind.name,
                    cluster=cluster.name,
                    nodes=cluster.nodes,
                    roles=[role for role in ("fits", "within", "cheapest") if self.roles.get(role) == devices],
                    best=result.best,
                    summary=result.summary,
                )
            )
        return made


def _chosen(sizes: Sequence[Sized], within_s: float | None) -> Sized | None:
    """Return the row that answers the question."""
    most_s = inf if within_s is None else within_s
    able = [size for size in sizes if size.summary.step_s is not None and size.summary.step_s <= most_s]
    if able and all(size.summary.price_per_billion_tokens is not None for size in able):
        return min(able, key=lambda size: (size.summary.price_per_billion_tokens or 0.0, size.summary.devices))
    return min(able, key=lambda size: (size.summary.devices, size.summary.step_s or 0.0), default=None)


def _warnings(found: Sequence[_Scan]) -> list[str]:
    """Return the warnings of all answers, each once."""
    told = [text for scan in found for answer in scan.answers.values() for text in answer.result.warnings]
    return list(dict.fromkeys(told))


def _not_read(question: Question) -> list[str]:
    """Return the fields of the model's file that are ignored."""
    return [f"Not read of the model's file: {', '.join(question.not_read)}."] if question.not_read else []


def _why(found: Sequence[_Scan], within_s: float | None) -> list[str]:
    first = found[0].question
    rule = f" ({first.batch_rule})" if first.batch_rule else ""
    batch = f"{counted(first.global_batch, 'sequence')}{rule}"
    lines = [
        f"Every number of GPUs is asked for a step of {batch}; --global-batch asks for another batch.",
        "Numbers are 1, 2, 4 ... a node, then nodes, doubling. Each row is the best plan of its number.",
        "From the smallest that fits, GPUs were doubled while GPU-hours fell; after that memo assumes that they rise.",
    ]
    if any(tried.devices < scan.kind.per_node for scan in found for tried in scan.tried):
        lines.append("A part of a node is assumed to have that part of the node's host memory.")
    for scan in found:
        name = scan.kind.name
        if not scan.answers:
            last = scan.tried[-1] if scan.tried else None
            reason = f": on {last.cluster}, {last.reason}" if last else ""
            lines.append(f"{name}: no plan fits on up to {_largest(scan)}{reason}.")
        elif within_s is not None and "within" not in scan.roles:
            told = f"{name}: no step within {format_seconds(within_s)} on up to {_largest(scan)}"
            if scan.ended_at:
                told = (
                    f"{name}: no step within {format_seconds(within_s)}; {scan.ended_at} GPUs gain less than"
                    f" {format_percent(LEAST_GAIN, 0)} over half of them, so more were not tried"
                )
            lines.append(f"{told}.")
        if scan.skipped:
            listed = ", ".join(map(str, scan.skipped))
            lines.append(f"{name}: {listed} GPUs are too slow even at 100 % MFU and were not tried.")
    return lines


def _largest(scan: _Scan) -> str:
    return counted(max(scan.kind.counts(scan.most_devices)), "GPU")
