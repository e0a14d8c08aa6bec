"""AdamW for the rivals, with memo's arithmetic.

It has fp32 masters, torch's fused kernel, weight decay on matrices and embeddings, and clipping by the global norm.
Gradients stay in the parameters' dtype until the update. That takes less memory than memo's fp32 gradients, so it
favours the rivals.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor
from torch.nn import Parameter

from memo_exec.training.hyperparameters import Hyperparameters


class MasterAdamW:
    """An optimizer over pairs (parameter, initial value in fp32).

    It allocates its states at once, so that every measured peak includes them.
    """

    def __init__(self, pairs: Iterable[tuple[Parameter, Tensor]], chosen: Hyperparameters) -> None:
        self.chosen = chosen
        self.parameters: list[Parameter] = []
        self.masters: list[Tensor] = []
        for parameter, first in pairs:
            parameter.data.copy_(first)
            self.parameters.append(parameter)
            self.masters.append(first if parameter.dtype != torch.float32 else parameter.data)
        groups = [
            {"params": [m for m in self.masters if m.dim() > 1], "weight_decay": chosen.weight_decay},
            {"params": [m for m in self.masters if m.dim() == 1], "weight_decay": 0.0},
        ]
        self.adamw = torch.optim.AdamW(
            groups, lr=0.0, betas=(chosen.beta1, chosen.beta2), eps=chosen.epsilon, fused=True
        )
        self._make_states()

    def update(self, step: int) -> float:
        """Update the parameters from their gradients and return the gradients' global norm before clipping."""
        for parameter, master in zip(self.parameters, self.masters, strict=True):
            assert parameter.grad is not None
            master.grad = parameter.grad.float()
            parameter.grad = None
        norm = torch.nn.utils.get_total_norm([m.grad for m in self.masters if m.grad is not None])
        if self.chosen.clip:
            torch.nn.utils.clip_grads_with_norm_(self.masters, self.chosen.clip, norm)
        for group in self.adamw.param_groups:
            group["lr"] = self.chosen.learning_rate_at(step)
        self.adamw.step()
        self.adamw.zero_grad(set_to_none=True)
        for parameter, master in zip(self.parameters, self.masters, strict=True):
            if parameter.data_ptr() != master.data_ptr():
                parameter.data.copy_(master)
        return float(norm)

    def _make_states(self) -> None:
        """Make AdamW allocate its moments: one update with zero gradients at learning rate 0, which is not counted."""
        for master in self.masters:
            master.grad = torch.zeros_like(master)
        self.adamw.step()
        self.adamw.zero_grad(set_to_none=True)
        for state in self.adamw.state.values():
            state["step"].zero_()
