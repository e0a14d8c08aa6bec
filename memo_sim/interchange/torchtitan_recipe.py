"""Writes a job as a Python recipe of torchtitan 0.3.0."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence

from memo_sim.contract.attention_kernels import AttentionName
from memo_sim.contract.catalog import load_model
from memo_sim.contract.knobs import Pins
from memo_sim.contract.model import Model
from memo_sim.interchange.job import Job
from memo_sim.interchange.model_names import same_shape
from memo_sim.interchange.torchtitan_words import SCHEDULES, chunk_of_loss

NAME = "memo_plan"
"""Name of the recipe's module, and of its function."""
RECIPE = f"{NAME}.py"

FLAVORS = {
    ("llama3", "8B"): "llama3-8b",
    ("llama3", "70B"): "llama3-70b",
    ("llama3", "405B"): "llama3-405b",
    ("qwen3", "0.6B"): "qwen3-0.6b",
    ("qwen3", "8B"): "qwen3-8b",
    ("qwen3", "32B"): "qwen3-32b",
}
"""Module and flavor of torchtitan's models that are presets of memo."""
VARLEN: dict[AttentionName, str] = {"flash3": "FA3", "flash4": "FA4"}
"""What varlen attention takes on Hopper and on Blackwell (``tools/utils.py``), as torchtitan calls it."""
_LONGEST = 131_072
"""Tokens up to which its models have positions, unless a recipe says more."""
_SEED = 1

_SOME_LAYERS = '''
class SomeLayersAC(FullAC):
    """Full recompute of some layers of a stage: every N-th one, or the first ones of each model part."""

    @dataclass(kw_only=True, slots=True)
    class Config(FullAC.Config):
        every: int = 0
        first: int = 0

    def apply(self, model):
        self._wrapped = 0
        super().apply(model)

    def _wrap_block(self, module, *, base_fqn=None):
        self._wrapped += 1
        config = self.config
        chosen = self._wrapped % config.every == 0 if config.every else self._wrapped <= config.first
        return FullAC._wrap_block(self, module, base_fqn=base_fqn) if chosen else module

'''
_SHAPE = '''
def model_of(*, layers, hidden, heads, kv_heads, head_dim, ffn_hidden, vocab, tied_embeddings, norm_eps, rope_theta,
             qk_norm, tokens, attn_backend):
    """Return a model of torchtitan with another shape than its flavors."""
    assert head_dim * heads == hidden or qk_norm, "torchtitan's Llama has heads of hidden / heads"
    module = qwen3 if qk_norm else llama3
    spec = module.model_registry("debugmodel", attn_backend=attn_backend)
    rope = dataclasses.replace(spec.model.layers[0].attention.rope, dim=head_dim, max_seq_len=tokens, theta=rope_theta)
    shape = dict(n_layers=layers, dim=hidden, n_heads=heads, n_kv_heads=kv_heads, hidden_dim=ffn_hidden, rope=rope,
                 fuse_qkv=True, attn_backend=attn_backend)
    if qk_norm:
        blocks = qwen3._build_qwen3_layers(head_dim=head_dim, **shape)
    else:
        blocks = llama3._build_llama3_layers(**shape)
    init = spec.model.tok_embeddings.param_init
    spec.model = dataclasses.replace(
        spec.model, dim=hidden, vocab_size=vocab, enable_weight_tying=tied_embeddings, layers=blocks,
        norm=dataclasses.replace(spec.model.norm, normalized_shape=hidden, eps=norm_eps),
        tok_embeddings=dataclasses.replace(
            spec.model.tok_embeddings, num_embeddings=vocab, embedding_dim=hidden,
            param_init={"weight": skip_param_init} if tied_embeddings else init),
        lm_head=dataclasses.replace(spec.model.lm_head, in_features=hidden, out_features=vocab),
    )
    return spec

'''


def takes_varlen(pins: Pins) -> bool:
    """Return whether a job may have varlen attention: neither context parallelism nor CUDA graphs go with it."""
    return (pins.cp or 1) == 1 and not pins.cuda_graphs


def model_of_flavor(module: str, flavor: str) -> Model | None:
    """Return the preset that a flavor of torchtitan is; None for others."""
    preset = FLAVORS.get((module, flavor))
    return load_model(preset) if preset else None


