"""Programs of subsequences with experts: independent checkers, the rows of the whole sequence, and the loss of balance.

Each subsequence is routed and exchanged by itself.
"""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from memo_sim.contract.experts import Experts
from memo_sim.contract.layer_shape import LayerShape
from memo_sim.contract.model import Model
from memo_sim.contract.plan import Decisions, Layout
from memo_sim.program.analysis.columns import expand
from memo_sim.program.analysis.liveness import liveness
from memo_sim.program.ir.instruction import Instruction, Mode
from memo_sim.program.ir.work import Collective, GroupedGemm
from memo_sim.program.layers.expert_ends import PREFIX_ENDS
from memo_sim.program.layout.partition import partition
from memo_sim.program.layout.rowwise_blocks import routed_at_once, routed_part
from memo_sim.program.lower import lower
from memo_sim.program.verify.values import check_values
from tests.pairs import covering
from tests.sim.program.layers.test_experts import ROUTED
from tests.sim.program.verify import planted
from tests.sim.small_programs import EXPERTS, LATENT, decide, faults_of

BALANCE = Experts(count=8, per_token=2, hidden=192, balance=0.1, z_loss=0.01)
DENSE_FIRST = [LayerShape(ffn_hidden=640), *[LayerShape(ffn_hidden=640, experts=BALANCE)] * 3]
MODELS: dict[str, Model] = {
    "experts": EXPERTS,
    **ROUTED,
    "balance": msgspec.structs.replace(EXPERTS, experts=BALANCE),
    "balance, first layer dense": EXPERTS.of_layers(DENSE_FIRST),
    "latents": LATENT.of_layers([LayerShape(ffn_hidden=640), *[ROUTED["deepseek"].layer(1)] * 3]),
    "windows": EXPERTS.of_layers([LayerShape(ffn_hidden=640, experts=BALANCE, window=w) for w in (200, 0, 200, 0)]),
}
WHOLE: dict[str, Any] = {"sequence_parallel": True, "expert_tp": 1}
LAYOUTS: dict[str, tuple[Layout, dict[str, Any]]] = {
    "alone": (Layout(subsequences=3), {}),
    "stages": (Layout(subsequences=3, pp=2), {}),
    "gpipe, equal lengths": (Layout(subsequences=4, pp=4, schedule="gpipe", partition="length"), {}),
    "interleaved": (Layout(subsequences=4, pp=2, schedule="interleaved", virtual_stages=2), {}),
    "tp": (Layout(subsequences=2, tp=2, sequence_parallel=True, dp=2, zero=1), {"overlap": "both"}),
    "tp, whole tokens": (Layout(subsequences=2, tp=2, pp=2), {}),
    "ring": (Layout(subsequences=2, cp=2, pp=2), {}),
    "ulysses": (Layout(subsequences=2, ulysses=2, dp=2, zero=3), {}),
    "ep": (Layout(subsequences=3, dp=2, ep=2, zero=3), {}),
    "ep, stages": (Layout(subsequences=4, pp=2, schedule="gpipe", dp=2, ep=2), {"expert_load": "zipf-1"}),
    "ep, ring": (Layout(subsequences=2, cp=2, pp=2, ep=2), {"expert_capacity": 2.0}),
    "ep, features divided": (
        Layout(subsequences=2, tp=2, sequence_parallel=True, dp=2, ep=2),
        {"expert_overlap": True},
    ),
    "ep, whole experts": (Layout(subsequences=3, tp=2, pp=2, ep=2, **WHOLE), {}),
    "ep, whole experts, overlap": (Layout(subsequences=2, tp=2, dp=2, ep=4, **WHOLE), {"expert_overlap": True}),
}
POLICIES: dict[str, dict[str, Any]] = {
    "keep": {},
    "swapped": {"swaps": True},
    "swapped in a window": {"swaps": True, "offload_window": 1},
    "full": {"recompute": "full"},
    "full, some swapped": {"recompute": "full", "swaps": True},
    "tokenwise": {"recompute": "tokenwise", "swaps": True},
    "tokenwise in a window": {"recompute": "tokenwise", "swaps": True, "offload_window": 1},
    "rowwise": {"recompute": "rowwise", "mlp_chunk_tokens": 256},
    "selective": {"recompute": "selective"},
    "norms": {"recompute": "norms"},
    "mlp": {"recompute": "mlp"},
}


def cut(model: str, layout: str = "alone", **changes: Any) -> Decisions:
    """Return decisions with eight granules of tokens on each rank; with ``swaps`` shares of subsequences differ."""
    of, more = LAYOUTS[layout]
    if len(MODELS[model].layer_shapes) > 1:
        of = msgspec.structs.replace(of, partition="length")
    tokens = 1024 * of.cp * of.ulysses * of.tp
    swaps = changes.pop("swaps", False)
    policy = changes.pop("recompute", "none"), 0.0
    found = decide(MODELS[model], of, policy, seq_tokens=tokens, **(more | changes))
    if not swaps:
        return found
    granule = found.swap_granule
    each = tuple(0 if i == 0 else max(granule, n - granule) for i, n in enumerate(partition(found)))
    return msgspec.structs.replace(found, swapped_tokens=sum(each), subsequence_swapped_tokens=each)


@pytest.mark.parametrize(("layout", "model"), covering(LAYOUTS, MODELS))
def test_every_layout_passes_the_independent_checkers(layout: str, model: str) -> None:
    for policy in ("tokenwise", "full"):
        assert faults_of(cut(model, layout, **POLICIES[policy])) == []


