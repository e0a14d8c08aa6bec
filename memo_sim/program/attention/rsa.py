"""Ring self-attention (RSA): keys, then values, pass round the ring, and each rank stores whole rows of scores.

Source: Li et al. 2021. Tokens are divided over the cp ranks, and every rank has whole weights. A rank keeps its own
queries. A row of scores is complete only after all keys have passed, so the row is stored, and no flash kernel applies
(METP, 2.3.2 and Figure 1d). Scores are stored in blocks, one for the keys of each rank, in the order of ranks:

    own keys   scores[own] = Q K^T          softmax over a row's blocks, in place
    step j     scores[r - j] = Q K^T        own values   attn = probs[own] V
               keys one hop on              step j       attn += probs[r - j] V, values one hop on

    backward   dV of every rank's values = probs^T d_attn, summed over the ranks by one all-reduce, own rows taken
               values go round again: d_scores[r - j] = d_attn V^T;  softmax's backward, in place
               dK of every rank's keys = d_scores^T Q, all-reduced;  keys go round again: dQ += d_scores[r - j] K

A round of hops sends (p - 1) / p of a tensor, and an all-reduce sends twice that. A layer therefore sends
8 (p - 1) / p x tokens x hidden elements (METP, Table 2). Hops alternate between two buffers and run beside the product
before; all-reduces run beside the instructions after. This is the best overlap that RSA can have, which may be more
than its authors' code achieves.

A causal mask saves no product: the softmax applies it, by the position of each token on any rank. The softmax is priced
as one pass of a fused kernel, while memo-exec plays torch's operators. RSA has no dropout; only plain attention has.
With one rank nothing is exchanged, but the scores are still written.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Literal

from memo_sim.contract.plan import Decisions
from memo_sim.contract.units import DTYPE_BYTES
from memo_sim.program.attention.ring import DOUBLE_BUFFER_SLOTS
from memo_sim.program.ir.builder import Access, Rows, TemplateBuilder, accumulates, reads, writes
from memo_sim.program.ir.instruction import BufferClass, Lane, Mode
from memo_sim.program.ir.work import BatchedGemm, Collective, Exchange, Rowwise
from memo_sim.program.layout.shape import Shape
from memo_sim.program.layout.skeletal import Fate, Skeletal
from memo_sim.program.operators.workspaces import score_softmax_backward_workspace_bytes, score_softmax_workspace_bytes

ROLES = {"dk": "keys", "dv": "values"}
"""The operand that each gradient belongs to."""


def writes_scores(decisions: Decisions) -> bool:
    """Return whether attention is ring self-attention."""
    return decisions.layout.cp_exchange == "rsa"


def kept(decisions: Decisions, shape: Shape) -> tuple[Skeletal, ...]:
    """Return the tensor that backward needs beside Q, K, V and the output: one probability for each score.

    ``shape`` has the sizes inside attention (``Shape.attention``).
    """
    keys = shape.tokens // decisions.micro_batch
    return (Skeletal("probs", shape.cp * shape.tokens, shape.heads * keys, decisions.dtype, Fate.WHOLE),)


def forward(builder: TemplateBuilder, decisions: Decisions, shape: Shape) -> None:
    """Write attention forward: reads slot ``qkv``, writes ``probs`` and ``attn``."""
    write = _Rsa(builder, decisions, shape)
    qkv, probs = reads(builder.all("qkv")), builder.all("probs")
    for step, keys in write.round("keys"):
        block = writes(write.block("probs", step))
        write.product(f"attn.scores{step}", "rsa.scores", "scores", qkv=qkv, keys=keys, out=block)
    scratch = score_softmax_workspace_bytes(write.tokens, write.keys, decisions.dtype, masked=write.masked)
    write.pass_over_scores("attn.softmax", "rsa.softmax", 1, scratch, x=accumulates(probs))
    for step, values in write.round("values"):
        attn = builder.all("attn")
        write.product(
            f"attn.values{step}",
            "rsa.values",
            "rows",
            probs=reads(write.block("probs", step)),
            qkv=None if values else qkv,
            values=values,
            out=accumulates(attn) if step else writes(attn),
        )


def backward(builder: TemplateBuilder, decisions: Decisions, shape: Shape) -> None:
    """Write attention backward: reads ``qkv``, ``probs`` and ``d_attn``, writes ``d_qkv``."""
    write = _Rsa(builder, decisions, shape, ".bwd")
    qkv, grad = reads(builder.all("qkv")), reads(builder.all("d_attn"))
    d_qkv, keys = builder.all("d_qkv"), shape.tokens // decisions.micro_batch
    builder.own("d_scores", BufferClass.TRANSIENT, decisions.dtype, shape.cp * shape.tokens, shape.heads * keys)
    write.summed("dv", "rsa.dv", probs=reads(builder.all("probs")), grad=grad)
    for step, values in write.round("values"):
        write.product(
            f"attn.dprobs{step}",
            "rsa.dprobs",
            "scores",
            grad=grad,
            qkv=None if values else qkv,
            values=values,
            out=writes(write.block("d_scores", step)),
        )
    scratch = score_softmax_backward_workspace_bytes(write.tokens, write.keys, decisions.dtype)
    write.pass_over_scores(
        "attn.softmax.bwd",
        "rsa.softmax.bwd",
        2,
        scratch,
        probs=reads(builder.all("probs")),
        grad=accumulates(builder.all("d_scores")),
    )
    write.return_gradients("dv", writes(d_qkv))
    write.summed("dk", "rsa.dk", grad=reads(builder.all("d_scores")), qkv=qkv)
    for step, arrived in write.round("keys"):
        write.product(
            f"attn.dq{step}",
            "rsa.dq",
            "rows",
            grad=reads(write.block("d_scores", step)),
            qkv=None if arrived else qkv,
            keys=arrived,
            out=accumulates(d_qkv),
        )
    write.return_gradients("dk", accumulates(d_qkv))


class _Rsa:
    """Writes the products of one rank's rows with the keys or values of every rank.

    ``shape`` has the sizes inside attention (``Shape.attention``).
    """

    def __init__(self, builder: TemplateBuilder, decisions: Decisions, shape: Shape, suffix: str = "") -> None:
        self.builder, self.shape, self.suffix = builder, shape, suffix
        self.dtype, self.size = decisions.dtype, DTYPE_BYTES[decisions.dtype]
        self.tokens = shape.tokens // decisions.micro_batch
        """Tokens of one sequence on one rank."""
        self.keys = shape.cp * self.tokens
        """Keys of one sequence on all ranks."""
        self.heads = decisions.micro_batch * shape.heads
        self.head_dim = decisions.model.head_dim
        self.masked = not decisions.model.bidirectional
        self.scores = shape.tokens * shape.heads * self.keys
        """Number of scores on this rank."""

    def block(self, slot: str, step: int) -> Rows:
        """Return the block of scores for the keys that arrive at ``step``, which come from the rank ``step`` before."""
        shape = self.shape
        return Rows(slot, (shape.cp_rank - step) % shape.cp * shape.tokens, shape.tokens)

    def round(self, what: str) -> Iterator[tuple[int, Access | None]]:
        """Write the hops of ``what`` ("keys" or "values") round the ring; yield each step and its operand.

        The operand of step 0 is None: a rank's own keys and values lie in the packed Q, K, V. A hop is written before
        the product that it runs beside.
        """
        if self.shape.cp > 1:
            self._pack(what)
            self._hop(what, 1)
        yield 0, None
        for step in range(1, self.shape.cp):
            if step + 1 < self.shape.cp:
                self._hop(what, step + 1)
            yield step, reads(self.builder.all(_buffer(step)))

    def product(self, name: str, op: str, made: Literal["scores", "rows"], **operands: Access | None) -> None:
        """Emit a product over head features that makes a block of scores, or over a block's keys that makes rows."""
        n, k = (self.tokens, self.head_dim) if made == "scores" else (self.head_dim, self.tokens)
        work = BatchedGemm(self.heads, self.tokens, n, k, "fprop", self.dtype)
        self.builder.emit(name, op, Lane.COMPUTE, work, **operands)

    def pass_over_scores(self, name: str, op: str, read: int, scratch: int, **operands: Access) -> None:
        """Emit a pass over all scores that reads ``read`` numbers and writes one number for each score."""
        size = self.scores * self.size
        work = Rowwise("softmax", self.shape.tokens, read * size, size)
        workspace = self.builder.scratch(f"{self.builder.phase}.{name}.scratch", scratch)
        self.builder.emit(name, op, Lane.COMPUTE, work, **operands, workspace=workspace)

    def summed(self, name: str, op: str, **operands: Access) -> None:
        """Emit the product over this rank's queries that makes gradients for the keys or values of every rank.

        An all-reduce over the ranks follows.
        """
        shape, full = self.shape, f"{name}.all"
        self.builder.own(full, BufferClass.EXCHANGE, self.dtype, shape.cp * shape.tokens, shape.kv_width)
        rows = self.builder.all(full)
        work = BatchedGemm(self.heads, self.keys, self.head_dim, self.tokens, "wgrad", self.dtype)
        self.builder.emit(f"attn.{name}", op, Lane.COMPUTE, work, **operands, out=writes(rows))
        if shape.cp > 1:
            summing = Collective("all_reduce", rows.tokens * self._row_bytes, shape.cp, "cp")
            self.builder.emit(f"{name}.reduce", "all_reduce", Lane.CP, summing, tensor=accumulates(rows))

    def return_gradients(self, name: str, grad_qkv: Access) -> None:
        """Add this rank's rows of such a sum to the gradient of the packed Q, K, V.

        The call whose ``grad_qkv`` is written, not accumulated, also zeroes the other columns.
        """
        own, size = self.block(f"{name}.all", 0), self.shape.tokens * self._row_bytes
        written = self.shape.tokens * self.shape.qkv_width * self.size if grad_qkv[1] is Mode.WRITE else size
        read = size if grad_qkv[1] is Mode.WRITE else 2 * size
        source = {ROLES[name]: reads(own)}
        work = Rowwise("copy", own.tokens, read, written)
        self.builder.emit(f"{name}.return", "rsa.return", Lane.COMPUTE, work, **source, grad_qkv=grad_qkv)

    @property
    def _row_bytes(self) -> int:
        """Bytes of one token's keys, or of its values."""
        return self.shape.kv_width * self.size

    def _pack(self, what: str) -> None:
        for slot_number in range(DOUBLE_BUFFER_SLOTS):
            if not self.builder.has(_buffer(slot_number)):
                self.builder.own(
                    _buffer(slot_number), BufferClass.EXCHANGE, self.dtype, self.shape.tokens, self.shape.kv_width
                )
        size = self.shape.tokens * self._row_bytes
        work, out = Rowwise("kv.pack", self.shape.tokens, size, size), writes(self.builder.all(_buffer(0)))
        packed = reads(self.builder.all("qkv"))
        self.builder.emit(f"{what}.pack{self.suffix}", "rsa.pack", Lane.COMPUTE, work, qkv=packed, **{what: out})

    def _hop(self, what: str, step: int) -> None:
        work = Exchange(self.shape.tokens * self._row_bytes, self.shape.cp, "cp")
        send, recv = (self.builder.all(_buffer(number)) for number in (step - 1, step))
        name = f"{what}.hop{step}{self.suffix}"
        self.builder.emit(name, "send_recv", Lane.P2P, work, send=reads(send), recv=writes(recv))


def _buffer(step: int) -> str:
    """Return the name of the exchange buffer that receives the keys or values of ``step``."""
    return f"rsa.ring{step % DOUBLE_BUFFER_SLOTS}"
