"""The sections of a recipe that describe networks, by their keys in the file."""

from components.models.settings import ModelSettings
from components.models.spec import ModelSpec
from components.train.objectives.settings import ObjectiveSettings
from pipelines.recipe.facts import Facts
from pipelines.recipe.schema.recipe import Recipe

TIMM = "timm"  # as `pretrained`: the weights of timm


def objectives(recipe: Recipe) -> list[tuple[str, ObjectiveSettings]]:
    """The objectives of all models by their keys, `main` first."""
    names = recipe.model_names() if recipe.train else []
    return [
        (f"{recipe.objective_key(name)}.objective", recipe.objective_of(name)) for name in names
    ]


def model_sections(recipe: Recipe) -> list[tuple[str, ModelSettings]]:
    """The key prefix of each `model` section of a trained network, and the section."""
    if recipe.train is None:
        return []
    variants = recipe.train.variants.items()
    own = [(f"train.variants.{name}", part.model) for name, part in variants if part.model]
    return [("", recipe.model), *own]


def joined(above: str, key: str) -> str:
    """A key below a prefix, which may be empty."""
    return ".".join(filter(None, [above, key]))


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
