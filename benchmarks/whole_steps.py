"""Places the buffers of whole training steps: steps of plain torch, operator by operator, and steps of unlike layers.

    python -m benchmarks.whole_steps [--time-limit 20]

Torch's steps are recorded with fake tensors, so nothing is computed: forward, backward, and an Adam of single
operators, as MindSpore's SOMAS gets its steps. Our programs have layers of eight MLP widths in random order, so no
step repeats. A gap is the arena beyond the largest live sum.
"""

from __future__ import annotations

import argparse
import random
import sys
import time
import weakref
from collections.abc import Callable
from functools import partial
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from memo_sim.contract.experts import Experts
from memo_sim.contract.layer_shape import LayerRun, LayerShape
from memo_sim.contract.model import Model
from memo_sim.contract.plan import Decisions
from memo_sim.contract.requests import Requests
from memo_sim.memory.place import place
from memo_sim.program.arena.requests import requests_of
from memo_sim.program.lower import lower

ALIGNMENT_BYTES = 512
WIDTHS = (2048, 2560, 3072, 4096, 5120, 6144, 8192, 10240)
WITH_EXPERTS = (2048, 5120, 8192)


class Recorder(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Records the life of every storage that an operator makes; time counts operators."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._now = 0
        self._lower: list[int] = []
        self._upper: list[int] = []
        self._bytes: list[int] = []
        self._living: dict[int, int] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run an operator and note its new storages."""
        result = func(*args, **(kwargs or {}))
        self._now += 1
        given = {leaf.untyped_storage()._cdata for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)}
        for leaf in tree_leaves(result):
            if isinstance(leaf, Tensor) and (key := leaf.untyped_storage()._cdata) not in given | self._living.keys():
                storage = leaf.untyped_storage()
                self._living[key] = row = len(self._lower)
                self._lower.append(self._now)
                self._upper.append(0)
                self._bytes.append(storage.nbytes())
                weakref.finalize(storage, self._end, row, key)
        return result

    def _end(self, row: int, key: int) -> None:
        self._upper[row] = self._now + 1
        del self._living[key]

    def requests(self) -> Requests:
        """Return the buffers with bytes; those that still live end after the step."""
        rows = [row for row, size in enumerate(self._bytes) if size]
        return Requests(
            ids=[f"b{row}" for row in rows],
            lower=[self._lower[row] for row in rows],
            upper=[self._upper[row] or self._now + 2 for row in rows],
            size_bytes=[-(-self._bytes[row] // ALIGNMENT_BYTES) * ALIGNMENT_BYTES for row in rows],
            alignment_bytes=ALIGNMENT_BYTES,
        )


class Bottleneck(nn.Module):
    """A block of a residual network."""

    def __init__(self, given: int, middle: int, stride: int) -> None:
        super().__init__()
        out = 4 * middle
        self.body = nn.Sequential(
            *(nn.Conv2d(given, middle, 1, bias=False), nn.BatchNorm2d(middle), nn.ReLU()),
            *(nn.Conv2d(middle, middle, 3, stride, 1, bias=False), nn.BatchNorm2d(middle), nn.ReLU()),
            *(nn.Conv2d(middle, out, 1, bias=False), nn.BatchNorm2d(out)),
        )
        beside = (nn.Conv2d(given, out, 1, stride, bias=False), nn.BatchNorm2d(out))
        self.beside = nn.Sequential(*beside) if given != out else nn.Identity()

    def forward(self, x: Tensor) -> Tensor:
        """Return the block's output for (images, channels, height, width)."""
        return torch.relu(self.body(x) + self.beside(x))


class Layer(nn.Module):
    """A transformer layer of small operators."""

    def __init__(self, width: int, heads: int, inner: int) -> None:
        super().__init__()
        self.heads = heads
        self.norms = nn.ModuleList([nn.LayerNorm(width), nn.LayerNorm(width)])
        self.qkv, self.proj = nn.ModuleList([nn.Linear(width, width) for _ in range(3)]), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, inner), nn.Linear(inner, width)

    def forward(self, x: Tensor) -> Tensor:
        """Return the layer's output for (sequences, tokens, width)."""
        y = self.norms[0](x)
        q, k, v = (each(y).unflatten(-1, (self.heads, -1)).transpose(1, 2) for each in self.qkv)
        mixed = torch.softmax((q @ k.transpose(-1, -2)) * q.shape[-1] ** -0.5, -1) @ v
        x = x + self.proj(mixed.transpose(1, 2).flatten(2))
        y = self.up(self.norms[1](x))
        found: Tensor = x + self.down(y * torch.sigmoid(1.702 * y))
        return found


