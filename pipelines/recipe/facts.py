"""Facts about a recipe's images and models, before anything runs or once data are prepared.

Needs no torch.
"""

from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from components.certify.settings import CertificateSettings, TrainedModel
from components.core.documents import parse_json
from components.core.folders import Folder
from components.core.settings import plain
from components.data.settings import DataSettings
from components.data.sources import SourceInfo, find_source
from components.models.settings import ModelSettings
from components.models.spec import ModelSpec
from pipelines.recipe.schema.recipe import Recipe

if TYPE_CHECKING:
    from components.data.prepared import PreparedDataset


@dataclass(frozen=True, slots=True, kw_only=True)
class Facts:
    """Images and classes of a dataset; None: not known yet."""

    height: int | None = None
    width: int | None = None
    channels: int | None = None
    num_classes: int | None = None
    classes: tuple[str, ...] | None = None
    """Their names."""
    splits: Mapping[str, int] | None = None
    """Items of each split."""

    @property
    def side(self) -> int | None:
        """The shorter side of the images."""
        return min(self.height, self.width) if self.height and self.width else None

    def updated(self, other: "Facts | None") -> "Facts":
        """These facts, updated by those that `other` has."""
        found = {f.name: getattr(other, f.name) for f in fields(self)} if other else {}
        return replace(self, **{name: value for name, value in found.items() if value is not None})


def facts_of(recipe: Recipe) -> Facts:
    """The facts of the dataset from the recipe and the registry of sources."""
    data, info = recipe.data, source_info(recipe.data)
    side = known_side(data)
    return Facts(
        height=side,
        width=side,
        channels=known_channels(data),
        num_classes=info.num_classes,
        splits=_limited(info.splits, data.limits) if info.splits else None,
    )


def spec_on(section: ModelSettings, facts: Facts) -> ModelSpec:
    """The spec of a section's network on these images; its constructor checks it."""
    assert facts.side is not None
    channels = facts.channels or len(section.mean or section.std or (0, 0, 0))
    return ModelSpec(
        architecture=section.architecture,
        num_classes=facts.num_classes or 2,
        channels=channels,
        image_size=facts.side,
        upsample=section.upsample,
        upsample_mode=section.upsample_mode,
        token_policy=section.token_policy,
        mean=tuple(section.mean or (0.5,) * channels),
        std=tuple(section.std or (0.5,) * channels),
        options=section.options,
    )


def _limited(splits: Mapping[str, int], limits: Mapping[Any, int]) -> dict[str, int]:
    return {name: min(count, limits.get(name, count)) for name, count in splits.items()}


def facts_of_prepared(dataset: "PreparedDataset") -> Facts:
    """The dataset as it was prepared."""
    return Facts(
        height=dataset.height,
        width=dataset.width,
        channels=dataset.channels,
        num_classes=len(dataset.classes),
        classes=tuple(dataset.classes),
        splits=dict(dataset.splits),
    )


def source_info(data: DataSettings) -> SourceInfo:
    """The source with what its options say about the images."""
    return find_source(data.source).with_options(data.options)


def source_side(data: DataSettings) -> int | None:
    """The image side of a source whose images are all squares of one size."""
    return source_info(data).side


def known_side(data: DataSettings) -> int | None:
    """The image side set in the recipe, else that of the source."""
    return data.image_size or source_side(data)


def known_channels(data: DataSettings) -> int | None:
    """The channels set in the recipe, else those of a source with one number of channels."""
    return data.channels or source_info(data).channels


def given_spec(recipe: Recipe) -> Mapping[str, Any] | None:
    """The spec of a given model; None if its folder is not on this machine.

    A damaged model.json is reported where the folder's digest is computed.
    """
    folder = recipe.given_model()
    return spec_of(folder) if folder else None


def spec_of(folder: Folder) -> Mapping[str, Any] | None:
    """The spec of a model folder; None if it is not on this machine or damaged."""
    path = folder / "model.json"
    if not path.is_file():
        return None
    try:
        header = parse_json(path.read_bytes())
    except (OSError, ValueError):
        return None
    spec = header.get("spec") if isinstance(header, dict) else None
    return spec if isinstance(spec, dict) else None


def trained_model(recipe: Recipe, section: CertificateSettings) -> TrainedModel | None:
    """How the model of a certificate is trained: by this recipe, or as recorded in its folder."""
    name = section.model
    if recipe.train:
        behind, objective = recipe.certified_behind(section), recipe.objective_of(name)
        return TrainedModel(
            name,
            plain(objective),
            recipe.model_of(name).token_policy,
            objective=objective,
            denoiser_objective=recipe.objective_of(behind) if behind else None,
            image_size=recipe.data.image_size,
            known_side=known_side(recipe.data),
        )
    spec = given_spec(recipe)
    if spec is None:
        return None
    return TrainedModel(name, spec.get("trained_for") or {}, spec.get("token_policy", "mask"))


def is_here(source: str) -> bool:
    """Whether the folder of a denoiser, `KIND:PATH`, is on this machine."""
    return Path(source.partition(":")[2]).expanduser().is_dir()
