"""State that all parts of a run share (results, plans, processes, budget), and the way a case becomes a row."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from benchmarks.gpu.case import Case
from benchmarks.gpu.launcher import Budget, Launcher
from benchmarks.gpu.plans import Plans, Refused
from benchmarks.gpu.results import Results
from benchmarks.gpu.row import Row, Status, row_of
from benchmarks.gpu.scale import Scale
from memo_exec.training.dataset import TEXT_VOCAB, load_dataset
from memo_sim.contract import codec
from memo_sim.contract.model import Model
from memo_sim.contract.plan import Plan


@dataclass
class Session:
    """One run of the command."""

    results: Results
    launcher: Launcher
    budget: Budget
    scale: Scale
    device: str
    """``cuda`` or ``cpu``."""
    kernels: list[str]
    """Names of the attention kernels, and of the fused row-wise kernels, that plans can use here."""
    tell: Callable[[str], None]
    tests: bool = True
    """Whether the checks also run the GPU tests."""
    plans: Plans | None = None
    """None if this device has no profile; rivals still run."""
    without_plans: str = ""
    """The reason why there are no plans."""

    def get_plan(self, case: Case) -> Path | Refused:
        """Return the path of the plan for a case's policy, or the reason why there is none."""
        assert case.model is not None
        if self.plans is None:
            return Refused(self.without_plans, status="error")
        return self.plans.get(case.model, case.seq_tokens, case.policy)

    def most_layers(self, preset: str, tokens: int, policies: tuple[str, ...], most: int) -> int:
        """Return the largest number of layers of the first policy that fits with any; 0 if no policy fits."""
        if self.plans is None:
            return 0
        fitting = (self.plans.most_layers(preset, tokens, policy, most) for policy in policies)
        return next(filter(None, fitting), 0)

    def measure(self, cases: list[Case]) -> list[Row]:
        """Measure cases in one process and record a row for each; cases beyond the budget are recorded as not run."""
        fitting = list(cases)
        while fitting and self.scale.seconds(fitting) > self.budget.left_s:
            fitting.pop()
        rows = self.launcher.run(fitting)
        for case in cases[len(fitting) :]:
            rows.append(self._left_out(case))
        for row in rows:
            self.record(row)
        return rows

    def record(self, row: Row) -> Row:
        """Add a row and print it."""
        self.results.add(row)
        self.tell(line_of(row))
        return row

    def note(self, case: Case, status: Status, message: str) -> Row:
        """Record a case without starting a process for it."""
        return self.record(self._filled(row_of(case, status, message)))

    def planned(self, case: Case) -> Case | None:
        """Return the case with its policy's plan; if there is none, record the reason and return None."""
        found = self.get_plan(case)
        if isinstance(found, Refused):
            self.note(case, found.status, found.reason)
            return None
        prediction = codec.read(found, Plan).prediction
        assert prediction is not None
        return msgspec.structs.replace(
            case,
            plan=str(found),
            predicted_step_s=prediction.step_s or 0.0,
            predicted_host_bytes=prediction.peak_host_bytes_per_node,
        )

    def data(self) -> str:
        """Return a data file with the shipped text, repeated until it is longer than any sequence of this run."""
        path = self.launcher.folder / "text.npy"
        if not path.is_file():
            longest = max(self.scale.longest_to, *self.scale.suite_lengths, *self.scale.rival_lengths)
            np.save(path, np.resize(load_dataset(None, TEXT_VOCAB).tokens, 2 * longest))
        return str(path.resolve())

    def case(self, model: Model, tokens: int, **fields: Any) -> Case:
        """Return a case with this run's dtype and data."""
        shared: dict[str, Any] = {"model": model, "seq_tokens": tokens, "data": self.data()}
        return Case(**(shared | {"dtype": "bf16" if self.device == "cuda" else "fp32"} | fields))

    def _left_out(self, case: Case) -> Row:
        return self._filled(row_of(case, "not run", "not run because the time budget is too small"))

    def _filled(self, row: Row) -> Row:
        return msgspec.structs.replace(row, device=self.launcher.device, versions=self.launcher.versions)


def line_of(row: Row) -> str:
    """Return a row as one line of text for the terminal."""
    where = (
        f"{row.part:9} {row.model:14} {row.sequence:>8} {row.rival:38}" if row.model else f"{row.part:9} {row.rival}"
    )
    if row.median_step_s is None:
        return f"{where} {row.status}: {row.message.splitlines()[0] if row.message else ''}"
    mfu = "" if row.mfu is None else f"  MFU {row.mfu:.1%}"
    ratio = row.comparison.ratio if row.comparison else None
    beside = "" if ratio is None else f"  predicted / measured {ratio.step_s:.3f}"
    wrong = "  LOSSES DIFFER" if row.agrees is False else ""
    return f"{where} {row.median_step_s:8.3f} s  {row.tokens_per_s:10,.0f} tokens/s{mfu}{beside}{wrong}"
