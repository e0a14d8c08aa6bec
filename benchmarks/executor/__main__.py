"""Measures on a CPU what the executor adds to torch's own work.

    python -m benchmarks.executor [--rounds 5]

Dispatch is a step whose kernels do nothing, for 64 layers of width 32. Offloading trains small models with plain
autograd, torch's ``save_on_cpu``, ``offload_activations``, and the same with its copies (``device="cpu"``), of large
tensors or of small ones too, each in a process of its own. ``save_on_cpu`` copies nothing on a CPU, so "bare copies"
copies every tensor to new memory and back, and does nothing else. Seconds are CPU seconds of a step, the best of the
rounds; peaks are of the resident bytes beyond those before the first step. Ratios are to ``save_on_cpu``.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.autograd.graph import save_on_cpu, saved_tensors_hooks

from memo_exec import offload_activations
from memo_exec.interpreter.interpreter import Interpreter
from memo_exec.kernels import KERNELS, Call, StepScalars
from memo_sim.contract.model import Model
from memo_sim.contract.plan import Decisions, Kernels
from memo_sim.program.lower import lower

SHAPES = ((24, 96, 128), (24, 96, 512), (2, 256, 8192))
"""Layers, width and tokens."""
HEADS = 4
WAYS = ("plain", "save_on_cpu", "bare copies", "offload_activations", "with copies", "small copies too")


class Layer(nn.Module):
    """A GPT layer."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.before, self.qkv, self.proj = nn.LayerNorm(width), nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.mlp = nn.Sequential(
            nn.LayerNorm(width), nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width)
        )

    def forward(self, x: Tensor) -> Tensor:
        """Return the layer's output for (tokens, width)."""
        heads = self.qkv(self.before(x)).view(len(x), 3, HEADS, -1).permute(1, 2, 0, 3).unsqueeze(1)
        queries, keys, values = heads.unbind(0)
        mixed = nn.functional.scaled_dot_product_attention(queries, keys, values, is_causal=True)
        x = x + self.proj(mixed[0].transpose(0, 1).reshape(x.shape))
        found: Tensor = x + self.mlp(x)
        return found


def best_s(step: Callable[[], object], rounds: int) -> float:
    """Return the least CPU seconds of a call."""
    found = []
    for _ in range(rounds):
        begin = time.process_time()
        step()
        found.append(time.process_time() - begin)
    return min(found)


def dispatch_s(rounds: int) -> tuple[int, float]:
    """Return the instructions of a step, and the CPU seconds that an instruction takes beside its kernel."""
    gpt = Model(
        name="gpt-narrow",
        family="gpt",
        layers=64,
        hidden=32,
        heads=2,
        kv_heads=2,
        head_dim=16,
        ffn_hidden=128,
        vocab=96,
        tied_embeddings=True,
        max_positions=128,
        qkv_bias=True,
        linear_bias=True,
    )
    decisions = Decisions(model=gpt, seq_tokens=128, dtype="fp32", kernels=Kernels(attention="torch-flash-cpu"))
    program = lower(decisions)[0]
    ids = torch.zeros(1, 128, dtype=torch.int64)
    with Interpreter(decisions, program, kernels=dict.fromkeys(KERNELS, _nothing)) as interpreter:
        step = partial(interpreter.run_step, [(ids, ids)], StepScalars())
        step()
        return program.instruction_count, best_s(step, rounds) / program.instruction_count


def _nothing(call: Call) -> None:
    del call


def offloading(way: str, shape: tuple[int, int, int], rounds: int) -> tuple[float, int]:
    """Return the CPU seconds of a step, and the bytes of memory that steps took at most."""
    layers, width, tokens = shape
    torch.manual_seed(0)
    model, x = nn.Sequential(*[Layer(width) for _ in range(layers)]), torch.randn(tokens, width)
    device = "cpu" if way in ("with copies", "small copies too") else None
    swap = offload_activations(device=device, min_offload_size=1024 if way == "small copies too" else None)
    contexts: dict[str, Callable[[], AbstractContextManager[object]]] = {
        "plain": nullcontext,
        "save_on_cpu": save_on_cpu,
        "bare copies": partial(saved_tensors_hooks, _copied, _copied),
    }

    def step() -> None:
        model.zero_grad()
        with contexts.get(way, lambda: swap)():
            loss = model(x).square().mean()
        loss.backward()

    before = _peak_bytes()
    step()
    seconds = best_s(step, rounds)
    return seconds, _peak_bytes() - before


def _copied(tensor: Tensor) -> Tensor:
    """Return a copy of what is no parameter; of a parameter, the tensor itself."""
    root = tensor if tensor._base is None else tensor._base
    return tensor if isinstance(root, nn.Parameter) else torch.empty_like(tensor).copy_(tensor)


def _peak_bytes() -> int:
    """Return the peak of this process alone: a child's ``ru_maxrss`` starts at the peak of its parent."""
    (line,) = (line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith("VmHWM:"))
    return int(line.split()[1]) * 1024


def main() -> None:
    """Measure and print everything, or one way of offloading in this process."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.executor", description=__doc__)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--one", nargs=4, metavar=("WAY", "LAYERS", "WIDTH", "TOKENS"), help=argparse.SUPPRESS)
    options = parser.parse_args()
    torch.set_num_threads(1)
    if options.one:
        layers, width, tokens = (int(number) for number in options.one[1:])
        sys.stdout.write("{} {}".format(*offloading(options.one[0], (layers, width, tokens), options.rounds)))
        return
    count, each_s = dispatch_s(options.rounds)
    sys.stdout.write(f"dispatch: {each_s * 1e6:.1f} us for each of {count} instructions\n")
    for shape in SHAPES:
        sys.stdout.write("offloading: {} layers of width {}, {} tokens\n".format(*shape))
        found = {}
        for way in WAYS:
            command = [sys.executable, "-m", "benchmarks.executor", "--rounds", str(options.rounds)]
            command += ["--one", way, *map(str, shape)]
            seconds, size = subprocess.run(command, check=True, capture_output=True, text=True).stdout.split()
            found[way] = float(seconds), int(size)
        for way, (step_s, size_bytes) in found.items():
            times, sizes = step_s / found["save_on_cpu"][0], size_bytes / found["save_on_cpu"][1]
            text = f"{step_s * 1e3:8.1f} ms {times:5.2f}x  {size_bytes / 2**20:6.0f} MiB {sizes:5.2f}x"
            sys.stdout.write(f"  {way:20} {text}\n")


if __name__ == "__main__":
    main()
