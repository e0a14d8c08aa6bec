"""Kernels that training frameworks launch for one row-wise operator, each with its own passes over memory.

memo-exec plays a row-wise operator as one instruction. Frameworks launch other kernels for the same operator:

    eager     torch modules as model code writes them. Every tensor operator is a kernel that reads its inputs from
              memory and writes its result; casts to fp32 and back are kernels too, and so is all of autograd
    compiled  the same modules under torch.compile: Inductor fuses a chain of operators into one kernel
    fused     Megatron-LM's and Transformer Engine's own kernels: one for a norm, a bias with its activation, a bias
              with the residual, a rotary embedding
    jit       Megatron-LM's kernels under PyTorch 1.10 to 2.0: TorchScript by nvFuser for a bias with GeLU and a bias
              with dropout and the residual (dropout at its default of 0.1), and apex's FastLayerNorm, which Transformer
              Engine's norms come from
    internevo InternEvo's kernels of 2023 (InternLM): apex's RMSNorm around an fp32 copy of its bf16 input, flash-attn's
              rotary embedding, torch's operators for the rest
    flash-attn  the training code of flash-attention (2022, 2023): one kernel for dropout, the addition to an fp32
              residual and the norm; GeLU and the gradients of biases in the epilogues of products

An entry lists the kernels of one operator. A kernel's traffic counts tensors as large as the operator's own
(``Rowwise.elements``): ``n`` in the plan's dtype (narrow), ``w`` in fp32 (wide), ``h`` half a tensor in the plan's
dtype. So ``_k("n", "w")`` is a cast to fp32. Vectors and single numbers per row are left out; a kernel that works
only on those has no traffic and takes a launch.

    LlamaRMSNorm, eager:  n>w  w>w  w>  >  >  w>w  w>n  n>n     8 kernels, 36 bytes an element; memo-exec: 1 and 4

An operator that is not in a library's table is one kernel with the bytes of its instruction (copies, packing, a loss
over a divided vocabulary). ``tests/exec_cpu/kernels/test_framework_kernels.py`` counts the eager kernels and their
tensors under torch's own autograd.

The kernels of AdamW and of FSDP's copies are the same, eager and compiled: frameworks compile the model's blocks, not
the optimizer or FSDP's hooks.

Left out: Inductor fuses the addition of a residual with the norm that follows it, which saves that norm's read. In
eager mode, autograd joins the gradients of Q, K and V in one more copy, clears some results first, and keeps more
tensors for backward than memo's programs do (fp32 copies inside a norm). InternEvo computes gate and up in two
products, whose input gradients autograd adds. Masks of dropout are not counted as memory.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from memo_sim.contract.hardware import AccessPattern
from memo_sim.contract.knobs import FrameworkLibrary, RowwiseKernel
from memo_sim.program.ir.work import FRESH, Attention, Rowwise, Work

ATTENTION_BACKWARD_KERNELS = 3
"""Kernels of flash-attn's backward (csrc/flash_attn/src/flash_bwd_launch_template.h)."""

WIDE_BYTES = 4
"""Bytes of an element of a wide (fp32) tensor."""


@dataclass(frozen=True, slots=True)
class Kernel:
    """One kernel of an operator: the tensors that it reads and writes, and how it goes through memory."""

    pattern: AccessPattern
    reads: str
    """One letter a tensor: n, w or h (see above)."""
    writes: str
    launches: int = 1
    """Kernels over which these bytes are divided: 2 where model code calls the same for queries and for keys."""

    def moved_bytes(self, work: Rowwise) -> int:
        """Return the bytes that all launches read and write for an operator."""
        sizes = {"n": 2 * work.element_bytes, "w": 2 * WIDE_BYTES, "h": work.element_bytes}
        return work.elements * sum(sizes[tensor] for tensor in self.reads + self.writes) // 2


Kernels = tuple[Kernel, ...]


