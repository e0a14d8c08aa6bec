"""Plans of memo's systems: made by memo-sim with this machine's profile, or read if they already exist."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path

import msgspec

from benchmarks.gpu.case import SEQUENCES
from benchmarks.gpu.row import Status
from memo_sim.contract import codec
from memo_sim.contract.catalog import load_cluster, load_model
from memo_sim.contract.errors import CannotRun, Infeasible, missing_package
from memo_sim.contract.model import Model
from memo_sim.contract.plan import Plan
from memo_sim.planning.question import Pins, Question, with_memory

POLICIES = {
    "planned": Pins(),
    "token-wise": Pins(recompute="tokenwise"),
    "alpha 0.5": Pins(recompute="tokenwise", alpha=0.5),
    "alpha 0": Pins(recompute="tokenwise", alpha=0.0),
    "keep": Pins(recompute="none", alpha=0.0),
    "full recompute": Pins(recompute="full", alpha=0.0, mlp_chunk_tokens=0, attention_chunk_tokens=0),
    "full swap": Pins(recompute="none", alpha=1.0),
}
"""The knobs that each policy pins; ``planned`` leaves everything to the search, ``token-wise`` only alpha."""
VOCAB = 32_768
"""Vocabulary for a few layers of a large model, so that embedding and classifier do not dominate the step."""


@dataclass(frozen=True)
class Refused:
    """The reason why there is no plan, and the status of the row that reports it."""

    reason: str
    status: Status = "oom"


def model_of(preset: str, layers: int) -> Model:
    """Return a preset with ``layers`` layers and a small vocabulary; the tiny presets keep theirs."""
    model = load_model(preset)
    vocab = min(model.vocab, VOCAB)
    return msgspec.structs.replace(model, name=f"{preset}-{layers}l", layers=layers, vocab=vocab)


class Plans:
    """Plan files in one folder; a plan is made if its file is missing or was made with another profile.

    ``kernels`` are the attention and fused kernels that plans may use. ``host_bytes`` is the free host memory here; it
    replaces the profile's value if it is smaller.
    """

    def __init__(self, folder: Path, cluster: str, kernels: Collection[str], host_bytes: int | None = None) -> None:
        self.folder = folder
        self.cluster, hardware = load_cluster(cluster)
        known = self.cluster.host_memory_bytes or hardware.host_memory_bytes
        if host_bytes is not None and host_bytes < known.value:
            self.cluster, hardware = with_memory(self.cluster, hardware, device_bytes=None, host_bytes=host_bytes)
        # A shipped profile may contain kernels that are not installed here.
        self.hardware = msgspec.structs.replace(
            hardware,
            attention=[table for table in hardware.attention if table.kernel in kernels],
            fused_rowwise_bytes_per_s={k: v for k, v in hardware.fused_rowwise_bytes_per_s.items() if k in kernels},
        )
        self._hash = codec.sha256_of(self.hardware)
        self._refused: dict[Path, Refused] = {}

    def path(self, model: Model, tokens: int, policy: str) -> Path:
        """Return the path of the plan's file."""
        return self.folder / f"{model.name}-{tokens}-{policy.replace(' ', '-')}.json"

    def get(self, model: Model, tokens: int, policy: str) -> Path | Refused:
        """Return the path of a plan, or the reason why there is none."""
        path = self.path(model, tokens, policy)
        if path in self._refused:
            return self._refused[path]
        if path.is_file() and codec.read(path, Plan).provenance.hardware_sha256 == self._hash:
            return path
        found = self._make(model, tokens, policy, path)
        if isinstance(found, Refused):
            self._refused[path] = found
        return found

    def most_layers(self, preset: str, tokens: int, policy: str, most: int) -> int:
        """Return the largest number of layers, up to ``most``, for which there is a plan; 0 if there is none."""
        fitting = (
            n for n in range(most, 0, -1) if not isinstance(self.get(model_of(preset, n), tokens, policy), Refused)
        )
        return next(fitting, 0)

    def _make(self, model: Model, tokens: int, policy: str, path: Path) -> Path | Refused:
        question = Question(
            model=model,
            cluster=self.cluster,
            hardware=self.hardware,
            seq_tokens=tokens,
            pins=POLICIES[policy],
            micro_batch=SEQUENCES,
            global_batch=SEQUENCES,
        )
        try:
            from memo_sim.answers.what_if import plan_of, what_if

            answer = what_if(question)
        except Infeasible as error:
            return Refused(str(error))
        except ModuleNotFoundError as error:
            absent = missing_package(error)
            if absent is None:
                raise
            return Refused(f"the plan does not exist and cannot be made here: {absent}", status="error")
        if answer.best is None:
            first = answer.result.plans[0] if answer.result.plans else None
            return Refused(f"no feasible plan: {first.reason}" if first else "the planner found no plan")
        created = datetime.now(UTC).isoformat(timespec="seconds")
        plan, placement = plan_of(answer.best, answer.arena, question, created=created, command="benchmarks.gpu")
        codec.write(path.with_name(f"{path.stem}.trace.json"), answer.best.trace())
        if placement is not None:
            codec.write(path.with_name(f"{path.stem}.placement.json"), placement)
        codec.write(path, plan)
        return path


def cluster_for(device: str, profile: Path) -> str:
    """Return the cluster to plan with: the profile that was calibrated here, else a shipped one for this device.

    Raises:
        CannotRun: if there is neither.
    """
    if profile.is_file():
        return str(profile)
    from memo_sim.contract.catalog import list_clusters

    for cluster in list_clusters():
        gpu = cluster.partition("-")[0]
        if gpu in device.lower():
            return f"{gpu}-1x1"
    raise CannotRun(
        "there is no profile of this device",
        where=str(profile),
        got=device,
        hint="first run python -m benchmarks.gpu --only calibrate, or pass --profile",
    )
