"""Reads and writes weights as Hugging Face directories: GPT-2, Llama, Mistral, Phi-3, Qwen2, Qwen3, Gemma 3's text
models, Mixtral, Qwen3-MoE, GPT-OSS and DeepSeek-V3.

- Our matrices are (out, in). Q, K, V are packed into one, and so are [gate; up].
- GPT-2 stores matrices as (in, out), because it uses Conv1D.
- The products of latent attention are one matrix here: that of the queries' latent, then that of keys and values.
- Phi-3 packs Q, K, V and [gate; up] as we do; the others store them separately.
- The experts of a layer are one tensor here, and a tensor for every expert and matrix there. GPT-OSS has one tensor
  too, of (in, out) matrices, with the features of gate and up in turn.
- A tied classifier is not stored.
- Gemma stores the weights of norms minus one.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from memo_sim.contract import codec
from memo_sim.contract.errors import BadInput, UsageError, did_you_mean
from memo_sim.contract.experts import Experts
from memo_sim.contract.files import check_regular
from memo_sim.contract.huggingface import config_of, model_from_config, model_type
from memo_sim.contract.huggingface_types.kinds import GPT_OSS
from memo_sim.contract.latent_attention import LatentAttention
from memo_sim.contract.layer_shape import LayerShape
from memo_sim.contract.model import Model
from memo_sim.program.layout.parameters import SELECTION_BIAS, embed_block, head_block, layer_block

SHARD_BYTES = 4 * 2**30
IGNORED_ENDINGS = (".attn.bias", ".attn.masked_bias", ".rotary_emb.inv_freq")
"""Names of constant tables that old versions of transformers stored with the weights."""


@dataclass(frozen=True, slots=True)
class Entry:
    """One of our tensors: the stored parts that form it, as (name, rows), and whether these are transposed."""

    ours: str
    parts: tuple[tuple[str, int], ...]
    transposed: bool = False
    less_one: bool = False
    """Whether the stored values are ours minus one."""
    experts: int = 0
    """The experts of one stored tensor (experts, in features, out features), or (experts, out features) of biases."""
    in_turn: bool = False
    """Whether gate and up features take turns in it."""

    def stored_shape(self, shape: tuple[int, ...], rows: int) -> tuple[int, ...]:
        """Return the stored shape of a part with ``rows`` rows of our tensor, which has ``shape``."""
        if self.experts:
            return (self.experts, *shape[1:], rows // self.experts)
        own = (rows, *shape[1:])
        return own[::-1] if self.transposed else own

    def read(self, part: Tensor) -> Tensor:
        """Return a stored part in our form."""
        if self.less_one:
            part = part.float() + 1
        if self.experts:
            part = torch.cat((part[..., ::2], part[..., 1::2]), dim=-1) if self.in_turn else part
            return part.mT.flatten(0, 1) if part.dim() > 2 else part.flatten()
        return part.t() if self.transposed else part

    def stored(self, part: Tensor) -> Tensor:
        """Return rows of our tensor in the stored form."""
        if self.less_one:
            part = (part.float() - 1).to(part.dtype)
        if self.experts:
            part = part.view(self.experts, -1, *part.shape[1:])
            part = part.mT if part.dim() > 2 else part
            return torch.stack(part.chunk(2, dim=-1), dim=-1).flatten(-2) if self.in_turn else part
        return part.t() if self.transposed else part


def entries(model: Model, kind: str = "") -> list[Entry]:
    """Return one entry for every tensor of ``model``, as the model type ``kind`` stores it; empty: the model's own."""
    kind = kind or model_type(model)
    return _gpt2(model) if kind == "gpt2" else _llama(model, kind)


