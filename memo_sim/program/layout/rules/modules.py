"""What Hugging Face's modules, and what they save for backward, do not go with."""

from __future__ import annotations

from memo_sim.contract.plan import Decisions
from memo_sim.program.layout.rules.feature import Feature
from memo_sim.program.layout.rules.rule import Rule


def saves_of_modules(decisions: Decisions) -> bool:
    """Return whether layers keep what Hugging Face's modules save between forward and backward.

    Under full recompute they keep their inputs alone (``memory/huggingface.py``).
    """
    return decisions.modules == "huggingface" and decisions.recompute in ("none", "tokenwise")


_MODULES = Feature(
    name="saved tensors of modules",
    chosen=saves_of_modules,
    beside="where layers keep what Hugging Face's modules save",
    setting=lambda d: f"modules {d.modules}, recompute {d.recompute}",
    hint="cp, dp and ZeRO go with them; or --modules operators, or --recompute full",
)

SAVED_BY_MODULES = (
    _MODULES.allows(
        "decisions.model.family", "llama", because="memo has no list of what the modules of other families save"
    ),
    _MODULES.allows("layout.tp", 1, because="memo_exec.tokenwise plays no row blocks of tensor-parallel layers"),
    _MODULES.allows("layout.ulysses", 1, because="memo has no list of what modules save around an all-to-all"),
    _MODULES.allows("layout.pp", 1, because="a transformers model is one stage"),
    _MODULES.allows("layout.subsequences", 1, because="a transformers model plays whole sequences"),
    _MODULES.allows("layout.cp_exchange", "ring", "all_gather", because="scores of whole rows are not kept"),
    _MODULES.allows(
        "decisions.kernels.attention",
        wanted="a flash kernel",
        because="memo has no list of what attention without one saves there",
        when=lambda d: saves_of_modules(d) and d.kernels.attention == "plain",
    ),
    _MODULES.allows(
        "decisions.micro_batch",
        1,
        because="row blocks of several sequences save a copy of attention's output, which is not in the list",
        when=lambda d: saves_of_modules(d) and d.recompute == "tokenwise",
    ),
    Rule(
        name="saved tensors of modules: swapped_tokens",
        breaks=lambda d: saves_of_modules(d) and d.recompute == "none" and 0 < d.swapped_tokens < d.local_tokens,
        what="nothing swaps some tokens of what Hugging Face's modules save and keeps the others",
        where="decisions.swapped_tokens",
        got=lambda d: f"{d.swapped_tokens} of {d.local_tokens} tokens with recompute none",
        wanted="no token, or all; with recompute tokenwise, any",
        hint="--recompute tokenwise, or --modules operators",
    ),
)

MODULES_OF_A_FRAMEWORK = Rule(
    name="modules: memory_policy",
    breaks=lambda d: d.modules == "huggingface" and d.memory_policy != "eager",
    what="memo-exec's operators are its own, whatever the memory",
    where="decisions.modules",
    got=lambda d: f"{d.modules} with memory policy {d.memory_policy}",
    wanted="memory policy eager",
    hint="--memory-policy eager, or leave --modules out",
)

MODULES_ARE_RECOMPUTED = Rule(
    name="modules: recompute",
    breaks=lambda d: d.modules == "huggingface" and d.recompute != "full" and not saves_of_modules(d),
    what="memo has no list of what Hugging Face's modules save under this recompute",
    where="decisions.modules",
    got=lambda d: f"{d.modules} with recompute {d.recompute}",
    wanted="recompute full, none or tokenwise",
    hint="--recompute full, or --modules operators",
)
