"""Says what the figures of a plan rest on: kernels, states, memory, data and features, each with its option."""

from __future__ import annotations

from memo_sim.contract.attention_kernels import ATTENTION_KERNELS
from memo_sim.contract.cluster import DEFAULT_EFFICIENCY
from memo_sim.contract.hardware import DISTURBED
from memo_sim.contract.knobs import LINEAR_LOSSES, RowwiseKernel, States
from memo_sim.contract.plan import Decisions
from memo_sim.contract.summary import NOT_READ, Assumption
from memo_sim.contract.units import DTYPE_BYTES, counted, format_bytes, format_tokens
from memo_sim.engine.simulate import Simulation
from memo_sim.planning.question import Question
from memo_sim.program.layers.linear_loss import kernel_of
from memo_sim.program.layers.loss import FP32_BYTES, ROLLOUT_NUMBERS
from memo_sim.program.layout.attention_chunks import in_chunks
from memo_sim.program.layout.expert_load import MARGIN, capacity_rows, shown_load
from memo_sim.program.layout.fp8 import played
from memo_sim.program.layout.parameters import gradient_dtype
from memo_sim.program.layout.rowwise_blocks import routed_at_once, routed_part
from memo_sim.program.layout.rules.recompute import swaps
from memo_sim.program.layout.shape import shape_of
from memo_sim.program.operators.workspaces import FUSED_KINDS, ROUNDED_KINDS, loss_tiles
from memo_sim.reasons.adapters import trained_weights
from memo_sim.reasons.answer import extrapolations
from memo_sim.reasons.documents import packed_from
from memo_sim.reasons.experts import active_weights
from memo_sim.reasons.latent import expansion
from memo_sim.reasons.windows import attended

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


POLICIES = {
    "planned": "one arena with planned addresses",
    "caching": "PyTorch's caching allocator",
    "eager": "PyTorch's caching allocator under an eager framework",
}


FP8_SCALES = {
    "delayed": "one scale a tensor, from earlier steps",
    "tensor": "one scale a tensor, from its own values",
    "block": "scales of 1x128 and 128x128 values",
    "mx": "MXFP8, scales of 32 values",
}


def assumptions(question: Question, simulation: Simulation) -> list[Assumption]:
    """Return what the figures of a plan rest on, each with the option that changes it."""
    decisions = simulation.decisions
    kernel = decisions.kernels.attention
    return [
        *_changes(question),
        *(Assumption(name="the job", value=text) for text in question.of_job),
        Assumption(name="attention kernel", value=f"{kernel}: {ATTENTION_KERNELS[kernel].title}", option="--attention"),
        Assumption(name="other kernels", value=_rowwise(question, decisions), option="--compile, --eager"),
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
        *_swaps(question, decisions),
        *_linear_loss(question, decisions),
        *_adapters(decisions),
        *_objective(decisions),
        *_not_read(question),
        *_network(question),
        *_profile(question),
        *_beyond(simulation),
    ]


def _changes(question: Question) -> list[Assumption]:
    """Return which kernels are not those of the plan that was given."""
    return [
        Assumption(name="changed", value=text, option="--attention" if text.startswith("attention") else "--rowwise")
        for text in question.changes
    ]


def _rowwise(question: Question, decisions: Decisions) -> str:
    """Return whose row-wise kernels a plan has; of fused ones, what is not fused or not measured."""
    text = KERNELS[decisions.kernels.rowwise]
    model = decisions.model
    own = {
        "geglu": model.gated and model.activation != "silu",
        "attention.sink": model.sinks,
    }
    torchs = [kind.removeprefix("attention.") for kind, has in own.items() if has and kind not in FUSED_KINDS]
    notes = [f"{', '.join(torchs)}: torch operators"] if torchs else []
    measured = question.hardware.fused_rowwise_bytes_per_s.get("triton", {})
    merges = decisions.layout.ring > 1 or decisions.layout.subsequences > 1 or in_chunks(decisions)
    found = {"qk_norm": model.qk_norm, "attention.merge": merges}
    if later := [kind.removeprefix("attention.") for kind, has in found.items() if has and kind not in measured]:
        notes.append(f"{', '.join(later)}: priced as torch operators until measured")
    return f"{text} ({'; '.join(notes)})" if decisions.kernels.rowwise == "triton" and notes else text


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
        trained = layout.ep > 1 and decisions.lora is None
        what += f", those of experts over {layout.expert_shards}" if trained else ""
    return what


