"""The owner's side of a task whose first rows helper stages compute: sends, receives, and sums.

The owner computes its own rows like any subsequence's, with more keys before them (``subsequence_templates.py``). It
receives the helpers' rows into the buffers between stages and into the KV cache. Gradients that helpers computed arrive
in buffers of their own and are added.
"""

from __future__ import annotations

from collections.abc import Iterator

from memo_sim.contract.plan import Decisions
from memo_sim.program.attention.partial import add, put
from memo_sim.program.attention.subsequence import KV, sums_of
from memo_sim.program.ir.builder import Rows, TemplateBuilder
from memo_sim.program.ir.instruction import BufferClass, Families, Family
from memo_sim.program.ir.kinds import BlockKind, FamilyKind, Phase, TemplateKind
from memo_sim.program.layout.multiplex import Task
from memo_sim.program.layout.sequence_rows import Range, keys_by_sequence, sequence_at, sequences_of
from memo_sim.program.layout.shape import Shape
from memo_sim.program.layout.stage import Stage
from memo_sim.program.pipeline.helper_p2p import TO_HELPER, TO_OWNER, Link


class OwnerStage:
    """One task whose first rows helpers compute, on the stage that has the layers."""

    def __init__(self, decisions: Decisions, shape: Shape, task: Task, stage: Stage) -> None:
        """``shape``: of the whole subsequence."""
        self.decisions = decisions
        self.task, self.stage, self.inside = task, stage, shape.attention
        self.links = [Link(decisions, shape, task, portion) for portion in task.helpers]

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
            if link.before:
                rows, width = sum(tokens for _, tokens in link.before), self.inside.cache_width
                name = self._received("d_kv", stage)
                found.append(Family(name, BufferClass.EXCHANGE, dtype, rows, width, count, kind=kind))
        return found

    def _received(self, what: str, stage: int) -> str:
        return f"helper.{what}.{stage}{self.suffix}"

    def templates(self, found: Families) -> Iterator[TemplateBuilder]:
        """Yield the templates that send or receive messages, and those that add received gradients."""
        out = "head.x" if self.stage.last else "stage.out"
        for link in self.links:
            stage = link.portion.stage
            sides: dict[str, tuple[str, str, Range | None]] = {
                "x": ("stage.x", "stage.x", link.shard),
                "params": ("params.layer", "params", None),
                "before": (KV, KV, None),
                "kv": (KV, KV, None),
                "out": (out, out, link.shard),
                "grad": ("grad.x", "grad_out", link.shard),
                "again": ("params.layer", "params", None),
                "kept": (KV, KV, None),
                "d_kv.before": (self._received("d_kv", stage), "aside", None),
                "grads": (self._received("grads", stage), "aside", None),
                "grad_in": ("grad.x", "grad_in", link.shard),
            }
            for what in (*TO_HELPER, *TO_OWNER):
                part: Range | None
                begun = 0
                for message, rows in link.messages(what):
                    if what == "d_kv":
                        ((_, own),) = sums_of(self.inside, *link.summed)
                        family, slot, part = own.slot, own.slot, (own.first, own.tokens)
                    else:
                        family, slot, side = sides[what]
                        part = side or rows
                    if what == "d_kv.before" and rows:  # the ranges lie side by side where they are received
                        part, begun = (begun, rows[1]), begun + rows[1]
                    yield message.side(self.stage.index, found[family], slot, part)
            yield self._sums(link, found)

    def _sums(self, link: Link, found: Families) -> TemplateBuilder:
        """Return the template that adds one helper's gradients: of earlier keys (run by run), and of parameters.

        Gradients of keys that no row behind the helper's attends to are the first term of their sum.
        """
        stage = link.portion.stage
        builder = TemplateBuilder(f"bwd.add.{stage}", Phase.HELPER, TemplateKind.SUM, BlockKind.LAYER)
        before = list(self._sums_of_earlier_keys(link))
        for run, (first, rows, begins) in enumerate(before):
            builder.bind(found[rows.slot], slot=rows.slot)
            if not run:
                builder.bind(found[self._received("d_kv", stage)], slot="aside.d_kv")
            part, end = Rows("aside.d_kv", first, rows.tokens), f".k{run}" if len(before) > 1 else ""
            if begins:
                put(builder, f"d_kv.put.{stage}{end}", part, rows)
            else:
                add(builder, self.decisions, f"d_kv.add.{stage}{end}", part, rows)
        builder.bind(found["grads.layer"], slot="grads")
        builder.bind(found[self._received("grads", stage)], slot="aside.grads")
        add(builder, self.decisions, f"grads.add.{stage}", builder.all("aside.grads"), builder.all("grads"))
        return builder

    def _sums_of_earlier_keys(self, link: Link) -> Iterator[tuple[int, Rows, bool]]:
        """Yield where gradients that a helper computed of earlier keys belong: by sequence, with neighbours joined.

        Each is the first row in the buffer that received them, the rows of the sums, and whether they begin the sums.
        Of the last subsequence, the rows of one sequence begin its sums: the owner's own rows, which are added first,
        or those of the helpers before this one.
        """
        decisions, shape = self.decisions, self.inside
        before = self.links[: self.links.index(link)]
        added = [link.rows_of(self.task.own), *(each.own for each in before)]
        begun = {number for rows in added for number in sequences_of(decisions, *rows)}
        last = shape.start + shape.tokens == shape.kv_cache_tokens
        joined, received = list[tuple[int, int, int, bool]](), 0
        for first, tokens in keys_by_sequence(decisions, *link.own):
            begins = last and sequence_at(decisions, first) not in begun
            if joined and sum(joined[-1][:2]) == first and joined[-1][3] == begins:
                joined[-1] = joined[-1][0], joined[-1][1] + tokens, *joined[-1][2:]
            else:
                joined.append((first, tokens, received, begins))
            received += tokens
        for first, tokens, at, begins in joined:
            for low, rows in sums_of(shape, first, tokens):
                yield at + low - first, rows, begins
