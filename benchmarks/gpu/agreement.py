"""Compares the losses and gradient norms of systems that started from the same weights and saw the same batches."""

from __future__ import annotations

import msgspec

from benchmarks.gpu.row import Row
from memo_sim.contract.knobs import DtypeName

TOLERANCES: dict[str, tuple[float, float]] = {"fp32": (1e-4, 1e-3), "bf16": (2.0**-10, 2.0**-7)}
"""Relative tolerances of every step's loss and of the first gradient norm, by dtype.

Systems sum in different orders and round at different points (bf16 to 2**-8). A loss is a mean over many tokens and a
norm a sum over many weights, so most rounding errors cancel. Small models on a CPU differ by 3e-5 and 2e-4 in bf16.
"""


def with_agreement(row: Row, reference: Row | None, dtype: DtypeName) -> Row:
    """Return the row with its differences from the reference, if both have losses of the same model and length."""
    if reference is None or row.status != "ok" or not row.losses:
        return row
    if (row.model, row.sequence) != (reference.model, reference.sequence):
        return row
    pairs = list(zip(row.losses, reference.losses, strict=False))
    loss_error = max(abs(ours / theirs - 1) for ours, theirs in pairs)
    norm_error = abs(row.grad_norms[0] / reference.grad_norms[0] - 1)
    most_loss, most_norm = TOLERANCES[dtype]
    agrees = loss_error <= most_loss and norm_error <= most_norm
    text = f"losses differ from {reference.rival}'s by {loss_error:.2g}, gradient norm by {norm_error:.2g}"
    return msgspec.structs.replace(
        row,
        loss_error=loss_error,
        grad_norm_error=norm_error,
        agrees=agrees,
        reference=reference.rival,
        message=row.message if agrees else text,
    )


def reference_of(rows: list[Row], preferred: tuple[str, ...]) -> Row | None:
    """Return the first system of ``preferred`` that ran."""
    ran = {row.rival: row for row in rows if row.status == "ok" and row.losses}
    return next((ran[name] for name in preferred if name in ran), None)
