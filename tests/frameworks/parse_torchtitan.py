"""Run by torchtitan's Python: builds a recipe by torchtitan's own ConfigManager and prints what it says as JSON.

Usage: python parse_torchtitan.py FOLDER
"""

from __future__ import annotations

import dataclasses
import json
import sys


def main(folder: str) -> None:
    """Print the configuration, checked as the trainer checks it before it starts."""
    sys.path.insert(0, folder)
    from torchtitan.config.manager import ConfigManager

    config = ConfigManager().parse_args(["--module", "memo_plan", "--config", "memo_plan"])
    spec = config.model_spec
    spec.model.update_from_config(config=config)
    attention = spec.model.layers[0].attention
    policy = config.activation_checkpoint
    if policy is not None:
        policy.build(dump_folder="")
    found = {
        "training": dataclasses.asdict(config.training),
        "parallelism": dataclasses.asdict(config.parallelism),
        "compile": dataclasses.asdict(config.compile),
        "implementation": config.optimizer.implementation,
        "activation_checkpoint": type(policy).__qualname__,
        "policy": None if policy is None else {f.name: getattr(policy, f.name) for f in dataclasses.fields(policy)},
        "loss": type(config.loss).__qualname__,
        "num_chunks": getattr(config.loss, "num_chunks", 1),
        "deterministic": config.debug.deterministic,
        "attention": type(attention.inner_attention).__qualname__,
        "positions": attention.rope.max_seq_len,
        "theta": attention.rope.theta,
        "model": {
            "layers": len(spec.model.layers),
            "hidden": spec.model.dim,
            "heads": attention.n_heads,
            "kv_heads": attention.n_kv_heads,
            "vocab": spec.model.vocab_size,
            "tied_embeddings": spec.model.enable_weight_tying,
            "ffn_hidden": spec.model.layers[0].feed_forward.w1.out_features,
            "head_dim": attention.qkv_linear.head_dim,
            "qk_norm": attention.qk_norm is not None,
        },
    }
    print(json.dumps(found, default=str))


if __name__ == "__main__":
    main(sys.argv[1])
