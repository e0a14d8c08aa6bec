"""Sizes of a run (lengths, models, layers, steps), and estimates of how long a case takes."""

from __future__ import annotations

from dataclasses import dataclass, replace

from benchmarks.gpu.case import Case
from benchmarks.gpu.plans import model_of

K = 1024
PINNED_BYTES_PER_S = 3e9
"""Rate at which host memory is touched and pinned; used only for time estimates."""


@dataclass(frozen=True, kw_only=True)
class Scale:
    """Sizes of one kind of run; lengths and models are in order of priority."""

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
    """Approximate rate of a step without recompute; used only for time estimates."""
    start_s: float
    """Seconds from the start of a process to its first step."""
    most_step_s: float
    """Longest step; models get fewer layers if a step would take longer."""

    def layers(self, preset: str, tokens: int) -> int:
        """Return the number of layers to try first: the largest whose step is estimated within ``most_step_s``.

        It is at least ``least_layers``, because the last two layers of a plan need no swap.
        """
        for layers in range(self.most_layers, self.least_layers, -1):
            if model_of(preset, layers).step_flops(tokens) / self.flops_per_s <= self.most_step_s:
                return layers
        return self.least_layers

    def step_s(self, case: Case) -> float:
        """Estimate the seconds of a step: the predicted ones if the case has them, else from its FLOPs."""
        if case.predicted_step_s:
            return case.predicted_step_s
        return 0.0 if case.model is None else case.model.step_flops(case.seq_tokens) / self.flops_per_s

    def seconds(self, cases: list[Case]) -> float:
        """Estimate the seconds that the cases take together in one process."""
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
    most_step_s=4.0,
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

QUICK_CUDA = replace(QUICK, flops_per_s=1e12, start_s=FULL.start_s)
"""The quick run's sizes on a GPU: a process takes longer to start there, and a tiny step takes milliseconds."""
