"""One instruction while ``values.py`` checks it: what its operands hold, what it writes, and its faults."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from memo_sim.program.ir.instruction import Family, Instance, Instruction, Operand
from memo_sim.program.verify.value_rows import Held, Value

if TYPE_CHECKING:
    from memo_sim.program.verify.values import Values


class Call:
    """One instruction while it is checked: reads of its operands, what it writes, and its faults."""

    def __init__(self, values: Values, instruction: Instruction, instance: Instance, buffers: list[int]) -> None:
        self.values, self.instruction, self.instance = values, instruction, instance
        self.work = instruction.work
        self.faults: list[str] = []
        self.operands: dict[str, Operand] = {}
        self.buffers: dict[str, int] = {}
        for operand, buffer in zip(instruction.operands, buffers, strict=True):
            self.operands[operand.role] = operand
            self.buffers[operand.role] = buffer
        self._written: list[tuple[int, Held]] = []

    def fault(self, text: str) -> None:
        """Report a fault of the instruction."""
        self.faults.append(f"{self.instance.place}/{self.instruction.name}: {text}")

    def has(self, role: str) -> bool:
        """Return whether the instruction has an operand of that role."""
        return role in self.operands

    def own_chunk(self, role: str) -> int:
        """Return the rows of this rank's own chunk where an operand is that, of rows that are gathered in chunks."""
        operand = self.operands[role]
        return self.values.sent_chunks.get((self.instance.template, operand.slot, operand.first), 0)

    def tokens(self, role: str) -> int:
        """Return the number of rows of an operand."""
        return self.operands[role].tokens

    def family(self, role: str) -> Family:
        """Return the family of an operand's buffer."""
        return self.values.family(self.buffers[role])

    def rows(self, role: str, first: int = 0, tokens: int | None = None) -> list[Held]:
        """Return what rows of an operand hold, counted from its first row; report rows that hold nothing."""
        operand, buffer = self.operands[role], self.buffers[role]
        begin = operand.first + first
        end = operand.first + operand.tokens if tokens is None else begin + tokens
        found, at = [], begin
        for low, high, value, row in self.values.read(buffer, begin, end):
            if low > at:
                self._nothing(role, at, low)
                found.append(Held(at - operand.first, low - operand.first, None, 0))
            found.append(Held(low - operand.first, high - operand.first, value, row))
            at = high
        if at < end:
            self._nothing(role, at, end)
            found.append(Held(at - operand.first, end - operand.first, None, 0))
        return found

    def _nothing(self, role: str, first: int, end: int) -> None:
        name = self.family(role).name
        self.fault(f"{role} reads rows [{first}, {end}) of {name}, which hold nothing")

    def pieces(self, *roles: str) -> Iterator[tuple[int, int, list[tuple[Value | None, int]]]]:
        """Yield (first row, rows, value and its row of every role) of runs in which the value of no role changes.

        The operands have equally many rows.
        """
        found = [self.rows(role) for role in roles]
        if all(len(rows) == 1 for rows in found):
            yield 0, self.tokens(roles[0]), [(rows[0].value, rows[0].row) for rows in found]
            return
        ends = sorted({each.end for rows in found for each in rows})
        begin, at = 0, [0] * len(found)
        for end in ends:
            values = []
            for n, rows in enumerate(found):
                while at[n] + 1 < len(rows) and rows[at[n]].end <= begin:
                    at[n] += 1
                each = rows[at[n]]
                values.append((each.value, each.row + begin - each.first))
            yield begin, end - begin, values
            begin = end

    def put(self, role: str, first: int, tokens: int, value: Value | None, row: int = 0) -> None:
        """Let rows of an operand, counted from its first row, hold a value when the instruction ends."""
        if role not in self.operands:
            return
        begin = self.operands[role].first + first
        self._written.append((self.buffers[role], Held(begin, begin + tokens, value, row)))

    def finish(self) -> None:
        """Write what ``put`` was called with."""
        for buffer, held in self._written:
            self.values.write(buffer, held)

    def wrong(self, role: str, value: Value, row: int, wanted: str) -> None:
        """Report that an operand holds another value than ``wanted``."""
        self.fault(f"{role} holds {value} (row {row}), not {wanted}")