def _gpt2(model: Model) -> list[Entry]:
    h, f = model.hidden, model.ffn_hidden
    found = [
        Entry("embed/tokens.weight", (("transformer.wte.weight", model.vocab),)),
        Entry("embed/positions.weight", (("transformer.wpe.weight", model.max_positions),)),
    ]
    products = [("qkv", "attn.c_attn", 3 * h), ("proj", "attn.c_proj", h), ("ffn_up", "mlp.c_fc", f)]
    products.append(("ffn_down", "mlp.c_proj", h))
    for i in range(model.layers):
        at = f"transformer.h.{i}."
        for ours, theirs, rows in products:
            found.append(Entry(f"layer.{i}/{ours}.weight", ((f"{at}{theirs}.weight", rows),), transposed=True))
            found.append(Entry(f"layer.{i}/{ours}.bias", ((f"{at}{theirs}.bias", rows),)))
        for n in (1, 2):
            found += [Entry(f"layer.{i}/norm{n}.{kind}", ((f"{at}ln_{n}.{kind}", h),)) for kind in ("weight", "bias")]
    found += [Entry(f"head/norm.{kind}", ((f"transformer.ln_f.{kind}", h),)) for kind in ("weight", "bias")]
    return found + _classifier(model)


def _products(model: Model, kind: str, layer: LayerShape) -> dict[str, list[tuple[str, int]]]:
    """Return the parts of each matrix of a layer."""
    h, f, q, kv = model.hidden, layer.ffn_hidden, model.q_width, model.kv_width
    attention = {
        "qkv": [("self_attn.q_proj", q), ("self_attn.k_proj", kv), ("self_attn.v_proj", kv)],
        "proj": [("self_attn.o_proj", h)],
    }
    if model.latent is not None:
        attention = _latent_products(model, model.latent)
    if layer.experts is not None and kind == GPT_OSS:
        return attention
    if layer.experts is not None:
        return attention | _experts(layer.experts, h, mixtral=kind == "mixtral")
    mlp = {"ffn_up": [("mlp.gate_proj", f), ("mlp.up_proj", f)], "ffn_down": [("mlp.down_proj", h)]}
    if kind == "phi3":
        attention["qkv"], mlp["ffn_up"] = [("self_attn.qkv_proj", q + 2 * kv)], [("mlp.gate_up_proj", 2 * f)]
    return attention | mlp


def _latent_products(model: Model, latent: LatentAttention) -> dict[str, list[tuple[str, int]]]:
    """Return the parts of the matrices of latent attention (DeepSeek-V2 and V3)."""
    queries = [("self_attn.q_a_proj", latent.q_rank)] if latent.q_rank else []
    keys = model.heads * (latent.nope_dim + latent.value_dim)
    return {
        "latent": [*queries, ("self_attn.kv_a_proj_with_mqa", latent.kv_rank + latent.rope_dim)],
        "q_up": [("self_attn.q_b_proj" if latent.q_rank else "self_attn.q_proj", model.q_width)],
        "kv_up": [("self_attn.kv_b_proj", keys)],
        "proj": [("self_attn.o_proj", model.hidden)],
    }


def _norms(model: Model) -> list[tuple[str, str, int]]:
    """Return the norms of a layer: our name, the stored one, and the features."""
    h = model.hidden
    norms = [("norm1", "input_layernorm", h), ("norm2", "post_attention_layernorm", h)]
    if model.post_norms:
        behind = [("post_attn", "post_attention_layernorm", h), ("norm2", "pre_feedforward_layernorm", h)]
        norms = [norms[0], *behind, ("post_mlp", "post_feedforward_layernorm", h)]
    if (latent := model.latent) is not None:
        norms += [("q_latent_norm", "self_attn.q_a_layernorm", latent.q_rank)] if latent.q_rank else []
        norms.append(("kv_latent_norm", "self_attn.kv_a_layernorm", latent.kv_rank))
    if model.qk_norm:
        norms += [("q_norm", "self_attn.q_norm", model.head_dim), ("k_norm", "self_attn.k_norm", model.head_dim)]
    return norms


