"""Memory of METP and its rivals on one node of A100 (Liang et al. 2025, section 5): Figures 4 and 6 computed again.

    metp-4    device memory by length on eight GPUs, one sequence, and its ratio to tensor parallelism's
    metp-6    the longest sequence on 1, 2, 4 and 8 GPUs over that of one GPU

All differ in the way work is divided alone: every activation is kept (of METP the five that autograd has of it; beside
it METP as memo plans it, which makes norms again and keeps three), the loss is cut into chunks, PyTorch's caching
allocator serves the program's requests, states are mixed-precision Adam's (LLaMA-7B runs out of memory on one device in
the paper, which 8 bytes a parameter would not). LLaMA-70B and GPT-175B are a pipeline's middle stage (Table 3: 5 layers
and 1): without embedding and head, so with a vocabulary of a token a rank. What the paper's Figures 5 and 7 show is in
``metp_table.py``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from dataclasses import replace as changed
from functools import partial
from typing import TypeVar

from msgspec.structs import replace

from memo_sim.contract.catalog import load_cluster, load_model
from memo_sim.contract.figure import Figure, Line, Point
from memo_sim.contract.model import Model
from memo_sim.contract.plan import Decisions
from memo_sim.contract.progress import Progress
from memo_sim.contract.units import KIB, format_bytes, format_seconds, format_tokens
from memo_sim.engine.memory import Memory, memory_of
from memo_sim.engine.simulate import Simulation, simulate
from memo_sim.planning.question import Pins, Question
from memo_sim.planning.space import candidates
from memo_sim.program.analysis.columns import expand
from memo_sim.program.ir.work import Collective, Exchange
from memo_sim.program.lower import lower

GPUS = 8
"""Of the paper's machine, joined by NVLink."""
TP, METP, FEWER = "tp+sp", "metp", "metp rebuilding norms"
LENGTHS = tuple(2**i * KIB for i in range(2, 11))
DEVICES = (2, 4, GPUS)
STEP_TOKENS = KIB
"""Multiples of which every layout of up to eight ranks divides."""
FINE = 0.01
"""A longest length is known when one that is so much longer does not fit."""
BISECTED = 3
"""Of so many guesses at what fits one halves what is left, and the others take memory for linear."""


Value = TypeVar("Value")


@dataclass(frozen=True, slots=True)
class Setting:
    """A model of Table 3: all of its layers, or as many as a stage holds."""

    name: str
    layers: int | None = None
    on_one: bool = True
    """Whether the paper has its longest sequence on a single device."""

    @property
    def model(self) -> Model:
        """The model, or a stage's layers of it."""
        model = load_model(self.name)
        return replace(model, layers=self.layers, vocab=GPUS) if self.layers else model


SETTINGS = (Setting("bert-large"), Setting("llama-7b", on_one=False), Setting("llama-70b", 5), Setting("gpt-175b", 1))


def ways(devices: int) -> dict[str, Pins]:
    """Return how each system divides its work over ``devices``, as the paper's Tables 1 and 2 have it."""
    return {
        TP: Pins(tp=devices),
        "ulysses+fsdp": Pins(ulysses=devices, zero=3),
        "ring-attention": Pins(cp=devices, zero=3),
        "rsa": Pins(cp=devices, cp_exchange="rsa", zero=0),
        METP: Pins(metp=devices, keep_norms=True),
        FEWER: Pins(metp=devices),
    }


