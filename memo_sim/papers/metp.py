"""Computes the METP paper's figures again: METP and its rivals on one node of A100 (Liang et al. 2025, section 5).

    metp-4    device memory by length on eight GPUs, one sequence, and its ratio to tensor parallelism's
    metp-5    MFU and the largest batch that fits, from 32K tokens on
    metp-6    the longest sequence on 1, 2, 4 and 8 GPUs over that of one GPU
    metp-7    the share of METP's exchanges in a step that waits for each of them, and the length of an overlapped step

The systems differ only in how they divide the work:

- All activations are kept. METP keeps the five that autograd keeps of it. METP as memo plans it is a further line: it
  recomputes norms and keeps three.
- The loss runs in chunks, and PyTorch's caching allocator serves the program's requests.
- States are mixed-precision Adam's: in the paper LLaMA-7B runs out of memory on one device, which 8 bytes per parameter
  would not explain.
- LLaMA-70B and GPT-175B are a middle pipeline stage (Table 3: 5 layers and 1 layer), without embedding and head. So
  their vocabulary has one token per rank.

MFU is MEMO 5.1's, which counts a causal mask. The paper's algorithms have no mask, and its formula counts none. Here
only BERT attends in both directions.
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
from memo_sim.contract.units import KIB, format_bytes, format_percent, format_seconds, format_tokens
from memo_sim.engine.memory import Memory, memory_of
from memo_sim.engine.simulate import Simulation, simulate
from memo_sim.planning.question import Pins, Question
from memo_sim.planning.space import candidates
from memo_sim.program.analysis.columns import fold
from memo_sim.program.ir.work import Collective, Exchange
from memo_sim.program.lower import lower
from memo_sim.views.plan_table import short_of

GPUS = 8
"""GPUs of the paper's machine, joined by NVLink."""
TP, METP, FEWER = "tp+sp", "metp", "metp recomputing norms"
LENGTHS = tuple(2**i * KIB for i in range(2, 11))
DEVICES = (2, 4, GPUS)
STEP_TOKENS = KIB
"""Every layout of up to eight ranks divides multiples of this length."""
FINE = 0.01
"""Relative precision of a longest length: a length this much longer does not fit."""
BISECTED = 3
"""One of this many guesses bisects; the others assume that memory is linear."""


Value = TypeVar("Value")


@dataclass(frozen=True, slots=True)
class Setting:
    """A model of Table 3, with all its layers or with those of one pipeline stage."""

    name: str
    layers: int | None = None
    on_one: bool = True
    """Whether the paper reports its longest sequence on a single device."""

    @property
    def model(self) -> Model:
        """The model, or the layers of one stage."""
        model = load_model(self.name)
        return replace(model, layers=self.layers, vocab=GPUS) if self.layers else model


SETTINGS = (Setting("bert-large"), Setting("llama-7b", on_one=False), Setting("llama-70b", 5), Setting("gpt-175b", 1))


def ways(devices: int) -> dict[str, Pins]:
    """Return how each system divides its work over ``devices`` (Tables 1 and 2)."""
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
    """One model, divided in one way over some devices of a node."""

    setting: Setting
    pins: Pins
    devices: int = GPUS

    def decisions(self, seq_tokens: int, sequences: int = 1) -> Decisions:
        """Return the plan of a step with one micro-batch of ``sequences`` sequences."""
        pins = changed(self.pins, recompute="none", alpha=0.0, memory_policy="caching")
        cluster, hardware = load_cluster(f"a100-1x{self.devices}")
        question = Question(
            self.setting.model,
            cluster,
            hardware,
            seq_tokens,
            system="any",
            pins=pins,
            micro_batch=sequences,
            global_batch=sequences,
        )
        return candidates(question)[0][0].base

    def memory(self, seq_tokens: int, sequences: int = 1) -> Memory:
        """Return the memory that a step needs on a device, without simulating it."""
        decisions = self.decisions(seq_tokens, sequences)
        cluster, hardware = load_cluster(f"a100-1x{self.devices}")
        (program,) = lower(decisions)
        return memory_of(program, fold(program), decisions, hardware, cluster)

    def longest(self) -> int:
        """Return the longest sequence that fits, in tokens, to within ``FINE``; 0 where ``STEP_TOKENS`` do not fit."""
        return STEP_TOKENS * most_that_fits(lambda steps: self.memory(STEP_TOKENS * steps), fine=FINE)


