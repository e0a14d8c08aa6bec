"""Whole models under ``offload_activations``: gradients match plain autograd bit for bit, and bytes really move."""

import gc
import subprocess
import sys
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

from memo_exec import keep_activations, offload_activations
from memo_exec.offload.statistics import Why
from memo_exec.training import weights
from memo_exec.verification.autograd_model import AutogradModel
from memo_sim.contract.errors import CannotRun, UsageError
from tests.exec_cpu.small import MODELS, decide, play
from tests.refusals import refused

TOKENS = 64
SLAB_BYTES = 2**26


class Mlp(nn.Module):
    """Six layers with norms between them and an in-place activation."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.layers = nn.ModuleList(
            nn.Sequential(nn.LayerNorm(64), nn.Linear(64, 256), nn.ReLU(inplace=True), nn.Linear(256, 64))
            for _ in range(6)
        )

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = x + layer(x)
        return x


def mlp() -> tuple[Callable[[], Tensor], dict[str, Tensor]]:
    model = Mlp()
    x = torch.randn(4 * TOKENS, 64, generator=torch.Generator().manual_seed(2))
    return lambda: model(x).square().mean(), dict(model.named_parameters())


def transformer(name: str) -> tuple[Callable[[], Tensor], dict[str, Tensor]]:
    with play(decide(MODELS[name])) as interpreter:
        model = AutogradModel(MODELS[name], weights.named_parameters(interpreter), torch.float32)
    generator = torch.Generator().manual_seed(3)
    ids, labels = torch.randint(0, MODELS[name].vocab, (2, 2, TOKENS), generator=generator)
    return lambda: model.loss(ids, labels, 1 / labels.numel()), model.p


def make(name: str) -> tuple[Callable[[], Tensor], dict[str, Tensor]]:
    return mlp() if name == "mlp" else transformer(name)


def gradients(loss: Tensor, parameters: dict[str, Tensor]) -> list[Tensor]:
    return list(torch.autograd.grad(loss, list(parameters.values())))


def equal(one: list[Tensor], two: list[Tensor]) -> bool:
    return all(torch.equal(a, b) for a, b in zip(one, two, strict=True))


@pytest.mark.parametrize("use_streams", [True, False])
@pytest.mark.parametrize("fraction", [0.5, 1.0])
@pytest.mark.parametrize("name", ["mlp", *MODELS])
def test_gradients_are_those_of_autograd(name: str, fraction: float, use_streams: bool) -> None:
    """There are three passes: the first has no slab, the others have one of exactly the bytes that were needed."""
    forward, parameters = make(name)
    wanted_loss = forward()
    wanted = gradients(wanted_loss, parameters)
    context = offload_activations(device="cpu", use_streams=use_streams, fraction=fraction, debug=True)
    for _ in range(3):
        with context:
            loss = forward()
        assert torch.equal(loss, wanted_loss)
        assert equal(gradients(loss, parameters), wanted)
    moved = context.statistics
    assert moved.offloaded_bytes > moved.restored_bytes / 2 > 0
    assert moved.host_bytes == moved.host_peak_bytes == moved.offloaded_bytes / 3
    # Two parts of a packed tensor are copied without their gaps, and nothing is copied twice.
    assert moved.reused_tensors < moved.offloaded_tensors / 2


@pytest.mark.parametrize("fraction", [0.0, 0.25, 0.5, 0.75])
def test_fraction_is_a_share_of_the_bytes(fraction: float) -> None:
    forward, _ = make("gpt2")

    def offloaded(share: float) -> int:
        context = offload_activations(device="cpu", fraction=share)
        with context:
            forward()
        return context.statistics.offloaded_bytes

    everything = offloaded(1.0)
    largest = 2 * 4 * TOKENS * TOKENS * 4  # the attention matrix
    assert 0 <= fraction * everything - offloaded(fraction) <= largest


class LiveBytes(TorchDispatchMode):
    """Counts the living bytes of storages that operators made, and their peak, without parameters and slab."""

    def __init__(self, parameters: dict[str, Tensor]) -> None:
        super().__init__()
        self.ignored = {parameter.untyped_storage()._cdata for parameter in parameters.values()}
        self.storages: dict[int, tuple[StorageWeakRef, int]] = {}
        self.peak = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for each in result if isinstance(result, (tuple, list)) else (result,):
            if isinstance(each, Tensor):
                storage = each.untyped_storage()
                if storage.nbytes() == SLAB_BYTES or storage._cdata in self.ignored:
                    continue
                self.storages[storage._cdata] = (StorageWeakRef(storage), storage.nbytes())
        self.peak = max(self.peak, self.now())
        return result

    def now(self) -> int:
        self.storages = {key: each for key, each in self.storages.items() if not each[0].expired()}
        return sum(size for _, size in self.storages.values())


def memory(name: str, **options: Any) -> tuple[int, int, int]:
    """Return the living bytes after forward, their peak in forward, and their peak in backward."""
    forward, parameters = make(name)
    context = offload_activations(
        device="cpu", host_bytes=SLAB_BYTES, **options
    )  # allocates the slab before counting starts
    live = LiveBytes(parameters)
    with live:
        with context:
            loss = forward()
        context.synchronize()
        after, peak = live.now(), live.peak
        live.peak = 0
        gradients(loss, parameters)
    return after, peak, live.peak


@pytest.mark.parametrize("name", ["mlp", "gpt2", "llama"])
def test_saved_tensors_are_freed(name: str) -> None:
    """The test counts storages itself and does not rely on our statistics."""
    kept, kept_peak, kept_backward = memory(name, fraction=0.0)
    half, half_peak, _ = memory(name, fraction=0.5, max_fwd_stash_size=1)
    gone, gone_peak, gone_backward = memory(name, max_fwd_stash_size=1, max_bwd_stash_size=1)
    assert gone < 0.1 * kept
    assert 0.4 * kept < half < 0.6 * kept
    assert gone_peak < half_peak < kept_peak
    assert gone_backward < 0.7 * kept_backward


def test_a_held_original_is_used_directly() -> None:
    context = offload_activations(device="cpu")
    x = torch.randn(TOKENS, TOKENS)
    w = torch.randn(TOKENS, TOKENS, requires_grad=True)
    with context:
        y = x @ w
    y.sum().backward()
    assert context.statistics.offloaded_bytes == x.nbytes
    assert context.statistics.restored_bytes == 0
    assert context.statistics.reused_tensors == 1


@pytest.mark.parametrize("reentrant", [True, False])
def test_checkpointing_inside(reentrant: bool) -> None:
    """Only the inputs of checkpointed layers can be offloaded."""
    model = Mlp()
    x = torch.randn(TOKENS, 64, requires_grad=True)

    def forward() -> Tensor:
        y = x * 1
        for layer in model.layers:
            y = y + checkpoint(layer, y, use_reentrant=reentrant)
        return y.square().mean()

    forward().backward()
    wanted = [p.grad.clone() for p in model.parameters() if p.grad is not None]
    model.zero_grad()
    context = offload_activations(device="cpu", debug=True)
    with context:
        loss = forward()
    loss.backward()
    assert equal([p.grad for p in model.parameters() if p.grad is not None], wanted)
    assert context.statistics.offloaded_tensors == len(model.layers) + 1  # one more for the input of square
    assert context.statistics.restored_bytes >= (len(model.layers) - 1) * x.nbytes


def test_offloading_inside_a_checkpoint() -> None:
    """Backward enters the context again when it recomputes the layer."""
    model, context = Mlp(), offload_activations(device="cpu", debug=True)
    x = torch.randn(TOKENS, 64, requires_grad=True)

    def layer(y: Tensor) -> Tensor:
        with context:
            return model(y)

    model(x).sum().backward()
    assert x.grad is not None
    wanted, x.grad = x.grad, None
    checkpoint(layer, x, use_reentrant=False).sum().backward()
    assert torch.equal(x.grad, wanted)


def test_backward_inside_the_context() -> None:
    forward, parameters = make("llama")
    wanted = gradients(forward(), parameters)
    with offload_activations(device="cpu", debug=True) as context:
        assert equal(gradients(forward(), parameters), wanted)
        assert equal(gradients(forward(), parameters), wanted)
    assert context.statistics.restored_bytes > 0


def test_accumulation_with_graphs_alive_together() -> None:
    """Two graphs of one context are differentiated in either order, and the slab grows in between."""
    forward, parameters = make("gpt2")
    wanted = gradients(forward(), parameters)
    context = offload_activations(device="cpu", debug=True)
    for order in ([0, 1], [1, 0]):
        losses = []
        for _ in range(2):
            with context:
                losses.append(forward())
        for i in order:
            assert equal(gradients(losses[i], parameters), wanted)
            losses[i] = losses[i].detach()
    with context:
        pass
    moved = context.statistics
    assert moved.host_bytes == moved.offloaded_bytes / 2


def test_backward_twice() -> None:
    forward, parameters = make("gpt2")
    wanted = gradients(forward(), parameters)
    with offload_activations(device="cpu", debug=True) as context:
        loss = forward()
    leaves = list(parameters.values())
    assert equal(list(torch.autograd.grad(loss, leaves, retain_graph=True)), wanted)
    first = context.statistics.restored_bytes
    assert equal(list(torch.autograd.grad(loss, leaves)), wanted)
    assert context.statistics.restored_bytes > first > 0
    with pytest.raises(RuntimeError, match="backward through the graph a second time"):
        torch.autograd.grad(loss, leaves)


def test_double_backward() -> None:
    weight = torch.randn(TOKENS, TOKENS, requires_grad=True)

    def penalty(context: Any) -> Tensor:
        with context:
            loss = (torch.ones(TOKENS, TOKENS) @ weight).tanh().square().sum()
            (slope,) = torch.autograd.grad(loss, weight, create_graph=True)
        return torch.autograd.grad(slope.square().sum(), weight)[0]

    context = offload_activations(device="cpu", debug=True)
    assert torch.equal(penalty(context), penalty(keep_activations()))
    assert context.statistics.restored_bytes > 0


def test_contexts_nest() -> None:
    """The innermost context applies, as with all saved-tensor hooks; a context may be entered inside itself."""
    forward, parameters = make("mlp")
    wanted = gradients(forward(), parameters)
    outer, inner = offload_activations(device="cpu"), offload_activations(device="cpu")
    with outer, outer, inner:
        loss = forward()
    assert equal(gradients(loss, parameters), wanted)
    assert outer.statistics.offloaded_bytes == 0 < inner.statistics.offloaded_bytes
    with outer, keep_activations():
        loss = forward()
    assert equal(gradients(loss, parameters), wanted)
    assert outer.statistics.offloaded_bytes == 0
    with outer:
        with outer:
            forward()
        once = outer.statistics.offloaded_bytes
        forward()
    assert outer.statistics.offloaded_bytes == 2 * once > 0


def test_an_exception_leaves_nothing_behind() -> None:
    forward, parameters = make("mlp")
    wanted = gradients(forward(), parameters)
    context = offload_activations(device="cpu", debug=True)
    with pytest.raises(ZeroDivisionError), context:
        _ = 1 / (forward() * 0).item()
    moved = context.statistics.offloaded_bytes
    assert moved > 0
    forward()
    assert context.statistics.offloaded_bytes == moved  # the hooks have been removed
    with context:
        loss = forward()
    assert equal(gradients(loss, parameters), wanted)


def test_the_graph_may_outlive_the_context() -> None:
    forward, parameters = make("mlp")
    wanted = gradients(forward(), parameters)
    with offload_activations(device="cpu", debug=True):
        loss = forward()
    gc.collect()
    assert equal(gradients(loss, parameters), wanted)


def test_a_graph_without_backward_frees_its_bytes() -> None:
    forward, _ = make("gpt2")
    context = offload_activations(device="cpu")
    for _ in range(4):
        with context:
            forward()
    assert context.statistics.host_peak_bytes == context.statistics.offloaded_bytes / 4


def test_tensors_that_do_not_fit_the_host_stay_on_the_device() -> None:
    forward, parameters = make("gpt2")
    wanted = gradients(forward(), parameters)
    context = offload_activations(device="cpu", host_bytes=200_000, debug=True)
    for _ in range(2):
        with context:
            loss = forward()
        assert equal(gradients(loss, parameters), wanted)
    moved = context.statistics
    assert 0 < moved.host_peak_bytes <= moved.host_bytes == 200_000
    assert moved.kept_bytes[Why.HOST] > 0


def test_parameters_and_buffers_stay() -> None:
    """Covers a weight saved transposed, a cast weight, and buffers that are known only from ``model``."""
    model = nn.Linear(64, 64, bias=False)
    table = torch.rand(64, 64)
    model.register_buffer("table", table)
    x = torch.randn(8, 64, requires_grad=True)
    for known, saved in ((None, table.nbytes), (model, 0)):
        context = offload_activations(device="cpu", min_offload_size=4096, model=known)
        with context:
            y = torch.addmm(torch.zeros(64), x, model.weight.t()) @ table
        y.sum().backward()
        assert context.statistics.offloaded_bytes == saved
        assert context.statistics.kept_bytes[Why.PARAMETER] >= model.weight.nbytes


def test_backward_on_many_threads() -> None:
    from concurrent.futures import ThreadPoolExecutor

    context = offload_activations(device="cpu", debug=True)

    def step(seed: int) -> bool:
        forward, parameters = make("mlp" if seed % 2 else "llama")
        wanted = gradients(forward(), parameters)
        with (
            torch.autograd.set_multithreading_enabled(seed % 3 > 0),
            context,
        ):
            loss = forward()
        return equal(gradients(loss, parameters), wanted)

    with ThreadPoolExecutor(4) as pool:
        assert all(pool.map(step, range(12)))
    assert context.statistics.restored_bytes > 0


@pytest.mark.parametrize(
    "wrong",
    [
        {"max_fwd_stash_size": 0},
        {"max_bwd_stash_size": -1},
        {"min_offload_size": -1},
        {"max_fwd_stash_size": 2.5},
        {"fraction": 1.5},
        {"fraction": "half"},
        {"host_bytes": -1},
    ],
)
def test_wrong_arguments_are_refused(wrong: dict[str, Any]) -> None:
    ((name, value),) = list(wrong.items())[:1]
    with refused(UsageError, where=name, got=str(value)):
        offload_activations(device="cpu", **wrong)


def test_more_than_the_host_has_is_refused() -> None:
    with refused(CannotRun, wanted=str(2**60), hint="host_bytes"):
        offload_activations(device="cpu", host_bytes=2**60)
    with refused(CannotRun, got="meta"):
        offload_activations(device="meta")


def test_import_is_cheap() -> None:
    code = "import sys, memo_exec; assert 'torch' not in sys.modules; memo_exec.offload_activations; memo_exec.nothing"
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert ran.returncode == 1
    assert "has no attribute 'nothing'" in ran.stderr


def test_a_machine_without_a_gpu_copies_nothing_unless_the_cpu_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    forward, parameters = make("mlp")
    wanted = gradients(forward(), parameters)
    context = offload_activations(host_bytes=SLAB_BYTES, debug=True)
    with context, context:
        loss = forward()
    assert equal(gradients(loss, parameters), wanted)
    moved = context.statistics
    moved.reset()
    assert moved.host_is_device
    assert moved.offloaded_bytes == moved.host_bytes == 0
    assert not offload_activations(device="cpu").statistics.host_is_device


@pytest.mark.usefixtures("as_on_a_cpu")
def test_a_cpu_copies_large_tensors_only_and_has_no_slab() -> None:
    weight = torch.randn(TOKENS, 2**16, requires_grad=True)

    def gradient(context: Any, rows: int) -> Tensor:
        with context:
            loss = (weight[:rows] * 2).square().sum()
        return torch.autograd.grad(loss, weight)[0]

    context = offload_activations(device="cpu", use_streams=False, debug=True)
    assert torch.equal(gradient(context, 3), gradient(keep_activations(), 3))
    assert context.statistics.offloaded_bytes == 0
    assert context.statistics.kept_bytes[Why.SMALL] == 3 * 2**18
    for passes in (1, 2):
        assert torch.equal(gradient(context, 4), gradient(keep_activations(), 4))
        assert context.statistics.offloaded_bytes == context.statistics.restored_bytes == passes * 2**20
    with context:
        pass
    assert context.statistics.host_bytes == 0
