"""Computes the verdict of an answer: memory against capacity, speed, hours and prices, and what is assumed.

GPU-hours and prices count the devices that the plan occupies, and nothing besides the steps: no start, no checkpoints,
no failures.
"""

from __future__ import annotations

from collections.abc import Collection
from math import inf, prod

from memo_sim.contract.adapters import NONE
from memo_sim.contract.attention_kernels import ATTENTION_KERNELS
from memo_sim.contract.boards import OPTION_SOURCE
from memo_sim.contract.cluster import DEFAULT_EFFICIENCY
from memo_sim.contract.knobs import DEGREES, KNOBS, RowwiseKernel, States
from memo_sim.contract.plan import Decisions, Prediction
from memo_sim.contract.summary import NOT_READ, Assumption, DeviceMemory, HostMemory, LeftOut, PeakKind, Summary
from memo_sim.contract.units import DTYPE_BYTES, GIB, MOST_BYTES, counted, format_bytes, format_seconds, format_tokens
from memo_sim.engine.simulate import ALLOCATOR, Simulation
from memo_sim.planning.micro_batches import LAYOUTS, MOST_TOKENS, SIZES, are_searched
from memo_sim.planning.presets import SYSTEMS, Policy
from memo_sim.planning.question import Question
from memo_sim.program.layers.loss import FP32_BYTES, ROLLOUT_NUMBERS
from memo_sim.program.layout.expert_load import MARGIN, capacity_rows, shown_load
from memo_sim.program.layout.fp8 import PRODUCTS
from memo_sim.program.layout.parameters import gradient_dtype
from memo_sim.program.layout.shape import shape_of
from memo_sim.program.operators.workspaces import FUSED_KINDS
from memo_sim.reasons.adapters import trained_weights
from memo_sim.reasons.answer import extrapolations
from memo_sim.reasons.documents import packed_from
from memo_sim.reasons.experts import active_weights
from memo_sim.reasons.latent import expansion
from memo_sim.reasons.windows import attended
from memo_sim.views.busy import COMPUTE
from memo_sim.views.plan_table import layout_label

BILLION = 1e9
HOUR_S = 3600.0

STATES: dict[States, tuple[str, str]] = {
    "fp32": ("gradients, ", "master weights and AdamW's moments in fp32, on the device"),
    "bf16": ("gradients and ", "master weights in fp32, AdamW's moments in bf16, on the device"),
    "host": (
        "gradients in fp32 on the device; ",
        "master weights and AdamW's moments in fp32 in host memory",
    ),
    "pure-bf16": ("gradients and ", "AdamW's moments in bf16, no master weights, on the device"),
    "pure-bf16-fp32-moments": ("gradients in bf16, ", "AdamW's moments in fp32, no master weights, on the device"),
}
"""Where and in which dtype a bf16 model's states are kept: its gradients, unless they are given, and the rest."""

KERNELS: dict[RowwiseKernel, str] = {
    "torch": "memo-exec's own, one torch operator each",
    "triton": "memo-exec's own fused Triton kernels",
    "eager": "eager torch: a kernel for each operator and cast",
    "compiled": "torch.compile",
    "fused": "fused kernels of Megatron-LM and Transformer Engine",
    "jit": "kernels of Megatron-LM before Transformer Engine (TorchScript, apex)",
    "flash-attn": "kernels of flash-attention's training code",
    "internevo": "kernels of InternEvo",
}
"""Whose norms, activations, rotary embeddings, residuals, loss and optimizer."""

PART_OF_NODE = "part-of-node"
"""The source of the host memory of a part of a node, where it is that part of the node's (``gpus.py``)."""
MUCH_SLOWER, MUCH_LESS = 0.03, 0.5
"""A plan that is at most so much slower, with at most so much of the host memory, is named."""

OPEN = ("any", "every-layout")
"""Systems that search what memo knows; the others are layouts of their authors."""

