import gzip
import json

import pytest

from memo_sim.contract.errors import BadInput
from memo_sim.observed.kineto import read_recording
from memo_sim.observed.operations import operations_of
from memo_sim.program.ir.work import Attention, BatchedGemm, Collective, Copy, Gemm, Rowwise
from tests.sim.observed.recorded import STEP_US, Trace, one_step


def test_work_has_the_operators_that_launched_it() -> None:
    recording = read_recording(one_step().raw(), "t.json")
    assert recording.device == "NVIDIA A100-SXM4-80GB"
    assert recording.steps == ((0.0, STEP_US),)
    assert recording.marked
    assert recording.on_gpu
    first = recording.work[0]
    assert [operator.name for operator in first.operators] == ["aten::mm"]
    assert first.seconds == pytest.approx(1e-3)
    backward = recording.work[2].operators
    assert backward[0].name == "aten::mm"
    assert backward[0].backward


def test_recorded_work_becomes_a_programs_work() -> None:
    found = [operation.work for operation in operations_of(read_recording(one_step().raw(), "t.json"))]
    assert found == [
        Gemm(4096, 512, 1024, "fprop", "bf16"),
        Attention(1, 4096, 4096, "causal", 8, 8, 64, backward=False, kernel="torch-flash", dtype="bf16"),
        Gemm(1024, 512, 4096, "wgrad", "bf16"),
        Gemm(4096, 1024, 512, "dgrad", "bf16"),
        Collective("all_reduce", 2 * 1048576, 8, "tp"),
        Copy(20_000_000, "d2h"),
    ]


def test_a_gzipped_trace_is_read() -> None:
    assert read_recording(gzip.compress(one_step().raw()), "t") == read_recording(one_step().raw(), "t")


def test_batches_masks_and_bytes() -> None:
    trace = Trace()
    trace.launch("aten::bmm", "gemm", 0, (0, 1), shapes=[[3, 4, 5], [3, 5, 6]])
    trace.launch(
        "aten::_flash_attention_forward",
        "flash_fwd",
        50,
        (50, 51),
        shapes=[[2, 128, 4, 64], [2, 256, 4, 64], [2, 256, 4, 64]],
    )
    trace.launch("aten::add", "elementwise", 100, (100, 101), shapes=[[10, 10], [10, 10], []])
    batched, attention, added = (operation.work for operation in operations_of(read_recording(trace.raw(), "t")))
    assert batched == BatchedGemm(3, 4, 6, 5, "fprop", "bf16")
    assert isinstance(attention, Attention)
    assert (attention.mask, attention.q_tokens, attention.k_tokens, attention.heads) == ("none", 128, 256, 4)
    assert isinstance(added, Rowwise)
    assert (added.read_bytes, added.write_bytes) == (400, 200)


def test_what_is_not_known_says_why() -> None:
    trace = Trace()
    trace.launch("aten::mm", "gemm", 0, (0, 1))
    trace.launch("aten::mm", "gemm", 50, (50, 51), shapes=[[4, 4], [4, 4]], of="c10::Float8_e4m3fn")
    trace.launch("custom::linear", "nvjet_tst_192x192", 100, (100, 101))
    trace.launch("aten::copy_", "Memcpy HtoD (Pageable -> Device)", 150, (150, 151), cat="gpu_memcpy", bytes=4096)
    trace.launch("c10d::x", "ncclDevKernel_SendRecv", 200, (200, 201))
    found = operations_of(read_recording(trace.raw(), "t"))
    assert [operation.work for operation in found] == [None] * 5
    assert [operation.note for operation in found] == [
        "without shapes",
        "of c10::Float8_e4m3fn",
        "not one of PyTorch's products",
        "not from pinned memory, which is what a profile has",
        "the trace does not say what it moves",
    ]


def test_without_marks_everything_is_one_step() -> None:
    trace = Trace()
    trace.launch("aten::mm", "gemm", 0, (10, 20))
    trace.launch("aten::mm", "gemm", 50, (60, 90))
    recording = read_recording(trace.raw(), "t")
    assert recording.steps == ((10.0, 90.0),)
    assert not recording.marked


def test_steps_ranks_and_missing_shapes_are_told() -> None:
    trace = Trace()
    trace.distributed = {"rank": 3, "world_size": 16, "backend": "nccl"}
    for number in (7, 8):
        trace.add("user_annotation", f"ProfilerStep#{number}", 100.0 * number, 100.0)
        trace.launch("aten::mm", "gemm", 100.0 * number + 5, (100.0 * number, 100.0 * number + 50))
    recording = read_recording(trace.raw(), "t")
    assert recording.labels == ("ProfilerStep#7", "ProfilerStep#8")
    assert (recording.rank, recording.world_size, recording.shapes) == (3, 16, False)