def _k(reads: str, writes: str, pattern: AccessPattern = "elementwise", launches: int = 1) -> Kernel:
    return Kernel(pattern, reads, writes, launches)


_TINY = _k("", "")
"""A kernel over one number a row."""

_WIDEN, _NARROW = _k("n", "w", "widen"), _k("w", "n")
"""Casts to fp32 and back."""

_CASTS = frozenset({("n", "w"), ("w", "n")})
"""Tensors of those casts, which a plan in fp32 has not."""

_RESIDUAL = _k("nn", "n")
"""Autograd adds the gradients of the two branches that read the residual stream (torch, ``input_buffer.cpp``)."""


_DROPOUT = _k("nh", "n")
"""Dropout's backward: the gradient that leaves the residual stream, and the mask of a byte an element."""


def _rms_norm(launches: int = 1) -> Kernels:
    """transformers, ``LlamaRMSNorm.forward``; Qwen3's norms of queries and keys are the same class."""
    kernels = (
        _WIDEN,  # hidden_states.to(torch.float32)
        _k("w", "w"),  # .pow(2)
        _k("w", "", "row_sum"),  # .mean(-1)
        _TINY,  # variance + eps
        _TINY,  # rsqrt
        _k("w", "w", "broadcast"),  # hidden_states * rsqrt
        _NARROW,  # .to(input_dtype)
        _k("n", "n", "strided"),  # weight * hidden_states
    )
    return _times(kernels, launches)


def _rms_norm_backward(launches: int = 1) -> Kernels:
    """Autograd of ``LlamaRMSNorm.forward`` (torch, ``derivatives.yaml`` and ``FunctionsManual.cpp``)."""
    kernels = (
        _k("n", "n", "strided"),  # grad * weight
        _k("nn", "n"),  # grad * normalised rows
        _k("n", "", "column_sum"),  # their sum over rows: the weight's gradient
        _WIDEN,  # cast to fp32
        _k("ww", "w"),  # grad * x, for rsqrt
        _k("w", "w", "broadcast"),  # grad * rsqrt
        _k("w", "", "row_sum"),
        *(_TINY,) * 3,  # backward of rsqrt
        _k("", "w", "broadcast"),  # backward of mean: expanded and divided
        _k("w", "w"),  # backward of pow: x.pow(1)
        _k("w", "w"),  # * 2
        _k("ww", "w"),  # * grad
        _k("ww", "w"),  # both gradients of x added
        _NARROW,  # cast back
    )
    return _times(kernels, launches)


def _times(kernels: Kernels, launches: int) -> Kernels:
    return tuple(Kernel(k.pattern, k.reads, k.writes, launches) for k in kernels)


