"""Pictures of perturbations, patch alignment, judges, and images grown from noise."""

import math

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn

from components.analyze.accumulation import accumulate, seed_images
from components.analyze.pictures import (
    EdgeState,
    alignment_measurements,
    gray,
    patch_size_of,
    perturbed_images,
    to_picture,
)
from components.analyze.semantics import Judge, fitted, judged, measurements
from components.analyze.settings import AccumulationSettings, PerturbationSettings
from components.analyze.states import merge_all, read_arrays, to_table
from components.attacks.gradients import attack_mode
from components.attacks.interface import Items
from components.core.errors import CasemateError
from components.core.settings import SettingError

EPS = 4 / 255


def generator(seed=0):
    return torch.Generator().manual_seed(seed)


def test_zero_is_mid_gray_and_the_budget_is_black_and_white():
    for dtype in (torch.float32, torch.float64):
        for eps in (EPS, 3 / 255, 7 / 255, 0.1, 0.3):
            limit = torch.tensor(eps, dtype=dtype)
            delta = torch.stack([-limit, torch.zeros_like(limit), limit, limit / 2])
            assert to_picture(delta, eps=eps).tolist() == [0, 0.5, 1, 0.75]
    beyond = torch.tensor([-2.0, 2.0])
    assert to_picture(beyond, eps=EPS).tolist() == [0, 1]  # rounding may leave the ball


def test_gray_is_luma():
    colours = torch.eye(3)[:, :, None, None]
    assert gray(colours).flatten().tolist() == pytest.approx([0.299, 0.587, 0.114])
    one = torch.rand(2, 1, 3, 3, generator=generator())
    assert torch.equal(gray(one), one[:, 0])
    with pytest.raises(ValueError, match="one or three channels"):
        gray(torch.zeros(1, 2, 3, 3))


def test_perturbations_belong_to_items_and_fill_the_budget(new_net, x):
    net, how = new_net("vit"), PerturbationSettings(num_steps=10)
    y = torch.arange(len(x)) % 5  # also for items that are wrong already
    items = Items(x, y, tuple("abcdef"), run_seed=3)
    with attack_mode(net):
        x_adv = perturbed_images(net, items, how)
        alone = perturbed_images(net, items.take(torch.tensor([4])), how)
    delta = x_adv - x
    assert float(delta.abs().max()) <= EPS
    assert (delta.abs().flatten(1).amax(dim=1) > 0.9 * EPS).all()
    assert float((alone - x_adv[4:5]).abs().max()) < 1e-3
    losses = [F.cross_entropy(net(z), y, reduction="none") for z in (x, x_adv)]
    assert (losses[1] > losses[0]).all()
    assert PerturbationSettings().step_size_at() == pytest.approx(1.5 * EPS / 100)


