"""Reduced plans keep their policy, the kinds of their ranks and every way in which they are cut."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from memo_exec.verification.reduction import MOST_RANKS_OF_TWO, keep_everything, reduced, reductions
from memo_sim.contract import codec
from memo_sim.contract.catalog import load_model
from memo_sim.contract.errors import CannotRun
from memo_sim.contract.plan import Decisions, Kernels, Layout, Plan
from memo_sim.program.layout.heads import are_even, divided_heads, sharing_ranks
from memo_sim.program.layout.recomputed_layers import recomputed_layers
from memo_sim.program.layout.stage import stages_of
from memo_sim.program.lower import lower
from tests.exec_cpu.small import decide, gpt, llama
from tests.replay.test_recorded_programs import recorded

CPU = "torch-flash-cpu"
LARGE = llama(layers=32, hidden=4096, heads=32, kv_heads=8, head_dim=128, ffn_hidden=14336, vocab=128256)


def large(layout: Layout | None = None, **changes: Any) -> Decisions:
    layout = layout or Layout()
    fields: dict[str, Any] = {"seq_tokens": 2**17, "micro_batch": 1, "global_batch": 8 * layout.dp, "dtype": "bf16"}
    return decide(LARGE, layout=layout, kernels=Kernels(attention="flash3"), **(fields | changes))


def kept(decisions: Decisions) -> dict[str, object]:
    """Return what a reduced plan has to have like its plan."""
    d, layout = decisions, decisions.layout
    stages = [recomputed_layers(d, stage) for stage in stages_of(d)]
    heads, kv_heads = divided_heads(d.model, layout)
    return {
        "ranks": [getattr(layout, axis) > 1 for axis in ("tp", "metp", "ulysses", "cp", "dp", "pp", "virtual_stages")],
        "zero": (layout.zero, layout.shards > 1 and layout.shard_copies > 1),
        "layout": (
            layout.schedule,
            layout.cp_exchange,
            layout.sequence_parallel,
            layout.tp_overlap,
            layout.multiplexed,
        ),
        "heads": (are_even(heads, kv_heads, layout.ulysses), sharing_ranks(d.model, layout) > 1),
        "head groups": d.kernels.head_groups > 1,
        "policy": (d.recompute, d.overlap, d.loss, d.mlp_rebuild, d.early_stop, d.keep_norms, d.rounding_buffers),
        "layers": {(bool(each.kept), bool(each.passed), bool(each.rebuilt_before)) for each in stages},
        "swapped": (d.swapped_tokens > 0, d.swapped_tokens < d.local_tokens, d.offload_window > 0),
        "parts": (
            0 < d.mlp_chunk_tokens < d.local_tokens,
            0 < d.attention_chunk_tokens < d.seq_tokens,
            0 < d.loss_chunk_tokens < d.local_tokens,
            layout.subsequences > 1,
            d.micro_batches > 1,
        ),
    }


@pytest.mark.parametrize("every", [250, pytest.param(5, marks=[pytest.mark.slow, pytest.mark.timeout(1200)])])
def test_recorded_plans_have_a_small_form(every: int) -> None:
    played = 0
    for entry in recorded(every):
        document = {"schema": "memo.plan/1", "decisions": entry["decisions"]}
        decisions = codec.decode(msgspec.json.encode(document), Plan, where="recorded").decisions
        if decisions.memory_policy == "eager" or decisions.kernels.attention == "plain":
            continue
        here = reduced(decisions, attention=CPU)
        assert kept(here) == kept(decisions)
        assert here.layout.devices <= MOST_RANKS_OF_TWO
        assert max(here.seq_tokens, here.model.hidden, here.model.vocab) < 8192
        lower(keep_everything(here))
        played += 1
    assert played > 20


@pytest.mark.parametrize(
    ("layout", "ranks"),
    [
        (Layout(tp=8), {"tp": 8}),
        (Layout(tp=8, dp=64, zero=1), {"tp": 2, "dp": 2}),
        (Layout(tp=2, cp=2, pp=2, dp=8, zero=1), {"tp": 2, "cp": 2, "pp": 2, "dp": 2}),
        (Layout(dp=64, zero=3, zero_ranks=8), {"dp": 4, "zero_ranks": 2}),
        (Layout(pp=16, schedule="interleaved", virtual_stages=2), {"pp": 2, "virtual_stages": 2}),
    ],
    ids=lambda value: "" if isinstance(value, dict) else str(value.devices),
)
def test_large_groups_become_two_of_each_kind(layout: Layout, ranks: dict[str, int]) -> None:
    here = reduced(large(layout, global_batch=16 * layout.dp), attention=CPU).layout
    assert {name: getattr(here, name) for name in ranks} == ranks


def test_the_answer_lists_what_was_reduced() -> None:
    decisions = large(Layout(tp=16, sequence_parallel=True), recompute="full", mlp_chunk_tokens=2**14)
    found = {each.what: (each.plan, each.here) for each in reductions(decisions, reduced(decisions, attention=CPU))}
    assert found["layers"] == ("32", "4")
    assert found["tp"] == ("16", "2")
    assert found["tokens of an MLP block"] == ("16384", "256")
    assert found["dtype"] == ("bf16", "fp32")
    assert "cp" not in found


@pytest.mark.parametrize("sequences", [2, 3])
@pytest.mark.parametrize("parts", [{"layout": Layout(pp=2, subsequences=4)}, {"attention_chunk_tokens": 2**15}])
def test_every_sequence_of_a_micro_batch_is_divided(parts: dict[str, Any], sequences: int) -> None:
    fields = {"recompute": "full", "swapped_tokens": 0, "micro_batch": sequences, "global_batch": 4 * sequences}
    decisions = large(**fields, **parts)
    here = reduced(decisions, attention=CPU)
    assert kept(here) == kept(decisions)
    assert here.micro_batch == 2
    assert lower(here)


def test_swapped_and_other_tokens_both_stay() -> None:
    for swapped in (128, 2**17 - 128):
        here = reduced(large(recompute="tokenwise", swapped_tokens=swapped), attention=CPU)
        assert 0 < here.swapped_tokens < here.local_tokens


def test_torchs_operators_replace_those_of_triton_on_a_cpu() -> None:
    kernels = Kernels(attention="flash3", rowwise="triton")
    decisions = msgspec.structs.replace(large(loss="linear-triton"), kernels=kernels)
    here = reduced(decisions, attention=CPU)
    assert (here.loss, here.kernels.rowwise) == ("linear", "torch")
    found = {each.what: (each.plan, each.here) for each in reductions(decisions, here)}
    assert found["loss"] == ("linear-triton", "linear")
    assert reduced(decisions, attention="").loss == "linear-triton"


def test_layers_can_be_chosen() -> None:
    assert reduced(large(recompute="full", recompute_layers="every-2"), layers=7, attention=CPU).model.layers == 7
    here = reduced(large(Layout(pp=4)), layers=6, attention=CPU)
    assert [len(stage.layers) for stage in stages_of(here)] == [2, 2, 1, 1]


@pytest.mark.parametrize(
    ("decisions", "got"),
    [
        (large(memory_policy="eager"), "eager"),
        (msgspec.structs.replace(large(), kernels=Kernels(attention="flash1")), "flash1"),
        (msgspec.structs.replace(large(), kernels=Kernels(attention="flash3", rowwise="compiled")), "compiled"),
        (large(Layout(tp=2, cp=2, ulysses=2, pp=2, dp=2)), "32 ranks"),
    ],
    ids=["eager", "flash1", "compiled", "ranks"],
)
def test_plans_that_cannot_be_played_are_refused_by_name(decisions: Decisions, got: str) -> None:
    with pytest.raises(CannotRun) as error:
        reduced(decisions, attention=CPU)
    assert error.value.got == got


def test_learned_positions_shrink_with_the_sequence() -> None:
    here = reduced(decide(gpt(max_positions=2**17), seq_tokens=2**16, micro_batch=1), attention=CPU)
    assert here.model.max_positions == here.seq_tokens


@pytest.mark.parametrize("layout", [Layout(), Layout(cp=4), Layout(tp=2, sequence_parallel=True, ulysses=2)])
def test_windows_are_shorter_than_a_chunk_and_stay_with_their_layers(layout: Layout) -> None:
    """Every sixth layer of a Gemma 3 has no window; four layers of the reduced plan take turns."""
    gemma = load_model("gemma3-12b")
    plan = msgspec.structs.replace(large(layout, recompute="tokenwise", swapped_tokens=2**14), model=gemma)
    here = reduced(plan, attention=CPU)
    windows = [here.model.layer(number).window for number in range(here.model.layers)]
    assert windows == [windows[0], 0, windows[0], 0]
    chunk = here.seq_tokens // (2 * layout.cp if layout.cp > 1 else 1)
    assert 1 < windows[0] < chunk
    assert [bool(here.model.layer(number).rope_theta) for number in range(4)] == [True, False, True, False]
    assert here.model.post_norms
    shown = {each.what: (each.plan, each.here) for each in reductions(plan, here)}
    assert shown["attention windows"] == ("1024, none", f"{windows[0]}, none")
