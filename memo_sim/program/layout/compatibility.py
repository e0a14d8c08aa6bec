"""Which knobs do not go together: one table of rules, each with the message that a user gets.

``shape_of``, and so ``lower``, refuses decisions that break a rule of ``RULES``; the search reads the same rules to
leave such plans out. ``ARENA_RULES`` are about memory policies: a program can be written all the same, so the search
alone refuses them. Whether a degree divides a size of the model or the sequence is no rule of this table: ``shape.py``,
``stage.py`` and ``attention_chunks.py`` check that.

How to add a rule: write it at its place in ``RULES`` (the message names the first broken rule), and give
``tests/sim/program/layout/test_compatibility.py`` decisions that break this rule and no other.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from operator import attrgetter

from memo_sim.contract.attention_kernels import ATTENTION_KERNELS, takes_values
from memo_sim.contract.errors import Infeasible
from memo_sim.contract.plan import Decisions
from memo_sim.program.layout.attention_chunks import in_chunks
from memo_sim.program.layout.expert_load import measured_shares, shown_load
from memo_sim.program.layout.parameters import gradient_dtype, without_masters
from memo_sim.program.layout.recomputed_layers import ALL, in_groups
from memo_sim.program.layout.stage import layers_of_runs

MOST_ZERO_OF_STAGES = 1
"""Pipeline stages keep whole parameters and gradients, which ZeRO 2 and 3 would divide."""

MOST_ZERO_OF_GROUPS = 2
"""Layers of a group run forward again with parameters that no gather brings."""

FLASH1_HEAD_DIM = 128
"""Largest head size of flash-attn 1 (csrc/flash_attn/fmha_api.cpp and flash_attn_triton.py at v1.0.9)."""

KEEPS_ALL_TOKENS = ("selective", "norms", "mlp", "operators")
"""Recompute modes that keep some tensors of all tokens, and swap none."""

Test = Callable[[Decisions], bool]
Text = str | Callable[[Decisions], str]


@dataclass(frozen=True, slots=True, kw_only=True)
class Rule:
    """Decisions that do not go together, and the message that refuses them."""

    name: str
    breaks: Test
    """Whether decisions break the rule."""
    what: Text
    where: str
    """The decision that has to change, named as in a plan file."""
    got: Text
    wanted: str
    hint: str

    def refusal(self, decisions: Decisions) -> Infeasible:
        """Return the error for decisions that break the rule."""
        what, got = (text if isinstance(text, str) else text(decisions) for text in (self.what, self.got))
        return Infeasible(what, where=self.where, got=got, wanted=self.wanted, hint=self.hint)


def check_compatible(decisions: Decisions) -> None:
    """Refuse decisions that do not go together.

    Raises:
        Infeasible: naming the first rule of the table that they break.
    """
    for rule in RULES:
        if rule.breaks(decisions):
            raise rule.refusal(decisions)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Feature:
    """What several rules share: a layout, a kernel or a policy beside which other knobs have few values."""

    name: str
    chosen: Test
    beside: str = ""
    """How a message refers to the feature: ``beside METP``."""
    what: str = ""
    """What a message says instead, where that is the same for every knob."""
    setting: Text
    """The decision behind it: ``metp 4``."""
    hint: str

    def allows(
        self, where: str, *allowed: object, wanted: str = "", because: str = "", when: Test | None = None
    ) -> Rule:
        """Return the rule that beside the feature the decision at ``where`` is one of ``allowed``.

        ``wanted`` replaces the list of allowed values in the message, ``because`` stands before the feature's hint.
        ``when`` replaces the feature's own condition; without ``allowed`` it is the whole rule.
        """
        chosen, knob = when or self.chosen, where.rpartition(".")[2]
        value = attrgetter(where.removeprefix("decisions."))

        def word(decisions: Decisions) -> str:
            return _word(value(decisions))

        def got(decisions: Decisions) -> str:
            setting = self.setting if isinstance(self.setting, str) else self.setting(decisions)
            return f"{word(decisions)} with {setting}"

        return Rule(
            name=f"{self.name}: {knob}",
            breaks=lambda d: chosen(d) and value(d) not in allowed,
            what=self.what or (lambda d: f"{knob} {word(d)} has no lowering {self.beside}"),
            where=where,
            got=got,
            wanted=wanted or _listed(allowed),
            hint=f"{because}; {self.hint}" if because else self.hint,
        )


def _listed(allowed: Sequence[object]) -> str:
    """Return ``a, b or c``."""
    *others, last = map(_word, allowed)
    return f"{', '.join(others)} or {last}" if others else last


def _word(value: object) -> str:
    """Return a decision's value as plan files write it."""
    return str(value).lower() if isinstance(value, bool) else str(value)


def _staged(decisions: Decisions) -> bool:
    return decisions.layout.pp > 1


def _swaps(decisions: Decisions) -> bool:
    return decisions.swapped_tokens > 0 or decisions.recompute == "tokenwise"


def saves_of_modules(decisions: Decisions) -> bool:
    """Return whether layers keep what Hugging Face's modules save between forward and backward.

    Under full recompute they keep their inputs alone (``memory/huggingface.py``).
    """
    return decisions.modules == "huggingface" and decisions.recompute in ("none", "tokenwise")


_METP = _Feature(
    name="METP",
    chosen=lambda d: d.layout.metp > 1,
    beside="beside METP",
    setting=lambda d: f"metp {d.layout.metp}",
    hint="dp, pp and ZeRO go with METP",
)
_RSA = _Feature(
    name="ring self-attention",
    chosen=lambda d: d.layout.cp_exchange == "rsa",
    beside="beside ring self-attention",
    setting="cp_exchange rsa",
    hint="tp, pp, dp and ZeRO go with it, and what it keeps is rebuilt; only the inputs of full recompute are swapped",
)
_CHUNKS = _Feature(
    name="attention in chunks",
    chosen=in_chunks,
    beside="with attention in chunks",
    setting=lambda d: f"chunks of {d.attention_chunk_tokens} tokens",
    hint="leave --attention-chunk out; tp, ulysses, dp, pp and ZeRO go with it, under full recompute",
)
_TP_CHUNKS = _Feature(
    name="tensor parallelism in chunks",
    chosen=lambda d: d.layout.tp_overlap == "chunked",
    beside="with --tp-overlap chunked",
    setting="tp_overlap chunked",
    hint="leave --tp-overlap out; cp, Ulysses, pp, dp and ZeRO go with it",
)
_BIDIRECTIONAL = _Feature(
    name="bidirectional model",
    chosen=lambda d: d.model.bidirectional,
    beside="without a causal mask",
    setting="a bidirectional model",
    hint="a model with causal attention, or tp, cp (ring), Ulysses, METP, dp and pp of whole sequences",
)
_MODULES = _Feature(
    name="saved tensors of modules",
    chosen=saves_of_modules,
    beside="where layers keep what Hugging Face's modules save",
    setting=lambda d: f"modules {d.modules}, recompute {d.recompute}",
    hint="cp, dp and ZeRO go with them; or --modules operators, or --recompute full",
)
_SUBSEQUENCES = _Feature(
    name="subsequences",
    chosen=lambda d: d.layout.subsequences > 1,
    what="subsequences divide one whole sequence",
    setting=lambda d: f"{d.layout.subsequences} subsequences",
    hint="tp, pp and dp go with --subsequences",
)
_SOME_LAYERS = _Feature(
    name="layers of full recompute",
    chosen=lambda d: d.recompute_layers != ALL,
    beside="where full recompute is not about each layer by itself",
    setting=lambda d: f"recompute_layers {d.recompute_layers}",
    hint="leave --recompute-layers out; tp, cp, Ulysses, pp, dp and ZeRO go with it",
)
_EXPERTS = _Feature(
    name="experts",
    chosen=lambda d: d.model.mixture is not None,
    beside="beside experts",
    setting="a model with experts",
    hint="tp, cp, Ulysses, dp, pp and ZeRO go with experts, and every recompute but operators",
)
_LATENT = _Feature(
    name="latent attention",
    chosen=lambda d: d.model.latent is not None,
    beside="beside latent attention",
    setting="a model with latent attention",
    hint="tp, cp, Ulysses, dp, pp and ZeRO go with latents, and every recompute but operators",
)
_MODULE_EXPERTS = replace(
    _EXPERTS,
    name="experts of modules",
    chosen=lambda d: d.model.mixture is not None and d.modules == "huggingface",
    hint="cp, dp and ZeRO go with them under full recompute (--system trl-fsdp2)",
)
_FP8 = _Feature(
    name="FP8",
    chosen=lambda d: d.fp8 != "none",
    beside="beside products in FP8",
    setting=lambda d: f"fp8 {d.fp8}",
    hint="tp, cp, Ulysses, pp, dp, ZeRO, swapping and subsequences go with FP8; or leave --fp8 out",
)
IN_FP8 = (
    _FP8.allows("decisions.dtype", "bf16", because="quantisation reads bf16"),
    _FP8.allows("layout.metp", 1, because="METP would pass FP8 copies of its weights round the ring"),
    _FP8.allows("layout.tp_overlap", "none", because="chunks would each be quantised by themselves"),
    _FP8.allows("layout.multiplexed", False, because="helper stages would need the FP8 copies of the owner's weights"),
    _FP8.allows(
        "layout.schedule",
        *("gpipe", "1f1b", "interleaved"),
        because="deferred weight gradients would have to keep gradients in FP8",
        when=lambda d: d.fp8 != "none" and _staged(d),
    ),
    _FP8.allows("decisions.mlp_rebuild", "block", because="frameworks that rebuild an MLP like this have no FP8"),
    _FP8.allows(
        "decisions.recompute",
        *("none", "full", "selective", "tokenwise"),
        because="what other modes rebuild is kept in FP8 alone",
    ),
    _FP8.allows(
        "decisions.modules", "auto", "operators", because="memo has no list of what FP8 modules of transformers save"
    ),
    _FP8.allows("decisions.adapters", "none", because="frozen products need no copies for the gradients of weights"),
    _FP8.allows(
        "decisions.grad_sums", "auto", "fp32", "params", because="autocast casts fp32 weights to bf16, not to FP8"
    ),
)
_DOCUMENTS = _Feature(
    name="packed documents",
    chosen=lambda d: d.documents is not None,
    beside="beside packed documents",
    setting="documents",
    hint="tp, cp (ring or all-gather), Ulysses, pp, dp, ZeRO and every recompute mode go with --documents",
)
_ADAPTERS = _Feature(
    name="adapters",
    chosen=lambda d: d.lora is not None,
    beside="beside low-rank adapters",
    setting=lambda d: f"adapters {d.adapters}",
    hint="tp, cp, Ulysses, pp, dp, ZeRO, subsequences and every recompute but operators go with --lora",
)
UNDIVIDED_LOSSES = ("eager-fp32", "checkpointed", "checkpointed-fp32")
"""Forms of the loss that need the logits of the whole vocabulary."""
_UNLIKE = _Feature(
    name="layers that differ",
    chosen=lambda d: len(d.model.layer_shapes) > 1,
    beside="for layers that differ",
    setting=lambda d: f"layers of {len(d.model.layer_shapes)} kinds",
    hint="tp, cp, Ulysses, pp, dp, ZeRO, every recompute mode and swapping go with them",
)
_WHOLE_SEQUENCES = "a ring of whole sequences, or one rank, and a flash kernel"

