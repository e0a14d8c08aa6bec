"""What instructions, templates and buffer families are for, as types.

Names of instructions, templates and families are identities: they make ids and hashes. Code that has to know what
something is for asks for its phase, kind or block, and never takes a name apart.
"""

from __future__ import annotations

from enum import StrEnum


class Phase(StrEnum):
    """The part of a step that an instruction belongs to; its value is the first word of the instruction's name."""

    FORWARD = "fwd"
    BACKWARD = "bwd"
    RECOMPUTE = "rec"
    WGRAD = "wgt"
    """Deferred weight gradients: the W pass of zero-bubble schedules."""
    OFFLOAD = "off"
    PREFETCH = "pre"
    P2P = "pp"
    """Transfers between neighbouring pipeline stages."""
    HELPER = "helper"
    """Transfers between a helper stage and an owner stage, and the sums of what helpers computed."""
    GATHER = "gather"
    REGATHER = "regather"
    ZERO = "zero"
    REDUCE = "reduce"
    OPTIMIZER = "opt"


class BlockKind(StrEnum):
    """The parts of a model whose parameters are stored together."""

    EMBED = "embed"
    LAYER = "layer"
    HEAD = "head"


class TemplateKind(StrEnum):
    """What a template does to its block of the model; one without a block concerns the whole step or a transfer."""

    FORWARD = "forward"
    """Of the head: loss and backward too."""
    BACKWARD = "backward"
    BACKWARD_RESIDENT = "backward of activations that never left the device"
    WGRAD = "deferred weight gradients"
    OFFLOAD = "offload"
    PREFETCH = "prefetch"
    GATHER = "gather parameters for one use"
    GATHER_UPDATED = "gather parameters that the step before updated"
    REGATHER = "gather parameters for one backward"
    CLEAR = "zero whole gradients before one use"
    SCATTER = "reduce-scatter gradients after one use"
    ADD = "add this rank's shard of gradients"
    ZERO = "zero gradients at the step's start"
    PREPARE = "check and scale gradients"
    REDUCE = "reduce gradients over replicas"
    NORM = "gradient norm"
    UPDATE = "optimizer update"
    TIED = "sum of the tied embedding's gradient over two stages"
    TOTALS = "sums of norm and loss over ranks"
    TRANSFER = "send, receive, gather or copy between stages"
    HELPER_FORWARD = "send or receive for a helper stage's forward"
    HELPER_BACKWARD = "send or receive for a helper stage's backward"
    SUM = "sum of gradients that helper stages computed"
    OTHER = "other"
    """Of programs that are written by hand."""

    @property
    def of_step(self) -> bool:
        """Whether instances belong to the step's beginning or end, not to a micro-batch."""
        return self in _OF_STEP


_OF_STEP = frozenset(
    {
        TemplateKind.GATHER_UPDATED,
        TemplateKind.ZERO,
        TemplateKind.PREPARE,
        TemplateKind.REDUCE,
        TemplateKind.NORM,
        TemplateKind.UPDATE,
        TemplateKind.TIED,
        TemplateKind.TOTALS,
    }
)


class FamilyKind(StrEnum):
    """What the buffers of a family hold."""

    PARAMS = "params"
    GRADS = "grads"
    MASTER = "master"
    MOMENT1 = "moment1"
    MOMENT2 = "moment2"
    HOST_GRADS = "host_grads"
    HOST_PARAMS = "host_params"
    GATHERED = "gathered"
    """Parameters that are whole for one use."""
    WHOLE_GRADS = "whole_grads"
    """Gradients that are whole for one use."""
    SCALAR = "scalar"
    """Loss and gradient norm."""
    INPUT = "input"
    """Token ids and labels."""
    SKELETAL = "skeletal"
    HEAD_INPUT = "head input"
    STAGE_BOUNDARY = "stage boundary"
    """Input and output of a pipeline stage."""
    INPUT_GRADIENT = "input gradient"
    """Gradients of layer inputs."""
    DEFERRED = "deferred"
    """What waits for deferred weight gradients."""
    LATER_GRADIENTS = "later gradients"
    """Gradients of keys and values that later rows' stages send."""
    PER_LAYER = "per layer"
    """One buffer for each micro-batch and layer: host copies, kept rows, the KV cache."""
    OWN = "own"
    """Buffers that live inside one template."""
    OTHER = "other"
    """Of programs that are written by hand."""


STATE_KINDS = frozenset(
    {
        FamilyKind.PARAMS,
        FamilyKind.GRADS,
        FamilyKind.MASTER,
        FamilyKind.MOMENT1,
        FamilyKind.MOMENT2,
        FamilyKind.HOST_GRADS,
        FamilyKind.HOST_PARAMS,
    }
)
"""The states of a block: one buffer for each of its layers."""
