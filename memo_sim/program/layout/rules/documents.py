"""What packed documents do not go with."""

from __future__ import annotations

from memo_sim.contract.attention_kernels import ATTENTION_KERNELS
from memo_sim.program.layout.rules.feature import Feature
from memo_sim.program.layout.rules.rule import Rule
from memo_sim.program.layout.rules.windows import longest_window, windowed

_DOCUMENTS = Feature(
    name="packed documents",
    chosen=lambda d: d.documents is not None,
    beside="beside packed documents",
    setting="documents",
    hint="tp, cp (ring or all-gather), Ulysses, pp, dp, ZeRO and every recompute mode go with --documents",
)

CUTS_OF_DOCUMENTS = Rule(
    name="cuts of documents: documents",
    breaks=lambda d: d.documents is None and d.document_cuts != "sequence",
    what="without documents there is nothing to cut but the sequence",
    where="decisions.document_cuts",
    got="documents, but none are given",
    wanted="sequence",
    hint="--documents mean=2k,max=64k, or leave --document-cuts out",
)

DOCUMENTS = (
    _DOCUMENTS.allows(
        "layout.metp", 1, because="METP's ring of keys and values would need the documents of every rank's rows"
    ),
    _DOCUMENTS.allows(
        "layout.cp_exchange", "ring", "all_gather", because="whole rows of scores have no mask of documents"
    ),
    _DOCUMENTS.allows(
        "decisions.micro_batch",
        1,
        because="the gathered keys of several sequences lie apart",
        when=lambda d: d.documents is not None and d.layout.cp_exchange == "all_gather" and d.micro_batch > 1,
    ),
    _DOCUMENTS.allows(
        "layout.subsequences", 1, because="the pairs of a subsequence with its prefix would depend on the step"
    ),
    _DOCUMENTS.allows(
        "decisions.attention_chunk_tokens", 0, because="the pairs of two chunks would depend on the step"
    ),
    Rule(
        name="packed documents: attention",
        breaks=lambda d: d.documents is not None and not ATTENTION_KERNELS[d.kernels.attention].documents,
        what="the attention kernel has no form for packed documents",
        where="decisions.kernels.attention",
        got=lambda d: d.kernels.attention,
        wanted=" or ".join(name for name, kernel in ATTENTION_KERNELS.items() if kernel.documents),
        hint="--attention flash, or leave --documents out",
    ),
    _DOCUMENTS.allows("decisions.cuda_graphs", False, because="the grid of a kernel depends on the documents"),
    Rule(
        name="packed documents: bidirectional",
        breaks=lambda d: d.documents is not None and d.model.bidirectional,
        what="packed documents have a causal mask",
        where="model.bidirectional",
        got="true with documents",
        wanted="false",
        hint="leave --documents out, or a model with causal attention",
    ),
    Rule(
        name="packed documents: windows",
        breaks=lambda d: d.documents is not None and windowed(d) and d.layout.cp > 1,
        what="context parallelism has no lowering of attention windows beside packed documents",
        where="layout.cp",
        got=lambda d: f"cp {d.layout.cp} with documents and a window of {longest_window(d)} tokens",
        wanted="1",
        hint="--cp 1 with tp or Ulysses, or leave --documents out",
    ),
    CUTS_OF_DOCUMENTS,
    Rule(
        name="packed documents: most",
        breaks=lambda d: d.documents is not None and d.documents.most > d.seq_tokens,
        what="a sequence has more documents than tokens",
        where="decisions.documents.most",
        got=lambda d: f"{d.documents.most if d.documents else 0} of {d.seq_tokens} tokens",
        wanted="at most the tokens of a sequence",
        hint="a smaller most=, or leave it out",
    ),
)
