"""Reads and writes low-rank adapters as folders of Hugging Face's PEFT: adapter_config.json, adapter_model.safetensors.

PEFT has an A (rank, in) and a B (out, rank) for each module. Here those of a product's modules lie one below the other:

    layer.3/qkv.lora_a     base_model.model.model.layers.3.self_attn.q_proj.lora_A.weight, then k_proj, v_proj

Names and fields are those of PEFT 0.21 (``docs/source/developer_guides/checkpoint.md``, ``tuners/lora/config.py``).
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from memo_exec.training import huggingface
from memo_sim.contract import codec
from memo_sim.contract.adapters import Adapters, parse_adapters
from memo_sim.contract.errors import BadInput, UsageError
from memo_sim.contract.files import check_regular
from memo_sim.contract.huggingface import model_type
from memo_sim.contract.model import Model
from memo_sim.program.layout.parameters import adapted_columns

CONFIG, TENSORS = "adapter_config.json", "adapter_model.safetensors"
MODULES = {
    "q": "self_attn.q_proj",
    "k": "self_attn.k_proj",
    "v": "self_attn.v_proj",
    "proj": "self_attn.o_proj",
    "gate": "mlp.gate_proj",
    "up": "mlp.up_proj",
    "down": "mlp.down_proj",
}
"""The module of each target, in models that store every product by itself."""
PACKED = ("gpt2", "phi3")
"""Model types with Q, K and V in one module, which has one adapter in PEFT and three here."""
_NOT_HERE = ("rank_pattern", "alpha_pattern", "modules_to_save", "layers_to_transform", "layer_replication")
"""Fields that give modules other adapters than the plan's, or train more than adapters; empty where it is the same."""
_OTHER_KINDS = ("use_dora", "fan_in_fan_out", "lora_bias", "use_qalora", "target_parameters", "trainable_token_indices")
"""Fields of adapters of other kinds."""


def entries(model: Model, adapters: Adapters, *, kind: str = "") -> dict[str, tuple[tuple[str, int], ...]]:
    """Return for each of our tensors, by name, PEFT's tensors that form it: (name, rows).

    ``kind``: the model type; empty: the model's own.

    Raises:
        UsageError: when PEFT's adapters of the model type have other shapes.
    """
    kind = kind or model_type(model)
    if kind in PACKED:
        raise UsageError(
            f"PEFT has one adapter for Q, K and V of {kind}, and memo has one for each",
            wanted="a model that stores them apart: llama, mistral, qwen2 or qwen3",
        )
    found: dict[str, tuple[tuple[str, int], ...]] = {}
    for layer in range(model.layers):
        for product in ("qkv", "proj", "ffn_up", "ffn_down"):
            targets = adapters.targets_of(product, model)
            columns = adapted_columns(model, model.layer(layer), 1, adapters, product)
            at = f"base_model.model.model.layers.{layer}"
            names = [f"{at}.{MODULES[target]}" for target in targets]
            if targets:
                ours = f"layer.{layer}/{product}"
                found[f"{ours}.lora_a"] = tuple((f"{name}.lora_A.weight", adapters.rank) for name in names)
                found[f"{ours}.lora_b"] = tuple(
                    (f"{name}.lora_B.weight", width) for name, (_, width) in zip(names, columns, strict=True)
                )
    return found


def write(
    directory: Path, model: Model, adapters: Adapters, tensors: dict[str, Tensor], *, base: Path | None, kind: str = ""
) -> None:
    """Write ``tensors``, which are ours by name, as a folder that ``PeftModel.from_pretrained`` loads.

    ``base``: the folder of the frozen weights, None for random ones; ``kind``: its model type.

    Raises:
        UsageError: when PEFT has other adapters for the model type, or the directory cannot be written.
    """
    parts: dict[str, Tensor] = {}
    for ours, stored in entries(model, adapters, kind=kind).items():
        pieces = torch.split(tensors[ours].detach(), [rows for _, rows in stored])
        parts |= {name: piece.cpu().contiguous().clone() for (name, _), piece in zip(stored, pieces, strict=True)}
    try:
        directory.mkdir(parents=True, exist_ok=True)
        fresh = directory / f".{TENSORS}"
        fresh.touch()
        mode = fresh.stat().st_mode  # safetensors makes a file that only its owner may read
        save_file(parts, fresh, metadata={"format": "pt"})
        fresh.chmod(mode)
        os.replace(fresh, directory / TENSORS)
        huggingface.write_json(directory / CONFIG, config_of(adapters, base))
    except OSError as error:
        raise UsageError("cannot write the adapters", where=str(directory), got=str(error)) from None


