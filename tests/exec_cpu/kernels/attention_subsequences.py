"""Runs only the attention instructions of a lowered program with subsequences, on any device.

It runs the attention of a layer's templates, forward from the first subsequence to the last, then backward in reverse.
The test chooses queries, keys, values and output gradients. Buffers that templates share are kept between them. Every
tensor is NaN until a kernel writes it.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import accumulate, pairwise

import torch
from torch import Tensor

from memo_exec.kernels import KERNELS, Call, Context
from memo_exec.memory.dtypes import TORCH_DTYPES
from memo_sim.contract.knobs import DtypeName
from memo_sim.contract.model import Model
from memo_sim.contract.plan import Kernels, Layout
from memo_sim.program.ir.instruction import Family
from memo_sim.program.layout.partition import partition
from memo_sim.program.lower import lower
from tests.exec_cpu.small import CPU_KERNELS, decide, llama

OPS = {"qkv.split", "attention", "attention.merge", "attention.bwd", "grad.accumulate", "copy", "qkv.join"}


@dataclass(frozen=True)
class Found:
    """Output and log-sum-exp of all rows, and the gradient of the packed Q, K, V."""

    out: Tensor
    lse: Tensor
    grad_qkv: Tensor


class Subsequences:
    """One sequence of ``tokens`` in ``parts`` subsequences; attention uses ``kernel`` in ``head_groups`` groups."""

    def __init__(
        self,
        tokens: int,
        parts: int,
        *,
        model: Model | None = None,
        head_groups: int = 1,
        kernel: str = CPU_KERNELS.attention,
        dtype: DtypeName = "fp32",
        device: str = "cpu",
    ) -> None:
        self.model = model or llama()
        self.kernel, self.dtype, self.device = kernel, dtype, device
        kernels = Kernels(attention=kernel, head_groups=head_groups)
        layout = Layout(subsequences=parts, partition="length")
        self.decisions = decide(
            self.model, layout=layout, seq_tokens=tokens, micro_batch=1, dtype=dtype, kernels=kernels
        )
        (self.program,) = lower(self.decisions)
        self.rows = [slice(*ends) for ends in pairwise((0, *accumulate(partition(self.decisions))))]
        self.qkv = self._random(self.model.q_width + 2 * self.model.kv_width, seed=0)
        self.grad = self._random(self.model.q_width, seed=1)

    def _random(self, features: int, *, seed: int) -> Tensor:
        generator = torch.Generator().manual_seed(seed)
        found = torch.randn((self.rows[-1].stop, features), generator=generator)
        return found.to(self.device, TORCH_DTYPES[self.dtype])

    def reference(self) -> Found:
        """Compute the results with a masked softmax in double precision and autograd."""
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
        """Compute the results with the program's kernels."""
        kept: dict[str, Tensor] = {}
        ends = [f".s{n}" if len(self.rows) > 1 else "" for n in range(len(self.rows))]
        for end, rows in zip(ends, self.rows, strict=True):
            packed = "skeletal.qkv" if len(self.rows) == 1 else "qkv"
            self._play(f"layer.fwd{end}", kept, {packed: self.qkv[rows]})
        grads = []
        for end, rows in reversed(list(zip(ends, self.rows, strict=True))):
            inside = self._play(f"layer.bwd{end}", kept, {"d_attn": self.grad[rows]})
            grads.append(inside["d_qkv"])
        out, lse = (torch.cat([kept[f"skeletal.{name}{end}"] for end in ends]) for name in ("attn", "lse"))
        return Found(out, lse, torch.cat(grads[::-1]))

    def _play(self, name: str, kept: dict[str, Tensor], given: dict[str, Tensor]) -> dict[str, Tensor]:
        """Run a template's attention; ``given`` has the contents of buffers that other instructions write."""
        template = next(each for each in self.program.templates if each.name == name)
        own = {family.name: family for family in template.own}
        shared = {family.name: family for family in self.program.families}
        inside: dict[str, Tensor] = {}
        for instruction in template.instructions:
            if instruction.op not in OPS:
                continue
            operands = {}
            for operand in instruction.operands:
                family = template.slots[operand.slot]
                held = inside if family in own else kept
                if family not in held:
                    held[family] = self._filled((own | shared)[family], given.get(family))
                operands[operand.role] = held[family][operand.first : operand.first + operand.tokens]
            context = Context(self.decisions, torch.device(self.device))
            with torch.inference_mode():
                KERNELS[instruction.op](Call(instruction, context, operands))
        return inside

    def _filled(self, family: Family, content: Tensor | None) -> Tensor:
        if content is not None:
            return content.clone()
        shape = (family.tokens, family.features) if family.features > 1 else (family.tokens,)
        return torch.full(shape, torch.nan, dtype=TORCH_DTYPES[family.dtype], device=self.device)
