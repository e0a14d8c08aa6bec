"""What multiplexing does not go with."""

from __future__ import annotations

from memo_sim.program.layout.rules.pipeline_stages import MOST_WHOLE_ZERO, staged
from memo_sim.program.layout.rules.rule import Rule
from memo_sim.program.layout.stage import layers_of_runs

MULTIPLEXING = (
    Rule(
        name="multiplexing: pp",
        breaks=lambda d: d.layout.multiplexed and not staged(d),
        what="multiplexing needs several pipeline stages",
        where="layout.pp",
        got=lambda d: f"{d.layout.pp}",
        wanted="several stages",
        hint="--no-multiplexed",
    ),
    Rule(
        name="multiplexing: subsequences",
        breaks=lambda d: d.layout.multiplexed and d.layout.subsequences < d.layout.pp,
        what="multiplexing needs as many subsequences as stages, or more: fewer never fill the pipeline",
        where="layout.subsequences",
        got=lambda d: f"{d.layout.subsequences} with {d.layout.pp} stages",
        wanted="as many as stages, or more",
        hint="--no-multiplexed, or more --subsequences",
    ),
    Rule(
        name="multiplexing: global_batch",
        breaks=lambda d: d.layout.multiplexed and d.micro_batches != 1,
        what="multiplexing needs exactly one micro-batch",
        where="global_batch",
        got=lambda d: f"{d.micro_batches} micro-batches",
        wanted="one",
        hint="--no-multiplexed, or a global batch of micro-batch x dp",
    ),
    Rule(
        name="multiplexing: schedule",
        breaks=lambda d: d.layout.multiplexed and d.layout.schedule not in ("gpipe", "1f1b"),
        what="the schedule fills the idle time that multiplexing would use",
        where="layout.schedule",
        got=lambda d: d.layout.schedule,
        wanted="gpipe or 1f1b",
        hint="--no-multiplexed, or another --schedule",
    ),
    Rule(
        name="multiplexing: zero",
        breaks=lambda d: d.layout.multiplexed and d.layout.zero > MOST_WHOLE_ZERO,
        what="an owner sends whole parameters to its helpers and adds whole gradients, which ZeRO 2 and 3 divide",
        where="layout.zero",
        got=lambda d: f"{d.layout.zero} with multiplexing",
        wanted="0 or 1",
        hint="--no-multiplexed, or --zero 1",
    ),
    Rule(
        name="multiplexing: pp_layers",
        breaks=lambda d: d.layout.multiplexed and len(set(layers_of_runs(d))) > 1,
        what="multiplexing needs stages of equal numbers of layers: helper stages take rows in proportion to work",
        where="layout.pp_layers",
        got=lambda d: ", ".join(map(str, layers_of_runs(d))),
        wanted="equal numbers",
        hint="--no-multiplexed, or a --pp that divides the layers",
    ),
    Rule(
        name="multiplexing: rounding_buffers",
        breaks=lambda d: d.layout.multiplexed and d.rounding_buffers,
        what="a helper stage plays rows of a layer in buffers of its own, not in the two rounding buffers",
        where="decisions.rounding_buffers",
        got="true with multiplexing",
        wanted="false",
        hint="--no-rounding-buffers, or --no-multiplexed",
    ),
    Rule(
        name="multiplexing: memory_policy",
        breaks=lambda d: d.layout.multiplexed and d.memory_policy == "eager",
        what="no eager framework multiplexes",
        where="memory_policy",
        got="eager",
        wanted="planned or caching",
        hint="--no-multiplexed, or --memory-policy planned",
    ),
)