NOT_SEARCHED = ("overlap", "tp_overlap", "cp_exchange", "states", "loss", "micro_batch")
"""Knobs that no search tries, and that ``explain`` and ``oom`` change one at a time."""

POLICIES = {
    "planned": "one arena with planned addresses",
    "caching": "PyTorch's caching allocator",
    "eager": "PyTorch's caching allocator under an eager framework",
}


def summary_of(
    question: Question,
    simulation: Simulation,
    prediction: Prediction,
    *,
    planned_arena: bool = False,
    searched: bool = True,
    no_interval: str = "",
    price_per_device_hour: float | None = None,
    ways_out: list[str] | None = None,
    rivals: Collection[Prediction] = (),
) -> Summary:
    """Return the verdict about one plan; ``rivals`` are other plans that were played.

    ``prediction`` is the plan's, with the size of its arena where ``planned_arena``; ``searched``: it was chosen among
    others, and not given; ``no_interval``: why a step has none.
    """
    decisions = simulation.decisions
    layout, step_s = decisions.layout, prediction.step_s
    tokens = decisions.global_batch * decisions.seq_tokens
    hours = None if step_s is None else step_s * layout.devices / HOUR_S
    steps_of_a_billion = BILLION / tokens
    price = None if hours is None or price_per_device_hour is None else hours * price_per_device_hour
    return Summary(
        fits=prediction.status == "ok",
        status=prediction.status,
        devices=layout.devices,
        tokens_per_step=tokens,
        step_s=step_s,
        interval=prediction.interval,
        no_interval=no_interval,
        mfu=prediction.mfu,
        tokens_per_device_s=prediction.tgs,
        device_hours_per_billion_tokens=None if hours is None else hours * steps_of_a_billion,
        price_per_device_hour=price_per_device_hour,
        price_per_step=price,
        price_per_billion_tokens=None if price is None else price * steps_of_a_billion,
        device_memory=device_memory(simulation, prediction, planned_arena=planned_arena),
        host_memory=HostMemory(
            needed_bytes=prediction.peak_host_bytes_per_node,
            capacity_bytes=min(simulation.memory.host_capacity_bytes, MOST_BYTES),
        ),
        shortfall_bytes=prediction.shortfall_bytes,
        reason=prediction.reason,
        ways_out=ways_out or [],
        plan=in_words(decisions),
        assumptions=[
            *assumptions(question, simulation),
            *_host_memory(question, prediction, rivals),
            *(_searched(question) if searched else []),
        ],
        left_out=left_out(question) if searched else [],
    )


def device_memory(simulation: Simulation, prediction: Prediction, *, planned_arena: bool) -> DeviceMemory:
    """Return what a device of the fullest stage needs: the arena or what is reserved, and the reserve."""
    fullest = simulation.fullest
    kind: PeakKind = "arena" if planned_arena else "live"
    peak_bytes = prediction.peak_device_bytes
    if prediction.reserved_bytes is not None:
        kind, peak_bytes = "reserved", prediction.reserved_bytes
    memory = fullest.memory
    needed, capacity = peak_bytes + memory.reserve_bytes, memory.device_capacity_bytes
    if prediction.status == "gpu_oom":
        needed = capacity + prediction.shortfall_bytes
    return DeviceMemory(
        stage=simulation.stages.index(fullest),
        stages=len(simulation.stages),
        peak=kind,
        peak_bytes=peak_bytes,
        live_bytes=simulation.most_live.memory.device.bytes,
        reserve_bytes=memory.reserve_bytes,
        needed_bytes=needed,
        capacity_bytes=capacity,
        free_bytes=max(0, capacity - needed),
        allocation_retries=prediction.allocation_retries,
        allocator_wait_s=sum(
            (s.seconds for s in prediction.stalls if (s.lane, s.waits_for) == (COMPUTE, ALLOCATOR)), 0.0
        ),
    )


