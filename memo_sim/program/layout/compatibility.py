"""Which knobs do not go together: one table of rules, each with the message that a user gets.

``shape_of``, and so ``lower``, refuses decisions that break a rule of ``RULES``; the search reads the same rules to
leave such plans out. ``ARENA_RULES`` are about memory policies: a program can be written all the same, so the search
alone refuses them. Whether a degree divides a size of the model or the sequence is no rule of this table: ``shape.py``,
``stage.py`` and ``attention_chunks.py`` check that.

How to add a rule: write it in its feature's module of ``rules``, at its place (the message names the first broken rule
of the table), and give ``tests/sim/program/layout/test_compatibility.py`` decisions that break this rule and no other.
"""

from __future__ import annotations

from functools import lru_cache
from itertools import groupby

from memo_sim.contract.plan import Decisions
from memo_sim.program.layout.rules.adapters import ADAPTERS
from memo_sim.program.layout.rules.attention_chunks import ATTENTION_CHUNKS
from memo_sim.program.layout.rules.attention_kernels import HEADS_OF_FLASH1, PLAIN_ATTENTION, PLANNED_PLAIN_ATTENTION
from memo_sim.program.layout.rules.bidirectional import BIDIRECTIONAL
from memo_sim.program.layout.rules.documents import DOCUMENTS
from memo_sim.program.layout.rules.experts import EXPERTS
from memo_sim.program.layout.rules.fp8 import IN_FP8
from memo_sim.program.layout.rules.gemma import GEMMA
from memo_sim.program.layout.rules.latent import LATENT
from memo_sim.program.layout.rules.loss import LOSS
from memo_sim.program.layout.rules.memory_policy import (
    AUTOCAST_OF_FP32_STATES,
    AUTOCAST_OF_WHOLE_PARAMETERS,
    FSDP_OF_A_FRAMEWORK,
    GRAPHS_OF_EAGER,
    LIMITED_ALLOCATOR,
    PLANNED_LIBRARIES,
    REDUCED_BY_FSDP,
    STREAMS_OF_A_FRAMEWORK,
    SUMS_OF_A_FRAMEWORK,
)
from memo_sim.program.layout.rules.metp import METP, NORMS_OF_METP
from memo_sim.program.layout.rules.mlp_blocks import (
    MLP_BLOCKS_UNDER_FULL_RECOMPUTE,
    MLP_BLOCKS_UNDER_ZERO_BUBBLE,
    MLP_REBUILT_BY_FRAMEWORKS,
)
from memo_sim.program.layout.rules.modules import MODULES_ARE_RECOMPUTED, MODULES_OF_A_FRAMEWORK, SAVED_BY_MODULES
from memo_sim.program.layout.rules.multiplexing import MULTIPLEXING
from memo_sim.program.layout.rules.pipeline_stages import PIPELINE_STAGES
from memo_sim.program.layout.rules.recompute import (
    EARLY_STOP_OF_FULL_RECOMPUTE,
    ROUNDING_BUFFERS_OF_FULL_RECOMPUTE,
    SELECTIVE_SWAPS_NOTHING,
    SOME_LAYERS,
)
from memo_sim.program.layout.rules.ring_self_attention import RING_SELF_ATTENTION
from memo_sim.program.layout.rules.rowwise import ROWWISE_RECOMPUTE
from memo_sim.program.layout.rules.rule import Rule
from memo_sim.program.layout.rules.sinks import SINKS
from memo_sim.program.layout.rules.states import STATES
from memo_sim.program.layout.rules.subsequences import SUBSEQUENCES
from memo_sim.program.layout.rules.swap_format import SWAPS_IN_FP8
from memo_sim.program.layout.rules.tensor_chunks import TENSOR_CHUNKS
from memo_sim.program.layout.rules.unlike_layers import UNLIKE_LAYERS
from memo_sim.program.layout.rules.windows import WINDOWED
from memo_sim.program.layout.rules.zero import RANKS_OF_ZERO

RULES = (
    *EXPERTS,
    *LATENT,
    *IN_FP8,
    *WINDOWED,
    *SINKS,
    *GEMMA,
    *DOCUMENTS,
    *ADAPTERS,
    *MULTIPLEXING,
    *PIPELINE_STAGES,
    *RANKS_OF_ZERO,
    MLP_BLOCKS_UNDER_ZERO_BUBBLE,
    NORMS_OF_METP,
    *SAVED_BY_MODULES,
    *UNLIKE_LAYERS,
    *METP,
    *TENSOR_CHUNKS,
    *RING_SELF_ATTENTION,
    *ATTENTION_CHUNKS,
    *BIDIRECTIONAL,
    *SUBSEQUENCES,
    *ROWWISE_RECOMPUTE,
    *SWAPS_IN_FP8,
    SELECTIVE_SWAPS_NOTHING,
    *SOME_LAYERS,
    ROUNDING_BUFFERS_OF_FULL_RECOMPUTE,
    MLP_BLOCKS_UNDER_FULL_RECOMPUTE,
    EARLY_STOP_OF_FULL_RECOMPUTE,
    *MLP_REBUILT_BY_FRAMEWORKS,
    HEADS_OF_FLASH1,
    *STATES,
    *LOSS,
    *PLAIN_ATTENTION,
)
"""Combinations that no program is written for; the message names the first that applies."""

ARENA_RULES = (
    PLANNED_LIBRARIES,
    LIMITED_ALLOCATOR,
    GRAPHS_OF_EAGER,
    PLANNED_PLAIN_ATTENTION,
    STREAMS_OF_A_FRAMEWORK,
    SUMS_OF_A_FRAMEWORK,
    AUTOCAST_OF_WHOLE_PARAMETERS,
    AUTOCAST_OF_FP32_STATES,
    FSDP_OF_A_FRAMEWORK,
    REDUCED_BY_FSDP,
    MODULES_OF_A_FRAMEWORK,
    MODULES_ARE_RECOMPUTED,
)
"""What no arena is planned for; programs can be written for it, and the search refuses it."""


_RUNS = tuple((beside, tuple(rules)) for beside, rules in groupby(RULES, key=lambda rule: rule.beside))
"""The rules in their order; those in succession that share a condition are read only where it is true."""


def goes_together(decisions: Decisions) -> bool:
    """Return whether decisions break no rule of ``RULES``."""
    return _broken(decisions) is None


def check_compatible(decisions: Decisions) -> None:
    """Refuse decisions that do not go together.

    Raises:
        Infeasible: naming the first rule of the table that they break.
    """
    if (rule := _broken(decisions)) is not None:
        raise rule.refusal(decisions)


@lru_cache(maxsize=4096)
def _broken(decisions: Decisions) -> Rule | None:
    """Return the first rule that decisions break; a search asks several times."""
    for beside, rules in _RUNS:
        if beside is None or beside(decisions):
            for rule in rules:
                if rule.breaks(decisions):
                    return rule
    return None
