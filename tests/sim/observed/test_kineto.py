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
    ],
)
def test_what_is_no_trace_is_refused(raw: bytes, what: str) -> None:
    with pytest.raises(BadInput, match=what):
        read_recording(raw, "t.json")
