"""The fields about rotary tables, read and written."""

from __future__ import annotations

from math import log, sqrt
from typing import Any

from memo_sim.contract.huggingface_types.config import Config
from memo_sim.contract.huggingface_types.kinds import FULL, GEMMA3
from memo_sim.contract.model import Model
from memo_sim.contract.rope_scaling import RopeScaling
from memo_sim.contract.units import MOST_TOKENS

GEMMA3_THETA, GEMMA3_LOCAL_THETA = 1_000_000.0, 10_000.0
"""The rotary bases of layers without and with a window, where none is given."""


def rotary_tables(config: Config) -> tuple[float, RopeScaling | None]:
    """Return base and scaling of the rotary tables; keys of transformers 4 take precedence over those of version 5."""
    table = config.part("rope_scaling" if config.given("rope_scaling") else "rope_parameters")
    base = 10000.0
    if config.fields.get("model_type") == GEMMA3:
        base = GEMMA3_THETA
        if config.given("rope_parameters") and not config.given("rope_scaling"):
            table = table.part(FULL)
    for part in (config, table):
        if part.number("partial_rotary_factor", 1.0) != 1.0:
            raise part.refusal(
                "partial_rotary_factor", "rotary positions on a part of a head are not modelled", wanted="1"
            )
    for key, value in table.fields.items():
        if isinstance(value, dict):
            raise table.refusal(key, "rotary tables that differ by layer are not modelled")
    theta = table.number("rope_theta", config.number("rope_theta", base))
    kind_key = "rope_type" if "rope_type" in table.fields else "type"
    kind = table.text(kind_key, "default")
    if kind == "default":
        return theta, None
    if kind == "linear":
        return theta, RopeScaling(kind="linear", factor=table.number("factor", least=1.0))
    if kind == "llama3":
        scaling = RopeScaling(
            kind="llama3",
            factor=table.number("factor", least=1.0),
            low_freq_factor=table.number("low_freq_factor"),
            high_freq_factor=table.number("high_freq_factor"),
            original_max_positions=table.whole("original_max_position_embeddings", most=MOST_TOKENS),
        )
        return theta, scaling
    if kind in ("dynamic", "ntk"):
        most = config.whole("max_position_embeddings", most=MOST_TOKENS)
        factor = table.number("factor", least=1.0)
        return theta, RopeScaling(kind="dynamic", factor=factor, original_max_positions=most)
    if kind == "yarn":
        return theta, _yarn(config, table)
    if kind in ("longrope", "su"):
        return theta, _longrope(config, table)
    raise table.refusal(
        kind_key, "this rotary scaling is not modelled", wanted="default, linear, llama3, yarn, dynamic or longrope"
    )


def _stretch(config: Config, table: Config) -> tuple[float, int]:
    """Return by how much yarn or longrope make the context longer, and the length before."""
    of = table if table.given("original_max_position_embeddings") is not None else config
    original = of.whole("original_max_position_embeddings", most=MOST_TOKENS)
    if table.given("factor") is not None:
        return table.number("factor", least=1.0), original
    return max(1.0, config.whole("max_position_embeddings", most=MOST_TOKENS) / original), original


def _yarn(config: Config, table: Config) -> RopeScaling:
    """Return YaRN's scaling; without ``attention_factor`` it follows from the factor, as the paper suggests."""
    factor, original = _stretch(config, table)

    def scale(weight: float) -> float:
        return 0.1 * weight * log(factor) + 1.0

    own = scale(1.0)
    if table.given("mscale") and table.given("mscale_all_dim"):
        own = scale(table.number("mscale")) / scale(table.number("mscale_all_dim"))
    return RopeScaling(
        kind="yarn",
        factor=factor,
        original_max_positions=original,
        attention_factor=table.number("attention_factor", own),
        beta_fast=table.number("beta_fast", 32.0),
        beta_slow=table.number("beta_slow", 1.0),
        truncate=table.flag("truncate", True),
    )


def _longrope(config: Config, table: Config) -> RopeScaling:
    """Return LongRoPE's scaling (Phi-3)."""
    factor, original = _stretch(config, table)
    own = sqrt(1 + log(factor) / log(original)) if factor > 1 and original > 1 else 1.0
    return RopeScaling(
        kind="longrope",
        factor=factor,
        original_max_positions=original,
        attention_factor=table.number("attention_factor", own),
        short_factors=table.numbers("short_factor"),
        long_factors=table.numbers("long_factor"),
    )


def yarn_of(model: Model) -> RopeScaling | None:
    """Return the model's scaling if it is yarn's and stretches positions."""
    scaling = model.rope_scaling
    return scaling if scaling is not None and scaling.kind == "yarn" and scaling.factor > 1 else None


def written_positions(model: Model, positions: int) -> int:
    """Return the maximum number of positions, from which dynamic frequencies are scaled."""
    scaling = model.rope_scaling
    return scaling.original_max_positions if scaling is not None and scaling.kind == "dynamic" else positions


def scaling_fields(model: Model) -> dict[str, Any] | None:
    """Return the object under ``rope_scaling``; None without scaling."""
    scaling = model.rope_scaling
    if scaling is None:
        return None
    found: dict[str, Any] = {"rope_type": scaling.kind, "factor": scaling.factor}
    if scaling.kind == "llama3":
        found |= {"low_freq_factor": scaling.low_freq_factor, "high_freq_factor": scaling.high_freq_factor}
    if scaling.kind in ("llama3", "yarn", "longrope"):
        found["original_max_position_embeddings"] = scaling.original_max_positions
    if scaling.kind in ("yarn", "longrope"):
        found["attention_factor"] = scaling.attention_factor
    if scaling.kind == "yarn":
        found |= {"beta_fast": scaling.beta_fast, "beta_slow": scaling.beta_slow, "truncate": scaling.truncate}
    if model.latent is not None and scaling.kind == "yarn" and scaling.factor > 1:
        found["mscale_all_dim"] = (sqrt(model.latent.score_scale) - 1) / (0.1 * log(scaling.factor))
    if scaling.kind == "longrope":
        found |= {"short_factor": list(scaling.short_factors), "long_factor": list(scaling.long_factors)}
    return found