_EAGER: dict[str, Kernels] = {
    # llm-foundry, LPLayerNorm: F.layer_norm with autocast off, parameters and input in bf16. Backward is one aten
    # operator with two kernels, for the input and for weight and bias (torch, layer_norm_kernel.cu).
    "layer_norm": (_k("n", "n", "norm"),),
    "layer_norm.bwd": (_k("nn", "n", "norm_backward"), _k("nn", "", "norm_backward"), _RESIDUAL),
    "rms_norm": _rms_norm(),
    "rms_norm.bwd": (*_rms_norm_backward(), _RESIDUAL),
    "qk_norm": _rms_norm(2),
    "qk_norm.bwd": _rms_norm_backward(2),
    # transformers, apply_rotary_pos_emb and rotate_half, for queries and for keys.
    "rotary": (
        _k("n", "n", "strided", 2),  # q * cos
        _k("h", "h", "strided", 2),  # -x2
        _k("hh", "n", "strided", 2),  # cat((-x2, x1))
        _k("n", "n", "strided", 2),  # * sin
        _k("nn", "n", "elementwise", 2),
    ),
    "rotary.bwd": (
        _k("n", "n", "strided", 2),  # grad * sin
        _k("", "n", "elementwise", 2),  # slice_backward of x1: zeros, and a copy of the half
        _k("h", "h", "strided", 2),
        _k("h", "h", "strided", 2),  # neg
        _k("", "n", "elementwise", 2),  # slice_backward of x2
        _k("h", "h", "strided", 2),
        _k("nn", "n", "elementwise", 2),  # both halves
        _k("n", "n", "strided", 2),  # grad * cos
        _k("nn", "n", "elementwise", 2),  # both branches
    ),
    "gelu": (_k("n", "n"),),
    "gelu.bwd": (_k("nn", "n"),),
    # transformers, LlamaMLP: act_fn(gate_proj(x)) * up_proj(x).
    "swiglu": (_k("n", "n"), _k("nn", "n")),
    "geglu": (_k("n", "n"), _k("nn", "n")),
    "swiglu.bwd": (_k("nn", "n"), _k("nn", "n"), _k("nn", "n")),
    "geglu.bwd": (_k("nn", "n"), _k("nn", "n"), _k("nn", "n")),
    # transformers 5.23, integrations/moe.py, grouped_mm_experts_forward, with elements of the dispatched rows; the
    # gradients of an index are zeros and a sum over sorted indices (torch, Indexing.cu), those of chunk a cat.
    "experts.dispatch": (_k("n", "n", "strided"),),
    "experts.dispatch.bwd": (*(_TINY,) * 3, _k("n", "")),
    "experts.swiglu": (_k("n", "n"), _k("nn", "n")),
    "experts.swiglu.bwd": (*(_k("nn", "n"),) * 3, _k("nn", "nn", "strided")),
    "experts.combine": (
        _k("n", "n", "broadcast"),  # proj_out * sample_weights
        *(_TINY,) * 2,  # inverse of the order
        _k("n", "n", "strided"),  # weighted_out[inverse]
        _k("n", "", "row_sum"),
    ),
    "experts.combine.bwd": (
        _k("n", "n", "broadcast"),  # the expanded gradient, made contiguous
        _k("", "n"),  # zeros
        *(_TINY,) * 3,  # indices sorted
        _k("nn", "n", "strided"),
        _k("n", "n", "broadcast"),  # grad * sample_weights
        _k("nn", "n"),  # grad * proj_out
        _k("n", "", "row_sum"),
    ),
    "residual_add": (_k("nn", "n"),),
    "bias.bwd": (_k("n", "", "column_sum"),),
    # logits.float(), then F.cross_entropy: log_softmax reads rows that do not fit into shared memory three times, for
    # their maximum, their sum and the result, and its backward reads the gradient twice (torch, SoftMax.cu). The
    # gradient of nll_loss is zeros with one number a row.
    "cross_entropy": (
        _WIDEN,
        _k("www", "w", "softmax"),
        _TINY,  # nll_loss
        _k("", "w"),  # its backward
        _TINY,
        _k("www", "w", "softmax"),
        _NARROW,
    ),
    # torch.optim.AdamW with foreach, its default on CUDA (torch/optim/adamw.py, _multi_tensor_adamw), all in fp32;
    # after the gradients are scaled (clip_grad_norm_), and before parameters are cast for the next gather.
    "adamw": (
        _k("w", "w", "multi_tensor"),  # gradients clipped
        _k("w", "w", "multi_tensor"),  # params.mul_(1 - lr * weight_decay)
        _k("ww", "w", "multi_tensor"),  # exp_avg.lerp_(grad)
        _k("w", "w", "multi_tensor"),  # exp_avg_sq.mul_(beta2)
        _k("ww", "w", "multi_tensor"),  # .addcmul_(grad, grad)
        _k("w", "w", "multi_tensor"),  # sqrt
        _k("w", "w", "multi_tensor"),  # / bias correction
        _k("w", "w", "multi_tensor"),  # + eps
        _k("www", "w", "multi_tensor"),  # params.addcdiv_(exp_avg, denom)
        _k("w", "n", "multi_tensor"),
    ),
}

