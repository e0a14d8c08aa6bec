"""Shows a fit as text: the value, and the errors with it, without it, and with each length left out of the fit."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol

from memo_sim.contract.units import format_tokens
from memo_sim.contract.validation import Validation
from memo_sim.views.accuracy import Accuracy, summarise
from memo_sim.views.text_table import number, percent, text_table
from memo_sim.views.validation_table import LABELS


class FittedConstant(Protocol):
    """The attributes of a fitted constant that the table shows."""

    @property
    def name(self) -> str:
        """The constant's name on the command line."""

    @property
    def unit(self) -> str:
        """The unit of its values."""


class FitReport(Protocol):
    """The attributes of a fit that the table shows: the value (in the constant's unit) and the validations."""

    @property
    def constant(self) -> FittedConstant:
        """The fitted constant."""

    @property
    def value(self) -> float:
        """The fitted value."""

    @property
    def fitted(self) -> Validation:
        """The validation of all cases with the fitted value."""

    @property
    def unfitted_value(self) -> float:
        """The value that would be assumed without a fit."""

    @property
    def unfitted(self) -> Validation:
        """The validation of all cases with the unfitted value."""

    @property
    def left_out(self) -> Mapping[int, tuple[float, Validation]]:
        """By length: the value fitted without its cases, and the validation of only those cases."""


def fit_table(fit: FitReport) -> str:
    """Return the fitted value and its errors; a length's row shows its own cases with the value fitted without them."""
    rows = [*_rows("fitted", fit.value, fit.fitted), *_rows("unfitted", fit.unfitted_value, fit.unfitted)]
    for length, (value, held) in sorted(fit.left_out.items()):
        rows += _rows(f"{format_tokens(length)}, left out of the fit", value, held)
    unit = fit.constant.unit
    headers = ["with", unit, "quantity", "n", "bias", "mean |error|", "max |error|", "status right"]
    return f"fitted {fit.constant.name}: {fit.value:.3f} {unit}\n\n{text_table(headers, rows, 'lrlrrrrr')}"


def _rows(name: str, value: float, validation: Validation) -> list[list[str | None]]:
    rows: list[list[str | None]] = []
    for accuracy in _whole(validation):
        for quantity, errors in accuracy.errors.items():
            rows.append(
                [
                    "" if rows else name,
                    "" if rows else number(value, 3),
                    LABELS[quantity],
                    str(errors.count),
                    percent(errors.bias, digits=2, signed=True),
                    percent(errors.mean_abs, digits=2),
                    percent(errors.max_abs, digits=2),
                    "" if rows else f"{accuracy.statuses_right}/{accuracy.statuses}",
                ]
            )
    return rows


def _whole(validation: Validation) -> list[Accuracy]:
    """Return the accuracy of all cases; the profile's marks of fitted cases do not apply to another value."""
    import msgspec

    return summarise([msgspec.structs.replace(c, fitted=False) for c in validation.cases])
