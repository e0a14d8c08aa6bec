"""A feature beside which other knobs have few values, and the rules that say which."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from operator import attrgetter

from memo_sim.contract.plan import Decisions
from memo_sim.program.layout.rules.rule import Rule, Test, Text


@dataclass(frozen=True, slots=True, kw_only=True)
class Feature:
    """What several rules share: a layout, a kernel or a policy beside which other knobs have few values."""

    name: str
    chosen: Test
    beside: str = ""
    """How a message refers to the feature: ``beside METP``."""
    what: str = ""
    """What a message says instead, where that is the same for every knob."""
    setting: Text
    """The decision behind it: ``metp 4``."""
    hint: str

    def allows(
        self, where: str, *allowed: object, wanted: str = "", because: str = "", when: Test | None = None
    ) -> Rule:
        """Return the rule that beside the feature the decision at ``where`` is one of ``allowed``.

        ``wanted`` replaces the list of allowed values in the message, ``because`` stands before the feature's hint.
        ``when`` replaces the feature's own condition; without ``allowed`` it is the whole rule.
        """
        chosen, knob = when or self.chosen, where.rpartition(".")[2]
        value = attrgetter(where.removeprefix("decisions."))

        def word(decisions: Decisions) -> str:
            return _word(value(decisions))

        def got(decisions: Decisions) -> str:
            setting = self.setting if isinstance(self.setting, str) else self.setting(decisions)
            return f"{word(decisions)} with {setting}"

        return Rule(
            name=f"{self.name}: {knob}",
            breaks=lambda d: chosen(d) and value(d) not in allowed,
            what=self.what or (lambda d: f"{knob} {word(d)} has no lowering {self.beside}"),
            where=where,
            got=got,
            wanted=wanted or _listed(allowed),
            hint=f"{because}; {self.hint}" if because else self.hint,
            beside=chosen,
        )


def _listed(allowed: Sequence[object]) -> str:
    """Return ``a, b or c``."""
    *others, last = map(_word, allowed)
    return f"{', '.join(others)} or {last}" if others else last


def _word(value: object) -> str:
    """Return a decision's value as plan files write it."""
    return str(value).lower() if isinstance(value, bool) else str(value)
