"""Picture grids: perturbations of several models on the same items, images grown from noise."""

from collections.abc import Mapping, Sequence

from components.core.shares import measured_percent
from components.core.types import Array, FloatArray, IntArray
from components.report.content import Gallery, Picture, Strip
from components.report.pictures import gray, png_uri, reduced, reduction


def perturbation_gallery(
    originals: Array,
    pictures: Mapping[str, Array],
    labels: IntArray,
    *,
    classes: Sequence[str],
    eps_text: str,
) -> Gallery:
    """One strip per item: the image, then the luma of every model's rescaled perturbation.

    Images are (N, C, H, W) in [0, 1], `pictures` by model.
    """
    strips = []
    for row, label in enumerate(labels):
        name = classes[int(label)]
        seen = [Picture(_uri(originals[row]), f"original, {name}", "original")]
        seen += [
            Picture(_uri(gray(images[row])), f"perturbation of {model}, {name}", model)
            for model, images in pictures.items()
        ]
        strips.append(Strip(f"label {name}", tuple(seen)))
    caption = (
        f"Perturbations of l-inf size {eps_text}, rescaled: mid gray is unchanged, white and black "
        "are pixels raised and lowered by the whole budget; colours as their luma."
    )
    return Gallery("Perturbations of the same items", caption + _size_of(originals), tuple(strips))


def accumulation_gallery(
    seeds: Array,
    results: Mapping[str, tuple[Array, FloatArray]],
    targets: IntArray,
    *,
    classes: Sequence[str],
    preset_text: str,
) -> Gallery:
    """One strip per seed image: the noise, then what each model makes of it, with the confidence.

    `results` hold images (N, C, H, W) and the probability of the target (N,) by model.
    """
    strips = []
    for row, target in enumerate(targets):
        name = classes[int(target)]
        seen = [Picture(_uri(seeds[row]), "uniform noise", "seed")]
        seen += [
            Picture(
                _uri(images[row]),
                f"{model} from noise to {name}",
                f"{model}: {measured_percent(float(confidence[row]))}%",
            )
            for model, (images, confidence) in results.items()
        ]
        strips.append(Strip(f"target {name}", tuple(seen)))
    caption = f"Steps along the gradient of one class, from the same noise: {preset_text}. "
    caption += "Below each picture the probability of the target."
    return Gallery("Images grown from noise", caption + _size_of(seeds), tuple(strips))


def _uri(image: Array) -> str:
    return png_uri(reduced(image))


def _size_of(images: Array) -> str:
    """The end of a caption: at which size pictures are shown, if not at their own."""
    factor = reduction(images[0])
    if factor == 1:
        return ""
    return f" A shown pixel is the mean of {factor} x {factor}; pictures/*.npy have all."
