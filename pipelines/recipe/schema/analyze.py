"""Analyses of finished models: which models, and a section for each study."""

from collections.abc import Iterator

from components.analyze.settings import (
    AccumulationSettings,
    BlockSettings,
    CorrelationSettings,
    GapSettings,
    LesionSettings,
    PerturbationSettings,
    RestrictedAttentionSettings,
)
from components.core.settings import Count, Name, Problem
from pipelines.recipe.schema.base import ModelsSection

STUDIES = (
    "correlation",
    "lesions",
    "restricted_attention",
    "gaps",
    "perturbations",
    "accumulation",
)


class AnalyzeSection(ModelsSection):
    """Why models behave as they do: studies of test items, each only if it is written."""

    other_models: dict[Name, str] = {}
    """Folders of further models that are analyzed, by their names in results."""
    micro_batch: Count = 50
    """Most rows of a forward pass, except those of CKA: logits depend on the batch shape."""
    blocks: BlockSettings = BlockSettings()
    """Of all models of the section."""
    correlation: CorrelationSettings | None = None
    """Similarity of the features of all pairs of blocks."""
    lesions: LesionSettings | None = None
    """Accuracy without a block, its attention or its MLP."""
    restricted_attention: RestrictedAttentionSettings | None = None
    """Accuracy with attention to near patches only, or from the class token only."""
    gaps: GapSettings | None = None
    """Attention logits, clean and attacked, before and after scaling."""
    perturbations: PerturbationSettings | None = None
    """What adversarial perturbations look like, and who recognises them."""
    accumulation: AccumulationSettings | None = None
    """Images of a class, grown from noise."""

    def problems(self) -> Iterator[Problem]:
        yield from super().problems()
        judges = self.perturbations.judges if self.perturbations else {}
        if both := sorted(set(self.other_models) & set(judges)):
            remedy = "is also in perturbations.judges; choose another name"
            yield Problem("other_models", both[0], remedy)
        if not self.studies():
            yield Problem("studies", "", f"are missing; write one of {', '.join(STUDIES)}")

    def studies(self) -> list[str]:
        """The names of the studies that are made."""
        return [name for name in STUDIES if getattr(self, name) is not None]
