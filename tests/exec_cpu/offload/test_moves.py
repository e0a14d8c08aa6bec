"""Offloading on a CPU without a slab: the bytes of a step, counted, are at most those of one that keeps its tensors."""

import mmap
import subprocess
import sys
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from memo_exec import offload_activations
from memo_exec.memory.pinned import mapping
from memo_exec.offload import lanes as lanes_module
from memo_exec.offload import moves as moves_module
from memo_exec.offload.context import OffloadActivations, keep_activations
from tests.exec_cpu.offload.test_offload_activations import LiveBytes, equal, gradients, make

LINUX_ONLY = pytest.mark.skipif(sys.platform != "linux", reason="pages return to the system by madvise")
ROOT = Path(__file__).parents[3]

pytestmark = pytest.mark.usefixtures("as_on_a_cpu")


@pytest.mark.parametrize("use_streams", [True, False])
@pytest.mark.parametrize("name", ["mlp", "gpt2", "llama"])
def test_gradients_are_those_of_autograd(name: str, use_streams: bool) -> None:
    forward, parameters = make(name)
    wanted = gradients(forward(), parameters)
    context = offload_activations(device="cpu", min_offload_size=1024, use_streams=use_streams, debug=True)
    for _ in range(2):
        with context:
            loss = forward()
        assert equal(gradients(loss, parameters), wanted)
    assert context.statistics.offloaded_bytes >= context.statistics.restored_bytes > 0
    context.synchronize()  # counts what has died since the last unpack
    assert context.statistics.host_peak_bytes < context.statistics.offloaded_bytes
    assert context._swap._host_bytes == 0  # type: ignore[attr-defined]


