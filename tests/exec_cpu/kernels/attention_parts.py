"""Attention in two parts, as in two steps of a ring, with the kernels and with plain products; on any device."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from memo_exec.memory.dtypes import TORCH_DTYPES
from memo_sim.contract.knobs import DtypeName
from memo_sim.contract.plan import Kernels, Layout
from memo_sim.program.ir.work import Attention
from tests.exec_cpu.kernels.hand_call import play
from tests.exec_cpu.small import CPU_KERNELS, decide, llama


@dataclass(frozen=True)
class Reference:
    """Output, log-sum-exp, and the gradients of the queries and of both sets of keys and values; fp32."""

    out: Tensor
    lse: Tensor
    d_q: Tensor
    d_kv: list[Tensor]


@dataclass(frozen=True)
class Merged:
    """Output and log-sum-exp over all keys."""

    out: Tensor
    lse: Tensor


class Parted:
    """Queries of ``batch`` sequences against two sets of keys; only the late half of the queries sees the second."""

    def __init__(
        self,
        batch: int,
        *,
        rows: int = 16,
        keys: tuple[int, int] = (24, 10),
        head_dim: int = 16,
        kernel: str = CPU_KERNELS.attention,
        dtype: DtypeName = "fp32",
        device: str = "cpu",
    ) -> None:
        self.batch, self.rows, self.sizes = batch, rows, keys
        self.model, self.kernel, self.dtype, self.device = llama(head_dim=head_dim), kernel, dtype, device
        self.decisions = decide(
            self.model, layout=Layout(cp=2), micro_batch=batch, dtype=dtype, kernels=Kernels(attention=kernel)
        )
        q, kv = self.model.q_width, self.model.kv_width
        self.qkv = self._random(rows, q + 2 * kv, seed=0)
        self.kv = [self._random(n, 2 * kv, seed=i + 1) for i, n in enumerate(keys)]
        self.grad = self._random(rows, q, seed=5)

    def _random(self, rows: int, features: int, *, seed: int) -> Tensor:
        generator = torch.Generator().manual_seed(seed)
        found = torch.randn((self.batch * rows, features), generator=generator)
        return found.to(self.device, TORCH_DTYPES[self.dtype])

    def reference(self) -> Reference:
        """Compute the results with plain products in double precision and autograd."""
        model, q_width = self.model, self.model.q_width
        leaves = [x.double().requires_grad_() for x in (self.qkv[:, :q_width], *self.kv)]
        q = leaves[0].view(self.batch, self.rows, model.heads, -1).transpose(1, 2)
        kv = torch.cat([x.view(self.batch, -1, 2, model.kv_heads, model.head_dim) for x in leaves[1:]], dim=1)
        k, v = (x.repeat_interleave(model.heads // model.kv_heads, dim=2).transpose(1, 2) for x in kv.unbind(2))
        scores = q @ k.transpose(2, 3) / model.head_dim**0.5
        scores[:, :, : self.rows // 2, self.sizes[0] :] = -torch.inf
        out = (scores.softmax(-1) @ v).transpose(1, 2).reshape(self.batch * self.rows, q_width)
        out.backward(self.grad.double())
        lse = scores.logsumexp(-1).transpose(1, 2).reshape(-1, model.heads)
        grads = [leaf.grad.float() for leaf in leaves if leaf.grad is not None]
        return Reference(out.detach().float(), lse.detach().float(), grads[0], grads[1:])

    def forward(self) -> Merged:
        """Run the kernels on both parts and merge the results."""
        whole, part = self._part(0, self.rows), self._part(1, self.rows // 2)
        operands = {"part": part.out, "part_lse": part.lse, "out": whole.out, "lse": whole.lse}
        play("attention.merge", self.decisions, dict(operands), device=self.device)
        return whole

    def _part(self, which: int, queries: int) -> Merged:
        rows = self.batch * queries
        out = torch.empty(rows, self.model.q_width, dtype=self.qkv.dtype, device=self.device)
        lse = torch.empty(rows, self.model.heads, device=self.device)
        operands = {"qkv": self.qkv, "kv": self.kv[which], "out": out, "lse": lse}
        work = self._work(queries, self.sizes[which], backward=False)
        play("attention", self.decisions, dict(operands), work=work, device=self.device)
        return Merged(out, lse)

    def backward(self, out: Tensor, lse: Tensor) -> tuple[Tensor, list[Tensor]]:
        """Return the packed gradient with the gradients of the queries added, and the gradients of both ``kv``."""
        out, d_qkv, d_kv = out.to(self.qkv.dtype), torch.zeros_like(self.qkv), []
        for which, queries in ((0, self.rows), (1, self.rows // 2)):
            d_q = torch.empty(self.batch * queries, self.model.q_width, dtype=out.dtype, device=self.device)
            d_kv.append(torch.empty_like(self.kv[which]))
            operands = {"grad": self.grad, "qkv": self.qkv, "kv": self.kv[which], "out": out, "lse": lse}
            work = self._work(queries, self.sizes[which], backward=True)
            written = {"grad_q": d_q, "grad_kv": d_kv[-1]}
            play("attention.bwd", self.decisions, {**operands, **written}, work=work, device=self.device)
            play("grad.accumulate", self.decisions, {"x": d_q, "out": d_qkv}, device=self.device)
        return d_qkv, d_kv

    def _work(self, queries: int, keys: int, *, backward: bool) -> Attention:
        heads, kv_heads, size = self.model.heads, self.model.kv_heads, self.model.head_dim
        return Attention(self.batch, queries, keys, "none", heads, kv_heads, size, backward, self.kernel, self.dtype)
