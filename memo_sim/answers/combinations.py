"""Answers which features go together, from the rules that refuse what does not.

For every two features the smallest decisions that have both are built, and the rules of
``program/layout/compatibility.py`` are asked. So the table follows from the rules and cannot disagree with them.

    tp           layout.tp 2
    subsequences layout.subsequences 4
    both         layout.tp 2, layout.subsequences 4    ->  no rule refuses: they go together

A feature may need others: attention in chunks needs full or row-wise recompute. Where it has several ways to be there
(an eager framework has operators of its own, or those of Hugging Face's modules), two features go together if any of
them does.
A pair says nothing about three features at once.

How to add a feature: one ``yield`` in ``_features``.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import combinations, product
from typing import Any, get_args

import msgspec

from memo_sim.contract.combinations import Combinations, NamedFeature, Pair
from memo_sim.contract.documents import Documents
from memo_sim.contract.errors import Infeasible, UsageError, did_you_mean
from memo_sim.contract.experts import Experts
from memo_sim.contract.knobs import KNOBS, MemoryPolicy, Recompute, Schedule
from memo_sim.contract.latent_attention import LatentAttention
from memo_sim.contract.model import Model
from memo_sim.contract.plan import Decisions, Kernels, Layout
from memo_sim.program.layout.compatibility import ARENA_RULES, RULES
from memo_sim.program.layout.partition import partition
from memo_sim.program.layout.shape import shape_of
from memo_sim.program.layout.stage import stages_of

Changes = Mapping[str, Any]
"""Values by where a plan file has them: ``layout.tp``, ``kernels.attention``, ``model.window``, ``recompute``.

