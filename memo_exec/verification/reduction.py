"""Reduces a plan to a size that a CPU plays in seconds, and keeps what its lowering depends on.

Kept: the activation policy with its cuts (swapped fraction, row blocks, chunks, subsequences, groups of layers), the
kinds of parallel ranks, the schedule, ZeRO and states, the family of the model with its biases and ratios of heads.
Reduced: layers, widths, vocabulary, tokens, windows, micro-batches, and ranks beyond ``MOST_RANKS``.

- Layers: four on one rank, so that each of two rounding buffers is used twice, and kept, rebuilt and grouped layers all
  occur. With pipeline stages three for each stage, or two for each of several chunks.
- Tokens: few granules of 128, because swapped tokens, row blocks and chunks end at such rows. The swapped fraction is
  rounded to them, but some tokens are swapped and some are not wherever the plan has both.
- Ranks: the plan's own number if it is at most ``MOST_RANKS``. Otherwise degrees are reduced, the largest first, to two
  each; a kind of parallelism is never left out.
"""

from __future__ import annotations

from collections.abc import Callable
from math import ceil
from typing import Any

import msgspec

from memo_exec.kernels.documents import check_documents
from memo_sim.contract.attention_kernels import ATTENTION_KERNELS
from memo_sim.contract.errors import CannotRun, Infeasible, UsageError
from memo_sim.contract.experts import Experts
from memo_sim.contract.knobs import DtypeName
from memo_sim.contract.latent_attention import LatentAttention
from memo_sim.contract.layer_shape import LayerShape
from memo_sim.contract.model import Model
from memo_sim.contract.plan import SWAP_GRANULE_TOKENS, Decisions, Layout
from memo_sim.contract.verdict import Reduction
from memo_sim.program.layout.attention_chunks import in_chunks, rows_of_a_chunk
from memo_sim.program.layout.heads import are_even, divided_heads, sharing_ranks
from memo_sim.program.layout.parameters import gradient_dtype, without_masters
from memo_sim.program.layout.partition import partition, swapped_parts
from memo_sim.program.layout.rank_order import AXES
from memo_sim.program.layout.rowwise_blocks import is_rowwise
from memo_sim.program.layout.rules.windows import chunk_tokens
from memo_sim.program.layout.stage import layers_of_runs
from memo_sim.program.lower import lower

MOST_RANKS = 8
"""Ranks that are played as they are. Every rank is a process, and a small machine has few cores."""

MOST_RANKS_OF_TWO = 16
"""Ranks of a layout that has two of each kind already, which cannot be reduced further."""

LAYERS = 4
LAYERS_OF_STAGE = 3
LAYERS_OF_CHUNK = 2

HEAD_DIM = 16
HIDDEN = 64
VOCAB = 96
LATENT_RANK = 32
"""Largest number of features of a latent."""
EXPERTS, EXPERT_WIDTH, GROUPS = 8, 16, 4
ROWS = 64
"""Rows of a rank's micro-batch where nothing needs whole granules."""

GRANULES = 4
"""Granules of a rank's micro-batch of which some are swapped; 2 where the whole sequence would be longer than
``LONG_TOKENS``."""

LEAST_WINDOW = 17
LONG_TOKENS = 2048
MOST_PARTS = 3
"""Row blocks of the MLP, chunks of attention and of the loss."""

MOST_SUBSEQUENCES = 4
MOST_WINDOW = 2


def reduced(
    decisions: Decisions,
    *,
    layers: int = 0,
    dtype: DtypeName = "fp32",
    attention: str = "",
    most_ranks: int = MOST_RANKS,
) -> Decisions:
    """Return small decisions with the same policy and kind of layout.

    Args:
        decisions: a plan's decisions.
        layers: number of layers; 0: chosen as above.
        dtype: in which the reduced plan computes.
        attention: the attention kernel for small heads; empty: the plan's own, with the plan's head size.
        most_ranks: number of ranks up to which the layout stays as it is.

    Raises:
        CannotRun: when memo-exec cannot play such a plan, or its policy has no small form; the message says why.
        UsageError: when ``layers`` are fewer than the runs of pipeline stages.
        Infeasible: when the plan itself cannot be lowered.
    """
    _check_played(decisions)
    layout = _layout(decisions, most_ranks)
    found = _policy(decisions, layout, dtype, attention)
    found = _with_layers(decisions, found, layers)
    found = msgspec.structs.replace(found, model=_model(decisions, found, HEAD_DIM if attention else 0))
    found = _with_batches(decisions, found)
    try:
        found = _with_tokens(decisions, found)
        lower(found)
    except (Infeasible, ValueError) as error:
        raise CannotRun(
            "the plan has no small form that this machine could play",
            where=getattr(error, "where", None),
            got=str(error).splitlines()[0],
            hint="memo-exec run PLAN --debug checks the plan at full size",
        ) from error
    return found