_CAST = _Feature(
    name="cast parameters",
    chosen=lambda d: d.zero_params == "cast",
    beside="beside parameters that every gather casts",
    setting="zero_params cast",
    hint="--zero-params stored",
)
_METRICS = _Feature(
    name="metrics from logits",
    chosen=lambda d: d.loss_metrics > 0,
    beside="beside metrics that read all logits of a micro-batch",
    setting=lambda d: f"loss_metrics {d.loss_metrics}",
    hint="leave --loss-metrics out",
)
METP_SCHEDULE = _METP.allows(
    "layout.schedule",
    *("gpipe", "1f1b", "interleaved"),
    because="deferred weight gradients would need the ring of weights, or its sums, once more",
    when=lambda d: d.layout.metp > 1 and _staged(d),
)
METP_WHOLE_MLP = _METP.allows("decisions.mlp_chunk_tokens", 0, because="METP cuts the MLP by features, not by rows")
NORMS_KEPT_UNDER_FULL_RECOMPUTE = Rule(
    name="METP: keep_norms",
    breaks=lambda d: d.layout.metp > 1 and d.keep_norms and d.recompute == "full",
    what="full recompute keeps a layer's input alone, and no norms",
    where="decisions.keep_norms",
    got="true with recompute full",
    wanted="recompute none or tokenwise",
    hint="leave --keep-norms out, or --recompute",
)
CHUNKS_UNDER_FULL_RECOMPUTE = Rule(
    name="attention in chunks: recompute",
    breaks=lambda d: in_chunks(d) and d.recompute != "full",
    what="attention in chunks needs full recompute",
    where="decisions.recompute",
    got=lambda d: f"recompute {d.recompute} with chunks of {d.attention_chunk_tokens} tokens",
    wanted="full",
    hint="--recompute full, or leave --attention-chunk out",
)
MLP_BLOCKS_UNDER_FULL_RECOMPUTE = Rule(
    name="MLP in row blocks: recompute",
    breaks=lambda d: d.mlp_chunk_tokens > 0 and d.recompute != "full",
    what="the MLP in row blocks needs full recompute",
    where="decisions.mlp_chunk_tokens",
    got=lambda d: f"{d.mlp_chunk_tokens} with recompute {d.recompute}",
    wanted="0, or recompute full",
    hint="--recompute full, or leave --mlp-chunk out",
)
EARLY_STOP_OF_FULL_RECOMPUTE = Rule(
    name="early stop: recompute",
    breaks=lambda d: d.early_stop and d.recompute != "full",
    what="only full recompute repeats what backward does not need",
    where="decisions.early_stop",
    got=lambda d: f"true with recompute {d.recompute}",
    wanted="false, or recompute full",
    hint="--recompute full, or leave --early-stop out",
)
MLP_BLOCKS_UNDER_ZERO_BUBBLE = Rule(
    name="MLP in row blocks: schedule",
    breaks=lambda d: d.layout.schedule == "zero-bubble" and _staged(d) and d.mlp_chunk_tokens > 0,
    what="deferred weight gradients need the inputs of the whole MLP",
    where="decisions.mlp_chunk_tokens",
    got=lambda d: f"{d.mlp_chunk_tokens} with the schedule zero-bubble",
    wanted="0",
    hint="leave --mlp-chunk out, or another --schedule",
)
LAYERS_OF_FULL_RECOMPUTE = Rule(
    name="layers of full recompute: recompute",
    breaks=lambda d: d.recompute_layers != ALL and d.recompute != "full",
    what="layers are chosen for full recompute alone",
    where="decisions.recompute_layers",
    got=lambda d: f"{d.recompute_layers} with recompute {d.recompute}",
    wanted="all, or recompute full",
    hint="--recompute full, or leave --recompute-layers out",
)
SOME_LAYERS = (
    LAYERS_OF_FULL_RECOMPUTE,
    _SOME_LAYERS.allows("decisions.swapped_tokens", 0, because="no layer's tensors are swapped beside kept ones"),
    _SOME_LAYERS.allows("decisions.mlp_chunk_tokens", 0, because="layers that keep everything keep the whole MLP"),
    _SOME_LAYERS.allows("decisions.attention_chunk_tokens", 0, because="other layers keep the whole attention"),
    _SOME_LAYERS.allows("decisions.rounding_buffers", False, because="two buffers hold layers that are all rebuilt"),
    _SOME_LAYERS.allows(
        "decisions.early_stop",
        False,
        because="the inner layers of a group need every output",
        when=lambda d: in_groups(d) and d.early_stop,
    ),
    _SOME_LAYERS.allows("layout.metp", 1, because="METP recomputes a part of every layer anyway"),
    _SOME_LAYERS.allows("layout.subsequences", 1, because="subsequences are priced with layers that are all alike"),
    _SOME_LAYERS.allows(
        "layout.zero",
        *(0, 1, 2),
        because="ZeRO 3 would gather the parameters of a whole group once more",
        when=lambda d: in_groups(d) and d.layout.zero > MOST_ZERO_OF_GROUPS,
    ),
)
SELECTIVE_SWAPS_NOTHING = Rule(
    name="selective recompute: swapped_tokens",
    breaks=lambda d: d.recompute in KEEPS_ALL_TOKENS and d.swapped_tokens > 0,
    what=lambda d: f"{d.recompute} recompute swaps nothing",
    where="decisions.swapped_tokens",
    got=lambda d: f"alpha {d.alpha:.3g} ({d.swapped_tokens} tokens) with recompute {d.recompute}",
    wanted="0",
    hint="leave --alpha out, or another --recompute",
)
ROUNDING_BUFFERS_OF_FULL_RECOMPUTE = Rule(
    name="rounding buffers: recompute",
    breaks=lambda d: d.rounding_buffers and d.recompute != "full",
    what="the choice of rounding buffers belongs to full recompute",
    where="decisions.rounding_buffers",
    got=lambda d: f"true with recompute {d.recompute}",
    wanted="false, or recompute full",
    hint="--recompute full, or leave --rounding-buffers out: plans that swap have them anyway",
)
VIRTUAL_STAGES_INTERLEAVE = Rule(
    name="virtual stages: schedule",
    breaks=lambda d: (d.layout.schedule == "interleaved" and _staged(d)) != (d.layout.virtual_stages > 1),
    what="virtual stages belong to the interleaved schedule",
    where="layout.virtual_stages",
    got=lambda d: f"{d.layout.virtual_stages} with the schedule {d.layout.schedule}, pp {d.layout.pp}",
    wanted="more than 1 with the schedule interleaved on several stages, else 1",
    hint="--schedule interleaved with --virtual-stages 2 or more, or neither",
)
MULTIPLEXING = (
    Rule(
        name="multiplexing: pp",
        breaks=lambda d: d.layout.multiplexed and not _staged(d),
        what="multiplexing needs several pipeline stages",
        where="layout.pp",
        got=lambda d: f"{d.layout.pp}",
        wanted="several stages",
        hint="--no-multiplexed",
    ),
    Rule(
        name="multiplexing: subsequences",
        breaks=lambda d: d.layout.multiplexed and d.layout.subsequences < d.layout.pp,
        what="multiplexing needs as many subsequences as stages, or more: fewer never fill the pipeline",
        where="layout.subsequences",
        got=lambda d: f"{d.layout.subsequences} with {d.layout.pp} stages",
        wanted="as many as stages, or more",
        hint="--no-multiplexed, or more --subsequences",
    ),
    Rule(
        name="multiplexing: global_batch",
        breaks=lambda d: d.layout.multiplexed and d.micro_batches != 1,
        what="multiplexing needs exactly one micro-batch",
        where="global_batch",
        got=lambda d: f"{d.micro_batches} micro-batches",
        wanted="one",
        hint="--no-multiplexed, or a global batch of micro-batch x dp",
    ),
    Rule(
        name="multiplexing: schedule",
        breaks=lambda d: d.layout.multiplexed and d.layout.schedule not in ("gpipe", "1f1b"),
        what="the schedule fills the idle time that multiplexing would use",
        where="layout.schedule",
        got=lambda d: d.layout.schedule,
        wanted="gpipe or 1f1b",
        hint="--no-multiplexed, or another --schedule",
    ),
    Rule(
        name="multiplexing: pp_layers",
        breaks=lambda d: d.layout.multiplexed and len(set(layers_of_runs(d))) > 1,
        what="multiplexing needs stages of equal numbers of layers: helper stages take rows in proportion to work",
        where="layout.pp_layers",
        got=lambda d: ", ".join(map(str, layers_of_runs(d))),
        wanted="equal numbers",
        hint="--no-multiplexed, or a --pp that divides the layers",
    ),
    Rule(
        name="multiplexing: memory_policy",
        breaks=lambda d: d.layout.multiplexed and d.memory_policy == "eager",
        what="no eager framework multiplexes",
        where="memory_policy",
        got="eager",
        wanted="planned or caching",
        hint="--no-multiplexed, or --memory-policy planned",
    ),
)

