"""Forward and backward kernels of each operator, one backend per file.

``KERNELS[instruction.op](call)`` executes one instruction. A kernel writes into its operands and takes its scratch from
the declared workspace. The ops in ``LIBRARY_SCRATCH`` are the exception: their library allocates its own results, so
the program counts their workspace but does not hand it out.

A plan with ``rowwise: triton`` uses fused Triton kernels for the row-wise ops. Their modules are imported at the first
call, because Triton is not installed on machines without a GPU.

Memory that kernels share (arenas, host slabs) lives in ``memo_exec/memory``, not here.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import cache
from importlib import import_module

from memo_exec.kernels import (
    activation,
    attention,
    collective,
    dispatch,
    divided_loss,
    embedding,
    expert_exchange,
    experts,
    fp8,
    fp8_delayed,
    fp8_experts,
    fp8_shares,
    framework_loss,
    latent,
    linear,
    linear_loss,
    loss,
    merge,
    move,
    norm,
    optimizer,
    packing,
    qk_norm,
    rotary,
    routing,
    rsa,
    shared_heads,
    sinks,
    swap_rounding,
)
from memo_exec.kernels import stage_p2p as stage_p2p
from memo_exec.kernels.call import Call, Context, Scratch, StepScalars
from memo_sim.program.arena.library_workspaces import LIBRARY_OPS
from memo_sim.program.ir.work import Fp8Gemm, Fp8GroupedGemm, LinearLoss
from memo_sim.program.operators.workspaces import HEAD_KINDS, ROUNDED_KINDS

Kernel = Callable[[Call], None]


@cache
def _fused(module: str, name: str) -> Kernel:
    kernel: Kernel = getattr(import_module(f"memo_exec.kernels.{module}"), name)
    return kernel


def _plain_or_fused(plain: Kernel, module: str) -> Kernel:
    """Return a kernel that calls ``plain``, or the function of that name in ``module`` if the plan uses Triton."""
    name = plain.__name__

    def play(call: Call) -> None:
        fused = call.context.decisions.kernels.rowwise == "triton" and "rollout" not in call.tensors
        (_fused(module, name) if fused else plain)(call)

    return play


def _divided(plain: Kernel, divided: Kernel) -> Kernel:
    """Return a kernel that calls ``divided`` if tensor parallelism splits the vocabulary, else ``plain``."""

    def play(call: Call) -> None:
        (divided if call.context.mesh.size("tp") > 1 else plain)(call)

    return play


def _in_fp8(plain: Kernel, narrow: Kernel) -> Kernel:
    """Return a kernel that calls ``narrow`` for a product whose operands are in FP8, else ``plain``."""

    def play(call: Call) -> None:
        (narrow if isinstance(call.instruction.work, Fp8Gemm | Fp8GroupedGemm) else plain)(call)

    return play


def _of_shares(whole: Kernel, share: Kernel) -> Kernel:
    """Return a kernel that calls ``share`` where scales follow from the largest values of several ranks' shares."""

    def play(call: Call) -> None:
        (share if "largest" in call.tensors else whole)(call)

    return play


def _fused_loss(call: Call) -> None:
    """Compute the loss in one kernel; with torch in row blocks that are written over on the CPU, and of a policy."""
    fused = call.context.device.type == "cuda" and "rollout" not in call.tensors
    (_fused("triton_loss", "cross_entropy") if fused else loss.cross_entropy)(call)


def _linear_loss(plain: Kernel) -> Kernel:
    """Return a kernel that calls the one which the instruction's work names: ``plain``, or Triton's."""
    name = plain.__name__

    def play(call: Call) -> None:
        work = call.instruction.work
        triton = isinstance(work, LinearLoss) and work.kernel == "triton"
        (_fused("triton_linear_loss", name) if triton else plain)(call)

    return play