def in_words(decisions: Decisions) -> str:
    """Return a plan in words: its degrees, what happens to activations, its pipeline schedule and subsequences."""
    layout = decisions.layout
    parts = [f"{layout_label(layout)} on {counted(layout.devices, 'GPU')}", _activations(decisions)]
    if layout.pp > 1:
        parts.append(f"{layout.schedule} schedule of {counted(decisions.micro_batches, 'micro-batch', 'es')}")
    if layout.subsequences > 1:
        parts.append(f"{layout.subsequences} subsequences")
    if decisions.fp8 != "none":
        parts.append(f"linear products in FP8 ({decisions.fp8})")
    if decisions.loss_chunk_tokens:
        parts.append(f"loss in chunks of {format_tokens(decisions.loss_chunk_tokens)} tokens")
    if decisions.allocator_limit_gib:
        parts.append(f"PyTorch's allocator limited to {decisions.allocator_limit_gib} GiB of the device")
    return "; ".join(parts)


def _activations(decisions: Decisions) -> str:
    """Return what happens to activations."""
    if decisions.recompute not in ("none", "tokenwise"):
        return Policy.of(decisions).label
    kept = decisions.recompute == "none"
    if decisions.alpha == 1:
        return "all activations are swapped to host memory"
    if not decisions.swapped_tokens:
        recomputed = "activations of all tokens are recomputed, attention's outputs are swapped to host memory"
        return "all activations are kept on the device" if kept else recomputed
    percent = f"{100 * decisions.alpha:.3g} %"
    if kept:
        return f"{percent} of the tokens' activations are swapped to host memory, the rest is kept"
    return f"activations of {percent} of the tokens are swapped to host memory, the rest is recomputed"


def _allocation(decisions: Decisions) -> Assumption:
    """Return how memory is managed. A limit is named: the verdict counts it, in place of the device's memory."""
    value = POLICIES[decisions.memory_policy]
    if not (limit := decisions.allocator_limit_gib):
        return Assumption(name="device memory", value=value, option="--memory-policy")
    value += f", limited to {limit} GiB (your script calls torch.cuda.set_per_process_memory_fraction)"
    return Assumption(name="device memory", value=value, option="--memory-policy, --allocator-limit-gib")


def assumptions(question: Question, simulation: Simulation) -> list[Assumption]:
    """Return what the figures of a plan rest on, each with the option that changes it."""
    decisions = simulation.decisions
    kernel = decisions.kernels.attention
    return [
        *_changes(question),
        Assumption(name="attention kernel", value=f"{kernel}: {ATTENTION_KERNELS[kernel].title}", option="--attention"),
        Assumption(name="other kernels", value=_rowwise(decisions), option="--compile, --eager"),
        Assumption(name="dtype", value=f"{decisions.dtype} parameters and activations", option="--dtype"),
        Assumption(name="states", value=_states(decisions), option="--states, --zero"),
        Assumption(name="batch", value=_batch(question, decisions), option="--global-batch, --micro-batch"),
        _allocation(decisions),
        Assumption(name="reserve", value=_reserve(simulation)),
        Assumption(
            name="libraries",
            value=f"PyTorch, flash-attn and Transformer Engine of {question.hardware.eager_libraries}",
            option="--libraries",
        ),
        *_experts(question, decisions),
        *_latent(decisions),
        *_windows(decisions),
        *_documents(decisions),
        *_fp8(decisions),
        *_adapters(decisions),
        *_objective(decisions),
        *_not_read(question),
        *_network(question),
        *_beyond(simulation),
    ]


def _rowwise(decisions: Decisions) -> str:
    """Return whose row-wise kernels a plan has; of fused ones, which operator of the model is not among them."""
    text = KERNELS[decisions.kernels.rowwise]
    model = decisions.model
    own = {
        "qk_norm": model.qk_norm,
        "geglu": model.gated and model.activation != "silu",
        "attention.sink": model.sinks,
    }
    torchs = [kind.removeprefix("attention.") for kind, has in own.items() if has and kind not in FUSED_KINDS]
    fused = decisions.kernels.rowwise == "triton" and torchs
    return f"{text} ({', '.join(torchs)}: torch operators)" if fused else text


