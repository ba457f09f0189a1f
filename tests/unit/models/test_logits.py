"""Votes and attacks need finite logits that each image has by itself."""

import pytest
import torch
from torch import nn

from components.core.errors import CasemateError
from components.models.logits import check_independent_rows, check_logits
from components.models.pixels import PixelModel
from pipelines import api
from tests.unit.networks import SMALL_SPEC, scattered

SIDE, CLASSES = 8, 4


class Head(nn.Module):
    """A linear classifier of pixels that `change` mixes, rescales or leaves alone."""

    def __init__(self, change):
        super().__init__()
        self.change, self.head = change, nn.Linear(3 * SIDE * SIDE, CLASSES)

    def forward(self, x):
        return self.head(self.change(x).flatten(1))


class Counts(nn.Module):
    """Adds the number of earlier calls, from a buffer that is replaced or changed in place."""

    def __init__(self, *, in_place, matters=True):
        super().__init__()
        self.register_buffer("calls", torch.zeros(()))
        self.in_place, self.matters = in_place, matters

    def forward(self, x):
        if self.in_place:
            self.calls += 1
        else:
            self.calls = self.calls + 1
        return x + self.calls if self.matters else x


def first_row_shift(x):
    return x - x[:1]


def divide_if_bytes(x):
    return x / 255 if x.max() > 1 else x  # guesses the range from the whole batch


MIXING = {
    "batch maximum": lambda x: x / x.max().clamp(min=1e-6),
    "batch mean": lambda x: x - x.mean(dim=0),
    "first row": first_row_shift,
    "batch size": lambda x: x * len(x),
    "sorted batch": lambda x: x.sort(dim=0).values,
    "batch statistics": nn.BatchNorm2d(3, track_running_stats=False, affine=False),
    "weights over the batch": lambda x: x * x.flatten(1).mean(dim=1).softmax(0).view(-1, 1, 1, 1),
}
HONEST = {
    "pixels": nn.Identity(),
    "own maximum": lambda x: x / x.amax(dim=(1, 2, 3), keepdim=True).clamp(min=1e-6),
    "layer norm": nn.LayerNorm([3, SIDE, SIDE]),
    "group norm": nn.GroupNorm(1, 3),
    "running statistics": nn.BatchNorm2d(3),
    "large values": lambda x: 1e6 * x,
    "unused counter": Counts(in_place=True, matters=False),
}


def made(change):
    torch.manual_seed(0)
    return Head(change).eval()


def check(net, **options):
    images = torch.rand(2, 3, SIDE, SIDE, generator=torch.Generator().manual_seed(1))
    check_independent_rows(net, images, network=net, name="net", **options)


@pytest.mark.parametrize("change", MIXING)
def test_networks_that_mix_images_are_refused(change):
    for options in ({}, {"may_be_random": True}):
        with pytest.raises(CasemateError, match=r"^model: net gives an image other logits") as e:
            check(made(MIXING[change]), **options)
        assert "\n" not in str(e.value)


@pytest.mark.parametrize("change", HONEST)
def test_networks_of_single_images_pass(change):
    check(made(HONEST[change]))


@pytest.mark.parametrize("by", [0.0, 0.3, 3.0])
def test_transformers_pass(by):
    model = scattered(lambda: PixelModel(SMALL_SPEC), by=by)
    check_independent_rows(model, torch.rand(2, 3, 16, 16), network=model, name="net")


def test_noise_beyond_the_range_can_reveal_a_network():
    net = made(divide_if_bytes)
    check(net)  # pixels in [0, 1] alone do not
    with pytest.raises(CasemateError, match="beside bright images"):
        check(net, beyond=1.0)


def test_random_and_stateful_networks_are_no_functions():
    for change in (nn.functional.dropout, Counts(in_place=True), Counts(in_place=False)):
        with pytest.raises(CasemateError, match="random or keeps a state"):
            check(made(change))
        check(made(change), may_be_random=True)  # `rand` attacks them


def test_a_neighbour_must_not_spread_nan():
    with pytest.raises(CasemateError, match="beside bright images"):
        check(made(lambda x: x + 0 / x.sum(dim=(1, 2, 3)).min()))  # a black image divides by 0
    check(made(lambda x: x * torch.nan))  # left to the votes, which name the item


