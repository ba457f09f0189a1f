"""What is said of networks without building them holds for the networks that are built."""

import random

import pytest

from components.analyze.blocks import find_blocks
from components.core.errors import CasemateError
from components.models.attention.discover import attention_of
from components.models.costs import network_of_shapes
from components.models.known import known_network, starts_from_timm
from components.models.names import OWN, VARIANTS, is_registered
from components.models.pretrained import read_parent
from components.models.tokens import check_droppable
from components.models.zoo import DENOISERS, is_known
from components.models.zoo import OWN as CLASSIFIERS

NAMES = [
    *("deit_tiny_patch16_224", "deit_small_patch16_224", "deit_base_patch16_224"),
    *("vit_tiny_patch16_224", "vit_tiny_patch32_224", "vit_small_patch16_224"),
    *("vit_small_patch32_224", "vit_base_patch16_224", "vit_base_patch32_224"),
    *("vit_large_patch16_224", "vit_large_patch32_224", "cait_s12_224", "cait_s24_224"),
    *("xcit_nano_12_p16_224", "xcit_nano_12_p8_224", "xcit_tiny_12_p16_224"),
    *("xcit_tiny_12_p8_224", "xcit_small_12_p16_224", "xcit_small_12_p8_224"),
    *("xcit_medium_12_p16_224", "xcit_medium_12_p8_224", "xcit_large_12_p16_224"),
    *("xcit_large_12_p8_224", "resnet18", "resnet50", "resnet101", "wide_resnet50_2"),
    *("wide_resnet101_2", "resnet18.tv_in1k", "resnet50.tv_in1k", "resnet101.tv_in1k"),
    *("wide_resnet50_2.tv_in1k", "wide_resnet101_2.tv_in1k", "resnet50_gelu"),
    *("vit_base_patch16_224.orig_in21k", "vit_base_patch32_224.orig_in21k"),
    *("vit_large_patch16_224.orig_in21k", "vit_large_patch32_224.orig_in21k"),
    *("vit_base_patch16_224.augreg_in1k", "vit_base_patch32_224.augreg_in1k"),
    "deit3_large_patch16_224.fb_in1k",
    *(f"resnetv2_{size}_bit.goog_in21k" for size in ("50x1", "50x3", "101x1", "101x3", "152x4")),
]
SMALL = {
    "tiny_vit": {
        "patch_size": [1, 2, 3, 4, 7, 8, 0, True, 4.0],
        "embed_dim": [8, 16, 30, 33],
        "depth": [1, 2, 0],
        "num_heads": [1, 2, 3, 4],
        "qkv_bias": [True],
    },
    "tiny_xcit": {
        "patch_size": [2, 4, 8, 1, 3],
        "embed_dim": [8, 16, 12, 30],
        "depth": [1, 2, 0],
        "num_heads": [1, 2, 3, 4],
        "cls_attn_layers": [1],
    },
    "deit_tiny_patch16_224": {
        "patch_size": [4, 8, 15, 16, None],
        "drop_path_rate": [0, 0.1, 1, True],
        "depth": [1, 3],
        "embed_dim": [48],
    },
    "xcit_nano_12_p16_224": {
        "stem_patch": [1, 2, 4, 3, 8, 16, 32],
        "drop_path_rate": [0, 0.1, -1],
        "patch_size": [8, 16, 4],
    },
    "preact_resnet18": {
        "layers": [[1, 1], [1], [1, 2, 1], [], 3],
        "widths": [[8, 16], [8, 16, 24], [7, 3], [5]],
    },
    "wrn_28_10": {"layers": [[1, 1], [1]], "widths": [[8, 16], [24]]},
    "tiny_unet": {
        "widths": [[8], [8, 16], [16, 32], [8, 12], [6], [8, 16, 24, 32]],
        "patch": [1, 2, 3, 4],
        "num_layers": [1],
    },
    "unet": {
        "block_out_channels": [[32, 64], [32], [64, 96], [32, 48]],
        "down_block_types": [["DownBlock2D", "AttnDownBlock2D"], ["DownBlock2D"], ["Other"]],
        "up_block_types": [["AttnUpBlock2D", "UpBlock2D"], ["UpBlock2D"]],
        "layers_per_block": [1, 2],
        "attention_head_dim": [8, 16, 64],
        "dropout": [0.0, 0.3],
    },
}


def assert_holds(architecture, options, side):
    """Build the network and ask it what was said of it; returns whether anything was said."""
    known = known_network(architecture, options, image_size=side)
    if known is None:
        return False
    net = network_of_shapes(architecture, image_size=side, num_classes=2, options=options)
    assert side % getattr(net, "stride", 1) == 0
    for said, ask in (
        (known.drops_tokens, check_droppable),
        (known.scales_attention, attention_of),
        (known.has_blocks, find_blocks),
    ):
        if said:
            ask(net)
        else:
            with pytest.raises(CasemateError):
                ask(net)
    return True


@pytest.mark.parametrize("name", NAMES)
def test_named_networks_are_what_is_said_of_them(name):
    assert is_known(name)
    assert assert_holds(name, {}, 224)
    assert assert_holds(name, {"drop_path_rate": 0.05}, 64)


@pytest.mark.parametrize("name", SMALL)
def test_options_that_are_accepted_can_be_built(name):
    """Seeded options, most of them wrong: what is accepted is built."""
    rng, said = random.Random(name), 0
    tried = set()
    for _ in range(600):
        keys = rng.sample(sorted(SMALL[name]), rng.randint(1, len(SMALL[name])))
        options = {key: rng.choice(SMALL[name][key]) for key in keys}
        side = rng.choice([7, 8, 16, 30, 32, 48])
        if (key := repr((sorted(options.items()), side))) not in tried and len(tried) < 200:
            tried.add(key)
            said += assert_holds(name, options, side)
    assert said >= 3


def test_patches_of_14_pixels():
    name = "vit_huge_patch14_224.orig_in21k"
    assert assert_holds(name, {}, 518)
    assert starts_from_timm(name, {})
    assert len(read_parent("timm", architecture=name).mean) == 3
    assert known_network(name, {}, image_size=384) is None


def test_nothing_is_said_of_other_networks():
    for name in ("swin_tiny_patch4_window7_224", "deit_tiny_distilled_patch16_224", "x"):
        assert known_network(name, {}, image_size=224) is None
    assert known_network("tiny_vit", {"patch_size": 3}, image_size=8) is None


TAGGED = [
    *("vit_base_patch16_224.augreg_in1k", "vit_huge_patch14_224.orig_in21k"),
    *("vit_large_patch32_224.orig_in21k", "resnetv2_152x4_bit.goog_in21k"),
]


def test_tagged_weights_are_known():
    assert all(starts_from_timm(name, {}) for name in TAGGED)


@pytest.mark.parametrize("name", [*NAMES, *TAGGED])
def test_weights_that_timm_is_said_to_have(name):
    if starts_from_timm(name, {}):
        assert len(read_parent("timm", architecture=name).mean) == 3
    assert not starts_from_timm(name, {"num_heads": 2})


def test_names_are_those_of_the_zoo():
    assert {*OWN} == {*CLASSIFIERS, *DENOISERS}
    assert all(map(is_registered, [*OWN, *VARIANTS, *NAMES]))
    assert not is_registered("resnet50.nonesuch")