def _llama(model: Model, kind: str) -> list[Entry]:
    h, norms, shifted = model.hidden, _norms(model), model.norms_from_one
    biased = {"qkv": model.qkv_bias, "proj": model.linear_bias or model.proj_bias}
    found = [Entry("embed/tokens.weight", (("model.embed_tokens.weight", model.vocab),))]
    for i in range(model.layers):
        at = f"model.layers.{i}."
        for ours, theirs in _products(model, kind, model.layer(i)).items():
            found.append(
                Entry(f"layer.{i}/{ours}.weight", tuple((f"{at}{name}.weight", rows) for name, rows in theirs))
            )
            if biased.get(ours, model.linear_bias):
                found.append(
                    Entry(f"layer.{i}/{ours}.bias", tuple((f"{at}{name}.bias", rows) for name, rows in theirs))
                )
        if kind == GPT_OSS:
            found += _gpt_oss(model, i)
        if (of := model.layer(i).experts) is not None and of.selection_bias:
            stored = ((f"{at}mlp.gate.e_score_correction_bias", of.count),)
            found.append(Entry(f"layer.{i}/{SELECTION_BIAS}", stored))
        found += [
            Entry(f"layer.{i}/{ours}.weight", ((f"{at}{name}.weight", rows),), less_one=shifted)
            for ours, name, rows in norms
        ]
    found.append(Entry("head/norm.weight", (("model.norm.weight", h),), less_one=shifted))
    return found + _classifier(model)


def _gpt_oss(model: Model, number: int) -> list[Entry]:
    """Return the entries of a GPT-OSS's sinks, router and experts in one layer."""
    of, ours, at = model.layer(number).experts, f"layer.{number}/", f"model.layers.{number}."
    assert of is not None  # every layer of a GPT-OSS has experts
    found = [Entry(f"{ours}sinks", ((f"{at}self_attn.sinks", model.heads),))]
    found += [Entry(f"{ours}router.{each}", ((f"{at}mlp.router.{each}", of.count),)) for each in ("weight", "bias")]
    for name, theirs, rows in (("up", "gate_up_proj", 2 * of.hidden), ("down", "down_proj", model.hidden)):
        for each, end in (("weight", ""), ("bias", "_bias")):
            part = (f"{at}mlp.experts.{theirs}{end}", of.count * rows)
            found.append(Entry(f"{ours}experts_{name}.{each}", (part,), experts=of.count, in_turn=name == "up"))
    return found


def _experts(experts: Experts, hidden: int, *, mixtral: bool) -> dict[str, list[tuple[str, int]]]:
    """Return the parts of the router's and the experts' matrices, expert by expert."""
    at, gate, up, down = (
        ("block_sparse_moe", "w1", "w3", "w2") if mixtral else ("mlp", "gate_proj", "up_proj", "down_proj")
    )
    each = [f"{at}.experts.{number}" for number in range(experts.count)]
    wide = [(f"{expert}.{half}", experts.hidden) for expert in each for half in (gate, up)]
    beside = f"{at}.shared_expert" if experts.shared_gate else f"{at}.shared_experts"
    shared = {
        "shared_up": [(f"{beside}.gate_proj", experts.shared), (f"{beside}.up_proj", experts.shared)],
        "shared_down": [(f"{beside}.down_proj", hidden)],
    }
    if experts.shared_gate:
        shared["shared_gate"] = [(f"{at}.shared_expert_gate", 1)]
    return (shared if experts.shared else {}) | {
        "router": [(f"{at}.gate", experts.count)],
        "experts_up": wide,
        "experts_down": [(f"{expert}.{down}", hidden) for expert in each],
    }


def _classifier(model: Model) -> list[Entry]:
    return [] if model.tied_embeddings else [Entry("head/classifier.weight", (("lm_head.weight", model.vocab),))]


def published(model: Model, positions: int, source: dict[str, Any], dtype: torch.dtype) -> dict[str, Any]:
    """Return the ``config.json`` of trained weights: that of the weights that training began from, with every field.

    Three things are no longer as they were: the positions, where training used more; the dtype; and a quantization,
    which these weights do not have. Positions stay where more of them would describe another model.
    """
    kept = {key: value for key, value in source.items() if key != "quantization_config"}
    longer = kept | {"max_position_embeddings": max(source.get("max_position_embeddings") or 0, positions)}
    if not model.learned_positions and _is_alike(model, longer):
        kept = longer
    return kept | {key: str(dtype).removeprefix("torch.") for key in ("dtype", "torch_dtype") if key in source}