def test_kernels_that_cannot_be_compared_say_why() -> None:
    trace = Trace()
    trace.add("cuda_runtime", "cudaGraphLaunch", 0.0, 5.0, correlation=900)
    trace.add("kernel", "elementwise_in_graph", 10.0, 5.0, correlation=900)
    trace.add("kernel", "nvjet_tst_128x64", 16.0, 5.0, correlation=900)
    trace.launch("triton_poi_fused_add_0", "triton_poi_fused_add_0", 50, (50, 60))
    trace.launch("fsdp::all_gather_copy_in", "copy_kernel", 100, (100, 110))
    trace.launch("aten::split_with_sizes_copy", "split_copy", 150, (150, 160), shapes=[[1024]])
    trace.launch("aten::_foreach_mul_", "multi_tensor_apply", 200, (200, 210))
    trace.launch("aten::cat", "CatArrayBatchedCopy", 225, (225, 230), shapes=[[], []], kinds=["TensorList", "Scalar"])
    trace.launch("liger::rms_norm", "_rms_norm_kernel", 250, (250, 260), shapes=[[8, 8]])
    found = [(one.kind, one.note) for one in operations_of(read_recording(trace.raw(), "t"))]
    lists = "works on lists of tensors, whose dtypes are not recorded"
    assert found == [
        ("other", "in a CUDA graph, which records no operators"),
        ("product", "not one of PyTorch's products"),
        ("compiled", "a kernel of torch.compile, whose sizes are not recorded"),
        ("fsdp copies", lists),
        ("fsdp copies", ""),
        ("optimizer", lists),
        ("other", lists),
        ("other", "not recognised"),
    ]


def test_names_of_rocm_are_recognised() -> None:
    trace = Trace("AMD Instinct MI300X")
    trace.launch("custom::linear", "Cijk_Alik_Bljk_SB_MT64x16x32", 0, (0, 1))
    trace.launch("c10d::x", "rcclDevKernel_Generic", 50, (50, 51))
    trace.launch("aten::copy_", "Memcpy HtoD (Host -> Device)", 100, (100, 101), cat="gpu_memcpy", bytes=64)
    trace.launch("aten::copy_", "Memcpy HtoD (Pinned -> Device)", 150, (150, 151), cat="gpu_memcpy")
    found = operations_of(read_recording(trace.raw(), "t"))
    assert [one.kind for one in found] == ["product", "collective", "copy.h2d (not known to be pinned)", "copy.h2d"]
    assert [one.note for one in found][2:] == [
        "not from pinned memory, which is what a profile has",
        "its bytes are not recorded",
    ]


def test_categories_of_the_first_versions_are_read() -> None:
    raw = one_step().raw()
    for new, old in (
        ("cpu_op", "Operator"),
        ("cuda_runtime", "Runtime"),
        ("kernel", "Kernel"),
        ("gpu_memcpy", "Memcpy"),
    ):
        raw = raw.replace(f'"cat": "{new}"'.encode(), f'"cat": "{old}"'.encode())
    assert read_recording(raw.replace(b'"user_annotation"', b'"cpu_op"'), "t") == read_recording(one_step().raw(), "t")


def test_groups_that_are_not_neighbours_keep_their_distance() -> None:
    trace = Trace()
    args = {"Collective name": "_allgather_base", "In msg nelems": 256, "Out msg nelems": 1024, "dtype": "Float"}
    for number, ranks in enumerate(("[0, 2, 4, 6]", "[0, 8, 16, ...]", "[0, 1, 3]", "", "[0, \u00b2]", "1" * 5000)):
        more = {**args, "Group size": 4, "Process Group Ranks": ranks}
        trace.launch("c10d::x", "ncclDevKernel_AllGather", 50.0 * number, (50.0 * number, 50.0 * number + 1), **more)
    found = operations_of(read_recording(trace.raw(), "t"))
    assert [(one.work, one.stride) for one in found[:2]] == [
        (Collective("all_gather", 4096, 4, "grads"), 2),
        (Collective("all_gather", 4096, 4, "grads"), 8),
    ]
    unknown = ["its ranks are not recorded"] * 3
    assert [one.note for one in found[2:]] == ["its ranks are not equally far apart", *unknown]