def recipe(job: Job, stage_layers: Sequence[int], header: Sequence[str]) -> str:
    """Return the text of the recipe; ``stage_layers`` are the layers of each model part, in the model's order."""
    model, pins = job.model, job.pins
    flavor = next((key for key, preset in FLAVORS.items() if same_shape(load_model(preset), model)), None)
    local = job.micro_batch * job.seq_tokens // (pins.cp or 1)
    chunks, _ = chunk_of_loss(local, pins.loss_chunk_tokens or 0)
    choice = pins.recompute_layers or "all"
    lines = [
        *(f"# {line}" for line in header),
        f"# Start: bash train.sh, or torchrun ... -m torchtitan.train --module {NAME} --config {NAME}",
    ]
    lines += ["", *_imports(flavor, chunks, choice, job), ""]
    body = "\n".join(lines)
    if choice != "all":
        body += _SOME_LAYERS
    if flavor is None:
        body += _SHAPE
    backend = "varlen" if takes_varlen(pins) else "flex"
    return body + "\n" + "\n".join(_function(job, flavor, stage_layers, chunks, backend)) + "\n"


def _imports(flavor: tuple[str, str] | None, chunks: int, choice: str, job: Job) -> list[str]:
    recompute, tokens, flash = job.pins.recompute, job.seq_tokens, VARLEN.get(job.pins.attention or "plain")
    losses = "ChunkedLossWrapper, CrossEntropyLoss" if chunks > 1 else "CrossEntropyLoss"
    policy = {"full": "FullAC", "operators": "SelectiveAC"}.get(recompute or "")
    some = choice != "all"
    lines = (
        [
            "import dataclasses",
            "",
        ]
        if flavor is None or tokens > _LONGEST
        else []
    )
    if some:
        lines = [*lines[:1], "from dataclasses import dataclass", ""]
    lines += [f"from torchtitan.components.loss import {losses}"]
    lines.append("from torchtitan.components.optimizer import default_adamw")
    lines.append("from torchtitan.config import CompileConfig, DebugConfig, ParallelismConfig, TrainingConfig")
    if policy:
        lines.append(f"from torchtitan.distributed.activation_checkpoint import {policy}")
    lines.append("from torchtitan.hf_datasets.text_datasets import HuggingFaceTextDataLoader")
    if flavor is None:
        lines.append("from torchtitan.models import llama3, qwen3")
        lines.append("from torchtitan.models.common.param_init import skip_param_init")
    lines.append("from torchtitan.models.common.config_utils import decoder_vocab_size")
    if flavor is not None:
        lines.append(f"from torchtitan.models.{flavor[0]} import model_registry")
    if flash:
        lines.append("from torchtitan.tools.utils import get_cuda_flash_attention_impl")
    lines.append("from torchtitan.trainer import Trainer")
    return lines


def _function(
    job: Job, flavor: tuple[str, str] | None, stage_layers: Sequence[int], chunks: int, backend: str
) -> list[str]:
    lines = [f"def {NAME}() -> Trainer.Config:", '    """Return the plan as a configuration."""']
    if flash := VARLEN.get(job.pins.attention or "plain"):
        lines.append(
            f'    assert get_cuda_flash_attention_impl() == "{flash}", "the plan is for another generation of GPU"'
        )
    if flavor is not None:
        lines.append(f'    model_spec = model_registry("{flavor[1]}", attn_backend="{backend}")')
        if job.seq_tokens > _LONGEST:
            lines += [
                "    for layer in model_spec.model.layers:  # its positions end earlier",
                "        layer.attention.rope = dataclasses.replace(",
                f"            layer.attention.rope, max_seq_len={job.seq_tokens}",
                "        )",
            ]
    else:
        lines += _shape_call(job.model, job.seq_tokens, backend)
    loss = "CrossEntropyLoss.Config(global_vocab_size=decoder_vocab_size(model_spec))"
    if chunks > 1:
        loss = f"ChunkedLossWrapper.Config(num_chunks={chunks}, loss_fn={loss})"
    implementation = "fused_opt_states_bf16" if job.states == "bf16" else job.pins.adamw or "fused"
    return [
        *lines,
        "    optimizer = default_adamw(lr=3e-4)",
        f'    optimizer.implementation = "{implementation}"',
        "    return Trainer.Config(",
        "        model_spec=model_spec,",
        f"        loss={loss},",
        "        optimizer=optimizer,",
        *_training(job),
        *_parallelism(job, stage_layers),
        f"        activation_checkpoint={_checkpoint(job)},",
        f"        compile={_compile(job)},",
        f"        debug=DebugConfig(seed={_SEED}, deterministic={job.deterministic}),",
        '        dataloader=HuggingFaceTextDataLoader.Config(dataset="c4"),',
        "    )",
    ]


