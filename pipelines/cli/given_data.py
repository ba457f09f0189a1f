"""The data of commands without a recipe: sizes that a model can take over."""

from collections.abc import Mapping, Sequence
from typing import Any

from components.core.folders import Folder
from components.models.places.registry import ModelFacts

SIZES = ("image_size", "channels", "num_classes")


def sizes_of(
    source: Mapping[str, Any],
    prepared: Folder | None,
    *,
    overrides: Sequence[str],
    wanted: Sequence[str],
) -> ModelFacts:
    """Sizes of the images and the number of classes; None: they vary.

    What the registry does not know of a source is read from its files if it is `wanted`, the sizes
    as `casemate init` finds them.
    """
    if prepared is not None:
        from components.data.prepared import PreparedDataset

        dataset = PreparedDataset.open(prepared)
        side = dataset.height if dataset.height == dataset.width else None
        return ModelFacts(
            image_size=side, channels=dataset.channels, num_classes=len(dataset.classes)
        )
    from components.data.sources import find_source, open_source

    data = _with_overrides(source, overrides)
    options = data["options"]
    info = find_source(source["source"]).with_options(options)
    known = ModelFacts(
        image_size=data.get("image_size") or info.side,
        channels=data.get("channels") or info.channels,
        num_classes=info.num_classes,
    )
    missing = [key for key in SIZES if key in wanted and getattr(known, key) is None]
    if not missing or (info.path == "needed" and not data["path"]):
        return known
    opened = open_source(source["source"], path=data["path"], options=options)
    if "image_size" in missing or "channels" in missing:
        known = known.or_else(_looked_at(source["source"], data))
    return known.or_else(ModelFacts(num_classes=len(opened.classes)))


def _with_overrides(source: Mapping[str, Any], overrides: Sequence[str]) -> dict[str, Any]:
    """The data section as far as it is known before the model; its recipe is checked later."""
    from pipelines.recipe.load import override_keys

    values: dict[str, Any] = {"data": dict(source)}
    override_keys(values, [text for text in overrides if text.strip().startswith("data.")])
    data: dict[str, Any] = values["data"]
    options = data.get("options")
    return {**data, "options": options if isinstance(options, dict) else {}}


def _looked_at(source: str, data: Mapping[str, Any]) -> ModelFacts:
    """The side and the channels, where the images agree."""
    from components.data.inspection import inspect
    from components.data.sources.recognition import Recognised

    found = inspect(Recognised(source, data["path"], data["options"]))
    channels = found.channels[0] if len(found.channels) == 1 else None
    return ModelFacts(image_size=found.sizes.square_side, channels=channels)