def _batch(question: Question, decisions: Decisions) -> str:
    tokens = decisions.global_batch * decisions.seq_tokens
    each = f"dp {decisions.layout.dp} x {counted(decisions.micro_batches, 'micro-batch', 'es')}"
    of = f" of {decisions.micro_batch}" if decisions.micro_batch > 1 else ""
    text = f"{counted(decisions.global_batch, 'sequence')} or {format_tokens(tokens)} tokens a step ({each}{of})"
    return f"{text}; {question.batch_rule}" if question.batch_rule else text


def _allocation(decisions: Decisions) -> Assumption:
    """Return how memory is managed. A limit is named: the verdict counts it, in place of the device's memory."""
    value = POLICIES[decisions.memory_policy]
    if not (limit := decisions.allocator_limit_gib):
        return Assumption(name="device memory", value=value, option="--memory-policy")
    value += f", limited to {limit} GiB (your script calls torch.cuda.set_per_process_memory_fraction)"
    return Assumption(name="device memory", value=value, option="--memory-policy, --allocator-limit-gib")


def _reserve(simulation: Simulation) -> str:
    """Return the reserve of the fullest stage, by item."""
    items = sorted(simulation.memory.reserve.items(), key=lambda item: -item[1])
    listed = ", ".join(f"{name.replace('_', ' ')} {format_bytes(size)}" for name, size in items if size)
    return f"{format_bytes(simulation.memory.reserve_bytes)} beside the plan's buffers ({listed or 'nothing'})"


def _experts(question: Question, decisions: Decisions) -> list[Assumption]:
    """Return how tokens spread over experts, which weights MFU counts, and that products were not measured."""
    of, layout = decisions.model.mixture, decisions.layout
    if of is None:
        return []
    load, used = shown_load(decisions.expert_load), active_weights(decisions.model)
    value, option = f"load {load}, no row dropped; MFU counts what a token uses: {used}", "--expert-load"
    if layout.ep > 1:
        parts = routed_at_once(decisions)
        rows = parts[0] * of.per_token
        most = capacity_rows(of, rows, decisions.expert_load, layout.ep, decisions.expert_capacity)
        whence = "given" if decisions.expert_capacity else f"{MARGIN:g} times what the fullest rank is expected to get"
        beyond = {
            "drop": "rows beyond it count as zero, and memo-exec run reports them",
            "refuse": "a step with rows beyond it is not applied, and ends the run",
        }
        unit = routed_part(decisions, parts[0])
        shard = "each rank of tp sends the rows of its own token shard; " if layout.whole_experts else ""
        value = (
            f"load {load}, dealt to {layout.ep} ranks with {of.count // layout.ep} of {of.count} experts each; {shard}"
            f"a rank can send {most:,} rows of {unit} to each, {most * layout.ep / rows:.3g} times the mean "
            f"({whence}); {beyond[decisions.expert_overflow]}; MFU counts what a token uses: {used}"
        )
        option = "--ep, --expert-load, --expert-capacity"
    found = [Assumption(name="experts", value=value, option=option)]
    measured = any(table.dtype == decisions.dtype for table in question.hardware.grouped_gemm)
    if decisions.fp8_experts or not measured:  # those in FP8 are always derived
        kind = f"FP8 ({decisions.fp8})" if decisions.fp8_experts else decisions.dtype
        value = f"derived from single {kind} products; the profile has none of several experts"
        found.append(Assumption(name="experts' products", value=value))
    return found


def _latent(decisions: Decisions) -> list[Assumption]:
    """Return how latent attention is computed."""
    if decisions.model.latent is None:
        return []
    return [Assumption(name="latent attention", value=expansion(decisions), option="--rebuild-qkv, --attention")]


def _windows(decisions: Decisions) -> list[Assumption]:
    """Return the windows and sinks of the model's attention."""
    found = attended(decisions.model, decisions.seq_tokens)
    return [Assumption(name="attention windows", value=found)] if found else []


def _documents(decisions: Decisions) -> list[Assumption]:
    """Return what sequences are packed from."""
    if decisions.documents is None:
        return []
    value = packed_from(decisions.documents, decisions.seq_tokens)
    return [Assumption(name="documents", value=value, option="--documents")]


