"""Checks that this machine has the products in FP8 that a plan asks for, and that every operand has scales.

A product reads rows that were quantised: by one call, or block by block, or by the ranks that they were gathered from.
It multiplies each part with a scale of its own, so every part has a size that the device multiplies. A copy by columns
is one matrix for each part, so a part that is moved in pieces must be complete before a product reads it. With scales
of blocks both copies need this, and parts end where blocks do.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate
from typing import Final, NamedTuple

import torch

from memo_exec.kernels.fp8 import WHOLE
from memo_exec.kernels.fp8_blocks import BLOCK
from memo_exec.machine.machine import Machine
from memo_sim.contract.errors import CannotRun
from memo_sim.contract.plan import Decisions
from memo_sim.program.analysis.columns import expand
from memo_sim.program.ir.instruction import Mode
from memo_sim.program.ir.kinds import FamilyKind
from memo_sim.program.ir.program import Program
from memo_sim.program.ir.work import Collective, Fp8Gemm, Fp8GroupedGemm
from memo_sim.program.layout.fp8 import FURTHER, PLAYED_LAYOUTS, by_blocks, not_played

LEAST_CAPABILITY: Final = (9, 0)
"""Hopper: the first device with FP8 that memo has rates for. Ada (8.9) has the products, and no plan is made for it."""
MOST_CAPABILITY: Final = (9, 9)
"""Plans for Blackwell (10.0) with one scale have one copy for every layout of operands, which no kernel here reads."""
MX_CAPABILITY: Final = (10, 0)
"""Blackwell: the first device whose matrix units read scales of 32 values (MXFP8)."""

LEAST_CUDA: Final[dict[str, tuple[int, int]]] = {"block": (12, 9), "mx": (12, 8)}
"""The first CUDA whose cuBLAS has products with scales of blocks of 128 values, and of 32."""

_EXPORT = "make the plan without --fp8, or memo-sim export PLAN --to megatron-lm, which runs FP8"
_FINER = {"block": "--fp8 tensor, "}
"""Recipes with smaller multiples on the same device, as a hint names them."""
_OPERANDS = ("x", "grad", "weight")

Range = tuple[int, int]


def check_recipe(decisions: Decisions, where: str) -> None:
    """Refuse recipes and layouts of FP8 that have no kernels on any machine.

    Raises:
        CannotRun: with what there is.
    """
    if found := not_played(decisions):
        recipes = [recipe for recipe in FURTHER["latent attention"] if all(recipe in FURTHER[name] for name in found)]
        raise CannotRun(
            f"memo-exec has {' and '.join(found)} in FP8 with scales from a tensor's own values, on Hopper; "
            f"with {decisions.fp8} they are priced only",
            where=f"{where}: $.decisions.fp8",
            got=decisions.fp8,
            wanted=", ".join(recipes),
            hint=f"make the plan with --fp8 tensor or block for an H100 or H200; or {_EXPORT}",
        )
    if decisions.fp8 == "none" or decisions.fp8_layouts == PLAYED_LAYOUTS[decisions.fp8]:
        return
    if decisions.fp8 == "mx":
        raise CannotRun(
            "memo-exec has kernels for MXFP8 with Blackwell's layouts of operands alone",
            where=f"{where}: $.decisions.fp8_layouts",
            got=decisions.fp8_layouts,
            wanted=PLAYED_LAYOUTS[decisions.fp8],
            hint="make the plan for a cluster of Blackwell GPUs; memo-sim list clusters names them",
        )
    raise CannotRun(
        f"memo-exec has kernels for FP8 ({decisions.fp8}) with Hopper's layout of operands alone; "
        "other layouts are priced only",
        where=f"{where}: $.decisions.fp8_layouts",
        got=decisions.fp8_layouts,
        wanted=PLAYED_LAYOUTS[decisions.fp8],
        hint=f"make the plan with --fp8 mx, or for a cluster of H100 or H200; or {_EXPORT}",
    )


def refuse_fp8(decisions: Decisions, where: str, why: str) -> None:
    """Refuse products in FP8 for a command that has no meaning for them.

    Raises:
        CannotRun: with ``why``, when the plan has such products.
    """
    if decisions.fp8 != "none":
        raise CannotRun(
            why, where=f"{where}: $.decisions.fp8", got=decisions.fp8, wanted="none", hint="make the plan without --fp8"
        )


def check_fp8(decisions: Decisions, program: Program, machine: Machine) -> None:
    """Refuse a plan with products in FP8 that this machine, or the kernels, cannot compute.

    Raises:
        CannotRun: with the first thing that is missing.
    """
    if decisions.fp8 == "none":
        return
    check_recipe(decisions, "plan")
    if why := _device_lacks(machine, decisions):
        wanted = "a Blackwell GPU" if decisions.fp8 == "mx" else "an H100 or H200"
        raise CannotRun(
            "products in FP8 cannot run here", where="$.decisions.fp8", got=why, wanted=wanted, hint=_EXPORT
        )
    version, least = torch.version.cuda or "none", LEAST_CUDA.get(decisions.fp8, (0, 0))
    if _version(version) < least:
        raise CannotRun(
            "this torch has no products in FP8 with scales of blocks",
            where="$.decisions.fp8",
            got=f"torch for CUDA {version}",
            wanted=f"torch for CUDA {least[0]}.{least[1]} or newer, whose cuBLAS has them",
            hint="install such a torch, or make the plan "
            + ("without --fp8" if decisions.fp8 == "mx" else "with --fp8 tensor"),
        )
    check_operands(program, decisions)


def _version(text: str) -> tuple[int, ...]:
    return tuple(int(each) for each in text.split(".") if each.isdigit())


def _device_lacks(machine: Machine, decisions: Decisions) -> str:
    if machine.device == "cpu":
        return "a CPU, for which they are not supported"
    capability = torch.cuda.get_device_capability()
    found = f"a GPU of compute capability {capability[0]}.{capability[1]}"
    if decisions.fp8 == "mx":
        return "" if capability >= MX_CAPABILITY else f"{found}, and kernels of MXFP8 need 10.0 or newer"
    return "" if LEAST_CAPABILITY <= capability <= MOST_CAPABILITY else f"{found}, and kernels need 9.0"


def check_operands(program: Program, decisions: Decisions) -> None:
    """Refuse a program whose products in FP8 read rows without scales, or have sizes that are not multiples.

    Raises:
        CannotRun: with the first such product.
    """
    blocks = decisions.fp8 != "none" and by_blocks(decisions.fp8)
    multiple = BLOCK if blocks else WHOLE
    for template in program.templates:
        for instruction in template.instructions:
            work = instruction.work
            if isinstance(work, Fp8Gemm | Fp8GroupedGemm) and any(size % multiple for size in _sizes(work)):
                raise CannotRun(
                    f"products in FP8 need sizes that are multiples of {multiple}",
                    where="$.decisions.fp8",
                    got=f"{instruction.name}: {' x '.join(map(str, _sizes(work)))}",
                    wanted=f"multiples of {multiple}",
                    hint=f"another --tp, {_FINER.get(decisions.fp8, '')}or make the plan without --fp8",
                )
    if found := _without_scale(program, decisions, multiple, blocks=blocks):
        raise CannotRun(
            "a product in FP8 reads rows that no kernel quantised, or parts of rows that were quantised together",
            where="$.decisions.fp8",
            got=found,
            wanted=f"every operand quantised, in parts of a multiple of {multiple} tokens",
            hint="another --tp, --alpha or --expert-capacity, no --attention-chunk, or make the plan without --fp8",
        )


def _sizes(work: Fp8Gemm | Fp8GroupedGemm) -> tuple[int, ...]:
    """Return the sizes of a product; an expert may have any number of rows."""
    return (work.m, work.n, work.k) if isinstance(work, Fp8Gemm) else (work.n, work.k)


def _without_scale(program: Program, decisions: Decisions, multiple: int, *, blocks: bool) -> str:
    """Return the first instruction that reads rows in FP8 without scales, and what wrote them; "" without one.

    ``multiple``: parts have such a number of tokens. ``blocks``: scales are those of blocks.
    """
    columns = expand(program)
    narrow = {number for number, family in enumerate(program.all_families) if family.dtype in ("e4m3", "e5m2")}
    buffers, family = columns.operand_buffer.tolist(), columns.buffer_family.tolist()
    first, end = columns.operand_first.tolist(), columns.operand_end.tolist()
    held = _made_of_masters(program, family) if decisions.fp8_params else {}
    row = 0
    for name, instruction in program.walk():
        ranges = dict[str, tuple[_Scaled, Range, Mode]]()
        for operand in instruction.operands:
            if family[buffers[row]] in narrow:
                mine = held.setdefault(buffers[row], _Scaled())
                ranges[operand.role] = (mine, (first[row], end[row]), operand.mode)
            row += 1
        if isinstance(instruction.work, Fp8Gemm | Fp8GroupedGemm):
            whole = blocks or instruction.work.gemm_pass == "wgrad"
            for role in (role for role in _OPERANDS if role in ranges):
                (scaled, rows, _), weight = ranges[role], role == "weight"
                if why := scaled.lacks(rows, whole=whole and not weight, multiple=1 if weight else multiple):
                    return f"{name}: {role}, written by {scaled.writers(rows)}, {why}"
        source = next((ranges[role] for role in _SOURCES if role in ranges), None)
        pieces: list[Piece] = source[0].pieces(source[1]) if source is not None and instruction.op in _CARRY else []
        if instruction.op in _ANEW:
            parts = _joined(pieces)
            if source is not None and blocks and not all(whole for _, whole in parts):
                return f"{name}: rows written by {source[0].writers(source[1])}, {_CUT}"
            ranks = instruction.work.ranks if isinstance(instruction.work, Collective) else 1
            if blocks and instruction.op == "fp8.transpose":  # joins the parts that ranks sent
                parts = [(sum(size for size, _ in parts), True)] if parts else []
            pieces = [Piece(size, 0, size) for size, _ in parts for _ in range(ranks)]
        for scaled, rows, mode in ranges.values():
            if mode is not Mode.READ:
                size = rows[1] - rows[0]
                scaled.write(rows, [Piece(size, 0, size)] if instruction.op in _QUANTISE else pieces, instruction.op)
    return ""


def _made_of_masters(program: Program, family: Sequence[int]) -> dict[int, _Scaled]:
    """Return the buffers, whose families are given by number, that are quantised before the first step."""
    found = dict[int, _Scaled]()
    for number, of in enumerate(family):
        each = program.all_families[of]
        if each.kind is FamilyKind.PARAMS_FP8:
            found[number] = _Scaled()
            found[number].write((0, each.tokens), [Piece(each.tokens, 0, each.tokens)], "params.quantize")
    return found


_QUANTISE = ("fp8.quantize", "params.quantize", "params.transpose", "params.all_gather")
_ANEW = ("all_gather", "fp8.transpose")
"""Operators whose result has new scales for each part of their operand."""
_CARRY = ("d2h", "h2d", "copy", *_ANEW)
"""Operators that move scales with the rows of their operand, which has one of the roles ``_SOURCES``."""
_SOURCES = ("source", "shard", "x")
_CUT = "cut where it was quantised together"


class Piece(NamedTuple):
    """Tokens of a buffer: ``tokens`` from ``first`` on, of ``of`` that were quantised together."""

    tokens: int
    first: int
    of: int


class _Scaled:
    """The rows of one buffer in FP8: what wrote them, and of which rows that were quantised together they are."""

    def __init__(self) -> None:
        self._written: dict[Range, tuple[list[Piece], str]] = {}

    def write(self, rows: Range, pieces: list[Piece], op: str) -> None:
        """Note that an operator wrote rows; ``pieces``: empty where they have no scales."""
        kept = {at: each for at, each in self._written.items() if not _overlap(at, rows)}
        self._written = kept | {rows: (pieces, op)}

    def pieces(self, rows: Range) -> list[Piece]:
        """Return the pieces of rows in order; none where not all of them have scales."""
        found, at = list[Piece](), rows[0]
        for (start, _), (pieces, _) in sorted(self._written.items()):
            ends = accumulate((piece.tokens for piece in pieces), initial=start)
            for first, (tokens, begin, of) in zip(ends, pieces, strict=False):
                low, high = max(first, rows[0]), min(first + tokens, rows[1])
                if low < high:
                    if low != at:
                        return []
                    found.append(Piece(high - low, begin + low - first, of))
                    at = high
        return found if at == rows[1] else []

    def lacks(self, rows: Range, *, whole: bool, multiple: int) -> str:
        """Return what a product misses in its operand; "" for nothing.

        ``whole``: whether each part has to be all that was quantised together.
        """
        parts = _joined(self.pieces(rows))
        if not parts:
            return "not quantised"
        if odd := [size for size, _ in parts if size % multiple]:
            return f"with a part of {odd[0]} tokens"
        return _CUT if whole and not all(each for _, each in parts) else ""

    def writers(self, rows: Range) -> str:
        """Return the operators that wrote the rows."""
        found = (op for at, (_, op) in sorted(self._written.items()) if _overlap(at, rows))
        return " and ".join(dict.fromkeys(found)) or "nothing"


def _joined(pieces: list[Piece]) -> list[tuple[int, bool]]:
    """Return the tokens of each part with one scale, and whether it is all that was quantised together."""
    found, behind = list[tuple[int, int]](), (0, 0)
    for piece in pieces:
        before = found.pop()[0] if piece.first and behind == (piece.first, piece.of) else 0
        found.append((before + piece.tokens, piece.of))
        behind = piece.first + piece.tokens, piece.of
    return [(tokens, tokens == of) for tokens, of in found]


def _overlap(one: Range, two: Range) -> bool:
    return one[0] < two[1] and two[0] < one[1]
