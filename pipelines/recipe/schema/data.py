"""Images and models."""

from typing import Annotated, Any, Literal, Self

from pydantic import AfterValidator, Field, model_validator
from pydantic_core import PydanticCustomError

from components.core.errors import CasemateError
from components.data.sources import SOURCE_NAMES, find_source
from components.core.hints import did_you_mean
from pipelines.recipe.schema.base import Count, Section


def _known_source(name: str) -> str:
    try:
        find_source(name)
    except CasemateError:
        hint = did_you_mean(name, SOURCE_NAMES)
        raise PydanticCustomError("source", "{hint}", {"hint": hint}) from None
    return name


SourceName = Annotated[str, AfterValidator(_known_source)]


def _check_path(source: str, path: str | None, *, key: str) -> None:
    """A path exactly where the source reads files."""
    wanted = find_source(source).path
    if wanted == "none" and path is not None:
        raise PydanticCustomError(
            "path", f"{key} would be ignored: this source is embedded; remove it"
        )
    if wanted == "needed" and path is None:
        raise PydanticCustomError(
            "path", f"{key} is missing: this source reads files; name their place"
        )


class SyntheticSection(Section):
    """Generated training images, mixed into every batch at equal batch size."""

    source: SourceName = "npz"
    path: str | None = None
    options: dict[str, Any] = {}
    ratio: float = Field(default=0.5, gt=0, lt=1)  # share of every batch that is generated

    @model_validator(mode="after")
    def _path_where_needed(self) -> Self:
        _check_path(self.source, self.path, key="data.synthetic.path")
        return self


class DataSection(Section):
    """Which images, how they are split and fitted to one size; `casemate data` lists sources."""

    source: SourceName
    path: str | None = None  # folder, file or dataset root, as the source wants it
    options: dict[str, Any] = {}  # of the source, e.g. severity
    image_size: Count | None = None  # None: as stored, all items alike
    fit: Literal["pad", "resize", "crop"] = "pad"
    resize: Count | None = None  # short side before `fit: crop`; None: image_size
    train_size: Count | None = None  # training images are stored this large, for random crops
    channels: Literal[1, 3] | None = None  # None: as the source
    split_seed: int = Field(default=0, ge=0)  # not the recipe's: test items stay test items
    val_fraction: float = Field(default=0.1, gt=0, lt=1)  # where the source has no val split
    test_fraction: float = Field(default=0.2, gt=0, lt=1)  # where the source has no test split
    limits: dict[Literal["train", "val", "test", "synthetic"], Count] = {}
    on_error: Literal["fail", "skip"] = "fail"
    shard_size: Count = 1024
    synthetic: SyntheticSection | None = None

    @model_validator(mode="after")
    def _path_where_needed(self) -> Self:
        _check_path(self.source, self.path, key="data.path")
        if self.val_fraction + self.test_fraction >= 1:
            raise PydanticCustomError(
                "fractions", "val_fraction + test_fraction leave nothing to train on"
            )
        return self


class ModelSection(Section):
    """An architecture, its input adapter and the weights it starts from."""

    architecture: str = "tiny_vit"  # `casemate models` lists those of the papers
    options: dict[str, Any] = {}  # arguments of the architecture, e.g. patch_size
    upsample: Count | None = None  # side that the network sees; None: the data's own
    upsample_mode: Literal["nearest", "bilinear", "bicubic"] = "nearest"
    mean: list[float] | None = None  # None: 0.5 in every channel
    std: list[float] | None = None
    token_policy: Literal["drop", "mask"] = "mask"
    # `timm`, or a model folder; of a denoiser diffusers:PATH or model:PATH; None: random weights
    pretrained: str | None = None
