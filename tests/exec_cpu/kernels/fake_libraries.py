"""Fakes of attention libraries that need a GPU: they have the real signatures and compute attention by its definition.

Names, order and defaults of arguments, asserted shapes and return values follow flash-attention at commit 0251105
(hopper/flash_api.cpp, flash_attn/cute/interface.py), its version of 2026-03 for the older beta, and TransformerEngine
2.9 and d0067d0. transformer-engine reads operands as if they were contiguous, and its fake does the same.
"""

# ruff: noqa: N803, PLR0917 - the libraries' own signatures
from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.machinery import ModuleSpec
from itertools import pairwise
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from tests.exec_cpu.kernels import attention_reference as reference


@contextmanager
def installed(modules: dict[str, dict[str, Any]]) -> Iterator[None]:
    """Make modules with these contents importable; a module without contents is a package."""
    before = {name: sys.modules.get(name) for name in modules}
    for name, contents in modules.items():
        module = ModuleType(name)
        module.__spec__ = ModuleSpec(name, None, is_package=True)
        module.__path__ = []
        vars(module).update(contents)
        sys.modules[name] = module
    try:
        yield
    finally:
        for name, module in before.items():
            if module is None:
                del sys.modules[name]
            else:
                sys.modules[name] = module


FLASH3_FORWARD = """fwd(Tensor q, Tensor k, Tensor v, Tensor(k_new!)? k_new = None, Tensor(v_new!)? v_new = None,
    Tensor? q_v = None, Tensor(out!)? out = None, Tensor? cu_seqlens_q = None, Tensor? cu_seqlens_k = None,
    Tensor? cu_seqlens_k_new = None, Tensor? seqused_q = None, Tensor? seqused_k = None, int? max_seqlen_q = None,
    int? max_seqlen_k = None, Tensor? page_table = None, Tensor? kv_batch_idx = None, Tensor? leftpad_k = None,
    Tensor? rotary_cos = None, Tensor? rotary_sin = None, Tensor? seqlens_rotary = None, Tensor? q_descale = None,
    Tensor? k_descale = None, Tensor? v_descale = None, float? softmax_scale = None, bool is_causal = False,
    int window_size_left = -1, int window_size_right = -1, int attention_chunk = 0, float softcap = 0.0,
    bool is_rotary_interleaved = False, Tensor? scheduler_metadata = None, int num_splits = 0, bool? pack_gqa = None,
    int sm_margin = 0) -> (Tensor(out!), Tensor, Tensor, Tensor)"""
FLASH3_BACKWARD = """bwd(Tensor dout, Tensor q, Tensor k, Tensor v, Tensor out, Tensor softmax_lse,
    Tensor(dq!)? dq = None, Tensor(dk!)? dk = None, Tensor(dv!)? dv = None, Tensor? cu_seqlens_q = None,
    Tensor? cu_seqlens_k = None, Tensor? seqused_q = None, Tensor? seqused_k = None, int? max_seqlen_q = None,
    int? max_seqlen_k = None, float? softmax_scale = None, bool is_causal = False, int window_size_left = -1,
    int window_size_right = -1, float softcap = 0.0, bool deterministic = False, int sm_margin = 0) ->
    (Tensor, Tensor, Tensor, Tensor, Tensor)"""


def _forward(q: Tensor, k: Tensor, v: Tensor, scale: float, *, causal: bool, window: int = 0) -> tuple[Tensor, Tensor]:
    assert scale == q.shape[-1] ** -0.5
    out, lse = reference.forward(*(x.double() for x in (q, k, v)), causal=causal, window=window)
    return out, lse.float().transpose(1, 2).contiguous()


def _backward(grad: Tensor, qkv: Any, out: Tensor, lse: Tensor, scale: float, *, causal: bool, window: int = 0) -> Any:
    q = qkv[0]
    assert scale == q.shape[-1] ** -0.5
    assert lse.is_contiguous(), "the real kernels read contiguous (batch, heads, tokens)"
    assert lse.shape == (q.shape[0], q.shape[2], q.shape[1])
    assert lse.dtype == torch.float32
    wide = [x.double() for x in (grad, *qkv, out)]
    return reference.backward(
        wide[0], tuple(wide[1:4]), wide[4], lse.double().transpose(1, 2), causal=causal, window=window
    )


def _masked(given: dict[str, Any], causal: str) -> dict[str, Any]:
    """Return the mask that a library's arguments stand for; a window's later side is closed."""
    left, right = given["window_size_left"], given["window_size_right"]
    if left is None or left < 0:
        return {"causal": given[causal]}
    assert right == 0
    return {"causal": True, "window": left + 1}


