"""The MLP in row blocks under full recompute: smaller buffers, the same products, no recompute of the second one."""

from __future__ import annotations

from collections import Counter

import pytest

from memo_sim.contract.errors import Infeasible
from memo_sim.contract.model import Model
from memo_sim.contract.plan import Decisions, Layout
from memo_sim.program.analysis.columns import expand
from memo_sim.program.analysis.edges import derive_edges
from memo_sim.program.analysis.liveness import live_bytes, liveness, peak
from memo_sim.program.ir.instruction import Mode
from memo_sim.program.ir.work import Attention, Collective, Gemm
from memo_sim.program.lower import lower
from memo_sim.program.verify.program import check_edges, check_program
from memo_sim.program.verify.stages import check_stages
from tests.sim.small_programs import GPT, LLAMA, decide

LAYOUTS = [
    Layout(),
    Layout(tp=2),
    Layout(tp=2, sequence_parallel=True, cp=2),
    Layout(cp=4, zero=3, cp_exchange="all_gather"),
    Layout(ulysses=2, dp=2, zero=3),
]
MODELS = pytest.mark.parametrize("model", [GPT, LLAMA], ids=["gpt", "llama"])


def blocks(
    model: Model = GPT, layout: Layout | None = None, *, chunk: int = 256, alpha: float = 0.0, **more
) -> Decisions:
    return decide(model, layout, ("full", alpha), mlp_chunk_tokens=chunk, **more)


@MODELS
@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
@pytest.mark.parametrize(("seq_tokens", "alpha"), [(2048, 1.0), (1664, 0.0)])
def test_every_program_passes_the_independent_checkers(
    model: Model, layout: Layout, seq_tokens: int, alpha: float
) -> None:
    programs = lower(blocks(model, layout, seq_tokens=seq_tokens, alpha=alpha))
    columns = expand(programs[0])
    assert check_program(programs[0], columns) == []
    assert check_edges(columns, derive_edges(columns)) == []
    assert check_stages(programs) == []


def test_a_last_block_may_be_shorter() -> None:
    decisions = blocks(seq_tokens=640)
    rows = [i.work.m for name, i in lower(decisions)[0].walk() if name.startswith("m0/s0/l0/fwd/ffn_up")]
    assert rows == [256, 256, 128]


@MODELS
def test_a_block_is_rebuilt_right_before_its_backward_and_after_the_one_before(model: Model) -> None:
    names = [n.split("l0/")[1] for n, _ in lower(blocks(model, seq_tokens=512))[0].walk() if n.startswith("m0/s0/l0/")]
    mlp = [n for n in names if n.endswith((".b0", ".b1")) and not n.startswith("fwd") and "bgrad" not in n]
    one = ["rec/norm2", "rec/ffn_up", "rec/act", "bwd/ffn_down.dgrad", "bwd/ffn_down.wgrad", "bwd/act.bwd"]
    one += ["bwd/ffn_up.dgrad", "bwd/ffn_up.wgrad", "bwd/norm2.bwd"]
    assert mlp == [f"{name}.b{i}" for i in (0, 1) for name in one]


def work(decisions: Decisions) -> Counter[str]:
    """Return FLOPs of products and attention by phase and name, summed over row blocks."""
    total: Counter[str] = Counter()
    for name, i in lower(decisions)[0].walk():
        phase, _, rest = "/".join(name.split("/")[-2:]).partition("/")
        if isinstance(i.work, Gemm | Attention):
            total[f"{phase}/{rest.split('.b')[0]}"] += i.work.flops
    return total


@MODELS
@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_the_work_is_that_of_full_recompute_without_the_second_product(model: Model, layout: Layout) -> None:
    whole = work(decide(model, layout, ("full", 0.0)))
    again = whole.pop("rec/ffn_down")
    assert again > 0
    assert work(blocks(model, layout)) == whole


@MODELS
def test_recompute_repeats_forward_call_by_call(model: Model) -> None:
    by_id = dict(lower(blocks(model, seq_tokens=640))[0].walk())
    rebuilt = {name for name in by_id if "/rec/" in name}
    assert any(name.endswith("ffn_up.b2") for name in rebuilt)
    for name in rebuilt:
        assert by_id[name.replace("/rec/", "/fwd/")].work == by_id[name].work


def test_sequence_parallel_ranks_gather_a_block_once_for_both_its_products() -> None:
    """Without row blocks the norm's output is gathered again for the weight gradient, to free its buffer earlier."""

    def gathered(decisions: Decisions) -> tuple[int, int]:
        found = [
            (name, i.work.bytes)
            for name, i in lower(decisions)[0].walk()
            if isinstance(i.work, Collective) and name.startswith("m0/s0/l0/") and "norm2" in name
        ]
        return sum(size for _, size in found), len({name for name, _ in found if "again" in name})

    layout = Layout(tp=2, sequence_parallel=True)
    unit = 2 * 2048 * GPT.hidden
    # The gathers of forward, of recompute and of the weight gradient, and the scatter of the input gradient.
    assert gathered(decide(GPT, layout, ("full", 0.0))) == (4 * unit, 1)
    assert gathered(blocks(GPT, layout)) == (3 * unit, 0)


def wide_bytes(decisions: Decisions, rows: int) -> int:
    """Return the bytes of ``rows`` rows of the first product, the activation and their gradients, in bf16."""
    model = decisions.model
    up = 2 * model.ffn_hidden if model.gated else model.ffn_hidden
    return 2 * rows * 2 * (up + model.ffn_hidden) // decisions.layout.tp


