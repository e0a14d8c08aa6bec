"""Chunked attention: keys and values of a sequence's chunks wait in host memory (FPDT, Yao et al. 2024).

Under full recompute the queries, keys and values of a layer never exist all at once:

- Forward computes them chunk by chunk, and stores each chunk's keys and values on the host.
- For the queries of a chunk, it fetches the keys and values of all earlier chunks. Outputs merge by log-sum-exp.
- Only the output outlives the layer.

    queries   | c0 | c1 | c2 |      c2: a causal square over its own keys, then k0 and k1 without a mask
    keys      | k0 | k1 | k2 |      3 chunks: 3 squares, 3 parts, 3 fetches

Backward first repeats this forward, and also stores queries, outputs and log-sum-exps on the host. Then it loops over
chunks of keys. For chunk k it runs the queries of all later chunks, and last the queries of chunk k itself. Gradients
of keys and values are summed on the device. Gradients of queries are stored and fetched with their queries, in fp32.
After the loop's step k both are complete for chunk k. They are joined, exchanged to sequence-sharded form under
Ulysses, and passed back through product and norm.

    h2d       [q1][q2]  [q0]       [q2]     [q1]            each with its output, log-sum-exp, gradient, and d_q
    compute      [k0 q1][k0 q2][k0 q0] chunk 0 done [k1 q2][k1 q1] chunk 1 done ...

Fetches alternate between two buffers: one is read while the other is filled. The norm is recomputed for the product's
weight gradient, not kept, like the norm of the MLP in row blocks (``layers/mlp.py``).

Row-wise recompute keeps attention's output, so its chunks are different ones (``kept_chunks.py``).

Beside a ring every rank has its share of each chunk. Each pair of chunks sends its keys round it (``chunk_ring.py``).
"""

from __future__ import annotations

from itertools import chain
from typing import Literal

from memo_sim.contract.plan import Decisions
from memo_sim.program.attention import shared_heads
from memo_sim.program.attention.chunk_ring import ChunkRing, Step
from memo_sim.program.attention.partial import add, attention_work, join, merge_part, put, split, workspace
from memo_sim.program.attention.projection import project
from memo_sim.program.attention.ulysses import Ulysses
from memo_sim.program.ir.builder import Access, Rows, reads, writes
from memo_sim.program.ir.instruction import BufferClass, Lane
from memo_sim.program.ir.kinds import Phase
from memo_sim.program.ir.work import Copy, Mask
from memo_sim.program.layout.attention_chunks import attention_chunks, in_chunks
from memo_sim.program.layout.shape import Shape
from memo_sim.program.layout.skeletal import Skeletal
from memo_sim.program.operators import norms
from memo_sim.program.operators.operators import OperatorWriter, RowBlock
from memo_sim.program.operators.positions import positions, positions_backward

SUM_DTYPE: Literal["fp32"] = "fp32"
"""Dtype of gradient sums: of queries over chunks of keys, and of keys over chunks of queries."""
DOUBLE_BUFFER_SLOTS = 2
"""Number of buffers between which fetches alternate."""
IN_CHUNKS = ("norm1", "norm1_stats", "qk_raw")
"""Skeletal tensors of which only one chunk's rows exist at once."""


def rows_at_once(tensor: Skeletal, decisions: Decisions, shape: Shape) -> int:
    """Return the rows of a skeletal tensor's slot: one chunk's, or 0 if chunks have other slots."""
    if not in_chunks(decisions):
        return tensor.tokens
    if tensor.name in ("qkv", "lse") or (tensor.name == "attn" and shape.ulysses > 1):
        return 0
    if shape.metp > 1 and tensor.name.startswith(("attn.", "lse.")):
        return 0
    if tensor.name not in IN_CHUNKS:
        return tensor.tokens
    return tensor.tokens * attention_chunks(decisions)[0][1] // shape.tokens


