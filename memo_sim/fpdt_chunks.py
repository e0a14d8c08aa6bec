"""What FPDT's chunks of attention would add to a layer whose attention is played whole (Yao et al. 2024).

The preset ``deepspeed-fpdt`` keeps layer inputs on the host and has the MLP in row blocks, as FPDT does, but plays
attention in one call over all keys. FPDT cuts queries and keys into chunks, keeps those of keys and values on the host
and fetches each for every later chunk of queries; the parts merge by log-sum-exp:

    queries   | c0 | c1 | c2 |        a masked square for each chunk, a whole one for each chunk of keys before it
    keys      | c0 | c1 | c2 |        3 chunks: 3 masked, 3 whole, and 3 fetches of a chunk's keys and values

Calls without a mask run above the rate of masked ones, short calls of few heads far below that of long ones, by the
profile's curves. Merges, sums and what backward fetches of queries are not counted.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise

from memo_sim.contract.plan import Decisions
from memo_sim.contract.units import DTYPE_BYTES
from memo_sim.costs.pricing import Pricer
from memo_sim.planning.bandwidth import offload_bandwidth
from memo_sim.planning.question import Question
from memo_sim.program.attention_part import attention_work
from memo_sim.program.shape import shape_of
from memo_sim.program.work import Mask

CHUNK_TOKENS = 64 * 1024
"""Of one sequence: the default of Megatron-DeepSpeed's option ``--ds-sequence-parallel-fpdt-chunk-size``."""
FORWARDS = 2
"""Full recompute plays a layer's forward once more."""


@dataclass(frozen=True, slots=True)
class Chunks:
    """Seconds of one rank's step: attention whole and in chunks; of one chunk's part and the fetch beside it."""

    whole_s: float
    chunked_s: float
    part_s: float
    fetch_s: float

    @property
    def added_s(self) -> float:
        """What chunks add to the step where fetches hide; negative where calls without a mask gain more."""
        return self.chunked_s - self.whole_s

    @property
    def hides(self) -> bool:
        """Whether a chunk's keys and values come in less time than a forward over them takes."""
        return self.fetch_s <= self.part_s


def chunks_of(question: Question, decisions: Decisions, chunk_tokens: int = CHUNK_TOKENS) -> Chunks:
    """Return what chunks of ``chunk_tokens`` would change in a plan of full recompute, one micro-batch a step."""
    shape, pricer = shape_of(decisions).attention, Pricer(question.hardware, question.cluster, decisions.layout)

    def seconds(q: int, k: int, mask: Mask) -> float:
        forward, backward = (attention_work(decisions, shape, q, k, mask, backward=each) for each in (False, True))
        return FORWARDS * pricer.seconds(forward) + pricer.seconds(backward)

    sizes = list(_sizes(shape.tokens, chunk_tokens))
    squares_s = sum(seconds(size, size, "causal") for size in sizes)
    parts_s = sum(seconds(q, k, "none") for i, q in enumerate(sizes) for k in sizes[:i])
    part = attention_work(decisions, shape, sizes[0], sizes[0], "none", backward=False)
    fetched = sizes[0] * 2 * shape.kv_width * DTYPE_BYTES[decisions.dtype]
    layers = decisions.model.layers
    return Chunks(
        whole_s=layers * seconds(shape.tokens, shape.tokens, "causal"),
        chunked_s=layers * (squares_s + parts_s),
        part_s=pricer.seconds(part),
        fetch_s=fetched / offload_bandwidth(question, decisions, fetched),
    )


def _sizes(tokens: int, chunk: int) -> Iterator[int]:
    """Yield the tokens of each chunk; the last one has what is left."""
    for first, end in pairwise([*range(0, tokens, chunk), tokens]):
        yield end - first
