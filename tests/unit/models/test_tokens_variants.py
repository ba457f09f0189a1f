"""Token dropping in every timm variant that allows it: equal to barring the dropped keys."""

import pytest
import timm
import torch
from timm.models.beit import Beit

from components.core.errors import CasemateError
from components.models.attention.masks import masked_keys
from components.models.attention.scaling import scaled_attention
from components.models.tokens import check_droppable, forward_kept, kept_indices, patch_size_of

SIZE = {"img_size": 16, "patch_size": 4, "embed_dim": 16, "depth": 2, "num_heads": 2}
NUM_TOKENS = 16

VARIANTS = {
    "class token": ("deit_tiny_patch16_224", {}),
    "average": ("vit_tiny_patch16_224", {"global_pool": "avg"}),
    "average, no class token": (
        "vit_tiny_patch16_224",
        {"global_pool": "avg", "class_token": False},
    ),
    "average with prefix": (
        "vit_tiny_patch16_224",
        {"global_pool": "avg", "pool_include_prefix": True},
    ),
    "average and maximum": ("vit_tiny_patch16_224", {"global_pool": "avgmax"}),
    "distilled": ("deit_tiny_distilled_patch16_224", {}),
    "no_embed_class": ("deit3_small_patch16_224", {}),
    "registers": ("vit_tiny_patch16_224", {"reg_tokens": 3}),
    "registers without positions": ("vit_medium_patch16_reg4_gap_256", {}),
    "no position embedding": ("vit_tiny_patch16_224", {"pos_embed": "none"}),
    "norm before the blocks": ("vit_base_patch16_clip_224", {}),
    "any image size": ("vit_tiny_patch16_224", {"dynamic_img_size": True}),
    "attention pool": ("vit_base_patch16_siglip_224", {}),
    "attention pool with prefix": (
        "vit_tiny_patch16_224",
        {"global_pool": "map", "pool_include_prefix": True, "reg_tokens": 1},
    ),
    "refining pool": ("vit_tiny_patch16_224", {"global_pool": "prr"}),
    "parallel branches": ("vit_small_patch16_18x2_224", {}),
    "norm after each branch": ("vit_base_patch16_rpn_224", {}),
    "attention beside mlp": ("vit_base_patch16_xp_224", {}),
    "differential attention": ("vit_tiny_patch16_224", {"attn_layer": "diff"}),
    "differential attention beside mlp": ("vit_dpwee_patch16_reg1_gap_256", {}),
    "beit": ("beit_base_patch16_224", {}),
    "beit, class token": ("beitv2_base_patch16_224", {"global_pool": "token"}),
    "beit, shared bias": (
        "beit_base_patch16_224",
        {"use_rel_pos_bias": False, "use_shared_rel_pos_bias": True},
    ),
    "beit, both biases and positions": (
        "beit_base_patch16_224",
        {"use_shared_rel_pos_bias": True, "use_abs_pos_emb": True},
    ),
    "beit, no bias": (
        "beit_base_patch16_224",
        {"use_rel_pos_bias": False, "use_abs_pos_emb": True, "init_values": None},
    ),
    "eva": ("eva_giant_patch14_224", {}),
    "eva-02": ("eva02_tiny_patch14_224", {}),
    "eva-02, class token": ("eva02_base_patch16_clip_224", {}),
    "eva-02, norm after each branch": ("eva02_enormous_patch14_clip_224", {}),
    "rotations only": ("eva02_tiny_patch14_224", {"use_abs_pos_emb": False}),
    "rotations learned by block": ("vit_small_patch16_rope_mixed_224", {}),
    "rotations and positions by block": ("vit_small_patch16_rope_mixed_ape_224", {}),
    "rotations, registers": ("vit_medium_patch16_rope_reg1_gap_256", {}),
    "rotations, attention pool": ("vit_pe_core_tiny_patch16_384", {}),
    "rotations, grouped keys": ("vit_5b_patch16_sapiens2", {"num_kv_heads": 1}),
    "dinov3": ("vit_small_patch16_dinov3", {}),
}


