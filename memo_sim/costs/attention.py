"""Prices one attention call from measured rates, by sequence length, number of heads, head size and mask.

A call is a grid of blocks (heads x tokens). Each block loops over the tokens of the other side: forward loops over keys
in a grid of queries, backward over queries in a grid of keys. So a call with two different lengths has a definite loop
and grid. The rate depends on two things:

- the loop's length: start-up time, and the half-masked diagonal when the mask is causal;
- the grid's size: few heads of a short sequence do not fill the device (from 64K tokens on, few heads are enough).

The table's rows [tokens, heads, rate] of one length form a curve over heads. A length between two measured ones takes
the rates of both neighbours at the same grid and interpolates them in log tokens:

    rate(tokens, heads) between rate(t0, heads * tokens / t0) and rate(t1, heads * tokens / t1)

Head sizes between two tables are interpolated in log size.

Without a mask, the rate is the causal rate times a gain. A causal call computes whole tiles along the diagonal, so each
row computes about c tokens in vain:

    gain(tokens) = 1 + c / tokens, at most 2        c = tokens x (gain - 1) at each measured length

On a CPU, whose tiles have 512 keys, c is about 500: the gain is 1.2 at 2K tokens and nearly 2 at 512. c is interpolated
in log tokens. A profile with a single gain uses it for every length.

By this formula, a call without a mask takes twice as long as a causal call of the same grid, less the gain. That is
wrong when a GPU computes all blocks at once. The call then takes as long as its longest block. A causal call with twice
the blocks and the same loop takes equally long and has the same FLOPs. The larger of both rates holds:

    rate(tokens, grid) >= causal rate(tokens, min(2 x grid, one wave))

Packed documents are one grid in which every block loops over its own document. Each class of documents takes the time
of its pairs at the rate of its own length, in the grid of the whole call. A document shorter than the shortest
measured length fills fewer tiles, of which the diagonal wastes as many tokens as above:

    rate(tokens) = rate(shortest) x (1 + c / shortest) / (1 + c / tokens), with c of at least a tile of 128 tokens

One shorter than a tile fills a part of its queries too, so its rate also falls with tokens / 128.

Up to half a wave, both calls take equally long. From one wave on, blocks run one after another, and the bound no longer
applies. In between, the rate is at least that of one causal wave, so the rate has no jump.

With a window, a kernel skips the tiles that no pair of the window lies in, and computes the others whole:

    window 5, tiles of 4      queries | keys 0-3 | 4-7 | 8-11 | 12-15          1 + ceil((window - 1) / tile) tiles a row
                              12-15                 x      x                  (fewer in the first rows)

The call is priced as one without a mask in which every query has as many keys as these tiles have on average. Profiles
have no measured rates of windows. The CPU's kernel computes blocks of as many queries as the window has keys, between
128 and 1024 (``memo_exec/kernels/attention_torch_cpu.py``), each with all keys that its queries see.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from math import log

from memo_sim.contract.attended_pairs import pairs_in_window
from memo_sim.contract.attention_kernels import Libraries
from memo_sim.contract.documents import pairs_of
from memo_sim.contract.errors import Infeasible
from memo_sim.contract.hardware import AttentionTable
from memo_sim.costs.curves import LogCurve, between
from memo_sim.program.ir.work import Attention, WindowedAttention

MUCH_UNMEASURED = 0.05
"""Share of a call's time in documents beyond the measured lengths from which the call counts as extrapolated."""
TILE_TOKENS = 128
"""Tokens of a tile of flash-attn's kernels, the least that a document takes."""
WAVE_TOKENS = TILE_TOKENS * TILE_TOKENS
"""Heads x tokens of one wave: 128 blocks of 128 tokens.

Up to one wave, the A100's measured rates grow in proportion to the grid. An A100 has 108 multiprocessors, an H100 132,
a B200 148; each computes half a wave at once."""
TILE_TOKENS = 128
"""Queries, and keys, of a tile of a GPU's kernels; flash-attn has tiles of 64 to 192 of either."""
CPU_BLOCK_TOKENS = (128, 1024)
"""Least and most queries of a block of a window's call on the CPU."""


def of_year(tables: Sequence[AttentionTable], libraries: Libraries) -> list[AttentionTable]:
    """Return the tables of the latest version of each kernel that the libraries of a year have."""
    latest: dict[tuple[str, str, str, int], AttentionTable] = {}
    for table in tables:
        if (table.libraries or "") <= libraries:
            key = (table.kernel, table.dtype, table.attention_pass, table.head_dim)
            if key not in latest or (table.libraries or "") > (latest[key].libraries or ""):
                latest[key] = table
    return list(latest.values())


