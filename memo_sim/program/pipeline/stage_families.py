"""The buffer families of one pipeline stage, in the order in which the program declares them.

A subsequence's own families have its suffix in the program (``grad.x.s1``). Its templates find them under their plain
names (``grad.x``), beside the families that all subsequences share.
"""

from __future__ import annotations

from dataclasses import replace

from memo_sim.program.attention import subsequence as prefix_attention
from memo_sim.program.ir.instruction import BufferClass, Families, Family
from memo_sim.program.ir.kinds import BlockKind, FamilyKind
from memo_sim.program.layers.loss import kept_logits
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
        self._declare()

    def of_subsequences(self) -> list[Families]:
        """Return for each subsequence the common families and its own, by plain name."""
        return [{**self._common, **own} for own in self._own]

    def _declare(self) -> None:
        parts = self._parts
        first, count = parts.subsequences[0], parts.subsequences[0].activations.kept_per_layer
        self._hold(*self._inputs(), *(_scalar(name) for name in ("loss", "grad_norm")))
        self._hold(*kept_logits(parts.decisions, parts.shape, parts.micro_batches))
        for number, templates in enumerate(parts.subsequences):
            self._hold(*templates.boundaries(), subsequence=number)
        for optimizer in parts.optimizers.values():
            self._hold(*optimizer.families())
        self._hold(*parts.sharding.families(), *first.activations.shared_families())
        self._hold(*prefix_attention.families(parts.decisions, first.shape, count))
        for number, templates in enumerate(parts.subsequences):
            self._hold(*templates.families(), subsequence=number)
        for owner in parts.owners.values():
            self._hold(*owner.families(self.all[f"grads.{BlockKind.LAYER}"]))
        for helper in parts.helpers:  # only a helper's own templates bind its families
            self.all |= {family.name: family for family in helper.families()}

    def _inputs(self) -> list[Family]:
        parts = self._parts
        wanted = {"input.ids": parts.stage.first, "input.labels": parts.stage.last}
        return [
            Family(
                name,
                BufferClass.INPUT,
                "int64",
                parts.shape.tokens,
                1,
                parts.micro_batches,
                lifetime="step",
                kind=FamilyKind.INPUT,
            )
            for name, held in wanted.items()
            if held
        ]

    def _hold(self, *families: Family, subsequence: int | None = None) -> None:
        """Add families; those of a subsequence get its suffix."""
        suffix = "" if subsequence is None else self._parts.subsequences[subsequence].suffix
        held = self._common if subsequence is None else self._own[subsequence]
        for family in families:
            named = replace(family, name=family.name + suffix) if suffix else family
            held[family.name] = self.all[named.name] = named


def _scalar(name: str) -> Family:
    return Family(name, BufferClass.STATE, "fp32", 1, 1, lifetime="step", kind=FamilyKind.SCALAR)
