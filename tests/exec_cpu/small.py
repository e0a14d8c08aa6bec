"""Small models, plans and batches for tests, and functions that run steps with them."""

from collections.abc import Callable
from typing import Any

import msgspec
import torch
from torch import Tensor

from memo_exec.interpreter.interpreter import Interpreter
from memo_exec.interpreter.record import StepRecord
from memo_exec.kernels import StepScalars
from memo_exec.training import weights
from memo_exec.training.checkpoint import STATES
from memo_sim.contract.experts import Experts
from memo_sim.contract.latent_attention import LatentAttention
from memo_sim.contract.layer_shape import LayerShape
from memo_sim.contract.model import Model
from memo_sim.contract.plan import Decisions, Kernels
from memo_sim.contract.rope_scaling import RopeScaling
from memo_sim.program.ir.program import Program
from memo_sim.program.lower import lower

VOCAB = 97
CPU_KERNELS = Kernels(attention="torch-flash-cpu")
YARN = RopeScaling(kind="yarn", factor=8.0, original_max_positions=64, attention_factor=1.25, truncate=False)
LLAMA3 = RopeScaling(kind="llama3", factor=8.0, original_max_positions=64)


def gpt(**changes: Any) -> Model:
    fields: dict[str, Any] = {
        "name": "gpt-small",
        "family": "gpt",
        "layers": 3,
        "hidden": 64,
        "heads": 4,
        "kv_heads": 4,
        "head_dim": 16,
        "ffn_hidden": 256,
        "vocab": VOCAB,
        "tied_embeddings": True,
        "max_positions": 512,
        "qkv_bias": True,
        "linear_bias": True,
    }
    return Model(**(fields | changes))


def llama(**changes: Any) -> Model:
    fields: dict[str, Any] = {
        "name": "llama-small",
        "family": "llama",
        "layers": 3,
        "hidden": 64,
        "heads": 4,
        "kv_heads": 2,
        "head_dim": 16,
        "ffn_hidden": 160,
        "vocab": VOCAB,
        "tied_embeddings": False,
        "activation": "silu",
    }
    return Model(**(fields | changes))


MODELS = {
    "gpt2": gpt(),
    "gpt-bare": gpt(tied_embeddings=False, max_positions=0, qkv_bias=False, linear_bias=False, activation="gelu_tanh"),
    "llama": llama(),
    "llama-biased": llama(qkv_bias=True, linear_bias=True, rope_scaling=LLAMA3, rope_theta=500.0),
    "qwen2": llama(qkv_bias=True, tied_embeddings=True, heads=8, head_dim=8, kv_heads=2),
    "qwen3": llama(qk_norm=True, head_dim=32, kv_heads=1),
}
"""Models of both families: grouped queries, biases, tied and untied embeddings, every kind of position."""


def of_kinds(model: Model, *kinds: tuple[int, float]) -> Model:
    """Return the model with one layer for each pair of a window and a rotary base (0: all keys; the model's base)."""
    return model.of_layers(
        [LayerShape(ffn_hidden=model.ffn_hidden, window=window, rope_theta=theta) for window, theta in kinds]
    )


WINDOWED_MODELS = {
    "window": llama(name="window-small", window=20),
    "window-sinks": llama(name="window-sinks-small", window=20, sinks=True),
    "sinks": of_kinds(
        llama(name="sinks-small", sinks=True, qkv_bias=True, proj_bias=True), (20, 0.0), (0, 0.0), (20, 0.0)
    ),
    "gemma3": of_kinds(
        llama(
            name="gemma3-small",
            qk_norm=True,
            post_norms=True,
            norms_from_one=True,
            activation="gelu_tanh",
            scaled_embeddings=True,
            query_scalar=24.0,
            tied_embeddings=True,
            head_dim=32,
        ),
        (20, 100.0),
        (0, 0.0),
        (20, 100.0),
    ),
}
"""Models with windows in all layers, without and with sinks, with alternating windows and sinks (GPT-OSS's attention),
and Gemma 3's."""


