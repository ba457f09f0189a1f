"""Lean passes: timm's logits and gradients, timm's own path wherever somebody looks inside."""

import copy

import pytest
import timm
import torch
from torch import nn

from components.models.attention.features import block_outputs
from components.models.attention.gaps import attention_gaps
from components.models.attention.lesions import removed
from components.models.attention.masks import masked_keys
from components.models.attention.scaling import attach_scales, scaled_attention
from components.models.fast import fast_forward, num_tokens_read
from components.models.tokens import forward_kept, kept_indices
from tests.unit.models.test_tokens_variants import (
    NUM_TOKENS,
    VARIANTS,
    random_images,
    random_keep,
    variant,
)

WHOLE = {  # the head reads all tokens, or the last block is not one of those that can be narrowed
    *("average", "average, no class token", "average with prefix", "average and maximum"),
    *("registers without positions", "attention pool", "attention pool with prefix"),
    *("refining pool", "parallel branches", "norm after each branch", "attention beside mlp"),
    *("differential attention beside mlp", "beit", "beit, shared bias", "beit, no bias"),
    *("beit, both biases and positions", "eva", "eva-02", "eva-02, norm after each branch"),
    *("rotations only", "rotations, registers", "rotations, attention pool"),
    "dinov3",
}
PLAIN = "class token"


def gradient(forward, images):
    """Of a sum in which each logit has a weight of its own."""
    leaf = images.clone().requires_grad_()
    logits = forward(leaf)
    weights = torch.randn(logits.shape, generator=torch.Generator().manual_seed(3)).to(logits)
    return logits.detach(), torch.autograd.grad((logits * weights).sum(), leaf)[0]


@pytest.mark.parametrize("label", VARIANTS)
def test_logits_and_gradients_are_those_of_timm(label):
    net = variant(label)
    for dtype, bound in ((torch.float64, 1e-12), (torch.float32, 1e-5)):
        images = random_images(dtype)
        net.to(dtype)
        if getattr(net, "rope_mixed", False):
            net.rope.float()  # timm computes learned rotations in single precision only
            bound = max(bound, 1e-6)
        expected = gradient(net, images)
        with fast_forward(net):
            found = gradient(net, images)
        for ours, theirs in zip(found, expected, strict=True):
            assert (ours - theirs).abs().max() <= bound * max(1, theirs.abs().max())
        assert all(map(torch.equal, gradient(net, images), expected))  # nothing is left behind


@pytest.mark.parametrize("label", VARIANTS)
def test_only_the_tokens_that_the_head_reads_leave_the_last_block(label):
    net, seen = variant(label), []
    read = 0 if label in WHOLE else 2 if label == "distilled" else 1
    assert num_tokens_read(net) == read
    net.norm.register_forward_pre_hook(lambda _, args: seen.append(args[0].shape[1]))
    net.patch_embed.proj._conv_forward = None  # whoever still convolves fails
    with fast_forward(net):
        net(random_images())
    assert seen == [read or net.num_prefix_tokens + NUM_TOKENS]


@pytest.mark.parametrize("unfused", [False, True])
@pytest.mark.parametrize("options", [{"qkv_bias": False}, {"qk_norm": True}, {"init_values": 0.3}])
def test_options_of_blocks(options, unfused):
    torch.manual_seed(0)
    size = {"img_size": 16, "patch_size": 4, "embed_dim": 16, "depth": 2, "num_heads": 2}
    net = timm.create_model("vit_tiny_patch16_224", num_classes=5, **size, **options)
    net.double().eval()
    for block in net.blocks:
        block.attn.fused_attn = not unfused
    expected = net(random_images())
    with fast_forward(net):
        assert (net(random_images()) - expected).abs().max() < 1e-12


