"""Each form of the loss holds and moves the bytes that its framework's tensors and kernels do, counted by hand."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from memo_sim.contract.errors import Infeasible
from memo_sim.contract.knobs import LINEAR_LOSSES, Loss
from memo_sim.contract.plan import Kernels, Layout
from memo_sim.memory.eager_framework import eager_buffers
from memo_sim.program.analysis.columns import expand
from memo_sim.program.analysis.liveness import liveness
from memo_sim.program.ir.instruction import Template
from memo_sim.program.ir.program import Program
from memo_sim.program.ir.work import Collective, Gemm, LinearLoss, Rowwise, TileGemm
from memo_sim.program.layout.compatibility import check_compatible
from memo_sim.program.layout.rules.loss import UNDIVIDED_LOSSES
from memo_sim.program.lower import lower
from memo_sim.program.operators import workspaces
from memo_sim.program.operators.framework_kernels import framework_kernels
from memo_sim.program.verify.values import check_values
from tests.sim.small_programs import GPT, LLAMA, decide, faults_of

TOKENS = 2048
LOGITS = TOKENS * GPT.vocab
FORMS: tuple[Loss, ...] = ("blocks", "fused", "eager-fp32", "vocab-parallel", "checkpointed", "checkpointed-fp32")


def program(loss: Loss, *, chunk: int = 0, tp: int = 1, dtype: str = "bf16", policy: str = "planned") -> Program:
    fields = {"loss": loss, "loss_chunk_tokens": chunk, "dtype": dtype, "memory_policy": policy, "global_batch": 1}
    return lower(decide(GPT, Layout(tp=tp), seq_tokens=TOKENS, **fields))[0]


def head_of(found: Program) -> Template:
    return next(t for t in found.templates if t.name == "head")


def bytes_per_logit(found: Program, logits: int = LOGITS) -> float:
    """Return the largest sum of buffers as wide as the vocabulary that live at once, per logit of a chunk."""
    lives = liveness(found, expand(found))
    wide = [n for n, f in enumerate(found.all_families) if f.features == GPT.vocab and f.lifetime == "dynamic"]
    mine = np.isin(lives.family, wide) & (lives.birth >= 0)
    points = range(int(lives.birth[mine].min()), int(lives.death[mine].max()) + 1)
    held = [int(lives.bytes[mine & (lives.birth <= at) & (lives.death >= at)].sum()) for at in points]
    return max(held) / logits


def moved_per_logit(found: Program) -> float:
    """Return the bytes per logit that the loss reads and writes; its columns of a number a token are far fewer."""
    works = [i.work for i in head_of(found).instructions if i.name.startswith(("fwd/loss", "rec/loss"))]
    moved = sum(w.moved_bytes for w in works if isinstance(w, Rowwise))
    return moved / LOGITS


@pytest.mark.parametrize(
    ("form", "held", "moved"),
    [
        ("blocks", 4, 6),
        ("fused", 2, 6),
        ("eager-fp32", 12, 48),
        ("vocab-parallel", 6, 52),
        ("checkpointed", 14, 126),
        ("checkpointed-fp32", 12, 108),
    ],
)
def test_bytes_of_a_bf16_logit(form: Loss, held: float, moved: float) -> None:
    found = program(form)
    assert bytes_per_logit(found) == held
    assert moved_per_logit(found) == pytest.approx(moved, abs=0.5)  # columns of single numbers over 100 tokens


@pytest.mark.parametrize(("form", "held"), [("blocks", 4), ("fused", 2), ("eager-fp32", 14), ("vocab-parallel", 6)])
def test_chunks_share_their_buffers(form: Loss, held: float) -> None:
    assert bytes_per_logit(program(form, chunk=512), LOGITS // 4) == held


@pytest.mark.parametrize(("form", "held"), [("blocks", 8), ("fused", 4), ("eager-fp32", 12), ("vocab-parallel", 4)])
def test_fp32_logits_are_not_copied(form: Loss, held: float) -> None:
    found = program(form, dtype="fp32")
    assert bytes_per_logit(found) == held
    assert not [i for i in head_of(found).instructions if "widen" in i.name or "narrow" in i.name]


@pytest.mark.parametrize("policy", ["planned", "caching", "eager"])
def test_auto_is_what_was_lowered_before(policy: str) -> None:
    assert program("auto", policy=policy) == program("blocks", policy=policy)


@pytest.mark.parametrize("libraries", ["2024", "2025"])
@pytest.mark.parametrize("form", FORMS)
def test_an_eager_framework_keeps_a_named_loss(form: Loss, libraries: str) -> None:
    found = program(form, policy="eager")
    columns = expand(found)
    lives = liveness(found, columns)
    changed, names = eager_buffers(found, columns, lives, libraries=libraries, own_loss=False)
    wide = [n for n, f in enumerate(found.all_families) if f.features == GPT.vocab]
    mine = np.flatnonzero(np.isin(lives.family, wide))
    for column in ("birth", "death", "bytes"):
        assert np.array_equal(getattr(changed, column)[mine], getattr(lives, column)[mine])
    assert not [name for name in names if "fp32[" in name]


@pytest.mark.parametrize(("form", "numbers"), [("blocks", [3]), ("fused", [3]), ("vocab-parallel", [1, 2])])
def test_ranks_combine_statistics_of_a_divided_vocabulary(form: Loss, numbers: list[int]) -> None:
    works = [i.work for i in head_of(program(form, tp=2)).instructions if i.name.startswith("fwd/loss")]
    assert [w.bytes // (4 * TOKENS) for w in works if isinstance(w, Collective)] == numbers


@pytest.mark.parametrize("layout", [Layout(), Layout(tp=2, sequence_parallel=True), Layout(dp=2, zero=3), Layout(pp=2)])
@pytest.mark.parametrize("chunk", [0, 512])
@pytest.mark.parametrize("form", FORMS)
def test_checkers_pass(form: Loss, chunk: int, layout: Layout) -> None:
    if form in UNDIVIDED_LOSSES and layout.tp > 1:
        pytest.skip("refused")
    assert faults_of(decide(LLAMA, layout, loss=form, loss_chunk_tokens=chunk)) == []


LINEAR = pytest.mark.parametrize("form", LINEAR_LOSSES)


@pytest.fixture
def small_tiles(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let a vocabulary of 100 columns have four tiles, the last one narrower."""
    monkeypatch.setattr(workspaces, "LOSS_COLUMNS", 32)
    monkeypatch.setattr(workspaces, "LOSS_COLUMNS_GRANULE", 8)


