"""The templates of one pipeline stage, by name, and which buffers their instances bind.

Order of the templates: layers of every subsequence, optimizer, sharding, sums over ranks, embedding and head, transfers
between stages, templates of owners and helpers. The order is part of a program's hash.
"""

from __future__ import annotations

from dataclasses import replace

from memo_sim.program.data_parallel.optimizer import tied, totals
from memo_sim.program.ir.instruction import Families, Template
from memo_sim.program.ir.kinds import BlockKind
from memo_sim.program.layers.loss import metrics
from memo_sim.program.layout.swap_schedule import Key
from memo_sim.program.pipeline.bindings import Bindings, Rules
from memo_sim.program.pipeline.stage_families import StageFamilies
from memo_sim.program.pipeline.stage_parts import StageParts
from memo_sim.program.pipeline.subsequence_templates import SubsequenceTemplates


class StageTemplates:
    """Every template of a stage."""

    def __init__(self, parts: StageParts, families: StageFamilies, buffer_slots: dict[Key, int]) -> None:
        """``buffer_slots``: the rounding buffer of each layer's activations; empty without rounding buffers."""
        self.all: list[Template] = []
        self._numbers: dict[str, int] = {}
        self._slots: dict[int, list[str] | None] = {}
        """By the template's number, as given to ``_add``; helper stages bind their templates' buffers themselves."""
        self._bindings: dict[int, Bindings] = {}
        """By the template's number, from its first instance on: bounds read templates that are never placed."""
        self._parts, self._families = parts, families
        windowed = parts.subsequences[0].activations.windowed
        self._rules = Rules(parts.stage, parts.sharding, buffer_slots, parts.kinds, windowed=windowed)
        self._add_all()

    def __contains__(self, name: str) -> bool:
        """Return whether there is a template of this name."""
        return name in self._numbers

    def number(self, name: str) -> int:
        """Return the number of a template, by which instances refer to it."""
        return self._numbers[name]

    def indices(self, number: int, micro_batch: int, subsequence: int, layer: int) -> tuple[int, ...]:
        """Return the buffers that an instance of template ``number`` binds; ``layer`` as in ``bindings.py``."""
        bindings = self._bindings.get(number)
        if bindings is None:
            bindings = self._bindings[number] = self._bound(self.all[number], self._slots[number])
        return bindings.indices(micro_batch, subsequence, layer)

    def _add_all(self) -> None:
        parts, every = self._parts, self._families.of_subsequences()
        whole = [parts.sharding.whole(families) for families in every]
        for n, (templates, seen) in enumerate(zip(parts.subsequences, whole, strict=True)):
            self._add_layers(n, templates, seen)
        self._add_optimizers()
        for template in parts.sharding.templates(self._families.all):
            self._add(template)
        if parts.with_end:
            self._add(totals(parts.decisions, self._families.all))
        for templates, seen in zip(parts.subsequences, whole, strict=True):
            for template, slots in templates.ends(seen):
                self._add(template, slots)
        self._add(metrics(parts.decisions, parts.shape, self._families.all))
        if parts.tied_with_another and parts.with_end:
            self._add(tied(parts.blocks[BlockKind.EMBED], self._families.all))
        for templates, families in zip(parts.subsequences, every, strict=True):
            for template, slots in templates.transfers(families):
                self._add(template, slots)
        for x, owner in parts.owners.items():
            for builder in owner.templates(every[x]):
                self._add(replace(builder.build(), name=owner.name(builder.name)), builder.bound_slots)
        for helper in parts.helpers:
            for template in helper.templates:
                self._append(template)

    def _add_layers(self, subsequence: int, templates: SubsequenceTemplates, seen: Families) -> None:
        """Add the templates of a subsequence's layers, kind by kind."""
        for of in templates.of_kinds:
            own = self._families.of_kind(of.layers.number, subsequence)
            for template, slots in templates.layers(of, {**seen, **own}):
                self._add(template, slots)

    def _add_optimizers(self) -> None:
        families, parts = self._families.all, self._parts
        for kind, each in parts.optimizers.items():
            self._add(each.zero(families))
            self._add(each.gather(families))
            if parts.with_end:
                self._add(each.prepare(families))
            if parts.with_end or kind in parts.sharding.reduced_early:
                self._add(each.reduce_shards(families) if kind in parts.sharding.grads else each.reduce(families))
            if parts.with_end:
                self._add(each.norm(families))
                self._add(each.update(families))

    def _append(self, template: Template) -> int:
        self._numbers[template.name] = number = len(self.all)
        self.all.append(template)
        return number

    def _add(self, template: Template | None, slots: list[str] | None = None) -> None:
        """Add a template; ``slots``: names of the slots that instances bind, if not their families' names."""
        if template is not None:
            self._slots[self._append(template)] = slots

    def _bound(self, template: Template, slots: list[str] | None) -> Bindings:
        shared = [name for name, own in zip(template.slots, template.own_slots, strict=True) if not own]
        bound = [self._families.all[name] for name in shared]
        names = slots or [family.name for family in bound]
        rules = [self._rules.of(template, slot, family) for slot, family in zip(names, bound, strict=True)]
        return Bindings(rules, self._rules.double_buffered, self._parts.micro_batches)
