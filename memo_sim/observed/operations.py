"""Says what a recorded piece of work is: a product, attention, a copy, a collective, a row-wise operator.

Where shapes were recorded, it becomes the same ``Work`` that an instruction of a program has, so that one profile
prices both.

A product in backward computes an input's gradient or a weight's. The weight's sums over tokens: its inner size is one
that a forward product has as its number of rows, and its result has the sizes of that product's weight.
"""

from __future__ import annotations

import re
from collections.abc import Set as AbstractSet
from dataclasses import dataclass

from memo_sim.contract.hardware import CollectiveKind, GemmPass
from memo_sim.contract.knobs import DtypeName
from memo_sim.observed.kineto import CollectiveCall, Operator, Recording
from memo_sim.observed.kineto import Work as Recorded
from memo_sim.observed.rowwise_operators import ELEMENT_BYTES, Traffic, traffic_of
from memo_sim.observed.whole_operators import OPERANDS, QUERY
from memo_sim.program.ir.work import Attention, BatchedGemm, Collective, Copy, Gemm, Group, Rowwise, Work

DTYPES: dict[str, DtypeName] = {
    "c10::BFloat16": "bf16",
    "c10::Half": "fp16",
    "float": "fp32",
    "BFloat16": "bf16",
    "Half": "fp16",
    "Float": "fp32",
}
"""PyTorch's and NCCL's names of the dtypes that a profile may have."""
ATTENTION_KERNEL = re.compile(r"flash_(?:fwd|bwd)|fmha|sdpa|flash_attn|FlashAttn|attention", re.IGNORECASE)
PRODUCT_KERNEL = re.compile(r"gemm|nvjet|cutlass.*(?:wmma|mma)|xmma|splitKreduce|^Cijk_", re.IGNORECASE)
"""Names of cuBLAS's, CUTLASS's and (Cijk) AMD Tensile's products."""
COLLECTIVE_KERNEL = re.compile(r"nccl|rccl", re.IGNORECASE)
FSDP_COPY = re.compile(r"^fsdp::|^aten::(?:split_with_sizes_copy|_chunk_cat)$")
COMPILED_KERNEL = re.compile(r"triton_(?:poi|red|per|tem|for)_")
"""Kernels that torch.compile writes: pointwise, reductions, templates of products, and many of these in one."""
OTHER, COMPILED, ROWWISE = "other", "compiled", "row-wise"
"""Kinds of work that is not recognised, of torch.compile's kernels, and of row-wise operators."""
OVERHEAD = "overhead"
"""Operators of a CPU that only describe a tensor anew, or call others."""
OF_LISTS = "works on lists of tensors, whose dtypes are not recorded"
FSDP = "fsdp copies"
"""Copies of FSDP between shards and whole parameters or gradients."""
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
    r"|_local_scalar_dense|to|_to_copy|contiguous|clone|zeros\w*|ones\w*|full\w*|new_\w+|flatten|linear|matmul|einsum"
    r"|layer_norm|scaled_dot_product_attention|cross_entropy_loss|nll_loss(?:_nd)?|log_softmax|softmax|dropout)$"
    r"|autograd::|\w*Backward\d+$|torch::autograd|detach$"
)
"""Operators that only describe a tensor anew, allocate one, or call others."""
Products = AbstractSet[tuple[int, int, int]]
"""Sizes of forward products ``(m x k) @ (k x n)``: m, which counts tokens, n and k."""
TP_DIMENSIONS = 2
HEAD_DIMENSIONS = 4


@dataclass(frozen=True, slots=True)
class Operation:
    """A recorded piece of work with its kind, and what it is for a profile; None where that is not known."""

    kind: str
    recorded: Recorded
    work: Work | None = None
    note: str = ""
    """Why there is no ``work``; empty where there is."""
    traffic: Traffic | None = None
    """Of a row-wise operator: which curves of a profile are about it."""
    stride: int = 1
    """Of a collective: how many ranks its neighbours are apart."""

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
    forward = {
        (work.m, work.n, work.k)
        for recorded in recording.work
        for operator in recorded.operators[:1]
        if not operator.backward and isinstance(work := _product(operator, frozenset()), Gemm)
    }
    return [_operation(recorded, forward) for recorded in recording.work]


def _operation(recorded: Recorded, forward: Products) -> Operation:  # noqa: PLR0911 - one return per kind
    if recorded.collective is not None:
        return _collective(recorded, recorded.collective)
    if COLLECTIVE_KERNEL.search(recorded.name):
        return Operation("collective", recorded, note="the trace does not say what it moves")
    if recorded.kind == "copy":
        return _copy(recorded)
    if recorded.kind == "memset":
        return _streamed("zero", 0, recorded.moved_bytes, recorded)
    innermost = recorded.operators[0] if recorded.operators else Operator(recorded.name)
    for operator in recorded.operators:
        if operator.name in QUERY:
            return _attention(recorded, operator)
    if innermost.name in OPERANDS:
        product = _product(innermost, forward)
        if product is None:
            return Operation("product", recorded, note="without shapes")
        if not isinstance(product, str):
            return Operation(f"product.{product.gemm_pass}", recorded, product)
        return Operation("product", recorded, note=product)
    if recorded.kind == "kernel" and ATTENTION_KERNEL.search(recorded.name):
        return Operation("attention", recorded, note="not one of PyTorch's attention operators")
    if recorded.kind == "kernel" and PRODUCT_KERNEL.search(recorded.name):
        return Operation("product", recorded, note="not one of PyTorch's products")
    return _rowwise(recorded, innermost)


