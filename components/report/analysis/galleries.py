"""Picture grids: perturbations of several models on the same items, images grown from noise."""

from collections.abc import Mapping, Sequence

from components.core.types import Array, FloatArray, IntArray
from components.report.content import Gallery, Picture, Strip
from components.report.pictures import png_uri


def perturbation_gallery(
    originals: Array,
    pictures: Mapping[str, Array],
    labels: IntArray,
    *,
    classes: Sequence[str],
    eps_text: str,
) -> Gallery:
    """One strip per item: the image, then the rescaled perturbation of every model.

    Images are (N, C, H, W) in [0, 1], `pictures` by model.
    """
    strips = []
    for row, label in enumerate(labels):
        name = classes[int(label)]
        seen = [Picture(png_uri(originals[row]), f"original, {name}", "original")]
        seen += [
            Picture(png_uri(images[row]), f"perturbation of {model}, {name}", model)
            for model, images in pictures.items()
        ]
        strips.append(Strip(f"label {name}", tuple(seen)))
    caption = (
        f"Perturbations of l-inf size {eps_text}, rescaled: mid gray is unchanged, white and black "
        "are pixels raised and lowered by the whole budget."
    )
    return Gallery("Perturbations of the same items", caption, tuple(strips))


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
        seen = [Picture(png_uri(seeds[row]), "uniform noise", "seed")]
        seen += [
            Picture(
                png_uri(images[row]),
                f"{model} from noise to {name}",
                f"{model}: {100 * float(confidence[row]):.1f}%",
            )
            for model, (images, confidence) in results.items()
        ]
        strips.append(Strip(f"target {name}", tuple(seen)))
    caption = f"Steps along the gradient of one class, from the same noise: {preset_text}. "
    caption += "Below each picture the probability of the target."
    return Gallery("Images grown from noise", caption, tuple(strips))