def residual_network(blocks: int) -> Requests:
    """Return the buffers of a step of 32 images."""
    layers: list[nn.Module] = [nn.Conv2d(3, 64, 7, 2, 3, bias=False), nn.BatchNorm2d(64), nn.ReLU()]
    layers.append(nn.MaxPool2d(3, 2, 1))
    channels = 64
    for number, (middle, share) in enumerate([(64, 8), (128, 4), (256, 2), (512, 8)]):
        for block in range(blocks // share):
            layers.append(Bottleneck(channels, middle, 2 if number and not block else 1))
            channels = 4 * middle
    layers += [nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(channels, 1000)]
    return recorded(nn.Sequential(*layers), torch.randn(32, 3, 224, 224), torch.randint(0, 1000, (32,)))


def transformer(layers: int) -> Requests:
    """Return the buffers of a step of 16 sequences of 128 tokens; MLPs have three widths."""
    dice = random.Random(0)
    body = [Layer(1024, 16, dice.choice([2048, 3072, 4096])) for _ in range(layers)]
    network = nn.Sequential(nn.Embedding(21128, 1024), *body, nn.Linear(1024, 21128))
    return recorded(network, torch.randint(0, 21128, (16, 128)), torch.randint(0, 21128, (16, 128)))


def recorded(network: nn.Module, x: Tensor, labels: Tensor) -> Requests:
    """Return the buffers of a step: forward, backward, and an Adam of single operators."""
    recorder = Recorder()
    with recorder:
        logits = network(x)
        loss = nn.functional.cross_entropy(logits.reshape(-1, logits.shape[-1]), labels.reshape(-1))
        del logits
        loss.backward()  # type: ignore[no-untyped-call]
        with torch.no_grad():
            for parameter in network.parameters():
                _adam(parameter)
        del loss
    return recorder.requests()


def _adam(parameter: nn.Parameter) -> None:
    assert parameter.grad is not None
    gradient, first, second = parameter.grad, torch.zeros_like(parameter), torch.zeros_like(parameter)
    parameter.grad = None
    mean, square = first * 0.9 + gradient * 0.1, second * 0.99 + gradient * gradient * 0.01
    parameter.sub_(mean / (square.sqrt() + 1e-8) * 1e-3)


def faked(step: Callable[[], Requests]) -> Requests:
    """Record a step with tensors that have no data."""
    with FakeTensorMode(allow_non_fake_inputs=True):
        return step()


def unlike_layers(layers: int, recompute: Literal["full", "none"], *, experts: bool) -> Requests:
    """Return the buffers of a program of Llama layers with eight MLP widths; with ``experts``, three of them have."""
    dice = random.Random(0)
    widths = [max(WIDTHS), *[dice.choice(WIDTHS) for _ in range(layers)][1:]]
    routed = Experts(count=16, per_token=2, hidden=1408)
    pattern = tuple(
        LayerRun(shape=LayerShape(ffn_hidden=n, experts=routed if experts and n in WITH_EXPERTS else None), times=1)
        for n in widths
    )
    model = Model(
        name="unlike",
        family="llama",
        layers=layers,
        hidden=2048,
        heads=16,
        kv_heads=4,
        head_dim=128,
        ffn_hidden=max(widths),
        vocab=32000,
        tied_embeddings=False,
        activation="silu",
        layer_pattern=pattern,
    )
    decisions = Decisions(model=model, seq_tokens=16384, recompute=recompute, loss_chunk_tokens=4096)
    return requests_of(lower(decisions, micro_batches=1)[0])


STEPS: dict[str, Callable[[], Requests]] = {
    "residual network, 120 blocks": partial(faked, partial(residual_network, 120)),
    "transformer, 70 uneven layers": partial(faked, partial(transformer, 70)),
    "ours, 400 layers, full recompute": partial(unlike_layers, 400, "full", experts=False),
    "ours, 300 layers, experts in some, full recompute": partial(unlike_layers, 300, "full", experts=True),
    "ours, 540 layers, everything kept": partial(unlike_layers, 540, "none", experts=False),
}


def main() -> None:
    """Place every step and print a line of the table for each."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.whole_steps", description=__doc__)
    parser.add_argument("--time-limit", type=float, default=20.0, help="seconds for each placement")
    limit_s = parser.parse_args().time_limit
    for name, step in STEPS.items():
        requests = step()
        begin = time.process_time()
        found = place(requests, time_limit_s=limit_s)
        gap = found.arena_bytes / found.lower_bound_bytes - 1
        cpu_s = time.process_time() - begin
        text = f"{len(requests.ids):7,} buffers {found.elapsed_s:6.1f} s ({cpu_s:.1f} s CPU) {gap:7.3%}  {found.solver}"
        sys.stdout.write(f"{name:50} {text}\n")
        sys.stdout.flush()


if __name__ == "__main__":
    main()
