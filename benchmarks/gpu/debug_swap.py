"""Plays a full swap in debug mode, and compares its losses with the same steps without debug mode.

    python -m benchmarks.gpu.debug_swap            three layers of Llama 3 8B, 32,768 tokens
    python -m benchmarks.gpu.debug_swap --quick    a tiny model on any machine

Debug mode poisons memory, compares checksums of copies and checks the order of accesses. The plan needs no profile.
"""

from __future__ import annotations

import argparse
import sys

import torch

from benchmarks.gpu.case import SEED, SEQUENCES
from benchmarks.gpu.plans import model_of
from memo_exec.interpreter.interpreter import Interpreter
from memo_exec.machine.attention_kernels import attention_kernels
from memo_exec.machine.machine import this_machine
from memo_exec.training import weights
from memo_exec.training.dataset import load_dataset
from memo_exec.training.hyperparameters import Hyperparameters
from memo_exec.training.loop import Training
from memo_sim.contract.errors import MemoError
from memo_sim.contract.plan import Decisions, Kernels, Plan
from memo_sim.program.lower import lower, program_sha256

LAYERS, STEPS = 3, 2
FULL, QUICK = ("llama3-8b", 32_768), ("llama-tiny", 256)
TOLERANCE = 1e-3
"""Largest relative difference of the losses; attention's backward sums in no fixed order on a GPU."""


TEXT = (
    "Train a few steps that swap all activations in debug mode (poisoned memory, checksums of copies, order of"
    " accesses), and compare the losses with the same steps without debug mode. The model is three layers of Llama 3 8B"
    " with 32,768 tokens; no hardware profile is needed."
)


def main() -> int:
    """Play both runs and print their losses; return 1 if they differ or debug mode finds a fault."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.gpu.debug_swap", description=TEXT)
    parser.add_argument("--quick", action="store_true", help="use a tiny model that runs on any machine")
    preset, tokens = QUICK if parser.parse_args().quick else FULL
    try:
        plain, checked = (losses(preset, tokens, debug=debug) for debug in (False, True))
    except MemoError as error:
        sys.stderr.write(f"{error}\n")
        return error.exit_code
    sys.stdout.write(f"losses without debug mode {plain}, with it {checked}\n")
    return int(any(not abs(ours / theirs - 1) <= TOLERANCE for ours, theirs in zip(checked, plain, strict=True)))


def losses(preset: str, tokens: int, *, debug: bool) -> list[float]:
    """Return the losses of a few steps that swap every token.

    Raises:
        MemoError: if this machine cannot run it, or debug mode finds a fault.
    """
    machine = this_machine()
    device = torch.device(machine.device)
    kernel = next(name for name, why_not in attention_kernels(machine).items() if not why_not)
    decisions = Decisions(
        model=model_of(preset, LAYERS),
        seq_tokens=tokens,
        micro_batch=SEQUENCES,
        global_batch=SEQUENCES,
        swapped_tokens=tokens,
        memory_policy="caching",
        kernels=Kernels(attention=kernel),
        dtype="bf16" if machine.device == "cuda" else "fp32",
    )
    (program,) = lower(decisions)
    plan = Plan(decisions=decisions, program_sha256=program_sha256((program,)))
    with Interpreter(decisions, program, device=device, debug=debug) as interpreter:
        weights.initialize(interpreter, SEED, draw_on=device)
        training = Training(plan, interpreter, load_dataset(None, decisions.model.vocab), Hyperparameters(), SEED)
        for _ in range(STEPS):
            training.play_step()
    return training.losses


if __name__ == "__main__":
    sys.exit(main())
