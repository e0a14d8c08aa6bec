"""Models and decisions for tests that train with a layout and with one process, and compare both."""

from functools import cache
from typing import Any

from memo_sim.contract.knobs import Objective
from memo_sim.contract.layer_shape import LayerShape
from memo_sim.contract.model import Model
from memo_sim.contract.plan import Decisions, Layout
from tests.distributed.parity import Played, check, one_process, play
from tests.distributed.team import Member, Team
from tests.exec_cpu.small import WINDOWED_MODELS, decide, gpt, llama, of_kinds

SEQ_TOKENS = 512
MODELS: dict[str, Model] = {"gpt": gpt(max_positions=2 * SEQ_TOKENS), "llama": llama()}
MODELS |= {"gpt4": gpt(layers=4, max_positions=2 * SEQ_TOKENS), "llama4": llama(layers=4)}
MODELS |= {"llama5": llama(layers=5)}
"""Models with four layers or five can be divided into pipeline stages."""
MODELS |= {"llama-mha": llama(kv_heads=4), "llama-normed": llama(qk_norm=True)}
MODELS |= {"llama-uneven": llama(heads=6, kv_heads=3), "gpt-uneven": gpt(heads=3, kv_heads=3, max_positions=1024)}
MODELS |= {"llama-one-kv4": llama(layers=4, heads=8, kv_heads=1, qk_norm=True, qkv_bias=True)}
"""METP on four ranks needs one key/value head per rank. Every rank has gradients for the norms of heads."""

_WIDTHS = [LayerShape(ffn_hidden=width) for width in (160, 64, 128, 64, 160)]
MODELS |= {"differing5": llama(layers=5).of_layers(_WIDTHS)}
"""Five layers of three kinds."""


MODELS |= WINDOWED_MODELS
MODELS["llama-sinks"] = llama(name="llama-sinks-small", sinks=True)
MODELS["gemma3-4"] = of_kinds(
    llama(layers=4, post_norms=True, activation="gelu_tanh", scaled_embeddings=True, tied_embeddings=True),
    *[(20, 100.0), (20, 100.0), (20, 100.0), (0, 0.0)],
)
"""Four layers of two kinds, which two pipeline stages divide."""


def training(model: Model, layout: Layout, alpha: float = 0.0, **changes: Any) -> Decisions:
    """Return decisions with two micro-batches per rank, tokenwise: tokens that are not swapped are recomputed."""
    fields: dict[str, Any] = {"seq_tokens": SEQ_TOKENS, "micro_batch": 1, "global_batch": 2 * layout.dp} | changes
    tokens = fields["seq_tokens"] * fields["micro_batch"] // (layout.ring * layout.ulysses)
    return decide(model, layout=layout, **({"recompute": "tokenwise", "swapped_tokens": int(alpha * tokens)} | fields))


@cache
def reference(name: str, seq_tokens: int, global_batch: int, steps: int, objective: Objective = "next-token") -> Played:
    """Return the results of one process, with one sequence per micro-batch."""
    fields: dict[str, Any] = {"seq_tokens": seq_tokens, "micro_batch": 1, "global_batch": global_batch}
    alone = decide(MODELS[name], **fields, objective=objective)
    return play(Member(0, 1), one_process(alone), steps, {})


def parity(
    team: Team, name: str, layout: Layout, alpha: float = 0.0, *, steps: int = 2, debug: bool = False, **changes: Any
) -> list[Played]:
    """Train on the layout's ranks and compare the results with those of one process."""
    chosen = training(MODELS[name], layout, alpha, **changes)
    alone = reference(name, chosen.seq_tokens, chosen.global_batch, steps, chosen.objective)
    return check(team, chosen, alone, steps=steps, debug=debug)


def label(layout: Layout) -> str:
    """Return the layout's degrees as a test's name."""
    axes = ("tp", "ulysses", "cp", "metp", "dp", "pp", "zero")
    found = [f"{axis}{getattr(layout, axis)}" for axis in axes if getattr(layout, axis) > (axis != "zero")]
    sp = ["sp"] if layout.sequence_parallel else []
    return "-".join([*found, *sp, layout.schedule if layout.pp > 1 else layout.cp_exchange])