_COMPILED: dict[str, Kernels] = {
    # One kernel for the rows, with the gradient of the residual stream added. It sums the weight's gradient over blocks
    # of rows too, and small kernels add the blocks and cast (torch 2.11, counted under a profiler).
    "layer_norm": (_k("n", "n", "norm"),),
    "layer_norm.bwd": (_k("nnn", "n", "norm_backward"), *(_TINY,) * 4),
    "rms_norm": (_k("n", "n", "norm"),),
    "rms_norm.bwd": (_k("nnn", "n", "norm_backward"), *(_TINY,) * 2),
    "qk_norm": (_k("n", "n", "norm", 2),),
    "qk_norm.bwd": (_k("nn", "n", "norm_backward", 2), *(_TINY,) * 4),
    "rotary": (_k("n", "n", "strided", 2),),
    "rotary.bwd": (_k("n", "n", "strided", 2),),
    "gelu": (_k("n", "n"),),
    "gelu.bwd": (_k("nn", "n"),),
    "swiglu": (_k("nn", "n"),),
    "geglu": (_k("nn", "n"),),
    "swiglu.bwd": (_k("nnn", "nn"),),
    "geglu.bwd": (_k("nnn", "nn"),),
    "residual_add": (_k("nn", "n"),),
    "bias.bwd": (_k("n", "", "column_sum"), _TINY),
    # Maximum and sum in one pass (Inductor's online softmax), then the gradient from the logits.
    "cross_entropy": (_k("n", "", "softmax"), _TINY, _k("n", "n")),
}

_FUSED: dict[str, Kernels] = {
    # Transformer Engine's norms (transformer_engine/common/normalization): backward sums the weight's gradient in the
    # same kernel, by blocks of rows, and a second kernel adds the blocks.
    "layer_norm": (_k("n", "n", "norm"),),
    "layer_norm.bwd": (_k("nn", "n", "norm_backward"), _TINY, _RESIDUAL),
    "rms_norm": (_k("n", "n", "norm"),),
    "rms_norm.bwd": (_k("nn", "n", "norm_backward"), _TINY, _RESIDUAL),
    "qk_norm": (_k("n", "n", "norm", 2),),
    "qk_norm.bwd": (_k("nn", "n", "norm_backward", 2), _TINY, _TINY),
    # Megatron-LM, core/fusions: fused_bias_gelu, fused_bias_swiglu, fused_bias_dropout; Transformer Engine's rotary.
    "rotary": (_k("n", "n", "strided", 2),),
    "rotary.bwd": (_k("n", "n", "strided", 2),),
    "gelu": (_k("n", "n"),),
    "gelu.bwd": (_k("nn", "n"),),
    "swiglu": (_k("nn", "n", "strided"),),
    "geglu": (_k("nn", "n", "strided"),),
    "swiglu.bwd": (_k("nnn", "nn", "strided"),),
    "geglu.bwd": (_k("nnn", "nn", "strided"),),
    "residual_add": (_k("nn", "n"),),
    "bias.bwd": (_k("n", "", "column_sum"),),
}

# NVIDIA/Megatron-LM, megatron/initialize.py (set_jit_fusion_options), megatron/model/fused_bias_gelu.py and
# transformer.py (bias_dropout_add_fused_train).
_JIT: dict[str, Kernels] = _FUSED | {
    "gelu": (_k("n", "n", "bias_gelu"),),
    "gelu.bwd": (_k("nn", "n", "bias_gelu_backward"),),
    "residual_add": (_k("nn", "nh"),),
    "layer_norm.bwd": (*_FUSED["layer_norm.bwd"], _DROPOUT),
    "rms_norm.bwd": (*_FUSED["rms_norm.bwd"], _DROPOUT),
}