def keep_everything(decisions: Decisions) -> Decisions:
    """Return the same training on the same ranks, with every activation kept and nothing cut or overlapped."""
    plain: dict[str, Any] = {"subsequences": 1, "multiplexed": False, "tp_overlap": "none"}
    plain |= {"schedule": "1f1b", "virtual_stages": 1, "pp_layers": ()}
    policy: dict[str, Any] = {"recompute": "none", "recompute_layers": "all", "keep_norms": False, "early_stop": False}
    policy |= {"rebuild_qkv": False}
    policy |= {"swapped_tokens": 0, "subsequence_swapped_tokens": (), "offload_window": 0, "rounding_buffers": False}
    policy |= {"mlp_chunk_tokens": 0, "mlp_rebuild": "block", "attention_chunk_tokens": 0, "loss_chunk_tokens": 0}
    policy |= {"overlap": "none", "memory_policy": "caching", "replay_allocator": False}
    layout = msgspec.structs.replace(decisions.layout, **plain)
    return msgspec.structs.replace(decisions, layout=layout, **policy)


def reductions(plan: Decisions, here: Decisions) -> list[Reduction]:
    """Return what differs between a plan and its reduced form, in a reader's order."""
    found = []
    for what, value in _SHOWN:
        before, after = value(plan), value(here)
        if before != after:
            found.append(Reduction(what=what, plan=before, here=after))
    return found


def _alpha(d: Decisions) -> str:
    return f"{d.alpha:.3g} ({d.swapped_tokens} of {d.local_tokens} tokens)" if d.swapped_tokens else "0"


def _latent_shown(d: Decisions) -> str:
    if (latent := d.model.latent) is None:
        return "none"
    return f"{latent.q_rank} / {latent.kv_rank}, values of {latent.value_dim}"


def _experts_shown(d: Decisions) -> str:
    experts = d.model.mixture
    if experts is None:
        return "none"
    groups = f" in {experts.groups_per_token} of {experts.groups} groups" if experts.groups > 1 else ""
    shared = f", a shared one {experts.shared} wide" if experts.shared else ""
    losses = [(name, getattr(experts, name)) for name in ("balance", "z_loss")]
    said = "".join(f", {name} {value:g}" for name, value in losses if value)
    return f"{experts.per_token} of {experts.count}{groups}, {experts.hidden} wide{shared}{said}"


def _windows_shown(d: Decisions) -> str:
    return ", ".join(str(shape.window or "none") for shape in d.model.layer_shapes) if d.model.windowed else "none"


