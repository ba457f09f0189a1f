"""Evaluation of finished models: which models and items, and a section for each suite."""

from collections.abc import Iterator

from components.core.settings import Count, Name, Problem
from components.evaluate.settings import (
    CalibrationSettings,
    CorruptionSuiteSettings,
    ShapeBiasSuiteSettings,
    ShiftSuiteSettings,
    SpatialSuiteSettings,
    SubsetSettings,
    TransferSuiteSettings,
)
from pipelines.recipe.schema.base import Section

CLEAN = "clean"  # the suite that is always evaluated


class EvaluateSection(Section):
    """What models withstand, measured on test items: clean ones always, the suites if written."""

    models: list[Name] | None = None
    """None: all classifiers of the recipe."""
    subset: SubsetSettings = SubsetSettings()
    """Test items of all suites."""
    micro_batch: Count = 50
    """Rows of every forward pass: logits depend on the batch shape."""
    calibration: CalibrationSettings = CalibrationSettings()
    corruptions: CorruptionSuiteSettings | None = None
    shifts: dict[Name, ShiftSuiteSettings] = {}
    shape_bias: ShapeBiasSuiteSettings | None = None
    transfer: TransferSuiteSettings | None = None
    spatial: SpatialSuiteSettings | None = None

    def problems(self) -> Iterator[Problem]:
        if self.models == []:
            yield Problem("models", "[]", "is empty; name models, or write null for all")
        if self.models and len(set(self.models)) < len(self.models):
            yield Problem("models", self.models, "names a model twice")

    def suites(self) -> list[str]:
        """The names of the suites that are evaluated, `clean` first."""
        further = ("corruptions", "shifts", "shape_bias", "transfer", "spatial")
        return [CLEAN, *(name for name in further if getattr(self, name))]
