"""Reads what starts Megatron-LM, a shell script or arguments in YAML, as values by Megatron's names."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from memo_sim.contract.errors import BadInput
from memo_sim.interchange.framework import Source
from memo_sim.interchange.shell_script import Script, is_unresolved, read_script

OPTION = re.compile(r"--?([A-Za-z][\w-]*)(?:=(.*))?", re.ASCII | re.DOTALL)
OLD_NAMES: dict[str, str] = {
    "fp8_format": "fp8",
    "norm_epsilon": "layernorm_epsilon",
    "num_virtual_stages_per_pipeline_rank": "virtual_pipeline_model_parallel_size",
    "swiglu": "gated_linear_unit",
    "use_rope_scaling": "rope_scaling",
    "rotary_seq_len_interpolation_factor": "seq_len_interpolation_factor",
    "decoder_first_pipeline_num_layers": "num_layers_in_first_pipeline_stage",
    "decoder_last_pipeline_num_layers": "num_layers_in_last_pipeline_stage",
    "encoder_num_layers": "num_layers",
    "decoder_num_layers": "num_layers",
    "encoder_seq_length": "seq_length",
    "model_parallel_size": "tensor_model_parallel_size",
    "batch_size": "micro_batch_size",
    "pad_vocab_size_to": "padded_vocab_size",
    "num_experts": "num_moe_experts",
}
"""Options by the configuration's names, older options among them."""
TURNED_OFF: dict[str, str] = {
    "disable_bias_linear": "add_bias_linear",
    "untie_embeddings_and_output_weights": "share_embeddings_and_output_weights",
    "no_bias_gelu_fusion": "bias_activation_fusion",
    "no_overlap_p2p_communication": "overlap_p2p_comm",
    "no_check_for_nan_in_loss_and_grad": "check_for_nan_in_loss",
    "no_pad_vocab_size": "should_pad_vocab",
    "no_rope_fusion": "apply_rope_fusion",
    "no_yarn_correction_range_round_to_int": "yarn_correction_range_round_to_int",
}
"""Options that turn a field off."""
_PER_NODE = ("nproc_per_node", "gpus_per_node", "ngpus_per_node")
_NODES = ("nnodes", "num_nodes", "nodes", "slurm_nnodes", "slurm_job_num_nodes")
_SBATCH = re.compile(r"^#SBATCH\s+(.*)$", re.MULTILINE)


@dataclass
class Found:
    """Values by name, how the files spell each, the devices that they start (0: not said), and notes."""

    values: dict[str, Any] = field(default_factory=dict)
    spelled: dict[str, str] = field(default_factory=dict)
    devices: int = 0
    notes: list[str] = field(default_factory=list)
    undecided: list[str] = field(default_factory=list)


def find(sources: Sequence[Source], given: Mapping[str, str]) -> Found:
    """Return what all files say together; a later file wins, and ``given`` wins over all.

    Raises:
        BadInput: when a file is neither a script nor YAML, or has no options of Megatron.
    """
    found = Found()
    for source in sources:
        if source.name.endswith((".yaml", ".yml")):
            _from_yaml(source, found)
        else:
            _from_script(source, given, found)
    for name, value in given.items():
        if name == name.lower() and name[:1].isalpha():
            plain = name.replace("-", "_")
            _put(found, plain, value, f"--set {name}")
    if "devices" in given:
        found.values.pop("devices", None)
        found.devices = whole_or_zero(given["devices"]) or found.devices
    if "num_query_groups" in found.values and not found.values.get("group_query_attention", False):
        found.notes.append("--num-query-groups has no effect without --group-query-attention")
        found.values.pop("num_query_groups")
    return found


def _put(found: Found, name: str, value: Any, spelled: str) -> None:
    """Store one option under the configuration's name."""
    if name in TURNED_OFF:
        name, value = TURNED_OFF[name], str(value).lower() in ("false", "0")
    name = OLD_NAMES.get(name, name)
    if name == "activation_func" and value in ("swiglu", "silu"):
        name, value = "gated_linear_unit", True
    found.values[name], found.spelled[name] = value, spelled


def _from_script(source: Source, given: Mapping[str, str], found: Found) -> None:
    script = read_script(source.text, {**_slurm(source.text), **given}, where=source.name)
    commands = commands_of(script)
    scored = [
        (sum(word in ("--num-layers", "--hidden-size") or word.startswith("--") for word in c), c) for c in commands
    ]
    best = max(scored, key=lambda pair: pair[0], default=(0, []))
    words = best[1]
    if not any(word.startswith("--num-layers") for word in words):
        loose = [word for values in script.variables.values() for value in values for word in _split([value])]
        if any(word.startswith("--num-layers") for word in loose):
            words = [*words, *loose]
            found.notes.append("the options of all variables were taken together: no command has the model's")
    launcher, options = _at_program(words)
    if not options:
        raise BadInput(
            "no options of Megatron-LM",
            where=source.name,
            wanted="a script that calls pretrain_gpt.py, or its command line",
        )
    for name, spelled, value in _options(options):
        _put(found, name, value, spelled)
    started = {name: value for name, _, value in _options(launcher)}
    found.devices = _devices(started, script, source.text) or found.devices
    found.notes += [f"left out: {text}" for text in script.left_out]
    found.undecided += script.undecided