def watchers(net):
    """Contexts that read or change a network, each with what it read."""
    scales = torch.tensor([0.5, 3.0], dtype=torch.float64)
    keys = torch.ones(1, net.num_prefix_tokens + NUM_TOKENS, dtype=torch.bool)
    keys[:, 4] = False
    return {
        "scaled": lambda: scaled_attention(net, scales),
        "masked": lambda: masked_keys(net, keys),
        "gaps": lambda: attention_gaps(net),
        "features": lambda: block_outputs(net),
        "without block": lambda: removed(net, [(1, "block")]),
        "without attention": lambda: removed(net, [(1, "attn")]),
        "without mlp": lambda: removed(net, [(1, "mlp")]),
    }


def told(watched):
    """What a watcher has read, as something that compares."""
    items = (watched or {}).items()
    return {k: v.detach() if isinstance(v, torch.Tensor) else v.counts for k, v in items}


@pytest.mark.parametrize("name", watchers(variant(PLAIN)))
@pytest.mark.parametrize("label", [PLAIN, "beit, class token", "eva-02, class token"])
def test_whoever_watches_sees_the_network_as_timm_wrote_it(label, name):
    net, images = variant(label), random_images()
    watch = watchers(net)[name]
    with watch() as reading:
        expected = net(images)
    with fast_forward(net), watch() as inside:
        within = net(images)
    with watch() as outside, fast_forward(net):
        around = net(images)
    for logits, other in ((within, inside), (around, outside)):
        assert (logits - expected).abs().max() < 1e-12
        assert told(other).keys() == told(reading).keys()
        for key, value in told(reading).items():
            assert value.shape == told(other)[key].shape
            assert (value - told(other)[key]).abs().max() < 1e-12
    if name not in ("gaps", "features"):
        assert (expected - net(images)).abs().max() > 1e-3


def test_attached_scales_stay_in_force():
    net, images = variant(PLAIN), random_images()
    unscaled = net(images)
    attach_scales(net, torch.tensor([0.5, 3.0], dtype=torch.float64))
    expected = net(images)
    with fast_forward(net):
        assert (net(images) - expected).abs().max() < 1e-12
    assert (expected - unscaled).abs().max() > 1e-3


@pytest.mark.parametrize("label", [PLAIN, "beit, class token", "eva-02, class token"])
def test_dropped_tokens_stay_dropped(label):
    net, kept = variant(label), kept_indices(random_keep(5))
    expected = forward_kept(net, random_images(), kept)
    with fast_forward(net):
        assert (forward_kept(net, random_images(), kept) - expected).abs().max() < 1e-12


def test_nesting_and_training_mode():
    net, images = variant(PLAIN), random_images()
    expected, state = net(images), copy.deepcopy(net.state_dict())
    with fast_forward(net), fast_forward(net):
        assert (net(images) - expected).abs().max() < 1e-12
        net.train()
        assert (net(images) - expected).abs().max() < 1e-12
        net.eval()
    assert all(torch.equal(state[key], value) for key, value in net.state_dict().items())
    with pytest.raises(ZeroDivisionError), fast_forward(net):
        _ = 1 / 0
    assert torch.equal(net(images), expected)


def test_other_networks_run_as_they_are():
    swin = {"img_size": 32, "window_size": 4, "depths": (1, 1), "num_heads": (2, 2)}
    for name, options in (("resnet10t", {}), ("swin_tiny_patch4_window7_224", swin)):
        torch.manual_seed(0)
        net = timm.create_model(name, num_classes=5, **options).double().eval()
        images = torch.rand(2, 3, 32, 32, dtype=torch.float64)
        expected = net(images)
        assert num_tokens_read(net) == 0
        with fast_forward(net):
            assert (net(images) - expected).abs().max() < 1e-12


def test_a_hooked_stem_and_odd_sizes_take_the_convolution():
    net = variant("any image size")
    expected = net(random_images())
    hook = net.patch_embed.proj.register_forward_hook(lambda _, args, output: 2 * output)
    with fast_forward(net):
        assert (net(random_images()) - expected).abs().max() > 1e-3
        hook.remove()
        conv: nn.Module = net.patch_embed.proj
        odd = torch.rand(2, 3, 18, 17, dtype=torch.float64)
        assert conv(odd).shape[2:] == (4, 4)
