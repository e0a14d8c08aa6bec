"""Plays choices of recompute, rebuilding, buffers and loss together: gradients are autograd's, memory the program's.

Each choice has tests of its own; these are the pairs and triples that write into the same templates and buffers.
"""

from typing import Any

import msgspec
import pytest

from memo_sim.program.analysis.columns import expand
from memo_sim.program.analysis.liveness import live_bytes, liveness, peak
from memo_sim.program.lower import lower
from tests.exec_cpu.interpreter.replayed import assert_gradients_equal_autograds
from tests.exec_cpu.small import MODELS, decide, one_step
from tests.pairs import covering

TOKENS = 320
OFFLOADED = {"swapped_tokens": TOKENS}
MLP, CHUNKS = {"mlp_chunk_tokens": 128}, {"attention_chunk_tokens": 128}
ROUNDING, EARLY = {"rounding_buffers": True}, {"early_stop": True}
TOGETHER: dict[str, dict[str, Any]] = {
    "early stop, every second layer": {**EARLY, "recompute_layers": "every-2"},
    "early stop, the first layer": {**EARLY, "recompute_layers": "first-1"},
    "early stop, rebuilt with the layer": {**EARLY, **MLP, "mlp_rebuild": "layer"},
    "early stop, rebuilt twice": {**EARLY, **MLP, "mlp_rebuild": "twice"},
    "early stop, rounding buffers, inputs swapped": {**EARLY, **ROUNDING, **OFFLOADED},
    "early stop, attention in chunks, rounding buffers": {**EARLY, **CHUNKS, **ROUNDING},
    "rebuilt with the layer, attention in chunks": {**MLP, "mlp_rebuild": "layer", **CHUNKS},
    "rebuilt with the layer, attention in chunks, rounding buffers": {
        **MLP,
        "mlp_rebuild": "layer",
        **CHUNKS,
        **ROUNDING,
    },
    "rebuilt twice, attention in chunks, rounding buffers": {**MLP, "mlp_rebuild": "twice", **CHUNKS, **ROUNDING},
    "rebuilt twice, attention in chunks, inputs swapped": {**MLP, "mlp_rebuild": "twice", **CHUNKS, **OFFLOADED},
    "rounding buffers, attention in chunks, inputs swapped": {**ROUNDING, **CHUNKS, **OFFLOADED},
    "rounding buffers, attention in chunks, MLP in blocks, inputs swapped": {
        **ROUNDING,
        **CHUNKS,
        **MLP,
        **OFFLOADED,
    },
    "checkpointed loss, every second layer": {
        "loss": "checkpointed",
        "loss_chunk_tokens": 128,
        "recompute_layers": "every-2",
    },
    "checkpointed loss, groups": {"loss": "checkpointed-fp32", "recompute_layers": "groups-2"},
}


@pytest.mark.parametrize(("choices", "name"), covering(TOGETHER, ["gpt2", "qwen3"]))
def test_gradients_equal_autograd_and_memory_is_the_programs(choices: str, name: str) -> None:
    together, memory_policy = TOGETHER[choices], "caching" if name == "gpt2" else "planned"
    fields: dict[str, Any] = {"seq_tokens": TOKENS, "micro_batch": 1, "global_batch": 2, "recompute": "full"}
    deeper = msgspec.structs.replace(MODELS[name], layers=5)
    decisions = decide(deeper, memory_policy=memory_policy, **(fields | together))
    assert_gradients_equal_autograds(decisions)
    record, _ = one_step(decisions)
    (program,) = lower(decisions)
    assert record.peak_device_bytes == peak(live_bytes(liveness(program, expand(program)), device=True)).bytes
