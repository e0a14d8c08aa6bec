"""How large everything is measured: lengths, models, layers, steps; and how long a case will take."""

from __future__ import annotations

from dataclasses import dataclass

from benchmarks.gpu.case import Case
from benchmarks.gpu.plans import model_of

K = 1024
PINNED_BYTES_PER_S = 3e9
"""At which host memory is touched and registered, for the estimate alone."""


@dataclass(frozen=True, kw_only=True)
class Scale:
    """Shapes of one kind of run; lengths and models stand in order of their worth."""

    models: tuple[str, ...]
    suite_lengths: tuple[int, ...]
    rival_model: str
    rival_lengths: tuple[int, ...]
    most_layers: int
    least_layers: int
    longest_layers: int
    longest_from: int
    longest_to: int
    longest_granule: int
    check_tokens: int
    suite_steps: int
    rival_steps: int
    quick: bool
    flops_per_s: float
    """About what a step reaches, recompute not counted; for estimates alone."""
    start_s: float
    """Of a process, until its first step."""
    most_step_s: float
    """Layers are left out where a step would take longer."""

    def layers(self, preset: str, tokens: int) -> int:
        """Return the layers to try first: as many as a step's time allows, two of which need no swap."""
        for layers in range(self.most_layers, self.least_layers, -1):
            if model_of(preset, layers).step_flops(tokens) / self.flops_per_s <= self.most_step_s:
                return layers
        return self.least_layers

    def step_s(self, case: Case) -> float:
        """Return about how long a step takes: as predicted, else from its FLOPs."""
        if case.predicted_step_s:
            return case.predicted_step_s
        return 0.0 if case.model is None else case.model.step_flops(case.seq_tokens) / self.flops_per_s

    def seconds(self, cases: list[Case]) -> float:
        """Return about how long the cases take in one process."""
        steps = sum((case.warm_ups + case.steps) * self.step_s(case) for case in cases)
        return self.start_s + steps + sum(case.predicted_host_bytes for case in cases) / PINNED_BYTES_PER_S


FULL = Scale(
    models=("llama3-8b", "gpt-7b"),
    suite_lengths=tuple(n * K for n in (128, 32, 64, 16, 256, 512, 1024)),
    rival_model="llama3-8b",
    rival_lengths=tuple(n * K for n in (128, 32, 64, 16, 256, 512)),
    most_layers=8,
    least_layers=3,
    longest_layers=8,
    longest_from=64 * K,
    longest_to=4096 * K,
    longest_granule=8 * K,
    check_tokens=1024,
    suite_steps=3,
    rival_steps=5,
    quick=False,
    flops_per_s=4.5e14,
    start_s=12.0,
    most_step_s=6.0,
)

QUICK = Scale(
    models=("llama-tiny", "gpt-tiny"),
    suite_lengths=(512,),
    rival_model="llama-tiny",
    rival_lengths=(512,),
    most_layers=3,
    least_layers=3,
    longest_layers=2,
    longest_from=256,
    longest_to=256,
    longest_granule=128,
    check_tokens=256,
    suite_steps=2,
    rival_steps=5,
    quick=True,
    flops_per_s=1e9,
    start_s=4.0,
    most_step_s=10.0,
)