@dataclass(frozen=True, slots=True)
class Job:
    """One model divided one way over some devices of a node."""

    setting: Setting
    pins: Pins
    devices: int = GPUS

    def decisions(self, seq_tokens: int, sequences: int = 1) -> Decisions:
        """Return the plan of a step of one micro-batch of so many sequences."""
        pins = changed(self.pins, recompute="none", alpha=0.0, memory_policy="caching")
        cluster, hardware = load_cluster(f"a100-1x{self.devices}")
        question = Question(
            self.setting.model,
            cluster,
            hardware,
            seq_tokens,
            pins=pins,
            micro_batch=sequences,
            global_batch=sequences,
        )
        return candidates(question)[0][0].base

    def memory(self, seq_tokens: int, sequences: int = 1) -> Memory:
        """Return what a step needs of a device, without playing it."""
        decisions = self.decisions(seq_tokens, sequences)
        cluster, hardware = load_cluster(f"a100-1x{self.devices}")
        (program,) = lower(decisions)
        return memory_of(program, expand(program), decisions, hardware, cluster)

    def longest(self) -> int:
        """Return the most tokens of one sequence that fit, to within ``FINE``; 0 where ``STEP_TOKENS`` do not."""
        return STEP_TOKENS * most_that_fits(lambda steps: self.memory(STEP_TOKENS * steps), fine=FINE)


def most_that_fits(memory: Callable[[int], Memory], *, fine: float = 0.0) -> int:
    """Return the largest number whose memory fits, or one whose next by the fraction ``fine`` does not; 0 for none.

    What fits is taken to fit at every smaller number. Memory is nearly linear in it, so that where the line through
    what fits and what does not meets the capacity is a good guess.
    """
    low, high, guess, tried = 0, 0, 1, 0
    low_bytes = high_bytes = 0
    while not high or high - low > max(1, int(fine * low)):
        found = memory(guess)
        if found.fault is None:
            low, low_bytes = guess, found.device_total_bytes
        else:
            high, high_bytes = guess, found.device_total_bytes
        tried += 1
        if not high:
            guess = 2 * low
            continue
        between, least = high - low, max(1, int(fine * low))
        share = 0.5
        if tried % BISECTED and high_bytes > low_bytes > 0:
            share = (found.device_capacity_bytes - low_bytes) / (high_bytes - low_bytes)
        guess = low + max(min(round(share * between), between - least), min(least, between - 1), 1)
    return low


def swept(
    settings: Sequence[Setting], lengths: Sequence[int], value: Callable[[Job, int], Value], progress: Progress
) -> Iterator[tuple[Setting, dict[str, list[Value]]]]:
    """Yield, setting by setting, what every system has at each length on all GPUs."""
    systems, done = ways(GPUS), 0
    total = len(settings) * len(systems) * len(lengths)
    for setting in settings:
        found: dict[str, list[Value]] = {system: [] for system in systems}
        for system, pins in systems.items():
            for tokens in lengths:
                found[system].append(value(Job(setting, pins), tokens))
                done += 1
                progress(done, total)
        yield setting, found


def memory_ratios(progress: Progress) -> Figure:
    """Return METP's Figure 4: the most that a device holds at once, in GiB, the reserve not counted."""
    lines, findings = [], []
    for setting, found in swept(SETTINGS, LENGTHS, Job.memory, progress):
        lines += [
            Line(panel=setting.name, label=system, points=[_held(n, m) for n, m in zip(LENGTHS, its, strict=True)])
            for system, its in found.items()
        ]
        findings += [_ratios(f"{setting.name}, {name}", its, found[TP]) for name, its in found.items() if name != TP]
    return Figure(
        name="metp-4",
        title="Device memory of one sequence on eight A100, activations kept",
        x_label="sequence length (tokens)",
        y_label="GiB of a device, the reserve not counted",
        x_kind="tokens",
        y_kind="number",
        lines=lines,
        findings=[*findings, "METP prints: slightly above TP for LLaMA-7B at 4K, below it the more the longer."],
    )


def _held(tokens: int, memory: Memory) -> Point:
    """Return one bar: GiB that live at once; none of a plan that does not fit, whose need is said."""
    if memory.fault is not None:
        return Point(x=tokens, y=None, note=f"{memory.fault.status}, needs {format_bytes(memory.device.bytes)}")
    return Point(x=tokens, y=memory.device.bytes / 2**30)


def _ratios(who: str, mine: list[Memory], others: list[Memory]) -> str:
    """Return what is held over what tensor parallelism holds at every length, whether that fits or not."""
    pairs = zip(LENGTHS, mine, others, strict=True)
    ratios = [f"{format_tokens(n)} {m.device.bytes / o.device.bytes:.2f}" for n, m, o in pairs]
    return f"{who} over {TP}: {', '.join(ratios)}."