# InternLM, internlm/model/modeling_internlm.py (norm1(residual.float())) and linear.py (silu(w1(x)) * w2(x)).
_INTERNEVO: dict[str, Kernels] = {
    # apex, csrc/layer_norm_cuda_kernel.cu: MixedFusedRMSNorm of an fp32 input writes the dtype of its weight. Its
    # backward reads the input twice: for the weight's gradient (by blocks of rows, which a second kernel adds) and for
    # that of the input, which autograd casts.
    "rms_norm": (_WIDEN, _k("w", "n", "norm")),
    "rms_norm.bwd": (
        _k("nw", "", "norm_backward"),
        _TINY,
        _k("nw", "w", "norm_backward"),
        _NARROW,
        _RESIDUAL,
    ),
    # flash-attn, csrc/rotary: in place.
    "rotary": _FUSED["rotary"],
    "rotary.bwd": _FUSED["rotary.bwd"],
    "swiglu": _EAGER["swiglu"],
    "geglu": _EAGER["geglu"],
    "swiglu.bwd": _EAGER["swiglu.bwd"],
    "geglu.bwd": _EAGER["geglu.bwd"],
    "residual_add": _EAGER["residual_add"],
    "bias.bwd": _EAGER["bias.bwd"],
}

# Dao-AILab/flash-attention@b252072, training/configs/experiment/pile (residual_in_fp32, fused_dropout_add_ln,
# fused_mlp, fused_bias_fc; dropout at transformers' default of 0.1), csrc/layer_norm and csrc/fused_dense_lib.
_FLASH_ATTN: dict[str, Kernels] = {
    # One kernel writes the residual, dropout's mask and the norm: its bytes are divided over memo's two operators.
    "residual_add": (_k("nw", "wh", "norm"),),
    "layer_norm": (_k("", "n", "norm"),),
    "layer_norm.bwd": (_k("nwwh", "nw", "norm_backward"), _TINY),
    # The epilogue of the first product writes the input of GeLU besides, that of the second's gradient reads it.
    "gelu": (_k("", "n"),),
    "gelu.bwd": (_k("n", ""),),
    "bias.bwd": (_TINY,),
}

# torch.optim.AdamW(fused=True), torchtitan's default: one kernel over parameters, gradients and moments.
_FUSED_ADAMW = (
    _k("w", "w", "multi_tensor"),  # gradients clipped
    _k("wwww", "www", "multi_tensor"),
    _k("w", "n", "multi_tensor"),  # cast for the next gather
)
_OF_TORCH: dict[str, Kernels] = {
    # Of torch.optim and FSDP, which torch.compile leaves as they are.
    "adamw": _EAGER.pop("adamw"),
    "adamw.fused": _FUSED_ADAMW,
    # torch's loss parallel, which stands for Megatron-LM's form here (torch/distributed/tensor/parallel/loss.py:
    # _log_softmax, _nll_loss_forward, _nll_loss_and_log_softmax_backward); every result is a tensor of its own.
    "loss.max": (_k("w", "", "row_sum"),),
    "loss.exp": (
        _k("w", "w", "broadcast"),  # x - x_max
        _k("w", "w"),  # exp
        _k("w", "", "row_sum"),
        _TINY,  # which targets this rank has
    ),
    "loss.softmax": (
        _TINY,  # log
        _k("w", "w", "broadcast"),  # shifted - shifted_logsumexp
        *(_TINY,) * 2,  # gather, mean
    ),
    "loss.gradient": (
        _k("", "w"),  # zeros_like
        _TINY,  # -1 at the targets
        _k("w", "w"),  # exp
        _k("ww", "w"),
        _k("w", "w", "broadcast"),  # * grad_output
    ),
    # FSDP2's split_with_sizes_copy and chunk_cat; FSDP1's cat has the rate of the narrow one here.
    "copy_out": (_k("n", "n", "shard_copy"),),
    "flatten": (_k("n", "n", "shard_copy"),),
    "flatten.widen": (_k("n", "w", "shard_widen"),),
}
# Without the last kernel, the cast for the next gather: where every gather casts the fp32 shard itself, and where
# states are in bf16 without master weights. The kernels of the latter read and write bf16 numbers.
for _kind in ("", ".fused"):
    _OF_TORCH[f"adamw.cast{_kind}"] = _OF_TORCH[f"adamw{_kind}"][:-1]
    _OF_TORCH[f"adamw.pure{_kind}"] = tuple(
        Kernel(k.pattern, k.reads.replace("w", "n"), k.writes.replace("w", "n"))
        for k in _OF_TORCH[f"adamw{_kind}"][:-1]
    )