@MODELS
@pytest.mark.parametrize("tp", [1, 2])
def test_the_mlps_buffers_hold_one_block(model: Model, tp: int) -> None:
    layout, chunk = Layout(tp=tp, sequence_parallel=tp > 1), 256
    families = {f.name: f for t in lower(blocks(model, layout, chunk=chunk))[0].templates for f in t.own}
    wide = [families[name] for name in ("up", "act", "d_act", "d_up")]
    assert sum(f.bytes for f in wide) == wide_bytes(blocks(model, layout), chunk)
    assert {families[name].tokens for name in ("norm2", "norm2_stats")} == {chunk // tp}
    assert families["down_out"].tokens == families["d_norm2"].tokens == chunk


@MODELS
def test_bytes_alive_in_the_mlps_backward(model: Model) -> None:
    """During the activation's backward, x, norm1, qkv, attention, residual and the MLP's block are alive.

    So are the gradients of the output and of the residual.
    """
    decisions, chunk = blocks(model, alpha=1.0, global_batch=1, states="host"), 256
    program = lower(decisions)[0]
    columns = expand(program)
    at = program.ids().index("m0/s0/l3/bwd/act.bwd.b1")
    curves = live_bytes(liveness(program, columns), device=True)
    tokens, hidden = decisions.seq_tokens, model.hidden
    qk = model.q_width + model.kv_width
    features = hidden + hidden + (qk if model.qk_norm else 0) + (qk + model.kv_width) + model.q_width + hidden
    statistics = 4 * (2 if model.family == "gpt" else 1)
    kept = 2 * tokens * features + tokens * (statistics + 4 * model.heads)
    block = chunk * (2 * hidden + statistics)
    up = 2 * model.ffn_hidden if model.gated else model.ffn_hidden
    # The other rounding buffer holds the input of the layer below.
    assert curves["skeletal"][at] == kept + 2 * tokens * hidden + block + 2 * chunk * (up + model.ffn_hidden)
    # Gradients of output and residual are whole; those of activation, first product and norm have one block.
    assert curves["transient"][at] == 2 * tokens * 2 * hidden + 2 * chunk * (up + model.ffn_hidden + hidden)


@pytest.mark.parametrize("layout", [LAYOUTS[0], LAYOUTS[2]], ids=str)
def test_the_peak_falls_with_the_chunk(layout: Layout) -> None:
    def peak_bytes(decisions: Decisions) -> int:
        program = lower(decisions)[0]
        return peak(live_bytes(liveness(program, expand(program)), device=True)).bytes

    more = {"seq_tokens": 8192, "global_batch": 1, "states": "host"}
    whole = peak_bytes(decide(LLAMA, layout, ("full", 0.0), **more))
    cut = [peak_bytes(blocks(LLAMA, layout, chunk=chunk, **more)) for chunk in (1024, 512, 256)]
    assert whole > cut[0] >= cut[1] >= cut[2]


def test_weight_gradients_accumulate_over_blocks() -> None:
    template = next(t for t in lower(blocks(seq_tokens=512))[0].templates if t.name == "layer.bwd")
    modes = {
        i.name: o.mode for i in template.instructions for o in i.operands if template.slots[o.slot] == "grads.layer"
    }
    for name in ("bwd/ffn_down.wgrad", "bwd/ffn_up.wgrad", "bwd/ffn_up.bgrad"):
        assert {modes[f"{name}.b{i}"] for i in (0, 1)} == {Mode.ACCUMULATE}


@pytest.mark.parametrize(
    ("change", "fields"),
    [
        ({"recompute": "none"}, ("256 with recompute none", "0, or recompute full or rowwise")),
        ({"recompute": "tokenwise"}, ("256 with recompute tokenwise", "0, or recompute full or rowwise")),
        ({"mlp_chunk_tokens": 200}, ("200 of 2048 tokens", "a multiple of 128, at least 2")),
        (
            {"mlp_chunk_tokens": 128, "layout": Layout(tp=2, sequence_parallel=True)},
            ("128 of 2048 tokens", "a multiple of 256, at least 2"),
        ),
        (
            {"mlp_chunk_tokens": 128, "seq_tokens": 1 << 20},
            ("128 of 1048576 tokens", "a multiple of 128, at least 1024"),
        ),
    ],
)
def test_what_cannot_be_cut_is_refused(change: dict, fields: tuple[str, str]) -> None:
    given = {"model": GPT, "seq_tokens": 2048, "recompute": "full", "mlp_chunk_tokens": 256, **change}
    with pytest.raises(Infeasible) as error:
        lower(Decisions(**given))
    assert error.value.where == "decisions.mlp_chunk_tokens"
    assert (error.value.got, error.value.wanted) == fields


@MODELS
@pytest.mark.parametrize("rebuild", ["layer", "twice"])
@pytest.mark.parametrize("layout", [Layout(), LAYOUTS[3], LAYOUTS[4]], ids=str)
def test_blocks_that_frameworks_rebuild_pass_the_independent_checkers(
    model: Model, rebuild: str, layout: Layout
) -> None:
    for more in ({}, {"attention_chunk_tokens": 1024} if layout.cp == 1 else {}):
        programs = lower(blocks(model, layout, seq_tokens=2048, mlp_rebuild=rebuild, **more))
        columns = expand(programs[0])
        assert check_program(programs[0], columns) == []
        assert check_edges(columns, derive_edges(columns)) == []
        assert check_stages(programs) == []


@MODELS
def test_frameworks_run_an_mlp_forward_two_or_three_times(model: Model) -> None:
    """``layer`` plays what full recompute of the whole MLP does; ``twice`` plays both products once more."""
    whole = work(decide(model, None, ("full", 0.0)))
    assert work(blocks(model, mlp_rebuild="layer")) == whole
    twice = work(blocks(model, mlp_rebuild="twice"))
    assert {name: twice[name] / whole[name] for name in whole if twice[name] != whole[name]} == {
        "rec/ffn_up": 2.0,
        "rec/ffn_down": 2.0,
    }
