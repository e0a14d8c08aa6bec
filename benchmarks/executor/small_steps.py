"""Compares operators as calibration times them with the same operators inside a step of a small model, on a CPU.

    python -m benchmarks.executor.small_steps [--layers 24 --width 96 --tokens 128] [--warm]

With ``--warm``, repeats find what the cache has kept, as they did before calibration filled it with other bytes. On a
machine that other programs use, a short load disturbs some instructions of each step and some repeats. So an
instruction counts with the lowest sixth of its times over the steps, and an operator with its shortest median.
"""

from __future__ import annotations

import argparse
import sys
from collections import defaultdict
from functools import partial

import numpy as np
import torch

from memo_exec.interpreter.interpreter import Interpreter
from memo_exec.kernels import StepScalars
from memo_exec.probes import grid as grids
from memo_exec.probes import in_step, memory
from memo_exec.probes.copies import Lanes
from memo_exec.probes.operators import Bench, Operator, operators_of
from memo_exec.probes.timing import Effort, Sample
from memo_exec.training import weights
from memo_sim.contract.model import Model
from memo_sim.contract.plan import Decisions, Kernels, Layout
from memo_sim.program.ir.instruction import Lane
from memo_sim.program.lower import lower

STEPS, ROUNDS = 24, 4
LOW = 1 / 6
CPU = torch.device("cpu")


def main() -> None:
    """Print seconds of a step's kernels, of the same operators timed alone, and of the interpreter between kernels."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.executor.small_steps", description=__doc__)
    for name, default in (("layers", 24), ("width", 96), ("tokens", 128)):
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--warm", action="store_true")
    options = parser.parse_args()
    decisions = decisions_of(options.layers, options.width, options.tokens)
    operators = operators_of([decisions])
    (program,) = lower(decisions)
    compute = [(i, found) for i, (_, found) in enumerate(program.walk()) if found.lane is Lane.COMPUTE]
    ids = torch.zeros(1, options.tokens, dtype=torch.int64)
    alone: dict[object, float] = {}
    starts, ends = [], []
    with Lanes(CPU, decisions, memory.cache_bytes(CPU)) as lanes, Interpreter(decisions, program) as interpreter:
        bench = Bench(CPU, lanes.cache_bytes)

        def time_one(operator: Operator) -> Sample:
            return lanes.inside(Lane.COMPUTE, partial(bench.seconds, operator, Effort()))

        smallest = next(grids.decisions(grids.CPU, decisions.kernels.attention))
        added = in_step.measure(smallest, time_one)
        if options.warm:
            bench._beside = lambda: None  # type: ignore[method-assign]
        weights.initialize(interpreter)
        for step in range(STEPS):
            record = interpreter.run_step([(ids, ids)], StepScalars(lr=1e-4))
            if step:
                starts.append(record.start_s)
                ends.append(record.end_s)
            if step % (STEPS // ROUNDS):
                continue
            for each in operators:
                found = time_one(each).seconds
                key = each.instruction.op, each.instruction.work
                alone[key] = min(found, alone.get(key, found))
    numbers = [i for i, _ in compute]
    start, end = np.array(starts)[:, numbers], np.array(ends)[:, numbers]
    played = np.quantile(end - start, LOW, axis=0)
    between_s = float(np.quantile(start[:, 1:] - end[:, :-1], LOW, axis=0).mean())
    inside: dict[str, float] = defaultdict(float)
    outside: dict[str, float] = defaultdict(float)
    for (_, instruction), seconds in zip(compute, played.tolist(), strict=True):
        inside[instruction.op] += seconds
        outside[instruction.op] += alone[instruction.op, instruction.work]
    whole, timed = sum(inside.values()), sum(outside.values())
    write = sys.stdout.write
    write(f"{len(compute)} kernels: {whole * 1e3:.1f} ms in a step, {timed * 1e3:.1f} ms alone: {timed / whole:.2f}\n")
    between = f"between kernels: {between_s * 1e6:.1f} us in a step; calibrated {added.between.seconds * 1e6:.1f} us"
    write(f"{between}, and {added.longer_s * 1e6:.1f} us by which kernels are longer in a step\n")
    predicted = timed + len(compute) * added.seconds
    write(f"both: {predicted * 1e3:.1f} ms of {(whole + len(compute) * between_s) * 1e3:.1f} ms\n")
    for op in sorted(inside, key=inside.__getitem__, reverse=True):
        write(f"  {op:20} {inside[op] / whole:6.1%} of the step  alone / in a step {outside[op] / inside[op]:.2f}\n")


def decisions_of(layers: int, width: int, tokens: int, layout: Layout | None = None) -> Decisions:
    """Return a plan of a GPT that keeps everything."""
    heads = max(1, width // 24)
    model = Model(
        name="gpt-small",
        family="gpt",
        layers=layers,
        hidden=width,
        heads=heads,
        kv_heads=heads,
        head_dim=width // heads,
        ffn_hidden=4 * width,
        vocab=256,
        tied_embeddings=True,
        qkv_bias=True,
        linear_bias=True,
    )
    kernels = Kernels(attention="torch-flash-cpu")
    return Decisions(model=model, layout=layout or Layout(), seq_tokens=tokens, dtype="fp32", kernels=kernels)


if __name__ == "__main__":
    main()