SAVED_BY_MODULES = (
    _MODULES.allows(
        "decisions.model.family", "llama", because="memo has no list of what the modules of other families save"
    ),
    _MODULES.allows("layout.tp", 1, because="memo_exec.tokenwise plays no row blocks of tensor-parallel layers"),
    _MODULES.allows("layout.ulysses", 1, because="memo has no list of what modules save around an all-to-all"),
    _MODULES.allows("layout.pp", 1, because="a transformers model is one stage"),
    _MODULES.allows("layout.subsequences", 1, because="a transformers model plays whole sequences"),
    _MODULES.allows("layout.cp_exchange", "ring", "all_gather", because="scores of whole rows are not kept"),
    _MODULES.allows(
        "decisions.kernels.attention",
        wanted="a flash kernel",
        because="memo has no list of what attention without one saves there",
        when=lambda d: saves_of_modules(d) and d.kernels.attention == "plain",
    ),
    _MODULES.allows(
        "decisions.micro_batch",
        1,
        because="row blocks of several sequences save a copy of attention's output, which is not in the list",
        when=lambda d: saves_of_modules(d) and d.recompute == "tokenwise",
    ),
    Rule(
        name="saved tensors of modules: swapped_tokens",
        breaks=lambda d: saves_of_modules(d) and d.recompute == "none" and 0 < d.swapped_tokens < d.local_tokens,
        what="nothing swaps some tokens of what Hugging Face's modules save and keeps the others",
        where="decisions.swapped_tokens",
        got=lambda d: f"{d.swapped_tokens} of {d.local_tokens} tokens with recompute none",
        wanted="no token, or all; with recompute tokenwise, any",
        hint="--recompute tokenwise, or --modules operators",
    ),
)


def _another_number_of_experts(decisions: Decisions) -> bool:
    of, load = decisions.model.mixture, decisions.expert_load
    return of is not None and load.startswith("measured-") and len(measured_shares(load) or ()) != of.count


def _moves_selection(decisions: Decisions) -> bool:
    of = decisions.model.mixture
    return of is not None and of.selection_rate > 0