_PLAIN: Mapping[str, Kernel] = {
    "embed": _divided(embedding.embed, embedding.divided_embed),
    "positions.add": embedding.positions_add,
    "embed.bwd": embedding.embed_backward,
    "layer_norm": norm.layer_norm,
    "layer_norm.bwd": norm.layer_norm_backward,
    "rms_norm": norm.rms_norm,
    "rms_norm.bwd": norm.rms_norm_backward,
    "linear": _in_fp8(linear.linear, fp8.linear),
    "linear.add": _in_fp8(linear.linear_add, fp8.linear_add),
    "linear.to_gate": linear.linear_to_gate,
    "linear.from_gate": linear.linear_from_gate,
    "linear.dgrad": _in_fp8(linear.linear_dgrad, fp8.linear_dgrad),
    "linear.dgrad.add": _in_fp8(linear.linear_dgrad_add, fp8.linear_dgrad_add),
    "linear.wgrad": _in_fp8(linear.linear_wgrad, fp8.linear_wgrad),
    "fp8.quantize": fp8.quantise,
    "fp8.transpose": fp8.transpose,
    "params.largest": fp8_shares.find_largest,
    "params.quantize": _of_shares(fp8.quantise_weights, fp8_shares.quantise),
    "params.transpose": fp8.transpose_weights,
    "fp8.max_reduce": collective.max_reduce,
    "fp8.history": fp8_delayed.enter_history,
    "lora.a": linear.lora_a,
    "lora.b": linear.lora_b,
    "lora.b.dgrad": linear.lora_b_dgrad,
    "lora.b.wgrad": linear.lora_b_wgrad,
    "linear.wgrad.product": _in_fp8(linear.linear_wgrad_product, fp8.linear_wgrad_product),
    "bias.bwd": linear.bias_backward,
    "gelu": activation.gelu,
    "gelu.bwd": activation.gelu_backward,
    "swiglu": activation.swiglu,
    "swiglu.bwd": activation.swiglu_backward,
    "geglu": activation.geglu,
    "geglu.bwd": activation.geglu_backward,
    "rotary": rotary.rotary,
    "rotary.bwd": rotary.rotary_backward,
    "latent.norm": latent.norm,
    "latent.norm.bwd": latent.norm_backward,
    "latent.q_up": _in_fp8(latent.queries, latent.queries_in_fp8),
    "latent.q_up.dgrad": _in_fp8(latent.queries_dgrad, fp8.linear_dgrad),
    "latent.q_up.wgrad": _in_fp8(latent.queries_wgrad, fp8.linear_wgrad),
    "latent.assemble": latent.assemble,
    "latent.assemble.bwd": latent.assemble_backward,
    "qk_norm": qk_norm.qk_norm,
    "qk_norm.bwd": qk_norm.qk_norm_backward,
    "attention": attention.attention,
    "attention.bwd": attention.attention_backward,
    "attention.merge": merge.merge,
    "attention.sink": sinks.sink,
    "attention.sink.bwd": sinks.sink_backward,
    "rsa.pack": rsa.pack,
    "rsa.scores": rsa.scores,
    "rsa.softmax": rsa.softmax,
    "rsa.values": rsa.values,
    "rsa.dv": rsa.d_values,
    "rsa.dprobs": rsa.d_probabilities,
    "rsa.softmax.bwd": rsa.softmax_backward,
    "rsa.dk": rsa.d_keys,
    "rsa.dq": rsa.d_queries,
    "rsa.return": rsa.return_gradients,
    "qkv.split": packing.qkv_split,
    "qkv.join": packing.qkv_join,
    "kv.pack": packing.kv_pack,
    "heads.transpose": packing.heads_transpose,
    "kv.pack.sequence": packing.kv_pack_sequence,
    "heads.pick": shared_heads.pick,
    "heads.place": shared_heads.place,
    "grad.accumulate": packing.accumulate,
    "grad.accumulate.halves": packing.accumulate_halves,
    "router": routing.router,
    "shared_gate": routing.shared_gate,
    "shared_gate.bwd": routing.shared_gate_backward,
    "shared_gate.dgrad": routing.router_dgrad,
    "shared_gate.wgrad": routing.router_wgrad,
    "shared_gate.swiglu": experts.swiglu,
    "shared_gate.swiglu.bwd": experts.swiglu_backward,
    "router.dgrad": routing.router_dgrad,
    "router.wgrad": routing.router_wgrad,
    "experts.route": routing.route,
    "experts.route.bwd": routing.route_backward,
    "experts.sort": routing.sort,
    "experts.places": routing.places,
    "experts.ends.sum": routing.sum_ends,
    "experts.dispatch": dispatch.dispatch,
    "experts.combine": dispatch.combine,
    "experts.linear": _in_fp8(experts.linear, fp8_experts.linear),
    "experts.linear.dgrad": _in_fp8(experts.linear_dgrad, fp8_experts.linear_dgrad),
    "experts.linear.wgrad": _in_fp8(experts.linear_wgrad, fp8_experts.linear_wgrad),
    "experts.swiglu": experts.swiglu,
    "experts.swiglu.bwd": experts.swiglu_backward,
    "experts.seats": expert_exchange.seats,
    "experts.gates": expert_exchange.gates,
    "experts.gates.bwd": expert_exchange.gates_backward,
    "experts.arrivals": expert_exchange.arrivals,
    "experts.arrange": expert_exchange.arrange,
    "experts.arrange.back": expert_exchange.arrange_back,
    "experts.all_to_all": expert_exchange.all_to_all,
    "experts.clamped": experts.clamped,
    "experts.clamped.bwd": experts.clamped_backward,
    "experts.bias": experts.bias,
    "experts.bias.bwd": experts.bias_backward,
    "experts.out_bias": experts.out_bias,
    "experts.out_bias.dgrad": experts.out_bias_dgrad,
    "experts.out_bias.wgrad": experts.out_bias_wgrad,
    "router.balance": routing.balance,
    "residual_add": move.residual_add,
    "cross_entropy": loss.cross_entropy,
    "cross_entropy.fused": _divided(_fused_loss, divided_loss.divided_cross_entropy),
    "cross_entropy.stats": divided_loss.divided_stats,
    "cross_entropy.log_softmax": framework_loss.log_softmax,
    "cross_entropy.nll": framework_loss.nll,
    "cross_entropy.metrics": framework_loss.metrics,
    "cross_entropy.nll.bwd": framework_loss.nll_backward,
    "cross_entropy.log_softmax.bwd": framework_loss.log_softmax_backward,
    "cross_entropy.largest": framework_loss.largest,
    "cross_entropy.exponentials": framework_loss.exponentials,
    "cross_entropy.softmax": framework_loss.softmax,
    "cross_entropy.gradient": framework_loss.gradient,
    "linear_loss.statistics": _linear_loss(linear_loss.statistics),
    "linear_loss.sum": linear_loss.add_losses,
    "linear_loss.gradient": _linear_loss(linear_loss.gradient),
    "linear_loss.dgrad": linear_loss.dgrad,
    "linear_loss.dgrad.add": linear_loss.dgrad_add,
    "linear_loss.wgrad": linear_loss.wgrad,
    "copy": move.copy,
    "d2h": move.transfer,
    "h2d": move.transfer,
    "swap.round": swap_rounding.round_rows,
    "swap.widen": swap_rounding.widen_rows,
    "zero": move.zero,
    "grad_norm": optimizer.grad_norm,
    "adamw.decay": optimizer.adamw_decay,
    "adamw.no_decay": optimizer.adamw_no_decay,
    "all_gather": collective.all_gather,
    "reduce_scatter": collective.reduce_scatter,
    "all_gather.sequences": collective.all_gather_sequences,
    "reduce_scatter.sequences": collective.reduce_scatter_sequences,
    "heads.all_gather": collective.heads_all_gather,
    "heads.reduce_scatter": collective.heads_reduce_scatter,
    "all_reduce": collective.all_reduce,
    "loss.all_reduce": collective.loss_all_reduce,
    "loss.max_reduce": collective.max_reduce,
    "all_to_all": collective.all_to_all,
    "broadcast": collective.broadcast,
    "reduce": collective.reduce,
    "send_recv": collective.send_recv,
    "parts.sum": collective.sum_parts,
    "send": stage_p2p.send,
    "recv": stage_p2p.receive,
    "grads.all_reduce": collective.all_reduce,
    "shards.all_reduce": collective.shards_all_reduce,
    "grads.reduce_scatter": collective.grads_reduce_scatter,
    "params.all_gather": collective.params_all_gather,
}

