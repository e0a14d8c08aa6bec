"""Says what a recorded piece of work is: a product, attention, a copy, a collective, a row-wise operator.

Where shapes were recorded, it becomes the same ``Work`` that an instruction of a program has, so that one profile
prices both.

A product in backward computes an input's gradient or a weight's. The weight's sums over tokens: its inner size is one
that a forward product has as its number of rows.
"""

from __future__ import annotations

import re
from collections.abc import Collection
from dataclasses import dataclass
from math import prod

from memo_sim.contract.hardware import CollectiveKind, GemmPass
from memo_sim.contract.knobs import DtypeName
from memo_sim.observed.kineto import CollectiveCall, Operator, Recording
from memo_sim.observed.kineto import Work as Recorded
from memo_sim.observed.whole_operators import OPERANDS, QUERY
from memo_sim.program.ir.work import Attention, BatchedGemm, Collective, Copy, Gemm, Rowwise, Work

DTYPES: dict[str, DtypeName] = {
    "c10::BFloat16": "bf16",
    "c10::Half": "fp16",
    "float": "fp32",
    "BFloat16": "bf16",
    "Half": "fp16",
    "Float": "fp32",
}
"""PyTorch's and NCCL's names of the dtypes that a profile may have."""
ELEMENT_BYTES = {
    "c10::BFloat16": 2,
    "BFloat16": 2,
    "c10::Half": 2,
    "Half": 2,
    "float": 4,
    "Float": 4,
    "double": 8,
    "Double": 8,
    "long int": 8,
    "long": 8,
    "Long": 8,
    "int": 4,
    "Int": 4,
    "bool": 1,
    "unsigned char": 1,
    "signed char": 1,
    "Byte": 1,
    "Char": 1,
    "c10::Float8_e4m3fn": 1,
    "Float8_e4m3fn": 1,
    "c10::Float8_e5m2": 1,
    "Float8_e5m2": 1,
}
"""Bytes of an element; tensors of other dtypes are not counted."""
ATTENTION_KERNEL = re.compile(r"flash_(?:fwd|bwd)|fmha|sdpa|flash_attn|FlashAttn|attention", re.IGNORECASE)
PRODUCT_KERNEL = re.compile(r"gemm|nvjet|cutlass.*(?:wmma|mma)|xmma|splitKreduce", re.IGNORECASE)
OPTIMIZER = re.compile(r"_fused_adam|_foreach_|Optimizer\.step|multi_tensor", re.IGNORECASE)
COLLECTIVES: dict[str, CollectiveKind] = {
    "allreduce": "all_reduce",
    "allgather": "all_gather",
    "reducescatter": "reduce_scatter",
    "alltoall": "all_to_all",
    "broadcast": "broadcast",
    "reduce": "reduce",
    "sendrecv": "send_recv",
    "send": "send_recv",
    "recv": "send_recv",
}
MOVES_NOTHING = re.compile(
    r"aten::(?:view|_unsafe_view|reshape|transpose|t|permute|as_strided|expand|expand_as|slice|select|split|chunk|narrow"
    r"|unsqueeze|squeeze|detach|alias|unbind|unfold|empty\w*|resize_|set_|lift_fresh|result_type|is_nonzero|item"
    r"|_local_scalar_dense)$|autograd::|\w*Backward\d+$|torch::autograd|detach$"
)
"""Operators that only describe a tensor anew, allocate one, or call others."""
TP_DIMENSIONS = 2
HEAD_DIMENSIONS = 4


@dataclass(frozen=True, slots=True)
class Operation:
    """A recorded piece of work with its kind, and what it is for a profile; None where that is not known."""

    kind: str
    recorded: Recorded
    work: Work | None = None
    note: str = ""
    """Why there is no ``work``; empty where there is, and where nothing can be said."""

    @property
    def shape(self) -> str:
        """The sizes, for people."""
        match self.work:
            case Gemm(m, n, k, gemm_pass, dtype):
                return f"{m} x {n} x {k} {dtype} {gemm_pass}"
            case BatchedGemm(batch, m, n, k, _, dtype):
                return f"{batch} x ({m} x {n} x {k}) {dtype}"
            case Attention() as call:
                mask = "causal" if call.mask == "causal" else "no mask"
                tokens = f"{call.batch} x {call.q_tokens} tokens"
                return f"{tokens}, {call.heads} heads of {call.head_dim}, {call.dtype}, {mask}"
            case Collective() as call:
                return f"{call.bytes} bytes, {call.ranks} ranks"
            case Copy() as call:
                return f"{call.bytes} bytes"
            case _:
                return ""


def operations_of(recording: Recording) -> list[Operation]:
    """Return every piece of work of the recording with its kind, in order of its start."""
    tokens = {
        work.m
        for recorded in recording.work
        for operator in recorded.operators[:1]
        if not operator.backward and isinstance(work := _product(operator, ()), Gemm)
    }
    return [_operation(recorded, tokens) for recorded in recording.work]


