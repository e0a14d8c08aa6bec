"""The page about knobs, ``docs/knobs.md``: one table of the knobs, one of what does not go together."""

from __future__ import annotations

from collections.abc import Sequence

from memo_sim.contract.knobs import KNOBS, Knob, Label, Listed, Mark, Part
from memo_sim.planning.presets import SYSTEMS
from memo_sim.program.layout.compatibility import ARENA_RULES, RULES

_ABOUT = """\
<!-- Written by memo_sim/answers/knob_page.py. Change the declarations, then write this page again. -->

# Knobs

`memo-sim what-if` and `memo-sim longest` take every knob as an option; a knob that is not given is left to the search
or to the system. A plan file and the JSON documents name a knob as the second column does; a plan file has alpha as
`swapped_tokens`, a number of tokens. `memo_sim/contract/knobs.py` declares the knobs and says how to add one.

Pages of their own: [subsequences](subsequences.md), [METP](metp.md), [experts](experts.md) (`--ep`, `--expert-load`),
[latent attention](latent_attention.md) (`--rebuild-qkv`), [windows](windows.md), [packed documents](documents.md)
(`--documents`), [adapters](lora.md) (`--lora`), [FP8](fp8.md) (`--fp8`), [losses and states](memory.md) (`--loss`,
`--states`, `--grad-sums`), [GRPO](executor.md#reinforcement-learning-rollouts) (`--objective`).
"""
_RULES = """\
## What does not go together

A plan that breaks one of these rules is refused, and the search leaves it out.
`memo_sim/program/layout/compatibility.py` holds the rules and says how to add one.
"""


def knob_page() -> str:
    """Return the page as Markdown."""
    knobs = [
        [
            f"`{knob.option}`" if knob.on_command_line else "",
            f"`{knob.path}`",
            str(knob.kind),
            knob.unless_given or ("" if knob.default is None else f"`{str(knob.default).lower()}`"),
            knob.help,
            f"`{KNOBS[knob.needs].option}`" if knob.needs else "",
            _label(knob),
            _searched_by(knob),
        ]
        for knob in KNOBS.values()
    ]
    heads = ["option", "in a plan", "values", "default", "what it does", "needs", "label", "searched by"]
    rules = [[rule.name, f"`{rule.where}`", rule.wanted, rule.hint] for rule in (*RULES, *ARENA_RULES)]
    tables = (_ABOUT, _table(heads, knobs), _RULES, _table(["rule", "decision", "wanted", "next"], rules))
    return "\n".join(tables)


def _label(knob: Knob) -> str:
    """Return how the knob shows in a layout's label."""
    return ", ".join(map(_shown, knob.labels))


def _shown(label: Label) -> str:
    match label:
        case Mark(of, text):
            return f"`{text}` behind {of}"
        case Listed(of):
            return f"`(1,2)` behind {of}"
        case Part(text):
            return f"`{text}2`"


def _searched_by(knob: Knob) -> str:
    systems = [system.name for system in SYSTEMS.values() if knob.name in system.searched]
    return "every system" if len(systems) == len(SYSTEMS) else ", ".join(systems)


def _table(heads: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    lines = [heads, ["---"] * len(heads), *rows]
    return "".join(f"| {' | '.join(cell.replace('|', '/') for cell in line)} |\n" for line in lines)
