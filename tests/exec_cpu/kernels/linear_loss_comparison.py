"""Plays a loss with the classifier's product inside, kernel by kernel as ranks of tp, and compares it with autograd."""

from __future__ import annotations

from math import isnan

import torch
from torch import Tensor

from memo_exec.kernels import StepScalars
from memo_sim.contract.hardware import LinearLossKernel
from memo_sim.contract.plan import Decisions, Layout
from memo_sim.program.ir.work import LinearLoss, TileGemm
from memo_sim.program.operators import workspaces as table
from tests.exec_cpu.kernels.hand_call import play
from tests.exec_cpu.small import decide, gpt

TOKENS, HIDDEN = 52, 40
SCALE = 0.125
NAMES = {torch.float32: "fp32", torch.bfloat16: "bf16"}


class Trial:
    """Operands of all ranks, and what the kernels make of them. Every fifth token is not counted (a masked prompt)."""

    def __init__(  # noqa: PLR0917 - the sizes of one trial
        self,
        kernel: LinearLossKernel,
        vocab: int,
        tp: int,
        dtype: torch.dtype,
        size: float = 1.0,
        device: str = "cpu",
    ) -> None:
        """``size``: about that of the logits."""
        generator = torch.Generator().manual_seed(0)
        self.device = device
        self.kernel, self.vocab, self.tp, self.dtype = kernel, vocab, tp, dtype
        self.width = -(-vocab // tp)
        self.x = (size * torch.randn(TOKENS, HIDDEN, generator=generator)).to(device, dtype)
        # Rows of the weight beyond the vocabulary must not count.
        weight = torch.full((self.width * tp, HIDDEN), 1e3)
        weight[:vocab] = torch.randn(vocab, HIDDEN, generator=generator) * HIDDEN**-0.5
        self.weights = list(weight.to(device, dtype).split(self.width))
        self.labels = torch.randint(0, vocab, (TOKENS,), generator=generator)
        self.labels[::5] = -100
        self.labels = self.labels.to(device)
        self.loss, self.d_x, self.d_weight = self._played()

    def _decisions(self) -> Decisions:
        model = gpt(vocab=self.vocab, hidden=HIDDEN, heads=8, kv_heads=8, head_dim=8)
        return decide(model, layout=Layout(tp=self.tp), seq_tokens=TOKENS, micro_batch=1, dtype=NAMES[self.dtype])

    def _play(self, op: str, rank: int, work: LinearLoss | TileGemm | None = None, **tensors: Tensor) -> None:
        scratch = table.linear_loss_workspace_bytes(
            TOKENS, self.width, NAMES[self.dtype], HIDDEN, triton=self.kernel == "triton", on_cpu=True
        )
        if op == "wgrad":
            scratch = table.wgrad_workspace_bytes(self._tile, HIDDEN, TOKENS, NAMES[self.dtype], "torch-flash-cpu")
        given = {name: value.view(-1) if name == "weight" else value for name, value in tensors.items()}
        play(
            f"linear_loss.{op}",
            self._decisions(),
            given,
            work=work,
            workspace_bytes=scratch,
            scalars=StepScalars(loss_scale=SCALE),
            rank=rank,
            device=self.device,
        )

    @property
    def _tile(self) -> int:
        return table.loss_tiles(self.width)[0][1]

    def _empty(self, features: int, dtype: torch.dtype = torch.float32) -> Tensor:
        """Return a matrix of NaN with a row for each token."""
        return torch.full((TOKENS, features), torch.nan, dtype=dtype, device=self.device)

    def _work(self, part: str, columns: int, first: int = 0) -> LinearLoss:
        return LinearLoss(part, self.kernel, TOKENS, columns, HIDDEN, NAMES[self.dtype], self._tile, first)  # type: ignore[arg-type]

    def _played(self) -> tuple[Tensor, Tensor, Tensor]:
        """Return the loss, the input's gradient (summed over ranks) and the classifier's (of all ranks)."""
        stats = [self._empty(3) for _ in self.weights]
        for rank, weight in enumerate(self.weights):
            operands = {"x": self.x, "weight": weight, "labels": self.labels, "out": stats[rank]}
            if self.kernel == "torch":
                operands["logits"] = self._empty(self._tile, self.dtype)
            self._play("statistics", rank, self._work("statistics", self.width), **operands)
        if self.tp > 1:
            rows = torch.stack([numbers.view(3, TOKENS) for numbers in stats])
            largest = rows[:, 0].amax(0)
            whole = torch.stack([largest, (rows[:, 1] - largest).exp().sum(0), rows[:, 2].sum(0)])
            stats = [whole.clone().view(TOKENS, 3) for _ in stats]
        losses, total, grads = [], self._empty(HIDDEN).zero_(), []
        for rank, (weight, numbers) in enumerate(zip(self.weights, stats, strict=True)):
            losses.append(torch.zeros(1, device=self.device))
            self._play("sum", rank, stats=numbers, labels=self.labels, loss=losses[-1])
            d_x, grad = self._empty(HIDDEN), torch.zeros(self.width * HIDDEN, device=self.device)
            for first, columns in table.loss_tiles(self.width):
                tile = self._empty(self._tile, self.dtype)
                operands = {"x": self.x, "weight": weight, "labels": self.labels, "stats": numbers, "out": tile}
                self._play("gradient", rank, self._work("gradient", columns, first), **operands)
                dgrad = TileGemm(TOKENS, HIDDEN, columns, "dgrad", NAMES[self.dtype], first)  # type: ignore[arg-type]
                self._play("dgrad.add" if first else "dgrad", rank, dgrad, grad=tile, weight=weight, out=d_x)
                wgrad = TileGemm(columns, HIDDEN, TOKENS, "wgrad", NAMES[self.dtype], first)  # type: ignore[arg-type]
                self._play("wgrad", rank, wgrad, grad=tile, x=self.x, out=grad)
            total += d_x
            grads.append(grad.view(self.width, HIDDEN))
        assert all(torch.equal(loss, losses[0]) for loss in losses)
        return losses[0], total, torch.cat(grads)

    def errors(self) -> dict[str, float]:
        """Return the relative errors against plain autograd in fp64; of gradients, those of the largest element."""
        x, weight = (each.double().requires_grad_() for each in (self.x, torch.cat(self.weights)[: self.vocab]))
        wanted = SCALE * torch.nn.functional.cross_entropy(
            x @ weight.T, self.labels, ignore_index=-100, reduction="sum"
        )
        wanted.backward()
        found = {
            "loss": (self.loss, wanted.detach()),
            "d_x": (self.d_x, x.grad),
            "d_weight": (self.d_weight[: self.vocab], weight.grad),
        }
        assert not self.d_weight[self.vocab :].any()
        return {name: _gap(one, true) for name, (one, true) in found.items() if true is not None}


def _gap(found: Tensor, true: Tensor) -> float:
    gap = float((found.double() - true).abs().max() / true.abs().max())
    return float("inf") if isnan(gap) else gap
