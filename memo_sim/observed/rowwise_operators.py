"""Which bytes PyTorch's row-wise operators move, and which curve of a profile is about such a kernel.

    operator            pattern        own kind of a profile     bytes
    aten::mul           elementwise    -                         reads its inputs, writes the largest
    aten::gelu          elementwise    gelu                      the same
    aten::copy_         elementwise    copy                      reads its second input, writes the first
    aten::embedding     strided        -                         the rows that the indices choose, twice

An operator that this module does not name has no sizes here, because its bytes are not known.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from math import prod

from memo_sim.contract.hardware import AccessPattern
from memo_sim.observed.kineto import Operator
from memo_sim.program.ir.work import Rowwise

ELEMENT_BYTES = {
    **dict.fromkeys(("c10::BFloat16", "BFloat16", "c10::Half", "Half"), 2),
    **dict.fromkeys(("float", "Float", "int", "Int"), 4),
    **dict.fromkeys(("double", "Double", "long int", "long", "Long"), 8),
    **dict.fromkeys(("bool", "unsigned char", "signed char", "Byte", "Char", "Bool"), 1),
    **dict.fromkeys(("c10::Float8_e4m3fn", "Float8_e4m3fn", "c10::Float8_e5m2", "Float8_e5m2"), 1),
}
"""Bytes of an element by PyTorch's and NCCL's name of the dtype; tensors of other dtypes are not counted."""

OWN_KINDS = {"add": "residual_add", "copy_": "copy", "gelu": "gelu", "gelu_backward": "gelu.bwd", "zero_": "zero"}
"""Operators of a program (``Rowwise.kind``) that memo-exec plays with this one operator of PyTorch."""

_PATTERNS: dict[AccessPattern, str] = {
    "norm": r"native_layer_norm|_fused_rms_norm|rms_norm",
    "norm_backward": r"native_layer_norm_backward|_fused_rms_norm_backward",
    "softmax": r"_?(?:log_)?softmax(?:_backward_data)?",
    "strided": r"embedding|embedding_dense_backward|index\w*|gather|scatter\w*|nll_loss\w*|cat|stack|roll|flip",
    "shard_copy": r"split_with_sizes_copy",
    "row_sum": r"mean|amax|max|amin|min|argmax|logsumexp|linalg_vector_norm|norm|cumsum",
    "elementwise": (
        r"(?:add|sub|rsub|mul|div|pow|neg|exp|log|sqrt|rsqrt|reciprocal|abs|sigmoid|tanh|silu|gelu|relu|where|clamp|cos|sin"
        r"|addcmul|addcdiv|lerp|square|threshold|dropout|native_dropout|bitwise_\w+|logical_\w+|eq|ne|lt|le|gt|ge"
        r"|masked_fill|tril|triu|silu_backward|gelu_backward|tanh_backward|sigmoid_backward|threshold_backward"
        r"|native_dropout_backward|copy|clone|contiguous|_to_copy|to|zero|fill|constant_pad_nd|bernoulli)_?"
    ),
}
_COMPILED = {pattern: re.compile(text) for pattern, text in _PATTERNS.items()}


@dataclass(frozen=True, slots=True)
class Traffic:
    """A row-wise operator's work, how it goes through memory, and the program's operator that is the same."""

    work: Rowwise
    pattern: AccessPattern
    own: str
    """Kind of the program's operator; empty when there is none."""


def traffic_of(operator: Operator) -> Traffic | None:
    """Return what an operator moves; None where that is not known: another operator, or one without shapes."""
    name = operator.name.removeprefix("aten::")
    if name == operator.name or not (shapes := _sizes(operator)):
        return None
    pattern = "row_sum" if name == "sum" else next((p for p, text in _COMPILED.items() if text.fullmatch(name)), None)
    if pattern is None:
        return None
    sizes: list[int] = [prod(shape) * size for shape, size in shapes]
    largest = max(sizes)
    read, written = sum(sizes), largest
    if name in ("copy_", "zero_", "fill_"):
        read, written = (sizes[1] if name == "copy_" and len(sizes) > 1 else 0), sizes[0]
        pattern = _broadcast(shapes)
    elif name == "embedding" and len(shapes) > 1:
        (table, element), (indices, _) = shapes[:2]
        read = written = prod(indices) * table[-1] * element
    elif pattern == "row_sum":
        written = 0
        if name == "sum" and _sums_columns(operator, shapes[0][0]):
            pattern = "column_sum"
    elif pattern == "elementwise":
        pattern = _broadcast(shapes)
    if read + written == 0:
        return None
    own = OWN_KINDS.get(name, "") if pattern not in ("broadcast", "widen") else ""
    return Traffic(Rowwise(own or operator.name, 1, read, written), pattern, own)


def _sizes(operator: Operator) -> list[tuple[tuple[int, ...], int]]:
    """Return shape and element's bytes of each input that is a tensor of a known dtype with elements."""
    pairs = zip(operator.shapes, operator.dtypes, strict=False)
    return [
        (shape, ELEMENT_BYTES[dtype]) for shape, dtype in pairs if dtype in ELEMENT_BYTES and shape and 0 not in shape
    ]


def _sums_columns(operator: Operator, shape: tuple[int, ...]) -> bool:
    """Whether a sum runs over rows, so that one number for each feature is left."""
    dims = re.findall(r"-?\d{1,9}", operator.values[1]) if len(operator.values) > 1 else []
    return bool(dims) and all(int(dim) % len(shape) != len(shape) - 1 for dim in dims)


def _broadcast(shapes: list[tuple[tuple[int, ...], int]]) -> AccessPattern:
    """Return how an operator of several tensors goes through memory, by their shapes."""
    first, element = shapes[0]
    if len(shapes) > 1 and shapes[1][0] == first and shapes[1][1] < element:
        return "widen"
    for shape, _ in shapes[1:]:
        if prod(shape) < prod(first) and prod(shape) > 1:
            return "broadcast" if shape[-1] == 1 else "strided"
    return "elementwise"