_DEGREES: tuple[tuple[str, Callable[[Decisions], str]], ...] = tuple(
    (axis, lambda d, axis=axis: str(getattr(d.layout, axis)))  # type: ignore[misc]
    for axis in AXES
)
_SHOWN: tuple[tuple[str, Callable[[Decisions], str]], ...] = (
    ("layers", lambda d: str(d.model.layers)),
    ("hidden", lambda d: str(d.model.hidden)),
    ("heads / key-value heads", lambda d: f"{d.model.heads} / {d.model.kv_heads}"),
    ("head size", lambda d: str(d.model.head_dim)),
    ("latents of queries / keys and values", _latent_shown),
    ("MLP width", lambda d: ", ".join(str(shape.ffn_hidden) for shape in d.model.layer_shapes)),
    ("experts", _experts_shown),
    ("attention windows", _windows_shown),
    ("vocabulary", lambda d: str(d.model.vocab)),
    ("tokens of a sequence", lambda d: str(d.seq_tokens)),
    ("tokens of a document", lambda d: f"{d.documents.mean:,.0f} (mean)" if d.documents else "a sequence's"),
    ("dtype of swapped rows", lambda d: "their own" if d.swap_dtype == "same" else "FP8"),
    ("sequences of a micro-batch", lambda d: str(d.micro_batch)),
    ("micro-batches", lambda d: str(d.micro_batches)),
    *_DEGREES,
    ("ep", lambda d: str(d.layout.ep)),
    ("ranks of tp that divide an expert", lambda d: str(d.layout.expert_divided) if d.layout.ep > 1 else ""),
    ("capacity of experts", lambda d: f"{d.expert_capacity:g}" if d.expert_capacity else "from the load"),
    ("ranks of ZeRO", lambda d: str(d.layout.shards)),
    ("layers of stages", lambda d: ", ".join(map(str, layers_of_runs(d))) if d.layout.pp > 1 else ""),
    ("recomputed layers", lambda d: d.recompute_layers),
    ("swapped tokens (alpha)", _alpha),
    ("subsequences", lambda d: str(d.layout.subsequences)),
    ("offload window", lambda d: str(d.offload_window)),
    ("tokens of an MLP block", lambda d: str(d.mlp_chunk_tokens)),
    ("tokens of an attention chunk", lambda d: str(d.attention_chunk_tokens)),
    ("tokens of a loss chunk", lambda d: str(d.loss_chunk_tokens)),
    ("loss", lambda d: d.loss),
    ("head groups", lambda d: str(d.kernels.head_groups)),
    ("dtype", lambda d: d.dtype),
    ("states", lambda d: d.states),
    ("sums of gradients", gradient_dtype),
    ("attention kernel", lambda d: d.kernels.attention),
    ("row-wise kernels", lambda d: d.kernels.rowwise),
    ("library workspaces", lambda d: "in the arena" if d.replay_allocator else "torch's allocator"),
)


def _check_played(decisions: Decisions) -> None:
    """Refuse plans that memo-exec does not play at any size."""
    policy, rowwise, attention = decisions.memory_policy, decisions.kernels.rowwise, decisions.kernels.attention
    kernel = ATTENTION_KERNELS[attention]
    if policy == "eager":
        raise CannotRun(
            "the plan is for another framework (an eager one), which memo-exec does not play",
            where="$.decisions.memory_policy",
            got=policy,
            wanted="planned or caching",
            hint="make the plan with memo-sim what-if ... --memory-policy planned --rowwise torch -o PLAN",
        )
    if rowwise not in ("torch", "triton"):
        raise CannotRun(
            "the plan's row-wise kernels are those of another framework, which memo-exec does not play",
            where="$.decisions.kernels.rowwise",
            got=rowwise,
            wanted="torch or triton",
            hint="make the plan with memo-sim what-if ... --rowwise torch -o PLAN",
        )
    check_documents(decisions)
    if not kernel.executed:
        raise CannotRun(
            f"the plan's attention ({kernel.title}) can be priced, not played",
            where="$.decisions.kernels.attention",
            got=attention,
            wanted="a kernel that memo-exec has",
            hint="make the plan with memo-sim what-if ... --attention flash -o PLAN",
        )


