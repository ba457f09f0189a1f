"""A vision transformer whose only softmax is as sharp as one likes, and images that it gets right.

Two tokens: a constant class token and one patch token that holds m(x) = mean(a * (x - 1/2)), with
a = +-1 for every pixel. The patch token asks, both tokens answer: class 0 where its own key wins,
class 1 where the other does. The logits of the keys differ by kappa * m(x), and every image has
m = 0.02, so the gap is D = 0.02 * kappa. Moving all pixels by eps > 0.02 against a turns the sign
of m: an adversarial example exists for every image, whatever D is.
"""

import torch
from timm.models.vision_transformer import VisionTransformer
from torch import Tensor

SIDE, CHANNELS = 32, 3
LEAD = 0.02  # m of every image
SHARP = 10.0  # logit of the class whose key wins


def pixel_signs() -> Tensor:
    generator = torch.Generator().manual_seed(0)
    return 2.0 * torch.randint(2, (CHANNELS, SIDE, SIDE), generator=generator) - 1


def saturated_images(num_items: int) -> Tensor:
    """Images in [0, 1] with m(x) = LEAD."""
    generator = torch.Generator().manual_seed(1)
    signs = pixel_signs().double()
    x = 0.1 + 0.8 * torch.rand(num_items, CHANNELS, SIDE, SIDE, generator=generator).double()
    lead = (signs * (x - 0.5)).flatten(1).mean(dim=1).view(-1, 1, 1, 1)
    return (x + signs * (LEAD - lead)).float()


@torch.no_grad()
def saturated_attention(case: str, gap: float, *, fused: bool = False) -> VisionTransformer:
    """Case A: the gap is the winner's logit alone. B: half of it on either side, with both signs.

    C is B with a direct path around attention, (-5 m, +5 m) on the two logits: a pull in the other
    direction, negligible until attention stops answering.
    """
    one, asks, own, lead = range(4)  # channels: class token, (unused), patch token, m(x)
    net = VisionTransformer(
        img_size=SIDE,
        patch_size=SIDE,
        in_chans=CHANNELS,
        num_classes=2,
        embed_dim=4,
        depth=1,
        num_heads=1,
        mlp_ratio=1,
        qkv_bias=False,
        norm_layer=torch.nn.Identity,
        global_pool="avg",
        class_token=True,
    ).eval()
    for parameter in net.parameters():
        parameter.zero_()
    signs = pixel_signs()
    net.cls_token[..., one] = 1
    net.patch_embed.proj.weight[lead] = signs / signs.numel()
    net.patch_embed.proj.bias[lead] = -0.5 * signs.mean()
    net.patch_embed.proj.bias[own] = 1
    attn = net.blocks[0].attn
    attn.fused_attn = fused
    query, key, value = attn.qkv.weight.view(3, 4, 4)
    query[0, lead] = gap / LEAD / attn.scale  # timm multiplies by `scale` = 1/sqrt(4)
    key[0, own], key[0, one] = (1, 0) if case == "A" else (0.5, -0.5)
    value[0, own], value[1, one] = SHARP, SHARP
    # attention writes into channels that the residual stream leaves to it
    attn.proj.weight[one, 0], attn.proj.weight[asks, 1] = 1, 1
    net.head.weight[0, one], net.head.weight[1, asks] = 1, 1
    if case == "C":
        net.head.weight[0, lead], net.head.weight[1, lead] = -5, 5
    return net
