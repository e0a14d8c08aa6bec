"""Phases and kinds: the purpose of instructions, templates and buffer families.

Names only identify instructions, templates and families; ids and hashes are made of them. Code that needs the purpose
of one reads its phase, kind or block, and never parses a name.
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
    QUANTIZE = "quant"
    REQUANTIZE = "requant"
    """FP8 copies of weights for one backward."""
    ZERO = "zero"
    REDUCE = "reduce"
    OPTIMIZER = "opt"


class BlockKind(StrEnum):
    """The parts of a model whose parameters are stored together."""

    EMBED = "embed"
    LAYER = "layer"
    HEAD = "head"
    EXPERTS = "experts"
    """The experts of a layer, where ranks divide them (``Layout.ep``)."""

    @property
    def of_layer(self) -> bool:
        """Whether every layer of a kind has such a block."""
        return self in (BlockKind.LAYER, BlockKind.EXPERTS)


class TemplateKind(StrEnum):
    """The purpose of a template, mostly for one block of the model; the whole step and transfers have no block."""

    FORWARD = "forward"
    """The forward of the head includes loss and backward."""
    BACKWARD = "backward"
    BACKWARD_RESIDENT = "backward of activations that never left the device"
    REBUILD = "forward again before the backward of a group of layers"
    METRICS = "metrics from the logits, after a micro-batch's backward"
    WGRAD = "deferred weight gradients"
    OFFLOAD = "offload"
    PREFETCH = "prefetch"
    QUANTIZE = "quantise parameters to FP8"
    QUANTIZE_AGAIN = "quantise parameters to FP8 for one backward"
    GATHER = "gather parameters for one use"
    GATHER_UPDATED = "gather parameters that the step before updated"
    REGATHER = "gather parameters for one backward"
    COPY_OUT = "copy gathered parameters out for one use"
    COPY_OUT_AGAIN = "copy gathered parameters out for one backward"
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
    """Used by programs that are written by hand."""

    @property
    def of_step(self) -> bool:
        """Whether instances belong to the beginning or end of the step, not to a micro-batch."""
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
    """The contents of a family's buffers."""

    PARAMS = "params"
    GRADS = "grads"
    MASTER = "master"
    MOMENT1 = "moment1"
    MOMENT2 = "moment2"
    HOST_GRADS = "host_grads"
    HOST_PARAMS = "host_params"
    PARAMS_FP8 = "params_fp8"
    """Copies of a block's matrices in FP8, cached until the next update; or those matrices, kept in FP8 alone."""
    PARAMS_FP8_COLUMNS = "params_fp8_columns"
    """Matrices that are kept in FP8 alone, transposed."""
    LARGEST = "fp8_largest"
    """The largest values that the scales of matrices in FP8 alone follow from, where ranks share their masters."""
    GATHERED = "gathered"
    """Gathered parameters of a whole block, for one use; and FSDP2's copy of them, which the use reads."""
    CAST = "cast"
    """This rank's shard of a block's parameters, cast for a gather."""
    WHOLE_GRADS = "whole_grads"
    """Gradients of a whole block, for one use; and FSDP's copy of them, which ranks reduce."""
    SCALAR = "scalar"
    """Loss and gradient norm; with delayed scaling in FP8, largest values and scales of all layers of a stage."""
    INPUT = "input"
    """Token ids and labels."""
    SKELETAL = "skeletal"
    HEAD_INPUT = "head input"
    STAGE_BOUNDARY = "stage boundary"
    """Input and output of a pipeline stage."""
    INPUT_GRADIENT = "input gradient"
    """Gradients of layer inputs."""
    STAGING = "staging"
    """Rows in FP8 between a device buffer and the host: one buffer on the way out, one on the way back."""
    DEFERRED = "deferred"
    """Tensors that wait for the W pass."""
    LATER_GRADIENTS = "later gradients"
    """Gradients of keys and values that stages with later rows send."""
    PER_LAYER = "per layer"
    """One buffer for each micro-batch and layer: host copies, kept rows, the KV cache."""
    OWN = "own"
    """Buffers that live inside one template."""
    OTHER = "other"
    """Used by programs that are written by hand."""


STATE_KINDS = frozenset(
    {
        FamilyKind.PARAMS,
        FamilyKind.GRADS,
        FamilyKind.MASTER,
        FamilyKind.MOMENT1,
        FamilyKind.MOMENT2,
        FamilyKind.HOST_GRADS,
        FamilyKind.HOST_PARAMS,
        FamilyKind.PARAMS_FP8,
        FamilyKind.PARAMS_FP8_COLUMNS,
        FamilyKind.LARGEST,
    }
)
"""The states of a block: one buffer for each of its layers."""