def longest_sequences(progress: Progress) -> Figure:
    """Return METP's Figure 6: each system's longest sequence over the longest that one device holds."""
    systems = list(ways(GPUS))
    lines, findings = [], []
    total, done = len(SETTINGS) * (1 + len(systems) * len(DEVICES)), 0
    for setting in SETTINGS:
        alone = Job(setting, Pins(tp=1), 1).longest() if setting.on_one else 0
        found: dict[str, list[int]] = {}
        done += 1
        for system in systems:
            for devices in DEVICES if setting.on_one else (GPUS,):
                found.setdefault(system, []).append(Job(setting, ways(devices)[system], devices).longest())
            done += len(DEVICES)
            progress(done, total)
        if alone:
            lines += [
                Line(panel=setting.name, label=system, points=_normalised(alone, its)) for system, its in found.items()
            ]
        findings += _reach(setting, alone, {system: its[-1] for system, its in found.items()})
    return Figure(
        name="metp-6",
        title="The longest sequence over that of one A100, activations kept",
        x_label="GPUs",
        y_label="times the longest of one GPU",
        x_kind="number",
        y_kind="number",
        lines=lines,
        findings=[
            *findings,
            "METP prints: 2.38 to 2.99 times the others' on eight, superlinear where they are linear.",
        ],
        step_tokens=STEP_TOKENS,
    )


def _normalised(alone: int, lengths: list[int]) -> list[Point]:
    first = Point(x=1, y=1.0, note=format_tokens(alone))
    return [first, *(Point(x=n, y=t / alone, note=format_tokens(t)) for n, t in zip(DEVICES, lengths, strict=True))]


def _reach(setting: Setting, alone: int, on_eight: dict[str, int]) -> list[str]:
    """Return what eight devices hold, either METP's over each other's, and how it grows from one device."""
    rivals = {name: tokens for name, tokens in on_eight.items() if name not in (METP, FEWER)}
    told = []
    for name in (METP, FEWER):
        metp = on_eight[name]
        over = ", ".join(
            f"{metp / tokens:.2f} x {rival} ({format_tokens(tokens)})" if tokens else f"{rival} holds none"
            for rival, tokens in rivals.items()
        )
        grown = f"; {metp / alone:.1f} times what one device holds ({format_tokens(alone)})" if alone else ""
        told.append(f"{setting.name} on {GPUS}: {name} holds {format_tokens(metp)}, {over}{grown}.")
    return told


LONG = tuple(2**i * KIB for i in range(5, 10))
"""The paper's are 32K at least."""
SHORT = tuple(2**i * KIB for i in range(1, 8))
RING = "metp"
"""The group of ranks that exchange."""


def played(job: Job, seq_tokens: int, sequences: int = 1) -> Simulation:
    """Return a step of ``job``, played."""
    cluster, hardware = load_cluster(f"a100-1x{job.devices}")
    return simulate(job.decisions(seq_tokens, sequences), hardware, cluster)


@dataclass(frozen=True, slots=True)
class Cell:
    """The largest batch at one length, and what it makes of the devices; 0 and None where no sequence fits."""

    sequences: int
    mfu: float | None
    step_s: float | None

    @property
    def note(self) -> str:
        """The batch and the step's time."""
        return f"batch {self.sequences}, {format_seconds(self.step_s)}" if self.step_s else "no sequence fits"


def cell(job: Job, seq_tokens: int) -> Cell:
    """Return the largest micro-batch that fits, played."""
    sequences = most_that_fits(partial(job.memory, seq_tokens))
    if not sequences:
        return Cell(0, None, None)
    prediction = played(job, seq_tokens, sequences).prediction
    return Cell(sequences, prediction.mfu, prediction.step_s)


