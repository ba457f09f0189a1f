"""Evaluation of finished models: which models and items, and a section for each suite."""

from components.core.settings import Count, Name
from components.evaluate.settings import (
    CalibrationSettings,
    CorruptionSuiteSettings,
    ShapeBiasSuiteSettings,
    ShiftSuiteSettings,
    SpatialSuiteSettings,
    SubsetSettings,
    TransferSuiteSettings,
)
from pipelines.recipe.schema.base import ModelsSection

CLEAN = "clean"  # the suite that is always evaluated


class EvaluateSection(ModelsSection):
    """What models withstand, measured on test items: clean ones always, the suites if written."""

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

    def suites(self) -> list[str]:
        """The names of the suites that are evaluated, `clean` first."""
        further = ("corruptions", "shifts", "shape_bias", "transfer", "spatial")
        return [CLEAN, *(name for name in further if getattr(self, name))]
