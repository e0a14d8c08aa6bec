"""The fields about the windows of layers, read and written."""

from __future__ import annotations

from typing import Any

from msgspec.structs import replace

from memo_sim.contract.huggingface_types.config import Config
from memo_sim.contract.huggingface_types.gemma3 import local_theta
from memo_sim.contract.huggingface_types.kinds import ALWAYS_WINDOWED, FULL, GEMMA3, GPT_OSS, SLIDING
from memo_sim.contract.model import Model
from memo_sim.contract.units import MOST_LAYERS, MOST_TOKENS, MOST_WIDTH

PATTERNS = {GEMMA3: 6, GPT_OSS: 2}
"""Every how many layers one has no window, where nothing is given."""


def with_windows(config: Config, model: Model, model_type: str) -> Model:
    """Return the model with the windows of its layers, and in Gemma 3 with their rotary base."""
    windowed = _windowed_layers(config, model, model_type)
    if not any(windowed):
        return model
    window = config.whole("sliding_window", most=MOST_TOKENS)
    theta = local_theta(config) if model_type == GEMMA3 else 0.0
    theta = 0.0 if theta == model.rope_theta and model.rope_scaling is None else theta
    return model.of_layers(
        [
            replace(model.layer(number), window=window, rope_theta=theta) if has else model.layer(number)
            for number, has in enumerate(windowed)
        ]
    )


def _windowed_layers(config: Config, model: Model, model_type: str) -> list[bool]:
    """Return for each layer whether it has a window.

    Raises:
        BadInput: for kinds of attention other than full and sliding, or another number of layers.
    """
    kinds, window = config.given("layer_types"), config.given("sliding_window")
    first, used = config.given("max_window_layers"), config.flag("use_sliding_window", False)
    if model_type == "qwen2_moe" and used:
        raise config.refusal("use_sliding_window", "windows are not modelled in a model of this type", wanted="false")
    if model_type in ALWAYS_WINDOWED:
        if kinds is not None:
            raise config.refusal("layer_types", "layers of such a model are alike", wanted="no such key")
        return [window is not None] * model.layers
    if kinds is not None:
        if not isinstance(kinds, list) or len(kinds) != model.layers or any(k not in (SLIDING, FULL) for k in kinds):
            raise config.refusal(
                "layer_types", "these layers are not modelled", wanted=f"{model.layers} times {FULL} or {SLIDING}"
            )
        return [kind == SLIDING for kind in kinds]
    if model_type in (GEMMA3, GPT_OSS):
        pattern = config.whole("sliding_window_pattern", PATTERNS[model_type], most=MOST_LAYERS)
        return [(number + 1) % pattern > 0 for number in range(model.layers)]
    if model_type == "llama" or not used or window is None:
        return [False] * model.layers
    if model_type == "qwen3_moe":
        return [True] * model.layers
    first = 0 if first == 0 else config.whole("max_window_layers", most=MOST_WIDTH)
    return [number >= first for number in range(model.layers)]


def window_fields(model: Model, kind: str) -> dict[str, Any]:
    """Return the fields about windows in the ``config.json`` of a model type."""
    window = max(shape.window for shape in model.layer_shapes)
    if kind in ALWAYS_WINDOWED:
        return {"sliding_window": window or None}
    if not window and kind != GPT_OSS:
        return {}
    kinds = [SLIDING if model.layer(number).window else FULL for number in range(model.layers)]
    listed = {"sliding_window": window, "layer_types": kinds}
    if kind == "qwen3_moe":
        return {"sliding_window": window, "use_sliding_window": True}
    return listed if kind in (GEMMA3, GPT_OSS) else listed | {"use_sliding_window": True, "max_window_layers": 0}
