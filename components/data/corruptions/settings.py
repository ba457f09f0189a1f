"""The 19 corruptions of ImageNet-C and CIFAR-10-C with their published constants.

Names, groups and constants are those of Hendrycks & Dietterich 2019, "Benchmarking Neural Network
Robustness to Common Corruptions and Perturbations", and of the scripts that generated the released
images (224 px and 32 px). A row of constants belongs to a severity, 1 to 5; the docstring of a
class names its columns. The order of the classes numbers the corruptions and their random streams,
so a new one goes to the end. Each is implemented in the module that its entry names.
"""

from dataclasses import fields
from typing import Annotated, Any, ClassVar, Literal

from annotated_types import Ge, Le

from components.core.registry import Registry
from components.core.settings import Settings, settings
from components.data.sources.names import SEVERITIES

Group = Literal["noise", "blur", "weather", "digital", "extra"]
Fidelity = Literal["raw", "released"]
Severity = Annotated[int, Ge(1), Le(5)]
Row = tuple[float, ...]
Rows = tuple[Row, Row, Row, Row, Row]
SMALL_SIDE = 64  # shorter sides use the constants of 32 px
PUBLISHED_SIZES = ((224, 224), (32, 32))
CORRUPTIONS = Registry("corruption")


def _column(*values: float) -> Any:
    """Five rows of one constant each."""
    return tuple((value,) for value in values)


class CorruptionSettings(Settings):
    """Base of all corruptions: group and constants."""

    __slots__ = ()

    kind: str
    group: ClassVar[Group]
    at_224: ClassVar[Rows]
    at_32: ClassVar[Rows]

    def constants(self, severity: int, height: int, width: int) -> Row:
        """Constants of a severity for images of this size."""
        table = self.at_32 if min(height, width) < SMALL_SIDE else self.at_224
        return table[severity - 1]

    def flags(self, height: int, width: int) -> list[str]:
        """Why accuracies on such images are not comparable with published ones; sorted."""
        return [] if (height, width) in PUBLISHED_SIZES else ["nonstandard_resolution"]


def unit_of(name: str, severity: int) -> int:
    """Number of the variant: 5 times the corruption's place among the 19, plus severity - 1."""
    return list(CORRUPTIONS).index(name) * len(SEVERITIES) + severity - 1


def options_of(name: str, *, textures: str | None) -> dict[str, Any]:
    """Those of the options of a suite that the corruption has."""
    own = {field.name for field in fields(CORRUPTIONS[name].settings)}
    return {"textures": textures} if "textures" in own else {}


def flags_of(name: str, *, height: int, width: int, textures: str | None = None) -> list[str]:
    """The flags of a corruption by name."""
    made: CorruptionSettings = CORRUPTIONS[name].settings(**options_of(name, textures=textures))
    return made.flags(height, width)


@CORRUPTIONS.register("components.data.corruptions.noise:GaussianNoise")
@settings
class GaussianNoiseSettings(CorruptionSettings):
    """Standard deviation."""

    kind: Literal["gaussian_noise"] = "gaussian_noise"
    group = "noise"
    at_224 = _column(0.08, 0.12, 0.18, 0.26, 0.38)
    at_32 = _column(0.04, 0.06, 0.08, 0.09, 0.10)


@CORRUPTIONS.register("components.data.corruptions.noise:ShotNoise")
@settings
class ShotNoiseSettings(CorruptionSettings):
    """Photons at full scale."""

    kind: Literal["shot_noise"] = "shot_noise"
    group = "noise"
    at_224 = _column(60, 25, 12, 5, 3)
    at_32 = _column(500, 250, 100, 75, 50)


@CORRUPTIONS.register("components.data.corruptions.noise:ImpulseNoise")
@settings
class ImpulseNoiseSettings(CorruptionSettings):
    """Share of replaced elements."""

    kind: Literal["impulse_noise"] = "impulse_noise"
    group = "noise"
    at_224 = _column(0.03, 0.06, 0.09, 0.17, 0.27)
    at_32 = _column(0.01, 0.02, 0.03, 0.05, 0.07)


@CORRUPTIONS.register("components.data.corruptions.defocus:DefocusBlur")
@settings
class DefocusBlurSettings(CorruptionSettings):
    """Radius of the disk, sigma of its anti-aliasing."""

    kind: Literal["defocus_blur"] = "defocus_blur"
    group = "blur"
    at_224 = ((3, 0.1), (4, 0.5), (6, 0.5), (8, 0.5), (10, 0.5))
    at_32 = ((0.3, 0.4), (0.4, 0.5), (0.5, 0.6), (1, 0.2), (1.5, 0.1))


