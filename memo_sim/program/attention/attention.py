"""Attention over a rank's tokens: chooses the form by the decisions and writes its forward and backward.

cp 1           one square over all tokens, causal unless the model is bidirectional
subsequences   a square over the subsequence's own tokens, and one call over all earlier keys (``subsequence.py``);
               with cp also calls over the keys of other ranks (``divided_subsequence.py``), and of a part of a
               subsequence of several sequences, calls by sequence (``portion.py``)
ring           the local square; keys and values pass from rank to rank (``ring.py``)
windowed       a window's keys come from the neighbouring ranks alone, in both forms above (``windowed.py``)
all_gather     the local square; every rank gathers all keys and values (``all_gather.py``)
rsa            whole rows of scores in memory; keys, then values, pass round the ring (``rsa.py``)
plain          all scores in memory, without a flash kernel (``plain.py``)
"""

from __future__ import annotations

from typing import Protocol

from memo_sim.contract.plan import Decisions
from memo_sim.program.attention import all_gather as gathered_attention
from memo_sim.program.attention import divided_subsequence, portion, ring, rsa, windowed
from memo_sim.program.attention import plain as plain_attention
from memo_sim.program.attention import subsequence as prefix_attention
from memo_sim.program.attention.partial import attention_work, documents, workspace
from memo_sim.program.ir.builder import TemplateBuilder, reads, writes
from memo_sim.program.ir.instruction import Lane
from memo_sim.program.ir.work import Mask
from memo_sim.program.layout.documents import own_segments
from memo_sim.program.layout.shape import Shape
from memo_sim.program.layout.skeletal import Skeletal


class _Around(Protocol):
    """Interface of a form of context parallelism.

    ``start`` writes the instructions before the local square, ``forward`` those after it, and ``backward`` those after
    its backward.
    """

    def start(self, builder: TemplateBuilder, decisions: Decisions, shape: Shape, suffix: str = "") -> None: ...

    def forward(self, builder: TemplateBuilder, decisions: Decisions, shape: Shape) -> None: ...

    def backward(self, builder: TemplateBuilder, decisions: Decisions, shape: Shape) -> None: ...


class _Whole(Protocol):
    """Interface of a form that writes all of attention."""

    def forward(self, builder: TemplateBuilder, decisions: Decisions, shape: Shape) -> None: ...

    def backward(self, builder: TemplateBuilder, decisions: Decisions, shape: Shape) -> None: ...


def forward(builder: TemplateBuilder, decisions: Decisions, shape: Shape) -> None:
    """Write attention forward: reads ``qkv``, writes ``attn`` and ``lse``.

    A subsequence reads ``q`` and ``prefix.kv`` instead of ``qkv``. Plain attention and RSA write scores instead of
    ``lse``.
    """
    if rsa.writes_scores(decisions):
        rsa.forward(builder, decisions, shape)
        return
    if decisions.kernels.attention == plain_attention.PLAIN:
        plain_attention.forward(builder, decisions, shape)
        return
    if shape.kv_cache_tokens:
        _of_a_subsequence(decisions, shape).forward(builder, decisions, shape)
        return
    if shape.window and shape.cp > 1:
        windowed.forward(builder, decisions, shape)
        return
    tokens, around = shape.tokens, _around(decisions)
    own = own_segments(decisions, shape.window)
    work = attention_work(
        decisions, shape, tokens, tokens, _mask(decisions), backward=False, window=shape.window, segments=own
    )
    scratch = workspace(builder, decisions, work, "attn.scratch")
    if shape.cp > 1:
        around.start(builder, decisions, shape)
    builder.emit(
        "attn",
        "attention",
        Lane.COMPUTE,
        work,
        qkv=reads(builder.all("qkv")),
        **documents(builder),
        out=writes(builder.all("attn")),
        lse=writes(builder.all("lse")),
        workspace=scratch,
    )
    if shape.cp > 1:
        around.forward(builder, decisions, shape)


def backward(builder: TemplateBuilder, decisions: Decisions, shape: Shape) -> None:
    """Write attention backward: reads ``qkv``, ``attn``, ``lse`` and ``d_attn``; writes ``d_qkv``.

    A subsequence reads ``q`` and ``prefix.kv`` instead of ``qkv``. Plain attention and RSA read scores instead of
    ``lse``.
    """
    if rsa.writes_scores(decisions):
        rsa.backward(builder, decisions, shape)
        return
    if decisions.kernels.attention == plain_attention.PLAIN:
        plain_attention.backward(builder, decisions, shape)
        return
    if shape.kv_cache_tokens:
        _of_a_subsequence(decisions, shape).backward(builder, decisions, shape)
        return
    if shape.window and shape.cp > 1:
        windowed.backward(builder, decisions, shape)
        return
    tokens, around = shape.tokens, _around(decisions)
    own = own_segments(decisions, shape.window)
    work = attention_work(
        decisions, shape, tokens, tokens, _mask(decisions), backward=True, window=shape.window, segments=own
    )
    scratch = workspace(builder, decisions, work, "attn.bwd.scratch")
    if shape.cp > 1:
        around.start(builder, decisions, shape, ".bwd")
    builder.emit(
        "attn.bwd",
        "attention.bwd",
        Lane.COMPUTE,
        work,
        grad=reads(builder.all("d_attn")),
        qkv=reads(builder.all("qkv")),
        **documents(builder),
        out=reads(builder.all("attn")),
        lse=reads(builder.all("lse")),
        grad_qkv=writes(builder.all("d_qkv")),
        workspace=scratch,
    )
    if shape.cp > 1:
        around.backward(builder, decisions, shape)


def kept_scores(decisions: Decisions, shape: Shape) -> tuple[Skeletal, ...]:
    """Return the score tensors kept for backward instead of ``lse``; empty with a flash kernel.

    ``shape`` has the sizes inside attention (``Shape.attention``).
    """
    if rsa.writes_scores(decisions):
        return rsa.kept(decisions, shape)
    return plain_attention.kept(decisions, shape) if decisions.kernels.attention == plain_attention.PLAIN else ()


def longest_keys(decisions: Decisions, shape: Shape) -> int:
    """Return the most keys that one call reads, counted over all sequences of the micro-batch.

    ``shape`` has the sizes inside attention (``Shape.attention``).
    """
    if not _gathers(decisions):
        return shape.tokens
    subsequences = decisions.layout.subsequences > 1
    gathered = (
        divided_subsequence.most_gathered_keys(decisions)
        if subsequences
        else gathered_attention.most_keys(decisions, shape)
    )
    return max(shape.tokens, gathered)


def _of_a_subsequence(decisions: Decisions, shape: Shape) -> _Whole:
    """Return the form of attention beside a KV cache of the prefix."""
    if shape.cp > 1:
        return windowed if shape.window else divided_subsequence
    return portion if portion.is_portion(decisions, shape) else prefix_attention


def _mask(decisions: Decisions) -> Mask:
    return "none" if decisions.model.bidirectional else "causal"


def _gathers(decisions: Decisions) -> bool:
    return decisions.layout.cp_exchange == "all_gather"


def _around(decisions: Decisions) -> _Around:
    return gathered_attention if _gathers(decisions) else ring
