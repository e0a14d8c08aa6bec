"""A copy of a model without weights, whose forward makes shapes only, to count bytes before anything runs."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from memo_exec.decoder_layers.attention_calls import AttentionFunction
from memo_sim.contract.errors import CannotRun


def meta_copy(model: nn.Module, instead: dict[int, object]) -> nn.Module:
    """Return a copy of a model with its parameters and buffers on the meta device; ``instead``: other objects by id.

    Raises:
        CannotRun: when the weights are sharded.
    """
    parameters = list(model.parameters())
    sharded = any(isinstance(parameter, DTensor) for parameter in parameters)
    if sharded or any(isinstance(module, FSDPModule) for module in model.modules()):
        raise CannotRun(
            "bytes are predicted from whole weights, and these are sharded", hint="call predict before fully_shard"
        )
    memo: dict[int, Any] = dict(instead)
    for parameter in parameters:
        memo[id(parameter)] = nn.Parameter(
            torch.empty_like(parameter, device="meta"), requires_grad=parameter.requires_grad
        )
    for buffer in model.buffers():
        memo[id(buffer)] = torch.empty_like(buffer, device="meta")
    return copy.deepcopy(model, memo)


@contextmanager
def consecutive_positions() -> Iterator[None]:
    """Make transformers take positions as those of whole sequences, because meta positions cannot be looked at."""
    from transformers import masking_utils

    found = masking_utils.find_packed_sequence_indices
    masking_utils.find_packed_sequence_indices = lambda position_ids: None
    try:
        yield
    finally:
        masking_utils.find_packed_sequence_indices = found


def counted(function: AttentionFunction) -> AttentionFunction:
    """Return a function that saves what an attention function saves, without its kernel.

    Eager attention is plain operators, which the meta device has. All others save q, k, v, their output and a
    log-sum-exp, as flash kernels do. With a mask, PyTorch's own attention also saves keys and values with as many heads
    as queries (transformers repeats them), and the mask as numbers. Where PyTorch has no flash kernel (heads of q and v
    that differ in size, on a CPU), it saves more than this.
    """
    name = getattr(function, "__name__", "")
    if "eager" in name:
        return function
    dense = name == "sdpa_attention_forward"

    def attention(
        module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: object, **named: Any
    ) -> tuple[Tensor, None]:
        mask = attention_mask if dense and isinstance(attention_mask, Tensor) else None
        if mask is not None:
            from transformers.integrations.sdpa_attention import repeat_kv

            groups = getattr(module, "num_key_value_groups", 1)
            key, value = repeat_kv(key, groups), repeat_kv(value, groups)
            mask = mask.to(query.dtype)
        out: Tensor = _Attended.apply(query, key, value, mask)  # type: ignore[no-untyped-call]
        return out, None

    return attention


class _Attended(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None) -> Tensor:
        batch, heads, tokens, _ = q.shape
        out = q.new_empty(batch, tokens, heads, v.shape[-1])
        ctx.save_for_backward(q, k, v, mask, out, q.new_empty(batch, heads, tokens, dtype=torch.float32))
        return out

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Tensor:
        raise AssertionError("meta tensors have no backward")
