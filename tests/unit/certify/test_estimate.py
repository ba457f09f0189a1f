"""Costs before they are paid, against published timings and a count of the real network."""

from dataclasses import replace

import pytest
from torch import nn

from components.certify.cost import NO_DENOISER, CostedModel
from components.certify.estimate import (
    device_bytes,
    estimate,
    fits,
    l2_work,
    measured_rate,
    nominal_rate,
    patch_work,
    vit_flops,
)
from components.certify.patch.cost import ablation_lengths
from components.certify.patch.settings import AblationSettings
from components.core.errors import CasemateError
from components.models.costs import costs_of_shapes, network_of_shapes

CIFAR = l2_work(
    num_items=10_000,
    num_select=100,
    num_estimate=100_000,
    classifier_flops=35.1e9,
    denoiser_flops=16.8e9,
)
VIT = {"width": 768, "depth": 12, "num_classes": 1000, "token_inputs": 3 * 16 * 16}


def test_published_hours_of_denoised_smoothing():
    # 825 draws a second on one A100: 10,000 images of 100,000 draws take 337 hours
    rate = measured_rate(flops_per_pass=51.9e9, passes_per_second=825, where="on one A100")
    found = estimate(CIFAR, rate)
    assert CIFAR.flops == pytest.approx(5.2e19, rel=0.01)
    assert found.passes == 10_000 * 100_100
    assert found.hours_high == pytest.approx(337 * 1.001 / 0.95, rel=1e-3)  # n0, and idle workers
    assert found.votes_bytes == 2 * found.passes
    guessed = estimate(CIFAR, nominal_rate("A100", dtype="tf32", width=768))
    assert 337 / 2 < guessed.hours_high < 337 * 2  # what an estimate without a device promises
    assert "not measured" in guessed.rate.source


def test_published_share_of_the_peak():
    rate = measured_rate(flops_per_pass=51.9e9, passes_per_second=825, where="on one A100")
    assert rate.flops_per_second == pytest.approx(42.8e12, rel=1e-3)
    slow = nominal_rate("A100", dtype="tf32", width=192).flops_per_second
    assert slow == pytest.approx(0.08 * 156e12)
    assert nominal_rate("A100", dtype="tf32", width=384).flops_per_second == 0.15 * 156e12


def test_hours_shrink_with_workers_and_early_stops_but_not_below_the_start():
    rate = nominal_rate("H100", dtype="bf16", width=768)
    one = estimate(CIFAR, rate)
    many = estimate(CIFAR, rate, num_workers=8, least_share=0.2)
    assert many.hours_high == pytest.approx(one.hours_high / 8)
    assert many.hours_low == pytest.approx(one.hours_high / 40)
    late = estimate(CIFAR, rate, num_workers=8, start_seconds=90, unit_seconds=10)
    assert late.hours_high - many.hours_high == pytest.approx(100 / 3600)
    with pytest.raises(ValueError, match="share"):
        estimate(CIFAR, rate, least_share=0.0)


def test_many_denoising_steps_multiply_the_denoiser_only():
    one_draw = {"num_items": 1, "num_select": 0, "num_estimate": 1}
    steps = l2_work(**one_draw, classifier_flops=10.0, denoiser_flops=3.0, denoiser_calls=35)
    assert steps.flops == 10 + 35 * 3


def kept_tokens(*, side: int, band: int, stride: int, upsample: int | None = None):
    settings = AblationSettings(kind="columns", patch_sizes=(1,), band=band, stride=stride)
    model = CostedModel(
        key="", net=nn.Identity(), costs=NO_DENOISER, channels=3, num_classes=10, side=side,
        upsample=upsample, upsample_mode="nearest", token_policy="drop", trained_ablation=None,
    )  # fmt: skip
    return ablation_lengths(settings, model, token=(16, 16))


@pytest.mark.parametrize(
    ("shape", "lengths"),
    [
        ({"side": 224, "band": 19, "stride": 1}, {28: 196, 42: 28}),
        ({"side": 224, "band": 25, "stride": 1}, {28: 112, 42: 112}),
        ({"side": 224, "band": 37, "stride": 1}, {42: 168, 56: 56}),
        ({"side": 224, "band": 19, "stride": 8}, {28: 28}),
        ({"side": 32, "band": 4, "stride": 1, "upsample": 224}, {28: 10, 42: 22}),
    ],
)
def test_published_token_counts(shape, lengths):
    assert kept_tokens(**shape) == lengths


def test_published_flops_of_a_smoothed_vit():
    lengths = kept_tokens(side=224, band=19, stride=1)
    own = patch_work(num_items=50_000, bands_of_length=lengths, **VIT)
    # The published code embeds the whole masked image for each band.
    hidden = 224 * 196 - sum(kept * bands for kept, bands in lengths.items())
    plain = replace(own, flops_per_item=own.flops_per_item + 2 * 768 * 768 * hidden)
    assert plain.flops == pytest.approx(6.2e16, rel=0.01)
    # 31.51 s per 1,024 images were published: 0.43 A100 hours for 50,000
    hours = estimate(plain, nominal_rate("A100", dtype="tf32", width=768)).hours_high
    assert 0.43 / 2 < hours < 0.43 * 2


def test_flops_of_blocks_equal_a_count_of_the_real_network():
    net = network_of_shapes("vit_tiny_patch16_224", image_size=224, num_classes=10)
    counted = 2 * costs_of_shapes(net, image_size=224).flops
    embedding, head = 2 * 196 * 768 * 192, 2 * 192 * 10
    assert vit_flops(197, width=192, depth=12) + embedding + head == pytest.approx(counted)


def test_memory():
    assert device_bytes(params=10, activation_bytes=8, micro_batch=4, dtype="fp32") == 72
    assert device_bytes(params=10, activation_bytes=8, micro_batch=4, dtype="bf16") == 36
    assert fits(int(14e9), "T4")
    assert not fits(int(15e9), "T4")


def test_what_is_not_known_is_refused():
    with pytest.raises(CasemateError, match="A100"):
        nominal_rate("Z80", dtype="tf32", width=768)
    with pytest.raises(CasemateError, match="fp16"):
        nominal_rate("V100", dtype="bf16", width=768)
    with pytest.raises(CasemateError, match="A100"):
        fits(1, "Z80")
    with pytest.raises(CasemateError, match="bf16"):
        device_bytes(params=1, activation_bytes=1, micro_batch=1, dtype="int8")
    with pytest.raises(ValueError, match="positive"):
        measured_rate(flops_per_pass=1.0, passes_per_second=0.0, where="nowhere")