def most_that_fits(memory: Callable[[int], Memory], *, fine: float = 0.0) -> int:
    """Return the largest number whose memory fits, to within the fraction ``fine``; 0 if none fits.

    Assumes that a number fits if a larger one fits. Memory is nearly linear in the number. So a good guess is where the
    line through a number that fits and one that does not meets the capacity.
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
    """Yield for each setting the values of every system at each length, on all GPUs."""
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
    """Return METP's Figure 4: peak device memory in GiB, without the reserve."""
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
        y_label="GiB per device, without the reserve",
        x_kind="tokens",
        y_kind="number",
        lines=lines,
        findings=[*findings, "METP reports: slightly above TP for LLaMA-7B at 4K; far below it for long sequences."],
    )


def _held(tokens: int, memory: Memory) -> Point:
    """Return one point: peak GiB, or no value and a note with the need where the plan does not fit."""
    if memory.fault is not None:
        note = f"{short_of(memory.fault.status)} is short, needs {format_bytes(memory.device.bytes)}"
        return Point(x=tokens, y=None, note=note)
    return Point(x=tokens, y=memory.device.bytes / 2**30)


def _ratios(who: str, mine: list[Memory], others: list[Memory]) -> str:
    """Return peak memory over tensor parallelism's at every length, also where plans do not fit."""
    pairs = zip(LENGTHS, mine, others, strict=True)
    ratios = [f"{format_tokens(n)} {m.device.bytes / o.device.bytes:.2f}" for n, m, o in pairs]
    return f"{who} over {TP}: {', '.join(ratios)}."


def longest_sequences(progress: Progress) -> Figure:
    """Return METP's Figure 6: each system's longest sequence over the longest on one device."""
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
        y_label="times the longest on one GPU",
        x_kind="number",
        y_kind="number",
        lines=lines,
        findings=[
            *findings,
            "METP reports: 2.38 to 2.99 times the others' on eight; superlinear where the others are linear.",
        ],
        step_tokens=STEP_TOKENS,
    )


def _normalised(alone: int, lengths: list[int]) -> list[Point]:
    first = Point(x=1, y=1.0, note=format_tokens(alone))
    return [first, *(Point(x=n, y=t / alone, note=format_tokens(t)) for n, t in zip(DEVICES, lengths, strict=True))]


def _reach(setting: Setting, alone: int, on_eight: dict[str, int]) -> list[str]:
    """Return the longest sequence of both METPs on eight devices, over each rival's and over one device's."""
    rivals = {name: tokens for name, tokens in on_eight.items() if name not in (METP, FEWER)}
    told = []
    for name in (METP, FEWER):
        metp = on_eight[name]
        over = ", ".join(
            f"{metp / tokens:.2f} x {rival} ({format_tokens(tokens)})" if tokens else f"no sequence fits with {rival}"
            for rival, tokens in rivals.items()
        )
        grown = f"; {metp / alone:.1f} times the longest on one device ({format_tokens(alone)})" if alone else ""
        told.append(f"{setting.name} on {GPUS}: {name} fits {format_tokens(metp)}, {over}{grown}.")
    return told


LONG = tuple(2**i * KIB for i in range(5, 10))
"""Lengths of Figure 5: the paper's start at 32K."""
SHORT = tuple(2**i * KIB for i in range(1, 8))
RING = "metp"
"""The group of ranks that exchange tiles."""


def played(job: Job, seq_tokens: int, sequences: int = 1) -> Simulation:
    """Return the simulation of a step of ``job``."""
    cluster, hardware = load_cluster(f"a100-1x{job.devices}")
    return simulate(job.decisions(seq_tokens, sequences), hardware, cluster)