class _HeadSize:
    """The rates of one table: one curve over heads for each length."""

    def __init__(self, table: AttentionTable) -> None:
        self.head_dim = table.head_dim
        self._gain = table.full_mask_gain
        wasted = [(tokens, tokens * max(0.0, gain - 1)) for tokens, gain in sorted(table.full_mask_gains)]
        self._wasted = LogCurve(*zip(*wasted, strict=True)) if wasted else None
        by_tokens: dict[float, list[tuple[float, float]]] = {}
        for tokens, heads, rate in table.rows:
            by_tokens.setdefault(tokens, []).append((heads, rate))
        self.tokens = sorted(by_tokens)
        self._logs = [log(t) for t in self.tokens]
        self._curves = [LogCurve(*zip(*sorted(by_tokens[t]), strict=True)) for t in self.tokens]
        self.fewest_heads = min(curve.first for curve in self._curves)

    def rate(self, loop: float, grid: float, *, masked: bool, wave: float | None) -> float:
        """Return FLOP/s for ``loop`` tokens and a ``grid`` of heads x tokens; for ``wave``, see ``AttentionRates``."""
        if masked:
            return self._causal(loop, grid)
        rate = self._causal(loop, grid) * self._gained(loop)
        if wave is None or grid >= wave:
            return rate
        return max(rate, self._causal(loop, min(2 * grid, wave)))

    def rate_of_segment(self, loop: float, grid: float, *, masked: bool, wave: float | None) -> float:
        """Return FLOP/s of documents of ``loop`` tokens in a grid of many; as ``rate`` where they are measured."""
        shortest = self.tokens[0]
        if loop >= shortest:
            return self.rate(loop, grid, masked=masked, wave=wave)
        wasted = max(TILE_TOKENS, shortest * (self._gained(shortest) - 1))
        fuller = (1 + wasted / shortest) / (1 + wasted / loop) * min(1.0, loop / TILE_TOKENS)
        return self.rate(shortest, grid, masked=masked, wave=wave) * fuller

    def _causal(self, loop: float, grid: float) -> float:
        """Return FLOP/s with a causal mask."""
        asked = log(loop)
        i = 0
        while i < len(self._logs) - 2 and self._logs[i + 1] < asked:
            i += 1
        near = slice(i, i + 2)
        rates = [curve(grid / tokens) for tokens, curve in zip(self.tokens[near], self._curves[near], strict=True)]
        return between(self._logs[near], rates, asked)

    def _gained(self, loop: float) -> float:
        """Return the rate without a mask divided by the causal rate."""
        return self._gain if self._wasted is None else min(2.0, 1 + self._wasted(loop) / loop)