EXPERTS_WHOLE_MLP = _EXPERTS.allows(
    "decisions.mlp_chunk_tokens", 0, because="blocks of tokens would each be routed by themselves"
)
EXPERTS = (
    _EXPERTS.allows("layout.tp_overlap", "none", because="experts need the rows of all tokens before their products"),
    _EXPERTS.allows("layout.metp", 1, because="METP's rings would carry all experts' weights"),
    _EXPERTS.allows("layout.subsequences", 1, because="each subsequence would be routed by itself"),
    _EXPERTS.allows(
        "decisions.recompute",
        *("none", "selective", "norms", "mlp", "full", "tokenwise"),
        because="every second product would have to be chosen among those of experts",
    ),
    EXPERTS_WHOLE_MLP,
    _EXPERTS.allows(
        "layout.schedule",
        *("gpipe", "1f1b", "interleaved"),
        because="deferred weight gradients would need every expert's rows once more",
        when=lambda d: d.model.mixture is not None and _staged(d),
    ),
    _EXPERTS.allows(
        "decisions.memory_policy",
        *("planned", "caching"),
        because="of frameworks' experts memo knows those of Hugging Face's modules: --system trl-fsdp2",
        when=lambda d: d.model.mixture is not None and d.modules != "huggingface",
    ),
    _EXPERTS.allows(
        "decisions.kernels.rowwise",
        *("torch", "triton"),
        because="of frameworks' kernels of experts memo knows Hugging Face's eager ones: --system trl-fsdp2",
        when=lambda d: d.model.mixture is not None and (d.modules, d.kernels.rowwise) != ("huggingface", "eager"),
    ),
    _MODULE_EXPERTS.allows(
        "decisions.recompute", "full", because="memo has no list of what experts of Hugging Face's modules save"
    ),
    Rule(
        name="experts of modules: kind",
        breaks=lambda d: (
            d.model.mixture is not None
            and d.modules == "huggingface"
            and (d.model.mixture.shared > 0 or d.model.mixture.bias or d.model.mixture.activation != "silu")
        ),
        what="of Hugging Face's experts memo knows those of Mixtral and Qwen3-MoE",
        where="model.experts",
        got="experts with a shared one, with biases, or with a clamped activation",
        wanted="experts without a shared one and biases, whose activation is silu",
        hint="--system any prices memo's own operators",
    ),
    _MODULE_EXPERTS.allows("layout.ep", 1, because="FSDP2 divides their weights, and gathers them layer by layer"),
    _MODULE_EXPERTS.allows("layout.tp", 1, because="memo knows experts of Hugging Face's modules on one rank alone"),
    Rule(
        name="experts: layer_pattern",
        breaks=lambda d: len({shape.experts for shape in d.model.layer_shapes if shape.experts}) > 1,
        what="layers with other experts than those of other layers have no lowering",
        where="model.layer_pattern",
        got="experts of several kinds",
        wanted="experts of one kind, beside layers without",
        hint="a model whose layers have the same experts, or none",
    ),
    Rule(
        name="selection bias: gradients",
        breaks=lambda d: _moves_selection(d) and (gradient_dtype(d) != "fp32" or without_masters(d)),
        what="a selection bias moves by small steps, and counts rows in the gradients' place: bf16 holds neither",
        where="decisions.states",
        got=lambda d: f"states {d.states}, gradients in {gradient_dtype(d)}",
        wanted="gradients and master weights in fp32",
        hint="--states fp32 without --grad-sums, or a model with selection_rate 0",
    ),
    Rule(
        name="load of experts: model",
        breaks=lambda d: d.expert_load != "balanced" and d.model.mixture is None,
        what="a model without experts has no load of experts",
        where="decisions.expert_load",
        got=lambda d: shown_load(d.expert_load),
        wanted="balanced",
        hint="leave --expert-load out",
    ),
    Rule(
        name="expert parallelism: model",
        breaks=lambda d: d.layout.ep > 1 and d.model.mixture is None,
        what="a model without experts has none to divide",
        where="layout.ep",
        got=lambda d: str(d.layout.ep),
        wanted="1",
        hint="leave --ep out, or a model with experts",
    ),
    Rule(
        name="expert parallelism: replicas",
        breaks=lambda d: d.layout.replicas % d.layout.ep > 0,
        what="the ranks with the same parameters do not make up whole groups that divide experts",
        where="layout.ep",
        got=lambda d: f"{d.layout.ep} of {d.layout.replicas} ranks",
        wanted="a divisor of cp x ulysses x dp",
        hint="another --ep, or more --dp, --cp or --ulysses; tp divides the features inside every expert",
    ),
    Rule(
        name="expert parallelism: zero_ranks",
        breaks=lambda d: d.layout.ep > 1 and d.layout.zero_ranks > 0,
        what="ZeRO over groups of replicas has no lowering beside experts that ranks divide",
        where="layout.zero_ranks",
        got=lambda d: f"{d.layout.zero_ranks} with ep {d.layout.ep}",
        wanted="0",
        hint="leave --zero-ranks out: the experts' states are divided over cp x ulysses x dp / ep ranks",
    ),
    Rule(
        name="capacity of experts: ep",
        breaks=lambda d: d.layout.ep == 1 and (d.expert_capacity > 0 or d.expert_overflow != "drop"),
        what="a rank with all experts has a place for every row",
        where="decisions.expert_capacity",
        got=lambda d: f"capacity {d.expert_capacity:g}, overflow {d.expert_overflow} with ep 1",
        wanted="0 and drop",
        hint="--ep 2 or more, or leave --expert-capacity and --expert-overflow out",
    ),
    Rule(
        name="load of experts: number",
        breaks=_another_number_of_experts,
        what="the load was measured with another number of experts, or has no rows",
        where="decisions.expert_load",
        got=lambda d: f"{len(measured_shares(d.expert_load) or ())} experts",
        wanted="as many as a layer of the model has",
        hint="a file of a run of this model, or zipf-S",
    ),
)

_WINDOWS = _Feature(
    name="windows",
    chosen=lambda d: _longest_window(d) > 0,
    beside="beside attention windows",
    setting=lambda d: f"a window of {_longest_window(d)} tokens",
    hint="tp, cp, Ulysses, subsequences, dp, pp and ZeRO go with windows, and every recompute",
)
_SINKS = _Feature(
    name="sinks",
    chosen=lambda d: d.model.sinks,
    beside="beside attention sinks",
    setting="a model with sinks",
    hint="tp, cp (ring, all-gather), Ulysses, subsequences, dp, pp and ZeRO go with sinks",
)
_POST_NORMS = _Feature(
    name="norms behind attention and MLP",
    chosen=lambda d: d.model.post_norms,
    beside="with norms behind attention and MLP",
    setting="a model with such norms",
    hint="tp, cp, Ulysses, subsequences, dp, pp and ZeRO go with them, under recompute none, tokenwise and full",
)
_GEMMAS = _Feature(
    name="Gemma's operators",
    chosen=lambda d: d.model.scaled_embeddings or bool(d.model.query_scalar) or d.model.activation != _usual(d),
    beside="with FFNs gated by gelu, scaled embeddings or a query scalar",
    setting="a model with them",
    hint="tp, cp (ring, all-gather), Ulysses, subsequences, dp, pp and ZeRO go with them",
)


def windowed(decisions: Decisions) -> bool:
    """Return whether any layer's window is shorter than the sequences."""
    return _longest_window(decisions) > 0


def _longest_window(decisions: Decisions) -> int:
    shapes = decisions.model.layer_shapes if decisions.model.windowed else ()
    return max((shape.window for shape in shapes if shape.window < decisions.seq_tokens), default=0)


def _usual(decisions: Decisions) -> str:
    """Return the activation of the MLP in the model's family; of GPT models, any."""
    return "silu" if decisions.model.gated else decisions.model.activation


def _chunk_tokens(decisions: Decisions) -> int:
    """Return the tokens of one of a rank's two chunks in zigzag order."""
    return decisions.seq_tokens // (2 * decisions.layout.cp)


WINDOWED = (
    Rule(
        name="windows: attention",
        breaks=lambda d: windowed(d) and not ATTENTION_KERNELS[d.kernels.attention].windows,
        what="the attention kernel has no argument for a window",
        where="decisions.kernels.attention",
        got=lambda d: f"{d.kernels.attention} with a window of {_longest_window(d)} tokens",
        wanted=", ".join(name for name, kernel in ATTENTION_KERNELS.items() if kernel.windows),
        hint="--attention flash",
    ),
    Rule(
        name="windows: modules",
        breaks=lambda d: windowed(d) and d.modules == "huggingface" and d.kernels.attention.startswith("torch-"),
        what="Hugging Face's modules give torch's attention a window as a mask of all pairs, which is not priced",
        where="decisions.kernels.attention",
        got=lambda d: f"{d.kernels.attention} with a window of {_longest_window(d)} tokens",
        wanted="a kernel of flash-attn",
        hint="--attention flash2 (attn_implementation flash_attention_2)",
    ),
    _WINDOWS.allows("layout.cp_exchange", "ring", "all_gather", because="it has scores of all keys"),
    _WINDOWS.allows("layout.metp", 1, because="METP's ring brings every rank's keys"),
    _WINDOWS.allows("decisions.attention_chunk_tokens", 0, because="each chunk's queries fetch all keys before them"),
    _WINDOWS.allows("layout.multiplexed", False, because="helper stages would need a window's rows of other stages"),
    _WINDOWS.allows(
        "decisions.micro_batch",
        1,
        when=lambda d: windowed(d) and d.layout.cp > 1,
        because="with cp each chunk of keys is sent by itself, of one sequence",
    ),
    Rule(
        name="windows: cp",
        breaks=lambda d: windowed(d) and d.layout.cp > 1 and _longest_window(d) > _chunk_tokens(d) + 1,
        what="the window is longer than a chunk of the sequence, so its keys lie on more than the neighbouring ranks",
        where="layout.cp",
        got=lambda d: f"cp {d.layout.cp}, chunks of {_chunk_tokens(d)} tokens, a window of {_longest_window(d)}",
        wanted="at most one token more than a chunk, of 2 x cp",
        hint="a smaller --cp, or --ulysses",
    ),
    _SINKS.allows("layout.cp_exchange", "ring", "all_gather", because="it keeps no log-sum-exp"),
    _SINKS.allows("layout.metp", 1),
    _SINKS.allows("decisions.attention_chunk_tokens", 0, because="chunks are merged key by key"),
    _SINKS.allows("layout.multiplexed", False, because="helper stages merge what several stages compute"),
    _SINKS.allows(
        "decisions.modules", "auto", "operators", because="what Hugging Face's modules save of sinks is not known"
    ),
    _SINKS.allows(
        "decisions.recompute",
        *("none", "tokenwise", "full", "mlp", "norms", "operators"),
        because="selective recompute repeats attention by itself",
    ),
    Rule(
        name="sinks: attention",
        breaks=lambda d: d.model.sinks and d.kernels.attention == "plain",
        what="attention without a flash kernel has no log-sum-exp, into which sinks are written",
        where="decisions.kernels.attention",
        got="plain with a model with sinks",
        wanted="a flash kernel",
        hint="--attention flash",
    ),
    _POST_NORMS.allows("layout.metp", 1),
    _POST_NORMS.allows("decisions.mlp_chunk_tokens", 0, because="the norm behind the MLP needs its whole output kept"),
    _POST_NORMS.allows("decisions.attention_chunk_tokens", 0),
    _POST_NORMS.allows("decisions.recompute", "none", "tokenwise", "full"),
    _POST_NORMS.allows(
        "decisions.modules", "auto", "operators", because="what Hugging Face's modules save of them is not known"
    ),
    _POST_NORMS.allows(
        "layout.schedule",
        *("gpipe", "1f1b", "interleaved"),
        because="deferred weight gradients would need the gradients before these norms",
        when=lambda d: d.model.post_norms and _staged(d),
    ),
    _POST_NORMS.allows("layout.multiplexed", False),
    _GEMMAS.allows("layout.cp_exchange", "ring", "all_gather"),
    _GEMMAS.allows(
        "decisions.modules", "auto", "operators", because="what Hugging Face's modules save of them is not known"
    ),
)