@contextmanager
def flash3(*, forward: str = FLASH3_FORWARD) -> Iterator[None]:
    """Register flash-attn 3's operators with their schemas, and make its package importable."""
    library = torch.library.Library("flash_attn_3", "DEF")
    try:
        for schema in (forward, FLASH3_BACKWARD):
            library.define(" ".join(schema.split()))
        library.impl("fwd", _flash3_forward, "CPU")
        library.impl("bwd", _flash3_backward, "CPU")
        with installed({"flash_attn_interface": {}}):
            yield
    finally:
        library._destroy()
        vars(torch.ops).pop("flash_attn_3", None)


def _flash3_forward(q: Tensor, k: Tensor, v: Tensor, *rest: Any, **named: Any) -> Any:
    given = _by_name(FLASH3_FORWARD, (q, k, v, *rest), named)
    out = given["out"]
    assert all(x.stride(-1) == 1 for x in (q, k, v, out))
    assert given["num_splits"] == 1, "with 0 the library may split, which changes the order of summation"
    if given["cu_seqlens_q"] is not None:
        assert given["is_causal"]
        lse = _varlen_forward((q, k, v), out, _documents(given), given["softmax_scale"])
        return out, lse, q.new_empty(0), q.new_empty(0)
    result, lse = _forward(q, k, v, given["softmax_scale"], **_masked(given, "is_causal"))
    out.copy_(result)
    return out, lse, q.new_empty(0), q.new_empty(0)


def _flash3_backward(dout: Tensor, *rest: Any, **named: Any) -> Any:
    given = _by_name(FLASH3_BACKWARD, (dout, *rest), named)
    qkv = given["q"], given["k"], given["v"]
    if given["cu_seqlens_q"] is not None:
        assert given["is_causal"]
        grads = tuple(given[name] for name in ("dq", "dk", "dv"))
        result = given["out"], given["softmax_lse"]
        _varlen_backward(dout, qkv, result, grads, _documents(given), given["softmax_scale"])
        return tuple(dout.new_empty(0) for _ in range(5))
    found = _backward(
        dout, qkv, given["out"], given["softmax_lse"], given["softmax_scale"], **_masked(given, "is_causal")
    )
    for name, result in zip(("dq", "dk", "dv"), found, strict=True):
        assert given[name].stride(-1) == 1
        given[name].copy_(result)
    return tuple(dout.new_empty(0) for _ in range(5))


def _documents(given: dict[str, Any]) -> list[slice]:
    """Return the rows of each document of a varlen call, whose queries and keys are the same rows."""
    ends, longest = given["cu_seqlens_q"], given["max_seqlen_q"]
    assert ends.dtype == torch.int32
    assert torch.equal(ends, given["cu_seqlens_k"])
    rows = [slice(first, end) for first, end in pairwise(ends.tolist())]
    assert rows[-1].stop == len(given["q"])
    assert longest == given["max_seqlen_k"] == max(each.stop - each.start for each in rows)
    return rows


def _varlen_forward(qkv: tuple[Tensor, ...], out: Tensor, documents: list[slice], scale: float) -> Tensor:
    """Write the output of every document; return the log-sum-exp, (heads, rows)."""
    lse = torch.empty(qkv[0].shape[1], len(qkv[0]))
    for rows in documents:
        q, k, v = (x[None, rows] for x in qkv)
        result, logsumexp = _forward(q, k, v, scale, causal=True)
        out[rows], lse[:, rows] = result[0].to(out.dtype), logsumexp[0]
    return lse


def _varlen_backward(
    grad: Tensor, qkv: Any, result: tuple[Tensor, Tensor], grads: Any, documents: list[slice], scale: float
) -> None:
    out, lse = result
    assert lse.is_contiguous()
    assert lse.shape == (out.shape[1], len(out))
    for rows in documents:
        q, k, v = (x[None, rows] for x in qkv)
        found = _backward(
            grad[None, rows], (q, k, v), out[None, rows], lse[None, :, rows].contiguous(), scale, causal=True
        )
        for target, value in zip(grads, found, strict=True):
            target[rows] = value[0].to(target.dtype)