def config_of(adapters: Adapters, base: Path | None) -> dict[str, Any]:
    """Return the fields of ``adapter_config.json``."""
    return {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": None if base is None else str(base),
        "r": adapters.rank,
        "lora_alpha": int(adapters.alpha) if adapters.alpha.is_integer() else adapters.alpha,
        "lora_dropout": 0.0,
        "use_rslora": adapters.rslora,
        "target_modules": [MODULES[target].rpartition(".")[2] for target in adapters.targets],
        "bias": "none",
        "inference_mode": True,
    }


def read(directory: Path, model: Model, adapters: Adapters) -> Iterator[tuple[str, Tensor]]:
    """Yield (our name, tensor in our form) for every side of the adapters.

    Checks the configuration, and names and shapes of all tensors, before the first one is read.

    Raises:
        BadInput: when the folder is of other adapters or another model, or a tensor is missing or unknown.
        UsageError: when PEFT has other adapters for the model.
    """
    wanted = entries(model, adapters)
    _check_config(directory, model, adapters)
    path = directory / TENSORS
    check_regular(path)
    try:
        with safe_open(path, framework="pt") as file:
            names = {name for stored in wanted.values() for name, _ in stored}
            if other := sorted(names ^ set(file.keys())):
                what = "is missing" if other[0] in names else "is no adapter of the plan"
                raise BadInput(
                    f"a tensor {what}",
                    where=str(path),
                    got=other[0],
                    hint="plan with the --lora of these adapters, or give another folder",
                )
            for ours, stored in wanted.items():
                for name, rows in stored:
                    inputs = _inputs_of(model, ours)
                    shape = (rows, inputs) if ours.endswith("lora_a") else (rows, adapters.rank)
                    if (got := tuple(file.get_slice(name).get_shape())) != shape:
                        raise BadInput("a tensor has another shape", where=f"{path}: {name}", got=got, wanted=shape)
            for ours, stored in wanted.items():
                yield ours, torch.cat([file.get_tensor(name) for name, _ in stored])
    except (OSError, SafetensorError) as error:
        raise BadInput("cannot read the adapters", where=str(path), got=str(error)) from None


def _inputs_of(model: Model, ours: str) -> int:
    """Return the input features of a product, of which A has as many."""
    layer, _, side = ours.removeprefix("layer.").partition("/")
    own = {"proj": model.q_width, "ffn_down": model.layer(int(layer)).ffn_hidden}
    return own.get(side.partition(".")[0], model.hidden)


def _check_config(directory: Path, model: Model, adapters: Adapters) -> None:
    """Refuse adapters of another kind, rank or scale; which modules have them, the tensors say."""
    path = directory / CONFIG
    fields = codec.decode_object(codec.read_raw(path), where=str(path))
    if (kind := fields.get("peft_type")) != "LORA":
        raise BadInput("not adapters of low rank", where=f"{path}: $.peft_type", got=kind, wanted="LORA")
    for name in (*_NOT_HERE, *_OTHER_KINDS):
        if fields.get(name):
            raise BadInput(
                "memo has no adapters of this kind",
                where=f"{path}: $.{name}",
                got=fields[name],
                wanted="nothing: every target has the same rank and scale, and nothing else is trained",
            )
    if fields.get("bias", "none") != "none":
        raise BadInput("memo trains no biases beside adapters", where=f"{path}: $.bias", got=fields["bias"])
    given = {"r": fields.get("r", 8), "lora_alpha": fields.get("lora_alpha", 8)}
    given["use_rslora"] = bool(fields.get("use_rslora", False))
    planned = {"r": adapters.rank, "lora_alpha": adapters.alpha, "use_rslora": adapters.rslora}
    for name, value in planned.items():
        if given[name] != value:
            raise BadInput(
                "the adapters are not those of the plan",
                where=f"{path}: $.{name}",
                got=given[name],
                wanted=value,
                hint=f"plan with --lora {_option(given, model, fields)}",
            )


def _option(given: dict[str, Any], model: Model, fields: dict[str, Any]) -> str:
    """Return the value of ``--lora`` that a configuration stands for, with its targets where memo knows them."""
    words = fields.get("target_modules")
    modules = {name.rpartition(".")[2]: target for target, name in MODULES.items()}
    text = f"r={given['r']},alpha={given['lora_alpha']:g}"
    if isinstance(words, list) and set(words) <= set(modules) and model.gated:
        text += f",targets={'+'.join(modules[word] for word in words)}"
    return parse_adapters(text + ",rslora" * given["use_rslora"], option="--lora")