CUTS_OF_DOCUMENTS = Rule(
    name="cuts of documents: documents",
    breaks=lambda d: d.documents is None and d.document_cuts != "sequence",
    what="without documents there is nothing to cut but the sequence",
    where="decisions.document_cuts",
    got="documents, but none are given",
    wanted="sequence",
    hint="--documents mean=2k,max=64k, or leave --document-cuts out",
)

DOCUMENTS = (
    _DOCUMENTS.allows(
        "layout.metp", 1, because="METP's ring of keys and values would need the documents of every rank's rows"
    ),
    _DOCUMENTS.allows(
        "layout.cp_exchange", "ring", "all_gather", because="whole rows of scores have no mask of documents"
    ),
    _DOCUMENTS.allows(
        "decisions.micro_batch",
        1,
        because="the gathered keys of several sequences lie apart",
        when=lambda d: d.documents is not None and d.layout.cp_exchange == "all_gather" and d.micro_batch > 1,
    ),
    _DOCUMENTS.allows(
        "layout.subsequences", 1, because="the pairs of a subsequence with its prefix would depend on the step"
    ),
    _DOCUMENTS.allows(
        "decisions.attention_chunk_tokens", 0, because="the pairs of two chunks would depend on the step"
    ),
    Rule(
        name="packed documents: attention",
        breaks=lambda d: d.documents is not None and not ATTENTION_KERNELS[d.kernels.attention].documents,
        what="the attention kernel has no form for packed documents",
        where="decisions.kernels.attention",
        got=lambda d: d.kernels.attention,
        wanted=" or ".join(name for name, kernel in ATTENTION_KERNELS.items() if kernel.documents),
        hint="--attention flash, or leave --documents out",
    ),
    _DOCUMENTS.allows("decisions.cuda_graphs", False, because="the grid of a kernel depends on the documents"),
    Rule(
        name="packed documents: bidirectional",
        breaks=lambda d: d.documents is not None and d.model.bidirectional,
        what="packed documents have a causal mask",
        where="model.bidirectional",
        got="true with documents",
        wanted="false",
        hint="leave --documents out, or a model with causal attention",
    ),
    Rule(
        name="packed documents: windows",
        breaks=lambda d: d.documents is not None and windowed(d) and d.layout.cp > 1,
        what="context parallelism has no lowering of attention windows beside packed documents",
        where="layout.cp",
        got=lambda d: f"cp {d.layout.cp} with documents and a window of {_longest_window(d)} tokens",
        wanted="1",
        hint="--cp 1 with tp or Ulysses, or leave --documents out",
    ),
    CUTS_OF_DOCUMENTS,
    Rule(
        name="packed documents: most",
        breaks=lambda d: d.documents is not None and d.documents.most > d.seq_tokens,
        what="a sequence has more documents than tokens",
        where="decisions.documents.most",
        got=lambda d: f"{d.documents.most if d.documents else 0} of {d.seq_tokens} tokens",
        wanted="at most the tokens of a sequence",
        hint="a smaller most=, or leave it out",
    ),
)

LATENT = (
    _LATENT.allows("decisions.adapters", "none", because="adapters would be of products that latents do not have"),
    _LATENT.allows("decisions.fp8", "none", because="the products of latents have no FP8 form"),
    _LATENT.allows(
        "layout.metp", 1, because="METP passes the weights of Q, K and V round its ring, not those of latents"
    ),
    _LATENT.allows(
        "layout.tp_overlap", "none", because="the latents are gathered, and no chunks of them are multiplied"
    ),
    _LATENT.allows(
        "layout.cp_exchange", "ring", "all_gather", because="scores of whole rows need equal widths of K and V"
    ),
    _LATENT.allows("layout.uneven_heads", False, because="ranks exchange equal numbers of heads"),
    _LATENT.allows("layout.subsequences", 1, because="the KV cache of a prefix would hold expanded keys and values"),
    _LATENT.allows("decisions.attention_chunk_tokens", 0, because="chunks of tokens would be expanded one by one"),
    _LATENT.allows("model.bidirectional", False, because="no such model has a latent"),
    _LATENT.allows(
        "decisions.recompute",
        *("none", "selective", "norms", "mlp", "full", "tokenwise"),
        because="every second product would have to be chosen among those of latents",
    ),
    _LATENT.allows(
        "layout.schedule",
        *("gpipe", "1f1b", "interleaved"),
        because="deferred weight gradients would need the gradients of every product of latents",
        when=lambda d: d.model.latent is not None and _staged(d),
    ),
    _LATENT.allows(
        "decisions.memory_policy",
        *("planned", "caching"),
        because="no framework's kernels of latents are known: --system memo, any or every-layout",
    ),
    _LATENT.allows(
        "decisions.kernels.rowwise", "torch", "triton", because="no framework's kernels of latents are known"
    ),
    Rule(
        name="latent attention: attention",
        breaks=lambda d: not takes_values(d.kernels.attention, d.model.head_dim, d.model.value_dim),
        what="the kernel has no form for these widths of keys and values",
        where="decisions.kernels.attention",
        got=lambda d: f"{d.kernels.attention} with heads of {d.model.head_dim} and values of {d.model.value_dim}",
        wanted="a kernel that takes them, or pads the values",
        hint="--attention flash2 pads values with zeros; --attention cudnn takes both widths",
    ),
    Rule(
        name="rebuild_qkv: model",
        breaks=lambda d: d.rebuild_qkv and d.model.latent is None,
        what="without latents there is nothing narrower to compute Q, K and V from",
        where="decisions.rebuild_qkv",
        got="true with a model without latent attention",
        wanted="false",
        hint="leave --rebuild-qkv out, or --recompute tokenwise",
    ),
    Rule(
        name="rebuild_qkv: recompute",
        breaks=lambda d: d.rebuild_qkv and d.recompute == "full",
        what="full recompute computes Q, K and V again anyway",
        where="decisions.rebuild_qkv",
        got="true with recompute full",
        wanted="false, or another recompute",
        hint="leave --rebuild-qkv out, or --recompute tokenwise",
    ),
)
ADAPTERS = (
    Rule(
        name="adapters: model",
        breaks=lambda d: (
            d.lora is not None
            and not any(d.lora.targets_of(product, d.model) for product in ("qkv", "proj", "ffn_up", "ffn_down"))
        ),
        what="the model has none of the products that adapters are given for",
        where="decisions.adapters",
        got=lambda d: f"{d.adapters} with a model without a gate",
        wanted="a target among q, k, v, proj, up and down",
        hint="--lora r=16,targets=up",
    ),
    Rule(
        name="adapters: experts",
        breaks=lambda d: bool(d.lora and d.model.mixture and {"gate", "up", "down"}.intersection(d.lora.targets)),
        what="adapters of experts have no lowering: each would need grouped products of its own",
        where="decisions.adapters",
        got=lambda d: f"{d.adapters} with a model with experts",
        wanted="targets among q, k, v and proj",
        hint="--lora r=16,targets=qkv+proj",
    ),
    _ADAPTERS.allows("layout.ep", 1, because="ranks that share frozen experts would keep no gradients of their block"),
    _ADAPTERS.allows("layout.metp", 1, because="METP's rings would carry the adapters with the weights"),
    _ADAPTERS.allows(
        "layout.tp_overlap", "none", because="the chunks of a product would each need their part of the adapter"
    ),
    _ADAPTERS.allows(
        "layout.schedule",
        *("gpipe", "1f1b", "interleaved"),
        because="frozen products leave hardly any weight gradients to defer",
        when=lambda d: d.lora is not None and _staged(d),
    ),
    _ADAPTERS.allows("layout.multiplexed", False, because="helper stages would need the gradients of the adapters"),
    _ADAPTERS.allows(
        "decisions.recompute",
        *("none", "selective", "norms", "mlp", "full", "tokenwise"),
        because="every second product would be rebuilt without its adapter",
    ),
    _ADAPTERS.allows(
        "decisions.memory_policy",
        *("planned", "caching"),
        because="no framework's tensors and kernels of adapters are known: --system memo, any or every-layout",
    ),
    _ADAPTERS.allows(
        "decisions.kernels.rowwise", "torch", "triton", because="no framework's kernels of adapters are known"
    ),
    _ADAPTERS.allows(
        "decisions.kernels.attention",
        wanted="a flash kernel",
        because="memo has not derived what plain attention keeps beside frozen products",
        when=lambda d: d.lora is not None and d.kernels.attention == "plain",
    ),
    _ADAPTERS.allows(
        "layout.cp_exchange",
        *("ring", "all_gather"),
        because="memo has not derived what ring self-attention keeps beside frozen products",
    ),
    _ADAPTERS.allows(
        "decisions.loss",
        *("auto", "blocks", "fused", "eager-fp32", "vocab-parallel"),
        because="checkpointed losses make the gradient of a classifier, which is frozen",
    ),
)