LATENT = LatentAttention(q_rank=24, kv_rank=16, nope_dim=16, rope_dim=8, value_dim=16)
LATENT_MODELS = {
    "latent": llama(name="latent", kv_heads=4, head_dim=24, latent=LATENT),
    "latent-lite": llama(
        name="latent-lite",
        kv_heads=4,
        head_dim=24,
        latent=msgspec.structs.replace(LATENT, q_rank=0, interleaved=False),
    ),
    "latent-yarn": llama(
        name="latent-yarn",
        kv_heads=4,
        head_dim=24,
        rope_scaling=RopeScaling(kind="yarn", factor=4.0, original_max_positions=32),
        latent=msgspec.structs.replace(LATENT, score_scale=1.3),
    ),
}
LATENT_MODELS["latent-lite-yarn"] = msgspec.structs.replace(
    LATENT_MODELS["latent-yarn"], latent=msgspec.structs.replace(LATENT, q_rank=0, score_scale=1.3)
)
"""Models with latent attention: with and without a latent for queries, and with scaled scores."""

_ROUTED = Experts(count=4, per_token=2, hidden=48, scores="sigmoid", scale=2.5, selection_bias=True, shared=32)
DEEPSEEK_MODEL = msgspec.structs.replace(LATENT_MODELS["latent-yarn"], name="deepseek-small").of_layers(
    [LayerShape(ffn_hidden=160), *[LayerShape(ffn_hidden=160, experts=_ROUTED)] * 2]
)
"""DeepSeek-V3's layers: latent attention, a first dense layer, sigmoid scores, a selection bias, a shared expert."""

EXPERT_MODELS = {
    "mixtral": llama(name="mixtral-small", experts=Experts(count=4, per_token=2, hidden=48)),
    "qwen3-moe": llama(
        name="qwen3-moe-small",
        qk_norm=True,
        head_dim=32,
        kv_heads=1,
        experts=Experts(count=6, per_token=3, hidden=24, renormalize=False),
    ),
}
GPT_OSS = Experts(count=4, per_token=2, hidden=48, router_bias=True, bias=True, activation="clamped")
DEEPSEEK = Experts(
    count=8,
    per_token=3,
    hidden=24,
    scores="sigmoid",
    scale=2.5,
    groups=4,
    groups_per_token=2,
    selection_bias=True,
    selection_rate=0.001,
    shared=48,
)
EXPERT_MODELS["gpt-oss"] = llama(name="gpt-oss-small", qkv_bias=True, proj_bias=True, experts=GPT_OSS)
EXPERT_MODELS["deepseek"] = llama(name="deepseek-small", experts=DEEPSEEK).of_layers(
    [LayerShape(ffn_hidden=160), *[LayerShape(ffn_hidden=160, experts=DEEPSEEK)] * 2]
)
EXPERT_MODELS["qwen2-moe"] = llama(
    name="qwen2-moe-small",
    qkv_bias=True,
    experts=Experts(count=4, per_token=2, hidden=24, renormalize=False, shared=40, shared_gate=True),
)
_OSS = LayerShape(ffn_hidden=48, experts=GPT_OSS)
WHOLE_MODELS = {
    "gpt-oss": llama(
        name="gpt-oss-whole", qkv_bias=True, proj_bias=True, sinks=True, rope_scaling=YARN, ffn_hidden=48
    ).of_layers([LayerShape(ffn_hidden=48, experts=GPT_OSS, window=32), _OSS, _OSS]),
    "deepseek": llama(
        name="deepseek-whole",
        kv_heads=4,
        head_dim=24,
        latent=LatentAttention(q_rank=24, kv_rank=16, nope_dim=16, rope_dim=8, value_dim=12),
    ).of_layers([LayerShape(ffn_hidden=160), *[LayerShape(ffn_hidden=160, experts=DEEPSEEK)] * 2]),
}
WHOLE_MODELS["qwen2-moe"] = EXPERT_MODELS["qwen2-moe"].of_layers(
    [LayerShape(ffn_hidden=160), *[EXPERT_MODELS["qwen2-moe"].layer(0)] * 2]
)
"""Models with the attention that belongs to their experts."""
EXPERT_MODELS["first layer dense"] = EXPERT_MODELS["qwen3-moe"].of_layers(
    [LayerShape(ffn_hidden=160), *[EXPERT_MODELS["qwen3-moe"].layer(1)] * 2]
)
"""Models whose layers all have experts, or all but the first."""


