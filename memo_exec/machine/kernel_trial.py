"""Tries a kernel on a few tokens before a run allocates memory, because an installed library may still not run here.

The import succeeds for a library built for another architecture, a cuDNN without this head size, or a Triton without a
compiler. So short calls in the plan's form run forward and backward. Their results are compared with the definition

    out = softmax(q k^T / sqrt(d)) v,  dv = p^T do,  ds = p (do v^T - rowsum(do out)),  dq = ds k,  dk = ds^T q

The comparison also finds a wrong causal alignment and NaN, not only an exception.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from importlib import import_module
from typing import Literal

import torch
from torch import Tensor

from memo_exec.kernels import KERNELS, Call, Context
from memo_exec.kernels.attention import BACKENDS
from memo_exec.kernels.attention_backend import CAUSAL, WHOLE, AttentionBackward, Mask
from memo_exec.memory.dtypes import TORCH_DTYPES
from memo_sim.contract.attention_kernels import pads_values
from memo_sim.contract.catalog import load_model
from memo_sim.contract.hardware import LinearLossKernel
from memo_sim.contract.knobs import DtypeName, Loss, RowwiseKernel
from memo_sim.contract.model import Model
from memo_sim.contract.plan import Decisions, Kernels
from memo_sim.contract.units import format_percent
from memo_sim.program.attention.rsa import writes_scores
from memo_sim.program.ir.instruction import Instruction, Lane
from memo_sim.program.ir.work import LinearLoss, Rowwise, Work
from memo_sim.program.layout.rules.windows import windowed
from memo_sim.program.operators.workspaces import linear_loss_workspace_bytes, loss_tiles

TOKENS = 256
EARLIER = 320
"""Number of keys before the queries' own keys, in the forms "parts" and "window after earlier keys"."""

WINDOW = 64

Form = Literal["causal", "whole", "parts", "window", "window after earlier keys"]
FORMS: Mapping[Form, tuple[tuple[Mask, slice], ...]] = {
    "causal": ((CAUSAL, slice(None)),),
    "whole": ((WHOLE, slice(None)),),
    "parts": ((WHOLE, slice(EARLIER)), (CAUSAL, slice(EARLIER, None))),
    "window": ((Mask(causal=True, window=WINDOW), slice(None)),),
    "window after earlier keys": ((Mask(causal=True, window=WINDOW), slice(None)),),
}
"""The calls of each form: the mask of a call, and its keys. Log-sum-exp merges the outputs of several calls."""

TOLERANCE = 0.03
"""Largest allowed relative error of a result (Euclidean norm). bf16 gives about 0.005, a wrong mask about 0.5."""

MOST_TEXT = 200
"""How many characters of a library's own message are shown."""