@pytest.mark.parametrize("name", ["mlp", "gpt2", "llama"])
def test_no_step_takes_more_bytes(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Copies run where they are issued, so that the count does not depend on threads."""
    monkeypatch.setattr(lanes_module, "INLINE_BYTES", 2**40)
    largest = 0

    def counted(size_bytes: int) -> Tensor:
        nonlocal largest
        largest = max(largest, size_bytes)
        return mapping(size_bytes)

    monkeypatch.setattr(moves_module, "mapping", counted)

    def step(context: Any) -> tuple[int, int, int]:
        with LiveBytes({}) as live:  # counts the model and its input too
            forward, parameters = make(name)
            with context:
                loss = forward()
            after, forward_peak, live.peak = live.now(), live.peak, 0
            gradients(loss, parameters)
        return after, forward_peak, live.peak

    after, forward_peak, backward_peak = step(nullcontext())
    context = offload_activations(device="cpu", min_offload_size=1024)
    found = step(context)
    assert context.statistics.offloaded_tensors > 10
    assert found[0] <= after
    assert found[1] <= forward_peak + largest  # a block that is being copied is there twice
    assert found[2] <= backward_peak


def test_what_something_else_holds_is_not_copied() -> None:
    held = [torch.randn(2**18, requires_grad=True) for _ in range(8)]
    squares = [each * 1 for each in held]
    context = offload_activations(device="cpu", max_fwd_stash_size=1)
    with context:
        losses = [each.square().sum() for each in squares]
        assert context.statistics.offloaded_tensors == 0
        del squares
        losses.append((held[0] * 2).square().sum())
    assert context.statistics.offloaded_tensors == 8
    found = torch.autograd.grad(losses, held)
    assert torch.equal(found[1], 2 * held[1].detach())


def test_parts_of_a_storage_are_copied_with_what_is_between_them() -> None:
    weight = torch.randn(3 * 2**18, requires_grad=True)

    def gradient(context: Any, rows: int) -> Tensor:
        with context:
            whole = (weight * 2).view(-1, 3, 64)
            loss = sum((whole[:rows, i].square().sum() for i in range(3)), torch.zeros(()))
            del whole
            for _ in range(3):
                loss = loss + (weight * 3).square().sum()
        if isinstance(context, OffloadActivations):
            context._swap._in_flight.join()  # type: ignore[attr-defined]
        return torch.autograd.grad(loss, weight)[0]

    for rows, copies, size in ((4096, 1, 3 * 2**20), (256, 3, 3 * 2**16)):
        context = offload_activations(device="cpu", max_fwd_stash_size=3, min_offload_size=1024, debug=True)
        assert torch.equal(gradient(context, rows), gradient(keep_activations(), rows))
        moved = context.statistics
        assert moved.offloaded_tensors == moved.restored_tensors == copies
        assert moved.offloaded_bytes == moved.restored_bytes == size


def test_restored_bytes_serve_a_second_backward() -> None:
    forward, parameters = make("gpt2")
    wanted = gradients(forward(), parameters)
    context = offload_activations(device="cpu", min_offload_size=1024, debug=True)
    with context:
        loss = forward()
    context.synchronize()  # the original of a copy in flight would be used in place
    assert equal(list(torch.autograd.grad(loss, list(parameters.values()), retain_graph=True)), wanted)
    restored = context.statistics.restored_tensors
    assert equal(gradients(loss, parameters), wanted)
    assert context.statistics.restored_tensors == restored > 0


def test_new_data_of_a_parameter_means_what_it_means_to_autograd() -> None:
    def gradient(context: Any) -> Tensor:
        weight, x = torch.nn.Parameter(torch.ones(4, 4)), torch.ones(2, 4, requires_grad=True)
        with context:
            loss = (x @ weight).sum()
        weight.data = torch.full((4, 4), 3.0)
        return torch.autograd.grad(loss, x)[0]

    assert torch.equal(gradient(offload_activations(device="cpu")), gradient(nullcontext()))


def test_a_graph_without_backward_frees_its_bytes() -> None:
    forward, _ = make("mlp")
    context = offload_activations(device="cpu", min_offload_size=1024)
    with context:
        loss = forward()
    context.synchronize()
    assert context._swap._host_bytes > 0  # type: ignore[attr-defined]
    del loss
    with context:
        pass
    assert context._swap._host_bytes == 0  # type: ignore[attr-defined]


@pytest.mark.parametrize("filled", [True, False])
def test_a_storage_that_is_empty_when_its_turn_comes(filled: bool) -> None:
    """FSDP empties a storage after forward and fills it again before backward."""
    weight = torch.randn(2**18, requires_grad=True)
    context = offload_activations(device="cpu", max_fwd_stash_size=1)
    with context:
        x = weight * 2
        storage = x.untyped_storage()
        loss = x.square().sum()
        values = x.detach().clone()
        alias = x.detach()
        size = storage.nbytes()
        del x
        storage.resize_(0)
        loss = loss + (weight * 3).square().sum() + (weight * 4).square().sum()
    if not filled:
        del alias
        with pytest.raises(RuntimeError, match="was emptied after the save"):
            loss.backward()
        return
    storage.resize_(size)
    with torch.no_grad(), torch.autograd._unsafe_preserve_version_counter(alias):
        alias.copy_(values)
    loss.backward()
    assert weight.grad is not None
    assert torch.allclose(weight.grad, 2 * (4 + 9 + 16) * weight.detach())


@LINUX_ONLY
def test_the_pages_of_a_copy_return_to_the_system_when_backward_has_used_it() -> None:
    weight = torch.randn(2**24, requires_grad=True)  # 64 MiB, as each copy
    context = offload_activations(device="cpu", max_fwd_stash_size=1)
    with context:
        loss = sum(((weight * n).square().sum() for n in range(1, 4)), torch.zeros(()))
    context.synchronize()
    before = _resident_bytes()
    (found,) = torch.autograd.grad(loss, weight)
    assert context.statistics.restored_tensors == 3
    assert _resident_bytes() - before < 2**26 - 2**27  # one gradient more, three copies less
    del found


def _resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * mmap.PAGESIZE


@LINUX_ONLY
@pytest.mark.slow
def test_a_process_is_no_larger_than_with_torchs_own() -> None:
    """Peaks of the resident memory, C library's heap included, of three steps of a model in processes of their own."""

    def peak_bytes(way: str) -> int:
        command = [sys.executable, "-m", "benchmarks.executor", "--one", way, "gpt", "2", "256", "4096"]
        ran = subprocess.run(command, check=True, capture_output=True, text=True, cwd=ROOT)
        return int(ran.stdout.split()[1])

    assert peak_bytes("with copies") <= 1.02 * peak_bytes("save_on_cpu")
