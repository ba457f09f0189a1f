"""A denoiser whose answer is known: pixels of clean images are independent Gaussians."""

import pytest
import torch
from torch import nn

from components.denoising.denoiser import Denoiser
from components.denoising.diffusion import Diffusion
from components.models.pixels import PixelModel
from components.models.spec import ModelSpec


class GaussianPrior(nn.Module):
    """The best network for u ~ N(mean, variance): it knows its level only through the time."""

    def __init__(self, diffusion, *, mean=0.2, variance=0.09):
        super().__init__()
        self.diffusion, self.mean, self.variance = diffusion, mean, variance

    def forward(self, noisy, times):
        t = float(times[0]) / self.diffusion.time_scale
        ratio = 2 * self.diffusion.schedule.sigma(t)
        abar = 1 / (1 + ratio**2)
        z = noisy / abar**0.5
        clean = (self.variance * z + ratio**2 * self.mean) / (self.variance + ratio**2)
        noise = (z - clean) / ratio
        return {
            "epsilon": noise,
            "sample": clean,
            "v_prediction": abar**0.5 * noise - (1 - abar) ** 0.5 * clean,
        }[self.diffusion.prediction]


@pytest.fixture
def gaussian_denoiser():
    def make(schedule="cosine", num_timesteps=1000, **settings):
        settings = {"clip_sample": False, **settings}
        diffusion = Diffusion.named(schedule, num_timesteps, **settings)
        return Denoiser(GaussianPrior(diffusion), diffusion, channels=1)

    return make


@pytest.fixture
def no_draws():
    def draw(step):
        raise AssertionError("a deterministic sampler drew")

    return draw


@pytest.fixture
def normals():
    """Seeded standard normals of a shape."""

    def make(*shape, seed=0):
        return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))

    return make


@pytest.fixture
def toy_classifier():
    """A ViT of one block with random weights."""

    def make(*, channels, image_size):
        spec = ModelSpec(
            architecture="tiny_vit",
            num_classes=3,
            channels=channels,
            image_size=image_size,
            mean=(0.5,) * channels,
            std=(0.5,) * channels,
            options={"depth": 1, "embed_dim": 8, "num_heads": 1},
        )
        return PixelModel(spec).eval()

    return make
