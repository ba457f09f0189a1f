"""Noise draws and the fixed shape of every forward pass."""

import threading

import numpy as np
import pytest
import torch

from components.certify.l2 import noise
from components.certify.l2.noise import noisy_draws, predict_block
from components.core.errors import CasemateError
from components.core.seeding import DrawSpan, device_normals, standard_normal
from tests.unit.host_syncs import DEVICE, HostSyncs


def span(start, stop):
    return DrawSpan(3, "estimate", "digit-7", start, stop)


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


def predict(model, start, stop, micro_batch=4, image=IMAGE, device="cpu", **settings):
    return predict_block(
        model,
        image,
        span(start, stop),
        sigma=0.5,
        micro_batch=micro_batch,
        device=device,
        **settings,
    )


def test_draws_are_image_plus_addressed_noise():
    draws = noisy_draws(IMAGE, span(5, 8), sigma=0.25)
    assert draws.dtype == torch.float32
    for row, index in zip(draws, (5, 6, 7), strict=True):
        noise = standard_normal(3, "estimate", "digit-7", index, tuple(IMAGE.shape))
        assert np.array_equal(row.numpy(), IMAGE.numpy() + np.float32(0.25) * noise)


def test_draws_are_not_clipped():
    draws = noisy_draws(IMAGE, span(0, 50), sigma=0.5)
    assert draws.min() < 0
    assert draws.max() > 1
    noise = (draws - IMAGE).flatten()
    assert noise.std().item() == pytest.approx(0.5, rel=0.05)  # 2000 values: 3 standard errors


def unit_normal(kind):
    if kind == "numpy":
        return float(standard_normal(3, "estimate", "digit-7", 0, (1, 1, 1))[0, 0, 0])
    return device_normals(span(0, 1), shape=(1, 1, 1), device="cpu").item()


@pytest.mark.parametrize("kind", ["numpy", "philox"])
@pytest.mark.parametrize("sigma", [0.7, 0.1, 0.3, 0.25])
def test_added_noise_is_never_smaller_than_claimed(sigma, kind):
    blank = torch.zeros(1, 1, 1)
    added = noisy_draws(blank, span(0, 1), sigma=sigma, noise=kind).item()
    unit = unit_normal(kind)
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


@pytest.mark.parametrize("kind", ["numpy", "philox"])
def test_cutting_into_blocks_changes_nothing(kind):
    whole = predict(Recorder(), 0, 22, noise=kind)
    parts = [predict(Recorder(), low, min(low + 8, 22), noise=kind) for low in (16, 0, 8)]
    assert np.array_equal(np.concatenate([parts[1], parts[2], parts[0]]), whole)
    assert len(set(whole.tolist())) > 1  # otherwise the comparison says nothing


@pytest.mark.parametrize("cores", [1, 2])
def test_noise_made_ahead_is_the_same(monkeypatch, cores):
    made_by = []

    def watched(*args, **kwargs):
        made_by.append(threading.current_thread())
        return noisy_draws(*args, **kwargs)

    monkeypatch.setattr(noise, "noisy_draws", watched)
    monkeypatch.setattr(noise, "cores_left", lambda used: cores > used)
    monkeypatch.setattr(torch, "get_num_threads", lambda: 1)
    model = Recorder()
    predict(model, 0, 10)
    own = threading.current_thread()
    assert [thread is own for thread in made_by] == [cores == 1] * 3
    for batch, low in zip(model.batches[:2], (0, 4), strict=False):
        assert torch.equal(batch, noisy_draws(IMAGE, span(low, low + 4), sigma=0.5))


def test_a_device_is_waited_for_at_the_end_of_a_block_alone(monkeypatch):
    """Twice in a block, for its predictions and whether they are finite, never in a pass."""
    monkeypatch.setattr(torch, "inference_mode", torch.no_grad)  # the stand-in knows no other
    expected = predict(Recorder(), 0, 22, noise="philox")
    with HostSyncs() as syncs:
        weight = Recorder().weight.to(DEVICE)
        counts = []
        for stop in (4, 22):
            syncs.clear()
            found = predict(lambda x: x.flatten(1) @ weight, 0, stop, noise="philox", device=DEVICE)
            counts.append(syncs.count)
    assert counts == [2, 2], syncs.places
    assert np.array_equal(found, expected)


def test_reduced_precision_classifies_in_it_and_draws_in_float32():
    seen = []

    def model(x):
        seen.append((x.dtype, (x.flatten(1) @ Recorder().weight).dtype))
        return x.flatten(1) @ Recorder().weight

    predict(model, 0, 4, precision="bfloat16")
    predict(model, 0, 4)
    assert seen == [(torch.float32, torch.bfloat16), (torch.float32, torch.float32)]


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
        noisy_draws(image, span(0, 1), sigma=0.5)