@dataclass(frozen=True, slots=True)
class Cell:
    """The largest batch at one length, with its MFU and step time; 0 and None where no sequence fits."""

    sequences: int
    mfu: float | None
    step_s: float | None

    @property
    def note(self) -> str:
        """The batch and the step's time."""
        return f"batch {self.sequences}, {format_seconds(self.step_s)}" if self.step_s else "no sequence fits"


def cell(job: Job, seq_tokens: int) -> Cell:
    """Return the largest micro-batch that fits, and its simulated MFU."""
    sequences = most_that_fits(partial(job.memory, seq_tokens))
    if not sequences:
        return Cell(0, None, None)
    prediction = played(job, seq_tokens, sequences).prediction
    return Cell(sequences, prediction.mfu, prediction.step_s)


def utilisation(progress: Progress) -> Figure:
    """Return METP's Figure 5: MFU with the largest batch that fits."""
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
        findings=[*findings, "METP reports: up to 48 %, mostly above TP; Ulysses is above METP except for LLaMA-7B."],
    )


def _best(setting: Setting, found: dict[str, list[Cell]]) -> str:
    """Return the fastest system at every length, and METP's highest MFU."""
    first = []
    for at, tokens in enumerate(LONG):
        fitting = {system: its[at].mfu for system, its in found.items() if its[at].mfu is not None}
        best = max(fitting, key=lambda system: fitting[system] or 0.0, default="none")
        first.append(f"{format_tokens(tokens)} {best}")
    metp = max((one.mfu for one in found[METP] if one.mfu is not None), default=0.0)
    return f"{setting.name}: fastest {', '.join(first)}; metp at most {format_percent(metp)}."


@dataclass(frozen=True, slots=True)
class Share:
    """Exchanges and the overlapped step, as fractions of the step in which compute waits for each exchange."""

    exchanged: float
    overlapped: float
    step_s: float

    @property
    def exposed(self) -> float:
        """The part of the synchronous step's exchanges that overlap does not hide, as a fraction of that step."""
        return self.overlapped - (1 - self.exchanged)


def share(setting: Setting, seq_tokens: int) -> Share:
    """Return the share of synchronous exchanges in METP's step of one sequence on eight devices."""
    apart = played(Job(setting, Pins(metp=GPUS, keep_norms=True, overlap_exchanges=False)), seq_tokens)
    beside = played(Job(setting, Pins(metp=GPUS, keep_norms=True)), seq_tokens)
    (stage,) = apart.stages
    exchanges = stage.per_instruction(
        lambda i: float(isinstance(i.work, Exchange | Collective) and i.work.group == RING)
    )
    step_s, overlapped_s = apart.prediction.step_s, beside.prediction.step_s
    assert step_s is not None
    assert overlapped_s is not None
    return Share(float((stage.seconds * exchanges).sum()) / step_s, overlapped_s / step_s, step_s)


def overlap(progress: Progress) -> Figure:
    """Return METP's Figure 7: the exchanges' share of a synchronous step, and the length of an overlapped step."""
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
        exposed = ", ".join(f"{format_tokens(n)} {format_percent(one.exposed)}" for n, one in pairs)
        findings.append(f"{setting.name}, exchanges that overlap does not hide, of the synchronous step: {exposed}.")
    return Figure(
        name="metp-7",
        title="METP's exchanges on eight A100, one sequence, as a fraction of the synchronous step",
        x_label="sequence length (tokens)",
        y_label="fraction of the synchronous step",
        x_kind="tokens",
        y_kind="fraction",
        lines=lines,
        findings=[
            *findings,
            "METP reports: async is shorter everywhere; the gap to compute is steady beyond 8K, except for BERT.",
        ],
    )


FIGURES: dict[str, Callable[[Progress], Figure]] = {
    "metp-4": memory_ratios,
    "metp-5": utilisation,
    "metp-6": longest_sequences,
    "metp-7": overlap,
}