class ChunkedAttention:
    """Writes a layer from the first norm to attention's output, and its backward."""

    def __init__(self, writer: OperatorWriter, ulysses: Ulysses, inside: Shape | None = None) -> None:
        """``inside``: the sizes inside attention, unless they follow from those of ``writer``."""
        self.writer, self.ulysses = writer, ulysses
        self.builder, self.decisions = writer.builder, writer.decisions
        self.shape, self.inside = writer.shape, inside or writer.shape.attention
        self.chunks = attention_chunks(writer.decisions)
        self.pairs_before = self.chunks_before = 0
        """Numbers of pairs and chunks whose backward another writer has written into the same double buffers."""
        self.room = self.chunks[0][1]
        """Number of a rank's rows in a buffer for one chunk."""
        kv = self.inside.cache_width
        self.features = {"kv": kv, "d_kv": kv, "lse": self.inside.heads}
        """Features of a token, by tensor; tensors that are not listed have the queries' features."""
        self.ring = ChunkRing(self.builder, self.decisions, self.inside, self._tokens("kv", 0))
        self._due: tuple[str, Rows, bool] | None = None
        """The pair of chunks, the gradients of its keys that the last hop brings, and whether they are in halves."""
        self.features["qk_raw"] = self.shape.q_width + self.shape.kv_width

    def forward(self, blocks: list[RowBlock]) -> None:
        """Write norm, product and attention of every chunk; chunks replace the row blocks."""
        self.attend(store=False)

    def recompute(self, rows: RowBlock, *, whole: bool) -> None:
        """Write the forward again, and store the tensors that backward needs on the host."""
        self.attend(store=True)

    def project(self, rows: RowBlock) -> None:
        """Write projection and residual sum; with sequence parallelism the product exists for one chunk at a time."""
        if not self.shape.gathered:
            self.writer.own("proj_out", self.shape.tokens, self.shape.hidden)
            project(self.writer, self.ulysses, rows, rows, self.shape.tokens)
            return
        for c, (first, tokens) in enumerate(self.chunks):
            self.writer.suffix = f".c{c}"
            project(self.writer, self.ulysses, (first, tokens), (0, tokens), self.room)

    def attend(self, *, store: bool) -> None:
        """Write norm, product and attention of every chunk; ``store``: also store what backward needs on the host."""
        self._own_output()
        for c, rows in enumerate(self.chunks):
            self.writer.suffix = f".c{c}"
            if c:
                self._fetch_earlier(c, 0)
            self._project(c)
            self._attend(c)
            self._pass_on(c)
            # A copy waits only for the writer of what it reads, so placing it after other readers does not delay it.
            kept = ("kv", "q", *self._raw) if store else ("kv",) if rows != self.chunks[-1] else ()
            for name in kept:
                self._store(name, c)
            for name in self._outputs if store else ():
                self._store(name, c, f"{name}.{c % DOUBLE_BUFFER_SLOTS}")
        self.writer.suffix = ""

    def _own_output(self) -> None:
        """Add the buffer of the whole output, unless it is a skeletal tensor."""
        if not self.builder.has(attended := self.ulysses.sequence_sharded("attn")):
            self.writer.own(attended, self.shape.tokens, self.shape.q_width)  # not kept: the projection keeps it in FP8

    def _pass_on(self, c: int) -> None:
        """Write what brings a chunk's output to where the projection reads it."""
        attended = Rows(self.ulysses.sequence_sharded("attn"), *self.chunks[c])
        self.ulysses.to_sequence_ranks("attn", self._out(c), attended, self.writer.suffix)

    def backward(self, grad_in: str) -> None:
        """Write the backward from the residual's gradient, ``d_resid``, to the layer's input gradient, ``grad_in``."""
        order = self._order()
        # Memory is allocated in program order: fetches that are placed after a product would wait for it.
        self._fetch_keys(0)
        self._fetch_queries(0, *order[0], ("q", *self._outputs))
        self._output_gradient()
        self._fetch_queries(0, *order[0], ("d_attn",))
        self._project_backward()
        self._pairs_backward(grad_in)

    def _order(self) -> list[tuple[int, int]]:
        """Return (chunk of keys, chunk of queries) of each pair, in the order of backward."""
        count = len(self.chunks)
        return [(k, c) for k in range(count) for c in (*range(k + 1, count), k)]

    def _pairs_backward(self, grad_in: str) -> None:
        """Write the backward of every pair of chunks, whose fetches stand before the pair ahead of it.

        Those of the first pair are written before. After a chunk's last pair, its product and norm follow.
        """
        order = self._order()
        for n, (k, c) in enumerate(order):
            if n + 1 < len(order):
                gradients = ("d_attn", "d_q") if order[n + 1][0] else ("d_attn",)
                self._fetch_queries(n + 1, *order[n + 1], ("q", *self._outputs, *gradients))
            if n == 0 or order[n - 1][0] != k:
                self._begin(k)
            self._pair_backward(n, k, c)
            if c == k:
                self._finish(n, k, grad_in)
        self.writer.suffix = ""

    @property
    def _raw(self) -> tuple[str, ...]:
        """The name of the input of the norm of query and key heads, if the model has one."""
        return ("qk_raw",) if self.writer.model.qk_norm else ()

    @property
    def _outputs(self) -> tuple[str, ...]:
        """The results of attention that are stored on the host."""
        return ("attn", "lse") if self._in_parts else ("lse",)

    @property
    def _in_parts(self) -> bool:
        """Whether chunks of the output have buffers of their own; without Ulysses the layer holds the whole output."""
        return self.shape.ulysses > 1

    def _tokens(self, name: str, c: int) -> int:
        """Return the rows of a chunk of a tensor: sequence-sharded for ``qk_raw``, head-sharded for all others."""
        rows = self.chunks[c][1]
        return rows if name == "qk_raw" else self.shape.ulysses * rows

    def _chunk(self, name: str, c: int, slot: str = "", dtype: str = "") -> Rows:
        """Return a chunk of tensor ``name`` in a device buffer, which is added at its first use."""
        slot = slot or name
        if not self.builder.has(slot):
            features = self.features.get(name, self.inside.q_width)
            dtype = dtype or ("fp32" if name == "lse" else self.decisions.dtype)
            self.builder.own(slot, _class(slot), dtype, self._tokens(name, 0), features)
        return Rows(slot, 0, self._tokens(name, c))

    def _host(self, name: str, c: int, like: Rows) -> Rows:
        slot = self._host_slot(name, c)
        if not self.builder.has(slot):
            features, dtype = self.builder.features(like.slot), self.builder.dtype(like.slot)
            self.builder.own(slot, _class(name), dtype, like.tokens, features, space="host")
        return Rows(slot, 0, like.tokens)

    def _host_slot(self, name: str, c: int) -> str:
        """Return the name of the host buffer of a chunk of a tensor."""
        return f"host.{name}.c{c}"

    def _store(self, name: str, c: int, slot: str = "", suffix: str = "") -> None:
        """Write the copy of a chunk to the host."""
        here = self._chunk(name, c, slot)
        size = here.tokens * self.builder.row_bytes(here.slot)
        self.builder.emit(
            f"{name}.store.c{c}{suffix}",
            "d2h",
            Lane.D2H,
            Copy(size, "d2h"),
            source=reads(here),
            target=writes(self._host(name, c, here)),
        )

    def _fetch(self, name: str, c: int, here: Rows, suffix: str = "") -> None:
        """Write the copy of a chunk back to the device."""
        size = here.tokens * self.builder.row_bytes(here.slot)
        self.builder.emit(
            f"{name}.fetch.c{c}{suffix}",
            "h2d",
            Lane.H2D,
            Copy(size, "h2d"),
            source=reads(self._host(name, c, here)),
            target=writes(here),
        )

    def _project(self, c: int) -> None:
        """Write norm and product of a chunk's rows, and split queries from keys and values."""
        first, tokens = rows = self.chunks[c]
        writer, shape, at = self.writer, self.shape, (0, tokens)
        norms.norm(writer, "norm1", "x", rows, at)
        source = self._gathered(at)
        packed = Rows(self._packed(self.ulysses.sequence_sharded("qkv"), shape), *at)
        shared_heads.product(writer, source, packed, self.room)
        shared_heads.exchange(writer, packed, self.room)
        positions(writer, packed, Rows("qk_raw", *at), first=first)
        head_sharded = Rows(self._packed("qkv", self.inside), 0, shape.ulysses * tokens)
        self.ulysses.to_head_ranks("qkv", packed, head_sharded, writer.suffix)
        split(self.builder, f"qkv.split{writer.suffix}", head_sharded, self._chunk("q", c), self._chunk("kv", c))

    def _packed(self, slot: str, shape: Shape) -> str:
        """Return a slot for the packed Q, K, V of a chunk, or their gradients, with the sizes of ``shape``."""
        rows = self.room * shape.tokens // self.shape.tokens
        return self.writer.own(slot, rows, shape.qkv_width, _class(slot))

    def _gathered(self, at: RowBlock) -> Rows:
        """Gather the norm's output of one chunk over tensor-parallel ranks."""
        writer = self.writer
        normed = writer.shard_rows(writer.read_by_product("norm1"), at)
        return writer.gather("norm1", normed, "norm1_full", 0, tokens=self.room)

    def _out(self, c: int) -> Rows:
        """Return where attention of a chunk writes: the whole output, or one of two chunk buffers."""
        if not self._in_parts:
            return Rows("attn", *self.chunks[c])
        return self._chunk("attn", c, f"attn.{c % DOUBLE_BUFFER_SLOTS}")

    def _lse(self, c: int) -> Rows:
        """Return where attention of a chunk writes the log-sum-exp."""
        return self._chunk("lse", c, f"lse.{c % DOUBLE_BUFFER_SLOTS}")

    def _attend(self, c: int) -> None:
        """Write a chunk's attention: over its own keys, then over the keys of each earlier chunk."""
        out, lse = self._out(c), self._lse(c)
        self.ring.start(f".c{c}", self._chunk("kv", c), square=True)
        self._call("attn", c, c, self._chunk("kv", c), out=out, lse=lse)
        self._attend_round(c, c, (out, lse))
        for k in range(c):
            if k + 1 < c:
                self._fetch_earlier(c, k + 1)
            self.ring.start(f".c{c}.k{k}", self._earlier(k), square=False)
            part, part_lse = self._chunk("attn", c, "attn.part"), self._chunk("lse", c, "lse.part")
            self._call("attn.earlier", c, k, self._earlier(k), out=part, lse=part_lse)
            merge_part(self.builder, f"attn.merge.c{c}.k{k}", (part, part_lse), (out, lse))
            self._attend_round(c, k, (out, lse))

    def _attend_round(self, c: int, k: int, whole: tuple[Rows, Rows]) -> None:
        """Write attention of a chunk to the keys of chunk ``k`` on other ranks, and merge it into ``whole``."""
        name = f".c{c}" + (f".k{k}" if k != c else "")
        for step in chain.from_iterable(self.ring.steps(name, self._tokens("kv", k), square=c == k)):
            into = step.of(whole[0]), step.of(whole[1])
            (part, part_lse) = (self._chunk(tensor, c, f"{tensor}.part") for tensor in ("attn", "lse"))
            part, part_lse = (Rows(rows.slot, 0, step.count(rows)) for rows in (part, part_lse))
            self._call(f"attn.ring{step.hops}", c, k, step.keys, out=part, lse=part_lse, step=step)
            merge_part(self.builder, f"attn.merge{step.hops}{name}{step.suffix}", (part, part_lse), into)

    def _earlier(self, k: int) -> Rows:
        return self._chunk("kv", k, f"kv.earlier.{k % DOUBLE_BUFFER_SLOTS}")

    def _fetch_earlier(self, c: int, k: int) -> None:
        self._fetch("kv", k, self._earlier(k), f".for.c{c}")

    def _call(self, name: str, c: int, k: int, keys: Rows, *, out: Rows, lse: Rows, step: Step | None = None) -> None:
        """Write attention of chunk ``c``'s queries to ``keys``, which are those of chunk ``k``.

        ``step``: the keys are another rank's, and ``out`` has the queries of this step.
        """
        mask = "none" if step else _mask(c, k)
        self.builder.emit(
            f"{name}.c{c}" + (f".k{k}" if k != c else "") + (step.suffix if step else ""),
            "attention",
            Lane.COMPUTE,
            attention_work(self.decisions, self.inside, out.tokens, keys.tokens, mask, backward=False),
            q=reads(self._chunk("q", c)),
            kv=reads(keys),
            out=writes(out),
            lse=writes(lse),
            workspace=self._workspace(backward=False),
        )

    def _workspace(self, *, backward: bool) -> Access | None:
        """Return a workspace that is large enough for any pair of chunks."""
        name, most = f"attn{'.bwd' if backward else ''}.scratch", self._tokens("q", 0)
        if self.builder.has(name):
            return writes(self.builder.all(name))
        work = attention_work(self.decisions, self.inside, most, most, "none", backward=backward)
        return workspace(self.builder, self.decisions, work, name)

    def _output_gradient(self) -> None:
        """Write the gradient of attention's output, chunk by chunk, and its copies to the host.

        With sequence parallelism it is gathered chunk by chunk. The projection's weight gradient is written from each
        chunk, so the whole never exists. An adapter's gradients are written from each chunk too, after that of its
        low-rank rows.
        """
        writer, shape = self.writer, self.shape
        for c, (first, tokens) in enumerate(self.chunks):
            writer.suffix = f".c{c}"
            head_sharded = self._chunk("d_attn", c, self._gradient_slot(c))
            sequence_sharded = head_sharded
            if shape.ulysses > 1:
                sequence_sharded = Rows(writer.own("d_attn_seq", self.room, shape.q_width), 0, tokens)
            shard = writer.before_gather(writer.shard_rows("d_resid", (first, tokens)), "proj")
            grad = writer.gather("proj.grad", shard, "d_proj_full", 0, tokens=self.room)
            attended = Rows(writer.attended(self.ulysses.sequence_sharded("attn"), kept=True), first, tokens)
            if self._by_chunks and not self._adapted:
                writer.wgrad("proj", grad, attended, shape.hidden, shape.q_width)
            writer.dgrad("proj", grad, sequence_sharded, shape.q_width, shape.hidden)
            if self._adapted:
                writer.wgrad("proj", grad, attended, shape.hidden, shape.q_width)
            self.ulysses.to_head_ranks("d_attn", sequence_sharded, head_sharded, writer.suffix)
            self._store("d_attn", c, head_sharded.slot)
        writer.suffix = ""

    @staticmethod
    def _gradient_slot(c: int) -> str:
        """Return the slot of a chunk of the gradient of attention's output, until it is stored."""
        return f"d_attn.{c % DOUBLE_BUFFER_SLOTS}"

    @property
    def _adapted(self) -> bool:
        """Whether weights are frozen beside low-rank adapters."""
        return self.writer.decisions.lora is not None

    def _project_backward(self) -> None:
        """Write the gradients of the projection's parameters that ``_output_gradient`` has not written."""
        writer, shape, grad = self.writer, self.shape, self.builder.all("d_resid")
        if not self._by_chunks:
            attended = self.builder.all(self.ulysses.sequence_sharded("attn"))
            writer.wgrad("proj", grad, attended, shape.hidden, shape.q_width)
        writer.bgrad("proj", grad, shape.hidden)

    @property
    def _by_chunks(self) -> bool:
        """Whether the projection's weight gradient is written chunk by chunk: of gathered rows, in FP8, or adapters.

        In FP8 a chunk's gradient is quantised once for both products.
        """
        return self.shape.gathered or self.writer.fp8 is not None or self._adapted

    def _keys(self, k: int) -> Rows:
        return self._chunk("kv", k, f"kv.back.{(self.chunks_before + k) % DOUBLE_BUFFER_SLOTS}")

    def _fetch_keys(self, k: int) -> None:
        self._fetch("kv", k, self._keys(k))

    def _begin(self, k: int) -> None:
        """Write the copies that the pairs of chunk ``k`` hide: for its last step, and the next chunk's keys."""
        for name in self._raw:
            self._fetch(name, k, self._chunk(name, k))
        if k + 1 < len(self.chunks):
            self._fetch_keys(k + 1)

    def _back(self, name: str, n: int, c: int) -> Rows:
        """Return the buffer of a chunk of queries, or of a tensor stored with them, for the ``n``-th pair."""
        return self._chunk(name, c, self._back_slot(name, n), SUM_DTYPE if name == "d_q" else "")

    def _back_slot(self, name: str, n: int) -> str:
        """Return the slot of such a buffer: the pairs alternate between two."""
        return f"{name}.back.{(self.pairs_before + n) % DOUBLE_BUFFER_SLOTS}"

    def _out_of_pair(self, n: int, c: int) -> Rows:
        """Return attention's output of a chunk of queries, for the ``n``-th pair."""
        return self._back("attn", n, c) if self._in_parts else self._out(c)

    def _lse_of_pair(self, n: int, c: int) -> Rows:
        """Return the log-sum-exp of a chunk of queries, for the ``n``-th pair."""
        return self._back("lse", n, c)

    def _fetch_queries(self, n: int, k: int, c: int, names: tuple[str, ...]) -> None:
        """Write the fetches of ``names`` for the ``n``-th pair: its queries, their outputs, and gradients so far."""
        for name in names:
            self._fetch(name, c, self._back(name, n, c), f".for.k{k}")

    def _pair_backward(self, n: int, k: int, c: int) -> None:
        """Write the backward of chunk ``c``'s queries and chunk ``k``'s keys, and add the results to the sums."""
        grad_q, grad_kv = self._chunk("d_q", c, "d_q.part"), self._chunk("d_kv", k, "d_kv.part")
        name = f".c{c}.k{k}"
        self.ring.start(name, self._keys(k), square=c == k)
        self._call_backward(f"attn.bwd{name}", n, c, self._keys(k), _mask(c, k), grad_q, grad_kv)
        self._sum("d_q", name, grad_q, self._back("d_q", n, c), first=k == 0)
        first = c == k + 1 or (c == k and k + 1 == len(self.chunks))
        self._sum("d_kv", name, grad_kv, self._chunk("d_kv", k, "d_kv.sum", SUM_DTYPE), first=first)
        self._arrive(k)
        self._round_backward(n, k, c)
        if c != k:
            self._store("d_q", c, self._back_slot("d_q", n), f".of.k{k}")

    def _round_backward(self, n: int, k: int, c: int) -> None:
        """Write the backward of chunk ``c``'s queries and the keys of chunk ``k`` on other ranks."""
        name, tokens = f".c{c}.k{k}", self._tokens("kv", k)
        if c == k and self.inside.cp > 1:
            self.ring.begin_sums(name, tokens)
        for steps in self.ring.steps(name, tokens, square=c == k):
            for step in steps:
                suffix, sums, d_q = f"{step.hops}{name}{step.suffix}", self.ring.sums(step), self._back("d_q", n, c)
                grad_q = Rows("d_q.part", 0, step.count(d_q))
                grad_kv = sums if step.hops == 1 else Rows("d_kv.part", 0, sums.tokens)
                self._call_backward(f"attn.bwd.ring{suffix}", n, c, step.keys, "none", grad_q, grad_kv)
                add(self.builder, self.decisions, f"d_q.add{suffix}", grad_q, step.of(d_q))
                if step.hops > 1:
                    add(self.builder, self.decisions, f"d_kv.add{suffix}", grad_kv, sums)
            self._due = name, self.ring.pass_sums(name, steps[0].hops, tokens), c == k and self.ring.several

    def _arrive(self, k: int) -> None:
        """Add the gradients that other ranks computed for the keys of chunk ``k`` to their sum."""
        if self._due is not None:
            name, arrived, halves = self._due
            into = self._chunk("d_kv", k, "d_kv.sum", SUM_DTYPE)
            add(self.builder, self.decisions, f"d_kv.return{name}", arrived, into, halves=halves)
            self._due = None

    def _call_backward(  # noqa: PLR0917 - the operands of one call
        self, name: str, n: int, c: int, keys: Rows, mask: Mask, grad_q: Rows, grad_kv: Rows
    ) -> None:
        """Write the backward of one call: as many of chunk ``c``'s last queries as ``grad_q`` has, and ``keys``."""
        self.builder.emit(
            name,
            "attention.bwd",
            Lane.COMPUTE,
            attention_work(self.decisions, self.inside, grad_q.tokens, keys.tokens, mask, backward=True),
            grad=reads(self._back("d_attn", n, c)),
            q=reads(self._back("q", n, c)),
            kv=reads(keys),
            out=reads(self._out_of_pair(n, c)),
            lse=reads(self._lse_of_pair(n, c)),
            grad_q=writes(grad_q),
            grad_kv=writes(grad_kv),
            workspace=self._workspace(backward=True),
        )

    def _sum(self, name: str, suffix: str, part: Rows, into: Rows, *, first: bool) -> None:
        """Write the result of a call into a sum: as its first term, or added to it."""
        if first:
            put(self.builder, f"{name}.put{suffix}", part, into)
        else:
            add(self.builder, self.decisions, f"{name}.add{suffix}", part, into)

    def _finish(self, n: int, k: int, grad_in: str) -> None:
        """Write the backward of product and norm for a chunk, once its gradients are complete."""
        writer, shape, builder = self.writer, self.shape, self.builder
        first, tokens = self.chunks[k]
        self._beside_last_hop(n, k)
        self._arrive(k)
        writer.suffix = f".c{k}"
        sums = self._back("d_q", n, k), self._chunk("d_kv", k, "d_kv.sum", SUM_DTYPE)
        joined = Rows(self._packed("d_qkv", self.inside), 0, shape.ulysses * tokens)
        join(builder, f"qkv.join{writer.suffix}", *sums, joined)
        sequence_sharded = Rows(self._packed(self.ulysses.sequence_sharded("d_qkv"), shape), 0, tokens)
        self.ulysses.to_sequence_ranks("d_qkv", joined, sequence_sharded, writer.suffix)
        positions_backward(writer, sequence_sharded, first=first)
        grad = shared_heads.product_gradient(writer, sequence_sharded, self.room)
        phase, builder.phase, writer.suffix = builder.phase, Phase.RECOMPUTE, f".again.c{k}"
        norms.norm(writer, "norm1", "x", (first, tokens), (0, tokens), for_wgrad=True)
        # In FP8 what a product read is not what its weight's gradient reads, which is gathered below.
        source = self._gathered((0, tokens)) if writer.trains("qkv") and writer.fp8 is None else None
        builder.phase, writer.suffix = phase, f".c{k}"
        self._product_backward(k, grad, source, grad_in)

    def _beside_last_hop(self, n: int, k: int) -> None:
        """Write what runs beside the hop that brings the last gradients of chunk ``k``, in pair ``n``; here nothing."""

    def _product_backward(self, k: int, grad: Rows, source: Rows | None, grad_in: str) -> None:
        """Write the backward of a chunk's product and norm from the gradient of the packed Q, K, V.

        ``source``: the norm's output, where it is gathered.
        """
        first, tokens = self.chunks[k]
        self.writer.product_and_norm_backward(
            "qkv",
            "norm1",
            grad=grad,
            source=source,
            norm_input="x",
            residual_grad="d_resid",
            out=grad_in,
            rows=(first, tokens),
            at=(0, tokens),
            tokens=self.room,
        )


def _class(name: str) -> BufferClass:
    """Return a slot's class: gradients, and parts that are merged, are transient."""
    return BufferClass.TRANSIENT if name.startswith("d_") or name.endswith(".part") else BufferClass.SKELETAL


def _mask(c: int, k: int) -> Mask:
    """Return the mask for chunk ``c``'s queries and chunk ``k``'s keys."""
    return "causal" if c == k else "none"
