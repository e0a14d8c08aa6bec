"""What forms of the loss, and metrics from logits, do not go with."""

from __future__ import annotations

from memo_sim.contract.knobs import LINEAR_LOSSES
from memo_sim.program.layout.rules.feature import Feature
from memo_sim.program.layout.rules.rule import Rule

UNDIVIDED_LOSSES = ("eager-fp32", "checkpointed", "checkpointed-fp32")
"""Forms of the loss that need the logits of the whole vocabulary."""

_METRICS = Feature(
    name="metrics from logits",
    chosen=lambda d: d.loss_metrics > 0,
    beside="beside metrics that read all logits of a micro-batch",
    setting=lambda d: f"loss_metrics {d.loss_metrics}",
    hint="leave --loss-metrics out",
)

_LINEAR = Feature(
    name="loss with the classifier's product inside",
    chosen=lambda d: d.loss in LINEAR_LOSSES,
    beside="beside a loss with the classifier's product inside",
    setting=lambda d: f"loss {d.loss}",
    hint="--loss blocks, with --loss-chunk where logits are too large",
)

LOSS = (
    _LINEAR.allows(
        "decisions.memory_policy", "planned", "caching", because="no framework's kernels of such a loss are known"
    ),
    _LINEAR.allows(
        "decisions.kernels.rowwise", "torch", "triton", because="no framework's kernels of such a loss are known"
    ),
    _METRICS.allows("decisions.memory_policy", "eager", because="memo-exec computes no metrics"),
    _METRICS.allows("layout.tp", 1, because="ranks of tp hold parts of the logits"),
    _METRICS.allows("layout.pp", 1, because="stages have no metrics here"),
    _METRICS.allows("layout.subsequences", 1, because="subsequences have logits of their own"),
    _METRICS.allows("decisions.loss", "blocks", "eager-fp32", because="the logits have to outlive the loss"),
    _METRICS.allows("decisions.loss_chunk_tokens", 0, because="chunks of the loss share the buffer of their logits"),
    Rule(
        name="eager-fp32 loss: tp",
        breaks=lambda d: d.loss in UNDIVIDED_LOSSES and d.layout.tp > 1,
        what="torch's cross_entropy needs the logits of the whole vocabulary, which tensor parallelism divides",
        where="decisions.loss",
        got=lambda d: f"{d.loss} with tp {d.layout.tp}",
        wanted="auto, blocks, fused or vocab-parallel",
        hint="--loss vocab-parallel, or --tp 1",
    ),
)
