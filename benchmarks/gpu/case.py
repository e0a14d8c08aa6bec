"""A case is one measurement for a measuring process: one system, one model, one sequence length."""

from __future__ import annotations

from typing import Literal

import msgspec

from memo_sim.contract.hardware import FusedKernel
from memo_sim.contract.knobs import DtypeName
from memo_sim.contract.model import Model
from memo_sim.contract.plan import Kernels

Kind = Literal["machine", "calibrate", "plain", "hugging face", "memo"]
Part = Literal["checks", "calibrate", "suite", "rivals", "longest"]

FUSED: FusedKernel = "triton"
"""Name of the fused row-wise kernels; if they work here, they are listed with the attention kernels."""
SEED = 1
SEQUENCES = 1
"""Sequences per step; every system runs one micro-batch of one sequence."""


class Case(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One measurement; ``kind`` selects the code that runs it."""

    rival: str
    kind: Kind
    part: Part
    model: Model | None = None
    seq_tokens: int = 0
    dtype: DtypeName = "bf16"
    steps: int = 5
    warm_ups: int = 2
    data: str = ""
    """File of token ids."""
    plan: str = ""
    """Plan file of a memo system."""
    predicted_step_s: float = 0.0
    predicted_host_bytes: int = 0
    """Host bytes per node that the plan predicts; used to estimate how long the case takes."""
    policy: str = ""
    output: str = ""
    """Path to which a calibration writes its profile."""
    quick: bool = False

    @property
    def tokens(self) -> int:
        """Tokens of one step."""
        return SEQUENCES * self.seq_tokens


def named(kernels: Kernels) -> str:
    """Return a short name for a plan's kernels."""
    return kernels.attention + (f" + {kernels.rowwise}" if kernels.rowwise != "torch" else "")
