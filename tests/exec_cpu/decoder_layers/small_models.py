"""Small models of transformers, one of each kind of decoder layer, and their gradients."""

from __future__ import annotations

import warnings
from typing import Any

import torch
from torch import Tensor

from memo_exec.decoder_layers.policy import Fate, Policy
from memo_exec.decoder_layers.wrap import Tokenwise

TOKENS = 96
VOCAB = 128

_SHAPE = {
    "vocab_size": VOCAB,
    "hidden_size": 64,
    "intermediate_size": 160,
    "num_hidden_layers": 4,
    "pad_token_id": 0,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
}
_EXPERTS = {"num_experts": 8, "num_local_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 64}
_LATENT = {
    "q_lora_rank": 32,
    "kv_lora_rank": 32,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 16,
    "v_head_dim": 16,
    "n_routed_experts": 8,
    "n_group": 1,
    "topk_group": 1,
    "first_k_dense_replace": 1,
    "n_shared_experts": 1,
    "num_key_value_heads": 4,
    "head_dim": None,
}
_LINEAR = {
    "linear_num_value_heads": 4,
    "linear_num_key_heads": 2,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 16,
}

FAMILIES: dict[str, dict[str, Any]] = {
    "llama": {},
    "qwen2": {},
    "qwen3": {},
    "mistral": {"sliding_window": 32},
    "gemma2": {"sliding_window": 32, "attn_implementation": "eager"},
    "gemma3_text": {"sliding_window": 32, "layer_types": ["sliding_attention", "full_attention"] * 2},
    "mixtral": _EXPERTS,
    "qwen3_moe": _EXPERTS,
    "gpt_oss": {**_EXPERTS, "attn_implementation": "eager"},
    "deepseek_v3": {**_EXPERTS, **_LATENT},
    "phi3": {},
    "olmo2": {},
    "qwen3_next": {**_EXPERTS, **_LINEAR},
}


def small_model(family: str, dtype: torch.dtype = torch.float32, **changes: Any) -> Any:
    """Return a model with random weights, in training mode."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        import transformers
    transformers.logging.set_verbosity_error()
    fields = {"attn_implementation": "sdpa", **_SHAPE, **FAMILIES[family], **changes}
    fields = {name: value for name, value in fields.items() if value is not None}
    attention = fields.pop("attn_implementation")
    torch.manual_seed(0)
    config = transformers.AutoConfig.for_model(family, **fields)
    found = transformers.AutoModelForCausalLM.from_config(config, attn_implementation=attention)
    return found.to(dtype).train()


def token_ids(batch: int = 1, tokens: int = TOKENS) -> Tensor:
    return torch.randint(1, VOCAB, (batch, tokens), generator=torch.Generator().manual_seed(1))


def gradients(model: Any, ids: Tensor, **named: Any) -> dict[str, Tensor]:
    """Return the loss and the gradients of one step."""
    model.zero_grad()
    loss = model(input_ids=ids, labels=ids, **named).loss
    loss.backward()
    found = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
    return {"loss": loss.detach(), **found}


def keep_cut(model: Any, alpha: float) -> Tokenwise:
    """Wrap a model so that its rows are cut at alpha, and everything is kept."""
    wrapped = Tokenwise(model, Policy(alpha, Fate.KEEP, Fate.KEEP, Fate.KEEP), pin_memory=False, debug=False)
    wrapped.wrap(check=False)
    return wrapped


def equal(one: dict[str, Tensor], two: dict[str, Tensor]) -> bool:
    return one.keys() == two.keys() and all(torch.equal(one[name], two[name]) for name in one)


def error(found: dict[str, Tensor], wanted: dict[str, Tensor]) -> float:
    """Return the largest difference, relative to the largest entry of its tensor."""
    pairs = [(found[name].float(), wanted[name].float()) for name in wanted]
    return max(float((a - b).abs().max() / b.abs().max().clamp_min(1e-12)) for a, b in pairs)
