"""A classifier behind a denoiser: the base classifier that smoothing certifies."""

from torch import Tensor, nn

from components.core.types import Images, Logits
from components.denoising.samplers import Draws, Sampler
from components.models.pixels import PixelModel
from components.models.resizing import resized


def no_draws(step: int) -> Tensor:
    """Draws of deterministic samplers: raises an error if called."""
    raise ValueError(f"step {step} of a random sampler needs draws; pass them")


class DenoisedClassifier(nn.Module):
    """f(x + noise) = classify(resize(denoise(x + noise))), with noise of standard deviation sigma.

    The noise is added first, at the image size of the denoiser: radii refer to images of that size,
    not of the classifier's input size. Denoised images are resized for the classifier
    (bicubic, with anti-aliasing), as in Carlini et al. 2023.
    """

    def __init__(
        self, sampler: Sampler, classifier: PixelModel, *, image_size: int, sigma: float
    ) -> None:
        super().__init__()
        channels = classifier.spec.channels
        sampler.denoiser.check(channels=channels, image_size=image_size, sigma=sigma)
        self.denoiser = sampler.denoiser  # registered, so that it moves between devices
        self.sampler, self.classifier, self.sigma = sampler, classifier, sigma
        self.spec = classifier.spec

    def forward(self, noisy: Images, draws: Draws = no_draws) -> Logits:
        clean = self.sampler(noisy, self.sigma, draws)
        logits: Logits = self.classifier(resized(clean, self.classifier.spec.image_size))
        return logits
