"""Megatron-Bridge: a recipe in Python with the script that starts it; read are recipes, YAML and lists of overrides.

A recipe is a function that assigns to the parts of a ``ConfigContainer``: ``cfg.model.tensor_model_parallel_size = 4``.
Overrides have the same names without ``cfg``. Recipes are read as text; no Python of theirs is run.
"""

from __future__ import annotations

import ast
import re
import warnings
from collections.abc import Iterator, Mapping
from pathlib import PurePath
from typing import Any

from msgspec import structs

from memo_sim.contract.catalog import load_model
from memo_sim.contract.errors import BadInput, UsageError
from memo_sim.contract.model import Model
from memo_sim.contract.plan import Decisions
from memo_sim.interchange.framework import FALLBACK, Framework, Read, Saying, Source
from memo_sim.interchange.job import Job
from memo_sim.interchange.launch import Launch
from memo_sim.interchange.megatron_command import Found, commands_of, devices_of, whole_or_zero
from memo_sim.interchange.megatron_configuration import Configuration
from memo_sim.interchange.megatron_layers import OF_THE_CLASS, PATTERNS, pattern_text
from memo_sim.interchange.megatron_reading import read_job
from memo_sim.interchange.megatron_words import LAYOUTS, SAYINGS, Settings, nearest_jobs, settings_of, unknown
from memo_sim.interchange.shell_script import read_script
from memo_sim.interchange.yaml_file import read_yaml

NAME, TITLE = "megatron-bridge", "Megatron-Bridge"
VERSION = "Megatron-Bridge (NVIDIA-NeMo/Megatron-Bridge@067f987, 2026-08-22)"

SECTIONS: dict[str, tuple[str, ...]] = {
    "train": ("micro_batch_size", "global_batch_size"),
    "dataset": ("seq_length",),
    "ddp": (
        "use_distributed_optimizer",
        "use_megatron_fsdp",
        "data_parallel_sharding_strategy",
        "num_distributed_optimizer_instances",
        "overlap_grad_reduce",
        "overlap_param_gather",
    ),
    "optimizer": (
        "use_precision_aware_optimizer",
        "exp_avg_dtype",
        "exp_avg_sq_dtype",
        "optimizer_cpu_offload",
        "optimizer_offload_fraction",
    ),
    "checkpoint": ("ckpt_format",),
    "rerun_state_machine": ("check_for_nan_in_loss",),
}
"""Parts of the configuration by their fields; every other field is the model's."""

DEFAULTS: Settings = {
    "micro_batch_size": 2,
    "global_batch_size": 32,
    "use_distributed_optimizer": True,
    "overlap_grad_reduce": True,
    "overlap_param_gather": True,
    "cross_entropy_loss_fusion": True,
    "bf16": True,
}
"""What ``recipes/common.py`` and the model's provider start from, where they differ from Megatron-LM."""

MODELS: dict[str, str] = {
    "meta-llama/Meta-Llama-3-8B": "llama3-8b",
    "meta-llama/Meta-Llama-3-70B": "llama3-70b",
    "meta-llama/Meta-Llama-3.1-405B": "llama3-405b",
    "Qwen/Qwen3-0.6B": "qwen3-0.6b",
    "Qwen/Qwen3-8B": "qwen3-8b",
    "Qwen/Qwen3-32B": "qwen3-32b",
}
"""Models by their names on the hub, as presets of memo."""

_EXPRESSIONS = {
    "exp_avg_dtype": {"bf16": "torch.bfloat16"},
    "exp_avg_sq_dtype": {"bf16": "torch.bfloat16"},
    "attention_backend": {name: f"AttnBackend.{name}" for name in ("flash", "fused", "unfused")},
}
"""Values that are no literals of Python."""

