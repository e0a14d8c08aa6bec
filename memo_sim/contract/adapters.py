"""Low-rank adapters (LoRA, Hu et al. 2021, arXiv:2106.09685) as a plan writes them: ``r=16,alpha=32,targets=qkv+ffn``.

An adapter adds ``scale * (x A^T) B^T`` to the product ``x W^T``. W and every other weight of the model are frozen. A
has ``rank`` rows and B has ``rank`` columns; ``scale`` is alpha / rank, or alpha / sqrt(rank) with ``rslora``
(Kalajdzievski 2023, arXiv:2312.03732). Every target has an A and a B of its own, as in Hugging Face's PEFT: Q, K and V
are three targets, although their weights are packed in one product, and so are gate and up. There is no dropout.
"""

from __future__ import annotations

import re
from functools import lru_cache
from typing import Annotated

import msgspec

from memo_sim.contract.errors import UsageError
from memo_sim.contract.model import Model

NONE = "none"
MOST_RANK = 9_999
TARGETS = ("q", "k", "v", "proj", "gate", "up", "down")
"""What may have an adapter, in the order of a layer."""
GROUPS = {"qkv": ("q", "k", "v"), "ffn": ("gate", "up", "down")}
"""Words for several targets; a model without a gate has no target gate."""

_TARGET = "qkv|ffn|" + "|".join(TARGETS)
_RANK, _ALPHA = r"[1-9][0-9]{0,3}", r"[0-9]{1,4}(?:\.[0-9]{1,4})?"
_TARGETS = rf"(?:{_TARGET})(?:\+(?:{_TARGET})){{0,6}}"
ADAPTERS = rf"none|r={_RANK},alpha={_ALPHA},targets={_TARGETS}(?:,rslora)?"
AdaptersText = Annotated[str, msgspec.Meta(pattern=f"^({ADAPTERS})$")]
"""Adapters as a plan writes them; ``none``: all weights are trained."""

_FIELDS = {"r": re.compile(_RANK), "alpha": re.compile(_ALPHA), "targets": re.compile(_TARGETS)}


class Adapters(msgspec.Struct, frozen=True, kw_only=True):
    """The adapters of a plan; ``targets`` are in the order of ``TARGETS``."""

    rank: int
    alpha: float
    targets: tuple[str, ...]
    rslora: bool = False

    @property
    def scale(self) -> float:
        """The factor of an adapter's result."""
        return self.alpha / (self.rank**0.5 if self.rslora else self.rank)

    @property
    def text(self) -> str:
        """The adapters as a plan writes them, with groups of targets in one word."""
        words: list[str] = []
        for target in self.targets:
            group = next((name for name, members in GROUPS.items() if target in members), "")
            word = group if group and set(GROUPS[group]) <= set(self.targets) else target
            words += [word] * (word not in words)
        return f"r={self.rank},alpha={self.alpha:g},targets={'+'.join(words)}{',rslora' * self.rslora}"

    def targets_of(self, product: str, model: Model) -> tuple[str, ...]:
        """Return the targets in one product of a layer: ``qkv``, ``proj``, ``ffn_up`` or ``ffn_down``."""
        within = {"qkv": ("q", "k", "v"), "proj": ("proj",), "ffn_down": ("down",)}
        within["ffn_up"] = ("gate", "up") if model.gated else ("up",)
        return tuple(target for target in within[product] if target in self.targets)

    def params(self, model: Model) -> int:
        """Return the trained weights of all layers together."""
        return sum(self._of_layer(model, shape.ffn_hidden) for shape in map(model.layer, range(model.layers)))

    def _of_layer(self, model: Model, ffn: int) -> int:
        h, q, kv = model.hidden, model.q_width, model.kv_width
        sides = {"q": h + q, "k": h + kv, "v": h + kv, "proj": q + h, "gate": h + ffn, "up": h + ffn, "down": ffn + h}
        products = ("qkv", "proj", "ffn_up", "ffn_down")
        return self.rank * sum(sides[each] for product in products for each in self.targets_of(product, model))


@lru_cache(maxsize=64)
def adapters_of(text: str) -> Adapters | None:
    """Return the adapters that a plan's text stands for; None for ``none``.

    ``text``: as ``Decisions.adapters`` has it, so it fits ``ADAPTERS``.
    """
    if text == NONE:
        return None
    given = dict(part.partition("=")[::2] for part in text.split(","))
    named = {target for word in given["targets"].split("+") for target in GROUPS.get(word, (word,))}
    return Adapters(
        rank=int(given["r"]),
        alpha=float(given["alpha"]),
        targets=tuple(target for target in TARGETS if target in named),
        rslora="rslora" in given,
    )


def parse_adapters(text: str, *, option: str) -> str:
    """Return adapters as a plan writes them from ``r=16``, ``r=16,alpha=32,targets=q+v`` or ``none``.

    ``alpha`` is the rank unless given (scale 1), ``targets`` all products: qkv+proj+ffn. ``option`` is the command-line
    option that the message names.

    Raises:
        UsageError: when ``text`` has no rank, an unknown or repeated word, or a number out of its range.
    """
    if text.strip() == NONE:
        return NONE
    given: dict[str, str] = {}
    for part in text.replace(" ", "").split(","):
        name, equals, value = part.partition("=")
        known = part == "rslora" or (name in _FIELDS and equals and _FIELDS[name].fullmatch(value))
        if not known or name in given:
            raise _refusal(text, part, option)
        given[name] = value
    if "r" not in given or not float(given.get("alpha", "1")):
        raise _refusal(text, text, option)
    given = {"alpha": given["r"], "targets": "qkv+proj+ffn", **given}
    rslora = ",rslora" if "rslora" in given else ""
    found = adapters_of(f"r={given['r']},alpha={given['alpha']},targets={given['targets']}{rslora}")
    assert found is not None
    return found.text


def _refusal(text: str, part: str, option: str) -> UsageError:
    return UsageError(
        "not a description of adapters",
        where=None if part == text else f"{option} {text}",
        got=repr(part),
        wanted=f"none, or r=N (1 to {MOST_RANK}) and, joined by commas: alpha=X above 0 (N unless given), targets=some"
        f" of qkv, ffn, {', '.join(TARGETS)} joined by + (qkv+proj+ffn unless given), rslora",
        hint=f"{option} r=16,alpha=32,targets=qkv+proj+ffn",
    )
