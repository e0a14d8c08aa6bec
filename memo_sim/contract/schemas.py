"""All documents by name, and the JSON Schema of each, for editors and other programs."""

from __future__ import annotations

from typing import Any

import msgspec

from memo_sim.contract.accuracy import Accuracies, PublishedErrors
from memo_sim.contract.cluster import Cluster
from memo_sim.contract.combinations import Combinations
from memo_sim.contract.comparison import Comparison
from memo_sim.contract.difference import Difference
from memo_sim.contract.errors import UsageError, did_you_mean
from memo_sim.contract.expert_load import MeasuredLoad
from memo_sim.contract.explanation import Explanation
from memo_sim.contract.figure import Figure
from memo_sim.contract.gpus import Gpus
from memo_sim.contract.hardware import Hardware
from memo_sim.contract.interchange import Export, ImportedJob
from memo_sim.contract.longest import Longest
from memo_sim.contract.memory_report import MemoryReport
from memo_sim.contract.model import Model
from memo_sim.contract.placement import Placement
from memo_sim.contract.plan import Plan
from memo_sim.contract.recorded_step import RecordedStep
from memo_sim.contract.requests import Requests
from memo_sim.contract.result import Result
from memo_sim.contract.results import Results
from memo_sim.contract.shortage import Shortage
from memo_sim.contract.sweep import SweepLine
from memo_sim.contract.trace import Trace
from memo_sim.contract.validation import Validation
from memo_sim.contract.verdict import Verdict

DOCUMENTS: dict[str, type[msgspec.Struct]] = {
    "accuracy": Accuracies,
    "errors": PublishedErrors,
    "model": Model,
    "hardware": Hardware,
    "cluster": Cluster,
    "plan": Plan,
    "requests": Requests,
    "placement": Placement,
    "memory": MemoryReport,
    "expert_load": MeasuredLoad,
    "trace": Trace,
    "result": Result,
    "results": Results,
    "longest": Longest,
    "gpus": Gpus,
    "shortage": Shortage,
    "sweep": SweepLine,
    "validation": Validation,
    "comparison": Comparison,
    "difference": Difference,
    "explanation": Explanation,
    "combinations": Combinations,
    "verdict": Verdict,
    "figure": Figure,
    "recorded": RecordedStep,
    "export": Export,
    "job": ImportedJob,
}


def json_schema(name: str, *, others: tuple[str, ...] = ()) -> dict[str, Any]:
    """Return the JSON Schema (2020-12) of the document ``name``; the error message also lists ``others``.

    Raises:
        UsageError: when there is no such document.
    """
    if name not in DOCUMENTS:
        known = (*DOCUMENTS, *others)
        wanted = f"one of {', '.join(known)}"
        raise UsageError("no such document", got=repr(name), wanted=wanted, hint=did_you_mean(name, known))
    return {"$schema": "https://json-schema.org/draft/2020-12/schema", **msgspec.json.schema(DOCUMENTS[name])}