_RECIPE = '''\
{header}

{first}{torch}import torch.nn.functional as F
from megatron.core.transformer.enums import AttnBackend

from megatron.bridge.models.{module} import {provider}
from megatron.bridge.recipes.common import _pretrain_common
from megatron.bridge.training.config import ConfigContainer
from megatron.bridge.training.gpt_step import forward_step
from megatron.bridge.training.pretrain import pretrain
{imports}

def recipe() -> ConfigContainer:
    """Return the configuration of the plan. Data, schedule and checkpoints are the common recipe's: mock data."""
    cfg = _pretrain_common()
    cfg.model = {provider}(
{model}
    )
{assignments}
    cfg.tokenizer.tokenizer_type = "NullTokenizer"
    cfg.tokenizer.vocab_size = {vocab}
    return cfg


if __name__ == "__main__":
    pretrain(config=recipe(), forward_step_func=forward_step)
'''
_OWN_SPELLING = {
    *("max_position_embeddings", "gated_linear_unit", "openai_gelu", "quick_geglu", "bf16", "fp16", "tp_comm_overlap")
}
"""Names that are written by other means than a field of that name and value."""
_YARN = {name: f"yarn_{name}" for name in ("rotary_scaling_factor", "mscale", "mscale_all_dim")}
"""Fields of YaRN outside of latent attention by the options of the command line."""
_IMPORTS = {
    "get_gpt_decoder_block_spec": "from megatron.core.models.gpt.gpt_layer_specs import get_gpt_decoder_block_spec",
    "quick_gelu": "from megatron.core.fusions.fused_bias_geglu import quick_gelu",
}
"""What a recipe imports for texts in the model's fields."""


def _jobs(decisions: Decisions) -> tuple[Job, ...]:
    """Return Megatron's nearest jobs; a learned position table has a row for each token of the sequence.

    Raises:
        UsageError: when the plan has products in FP8, or is of a model that Megatron's GPT does not train.
    """
    model = decisions.model
    if model.learned_positions:
        decisions = structs.replace(decisions, model=structs.replace(model, max_positions=decisions.seq_tokens))
    if decisions.fp8 != "none":
        raise UsageError(
            "memo writes no mixed-precision recipe of Megatron-Bridge for FP8",
            where="decisions.fp8",
            got=decisions.fp8,
            wanted="none",
            hint="memo-sim export PLAN --to megatron-lm, or make the plan without --fp8",
        )
    return nearest_jobs(decisions)


def _files(job: Job, launch: Launch, header: tuple[str, ...]) -> dict[str, str]:
    said = {**_explicit(job), **settings_of(job)}
    places = {name: part for part, names in SECTIONS.items() for name in names}
    fields = {name: value for name, value in said.items() if name not in places and name not in _OWN_SPELLING}
    fields |= {"seq_length": said["seq_length"], "should_pad_vocab": False}
    latent, yarn = job.model.latent is not None, said["position_embedding_type"] == "yarn"
    model = [f"{_YARN.get(name, name) if yarn else name}={_python(name, value)}" for name, value in fields.items()]
    model += _activation(job.model)
    imports = ["from megatron.bridge.training.comm_overlap import CommOverlapConfig"] * ("tp_comm_overlap" in said)
    if "moe_layer_freq" in said:
        model.append("transformer_layer_spec=partial(get_gpt_decoder_block_spec, use_transformer_engine=True)")
    needed = {text: line for text, line in _IMPORTS.items() if any(text in field for field in model)}
    imports += needed.values()
    first = "from functools import partial\n\n" if "moe_layer_freq" in said else ""
    assigned = [f"cfg.{places[n]}.{n} = {_python(n, v)}" for n, v in said.items() if n in places]
    assigned += _others(job, said)
    recipe = _RECIPE.format(
        first=first,
        torch="import torch\n" if any("torch." in line for line in (*model, *assigned)) else "",
        header="\n".join(f"# {line}" for line in header) or "# A recipe of a plan.",
        module="mla_provider" if latent else "gpt_provider",
        provider="MLAModelProvider" if latent else "GPTModelProvider",
        imports="".join(f"{line}\n" for line in imports),
        model="\n".join(f"        {line}," for line in model),
        assignments="\n".join(f"    {line}" for line in assigned),
        vocab=job.model.vocab,
    )
    environment = {} if (job.pins.zero or 0) >= 2 else {"CUDA_DEVICE_MAX_CONNECTIONS": "1"}
    command = ('"${RECIPE}"', '"$@"')
    before = "RECIPE=${RECIPE:-recipe.py}"
    return {
        "recipe.py": recipe,
        "train.sh": launch.script(command, header=header, environment=environment, before=before),
    }


def _explicit(job: Job) -> Settings:
    """Return what Bridge has on unless it is turned off."""
    names = ("use_distributed_optimizer", "overlap_grad_reduce", "overlap_param_gather", "bias_activation_fusion")
    off = dict.fromkeys(names, False)
    return {**off, "cross_entropy_loss_fusion": False, "num_query_groups": job.model.kv_heads}


