"""A rule between knobs: the decisions that do not go together, and the message that refuses them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from memo_sim.contract.errors import Infeasible
from memo_sim.contract.plan import Decisions

Test = Callable[[Decisions], bool]

Text = str | Callable[[Decisions], str]


@dataclass(frozen=True, slots=True, kw_only=True)
class Rule:
    """Decisions that do not go together, and the message that refuses them."""

    name: str
    breaks: Test
    """Whether decisions break the rule."""
    what: Text
    where: str
    """The decision that has to change, named as in a plan file."""
    got: Text
    wanted: str
    hint: str
    beside: Test | None = None
    """Part of ``breaks`` that several rules share: decisions for which it is false do not break the rule."""

    def refusal(self, decisions: Decisions) -> Infeasible:
        """Return the error for decisions that break the rule."""
        what, got = (text if isinstance(text, str) else text(decisions) for text in (self.what, self.got))
        return Infeasible(what, where=self.where, got=got, wanted=self.wanted, hint=self.hint)