def tiles(patch, *, size=32, noise=0.0, num=4):
    """Random perturbations that are constant inside patches."""
    cells = torch.randn(num, 3, size // patch, size // patch, generator=generator(1))
    whole = cells.repeat_interleave(patch, dim=2).repeat_interleave(patch, dim=3)
    return whole + noise * torch.randn(num, 3, size, size, generator=generator(2))


def slow_score(delta, patch, shift=0):
    """The definition as loops."""
    levels = (delta.double() * torch.tensor([0.299, 0.587, 0.114])[:, None, None]).sum(dim=1)
    ratios = []
    for axis in (2, 1):
        at, elsewhere = [], []
        for place in range(delta.shape[-1] - 1):
            pair = levels.index_select(axis, torch.tensor([place, place + 1]))
            change = float(pair.diff(dim=axis).abs().mean())
            own = place % patch == (patch - 1 + shift) % patch
            (at if own else elsewhere).append(change)
        ratios.append(np.mean(at) / np.mean(elsewhere))
    return float(np.mean(ratios))


def test_alignment_equals_the_definition():
    delta = tiles(8, noise=0.5)
    found = EdgeState.of(delta).alignment(8)
    scores = [slow_score(delta, 8, shift) for shift in range(8)]
    assert found.score == pytest.approx(scores[0], rel=1e-6)
    others = np.array(scores[1:])
    assert found.z == pytest.approx((scores[0] - others.mean()) / others.std(ddof=1), rel=1e-4)
    assert found.rank == 1


@pytest.mark.parametrize("patch", [2, 4, 8, 16])
def test_tiles_score_high_on_their_own_patch_only(patch):
    found = EdgeState.of(tiles(patch, noise=0.02)).alignment(patch)
    assert found.score > 10
    assert found.rank == 1
    assert EdgeState.of(tiles(patch)).alignment(patch).score == math.inf
    if patch == 8:
        moved = torch.roll(tiles(8, noise=0.02), (3, 3), dims=(2, 3))
        assert EdgeState.of(moved).alignment(8).score < 1
        assert EdgeState.of(moved).alignment(8).rank > 1


def test_noise_scores_about_one():
    noise = torch.randn(16, 3, 64, 64, generator=generator(5))
    for patch in (4, 8, 16):
        found = EdgeState.of(noise).alignment(patch)
        assert found.score == pytest.approx(1, abs=0.03)
        assert patch < 16 or abs(found.z) < 4  # the deviation of three shifted grids is noise


def test_alignment_states_add_up_and_missing_values_have_a_reason():
    delta = tiles(4, noise=0.3, num=6)
    parts = [EdgeState.of(part) for part in delta.split(2)]
    read = [EdgeState.of_arrays(read_arrays(to_table({"m": part}))["m"]) for part in parts]
    assert merge_all(read).alignment(4) == merge_all(parts).alignment(4)
    whole = EdgeState.of(delta)
    assert merge_all(parts).alignment(4).score == pytest.approx(whole.alignment(4).score)
    found = {m.metric: m for m in alignment_measurements(whole, patch_size=4)}
    assert found["score"].value == whole.alignment(4).score
    assert found["score"].n == 6
    still = alignment_measurements(EdgeState.of(torch.zeros(2, 3, 8, 8)), patch_size=4)
    assert [m.flags for m in still] == [("null: no perturbation",)] * 3
    exact = alignment_measurements(EdgeState.of(tiles(4)), patch_size=4)
    assert exact[0].flags == ("null: nothing changes inside patches",)
    with pytest.raises(CasemateError, match="patch_size: 17 does not tile images of 32x32"):
        whole.alignment(17)


def test_the_patch_is_that_of_the_network_in_pixels_of_the_images(new_net):
    how = PerturbationSettings()
    sides = {"vit": 4, "cait": 4, "beit": 4, "xcit": 8, "swin": 2}
    assert {name: patch_size_of(new_net(name), how, scale=1) for name in sides} == sides
    assert patch_size_of(new_net("xcit"), how, scale=4) == 2
    assert patch_size_of(new_net("resnet"), PerturbationSettings(patch_size=16), scale=1) == 16
    for name, scale in (("resnet", 1), ("users", 1), ("vit", 3), ("vit", 4)):
        with pytest.raises(CasemateError, match=r"patch_size: is missing: .*write"):
            patch_size_of(new_net(name), how, scale=scale)


class ShapeJudge(nn.Module):
    """Knows the class by the brightest of eight columns of the picture."""

    def forward(self, x):
        return x.mean(dim=(1, 2)).unflatten(1, (8, -1)).mean(dim=2)


def shape_bearing(num=24, size=16):
    """Perturbations that raise the columns of their class."""
    y = torch.arange(num) % 8
    delta = 0.2 * EPS * (2 * torch.rand(num, 3, size, size, generator=generator()) - 1)
    for row, label in enumerate(y.tolist()):
        delta[row, :, :, 2 * label : 2 * label + 2] += 0.8 * EPS
    return delta, y, [f"i{row:02d}" for row in range(num)]


def test_an_oracle_judge_reads_every_perturbation_of_its_sign():
    delta, y, ids = shape_bearing()
    judge = Judge("oracle", ShapeJudge(), (3, 16, 16))
    blind = Judge(
        "blind", lambda x: torch.zeros(len(x), 8).index_fill(1, torch.tensor(3), 1), (1, 8, 8)
    )
    pictures = to_picture(delta, eps=EPS)
    table = judged([judge], pictures, y, ids, top_k=5)
    found = {m.item: m.value for m in measurements(table, top_k=5, num_classes=8)}
    assert found == {"oracle/plus": 1.0, "oracle/minus": pytest.approx(0, abs=0.5), "chance": 5 / 8}
    one = judged([judge], pictures, y, ids, top_k=1)
    found = {m.item: m.value for m in measurements(one, top_k=1, num_classes=8)}
    assert found["oracle/plus"] == 1
    assert found["oracle/minus"] == 0
    gray_pictures = pictures.mean(dim=1, keepdim=True)
    dumb = judged([blind], gray_pictures, y, ids, top_k=1)
    assert {m.value for m in measurements(dumb, top_k=1, num_classes=8)} == {1 / 8}
    assert dumb.column("prediction").to_pylist() == [3] * 48


def test_top_k_hits_against_a_loop():
    weights = torch.randn(3 * 16 * 16, 12, generator=generator(4))
    logits_of = lambda x: x.flatten(1) @ weights  # noqa: E731
    delta, y, ids = shape_bearing()
    pictures = to_picture(delta, eps=EPS)
    table = judged([Judge("j", logits_of, (3, 16, 16))], pictures, y, ids, top_k=3)
    for row in table.to_pylist():
        place = ids.index(row["item_id"])
        picture = pictures[place] if row["sign"] == 1 else to_picture(-delta[place], eps=EPS)
        logits = logits_of(picture[None])[0].tolist()
        order = sorted(range(12), key=lambda c: (-logits[c], c))
        assert row["hit"] == (int(y[place]) in order[:3])
        assert row["prediction"] == order[0]


def test_judges_that_do_not_fit_are_refused():
    delta, y, ids = shape_bearing()
    pictures = to_picture(delta, eps=EPS)
    judge = Judge("oracle", ShapeJudge(), (3, 16, 16))
    with pytest.raises(CasemateError, match="top_k: 8 includes all 8 classes of judge oracle"):
        judged([judge], pictures, y, ids, top_k=8)
    with pytest.raises(CasemateError, match="judges: oracle has 8 classes, the data more"):
        judged([judge], pictures, y + 1, ids, top_k=5)
    with pytest.raises(CasemateError, match="1 channels do not fit pictures of 3"):
        fitted(pictures, (1, 16, 16))
    assert fitted(pictures, (3, 40, 40)).shape[-1] == 40
    assert fitted(pictures[:, :1], (3, 8, 8)).shape == (24, 3, 8, 8)


def linear_model(num_classes=6, shape=(3, 16, 16)):
    weights = 0.3 * torch.randn(math.prod(shape), num_classes, generator=generator(9))
    return lambda x: x.flatten(1) @ weights


@pytest.mark.parametrize("preset", ["thesis", "l2"])
def test_accumulation_reaches_its_targets_inside_the_pixel_range(preset):
    shape = (3, 16, 16)
    seeds = seed_images(shape, num_classes=6, num_images=10, seed=2)
    found = accumulate(linear_model(), seeds, AccumulationSettings(preset=preset))
    assert 0 <= float(found.images.min()) <= float(found.images.max()) <= 1
    assert (found.confidence > found.confidence_before).all()
    assert (found.confidence > 0.99).all()
    norms = (found.images.double() - seeds.x.double()).flatten(1).norm(dim=1)
    if preset == "l2":
        assert float(norms.max()) <= 15
        assert (norms > 8).all()  # most of the 100 steps of 0.5 point the same way


@pytest.mark.parametrize("preset", ["thesis", "l2"])
def test_accumulation_against_a_plain_loop(preset):
    model = linear_model()
    seeds = seed_images((3, 16, 16), num_classes=6, num_images=3, seed=4)
    found = accumulate(model, seeds, AccumulationSettings(preset=preset, num_steps=6)).images
    x = seeds.x.clone()
    if preset == "thesis":
        x = (x + 15 * (2 * seeds.uniform("accumulation start") - 1)).clamp(0, 1)
    for _ in range(6):
        x.requires_grad_()
        (grad,) = torch.autograd.grad(F.cross_entropy(model(x), seeds.y, reduction="sum"), x)
        x = x.detach()
        if preset == "thesis":
            x = (x - 0.225 * grad.sign()).clamp(0, 1)
        else:
            x = (x - 0.5 * grad / grad.flatten(1).norm(dim=1)[:, None, None, None]).clamp(0, 1)
    torch.testing.assert_close(found, x, atol=1e-5, rtol=0)


def test_the_first_image_of_the_thesis_is_black_and_white():
    seeds = seed_images((3, 32, 32), num_classes=3, num_images=4, seed=0)
    seen = []

    def logits_of(x):
        seen.append(x.detach().clone())
        return x.mean(dim=(2, 3))

    accumulate(logits_of, seeds, AccumulationSettings(num_steps=1))
    extreme = ((seen[0] == 0) | (seen[0] == 1)).double().mean()
    assert float(extreme) == pytest.approx(0.967, abs=0.005)
    step = (seen[1] - seen[0]).abs()
    assert float(step.max()) == pytest.approx(0.225)


def test_seeds_and_targets_are_fixed():
    one = seed_images((3, 8, 8), num_classes=100, num_images=5, seed=1)
    more = seed_images((3, 8, 8), num_classes=100, num_images=9, seed=1)
    assert torch.equal(more.x[:5], one.x)
    assert torch.equal(more.y[:5], one.y)
    assert len(set(more.y.tolist())) > 5
    assert not torch.equal(seed_images((3, 8, 8), num_classes=100, num_images=5, seed=2).x, one.x)
    with pytest.raises(SettingError, match="preset: paper is unknown"):
        AccumulationSettings(preset="paper")