def utilisation(progress: Progress) -> Figure:
    """Return METP's Figure 5."""
    lines, findings = [], []
    for setting, found in swept(SETTINGS, LONG, cell, progress):
        lines += [
            Line(
                panel=setting.name,
                label=system,
                points=[Point(x=n, y=one.mfu, note=one.note) for n, one in zip(LONG, its, strict=True)],
            )
            for system, its in found.items()
        ]
        findings.append(_best(setting, found))
    return Figure(
        name="metp-5",
        title="MFU on eight A100 with the largest batch that fits, activations kept",
        x_label="sequence length (tokens)",
        y_label="MFU",
        x_kind="tokens",
        y_kind="fraction",
        lines=lines,
        findings=[*findings, "METP prints: up to 48 %; above TP in most cases, Ulysses above it but for LLaMA-7B."],
    )


def _best(setting: Setting, found: dict[str, list[Cell]]) -> str:
    """Return who is fastest at every length, and METP's best."""
    first = []
    for at, tokens in enumerate(LONG):
        fitting = {system: its[at].mfu for system, its in found.items() if its[at].mfu is not None}
        best = max(fitting, key=lambda system: fitting[system] or 0.0, default="nobody")
        first.append(f"{format_tokens(tokens)} {best}")
    metp = max((one.mfu for one in found[METP] if one.mfu is not None), default=0.0)
    return f"{setting.name}: fastest {', '.join(first)}; metp {metp:.1%} at most."


@dataclass(frozen=True, slots=True)
class Share:
    """A step whose exchanges all wait: what they take of it, and how long the overlapped step is, as fractions."""

    exchanged: float
    overlapped: float
    step_s: float

    @property
    def exposed(self) -> float:
        """What overlap leaves: of the synchronous step, beside what is computed."""
        return self.overlapped - (1 - self.exchanged)


def share(setting: Setting, seq_tokens: int) -> Share:
    """Return what synchronous exchanges take of METP's step of one sequence on eight devices."""
    apart = played(Job(setting, Pins(metp=GPUS, keep_norms=True, overlap_exchanges=False)), seq_tokens)
    beside = played(Job(setting, Pins(metp=GPUS, keep_norms=True)), seq_tokens)
    (role,) = apart.roles
    exchanges = role.per_instruction(
        lambda i: float(isinstance(i.work, Exchange | Collective) and i.work.group == RING)
    )
    step_s, overlapped_s = apart.prediction.step_s, beside.prediction.step_s
    assert step_s is not None
    assert overlapped_s is not None
    return Share(float((role.seconds * exchanges).sum()) / step_s, overlapped_s / step_s, step_s)


def overlap(progress: Progress) -> Figure:
    """Return METP's Figure 7: of a synchronous step the exchanges' part, and the length of an overlapped one."""
    lines, findings = [], []
    for number, setting in enumerate(SETTINGS):
        found = []
        for at, tokens in enumerate(SHORT):
            found.append(share(setting, tokens))
            progress(number * len(SHORT) + at + 1, len(SETTINGS) * len(SHORT))
        pairs = list(zip(SHORT, found, strict=True))
        lines += [
            Line(panel=setting.name, label="comm", points=[Point(x=n, y=one.exchanged) for n, one in pairs]),
            Line(
                panel=setting.name,
                label="async",
                points=[Point(x=n, y=one.overlapped, note=f"sync {format_seconds(one.step_s)}") for n, one in pairs],
            ),
        ]
        exposed = ", ".join(f"{format_tokens(n)} {one.exposed:.1%}" for n, one in pairs)
        findings.append(f"{setting.name}, what overlap leaves of the synchronous step beside compute: {exposed}.")
    return Figure(
        name="metp-7",
        title="METP's exchanges on eight A100, one sequence: of the step that waits for each",
        x_label="sequence length (tokens)",
        y_label="of the synchronous step",
        x_kind="tokens",
        y_kind="fraction",
        lines=lines,
        findings=[
            *findings,
            "METP: async is shorter everywhere, and the gap to compute steady beyond 8K but for BERT.",
        ],
    )


FIGURES: dict[str, Callable[[Progress], Figure]] = {
    "metp-4": memory_ratios,
    "metp-5": utilisation,
    "metp-6": longest_sequences,
    "metp-7": overlap,
}
