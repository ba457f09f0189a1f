"""Noise draws and the fixed shape of every forward pass."""

import numpy as np
import pytest
import torch

from components.certify.l2.noise import noisy_draws, predict_block
from components.core.errors import CasemateError
from components.core.seeding import standard_normal

ADDRESS = {"run_seed": 3, "stream": "estimate", "item_id": "digit-7"}
IMAGE = torch.linspace(0, 1, 2 * 4 * 5).reshape(2, 4, 5)


class Recorder:
    """A linear classifier that remembers the batches it saw."""

    def __init__(self, num_classes=3):
        generator = torch.Generator().manual_seed(0)
        self.weight = torch.randn(IMAGE.numel(), num_classes, generator=generator)
        self.batches = []

    def __call__(self, images):
        self.batches.append(images.clone())
        return images.flatten(1) @ self.weight


def predict(model, start, stop, micro_batch=4, image=IMAGE):
    return predict_block(
        model,
        image,
        sigma=0.5,
        start=start,
        stop=stop,
        micro_batch=micro_batch,
        device="cpu",
        **ADDRESS,
    )


def test_draws_are_image_plus_addressed_noise():
    draws = noisy_draws(IMAGE, sigma=0.25, start=5, stop=8, **ADDRESS)
    assert draws.dtype == torch.float32
    for row, index in zip(draws, (5, 6, 7), strict=True):
        noise = standard_normal(3, "estimate", "digit-7", index, tuple(IMAGE.shape))
        assert np.array_equal(row.numpy(), IMAGE.numpy() + np.float32(0.25) * noise)


def test_draws_are_not_clipped():
    draws = noisy_draws(IMAGE, sigma=0.5, start=0, stop=50, **ADDRESS)
    assert draws.min() < 0
    assert draws.max() > 1
    noise = (draws - IMAGE).flatten()
    assert noise.std().item() == pytest.approx(0.5, rel=0.05)  # 2000 values: 3 standard errors


@pytest.mark.parametrize("sigma", [0.7, 0.1, 0.3, 0.25])
def test_added_noise_is_never_smaller_than_claimed(sigma):
    blank = torch.zeros(1, 1, 1)
    added = noisy_draws(blank, sigma=sigma, start=0, stop=1, **ADDRESS).item()
    unit = float(standard_normal(3, "estimate", "digit-7", 0, (1, 1, 1))[0, 0, 0])
    scale = next(
        s
        for s in (np.float32(sigma), np.nextafter(np.float32(sigma), np.float32(1)))
        if float(s) >= sigma
    )
    assert added == float(scale * np.float32(unit))


def test_every_forward_has_the_same_rows_and_padding_is_discarded():
    model = Recorder()
    predictions = predict(model, 0, 10)
    assert [len(batch) for batch in model.batches] == [4, 4, 4]
    assert predictions.dtype == np.uint16
    assert predictions.shape == (10,)
    tail = model.batches[-1]
    assert torch.equal(tail[2], tail[0])
    assert torch.equal(tail[3], tail[0])


def test_cutting_into_blocks_changes_nothing():
    whole = predict(Recorder(), 0, 22)
    parts = [predict(Recorder(), low, min(low + 8, 22)) for low in (16, 0, 8)]
    assert np.array_equal(np.concatenate([parts[1], parts[2], parts[0]]), whole)
    assert len(set(whole.tolist())) > 1  # otherwise the comparison says nothing


def test_ties_go_to_the_lowest_class():
    predictions = predict(lambda x: torch.tensor([0.0, 2.0, 2.0]).expand(len(x), 3), 0, 3)
    assert predictions.tolist() == [1, 1, 1]


def test_a_block_off_the_grid_is_refused():
    with pytest.raises(ValueError, match="multiple"):
        predict(Recorder(), 2, 6)


@pytest.mark.parametrize("value", [torch.nan, torch.inf])
def test_logits_that_are_not_finite_are_not_votes(value):
    model = Recorder()

    def broken_from_the_second_call(images):
        logits = model(images)
        return logits if len(model.batches) == 1 else logits + value

    with pytest.raises(CasemateError, match=r"item 'digit-7' gets logits .* for draws 4 to 5"):
        predict(broken_from_the_second_call, 0, 6)


@pytest.mark.parametrize(
    "image", [IMAGE + 0.5, IMAGE * torch.nan, IMAGE.double(), IMAGE[None], IMAGE.to(torch.uint8)]
)
def test_images_outside_the_pixel_range_are_refused(image):
    with pytest.raises(ValueError, match=r"expected|pixels"):
        noisy_draws(image, sigma=0.5, start=0, stop=1, **ADDRESS)