def _is_alike(model: Model, fields: dict[str, Any]) -> bool:
    """Return whether a config has the model's rotary frequencies.

    Some scalings begin at ``max_position_embeddings`` (dynamic), or stretch to it (yarn and longrope without a factor).
    """
    try:
        theirs = model_from_config(fields, where="config.json", name=model.name)
    except BadInput:
        return False
    return theirs.rope_scaling == model.rope_scaling


def read(directory: Path, model: Model, wanted: list[str]) -> Iterator[tuple[str, Tensor]]:
    """Yield (our name, tensor in our form) for every name in ``wanted``.

    Checks names and shapes of all tensors before the first one is read.

    Raises:
        BadInput: when the directory is of another model, or a tensor is missing, unknown or of another shape.
    """
    chosen = {entry.ours: entry for entry in entries(model, _check_config(directory, model))}
    stored = _find(directory, list(chosen.values()), model)
    for name in wanted:
        parts = [chosen[name].read(_tensor(*stored[part])) for part, _ in chosen[name].parts]
        yield name, parts[0] if len(parts) == 1 else torch.cat(parts)


def fields_of(directory: Path) -> dict[str, Any]:
    """Return the fields of a directory's ``config.json``.

    Raises:
        BadInput: when it cannot be read.
    """
    path = directory / "config.json"
    return codec.decode_object(codec.read_raw(path), where=str(path))


def _check_config(directory: Path, model: Model) -> str:
    """Return the model type of a directory's ``config.json``, after comparing it with ``model``."""
    path, fields = directory / "config.json", fields_of(directory)
    theirs, model = (_unrated(each) for each in (model_from_config(fields, where=str(path), name=model.name), model))
    unlike = {"name", "source"} | (set() if model.learned_positions else {"max_positions"})
    for field in msgspec.structs.fields(Model):
        got, want = getattr(theirs, field.name), getattr(model, field.name)
        if field.name not in unlike and got != want:
            raise BadInput("the weights are of another model", where=f"{path}: {field.name}", got=got, wanted=want)
    return str(fields["model_type"])


def _unrated(model: Model) -> Model:
    """Return the model with selection biases that stay as they are: no config.json says how they move."""
    if model.mixture is None:
        return model
    shapes = [model.layer(number) for number in range(model.layers)]
    replace = msgspec.structs.replace
    return model.of_layers(
        [replace(s, experts=replace(s.experts, selection_rate=0.0)) if s.experts else s for s in shapes]
    )


Stored = tuple[Path, str]
"""A file and the name of a tensor in it."""


def _find(directory: Path, chosen: list[Entry], model: Model) -> dict[str, Stored]:
    """Return the file and name of each stored part, after checking names and shapes."""
    shapes = _shapes_in(directory)
    files, shape_of = {name: (file, name) for file, name in shapes}, _shapes_of(model)
    found: dict[str, Stored] = {}
    for entry in chosen:
        own = shape_of[entry.ours]
        for part, rows in entry.parts:
            stored = files.get(part) or files.get(part.removeprefix("transformer."))  # GPT-2 files may lack the prefix
            if stored is None:
                hint = did_you_mean(part, files)
                raise BadInput("a tensor is missing from the weights", where=str(directory), wanted=part, hint=hint)
            got, wanted = shapes[stored], entry.stored_shape(own, rows)
            if got != wanted:
                raise BadInput("a tensor has another shape", where=f"{directory}: {part}", got=got, wanted=wanted)
            found[part] = stored
    known = {name for _, name in found.values()} | ({"lm_head.weight"} if model.tied_embeddings else set())
    for name in files:
        if name not in known and not name.endswith(IGNORED_ENDINGS):
            raise BadInput("the weights have a tensor that is not in the model", where=str(directory), got=name)
    return found


