"""What layers that differ do not go with."""

from __future__ import annotations

from memo_sim.program.layout.rules.feature import Feature

_UNLIKE = Feature(
    name="layers that differ",
    chosen=lambda d: len(d.model.layer_shapes) > 1,
    beside="for layers that differ",
    setting=lambda d: f"layers of {len(d.model.layer_shapes)} kinds",
    hint="tp, cp, Ulysses, pp, dp, ZeRO, every recompute mode and swapping go with them",
)

UNLIKE_LAYERS = (
    _UNLIKE.allows("layout.metp", 1, because="METP passes equal weights of every layer round its ring"),
    _UNLIKE.allows("layout.multiplexed", False, because="helper stages take rows in proportion to equal layers' work"),
    _UNLIKE.allows(
        "layout.partition",
        "length",
        because="equal work in one layer is not equal work in another: --partition length",
        when=lambda d: len(d.model.layer_shapes) > 1 and d.layout.subsequences > 1,
    ),
    _UNLIKE.allows(
        "decisions.modules", "auto", "operators", because="Hugging Face's transformers has no model whose layers differ"
    ),
)