``swapped`` is a fraction of the tokens, in place of ``swapped_tokens``."""
SEQ_TOKENS = 2048
MODEL = Model(
    name="smallest",
    family="llama",
    layers=4,
    hidden=256,
    heads=8,
    kv_heads=8,
    head_dim=32,
    ffn_hidden=512,
    vocab=128,
    tied_embeddings=False,
    activation="silu",
)
EXPERTS = Experts(count=4, per_token=2, hidden=128)
HUGGINGFACE: Changes = {"memory_policy": "eager", "modules": "huggingface", "kernels.rowwise": "eager"}
EAGER: tuple[Changes, ...] = ({}, HUGGINGFACE, {**HUGGINGFACE, "recompute": "full"})
"""Ways to be an eager framework: memo's operators, Hugging Face's modules, these under full recompute."""
MODELS_OWN = "a model with"


@dataclass(frozen=True, slots=True, kw_only=True)
class Feature:
    """A feature by name: the values that are it, and what it needs besides, in one of several ways."""

    name: str
    about: str
    own: Changes
    needs: tuple[Changes, ...] = ({},)

    @property
    def options(self) -> str:
        """The options that choose it."""
        return ", ".join(dict.fromkeys(_option(where) for where in self.own))


def _features() -> Iterator[Feature]:
    yield Feature(name="tp", about="tensor parallelism", own={"layout.tp": 2, "layout.sequence_parallel": True})
    yield Feature(
        name="tp-chunks",
        about="products of tensor parallelism that overlap with its exchanges",
        own={"layout.tp_overlap": "chunked"},
        needs=({"layout.tp": 2, "layout.sequence_parallel": True},),
    )
    yield from (
        Feature(name=name, about=about, own={"layout.cp": 2, "layout.cp_exchange": exchange})
        for name, exchange, about in (
            ("cp-ring", "ring", "context parallelism, keys and values passed round a ring"),
            ("cp-all-gather", "all_gather", "context parallelism, keys and values gathered"),
            ("rsa", "rsa", "ring self-attention"),
        )
    )
    yield Feature(name="ulysses", about="heads divided for attention, tokens elsewhere", own={"layout.ulysses": 2})
    yield Feature(name="metp", about="weights and tokens divided over the same ranks", own={"layout.metp": 2})
    for schedule in get_args(Schedule):
        several = {"layout.virtual_stages": 2} if schedule == "interleaved" else {}
        own = {"layout.pp": 2, "layout.schedule": schedule, **several}
        yield Feature(name=f"pp-{schedule}", about=f"pipeline stages with the schedule {schedule}", own=own)
    yield Feature(name="dp", about="data parallelism", own={"layout.dp": 2})
    yield from (
        Feature(name=f"zero-{level}", about=f"ZeRO {level}", own={"layout.zero": level}, needs=({"layout.dp": 2},))
        for level in (1, 2, 3)
    )
    yield Feature(name="subsequences", about="a sequence divided into subsequences", own={"layout.subsequences": 4})
    yield Feature(
        name="multiplexed",
        about="idle stages that compute rows of other stages",
        own={"layout.multiplexed": True},
        needs=({"layout.pp": 2, "layout.subsequences": 4},),
    )
    yield Feature(
        name="offload-window",
        about="subsequences that are swapped from buffers of their own",
        own={"offload_window": 1},
        needs=({"layout.subsequences": 4, "swapped": 1.0},),
    )
    yield Feature(name="swap", about="all tokens' activations swapped to the host", own={"swapped": 1.0})
    yield Feature(name="alpha", about="half of the tokens swapped", own={"swapped": 0.5})
    yield Feature(
        name="swap-fp8",
        about="swapped activations in FP8",
        own={"swap_dtype": "fp8"},
        needs=({"swapped": 1.0}, {"swapped": 0.5}),
    )
    for mode in get_args(Recompute):
        if mode != "none":
            yield Feature(name=f"recompute-{mode}", about=f"{mode} recompute", own={"recompute": mode})
    yield Feature(
        name="some-layers",
        about="full recompute of some layers",
        own={"recompute_layers": "every-2"},
        needs=({"recompute": "full"},),
    )
    yield Feature(
        name="rounding-buffers",
        about="full recompute in two rounding buffers",
        own={"rounding_buffers": True},
        needs=({"recompute": "full"},),
    )
    yield Feature(
        name="attention-chunks",
        about="attention whose sequence exists in chunks (FPDT)",
        own={"attention_chunk_tokens": 256},
        needs=({"recompute": "full"}, {"recompute": "rowwise", "mlp_chunk_tokens": 256}),
    )
    yield Feature(
        name="mlp-chunks",
        about="an MLP in row blocks",
        own={"mlp_chunk_tokens": 256},
        needs=({"recompute": "full"},),
    )
    yield Feature(name="loss-chunks", about="logits in chunks", own={"loss_chunk_tokens": 256})
    yield Feature(name="micro-batch", about="several sequences a micro-batch", own={"micro_batch": 2})
    yield Feature(name="experts", about="a mixture of experts", own={"model.experts": EXPERTS})
    yield Feature(
        name="ep",
        about="experts divided over ranks",
        own={"layout.ep": 2},
        needs=(
            {"model.experts": EXPERTS, "layout.dp": 2},
            {"model.experts": EXPERTS, "layout.cp": 2},
            {"model.experts": EXPERTS, "layout.ulysses": 2},
        ),
    )
    latent = LatentAttention(q_rank=96, kv_rank=64, nope_dim=24, rope_dim=8, value_dim=32)
    yield Feature(name="latents", about="latent attention (MLA)", own={"model.latent": latent})
    yield Feature(name="windows", about="attention windows", own={"model.window": 256})
    yield Feature(name="sinks", about="attention sinks", own={"model.sinks": True})
    yield Feature(name="bidirectional", about="attention in both directions", own={"model.bidirectional": True})
    yield Feature(
        name="documents",
        about="sequences packed from documents",
        own={"documents": Documents(lengths=((512, 1),))},
        needs=({}, {"document_cuts": "documents"}),
    )
    yield Feature(name="fp8", about="linear products in FP8", own={"fp8": "tensor"})
    yield Feature(name="adapters", about="low-rank adapters (LoRA)", own={"adapters": "r=8,alpha=8,targets=qkv+proj"})
    yield Feature(name="grpo", about="a policy's objective", own={"objective": "grpo"})
    yield Feature(name="states-host", about="optimizer states on the host", own={"states": "host"})
    yield Feature(name="states-pure", about="no master weights", own={"states": "pure-bf16"})
    yield Feature(
        name="plain-attention",
        about="attention without a flash kernel",
        own={"kernels.attention": "plain"},
        needs=({"memory_policy": "caching"}, {"memory_policy": "eager"}),
    )
    about = {
        "planned": "one arena with planned addresses",
        "caching": "PyTorch's caching allocator",
        "eager": "an eager framework on it",
    }
    for policy in get_args(MemoryPolicy):
        ways = EAGER if policy == "eager" else ({},)
        yield Feature(name=policy, about=about[policy], own={"memory_policy": policy}, needs=ways)


FEATURES: dict[str, Feature] = {feature.name: feature for feature in _features()}
"""By name, in the order of the table."""


def _option(where: str) -> str:
    """Return the option of a decision; of a field of the model, that the model has it."""
    part, _, name = where.rpartition(".")
    if part == "model":
        return f"{MODELS_OWN} {name}"
    knob = KNOBS.get({"swapped": "alpha", "sequence_parallel": "tp", "virtual_stages": "schedule"}.get(name, name))
    return knob.option if knob else name


def decisions_of(changes: Changes) -> Decisions:
    """Return the smallest decisions with these values: one micro-batch for each stage and replica.

    Raises:
        Infeasible: when no model has all of these features.
    """
    parts: dict[str, dict[str, Any]] = {"": {}, "model": {}, "layout": {}, "kernels": {}}
    for where, value in changes.items():
        part, _, name = where.rpartition(".")
        parts[part][name] = value
    layout, fields = Layout(**parts["layout"]), parts[""]
    swapped = fields.pop("swapped", 0.0)
    try:
        model = msgspec.structs.replace(MODEL, **parts["model"])
    except ValueError as error:
        got, wanted = " and ".join(parts["model"]), "a model that has one of them"
        raise Infeasible(str(error), where="model", got=got, wanted=wanted, hint="another model") from None
    batch = fields.get("micro_batch", 1) * layout.dp * (1 if layout.multiplexed else layout.pp)
    made = Decisions(
        model=model,
        layout=layout,
        seq_tokens=SEQ_TOKENS,
        global_batch=batch,
        kernels=Kernels(**parts["kernels"]),
        **fields,
    )
    if not swapped:
        return made
    granule = made.swap_granule
    if swapped == 1 or layout.subsequences == 1:
        tokens = made.local_tokens if swapped == 1 else int(swapped * made.local_tokens) // granule * granule
        return msgspec.structs.replace(made, swapped_tokens=tokens)
    each = tuple(int(swapped * tokens) // granule * granule for tokens in partition(made))
    return msgspec.structs.replace(made, swapped_tokens=sum(each), subsequence_swapped_tokens=each)


def candidates(first: Feature, second: Feature) -> list[Changes]:
    """Return the values that have both features, one for each way to have them.

    What a feature is itself stands above what the other one needs; where their needs differ, each counts once.
    """
    found: list[Changes] = []
    for mine, theirs in product(first.needs, second.needs):
        for needs in ({**mine, **theirs}, {**theirs, **mine}):
            changes = {**needs, **first.own, **second.own}
            if changes not in found:
                found.append(changes)
    return found


def pair(first: Feature, second: Feature) -> Pair:
    """Return whether two features go together, and if not, why the first way to have both is refused."""
    found = Pair(first=first.name, second=second.name, together=False)
    if knob := same_knob(first, second):
        return msgspec.structs.replace(found, one_knob=True, reason=f"both are values of {knob}")
    refusals = [refusal(changes) for changes in candidates(first, second)]
    if refusals[0] is None or None in refusals:
        return msgspec.structs.replace(found, together=True)
    rule, error = refusals[0]
    return msgspec.structs.replace(found, rule=rule, reason=error.what, hint=error.hint or "")


def same_knob(first: Feature, second: Feature) -> str:
    """Return the knob of which two features are different values; empty where there is none."""
    same = [where for where, value in first.own.items() if second.own.get(where, value) != value]
    return _option(same[0]) if same else ""


def refusal(changes: Changes) -> tuple[str, Infeasible] | None:
    """Return why the decisions with these values are refused, with the rule's name; None where they are not.

    The name is empty where sizes do not divide, or where no model has the features.
    """
    try:
        decisions = decisions_of(changes)
        for rule in (*RULES, *ARENA_RULES):
            if rule.breaks(decisions):
                return rule.name, rule.refusal(decisions)
        shape_of(decisions)
        stages_of(decisions)
    except Infeasible as error:
        return "", error
    return None


@cache
def all_combinations() -> Combinations:
    """Return every feature, and every two of them."""
    return Combinations(
        features=[NamedFeature(name=f.name, about=f.about, options=f.options) for f in FEATURES.values()],
        pairs=[pair(first, second) for first, second in combinations(FEATURES.values(), 2)],
    )


def combinations_of(names: Sequence[str]) -> Combinations:
    """Return all combinations; with one name those of this feature, with two this pair.

    Raises:
        UsageError: for a name that is no feature's, the same name twice, or more than two names.
    """
    for name in names:
        if name not in FEATURES:
            hint = did_you_mean(name, FEATURES) or "memo-sim list combinations names them"
            raise UsageError("no such feature", got=repr(name), wanted=", ".join(FEATURES), hint=hint)
    if len(names) > 2 or len(set(names)) < len(names):
        raise UsageError("features are asked about in pairs", got=", ".join(names), wanted="one or two different names")
    whole = all_combinations()
    if not names:
        return whole
    kept = [each for each in whole.pairs if set(names) <= {each.first, each.second}]
    named = {name for each in kept for name in (each.first, each.second)}
    return Combinations(features=[f for f in whole.features if f.name in named], pairs=kept)
