"""One layer of METP's paper: its program, and the elements that it holds and sends, for Tables 1 and 2.

Sizes are those of the paper: b sequences of s tokens, hidden h, p ranks. States are fp32 (parameters, gradients and two
moments: four times the weights), and there are no biases.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from hypothesis import strategies as st

from memo_sim.contract.knobs import Recompute
from memo_sim.contract.model import Model
from memo_sim.contract.plan import Decisions, Kernels, Layout
from memo_sim.contract.units import DTYPE_BYTES
from memo_sim.program.analysis.columns import expand
from memo_sim.program.analysis.liveness import liveness
from memo_sim.program.ir.instruction import Instruction, Template
from memo_sim.program.ir.program import Program
from memo_sim.program.ir.work import Collective, Exchange
from memo_sim.program.lower import lower

FP32 = DTYPE_BYTES["fp32"]


@dataclass(frozen=True)
class Sizes:
    """Sizes of a layer of the paper: b sequences, s tokens, hidden h, p ranks."""

    b: int
    s: int
    h: int
    p: int

    def program(
        self,
        *,
        layers: int = 1,
        kernel: str = "flash2",
        recompute: Recompute = "none",
        keep_norms: bool = False,
        **layout: object,
    ) -> Program:
        """Return the program of ``layers`` layers without biases, for one micro-batch, under ``layout``."""
        heads = self.h // 16
        model = Model(
            name="paper",
            family="gpt",
            layers=layers,
            hidden=self.h,
            heads=heads,
            kv_heads=heads,
            head_dim=16,
            ffn_hidden=4 * self.h,
            vocab=64,
            tied_embeddings=True,
        )
        decisions = Decisions(
            model=model,
            layout=Layout(**layout),  # type: ignore[arg-type]
            seq_tokens=self.s,
            micro_batch=self.b,
            global_batch=self.b,
            recompute=recompute,
            keep_norms=keep_norms,
            kernels=Kernels(attention=kernel),
            dtype="fp32",
        )
        return lower(decisions)[0]

    @property
    def bsh(self) -> int:
        """Number of elements of the layer's input: b x s x h."""
        return self.b * self.s * self.h


@st.composite
def sizes(draw: st.DrawFn) -> Sizes:
    """Draw sizes that p divides."""
    p = draw(st.sampled_from([2, 4, 8]))
    s, h = 2 * p * draw(st.integers(1, 40)), 16 * p * draw(st.integers(1, 4))
    return Sizes(draw(st.integers(1, 3)), s, h, p)


def of_layer(program: Program) -> Iterator[Instruction]:
    """Yield the instructions of layer 0: forward, backward, and the collectives of its parameters and gradients."""
    for name, instruction in program.walk():
        if "/l0/" in name:
            yield instruction


def sent(program: Program, kind: str, prefixes: tuple[str, ...] = ("",)) -> float:
    """Return the fp32 elements in the layer's collectives or hops of ``kind``; a collective counts its whole tensor."""
    found = 0
    for instruction in of_layer(program):
        work, name = instruction.work, instruction.name.partition("/")[2]
        what = work.kind if isinstance(work, Collective) else "send_recv" if isinstance(work, Exchange) else ""
        if what == kind and name.startswith(prefixes):
            found += work.bytes  # type: ignore[union-attr]
    return found / FP32


def elements(template: Template, slot: str) -> int:
    """Return the number of elements of one of a template's own buffers."""
    (family,) = (f for f in template.own if f.name == slot)
    return family.tokens * family.features


def template(program: Program, name: str) -> Template:
    """Return the program's template of that name."""
    return next(t for t in program.templates if t.name == name)


def peak_elements(program: Program, name: str, first: str, last: str) -> tuple[int, set[str]]:
    """Return the most elements alive in a template's own buffers, and the names of those buffers.

    Only the instructions from ``first`` to ``last`` of the template's first instance count.
    """
    lives, number, found = liveness(program, expand(program)), 0, (0, set[str]())
    families = program.all_families
    for instance in program.instances:
        played = program.templates[instance.template]
        if played.name == name:
            names = [i.name.partition("/")[2] for i in played.instructions]
            for at in range(number + names.index(first), number + names.index(last) + 1):
                here = [i for i in range(len(lives.bytes)) if lives.birth[i] <= at <= lives.death[i]]
                own = [i for i in here if families[lives.family[i]].name.startswith(f"{name}/")]
                total = sum(int(lives.bytes[i]) for i in own) // FP32
                found = max(found, (total, {families[lives.family[i]].name.partition("/")[2] for i in own}))
            return found
        number += len(played.instructions)
    raise KeyError(name)
