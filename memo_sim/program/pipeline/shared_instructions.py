"""Instructions of templates, shared by plans that differ in what no instruction of a template depends on.

Plans of one layout that differ in ZeRO, replicas or the number of swapped rows have other buffers, but most of their
templates have equal instructions. So have a layer's forwards that write the next layer's input, the head's, or what a
stage sends. Writing the instructions takes most of a small program's lowering; binding them to the families of another
plan takes little. Instructions are taken only where these families are alike in all that a template reads of them.

      ZeRO 0   layer.bwd   params: params.layer     written         ZeRO 3   params: gathered.layer     bound anew
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Hashable, Mapping
from dataclasses import replace

from msgspec import Struct

from memo_sim.program.ir.instruction import BufferClass, Families, Family, Template

MOST_INSTRUCTIONS = 8 * 1024
"""Maximum number of instructions that are kept, of about 1 KiB each; the least recently used go first."""

Bound = tuple[Template, list[str]]
"""A template, and the names of the slots that an instance binds."""
Made = dict[str, Bound]
"""By name: layer templates that are the same on every stage of one lowering."""


class _Slot(Struct, frozen=True):
    """A slot that instances bind."""

    name: str
    place: int
    """Its place among the template's slots."""
    families: tuple[str, ...]
    """The plain names of its family when the template was written; none where the caller says which one it is."""
    alike: Hashable
    """What the template reads of the family."""

    def bound(self, seen: Families, given: Mapping[str, Family]) -> Family | None:
        """Return the family of the slot in another plan; None where the template may not be the same there."""
        if self.name in given:
            family = given[self.name]
        else:
            found = {seen[name].name: seen[name] for name in self.families if name in seen}
            if len(found) != 1:
                return None
            (family,) = found.values()
        return family if _alike(family) == self.alike else None


class _Written(Struct, frozen=True):
    template: Template
    slots: tuple[_Slot, ...]
    names: tuple[str, ...]

    def of(self, seen: Families, given: Mapping[str, Family]) -> Bound | None:
        """Return the template with the families of another plan, or None."""
        slots = list(self.template.slots)
        for slot in self.slots:
            if (family := slot.bound(seen, given)) is None:
                return None
            slots[slot.place] = family.name
        return replace(self.template, slots=tuple(slots)), list(self.names)


class SharedInstructions:
    """The templates that were written last."""

    def __init__(self) -> None:
        self._kept: OrderedDict[Hashable, _Written] = OrderedDict()
        self._instructions = 0

    def of(
        self, key: Hashable, seen: Families, write: Callable[[], Bound], given: Mapping[str, Family] | None = None
    ) -> Bound:
        """Return a template with the families that are ``seen`` under plain names; ``write`` writes it at first.

        - ``key``: all that its instructions depend on beside its families.
        - ``given``: families of slots that have another one in another template with the same instructions.
        """
        given = given or {}
        if key in self._kept:
            self._kept.move_to_end(key)
            found = self._kept[key].of(seen, given)
            if found is not None:
                return found
            self._drop(key)
        template, names = write()
        self._kept[key] = _Written(template, tuple(_slots(template, names, seen, given)), tuple(names))
        self._instructions += len(template.instructions)
        while len(self._kept) > 1 and self._instructions > MOST_INSTRUCTIONS:
            self._drop(next(iter(self._kept)))
        return template, names

    def _drop(self, key: Hashable) -> None:
        self._instructions -= len(self._kept.pop(key).template.instructions)

    def forget(self) -> None:
        """Drop all."""
        self._kept.clear()
        self._instructions = 0


shared = SharedInstructions()
"""Those of this process."""


def _slots(template: Template, names: list[str], seen: Families, given: Mapping[str, Family]) -> list[_Slot]:
    """Return the slots that instances bind; ``names``: of these, in order."""
    own = {family.name for family in template.own}
    plain: dict[str, list[str]] = {}
    for name, family in seen.items():
        plain.setdefault(family.name, []).append(name)
    places = [place for place, family in enumerate(template.slots) if family not in own]
    found = []
    for place, name in zip(places, names, strict=True):
        known = () if name in given else tuple(plain[template.slots[place]])
        found.append(_Slot(name, place, known, _alike(given[name] if name in given else seen[known[0]])))
    return found


def _alike(family: Family) -> Hashable:
    """Return what a template of a whole micro-batch reads of a family that it binds, beside its name."""
    return family.dtype, family.tokens, family.features, family.buffer_class is BufferClass.EXCHANGE