def decide(model: Model, **changes: Any) -> Decisions:
    """Return decisions for fp32 on the CPU with two sequences of 128 tokens."""
    fields: dict[str, Any] = {
        "model": model,
        "seq_tokens": 128,
        "micro_batch": 2,
        "dtype": "fp32",
        "kernels": CPU_KERNELS,
    }
    fields |= changes
    return Decisions(**({"global_batch": fields["micro_batch"]} | fields))


def play(decisions: Decisions, program: Program | None = None, **options: Any) -> Interpreter:
    """Return an interpreter whose random weights make no gradient negligible; it plays ``program`` if one is given."""
    if program is None:
        (program,) = lower(decisions)
    interpreter = Interpreter(decisions, program, **options)
    weights.initialize(interpreter, seed=1)
    generator = torch.Generator().manual_seed(2)
    parameters = weights.named_parameters(interpreter)
    for value in parameters.values():
        value.add_(torch.normal(0.0, 0.08, value.shape, generator=generator))
    for held in weights.held_by(interpreter, "master"):
        if held.view is not parameters[held.name]:
            held.view.copy_(parameters[held.name])
    return interpreter


def batch(decisions: Decisions, seed: int = 0, *, ignored: float = 0.0) -> list[tuple[Tensor, Tensor]]:
    """Return (ids, labels) of every micro-batch; a fraction ``ignored`` of the labels does not count."""
    generator = torch.Generator().manual_seed(seed)
    shape = (decisions.micro_batches, decisions.local_tokens)
    ids = torch.randint(0, decisions.model.vocab, shape, generator=generator)
    labels = torch.randint(0, decisions.model.vocab, shape, generator=generator)
    labels[torch.rand(shape, generator=generator) < ignored] = -100
    return list(zip(ids, labels, strict=True))


def counted(batches: list[tuple[Tensor, Tensor]]) -> int:
    """Return the number of counted targets."""
    return sum(int((labels != -100).sum()) for _, labels in batches)


def scalars(batches: list[tuple[Tensor, Tensor]], **changes: Any) -> StepScalars:
    """Return the step scalars for these batches."""
    return StepScalars(**({"lr": 1e-3, "loss_scale": 1 / counted(batches)} | changes))


def gradients(interpreter: Interpreter) -> dict[str, Tensor]:
    """Return copies of all gradients by name."""
    return {held.name: held.view.clone() for held in weights.held_by(interpreter, "grads")}


def states(interpreter: Interpreter) -> dict[str, Tensor]:
    """Return the training state as flat buffers: parameters, masters and moments, by names like ``params.layer/3``."""
    return {
        f"{family.name}/{i}": interpreter.buffer(family.name, i)
        for family in interpreter.program.families
        if family.name.startswith(tuple(f"{state}." for state in STATES))
        for i in range(family.count)
    }


def one_step(
    decisions: Decisions, batches: list[tuple[Tensor, Tensor]] | None = None, **options: Any
) -> tuple[StepRecord, dict[str, Tensor]]:
    """Run one step without an update; return its record and gradients."""
    batches = batches or batch(decisions)
    with play(decisions, **options) as interpreter:
        record = interpreter.run_step(batches, scalars(batches, lr=0.0))
        return record, gradients(interpreter)


def losses(decisions: Decisions, steps: int, **changes: Any) -> list[float]:
    """Train for ``steps`` steps, each on its own batch, and return the losses."""
    found = []
    with play(decisions) as interpreter:
        for step in range(1, steps + 1):
            batches = batch(decisions, seed=step % 5)
            found.append(interpreter.run_step(batches, scalars(batches, step=step, **changes)).loss)
    return found


def wrapped(kernel: Callable[[Any], None], before: Callable[[Any], None]) -> Callable[[Any], None]:
    """Return a kernel that first calls ``before``, then ``kernel``."""

    def call(arguments: Any) -> None:
        before(arguments)
        kernel(arguments)

    return call
