"""``python -m benchmarks.frameworks -o FILE``: measures everything once, within the given seconds."""

from __future__ import annotations

import argparse
import json
import sys
import time
import traceback
from collections.abc import Callable, Iterable
from dataclasses import replace
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import Any

import torch

from benchmarks.frameworks import layers, products, rowwise
from memo_exec.probes import clocks

K = 1024
LLAMA_8B = layers.Shape("llama", 4096, 14336, 32, 8, 8 * K, 2)
GPT_7B = layers.Shape("gpt", 4096, 16384, 32, 32, 2 * K, 8)
GPT_30B = layers.Shape("gpt", 7168, 28672, 56, 56, 2 * K, 4, layers=2)
GPT_1B = layers.Shape("gpt", 2048, 8192, 16, 16, 2 * K, 16)
GPT_350M = layers.Shape("gpt", 1024, 4096, 16, 16, 2 * K, 16)
TINY = layers.Shape("gpt", 256, 1024, 2, 2, 128, 1)

LAYERS = (
    LLAMA_8B,
    replace(LLAMA_8B, attention="cudnn"),
    GPT_7B,
    replace(GPT_7B, checkpointed=True),
    GPT_30B,
    GPT_1B,
    GPT_350M,
    replace(GPT_7B, seq=32 * K, sequences=1),
    replace(LLAMA_8B, compiled=True),
    replace(GPT_7B, compiled=True),
    TINY,
)


PRODUCTS = ((4096, 16384, 16384), (7168, 28672, 8192), (2048, 8192, 32768), (12288, 49152, 4096))
"""(hidden, ffn_hidden, tokens)."""
PRODUCTS_S = 3.0
LAYER_S = 2.0
"""Seconds for which they are repeated; the power limit sets the clocks after less than one."""


def _listed(make: Callable[..., Iterable[Any]], *arguments: Any) -> list[Any]:
    return list(make(*arguments))


TEXT = (
    "Measure the operators that frameworks use (row-wise kernels, matrix products, whole layers) once on this machine's"
    " GPU, and write their times to a file."
)


def main() -> int:
    """Measure, write the file, and return the exit status: 1 when a part failed."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.frameworks", description=TEXT)
    parser.add_argument("-o", "--output", type=Path, required=True, help="JSON file for the measured times")
    parser.add_argument(
        "--budget-s",
        type=float,
        default=200.0,
        help="start no further part after this many seconds (default: %(default)s)",
    )
    parser.add_argument(
        "--only", action="append", help="run only parts whose name begins with this text (repeat for several)"
    )
    options = parser.parse_args()
    if not torch.cuda.is_available():
        sys.stderr.write("benchmarks.frameworks: a CUDA device is needed\n")
        return 6
    device, begin = torch.device("cuda"), time.perf_counter()
    found: dict[str, Any] = {
        "device": torch.cuda.get_device_name(),
        "torch": torch.__version__,
        "created": datetime.now(UTC).isoformat(timespec="seconds"),
        "command": " ".join(sys.argv),
    }
    failed: list[str] = []

    def part(name: str, make: Callable[[], Any]) -> None:
        if options.only and not name.startswith(tuple(options.only)):
            return
        if time.perf_counter() - begin > options.budget_s:
            failed.append(f"{name}: not run, the time is spent")
            return
        start = time.perf_counter()
        with clocks.watched(device) as notes:
            try:
                found[name] = make()
            except Exception:  # one part must not lose the others
                failed.append(f"{name}: {traceback.format_exc(limit=3)}")
        found[f"{name}: clocks"] = notes
        torch.cuda.empty_cache()
        sys.stderr.write(f"{name}: {time.perf_counter() - start:.1f} s {'FAILED' if name not in found else ''}\n")
        options.output.write_text(json.dumps(found | {"failed": failed}, indent=1))

    for hidden, ffn, tokens in PRODUCTS:
        part(f"products {hidden}", partial(_listed, products.run, device, tokens, hidden, ffn, PRODUCTS_S))
    part("rowwise", lambda: [each.json() for each in rowwise.run(device, 16384, 4096, compiled=True)])
    part("rowwise small", lambda: [each.json() for each in rowwise.run(device, 2048, 2048, compiled=False)])
    part("rowwise large", lambda: [each.json() for each in rowwise.run(device, 65536, 8192, compiled=False)])
    part("loss", lambda: [each.json() for each in rowwise.loss(device, 8192, 50368)])
    part("optimizer", lambda: [each.json() for each in rowwise.optimizer(device, 2**29)])
    for i, shape in enumerate(LAYERS):
        part(f"layer {i}", partial(layers.run, shape, device, LAYER_S))
    for line in failed:
        sys.stderr.write(line + "\n")
    return int(bool(failed))


if __name__ == "__main__":
    sys.exit(main())
