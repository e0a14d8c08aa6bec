"""Matrix products as ``nn.Linear`` runs them: alone with pauses between, and in a busy loop of a layer's products.

Alone, each product starts on a cool chip at its highest clocks. In a layer, one follows the other without a pause, and
the chip's power limit sets the clocks.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from functools import partial
from statistics import median

import torch
from torch import Tensor

PAUSE_S = 0.02
ALONE = 7
Product = tuple[str, Callable[[], Tensor], float]


def layer_products(device: torch.device, tokens: int, hidden: int, ffn: int) -> list[Product]:
    """Return (name, call, FLOPs) of fprop, dgrad and wgrad of a GPT layer's four products."""
    found: list[Product] = []
    sizes = {"qkv": (hidden, 3 * hidden), "out": (hidden, hidden), "up": (hidden, ffn), "down": (ffn, hidden)}
    for name, (k, n) in sizes.items():
        x = torch.randn(tokens, k, device=device, dtype=torch.bfloat16)
        weight = torch.randn(n, k, device=device, dtype=torch.bfloat16) * k**-0.5
        grad = torch.randn(tokens, n, device=device, dtype=torch.bfloat16)
        flops = 2.0 * tokens * k * n
        found.append((f"{name}.fprop", partial(torch.mm, x, weight.t()), flops))
        found.append((f"{name}.dgrad", partial(torch.mm, grad, weight), flops))
        found.append((f"{name}.wgrad", partial(torch.mm, grad.t(), x), flops))
    return found


def run(device: torch.device, tokens: int, hidden: int, ffn: int, span_s: float) -> Iterator[dict[str, object]]:
    """Yield the rate of every product alone and in the busy loop, in FLOP/s."""
    products = layer_products(device, tokens, hidden, ffn)
    alone = {name: flops / _alone(call) for name, call, flops in products}
    busy = _busy(products, span_s)
    for name, _, flops in products:
        yield {
            "product": name,
            "tokens": tokens,
            "hidden": hidden,
            "ffn": ffn,
            "alone_flops": alone[name],
            "busy_flops": flops / busy[name],
        }


def _alone(call: Callable[[], Tensor]) -> float:
    found: list[float] = []
    call()
    for _ in range(ALONE):
        torch.cuda.synchronize()
        time.sleep(PAUSE_S)
        start, end = _event(), _event()
        # Two calls before hide the launch; the clocks have no time to fall.
        call()
        call()
        start.record()
        call()
        end.record()
        end.synchronize()
        found.append(start.elapsed_time(end) / 1e3)
    return median(found)


def _busy(products: list[Product], span_s: float) -> dict[str, float]:
    """Return the median seconds of each product while all run one after the other for ``span_s`` seconds."""
    marks: list[list[torch.cuda.Event]] = []
    begin = time.perf_counter()
    while time.perf_counter() - begin < span_s:
        marks.append([_event() for _ in range(len(products) + 1)])
        marks[-1][0].record()
        for i, (_, call, _) in enumerate(products):
            call()
            marks[-1][i + 1].record()
        if len(marks) > 3:
            marks[-3][-1].synchronize()
    torch.cuda.synchronize()
    late = marks[len(marks) // 2 :]  # the first half warms the chip up
    return {
        name: median(row[i].elapsed_time(row[i + 1]) for row in late) / 1e3 for i, (name, _, _) in enumerate(products)
    }


def _event() -> torch.cuda.Event:
    return torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