@LINEAR
@pytest.mark.usefixtures("small_tiles")
def test_a_loss_with_the_classifier_inside_has_no_logits_but_a_tile(form: Loss) -> None:
    """Products: forward, and for each tile again, the input's gradient and the weight's."""
    head = head_of(program(form))
    inner = [i.work for i in head.instructions if isinstance(i.work, LinearLoss)]
    outer = [i.work for i in head.instructions if isinstance(i.work, TileGemm)]
    whole = 2.0 * LOGITS * GPT.hidden
    assert [w.part for w in inner] == ["statistics", *4 * ["gradient"]]
    assert sum(w.flops for w in inner if w.part == "gradient") == whole == inner[0].flops
    assert [sum(w.flops for w in outer if w.gemm_pass == p) for p in ("dgrad", "wgrad")] == 2 * [whole]
    assert [w.column for w in inner[1:]] == [0, 32, 64, 96]
    sizes = {f.name: f.bytes // TOKENS for f in head.own}
    assert (sizes["logits"], sizes["d_final.fp32"], sizes["loss_stats"]) == (2 * 32, 4 * GPT.hidden, 12)
    assert not [f for f in head.own if f.features == GPT.vocab]


@LINEAR
@pytest.mark.usefixtures("small_tiles")
@pytest.mark.parametrize("changes", [{}, {"objective": "grpo"}, {"adapters": "r=4,alpha=4,targets=qkv"}], ids=str)
@pytest.mark.parametrize("layout", [Layout(), Layout(tp=2, sequence_parallel=True), Layout(pp=2, subsequences=2)])
def test_checkers_pass_with_the_classifier_inside(form: Loss, layout: Layout, changes: dict[str, str]) -> None:
    for chunk, dtype in ((0, "bf16"), (512, "fp32")):
        found = decide(LLAMA, layout, loss=form, loss_chunk_tokens=chunk, dtype=dtype, **changes)
        assert faults_of(found) == []


@pytest.mark.usefixtures("small_tiles")
@pytest.mark.parametrize(
    ("name", "fault"),
    [
        ("classifier.dgrad.c0.t1", "grad"),
        ("classifier.wgrad.c0.t1", "after those before"),
        ("loss.bwd.c0.t2", "grad"),
    ],
)
def test_a_tile_that_is_left_out_is_a_fault(name: str, fault: str) -> None:
    found = program("linear", dtype="fp32")
    head = head_of(found)
    kept = tuple(i for i in head.instructions if not i.name.endswith(name))
    assert len(kept) == len(head.instructions) - 1
    templates = tuple(replace(t, instructions=kept) if t is head else t for t in found.templates)
    decisions = decide(GPT, seq_tokens=TOKENS, loss="linear", loss_chunk_tokens=0, dtype="fp32", global_batch=1)
    broken = replace(found, templates=templates)
    faults = check_values(broken, expand(broken), decisions)
    assert any(fault in each for each in faults), faults


@LINEAR
@pytest.mark.parametrize(
    ("changes", "where"),
    [({"memory_policy": "eager"}, "memory_policy"), ({"kernels": Kernels(rowwise="compiled")}, "rowwise")],
)
def test_frameworks_are_refused_beside_the_classifier_inside(form: Loss, changes: dict[str, Any], where: str) -> None:
    with pytest.raises(Infeasible, match="classifier's product inside") as caught:
        check_compatible(decide(GPT, loss=form, **changes))
    assert where in caught.value.where


@pytest.mark.parametrize("library", ["eager", "compiled", "fused"])
def test_a_named_loss_is_not_that_of_the_frameworks_kernels(library: str) -> None:
    """Blocks and fused are one kernel, and autograd's softmax has the bytes of the program in every library."""

    def loss_of(form: Loss) -> dict[str, Rowwise]:
        kernels = Kernels(rowwise=library)  # type: ignore[arg-type]
        found = lower(decide(GPT, loss=form, loss_chunk_tokens=0, kernels=kernels, global_batch=1))[0]
        works = {i.name: i.work for i in head_of(found).instructions if i.name.startswith("fwd/loss")}
        return {name: work for name, work in works.items() if isinstance(work, Rowwise)}

    for form in ("blocks", "fused"):
        (work,) = loss_of(form).values()
        assert framework_kernels(work, library) == ()  # type: ignore[arg-type]
    (own,) = loss_of("auto").values()
    assert own.kind == "cross_entropy"
    for name, work in loss_of("eager-fp32").items():
        kernels = framework_kernels(work, library)  # type: ignore[arg-type]
        assert (len(kernels) == 1) == ("softmax" in name)
        assert sum(kernel.moved_bytes(work) for kernel in kernels) in (0, work.moved_bytes)


@pytest.mark.parametrize("chunk", [0, 512])
def test_a_checkpointed_chunk_runs_forward_twice_and_an_fp32_product_copies_its_operands_each_time(chunk: int) -> None:
    rows, chunks = chunk or TOKENS, TOKENS // (chunk or TOKENS)
    weights, inputs = GPT.vocab * GPT.hidden, TOKENS * GPT.hidden

    def works(form: Loss, kind: type, name: str) -> list[Gemm | Rowwise]:
        found = head_of(program(form, chunk=chunk)).instructions
        return [i.work for i in found if isinstance(i.work, kind) and i.name.split("/")[1].startswith(name)]

    for form, dtype in (("checkpointed", "bf16"), ("checkpointed-fp32", "fp32")):
        products = works(form, Gemm, "classifier")
        assert [(p.gemm_pass, p.dtype) for p in products] == chunks * [
            ("fprop", dtype),
            ("fprop", dtype),
            ("dgrad", dtype),
            ("wgrad", dtype),
        ]
        assert sum(p.flops for p in products) == 4 * 2 * inputs * GPT.vocab
    assert {p.m for p in products if p.gemm_pass == "fprop"} == {rows}
    assert (
        sum(w.moved_bytes for w in works("checkpointed-fp32", Rowwise, "classifier.widen.")) == chunks * 2 * 6 * weights
    )
    assert sum(w.moved_bytes for w in works("checkpointed-fp32", Rowwise, "classifier.narrow.")) == chunks * 6 * weights
    # bf16 gradients of each chunk are added to fp32 sums.
    for form in ("checkpointed", "checkpointed-fp32"):
        assert sum(w.moved_bytes for w in works(form, Rowwise, "classifier.wgrad.add")) == chunks * 10 * weights
    assert not works("checkpointed", Rowwise, "classifier.widen")
