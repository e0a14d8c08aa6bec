"""Systems from the literature: their layouts, their policies, and the memory that they run in."""

from __future__ import annotations

import itertools
import re
from dataclasses import replace
from typing import Any

import pytest

from memo_sim.answers.left_out import left_out
from memo_sim.answers.what_if import what_if
from memo_sim.contract.catalog import load_cluster, load_model
from memo_sim.contract.errors import Infeasible, UsageError
from memo_sim.contract.knobs import DEGREES, Loss, Streams
from memo_sim.planning.attention_kernels import attention_kernel
from memo_sim.planning.layouts import layouts
from memo_sim.planning.presets import (
    FULL_RECOMPUTE,
    INPUTS_SWAPPED_MLP_IN_BLOCKS,
    KEEP,
    OPERATOR_RECOMPUTE,
    SELECTIVE_RECOMPUTE,
    TOKENWISE,
    Policy,
)
from memo_sim.planning.question import Pins, Question
from memo_sim.planning.search import search
from memo_sim.planning.space import candidates
from tests.refusals import refused


def ask(
    system: str,
    *,
    seq_tokens: int = 16384,
    global_batch: int = 16,
    model: str = "gpt-7b",
    cluster: str = "a800-1x8",
    loss: Loss = "auto",
    streams: Streams = "auto",
    **pins: Any,
) -> Question:
    return Question(
        load_model(model),
        *load_cluster(cluster),
        seq_tokens,
        system=system,
        pins=Pins(**pins),
        global_batch=global_batch,
        loss=loss,
        streams=streams,
    )


@pytest.mark.parametrize(
    ("system", "own"),
    [
        ("fsdp", "eager"),
        ("megatron-lm", "fused"),
        ("deepspeed-ulysses", "fused"),
        ("memo", "torch"),
        ("torchtitan", "eager"),
        ("trl-fsdp2", "eager"),
        ("deepspeed-alst", "eager"),
        ("megatron-core", "fused"),
    ],
)
def test_row_wise_kernels_are_the_systems_own_unless_pinned(system: str, own: str) -> None:
    for pins, wanted in (({}, own), ({"rowwise": "compiled"}, "compiled")):
        found = {c.base.kernels.rowwise for c in candidates(ask(system, **pins))[0]}
        assert found == {wanted}


@pytest.mark.parametrize(
    ("system", "degrees", "zero"),
    [("fsdp", {"dp"}, 3), ("ring-attention", {"cp", "dp"}, 3), ("megatron-lm", {"tp", "cp", "dp"}, 1)],
)
def test_a_system_divides_work_its_own_way(system: str, degrees: set[str], zero: int) -> None:
    found = layouts(ask(system))
    used = {name for layout in found for name in ("tp", "cp", "dp") if getattr(layout, name) > 1}
    assert used == degrees
    ring = 0 if system == "megatron-lm" else 1
    assert {layout.zero for layout in found if layout.cp**ring * layout.dp > 1} == {zero}
    assert all(layout.sequence_parallel == (layout.tp > 1) for layout in found)
    own = {SELECTIVE_RECOMPUTE} if system == "megatron-lm" else set()
    assert {c.policy for c in candidates(ask(system))[0]} == {KEEP, FULL_RECOMPUTE} | own


def test_megatron_shards_optimizer_states_over_replicas_and_on_request_over_the_ring() -> None:
    found = layouts(ask("megatron-lm"))
    assert any(layout.cp > 1 == layout.dp for layout in found)
    assert all(layout.zero == (layout.dp > 1) for layout in found)
    assert {layout.zero for layout in layouts(ask("megatron-lm", tp=4, cp=2, zero=1))} == {1}
    assert {layout.zero for layout in layouts(ask("memo", tp=4, cp=2))} == {1}


def test_megatrons_stages_are_searched_in_its_own_order() -> None:
    found = layouts(ask("megatron-lm"))
    orders = {(layout.pp, layout.schedule, layout.virtual_stages) for layout in found}
    assert orders == {(1, "1f1b", 1), (2, "1f1b", 1)}  # tp is at least 4, which leaves at most two stages
    assert not any(layout.overlap_p2p for layout in found if layout.pp > 1)
    assert all(layout.zero <= 1 for layout in found)
    assert {layout.pp for layout in layouts(ask("memo"))} == {1}