def _shape_call(model: Model, tokens: int, backend: str) -> list[str]:
    fields = {
        "layers": model.layers,
        "hidden": model.hidden,
        "heads": model.heads,
        "kv_heads": model.kv_heads,
        "head_dim": model.head_dim,
        "ffn_hidden": model.ffn_hidden,
        "vocab": model.vocab,
        "tied_embeddings": model.tied_embeddings,
        "norm_eps": model.norm_eps,
        "rope_theta": model.rope_theta,
        "qk_norm": model.qk_norm,
        "tokens": tokens,
        "attn_backend": json.dumps(backend),
    }
    return ["    model_spec = model_of(", *(f"        {name}={value}," for name, value in fields.items()), "    )"]


def _training(job: Job) -> list[str]:
    pins, dp = job.pins, job.pins.dp or 1
    local = job.global_batch // dp if (pins.pp or 1) > 1 else job.micro_batch
    fields = {
        "local_batch_size": local,
        "global_batch_size": job.global_batch,
        "seq_len": job.seq_tokens,
        "dtype": "bfloat16" if job.states == "pure-bf16" else "float32",
        "mixed_precision_param": "float32" if pins.dtype == "fp32" else "bfloat16",
        "enable_cpu_offload": job.states == "host",
        "disable_cuda_graphs": not pins.cuda_graphs,
        "steps": 1000,
    }
    return _call("training", "TrainingConfig", fields)


def _parallelism(job: Job, stage_layers: Sequence[int]) -> list[str]:
    pins = job.pins
    cp, dp = pins.cp or 1, pins.dp or 1
    shards = (pins.zero_ranks or cp * dp) if pins.zero else 1
    shard = max(shards // cp, 1)
    fields: dict[str, object] = {
        "data_parallel_replicate_degree": dp // shard,
        "data_parallel_shard_degree": shard,
        "fsdp_reshard_after_forward": "always" if pins.zero == 3 else "never",
        "tensor_parallel_degree": pins.tp or 1,
        "enable_sequence_parallel": bool(pins.sequence_parallel) or (pins.tp or 1) == 1,
        "context_parallel_degree": cp,
        "context_parallel_load_balancer": "headtail",
        "pipeline_parallel_degree": pins.pp or 1,
    }
    if (pins.pp or 1) > 1:
        names = {schedule: name for name, schedule in SCHEDULES.items()}
        fields |= {
            "pipeline_parallel_schedule": names[pins.schedule or "1f1b"],
            "pipeline_parallel_microbatch_size": job.micro_batch,
            "module_fqns_per_model_part": _parts(stage_layers),
        }
    return _call("parallelism", "ParallelismConfig", fields)


def _parts(stage_layers: Sequence[int]) -> list[list[str]]:
    parts, first = list[list[str]](), 0
    for count in stage_layers:
        parts.append([f"layers.{layer}" for layer in range(first, first + count)])
        first += count
    parts[0].insert(0, "tok_embeddings")
    parts[-1] += ["norm", "lm_head"]
    return parts


def _checkpoint(job: Job) -> str:
    choice, recompute = job.pins.recompute_layers or "all", job.pins.recompute
    if recompute == "full" and choice != "all":
        word, _, number = choice.partition("-")
        return f"SomeLayersAC.Config({word}={number})"
    return {"full": "FullAC.Config()", "operators": "SelectiveAC.Config()"}.get(recompute or "", "None")


def _compile(job: Job) -> str:
    if job.pins.rowwise != "compiled":
        return "CompileConfig(enable=False)"
    return f"CompileConfig(enable=True, enable_async_tensor_parallel={job.pins.tp_overlap == 'chunked'})"


def _call(name: str, made_by: str, fields: Mapping[str, object]) -> list[str]:
    values = {key: repr(v) if isinstance(v, bool | int | float) else json.dumps(v) for key, v in fields.items()}
    return [
        f"        {name}={made_by}(",
        *(f"            {key}={value}," for key, value in values.items()),
        "        ),",
    ]