@pytest.mark.parametrize(("policy", "layout"), covering(POLICIES, ["stages", "ep, whole experts"]))
def test_every_policy_passes_the_independent_checkers(policy: str, layout: str) -> None:
    for model in ("balance, first layer dense", "qwen2-moe"):
        assert faults_of(cut(model, layout, **POLICIES[policy])) == []


@pytest.mark.parametrize("model", ["experts", "balance", "gpt-oss"])
def test_products_have_the_rows_of_the_whole_sequence(model: str) -> None:
    whole = decide(MODELS[model], Layout(), seq_tokens=1024)
    assert rows(cut(model)) == rows(whole)


def rows(decisions: Decisions) -> dict[str, int]:
    """Return the rows of experts' products in a step, by phase and product."""
    found: dict[str, int] = {}
    for name, instruction in lower(decisions)[0].walk():
        if isinstance(instruction.work, GroupedGemm):
            key = f"{name.split('/')[3]} {instruction.op} {instruction.work.n} {instruction.work.k}"
            found[key] = found.get(key, 0) + instruction.work.rows
    return found


def test_each_subsequence_has_exchanges_and_a_capacity_of_its_own() -> None:
    """A factor of ep has room for all rows, so as many bytes travel as of the whole sequence."""
    parts = cut("experts", "ep", expert_capacity=2.0)
    layout = msgspec.structs.replace(parts.layout, subsequences=1)
    whole = msgspec.structs.replace(parts, layout=layout)
    assert sent(parts) == sent(whole)
    assert sent(msgspec.structs.replace(parts, expert_capacity=1.0)) == sent(parts) // 2


def sent(decisions: Decisions) -> int:
    """Return the bytes of rows that a rank sends to the ranks with other experts, without numbers of rows."""
    works = [(name, i.work) for name, i in lower(decisions)[0].walk() if isinstance(i.work, Collective)]
    return sum(work.bytes for name, work in works if work.group == "ep" and not name.endswith("/ends.exchange"))


def test_what_is_routed_at_once_is_a_subsequence_or_a_row_block_of_it() -> None:
    parts = partition(cut("experts"))
    assert routed_at_once(cut("experts")) == list(parts)
    assert routed_part(cut("experts"), parts[0]) == f"a layer's subsequence of {parts[0]} tokens"
    blocks = cut("experts", recompute="rowwise", mlp_chunk_tokens=256)
    wanted = [min(256, part - first) for part in parts for first in range(0, part, 256)]
    assert routed_at_once(blocks) == wanted
    assert routed_part(blocks, 256) == "a layer's row block of 256 tokens"
    whole = cut("experts", "ep, whole experts")
    assert routed_at_once(whole) == [part // 2 for part in partition(whole)]
    assert routed_part(decide(EXPERTS), 2048) == "a layer"


@pytest.mark.parametrize("policy", ["keep", "full", "rowwise"])
def test_a_loss_of_balance_reads_the_rows_that_experts_got_of_every_subsequence(policy: str) -> None:
    """One buffer of each micro-batch and layer, of which each subsequence writes its part, until its first backward."""
    chosen = cut("balance", **POLICIES[policy])
    (program,) = lower(chosen)
    columns, count = expand(program), BALANCE.count
    bases, family = program.family_bases, next(f for f in program.families if f.name == PREFIX_ENDS)
    assert (family.tokens, family.count) == (3 * count, chosen.micro_batches * chosen.model.layers)
    names, touched = program.ids(), dict[str, set[tuple[str, int, int]]]()
    for at in range(len(columns.operand_buffer)):
        if int(columns.operand_buffer[at]) == bases[PREFIX_ENDS]:
            mode = "write" if int(columns.operand_mode[at]) & Mode.WRITE else "read"
            rows_of = int(columns.operand_first[at]), int(columns.operand_end[at])
            touched.setdefault(names[int(columns.operand_instruction[at])], set()).add((mode, *rows_of))
    writes = {name: found for name, found in touched.items() if ("read", 0, 3 * count) not in found}
    assert writes == {f"m0/s{i}/l0/fwd/ends.sum": {("write", i * count, (i + 1) * count)} for i in range(3)}
    assert {name.split("/")[1] for name in touched.keys() - writes.keys()} == {"s0", "s1", "s2"}
    lives = liveness(program, columns)
    last = names[int(lives.death[bases[PREFIX_ENDS]])]
    assert last.startswith("m0/s0/l0/bwd/route.bwd")


def test_without_a_loss_of_balance_subsequences_share_no_ends() -> None:
    families = {f.name for f in lower(cut("experts"))[0].families}
    assert PREFIX_ENDS not in families
    dense_first = lower(cut("balance, first layer dense"))[0].families
    assert [(f.name, f.count) for f in dense_first if f.name.startswith(PREFIX_ENDS)] == [(f"{PREFIX_ENDS}.k1", 6)]


@pytest.mark.parametrize("change", ["part", "left out"])
def test_the_checker_of_values_finds_wrong_ends(change: str) -> None:
    """A subsequence that writes another one's part, and one that writes none."""
    chosen = cut("balance")
    (program,) = lower(chosen)

    def sums(instruction: Instruction) -> bool:
        return instruction.op == "experts.ends.sum"

    def elsewhere(instruction: Instruction) -> Instruction:
        moved = (msgspec.structs.replace(o, first=0) if o.role == "out" else o for o in instruction.operands)
        return msgspec.structs.replace(instruction, operands=tuple(moved))

    number = planted.places(program, sums, where=lambda instance: instance.subsequence == 1)[0]
    if change == "part":
        broken = planted.replaced(program, number, sums, elsewhere)
    else:
        broken = planted.without(program, number, sums)
    assert check_values(program, expand(program), chosen) == []
    assert check_values(broken, expand(broken), chosen) != []