def test_a_gradient_is_told_by_the_weight_of_a_forward_product() -> None:
    """Where a loss runs over as many tokens as a weight has rows, sizes of tokens alone cannot tell."""
    trace = Trace()
    trace.launch("aten::mm", "gemm", 0, (0, 1), shapes=[[64, 32], [32, 16]])
    trace.launch("aten::mm", "gemm", 50, (50, 51), shapes=[[16, 32], [32, 8]])
    trace.add("cpu_op", "autograd::engine::evaluate_function: MmBackward0", 100, 200)
    trace.launch("aten::mm", "gemm", 110, (110, 111), shapes=[[64, 16], [16, 32]])
    trace.launch("aten::mm", "gemm", 160, (160, 161), shapes=[[32, 64], [64, 16]])
    found = [one.kind for one in operations_of(read_recording(trace.raw(), "t"))]
    assert found == ["product.fprop", "product.fprop", "product.dgrad", "product.wgrad"]


@pytest.mark.parametrize(
    ("operator", "inputs", "moved", "pattern"),
    [
        ("copy_", {"float": [8, 8], "c10::BFloat16": [8, 8]}, 64 * 6, "widen"),
        ("copy_", {"c10::BFloat16": [8, 8], "float": [8, 8]}, 64 * 6, "elementwise"),
        ("zero_", {"float": [8, 8]}, 64 * 4, "elementwise"),
        ("mul", {"float": [8, 8], "Float": [8, 1]}, 64 * 8 + 32, "broadcast"),
        ("mul", {"float": [8, 8], "Float": [8]}, 64 * 8 + 32, "strided"),
        ("mean", {"float": [8, 8]}, 64 * 4, "row_sum"),
        ("embedding", {"c10::BFloat16": [1000, 8], "long int": [4]}, 2 * 4 * 8 * 2, "strided"),
        ("native_layer_norm", {"c10::BFloat16": [8, 8]}, 64 * 4, "norm"),
    ],
)
def test_row_wise_operators_have_their_bytes(
    operator: str, inputs: dict[str, list[int]], moved: int, pattern: str
) -> None:
    trace = Trace()
    trace.launch(f"aten::{operator}", "kernel", 0, (0, 1), shapes=list(inputs.values()), kinds=list(inputs))
    (found,) = operations_of(read_recording(trace.raw(), "t"))
    assert isinstance(found.work, Rowwise)
    assert found.traffic is not None
    assert (found.work.moved_bytes, found.traffic.pattern) == (moved, pattern)


@pytest.mark.parametrize(
    ("dims", "pattern"), [("[0]", "column_sum"), ("[-1]", "row_sum"), ("", "row_sum"), ("1" * 5000, "row_sum")]
)
def test_a_sum_goes_over_rows_or_columns(dims: str, pattern: str) -> None:
    trace = Trace()
    trace.launch("aten::sum", "kernel", 0, (0, 1), shapes=[[8, 8], []], of="float", values=["", dims])
    (found,) = operations_of(read_recording(trace.raw(), "t"))
    assert found.traffic is not None
    assert found.traffic.pattern == pattern


@pytest.mark.parametrize(("ts", "dur"), [(1e300, 1.0), (0.0, -5.0), (0.0, 1e300), (float("-1e200"), 1.0)])
def test_times_that_no_trace_has_are_refused(ts: float, dur: float) -> None:
    trace = one_step()
    trace.add("kernel", "gemm", ts, dur)
    with pytest.raises(BadInput, match="a time that no trace has"):
        read_recording(trace.raw(), "t")


@pytest.mark.parametrize("wrong", [3, 2.5, "x", {}, [-4, 4], [[4]], [2**70]])
def test_inputs_that_are_no_tensors_are_not_read(wrong: object) -> None:
    trace = Trace()
    trace.launch("aten::mul", "elementwise", 0, (0, 1), shapes=[[4, 4]])
    trace.events[0]["args"] = {"Input Dims": [wrong], "Input type": wrong, "Concrete Inputs": wrong}
    (found,) = operations_of(read_recording(trace.raw(), "t"))
    assert (found.kind, found.work) == ("other", None)


@pytest.mark.parametrize(
    ("raw", "what"),
    [
        (b"", "not a trace"),
        (b"[1, 2]", "not a trace"),
        (b'{"traceEvents": [{"ph": 3}]}', "not a trace"),
        (b'{"traceEvents": []}', "neither operators nor device events"),
        (json.dumps({"traceEvents": [{"ph": "X", "cat": "cpu_op", "name": "a"}]}).encode(), "neither operators"),
        (b"\x1f\x8bnothing", "cannot be unpacked"),
        (b"\xff\xfe{", "not a trace"),
        (b'{"x":' + b"[" * 10**5, "not a trace"),
    ],
)
def test_what_is_no_trace_is_refused(raw: bytes, what: str) -> None:
    with pytest.raises(BadInput, match=what):
        read_recording(raw, "t.json")