@pytest.mark.parametrize("in_place", [True, False])
def test_the_probe_leaves_everything_as_it_was(in_place):
    counter = Counts(in_place=in_place, matters=False)
    net = made(nn.Sequential(counter, nn.Dropout(0.5), nn.BatchNorm2d(3)))
    kept, stream = counter.calls, torch.random.get_rng_state()
    before = {name: value.clone() for name, value in net.state_dict().items()}
    modes = [module.training for module in net.modules()]
    check(net)
    assert counter.calls is kept
    assert all(torch.equal(value, before[name]) for name, value in net.state_dict().items())
    assert torch.equal(torch.random.get_rng_state(), stream)
    assert [module.training for module in net.modules()] == modes
    assert all(p.grad is None and p.requires_grad for p in net.parameters())


def test_logits_that_are_not_finite_name_their_item():
    logits = torch.tensor([[1.0, 2.0], [torch.inf, 0.0]])
    with pytest.raises(CasemateError, match=r"^model: item 'b' gets logits that are not finite"):
        check_logits(logits, ("a", "b"))
    with pytest.raises(CasemateError, match="row 1"):
        check_logits(logits)


IMAGES = torch.randint(
    256, (3, 3, SIDE, SIDE), dtype=torch.uint8, generator=torch.Generator().manual_seed(2)
)
LABELS = torch.tensor([0, 1, 2])
PATCHES = {
    "columns": {"band": 2},
    "rows": {"band": 2},
    "blocks": {"band": 3},
    "both": {"band": 2},
    "double_masking": {"mask_patch": 1, "num_masks": 3},
}


@pytest.mark.parametrize("kind", PATCHES)
def test_no_patch_certificate_for_networks_that_mix_images(kind):
    for change in ("batch maximum", "batch statistics"):
        model = api.load_model(made(MIXING[change]), image_size=SIDE)
        with pytest.raises(CasemateError, match="Head gives an image other logits"):
            api.certify_patch(model, IMAGES, LABELS, patch_sizes=[1], kind=kind, **PATCHES[kind])


def test_no_l2_certificate_for_networks_that_mix_images():
    for change in (MIXING["batch maximum"], divide_if_bytes):
        model = api.load_model(made(change), image_size=SIDE)
        with pytest.raises(CasemateError, match="Head gives an image other logits"):
            api.certify_l2(model, IMAGES, LABELS, sigma=0.25, num_estimate=100, radii=[0.1])


def test_no_attack_on_networks_that_mix_images():
    model = api.load_model(made(MIXING["batch statistics"]), image_size=SIDE)
    with pytest.raises(CasemateError, match="Head gives an image other logits"):
        api.attack(model, IMAGES / 255, LABELS, eps="8/255", attacks="pgd-5")


def nan_where_black(x):
    """0 / 0 where an ablation leaves nothing to see; other images are rescaled by their mean."""
    return x / x.mean(dim=(1, 2, 3), keepdim=True)


@pytest.mark.parametrize("kind", PATCHES)
@pytest.mark.parametrize("value", [torch.nan, torch.inf, None])
def test_logits_that_are_not_finite_are_not_votes(kind, value):
    change = nan_where_black if value is None else lambda x: x + value
    model = api.load_model(made(change), image_size=SIDE)
    dark = IMAGES.clone()
    dark[1, :, : SIDE // 2] = dark[1, :, :, SIDE // 2 :] = 0  # seen nowhere by some ablations
    if kind == "double_masking":
        dark[1] = 0
    with pytest.raises(CasemateError) as e:
        api.certify_patch(
            model, dark, LABELS, patch_sizes=[1], kind=kind, item_ids="abc", **PATCHES[kind]
        )
    item = "b" if value is None else "a"
    assert str(e.value).startswith(f"model: item {item!r} gets logits that are not finite")


def test_votes_that_stop_early_name_their_item():
    model = api.load_model(made(nan_where_black), image_size=SIDE)
    dark = IMAGES.clone()
    dark[2] = 0
    with pytest.raises(CasemateError, match="item 'c' gets logits"):
        api.certify_patch(
            model, dark, LABELS, patch_sizes=[1], band=2, stop_early=True, item_ids="abc"
        )
