"""One system at one length, as scripts read it: what ``rows.json`` is a list of."""

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
"""Dense bf16 peaks of NVIDIA's datasheets, by a part of the device's name; the first that matches counts."""


class Row(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What was measured; None where nothing was, or where it means nothing on this device."""

    rival: str
    part: Part
    status: Status
    message: str = ""
    model: str = ""
    layers: int = 0
    parameters: int = 0
    sequence: int = 0
    """Tokens; of a longest-sequence row the longest that ran."""
    policy: str = ""
    alpha: float | None = None
    step_s: list[float] = []
    """Wall clock of every step after the warm-up: batch to the end of the update."""
    median_step_s: float | None = None
    spread: float | None = None
    """(slowest - fastest) / median."""
    tokens_per_s: float | None = None
    mfu: float | None = None
    """By MEMO 5.1 (causal mask counted, one embedding), of the datasheet's dense bf16 peak."""
    peak_device_bytes: int | None = None
    """Most that torch's allocator had handed out; on a CPU, memo's own count."""
    peak_reserved_bytes: int | None = None
    """Most that torch's allocator held."""
    host_bytes: int | None = None
    """Pinned host memory, as large as it was asked of the system."""
    losses: list[float] = []
    """Of every step, the warm-up's too."""
    grad_norms: list[float] = []
    loss_error: float | None = None
    """Largest relative difference of a step's loss from the reference's."""
    grad_norm_error: float | None = None
    """Relative difference of the first step's gradient norm from the reference's."""
    agrees: bool | None = None
    """Whether both are within the dtype's tolerance; None where there is nothing to compare with."""
    reference: str = ""
    """The system whose losses those are."""
    backend: str = ""
    comparison: Comparison | None = None
    """Predicted beside measured."""
    predicted_device_bytes: int | None = None
    """The arena, and what libraries allocate beside it: what torch's allocator should have handed out."""
    predicted_mfu: float | None = None
    predicted_host_bytes: int | None = None
    predicted_stalls_s: float | None = None
    stalls_s: float | None = None
    profile: str = ""
    """The hardware profile that the plan was made with."""
    fails_at: int | None = None
    """Of a longest-sequence row: the shortest that did not run; None where the search ended before one failed."""
    complete: bool = True
    """Whether the search for the longest sequence ended by itself."""
    device: str = ""
    versions: dict[str, str] = {}
    created: str = ""


def row_of(case: Case, status: Status, message: str = "") -> Row:
    """Return a row that says of a case only how it ended."""
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
    """Return the row with its steps' times and what follows from them."""
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
    """Return the model FLOPs of a step over what the device could have done, None for a device without a known peak."""
    peak = next((flops for name, flops in PEAK_BF16_FLOPS.items() if name in device_name), None)
    if peak is None or case.model is None or case.dtype != "bf16":
        return None
    return case.model.step_flops(case.seq_tokens) / (step_s * peak)