def _changes(question: Question) -> list[Assumption]:
    """Return which kernels are not those of the plan that was given."""
    return [
        Assumption(name="changed", value=text, option="--attention" if text.startswith("attention") else "--rowwise")
        for text in question.changes
    ]


def _beyond(simulation: Simulation) -> list[Assumption]:
    """Return which curves of the profile a good part of the step reads beyond the sizes that were measured."""
    if not (listed := extrapolations(simulation)):
        return []
    value = f"{listed}: read beyond the sizes that the profile was measured at"
    return [Assumption(name="extrapolated", value=value)]


def _network(question: Question) -> list[Assumption]:
    """Return that the network's efficiency by size is not the cluster's own, where it is used."""
    cluster = question.cluster
    if cluster.nodes == 1 or DEFAULT_EFFICIENCY not in cluster.sources:
        return []
    value = "efficiency by size as of the clusters given by name (SimAI's rings); the cluster names none"
    return [Assumption(name="network", value=value, option="size_efficiency in the cluster's file")]


def _states(decisions: Decisions) -> str:
    layout, pure = decisions.layout, decisions.dtype == "fp32" and decisions.states != "host"
    grads, others = STATES[decisions.states]
    if decisions.memory_policy != "eager" and decisions.grad_sums in ("params", "fp32"):
        grads = f"gradients in {gradient_dtype(decisions)} (--grad-sums), "
    what = "parameters, gradients and AdamW's moments in fp32, on the device" if pure else grads + others
    if decisions.lora is not None:
        what += ", of the adapters alone"
    divided = {1: "optimizer states", 2: "optimizer states and gradients", 3: "parameters, gradients and states"}
    if layout.zero and layout.shards > 1:
        what += f"; ZeRO {layout.zero} divides {divided[layout.zero]} over {layout.shards} ranks"
        what += f", those of experts over {layout.expert_replicas}" if layout.ep > 1 else ""
    return what


def _batch(question: Question, decisions: Decisions) -> str:
    tokens = decisions.global_batch * decisions.seq_tokens
    each = f"dp {decisions.layout.dp} x {counted(decisions.micro_batches, 'micro-batch', 'es')}"
    of = f" of {decisions.micro_batch}" if decisions.micro_batch > 1 else ""
    text = f"{counted(decisions.global_batch, 'sequence')} or {format_tokens(tokens)} tokens a step ({each}{of})"
    return f"{text}; {question.batch_rule}" if question.batch_rule else text


def _experts(question: Question, decisions: Decisions) -> list[Assumption]:
    """Return how tokens spread over experts, which weights MFU counts, and that products were not measured."""
    of, layout = decisions.model.mixture, decisions.layout
    if of is None:
        return []
    load, used = shown_load(decisions.expert_load), active_weights(decisions.model)
    value, option = f"load {load}, no row dropped; MFU counts what a token uses: {used}", "--expert-load"
    if layout.ep > 1:
        rows = decisions.local_tokens * of.per_token
        most = capacity_rows(of, rows, decisions.expert_load, layout.ep, decisions.expert_capacity)
        whence = "given" if decisions.expert_capacity else f"{MARGIN:g} times what the fullest rank is expected to get"
        beyond = {
            "drop": "rows beyond it count as zero, and memo-exec run reports them",
            "refuse": "a step with rows beyond it is not applied, and ends the run",
        }
        value = (
            f"load {load}, dealt to {layout.ep} ranks with {of.count // layout.ep} of {of.count} experts each; a rank "
            f"can send {most:,} rows of a layer to each, {most * layout.ep / rows:.3g} times the mean ({whence}); "
            f"{beyond[decisions.expert_overflow]}; MFU counts what a token uses: {used}"
        )
        option = "--ep, --expert-load, --expert-capacity"
    found = [Assumption(name="experts", value=value, option=option)]
    if not any(table.dtype == decisions.dtype for table in question.hardware.grouped_gemm):
        value = f"derived from single {decisions.dtype} products; the profile has none of several experts"
        found.append(Assumption(name="experts' products", value=value))
    return found