@contextmanager
def flash2() -> Iterator[None]:
    """Make flash-attn 2's varlen calls importable, with the signatures of 2.7."""

    def varlen_fwd(
        q, k, v, out, cu_seqlens_q, cu_seqlens_k, seqused_k, leftpad_k, block_table, alibi_slopes, max_seqlen_q,
        max_seqlen_k, dropout_p, softmax_scale, zero_tensors, causal, window_size_left, window_size_right, softcap,
        return_softmax, generator,
    ):  # fmt: skip
        assert (seqused_k, leftpad_k, block_table, alibi_slopes, generator) == (None,) * 5
        assert (dropout_p, zero_tensors, causal, softcap, return_softmax) == (0.0, False, True, 0.0, False)
        assert (window_size_left, window_size_right) == (-1, -1)
        lse = _varlen_forward((q, k, v), out, _documents(locals()), softmax_scale)
        return out, lse, None, None

    def _flash_attn_varlen_backward(
        dout, q, k, v, out, softmax_lse, dq, dk, dv, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k,
        dropout_p, softmax_scale, causal, window_size_left, window_size_right, softcap, alibi_slopes, deterministic,
        rng_state=None, zero_tensors=False,
    ):  # fmt: skip
        assert (dropout_p, causal, softcap, alibi_slopes) == (0.0, True, 0.0, None)
        assert (window_size_left, window_size_right) == (-1, -1)
        documents = _documents(locals())
        _varlen_backward(dout, (q, k, v), (out, softmax_lse), (dq, dk, dv), documents, softmax_scale)

    calls = {"varlen_fwd": staticmethod(varlen_fwd)}
    contents = {
        "flash_attn_gpu": type("flash_attn_gpu", (), calls),
        "_flash_attn_varlen_backward": _flash_attn_varlen_backward,
    }
    with installed({"flash_attn": {}, "flash_attn.flash_attn_interface": contents}):
        yield


def _by_name(schema: str, values: tuple[Any, ...], named: dict[str, Any]) -> dict[str, Any]:
    """Return an operator's arguments by name, with defaults for the missing ones."""
    arguments = torch._C.parse_schema("flash_attn_3::" + " ".join(schema.split())).arguments
    given = {argument.name: argument.default_value for argument in arguments}
    return given | dict(zip([argument.name for argument in arguments], values, strict=False)) | named


def _flash4_forward(new: bool) -> Any:
    def run(q: Tensor, k: Tensor, v: Tensor, given: dict[str, Any]) -> Any:
        out, lse = given["out"], given["lse"]
        assert q.dtype in (torch.bfloat16, torch.float16)
        assert out.shape == (*q.shape[:3], v.shape[3])
        assert out.dtype == q.dtype
        assert lse.shape == (q.shape[0], q.shape[2], q.shape[1])
        assert lse.dtype == torch.float32
        assert lse.stride(-1) == 1
        assert out.stride(-1) == 1
        assert all(stride % 8 == 0 for stride in out.stride()[:-1])
        result, logsumexp = _forward(q, k, v, given["softmax_scale"], **_masked(given, "causal"))
        out.copy_(result)
        lse.copy_(logsumexp)
        return (out, lse, None, None) if new else (out, lse)

    def older(
        q, k, v, cu_seqlens_q=None, cu_seqlens_k=None, seqused_q=None, seqused_k=None, max_seqlen_q=None,
        max_seqlen_k=None, page_table=None, softmax_scale=None, causal=False, softcap=None, window_size_left=None,
        window_size_right=None, learnable_sink=None, tile_mn=None, mma_pv_is_rs=None, intra_wg_overlap=None,
        num_threads=384, num_splits=1, pack_gqa=None, _arch=None, score_mod=None, mask_mod=None,
        block_sparse_tensors=None, return_lse=False, out=None, lse=None, aux_tensors=None,
    ):  # fmt: skip
        return run(q, k, v, locals())

    def newer(
        q, k, v, qv=None, cu_seqlens_q=None, cu_seqlens_k=None, seqused_q=None, seqused_k=None, max_seqlen_q=None,
        max_seqlen_k=None, min_seqlen_k=None, page_table=None, softmax_scale=None, causal=False, softcap=None,
        window_size_left=None, window_size_right=None, learnable_sink=None, tile_mn=None, mma_pv_is_rs=None,
        intra_wg_overlap=None, num_threads=384, num_splits=1, pack_gqa=None, _arch=None, score_mod=None,
        mask_mod=None, block_sparse_tensors=None, return_lse=False, out=None, lse=None, aux_tensors=None,
        aux_scalars=None, q_descale=None, k_descale=None, v_descale=None, gather_kv_indices=None,
        scheduler_metadata=None, seqlen_k_per_split=None, disable_scheduler_metadata=False,
    ):  # fmt: skip
        return run(q, k, v, locals())

    return newer if new else older


