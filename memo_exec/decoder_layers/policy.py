"""What happens to a layer's saved tensors between forward and backward (MEMO 4.1).

whole   the layer's input and what attention saves itself (its output, its log-sum-exp)
first   all else that the first tokens of a sequence save, up to the cut
rest    the same of the other tokens
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from memo_sim.program.layout.swap_schedule import ROUNDING_BUFFERS


class Fate(StrEnum):
    """The fate of saved tensors."""

    KEEP = "kept"
    SWAP = "swapped"
    RECOMPUTE = "recomputed"


@dataclass(frozen=True)
class LayerPolicy:
    """The fates of one layer; ``whole`` is kept or swapped."""

    alpha: float
    whole: Fate
    first: Fate
    rest: Fate

    def cut(self, tokens: int) -> int:
        """Return the number of tokens of a sequence that come before the cut."""
        return round(self.alpha * tokens)

    def blocks(self, tokens: int) -> list[tuple[int, int, Fate]]:
        """Return (first token, end, fate) of each row block that has tokens."""
        cut = self.cut(tokens)
        return [each for each in ((0, cut, self.first), (cut, tokens, self.rest)) if each[0] < each[1]]


@dataclass(frozen=True)
class Policy:
    """The fates of all layers.

    The last ``resident_layers`` keep everything: their backward begins before the memory would be needed again.
    """

    alpha: float
    whole: Fate = Fate.SWAP
    first: Fate = Fate.SWAP
    rest: Fate = Fate.RECOMPUTE
    resident_layers: int = ROUNDING_BUFFERS

    def of_layer(self, index: int, layers: int) -> LayerPolicy:
        """Return the fates of a layer."""
        if index >= layers - self.resident_layers:
            return LayerPolicy(self.alpha, Fate.KEEP, Fate.KEEP, Fate.KEEP)
        return LayerPolicy(self.alpha, self.whole, self.first, self.rest)
