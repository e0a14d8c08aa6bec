"""Measures on a CPU what the executor adds to torch's own work.

    python -m benchmarks.executor [--rounds 5] [--ways save_on_cpu offload_activations] [--together]

Dispatch is a step whose kernels do nothing, for 64 layers of width 32. Offloading trains small GPTs, and a Llama of
transformers where it is installed, with plain autograd, torch's ``save_on_cpu``, ``offload_activations``, and the same
with its copies (``device="cpu"``), of large tensors or of small ones too. ``save_on_cpu`` copies nothing on a CPU, so
"bare copies" copies every tensor to new memory and back, and does nothing else. Every round starts a process for each
of them in turn, so that other load of the machine meets all. Seconds are CPU seconds of a step, the best of all rounds;
peaks are of the resident bytes beyond those before the first step, the median of the rounds. Ratios are to
``save_on_cpu``, or to the first of ``--ways`` that do not name it.

With ``--together`` the ways take turns step by step in one process, so that both meet the same load; each has the best
of its steps and the median of its ratios, and no peaks. This is for ways that leave nothing behind for the next one,
which those with copies do: they give the heap's memory back.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from statistics import median

import torch
from torch import Tensor, nn
from torch.autograd.graph import save_on_cpu, saved_tensors_hooks

from memo_exec import offload_activations
from memo_exec.interpreter.interpreter import Interpreter
from memo_exec.kernels import KERNELS, Call, StepScalars
from memo_sim.contract.model import Model
from memo_sim.contract.plan import Decisions, Kernels
from memo_sim.program.lower import lower

MODELS = (("gpt", 24, 96, 128), ("gpt", 24, 96, 512), ("gpt", 2, 256, 8192), ("llama", 4, 256, 2048))
"""Family, layers, width and tokens; GPTs are plain torch, Llamas are Hugging Face's."""
STEPS = 3
"""Steps of each round after the first one, at least; small models play more, for ``LEAST_S`` in all."""
LEAST_S = 1.0
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


def forward_of(family: str, layers: int, width: int, tokens: int) -> tuple[nn.Module, Callable[[], Tensor]]:
    """Return a model, and a function that returns its loss."""
    torch.manual_seed(0)
    if family == "gpt":
        model, x = nn.Sequential(*[Layer(width) for _ in range(layers)]), torch.randn(tokens, width)
        return model, lambda: model(x).square().mean()
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=1024,
        hidden_size=width,
        intermediate_size=3 * width,
        num_hidden_layers=layers,
        num_attention_heads=HEADS,
        num_key_value_heads=HEADS // 2,
    )
    llama, ids = LlamaForCausalLM(config), torch.randint(1024, (1, tokens))
    return llama, lambda: llama(input_ids=ids, labels=ids, use_cache=False).loss


def step_of(way: str, model: nn.Module, forward: Callable[[], Tensor]) -> Callable[[], None]:
    """Return a function that plays a step."""
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
            loss = forward()
        torch.autograd.backward(loss)

    return step


def together(ways: Sequence[str], family: str, shape: tuple[int, int, int], rounds: int) -> dict[str, list[float]]:
    """Return the CPU seconds of each way's steps; the ways take turns in this process."""
    model, forward = forward_of(family, *shape)
    steps = {way: step_of(way, model, forward) for way in ways}
    first_s = max(best_s(step, 1) for step in steps.values())
    found: dict[str, list[float]] = {way: [] for way in ways}
    for turn in range(max(rounds, int(rounds * LEAST_S / first_s))):
        for way in ways[:: 1 if turn % 2 else -1]:
            found[way].append(best_s(steps[way], 1))
    return found


def offloading(way: str, family: str, shape: tuple[int, int, int], steps: int) -> tuple[float, int]:
    """Return the CPU seconds of a step, and the bytes of memory that steps took at most."""
    step = step_of(way, *forward_of(family, *shape))
    before = _peak_bytes()
    first_s = best_s(step, 1)
    seconds = best_s(step, max(steps, int(LEAST_S / first_s)))
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
    parser.add_argument("--ways", nargs="+", choices=WAYS, default=WAYS, help="ways of offloading to measure")
    parser.add_argument("--together", action="store_true", help="take turns in one process")
    parser.add_argument(
        "--one", nargs=5, metavar=("WAY", "FAMILY", "LAYERS", "WIDTH", "TOKENS"), help=argparse.SUPPRESS
    )
    options = parser.parse_args()
    torch.set_num_threads(1)
    if options.one:
        way, family, *shape = options.one
        layers, width, tokens = map(int, shape)
        sys.stdout.write("{} {}".format(*offloading(way, family, (layers, width, tokens), STEPS)))
        return
    count, each_s = dispatch_s(options.rounds)
    sys.stdout.write(f"dispatch: {each_s * 1e6:.1f} us for each of {count} instructions\n")
    for model in MODELS:
        if model[0] == "llama" and find_spec("transformers") is None:
            continue
        sys.stdout.write("offloading: {}, {} layers of width {}, {} tokens\n".format(*model))
        if options.together:
            seconds_of = together(options.ways, model[0], model[1:], options.rounds)
            base = seconds_of.get("save_on_cpu") or next(iter(seconds_of.values()))
            for way, each in seconds_of.items():
                ratio = median(s / b for s, b in zip(each, base, strict=True))
                best = f"{min(each) * 1e3:8.1f} ms {min(each) / min(base):5.2f}x"
                sys.stdout.write(f"  {way:20} {best}  median {ratio:5.2f}x of {len(each)} steps\n")
            continue
        found: dict[str, list[tuple[float, int]]] = {way: [] for way in options.ways}
        for _ in range(options.rounds):
            for way, rounds in found.items():
                command = [sys.executable, "-m", "benchmarks.executor", "--one", way, *map(str, model)]
                seconds, size = subprocess.run(command, check=True, capture_output=True, text=True).stdout.split()
                rounds.append((float(seconds), int(size)))
        steps = {way: (min(s for s, _ in rounds), median(size for _, size in rounds)) for way, rounds in found.items()}
        base_s, base_bytes = steps.get("save_on_cpu") or next(iter(steps.values()))
        for way, (step_s, size_bytes) in steps.items():
            times, sizes = step_s / base_s, size_bytes / base_bytes
            text = f"{step_s * 1e3:8.1f} ms {times:5.2f}x  {size_bytes / 2**20:6.0f} MiB {sizes:5.2f}x"
            sys.stdout.write(f"  {way:20} {text}\n")


if __name__ == "__main__":
    main()