def _documents(decisions: Decisions) -> list[Assumption]:
    """Return what sequences are packed from."""
    if decisions.documents is None:
        return []
    value = packed_from(decisions.documents, decisions.seq_tokens)
    return [Assumption(name="documents", value=value, option="--documents")]


def _latent(decisions: Decisions) -> list[Assumption]:
    """Return how latent attention is computed."""
    if decisions.model.latent is None:
        return []
    return [Assumption(name="latent attention", value=expansion(decisions), option="--rebuild-qkv, --attention")]


FP8_SCALES = {
    "delayed": "one scale a tensor, from earlier steps",
    "tensor": "one scale a tensor, from its own values",
    "block": "scales of 1x128 and 128x128 values",
    "mx": "MXFP8, scales of 32 values",
}


def _fp8(decisions: Decisions) -> list[Assumption]:
    """Return what runs in FP8, and against which peak MFU counts."""
    if decisions.fp8 == "none":
        return []
    stays = "attention, experts, embedding and classifier" if decisions.model.mixture else "attention and both ends"
    has_kernels = decisions.fp8 == "tensor" and decisions.fp8_layouts == "tn"
    played = "memo-exec's kernels have run on no GPU yet" if has_kernels else "memo-exec does not run it"
    value = (
        f"layers' linear products, {FP8_SCALES[decisions.fp8]}; {stays} in bf16; whether training converges as in bf16"
        f" is not predicted; MFU counts against the bf16 peak; {played}"
    )
    return [Assumption(name="FP8", value=value, option="--fp8")]


def _adapters(decisions: Decisions) -> list[Assumption]:
    """Return which low-rank adapters are trained, and which FLOPs MFU counts with them."""
    lora = decisions.lora
    if lora is None:
        return []
    value = (
        f"rank {lora.rank}, scale {lora.scale:.4g}, on {' '.join(lora.targets)}, without dropout:"
        f" {trained_weights(decisions)} are trained, the others frozen in {decisions.dtype}; MFU counts 4 FLOPs for"
        " each frozen weight and token (forward, gradient of the input), 6 for an adapter's"
    )
    return [Assumption(name="adapters", value=value, option="--lora")]


def _objective(decisions: Decisions) -> list[Assumption]:
    """Return what a policy's objective needs of a step, and what the logits take in chunks and whole."""
    if decisions.objective == "next-token":
        return []
    shape = shape_of(decisions)
    chunk = min(decisions.loss_chunk_tokens or shape.tokens, shape.tokens)
    whole, held = (
        format_bytes(tokens * shape.vocab * DTYPE_BYTES[dtype])
        for tokens, dtype in ((shape.tokens, "fp32"), (chunk, decisions.dtype))
    )
    share = ", of its part of the vocabulary" if shape.tp > 1 else ""
    tokens = format_tokens(shape.tokens)
    if chunk < shape.tokens:
        logits = f"{held} for {format_tokens(chunk)} tokens at once; in fp32 for all {tokens} they would take {whole}"
    else:
        logits = f"{held} for all {tokens} tokens at once, {whole} in fp32; --loss-chunk cuts them"
    given = format_bytes(ROLLOUT_NUMBERS * FP32_BYTES * shape.tokens)
    value = (
        f"GRPO: a step is given advantages and log-probabilities ({given} a micro-batch); generation and forwards of"
        f" the reference model are not included; logits of a rank{share}: {logits}"
    )
    return [Assumption(name="objective", value=value, option="--objective, --loss-chunk")]


def _windows(decisions: Decisions) -> list[Assumption]:
    """Return the windows and sinks of the model's attention."""
    found = attended(decisions.model, decisions.seq_tokens)
    return [Assumption(name="attention windows", value=found)] if found else []


