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
REMAINING = "remaining"  # the same suite on trained models that the section leaves out


def suite_of(part: str) -> str:
    """The suite of a part of the evaluation."""
    return CLEAN if part == REMAINING else part


class EvaluateSection(ModelsSection):
    """What models withstand, measured on test items: clean ones always, the suites if written."""

    subset: SubsetSettings = SubsetSettings()
    """Test items of all suites."""
    micro_batch: Count = 50
    """Rows of every forward pass: logits depend on the batch shape."""
    calibration: CalibrationSettings = CalibrationSettings()
    """Bins of reliability diagrams."""
    corruptions: CorruptionSuiteSettings | None = None
    """Accuracy on corrupted items."""
    shifts: dict[Name, ShiftSuiteSettings] = {}
    """Accuracy on shifted datasets."""
    shape_bias: ShapeBiasSuiteSettings | None = None
    """Shape or texture, on conflict stimuli."""
    transfer: TransferSuiteSettings | None = None
    """Attacked images of each model, given to the others."""
    spatial: SpatialSuiteSettings | None = None
    """Accuracy under rotations and shifts."""

    def suites(self) -> list[str]:
        """The names of the suites that are evaluated, `clean` first."""
        further = ("corruptions", "shifts", "shape_bias", "transfer", "spatial")
        return [CLEAN, *(name for name in further if getattr(self, name))]