RULES = (
    *EXPERTS,
    *LATENT,
    *IN_FP8,
    *WINDOWED,
    *DOCUMENTS,
    *ADAPTERS,
    *MULTIPLEXING,
    VIRTUAL_STAGES_INTERLEAVE,
    Rule(
        name="virtual stages: overlap_p2p",
        breaks=lambda d: d.layout.virtual_stages > 1 and not d.layout.overlap_p2p,
        what="the interleaved schedule needs overlapped p2p: stages that wait for it would wait for each other",
        where="layout.overlap_p2p",
        got="false",
        wanted="true",
        hint="another --schedule",
    ),
    Rule(
        name="pipeline stages: zero",
        breaks=lambda d: _staged(d) and d.layout.zero > MOST_ZERO_OF_STAGES,
        what="pipeline stages keep whole parameters and gradients",
        where="layout.zero",
        got=lambda d: f"{d.layout.zero} with pp {d.layout.pp}",
        wanted="0 or 1",
        hint="--zero 1: ZeRO 2 and 3 would gather and scatter for every micro-batch of every stage",
    ),
    Rule(
        name="ranks of ZeRO: zero",
        breaks=lambda d: d.layout.zero_ranks > 0 and d.layout.zero == 0,
        what="ranks of ZeRO without ZeRO have no effect",
        where="layout.zero_ranks",
        got=lambda d: f"{d.layout.zero_ranks} with zero 0",
        wanted="0",
        hint="--zero 1 or more, or leave --zero-ranks out",
    ),
    Rule(
        name="ranks of ZeRO: replicas",
        breaks=lambda d: d.layout.zero_ranks > 0 and d.layout.replicas % d.layout.zero_ranks > 0,
        what="the ranks with the same parameters do not make up whole groups of ZeRO",
        where="layout.zero_ranks",
        got=lambda d: f"{d.layout.zero_ranks} of {d.layout.replicas} ranks",
        wanted="a divisor of cp x ulysses x dp",
        hint="another --zero-ranks, or leave it out: ZeRO then divides over all of them",
    ),
    MLP_BLOCKS_UNDER_ZERO_BUBBLE,
    Rule(
        name="keep_norms: metp",
        breaks=lambda d: d.keep_norms and d.layout.metp == 1,
        what="a layer that is not METP's keeps its norms anyway",
        where="decisions.keep_norms",
        got="true with metp 1",
        wanted="false",
        hint="leave it out, or divide by metp",
    ),
    *SAVED_BY_MODULES,
    _UNLIKE.allows("layout.metp", 1, because="METP passes equal weights of every layer round its ring"),
    _UNLIKE.allows("layout.subsequences", 1, because="subsequences are priced with layers that are all alike"),
    _UNLIKE.allows(
        "decisions.modules", "auto", "operators", because="Hugging Face's transformers has no model whose layers differ"
    ),
    _METP.allows("layout.tp", 1, because="METP divides the same rows and columns of a layer's weights as tp"),
    _METP.allows("layout.cp", 1, because="METP passes keys and values round a ring of its own"),
    _METP.allows(
        "layout.zero_ranks", 0, because="METP's layers and its embedding and head have different numbers of replicas"
    ),
    _METP.allows("layout.ulysses", 1, because="METP plays the heads part by part, which Ulysses would divide"),
    _METP.allows(
        "layout.subsequences",
        1,
        because="every subsequence would send METP's weights round the ring again, with the sums of their gradients",
    ),
    METP_SCHEDULE,
    _METP.allows(
        "decisions.recompute",
        *("none", "full", "tokenwise"),
        because="of what selective recompute drops METP keeps only attention's output, which full recompute rebuilds",
    ),
    METP_WHOLE_MLP,
    _METP.allows(
        "decisions.grad_sums",
        *("auto", "fp32"),
        because="METP passes the sums of its gradients round the ring in fp32",
    ),
    _METP.allows("decisions.early_stop", False, because="METP's full recompute plays whole rings"),
    _METP.allows(
        "decisions.states",
        "fp32",
        "bf16",
        "host",
        because="METP passes the sums of its gradients round the ring in fp32",
    ),
    _METP.allows(
        "decisions.memory_policy", "planned", "caching", because="memo has no model of an eager framework with METP"
    ),
    NORMS_KEPT_UNDER_FULL_RECOMPUTE,
    Rule(
        name="METP: attention",
        breaks=lambda d: d.layout.metp > 1 and d.kernels.attention == "plain",
        what="plain attention has no log-sum-exp to merge the ring's parts by",
        where="decisions.kernels.attention",
        got=lambda d: f"plain with metp {d.layout.metp}",
        wanted="a flash kernel",
        hint="another attention kernel, or cp, tp or Ulysses in place of metp",
    ),
    _TP_CHUNKS.allows(
        "layout.metp", 1, because="METP gathers no tokens: its weights pass round a ring, which overlaps already"
    ),
    Rule(
        name="tensor parallelism in chunks: tp",
        breaks=lambda d: d.layout.tp_overlap == "chunked" and d.layout.divided == 1,
        what="without tensor parallelism there are no collectives to cut into chunks",
        where="layout.tp",
        got="1 with tp_overlap chunked",
        wanted="2 or more",
        hint="--tp 2 or more, or leave --tp-overlap out",
    ),
    _TP_CHUNKS.allows(
        "layout.sequence_parallel",
        True,
        because="without sequence parallelism sums stay whole on every rank, and nothing is gathered",
        when=lambda d: d.layout.tp_overlap == "chunked" and d.layout.tp > 1,
    ),
    _TP_CHUNKS.allows(
        "layout.subsequences", 1, because="subsequences have templates that all tensor-parallel ranks share"
    ),
    _TP_CHUNKS.allows(
        "decisions.attention_chunk_tokens",
        0,
        because="attention in chunks gathers a part of the rows at a time already",
    ),
    _RSA.allows("layout.metp", 1),
    _RSA.allows("layout.ulysses", 1),
    _RSA.allows("layout.subsequences", 1),
    _RSA.allows("decisions.recompute", "none", "selective", "full"),
    _RSA.allows(
        "decisions.swapped_tokens",
        0,
        wanted="0, or recompute full",
        when=lambda d: d.layout.cp_exchange == "rsa" and d.recompute != "full",
    ),
    Rule(
        name="ring self-attention: attention",
        breaks=lambda d: d.layout.cp_exchange == "rsa" and d.kernels.attention == "plain",
        what="plain attention keeps the scores of whole sequences, ring self-attention its own",
        where="decisions.kernels.attention",
        got="plain with cp_exchange rsa",
        wanted="the kernel that the machine has; ring self-attention plays none",
        hint="another attention kernel, or --cp-exchange ring",
    ),
    _CHUNKS.allows("model.bidirectional", False, wanted="a model with causal attention"),
    _CHUNKS.allows(
        "decisions.kernels.attention",
        wanted="a flash kernel",
        when=lambda d: in_chunks(d) and d.kernels.attention == "plain",
    ),
    CHUNKS_UNDER_FULL_RECOMPUTE,
    _CHUNKS.allows("decisions.micro_batch", 1),
    _CHUNKS.allows("layout.subsequences", 1),
    _CHUNKS.allows("layout.schedule", "1f1b", "gpipe", "interleaved", when=lambda d: in_chunks(d) and _staged(d)),
    _CHUNKS.allows("layout.cp_exchange", "ring", "all_gather"),
    _CHUNKS.allows("layout.cp", 1),
    _CHUNKS.allows("layout.metp", 1),
    _BIDIRECTIONAL.allows(
        "layout.cp_exchange",
        *("ring", "rsa"),
        wanted=_WHOLE_SEQUENCES,
        when=lambda d: d.model.bidirectional and d.layout.cp > 1,
    ),
    _BIDIRECTIONAL.allows("layout.subsequences", 1, wanted=_WHOLE_SEQUENCES),
    _BIDIRECTIONAL.allows(
        "decisions.kernels.attention",
        wanted=_WHOLE_SEQUENCES,
        when=lambda d: d.model.bidirectional and d.kernels.attention == "plain",
    ),
    Rule(
        name="offload window: subsequences",
        breaks=lambda d: d.offload_window > 0 and (d.layout.subsequences == 1 or not _swaps(d)),
        what="an offload window is for subsequences that are swapped",
        where="decisions.offload_window",
        got=lambda d: (
            f"{d.offload_window} with {d.layout.subsequences} subsequences, {d.swapped_tokens} tokens swapped"
        ),
        wanted="0",
        hint="--subsequences 8 and an --alpha above 0, or leave --offload-window out",
    ),
    Rule(
        name="rounding buffers: offload_window",
        breaks=lambda d: d.rounding_buffers and d.offload_window > 0,
        what="in an offload window each subsequence has buffers of its own",
        where="decisions.offload_window",
        got=lambda d: f"{d.offload_window} with rounding buffers",
        wanted="0",
        hint="--no-rounding-buffers, or leave --offload-window out",
    ),
    _SUBSEQUENCES.allows("micro_batch", 1),
    _SUBSEQUENCES.allows("layout.cp", 1),
    _SUBSEQUENCES.allows("layout.ulysses", 1),
    Rule(
        name="subsequences: attention",
        breaks=lambda d: d.layout.subsequences > 1 and d.kernels.attention == "plain",
        what="plain attention has no log-sum-exp to merge earlier keys by",
        where="decisions.kernels.attention",
        got=lambda d: f"plain with {d.layout.subsequences} subsequences",
        wanted="a flash kernel",
        hint="another attention kernel, or leave --subsequences out",
    ),
    Rule(
        name="subsequences: recompute",
        breaks=lambda d: d.layout.subsequences > 1 and d.recompute in KEEPS_ALL_TOKENS,
        what=lambda d: f"{d.recompute} recompute has no lowering with subsequences",
        where="decisions.recompute",
        got=lambda d: f"{d.recompute} with {d.layout.subsequences} subsequences",
        wanted="none, full or tokenwise",
        hint="--recompute full rebuilds attention too",
    ),
    SELECTIVE_SWAPS_NOTHING,
    *SOME_LAYERS,
    ROUNDING_BUFFERS_OF_FULL_RECOMPUTE,
    MLP_BLOCKS_UNDER_FULL_RECOMPUTE,
    EARLY_STOP_OF_FULL_RECOMPUTE,
    Rule(
        name="MLP rebuilt by frameworks: row blocks",
        breaks=lambda d: d.mlp_rebuild != "block" and not d.mlp_chunk_tokens,
        what="an MLP without row blocks is rebuilt with its layer",
        where="decisions.mlp_rebuild",
        got=lambda d: f"{d.mlp_rebuild} without row blocks",
        wanted="block",
        hint="--mlp-chunk 16384, or leave --mlp-rebuild out",
    ),
    Rule(
        name="MLP rebuilt by frameworks: tp",
        breaks=lambda d: d.mlp_rebuild != "block" and d.layout.tp > 1,
        what="the frameworks that rebuild row blocks like this do not divide the MLP by tensor parallelism",
        where="decisions.mlp_rebuild",
        got=lambda d: f"{d.mlp_rebuild} with tp {d.layout.tp}",
        wanted="block",
        hint="leave --mlp-rebuild out, or --tp 1",
    ),
    Rule(
        name="FlashAttention 1: head_dim",
        breaks=lambda d: d.kernels.attention in ("flash1", "triton-flash") and d.model.head_dim > FLASH1_HEAD_DIM,
        what="FlashAttention 1 has no kernel for heads of this size",
        where="decisions.kernels.attention",
        got=lambda d: f"{d.kernels.attention} with heads of {d.model.head_dim}",
        wanted=f"heads of at most {FLASH1_HEAD_DIM}",
        hint="another --attention",
    ),
    Rule(
        name="pure bf16 states: dtype",
        breaks=lambda d: without_masters(d) and d.dtype != "bf16",
        what="pure bf16 states have the dtype of the parameters",
        where="decisions.dtype",
        got=lambda d: f"{d.dtype} with states {d.states}",
        wanted="bf16",
        hint="--states fp32, or a device that computes in bf16",
    ),
    Rule(
        name="pure bf16 with fp32 moments: memory_policy",
        breaks=lambda d: d.states == "pure-bf16-fp32-moments" and d.memory_policy == "eager",
        what="torch's AdamW has moments in the parameters' dtype",
        where="decisions.states",
        got="pure-bf16-fp32-moments with memory policy eager",
        wanted="pure-bf16",
        hint="--states pure-bf16, or --memory-policy planned or caching",
    ),
    Rule(
        name="grad_sums fp32: memory_policy",
        breaks=lambda d: d.grad_sums == "fp32" and without_masters(d) and d.memory_policy == "eager",
        what="torch's modules in bf16 have gradients in bf16",
        where="decisions.grad_sums",
        got=lambda d: f"fp32 with states {d.states} and memory policy eager",
        wanted="auto",
        hint="leave --grad-sums out, or --memory-policy planned or caching",
    ),
    Rule(
        name="grad_sums params: dtype",
        breaks=lambda d: d.grad_sums == "params" and d.memory_policy != "eager" and d.dtype != "bf16",
        what="memo-exec sums gradients in fp32 or in bf16",
        where="decisions.grad_sums",
        got=lambda d: f"params with dtype {d.dtype}",
        wanted="auto, or params with dtype bf16",
        hint="leave --grad-sums out",
    ),
    Rule(
        name="grad_sums params: states",
        breaks=lambda d: d.grad_sums == "params" and d.memory_policy != "eager" and d.states == "host",
        what="AdamW on the host reads gradients in fp32",
        where="decisions.grad_sums",
        got="params with states host",
        wanted="auto",
        hint="leave --grad-sums out, or another --states",
    ),
    _CAST.allows("decisions.memory_policy", "eager", because="memo-exec stores a shard of parameters and gathers it"),
    _CAST.allows("layout.zero", 3, because="otherwise a rank has whole parameters"),
    _CAST.allows("decisions.states", "fp32", "bf16", because="there has to be an fp32 shard on the device"),
    _CAST.allows("decisions.dtype", "bf16", "fp16", because="fp32 parameters need no cast"),
    _METRICS.allows("decisions.memory_policy", "eager", because="memo-exec computes no metrics"),
    _METRICS.allows("layout.tp", 1, because="ranks of tp hold parts of the logits"),
    _METRICS.allows("layout.pp", 1, because="stages have no metrics here"),
    _METRICS.allows("layout.subsequences", 1, because="subsequences have logits of their own"),
    _METRICS.allows("decisions.loss", "blocks", "eager-fp32", because="the logits have to outlive the loss"),
    _METRICS.allows("decisions.loss_chunk_tokens", 0, because="chunks of the loss share the buffer of their logits"),
    Rule(
        name="eager-fp32 loss: tp",
        breaks=lambda d: d.loss in UNDIVIDED_LOSSES and d.layout.tp > 1,
        what="torch's cross_entropy needs the logits of the whole vocabulary, which tensor parallelism divides",
        where="decisions.loss",
        got=lambda d: f"{d.loss} with tp {d.layout.tp}",
        wanted="auto, blocks, fused or vocab-parallel",
        hint="--loss vocab-parallel, or --tp 1",
    ),
    Rule(
        name="plain attention: cp",
        breaks=lambda d: d.kernels.attention == "plain" and d.layout.cp > 1,
        what="plain attention cannot be divided by context parallelism: it has no log-sum-exp to merge parts by",
        where="layout.cp",
        got=lambda d: f"{d.layout.cp} with plain attention",
        wanted="1",
        hint="leave --cp out, or a flash kernel",
    ),
    Rule(
        name="plain attention: swapped_tokens",
        breaks=lambda d: d.kernels.attention == "plain" and _swaps(d) and d.recompute != "full",
        what="plain attention's scores are not swapped",
        where="decisions.swapped_tokens",
        got=lambda d: f"{d.swapped_tokens} with recompute {d.recompute}",
        wanted="recompute none or selective without swapping, or full",
        hint="--recompute full, or a flash kernel",
    ),
    Rule(
        name="plain attention: recompute",
        breaks=lambda d: d.kernels.attention == "plain" and d.recompute == "operators",
        what="recompute by operator keeps the output of one attention kernel, and plain attention is several",
        where="decisions.recompute",
        got="operators with plain attention",
        wanted="none, selective or full",
        hint="--recompute selective, or a flash kernel",
    ),
)
"""Combinations that no program is written for; the message names the first that applies."""