def _shapes_in(directory: Path) -> dict[Stored, tuple[int, ...]]:
    """Return the shape of every stored tensor."""
    files = sorted(directory.glob("*.safetensors"))
    if not files:
        raise BadInput(
            "the directory has no safetensors file", where=str(directory), wanted="model.safetensors, or several files"
        )
    found: dict[Stored, tuple[int, ...]] = {}
    for file in files:
        check_regular(file)
        try:
            with safe_open(file, framework="pt") as opened:
                for name in opened.keys():  # noqa: SIM118 - the opened file is not a mapping
                    found[file, name] = tuple(opened.get_slice(name).get_shape())
        except (OSError, SafetensorError) as error:
            raise BadInput("cannot read weights", where=str(file), got=str(error)) from None
    return found


def _shapes_of(model: Model) -> dict[str, tuple[int, ...]]:
    """Return the shape of each of our tensors, by its name."""
    kinds = [layer_block(model, 1, shape) for shape in model.layer_shapes]
    blocks = {"embed": embed_block(model, 1), "head": head_block(model, 1)}
    blocks |= {f"layer.{number}": kinds[kind] for number, kind in enumerate(model.layer_kinds)}
    return {f"{name}/{p.name}": p.shape for name, block in blocks.items() for p in block.parameters}


def _tensor(file: Path, name: str) -> Tensor:
    try:
        with safe_open(file, framework="pt") as opened:
            found: Tensor = opened.get_tensor(name)
            return found
    except (OSError, SafetensorError) as error:
        raise BadInput("cannot read weights", where=f"{file}: {name}", got=str(error)) from None


def write(
    directory: Path,
    model: Model,
    tensors: dict[str, Tensor],
    *,
    positions: int,
    source: dict[str, Any] | None = None,
) -> None:
    """Write ``tensors``, which are ours by name, as a Hugging Face directory.

    ``positions`` are those of training; its config.json has at least as many. ``source`` is the config.json of the
    weights that training began from: all its fields are kept.

    Raises:
        UsageError: when no model type has this shape, or the directory cannot be written.
    """
    chosen = entries(model, source["model_type"] if source is not None else "")
    shards = _shards(chosen, tensors)
    try:
        directory.mkdir(parents=True, exist_ok=True)
        where: dict[str, str] = {}
        for i, shard in enumerate(shards):
            name = "model.safetensors" if len(shards) == 1 else f"model-{i + 1:05d}-of-{len(shards):05d}.safetensors"
            parts = {part: value for entry in shard for part, value in _stored(entry, tensors[entry.ours])}
            fresh = directory / f".{name}"
            fresh.touch()
            mode = fresh.stat().st_mode  # safetensors makes a file that only its owner may read
            save_file(parts, fresh, metadata={"format": "pt"})
            fresh.chmod(mode)
            os.replace(fresh, directory / name)
            where |= dict.fromkeys(parts, name)
        if len(shards) > 1:
            total = sum(t.nbytes for t in tensors.values())
            write_json(
                directory / "model.safetensors.index.json", {"metadata": {"total_size": total}, "weight_map": where}
            )
        dtype = next(iter(tensors.values())).dtype
        fields = config_of(model, positions) if source is None else published(model, positions, source, dtype)
        write_json(directory / "config.json", fields)
    except OSError as error:
        raise UsageError("cannot write the weights", where=str(directory), got=str(error)) from None


def _shards(chosen: list[Entry], tensors: dict[str, Tensor]) -> list[list[Entry]]:
    shards: list[list[Entry]] = [[]]
    size = 0
    for entry in chosen:
        if shards[-1] and size + tensors[entry.ours].nbytes > SHARD_BYTES:
            shards.append([])
            size = 0
        shards[-1].append(entry)
        size += tensors[entry.ours].nbytes
    return shards


def _stored(entry: Entry, value: Tensor) -> Iterator[tuple[str, Tensor]]:
    first = 0
    for name, rows in entry.parts:
        yield name, entry.stored(value[first : first + rows].detach()).cpu().contiguous().clone()
        first += rows


def write_json(path: Path, document: dict[str, Any]) -> None:
    """Write a document in place of a file, or where there is none."""
    fresh = path.with_name(f".{path.name}")
    fresh.write_text(json.dumps(document, indent=2, sort_keys=True) + "\n")
    os.replace(fresh, path)
