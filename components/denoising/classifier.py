"""A classifier behind a denoiser: the base classifier that smoothing certifies."""

from torch import Tensor, nn

from components.core.types import Images, Logits
from components.denoising.samplers import Draws, Sampler
from components.models.pixels import PixelModel
from components.models.resizing import resized


def no_draws(step: int) -> Tensor:
    """For samplers that draw nothing: asking is a mistake, not a source of zeros."""
    raise ValueError(f"step {step} of a random sampler needs draws; pass them")


class DenoisedClassifier(nn.Module):
    """f(x + noise) = classify(resize(denoise(x + noise))), with noise of standard deviation sigma.

    The noise is added before everything here, at the side that the denoiser works at: radii belong
    to images of that side, whatever side the classifier has. What the classifier is fed is enlarged
    or shrunk bicubically with anti-aliasing, as in Carlini et al. 2023.
    """

    def __init__(
        self, sampler: Sampler, classifier: PixelModel, *, image_size: int, sigma: float
    ) -> None:
        super().__init__()
        channels = classifier.spec.channels
        sampler.denoiser.check(channels=channels, image_size=image_size, sigma=sigma)
        self.denoiser = sampler.denoiser  # registered, so that it moves to devices too
        self.sampler, self.classifier, self.sigma = sampler, classifier, sigma
        self.spec = classifier.spec

    def forward(self, noisy: Images, draws: Draws = no_draws) -> Logits:
        clean = self.sampler(noisy, self.sigma, draws)
        logits: Logits = self.classifier(resized(clean, self.classifier.spec.image_size))
        return logits