PLANNED_LIBRARIES = Rule(
    name="replay_allocator: memory_policy",
    breaks=lambda d: d.replay_allocator and d.memory_policy != "planned",
    what="libraries are served from a planned arena, and memory is not planned here",
    where="decisions.replay_allocator",
    got=lambda d: f"--replay-allocator with memory policy {d.memory_policy}",
    wanted="memory policy planned",
    hint="--memory-policy planned, or leave --replay-allocator out",
)
LIMITED_ALLOCATOR = Rule(
    name="allocator_limit_gib: memory_policy",
    breaks=lambda d: d.allocator_limit_gib > 0 and d.memory_policy == "planned",
    what="planned memory does not use PyTorch's allocator, so nothing can be limited",
    where="decisions.allocator_limit_gib",
    got=lambda d: f"{d.allocator_limit_gib} GiB with memory policy planned",
    wanted="0, or memory policy caching or eager",
    hint="leave --allocator-limit-gib out, or give --device-memory-gib",
)
GRAPHS_OF_EAGER = Rule(
    name="cuda_graphs: memory_policy",
    breaks=lambda d: d.cuda_graphs and d.memory_policy != "eager",
    what="CUDA graphs replace the launches of an eager framework, and memo-exec's launches cost nothing here",
    where="decisions.cuda_graphs",
    got=lambda d: f"--cuda-graphs with memory policy {d.memory_policy}",
    wanted="memory policy eager",
    hint="--memory-policy eager, or leave --cuda-graphs out",
)
PLANNED_PLAIN_ATTENTION = Rule(
    name="plain attention: memory_policy",
    breaks=lambda d: d.kernels.attention == "plain" and d.memory_policy == "planned",
    what="plain attention has no planned arena: it is torch's operators, which allocate their results themselves",
    where="decisions.memory_policy",
    got="planned with plain attention",
    wanted="caching or eager (in a case file: memory_plan no)",
    hint="--memory-policy eager",
)
STREAMS_OF_A_FRAMEWORK = Rule(
    name="streams: memory_policy",
    breaks=lambda d: d.streams != "auto" and d.memory_policy != "eager",
    what="only an eager framework waits for streams before it reuses memory",
    where="decisions.streams",
    got=lambda d: f"{d.streams} with memory policy {d.memory_policy}",
    wanted="memory policy eager",
    hint="--memory-policy eager, or leave --streams out",
)
SUMS_OF_A_FRAMEWORK = Rule(
    name="grad_sums: memory_policy",
    breaks=lambda d: d.grad_sums == "autocast" and d.memory_policy != "eager",
    what="memo-exec casts no parameters: they have the plan's dtype",
    where="decisions.grad_sums",
    got=lambda d: f"{d.grad_sums} with memory policy {d.memory_policy}",
    wanted="memory policy eager",
    hint="--memory-policy eager, or leave --grad-sums out",
)
AUTOCAST_OF_WHOLE_PARAMETERS = Rule(
    name="autocast: zero",
    breaks=lambda d: d.grad_sums == "autocast" and d.layout.zero > 1,
    what="FSDP casts the parameters that it gathers, not autocast",
    where="decisions.grad_sums",
    got=lambda d: f"{d.grad_sums} with ZeRO {d.layout.zero}",
    wanted="ZeRO 0 or 1",
    hint="--zero 1, or --zero-params cast without --grad-sums",
)
AUTOCAST_OF_FP32_STATES = Rule(
    name="autocast: states",
    breaks=lambda d: d.grad_sums == "autocast" and (d.states != "fp32" or d.dtype == "fp32"),
    what="autocast computes in another dtype than that of the fp32 parameters, which the device has whole",
    where="decisions.grad_sums",
    got=lambda d: f"{d.grad_sums} with states {d.states} of {d.dtype}",
    wanted="states fp32 and a dtype of two bytes",
    hint="--states fp32, or leave --grad-sums out",
)
FSDP_OF_A_FRAMEWORK = Rule(
    name="sharding: memory_policy",
    breaks=lambda d: d.sharding != "memo" and d.memory_policy != "eager",
    what="FSDP's passes over parameters and gradients are an eager framework's, which memo-exec does not make",
    where="decisions.sharding",
    got=lambda d: f"{d.sharding} with memory policy {d.memory_policy}",
    wanted="memory policy eager",
    hint="--memory-policy eager, or leave --sharding out",
)
REDUCED_BY_FSDP = Rule(
    name="reduce_dtype: sharding",
    breaks=lambda d: d.reduce_dtype != "auto" and d.sharding == "memo",
    what="only FSDP copies gradients before it reduces them, and so can change their dtype",
    where="decisions.reduce_dtype",
    got=lambda d: f"{d.reduce_dtype} with sharding {d.sharding}",
    wanted="sharding fsdp1 or fsdp2",
    hint="--sharding fsdp2, or leave --reduce-dtype out",
)
MODULES_OF_A_FRAMEWORK = Rule(
    name="modules: memory_policy",
    breaks=lambda d: d.modules == "huggingface" and d.memory_policy != "eager",
    what="memo-exec's operators are its own, whatever the memory",
    where="decisions.modules",
    got=lambda d: f"{d.modules} with memory policy {d.memory_policy}",
    wanted="memory policy eager",
    hint="--memory-policy eager, or leave --modules out",
)
MODULES_ARE_RECOMPUTED = Rule(
    name="modules: recompute",
    breaks=lambda d: d.modules == "huggingface" and d.recompute != "full" and not saves_of_modules(d),
    what="memo has no list of what Hugging Face's modules save under this recompute",
    where="decisions.modules",
    got=lambda d: f"{d.modules} with recompute {d.recompute}",
    wanted="recompute full, none or tokenwise",
    hint="--recompute full, or --modules operators",
)
ARENA_RULES = (
    PLANNED_LIBRARIES,
    LIMITED_ALLOCATOR,
    GRAPHS_OF_EAGER,
    PLANNED_PLAIN_ATTENTION,
    STREAMS_OF_A_FRAMEWORK,
    SUMS_OF_A_FRAMEWORK,
    AUTOCAST_OF_WHOLE_PARAMETERS,
    AUTOCAST_OF_FP32_STATES,
    FSDP_OF_A_FRAMEWORK,
    REDUCED_BY_FSDP,
    MODULES_OF_A_FRAMEWORK,
    MODULES_ARE_RECOMPUTED,
)
"""What no arena is planned for; programs can be written for it, and the search refuses it."""
