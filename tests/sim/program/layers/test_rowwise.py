"""Row-wise recompute: attention runs forward once, all else of a layer is rebuilt in row blocks."""

from __future__ import annotations

from collections import Counter
from typing import Any

import msgspec
import pytest

from memo_sim.contract.model import Model
from memo_sim.contract.plan import Decisions, Layout
from memo_sim.program.analysis.columns import expand
from memo_sim.program.analysis.liveness import live_bytes, liveness, peak
from memo_sim.program.ir.kinds import TemplateKind
from memo_sim.program.ir.work import Attention, Copy, Gemm
from memo_sim.program.lower import lower
from tests.sim.small_programs import GPT, LLAMA, decide, faults_of

LAYOUTS = [
    Layout(),
    Layout(tp=2),
    Layout(tp=2, sequence_parallel=True, cp=2),
    Layout(tp=8, sequence_parallel=True),
    Layout(tp=2, sequence_parallel=True, tp_overlap="chunked"),
    Layout(cp=4, zero=3, cp_exchange="all_gather"),
    Layout(ulysses=2, cp=2, dp=2, zero=1),
    Layout(pp=2),
    Layout(tp=2, sequence_parallel=True, pp=2, subsequences=2),
]
MODELS = pytest.mark.parametrize("model", [GPT, LLAMA], ids=["gpt", "llama"])
SIMPLE = msgspec.structs.replace(LLAMA, qk_norm=False)


def rowwise(
    model: Model = GPT, layout: Layout | None = None, *, chunk: int = 256, alpha: float = 0.0, **more: Any
) -> Decisions:
    return decide(model, layout, ("rowwise", alpha), mlp_chunk_tokens=chunk, **more)


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
@pytest.mark.parametrize(("blocks", "alpha"), [(8, 1.0), (3, 0.5), (1, 0.0)])
def test_every_program_passes_the_independent_checkers(layout: Layout, blocks: int, alpha: float) -> None:
    """Three blocks: the last one is shorter."""
    model = GPT if layout.tp < 8 and blocks != 3 else LLAMA
    granule = 128 * (layout.tp if layout.sequence_parallel else 1)
    local = (5 if blocks == 3 else 2 * blocks) * granule * layout.subsequences
    chunk = 0 if blocks == 1 else 2 * granule
    seq_tokens = local * layout.cp * layout.ulysses
    decisions = rowwise(model, layout, chunk=chunk, seq_tokens=seq_tokens)
    alpha = 1.0 if layout.subsequences > 1 else alpha  # less would be said for each subsequence
    swapped = int(alpha * local) // granule * granule
    assert faults_of(msgspec.structs.replace(decisions, swapped_tokens=swapped)) == []


def work(decisions: Decisions) -> Counter[str]:
    """Return FLOPs of products and attention by phase and name, summed over row blocks."""
    total = Counter[str]()
    for name, i in lower(decisions)[0].walk():
        phase, _, rest = "/".join(name.split("/")[-2:]).partition("/")
        if isinstance(i.work, Gemm | Attention):
            total[f"{phase}/{rest.split('.b')[0]}"] += int(i.work.flops)
    return total


@MODELS
def test_the_work_is_that_of_full_recompute_without_attention_and_the_second_product(model: Model) -> None:
    whole = work(decide(model, None, ("full", 0.0)))
    left_out = {name: whole.pop(name) for name in ("rec/attn", "rec/ffn_down")}
    assert min(left_out.values()) > 0
    assert work(rowwise(model)) == whole


@MODELS
def test_recompute_repeats_forward_call_by_call(model: Model) -> None:
    by_id = dict(lower(rowwise(model, seq_tokens=640))[0].walk())
    rebuilt = {name for name in by_id if "/rec/" in name}
    assert {name.rpartition("/")[2] for name in rebuilt if "/l0/" in name and name.endswith(".b2")} >= {
        *("norm1.b2", "qkv.b2", "proj.b2", "resid_add.b2", "norm2.b2", "ffn_up.b2", "act.b2", "norm1.again.b2")
    }
    for name in rebuilt:
        forward = name.replace("/rec/", "/fwd/").replace(".again", "")
        assert by_id[forward].work == by_id[name].work


def kept_bytes(model: Model, tokens: int) -> int:
    """Return the bytes of a layer's input, attention's output and log-sum-exp, in bf16 and fp32."""
    return tokens * (2 * model.hidden + 2 * model.q_width + 4 * model.heads)


@pytest.mark.parametrize("alpha", [0.0, 0.5, 1.0])
def test_alpha_says_how_much_of_three_tensors_is_swapped(alpha: float) -> None:
    program = lower(rowwise(SIMPLE, alpha=alpha, global_batch=1))[0]
    moved = [
        i.work.bytes
        for template in program.templates
        for i in template.instructions
        if template.kind is TemplateKind.OFFLOAD and isinstance(i.work, Copy)
    ]
    swapped = int(alpha * kept_bytes(SIMPLE, 2048))
    assert sum(moved) == swapped
    families = {f.name: f for f in program.families}
    on_host = sum(f.bytes for name, f in families.items() if name.startswith("host."))
    aside = sum(f.bytes for name, f in families.items() if name.startswith("aside."))
    assert (on_host, aside) == (swapped, kept_bytes(SIMPLE, 2048) - swapped if alpha == 0.5 else 0)


def test_bytes_alive_in_attentions_backward() -> None:
    """That is a layer's peak: three tensors that are kept, Q, K and V, and four gradients."""
    decisions = rowwise(SIMPLE, alpha=1.0, global_batch=1, states="host", seq_tokens=4096)
    program = lower(decisions)[0]
    at = program.ids().index("m0/s0/l2/bwd/attn.bwd")
    curves = live_bytes(liveness(program, expand(program)), device=True)
    tokens, hidden, q, kv = 4096, SIMPLE.hidden, SIMPLE.q_width, SIMPLE.kv_width
    packed = 2 * tokens * (q + 2 * kv)
    # The other rounding buffer receives the tensors of the layer below.
    assert curves["skeletal"][at] == 2 * kept_bytes(SIMPLE, tokens) + packed
    # Of the residual, of attention's output, and of the packed Q, K and V.
    assert curves["transient"][at] == 2 * tokens * (hidden + q) + packed
    layers = [i for i, name in enumerate(program.ids()) if "/l2/bwd/" in name or "/l2/rec/" in name]
    total = [sum(int(curve[i]) for curve in curves.values()) for i in (*layers, at)]
    assert max(total) == total[-1]


def test_a_layer_keeps_far_less_than_token_by_token_and_computes_in_less_than_full_recompute() -> None:
    """A step peaks below that of token-wise recompute, whose rounding buffers hold every skeletal tensor."""

    def peaks(recompute: str, alpha: float, **more: int) -> int:
        decisions = decide(LLAMA, None, (recompute, alpha), global_batch=1, states="host", seq_tokens=16384, **more)
        program = lower(decisions)[0]
        return peak(live_bytes(liveness(program, expand(program)), device=True)).bytes

    own = peaks("rowwise", 1.0, mlp_chunk_tokens=2048)
    assert own < 0.5 * peaks("tokenwise", 0.0)
    assert own < peaks("full", 1.0)