def _layout(decisions: Decisions, most_ranks: int) -> Layout:
    """Return the layout with at most ``most_ranks`` ranks, or two of each kind."""
    layout = decisions.layout
    degrees = {axis: int(getattr(layout, axis)) for axis in AXES}
    copies = min(2, layout.shard_copies) if layout.zero_ranks else 1
    least = {axis: min(degree, 2) for axis, degree in degrees.items()}
    if copies > 1 and layout.shards > 1 and least["cp"] * least["ulysses"] == 1:
        least["dp"] = min(degrees["dp"], 4)  # two groups of replicas that each divide their states over two

    def ranks() -> int:
        found = 1
        for degree in degrees.values():
            found *= degree
        return found

    while ranks() > most_ranks and any(degrees[axis] > least[axis] for axis in AXES):
        largest = max((axis for axis in AXES if degrees[axis] > least[axis]), key=lambda axis: degrees[axis])
        degrees[largest] = least[largest]
    if ranks() > max(most_ranks, MOST_RANKS_OF_TWO):
        raise CannotRun(
            "the plan has too many kinds of parallel ranks for one machine, even with two of each",
            where="$.decisions.layout",
            got=f"{ranks()} ranks",
            wanted=f"at most {MOST_RANKS_OF_TWO}",
            hint="verify a plan of the same policy with fewer kinds of ranks",
        )
    replicas = degrees["cp"] * degrees["ulysses"] * degrees["dp"]
    shards = layout.zero_ranks and (layout.zero_ranks if replicas == layout.replicas else max(1, replicas // copies))
    shared = _expert_degree(decisions, (shards or replicas) * (degrees["tp"] if layout.whole_experts else 1))
    return msgspec.structs.replace(layout, **degrees, ep=shared, zero_ranks=shards)


def _expert_degree(decisions: Decisions, replicas: int) -> int:
    """Return how many of ``replicas`` ranks share the few experts of the small model."""
    wanted, mixture = decisions.layout.ep, decisions.model.mixture
    if wanted == 1 or mixture is None:
        return 1
    count = min(mixture.count, EXPERTS)
    found = max(d for d in range(1, min(wanted, count) + 1) if replicas % d == count % d == 0)
    if found == 1:
        raise CannotRun(
            "no number of the small plan's ranks divides its experts",
            where="$.decisions.layout.ep",
            got=f"ep {wanted}, {count} experts on {replicas} ranks",
            wanted="an even --ep",
            hint="verify a plan of the same policy with --ep 2",
        )
    return found


def _policy(decisions: Decisions, layout: Layout, dtype: DtypeName, attention: str) -> Decisions:
    """Return the decisions with sizes that later functions replace, all of them valid on their own."""
    of_cpu = attention == "torch-flash-cpu"
    kernels = msgspec.structs.replace(
        decisions.kernels,
        attention=attention or decisions.kernels.attention,
        head_groups=min(2, decisions.kernels.head_groups),
        rowwise="torch" if of_cpu else decisions.kernels.rowwise,
    )
    subsequences = layout.subsequences
    if subsequences > MOST_SUBSEQUENCES:
        subsequences = max(MOST_SUBSEQUENCES, layout.pp if layout.multiplexed else 1)
    return msgspec.structs.replace(
        decisions,
        layout=msgspec.structs.replace(layout, subsequences=subsequences, pp_layers=()),
        swapped_tokens=0,
        swap_dtype="same",  # what is left is compared to the last bits
        subsequence_swapped_tokens=(),
        mlp_chunk_tokens=0,
        attention_chunk_tokens=0,
        loss_chunk_tokens=0,
        loss="linear" if of_cpu and decisions.loss == "linear-triton" else decisions.loss,
        dtype=dtype,
        states="fp32" if without_masters(decisions) and dtype != "bf16" else decisions.states,
        grad_sums="auto" if dtype != "bf16" else decisions.grad_sums,
        replay_allocator=False,
        libraries=None,
        kernels=kernels,
        # No row is dropped, because ranks of another layout, and plain autograd, drop other rows or none.
        expert_capacity=float(layout.ep) if layout.ep > 1 else 0.0,
        expert_overflow=decisions.expert_overflow,
    )


def _with_layers(plan: Decisions, here: Decisions, layers: int) -> Decisions:
    """Return the decisions with few layers, and the choice of recomputed layers scaled to them.

    Where the plan's layers differ, its kinds take turns, so that every kind is played if there are as many layers.
    """
    runs_of_plan, kinds = layers_of_runs(plan), plan.model.layer_shapes
    layout = here.layout
    runs = layout.pp * layout.virtual_stages
    kind, _, text = plan.recompute_layers.partition("-")
    number, shortest, longest = int(text or 0), min(runs_of_plan), max(runs_of_plan)
    most = LAYERS if runs == 1 else LAYERS_OF_STAGE if layout.virtual_stages == 1 else LAYERS_OF_CHUNK
    if kind == "groups" and number < longest and longest % number == 0:
        most = LAYERS
    elif kind in ("groups", "first") and number < longest:
        most = LAYERS_OF_STAGE
    if layers:
        most = -(-layers // runs)
    most = min(most, longest)
    pattern = [runs_of_plan[i * (len(runs_of_plan) - 1) // max(1, runs - 1)] for i in range(runs)]
    counts = [most if each == longest else max(1, min(each, most - 1)) for each in pattern]
    if layers:
        counts = _spread(layers, runs)
    here_most = max(counts)
    if kind == "every":
        number = 2 if number <= here_most * layout.virtual_stages or number <= longest * layout.virtual_stages else 999
    elif kind == "first":
        number = here_most if number >= longest else min(max(1, here_most - 1), max(1, number * here_most // longest))
    elif kind == "groups":
        number = max(2, here_most) if number >= longest else 2
    uneven = len(set(counts)) > 1
    given = tuple(counts) if plan.layout.pp_layers or (uneven and runs > 1) else ()
    if shortest == longest and not layers:
        given = ()
    return msgspec.structs.replace(
        here,
        model=here.model.of_layers([kinds[number % len(kinds)] for number in range(sum(counts))]),
        layout=msgspec.structs.replace(layout, pp_layers=given),
        recompute_layers=f"{kind}-{number}" if text else kind,
    )


def _spread(layers: int, runs: int) -> list[int]:
    if layers < runs:
        raise UsageError(
            "every pipeline stage needs a layer",
            where="--layers",
            got=layers,
            wanted=f"at least {runs}",
            hint="leave --layers out",
        )
    least, extra = divmod(layers, runs)
    return [least + (run < extra) for run in range(runs)]


def _model(plan: Decisions, here: Decisions, head_dim: int) -> Model:
    """Return a narrow model whose heads divide over the ranks as the plan's do; ``head_dim`` 0: the plan's."""
    model, layout = plan.model, here.layout
    divided = layout.divided
    heads, kv_heads = _rank_heads(plan, layout)
    copies = sharing_ranks(model, plan.layout)
    kv_total = max(1, layout.tp // min(copies, layout.tp)) if copies > 1 else divided * kv_heads
    total = divided * heads
    latent = _latent(model.latent, own_heads=head_dim == 0)
    head_dim = latent.head_dim if latent else head_dim or model.head_dim
    q_width = total * head_dim
    hidden = q_width if model.hidden == model.q_width else max(HIDDEN, q_width + head_dim)
    ratio = min(model.ffn_hidden / model.hidden, 4.0)

    def narrow(shape: LayerShape) -> LayerShape:
        """Return a layer whose MLP is as wide beside the widest as the plan's."""
        width = max(16, 16 * round(ratio * (shape.ffn_hidden / model.ffn_hidden) * hidden / divided / 16))
        experts = _experts(shape.experts, divided) if shape.experts else None
        return msgspec.structs.replace(shape, ffn_hidden=divided * width, experts=experts)

    scaling = model.rope_scaling
    if scaling is not None:
        rotated = latent.rope_dim if latent else head_dim
        original, frequencies = min(ROWS, scaling.original_max_positions), rotated // 2
        scaling = msgspec.structs.replace(
            scaling,
            original_max_positions=original,
            short_factors=scaling.short_factors[:frequencies],
            long_factors=scaling.long_factors[:frequencies],
        )
    layers = here.model.of_layers([narrow(here.model.layer(number)) for number in range(here.model.layers)])
    return msgspec.structs.replace(
        layers,
        hidden=hidden,
        heads=total,
        kv_heads=kv_total,
        head_dim=head_dim,
        latent=latent,
        vocab=VOCAB // layout.tp * layout.tp if model.vocab % plan.layout.tp == 0 else VOCAB + 1,
        rope_scaling=scaling,
        query_scalar=model.query_scalar * head_dim / model.head_dim,
    )


def _latent(latent: LatentAttention | None, *, own_heads: bool) -> LatentAttention | None:
    """Return narrow latents; ``own_heads``: with the plan's heads, else with narrow ones."""
    if latent is None:
        return None
    ranks = {name: min(getattr(latent, name), LATENT_RANK) for name in ("q_rank", "kv_rank")}
    narrow = {name: min(getattr(latent, name), HEAD_DIM) for name in ("nope_dim", "rope_dim", "value_dim")}
    return msgspec.structs.replace(latent, **ranks, **({} if own_heads else narrow))


def _with_windows(plan: Decisions, here: Decisions) -> Model:
    """Return the model with windows as long beside its chunks of a sequence as the plan's, but not very short ones."""
    model, chunk = here.model, chunk_tokens(here) if here.layout.cp > 1 else here.seq_tokens

    def scaled(window: int) -> int:
        if not 0 < window < plan.seq_tokens:
            return window and max(window, here.seq_tokens)
        return min(max(LEAST_WINDOW, round(window * here.seq_tokens / plan.seq_tokens)), chunk - 1)

    shapes = [model.layer(number) for number in range(model.layers)]
    return model.of_layers([msgspec.structs.replace(shape, window=scaled(shape.window)) for shape in shapes])


def _experts(experts: Experts, divided: int) -> Experts:
    """Return a few narrow experts, of which a token goes to as many as in the plan, if there are so many.

    The losses of the router are left out: plain autograd has none, and the loss of balance depends on which tokens a
    rank has.
    """
    count, grouped = min(experts.count, EXPERTS), experts.groups > 1 and experts.count >= EXPERTS
    chosen = max(1, min(experts.per_token, count - 1)) if experts.per_token < experts.count else count
    groups, taken = (GROUPS, GROUPS // 2) if grouped else (1, 1)
    return msgspec.structs.replace(
        experts,
        count=count,
        per_token=min(chosen, taken * count // groups),
        hidden=EXPERT_WIDTH * divided,
        shared=EXPERT_WIDTH * divided if experts.shared else 0,
        groups=groups,
        groups_per_token=taken,
        balance=0.0,
        z_loss=0.0,
    )


def _rank_heads(plan: Decisions, layout: Layout) -> tuple[int, int]:
    """Return query and key/value heads of a tensor-parallel (or METP) rank: even, uneven or shared as in the plan."""
    degree, parts = plan.layout.ulysses, layout.ulysses
    heads, kv_heads = divided_heads(plan.model, plan.layout)
    group = min(2, heads // kv_heads)
    if not are_even(heads, kv_heads, degree):
        return (parts + 1) * group, parts + 1
    if degree > kv_heads:
        own = max(1, parts // (degree // kv_heads))
        return parts * min(2, heads // degree), own
    several = 2 if plan.kernels.head_groups > 1 or layout.divided * parts <= 2 else 1
    own = parts * min(several, kv_heads // degree)
    return own * group, own


def _with_batches(plan: Decisions, here: Decisions) -> Decisions:
    """Return the decisions with few micro-batches, enough for the pipeline to be full."""
    layout, count, size = here.layout, plan.micro_batches, min(2, plan.micro_batch)
    stages = layout.pp
    if stages == 1:
        count = min(count, 2)
    elif layout.schedule == "interleaved":
        whole = max(1, count // stages) * stages if count * layout.subsequences % stages else count
        count = min(whole, 2 * stages)
    else:
        count = min(count, stages + 2)
    return msgspec.structs.replace(here, micro_batch=size, global_batch=count * size * layout.dp)


def _with_tokens(plan: Decisions, here: Decisions) -> Decisions:
    """Return the decisions with a short sequence, and with the plan's cuts of it."""
    layout = here.layout
    gathered = layout.tp if layout.sequence_parallel else 1
    granule, ranks = SWAP_GRANULE_TOKENS * gathered, layout.ring * layout.ulysses
    partial = 0 < plan.swapped_tokens < plan.local_tokens
    blocks = _parts(plan.mlp_chunk_tokens, plan.local_tokens)
    chunks = _parts(plan.attention_chunk_tokens, plan.seq_tokens) if in_chunks(plan) else (1, False)
    count = 0
    if partial or plan.recompute == "tokenwise":
        count = GRANULES if GRANULES * granule * ranks <= LONG_TOKENS else 2
    if layout.subsequences > 1:
        count = max(count, layout.subsequences * (2 if partial else 1) + 1)
    blocks_granules, chunk_granules = _granules_of(*blocks), _granules_of(*chunks)
    if blocks[0] > 1:
        count = max(count, blocks_granules[0])
    if chunks[0] > 1:
        count = max(count, chunk_granules[0])
    if layout.subsequences > 1 or chunks[0] > 1:
        count *= here.micro_batch  # each sequence is divided by itself
    rows = count * granule if count else ROWS * gathered
    tokens = rows * ranks // here.micro_batch
    model = here.model
    if model.learned_positions:
        model = msgspec.structs.replace(model, max_positions=tokens if plan.model.max_positions else 0)
    here = msgspec.structs.replace(here, model=model, seq_tokens=tokens)
    if plan.documents is not None:
        here = msgspec.structs.replace(here, documents=plan.documents.scaled(tokens / plan.seq_tokens))
    if model.windowed:
        here = msgspec.structs.replace(here, model=_with_windows(plan, here))
    loss = _parts(plan.loss_chunk_tokens, plan.local_tokens)[0]
    here = msgspec.structs.replace(
        here,
        mlp_chunk_tokens=_cut(plan.mlp_chunk_tokens, blocks, blocks_granules, granule, rows),
        attention_chunk_tokens=_cut(plan.attention_chunk_tokens, chunks, chunk_granules, granule * ranks, tokens),
        loss_chunk_tokens=ceil(rows / loss) if plan.loss_chunk_tokens else 0,
        offload_window=min(MOST_WINDOW, plan.offload_window),
    )
    if is_rowwise(plan) and in_chunks(plan):
        several = plan.mlp_chunk_tokens < rows_of_a_chunk(plan)
        here = msgspec.structs.replace(here, mlp_chunk_tokens=granule if several else rows_of_a_chunk(here))
    return _with_swapped(plan, here, granule)


def _parts(chunk: int, tokens: int) -> tuple[int, bool]:
    """Return in how many parts ``tokens`` are cut, at most ``MOST_PARTS``, and whether the last one is shorter."""
    if not 0 < chunk < tokens:
        return 1, False
    return min(MOST_PARTS, -(-tokens // chunk)), bool(tokens % chunk)


def _granules_of(parts: int, shorter: bool) -> tuple[int, int]:
    """Return the granules of all parts and of one: (3, 1) for three equal parts, (5, 2) when the last is shorter."""
    return (2 * parts - 1, 2) if shorter else (parts, 1)


def _cut(chunk: int, parts: tuple[int, bool], granules: tuple[int, int], unit: int, total: int) -> int:
    """Return the tokens of a part of ``total``, a multiple of ``unit``; 0 without parts, all where one is enough."""
    if not chunk:
        return 0
    if parts[0] == 1:
        return total
    return max(1, round(total / unit * granules[1] / granules[0])) * unit


def _with_swapped(plan: Decisions, here: Decisions, granule: int) -> Decisions:
    total = here.local_tokens
    if plan.swapped_tokens in (0, plan.local_tokens):
        return msgspec.structs.replace(here, swapped_tokens=total if plan.swapped_tokens else 0)
    if here.layout.subsequences == 1:
        rounded = round(plan.alpha * total / granule) * granule
        return msgspec.structs.replace(here, swapped_tokens=min(max(rounded, granule), total - granule))
    shares = [some / tokens for some, tokens in zip(swapped_parts(plan), partition(plan), strict=True)]
    parts = partition(here)
    chosen = [shares[i * (len(shares) - 1) // max(1, len(parts) - 1)] for i in range(len(parts))]
    each = [_rounded(share, tokens, granule) for share, tokens in zip(chosen, parts, strict=True)]
    if sum(each) == 0:
        each[0] = granule
    if sum(each) == total:
        each[-1] = max(0, each[-1] - granule)
    return msgspec.structs.replace(here, swapped_tokens=sum(each), subsequence_swapped_tokens=tuple(each))


def _rounded(share: float, tokens: int, granule: int) -> int:
    if share in (0.0, 1.0):
        return round(share * tokens)
    return min(max(round(share * tokens / granule) * granule, granule), max(granule, tokens - granule))