_AUTOGRAD = {
    **{name: (_k("www", "w", "softmax"),) for name in ("log_softmax", "log_softmax.bwd")},
    "params.autocast": (_NARROW,),
    "grad.widen": (_WIDEN, _k("ww", "w")),
}
"""What autograd and autocast do in every library: ``layers/loss.py``, ``knobs.GradSums``."""

_LIBRARIES: Mapping[str, dict[str, Kernels]] = {
    "eager": _EAGER | _OF_TORCH | _AUTOGRAD,
    "compiled": _COMPILED | _OF_TORCH | _AUTOGRAD,
    "fused": _FUSED | _AUTOGRAD,
    "jit": _JIT | _AUTOGRAD,
    "internevo": _INTERNEVO | _OF_TORCH | _AUTOGRAD,
    "flash-attn": _FLASH_ATTN | _OF_TORCH | _AUTOGRAD,
}

SHARED_KERNELS: Mapping[FrameworkLibrary, FrameworkLibrary] = {
    "internevo": "eager",
    "jit": "fused",
    "flash-attn": "fused",
}
"""Libraries whose other kernels are those of another library: their curves stand in where a profile has none."""

_ADDS_RESIDUAL = frozenset({"layer_norm.bwd", "rms_norm.bwd"})
"""Operators that add the gradient of the residual stream, except behind the last layer."""


def library_of(kernel: RowwiseKernel) -> FrameworkLibrary | None:
    """Return the framework's library that a plan's row-wise kernels are, or None for memo-exec's own."""
    match kernel:
        case "torch" | "triton":
            return None
        case _:
            return kernel


def framework_kernels(work: Rowwise, library: FrameworkLibrary) -> Kernels:
    """Return the kernels that ``library`` launches for an operator; empty when its table has no entry."""
    found = _LIBRARIES[library].get(work.kind, ()) if work.elements else ()
    if work.element_bytes == WIDE_BYTES:
        found = tuple(kernel for kernel in found if (kernel.reads, kernel.writes) not in _CASTS)
    alone = work.write_bytes <= work.elements * work.element_bytes
    if work.kind in _ADDS_RESIDUAL and alone:
        joined = (id(_RESIDUAL), id(_DROPOUT))
        return tuple(_without_residual(kernel) for kernel in found if id(kernel) not in joined)
    return found


def _without_residual(kernel: Kernel) -> Kernel:
    """Return a kernel of a norm's backward that adds no gradient of a residual stream."""
    return _k("nn", kernel.writes, kernel.pattern) if kernel.reads == "nnn" else kernel


def launches(work: Work, library: FrameworkLibrary) -> int:
    """Return the number of kernels that a framework with ``library`` launches for the work of one instruction.

    - A row-wise operator: those of the library's table, or one.
    - Attention: one forward; backward has three (flash-attn: row sums of grad x out, the gradients, and dq cast).
    - A product: one; its bias is added in its epilogue.
    """
    match work:
        case Rowwise(kind=kind) if kind == FRESH:
            return 0
        case Rowwise():
            return sum(kernel.launches for kernel in framework_kernels(work, library)) or 1
        case Attention(backward=True):
            return ATTENTION_BACKWARD_KERNELS
        case _:
            return 1
