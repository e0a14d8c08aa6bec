"""Products of dispatched rows with the weights of their experts, in FP8 (``experts.py`` has those in other dtypes).

Operands have the copies and scales of other products (``fp8.py``): rows of all experts were quantised together, and so
were the weights of all experts. An expert's rows may begin and end inside a block of 128 rows with one scale, and a sum
over its rows then leaves out the others. So no expert's rows are padded. Rows of no expert (empty seats)
become zero, because the next kernel quantises them together with others.

    out = x w^T           x (rows, in)        w (expert, out, in)
    grad_x = grad w       grad (rows, out)    w by columns (in, expert, out)
    grad_w = grad^T x     grad by columns (out, rows)   x by columns (in, rows)

On CUDA one Triton kernel plays all experts (``triton_fp8_experts.py``), because only the device knows the sizes.
torch's ``_scaled_grouped_mm`` has scales of rows alone, and neither those of blocks nor E5M2. On the CPU, where tests
alone come here, the values are multiplied that the copies stand for.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from torch import Tensor

from memo_exec.kernels import fp8_blocks
from memo_exec.kernels.call import Call
from memo_exec.kernels.fp8 import parts_of, scales_of, terms_of, values
from memo_exec.kernels.fp8_blocks import BLOCK


class Weights(NamedTuple):
    """The weights of all experts: (expert, out, in), whose last dimension is contiguous, and their scales."""

    values: Tensor
    scale: Tensor
    """Shape (1,), or of blocks (expert, out / 128, in / 128)."""


def linear(call: Call) -> None:
    """``out[row] = weight of the row's expert @ x[row]``."""
    _multiply_rows(call, "x", by_columns=False)


def linear_dgrad(call: Call) -> None:
    """``out[row] = grad[row] @ weight of the row's expert``; ``weight`` is the copy by columns."""
    _multiply_rows(call, "grad", by_columns=True)


def linear_wgrad(call: Call) -> None:
    """``out of an expert += grad.T @ x`` over its rows; both operands are copies by columns."""
    terms, ends, begun = terms_of(call), call["ends"], call.first("grad")
    m, n = (len(operand.matrix) for operand in terms[0])
    out = call["out"].view(len(ends), m, n)
    for grad, x in terms:
        if out.is_cuda:
            from memo_exec.kernels import triton_fp8_experts

            triton_fp8_experts.add_gradients(grad, x, ends, begun, out)
        else:
            left, right = values(grad), values(x)
            for expert, rows in _runs(ends, begun, left.shape[1]):
                out[expert].add_(left[:, rows] @ right[:, rows].t())
        begun += grad.matrix.shape[1]


def _multiply_rows(call: Call, role: str, *, by_columns: bool) -> None:
    out, ends, first = call.matrix("out"), call["ends"], call.first(role)
    weights = weights_of(call, by_columns=by_columns)
    for begin, end, part in parts_of(call, role):
        if out.is_cuda:
            from memo_exec.kernels import triton_fp8_experts

            triton_fp8_experts.multiply_rows(part, weights, ends, first + begin, out[begin:end])
            continue
        found, given, each = out[begin:end].zero_(), values(part), _weight_values(weights)
        for expert, rows in _runs(ends, first + begin, end - begin):
            found[rows].copy_(given[rows] @ each[expert].t())


def weights_of(call: Call, *, by_columns: bool) -> Weights:
    """Return the weights of a product of rows; ``by_columns``: of the gradient of its input."""
    scales, copy, out, experts = scales_of(call), call["weight"], call.matrix("out").shape[1], len(call["ends"])
    inside = copy.numel() // (experts * out)
    shape = (out, experts * inside) if by_columns else (experts * out, inside)
    matrices = _by_expert(copy.view(shape), experts, by_columns=by_columns)
    if call.context.decisions.fp8 == "tensor":
        return Weights(matrices, scales.of(copy))
    grid = fp8_blocks.weight_blocks(scales, copy, *shape).scale[:, : shape[1] // BLOCK]
    return Weights(matrices, _by_expert(grid, experts, by_columns=by_columns))


def _by_expert(matrix: Tensor, experts: int, *, by_columns: bool) -> Tensor:
    """View a matrix of all experts' weights, or of their scales, as (expert, out, in)."""
    rows, columns = matrix.shape
    if by_columns:
        return matrix.view(rows, experts, columns // experts).transpose(0, 1)
    return matrix.view(experts, rows // experts, columns)


def _weight_values(weights: Weights) -> Tensor:
    scale = weights.scale
    if scale.dim() == 3:  # of blocks
        scale = scale.repeat_interleave(BLOCK, 1).repeat_interleave(BLOCK, 2)
    return weights.values.float() * scale


def _runs(ends: Tensor, first: int, count: int) -> Iterator[tuple[int, slice]]:
    """Yield each expert with rows among the ``count`` dispatched ones from ``first`` on, and which of these."""
    begin = 0
    for expert, end in enumerate(ends.tolist()):
        rows = slice(max(begin, first) - first, min(end, first + count) - first)
        if rows.start < rows.stop:
            yield expert, rows
        begin = end