FUSED: Mapping[str, str] = {
    "layer_norm": "triton_norm",
    "layer_norm.bwd": "triton_norm",
    "rms_norm": "triton_norm",
    "rms_norm.bwd": "triton_norm",
    "gelu": "triton_activation",
    "gelu.bwd": "triton_activation",
    "swiglu": "triton_activation",
    "swiglu.bwd": "triton_activation",
    "rotary": "triton_rotary",
    "rotary.bwd": "triton_rotary",
    "cross_entropy": "triton_loss",
}
"""Module of each op's Triton kernel; the function there has the same name as the plain kernel."""

ROUNDING: Mapping[str, str] = dict.fromkeys(ROUNDED_KINDS, "triton_swap_rounding")
"""The same of the ops on copy lanes, whose price is torch's where a profile has not measured them."""

HEADS: Mapping[str, str] = {
    kind: f"triton_{kind.removeprefix('attention.').removesuffix('.bwd')}" for kind in HEAD_KINDS
}
"""The same of the ops on each head of a row."""

IN_TRITON: Mapping[str, str] = {**FUSED, **ROUNDING, **HEADS}
"""The same of all ops with a Triton kernel for each plan with ``--rowwise triton``."""

KERNELS: Mapping[str, Kernel] = {
    op: _plain_or_fused(plain, IN_TRITON[op]) if op in IN_TRITON else plain for op, plain in _PLAIN.items()
} | {"cross_entropy": _divided(_plain_or_fused(loss.cross_entropy, "triton_loss"), divided_loss.divided_cross_entropy)}
"""The kernel of every op."""

LIBRARY_SCRATCH = LIBRARY_OPS
"""Ops whose library allocates the workspace that the program declares for them."""

__all__ = [
    "FUSED",
    "IN_TRITON",
    "KERNELS",
    "LIBRARY_SCRATCH",
    "ROUNDING",
    "Call",
    "Context",
    "Kernel",
    "Scratch",
    "StepScalars",
]