def commands_of(script: Script) -> list[list[str]]:
    """Return a script's commands, with the texts split that are commands themselves."""
    return [_split(command) for command in script.commands]


def devices_of(words: Sequence[str], script: Script, text: str) -> int:
    """Return how many devices a command starts, or else the script; 0 where neither says."""
    return _devices({name: value for name, _, value in _options(_at_program(words)[0])}, script, text)


def _split(words: Sequence[str]) -> list[str]:
    """Return the words with those split that hold several: a command that is a text, ``"--fp8-format hybrid"``."""
    made = list[str]()
    for word in words:
        several = re.search(r"(^|\s)--[a-z]", word) and re.search(r"\s", word) and not word.startswith(("--set=",))
        made += re.findall(r"'[^']*'|\"[^\"]*\"|\S+", word) if several else [word]
    return made


def _at_program(words: Sequence[str]) -> tuple[list[str], list[str]]:
    """Return the words of what starts the program, and those of the program, which ends in .py."""
    programs = [at for at, word in enumerate(words) if word.split("/")[-1].endswith(".py")]
    at = programs[0] if programs else 0
    return list(words[:at]), list(words[at + bool(programs) :])


def _options(words: Sequence[str]) -> list[tuple[str, str, Any]]:
    """Return (name, as spelled, value) of each option; True where it has no value, a list where it has several."""
    made, values = list[tuple[str, str, Any]](), list[str]()
    for word in words:
        match = OPTION.fullmatch(word) if word.startswith("-") and not _is_number(word) else None
        if match is None:
            values.append(word)
            if made:
                name, spelled, _ = made[-1]
                made[-1] = (name, spelled, values[0] if len(values) == 1 else list(values))
            continue
        values = [match[2]] if match[2] is not None else []
        made.append((match[1].replace("-", "_"), f"--{match[1]}", match[2] if values else True))
    return made


def _is_number(word: str) -> bool:
    return re.fullmatch(r"-[\d.]+(e-?\d+)?", word, re.ASCII) is not None


def _devices(started: Mapping[str, Any], script: Script, text: str) -> int:
    """Return how many devices a script starts, by its launcher, its variables, or SLURM's comments."""
    named = {name.lower(): " ".join(values) for name, values in script.variables.items()}
    slurm = _sbatch(text)
    gres = re.search(r"gpu:(?:\w+:)?(\d+)", slurm.get("gres", "") + slurm.get("gpus_per_node", ""))
    per_node = _first(_PER_NODE, started, named, slurm) or (int(gres[1]) if gres else 0)
    if not per_node and slurm:
        per_node = whole_or_zero(slurm.get("ntasks_per_node", ""))
    nodes = _first(_NODES, started, named, slurm) or (1 if per_node and not slurm.get("nodes") else 0)
    return per_node * nodes or whole_or_zero(named.get("world_size", ""))


def _sbatch(text: str) -> dict[str, str]:
    """Return what SLURM's comments ask for, by name."""
    asked = re.findall(r"--([a-z-]+)[= ]+([^\s#]+)", " ".join(_SBATCH.findall(text)))
    return {name.replace("-", "_"): value for name, value in asked}


def _slurm(text: str) -> dict[str, str]:
    """Return the variables that SLURM sets for a job, as far as its comments tell them."""
    asked = _sbatch(text)
    gpus = re.search(r"(?:gpu:(?:\w+:)?)?(\d+)$", asked.get("gpus_per_node", asked.get("gres", "")))
    nodes, tasks = whole_or_zero(asked.get("nodes", "")), whole_or_zero(asked.get("ntasks_per_node", ""))
    found = {
        "SLURM_NNODES": nodes,
        "SLURM_JOB_NUM_NODES": nodes,
        "SLURM_GPUS_PER_NODE": int(gpus[1]) if gpus else 0,
        "SLURM_NTASKS_PER_NODE": tasks,
        "SLURM_NTASKS": nodes * tasks,
    }
    return {name: str(value) for name, value in found.items() if value}


def _first(names: Sequence[str], *places: Mapping[str, Any]) -> int:
    return next((n for place in places for name in names if (n := whole_or_zero(place.get(name, "")))), 0)


def whole_or_zero(value: Any) -> int:
    """Return a positive whole number, of ``1:4`` the last; 0 where it is none."""
    text = str(value).split(":")[-1]
    return int(text) if re.fullmatch(r"[1-9]\d{0,6}", text, re.ASCII) and not is_unresolved(text) else 0


def _from_yaml(source: Source, found: Found) -> None:
    """Store the leaves of an argument file: fields by name, or options as the keys of a mapping."""
    from memo_sim.interchange.yaml_file import read_yaml

    for key, value in leaves(read_yaml(source)):
        if key.startswith("--"):
            if value is not False:
                _put(found, key[2:].replace("-", "_"), value, key)
        elif value is not None:
            _put(found, key.replace("-", "_"), value, key)


def leaves(tree: Mapping[str, Any]) -> list[tuple[str, Any]]:
    """Return the values that are no mappings, with their own keys, from the outermost on."""
    made = list[tuple[str, Any]]()
    for key, value in tree.items():
        if isinstance(value, Mapping):
            made += leaves(value)
        else:
            made.append((str(key), value))
    return made