@CORRUPTIONS.register("components.data.corruptions.glass:GlassBlur")
@settings
class GlassBlurSettings(CorruptionSettings):
    """Sigma, largest shift, rounds."""

    kind: Literal["glass_blur"] = "glass_blur"
    group = "blur"
    at_224 = ((0.7, 1, 2), (0.9, 2, 1), (1, 2, 3), (1.1, 3, 2), (1.5, 4, 2))
    at_32 = ((0.05, 1, 1), (0.25, 1, 1), (0.4, 1, 1), (0.25, 1, 2), (0.4, 1, 2))


@CORRUPTIONS.register("components.data.corruptions.blur:MotionBlur")
@settings
class MotionBlurSettings(CorruptionSettings):
    """Radius, sigma."""

    kind: Literal["motion_blur"] = "motion_blur"
    group = "blur"
    at_224 = ((10, 3), (15, 5), (15, 8), (15, 12), (20, 15))
    at_32 = ((6, 1), (6, 1.5), (6, 2), (8, 2), (9, 2.5))


@CORRUPTIONS.register("components.data.corruptions.blur:ZoomBlur")
@settings
class ZoomBlurSettings(CorruptionSettings):
    """Number of zoom factors, their step; the first is 1."""

    kind: Literal["zoom_blur"] = "zoom_blur"
    group = "blur"
    at_224 = ((12, 0.01), (16, 0.01), (11, 0.02), (13, 0.02), (11, 0.03))
    at_32 = ((7, 0.01), (12, 0.01), (16, 0.01), (21, 0.01), (26, 0.01))


@CORRUPTIONS.register("components.data.corruptions.snow:Snow")
@settings
class SnowSettings(CorruptionSettings):
    """Mean, deviation, zoom and threshold of the flakes; radius, sigma; weight of the image."""

    kind: Literal["snow"] = "snow"
    group = "weather"
    at_224 = (
        (0.1, 0.3, 3, 0.5, 10, 4, 0.8),
        (0.2, 0.3, 2, 0.5, 12, 4, 0.7),
        (0.55, 0.3, 4, 0.9, 12, 8, 0.7),
        (0.55, 0.3, 4.5, 0.85, 12, 8, 0.65),
        (0.55, 0.3, 2.5, 0.85, 12, 12, 0.55),
    )
    at_32 = (
        (0.1, 0.2, 1, 0.6, 8, 3, 0.95),
        (0.1, 0.2, 1, 0.5, 10, 4, 0.9),
        (0.15, 0.3, 1.75, 0.55, 10, 4, 0.9),
        (0.25, 0.3, 2.25, 0.6, 12, 6, 0.85),
        (0.3, 0.3, 1.25, 0.65, 14, 12, 0.8),
    )


@CORRUPTIONS.register("components.data.corruptions.frost:Frost")
@settings
class FrostSettings(CorruptionSettings):
    """Weight of the image, weight of the texture."""

    kind: Literal["frost"] = "frost"
    group = "weather"
    at_224 = ((1, 0.4), (0.8, 0.6), (0.7, 0.7), (0.65, 0.7), (0.6, 0.75))
    at_32 = ((1, 0.2), (1, 0.3), (0.9, 0.4), (0.85, 0.4), (0.75, 0.45))
    textures: str | None = None
    """Folder with the published photographs frost1 to frost5; None: procedural textures."""

    def flags(self, height: int, width: int) -> list[str]:
        procedural = ["procedural_frost"] if self.textures is None else []
        return sorted(CorruptionSettings.flags(self, height, width) + procedural)


@CORRUPTIONS.register("components.data.corruptions.fog:Fog")
@settings
class FogSettings(CorruptionSettings):
    """Density, decay of the plasma's roughness."""

    kind: Literal["fog"] = "fog"
    group = "weather"
    at_224 = ((1.5, 2), (2, 2), (2.5, 1.7), (2.5, 1.5), (3, 1.4))
    at_32 = ((0.2, 3), (0.5, 3), (0.75, 2.5), (1, 2), (1.5, 1.75))


@CORRUPTIONS.register("components.data.corruptions.colour:Brightness")
@settings
class BrightnessSettings(CorruptionSettings):
    """Added to the value of HSV."""

    kind: Literal["brightness"] = "brightness"
    group = "weather"
    at_224 = _column(0.1, 0.2, 0.3, 0.4, 0.5)
    at_32 = _column(0.05, 0.1, 0.15, 0.2, 0.3)


