"""A classifier behind a denoiser: the base classifier that smoothing certifies."""

import torch.nn.functional as F
from torch import Tensor, nn

from components.core.types import Images, Logits
from components.denoising.samplers import Draws, Sampler
from components.models.pixels import PixelModel


def resized(images: Images, side: int) -> Images:
    """Bicubic with anti-aliasing, as the classifiers of Carlini et al. 2023 were fed."""
    if images.shape[-1] == side:
        return images
    return F.interpolate(images, size=(side, side), mode="bicubic", antialias=True)


def no_draws(step: int) -> Tensor:
    """For samplers that draw nothing: asking is a mistake, not a source of zeros."""
    raise ValueError(f"step {step} of a random sampler needs draws; pass them")


class DenoisedClassifier(nn.Module):
    """f(x + noise) = classify(resize(denoise(x + noise))), with noise of standard deviation sigma.

    The noise is added before everything here, at the side that the denoiser works at: radii belong
    to images of that side, whatever side the classifier has.
    """

    def __init__(
        self, sampler: Sampler, classifier: PixelModel, *, image_size: int, sigma: float
    ) -> None:
        super().__init__()
        channels = classifier.spec.channels
        sampler.denoiser.check(channels=channels, image_size=image_size, sigma=sigma)
        self.denoiser = sampler.denoiser  # registered, so that it moves to devices too
        self.sampler, self.classifier, self.sigma = sampler, classifier, sigma

    def forward(self, noisy: Images, draws: Draws = no_draws) -> Logits:
        clean = self.sampler(noisy, self.sigma, draws)
        logits: Logits = self.classifier(resized(clean, self.classifier.spec.image_size))
        return logits
