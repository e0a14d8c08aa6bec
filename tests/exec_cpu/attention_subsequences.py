"""Attention over subsequences by hand, call by call: what a lowered program plays, on any device.

Subsequence i has its queries, the keys and values of the whole sequence lie in one carried tensor. Forward: the causal
square over its own rows, one part without a mask against all earlier keys, merged. Backward goes from the last to the
first; what each adds to the gradients of earlier keys and values lies in a second carried tensor.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import accumulate, pairwise

import torch
from torch import Tensor

from memo_exec.memory.dtypes import TORCH_DTYPES
from memo_sim.contract.hardware import DtypeName
from memo_sim.contract.plan import Kernels, Layout
from memo_sim.program.partition import partition
from memo_sim.program.work import Attention, Mask
from tests.exec_cpu.hand_call import play
from tests.exec_cpu.small import CPU_KERNELS, decide, llama


@dataclass(frozen=True)
class Found:
    """Output and log-sum-exp of all rows, and the gradient of the packed Q, K, V."""

    out: Tensor
    lse: Tensor
    grad_qkv: Tensor


class Subsequences:
    """One sequence of ``tokens`` in ``parts`` of equal length, played with ``kernel`` in ``head_groups`` of heads."""

    def __init__(
        self,
        tokens: int,
        parts: int,
        *,
        head_dim: int = 16,
        head_groups: int = 1,
        kernel: str = CPU_KERNELS.attention,
        dtype: DtypeName = "fp32",
        device: str = "cpu",
    ) -> None:
        self.model = llama(head_dim=head_dim)
        self.kernel, self.dtype, self.device = kernel, dtype, device
        kernels = Kernels(attention=kernel, head_groups=head_groups)
        layout = Layout(subsequences=parts, partition="length")
        self.decisions = decide(
            self.model, layout=layout, seq_tokens=tokens, micro_batch=1, dtype=dtype, kernels=kernels
        )
        self.rows = [slice(*ends) for ends in pairwise((0, *accumulate(partition(self.decisions))))]
        self.qkv = self._random(self.model.q_width + 2 * self.model.kv_width, seed=0)
        self.grad = self._random(self.model.q_width, seed=1)

    def _random(self, features: int, *, seed: int) -> Tensor:
        generator = torch.Generator().manual_seed(seed)
        found = torch.randn((self.rows[-1].stop, features), generator=generator)
        return found.to(self.device, TORCH_DTYPES[self.dtype])

    def _nan(self, rows: int, features: int, dtype: torch.dtype | None = None) -> Tensor:
        return torch.full((rows, features), torch.nan, dtype=dtype or self.qkv.dtype, device=self.device)

    def reference(self) -> Found:
        """Return what a masked softmax in double precision and autograd make of the same numbers."""
        model, leaf = self.model, self.qkv.double().requires_grad_()
        parts = leaf.split([model.q_width, model.kv_width, model.kv_width], dim=1)
        q, k, v = (x.unflatten(1, (-1, model.head_dim)).transpose(0, 1) for x in parts)
        k, v = (x.repeat_interleave(model.heads // model.kv_heads, dim=0) for x in (k, v))
        later = torch.ones(len(leaf), len(leaf), dtype=torch.bool, device=self.device).triu(1)
        scores = (q @ k.mT / model.head_dim**0.5).masked_fill(later, -torch.inf)
        out = (scores.softmax(-1) @ v).transpose(0, 1).flatten(1)
        out.backward(self.grad.double())
        assert leaf.grad is not None
        return Found(out.detach(), scores.logsumexp(-1).T.detach(), leaf.grad)

    def played(self) -> Found:
        """Return what the kernels make of them; every tensor is NaN until a kernel has written it."""
        model, dtype = self.model, torch.float32
        total = len(self.qkv)
        q, out, lse = self._nan(total, model.q_width), self._nan(total, model.q_width), self._nan(total, 4, dtype)
        carried = self._nan(total, 2 * model.kv_width)
        for rows in self.rows:
            self._play("qkv.split", qkv=self.qkv[rows], q=q[rows], kv=carried[rows])
            self._forward(rows, q, carried, out, lse)
        grads, grad_qkv = self._nan(total, 2 * model.kv_width), self._nan(*self.qkv.shape)
        for rows in reversed(self.rows):
            d_q = self._backward(rows, {"q": q, "out": out, "lse": lse, "grad": self.grad}, carried, grads)
            self._play("qkv.join", grad_q=d_q, grad_kv=grads[rows], grad_qkv=grad_qkv[rows])
        return Found(out, lse, grad_qkv)

    def _forward(self, rows: slice, q: Tensor, carried: Tensor, out: Tensor, lse: Tensor) -> None:
        count = rows.stop - rows.start
        own = {"q": q[rows], "kv": carried[rows], "out": out[rows], "lse": lse[rows]}
        self._attend("attention", "causal", own)
        if not rows.start:
            return
        part = {"out": self._nan(count, self.model.q_width), "lse": self._nan(count, 4, torch.float32)}
        self._attend("attention", "none", {"q": q[rows], "kv": carried[: rows.start], **part})
        self._play("attention.merge", part=part["out"], part_lse=part["lse"], out=out[rows], lse=lse[rows])

    def _backward(self, rows: slice, saved: dict[str, Tensor], carried: Tensor, grads: Tensor) -> Tensor:
        """Return the gradient of a subsequence's queries; the last one writes the carried gradients, others add."""
        mine = {role: tensor[rows] for role, tensor in saved.items()}
        d_q = self._nan(*mine["q"].shape)
        for mask, keys in (("causal", rows), ("none", slice(0, rows.start))):
            if keys.start == keys.stop:
                continue
            last = rows.stop == len(carried)
            square = mask == "causal"
            part_q = d_q if square else self._nan(*d_q.shape)
            part_kv = grads[keys] if last else self._nan(*carried[keys].shape)
            written = {"grad_q": part_q, "grad_kv": part_kv}
            self._attend("attention.bwd", "causal" if square else "none", {**mine, "kv": carried[keys], **written})
            if not square:
                self._play("grad.accumulate", x=part_q, out=d_q)
            if not last:
                self._play("grad.accumulate", x=part_kv, out=grads[keys])
        return d_q

    def _attend(self, op: str, mask: Mask, operands: dict[str, Tensor]) -> None:
        model = self.model
        sizes = len(operands["q"]), len(operands["kv"])
        heads = model.heads, model.kv_heads, model.head_dim
        work = Attention(1, *sizes, mask, *heads, op.endswith(".bwd"), self.kernel, self.dtype)
        play(op, self.decisions, dict(operands), work=work, device=self.device)

    def _play(self, op: str, **operands: Tensor) -> None:
        play(op, self.decisions, dict(operands), device=self.device)
