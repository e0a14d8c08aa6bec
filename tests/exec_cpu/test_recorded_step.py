"""A step that PyTorch's profiler records here becomes products and attention of the right sizes."""

from __future__ import annotations

from collections import Counter

import pytest
import torch
from torch.nn.functional import scaled_dot_product_attention
from torch.profiler import ProfilerActivity, profile, schedule

from memo_sim.observed.kineto import Recording, read_recording
from memo_sim.observed.operations import operations_of
from memo_sim.observed.whole_operators import QUERY
from memo_sim.program.ir.work import Attention, Gemm

TOKENS, HIDDEN, HEADS = 128, 64, 4


def step(weight: torch.Tensor, out: torch.Tensor, x: torch.Tensor) -> None:
    q, k, v = (part.view(1, TOKENS, HEADS, -1).transpose(1, 2) for part in (x @ weight).chunk(3, -1))
    heads = scaled_dot_product_attention(q, k, v, is_causal=True)
    (heads.transpose(1, 2).reshape(TOKENS, HIDDEN) @ out).square().mean().backward()  # type: ignore[no-untyped-call]


@pytest.fixture(scope="module")
def recording(tmp_path_factory: pytest.TempPathFactory) -> Recording:
    path = tmp_path_factory.mktemp("trace") / "cpu.json"
    weight, out = torch.randn(HIDDEN, 3 * HIDDEN, requires_grad=True), torch.randn(HIDDEN, HIDDEN, requires_grad=True)
    x = torch.randn(TOKENS, HIDDEN, requires_grad=True)
    plan = schedule(wait=1, warmup=1, active=2)

    with profile(activities=[ProfilerActivity.CPU], record_shapes=True, schedule=plan) as profiler:
        for _ in range(4):
            step(weight, out, x)
            profiler.step()
    profiler.export_chrome_trace(str(path))
    return read_recording(path.read_bytes(), path.name)


def test_products_and_attention_have_their_sizes(recording: Recording) -> None:
    assert len(recording.steps) == 2
    assert not recording.on_gpu
    found = Counter(one.work for one in operations_of(recording) if isinstance(one.work, Gemm | Attention))
    attention = Attention(
        1,
        TOKENS,
        TOKENS,
        "causal",
        HEADS,
        HEADS,
        HIDDEN // HEADS,
        backward=False,
        kernel="torch-flash-cpu",
        dtype="fp32",
    )
    products = [
        Gemm(TOKENS, 3 * HIDDEN, HIDDEN, "fprop", "fp32"),
        Gemm(TOKENS, HIDDEN, HIDDEN, "fprop", "fp32"),
        Gemm(TOKENS, HIDDEN, HIDDEN, "dgrad", "fp32"),
        Gemm(HIDDEN, HIDDEN, TOKENS, "wgrad", "fp32"),
        Gemm(TOKENS, HIDDEN, 3 * HIDDEN, "dgrad", "fp32"),
        Gemm(HIDDEN, 3 * HIDDEN, TOKENS, "wgrad", "fp32"),
    ]
    assert {work: count for work, count in found.items() if isinstance(work, Gemm)} == dict.fromkeys(products, 2)
    assert found[attention] == 2


def test_operators_take_no_more_than_the_steps(recording: Recording) -> None:
    within = [one for one in recording.work if recording.steps[0][0] <= one.start_us <= recording.steps[-1][1]]
    busy = sum(one.seconds for one in within)
    assert 0 < busy <= sum(end - start for start, end in recording.steps) * 1e-6


@pytest.mark.parametrize("name", [name for name in QUERY if name.startswith("aten::")])
def test_attention_operators_have_the_inputs_that_are_read(name: str) -> None:
    schema = getattr(torch.ops.aten, name.removeprefix("aten::")).default._schema
    arguments = [argument.name for argument in schema.arguments]
    _, query, _, flag = QUERY[name]
    assert (arguments[query], arguments[query + 1], arguments[flag]) == ("query", "key", "is_causal")
