"""Intermediate results of an attack: the accuracy of each model so far.

Every round attacks the items that are robust to all attacks before it, in the order of the test
split. The share after a round counts items without a gap: those not attacked any more are broken.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pyarrow as pa

from components.core.confidence_sequences import ShareSoFar
from components.core.types import IntArray
from components.core.units import ProgressBar, SoFar, Unit
from pipelines.stages.attack.results import ModelUnderAttack


@dataclass
class _ModelRound:
    """One model in one round."""

    units: Sequence[Unit]
    labels: IntArray | None  # of all items; None: those of the clean predictions
    num_items: int
    robust: dict[str, int] = field(default_factory=dict)  # by finished unit

    def keep(self, unit: Unit, brief: dict[str, list[int]]) -> None:
        if self.labels is None:
            right = np.equal(brief["clean_prediction"], brief["label"])
        else:
            right = np.equal(brief["adversarial_prediction"], self.labels[brief["place"]])
        self.robust[unit.name] = int(right.sum())

    def share(self) -> ShareSoFar | None:
        """None before the first unit is finished."""
        held = seen = 0
        for unit in self.units:
            if unit.name not in self.robust:
                break
            held, seen = held + self.robust[unit.name], unit.payload.items[-1] + 1
        else:
            seen = self.num_items  # the rest was broken before
        if not seen:
            return None
        least = sum(self.robust.values())
        open_ = sum(len(u.payload.items) for u in self.units if u.name not in self.robust)
        return ShareSoFar(held, seen, self.num_items, least=least, most=least + open_)


def predictions_of(table: pa.Table) -> dict[str, list[int]] | None:
    """The brief of a unit: predictions on clean or attacked items; None for other work."""
    for columns in (("place", "adversarial_prediction"), ("label", "clean_prediction")):
        if set(columns) <= set(table.column_names):
            return {name: table[name].to_pylist() for name in columns}
    return None


class RoundLedger:
    """Counts the items of finished units of a round and follows the accuracy of every model."""

    counts = "items"
    brief = staticmethod(predictions_of)

    def __init__(self, total: float, rounds: Mapping[str, _ModelRound]) -> None:
        self.total, self.done, self.images = total, 0.0, 0
        self.rounds = rounds  # by the name of the metric
        self.own = {unit.name: key for key, own in rounds.items() for unit in own.units}

    @staticmethod
    def clean(units: Sequence[Unit], clean: Mapping[str, Sequence[Unit]]) -> "RoundLedger":
        """The first round: predictions on clean items, `clean` by model, among other units."""
        rounds = {
            f"{model}/clean_accuracy": _ModelRound(
                own, labels=None, num_items=own[-1].payload.items[-1] + 1
            )
            for model, own in clean.items()
        }
        return RoundLedger(sum(unit.num_items for unit in units), rounds)

    @staticmethod
    def attack(work: Sequence[tuple[ModelUnderAttack, Sequence[Unit]]]) -> "RoundLedger":
        """A round of one attack on the robust items of these models."""
        rounds = {
            f"{model.model}/robust_accuracy": _ModelRound(
                own, labels=model.state.y.numpy(), num_items=len(model.state.y)
            )
            for model, own in work
            if own
        }
        return RoundLedger(sum(unit.num_items for _, own in work for unit in own), rounds)

    def keep(self, unit: Unit, brief: Any) -> None:
        self.done += unit.num_items
        if key := self.own.get(unit.name):
            self.rounds[key].keep(unit, brief)
            self.images += len(next(iter(brief.values())))

    def next(self, room: int, *, ahead: int) -> Sequence[Unit]:
        return ()

    def show(self, bar: ProgressBar) -> None:
        bar.at(self.done)

    def so_far(self) -> SoFar:
        found = {key: own.share() for key, own in self.rounds.items()}
        shares = {key: share for key, share in found.items() if share is not None}
        return SoFar(images=self.images, shares=shares)