def _activation(model: Model) -> list[str]:
    if model.mixture is not None and model.mixture.activation == "clamped":
        return ["gated_linear_unit=True", "activation_func=quick_gelu"]
    if model.gated:
        return ["gated_linear_unit=True", "activation_func=F.silu"]
    tanh = model.activation == "gelu_tanh"
    return ['activation_func=lambda x: F.gelu(x, approximate="tanh")' if tanh else "activation_func=F.gelu"]


def _others(job: Job, said: Settings) -> list[str]:
    """Return the assignments that have no field of the same name."""
    lines = [f'cfg.mixed_precision = "{job.pins.dtype}_mixed"' if job.pins.dtype in ("bf16", "fp16") else ""]
    if job.pins.dtype not in ("bf16", "fp16"):
        lines = ["cfg.mixed_precision = None"]
    if (job.pins.pp or 1) > 1:
        lines.append(f"cfg.model.pipeline_dtype = torch.{'float16' if job.pins.dtype == 'fp16' else 'bfloat16'}")
    if said.get("use_megatron_fsdp"):
        lines.append("cfg.dist.use_megatron_fsdp = True")
    if said.get("tp_comm_overlap"):
        lines.append("cfg.comm_overlap = CommOverlapConfig(tp_comm_overlap=True)")
    if said.get("cuda_graph_impl"):
        lines.append("cfg.rng.te_rng_tracker = True")
    return lines


def _python(name: str, value: Any) -> str:
    """Return a value as Python has it."""
    if name in PATTERNS:
        return pattern_text(value)
    return _EXPRESSIONS.get(name, {}).get(value, repr(value)) if isinstance(value, str) else repr(value)


# -- reading -----------------------------------------------------------------------------------------------------------

_KNOWN = re.compile(r"megatron\.bridge|run_recipe|\bcfg\.model\.|\b(model|train|dataset)\.\w+=")


def _reads(source: Source) -> bool:
    if source.name.endswith((".yaml", ".yml")):
        return re.search(r"^model:", source.text, re.M) is not None and "dataset:" in source.text
    return _KNOWN.search(source.text) is not None


def _read(sources: tuple[Source, ...], given: Mapping[str, str]) -> Read:
    """Return the job of recipes and overrides; scripts are read first, because they name the recipe."""
    scripts = [s for s in sources if not s.name.endswith((".py", ".yaml", ".yml"))]
    over, recipe = Found(), given.get("recipe", "")
    for source in scripts:
        recipe = _from_script(source, given, over) or recipe
    found = Found()
    for source in sources:
        if source.name.endswith(".py"):
            _from_recipe(source, given, recipe, found)
        elif source.name.endswith((".yaml", ".yml")):
            _put_all(found, _paths(read_yaml(source)))
    found.values |= over.values
    found.spelled |= over.spelled
    found.devices = over.devices or found.devices
    for name, value in given.items():
        if name.partition(".")[0] in (*SECTIONS, "model", "comm_overlap") and "." in name:
            _put_all(found, [(name, value)])
    found.devices = whole_or_zero(given.get("devices", "")) or found.devices
    return _job(found, sources, given, over.notes + found.notes)


def _job(found: Found, sources: tuple[Source, ...], given: Mapping[str, str], notes: list[str]) -> Read:
    where = ", ".join(source.name for source in sources)
    unsaid = {name: value for name, value in DEFAULTS.items() if name not in found.values}
    config = Configuration({**unsaid, **found.values}, found.spelled, where)
    config.assumed += notes
    hub = given.get("model") or found.values.get("hf_model", "")
    if hub:
        config.taken.add("hf_model")
        if hub not in MODELS and "model" not in given:
            raise BadInput(
                "a model of the hub that memo does not know",
                where=where,
                got=hub,
                wanted=", ".join(MODELS),
                hint="give its config.json, or a preset: --set model=FILE",
            )
        config.model = load_model(MODELS.get(hub, hub))
    fallback = whole_or_zero(given.get(FALLBACK, ""))
    name = PurePath(sources[0].name).stem
    read = read_job(
        config, framework=NAME, name=name, defaults=OF_THE_CLASS, devices=found.devices, fallback_devices=fallback
    )
    told = tuple(option for option in read.read if option.key not in unsaid)
    left = tuple(option for option in read.ignored if option.key not in unsaid)
    assumed = read.assumed
    if unsaid:
        assumed += (f"as the common recipe has it: {', '.join(f'{name} {value}' for name, value in unsaid.items())}",)
    return Read(framework=read.framework, job=read.job, devices=read.devices, read=told, ignored=left, assumed=assumed)