def _product(operator: Operator, forward: Products) -> Gemm | BatchedGemm | str | None:
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
        gemm_pass = _backward_pass(m, n, k, forward)
    if len(a) == TP_DIMENSIONS:
        return Gemm(m, n, k, gemm_pass, dtype)
    return BatchedGemm(a[0], m, n, k, gemm_pass, dtype)


def _backward_pass(m: int, n: int, k: int, forward: Products) -> GemmPass:
    """Return which gradient a product ``(m x k) @ (k x n)`` computes, by the forward products and their weights."""
    rows, weights = {size[0] for size in forward}, {size[1:] for size in forward}
    of_weight = k in rows and ((m, n) in weights or (n, m) in weights)
    of_input = m in rows and (k, n) in weights
    if of_weight == of_input:
        return "wgrad" if k in rows else "dgrad"
    return "wgrad" if of_weight else "dgrad"


def _attention(recorded: Recorded, operator: Operator) -> Operation:
    kernel, query, heads_first, flag = QUERY[operator.name]
    backward = operator.name.endswith("_backward")
    kind = "attention.bwd" if backward else "attention"
    shapes = operator.shapes[query : query + 2]
    whole = all(len(shape) == HEAD_DIMENSIONS and 0 not in shape for shape in shapes)
    if len(shapes) < 2 or not whole or len(operator.dtypes) <= query:
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
    pageable = "" if "Pinned" in name else " (pageable)" if "Pageable" in name else " (not known to be pinned)"
    for text, direction in (("DtoH|CopyDeviceToHost", "d2h"), ("HtoD|CopyHostToDevice", "h2d")):
        if re.search(text, name):
            kind = f"copy.{direction}{pageable}"
            if pageable:
                return Operation(kind, recorded, note="not from pinned memory, which is what a profile has")
            if not recorded.moved_bytes:
                return Operation(kind, recorded, note="its bytes are not recorded")
            return Operation(kind, recorded, Copy(recorded.moved_bytes, "d2h" if direction == "d2h" else "h2d"))
    return _streamed("copy", recorded.moved_bytes, recorded.moved_bytes, recorded)


def _collective(recorded: Recorded, call: CollectiveCall) -> Operation:
    plain = re.sub(r"[^a-z]", "", call.name.lower().removeprefix("_"))
    kind = next((kind for text, kind in COLLECTIVES.items() if plain.startswith(text)), None)
    label = f"collective.{kind or call.name}"
    element = ELEMENT_BYTES.get(call.dtype, 0)
    elements = call.elements_out if kind == "all_gather" else call.elements_in
    size = elements * element
    if kind is None or size == 0 or call.group_size < TP_DIMENSIONS:
        return Operation(label, recorded, note="its size or kind is not known")
    steps = {b - a for a, b in zip(call.ranks, call.ranks[1:], strict=False)}
    if len(steps) != 1 or min(steps) < 1:
        note = "its ranks are not equally far apart" if steps else "its ranks are not recorded"
        return Operation(label, recorded, note=note)
    (stride,) = steps
    group: Group = "tp" if stride == 1 else "grads"
    return Operation(label, recorded, Collective(kind, size, call.group_size, group), stride=stride)


def _rowwise(recorded: Recorded, operator: Operator) -> Operation:
    of_fsdp = any(FSDP_COPY.search(each.name) for each in recorded.operators)
    if not of_fsdp and any(OPTIMIZER.search(each.name) for each in recorded.operators):
        return Operation("optimizer", recorded, note=OF_LISTS)
    if recorded.kind == "kernel" and COMPILED_KERNEL.match(recorded.name):
        return Operation(COMPILED, recorded, note="a kernel of torch.compile, whose sizes are not recorded")
    if recorded.kind == "operator" and MOVES_NOTHING.match(operator.name):
        return Operation(OVERHEAD, recorded, note="moves no bytes")
    found = traffic_of(operator)
    if found is not None:
        return Operation(FSDP if of_fsdp else ROWWISE, recorded, found.work, traffic=found)
    if of_fsdp:
        return Operation(FSDP, recorded, note=OF_LISTS)
    return Operation(OTHER, recorded, note=_unknown(recorded, operator))


def _unknown(recorded: Recorded, operator: Operator) -> str:
    """Return why a kernel or operator is not recognised."""
    if recorded.in_graph:
        return "in a CUDA graph, which records no operators"
    if not recorded.operators:
        return "no operator launched it"
    if "TensorList" in operator.dtypes:
        return OF_LISTS
    if operator.name.startswith("aten::") and not any(operator.shapes):
        return "without shapes"
    return "not recognised"


def _streamed(kind: str, read_bytes: int, write_bytes: int, recorded: Recorded) -> Operation:
    """Return a row-wise operation that is no operator of PyTorch; ``kind`` is that of a program's operator."""
    if read_bytes + write_bytes == 0:
        return Operation(ROWWISE, recorded, note="without sizes")
    work = Rowwise(kind, 1, read_bytes, write_bytes)
    return Operation(ROWWISE, recorded, work, traffic=Traffic(work, "elementwise", kind))