def _flash4_backward(
    q, k, v, out, dout, lse, softmax_scale=None, causal=False, softcap=0.0, window_size_left=None,
    window_size_right=None, m_block_size=64, n_block_size=128, num_threads=256, pack_gqa=False, num_stages_Q=2,
    num_stages_dO=2, SdP_swapAB=False, dKV_swapAB=False, dQ_swapAB=False, AtomLayoutMSdP=2, AtomLayoutNdKV=2,
    AtomLayoutMdQ=2, V_in_regs=False, cu_seqlens_q=None, cu_seqlens_k=None, seqused_q=None, seqused_k=None,
    max_seqlen_q=None, max_seqlen_k=None, deterministic=False, dq=None, dk=None, dv=None, score_mod=None,
    score_mod_bwd=None, mask_mod=None, aux_tensors=None, aux_scalars=None, block_sparse_tensors=None, dlse=None,
    learnable_sink=None,
):  # fmt: skip
    assert out.shape == dout.shape == (*q.shape[:3], v.shape[3])
    given = {"causal": causal, "window_size_left": window_size_left, "window_size_right": window_size_right}
    found = _backward(dout, (q, k, v), out, lse, softmax_scale, **_masked(given, "causal"))
    for target, like, result in zip((dq, dk, dv), (q, k, v), found, strict=True):
        assert target.shape == like.shape
        assert target.dtype == like.dtype
        target.copy_(result)
    return dq, dk, dv


@contextmanager
def flash4(*, new: bool) -> Iterator[None]:
    """Make flash-attn-4 importable, in its new form or in the form before beta 19."""
    contents = {"_flash_attn_fwd": _flash4_forward(new), "_flash_attn_bwd": _flash4_backward}
    with installed({"flash_attn": {}, "flash_attn.cute": {}, "flash_attn.cute.interface": contents}):
        yield


def _flat(x: Tensor) -> Tensor:
    """Return the tensor as a kernel that ignores strides reads it."""
    dense = torch.empty(x.shape).stride()
    return x.as_strided(x.shape, dense)


def _te_checked(given: dict[str, Any], tensors: list[Tensor]) -> dict[str, Any]:
    q, k = given["q"], given["k"]
    assert all(x.dtype == torch.bfloat16 for x in tensors)
    assert given["fake_dtype"] == torch.bfloat16
    assert given["fused_attention_backend"] == "NVTE_F16_arbitrary_seqlen"
    assert given["qkv_layout"] == "bshd_bshd_bshd"
    assert given["dropout"] == 0.0
    assert given["attn_bias_type"] == "no_bias"
    assert all(given.get(name, "bshd") == "bshd" for name in ("o_format", "do_format"))
    assert given.get("dqkv_layout", "bshd_bshd_bshd") == "bshd_bshd_bshd"
    for x, name in ((q, "q"), (k, "kv")):
        starts = given[f"cu_seqlens_{name}"]
        assert starts.dtype == torch.int32
        assert starts.tolist() == [i * x.shape[1] for i in range(x.shape[0] + 1)]
        assert given[f"max_seqlen_{name}"] == x.shape[1]
    left, right = given["window_size"]
    causal = {"causal": True, "causal_bottom_right": True, "no_mask": False}[given["attn_mask_type"]]
    assert (right == 0) == causal
    assert (left >= 0) == (given["attn_mask_type"] == "causal_bottom_right")
    return {"causal": causal, "window": left + 1}


def _te_forward(given: dict[str, Any]) -> Any:
    qkv = [given[name] for name in "qkv"]
    masked = _te_checked(given, qkv)
    assert given["is_training"]
    out, lse = _forward(*(_flat(x) for x in qkv), given["attn_scale"], **masked)
    return out.to(torch.bfloat16), [lse.unsqueeze(-1), torch.zeros(2, dtype=torch.int64)]


def _te_backward(given: dict[str, Any]) -> Any:
    tensors = [given[name] for name in ("d_o", "q", "k", "v", "o")]
    masked = _te_checked(given, tensors)
    stats, state = given["aux_ctx_tensors"]
    assert state.dtype == torch.int64
    assert state.shape == (2,)
    grad, q, k, v, out = (_flat(x) for x in tensors)
    found = _backward(grad, (q, k, v), out, stats.squeeze(-1), given["attn_scale"], **masked)
    return [*(x.to(torch.bfloat16) for x in found), None]


