"""The closest rival: transformers' own Llama with its own gradient checkpointing and offload, unchanged.

The benchmark copies memo's initial weights into it. Its hidden states go through the same chunked loss as those of all
other systems, because its own loss would compute all logits at once.
"""

from __future__ import annotations

from collections.abc import Iterator
from importlib import import_module
from importlib.metadata import PackageNotFoundError, version
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks.gpu.loss import ChunkedLoss
from memo_exec.training import huggingface
from memo_sim.contract.errors import UsageError
from memo_sim.contract.huggingface import config_of, model_type
from memo_sim.contract.model import Model

FIRST_WITH_OFFLOAD = (5, 16)
ON_CPU = "runs without offload, because a CPU has no device memory to copy from and no memory to pin"


def why_not(model: Model) -> str:
    """Return why transformers cannot run this model, or "" if it can."""
    try:
        found = version("transformers")
    except PackageNotFoundError:
        return "transformers is not installed"
    if tuple(int(part) for part in found.split(".")[:2]) < FIRST_WITH_OFFLOAD:
        return f"transformers {found} has no checkpointing with offload; it needs 5.16 or newer"
    try:
        kind = model_type(model)
    except UsageError as error:
        return error.what
    return "" if kind == "llama" else f"this rival supports only Llama models, and this model is a {kind}"


class HuggingFaceModel:
    """A LlamaForCausalLM that offloads the inputs of its checkpointed layers."""

    def __init__(self, model: Model, tokens: int, device: torch.device, dtype: torch.dtype) -> None:
        # The library's type annotations are incomplete, so it is used untyped.
        transformers: Any = import_module("transformers")
        fields = config_of(model, positions=tokens)
        config = transformers.LlamaConfig(
            **{k: v for k, v in fields.items() if k not in ("architectures", "model_type")}
        )
        config._attn_implementation = "sdpa"
        config.use_cache = False
        with torch.device(device):
            self.network = transformers.LlamaForCausalLM(config)
        for parameter in self.network.parameters():  # only parameters; rotary frequencies are buffers and stay in fp32
            parameter.data = parameter.data.to(dtype)
        self.network.train()
        old, new = "gradient_checkpointing_enable", "activation_checkpointing_enable"
        enable = getattr(self.network, new if hasattr(self.network, new) else old)
        enable({"use_reentrant": False}, offload=device.type == "cuda")
        self.model = model

    def parts(self) -> Iterator[tuple[nn.Parameter, str, slice]]:
        """Yield (parameter, name of the memo tensor that contains it, its rows in that tensor)."""
        theirs = dict(self.network.named_parameters())
        for entry in huggingface.entries(self.model):
            first = 0
            for name, rows in entry.parts:
                yield theirs[name], entry.ours, slice(first, first + rows)
                first += rows

    def loss(self, ids: Tensor, labels: Tensor, scale: float) -> Tensor:
        """Return ``scale`` times the summed loss; ids and labels are (sequences, tokens)."""
        hidden = self.network.model(input_ids=ids, use_cache=False).last_hidden_state
        weight = self.network.get_output_embeddings().weight
        loss: Tensor = ChunkedLoss.apply(hidden.flatten(0, 1), weight, labels.flatten(), scale)  # type: ignore[no-untyped-call]
        return loss
