"""The fields that Gemma 3 alone has, read and written."""

from __future__ import annotations

from typing import Any

from memo_sim.contract.huggingface_types.config import Config
from memo_sim.contract.huggingface_types.kinds import SLIDING
from memo_sim.contract.huggingface_types.rotary_tables import GEMMA3_LOCAL_THETA
from memo_sim.contract.model import Model


def query_scalar(config: Config, head_dim: int) -> float:
    """Return the number by whose root a Gemma 3 divides its scores; 0 where it is the head size."""
    scalar = config.number("query_pre_attn_scalar")
    return 0.0 if scalar == head_dim else scalar


def local_theta(config: Config) -> float:
    """Return the rotary base of a Gemma 3's layers with a window, whose tables have no scaling."""
    table = config.part("rope_parameters").part(SLIDING)
    if table.text("rope_type", "default") != "default":
        raise table.refusal("rope_type", "scaled rotary tables of layers with a window are not modelled")
    return table.number("rope_theta", config.number("rope_local_base_freq", GEMMA3_LOCAL_THETA))


def gemma3_fields(model: Model) -> dict[str, Any]:
    """Return the other fields of a Gemma 3's ``config.json``."""
    scalar = model.query_scalar or float(model.head_dim)
    local = next((shape.rope_theta for shape in model.layer_shapes if shape.rope_theta), model.rope_theta)
    return {
        "hidden_activation": "gelu_pytorch_tanh",
        "query_pre_attn_scalar": int(scalar) if scalar.is_integer() else scalar,
        "rope_local_base_freq": local,
        "attn_logit_softcapping": None,
        "final_logit_softcapping": None,
        "pad_token_id": None,  # the class default, 0, would leave that token's embedding untrained
    }
