"""Times of METP and its rivals on one node of A100 (Liang et al. 2025, section 5): Figures 5 and 7 computed again.

    metp-5    MFU and the largest batch that fits, from 32K tokens on
    metp-7    what METP's exchanges take of a step that waits for each of them, and how long one takes that does not

Who divides what, and what of memory, is said in ``metp_figures.py``. MFU is MEMO 5.1's, which counts a causal mask; the
paper's algorithms have none, and its formula counts none. BERT alone attends both ways here.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

from memo_sim.contract.catalog import load_cluster
from memo_sim.contract.figure import Figure, Line, Point
from memo_sim.contract.progress import Progress
from memo_sim.contract.units import KIB, format_seconds, format_tokens
from memo_sim.engine.simulate import Simulation, simulate
from memo_sim.papers.metp_figures import GPUS, METP, SETTINGS, Job, Setting, most_that_fits, swept
from memo_sim.planning.question import Pins
from memo_sim.program.ir.work import Collective, Exchange

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
    (stage,) = apart.stages
    exchanges = stage.per_instruction(
        lambda i: float(isinstance(i.work, Exchange | Collective) and i.work.group == RING)
    )
    step_s, overlapped_s = apart.prediction.step_s, beside.prediction.step_s
    assert step_s is not None
    assert overlapped_s is not None
    return Share(float((stage.seconds * exchanges).sum()) / step_s, overlapped_s / step_s, step_s)


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


FIGURES: dict[str, Callable[[Progress], Figure]] = {"metp-5": utilisation, "metp-7": overlap}