def new_net(name, **options):
    """A small network in eval mode; fresh timm weights are so small that all logits agree."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        net = timm.create_model(name, num_classes=5, **{**SIZE, **options})
        with torch.no_grad():
            for parameter in net.parameters():
                parameter.add_(torch.randn_like(parameter), alpha=0.2)
    return net.eval()


def variant(label, dtype=torch.float64):
    name, options = VARIANTS[label]
    net = new_net(name, **options).to(dtype)
    if getattr(net, "rope_mixed", False):
        net.rope.float()  # timm computes learned rotations in single precision only
    return net


def random_images(dtype=torch.float64):
    return torch.randn(3, 3, 16, 16, generator=torch.Generator().manual_seed(1)).to(dtype)


def random_keep(count):
    """(3, N) bool: `count` tokens per row, other ones in each row."""
    order = torch.rand(3, NUM_TOKENS, generator=torch.Generator().manual_seed(2)).argsort(dim=1)
    return torch.zeros(3, NUM_TOKENS, dtype=torch.bool).scatter(1, order[:, :count], True)


def visible_pixels(keep):
    return keep.view(-1, 1, 4, 4).repeat_interleave(4, dim=2).repeat_interleave(4, dim=3)


def logits_with_barred_keys(net, images, keep):
    """All tokens pass all blocks, the dropped ones barred as keys; the head sees the kept ones."""
    seen = torch.cat([torch.ones(3, net.num_prefix_tokens, dtype=torch.bool), keep], dim=1)
    bars = torch.zeros(seen.shape, dtype=images.dtype).masked_fill(~seen, float("-inf"))
    bars = bars[:, None, None, :].expand(-1, -1, seen.shape[1], -1)
    if isinstance(net, Beit):
        tokens = net.patch_embed(images)
        tokens = torch.cat([net.cls_token.expand(3, -1, -1), tokens], dim=1)
        tokens = tokens if net.pos_embed is None else tokens + net.pos_embed
        bias = bars if net.rel_pos_bias is None else bars + net.rel_pos_bias()
        for block in net.blocks:
            tokens = block(tokens, shared_rel_pos_bias=bias)
        tokens = net.norm(tokens)
    else:
        tokens = net.forward_features(images, attn_mask=bars)
    return net.forward_head(tokens[seen].view(3, -1, tokens.shape[2]))


@pytest.mark.parametrize("label", VARIANTS)
@pytest.mark.parametrize(("dtype", "bound"), [(torch.float64, 1e-9), (torch.float32, 1e-5)])
def test_dropping_equals_barred_attention_keys(label, dtype, bound):
    net, images = variant(label, dtype), random_images(dtype)
    check_droppable(net)
    assert patch_size_of(net) == (4, 4)
    for count in (1, 5, 15):
        keep = random_keep(count)
        dropped = forward_kept(net, images, kept_indices(keep))
        expected = logits_with_barred_keys(net, images, keep)
        assert (dropped - expected).abs().max() < bound * max(1, expected.abs().max())
        black = torch.where(visible_pixels(keep), images, torch.zeros((), dtype=dtype))
        assert torch.equal(forward_kept(net, black, kept_indices(keep)), dropped)
        assert (net(black) - dropped).abs().max() > 1e-3  # black tokens take part in attention


@pytest.mark.parametrize("label", VARIANTS)
def test_keeping_all_tokens_is_the_plain_forward_pass(label):
    net, images = variant(label, torch.float32), random_images(torch.float32)
    if net.num_prefix_tokens == 0:  # bit equality needs equal layout: timm passes a transposed view
        net.norm_pre.register_forward_pre_hook(lambda _, inputs: inputs[0].contiguous())
    everything = torch.arange(NUM_TOKENS).expand(3, -1)
    assert torch.equal(forward_kept(net, images, everything), net(images))


@pytest.mark.parametrize("label", VARIANTS)
def test_gradients_equal_those_of_barred_keys(label):
    net, keep = variant(label), random_keep(5)
    weights = torch.randn(3, 5, dtype=torch.float64, generator=torch.Generator().manual_seed(3))

    def gradients(forward):
        images = random_images().requires_grad_()
        wanted = [images, *net.parameters()]
        return torch.autograd.grad((forward(images) * weights).sum(), wanted, allow_unused=True)

    dropped = gradients(lambda images: forward_kept(net, images, kept_indices(keep)))
    expected = gradients(lambda images: logits_with_barred_keys(net, images, keep))
    for ours, theirs in zip(dropped, expected, strict=True):
        assert (ours is None) == (theirs is None)
        if ours is not None:
            bound = 1e-9 if ours.dtype == torch.float64 else 1e-5  # learned rotations
            assert (ours - theirs).abs().max() <= bound * max(1, theirs.abs().max())
    assert not dropped[0][~visible_pixels(keep).expand(-1, 3, -1, -1)].any()


FAMILIES = ["class token", "beit, both biases and positions", "eva-02"]
NOISE = ["drop_path_rate", "proj_drop_rate", "attn_drop_rate", "pos_drop_rate", "drop_rate"]


@pytest.mark.parametrize("label", FAMILIES)
@pytest.mark.parametrize("noise", NOISE)
def test_training_noise_is_active_and_every_weight_learns(label, noise):
    name, options = VARIANTS[label]
    net = new_net(name, **options, **{noise: 0.3}).train()
    kept = kept_indices(random_keep(5))

    def seeded(seed):
        torch.manual_seed(seed)
        return forward_kept(net, random_images(torch.float32), kept)

    with torch.random.fork_rng(devices=[]):
        first, again, other = seeded(0), seeded(0), seeded(1)
    assert torch.equal(first, again)
    assert not torch.equal(first, other)
    first.square().sum().backward()
    assert all(parameter.grad is not None for parameter in net.parameters())
    assert all(parameter.grad.isfinite().all() for parameter in net.parameters())


@pytest.mark.parametrize("label", FAMILIES)
def test_gradient_checkpointing_repeats_blocks_without_changing_gradients(label):
    net, kept = variant(label).train(), kept_indices(random_keep(5))
    calls = []
    net.blocks[0].register_forward_pre_hook(lambda *_: calls.append(1))

    def gradients():
        calls.clear()
        loss = forward_kept(net, random_images(), kept).square().sum()
        return torch.autograd.grad(loss, list(net.parameters()))

    plain = gradients()
    assert len(calls) == 1
    net.set_grad_checkpointing(True)
    assert all(torch.equal(a, b) for a, b in zip(gradients(), plain, strict=True))
    assert len(calls) == 2


def test_the_relative_bias_also_reaches_unfused_attention():
    net, images, keep = variant("beit, both biases and positions"), random_images(), random_keep(5)
    fused = forward_kept(net, images, kept_indices(keep))
    for block in net.blocks:
        block.attn.fused_attn = False
    assert (forward_kept(net, images, kept_indices(keep)) - fused).abs().max() < 1e-9


def test_the_whole_bias_is_back_after_dropping():
    net, images, kept = variant("beit"), random_images(), kept_indices(random_keep(5))
    before = net(images)
    forward_kept(net, images, kept)
    assert torch.equal(net(images), before)
    hook = net.blocks[0].attn.proj.register_forward_pre_hook(lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        forward_kept(net, images, kept)
    hook.remove()
    assert torch.equal(net(images), before)


@pytest.mark.parametrize("label", ["class token", "beit, class token", "eva-02, class token"])
def test_attention_can_be_scaled_and_masked_while_tokens_are_dropped(label):
    net, images, keep = variant(label), random_images(), random_keep(5)
    kept = kept_indices(keep)
    with scaled_attention(net, torch.tensor([0.5, 2.0], dtype=torch.float64)):
        scaled = forward_kept(net, images, kept)
        expected = logits_with_barred_keys(net, images, keep)
    assert (scaled - expected).abs().max() < 1e-9
    allowed = torch.tensor([[True, True, True, True, True, False]]).expand(3, -1)
    with masked_keys(net, allowed):  # barring one more token is dropping it
        barred = forward_kept(net, images, kept)
    assert (barred - forward_kept(net, images, kept[:, :4])).abs().max() < 1e-9


def test_only_kept_tokens_pass_the_blocks():
    for label in FAMILIES:
        net, passed = variant(label), []
        for block in net.blocks:
            block.register_forward_pre_hook(lambda _, inputs, seen=passed: seen.append(inputs[0]))
        forward_kept(net, random_images(), kept_indices(random_keep(5)))
        assert [tokens.shape[1] for tokens in passed] == [1 + 5] * len(net.blocks)


@pytest.mark.parametrize(
    ("name", "options", "told"),
    [
        ("swin_tiny_patch4_window7_224", {"depths": (1, 1, 1, 1)}, "SwinTransformer is not one"),
        ("convnext_atto", {"depths": (1, 1, 1, 1)}, "ConvNeXt is not one"),
        ("cait_xxs24_224", {"depth": 1}, "Cait is not one"),
        ("xcit_nano_12_p16_224", {"depth": 1}, "Xcit is not one"),
        ("levit_128s", {}, "LevitDistilled is not one"),
        ("resnet18", {}, "ResNet is not one"),
        ("vit_relpos_small_patch16_224", {"depth": 1}, "VisionTransformerRelPos is not one"),
        ("vit_tiny_r_s16_p8_224", {"depth": 1}, "VisionTransformer with the stem HybridEmbed"),
    ],
)
def test_networks_that_mix_tokens_otherwise_are_refused(name, options, told):
    with torch.device("meta"):
        net = timm.create_model(name, **options)
    with pytest.raises(CasemateError, match=f"drop needs .*{told}.*; use token_policy: mask"):
        check_droppable(net)


@pytest.mark.parametrize(
    ("name", "options", "told"),
    [
        ("vit_tiny_patch16_224", {"patch_drop_rate": 0.1}, "patch_drop_rate of VisionTransformer"),
        ("eva02_tiny_patch14_224", {"patch_drop_rate": 0.1}, "patch_drop_rate of Eva"),
        ("vit_tiny_patch16_224", {"img_size": 18}, r"multiple of the patch side \(4, 4\)"),
        ("vit_tiny_patch16_224", {"dynamic_img_pad": True}, "without padding"),
    ],
)
def test_options_that_move_or_remove_tokens_are_refused(name, options, told):
    with pytest.raises(CasemateError, match=f"{told}.*; use token_policy: mask"):
        check_droppable(new_net(name, **options))


def test_a_mask_without_any_visible_pixel_is_refused():
    with pytest.raises(ValueError, match="no token holds a visible pixel"):
        kept_indices(torch.zeros(2, NUM_TOKENS, dtype=torch.bool))


def test_a_network_nobody_checked_is_refused():
    with pytest.raises(ValueError, match="ResNet is not droppable"):
        forward_kept(timm.create_model("resnet10t"), random_images(), torch.zeros(3, 1))
