"""The owner's side of a task whose first rows helper stages compute: sends, receives, and sums.

The owner computes its own rows like any subsequence's, with more keys before them (``subsequence_templates.py``). It
receives the helpers' rows into the buffers between stages and into the KV cache. Gradients that helpers computed arrive
in buffers of their own and are added.
"""

from __future__ import annotations

from collections.abc import Iterator

from memo_sim.contract.plan import Decisions
from memo_sim.program.attention.partial import add
from memo_sim.program.attention.subsequence import KV, sums_of
from memo_sim.program.ir.builder import Rows, TemplateBuilder
from memo_sim.program.ir.instruction import BufferClass, Families, Family
from memo_sim.program.ir.kinds import BlockKind, FamilyKind, Phase, TemplateKind
from memo_sim.program.layout.multiplex import Task
from memo_sim.program.layout.shape import Shape
from memo_sim.program.layout.stage import Stage
from memo_sim.program.pipeline.helper_p2p import TO_HELPER, TO_OWNER, Link, Range


class OwnerStage:
    """One task whose first rows helpers compute, on the stage that has the layers."""

    def __init__(self, decisions: Decisions, shape: Shape, task: Task, stage: Stage) -> None:
        """``shape``: of the whole subsequence."""
        self.decisions = decisions
        self.task, self.stage, self.shape = task, stage, shape
        self.links = [Link(shape, task, portion) for portion in task.helpers]

    @property
    def suffix(self) -> str:
        """Suffix of the names of this task's buffers and templates."""
        return f".s{self.task.subsequence}"

    def name(self, template: str) -> str:
        """Return a template's name in the program."""
        return f"helper.{template}{self.suffix}"

    def families(self, grads: Family) -> list[Family]:
        """Return the buffers that receive gradients; ``grads``: the family of the layers' parameter gradients."""
        found, count, dtype = [], len(self.stage.layers), self.decisions.dtype
        for link in self.links:
            stage = link.portion.stage
            name, kind = self._received("grads", stage), FamilyKind.PER_LAYER
            found.append(Family(name, BufferClass.EXCHANGE, grads.dtype, grads.tokens, 1, count, kind=kind))
            if link.exists("d_kv.before"):
                rows, width = self.shape.start, self.shape.cache_width
                name = self._received("d_kv", stage)
                found.append(Family(name, BufferClass.EXCHANGE, dtype, rows, width, count, kind=kind))
        return found

    def _received(self, what: str, stage: int) -> str:
        return f"helper.{what}.{stage}{self.suffix}"

    def templates(self, found: Families) -> Iterator[TemplateBuilder]:
        """Yield the templates that send or receive messages, and those that add received gradients."""
        out = "head.x" if self.stage.last else "stage.out"
        for link in self.links:
            stage, ((_, own),) = link.portion.stage, sums_of(self.shape, *link.own)
            sides: dict[str, tuple[str, str, Range | None]] = {
                "x": ("stage.x", "stage.x", link.shard),
                "params": ("params.layer", "params", None),
                "before": (KV, KV, link.before),
                "kv": (KV, KV, link.own),
                "out": (out, out, link.shard),
                "grad": ("grad.x", "grad_out", link.shard),
                "again": ("params.layer", "params", None),
                "kept": (KV, KV, link.known),
                "d_kv": (own.slot, own.slot, (own.first, own.tokens)),
                "d_kv.before": (self._received("d_kv", stage), "aside", None),
                "grads": (self._received("grads", stage), "aside", None),
                "grad_in": ("grad.x", "grad_in", link.shard),
            }
            for what in (*TO_HELPER, *TO_OWNER):
                if link.exists(what):
                    family, slot, rows = sides[what]
                    yield link.message(what).side(self.stage.index, found[family], slot, rows)
            yield self._sums(link, found)

    def _sums(self, link: Link, found: Families) -> TemplateBuilder:
        """Return the template that adds one helper's gradients: of earlier keys (run by run), and of parameters."""
        stage = link.portion.stage
        builder = TemplateBuilder(f"bwd.add.{stage}", Phase.HELPER, TemplateKind.SUM, BlockKind.LAYER)
        before = sums_of(self.shape, *link.before) if link.exists("d_kv.before") else []
        for run, (first, rows) in enumerate(before):
            builder.bind(found[rows.slot], slot=rows.slot)
            if not run:
                builder.bind(found[self._received("d_kv", stage)], slot="aside.d_kv")
            part = Rows("aside.d_kv", first, rows.tokens)
            add(builder, self.decisions, f"d_kv.add.{stage}{f'.k{run}' if len(before) > 1 else ''}", part, rows)
        builder.bind(found["grads.layer"], slot="grads")
        builder.bind(found[self._received("grads", stage)], slot="aside.grads")
        add(builder, self.decisions, f"grads.add.{stage}", builder.all("aside.grads"), builder.all("grads"))
        return builder