def _not_read(question: Question) -> list[Assumption]:
    """Return the fields of the model's file that are ignored."""
    if not question.not_read:
        return []
    return [Assumption(name=NOT_READ, value=f"of the model's file: {', '.join(question.not_read)}")]


def left_out(question: Question) -> list[LeftOut]:
    """Return what the search leaves out, with the options that include it: layouts, other systems' plans, knobs."""
    found = _open_layouts(question) if question.system in OPEN else _of_other_systems(question)
    open_knobs = NOT_SEARCHED if question.memory_policy == "planned" else (*NOT_SEARCHED, "memory_policy")
    knobs = [
        KNOBS[name].option
        for name in open_knobs
        if (name != "micro_batch" or not question.open_micro_batch)
        and (name != "tp_overlap" or _takes_tp_overlap(question))
        and getattr(question.pins if hasattr(question.pins, name) else question, name) == KNOBS[name].default
    ]
    found += [*_micro_batches_left_out(question), *_kernels_left_out(question), *_fp8_left_out(question)]
    if knobs:
        found.append(LeftOut(what=f"other values of {', '.join(knobs)}", option="memo-sim explain PLAN changes each"))
    return found


def _takes_tp_overlap(question: Question) -> bool:
    """Return whether ``--tp-overlap`` has a lowering for the model and its adapters (``RULES``)."""
    model = question.model
    return model.mixture is None and model.latent is None and question.adapters == NONE


def _open_layouts(question: Question) -> list[LeftOut]:
    """Return the layouts that an open search leaves out; where degrees fill the cluster, only subsequences."""
    pins, system, found = question.pins, question.preset, list[LeftOut]()
    every = SYSTEMS["every-layout"]
    if _has_open_degrees(question):
        more = [
            f"{name} above 1" for name in every.degrees if name not in system.degrees and getattr(pins, name) is None
        ]
        if pins.ep is None and question.model.mixture and every.searches_ep > system.searches_ep:
            more.append("ep above 1")
        if pins.zero is None:
            more += [f"zero {level}" for level in every.zeros if level not in question.zeros]
        found += [LeftOut(what=", ".join(more), option="--system every-layout")] if more else []
        if pins.metp is None and _alike(question) and question.adapters == NONE:
            found.append(LeftOut(what="metp above 1", option="--system metp"))
    if pins.subsequences is None and _alike(question):
        found.append(LeftOut(what="subsequences", option="--subsequences auto"))
    return found


def _kernels_left_out(question: Question) -> list[LeftOut]:
    """Return that compiled kernels were not tried, where the profile has measured them: memo-exec cannot play them."""
    measured = "compiled" in question.hardware.framework_rowwise_bytes_per_s
    if question.system not in OPEN or question.rowwise is not None or not measured or question.adapters != NONE:
        return []
    return [LeftOut(what="kernels of torch.compile, which memo-exec does not run", option="--compile")]


def _fp8_left_out(question: Question) -> list[LeftOut]:
    """Return that products in FP8 were not tried, where the profile has rates of them: they change what is learned."""
    recipes = [recipe for recipe, products in PRODUCTS.items() if products in {t.dtype for t in question.hardware.gemm}]
    if question.fp8 != "none" or question.dtype != "bf16" or not recipes:
        return []
    option = f"--fp8 {' or '.join(recipes)}"
    return [LeftOut(what="products in FP8, which change what is learned", option=option)]


def _micro_batches_left_out(question: Question) -> list[LeftOut]:
    """Return the micro-batches that were not tried, where a step has several sequences."""
    if not question.open_micro_batch or question.global_batch <= question.micro_batch:
        return []
    what = f"micro-batches above {question.micro_batch}"
    if are_searched(question):
        most = SIZES[-1] * question.micro_batch
        what += f" except, on the {LAYOUTS} fastest layouts, up to {most} or {format_tokens(MOST_TOKENS)} tokens a rank"
    return [LeftOut(what=what, option="--micro-batch")]


