"""What optimizer states, sums of gradients and cast parameters do not go with."""

from __future__ import annotations

from memo_sim.program.layout.parameters import without_masters
from memo_sim.program.layout.rules.feature import Feature
from memo_sim.program.layout.rules.rule import Rule

_CAST = Feature(
    name="cast parameters",
    chosen=lambda d: d.zero_params == "cast",
    beside="beside parameters that every gather casts",
    setting="zero_params cast",
    hint="--zero-params stored",
)

STATES = (
    Rule(
        name="pure bf16 states: dtype",
        breaks=lambda d: without_masters(d) and d.dtype != "bf16",
        what="pure bf16 states have the dtype of the parameters",
        where="decisions.dtype",
        got=lambda d: f"{d.dtype} with states {d.states}",
        wanted="bf16",
        hint="--states fp32, or a device that computes in bf16",
    ),
    Rule(
        name="pure bf16 with fp32 moments: memory_policy",
        breaks=lambda d: d.states == "pure-bf16-fp32-moments" and d.memory_policy == "eager",
        what="torch's AdamW has moments in the parameters' dtype",
        where="decisions.states",
        got="pure-bf16-fp32-moments with memory policy eager",
        wanted="pure-bf16",
        hint="--states pure-bf16, or --memory-policy planned or caching",
    ),
    Rule(
        name="grad_sums fp32: memory_policy",
        breaks=lambda d: d.grad_sums == "fp32" and without_masters(d) and d.memory_policy == "eager",
        what="torch's modules in bf16 have gradients in bf16",
        where="decisions.grad_sums",
        got=lambda d: f"fp32 with states {d.states} and memory policy eager",
        wanted="auto",
        hint="leave --grad-sums out, or --memory-policy planned or caching",
    ),
    Rule(
        name="grad_sums params: dtype",
        breaks=lambda d: d.grad_sums == "params" and d.memory_policy != "eager" and d.dtype != "bf16",
        what="memo-exec sums gradients in fp32 or in bf16",
        where="decisions.grad_sums",
        got=lambda d: f"params with dtype {d.dtype}",
        wanted="auto, or params with dtype bf16",
        hint="leave --grad-sums out",
    ),
    Rule(
        name="grad_sums params: states",
        breaks=lambda d: d.grad_sums == "params" and d.memory_policy != "eager" and d.states == "host",
        what="AdamW on the host reads gradients in fp32",
        where="decisions.grad_sums",
        got="params with states host",
        wanted="auto",
        hint="leave --grad-sums out, or another --states",
    ),
    _CAST.allows("decisions.memory_policy", "eager", because="memo-exec stores a shard of parameters and gathers it"),
    _CAST.allows("layout.zero", 3, because="otherwise a rank has whole parameters"),
    _CAST.allows("decisions.states", "fp32", "bf16", because="there has to be an fp32 shard on the device"),
    _CAST.allows("decisions.dtype", "bf16", "fp16", because="fp32 parameters need no cast"),
)