def test_who_pins_stages_or_their_order_has_no_other() -> None:
    assert {layout.schedule for layout in layouts(ask("megatron-lm", pp=2))} == {"1f1b"}
    pinned = layouts(ask("megatron-lm", schedule="interleaved", virtual_stages=4))
    assert {(layout.schedule, layout.virtual_stages) for layout in pinned if layout.pp > 1} == {("interleaved", 4)}


def test_chunks_divide_the_layers_of_a_stage() -> None:
    cluster, hardware = load_cluster("a800-4x8")
    question = Question(load_model("gpt-30b"), cluster, hardware, 16384, system="every-layout", global_batch=16)
    by_stages: dict[int, set[int]] = {}
    for layout in layouts(question):
        by_stages.setdefault(layout.pp, set()).add(layout.virtual_stages)
    assert {pp: by_stages[pp] for pp in (1, 2, 4, 8)} == {1: {1}, 2: {1, 2, 4}, 4: {1, 2, 4}, 8: {1, 2}}  # 48 layers


def test_a_degree_that_a_system_lacks_is_refused() -> None:
    with refused(UsageError, what="fsdp", got="tp 2", wanted="dp", hint="--system"):
        layouts(ask("fsdp", tp=2))
    assert [layout.tp for layout in layouts(ask("fsdp", tp=1))] == [1]


@pytest.mark.parametrize("zero", [0, 1, 2, 3])
def test_zero_can_be_pinned(zero: int) -> None:
    for system in ("any", "fsdp"):
        assert {layout.zero for layout in layouts(ask(system, zero=zero))} == {zero}


def test_ranks_of_zero_are_said_only_where_they_are_not_all_replicas() -> None:
    found = {(each.replicas, each.zero): each.zero_ranks for each in layouts(ask("any", zero_ranks=2))}
    assert found[1, 0] == found[2, 1] == 0
    assert found[4, 1] == found[8, 1] == 2


def test_rivals_use_an_eager_frameworks_memory_unless_pinned() -> None:
    def policy(system: str, **pins: object) -> set[str]:
        return {c.base.memory_policy for c in candidates(ask(system, **pins))[0]}

    assert policy("megatron-lm") == policy("fsdp") == policy("ring-attention") == {"eager"}
    assert policy("memo") == policy("any") == {"planned"}
    assert policy("fsdp", memory_policy="planned") == {"planned"}


def test_the_answer_names_bytes_and_waits_of_zero_3() -> None:
    result = what_if(ask("fsdp")).result
    assert result.best is not None
    assert result.best.layout.zero == 3
    (line,) = [line for line in result.why if line.startswith("ZeRO 3")]
    gathered, scattered, unit = re.search(r"gathers ([\d.]+) GiB and reduce-scatters ([\d.]+) (GiB)", line).groups()
    # Two micro-batches: layers twice in bf16, the tied embedding for lookup and classifier; gradients in fp32.
    model = load_model("gpt-7b")
    layers = model.layers * (12 * model.hidden**2 + 13 * model.hidden) / 2**30
    embedding = model.vocab * model.hidden / 2**30
    assert float(gathered) == pytest.approx(2 * 2 * (2 * layers + 2 * embedding), rel=0.01)
    assert float(scattered) == pytest.approx(2 * 4 * (layers + 2 * embedding), rel=0.01)
    assert unit == "GiB"
    assert "compute waits" in line


def test_the_answer_names_where_zero_3_has_no_effect() -> None:
    result = what_if(ask("any", global_batch=1, tp=8, zero=3, recompute="full")).result
    assert any("ZeRO 3 has no effect here" in line for line in result.why)


