"""Colour and shape of each model in a chart: both differ, so that either is enough."""

from dataclasses import dataclass
from typing import Any

from components.report.content import LegendEntry, Sign
from components.report.palette import COLOURS

MARKERS: dict[str, str] = {"dot": "o", "diamond": "D", "square": "s", "triangle": "^"}
SIGNS: tuple[Sign, ...] = ("dot", "diamond", "square", "triangle")
NAMES = ("violet", "teal", "ochre", "ink")
MAX_MODELS = 2 * len(NAMES)  # more are in the table only


@dataclass(frozen=True, slots=True)
class ModelSign:
    """How one model is drawn."""

    name: str  # of the colour
    sign: Sign
    dashed: bool

    @property
    def colour(self) -> str:
        """The stand-in that `to_svg` replaces."""
        return COLOURS[self.name]

    @property
    def marker(self) -> str:
        return MARKERS[self.sign]

    @property
    def line(self) -> Any:
        return (0, (4, 2)) if self.dashed else "-"

    def legend(self, label: str) -> LegendEntry:
        """The entry of the legend."""
        return LegendEntry(label, self.name, self.sign)


def sign_of(number: int) -> ModelSign:
    """The sign of the n-th model, n < MAX_MODELS."""
    again, place = divmod(number, len(NAMES))
    return ModelSign(NAMES[place], SIGNS[(place + again) % len(SIGNS)], dashed=bool(again))


def hidden_models(num_models: int) -> tuple[str, ...]:
    """A sentence where a chart cannot show all models."""
    if num_models <= MAX_MODELS:
        return ()
    return (f"{num_models - MAX_MODELS} more models are in the table only.",)
