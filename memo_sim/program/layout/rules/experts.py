"""What experts, and their division over ranks, do not go with."""

from __future__ import annotations

from dataclasses import replace

from memo_sim.contract.plan import Decisions
from memo_sim.contract.systems import DEFAULT_SYSTEM
from memo_sim.program.layout.expert_load import measured_shares, shown_load
from memo_sim.program.layout.parameters import gradient_dtype, without_masters
from memo_sim.program.layout.rowwise_blocks import is_rowwise
from memo_sim.program.layout.rules.feature import Feature
from memo_sim.program.layout.rules.pipeline_stages import staged
from memo_sim.program.layout.rules.rule import Rule

_EXPERTS = Feature(
    name="experts",
    chosen=lambda d: d.model.mixture is not None,
    beside="beside experts",
    setting="a model with experts",
    hint="tp, cp, Ulysses, dp, pp and ZeRO go with experts, and every recompute but operators",
)

_MODULE_EXPERTS = replace(
    _EXPERTS,
    name="experts of modules",
    chosen=lambda d: d.model.mixture is not None and d.modules == "huggingface",
    hint="cp, dp and ZeRO go with them under full recompute (--system trl-fsdp2)",
)


def _another_number_of_experts(decisions: Decisions) -> bool:
    of, load = decisions.model.mixture, decisions.expert_load
    return of is not None and load.startswith("measured-") and len(measured_shares(load) or ()) != of.count


def _moves_selection(decisions: Decisions) -> bool:
    of = decisions.model.mixture
    return of is not None and of.selection_rate > 0


EXPERTS_WHOLE_MLP = _EXPERTS.allows(
    "decisions.mlp_chunk_tokens",
    0,
    because="blocks of tokens would each be routed by themselves, as with --recompute rowwise",
    when=lambda d: d.model.mixture is not None and not is_rowwise(d),
)

EXPERTS = (
    _EXPERTS.allows("layout.tp_overlap", "none", because="experts need the rows of all tokens before their products"),
    _EXPERTS.allows("layout.metp", 1, because="METP's rings would carry all experts' weights"),
    _EXPERTS.allows("layout.multiplexed", False, because="helper stages would need the weights of every expert"),
    _EXPERTS.allows(
        "decisions.recompute",
        *("none", "selective", "norms", "mlp", "full", "tokenwise", "rowwise"),
        because="every second product would have to be chosen among those of experts",
    ),
    EXPERTS_WHOLE_MLP,
    _EXPERTS.allows(
        "layout.schedule",
        *("gpipe", "1f1b", "interleaved"),
        because="deferred weight gradients would need every expert's rows once more",
        when=lambda d: d.model.mixture is not None and staged(d),
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
        hint=f"--system {DEFAULT_SYSTEM} prices memo's own operators",
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
        breaks=lambda d: d.layout.expert_ranks % d.layout.ep > 0,
        what="the ranks with the same parameters do not make up whole groups that divide experts",
        where="layout.ep",
        got=lambda d: f"{d.layout.ep} of {d.layout.expert_ranks} ranks",
        wanted="a divisor of cp x ulysses x dp (of tp x cp x ulysses x dp with expert_tp 1)",
        hint="another --ep, or more --dp, --cp or --ulysses; with --expert-tp 1 the ranks of tp divide experts too",
    ),
    Rule(
        name="expert_tp: degree",
        breaks=lambda d: d.layout.expert_tp not in (0, 1, d.layout.tp),
        what="tensor parallelism divides the features of every expert over all of its ranks, or over none",
        where="layout.expert_tp",
        got=lambda d: f"{d.layout.expert_tp} with tp {d.layout.tp}",
        wanted="0, 1 or the degree of tp",
        hint="--expert-tp 1, or leave it out; memo has no lowering of degrees between these",
    ),
    Rule(
        name="expert_tp: ep",
        breaks=lambda d: d.layout.expert_tp == 1 < d.layout.tp and d.layout.ep == 1,
        what="whole experts on ranks of tp need expert parallelism, which divides the experts over these ranks",
        where="layout.expert_tp",
        got=lambda d: f"{d.layout.expert_tp} with tp {d.layout.tp} and ep {d.layout.ep}",
        wanted="0, or ep of 2 or more",
        hint="--ep with as many ranks as tp or more, or leave --expert-tp out",
    ),
    Rule(
        name="expert_tp: sequence_parallel",
        breaks=lambda d: d.layout.whole_experts and not d.layout.sequence_parallel,
        what="ranks of tp with whole experts dispatch the rows of their token shards, which sequence parallelism makes",
        where="layout.sequence_parallel",
        got="expert_tp 1 without sequence parallelism",
        wanted="sequence_parallel",
        hint="leave --expert-tp out, or a layout with sequence_parallel",
    ),
    Rule(
        name="expert parallelism: zero_ranks",
        breaks=lambda d: (
            d.layout.ep > 1 and d.layout.zero_ranks * d.layout.expert_ranks // d.layout.replicas % d.layout.ep > 0
        ),
        what="the groups that ZeRO divides over do not have all experts of a layer, or not equally often",
        where="layout.zero_ranks",
        got=lambda d: f"{d.layout.zero_ranks} with ep {d.layout.ep}",
        wanted="a multiple of ep (zero_ranks x tp with expert_tp 1)",
        hint="more --zero-ranks, or a smaller --ep",
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
        name="overlap of experts: ep",
        breaks=lambda d: d.layout.ep == 1 and d.expert_overlap,
        what="a rank with all experts exchanges no rows",
        where="decisions.expert_overlap",
        got="expert_overlap with ep 1",
        wanted="false",
        hint="--ep 2 or more, or leave --expert-overlap out",
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
