"""Parts of a model's layers that only some frameworks' files can say."""

from __future__ import annotations

from memo_sim.contract.errors import UsageError
from memo_sim.contract.model import Model
from memo_sim.contract.plan import Decisions


def check_written(decisions: Decisions, title: str, hint: str) -> None:
    """Refuse a model with something that memo writes no options of for a framework.

    Raises:
        UsageError: naming it, and ``hint``.
    """
    model = decisions.model
    asked = {
        "experts": model.mixture,
        "latent attention": model.latent,
        "attention windows": model.windowed,
        "attention sinks": model.sinks,
        "a bias of the attention projection alone": model.proj_bias and not model.linear_bias,
        **dict.fromkeys(gemma_parts(model), True),
    }
    if unwritten := ", ".join(what for what, has in asked.items() if has):
        raise UsageError(
            f"memo writes no options of {unwritten} for {title}",
            where="model",
            got=model.name,
            wanted="a model without them, whose layers are alike",
            hint=hint,
        )


def gemma_parts(model: Model) -> list[str]:
    """Return what a model has of Gemma's layers."""
    asked = {
        "norms behind attention and MLP": model.post_norms,
        "FFNs gated by gelu": model.gated and model.activation != "silu",
        "scaled embeddings": model.scaled_embeddings,
        "a query scalar": bool(model.query_scalar),
    }
    return [what for what, has in asked.items() if has]
