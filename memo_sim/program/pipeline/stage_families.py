"""The buffer families of one pipeline stage, in the order in which the program declares them.

A subsequence's own families have its suffix in the program (``grad.x.s1``), and so have those of a layer kind where
layers differ (``skeletal.up.k0.s1``). Templates find them under their plain names (``grad.x``), beside the families
that all subsequences and kinds share.
"""

from __future__ import annotations

from msgspec.structs import replace

from memo_sim.program.attention import subsequence as prefix_attention
from memo_sim.program.attention.partial import DOCUMENTS
from memo_sim.program.ir.instruction import BufferClass, Families, Family
from memo_sim.program.ir.kinds import BlockKind, FamilyKind
from memo_sim.program.layers import expert_ends
from memo_sim.program.layers.activations import region
from memo_sim.program.layers.loss import ROLLOUT, ROLLOUT_NUMBERS, kept_logits
from memo_sim.program.layout import fp8
from memo_sim.program.layout.documents import most_pieces
from memo_sim.program.layout.stage_layers import kind_suffix
from memo_sim.program.operators.fp8_operands import delayed_families
from memo_sim.program.operators.swap_rounding import staging
from memo_sim.program.pipeline.stage_parts import StageParts


class StageFamilies:
    """Every family of a stage, and each subsequence's view of them."""

    def __init__(self, parts: StageParts) -> None:
        self.all: Families = {}
        """All families, by their names in the program."""
        self._parts = parts
        self._common: Families = {}
        self._own: list[Families] = [{} for _ in parts.subsequences]
        """For each subsequence: its own families, by plain name."""
        self._of_kinds: dict[tuple[int | None, int], Families] = {}
        """The same for each layer kind, of one subsequence or (None) of all."""
        self._declare()

    def of_subsequences(self) -> list[Families]:
        """Return for each subsequence the common families and its own, by plain name; without those of layer kinds."""
        return [{**self._common, **own} for own in self._own]

    def of_kind(self, kind: int | None, subsequence: int) -> Families:
        """Return the families of a layer kind in one subsequence, by plain name; none where all layers are alike."""
        if kind is None:
            return {}
        return self._of_kinds.get((None, kind), {}) | self._of_kinds.get((subsequence, kind), {})

    def _declare(self) -> None:
        parts = self._parts
        first, count = parts.subsequences[0], parts.micro_batches * len(parts.stage.layers)
        self._hold(*self._inputs(), *(_scalar(name) for name in ("loss", "grad_norm")))
        if fp8.delayed(parts.decisions):
            self._hold(*delayed_families(parts.decisions, len(parts.stage.layers)))
        self._hold(*kept_logits(parts.decisions, parts.shape, parts.micro_batches))
        for number, templates in enumerate(parts.subsequences):
            self._hold(*templates.boundaries(), subsequence=number)
        for optimizer in parts.optimizers.values():
            self._hold(*optimizer.families())
        self._hold(*parts.sharding.families())
        shared = [family for each in first.of_kinds for family in each.activations.shared_families()]
        self._hold(*region(shared), *shared)
        swapping = [each.activations for templates in parts.subsequences for each in templates.of_kinds]
        self._hold(*staging([rows for each in swapping for rows in each.rounded()]))
        self._hold(*prefix_attention.families(parts.decisions, first.shape.attention, count))
        for each in first.of_kinds:
            kept = each.activations.kept_per_layer
            self._hold(*expert_ends.families(parts.decisions, each.rows, kept, each.layers.number))
        for number, templates in enumerate(parts.subsequences):
            self._hold(*templates.families(), subsequence=number)
        for owner in parts.owners.values():
            self._hold(*owner.families(self.all[f"grads.{BlockKind.LAYER}"]))
        for helper in parts.helpers:  # only a helper's own templates bind its families
            self.all |= {family.name: family for family in helper.families()}

    def _inputs(self) -> list[Family]:
        parts = self._parts
        stage, policy = parts.stage, parts.decisions.objective == "grpo"
        wanted = {
            "input.ids": (stage.first, "int64", 1),
            "input.labels": (stage.last, "int64", 1),
            ROLLOUT: (stage.last and policy, "fp32", ROLLOUT_NUMBERS),
        }
        return [
            Family(
                name,
                BufferClass.INPUT,
                dtype,
                parts.shape.tokens,
                features,
                parts.micro_batches,
                lifetime="step",
                kind=FamilyKind.INPUT,
            )
            for name, (held, dtype, features) in wanted.items()
            if held
        ] + self._documents()

    def _documents(self) -> list[Family]:
        """Return the ends of the documents of each micro-batch; none where a sequence is one document."""
        parts = self._parts
        if not (ends := most_pieces(parts.decisions)):
            return []
        return [
            Family(
                DOCUMENTS,
                BufferClass.INPUT,
                "int32",
                ends + 1,
                1,
                parts.micro_batches,
                lifetime="step",
                kind=FamilyKind.INPUT,
            )
        ]

    def _hold(self, *families: Family, subsequence: int | None = None) -> None:
        """Add families; those of a layer kind and of a subsequence get their suffixes."""
        suffix = "" if subsequence is None else self._parts.subsequences[subsequence].suffix
        shared = self._common if subsequence is None else self._own[subsequence]
        for family in families:
            held, end = shared, suffix
            if family.layer_kind is not None and family.block is None:  # blocks have their kind's name already
                held = self._of_kinds.setdefault((subsequence, family.layer_kind), {})
                end = kind_suffix(family.layer_kind) + suffix
            named = replace(family, name=family.name + end) if end else family
            held[family.name] = self.all[named.name] = named


def _scalar(name: str) -> Family:
    return Family(name, BufferClass.STATE, "fp32", 1, 1, lifetime="step", kind=FamilyKind.SCALAR)
