"""Run by a Python with transformers and DeepSpeed: tiles of the exported program give the gradients of the whole.

Usage: python run_tiles.py FOLDER (with train.py); prints JSON: the largest difference of each model and kind of tiles.
"""

from __future__ import annotations

import importlib.util
import json
import os
import sys
from pathlib import Path
from typing import Any

os.environ.setdefault("DS_ACCELERATOR", "cpu")

import torch
from transformers import GPT2Config, LlamaConfig, Qwen3Config
from transformers.models.gpt2.modeling_gpt2 import GPT2LMHeadModel
from transformers.models.llama.modeling_llama import LlamaForCausalLM
from transformers.models.qwen3.modeling_qwen3 import Qwen3ForCausalLM

TOKENS, STEPS = 50, 2
SIZES = {"vocab_size": 64, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4}
LLAMA = LlamaConfig(**SIZES, num_key_value_heads=2)
QWEN = Qwen3Config(**SIZES, num_key_value_heads=2, head_dim=8, tie_word_embeddings=True)
GPT2 = GPT2Config(vocab_size=64, n_embd=32, n_layer=2, n_head=4, resid_pdrop=0, embd_pdrop=0, attn_pdrop=0)
MODELS: dict[str, tuple[type[Any], Any]] = {
    "llama": (LlamaForCausalLM, LLAMA),
    "qwen3": (Qwen3ForCausalLM, QWEN),
    "gpt2": (GPT2LMHeadModel, GPT2),
}


def program(folder: Path) -> Any:
    """Return a fresh import of the exported program."""
    spec = importlib.util.spec_from_file_location("train", folder / "train.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["train"] = module
    spec.loader.exec_module(module)
    return module


def gradients(model: Any, scale: float) -> list[torch.Tensor]:
    """Return the loss and the gradients of two sequences."""
    ids = torch.randint(64, (2, TOKENS), generator=torch.Generator().manual_seed(1))
    loss = model(input_ids=ids, labels=ids, position_ids=torch.arange(TOKENS).expand(2, -1)).loss * scale
    loss.backward()
    return [loss.detach(), *(p.grad for p in model.parameters())]


def main(folder: Path) -> None:
    """Compare tiles of 7 and 16 tokens, which divide nothing, with the whole."""
    train, found = program(folder), dict[str, float]()
    for name, (kind, config) in MODELS.items():
        forward, mlps = kind.forward, {}
        for tiles in ("checkpointed", "deepspeed"):
            torch.manual_seed(0)
            model = kind(config)
            whole = [each.clone() for each in gradients(model, 1 / STEPS)]
            model.zero_grad()
            mlps = {type(m): type(m).forward for m in model.modules() if type(m).__name__.endswith("MLP")}
            share = 1 / (2 * (TOKENS - 1) * STEPS) if tiles == "deepspeed" else None
            train.tile_loss(model, 7, share)
            if share:
                train.tile_mlps(model, 16)
            tiled = gradients(model, 1.0 if share else 1 / STEPS)
            pairs = zip(whole, tiled, strict=True)
            found[f"{name} {tiles}"] = max(float((a - b).abs().max()) for a, b in pairs)
            kind.forward = forward
            for each, own in mlps.items():
                each.forward = own
    print(json.dumps(found))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
