"""Where the rows of each expert end among all tokens of a micro-batch, which a loss of balance needs.

The loss multiplies the scores of each token by the rows that experts get of all tokens. Where row blocks or
subsequences are routed one after the other, ``route_ends`` has those of one alone. Forward keeps those of all:

    row blocks of row-wise recompute     one buffer of each layer, the sum over blocks
    subsequences                         one buffer of each micro-batch and layer, with a part for each subsequence

    prefix.ends   |  s0  |  s1  |  s2  |       forward of s1 writes its part; backward of each reads all parts

All subsequences of a micro-batch have run forward on a stage before the first of them runs backward there, because it
attends to the keys of the others. So every part is there, and gradients are those of the whole sequence.
"""

from __future__ import annotations

from itertools import accumulate

from memo_sim.contract.plan import Decisions
from memo_sim.contract.units import DTYPE_BYTES
from memo_sim.program.ir.builder import Rows, TemplateBuilder, reads, writes
from memo_sim.program.ir.instruction import BufferClass, Families, Family, Lane
from memo_sim.program.ir.kinds import FamilyKind, TemplateKind
from memo_sim.program.ir.work import Rowwise
from memo_sim.program.layout.partition import partition
from memo_sim.program.layout.shape import Shape

COUNT = DTYPE_BYTES["int32"]
ENDS, ALL_ENDS = "route_ends", "route_all_ends"
"""Where the rows of each expert end: of what is routed at once, and of all tokens."""
PREFIX_ENDS = "prefix.ends"
"""The family of ``ALL_ENDS`` of subsequences."""


def balanced(shape: Shape) -> bool:
    """Return whether a layer's router has a loss of balance."""
    return shape.experts is not None and shape.experts.balance > 0


def families(decisions: Decisions, shape: Shape, count: int, kind: int | None) -> list[Family]:
    """Return the family of the ends of all subsequences, ``count`` of it; none where nothing needs them.

    ``shape``: sizes in the layers of the layer kind ``kind``.
    """
    if not (shape.kv_cache_tokens and balanced(shape)):
        return []
    assert shape.experts is not None  # whose loss it is
    rows = decisions.layout.subsequences * shape.experts.count
    return [
        Family(PREFIX_ENDS, BufferClass.SKELETAL, "int32", rows, 1, count, kind=FamilyKind.PER_LAYER, layer_kind=kind)
    ]


def bind(builder: TemplateBuilder, found: Families) -> None:
    """Bind the ends of all subsequences to a template of forward or backward, if there are any."""
    if PREFIX_ENDS in found and builder.kind is not TemplateKind.REBUILD:
        builder.bind(found[PREFIX_ENDS], slot=ALL_ENDS)


def all_ends(decisions: Decisions, shape: Shape) -> Rows:
    """Return the ends of all tokens as backward reads them: one part for each subsequence."""
    assert shape.experts is not None  # whose rows they are
    parts = decisions.layout.subsequences if shape.kv_cache_tokens else 1
    return Rows(ALL_ENDS, 0, parts * shape.experts.count)


def keep(builder: TemplateBuilder, decisions: Decisions, shape: Shape) -> None:
    """Write the ends of the layer's tokens, the sum over all row blocks in ``ENDS``, to where backward reads them."""
    assert shape.experts is not None  # whose rows they are
    starts, count = list(accumulate(partition(decisions), initial=0)), shape.experts.count
    number = starts.index(shape.start) if shape.kv_cache_tokens else 0
    every, out = builder.all(ENDS), Rows(ALL_ENDS, number * count, count)
    work = Rowwise("experts.ends.sum", every.tokens, COUNT * every.tokens, COUNT * out.tokens)
    builder.emit("ends.sum", "experts.ends.sum", Lane.COMPUTE, work, x=reads(every), out=writes(out))