def test_every_layout_holds_those_of_any_and_its_search_accounts_for_all() -> None:
    asked = ask("every-layout", seq_tokens=65536, global_batch=4, tp=2, recompute="full")
    found = layouts(asked)
    assert len(set(found)) == len(found)
    assert set(layouts(ask("any", seq_tokens=65536, tp=2, recompute="full"))) < set(found)
    assert {(layout.cp, layout.ulysses, layout.dp, layout.zero) for layout in found if layout.pp == 1} == {
        (cp, ulysses, 4 // cp // ulysses, zero)
        for cp, ulysses, zero in itertools.product((1, 2, 4), (1, 2, 4), (1, 3))
        if cp * ulysses <= 4
    }
    staged = [layout for layout in found if layout.pp > 1]
    assert {(layout.pp, layout.zero) for layout in staged} == {(2, 1), (4, 0)}  # one device per stage: nothing to shard
    assert {layout.schedule for layout in staged} == {"1f1b", "interleaved", "zero-bubble"}
    result = search(asked)
    assert result.evaluated + result.pruned == len(candidates(asked)[0])
    alone = search(ask("any", seq_tokens=65536, global_batch=4, tp=2, recompute="full")).best
    assert result.best is not None
    assert alone is not None
    assert result.best.prediction.step_s <= alone.prediction.step_s


def test_where_no_rank_shares_parameters_there_is_one_level_of_zero() -> None:
    assert [layout.zero for layout in layouts(ask("every-layout", tp=8))] == [0]


def test_megatron_exchanges_heads_only_when_pinned() -> None:
    assert {(found.tp, found.ulysses) for found in layouts(ask("megatron-lm", tp=4, ulysses=2))} == {(4, 2)}
    assert not any(found.ulysses > 1 for found in layouts(ask("megatron-lm")))


STREAMS: tuple[Streams, ...] = ("auto", "recorded", "events")
TODAY = ("torchtitan", "trl-fsdp2", "verl-fsdp", "deepspeed-alst", "megatron-core")
"""Frameworks of 2025 and 2026."""


@pytest.mark.parametrize(
    ("system", "degrees", "zeros", "exchange", "found"),
    [
        ("torchtitan", {"tp", "cp", "pp", "dp"}, {3}, "all_gather", {OPERATOR_RECOMPUTE, KEEP, FULL_RECOMPUTE}),
        ("trl-fsdp2", {"cp", "dp"}, {3}, "all_gather", {FULL_RECOMPUTE}),
        ("trl-tokenwise", {"cp", "dp"}, {3}, "all_gather", {KEEP, TOKENWISE}),
        ("verl-fsdp", {"ulysses", "dp"}, {3}, "ring", {FULL_RECOMPUTE}),
        ("deepspeed-alst", {"ulysses", "dp"}, {3}, "ring", {INPUTS_SWAPPED_MLP_IN_BLOCKS}),
        ("megatron-core", {"tp", "cp", "pp", "dp"}, {1}, "ring", {KEEP, SELECTIVE_RECOMPUTE, FULL_RECOMPUTE}),
    ],
)
def test_frameworks_of_today_divide_and_recompute_as_their_sources_say(
    system: str, degrees: set[str], zeros: set[int], exchange: str, found: set[Policy]
) -> None:
    asked = ask(system, model="llama3-8b", cluster="h100-1x8", seq_tokens=65536)
    tried = [candidate.base for candidate in candidates(asked)[0]]
    layouts_tried = [base.layout for base in tried]
    used = {name for layout in layouts_tried for name in DEGREES if getattr(layout, name) > 1}
    assert used == degrees
    assert {layout.zero for layout in layouts_tried if layout.replicas > 1 and layout.pp == 1} == zeros
    assert {layout.cp_exchange for layout in layouts_tried if layout.cp > 1} <= {exchange}
    assert {candidate.policy for candidate in candidates(asked)[0]} == found
    assert {base.memory_policy for base in tried} == {"eager"}


@pytest.mark.parametrize("system", TODAY)
def test_frameworks_of_today_answer_a_small_question(system: str) -> None:
    best = search(ask(system, model="llama-7b", cluster="h100-1x2", seq_tokens=8192, global_batch=2)).best
    assert best is not None
    assert best.prediction.status == "ok"


def test_the_answer_says_what_a_system_assumes() -> None:
    why = what_if(ask("trl-fsdp2", seq_tokens=8192, global_batch=2, cluster="h100-1x2")).result.why
    own = "The loss is checkpointed, in chunks of 256 tokens: trl-fsdp2's own; --loss names another"
    assert f"{own} (checkpointed-fp32 before TRL 1.13)." in why
    assert any("comes back when a tensor dies (--streams events)." in line for line in why)
    assert any(line.endswith("(--modules huggingface).") for line in why)
    fsdp = "ZeRO 3 as torch's FSDP2 has it (--sharding fsdp2): a rank holds a shard of gradients and parameters"
    assert any(line.startswith(f"{fsdp}, the latter in fp32, cast for every gather (--zero-params") for line in why)
    given = what_if(ask("trl-fsdp2", seq_tokens=8192, global_batch=2, cluster="h100-1x2", loss="fused")).result.why
    assert not any(line.startswith("The loss is") for line in given)


def test_the_answer_says_what_accelerate_moves_to_the_host() -> None:
    asked = ask("trl-fsdp2", seq_tokens=8192, global_batch=2, cluster="h100-1x2")
    why = what_if(replace(asked, states="host")).result.why
    assert any("(--modules huggingface). Parameters and gradients are in host memory" in line for line in why)
    assert not any("--zero-params cast" in line for line in why)


def test_the_answer_says_whose_attention_kernel_it_is() -> None:
    for system, owner in (("torchtitan", "; torchtitan's own, --attention"), ("megatron-core", "; --attention")):
        asked = ask(system, seq_tokens=8192, global_batch=2, cluster="h100-1x2", pp=1, cp=1)
        assert any(owner in line for line in what_if(asked).result.why)


@pytest.mark.parametrize(
    ("system", "cluster", "kernel"),
    [
        ("torchtitan", "h100-1x8", "torch-flash"),
        ("torchtitan", "a800-1x8", "torch-flash"),
        ("trl-fsdp2", "h100-1x8", "torch-cudnn"),
        ("trl-fsdp2", "a800-1x8", "torch-flash"),  # its profile has no curve of cuDNN
        ("deepspeed-alst", "h100-1x8", "flash2"),
        ("megatron-core", "h100-1x8", "flash3"),  # names none: the fastest
    ],
)
def test_a_system_prefers_its_own_attention_kernel(system: str, cluster: str, kernel: str) -> None:
    assert attention_kernel(ask(system, cluster=cluster)) == kernel
    assert attention_kernel(ask(system, cluster=cluster, attention="flash1")) == "flash1"


def test_without_its_own_attention_kernel_a_system_has_the_fastest() -> None:
    asked = ask("torchtitan", cluster="h100-1x8", libraries="2023")  # PyTorch's FlashAttention-2 came in 2024
    assert attention_kernel(asked) == attention_kernel(ask("any", cluster="h100-1x8", libraries="2023"))


def losses(asked: Question) -> dict[int, set[tuple[str, int]]]:
    """Return the forms of the loss with the tokens of their chunks, by tensor parallelism."""
    found: dict[int, set[tuple[str, int]]] = {}
    for each in candidates(asked)[0]:
        found.setdefault(each.base.layout.tp, set()).add((each.base.loss, each.base.loss_chunk_tokens))
    return found


def test_a_system_computes_the_loss_its_own_way_unless_given() -> None:
    sharded = ("vocab-parallel", 0)
    assert losses(ask("torchtitan", pp=1, cp=1)) == {1: {("eager-fp32", 0)}, **{each: {sharded} for each in (2, 4, 8)}}
    assert losses(ask("megatron-core", pp=1, cp=1)) == {each: {sharded} for each in (1, 2, 4, 8)}
    assert losses(ask("trl-fsdp2")) == {1: {("checkpointed", 256)}}
    assert losses(ask("torchtitan", tp=1, pp=1, loss="fused")) == {1: {("fused", 0)}}
    assert losses(ask("trl-fsdp2", loss="eager-fp32")) == {1: {("eager-fp32", 0)}}  # loss_type nll
    assert losses(ask("trl-fsdp2", loss_chunk_tokens=1024)) == {1: {("checkpointed", 1024)}}
    before = ask("trl-fsdp2", loss="checkpointed-fp32", cluster="h100-1x8")  # before TRL 1.13
    assert losses(before) == {1: {("checkpointed-fp32", 256)}}


def test_alst_tiles_the_loss_by_a_gib_of_logits_and_the_mlp_by_its_width() -> None:
    asked = ask("deepspeed-alst", model="llama3-8b", cluster="h100-1x8", seq_tokens=2**20, global_batch=1)
    (only,) = candidates(asked)[0]
    assert only.base.loss_chunk_tokens == 2048  # 4 bytes a logit, 128,256 logits a token; a power of two
    assert only.base.mlp_chunk_tokens == 4096  # 131,072 tokens a rank, in as many tiles as hidden divides them into
    assert only.base.offload_inputs
    assert only.base.mlp_rebuild == "twice"
    (once,) = candidates(replace(asked, pins=replace(asked.pins, mlp_rebuild="block")))[0]
    assert once.base.mlp_rebuild == "block"


def test_trl_has_hugging_faces_modules_under_an_eager_framework() -> None:
    asked = ask("trl-fsdp2", cluster="h100-1x8")
    assert {each.base.modules for each in candidates(asked)[0]} == {"huggingface"}
    planned = replace(asked, pins=replace(asked.pins, memory_policy="planned"))
    assert {each.base.modules for each in candidates(planned)[0]} == {"auto"}
    pinned = replace(asked, pins=replace(asked.pins, mlp_chunk_tokens=1024))
    assert {each.base.mlp_rebuild for each in candidates(pinned)[0]} == {"layer"}


def test_hugging_faces_modules_are_left_out_where_memo_has_no_list_of_what_they_save() -> None:
    """Those that are asked for, and those of a system that keeps or swaps by itself, are refused there."""
    kept = candidates(ask("trl-fsdp2", dp=8, recompute="none"))[0]
    assert {each.base.modules for each in kept} == {"auto"}  # a GPT
    asked = replace(ask("any", dp=8, memory_policy="eager"), modules="huggingface")
    found, reasons = candidates(asked)
    assert {(each.base.recompute, each.base.modules) for each in found} == {("full", "huggingface")}
    divided = candidates(replace(asked, pins=Pins(tp=2, memory_policy="eager", recompute="full")))[0]
    assert {(each.base.layout.tp, each.base.modules) for each in divided} == {(2, "huggingface")}
    assert {each.base.zero_params for each in found} == {"auto"}  # whole parameters
    sharded = replace(asked, pins=replace(asked.pins, zero=3, recompute="full"))
    assert {each.base.zero_params for each in candidates(sharded)[0]} == {"cast"}
    assert any("what Hugging Face's modules save" in reason for reason in reasons)
    with pytest.raises(Infeasible) as none_left:
        candidates(replace(ask("trl-fsdp2", dp=8, recompute="none"), modules="huggingface"))
    assert none_left.value.where == "decisions.model.family"
    with pytest.raises(Infeasible) as none_left:
        candidates(ask("trl-tokenwise", dp=8))
    assert none_left.value.where == "decisions.model.family"
    with pytest.raises(Infeasible) as none_left:
        candidates(ask("trl-tokenwise", model="llama3-8b", dp=8, recompute="selective"))
    assert none_left.value.where == "decisions.modules"


@pytest.mark.parametrize("system", ["trl-fsdp2", "trl-tokenwise"])
@pytest.mark.parametrize("recompute", ["none", "tokenwise"])
def test_layers_that_keep_or_swap_have_hugging_faces_modules(system: str, recompute: str) -> None:
    found = candidates(ask(system, model="llama3-8b", cluster="h100-1x8", dp=8, recompute=recompute))[0]
    assert {(each.base.recompute, each.base.modules) for each in found} == {(recompute, "huggingface")}


def test_tokenwise_keeps_no_copy_of_rows_on_the_device_beside_swapped_ones() -> None:
    with pytest.raises(Infeasible) as none_left:
        candidates(ask("trl-tokenwise", model="llama3-8b", dp=8, recompute="none", alpha=0.5))
    assert none_left.value.where == "decisions.swapped_tokens"


def test_tokenwise_is_predicted_beside_offloaded_inputs() -> None:
    """One saves the recompute of attention, the other moves and holds less."""
    asked = {"model": "llama3-8b", "cluster": "h100-1x8", "seq_tokens": 2**19, "global_batch": 1, "cp": 8}
    inputs = search(ask("trl-fsdp2", offload_inputs=True, **asked)).best
    tokenwise = search(ask("trl-tokenwise", alpha=0.25, **asked)).best
    assert inputs is not None
    assert tokenwise is not None
    one, other = inputs.prediction, tokenwise.prediction
    assert one.step_s is not None
    assert other.step_s is not None
    assert other.step_s < one.step_s
    assert other.reserved_bytes > one.reserved_bytes
    assert other.peak_host_bytes_per_node > one.peak_host_bytes_per_node
    assert inputs.decisions.modules == tokenwise.decisions.modules == "huggingface"


def test_megatron_core_divides_states_over_the_ring_and_interleaves_stages() -> None:
    found = layouts(ask("megatron-core"))
    assert {layout.zero for layout in found if layout.cp > 1 == layout.dp} == {1}
    assert {layout.tp for layout in found} == {1, 2, 4, 8}
    orders = {(layout.schedule, layout.overlap_p2p) for layout in found if layout.pp > 1}
    assert orders == {("1f1b", False), ("interleaved", True)}


def test_torchtitans_hsdp_and_compiled_modules_are_pinned() -> None:
    found = [each.base for each in candidates(ask("torchtitan", dp=8, zero_ranks=4, rowwise="compiled"))[0]]
    assert {(base.layout.zero_ranks, base.kernels.rowwise) for base in found} == {(4, "compiled")}


@pytest.mark.parametrize(
    ("system", "own"),
    [("torchtitan", "events"), ("trl-fsdp2", "events"), ("deepspeed-alst", "auto"), ("megatron-core", "auto")],
)
def test_fsdp2_orders_streams_by_events(system: str, own: str) -> None:
    assert {each.base.streams for each in candidates(ask(system, dp=8))[0]} == {own}
    assert {each.base.streams for each in candidates(ask(system, dp=8, streams="recorded"))[0]} == {"recorded"}
    assert {each.base.streams for each in candidates(ask(system, dp=8, memory_policy="caching"))[0]} == {"auto"}


def test_memory_that_waits_for_streams_is_reserved_besides() -> None:
    """A million tokens of an 8B model on eight H100 fit with FSDP2 only because nothing waits for the device."""
    question = ask("trl-fsdp2", model="qwen3-8b", cluster="h100-1x8", seq_tokens=2**20, global_batch=1, cp=8)
    offloaded = replace(question, pins=replace(question.pins, offload_inputs=True))
    found = {streams: search(replace(offloaded, streams=streams)).ranked[0] for streams in STREAMS}
    assert found["events"].prediction.status == found["auto"].prediction.status == "ok"
    assert found["events"].prediction.reserved_bytes == found["auto"].prediction.reserved_bytes
    assert found["recorded"].prediction.status == "gpu_oom"
    peaks = {each.prediction.peak_device_bytes for each in found.values()}
    assert len(peaks) == 1


@pytest.mark.parametrize(("system", "cast", "early"), [("fsdp", "cast", True), ("torchtitan", "cast", False)])
def test_fsdp_casts_parameters_and_ends_recompute_early(system: str, cast: str, early: bool) -> None:
    found = [each.base for each in candidates(ask(system, dp=8, recompute="full"))[0]]
    assert {(each.zero_params, each.early_stop) for each in found} == {(cast, early)}
    kept = [each.base for each in candidates(ask(system, dp=8, recompute="none"))[0]]
    assert {each.early_stop for each in kept} == {False}
    old = [
        each.base for each in candidates(ask(system, dp=8, recompute="full", libraries="2022", attention="flash1"))[0]
    ]
    assert {each.early_stop for each in old} == {False}
    pinned = [each.base for each in candidates(ask(system, dp=8, recompute="full", early_stop=not early))[0]]
    assert {each.early_stop for each in pinned} == {not early}
    unlike = [each.base for each in candidates(ask(system, dp=8, recompute="full", memory_policy="caching"))[0]]
    assert {each.zero_params for each in unlike} == {"auto"}


def test_an_early_stop_needs_full_recompute() -> None:
    with pytest.raises(UsageError, match="only full recompute"):
        candidates(ask("fsdp", dp=8, recompute="none", early_stop=True))


@pytest.mark.parametrize(
    ("system", "year", "sharding", "adamw"),
    [
        ("fsdp", "2023", "fsdp1", "foreach"),
        ("fsdp", "2024", "fsdp2", "foreach"),
        ("torchtitan", None, "fsdp2", "fused"),
        ("trl-fsdp2", None, "fsdp2", "fused"),
        ("deepspeed-alst", None, "memo", "foreach"),
    ],
)
def test_whose_sharding_follows_from_the_system_and_the_year(system: str, year: str, sharding: str, adamw: str) -> None:
    found = [each.base for each in candidates(ask(system, dp=8, libraries=year))[0]]
    assert {(base.sharding, base.kernels.adamw) for base in found} == {(sharding, adamw)}
    pinned = [each.base for each in candidates(ask(system, dp=8, sharding="memo", adamw="foreach"))[0]]
    assert {(base.sharding, base.kernels.adamw) for base in pinned} == {("memo", "foreach")}
    planned = [each.base for each in candidates(ask(system, dp=8, memory_policy="caching"))[0]]
    assert {base.sharding for base in planned} == {"memo"}


@pytest.mark.parametrize(("cluster", "zeros"), [("h100-1x8", {0, 1}), ("rtx4090-1x8", {0, 1, 3})])
def test_zero_3_is_searched_where_there_is_no_nvlink(cluster: str, zeros: set[int]) -> None:
    asked = Question(load_model("gpt-tiny"), *load_cluster(cluster), seq_tokens=8192, system="any")
    assert {layout.zero for layout in layouts(asked)} == zeros
    assert ("zero 3" in " ".join(one.what for one in left_out(asked))) == (3 not in zeros)
    pinned = replace(asked, pins=Pins(zero=1))
    assert {layout.zero for layout in layouts(pinned)} == {1}
