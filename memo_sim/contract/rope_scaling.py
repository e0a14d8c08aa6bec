"""How rotary tables are scaled to longer contexts."""

from __future__ import annotations

from typing import Annotated, Literal

import msgspec

from memo_sim.contract.units import Positive, Rate


class RopeScaling(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Scaling of the rotary tables, as in transformers (``modeling_rope_utils.py``).

    - linear: all frequencies are divided by ``factor``.
    - llama3: low frequencies are, high ones are not, with a band between ``low_freq_factor`` and ``high_freq_factor``.
    - yarn: the same with a ramp between ``beta_fast`` and ``beta_slow`` rotations (Peng et al. 2023).
    - dynamic: the base grows with the sequence beyond ``original_max_positions`` (NTK).
    - longrope: each frequency has a divisor of its own, another one for sequences above ``original_max_positions``.
    """

    kind: Literal["llama3", "linear", "yarn", "dynamic", "longrope"]
    factor: Annotated[float, msgspec.Meta(ge=1)] = 1.0
    low_freq_factor: Rate = 1.0
    high_freq_factor: Rate = 4.0
    original_max_positions: Positive = 8192
    attention_factor: Rate = 1.0
    """Factor on cosines and sines (yarn, longrope)."""
    beta_fast: Rate = 32.0
    beta_slow: Rate = 1.0
    truncate: bool = True
    """Whether yarn's ramp ends at whole frequencies."""
    short_factors: tuple[Rate, ...] = ()
    long_factors: tuple[Rate, ...] = ()
    """Divisors by frequency (longrope)."""

    def __post_init__(self) -> None:
        """Refuse an empty band between the two frequencies, and divisors of another number of frequencies."""
        if self.kind == "llama3" and self.high_freq_factor <= self.low_freq_factor:
            raise ValueError("high_freq_factor must be more than low_freq_factor")
        if len(self.short_factors) != len(self.long_factors):
            raise ValueError("short_factors and long_factors must have one entry for each frequency")
