"""Which of memo's models a framework's file means by a name, a local ``config.json``, or the shape it lists."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import msgspec

from memo_sim.contract.catalog import list_models, load_model
from memo_sim.contract.codec import decode_object
from memo_sim.contract.errors import BadInput
from memo_sim.contract.huggingface import model_from_config
from memo_sim.contract.model import Model
from memo_sim.interchange.framework import Source
from memo_sim.interchange.settings import MODEL

CONFIG = "config.json"

HUB = {
    "llama-7b": ("meta-llama/Llama-2-7b-hf", "huggyllama/llama-7b"),
    "llama-70b": ("meta-llama/Llama-2-70b-hf",),
    "llama3-8b": (
        "meta-llama/Meta-Llama-3-8B",
        "meta-llama/Meta-Llama-3-8B-Instruct",
        "meta-llama/Llama-3.1-8B",
        "meta-llama/Llama-3.1-8B-Instruct",
        "meta-llama/Meta-Llama-3.1-8B",
        "meta-llama/Meta-Llama-3.1-8B-Instruct",
    ),
    "llama3-70b": (
        "meta-llama/Meta-Llama-3-70B",
        "meta-llama/Meta-Llama-3-70B-Instruct",
        "meta-llama/Llama-3.1-70B",
        "meta-llama/Llama-3.1-70B-Instruct",
        "meta-llama/Llama-3.3-70B-Instruct",
        "meta-llama/Meta-Llama-3.1-70B",
        "meta-llama/Meta-Llama-3.1-70B-Instruct",
    ),
    "llama3-405b": (
        "meta-llama/Llama-3.1-405B",
        "meta-llama/Llama-3.1-405B-Instruct",
        "meta-llama/Meta-Llama-3.1-405B",
        "meta-llama/Meta-Llama-3.1-405B-Instruct",
    ),
    "qwen3-0.6b": ("Qwen/Qwen3-0.6B-Base", "Qwen/Qwen3-0.6B"),
    "qwen3-8b": ("Qwen/Qwen3-8B-Base", "Qwen/Qwen3-8B"),
    "qwen3-32b": ("Qwen/Qwen3-32B",),
}
"""Names on the Hugging Face hub of models with the shape of each preset, the first the one that is exported.

Llama 3.1 and 3.3 scale rotary positions, which costs nothing and is left out."""
_PRESETS = {name.lower(): preset for preset, names in HUB.items() for name in names}


def hub_name(model: Model) -> str | None:
    """Return the hub's name of a model with this shape, or None."""
    return next((names[0] for preset, names in HUB.items() if same_shape(load_model(preset), model)), None)


def same_shape(one: Model, other: Model) -> bool:
    """Return whether two models differ only in name and source."""
    return msgspec.structs.replace(one, name=other.name, source=other.source) == other


def preset_of_shape(model: Model) -> str:
    """Return the preset that has a model's shape; "" without one."""
    return next((name for name in list_models() if same_shape(load_model(name), model)), "")


def model_of(sources: Sequence[Source], given: Mapping[str, str], named: str | None) -> Model:
    """Return the model: the one given, else that of a ``config.json`` among the files, else the one that is named.

    Raises:
        BadInput: when there is none.
    """
    if asked := given.get(MODEL):
        return load_model(asked)
    config = next((source for source in sources if source.name.rpartition("/")[2] == CONFIG), None)
    if config is not None:
        fields = decode_object(config.text.encode(), where=config.name)
        found = model_from_config(fields, where=config.name, name="model")
        return next((known for known in map(load_model, list_models()) if same_shape(known, found)), found)
    if named is not None and (preset := preset_of(named)) is not None:
        return load_model(preset)
    raise BadInput(
        "the files do not say the model's shape",
        where=", ".join(source.name for source in sources),
        got=f"the name {named!r}" if named else "no name of a model",
        wanted="a name that memo knows, or the model's config.json among the files",
        hint="--set model=llama3-8b, or a config.json",
    )


def preset_of(name: str) -> str | None:
    """Return the preset that a name on the hub, or of memo's own, stands for; None for others."""
    plain = name.strip().rstrip("/")
    return _PRESETS.get(plain.lower()) or next((preset for preset in list_models() if preset == plain.lower()), None)