@CORRUPTIONS.register("components.data.corruptions.colour:Contrast")
@settings
class ContrastSettings(CorruptionSettings):
    """Factor on the distance to the mean."""

    kind: Literal["contrast"] = "contrast"
    group = "digital"
    at_224 = _column(0.4, 0.3, 0.2, 0.1, 0.05)
    at_32 = _column(0.75, 0.5, 0.4, 0.3, 0.15)


@CORRUPTIONS.register("components.data.corruptions.elastic:ElasticTransform")
@settings
class ElasticTransformSettings(CorruptionSettings):
    """Strength, sigma and largest affine jitter, all in pixels; 244 px is the published unit."""

    kind: Literal["elastic_transform"] = "elastic_transform"
    group = "digital"
    at_224 = (
        (244 * 2, 244 * 0.7, 244 * 0.1),
        (244 * 2, 244 * 0.08, 244 * 0.2),
        (244 * 0.05, 244 * 0.01, 244 * 0.02),
        (244 * 0.07, 244 * 0.01, 244 * 0.02),
        (244 * 0.12, 244 * 0.01, 244 * 0.02),
    )
    at_32 = (
        (0, 0, 32 * 0.08),
        (32 * 0.05, 32 * 0.2, 32 * 0.07),
        (32 * 0.08, 32 * 0.06, 32 * 0.06),
        (32 * 0.1, 32 * 0.04, 32 * 0.05),
        (32 * 0.1, 32 * 0.03, 32 * 0.03),
    )


@CORRUPTIONS.register("components.data.corruptions.encoding:Pixelate")
@settings
class PixelateSettings(CorruptionSettings):
    """Share of the side that is kept."""

    kind: Literal["pixelate"] = "pixelate"
    group = "digital"
    at_224 = _column(0.6, 0.5, 0.4, 0.3, 0.25)
    at_32 = _column(0.95, 0.9, 0.85, 0.75, 0.65)


@CORRUPTIONS.register("components.data.corruptions.encoding:JpegCompression")
@settings
class JpegCompressionSettings(CorruptionSettings):
    """Quality."""

    kind: Literal["jpeg_compression"] = "jpeg_compression"
    group = "digital"
    at_224 = _column(25, 18, 15, 10, 7)
    at_32 = _column(80, 65, 58, 50, 40)


@CORRUPTIONS.register("components.data.corruptions.noise:SpeckleNoise")
@settings
class SpeckleNoiseSettings(CorruptionSettings):
    """Standard deviation, relative to the pixel."""

    kind: Literal["speckle_noise"] = "speckle_noise"
    group = "extra"
    at_224 = _column(0.15, 0.2, 0.35, 0.45, 0.6)
    at_32 = _column(0.06, 0.1, 0.12, 0.16, 0.2)


@CORRUPTIONS.register("components.data.corruptions.blur:GaussianBlur")
@settings
class GaussianBlurSettings(CorruptionSettings):
    """Sigma."""

    kind: Literal["gaussian_blur"] = "gaussian_blur"
    group = "extra"
    at_224 = _column(1, 2, 3, 4, 6)
    at_32 = _column(0.4, 0.6, 0.7, 0.8, 1)


@CORRUPTIONS.register("components.data.corruptions.spatter:Spatter")
@settings
class SpatterSettings(CorruptionSettings):
    """Mean and deviation of the liquid, sigma, threshold, strength; 0 is water, 1 is mud."""

    kind: Literal["spatter"] = "spatter"
    group = "extra"
    at_224 = (
        (0.65, 0.3, 4, 0.69, 0.6, 0),
        (0.65, 0.3, 3, 0.68, 0.6, 0),
        (0.65, 0.3, 2, 0.68, 0.5, 0),
        (0.65, 0.3, 1, 0.65, 1.5, 1),
        (0.67, 0.4, 1, 0.65, 1.5, 1),
    )
    at_32 = (
        (0.62, 0.1, 0.7, 0.7, 0.5, 0),
        (0.65, 0.1, 0.8, 0.7, 0.5, 0),
        (0.65, 0.3, 1, 0.69, 0.5, 0),
        (0.65, 0.1, 0.7, 0.69, 0.6, 1),
        (0.65, 0.1, 0.5, 0.68, 0.6, 1),
    )


@CORRUPTIONS.register("components.data.corruptions.colour:Saturate")
@settings
class SaturateSettings(CorruptionSettings):
    """Factor on the saturation of HSV, and what is added to it."""

    kind: Literal["saturate"] = "saturate"
    group = "extra"
    at_224 = ((0.3, 0), (0.1, 0), (2, 0), (5, 0.1), (20, 0.2))
    at_32 = ((0.3, 0), (0.1, 0), (1.5, 0), (2, 0.1), (2.5, 0.2))
