"""A row is the result of one system at one sequence length; ``rows.json`` is a list of rows."""

from __future__ import annotations

from statistics import median
from typing import Literal

import msgspec

from benchmarks.gpu.case import Case, Part
from memo_sim.contract.comparison import Comparison

Status = Literal["ok", "oom", "not installed", "not run", "error"]

PEAK_BF16_FLOPS = {
    "H100 PCIe": 756e12,
    "H100 NVL": 835e12,
    "H100": 989.4e12,
    "H200": 989.4e12,
    "A100": 312e12,
    "A800": 312e12,
}
"""Dense bf16 peaks from NVIDIA's datasheets, by a part of the device's name; the first match counts."""


class Row(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Measured values; None if a value was not measured, or if it is meaningless on this device."""

    rival: str
    part: Part
    status: Status
    message: str = ""
    model: str = ""
    layers: int = 0
    parameters: int = 0
    sequence: int = 0
    """Tokens of the sequence; in a longest-sequence row, the longest that ran."""
    policy: str = ""
    alpha: float | None = None
    step_s: list[float] = []
    """Wall-clock seconds of every step after the warm-up, from the batch to the end of the update."""
    median_step_s: float | None = None
    spread: float | None = None
    """(slowest - fastest) / median."""
    tokens_per_s: float | None = None
    mfu: float | None = None
    """MFU by MEMO 5.1 (causal mask counted, one embedding), relative to the datasheet's dense bf16 peak."""
    peak_device_bytes: int | None = None
    """Peak of bytes allocated by torch; on a CPU, memo's own count."""
    peak_reserved_bytes: int | None = None
    """Peak of bytes reserved by torch."""
    host_bytes: int | None = None
    """Pinned host memory, as requested from the system."""
    losses: list[float] = []
    """Loss of every step, including the warm-up."""
    grad_norms: list[float] = []
    loss_error: float | None = None
    """Largest relative difference of a step's loss from the reference."""
    grad_norm_error: float | None = None
    """Relative difference of the first step's gradient norm from the reference."""
    agrees: bool | None = None
    """Whether both differences are within the dtype's tolerance; None without a reference."""
    reference: str = ""
    """Name of the reference system."""
    backend: str = ""
    comparison: Comparison | None = None
    """Predicted and measured figures of a memo plan."""
    predicted_device_bytes: int | None = None
    """Predicted peak of bytes allocated by torch: the arena, plus what libraries allocate outside it."""
    predicted_mfu: float | None = None
    predicted_host_bytes: int | None = None
    predicted_stalls_s: float | None = None
    stalls_s: float | None = None
    profile: str = ""
    """Name of the hardware profile with which the plan was made."""
    fails_at: int | None = None
    """In a longest-sequence row, the shortest length that failed; None if none had failed when the search ended."""
    complete: bool = True
    """Whether the search for the longest sequence finished within the time budget."""
    device: str = ""
    versions: dict[str, str] = {}
    created: str = ""


def row_of(case: Case, status: Status, message: str = "") -> Row:
    """Return a row with a case's names, status and message, and no measured values."""
    model = case.model
    return Row(
        rival=case.rival,
        part=case.part,
        status=status,
        message=message,
        model=model.name if model else "",
        layers=model.layers if model else 0,
        parameters=model.total_params if model else 0,
        sequence=case.seq_tokens,
        policy=case.policy,
    )


def timed(row: Row, case: Case, step_s: list[float], device_name: str) -> Row:
    """Return the row with its step times and the figures derived from them."""
    middle = median(step_s)
    return msgspec.structs.replace(
        row,
        step_s=step_s,
        median_step_s=middle,
        spread=(max(step_s) - min(step_s)) / middle,
        tokens_per_s=case.tokens / middle,
        mfu=mfu_of(case, middle, device_name),
    )


def mfu_of(case: Case, step_s: float, device_name: str) -> float | None:
    """Return the MFU of a step: model FLOPs / (time x peak); None if the device's peak is unknown."""
    peak = next((flops for name, flops in PEAK_BF16_FLOPS.items() if name in device_name), None)
    if peak is None or case.model is None or case.dtype != "bf16":
        return None
    return case.model.step_flops(case.seq_tokens) / (step_s * peak)
