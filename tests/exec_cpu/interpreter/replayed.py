"""Comparisons for tests of full recompute: gradients with autograd's, and recomputed results with forward's."""

from collections.abc import Callable, Iterable
from typing import Any

import torch

from memo_exec.kernels import KERNELS, Call
from memo_exec.training import weights
from memo_exec.training.loop import tokens_of
from memo_exec.verification.autograd_model import AutogradModel
from memo_sim.contract.plan import Decisions
from memo_sim.program.layout.token_order import token_runs
from tests.exec_cpu.small import batch, gradients, one_step, play, scalars

TOLERANCE = 1e-5
"""Largest allowed error, relative to the largest entry of a tensor."""


def plain(decisions: Decisions, parameters: dict[str, torch.Tensor]) -> AutogradModel:
    """Return the plan's model with these parameters."""
    return AutogradModel(decisions.model, parameters)


def assert_gradients_equal_autograds(
    decisions: Decisions, of: Callable[[Decisions, dict[str, torch.Tensor]], AutogradModel] = plain
) -> None:
    """Play a step on one rank and compare every gradient with plain autograd's.

    The drawn tokens are in the order of the rank's rows; autograd gets whole sequences. ``of``: makes autograd's model.
    """
    batches = batch(decisions, ignored=0.2)
    rows = torch.argsort(tokens_of(token_runs(decisions)))
    with play(decisions) as interpreter:
        reference = of(decisions, weights.named_parameters(interpreter))
        interpreter.run_step(batches, scalars(batches, lr=0.0))
        found = gradients(interpreter)
    for drawn in batches:
        ids, labels = (each[rows].view(decisions.micro_batch, -1) for each in drawn)
        reference.loss(ids, labels, scalars(batches).loss_scale).backward()
    assert set(found) == set(reference.p)
    for key, leaf in reference.p.items():
        assert leaf.grad is not None
        error = (found[key] - leaf.grad).abs().max() / leaf.grad.abs().max()
        assert error <= TOLERANCE, key


def replayed(decisions: Decisions, part: str, ops: Iterable[str], roles: Iterable[str]) -> set[str]:
    """Return the names of the recomputed instructions, after asserting that they write the same bits as in forward.

    Covers the instructions with ``part`` in their name and an operator of ``ops``; compares their operands ``roles``.
    """
    found: dict[str, list[torch.Tensor]] = {}

    def watching(op: str) -> Any:
        def kernel(call: Call) -> None:
            KERNELS[op](call)
            if part in call.instruction.name and call.instruction.name[:3] in ("fwd", "rec"):
                written = [call.tensors[role].clone() for role in roles if role in call.tensors]
                found.setdefault(call.instruction.name, []).extend(written)

        return kernel

    one_step(decisions, kernels={**KERNELS, **{op: watching(op) for op in ops}})
    again = {name for name in found if name.startswith("rec/")}
    for name in again:
        rebuilt, forward = found[name], found[name.replace("rec/", "fwd/").replace(".again", "")]
        stride = len(rebuilt) // decisions.model.layers
        # Backward goes through the layers in reverse.
        pieces = [rebuilt[i : i + stride] for i in range(0, len(rebuilt), stride)]
        expected = [forward[i : i + stride] for i in range(0, len(forward), stride)]
        for piece, wanted in zip(reversed(pieces), expected, strict=True):
            assert all(torch.equal(a, b) for a, b in zip(piece, wanted, strict=True)), name
    return again
