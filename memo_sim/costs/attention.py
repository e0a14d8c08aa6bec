"""Rate of one attention call by sequence length, heads and head size.

A call is a grid of blocks (heads x tokens) that each loop over the other side's tokens. Its rate depends on the loop's
length (start-up, and the half-masked diagonal when causal) and on the grid's size (few heads of a short sequence do not
fill the device; from 64K tokens on few heads are enough). A table's rows [tokens, heads, rate] of one length make a
curve over heads; a length in between is asked at its two neighbours at the same grid, and interpolated in log tokens:

    rate(tokens, heads) between rate(t0, heads * tokens / t0) and rate(t1, heads * tokens / t1)

Forward loops over keys in a grid of queries, backward over queries in a grid of keys, so a call whose two lengths
differ has a definite loop and grid. Head sizes between two tables are interpolated in log size.

Without a mask the rate is the causal one times a gain. A causal call plays whole tiles along the diagonal, so that each
row computes some c tokens for nothing:

    gain(tokens) = 1 + c / tokens, at most 2        c = tokens x (gain - 1) where it was measured

On a CPU, whose tiles have 512 keys, c is some 500: 1.2 at 2K tokens and nearly 2 at 512. c is interpolated in log
tokens. A profile that has one gain alone has it for every length.

So a call without a mask takes twice as long as a causal one of its grid, less the gain. Where a GPU plays all blocks at
once that is wrong: the call then takes as long as its longest block, and so does a causal call of twice the blocks and
the same loop, which has the same FLOPs. Both rates are known, and the larger holds:

    rate(tokens, grid) >= causal rate(tokens, least of 2 x grid and a wave)

Up to half a wave the two calls take equally long. From a wave on nothing is added: blocks take turns there. Between
them the rate is at least that of a causal wave, so that nothing jumps.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import log

from memo_sim.contract.errors import Infeasible
from memo_sim.contract.hardware import AttentionTable
from memo_sim.costs.curves import LogCurve, between
from memo_sim.program.ir.work import Attention

WAVE_TOKENS = 128 * 128
"""Heads x tokens of a wave, 128 blocks of 128 tokens: up to there the A100's rates are in proportion to the grid (its
profile says so). An A100 has 108 multiprocessors, an H100 132, a B200 148: each plays half a wave at once."""


class _HeadSize:
    """One table: curves over heads at each length."""

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
        """Return FLOP/s for ``loop`` tokens and a grid of heads x tokens; ``wave``: as in ``AttentionRates``."""
        if masked:
            return self._causal(loop, grid)
        rate = self._causal(loop, grid) * self._gained(loop)
        if wave is None or grid >= wave:
            return rate
        return max(rate, self._causal(loop, min(2 * grid, wave)))

    def _causal(self, loop: float, grid: float) -> float:
        """Return FLOP/s with the causal mask."""
        asked = log(loop)
        i = 0
        while i < len(self._logs) - 2 and self._logs[i + 1] < asked:
            i += 1
        near = slice(i, i + 2)
        rates = [curve(grid / tokens) for tokens, curve in zip(self.tokens[near], self._curves[near], strict=True)]
        return between(self._logs[near], rates, asked)

    def _gained(self, loop: float) -> float:
        """Return the rate without a mask over the causal one."""
        return self._gain if self._wasted is None else min(2.0, 1 + self._wasted(loop) / loop)


class AttentionRates:
    """The attention kernels of one profile."""

    def __init__(self, tables: Sequence[AttentionTable], *, wave_tokens: float | None = None) -> None:
        """``wave_tokens``: heads x tokens that are played at once; None for a CPU, whose few cores take turns."""
        self._wave = wave_tokens
        self._sizes: dict[tuple[str, str, bool], list[_HeadSize]] = {}
        for table in sorted(tables, key=lambda table: table.head_dim):
            key = (table.kernel, table.dtype, table.attention_pass == "backward")
            self._sizes.setdefault(key, []).append(_HeadSize(table))

    def seconds(self, work: Attention, outside: set[str]) -> float:
        """Return how long the call takes, without the launch floor.

        Raises:
            Infeasible: when the profile has not measured that kernel in that dtype.
        """
        sizes = self._sizes.get((work.kernel, work.dtype, work.backward))
        if sizes is None:
            known = ", ".join(sorted({f"{kernel} ({dtype})" for kernel, dtype, _ in self._sizes}))
            raise Infeasible(
                "the profile has no such attention kernel", got=f"{work.kernel} ({work.dtype})", wanted=known or "any"
            )
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
        return work.flops / rate