def _te_2_9() -> dict[str, Any]:
    def fused_attn_fwd(
        is_training, max_seqlen_q, max_seqlen_kv, cu_seqlens_q, cu_seqlens_kv, q, k, v, fake_dtype,
        fused_attention_backend, attn_bias=None, cu_seqlens_q_padded=None, cu_seqlens_kv_padded=None,
        page_table_k=None, page_table_v=None, s_quantizer=None, o_quantizer=None, attn_scale=None, dropout=0.0,
        fast_zero_fill=True, qkv_layout="sbh3d", attn_bias_type="no_bias", attn_mask_type="padding",
        softmax_type="vanilla", window_size=(-1, -1), rng_gen=None, softmax_offset=None, return_max_logit=False,
    ):  # fmt: skip
        return _te_forward(locals())

    def fused_attn_bwd(
        max_seqlen_q, max_seqlen_kv, cu_seqlens_q, cu_seqlens_kv, q, k, v, o, d_o, fake_dtype, dqkv_dtype,
        aux_ctx_tensors, fused_attention_backend, cu_seqlens_q_padded=None, cu_seqlens_kv_padded=None,
        s_quantizer=None, dp_quantizer=None, dqkv_quantizer=None, attn_scale=None, dropout=0.0, fast_zero_fill=True,
        qkv_layout="sbh3d", attn_bias_type="no_bias", attn_mask_type="padding", softmax_type="vanilla",
        window_size=(-1, -1), deterministic=False,
    ):  # fmt: skip
        assert dqkv_dtype == "kBFloat16"
        return _te_backward(locals())

    return {"fused_attn_fwd": fused_attn_fwd, "fused_attn_bwd": fused_attn_bwd}


def _te_2_20() -> dict[str, Any]:
    def fused_attn_fwd(
        is_training, max_seqlen_q, max_seqlen_kv, cu_seqlens_q, cu_seqlens_kv, q, k, v, fake_dtype,
        fused_attention_backend, attn_bias=None, cu_seqlens_q_padded=None, cu_seqlens_kv_padded=None,
        page_table_k=None, page_table_v=None, s_quantizer=None, o_quantizer=None, attn_scale=None, dropout=0.0,
        fast_zero_fill=True, qkv_layout="sbh3d", o_format="sbhd", qkv_scale_inv_format=None, attn_bias_type="no_bias",
        attn_mask_type="padding", softmax_type="vanilla", window_size=(-1, -1), bottom_right_diagonal=None,
        rng_gen=None, softmax_offset=None, return_max_logit=False, cuda_graph=False,
    ):  # fmt: skip
        return _te_forward(locals())

    def fused_attn_bwd(
        max_seqlen_q, max_seqlen_kv, cu_seqlens_q, cu_seqlens_kv, q, k, v, o, d_o, fake_dtype, aux_ctx_tensors,
        fused_attention_backend, cu_seqlens_q_padded=None, cu_seqlens_kv_padded=None, s_quantizer=None,
        dp_quantizer=None, dqkv_quantizer=None, attn_scale=None, dropout=0.0, fast_zero_fill=True, qkv_layout="sbh3d",
        o_format="sbhd", do_format="sbhd", dqkv_layout="sbh3d", qkv_scale_inv_format=None, do_scale_inv_format=None,
        attn_bias_type="no_bias", attn_mask_type="padding", softmax_type="vanilla", window_size=(-1, -1),
        bottom_right_diagonal=None, deterministic=False, cuda_graph=False,
    ):  # fmt: skip
        return _te_backward(locals())

    return {"fused_attn_fwd": fused_attn_fwd, "fused_attn_bwd": fused_attn_bwd}


@contextmanager
def transformer_engine(*, new: bool) -> Iterator[None]:
    """Make transformer-engine importable, as version 2.20 (``new``) or 2.9."""
    functions = _te_2_20() if new else _te_2_9()
    package = "transformer_engine.pytorch"
    extensions = {"FusedAttnBackend": {"F16_arbitrary_seqlen": "NVTE_F16_arbitrary_seqlen"}, **functions}
    contents: dict[str, dict[str, Any]] = {
        "transformer_engine": {},
        package: {},
        f"{package}.constants": {"TE_DType": {torch.bfloat16: "kBFloat16"}},
        f"{package}.cpp_extensions": {},
        f"{package}.cpp_extensions.fused_attn": extensions,
    }
    with installed(contents):
        yield
