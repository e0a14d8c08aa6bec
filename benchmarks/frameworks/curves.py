"""Turns what ``python -m benchmarks.frameworks`` measured into a profile's curves of framework kernels.

Each kernel of a subject is found by a part of its name, and stands for the tensors that it reads and writes: ``n`` one
tensor in bf16, ``w`` one in fp32, ``h`` half a tensor in bf16.
A point is (bytes that the kernels of a pattern move, those bytes / their seconds), one for each size measured.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

Patterns = dict[str, tuple[list[float], list[float]]]
"""By pattern: bytes moved by one kernel, and bytes per second."""

SIZES = {"n": 4, "w": 8, "h": 2}
"""Half bytes of an element."""


@dataclass(frozen=True)
class Read:
    """How a kernel of a subject is read: ``launches`` tells kernels of one name apart, where it is given."""

    subject: str
    name: str
    tensors: str
    pattern: str
    launches: float | None = None


EAGER = (
    Read("residual, forward", "CUDAFunctor_add", "nnn", "elementwise"),
    Read("gelu, forward", "GeluCUDAKernel", "nn", "elementwise"),
    Read("gelu, forward and backward", "GeluBackward", "nnn", "elementwise"),
    Read("silu_mul, forward", "BinaryFunctor", "nnn", "elementwise"),
    Read("silu_mul, forward", "silu_kernel", "nn", "elementwise"),
    Read("rms_norm, written out, forward", "direct_copy", "nw", "elementwise"),
    Read("rms_norm, written out, forward", "pow_tensor", "ww", "elementwise"),
    Read("rms_norm, written out, forward", "elementwise_kernel<128, 2", "ww", "elementwise"),
    Read("rms_norm, written out, forward", "elementwise_kernel<128, 4", "nn", "elementwise"),
    Read("rms_norm, written out, forward", "bfloat16_copy", "wn", "elementwise"),
    Read("rms_norm, written out, forward", "reduce_kernel", "w", "row_sum"),
    Read("rms_norm, written out, forward and backward", "reduce_kernel<128, 4", "n", "column_sum"),
    Read("layer_norm, forward", "vectorized_layer_norm", "nn", "norm"),
    Read("layer_norm, forward and backward", "layer_norm_grad_input", "nnn", "norm_backward"),
    Read("layer_norm, forward and backward", "GammaBetaBackward", "nn", "norm_backward"),
    Read("rotary, written out, forward", "elementwise_kernel<128, 4", "nn", "strided", 2.0),
    Read("rotary, written out, forward", "elementwise_kernel<128, 4", "hh", "strided", 1.0),
    Read("rotary, written out, forward", "CatArray", "nn", "strided"),
    Read("cross_entropy, forward and backward", "SoftMax", "wwww", "softmax"),
)

COMPILED = (
    Read("residual, forward", "triton", "nnn", "elementwise"),
    Read("gelu, forward", "triton", "nn", "elementwise"),
    Read("silu_mul, forward", "triton", "nnn", "elementwise"),
    Read("silu_mul, forward and backward", "silu_backward", "nnnnn", "elementwise"),
    Read("layer_norm, forward", "triton", "nn", "norm"),
    Read("rms_norm, forward", "triton", "nn", "norm"),
    Read("layer_norm, forward and backward", "triton_per", "nnn", "norm_backward"),
    Read("rms_norm, forward and backward", "triton_per", "nnn", "norm_backward"),
    Read("rotary, written out, forward", "triton", "nn", "strided"),
    Read("rotary, written out, forward and backward", "slice_backward", "nn", "strided"),
)

FOREACH_BYTES = 80
"""Bytes that the kernels of foreach AdamW move a parameter: nine operators over fp32 tensors, as the table has them."""


def curves(found: Mapping[str, Any], library: str) -> Patterns:
    """Return the curves of ``eager`` or ``compiled`` from the document that the benchmark wrote.

    Raises:
        ValueError: when no kernel of a subject has the name that is looked for: torch has changed.
    """
    reads = {"eager": EAGER, "compiled": COMPILED}[library]
    points: dict[tuple[str, str], list[tuple[float, float]]] = {}
    for part in ("rowwise", "rowwise small", "rowwise large", "loss"):
        rows = [row for row in found[part] if row["library"] == library]
        wanted = [read for read in reads if any(row["subject"] == read.subject for row in rows)]
        for read in wanted:
            for launches, moved, seconds in _kernels(rows, read):
                points.setdefault((read.pattern, part), []).extend([(moved, seconds)] * round(launches))
    if library == "eager":
        (adamw,) = (row for row in found["optimizer"] if row["library"] == "foreach" and row["subject"] == "adamw")
        parameters = adamw["shape"]["parameters"]
        points["multi_tensor", "optimizer"] = [(FOREACH_BYTES * parameters, adamw["seconds"])]
    made: Patterns = {}
    for (pattern, _), kernels in points.items():
        xs, ys = made.setdefault(pattern, ([], []))
        xs.append(sum(moved for moved, _ in kernels) / len(kernels))
        ys.append(sum(moved for moved, _ in kernels) / sum(seconds for _, seconds in kernels))
    return {pattern: _sorted(xs, ys) for pattern, (xs, ys) in sorted(made.items())}


def _kernels(rows: Iterable[Mapping[str, Any]], read: Read) -> Sequence[tuple[float, float, float]]:
    """Return (launches, bytes moved by one, seconds of one) of the kernels that ``read`` means."""
    found: list[tuple[float, float, float]] = []
    for row in rows:
        if row["subject"] != read.subject:
            continue
        shape = row["shape"]
        elements = shape["tokens"] * shape.get("features", shape.get("vocab", 0))
        moved = elements * sum(SIZES[tensor] for tensor in read.tensors) / 2
        found += [
            (kernel["launches"], moved, kernel["seconds"])
            for kernel in row["kernels"]
            if read.name in kernel["name"] and read.launches in (None, kernel["launches"])
        ]
    if not found:
        raise ValueError(f"no kernel of {read.subject!r} has {read.name!r} in its name")
    return found


def _sorted(xs: list[float], ys: list[float]) -> tuple[list[float], list[float]]:
    order = sorted(range(len(xs)), key=xs.__getitem__)
    return [xs[i] for i in order], [ys[i] for i in order]
