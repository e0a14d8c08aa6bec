"""Decides how a plan's MLP, attention and loss are cut into row blocks or chunks.

MLP         row blocks of a rank's tokens; only with full recompute (``program/layers/mlp.py``), and with row-wise
            recompute, where they hold all of a layer but attention (``program/layers/rowwise.py``)
attention   chunks of the sequence, whose keys and values wait on the host; with full recompute
            (``program/attention/chunked.py``), and with row-wise recompute, whose blocks divide them
loss        tokens whose logits exist at the same time (``program/layers/embedding_and_head.py``)
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import msgspec

from memo_sim.contract.errors import Infeasible
from memo_sim.contract.knobs import LINEAR_LOSSES
from memo_sim.contract.plan import Decisions, Layout
from memo_sim.contract.units import DTYPE_BYTES, KIB
from memo_sim.planning.attention_kernels import head_groups
from memo_sim.planning.contradictions import check_rules
from memo_sim.planning.presets import Policy
from memo_sim.planning.question import Question
from memo_sim.program.layout.attention_chunks import (
    check_attention_chunks,
    most_chunks,
    ranks_of_a_chunk,
    rows_of_a_chunk,
)
from memo_sim.program.layout.compatibility import check_compatible, goes_together
from memo_sim.program.layout.rowwise_blocks import ROWWISE, is_rowwise
from memo_sim.program.layout.rules.attention_chunks import CHUNKS_UNDER_RECOMPUTE, ROW_BLOCKS_OF_CHUNKS
from memo_sim.program.layout.rules.experts import EXPERTS_WHOLE_MLP
from memo_sim.program.layout.rules.mlp_blocks import MLP_BLOCKS_UNDER_FULL_RECOMPUTE, MLP_BLOCKS_UNDER_ZERO_BUBBLE
from memo_sim.program.layout.rules.rule import Rule
from memo_sim.program.layout.shape import Shape, shape_of
from memo_sim.program.operators.workspaces import loss_tiles

BLOCKS = 8
"""Default number of blocks or chunks. With this many, one needs less memory than the rest of a layer."""
ROWWISE_BLOCKS = 16
"""The same for row-wise recompute, which leaves little else of a layer."""
MLP_BLOCKS_OF_A_CHUNK, LOSS_CHUNKS_OF_A_CHUNK = 2, 32
"""MLP blocks and loss chunks per attention chunk of a rank, for systems that fix ``System.chunk_tokens``."""
WHOLE_LOSSES = ("eager-fp32", "vocab-parallel")
"""Forms of the loss that frameworks compute for all tokens at once."""
LOGIT_BYTES = 2**30
"""Upper limit for the logits of one loss chunk and their gradient; the classifier reaches its full rate below it."""
LEAST_MLP_ROWS = 4096
"""Smallest number of rows of an MLP block; products with fewer rows are slower (the profiles' curves by rows)."""
LEAST_CHUNK_TOKENS = 64 * KIB
"""Smallest attention chunk. Shorter calls are slower, and fetch as many bytes for a fraction of the products."""
FINEST_MLP_ROWS, FINEST_CHUNK_TOKENS = 16 * KIB, 32 * KIB
"""Rows of an MLP block and tokens of an attention chunk where no larger ones fit (``Policy.finest``). On one H200,
row-wise recompute of 1.5M tokens of an 8B model then needs 9.5 GiB less; its steps are 1 % longer than with 64K."""
LEAST_CHUNKS = 4
"""Smallest number of attention chunks; with fewer, the double buffers need what chunks save (reports/sppo.md)."""
LEAST_ROWWISE = 0.3
"""Least fraction of a device that row-wise recompute needs with whole attention, where chunks are tried: they save a
third of it, and cost copies, and programs with a call for every pair of chunks."""
LEAST_SAVED = 0.1
"""Least fraction of a device that attention of all rows needs, where chunks beside a ring are tried: they cost time,
and their programs have a call for every pair of chunks and rank."""
CHUNKS_OF_PARTS, LEAST_CHUNKS_OF_PARTS = 4, 2
"""Default and smallest number of attention chunks under METP, whose double buffers hold a part of the heads alone."""


def pinned(found: tuple[Policy, ...], question: Question) -> tuple[Policy, ...]:
    """Return the policies that are compatible with the pinned blocks or chunks.

    Only full and row-wise recompute have blocks. A pin of 0 means no blocks.

    Raises:
        UsageError: when no policy is left.
    """
    rows, tokens = question.pins.mlp_chunk_tokens, question.pins.attention_chunk_tokens
    base = question.decisions(Layout())
    if rows is not None:
        left = _left(found, MLP_BLOCKS_UNDER_FULL_RECOMPUTE, msgspec.structs.replace(base, mlp_chunk_tokens=rows))
        found = tuple(dict.fromkeys(replace(p, mlp_blocks=rows > 0) for p in left))
    if tokens is not None:
        # A chunk that holds the whole sequence is for full recompute as well.
        cut = msgspec.structs.replace(base, attention_chunk_tokens=min(tokens, question.seq_tokens - 1))
        left = _left(found, CHUNKS_UNDER_RECOMPUTE, cut)
        found = tuple(dict.fromkeys(replace(p, attention_chunks=tokens > 0) for p in left))
    return found


def _left(found: Sequence[Policy], rule: Rule, cut: Decisions) -> list[Policy]:
    """Return the policies whose recompute goes with ``cut``.

    Raises:
        UsageError: when there is none.
    """
    tried = [(policy, msgspec.structs.replace(cut, recompute=policy.recompute)) for policy in found]
    left = [policy for policy, decisions in tried if not rule.breaks(decisions)]
    if not left:
        check_rules((rule,), tried[0][1])
    return left


def cut(question: Question, whole: Decisions, policy: Policy, others: Sequence[Policy]) -> Decisions | None:
    """Return ``whole`` cut as ``policy`` says; None when one of ``others`` gives the same plan, or applies instead.

    Row-wise recompute that does not go with the layout is left out where there are other policies. Attention runs in as
    few head groups as its longest call allows.

    Raises:
        Infeasible: when the layout does not allow chunks that are pinned, or that are the system's only policy; when no
        number of head groups is enough.
    """
    rowwise = is_rowwise(whole)
    if rowwise and any(p.recompute != ROWWISE for p in others) and not goes_together(whole):
        return None
    kernel, shape = whole.kernels.attention, shape_of(whole)
    tokens = attention_chunk(question, whole, finest=policy.finest) if policy.attention_chunks else 0
    rows = mlp_chunk(question, whole, finest=policy.finest) if policy.mlp_blocks else 0
    if rowwise and tokens and question.pins.mlp_chunk_tokens is None:
        rows = _rows_in_a_chunk(msgspec.structs.replace(whole, attention_chunk_tokens=tokens), rows)
    one_block = not rows and any(not p.mlp_blocks for p in others)
    if policy.mlp_blocks and (one_block or (not rowwise and _whole_mlp(question, whole))):
        return None
    rebuild = question.pins.mlp_rebuild or (question.preset.mlp_rebuild if rows else "block")
    made = msgspec.structs.replace(whole, mlp_chunk_tokens=rows, mlp_rebuild=rebuild, attention_chunk_tokens=tokens)
    optional = question.pins.attention_chunk_tokens is None and any(not p.attention_chunks for p in others)
    if policy.attention_chunks and optional and not tokens:
        return None
    try:
        check_attention_chunks(made)
        check_compatible(made)
    except Infeasible:
        if policy.attention_chunks and (optional or (rowwise and any(p.recompute != ROWWISE for p in others))):
            return None
        raise
    kernels = msgspec.structs.replace(made.kernels, attention=kernel, head_groups=head_groups(shape, made, kernel))
    return msgspec.structs.replace(made, kernels=kernels)


def _rows_in_a_chunk(chunked: Decisions, rows: int) -> int:
    """Return the rows of a block of row-wise recompute in chunks of attention: ``rows`` where they are allowed."""
    divided = msgspec.structs.replace(chunked, mlp_chunk_tokens=rows)
    return rows if not ROW_BLOCKS_OF_CHUNKS.breaks(divided) else rows_of_a_chunk(chunked)


def _whole_mlp(question: Question, decisions: Decisions) -> bool:
    """Return whether an MLP in row blocks is not tried.

    W passes need the inputs of the whole MLP, and experts the rows of all tokens.
    """
    cut = msgspec.structs.replace(decisions, mlp_chunk_tokens=decisions.swap_granule)
    unasked = question.pins.mlp_chunk_tokens is None
    return MLP_BLOCKS_UNDER_ZERO_BUBBLE.breaks(cut) or (unasked and EXPERTS_WHOLE_MLP.breaks(cut))


def mlp_chunk(question: Question, base: Decisions, *, finest: bool = False) -> int:
    """Return the rows of an MLP block: the pinned number, the system's, or an eighth of the tokens.

    With row-wise recompute, a sixteenth of the tokens; ``finest``: no more than ``FINEST_MLP_ROWS``. 0 when one block
    would have all tokens.
    """
    asked, tokens, granule = question.pins.mlp_chunk_tokens, base.local_tokens, base.swap_granule
    if asked is not None:
        return asked
    own = _rows_of_a_chunk(question, base) // MLP_BLOCKS_OF_A_CHUNK
    if question.preset.mlp_tiles:
        own = -(-tokens // -(-tokens // base.model.hidden))
    count = ROWWISE_BLOCKS if is_rowwise(base) else BLOCKS
    usual = max(-(-tokens // count), LEAST_MLP_ROWS)
    rows = -(-(own or (min(usual, FINEST_MLP_ROWS) if finest else usual)) // granule) * granule
    return rows if rows < tokens else 0


def _rows_of_a_chunk(question: Question, base: Decisions) -> int:
    """Return a rank's rows of one attention chunk when the system fixes the chunk's length; else 0."""
    own = question.preset.chunk_tokens
    return (attention_chunk(question, base) or own) // ranks_of_a_chunk(base) if own else 0


def loss_chunk(question: Question, base: Decisions, shape: Shape) -> int:
    """Return the tokens of a loss chunk: the pinned number, the system's, or a default; 0 when there is one chunk.

    An eager framework does not cut the loss into chunks, unless its authors say so; nor do the losses of autograd and
    of Megatron-LM.
    """
    if question.pins.loss_chunk_tokens is not None:
        return question.pins.loss_chunk_tokens
    if own := _rows_of_a_chunk(question, base) // LOSS_CHUNKS_OF_A_CHUNK:
        return own if own < shape.tokens else 0
    system = question.preset
    if (own := system.loss_chunk_tokens) and base.loss not in WHOLE_LOSSES:
        return own if own < shape.tokens else 0
    uncut = base.memory_policy == "eager" and system.loss != "blocks"
    whole = uncut or system.whole_loss or base.loss in WHOLE_LOSSES
    return 0 if whole else default_loss_chunk(base, shape)


def default_loss_chunk(decisions: Decisions, shape: Shape) -> int:
    """Return the largest power of two whose logits and gradient stay below 1 GiB; 0 when all tokens' do.

    With the classifier's product inside the loss, these are the logits of a tile, and the input's gradient in fp32.
    """
    size = DTYPE_BYTES[decisions.dtype]
    per_token = 2 * shape.vocab * size
    if decisions.loss in LINEAR_LOSSES:
        wide = 0 if decisions.dtype == "fp32" else DTYPE_BYTES["fp32"] * shape.hidden
        per_token = loss_tiles(shape.vocab)[0][1] * size + wide
    return 0 if shape.tokens * per_token <= LOGIT_BYTES else 1 << (LOGIT_BYTES // per_token).bit_length() - 1


def attention_chunk(question: Question, base: Decisions, *, finest: bool = False) -> int:
    """Return the tokens of an attention chunk: the pinned number, the system's, or an eighth of the sequence.

    ``finest``: no more than ``FINEST_CHUNK_TOKENS``, or as few as the limit of the number of chunks allows.
    A chunk consists of whole row blocks on every rank, and the number of chunks is limited. 0 when one chunk would hold
    the whole sequence, or when chunks would save no memory and the system does not fix their length. Beside a ring,
    which divides attention's rows already, chunks are tried only where these rows still need much of a device; so with
    row-wise recompute, which already rebuilds the rest in blocks.
    """
    asked, granule = question.pins.attention_chunk_tokens, base.swap_granule * ranks_of_a_chunk(base)
    own, tokens = question.preset.chunk_tokens, question.seq_tokens
    if asked is not None:
        return asked if asked < tokens else 0
    count, least = (CHUNKS_OF_PARTS, LEAST_CHUNKS_OF_PARTS) if base.layout.metp > 1 else (BLOCKS, LEAST_CHUNKS)
    wanted = own or (FINEST_CHUNK_TOKENS if finest else max(LEAST_CHUNK_TOKENS, -(-tokens // count)))
    if is_rowwise(base) and _rowwise_bytes(base) < LEAST_ROWWISE * question.hardware.device_memory_bytes.value:
        return 0
    if base.layout.ring > 1 and _attention_bytes(base) < LEAST_SAVED * question.hardware.device_memory_bytes.value:
        return 0
    chunk = max(wanted // granule, -(-tokens // (most_chunks(base.layout) * granule)), 1) * granule
    return chunk if (1 if own else least - 1) * chunk < tokens else 0


def _rowwise_bytes(base: Decisions) -> float:
    """Return the bytes that attention's backward needs in row-wise recompute, with the other rounding buffer.

    They are Q, K and V, the output, their gradients, the layer's input and the residual's gradient; in the other buffer
    an input and an output.
    """
    model, layout = base.model, base.layout
    inside = (5 * model.q_width + 4 * model.kv_width) / layout.tp
    beside = 3 * model.hidden / (layout.tp if layout.sequence_parallel else 1)
    return base.local_tokens * (inside + beside) * DTYPE_BYTES[base.dtype]


def _attention_bytes(base: Decisions) -> float:
    """Return the bytes that attention of all rows needs in backward: Q, K and V, the output, and their gradients.

    Under METP they are what chunks save beside the MLP's backward (``layers/metp_chunks.py``).
    """
    model, layout = base.model, base.layout
    width = 2 * (2 * model.q_width + 2 * model.kv_width) / layout.tp
    if layout.metp > 1:
        width = model.hidden + model.q_width + (model.q_width + 6 * model.kv_width) / layout.metp
    return base.local_tokens * width * DTYPE_BYTES[base.dtype]