def _host_memory(question: Question, prediction: Prediction, rivals: Collection[Prediction]) -> list[Assumption]:
    """Return the host memory that a node is assumed to have, where the plan pins some, and what that buys."""
    if not prediction.peak_host_bytes_per_node:
        return []
    cluster, hardware = question.cluster, question.hardware
    held = cluster.host_memory_bytes or hardware.host_memory_bytes
    match cluster.host_memory_bytes.source if cluster.host_memory_bytes else None:
        case None:
            where = "from the profile"
            if cluster.devices_per_node < hardware.devices:
                where += f"; all of a node of {hardware.devices} GPUs, of which others may use a part"
        case str(source) if source == OPTION_SOURCE:
            where = "as given"
        case str(source):
            where = cluster.sources[source].text if source == PART_OF_NODE else "from the cluster's file"
    value = f"{format_bytes(int(held.value))} a node, {where}{_less_host_memory(prediction, rivals)}"
    return [Assumption(name="host memory", value=value, option="--host-memory-gib")]


def _less_host_memory(prediction: Prediction, rivals: Collection[Prediction]) -> str:
    """Return which plan needs far less host memory and is nearly as fast; empty where none was evaluated."""
    step_s, host = prediction.step_s, prediction.peak_host_bytes_per_node
    if step_s is None:
        return ""
    for other in sorted(rivals, key=lambda one: one.step_s or inf):
        if other.step_s is None or other.step_s > (1 + MUCH_SLOWER) * step_s:
            break
        if other.peak_host_bytes_per_node <= MUCH_LESS * host:
            saved, slower = format_bytes(host - other.peak_host_bytes_per_node), max(0.0, other.step_s / step_s - 1)
            enough_gib = next(2**power for power in range(40) if 2**power * GIB >= other.peak_host_bytes_per_node)
            takes = f"--host-memory-gib {enough_gib} takes {format_seconds(other.step_s)}"
            return f"; {saved} of it buy {100 * slower:.1f} %: {takes}"
    return ""


def _searched(question: Question) -> list[Assumption]:
    """Return which levels of ZeRO were searched where that depends on the machine."""
    if question.pins.zero is not None or question.zeros == question.preset.zeros:
        return []
    value = f"ZeRO {' and '.join(map(str, question.zeros))}, as GPUs of a node reach each other over PCIe alone"
    return [Assumption(name="search", value=value, option="--zero")]


def _of_other_systems(question: Question) -> list[LeftOut]:
    """Return the degrees that a system has where they are named, and that it lacks what other systems have."""
    pinnable = [
        name
        for name in question.preset.pinnable
        if getattr(question.pins, name) is None and (name != "metp" or _alike(question))
    ]
    found = []
    if pinnable and _has_open_degrees(question):
        options = ", ".join(f"{KNOBS[name].option} N" for name in pinnable)
        found.append(LeftOut(what=", ".join(f"{name} above 1" for name in pinnable), option=options))
    return [*found, LeftOut(what=f"plans that {question.system} does not have", option="--system any")]


def _alike(question: Question) -> bool:
    """Return whether METP and subsequences may be asked for: layers are alike, and sequences not packed (``RULES``)."""
    model = question.model
    alike = model.mixture is None and model.latent is None and len(model.layer_shapes) == 1
    return alike and question.documents is None


def _has_open_degrees(question: Question) -> bool:
    pinned: int = prod(getattr(question.pins, name) or 1 for name in DEGREES)
    return pinned < question.cluster.devices


def _reserve(simulation: Simulation) -> str:
    """Return the reserve of the fullest stage, by item."""
    items = sorted(simulation.memory.reserve.items(), key=lambda item: -item[1])
    listed = ", ".join(f"{name.replace('_', ' ')} {format_bytes(size)}" for name, size in items if size)
    return f"{format_bytes(simulation.memory.reserve_bytes)} beside the plan's buffers ({listed or 'nothing'})"