_RECIPES: dict[str, dict[str, Any]] = {
    "delayed_scaling": {"fp8_recipe": "delayed", "fp8_param_gather": True},
    "current_scaling": {"fp8_recipe": "tensorwise", "fp8_param_gather": True},
    "subchannel_scaling": {"fp8_recipe": "blockwise", "fp8_param_gather": False},
    "mxfp8": {"fp8_recipe": "mxfp8", "fp8_param_gather": True},
}
"""What Bridge's named recipes of FP8 mean (``training/mixed_precision.py``), by a part of their names."""


def _put_all(found: Found, paths: list[tuple[str, Any]]) -> None:
    """Store values by their paths: ``model.seq_length``; those of other parts than memo reads keep their whole path."""
    for path, value in paths:
        part, _, name = path.rpartition(".")
        if part == "comm_overlap" and name != "tp_comm_overlap" and value is None:
            continue
        read = part in ("model", "comm_overlap", *SECTIONS) or path == "mixed_precision"
        if name == "vocab_size" and part == "tokenizer":
            read = False
        if path == "mixed_precision":
            text = str(value)
            dtype = "fp16" if text.startswith("fp16") else "bf16"
            found.values |= {"bf16": False, dtype: dtype in text}
            found.spelled[dtype] = path
            if "fp8" in text or "fp4" in text:
                found.values["fp8"], found.spelled["fp8"] = text, path
                of_recipe = next((said for name, said in _RECIPES.items() if name in text), {})
                found.values |= of_recipe
                found.spelled |= dict.fromkeys(of_recipe, path)
            continue
        key = name if read else path.replace(".", "_")
        if value is None:
            found.values.pop(key, None)
            continue
        if key == "activation_func":
            found.values |= {"openai_gelu": "tanh" in str(value), "quick_geglu": "quick_gelu" in str(value)}
            continue
        key = _PLAIN.get(key, key)
        found.values[key], found.spelled[key] = value, path


def _paths(tree: Mapping[str, Any], before: str = "") -> list[tuple[str, Any]]:
    made = list[tuple[str, Any]]()
    for key, value in tree.items():
        path = f"{before}.{key}" if before else str(key)
        made += _paths(value, path) if isinstance(value, Mapping) else [(path, value)]
    return made


_PLAIN = {theirs: ours for ours, theirs in _YARN.items()}
_SHORT = {
    "--max_steps": "train.train_iters",
    "-ms": "train.train_iters",
    "--global_batch_size": "train.global_batch_size",
    "-gb": "train.global_batch_size",
    "--micro_batch_size": "train.micro_batch_size",
    "-mb": "train.micro_batch_size",
    "--seq_length": "dataset.seq_length",
    "-sl": "dataset.seq_length",
    "--tensor_model_parallel_size": "model.tensor_model_parallel_size",
    "-tp": "model.tensor_model_parallel_size",
    "--pipeline_model_parallel_size": "model.pipeline_model_parallel_size",
    "-pp": "model.pipeline_model_parallel_size",
    "--context_parallel_size": "model.context_parallel_size",
    "-cp": "model.context_parallel_size",
    "--virtual_pipeline_model_parallel_size": "model.virtual_pipeline_model_parallel_size",
    "-vp": "model.virtual_pipeline_model_parallel_size",
}
"""Options of ``scripts/training/run_recipe.py`` that stand for overrides."""


def _from_script(source: Source, given: Mapping[str, str], found: Found) -> str:
    """Store the overrides of a script, and return the recipe that it names."""
    script = read_script(source.text, given, where=source.name)
    recipe, over = "", list[tuple[str, Any]]()
    for words in commands_of(script):
        for at, word in enumerate(words):
            following = words[at + 1] if at + 1 < len(words) else ""
            if word in ("--recipe", "--recipe_name"):
                recipe = following
            elif word in _SHORT:
                over.append((_SHORT[word], following))
            elif match := re.fullmatch(r"\+*((?:[a-z_]+\.)+[a-z_0-9]+)=(.*)", word, re.ASCII | re.DOTALL):
                value = match[2].strip("'\"")
                over.append((match[1], None if value.lower() in ("null", "none") else value))
        started = devices_of(words, script, source.text)
        found.devices = started or found.devices
    _put_all(found, over)
    found.notes += [f"left out: {text}" for text in script.left_out]
    return recipe


