"""``offload_activations`` on a CUDA device, with streams as lanes and a pinned slab. Not yet run on a GPU."""

import gc
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from memo_exec import offload_activations
from memo_exec.offload.statistics import Why

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
HIDDEN, TOKENS, LAYERS = 1024, 4096, 8
BUSY_CYCLES = 20_000_000  # about ten milliseconds


@pytest.fixture(autouse=True)
def deterministic(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)


class Layer(nn.Module):
    """A layer with attention and a gated MLP, which saves views and shared inputs as real models do."""

    def __init__(self) -> None:
        super().__init__()
        self.norms = nn.ModuleList([nn.RMSNorm(HIDDEN), nn.RMSNorm(HIDDEN)])
        self.qkv, self.proj = nn.Linear(HIDDEN, 3 * HIDDEN), nn.Linear(HIDDEN, HIDDEN)
        self.up, self.down = nn.Linear(HIDDEN, 4 * HIDDEN), nn.Linear(2 * HIDDEN, HIDDEN)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (t.unflatten(-1, (-1, 64)).transpose(1, 2) for t in self.qkv(self.norms[0](x)).chunk(3, dim=-1))
        attended = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.proj(attended.transpose(1, 2).flatten(2))
        gate, up = self.up(self.norms[1](x)).chunk(2, dim=-1)
        return x + self.down(nn.functional.silu(gate) * up)


def model() -> nn.Sequential:
    torch.manual_seed(1)
    return nn.Sequential(*(Layer() for _ in range(LAYERS))).to("cuda", torch.bfloat16)


def tokens() -> Tensor:
    generator = torch.Generator("cuda").manual_seed(2)
    return torch.randn(1, TOKENS, HIDDEN, device="cuda", dtype=torch.bfloat16, generator=generator)


def step(layers: nn.Sequential, x: Tensor, context: Any, run: Callable[..., Tensor] | None = None) -> list[Tensor]:
    layers.zero_grad()
    with context:
        loss = (run or layers)(x).float().square().mean()
    loss.backward()
    return [p.grad.clone() for p in layers.parameters() if p.grad is not None]


class Plain:
    """A context that does nothing, for plain autograd."""

    def __enter__(self) -> None: ...
    def __exit__(self, *_: object) -> None: ...


def equal(one: list[Tensor], two: list[Tensor]) -> bool:
    return all(torch.equal(a, b) for a, b in zip(one, two, strict=True))


@pytest.mark.parametrize("pin", [True, False])
@pytest.mark.parametrize("use_streams", [True, False])
@pytest.mark.parametrize("fraction", [0.5, 1.0])
def test_gradients_are_those_of_autograd(fraction: float, use_streams: bool, pin: bool) -> None:
    layers, x = model(), tokens()
    wanted = step(layers, x, Plain())
    context = offload_activations(fraction=fraction, use_streams=use_streams, use_pin_memory=pin, debug=True)
    for _ in range(3):
        assert equal(step(layers, x, context), wanted)
    moved = context.statistics
    assert moved.restored_bytes > 0.5 * moved.offloaded_bytes > 0
    assert moved.host_bytes == moved.host_peak_bytes


@pytest.mark.filterwarnings("ignore:Synchronization debug mode")
@pytest.mark.parametrize("stash", [1, 2, 5])
def test_without_debug_nothing_synchronises_and_nothing_breaks(stash: int) -> None:
    layers, x = model(), tokens()
    wanted = step(layers, x, Plain())
    context = offload_activations(max_fwd_stash_size=stash, max_bwd_stash_size=stash)
    step(layers, x, context)  # the slab is allocated after this step
    with context:
        pass
    torch.cuda.set_sync_debug_mode("error")
    try:
        found = [step(layers, x, context) for _ in range(4)]
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert all(equal(each, wanted) for each in found)