@dataclass(frozen=True)
class Heads:
    """The attention heads of a trial."""

    heads: int
    kv_heads: int
    head_dim: int
    narrow_values: int = 0
    """Features of a value, where these are not ``head_dim``."""

    @classmethod
    def of(cls, model: Model) -> Heads:
        """Return one key/value head of a model with its group of query heads."""
        return cls(model.heads // model.kv_heads, 1, model.head_dim, model.narrow_values)


def forms_of(decisions: Decisions) -> tuple[Form, ...]:
    """Return the forms in which a plan calls attention; none for ring self-attention, which uses no such kernel."""
    own: Form = "whole" if decisions.model.bidirectional else "causal"
    layout = decisions.layout
    if writes_scores(decisions):
        return ()
    model, found = decisions.model, list[Form]()
    if windowed(decisions):
        earlier = layout.subsequences > 1 or layout.ring > 1
        found.append("window after earlier keys" if earlier else "window")
        if all(0 < shape.window < decisions.seq_tokens for shape in model.layer_shapes):
            return tuple(found)
    if layout.subsequences > 1:
        return (*found, "parts")
    return (*found, own, "parts") if layout.ring > 1 else (*found, own)


def attention_fails(
    kernel: str,
    heads: Heads,
    dtype: DtypeName,
    device: torch.device,
    form: Form = "causal",
    *,
    deterministic: bool = False,
) -> str:
    """Return why an attention kernel cannot compute these heads on ``device``; "" when it can.

    A kernel that needs values as wide as keys gets them so, as a step pads them.
    """
    tried = replace(heads, narrow_values=0) if pads_values(kernel) else heads

    def play() -> str:
        backend = import_module(BACKENDS[kernel])
        q, k, v, grads = _operands(tried, form, lambda *shape: _random(shape, device, dtype))
        grad, parts = _random((*q.shape[:3], v.shape[3]), device, dtype), FORMS[form]
        scale = {"scale": float(q.shape[3] ** -0.5)} if tried.narrow_values else {}
        outs, lses = [torch.empty_like(grad) for _ in parts], [torch.empty(q.shape[:3], device=device) for _ in parts]
        for (mask, keys), out, lse in zip(parts, outs, lses, strict=True):
            backend.forward(q, k[:, keys], v[:, keys], out, lse, mask=mask, **scale)
        whole = torch.stack(lses).logsumexp(0)
        shares = [(lse - whole).exp().unsqueeze(-1) for lse in lses]
        out = sum((o.float() * share for o, share in zip(outs, shares, strict=True)), torch.zeros(())).to(grad.dtype)
        grad_q = torch.zeros(q.shape, device=device)
        for mask, keys in parts:
            into = (grads[0], grads[1][:, keys], grads[2][:, keys])
            qkv = (q, k[:, keys], v[:, keys])
            backend.backward(AttentionBackward(grad, qkv, out, whole, into, mask, deterministic, **scale))
            grad_q += grads[0]
        masked = form != "whole"
        window = parts[0][0].window
        wanted = _definition(grad.float(), q.float(), k.float(), v.float(), masked=masked, window=window)
        return _difference((out, whole, grad_q, *grads[1:]), wanted)

    return _tried(play)


def _operands(
    heads: Heads, form: Form, made: Callable[..., Tensor]
) -> tuple[Tensor, Tensor, Tensor, tuple[Tensor, ...]]:
    """Return Q, K, V and the tensors for their gradients, as views of packed tensors like those of a step."""
    if heads.narrow_values:
        return _of_two_widths(heads, form, made)
    if form in ("parts", "window after earlier keys"):
        q = made(1, TOKENS, heads.heads, heads.head_dim)
        kv = made(1, EARLIER + TOKENS, 2, heads.kv_heads, heads.head_dim)
        k, v = kv.unbind(2)
        return q, k, v, (torch.empty_like(q), *torch.empty_like(kv).unbind(2))
    packed = made(1, TOKENS, heads.heads + 2 * heads.kv_heads, heads.head_dim)
    sizes = [heads.heads, heads.kv_heads, heads.kv_heads]
    q, k, v = torch.split(packed, sizes, dim=2)
    return q, k, v, torch.split(torch.empty_like(packed), sizes, dim=2)


def _of_two_widths(
    heads: Heads, form: Form, made: Callable[..., Tensor]
) -> tuple[Tensor, Tensor, Tensor, tuple[Tensor, ...]]:
    """Return what ``_operands`` does, with values of another width than queries and keys."""
    widths = [heads.head_dim, heads.head_dim, heads.narrow_values]
    counts = [heads.heads, heads.kv_heads, heads.kv_heads]

    def views(packed: Tensor, first: int) -> tuple[Tensor, ...]:
        sizes = [width * count for width, count in zip(widths[first:], counts[first:], strict=True)]
        found = torch.split(packed, sizes, dim=2)
        return tuple(torch.unflatten(x, 2, (n, -1)) for x, n in zip(found, counts[first:], strict=True))

    total = sum(width * count for width, count in zip(widths, counts, strict=True))
    if form == "parts":
        queries = heads.heads * heads.head_dim
        q, kv = made(1, TOKENS, heads.heads, heads.head_dim), made(1, EARLIER + TOKENS, total - queries)
        k, v = views(kv, 1)
        return q, k, v, (torch.empty_like(q), *views(torch.empty_like(kv), 1))
    packed = made(1, TOKENS, total)
    q, k, v = views(packed, 0)
    return q, k, v, views(torch.empty_like(packed), 0)


def _random(shape: Sequence[int], device: torch.device, dtype: DtypeName) -> Tensor:
    generator = torch.Generator().manual_seed(sum(shape))
    return torch.randn(*shape, generator=generator).to(device, TORCH_DTYPES[dtype])


def triton_fails(device: torch.device, loss: Loss = "auto") -> str:
    """Return why Triton's kernels cannot be compiled and run on ``device``; "" when they can.

    ``loss``: the plan's; those of linear-triton are tried too, which need far more registers and shared memory.
    """
    return _tried(lambda: _linear_loss_differs(device)) if loss == "linear-triton" else _tried(lambda: _gelu(device))


def _gelu(device: torch.device) -> str:
    results: list[Tensor] = []
    x = torch.linspace(-3, 3, TOKENS * 64).view(TOKENS, 64).to(device, torch.bfloat16)
    model = load_model("gpt-tiny")  # the kernel reads the kind of activation from it
    choices: tuple[RowwiseKernel, ...] = ("torch", "triton")
    for rowwise in choices:
        decisions = Decisions(model=model, seq_tokens=TOKENS, kernels=Kernels(rowwise=rowwise))
        instruction = Instruction("trial", "gelu", Lane.COMPUTE, Rowwise("gelu", TOKENS, 0, 0), ())
        results.append(torch.empty_like(x))
        KERNELS["gelu"](Call(instruction, Context(decisions, device), {"x": x, "out": results[-1]}))
    return _difference(results[1:], results[:1])


def _linear_loss_differs(device: torch.device) -> str:
    """Play a loss with the classifier's product inside and its gradient, and compare both with torch's operators."""
    decisions = Decisions(model=load_model("gpt-tiny"), seq_tokens=TOKENS)
    context, vocab, features = Context(decisions, device), decisions.model.vocab, decisions.model.hidden
    width = loss_tiles(vocab)[0][1]
    x = _random((TOKENS, features), device, "bf16") * features**-0.5
    given = {
        "x": x,
        "weight": _random((vocab, features), device, "bf16").flatten(),
        "labels": (TOKENS - torch.arange(TOKENS, device=device)) % vocab,
    }

    def played(kernel: LinearLossKernel) -> list[Tensor]:
        size = linear_loss_workspace_bytes(TOKENS, vocab, "bf16", features, triton=kernel == "triton")
        stats, loss = torch.empty(TOKENS, 3, device=device), torch.zeros(1, device=device)
        tile = torch.empty(TOKENS, width, device=device, dtype=x.dtype)
        own = {
            "logits": tile,
            "stats": stats,
            "loss": loss,
            "workspace": torch.empty(size, dtype=torch.uint8, device=device),
        }

        def play(op: str, work: Work, **more: Tensor) -> None:
            instruction = Instruction("trial", f"linear_loss.{op}", Lane.COMPUTE, work, ())
            KERNELS[instruction.op](Call(instruction, context, given | own | more))

        play("statistics", LinearLoss("statistics", kernel, TOKENS, vocab, features, "bf16", width), out=stats)
        play("sum", Rowwise("linear_loss.sum", TOKENS, 0, 0))
        play("gradient", LinearLoss("gradient", kernel, TOKENS, width, features, "bf16", width), out=tile)
        return [loss, tile]

    return _difference(played("triton"), played("torch"))


def _tried(play: Callable[[], str]) -> str:
    """Return the result of ``play``, or the first line of its exception."""
    try:
        with torch.inference_mode():
            return play()
    except Exception as error:  # a library may raise any exception; each one means that it cannot be used
        first = (str(error).strip().splitlines() or [""])[0]
        return f"a trial call failed: {type(error).__name__}: {first[:MOST_TEXT]}"


def _definition(grad: Tensor, q: Tensor, k: Tensor, v: Tensor, *, masked: bool, window: int) -> list[Tensor]:
    """Return output, log-sum-exp and the gradients of Q, K, V, computed from the definition of attention.

    All are fp32 and (1, tokens, heads, head_dim); the log-sum-exp lacks the last dimension. The queries belong to the
    last keys.
    """
    shared, scale = q.shape[2] // k.shape[2], q.shape[3] ** -0.5
    queries, incoming = (x[0].transpose(0, 1) for x in (q, grad))
    keys, values = (x[0].transpose(0, 1).repeat_interleave(shared, 0) for x in (k, v))
    pairs = (q.shape[1], k.shape[1])
    every = torch.ones(pairs, dtype=torch.bool, device=q.device)
    hidden = every.triu(1 + pairs[1] - pairs[0]) & masked
    if window:
        hidden |= every.tril(pairs[1] - pairs[0] - window)
    scores = (queries @ keys.mT * scale).masked_fill(hidden, -torch.inf)
    weights = scores.softmax(-1)
    out = weights @ values
    slopes = weights * (incoming @ values.mT - (incoming * out).sum(-1, keepdim=True)) * scale
    dk, dv = (x.unflatten(0, (-1, shared)).sum(1) for x in (slopes.mT @ queries, weights.mT @ incoming))
    found = (out, scores.logsumexp(-1).unsqueeze(-1), slopes @ keys, dk, dv)
    out, lse, *grads = (x.transpose(0, 1).unsqueeze(0) for x in found)
    return [out, lse.squeeze(-1), *grads]


def _difference(found: tuple[Tensor, ...] | list[Tensor], wanted: list[Tensor]) -> str:
    """Return the first relative error above ``TOLERANCE`` as text; "" when all results are right."""
    errors = [
        float((one.float() - true.float()).norm() / true.float().norm())
        for one, true in zip(found, wanted, strict=True)
    ]
    wrong = [error for error in errors if not error <= TOLERANCE]  # this form also finds NaN
    return f"a trial call gave a wrong result: relative error {format_percent(wrong[0])}" if wrong else ""