class AttentionRates:
    """Prices calls of the attention kernels of one profile, each in one version (``of_year``)."""

    def __init__(self, tables: Sequence[AttentionTable], *, wave_tokens: float | None = None) -> None:
        """``wave_tokens``: heads x tokens that run at once; None for a CPU, whose few cores run blocks in turn."""
        self._wave = wave_tokens
        self._sizes: dict[tuple[str, str, bool], list[_HeadSize]] = {}
        for table in sorted(tables, key=lambda table: table.head_dim):
            key = (table.kernel, table.dtype, table.attention_pass == "backward")
            self._sizes.setdefault(key, []).append(_HeadSize(table))

    def seconds(self, work: Attention, outside: set[str]) -> float:
        """Return the seconds of a call without the launch floor; add the table to ``outside`` when it extrapolates.

        Raises:
                Infeasible: when the profile has not measured this kernel in this dtype.
        """
        if isinstance(work, WindowedAttention):
            return self.seconds(_computed(work), outside)
        sizes = self._sizes.get((work.kernel, work.dtype, work.backward))
        if sizes is None:
            known = ", ".join(sorted({f"{kernel} ({dtype})" for kernel, dtype, _ in self._sizes}))
            raise Infeasible(
                "the profile has not measured this attention kernel",
                got=f"{work.kernel} ({work.dtype})",
                wanted=known or "any",
                hint="another --attention or --dtype, or memo-exec calibrate on a machine that has the kernel",
            )
        if work.segments:
            return self._of_documents(work, sizes, outside)
        loop, grid_tokens = work.k_tokens, work.q_tokens
        if work.backward:
            loop, grid_tokens = grid_tokens, loop
        heads = work.batch * work.heads
        grid = float(heads) * grid_tokens
        masked = work.mask == "causal"
        low = max((s for s in sizes if s.head_dim <= work.head_dim), key=lambda s: s.head_dim, default=sizes[0])
        high = min((s for s in sizes if s.head_dim >= work.head_dim), key=lambda s: s.head_dim, default=sizes[-1])
        inside = low.tokens[0] <= loop <= low.tokens[-1] and heads >= low.fewest_heads
        if not inside or not low.head_dim <= work.head_dim <= high.head_dim:
            name = "backward" if work.backward else "forward"
            outside.add(f"attention.{work.kernel}.{work.dtype}.{name}")
        rate = low.rate(loop, grid, masked=masked, wave=self._wave)
        if high is not low:
            ends = (log(low.head_dim), log(high.head_dim))
            rate = between(ends, (rate, high.rate(loop, grid, masked=masked, wave=self._wave)), log(work.head_dim))
        return work.computed_flops / rate

    def _of_documents(self, work: Attention, sizes: list[_HeadSize], outside: set[str]) -> float:
        """Return the seconds of a call over packed documents: every class at the rate of its own length."""
        low = max((s for s in sizes if s.head_dim <= work.head_dim), key=lambda s: s.head_dim, default=sizes[0])
        high = min((s for s in sizes if s.head_dim >= work.head_dim), key=lambda s: s.head_dim, default=sizes[-1])
        grid = float(work.batch * work.heads) * (work.k_tokens if work.backward else work.q_tokens)
        masked, flops = work.mask == "causal", work.computed_flops
        every = sum(pairs for _, _, pairs in work.segments)
        seconds, apart_s = 0.0, 0.0
        for queries, keys, pairs in work.segments:
            if not pairs:
                continue
            loop = queries if work.backward else keys
            rate = low.rate_of_segment(loop, grid, masked=masked, wave=self._wave)
            if high is not low:
                ends = (log(low.head_dim), log(high.head_dim))
                other = high.rate_of_segment(loop, grid, masked=masked, wave=self._wave)
                rate = between(ends, (rate, other), log(work.head_dim))
            taken_s = flops * pairs / every / rate
            seconds += taken_s
            apart_s += 0.0 if low.tokens[0] <= loop <= low.tokens[-1] else taken_s
        if apart_s > MUCH_UNMEASURED * seconds or not low.head_dim <= work.head_dim <= high.head_dim:
            outside.add(f"attention.{work.kernel}.{work.dtype}.{'backward' if work.backward else 'forward'}")
        return seconds


def _computed(work: WindowedAttention) -> Attention:
    """Return a call without a mask that has the pairs which a window's call computes, in whole tiles."""
    keys = _keys_computed(work, work.q_tokens, work.k_tokens)
    q, k = (keys, work.q_tokens) if work.backward else (work.q_tokens, keys)
    found = Attention(
        work.batch, q, k, "none", work.heads, work.kv_heads, work.head_dim, work.backward, work.kernel, work.dtype
    )
    return replace(found, segments=tuple(_segment_computed(work, *each) for each in work.segments))


def _segment_computed(work: WindowedAttention, queries: int, keys: int, pairs: int) -> tuple[int, int, int]:
    """Return a class of packed documents with the pairs that a window's call computes of them."""
    computed = _keys_computed(work, queries, keys)
    factor = queries * computed / pairs_of(queries, work.window)
    seen = (computed, queries) if work.backward else (queries, computed)
    return *seen, round(pairs * factor)


def _keys_computed(work: WindowedAttention, queries: int, keys: int) -> int:
    """Return the keys that a window's call computes for a query, on average."""
    earlier = keys - queries
    if work.kernel == "torch-flash-cpu":
        least, most = CPU_BLOCK_TOKENS
        rows = min(max(work.window, least), most, queries)
        blocks = -(-queries // rows)
        seen = sum(min(earlier + (block + 1) * rows, rows + work.window - 1) for block in range(blocks))
        return min(-(-seen // blocks), keys)
    rows, before = -(-queries // TILE_TOKENS), -(-earlier // TILE_TOKENS)
    tiles = pairs_in_window(rows, rows + before, 1 + -(-(work.window - 1) // TILE_TOKENS))
    return min(-(-tiles * TILE_TOKENS // rows), keys)