def _from_recipe(source: Source, given: Mapping[str, str], recipe: str, found: Found) -> None:
    """Store what the function of a recipe assigns.

    Raises:
        BadInput: when the file is no Python, or has several recipes and none is named.
    """
    try:
        with warnings.catch_warnings(action="ignore"):  # about the file's own style
            tree = ast.parse(source.text)
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
        raise BadInput("not a Python file", where=source.name, got=str(error)) from None
    functions = {f.name: f for f in tree.body if isinstance(f, ast.FunctionDef) and _is_recipe(f)}
    if not recipe and len(functions) == 1:
        recipe = next(iter(functions))
    if recipe not in functions:
        known = ", ".join(functions)
        hint = f"name one: --set recipe={next(iter(functions), 'NAME')}"
        raise BadInput(
            "no such recipe" if recipe else "several recipes",
            where=source.name,
            got=recipe or known,
            wanted=known,
            hint=hint,
        )
    names: dict[str, Any] = {}
    for statement in tree.body:
        for target, value in _assignments(statement):
            if isinstance(target, ast.Name):
                names[target.id] = _literal(value, {})
    names |= {name: value for name, value in given.items() if name.isidentifier()}
    paths = list[tuple[str, Any]]()
    for statement in functions[recipe].body:
        for target, value in _assignments(statement):
            path = ast.unparse(target).partition(".")[2] if isinstance(target, ast.Attribute) else ""
            if path:
                paths += _values(path, value, names)
    _put_all(found, paths)
    devices = re.search(r"_(\d+)gpu_", recipe)
    found.devices = int(devices[1]) if devices else found.devices


def _is_recipe(function: ast.FunctionDef) -> bool:
    return any(
        isinstance(target, ast.Attribute) and ast.unparse(target).endswith(".model")
        for statement in function.body
        for target, _ in _assignments(statement)
    )


def _assignments(statement: ast.stmt) -> Iterator[tuple[ast.expr, ast.expr]]:
    if isinstance(statement, ast.Assign):
        for target in statement.targets:
            yield target, statement.value
    elif isinstance(statement, ast.AnnAssign) and statement.value is not None:
        yield statement.target, statement.value


def _values(path: str, value: ast.expr, names: Mapping[str, Any]) -> list[tuple[str, Any]]:
    """Return what one assignment says: a field, the fields of an object, or a model of the hub."""
    if isinstance(value, ast.Call):
        hub = re.search(r"from_hf_pretrained\(\s*['\"]([^'\"]+)['\"]", ast.unparse(value))
        if hub:
            return [("model.hf_model", hub[1])]
        if value.keywords:
            latent = [(f"{path}.multi_latent_attention", True)] * ast.unparse(value.func).startswith("MLA")
            return latent + [(f"{path}.{k.arg}", _literal(k.value, names)) for k in value.keywords if k.arg]
        return [(path, ast.unparse(value.func))]
    return [(path, _literal(value, names))]


def _literal(value: ast.expr, names: Mapping[str, Any]) -> Any:
    """Return a literal, a name's value, or the text of any other expression (``torch.bfloat16``)."""
    if isinstance(value, ast.Name) and value.id in names:
        return names[value.id]
    try:
        return ast.literal_eval(value)
    except (ValueError, TypeError, RecursionError, MemoryError):
        return ast.unparse(value)


def _sayings() -> dict[str, Saying]:
    """Return Megatron's table with the paths of the configuration."""
    places = {name: part for part, names in SECTIONS.items() for name in names}
    own = {"bf16": "mixed_precision", "fp16": "mixed_precision", "tp_comm_overlap": "comm_overlap.tp_comm_overlap"}

    def path(name: str) -> str:
        return own.get(name, f"{places.get(name, 'model')}.{name}")

    table = {at: Saying(said.how, tuple(map(path, said.keys)), said.lost) for at, said in SAYINGS.items()}
    rows = Saying("near", ("model.position_embedding_type",), "a learned table has a row for each token")
    shape = Saying("exact", ("model.gated_linear_unit", "model.activation_func"))
    return {**table, "model.max_positions": rows, "model.activation": shape}


FRAMEWORK = Framework(
    name=NAME,
    title=TITLE,
    version=VERSION,
    system="megatron-core",
    layouts=LAYOUTS,
    unknown=unknown,
    sayings=_sayings(),
    jobs=_jobs,
    files=_files,
    reads=_reads,
    read=_read,
)
