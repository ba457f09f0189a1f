"""Costs from shapes alone, against closed forms, hooks and real tensors."""

import pytest
import timm
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

from components.core.errors import CasemateError
from components.models.costs import Costs, costs_of_shapes, kept_sizes, network_of_shapes
from components.models.zoo import build_network

SMALL = {
    "tiny_vit": {"embed_dim": 16, "depth": 2, "num_heads": 2},
    "tiny_xcit": {"embed_dim": 16, "depth": 2, "num_heads": 2},
    "cait_s12_224": {"embed_dim": 32, "depth": 1},
    "wrn_28_10": {"layers": (1, 1, 1), "widths": (8, 16, 24)},
    "resnetv2_50x1_bit": {
        "channels": (128, 128, 128, 128)
    },  # standardises its kernels: no activation
    "swin_tiny_patch4_window7_224": {"depths": (2, 1), "num_heads": (2, 2), "embed_dim": 16},
    "beit_base_patch16_224": {"depth": 1, "embed_dim": 32, "num_heads": 2, "patch_size": 8},
}


def costs_of(name: str, *, image_size: int, channels: int = 3, **built: object) -> Costs:
    net = network_of_shapes(name, image_size=image_size, channels=channels, **built)
    return costs_of_shapes(net, image_size=image_size, channels=channels)


def small_costs(name: str, **changes: object) -> Costs:
    return costs_of(name, **{"image_size": 32, "num_classes": 7, "options": SMALL[name], **changes})


def real_network(name: str) -> nn.Module:
    return build_network(name, image_size=32, channels=3, num_classes=7, options=SMALL[name]).eval()


@settings(deadline=None, max_examples=10)
@given(
    depth=st.integers(1, 3),
    width=st.sampled_from([8, 24]),
    patch=st.sampled_from([4, 8]),
    channels=st.integers(1, 3),
)
def test_a_vit_costs_its_closed_form(depth, width, patch, channels):
    """Depth * (12 T d^2 + 2 T^2 d) multiply-accumulates in the blocks, plus embedding and head."""
    options = {"depth": depth, "embed_dim": width, "patch_size": patch, "num_heads": 2}
    found = costs_of("tiny_vit", image_size=32, channels=channels, num_classes=5, options=options)
    patches = (32 // patch) ** 2
    tokens = patches + 1
    blocks = depth * (12 * tokens * width**2 + 2 * tokens**2 * width)
    assert found.flops == blocks + patches * width * channels * patch**2 + width * 5
    linear = 12 * width**2 + 13 * width  # four maps with their biases, two norms
    embed = width * channels * patch**2 + width + (tokens + 1) * width
    assert found.params == depth * linear + embed + 2 * width + (width + 1) * 5


def multiply_accumulates(net: nn.Module, x: torch.Tensor) -> int:
    """Of convolutions and linear maps, by hooks on real layers."""
    total = 0

    def count(layer: nn.Module, _: object, output: torch.Tensor) -> None:
        nonlocal total
        per_output = layer.weight[0].numel()
        total += output.numel() * per_output

    handles = [
        m.register_forward_hook(count)
        for m in net.modules()
        if isinstance(m, nn.Conv2d | nn.Linear)
    ]
    net(x)
    for handle in handles:
        handle.remove()
    return total


@pytest.mark.parametrize("name", ["wrn_28_10", "resnet18", "convnext_atto"])
def test_convolutions_cost_what_hooks_count(name):
    options = SMALL.get(name, {})
    shape = {"image_size": 32, "channels": 3, "num_classes": 7, "options": options}
    net = build_network(name, **shape).eval()
    assert costs_of(name, **shape).flops == multiply_accumulates(net, torch.rand(1, 3, 32, 32))


def test_images_that_see_each_other_cost_what_one_alone_costs():
    """csatv2 multiplies a batch with itself: 2,744 of its 1.4 G grow with the number of images."""
    found = costs_of("csatv2", image_size=512, num_classes=1000).flops
    with torch.device("meta"), FlopCounterMode(display=False) as counter, torch.no_grad():
        timm.create_model("csatv2").eval()(torch.empty(1, 3, 512, 512))
    assert found == counter.get_total_flops() // 2


def test_what_images_share_is_not_charged_to_them():
    """XCiT's codes of positions pass a convolution once, whatever the batch."""
    options = SMALL["tiny_xcit"]
    shape = {"image_size": 32, "channels": 3, "num_classes": 7, "options": options}
    counts = []
    for size in (1, 2):
        with torch.device("meta"), FlopCounterMode(display=False) as counter, torch.no_grad():
            build_network("tiny_xcit", **shape).eval()(torch.empty(size, 3, 32, 32))
        counts.append(counter.get_total_flops() // 2)
    assert costs_of("tiny_xcit", **shape).flops == counts[1] - counts[0] < counts[0]


def test_kept_bytes_of_a_perceptron():
    """Both linear maps keep their inputs; the hidden one is also ReLU's, and counts once."""
    net = nn.Sequential(nn.Linear(3, 5), nn.ReLU(), nn.Linear(5, 2))
    assert sorted(kept_sizes(net, torch.rand(4, 3))) == [4 * 4 * 3, 4 * 4 * 5]
    assert kept_sizes(net[0].requires_grad_(False), torch.rand(4, 3)) == []


@pytest.mark.parametrize("name", sorted(SMALL))
def test_shapes_alone_give_the_memory_that_real_tensors_keep(name):
    net = real_network(name)
    kept = [sum(kept_sizes(net, torch.rand(size, 3, 32, 32))) for size in (2, 6)]
    assert 4 * small_costs(name).activation_bytes == kept[1] - kept[0]


def test_fused_attention_costs_as_much_work_and_less_memory():
    timm.layers.set_fused_attn(False)
    try:
        explicit = small_costs("tiny_vit")
    finally:
        timm.layers.set_fused_attn(True)
    fused = small_costs("tiny_vit")
    assert fused.flops == explicit.flops
    assert fused.activation_bytes < explicit.activation_bytes


def test_a_network_that_looks_at_values_is_named():
    with pytest.raises(
        CasemateError, match=r"model\.architecture: Gemma4VitClassifier depends on values"
    ):
        costs_of("gemma4_vit_167m", image_size=64, num_classes=7, options={"depth": 1})
