"""What waits for W passes is never more than a zero-bubble pipeline's peak, whatever the policy, and is most of it."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from memo_sim.contract.catalog import load_cluster, load_model
from memo_sim.contract.errors import Infeasible
from memo_sim.contract.plan import Decisions, Layout
from memo_sim.engine.simulate import simulate
from memo_sim.planning.lower_bounds import LowerBounds
from memo_sim.planning.pipeline_lower_bound import kept
from memo_sim.planning.question import with_memory
from memo_sim.planning.space import with_alpha
from memo_sim.planning.w_pass_bytes import waiting_bytes
from tests.pairs import covering

MEGATRON: dict[str, Any] = {"tp": 2, "sequence_parallel": True}
STAGES: dict[str, dict[str, Any]] = {
    "two": {"pp": 2},
    "four with tp": {"pp": 4, **MEGATRON},
    "eight": {"pp": 8},
    "unequal": {"pp": 4, "pp_layers": (4, 1, 2, 1)},
    "longest last": {"pp": 3, "pp_layers": (1, 2, 5)},
    "ulysses and ZeRO": {"pp": 2, "ulysses": 2, "dp": 2, "zero": 1},
    "ring": {"pp": 4, "cp": 2},
}
POLICIES = [
    *(("none", alpha) for alpha in (0.0, 0.5, 1.0)),
    *(("tokenwise", alpha) for alpha in (0.0, 0.5)),
    *(("full", alpha) for alpha in (0.0, 1.0)),
    *((name, 0.0) for name in ("selective", "norms", "mlp", "operators")),
]


def plan(model: str, stages: dict[str, Any], micro_batches: int, **fields: Any) -> Decisions:
    shallow = msgspec.structs.replace(load_model(model), layers=8)
    layout = Layout(**stages, schedule="zero-bubble")
    batch = micro_batches * layout.dp
    return Decisions(model=shallow, layout=layout, seq_tokens=1 << 15, global_batch=batch, **fields)


@pytest.mark.parametrize("model", ["gpt-7b", "llama3-8b"])
@pytest.mark.parametrize(("name", "micro_batches"), covering(list(STAGES), [1, 3, 12]))
def test_no_policy_needs_less_than_what_waits_for_w_passes(model: str, name: str, micro_batches: int) -> None:
    cluster, hardware = with_memory(*load_cluster("a800-1x8"), device_bytes=2**50, host_bytes=2**50)
    bounds, base = LowerBounds(hardware, cluster), plan(model, STAGES[name], micro_batches, loss_chunk_tokens=4096)
    keep = kept(base)
    for recompute, alpha in POLICIES:
        decisions = with_alpha(base, recompute, alpha)
        played = simulate(decisions, hardware, cluster).prediction.peak_device_bytes
        assert max(waiting_bytes(decisions)) > 0
        assert waiting_bytes(decisions) == waiting_bytes(keep)
        for any_alpha in (False, True):
            assert bounds.memory(decisions, any_alpha=any_alpha).device_bytes <= played
        of_layout = bounds.of_layout(decisions, []).device_bytes
        assert max(waiting_bytes(decisions)) < of_layout <= played
        if (recompute, alpha, micro_batches) == ("tokenwise", 0.0, 12):
            assert of_layout > 0.55 * played


def test_what_waits_is_known_only_where_w_passes_read_all_of_one_length() -> None:
    stages = STAGES["two"]
    for fields in ({"schedule": "1f1b"}, {"subsequences": 2}, {"pp": 1}):
        decisions = plan("gpt-7b", stages, 4)
        layout = msgspec.structs.replace(decisions.layout, **fields)
        assert waiting_bytes(msgspec.structs.replace(decisions, layout=layout)) == []
    with pytest.raises(Infeasible):
        waiting_bytes(plan("gpt-7b", {"pp": 2, "tp": 3}, 4))