def _fp8(decisions: Decisions) -> list[Assumption]:
    """Return what runs in FP8, and against which peak MFU counts."""
    if decisions.fp8 == "none":
        return []
    stays = "attention and both ends"
    if decisions.model.mixture:
        experts = "routers, exchanges of rows" if decisions.fp8_experts else "experts (--fp8-experts)"
        stays = f"attention, {experts}, embedding and classifier"
    kept = ", whose weights have no bf16 copy (--fp8-params)" if decisions.fp8_params else ""
    runs = "memo-exec's kernels have run on no GPU yet" if played(decisions) else "memo-exec does not run it"
    value = (
        f"layers' linear products, {FP8_SCALES[decisions.fp8]}{kept}; {stays} in bf16; whether training converges as"
        f" in bf16 is not predicted; MFU counts against the bf16 peak; {runs}"
    )
    return [Assumption(name="FP8", value=value, option="--fp8")]


def _swaps(question: Question, decisions: Decisions) -> list[Assumption]:
    """Return what it means that activations are swapped in FP8."""
    if decisions.swap_dtype == "same" or not swaps(decisions):
        return []
    own, hardware = decisions.kernels.rowwise == "triton", question.hardware
    kernels = "memo-exec's Triton kernels" if own else "plain kernels of torch"
    curves = hardware.fused_rowwise_bytes_per_s.get("triton", {}) if own else hardware.rowwise_bytes_per_s
    measured = curves.keys() >= ROUNDED_KINDS
    priced = "as the profile measured them" if measured else "priced as torch's at the rate of memory-bound kernels"
    value = (
        f"E4M3 with a scale for each row, rounded on the copy lanes by {kernels}, {priced}; what these take from"
        " compute beside them is not priced, and whether training converges as without rounding is not predicted; no"
        " GPU has run it yet"
    )
    return [Assumption(name="swaps in FP8", value=value, option="--swap-dtype")]


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


def _linear_loss(question: Question, decisions: Decisions) -> list[Assumption]:
    """Return whose kernels play a loss with the classifier's product inside, and whether they were measured."""
    if decisions.loss not in LINEAR_LOSSES:
        return []
    own = kernel_of(decisions), decisions.dtype
    measured = any((table.kernel, table.dtype) == own for table in question.hardware.linear_loss)
    shape = shape_of(decisions)
    chunk = min(decisions.loss_chunk_tokens or shape.tokens, shape.tokens)
    columns = loss_tiles(shape.vocab)[0][1]
    kernels = "torch's operators" if decisions.loss == "linear" else "memo-exec's Triton kernels"
    rates = "as the profile measured them" if measured else "priced as products and passes over logits"
    value = (
        f"with the classifier's product inside, by {kernels}, {rates}: logits of {columns:,} of {shape.vocab:,} columns"
        f" and {format_tokens(chunk)} tokens at once; backward computes them again; no GPU has run it yet"
    )
    return [Assumption(name="loss", value=value, option="--loss, --loss-chunk")]


def _objective(decisions: Decisions) -> list[Assumption]:
    """Return what a policy's objective needs of a step, and what the logits take in chunks and whole."""
    if decisions.objective == "next-token":
        return []
    shape = shape_of(decisions)
    chunk = min(decisions.loss_chunk_tokens or shape.tokens, shape.tokens)
    columns = loss_tiles(shape.vocab)[0][1] if decisions.loss in LINEAR_LOSSES else shape.vocab
    whole = format_bytes(shape.tokens * shape.vocab * DTYPE_BYTES["fp32"])
    held = format_bytes(chunk * columns * DTYPE_BYTES[decisions.dtype])
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


def _not_read(question: Question) -> list[Assumption]:
    """Return the fields of the model's file that are ignored."""
    if not question.not_read:
        return []
    return [Assumption(name=NOT_READ, value=f"of the model's file: {', '.join(question.not_read)}")]


def _network(question: Question) -> list[Assumption]:
    """Return that the network's efficiency by size is not the cluster's own, where it is used."""
    cluster = question.cluster
    if cluster.nodes == 1 or DEFAULT_EFFICIENCY not in cluster.sources:
        return []
    value = "efficiency by size as of the clusters given by name (SimAI's rings); the cluster names none"
    return [Assumption(name="network", value=value, option="size_efficiency in the cluster's file")]


def _profile(question: Question) -> list[Assumption]:
    """Return that other work ran while the profile was measured, where it did."""
    if not (disturbed := question.hardware.provenance.get(DISTURBED)):
        return []
    value = f"{question.hardware.name} was measured on a busy machine ({disturbed}); calibrate again"
    return [Assumption(name="profile", value=value, option="--cluster")]


def _beyond(simulation: Simulation) -> list[Assumption]:
    """Return which curves of the profile a good part of the step reads beyond the sizes that were measured."""
    if not (listed := extrapolations(simulation)):
        return []
    value = f"{listed}: read beyond the sizes that the profile was measured at"
    return [Assumption(name="extrapolated", value=value)]