def _operation(recorded: Recorded, tokens: Collection[int]) -> Operation:  # noqa: PLR0911 - one return per kind
    if recorded.collective is not None:
        return _collective(recorded, recorded.collective)
    if "nccl" in recorded.name.lower():
        return Operation("collective", recorded, note="the trace does not say what it moves")
    if recorded.kind == "copy":
        return _copy(recorded)
    if recorded.kind == "memset":
        return Operation("row-wise", recorded, _streamed("memset", 0, recorded.moved_bytes))
    innermost = recorded.operators[0] if recorded.operators else Operator(recorded.name)
    for operator in recorded.operators:
        if operator.name in QUERY:
            return _attention(recorded, operator)
    if innermost.name in OPERANDS:
        product = _product(innermost, tokens)
        if product is None:
            return Operation("product", recorded, note="without shapes")
        if not isinstance(product, str):
            return Operation(f"product.{product.gemm_pass}", recorded, product)
        return Operation("product", recorded, note=product)
    if recorded.kind == "kernel" and ATTENTION_KERNEL.search(recorded.name):
        return Operation("attention", recorded, note="not one of PyTorch's attention operators")
    if recorded.kind == "kernel" and PRODUCT_KERNEL.search(recorded.name):
        return Operation("product", recorded, note="not one of PyTorch's products")
    if any(OPTIMIZER.search(operator.name) for operator in recorded.operators):
        return Operation("optimizer", recorded)
    return _rowwise(recorded, innermost)


def _product(operator: Operator, tokens: Collection[int]) -> Gemm | BatchedGemm | str | None:
    """Return a product; None without shapes; a text where its dtype is none that a profile has."""
    if operator.name not in OPERANDS:
        return None
    left, right = OPERANDS[operator.name]
    if len(operator.shapes) <= right or len(operator.dtypes) <= right:
        return None
    a, b = operator.shapes[left], operator.shapes[right]
    if len(a) not in (2, 3) or len(a) != len(b) or a[-1] != b[-2] or 0 in a + b:
        return None
    dtype = DTYPES.get(operator.dtypes[left])
    if dtype is None:
        return f"of {operator.dtypes[left]}"
    m, k, n = a[-2], a[-1], b[-1]
    gemm_pass: GemmPass = "fprop"
    if operator.backward:
        gemm_pass = "wgrad" if k in tokens else "dgrad"
    if len(a) == TP_DIMENSIONS:
        return Gemm(m, n, k, gemm_pass, dtype)
    return BatchedGemm(a[0], m, n, k, gemm_pass, dtype)


def _attention(recorded: Recorded, operator: Operator) -> Operation:
    kernel, query, heads_first, flag = QUERY[operator.name]
    backward = operator.name.endswith("_backward")
    kind = "attention.bwd" if backward else "attention"
    shapes = operator.shapes[query : query + 2]
    if len(shapes) < 2 or any(len(shape) != HEAD_DIMENSIONS for shape in shapes) or len(operator.dtypes) <= query:
        return Operation(kind, recorded, note="without shapes")
    dtype = DTYPES.get(operator.dtypes[query])
    if dtype is None:
        return Operation(kind, recorded, note=f"of {operator.dtypes[query]}")
    (batch, first, second, head_dim), (_, key_first, key_second, _) = shapes
    heads, q_tokens, kv_heads, k_tokens = (
        (first, second, key_first, key_second) if heads_first else (second, first, key_second, key_first)
    )
    told = operator.values[flag] if len(operator.values) > flag else ""
    # Without recorded values a square call is taken as causal, as in a decoder.
    causal = told == "True" or (told != "False" and q_tokens == k_tokens)
    work = Attention(
        batch=batch,
        q_tokens=q_tokens,
        k_tokens=k_tokens,
        mask="causal" if causal and q_tokens == k_tokens else "none",
        heads=heads,
        kv_heads=kv_heads,
        head_dim=head_dim,
        backward=backward,
        kernel=kernel,
        dtype=dtype,
    )
    return Operation(kind, recorded, work)


def _copy(recorded: Recorded) -> Operation:
    name = recorded.name
    pageable = " (pageable)" if "Pageable" in name else ""
    for text, direction in (("DtoH", "d2h"), ("HtoD", "h2d")):
        if text in name:
            kind = f"copy.{direction}{pageable}"
            if pageable:
                return Operation(kind, recorded, note="not from pinned memory, which is what a profile has")
            return Operation(kind, recorded, Copy(recorded.moved_bytes, "d2h" if direction == "d2h" else "h2d"))
    return Operation("row-wise", recorded, _streamed("copy", recorded.moved_bytes, recorded.moved_bytes))


def _collective(recorded: Recorded, call: CollectiveCall) -> Operation:
    plain = re.sub(r"[^a-z]", "", call.name.lower().removeprefix("_"))
    kind = next((kind for text, kind in COLLECTIVES.items() if plain.startswith(text)), None)
    label = f"collective.{kind or call.name}"
    element = ELEMENT_BYTES.get(call.dtype, 0)
    elements = call.elements_out if kind == "all_gather" else call.elements_in
    size = elements * element
    if kind is None or size == 0 or call.group_size < TP_DIMENSIONS:
        return Operation(label, recorded, note="its size or kind is not known")
    step = {b - a for a, b in zip(call.ranks, call.ranks[1:], strict=False)}
    if step - {1}:
        return Operation(label, recorded, note="its ranks are not neighbours")
    return Operation(label, recorded, Collective(kind, size, call.group_size, "tp"))


def _rowwise(recorded: Recorded, operator: Operator) -> Operation:
    if MOVES_NOTHING.match(operator.name):
        return Operation("other", recorded, note="moves no bytes")
    sizes = [
        prod(shape) * ELEMENT_BYTES.get(dtype, 0)
        for shape, dtype in zip(operator.shapes, operator.dtypes, strict=False)
        if shape
    ]
    if not any(sizes):
        return Operation("other", recorded, note="without shapes")
    # The result is as large as the largest input, which is so for everything that works element by element.
    return Operation("row-wise", recorded, _streamed(operator.name, sum(sizes), max(sizes)))


def _streamed(kind: str, read_bytes: int, write_bytes: int) -> Rowwise | None:
    return Rowwise(kind, 1, read_bytes, write_bytes) if read_bytes + write_bytes else None
