"""The sections of a recipe: frozen pydantic models; every default of the system lives here."""

from pipelines.sections.attack import Attack, PgdAttack
from pipelines.sections.base import Count, Name, Pixels, PositivePixels, Section
from pipelines.sections.certify import (
    Certify,
    ColumnsCertify,
    GaussianCertify,
    L2Challenge,
    PatchChallenge,
)
from pipelines.sections.data import DataSection, ModelSection, SyntheticSection
from pipelines.sections.place import (
    ClusterSection,
    ReportSection,
    StorageSection,
    TrackingSection,
)
from pipelines.sections.train import (
    AugmentSection,
    ColumnsObjective,
    FgsmObjective,
    GaussianObjective,
    Objective,
    StandardObjective,
    TrainSection,
    TuneSection,
    VariantSection,
)

__all__ = [
    "Attack",
    "AugmentSection",
    "Certify",
    "ClusterSection",
    "ColumnsCertify",
    "ColumnsObjective",
    "Count",
    "DataSection",
    "FgsmObjective",
    "GaussianCertify",
    "GaussianObjective",
    "L2Challenge",
    "ModelSection",
    "Name",
    "Objective",
    "PatchChallenge",
    "PgdAttack",
    "Pixels",
    "PositivePixels",
    "ReportSection",
    "Section",
    "StandardObjective",
    "StorageSection",
    "SyntheticSection",
    "TrackingSection",
    "TrainSection",
    "TuneSection",
    "VariantSection",
]
