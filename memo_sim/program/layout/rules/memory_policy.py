"""What memory policies do not go with."""

from __future__ import annotations

from memo_sim.program.layout.rules.rule import Rule

PLANNED_LIBRARIES = Rule(
    name="replay_allocator: memory_policy",
    breaks=lambda d: d.replay_allocator and d.memory_policy != "planned",
    what="libraries are served from a planned arena, and memory is not planned here",
    where="decisions.replay_allocator",
    got=lambda d: f"--replay-allocator with memory policy {d.memory_policy}",
    wanted="memory policy planned",
    hint="--memory-policy planned, or leave --replay-allocator out",
)

LIMITED_ALLOCATOR = Rule(
    name="allocator_limit_gib: memory_policy",
    breaks=lambda d: d.allocator_limit_gib > 0 and d.memory_policy == "planned",
    what="planned memory does not use PyTorch's allocator, so nothing can be limited",
    where="decisions.allocator_limit_gib",
    got=lambda d: f"{d.allocator_limit_gib} GiB with memory policy planned",
    wanted="0, or memory policy caching or eager",
    hint="leave --allocator-limit-gib out, or give --device-memory-gib",
)

GRAPHS_OF_EAGER = Rule(
    name="cuda_graphs: memory_policy",
    breaks=lambda d: d.cuda_graphs and d.memory_policy != "eager",
    what="CUDA graphs replace the launches of an eager framework, and memo-exec's launches cost nothing here",
    where="decisions.cuda_graphs",
    got=lambda d: f"--cuda-graphs with memory policy {d.memory_policy}",
    wanted="memory policy eager",
    hint="--memory-policy eager, or leave --cuda-graphs out",
)

STREAMS_OF_A_FRAMEWORK = Rule(
    name="streams: memory_policy",
    breaks=lambda d: d.streams != "auto" and d.memory_policy != "eager",
    what="only an eager framework waits for streams before it reuses memory",
    where="decisions.streams",
    got=lambda d: f"{d.streams} with memory policy {d.memory_policy}",
    wanted="memory policy eager",
    hint="--memory-policy eager, or leave --streams out",
)

SUMS_OF_A_FRAMEWORK = Rule(
    name="grad_sums: memory_policy",
    breaks=lambda d: d.grad_sums == "autocast" and d.memory_policy != "eager",
    what="memo-exec casts no parameters: they have the plan's dtype",
    where="decisions.grad_sums",
    got=lambda d: f"{d.grad_sums} with memory policy {d.memory_policy}",
    wanted="memory policy eager",
    hint="--memory-policy eager, or leave --grad-sums out",
)

AUTOCAST_OF_WHOLE_PARAMETERS = Rule(
    name="autocast: zero",
    breaks=lambda d: d.grad_sums == "autocast" and d.layout.zero > 1,
    what="FSDP casts the parameters that it gathers, not autocast",
    where="decisions.grad_sums",
    got=lambda d: f"{d.grad_sums} with ZeRO {d.layout.zero}",
    wanted="ZeRO 0 or 1",
    hint="--zero 1, or --zero-params cast without --grad-sums",
)

AUTOCAST_OF_FP32_STATES = Rule(
    name="autocast: states",
    breaks=lambda d: d.grad_sums == "autocast" and (d.states != "fp32" or d.dtype == "fp32"),
    what="autocast computes in another dtype than that of the fp32 parameters, which the device has whole",
    where="decisions.grad_sums",
    got=lambda d: f"{d.grad_sums} with states {d.states} of {d.dtype}",
    wanted="states fp32 and a dtype of two bytes",
    hint="--states fp32, or leave --grad-sums out",
)

FSDP_OF_A_FRAMEWORK = Rule(
    name="sharding: memory_policy",
    breaks=lambda d: d.sharding != "memo" and d.memory_policy != "eager",
    what="FSDP's passes over parameters and gradients are an eager framework's, which memo-exec does not make",
    where="decisions.sharding",
    got=lambda d: f"{d.sharding} with memory policy {d.memory_policy}",
    wanted="memory policy eager",
    hint="--memory-policy eager, or leave --sharding out",
)

REDUCED_BY_FSDP = Rule(
    name="reduce_dtype: sharding",
    breaks=lambda d: d.reduce_dtype != "auto" and d.sharding == "memo",
    what="only FSDP copies gradients before it reduces them, and so can change their dtype",
    where="decisions.reduce_dtype",
    got=lambda d: f"{d.reduce_dtype} with sharding {d.sharding}",
    wanted="sharding fsdp1 or fsdp2",
    hint="--sharding fsdp2, or leave --reduce-dtype out",
)