def test_compute_far_behind_the_host() -> None:
    """Lanes run while compute sleeps, so a copy that no event orders happens too early."""
    layers, x = model(), tokens()
    wanted = step(layers, x, Plain())

    def sleepy(y: Tensor) -> Tensor:
        for layer in layers:
            torch.cuda._sleep(BUSY_CYCLES)
            y = layer(y)
        return y

    context = offload_activations(max_fwd_stash_size=2, debug=True)
    for _ in range(3):
        assert equal(step(layers, x, context, sleepy), wanted)


@pytest.mark.parametrize("lane", ["_d2h", "_h2d"])
def test_lanes_far_behind_compute(lane: str) -> None:
    layers, x = model(), tokens()
    wanted = step(layers, x, Plain())
    context = offload_activations(max_fwd_stash_size=2, host_bytes=2**31)
    step(layers, x, context)
    for _ in range(3):
        stream = getattr(next(iter(context._swap._lanes.values())), lane)
        with torch.cuda.stream(stream):
            torch.cuda._sleep(10 * BUSY_CYCLES)
        assert equal(step(layers, x, context), wanted)


def test_a_model_on_another_stream() -> None:
    """The context looks up the current stream each time and does not remember it."""
    layers, x = model(), tokens()
    wanted = step(layers, x, Plain())
    context = offload_activations(debug=True)
    for _ in range(2):
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            found = step(layers, x, context)
        torch.cuda.current_stream().wait_stream(stream)
        assert equal(found, wanted)


def test_checkpointing_inside() -> None:
    layers, x = model(), tokens().requires_grad_()

    def checkpointed(y: Tensor) -> Tensor:
        for layer in layers:
            y = checkpoint(layer, y, use_reentrant=False)
        return y

    wanted = step(layers, x, Plain())
    context = offload_activations(debug=True)
    assert equal(step(layers, x, context, checkpointed), wanted)
    assert context.statistics.offloaded_bytes >= LAYERS * x.nbytes


def peak_bytes(context: Any, layers: nn.Sequential, x: Tensor) -> int:
    step(layers, x, context)
    gc.collect()
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    step(layers, x, context)
    return torch.cuda.max_memory_allocated() - before


def test_peak_memory_falls_and_nothing_leaks() -> None:
    layers, x = model(), tokens()
    kept = peak_bytes(Plain(), layers, x)
    context = offload_activations(max_fwd_stash_size=2, max_bwd_stash_size=2)
    assert peak_bytes(context, layers, x) < 0.6 * kept
    layers.zero_grad()
    gc.collect()
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    for _ in range(5):
        step(layers, x, context)
        layers.zero_grad()
    with context:
        pass
    assert torch.cuda.memory_allocated() <= before


def test_the_slab_is_pinned_at_its_exact_size() -> None:
    layers, x = model(), tokens()
    context = offload_activations()
    step(layers, x, context)
    with context:
        pass
    slab = context._swap._host._slab
    assert slab.is_pinned()
    assert slab.numel() == context.statistics.host_bytes == context.statistics.host_peak_bytes


def test_tensors_of_the_cpu_stay() -> None:
    context = offload_activations(min_offload_size=1)
    x = torch.randn(64, 64, requires_grad=True)
    with context:
        loss = (x.sin() * x).sum().cuda()
    loss.backward()
    assert context.statistics.offloaded_bytes == 0
    assert context.statistics.kept_bytes[Why.DEVICE] > 0


@pytest.mark.filterwarnings("ignore:.torch.jit:DeprecationWarning")
@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
def test_a_compiled_model(backend: str) -> None:
    torch._dynamo.reset()
    layers, x = model(), tokens()
    compiled = torch.compile(layers, backend=backend)
    wanted = step(layers, x, Plain(), compiled)
    context = offload_activations(debug=True, model=layers)
    for _ in range(2):
        found = step(layers, x, context, compiled)
        for a, b in zip(found, wanted, strict=True):
            torch.testing.assert_close(a, b)
    assert context.statistics.restored_bytes > 0
